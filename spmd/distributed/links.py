"""A connection between process 0 and each other process, which carries nothing: it shows that a
host is lost.

The kernels ask each other whether they are there, so a process that is stopped, or blocked by code
that holds the GIL, is not lost.
"""

import contextlib
import ipaddress
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

# seconds between two questions of the kernel, and how many without an answer mean that the other
# host is lost
IDLE, PROBES = 5, 3
# less than JAX's heartbeat, whose end aborts all processes without naming one
LOST_SECONDS = IDLE * (1 + PROBES)

# times that the kernel has sent something again before it counts as unanswered: 6 s or more with
# Linux's defaults
REPEATS = 5

# by rank: what the other process is called, and the connection
Links = Mapping[int, tuple[str, socket.socket]]


def keep(connection: socket.socket) -> socket.socket:
    """The connection, on which the kernel looks from now on whether the other host is there."""
    connection.setblocking(False)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # macOS has another name for the seconds before the first probe
    idle = "TCP_KEEPIDLE" if hasattr(socket, "TCP_KEEPIDLE") else "TCP_KEEPALIVE"
    for name, value in ((idle, IDLE), ("TCP_KEEPINTVL", IDLE), ("TCP_KEEPCNT", PROBES)):
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection


def lost(links: Links) -> list[str]:
    """The processes whose host does not answer any more. One that has ended is not lost: its host
    says so.
    """
    names = []
    for name, connection in links.values():
        try:
            with contextlib.suppress(BlockingIOError, ConnectionError):
                connection.recv(1)
        except OSError:  # timed out, or there is no way to the host
            names.append(name)
    return names


def local_address(links: Links) -> str:
    """The address of this host by which other processes reach it; that to another host, if there is
    one.
    """
    pairs = [
        (connection.getsockname()[0], connection.getpeername()[0])
        for _, connection in links.values()
    ]
    return next((local for local, remote in pairs if local != remote), pairs[0][0])


def unanswered() -> list[str]:
    """Addresses of hosts that acknowledge nothing of what this process sends them, over any TCP
    connection; [] where it is not Linux.

    Two processes of which neither is process 0 have none of the connections above, but those of
    their collectives.
    """
    hosts = set()
    # without the files of Linux, or with all descriptors in use, a report of a stall says less
    with contextlib.suppress(OSError):
        files = _open_files()
        for table in ("tcp", "tcp6"):
            for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
                _, _, remote, _, _, _, repeats, _, _, inode, *_ = line.split()
                # the tables list all connections of the network namespace, not only this process's
                if int(repeats, 16) >= REPEATS and f"socket:[{inode}]" in files:
                    hosts.add(_address(remote.partition(":")[0]))
    return sorted(hosts)


def _open_files() -> set[str]:
    """The files and sockets of this process's descriptors, such as "socket:[7]"."""
    files = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            files.add(os.readlink(f"/proc/self/fd/{name}"))
    return files


def _address(words: str) -> str:
    """An address from the kernel's tables: numbers of 32 bits in the order of bytes of this
    machine, as hexadecimal digits.
    """
    numbers = [int(words[first : first + 8], 16) for first in range(0, len(words), 8)]
    address = ipaddress.ip_address(
        b"".join(number.to_bytes(4, sys.byteorder) for number in numbers)
    )
    return str(getattr(address, "ipv4_mapped", None) or address)
