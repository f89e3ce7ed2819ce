"""The words of a layout that are about the simulated clock: how long things take, and what lateness is worth."""

import dataclasses
import json
import math
import re
from collections.abc import Callable
from typing import Any

from spmd.errors import did_you_mean

SECONDS = "constant(seconds), exponential(mean seconds), lognormal(median seconds, sigma), a list of seconds, or the path of a trace."
LINK = 'such as { bandwidth = "10Gb/s", latency = "50us" }.'
FORMS = {"constant": "constant(seconds)", "exponential": "exponential(mean seconds)", "lognormal": "lognormal(median seconds, sigma)"}
COUNTS = {"constant": (0, 1), "exponential": (0, 1), "lognormal": (2, 2)}  # how many numbers stand in the brackets, from and to


def parse_compute_time(declared: str | tuple[float, ...]) -> tuple[str, tuple[float, ...]]:
    """The kind of distribution and its numbers; "list" with one per worker; "trace" for a text that is neither, and so a path.

    >>> parse_compute_time("lognormal(1.0, 0.3)"), parse_compute_time("constant"), parse_compute_time("times.csv")
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


def parse_staleness_scale(declared: str) -> Callable[[int], float] | None:
    """The rate of an update by its staleness; None when the text means nothing.

    >>> parse_staleness_scale("inverse")(4), parse_staleness_scale("power(0.5)")(3), parse_staleness_scale("of")
    (0.25, 0.5, None)
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
                raise ValueError(f"{key} = {as_toml(text)} is not {unit}.")
            if key == "bandwidth":
                values[key] = number * {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}[found[2]] / (8 if found[3] == "b" else 1)
            else:
                values[key] = number / {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}[found[2]]
        return cls(**values)


def as_toml(value: Any) -> str:
    """A value as a TOML file spells it."""
    return json.dumps(value, default=str, ensure_ascii=False)
