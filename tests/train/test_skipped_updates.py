"""Updates that are skipped at a spike, or where float16 overflows: everywhere or nowhere, and
nothing of them is left.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spmd
from spmd import wire
from spmd.base.tree import flatten
from spmd.errors import CommunicationError, LossError, OptimizerError, OptionError, SpmdError
from spmd.optimizers import average_weights, scale_loss, skip_spikes
from tests.compare import assert_close
from tests.train.served import FEATURES, MOMENTUM, data, served

SPIKES = skip_spikes(MOMENTUM, window=3)
STEPS, BAD = 8, 5

# in a plain loop ----------------------------------------------------------------------------------


def run(optimizer, gradients, values=None, params=0.0):
    """Parameters and state after each gradient."""
    params = jnp.float32(params)
    state, seen, update = optimizer.init(params), [], jax.jit(optimizer.update)
    for number, gradient in enumerate(gradients):
        extra = {} if values is None else {"value": jnp.float32(values[number])}
        updates, state = update(jnp.float32(gradient), state, params, **extra)
        params = optax.apply_updates(params, updates)
        seen.append((float(params), state))
    return seen


def limit(values, sigmas):
    mean, deviation = np.mean(values), np.std(values)
    return mean + sigmas * max(deviation, 0.01 * abs(mean))


def test_skip_spikes_has_the_band_of_the_updates_that_were_made():
    norms = [1.0, 2.0, 3.0, 2.5, 60.0, 3.5, 5.5, 1.0, 4.4, 80.0, 0.5]
    made, skipped = [], []
    for number, (_, state) in enumerate(
        run(skip_spikes(optax.sgd(1.0), sigmas=3.0, window=3), norms)
    ):
        allowed = limit(made[-3:], 3.0) if len(made) >= 3 else np.inf
        assert_close(state.limits[1], allowed)
        (skipped if norms[number] > allowed else made).append(norms[number])
        assert bool(state.applied) == (norms[number] <= allowed)
    assert skipped == [60.0, 5.5, 80.0] and (int(state.skipped), int(state.counted)) == (3, 8)


def test_skip_spikes_takes_losses_too():
    losses = [1.0, 1.1, 1.2, 9.0, 1.0, np.nan, -50.0]
    seen = run(skip_spikes(optax.sgd(1.0), window=3), np.ones(7), losses)
    assert [params for params, _ in seen] == [-1, -2, -3, -3, -4, -4, -5], (
        "a loss that falls is no spike"
    )
    assert [int(state.left) for _, state in seen] == [10, 10, 10, 9, 10, 9, 10]


def test_skip_spikes_skips_what_is_not_finite_from_the_first_step_on():
    seen = run(
        skip_spikes(optax.adam(1.0), window=100, max_in_a_row=2),
        [np.inf, 1.0, np.nan, np.nan, np.nan],
    )
    assert [int(state.left) for _, state in seen] == [1, 2, 1, 0, 0] and seen[0][0] == 0
    assert seen[-1][0] == seen[1][0] != 0 and all(
        np.isfinite(leaf).all() for leaf in jax.tree.leaves(seen[-1][1].inner)
    )


def test_skip_spikes_of_equal_values_skips_nothing():
    assert (
        int(
            run(skip_spikes(optax.sgd(1.0), window=3), np.full(20, 0.1), np.full(20, 0.7))[-1][
                1
            ].skipped
        )
        == 0
    )


def test_skip_spikes_trains_after_gradients_of_zero():
    """They do not fill the window: as if those steps had not been."""
    seen = run(
        skip_spikes(optax.sgd(1.0), window=3),
        [0.0] * 5 + [1.0, 2.0, 3.0] + [0.0] * 5 + [2.0, 90.0, 0.0],
        [0.0] * 16,
    )
    assert [params for params, _ in seen[4:]] == [0, -1, -3, -6, *[-6] * 5, -8, -8, -8]
    assert int(seen[-1][1].skipped) == 1 and np.isinf(seen[-1][1].limits[0])


@pytest.mark.system
def test_skip_spikes_takes_another_number_in_a_row_when_it_resumes():
    state = run(skip_spikes(optax.sgd(1.0), max_in_a_row=3), [np.nan, np.nan])[-1][1]
    for most, left in ((3, 0), (10, 7), (2, 0)):
        _, after = skip_spikes(optax.sgd(1.0), max_in_a_row=most).update(jnp.float32(np.nan), state)
        assert (int(after.in_a_row), int(after.left)) == (3, left)


@pytest.mark.parametrize("wrap", [skip_spikes, scale_loss])
def test_skipping_state_keeps_its_dtypes_under_x64(wrap):
    """As in a loop of `lax.scan`, which takes no other."""
    with jax.enable_x64(True):
        optimizer, params = wrap(optax.sgd(1.0)), jnp.float32(0)

        def step(state, gradient):
            return optimizer.update(gradient, state, params, value=gradient)[::-1]

        state, _ = jax.jit(lambda gradients: jax.lax.scan(step, optimizer.init(params), gradients))(
            jnp.ones(3, jnp.float32)
        )
    assert {leaf.dtype.itemsize for leaf in jax.tree.leaves(state)} <= {1, 4}


def test_scale_loss_halves_and_doubles():
    seen = run(scale_loss(optax.sgd(1.0), 8.0, every=2), [np.inf, 1.0, 1.0, 1.0, np.nan, 1.0, 1.0])
    assert [float(state.scale) for _, state in seen] == [4, 4, 8, 8, 4, 4, 8]
    assert [params for params, _ in seen] == [0, -1, -2, -3, -3, -4, -5] and int(
        seen[-1][1].skipped
    ) == 2
    scales = [
        float(state.scale)
        for _, state in run(scale_loss(optax.sgd(1.0), 2.0**39, every=1), np.full(4, 1e-9))
    ]
    assert (
        scales == [2.0**40] * 4
        and float(run(scale_loss(optax.sgd(1.0), 2.0**-23), [np.nan] * 3)[-1][1].scale) == 2.0**-24
    )


# on a mesh ----------------------------------------------------------------------------------------


class Stack(nnx.Module):
    def __init__(self, rngs, norm=False):
        self.up = nnx.Linear(FEATURES, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs) if norm else lambda x: x
        self.blocks = spmd.nn.LayerStack([nnx.Linear(16, 16, rngs=rngs) for _ in range(4)])
        self.out = nnx.Linear(16, 5, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.blocks(self.norm(self.up(x)))))


def trainer_on(layout="data_parallel", mesh="data=8", optimizer=SPIKES, norm=False, **how):
    mesh = spmd.make_mesh(mesh, devices=jax.devices()[: spmd.MeshSpec.parse(mesh).size])
    how = {
        "loss": spmd.losses.cross_entropy,
        "optimizer": optimizer,
        "mesh": mesh,
        "layout": layout,
        **how,
    }
    return spmd.Trainer(lambda: Stack(nnx.Rngs(0), norm), **how)


def batch(number, by=1e3):
    """A batch of which step `BAD` has one row, of one worker alone, that is a thousand times as
    large.
    """
    rows = data(seed=number)
    rows["x"][17] *= by if number == BAD else 1
    return rows


def train(trainer, steps=STEPS, by=1e3):
    """The states after each step, on the host, and the steps' metrics."""
    state, states, metrics = trainer.init(), [], []
    for number in range(steps):
        state, measured = trainer.step(state, batch(number, by))
        metrics.append(dict(measured))
        copied = jax.tree.map(jnp.copy, state)
        states.append(
            jax.device_get(
                dataclasses.replace(copied, params=trainer.placed.states.unpacked(copied.params))
            )
        )
    return states, metrics


