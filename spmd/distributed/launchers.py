"""Read rank, size and address from the environment variables that launchers set."""

import contextlib
import dataclasses
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

from spmd.distributed.host_gpus import share_gpus
from spmd.distributed.world import FIRST_PORT, PORTS, World, job_port, join_address
from spmd.errors import ClusterError

Environ = Mapping[str, str]

# of launchers that start one process on each node: the number of nodes, the rank of this one, the
# addresses of which the first is that of process 0, and the name of the job
NODE_VARIABLES = {
    "SkyPilot": (
        "SKYPILOT_NUM_NODES",
        "SKYPILOT_NODE_RANK",
        "SKYPILOT_NODE_IPS",
        "SKYPILOT_TASK_ID",
    ),
    "dstack": (
        "DSTACK_NODES_NUM",
        "DSTACK_NODE_RANK",
        "DSTACK_MASTER_NODE_IP",
        "DSTACK_RUN_NAME",
    ),
    "LeaderWorkerSet": (
        "LWS_GROUP_SIZE",
        "LWS_WORKER_INDEX",
        "LWS_LEADER_ADDRESS",
        "LWS_LEADER_ADDRESS",
    ),
}


def read_spmd(environ: Environ) -> World | None:
    """Read the variables of `spmd launch`; in an Indexed Job the rank is Kubernetes' own."""
    if "SPMD_PROCESSES" not in environ:
        return None
    source, rank_name = "spmd launch", "SPMD_PROCESS"
    if "SPMD_PROCESS" not in environ and "JOB_COMPLETION_INDEX" in environ:
        source, rank_name = "Kubernetes", "JOB_COMPLETION_INDEX"
    return World(
        local_rank=_optional_number(environ, "SPMD_LOCAL_PROCESS", source),
        local_size=_optional_number(environ, "SPMD_LOCAL_PROCESSES", source),
        rank=_number(environ, rank_name, source),
        size=_number(environ, "SPMD_PROCESSES", source),
        address=_required(environ, "SPMD_COORDINATOR", source),
        source=source,
    )


def read_jax(environ: Environ) -> World | None:
    """Read JAX's own variables."""
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    if not all(name in environ for name in names):
        return None
    return World(
        _number(environ, names[2], "JAX"),
        _number(environ, names[1], "JAX"),
        environ[names[0]],
        "JAX's variables",
    )


def read_torchrun(environ: Environ) -> World | None:
    """Read the variables of torchrun, and of `accelerate launch`, which calls it."""
    if "TORCHELASTIC_RUN_ID" not in environ:
        return None
    world = read_torch(environ)
    if world is None or environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return world
    # Torchrun itself listens at MASTER_PORT.
    job = f"{world.port} {environ['TORCHELASTIC_RUN_ID']}"
    address = join_address(world.host, job_port(job))
    return dataclasses.replace(world, address=address, source="torchrun", job=job)


