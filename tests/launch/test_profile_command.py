"""`spmd profile SCRIPT`: a few steps of a script are traced, and nothing else of it happens."""

import pytest

from spmd.launch.cli import main

SCRIPT = """
import sys
import numpy as np, optax, spmd

class Log(spmd.loggers.Logger):
    def write(self, record):
        raise RuntimeError("a profile is not logged")

class Watch(spmd.callbacks.Callback):
    def on_step(self, info):
        print("step", info.step)

data = {"x": np.ones((64, 8), np.float32), "y": np.ones((64, 1), np.float32)}
model = spmd.FunctionalModel(lambda key: {"w": np.zeros((8, 1), np.float32)}, lambda params, x: x @ params["w"])
try:
    spmd.fit(
        model, data, loss=spmd.losses.mean_squared_error, optimizer=optax.sgd(0.1), batch_size=int(sys.argv[1]), epochs=100,
        eval_data=lambda: 1 / 0, eval_every=2, checkpoint="run", resume=True, loggers=[Log()],
        watch=2, callbacks=[Watch(), spmd.callbacks.EarlyStopping("eval_loss")],
    )
except BaseException as error:
    print("caught", type(error).__name__)
    raise
print("after")
"""  # noqa: E501


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def test_profile_of_a_script(script, capsys):
    assert main(["profile", "train.py", "--steps", "2:4", "--folder", "traced", "--", "32"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("PROFILE of steps 3 to 4 on 8 devices, beside the plan for 1x8xcpu")
    assert [line for line in err.splitlines() if line.startswith("step ")] == [
        f"step {number}" for number in range(1, 5)
    ]
    assert "after" not in err and {path.name for path in script.iterdir()} == {"train.py", "traced"}


def test_profiler_that_fails_is_an_exit_code(script, capsys, monkeypatch, caplog):
    monkeypatch.setattr("spmd.planner.step_profile.read_trace", lambda path: [])
    assert main(["profile", "train.py", "--steps", "2:4", "--", "32"]) == 1
    assert "has no summary" in caplog.text


@pytest.mark.parametrize(
    "words, expected",
    {
        "train.py --steps 4:2 -- 32": '--steps "4:2" has no step.\n    fix: the smaller number '
        'first, such as "2:4".',
        "train.py --target 8xh101 -- 32": 'there is no target "h101".',
        "train.py --target 4xcpu -- 32": '--target "4xcpu" is 4 devices, and the mesh has 8.\n    '
        'fix: --target "8xcpu".',
        "none.py": 'there is no file "none.py".',
        "empty.py": "empty.py never called spmd.fit, so there is nothing to profile.",
        "loop.py": "loop.py calls Trainer.step, in a custom training loop, before it called "
        "spmd.fit, so "
        "there is nothing to profile.",
        "train.py": "train.py fails, IndexError: list index out of range, before it called "
        "spmd.fit.",
        "train.py -- 30": "DataError: ",
    }.items(),
)
def test_errors(script, capsys, words, expected):
    (script / "empty.py").write_text("")
    (script / "loop.py").write_text("import spmd\n\nspmd.Trainer.step(None, None, None)\n")
    assert main(["profile", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and expected in err
