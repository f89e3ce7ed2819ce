"""Kinds of devices: their figures, and the TOML files that hold them."""

import dataclasses
import math
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from spmd.errors import OptionError, Problem, did_you_mean, raise_problems
from spmd.user_paths import as_path

PLATFORMS = ("cuda", "tpu", "cpu")
# figures of a target's file, in bytes, FLOPs and the like; seconds to another site
MOST = 1e24
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
_OPTIONAL = {
    "achieved": _MORE_SHARES,
    "spread": ("matmul", "memory", "link", "launch", "convolution", "attention"),
}
_OPTIONAL |= {
    "overhead": (
        "runtime",
        "communicator",
        "peer",
        "workspace",
        "convolution",
        "fragmentation",
        "temporaries",
    )
}


@dataclasses.dataclass(frozen=True)
class Link:
    """What connects a device to others: bytes per second in one direction, and seconds until the
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
            object.__setattr__(self, name, getattr(self, name) or self.matmul)


@dataclasses.dataclass(frozen=True)
class Spread:
    """How far off the figures of `Achieved` may be, as shares of them: half of the range that a
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
    """What is expected, and its standard deviation."""

    expected: float = 0.0
    deviation: float = 0.0


@dataclasses.dataclass(frozen=True)
class Overhead:
    """What a step uses of a device's memory beside what XLA plans.

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
        key = {HIGHEST: "vector"}.get(dtype, "float8" if dtype.startswith("float8") else dtype)
        return self.flops.get(key, self.flops["float32"])


def shipped() -> dict[str, Path]:
    """The files of the targets that come with the library, by name."""
    folder = Path(str(resources.files("spmd"))) / "planner" / "targets"
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def load(name: str) -> Target:
    """A target by its name, or by the path of a TOML file.

    Raises:
      OptionError: no such target or file, or an invalid file; all its problems at once.
    """
    known = shipped()
    path = known[name] if name in known else as_path(name, "target")
    if name.endswith(".toml") and not path.is_file():
        raise OptionError(
            f'there is no file "{name}", the target.',
            fix="the path of a target's file, or a name that `spmd targets` lists.",
        )
    if name not in known and not name.endswith(".toml"):
        raise OptionError(
            f'there is no target "{name}".',
            fix=f"{did_you_mean(name, known)} Paths of TOML files end in .toml.",
        )
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OptionError(
            f"{path} is not TOML: {error}.", fix="`spmd targets` shows those that are shipped."
        ) from error
    raise_problems(OptionError, f"{path} does not describe a target", _problems(table))
    links = [key for key in ("inside", "between", "sites") if key in table]
    parsed: dict[str, Any] = {
        key: Link(float(table[key]["bandwidth"]), float(table[key]["latency"])) for key in links
    }
    parsed |= {"name": path.stem, "achieved": Achieved(**table["achieved"])}
    parsed |= {"spread": Spread(**table["spread"])} if "spread" in table else {}
    parsed |= {
        "overhead": Overhead(
            **{key: Estimate(*pair) for key, pair in table.get("overhead", {}).items()}
        )
    }
    return Target(**(table | parsed))


def _problems(table: dict[str, Any]) -> list[Problem]:
    """Missing and unknown keys and wrong values in a target's file."""
    fields = {field.name: field for field in dataclasses.fields(Target) if field.name != "name"}
    optional = {*_MORE_FIGURES, "sites", "sources", "spread", "overhead"}
    optional |= {"compiler"} if table.get("platform") not in ("cuda", "tpu") else set()
    needed = [name for name in fields if name not in optional]
    problems = [Problem(name, ["it is missing."]) for name in needed if name not in table]
    problems += [
        Problem(name, ["unknown key."], did_you_mean(name, fields))
        for name in table
        if name not in fields
    ]
    if table.get("platform", PLATFORMS[0]) not in PLATFORMS:
        fix = did_you_mean(str(table["platform"]), PLATFORMS)
        problems.append(Problem("platform", [f"{table['platform']!r} is not a platform."], fix))
    problems += _not_positive(
        {
            name: table[name]
            for name in ("memory", "memory_bandwidth", *_MORE_FIGURES)
            if name in table
        }
    )
    floats = {
        name: table[name]
        for name in ("memory", "devices_per_node", "simulated")
        if isinstance(table.get(name), float)
    }
    parts = [
        name for name, value in floats.items() if math.isfinite(value) and not value.is_integer()
    ]
    problems += [
        Problem(
            name, [f"{table[name]} is not a whole number."], f"such as {math.ceil(table[name])}."
        )
        for name in parts
    ]
    slices = table.get("platform") == "tpu"
    for name, wanted in (_TABLES | ({"compiler": ("name", "dims")} if slices else {})).items():
        part = table.get(name)
        if part is None:
            continue
        if not isinstance(part, dict):
            problems.append(Problem(name, [f"{part!r} is not a table."]))
            continue
        problems += [
            Problem(f"[{name}] {key}", ["it is missing."]) for key in wanted if key not in part
        ]
        known = (*wanted, *_OPTIONAL.get(name, ()))
        # [flops] may have any dtype
        unknown = [] if name == "flops" else [key for key in part if key not in known]
        problems += [
            Problem(f"[{name}] {key}", ["unknown key."], did_you_mean(key, known))
            for key in unknown
        ]
        if name == "overhead":
            problems += _not_estimates(part)
            continue
        problems += _not_positive(
            {
                f"[{name}] {key}": part[key]
                for key in part
                if key not in ("name", "compute_capability")
            }
        )
        shares = (
            ("matmul", "memory", "link", *_MORE_SHARES)
            if name == "achieved"
            else tuple(part)
            if name == "spread"
            else ()
        )
        large = [key for key in shares if isinstance(part.get(key), int | float) and part[key] > 1]
        problems += [
            Problem(f"[{name}] {key}", [f"{part[key]} is a share above 1."], "such as 0.6.")
            for key in large
        ]
        version = part.get("compute_capability", [0, 0])
        if (
            name == "compiler"
            and not slices
            and not (
                isinstance(version, list) and [type(number) for number in version] == [int, int]
            )
        ):
            problems.append(
                Problem(
                    "[compiler] compute_capability",
                    [f"{version!r} is not two integers."],
                    "such as [9, 0].",
                )
            )
    return problems


