"""Metrics of every step: the newest steps individually, older ones as means, all of them in a file
in the run's folder.
"""

import collections
import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from spmd.errors import CheckpointError, OptionError
from spmd.output_files import OutputFile, read_bytes, write_at
from spmd.render.sparkline import panel, spark
from spmd.train.metrics import means
from spmd.user_paths import as_path, run_file, wrap_os_errors

DETAIL = 100_000  # newest steps that are kept individually
BLOCK = 1000  # steps that are written, and averaged, together
WINDOWS = 1024  # means of older steps; at this number, neighbours are merged
FILE = "history.bin"


class History:
    """Metrics of every step and every evaluation of this call.

    `history["loss"]` is one float per step; `history["eval_loss"]` one per completed evaluation;
    `history.unfinished` lists the steps of evaluations that a signal ended. `rows()` yields the
    same as dicts. A run of more than 100,000 steps keeps the newest 100,000 individually. Earlier
    ones come first, as means over windows of 1,000 steps or more: such a row has the last step of
    its window as "step" and the number of steps as "steps". With `fit(checkpoint=folder)` the
    folder has every step: `History.read(folder)`.

    Args:
      names: of the metrics of a step, in the order in which they are added.
      constants: from the number of a step to metrics that are known without the devices.

    Example:
      >>> history = History(("loss",))
      >>> history.add_steps(1, np.array([[[6.0], [4.0]]]))
      >>> history["loss"]
      [1.5]
    """

    def __init__(
        self,
        names: tuple[str, ...],
        constants: Callable[[int], dict[str, float]] = lambda before: {},
    ):
        # constants(n): values that step n + 1 has without measuring
        self._names, self._constants = names, constants
        self._known: dict[str, float] | None = None  # constants of the newest step
        self._detail = DETAIL
        # last step, number of steps, sums and counts, sums of constants
        self._windows: list[tuple[int, int, np.ndarray, np.ndarray]] = []
        # blocks of rows; the last one may not be full
        self._blocks: collections.deque[np.ndarray] = collections.deque()
        self._filled, self._length, self._file = BLOCK, 0, None
        self.evaluations: list[dict[str, Any]] = []
        # steps of evaluations that a signal ended; `evaluations` does not have them
        self.unfinished: list[int] = []

    def add_steps(self, first: int, packed: np.ndarray) -> None:
        """Add steps `first`, `first + 1`, ... as float32[steps, 2, names], sums and counts; the
        array is copied.
        """
        at, values = 0, []
        while at < len(packed):
            if self._filled == BLOCK:
                self._begin_block(self._constants(first - 1 + at))
            count = min(BLOCK - self._filled, len(packed) - at)
            rows = self._blocks[-1][self._filled : self._filled + count]
            rows["step"], rows["packed"] = (
                range(first + at, first + at + count),
                packed[at : at + count],
            )
            for number in range(first - 1 + at, first - 1 + at + count):
                self._known = self._constants(number)
                values.append(tuple(self._known.values()))
            rows["known"] = values[at:]
            at, self._filled, self._length = at + count, self._filled + count, self._length + count

    def _begin_block(self, known: dict[str, float]) -> None:
        self.flush()
        self._blocks.append(np.zeros(BLOCK, _row(len(self._names), len(known))))
        self._filled = 0
        if len(self._blocks) > -(-self._detail // BLOCK) + 1:
            self._average(self._blocks.popleft())

    def _average(self, block: np.ndarray) -> None:
        """Reduce a block to sums, in float64, so that means are exact to rounding however long the
        run is.
        """
        sums, known = block["packed"].sum(0, dtype=np.float64), block["known"].sum(0)
        self._windows.append((int(block["step"][-1]), len(block), sums, known))
        if len(self._windows) == WINDOWS:
            pairs = zip(self._windows[::2], self._windows[1::2], strict=True)
            self._windows = [
                (late[0], early[1] + late[1], early[2] + late[2], early[3] + late[3])
                for early, late in pairs
            ]

    def write_to(self, folder: Path, after: int) -> None:
        """Write all steps to a file in the folder. Steps after `after` that the file has are from a
        lost attempt, and are dropped.
        """
        self._file = _File(run_file(folder, FILE), self._names, tuple(self.known()), after)

    def flush(self) -> None:
        """Write the steps that the file does not have yet."""
        if self._file is not None and self._blocks:
            self._file.write(self._blocks[-1][: self._filled])

    def close(self) -> None:
        """Write the remaining steps, and close the file."""
        if self._file is not None:
            self.flush()
            self._file.close()
            self._file = None

    @classmethod
    def read(cls, folder: str | Path) -> "History":
        """Every step of the run whose folder was `fit(checkpoint=...)`, over all calls that resumed
        it. Evaluations are only in `metrics.jsonl`.

        Raises:
          OptionError: the folder has no such file, or it is damaged.
        """
        names, constants, rows = _read(as_path(folder, "folder") / FILE)
        history = cls(names)
        history._known, history._length, history._filled = (
            dict.fromkeys(constants, 0.0),
            len(rows),
            BLOCK,
        )
        if len(rows):
            history._known = dict(zip(constants, rows["known"][-1].tolist(), strict=True))
            history._blocks.append(rows)
            history._filled = len(rows)
        return history

    def add_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Add the results of an evaluation after `step` updates."""
        self.evaluations.append({"step": step, **metrics})

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all metrics."""
        seen = dict.fromkeys(name for row in self.evaluations for name in row if name != "step")
        return (*self._names, *self.known(), *seen)

    def __getstate__(self) -> dict[str, Any]:
        """For pickling: without the file and without anything that needs devices."""
        return {**vars(self), "_file": None, "_known": self.known(), "_constants": {}.__getitem__}

    def known(self) -> dict[str, float]:
        """Values of the newest step that need no measuring."""
        return self._constants(0) if self._known is None else self._known

    def _parts(self) -> Iterator[np.ndarray]:
        """Rows of the newest steps, block by block."""
        for number, block in enumerate(self._blocks, 1):
            yield block[: self._filled] if number == len(self._blocks) else block

    def rows(self) -> Iterator[dict[str, Any]]:
        """One dict per step: its number and its metrics. In a long run those of windows, which also
        have "steps", come first.
        """
        known = tuple(self.known())
        for step, steps, (sums, counts), values in self._windows:
            measured = zip(self._names, means(sums, counts).tolist(), strict=True)
            yield {
                "step": step,
                "steps": steps,
                **dict(measured),
                **dict(zip(known, (values / steps).tolist(), strict=True)),
            }
        for part in self._parts():
            for step, (sums, counts), values in part:
                measured = zip(self._names, means(sums, counts).tolist(), strict=True)
                yield {
                    "step": int(step),
                    **dict(measured),
                    **dict(zip(known, values.tolist(), strict=True)),
                }

    def __getitem__(self, name: str) -> list[float]:
        if name in self._names:
            column = self._names.index(name)
            old = [float(means(sums, counts)[column]) for _, _, (sums, counts), _ in self._windows]
            newest = (
                means(part["packed"][:, 0, column], part["packed"][:, 1, column])
                for part in self._parts()
            )
            return old + [value for part in newest for value in part.tolist()]
        if name in self.known():
            column = tuple(self.known()).index(name)
            old = [float(values[column] / steps) for _, steps, _, values in self._windows]
            return old + [
                value for part in self._parts() for value in part["known"][:, column].tolist()
            ]
        values = [row[name] for row in self.evaluations if name in row]
        if not values:
            raise KeyError(f'no metric "{name}"; there are {", ".join(self.names)}')
        return values

    def curves(self) -> dict[str, dict[int, float]]:
        """Values of each metric by the step, at those where it was counted: limits, say, are of
        steps alone whose update was skipped.
        """
        old = np.array([packed for _, _, packed, _ in self._windows]).reshape(
            len(self._windows), 2, len(self._names)
        )
        steps = np.array(
            [step for step, *_ in self._windows]
            + [step for part in self._parts() for step in part["step"].tolist()],
            int,
        )
        sums, counts = np.concatenate([old, *(part["packed"] for part in self._parts())]).swapaxes(
            0, 1
        )
        found = {}
        for column, name in enumerate(self._names):
            counted = counts[:, column] != 0
            values = means(sums[counted, column], counts[counted, column])
            found[name] = dict(zip(steps[counted].tolist(), values.tolist(), strict=True))
        return {name: values for name, values in found.items() if values}

    def _repr_html_(self) -> str:
        """A small chart for each metric, for a notebook."""
        trained, evaluated = (
            self.curves(),
            dict.fromkeys(name for row in self.evaluations for name in row if name != "step"),
        )

        def points(name: str) -> dict[int, float]:
            return {row["step"]: row[name] for row in self.evaluations if name in row}

        names = dict.fromkeys([*trained, *(name.removeprefix("eval_") for name in evaluated)])
        panels = [panel(name, trained.get(name, {}), points(f"eval_{name}")) for name in names]
        return f"<div>{''.join(panels)}</div>"

    def __repr__(self) -> str:
        curves = "  ".join(
            f"{name} {spark([*values.values()])} {[*values.values()][-1]:.4g}"
            for name, values in self.curves().items()
        )
        ended = f" ({len(self.unfinished)} more not completed)" if self.unfinished else ""
        return (
            f"History of {len(self)} steps and {len(self.evaluations)} evaluations{ended}  {curves}"
        ).rstrip()

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def __len__(self) -> int:
        return self._length


def _row(names: int, known: int) -> np.dtype:
    """One step, in memory and in the file."""
    return np.dtype([("step", "<i8"), ("packed", "<f4", (2, names)), ("known", "<f8", (known,))])


class _File:
    """A line of JSON with the names, then rows in the order of steps. Other names start another
    file.
    """

    def __init__(self, path: Path, names: tuple[str, ...], known: tuple[str, ...], after: int):
        header = json.dumps({"names": names, "known": known}).encode() + b"\n"
        keep, self._newest = 0, after
        if path.exists():
            with contextlib.suppress(OptionError):
                *stored, rows = _read(path)
                if stored == [names, known]:
                    keep = len(header) + rows.itemsize * int(
                        np.searchsorted(rows["step"], after, "right")
                    )
            if not keep and after:
                path.rename(path.with_name(f"history-before-{after + 1}.bin"))
        self._path, self._end = path, keep
        with wrap_os_errors(path, CheckpointError):
            self._stream = OutputFile(path, "r+b" if keep else "wb")
            self._stream.truncate(keep)
        if not keep:
            self._append(header)

    def write(self, rows: np.ndarray) -> None:
        """Append the rows that are newer than the file."""
        rows = rows[np.searchsorted(rows["step"], self._newest, "right") :]
        if len(rows):
            self._append(rows.tobytes())
            self._newest = int(rows["step"][-1])

    def _append(self, content: bytes) -> None:
        """Append bytes; after an error the next ones replace what was written of these.

        Raises:
          CheckpointError: they cannot all be written.
        """
        with wrap_os_errors(self._path, CheckpointError):
            write_at(self._stream.fileno(), content, self._end, self._path)
        self._end += len(content)

    def close(self) -> None:
        """Close the file."""
        with wrap_os_errors(self._path, CheckpointError):
            self._stream.close()


def _read(path: Path) -> tuple[tuple[str, ...], tuple[str, ...], np.ndarray]:
    """Names of metrics, names of constants, and rows; an incomplete last row is left out.

    Raises:
      OptionError: there is no such file, or it is damaged.
    """
    if not path.is_file():
        raise OptionError(
            f"there is no file {path}.", fix="give the folder of a run: fit(checkpoint=folder)."
        )
    content = read_bytes(path)
    line, _, rest = content.partition(b"\n")
    try:
        header = json.loads(line)
        names, known = tuple(map(str, header["names"])), tuple(map(str, header["known"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        fix = "read metrics.jsonl in the same folder."
        raise OptionError(
            f"{path} is damaged: it does not begin with names of metrics.", fix=fix
        ) from None
    row = _row(len(names), len(known))
    rows = np.frombuffer(rest[: len(rest) // row.itemsize * row.itemsize], row)
    if (rows["step"][1:] <= rows["step"][:-1]).any():
        raise OptionError(
            f"{path} is damaged: its steps do not rise from row to row.",
            fix="read metrics.jsonl in the same folder.",
        )
    return names, known, rows
