"""The declaration of a parameter server, and a check for options that mean nothing or contradict
each other. Data only.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from spmd.base.fields import Conflict, as_toml, check_types, plain_types, wrong_type
from spmd.base.tracebacks import trims_tracebacks
from spmd.errors import OptionError
from spmd.wire.server.timing import (
    LINK,
    SECONDS,
    Network,
    parse_compute_time,
    parse_staleness_scale,
)

ASYNCHRONOUS, LOCAL = ("asynchronous", "bounded", "softsync"), ("local", "elastic")
MODES = ("synchronous", *ASYNCHRONOUS, *LOCAL)
PLACEMENTS = ("sliced", "round_robin", "greedy_bytes", "largest_first")


@trims_tracebacks
@dataclasses.dataclass(frozen=True)
class ParameterServer:
    """A parameter server: where parameters are kept, who waits for whom, and what is made of
    gradients that come late.

    Attributes:
      placement: "sliced" (every parameter sharded evenly over the servers), or entire parameters,
        as TF's `replica_device_setter` placed variables: "round_robin" (in the order of the tree:
        dicts by name), "greedy_bytes" (in that order, each to the server with the least bytes),
        "largest_first" (the same, largest first).
      servers: how many of the positions along the data axes keep parameters; None: all.
      workers: how many workers are simulated; a multiple of the positions along the data axes;
        None: one at each.
      mode: "synchronous"; "asynchronous": each gradient is an update, of weights that have moved on
        since; "bounded": so, but no worker is more than `bound` gradients ahead of the slowest, and
        an update counts 1 / workers (SSP, Ho et al. 2013); "softsync": each `workers // splits`
        gradients are an update (Zhang et al., arXiv:1511.05950). In the others workers have weights
        and an optimizer of their own, and synchronize with the servers every `every` steps:
        "local": their mean delta is a gradient to the outer optimizer, Nesterov's momentum (DiLoCo,
        Douillard et al., arXiv:2311.08105); "elastic": both move towards each other (EASGD, Zhang
        et al., arXiv:1412.6651).
      bound: of mode "bounded".
      splits: of mode "softsync".
      spares: synchronous: an update waits for all but so many workers; the slowest are dropped
        (Chen et al., arXiv:1604.00981).
      compute_time: what a gradient takes on the simulated clock: "constant", "constant(seconds)",
        "exponential(mean)", "lognormal(median, sigma)", a list of seconds, one per worker, or the
        path of a trace (.csv or .npy, one row per gradient, one column per worker).
      network: {"bandwidth": "10Gb/s", "latency": "50us"} of each server's link on the simulated
        clock; None costs nothing.
      staleness_scale: the rate of an update whose gradient is tau versions old: "none"; "inverse":
        1 / tau; "power(a)": (1 + tau)^-a; "exp(b)": e^(-b tau).
      max_staleness: a gradient that is older is dropped.
      delay_compensation: lambda of DC-ASGD (Zheng et al., arXiv:1609.08326): g + lambda g g (w -
        w_read).
      delay_decay: makes it adaptive: lambda / sqrt(s + 1e-7), where s is the servers' moving mean
        of g g with this decay, such as 0.95.
      warmup_steps: updates that the first worker makes alone, before the others join.
      fetch_every: gradients of a worker between two fetches of weights (Downpour, Dean et al.
        2012).
      every: steps of a worker between two synchronizations, of modes "local" and "elastic".
      fragments: parameters are synchronized in this many parts, each at its own step (streaming
        DiLoCo, arXiv:2501.18512).
      overlap: steps that workers continue while a synchronization is in flight.
      mix: the share of its own weights that a worker keeps where it takes those of the servers.
      outer_rate, outer_momentum: of the outer optimizer; 1 and 0 are local SGD.
      moving_rate: alpha of mode "elastic"; None: 0.9 / workers.
      drop_remainder: where the data ends, an update is of fewer workers; true: it is not made, and
        the epoch ends before it.
      seed: of the simulated times.

    Example:
      >>> ParameterServer(mode="asynchronous", staleness_scale="inverse").asynchronous
      True
    """

    placement: str = "sliced"
    servers: int | None = None
    workers: int | None = None
    mode: str = "synchronous"
    bound: int | None = None
    splits: int | None = None
    spares: int = 0
    compute_time: str | tuple[float, ...] = "constant"
    network: tuple[tuple[str, str], ...] | Mapping[str, str] = ()
    staleness_scale: str = "none"
    max_staleness: int | None = None
    delay_compensation: float = 0.0
    warmup_steps: int = 0
    fetch_every: int = 1
    delay_decay: float | None = None
    every: int | None = None
    fragments: int = 1
    overlap: int = 0
    mix: float = 0.0
    outer_rate: float = 0.7
    outer_momentum: float = 0.9
    moving_rate: float | None = None
    drop_remainder: bool = False
    seed: int = 0

    def __post_init__(self):
        check_types(self)
        if not isinstance(self.network, Mapping | tuple):
            raise wrong_type(self, "network", "a dict")
        # A frozen dataclass has no other way to set a field.
        object.__setattr__(self, "network", _pairs(self.network))
        if not isinstance(self.compute_time, str | list | tuple):
            raise wrong_type(self, "compute_time", "a str or a list")
        if not isinstance(self.compute_time, str):
            seconds = tuple(_number("compute_time", value, SECONDS) for value in self.compute_time)
            object.__setattr__(self, "compute_time", seconds)
        for key, fix in FRACTIONS.items():
            if getattr(self, key) is not None:
                object.__setattr__(self, key, _number(key, getattr(self, key), fix))

    @property
    def asynchronous(self) -> bool:
        """Return whether gradients are applied in order of arrival."""
        return self.mode in ASYNCHRONOUS

    def per_update(self, workers: int) -> int:
        """Gradients of one update, where they are applied in order of arrival."""
        if self.mode == "softsync" and self.splits:
            return workers // self.splits
        return 1

    @property
    def local(self) -> bool:
        """Return whether workers have weights and an optimizer of their own."""
        return self.mode in LOCAL


def _pairs(network: Any) -> tuple[tuple[str, str], ...]:
    pairs = network
    if isinstance(network, Mapping):
        pairs = tuple(network.items())
    if not all(_is_pair(pair) for pair in pairs):
        why = f"ParameterServer: network={network!r} is no table of words."
        raise OptionError(why, fix=LINK)
    return pairs


def _is_pair(pair: Any) -> bool:
    """Return whether this is a key and its value, as a TOML table has them."""
    if not isinstance(pair, tuple) or len(pair) != 2:
        return False
    key, value = pair
    return isinstance(key, str) and key.isidentifier() and isinstance(value, str | int | float)


def _number(key: str, value: Any, fix: str) -> float:
    is_number = isinstance(value, int | float) or hasattr(value, "dtype")
    try:
        if isinstance(value, bool) or not is_number:
            raise TypeError
        return float(value)
    except (TypeError, ValueError, OverflowError):
        why = f"ParameterServer: {key}: {value!r} is no number that float holds."
        raise OptionError(why, fix=fix) from None


# others from 0
LEAST = {
    "servers": 1,
    "workers": 1,
    "bound": 0,
    "splits": 1,
    "fetch_every": 1,
    "every": 1,
    "fragments": 1,
}
FRACTIONS = {  # what is not a whole number, and a fix
    "delay_compensation": "such as 0.04.",
    "delay_decay": "such as 0.95.",
    "mix": "such as 0.5.",
    "outer_rate": "such as 0.7.",
    "outer_momentum": "such as 0.9.",
    "moving_rate": "such as 0.1.",
}
BELOW_ONE = ("delay_decay", "mix", "outer_momentum")
OF_MODE = {  # who reads what
    "spares": ("synchronous",),
    "bound": ("bounded",),
    "splits": ("softsync",),
    "fetch_every": ("asynchronous",),
    "staleness_scale": ASYNCHRONOUS,
    "max_staleness": ASYNCHRONOUS,
    "delay_compensation": ASYNCHRONOUS,
    "delay_decay": ASYNCHRONOUS,
    "warmup_steps": ("synchronous", *ASYNCHRONOUS),
    "every": LOCAL,
    "fragments": ("local",),
    "overlap": ("local",),
    "mix": ("local",),
    "outer_rate": ("local",),
    "outer_momentum": ("local",),
    "moving_rate": ("elastic",),
}
NEEDS = {"bounded": "bound", "softsync": "splits", "local": "every", "elastic": "every"}


def declared_problems(server: ParameterServer) -> list[Conflict]:
    """Return which values of a parameter server mean nothing, or contradict each other."""
    conflicts = [*_number_problems(server), *_text_problems(server)]
    for key, modes in OF_MODE.items():
        if getattr(server, key) != getattr(ParameterServer(), key) and server.mode not in modes:
            fix = f"leave it out, or mode = {' or '.join(map(as_toml, modes))}."
            conflicts.append(Conflict(key, f'nothing reads it in mode "{server.mode}".', fix))
    needed = NEEDS.get(server.mode)
    if needed and getattr(server, needed) is None:
        example = LEAST[needed] + 1
        if server.local:
            example = 10
        fix = f"such as  {needed} = {example}."
        conflicts.append(Conflict("mode", f'"{server.mode}" needs {needed}.', fix))
    if server.delay_decay is not None and not server.delay_compensation:
        fix = "delay_compensation = 2.0, or leave it out."
        conflicts.append(Conflict("delay_decay", "nothing reads it: delay_compensation is 0.", fix))
    times = server.compute_time
    if server.asynchronous and not isinstance(times, str) and 0 in times:
        why = "a worker that takes no time leaves none to the others."
        conflicts.append(Conflict("compute_time", why, "seconds above 0."))
    if server.local:
        conflicts += _local_problems(server)
    return conflicts


def worker_problems(server: ParameterServer, workers: int) -> list[Conflict]:
    """Return which values do not fit this number of workers."""
    conflicts = []
    for key, most in (("spares", workers - 1), ("splits", workers)):
        value = getattr(server, key)
        if value is not None and value > most:
            conflicts.append(Conflict(key, f"{value}, of {workers} workers.", f"at most {most}."))
    times = server.compute_time
    if isinstance(times, tuple) and len(times) != workers:
        why = f"{len(times)} numbers for {workers} workers."
        conflicts.append(Conflict("compute_time", why, "one for each."))
    return conflicts


def _number_problems(server: ParameterServer) -> list[Conflict]:
    conflicts = []
    for field in dataclasses.fields(server):
        key = field.name
        value = getattr(server, key)
        least = LEAST.get(key, 0)
        if int not in plain_types(field) or value is None or least <= value < 2**31:
            continue
        fix = "below 2**31."
        if value < least:
            fix = f"a whole number from {least}."
        conflicts.append(Conflict(key, f"{value}.", fix))
    for key in FRACTIONS:
        value = getattr(server, key)
        if value is not None and not _is_in_range(key, value):
            fix = "a number from 0."
            if key == "outer_rate":
                fix = "a number above 0."
            elif key in BELOW_ONE:
                fix = "a number from 0 to below 1."
            conflicts.append(Conflict(key, f"{value}.", fix))
    return conflicts


def _is_in_range(key: str, value: float) -> bool:
    """Return whether a number is one that this key of `FRACTIONS` may have."""
    if not math.isfinite(value) or value < 0:
        return False
    if key == "outer_rate":
        return value > 0
    return key not in BELOW_ONE or value < 1


def _local_problems(server: ParameterServer) -> list[Conflict]:
    """Return problems of synchronizations that overlap each other."""
    every = server.every or 0
    fragments = server.fragments
    if every < 1 or fragments < 1:
        return []
    between = every // fragments
    if every % fragments:
        why = (
            f"{every} steps between synchronizations, for {fragments} fragments in turn; {every} / "
            f"{fragments} leaves {every % fragments}."
        )
        return [Conflict("fragments", why, f"every = {-(-every // fragments) * fragments}.")]
    if server.overlap >= between:
        why = f"{server.overlap} steps, and the next synchronization is {between} steps later."
        return [Conflict("overlap", why, f"at most {between - 1}.")]
    return []


def _text_problems(server: ParameterServer) -> list[Conflict]:
    conflicts = []
    if parse_staleness_scale(server.staleness_scale) is None:
        fix = '"none", "inverse", "power(a)" or "exp(b)", of numbers from 0.'
        conflicts.append(Conflict("staleness_scale", f'no scale "{server.staleness_scale}".', fix))
    try:
        parse_compute_time(server.compute_time)
    except ValueError as error:
        conflicts.append(Conflict("compute_time", str(error), SECONDS))
    try:
        Network.parse(server.network)
    except ValueError as error:
        conflicts.append(Conflict("network", str(error), LINK))
    return conflicts
