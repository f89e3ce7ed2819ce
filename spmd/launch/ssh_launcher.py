"""Processes on several hosts, reached by ssh, and restarted together when one fails: on fewer hosts if that is allowed."""

import collections
import contextlib
import dataclasses
import ipaddress
import os
import secrets
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from spmd.distributed.watchdog import PEER
from spmd.errors import OptionError, printable
from spmd.launch.hostfile import Host
from spmd.launch.local_launcher import check_script, forwarded
from spmd.launch.process_group import SETTLE, Signalled
from spmd.launch.restart_policy import ALL, LOST, Attempt, attempted, repeated
from spmd.launch.settings import Settings, whole_number
from spmd.launch.ssh_client import Line
from spmd.launch.validation import variables

HELLO, TOLD = 60.0, 10.0  # seconds for a host to answer, and between two lines about who has not
PASSED = ("JAX_", "XLA_", "NCCL_", "LIBTPU_", "TF_CPP_", "SPMD_STALL")  # how variables begin that go to all hosts
KEPT = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=5", "ServerAliveCountMax=3")
OPTIONS = ("-T", "-x", *(word for option in KEPT for word in ("-o", option)))  # the user's own come first, and count


@dataclasses.dataclass(frozen=True)
class Remote:
    """Which hosts there are, and how they are reached.

    Args:
      hosts: in the order of ranks (`spmd.launch.hostfile.read_hosts`).
      least: hosts that a restart needs; None: all.
      ssh: the command, to which a host and what to run there are added.
      python: the interpreter on the hosts.
      folder: where the script is run, on every host.
      variables: names of variables that go to all hosts, beside those that say something to JAX, XLA and NCCL; "NAME=VALUE" sets one.
      settings: how processes are started.
    """

    hosts: tuple[Host, ...]
    least: int | None = None
    ssh: str = "ssh"
    python: str = sys.executable
    folder: str = dataclasses.field(default_factory=os.getcwd)
    variables: tuple[str, ...] = ()
    settings: Settings = dataclasses.field(default_factory=Settings)

    def __post_init__(self):
        whole_number("min_hosts", self.least, len(self.hosts))
        if self.least is not None and not self.settings.max_restarts:
            raise OptionError("min_hosts is for restarts, and there are none.", fix="--max-restarts 10.")
        if self.settings.simulate and any(host.processes is None for host in self.hosts):
            name = next(host.name for host in self.hosts if host.processes is None)
            raise OptionError(f"how many processes {name} is to have is not said, and GPUs are not counted.", fix=f"{name} processes=1")
        try:
            words = shlex.split(self.ssh)
        except ValueError as error:
            raise OptionError(f"ssh {self.ssh!r} cannot be read: {error}.", fix="a command, such as ssh -p 2222.") from None
        if not words or shutil.which(words[0]) is None:
            raise OptionError(f"ssh {self.ssh!r} is no command here.", fix="a command, such as ssh -p 2222.")
        self._own()

    def _own(self) -> dict[str, str]:
        """Variables that were asked for.

        Raises:
          OptionError: one that is not set, is given twice, or that something else says.
        """
        for word in self.variables:
            if "=" not in word and word not in os.environ:
                raise OptionError(f"variable {word!r} is not set here.", fix=f"{word}=VALUE.")
            if word.partition("=")[0] == "CUDA_VISIBLE_DEVICES":
                raise OptionError(f"variable {word!r}: GPUs are shared out by the launcher.", fix="set it on the host, for ssh's commands.")
        pairs = [(name, value if equals else os.environ[name]) for name, equals, value in (word.partition("=") for word in self.variables)]
        return variables(pairs, self.settings.environment())

    @property
    def command(self) -> list[str]:
        """ssh, to which a host and what to run there are added; it asks nothing, and notices when a host is gone."""
        words = shlex.split(self.ssh)
        return [*words, *(OPTIONS if Path(words[0]).name == "ssh" else ())]

    def environment(self) -> dict[str, str]:
        """What all processes are told, of the variables that are set here."""
        found = {name: value for name, value in os.environ.items() if name.startswith(PASSED)}
        return {**found, **self._own(), **self.settings.environment(), "PYTHONUNBUFFERED": "1"}


