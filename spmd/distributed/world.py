"""The place of a process among those that train together, and addresses."""

import dataclasses
import ipaddress
import socket
import zlib

from spmd.base.tracebacks import trims_tracebacks
from spmd.errors import ClusterError, RendezvousTimeout

# The range of default ports, above those that Linux gives to connections (32768 to 60999); the
# job's id selects one.
FIRST_PORT, PORTS = 61440, 4096


@trims_tracebacks
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
      token: a secret of the job's processes; "": it has none.
      job: what names the job, the same in all of its processes.
      restarted: whether the launcher has started the job before, where no variable says so.

    Example:
      >>> World(0, 2, "10.0.0.1:61440", "my launcher").host  # for `spmd.join`, in process 0 of 2
      '10.0.0.1'
    """

    rank: int
    size: int
    address: str
    source: str
    local_rank: int | None = None
    local_size: int | None = None
    local_devices: tuple[int, ...] | None = None
    token: str = ""
    restarted: bool = False
    job: str = ""

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


def job_port(job: str) -> int:
    """The default port of a job with this name."""
    return FIRST_PORT + zlib.crc32(job.encode()) % PORTS


def free_port(address: str) -> int:
    """A port of this host that no process listens on."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def join_address(host: str, port: int | str) -> str:
    """HOST:PORT, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


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
            fix="SPMD_COORDINATOR=ADDRESS:PORT in all processes: its IP address and a free port.",
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
