"""Kinds of devices: their figures, and the TOML files that hold them."""

import dataclasses
import math
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from spmd.base.user_paths import as_path
from spmd.errors import OptionError, Problem, did_you_mean, raise_problems

PLATFORMS = ("cuda", "tpu", "cpu")
MOST = 1e24  # of a figure of a target's file, in bytes, FLOPs and the like
HIGHEST = "float32 at highest precision"  # products without rounding in matrix units
_GPU = (
    "core_count",
    "fpus_per_core",
    "clock_rate_ghz",
    "l2_cache_size",
    "shared_memory_per_core",
    "shared_memory_per_block_optin",
    "compute_capability",
    "pcie_bandwidth",
    "name",
)
# of [achieved], which a target may leave out
_MORE_SHARES = ("convolution", "attention", "attention_backward")
_TABLES = {
    "flops": ("float32", "vector"),
    "inside": ("bandwidth", "latency"),
    "between": ("bandwidth", "latency"),
    "sites": ("bandwidth", "latency"),
    "achieved": ("matmul", "memory", "link", "launch"),
    "compiler": _GPU,
    "spread": (),
    "overhead": (),
}
_MORE_FIGURES = ("devices_per_node", "first_touch", "simulated")
# of tables, which a target may leave out
_OPTIONAL = {
    "achieved": _MORE_SHARES,
    "spread": ("matmul", "memory", "link", "launch", "convolution", "attention"),
    "overhead": (
        "runtime",
        "communicator",
        "peer",
        "workspace",
        "convolution",
        "fragmentation",
        "temporaries",
    ),
}
TABLES = ("flops", "inside", "between", "achieved", "spread", "overhead", "compiler", "sources")
COMMENTS = {
    "flops": "per second, dense, by the dtype that is multiplied",
    "inside": "what one device sends to others in its node",
    "between": "what one device sends to other nodes",
    "achieved": "shares of these that programs reach, and seconds before an operation begins",
    "spread": "how far off each may be, as a share of it",
    "overhead": "of memory beside XLA's program: what is expected, and its standard deviation",
}


@dataclasses.dataclass(frozen=True)
class Link:
    """The link of a device to others: bytes per second in one direction, and seconds until the
    first byte arrives.
    """

    bandwidth: float
    latency: float

    def __str__(self) -> str:
        return f"{self.bandwidth * 8 / 1e9:g}Gb/s,{self.latency * 1e3:g}ms"


# Between sites, if neither a target's file nor its name says: the fastest pair of OpenDiLoCo's
# sites had 0.935 Gb/s, as others cite it; light needs 30 ms for 6,000 km of fibre.
SITES = Link(bandwidth=125e6, latency=0.03)


@dataclasses.dataclass(frozen=True)
class Achieved:
    """The shares of a device's peak figures that programs achieve, and the launch overhead of an
    operation in seconds.

    Attributes:
      matmul: of the peak, in matrix products whose sides fill all cores.
      memory, link: of the bandwidth.
      launch: seconds between the end of a kernel and the beginning of the next.
      convolution, attention, attention_backward: of the peak, in convolutions and in kernels of
        fused attention apart from exponentials; `matmul` if a target does not say.
    """

    matmul: float
    memory: float
    link: float
    launch: float
    convolution: float = 0.0
    attention: float = 0.0
    attention_backward: float = 0.0

    def __post_init__(self) -> None:
        for name in _MORE_SHARES:
            # A frozen dataclass has no other way to set a field.
            object.__setattr__(self, name, getattr(self, name) or self.matmul)


@dataclasses.dataclass(frozen=True)
class Spread:
    """The uncertainty of the figures of `Achieved`, as shares of them: half of the range that a
    plan prints.
    """

    matmul: float = 0.25
    memory: float = 0.25
    link: float = 0.25
    launch: float = 0.5
    convolution: float = 0.25
    attention: float = 0.25


@dataclasses.dataclass(frozen=True)
class Estimate:
    """An expected value, and its standard deviation."""

    expected: float = 0.0
    deviation: float = 0.0


@dataclasses.dataclass(frozen=True)
class Overhead:
    """The memory of a device that a step uses beside what XLA plans.

    Attributes:
      runtime: bytes of the CUDA context with its kernels; on a TPU, those that its runtime keeps
        for itself.
      communicator: bytes of NCCL's buffers for each group of devices that communicates.
      peer: bytes of NCCL's buffers for each device of the same node that is sent to directly.
      workspace, convolution: bytes of a library's workspace, for a matrix product and for a
        convolution.
      fragmentation: the share of a program's memory that the allocator cannot use.
      temporaries: the share of a program's temporaries by which XLA's own figure is off.
    """

    runtime: Estimate = Estimate()
    communicator: Estimate = Estimate()
    peer: Estimate = Estimate()
    workspace: Estimate = Estimate()
    convolution: Estimate = Estimate()
    fragmentation: Estimate = Estimate()
    temporaries: Estimate = Estimate()