def column(metrics, name):
    return [step[name] for step in metrics]


RULES = (spmd.Rule("up/kernel", ("data", "model")), spmd.Rule("out/kernel", ("model", None)))
FEEDBACK = spmd.Layout(gradients=spmd.Gradients("all_reduce", "int8", error_feedback=True))
PLACES = {
    "data_parallel-2": ("data_parallel", "data=2"),
    "data_parallel-8": ("data_parallel", "data=8"),
    "zero1-8": ("zero1", "data=8"),
    "fsdp-8": ("fsdp", "data=8"),
    "fsdp-tensor-4x2": (
        dataclasses.replace(spmd.Layout.load("fsdp_tensor_parallel"), params=RULES),
        "data=4,model=2",
    ),
    "pipeline-2x4": ("pipeline", "data=2,stage=4"),
    "1f1b-2x4": ("pipeline_1f1b", "data=2,stage=4"),
    "server-8": (served(), "data=8"),
    "compiler-8": (spmd.Layout(gradients=spmd.Gradients("compiler")), "data=8"),
}


@functools.cache
def alone(accumulate=1):
    return train(trainer_on(mesh="data=1", accumulate=accumulate))


def check_spike(states, metrics, reference, tolerance):
    """The spike was skipped, all of it, and nothing else; and all is as the reference has it."""
    assert (
        column(metrics, "skipped")
        == [float(number == BAD) for number in range(STEPS)]
        == column(reference[1], "skipped")
    )
    before, after = (flatten(states[number]) for number in (BAD - 1, BAD))
    counters = {
        "step",
        *(f"opt/{name}" for name in ("skipped", "in_a_row", "left", "seen", "limits", "applied")),
    }
    for path, leaf in after.items():
        assert path in counters or leaf.tobytes() == before[path].tobytes(), path
    for path, leaf in flatten(reference[0][-1].params).items():
        np.testing.assert_allclose(
            flatten(states[-1].params)[path], leaf, rtol=0, atol=tolerance, err_msg=path
        )
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(column(metrics, name), column(reference[1], name), rtol=2e-5)