def launch_on(words: Sequence[str], how: Remote, say: Callable[[str], None]) -> int:
    """Run a script in processes on several hosts until it comes to an end, well or not.

    Args:
      words: the script and its arguments, as they are on every host; or "-m", a module and its arguments.
      how: which hosts, and so on.
      say: is told of failures, restarts, and hosts that do not answer.

    Returns:
      0, or what the process ended with that failed first; 255 where hosts could not be reached.
    """
    if not words or Path(how.folder) == Path.cwd():  # elsewhere only the hosts know
        check_script(words)
    full: list[int] = []  # processes of the first attempt
    return repeated(lambda number: _attempt(words, how, number, full, say), how.settings.max_restarts, say)


def _attempt(words: Sequence[str], how: Remote, number: int, full: list[int], say: Callable[[str], None]) -> Attempt:
    """All processes, once, on the hosts that answer."""
    with _connected(how) as lines, forwarded(group := Far(lines, say), group.wish):
        there = _answering(lines, group, how, say, first=not full)
        wanted = len(how.hosts) if how.least is None or not full else how.least  # at first a name may be wrong
        if group.asked is not None or len(there) < wanted:
            say(f"{len(there)} of {len(lines)} hosts are there{', and at first all are needed' if how.least and not full else ''}")
            return Attempt({ALL: LOST if group.asked is None else -group.asked}, asked=group.asked)
        own = _processes(there, how)
        full[:] = full or [len(own)]
        if len(there) < len(lines):
            say(f"going on with {len(own)} of {full[0]} processes, on {', '.join(line.host.name for line in there)}")
        shared = how.environment() | {"SPMD_ATTEMPT": str(number), "SPMD_FULL": str(full[0]), "SPMD_TOKEN": secrets.token_hex(16)}
        shared |= {"SPMD_PROCESSES": str(len(own)), "SPMD_COORDINATOR": _meeting(there[0])}
        for line in there:
            mine = {rank: own[rank] for rank in line.ranks}
            prefixes = {rank: f"[{own[rank].get('SPMD_JOB', line.host.name)}:{own[rank].get('SPMD_TASK', rank)}] " for rank in line.ranks}
            line.say({"start": {"words": words, "own": mine, "environment": shared, "prefixes": prefixes, "grace": how.settings.grace}})
        group.lines = there
        codes = group.wait(how.settings.grace)
        return dataclasses.replace(attempted(group.records, codes, group.first, group.asked), fewer=len(there) < len(lines))


@contextlib.contextmanager
def _connected(how: Remote) -> Iterator[list[Line]]:
    """A connection to each host; at the end of the block none is left, and agents that hear nothing more end what they have started."""
    lines: list[Line] = []
    try:
        for host in how.hosts:
            lines.append(Line(host, how.command, how.python, how.folder))
        yield lines
    finally:
        for line in lines:
            line.leave()
        until = time.monotonic() + 5.0
        for line in lines:
            line.close(until)


def _answering(lines: Sequence[Line], group: Signalled, how: Remote, say: Callable[[str], None], *, first: bool) -> list[Line]:
    """The hosts that say hello in time, and can do what is wanted; of the others it is told why not.

    Raises:
      OptionError: at the first attempt, a host that has no place in this; later it is done without.
    """
    until, waited, told = time.monotonic() + HELLO, list(lines), time.monotonic()
    while waited and group.asked is None and time.monotonic() < until:
        waited = [line for line in waited if line.hear(0.1 / len(waited)) is None]
        if waited and time.monotonic() - told >= TOLD:
            told = time.monotonic()
            say(f"waiting for {', '.join(line.host.name for line in waited[:8])} ({HELLO - (until - told):.0f} s of {HELLO:g})")
    found = []
    for line in lines if group.asked is None else ():
        answer = line.said or {}
        why = "" if "hello" in answer else str(answer.get("gone") or line.last or f"no answer in {HELLO:g} s")
        if not why:
            line.hello, line.said = answer["hello"], None
            try:
                _check(line, how)
            except OptionError as error:
                if first:
                    raise
                why = str(error)
        if why:
            say(f"{line.host.name}: {printable(why, 300)}")
        else:
            found.append(line)
    return found


