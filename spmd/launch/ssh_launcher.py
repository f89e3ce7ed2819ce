"""Run processes on several hosts over ssh, and restart them together when one fails: on fewer hosts
if that is allowed.
"""

import collections
import contextlib
import dataclasses
import functools
import ipaddress
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from spmd.distributed.launcher_protocol import PEER
from spmd.distributed.world import join_address
from spmd.errors import OptionError, printable
from spmd.launch.hostfile import Host
from spmd.launch.local_launcher import (
    attempt_environment,
    check_script,
    forward_signals,
    memory_folders,
    rank_environment,
)
from spmd.launch.process_group import KILLED, SETTLE, Stoppable
from spmd.launch.restart_policy import ALL, LOST, Attempt, run_with_restarts, summarize_attempt
from spmd.launch.settings import Settings, check_integer
from spmd.launch.spares import check_spares
from spmd.launch.ssh_client import AgentConnection
from spmd.launch.validation import check_environment_variables

# seconds for a host to answer, and between two log lines about missing ones
HELLO, LOG_SECONDS = 60.0, 10.0
REMOVE = 15.0  # seconds for all hosts to answer when checkpoints in memory are to be removed
# prefixes of the variables that all hosts get
PASSED = ("JAX_", "XLA_", "NCCL_", "LIBTPU_", "TF_CPP_", "SPMD_STALL", "SPMD_CACHE")
SSH_OPTIONS = (
    "BatchMode=yes",
    "ConnectTimeout=10",
    "ServerAliveInterval=5",
    "ServerAliveCountMax=3",
)
# the user's come first, and take precedence
OPTIONS = ("-T", "-x", *(word for option in SSH_OPTIONS for word in ("-o", option)))


@dataclasses.dataclass(frozen=True)
class SshConfig:
    """The hosts, and how to connect to them.

    Args:
      hosts: in the order of ranks (`spmd.launch.hostfile.read_hosts`).
      least: the fewest hosts for a restart; None: all.
      ssh: the command, to which the host and a remote command are appended.
      python: the interpreter on the hosts.
      folder: the working folder on every host.
      variables: environment variables to pass to all hosts, beside those of JAX, XLA and NCCL;
        "NAME=VALUE" sets one.
      settings: how processes are started.
      spares: whether a spare process waits beside each, for a restart (`spmd.launch.spares`).
    """

    hosts: tuple[Host, ...]
    least: int | None = None
    ssh: str = "ssh"
    python: str = sys.executable
    folder: str = dataclasses.field(default_factory=os.getcwd)
    variables: tuple[str, ...] = ()
    settings: Settings = dataclasses.field(default_factory=Settings)
    spares: bool = False

    def __post_init__(self):
        check_integer("min_hosts", self.least, len(self.hosts))
        check_spares(self.spares, self.settings)
        if self.least is not None and not self.settings.max_restarts:
            raise OptionError(
                "min_hosts applies to restarts, and there are none.", fix="--max-restarts 10."
            )
        if self.settings.simulate and any(host.processes is None for host in self.hosts):
            name = next(host.name for host in self.hosts if host.processes is None)
            raise OptionError(
                f"{name} needs a number of processes, since simulate ignores GPUs.",
                fix=f"{name} processes=1",
            )
        try:
            words = shlex.split(self.ssh)
        except ValueError as error:
            raise OptionError(
                f"ssh {self.ssh!r} cannot be read: {error}.", fix="a command, such as ssh -p 2222."
            ) from None
        if not words or shutil.which(words[0]) is None:
            raise OptionError(
                f"ssh {self.ssh!r} is not a command on this machine.",
                fix="a command, such as ssh -p 2222.",
            )
        self._selected_variables()

    def _selected_variables(self) -> dict[str, str]:
        """The variables that `variables` selects.

        Raises:
          OptionError: one is not set, is given twice, or is set by another option.
        """
        for word in self.variables:
            if "=" not in word and word not in os.environ:
                raise OptionError(f"variable {word!r} is not set here.", fix=f"{word}=VALUE.")
            if word.partition("=")[0] == "CUDA_VISIBLE_DEVICES":
                raise OptionError(
                    f"variable {word!r}: the launcher divides the GPUs.",
                    fix="set it on the host, for ssh commands.",
                )
        pairs = []
        for word in self.variables:
            name, equals, value = word.partition("=")
            pairs.append((name, value if equals else os.environ[name]))
        return check_environment_variables(pairs, self.settings.environment())

    @property
    def command(self) -> list[str]:
        """The ssh command with options: it never prompts, and detects a lost host."""
        words = shlex.split(self.ssh)
        if Path(words[0]).name == "ssh":
            words += OPTIONS
        return words

    def environment(self) -> dict[str, str]:
        """The variables that all processes get."""
        passed = {name: value for name, value in os.environ.items() if name.startswith(PASSED)}
        return {**passed, **self._selected_variables(), **self.settings.environment()}


