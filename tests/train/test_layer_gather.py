"""Parameters of a stack gathered one layer at a time inside its scan, and their gradients reduced
there.
"""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spmd
from spmd.base.tree import flatten
from spmd.errors import LayoutError
from spmd.jaxpr.programs import equations
from spmd.mesh import MeshSpec, abstract_mesh
from spmd.nn import LayerStack, RNNStack
from spmd.planner.memory import usable_memory
from spmd.planner.target import load
from spmd.train.compiled_step import prepare_program
from spmd.train.model_setup import PlacedModel, TrainConfig
from spmd.wire.transfer import RESIDUAL
from tests.compare import assert_close

ROWS, WIDTH, LAYERS = 16, 16, 5
TENSOR_PARALLEL = (
    spmd.Rule("stack/layers/up/kernel", ("data", "model")),
    spmd.Rule("stack/layers/down/kernel", ("model", "data")),
    spmd.Rule("stack/layers/up/bias", ("model",)),
)


class Block(nnx.Module):
    def __init__(self, rngs, dropout=0.0):
        # no bias of 28 is sharded over 8
        self.norm, self.up = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.Linear(WIDTH, 28, rngs=rngs)
        self.down, self.drop = nnx.Linear(28, WIDTH, rngs=rngs), nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x):
        return x + self.drop(self.down(nnx.gelu(self.up(self.norm(x)))))


class Net(nnx.Module):
    def __init__(self, layers=LAYERS, dropout=0.0, calls=1):
        rngs = nnx.Rngs(0, dropout=1)
        self.stack = LayerStack([Block(rngs, dropout) for _ in range(layers)])
        self.out, self.calls = nnx.Linear(WIDTH, 3, rngs=rngs), calls

    def __call__(self, x):
        for _ in range(self.calls):
            x = self.stack(x)
        return self.out(x)


def batch(number=0, rows=ROWS):
    rng = np.random.default_rng(number)
    return {
        "x": rng.normal(size=(rows, WIDTH)).astype(np.float32),
        "y": rng.normal(size=(rows, 3)).astype(np.float32),
    }


def loss(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2, -1)


def sharded(gather, *, params=(), remat=None, **gradients):
    declared = spmd.Gradients("reduce_scatter", gather=gather, **gradients)
    return spmd.Layout(
        params=params,
        default=spmd.Default("shard:data"),
        gradients=declared,
        remat=remat or spmd.Remat(),
    )


def trainer_of(layout, mesh="data=8", net=lambda: Net(), loss=loss, **options):
    mesh = spmd.make_mesh(
        mesh,
        devices=jax.devices()[: np.prod([int(part.split("=")[1]) for part in mesh.split(",")])],
    )
    return spmd.Trainer(
        net, loss=loss, optimizer=optax.sgd(0.05, momentum=0.9), mesh=mesh, layout=layout, **options
    )


def train(trainer, steps=3):
    state = trainer.init()
    for number in range(steps):
        state, metrics = trainer.step(state, batch(number))
    return state, metrics


def params(state):
    return {path: np.asarray(leaf) for path, leaf in flatten(jax.device_get(state.params)).items()}


class Recurrent(nnx.Module):
    def __init__(self, dropout=0.0):
        rngs = nnx.Rngs(0, dropout=1)
        self.stack = RNNStack(
            [nnx.GRUCell(WIDTH, WIDTH, rngs=rngs) for _ in range(4)],
            residual_from=1,
            dropout=dropout,
            rngs=rngs,
        )
        self.out = nnx.Linear(WIDTH, 3, rngs=rngs)

    def __call__(self, x):
        lengths = 2 + (x[:, 0] > 0).astype(jnp.int32)
        return self.out(
            self.stack(x[:, None] * jnp.arange(1.0, 5.0)[:, None], lengths=lengths).sum(1)
        )


def gathered_by_layer(trainer):
    return trainer.prepare(batch())[0].sync.layerwise


CASES = {
    "plain": {},
    "accumulation": {"accumulate": 2},
    "dropout": {"net": lambda: Net(dropout=0.5)},
    "dropout and accumulation": {"net": lambda: Net(dropout=0.5), "accumulate": 2},
    "everything recomputed": {"remat": spmd.Remat("nothing")},
    "layers recomputed": {"remat": spmd.Remat(modules=("stack/layers",))},
    "products kept": {"remat": spmd.Remat("dots")},
    "tensor parallel": {"params": TENSOR_PARALLEL, "mesh": "data=4,model=2"},
    "two data axes": {"mesh": "node=2,data=4", "axes": ("node", "data")},
    "shards inside each of two nodes": {"mesh": "node=2,data=4", "axes": "data"},
}


