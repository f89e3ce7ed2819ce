"""`spmd.wire` in a loop written by hand; `test_foreign_loops.py` has other ones."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding

from spmd import wire
from spmd.errors import CommunicationError, OptimizerError, OptionError
from tests.compare import assert_close

ROWS, WORKERS = 32, 8
CODECS = {
    "bfloat16": wire.bfloat16(),
    "int8": wire.int8(block=16),
    "float8": wire.float8(block=16),
    "sign": wire.sign(block=16),
    "top_k": wire.top_k(keep=0.2),
    "power_sgd": wire.power_sgd(rank=2, min_compression=1.0),
}


def make_mesh(**sizes):
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
    )


MESH = make_mesh(data=8)
NODES = make_mesh(host=2, gpu=4)


def make_params():
    keys = jax.random.split(jax.random.key(0), 2)
    return {
        "up": jax.random.normal(keys[0], (16, 32)) / 4,
        "bias": jnp.zeros(32),
        "down": jax.random.normal(keys[1], (32, 1)) / 4,
    }


def make_batches(steps):
    rng = np.random.default_rng(0)
    return [
        (
            rng.normal(size=(ROWS, 16)).astype(np.float32),
            rng.normal(size=(ROWS, 1)).astype(np.float32),
        )
        for _ in range(steps)
    ]


def loss_of(params, batch):
    x, y = batch
    return jnp.mean((jnp.tanh(x @ params["up"] + params["bias"]) @ params["down"] - y) ** 2)


def make_step(tx, state, mesh, axes="data", *, at=lambda state, params: params, check_vma=False):
    """A step written by hand: shard_map, value_and_grad, tx.update, apply_updates."""

    def step(params, state, batch):
        grads = jax.grad(loss_of)(at(state, params), batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    specs = (jax.P(), wire.specs(state))
    return jax.jit(
        jax.shard_map(
            step, mesh=mesh, in_specs=(*specs, jax.P(axes)), out_specs=specs, check_vma=check_vma
        )
    )


def train(tx, mesh=MESH, axes="data", steps=4, **options):
    params = make_params()
    state = wire.init(tx, params, mesh)
    step = make_step(tx, state, mesh, axes, **options)
    for batch in make_batches(steps):
        params, state = step(params, state, batch)
    return jax.tree.map(np.asarray, params), state


def pmean(axes):
    def update(grads, state, params=None):
        return jax.lax.pmean(grads, axes), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def assert_same_bits(one, other):
    for path in one:
        np.testing.assert_array_equal(one[path], other[path], err_msg=path)


def distance(one, other):
    return np.max([np.abs(one[path] - other[path]).max() for path in one])


# the mean -----------------------------------------------------------------------------------------


@pytest.mark.system
def test_exact_all_reduce_works_where_shard_map_tracks_replication():
    def step(params, batch):
        grads = jax.grad(lambda params: loss_of(params, batch))(
            jax.lax.pcast(params, "data", to="varying")
        )
        return wire.all_reduce("data").update(grads, wire.all_reduce("data").init(params))[0]

    tracked = jax.jit(
        jax.shard_map(step, mesh=MESH, in_specs=(jax.P(), jax.P("data")), out_specs=jax.P())
    )
    full = jax.grad(loss_of)(make_params(), make_batches(1)[0])
    for path, grad in tracked(make_params(), make_batches(1)[0]).items():
        np.testing.assert_allclose(grad, full[path], atol=1e-6)


@pytest.mark.sampled(quick=5)
@pytest.mark.parametrize("name", CODECS)
def test_codec_loses_at_most_its_bound_and_all_workers_agree(name):
    codec = CODECS[name]
    rng = np.random.default_rng(0)
    grads = {"w": rng.normal(size=(WORKERS, 64, 48)).astype(np.float32)}
    tx = wire.all_reduce("data", codec, error_feedback=True)
    state = wire.init(tx, {"w": jnp.zeros((64, 48))}, MESH)

    def reduce(grads, state):
        mean, state = tx.update({"w": grads["w"][0]}, state)
        return {"w": mean["w"][None]}, state

    specs = wire.specs(state)
    run = jax.jit(
        jax.shard_map(
            reduce,
            mesh=MESH,
            in_specs=(jax.P("data"), specs),
            out_specs=(jax.P("data"), specs),
            check_vma=False,
        )
    )
    means, state = run(grads, state)
    means, true = np.asarray(means["w"]), grads["w"].astype(np.float64).mean(0)
    assert (means == means[:1]).all()
    lost = np.linalg.norm(means[0] - true)
    # both encodings lose at most `error` of what they get
    norms = np.linalg.norm(grads["w"].reshape(WORKERS, -1), axis=1).mean()
    assert 0 < lost <= codec.error * (2 + codec.error) * norms
    rest = np.asarray(state.memory["w"]["residual"]).astype(np.float64).mean(0)
    np.testing.assert_allclose(means[0] + rest, true, atol=1e-5)  # nothing is lost for good


def test_reduce_scatter_gives_each_worker_its_shard_and_all_gather_joins_them():
    grads = {
        "up": jnp.arange(8 * 16 * 32, dtype=jnp.float32).reshape(8, 16, 32),
        "bias": jnp.ones((8, 3)),
    }
    tx = wire.reduce_scatter("data")

    def run(grads):
        own = jax.tree.map(lambda x: x[0], grads)
        shards, _ = tx.update(own, tx.init(own))
        shapes = {path: shard.shape for path, shard in shards.items()}
        return wire.all_gather(shards, "data", like=own), jax.tree.map(
            lambda x: jnp.array(x), shapes
        )

    mapped = jax.jit(
        jax.shard_map(run, mesh=MESH, in_specs=jax.P("data"), out_specs=jax.P(), check_vma=False)
    )
    full, shapes = mapped(grads)
    # no dim of 3 to shard
    assert [int(n) for n in shapes["up"]] == [16, 4] and [int(n) for n in shapes["bias"]] == [3]
    for path, grad in grads.items():
        assert_close(full[path], grad.mean(0))


def test_hierarchical_sends_less_between_hosts_and_reaches_the_mean():
    grads = {"w": jax.random.normal(jax.random.key(0), (8, 64, 64))}
    tx = wire.hierarchical(inside=("gpu", wire.exact()), across=("host", wire.int8()))

    def run(grads):
        own = {"w": grads["w"][0]}
        return tx.update(own, tx.init(own))[0]

    mapped = jax.shard_map(
        run, mesh=NODES, in_specs=jax.P(("host", "gpu")), out_specs=jax.P(), check_vma=False
    )
    np.testing.assert_allclose(jax.jit(mapped)(grads)["w"], grads["w"].mean(0), atol=0.01)
    ops = wire.log(tx, {"w": jnp.zeros((64, 64))}, NODES).ops
    across = sum(op.sent for op in ops if op.axes == ("host",))
    assert {op.dtype for op in ops if op.axes == ("host",)} == {
        "uint8"
    } and across < 64 * 64 * 4 / 4
    with pytest.raises(OptionError, match="rounded only across hosts"):
        wire.hierarchical(inside=("gpu", wire.int8()), across=("host", wire.int8()))


# what is sent -------------------------------------------------------------------------------------


@pytest.mark.system
def test_warm_up_sends_exactly_first():
    tx = wire.all_reduce("data", wire.int8(block=16), start_step=2)
    mixed, _ = train(optax.chain(tx, optax.adam(1e-2)), steps=2)
    exact, _ = train(optax.chain(wire.all_reduce("data"), optax.adam(1e-2)), steps=2)
    assert_same_bits(mixed, exact)
    assert (
        distance(
            train(optax.chain(tx, optax.adam(1e-2)), steps=3)[0],
            train(optax.chain(wire.all_reduce("data"), optax.adam(1e-2)), steps=3)[0],
        )
        > 0
    )


def test_codecs_by_path_and_memory_in_bfloat16():
    tx = wire.all_reduce(
        "data",
        wire.int8(block=16),
        codecs={"up": wire.exact()},
        error_feedback=True,
        memory_dtype="bfloat16",
    )
    state = wire.init(tx, make_params(), MESH)
    assert set(state.memory) == {"bias", "down"} or set(state.memory) == {"down"}
    assert all(
        entry["residual"].dtype == jnp.bfloat16 and entry["residual"].shape[0] == 8
        for entry in state.memory.values()
    )
    assert all(entry["residual"].sharding.spec == jax.P("data") for entry in state.memory.values())
    _, after = train(optax.chain(tx, optax.adam(1e-2)))
    assert all(entry["residual"].dtype == jnp.bfloat16 for entry in after[0].memory.values())


# optax's wrappers ---------------------------------------------------------------------------------


@pytest.mark.system
@pytest.mark.parametrize(
    "wrap",
    [
        lambda comm: optax.chain(comm, optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
        lambda comm: optax.chain(comm, optax.apply_if_finite(optax.adam(1e-2), 3)),
        lambda comm: optax.chain(
            comm, optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation()
        ),
        lambda comm: optax.inject_hyperparams(lambda rate: optax.chain(comm, optax.adam(rate)))(
            rate=1e-2
        ),
        lambda comm: optax.multi_transform(
            {"a": optax.chain(comm, optax.adam(1e-2)), "b": optax.chain(comm, optax.sgd(0.1))},
            {"up": "a", "bias": "b", "down": "b"},
        ),
        lambda comm: optax.chain(
            comm,
            optax.add_decayed_weights(0.1, {"up": True, "bias": False, "down": True}),
            optax.adam(1e-2),
        ),
    ],
    ids=[
        "clip",
        "apply_if_finite",
        "MultiSteps",
        "inject_hyperparams",
        "multi_transform",
        "masked",
    ],
)
def test_wrappers_of_optax_work_as_with_pmean(wrap):
    ours, _ = train(wrap(wire.all_reduce("data")))
    plain, _ = train(wrap(pmean("data")))
    assert_same_bits(ours, plain)
    lossy, _ = train(wrap(wire.all_reduce("data", wire.int8(block=16), error_feedback=True)))
    assert 0 < distance(ours, lossy) < 0.1


@pytest.mark.parametrize(
    "wrap, fix",
    [
        (
            lambda tx: optax.apply_if_finite(tx, 3),
            r"chain\(wire.all_reduce\(...\), optax.apply_if_finite",
        ),
        (lambda tx: optax.MultiSteps(tx, 2), r"chain\(wire.all_reduce\(...\), optax.MultiSteps"),
    ],
)
def test_wrappers_that_decide_on_each_workers_own_gradients_are_refused(wrap, fix):
    tx = wrap(optax.chain(wire.all_reduce("data"), optax.sgd(0.1)))
    with pytest.raises(CommunicationError, match=fix):
        wire.init(tx, make_params(), MESH)


# ZeRO-1 -------------------------------------------------------------------------------------------


def test_zero1_equals_the_full_optimizer_with_moments_sharded():
    ours, state = train(wire.zero1("data", optax.adamw(1e-2)))
    plain, _ = train(optax.chain(wire.all_reduce("data"), optax.adamw(1e-2)))
    assert distance(ours, plain) < 1e-6
    moments = optax.tree_utils.tree_get(state.inner, "mu")
    assert moments["up"].sharding.spec == jax.P(None, "data") and moments["up"].addressable_shards[
        0
    ].data.shape == (16, 4)
    lossy, _ = train(
        wire.zero1("data", optax.adamw(1e-2), wire.int8(block=16), error_feedback=True)
    )
    assert 0 < distance(ours, lossy) < 0.1


def test_zero1_clips_by_the_norm_of_all_shards():
    ours, _ = train(wire.zero1("data", optax.sgd(0.5), max_norm=0.05))
    plain, _ = train(
        optax.chain(wire.all_reduce("data"), optax.clip_by_global_norm(0.05), optax.sgd(0.5))
    )
    assert distance(ours, plain) < 1e-6
    assert distance(plain, train(wire.zero1("data", optax.sgd(0.5)))[0]) > 1e-3


def changed(function):
    """A transformation that applies a function to every update."""
    return optax.stateless(lambda updates, params: jax.tree.map(function, updates))


def test_zero1_takes_an_optimizer_that_rounds_each_element():
    rounding = changed(lambda x: jax.lax.reduce_precision(x, 8, 7))
    ours, _ = train(wire.zero1("data", optax.chain(optax.adamw(1e-2), rounding)))
    plain, _ = train(optax.chain(wire.all_reduce("data"), optax.adamw(1e-2), rounding))
    unrounded, _ = train(optax.chain(wire.all_reduce("data"), optax.adamw(1e-2)))

    def differing(one, other):
        return np.mean(np.concatenate([np.ravel(one[path] != other[path]) for path in one]))

    # a gradient summed in another order differs by about 1e-7 of itself, and so is rounded to
    # another bfloat16 (steps of 2**-8 of itself) once in some 10,000 times
    assert differing(ours, plain) < 0.01 < 0.5 < differing(ours, unrounded)


@pytest.mark.parametrize(
    "inner",
    [
        optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)),
        optax.adafactor(1e-2, min_dim_size_to_factor=1),
        optax.chain(changed(lambda x: jnp.fft.fft(x).real), optax.sgd(1e-2)),
    ],
)
def test_zero1_refuses_an_optimizer_that_combines_elements(inner):
    with pytest.raises(OptimizerError, match="each worker has only its shard"):
        train(wire.zero1("data", inner))


# bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: wire.all_reduce("data", "int8"), "codec='int8' is a str"),
        (
            lambda: wire.all_reduce("data", wire.sign()),
            "without error feedback: what it drops is lost",
        ),
        (
            lambda: wire.all_reduce("data", wire.bfloat16(reduce="ring"), error_feedback=True),
            "no worker knows what it loses",
        ),
        (lambda: wire.all_reduce(()), r"axes=\(\)"),
        (lambda: wire.all_reduce(("data", "data")), "axes="),
        (lambda: wire.all_reduce("data", memory_dtype="float16"), '"float32" or "bfloat16"'),
        (lambda: wire.all_reduce("data", start_step=-1), "start_step"),
        (lambda: wire.all_reduce("data", bucket_bytes=0), "bucket_bytes"),
        (lambda: wire.all_reduce("data", codecs={"**": 3}), r'codecs\["\*\*"\]'),
        (lambda: wire.int8(block=0), "block=0"),
        (lambda: wire.top_k(keep=2), "at most 1"),
        (
            lambda: wire.local_sgd(
                "data", inner=optax.sgd(0.1), outer=optax.sgd(1.0), every=2, fragments=3
            ),
            "fragments at most every",
        ),
        (
            lambda: wire.local_sgd(
                "data", inner=optax.sgd(0.1), outer=optax.sgd(1.0), every=2, overlap=2
            ),
            "overlap below every",
        ),
    ],
)
def test_options_are_checked(make, said):
    with pytest.raises(OptionError, match=said):
        make()


def test_an_axis_that_is_not_manual_is_named():
    tx = wire.all_reduce("data")
    state = tx.init(make_params())
    with pytest.raises(CommunicationError, match='"data" is not a manual mesh axis here'):
        tx.update(make_params(), state)
    other = jax.shard_map(
        lambda x: tx.update(x, state)[0],
        mesh=make_mesh(data=4, model=2),
        in_specs=jax.P(),
        out_specs=jax.P(),
        axis_names={"model"},
        check_vma=False,
    )
    with pytest.raises(CommunicationError, match='"data" is not a manual mesh axis here'):
        jax.jit(other)(make_params())


def test_gradients_that_are_summed_already_are_refused():
    tx = optax.chain(wire.all_reduce("data"), optax.sgd(0.1))
    with pytest.raises(CommunicationError, match=r"equal on all workers.*sums it already"):
        train(tx, check_vma=True)


def test_a_codec_under_check_vma_is_refused_by_name():
    def step(params, batch):
        grads = jax.grad(lambda params: loss_of(params, batch))(
            jax.lax.pcast(params, "data", to="varying")
        )
        tx = wire.all_reduce("data", wire.int8())
        return tx.update(grads, tx.init(params))[0]

    with pytest.raises(CommunicationError, match="check_vma=False"):
        jax.jit(
            jax.shard_map(step, mesh=MESH, in_specs=(jax.P(), jax.P("data")), out_specs=jax.P())
        )(make_params(), make_batches(1)[0])


def test_the_state_of_another_tree_is_refused():
    tx = wire.all_reduce("data", wire.int8(), error_feedback=True)
    state = wire.init(tx, {"w": jnp.zeros((64, 64))}, MESH)
    run = jax.shard_map(
        lambda grads, state: tx.update(grads, state)[0],
        mesh=MESH,
        in_specs=(jax.P(), wire.specs(state)),
        out_specs=jax.P(),
        check_vma=False,
    )
    with pytest.raises(
        CommunicationError,
        match=r"on each worker v needs the residual \(1, 64, 64\), and the state has none",
    ):
        jax.jit(run)({"v": jnp.zeros((64, 64))}, state)
    unsplit = jax.shard_map(
        lambda grads, state: tx.update(grads, state)[0],
        mesh=MESH,
        in_specs=jax.P(),
        out_specs=jax.P(),
        check_vma=False,
    )
    with pytest.raises(CommunicationError, match=r"wire.specs\(state\)"):
        jax.jit(unsplit)({"w": jnp.zeros((64, 64))}, state)


def test_one_worker_warns_that_the_codec_is_not_used():
    tx = wire.all_reduce("data", wire.int8())
    run = jax.shard_map(
        lambda g: tx.update(g, tx.init(g))[0],
        mesh=make_mesh(data=1),
        in_specs=jax.P(),
        out_specs=jax.P(),
        check_vma=False,
    )
    with pytest.warns(UserWarning, match="one worker along data sends nothing"):
        np.testing.assert_array_equal(jax.jit(run)(jnp.full(4, 1.001)), jnp.full(4, 1.001))


def test_how_many_workers_must_be_known():
    with pytest.raises(CommunicationError, match=r"wire.init\(tx, params, mesh\)"):
        wire.all_reduce("data", wire.int8(), error_feedback=True).init(
            {"w": np.zeros((64, 64), np.float32)}
        )
    on_mesh = jax.device_put(make_params(), NamedSharding(MESH, jax.P()))
    assert wire.all_reduce("data", wire.int8(), error_feedback=True).init(on_mesh).memory


@pytest.mark.system
def test_importing_wire_imports_no_layout_loop_or_launcher():
    script = (
        "import sys, spmd.wire; print(sorted({name.split('.')[1] for name in sys.modules if "
        "name.startswith('spmd.')}))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=300
    ).stdout
    for package in ("layout", "mesh", "sync", "train", "run", "launch", "trainer", "api"):
        assert f"'{package}'" not in loaded, loaded
