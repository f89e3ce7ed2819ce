"""`wire.local_sgd` against DiLoCo and Streaming DiLoCo written out with plain arrays on the
host.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spmd import wire
from spmd.errors import CommunicationError, OptionError
from spmd.wire.local_steps import split_fragments
from tests.wire.test_transformations import (
    MESH,
    assert_same_bits,
    distance,
    loss_of,
    make_batches,
    make_params,
    make_step,
    train,
)

RATE, MOMENTUM, WORKERS = 0.7, 0.9, 8
OUTER = optax.sgd(RATE, momentum=MOMENTUM, nesterov=True)
grad_of = jax.jit(jax.grad(loss_of))


def train_local(tx, steps, mesh=MESH):
    return train(tx, mesh, steps=steps, at=lambda state, params: wire.local_params(state, params))


def published(steps, every, *, inner, fragments=1, overlap=0, mix=0.0):
    """DiLoCo (arXiv:2311.08105, algorithm 1) as its paper states it, and as MaxText describes its
    implementation.

    Every worker steps a replica of its own with the inner optimizer. Each `every` steps the outer
    gradient is the mean over workers of (outer - replica's parameters); the outer optimizer is SGD
    with Nesterov momentum, and all replicas start again from its result. Streaming
    (arXiv:2501.18512, algorithm 2): fragments take turns; the result is applied `overlap` steps
    after it was sent, mixed with a share `mix` of the replica's own. Here one worker after the
    other, on the host, averaged in float64.
    """
    outer = {path: np.asarray(leaf, np.float64) for path, leaf in make_params().items()}
    momentum = {path: np.zeros_like(leaf) for path, leaf in outer.items()}
    replicas = [make_params() for _ in range(WORKERS)]
    states = [inner.init(replica) for replica in replicas]
    owner = split_fragments(make_params(), fragments)
    waiting = {}
    for number, batch in enumerate(make_batches(steps), start=1):
        for worker in range(WORKERS):
            rows = slice(4 * worker, 4 * worker + 4)
            grads = grad_of(replicas[worker], (batch[0][rows], batch[1][rows]))
            updates, states[worker] = inner.update(grads, states[worker], replicas[worker])
            replicas[worker] = optax.apply_updates(replicas[worker], updates)
        for fragment in range(fragments):
            paths = [path for path in outer if owner[path] == fragment]
            turn = (fragment + 1) * (every // fragments)
            if (number - turn) % every == 0:
                for path in paths:
                    delta = np.mean(
                        [
                            outer[path] - np.asarray(replica[path], np.float64)
                            for replica in replicas
                        ],
                        axis=0,
                    )
                    momentum[path] = MOMENTUM * momentum[path] + delta
                    waiting[path] = -RATE * (delta + MOMENTUM * momentum[path])
            if number > overlap and (number - overlap - turn) % every == 0:
                for path in paths:
                    outer[path] = outer[path] + waiting[path]
                    for replica in replicas:
                        mixed = (
                            mix * np.asarray(replica[path], np.float64) + (1 - mix) * outer[path]
                        )
                        replica[path] = jnp.asarray(mixed, jnp.float32)
    return outer


@pytest.mark.sampled(quick=10, system=3)
@pytest.mark.parametrize(
    "options",
    [
        {"every": 1},
        {"every": 3},
        {"every": 4, "fragments": 2},
        {"every": 4, "fragments": 3, "overlap": 2},
        {"every": 4, "fragments": 2, "overlap": 1, "mix": 0.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("inner", [optax.sgd(0.05), optax.adamw(1e-2)], ids=["sgd", "adamw"])
def test_local_sgd_is_diloco_as_published(options, inner):
    steps = 10
    ours, _ = train_local(wire.local_sgd("data", inner=inner, outer=OUTER, **options), steps)
    theirs = published(steps, inner=inner, **options)
    assert distance(ours, theirs) < 1e-6
    assert distance(make_params(), theirs) > 1e-2


def test_parameters_stay_equal_on_all_workers_and_change_only_when_synchronized():
    tx = wire.local_sgd("data", inner=optax.sgd(0.1), outer=optax.sgd(1.0), every=3)
    params = make_params()
    state = wire.init(tx, params, MESH)
    step = make_step(tx, state, MESH, at=lambda state, params: wire.local_params(state, params))
    history = [params]
    for batch in make_batches(6):
        params, state = step(params, state, batch)
        for leaf in jax.tree.leaves(params):
            shards = [np.asarray(shard.data) for shard in leaf.addressable_shards]
            assert all((shard == shards[0]).all() for shard in shards)
        history.append(jax.tree.map(np.asarray, params))
    moved = [distance(before, after) > 0 for before, after in itertools.pairwise(history)]
    assert moved == [False, False, True, False, False, True]
    of_workers = np.asarray(state.params["up"])
    assert (of_workers[0] != of_workers[1]).any()


def test_every_1_with_plain_averaging_is_data_parallel_sgd():
    ours, _ = train_local(
        wire.local_sgd("data", inner=optax.sgd(0.1), outer=optax.sgd(1.0), every=1), 4
    )
    plain, _ = train(optax.chain(wire.all_reduce("data"), optax.sgd(0.1)), steps=4)
    assert distance(ours, plain) < 1e-6


@pytest.mark.system
def test_int8_with_feedback_in_the_outer_gradients():
    exact, _ = train_local(wire.local_sgd("data", inner=optax.sgd(0.1), outer=OUTER, every=2), 6)
    tx = wire.local_sgd(
        "data",
        inner=optax.sgd(0.1),
        outer=OUTER,
        every=2,
        codec=wire.int8(block=16),
        error_feedback=True,
    )
    lossy, state = train_local(tx, 6)
    assert 0 < distance(exact, lossy) < 0.05
    assert state.wire.memory["up"]["residual"].shape == (8, 16, 32) and np.any(
        np.asarray(state.wire.memory["up"]["residual"])
    )
    assert wire.bytes_sent(tx, make_params(), MESH) < 0.45 * wire.bytes_sent(
        wire.all_reduce("data"), make_params(), MESH
    )


def test_a_step_without_synchronization_sends_nothing():
    """The collectives stand in a conditional, whose other branch has none."""
    tx = wire.local_sgd("data", inner=optax.sgd(0.1), outer=OUTER, every=2)
    state = wire.init(tx, make_params(), MESH)
    step = make_step(tx, state, MESH, at=lambda state, params: wire.local_params(state, params))
    text = step.lower(make_params(), state, make_batches(1)[0]).as_text()
    before, conditional = text.split("stablehlo.case", 1)
    assert "all_reduce" not in before and "all_reduce" in conditional


def test_a_state_that_is_not_split_over_workers_is_refused():
    tx = wire.local_sgd("data", inner=optax.sgd(0.1), outer=OUTER, every=2)
    state = wire.init(tx, make_params(), MESH)
    step = jax.shard_map(
        lambda params, state: tx.update(params, state, params)[0],
        mesh=MESH,
        in_specs=jax.P(),
        out_specs=jax.P(),
        check_vma=False,
    )
    with pytest.raises(CommunicationError, match=r"wire.specs\(state\)"):
        jax.jit(step)(make_params(), state)
    with pytest.raises(OptionError, match="without params"):
        tx.update(make_params(), state)


@pytest.mark.system
def test_resumed_from_a_copy_it_ends_in_the_same_bits():
    tx = wire.local_sgd(
        "data", inner=optax.adam(1e-2), outer=OUTER, every=3, fragments=2, overlap=1
    )
    params = make_params()
    state = wire.init(tx, params, MESH)
    step = make_step(tx, state, MESH, at=lambda state, params: wire.local_params(state, params))
    batches = make_batches(8)
    for number, batch in enumerate(batches):
        if number == 4:
            saved = jax.tree.map(np.asarray, (params, state))
        params, state = step(params, state, batch)
    again, again_state = saved
    for batch in batches[4:]:
        again, again_state = step(again, again_state, batch)
    assert_same_bits(jax.tree.map(np.asarray, params), jax.tree.map(np.asarray, again))