@pytest.mark.sampled(system=4)
@pytest.mark.parametrize("place", PLACES)
def test_spike_of_one_worker_is_skipped_everywhere(place):
    check_spike(*train(trainer_on(*PLACES[place])), alone(), 2e-6)


@pytest.mark.system
def test_spike_that_is_not_skipped_moves_the_weights():
    """The control: without the wrapper, and with a band that is wide enough, the same batch is an
    update.
    """
    moves = {}
    for name, optimizer in (
        ("plain", MOMENTUM),
        ("wide", skip_spikes(MOMENTUM, window=3, sigmas=1e9)),
        ("spikes", SPIKES),
    ):
        states, _ = train(trainer_on(optimizer=optimizer), BAD + 1)
        moves[name] = np.abs(
            states[BAD].params["up"]["kernel"] - states[BAD - 1].params["up"]["kernel"]
        ).max()
    assert moves["spikes"] == 0 and moves["plain"] == moves["wide"] > 1


@pytest.mark.system
@pytest.mark.parametrize("accumulate", [2, 4])
def test_spike_in_a_microbatch_skips_the_update_of_all(accumulate):
    check_spike(*train(trainer_on(accumulate=accumulate)), alone(), 2e-6)


@pytest.mark.system
def test_skipped_update_changes_no_batch_statistics():
    """Those of a batch with a NaN would spoil every evaluation after."""
    states, metrics = train(trainer_on(norm=True), by=np.nan)
    assert column(metrics, "skipped") == [
        float(number == BAD) for number in range(STEPS)
    ] and np.isnan(metrics[BAD]["loss"])
    stats = [flatten(state.stats) for state in states]
    for path, leaf in stats[BAD].items():
        np.testing.assert_array_equal(leaf, stats[BAD - 1][path])
        assert np.isfinite(stats[-1][path]).all() and (leaf != stats[-1][path]).any()
    spoiled, _ = train(trainer_on(norm=True, optimizer=MOMENTUM), by=np.nan)
    assert not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(spoiled[-1].stats)), (
        "the control"
    )


