"""`wire.resplit`: the state of a communication for another number of workers. What error feedback
owes is kept.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from spmd import wire
from spmd.errors import CommunicationError
from spmd.wire.resplit_state import resplit_rows
from tests.wire.test_transformations import distance, make_batches, make_params, make_step

INT8 = {"codec": wire.int8(block=16), "error_feedback": True}


def mesh_of(workers):
    return jax.make_mesh(
        (workers,), ("data",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:workers]
    )


def train_from(tx, params, state, workers, batches, *, local=False):
    mesh = mesh_of(workers)
    params = jax.device_put(jax.tree.map(np.asarray, params), jax.NamedSharding(mesh, jax.P()))
    at = {"at": lambda state, params: wire.local_params(state, params)} if local else {}
    step = make_step(tx, state, mesh, **at)
    for batch in batches:
        params, state = step(params, state, batch)
    return jax.tree.map(np.asarray, params), state


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("before, after", [(8, 4), (4, 8), (8, 2), (6, 4), (4, 6)])
def test_resplit_rows_keeps_the_mean_over_workers(before, after):
    rows = np.random.default_rng(0).normal(size=(before, 5)).astype(np.float32)
    resplit = np.asarray(resplit_rows(jnp.asarray(rows), after))
    assert resplit.shape == (after, 5)
    np.testing.assert_allclose(resplit.mean(0), rows.mean(0), atol=1e-7)
    assert np.asarray(resplit_rows(jnp.asarray(rows, jnp.bfloat16), after)).dtype == jnp.bfloat16


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("before, after", [(8, 4), (2, 8), (4, 2)])
def test_what_error_feedback_owes_is_paid_after_a_change_of_workers(before, after):
    """Summed over all steps, the applied means plus the mean residual are the true means."""
    codec, rng = wire.top_k(keep=0.1), np.random.default_rng(0)
    tx, like = wire.all_reduce("data", codec, error_feedback=True), {"w": jnp.zeros((24, 16))}
    applied, true = np.zeros((24, 16)), np.zeros((24, 16))

    def run(state, workers):
        nonlocal applied, true
        specs = wire.specs(state)
        update = jax.jit(
            jax.shard_map(
                lambda grads, state: tx.update({"w": grads[0]}, state),
                mesh=mesh_of(workers),
                in_specs=(jax.P("data"), specs),
                out_specs=(jax.P(), specs),
                check_vma=False,
            )
        )
        for _ in range(3):
            grads = rng.normal(size=(workers, 24, 16)).astype(np.float32)
            mean, state = update(grads, state)
            applied, true = (
                applied + np.asarray(mean["w"], np.float64),
                true + grads.astype(np.float64).mean(0),
            )
        return state

    state = run(wire.init(tx, like, mesh_of(before)), before)
    resplit = wire.resplit(tx, state, like, mesh_of(after))
    owed, still_owed = (
        np.asarray(s.memory["w"]["residual"], np.float64).mean(0) for s in (state, resplit)
    )
    assert np.abs(owed).max() > 0.1
    np.testing.assert_allclose(still_owed, owed, atol=1e-6)
    assert int(resplit.step) == 3 and resplit.memory["w"]["residual"].addressable_shards[
        0
    ].data.shape == (1, 24, 16)
    end = run(resplit, after)
    rest = np.asarray(end.memory["w"]["residual"], np.float64).mean(0)
    np.testing.assert_allclose(applied + rest, true, atol=1e-5)


@pytest.mark.system
def test_codecs_arrays_and_an_optimizers_moments_are_kept_as_they_are():
    tx = optax.chain(
        wire.all_reduce("data", wire.power_sgd(rank=2, min_compression=1.0), error_feedback=True),
        optax.adam(1e-2),
    )
    params, state = train_from(
        tx, make_params(), wire.init(tx, make_params(), mesh_of(8)), 8, make_batches(3)
    )
    resplit = wire.resplit(tx, state, params, mesh_of(4))
    np.testing.assert_array_equal(
        resplit[0].memory["up"]["codec"]["q"], state[0].memory["up"]["codec"]["q"]
    )
    jax.tree.map(
        np.testing.assert_array_equal, jax.device_get(resplit[1]), jax.device_get(state[1])
    )
    continued, _ = train_from(tx, params, resplit, 4, make_batches(6)[3:])
    uninterrupted, _ = train_from(tx, params, state, 8, make_batches(6)[3:])
    assert distance(continued, uninterrupted) < 0.02 and distance(continued, params) > 0.02


def test_moments_of_zero1_are_split_anew():
    tx = wire.zero1("data", optax.adamw(1e-2))
    params, state = train_from(
        tx, make_params(), wire.init(tx, make_params(), mesh_of(8)), 8, make_batches(3)
    )
    resplit = wire.resplit(tx, state, params, mesh_of(4))
    moment = optax.tree_utils.tree_get(resplit.inner, "mu")["up"]
    assert moment.addressable_shards[0].data.shape == (16, 8) and moment.shape == (16, 32)
    continued, _ = train_from(tx, params, resplit, 4, make_batches(6)[3:])
    uninterrupted, _ = train_from(tx, params, state, 8, make_batches(6)[3:])
    assert distance(continued, uninterrupted) < 1e-6


@pytest.mark.system
def test_local_sgd_keeps_the_mean_of_its_workers_parameters():
    tx = wire.local_sgd(
        "data",
        inner=optax.adam(1e-2),
        outer=optax.sgd(1.0, momentum=0.5),
        every=4,
        overlap=1,
        **INT8,
    )
    start = wire.init(tx, make_params(), mesh_of(8))
    # two steps after a synchronization
    params, state = train_from(tx, make_params(), start, 8, make_batches(6), local=True)
    resplit = wire.resplit(tx, state, params, mesh_of(4))
    for path, leaf in state.params.items():
        np.testing.assert_allclose(
            np.asarray(resplit.params[path]).mean(0), np.asarray(leaf).mean(0), atol=1e-6
        )
        assert (
            resplit.params[path].shape[0] == 4
            and np.ptp(np.asarray(resplit.params[path]), axis=0).max() > 0
        )
    assert np.asarray(resplit.inner[0].count).tolist() == [6] * 4
    # the next is applied in step 9
    continued, _ = train_from(tx, params, resplit, 4, make_batches(9)[6:], local=True)
    assert 1e-4 < distance(continued, params) < 1


@pytest.mark.system
def test_what_cannot_be_resplit_is_refused():
    tx = optax.chain(wire.all_reduce("data", **INT8), optax.adam(1e-2))
    state = wire.init(tx, make_params(), mesh_of(8))
    with pytest.raises(
        CommunicationError, match=r"bias, down, up.*sent exactly.*\n.*residual.*mean\(0\)"
    ):
        wire.resplit(tx, state, make_params(), mesh_of(1))
    without = optax.chain(wire.all_reduce("data", INT8["codec"]), optax.adam(1e-2))
    with pytest.raises(CommunicationError, match="tx has no error feedback"):
        wire.resplit(without, state, make_params(), mesh_of(4))
    with pytest.raises(CommunicationError, match="not that of this transformation"):
        wire.resplit(optax.chain(tx, optax.trace(0.9)), state, make_params(), mesh_of(4))
    with pytest.raises(CommunicationError, match="cannot become"):
        wire.resplit(tx, state, {**make_params(), "up": jnp.zeros((16, 64))}, mesh_of(4))
    local = wire.local_sgd("data", inner=optax.sgd(0.1), outer=optax.sgd(1.0), every=2)
    with pytest.raises(CommunicationError, match="LocalState"):
        wire.resplit(optax.chain(local, optax.adam(1e-2)), state, make_params(), mesh_of(4))
    counting = wire.local_sgd(
        "data", inner=optax.inject_hyperparams(optax.sgd)(0.1), outer=optax.sgd(1.0), every=2
    )
    state = wire.init(counting, make_params(), mesh_of(8))
    inner = state.inner._replace(count=jnp.arange(8))
    with pytest.raises(CommunicationError, match="differs between workers and has no mean"):
        wire.resplit(counting, dataclasses.replace(state, inner=inner), make_params(), mesh_of(4))


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize(
    "tx",
    [
        optax.chain(wire.all_reduce("data", **INT8), optax.adam(1e-2)),
        wire.zero1("data", optax.adam(1e-2), **INT8),
        wire.local_sgd("data", inner=optax.adam(1e-2), outer=optax.sgd(1.0), every=2, **INT8),
    ],
    ids=["chain", "zero1", "local_sgd"],
)
def test_a_state_on_the_host_is_resplit_as_one_on_devices(tx):
    state = wire.init(tx, make_params(), mesh_of(8))
    ours, theirs = (
        wire.resplit(tx, one, make_params(), mesh_of(4)) for one in (jax.device_get(state), state)
    )
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(ours), jax.device_get(theirs))


@pytest.mark.sampled(quick=4)
@pytest.mark.parametrize(
    "tx",
    [
        wire.all_reduce("data", **INT8),
        optax.chain(wire.all_reduce("data", **INT8), optax.adam(1e-2)),
        optax.named_chain(("mean", wire.all_reduce("data", **INT8)), ("adam", optax.adam(1e-2))),
        wire.zero1("data", optax.adam(1e-2), **INT8),
    ],
    ids=["all_reduce", "chain", "named_chain", "zero1"],
)
def test_a_checkpoint_restored_without_a_template_is_refused_by_name(tx, tmp_path):
    state = wire.init(tx, make_params(), mesh_of(8))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state")
    with pytest.raises(
        CommunicationError,
        match=r"as Orbax restores one without a template(.|\n)*wire\.init\(.*AbstractMesh",
    ):
        wire.resplit(tx, restored, make_params(), mesh_of(4))
    wire.resplit(tx, state, make_params(), mesh_of(4))


@pytest.mark.system
def test_a_checkpoint_of_more_workers_than_devices_is_restored_and_resplit(tmp_path):
    tx = optax.chain(wire.all_reduce("data", **INT8), optax.adam(1e-2))
    params, state = train_from(
        tx, make_params(), wire.init(tx, make_params(), mesh_of(8)), 8, make_batches(3)
    )
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        shapes = wire.init(tx, make_params(), jax.sharding.AbstractMesh((8,), ("data",)))
        assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(shapes))
        restored = checkpointer.restore(
            tmp_path / "state", jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), shapes)
        )
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(restored))
    ours, theirs = (wire.resplit(tx, one, params, mesh_of(4)) for one in (restored, state))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(ours), jax.device_get(theirs))
    assert np.abs(ours[0].memory["up"]["residual"]).max() > 0
