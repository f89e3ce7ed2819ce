"""The exact text of every error that users see, raised the way a user would raise it; every fix is
tried.
"""

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
from jax.sharding import NamedSharding, PartitionSpec

import spmd
from spmd import errors
from spmd.base.tree import abstract, flatten
from spmd.layout import layout_files
from spmd.layout.check import fit_layout
from spmd.mesh import MeshSpec


def dense(rows, columns):
    return {"kernel": jnp.zeros((rows, columns)), "bias": jnp.zeros((columns,))}


def init(key):
    blocks = [
        {
            "attention": {name: dense(64, 64) for name in ("query", "key", "value")},
            "mlp": {"up": dense(64, 1365), "down": dense(1365, 64)},
        }
        for _ in range(2)
    ]
    return {"blocks": blocks, "head": dense(64, 10)}


def apply(params, x):
    return x @ params["head"]["kernel"] + params["head"]["bias"]


MODEL = spmd.FunctionalModel(init, apply)
X, Y = np.ones((32, 64), np.float32), np.zeros(32, np.int32)
FIT = {
    "loss": spmd.losses.cross_entropy,
    "optimizer": optax.sgd(0.1),
    "mesh": spmd.make_mesh("data=4", devices=jax.devices()[:4]),
    "batch_size": 8,
    "steps": 1,
    "progress": False,
}

BOTH = "data=4,model=2"


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
    options = {
        name: value
        for name, value in (FIT | options | written(toml)).items()
        if name not in ("steps", "progress")
    }
    rows = options.pop("batch_size")
    trainer = spmd.Trainer(model, **options)
    trainer.prepare(jax.tree.map(lambda x: x[:rows], data))
    return trainer


def error_text(kind, action, *args, **options):
    """The full text of the error, which contains no internal terms."""
    with pytest.raises(kind) as caught:
        action(*args, **options)
    assert type(caught.value) is kind
    text = str(caught.value)
    assert not re.search(
        r"spmd\.(layout|mesh|errors|tree|train|model|comm|data\.|run|api|trainer)\b", text
    )
    assert not re.search(
        r"(?<![\w*])_[a-z]|jax\._src|jaxlib|0x[0-9a-f]{6}|JitTracer|<lambda>", text
    )
    return text


def rule(path, spec, *more):
    return "\n".join(["[[params]]", f'path = "{path}"', f"spec = {spec}", *more, ""])


# layouts that cannot be read ----------------------------------------------------------------------


def test_misspelt_layout_name(golden):
    golden("misspelt_layout_name", error_text(errors.LayoutError, fit, layout="fdsp"))
    fits(layout="fsdp")


@pytest.mark.parametrize(
    ("name", "meant"),
    {
        "zero3": "fsdp",
        "ZeRO-2": "zero1",
        "FSDP": "fsdp",
        "ddp": "data_parallel",
        "dp": "data_parallel",
        "tp": "tensor_parallel",
    }.items(),
)
def test_layout_name_of_other_libraries(name, meant):
    with pytest.raises(errors.LayoutError) as raised:
        spmd.Layout.load(name)
    assert raised.value.fix == f'did you mean "{meant}"?'


def test_other_names_of_layouts_are_of_shipped_ones():
    assert set(layout_files.OTHER_NAMES.values()) <= set(layout_files.shipped())
    assert not set(layout_files.OTHER_NAMES) & set(layout_files.shipped())


def test_unknown_layout_name(golden):
    golden("unknown_layout_name", error_text(errors.LayoutError, fit, layout="mine"))


def test_missing_layout_file(golden, folder):
    (folder / "mine.toml").write_text('[default]\nparams = "replicate"\n')
    golden("missing_layout_file", error_text(errors.LayoutError, fit, layout="mime.toml"))
    fits(layout="mine.toml")


def test_layout_of_wrong_type(golden):
    golden("layout_of_wrong_type", error_text(errors.LayoutError, fit, layout=3))


def test_toml_syntax_error(golden):
    golden(
        "toml_syntax_error",
        error_text(
            errors.LayoutError, fit, '[batch]\nspec = ["data", \n[default]\nparams = replicate\n'
        ),
    )


def test_layout_file_not_utf8(golden, folder):
    (folder / "mine.toml").write_bytes(b'description = "\xff"')
    golden("layout_file_not_utf8", error_text(errors.LayoutError, fit, layout="mine.toml"))


def test_invalid_keys_and_values_are_all_reported(golden):
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
    golden("invalid_keys_and_values_are_all_reported", error_text(errors.LayoutError, fit, text))


def test_python_layout_is_validated(golden):
    layout = spmd.Layout(
        params=(spmd.Rule("a/{b", (None,)),), gradients=spmd.Gradients("psum"), name="mine"
    )
    golden("python_layout_is_validated", error_text(errors.LayoutError, fit, layout=layout))


# layouts that do not fit --------------------------------------------------------------------------


