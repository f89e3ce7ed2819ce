"""SIGTERM to real processes in each phase of a run: what is there to save is saved, and no process
hangs, fails or is restarted.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from launched import launch

from tests.processes import environment, handled_by

pytestmark = pytest.mark.system

JOB = Path(__file__).parent / "signalled_job.py"
# by phase: the step that is saved, or None where there is nothing to save
PHASES = {"setup": None, "compile": None, "restore": None, "evaluate": 4, "compile later": 4}


def saved(folder):
    checkpoints = folder / "checkpoints"
    return (
        max((int(path.name) for path in checkpoints.iterdir() if path.name.isdigit()), default=None)
        if checkpoints.exists()
        else None
    )


def begun(folder, words=()):
    """A finished run to restore."""
    run = launch("--processes", len(words) or 1, "--simulate", 1, JOB, folder, "nothing", 0)
    assert run.code == 0, run.text


@contextlib.contextmanager
def started(*words):
    """The job in a process of its own, killed (by its id) after 200 s whatever happens."""
    command = [sys.executable, JOB, *map(str, words)]
    process = subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    alarm = threading.Timer(200, process.kill)
    alarm.start()
    try:
        yield process
    finally:
        alarm.cancel()
        process.kill()
        process.communicate()


def wait_until_ready(process, run):
    """Wait for a launched job to be in its phase, where it stays until a signal; a job that never
    is fails its test after 200 s.
    """
    until = time.monotonic() + 200
    while (
        not any("READY" in line for _, line in run.lines)
        and process.poll() is None
        and time.monotonic() < until
    ):
        time.sleep(0.02)


def end_once_ready(process):
    """SIGTERM, once the job is in its phase, where it waits for that as long as needed."""
    for line in process.stdout:
        if line.strip() == "READY":
            break
    process.send_signal(signal.SIGTERM)


@pytest.mark.sampled(system=2)
@pytest.mark.parametrize("phase", PHASES)
def test_sigterm_to_a_single_process(phase, tmp_path):
    folder, step = tmp_path / "run", PHASES[phase]
    if phase == "restore":
        begun(folder)
        step = 8
    with started(folder, phase, 0) as process:
        end_once_ready(process)
        out, errors = process.communicate()
    assert process.returncode == 143, errors
    assert "END" not in out and "Traceback" not in errors and saved(folder) == step
    assert ("before there was anything to save" in errors) == (PHASES[phase] is None), errors


@pytest.mark.parametrize(
    "whom", ["one process", pytest.param("the launcher", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "phase",
    [
        "compile",
        *(pytest.param(name, marks=pytest.mark.slow) for name in PHASES if name != "compile"),
    ],
)
def test_sigterm_to_several_processes(phase, whom, tmp_path):
    """Process 1 waits in the phase; the signal goes to it, or to the launcher."""
    folder, step = tmp_path / "run", PHASES[phase]
    if phase == "restore":
        begun(folder, [0, 1])
        step = 8

    def ask(process, run):
        wait_until_ready(process, run)
        pid = process.pid if whom == "the launcher" else int(children(process.pid)[1])
        os.kill(pid, signal.SIGTERM)

    run = launch(
        "--processes", 2, "--simulate", 1, "--max-restarts", 3, JOB, folder, phase, 1, meanwhile=ask
    )
    assert run.code == 143, run.text
    assert (
        "END" not in run.text
        and "Traceback" not in run.text
        and "failed at step" not in run.text
        and "restart 1" not in run.text
    ), run.text
    # the other process may be ahead
    assert saved(folder) in (step, PHASES[phase] and step + 1), run.text
    expected = f", and have saved step {saved(folder)}" if PHASES[phase] else ""
    (line,) = re.findall(r"(?m)^spmd launch: .* ended .*", run.text)
    assert line == f"spmd launch: 2 processes ended with code 143 after SIGTERM{expected}", run.text


TERMINAL = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
import jax.numpy as jnp, numpy as np, optax, spmd
model = spmd.FunctionalModel(lambda key: {"w": jnp.zeros((4, 1))}, lambda params, x: x @ params["w"])
data = {"x": np.ones((64, 4), np.float32), "y": np.ones((64, 1), np.float32)}
options = {"loss": spmd.losses.mean_squared_error, "optimizer": optax.sgd(0.1), "batch_size": 8}
spmd.fit(model, data, steps=10**7, checkpoint=sys.argv[1], progress=True, **options)
"""  # noqa: E501


def test_closed_terminal_saves(tmp_path):
    """The kernel sends SIGHUP, and the terminal takes no more lines of the display."""
    ours, theirs = os.openpty()
    command = [sys.executable, "-c", TERMINAL, tmp_path / "run"]
    variables = environment(TERM="xterm")
    with handled_by(signal.SIG_DFL):
        process = subprocess.Popen(
            command,
            env=variables,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
    alarm = threading.Timer(200, process.kill)
    alarm.start()
    try:
        os.close(theirs)
        shown = b""
        while b"loss" not in shown:  # beside the bar, once it trains
            shown += os.read(ours, 65536)
        os.close(ours)
        assert process.wait() == 143
    finally:
        alarm.cancel()
        process.kill()
        process.wait()
    assert saved(tmp_path / "run")


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1], ids=str)
def test_chosen_signal_to_one_of_several_processes(number, tmp_path, monkeypatch):
    """As SLURM sends it to the tasks of a step: all processes save, and each that received it says
    how it acts.
    """
    monkeypatch.setenv("SPMD_STOP_SIGNALS", "USR1")

    def ask(process, run):
        wait_until_ready(process, run)
        os.kill(int(children(process.pid)[1]), number)

    with handled_by(signal.SIG_DFL):
        run = launch(
            "--processes", 2, "--simulate", 1, JOB, tmp_path / "run", "evaluate", 1, meanwhile=ask
        )
    assert run.code == 143 and saved(tmp_path / "run") == 4, run.text
    assert (
        f"[1] spmd: {number.name} acts as SIGTERM" in run.text and "[0] spmd: SIG" not in run.text
    ), run.text


def children(pid):
    """Ids of the processes that the launcher has started, in the order of their ranks."""
    command = ["pgrep", "-P", str(pid), "-f", "spmd.launch.runner"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    ranks = {
        Path(f"/proc/{one}/environ")
        .read_bytes()
        .partition(b"SPMD_PROCESS=")[2]
        .partition(b"\0")[0]: one
        for one in found
    }
    return [ranks[rank] for rank in sorted(ranks)]


def test_sigterm_while_a_checkpoint_is_written(tmp_path):
    """The run waits for it, and makes no second one of the same step."""
    with started(tmp_path / "run", "write", 0) as process:
        end_once_ready(process)
        _, errors = process.communicate()
    assert process.returncode == 143, errors
    assert (
        saved(tmp_path / "run") >= 2
        and not list((tmp_path / "run" / "checkpoints").glob("*tmp*"))
        and "Traceback" not in errors
    )
