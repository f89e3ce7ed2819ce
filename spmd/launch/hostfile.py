"""Which processes there are on which hosts: read from a file, one host a line or jobs and their tasks."""

import dataclasses
import re
import tomllib
from pathlib import Path
from typing import Any

from spmd.errors import OptionError, did_you_mean
from spmd.launch.settings import whole_number

MOST = 4096  # hosts
WORDS = ("processes", "address")  # of a line


@dataclasses.dataclass(frozen=True)
class Host:
    """A machine that ssh reaches.

    Attributes:
      name: as ssh is told.
      processes: how many are started there; None: one for each of its GPUs.
      address: where others reach it; "": its name, without the user.
      tasks: names of its processes, such as "worker:0"; none: they are called by their ranks.
    """

    name: str
    processes: int | None = None
    address: str = ""
    tasks: tuple[str, ...] = ()

    @property
    def reached(self) -> str:
        """Where others reach it."""
        return self.address or self.name.rpartition("@")[2]


def read_hosts(path: Path) -> tuple[Host, ...]:
    """Read a file of hosts.

    A line is a host, as ssh is told it, and what there is to say of it: `gpu01 processes=8 address=10.0.0.1`; what follows "#" is for
    people. A file that ends in .toml has jobs and their tasks in the place of lines, as TensorFlow's ClusterSpec had: a task is a
    process, and names its host. The order is that of ranks; those of a host follow each other.

    Args:
      path: the file.

    Raises:
      OptionError: it cannot be read; or names that are none, or twice there; or jobs that hold parameters.

    Example:
      >>> import pathlib, tempfile
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "cluster.toml"
      >>> _ = path.write_text('[jobs]\\nchief = ["gpu01"]\\nworker = ["gpu01", "gpu02"]')
      >>> [(host.name, host.tasks) for host in read_hosts(path)]
      [('gpu01', ('chief:0', 'worker:0')), ('gpu02', ('worker:1',))]
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"{path} cannot be read: {error}.", fix="a file of hosts, one a line.") from None
    hosts = _jobs(path, text) if path.suffix == ".toml" else _lines(path, text)
    if not 0 < len(hosts) <= MOST:
        raise OptionError(f"{path} has {len(hosts)} hosts.", fix=f"from 1 to {MOST}.")
    return hosts


def _lines(path: Path, text: str) -> tuple[Host, ...]:
    hosts: dict[str, Host] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words, where = line.partition("#")[0].split(), f"{path}, line {number}"
        if not words:
            continue
        name, found = _name(words[0], where), {}
        for word in words[1:]:
            key, equals, value = word.partition("=")
            if key not in WORDS or not equals:
                raise OptionError(f'{where}: "{word}".', fix=f"{did_you_mean(key, WORDS)} Such as processes=8.")
            if key in found:
                raise OptionError(f"{where}: {key} is there twice.", fix="once.")
            found[key] = _count(value, where) if key == "processes" else _name(value, where)
        if any(Host(name).reached == host.name.rpartition("@")[2] for host in hosts.values()):
            raise OptionError(f"{where}: {name} is there twice.", fix="one line, with processes=2.")
        hosts[name] = Host(name, **found)
    return tuple(hosts.values())


def _jobs(path: Path, text: str) -> tuple[Host, ...]:
    try:
        given = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise OptionError(f"{path} is no TOML: {error}.") from None
    for key in given:
        if key not in ("jobs", "addresses"):
            raise OptionError(f"{path}: [{key}].", fix=f"{did_you_mean(key, ('jobs', 'addresses'))}")
    addresses = _table(path, given, "addresses", str)
    tasks: dict[str, list[str]] = {}
    for job, names in _table(path, given, "jobs", list).items():
        if job == "ps":
            raise OptionError(
                f'{path}: the job "ps".',
                fix=("leave it out; the devices of the workers keep the parameters, as [parameter_server] of the layout says."),
            )
        if not re.fullmatch(r"[\w-]+", job):
            raise OptionError(f"{path}: the job {job!r}.", fix="letters, digits, _ and -.")
        for index, name in enumerate(names):
            if not isinstance(name, str):
                raise OptionError(f"{path}: task {index} of {job} is {name!r}.", fix="the name of its host.")
            tasks.setdefault(_name(name, f"{path}: task {index} of {job}"), []).append(f"{job}:{index}")
    for name in addresses:
        if name not in tasks:
            raise OptionError(f"{path}: an address of {name}, which has no task.", fix=f"{did_you_mean(name, tasks)}")
    at = {name: _name(address, f"{path}: address of {name}") for name, address in addresses.items()}
    return tuple(Host(name, len(own), at.get(name, ""), tuple(own)) for name, own in tasks.items())


def _table(path: Path, given: dict[str, Any], key: str, kind: type) -> dict[str, Any]:
    found = given.get(key, {})
    if not isinstance(found, dict) or not all(isinstance(value, kind) for value in found.values()):
        form = 'worker = ["gpu01", "gpu02"]' if kind is list else 'gpu01 = "10.0.0.1"'
        raise OptionError(f"{path}: [{key}] is not as it should be.", fix=f"lines such as {form}.")
    return found


def _name(text: str, where: str) -> str:
    """A name that ssh takes for one, and no shell for anything else."""
    if not re.fullmatch(r"(?:[A-Za-z0-9_][\w.-]{0,63}@)?[A-Za-z0-9_:][A-Za-z0-9_.:-]{0,253}", text, re.ASCII):
        raise OptionError(
            f"{where}: {text!r} is no name of a host.", fix="such as gpu01, user@gpu01 or 10.0.0.1; ports are found by themselves."
        )
    if re.fullmatch(r"[^:\[\]]+:\d+", text):
        raise OptionError(f"{where}: {text!r} has a port.", fix=f"{text.rpartition(':')[0]}; a free port is found for each attempt.")
    return text


def _count(text: str, where: str) -> int:
    if not re.fullmatch(r"\d{1,6}", text, re.ASCII):
        raise OptionError(f"{where}: processes={text}.", fix="a whole number from 1.")
    whole_number(f"{where}: processes", int(text), 256)
    return int(text)
