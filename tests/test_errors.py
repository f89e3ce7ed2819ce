"""Every error a user can meet, word for word, reached the way a user would reach it; every fix is tried."""

# ruff: noqa: E501  (texts stand here as they are printed)

import dataclasses
import inspect
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import spmd
from spmd import errors


def dense(rows, columns):
    return {"kernel": jnp.zeros((rows, columns)), "bias": jnp.zeros((columns,))}


def init(key):
    block = lambda: {
        "attention": {name: dense(64, 64) for name in ("query", "key", "value")},
        "mlp": {"up": dense(64, 1365), "down": dense(1365, 64)},
    }
    return {"blocks": [block(), block()], "head": dense(64, 10)}


def apply(params, x):
    return x @ params["head"]["kernel"] + params["head"]["bias"]


MODEL = spmd.FunctionalModel(init, apply)
X, Y = np.ones((32, 64), np.float32), np.zeros(32, np.int32)
FIT = {
    "loss": spmd.losses.cross_entropy,
    "optimizer": optax.sgd(0.1),
    "mesh": "data=4,model=2",
    "batch_size": 8,
    "steps": 1,
    "progress": False,
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(toml):
    """The option that lays a model out by this text, which becomes a file first."""
    if toml is None:
        return {}
    with open("mine.toml", "w") as file:
        file.write(toml)
    return {"layout": "mine.toml"}


def fit(toml=None, *, model=MODEL, data=(X, Y), **options):
    return spmd.fit(model, data, **(FIT | options | written(toml)))


def fits(toml=None, *, model=MODEL, data=(X, Y), **options):
    """The fix works: everything that is checked before the first step is satisfied."""
    options = {name: value for name, value in (FIT | options | written(toml)).items() if name not in ("steps", "progress")}
    rows = options.pop("batch_size")
    trainer = spmd.Trainer(model, **options)
    trainer.prepare(jax.tree.map(lambda x: x[:rows], data))
    return trainer


def told(kind, action, *args, **options):
    """The whole text of the error, which has no word in it that only we know."""
    with pytest.raises(kind) as caught:
        action(*args, **options)
    assert type(caught.value) is kind
    text = str(caught.value)
    assert not re.search(r"spmd\.(layout|mesh|errors|tree|train|model|comm|data\.|run|api|trainer)\b", text)
    assert not re.search(r"(?<![\w*])_[a-z]|jax\._src|jaxlib|0x[0-9a-f]{6}|JitTracer|<lambda>", text)
    return text


def rule(path, spec, *more):
    return "\n".join(["[[params]]", f'path = "{path}"', f"spec = {spec}", *more, ""])


# layouts that cannot be read ------------------------------------------------------------------------------------------


def test_unknown_layout():
    assert (
        told(errors.LayoutError, fit, layout="fdsp")
        == """\
no layout "fdsp" is shipped, and no such file exists.
    fix: did you mean "fsdp"?"""
    )
    fits(layout="fsdp")


def test_a_layout_unlike_any_other():
    assert (
        told(errors.LayoutError, fit, layout="mine")
        == """\
no layout "mine" is shipped, and no such file exists.
    fix: a path to a TOML file, or one of the shipped: backup_workers, context_parallel, conv_data_dense_model, data_parallel, data_parallel_bf16, diloco, expert_parallel, fsdp, fsdp_bf16, fsdp_pipeline_tensor, fsdp_tensor_parallel, hierarchical_int8, parameter_server, parameter_server_async, pipeline, pipeline_1f1b, power_sgd, sequence_parallel, spatial, tensor_parallel, zero1."""
    )


def test_no_such_file(folder):
    (folder / "mine.toml").write_text("")
    assert (
        told(errors.LayoutError, fit, layout="mime.toml")
        == """\
layout file mime.toml does not exist.
    fix: did you mean "mine.toml"?"""
    )
    fits(layout="mine.toml")


def test_not_a_layout():
    assert (
        told(errors.LayoutError, fit, layout=3)
        == """\
layout=3 is an int.
    fix: a path to a TOML file, a spmd.Layout, or one of the shipped: backup_workers, context_parallel, conv_data_dense_model, data_parallel, data_parallel_bf16, diloco, expert_parallel, fsdp, fsdp_bf16, fsdp_pipeline_tensor, fsdp_tensor_parallel, hierarchical_int8, parameter_server, parameter_server_async, pipeline, pipeline_1f1b, power_sgd, sequence_parallel, spatial, tensor_parallel, zero1."""
    )


def test_toml_syntax():
    assert (
        told(errors.LayoutError, fit, '[batch]\nspec = ["data", \n[default]\nparams = replicate\n')
        == """\
mine.toml, line 3 is not TOML: Invalid value (column 2).
    [default]
    fix: strings in double quotes, one key = value on a line; `spmd layouts show data_parallel` prints a layout that is right."""
    )


def test_not_text(folder):
    (folder / "mine.toml").write_bytes(b'description = "\xff"')
    assert (
        told(errors.LayoutError, fit, layout="mine.toml")
        == """\
mine.toml is not UTF-8 text (byte 15).
    fix: save it as UTF-8."""
    )


def test_everything_a_file_can_say_wrong_at_once():
    text = """descripton = "x"
[gradient]
reduction = "compiler"
[mesh]
data = 0
[batch]
spec = ["-"]
[gradients]
reducton = "all_reduce"
codec = "bfloat61"
reduction = "psum"
[default]
params = "shrad:data"
max_replicated = 3
[optimizer]
shard = true
[[params]]
paht = "x"
spec = "data"
[[params]]
path = "a/{b"
spec = ["-"]
except = 3
[remat]
save = "dot"
"""
    assert (
        told(errors.LayoutError, fit, text)
        == """\
mine.toml cannot be read
16 problems:

  line 1: unknown key: descripton
      nothing reads it.
      fix: did you mean "description"?

  line 2: unknown key: gradient
      nothing reads it.
      fix: did you mean "gradients"?

  line 5: [mesh] data
      size 0.
      fix: a number from 1, or one -1.

  line 7: [batch] spec
      dim 0, the batch, is not split over any mesh axis.
      fix: such as spec = ["data"].

  line 9: unknown key: [gradients] reducton
      nothing reads it.
      fix: did you mean "reduction"?

  line 10: [gradients] codec
      no codec "bfloat61".
      fix: did you mean "bfloat16"? This version knows: exact, bfloat16, int8, float8, sign, top_k, power_sgd.

  line 11: [gradients] reduction
      no reduction "psum".
      fix: this version knows: compiler, all_reduce, reduce_scatter, parameter_server.

  line 13: [default] params
      "shrad:data" means nothing.
      fix: did you mean "shard:data"?

  line 14: [default] max_replicated
      3 is not a share.
      fix: a number from 0 to 1.

  line 16: [optimizer] shard
      true is not a string.
      fix: such as "data".

  line 17: [[params]] rule 1: unknown key paht
      nothing reads it.
      fix: did you mean "path"?

  line 17: [[params]] rule 1
      has no path.
      fix: such as  path = "**/kernel".

  line 17: [[params]] rule 1
      spec "data" is not a list of mesh axes.
      fix: one entry per dim, "-" for whole, such as ["data", "-"].

  line 20: [[params]] rule 2
      path "a/{b": braces must close and cannot be nested.
      fix: such as "**/{up,down}/kernel".

  line 20: [[params]] rule 2
      3 is not a path.
      fix: such as "**/{up,down}/kernel".

  line 25: [remat] save
      no save "dot".
      fix: did you mean "dots"? This version knows: everything, dots, nothing."""
    )


def test_a_layout_made_in_python_is_checked_alike():
    layout = spmd.Layout(params=(spmd.Rule("a/{b", (None,)),), gradients=spmd.Gradients("psum"), name="mine")
    assert (
        told(errors.LayoutError, fit, layout=layout)
        == """\
layout "mine" cannot be read
2 problems:

  [[params]] rule 1
      path "a/{b": braces must close and cannot be nested.
      fix: such as "**/{up,down}/kernel".

  [gradients] reduction
      no reduction "psum".
      fix: this version knows: compiler, all_reduce, reduce_scatter, parameter_server."""
    )


# layouts that do not fit ----------------------------------------------------------------------------------------------


def test_unknown_axis_everywhere():
    text = '[batch]\nspec = ["dta"]\n[axes]\nmlp = "modl"\n[optimizer]\nshard = "dat"\n[default]\nparams = "shard:tensor"\n'
    assert (
        told(errors.LayoutError, fit, text + rule("**/kernel", '["-", "modle"]'))
        == """\
mine.toml does not fit this model on mesh data=4, model=2
5 problems (0 of 22 parameters fit):

  [batch] spec
      mesh axis "dta" does not exist on mesh data=4, model=2.
      fix: did you mean "data"?

  [axes] "mlp"
      mesh axis "modl" does not exist on mesh data=4, model=2.
      fix: did you mean "model"?

  [optimizer] shard
      mesh axis "dat" does not exist on mesh data=4, model=2.
      fix: did you mean "data"?

  [default] params = "shard:tensor"
      mesh axis "tensor" does not exist on mesh data=4, model=2.
      fix: known: data, model.

  rule 1, line 9: path "**/kernel", spec ["-", "modle"]
      mesh axis "modle" does not exist on mesh data=4, model=2.
      fix: did you mean "model"?"""
    )
    for wrong, fixed in {"dta": "data", "modl": "model", "dat": "data", "shard:tensor": "shard:data"}.items():
        text = text.replace(f'"{wrong}"', f'"{fixed}"')
    fits(text + rule("**/attention/*/kernel", '["-", "model"]'))


def test_the_batch_is_split_over_an_axis_the_mesh_lacks():
    assert (
        told(errors.LayoutError, fit, mesh="batch=8")
        == """\
layouts/data_parallel.toml does not fit this model on mesh batch=8
1 problem (22 of 22 parameters fit):

  [batch] spec
      mesh axis "data" does not exist on mesh batch=8.
      fix: mesh="data=-1", which the layout has itself."""
    )


def test_rules_that_match_nothing():
    wrong = ["**/atention/*/kernel", "blocks/*/mpl/{up,down}/kernel", "kernel", "decoder"]
    assert (
        told(errors.LayoutError, fit, "".join(rule(path, '["-"]') for path in wrong))
        == """\
mine.toml does not fit this model on mesh data=4, model=2
4 problems (22 of 22 parameters fit):

  rule 1, line 1: path "**/atention/*/kernel" matches no parameter.
      fix: did you mean "**/attention/*/kernel"? It matches 6.

  rule 2, line 4: path "blocks/*/mpl/{up,down}/kernel" matches no parameter.
      fix: did you mean "blocks/*/mlp/{up,down}/kernel"? It matches 4.

  rule 3, line 7: path "kernel" matches no parameter.
      fix: did you mean "**/kernel"? It matches 11.

  rule 4, line 10: path "decoder" matches no parameter.
      fix: take the pattern out, or match one of: blocks/0/attention/key/bias, blocks/0/attention/key/kernel, blocks/0/attention/query/bias and 19 more."""
    )
    for fixed in ("**/attention/*/kernel", "blocks/*/mlp/{up,down}/kernel", "**/kernel"):
        fits(rule(fixed, '["-"]'))


def test_an_except_that_takes_nothing_away():
    assert (
        told(errors.LayoutError, fit, rule("**/attention/*/kernel", '["-", "model"]', 'except = "**/queri/*"'))
        == """\
mine.toml does not fit this model on mesh data=4, model=2
1 problem (22 of 22 parameters fit):

  rule 1, line 1: path "**/attention/*/kernel", except "**/queri/*"
      takes no parameter away from this rule.
      fix: did you mean "**/query/*"? It matches 2."""
    )
    fits(rule("**/attention/*/kernel", '["-", "model"]', 'except = "**/query/*"'))


def test_two_and_three_rules_match_one_parameter():
    rules = [("**/mlp/down/*", '["-"]'), ("**/kernel", '["-"]'), ("**/query/kernel", '["model"]'), ("**/attention/**/kernel", '["model"]')]
    assert (
        told(errors.LayoutError, fit, "".join(rule(*pair) for pair in rules))
        == """\
mine.toml does not fit this model on mesh data=4, model=2
3 problems (14 of 22 parameters fit):

  blocks/0/attention/key/kernel   float32[64, 64]
      and 3 more: blocks/0/attention/value/kernel, blocks/1/attention/key/kernel, blocks/1/attention/value/kernel.
      2 rules match this parameter.
      rule 2, line 4 claims it: path "**/kernel"
      rule 4, line 10 claims it: path "**/attention/**/kernel"
      fix: except = ["**/attention/**/kernel"]  in rule 2, line 4.

  blocks/0/attention/query/kernel   float32[64, 64]
      and 1 more: blocks/1/attention/query/kernel.
      3 rules match this parameter.
      rule 2, line 4 claims it: path "**/kernel"
      rule 3, line 7 claims it: path "**/query/kernel"
      rule 4, line 10 claims it: path "**/attention/**/kernel"
      fix: except = ["**/query/kernel"]  in rule 2, line 4; except = ["**/query/kernel"]  in rule 4, line 10.

  blocks/0/mlp/down/kernel   float32[1365, 64]
      and 1 more: blocks/1/mlp/down/kernel.
      2 rules match this parameter.
      rule 1, line 1 claims it: path "**/mlp/down/*"
      rule 2, line 4 claims it: path "**/kernel"
      fix: except = ["**/mlp/down/*"]  in rule 2, line 4."""
    )
    fixed = [
        rule(*rules[0]),
        rule(*rules[1], 'except = ["**/attention/**/kernel", "**/query/kernel", "**/mlp/down/*"]'),
        rule(*rules[2]),
        rule(*rules[3], 'except = ["**/query/kernel"]'),
    ]
    fits("".join(fixed))


def test_a_rule_inside_another():
    assert (
        told(errors.LayoutError, fit, rule("**/up/kernel", '["-"]') + rule("**/up/kernel", '["data"]'))
        == """\
mine.toml does not fit this model on mesh data=4, model=2
1 problem (20 of 22 parameters fit):

  blocks/0/mlp/up/kernel   float32[64, 1365]
      and 1 more: blocks/1/mlp/up/kernel.
      2 rules match this parameter.
      rule 1, line 1 claims it: path "**/up/kernel"
      rule 2, line 4 claims it: path "**/up/kernel"
      fix: take rule 1, line 1 out: it matches nothing that rule 2, line 4 does not."""
    )
    fits(rule("**/up/kernel", '["data"]'))


def test_spec_longer_than_rank():
    wrong = rule("**/attention/*/*", '["-", "model"]') + rule("head/kernel", '["data", "model", "-"]')
    assert (
        told(errors.LayoutError, fit, wrong)
        == """\
mine.toml does not fit this model on mesh data=4, model=2
2 problems (15 of 22 parameters fit):

  blocks/0/attention/key/bias   float32[64]   rule 1, line 1: spec ["-", "model"]
      and 5 more: blocks/0/attention/query/bias, blocks/0/attention/value/bias, blocks/1/attention/key/bias and 2 more.
      the spec has 2 entries, the array has 1 dim.
      fix: except = ["blocks/*/attention/*/bias"]  in rule 1, line 1, and a rule  path = "blocks/*/attention/*/bias"  spec = ["model"] (64 / 2 = 32).

  head/kernel   float32[64, 10]   rule 2, line 4: spec ["data", "model", "-"]
      the spec has 3 entries, the array has 2 dims.
      fix: spec ["data", "model"] (64 / 4 = 16, 10 / 2 = 5)."""
    )
    bias = "blocks/*/attention/*/bias"
    fixed = [rule("**/attention/*/*", '["-", "model"]', f'except = ["{bias}"]'), rule(bias, '["model"]')]
    trainer = fits("".join([*fixed, rule("head/kernel", '["data", "model"]')]))
    assert trainer.resolved.placements["blocks/1/attention/value/bias"].spec == ("model",)


def test_one_axis_used_twice():
    wrong = rule("**/attention/*/kernel", '["model", "model"]') + rule("head/kernel", '[["data", "data"]]')
    assert (
        told(errors.LayoutError, fit, wrong)
        == """\
mine.toml does not fit this model on mesh data=4, model=2
2 problems (15 of 22 parameters fit):

  rule 1, line 1: path "**/attention/*/kernel", spec ["model", "model"]
      mesh axis "model" is used 2 times; an array can be cut over it once.
      fix: keep "model" in one place and write "-" in the other.

  rule 2, line 4: path "head/kernel", spec [["data", "data"]]
      mesh axis "data" is used 2 times; an array can be cut over it once.
      fix: keep "data" in one place and write "-" in the other."""
    )
    fits(rule("**/attention/*/kernel", '["model", "-"]') + rule("head/kernel", '["data"]'))


def test_size_not_divisible():
    wrong = [("**/up/*", '["data"]'), ("**/down/kernel", '["data", "model"]'), ("head/kernel", '["-", ["data", "model"]]')]
    assert (
        told(errors.LayoutError, fit, "".join(rule(*pair) for pair in wrong))
        == """\
mine.toml does not fit this model on mesh data=4, model=2
3 problems (17 of 22 parameters fit):

  blocks/0/mlp/down/kernel   float32[1365, 64]   rule 2, line 4: spec ["data", "model"]
      and 1 more: blocks/1/mlp/down/kernel.
      dim 0 has size 1365; mesh axis "data" has 4 devices; 1365 / 4 leaves 1.
      fix: spec ["-", "model"] (64 / 2 = 32), or a width divisible by 4, such as 1368.

  blocks/0/mlp/up/bias   float32[1365]   rule 1, line 1: spec ["data"]
      and 1 more: blocks/1/mlp/up/bias.
      dim 0 has size 1365; mesh axis "data" has 4 devices; 1365 / 4 leaves 1.
      fix: except = ["blocks/*/mlp/up/bias"]  in rule 1, line 1, and a rule  path = "blocks/*/mlp/up/bias"  spec = ["-"], or a width divisible by 4, such as 1368.

  head/kernel   float32[64, 10]   rule 3, line 7: spec ["-", ["data", "model"]]
      dim 1 has size 10; mesh axes data and model together have 8 devices; 10 / 8 leaves 2.
      fix: spec ["-", "-"], or a width divisible by 8, such as 16."""
    )
    fixed = [
        rule("**/up/*", '["data"]', 'except = ["blocks/*/mlp/up/bias"]'),
        rule("blocks/*/mlp/up/bias", '["-"]'),
        rule("**/down/kernel", '["-", "model"]'),
        rule("head/kernel", '["-", "-"]'),
    ]
    fits("".join(fixed))


def test_no_rule_under_default_error():
    text = rule("**/kernel", '["-"]') + '[default]\nparams = "error"\n'
    assert (
        told(errors.LayoutError, fit, text)
        == """\
mine.toml does not fit this model on mesh data=4, model=2
1 problem (11 of 22 parameters fit):

  blocks/0/attention/key/bias   float32[64]
      and 10 more: blocks/0/attention/query/bias, blocks/0/attention/value/bias, blocks/0/mlp/down/bias and 7 more.
      no rule matches it, and [default] params is "error".
      fix: a rule with  path = "**/bias", or  [default] params = "replicate"."""
    )
    fits(text + rule("**/bias", '["-"]'))
    fits(text.replace("error", "replicate"))


def test_too_much_left_whole():
    text = rule("**/attention/*/kernel", '["-", "model"]') + "[default]\nmax_replicated = 0.25\n"
    assert (
        told(errors.LayoutError, fit, text)
        == """\
mine.toml does not fit this model on mesh data=4, model=2
1 problem:

  [default] max_replicated
      93.5% of the parameters' 1.4 MiB stay whole on every device; max_replicated = 0.25.
      largest: blocks/0/mlp/down/kernel   float32[1365, 64]   341.2 KiB   default replicate
      largest: blocks/0/mlp/up/kernel   float32[64, 1365]   341.2 KiB   default replicate
      largest: blocks/1/mlp/down/kernel   float32[1365, 64]   341.2 KiB   default replicate
      largest: blocks/1/mlp/up/kernel   float32[64, 1365]   341.2 KiB   default replicate
      largest: blocks/0/mlp/up/bias   float32[1365]   5.3 KiB   default replicate
      mesh axes that no parameter uses: data (4 devices).
      fix: [default] params = "shard:data" (0.7% would stay whole), or rules or logical axis names for the largest, or max_replicated = 0.94."""
    )
    trainer = fits(text + 'params = "shard:data"\n')
    whole = sum(place.nbytes for place in trainer.resolved.placements.values() if not any(place.spec))
    assert f"{whole / sum(place.nbytes for place in trainer.resolved.placements.values()):.1%}" == "0.7%"
    fits(text.replace("0.25", "0.94"))


def test_a_mesh_axis_that_shards_nothing():
    assert (
        told(errors.LayoutError, fit, layout="fsdp_tensor_parallel")
        == """\
layouts/fsdp_tensor_parallel.toml does not fit this model on mesh data=4, model=2
1 problem:

  mesh axis "model"
      nothing is sharded over "model", so its 2 devices would all do the same work.
      [axes] shards mlp, heads, hidden, vocab over "model", and no parameter has such a logical axis name: they carry none.
      fix: mesh="data=8,model=1", or logical axis names (mlp, heads, hidden, vocab) on the model's parameters, or [[params]] rules with "model"."""
    )
    fits(layout="fsdp_tensor_parallel", mesh="data=8,model=1")
    layout = spmd.Layout.load("fsdp_tensor_parallel")
    fits(layout=dataclasses.replace(layout, params=(spmd.Rule("**/attention/*/kernel", ("data", "model")),)))


class Named(nnx.Module):
    def __init__(self, rngs):
        named = lambda *axes: nnx.with_partitioning(nnx.initializers.lecun_normal(), axes)
        self.up = nnx.Linear(64, 32, rngs=rngs, kernel_init=named("embed", "mpl"))
        self.down = nnx.Linear(32, 10, rngs=rngs, kernel_init=named("mlp", "heads"))
        self.odd = nnx.Linear(64, 5, rngs=rngs, kernel_init=named("embed", "vocab"))
        self.long = nnx.Linear(64, 10, rngs=rngs, kernel_init=named("embed", None, "vocab"))

    def __call__(self, x):
        return self.down(self.up(x))


def test_logical_axis_names_that_do_not_fit():
    assert (
        told(errors.LayoutError, fit, model=lambda: Named(nnx.Rngs(0)), layout="tensor_parallel")
        == """\
layouts/tensor_parallel.toml does not fit this model on mesh data=4, model=2
4 problems (4 of 8 parameters fit):

  down/kernel   float32[32, 10]   axes (mlp, heads): spec ["model", "model"]
      mesh axis "model" is used 2 times; an array can be cut over it once.
      fix: map one of its logical axes to another mesh axis, or to "-", or a rule  path = "down/kernel"  spec = ["model", "-"].

  long/kernel   float32[64, 10]   axes (embed, -, vocab)
      3 logical axis names for 2 dims.
      fix: one name per dim, None for none.

  odd/kernel   float32[64, 5]   axes (embed, vocab): spec ["-", "model"]
      dim 1 has size 5; mesh axis "model" has 2 devices; 5 / 2 leaves 1.
      fix: a rule  path = "odd/kernel"  spec = ["-", "-"], or a width divisible by 2, such as 6.

  up/kernel   float32[64, 32]   axes (embed, mpl)
      logical axis "mpl" is not in [axes].
      fix: did you mean "mlp"? Or add  mpl = "-"  to [axes], or a rule  path = "up/kernel"  spec = ["-", "-"]."""
    )
    shipped = spmd.Layout.load("tensor_parallel")
    axes = (*((name, None if name == "heads" else axis) for name, axis in shipped.axes), ("mpl", None))
    rules = (spmd.Rule("odd/kernel", (None, None)), spmd.Rule("long/kernel", (None, "model")))
    fits(model=lambda: Named(nnx.Rngs(0)), layout=dataclasses.replace(shipped, axes=axes, params=rules))


# the mesh -------------------------------------------------------------------------------------------------------------


def test_devices_left_unused():
    assert (
        told(errors.MeshError, fit, mesh="data=4")
        == """\
mesh data=4: data(4) = 4, but there are 8 devices: 4 would be left unused.
    fix: mesh="data=8", or to use only some devices, mesh=spmd.make_mesh("data=4", devices=jax.devices()[:4])."""
    )
    fits(mesh="data=8")
    fits(mesh=spmd.make_mesh("data=4", devices=jax.devices()[:4]))


def test_more_devices_than_there_are():
    assert (
        told(errors.MeshError, fit, mesh="data=4,model=4")
        == """\
mesh data=4, model=4: data(4) * model(4) = 16, but there are 8 devices.
    fix: mesh="data=2, model=4"; on a CPU, spmd.simulate_devices(16) before JAX is first used."""
    )
    fits(mesh="data=2, model=4")


def test_minus_one_that_cannot_be_filled():
    assert (
        told(errors.MeshError, fit, mesh="data=-1,model=3")
        == """\
mesh data=-1, model=3: 8 devices / 3 leaves 2, so the -1 cannot be filled.
    fix: mesh="data=-1, model=2"."""
    )
    fits(mesh="data=-1, model=2")


# the data -------------------------------------------------------------------------------------------------------------


def test_batch_not_divisible_by_workers():
    assert (
        told(errors.DataError, fit, batch_size=10)
        == """\
the batch does not fit layouts/data_parallel.toml on mesh data=4, model=2
1 problem:

  batch of 10 rows
      is not divisible by 4 workers (data=4): 10 / 4 leaves 2.
      fix: batch_size=8 or batch_size=12."""
    )
    fits(batch_size=8)
    fits(batch_size=12)


def test_batch_not_divisible_by_workers_and_microbatches():
    assert (
        told(errors.DataError, fit, batch_size=12, accumulate=2)
        == """\
the batch does not fit layouts/data_parallel.toml on mesh data=4, model=2
1 problem:

  batch of 12 rows
      is not divisible by 4 workers (data=4) times 2 microbatches: 12 / 8 leaves 4.
      fix: batch_size=8 or batch_size=16."""
    )
    fits(batch_size=8, accumulate=2)
    fits(batch_size=16, accumulate=2)


def test_everything_wrong_with_a_batch_at_once():
    text = '[batch]\nspec = ["data", "model"]\n[[batch.rules]]\npath = "z"\nspec = ["data"]\n'
    assert (
        told(errors.DataError, fit, text, data={"x": X, "y": Y})
        == """\
the batch does not fit mine.toml on mesh data=4, model=2
2 problems:

  y   int32[8]   spec ["data", "model"]
      the spec has 2 entries, the array has 1 dim.
      fix: add [[batch.rules]]  path = "y"  spec = ["data"].

  [[batch.rules]] rule 1, line 3: path "z" matches no leaf of the batch.
      fix: one of: x, y."""
    )
    fits(text.replace('"z"', '"y"'), data={"x": X, "y": Y})


def test_ragged_leaves():
    assert (
        told(errors.DataError, fit, data={"x": X, "y": Y[:30], "w": Y[:31]})
        == """\
the data is ragged: its leaves have different numbers of rows
3 problems:

  w   int32[31]
      has 31 rows.

  x   float32[32, 64]
      has 32 rows.

  y   int32[30]
      has 30 rows.
      fix: the same number of rows in every leaf; the smallest has 30, the largest 32."""
    )


def test_a_ragged_batch_of_an_iterable():
    batches = [(X[:8], Y[:8]), (X[:8], Y[:7])]
    assert (
        told(errors.DataError, fit, data=batches, batch_size=None, steps=2)
        == """\
batch 2 of epoch 1 is ragged: its leaves have different numbers of rows
2 problems:

  0   float32[8, 64]
      has 8 rows.

  1   int32[7]
      has 7 rows.
      fix: the same number of rows in every leaf; the smallest has 7, the largest 8."""
    )


def test_empty_arrays():
    assert (
        told(errors.DataError, fit, data={"x": X[:0], "y": Y[:0]})
        == """\
the data is empty: x float32[0, 64], y int32[0].
    fix: look at what it was read or filtered from."""
    )


def test_empty_iterable():
    assert (
        told(errors.DataError, fit, data=[], batch_size=None)
        == """\
the data is empty: it yields no batch.
    fix: look at what it is made from; an iterator that was read before has to be made anew."""
    )


def test_no_arrays():
    assert (
        told(errors.DataError, fit, data={})
        == """\
the data holds no arrays: {}.
    fix: a dict or tuple of arrays of shape [rows, ...]."""
    )


def test_fewer_examples_than_one_batch():
    assert (
        told(errors.DataError, fit, batch_size=64)
        == """\
the data has 32 examples, fewer than one batch of 64.
    fix: batch_size=32 or less."""
    )
    fits(batch_size=32)


# the loss, the optimizer, the model -----------------------------------------------------------------------------------


def test_loss_of_a_wrong_shape():
    wrong = lambda model, batch: model(batch[0]) ** 2
    assert (
        told(errors.LossError, fit, loss=wrong)
        == """\
the loss returned float32[8, 10]; wanted a scalar, the mean over the batch, or one value per example, float32[8].
    fix: take the mean over the other dims, such as  loss.mean(axis=tuple(range(1, loss.ndim)))."""
    )

    def fixed(model, batch):
        loss = wrong(model, batch)
        return loss.mean(axis=tuple(range(1, loss.ndim)))

    fits(loss=fixed)


def test_loss_that_is_nothing():
    assert (
        told(errors.LossError, fit, loss=lambda model, batch: None)
        == """\
the loss returned None; wanted a scalar, the mean over the batch, or one value per example.
    fix: return it alone, or as (value, {name: metric})."""
    )


def test_loss_that_is_a_dict():
    assert (
        told(errors.LossError, fit, loss=lambda model, batch: {"loss": model(batch[0]).mean()})
        == """\
the loss returned a dict; wanted a scalar, the mean over the batch, or one value per example.
    fix: return it alone, or as (value, {name: metric})."""
    )
    fits(loss=lambda model, batch: (model(batch[0]).mean(), {"other": model(batch[0]).mean()}))


def test_loss_without_a_gradient():
    assert (
        told(errors.LossError, fit, loss=lambda model, batch: model(batch[0]).argmax())
        == """\
the loss returned int32[], which is not a floating-point number and has no gradient.
    fix: return the loss itself, not a count or an index."""
    )


def test_loss_that_raises():
    assert (
        told(errors.LossError, fit, loss=lambda model, batch: model(batch[1]).mean())
        == """\
the loss fails on a batch of {0: float32[8, 64], 1: int32[8]}: TypeError: dot_general requires contracting dimensions to have the same shape, got (8,) and (64,).
    fix: the error above has the line; check that the model takes these shapes."""
    )


def test_not_a_loss():
    assert (
        told(errors.LossError, fit, loss="mse")
        == """\
loss='mse' is a str, not a function (model, batch[, rng]).
    fix: such as spmd.losses.mean_squared_error."""
    )


def test_loss_not_finite_at_the_first_step():
    assert (
        told(errors.DivergedError, fit, loss=lambda model, batch: jnp.log(model(batch[0]).mean() * 0))
        == """\
the loss is -inf at the first step.
    fix: look for a NaN or infinity in the data, a log of 0 or a division by 0 in the loss, or an initialisation that is too large."""
    )


@pytest.mark.parametrize("optimizer, shown", [("adam", "'adam' is a str"), (optax.adam, "adam is a function"), (0.1, "0.1 is a float")])
def test_not_an_optimizer(optimizer, shown):
    text = """\
optimizer='adam' is a str, not an optax gradient transformation.
    fix: such as optax.adamw(1e-3); a function that makes one must be called."""
    assert told(errors.OptimizerError, fit, optimizer=optimizer) == text.replace("'adam' is a str", shown)
    fits(optimizer=optax.adamw(1e-3))


class Branches(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(64, 10, rngs=rngs)
        if self.up.kernel[0, 0] > 0:
            self.odd = True

    def __call__(self, x):
        return self.up(x)


def test_model_that_cannot_be_traced():
    assert (
        told(errors.ModelError, fit, model=lambda: Branches(nnx.Rngs(0)))
        == """\
the model's factory cannot be traced without data: TracerBoolConversionError: Attempted boolean conversion of traced array with shape bool[].
    It is traced with abstract arrays, to know every shape before anything is allocated.
    fix: use jax.numpy instead of numpy on arrays, and no Python branch or float() on an array's value; the error above has the line."""
    )


class Wide(nnx.Module):
    def __init__(self, width, *, rngs):
        self.up = nnx.Linear(64, {10: width}[10], rngs=rngs)

    def __call__(self, x):
        return self.up(x)


def line_of(function):
    return inspect.getsourcelines(function)[1]


def test_model_factory_that_raises_an_ordinary_error():
    """What is meant for tracers does not help here. The place is the user's line, not one of flax's."""

    def build():
        return Wide(rngs=nnx.Rngs(0))

    with pytest.raises(errors.ModelError) as raised:
        fit(model=build)
    assert str(raised.value) == (
        "the model's factory raises TypeError: Wide.__init__() missing 1 required positional argument: 'width'\n"
        f"    in {__file__}, line {line_of(build) + 1}: return Wide(rngs=nnx.Rngs(0))\n"
        "    fix: fix that line; the error above has the whole traceback."
    )
    assert type(raised.value.__cause__) is TypeError
    fits(model=lambda: Wide(10, rngs=nnx.Rngs(0)))


def test_model_init_that_raises_an_ordinary_error():
    def init(key):
        return {"w": {}["missing"]}

    text = told(errors.ModelError, fit, model=spmd.FunctionalModel(init, apply))
    place = f"in {__file__}, line {line_of(init) + 1}: "
    assert text.splitlines()[:2] == ["the model raises KeyError: 'missing'", f'    {place}return {{"w": {{}}["missing"]}}']


def test_model_factory_whose_numpy_error_comes_from_a_tracer():
    def build():
        kernel = np.zeros(3)
        kernel[0] = Wide(10, rngs=nnx.Rngs(0)).up.kernel[0, 0]

    assert told(errors.ModelError, fit, model=build).startswith("the model's factory cannot be traced without data: ")


class Converts(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(10)(np.asarray(x))


def test_linen_module_that_cannot_be_traced():
    assert (
        told(errors.ModelError, fit, model=Converts())
        == """\
the model cannot be traced without data: TracerArrayConversionError: The numpy.ndarray conversion method __array__() was called on traced array with shape float32[8,64]
    It is traced with abstract arrays, to know every shape before anything is allocated.
    fix: use jax.numpy instead of numpy on arrays, and no Python branch or float() on an array's value; the error above has the line."""
    )


def test_factory_with_arguments():
    assert (
        told(errors.ModelError, fit, model=lambda rngs: Named(rngs))
        == """\
the model's factory takes arguments: rngs.
    fix: a function of none: lambda: factory(rngs=...)."""
    )


def test_model_class():
    assert (
        told(errors.ModelError, fit, model=Named)
        == """\
model=Named is a class.
    fix: pass a function that builds it: lambda: Named(rngs=nnx.Rngs(0))."""
    )


def test_not_a_model():
    assert (
        told(errors.ModelError, fit, model=3)
        == """\
model=3 is an int.
    fix: an nnx.Module, a linen.Module, spmd.FunctionalModel(init, apply), or a function of no arguments that returns one."""
    )


def test_a_linen_trainer_without_data():
    trainer = spmd.Trainer(linen.Dense(10), loss=spmd.losses.cross_entropy, optimizer=optax.sgd(0.1))
    assert (
        told(errors.ModelError, trainer.init)
        == """\
a linen module shows its shapes only on data.
    fix: trainer.init(batch), with a batch or its shapes."""
    )
    trainer.init((X[:8], Y[:8]))


def test_an_error_of_ours_inside_a_linen_model_keeps_its_kind():
    text = told(errors.DataError, fit, model=linen.Dense(10), data={"a": X, "y": Y})
    assert (
        text
        == """\
spmd.losses.cross_entropy: no key is known as the inputs; the batch has a, y.
    fix: name them: spmd.losses.cross_entropy.on(inputs="...", targets="...")."""
    )
    fits(model=linen.Dense(10), data={"a": X, "y": Y}, loss=spmd.losses.cross_entropy.on(inputs="a", targets="y"))


# what a stranger tries ------------------------------------------------------------------------------------------------


class Tensor:
    """What PyTorch gives, as far as it is seen from here: on an accelerator, numpy cannot read it."""

    __module__ = "torch"

    def __init__(self, array, *, here=True):
        self.array, self.shape, self.dtype, self.here = array, array.shape, "torch.float32", here

    def __array__(self, dtype=None, copy=None):
        if not self.here:
            raise TypeError("can't convert cuda:0 device type tensor to numpy.")
        return self.array


def test_lists_of_numbers_in_the_place_of_arrays():
    rows = [[float(number) for number in range(64)] for _ in range(32)]
    assert (
        told(errors.DataError, fit, data=rows, batch_size=None)
        == """\
the first batch: a list of 64 floats, and no array.
    fix: numpy.asarray(...), of shape [rows, ...]."""
    )
    assert (
        told(errors.DataError, fit, data={"x": rows, "y": [0] * 32})
        == """\
the data: x is a list of 32 lists of 64 floats, y is a list of 32 ints, and no array.
    fix: numpy.asarray(...), of shape [rows, ...]."""
    )
    fits(data=(np.asarray(rows, np.float32), np.asarray([0] * 32)))


def test_tensors_on_an_accelerator():
    for data, what in (((Tensor(X, here=False), Y), "the data"), ([(Tensor(X[:8], here=False), Y[:8])], "the first batch")):
        assert (
            told(errors.DataError, fit, data=data, batch_size=None if isinstance(data, list) else 8)
            == f"""\
{what}: 0 is a torch.Tensor, which numpy cannot read: TypeError: can't convert cuda:0 device type tensor to numpy.
    fix: arrays in the host's memory, such as tensor.detach().cpu().numpy()."""
        )


def test_an_array_that_was_donated():
    gone = jnp.asarray(X)
    gone.delete()
    text = "the data: 0 float32[32, 64] was deleted: a call that it was donated to has consumed it."
    assert told(errors.DataError, fit, data=(gone, Y)) == text


def test_tensors_in_other_places():
    trainer = fits()
    for action in (
        lambda: spmd.data.resident((Tensor(X, here=False), Y)),
        lambda: trainer.predict(trainer.init(), Tensor(X, here=False)),
        lambda: trainer.place((Tensor(X[:8], here=False), Y[:8])),
        lambda: trainer.evaluate(trainer.init(), (Tensor(X, here=False), Y)),
    ):
        assert "is a torch.Tensor, which numpy cannot read: " in told(errors.DataError, action)


def test_tensors_on_the_host_are_read():
    import spmd.data.sources as loader

    batches = loader.source([(Tensor(X[:8]), Y[:8])], batch_size=None, shuffle=None, seed=0)
    assert all(isinstance(batch.leaves[0], np.ndarray) for batch in batches.epoch(0))


def test_a_module_of_pytorch():
    Net = type("Net", (), {"__module__": "torch.nn", "__call__": lambda self, x: x})
    for model in (Net(), Net, lambda: Net()):
        assert told(errors.ModelError, fit, model=model).startswith("the model is a Net of PyTorch, which JAX cannot trace.\n    fix: ")


@pytest.mark.parametrize("package", ["keras.src.models", "tensorflow.keras", "haiku._src", "equinox._module"])
def test_a_model_of_another_library(package):
    """The fixes were tried with the libraries themselves."""
    Base = type("Base", (), {"__module__": package, "__call__": lambda self, x: x})
    Net = type("Net", (Base,), {"__module__": "mine"})
    for model in (Net(), lambda: Net()):
        text = told(errors.ModelError, fit, model=model)
        assert re.match(r"the model is a Net of (Keras|haiku|Equinox), which .*\n    fix: .*spmd.FunctionalModel\(lambda key: ", text)


def test_data_functions_that_cannot_be_called():
    assert told(errors.DataError, fit, data=lambda path: [(X, Y)], batch_size=None).startswith(
        "the function given as data takes arguments: path."
    )
    assert told(errors.DataError, fit, data=lambda: None, batch_size=None).startswith("the function that was given as data returned None.")


def test_data_to_evaluate_that_does_not_fit():
    assert (
        told(errors.DataError, fit, eval_data=(X[:, :32], Y))
        == """\
the data to evaluate does not fit: the loss fails on a batch of {0: float32[8, 32], 1: int32[8]}: TypeError: dot_general requires contracting dimensions to have the same shape, got (32,) and (64,).
1 problem:

  0   float32[8, 32]
      is float32[8, 64] in batches for training.
      fix: batches like those for training, but for the number of rows."""
    )
    assert len(fit(eval_data=(X[:3], Y[:3])).history.evaluations) == 1


def test_inputs_to_predict_that_do_not_fit():
    result = fit()
    assert (
        told(errors.DataError, result.predict, X[:, :32])
        == """\
predict: the model fails on float32[8, 32]: TypeError: dot_general requires contracting dimensions to have the same shape, got (32,) and (64,).
    fix: what the loss calls the model with; the batches that it was trained on hold 0 float32[8, 64], 1 int32[8]."""
    )
    assert len(result.predict(X)) == len(X)


def test_a_metric_that_fails_is_named():
    def ratio(model, batch):
        raise ValueError("boom")

    more = {"metrics": {"ratio": ratio}, "eval_data": (X, Y)}
    assert (
        told(errors.LossError, fit, **more)
        == """\
metric "ratio" fails on a batch of {0: float32[8, 64], 1: int32[8]}: ValueError: boom
    fix: the error above has the line; check that the model takes these shapes."""
    )
    more["metrics"] = {"ratio": lambda model, batch: "much"}
    assert told(errors.LossError, fit, **more).startswith('metric "ratio" returned a str; wanted a scalar')


def test_an_array_of_a_trace_that_is_over():
    kept = []

    def loss(model, batch):
        kept.append(model(batch[0]).sum())
        return kept[0]

    text = told(errors.LossError, fit, loss=loss)
    assert re.match(
        r"the model, the loss or a metric uses an array of a trace that is over, made at \S+test_errors\.py:\d+, in \S*loss\.\n", text
    )
    assert text.endswith("fix: return it as a metric, (loss, {name: array}); or keep it in an nnx.Variable, such as nnx.BatchStat.")


def test_a_value_in_an_error_is_no_longer_than_a_line():
    for option in (
        "mesh",
        "layout",
        "model",
        "loss",
        "metrics",
        "steps",
        "checkpoint",
        "callbacks",
        "loggers",
        "progress",
        "shuffle",
        "seed",
    ):
        for value in (X, X.tolist(), "x" * 40_000, {"x": X.tolist()}):
            if option == "checkpoint" and isinstance(value, str):
                continue  # a path, and refused as one
            with pytest.raises(errors.SpmdError) as caught:
                fit(**{option: value})
            assert max(map(len, str(caught.value).splitlines())) < 1100 and len(str(caught.value)) < 1800, option


@pytest.mark.parametrize("state", [None, {}, 3], ids=repr)
def test_what_is_no_state(state):
    text = told(errors.OptionError, fits().step, state, (X[:8], Y[:8]))
    assert text.startswith(f"state={state} is a") or text.startswith("state=None is None.\n    fix: what trainer.init() or a step returns.")


# the tree of errors ---------------------------------------------------------------------------------------------------


def classes():
    return [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.SpmdError)]


def test_every_error_is_drawn_in_the_tree():
    drawn, above = {}, {-1: "SpmdError"}  # by depth, who was drawn last
    for line in re.findall(r"(?m)^    ([│ ]*)[├└]── (\w+)", errors.__doc__):
        depth = len(line[0]) // 4
        drawn[line[1]], above[depth] = above[depth - 1], line[1]
    assert drawn["RendezvousTimeout"] == "ClusterError"
    assert drawn == {kind.__name__: kind.__bases__[0].__name__ for kind in classes() if kind is not errors.SpmdError}
    assert all(kind.__doc__ for kind in classes())


def test_an_extra_that_is_missing_is_named():
    text = told(errors.MissingExtraError, errors.import_extra, "no_such_module", "data")
    assert text == "no_such_module is not installed.\n    fix: in the checkout of spmd: pip install '.[data]'."
    assert issubclass(errors.MissingExtraError, ImportError)


def test_of_very_many_problems_the_first_are_told():
    problems = [errors.Problem(f"parameter {number}", ["is wrong."]) for number in range(errors.SHOWN + 2)]
    text = errors.problems_text("nothing fits", problems)
    assert text.startswith("nothing fits\n102 problems:\n\n  parameter 0\n      is wrong.\n\n")
    assert text.endswith("\n\n  parameter 99\n      is wrong.\n\n  and 2 more problems.")


def test_a_text_is_bounded_whatever_is_in_it():
    text = str(errors.DataError(f"data={'x' * 38_400}\n    fix: less."))
    assert len(text) < 1100 and text.endswith("... (37,405 more)\n    fix: less.")
    assert len(str(errors.DataError("\n".join(["line " * 20] * 10_000)))) < 2 * errors.TEXT


def test_no_page_or_error_names_a_package_that_a_stranger_could_register():
    root = pathlib.Path(errors.__file__).parents[1]
    folders = ("spmd", "docs", "examples", "notebooks", "benchmarks", "layouts")
    files = [
        *root.glob("*.md"),
        *(path for name in folders for path in (root / name).rglob("*") if path.suffix in (".py", ".md", ".ipynb", ".toml")),
    ]
    install = re.compile(r"pip install (?:-\S+ )*['\"]?spmd\S*")
    wrong = [f"{path}: {found}" for path in files for found in install.findall(path.read_text(encoding="utf-8"))]
    assert len(files) > 200 and not wrong
