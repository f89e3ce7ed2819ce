"""Training with stacks sharded over `stage` equals training on one device, under every reduction
and schedule.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spmd
from spmd import Gradients, Layout, Pipeline
from spmd.errors import CheckpointError, DataError, LayoutError, LossError, ModelError
from spmd.layout.toml_reader import loads
from spmd.nn.layer_stack import split_microbatches
from spmd.nn.parallel_context import ParallelConfig
from tests.compare import relative_difference
from tests.nn.pipes import WIDTH, Block

SLOW = pytest.mark.slow
VOCAB, LENGTH, ROWS = 11, 6, 32


class Tied(nnx.Module):
    """A small GPT whose head is its embedding, with a connection around the stack."""

    def __init__(self, rngs, depth=8, dropout=0.1):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.blocks = spmd.nn.LayerStack([Block(rngs, dropout=dropout) for _ in range(depth)])

    def __call__(self, tokens):
        x = self.embed(tokens)
        return self.embed.attend(x + self.blocks(x))


class Deep(nnx.Module):
    """A recurrent network."""

    def __init__(self, rngs, depth=4):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.stack = spmd.nn.RNNStack(
            [nnx.OptimizedLSTMCell(WIDTH, WIDTH, rngs=rngs) for _ in range(depth)]
        )
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.stack(self.embed(tokens)))


def tokens():
    drawn = np.random.default_rng(0).integers(0, VOCAB, (ROWS, LENGTH + 1)).astype(np.int32)
    return {"tokens": drawn[:, :-1], "targets": drawn[:, 1:]}


def trained(model, mesh, layout, steps=3, data=None, loss=None, **options):
    """A trainer, its state after some steps, and the losses."""
    count = int(np.prod([int(word.split("=")[1]) for word in mesh.split(",")]))
    trainer = spmd.Trainer(
        lambda: model(nnx.Rngs(0)),
        loss=loss or spmd.losses.cross_entropy,
        optimizer=optax.sgd(0.01, momentum=0.9),
        layout=layout,
        mesh=spmd.make_mesh(mesh, devices=jax.devices()[:count]),
        **options,
    )
    state, losses = trainer.init(), []
    for _ in range(steps):
        state, metrics = trainer.step(state, tokens() if data is None else data)
        losses.append(float(metrics["loss"]))
    return trainer, state, losses


def weights(trainer, state):
    """The model's parameters in its own order."""
    return jax.device_get(nnx.to_pure_dict(nnx.state(trainer.rebuild(state), nnx.Param)))


@pytest.fixture(scope="module")
def plain():
    """Weights and losses of each model after three steps on one device."""
    by_model = {}
    for model in (Tied, Deep):
        trainer, state, losses = trained(model, "data=1", "data_parallel")
        by_model[model] = weights(trainer, state), losses
    return by_model


def piped(reduction="all_reduce", *, gradients=None, more=None, **pipeline):
    pipeline = (
        pipeline
        if "time_chunk" in pipeline and "schedule" not in pipeline
        else {"microbatches": 4} | pipeline
    )
    return Layout(
        gradients=Gradients(reduction, **(gradients or {})),
        pipeline=Pipeline("stage", **pipeline),
        **(more or {}),
    )


