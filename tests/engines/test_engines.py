"""Jobs of two processes, started by the engines themselves: each joins, and after one process is
killed and the job is started again, it ends with the weights of a job that ran undisturbed.

`make test-engines` installs the engines. Where one is not installed its test is skipped: they are
programs of the system, or packages of gigabytes, which neither spmd nor its other tests need.
"""

import json
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
RAY = ROOT / ".venv-engines" / "bin" / "python"
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


def notes(folder, name):
    """What both processes have noted under this name, in all attempts."""
    pattern = re.compile(rf"^{name} (.*)$", re.MULTILINE)
    return [pattern.findall((folder / f"process-{rank}").read_text()) for rank in range(2)]


def weights(code, output, folder):
    """The hash of the weights of a job that has trained to its end, the same in both processes."""
    assert code == 0, output
    first, second = notes(folder, "hash")
    assert first == second and len(first) == 1 and first[0].endswith("of 2 processes"), output
    return first[0]


def check_resumed(folder, output):
    """A process was killed, and the next attempt has begun at a checkpoint."""
    assert (folder / "disturbed").exists(), output
    for first, second in notes(folder, "first step"):
        assert first == "1" and second in ("6", "11"), output


@pytest.mark.parametrize("engine", MPI)
def test_mpi(engine, tmp_path):
    command = [*MPI[engine], sys.executable, JOB]
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed (make test-engines)")
    undisturbed, disturbed = folders(tmp_path)
    code, output = run([*command, undisturbed])
    assert f"process 1 of 2 ({engine})" in output
    expected = weights(code, output, undisturbed)

    code, output = run([*command, disturbed, "--kill"])
    assert code != 0, output
    code, output = run([*command, disturbed, "--kill", "--resume"])
    assert weights(code, output, disturbed) == expected
    check_resumed(disturbed, output)


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
    expected = weights(code, output, undisturbed)

    # torchrun starts all processes again
    code, output = run(command(disturbed, "--kill"))
    assert weights(code, output, disturbed) == expected
    check_resumed(disturbed, output)


def run_ray(folder, *words):
    """Run `ray_job.py`, whose first process listens on loopback. (Ray has no such choice.)"""
    return run(
        [RAY, JOB.with_name("ray_job.py"), folder, *words],
        RAY_DEDUP_LOGS=0,
        RAY_TRAIN_V2_ENABLED=1,
        SPMD_COORDINATOR=f"127.0.0.1:{free_port('127.0.0.1')}",
    )


def test_ray(tmp_path):
    command = [RAY, "-c", "import ray.train.v2.jax, spmd"]
    if not RAY.exists() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("Ray is not installed (make test-engines)")
    undisturbed, disturbed = folders(tmp_path)
    code, output = run_ray(undisturbed, "--actors")
    assert "process 1 of 2 (plain actors), process 0 at 127.0.0.1:" in output
    expected = weights(code, output, undisturbed)

    code, output = run_ray(disturbed, "--kill")
    assert "process 1 of 2 (Ray Train)" in output
    assert weights(code, output, disturbed) == expected
    check_resumed(disturbed, output)
    # what was reported to Ray
    checkpoint = re.search(r"^CHECKPOINT (.*)$", output, re.MULTILINE)
    assert checkpoint and json.loads(checkpoint[1]) == {"folder": f"{disturbed}/run", "step": 20}
    loss = re.search(r"^RESULT (.*)$", output, re.MULTILINE)
    assert loss and notes(disturbed, "loss") == [[loss[1]]] * 2

    # with GPUs, which do not exist here
    third = tmp_path / "gpus"
    third.mkdir()
    code, output = run_ray(third, "--kill", "--gpus")
    assert "process 1 of 2 (Ray Train)" in output
    assert weights(code, output, third) == expected
    check_resumed(third, output)


def test_slurm(tmp_path):
    if reason := slurm.missing():
        pytest.skip(reason)
    undisturbed, disturbed = folders(tmp_path)
    with slurm.cluster() as variables:
        code, output = run(["srun", "-N2", "-n2", sys.executable, JOB, undisturbed], **variables)
        assert "process 1 of 2 (SLURM job 1), process 0 at 127.0.0.1:" in output
        expected = weights(code, output, undisturbed)

        spmd = [sys.executable, "-m", "spmd", "launch", "--srun", "--max-restarts", "1"]
        job = ["salloc", "-N2", "-n2", *spmd, JOB, disturbed, "--kill"]
        code, output = run(job, **variables)
    assert "restart 1 of at most 1" in output
    assert weights(code, output, disturbed) == expected
    check_resumed(disturbed, output)
