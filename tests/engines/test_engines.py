"""Jobs of two processes, started by the engines themselves: each joins, and after one process is
killed and the job is started again, it ends with the weights of a job that ran undisturbed.

`make test-engines` installs the engines. Where one is not installed its test is skipped: they are
programs of the system, or packages of gigabytes, which neither spmd nor its other tests need.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from spmd.distributed.world import free_port
from tests.engines import slurm
from tests.processes import end, environment

pytestmark = pytest.mark.system

ROOT = Path(__file__).resolve().parents[2]
JOB = Path(__file__).parent / "engine_job.py"
# PyTorch stands in an environment of its own; the job's processes do not import it.
TORCHRUN = shutil.which("torchrun", path=ROOT / ".venv-engines" / "bin") or "torchrun"
MPI = {
    "Hydra": ("mpiexec.hydra", "-n", "2"),
    "Open MPI": ("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "2"),
}


def run(command, **variables):
    """Run an engine to its end; return its exit code and what was printed."""
    with subprocess.Popen(
        [*map(str, command)],
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            # A bound for a job that hangs, and no judge: on two cores it takes 10 to 40 s.
            output, _ = process.communicate(timeout=600)
        finally:
            # The engine ends its processes. `killpg` would miss those of Hydra, each of which has a
            # session of its own.
            end(process)
    return process.returncode, output


def folders(tmp_path):
    made = tmp_path / "undisturbed", tmp_path / "disturbed"
    for folder in made:
        folder.mkdir()
    return made


def hashes(code, output):
    """The hash of each process of a job that has trained to its end."""
    assert code == 0, output
    printed = set(re.findall(r"HASH (\w+) in process (\d) of 2", output))
    assert sorted(rank for _, rank in printed) == ["0", "1"], output
    return printed


def check_resumed(output):
    """The job has begun at a checkpoint, not at its beginning."""
    assert re.search(r"FIRST (6|11) in process 1", output), output


@pytest.mark.parametrize("engine", MPI)
def test_mpi(engine, tmp_path):
    command = [*MPI[engine], sys.executable, JOB]
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed (make test-engines)")
    undisturbed, disturbed = folders(tmp_path)
    code, output = run([*command, undisturbed])
    assert f"process 1 of 2 ({engine})" in output
    expected = hashes(code, output)

    code, output = run([*command, disturbed, "--kill"])
    assert code != 0 and (disturbed / "was-killed").exists(), output
    code, output = run([*command, disturbed, "--kill", "--resume"])
    assert hashes(code, output) == expected
    check_resumed(output)


def test_torchrun(tmp_path):
    if shutil.which(TORCHRUN) is None:
        pytest.skip("torchrun is not installed (make test-engines)")
    undisturbed, disturbed = folders(tmp_path)

    def command(*words):
        port = free_port("127.0.0.1")
        options = ["--no-python", "--nproc-per-node=2", "--max-restarts=1", f"--master-port={port}"]
        return [TORCHRUN, *options, sys.executable, JOB, *words]

    code, output = run(command(undisturbed))
    assert "process 1 of 2 (torchrun)" in output
    expected = hashes(code, output)

    # torchrun starts all processes again
    code, output = run(command(disturbed, "--kill"))
    assert (disturbed / "was-killed").exists(), output
    assert hashes(code, output) == expected
    check_resumed(output)


def test_ray(tmp_path):
    """In workers without GPUs, for which Ray does not connect JAX's processes."""
    python = ROOT / ".venv-engines" / "bin" / "python"
    command = [python, "-c", "import ray.train.v2.jax, spmd"]
    if not python.exists() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("Ray is not installed (make test-engines)")
    undisturbed, disturbed = folders(tmp_path)
    command = [python, JOB.with_name("ray_job.py")]
    variables = {"RAY_DEDUP_LOGS": 0, "RAY_TRAIN_V2_ENABLED": 1}
    code, output = run([*command, undisturbed], **variables)
    assert "process 1 of 2 (Ray Train)" in output
    expected = hashes(code, output)

    code, output = run([*command, disturbed, "--kill", "--resume"], **variables)
    assert (disturbed / "was-killed").exists(), output
    assert hashes(code, output) == expected
    check_resumed(output)


def test_slurm(tmp_path):
    if reason := slurm.missing():
        pytest.skip(reason)
    undisturbed, disturbed = folders(tmp_path)
    with slurm.cluster() as variables:
        code, output = run(["srun", "-N2", "-n2", sys.executable, JOB, undisturbed], **variables)
        assert "process 1 of 2 (SLURM job 1), process 0 at 127.0.0.1:" in output
        expected = hashes(code, output)

        spmd = [sys.executable, "-m", "spmd", "launch", "--srun", "--max-restarts", "1"]
        job = ["salloc", "-N2", "-n2", *spmd, JOB, disturbed, "--kill"]
        code, output = run(job, **variables)
    assert (disturbed / "was-killed").exists(), output
    assert "restart 1 of at most 1" in output
    assert hashes(code, output) == expected
    check_resumed(output)