def launch_on_hosts(argv: Sequence[str], config: SshConfig, log: Callable[[str], None]) -> int:
    """Like `local_launcher.launch`, in processes on several hosts; the script's path is that on the
    hosts.

    Returns:
      0, or the exit code of the process that failed first; 255 if hosts could not be reached.
    """
    # Another folder may exist on the hosts only.
    if not argv or Path(config.folder) == Path.cwd():
        check_script(argv)
    full_size: list[int] = []  # the number of processes of the first attempt, once known
    in_memory: dict[Host, set[str]] = {}
    agents: dict[Host, AgentConnection] = {}  # connections that attempts have left to the next
    try:
        attempt = functools.partial(_attempt, argv, config, full_size, in_memory, agents, log)
        code = run_with_restarts(attempt, config.settings.max_restarts, log)
        if code and in_memory:
            _remove_memory(config, in_memory, agents)
    finally:
        _close(agents, lambda agent: True)
    return code


def _remove_memory(
    config: SshConfig, in_memory: Mapping[Host, set[str]], agents: dict[Host, AgentConnection]
) -> None:
    """Let the agents remove checkpoints in memory, on the hosts that answer soon; elsewhere they
    stay until another run finds them.
    """
    deadline = time.monotonic() + REMOVE
    _connect(config, in_memory, agents)
    for host, folders in in_memory.items():
        if "hello" in (agents[host].hear(max(0.0, deadline - time.monotonic())) or {}):
            agents[host].send({"remove": sorted(folders)})


def _attempt(
    argv: Sequence[str],
    config: SshConfig,
    full_size: list[int],
    in_memory: dict[Host, set[str]],
    agents: dict[Host, AgentConnection],
    log: Callable[[str], None],
    times: Sequence[float],
) -> Attempt:
    """Run all processes once, on the hosts that answer; add the folders of checkpoints in memory on
    each host.
    """
    with _connected(config, agents), forward_signals(group := RemoteProcessGroup(log), group.wish):
        ready = _ready_connections(agents, group, config, log, first=not full_size)
        required = len(config.hosts)
        note = ""
        if config.least is not None:
            # at first all, since a name may be wrong
            if full_size:
                required = config.least
            else:
                note = "; the first attempt needs all"
        if group.stop_signal is not None or len(ready) < required:
            log(f"{len(ready)} of {len(agents)} hosts are ready{note}")
            code = LOST if group.stop_signal is None else -group.stop_signal
            return Attempt({ALL: code}, stop_signal=group.stop_signal)
        processes = _processes(ready, config)
        hello = ready[0].hello
        full_size[:] = full_size or [len(processes)]
        if len(ready) < len(agents):
            log(
                f"continuing with {len(processes)} of {full_size[0]} processes, on "
                f"{', '.join(agent.host.name for agent in ready)}"
            )
        shared = (
            config.environment() | attempt_environment(times) | {"SPMD_FULL": str(full_size[0])}
        )
        shared |= {
            "SPMD_PROCESSES": str(len(processes)),
            "SPMD_COORDINATOR": join_address(hello["address"], hello["port"]),
        }
        for agent in ready:
            environments = {rank: processes[rank] for rank in agent.ranks}
            prefixes = {}
            for rank, variables in environments.items():
                job = variables.get("SPMD_JOB", agent.host.name)
                prefixes[rank] = f"[{job}:{variables.get('SPMD_TASK', rank)}] "
            start = {
                "words": argv,
                "shared": shared,
                "environments": environments,
                "prefixes": prefixes,
                "grace": config.settings.grace,
                "spares": len(agent.ranks) if config.spares else 0,
            }
            agent.send({"start": start})
            agent.is_idle = False
        group.agents = ready
        codes = group.wait(config.settings.grace)
        for host, folders in group.in_memory.items():
            in_memory.setdefault(host, set()).update(folders)
        attempt = summarize_attempt(
            group.records, codes, group.first, group.stop_signal, group.failed_at
        )
        return dataclasses.replace(attempt, fewer=len(ready) < len(agents))


