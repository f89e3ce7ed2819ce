"""Processes on several hosts, reached by ssh, and restarted together when one fails: on fewer hosts if that is allowed."""

import contextlib
import dataclasses
import ipaddress
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from spmd.errors import OptionError, escaped
from spmd.launch.cluster import Host
from spmd.launch.connection import Line
from spmd.launch.group import SETTLE, Signalled
from spmd.launch.machine import check_script, forwarded
from spmd.launch.restarts import LOST, Attempt, attempted, repeated
from spmd.launch.settings import Settings, whole_number

HELLO = 60.0  # seconds for a host to answer
PASSED = ("JAX_", "XLA_", "NCCL_", "LIBTPU_", "TF_CPP_", "SPMD_STALL")  # how variables begin that go to all hosts
SSH = "ssh -T -x -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 -o ServerAliveCountMax=3"


@dataclasses.dataclass(frozen=True)
class Remote:
    """Which hosts there are, and how they are reached.

    Args:
      hosts: in the order of ranks (`spmd.launch.cluster.read_hosts`).
      least: hosts that a restart needs; None: all.
      ssh: the command, to which a host and what to run there are added.
      python: the interpreter on the hosts.
      folder: where the script is run, on every host.
      variables: names of variables that go to all hosts, beside those that say something to JAX, XLA and NCCL; "NAME=VALUE" sets one.
      settings: how processes are started.
    """

    hosts: tuple[Host, ...]
    least: int | None = None
    ssh: str = SSH
    python: str = sys.executable
    folder: str = dataclasses.field(default_factory=os.getcwd)
    variables: tuple[str, ...] = ()
    settings: Settings = dataclasses.field(default_factory=Settings)

    def __post_init__(self):
        whole_number("min_hosts", self.least, len(self.hosts))
        if self.least is not None and not self.settings.max_restarts:
            raise OptionError("min_hosts is for restarts, and there are none.\n    cure: --max-restarts 10.")
        if not self.ssh.split():
            raise OptionError("ssh is nothing.\n    cure: a command, such as ssh -p 2222.")
        if self.settings.simulate and any(host.processes is None for host in self.hosts):
            name = next(host.name for host in self.hosts if host.processes is None)
            raise OptionError(f"how many processes {name} is to have is not said, and GPUs are not counted.\n    cure: {name} processes=1")
        for word in self.variables:
            if not word.partition("=")[0].isidentifier():
                raise OptionError(f"variable {word!r}.\n    cure: NAME, or NAME=VALUE.")
            if "=" not in word and word not in os.environ:
                raise OptionError(f"variable {word} is not set here.\n    cure: {word}=VALUE.")

    def environment(self) -> dict[str, str]:
        """What all processes are told, of the variables that are set here."""
        found = {name: value for name, value in os.environ.items() if name.startswith(PASSED)}
        for word in self.variables:
            name, equals, value = word.partition("=")
            found[name] = value if equals else os.environ[name]
        return {**found, **self.settings.environment(), "PYTHONUNBUFFERED": "1"}


def launch_on(words: Sequence[str], how: Remote, say: Callable[[str], None]) -> int:
    """Run a script in processes on several hosts until it comes to an end, well or not.

    Args:
      words: the script and its arguments, as they are on every host; or "-m", a module and its arguments.
      how: which hosts, and so on.
      say: is told of failures, restarts, and hosts that do not answer.

    Returns:
      0, or what the process ended with that failed first; 255 where hosts could not be reached.
    """
    check_script(words)
    full: list[int] = []  # processes of the first attempt
    return repeated(lambda number: _attempt(words, how, number, full, say), how.settings.max_restarts, say)


def _attempt(words: Sequence[str], how: Remote, number: int, full: list[int], say: Callable[[str], None]) -> Attempt:
    """All processes, once, on the hosts that answer."""
    with _connected(how) as lines, forwarded(group := Far(lines, say)):
        group.lines = _answering(lines, group, say)
        wanted = len(how.hosts) if how.least is None or not full else how.least  # at first a name may be wrong
        if group.asked is not None or len(group.lines) < wanted:
            say(f"{len(group.lines)} of {len(lines)} hosts are there")
            return Attempt({0: LOST}, asked=group.asked)
        own = _processes(group.lines)
        full[:] = full or [len(own)]
        if len(group.lines) < len(lines):
            say(f"going on with {len(own)} of {full[0]} processes, on {', '.join(line.host.name for line in group.lines)}")
        shared = how.environment() | {"SPMD_ATTEMPT": str(number), "SPMD_FULL": str(full[0]), "SPMD_TOKEN": secrets.token_hex(16)}
        shared |= {"SPMD_PROCESSES": str(len(own)), "SPMD_COORDINATOR": _meeting(group.lines)}
        for line in group.lines:
            mine = {rank: own[rank] for rank in line.ranks}
            prefixes = {rank: f"[{own[rank].get('SPMD_JOB', line.host.name)}:{own[rank].get('SPMD_TASK', rank)}] " for rank in line.ranks}
            line.say({"start": {"words": words, "own": mine, "environment": shared, "prefixes": prefixes, "grace": how.settings.grace}})
        codes = group.wait(how.settings.grace)
        return attempted(group.records, codes, group.first, group.asked)


