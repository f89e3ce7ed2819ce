"""Tracebacks of our own errors: the user's frames stay, those of libraries go, and errors of others
are as they are.
"""

import subprocess
import sys
import traceback

import numpy as np
import optax
import pytest

import spmd
from spmd.errors import (
    CallbackError,
    CheckpointError,
    DataError,
    LayoutError,
    LossError,
    OptionError,
)

DATA = {"x": np.ones((32, 4), np.float32), "y": np.zeros((32, 2), np.float32)}


def apply(params, x):
    return (
        x @ params["w"] @ params["w"]
        if params["w"].ndim == 2 and params["w"].shape[0] == 3
        else x @ params["w"]
    )


def train(rows=4, data=None, **options):
    model = spmd.FunctionalModel(lambda key: {"w": np.zeros((rows, 2), np.float32)}, apply)
    data = DATA if data is None else data
    return spmd.fit(
        model,
        data,
        loss=spmd.losses.mean_squared_error,
        optimizer=optax.sgd(0.1),
        **{"batch_size": 16, "steps": 2} | options,
    )


def frames(error):
    """Names of the functions in a traceback."""
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def raised(kind, **options):
    with pytest.raises(kind) as caught:
        train(**options)
    return caught.value


def mine(info):
    raise ValueError("mine")


def test_error_shows_the_users_frames_and_the_call():
    assert frames(raised(LayoutError, layout="fdsp")) == ["raised", "train"]


def test_cause_ends_at_the_users_line():
    error = raised(CallbackError, callbacks=[mine])
    assert (
        frames(error) == ["raised", "train"]
        and isinstance(error.__cause__, ValueError)
        and frames(error.__cause__) == ["mine"]
    )
    error = raised(LossError, rows=3)  # 32 frames of ours, and of JAX
    assert (
        frames(error) == ["raised", "train"]
        and isinstance(error.__cause__, TypeError)
        and frames(error.__cause__) == ["apply"]
    )
    assert not [note for note in getattr(error, "__notes__", []) if "JAX" in note]


@pytest.mark.parametrize(
    ("kind", "case"),
    [(CheckpointError, "folder"), (CallbackError, "callback"), (DataError, "evaluation")],
    ids=["folder", "callback", "evaluation"],
)
def test_error_of_a_context_manager_shows_no_frame_of_it(kind, case, tmp_path):
    """Of `wrap_os_errors`, `raise_callback_errors` and `explain` of evaluations: neither theirs nor
    those of contextlib, in the printed traceback with its causes.
    """
    (tmp_path / "file").write_text("")
    other = {"x": np.ones((32, 5), np.float32), "y": DATA["y"]}
    options = {
        "folder": {"checkpoint": tmp_path / "file" / "run"},
        "callback": {"callbacks": [mine]},
        "evaluation": {"eval_data": other},
    }
    error = raised(kind, **options[case])
    assert frames(error) == ["raised", "train"]
    printed = "".join(traceback.format_exception(error))
    assert "contextlib.py" not in printed and "<string>" not in printed, printed


def test_all_frames_on_request(monkeypatch):
    monkeypatch.setenv("SPMD_TRACEBACK", "1")
    assert {"raised", "train", "fit", "load"} < set(frames(raised(LayoutError, layout="fdsp")))
    assert len(frames(raised(LossError, rows=3).__cause__)) > 10


def test_error_of_others_is_as_it_is():
    def batches():
        yield {name: leaf[:16] for name, leaf in DATA.items()}
        raise OSError("the disk is gone")

    error = raised(OSError, data=batches, batch_size=None)
    assert {"raised", "train", "fit", "batches"} < set(frames(error))


def test_cause_without_frames_of_the_user_is_as_it_is(tmp_path):
    (tmp_path / "broken.toml").write_text("[params\n")
    with pytest.raises(LayoutError) as caught:
        spmd.Layout.load(tmp_path / "broken.toml")
    assert len(frames(caught.value)) == 1
    assert caught.value.__cause__ is None or len(frames(caught.value.__cause__)) > 1


