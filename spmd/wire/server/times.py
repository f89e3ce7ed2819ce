"""The simulated clock: how long each gradient takes. Only the time is simulated; the updates are
real.
"""

import csv
from pathlib import Path

import numpy as np

from spmd.base.user_paths import as_path
from spmd.errors import OptionError
from spmd.wire.server.timing import parse_compute_time

BLOCK = 1024  # times drawn in one call for a worker


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
