"""The communication log against the program that is lowered and the one that is compiled, and bytes
against bytes.
"""

import collections
import dataclasses
import importlib.util
import itertools
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import spmd
from examples import gpt
from spmd.base.tree import flatten, map_paths
from spmd.jaxpr.primitives import Kind, of_kind
from spmd.layout.gradients import GradientRule
from spmd.layout.schema import Batch, Default, OptimizerState
from spmd.run.callbacks import Callback
from spmd.run.loggers import JsonLines
from spmd.train.compiled_functions import FunctionKey
from spmd.wire.comm_log import KINDS, SENT, read_collectives

CODECS = {
    "exact": {},
    "bfloat16": {},
    "bfloat16 ring": {"reduce": "ring"},
    "int8": {"block": 16},
    "float8": {"block": 16},
    "sign": {"block": 32},
    "top_k": {"keep": 0.1},
    "power_sgd": {"rank": 2},
}
LOSSY = [name for name in CODECS if name != "exact"]
ROWS = ("bfloat16", "int8", "float8", "sign", "top_k")  # codecs that send one row to each worker
MODEL_RULES = (
    spmd.Rule("{up,out}/kernel", (None, "model")),
    spmd.Rule("mid/kernel", ("model",)),
    spmd.Rule("up/bias", ("model",)),
)
MESHES = {
    "data=8": {},
    "data=4,model=2": {"params": MODEL_RULES},
    "node=2,data=4": {"batch": Batch((("node", "data"),))},
}
# moments, and so shards of the gradients, are sharded over the workers
SHARED = OptimizerState("data")


class MLP(nnx.Module):
    """7, 30 and 5 divide by no number of workers; 40 does."""

    def __init__(self, sizes=(7, 30, 40, 6), rngs=None):
        self.up, self.mid, self.out = (
            nnx.Linear(*pair, rngs=rngs) for pair in itertools.pairwise(sizes)
        )

    def __call__(self, x):
        return self.out(nnx.relu(self.mid(nnx.relu(self.up(x)))))


def gradients(codec="exact", reduction="all_reduce", **more):
    """A codec with its options from the list above; fed back where that can be."""
    if codec not in ("exact", "bfloat16 ring"):
        more = {"error_feedback": True, **more}
    return spmd.Gradients(reduction, codec.split()[0], CODECS[codec], **more)


def trainer_of(
    grads,
    mesh="data=8",
    *,
    sizes=(7, 30, 40, 6),
    rows=16,
    loss=spmd.losses.cross_entropy,
    prepare=True,
    accumulate=1,
    **layout,
):
    layout = spmd.Layout(gradients=grads, **(MESHES.get(mesh, {}) | layout))
    devices = jax.devices()[: spmd.MeshSpec.parse(mesh).size]
    trainer = spmd.Trainer(
        lambda: MLP(sizes, rngs=nnx.Rngs(0)),
        loss=loss,
        optimizer=optax.sgd(0.1, momentum=0.9),
        mesh=spmd.make_mesh(mesh, devices=devices),
        layout=layout,
        accumulate=accumulate,
    )
    if prepare:
        trainer.prepare(batch(sizes, rows))
    return trainer


def batch(sizes=(7, 30, 40, 6), rows=16, seed=0):
    random = np.random.default_rng(seed)
    return {
        "x": random.normal(size=(rows, sizes[0])).astype("float32"),
        "y": random.integers(0, sizes[-1], rows).astype("int32"),
    }


def lowered(trainer):
    """The step on a full batch, lowered and not compiled."""
    program = trainer.prepare(None)[0]

    def place(spec):
        return NamedSharding(trainer.mesh, PartitionSpec(*spec))

    def at(path, x):
        return jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=place(trainer.resolved.batch_spec(path))
        )

    weights = jax.ShapeDtypeStruct(
        (program.rows,), jnp.float32, sharding=place((trainer.resolved.data_axes,))
    )
    return program.functions.jitted(FunctionKey("step", program.rows, True)).lower(
        trainer.abstract_state, map_paths(at, program.sample), weights, {}
    )


# reading programs ---------------------------------------------------------------------------------

DTYPES = {
    "f32": "float32",
    "bf16": "bfloat16",
    "f16": "float16",
    "i8": "int8",
    "i32": "int32",
    "ui8": "uint8",
    "ui16": "uint16",
}


@dataclasses.dataclass(frozen=True)
class SentOperand:
    """One operand of one collective of a lowered program."""

    kind: str
    groups: tuple[tuple[int, ...], ...]
    dtype: str
    shape: tuple[int, ...]
    branch: int | None

    @property
    def key(self):
        return self.kind, len(self.groups[0]), self.dtype, self.shape, self.branch


