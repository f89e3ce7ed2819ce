"""Evaluation and prediction: the compiled functions, made from the trace of training where batches
are alike, and the sums over batches.
"""

import collections
import contextlib
import dataclasses
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from spmd.base.tree import Tree, abstract, describe, flatten
from spmd.data.batches import Batch, Placer, batch_differences, batch_signature
from spmd.errors import (
    DataError,
    LossError,
    SpmdError,
    first_line,
    join_names,
    problems_text,
)
from spmd.models.base import Call, Variables
from spmd.nn.gathered_blocks import GatheredBlocks
from spmd.nn.parallel_context import parallel_scope
from spmd.nn.written_loops import rewritten
from spmd.sync.gradient_sync import GradientSync
from spmd.sync.layer_gather import LayerGather
from spmd.sync.parameter_sync import gather_params
from spmd.train.accumulate import choose_gathering
from spmd.train.activations import Activations
from spmd.train.compiled_functions import CompiledFunctions, FunctionKey
from spmd.train.eval_outputs import EvalOutputs
from spmd.train.loss_trace import TracedLoss, trace_loss
from spmd.train.metrics import IN_FLIGHT
from spmd.train.model_setup import PlacedModel
from spmd.train.objective import LEAKS
from spmd.train.precision import cast_variables, compute_dtype
from spmd.train.program_checks import LOSS_CHECKS, OUTPUT_CHECKS
from spmd.train.state import State


@contextlib.contextmanager
def naming_differences(sample: Tree, trained: Tree) -> Iterator[None]:
    """Around a trace of evaluation: where it fails on batches like `sample`, what differs from
    those that are trained on is raised.
    """
    try:
        yield
    except LossError as error:
        problems = []
        if trained is not None:
            problems = batch_differences(sample, trained)
        if not problems:
            raise
        text = problems_text(f"the data to evaluate does not fit: {error.summary}", problems)
        raise DataError(
            text,
            fix="batches like those for training, but for the number of rows.",
            problems=problems,
        ) from error


