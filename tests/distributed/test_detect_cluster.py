"""Rank and size of a process, from the environments that launchers set."""

import dataclasses
import logging
import os
import zlib

import pytest

from spmd.distributed import detect_cluster
from spmd.distributed.detect_cluster import detect
from spmd.distributed.host_gpus import visible_gpus
from spmd.distributed.world import World, resolve_address
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
AGENT = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True"}
HYDRA = {"PMI_SIZE": "4", "PMI_RANK": "3", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
FLUX = {
    "FLUX_JOB_ID": "41",
    "FLUX_JOB_SIZE": "2",
    "FLUX_JOB_NNODES": "1",
    "FLUX_TASK_RANK": "1",
    "FLUX_TASK_LOCAL_ID": "1",
}
PORT = 61440 + 4242 % 4096
# jobs of one host in different namespaces of process ids may have the same name
NAMESPACE = os.readlink("/proc/self/ns/pid")


def port_of(job):
    return 61440 + zlib.crc32(job.encode()) % 4096


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
        (SLURM, World(5, 8, f"gpu07:{PORT}", "SLURM job 4242", 1, 4, (2, 3), job="4242.0")),
        (
            SLURM | {"CUDA_VISIBLE_DEVICES": "0,1,2,3"},
            World(5, 8, f"gpu07:{PORT}", "SLURM job 4242", 1, 4, (1,), job="4242.0"),
        ),
        (
            SLURM | {"CUDA_VISIBLE_DEVICES": "0"},
            World(5, 8, f"gpu07:{PORT}", "SLURM job 4242", 1, 4, None, job="4242.0"),
        ),
        (
            SLURM | {"SLURM_GPUS_PER_TASK": "2"},
            World(5, 8, f"gpu07:{PORT}", "SLURM job 4242", 1, 4, None, job="4242.0"),
        ),
        (
            SLURM | {"SPMD_BIND": "10.1.0.7"},
            World(5, 8, f"10.1.0.7:{PORT}", "SLURM job 4242", 1, 4, (2, 3), job="4242.0"),
        ),
        (  # one node, one task for each GPU
            SLURM
            | {
                "SLURM_STEP_NODELIST": "gpu07",
                "SLURM_STEP_TASKS_PER_NODE": "8",
                "SLURM_LOCALID": "5",
                "SLURM_NODEID": "0",
            },
            World(5, 8, f"127.0.0.1:{PORT}", "SLURM job 4242", 5, 8, (5,), job="4242.0"),
        ),
        (  # nodes of different sizes
            SLURM
            | {"SLURM_STEP_TASKS_PER_NODE": "6,2", "SLURM_PROCID": "7", "SLURM_GPUS_ON_NODE": "2"},
            World(7, 8, f"gpu07:{PORT}", "SLURM job 4242", 1, 2, (1,), job="4242.0"),
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
            World(5, 8, f"gpu07:{PORT}", "SLURM job 4242", 1, 4, (2, 3), job="4242.0"),
        ),
        (
            SLURM | {"SLURM_TRES_PER_TASK": "cpu=12,gres/gpu=2"},
            World(5, 8, f"gpu07:{PORT}", "SLURM job 4242", 1, 4, None, job="4242.0"),
        ),
        (
            SLURM | {"SLURM_GPU_BIND": "verbose,closest"},
            World(5, 8, f"gpu07:{PORT}", "SLURM job 4242", 1, 4, None, job="4242.0"),
        ),
        (  # a second srun inside salloc: another port; and a node without GPUs
            {name: value for name, value in SLURM.items() if name != "SLURM_GPUS_ON_NODE"}
            | {"SLURM_STEP_ID": "3", "PATH": ""},
            World(5, 8, f"gpu07:{PORT + 3}", "SLURM job 4242", 1, 4, None, job="4242.3"),
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
            World(10, 11, f"a1:{PORT}", "SLURM job 4242", 0, 1, None, job="4242.0"),
        ),
        (
            MPI,
            World(
                1,
                2,
                f"127.0.0.1:{port_of(f'prterun-vm-77@1 {NAMESPACE}')}",
                "Open MPI",
                1,
                2,
                None,
                job=f"prterun-vm-77@1 {NAMESPACE}",
            ),
        ),
        (TORCH, World(3, 4, "10.0.0.1:29500", "WORLD_SIZE and RANK", 1, 2)),
        # the agent of torchrun listens at MASTER_PORT
        (
            TORCH | AGENT,
            World(
                3,
                4,
                f"10.0.0.1:{port_of('29500 none')}",
                "torchrun",
                1,
                2,
                job="29500 none",
            ),
        ),
        (
            TORCH | AGENT | {"SPMD_COORDINATOR": "10.0.0.1:4000"},
            World(3, 4, "10.0.0.1:4000", "torchrun", 1, 2, job="29500 none"),
        ),
        (
            TORCH | AGENT | {"TORCHELASTIC_USE_AGENT_STORE": "False"},
            World(3, 4, "10.0.0.1:29500", "WORLD_SIZE and RANK", 1, 2),
        ),
        (
            HYDRA | {"SPMD_COORDINATOR": "10.0.0.1:4000"},
            World(3, 4, "10.0.0.1:4000", "Hydra", 1, 2),
        ),
        # its proxies are tasks of a step
        (
            SLURM | HYDRA | {"SPMD_COORDINATOR": "10.0.0.1:4000"},
            World(3, 4, "10.0.0.1:4000", "Hydra", 1, 2, (4, 5, 6, 7)),
        ),
        (HYDRA | {"PMI_SIZE": "1", "PMI_RANK": "0", "MPI_LOCALNRANKS": "1"}, None),
        (
            FLUX,
            World(
                1,
                2,
                f"127.0.0.1:{port_of(f'41 {NAMESPACE}')}",
                "Flux",
                1,
                2,
                job=f"41 {NAMESPACE}",
            ),
        ),
        # Flux was started by Hydra
        (
            HYDRA | {"PMI_SIZE": "1", "PMI_RANK": "0", "MPI_LOCALNRANKS": "1"} | FLUX,
            World(
                1,
                2,
                f"127.0.0.1:{port_of(f'41 {NAMESPACE}')}",
                "Flux",
                1,
                2,
                job=f"41 {NAMESPACE}",
            ),
        ),
        (
            FLUX | {"FLUX_JOB_NNODES": "2", "SPMD_COORDINATOR": "n1:4000"},
            World(1, 2, "n1:4000", "Flux", 1, None, job="41"),
        ),
        (
            {
                "SKYPILOT_NUM_NODES": "2",
                "SKYPILOT_NODE_RANK": "1",
                "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
                "SKYPILOT_TASK_ID": "sky-1",
            },
            World(1, 2, f"10.0.0.1:{port_of('sky-1')}", "SkyPilot", 0, 1, job="sky-1"),
        ),
        (
            {
                "DSTACK_NODES_NUM": "2",
                "DSTACK_NODE_RANK": "1",
                "DSTACK_MASTER_NODE_IP": "10.0.0.1",
                "DSTACK_RUN_NAME": "mild-cat-1",
            },
            World(1, 2, f"10.0.0.1:{port_of('mild-cat-1')}", "dstack", 0, 1, job="mild-cat-1"),
        ),
        (
            {
                "LWS_GROUP_SIZE": "2",
                "LWS_WORKER_INDEX": "1",
                "LWS_LEADER_ADDRESS": "train-0.train.default",
            },
            World(
                1,
                2,
                f"train-0.train.default:{port_of('train-0.train.default')}",
                "LeaderWorkerSet",
                0,
                1,
                job="train-0.train.default",
            ),
        ),
        ({"SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_RANK": "0"}, None),
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
            "needs the address of process 0.\n    fix: mpirun -x SPMD_COORDINATOR=HOST:PORT",
        ),
        (
            HYDRA,
            "needs the address of process 0.\n    fix: mpiexec -genv SPMD_COORDINATOR HOST:PORT",
        ),
        (
            FLUX | {"FLUX_JOB_NNODES": "2"},
            "needs the address of process 0.\n    fix: flux run --env=SPMD_COORDINATOR=HOST:PORT",
        ),
        (
            {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"},
            "SkyPilot: SKYPILOT_NODE_IPS is not set.",
        ),
        (
            {
                "SKYPILOT_NUM_NODES": "2",
                "SKYPILOT_NODE_RANK": "1",
                "SKYPILOT_NODE_IPS": "\n",
            },
            "SkyPilot: SKYPILOT_NODE_IPS is not set.",
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
            "SLURM's numbers for each node, '4x2', cannot be read.",
        ),
    ],
)
def test_inconsistent_environment_is_refused(environment, message):
    with pytest.raises(ClusterError) as caught:
        detect(environment)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("environment", "launcher"),
    [
        ({"WORLD_SIZE": "2", "RANK": "1"}, "PyTorch's launcher .*: MASTER_ADDR, MASTER_PORT not"),
        ({"PET_NNODES": "2", "PET_NODE_RANK": "1"}, "PET_NNODES=2, so a launcher of torchrun"),
        ({"JAX_NUM_PROCESSES": "2"}, "JAX.* JAX_COORDINATOR_ADDRESS, JAX_PROCESS_ID not set"),
        ({"JAX_PROCESS_ID": "0"}, "JAX.* JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES not set"),
        ({"PMI_SIZE": "2", "PMI_RANK": "1"}, "PMI_SIZE=2, so an MPI launcher"),
        ({"PMI_RANK": "0"}, "PMI_RANK=0, so an MPI launcher"),
        # mpiexec.hydra -pmi-port
        ({"PMI_ID": "1", "PMI_PORT": "vm:1", "MPI_LOCALNRANKS": "2"}, "PMI_ID=1, so an MPI"),
        ({"PMIX_RANK": "0"}, "PMIX_RANK=0, so an MPI launcher"),
        ({"MV2_COMM_WORLD_SIZE": "2"}, "MVAPICH2"),
        ({"PALS_RANKID": "1"}, "PALS_RANKID=1, so an MPI launcher"),
        ({"JSM_NAMESPACE_SIZE": "2"}, "jsrun"),
        ({"JOB_COMPLETION_INDEX": "1"}, "Kubernetes .*: SPMD_PROCESSES, SPMD_COORDINATOR not set"),
        ({"SPMD_PROCESS": "1"}, "spmd launch .*: SPMD_PROCESSES not set"),
    ],
)
def test_processes_of_unknown_launchers_do_not_train_alone(environment, launcher):
    with pytest.raises(ClusterError, match=launcher) as caught:
        detect(environment)
    assert "All would train alone" in str(caught.value)
    # both of its fixes
    assert detect(environment | {"SPMD_PROCESSES": "1"}) is None
    by_hand = {"SPMD_PROCESSES": "2", "SPMD_PROCESS": "1", "SPMD_COORDINATOR": "10.0.0.1:4000"}
    assert detect(environment | by_hand) == World(1, 2, "10.0.0.1:4000", "spmd launch")


