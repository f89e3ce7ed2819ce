"""Hardware by name: what a device can do, what joins devices, and how many of them there are."""

import dataclasses
import re
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from spmd.errors import OptionError, Problem, a_kind, did_you_mean, raise_problems

PLATFORMS = ("cuda", "tpu", "cpu")
LARGEST = 1024  # devices of the clusters that are tried for what does not fit
LESS = 0.95  # of the memory before: twice the devices that do not save as much will not make it fit
HIGHEST = "float32 at highest precision"  # products that no matrix unit rounds
_CLUSTER = re.compile(r"(?:(\d+)x)?(?:(\d+)x)?(.+)", re.DOTALL)
_GPU = (
    "core_count", "fpus_per_core", "clock_rate_ghz", "l2_cache_size", "shared_memory_per_core", "shared_memory_per_block_optin",
    "compute_capability", "pcie_bandwidth", "name",
)  # fmt: skip
_TABLES = {
    "flops": ("float32", "vector"),
    "inside": ("bandwidth", "latency"),
    "between": ("bandwidth", "latency"),
    "achieved": ("matmul", "memory", "link", "launch"),
    "compiler": _GPU,
}


@dataclasses.dataclass(frozen=True)
class Link:
    """What one device can send to others: bytes per second in one direction, and seconds until the first byte is there."""

    bandwidth: float
    latency: float


@dataclasses.dataclass(frozen=True)
class Achieved:
    """What programs reach of a device's figures, as shares, and the seconds until an operation begins."""

    matmul: float
    memory: float
    link: float
    launch: float


@dataclasses.dataclass(frozen=True)
class Target:
    """One kind of device.

    Attributes:
      memory: bytes that a program can have on one device.
      memory_bandwidth: bytes per second.
      flops: floating-point operations per second, dense, by the dtype that is multiplied; "vector" is float32 outside of matrix units.
      inside, between: links to devices of the same node, and to other nodes.
      achieved: which shares of all these programs reach.
      compiler: facts that XLA:GPU wants of a GPU that is not there; of a TPU what libtpu calls it and how many dimensions a slice has.
      sources: where each figure is from.
    """

    name: str
    title: str
    platform: str
    memory: int
    memory_bandwidth: float
    flops: Mapping[str, float]
    inside: Link
    between: Link
    achieved: Achieved
    devices_per_node: int = 8
    compiler: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def rate(self, dtype: str) -> float:
        """Floating-point operations per second of a matrix product of this dtype; one that the table lacks counts as float32."""
        short = {HIGHEST: "vector"}.get(dtype, "float8" if dtype.startswith("float8") else dtype)
        return self.flops.get(short, self.flops["float32"])


@dataclasses.dataclass(frozen=True)
class Cluster:
    """So many nodes of so many devices.

    >>> str(Cluster.parse("2x8xh100")), Cluster.parse("2x8xh100").count
    ('2x8xh100', 16)
    """

    nodes: int
    devices: int
    target: Target

    @property
    def count(self) -> int:
        """How many devices there are."""
        return self.nodes * self.devices

    def __str__(self) -> str:
        return f"{self.nodes}x{self.devices}x{self.target.name}"

    def doubled(self) -> "Cluster":
        """Twice the devices: on the same nodes while these have room, else on twice the nodes.

        >>> str(Cluster.parse("4xh100").doubled()), str(Cluster.parse("8xh100").doubled())
        ('1x8xh100', '2x8xh100')
        """
        if 2 * self.devices <= self.target.devices_per_node:
            return Cluster(self.nodes, 2 * self.devices, self.target)
        return Cluster(2 * self.nodes, self.devices, self.target)

    @staticmethod
    def parse(value: "str | Cluster") -> "Cluster":
        """Read `"8x8xh100"` (nodes x devices x kind), `"8xh100"` (one node) or `"h100"` (one device); a kind may be a TOML file's path.

        Raises:
          OptionError: a target that is not known, a file that says nothing, or no devices.
        """
        if isinstance(value, Cluster):
            return value
        found = _CLUSTER.fullmatch(value.strip()) if isinstance(value, str) else None
        if value == "":
            raise OptionError("the target is empty.", fix='such as "8xh100", or "4x8xh100" for 4 nodes of 8.')
        if found is None:
            raise OptionError(f"target={value!r} is {a_kind(value)}.", fix='such as "8xh100", or "4x8xh100" for 4 nodes of 8.')
        first, second, name = found.groups()
        nodes, devices = (int(first), int(second)) if second else (1, int(first or 1))
        if nodes < 1 or devices < 1:
            raise OptionError(f'target "{value}": {nodes} x {devices} is no device.', fix=f'at least one, such as "{name}".')
        target = load(name)
        most = target.devices_per_node
        if not second and target.platform == "cuda" and devices > most:
            near = f"{max(devices // most, 1)}x{most}x{name}"
            why = f"a node has {most} of them, and what joins nodes is slower"
            raise OptionError(f'target "{value}": {why}.', fix=f'nodes x devices, such as "{near}".')
        return Cluster(nodes, devices, target)


