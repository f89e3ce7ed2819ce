"""Rank and size of a process, from the environments that launchers set."""

import pytest

from spmd.distributed.detect_cluster import World, detect, resolve_address, visible_gpus
from spmd.errors import ClusterError

SLURM = {
    "SLURM_JOB_ID": "4242",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_GPUS_ON_NODE": "8",
}
MPI = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-vm-77@1",
}
TORCH = {
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "WORLD_SIZE": "4",
    "RANK": "3",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
}
PORT = 61440 + 4242 % 4096


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"SPMD_PROCESSES": "1", "SPMD_PROCESS": "0", "SPMD_COORDINATOR": "127.0.0.1:4000"}, None),
        (
            {
                "SPMD_PROCESSES": "4",
                "SPMD_PROCESS": "3",
                "SPMD_COORDINATOR": "[fd00::1]:4000",
                "SPMD_TOKEN": "x",
            },
            World(3, 4, "[fd00::1]:4000", "spmd launch", token="x"),
        ),
        (
            {
                "SPMD_PROCESSES": "4",
                "JOB_COMPLETION_INDEX": "2",
                "SPMD_COORDINATOR": "train-0.train:4000",
            },
            World(2, 4, "train-0.train:4000", "Kubernetes"),
        ),
        (
            {
                "JAX_COORDINATOR_ADDRESS": "10.0.0.1:1234",
                "JAX_NUM_PROCESSES": "2",
                "JAX_PROCESS_ID": "1",
            },
            World(1, 2, "10.0.0.1:1234", "JAX's variables"),
        ),
        (SLURM, World(5, 8, f"gpu07:{PORT}", "SLURM job 4242", 1, 4, (2, 3), "4242.0")),
        (
            SLURM | {"CUDA_VISIBLE_DEVICES": "0,1,2,3"},
            World(5, 8, f"gpu07:{PORT}", "SLURM job 4242", 1, 4, (1,), "4242.0"),
        ),
        (
            SLURM | {"CUDA_VISIBLE_DEVICES": "0"},
            World(5, 8, f"gpu07:{PORT}", "SLURM job 4242", 1, 4, None, "4242.0"),
        ),
        (
            SLURM | {"SLURM_GPUS_PER_TASK": "2"},
            World(5, 8, f"gpu07:{PORT}", "SLURM job 4242", 1, 4, None, "4242.0"),
        ),
        (
            SLURM | {"SPMD_BIND": "10.1.0.7"},
            World(5, 8, f"10.1.0.7:{PORT}", "SLURM job 4242", 1, 4, (2, 3), "4242.0"),
        ),
        (  # one node, one task for each GPU
            SLURM
            | {
                "SLURM_STEP_NODELIST": "gpu07",
                "SLURM_STEP_TASKS_PER_NODE": "8",
                "SLURM_LOCALID": "5",
                "SLURM_NODEID": "0",
            },
            World(5, 8, f"127.0.0.1:{PORT}", "SLURM job 4242", 5, 8, (5,), "4242.0"),
        ),
        (  # nodes of different sizes
            SLURM
            | {"SLURM_STEP_TASKS_PER_NODE": "6,2", "SLURM_PROCID": "7", "SLURM_GPUS_ON_NODE": "2"},
            World(7, 8, f"gpu07:{PORT}", "SLURM job 4242", 1, 2, (1,), "4242.0"),
        ),
        # in a job, but not in a step of srun
        ({name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"}, None),
        (  # CPUs of a task say nothing about GPUs
            SLURM
            | {
                "SLURM_TRES_PER_TASK": "cpu=12",
                "SLURM_CPUS_PER_TASK": "12",
                "SLURM_GPU_BIND": "none",
            },
            World(5, 8, f"gpu07:{PORT}", "SLURM job 4242", 1, 4, (2, 3), "4242.0"),
        ),
        (
            SLURM | {"SLURM_TRES_PER_TASK": "cpu=12,gres/gpu=2"},
            World(5, 8, f"gpu07:{PORT}", "SLURM job 4242", 1, 4, None, "4242.0"),
        ),
        (
            SLURM | {"SLURM_GPU_BIND": "verbose,closest"},
            World(5, 8, f"gpu07:{PORT}", "SLURM job 4242", 1, 4, None, "4242.0"),
        ),
        (  # a second srun inside salloc: another port; and a node without GPUs
            {name: value for name, value in SLURM.items() if name != "SLURM_GPUS_ON_NODE"}
            | {"SLURM_STEP_ID": "3", "PATH": ""},
            World(5, 8, f"gpu07:{PORT + 3}", "SLURM job 4242", 1, 4, None, "4242.3"),
        ),
        (  # the shell that salloc gives on the first node: a separate step of one task
            SLURM
            | {
                "SLURM_STEP_ID": "4294967290",
                "SLURM_STEP_NODELIST": "gpu07",
                "SLURM_STEP_NUM_TASKS": "1",
            }
            | {
                "SLURM_STEP_TASKS_PER_NODE": "1",
                "SLURM_PROCID": "0",
                "SLURM_LOCALID": "0",
                "SLURM_NODEID": "0",
            },
            None,
        ),
        (  # `spmd launch` inside a step
            SLURM
            | {"SPMD_PROCESSES": "2", "SPMD_PROCESS": "1", "SPMD_COORDINATOR": "127.0.0.1:4000"},
            World(1, 2, "127.0.0.1:4000", "spmd launch"),
        ),
        (  # nodes of three sizes, the last of which has one GPU
            SLURM
            | {
                "SLURM_STEP_NODELIST": "a[1-2],b7,c1",
                "SLURM_STEP_NUM_TASKS": "11",
                "SLURM_STEP_TASKS_PER_NODE": "4(x2),2,1",
            }
            | {
                "SLURM_PROCID": "10",
                "SLURM_LOCALID": "0",
                "SLURM_NODEID": "3",
                "SLURM_GPUS_ON_NODE": "1",
            },
            World(10, 11, f"a1:{PORT}", "SLURM job 4242", 0, 1, None, "4242.0"),
        ),
        (
            MPI,
            World(
                1,
                2,
                f"127.0.0.1:{61440 + sum(b'prterun-vm-77@1') % 4096}",
                "Open MPI",
                1,
                2,
                None,
                "prterun-vm-77@1",
            ),
        ),
        (TORCH, World(3, 4, "10.0.0.1:29500", "WORLD_SIZE and RANK", 1, 2)),
        (
            TORCH | {"CUDA_VISIBLE_DEVICES": "4,5,6,7"},
            World(3, 4, "10.0.0.1:29500", "WORLD_SIZE and RANK", 1, 2, (2, 3)),
        ),
    ],
)
def test_detect(environment, expected):
    assert detect(environment) == expected


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"SPMD_PROCESSES": "two", "SPMD_PROCESS": "0"}, "SPMD_PROCESS"),
        (
            {"SPMD_PROCESSES": "2", "SPMD_PROCESS": "2", "SPMD_COORDINATOR": "h:1"},
            "process 2 of 2.\n    fix: ranks from 0 to 1.",
        ),
        ({"SPMD_PROCESSES": "2", "SPMD_PROCESS": "0"}, "SPMD_COORDINATOR is not set."),
        (
            {"SPMD_PROCESSES": "2", "SPMD_PROCESS": "0", "SPMD_COORDINATOR": "host"},
            '"host" is not an address.\n    fix: HOST:PORT',
        ),
        (
            MPI | {"OMPI_COMM_WORLD_SIZE": "4"},
            "does not know where process 0 is.\n    fix: mpirun -x SPMD_COORDINATOR=HOST:PORT",
        ),
        (
            TORCH | {"CUDA_VISIBLE_DEVICES": "0,1,2"},
            "3 GPUs cannot be shared equally by 2 processes of a host.\n    fix: as many processes "
            "as GPUs",
        ),
        (
            SLURM | {"SLURM_HET_SIZE": "2"},
            "SLURM job 4242 has 2 components, for which SLURM's variables do not say where process "
            "0 is.\n"
            "    fix: a job of one component; or SPMD_PROCESSES, SPMD_PROCESS and "
            "SPMD_COORDINATOR=HOST:PORT in each task.",
        ),
        (
            SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4x2"},
            "SLURM_STEP_TASKS_PER_NODE='4x2' cannot be read.",
        ),
    ],
)
def test_inconsistent_environment_is_refused(environment, message):
    with pytest.raises(ClusterError) as caught:
        detect(environment)
    assert message in str(caught.value)