CASES = {
    "gpipe-all_reduce": (Tied, "data=2,stage=4", piped()),
    "gpipe-compiler": (Tied, "data=2,stage=4", piped("compiler")),
    "gpipe-reduce_scatter": (
        Tied,
        "data=2,stage=4",
        piped("reduce_scatter", more={"default": spmd.Default("shard:data")}),
    ),
    "circular-all_reduce": (Tied, "data=4,stage=2", piped(schedule="circular", groups=2)),
    "circular-few": (Tied, "data=2,stage=4", piped(schedule="circular", groups=2, microbatches=2)),
    "circular-server": (
        Tied,
        "data=4,stage=2",
        piped("parameter_server", schedule="circular", groups=2),
    ),
    "1f1b-all_reduce": (Tied, "data=2,stage=4", piped(schedule="1f1b", microbatches=8)),
    "1f1b-compiler": (Tied, "data=2,stage=4", piped("compiler", schedule="1f1b")),
    "1f1b-reduce_scatter": (
        Tied,
        "data=4,stage=2",
        piped("reduce_scatter", schedule="1f1b", more={"default": spmd.Default("shard:data")}),
    ),
    "1f1b-server": (Tied, "data=4,stage=2", piped("parameter_server", schedule="1f1b")),
    "1f1b-few": (Tied, "data=1,stage=8", piped(schedule="1f1b", microbatches=2)),
    "wavefront-all_reduce": (Deep, "data=2,stage=4", piped(time_chunk=2)),
    "wavefront-server": (Deep, "data=4,stage=2", piped("parameter_server", time_chunk=4)),
    "wavefront-remat": (
        Deep,
        "data=2,stage=4",
        piped(time_chunk=2, more={"remat": spmd.Remat("nothing")}),
    ),
    "gpipe-remat": (
        Tied,
        "data=2,stage=4",
        piped(more={"remat": spmd.Remat("nothing", ("blocks/layers",))}),
    ),
    "1f1b-remat": (
        Tied,
        "data=2,stage=4",
        piped(schedule="1f1b", more={"remat": spmd.Remat("dots", ("blocks/layers",))}),
    ),
    "gpipe-zero1": (Tied, "data=2,stage=4", piped(more={"optimizer": spmd.OptimizerState("data")})),
}
TENSOR_PARALLEL = {
    "params": (spmd.Rule("**/up/kernel", (None, "model")), spmd.Rule("**/down/kernel", ("model",)))
}
SHARDED = TENSOR_PARALLEL | {"default": spmd.Default("shard:data")}
HIDDEN = {"params": (spmd.Rule("**/dense_{i,h}/kernel", (None, "model")),)}
CASES |= {
    "gpipe-tensor": (Tied, "data=2,stage=2,model=2", piped(more=TENSOR_PARALLEL)),
    "circular-tensor": (
        Tied,
        "data=2,stage=2,model=2",
        piped(schedule="circular", groups=2, more=TENSOR_PARALLEL),
    ),
    "1f1b-tensor": (Tied, "data=2,stage=2,model=2", piped(schedule="1f1b", more=TENSOR_PARALLEL)),
    "1f1b-tensor-fsdp": (
        Tied,
        "data=2,stage=2,model=2",
        piped("reduce_scatter", schedule="1f1b", more=SHARDED),
    ),
    "wavefront-tensor": (Deep, "data=2,stage=2,model=2", piped(time_chunk=2, more=HIDDEN)),
}
FAST = (
    "gpipe-compiler",
    "circular-all_reduce",
    "1f1b-all_reduce",
    "wavefront-all_reduce",
)


@pytest.mark.system
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[SLOW] * (case not in FAST)) for case in CASES]
)
def test_a_pipeline_trains_what_one_device_trains(plain, case):
    """Dropout too: a microbatch draws what its rows would have drawn in the whole batch."""
    model, mesh, layout = CASES[case]
    trainer, state, losses = trained(model, mesh, layout)
    assert relative_difference(weights(trainer, state), plain[model][0]) < 1e-5
    assert relative_difference(losses, plain[model][1]) <= 1e-6
    stack = state.params["blocks" if model is Tied else "stack"] if layout.stage_axis else None
    for leaf in jax.tree.leaves(stack):
        assert (
            leaf.sharding.spec[0] == "stage"
            and leaf.addressable_shards[0].data.shape[0] * trainer.mesh.shape["stage"]
            == leaf.shape[0]
        )
    (schedule,) = trainer.schedules.values()
    assert schedule.stages == trainer.mesh.shape["stage"] and schedule.bubble > 0


