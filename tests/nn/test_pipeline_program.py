"""What a pipeline's program is made of: ticks, collectives and memory, read from the traced and the
compiled step.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spmd
from spmd.nn.parallel_context import UNSHARDED
from spmd.nn.schedule import make_schedule
from spmd.train.compiled_functions import FunctionKey
from tests.nn.pipes import WIDTH, layers, loss_of, parallel_config

SLOW = pytest.mark.slow


def equations(jaxpr, times=1):
    """(equation, how often it runs) of a traced program."""
    for equation in jaxpr.eqns:
        yield equation, times
        often = times * equation.params["length"] if equation.primitive.name == "scan" else times
        for value in jax.tree.leaves(
            list(equation.params.values()),
            is_leaf=lambda v: hasattr(v, "eqns") or hasattr(v, "jaxpr"),
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner, often)


def shifts(jaxpr):
    """How often stages send to a neighbour, and the (source, target) pairs."""
    permutes = [
        (equation.params["perm"], times)
        for equation, times in equations(jaxpr)
        if equation.primitive.name == "ppermute"
    ]
    return sum(times for _, times in permutes), {pair for pairs, _ in permutes for pair in pairs}


def traced(kind, how, grad=False):
    stack, x = layers(kind)
    loss, params = loss_of(stack, how)
    run = jax.grad(loss, has_aux=True) if grad else loss
    return jax.make_jaxpr(run)(params, x).jaxpr


@pytest.mark.sampled(quick=7)
@pytest.mark.parametrize(
    "kind, stages, options, ticks",
    [
        ("lstm", 4, {"time_chunk": 3}, 12 // 3 + 4 - 1),
        ("lstm", 8, {"time_chunk": 2}, 12 // 2 + 8 - 1),
        ("gru", 4, {"time_chunk": 5}, 3 + 4 - 1),
        ("gpt", 4, {"microbatches": 8}, 8 + 4 - 1),
        ("gpt", 2, {"microbatches": 2}, 2 + 2 - 1),
        ("gpt", 2, {"schedule": "circular", "groups": 2, "microbatches": 4}, 2 * 4 + 2 - 1),
        ("gpt", 2, {"schedule": "circular", "groups": 4, "microbatches": 8}, 4 * 8 + 2 - 1),
    ],
)
def test_ticks_are_those_of_the_table(kind, stages, options, ticks):
    """One send in each tick, forward and again backward."""
    how = parallel_config((1, stages), **options)
    forward, pairs = shifts(traced(kind, how))
    assert forward == ticks == next(iter(how.schedules.values())).forward.ticks
    assert shifts(traced(kind, how, grad=True))[0] == 2 * ticks
    ring = {(stage, (stage + 1) % stages) for stage in range(stages)}
    assert pairs == (ring if "groups" in options else ring - {(stages - 1, 0)}), "neighbours only"


class Net(nnx.Module):
    """Something before the stack, something after it, and layers that are most of it."""

    def __init__(self, depth=8, width=WIDTH, rows=None):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(16, width, rngs=rngs)
        self.blocks = spmd.nn.LayerStack([Wide(width, rngs) for _ in range(depth)])

    def __call__(self, tokens):
        return self.embed.attend(self.blocks(self.embed(tokens)))


class Wide(nnx.Module):
    """An MLP."""

    def __init__(self, width, rngs):
        def named(*names):
            return nnx.with_partitioning(nnx.initializers.lecun_normal(), names)

        self.up = nnx.Linear(
            width, 4 * width, use_bias=False, kernel_init=named("embed", "mlp"), rngs=rngs
        )
        self.down = nnx.Linear(
            4 * width, width, use_bias=False, kernel_init=named("mlp", "embed"), rngs=rngs
        )

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(x)))


def step_of(mesh, layout, rows, *, length=8, model=Net, optimizer=None):
    """A trainer's traced step on a batch of `rows` rows."""
    count = int(np.prod([int(word.split("=")[1]) for word in mesh.split(",")]))
    made = spmd.make_mesh(mesh, devices=jax.devices()[:count])
    trainer = spmd.Trainer(
        lambda: model(),
        loss=spmd.losses.cross_entropy,
        optimizer=optimizer or optax.sgd(0.1),
        layout=layout,
        mesh=made,
    )
    tokens = np.zeros((rows, length), np.int32)
    program, _ = trainer.prepare({"tokens": tokens, "targets": tokens})
    state = trainer.init()
    batch = trainer.place({"tokens": tokens, "targets": tokens})
    return trainer, program.functions.jitted(FunctionKey("step", rows, True)).trace(
        state, batch.leaves, batch.weights, {}
    )


def piped(**pipeline):
    return spmd.Layout(
        gradients=spmd.Gradients("all_reduce"), pipeline=spmd.Pipeline("stage", **pipeline)
    )


@pytest.mark.system
@pytest.mark.parametrize("stages, microbatches", [(2, 4), (4, 8)])
def test_a_1f1b_step_has_the_ticks_of_its_table(stages, microbatches):
    _, step = step_of(
        f"data=2,stage={stages}", piped(schedule="1f1b", microbatches=microbatches), 16
    )
    count, pairs = shifts(step.jaxpr.jaxpr)
    ticks = make_schedule("1f1b", stages=stages, microbatches=microbatches).ticks
    assert count == 2 * ticks == 4 * (microbatches + stages - 1), (
        "each tick sends results to the next stage and gradients to the previous one"
    )
    ahead = {(stage, stage + 1) for stage in range(stages - 1)}
    assert pairs == ahead | {(b, a) for a, b in ahead}


