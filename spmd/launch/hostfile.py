"""Read the hosts and their processes from a file: one host per line, or jobs and their tasks."""

import dataclasses
import re
import tomllib
from pathlib import Path
from typing import Any

from spmd.errors import OptionError, did_you_mean
from spmd.launch.settings import check_integer

MAX_HOSTS = 4096
KEYS = ("processes", "address")


@dataclasses.dataclass(frozen=True)
class Host:
    """A machine that ssh connects to.

    Attributes:
      name: as passed to ssh.
      processes: how many are started there; None: one for each of its GPUs.
      address: where other hosts reach it; "": its name, without the user.
      tasks: names of its processes, such as "worker:0"; empty: they are named by their ranks.
    """

    name: str
    processes: int | None = None
    address: str = ""
    tasks: tuple[str, ...] = ()

    @property
    def reached(self) -> str:
        """The address at which other hosts reach it."""
        return self.address or self.name.rpartition("@")[2]


def read_hosts(path: Path) -> tuple[Host, ...]:
    """Read a hostfile.

    Each line is a host, as passed to ssh, and its options: `gpu01 processes=8 address=10.0.0.1`;
    "#" begins a comment. A file that ends in .toml lists jobs and their tasks instead, as in
    TensorFlow's ClusterSpec: a task is a process, and names its host. Ranks follow the order of the
    hosts; those of one host are consecutive.

    Args:
      path: the file.

    Raises:
      OptionError: the file cannot be read; a name is invalid or appears twice; or there is a job
        "ps".

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
        raise OptionError(
            f"{path} cannot be read: {error}.", fix="a file with one host per line."
        ) from None
    hosts = _jobs(path, text) if path.suffix == ".toml" else _lines(path, text)
    if not 0 < len(hosts) <= MAX_HOSTS:
        raise OptionError(f"{path} has {len(hosts)} hosts.", fix=f"from 1 to {MAX_HOSTS}.")
    return hosts


def _lines(path: Path, text: str) -> tuple[Host, ...]:
    hosts: dict[str, Host] = {}
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{path}, line {number}"
        words = line.partition("#")[0].split()
        if not words:
            continue
        name = _name(words[0], where)
        values = {}
        for word in words[1:]:
            key, equals, value = word.partition("=")
            if key not in KEYS or not equals:
                raise OptionError(
                    f'{where}: "{word}".', fix=f"{did_you_mean(key, KEYS)} Such as processes=8."
                )
            if key in values:
                raise OptionError(f"{where}: {key} is given twice.", fix="give it once.")
            values[key] = _count(value, where) if key == "processes" else _name(value, where)
        if any(Host(name).reached == host.name.rpartition("@")[2] for host in hosts.values()):
            raise OptionError(
                f"{where}: {name} is listed twice.", fix="one line, with processes=2."
            )
        hosts[name] = Host(name, **values)
    return tuple(hosts.values())


def _jobs(path: Path, text: str) -> tuple[Host, ...]:
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise OptionError(
            f"{path} is not valid TOML: {error}.", fix='[[hosts]] tables, with address = "name".'
        ) from None
    for key in document:
        if key not in ("jobs", "addresses"):
            raise OptionError(
                f"{path}: [{key}].", fix=f"{did_you_mean(key, ('jobs', 'addresses'))}"
            )
    addresses = _table(path, document, "addresses", str)
    tasks: dict[str, list[str]] = {}
    for job, names in _table(path, document, "jobs", list).items():
        if job == "ps":
            raise OptionError(
                f'{path}: the job "ps".',
                fix="leave it out; the workers' devices hold the parameters, as [parameter_server] "
                "of the layout says.",
            )
        if not re.fullmatch(r"[\w-]+", job):
            raise OptionError(f"{path}: the job {job!r}.", fix="letters, digits, _ and -.")
        for index, name in enumerate(names):
            if not isinstance(name, str):
                raise OptionError(
                    f"{path}: task {index} of {job} is {name!r}.", fix="the name of a host."
                )
            host = _name(name, f"{path}: task {index} of {job}")
            tasks.setdefault(host, []).append(f"{job}:{index}")
    for name in addresses:
        if name not in tasks:
            raise OptionError(
                f"{path}: address of {name}, which has no task.", fix=f"{did_you_mean(name, tasks)}"
            )
    checked = {
        name: _name(address, f"{path}: address of {name}") for name, address in addresses.items()
    }
    return tuple(
        Host(name, len(names), checked.get(name, ""), tuple(names)) for name, names in tasks.items()
    )


def _table(path: Path, document: dict[str, Any], key: str, kind: type) -> dict[str, Any]:
    table = document.get(key, {})
    if not isinstance(table, dict) or not all(isinstance(value, kind) for value in table.values()):
        form = 'gpu01 = "10.0.0.1"'
        if kind is list:
            form = 'worker = ["gpu01", "gpu02"]'
        raise OptionError(f"{path}: [{key}] is malformed.", fix=f"lines such as {form}.")
    return table


def _name(text: str, where: str) -> str:
    """A host name that ssh accepts, without characters that are special to a shell."""
    # The name is an argument of ssh: one that begins with "-" would be an option, such as
    # -oProxyCommand=.
    if not re.fullmatch(
        r"(?:[A-Za-z0-9_][\w.-]{0,63}@)?[A-Za-z0-9_:][A-Za-z0-9_.:-]{0,253}", text, re.ASCII
    ):
        raise OptionError(
            f"{where}: {text!r} is not a host name.",
            fix="such as gpu01, user@gpu01 or 10.0.0.1, without a port: a free one is chosen.",
        )
    if re.fullmatch(r"[^:\[\]]+:\d+", text):
        raise OptionError(
            f"{where}: {text!r} has a port.",
            fix=f"{text.rpartition(':')[0]}; a free port is chosen for each attempt.",
        )
    return text


def _count(text: str, where: str) -> int:
    if not re.fullmatch(r"\d{1,6}", text, re.ASCII):
        raise OptionError(f"{where}: processes={text}.", fix="an integer from 1.")
    check_integer(f"{where}: processes", int(text), 256)
    return int(text)