@pytest.mark.sampled(quick=11, system=3)
@pytest.mark.parametrize("case", CASES)
def test_layers_gathered_in_their_loop_train_as_on_one_device(case):
    options = dict(CASES[case])
    layout = sharded("layer", params=options.pop("params", ()), remat=options.pop("remat", None))
    if axes := options.pop("axes", None):
        rules = (
            spmd.Rule("stack/layers/up/kernel", (axes, None)),
            spmd.Rule("stack/layers/down/kernel", (None, axes)),
        )
        layout = dataclasses.replace(
            layout, params=rules, batch=dataclasses.replace(layout.batch, spec=(("node", "data"),))
        )
        layout = dataclasses.replace(layout, default=spmd.Default("replicate"))
        options["net"] = lambda: Net()
    trainer, one = (
        trainer_of(layout, **options),
        trainer_of("data_parallel", **options | {"mesh": "data=1"}),
    )
    state, _ = train(trainer)
    assert "stack/layers/down/kernel" in gathered_by_layer(trainer)
    assert_close(params(state), params(train(one)[0]))


CODECS = {
    "bfloat16": {"codec": "bfloat16"},
    "int8": {"codec": "int8", "options": {"block": 64}},
    "float8": {"codec": "float8", "options": {"block": 64}},
    "sign": {"codec": "sign"},
    "top_k": {"codec": "top_k", "options": {"keep": 0.25}},
}


@pytest.mark.sampled(system=7)
@pytest.mark.parametrize(("accumulate", "mode"), [(1, "auto"), (2, "reduced"), (2, "local")])
@pytest.mark.parametrize("codec", CODECS)
def test_what_a_codec_loses_of_a_layer_is_in_its_residual(codec, accumulate, mode):
    check_residual("stack/layers/down/kernel", lambda: Net(), codec, accumulate, mode)


@pytest.mark.system
def test_what_a_codec_loses_of_a_recurrent_layer_is_in_its_residual():
    check_residual("stack/cells/dense_h/kernel", lambda: Recurrent(), "int8", 1)


def check_residual(path, net, codec, accumulate, mode="auto"):
    # with plain SGD at a rate of 1, what was applied plus the mean residual is the true mean
    # gradient
    def step_of(layout):
        mesh = spmd.make_mesh("data=8")
        trainer = spmd.Trainer(
            net,
            loss=loss,
            optimizer=optax.sgd(1.0),
            mesh=mesh,
            layout=layout,
            accumulate=accumulate,
        )
        return trainer, trainer.step(trainer.init(), batch())[0]

    (trainer, lossy), (_, exact) = (
        step_of(sharded("layer", error_feedback=True, accumulate=mode, **CODECS[codec])),
        step_of(sharded("full")),
    )
    assert path in gathered_by_layer(trainer)
    residual = np.asarray(lossy.exchange[path][RESIDUAL])
    assert residual.shape == (8, *params(exact)[path].shape) and np.abs(residual).max() > 1e-5
    applied, true = params(lossy)[path], params(exact)[path]
    assert np.abs(applied - true).max() > 1e-6
    np.testing.assert_allclose(applied - residual.mean(0), true, rtol=1e-5, atol=1e-5)


@pytest.mark.sampled(system=2)
@pytest.mark.parametrize("dropout", [0.5, 0.0])
def test_recurrent_layers_are_gathered_one_by_one(dropout):
    layer, one = (
        trainer_of(sharded("layer"), net=lambda: Recurrent(dropout)),
        trainer_of("data_parallel", "data=1", lambda: Recurrent(dropout)),
    )
    assert "stack/cells/dense_h/kernel" in gathered_by_layer(layer)
    assert_close(params(train(layer)[0]), params(train(one)[0]))
    text = layer.prepare(batch())[0].compile().as_text()
    assert (
        not re.search(rf"f32\[4,{WIDTH},{3 * WIDTH}\]\S* all-gather", text) and "all-gather" in text
    )
    full = (
        trainer_of(sharded("full"), net=lambda: Recurrent(dropout))
        .prepare(batch())[0]
        .compile()
        .as_text()
    )
    assert re.search(rf"f32\[4,{WIDTH},{3 * WIDTH}\]\S* all-gather", full)


