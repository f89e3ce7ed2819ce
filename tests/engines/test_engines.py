"""Jobs of two processes, started by the engines themselves: each joins, and after one process is
killed and the job is started again, it ends with the weights of a job that ran undisturbed.
"""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from spmd.distributed.world import free_port
from tests.processes import environment

pytestmark = pytest.mark.system

JOB = Path(__file__).parent / "engine_job.py"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2")
ENGINES = {
    "Hydra": ("mpiexec.hydra", "-n", "2"),
    "Open MPI": ("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "2"),
    # after a failure it starts all processes again
    "torchrun": (*TORCHRUN, "--max-restarts=1"),
}


def start(engine, *words):
    """Run the job in two processes; return its exit code and what was printed."""
    command = [*ENGINES[engine]]
    if engine == "torchrun":
        command += [f"--master-port={free_port('127.0.0.1')}", JOB, *words]
    else:
        command += [sys.executable, JOB, *words]
    # A signal to an engine ends its processes; `killpg` would miss those of Hydra, each of which
    # has a session of its own.
    with subprocess.Popen(
        command,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=150)
        finally:
            process.terminate()
    return process.returncode, output


def skip_without(engine):
    if engine == "torchrun" and importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed: pip install torch")
    program = ENGINES[engine][0]
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed: apt-get install mpich openmpi-bin")


def hashes(output):
    return re.findall(r"HASH (\w+) in process (\d) of 2", output)


@pytest.mark.parametrize("engine", ENGINES)
def test_killed_job_ends_as_an_undisturbed_one(engine, tmp_path):
    skip_without(engine)
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    for folder in (undisturbed, disturbed):
        folder.mkdir()
    code, output = start(engine, undisturbed)
    assert code == 0, output
    expected = hashes(output)
    assert sorted(rank for _, rank in expected) == ["0", "1"], output
    assert f"process 1 of 2 ({engine})" in output

    code, output = start(engine, disturbed, "--kill")
    assert (disturbed / "was-killed").exists(), output
    if engine != "torchrun":
        assert code != 0 and not hashes(output), output
        code, output = start(engine, disturbed, "--kill", "--resume")
    assert code == 0, output
    assert sorted(hashes(output)) == sorted(expected)
    # from a checkpoint, not from the beginning
    assert re.search(r"FIRST (6|11) in process 1", output), output