def read_torch(environ: Environ) -> World | None:
    """Read PyTorch's variables."""
    if not all(name in environ for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")):
        return None
    source = "WORLD_SIZE and RANK"
    local_rank = _optional_number(environ, "LOCAL_RANK", source)
    local_size = _optional_number(environ, "LOCAL_WORLD_SIZE", source)
    local_devices = None
    if local_rank is not None and local_size is not None:
        local_devices = share_gpus(environ, local_rank, local_size)
    return World(
        rank=_number(environ, "RANK", source),
        size=_number(environ, "WORLD_SIZE", source),
        address=join_address(environ["MASTER_ADDR"], environ["MASTER_PORT"]),
        source=source,
        local_rank=local_rank,
        local_size=local_size,
        local_devices=local_devices,
    )


def read_open_mpi(environ: Environ) -> World | None:
    """Read the variables of Open MPI's `mpirun`."""
    if "OMPI_COMM_WORLD_SIZE" not in environ:
        return None
    source = "Open MPI"
    # Open MPI 5 sets the first, Open MPI 4 the second
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_orte_hnp_uri", "").split(".")[0]
    return _of_one_host(
        environ,
        rank=_number(environ, "OMPI_COMM_WORLD_RANK", source),
        size=_number(environ, "OMPI_COMM_WORLD_SIZE", source),
        local_rank=_number(environ, "OMPI_COMM_WORLD_LOCAL_RANK", source),
        local_size=_number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", source),
        source=source,
        job=job,
        option="mpirun -x SPMD_COORDINATOR=HOST:PORT",
    )


def read_hydra(environ: Environ) -> World | None:
    """Read the variables of Hydra, the `mpiexec` of MPICH, Intel MPI and MVAPICH."""
    # with -pmi-port the others are not there, and `detect_cluster.py` refuses it
    if not all(name in environ for name in ("MPI_LOCALNRANKS", "PMI_SIZE", "PMI_RANK")):
        return None
    source = "Hydra"
    size = _number(environ, "PMI_SIZE", source)
    local_size = _number(environ, "MPI_LOCALNRANKS", source)
    return _of_one_host(
        environ,
        rank=_number(environ, "PMI_RANK", source),
        size=size,
        local_rank=_number(environ, "MPI_LOCALRANKID", source),
        local_size=local_size,
        source=source,
        # Each host has a proxy of its own.
        job=_hydra_proxy() if local_size == size else "",
        option="mpiexec -genv SPMD_COORDINATOR HOST:PORT",
    )


def read_flux(environ: Environ) -> World | None:
    """Read the variables of `flux run`."""
    if "FLUX_TASK_RANK" not in environ:
        return None
    source = "Flux"
    size = _number(environ, "FLUX_JOB_SIZE", source)
    nodes = _number(environ, "FLUX_JOB_NNODES", source)
    # Tasks of several nodes may be divided unequally: their numbers are not known.
    return _of_one_host(
        environ,
        rank=_number(environ, "FLUX_TASK_RANK", source),
        size=size,
        local_rank=_number(environ, "FLUX_TASK_LOCAL_ID", source),
        local_size=size if nodes == 1 else None,
        source=source,
        job=environ.get("FLUX_JOB_ID", ""),
        option="flux run --env=SPMD_COORDINATOR=HOST:PORT",
    )


def read_slurm(environ: Environ) -> World | None:
    """Read the variables of a step of `srun`; outside of one there is none, even inside a job."""
    # salloc and sbatch set SLURM_JOB_ID too, in a process that is no task of a step.
    if not all(
        name in environ
        for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS")
    ):
        return None
    source = f"SLURM job {environ['SLURM_JOB_ID']}"
    if environ.get("SLURM_HET_SIZE", "1") != "1":
        raise ClusterError(
            f"{source} has {environ['SLURM_HET_SIZE']} components, for which SLURM's variables do "
            "not say where process 0 is.",
            fix="a job of one component; or SPMD_PROCESSES, SPMD_PROCESS and "
            "SPMD_COORDINATOR=HOST:PORT in each task.",
        )
    job = _number(environ, "SLURM_JOB_ID", source)
    step = _number(environ, "SLURM_STEP_ID", source)
    rank = _number(environ, "SLURM_PROCID", source)
    size = _number(environ, "SLURM_STEP_NUM_TASKS", source)
    local_rank = _number(environ, "SLURM_LOCALID", source)
    node = _number(environ, "SLURM_NODEID", source)
    per_node = task_counts(environ.get("SLURM_STEP_TASKS_PER_NODE", str(size)))
    local_size = per_node[min(node, len(per_node) - 1)]
    host = "127.0.0.1"
    if local_size != size:
        host = environ.get("SPMD_BIND") or _node_address(
            environ, _first_node(environ["SLURM_STEP_NODELIST"])
        )
    local_devices = None
    if not _has_own_gpus(environ):
        local_devices = share_gpus(environ, local_rank, local_size)
    return World(
        rank=rank,
        size=size,
        address=join_address(host, FIRST_PORT + (job + step) % PORTS),
        source=source,
        local_rank=local_rank,
        local_size=local_size,
        local_devices=local_devices,
        job=f"{job}.{step}",
    )


def read_nodes(environ: Environ) -> World | None:
    """Read the variables of launchers that start one process on each node (`NODE_VARIABLES`)."""
    for source, (size_name, rank_name, hosts_name, job_name) in NODE_VARIABLES.items():
        if environ.get(size_name, "1") == "1":
            continue
        host = _required(environ, hosts_name, source).split()[0]
        job = environ.get(job_name, "")
        return World(
            rank=_number(environ, rank_name, source),
            size=_number(environ, size_name, source),
            address=join_address(host, job_port(job)),
            source=source,
            local_rank=0,
            local_size=1,
            job=job,
        )
    return None


# Tried in this order: MPI and torchrun may be started by Flux, SLURM or one of the last ones, whose
# variables their processes still have; and Flux by Hydra.
READERS = (
    read_spmd,
    read_jax,
    read_torchrun,
    read_open_mpi,
    read_flux,
    read_hydra,
    read_slurm,
    read_torch,
    read_nodes,
)


def _of_one_host(
    environ: Environ,
    *,
    rank: int,
    size: int,
    local_rank: int,
    local_size: int | None,
    source: str,
    job: str,
    option: str,
) -> World:
    """A process of a launcher that does not say where process 0 is: on this host, if all are here
    and the job has a name; otherwise `option` has to say it.
    """
    is_one_host = size == 1 or (local_size == size and job != "")
    if not is_one_host and "SPMD_COORDINATOR" not in environ:
        raise ClusterError(
            f"{source}: process {rank} of {size} needs the address of process 0.",
            fix=f"{option}: an address of process 0's host (127.0.0.1 if all run there), and a "
            "free port.",
        )
    if is_one_host:
        # Jobs in containers that share a network may have the same name: process ids in it begin
        # anew in each.
        with contextlib.suppress(OSError):
            job = f"{job} {os.readlink('/proc/self/ns/pid')}"
    local_devices = None
    if local_size is not None:
        local_devices = share_gpus(environ, local_rank, local_size)
    return World(
        rank=rank,
        size=size,
        address=f"127.0.0.1:{job_port(job)}",
        source=source,
        local_rank=local_rank,
        local_size=local_size,
        local_devices=local_devices,
        job=job,
    )


def _hydra_proxy() -> str:
    """The id and start time of Hydra's own process on this host, an ancestor of all processes of
    one job; "" where it is not seen. Hydra sets no variable with a job's name.
    """
    process = os.getpid()
    while process > 1:
        try:
            line = Path(f"/proc/{process}/stat").read_text(errors="replace")
        except OSError:
            return ""
        # "12 (name) S 11 ...", where the name may have spaces and brackets
        name, _, rest = line.partition("(")[2].rpartition(")")
        if name.endswith("pmi_proxy"):
            started = rest.split()[19]  # in clock ticks since the host started
            return f"{process} {started}"
        process = int(rest.split()[1])
    return ""


def _has_own_gpus(environ: Mapping[str, str]) -> bool:
    """Return whether SLURM has bound GPUs to each task; other resources of a task say nothing about
    its GPUs.
    """
    per_task = "SLURM_GPUS_PER_TASK" in environ or "gpu" in environ.get("SLURM_TRES_PER_TASK", "")
    return per_task or environ.get("SLURM_GPU_BIND", "none").rpartition(",")[2] != "none"


def _number(environ: Mapping[str, str], name: str, source: str) -> int:
    text = _required(environ, name, source)
    if not re.fullmatch(r"\d{1,12}", text):
        raise ClusterError(f"{source}: {name}={text!r} is not a number.", fix="an integer from 0.")
    return int(text)


def _optional_number(environ: Mapping[str, str], name: str, source: str) -> int | None:
    if name not in environ:
        return None
    return _number(environ, name, source)


def _required(environ: Mapping[str, str], name: str, source: str) -> str:
    if not environ.get(name, "").strip():
        raise ClusterError(
            f"{source}: {name} is not set.", fix="set it in every process, or unset the others."
        )
    return environ[name]


def _node_address(environ: Environ, node: str) -> str:
    """The name of a node, if it resolves, or the address that SLURM itself uses."""
    scontrol = shutil.which("scontrol", path=environ.get("PATH", ""))
    if scontrol is None:
        return node
    with contextlib.suppress(OSError):
        socket.getaddrinfo(node, None)
        return node
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        shown = subprocess.run(
            [scontrol, "show", "node", "--oneliner", node],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        ).stdout
        if match := re.search(r"\bNodeAddr=(\S+)", shown):
            return match[1]
    return node


def task_counts(text: str) -> list[int]:
    """Numbers of tasks or CPUs of each node, as SLURM writes them.

    >>> task_counts("4(x2),2"), task_counts("")
    ([4, 4, 2], [])
    """
    counts = []
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ClusterError(
                f"SLURM's numbers for each node, {text!r}, cannot be read.", fix="such as 4(x2),2."
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _first_node(nodes: str) -> str:
    """The first node of a list, as SLURM writes it.

    >>> _first_node("gpu[003-005,8],login1"), _first_node("a1,a2"), _first_node("rack[1-2]n[07-09]")
    ('gpu003', 'a1', 'rack1n07')
    """
    # Split at commas outside of brackets.
    first = re.split(r",(?![^\[]*\])", nodes)[0]
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first)