def test_unknown_mesh_axis_in_each_table(golden):
    text = (
        '[batch]\nspec = ["dta"]\n[axes]\nmlp = "modl"\n[optimizer]\nshard = "dat"\n[default]\n'
        'params = "shard:tensor"\n'
    )
    golden(
        "unknown_mesh_axis_in_each_table",
        error_text(errors.LayoutError, fit, text + rule("**/kernel", '["-", "modle"]'), mesh=BOTH),
    )
    for wrong, fixed in {
        "dta": "data",
        "modl": "model",
        "dat": "data",
        "shard:tensor": "shard:data",
    }.items():
        text = text.replace(f'"{wrong}"', f'"{fixed}"')
    fits(text + rule("**/attention/*/kernel", '["-", "model"]'), mesh=BOTH)


def test_batch_axis_missing_from_mesh(golden):
    golden("batch_axis_missing_from_mesh", error_text(errors.LayoutError, fit, mesh="batch=8"))


def test_rule_matches_no_parameter(golden):
    wrong = ["**/atention/*/kernel", "blocks/*/mpl/{up,down}/kernel", "kernel", "decoder"]
    golden(
        "rule_matches_no_parameter",
        error_text(errors.LayoutError, fit, "".join(rule(path, '["-"]') for path in wrong)),
    )
    for fixed in ("**/attention/*/kernel", "blocks/*/mlp/{up,down}/kernel", "**/kernel"):
        fits(rule(fixed, '["-"]'))


def test_except_matches_no_parameter(golden):
    golden(
        "except_matches_no_parameter",
        error_text(
            errors.LayoutError,
            fit,
            rule("**/attention/*/kernel", '["-", "model"]', 'except = "**/queri/*"'),
            mesh=BOTH,
        ),
    )
    fits(rule("**/attention/*/kernel", '["-", "model"]', 'except = "**/query/*"'), mesh=BOTH)


def test_several_rules_match_one_parameter(golden):
    rules = [
        ("**/mlp/down/*", '["-"]'),
        ("**/kernel", '["-"]'),
        ("**/query/kernel", '["model"]'),
        ("**/attention/**/kernel", '["model"]'),
    ]
    golden(
        "several_rules_match_one_parameter",
        error_text(errors.LayoutError, fit, "".join(rule(*pair) for pair in rules), mesh=BOTH),
    )
    fixed = [
        rule(*rules[0]),
        rule(*rules[1], 'except = ["**/attention/**/kernel", "**/query/kernel", "**/mlp/down/*"]'),
        rule(*rules[2]),
        rule(*rules[3], 'except = ["**/query/kernel"]'),
    ]
    fits("".join(fixed), mesh=BOTH)


def test_duplicate_rules(golden):
    golden(
        "duplicate_rules",
        error_text(
            errors.LayoutError,
            fit,
            rule("**/up/kernel", '["-"]') + rule("**/up/kernel", '["data"]'),
        ),
    )
    fits(rule("**/up/kernel", '["data"]'))


def test_spec_longer_than_rank(golden):
    wrong = rule("**/attention/*/*", '["-", "model"]') + rule(
        "head/kernel", '["data", "model", "-"]'
    )
    golden("spec_longer_than_rank", error_text(errors.LayoutError, fit, wrong, mesh=BOTH))
    bias = "blocks/*/attention/*/bias"
    fixed = [
        rule("**/attention/*/*", '["-", "model"]', f'except = ["{bias}"]'),
        rule(bias, '["model"]'),
    ]
    trainer = fits("".join([*fixed, rule("head/kernel", '["data", "model"]')]), mesh=BOTH)
    assert trainer.resolved.placements["blocks/1/attention/value/bias"].spec == ("model",)


def test_mesh_axis_used_twice_in_spec(golden):
    wrong = rule("**/attention/*/kernel", '["model", "model"]') + rule(
        "head/kernel", '[["data", "data"]]'
    )
    golden("mesh_axis_used_twice_in_spec", error_text(errors.LayoutError, fit, wrong, mesh=BOTH))
    fits(
        rule("**/attention/*/kernel", '["model", "-"]') + rule("head/kernel", '["data"]'), mesh=BOTH
    )


def test_dim_not_divisible_by_mesh_axis(golden):
    wrong = [
        ("**/up/*", '["data"]'),
        ("**/down/kernel", '["data", "model"]'),
        ("head/kernel", '["-", ["data", "model"]]'),
    ]
    golden(
        "dim_not_divisible_by_mesh_axis",
        error_text(errors.LayoutError, fit, "".join(rule(*pair) for pair in wrong), mesh=BOTH),
    )
    fixed = [
        rule("**/up/*", '["data"]', 'except = ["blocks/*/mlp/up/bias"]'),
        rule("blocks/*/mlp/up/bias", '["-"]'),
        rule("**/down/kernel", '["-", "model"]'),
        rule("head/kernel", '["-", "-"]'),
    ]
    fits("".join(fixed), mesh=BOTH)


