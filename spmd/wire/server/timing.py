"""The simulated clock of a parameter server: the words that declare how long things take and what
lateness is worth, and the seconds of each gradient. Only the time is simulated; the updates are
real.
"""

import csv
import dataclasses
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from spmd.base.fields import as_toml
from spmd.base.user_paths import as_path
from spmd.errors import OptionError, did_you_mean

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


SCALES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
PER_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
BLOCK = 1024  # times drawn in one call for a worker


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


# by key: what an error asks for, and the function that parses it
PARSERS = {
    "bandwidth": ("a number and bits or bytes per second", _parse_bandwidth),
    "latency": ("a number and a unit of time", _parse_latency),
}


class Times:
    """Seconds that each gradient of each worker takes.

    A worker's times depend only on the seed and its number, not on the number of workers.

    Example:
      >>> Times("lognormal(1.0, 0.3)", workers=4, seed=0).of(2, 0) == Times(
      ...     "lognormal(1.0, 0.3)", workers=8, seed=0
      ... ).of(2, 0)
      True
    """

    def __init__(self, declared: str | tuple[float, ...], workers: int, seed: int):
        self._kind, self._values = parse_compute_time(declared)
        self._seed = seed
        # by worker: the number of the block that was drawn last, and its times
        self._drawn: dict[int, tuple[int, np.ndarray]] = {}
        self._trace: np.ndarray | None = None
        if self._kind == "trace":
            self._trace = read_trace(str(declared), workers)
        if self._kind == "list" and len(self._values) != workers:
            raise OptionError(
                f"compute_time: {len(self._values)} numbers for {workers} workers.",
                fix="one number for each worker.",
            )

    @property
    def length(self) -> int | None:
        """Number of known gradients of each worker; None if unlimited."""
        if self._trace is None:
            return None
        return len(self._trace)

    def of(self, worker: int, number: int) -> float:
        """Seconds of this worker's gradient number `number`, from 0.

        Raises:
          OptionError: the trace ends before it.
        """
        if self._trace is not None:
            if number >= len(self._trace):
                raise OptionError(
                    f"compute_time: the trace has {len(self._trace)} rows, and worker {worker} "
                    f"begins its gradient {number + 1}.",
                    fix="a longer trace, or fewer steps.",
                )
            return float(self._trace[number, worker])
        if self._kind == "list":
            return self._values[worker]
        if self._kind == "constant":
            return self._values[0]
        # Each block has a key of its own, so a time can be drawn without those before it.
        block, index = divmod(number, BLOCK)
        if worker not in self._drawn or self._drawn[worker][0] != block:
            self._drawn[worker] = (block, self._draw(worker, block))
        _, seconds = self._drawn[worker]
        return float(seconds[index])

    def _draw(self, worker: int, block: int) -> np.ndarray:
        """Return the times of a block of a worker's gradients."""
        # Philox's key has 128 bits: the seed, the worker and the block
        key = np.array([self._seed, (int(worker) << 32) + block], np.uint64)
        rng = np.random.Generator(np.random.Philox(key=key))
        if self._kind == "lognormal":
            median, sigma = self._values
            return median * np.exp(rng.normal(0, sigma, BLOCK))
        return rng.exponential(self._values[0], BLOCK)


def read_trace(path: str, workers: int) -> np.ndarray:
    """Seconds [gradients, workers] from a .csv or .npy file.

    Raises:
      OptionError: no such file, not a table of numbers from 0, or not one column per worker.
    """
    path = str(as_path(path, "compute_time"))
    if not Path(path).is_file():
        raise OptionError(
            f'compute_time: "{path}" is not a distribution, and no such file exists.',
            fix="check the path.",
        )
    try:
        table = _load_table(path)
    except (ValueError, EOFError, OSError) as error:
        fix = "one row per gradient, one column of seconds per worker, and nothing else."
        raise OptionError(f"compute_time: {path} is not a table of numbers.", fix=fix) from error
    is_table = table.ndim == 2 and len(table) > 0 and table.shape[1] == workers
    if not is_table or not np.isfinite(table).all() or (table < 0).any():
        shape = " x ".join(map(str, table.shape))
        raise OptionError(
            f"compute_time: {path} is a table of {shape}; expected one column of seconds, from 0, "
            f"for each of {workers} workers.",
            fix="one row per gradient, one column per worker.",
        )
    return table


def _load_table(path: str) -> np.ndarray:
    if path.endswith(".npy"):
        return np.load(path, allow_pickle=False).astype(np.float64)
    with open(path, newline="", encoding="utf-8") as file:
        rows = [list(map(float, row)) for row in csv.reader(file) if row]
    # raises if rows are not of equal length
    return np.array(rows, np.float64)