@pytest.mark.system
def test_residuals_of_layers_serve_the_next_step_and_are_restored(tmp_path):
    layout = sharded("layer", codec="int8", options={"block": 64}, error_feedback=True)
    trainer = trainer_of(layout)
    straight, _ = train(trainer, 4)
    options = {
        "loss": loss,
        "optimizer": optax.sgd(0.05, momentum=0.9),
        "mesh": "data=8",
        "layout": layout,
        "batch_size": ROWS,
        "progress": False,
    }
    data = {
        name: np.concatenate([batch(number)[name] for number in range(4)]) for name in ("x", "y")
    }
    for steps in (2, 4):
        result = spmd.fit(
            lambda: Net(),
            data,
            steps=steps,
            checkpoint=tmp_path,
            resume=steps > 2,
            shuffle=False,
            **options,
        )
    assert_close(
        {
            path: np.asarray(leaf)
            for path, leaf in flatten(nnx.to_pure_dict(nnx.state(result.model, nnx.Param))).items()
        },
        params(straight),
        0,
    )
    forgetful, _ = train(trainer_of(sharded("layer", codec="int8", options={"block": 64})), 4)
    assert (
        np.abs(
            params(straight)["stack/layers/up/kernel"] - params(forgetful)["stack/layers/up/kernel"]
        ).max()
        > 1e-5
    )


ACCUMULATED = {
    "plain": {},
    "dropout": {"net": lambda: Net(dropout=0.5)},
    "bfloat16": {"precision": "bfloat16"},
    "tensor parallel": {"params": TENSOR_PARALLEL, "mesh": "data=4,model=2"},
    "everything recomputed": {"remat": spmd.Remat("nothing")},
}


@pytest.mark.sampled(system=7)
@pytest.mark.parametrize("case", ACCUMULATED)
@pytest.mark.parametrize("mode", ["local", "reduced"])
def test_gradients_of_microbatches_are_those_of_one_device(mode, case):
    options = {"accumulate": 2} | ACCUMULATED[case]
    layout = sharded(
        "layer", params=options.pop("params", ()), remat=options.pop("remat", None), accumulate=mode
    )
    trainer, one = (
        trainer_of(layout, **options),
        trainer_of("data_parallel", **options | {"mesh": "data=1"}),
    )
    state, _ = train(trainer)
    assert trainer.prepare(batch())[0].accumulated == mode
    # A bias begins at 0, so it is as far off as its gradient: sums over other rows, each rounded to
    # bfloat16, by up to 2**-9 of it.
    assert_close(params(state), params(train(one)[0]), 2**-6 if case == "bfloat16" else 1e-6)


def reductions(accumulate, mode):
    """How often gradients of each shape are reduced in the traced step."""
    trainer = trainer_of(sharded("layer", accumulate=mode), accumulate=accumulate)
    trainer.prepare(batch())
    counts: dict = {}
    for op in trainer.wire.ops:
        if "reduce_gradients" in op.where:
            counts[op.shape] = counts.get(op.shape, 0) + op.count
    return counts


@pytest.mark.system
def test_local_gradients_are_reduced_once_per_step_and_others_in_every_microbatch():
    kernel, head = (28, WIDTH), (WIDTH, 3)
    for accumulate, mode, times in ((1, "auto", 1), (2, "reduced", 2), (2, "local", 1)):
        found = reductions(accumulate, mode)
        assert (found[kernel], found[head]) == (times * LAYERS, 1), mode
    assert reductions(2, "local") == reductions(1, "auto")


def has_memory(monkeypatch, limit):
    monkeypatch.setattr("spmd.train.model_setup.memory_limit", lambda mesh: limit)


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize(
    ("limit", "accumulated", "why"),
    [
        (
            None,
            "reduced",
            "are reduced in each of 2 microbatches: devices do not say how much memory they have.",
        ),
        (
            60_000,
            "reduced",
            "are reduced in each of 2 microbatches: in full they exceed 33% of the 45.4 KiB that "
            "state and two layers leave",
        ),
        (
            90_000,
            "local",
            "are summed over 2 microbatches and reduced once: in full they fit into 33% of the "
            "74.7 KiB that state and two",
        ),
    ],
)
def test_auto_accumulates_full_gradients_where_memory_allows(monkeypatch, limit, accumulated, why):
    has_memory(monkeypatch, limit)
    trainer = trainer_of(sharded("layer"), accumulate=2)
    program, _ = trainer.prepare(batch())
    assert program.accumulated == accumulated
    (note,) = [note for note in trainer.notes() if "microbatches" in note]
    assert note.startswith("gradients of 5 parameters of stacks (18.4 KiB) " + why)