@SLOW
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "circular"])
@pytest.mark.parametrize("codec", ["bfloat16", "int8"])
def test_gradients_of_stages_are_sent_in_codecs(plain, schedule, codec):
    """A codec encodes each stage's part of a gradient sharded over stages."""
    groups = 2 if schedule == "circular" else 1
    layout = piped(
        gradients={"codec": codec, "error_feedback": codec == "int8"},
        schedule=schedule,
        groups=groups,
    )
    trainer, state, losses = trained(Tied, "data=4,stage=2", layout)
    difference = relative_difference(weights(trainer, state), plain[Tied][0])
    # rounded three times, to 8 bits: 1/256 of each gradient's size, whatever the weight's
    assert 1e-6 < difference < 0.05
    assert np.allclose(losses, plain[Tied][1], rtol=1e-3)
    exact_log = trained(Tied, "data=4,stage=2", piped(schedule=schedule, groups=groups), steps=1)[
        0
    ].wire
    assert trainer.wire.bytes(where="reduce_gradients/") < 0.6 * exact_log.bytes(
        where="reduce_gradients/"
    )


@SLOW
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_accumulation_and_half_precision(plain, schedule):
    """Accumulation changes what dropout draws, so without it; bfloat16 as it is on one device."""
    layout = piped(schedule=schedule, microbatches=2)

    def still(rngs):
        return _still(Tied(rngs))

    single = trained(still, "data=1", "data_parallel", accumulate=2, precision="bfloat16")
    trainer, state, losses = trained(
        still, "data=2,stage=4", layout, accumulate=2, precision="bfloat16"
    )
    ours, theirs, first = (
        np.concatenate([leaf.ravel() for leaf in jax.tree.leaves(tree)])
        for tree in (
            weights(trainer, state),
            weights(*single[:2]),
            weights(trainer, trainer.init()),
        )
    )
    # bfloat16 has 8 bits: sums in another order differ by 1/256 of what is summed, some layers deep
    assert np.linalg.norm(ours - theirs) < 0.05 * np.linalg.norm(theirs - first)
    assert np.allclose(losses, single[2], rtol=5e-3)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(state.params))


@pytest.mark.system
@pytest.mark.parametrize(
    ("model", "mesh", "schedule"),
    [
        (Deep, "data=1,stage=4", "gpipe"),
        pytest.param(Tied, "data=1,stage=4", "gpipe", marks=SLOW),
        pytest.param(Tied, "data=1,stage=4", "1f1b", marks=SLOW),
        pytest.param(Tied, "data=2,stage=2,model=2", "gpipe", marks=SLOW),
    ],
)
def test_half_precision_where_axes_are_left_to_the_partitioner(model, mesh, schedule):
    """XLA:CPU ends the process at a bfloat16 sum there, so sums over stages are float32; the loss
    is that of one device to 8 bits.
    """
    layout = piped(
        schedule=schedule, microbatches=None, more=TENSOR_PARALLEL if "model" in mesh else {}
    )
    losses = trained(model, mesh, layout, precision="bfloat16", steps=2)[2]
    plain = trained(model, "data=1", "data_parallel", precision="bfloat16", steps=2)[2]
    assert np.allclose(losses, plain, rtol=2**-7)


def _still(model):
    model.blocks.layers.dropout.rate = 0.0
    return model


@pytest.mark.system
@pytest.mark.parametrize("back", [False, pytest.param(True, marks=SLOW)], ids=["there", "back"])
@pytest.mark.parametrize("schedule", [pytest.param("gpipe", marks=SLOW), "circular"])
def test_checkpoints_go_from_pipelines_to_plain_models_and_back(tmp_path, schedule, back, plain):
    groups = 2 if schedule == "circular" else 1
    piped_run, plain_run = (
        ("data=4,stage=2", piped(schedule=schedule, groups=groups)),
        ("data=8", Layout(gradients=Gradients("all_reduce"))),
    )

    def make(mesh, layout):
        options = {
            "loss": spmd.losses.cross_entropy,
            "optimizer": optax.sgd(0.01, momentum=0.9),
            "batch_size": ROWS,
            "shuffle": False,
        }
        return lambda steps, folder: spmd.fit(
            lambda: Tied(nnx.Rngs(0)),
            tokens(),
            mesh=mesh,
            layout=layout,
            steps=steps,
            checkpoint=folder,
            resume=True,
            progress=False,
            **options,
        )

    first, then = (plain_run, piped_run) if back else (piped_run, plain_run)
    make(*first)(2, tmp_path)
    result = make(*then)(3, tmp_path)
    params = nnx.to_pure_dict(nnx.state(result.model, nnx.Param))
    assert (
        int(result.state.step) == 3
        and relative_difference(jax.device_get(params), plain[Tied][0]) < 1e-5
    )