@pytest.mark.system
@pytest.mark.parametrize("layout", [FEEDBACK, "fsdp"], ids=["int8", "fsdp-int8"])
def test_skipped_update_changes_no_residual(layout):
    if layout == "fsdp":  # where layers reduce their gradients in the backward pass
        layout = dataclasses.replace(
            spmd.Layout.load("fsdp"),
            gradients=spmd.Gradients("reduce_scatter", "int8", error_feedback=True, gather="layer"),
        )
    states, metrics = train(trainer_on(layout))
    check_spike(states, metrics, (states, metrics), 0)
    residuals = [flatten(state.exchange) for state in states]
    assert residuals[0] and all(
        (leaf != residuals[BAD + 1][path]).any() for path, leaf in residuals[BAD].items()
    )


@pytest.mark.system
def test_average_and_schedule_are_those_of_updates_that_were_made():
    """As a run that never saw the batch."""

    def optimizer():
        return average_weights(optax.adam(optax.exponential_decay(0.1, 1, 0.5)), decay=None)

    trainer = trainer_on(optimizer=skip_spikes(optimizer(), window=3))
    states, metrics = train(trainer)
    assert sum(column(metrics, "skipped")) == 1
    plain = trainer_on(optimizer=optimizer())
    state = plain.init()
    for number in range(STEPS):
        state = plain.step(state, batch(number))[0] if number != BAD else state
    for wanted, got in (
        (state.params, states[-1].params),
        (state.opt.average, states[-1].opt.inner.average),
    ):
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(wanted), got)
    assert int(states[-1].opt.inner.updates) == STEPS - 1
    jax.tree.map(
        np.testing.assert_array_equal,
        trainer.averaged(trainer.init()).params,
        trainer.init().params,
    )


SCALAR = "f32[]"


def collectives(text):
    """(kind, shape) of each array that one communicates."""
    lines = re.findall(
        r"= (\([^)]*\)|\S+) (all-[a-z-]+|reduce-scatter|collective-permute)(?:-start)?\(", text
    )
    return sorted(
        (kind, shape) for shapes, kind in lines for shape in re.findall(r"\w+\[[\d,]*\]", shapes)
    )


@pytest.mark.system
@pytest.mark.parametrize("layout", ["data_parallel", "zero1", "fsdp"])
def test_skips_add_no_collective_but_of_scalars(layout):
    compiled = [
        trainer_on(layout, optimizer=optimizer).prepare(data())[0].compile()
        for optimizer in (MOMENTUM, SPIKES)
    ]
    plain, spikes = (collectives(program.as_text()) for program in compiled)
    for each in plain:
        spikes.remove(each)
    shapes = [shape for kind, shape in spikes]
    assert (
        plain
        and shapes == ([] if layout == "data_parallel" else [SCALAR] * len(shapes))
        and (shapes or layout == "data_parallel")
    )


# in a loop of one's own ---------------------------------------------------------------------------


def own_loop(tx, steps=STEPS):
    """Parameters and state on every worker after each step, of a plain `jax.shard_map` loop; one
    worker's rows have the spike.
    """
    mesh, params = (
        jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)),
        {"w": jnp.zeros((FEATURES, 5))},
    )
    state = wire.init(tx, params, mesh)

    def step(params, state, x, y):
        def loss(params):
            return optax.softmax_cross_entropy_with_integer_labels(x @ params["w"], y).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params, value=jax.lax.pmean(value, "data"))
        return optax.apply_updates(params, updates), state

    specs = (jax.P(), wire.specs(state))
    step = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(*specs, jax.P("data"), jax.P("data")),
            out_specs=specs,
            check_vma=False,
        )
    )
    seen = []
    for number in range(steps):
        rows = batch(number)
        params, state = step(params, state, rows["x"], rows["y"])
        seen.append(jax.tree.map(jnp.copy, (params, state)))
    return seen


