"""Tracebacks of our own errors: the user's frames stay, those of libraries go, and errors of others are as they are."""

import subprocess
import sys
import traceback

import numpy as np
import optax
import pytest

import spmd
from spmd.errors import CallbackError, LayoutError, LossError

DATA = {"x": np.ones((32, 4), np.float32), "y": np.zeros((32, 2), np.float32)}


def apply(params, x):
    return x @ params["w"] @ params["w"] if params["w"].ndim == 2 and params["w"].shape[0] == 3 else x @ params["w"]


def train(rows=4, data=None, **options):
    model = spmd.FunctionalModel(lambda key: {"w": np.zeros((rows, 2), np.float32)}, apply)
    data = DATA if data is None else data
    return spmd.fit(model, data, loss=spmd.losses.mean_squared_error, optimizer=optax.sgd(0.1), **{"batch_size": 16, "steps": 2} | options)


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
    assert frames(error) == ["raised", "train"] and isinstance(error.__cause__, ValueError) and frames(error.__cause__) == ["mine"]
    error = raised(LossError, rows=3)  # 32 frames of ours, and of JAX
    assert frames(error) == ["raised", "train"] and isinstance(error.__cause__, TypeError) and frames(error.__cause__) == ["apply"]
    assert not [note for note in getattr(error, "__notes__", []) if "JAX" in note]


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


SCRIPT = """
import spmd

def main():
    spmd.Layout.load("fdsp")

main()
"""


@pytest.mark.system
def test_script_ends_in_a_short_traceback(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    lines = [line for line in done.stderr.splitlines() if line.strip("^~ ")]
    assert done.returncode == 1 and lines[0] == "Traceback (most recent call last):"
    assert lines[-2:] == ['spmd.errors.LayoutError: no layout "fdsp" is shipped, and no such file exists.', '    fix: did you mean "fsdp"?']
    assert [line.rpartition("in ")[2] for line in lines if line.startswith("  File")] == ["<module>", "main"]


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
