"""Environments of real clusters, from public reports, without names of people, accounts, paths and
addresses.
"""

import pytest

from spmd.distributed.detect_cluster import detect
from spmd.distributed.world import FIRST_PORT, PORTS

ALONE = None


def port(number):
    return FIRST_PORT + number % PORTS


# `srun -N1 -n4`, the second task; no GPUs. https://github.com/TheHPXProject/hpx/issues/692
SINGLE_NODE = """
SLURMD_NODENAME=t-cn0117 SLURM_CPUS_ON_NODE=4 SLURM_CPU_BIND_TYPE=mask_cpu: SLURM_CPU_BIND_VERBOSE=quiet SLURM_DISTRIBUTION=block
SLURM_GTIDS=0,1,2,3 SLURM_JOBID=901593 SLURM_JOB_CPUS_PER_NODE=4 SLURM_JOB_ID=901593 SLURM_JOB_NAME=simple-hello.sh
SLURM_JOB_NODELIST=t-cn0117 SLURM_JOB_NUM_NODES=1 SLURM_LOCALID=1 SLURM_MEM_PER_CPU=2500 SLURM_NNODES=1 SLURM_NODEID=0
SLURM_NODELIST=t-cn0117 SLURM_NPROCS=4 SLURM_NTASKS=4 SLURM_PRIO_PROCESS=0 SLURM_PROCID=1 SLURM_STEPID=0 SLURM_STEP_ID=0
SLURM_STEP_LAUNCHER_PORT=33360 SLURM_STEP_NODELIST=t-cn0117 SLURM_STEP_NUM_NODES=1 SLURM_STEP_NUM_TASKS=4 SLURM_STEP_TASKS_PER_NODE=4
SLURM_TASKS_PER_NODE=4
"""  # noqa: E501

# `srun -n 2 -N 2`, the second task; Open MPI's users' list, February 2011, "SLURM environment
# variables at runtime"
TWO_NODES = """
SLURM_CPUS_ON_NODE=8 SLURM_CPUS_PER_TASK=1 SLURM_DISTRIBUTION=cyclic SLURM_GTIDS=1 SLURM_JOB_ID=23 SLURM_LOCALID=0 SLURM_NNODES=2
SLURM_NODEID=1 SLURM_NPROCS=2 SLURM_NTASKS=2 SLURM_PRIO_PROCESS=0 SLURM_PROCID=1 SLURM_STEP_ID=2 SLURM_STEPID=2
SLURM_STEP_LAUNCHER_PORT=43247 SLURM_STEP_NODELIST=node[1-2] SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=1(x2)
SLURM_TASK_PID=2288 SLURM_TASKS_PER_NODE=1(x2) SLURM_TOPOLOGY_ADDR=node2 SLURM_TOPOLOGY_ADDR_PATTERN=node
"""  # noqa: E501

# `salloc -N 2 -n 4 mpirun`: rank 3, on the node that mpirun reached through a separate step, and
# rank 1, on its own. The same thread.
BY_MPIRUN_AFAR = """
SLURM_JOB_ID=23 SLURM_JOB_NODELIST=node[1-2] SLURM_NNODES=1 SLURM_NODELIST=node[1-2] SLURM_TASKS_PER_NODE=1 SLURM_NPROCS=1 SLURM_STEP_ID=5
SLURM_STEP_NODELIST=node1 SLURM_STEP_NUM_NODES=1 SLURM_STEP_NUM_TASKS=1 SLURM_STEP_TASKS_PER_NODE=1 SLURM_NODEID=0 SLURM_PROCID=0
SLURM_LOCALID=0
"""  # noqa: E501
BY_MPIRUN_HERE = (
    "SLURM_JOB_ID=23 SLURM_JOB_NODELIST=node[1-2] SLURM_NNODES=2 SLURM_NODELIST=node[1-2] "
    "SLURM_TASKS_PER_NODE=2(x2) SLURM_NPROCS=4"
)
MPI = (
    "OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 "
    "PMIX_NAMESPACE=1 SPMD_COORDINATOR=node2:4000"
)