def test_unmatched_parameter_with_default_error(golden):
    text = rule("**/kernel", '["-"]') + '[default]\nparams = "error"\n'
    golden("unmatched_parameter_with_default_error", error_text(errors.LayoutError, fit, text))
    fits(text + rule("**/bias", '["-"]'))
    fits(text.replace("error", "replicate"))


def test_max_replicated_out_of_reach_of_rules(golden, folder):
    shipped, model = spmd.Layout.load("fsdp"), {"hidden": dense(30, 50), "head": dense(50, 3)}

    def check(layout, sizes, params=model):
        return fit_layout(layout, flatten(abstract(params)), {}, MeshSpec.parse(sizes))

    with pytest.raises(errors.LayoutError) as raised:
        check(shipped, "data=8")
    golden("max_replicated_out_of_reach_of_rules", str(raised.value))
    assert any(check(shipped, "data=2").placements["hidden/kernel"].spec), "fewer devices"
    assert any(
        check(shipped, "data=8", {"hidden": dense(30, 48)}).placements["hidden/kernel"].spec
    ), "another size"
    check(spmd.Layout.load("data_parallel"), "data=8")
    (folder / "mine.toml").write_text(
        layout_files.shipped()["fsdp"]
        .read_text()
        .replace("max_replicated = 0.5", "max_replicated = 1")
    )
    check(spmd.Layout.load("mine.toml"), "data=8")


def test_max_replicated_exceeded(golden):
    text = rule("**/attention/*/kernel", '["-", "model"]') + "[default]\nmax_replicated = 0.25\n"
    golden("max_replicated_exceeded", error_text(errors.LayoutError, fit, text, mesh=BOTH))
    trainer = fits(text + 'params = "shard:data"\n', mesh=BOTH)
    places = trainer.resolved.placements.values()
    replicated_bytes = sum(place.nbytes for place in places if not any(place.spec))
    assert f"{replicated_bytes / sum(place.nbytes for place in places):.1%}" == "0.7%"
    fits(text.replace("0.25", "0.94"), mesh=BOTH)


def test_mesh_axis_shards_nothing(golden):
    golden(
        "mesh_axis_shards_nothing",
        error_text(errors.LayoutError, fit, layout="fsdp_tensor_parallel", mesh=BOTH),
    )
    fits(layout="fsdp_tensor_parallel", mesh="data=8,model=1")
    layout = spmd.Layout.load("fsdp_tensor_parallel")
    fits(
        layout=dataclasses.replace(
            layout, params=(spmd.Rule("**/attention/*/kernel", ("data", "model")),)
        ),
        mesh=BOTH,
    )


def test_mesh_axis_that_nothing_uses(golden):
    golden("mesh_axis_that_nothing_uses", error_text(errors.LayoutError, fit, mesh=BOTH))
    fits(mesh="data=8")
    fits(rule("head/kernel", '["model"]'), mesh=BOTH)


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("layout", ["fsdp", "zero1", "parameter_server", "diloco"])
def test_no_layout_may_leave_an_axis_unused(layout):
    assert 'fix: mesh="data=8"; or' in error_text(errors.LayoutError, fit, layout=layout, mesh=BOTH)
    fits(layout=layout, mesh="data=8")


def test_fix_for_unused_axes_suits_model_batch_and_devices():
    declared = spmd.Layout(mesh=(("data", -1), ("model", 2)), source="mine.toml")
    assert 'fix: mesh="data=8,model=1"; or' in error_text(
        errors.LayoutError, fit, layout=declared, mesh=BOTH
    )
    fits(layout=declared, mesh="data=8,model=1")
    assert 'fix: mesh="data=8"; or' in error_text(
        errors.LayoutError, fit, mesh="data=2,model=2,expert=2"
    ), "both at once"
    assert "fix: a use for" in error_text(errors.LayoutError, fit, batch_size=4, mesh=BOTH), (
        "8 workers do not divide 4 rows"
    )
    four = spmd.make_mesh("data=2,model=2", devices=jax.devices()[:4])
    assert 'fix: spmd.make_mesh("data=4", devices=...), with the same devices; or' in error_text(
        errors.LayoutError, fit, mesh=four
    )


def constrained(params, x):
    return jax.lax.with_sharding_constraint(apply(params, x), PartitionSpec("data", "model"))


def placed(params, x):
    return jax.device_put(
        apply(params, x), NamedSharding(spmd.make_mesh(BOTH), PartitionSpec(None, "model"))
    )


def mapped(params, x):
    """Inside the step, where there is a mesh; while the loss alone is traced there is none."""
    if jax.sharding.get_abstract_mesh().empty:
        return apply(params, x)
    specs = (PartitionSpec(None, "model"), PartitionSpec("model"))
    product = jax.shard_map(
        lambda x, w: jax.lax.psum(x @ w, "model"),
        in_specs=specs,
        out_specs=PartitionSpec(),
        axis_names={"model"},
        check_vma=False,
    )
    return product(x, params["head"]["kernel"]) + params["head"]["bias"]


@jax.custom_vjp
def shards_its_gradient(x):
    return x


