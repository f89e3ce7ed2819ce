"""A connection between process 0 and each other process, which carries nothing: it shows that a host is lost.

The kernels ask each other whether they are there, so a process that is stopped, or blocked by code that holds the GIL, is not lost.
"""

import contextlib
import os
import socket
from collections.abc import Mapping

IDLE, PROBES = 5, 3  # seconds between two questions of the kernel, and how many without an answer mean that the other host is lost
LOST_SECONDS = IDLE * (1 + PROBES)  # less than JAX's heartbeat, whose end aborts all processes without naming one

REPEATS = 5  # times that the kernel has sent something again, over 6 s and more, before it counts as unanswered

Links = Mapping[int, tuple[str, socket.socket]]  # by rank: what the other process is called, and the connection


def keep(connection: socket.socket) -> socket.socket:
    """The connection, on which the kernel looks from now on whether the other host is there."""
    connection.setblocking(False)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    idle = "TCP_KEEPIDLE" if hasattr(socket, "TCP_KEEPIDLE") else "TCP_KEEPALIVE"  # macOS
    for name, value in ((idle, IDLE), ("TCP_KEEPINTVL", IDLE), ("TCP_KEEPCNT", PROBES)):
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection


def lost(links: Links) -> list[str]:
    """The processes whose host does not answer any more. One that has ended is not lost: its host says so."""
    names = []
    for name, connection in links.values():
        try:
            with contextlib.suppress(BlockingIOError, ConnectionError):
                connection.recv(1)
        except OSError:  # timed out, or there is no way to the host
            names.append(name)
    return names


def local_address(links: Links) -> str:
    """The address of this host by which other processes reach it; that to another host, if there is one."""
    pairs = [(connection.getsockname()[0], connection.getpeername()[0]) for _, connection in links.values()]
    return next((own for own, other in pairs if own != other), pairs[0][0])


def unanswered() -> list[str]:
    """Addresses of hosts that acknowledge nothing of what this process sends them, over any TCP connection; Linux only.

    Two processes of which neither is process 0 have none of the connections above, but those of their collectives.
    """
    hosts = set()
    for entry in os.scandir("/proc/self/fd") if hasattr(socket, "TCP_INFO") else ():
        with contextlib.suppress(OSError):  # it was closed, or is no TCP connection
            if os.readlink(entry.path).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                    if connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 3)[2] >= REPEATS:  # tcpi_retransmits
                        hosts.add(connection.getpeername()[0])
    return sorted(hosts)