def _connect(config: SshConfig, hosts: Iterable[Host], agents: dict[Host, AgentConnection]) -> None:
    """Connect to each host to which there is no connection, and ask all for their resources: an
    attempt needs a port that is free now.
    """
    for host in hosts:
        if host not in agents:
            agents[host] = AgentConnection(host, config.command, config.python, config.folder)
        agents[host].send({"hello": True})


@contextlib.contextmanager
def _connected(config: SshConfig, agents: dict[Host, AgentConnection]) -> Iterator[None]:
    """Connect to all hosts; at the end of the block, connections are closed that the next attempt
    cannot use.
    """
    try:
        _connect(config, config.hosts, agents)
        yield
    finally:
        _close(agents, lambda agent: not agent.is_idle)


def _close(
    agents: dict[Host, AgentConnection], is_chosen: Callable[[AgentConnection], bool]
) -> None:
    """Close some connections, and remove them: the agents then end their processes."""
    chosen = [agents.pop(agent.host) for agent in list(agents.values()) if is_chosen(agent)]
    for agent in chosen:
        agent.leave()
    deadline = time.monotonic() + 5.0
    for agent in chosen:
        agent.close(deadline)


def _ready_connections(
    agents: dict[Host, AgentConnection],
    group: Stoppable,
    config: SshConfig,
    log: Callable[[str], None],
    *,
    first: bool,
) -> list[AgentConnection]:
    """The hosts that answer in time and can run their processes; for the others, log why not.
    Connections that were kept and are lost are made again.

    Raises:
      OptionError: at the first attempt, a host cannot run its processes; later attempts leave it
        out.
    """
    logged_at = time.monotonic()
    deadline = logged_at + HELLO
    pending = list(config.hosts)
    while pending and group.stop_signal is None and time.monotonic() < deadline:
        pending = [host for host in pending if agents[host].hear(0.1 / len(pending)) is None]
        lost = [
            host
            for host in config.hosts
            if agents[host].is_idle and "gone" in (agents[host].unhandled or {})
        ]
        _close(agents, lambda agent: agent.host in lost)
        _connect(config, lost, agents)
        pending += lost
        if pending and time.monotonic() - logged_at >= LOG_SECONDS:
            logged_at = time.monotonic()
            log(
                f"waiting for {', '.join(host.name for host in pending[:8])} "
                f"({HELLO - (deadline - logged_at):.0f} s of {HELLO:g})"
            )
    if group.stop_signal is not None:
        return []
    ready = []
    for host in config.hosts:
        agent = agents[host]
        answer = agent.unhandled or {}
        # Another answer, or a late one, is of no use.
        agent.is_idle = "hello" in answer
        why = ""
        if agent.is_idle:
            agent.hello = answer["hello"]
            agent.unhandled = None
            try:
                _check(agent, config)
            except OptionError as error:
                if first:
                    raise
                why = str(error)
        else:
            why = str(answer.get("gone") or agent.last_error or f"no answer in {HELLO:g} s")
        if why:
            log(f"{host.name}: {printable(why, 300)}")
        else:
            ready.append(agent)
    return ready


def _check(agent: AgentConnection, config: SshConfig) -> None:
    """Raise OptionError if a host cannot run its processes, or process 0, which any host may get
    after a restart.
    """
    hello, host = agent.hello, agent.host
    if "problem" in hello:
        raise OptionError(
            f"{host.name}: {printable(str(hello['problem']), 300)}.",
            fix=f"{host.name} address=ADDRESS, one of its own.",
        )
    gpus, count = _gpus_and_count(agent, config)
    if not count or len(gpus) % count:
        raise OptionError(
            f"{host.name} has {len(gpus)} GPUs for {count} processes.",
            fix=f"{host.name} processes=N, a divisor of the number of GPUs.",
        )
    may_get_process_0 = len(config.hosts) > 1 and (
        host is config.hosts[0] or config.least is not None
    )
    if (
        may_get_process_0
        and host.reached != hello["address"]
        and ipaddress.ip_address(hello["address"]).is_loopback
    ):
        raise OptionError(
            f"{host.reached} is {hello['address']} on that host, which others cannot reach.",
            fix=f"{host.name} address=ADDRESS, its address on the cluster's network.",
        )


def _gpus_and_count(agent: AgentConnection, config: SshConfig) -> tuple[list[str], int]:
    """The GPUs of a host to divide among its processes, and how many processes."""
    gpus = [] if config.settings.simulate else agent.hello["gpus"]
    count = len(gpus) if agent.host.processes is None else agent.host.processes
    return gpus, count