def _not_positive(figures: Mapping[str, Any]) -> list[Problem]:
    def wrong(value: Any) -> str:
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            return "not a positive number"
        return f"more than {MOST:g}" if value > MOST else ""

    return [
        Problem(name, [f"{value!r} is {why}."])
        for name, value in figures.items()
        if (why := wrong(value))
    ]


def _not_estimates(part: Mapping[str, Any]) -> list[Problem]:
    def right(pair: Any) -> bool:
        numbers = pair if isinstance(pair, list) else []
        return len(numbers) == 2 and all(
            type(number) in (int, float) and number >= 0 for number in numbers
        )

    wrong = [key for key, pair in part.items() if key in _OPTIONAL["overhead"] and not right(pair)]
    fix = "what is expected and its standard deviation, such as [550e6, 150e6]."
    return [
        Problem(f"[overhead] {key}", [f"{part[key]!r} is not two numbers of 0 or more."], fix)
        for key in wrong
    ]


TABLES = ("flops", "inside", "between", "achieved", "spread", "overhead", "compiler", "sources")
COMMENTS = {
    "flops": "per second, dense, by the dtype that is multiplied",
    "inside": "what one device sends to others in its node",
    "between": "what one device sends to other nodes",
    "achieved": "shares of these that programs reach, and seconds before an operation begins",
    "spread": "how far off each may be, as a share of it",
    "overhead": "of memory beside XLA's program: what is expected, and its standard deviation",
}


def target_text(target: Target) -> str:
    """The file that `spmd.planner.target.load` reads as this target.

    >>> import tomllib
    >>> from spmd.planner.target import load
    >>> tomllib.loads(target_text(load("h100")))["achieved"]["launch"]
    4e-06
    """
    numbers = ("memory", "memory_bandwidth", "devices_per_node", "first_touch", "simulated")
    heads = {"title": target.title, "platform": target.platform} | {
        name: getattr(target, name) for name in numbers
    }
    lines = [f"{name} = {_value(value)}" for name, value in heads.items() if value]
    for name in TABLES:
        part = getattr(target, name)
        if part == Overhead():
            continue
        table = part if isinstance(part, Mapping) else vars(part)
        comment = f"  # {COMMENTS[name]}" if name in COMMENTS else ""
        lines += (
            [
                "",
                f"[{name}]{comment}",
                *(f"{key} = {_value(value)}" for key, value in table.items()),
            ]
            if table
            else []
        )
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    """A value in TOML; floats with four digits."""
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, Estimate):
        return _value([value.expected, value.deviation])
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    return str(value) if isinstance(value, int) else repr(float(f"{value:.4g}"))