def memory_of(mesh, layout, rows, **more):
    """The compiler's memory analysis of one device."""
    return step_of(mesh, layout, rows, **more)[1].lower().compile().memory_analysis()


def temporaries(mesh, layout, rows, **more):
    return memory_of(mesh, layout, rows, **more).temp_size_in_bytes


@pytest.mark.system
def test_activations_of_1f1b_do_not_grow_with_microbatches():
    """Rows of a microbatch stay the same, microbatches grow from 4 to 32."""
    sizes = {
        schedule: [
            temporaries(
                "data=1,stage=4", piped(schedule=schedule, microbatches=m), 2 * m, length=32
            )
            for m in (4, 32)
        ]
        for schedule in ("gpipe", "1f1b")
    }
    assert sizes["1f1b"][1] < 1.1 * sizes["1f1b"][0]
    assert sizes["gpipe"][1] > 3 * sizes["gpipe"][0]


@pytest.mark.system
def test_parameters_fall_with_the_stages():
    """With plain SGD the arguments of the compiled step are parameters, and a batch that is the
    same on all meshes.
    """
    one, two, four = (
        memory_of(f"data=1,stage={stages}", piped(), 8).argument_size_in_bytes
        for stages in (1, 2, 4)
    )
    stack = 8 * 2 * WIDTH * 4 * WIDTH * 4  # layers of two kernels, float32
    assert one - two == stack / 2 and two - four == stack / 4


@SLOW
def test_a_model_that_no_device_holds_alone():
    """On 2x2x2 devices each holds an eighth; state and temporaries stay within a budget that the
    state on one device exceeds by far.
    """
    more = {"model": lambda: Net(width=128), "optimizer": optax.adam(1e-3)}
    budget = 8 * 2**20
    layout = spmd.Layout.load("fsdp_pipeline_tensor")
    trainer, step = step_of("data=2,stage=2,model=2", layout, 8, **more)
    memory = step.lower().compile().memory_analysis()
    alone = step_of("data=1", "data_parallel", 8, **more)[1].lower().compile().memory_analysis()
    places = [
        place for path, place in trainer.resolved.placements.items() if path.startswith("blocks")
    ]
    assert (
        sum(place.bytes_per_device(trainer.resolved.mesh) for place in places) * 8
        == sum(place.nbytes for place in places)
        == 2**22
    )
    assert (
        memory.argument_size_in_bytes + memory.temp_size_in_bytes
        < budget
        < alone.argument_size_in_bytes
    )


def collectives(text):
    """(kind, elements, dims) of every collective of a compiled program."""
    import re

    operations = []
    for shape, kind in re.findall(
        r"= (\S+) "
        r"(all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(",
        text,
    ):
        dims = [
            int(size)
            for size in re.findall(r"\d+", (re.search(r"\[([\d,]*)\]", shape) or [0, ""])[1])
        ]
        operations.append((kind, int(np.prod(dims)), tuple(dims)))
    return operations


@pytest.mark.system
def test_nothing_gathers_weights_or_logits():
    """What is gathered belongs to activations that come back from the last stage; no weight, no
    logits [rows, length, words].
    """
    trainer, step = step_of("data=2,stage=4", piped(microbatches=4), 16)
    operations = collectives(step.lower().compile().as_text())
    kinds = {kind for kind, _, _ in operations}
    assert "collective-permute" in kinds and "all-reduce" in kinds
    weights = {leaf.shape for leaf in jax.tree.leaves(trainer.abstract_state.params)}
    weights |= {shape[1:] for shape in weights} | {(shape[0] // 4, *shape[1:]) for shape in weights}
    gathered = [dims for kind, _, dims in operations if kind == "all-gather"]
    assert not [dims for dims in gathered if dims in weights or (dims and dims[-1] == 16)]


@pytest.mark.system
def test_recurrent_weights_are_reduced_once_per_step():
    """Not once per time step."""

    class Deep(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.embed = nnx.Embed(16, WIDTH, rngs=rngs)
            self.stack = spmd.nn.RNNStack(
                [nnx.OptimizedLSTMCell(WIDTH, WIDTH, rngs=rngs) for _ in range(4)]
            )

        def __call__(self, tokens):
            return self.embed.attend(self.stack(self.embed(tokens)))

    for layout, mesh in ((piped(time_chunk=2), "data=2,stage=4"), ("data_parallel", "data=8")):
        trainer, _ = step_of(mesh, layout, 16, model=Deep)
        sent = [
            op
            for op in trainer.wire.ops
            if op.kind == "all_reduce" and op.where.startswith("reduce_gradients/")
        ]
        assert sent and all(op.count == 1 for op in sent)
        moved = sum(int(np.prod(op.shape)) for op in sent)
        stack, rest = (
            sum(leaf.size for leaf in jax.tree.leaves(trainer.abstract_state.params[part]))
            for part in ("stack", "embed")
        )
        assert moved == stack // (4 if mesh == "data=2,stage=4" else 1) + rest


@pytest.mark.system
def test_a_plain_stack_has_no_collectives():
    loss, params = loss_of(layers("gpt")[0], UNSHARDED)
    text = jax.jit(loss).lower(params, jnp.ones((16, 6, WIDTH))).compile()
    assert not collectives(text.as_text())