def _check(line: Line, how: Remote) -> None:
    """Whether a host can have its processes; and process 0, which any may get that is first at a restart."""
    hello, host = line.hello, line.host
    if "problem" in hello:
        raise OptionError(f"{host.name}: {printable(str(hello['problem']), 300)}.", fix=f"{host.name} address=ADDRESS, its own.")
    gpus = _gpus(line, how)
    count = host.processes if host.processes is not None else len(gpus)
    if not count or len(gpus) % count:
        raise OptionError(
            f"{host.name} has {len(gpus)} GPUs for {count} processes.", fix=f"{host.name} processes=N, with N that divides it."
        )
    meets = host is how.hosts[0] or how.least is not None
    if meets and len(how.hosts) > 1 and ipaddress.ip_address(hello["address"]).is_loopback and host.reached != hello["address"]:
        raise OptionError(
            f"{host.reached} is {hello['address']} on that host, which others cannot reach.\n"
            f"    fix: {host.name} address=ADDRESS, its own on the cluster's network."
        )


def _gpus(line: Line, how: Remote) -> list[str]:
    return [] if how.settings.simulate else line.hello["gpus"]


def _processes(lines: Sequence[Line], how: Remote) -> dict[int, dict[str, str]]:
    """What only one process has, by rank: its number, its share of the GPUs, its name; each host's ranks follow each other.

    Raises:
      OptionError: there is only one, and a limit for its waiting.
    """
    found: dict[int, dict[str, str]] = {}
    for line in lines:
        gpus, host = _gpus(line, how), line.host
        count = host.processes if host.processes is not None else len(gpus)
        line.ranks = list(range(len(found), len(found) + count))
        share = len(gpus) // count
        for local, rank in enumerate(line.ranks):
            own = {"SPMD_PROCESS": str(rank), "SPMD_LOCAL_PROCESS": str(local), "SPMD_LOCAL_PROCESSES": str(count)}
            own |= {"CUDA_VISIBLE_DEVICES": ",".join(gpus[local * share : (local + 1) * share])} if gpus else {}
            if host.tasks:
                own["SPMD_JOB"], _, own["SPMD_TASK"] = host.tasks[local].rpartition(":")
            found[rank] = own
    if how.settings.stall and len(found) == 1 and len(lines) == len(how.hosts):
        raise OptionError("a process that is alone waits for nobody, so stall would do nothing.", fix="leave it out, or 2 processes.")
    return found


def _meeting(first: Line) -> str:
    """Where process 0 calls the roll."""
    address, port = first.hello["address"], first.hello["port"]
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


class Far:
    """The processes of all hosts, with the face of `spmd.launch.process_group.Group`.

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
        self._wishes: collections.deque[int] = collections.deque()

    def wish(self, number: int) -> None:
        """A signal for all, from a handler, which may have interrupted anything: it is sent by who waits."""
        self._wishes.append(number)

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
        killed, pending = False, list(self.lines)
        while pending:
            while self._wishes:
                self.signal(self._wishes.popleft())
            ended = [line for line in pending if line.hear(0.05 / len(pending)) is not None]
            for line in ended:
                pending.remove(line)
                codes |= self._ended(line, by_us=killed)
            if until is None and self.asked == signal.SIGTERM:
                until = time.monotonic() + grace + SETTLE
            elif until is None and self.asked is None and any(codes.values()):
                until = time.monotonic() + 2 * SETTLE
            if until is not None and time.monotonic() > until and not killed:
                self.signal(signal.SIGKILL)
                killed = True
            if until is not None and time.monotonic() > until + SETTLE:
                for line in pending:
                    line.said = {"gone": "it does not answer"}
        # who left for another's sake did not fail first, whichever host was heard first
        self.first = dict(sorted(self.first.items(), key=lambda item: item[1] == PEER))
        return codes

    def _ended(self, line: Line, *, by_us: bool) -> dict[int, int]:
        """What the processes of a host ended with."""
        told = line.said or {}
        if "ended" not in told:
            why = told["gone"] or line.last
            self._say(f"{line.host.name}: the connection is gone{f': {why}' if why else ''}")
            lost = dict.fromkeys(line.ranks, LOST)
            self.first |= {} if by_us else lost
            return lost
        self.records += told["ended"]["records"]
        self.first |= {} if by_us else {int(rank): code for rank, code in told["ended"]["first"].items() if code}
        return {int(rank): code for rank, code in told["ended"]["codes"].items()}
