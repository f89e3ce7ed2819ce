"""A mesh that is set with `jax.set_mesh` around the library: it is the default, and the layout says
where arrays are.
"""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

import spmd
from spmd.base.explicit_arrays import MOST_OBJECTS, MOST_PARTS, closed_over
from spmd.errors import MeshError
from spmd.mesh import _names_explicit_axes, outside_of_mesh

ROWS = np.random.default_rng(0).normal(size=(32, 16)).astype("float32")
DATA = {"x": ROWS, "label": (np.arange(32) % 10).astype("int32")}
OPTIONS = {"loss": spmd.losses.cross_entropy, "optimizer": optax.adam(1e-2)}
TYPES = pytest.mark.parametrize(
    "types", [AxisType.Explicit, AxisType.Auto], ids=["explicit", "auto"]
)


class Net(nnx.Module):
    """One hidden layer, whose kernel names a mesh axis."""

    def __init__(self, rngs: nnx.Rngs):
        kernel = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "data"))
        self.hidden, self.out = (
            nnx.Linear(16, 64, kernel_init=kernel, rngs=rngs),
            nnx.Linear(64, 10, rngs=rngs),
        )

    def __call__(self, x):
        return self.out(nnx.relu(self.hidden(x)))


def a_mesh(types, **sizes):
    sizes = sizes or {"data": 8}
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(types,) * len(sizes))


def losses(model, **options):
    return spmd.fit(
        model, DATA, batch_size=16, steps=4, progress=False, **OPTIONS, **options
    ).history["loss"]


@pytest.fixture(scope="module")
def expected():
    return losses(lambda: Net(nnx.Rngs(0)), layout="fsdp")


@pytest.mark.system
@TYPES
def test_a_model_made_under_the_mesh_trains_as_any(expected, types):
    with jax.set_mesh(a_mesh(types)):
        model = Net(nnx.Rngs(0))
        assert model.hidden.kernel.sharding.mesh.axis_types == (types,)  # so it is the mesh's
        assert losses(model, layout="fsdp") == expected
        assert jax.sharding.get_mesh().axis_types == (types,)  # as it was


@pytest.mark.system
@TYPES
def test_an_own_loop(expected, types):
    with jax.set_mesh(a_mesh(types)):
        trainer = spmd.Trainer(Net(nnx.Rngs(0)), layout="fsdp", **OPTIONS)
        state, found = trainer.init(), []
        for info in trainer.steps(DATA, batch_size=16, epochs=2, state=state):
            found.append(info.metrics["loss"])
            state = info.state
        outputs = trainer.predict(state, ROWS)
        measured = trainer.evaluate(state, DATA, batch_size=16)
        assert isinstance(trainer.rebuild(state), Net)
    assert found == expected
    logits = np.asarray(outputs)
    wanted = np.log(np.exp(logits).sum(-1)) - logits[np.arange(32), DATA["label"]]
    assert measured["loss"] == pytest.approx(wanted.mean(), rel=1e-5)


def test_it_is_the_default_mesh():
    with jax.set_mesh(a_mesh(AxisType.Explicit, data=2, model=4)):
        trainer = spmd.Trainer(
            lambda: Net(nnx.Rngs(0)), layout=spmd.Layout(axes={"data": "model"}), **OPTIONS
        )
        assert (
            dict(trainer.mesh.shape) == {"data": 2, "model": 4}
            and trainer.mesh.axis_types == (AxisType.Auto,) * 2
        )
        assert trainer.init().params["hidden"]["kernel"].sharding.spec == PartitionSpec(
            None, "model"
        )
        other = spmd.Trainer(lambda: Net(nnx.Rngs(0)), layout="fsdp", mesh="data=8", **OPTIONS)
        assert dict(other.mesh.shape) == {"data": 8}  # of two, the one that is given


@pytest.mark.system
def test_a_plan_is_for_its_target():
    batch = {
        "x": jax.ShapeDtypeStruct((16, 16), "float32"),
        "label": jax.ShapeDtypeStruct((16,), "int32"),
    }
    with jax.set_mesh(a_mesh(AxisType.Explicit, data=2, model=4)):
        plan = spmd.plan(lambda: Net(nnx.Rngs(0)), batch, target="4xcpu", layout="fsdp", **OPTIONS)
    assert plan.cluster.count == 4


def test_an_error_leaves_the_mesh_set():
    with jax.set_mesh(a_mesh(AxisType.Explicit)):
        with pytest.raises(spmd.SpmdError):
            losses(lambda: Net(nnx.Rngs(0)), layout="no such layout")
        assert jax.sharding.get_mesh().axis_names == ("data",)


@pytest.mark.system
def test_a_sweep_has_axes_of_its_own():
    with jax.set_mesh(a_mesh(AxisType.Explicit)):
        found = spmd.sweep(
            lambda: Net(nnx.Rngs(0)),
            DATA,
            space={"learning_rate": [1e-2, 1e-3]},
            loss=spmd.losses.cross_entropy,
            optimizer=optax.adam,
            search="grid",
            batch_size=16,
            steps=2,
            progress=False,
        )
    assert len(found.trials) == 2