@pytest.mark.system
@pytest.mark.parametrize("joins", [True, pytest.param(False, marks=SLOW)])
def test_1f1b_pipeline_refuses_loss_that_joins_rows(joins):
    def loss(model, batch):
        logits, targets = model(batch["tokens"])[:, -1], batch["targets"][:, -1]
        losses = -jax.nn.log_softmax(logits)[jnp.arange(len(targets)), targets]
        return jnp.average(losses, weights=1.0 + targets) if joins else losses.mean()

    def make():
        return Tied(nnx.Rngs(0), depth=2, dropout=0.0)

    def trainer_of(schedule):
        layout, mesh = (
            piped("compiler", schedule=schedule, microbatches=2),
            spmd.make_mesh("data=1,stage=2", devices=jax.devices()[:2]),
        )
        return spmd.Trainer(make, loss=loss, optimizer=optax.sgd(0.01), layout=layout, mesh=mesh)

    trainer = trainer_of("1f1b")
    if joins:
        with pytest.raises(
            LossError, match=r'1f1b pipeline.\n    fix: \[pipeline\] schedule = "gpipe"'
        ):
            trainer.step(trainer.init(), tokens())
        trainer = trainer_of("gpipe")
        with nnx.use_eager_sharding(False):
            right = loss(make(), tokens())
        np.testing.assert_allclose(
            trainer.step(trainer.init(), tokens())[1]["loss"], right, rtol=1e-5
        )
    else:
        assert trainer.prepare(tokens())[0].reading.mean


@pytest.mark.system
@pytest.mark.parametrize(
    "layout",
    [piped(schedule="circular", groups=2), "parameter_server", "diloco", "pipeline"],
    ids=str,
)
def test_concrete_model_is_prepared_before_its_state_is_made(layout):
    """Its arrays are packed when they are placed, and not while a step is traced."""
    model, mesh = (
        Tied(nnx.Rngs(0)),
        "data=4" if layout in ("parameter_server", "diloco") else "data=2,stage=2",
    )
    mesh = spmd.make_mesh(mesh, devices=jax.devices()[:4])
    trainer = spmd.Trainer(
        model, loss=spmd.losses.cross_entropy, optimizer=optax.sgd(0.01), layout=layout, mesh=mesh
    )
    trainer.prepare(tokens())
    state = trainer.init()
    assert (
        relative_difference(weights(trainer, state), nnx.to_pure_dict(nnx.state(model, nnx.Param)))
        == 0
    )


def test_numbers_of_numpy_are_numbers():
    assert Pipeline("stage", microbatches=np.int64(4)).microbatches.__class__ is int  # type: ignore[arg-type]


@SLOW
def test_moments_of_another_shape_stay_with_their_stages(tmp_path):
    """Adafactor keeps sums over dims of a parameter: a checkpoint does not say which layers they
    belong to.
    """
    make = partial(
        spmd.fit,
        lambda: Tied(nnx.Rngs(0)),
        tokens(),
        loss=spmd.losses.cross_entropy,
        optimizer=optax.adafactor(0.01, min_dim_size_to_factor=4),
        batch_size=ROWS,
        checkpoint=tmp_path,
        progress=False,
    )
    piped_run = {"mesh": "data=4,stage=2", "layout": piped(schedule="circular", groups=2)}
    make(steps=1, **piped_run)
    with pytest.raises(
        CheckpointError, match="fix: use the \\[pipeline\\] stages and groups of the checkpoint"
    ):
        make(steps=2, resume=True, mesh="data=8", layout="data_parallel")
    assert int(make(steps=2, resume=True, **piped_run).state.step) == 2


