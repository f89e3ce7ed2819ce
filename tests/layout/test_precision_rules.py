"""The `[[precision]]` rules: from the file to the layers that follow them, and what is wrong with
them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import spmd
from spmd import Precision
from spmd.errors import LayoutError, OptionError
from spmd.layout.precision import PRODUCTS
from spmd.layout.toml_reader import loads
from spmd.layout.toml_writer import dumps
from spmd.train.precision import compute_dtype

X = np.zeros((8, 16), np.float32)


class Net(nnx.Module):
    """Layers of which one is never called, one has a product of its own, and one asks for a
    precision.
    """

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.stack = spmd.nn.LayerStack([nnx.Linear(16, 16, rngs=rngs) for _ in range(2)])
        self.norm, self.unused = nnx.LayerNorm(16, rngs=rngs), nnx.Linear(16, 16, rngs=rngs)
        self.own = nnx.Linear(16, 16, rngs=rngs, dot_general=own_product)
        self.precise, self.tail = (
            nnx.Linear(16, 16, rngs=rngs, precision="highest"),
            nnx.Linear(16, 16, rngs=rngs),
        )

    def __call__(self, x):
        return self.tail(self.precise(self.own(self.norm(self.stack(x)))))


def own_product(*args, **kwargs):
    return jax.lax.dot_general(*args, **kwargs)


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(4, name="out")(
            linen.Dense(16, name="own", dot_general_cls=lambda: own_product)(x)
        )


def prepared(*rules, model=lambda: Net()):
    layout = spmd.Layout(precision=rules, source="mine.toml")
    trainer = spmd.Trainer(
        model,
        loss=lambda model, batch: model(batch).mean(-1),
        optimizer=optax.sgd(0.1),
        mesh="data=8",
        layout=layout,
    )
    trainer.prepare(X)
    return trainer


def test_rules_round_trip():
    layout = spmd.Layout(
        precision=tuple(Precision(f"blocks/{name}", name, ("**/router",)) for name in PRODUCTS)
    )
    assert loads(dumps(layout)) == layout != spmd.Layout()
    assert (
        '[[precision]]\npath = "blocks/int8"\nproducts = "int8"\nexcept = ["**/router"]'
        in dumps(layout)
    )
    assert "blocks/int8" in layout._repr_html_() and "products in int8" in layout._repr_html_()


def test_what_cannot_be_read(golden):
    text = (
        '[[precision]]\nproducts = "int8"\n\n[[precision]]\npath = "a"\n\n[[precision]]\npath = '
        '"b"\nproducts = "float4"\n\n'
        '[[precision]]\npath = "c"\nproduct = "int8"\nproducts = "bfloat17"\n'
    )
    with pytest.raises(LayoutError) as caught:
        loads(text, "mine.toml")
    golden("precision_that_cannot_be_read", str(caught.value))
    with pytest.raises(OptionError, match="products='float4'"):
        Precision("a", "float4")


MISFITS = {
    "no module": [Precision("stak/**", "int8")],
    "a module without products": [Precision("norm", "int8")],
    "a layer that is not called": [Precision("unused", "int8")],
    "a product of its own": [Precision("own", "float8")],
    "two rules": [Precision("stack/**", "int8"), Precision("{stack/layers,tail}", "float8")],
    "an except for nothing": [
        Precision("{stack,tail}/**", "int8"),
        Precision("tail", "int8", ("tale", "stack/layers")),
    ],
    "an except for all": [Precision("stack/**", "int8", ("**",))],
    "parameters": [Precision("**/kernel", "int8"), Precision("tail/bias", "int8")],
    "a precision": [Precision("precise", "bfloat16")],
}


@pytest.mark.parametrize("name", MISFITS)
def test_rules_that_do_not_fit(name, golden):
    with pytest.raises(LayoutError) as caught:
        prepared(*MISFITS[name])
    golden(f"precision_for_{name.replace(' ', '_')}", str(caught.value))


def test_fixes_of_rules_that_do_not_fit():
    prepared(Precision("stack/layers", "int8"))
    prepared(
        Precision("stack/**", "int8"), Precision("{stack/layers,tail}", "float8", ("stack/layers",))
    )
    prepared(Precision("**", "int8", ("own", "precise")))
    prepared(Precision("tail", "int8"))
    with pytest.raises(LayoutError, match="own computes"):
        prepared(Precision("**", "int8", ("precise",)))


def test_product_of_its_own_in_linen():
    with pytest.raises(LayoutError, match="own computes its products by a function of its own"):
        prepared(Precision("own", "int8"), model=LinenNet())
    prepared(Precision("**", "int8", ("own",)), model=LinenNet())


def test_a_layer_that_only_the_loss_multiplies_is_a_note():
    def loss(model, batch):
        return (model.stack(batch) @ model.unused.kernel[...]).mean(-1)

    layout = spmd.Layout(
        precision=(Precision("{stack,unused}/**", "int8"), Precision("unused", "int8")),
        source="mine.toml",
    )
    with pytest.raises(LayoutError, match="never calls unused"):
        spmd.Trainer(
            lambda: Net(), loss=loss, optimizer=optax.sgd(0.1), mesh="data=8", layout=layout
        ).prepare(X)
    layout = spmd.Layout(precision=(Precision("{stack/**,unused}", "int8"),))
    trainer = spmd.Trainer(
        lambda: Net(), loss=loss, optimizer=optax.sgd(0.1), mesh="data=8", layout=layout
    )
    trainer.prepare(X)
    assert (
        "note: [[precision]] leaves unused as the model computes it, because the loss never calls "
        "it." in trainer.notes()
    )
    assert jnp.float32 == trainer.init().params["stack"]["layers"]["kernel"].dtype, (
        "weights stay in float32"
    )


RULES = {
    "params": spmd.Rule("**", ("data",)),
    "activations": spmd.Rule("**", ("data",)),
    "precision": Precision("**", "int8"),
}


@pytest.mark.parametrize("name", RULES)
def test_rules_are_a_tuple_or_a_list(name):
    rule = RULES[name]
    assert spmd.Layout(**{name: [rule]}) == spmd.Layout(**{name: (rule,)}) != spmd.Layout()
    kind = type(rule).__name__
    for value in (rule, "float8", None, ({"path": "**"},)):
        with pytest.raises(OptionError, match=rf"Layout: {name}=") as caught:
            spmd.Layout(**{name: value})
        assert caught.value.fix == f"a tuple of spmd.{kind}, such as {name}=(spmd.{kind}(...),)."


def test_precision_of_fit_names_the_rules_for_products():
    with pytest.raises(OptionError) as caught:
        compute_dtype("int8")
    said = (
        'no precision "int8".\n    fix: float32, bfloat16 or float16; products of weights in int8 '
        "are of the layout: "
    )
    assert str(caught.value) == said + '[[precision]] rules, spmd.Precision("**", "int8").'
    with pytest.raises(
        OptionError, match=r'no precision "bfloat"\.\n    fix: did you mean "bfloat16"\?$'
    ):
        compute_dtype("bfloat")


def test_fix_for_a_table_of_the_wrong_type_has_its_article():
    with pytest.raises(OptionError) as caught:
        spmd.Layout(attention="auto")
    assert (
        str(caught.value) == "Layout: attention='auto' is a str.\n    fix: an Attention, such as "
        "attention=spmd.Attention(...)."
    )