@contextlib.contextmanager
def _connected(how: Remote) -> Iterator[list[Line]]:
    """A connection to each host; at the end of the block none is left, and agents that hear nothing more end what they have started."""
    lines: list[Line] = []
    try:
        for host in how.hosts:
            lines.append(Line(host, how.ssh, how.python, how.folder))
        yield lines
    finally:
        for line in lines:
            line.leave()
        for line in lines:
            line.close()


def _answering(lines: Sequence[Line], group: Signalled, say: Callable[[str], None]) -> list[Line]:
    """The hosts that say hello in time, and can do what is wanted; of the others it is told why not."""
    until, found = time.monotonic() + HELLO, []
    for line in lines:
        while line.said is None and group.asked is None and time.monotonic() < until:
            line.hear(0.1)
        told = line.said or {}
        why = told.get("hello", {}).get("problem") or ("" if "hello" in told else line.last or f"no answer in {HELLO:g} s")
        if why:
            say(f"{line.host.name}: {escaped(str(why), 300)}")
        else:
            line.hello, line.said = told["hello"], None
            found.append(line)
    return found


def _processes(lines: Sequence[Line]) -> dict[int, dict[str, str]]:
    """What only one process has, by rank: its number, its share of the GPUs, its name; each host's ranks follow each other."""
    found: dict[int, dict[str, str]] = {}
    for line in lines:
        gpus, host = line.hello["gpus"], line.host
        count = host.processes if host.processes is not None else len(gpus)
        if not count or len(gpus) % count:
            raise OptionError(
                f"{host.name} has {len(gpus)} GPUs for {count} processes.\n    cure: {host.name} processes=N, with N that divides it."
            )
        line.ranks = list(range(len(found), len(found) + count))
        share = len(gpus) // count
        for local, rank in enumerate(line.ranks):
            own = {"SPMD_PROCESS": str(rank), "SPMD_LOCAL_PROCESS": str(local), "SPMD_LOCAL_PROCESSES": str(count)}
            own |= {"CUDA_VISIBLE_DEVICES": ",".join(gpus[local * share : (local + 1) * share])} if gpus else {}
            if host.tasks:
                own["SPMD_JOB"], _, own["SPMD_TASK"] = host.tasks[local].partition(":")
            found[rank] = own
    return found


def _meeting(lines: Sequence[Line]) -> str:
    """Where process 0 calls the roll."""
    address, port, host = lines[0].hello["address"], lines[0].hello["port"], lines[0].host
    if ipaddress.ip_address(address).is_loopback and len(lines) > 1 and host.reached != address:
        raise OptionError(
            f"{host.reached} is {address} on that host, which others cannot reach.\n"
            f"    cure: {host.name} address=ADDRESS, its own on the cluster's network."
        )
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


class Far:
    """The processes of all hosts, with the face of `spmd.launch.group.Group`.

    Attributes:
      lines: the hosts that take part.
      asked: the signal that asked all to end, if one did.
      first: exit codes of those that ended first.
      records: what processes have left for the launcher.
    """

    def __init__(self, lines: Sequence[Line], say: Callable[[str], None]):
        self.lines, self._say = list(lines), say
        self.asked: int | None = None
        self.first: dict[int, int] = {}
        self.records: list[dict[str, Any]] = []

    def signal(self, number: int) -> None:
        """Send a signal to all processes."""
        for line in self.lines:
            line.say({"signal": int(number)})

    def wait(self, grace: float) -> dict[int, int]:
        """Until all hosts have told how theirs ended; of one that is gone the others are ended soon.

        Returns:
          Exit codes by rank; negative ones are signals.
        """
        codes: dict[int, int] = {}
        until: float | None = None
        pending = list(self.lines)
        while pending:
            for line in list(pending):
                if line.hear(0.02) is None:
                    continue
                pending.remove(line)
                ended = self._ended(line)
                codes |= ended
                self.first = self.first or {rank: code for rank, code in ended.items() if code}
            if until is None and self.asked == signal.SIGTERM:
                until = time.monotonic() + grace + SETTLE
            elif until is None and self.asked is None and any(codes.values()):
                until = time.monotonic() + 2 * SETTLE
            if until is not None and time.monotonic() > until:
                self.signal(signal.SIGKILL)
            if until is not None and time.monotonic() > until + SETTLE:
                for line in pending:
                    line.said = {"gone": "it could not be asked to end"}
        return codes

    def _ended(self, line: Line) -> dict[int, int]:
        """What the processes of a host ended with."""
        told = line.said or {}
        if "ended" not in told:
            self._say(f"{line.host.name}: the connection is gone{f': {line.last}' if line.last else ''}")
            return dict.fromkeys(line.ranks, LOST)
        self.records += told["ended"]["records"]
        first = {int(rank): code for rank, code in told["ended"]["first"].items() if code}
        self.first = self.first or first
        return {int(rank): code for rank, code in told["ended"]["codes"].items()}
