"""Every error has a fix, and the ones that users see first have one that works."""

import ast
import functools
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
    ("run/checkpoint.py", "CheckpointError"): "it is another process's error, with its fix",
    ("planner/compile.py", "CompileError"): "the compiler's own text, of which nothing is known",
}

FIX_WHERE_RAISED = {  # by file and function, what raises these problems, with a fix for all
    ("data/batches.py", "batch_differences"): "train/evaluation.py",
    ("models/base.py", "shape_problems"): "models/functional.py and models/flax_linen.py",
    ("resume.py", "_all_damaged"): "itself, by `problems_text`",
    ("run/saved_settings.py", "data_changes"): "resume.py and run/loop_checkpoints.py",
}
EMPTY_AT_FIRST = {  # by file, why no error of it lacks a fix
    "data/text_records.py": "all problems have one in common",
    "errors.py": "it is the class that others make",
    "inference/forward.py": "it is raised only with one",
    "layout/fixes.py": "it is completed below",
    "layout/toml_tables.py": "without one it is an example of the type, or a name",
    "pretrained/match_adapters.py": "all problems have one in common",
    "run/reshard_checkpoint.py": "all problems have one in common",
    "wire/region.py": "it is completed below, or has a default there",
}
NO_ERROR = {  # texts in tests/goldens that are no errors
    "doctor_healthy",
    "resolve_summary_lists_specs_and_origins",
    "summary_of_equal_blocks_80",
    "summary_of_equal_blocks_100",
    "summary_of_equal_blocks_160",
    "trained_summary",
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


@functools.cache
def syntax_trees(word):
    """(file, tree) of every file of the library that has the word."""
    trees = []
    for path in sorted(ROOT.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if word in source:
            trees.append((path.relative_to(ROOT).as_posix(), ast.parse(source)))
    return trees


def called_name(call):
    return getattr(call.func, "id", getattr(call.func, "attr", ""))


def has_argument(call, name, position=None):
    """Whether an argument is passed to a call, and is no empty text."""
    values = [keyword.value for keyword in call.keywords if keyword.arg in (name, None)]
    if position is not None:
        values += call.args[position : position + 1]
    return any(not isinstance(value, ast.Constant) or value.value for value in values)


def errors_without_fix():
    """(file, line, class) of every error of the library that is made without a fix."""
    kinds = {
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.SpmdError)
    }
    for file, tree in syntax_trees("Error"):
        for call in ast.walk(tree):
            is_error = isinstance(call, ast.Call) and called_name(call) in kinds
            if is_error and not has_argument(call, "fix"):
                yield file, call.lineno, called_name(call)


def test_every_error_has_a_fix():
    found = [(file, line, kind) for file, line, kind in errors_without_fix()]
    assert not [where for where in found if (where[0], where[2]) not in WITHOUT_FIX]
    assert {(file, kind) for file, _, kind in found} == set(WITHOUT_FIX)


def problems_without_fix(tree):
    """(function, line) of every `Problem` of a file that is made without a fix."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        calls = [call for call in ast.walk(function) if isinstance(call, ast.Call)]
        # a fix that the last of the function's problems gets
        if any(called_name(call) == "replace" and has_argument(call, "fix") for call in calls):
            continue
        for call in calls:
            if called_name(call) == "Problem" and not has_argument(call, "fix", 2):
                yield function.name, call.lineno


def test_every_problem_has_a_fix():
    """Its own, or one for all problems that are raised together, where its file raises them."""
    missing = []
    elsewhere = set()
    for file, tree in syntax_trees("Problem("):
        if file == "errors.py":
            continue
        raising = [
            call
            for call in ast.walk(tree)
            if isinstance(call, ast.Call) and called_name(call) == "raise_problems"
        ]
        has_common_fix = any(has_argument(call, "fix", 4) for call in raising)
        for function, line in problems_without_fix(tree):
            if (file, function) in FIX_WHERE_RAISED:
                elsewhere.add((file, function))
            elif not has_common_fix:
                missing.append((file, line, function))
    assert not missing
    assert elsewhere == set(FIX_WHERE_RAISED)


def empty_fixes(tree):
    """Lines on which a variable or an argument named `fix` begins as an empty text."""
    for node in ast.walk(tree):
        names = []
        values = []
        if isinstance(node, ast.Assign):
            names = [getattr(target, "id", "") for target in node.targets]
            values = [node.value] * len(names)
        elif isinstance(node, ast.FunctionDef):
            arguments = node.args
            positional = [*arguments.posonlyargs, *arguments.args]
            with_default = positional[len(positional) - len(arguments.defaults) :]
            names = [argument.arg for argument in (*with_default, *arguments.kwonlyargs)]
            values = [*arguments.defaults, *arguments.kw_defaults]
        for name, value in zip(names, values, strict=True):
            if name == "fix" and isinstance(value, ast.Constant) and value.value == "":
                yield node.lineno


def test_no_fix_begins_empty():
    """Else an error has none on a path on which nothing else is assigned."""
    files = {file for file, tree in syntax_trees("fix") if any(empty_fixes(tree))}
    assert files == set(EMPTY_AT_FIRST)


def test_text_of_every_error_has_a_fix():
    texts = [*(pathlib.Path(__file__).parent / "goldens").glob("*.txt")]
    without = {path.stem for path in texts if "fix: " not in path.read_text(encoding="utf-8")}
    assert without == set(NO_ERROR)
    assert len(texts) > 300


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


def test_more_metrics_than_can_be_compiled():
    def loss(model, batch):
        value = jnp.mean(model(batch[0]) ** 2)
        return value, {f"metric {number}": 0.0 for number in range(100_000)}

    assert error(errors.LossError, loss=loss).summary.startswith("100,000 metrics; at most 10,000")


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
    lines = str(raised).splitlines()
    assert len(raised.problems) > 150 and len(lines) <= 12
    arrays = "params/Dense_*/bias, opt/*/mu/Dense_*/bias, opt/*/nu/Dense_*/bias"
    assert f"  90 arrays saved float32[8], wanted float32[16]: {arrays}" in lines
    assert sum(int(line.split()[0]) for line in lines if " arrays saved " in line) == 180
    assert raised.fix.startswith("the model, and the optimizer, that the run was trained with")


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