@SLOW
@pytest.mark.parametrize(
    "declared, rows, count", [(None, 24, 12), (6, 24, 6), (5, 24, 4), (3, 12, 3), (None, 7, 1)]
)
def test_a_circle_takes_the_microbatches_that_are_declared(declared, rows, count):
    parallel = ParallelConfig(
        jax.sharding.AbstractMesh((4,), ("stage",)),
        pipeline=Pipeline("stage", "circular", declared, groups=2),
    )
    assert split_microbatches(parallel, jax.ShapeDtypeStruct((rows, 2), "float32")).count == count


@pytest.mark.system
def test_schedules_are_those_of_a_step():
    """Of what a worker has after accumulation, whatever is evaluated meanwhile."""
    trainer, state, _ = trained(
        Tied, "data=2,stage=4", Layout(pipeline=Pipeline("stage", "1f1b")), steps=0, accumulate=2
    )
    trainer.prepare(tokens())
    assert [schedule.microbatches for schedule in trainer.schedules.values()] == [4], (
        "8 rows, and no microbatch of a single row"
    )
    trainer.evaluate(state, jax.tree.map(lambda x: x[:8], tokens()), batch_size=8)
    assert [schedule.microbatches for schedule in trainer.schedules.values()] == [4]


class Masked(nnx.Module):
    """A layer of a number and a mask of whole numbers, with something given by name."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, pair, *, how):
        x, mask = pair
        return x + how["scale"] * jnp.tanh(self.linear(x)) * mask if how["on"] else x, mask


class Pairs(nnx.Module):
    """A stack of such layers."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.blocks = spmd.nn.LayerStack([Masked(rngs) for _ in range(4)])

    def __call__(self, tokens):
        mask = (tokens[..., None] > 3).astype(jnp.int32)
        return self.embed.attend(
            self.blocks(
                (self.embed(tokens), mask), how={"on": True, "scale": self.embed.embedding[0]}
            )[0]
        )


@pytest.mark.system
@pytest.mark.parametrize("schedule", [pytest.param("gpipe", marks=SLOW), "1f1b"])
def test_whole_numbers_go_through_a_pipeline(schedule):
    """And arrays beside settings, in what is given by name."""
    single = trained(Pairs, "data=1", "data_parallel")
    trainer, state, losses = trained(Pairs, "data=2,stage=4", piped(schedule=schedule))
    assert (
        relative_difference(weights(trainer, state), weights(*single[:2])) < 1e-5
        and relative_difference(losses, single[2]) <= 1e-6
    )


@SLOW
def summed(model, batch):
    """(sum, count): a short batch keeps its size."""
    losses = optax.softmax_cross_entropy_with_integer_labels(
        model(batch["tokens"]), batch["targets"]
    )
    return losses.sum(), losses.size


@pytest.mark.sampled(system=3)
@pytest.mark.parametrize("loss", [None, summed])
@pytest.mark.parametrize(
    "options", [{"schedule": "1f1b"}, {"schedule": "circular", "groups": 2}], ids=str
)
def test_evaluation_and_prediction_of_any_number_of_rows(options, loss):
    data = jax.tree.map(lambda x: x[:30], tokens())
    # 15 rows each: 3 microbatches, 2 stages
    mesh = "data=2,stage=4" if loss is None else "data=2,stage=2"
    pipelined, state, _ = trained(
        lambda rngs: _still(Tied(rngs)), mesh, piped(**options), steps=1, loss=loss
    )
    single, same, _ = trained(lambda rngs: _still(Tied(rngs)), "data=1", "data_parallel", steps=1)
    assert np.isclose(
        pipelined.evaluate(state, data)["loss"], single.evaluate(same, data)["loss"], rtol=1e-5
    )
    assert (
        relative_difference(
            pipelined.predict(state, data["tokens"]), single.predict(same, data["tokens"])
        )
        < 1e-5
    )