def collectives(program):
    """Every collective of a lowered program and how often it runs in a step; loops and calls are
    multiplied out.
    """
    module, counts = program.compiler_ir("stablehlo"), collections.Counter()
    functions = {
        str(op.name).strip('"'): op
        for op in module.body.operations
        if op.operation.name == "func.func"
    }

    def walk(operations, times, branch):
        for op in operations:
            op, name = op.operation, op.operation.name
            if name == "func.call":
                walk(body(functions[str(op.attributes["callee"]).strip('@"')]), times, branch)
            elif name == "stablehlo.while":
                condition, loop = op.regions
                (length,) = re.findall(
                    r"constant dense<(\d+)> : tensor<i32>",
                    "\n".join(map(str, walk_region(condition))),
                )
                walk(walk_region(loop), times * int(length), branch)
            elif name == "stablehlo.case":
                for number, region in enumerate(op.regions):
                    walk(walk_region(region), times, number)
            elif name.removeprefix("stablehlo.") in SENT:
                groups = groups_in(op.attributes["replica_groups"], module)
                for operand in op.operands:
                    *shape, dtype = (
                        str(operand.type).removeprefix("tensor<").removesuffix(">").split("x")
                    )
                    sent = SentOperand(
                        name.removeprefix("stablehlo."),
                        groups,
                        DTYPES[dtype],
                        tuple(map(int, shape)),
                        branch,
                    )
                    if len(groups[0]) > 1:
                        counts[sent] += times
            else:
                for region in op.regions:
                    walk(walk_region(region), times, branch)

    def walk_region(region):
        return [op for block in region.blocks for op in block.operations]

    def body(function):
        return walk_region(function.operation.regions[0])

    walk(body(functions["main"]), 1, None)
    return counts


def groups_in(attribute, module):
    """Which devices exchange: since jax 0.11 StableHLO has axes of a mesh in place of the numbers
    of devices.
    """
    if "replica_group_mesh_axes" not in str(attribute):
        return tuple(map(tuple, np.array(attribute).tolist()))
    name, axes = re.search(r"mesh = @(\w+), axes = \[(.*)\]", str(attribute)).groups()
    meshes = {
        op.operation.attributes["sym_name"].value: op.operation
        for op in module.body.operations
        if op.operation.name == "sdy.mesh"
    }
    mesh = str(meshes[name].attributes["mesh"])
    assert "device_ids" not in mesh and "sub_axis" not in axes, "devices in order, axes undivided"
    sizes = {axis: int(size) for axis, size in re.findall(r'"(\w+)"=(\d+)', mesh)}
    return along(sizes, re.findall(r'name = "(\w+)"', axes))


def along(sizes, axes):
    """Groups of devices along axes of a mesh of these sizes."""
    order = [
        list(sizes).index(axis) for axis in (*[axis for axis in sizes if axis not in axes], *axes)
    ]
    grid = np.arange(math.prod(sizes.values())).reshape(*sizes.values()).transpose(order)
    return tuple(map(tuple, grid.reshape(-1, math.prod(sizes[axis] for axis in axes)).tolist()))


def logged(log):
    """The same of a log."""
    counts = collections.Counter()
    for op in log.ops:
        counts[op.kind, op.group, op.dtype, op.shape, op.branch] += op.count
    return counts


def keys(counts):
    counted = collections.Counter()
    for sent, times in counts.items():
        counted[sent.key] += times
    return counted


def groups_of(line, devices):
    """Replica groups of one instruction of a compiled program, however they are spelt."""
    listed = re.search(
        r"(?:replica_groups|source_target_pairs)=\{(\{[\d,]+\}(?:,\{[\d,]+\})*)\}", line
    )
    if listed:
        return [
            list(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", listed[1])
        ]
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    if iota:

        def numbers(text):
            return list(map(int, text.split(",")))

        grid = np.arange(devices).reshape(numbers(iota[2]))
        return (
            (grid.transpose(numbers(iota[3])) if iota[3] else grid)
            .reshape(numbers(iota[1]))
            .tolist()
        )
    mesh = re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}:]*)\}", line)
    if mesh:
        return along(
            {axis: int(size) for axis, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])},
            re.findall(r"'(\w+)'", mesh[2]),
        )
    assert "replica_groups={}" in line, line
    return [list(range(devices))]


INSTRUCTION = (
    r"\s*(?:ROOT )?%?\S+ = (.*?) "
    r"(all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute)(-start)?\("
)


def compiled_collectives(hlo, devices=8):
    """Every collective of a compiled program: (kind, replica groups, types of its results), one for
    each result.
    """
    for line in hlo.splitlines():
        match = re.match(INSTRUCTION, line)
        if match:
            for dtype, dims in re.findall(r"\b([a-z]\w+)\[([\d,]*)\]", match[1]):
                yield (
                    match[2],
                    groups_of(line, devices),
                    dtype,
                    tuple(map(int, filter(None, dims.split(",")))),
                )


# the log is the program ---------------------------------------------------------------------------


def meshes_and_reductions():
    """In the fast suite each reduction on one of the meshes of two axes; in the slow one all."""
    reductions, several = (
        ("all_reduce", "reduce_scatter"),
        [mesh for mesh in MESHES if mesh != "data=8"],
    )
    fast = set(zip(several, reductions, strict=True))
    for case in itertools.product(MESHES, reductions):
        yield pytest.param(*case, marks=[pytest.mark.slow] * (case not in fast))


