"""`[remat]`: policies by name, values named by the model, offloading to the host, and rules per
module.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.ad_checkpoint import checkpoint_name

import spmd
from spmd import Remat
from spmd.base.tree import flatten
from spmd.errors import LayoutError, ModelError
from spmd.jaxpr.programs import equations
from spmd.layout.toml_reader import loads
from spmd.layout.toml_writer import dumps
from spmd.planner.gpu_kernels import gpu_of
from spmd.planner.target import load
from spmd.train.remat import policy_of

ROWS, WIDTH, HIDDEN, LAYERS = 16, 16, 28, 3


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = (
            nnx.Linear(WIDTH, HIDDEN, rngs=rngs),
            nnx.Linear(HIDDEN, WIDTH, rngs=rngs),
        )

    def __call__(self, x):
        x = checkpoint_name(x, "in")
        hidden = checkpoint_name(self.up(x), "hidden")
        heads = hidden.reshape(-1, 4, HIDDEN // 4)
        scores = jnp.sin(jnp.einsum("rgi,rgj->rgij", heads, heads) / 8)  # a product with batch dims
        return x + self.down(jnp.sin(hidden) + scores.mean(-1).reshape(hidden.shape)) / 8


class Net(nnx.Module):
    """A stack and a list of blocks."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.stack = spmd.nn.LayerStack([Block(rngs) for _ in range(LAYERS)])
        self.tail = nnx.List([Block(rngs)])
        self.head = nnx.Linear(WIDTH, 3, rngs=rngs)

    def __call__(self, x):
        x = self.stack(x)
        for block in self.tail:
            x = block(x)
        return self.head(x)


def loss(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2, -1)


def batch(number=0):
    rng = np.random.default_rng(number)
    return {
        "x": rng.normal(size=(ROWS, WIDTH)).astype(np.float32),
        "y": rng.normal(size=(ROWS, 3)).astype(np.float32),
    }


def trainer_of(remat, gather="full", net=Net, layout="fsdp"):
    layout = spmd.Layout.load(layout)
    gradients = (
        dataclasses.replace(layout.gradients, gather=gather)
        if layout.name == "fsdp"
        else layout.gradients
    )
    layout = dataclasses.replace(layout, remat=remat, gradients=gradients)
    return spmd.Trainer(
        lambda: net(),
        loss=loss,
        optimizer=optax.sgd(0.05, momentum=0.9),
        mesh="data=8",
        layout=layout,
    )


def train(trainer):
    state = trainer.init()
    for number in range(2):
        state, _ = trainer.step(state, batch(number))
    return {path: np.asarray(leaf) for path, leaf in flatten(jax.device_get(state.params)).items()}


def step_equations(trainer):
    program = trainer.prepare(batch())[0]
    return list(equations(program.traced.jaxpr.jaxpr))


def products(trainer):
    """Number of matrix products in a step: those that are recomputed count again."""
    return sum(equation.primitive.name == "dot_general" for equation in step_equations(trainer))


def offloaded(trainer):
    """Shapes of arrays that are copied to the host."""
    copies = [
        equation for equation in step_equations(trainer) if equation.primitive.name == "device_put"
    ]
    return {
        v.aval.shape
        for equation in copies
        for v in equation.outvars
        if "host" in str(v.aval.memory_space).lower()
    }


LAYERS_OF_STACK = ("stack/layers",)
POLICIES = {
    "nothing": Remat("nothing", LAYERS_OF_STACK),
    "dots": Remat("dots", LAYERS_OF_STACK),
    "dots without batch": Remat("dots_no_batch", LAYERS_OF_STACK),
    "names": Remat(("hidden",), LAYERS_OF_STACK),
    "everything": Remat("everything", LAYERS_OF_STACK),
    "products offloaded": Remat("offload", LAYERS_OF_STACK),
    "a name offloaded": Remat(None, LAYERS_OF_STACK, ("hidden",)),
    "a name offloaded, another kept": Remat(("in",), LAYERS_OF_STACK, ("hidden",)),
    "products kept, a name offloaded": Remat("dots", LAYERS_OF_STACK, ("in",)),
    "names of all": Remat(("hidden",)),
    "rules": Remat(rules=(Remat("nothing", LAYERS_OF_STACK), Remat(("hidden",), ("tail/*",)))),
}
REFERENCE: dict = {}


@pytest.mark.sampled(system=5)
@pytest.mark.parametrize("gather", ["full", "layer"])
@pytest.mark.parametrize("policy", POLICIES)
def test_recomputing_changes_no_result(policy, gather):
    if not REFERENCE:
        REFERENCE.update(train(trainer_of(Remat())))
    trainer = trainer_of(POLICIES[policy], gather)
    for path, value in train(trainer).items():
        np.testing.assert_allclose(value, REFERENCE[path], rtol=2e-6, atol=2e-6, err_msg=path)
    assert ("stack/layers/up/kernel" in trainer.prepare(batch())[0].sync.layerwise) == (
        gather == "layer"
    )
    kept = {
        v.aval.shape
        for equation in step_equations(trainer)
        if equation.primitive.name == "scan"
        for v in equation.outvars
    }
    weights = {(LAYERS, WIDTH, HIDDEN), (LAYERS, HIDDEN, WIDTH)}
    assert bool(weights & kept) == (gather == "full"), (
        "gathered by layer, weights are gathered again for the backward pass"
    )


