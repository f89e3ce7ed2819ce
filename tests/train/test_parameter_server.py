"""The parameter server in training: synchronous as an all-reduce to the last bit, asynchronous as
plain numpy has it.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spmd
from spmd.base.tree import flatten
from spmd.data.device_dataset import resident
from spmd.errors import DataError, OptimizerError, OptionError
from spmd.train.compiled_functions import FunctionKey
from spmd.wire.server.timing import parse_staleness_scale
from tests.compare import assert_close
from tests.train.served import (
    ADAMW,
    ALL_REDUCE,
    FEATURES,
    MLP,
    MOMENTUM,
    PLACEMENTS,
    ROWS,
    data,
    equal,
    far,
    params_of,
    served,
    train,
    trainer_of,
    unfused,
)

pytestmark = pytest.mark.optimized

# synchronous --------------------------------------------------------------------------------------


@pytest.mark.system
@pytest.mark.parametrize(
    "workers", [pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow), 8]
)
@pytest.mark.parametrize(
    "optimizer", [pytest.param(MOMENTUM, marks=pytest.mark.slow), ADAMW], ids=["momentum", "adamw"]
)
def test_synchronous_is_an_all_reduce_to_the_last_bit(workers, optimizer):
    trainer = trainer_of(served(), workers, optimizer)
    ours = train(trainer)
    assert equal(ours, train(trainer_of(ALL_REDUCE, workers, unfused(optimizer))))
    kinds = {op.kind for op in trainer.wire.ops if op.where.startswith("reduce_gradients")}
    assert kinds == {"reduce_scatter"}, "the arms differ: gradients go to servers"
    numbers = sum(place.shape[1] for place in trainer.resolved.placements.values())
    sent = trainer.wire.bytes(where="reduce_gradients") + trainer.wire.bytes(where="gather_params")
    assert sent == 2 * (workers - 1) * 4 * numbers, (
        "those of an all-reduce, except for padding: parameters are gathered once"
    )
    state = trainer.init()
    for leaf in jax.tree.leaves((state.params, state.opt)):
        assert leaf.ndim == 0 or {shard.data.shape[0] for shard in leaf.addressable_shards} == {
            1
        }, "a row on each server"


@pytest.mark.system
@pytest.mark.parametrize(
    "placement",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name == "largest_first"))
        for name in PLACEMENTS[1:]
    ],
)
def test_unsplit_parameters_on_servers_give_the_same_bits(placement):
    assert equal(
        train(trainer_of(served(placement=placement))),
        train(trainer_of(ALL_REDUCE, optimizer=unfused())),
    )


@pytest.mark.system
def test_adamw_on_packed_parameters_differs_in_the_last_bit_at_most():
    """XLA:CPU fuses the bias correction's scalars into a kernel if only that one needs them, and
    separately if several do; this is so without any server, for the same numbers in one array or in
    four. One unit in the last place of a weight, per step.
    """
    packed, unpacked = (
        train(trainer_of(served(placement="round_robin"), optimizer=ADAMW)),
        train(trainer_of(ALL_REDUCE, optimizer=ADAMW)),
    )
    assert far(packed, unpacked) <= 4 * 2.0**-23


@pytest.mark.slow
def test_clipping_by_global_norm_uses_full_gradients():
    clipped = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.5))
    server, all_reduce = (
        train(trainer_of(served(), optimizer=clipped)),
        train(trainer_of(ALL_REDUCE, optimizer=clipped)),
    )
    assert far(server, all_reduce) < 1e-6, "the norm is summed in another order"
    assert far(all_reduce, train(trainer_of(ALL_REDUCE, optimizer=optax.sgd(0.5)))) > 1e-2, (
        "it does clip"
    )


@pytest.mark.slow
def test_fewer_servers_keep_the_same_bits():
    trainer = trainer_of(served(servers=3))
    assert equal(train(trainer), train(trainer_of(ALL_REDUCE, optimizer=unfused())))
    rows = np.asarray(trainer.init().params["hidden"]["kernel"])
    assert rows.shape == (8, FEATURES * 33 // 3) and rows[:3].all() and not rows[3:].any()


@pytest.mark.slow
def test_many_workers_at_one_device_are_one_large_batch():
    server, all_reduce = train(trainer_of(served(workers=32))), train(trainer_of(ALL_REDUCE))
    assert far(server, all_reduce) < 1e-6, "the mean is summed in another order"


@pytest.mark.system
@pytest.mark.parametrize(
    "codec",
    [
        pytest.param("bfloat16", marks=pytest.mark.slow),
        "int8",
        pytest.param("sign", marks=pytest.mark.slow),
    ],
)
def test_gradients_are_sent_to_servers_in_a_codec(codec):
    options = {"error_feedback": True, "weights": "bfloat16"}
    trainer = trainer_of(served(codec, **options))
    losses, _ = train(trainer, 20)
    assert losses[-1] < losses[0]
    assert {op.dtype for op in trainer.wire.ops if op.where.startswith("gather_params")} == {
        "uint16"
    }
    assert any(
        f"reduce_gradients/{codec}" in op.where and op.dtype in ("uint8", "uint16")
        for op in trainer.wire.ops
    )


class Counted:
    """A loss that is a sum and what it counts: so much for each row."""

    def __init__(self, each):
        self.each = each

    def __call__(self, model, batch):
        losses = spmd.losses.cross_entropy(model, batch).astype(jnp.float32)
        return self.each * losses.sum(), self.each * jnp.float32(len(losses))


ONE_BY_ONE = {"local": {"every": 1, "outer_rate": 1.0, "outer_momentum": 0.0}, "asynchronous": {}}


@pytest.mark.system
@pytest.mark.parametrize("mode", [pytest.param("local", marks=pytest.mark.slow), "asynchronous"])
@pytest.mark.parametrize(
    "each, dtype",
    [
        pytest.param(0.01, "float32", id="less than one", marks=pytest.mark.slow),
        pytest.param(4000.0, "float16", id="more than float16 holds"),
    ],
)
def test_what_a_loss_counts_may_be_any_number(mode, each, dtype):
    def trained(layout, loss):
        def make():
            return MLP(nnx.Rngs(0), param_dtype=dtype)

        mesh = spmd.make_mesh("data=1", devices=jax.devices()[:1])
        return train(
            spmd.Trainer(make, loss=loss, optimizer=optax.sgd(0.1), mesh=mesh, layout=layout)
        )

    server, all_reduce = (
        trained(served(mode=mode, **ONE_BY_ONE[mode]), Counted(each)),
        trained(ALL_REDUCE, Counted(each)),
    )
    assert far(server, all_reduce) <= (1e-6 if dtype == "float32" else 2e-3), (
        "z - (z - w), and one rounding of float16 in each of four steps"
    )
    assert (
        far(
            all_reduce,
            trained(ALL_REDUCE, lambda model, batch: 0 * spmd.losses.cross_entropy(model, batch)),
        )
        > 1e-2
    ), "and it learns"


@pytest.mark.system
@pytest.mark.parametrize(
    "mode",
    [{}, {"mode": "asynchronous"}, {"mode": "local", "every": 2}],
    ids=lambda mode: mode.get("mode", "synchronous"),
)
def test_a_parameter_may_have_no_elements(mode):
    def draw(key):
        return {"none": jnp.zeros((0, 3)), "w": jnp.ones((12, 5))}

    model = spmd.FunctionalModel(draw, lambda params, x: x @ params["w"] + params["none"].sum())
    mesh = spmd.make_mesh("data=2", devices=jax.devices()[:2])
    trainer = spmd.Trainer(
        model, loss=spmd.losses.cross_entropy, optimizer=MOMENTUM, mesh=mesh, layout=served(**mode)
    )
    state, losses = trainer.init(), []
    for _ in range(3):
        state, metrics = trainer.step(state, tuple(data().values()))
        losses.append(metrics["loss"])
    assert losses[-1] < losses[0] and trainer.rebuild(state).params["none"].shape == (0, 3)


# spares -------------------------------------------------------------------------------------------


@pytest.mark.system
def test_no_spares_is_plain_synchronous_to_the_last_bit():
    assert equal(
        train(trainer_of(served(spares=0, compute_time="exponential"))), train(trainer_of(served()))
    )


def rows_of_kept(trainer, step, workers=8):
    kept = np.flatnonzero(trainer.prepare(None)[0].clock.round(step).present)
    return (kept[:, None] * (ROWS // workers) + np.arange(ROWS // workers)).reshape(-1)


@pytest.mark.system
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_an_update_is_of_the_workers_that_were_waited_for_and_nothing_else(poison):
    """What the dropped ones hold is no number: it reaches neither the weights nor the metrics."""
    trainer, plain = (
        trainer_of(served(spares=3, compute_time="exponential")),
        trainer_of(spmd.Layout(), 1),
    )
    trainer.prepare(data())
    state, other = trainer.init(), plain.init()
    for step in range(3):
        batch, kept = data(seed=step), rows_of_kept(trainer, step)
        assert len(kept) == 5 * ROWS // 8
        other, wanted = plain.step(other, {name: leaf[kept] for name, leaf in batch.items()})
        batch["x"][np.setdiff1d(np.arange(ROWS), kept)] = poison
        state, metrics = trainer.step(state, batch)
        assert_close(metrics["loss"], wanted["loss"])
        assert metrics["gradients_dropped"] == 3 and metrics["gradients_applied"] == 5
    served_params, plain_params = params_of(trainer, state), params_of(plain, other)
    assert all(
        np.abs(served_params[path] - plain_params[path]).max() < 1e-6 for path in served_params
    )


@pytest.mark.sampled(system=3)
@pytest.mark.parametrize("kept, spares, seconds", [(96, 0, 5.147), (96, 4, 3.104), (90, 10, 2.258)])
def test_a_hundred_workers_on_one_device_step_in_the_time_of_the_last_one_that_is_waited_for(
    kept, spares, seconds
):
    """A worker is a row. The seconds are H(N + b) - H(b); the largest of many Exp(1) has a sigma of
    1.28, so 0.4 % over 4,000 steps.
    """
    workers, steps = kept + spares, 4000
    model = spmd.FunctionalModel(
        lambda key: {"w": jnp.zeros((3,))}, lambda params, x: x @ params["w"]
    )
    rows = {
        "x": np.random.default_rng(0).normal(size=(workers, 3)).astype(np.float32),
        "y": np.ones(workers, np.float32),
    }
    result = spmd.fit(
        model,
        resident(rows, steps_per_call=100),
        loss=spmd.losses.mean_squared_error,
        optimizer=optax.sgd(0.01),
        mesh=spmd.make_mesh("data=1", devices=jax.devices()[:1]),
        layout=served(workers=workers, spares=spares, compute_time="exponential(1)"),
        batch_size=workers,
        steps=steps,
        progress=False,
    )
    history = result.history
    assert set(history["gradients_applied"]) == {kept} and set(history["gradients_dropped"]) == {
        spares
    }
    assert history["simulated_seconds"][-1] / steps == pytest.approx(seconds, rel=0.01)
    assert history["loss"][-1] < history["loss"][0]


@pytest.mark.system
def test_running_averages_are_of_those_who_are_waited_for():
    class Normed(nnx.Module):
        def __init__(self, rngs):
            self.norm, self.out = (
                nnx.BatchNorm(FEATURES, momentum=0.9, rngs=rngs),
                nnx.Linear(FEATURES, 5, rngs=rngs),
            )

        def __call__(self, x):
            return self.out(self.norm(x))

    layout = served(spares=4, compute_time="exponential")
    trainer = spmd.Trainer(
        lambda: Normed(nnx.Rngs(0)),
        loss=spmd.losses.cross_entropy,
        optimizer=MOMENTUM,
        mesh="data=8",
        layout=layout,
    )
    batch = {**data(), "x": np.full((ROWS, FEATURES), 10.0, np.float32)}
    state, _ = trainer.step(trainer.init(), batch)
    statistics = {
        path.split("/")[1]: np.asarray(leaf) for path, leaf in flatten(state.stats).items()
    }
    # 0.1 of 10; half of that, if the four that are dropped counted
    assert_close(statistics["mean"], 1.0)
    assert_close(statistics["var"], 0.9)


@pytest.mark.system
def test_where_the_data_ends_the_update_is_of_those_who_have_some():
    """13 rows: three workers with 4, one with 1; four have none, whichever workers are fast."""
    trainer, plain = (
        trainer_of(served(spares=6, compute_time="exponential")),
        trainer_of(spmd.Layout(), 1),
    )
    trainer.prepare(data())
    batch = {name: leaf[:13] for name, leaf in data().items()}
    _, metrics = trainer.step(trainer.init(), batch)
    present = trainer.prepare(None)[0].events(0, 13)["present"]
    assert present.sum() == 2 and not present[4:].any()
    kept = [
        row
        for worker in np.flatnonzero(present)
        for row in range(4 * worker, min(4 * worker + 4, 13))
    ]
    _, wanted = plain.step(plain.init(), {name: leaf[kept] for name, leaf in batch.items()})
    assert_close(metrics["loss"], wanted["loss"])


# asynchronous -------------------------------------------------------------------------------------


@pytest.mark.system
def test_one_worker_alone_is_plain_sgd_to_the_last_bit():
    assert equal(
        train(trainer_of(served(mode="asynchronous"), 1)),
        train(trainer_of(spmd.Layout(), 1, unfused())),
    )


def linear(workers, layout, optimizer, steps, rng):
    """A linear model on rows of noise: losses and gradients that a few lines of numpy give as
    well.
    """
    model = spmd.FunctionalModel(
        lambda key: {"w": jnp.ones((3, 2)), "b": jnp.zeros((2,))}, lambda p, x: x @ p["w"] + p["b"]
    )
    mesh = spmd.make_mesh(f"data={workers}", devices=jax.devices()[:workers])
    trainer = spmd.Trainer(
        model,
        loss=lambda m, b: ((m(b["x"]) - b["t"]) ** 2).sum(1),
        optimizer=optimizer,
        mesh=mesh,
        layout=layout,
    )
    rows = {
        "x": rng.normal(size=(steps * 16, 3)).astype(np.float32),
        "t": rng.normal(size=(steps * 16, 2)).astype(np.float32),
    }
    return trainer, rows


ASYNCHRONOUS = {
    "equal": {"mode": "asynchronous"},
    "exponential": {"mode": "asynchronous", "compute_time": "exponential"},
    "scaled": {
        "mode": "asynchronous",
        "compute_time": "exponential",
        "staleness_scale": "power(0.5)",
    },
    "dropped": {"mode": "asynchronous", "compute_time": "exponential", "max_staleness": 2},
    "compensated": {
        "mode": "asynchronous",
        "compute_time": "exponential",
        "delay_compensation": 0.3,
    },
    "adaptive": {
        "mode": "asynchronous",
        "compute_time": "exponential",
        "delay_compensation": 0.5,
        "delay_decay": 0.9,
        "max_staleness": 4,
    },
    "warmed up": {"mode": "asynchronous", "compute_time": "exponential", "warmup_steps": 3},
    "bounded": {"mode": "bounded", "bound": 1, "compute_time": "exponential"},
    "softsync": {
        "mode": "softsync",
        "splits": 2,
        "compute_time": "exponential",
        "staleness_scale": "inverse",
    },
    "fetching": {"mode": "asynchronous", "fetch_every": 3},
    "many": {"mode": "asynchronous", "workers": 8, "compute_time": "exponential"},
    "network": {
        "mode": "asynchronous",
        "compute_time": "exponential",
        "network": {"bandwidth": "100B/s", "latency": "100ms"},
    },
}


def replay(trainer, rows, optimizer, workers, steps):
    """The same run by hand: every worker's own copy of the weights, every arrival an update, parts
    of the data in turn.
    """
    clock, declared = trainer.prepare(None)[0].clock, trainer.layout.parameter_server
    params = {"b": np.zeros(2, np.float32), "w": np.ones((3, 2), np.float32)}
    opt, read_params, squares = (
        optimizer.init(params),
        [params] * workers,
        dict.fromkeys(params, np.float32(0)),
    )
    unit, taken, gathered, scale = (
        16 // workers,
        0,
        [],
        parse_staleness_scale(declared.staleness_scale),
    )

    def gradient(p, x, t):
        error = 2 * (x @ p["w"] + p["b"] - t) / len(x)
        return {"b": error.sum(0), "w": x.T @ error}

    for step in range(steps):
        events = clock.round(step)
        read_params = [
            params if reads else mine
            for reads, mine in zip(events.reads[0], read_params, strict=True)
        ]
        grads, at = {}, list(read_params)
        for worker in np.flatnonzero(events.present):
            part = slice(taken * unit, (taken + 1) * unit)
            grads[worker], taken = (
                gradient(read_params[worker], rows["x"][part], rows["t"][part]),
                taken + 1,
            )
        for event in range(int(events.present.sum())):
            worker = events.worker[event]
            g = grads[worker]
            if declared.delay_compensation:
                decay, strength = (
                    declared.delay_decay,
                    dict.fromkeys(g, declared.delay_compensation),
                )
                if decay is not None:
                    now = {
                        name: decay * squares[name] + (1 - decay) * x * x for name, x in g.items()
                    }
                    strength = {
                        name: declared.delay_compensation / np.sqrt(now[name] + 1e-7) for name in g
                    }
                    squares = now if events.applied[event] else squares
                g = {
                    name: x + strength[name] * x * x * (params[name] - at[worker][name])
                    for name, x in g.items()
                }
            if events.applied[event]:
                gathered.append((scale(int(events.staleness[event])), g))
            if events.commit[event]:
                alphas = sum(alpha for alpha, _ in gathered)
                mean = {
                    name: sum(alpha * g[name] for alpha, g in gathered) / alphas for name in params
                }
                updates, opt = optimizer.update(mean, opt, params)
                rate = alphas / len(gathered) / (workers if declared.mode == "bounded" else 1)
                params, gathered = (
                    {name: np.asarray(p + rate * updates[name]) for name, p in params.items()},
                    [],
                )
            at = [
                params if reads else mine
                for reads, mine in zip(events.reads[event + 1], at, strict=True)
            ]
        read_params = at
    return params


# what others of the list do as well
USUAL = (
    "exponential",
    "many",
    "equal",
    "warmed up",
    "fetching",
    "network",
    "compensated",
    "scaled",
)


@pytest.mark.system
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.slow] * (kind in USUAL)) for kind in ASYNCHRONOUS],
)
def test_a_run_is_what_a_few_lines_of_numpy_make_of_its_schedule(kind):
    optimizer, rng = optax.sgd(0.02, momentum=0.5), np.random.default_rng(3)
    declared = ASYNCHRONOUS[kind]
    workers = declared.get("workers", 4)
    trainer, rows = linear(4, served(**declared), optimizer, 12, rng)
    state = None
    for info in trainer.steps(rows, batch_size=16, shuffle=False):
        state = info.state
        if info.step == 10:
            break
    wanted = replay(trainer, rows, optimizer, workers, 10)
    trained = jax.device_get(trainer.rebuild(state).params)
    for name, leaf in wanted.items():
        # float32, ten steps of up to eight updates
        np.testing.assert_allclose(trained[name], leaf, rtol=0, atol=2e-6)
    plain, _ = linear(4, served(mode="asynchronous"), optimizer, 12, rng)
    if kind not in ("equal", "many"):
        *_, last = itertools.islice(plain.steps(rows, batch_size=16, shuffle=False), 10)
        other = jax.device_get(plain.rebuild(last.state).params)
        assert max(np.abs(other[name] - wanted[name]).max() for name in wanted) > 1e-3, (
            "the arms differ"
        )


@pytest.mark.system
@pytest.mark.parametrize(
    "optimizer", [pytest.param(MOMENTUM, marks=pytest.mark.slow), ADAMW], ids=["momentum", "adamw"]
)
def test_softsync_of_one_with_equal_workers_is_synchronous(optimizer):
    softsync, synchronous = (
        train(trainer_of(served(mode="softsync", splits=1), optimizer=optimizer)),
        train(trainer_of(served(), optimizer=optimizer)),
    )
    assert far(softsync, synchronous) < 1e-6, "the mean is summed in order of arrival"


@pytest.mark.slow
def test_bounded_by_nothing_is_synchronous():
    bounded = train(
        trainer_of(
            served(mode="bounded", bound=0, compute_time="exponential"), optimizer=optax.sgd(0.1)
        )
    )
    assert far(bounded, train(trainer_of(served(), optimizer=optax.sgd(0.1)))) < 1e-6, (
        "eight eighths of a step"
    )


@pytest.mark.system
def test_no_compensation_is_plain_asynchronous_to_the_last_bit():
    uncompensated = train(trainer_of(served(mode="asynchronous", delay_compensation=0)))
    assert equal(uncompensated, train(trainer_of(served(mode="asynchronous"))))
    assert (
        far(uncompensated, train(trainer_of(served(mode="asynchronous", delay_compensation=0.1))))
        > 1e-4
    )


@pytest.mark.slow
@pytest.mark.parametrize("placement", PLACEMENTS[1:])
def test_where_parameters_are_kept_changes_no_asynchronous_run(placement):
    placed, default = (
        train(trainer_of(served(mode="asynchronous", placement=placement))),
        train(trainer_of(served(mode="asynchronous"))),
    )
    assert far(placed, default) < 1e-5, (
        "one kernel or several: last bits, which a diverging run makes larger"
    )


@pytest.mark.system
def test_compensation_is_right_to_second_order_on_minus_log():
    """f = -log w has f'' = f' f', so with lambda = 1 the corrected gradient is off by O(delta^2),
    and the plain one by O(delta).

    Two workers of the same weight 1: the first update moves it by delta, the rate; the second is of
    the gradient at 1.
    """

    def off(rate, strength):
        model = spmd.FunctionalModel(
            lambda key: {"w": jnp.ones((1,))}, lambda p, x: -jnp.log(p["w"][0]) + 0 * x
        )
        layout, mesh = (
            served(mode="asynchronous", delay_compensation=strength),
            spmd.make_mesh("data=2", devices=jax.devices()[:2]),
        )
        trainer = spmd.Trainer(
            model, loss=lambda m, b: m(b), optimizer=optax.sgd(rate), mesh=mesh, layout=layout
        )
        state, _ = trainer.step(trainer.init(), np.zeros(2, np.float32))
        second = (float(trainer.rebuild(state).params["w"][0]) - (1 + rate)) / -rate
        return abs(second + 1 / (1 + rate))

    for strength, order in ((0.0, 1), (1.0, 2)):
        # higher orders: a quarter of the next term
        assert abs(np.log2(off(0.25, strength) / off(0.125, strength)) - order) < 0.3


@pytest.mark.slow
def test_asynchronous_rounds_use_codecs_and_feedback():
    layout = served(
        "int8",
        error_feedback=True,
        weights="bfloat16",
        mode="asynchronous",
        compute_time="exponential",
    )
    trainer = trainer_of(layout, optimizer=optax.sgd(0.02))
    exact = trainer_of(
        served(mode="asynchronous", compute_time="exponential"), optimizer=optax.sgd(0.02)
    )
    rows, last = data(640), {}
    for name, each in (("int8", trainer), ("exact", exact)):
        *_, last[name] = each.steps(rows, batch_size=32)
    assert {
        op.dtype for op in trainer.wire.ops if op.where.startswith("reduce_gradients/int8")
    } == {"uint8"}
    assert {op.kind for op in trainer.wire.ops} == {"all_to_all"}
    coded_params, exact_params = (
        params_of(trainer, last["int8"].state),
        params_of(exact, last["exact"].state),
    )
    moved = max(
        np.abs(exact_params[path] - value).max()
        for path, value in params_of(exact, exact.init()).items()
    )
    difference = np.max(
        [np.abs(coded_params[path] - exact_params[path]).max() for path in coded_params]
    )
    assert 0 < difference < 0.05 * moved, (
        "weights are rounded to 2^-8, and so is what depends on them"
    )


@pytest.mark.system
def test_what_is_applied_and_what_is_kept_are_all_gradients_of_a_worker():
    """Frozen weights, equal workers: the sum of what arrived from each, plus its residual, is the
    sum of its gradients.
    """
    layout = served("int8", error_feedback=True, mode="asynchronous")
    summed = optax.GradientTransformation(
        lambda p: jax.tree.map(jnp.zeros_like, p),
        lambda g, s, p=None: (jax.tree.map(jnp.zeros_like, g), jax.tree.map(jnp.add, s, g)),
    )
    seen = {}
    for name, choice in (("exact", served(mode="asynchronous")), ("int8", layout)):
        trainer = trainer_of(choice, optimizer=summed)
        state = trainer.init()
        for step in range(5):
            state, _ = trainer.step(state, data(seed=step))
        seen[name] = state
    for path, true in flatten(jax.device_get(seen["exact"].opt)).items():
        applied = np.asarray(flatten(jax.device_get(seen["int8"].opt))[path], np.float64)
        entry = seen["int8"].exchange[path]
        kept = np.asarray(entry["residual"], np.float64).sum(0) if "residual" in entry else 0.0
        assert np.linalg.norm(applied + kept - true) < 1e-6 * np.linalg.norm(true), path
        assert (
            np.linalg.norm(applied - true) > 1e-4 * np.linalg.norm(true)
            or "residual" not in entry
            or not path.endswith("kernel")
        )


# data ---------------------------------------------------------------------------------------------


class Counting:
    """A loss that leaves a trace of which rows it was given: row n adds 1 to weight n."""

    def __init__(self, rows):
        self.model = spmd.FunctionalModel(
            lambda key: {"seen": jnp.zeros((rows,))}, lambda p, rows: p["seen"][rows]
        )

    def loss(self, model, batch):
        return -model(batch["row"])


@pytest.mark.sampled(quick=6)
@pytest.mark.parametrize("kind", ["arrays", "batches", "resident"])
@pytest.mark.parametrize("examples", [256, 250], ids=["divisible", "remainder"])
def test_every_row_is_used_once_an_epoch_with_slow_workers(kind, examples):
    counting, rows = Counting(256), {"row": np.arange(examples, dtype=np.int32)}
    batches = [{"row": rows["row"][first : first + 32]} for first in range(0, examples, 32)]
    source = {"arrays": rows, "batches": batches, "resident": None}[kind]
    layout = served(mode="asynchronous", compute_time=(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.5, 7.0))
    result = spmd.fit(
        counting.model,
        resident(rows) if kind == "resident" else source,
        loss=counting.loss,
        optimizer=optax.sgd(1.0),
        mesh="data=8",
        layout=layout,
        batch_size=None if kind == "batches" else 32,
        epochs=2,
        progress=False,
    )
    seen = np.asarray(result.model.params["seen"])
    # a gradient is the mean over a worker's rows: 4, or what is left for the last one
    parts = np.full(examples, 2 / 4)
    if kind == "batches" or examples % 4 == 0:
        last = examples - examples // 4 * 4
        parts[examples - last :] = 2 / max(last, 1) if last else 2 / 4
        assert_close(seen[:examples], parts)
    else:  # shuffled: another two rows make up the last part of each epoch
        assert_close(seen[:examples].sum(), 2 * -(-examples // 4))
    assert not seen[examples:].any() and (seen[:examples] > 0).all()
    assert len(result.history["loss"]) > 2 * -(-examples // 32), (
        "in some rounds a worker was still busy"
    )


@pytest.mark.system
def test_a_step_by_hand_would_lose_rows_and_says_so():
    trainer = trainer_of(served(mode="asynchronous", compute_time="exponential"))
    with pytest.raises(
        OptionError, match=r"workers take no part in this round[\s\S]*trainer.steps"
    ):
        train(trainer)


@pytest.mark.system
def test_a_part_that_is_not_full_needs_a_loss_of_rows():
    layout = served(mode="asynchronous", compute_time="exponential")

    def loss(m, b):
        return spmd.losses.cross_entropy(m, b).mean()

    with pytest.raises(DataError, match="one number for all its rows"):
        list(trainer_of(layout, loss=loss).steps(data(70), batch_size=32))


def test_a_batch_is_split_among_simulated_workers():
    with pytest.raises(DataError, match=r"24 workers \(\[parameter_server\] workers\)"):
        trainer_of(served(workers=24)).prepare(data())


# a run --------------------------------------------------------------------------------------------


def fit(layout, path=None, **options):
    options = {
        "batch_size": 32,
        "optimizer": MOMENTUM,
        "loss": spmd.losses.cross_entropy,
        "progress": False,
        "mesh": "data=8",
        **options,
    }
    return spmd.fit(lambda: MLP(nnx.Rngs(0)), data(200), layout=layout, checkpoint=path, **options)


LATE = {"mode": "asynchronous", "compute_time": "exponential", "staleness_scale": "inverse"}


def same_state(left, right):
    first, second = (flatten(jax.device_get(state)) for state in (left, right))
    return first.keys() == second.keys() and all(
        np.array_equal(first[path], second[path]) for path in first
    )


SPARES = pytest.param({"spares": 2, "compute_time": "exponential"}, marks=pytest.mark.slow)


@pytest.mark.system
@pytest.mark.parametrize("server", [SPARES, LATE], ids=["spares", "asynchronous"])
def test_the_same_run_twice_and_one_that_was_stopped_end_in_the_same_bits(server, tmp_path):
    layout = served("int8", error_feedback=True, **server)
    uninterrupted = fit(layout, epochs=3)
    again = fit(layout, epochs=3)
    assert same_state(uninterrupted.state, again.state)
    fit(layout, tmp_path, steps=11)
    rest = fit(layout, tmp_path, epochs=3, resume=True)
    assert same_state(uninterrupted.state, rest.state)
    other = fit(
        dataclasses.replace(
            layout, parameter_server=dataclasses.replace(layout.parameter_server, seed=1)
        ),
        epochs=3,
    )
    assert not same_state(uninterrupted.state, other.state)


@pytest.mark.system
def test_evaluation_and_prediction_are_of_the_servers_weights():
    result = fit(
        served(**LATE), epochs=2, eval_data=data(64, 1), metrics={"accuracy": spmd.metrics.accuracy}
    )
    batch = data(64, 1)
    logits = np.asarray(result.model(batch["x"]))
    assert result.history["eval_accuracy"][-1] == pytest.approx(
        (logits.argmax(1) == batch["y"]).mean(), abs=1e-6
    )
    np.testing.assert_allclose(result.predict(batch["x"]), logits, rtol=1e-5, atol=1e-6)


@pytest.mark.system
def test_what_the_clock_says_is_among_the_metrics():
    result = fit(served(**LATE), epochs=2)
    history = result.history
    seconds, applied = (
        np.array(history["simulated_seconds"]),
        np.array(history["gradients_applied"]),
    )
    assert (np.diff(seconds) > 0).all() and applied.sum() == 2 * 50
    assert set(history.names) >= {
        "loss",
        "wire_bytes",
        "simulated_seconds",
        "gradients_applied",
        "gradients_dropped",
        "updates",
        "staleness",
        "idle_share",
    }


@pytest.mark.system
def test_no_step_is_compiled_twice():
    trainer = trainer_of(served(**LATE), optimizer=optax.sgd(0.05))
    for _ in trainer.steps(data(640), batch_size=32):
        pass
    assert trainer.prepare(None)[0].functions.compilations() == 1


@pytest.mark.system
def test_server_state_is_a_shard_of_the_full_state():
    """As the compiled program has it: a device's arguments, of which parameters and AdamW's moments
    are a row of each.
    """
    sizes = {}
    for name, layout in {
        "all_reduce": ALL_REDUCE,
        **{kind: served(placement=kind) for kind in PLACEMENTS},
    }.items():
        trainer = trainer_of(layout, optimizer=ADAMW)
        program, _ = trainer.prepare(data())

        def at(x):
            return jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=jax.NamedSharding(trainer.mesh, jax.P("data"))
            )

        batch = jax.tree.map(at, data())
        step = program.functions.jitted(FunctionKey("step", ROWS, True))
        compiled = step.lower(
            trainer.abstract_state, batch, at(np.ones(ROWS, np.float32)), program.abstract_events
        ).compile()
        sizes[name] = compiled.memory_analysis().argument_size_in_bytes
        kept = trainer.resolved.placements.values()
        rows = sum(place.nbytes // place.shape[0] for place in kept) if name != "all_reduce" else 0
        assert not rows or 0 <= sizes[name] - 3 * rows <= 1024 + ROWS // 8 * 4 * (FEATURES + 2), (
            "and a batch, and a few numbers"
        )
    param_bytes = sum(place.nbytes for place in trainer_of(ALL_REDUCE).resolved.placements.values())
    assert sizes["sliced"] <= sizes["all_reduce"] - 3 * param_bytes * 7 / 8 + 3 * 4 * 4 + 64, (
        "an eighth, and less than a number more per parameter"
    )


@pytest.mark.system
def test_assigned_work_resumes_where_it_stopped(tmp_path):
    """Batches of 32, 20, 32, 32 rows, a slow worker, stopped at every step: no row is lost, none is
    taken twice.
    """
    counting, at = Counting(128), np.cumsum([0, 32, 20, 32, 32])
    batches = [{"row": np.arange(*pair, dtype=np.int32)} for pair in itertools.pairwise(at)]
    layout = served(mode="asynchronous", compute_time=(1.0, 1.0, 1.0, 2.5))
    options = {
        "loss": counting.loss,
        "optimizer": optax.sgd(1.0),
        "mesh": spmd.make_mesh("data=4", devices=jax.devices()[:4]),
    }
    for stop in (2, 3, 5, None):
        more = {"steps": stop} if stop else {"epochs": 1}
        result = spmd.fit(
            counting.model,
            batches,
            layout=layout,
            checkpoint=tmp_path,
            resume=True,
            progress=False,
            **options,
            **more,
        )
    seen = np.asarray(result.model.params["seen"])
    parts = np.concatenate(
        [np.full(32, 1 / 8), np.full(16, 1 / 8), np.full(4, 1 / 4), np.full(64, 1 / 8)]
    )
    assert_close(seen[:116], parts)
    assert not seen[116:].any()


@pytest.mark.system
def test_what_would_lose_rows_on_resume_is_refused(tmp_path):
    slow = {"mode": "asynchronous", "compute_time": "exponential"}
    fit(served(**slow), tmp_path / "asynchronous", steps=3)
    for layout in (served(), served(**slow, workers=16)):
        with pytest.raises(DataError, match="parts had been assigned to 8 workers"):
            fit(layout, tmp_path / "asynchronous", steps=5, resume=True)
    fit(served(), tmp_path / "synchronous", steps=3)
    assert int(fit(served(**slow), tmp_path / "synchronous", epochs=1, resume=True).state.step) > 6


@pytest.mark.system
def test_rows_of_those_who_wait_for_the_warm_up_are_not_lost():
    counting = Counting(64)
    options = {
        "loss": counting.loss,
        "optimizer": optax.sgd(1.0),
        "mesh": "data=8",
        "batch_size": 32,
        "epochs": 1,
        "progress": False,
    }
    result = spmd.fit(
        counting.model,
        {"row": np.arange(64, dtype=np.int32)},
        layout=served(warmup_steps=3),
        **options,
    )
    seen = np.asarray(result.model.params["seen"])
    assert (seen > 0).all() and (np.isclose(seen, 1 / 4).sum(), np.isclose(seen, 1 / 32).sum()) == (
        12,
        32,
    )


@pytest.mark.system
def test_where_the_data_ends_what_was_gathered_is_an_update():
    """11 parts of 8 workers, four to an update: 4, 4 and the 3 that are left; the next epoch begins
    afresh.
    """
    counting = Counting(88)
    options = {
        "loss": counting.loss,
        "optimizer": optax.sgd(1.0),
        "mesh": "data=8",
        "batch_size": 64,
        "epochs": 2,
        "progress": False,
    }
    rows = {"row": np.arange(88, dtype=np.int32)}
    result = spmd.fit(
        counting.model, rows, layout=served(mode="softsync", splits=2), shuffle=False, **options
    )
    assert_close(
        np.asarray(result.model.params["seen"]), np.where(np.arange(88) < 64, 2 / 32, 2 / 24)
    )
    assert all(not np.asarray(entry["gathered"]).any() for entry in result.state.exchange.values())


@pytest.mark.sampled(quick=2)
@pytest.mark.parametrize(
    "server", [{}, {"mode": "softsync", "splits": 2}], ids=["synchronous", "softsync"]
)
def test_a_remainder_may_be_dropped_and_ends_the_epoch(server):
    """90 rows in batches of 32 by 8 workers: two of them, and 26 rows that are not looked at, in
    each of two epochs.
    """
    counting, rows = Counting(90), {"row": np.arange(90, dtype=np.int32)}
    options = {
        "loss": counting.loss,
        "optimizer": optax.sgd(1.0),
        "mesh": "data=8",
        "batch_size": 32,
        "epochs": 2,
        "progress": False,
    }
    result = spmd.fit(
        counting.model, rows, layout=served(drop_remainder=True, **server), shuffle=False, **options
    )
    seen = np.asarray(result.model.params["seen"])
    # of an update's rows, twice
    each = {"synchronous": 2 / 32, "softsync": 2 / 16}[server.get("mode", "synchronous")]
    assert_close(seen, np.where(np.arange(90) < 64, each, 0))
    assert result.history["gradients_applied"] == [8.0] * 4


@pytest.mark.sampled(quick=2)
@pytest.mark.parametrize(
    "server", [{}, {"mode": "asynchronous"}], ids=["synchronous", "asynchronous"]
)
def test_remainder_that_is_the_only_batch_is_reported(server):
    counting = Counting(48)

    def batches():
        return iter(
            [{"row": np.arange(32, dtype=np.int32)}]
            if next(calls) == 0
            else [{"row": np.arange(16, dtype=np.int32)}]
        )

    calls = itertools.count()
    options = {
        "loss": counting.loss,
        "optimizer": optax.sgd(1.0),
        "mesh": "data=8",
        "steps": 9,
        "progress": False,
    }
    with pytest.raises(DataError, match="begins with 16 rows of 32, and drop_remainder = true"):
        spmd.fit(counting.model, batches, layout=served(drop_remainder=True, **server), **options)
    short = [{"row": np.arange(rows, dtype=np.int32)} for rows in (32, 30, 32)]
    with pytest.raises(DataError, match="in the middle of an epoch, with drop_remainder = true"):
        spmd.fit(counting.model, short, layout=served(drop_remainder=True, **server), **options)


@pytest.mark.parametrize(
    "server", [{"spares": 2, "compute_time": "exponential"}, LATE], ids=["spares", "asynchronous"]
)
def test_remainder_that_cannot_be_dropped_is_reported_before_the_first_step(server):
    with pytest.raises(DataError, match="the last is not full"):
        fit(
            served(**server),
            epochs=1,
            loss=lambda m, b: spmd.losses.cross_entropy(m, b).mean(),
            batch_size=48,
        )


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize(
    "server, epochs, rounds",
    [
        ({"spares": 1}, 10, 40),
        ({"spares": 1, "drop_remainder": True}, 1, 3),
        ({"mode": "asynchronous", "drop_remainder": True}, 10, 31),
    ],
    ids=[
        "each epoch ends on a step of its own",
        "a remainder that is dropped",
        "only workers with rows",
    ],
)
def test_a_trace_is_long_enough_when_it_has_a_row_for_each_round(server, epochs, rounds, tmp_path):
    """100 rows in batches of 32 by 4 workers: four rounds in an epoch, or three."""
    counting, rows = Counting(100), {"row": np.arange(100, dtype=np.int32)}
    mesh = spmd.make_mesh("data=4", devices=jax.devices()[:4])
    options = {
        "loss": counting.loss,
        "optimizer": optax.sgd(1.0),
        "mesh": mesh,
        "batch_size": 32,
        "epochs": epochs,
        "progress": False,
    }
    for number in (rounds - 1, rounds):
        path = tmp_path / f"{number}.csv"
        path.write_text("1,1,1,1\n" * number)
        layout = served(compute_time=str(path), **server)
        if number < rounds:
            with pytest.raises(OptionError, match="the trace has"):
                spmd.fit(counting.model, rows, layout=layout, **options)
        else:
            assert int(spmd.fit(counting.model, rows, layout=layout, **options).state.step) == (
                rounds if "mode" not in server else 30
            )


@pytest.mark.system
def test_trace_that_is_too_short_is_reported_before_the_first_step(tmp_path):
    np.save(tmp_path / "times.npy", np.ones((5, 8)))
    # rows of the next round are assigned while one runs
    for server, most in (({}, 5), ({"mode": "asynchronous"}, 4)):
        layout = served(compute_time=str(tmp_path / "times.npy"), **server)
        assert int(fit(layout, steps=most).state.step) == most
        with pytest.raises(OptionError, match="the trace has 5 rows"):
            fit(layout, steps=most + 1)


# optimizers ---------------------------------------------------------------------------------------

FINE = {
    "momentum": MOMENTUM,
    "adamw": ADAMW,
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), ADAMW),
    "lion": optax.lion(1e-3),
    "schedule": optax.adam(optax.cosine_decay_schedule(1e-2, 100)),
    "finite": optax.apply_if_finite(MOMENTUM, 3),
}
NOT_FINE = {
    "adafactor": (optax.adafactor(1e-2), "sliced", "clip_by_block_rms"),
    "lamb": (optax.lamb(1e-2), "round_robin", "scale_by_trust_ratio"),
    "unit-wise clipping": (
        optax.chain(optax.adaptive_grad_clip(0.01), MOMENTUM),
        "sliced",
        "adaptive_grad_clip",
    ),
    "decay of matrices only": (
        optax.adamw(1e-2, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
        "sliced",
        "masked",
    ),
    "muon": (optax.contrib.muon(1e-2), "sliced", "PartitionState"),
    "lamb, gathered": (optax.MultiSteps(optax.lamb(1e-2), 4), "round_robin", "MultiSteps"),
    "lamb, warmed up": (
        optax.lamb(optax.linear_schedule(0, 1e-2, 10)),
        "round_robin",
        "scale_by_trust_ratio",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", FINE.values(), ids=FINE)
def test_an_optimizer_that_looks_at_elements_may_be_served(optimizer):
    assert np.isfinite(
        train(trainer_of(served(mode="asynchronous"), optimizer=optimizer), 2)[0]
    ).all()


DEAR = ("adafactor", "muon", "lamb, gathered")  # to compile


@pytest.mark.system
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in DEAR)) for name in NOT_FINE]
)
def test_one_that_looks_at_parameters_is_refused_by_name(name):
    optimizer, placement, named = NOT_FINE[name]
    with pytest.raises(OptimizerError, match=named) as caught:
        trainer_of(served(placement=placement), optimizer=optimizer).prepare(data())
    assert "fix: " in str(caught.value) and placement in str(caught.value)


@pytest.mark.slow
def test_lamb_is_allowed_where_parameters_are_not_sliced():
    server, all_reduce = (
        train(trainer_of(layout, optimizer=optax.lamb(1e-2))) for layout in (served(), ALL_REDUCE)
    )
    assert far(server, all_reduce) < 1e-6
