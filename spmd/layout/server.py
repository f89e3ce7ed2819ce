"""What a layout says about the simulated parameter server. Data only; `spmd.comm.server` does it."""

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from spmd.errors import OptionError, a_kind, did_you_mean
from spmd.layout.gradients import Clash, Gradients

MODES = ("synchronous", "asynchronous", "bounded", "softsync")
SECONDS = "constant(seconds), exponential(mean seconds), lognormal(median seconds, sigma), a list of seconds, or the path of a trace."
LINK = 'such as { bandwidth = "10Gb/s", latency = "50us" }.'
PLACEMENTS = ("sliced", "round_robin", "greedy_bytes", "largest_first")


@dataclasses.dataclass(frozen=True)
class ParameterServer:
    """Where parameters are kept, who waits for whom, and what is made of gradients that come late.

    Attributes:
      placement: "sliced" (every parameter cut evenly over the servers), or whole parameters, as TF's `replica_device_setter` placed
        variables: "round_robin" (in the model's order), "greedy_bytes" (in that order, each to the server with the least bytes),
        "largest_first" (the same, largest first).
      servers: how many of the positions along the data axes keep parameters; None: all.
      workers: how many workers are simulated; a multiple of the positions along the data axes; None: one at each.
      mode: "synchronous"; "asynchronous": each gradient is an update, of weights that have moved on since; "bounded": so, but no worker
        is more than `bound` gradients ahead of the slowest, and an update counts 1 / workers (SSP, Ho et al. 2013); "softsync": each
        `workers // splits` gradients are an update (Zhang et al., arXiv:1511.05950).
      bound: of mode "bounded".
      splits: of mode "softsync".
      spares: synchronous: an update waits for all but so many workers; the slowest are dropped (Chen et al., arXiv:1604.00981).
      compute_time: what a gradient takes on the simulated clock: "constant", "constant(seconds)", "exponential(mean)",
        "lognormal(median, sigma)", a list of seconds, one per worker, or the path of a trace (.csv or .npy, one row per gradient, one
        column per worker).
      network: {"bandwidth": "10Gb/s", "latency": "50us"} of each server's link on the simulated clock; None costs nothing.
      staleness_scale: the rate of an update whose gradient is tau versions old: "none"; "inverse": 1 / tau; "power(a)":
        (1 + tau)^-a; "exp(b)": e^(-b tau).
      max_staleness: a gradient that is older is dropped.
      delay_compensation: lambda of DC-ASGD (Zheng et al., arXiv:1609.08326): g + lambda g g (w - w_read).
      warmup_steps: updates that the first worker makes alone, before the others join.
      fetch_every: gradients of a worker between two fetches of weights (Downpour, Dean et al. 2012).
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
    seed: int = 0

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value, kinds = getattr(self, field.name), KINDS.get(field.name)
            if kinds and (not isinstance(value, kinds) or isinstance(value, bool)):
                wanted = "a str or a list" if field.name == "compute_time" else a_kind(kinds[0]())
                raise OptionError(f"ParameterServer: {field.name}={value!r} is {a_kind(value)}; wanted {wanted}.")
        object.__setattr__(self, "network", _pairs(self.network))
        if not isinstance(self.compute_time, str):
            object.__setattr__(self, "compute_time", tuple(_number("compute_time", value, SECONDS) for value in self.compute_time))
        object.__setattr__(self, "delay_compensation", _number("delay_compensation", self.delay_compensation, "such as 0.04."))

    @property
    def asynchronous(self) -> bool:
        """Whether gradients are applied in order of arrival."""
        return self.mode != "synchronous"


def _pairs(network: Any) -> tuple[tuple[str, str], ...]:
    pairs = tuple(network.items()) if isinstance(network, Mapping) else network
    simple = lambda key, value: isinstance(key, str) and key.isidentifier() and isinstance(value, str | int | float)
    if not all(isinstance(pair, tuple) and len(pair) == 2 and simple(*pair) for pair in pairs):
        raise OptionError(f"ParameterServer: network={network!r} is no table of words.\n    cure: {LINK}")
    return pairs


def _number(key: str, value: Any, cure: str) -> float:
    try:
        if isinstance(value, bool) or (not isinstance(value, int | float) and not hasattr(value, "dtype")):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise OptionError(f"ParameterServer: {key}: {value!r} is no number that float holds.\n    cure: {cure}") from None


NUMBER, NUMBER_OR_NONE = (int,), (int, type(None))
KINDS: dict[str, tuple[type, ...]] = {
    "placement": (str,),
    "servers": NUMBER_OR_NONE,
    "workers": NUMBER_OR_NONE,
    "mode": (str,),
    "bound": NUMBER_OR_NONE,
    "splits": NUMBER_OR_NONE,
    "spares": NUMBER,
    "compute_time": (str, list, tuple),
    "network": (dict, tuple),
    "staleness_scale": (str,),
    "max_staleness": NUMBER_OR_NONE,
    "delay_compensation": (float, int),
    "warmup_steps": NUMBER,
    "fetch_every": NUMBER,
    "seed": NUMBER,
}
LEAST = {"servers": 1, "workers": 1, "bound": 0, "splits": 1, "max_staleness": 0, "fetch_every": 1}  # others from 0
OF_MODE = {  # who reads what
    "spares": ("synchronous",),
    "bound": ("bounded",),
    "splits": ("softsync",),
    "fetch_every": ("asynchronous",),
    "staleness_scale": MODES[1:],
    "max_staleness": MODES[1:],
    "delay_compensation": MODES[1:],
}


def server_problems(server: ParameterServer, gradients: Gradients) -> list[Clash]:
    """What of `[parameter_server]` means nothing, or does not go together, whatever the model and the mesh."""
    if gradients.reduction != "parameter_server":
        if server == ParameterServer():
            return []
        why = f'nothing reads it: gradients meet by reduction "{gradients.reduction}".'
        return [Clash("", why, '[gradients] reduction = "parameter_server", or leave it out.')]
    found = [*_number_problems(server), *_text_problems(server)]
    for key, modes in OF_MODE.items():
        default = next(field.default for field in dataclasses.fields(server) if field.name == key)
        if getattr(server, key) != default and server.mode not in modes:
            cure = f"leave it out, or mode = {' or '.join(map(_quoted, modes))}."
            found.append(Clash(key, f'nothing reads it in mode "{server.mode}".', cure))
    for key, mode in (("bound", "bounded"), ("splits", "softsync")):
        if server.mode == mode and getattr(server, key) is None:
            found.append(Clash("mode", f'"{mode}" needs {key}.', f"such as  {key} = {LEAST[key] + 1}."))
    if server.asynchronous and not isinstance(server.compute_time, str) and 0 in server.compute_time:
        found.append(Clash("compute_time", "a worker that takes no time leaves none to the others.", "seconds above 0."))
    return found + (_codec_problems(gradients) if server.asynchronous else [])


def _quoted(text: str) -> str:
    return f'"{text}"'


def _number_problems(server: ParameterServer) -> list[Clash]:
    found = []
    for key, kinds in KINDS.items():
        value, least = getattr(server, key), LEAST.get(key, 0)
        if kinds in (NUMBER, NUMBER_OR_NONE) and value is not None and not least <= value < 2**31:
            found.append(Clash(key, f"{value}.", f"a whole number from {least}." if value < least else "below 2**31."))
    if not (math.isfinite(server.delay_compensation) and server.delay_compensation >= 0):
        found.append(Clash("delay_compensation", f"{server.delay_compensation}.", "a number from 0."))
    return found


def _text_problems(server: ParameterServer) -> list[Clash]:
    found = []
    if scale_of(server.staleness_scale) is None:
        cure = '"none", "inverse", "power(a)" or "exp(b)", of numbers from 0.'
        found.append(Clash("staleness_scale", f'no scale "{server.staleness_scale}".', cure))
    try:
        times_of(server.compute_time)
    except ValueError as error:
        found.append(Clash("compute_time", str(error), SECONDS))
    try:
        Network.parse(server.network)
    except ValueError as error:
        found.append(Clash("network", str(error), LINK))
    return found


def _codec_problems(gradients: Gradients) -> list[Clash]:
    """Each gradient is applied by itself, so what a codec does to a mean has no place."""
    found, apart = [], "an asynchronous server applies each gradient by itself."
    for rule, (codec, options) in enumerate([(gradients.codec, gradients.options), *((r.codec, r.options) for r in gradients.rules)], -1):
        number = None if rule < 0 else rule
        if codec == "power_sgd":
            why = f"{codec} approximates a mean over workers; {apart}"
            found.append(Clash("gradients.codec", why, 'codec = "bfloat16", or mode = "synchronous".', number))
        if dict(options).get("reduce") == "ring":
            why = f"a ring makes the mean of workers; {apart}"
            found.append(Clash("gradients.reduce", why, 'reduce = "one_shot", or mode = "synchronous".', number))
    for key in ("start_step", "exact_axes", "diagnostics") if gradients.compressed else ():
        if getattr(gradients, key) != next(field.default for field in dataclasses.fields(gradients) if field.name == key):
            found.append(Clash(f"gradients.{key}", "nothing reads it: an asynchronous server makes no mean.", "leave it out."))
    return found


def shown(value: Any) -> str:
    """A value as a TOML file spells it."""
    return json.dumps(value, default=str, ensure_ascii=False)


# words ---------------------------------------------------------------------------------------------------------------

FORMS = {"constant": "constant(seconds)", "exponential": "exponential(mean seconds)", "lognormal": "lognormal(median seconds, sigma)"}
COUNTS = {"constant": (0, 1), "exponential": (0, 1), "lognormal": (2, 2)}  # how many numbers stand in the brackets, from and to


def times_of(declared: str | tuple[float, ...]) -> tuple[str, tuple[float, ...]]:
    """The kind of distribution and its numbers; "list" with one per worker; "trace" for a text that is neither, and so a path.

    >>> times_of("lognormal(1.0, 0.3)"), times_of("constant"), times_of("times.csv")
    (('lognormal', (1.0, 0.3)), ('constant', (1.0,)), ('trace', ()))

    Raises:
      ValueError: a distribution with the wrong numbers.
    """
    fine = lambda values: all(math.isfinite(value) and value >= 0 for value in values)
    if not isinstance(declared, str):
        if not declared or not fine(declared):
            raise ValueError(f"{list(declared)} are no seconds.")
        return "list", declared
    found = re.fullmatch(r"\s*(\w+)\s*(?:\(([^()]*)\))?\s*", declared)
    if not found or (found[1] not in FORMS and found[2] is None):
        return "trace", ()
    if found[1] not in FORMS:
        raise ValueError(f'no distribution "{found[1]}".')
    inside = found[2].split(",") if found[2] and found[2].strip() else []
    least, most = COUNTS[found[1]]
    try:
        values = tuple(map(float, inside))
    except ValueError:
        values = (math.nan,)
    if not least <= len(inside) <= most or not fine(values):
        raise ValueError(f'"{declared}" is not {FORMS[found[1]]}.')
    return found[1], values or (1.0,)


def scale_of(declared: str) -> Callable[[int], float] | None:
    """The rate of an update by its staleness; None when the text means nothing.

    >>> scale_of("inverse")(4), scale_of("power(0.5)")(3), scale_of("none")(9), scale_of("of")
    (0.25, 0.5, 1.0, None)
    """
    if declared == "none":
        return lambda tau: 1.0
    if declared == "inverse":
        return lambda tau: 1.0 / max(tau, 1)
    found = re.fullmatch(r"(power|exp)\(([\d.eE+-]+)\)", declared.replace(" ", ""))
    try:
        value = float(found[2]) if found else math.nan
    except ValueError:
        value = math.nan
    if not found or not math.isfinite(value) or value < 0:
        return None
    return (lambda tau: (1.0 + tau) ** -value) if found[1] == "power" else (lambda tau: math.exp(-value * tau))


@dataclasses.dataclass(frozen=True)
class Network:
    """Each server's link: bytes per second in each direction, and seconds of latency.

    Example:
      >>> Network.parse({"bandwidth": "10Gb/s", "latency": "50us"})
      Network(bandwidth=1250000000.0, latency=5e-05)
    """

    bandwidth: float = math.inf
    latency: float = 0.0

    @classmethod
    def parse(cls, declared: Any) -> "Network":
        """From words; b is bits, B is bytes.

        Raises:
          ValueError: a key, a unit or a number that means nothing.
        """
        values = {}
        for key, text in dict(declared).items():
            if key not in ("bandwidth", "latency"):
                raise ValueError(f"nothing reads {key}: {did_you_mean(key, ('bandwidth', 'latency'))}")
            pattern = r"([\d.eE+-]+)\s*([kMGT]?)([bB])/s" if key == "bandwidth" else r"([\d.eE+-]+)\s*(s|ms|us|ns)"
            found = re.fullmatch(pattern, text.strip()) if isinstance(text, str) else None
            try:
                number = float(found[1]) if found else math.nan
            except ValueError:
                number = math.nan
            if not found or not math.isfinite(number) or number < 0 or (key == "bandwidth" and number == 0):
                unit = "a number and bits or bytes per second" if key == "bandwidth" else "a number and a unit of time"
                raise ValueError(f"{key} = {shown(text)} is not {unit}.")
            if key == "bandwidth":
                values[key] = number * {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}[found[2]] / (8 if found[3] == "b" else 1)
            else:
                values[key] = number / {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}[found[2]]
        return cls(**values)