@pytest.mark.system
def test_policies_keep_what_they_say():
    count = {policy: products(trainer_of(remat)) for policy, remat in POLICIES.items()}
    kept = products(trainer_of(Remat()))
    assert kept == count["everything"] == count["dots"] == count["products kept, a name offloaded"]
    assert count["dots without batch"] == count["products offloaded"] == kept + 1, "scores"
    assert count["names"] == count["a name offloaded"] == kept + 1, (
        "scores; the product behind them is not needed"
    )
    assert count["nothing"] == kept + 2, "scores, and the product in front of them"


@pytest.mark.sampled(quick=7)
@pytest.mark.parametrize("gather", ["full", "layer"])
@pytest.mark.parametrize(
    "policy, shapes",
    [
        ("products offloaded", {(2, HIDDEN)}),
        ("a name offloaded", {(2, HIDDEN)}),
        ("a name offloaded, another kept", {(2, HIDDEN)}),
        ("products kept, a name offloaded", {(2, WIDTH)}),
        ("names", set()),
    ],
)
def test_offloaded_values_are_copied_to_the_host(policy, shapes, gather):
    trainer = trainer_of(POLICIES[policy], gather)
    assert {shape[-2:] for shape in offloaded(trainer)} == shapes
    assert any("host have one memory" in note for note in trainer.notes()) == bool(shapes)


@pytest.mark.system
def test_linen_modules_keep_named_values():
    class Dense(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = jnp.sin(checkpoint_name(linen.Dense(WIDTH, name="first")(x), "first_out"))
            return linen.Dense(3, name="second")(x)

    class Outer(linen.Module):
        @linen.compact
        def __call__(self, x):
            return Dense(name="dense")(x)

    plain, named, nothing = (
        trainer_of(remat, net=Outer, layout="data_parallel")
        for remat in (Remat(), Remat(("first_out",), ("dense",)), Remat("nothing", ("dense",)))
    )
    assert products(plain) == products(named) == products(nothing) - 1
    with pytest.raises(LayoutError, match="Names there: first_out"):
        trainer_of(Remat(("first",), ("dense",)), net=Outer, layout="data_parallel").prepare(
            batch()
        )
    nested = Remat(rules=(Remat("nothing", ("dense",)), Remat("dots", ("dense/first",))))
    with pytest.raises(ModelError, match="a part of dense"):
        trainer_of(nested, net=Outer, layout="data_parallel").prepare(batch())


REFUSED = {
    "unknown_name": Remat(("hiden", "in"), LAYERS_OF_STACK, ("out",)),
    "name_of_other_modules": Remat(("hidden",), ("head",)),
    "unknown_name_of_all": Remat(("hiden",)),
    "two_policies_for_one_module": Remat(
        rules=(Remat("dots", ("tail/*",)), Remat("nothing", ("tail/0",)))
    ),
    "two_policies_one_inside_the_other": Remat(
        rules=(Remat("dots", ("tail/*",)), Remat("nothing", ("**/up",)))
    ),
    "save_and_offload": Remat(("hidden",), LAYERS_OF_STACK, ("hidden",)),
    "rules_inside_of_everything": Remat("dots", rules=(Remat("nothing", LAYERS_OF_STACK),)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(case, golden):
    with pytest.raises((LayoutError, ModelError)) as caught:
        trainer_of(REFUSED[case]).prepare(batch())
    golden(f"remat_{case}", str(caught.value))


def test_text_that_cannot_be_read(golden):
    text = (
        '[remat]\nsave = "dotz"\nmodules = ["a/*"]\noffload = [3]\n\n[[remat.rules]]\nsave = '
        '["x"]\n\n'
        '[[remat.rules]]\nmodules = ["b/*"]\nsave = "nothing"\nkeep = 3\n'
    )
    with pytest.raises(LayoutError) as caught:
        loads(text)
    golden("remat_text_that_cannot_be_read", str(caught.value))


def test_offload_needs_memory_of_the_host(monkeypatch, golden):
    monkeypatch.setattr("spmd.train.host_memory._memory_kinds", lambda device: {"device"})
    with pytest.raises(LayoutError) as caught:
        trainer_of(Remat(None, LAYERS_OF_STACK, ("hidden",))).prepare(batch())
    golden("remat_offload_without_host_memory", str(caught.value))
    trainer_of(Remat(("hidden",), LAYERS_OF_STACK)).prepare(batch())


ROUND_TRIPS = [
    Remat(("a", "b"), ("x/*",), ("c",)),
    Remat("offload"),
    Remat(
        "nothing", ("x",), rules=(Remat("dots_no_batch", ("y/*", "z")), Remat(None, ("w",), ("d",)))
    ),
]


@pytest.mark.parametrize("remat", ROUND_TRIPS, ids=str)
def test_toml_round_trip(remat):
    layout = spmd.Layout(remat=remat)
    assert loads(dumps(layout)) == layout
    assert "remat" in layout._repr_html_()


def test_policies_of_products_keep_what_cudnn_attention_returns():
    def attention(x):
        return jax.nn.dot_product_attention(x, x, x, is_causal=True, implementation="cudnn").sum()

    def calls(policy):
        x = jax.ShapeDtypeStruct((2, 128, 4, 64), "bfloat16")
        with gpu_of(load("h100")):
            step = jax.make_jaxpr(
                jax.grad(lambda x: jax.checkpoint(attention, policy=policy_of(policy))(jnp.sin(x)))
            )(x)
        return sum("fwd_wrapper" in equation.primitive.name for equation in equations(step.jaxpr))

    assert calls("nothing") == 2 and calls("dots") == calls("dots_no_batch") == 1
