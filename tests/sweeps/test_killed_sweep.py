"""A sweep that is killed again and again, each time while it writes a checkpoint, ends in the same
table when it is resumed.
"""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import environment

ROOT = Path(__file__).resolve().parents[2]


def sweep_in_process(*arguments, ends=0):
    """What it printed; `run` kills and reaps a process that takes too long."""
    command = [sys.executable, str(Path(__file__).parent / "sweep_job.py"), *map(str, arguments)]
    job = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=400)
    assert job.returncode == ends, job.stderr[-3000:]
    return job.stdout


@pytest.mark.slow
def test_killed_sweep_resumes_to_the_same_table(tmp_path):
    undisturbed = sweep_in_process(tmp_path / "undisturbed")
    folder = tmp_path / "killed"

    def finished(chunk):
        return (folder / "chunks" / chunk / "done.json").exists()

    def committed(chunk):
        return {
            path.name
            for path in (folder / "chunks" / chunk / "checkpoints").iterdir()
            if path.name.isdigit()
        }

    sweep_in_process(folder, "0-0", 9, ends=-signal.SIGKILL)
    assert committed("0-0") == {"6"} and not finished("0-0")
    sweep_in_process(folder, "0-1", 9, ends=-signal.SIGKILL)
    assert committed("0-1") == {"6"} and finished("0-0") and not finished("0-1")
    assert sweep_in_process(folder) == undisturbed
    assert len(undisturbed.splitlines()) == 17 and not list(folder.glob("chunks/*/checkpoints"))
