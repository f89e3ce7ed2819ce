"""What was measured, step by step."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from spmd.run.sketch import panel, spark


class History:
    """Metrics of every step of this call, and of every evaluation.

    `history["loss"]` is one float per step; `history["eval_loss"]` one per evaluation. `rows()` gives the same as dicts.

    Example:
      >>> history = History(("loss",))
      >>> history.add_steps(1, np.array([[[6.0], [4.0]]]))
      >>> history["loss"]
      [1.5]
    """

    def __init__(self, names: tuple[str, ...], constants: Callable[[int], dict[str, float]] = lambda before: {}):
        self._names, self._constants = names, constants  # what is known of a step without measuring, by the updates before it
        self._steps: list[tuple[int, np.ndarray]] = []
        self.evaluations: list[dict[str, Any]] = []

    def add_steps(self, first: int, packed: np.ndarray) -> None:
        """Steps `first`, `first + 1`, ... as float32[steps, 2, names], sums over counts."""
        self._steps.append((first, packed))

    def add_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """The result of one evaluation after `step` updates."""
        self.evaluations.append({"step": step, **metrics})

    @property
    def names(self) -> tuple[str, ...]:
        """Everything that can be asked for."""
        seen = dict.fromkeys(name for row in self.evaluations for name in row if name != "step")
        return (*self._names, *self.known(), *seen)

    def __getstate__(self) -> dict[str, Any]:
        """To be sent to another process: what is known without measuring becomes a table, which needs no devices."""
        before = [first - 1 + offset for first, packed in self._steps for offset in range(len(packed))] or [0]
        return {**vars(self), "_constants": {step: self._constants(step) for step in before}.__getitem__}

    def known(self) -> dict[str, float]:
        """What is known of the newest step without measuring: of an old one it may have to be worked out again."""
        return self._constants(self._steps[-1][0] - 1 if self._steps else 0)

    def rows(self) -> Iterator[dict[str, Any]]:
        """One dict per step: its number and its metrics."""
        for first, packed in self._steps:
            for offset, (sums, counts) in enumerate(packed):
                step = first + offset
                yield {"step": step, **dict(zip(self._names, (sums / counts).tolist(), strict=True)), **self._constants(step - 1)}

    def __getitem__(self, name: str) -> list[float]:
        if name in self._names:
            column = self._names.index(name)
            return [float(row[0, column] / row[1, column]) for _, packed in self._steps for row in packed]
        if name in self.known():
            return [row[name] for row in self.rows()]
        found = [row[name] for row in self.evaluations if name in row]
        if not found:
            raise KeyError(f'no metric "{name}"; there are {", ".join(self.names)}')
        return found

    def _repr_html_(self) -> str:
        """A small panel for each metric, for a notebook."""
        rows, names = list(self.rows()), dict.fromkeys(name.removeprefix("eval_") for name in (*self._names, *self.names))
        trained = lambda name: {row["step"]: row[name] for row in rows if name in row}
        evaluated = lambda name: {row["step"]: row[f"eval_{name}"] for row in self.evaluations if f"eval_{name}" in row}
        drawn = (panel(name, trained(name), evaluated(name)) for name in names if name not in self.known())
        return f"<div>{''.join(drawn)}</div>"

    def __repr__(self) -> str:
        shown = "  ".join(f"{name} {spark(self[name])} {self[name][-1]:.4g}" for name in self._names if len(self))
        return f"History of {len(self)} steps and {len(self.evaluations)} evaluations  {shown}".rstrip()

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def __len__(self) -> int:
        return sum(len(packed) for _, packed in self._steps)
