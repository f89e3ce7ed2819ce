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

from spmd.base.output_files import OutputFile, read_bytes, write_at
from spmd.base.user_paths import as_path, run_file, wrap_os_errors
from spmd.errors import CheckpointError, OptionError
from spmd.render.sparkline import panel, spark
from spmd.train.metrics import means

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
        self._names = names
        # constants(n): values that step n + 1 has without measuring.
        self._constants = constants
        self._newest_constants: dict[str, float] | None = None
        self._detail = DETAIL
        # Last step, number of steps, sums and counts, sums of constants.
        self._windows: list[tuple[int, int, np.ndarray, np.ndarray]] = []
        # Blocks of rows; the last one may not be full.
        self._blocks: collections.deque[np.ndarray] = collections.deque()
        self._filled = BLOCK  # rows of the last block
        self._length = 0
        self._file: _File | None = None
        self.evaluations: list[dict[str, Any]] = []
        # Steps of evaluations that a signal ended; `evaluations` does not have them.
        self.unfinished: list[int] = []

    def add_steps(self, first: int, packed: np.ndarray) -> None:
        """Add steps `first`, `first + 1`, ... as float32[steps, 2, names], sums and counts; the
        array is copied.
        """
        offset = 0
        while offset < len(packed):
            step = first + offset
            if self._filled == BLOCK:
                self._begin_block(self._constants(step - 1))
            count = min(BLOCK - self._filled, len(packed) - offset)
            rows = self._blocks[-1][self._filled : self._filled + count]
            rows["step"] = range(step, step + count)
            rows["packed"] = packed[offset : offset + count]
            values = []
            for number in range(step - 1, step - 1 + count):
                self._newest_constants = self._constants(number)
                values.append(tuple(self._newest_constants.values()))
            rows["known"] = values
            offset += count
            self._filled += count
            self._length += count

    def _begin_block(self, constants: dict[str, float]) -> None:
        self.flush()
        self._blocks.append(np.zeros(BLOCK, _row_type(len(self._names), len(constants))))
        self._filled = 0
        if len(self._blocks) > -(-self._detail // BLOCK) + 1:
            self._average(self._blocks.popleft())

    def _average(self, block: np.ndarray) -> None:
        """Reduce a block to sums, in float64, so that means are exact to rounding however long the
        run is.
        """
        sums = block["packed"].sum(0, dtype=np.float64)
        constant_sums = block["known"].sum(0)
        self._windows.append((int(block["step"][-1]), len(block), sums, constant_sums))
        if len(self._windows) == WINDOWS:
            merged = []
            for early, late in zip(self._windows[::2], self._windows[1::2], strict=True):
                _, early_steps, early_sums, early_constants = early
                step, late_steps, late_sums, late_constants = late
                merged.append(
                    (
                        step,
                        early_steps + late_steps,
                        early_sums + late_sums,
                        early_constants + late_constants,
                    )
                )
            self._windows = merged

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
        """Return every step of the run whose folder was `fit(checkpoint=...)`, over all calls that
        resumed it. Evaluations are only in `metrics.jsonl`.

        Raises:
          OptionError: the folder has no such file, or it is damaged.
        """
        names, constant_names, rows = _read_rows(as_path(folder, "folder") / FILE)
        history = cls(names)
        history._newest_constants = dict.fromkeys(constant_names, 0.0)
        history._length = len(rows)
        if len(rows):
            newest = rows["known"][-1].tolist()
            history._newest_constants = dict(zip(constant_names, newest, strict=True))
            history._blocks.append(rows)
            history._filled = len(rows)
        return history

    def add_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Add the results of an evaluation after `step` updates."""
        self.evaluations.append({"step": step, **metrics})

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all metrics."""
        return (*self._names, *self.known(), *self._evaluated_names())

    def _evaluated_names(self) -> list[str]:
        """Return the names of the metrics of evaluations, in the order of their first results."""
        names = dict[str, None]()
        for row in self.evaluations:
            names |= dict.fromkeys(row)
        return [name for name in names if name != "step"]

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled: without the file and without anything that needs devices."""
        return {
            **vars(self),
            "_file": None,
            "_newest_constants": self.known(),
            # It is not called: the constants of the newest step are there.
            "_constants": {}.__getitem__,
        }

    def known(self) -> dict[str, float]:
        """Return the values of the newest step that need no measuring."""
        if self._newest_constants is None:
            return self._constants(0)
        return self._newest_constants

    def _parts(self) -> Iterator[np.ndarray]:
        """Yield the rows of the newest steps, block by block."""
        for number, block in enumerate(self._blocks, 1):
            if number == len(self._blocks):
                block = block[: self._filled]
            yield block

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield one dict per step: its number and its metrics. In a long run those of windows,
        which also have "steps", come first.
        """
        constant_names = tuple(self.known())
        for step, steps, (sums, counts), values in self._windows:
            row: dict[str, Any] = {"step": step, "steps": steps}
            row |= zip(self._names, means(sums, counts).tolist(), strict=True)
            row |= zip(constant_names, (values / steps).tolist(), strict=True)
            yield row
        for part in self._parts():
            for step, (sums, counts), values in part:
                row = {"step": int(step)}
                row |= zip(self._names, means(sums, counts).tolist(), strict=True)
                row |= zip(constant_names, values.tolist(), strict=True)
                yield row

    def __getitem__(self, name: str) -> list[float]:
        if name in self._names:
            column = self._names.index(name)
            values = [
                float(means(sums, counts)[column]) for _, _, (sums, counts), _ in self._windows
            ]
            for part in self._parts():
                packed = part["packed"]
                values += means(packed[:, 0, column], packed[:, 1, column]).tolist()
            return values
        if name in self.known():
            column = tuple(self.known()).index(name)
            values = [float(sums[column] / steps) for _, steps, _, sums in self._windows]
            for part in self._parts():
                values += part["known"][:, column].tolist()
            return values
        values = [row[name] for row in self.evaluations if name in row]
        if not values:
            raise KeyError(f'no metric "{name}"; there are {", ".join(self.names)}')
        return values

    def curves(self) -> dict[str, dict[int, float]]:
        """Return the values of each metric by the step, at those where it was counted: limits, say,
        are of steps alone whose update was skipped.
        """
        windows = np.array([packed for _, _, packed, _ in self._windows])
        packed = [windows.reshape(len(self._windows), 2, len(self._names))]
        step_list = [step for step, *_ in self._windows]
        for part in self._parts():
            packed.append(part["packed"])
            step_list += part["step"].tolist()
        steps = np.array(step_list, int)
        sums, counts = np.concatenate(packed).swapaxes(0, 1)
        curves = {}
        for column, name in enumerate(self._names):
            counted = counts[:, column] != 0
            values = means(sums[counted, column], counts[counted, column])
            if counted.any():
                curves[name] = dict(zip(steps[counted].tolist(), values.tolist(), strict=True))
        return curves

    def _repr_html_(self) -> str:
        """Return a small chart for each metric, for a notebook."""
        trained = self.curves()
        evaluated = [name.removeprefix("eval_") for name in self._evaluated_names()]

        def points(name: str) -> dict[int, float]:
            return {row["step"]: row[name] for row in self.evaluations if name in row}

        names = dict.fromkeys([*trained, *evaluated])
        panels = [panel(name, trained.get(name, {}), points(f"eval_{name}")) for name in names]
        return f"<div>{''.join(panels)}</div>"

    def __repr__(self) -> str:
        text = f"History of {len(self)} steps and {len(self.evaluations)} evaluations"
        if self.unfinished:
            text += f" ({len(self.unfinished)} more not completed)"
        for name, curve in self.curves().items():
            values = [*curve.values()]
            text += f"  {name} {spark(values)} {values[-1]:.4g}"
        return text

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def __len__(self) -> int:
        return self._length


def _row_type(names: int, constants: int) -> np.dtype:
    """Return the type of one step, in memory and in the file."""
    return np.dtype(
        [("step", "<i8"), ("packed", "<f4", (2, names)), ("known", "<f8", (constants,))]
    )


class _File:
    """A line of JSON with the names, then rows in the order of steps. Other names start another
    file.
    """

    def __init__(
        self, path: Path, names: tuple[str, ...], constant_names: tuple[str, ...], after: int
    ):
        header = json.dumps({"names": names, "known": constant_names}).encode() + b"\n"
        end = 0  # bytes of the file that stay
        if path.exists():
            with contextlib.suppress(OptionError):
                stored_names, stored_constants, rows = _read_rows(path)
                if (stored_names, stored_constants) == (names, constant_names):
                    count = int(np.searchsorted(rows["step"], after, "right"))
                    end = len(header) + rows.itemsize * count
            # Steps with other metrics stay in a file of another name.
            if not end and after:
                path.rename(path.with_name(f"history-before-{after + 1}.bin"))
        self._newest = after
        self._path = path
        self._end = end
        with wrap_os_errors(path, CheckpointError):
            self._stream = OutputFile(path, "r+b" if end else "wb")
            self._stream.truncate(end)
        if not end:
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
        # At a position of our own: a disk that is full for a moment takes only a part, after which
        # the file's own position is wrong.
        with wrap_os_errors(self._path, CheckpointError):
            write_at(self._stream.fileno(), content, self._end, self._path)
        self._end += len(content)

    def close(self) -> None:
        """Close the file."""
        with wrap_os_errors(self._path, CheckpointError):
            self._stream.close()


def _read_rows(path: Path) -> tuple[tuple[str, ...], tuple[str, ...], np.ndarray]:
    """Return names of metrics, names of constants, and rows; an incomplete last row is left out.

    Raises:
      OptionError: there is no such file, or it is damaged.
    """
    if not path.is_file():
        raise OptionError(
            f"there is no file {path}.", fix="give the folder of a run: fit(checkpoint=folder)."
        )
    content = read_bytes(path)
    line, _, data = content.partition(b"\n")
    try:
        header = json.loads(line)
        names = tuple(map(str, header["names"]))
        constant_names = tuple(map(str, header["known"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        fix = "read metrics.jsonl in the same folder."
        raise OptionError(
            f"{path} is damaged: it does not begin with names of metrics.", fix=fix
        ) from None
    row_type = _row_type(len(names), len(constant_names))
    # A killed process, or a full disk, may leave a part of a row.
    complete = len(data) - len(data) % row_type.itemsize
    rows = np.frombuffer(data[:complete], row_type)
    if (rows["step"][1:] <= rows["step"][:-1]).any():
        raise OptionError(
            f"{path} is damaged: its steps do not rise from row to row.",
            fix="read metrics.jsonl in the same folder.",
        )
    return names, constant_names, rows