@pytest.mark.system
@TYPES
def test_an_ensemble(types):
    one, two = (
        spmd.fit(lambda seed=seed: Net(nnx.Rngs(seed)), DATA, batch_size=16, steps=1, **OPTIONS)
        for seed in (0, 1)
    )
    outside = spmd.Ensemble([one, two]).predict(ROWS)
    with jax.set_mesh(a_mesh(types)):
        np.testing.assert_array_equal(spmd.Ensemble([one, two]).predict(ROWS), outside)


@pytest.mark.system
def test_changes_of_a_plan():
    batch = {
        "x": jax.ShapeDtypeStruct((16, 16), "float32"),
        "label": jax.ShapeDtypeStruct((16,), "int32"),
    }
    plan = spmd.plan(lambda: Net(nnx.Rngs(0)), batch, target="8xcpu", **OPTIONS)
    with jax.set_mesh(a_mesh(AxisType.Explicit)):
        assert "context mesh" not in str(plan.changes())


def test_a_mesh_without_devices_is_no_default():
    with jax.sharding.use_abstract_mesh(a_mesh(AxisType.Auto).abstract_mesh):
        assert spmd.Trainer(lambda: Net(nnx.Rngs(0)), **OPTIONS).mesh.size == 8


def weighted_loss(weights):
    def loss(model, batch):
        return spmd.losses.cross_entropy(model, batch) * weights[batch["label"]]

    return {"loss": loss}


def with_metric(weights):
    return {
        "metrics": {
            "weighted": functools.partial(
                lambda scale, model, batch: (model(batch["x"]) * scale).sum(-1), weights
            )
        }
    }


CLOSED = {  # arguments that use an array of ten numbers, and what an error calls it
    "the loss": (
        weighted_loss,
        "weights float32[10], in weighted_loss.<locals>.loss (test_context_mesh.py:",
    ),
    "a schedule": (
        lambda table: {"optimizer": optax.sgd(lambda count: table[count])},
        "table float32[10], in <lambda>.<locals>.<lam",
    ),
    "a rate": (
        lambda table: {"optimizer": optax.sgd(table[0])},
        "step_size float32[], in scale.<locals>.update_fn (",
    ),
    "a metric": (with_metric, "argument 1 float32[10], in with_metric.<locals>.<lambda>"),
}


@pytest.mark.system
@pytest.mark.parametrize(("make", "named"), CLOSED.values(), ids=CLOSED)
def test_arrays_with_explicit_axes_are_named(make, named):
    """And the fix of the error works."""

    def fit(arguments):
        given = {**OPTIONS, **arguments, "eval_data": DATA}
        return spmd.fit(
            lambda: Net(nnx.Rngs(0)),
            DATA,
            batch_size=16,
            steps=2,
            progress=False,
            mesh="data=8",
            **given,
        )

    with jax.set_mesh(a_mesh(AxisType.Explicit)):
        table = jnp.linspace(0.1, 0.2, 10)
        arguments = make(table)
        with pytest.raises(MeshError, match="made under a mesh with explicit axes") as raised:
            fit(arguments)
    assert named in str(raised.value)
    with pytest.raises(MeshError) as again:  # no mesh is set now
        fit(arguments)
    assert (
        str(again.value) == str(raised.value)
        and "jax.numpy.asarray(numpy.asarray(array))" in raised.value.fix
    )
    fit(make(jnp.asarray(np.asarray(table))))


@pytest.mark.system
def test_other_errors_are_as_they_are():
    with jax.set_mesh(a_mesh(AxisType.Explicit)):
        table = jnp.linspace(0.1, 0.2, 10)

    def loss(model, batch):
        return spmd.losses.cross_entropy(model, batch) * np.asarray(table).sum()  # a number

    def fit(**options):
        return spmd.fit(
            lambda: Net(nnx.Rngs(0)),
            DATA,
            batch_size=16,
            steps=1,
            loss=loss,
            optimizer=optax.sgd(0.1),
            **options,
        )

    assert int(fit().state.step) == 1
    with pytest.raises(spmd.errors.LayoutError):
        fit(layout="no such layout")

    def fail(info):
        raise ValueError("of a callback")

    with pytest.raises(spmd.errors.CallbackError, match="of a callback"):
        fit(callbacks=[fail])


def test_arrays_are_found_inside_of_what_functions_hold():
    with jax.set_mesh(a_mesh(AxisType.Explicit)):
        array = jnp.ones(3)
    teacher = types.SimpleNamespace(weights={"kernel": [array]})
    teacher.itself = teacher

    def loss(model, batch, *, scale=teacher):
        return scale

    assert [line.partition(" (")[0] for line in closed_over([loss])] == [
        "scale.weights['kernel'][0] float32[3], in "
        "test_arrays_are_found_inside_of_what_functions_hold.<locals>.loss"
    ]
    assert closed_over([teacher, {"model": array}, jax.jit(lambda x: x)]) == [], (
        "what no function holds is copied to the mesh"
    )
    assert len(closed_over([jax.jit(lambda x: x + array)])) == 1


