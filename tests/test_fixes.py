"""Every error has a fix, and the ones that users see first have one that works."""

import ast
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import spmd
from spmd import errors

ROOT = pathlib.Path(errors.__file__).parent
X, Y = np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32), np.arange(32) % 3
FIT = {
    "loss": spmd.losses.cross_entropy,
    "optimizer": optax.sgd(0.1),
    "batch_size": 8,
    "steps": 4,
    "progress": False,
}
WITHOUT_FIX = {  # by file and class, why
    (
        "launch/notebook.py",
        "ProcessError",
    ): "it is another process's error, with its traceback and its fix",
    ("planner/compile.py", "CompileError"): "the compiler's own text, of which nothing is known",
}


class Net(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(3)(x)


class Wide(linen.Module):
    width: int

    @linen.compact
    def __call__(self, x):
        return linen.Dense(self.width)(x)


class NnxNet(nnx.Module):
    def __init__(self, width, *, rngs):
        self.layer = nnx.Linear(8, width, rngs=rngs)

    def __call__(self, x):
        return self.layer(x)


def error(kind, function=spmd.fit, model=None, data=(X, Y), **options):
    with pytest.raises(errors.SpmdError) as caught:
        function(Net() if model is None else model, data, **(FIT | options))
    assert type(caught.value) is kind
    return caught.value


def raised_errors():
    """(file, line, class) of every error of the library that is made without a fix."""
    kinds = {
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.SpmdError)
    }
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            made = (
                node.exc
                if isinstance(node, ast.Raise)
                else node.value
                if isinstance(node, ast.Return)
                else None
            )
            if not isinstance(made, ast.Call):
                continue
            name = getattr(made.func, "id", getattr(made.func, "attr", ""))
            if name in kinds and not any(keyword.arg in ("fix", None) for keyword in made.keywords):
                yield path.relative_to(ROOT).as_posix(), node.lineno, name


def test_every_error_has_a_fix():
    without = [
        (file, line, kind)
        for file, line, kind in raised_errors()
        if (file, kind) not in WITHOUT_FIX
    ]
    assert not without
    assert {(file, kind) for file, _, kind in raised_errors()} == set(WITHOUT_FIX)


@pytest.mark.parametrize(
    "loss",
    [optax.softmax_cross_entropy_with_integer_labels, optax.losses.squared_error],
    ids=lambda loss: loss.__name__,
)
def test_loss_of_optax(loss):
    raised = error(errors.LossError, loss=loss)
    assert (
        f"loss=optax.{loss.__name__} takes " in raised.summary
        and "a loss takes the model and a batch" in raised.summary
    )
    fixed = eval(raised.fix.partition(", or with")[0], {"optax": optax})
    y = Y if "integer" in loss.__name__ else np.eye(3, dtype=np.float32)[Y]
    assert spmd.fit(Net(), (X, y), **(FIT | {"loss": fixed})).state.step == 4


def test_loss_by_its_name():
    assert error(errors.LossError, loss="cross_entropy").fix == "spmd.losses.cross_entropy."
    assert error(errors.LossError, loss="mse").fix.startswith("such as")


def test_loss_of_logits_and_labels():
    def mine(logits, labels):
        return (logits - labels).mean()

    assert "takes logits and labels" in error(errors.LossError, loss=mine).summary


def test_examples_by_number_are_no_batches():
    class Examples:
        def __len__(self):
            return len(X)

        def __getitem__(self, number):
            return X[number], Y[number]

    fix = error(errors.DataError, data=Examples()).fix
    arrays = eval(fix.partition(", which holds")[0], {"jax": jax, "numpy": np, "data": Examples()})
    assert np.array_equal(arrays[0], X) and np.array_equal(arrays[1], Y)
    grain = pytest.importorskip("grain")
    batches = eval(
        fix.partition("needed, ")[2].removesuffix("."), {"grain": grain, "data": Examples()}
    )
    assert spmd.fit(Net(), batches, **(FIT | {"batch_size": None, "steps": 1})).state


@pytest.mark.parametrize(
    ("path", "fix"),
    {
        "train.csv": 'spmd.data.csv("train.csv", batch_size=...).',
        "a/b.parquet": 'spmd.data.parquet("a/b.parquet", batch_size=...).',
        "x.npy": 'numpy.load("x.npy").',
        "folder": "a dict or tuple of arrays, an iterable of batches, or a grain data set; "
        "spmd.data "
        "reads files.",
    }.items(),
)
def test_path_in_the_place_of_data(path, fix):
    assert error(errors.DataError, data=path).fix == fix
    assert error(errors.DataError, data=pathlib.Path(path)).fix == fix


def test_class_in_the_place_of_a_model():
    assert error(errors.ModelError, model=Net).fix == "Net()."
    assert error(errors.ModelError, model=Wide).fix == "Wide(width=...)."
    assert (
        error(errors.ModelError, model=NnxNet).fix
        == "a function that builds it: lambda: NnxNet(width=..., rngs=nnx.Rngs(0))."
    )


def test_class_in_the_place_of_a_sweeps_model():
    more = {"space": {"width": [3, 4]}, "search": "grid", "optimizer": lambda: optax.sgd(0.1)}
    raised = error(errors.OptionError, spmd.sweep, NnxNet, **more)
    assert (
        raised.fix == "a function that gives it: make_model=lambda width: NnxNet(width=width, "
        "rngs=nnx.Rngs(0))."
    )
    assert (
        len(
            spmd.sweep(
                lambda width: NnxNet(width=width, rngs=nnx.Rngs(0)), (X, Y), **(FIT | more)
            ).trials
        )
        == 2
    )