def test_options_that_check_themselves_show_the_users_frames():
    """Dataclasses are made by a generated function of the file "<string>", which `python -c` has
    too.
    """
    with pytest.raises(OptionError) as caught:
        spmd.Checkpoint("runs", every=0)
    assert frames(caught.value) == ["test_options_that_check_themselves_show_the_users_frames"]
    with pytest.raises(OptionError) as caught:
        exec(compile("spmd.Checkpoint('runs', every=0)", "<string>", "exec"))
    assert frames(caught.value) == [
        "test_options_that_check_themselves_show_the_users_frames",
        "<module>",
    ]
    assert frames(raised(OptionError, callbacks=[lambda info: spmd.Watch(every=0)])) == [
        "raised",
        "train",
        "<lambda>",
    ]
    checks = {name for name in spmd.__all__ if hasattr(getattr(spmd, name), "__post_init__")}
    assert len(checks) >= 16 and not [
        name for name in sorted(checks) if not hasattr(getattr(spmd, name).__init__, "__wrapped__")
    ]


X, Y = DATA["x"], DATA["y"]


def optimize(name):
    """A function that has no argument `rate`."""
    return optax.sgd(name, rate=1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda model: spmd.fit(model, X, Y),
            "fit(): takes 2 positional arguments, and was given 3.\n"
            "    fix: fit(model, (x, y), loss=..., optimizer=...), since inputs and targets are "
            "one argument.",
        ),
        (
            lambda model: spmd.fit(model, DATA, spmd.losses.mean_squared_error, optax.sgd(0.1)),
            "fit(): takes 2 positional arguments, and was given 4.\n    fix: fit(model, data, "
            "loss=..., optimizer=...).",
        ),
        (
            lambda model: spmd.fit(model, DATA, optimizer=optax.sgd(0.1)),
            "fit(): missing a required argument: 'loss'.\n    fix: fit(model, data, loss=..., "
            "optimizer=...).",
        ),
        (
            lambda model: train(stepz=3),
            'fit(): there is no argument "stepz".\n    fix: did you mean "steps"?',
        ),
        (
            lambda model: spmd.Trainer(model, spmd.losses.mean_squared_error),
            "Trainer(): takes 1 positional arguments, and was given 2.\n    fix: Trainer(model, "
            "loss=..., optimizer=...).",
        ),
        (
            lambda model: train().evaluate(X, Y),
            "evaluate(): takes 1 positional arguments, and was given 2.\n"
            "    fix: evaluate((x, y)), since inputs and targets are one argument.",
        ),
        (
            lambda model: spmd.Checkpoint("runs", evry=3),
            'Checkpoint(): there is no argument "evry".\n    fix: did you mean "every"?',
        ),
    ],
    ids=["arrays", "positions", "missing", "unknown", "Trainer", "method", "Checkpoint"],
)
def test_arguments_that_a_function_does_not_take(call, message):
    with pytest.raises(OptionError) as caught:
        call(spmd.FunctionalModel(lambda key: {"w": np.zeros((4, 2), np.float32)}, apply))
    assert str(caught.value) == message and caught.value.__cause__ is None
    assert set(frames(caught.value)) <= {
        "test_arguments_that_a_function_does_not_take",
        "<lambda>",
        "train",
    }


def test_type_error_of_the_users_is_as_it_is():
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'rate'") as caught:
        train(data=lambda: optimize("x"), batch_size=None)
    assert frames(caught.value)[-1] == "optimize"


SCRIPT = """
import spmd

def main():
    spmd.Layout.load("fdsp")

main()
"""


@pytest.mark.system
def test_script_ends_in_a_short_traceback(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    lines = [line for line in done.stderr.splitlines() if line.strip("^~ ")]
    assert done.returncode == 1 and lines[0] == "Traceback (most recent call last):"
    assert lines[-2:] == [
        'spmd.errors.LayoutError: no layout "fdsp" is shipped, and no such file exists.',
        '    fix: did you mean "fsdp"?',
    ]
    assert [line.rpartition("in ")[2] for line in lines if line.startswith("  File")] == [
        "<module>",
        "main",
    ]


CELL = """
import contextlib, io
from IPython.core.interactiveshell import InteractiveShell
for colors in ("linux", "nocolor"):
    shell, shown = InteractiveShell.instance(), io.StringIO()
    shell.colors = colors
    with contextlib.redirect_stdout(shown):
        shell.run_cell("import spmd; spmd.Layout.load('fdsp')")
    print(repr(shown.getvalue()))
"""


@pytest.mark.system
def test_a_cell_shows_the_fix_in_bold():
    """IPython's own traceback; without its colours there are none in the fix."""
    pytest.importorskip("IPython")
    done = subprocess.run([sys.executable, "-c", CELL], capture_output=True, text=True, check=True)
    coloured, plain = done.stdout.splitlines()
    assert r"no such file exists.\n    \x1b[1mfix: did you mean" in coloured
    assert r"no such file exists.\n    fix: did you mean" in plain and "\\x1b[" not in plain