@dataclasses.dataclass(frozen=True)
class Target:
    """One kind of device.

    Attributes:
      memory: bytes that a program can use on one device.
      memory_bandwidth: bytes per second.
      flops: floating-point operations per second, dense, by the dtype that is multiplied; "vector"
        is float32 outside of matrix units.
      inside, between: links to devices of the same node, and to other nodes of the same site, of
        each device.
      sites: the link of a site to other sites, which all of its devices share.
      achieved: the shares of these figures that programs achieve.
      spread: how far off these shares may be.
      overhead: what a step uses of the memory beside what XLA plans; nothing if a target does not
        say.
      compiler: XLA:GPU's description of a GPU; for a TPU, libtpu's name and the number of dims of a
        slice.
      first_touch: bytes per second at which a step first writes memory that it allocates, which a
        CPU's system clears; 0: free.
      simulated: how many devices shared this machine's cores when the figures were measured; 0:
        each has its own.
      sources: the source of each figure.
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
    spread: Spread = Spread()
    overhead: Overhead = Overhead()
    sites: Link = SITES
    devices_per_node: int = 8
    compiler: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    first_touch: float = 0.0
    simulated: int = 0
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def host_bandwidth(self) -> float | None:
        """Bytes per second between a device and its host, in one direction; None if the target does
        not say, as TPUs do not.
        """
        return self.compiler.get("pcie_bandwidth")

    @property
    def cores(self) -> int:
        """A GPU's multiprocessors; 0 for other devices, whose products are not computed in waves of
        tiles.
        """
        return self.compiler.get("core_count", 0)

    @property
    def clock(self) -> float:
        """Cycles per second of a GPU's multiprocessors; 0 for other devices."""
        return self.compiler.get("clock_rate_ghz", 0.0) * 1e9

    def rate(self, dtype: str) -> float:
        """FLOPs per second of a matrix product of this dtype; float32's if the table lacks it."""
        if dtype == HIGHEST:
            dtype = "vector"  # matrix units round, so the product is computed outside of them
        elif dtype.startswith("float8"):
            dtype = "float8"  # all formats of float8 have the same rate
        return self.flops.get(dtype, self.flops["float32"])


def shipped() -> dict[str, Path]:
    """Return the files of the targets that come with the library, by name."""
    folder = Path(str(resources.files("spmd"))) / "planner" / "targets"
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def load(name: str) -> Target:
    """Read a target by its name, or from the path of a TOML file.

    Raises:
      OptionError: no such target or file, or an invalid file; all its problems at once.
    """
    path = _target_path(name)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OptionError(
            f"{path} is not TOML: {error}.", fix="`spmd targets` shows those that are shipped."
        ) from error
    example = next(iter(shipped().values()))
    raise_problems(
        OptionError,
        f"{path} does not describe a target",
        _problems(table),
        fix=f"write it as those that are shipped, such as {example}.",
    )
    fields = dict(table)
    fields["name"] = path.stem
    fields["achieved"] = Achieved(**table["achieved"])
    for key in ("inside", "between", "sites"):
        if key in table:
            fields[key] = Link(float(table[key]["bandwidth"]), float(table[key]["latency"]))
    if "spread" in table:
        fields["spread"] = Spread(**table["spread"])
    estimates = {key: Estimate(*pair) for key, pair in table.get("overhead", {}).items()}
    fields["overhead"] = Overhead(**estimates)
    return Target(**fields)


def _target_path(name: str) -> Path:
    """Return the file of a target that is shipped, or of one's own.

    Raises:
      OptionError: there is no such target or file.
    """
    files = shipped()
    if name in files:
        path = files[name]
    else:
        path = as_path(name, "target")
    if name.endswith(".toml") and not path.is_file():
        raise OptionError(
            f'there is no file "{name}", the target.',
            fix="the path of a target's file, or a name that `spmd targets` lists.",
        )
    if name not in files and not name.endswith(".toml"):
        raise OptionError(
            f'there is no target "{name}".',
            fix=f"{did_you_mean(name, files)} Paths of TOML files end in .toml.",
        )
    return path