def test_argument_that_is_not_in_the_space():
    more = {"space": {"lr": [0.1]}, "search": "grid"}
    raised = error(
        errors.OptionError,
        spmd.sweep,
        lambda: Net(),
        optimizer=lambda momentum, lr: optax.sgd(lr, momentum),
        **more,
    )
    assert raised.fix == "momentum=[...] in the space, or a default for it."
    raised = error(
        errors.OptionError, spmd.sweep, lambda: Net(), optimizer=lambda lrs: optax.sgd(lrs), **more
    )
    assert raised.fix == 'did you mean "lr" for it? Or a default for it.'


@pytest.mark.parametrize(
    ("word", "fix"), {"None": '"-" for a dim', "True": "true, in", "False": "false, in"}.items()
)
def test_words_of_python_in_toml(word, fix, tmp_path):
    (tmp_path / "mine.toml").write_text(
        f'[[params]]\npath = "**/kernel"\nspec = [{word}, "data"]\n'
    )
    assert error(errors.LayoutError, layout=tmp_path / "mine.toml").fix.startswith(fix)


def test_nan_in_the_inputs_is_named():
    x = X.copy()
    x[[3, 21], 2] = np.nan
    data = {"x": x, "y": Y}
    raised = error(errors.DivergedError, data=data, shuffle=False)
    assert (
        raised.fix.startswith("correct the data: x is nan in row 3 of the data. If")
        and "at the first step" in raised.summary
    )
    raised = error(errors.DivergedError, data={"x": x[8:], "y": Y[8:]}, shuffle=False)
    assert (
        raised.fix.startswith("correct the data: x is nan in row 13 of the data. If")
        and "step 2" in raised.summary
    )
    assert "If that is intended, lower the learning rate, clip gradients" in raised.fix
    overflows = error(
        errors.DivergedError, data=(X * 1e30, Y * 1.0), loss=lambda m, b: (m(b[0]) ** 4).mean()
    )
    assert "correct the data" not in overflows.fix


@pytest.mark.parametrize("devices", [1, 4])
def test_nan_in_a_batch_of_an_iterable_is_named(devices):
    """Also where the user's reader fills one buffer again and again: what was placed is
    searched.
    """
    x = X.copy()
    x[[21, 23], 2] = np.nan

    def batches():
        buffer = {"x": np.empty((8, 8), np.float32), "y": np.empty(8, np.int64)}
        for at in (8, 16, 24):
            buffer["x"][...], buffer["y"][...] = x[at : at + 8], Y[at : at + 8]
            yield buffer

    mesh = spmd.make_mesh(f"data={devices}", devices=jax.devices()[:devices])
    raised = error(errors.DivergedError, data=batches, batch_size=None, mesh=mesh, steps=3)
    assert raised.fix.startswith(
        "correct the data: x is nan in row 5 of the batch, and in 1 more. If"
    ), raised.fix


def test_many_problems_alike_are_one():
    def init(key):
        return {f"layer_{number}": {"w": jnp.ones((8, 8), jnp.complex64)} for number in range(40)}

    model = spmd.FunctionalModel(
        init, lambda params, x: sum(jnp.abs(x @ layer["w"]) for layer in params.values())
    )
    layout = spmd.Layout(gradients=spmd.Gradients("all_reduce", "bfloat16"))
    raised = error(
        errors.LayoutError,
        model=model,
        loss=lambda m, b: m(b[0]).sum(1),
        layout=layout,
        mesh="data=8",
    )
    assert len(raised.problems) == 40 and str(raised).count("computes in float32") == 1
    assert (
        "40 problems:" in str(raised)
        and "and 39 more: layer_*/w" in str(raised)
        and len(str(raised).splitlines()) < 10
    )
    assert str(raised).endswith('fix: [gradients] codec = "exact".')


class Deep(linen.Module):
    width: int

    @linen.compact
    def __call__(self, x):
        for _ in range(30):
            x = linen.Dense(self.width)(x)
        return x


@pytest.mark.system
def test_checkpoint_of_another_model_is_short(tmp_path):
    options = FIT | {"optimizer": optax.adam(0.1), "checkpoint": tmp_path, "steps": 1}
    spmd.fit(Deep(8), (X, Y), **options)
    raised = error(errors.CheckpointError, model=Deep(16), **options, resume=True)
    assert len(raised.problems) > 150 and len(str(raised).splitlines()) < 40
    assert "and so for" not in str(raised) and raised.fix.startswith(
        "the model, and the optimizer, that the run was trained with"
    )


def test_metric_of_an_evaluation_that_is_not_there():
    raised = error(errors.OptionError, callbacks=[spmd.callbacks.EarlyStopping("eval_loss")])
    assert (
        "since there is no evaluation" in raised.summary
        and raised.fix == "eval_data=..., which has it."
    )
    more = {"space": {"lr": [0.1]}, "search": "grid", "optimizer": lambda lr: optax.sgd(lr)}
    raised = error(errors.OptionError, spmd.sweep, lambda: Net(), **more, score="eval_accuracy")
    assert raised.fix == "eval_data=..., which has it."
    near = error(
        errors.OptionError, callbacks=[spmd.callbacks.EarlyStopping("eval_los")], eval_data=(X, Y)
    )
    assert near.fix == 'did you mean "eval_loss"?'