@pytest.mark.system
def test_a_plan_chooses_as_fit_does():
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch())
    config = TrainConfig(lambda: Net(), loss, optax.sgd(0.05, momentum=0.9), accumulate=2)

    def accumulated(memory):
        placed = PlacedModel(
            config,
            abstract_mesh(MeshSpec.parse("data=8")),
            sharded("layer"),
            platform="cpu",
            device_memory=memory,
        )
        return prepare_program(placed, shapes).accumulated

    assert (accumulated(None), accumulated(60_000), accumulated(90_000)) == (
        "reduced",
        "reduced",
        "local",
    )
    memory = {name: usable_memory(load(name)) for name in ("h100", "cpu")}
    assert memory == {"h100": int(0.75 * load("h100").memory), "cpu": None}


@pytest.mark.sampled(quick=2)
@pytest.mark.parametrize(
    ("gather", "accumulate", "why"),
    [
        ("layer", 1, "there is one microbatch"),
        ("full", 2, "no gradients are those of weights that are gathered layer by layer"),
    ],
)
def test_accumulation_that_applies_to_nothing_is_said(gather, accumulate, why):
    trainer = trainer_of(sharded(gather, accumulate="local"), accumulate=accumulate)
    trainer.prepare(batch())
    assert f'note: [gradients] accumulate = "local" is not used: {why}.' in trainer.notes()


@pytest.mark.system
def test_a_run_that_resumes_on_other_devices_says_that_it_accumulates_otherwise(
    tmp_path, monkeypatch
):
    data = {
        name: np.concatenate([batch(number)[name] for number in range(2)]) for name in ("x", "y")
    }
    options = {
        "loss": loss,
        "optimizer": optax.sgd(0.05),
        "mesh": "data=8",
        "layout": sharded("layer"),
        "accumulate": 2,
    }
    for steps, limit in ((1, None), (2, 90_000)):
        has_memory(monkeypatch, limit)
        spmd.fit(
            lambda: Net(),
            data,
            steps=steps,
            batch_size=ROWS,
            checkpoint=tmp_path,
            resume=steps > 1,
            check_memory=False,
            progress=False,
            **options,
        )
    (resumed,) = [
        record
        for record in map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
        if record.get("event") == "resumed"
    ]
    assert resumed["changed"] == ["accumulated gradients of stacks was reduced, is local"]


@pytest.mark.system
def test_every_layer_is_gathered_forward_and_backward_and_reduced_in_the_loop():
    trainer = trainer_of(sharded("layer", codec="bfloat16", weights="bfloat16"))
    trainer.step(trainer.init(), batch())
    # kernels, scale and two biases of 16; that of 28 is replicated
    small = WIDTH * 28 * 2 // 8 + WIDTH * 3 // 8
    gathers = [
        op.count
        for op in trainer.wire.ops
        if (op.where, op.kind, op.shape) == ("gather_params", "all_gather", (1, small))
    ]
    reductions = [
        op.count
        for op in trainer.wire.ops
        if op.where == "reduce_gradients/bfloat16" and op.shape == (8, small)
    ]
    # forward the first layer and, in the loop, the next one; backward the last but one and the
    # next; the last gradient after the loop
    assert gathers == [1, LAYERS - 1, 1, LAYERS - 1]
    assert sorted(reductions) == [1, LAYERS - 1]


def test_the_loops_communicate_nothing_that_they_compute():
    # what an iteration gathers and reduces depends on its inputs alone, so it can be hidden behind
    # all of its products
    program, _ = trainer_of(sharded("layer", codec="bfloat16")).prepare(batch())
    loops = [
        op.params["jaxpr"].jaxpr
        for op in equations(program.traced.jaxpr.jaxpr)
        if op.primitive.name == "scan"
    ]
    kinds = [{op.primitive.name for op in equations(jaxpr)} for jaxpr in loops]
    assert {"dot_general", "all_gather", "all_to_all"} <= set.union(*kinds)
    for jaxpr in loops:
        computed: set = set()
        for op in jaxpr.eqns:
            depends = any(not hasattr(v, "val") and v in computed for v in op.invars)
            inside = {inner.primitive.name for inner in equations(jaxpr.replace(eqns=[op]))}
            assert not (depends and inside & {"all_gather", "all_to_all"})
            if depends or "dot_general" in inside:
                computed.update(op.outvars)