shards_its_gradient.defvjp(
    lambda x: (x, None),
    lambda _, dx: (jax.lax.with_sharding_constraint(dx, PartitionSpec(None, "model")),),
)


class Logical(linen.Module):
    @linen.compact
    def __call__(self, x):
        with linen.logical_axis_rules([("batch", None), ("mlp", "model")]):
            return linen.with_logical_constraint(linen.Dense(10)(x), ("batch", "mlp"))


@pytest.mark.parametrize(
    "model",
    [
        *(spmd.FunctionalModel(init, own) for own in (constrained, placed, mapped)),
        spmd.FunctionalModel(init, lambda params, x: shards_its_gradient(apply(params, x))),
        Logical(),
    ],
    ids=["constraint", "device_put", "shard_map", "backward pass", "linen"],
)
def test_mesh_axis_that_the_model_uses_itself(model):
    fits(model=model, mesh=BOTH)


def mapped_on_a_mesh(params, x):
    """With a mesh of its own where there is none, as where a plan counts operations."""
    specs = (PartitionSpec(None, "model"), PartitionSpec("model"))
    mesh = {} if jax.sharding.get_abstract_mesh().manual_axes else {"mesh": spmd.make_mesh(BOTH)}
    product = jax.shard_map(
        lambda x, w: jax.lax.psum(x @ w, "model"),
        in_specs=specs,
        out_specs=PartitionSpec(),
        axis_names={"model"},
        check_vma=False,
        **mesh,
    )
    return product(x, params["head"]["kernel"]) + params["head"]["bias"]


@pytest.mark.sampled(quick=2)
@pytest.mark.parametrize("own", [constrained, mapped_on_a_mesh])
def test_model_that_names_an_axis_can_be_planned(own):
    batch = (jax.ShapeDtypeStruct((8, 64), "float32"), jax.ShapeDtypeStruct((8,), "int32"))
    options = {"loss": FIT["loss"], "optimizer": FIT["optimizer"], "target": "8xcpu"}
    model = spmd.FunctionalModel(init, own)
    plan = spmd.plan(model, batch, **options, mesh=BOTH, layout="data_parallel")
    assert (
        plan.flops.model
        == spmd.plan(MODEL, batch, **options, mesh="data=8", layout="data_parallel").flops.model
    )
    # a mesh of its own is none for the one device with which a search begins
    if own is constrained:
        layout = spmd.Layout(mesh=(("data", 4), ("model", 2)))
        assert spmd.search(model, batch, **options, candidates=[layout], compiles=1).best.fits


class Named(nnx.Module):
    def __init__(self, rngs):
        def named(*axes):
            return nnx.with_partitioning(nnx.initializers.lecun_normal(), axes)

        self.up = nnx.Linear(64, 32, rngs=rngs, kernel_init=named("embed", "mpl"))
        self.down = nnx.Linear(32, 10, rngs=rngs, kernel_init=named("mlp", "heads"))
        self.odd = nnx.Linear(64, 5, rngs=rngs, kernel_init=named("embed", "vocab"))
        self.long = nnx.Linear(64, 10, rngs=rngs, kernel_init=named("embed", None, "vocab"))

    def __call__(self, x):
        return self.down(self.up(x))


def test_logical_axis_names_do_not_fit(golden):
    golden(
        "logical_axis_names_do_not_fit",
        error_text(
            errors.LayoutError,
            fit,
            model=lambda: Named(nnx.Rngs(0)),
            layout="tensor_parallel",
            mesh=BOTH,
        ),
    )
    shipped = spmd.Layout.load("tensor_parallel")
    axes = (
        *((name, None if name == "heads" else axis) for name, axis in shipped.axes),
        ("mpl", None),
    )
    rules = (spmd.Rule("odd/kernel", (None, None)), spmd.Rule("long/kernel", (None, "model")))
    fits(
        model=lambda: Named(nnx.Rngs(0)),
        layout=dataclasses.replace(shipped, axes=axes, params=rules),
        mesh=BOTH,
    )


# the mesh -----------------------------------------------------------------------------------------


def test_mesh_smaller_than_device_count(golden):
    golden("mesh_smaller_than_device_count", error_text(errors.MeshError, fit, mesh="data=4"))
    fits(mesh="data=8")
    fits(mesh=spmd.make_mesh("data=4", devices=jax.devices()[:4]))


def test_mesh_larger_than_device_count(golden):
    golden(
        "mesh_larger_than_device_count", error_text(errors.MeshError, fit, mesh="data=4,model=4")
    )
    fits(rule("**/attention/*/kernel", '["-", "model"]'), mesh="data=2, model=4")


def test_minus_one_mesh_axis_not_divisible(golden):
    golden(
        "minus_one_mesh_axis_not_divisible",
        error_text(errors.MeshError, fit, mesh="data=-1,model=3"),
    )
    fits(rule("**/attention/*/kernel", '["-", "model"]'), mesh="data=-1, model=2")


# the data -----------------------------------------------------------------------------------------