def shipped() -> dict[str, Path]:
    """The targets that come with the library, by name."""
    folder = Path(str(resources.files("spmd"))) / "planner" / "targets"
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def load(name: str) -> Target:
    """A target by its name, or of a TOML file of one's own.

    Raises:
      OptionError: no such target or file, or a file that is not right; all its problems at once.
    """
    known = shipped()
    path = known.get(name, Path(name))
    if name not in known and not (name.endswith(".toml") and path.is_file()):
        raise OptionError(f'there is no target "{name}".', fix=f"{did_you_mean(name, known)} A file of your own ends in .toml.")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OptionError(f"{path} is not TOML: {error}.") from error
    raise_problems(OptionError, f"{path} is no target", _problems(table))
    more: dict[str, Any] = {key: Link(float(table[key]["bandwidth"]), float(table[key]["latency"])) for key in ("inside", "between")}
    more |= {"name": path.stem, "achieved": Achieved(**table["achieved"])}
    return Target(**(table | more))


def _problems(table: dict[str, Any]) -> list[Problem]:
    """What is missing, unknown or no number in a target's file."""
    fields = {field.name: field for field in dataclasses.fields(Target) if field.name != "name"}
    needed = [
        name
        for name in fields
        if name not in ("devices_per_node", "compiler", "sources") or (name == "compiler" and table.get("platform") in ("cuda", "tpu"))
    ]
    found = [Problem(name, ["it is missing."]) for name in needed if name not in table]
    found += [Problem(name, ["nothing reads it."], did_you_mean(name, fields)) for name in table if name not in fields]
    if table.get("platform", PLATFORMS[0]) not in PLATFORMS:
        found.append(Problem("platform", [f"{table['platform']!r} is none."], did_you_mean(str(table["platform"]), PLATFORMS)))
    numbers = ("memory", "memory_bandwidth", "devices_per_node")
    found += [_no_number(name, table[name]) for name in numbers if name in table and not _is_number(table[name])]
    slices = table.get("platform") == "tpu"
    for name, wanted in (_TABLES | ({"compiler": ("name", "dims")} if slices else {})).items():
        part = table.get(name)
        if part is None:
            continue
        if not isinstance(part, dict):
            found.append(Problem(name, [f"{part!r} is no table."]))
            continue
        found += [Problem(f"[{name}] {key}", ["it is missing."]) for key in wanted if key not in part]
        known = () if name == "flops" else wanted  # any dtype may be there
        found += [Problem(f"[{name}] {key}", ["nothing reads it."], did_you_mean(key, known)) for key in part if known and key not in known]
        figures = {key: value for key, value in part.items() if key not in ("name", "compute_capability")}
        found += [_no_number(f"[{name}] {key}", value) for key, value in figures.items() if not _is_number(value)]
        shares = [key for key in ("matmul", "memory", "link") if name == "achieved" and _is_number(part.get(key)) and part[key] > 1]
        found += [Problem(f"[{name}] {key}", [f"{part[key]} is a share above 1."], "such as 0.6.") for key in shares]
    capability = table.get("compiler", {}).get("compute_capability", [0, 0]) if isinstance(table.get("compiler", {}), dict) else [0, 0]
    if not slices and not (isinstance(capability, list) and len(capability) == 2 and all(isinstance(part, int) for part in capability)):
        found.append(Problem("[compiler] compute_capability", [f"{capability!r} is not two whole numbers."], "such as [9, 0]."))
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _no_number(where: str, value: Any) -> Problem:
    return Problem(where, [f"{value!r} is no number above 0."])