def test_weights_are_gathered_in_the_dtype_of_the_computation():
    program, _ = trainer_of(sharded("layer"), precision="bfloat16").prepare(batch())
    found = list(equations(program.traced.jaxpr.jaxpr))

    def dtypes(primitive):
        return {
            x.aval.dtype.name for op in found if op.primitive.name == primitive for x in op.invars
        }

    assert dtypes("all_gather") == dtypes("dot_general") == {"bfloat16"}


@pytest.mark.system
def test_memory_of_gathered_weights_does_not_grow_with_the_layers():
    def temporaries(gather, layers):
        program, _ = trainer_of(sharded(gather), net=lambda: Net(layers)).prepare(batch())
        return program.compile().memory_analysis().temp_size_in_bytes

    one_layer = 4 * (2 * 28 * WIDTH + 4 * WIDTH)  # bytes
    # a generous bound of what a layer keeps for the backward pass, of 2 rows
    kept = 2 * 4 * (28 * 8 + WIDTH * 6)
    full, by_layer = (
        temporaries(gather, 20) - temporaries(gather, 4) for gather in ("full", "layer")
    )
    assert full > 16 * one_layer
    assert by_layer < 16 * (kept + one_layer / 2)


@pytest.mark.system
def test_layers_that_are_recomputed_keep_their_inputs_only():
    def temporaries(layers):
        layout = sharded("layer", remat=spmd.Remat(modules=("stack/layers",)))
        program, _ = trainer_of(layout, net=lambda: Net(layers)).prepare(batch())
        return program.compile().memory_analysis().temp_size_in_bytes

    carried = 2 * WIDTH * 4  # 2 rows on each device
    layer_state = 4 * (2 * 28 * WIDTH + 4 * WIDTH) // 8 + 4 * 28  # the mean gradients of a layer
    assert temporaries(20) - temporaries(4) < 16 * 2 * (carried + layer_state)


@pytest.mark.system
@pytest.mark.parametrize("rows", [16, 13])
def test_evaluation_and_prediction_gather_by_layer_too(rows):
    layer, full = (
        trainer_of(
            sharded(gather), metrics={"error": lambda m, b: jnp.abs(m(b["x"]) - b["y"]).mean(-1)}
        )
        for gather in ("layer", "full")
    )
    ours, theirs = (
        trainer.evaluate(trainer.init(), batch(rows=rows), batch_size=8)
        for trainer in (layer, full)
    )
    assert_close(ours, theirs)


def test_auto_gathers_small_stacks_in_full():
    assert not gathered_by_layer(trainer_of(sharded("auto")))


def penalised(model, batch):
    return loss(model, batch) + 1e-3 * jnp.sum(model.stack.layers.up.kernel.get_value() ** 2)


@pytest.mark.system
@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"loss": penalised}, "the loss reads it outside of its stack, too (integer_pow)"),
        ({"net": lambda: Net(calls=2)}, "its stack is called several times"),
        (
            {"remat": spmd.Remat(modules=("stack/layers/up",))},
            "[remat] recomputes only a part of its layer, stack/layers/up",
        ),
        ({"codec": "int8", "start_step": 3}, "[gradients] start_step is about full gradients"),
        (
            {"codec": "power_sgd", "options": {"rank": 1}, "error_feedback": True},
            "codec power_sgd keeps a state",
        ),
    ],
)
def test_what_cannot_be_gathered_by_layer_is_refused_or_gathered_in_full(options, why, monkeypatch):
    keys = ("loss", "net")
    remat = options.get("remat")
    gradients = {key: value for key, value in options.items() if key not in (*keys, "remat")}
    rest = {key: value for key, value in options.items() if key in keys}
    with pytest.raises(LayoutError) as refused:
        trainer_of(sharded("layer", remat=remat, **gradients), **rest).prepare(batch())
    assert why in str(refused.value) and 'gather = "auto"' in str(refused.value)
    assert {problem.path for problem in refused.value.problems} <= {
        "stack",
        "stack/layers/up/kernel",
    }
    monkeypatch.setattr("spmd.sync.layer_gather.AUTO_BYTES", 0)
    trainer = trainer_of(sharded("auto", remat=remat, **gradients), **rest)
    assert "stack/layers/up/kernel" not in gathered_by_layer(trainer)
    assert any("gathered in full" in note and why in note for note in trainer.notes())
    if rest:
        assert_close(
            params(train(trainer)[0]),
            params(train(trainer_of("data_parallel", mesh="data=1", **rest))[0]),
        )
