"""kill -9 in the middle of a sweep, again and again; gone on with, it ends in the same table."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def started(folder):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(Path(__file__).parent / "sweep_job.py"), str(folder)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process):
    try:
        out, errors = process.communicate(timeout=400)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, errors[-3000:]
    return out


def killed(process, enough):
    """SIGKILL when `enough()` has come true."""
    until = time.monotonic() + 300
    try:
        while not enough() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.005)
        assert process.poll() is None, process.stderr.read()[-3000:]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


@pytest.mark.slow
def test_killed_and_gone_on_with_it_ends_in_the_same_table(tmp_path):
    whole = ended(started(tmp_path / "whole"))
    folder = tmp_path / "killed"
    saved = lambda chunk: sorted(
        int(path.name) for path in (folder / "chunks" / chunk / "checkpoints").glob("[0-9]*") if path.name.isdigit()
    )
    killed(started(folder), lambda: max(saved("0-0"), default=0) >= 6)
    assert saved("0-0") and not (folder / "chunks" / "0-0" / "done.json").exists()
    killed(started(folder), lambda: max(saved("0-1"), default=0) >= 6)
    assert (folder / "chunks" / "0-0" / "done.json").exists() and not (folder / "chunks" / "0-1" / "done.json").exists()
    assert ended(started(folder)) == whole
    assert len(whole.splitlines()) == 17 and not list(folder.glob("chunks/*/checkpoints"))
