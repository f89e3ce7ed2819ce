"""Gradients that are sharded over another mesh axis than that of the workers, in a loop of one's
own: each device sends its local shard.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P

from spmd import wire
from spmd.errors import CommunicationError, OptionError

WORKERS, DEVICES = 4, 2
SPECS = {"up": P(None, "model"), "down": P("model")}
SHAPES = {"up": (16, 64), "down": (64, 16), "bias": (64,)}
CODECS = {
    "exact": (wire.exact(), False),
    "int8": (wire.int8(block=32), True),
    "top_k": (wire.top_k(keep=0.1), True),
    "power_sgd": (wire.power_sgd(rank=2), True),
}


def gradients(seed):
    """Each worker's own, [workers, ...]."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(size=(WORKERS, *shape)).astype(np.float32)
        for name, shape in SHAPES.items()
    }


def over_workers(update, mesh, grads_spec, state_specs):
    """`update(grads, state)` under `jax.shard_map`, with the axis "data" manual."""
    return jax.shard_map(
        update,
        mesh=mesh,
        in_specs=(grads_spec, state_specs),
        out_specs=(P(), state_specs),
        axis_names={"data"},
        check_vma=False,
    )


def mean_by_steps(mesh, tx, steps):
    """The mean gradients of each step, in a plain loop under `jax.shard_map`."""
    params = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
    state = wire.init(tx, params, mesh)

    def step(grads, state):
        return tx.update(jax.tree.map(lambda leaf: leaf[0], grads), state)

    mapped = jax.jit(over_workers(step, mesh, P("data"), wire.specs(state)))
    means = []
    for seed in range(steps):
        placed = {
            name: jax.device_put(leaf, NamedSharding(mesh, P("data", *SPECS.get(name, ()))))
            for name, leaf in gradients(seed).items()
        }
        mean, state = mapped(placed, state)
        means.append(jax.device_get(mean))
    return means, state


@pytest.fixture
def mesh():
    return jax.make_mesh(
        (WORKERS, DEVICES), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto)
    )


def transformation(codec, error_feedback, **options):
    return wire.all_reduce("data", codec, error_feedback=error_feedback, **options)


# Without PowerSGD: it draws another Q for each shard, and two transformations draw the same.
@pytest.mark.parametrize("name", ["exact", "int8", "top_k"])
def test_mean_is_that_of_each_local_shard_alone(mesh, name):
    """Against one transformation for each half, each on devices of its own."""
    codec, error_feedback = CODECS[name]
    params = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
    tx = transformation(codec, error_feedback, model_specs=SPECS)
    sharded, state = mean_by_steps(mesh, tx, 3)
    if error_feedback:
        residual = state.memory["up"]["residual"]
        assert residual.shape == (WORKERS, 16, 64)
        assert residual.sharding.shard_shape(residual.shape) == (1, 16, 32)

    for half in range(DEVICES):
        part_of = {
            "up": np.s_[..., :, half * 32 : (half + 1) * 32],
            "down": np.s_[..., half * 32 : (half + 1) * 32, :],
            "bias": np.s_[...],
        }
        devices = mesh.devices[:, half]
        alone = jax.sharding.Mesh(devices, ("data",))
        tx = transformation(codec, error_feedback)
        parts = {name: jnp.asarray(params[name][part_of[name]]) for name in params}
        state = wire.init(tx, parts, alone)
        split = wire.specs(state)
        mapped = jax.jit(
            jax.shard_map(
                lambda grads, state, tx=tx: tx.update(
                    jax.tree.map(lambda leaf: leaf[0], grads), state
                ),
                mesh=alone,
                in_specs=(P("data"), split),
                out_specs=(P(), split),
                check_vma=False,
            )
        )
        for seed in range(3):
            grads = {name: leaf[part_of[name]] for name, leaf in gradients(seed).items()}
            mean, state = mapped(grads, state)
            for path in SHAPES:
                assert np.array_equal(mean[path], sharded[seed][path][part_of[path]]), (path, half)


@pytest.mark.parametrize("name", CODECS)
def test_mean_and_what_was_lost_are_the_mean_of_numpy(mesh, name):
    codec, error_feedback = CODECS[name]
    tx = transformation(codec, error_feedback, model_specs=SPECS)
    (mean,), state = mean_by_steps(mesh, tx, 1)
    for path, grads in gradients(0).items():
        exact = grads.mean(axis=0)
        residual = state.memory.get(path, {}).get("residual", np.zeros_like(grads))
        total = mean[path] + np.asarray(residual).mean(axis=0)
        assert np.linalg.norm(total - exact) <= 1e-6 * np.linalg.norm(exact), path


