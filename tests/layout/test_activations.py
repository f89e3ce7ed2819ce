"""`[[activations]]` that do not fit what a model's modules return: every error, word for word, and
its fix tried.
"""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import spmd
from spmd import Rule
from spmd.errors import DataError, LayoutError
from spmd.layout.toml_reader import loads


class Net(nnx.Module):
    def __init__(self, rngs):
        self.conv1, self.conv2 = (
            nnx.Conv(1, 4, (3, 3), rngs=rngs),
            nnx.Conv(4, 4, (3, 3), strides=2, rngs=rngs),
        )
        self.spare, self.head = nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 3, rngs=rngs)
        self.places = nnx.Embed(6, 4, rngs=rngs)

    def __call__(self, x):
        return self.head(
            self.conv2(self.conv1(x)).mean((1, 2)) + self.places(jnp.arange(6)).mean(0)
        )


class Pair(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(3)(Both()(x)["wide"])


class Both(linen.Module):
    @linen.compact
    def __call__(self, x):
        return {"wide": x.mean((1, 2)), "count": jnp.float32(1)}


FUNCTION = spmd.FunctionalModel(
    lambda key: {"w": jnp.zeros((1, 3))}, lambda params, x: x[:, 0, 0] @ params["w"]
)


def fits(
    *rules, model=lambda: Net(nnx.Rngs(0)), mesh="data=2,row=4", size=10, rows=16, accumulate=1
):
    """Everything that is checked before the first step; a text is a layout of TOML."""
    layout = loads(rules[0]) if isinstance(rules[0], str) else spmd.Layout(activations=rules)
    options = {"mesh": mesh, "layout": layout, "accumulate": accumulate}
    trainer = spmd.Trainer(
        model, loss=spmd.losses.cross_entropy, optimizer=optax.sgd(0.1), **options
    )
    trainer.prepare((np.zeros((rows, size, size, 1), np.float32), np.zeros(rows, np.int32)))
    return trainer


def error_text(*rules, kind=LayoutError, **options):
    with pytest.raises(kind) as caught:
        fits(*rules, **options)
    return str(caught.value)


def test_activation_rule_matches_no_module(golden):
    golden(
        "activation_rule_matches_no_module",
        error_text(
            Rule("conv3", (None, "row")),
            Rule("spare", (None, "row")),
            Rule("**/conv*", (), ("conv2", "head")),
        ),
    )
    fits(Rule("conv2", (None, None, None, "row")), Rule("**/conv*", (), ("conv2",)))


def test_activation_error_names_line():
    text = error_text(
        '[[activations]]\npath = "conv*"\nspec = []\n\n[[activations]]\npath = "nowhere"\nspec = '
        "[]\n"
    )
    assert '[[activations]] rule 2, line 5: path "nowhere" matches no callable submodule.' in text


def test_two_activation_rules_match_one_module(golden):
    golden(
        "activations_two_activation_rules_match_one_module",
        error_text(Rule("conv*", (None, None, None, "row")), Rule("conv2", ())),
    )
    fits(Rule("conv*", (None, None, None, "row"), ("conv2",)), Rule("conv2", ()))


def test_activation_dim_not_divisible(golden):
    golden("activation_dim_not_divisible", error_text(Rule("conv*", (None, "row"))))
    fits(Rule("conv*", (None, "row")), size=16)
    fits(Rule("conv*", (None, "row"), ("conv2",)), Rule("conv2", (None, None)), size=12)


def test_activation_rows_not_divisible(golden):
    golden("activation_rows_not_divisible", error_text(Rule("conv1", ("row",)), accumulate=4))
    fits(Rule("conv1", ("row",)), accumulate=4, rows=32)
    fits(Rule("conv1", (None,)), accumulate=4, mesh="data=8", rows=32)


def test_activation_spec_too_long_and_output_without_batch_dim(golden):
    golden(
        "activation_spec_too_long_and_output_without_batch_dim",
        error_text(Rule("head", (None, None, "row")), Rule("{conv1,places}", ())),
    )
    fits(Rule("head", (None, None)), Rule("{conv1,places}", (), ("places",)), mesh="data=8")


def test_activation_rule_on_scalar_output(golden):
    golden("activation_rule_on_scalar_output", error_text(Rule("Both_0", ()), model=Pair()))
    fits(Rule("Dense_*", ()), model=Pair(), mesh="data=8")


def test_activation_rule_with_invalid_axes(golden):
    golden(
        "activation_rule_with_invalid_axes",
        error_text(
            Rule("conv*", (None, "row", "row")),
            Rule("head", (None, "rwo")),
            Rule("places", (None, "data")),
        ),
    )
    assert fits(Rule("conv*", ("data", None, None, "row"))).resolved.idle_axes() == ()


def test_activation_rules_for_functional_model(golden):
    golden(
        "activation_rules_for_functional_model",
        error_text(Rule("conv*", (None, "row")), model=FUNCTION),
    )


def test_spatial_layout_image_not_divisible(golden):
    spatial = {"mesh": "data=2,row=2,column=2"}
    text = spmd.Layout.load("spatial").to_toml()
    assert "0   float32[16, 9, 9, 1]" in error_text(text, kind=DataError, size=9, **spatial)
    golden("activations_spatial_layout_image_not_divisible", error_text(text, size=10, **spatial))
    assert fits(text, size=12, **spatial).resolved.idle_axes() == ()


class Deep(nnx.Module):
    def __init__(self, rngs):
        self.stack = spmd.nn.LayerStack([nnx.Linear(10, 10, rngs=rngs) for _ in range(4)])

    def __call__(self, x):
        return self.stack(x[..., 0]).mean(1)


@pytest.mark.parametrize("stage", [1, 2])
def test_activation_rule_on_stacked_layers(stage):
    """A stage sees some rows of a batch only; what it returns is held against the rule but for
    them.
    """
    text = (
        '[pipeline]\naxis = "stage"\n' * (stage > 1)
        + '[[activations]]\npath = "stack/layers"\nspec = ["-", "row", "-"]\n'
    )
    options = {
        "model": lambda: Deep(nnx.Rngs(0)),
        "mesh": "data=2,stage=2,row=2" if stage > 1 else "data=4,row=2",
    }
    assert fits(text, **options).resolved.idle_axes() == ()
    rows = 2 if stage > 1 else 16
    error = error_text(text.replace('"row", "-"', '"-", "-", "row"'), **options)
    assert (
        f"stack/layers   float32[{rows}, 10, 10]" in error
        and 'fix: spec ["-", "-", "row"].' in error
    )