def refused(model, mesh, layout, error):
    count = int(np.prod([int(word.split("=")[1]) for word in mesh.split(",")]))
    with pytest.raises(error) as caught:
        spmd.Trainer(
            lambda: model(nnx.Rngs(0)),
            loss=spmd.losses.cross_entropy,
            optimizer=optax.sgd(0.1),
            layout=layout,
            mesh=spmd.make_mesh(mesh, devices=jax.devices()[:count]),
        ).prepare(tokens())
    return str(caught.value)


ERRORS = {
    "no such axis": (
        lambda: refused(Tied, "data=2,stages=4", piped(), LayoutError),
        """this layout does not fit this model on mesh data=2, stages=4
1 problem (8 of 8 parameters fit):

  [pipeline] axis
      mesh axis "stage" does not exist on mesh data=2, stages=4.
      fix: did you mean "stages"?""",
    ),
    "layers that do not divide": (
        lambda: refused(lambda rngs: Tied(rngs, depth=6), "data=2,stage=4", piped(), LayoutError),
        """this layout does not fit this model on mesh data=2, stage=4
1 problem (8 of 8 parameters fit):

  [pipeline]   blocks/layers/down/bias, blocks/layers/down/kernel, blocks/layers/mixed/bias and 4 more
      a stack of 6 layers; mesh axis "stage" has 4 devices; 6 / 4 leaves 2.
      fix: 4 or 8 layers, or mesh axis "stage" of size 3.""",  # noqa: E501
    ),
    "the batch's axis": (
        lambda: refused(Tied, "data=2,stage=4", Layout(pipeline=Pipeline("data")), LayoutError),
        """this layout does not fit this model on mesh data=2, stage=4
1 problem (8 of 8 parameters fit):

  [pipeline] axis
      mesh axis "data" splits the batch; a stage sees all rows of its worker.
      fix: a separate axis, such as "stage".""",
    ),
    "a rule that shards the layers": (
        lambda: refused(
            Tied,
            "data=2,stage=4",
            piped(more={"params": (spmd.Rule("**/up/kernel", (None, "stage")),)}),
            LayoutError,
        ),
        """this layout does not fit this model on mesh data=2, stage=4
1 problem (7 of 8 parameters fit):

  blocks/layers/up/kernel   float32[8, 16]   rule 1: spec ["-", "stage"]
      mesh axis "stage" shards the layers of this stack ([pipeline]); a rule is about one layer.
      fix: spec ["-", "-"].""",
    ),
    "microbatches that do not divide": (
        lambda: refused(Tied, "data=2,stage=4", piped(microbatches=5), DataError),
        """the batch does not fit this layout on mesh data=2, stage=4
1 problem:

  batch of 32 rows
      is not divisible by 2 workers (data=2) times 5 microbatches of the pipeline: 32 / 10 leaves 2.
      fix: batch_size=30 or batch_size=40.""",
    ),
    "no stack": (
        lambda: refused(
            lambda rngs: nnx.Embed(VOCAB, VOCAB, rngs=rngs), "data=2,stage=4", piped(), LayoutError
        ),
        """this layout: [pipeline] splits stacks of layers over "stage", and the loss calls none.
    fix: spmd.nn.LayerStack or spmd.nn.RNNStack in the model, or a layout without [pipeline].""",
    ),
    "chunks of nothing": (
        lambda: refused(Tied, "data=2,stage=4", piped(time_chunk=2, microbatches=4), LayoutError),
        """this layout: [pipeline] time_chunk is for spmd.nn.RNNStack, and the loss calls none.
    fix: leave it out.""",
    ),
    "groups of nothing": (
        lambda: refused(
            Deep,
            "data=4,stage=2",
            Layout(pipeline=Pipeline("stage", "circular", groups=2)),
            LayoutError,
        ),
        """this layout: [pipeline] groups is for spmd.nn.LayerStack, and the loss calls none.
    fix: leave it out; schedule = "gpipe".""",
    ),
    "1f1b with recurrent layers": (
        lambda: trained(Deep, "data=2,stage=4", Layout(pipeline=Pipeline("stage", "1f1b"))),
        """a 1f1b pipeline is made of one spmd.nn.LayerStack, but the loss calls an RNNStack.
    fix: [pipeline] schedule = "gpipe", under which a stack of recurrent layers is a wavefront.""",
    ),
    "1f1b with two stacks": (
        lambda: trained(Twice, "data=2,stage=4", piped(schedule="1f1b")),
        """the loss calls stacks of layers more than once, and a 1f1b pipeline is made of one.
    fix: one LayerStack, called once; or [pipeline] schedule = "gpipe", under which there may be several.""",  # noqa: E501
    ),
    "1f1b with batch statistics": (
        lambda: refused(Counted, "data=2,stage=4", piped(schedule="1f1b"), ModelError),
        """this layout: [pipeline] schedule = "1f1b" runs the loss microbatch by microbatch, in an order that keeps no batch statistics.
    fix: LayerNorm or GroupNorm in place of BatchNorm, or  schedule = "gpipe".""",  # noqa: E501
    ),
}


