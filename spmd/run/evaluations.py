"""Evaluation and prediction with the states of a trainer: a program for each kind of batch, and how
data gets to it.
"""

import operator
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from spmd.base.tree import Tree, abstract
from spmd.data.batches import HostBatch, Placer, as_arrays, batch_signature, check_leaves, with_rows
from spmd.data.prefetch import allow_transfers
from spmd.data.retries import read_epoch
from spmd.data.sources import Source, as_source, bind_rows, is_arrays
from spmd.distributed import uneven_batches, watchdog
from spmd.errors import DataError, OptionError
from spmd.train.evaluation import EvaluationProgram, evaluation_program, measured
from spmd.train.model_setup import PlacedModel
from spmd.train.state import State, check_alive


def make_placer(placed: PlacedModel, rows: int, *, pad: bool, workers: int | None = None) -> Placer:
    """Return the placer that puts batches of at most `rows` rows on the mesh of a placed model.

    Args:
      pad: whether a short batch is padded.
      workers: among which rows are divided; None: the positions of the mesh.
    """
    resolved = placed.resolved
    return Placer(
        placed.mesh, resolved.batch_spec, resolved.data_axes, rows, pad=pad, workers=workers
    )


class Evaluations:
    """Evaluates states, and predicts with them.

    Its methods take the placed model, and the program that evaluates batches of training, if there
    is one yet: batches alike are evaluated by that one.
    """

    def __init__(self):
        # by the kind of batch
        self._programs: dict[Any, tuple[EvaluationProgram, Placer]] = {}

    def measure(
        self,
        placed: PlacedModel,
        trained: EvaluationProgram | None,
        state: State,
        stops: Callable[[int], bool],
        data: Any,
        *,
        batch_size: int | None,
        retries: int,
        draws: dict[str, Callable[[], Any]] | None,
    ) -> dict[str, float] | None:
        """Return the loss and metrics on all rows of `data`; see `Trainer.measure`."""
        source = _as_source(data, batch_size, trained)
        check_alive(state)
        program, placer = bind_rows(source, self._prepare(placed, trained, source.sample()))

        def stops_reading() -> bool:
            return bool(watchdog.current().stop_reason)

        host_batches = read_epoch(source, 0, retries=retries, stops=stops_reading)
        batches = map(placer, allow_transfers(host_batches))
        if source.threaded:
            batches = uneven_batches.require_equal_counts(batches, "the evaluation's data")
        with watchdog.current().in_phase("eval"):
            return measured(program, placer, state, batches, stops, draws)

    def names(
        self, placed: PlacedModel, trained: EvaluationProgram | None, data: Any
    ) -> tuple[str, ...]:
        """Return the names of the loss and metrics on arrays or records, which is traced."""
        sample = _as_source(data, None, trained).sample()
        program, _ = self._prepare(placed, trained, sample)
        return program.outputs.names

    def predict(
        self, placed: PlacedModel, trained: EvaluationProgram | None, state: State, inputs: Tree
    ) -> Tree:
        """Return the model's outputs for every row of `inputs`; see `Trainer.predict`."""
        check_alive(state)
        program = trained
        if program is None and self._programs:
            program, _ = next(reversed(self._programs.values()))
        if program is None:
            fix = (
                "trainer.prepare(batch) first, with arrays like a batch of training, or with their "
                "shapes."
            )
            raise OptionError(
                "predict() before the first batch: the batch size is not known.", fix=fix
            )
        inputs = as_arrays(inputs, "the inputs")
        rows = check_leaves(inputs, "the inputs")
        if rows == 0:
            raise DataError("the inputs are empty: 0 rows.", fix="at least one row.")
        data_axes = placed.resolved.data_axes
        placer = Placer(placed.mesh, lambda path: (data_axes,), data_axes, program.rows, pad=True)
        arrays = jax.tree.map(np.asarray, inputs)
        program.check_inputs(with_rows(abstract(arrays), program.rows))
        outputs = []
        for first in range(0, rows, program.rows):
            index = np.arange(first, min(first + program.rows, rows))
            with placer.allow_row_transfers():
                batch = placer(HostBatch(arrays, len(index), index))
                padded = jax.device_get(program.predict(state, batch.leaves))
            without_padding = operator.itemgetter(slice(len(index)))
            outputs.append(jax.tree.map(without_padding, padded))
        return jax.tree.map(lambda *parts: np.concatenate(parts), *outputs)

    def _prepare(
        self, placed: PlacedModel, trained: EvaluationProgram | None, sample: Tree
    ) -> tuple[EvaluationProgram, Placer]:
        """Return the functions for batches like `sample`; they fix nothing about the batches that
        are trained on.
        """
        kind = batch_signature(sample)
        if kind not in self._programs:
            program = evaluation_program(placed, sample, trained)
            placer = make_placer(placed, program.rows, pad=program.outputs.pads)
            self._programs[kind] = program, placer
        return self._programs[kind]


def _as_source(data: Any, batch_size: int | None, trained: EvaluationProgram | None) -> Source:
    """Return the batches of data to evaluate, of as many rows as those of training."""
    if not is_arrays(data):
        return as_source(data, batch_size=batch_size, shuffle=None, seed=0, short_ok=True)
    if batch_size is None and trained is not None:
        batch_size = trained.rows
    return as_source(data, batch_size=batch_size, shuffle=False, seed=0, short_ok=True)
