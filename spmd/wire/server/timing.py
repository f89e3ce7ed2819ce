"""The words that declare the simulated clock: how long things take, and what lateness is worth."""

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

from spmd.base.fields import as_toml
from spmd.errors import did_you_mean

SECONDS = (
    "constant(seconds), exponential(mean seconds), lognormal(median seconds, sigma), a list of "
    "seconds, or the path of a trace."
)
LINK = 'such as { bandwidth = "10Gb/s", latency = "50us" }.'
FORMS = {
    "constant": "constant(seconds)",
    "exponential": "exponential(mean seconds)",
    "lognormal": "lognormal(median seconds, sigma)",
}
# how many numbers stand in the brackets, from and to
COUNTS = {"constant": (0, 1), "exponential": (0, 1), "lognormal": (2, 2)}


def parse_compute_time(declared: str | tuple[float, ...]) -> tuple[str, tuple[float, ...]]:
    """The kind of distribution and its numbers; "list" with one per worker; "trace" for a text that
    is neither, and so a path.

    >>> (
    ...     parse_compute_time("lognormal(1.0, 0.3)"),
    ...     parse_compute_time("constant"),
    ...     parse_compute_time("times.csv"),
    ... )
    (('lognormal', (1.0, 0.3)), ('constant', (1.0,)), ('trace', ()))

    Raises:
      ValueError: a distribution with the wrong numbers.
    """
    if not isinstance(declared, str):
        if not declared or not _all_from_zero(declared):
            raise ValueError(f"{list(declared)} are no seconds.")
        return "list", declared
    call = re.fullmatch(r"\s*(\w+)\s*(?:\(([^()]*)\))?\s*", declared)
    if not call or (call[1] not in FORMS and call[2] is None):
        return "trace", ()
    kind = call[1]
    if kind not in FORMS:
        raise ValueError(f'no distribution "{kind}".')
    values: tuple[float, ...] | None = ()
    if call[2] and call[2].strip():
        values = _numbers(*call[2].split(","))
    least, most = COUNTS[kind]
    if values is None or not least <= len(values) <= most:
        raise ValueError(f'"{declared}" is not {FORMS[kind]}.')
    return kind, values or (1.0,)


def _numbers(*texts: str) -> tuple[float, ...] | None:
    """The numbers from 0 that these texts spell; None if one of them spells none."""
    try:
        values = tuple(map(float, texts))
    except ValueError:
        return None
    if not _all_from_zero(values):
        return None
    return values


def _all_from_zero(values: tuple[float, ...]) -> bool:
    return all(math.isfinite(value) and value >= 0 for value in values)


def parse_staleness_scale(declared: str) -> Callable[[int], float] | None:
    """The rate of an update by its staleness; None when the text means nothing.

    >>> (
    ...     parse_staleness_scale("inverse")(4),
    ...     parse_staleness_scale("power(0.5)")(3),
    ...     parse_staleness_scale("of"),
    ... )
    (0.25, 0.5, None)
    """
    if declared == "none":
        return lambda tau: 1.0
    if declared == "inverse":
        return lambda tau: 1.0 / max(tau, 1)
    call = re.fullmatch(r"(power|exp)\(([\d.eE+-]+)\)", declared.replace(" ", ""))
    if call is None:
        return None
    values = _numbers(call[2])
    if values is None:
        return None
    (value,) = values
    if call[1] == "power":
        return lambda tau: (1.0 + tau) ** -value
    return lambda tau: math.exp(-value * tau)


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
            if key not in PARSERS:
                raise ValueError(f"nothing reads {key}: {did_you_mean(key, tuple(PARSERS))}")
            unit, parse = PARSERS[key]
            value = None
            if isinstance(text, str):
                value = parse(text.strip())
            if value is None:
                raise ValueError(f"{key} = {as_toml(text)} is not {unit}.")
            values[key] = value
        return cls(**values)


def _parse_bandwidth(text: str) -> float | None:
    """Return bytes per second; None if the text is not a bandwidth, or is 0."""
    parts = re.fullmatch(r"([\d.eE+-]+)\s*([kMGT]?)([bB])/s", text)
    if parts is None:
        return None
    number = _numbers(parts[1])
    if number is None or number == (0.0,):
        return None
    bandwidth = number[0] * SCALES[parts[2]]
    if parts[3] == "b":
        return bandwidth / 8
    return bandwidth


def _parse_latency(text: str) -> float | None:
    """Return seconds; None if the text is not a time."""
    parts = re.fullmatch(r"([\d.eE+-]+)\s*(s|ms|us|ns)", text)
    if parts is None:
        return None
    number = _numbers(parts[1])
    if number is None:
        return None
    return number[0] / PER_SECOND[parts[2]]


SCALES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}

PER_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}

# by key: what an error asks for, and the function that parses it
PARSERS = {
    "bandwidth": ("a number and bits or bytes per second", _parse_bandwidth),
    "latency": ("a number and a unit of time", _parse_latency),
}