def _processes(agents: Sequence[AgentConnection], config: SshConfig) -> dict[int, dict[str, str]]:
    """The variables of each process, by rank: its rank, its share of the GPUs, its name. Ranks of a
    host are consecutive.

    Raises:
      OptionError: stall is set for a single process.
    """
    processes: dict[int, dict[str, str]] = {}
    for agent in agents:
        gpus, count = _gpus_and_count(agent, config)
        agent.ranks = list(range(len(processes), len(processes) + count))
        for local_rank, rank in enumerate(agent.ranks):
            processes[rank] = rank_environment(rank, local_rank, count, gpus)
            if agent.host.tasks:
                job, _, task = agent.host.tasks[local_rank].rpartition(":")
                processes[rank] |= {"SPMD_JOB": job, "SPMD_TASK": task}
    if config.settings.stall and len(processes) == 1 and len(agents) == len(config.hosts):
        raise OptionError(
            "stall has no effect on a single process.", fix="leave it out, or use 2 processes."
        )
    return processes


class RemoteProcessGroup:
    """The processes of all hosts, with the interface of `spmd.launch.process_group.ProcessGroup`.

    Attributes:
      agents: connections to the hosts that take part.
      stop_signal: the signal that asked all to stop, if any.
      first: exit codes of the processes that ended first.
      failed_at: when the first failure was seen, in seconds since 1970; None if there was none.
      records: what processes have left for the launcher.
      in_memory: folders of checkpoints in memory, by host.
    """

    def __init__(self, log: Callable[[str], None]):
        self.agents: list[AgentConnection] = []
        self._log = log
        self.stop_signal: int | None = None
        self.first: dict[int, int] = {}
        self.failed_at: float | None = None
        self.records: list[dict[str, Any]] = []
        self.in_memory: dict[Host, set[str]] = {}
        self._wishes: collections.deque[int] = collections.deque()

    def wish(self, number: int) -> None:
        """Queue a signal for all, from a signal handler, which may have interrupted anything;
        `wait` sends it.
        """
        self._wishes.append(number)

    def signal(self, number: int) -> None:
        """Send a signal to all processes."""
        for agent in self.agents:
            agent.send({"signal": int(number)})

    def wait(self, grace: float) -> dict[int, int]:
        """Wait until all hosts have reported their exit codes; soon after one is lost, end the
        others.

        Returns:
          Exit codes by rank; negative ones are signals.
        """
        codes: dict[int, int] = {}
        deadline: float | None = None
        killed = False
        pending = list(self.agents)
        while pending:
            while self._wishes:
                self.signal(self._wishes.popleft())
            ended = [agent for agent in pending if agent.hear(0.05 / len(pending)) is not None]
            for agent in ended:
                pending.remove(agent)
                codes |= self._ended(agent, by_us=killed)
            if deadline is None and self.stop_signal == signal.SIGTERM:
                deadline = time.monotonic() + grace + SETTLE
            elif deadline is None and self.stop_signal is None and any(codes.values()):
                # one that was killed, or its host, published no error
                failed = {code for code in codes.values() if code}
                settle = KILLED if failed <= {LOST, -signal.SIGKILL} else 2 * SETTLE
                deadline = time.monotonic() + settle
                self.failed_at = time.time()
            if deadline is not None and time.monotonic() > deadline and not killed:
                self.signal(signal.SIGKILL)
                killed = True
            if deadline is not None and time.monotonic() > deadline + SETTLE:
                for agent in pending:
                    agent.unhandled = {"gone": "it does not answer"}
        # exits that follow from another failure come last, whichever host reported first
        self.first = dict(sorted(self.first.items(), key=lambda item: item[1] == PEER))
        return codes

    def _ended(self, agent: AgentConnection, *, by_us: bool) -> dict[int, int]:
        """The exit codes of the processes of a host."""
        message = agent.unhandled or {}
        if "ended" not in message:
            text = f"{agent.host.name}: the connection is lost"
            if why := message["gone"] or agent.last_error:
                text += f": {why}"
            self._log(text)
            lost = dict.fromkeys(agent.ranks, LOST)
            if not by_us:
                self.first |= lost
            return lost
        agent.unhandled = None
        agent.is_idle = True
        outcome = message["ended"]
        self.records += outcome["records"]
        if folders := memory_folders(outcome["records"]):
            self.in_memory[agent.host] = folders
        # the keys of a JSON object are strings
        if not by_us:
            self.first |= {int(rank): code for rank, code in outcome["first"].items() if code}
        return {int(rank): code for rank, code in outcome["codes"].items()}