def _problems(table: dict[str, Any]) -> list[Problem]:
    """List missing and unknown keys and wrong values in a target's file."""
    fields = [field.name for field in dataclasses.fields(Target) if field.name != "name"]
    optional = {*_MORE_FIGURES, "sites", "sources", "spread", "overhead"}
    if table.get("platform") not in ("cuda", "tpu"):
        optional.add("compiler")
    problems = []
    for name in fields:
        if name not in optional and name not in table:
            problems.append(Problem(name, ["it is missing."]))
    for name in table:
        if name not in fields:
            problems.append(Problem(name, ["unknown key."], did_you_mean(name, fields)))
    if table.get("platform", PLATFORMS[0]) not in PLATFORMS:
        fix = did_you_mean(str(table["platform"]), PLATFORMS)
        problems.append(Problem("platform", [f"{table['platform']!r} is not a platform."], fix))
    figures = ("memory", "memory_bandwidth", *_MORE_FIGURES)
    problems += _not_positive({name: table[name] for name in figures if name in table})
    for name in ("memory", "devices_per_node", "simulated"):
        number = table.get(name)
        if isinstance(number, float) and math.isfinite(number) and not number.is_integer():
            why = f"{number} is not a whole number."
            problems.append(Problem(name, [why], f"such as {math.ceil(number)}."))
    tables = dict(_TABLES)
    if table.get("platform") == "tpu":
        tables["compiler"] = ("name", "dims")
    for name, needed in tables.items():
        if name in table:
            problems += _table_problems(name, table[name], needed)
    return problems


def _table_problems(name: str, table: Any, needed: Sequence[str]) -> list[Problem]:
    """List missing and unknown keys and wrong values in one table of a target's file."""
    if not isinstance(table, dict):
        return [Problem(name, [f"{table!r} is not a table."])]
    problems = [
        Problem(f"[{name}] {key}", ["it is missing."]) for key in needed if key not in table
    ]
    keys = (*needed, *_OPTIONAL.get(name, ()))
    for key in table:
        # [flops] may have any dtype
        if name != "flops" and key not in keys:
            fix = did_you_mean(key, keys)
            problems.append(Problem(f"[{name}] {key}", ["unknown key."], fix))
    if name == "overhead":
        return problems + _not_estimates(table)
    texts = ("name", "compute_capability")
    figures = {f"[{name}] {key}": value for key, value in table.items() if key not in texts}
    problems += _not_positive(figures)
    shares = {"achieved": ("matmul", "memory", "link", *_MORE_SHARES), "spread": tuple(table)}
    for key in shares.get(name, ()):
        share = table.get(key)
        if isinstance(share, int | float) and share > 1:
            why = f"{share} is a share above 1."
            problems.append(Problem(f"[{name}] {key}", [why], "such as 0.6."))
    if "compute_capability" in needed:
        problems += _wrong_capability(table.get("compute_capability", [0, 0]))
    return problems


def _wrong_capability(version: Any) -> list[Problem]:
    """Return a problem if a compute capability is not two integers."""
    if isinstance(version, list) and [type(number) for number in version] == [int, int]:
        return []
    why = f"{version!r} is not two integers."
    return [Problem("[compiler] compute_capability", [why], "such as [9, 0].")]


def _not_positive(figures: Mapping[str, Any]) -> list[Problem]:
    """List the figures that are no positive numbers, or larger than any hardware's."""
    problems = []
    for name, value in figures.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not value > 0:
            problems.append(Problem(name, [f"{value!r} is not a positive number."]))
        elif value > MOST:
            problems.append(Problem(name, [f"{value!r} is more than {MOST:g}."]))
    return problems


def _not_estimates(table: Mapping[str, Any]) -> list[Problem]:
    """List the entries of `[overhead]` that are not two numbers of 0 or more."""
    fix = "what is expected and its standard deviation, such as [550e6, 150e6]."
    problems = []
    for key, pair in table.items():
        if key in _OPTIONAL["overhead"] and not _is_estimate(pair):
            why = f"{pair!r} is not two numbers of 0 or more."
            problems.append(Problem(f"[overhead] {key}", [why], fix))
    return problems


def _is_estimate(pair: Any) -> bool:
    if not isinstance(pair, list) or len(pair) != 2:
        return False
    return all(type(number) in (int, float) and number >= 0 for number in pair)


def target_text(target: Target) -> str:
    """Write a target as the text of the file that `load` reads as this target.

    >>> import tomllib
    >>> tomllib.loads(target_text(load("h100")))["achieved"]["launch"]
    4e-06
    """
    lines = []
    for name in ("title", "platform", "memory", "memory_bandwidth", *_MORE_FIGURES):
        if value := getattr(target, name):
            lines.append(f"{name} = {_value(value)}")
    for name in TABLES:
        part = getattr(target, name)
        table = part
        if not isinstance(part, Mapping):
            table = vars(part)
        if not table or part == Overhead():
            continue
        comment = ""
        if name in COMMENTS:
            comment = f"  # {COMMENTS[name]}"
        lines += ["", f"[{name}]{comment}"]
        lines += [f"{key} = {_value(value)}" for key, value in table.items()]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    """Write a value in TOML; floats have four digits."""
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, Estimate):
        return _value([value.expected, value.deviation])
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, int):
        return str(value)
    return repr(float(f"{value:.4g}"))
