"""Evaluation: the program, which is that of training where batches are alike, and the sums over
batches.
"""

import collections
import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from spmd.base.tree import Tree, flatten
from spmd.data.batches import Batch, Placer, batch_differences, batch_signature
from spmd.errors import DataError, LossError, join_names, problems_text
from spmd.train.compiled_step import Program
from spmd.train.metrics import IN_FLIGHT
from spmd.train.model_setup import PlacedModel
from spmd.train.state import State


@contextlib.contextmanager
def naming_differences(sample: Tree, trained: Tree) -> Iterator[None]:
    """Around a trace of evaluation: where it fails on batches like `sample`, what differs from
    those that are trained on is raised.
    """
    try:
        yield
    except LossError as error:
        problems = [] if trained is None else batch_differences(sample, trained)
        if not problems:
            raise
        text = problems_text(f"the data to evaluate does not fit: {error.summary}", problems)
        raise DataError(
            text,
            fix="batches like those for training, but for the number of rows.",
            problems=problems,
        ) from error


def evaluation_program(placed: PlacedModel, sample: Tree, trained: Program | None) -> Program:
    """The program for evaluation batches like `sample`, traced; `trained` is that of training, if
    there is one.

    Raises:
      DataError: the loss or a metric fails on such batches, and they differ from those that are
        trained on.
    """
    with naming_differences(sample, placed.sample):
        program = (
            trained
            if trained is not None and batch_signature(trained.sample) == batch_signature(sample)
            else Program(placed, sample, trains=False)
        )
        names = program.evaluation.names
    there, wanted = flatten(sample), {} if trained is None else flatten(trained.sample)
    lost = (
        [name for name in trained.evaluation.names if name not in names]
        if trained is not None and list(there) != list(wanted)
        else []
    )
    if lost:
        text = (
            "evaluation does not measure %s: the loss returns it for batches of %s, and the data "
            "to evaluate has %s."
        )
        logging.getLogger("spmd").warning(
            text, ", ".join(lost), join_names(wanted), join_names(there)
        )
    return program


class Totals:
    """Sums and counts over the batches of an evaluation, and the batch in which each metric stopped
    being finite.

    Example:
      >>> totals = Totals(
      ...     ("loss",), lambda total, batches: {"loss": float(total[0, 0] / total[1, 0])}
      ... )
      >>> totals.add(np.array([[6.0], [4.0]]), 4)
      >>> totals.means()
      {'loss': 1.5}
    """

    def __init__(
        self,
        columns: tuple[str, ...],
        finish: Callable[[np.ndarray, int], dict[str, float]],
        undefined: Mapping[str, str] = {},
    ):
        self._names, self._finish, self._undefined, self.total = (
            columns,
            finish,
            undefined,
            np.zeros((2, len(columns))),
        )
        self._batches, self._rows = 0, 0
        self._broken: dict[str, str] = {}  # metric -> where its sum was not finite first, in words

    def add(self, packed: jax.Array | np.ndarray, rows: int) -> None:
        """One batch more: float[2, columns] on the host or on devices, of `rows` rows."""
        found = jax.device_get(packed)
        self._batches += 1
        for name, value in zip(self._names, found[0].tolist(), strict=True):
            if not math.isfinite(value):
                self._broken.setdefault(
                    name,
                    f"batch {self._batches}, rows {self._rows} to {self._rows + rows - 1} of the "
                    "evaluation",
                )
        self._rows += rows
        self.total += found

    def means(self) -> dict[str, float]:
        """Loss and metrics over all rows; a warning names those that are not finite, and the first
        batch at fault.
        """
        found = self._finish(self.total, self._batches)
        lines = [
            f'"{name}" is {found[name]}, first in {where}' for name, where in self._broken.items()
        ]
        empty = dict.fromkeys(
            name for name, count in zip(self._names, self.total[1], strict=True) if count == 0
        )
        empty |= dict.fromkeys(
            name for name, value in found.items() if math.isnan(value) and name not in self._broken
        )
        lines += [
            f'"{name}": {self._undefined[name]}'
            if name in self._undefined
            else f'"{name}" counted nothing'
            for name in empty
        ]
        if lines:
            logging.getLogger("spmd").warning("the evaluation is not finite: %s.", "; ".join(lines))
        return found


def measured(
    program: Program,
    placer: Placer,
    state: State,
    batches: Iterable[Batch],
    stops: Callable[[int], bool],
    draws: dict[str, Callable[[], Any]] | None = None,
) -> dict[str, float] | None:
    """Means over all rows of all batches; None where `stops`, asked before each batch by its number
    from 1, has ended it. `draws` is filled with functions that draw metrics, by name.
    """
    totals, stopped = (
        Totals(program.evaluation.columns, program.evaluation.finish, program.evaluation.undefined),
        False,
    )
    pending: collections.deque[tuple[jax.Array, int]] = collections.deque()
    for number, batch in enumerate(batches, 1):
        if stopped := stops(number):
            break
        with placer.allow_row_transfers():
            pending.append((program.evaluate(state, batch.leaves, batch.weights), batch.rows))
        if len(pending) >= IN_FLIGHT:
            totals.add(*pending.popleft())
    for packed, count in pending:
        totals.add(packed, count)
    if stopped:
        return None
    if draws is not None:
        draws.update(program.evaluation.drawings(totals.total))
    return totals.means()
