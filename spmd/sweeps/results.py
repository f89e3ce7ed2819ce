"""The results of a sweep: each trial's values, score and curve, as a table, and the best of them as
results of their own.
"""

import csv
import dataclasses
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from spmd.api import Result
from spmd.base.ranking import rank
from spmd.base.user_paths import as_path, write_text
from spmd.errors import OptionError
from spmd.inference.ensemble import Ensemble
from spmd.render.html import aligned, framed, table
from spmd.render.sparkline import spark
from spmd.run.history import History
from spmd.sweeps.config import Trial


@dataclasses.dataclass(frozen=True)
class TrialResult:
    """The outcome of one trial.

    Attributes:
      trial: its number, values and seed.
      score: what trials are compared by; not finite where it diverged.
      metrics: of its newest evaluation; empty without data to evaluate.
      history: metrics of every step, and the evaluations.
      ended: "done", or "dropped" (others were better) or "diverged" (the loss was not finite, or
        too many updates in a row were skipped), with the step.
    """

    trial: Trial
    score: float
    metrics: dict[str, float]
    history: History
    ended: str
    _build: Callable[[], Result] | None

    @property
    def number(self) -> int:
        """Its number in the sweep."""
        return self.trial.number

    @property
    def values(self) -> dict[str, Any]:
        """Its hyper-parameters by name."""
        return dict(self.trial.values)

    def result(self) -> Result:
        """The trial as `spmd.fit` would have returned it: the model, and `evaluate` and `predict`.

        Raises:
          OptionError: its arrays were not kept.
        """
        if self._build is None:
            raise OptionError(
                f"the arrays of trial {self.number} were not kept: it is not among the best.",
                fix="sweep(keep=...).",
            )
        return self._build()


@dataclasses.dataclass(frozen=True)
class Sweep:
    """All trials of a sweep, in the order of their numbers, and the best ones first in `best`.

    Attributes:
      trials: what came of each.
      best: those whose arrays were kept, the best first.
      measure: what `score` is, and whether the smallest or the largest is the best.
      programs: how many programs of steps were compiled.
    """

    trials: Sequence[TrialResult]
    best: Sequence[TrialResult]
    measure: tuple[str, str]
    programs: int

    def ensemble(self, top: int | None = None, **options: Any) -> Ensemble:
        """The best trials, or the first `top` of them, as one that answers together; options are
        those of `spmd.Ensemble`.

        Raises:
          OptionError: so many were not kept.
        """
        count = top
        if count is None:
            count = len(self.best)
        is_integer = isinstance(count, int) and not isinstance(count, bool)
        if not is_integer or not 1 <= count <= len(self.best):
            raise OptionError(
                f"top={top!r}, and the arrays of {len(self.best)} trials were kept.",
                fix="fewer; or sweep(keep=...).",
            )
        members = {f"trial {tried.number}": tried.result() for tried in self.best[:count]}
        return Ensemble(members, **options)

    def rows(self) -> list[dict[str, Any]]:
        """The table, a dict for each trial, the best first; those that were dropped after those
        that were not.
        """
        score, mode = self.measure

        def order(tried: TrialResult) -> tuple:
            return (
                tried.ended != "done",
                -len(tried.history),
                *rank(tried.score, mode),
                tried.number,
            )

        return [
            {
                "trial": tried.number,
                **tried.values,
                score: tried.score,
                **tried.metrics,
                "steps": len(tried.history),
                "ended": tried.ended,
            }
            for tried in sorted(self.trials, key=order)
        ]

    def to_csv(self, path: str | Path | None = None) -> str:
        """The table as CSV, with a header; written to `path` too if it is given."""
        rows = self.rows()
        out = io.StringIO()
        # The csv module ends lines with \r\n by default.
        writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        if path is not None:
            write_text(as_path(path, "path"), out.getvalue())
        return out.getvalue()

    def __str__(self) -> str:
        cells = self._cells()
        lines = aligned(cells, right=True)
        if len(lines) > len(cells):  # wrapped: a narrow terminal does without the curves
            lines = aligned([row[:-1] for row in cells], right=True)
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head, *rows = self._cells()
        return framed(f'<div class="wide">{table(head, rows)}</div>')

    def _cells(self) -> list[list[str]]:
        curves = {tried.number: spark(tried.history["loss"]).ljust(16) for tried in self.trials}
        rows = self.rows()
        cells = [[*rows[0], "loss"]]
        for row in rows:
            cells.append([*map(_cell, row.values()), curves[row["trial"]]])
        return cells


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).replace("\n", "\\n")