@pytest.mark.sampled(quick=16)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("mesh", "reduction"), list(meshes_and_reductions()))
def test_log_has_exactly_the_collectives_of_lowered_step(mesh, codec, reduction):
    inside = (
        {"exact_axes": ("data",)}
        if mesh.startswith("node") and codec not in ("exact", "bfloat16 ring")
        else {}
    )
    more = {"optimizer": SHARED} if reduction == "reduce_scatter" else {}
    trainer = trainer_of(gradients(codec, reduction, **inside), mesh, **more)
    lowered_ops = collectives(lowered(trainer))
    assert keys(lowered_ops) == logged(trainer.wire)
    sent_ops = [op for op in trainer.wire.ops if op.where.startswith("reduce_gradients")]
    assert sent_ops and all(op.axes and op.axes[0] in trainer.resolved.data_axes for op in sent_ops)
    scattered = any(op.kind == "reduce_scatter" for op in sent_ops)
    assert scattered == bool(
        (reduction == "reduce_scatter" and codec in ("exact", "power_sgd"))
        or (inside and codec in ROWS)
    )


@pytest.mark.sampled(quick=5)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("codec", ["exact", "bfloat16", "int8"])
def test_log_equals_program_with_gathers_per_microbatch(codec, accumulate):
    grads = gradients(
        codec, "reduce_scatter", weights="bfloat16", start_step=0 if codec == "exact" else 3
    )
    trainer = trainer_of(
        grads, "data=4,model=2", accumulate=accumulate, default=Default("shard:data")
    )
    lowered_ops = collectives(lowered(trainer))
    assert keys(lowered_ops) == logged(trainer.wire)
    assert {op.branch for op in trainer.wire.ops} == ({None} if codec == "exact" else {None, 0, 1})
    assert {op.count for op in trainer.wire.ops if op.where.endswith("gather_params")} == {
        accumulate
    }


def test_log_counts_every_collective_of_jax():
    without_bytes = {"pbroadcast"}  # says that a value varies
    assert of_kind(Kind.COLLECTIVE) - KINDS.keys() == without_bytes
    assert KINDS.keys() <= of_kind(Kind.COLLECTIVE) and {*KINDS.values()} == SENT.keys()


def test_log_names_axes_of_each_collective():
    trainer = trainer_of(gradients("int8", exact_axes=("data",)), "node=2,data=4")
    ids = np.arange(8).reshape(2, 4)
    groups = {
        ("data",): ids.tolist(),
        ("node",): ids.T.tolist(),
        ("node", "data"): [ids.ravel().tolist()],
    }
    logged_groups = collections.Counter()
    for op in trainer.wire.ops:
        logged_groups[
            op.kind, tuple(map(tuple, groups[op.axes])), op.dtype, op.shape, op.branch
        ] += op.count
    in_groups = collections.Counter()
    for sent, times in collectives(lowered(trainer)).items():
        in_groups[sent.kind, sent.groups, sent.dtype, sent.shape, sent.branch] += times
    assert in_groups == logged_groups
    assert {op.axes for op in trainer.wire.ops if op.dtype == "uint8"} == {("node",)}, (
        "only what crosses nodes is rounded"
    )


# bytes --------------------------------------------------------------------------------------------

DIVIDE = (64, 128, 256, 64)  # 8 workers divide every kernel and every bias


def gradient_bytes(codec, options=(), **more):
    feedback = codec not in ("exact", "bfloat16")
    more |= {"bucket_bytes": 2**30} if codec != "exact" else {}
    layout = spmd.Gradients("all_reduce", codec, options, error_feedback=feedback, **more)
    return trainer_of(layout, sizes=DIVIDE).wire.bytes(where="reduce_gradients")


@pytest.mark.sampled(quick=5)
@pytest.mark.parametrize(
    "codec, least, most",
    [
        ("bfloat16", 0.5, 0.5),
        ("int8", 0.25, 0.27),
        ("float8", 0.25, 0.27),
        ("sign", 1 / 32, 0.04),
        ("top_k", 0.02, 0.022),
    ],
)
def test_codec_sends_expected_share_of_exact_bytes(codec, least, most):
    """Each gradient has scales of its own, and top_k keeps a whole number of each row: a little
    more than per element.
    """
    elements = sum(rows * columns + columns for rows, columns in itertools.pairwise(DIVIDE))
    exact, sent = gradient_bytes("exact"), gradient_bytes(codec)
    assert exact == 2 * 7 * 4 * elements // 8
    assert least <= sent / exact <= most


def gpt_trainer(codec, **sizes):
    grads = spmd.Gradients("all_reduce", codec, error_feedback=codec != "exact")

    def make():
        return gpt.GPT(**sizes, rngs=nnx.Rngs(0))

    trainer = spmd.Trainer(
        make,
        loss=spmd.losses.cross_entropy,
        optimizer=optax.adamw(1e-3),
        mesh="data=8",
        layout=spmd.Layout(gradients=grads),
    )
    tokens = jax.ShapeDtypeStruct((16, sizes.get("length", 64)), np.int32)
    trainer.prepare({"tokens": tokens, "targets": tokens})
    return trainer