def test_batch_not_divisible_by_workers(golden):
    golden("batch_not_divisible_by_workers", error_text(errors.DataError, fit, batch_size=10))
    fits(batch_size=8)
    fits(batch_size=12)


def test_batch_not_divisible_by_workers_and_microbatches(golden):
    golden(
        "batch_not_divisible_by_workers_and_microbatches",
        error_text(errors.DataError, fit, batch_size=12, accumulate=2),
    )
    fits(batch_size=8, accumulate=2)
    fits(batch_size=16, accumulate=2)


def test_batch_problems_are_all_reported(golden):
    text = '[batch]\nspec = ["data", "model"]\n[[batch.rules]]\npath = "z"\nspec = ["data"]\n'
    golden(
        "batch_problems_are_all_reported",
        error_text(errors.DataError, fit, text, data={"x": X, "y": Y}, mesh=BOTH),
    )
    fits(text.replace('"z"', '"y"'), data={"x": X, "y": Y}, mesh=BOTH)


def test_ragged_data(golden):
    golden(
        "ragged_data", error_text(errors.DataError, fit, data={"x": X, "y": Y[:30], "w": Y[:31]})
    )


@pytest.mark.system
def test_ragged_batch_of_iterable(golden):
    batches = [(X[:8], Y[:8]), (X[:8], Y[:7])]
    golden(
        "ragged_batch_of_iterable",
        error_text(errors.DataError, fit, data=batches, batch_size=None, steps=2),
    )


def test_empty_arrays(golden):
    golden("empty_arrays", error_text(errors.DataError, fit, data={"x": X[:0], "y": Y[:0]}))


def test_empty_iterable(golden):
    golden("empty_iterable", error_text(errors.DataError, fit, data=[], batch_size=None))


def test_data_without_arrays(golden):
    golden("data_without_arrays", error_text(errors.DataError, fit, data={}))


def test_fewer_examples_than_one_batch(golden):
    golden("fewer_examples_than_one_batch", error_text(errors.DataError, fit, batch_size=64))
    fits(batch_size=32)


# the loss, the optimizer, the model ---------------------------------------------------------------


def test_loss_of_wrong_shape(golden):
    def wrong(model, batch):
        return model(batch[0]) ** 2

    golden("loss_of_wrong_shape", error_text(errors.LossError, fit, loss=wrong))

    def fixed(model, batch):
        loss = wrong(model, batch)
        return loss.mean(axis=tuple(range(1, loss.ndim)))

    fits(loss=fixed)


def test_loss_returns_none(golden):
    golden("loss_returns_none", error_text(errors.LossError, fit, loss=lambda model, batch: None))


def test_loss_returns_dict(golden):
    golden(
        "loss_returns_dict",
        error_text(
            errors.LossError, fit, loss=lambda model, batch: {"loss": model(batch[0]).mean()}
        ),
    )
    fits(loss=lambda model, batch: (model(batch[0]).mean(), {"other": model(batch[0]).mean()}))


def test_loss_returns_integer(golden):
    golden(
        "loss_returns_integer",
        error_text(errors.LossError, fit, loss=lambda model, batch: model(batch[0]).argmax()),
    )


def test_loss_needs_values(golden):
    def branches(model, batch):
        return model(batch[0]).mean() if batch[0].sum() > 0 else model(batch[0]).sum()

    golden("loss_needs_values", error_text(errors.LossError, fit, loss=branches))


def test_loss_raises(golden):
    golden(
        "loss_raises",
        error_text(errors.LossError, fit, loss=lambda model, batch: model(batch[1]).mean()),
    )


def test_loss_reads_a_missing_key(golden):
    rows = {"image": X, "label": Y, "more": {"weight": Y}}
    golden(
        "loss_reads_a_missing_key",
        error_text(
            errors.LossError,
            fit,
            data=rows,
            loss=lambda model, batch: model(batch["image"]) + batch["lable"],
        ),
    )
    nested = error_text(
        errors.LossError,
        fit,
        data=rows,
        loss=lambda model, batch: model(batch["image"]) + batch["more"]["wieght"],
    )
    assert "the key 'wieght'" in nested and nested.endswith('fix: did you mean "weight"?')
    assert "the key 'wieght' in \"more\"" in nested
    unknown = error_text(
        errors.LossError,
        fit,
        data=rows,
        loss=lambda model, batch: model(batch["image"]) + batch["more"]["zz"],
    )
    assert unknown.endswith("fix: known: weight.")  # not the names of other levels
    wrapped = error_text(
        errors.LossError,
        fit,
        data=rows,
        loss=jax.checkpoint(
            lambda model, batch: model(batch["image"]) + batch["lable"], static_argnums=0
        ),
    )
    assert "the loss reads the key 'lable', and" in wrapped
    metric = error_text(
        errors.LossError,
        fit,
        data=rows,
        eval_data=rows,
        loss=image_loss,
        metrics={"seen": lambda model, batch: batch["imag"].mean()},
    )
    assert "metric \"seen\" reads the key 'imag'" in metric and metric.endswith(
        'fix: did you mean "image"?'
    )


