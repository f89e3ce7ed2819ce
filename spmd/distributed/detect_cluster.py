"""Who am I among how many, and where does process 0 call the roll: read from what launchers leave in the environment."""

import dataclasses
import ipaddress
import itertools
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping

from spmd.errors import ClusterError, RendezvousTimeout, escaped

FIRST_PORT, PORTS = 61440, 4096  # where none is given: one of these, by the job's number


@dataclasses.dataclass(frozen=True)
class World:
    """One process among those that train together.

    Attributes:
      rank: from 0; process 0 calls the roll.
      size: how many there are.
      address: "host:port" where process 0 calls the roll; it listens there and nowhere else.
      source: who said so.
      local_rank, local_size: the same among those of this host; None where it is not known.
      local_devices: which of the devices that this process sees are its own; None: all.
      token: what those of one job know, and others do not.
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
            fix = f"numbers from 0 to {self.size - 1}" if self.size > 0 else "at least one process"
            raise ClusterError(f"{self.source}: process {self.rank} of {self.size}.", fix=f"{fix}.")
        host, _, port = self.address.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ClusterError(f'{self.source}: "{self.address}" is no address.', fix="HOST:PORT, such as 10.0.0.1:61440.")

    @property
    def host(self) -> str:
        """Where process 0 is, without brackets around an IPv6 address."""
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """Where it calls the roll."""
        return int(self.address.rpartition(":")[2])

    def __str__(self) -> str:
        own = "" if self.local_devices is None else f", devices {', '.join(map(str, self.local_devices))} of this host"
        return f"process {self.rank} of {self.size} ({self.source}), process 0 at {self.address}{own}"


def detect(environ: Mapping[str, str] = os.environ) -> World | None:
    """What launchers left in the environment; None: this process is alone.

    Tried in this order: `spmd launch` (SPMD_PROCESSES, SPMD_PROCESS, SPMD_COORDINATOR), which an Indexed Job of Kubernetes may use too
    (JOB_COMPLETION_INDEX in SPMD_PROCESS's place); JAX's own (JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID); torchrun and
    Open MPI, which inside of a SLURM job start processes in steps that are not theirs; SLURM, in a step of `srun`; PyTorch's variables
    set by hand (MASTER_ADDR, MASTER_PORT, WORLD_SIZE, RANK).

    Raises:
      ClusterError: variables that are missing, no numbers, or do not fit each other.

    Example:
      >>> found = detect({"SPMD_PROCESSES": "2", "SPMD_PROCESS": "1", "SPMD_COORDINATOR": "127.0.0.1:4000"})
      >>> print(found)
      process 1 of 2 (spmd launch), process 0 at 127.0.0.1:4000
    """
    found = next((world for read in (_spmd, _jax, _torchrun, _open_mpi, _slurm, _torch) if (world := read(environ)) is not None), None)
    if found is None or found.size == 1:
        return None
    return dataclasses.replace(found, token=environ.get("SPMD_TOKEN", found.token))


def _spmd(environ: Mapping[str, str]) -> World | None:
    if "SPMD_PROCESSES" not in environ:
        return None
    pods = "SPMD_PROCESS" not in environ and "JOB_COMPLETION_INDEX" in environ
    source, rank = ("Kubernetes", "JOB_COMPLETION_INDEX") if pods else ("spmd launch", "SPMD_PROCESS")
    local, here = (_maybe(environ, name, source) for name in ("SPMD_LOCAL_PROCESS", "SPMD_LOCAL_PROCESSES"))
    return World(
        _number(environ, rank, source),
        _number(environ, "SPMD_PROCESSES", source),
        _text(environ, "SPMD_COORDINATOR", source),
        source,
        local,
        here,
    )


def _jax(environ: Mapping[str, str]) -> World | None:
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    if not all(name in environ for name in names):
        return None
    return World(_number(environ, names[2], "JAX"), _number(environ, names[1], "JAX"), environ[names[0]], "JAX's variables")


def _slurm(environ: Mapping[str, str]) -> World | None:
    """A task of a step: outside of `srun` there is none, whatever the job has."""
    if not all(name in environ for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS")):
        return None
    source = f"SLURM job {environ['SLURM_JOB_ID']}"
    if environ.get("SLURM_HET_SIZE", "1") != "1":
        raise ClusterError(
            f"{source} has {environ['SLURM_HET_SIZE']} components; where its processes meet cannot be read from what SLURM tells them.\n"
            "    fix: a job of one component; or SPMD_PROCESSES, SPMD_PROCESS and SPMD_COORDINATOR=HOST:PORT in each task."
        )
    job, step = _number(environ, "SLURM_JOB_ID", source), _number(environ, "SLURM_STEP_ID", source)
    rank, size = _number(environ, "SLURM_PROCID", source), _number(environ, "SLURM_STEP_NUM_TASKS", source)
    local, node = _number(environ, "SLURM_LOCALID", source), _number(environ, "SLURM_NODEID", source)
    per_node = _counts(environ.get("SLURM_STEP_TASKS_PER_NODE", str(size)))
    here = per_node[node] if node < len(per_node) else per_node[-1]
    host = "127.0.0.1" if here == size else environ.get("SPMD_BIND") or _first(environ["SLURM_STEP_NODELIST"])
    own = None if _bound(environ) else _share(environ, local, here)
    return World(rank, size, f"{host}:{FIRST_PORT + (job + step) % PORTS}", source, local, here, own, f"{job}.{step}")


def _bound(environ: Mapping[str, str]) -> bool:
    """Whether SLURM has given each task GPUs of its own; what a task may have of other things says nothing of them."""
    per_task = "SLURM_GPUS_PER_TASK" in environ or "gpu" in environ.get("SLURM_TRES_PER_TASK", "")
    return per_task or environ.get("SLURM_GPU_BIND", "none").rpartition(",")[2] != "none"


def _open_mpi(environ: Mapping[str, str]) -> World | None:
    if "OMPI_COMM_WORLD_SIZE" not in environ:
        return None
    source, mpi = "Open MPI", "OMPI_COMM_WORLD"
    rank, size = _number(environ, f"{mpi}_RANK", source), _number(environ, f"{mpi}_SIZE", source)
    local, here = _number(environ, f"{mpi}_LOCAL_RANK", source), _number(environ, f"{mpi}_LOCAL_SIZE", source)
    given = environ.get("SPMD_COORDINATOR")
    name = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_orte_hnp_uri", "").split(".")[0]
    if given is None and here != size:
        raise ClusterError(
            f"{source}: process {rank} of {size} does not know where process 0 is.\n"
            "    fix: mpirun -x SPMD_COORDINATOR=HOST:PORT, the first host's address and a free port."
        )
    port = FIRST_PORT + sum(name.encode()) % PORTS
    return World(rank, size, given or f"127.0.0.1:{port}", source, local, here, _share(environ, local, here), name)


def _torchrun(environ: Mapping[str, str]) -> World | None:
    return _torch(environ) if "TORCHELASTIC_RUN_ID" in environ else None


def _torch(environ: Mapping[str, str]) -> World | None:
    if not all(name in environ for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")):
        return None
    source = "WORLD_SIZE and RANK"
    local, here = (_maybe(environ, name, source) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    own = None if local is None or here is None else _share(environ, local, here)
    address = f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
    return World(_number(environ, "RANK", source), _number(environ, "WORLD_SIZE", source), address, source, local, here, own)


def _share(environ: Mapping[str, str], local: int, here: int) -> tuple[int, ...] | None:
    """Which of the GPUs that all processes of a host see are this one's: equal shares; None where each sees its own, or all see none."""
    seen = 0 if here == 1 else len(visible_gpus(environ))
    if seen < here:
        return None
    if seen % here:
        raise ClusterError(
            f"{seen} GPUs cannot be shared by {here} processes of a host.\n"
            "    fix: as many processes as GPUs; or CUDA_VISIBLE_DEVICES with as many as can be shared."
        )
    share = seen // here
    return tuple(range(local * share, (local + 1) * share))


def visible_gpus(environ: Mapping[str, str] = os.environ) -> list[str]:
    """The GPUs that a process of this host sees, as CUDA_VISIBLE_DEVICES names them.

    Raises:
      ClusterError: there is a driver, but it does not work.
    """
    if "CUDA_VISIBLE_DEVICES" in environ:
        given = [name.strip() for name in environ["CUDA_VISIBLE_DEVICES"].split(",") if name.strip()]
        return list(itertools.takewhile(lambda name: not name.startswith("-"), given))  # -1 is none, and ends the list
    if environ.get("SLURM_GPUS_ON_NODE", "").isdigit():
        return [str(number) for number in range(int(environ["SLURM_GPUS_ON_NODE"]))]
    tool = shutil.which("nvidia-smi", path=environ.get("PATH", ""))
    if tool is None:
        return []
    try:
        listed = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError) as error:
        told = getattr(error, "stdout", None) or getattr(error, "stderr", None) or error
        raise ClusterError(
            f"nvidia-smi -L does not work: {escaped(str(told).strip(), 300)}", fix="CUDA_VISIBLE_DEVICES says which GPUs."
        ) from None
    return [str(number) for number, _ in enumerate(line for line in listed if line.startswith("GPU "))]


