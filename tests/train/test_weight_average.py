"""Averages of weights kept as optimizer state: what they are the mean of, where they live, and who
evaluates and exports them.
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
from spmd.base.tree import flatten
from spmd.errors import OptimizerError, OptionError
from spmd.optimizers import average_weights
from tests.compare import assert_close
from tests.train.served import FEATURES, MOMENTUM, data, served

EMA = average_weights(MOMENTUM, decay=0.5)


def mean_of(weights, decay=1.0, start=0, every=1):
    """The average after each of these weights, in float64, as the docstring has it."""
    averages, taken = [], []
    for number, weight in enumerate(weights, 1):
        if number > start and (number - start) % every == 0:
            taken.append(np.asarray(weight, np.float64))
        share = decay ** np.arange(len(taken))[::-1]
        averages.append(
            np.tensordot(share, np.stack(taken), 1) / share.sum()
            if taken
            else np.asarray(weight, np.float64)
        )
    return averages


# in a plain loop ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"decay": 0.6},
        {"decay": None},
        {"decay": None, "start": 3, "every": 5},
        {"decay": 0.9, "every": 2},
    ],
)
def test_average_weights_is_the_weighted_mean_of_the_weights(options):
    optimizer, inner = average_weights(MOMENTUM, **options), MOMENTUM
    params = plain = {"w": jnp.arange(4.0), "b": jnp.float32(2)}
    state, inner_state, seen, averages = optimizer.init(params), inner.init(params), [], []
    update = jax.jit(optimizer.update)
    for number in range(24):
        grads = jax.tree.map(lambda x, number=number: jnp.cos(x * (number + 1)), params)
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        updates, inner_state = inner.update(grads, inner_state, plain)
        plain = optax.apply_updates(plain, updates)
        seen.append(np.asarray(params["w"]))
        averages.append(np.asarray(state.average["w"]))
    assert_close(params["w"], plain["w"])
    wanted = mean_of(
        seen,
        **{
            "decay": 0.999,
            **options,
            **({"decay": 1.0} if options.get("decay", 0) is None else {}),
        },
    )
    np.testing.assert_allclose(averages, wanted, rtol=1e-6, atol=1e-6)
    assert np.abs(averages[-1] - seen[-1]).max() > 1e-3, "an average is not the last weights"
    assert int(state.updates) == 24


def test_average_weights_of_equal_weights_has_their_bits():
    optimizer = average_weights(optax.sgd(0.0), decay=0.9)
    params = {"w": jax.random.normal(jax.random.key(0), (64,))}
    state = optimizer.init(params)
    assert state.average["w"] is not params["w"], "a loop may donate both"
    for _ in range(5):
        _, state = optimizer.update(params, state, params)
    np.testing.assert_array_equal(state.average["w"], params["w"])


def test_average_weights_of_bfloat16_and_integers():
    optimizer = average_weights(optax.sgd(1.0), decay=None)
    params = {"w": jnp.ones(2, jnp.bfloat16), "n": jnp.int32(3)}
    state = optimizer.init(params)
    for step in (1.0, 2.0):
        updates, state = optimizer.update(
            {"w": jnp.full(2, -step, jnp.bfloat16), "n": jnp.int32(-1)}, state, params
        )
        params = optax.apply_updates(params, updates)
    assert state.average["w"].dtype == jnp.float32 and state.average["w"].tolist() == [3.0, 3.0], (
        "of 2 and 4"
    )
    assert int(state.average["n"]) == int(params["n"]) == 5


def test_average_weights_skips_what_goes_around_it():
    """Microbatches of `MultiSteps` and steps that `apply_if_finite` skips are no updates."""
    optimizer = optax.apply_if_finite(
        optax.MultiSteps(average_weights(optax.sgd(1.0), decay=None), 2), 3
    )
    params = jnp.float32(0)
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for gradient in (-1.0, -1.0, np.nan, -2.0, -2.0):  # the weights are 1 and 3
        updates, state = update(jnp.float32(gradient), state, params)
        params = optax.apply_updates(params, updates)
    assert (float(params), float(optax.tree_utils.tree_get(state, "average"))) == (3.0, 2.0)


# on a mesh ----------------------------------------------------------------------------------------


class Stack(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(FEATURES, 16, rngs=rngs)
        self.blocks = spmd.nn.LayerStack([nnx.Linear(16, 16, rngs=rngs) for _ in range(4)])
        self.out = nnx.Linear(16, 5, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.blocks(self.up(x))))


def trainer_on(layout="data_parallel", mesh="data=8", optimizer=EMA):
    mesh = spmd.make_mesh(mesh, devices=jax.devices()[: spmd.MeshSpec.parse(mesh).size])
    how = {
        "loss": spmd.losses.cross_entropy,
        "optimizer": optimizer,
        "mesh": mesh,
        "layout": layout,
    }
    return spmd.Trainer(lambda: Stack(nnx.Rngs(0)), **how)


def train(trainer, steps=4):
    """The last state, and the weights after each step, as the model has them, by path."""
    state, seen = trainer.init(), []
    for number in range(steps):
        state, _ = trainer.step(state, data(seed=number))
        seen.append(
            flatten(
                jax.device_get(trainer.placed.states.unpacked(jax.tree.map(jnp.copy, state.params)))
            )
        )
    return state, seen


@functools.cache
def alone():
    trainer = trainer_on(mesh="data=1")
    return flatten(jax.device_get(trainer.averaged(train(trainer)[0]).params))


RULES = (spmd.Rule("up/kernel", ("data", "model")), spmd.Rule("out/kernel", ("model", None)))
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
    "server-8": (served(), "data=8"),
    "compiler-8": (spmd.Layout(gradients=spmd.Gradients("compiler")), "data=8"),
}


@pytest.mark.sampled(system=3)
@pytest.mark.parametrize("place", PLACES)
def test_average_on_a_mesh_equals_one_device(place):
    layout, mesh = PLACES[place]
    trainer = trainer_on(layout, mesh)
    state, seen = train(trainer)
    averaged = trainer.averaged(state)
    average = flatten(jax.device_get(trainer.placed.states.unpacked(averaged.params)))
    for path, value in average.items():
        np.testing.assert_allclose(
            value,
            mean_of([weights[path] for weights in seen], 0.5)[-1],
            rtol=0,
            atol=2e-7,
            err_msg=path,
        )
        np.testing.assert_allclose(value, alone()[path], rtol=0, atol=2e-6, err_msg=path)
        assert np.abs(value - seen[-1][path]).max() > 1e-5, path
    for (path, kept), moment, place in zip(
        flatten(state.opt.average).items(),
        jax.tree.leaves(state.opt.inner),
        flatten(averaged.params).values(),
        strict=True,
    ):
        assert kept.sharding.is_equivalent_to(moment.sharding, kept.ndim), path
        assert place.sharding == flatten(state.params)[path].sharding


def collectives(text):
    return sorted(
        re.findall(r"= (\S+) (all-\w+|reduce-scatter|collective-permute)(?:-start)?\(", text)
    )


@pytest.mark.system
@pytest.mark.parametrize("layout", ["data_parallel", "zero1", "fsdp"])
def test_average_adds_its_shard_and_no_collective(layout):
    compiled, weights = {}, {}
    for name, optimizer in (("plain", MOMENTUM), ("averaged", EMA)):
        trainer = trainer_on(layout, optimizer=optimizer)
        compiled[name] = trainer.prepare(data())[0].compile()
        weights[name] = train(trainer)[1][-1]
    for path, weight in weights["plain"].items():
        np.testing.assert_array_equal(weights["averaged"][path], weight, err_msg=path)
    plain, averaged = (collectives(compiled[name].as_text()) for name in ("plain", "averaged"))
    assert plain and averaged == plain
    opt = trainer.abstract_state.opt
    shard = sum(
        4 * int(np.prod(leaf.sharding.shard_shape(leaf.shape)))
        for leaf in jax.tree.leaves(opt.average)
    )
    more = [
        compiled[name].memory_analysis().argument_size_in_bytes for name in ("averaged", "plain")
    ]
    assert more[0] - more[1] == shard + 4, "the average, and the number of updates"
    full = sum(4 * leaf.size for leaf in jax.tree.leaves(opt.average))
    assert shard == full if layout == "data_parallel" else shard < 0.25 * full


@pytest.mark.system
def test_average_of_a_circular_pipeline_is_in_the_order_of_the_layers():
    """Its state keeps layers in the order of stages."""
    layout = dataclasses.replace(
        spmd.Layout.load("pipeline"), pipeline=spmd.Pipeline("stage", schedule="circular", groups=2)
    )
    trainer = trainer_on(layout, "data=4,stage=2")
    state, seen = train(trainer)
    kept = flatten(jax.device_get(trainer.placed.states.unpacked(trainer.averaged(state).params)))[
        "blocks/layers/kernel"
    ]
    np.testing.assert_allclose(
        kept,
        mean_of([weights["blocks/layers/kernel"] for weights in seen], 0.5)[-1],
        rtol=0,
        atol=2e-7,
    )
    # no equality with a tolerance: layers in another order differ by far more than 1e-3
    assert not np.allclose(
        jax.device_get(state.opt.average["blocks"]["layers"]["kernel"]), kept, atol=1e-3
    ), "the state has another order"


@pytest.mark.system
def test_average_has_only_weights_that_are_trained():
    layout = spmd.Layout(
        gradients=spmd.Gradients("reduce_scatter"),
        default=spmd.Default("shard:data"),
        train=spmd.Train(include="out/**"),
    )
    trainer = trainer_on(layout, optimizer=EMA)
    state, seen = train(trainer, 2)
    averaged = trainer.averaged(state)
    assert (
        set(flatten(state.opt.average))
        == {"out/kernel", "out/bias"}
        == set(flatten(averaged.params))
    )
    np.testing.assert_allclose(
        averaged.params["out"]["kernel"],
        mean_of([w["out/kernel"] for w in seen], 0.5)[-1],
        rtol=0,
        atol=2e-7,
    )
    assert averaged.frozen is state.frozen


@pytest.mark.system
def test_average_in_memory_of_the_host():
    layout = dataclasses.replace(spmd.Layout.load("fsdp"), memory=spmd.Memory("host"))
    trainer = trainer_on(layout)
    state, seen = train(trainer, 2)
    assert state.opt.average["out"]["kernel"].sharding.memory_kind == "pinned_host"
    averaged = trainer.averaged(state).params["out"]["kernel"]
    assert averaged.sharding == state.params["out"]["kernel"].sharding
    np.testing.assert_allclose(
        averaged, mean_of([w["out/kernel"] for w in seen], 0.5)[-1], rtol=0, atol=2e-7
    )


# evaluated, exported ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def result():
    model = spmd.FunctionalModel(
        lambda key: {"w": jnp.zeros((4, 1))}, lambda params, x: x @ params["w"]
    )
    x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    arrays = {"x": x, "y": x[:, :1] - x[:, 1:2]}
    how = {
        "loss": spmd.losses.mean_squared_error,
        "optimizer": average_weights(optax.sgd(0.05), decay=None),
        "layout": "fsdp",
    }
    mesh = spmd.make_mesh("data=4", devices=jax.devices()[:4])
    return spmd.fit(
        model,
        arrays,
        mesh=mesh,
        batch_size=32,
        steps=6,
        eval_data=arrays,
        eval_every=3,
        eval_average=True,
        **how,
    ), arrays


def test_evaluation_of_the_average(result):
    result, arrays = result
    weights = jax.device_get(result.state.opt.average["w"])
    loss = float(np.square(arrays["x"] @ weights - arrays["y"]).mean())
    assert_close(result.history["eval_loss"][-1], loss)
    assert result.averaged.evaluate(arrays)["loss"] == result.history["eval_loss"][-1]
    assert result.evaluate(arrays)["loss"] < 0.9 * loss, (
        "the newest weights are evaluated as before"
    )


def test_averaged_model_and_its_predictions(result):
    result, arrays = result
    weights = jax.device_get(result.state.opt.average["w"])
    np.testing.assert_allclose(
        result.averaged.predict(arrays["x"]), arrays["x"] @ weights, rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(
        result.averaged.model(arrays["x"]), arrays["x"] @ weights, rtol=1e-5, atol=1e-6
    )
    assert np.abs(result.model(arrays["x"]) - arrays["x"] @ weights).max() > 1e-2
    assert result.averaged is result.averaged and int(result.averaged.state.step) == 6


def test_export_of_the_average(result, tmp_path):
    result, arrays = result
    exported = spmd.load_exported(result.averaged.export(tmp_path / "averaged").folder)
    np.testing.assert_allclose(
        exported.predict(arrays["x"]), result.averaged.predict(arrays["x"]), rtol=1e-5, atol=1e-6
    )
    assert np.abs(exported.predict(arrays["x"]) - result.predict(arrays["x"])).max() > 1e-2


@pytest.mark.system
def test_average_of_a_trial_of_a_sweep(result):
    model = spmd.FunctionalModel(
        lambda key: {"w": jnp.zeros((4, 1))}, lambda params, x: x @ params["w"]
    )
    arrays = result[1]
    how = {"loss": spmd.losses.mean_squared_error, "batch_size": 32, "steps": 6, "shuffle": False}
    found = spmd.sweep(
        lambda: model,
        arrays,
        space={"rate": [0.015625, 0.0625]},
        search="grid",
        optimizer=lambda rate: average_weights(
            optax.inject_hyperparams(optax.sgd)(rate), decay=None
        ),
        **how,
    )
    alone = spmd.fit(
        model,
        arrays,
        optimizer=average_weights(optax.sgd(0.0625), decay=None),
        mesh="data=8",
        **how,
    )
    trial = next(trial for trial in found.trials if trial.values["rate"] == 0.0625).result()
    np.testing.assert_allclose(
        trial.averaged.state.params["w"], alone.averaged.state.params["w"], rtol=0, atol=2e-7
    )
    assert (
        np.abs(trial.averaged.state.params["w"] - np.asarray(trial.state.params["w"])).max() > 1e-3
    )


# of schedule-free optimizers ----------------------------------------------------------------------

FREE = optax.contrib.schedule_free_adamw(1e-2, warmup_steps=2)


@pytest.mark.system
@pytest.mark.parametrize("layout", ["data_parallel", "zero1", "fsdp"])
def test_schedule_free_on_a_mesh_equals_one_device(layout):
    averages = []
    for mesh, chosen in (("data=1", "data_parallel"), ("data=8", layout)):
        trainer = trainer_on(chosen, mesh, FREE)
        state, seen = train(trainer)
        averaged = flatten(jax.device_get(trainer.averaged(state).params))
        averages.append((averaged, seen[-1]))
    for path, value in averages[0][0].items():
        np.testing.assert_allclose(averages[1][0][path], value, rtol=0, atol=2e-6, err_msg=path)
        np.testing.assert_allclose(
            averages[1][1][path], averages[0][1][path], rtol=0, atol=2e-6, err_msg=path
        )
    params, opt = jax.device_get((state.params, state.opt))
    wanted = flatten(optax.contrib.schedule_free_eval_params(opt, params))
    for path, value in averages[1][0].items():
        np.testing.assert_allclose(value, wanted[path], rtol=0, atol=1e-7)
        assert np.abs(value - averages[1][1][path]).max() > 1e-5, "not the weights that are trained"


@pytest.mark.system
def test_evaluation_of_a_schedule_free_optimizer():
    model = spmd.FunctionalModel(
        lambda key: {"w": jnp.zeros((FEATURES, 5))}, lambda params, x: x @ params["w"]
    )
    how = {
        "loss": spmd.losses.cross_entropy,
        "batch_size": 32,
        "steps": 4,
        "eval_data": data(),
        "optimizer": FREE,
    }
    result = spmd.fit(model, data(), eval_average=True, **how)
    averaged = optax.contrib.schedule_free_eval_params(
        *jax.device_get((result.state.opt, result.state.params))
    )
    logits = data()["x"] @ averaged["w"]
    loss = float(optax.softmax_cross_entropy_with_integer_labels(logits, data()["y"]).mean())
    assert_close(result.history["eval_loss"][-1], loss)
    assert abs(result.evaluate(data())["loss"] - loss) > 1e-4


# errors -------------------------------------------------------------------------------------------


def prepare(layout="data_parallel", optimizer=EMA):
    trainer_on(layout, optimizer=optimizer).prepare(data())


def average_in(optimizer):
    trainer = trainer_on(optimizer=optimizer)
    trainer.averaged(trainer.init())


def only_kernels(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == "kernel", params)


ERRORS = {
    "decay of one": lambda: average_weights(MOMENTUM, decay=1),
    "decay of text": lambda: average_weights(MOMENTUM, decay="0.9"),
    "start below zero": lambda: average_weights(MOMENTUM, start=-1),
    "every of nothing": lambda: average_weights(MOMENTUM, every=0),
    "no optimizer": lambda: average_weights(optax.sgd),
    "schedule free in a chain": lambda: average_in(optax.chain(FREE, optax.scale(0.5))),
    "schedule free masked": lambda: average_in(optax.masked(FREE, only_kernels)),
    "no params": lambda: EMA.update(jnp.ones(2), EMA.init(jnp.ones(2))),
    "in a chain": lambda: prepare(optimizer=optax.chain(EMA, optax.scale(0.5))),
    "in a named chain": lambda: prepare(
        optimizer=optax.named_chain(("average", EMA), ("scale", optax.scale(0.5)))
    ),
    "around steps without an update": lambda: prepare(
        optimizer=average_weights(optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation())
    ),
    "masked": lambda: prepare(optimizer=optax.masked(EMA, only_kernels)),
    "asynchronous": lambda: prepare(served(mode="asynchronous")),
    "local": lambda: prepare(served(mode="local", every=2)),
    "rounded updates": lambda: prepare(
        dataclasses.replace(
            spmd.Layout.load("zero1"),
            gradients=spmd.Gradients("reduce_scatter", weights="bfloat16"),
        )
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_average_weights_that_cannot_be(name, golden):
    with pytest.raises((OptimizerError, OptionError)) as caught:
        ERRORS[name]()
    golden(f"weight_average_{name.replace(' ', '_')}", str(caught.value))


def test_average_that_is_not_kept(golden):
    model = spmd.FunctionalModel(
        lambda key: {"w": jnp.zeros((FEATURES, 5))}, lambda params, x: x @ params["w"]
    )
    how = {"loss": spmd.losses.cross_entropy, "optimizer": MOMENTUM}
    trainer = spmd.Trainer(model, **how)
    with pytest.raises(OptimizerError) as caught:
        trainer.averaged(trainer.init())
    golden("weight_average_that_is_not_kept", str(caught.value))
    how |= {"batch_size": 32, "steps": 1, "eval_average": True}
    with pytest.raises(OptimizerError) as caught:
        spmd.fit(model, data(), eval_data=data(), **how)
    golden("weight_average_that_is_not_kept", str(caught.value))
    with pytest.raises(OptionError, match="eval_average is True, but there is nothing to evaluate"):
        spmd.fit(model, data(), **how)


def test_average_weights_may_be_a_part_of_a_chain():
    prepare(optimizer=optax.chain(optax.clip_by_global_norm(1.0), EMA))