SETTINGS = {"rate": 0.1}


def image_loss(model, batch):
    return model(batch["image"]).mean()


def catches_a_missing_key(model, batch):
    try:
        weight = batch["weight"]
    except KeyError:
        weight = SETTINGS["weight"]
    return image_loss(model, batch) * weight


@pytest.mark.parametrize(
    "loss",
    [
        lambda model, batch: image_loss(model, batch) * SETTINGS["weight"],
        lambda model, batch: image_loss(model, batch) + {"other": batch["label"]}["weight"],
        lambda model, batch: image_loss(model, batch) + dict(batch["more"])["weight"],
        catches_a_missing_key,
    ],
)
def test_loss_reads_a_missing_key_of_another_dict(loss):
    text = error_text(
        errors.LossError, fit, data={"image": X, "label": Y, "more": {"index": Y}}, loss=loss
    )
    assert (
        text.startswith("the loss fails on a batch of {image: float32[8, 64]")
        and "KeyError: 'weight'" in text
    )


def test_loss_of_wrong_type(golden):
    golden("loss_of_wrong_type", error_text(errors.LossError, fit, loss="mse"))


@pytest.mark.system
def test_loss_not_finite_at_first_step(golden):
    golden(
        "loss_not_finite_at_first_step",
        error_text(
            errors.DivergedError, fit, loss=lambda model, batch: jnp.log(model(batch[0]).mean() * 0)
        ),
    )


@pytest.mark.parametrize(
    "optimizer, shown",
    [("adam", "'adam' is a str"), (optax.adam, "adam is a function"), (0.1, "0.1 is a float")],
)
def test_optimizer_of_wrong_type(optimizer, shown):
    text = """\
optimizer='adam' is a str, not an optax gradient transformation.
    fix: such as optax.adamw(1e-3); a function that makes one must be called."""
    assert error_text(errors.OptimizerError, fit, optimizer=optimizer) == text.replace(
        "'adam' is a str", shown
    )
    fits(optimizer=optax.adamw(1e-3))


