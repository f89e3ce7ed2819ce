"""`[[activations]]` that do not fit what a model's modules return: every error, word for word, and its fix tried."""

# ruff: noqa: E501  (texts stand here as they are printed)

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
        self.conv1, self.conv2 = nnx.Conv(1, 4, (3, 3), rngs=rngs), nnx.Conv(4, 4, (3, 3), strides=2, rngs=rngs)
        self.spare, self.head = nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 3, rngs=rngs)
        self.places = nnx.Embed(6, 4, rngs=rngs)

    def __call__(self, x):
        return self.head(self.conv2(self.conv1(x)).mean((1, 2)) + self.places(jnp.arange(6)).mean(0))


class Pair(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(3)(Both()(x)["wide"])


class Both(linen.Module):
    @linen.compact
    def __call__(self, x):
        return {"wide": x.mean((1, 2)), "count": jnp.float32(1)}


FUNCTION = spmd.FunctionalModel(lambda key: {"w": jnp.zeros((1, 3))}, lambda params, x: x[:, 0, 0] @ params["w"])


def fits(*rules, model=lambda: Net(nnx.Rngs(0)), mesh="data=2,row=4", size=10, rows=16, accumulate=1):
    """Everything that is checked before the first step; a text is a layout of TOML."""
    layout = loads(rules[0]) if isinstance(rules[0], str) else spmd.Layout(activations=rules)
    options = {"mesh": mesh, "layout": layout, "accumulate": accumulate}
    trainer = spmd.Trainer(model, loss=spmd.losses.cross_entropy, optimizer=optax.sgd(0.1), **options)
    trainer.prepare((np.zeros((rows, size, size, 1), np.float32), np.zeros(rows, np.int32)))
    return trainer


def told(*rules, kind=LayoutError, **options):
    with pytest.raises(kind) as caught:
        fits(*rules, **options)
    return str(caught.value)


def test_patterns_that_name_nothing():
    assert (
        told(Rule("conv3", (None, "row")), Rule("spare", (None, "row")), Rule("**/conv*", (), ("conv2", "head")))
        == """\
this layout does not fit what this model's modules return, on mesh data=2, row=4
3 problems:

  [[activations]] rule 1: path "conv3" matches no submodule that can be called.
      fix: did you mean "conv2"? It matches 1.

  [[activations]] rule 2: path "spare"
      matches spare, which the model never calls as module(x), so nothing is cut.
      fix: a pattern for modules that are called.

  [[activations]] rule 3: path "**/conv*", except "head"
      takes no submodule away from this rule.
      fix: take the pattern out, or match one of: conv1, conv2."""
    )
    fits(Rule("conv2", (None, None, None, "row")), Rule("**/conv*", (), ("conv2",)))


def test_a_rule_knows_its_line():
    text = told('[[activations]]\npath = "conv*"\nspec = []\n\n[[activations]]\npath = "nowhere"\nspec = []\n')
    assert '[[activations]] rule 2, line 5: path "nowhere" matches no submodule that can be called.' in text


def test_two_rules_for_one_module():
    assert (
        told(Rule("conv*", (None, None, None, "row")), Rule("conv2", ()))
        == """\
this layout does not fit what this model's modules return, on mesh data=2, row=4
1 problem:

  conv2
      2 [[activations]] rules match this module.
      rule 1 claims it: path "conv*"
      rule 2 claims it: path "conv2"
      fix: except = ["conv2"]  in rule 1."""
    )
    fits(Rule("conv*", (None, None, None, "row"), ("conv2",)), Rule("conv2", ()))


def test_sizes_that_do_not_divide():
    assert (
        told(Rule("conv*", (None, "row")))
        == """\
this layout does not fit what this model's modules return, on mesh data=2, row=4
2 problems:

  conv1   float32[16, 10, 10, 4]   [[activations]] rule 1: spec ["-", "row"]
      dim 1 has size 10; mesh axis "row" has 4 devices; 10 / 4 leaves 2.
      fix: except = ["conv1"]  in rule 1, and a rule  path = "conv1"  spec = ["-", "-"], or dim 1 of 8 or 12.

  conv2   float32[16, 5, 5, 4]   [[activations]] rule 1: spec ["-", "row"]
      dim 1 has size 5; mesh axis "row" has 4 devices; 5 / 4 leaves 1.
      fix: except = ["conv2"]  in rule 1, and a rule  path = "conv2"  spec = ["-", "-"], or dim 1 of 4 or 8."""
    )
    fits(Rule("conv*", (None, "row")), size=16)
    fits(Rule("conv*", (None, "row"), ("conv2",)), Rule("conv2", (None, None)), size=12)


def test_rows_that_do_not_divide():
    assert (
        told(Rule("conv1", ("row",)), accumulate=4)
        == """\
this layout does not fit what this model's modules return, on mesh data=2, row=4
1 problem:

  conv1   float32[16, 10, 10, 4]   [[activations]] rule 1: spec ["row"]
      of 16 rows, 2 are worked on at once (parts: 8, workers times microbatches).
      dim 0 has size 2; mesh axis "row" has 4 devices; 2 / 4 leaves 2.
      fix: spec ["-"], or batch_size=32."""
    )
    fits(Rule("conv1", ("row",)), accumulate=4, rows=32)
    fits(Rule("conv1", (None,)), accumulate=4)


def test_specs_that_are_too_long_and_outputs_without_rows():
    assert (
        told(Rule("head", (None, None, "row")), Rule("{conv1,places}", ()))
        == """\
this layout does not fit what this model's modules return, on mesh data=2, row=4
2 problems:

  places   float32[6, 4]   [[activations]] rule 2: spec []
      dim 0 is not the batch, of which there are 16 rows.
      fix: except = ["places"]  in rule 2.

  head   float32[16, 3]   [[activations]] rule 1: spec ["-", "-", "row"]
      the spec has 3 entries, the array has 2 dims.
      fix: spec ["-", "-"]."""
    )
    fits(Rule("head", (None, None)), Rule("{conv1,places}", (), ("places",)))


def test_one_of_several_arrays_that_a_module_returns():
    assert (
        told(Rule("Both_0", ()), model=Pair())
        == """\
this layout does not fit what this model's modules return, on mesh data=2, row=4
1 problem:

  Both_0, count of what it returns   float32[]   [[activations]] rule 1: spec []
      a scalar has no dim to cut.
      fix: a pattern for modules that return rows."""
    )
    fits(Rule("Dense_*", ()), model=Pair())


def test_axes():
    assert (
        told(Rule("conv*", (None, "row", "row")), Rule("head", (None, "rwo")), Rule("places", (None, "data")))
        == """\
this layout does not fit this model on mesh data=2, row=4
3 problems (9 of 9 parameters fit):

  [[activations]] rule 1
      mesh axis "row" is used 2 times; an array can be cut over it once.
      fix: keep "row" in one place and write "-" in the other.

  [[activations]] rule 2
      mesh axis "rwo" does not exist on mesh data=2, row=4.
      fix: did you mean "row"?

  [[activations]] rule 3, spec ["-", "data"]
      dim 1 is to be cut over "data", over which dim 0, the batch, is cut already.
      fix: an axis that the batch is not cut over."""
    )
    assert fits(Rule("conv*", ("data", None, None, "row"))).resolved.idle_axes() == ()


def test_a_model_without_modules():
    assert (
        told(Rule("conv*", (None, "row")), model=FUNCTION)
        == """\
this layout does not fit what this model's modules return, on mesh data=2, row=4
1 problem:

  [[activations]] rule 1: path "conv*"
      names submodules; a FunctionalModel has none.
      fix: take the rule out, or call jax.lax.with_sharding_constraint in apply."""
    )


def test_images_that_the_layout_spatial_cannot_cut():
    spatial = {"mesh": "data=2,row=2,column=2"}
    text = spmd.Layout.load("spatial").to_toml()
    assert "0   float32[16, 9, 9, 1]" in told(text, kind=DataError, size=9, **spatial)
    assert (
        told(text, size=10, **spatial)
        == """\
layout does not fit what this model's modules return, on mesh data=2, row=2, column=2
1 problem:

  conv2   float32[16, 5, 5, 4]   [[activations]] rule 1, line 15: spec ["-", "row", "column"]
      dim 1 has size 5; mesh axis "row" has 2 devices; 5 / 2 leaves 1.
      dim 2 has size 5; mesh axis "column" has 2 devices; 5 / 2 leaves 1.
      fix: except = ["conv2"]  in rule 1, line 15, and a rule  path = "conv2"  spec = ["-", "-", "-"], or dim 1 of 4 or 6, dim 2 of 4 or 6."""
    )
    assert fits(text, size=12, **spatial).resolved.idle_axes() == ()


class Deep(nnx.Module):
    def __init__(self, rngs):
        self.stack = spmd.nn.LayerStack([nnx.Linear(10, 10, rngs=rngs) for _ in range(4)])

    def __call__(self, x):
        return self.stack(x[..., 0]).mean(1)


@pytest.mark.parametrize("stage", [1, 2])
def test_layers_of_a_stack_in_a_pipeline_or_not(stage):
    """A stage sees some rows of a batch only; what it returns is held against the rule but for them."""
    text = '[pipeline]\naxis = "stage"\n' * (stage > 1) + '[[activations]]\npath = "stack/layers"\nspec = ["-", "row", "-"]\n'
    options = {"model": lambda: Deep(nnx.Rngs(0)), "mesh": "data=2,stage=2,row=2" if stage > 1 else "data=4,row=2"}
    assert fits(text, **options).resolved.idle_axes() == ()
    rows = 2 if stage > 1 else 16
    error = told(text.replace('"row", "-"', '"-", "-", "row"'), **options)
    assert f"stack/layers   float32[{rows}, 10, 10]" in error and 'fix: spec ["-", "-", "row"].' in error
