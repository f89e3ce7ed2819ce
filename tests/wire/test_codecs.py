"""What every codec promises, for every codec, both reductions and three meshes: near the exact
mean, the same on all workers, nothing lost with error feedback, nothing hidden.

A case is one compiled program (`outcome`), run once on all inputs; the tests read what it gave.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmd
from spmd.base.specs import keep_axes, pspec
from spmd.base.tree import flatten
from spmd.errors import CodecError
from spmd.layout.gradients import Gradients
from spmd.layout.resolve import resolve
from spmd.layout.schema import Batch, Layout, OptimizerState, Rule
from spmd.mesh import MeshSpec
from spmd.sync import gradient_sync
from spmd.sync.gradient_sync import GradientSync
from spmd.sync.mesh_axes import MeshAxes
from spmd.wire.codec import CODECS, bfloat16, make_codec
from spmd.wire.transfer import RESIDUAL
from tests.compare import assert_close

START = 2  # steps that reduce exactly first
STEPS = 50
WORKERS = {"data=8": 8, "data=4,model=2": 4, "node=2,data=4": 8}

# small blocks, so that these small gradients have several, the last of them not full
CHOICES = {
    "exact": ("exact", {}),
    "bfloat16": ("bfloat16", {}),
    "bfloat16 ring": ("bfloat16", {"reduce": "ring"}),
    "int8": ("int8", {"block": 16}),
    "float8": ("float8", {"block": 16}),
    "sign": ("sign", {"block": 16}),
    "top_k": ("top_k", {"keep": 0.1}),
    "power_sgd": ("power_sgd", {"rank": 2, "min_compression": 1.0}),
}
SHAPES = {
    "bias": (13,),  # sizes that no number of workers here divides
    "cube": (3, 8, 4),
    "half": (8, 6),
    "matrix": (24, 16),
    "odd": (7, 9),
    "one": (1,),
    "tall": (16, 5),
}
DTYPES = {"half": jnp.bfloat16}
CASES = [
    case
    for case in itertools.product(CHOICES, ("all_reduce", "reduce_scatter"), WORKERS)
    # a layout may not ask for it
    if not (case[0] == "bfloat16 ring" and case[2].startswith("node"))
]
SLOTS = {"zeros": STEPS} | {
    (path, value): STEPS + 1 + n
    for n, (path, value) in enumerate(itertools.product(SHAPES, ("nan", "inf")))
}

# of every codec one in the quick suite, in turn
ONE, OTHER = ("all_reduce", "data=8"), ("reduce_scatter", "data=4,model=2")


def parametrized(*without):
    """Every case but those of some choices; CI has each codec under both reductions, and nodes with
    two codecs.
    """
    nodes = {
        ("int8", "reduce_scatter", "node=2,data=4"),
        ("bfloat16", "all_reduce", "node=2,data=4"),
    }
    cases = [case for case in CASES if case[0] not in without]
    quick = {(choice, *(ONE, OTHER)[number % 2]) for number, choice in enumerate(CHOICES)}
    in_ci = {(choice, *way) for choice in CHOICES for way in (ONE, OTHER)} | nodes
    marks = {
        case: [] if case in quick else [pytest.mark.system if case in in_ci else pytest.mark.slow]
        for case in cases
    }

    def named(case):
        return "-".join(case).replace(" ", "_")

    return pytest.mark.parametrize(
        "case", [pytest.param(case, marks=marks[case], id=named(case)) for case in cases]
    )


every_case, lossy_case, fed_case = (
    parametrized(),
    parametrized("exact"),
    parametrized("exact", "bfloat16 ring"),
)


def build(gradients, shapes, mesh="data=8", rules=(), shard=None):
    """An exchange of gradients of these shapes."""
    data = tuple(axis for axis in ("node", "data") if axis in mesh)
    layout = Layout(
        batch=Batch((data,)), params=rules, optimizer=OptimizerState(shard), gradients=gradients
    )
    params = {
        path: jax.ShapeDtypeStruct(shape, DTYPES.get(path, jnp.float32))
        for path, shape in shapes.items()
    }
    return GradientSync(
        resolve(layout, params, {}, MeshSpec.parse(mesh)), MeshAxes(spmd.make_mesh(mesh), data)
    )


def make_sync(exchange, memory):
    """`GradientSync.reduce_gradients` over all workers, of gradients [workers, ...], memory and
    step.
    """
    data = exchange.mesh_axes.data_axes

    def data_spec(spec):
        return pspec(keep_axes(spec, data))

    mean_specs = {
        path: data_spec(exchange.reduction.mean_spec(place))
        for path, place in exchange.resolved.placements.items()
    }
    kept = jax.tree.map(data_spec, exchange.specs(memory), is_leaf=lambda x: isinstance(x, tuple))
    return jax.shard_map(
        lambda grads, memory, step: exchange.reduce_gradients(
            jax.tree.map(lambda g: g[0], grads), memory, step
        ),
        mesh=exchange.mesh_axes.mesh,
        in_specs=(jax.P(data), kept, jax.P()),
        out_specs=(mean_specs, kept, jax.P()),
        axis_names=set(data),
        check_vma=False,
    )


def beginning(exchange):
    """The memory at step 0, where it belongs."""
    memory = exchange.init(jax.random.key(0), {})

    def place(leaf, spec):
        return jax.device_put(leaf, jax.NamedSharding(exchange.mesh_axes.mesh, pspec(spec)))

    return jax.tree.map(place, memory, exchange.specs(memory))


def scanned(exchange, grads):
    """The means of all steps, from gradients {path: [steps, workers, ...]}, in one call."""
    memory = beginning(exchange)
    sync = make_sync(exchange, memory)

    @jax.jit
    def run(grads, memory):
        def body(memory, inputs):
            means, memory, _ = sync(*inputs[:1], memory, inputs[1])
            return memory, means

        return jax.lax.scan(body, memory, (grads, jnp.arange(len(jax.tree.leaves(grads)[0]))))

    memory, means = run(grads, memory)
    return jax.tree.map(np.asarray, (means, memory))


def of_case(case, start=START):
    """The exchange of a case; some parameters are sharded over `model`, over two data axes, or over
    a mix of both.
    """
    choice, reduction, mesh = case
    codec, options = CHOICES[choice]
    gradients = Gradients(
        reduction,
        codec,
        options,
        error_feedback=choice not in ("exact", "bfloat16 ring"),
        start_step=start if codec != "exact" else 0,
        bucket_bytes=2000,  # the large matrix apart from some of the others
        exact_axes=("data",) if mesh.startswith("node") else (),
    )
    rules, scatter = [], reduction == "reduce_scatter"
    if "model" in mesh:
        rules += [Rule("matrix", (None, "model")), Rule("cube", (None, "model"))]
        rules += (
            [Rule("tall", (("data", "model"),))] if scatter and choice != "bfloat16 ring" else []
        )
    if "node" in mesh and scatter:
        rules += [Rule("cube", (None, ("node", "data")))]
    return build(gradients, SHAPES, mesh, tuple(rules), "data" if scatter else None)


@functools.cache
def inputs(workers):
    """Per parameter [slots, workers, ...]: `STEPS` random ones around a common mean, then zeros,
    then one bad number each.
    """
    rng, made = np.random.default_rng(5), {}
    for path, shape in SHAPES.items():
        random = rng.standard_normal((STEPS, 8, *shape)) + rng.standard_normal(shape)
        made[path] = np.concatenate(
            [random[:, :workers], np.zeros((1 + 2 * len(SHAPES), workers, *shape))]
        )
        for (bad, value), slot in list(SLOTS.items())[1:]:
            made[path][slot] = made[path][START]
            if bad == path:
                made[path][slot, workers - 2].reshape(-1)[-1] = float(value)
        made[path] = made[path].astype(DTYPES.get(path, np.float32))
    return made


def wide(x):
    return np.asarray(x).astype(np.float64)


@functools.cache
def true_means(workers):
    return {path: wide(g).mean(1) for path, g in inputs(workers).items()}


@dataclasses.dataclass
class Outcome:
    """Everything that one case's program gave: means per slot, the first and last memories, and
    whether copies were equal.
    """

    exchange: GradientSync
    means: list
    memories: list
    unequal: list
    compiled: int

    def lossy(self):
        return [
            path for path, item in self.exchange.transfers.items() if item.codec_name != "exact"
        ]


@functools.cache
def outcome(case):
    exchange = of_case(case)
    memory = first = beginning(exchange)
    mesh, items = exchange.mesh_axes.mesh, exchange.transfers

    def place(path, g):
        return jax.device_put(
            g,
            jax.NamedSharding(
                mesh,
                jax.P(
                    None,
                    exchange.mesh_axes.data_axes,
                    *(items[path].model_spec if items[path].nested else ()),
                ),
            ),
        )

    grads = {path: place(path, g) for path, g in inputs(WORKERS[case[2]]).items()}
    sync = make_sync(exchange, memory)
    program = jax.jit(
        lambda grads, memory, slot, step: sync(
            {path: g[slot] for path, g in grads.items()}, memory, step
        ),
        out_shardings=(None, jax.tree.map(lambda leaf: leaf.sharding, memory), None),
    )
    means, memories, unequal = [], [], []
    for slot in range(STEPS + len(SLOTS)):
        before = memory if slot < STEPS else first
        out, after, _ = program(grads, before, np.int32(slot), np.int32(slot))
        means.append(jax.tree.map(np.asarray, out))
        memory = after if slot < STEPS else memory
        memories.append(jax.tree.map(np.asarray, after))
        watched = {"mean": out, "memory": after} if slot % 10 == START or slot > STEPS else {}
        unequal += [
            (slot, path) for path, leaf in flatten(watched).items() if not copies_agree(leaf)
        ]
    return Outcome(exchange, means, memories, unequal, program._cache_size())


def copies_agree(array):
    """Whether all devices that hold the same piece hold the same bytes."""
    copies_of = {}
    for shard in array.addressable_shards:
        copies_of.setdefault(str(shard.index), set()).add(np.asarray(shard.data).tobytes())
    return all(len(copies) == 1 for copies in copies_of.values())


def joined(arrays, paths):
    return np.concatenate([wide(arrays[path]).reshape(-1) for path in paths])


def crossing(case, slot, paths):
    """What the codec is given at the workers that it crosses, [n, elements]: where a node reduces
    first, the nodes' means.
    """
    workers = WORKERS[case[2]]
    rows = np.concatenate(
        [wide(inputs(workers)[path][slot]).reshape(workers, -1) for path in paths], axis=1
    )
    return rows.reshape(2, 4, -1).mean(1) if case[2].startswith("node") else rows


# the mean -----------------------------------------------------------------------------------------


@pytest.mark.sampled(quick=3, system=5)
@every_case
def test_mean_error_is_within_codec_bound(case):
    # A bucket x_i on worker i, e the codec's error, C(x) one encoding: |C(x) - x| <= e |x|.
    #   sending:    |mean C(x_i) - mean x_i| <= e mean |x_i| = a
    #   returning:  |C(m) - m| <= e |m|, with m = mean C(x_i) and so |m| <= |mean x_i| + a
    # Together a (1 + e) + e |mean x_i|. It holds for the norm over a bucket, and for a bucket that
    # is exchanged in pieces along `model`, by the triangle inequality over the pieces. The ring
    # rounds once, and every hop once more, each time by at most 2^-8 of at most sum |x_i|: e =
    # workers 2^-8.
    # at which nothing is remembered yet
    result, workers, slot = outcome(case), WORKERS[case[2]], START
    for paths in result.exchange.buckets:
        item = result.exchange.transfers[paths[0]]
        error = max(result.exchange.transfers[path].codec.error for path in paths)
        error = (
            workers * 2.0**-8
            if case[0] == "bfloat16 ring" and item.codec_name == "bfloat16"
            else error
        )
        xs, true = (
            crossing(case, slot, paths),
            joined({path: m[slot] for path, m in true_means(workers).items()}, paths),
        )
        sending = error * np.linalg.norm(xs, axis=1).mean()
        returning = 0.0 if case[0] == "bfloat16 ring" else error
        bound = sending * (1 + returning) + returning * np.linalg.norm(true)
        bound += 1e-6 * np.linalg.norm(xs, axis=1).mean()  # float32 sums
        # its mean is rounded to bfloat16, and where it is sent exactly, so is every sum
        if "half" in paths:
            halves = np.linalg.norm(crossing(case, slot, ["half"]), axis=1).mean()
            bound += (workers if item.codec_name == "exact" else 1) * 2.0**-8 * (halves + bound)
        lost = np.linalg.norm(joined(result.means[slot], paths) - true)
        assert lost <= bound
        # no mean at all would lose all of it, which is within the bounds of some
        assert lost < np.linalg.norm(true)


@pytest.mark.sampled(quick=18)
@every_case
def test_exact_gradients_are_exact_to_float_rounding(case):
    result, workers = outcome(case), WORKERS[case[2]]
    exact = [
        path
        for path in SHAPES
        if result.exchange.transfers[path].codec_name == "exact" and path != "half"
    ]
    # which no codec makes smaller
    few = {"exact": set(SHAPES) - {"half"}, "power_sgd": {"one", "bias"}}.get(case[0], {"one"})
    assert few <= set(exact) <= few | {"bias"}
    for path, slot in itertools.product(exact, range(STEPS)):
        size = np.abs(wide(inputs(workers)[path][slot])).max()
        assert (
            np.abs(result.means[slot][path] - true_means(workers)[path][slot]).max() <= 1e-6 * size
        )


@pytest.mark.sampled(quick=7)
@lossy_case
def test_mean_is_exact_only_before_start_step(case):
    result, exact = outcome(case), outcome(("exact", *case[1:]))
    for slot, path in itertools.product(range(START), SHAPES):
        if case[0] == "bfloat16 ring" and path == "tall":
            continue  # sharded differently there, so summed by another collective
        assert result.means[slot][path].tobytes() == exact.means[slot][path].tobytes()
    large = [path for path in result.lossy() if path not in ("one", "half")]
    assert large
    for slot, path in itertools.product((START, START + 1, STEPS - 1), large):
        assert not np.array_equal(result.means[slot][path], exact.means[slot][path]), path


@pytest.mark.sampled(quick=8)
@every_case
def test_copies_of_a_shard_are_bit_equal(case):
    assert outcome(case).unequal == []


def test_check_detects_unequal_copies():
    mesh = spmd.make_mesh("data=8")
    same = jax.shard_map(
        lambda x: x[:1] * 0, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P(), check_vma=False
    )(jnp.arange(8.0))
    differ = jax.shard_map(
        lambda x: x, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P(), check_vma=False
    )(jnp.arange(8.0))
    assert copies_agree(same) and not copies_agree(differ)


@pytest.mark.sampled(quick=8)
@every_case
def test_zero_gradient_gives_zero_mean_and_residual(case):
    slot = SLOTS["zeros"]
    means, memory = outcome(case).means[slot], outcome(case).memories[slot]
    assert all(not np.any(mean) for mean in means.values())  # NaN is true
    assert all(not np.any(entry[RESIDUAL]) for entry in memory.values() if RESIDUAL in entry)


@pytest.mark.parametrize("value", ["nan", "inf"])
@every_case
def test_nan_of_one_worker_reaches_mean(case, value):
    result = outcome(case)
    assert all(np.isfinite(wide(mean)).all() for mean in result.means[START].values())
    for path in SHAPES:
        bad = result.means[SLOTS[path, value]]
        assert not np.isfinite(wide(bad[path])).all(), path
        # it stays in its own bucket
        others = [
            other for bucket in result.exchange.buckets if path not in bucket for other in bucket
        ]
        assert all(np.isfinite(wide(bad[other])).all() for other in others)


@every_case
def test_mean_has_gradient_dtype_and_residual_is_float32(case):
    result = outcome(case)
    for means, memory in zip(result.means, result.memories, strict=True):
        assert {path: mean.dtype for path, mean in means.items()} == {
            path: np.dtype(DTYPES.get(path, "float32")) for path in SHAPES
        }
        assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(memory))


@every_case
def test_all_steps_run_one_compiled_program(case):
    assert outcome(case).compiled == 1


# error feedback -----------------------------------------------------------------------------------


@fed_case
def test_applied_gradients_plus_residuals_are_the_true_sum(case):
    result, workers = outcome(case), WORKERS[case[2]]
    last, unfed = result.memories[STEPS - 1], 0.0
    # the mean of bfloat16 gradients is rounded once more, and no residual keeps that
    for path in set(result.lossy()) - {"half"}:
        applied = sum(wide(result.means[slot][path]) for slot in range(STEPS))
        true = true_means(workers)[path][:STEPS].sum(0)
        rest = wide(last[path][RESIDUAL]).mean(0)
        assert np.linalg.norm(applied + rest - true) <= 1e-6 * np.linalg.norm(true), path
        unfed = max(unfed, np.linalg.norm(applied - true) / np.linalg.norm(true))
    assert unfed > 1e-5  # the residual is what makes it so


@fed_case
def test_residuals_exist_for_lossy_codecs_from_start_step(case):
    result = outcome(case)
    kept = [path for path, entry in result.memories[0].items() if RESIDUAL in entry]
    assert set(kept) == set(result.lossy())
    for slot in range(START):
        assert all(not np.any(result.memories[slot][path][RESIDUAL]) for path in kept)
    # a lone number may be exact, and so are bfloat16 gradients as bfloat16, where they make no way
    # back
    large = [path for path in kept if path not in ("one", "half")]
    assert all(np.any(result.memories[START][path][RESIDUAL]) for path in large)


@pytest.mark.sampled(quick=2)
@pytest.mark.parametrize("codec", ["sign", "top_k"])
def test_error_feedback_makes_biased_codec_unbiased(codec):
    rng = np.random.default_rng(2)
    constant = np.broadcast_to(
        rng.standard_normal((8, 24, 16)) + rng.standard_normal((24, 16)), (200, 8, 24, 16)
    ).astype(np.float32)
    true = wide(constant[0]).mean(0)

    def miss(feedback):
        gradients = Gradients(
            "all_reduce", codec, CHOICES[codec][1], error_feedback=feedback, allow_biased=True
        )
        means, _ = scanned(build(gradients, {"matrix": (24, 16)}), {"matrix": constant})
        away = np.cumsum(wide(means["matrix"]), axis=0) / np.arange(1, 201)[:, None, None] - true
        return np.linalg.norm(away, axis=(1, 2)) / np.linalg.norm(true)

    fed, unfed = miss(True), miss(False)
    assert_close(fed[0], unfed[0])  # nothing is remembered yet
    assert_close(unfed[199], unfed[0])
    assert unfed[199] > 0.3
    assert fed[199] < 0.1 and fed[199] < 0.4 * fed[49]


@pytest.mark.system
def test_sign_descends_only_with_error_feedback():
    # The first counter-example of Karimireddy et al. 2019 (arXiv:1901.09847): minimise x / 4 on
    # [-1, 1], where the gradient is 4 with probability 1/4 and else -1. The codec's sign comes with
    # a scale, which makes a single number exact; 256 copies share one scale per worker and row.
    rng, steps, rate = np.random.default_rng(1), 800, 0.02
    quarter = np.repeat(np.array([4, -1, -1, -1], np.float32), 64)
    grads = rng.permuted(np.broadcast_to(quarter, (steps, 8, 256)), axis=2)
    assert (grads.mean(2) == 0.25).all()

    def walk(codec, feedback):
        gradients = Gradients("all_reduce", codec, error_feedback=feedback, allow_biased=True)
        means, _ = scanned(build(gradients, {"x": (256,)}), {"x": grads})
        x = np.zeros(256)
        for mean in wide(means["x"]):
            x = np.clip(x - rate * mean, -1, 1)
        return x.mean()

    assert walk("exact", False) < -0.9
    assert walk("sign", True) < -0.9
    assert walk("sign", False) > 0.9


# formats ------------------------------------------------------------------------------------------


def rows_of(x, workers):
    """The elements of a full gradient as workers own them, the last rows padded with zeros."""
    width = -(-x.size // workers)
    return (
        np.pad(x.reshape(-1), (0, workers * width - x.size))
        .reshape(workers, width)
        .astype(np.float32)
    )


def int8_by_hand(rows, block):
    decoded = np.zeros_like(rows)
    for row, start in itertools.product(range(len(rows)), range(0, rows.shape[1], block)):
        part = rows[row, start : start + block]
        # how XLA divides by a constant
        scale = np.abs(part).max() * (np.float32(1) / np.float32(127))
        decoded[row, start : start + block] = np.round(part / (scale or np.float32(1))) * scale
    return decoded


def sign_by_hand(rows, block):
    decoded = np.zeros_like(rows)
    for row, start in itertools.product(range(len(rows)), range(0, rows.shape[1], block)):
        part = rows[row, start : start + block]
        scale = np.float32(np.abs(part).sum(dtype=np.float32) / np.float32(part.size))
        decoded[row, start : start + block] = np.where(part >= 0, scale, -scale)
    return decoded


BY_HAND = {"int8": int8_by_hand, "sign": sign_by_hand}


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("shape", [(7, 9), (13,), (25,), (8, 6)], ids=str)
@pytest.mark.parametrize("codec", BY_HAND)
def test_mean_of_indivisible_sizes_equals_numpy(codec, shape):
    # Whole numbers, each block's largest 127 times a power of two: the first scales and all sums
    # are exact in any order. The zeros that fill rows up are encoded with the rest (they count in a
    # sign's scale), and thrown away.
    rng, block, size = np.random.default_rng(3), 4, int(np.prod(shape))
    worker_grads = rng.integers(-100, 100, (8, size)).astype(np.float32)
    width = -(-size // 8)
    peaks = [
        row * width + at
        for row in range(8)
        for at in range(0, width, block)
        if row * width + at < size
    ]
    worker_grads[:, peaks] = 127 * 2.0 ** rng.integers(1, 4, (8, len(peaks)))
    xs = [rows_of(x, 8) for x in worker_grads]
    encode = functools.partial(BY_HAND[codec], block=block)
    sent = [encode(rows) for rows in xs]
    for me in range(8):  # a worker's own row is not sent
        sent[me][me] = xs[me][me]
    mean = (
        encode(np.sum(sent, axis=0, dtype=np.float32) / np.float32(8))
        .reshape(-1)[:size]
        .reshape(shape)
    )
    exchange = build(
        Gradients("all_reduce", codec, {"block": block}, allow_biased=True), {"x": shape}
    )
    means, _ = scanned(exchange, {"x": worker_grads.reshape(1, 8, *shape)})
    assert np.array_equal(means["x"][0], mean)
    assert not np.array_equal(mean, worker_grads.mean(0).reshape(shape))


@pytest.mark.sampled(quick=15)
@pytest.mark.parametrize("name", ["int8", "float8", "sign"])
@pytest.mark.parametrize("width", [1, 7, 16, 18, 40])
def test_partial_block_is_encoded_separately(name, width):
    codec, rng = make_codec(name, {"block": 16}), np.random.default_rng(width)
    rows = jnp.asarray(rng.standard_normal((3, width)), jnp.float32)

    def there_and_back(codec, x):
        return np.asarray(codec.decode(codec.encode(x), x.shape[1]))

    last = width - (width - 1) % 16 - 1
    alone = there_and_back(make_codec(name, {"block": width - last}), rows[:, last:])
    assert np.array_equal(there_and_back(codec, rows)[:, last:], alone)
    assert width == 1 or not np.array_equal(alone, rows[:, last:])


@pytest.mark.sampled(quick=5)
@pytest.mark.parametrize(
    "choice",
    [choice for choice in CHOICES if choice not in ("exact", "bfloat16 ring", "power_sgd")],
)
def test_encoding_error_is_within_stated_bound(choice):
    codec, rng = make_codec(*CHOICES[choice]), np.random.default_rng(8)
    kinds = {
        "normal": rng.standard_normal((4, 50)),
        "heavy": rng.standard_cauchy((4, 50)),
        "spread": np.exp(12 * rng.standard_normal((4, 50))),
        "one": np.eye(4, 50),
        "flat": np.ones((4, 50)),
        "tiny": 1e-30 * rng.standard_normal((4, 50)),
        "short": rng.standard_normal((4, 1)),
    }
    for kind, rows in kinds.items():
        x = jnp.asarray(rows, jnp.float32)
        lost = np.linalg.norm(wide(codec.decode(codec.encode(x), x.shape[1])) - wide(x))
        assert lost <= (codec.error + 1e-6) * np.linalg.norm(wide(x)), kind
        assert lost < np.linalg.norm(wide(x)), kind


@pytest.mark.sampled(quick=13)
@pytest.mark.parametrize(
    "bits", [0x7FC00000, 0x7F800001, 0xFF800001, 0x7F800000, 0xFF800000], ids=hex
)
@pytest.mark.parametrize(
    "choice",
    [choice for choice in CHOICES if choice not in ("exact", "bfloat16 ring", "power_sgd")],
)
def test_encoding_keeps_nan_and_infinity_not_finite(choice, bits):
    """Of few values, and of so many that XLA:CPU computes a maximum in which a NaN is lost."""
    codec = make_codec(*CHOICES[choice])
    for count, width in ((1, 40), (8, 2048)):
        rows = np.ones((count, width), np.float32)
        rows[-1, 33] = np.uint32(bits).view(np.float32)
        back = np.asarray(codec.decode(codec.encode(jax.device_put(rows)), width))
        assert not np.isfinite(back[-1, 33])
        # other blocks are not affected
        assert np.isfinite(back[-1, :32]).all() and np.isfinite(back[:-1]).all()


# the self-test ------------------------------------------------------------------------------------


def test_self_test_detects_missing_bfloat16_rounding(monkeypatch):
    """A backend that takes float32 -> bfloat16 -> float32 for nothing would switch error feedback
    off without a word.
    """
    bfloat16.self_test.cache_clear()
    bfloat16.self_test()
    monkeypatch.setattr(bfloat16.Bfloat16, "decode", lambda self, payload, width: payload)
    monkeypatch.setattr(bfloat16.Bfloat16, "encode", lambda self, rows: rows)
    bfloat16.self_test.cache_clear()
    with pytest.raises(
        CodecError,
        match=r"this backend \(cpu\) does not round to bfloat16; 496 of 512 values differ",
    ):
        bfloat16.self_test()


@pytest.mark.parametrize(
    "how",
    [
        {"codec": "bfloat16"},
        {"weights": "bfloat16"},
        {"rules": (spmd.GradientRule("w", "bfloat16"),)},
    ],
)
def test_self_test_runs_before_first_bfloat16_step(how, monkeypatch):
    ran = []
    monkeypatch.setattr(gradient_sync, "self_test", lambda: ran.append(1))
    model = spmd.FunctionalModel(
        lambda key: {"w": jnp.zeros((8, 8))}, lambda params, x: x @ params["w"]
    )
    layout = Layout(optimizer=OptimizerState("data"), gradients=Gradients("reduce_scatter", **how))
    batch = (np.ones((8, 8), np.float32), np.ones((8, 8), np.float32))
    for chosen, runs in (
        (dataclasses.replace(layout, gradients=Gradients("reduce_scatter")), 0),
        (layout, 1),
    ):
        trainer = spmd.Trainer(
            model, loss=spmd.losses.mean_squared_error, optimizer=optax.sgd(0.1), layout=chosen
        )
        trainer.prepare(batch)
        assert len(ran) == runs


def test_every_codec_is_in_every_suite():
    """What is registered is tested here, counted in test_comm_log.py, and can be written in a
    layout.
    """
    from tests.wire import test_comm_log

    assert (
        set(CODECS)
        == {codec for codec, _ in CHOICES.values()}
        == {name.split()[0] for name in test_comm_log.CODECS}
    )


# what is worth it ---------------------------------------------------------------------------------


@pytest.mark.parametrize("codec, options, shape, compressed", [
    ("int8", {}, (8,), False),  # 8 rows of one number: a byte and a scale each, against 4 bytes
    ("int8", {}, (24,), True),  # 8 rows of 7 bytes against 96
    ("int8", {"block": 1}, (64, 64), False),
    ("bfloat16", {}, (9,), True),  # 8 rows of two numbers, 32 bytes against 36
    ("bfloat16", {}, (3,), False),
    ("sign", {}, (8,), False),
    ("top_k", {"keep": 1}, (64, 64), False),  # every value, and an index for each
    ("top_k", {"keep": 0.4}, (64, 64), True),
])  # fmt: skip
def test_gradient_that_codec_enlarges_is_sent_exactly(codec, options, shape, compressed):
    exchange = build(Gradients("all_reduce", codec, options, error_feedback=True), {"x": shape})
    assert (exchange.transfers["x"].codec_name == codec) is compressed
    assert bool(exchange.init(jax.random.key(0), {})) is compressed


def test_gradients_of_one_width_are_encoded_in_one_call():
    """A program grows with the widths that there are, not with the number of gradients."""

    def rounds(count):
        shapes = {
            f"{kind}{n}": (64, size) for n in range(count) for kind, size in (("a", 8), ("b", 24))
        }
        exchange = build(Gradients("all_reduce", "int8"), shapes)
        grads = {
            path: jax.ShapeDtypeStruct((8, *item.shape), jnp.float32)
            for path, item in exchange.transfers.items()
        }
        return str(jax.make_jaxpr(make_sync(exchange, {}))(grads, {}, 0)).count(" round[")

    assert rounds(1) == rounds(20) == 4  # two widths, there and back