def test_visible_gpus_are_counted_by_nvidia_smi(tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\necho 'GPU 0: NVIDIA H100 (UUID: GPU-a)'\necho '  MIG 1g'\necho 'GPU 1: NVIDIA "
        "H100 (UUID: GPU-b)'\n"
    )
    tool.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/bin:/usr/bin"}
    assert visible_gpus(environment) == ["0", "1"] and visible_gpus({}) == []
    assert detect(TORCH | environment).local_devices == (1,)
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == [] and visible_gpus(
        {"CUDA_VISIBLE_DEVICES": "1, 0"}
    ) == ["1", "0"]
    tool.write_text(
        "#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'\nexit 18\n"
    )
    with pytest.raises(ClusterError, match="nvidia-smi -L fails: Failed to initialize NVML"):
        visible_gpus(environment)


@pytest.mark.parametrize(
    ("address", "local", "message"),
    [
        ("0.0.0.0:4000", 2, "0.0.0.0 stands for all interfaces"),
        ("[::]:4000", 2, ":: stands for all interfaces"),
        ("localhost:4000", 1, "which other hosts cannot reach"),
        ("no.such.host.invalid:4000", 2, "does not resolve"),
    ],
)
def test_resolve_address_refuses_unreachable_addresses(address, local, message):
    with pytest.raises(ClusterError, match=message):
        resolve_address(World(0, 2, address, "test", 0, local))


def test_resolve_address_accepts_loopback_on_one_host():
    assert resolve_address(World(0, 2, "localhost:4000", "test", 0, 2)) in ("127.0.0.1", "::1")
    assert resolve_address(World(0, 2, "127.0.0.1:4000", "test", 0, 1)) == "127.0.0.1", (
        "it was given explicitly"
    )