@pytest.mark.system
def test_skip_spikes_behind_a_communication_in_a_loop_of_ones_own():
    seen = own_loop(optax.chain(wire.all_reduce("data"), SPIKES))
    for shard in [shard.data for shard in seen[BAD][0]["w"].addressable_shards]:
        np.testing.assert_array_equal(shard, seen[BAD - 1][0]["w"])
    assert [int(state[1].skipped) for _, state in seen] == [0] * BAD + [1] * (STEPS - BAD)


def test_skip_spikes_where_workers_would_decide_differently(golden):
    with pytest.raises(CommunicationError) as caught:
        own_loop(skip_spikes(optax.chain(wire.all_reduce("data"), MOMENTUM)), 1)
    golden("skipped_updates_around_a_communication", str(caught.value))
    with pytest.raises(SpmdError, match="each worker has only its shard"):
        own_loop(wire.zero1("data", SPIKES), 1)


# float16 ------------------------------------------------------------------------------------------

HALF = {"precision": "float16", "optimizer": scale_loss(MOMENTUM, 2.0**10)}
# of the loss: its gradients are below the smallest number of float16, unless they are scaled
TINY = 2.0**-26


def tiny(model, batch):
    logits = model(batch["x"]).astype(jnp.float32)
    return TINY * optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])


def masters(precision, mesh, layout="data_parallel", initial=2.0**30, **how):
    rate = optax.sgd(0.1 / TINY, momentum=0.9)
    optimizer = scale_loss(rate, initial) if precision == "float16" else rate
    return train(trainer_on(layout, mesh, optimizer, loss=tiny, precision=precision, **how), by=1)


@functools.cache
def exact():
    return masters("float32", "data=1")


@pytest.mark.sampled(system=7)
@pytest.mark.parametrize("place", ["data_parallel-1", *PLACES])
def test_float16_trains_as_float32_on_a_mesh(place):
    layout, mesh = PLACES.get(place, ("data_parallel", "data=1"))
    states, metrics = masters("float16", mesh, layout)
    assert sum(column(metrics, "skipped")) == 0 and set(column(metrics, "loss_scale")) == {2.0**30}
    for path, leaf in flatten(exact()[0][-1].params).items():
        got, began = flatten(states[-1].params)[path], flatten(exact()[0][0].params)[path]
        assert got.dtype == np.float32
        assert np.abs(got - leaf).max() < 0.02 * np.abs(leaf - began).max(), path


@pytest.mark.system
def test_float16_without_a_scale_loses_small_gradients():
    """The control: under a scale of 1 all are zero."""
    ways = {}
    for name, (states, metrics) in {
        "float32": exact(), "scaled": masters("float16", "data=8"),
            "not scaled": masters("float16", "data=8", initial=1.0)
    }.items():  # fmt: skip
        ways[name] = np.abs(
            states[-1].params["up"]["kernel"] - states[0].params["up"]["kernel"]
        ).max()
        assert name == "float32" or sum(column(metrics, "skipped")) == 0
    assert abs(ways["scaled"] / ways["float32"] - 1) < 0.02 and ways["not scaled"] == 0


@pytest.mark.sampled(system=4)
@pytest.mark.parametrize("place", PLACES)
def test_overflow_of_one_worker_is_skipped_everywhere_and_halves_the_scale(place):
    trainer = trainer_on(*PLACES[place], **HALF)
    states, metrics = train(trainer, by=1e5)
    assert column(metrics, "skipped") == [float(number == BAD) for number in range(STEPS)]
    assert column(metrics, "loss_scale") == [2.0**10] * BAD + [2.0**9] * (STEPS - BAD)
    for path, leaf in flatten(
        (states[BAD].params, states[BAD].opt.inner, states[BAD].exchange)
    ).items():
        assert (
            leaf.tobytes()
            == flatten(
                (states[BAD - 1].params, states[BAD - 1].opt.inner, states[BAD - 1].exchange)
            )[path].tobytes()
        )
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(states[-1].params))