def test_arrays_that_methods_use_are_found():
    with jax.set_mesh(a_mesh(AxisType.Explicit)):
        array = jnp.ones(3)

    class Scaled:
        def __call__(self, x):
            return x * array

    for root in (Scaled(), lambda: Scaled()):
        assert len(closed_over([root])) == 1


@pytest.mark.system
def test_few_objects_are_looked_at():
    """However large a container is: each element here counts how often it is looked at."""
    looked = []

    class Counted:
        def __getattribute__(self, name):
            if name == "__class__":  # isinstance asks for it
                looked.append(id(self))
            return super().__getattribute__(name)

    many = [Counted() for _ in range(3 * MOST_PARTS)]
    with jax.set_mesh(a_mesh(AxisType.Explicit)):
        array = jnp.ones(3)

    def loss():
        return many, array

    assert len(closed_over([loss])) == 1, "what comes after a large container is found"
    assert 0 < len(set(looked)) <= MOST_PARTS
    looked.clear()
    closed_over(
        [[[Counted() for _ in range(MOST_PARTS)] for _ in range(2 + MOST_OBJECTS // MOST_PARTS)]]
    )
    assert 0 < len(set(looked)) <= MOST_OBJECTS


def test_an_object_that_cannot_be_looked_at_is_passed_over():
    class Strict:
        __slots__ = ("names",)

        def __getattr__(self, name):
            raise KeyError(name)

    class Broken(dict):
        def items(self):
            raise RuntimeError("no items")

    strict, broken = Strict(), Broken()
    with jax.set_mesh(a_mesh(AxisType.Explicit)):
        array = jnp.ones(3)
    assert len(closed_over([lambda: (strict, broken, array)])) == 1


def fit_with(loss, data=DATA):
    return spmd.fit(
        lambda: Net(nnx.Rngs(0)),
        data,
        batch_size=16,
        steps=1,
        progress=False,
        loss=loss,
        optimizer=optax.sgd(0.1),
    )


@pytest.mark.system
def test_an_error_of_another_kind_is_not_about_arrays_it_names(monkeypatch):
    """Nor is anything searched for it."""
    monkeypatch.setattr("spmd.mesh.closed_over", lambda roots: pytest.fail("searched"))
    with jax.set_mesh(a_mesh(AxisType.Explicit)):
        table = jnp.linspace(0.1, 0.2, 10)

    def loss(model, batch):
        return spmd.losses.cross_entropy(model, batch) * np.asarray(table)[:3]

    with pytest.raises(spmd.errors.LossError):
        fit_with(loss)

    def batches():
        yield {name: rows[:16] for name, rows in DATA.items()}
        raise ValueError("disk broke")

    def good(model, batch):
        return spmd.losses.cross_entropy(model, batch) * np.asarray(table).sum()

    with pytest.raises(Exception, match="disk broke") as raised:
        spmd.fit(
            lambda: Net(nnx.Rngs(0)),
            batches(),
            steps=4,
            progress=False,
            loss=good,
            optimizer=optax.sgd(0.1),
        )
    assert not isinstance(raised.value, MeshError)


@pytest.mark.parametrize(
    ("error", "explicit"),
    [
        (
            ValueError(
                "Got one mesh: AbstractMesh('data': 8, axis_types=(Auto,)) and another: "
                "AbstractMesh('a': 8, axis_types=(Explicit,))"
            ),
            True,
        ),
        (
            ValueError(
                "aval f32[8@data,8]({Explicit: ('data',)}). Please enter your `jit` into a mesh "
                "context via `jax.set_mesh`."
            ),
            True,
        ),
        (
            TypeError(
                "The input carry c has type float32[8,8] but the output carry component has type "
                "float32[8@data,8]."
            ),
            True,
        ),
        (ValueError("AbstractMesh('data': 8, axis_types=(Auto,))"), False),
        (ValueError("Explicit is better than implicit: me@example.org"), False),
        (TypeError("mul got incompatible shapes for broadcasting: (16,), (3,)."), False),
        (MeshError("axis_types=(Explicit,)", fix="none."), False),
    ],
)
def test_what_jax_says_of_explicit_axes(error, explicit):
    assert _names_explicit_axes(error) is explicit


def test_what_jax_says_of_a_product_with_explicit_axes():
    with jax.set_mesh(a_mesh(AxisType.Explicit)):
        array = jax.device_put(np.ones((8, 8)), PartitionSpec("data"))
    with pytest.raises(Exception, match="illegally sharded") as raised:
        array @ array.T
    assert _names_explicit_axes(raised.value)


def test_an_error_that_cannot_be_shown_is_raised_as_it_is():
    class Mute(Exception):
        def __str__(self):
            raise KeyError("no text")

    @outside_of_mesh()
    def fail():
        raise Mute

    with pytest.raises(Mute):
        fail()