class Branches(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(64, 10, rngs=rngs)
        if self.up.kernel[0, 0] > 0:
            self.odd = True

    def __call__(self, x):
        return self.up(x)


def test_nnx_model_cannot_be_traced(golden):
    golden(
        "nnx_model_cannot_be_traced",
        error_text(errors.ModelError, fit, model=lambda: Branches(nnx.Rngs(0))),
    )


class Wide(nnx.Module):
    def __init__(self, width, *, rngs):
        self.up = nnx.Linear(64, {10: width}[10], rngs=rngs)

    def __call__(self, x):
        return self.up(x)


def line_of(function):
    return inspect.getsourcelines(function)[1]


def test_model_factory_raises():
    """What is meant for tracers does not help here. The place is the user's line, not one of
    flax's.
    """

    def build():
        return Wide(rngs=nnx.Rngs(0))

    with pytest.raises(errors.ModelError) as raised:
        fit(model=build)
    assert str(raised.value) == (
        "the model's factory raises TypeError: Wide.__init__() missing 1 required positional "
        "argument: 'width'\n"
        f"    in {__file__}, line {line_of(build) + 1}: return Wide(rngs=nnx.Rngs(0))\n"
        "    fix: correct that line."
    )
    assert type(raised.value.__cause__) is TypeError
    fits(model=lambda: Wide(10, rngs=nnx.Rngs(0)))


def test_model_init_raises():
    def init(key):
        return {"w": {}["missing"]}

    text = error_text(errors.ModelError, fit, model=spmd.FunctionalModel(init, apply))
    place = f"in {__file__}, line {line_of(init) + 1}: "
    assert text.splitlines()[:2] == [
        "the model raises KeyError: 'missing'",
        f'    {place}return {{"w": {{}}["missing"]}}',
    ]


def test_model_factory_numpy_error_caused_by_tracer():
    def build():
        kernel = np.zeros(3)
        kernel[0] = Wide(10, rngs=nnx.Rngs(0)).up.kernel[0, 0]

    assert error_text(errors.ModelError, fit, model=build).startswith(
        "the model's factory cannot be traced without data: "
    )


class Converts(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(10)(np.asarray(x))


def test_linen_model_cannot_be_traced(golden):
    golden("linen_model_cannot_be_traced", error_text(errors.ModelError, fit, model=Converts()))


def test_model_factory_with_arguments(golden):
    golden(
        "model_factory_with_arguments",
        error_text(errors.ModelError, fit, model=lambda rngs: Named(rngs)),
    )


def test_model_is_a_class(golden):
    golden("model_is_a_class", error_text(errors.ModelError, fit, model=Named))


def test_model_of_wrong_type(golden):
    golden("model_of_wrong_type", error_text(errors.ModelError, fit, model=3))


def test_linen_trainer_init_without_data(golden):
    trainer = spmd.Trainer(
        linen.Dense(10), loss=spmd.losses.cross_entropy, optimizer=optax.sgd(0.1)
    )
    golden("linen_trainer_init_without_data", error_text(errors.ModelError, trainer.init))
    trainer.init((X[:8], Y[:8]))


def test_spmd_error_inside_linen_model_keeps_its_type(golden):
    text = error_text(errors.DataError, fit, model=linen.Dense(10), data={"a": X, "y": Y})
    golden("spmd_error_inside_linen_model_keeps_its_type", text)
    fits(
        model=linen.Dense(10),
        data={"a": X, "y": Y},
        loss=spmd.losses.cross_entropy.on(inputs="a", targets="y"),
    )


# what a stranger tries ----------------------------------------------------------------------------


class Tensor:
    """What PyTorch gives, as far as it is seen from here: on an accelerator, numpy cannot read
    it.
    """

    __module__ = "torch"

    def __init__(self, array, *, here=True):
        self.array, self.shape, self.dtype, self.here = array, array.shape, "torch.float32", here

    def __array__(self, dtype=None, copy=None):
        if not self.here:
            raise TypeError("can't convert cuda:0 device type tensor to numpy.")
        return self.array


def test_lists_instead_of_arrays(golden):
    rows = [[float(number) for number in range(64)] for _ in range(32)]
    golden(
        "lists_instead_of_arrays_1", error_text(errors.DataError, fit, data=rows, batch_size=None)
    )
    golden(
        "lists_instead_of_arrays_2",
        error_text(errors.DataError, fit, data={"x": rows, "y": [0] * 32}),
    )
    fits(data=(np.asarray(rows, np.float32), np.asarray([0] * 32)))


def test_tensor_on_accelerator():
    for data, what in (
        ((Tensor(X, here=False), Y), "the data"),
        ([(Tensor(X[:8], here=False), Y[:8])], "the first batch"),
    ):
        assert (
            error_text(
                errors.DataError, fit, data=data, batch_size=None if isinstance(data, list) else 8
            )
            == f"""\
{what}: 0 is a torch.Tensor, which numpy cannot read: TypeError: can't convert cuda:0 device type tensor to numpy.
    fix: arrays in the host's memory, such as tensor.detach().cpu().numpy()."""  # noqa: E501
        )


def test_donated_array():
    gone = jnp.asarray(X)
    gone.delete()
    text = (
        "the data: 0 float32[32, 64] was deleted: it was donated to a call.\n    fix: a copy of "
        "it, numpy.array(...), made before."
    )
    assert error_text(errors.DataError, fit, data=(gone, Y)) == text


def test_tensor_on_accelerator_in_each_method():
    trainer = fits()
    for action in (
        lambda: spmd.data.resident((Tensor(X, here=False), Y)),
        lambda: trainer.predict(trainer.init(), Tensor(X, here=False)),
        lambda: trainer.place((Tensor(X[:8], here=False), Y[:8])),
        lambda: trainer.evaluate(trainer.init(), (Tensor(X, here=False), Y)),
    ):
        assert "is a torch.Tensor, which numpy cannot read: " in error_text(
            errors.DataError, action
        )


def test_host_tensor_is_read():
    from spmd.data import sources

    batches = sources.as_source([(Tensor(X[:8]), Y[:8])], batch_size=None, shuffle=None, seed=0)
    assert all(isinstance(batch.leaves[0], np.ndarray) for batch in batches.epoch(0))


def test_pytorch_module():
    Net = type("Net", (), {"__module__": "torch.nn", "__call__": lambda self, x: x})
    for model in (Net(), Net, lambda: Net()):
        assert error_text(errors.ModelError, fit, model=model).startswith(
            "the model is a Net of PyTorch, which JAX cannot trace.\n    fix: "
        )


@pytest.mark.parametrize(
    "package", ["keras.src.models", "tensorflow.keras", "haiku._src", "equinox._module"]
)
def test_model_of_another_library(package):
    """The fixes were tried with the libraries themselves."""
    Base = type("Base", (), {"__module__": package, "__call__": lambda self, x: x})
    Net = type("Net", (Base,), {"__module__": "mine"})
    for model in (Net(), lambda: Net()):
        text = error_text(errors.ModelError, fit, model=model)
        assert re.match(
            r"the model is a Net of (Keras|haiku|Equinox), which .*\n    fix: "
            r".*spmd.FunctionalModel\(lambda key: ",
            text,
        )


def test_data_function_with_arguments_or_without_result():
    assert error_text(
        errors.DataError, fit, data=lambda path: [(X, Y)], batch_size=None
    ).startswith("the function given as data takes arguments: path.")
    assert error_text(errors.DataError, fit, data=lambda: None, batch_size=None).startswith(
        "the function that was given as data returned None."
    )


def test_eval_data_of_wrong_shape(golden):
    golden("eval_data_of_wrong_shape", error_text(errors.DataError, fit, eval_data=(X[:, :32], Y)))
    assert len(fit(eval_data=(X[:3], Y[:3])).history.evaluations) == 1


def test_predict_inputs_of_wrong_shape(golden):
    result = fit()
    golden("predict_inputs_of_wrong_shape", error_text(errors.DataError, result.predict, X[:, :32]))
    assert len(result.predict(X)) == len(X)


def test_metric_raises(golden):
    def ratio(model, batch):
        raise ValueError("boom")

    more = {"metrics": {"ratio": ratio}, "eval_data": (X, Y)}
    golden("metric_raises", error_text(errors.LossError, fit, **more))
    more["metrics"] = {"ratio": lambda model, batch: "much"}
    assert error_text(errors.LossError, fit, **more).startswith(
        'metric "ratio" returned a str; wanted a scalar'
    )


@pytest.mark.system
def test_leaked_tracer():
    kept = []

    def loss(model, batch):
        kept.append(model(batch[0]).sum())
        return kept[0]

    text = error_text(errors.LossError, fit, loss=loss)
    assert re.match(
        r"the model, the loss or a metric uses an array of a trace that is over, made at "
        r"\S+test_errors\.py:\d+, in \S*loss\.\n",
        text,
    )
    assert text.endswith(
        "fix: return it as a metric, (loss, {name: array}); or keep it in an nnx.Variable, such as "
        "nnx.BatchStat."
    )


def test_values_in_errors_are_truncated():
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
            assert (
                max(map(len, str(caught.value).splitlines())) < 1100
                and len(str(caught.value)) < 1800
            ), option


@pytest.mark.parametrize("state", [None, {}, 3], ids=repr)
def test_step_with_wrong_state(state):
    text = error_text(errors.OptionError, fits().step, state, (X[:8], Y[:8]))
    assert text.startswith(f"state={state} is a") or text.startswith(
        "state=None is None.\n    fix: what trainer.init() or a step returns."
    )


# the tree of errors -------------------------------------------------------------------------------


def classes():
    return [
        kind
        for _, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, errors.SpmdError)
    ]


def test_docstring_lists_every_error():
    drawn, above = {}, {-1: "SpmdError"}  # by depth, who was drawn last
    for line in re.findall(r"(?m)^    ([│ ]*)[├└]── (\w+)", errors.__doc__):
        depth = len(line[0]) // 4
        drawn[line[1]], above[depth] = above[depth - 1], line[1]
    assert drawn["RendezvousTimeout"] == "ClusterError"
    assert drawn == {
        kind.__name__: kind.__bases__[0].__name__
        for kind in classes()
        if kind is not errors.SpmdError
    }
    assert all(kind.__doc__ for kind in classes())


def test_missing_extra_is_named():
    text = error_text(errors.MissingExtraError, errors.import_extra, "no_such_module", "data")
    assert (
        text == "no_such_module is not installed.\n    fix: in the checkout of spmd: pip install "
        "'.[data]'."
    )
    assert issubclass(errors.MissingExtraError, ImportError)


def test_long_problem_list_is_truncated():
    problems = [
        errors.Problem(f"parameter {number}", [f"{number} is wrong."])
        for number in range(errors.SHOWN + 2)
    ]
    text = errors.problems_text("nothing fits", problems)
    assert text.startswith("nothing fits\n102 problems:\n\n  parameter 0\n      0 is wrong.\n\n")
    assert text.endswith("\n\n  parameter 99\n      99 is wrong.\n\n  and 2 more problems.")


def test_summary_is_one_line_without_the_fix():
    problem = errors.Problem("w   float32[3]", ["3 / 2 leaves 1."], "4.", path="w")
    assert (
        errors.LayoutError("it does not fit\n1 problem:", problems=[problem]).summary
        == "w: 3 / 2 leaves 1."
    )
    assert (
        errors.LayoutError(
            "it does not fit\nat all", problems=[dataclasses.replace(problem, why=[])]
        ).summary
        == "w: it does not fit"
    )
    assert errors.LossError("the loss fails\n    at x", fix="another.").summary == "the loss fails"
    assert (
        errors.CompileError("it failed:\n    boom", summary="it failed: boom").summary
        == "it failed: boom"
    )


def test_error_text_is_bounded():
    text = str(errors.DataError(f"data={'x' * 38_400}\n    fix: less."))
    assert len(text) < 1100 and text.endswith("... (37,405 more)\n    fix: less.")
    assert len(str(errors.DataError("\n".join(["line " * 20] * 10_000)))) < 2 * errors.TEXT


def test_install_commands_never_name_an_unclaimed_package():
    root = pathlib.Path(errors.__file__).parents[1]
    folders = ("spmd", "docs", "examples", "notebooks", "benchmarks", "layouts")
    files = [
        *root.glob("*.md"),
        *(
            path
            for name in folders
            for path in (root / name).rglob("*")
            if path.suffix in (".py", ".md", ".ipynb", ".toml")
        ),
    ]
    install = re.compile(r"pip install (?:-\S+ )*['\"]?spmd\S*")
    wrong = [
        f"{path}: {command}"
        for path in files
        for command in install.findall(path.read_text(encoding="utf-8"))
    ]
    assert len(files) > 200 and not wrong