class EvaluationProgram:
    """The compiled functions with which a placed model is evaluated on batches of one shape, and
    predicts.

    Attributes:
      sample: the shapes of a full batch of `rows` rows.
      outputs: the loss and metrics.
      functions: the compiled functions; those of training too, where batches are alike.
    """

    def __init__(self, loss: TracedLoss, sync: GradientSync, functions: CompiledFunctions):
        placed = loss.placed
        self.sample = loss.sample
        self.rows = loss.rows
        self.outputs = EvalOutputs(placed, placed.objective, loss.sample, loss.rows)
        self.functions = functions
        functions.builders |= {"evaluate": self._jit_evaluate, "predict": self._jit_predict}
        self._placed = placed
        self._sync = sync
        self._dtype = compute_dtype(placed.config.precision)
        gather = None
        if sync.layerwise:
            gather = LayerGather(sync, manual=False)
        self._parallel = dataclasses.replace(loss.parallel, gather_layer=gather)
        # signatures of inputs that the model was traced on
        self._traced_inputs: set[Any] = set()

    @LEAKS
    def evaluate(self, state: State, batch: Tree, weights: jax.Array) -> jax.Array:
        """Return sums and counts of loss and metrics in evaluation mode, float32[2, columns]."""
        key = FunctionKey("evaluate")
        return self.functions.dispatch(key, state.variables, batch, weights)

    @LEAKS
    def predict(self, state: State, inputs: Tree) -> Tree:
        """Return the model's outputs in evaluation mode, replicated over all devices."""
        return self.functions.dispatch(FunctionKey("predict"), state.variables, inputs)

    def sum_batch(self, variables: Variables, batch: Tree, weights: jax.Array) -> jax.Array:
        """Return the sums of `evaluate`, computed inside another trace."""
        return self.outputs.sums(self._forward, variables, batch, weights)

    def check_inputs(self, inputs: Tree) -> None:
        """Trace the model on inputs of these shapes.

        Raises:
          DataError: it fails on them.
        """
        kind = batch_signature(inputs)
        if kind in self._traced_inputs:
            return
        try:
            self._trace_inputs(inputs)
        except SpmdError:
            raise
        except Exception as error:
            fix = (
                "what the loss calls the model with; the batches that it was trained on hold "
                f"{_describe_leaves(self._placed.spec.sample)}"
            )
            entry = self._entry_for_model(inputs)
            if entry is not None:
                fix = f"predict(batch[{entry!r}]), which the model takes"
            why = (
                "predict calls the model with its argument as it is, and the model fails on "
                f"{_describe_leaves(inputs)}: {first_line(error)}"
            )
            raise DataError(why, fix=f"{fix}.") from error
        self._traced_inputs.add(kind)

    def _trace_inputs(self, inputs: Tree) -> None:
        variables = abstract(self._placed.abstract_state).variables
        with LEAKS:
            jax.eval_shape(self._predict, variables, inputs)

    def _entry_for_model(self, inputs: Tree) -> Any:
        """Return the name of an entry of a dict of inputs that the model takes; None without."""
        if not isinstance(inputs, Mapping):
            return None
        for name, entry in inputs.items():
            # whatever the model raises on another entry
            with contextlib.suppress(Exception):
                self._trace_inputs(entry)
                return name
        return None

    def _jit_evaluate(self, key: FunctionKey) -> Callable:
        del key

        def _evaluate(variables: Variables, batch: Tree, weights: jax.Array) -> jax.Array:
            return self.sum_batch(variables, batch, weights)

        return self.functions.jit(_evaluate, out_shardings=self._replicated)

    def _jit_predict(self, key: FunctionKey) -> Callable:
        del key
        return self.functions.jit(self._predict, out_shardings=self._replicated)

    @property
    def _replicated(self) -> NamedSharding:
        return NamedSharding(self._placed.mesh, PartitionSpec())

    def _forward(self, variables: Variables, batch: Tree, key: Any) -> tuple:
        def forward(variables: Variables) -> tuple:
            return self._placed.objective(self._bind_model(variables), batch, key)

        with parallel_scope(self._parallel):
            return rewritten(forward)(variables)

    def _predict(self, variables: Variables, inputs: Tree) -> Tree:
        def forward(variables: Variables) -> Tree:
            return self._bind_model(variables)(inputs)

        with parallel_scope(self._parallel):
            return rewritten(forward)(variables)

    def _bind_model(self, variables: Variables) -> Any:
        params = gather_params(self._sync, variables.params, outside=True)
        frozen = gather_params(self._sync, variables.frozen, outside=True)
        variables = dataclasses.replace(variables, params=params, frozen=frozen)
        variables = cast_variables(variables, self._dtype)
        blocks = None
        if self._sync.blocks:
            gather = LayerGather(self._sync, manual=False, stacked=False)
            blocks = GatheredBlocks(gather, itertools.chain(*self._sync.blocks), {})
        call = Call(
            training=False,
            dtype=self._dtype,
            output_hook=Activations(self._placed.resolved, self._placed.mesh),
            products=self._placed.products,
            blocks=blocks,
        )
        return self._placed.model.bind(variables, call)


def _describe_leaves(tree: Tree) -> str:
    """Return the path and shape of each array of a batch."""
    leaves = flatten(tree).items()
    return ", ".join(f"{path} {describe(leaf)}".strip() for path, leaf in leaves)