def test_each_device_sends_its_local_shard():
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
    both = AbstractMesh((WORKERS, DEVICES), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    sent = wire.bytes_sent(wire.all_reduce("data", model_specs=SPECS), params, both)
    full = wire.bytes_sent(wire.all_reduce("data"), params, both)
    ring = 2 * (WORKERS - 1) / WORKERS * 4
    assert full == ring * (16 * 64 + 64 * 16 + 64)
    assert sent == ring * (16 * 32 + 32 * 16 + 64)


def test_a_loop_trains_as_one_device(mesh):
    """Tensor parallelism beside data parallelism, in plain JAX, against plain JAX on one device."""
    rng = np.random.default_rng(0)
    params = {
        "up": (rng.normal(size=(8, 32)) / 3).astype(np.float32),
        "down": (rng.normal(size=(32, 4)) / 6).astype(np.float32),
    }
    x = rng.normal(size=(32, 8)).astype(np.float32)
    y = rng.normal(size=(32, 4)).astype(np.float32)

    def loss(params, x, y):
        return ((jnp.tanh(x @ params["up"]) @ params["down"] - y) ** 2).mean()

    tx = optax.chain(wire.all_reduce("data", model_specs=SPECS), optax.adam(0.01))
    specs = {"up": P(None, "model"), "down": P("model")}
    placed = {
        name: jax.device_put(leaf, NamedSharding(mesh, specs[name]))
        for name, leaf in params.items()
    }
    state = wire.init(tx, placed, mesh)
    split = wire.specs(state)

    def step(params, state, x, y):
        grads = jax.grad(loss)(params, x, y)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    mapped = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(P(), split, P("data"), P("data")),
            out_specs=(P(), split),
            axis_names={"data"},
            check_vma=False,
        )
    )
    plain = optax.adam(0.01)
    alone, plain_state = params, plain.init(params)
    for _ in range(5):
        placed, state = mapped(placed, state, x, y)
        updates, plain_state = plain.update(jax.grad(loss)(alone, x, y), plain_state, alone)
        alone = optax.apply_updates(alone, updates)
    for name in params:
        np.testing.assert_allclose(placed[name], alone[name], rtol=1e-5, atol=1e-6)


REFUSED = {
    "not specs": ({"up": "model"}, "model_specs={'up': 'model'}"),
    "a list": ([P("model")], "model_specs="),
    "a spec alone": (P(), "model_specs="),
    "a tuple": ({"up": (None, "model")}, "model_specs="),
    "a number in a tuple": ({"up": P(("model", 3))}, "model_specs="),
    "unconstrained": ({"up": P(P.UNCONSTRAINED)}, "model_specs="),
    "the workers' axis": ({"up": P("data")}, '"data" is an axis of the workers'),
    "an axis twice": ({"up": P("model", "model")}, 'the axis "model" is twice in it'),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_specs_are_refused(name):
    value, match = REFUSED[name]
    with pytest.raises(OptionError, match=match):
        wire.all_reduce("data", model_specs=value)


@pytest.mark.parametrize(
    "specs, match",
    [
        ({"*/kernel": P("model")}, "model_specs: the pattern"),
        ({"bias": P(None, "model")}, "the gradient bias has 1 dims, and its spec in model_specs 2"),
        ({"odd": P("model")}, "2 devices along model do not divide dim 0"),
        ({"up": P("modle")}, 'the mesh has no axis "modle"'),
    ],
)
def test_specs_that_do_not_fit_are_refused(mesh, specs, match):
    params = {"up": jnp.zeros((16, 64)), "bias": jnp.zeros(64), "odd": jnp.zeros(3)}
    tx = wire.all_reduce("data", wire.int8(), model_specs=specs)
    with pytest.raises(CommunicationError, match=match):
        wire.init(tx, params, mesh)


def test_manual_axis_is_refused(mesh):
    tx = wire.all_reduce("data", model_specs={"up": P("model")})
    params = {"up": jnp.zeros((16, 64))}
    state = wire.init(tx, params, mesh)
    with pytest.raises(CommunicationError, match='"model" is manual here') as raised:
        jax.eval_shape(
            jax.shard_map(
                tx.update, mesh=mesh, in_specs=(P(), P()), out_specs=(P(), P()), check_vma=False
            ),
            params,
            state,
        )
    assert 'axis_names={"data"}' in raised.value.fix


def test_state_on_another_number_of_workers_stays_sharded(mesh):
    tx = wire.all_reduce("data", wire.int8(), error_feedback=True, model_specs=SPECS)
    _, state = mean_by_steps(mesh, tx, 1)
    half = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))
    params = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
    moved = wire.resplit(tx, state, params, half)
    assert moved.model_specs == state.model_specs
    for name in SHAPES:
        before = np.asarray(state.memory[name]["residual"]) / WORKERS
        after = moved.memory[name]["residual"]
        np.testing.assert_allclose(
            np.asarray(after).sum(axis=0) / 2, before.sum(axis=0), rtol=1e-5, atol=1e-6
        )
    residual = moved.memory["up"]["residual"]
    assert residual.sharding.shard_shape(residual.shape) == (1, 16, 32)


