"""Hosts for `spmd launch --hosts` on this machine: network namespaces with their own memory or,
without privileges, loopback addresses.

A host in a namespace has a network interface on a bridge, an address, a name, and a /dev/shm that
no other host sees. A loopback host only has an address, and a folder for its memory. Both are
reached by a stand-in for ssh, which marks all processes of a host.
"""

import contextlib
import dataclasses
import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from launched import ROOT

MARK = "SPMD_TEST_HOST"
SSH = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do [ "$1" = -o ] && shift; shift; done
host=$1; shift
export {mark}={tag}.$host
{enter}
"""
# The namespaces of a host live as long as this process, which ends with its standard input, so also
# when the test is killed.
HOLD = """
mount -t tmpfs none /dev/shm && mount --bind {folder}/hosts /etc/hosts && hostname {name} && ip link set lo up && echo ready && exec cat
"""  # noqa: E501


@dataclasses.dataclass
class Host:
    """One host.

    Attributes:
      name: as in a file of hosts.
      shown: what a run calls it, as a regular expression.
      memory: the folder of its memory, as this process sees it.
      mark: in the environment of its processes.
      holder: the process that keeps its namespaces; None: it has none.
    """

    name: str
    shown: str
    memory: Path
    mark: str
    holder: int | None = None

    def processes(self, words: str = "") -> list[int]:
        """Its processes whose command has these words; those of `spmd launch` by rank."""
        found = []
        for entry in os.scandir("/proc"):
            if entry.name.isdigit():
                with contextlib.suppress(OSError):  # it has ended
                    command, variables = (
                        Path(entry.path, name).read_bytes().split(b"\0")
                        for name in ("cmdline", "environ")
                    )
                    rank = next(
                        (int(each[13:]) for each in variables if each.startswith(b"SPMD_PROCESS=")),
                        -1,
                    )
                    if f"{MARK}={self.mark}".encode() in variables and words.encode() in b" ".join(
                        command
                    ):
                        found.append((rank, int(entry.name)))
        return [pid for _, pid in sorted(found)]

    def kill(self, words: str = "", most: int | None = None) -> None:
        """SIGKILL to its processes whose command has these words, or to the first `most` of
        them.
        """
        for pid in self.processes(words)[:most]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def kill_workers(self, most: int | None = None) -> None:
        """SIGKILL to the processes that train, not to the agent."""
        self.kill("spmd.launch.runner", most)

    def lose_memory(self) -> None:
        """Everything in its memory is gone, as after a reboot."""
        if self.holder is None:
            shutil.rmtree(self.memory, ignore_errors=True)
        else:
            _inside(
                self.holder, "-m", "sh", "-c", "umount -l /dev/shm && mount -t tmpfs none /dev/shm"
            )

    def connect(self, state: str) -> None:
        """The link to the other hosts is "up" or "down"."""
        _inside(self.holder, "-n", "ip", "link", "set", "wire", state)


@dataclasses.dataclass
class Hosts:
    """Hosts, what `spmd launch` needs to use them, and the process that keeps the network between
    them; None: it is this machine's.
    """

    hosts: list[Host]
    ssh: Path
    switch: int | None = None

    def __getitem__(self, number: int) -> Host:
        return self.hosts[number]

    def options(self, processes: Sequence[int], simulate: int = 2) -> list[object]:
        """Options of `spmd launch` for so many processes on the first hosts, with CPU devices in
        each.
        """
        file = self.ssh.with_name("hosts.txt")
        file.write_text(
            "".join(
                f"{host.name} processes={count}\n"
                for host, count in zip(self.hosts, processes, strict=False)
            )
        )
        return ["--hosts", file, "--ssh", self.ssh, "--folder", ROOT, "--simulate", simulate]

    def disconnect(self, *numbers: int) -> None:
        """These hosts do not reach each other any more, but all others."""
        for number in numbers:
            _inside(
                self.switch,
                "-n",
                "bridge",
                "link",
                "set",
                "dev",
                self[number].name,
                "isolated",
                "on",
            )

    def pieces(self, step: int) -> int:
        """How many pieces of a step are in the memory of all hosts."""
        return sum(len(list(host.memory.rglob(f"{step}.?"))) for host in self.hosts)


TRY = """
mount -t tmpfs none /dev/shm && mount --bind /dev/null /etc/hosts && hostname other && ip link set lo up &&
ip link add name switch type bridge && ip link add name wire netns $$ type veth peer name end netns $$ &&
ip addr add 10.77.0.1/24 dev wire && ip link set dev end master switch up && nsenter -t $$ -n -u -m true
"""  # noqa: E501


def has_namespaces() -> bool:
    """Whether this user may make namespaces, and all that they need works here."""
    if os.geteuid() != 0 or not all(
        map(shutil.which, ("ip", "bridge", "unshare", "nsenter", "mount"))
    ):
        return False
    return (
        subprocess.run(
            ["unshare", "-num", "sh", "-c", TRY], capture_output=True, check=False, timeout=20
        ).returncode
        == 0
    )


@contextlib.contextmanager
def simulated_hosts(folder: Path, count: int) -> Iterator[Hosts]:
    """So many hosts, in namespaces where that is possible; at the end nothing of them is left,
    whatever happens.
    """
    tag, folder = secrets.token_hex(4), folder / "hosts"
    folder.mkdir()
    with contextlib.ExitStack() as undo:
        hosts, switch = (
            _namespaces(folder, count, tag, undo)
            if has_namespaces()
            else (_loopback(folder, count, tag), None)
        )
        if hosts[0].holder is None:
            enter = f'export SPMD_MEMORY_FOLDER={folder}/$host\nexec /bin/sh -c "$*"'
        else:
            pids = " ".join(f"{host.name}) pid={host.holder};;" for host in hosts)
            enter = f'case $host in {pids} esac\nexec nsenter -t $pid -n -u -m /bin/sh -c "$*"'
        ssh = folder / "ssh"
        ssh.write_text(SSH.format(mark=MARK, tag=tag, enter=enter))
        ssh.chmod(0o755)
        undo.callback(lambda: [host.kill() for host in hosts])
        yield Hosts(hosts, ssh, switch)


def _loopback(folder: Path, count: int, tag: str) -> list[Host]:
    names = [f"127.0.0.{number}" for number in range(1, count + 1)]
    return [
        Host(name, rf"\S+ \(host {number}\)", folder / name, f"{tag}.{name}")
        for number, name in enumerate(names)
    ]


def _namespaces(
    folder: Path, count: int, tag: str, undo: contextlib.ExitStack
) -> tuple[list[Host], int]:
    """The hosts, and the process that keeps the network between them."""
    names = [chr(ord("a") + number) for number in range(count)]
    (folder / "hosts").write_text(
        "127.0.0.1 localhost\n"
        + "".join(f"10.77.0.{number} {name}\n" for number, name in enumerate(names, 1))
    )
    switch = _hold(folder, "switch", undo)
    _inside(
        switch, "-n", "sh", "-c", "ip link add name switch type bridge && ip link set switch up"
    )
    hosts = []
    for number, name in enumerate(names, 1):
        holder = _hold(folder, name, undo)
        ends = [
            "name",
            "wire",
            "netns",
            holder,
            "type",
            "veth",
            "peer",
            "name",
            name,
            "netns",
            switch,
        ]
        subprocess.run(
            ["ip", "link", "add", *map(str, ends)], check=True, capture_output=True, timeout=20
        )
        _inside(switch, "-n", "ip", "link", "set", "dev", name, "master", "switch", "up")
        _inside(
            holder,
            "-n",
            "sh",
            "-c",
            f"ip addr add 10.77.0.{number}/24 dev wire && ip link set wire up",
        )
        hosts.append(
            Host(name, name, Path(f"/proc/{holder}/root/dev/shm"), f"{tag}.{name}", holder)
        )
    return hosts, switch


def _hold(folder: Path, name: str, undo: contextlib.ExitStack) -> int:
    """A process with namespaces for the network, the host's name and mounts, until the stack is
    closed.
    """
    command = ["unshare", "-num", "sh", "-c", HOLD.format(folder=folder, name=name)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def end() -> None:
        process.kill()
        process.wait(timeout=20)
        process.stdin.close()
        process.stdout.close()

    undo.callback(end)
    assert process.stdout.readline() == "ready\n", f"the namespaces of {name} could not be made"
    return process.pid


def _inside(holder: int | None, namespaces: str, *words: str) -> None:
    assert holder is not None, "only a host in namespaces can do that"
    subprocess.run(
        ["nsenter", "-t", str(holder), namespaces, *words],
        check=True,
        capture_output=True,
        timeout=20,
    )
