"""Detect this process's rank, the number of processes and the address of process 0, from the
environment that launchers set.
"""

import dataclasses
import ipaddress
import itertools
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping

from spmd.errors import ClusterError, RendezvousTimeout, printable

# The range of default ports, above those that Linux gives to connections (32768 to 60999); the
# job's id selects one.
FIRST_PORT, PORTS = 61440, 4096


@dataclasses.dataclass(frozen=True)
class World:
    """One process among those that train together.

    Attributes:
      rank: from 0; process 0 hosts the rendezvous.
      size: the number of processes.
      address: "host:port" where process 0 listens, and nowhere else.
      source: the launcher that set them.
      local_rank, local_size: rank and number of processes on this host; None if unknown.
      local_devices: the visible devices that this process uses; None: all.
      token: a secret of the job's processes.
    """

    rank: int
    size: int
    address: str
    source: str
    local_rank: int | None = None
    local_size: int | None = None
    local_devices: tuple[int, ...] | None = None
    token: str = ""

    def __post_init__(self):
        if self.size < 1 or not 0 <= self.rank < self.size:
            fix = f"ranks from 0 to {self.size - 1}" if self.size > 0 else "at least one process"
            raise ClusterError(f"{self.source}: process {self.rank} of {self.size}.", fix=f"{fix}.")
        host, _, port = self.address.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ClusterError(
                f'{self.source}: "{self.address}" is not an address.',
                fix="HOST:PORT, such as 10.0.0.1:61440.",
            )

    @property
    def host(self) -> str:
        """The host of process 0, without brackets around an IPv6 address."""
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """The port that process 0 listens on."""
        return int(self.address.rpartition(":")[2])

    def __str__(self) -> str:
        text = f"process {self.rank} of {self.size} ({self.source}), process 0 at {self.address}"
        if self.local_devices is not None:
            text += f", devices {', '.join(map(str, self.local_devices))} of this host"
        return text


def detect(environ: Mapping[str, str] = os.environ) -> World | None:
    """Read the environment that launchers set; None: this is the only process.

    Tried in this order: `spmd launch` (SPMD_PROCESSES, SPMD_PROCESS, SPMD_COORDINATOR), also for an
    Indexed Job of Kubernetes (with JOB_COMPLETION_INDEX instead of SPMD_PROCESS); JAX's own
    (JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID); torchrun and Open MPI, which may
    start processes inside a SLURM step that is not theirs; SLURM, in a step of `srun`; PyTorch's
    variables set by hand (MASTER_ADDR, MASTER_PORT, WORLD_SIZE, RANK).

    Raises:
      ClusterError: variables are missing, are not numbers, or contradict each other.

    Example:
      >>> world = detect(
      ...     {"SPMD_PROCESSES": "2", "SPMD_PROCESS": "1", "SPMD_COORDINATOR": "127.0.0.1:4000"}
      ... )
      >>> print(world)
      process 1 of 2 (spmd launch), process 0 at 127.0.0.1:4000
    """
    readers = (_spmd, _jax, _torchrun, _open_mpi, _slurm, _torch)
    world = next((world for read in readers if (world := read(environ)) is not None), None)
    if world is None or world.size == 1:
        return None
    return dataclasses.replace(world, token=environ.get("SPMD_TOKEN", world.token))


def _spmd(environ: Mapping[str, str]) -> World | None:
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


def _jax(environ: Mapping[str, str]) -> World | None:
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    if not all(name in environ for name in names):
        return None
    return World(
        _number(environ, names[2], "JAX"),
        _number(environ, names[1], "JAX"),
        environ[names[0]],
        "JAX's variables",
    )


def _slurm(environ: Mapping[str, str]) -> World | None:
    """A task of a step; outside of `srun` there is none, even inside a job."""
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
    per_node = _counts(environ.get("SLURM_STEP_TASKS_PER_NODE", str(size)))
    local_size = per_node[min(node, len(per_node) - 1)]
    host = "127.0.0.1"
    if local_size != size:
        host = environ.get("SPMD_BIND") or _first_node(environ["SLURM_STEP_NODELIST"])
    local_devices = None
    if not _has_own_gpus(environ):
        local_devices = _share(environ, local_rank, local_size)
    return World(
        rank=rank,
        size=size,
        address=f"{host}:{FIRST_PORT + (job + step) % PORTS}",
        source=source,
        local_rank=local_rank,
        local_size=local_size,
        local_devices=local_devices,
        token=f"{job}.{step}",
    )


def _has_own_gpus(environ: Mapping[str, str]) -> bool:
    """Return whether SLURM has bound GPUs to each task; other resources of a task say nothing about
    its GPUs.
    """
    per_task = "SLURM_GPUS_PER_TASK" in environ or "gpu" in environ.get("SLURM_TRES_PER_TASK", "")
    return per_task or environ.get("SLURM_GPU_BIND", "none").rpartition(",")[2] != "none"