@pytest.mark.parametrize(
    "environment",
    [
        {"WORLD_SIZE": "1"},
        {"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"},
        {"PMI_SIZE": "1", "PMI_RANK": "0", "PALS_RANKID": "0"},
        # unset in what has filled a template
        {"WORLD_SIZE": "", "PMI_SIZE": "", "JOB_COMPLETION_INDEX": " ", "SPMD_PROCESSES": ""},
    ],
    ids=lambda environment: "-".join(environment),
)
def test_one_process_and_empty_variables_are_no_sign(environment):
    assert detect(environment) is None


@pytest.mark.parametrize("environment", [MPI, SLURM, TORCH, TORCH | AGENT, FLUX])
def test_address_is_chosen_under_any_launcher(environment):
    chosen = {"SPMD_COORDINATOR": "10.0.0.9:4001"}
    assert detect(environment | chosen) == dataclasses.replace(
        detect(environment), address="10.0.0.9:4001"
    )


def test_gpus_are_not_shared_by_processes_on_cpus():
    environment = TORCH | {"CUDA_VISIBLE_DEVICES": "0,1,2", "JAX_PLATFORMS": "cpu"}
    assert detect(environment).local_devices is None


def test_addresses_of_ipv6_have_brackets():
    assert detect(TORCH | {"MASTER_ADDR": "fd00::1"}).address == "[fd00::1]:29500"
    assert detect(TORCH | {"MASTER_ADDR": "[fd00::1]"}).address == "[fd00::1]:29500"


