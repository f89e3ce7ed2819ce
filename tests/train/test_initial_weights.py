"""Training starts from the weights that it is given, whatever kind of model has them; and from a
checkpoint's under another optimizer.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import spmd
from spmd.base.tree import flatten
from spmd.errors import CheckpointError, ModelError, OptionError

X = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
DATA = {"x": X, "y": X[:, :2]}


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x, train=False):
        return linen.Dense(2)(linen.BatchNorm(use_running_average=not train)(linen.Dense(8)(x)))


class Boxed(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(
            2,
            kernel_init=linen.with_partitioning(
                linen.initializers.lecun_normal(), ("embed", "mlp")
            ),
        )(x)


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.up, self.norm, self.out = (
            nnx.Linear(4, 8, rngs=rngs),
            nnx.BatchNorm(8, rngs=rngs),
            nnx.Linear(8, 2, rngs=rngs),
        )

    def __call__(self, x):
        return self.out(self.norm(self.up(x)))


MODELS = {
    "linen": Linen,
    "linen with names": Boxed,
    "nnx": lambda: lambda: Nnx(nnx.Rngs(0)),
    "functional": lambda: spmd.FunctionalModel(
        lambda key: {"w": jax.random.normal(key, (4, 2))},
        lambda params, x: x @ jnp.asarray(params["w"]),
    ),
}


def fit(model, steps=2, optimizer=None, **options):
    options = {
        "loss": spmd.losses.mean_squared_error,
        "optimizer": optimizer or optax.adam(0.01),
        "batch_size": 16,
        **options,
    }
    return spmd.fit(model, DATA, steps=steps, **options)


def values(tree):
    return {path: np.asarray(leaf) for path, leaf in flatten(tree).items()}


def same(left, right):
    left, right = values(left), values(right)
    return left.keys() == right.keys() and all(
        np.array_equal(left[path], right[path]) for path in left
    )


def kinds(*fast):
    return [kind if kind in fast else pytest.param(kind, marks=pytest.mark.slow) for kind in MODELS]


@pytest.mark.system
@pytest.mark.parametrize("kind", kinds("linen", "functional"))
def test_fit_starts_from_the_model_of_a_result(kind):
    """A rate of 0 leaves the weights as they were given; another seed would have drawn others."""
    result = fit(MODELS[kind](), seed=1)
    before = jax.device_get((result.state.params, result.state.stats))
    again = fit(result.model, optimizer=optax.sgd(0.0), seed=2, steps=1)
    assert same(again.state.params, before[0]) and not same(
        fit(MODELS[kind](), optimizer=optax.sgd(0.0), seed=2).state.params, before[0]
    )
    assert same(result.state.params, before[0]) and same(result.state.stats, before[1]), (
        "what is given is copied"
    )
    assert int(again.state.step) == 1


@pytest.mark.system
@pytest.mark.parametrize("layout", ["fsdp", pytest.param("data_parallel", marks=pytest.mark.slow)])
def test_training_given_linen_weights_equals_the_uninterrupted_run(layout):
    """Batch statistics are given too: without momentum nothing else carries over from step to
    step.
    """
    options = {"optimizer": optax.sgd(0.1), "layout": layout, "shuffle": False}
    uninterrupted, half = fit(Linen(), steps=4, **options), fit(Linen(), steps=2, **options)
    rest = fit(half.model, steps=2, **options)
    assert same(rest.state.params, uninterrupted.state.params) and same(
        rest.state.stats, uninterrupted.state.stats
    )


@pytest.mark.system
def test_linen_module_bound_to_numpy_arrays():
    module = Linen()
    variables = jax.tree.map(np.asarray, module.init(jax.random.key(3), X))
    result = fit(module.bind(variables), optimizer=optax.sgd(0.0), steps=1)
    assert same(result.state.params, variables["params"])


def test_functional_model_bound_to_weights():
    model = spmd.FunctionalModel(
        lambda key: {"w": jnp.zeros((4, 2))}, lambda params, x: x @ params["w"]
    )
    weights = {"w": np.full((4, 2), 0.5, np.float64)}
    result = fit(model.bind(weights), optimizer=optax.sgd(0.0), steps=1)
    assert same(result.state.params, {"w": np.full((4, 2), 0.5, np.float32)})


def test_arrays_that_a_bound_module_lacks_are_a_table():
    module = Linen()
    params = dict(module.init(jax.random.key(3), X)["params"])
    params["Dense_1"] = {"kernel": np.zeros((8, 5), np.float32)}
    with pytest.raises(ModelError) as raised:
        fit(module.bind({"params": params}))
    assert str(raised.value) == (
        "the linen module is bound to other arrays than its `init` makes\n4 problems:\n\n"
        "  params/Dense_1/bias\n      given nothing, the module makes float32[8]\n\n"
        "  params/Dense_1/kernel\n      given float32[8, 5], the module makes float32[4, 8]\n\n"
        "  batch_stats/BatchNorm_0/mean\n      given nothing, the module makes float32[8]\n\n"
        "  batch_stats/BatchNorm_0/var\n      given nothing, the module makes float32[8]\n\n"
        "    fix: arrays of the shapes that it makes."
    )


@pytest.mark.parametrize("stateful", [False, True])
def test_bind_of_other_shapes_than_init_makes_is_a_table(stateful):
    params, state = {"w": jnp.zeros((4, 2)), "b": jnp.zeros(2)}, {"mean": jnp.zeros(4)}

    def init(key):
        return (params, state) if stateful else params

    model = spmd.FunctionalModel(
        init, lambda params, *inputs: inputs[-1] @ params["w"], stateful=stateful
    )
    arrays = (
        {"w": np.zeros((2, 4), np.float32)},
        *([{"mean": np.zeros((1, 4), np.float32)}] if stateful else []),
    )
    with pytest.raises(ModelError) as raised:
        model.bind(*arrays)
    assert str(raised.value) == (
        f"bind: the arrays that are given are not of the shapes that init makes\n{2 + stateful} "
        "problems:\n\n"
        "  params/b\n      given nothing, init makes float32[2]\n\n"
        "  params/w\n      given float32[2, 4], init makes float32[4, 2]\n\n"
        + "  state/mean\n      given float32[1, 4], init makes float32[4]\n\n"
        * stateful
        + "    fix: arrays of the shapes that init makes; or a FunctionalModel whose init makes "
        "these."
    )
    model.bind(*((params, state) if stateful else (params,)))


def test_bind_needs_no_init_that_can_be_traced():
    model = spmd.FunctionalModel(
        lambda key: {"w": np.zeros(int(key))}, lambda params, x: x @ params["w"]
    )
    assert model.bind({"w": np.ones((4, 2))})(np.ones((1, 4))).shape == (1, 2)


def trainer(model, optimizer, **options):
    made = spmd.Trainer(model, loss=spmd.losses.mean_squared_error, optimizer=optimizer, **options)
    made.prepare({name: leaf[:16] for name, leaf in DATA.items()})
    return made


@pytest.mark.system
@pytest.mark.parametrize("kind", kinds("nnx"))
def test_restore_of_params_under_another_optimizer(kind, tmp_path):
    saved = fit(MODELS[kind](), checkpoint=tmp_path, seed=1).state
    other = trainer(MODELS[kind](), optax.sgd(0.1, momentum=0.9), seed=2)
    with pytest.raises(CheckpointError, match="does not fit this model and optimizer") as raised:
        other.restore(tmp_path)
    assert (
        str(raised.value)
        .partition("\n\n    fix: ")[2]
        .startswith(
            'parameters and batch statistics fit. Trainer.restore(folder, only="params") puts them '
            "into a new state of this optimizer,"
        )
    )
    state = other.restore(tmp_path, only="params")
    assert (
        same(state.params, saved.params) and same(state.stats, saved.stats) and int(state.step) == 0
    )
    fresh = other.init()
    assert (
        same(state.opt, jax.tree.map(jnp.zeros_like, fresh.opt))
        and same(state.key, fresh.key)
        and same(state.rngs, fresh.rngs)
    )
    state, _ = other.step(state, {name: leaf[:16] for name, leaf in DATA.items()})
    assert int(state.step) == 1 and not same(state.params, saved.params)
    assert int(fit(other.rebuild(state), steps=1).state.step) == 1


@pytest.mark.system
@pytest.mark.parametrize(
    "saved_layout, layout",
    [
        pytest.param("data_parallel", "fsdp", marks=pytest.mark.slow),
        ("fsdp", "parameter_server"),
        pytest.param("parameter_server", "data_parallel", marks=pytest.mark.slow),
    ],
)
def test_restore_of_params_under_another_layout(saved_layout, layout, tmp_path):
    model = MODELS["nnx"]()
    saved = fit(model, checkpoint=tmp_path, layout=saved_layout)
    other = trainer(model, optax.sgd(0.1), layout=layout)
    restored = other.rebuild(other.restore(tmp_path, only="params"))
    assert same(nnx.to_pure_dict(nnx.state(restored)), nnx.to_pure_dict(nnx.state(saved.model)))


@pytest.mark.system
def test_restore_of_params_of_another_model_is_a_table(tmp_path):
    fit(MODELS["nnx"](), checkpoint=tmp_path)

    def wider():
        return nnx.Linear(4, 2, rngs=nnx.Rngs(0))

    with pytest.raises(CheckpointError) as raised:
        trainer(wider, optax.sgd(0.1)).restore(tmp_path, only="params")
    assert str(raised.value).startswith(
        f"the checkpoint of step 2 in {tmp_path} does not fit this model\n"
    )
    assert "opt/" not in str(raised.value) and "stats/norm/mean" in str(raised.value)


@pytest.mark.system
def test_restore_of_another_model_does_not_offer_its_params(tmp_path):
    fit(MODELS["nnx"](), checkpoint=tmp_path)
    with pytest.raises(CheckpointError) as raised:
        trainer(lambda: nnx.Linear(4, 2, rngs=nnx.Rngs(0)), optax.sgd(0.1)).restore(tmp_path)
    assert "only=" not in str(raised.value)


@pytest.mark.system
def test_resume_under_another_optimizer_offers_the_params(tmp_path):
    model = MODELS["nnx"]()
    fit(model, checkpoint=tmp_path)
    with pytest.raises(
        CheckpointError,
        match=r"fix: parameters and batch statistics fit\. Trainer\.restore\(folder, "
        r'only="params"\)',
    ):
        fit(model, checkpoint=tmp_path, resume=True, optimizer=optax.sgd(0.1))


class OtherHead(Nnx):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.out = nnx.Linear(8, 5, rngs=rngs)


def other_head(**options):
    return spmd.Trainer(
        lambda: OtherHead(nnx.Rngs(3)),
        loss=spmd.losses.mean_squared_error,
        optimizer=optax.sgd(0.1),
        **options,
    )


def test_restore_of_a_part_keeps_the_new_head(tmp_path, caplog):
    """The error about another head offers a pattern; with it all but the head are those of the
    checkpoint.
    """
    saved = fit(MODELS["nnx"](), checkpoint=tmp_path).state
    other = other_head(layout="fsdp")
    with pytest.raises(
        CheckpointError, match=r"6 arrays of the model fit\. Trainer\.restore\(folder, only="
    ) as raised:
        other.restore(tmp_path)
    pattern = raised.value.fix.partition('only="')[2].partition('"')[0]
    state, fresh = other.restore(tmp_path, only=pattern), other.init()
    for name in ("up", "norm"):
        assert same(state.params[name], saved.params[name]) and not same(
            state.params[name], fresh.params[name]
        )
    assert (
        same(state.stats, saved.stats)
        and same(state.params["out"], fresh.params["out"])
        and int(state.step) == 0
    )
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == jax.tree.map(
        lambda leaf: leaf.sharding, other.abstract_state
    )
    line = (
        f"restored from step 2: 6 arrays of the model that match {pattern}; out/bias, out/kernel "
        "begin as in a new state."
    )
    assert line in caplog.text
    data = {"x": X, "y": np.zeros((32, 5), np.float32)}
    options = {
        "loss": spmd.losses.mean_squared_error,
        "optimizer": optax.sgd(0.1),
        "batch_size": 16,
        "steps": 1,
    }
    assert int(spmd.fit(other.rebuild(state), data, **options).state.step) == 1


def test_restore_of_a_part_that_does_not_fit(tmp_path):
    fit(MODELS["nnx"](), checkpoint=tmp_path)
    other = other_head()
    with pytest.raises(
        CheckpointError, match=r"does not fit this model\n2 problems.*\n\n  params/out/bias\n"
    ) as raised:
        other.restore(tmp_path, only="{out,up}/*")
    assert {problem.where for problem in raised.value.problems} == {
        "params/out/bias",
        "params/out/kernel",
    }
    with pytest.raises(
        OptionError,
        match=r"only='upp/\*' matches no parameter .*\n    fix: \"up/\*\", which matches 2\.",
    ):
        other.restore(tmp_path, only="upp/*")
    with pytest.raises(
        OptionError,
        match=r"only='param' matches no parameter .*\n    fix: did you mean \"params\"\?",
    ):
        other.restore(tmp_path, only="param")
    with pytest.raises(OptionError, match=r"only=3\."):
        other.restore(tmp_path, only=3)
    with pytest.raises(
        CheckpointError,
        match=r"parameters of the model are packed, or in the order of stages\.\n    fix: "
        r"only=\"params\"",
    ):
        other_head(layout="parameter_server").restore(tmp_path, only="up/*")