def _open_mpi(environ: Mapping[str, str]) -> World | None:
    if "OMPI_COMM_WORLD_SIZE" not in environ:
        return None
    source = "Open MPI"
    rank = _number(environ, "OMPI_COMM_WORLD_RANK", source)
    size = _number(environ, "OMPI_COMM_WORLD_SIZE", source)
    local_rank = _number(environ, "OMPI_COMM_WORLD_LOCAL_RANK", source)
    local_size = _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", source)
    address = environ.get("SPMD_COORDINATOR")
    # the name of the job: Open MPI 5 sets the first, Open MPI 4 the second
    name = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_orte_hnp_uri", "").split(".")[0]
    if address is None and local_size != size:
        raise ClusterError(
            f"{source}: process {rank} of {size} does not know where process 0 is.",
            fix="mpirun -x SPMD_COORDINATOR=HOST:PORT, the first host's address and a free port.",
        )
    port = FIRST_PORT + sum(name.encode()) % PORTS
    return World(
        rank=rank,
        size=size,
        address=address or f"127.0.0.1:{port}",
        source=source,
        local_rank=local_rank,
        local_size=local_size,
        local_devices=_share(environ, local_rank, local_size),
        token=name,
    )


def _torchrun(environ: Mapping[str, str]) -> World | None:
    if "TORCHELASTIC_RUN_ID" not in environ:
        return None
    return _torch(environ)


def _torch(environ: Mapping[str, str]) -> World | None:
    if not all(name in environ for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")):
        return None
    source = "WORLD_SIZE and RANK"
    local_rank = _optional_number(environ, "LOCAL_RANK", source)
    local_size = _optional_number(environ, "LOCAL_WORLD_SIZE", source)
    local_devices = None
    if local_rank is not None and local_size is not None:
        local_devices = _share(environ, local_rank, local_size)
    return World(
        rank=_number(environ, "RANK", source),
        size=_number(environ, "WORLD_SIZE", source),
        address=f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}",
        source=source,
        local_rank=local_rank,
        local_size=local_size,
        local_devices=local_devices,
    )


def _share(environ: Mapping[str, str], local_rank: int, local_size: int) -> tuple[int, ...] | None:
    """This process's equal share of the GPUs that all processes of a host see; None if each sees
    only its own, or none are visible.
    """
    if local_size == 1:
        return None
    visible = len(visible_gpus(environ))
    if visible < local_size:
        return None
    if visible % local_size:
        raise ClusterError(
            f"{visible} GPUs cannot be shared equally by {local_size} processes of a host.",
            fix="as many processes as GPUs; or CUDA_VISIBLE_DEVICES with a multiple of the "
            "processes.",
        )
    share = visible // local_size
    return tuple(range(local_rank * share, (local_rank + 1) * share))


def visible_gpus(environ: Mapping[str, str] = os.environ) -> list[str]:
    """The GPUs that a process of this host sees, as CUDA_VISIBLE_DEVICES names them.

    Raises:
      ClusterError: nvidia-smi exists but fails.
    """
    if "CUDA_VISIBLE_DEVICES" in environ:
        names = map(str.strip, environ["CUDA_VISIBLE_DEVICES"].split(","))
        # for CUDA, -1 ends the list
        listed = itertools.takewhile(lambda name: not name.startswith("-"), names)
        return list(filter(None, listed))
    if environ.get("SLURM_GPUS_ON_NODE", "").isdigit():
        return [str(number) for number in range(int(environ["SLURM_GPUS_ON_NODE"]))]
    tool = shutil.which("nvidia-smi", path=environ.get("PATH", ""))
    if tool is None:
        return []
    try:
        output = subprocess.run(
            [tool, "-L"], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        output = getattr(error, "stdout", None) or getattr(error, "stderr", None) or error
        raise ClusterError(
            f"nvidia-smi -L fails: {printable(str(output).strip(), 300)}",
            fix="set CUDA_VISIBLE_DEVICES to the GPUs to use.",
        ) from None
    count = sum(line.startswith("GPU ") for line in output.splitlines())
    return [str(number) for number in range(count)]


def free_port(address: str) -> int:
    """A port of this host that no process listens on."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def join_address(host: str, port: int) -> str:
    """HOST:PORT, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


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
    if not environ.get(name):
        raise ClusterError(
            f"{source}: {name} is not set.", fix="set it in every process, or unset the others."
        )
    return environ[name]


def _counts(text: str) -> list[int]:
    """The number of tasks on each node, as SLURM writes it.

    >>> _counts("4(x2),2")
    [4, 4, 2]
    """
    counts = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ClusterError(
                f"SLURM_STEP_TASKS_PER_NODE={text!r} cannot be read.", fix="such as 4(x2),2."
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


def resolve_address(world: World) -> str:
    """The IP address that process 0 listens on, and that others connect to.

    Raises:
      RendezvousTimeout: the name does not resolve; a cluster may register it a little later.
      ClusterError: other hosts cannot reach the address, or it stands for all interfaces.
    """
    try:
        resolved = socket.getaddrinfo(world.host, world.port, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise RendezvousTimeout(
            f"{world}: the host {world.host!r} does not resolve: {error}.",
            fix="use its IP address.",
        ) from error
    address = ipaddress.ip_address(str(resolved).partition("%")[0])
    if address.is_unspecified:
        raise ClusterError(
            f"{world}: {address} stands for all interfaces.", fix="the address of one interface."
        )
    other_hosts = world.local_size is not None and world.local_size < world.size
    if address.is_loopback and other_hosts and world.host != str(address):
        raise ClusterError(
            f"{world}: {world.host} is {address} here, which other hosts cannot reach.",
            fix="SPMD_BIND=ADDRESS (SLURM) or SPMD_COORDINATOR=ADDRESS:PORT, an address of that "
            "host on the cluster's network.",
        )
    return str(address)