def test_tasks_of_slurm_outside_of_a_step_are_reported(caplog):
    job = {"SLURM_JOB_ID": "977", "SLURM_NTASKS": "8", "SLURM_JOB_NUM_NODES": "2"}
    step = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NODELIST": "n1", "SLURM_PROCID": "0"}
    step |= {"SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    with caplog.at_level(logging.WARNING, "spmd"):
        assert detect(job) is None
        assert detect({"SLURM_JOB_ID": "978", "SLURM_NTASKS": "1"}) is None
        assert detect(job | step | {"SLURM_JOB_ID": "979", "SLURM_STEP_ID": "4"}) is None
        # the shell of salloc
        assert detect(job | step | {"SLURM_JOB_ID": "980", "SLURM_STEP_ID": "4294967290"}) is None
    batch, shell = [record.getMessage() for record in caplog.records]
    assert "SLURM job 977 has 8 tasks on 2 nodes" in batch and "SLURM job 980 has" in shell
    assert "srun python train.py" in batch


def test_node_whose_name_does_not_resolve_has_the_address_that_slurm_uses(tmp_path):
    nodes = SLURM | {"SLURM_STEP_NODELIST": "gpu[07-08].invalid", "PATH": f"{tmp_path}:/bin"}
    assert detect(nodes).host == "gpu07.invalid"
    tool = tmp_path / "scontrol"
    tool.write_text(
        '#!/bin/sh\n[ "$*" = "show node --oneliner gpu07.invalid" ] && echo "NodeName=gpu07 '
        'NodeAddr=10.1.0.7 NodeHostName=gpu07"\n'
    )
    tool.chmod(0o755)
    assert detect(nodes).address == f"10.1.0.7:{PORT}"
    assert detect(nodes | {"SLURM_STEP_NODELIST": "localhost,gpu08"}).host == "localhost"
    assert detect(nodes | {"SPMD_COORDINATOR": "n7:4000"}).address == "n7:4000"


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


def test_placeholder_of_the_examples_is_no_token():
    environ = {
        "SPMD_PROCESSES": "2",
        "SPMD_PROCESS": "0",
        "SPMD_COORDINATOR": "10.0.0.1:4000",
        "SPMD_TOKEN": "REPLACE-ME",
    }
    with pytest.raises(ClusterError, match="is no secret"):
        detect(environ)


def test_process_that_is_to_train_alone_says_so_under_a_launcher(caplog):
    detect_cluster._warn_of_alone.cache_clear()
    assert detect({**SLURM, "SPMD_PROCESSES": "1"}) is None
    assert "SPMD_PROCESSES=1: this process trains alone, of 8 by SLURM job 4242" in caplog.text
    caplog.clear()
    assert detect({"SPMD_PROCESSES": "1"}) is None and not caplog.text