@pytest.mark.sampled(system=3)
@pytest.mark.parametrize("gather", ["full", "layer"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_residuals_do_not_depend_on_the_scale(gather, accumulate):
    """A power of 2 rounds nothing, so a run has the same bits under any scale that neither over-
    nor underflows.
    """
    layout = dataclasses.replace(
        spmd.Layout.load("fsdp"),
        gradients=spmd.Gradients("reduce_scatter", "int8", error_feedback=True, gather=gather),
    )
    runs = [
        train(
            trainer_on(
                layout,
                precision="float16",
                optimizer=scale_loss(MOMENTUM, scale, every=3),
                accumulate=accumulate,
            ),
            by=1,
        )
        for scale in (2.0**10, 2.0**12)
    ]
    assert [column(metrics, "loss_scale")[-1] for _, metrics in runs] == [2.0**12, 2.0**14] and sum(
        column(runs[0][1], "skipped")
    ) == 0
    for path, leaf in flatten((runs[0][0][-1].params, runs[0][0][-1].exchange)).items():
        other = flatten((runs[1][0][-1].params, runs[1][0][-1].exchange))[path]
        np.testing.assert_array_equal(leaf, other, err_msg=path)


@functools.cache
def found(place):
    """Which steps `fit(precision="float16")` skips until it has found its scale; it begins too high
    for this model.
    """
    layout, mesh = PLACES.get(place, ("data_parallel", "data=1"))
    states, metrics = train(
        trainer_on(layout, mesh, precision="float16", optimizer=MOMENTUM), by=1e5
    )
    return column(metrics, "skipped"), column(metrics, "loss_scale"), flatten(states[-1].params)


@pytest.mark.sampled(system=4)
@pytest.mark.parametrize("place", PLACES)
def test_float16_finds_the_same_scale_on_every_mesh(place):
    skipped, scales, params = found(place)
    assert (skipped, scales) == found("alone")[:2] and scales == [
        2.0 ** (20 - sum(skipped[: number + 1])) for number in range(STEPS)
    ]
    assert 2 <= sum(skipped) <= 5 and skipped[0] == skipped[BAD] == 1
    for path, leaf in found("alone")[2].items():
        np.testing.assert_allclose(params[path], leaf, rtol=0, atol=2e-3, err_msg=path)


def test_float16_is_noted():
    notes = []
    for precision in ("float16", "bfloat16"):
        trainer = trainer_on(precision=precision, optimizer=MOMENTUM)
        trainer.prepare(data())
        notes.append(
            [
                line
                for line in trainer.notes()
                if line.startswith("gradients in float16: the loss is scaled")
            ]
        )
    assert [len(lines) for lines in notes] == [1, 0]


@pytest.mark.system
def test_overflow_is_no_spike():
    """What float16 cannot hold never reaches the band."""
    trainer = trainer_on(precision="float16", optimizer=scale_loss(SPIKES, 2.0**6))
    states, metrics = train(trainer, by=1e5)
    assert (
        metrics[BAD]["skipped"] == 1
        and states[BAD].opt.inner.skipped == 0
        and np.isnan(metrics[BAD]["grad_norm"])
    )
    states, metrics = train(
        trainer_on(precision="float16", optimizer=scale_loss(SPIKES, 1.0)), by=1e2
    )
    assert (
        metrics[BAD]["skipped"] == 1
        and states[BAD].opt.inner.skipped == 1
        and metrics[BAD]["skips_left"] == 9
    )


@pytest.mark.system
def test_trial_of_a_sweep_in_float16_equals_fit():
    model = spmd.FunctionalModel(
        lambda key: {"w": jnp.zeros((FEATURES, 1))}, lambda params, x: x @ params["w"]
    )
    x = np.random.default_rng(0).normal(size=(64, FEATURES)).astype(np.float32)
    arrays = {"x": x, "y": x[:, :1] - x[:, 1:2]}
    how = {
        "loss": spmd.losses.mean_squared_error,
        "batch_size": 32,
        "steps": 6,
        "shuffle": False,
        "precision": "float16",
    }
    found = spmd.sweep(
        lambda: model,
        arrays,
        space={"rate": [0.015625, 0.0625]},
        search="grid",
        optimizer=lambda rate: skip_spikes(optax.inject_hyperparams(optax.sgd)(rate), window=2),
        **how,
    )
    alone = spmd.fit(
        model, arrays, optimizer=skip_spikes(optax.sgd(0.0625), window=2), mesh="data=8", **how
    )
    trial = next(trial for trial in found.trials if trial.values["rate"] == 0.0625).result()
    np.testing.assert_allclose(trial.state.params["w"], alone.state.params["w"], rtol=0, atol=2e-4)
    assert float(trial.state.opt.scale) == float(alone.state.opt.scale)


# errors -------------------------------------------------------------------------------------------


def prepare(layout="data_parallel", optimizer=SPIKES, **how):
    trainer_on(layout, optimizer=optimizer, **how).prepare(data())


class Attention(nnx.Module):
    def __init__(self, rngs):
        self.attend = nnx.MultiHeadAttention(2, FEATURES, decode=False, rngs=rngs)

    def __call__(self, x):
        return self.attend(x[:, None])[:, 0, :5]


def attention_in_float16():
    how = {"loss": spmd.losses.cross_entropy, "optimizer": MOMENTUM, "precision": "float16"}
    spmd.Trainer(lambda: Attention(nnx.Rngs(0)), **how).prepare(data())


def own_norm(model, batch):
    return spmd.losses.cross_entropy(model, batch), {"grad_norm": jnp.float32(0)}


def only_kernels(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == "kernel", params)


ERRORS = {
    "sigmas of nothing": lambda: skip_spikes(MOMENTUM, sigmas=0),
    "window of one": lambda: skip_spikes(MOMENTUM, window=1),
    "none in a row": lambda: skip_spikes(MOMENTUM, max_in_a_row=0),
    "too many in a row": lambda: skip_spikes(MOMENTUM, max_in_a_row=2**31),
    "loss of each row": lambda: run(SPIKES, [1.0], [np.ones(3)]),
    "scale of nothing": lambda: scale_loss(MOMENTUM, 0.0),
    "every of nothing": lambda: scale_loss(MOMENTUM, every=0),
    "in a chain": lambda: prepare(optimizer=optax.chain(optax.clip_by_global_norm(1.0), SPIKES)),
    "masked": lambda: prepare(optimizer=optax.masked(SPIKES, only_kernels)),
    "twice": lambda: prepare(optimizer=skip_spikes(SPIKES)),
    "scale inside": lambda: prepare(
        optimizer=skip_spikes(scale_loss(MOMENTUM)), precision="float16"
    ),
    "asynchronous": lambda: prepare(served(mode="asynchronous")),
    "local": lambda: prepare(served(mode="local", every=2)),
    "float16 asynchronous": lambda: prepare(
        served(mode="asynchronous"), MOMENTUM, precision="float16"
    ),
    "scale for float32": lambda: prepare(optimizer=scale_loss(MOMENTUM)),
    "scale for bfloat16": lambda: prepare(optimizer=scale_loss(MOMENTUM), precision="bfloat16"),
    "average outside": lambda: prepare(optimizer=average_weights(SPIKES)),
    "average outside of a scale": lambda: prepare(
        optimizer=average_weights(scale_loss(MOMENTUM)), precision="float16"
    ),
    "average outside of both": lambda: prepare(
        optimizer=average_weights(scale_loss(SPIKES)), precision="float16"
    ),
    "metric given of its name": lambda: prepare(metrics={"grad_norm": spmd.metrics.accuracy}),
    "attention in float16 on a CPU": attention_in_float16,
    "metric of its name": lambda: prepare(loss=own_norm),
}


@pytest.mark.parametrize("name", ERRORS)
def test_skips_that_cannot_be(name, golden):
    with pytest.raises((OptimizerError, OptionError, LossError)) as caught:
        ERRORS[name]()
    assert isinstance(caught.value, SpmdError)
    golden(f"skipped_updates_{name.replace(' ', '_')}", str(caught.value))