class Twice(Tied):
    """The stack, and the stack again."""

    def __call__(self, tokens):
        return self.embed.attend(self.blocks(self.blocks(self.embed(tokens))))


class Counted(Tied):
    """With batch statistics behind the stack."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens):
        return self.embed.attend(self.norm(self.blocks(self.embed(tokens))))


@pytest.mark.sampled(quick=11)
@pytest.mark.parametrize("case", ERRORS)
def test_invalid_pipelines_are_reported_before_compiling(case):
    make, text = ERRORS[case]
    try:
        message = make()
    except spmd.SpmdError as error:
        message = str(error)
    assert message == text


FILES = {
    "circular of one": (
        '[pipeline]\naxis = "stage"\nschedule = "circular"',
        """layout cannot be read
1 problem:

  line 1: [pipeline] groups
      1 with a circular schedule is gpipe.
      fix: groups = 2, or schedule = "gpipe".""",
    ),
    "no axis": (
        "[pipeline]\nmicrobatches = 4",
        """layout cannot be read
1 problem:

  line 1: [pipeline] axis
      there is none, so nothing is split into stages.
      fix: such as axis = "stage".""",
    ),
    "unknown": (
        '[pipeline]\naxis = "stage"\nschedule = "gpip"\nmicrobatch = 0',
        """layout cannot be read
2 problems:

  line 3: [pipeline] schedule
      no schedule "gpip".
      fix: did you mean "gpipe"? This version knows: gpipe, circular, 1f1b.

  line 4: unknown key: [pipeline] microbatch
      nothing reads it.
      fix: did you mean "microbatches"?""",
    ),
    "zero": (
        '[pipeline]\naxis = "stage"\nmicrobatches = 0\ngroups = 2',
        """layout cannot be read
2 problems:

  line 3: [pipeline] microbatches
      0.
      fix: a whole number from 1.

  line 4: [pipeline] groups
      2, of which gpipe has one on each stage.
      fix: leave it out, or schedule = "circular".""",
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_files_that_say_what_cannot_be(case):
    text, wanted = FILES[case]
    with pytest.raises(LayoutError) as caught:
        loads(text)
    assert str(caught.value) == wanted


def test_a_layout_says_the_same_in_both_spellings():
    for name in ("pipeline", "pipeline_1f1b", "fsdp_pipeline_tensor"):
        layout = Layout.load(name)
        assert loads(layout.to_toml()) == layout and layout.pipeline.axis == "stage"