# An interactive shell on a GPU node (`srun --pty`, and SLURM's own step for `salloc`), February and
# April 2026: reports of a test suite
ONE_GPU_SHELL = """
CUDA_VISIBLE_DEVICES=0 SLURM_CPUS_ON_NODE=8 SLURM_GPUS=1 SLURM_GPUS_ON_NODE=1 SLURM_GTIDS=0 SLURM_JOBID=1720714 SLURM_JOB_GPUS=3
SLURM_JOB_ID=1720714 SLURM_JOB_NODELIST=GPU71E4 SLURM_JOB_NUM_NODES=1 SLURM_LOCALID=0 SLURM_MPI_TYPE=pmix SLURM_NNODES=1 SLURM_NODEID=0
SLURM_NODELIST=GPU71E4 SLURM_PMIX_MAPPING_SERV=(vector,(0,1,1)) SLURM_PROCID=0 SLURM_STEPID=4294967290 SLURM_STEP_ID=4294967290
SLURM_STEP_NODELIST=GPU71E4 SLURM_STEP_NUM_NODES=1 SLURM_STEP_NUM_TASKS=1 SLURM_STEP_TASKS_PER_NODE=1 SLURM_TASKS_PER_NODE=8
SLURM_TOPOLOGY_ADDR=GPU71E4 SLURM_TOPOLOGY_ADDR_PATTERN=node
"""  # noqa: E501
ONE_GPU_STEP = """
CUDA_VISIBLE_DEVICES=0 PMIX_NAMESPACE=slurm.pmix.22902023.0 PMIX_RANK=0 SLURM_CPUS_PER_TASK=4 SLURM_GPUS=1 SLURM_GPUS_ON_NODE=1
SLURM_JOB_ID=22902023 SLURM_JOB_NODELIST=sh04-10n05 SLURM_LOCALID=0 SLURM_NNODES=1 SLURM_NODEID=0 SLURM_NPROCS=1 SLURM_NTASKS=1
SLURM_PROCID=0 SLURM_STEPMGR=sh04-10n05 SLURM_STEP_GPUS=7 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=sh04-10n05 SLURM_STEP_NUM_NODES=1
SLURM_STEP_NUM_TASKS=1 SLURM_STEP_TASKS_PER_NODE=1 SLURM_TASKS_PER_NODE=1 SLURM_TRES_PER_TASK=cpu=4
"""  # noqa: E501

# A pod of Kubeflow Trainer 2.3, with its runtime jax-distributed; pkg/runtime/framework/plugins/jax
# and Kubernetes' own variables of an Indexed Job
KUBEFLOW = """
JAX_NUM_PROCESSES=4 JAX_PROCESS_ID=3 JAX_COORDINATOR_ADDRESS=train-node-0-0.train:6666 JOB_COMPLETION_INDEX=3
KUBERNETES_SERVICE_HOST=10.96.0.1 HOSTNAME=train-node-0-3
"""  # noqa: E501


def detected(*texts):
    environ = dict(word.split("=", 1) for text in texts for word in text.split())
    world = detect({**environ, "PATH": ""})
    return world and (
        world.rank,
        world.size,
        world.address,
        world.local_rank,
        world.local_size,
        world.local_devices,
    )


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        pytest.param(
            [SINGLE_NODE],
            (1, 4, f"127.0.0.1:{port(901593)}", 1, 4, None),
            id="four tasks of one node",
        ),
        pytest.param([TWO_NODES], (1, 2, f"node1:{port(25)}", 0, 1, None), id="two nodes"),
        pytest.param(
            [KUBEFLOW], (3, 4, "train-node-0-0.train:6666", None, None, None), id="Kubeflow"
        ),
        pytest.param([ONE_GPU_SHELL], ALONE, id="a shell with a GPU"),
        pytest.param([ONE_GPU_STEP], ALONE, id="a step of one task with a GPU"),
        pytest.param([BY_MPIRUN_AFAR], ALONE, id="a step of one task"),
        pytest.param(
            [BY_MPIRUN_AFAR, MPI, "OMPI_COMM_WORLD_RANK=3"],
            (3, 4, "node2:4000", 1, 2, None),
            id="mpirun, through a separate step",
        ),
        pytest.param(
            [BY_MPIRUN_HERE, MPI, "OMPI_COMM_WORLD_RANK=1"],
            (1, 4, "node2:4000", 1, 2, None),
            id="mpirun, in no step",
        ),
        pytest.param(
            [SINGLE_NODE, "CUDA_VISIBLE_DEVICES=0,1,2,3"],
            (1, 4, f"127.0.0.1:{port(901593)}", 1, 4, (1,)),
            id="four GPUs to share",
        ),
        pytest.param(
            [
                BY_MPIRUN_AFAR,
                "TORCHELASTIC_RUN_ID=x MASTER_ADDR=node1 MASTER_PORT=4001 WORLD_SIZE=4 RANK=3 "
                "LOCAL_RANK=1 LOCAL_WORLD_SIZE=2",
            ],
            (3, 4, "node1:4001", 1, 2, None),
            id="torchrun, one for each task",
        ),
    ],
)
def test_detect_on_recorded_environments(texts, expected):
    assert detected(*texts) == expected