def evaluation_program(
    placed: PlacedModel, sample: Tree, trained: EvaluationProgram | None
) -> EvaluationProgram:
    """Return the program for evaluation batches like `sample`, traced; `trained` is that for
    batches of training, if there is one.

    Raises:
      DataError: the loss or a metric fails on such batches, and they differ from those that are
        trained on.
    """
    with naming_differences(sample, placed.spec.sample):
        if trained is not None and batch_signature(trained.sample) == batch_signature(sample):
            program = trained
        else:
            program = _trace_evaluation(placed, sample)
        names = program.outputs.names
    if trained is None:
        return program
    arrays = flatten(sample)
    trained_arrays = flatten(trained.sample)
    if list(arrays) == list(trained_arrays):
        return program
    missing = [name for name in trained.outputs.names if name not in names]
    if missing:
        text = (
            "evaluation does not measure %s: the loss returns it for batches of %s, and the data "
            "to evaluate has %s."
        )
        logging.getLogger("spmd").warning(
            text, ", ".join(missing), join_names(trained_arrays), join_names(arrays)
        )
    return program


def _trace_evaluation(placed: PlacedModel, sample: Tree) -> EvaluationProgram:
    loss = trace_loss(placed, sample)
    for check in LOSS_CHECKS:
        check(loss)
    sync, _ = choose_gathering(loss)
    for check in OUTPUT_CHECKS:
        check(loss)
    functions = CompiledFunctions(placed, loss.rows, layerwise=bool(sync.layerwise))
    return EvaluationProgram(loss, sync, functions)


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
        self._names = columns
        self._finish = finish
        self._undefined = undefined
        # In float64: float32 holds whole numbers up to 2^24 only, and counts of rows may be larger.
        self.total = np.zeros((2, len(columns)))
        self._batches = 0
        self._rows = 0
        self._broken: dict[str, str] = {}  # metric -> where its sum was not finite first, in words

    def add(self, packed: jax.Array | np.ndarray, rows: int) -> None:
        """One batch more: float[2, columns] on the host or on devices, of `rows` rows."""
        sums_and_counts = jax.device_get(packed)
        self._batches += 1
        last = self._rows + rows - 1
        where = f"batch {self._batches}, rows {self._rows} to {last} of the evaluation"
        for name, value in zip(self._names, sums_and_counts[0].tolist(), strict=True):
            if not math.isfinite(value):
                self._broken.setdefault(name, where)
        self._rows += rows
        self.total += sums_and_counts

    def means(self) -> dict[str, float]:
        """Loss and metrics over all rows; a warning names those that are not finite, and the first
        batch at fault.
        """
        means = self._finish(self.total, self._batches)
        lines = [
            f'"{name}" is {means[name]}, first in {where}' for name, where in self._broken.items()
        ]
        counts = zip(self._names, self.total[1], strict=True)
        empty = {name: None for name, count in counts if count == 0}
        for name, value in means.items():
            if math.isnan(value) and name not in self._broken:
                empty[name] = None
        for name in empty:
            line = f'"{name}" counted nothing'
            if name in self._undefined:
                line = f'"{name}": {self._undefined[name]}'
            lines.append(line)
        if lines:
            logging.getLogger("spmd").warning("the evaluation is not finite: %s.", "; ".join(lines))
        return means


def measured(
    program: EvaluationProgram,
    placer: Placer,
    state: State,
    batches: Iterable[Batch],
    stops: Callable[[int], bool],
    draws: dict[str, Callable[[], Any]] | None = None,
) -> dict[str, float] | None:
    """Means over all rows of all batches; None where `stops`, asked before each batch by its number
    from 1, has ended it. `draws` is filled with functions that draw metrics, by name.
    """
    outputs = program.outputs
    totals = Totals(outputs.columns, outputs.finish, outputs.undefined)
    stopped = False
    pending: collections.deque[tuple[jax.Array, int]] = collections.deque()
    for number, batch in enumerate(batches, 1):
        if stopped := stops(number):
            break
        with placer.allow_row_transfers():
            pending.append((program.evaluate(state, batch.leaves, batch.weights), batch.rows))
        # Read after the next batches were dispatched, so that devices never wait for the host.
        if len(pending) >= IN_FLIGHT:
            totals.add(*pending.popleft())
    for packed, count in pending:
        totals.add(packed, count)
    if stopped:
        return None
    if draws is not None:
        draws.update(outputs.drawings(totals.total))
    return totals.means()