def test_other_transformations_say_which_one_has_the_option():
    with pytest.raises(OptionError, match=r"wire\.all_reduce alone has it"):
        wire.reduce_scatter("data", model_specs=SPECS)


def test_first_spec_that_matches_counts_and_may_name_no_axis(mesh):
    tx = wire.all_reduce("data", model_specs={"up": P(), "*": P("model")})
    state = wire.init(tx, {"up": jnp.zeros((4, 4)), "down": jnp.zeros((4, 4))}, mesh)
    assert state.model_specs == (("down", ("model",)),)


@pytest.mark.parametrize("name", ["int8", "power_sgd"])
def test_state_of_other_specs_is_refused(mesh, name):
    codec, error_feedback = CODECS[name]
    params = {"down": jnp.zeros((64, 16))}
    with_specs = transformation(codec, error_feedback, model_specs={"down": P("model")})
    without = transformation(codec, error_feedback)
    for tx, other in ((with_specs, without), (without, with_specs)):
        state = wire.init(other, params, mesh)
        update = over_workers(tx.update, mesh, P(), wire.specs(state))
        with pytest.raises(CommunicationError, match="model_specs: down has"):
            jax.eval_shape(update, params, state)


def test_gradient_without_elements_is_left_as_it_is(mesh):
    tx = wire.all_reduce("data", wire.int8(), model_specs={"*": P("model")})
    params = {"empty": jnp.zeros((0, 64)), "up": jnp.ones((16, 64))}
    state = wire.init(tx, params, mesh)

    # The empty gradient is made inside: XLA of jax 0.11 crashes on the CPU where a function under
    # `jax.shard_map` returns an argument without elements beside others, in plain JAX too.
    def step(up, state):
        return tx.update({"empty": jnp.zeros((0, 64)), "up": up}, state)

    mean, _ = jax.jit(over_workers(step, mesh, P(), wire.specs(state)))(params["up"], state)
    assert mean["empty"].shape == (0, 64)
    assert np.array_equal(mean["up"], params["up"])


def test_moments_stay_sharded(mesh):
    params = {
        "up": jax.device_put(jnp.zeros((16, 64)), NamedSharding(mesh, P(None, "model"))),
        "bias": jax.device_put(jnp.zeros(64), NamedSharding(mesh, P("data"))),
    }
    tx = optax.chain(wire.all_reduce("data", model_specs={"up": P(None, "model")}), optax.adam(0.1))
    moments = wire.init(tx, params, mesh)[1][0].mu
    assert moments["up"].sharding.spec == P(None, "model")
    assert moments["bias"].sharding.is_fully_replicated


def test_bytes_of_a_transformation_whose_init_asks_for_its_worker():
    def init(params):
        return jax.lax.axis_index("data")

    own = optax.GradientTransformation(init, lambda grads, state, params=None: (grads, state))
    tx = optax.chain(wire.all_reduce("data", model_specs=SPECS), own)
    both = AbstractMesh((WORKERS, DEVICES), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
    alone = wire.all_reduce("data", model_specs=SPECS)
    assert wire.bytes_sent(tx, params, both) == wire.bytes_sent(alone, params, both)


def test_codec_arrays_begin_anew_on_another_number_of_shards(mesh):
    tx = wire.all_reduce("data", wire.power_sgd(rank=2), error_feedback=True, model_specs=SPECS)
    _, state = mean_by_steps(mesh, tx, 1)
    other = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))
    params = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
    moved = wire.resplit(tx, state, params, other)
    fresh = wire.init(tx, params, other)
    for path in ("up", "down"):
        for name, leaf in fresh.memory[path]["codec"].items():
            assert np.array_equal(moved.memory[path]["codec"][name], leaf)
