"""PowerSGD by its identities: a projection, linear in the workers, the best low rank in the end,
and residuals that stay.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.base.specs import keep_axes, pspec
from spmd.layout.gradients import Gradients
from spmd.layout.resolve import resolve
from spmd.layout.schema import Layout
from spmd.mesh import MeshSpec
from spmd.sync.gradient_sync import GradientSync
from spmd.sync.mesh_axes import MeshAxes
from spmd.wire.codec.base import Bucket
from spmd.wire.codec.power_sgd import PowerSgd, orthonormal
from spmd.wire.shard_layout import ShardLayout
from spmd.wire.transfer import CODEC, RESIDUAL

SHAPE = (24, 16)


def on_workers(function, workers):
    """`function` on every worker, compiled: arrays [workers, ...] in and out, the last argument
    alike on all.
    """
    mesh = spmd.make_mesh(f"data={workers}", devices=jax.devices()[:workers])

    def worker(grads, state):
        return jax.tree.map(lambda x: x[None], function(grads[0], state))

    replicated, sharded = jax.P(), jax.P("data")
    return jax.jit(
        jax.shard_map(
            worker, mesh=mesh, in_specs=(sharded, replicated), out_specs=sharded, check_vma=False
        )
    )


@functools.cache
def make_sync(codec, workers, shape=SHAPE):
    """One reduction by the codec: gradients [workers, ...] and Q in; every worker's mean, kept and
    next Q out.
    """
    bucket = Bucket((ShardLayout(shape, (), ("data",), (workers,)),))

    def sync(grad, q):
        means, kept, states = codec.mean([grad], [{"q": q}], bucket)
        return means[0], kept[0], states[0]["q"]

    return on_workers(sync, workers)


def start(codec, shape=SHAPE):
    return codec.init(jax.random.key(3), shape, shape)["q"]


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def away(x, y):
    """|x - y| / |y|."""
    x, y = (np.asarray(a, np.float64) for a in (x, y))
    return np.linalg.norm(x - y) / np.linalg.norm(y)


def best(matrix, rank):
    u, s, v = np.linalg.svd(np.asarray(matrix, np.float64))
    return (u[:, :rank] * s[:rank]) @ v[:rank]


def spectrum(rows, columns, seed=0):
    """A matrix whose singular values halve, so that each is well apart from the next."""
    u, _, v = np.linalg.svd(random(rows, columns, seed=seed), full_matrices=False)
    return (u * 0.5 ** np.arange(len(v))) @ v


# one step -----------------------------------------------------------------------------------------


@pytest.mark.sampled(quick=4)
@pytest.mark.parametrize("shape", [(24, 16), (16, 24), (12, 12), (3, 8, 4)], ids=str)
def test_full_rank_mean_is_exact(shape):
    grads = random(4, *shape)
    full, low = PowerSgd(rank=1000), PowerSgd(rank=2)
    mean, kept, _ = make_sync(full, 4, shape)(grads, start(full, shape))
    assert away(mean[0], grads.mean(0)) < 1e-5
    # a worker's own may lie outside the columns of the mean, and keeps a rest
    assert away(np.mean(kept, 0), mean[0]) < 1e-6
    assert away(make_sync(low, 4, shape)(grads, start(low, shape))[0][0], grads.mean(0)) > 0.1


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_mean_is_projection_of_exact_mean(rank):
    codec, grads = PowerSgd(rank), random(4, *SHAPE)
    true = grads.astype(np.float64).mean(0)
    mean, kept, _ = (np.asarray(x, np.float64) for x in make_sync(codec, 4)(grads, start(codec)))
    p, _ = np.linalg.qr(true @ np.asarray(start(codec), np.float64))
    assert away(mean[0], p @ p.T @ true) < 1e-5
    assert away(kept, np.einsum("ab,wbc->wac", p @ p.T, grads)) < 1e-5
    assert away(kept.mean(0), mean[0]) < 1e-6  # the contract of error feedback
    assert np.linalg.matrix_rank(mean[0], 1e-4) == rank
    # not below what is the best, and not above what a projection can lose
    lost = np.linalg.norm(true - mean[0])
    assert np.linalg.norm(true - best(true, rank)) <= lost <= np.linalg.norm(true) * codec.error


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_workers_equal_one_worker_with_mean_gradient(workers):
    codec, grads = PowerSgd(rank=2), random(workers, *SHAPE)
    mean, _, q = make_sync(codec, workers)(grads, start(codec))
    alone, _, q_alone = make_sync(codec, 1)(grads.mean(0, keepdims=True), start(codec))
    assert away(mean[0], alone[0]) < 1e-5 and away(q[0], q_alone[0]) < 1e-5
    first, _, q_first = make_sync(codec, 1)(grads[:1], start(codec))
    assert away(mean[0], first[0]) > 0.1 and away(q[0], q_first[0]) > 0.1


def test_means_are_bit_equal_on_all_workers():
    codec, grads = PowerSgd(rank=2), random(8, *SHAPE)
    mean, kept, q = (np.asarray(x) for x in make_sync(codec, 8)(grads, start(codec)))
    assert len({x.tobytes() for x in mean}) == 1 and len({x.tobytes() for x in q}) == 1
    assert len({x.tobytes() for x in kept}) == 8


# step after step ----------------------------------------------------------------------------------


def follow(codec, grads, steps, shape=SHAPE):
    """The means of some steps on the same gradients, and the Q after each."""
    q, means, qs = start(codec, shape), [], []
    for _ in range(steps):
        mean, _, q = make_sync(codec, len(grads), shape)(grads, q)
        q = np.asarray(q)[0]
        means.append(np.asarray(mean)[0])
        qs.append(q)
    return means, qs


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_warm_start_converges_to_best_low_rank(rank):
    noise = random(4, *SHAPE, seed=1)
    # no worker has the low rank itself
    grads = (spectrum(*SHAPE) + noise - noise.mean(0)).astype(np.float32)
    wanted = best(grads.astype(np.float64).mean(0), rank)
    warm, _ = follow(PowerSgd(rank), grads, 25)
    cold, _ = follow(PowerSgd(rank, warm_start=False), grads, 25)
    assert away(warm[-1], wanted) < 1e-4
    assert away(warm[0], wanted) > 0.01
    assert np.array_equal(cold[-1], cold[0]) and np.array_equal(cold[0], warm[0])


def test_q_is_constant_without_warm_start():
    grads, codec = random(4, *SHAPE), PowerSgd(rank=2, warm_start=False)
    assert all(np.array_equal(q, start(codec)) for q in follow(codec, grads, 3)[1])
    assert not np.array_equal(follow(PowerSgd(rank=2), grads, 1)[1][0], start(codec))


@pytest.mark.parametrize("warm", [True, False])
def test_zero_gradient_leaves_q_usable(warm):
    codec = PowerSgd(rank=2, warm_start=warm)
    means, qs = follow(codec, np.zeros((4, *SHAPE), np.float32), 3)
    assert all(not np.any(mean) for mean in means)  # NaN is true
    assert np.array_equal(qs[-1], start(codec))
    grads = random(4, *SHAPE)
    mean, _, _ = make_sync(codec, 4)(grads, qs[-1])
    assert np.array_equal(mean[0], make_sync(codec, 4)(grads, start(codec))[0][0])
    assert np.linalg.matrix_rank(np.asarray(mean[0]), 1e-4) == 2


def test_low_rank_gradient_leaves_q_usable():
    codec = PowerSgd(rank=4)
    thin = np.broadcast_to(np.outer(random(24), random(16, seed=1)), (4, *SHAPE))
    means, qs = follow(codec, thin, 20)
    assert all(away(mean, thin[0]) < 1e-5 for mean in means)
    assert np.isfinite(qs).all()
    grads, q = random(4, *SHAPE, seed=2), qs[-1]
    for _ in range(400):
        mean, _, q = make_sync(codec, 4)(grads, q)
        q = np.asarray(q)[0]
    assert away(mean[0], best(grads.mean(0), 4)) < 1e-3


def test_orthonormal_of_deficient_columns():
    for p in (
        random(24, 4),
        np.zeros((24, 4), np.float32),
        np.outer(random(24), np.ones(4)).astype(np.float32),
    ):
        basis = np.asarray(orthonormal(jnp.asarray(p)))
        assert np.abs(basis.T @ basis - np.eye(4)).max() < 1e-5


# error feedback -----------------------------------------------------------------------------------


def exchange_of(gradients, shapes, workers=4):
    layout, mesh = Layout(gradients=gradients), f"data={workers}"
    params = {path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in shapes.items()}
    mesh_axes = MeshAxes(spmd.make_mesh(mesh, devices=jax.devices()[:workers]), ("data",))
    return GradientSync(resolve(layout, params, {}, MeshSpec.parse(mesh)), mesh_axes)


def scanned(exchange, grads):
    """The means and memories of all steps, from gradients {path: [steps, workers, ...]}, in one
    call.
    """
    memory = exchange.init(jax.random.key(0), {})
    kept = jax.tree.map(
        lambda spec: pspec(keep_axes(spec, ("data",))),
        exchange.specs(memory),
        is_leaf=lambda x: isinstance(x, tuple),
    )
    sync = jax.shard_map(
        lambda grads, memory, step: exchange.reduce_gradients(
            jax.tree.map(lambda g: g[0], grads), memory, step
        ),
        mesh=exchange.mesh_axes.mesh,
        in_specs=(jax.P("data"), kept, jax.P()),
        out_specs=(jax.P(), kept, jax.P()),
        check_vma=False,
    )

    def body(memory, grads):
        means, memory, _ = sync(grads, memory, 0)
        return memory, (means, memory)

    return memory, jax.tree.map(
        np.asarray, jax.jit(lambda grads: jax.lax.scan(body, memory, grads)[1])(grads)
    )


def by_hand(grads, q, *, local):
    """PowerSGD with error feedback in float64: residuals of every step, of a worker's own Q_i or of
    the workers' common Q.
    """
    residual, residuals = np.zeros(grads.shape[1:]), []
    for step in grads.astype(np.float64):
        full = step + residual
        p, _ = np.linalg.qr((full @ q).mean(0))
        local_q = full.transpose(0, 2, 1) @ p
        q = local_q.mean(0)
        residual = full - p @ (local_q if local else q[None]).transpose(0, 2, 1)
        residuals.append(residual)
    return np.array(residuals)


def test_residuals_are_bounded_only_with_local_q():
    grads = random(500, 4, *SHAPE, seed=7)  # independent noise: the workers have nothing in common
    exchange = exchange_of(
        Gradients("all_reduce", "power_sgd", {"rank": 2}, error_feedback=True), {"m": SHAPE}
    )
    first, (means, memories) = scanned(exchange, {"m": grads})
    kept = memories["m"][RESIDUAL].astype(np.float64)
    q = np.asarray(first["m"][CODEC]["q"], np.float64)[0]
    local, common = by_hand(grads, q, local=True), by_hand(grads, q, local=False)

    def size(residuals):
        return np.linalg.norm(residuals, axis=(2, 3)).max(1)  # of every step, the largest worker's

    assert away(kept[:20], local[:20]) < 1e-4 < away(kept[:20], common[:20])
    assert 0.9 < size(kept).max() / size(local).max() < 1.1
    assert size(common)[-1] > 3 * size(kept).max()
    assert size(common)[-1] > 1.3 * size(common)[249]  # and further with every step
    assert size(kept)[250:].max() < 1.3 * size(kept)[:250].max()
    # the residuals' mean is the same either way: what differs cancels among the workers
    assert away(common[:20].mean(1), local[:20].mean(1)) < 1e-6
    total = means["m"].astype(np.float64).sum(0) + kept[-1].mean(0)
    assert away(total, grads.astype(np.float64).mean(1).sum(0)) < 1e-5


# what is worth it ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape, options, compressed",
    [
        ((24, 16), {"rank": 2}, True),  # 384 / 80
        ((24, 16), {"rank": 4}, True),  # 384 / 160
        ((24, 16), {"rank": 5}, False),  # 384 / 200
        ((24, 16), {"rank": 5, "min_compression": 1.92}, True),
        ((24, 16), {"rank": 5, "min_compression": 1.93}, False),
        ((2, 512), {"rank": 1}, False),  # 1024 / 514
        ((1, 512), {"rank": 1, "min_compression": 1.0}, False),  # a vector, whatever it looks like
        ((512,), {"rank": 1, "min_compression": 1.0}, False),
        ((), {"rank": 1, "min_compression": 1.0}, False),
        ((0, 16), {"rank": 1, "min_compression": 1.0}, False),
        ((3, 8, 4), {"rank": 1}, True),  # 24 x 4
    ],
    ids=str,
)
def test_min_compression_decides_exact_gradients(shape, options, compressed):
    assert (
        PowerSgd(**options).compresses(ShardLayout(shape, (), ("data",), (8,)), shape) is compressed
    )
    exchange = exchange_of(
        Gradients("all_reduce", "power_sgd", options, error_feedback=True), {"p": shape}
    )
    assert exchange.transfers["p"].codec_name == ("power_sgd" if compressed else "exact")


def test_uncompressed_gradient_is_sent_exactly_without_state():
    shapes = {"bias": (512,), "matrix": SHAPE, "wide": (2, 512)}
    grads = {path: random(1, 4, *shape, seed=len(path)) for path, shape in shapes.items()}
    compressed = exchange_of(
        Gradients("all_reduce", "power_sgd", {"rank": 1}, error_feedback=True), shapes
    )
    exact = exchange_of(Gradients("all_reduce"), shapes)
    (_, (means, memory)), (_, (wanted, nothing)) = scanned(compressed, grads), scanned(exact, grads)
    assert (
        set(memory) == {"matrix"} and set(memory["matrix"]) == {RESIDUAL, CODEC} and nothing == {}
    )
    assert np.array_equal(means["wide"], wanted["wide"]) and np.array_equal(
        means["bias"], wanted["bias"]
    )
    assert away(means["matrix"], wanted["matrix"]) > 0.1