@pytest.mark.system
@pytest.mark.parametrize(
    "sizes, most",
    [({}, 0.14), ({"width": 512, "depth": 4, "heads": 8, "length": 256}, 0.05)],
    ids=["usual", "larger"],
)
def test_power_sgd_share_of_gpt_matrices(sizes, most):
    """Nothing is allocated or compiled: what is sent is read from the trace."""
    trainer = gpt_trainer("power_sgd", **sizes)
    matrices = {
        path: place.shape
        for path, place in trainer.resolved.placements.items()
        if len(place.shape) > 1
    }
    assert len(trainer.resolved.placements) > len(matrices) > 10
    exactly = sum(2 * 7 * 4 * math.prod(shape) // 8 for shape in matrices.values())
    sent = trainer.wire.bytes(where="reduce_gradients/power_sgd")
    assert sent == sum(2 * 7 * 4 * 4 * sum(shape) // 8 for shape in matrices.values()), (
        "P and Q, of rank 4"
    )
    assert 0.5 * most < sent / exactly <= most or sent / exactly < 0.02
    rest = trainer.wire.bytes(where="reduce_gradients") - sent
    vectors = [
        place.nbytes for place in trainer.resolved.placements.values() if len(place.shape) == 1
    ]
    assert rest == sum(2 * 7 * nbytes // 8 for nbytes in vectors)


@pytest.mark.sampled(quick=5)
@pytest.mark.parametrize("reduction", ["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize(
    "codec",
    [
        pytest.param(codec, marks=[pytest.mark.slow] * (codec in ("sign", "float8")))
        for codec in ROWS
    ],
)
def test_compressed_gradients_are_not_sent_as_float32(codec, reduction):
    """Read from the lowered program: of float32 there are metrics and nothing else; scales are sent
    as bytes beside their values.
    """
    trainer = trainer_of(gradients(codec, reduction), "data=4,model=2", sizes=(7, 30, 40, 20))
    floats = {sent.shape for sent in collectives(lowered(trainer)) if sent.dtype == "float32"}
    assert floats == {(), (2, 1)}
    payload = {sent.dtype for sent in collectives(lowered(trainer))} - {"float32"}
    assert payload == {"uint16" if codec == "bfloat16" else "uint8"}


@pytest.mark.parametrize("reduction", ["all_reduce", "reduce_scatter"])
def test_power_sgd_sends_only_p_and_q(reduction):
    grads = spmd.Gradients(
        reduction, "power_sgd", {"rank": 2, "min_compression": 2.7}, error_feedback=True
    )
    trainer = trainer_of(grads)
    shapes = {path: place.shape for path, place in trainer.resolved.placements.items()}
    thin = {
        path: shape
        for path, shape in shapes.items()
        if len(shape) > 1 and math.prod(shape) >= 2.7 * 2 * sum(shape)
    }
    assert set(thin) == {"up/kernel", "mid/kernel"}, "the last kernel would be smaller by 2.6"
    factors = [(2 * sum(shape[dim] for shape in thin.values()),) for dim in (0, 1)]
    exact = [shape for path, shape in shapes.items() if path not in thin]
    shape_counts = collections.Counter(
        sent.shape for sent in collectives(lowered(trainer)).elements()
    )
    assert shape_counts == collections.Counter([(), (2, 1), *factors, *exact])


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize(
    "codec, leaf, bucket", [("bfloat16", 2, 2), ("int8", 2, 2), ("power_sgd", 2, 2)]
)
def test_collective_count_by_bucket_bytes(codec, leaf, bucket):
    """Row codecs: an all-to-all and an all-gather, for every payload; power_sgd: P and Q."""
    options = {"power_sgd": {"min_compression": 1}}.get(codec, {})

    def layout(size):
        return spmd.Gradients(
            "all_reduce", codec, options, error_feedback=codec == "power_sgd", bucket_bytes=size
        )

    def count(size):
        return sum(
            op.count
            for op in trainer_of(layout(size), sizes=(16, 32, 64, 32)).wire.ops
            if op.where.startswith("reduce_gradients")
        )

    alone = 3 if codec == "power_sgd" else 0  # biases, which are sent exactly for every bucket size
    leaves = 3 if codec == "power_sgd" else 6
    assert count(1) == alone + leaves * leaf
    assert count(2**30) == alone + bucket


@pytest.mark.system
def test_bucket_is_filled_up_to_bucket_bytes():
    """As float32 and in order: mid/bias 256, mid/kernel 8192, out/bias 128, out/kernel 8192,
    up/bias 128, up/kernel 2048.
    """
    paths = ["mid/bias", "mid/kernel", "out/bias", "out/kernel", "up/bias", "up/kernel"]
    sizes = [256, 8192, 128, 8192, 128, 2048]
    count = {}
    for limit in (127, 8191, 8448, 8447, 8448 + 128, 16768, 16767 + 2177, 18943):
        trainer = trainer_of(
            spmd.Gradients("all_reduce", "bfloat16", bucket_bytes=limit), sizes=(16, 32, 64, 32)
        )
        assert [
            (path, place.nbytes) for path, place in trainer.resolved.placements.items()
        ] == list(zip(paths, sizes, strict=True))
        ops = [op for op in trainer.wire.ops if op.where.startswith("reduce_gradients")]
        assert [op.kind for op in ops] == ["all_to_all", "all_gather"] * (len(ops) // 2)
        count[limit] = [op.shape[1] * 8 * 4 for op in ops if op.kind == "all_to_all"]
    assert count == {
        127: sizes,
        8191: [256, 8192, 128, 8192, 128 + 2048],
        8448: [256 + 8192, 128 + 8192 + 128, 2048],
        8447: [256, 8192 + 128, 8192 + 128, 2048],
        8448 + 128: [256 + 8192 + 128, 8192 + 128, 2048],
        16768: [256 + 8192 + 128 + 8192, 128 + 2048],
        16767 + 2177: [sum(sizes)],
        18943: [sum(sizes[:5]), 2048],
    }


@pytest.mark.sampled(quick=4)
@pytest.mark.parametrize("codec", ["exact", "bfloat16", "int8", "power_sgd"])
def test_microbatches_do_not_multiply_gradient_bytes(codec):
    single, four = (trainer_of(gradients(codec), rows=64, accumulate=count) for count in (1, 4))
    assert four._program.make_step(64, True).worker.microbatches == 4
    assert (
        single.wire.bytes(where="reduce_gradients") == four.wire.bytes(where="reduce_gradients") > 0
    )
    assert single.wire.bytes(where="gather_params") == four.wire.bytes(where="gather_params") == 0


@pytest.mark.parametrize("codec", ["exact", "bfloat16"])
def test_microbatches_multiply_gathered_bytes_under_fsdp(codec):
    sharded_default = {"default": Default("shard:data")}
    single, four = (
        trainer_of(gradients(codec, "reduce_scatter"), rows=64, accumulate=count, **sharded_default)
        for count in (1, 4)
    )
    assert (
        single.wire.bytes(where="reduce_gradients") == four.wire.bytes(where="reduce_gradients") > 0
    )
    assert (
        4 * single.wire.bytes(where="gather_params") == four.wire.bytes(where="gather_params") > 0
    )
    # forward and backward; of the first layer's kernel the backward pass needs nothing, nor of any
    # bias
    kernels = {
        path: place for path, place in single.resolved.placements.items() if "data" in place.spec
    }
    once = sum(7 * place.nbytes // 8 for place in kernels.values())
    again = sum(
        7 * kernels[path].nbytes // 8 for path in ("mid/kernel", "out/kernel") if path in kernels
    )
    assert single.wire.bytes(where="gather_params") == once + again


# the model axis -----------------------------------------------------------------------------------


def over_model(trainer, groups):
    """Whether any two devices that communicate differ in their place along `model`."""
    place = {device.id: index[1] for index, device in np.ndenumerate(trainer.mesh.devices)}
    return any(len({place[number] for number in group}) > 1 for group in groups)


@pytest.fixture(scope="module")
def partitioners_own():
    """What a compiled step with exact gradients sends over `model`: the layers' own, which XLA's
    partitioner adds.
    """
    counts = {}

    def of(reduction, codec="exact"):
        if (reduction, codec) not in counts:
            trainer = trainer_of(gradients(codec, reduction), "data=4,model=2")
            program = lowered(trainer)
            assert not any(over_model(trainer, sent.groups) for sent in collectives(program))
            assert not any("model" in op.axes for op in trainer.wire.ops)
            ops = list(compiled_collectives(program.compile().as_text()))
            assert any(not over_model(trainer, groups) for _, groups, *_ in ops), (
                "the exchange, over data"
            )
            counts[reduction, codec] = collections.Counter(
                (kind, *rest) for kind, groups, *rest in ops if over_model(trainer, groups)
            )
        return counts[reduction, codec]

    return of


@pytest.mark.sampled(quick=5)
@pytest.mark.parametrize(
    "codec",
    [
        pytest.param(codec, marks=[pytest.mark.slow] * (codec in ("sign", "float8")))
        for codec in LOSSY
    ],
)
def test_codecs_send_nothing_over_model_axis(partitioners_own, codec):
    """Neither as traced, nor lowered, nor after the partitioner and the optimiser."""
    exact = partitioners_own("all_reduce")
    assert sum(exact.values()) >= 4, "activations and their gradients are sent over model"
    assert partitioners_own("all_reduce", codec) == exact


@pytest.mark.system
@pytest.mark.parametrize("codec", ["int8", "power_sgd"])
def test_codecs_send_nothing_over_model_axis_with_reduce_scatter(partitioners_own, codec):
    assert partitioners_own("reduce_scatter", codec) == partitioners_own("reduce_scatter")


# metrics ------------------------------------------------------------------------------------------


@pytest.mark.system
def test_wire_bytes_are_a_metric_of_every_step():
    trainer = trainer_of(gradients("int8"))
    state, metrics = trainer.step(trainer.init(), batch())
    assert metrics["wire_bytes"] == trainer.wire.bytes() > 0
    assert (
        set(metrics) == {"loss", "wire_bytes", "compression_ratio"}
        and metrics["compression_ratio"] > 2
    )
    (info,) = trainer.steps(batch(), batch_size=16, state=state)
    assert info.metrics["wire_bytes"] == trainer.wire.bytes()


def fitted(tmp_path, grads, steps=4, **options):
    path = tmp_path / "log.jsonl"
    spmd.fit(
        lambda: MLP(rngs=nnx.Rngs(0)),
        batch(rows=64),
        loss=spmd.losses.cross_entropy,
        optimizer=optax.sgd(0.1),
        mesh="data=8",
        layout=spmd.Layout(gradients=grads),
        batch_size=16,
        steps=steps,
        progress=False,
        loggers=[JsonLines(path)],
        log_every=1,
        **options,
    )
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return {record["step"]: record for record in records if "loss" in record}


@pytest.mark.system
@pytest.mark.parametrize("start", [0, 2])
def test_log_prints_bytes_of_each_step(tmp_path, start):
    trainer = trainer_of(gradients("int8", start_step=start))
    written = fitted(tmp_path, gradients("int8", start_step=start))
    few, many = trainer.wire.bytes(), trainer.wire.bytes(0)
    assert (many > 2 * few) if start else many == few
    assert {step: record["wire_bytes"] for step, record in written.items()} == {
        1: many,
        2: many,
        3: few,
        4: few,
    }
    assert not any("mean_error" in record for record in written.values())
    assert [record["compression_ratio"] > 2 for record in written.values()] == [
        step >= start for step in range(4)
    ]


@pytest.mark.parametrize(
    "reduction, layout, ratio",
    [
        ("all_reduce", {}, 2),
        ("reduce_scatter", {"optimizer": SHARED}, 2),
        ("reduce_scatter", {"default": Default("shard:data")}, 2),
    ],
    ids=["all_reduce", "ZeRO-1", "FSDP"],
)
@pytest.mark.parametrize("diagnostics", [False, True])
def test_compression_ratio_is_relative_to_exact_reduction(reduction, layout, ratio, diagnostics):
    grads = spmd.Gradients(reduction, "bfloat16", diagnostics=diagnostics, start_step=1)
    trainer = trainer_of(grads, sizes=(64, 128, 256, 64), **layout)
    metrics = trainer.prepare(None)[0].static_metrics
    assert metrics.at(0)["compression_ratio"] == 1 and metrics.at(1)["compression_ratio"] == ratio
    cost = [line for line in trainer.notes() if "diagnostics = true" in line]
    assert len(cost) == diagnostics and all(
        f"{trainer.wire.bytes(0, 'reduce_gradients'):,} bytes" in line for line in cost
    )


@pytest.mark.system
def test_callbacks_see_wire_bytes(tmp_path):
    seen = []

    class Watching(Callback):
        def watches(self):
            return ("wire_bytes",)

        def on_step(self, info):
            seen.append(info.metrics["wire_bytes"])

    fitted(tmp_path, gradients("int8", start_step=2), callbacks=[Watching()])
    log = trainer_of(gradients("int8", start_step=2)).wire
    assert seen == [log.bytes(step) for step in range(4)] and seen[1] > seen[2]
    # so watching it is an error there, before a step
    assert trainer_of(spmd.Gradients()).prepare(None)[0].static_metrics.names == ()


def test_model_conditional_counts_most_expensive_branch():
    mesh = spmd.make_mesh("data=8")

    def few(x):
        return lax.psum(x[:2], "data").sum()

    def many(x):
        return lax.psum(x, "data").sum()

    def step(x):
        return lax.switch(x[0].astype(int), [few, many, few], x)

    traced = jax.make_jaxpr(
        jax.shard_map(step, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P(), check_vma=False)
    )(jnp.ones(64))
    log = read_collectives(traced.jaxpr, dict(mesh.shape))
    assert [op.shape for op in log.ops] == [(8,)] and log.bytes() == log.bytes(0) == 2 * 7 * 32 // 8
    assert "start_step" not in str(log)


@pytest.mark.system
def test_wire_bytes_change_at_start_step_and_after_resume():
    trainer = trainer_of(gradients("sign", start_step=2))
    state, seen, kept = trainer.init(), [], None
    for step in range(4):
        kept = jax.tree.map(jnp.copy, state) if step == 3 else kept
        state, metrics = trainer.step(state, batch())
        seen.append(metrics["wire_bytes"])
    dense, sparse = trainer.wire.bytes(0), trainer.wire.bytes()
    assert seen == [dense, dense, sparse, sparse] and sparse < dense / 4
    assert [trainer.wire.bytes(step) for step in range(4)] == seen
    assert trainer.step(trainer.init(), batch())[1]["wire_bytes"] == dense, (
        "a new state begins at 0"
    )
    assert trainer.step(kept, batch())[1]["wire_bytes"] == sparse, (
        "an older state is known by its own step"
    )


@pytest.mark.system
@pytest.mark.parametrize("codec", ["exact rules", "bfloat16", "top_k"])
def test_diagnostics_add_three_metrics(tmp_path, codec):
    grads = gradients("int8" if codec == "exact rules" else codec, diagnostics=True)
    if codec == "exact rules":
        grads = dataclasses.replace(grads, rules=(GradientRule("**", "exact"),))
    for record in fitted(tmp_path, grads).values():
        assert {"residual_norm", "mean_error", "compression_ratio", "wire_bytes"} <= set(record)
        if codec == "exact rules":
            assert (record["mean_error"], record["residual_norm"], record["compression_ratio"]) == (
                0,
                0,
                1,
            )
        else:
            low, high, ratio = {"bfloat16": (1e-4, 2**-8, (1.8, 2.0)), "top_k": (0.1, 1.0, (4, 6))}[
                codec
            ]
            assert low < record["mean_error"] < high
            assert record["residual_norm"] > 0
            assert ratio[0] < record["compression_ratio"] <= ratio[1]


WIDE = {"w": (8, 24), "b": (10,)}


def linear_trainer(grads, mesh, **layout):
    """A loss whose gradients are the rows themselves, and updates that are the gradients."""

    def init(key):
        return {name: jnp.zeros(shape) for name, shape in WIDE.items()}

    def loss(model, rows):
        return sum(
            (rows[name] * model.params[name]).reshape(len(rows[name]), -1).sum(1) for name in WIDE
        )

    layout = spmd.Layout(gradients=grads, **(MESHES[mesh] | layout))
    model = spmd.FunctionalModel(init, lambda params, x: x)
    return spmd.Trainer(model, loss=loss, optimizer=optax.sgd(1.0), mesh=mesh, layout=layout)


@pytest.mark.sampled(quick=11, system=3)
@pytest.mark.parametrize(
    "mesh, reduction, layout",
    [
        ("data=8", "all_reduce", {}),
        ("data=8", "reduce_scatter", {"optimizer": SHARED}),
        ("data=4,model=2", "all_reduce", {"params": (spmd.Rule("w", (None, "model")),)}),
        ("data=4,model=2", "reduce_scatter", {"params": (spmd.Rule("w", ("data", "model")),)}),
        ("node=2,data=4", "all_reduce", {}),
    ],
    ids=["replicated", "scattered", "model", "fsdp and model", "node"],
)
@pytest.mark.parametrize(
    "codec",
    [
        "int8",
        "power_sgd",
        *(pytest.param(name, marks=pytest.mark.system) for name in ("bfloat16", "top_k")),
    ],
)
def test_diagnostics_equal_true_error_and_residual_norm(mesh, reduction, layout, codec):
    """What was given is known (rows and residuals), what came out is read from the parameters, both
    in float64.
    """
    inside = {"exact_axes": ("data",)} if mesh.startswith("node") else {}
    trainer = linear_trainer(
        gradients(codec, reduction, diagnostics=True, **inside), mesh, **layout
    )
    workers, random = trainer.resolved.workers, np.random.default_rng(0)
    state = trainer.init()
    for _ in range(3):
        rows = {
            name: random.normal(size=(workers, *shape)).astype("float32")
            for name, shape in WIDE.items()
        }
        # from zero, so that the new parameters are the applied mean itself, to the last bit
        state = dataclasses.replace(
            state,
            params=jax.tree.map(
                lambda p: jax.device_put(np.zeros(p.shape, p.dtype), p.sharding), state.params
            ),
        )
        residuals = jax.device_get(state.exchange)
        state, metrics = trainer.step(state, rows)
        after, kept = jax.device_get((state.params, state.exchange))
        error = exact = norm = 0.0
        for name in WIDE:
            encoded = rows[name].astype(np.float64)
            encoded = encoded + residuals[name]["residual"] if name in residuals else encoded
            mean = encoded.mean(0)
            error += ((-after[name].astype(np.float64) - mean) ** 2).sum()
            exact += (mean**2).sum()
            norm += (
                (kept[name]["residual"].astype(np.float64) ** 2).sum() / workers
                if name in kept
                else 0.0
            )
        assert metrics["mean_error"] > 1e-4
        # the device sums squares in float32, the test in float64
        np.testing.assert_allclose(metrics["mean_error"], np.sqrt(error / exact), rtol=1e-5)
        np.testing.assert_allclose(metrics["residual_norm"], np.sqrt(norm), rtol=1e-5)


@pytest.mark.sampled(quick=14, system=5)
@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("reduction", ["all_reduce", "reduce_scatter"])
def test_replicated_shards_are_bit_equal(codec, reduction):
    """Of parameters, moments and the codecs' memory: some are sharded over model, some
    replicated.
    """
    more = {"optimizer": SHARED} if reduction == "reduce_scatter" else {}
    trainer = trainer_of(gradients(codec, reduction), "data=4,model=2", **more)
    state = trainer.init()
    for seed in range(2):
        state, _ = trainer.step(state, batch(seed=seed))
    wrong = set()
    for path, leaf in flatten(
        {"params": state.params, "opt": state.opt, "exchange": state.exchange}
    ).items():
        copies = collections.defaultdict(set)
        for shard in leaf.addressable_shards:
            copies[str(shard.index)].add(np.asarray(shard.data).tobytes())
        if any(len(bits) > 1 for bits in copies.values()):
            wrong.add(path)
    assert not wrong


@pytest.mark.system
def test_log_needs_no_extra_trace():
    traced = []

    def loss(model, rows):
        traced.append(None)
        return spmd.losses.cross_entropy(model, rows)

    def count(*, wire, steps):
        traced.clear()
        trainer = trainer_of(gradients("int8"), loss=loss)
        if wire:
            assert trainer.wire.bytes() == trainer.wire.bytes()
        state = trainer.init()
        for _ in range(steps):
            state, metrics = trainer.step(state, batch())
            assert metrics["wire_bytes"] > 0
        assert trainer.wire.ops
        assert trainer._program.functions.compilations() == (steps > 0)
        return len(traced)

    assert count(wire=True, steps=2) == count(wire=False, steps=1) == count(wire=True, steps=0)


# weights ------------------------------------------------------------------------------------------


def test_parameters_are_gathered_as_uint16_under_fsdp_bf16():
    layout = spmd.Layout.load("fsdp_bf16")
    trainer = trainer_of(layout.gradients, sizes=DIVIDE, default=layout.default)
    exact = trainer_of(
        dataclasses.replace(layout.gradients, weights="exact"), sizes=DIVIDE, default=layout.default
    )

    def gathers(trainer):
        return [op for op in trainer.wire.ops if op.where.endswith("gather_params")]

    assert {(op.kind, op.dtype) for op in gathers(trainer)} == {("all_gather", "uint16")}
    assert {(op.kind, op.dtype) for op in gathers(exact)} == {("all_gather", "float32")}
    assert (
        2 * trainer.wire.bytes(where="gather_params") == exact.wire.bytes(where="gather_params") > 0
    )
    assert {sent.dtype for sent in collectives(lowered(trainer)) if math.prod(sent.shape) > 2} == {
        "uint16"
    }


def test_updates_are_gathered_as_uint16_under_zero1():
    for weights, dtype in (("bfloat16", "uint16"), ("exact", "float32")):
        trainer = trainer_of(
            spmd.Gradients("reduce_scatter", weights=weights), sizes=DIVIDE, optimizer=SHARED
        )
        spreads = [op for op in trainer.wire.ops if op.where.endswith("gather_updates")]
        if weights == "exact" and not spreads:
            continue  # left to the partitioner, which gathers them as they are
        assert {(op.kind, op.dtype) for op in spreads} == {("all_gather", dtype)}
        assert len(spreads) == 6
        elements = sum(math.prod(place.shape) for place in trainer.resolved.placements.values())
        assert trainer.wire.bytes(where="gather_updates") == 7 * elements // 8 * (
            2 if weights == "bfloat16" else 4
        )
        assert keys(collectives(lowered(trainer))) == logged(trainer.wire)


@pytest.mark.system
@pytest.mark.parametrize(
    "layout", [{"default": Default("shard:data")}, {"optimizer": SHARED}], ids=["fsdp", "zero1"]
)
def test_training_with_rounded_parameters_is_close(layout):
    losses = {}
    for weights in ("exact", "bfloat16"):
        grads = spmd.Gradients(
            "reduce_scatter",
            "exact" if weights == "exact" else "bfloat16",
            error_feedback=True,
            weights=weights,
        )
        trainer = trainer_of(grads, sizes=(6, 32, 64, 8), **layout)
        state = trainer.init()
        for _ in range(5):
            state, metrics = trainer.step(state, batch((6, 32, 64, 8)))
        losses[weights] = metrics["loss"]
    assert losses["exact"] != losses["bfloat16"]
    assert abs(losses["bfloat16"] / losses["exact"] - 1) < 0.01


# the compiler for GPUs ----------------------------------------------------------------------------

no_gpu_compiler = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="package jax_cuda13_plugin is missing, XLA's compiler for GPUs (no GPU is needed): pip "
    "install '.[gpu-compiler]'",
)


@no_gpu_compiler
@pytest.mark.system
@pytest.mark.usefixtures("without_compilation_cache")
@pytest.mark.parametrize("codec, payload", [("bfloat16", "u16"), ("int8", "u8")])
@pytest.mark.parametrize("devices", [8, 64])
def test_log_equals_bytes_of_gpu_program(devices, codec, payload):
    """Compiled for H100s by XLA:GPU, without one: no pass widens the payload or brings an exact
    reduction back.
    """
    from jax.experimental import topologies

    from benchmarks.fsdp_wire import H100

    chips = topologies.get_topology_desc(
        platform="cuda", target_config=H100, topology=f"1x{devices // 8}x8"
    ).devices
    trainer = spmd.Trainer(
        lambda: MLP(DIVIDE, rngs=nnx.Rngs(0)),
        loss=spmd.losses.cross_entropy,
        optimizer=optax.adamw(1e-3),
        mesh=Mesh(np.array(chips), ("data",), axis_types=(AxisType.Auto,)),
        layout=spmd.Layout(gradients=spmd.Gradients("all_reduce", codec, error_feedback=True)),
    )
    trainer.prepare(batch(DIVIDE, 2 * devices))
    largest = collections.Counter()
    for kind, groups, dtype, shape in compiled_collectives(
        lowered(trainer).compile().as_text(), devices
    ):
        assert list(map(len, groups)) == [devices]
        largest[kind, dtype] = max(largest[kind, dtype], math.prod(shape))
    # a bias of 64 over 64 workers is a number each, and as int8 it would be larger
    sizes = {
        codec: [
            math.prod(i.shape)
            for i in trainer._placed.exchange.transfers.values()
            if i.codec_name == codec
        ]
        for codec in (codec, "exact")
    }
    assert sum(sizes["exact"]) == (64 if (devices, codec) == (64, "int8") else 0)
    # as bytes, beside the values: every gradient has its own
    blocks = sum(math.ceil(size / devices / 256) for size in sizes[codec])
    sent = sum(sizes[codec]) + (4 * devices * blocks if codec == "int8" else 0)
    assert largest["all-to-all", payload] == largest["all-gather", payload] == sent, (
        "every element, once each way"
    )
    floats = {kind: size for (kind, dtype), size in largest.items() if dtype != payload}
    assert {dtype for _, dtype in largest} == {payload, "f32"}
    assert floats.keys() == {"all-reduce"} and floats["all-reduce"] <= 3 + sum(sizes["exact"]), (
        "the loss and its count, and the bias"
    )