def free_port(address: str) -> int:
    """A port of this host that nothing listens at."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def _number(environ: Mapping[str, str], name: str, source: str) -> int:
    text = _text(environ, name, source)
    if not re.fullmatch(r"\d{1,12}", text):
        raise ClusterError(f"{source}: {name}={text!r} is no number.", fix="a whole number from 0.")
    return int(text)


def _maybe(environ: Mapping[str, str], name: str, source: str) -> int | None:
    return _number(environ, name, source) if name in environ else None


def _text(environ: Mapping[str, str], name: str, source: str) -> str:
    if not environ.get(name):
        raise ClusterError(f"{source}: {name} is not set.", fix="set it in every process, or none of the others.")
    return environ[name]


def _counts(text: str) -> list[int]:
    """SLURM's tasks of each node.

    >>> _counts("4(x2),2")
    [4, 4, 2]
    """
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ClusterError(f"SLURM_STEP_TASKS_PER_NODE={text!r} cannot be read.", fix="such as 4(x2),2.")
        found += [int(match[1])] * int(match[2] or 1)
    return found


def _first(nodes: str) -> str:
    """The first of SLURM's list of nodes.

    >>> _first("gpu[003-005,8],login1"), _first("a1,a2"), _first("rack[1-2]n[07-09]")
    ('gpu003', 'a1', 'rack1n07')
    """
    depth, end = 0, len(nodes)
    for at, letter in enumerate(nodes):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            end = at
            break
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", nodes[:end])


def resolved(world: World) -> str:
    """The address that process 0 listens on, and others connect to.

    Raises:
      RendezvousTimeout: it has none; a cluster may know its name a little later.
      ClusterError: one that other hosts cannot reach, or that means all interfaces.
    """
    try:
        found = socket.getaddrinfo(world.host, world.port, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise RendezvousTimeout(f"{world}: the host {world.host!r} has no address: {error}.", fix="its IP address.") from error
    address = ipaddress.ip_address(str(found).partition("%")[0])
    if address.is_unspecified:
        raise ClusterError(f"{world}: {address} means every interface.", fix="the address of one.")
    several = world.local_size is not None and world.local_size < world.size
    if address.is_loopback and several and world.host != str(address):
        raise ClusterError(
            f"{world}: {world.host} is {address} here, which other hosts cannot reach.\n"
            "    fix: SPMD_BIND=ADDRESS (SLURM) or SPMD_COORDINATOR=ADDRESS:PORT, an address of that host on the cluster's network."
        )
    return str(address)
