"""Lines on what was decided for a placed model and its loss, and on weights and masks of a batch
that nothing reads, to be shown before the first step.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax

from spmd.base.tree import Tree, describe, flatten
from spmd.errors import SpmdError, join_names, option
from spmd.jaxpr.programs import read_inputs
from spmd.layout.compiler import compiler_notes
from spmd.layout.summary import notes as layout_notes
from spmd.nn.moe import microbatch_notes
from spmd.nn.schedule import Schedule
from spmd.sync.notes import notes as exchange_notes, server_notes
from spmd.train.activations import Seen
from spmd.train.batch_rows.reading import Reading
from spmd.train.host_memory import memory_notes
from spmd.train.loss_trace import TracedLoss, trace_objective
from spmd.train.matrix_owners import owner_notes
from spmd.train.model_setup import PlacedModel
from spmd.train.skipped_updates import inner_state, scale_notes
from spmd.train.state import replicated_moments

NAMES = re.compile("weight|mask", re.IGNORECASE)


def loss_notes(loss: TracedLoss, gather_notes: list[str]) -> list[str]:
    """Return lines on what was decided for a traced loss."""
    placed = loss.placed
    opt = placed.abstract_state.opt

    def trace_with_metrics() -> Any:
        called = Seen(placed.resolved)
        _, jaxpr = trace_objective(placed, placed.objective, loss.sample, loss.rows, called)
        return jaxpr.jaxpr

    return [
        *gather_notes,
        *loss.choices,
        *placed.products.notes(),
        *memory_notes(placed.resolved.layout, placed.platform),
        *scale_notes(opt),
        *owner_notes(placed.given_optimizer, loss.optimized, opt, placed.optimized, placed.mesh),
        *microbatch_notes(placed.parallel, loss.rows, placed.config.accumulate),
        *unread_weight_notes(placed, loss.sample, loss.jaxpr.jaxpr, trace_with_metrics),
    ]


def reading_notes(reading: Reading, loss: TracedLoss) -> list[str]:
    """Return lines on what workers share, and on modules that average over rows."""
    notes = []
    if not reading.mean:
        notes.append(reading.note())
    microbatches = loss.placed.config.accumulate
    if reading.averages and microbatches > 1:
        rows = (
            f"the {loss.rows // microbatches} rows of a microbatch, not over the {loss.rows} of "
            "the batch"
        )
        notes.append(
            f"note: a module such as BatchNorm averages over {rows}, as "
            f"{option('accumulate', microbatches)} asks for."
        )
    return notes


def trainer_notes(
    placed: PlacedModel, program_notes: list[str], schedules: Mapping[str, Schedule]
) -> list[str]:
    """Return lines on a placed model, and those on its program.

    Args:
      program_notes: lines on the program; [] before the first batch.
      schedules: of its pipelines, by stack.
    """
    lines = [
        *layout_notes(placed.resolved),
        *placed.given.notes(),
        *exchange_notes(placed.exchange),
        *compiler_notes(placed.resolved.layout.compiler, placed.platform),
        *program_notes,
    ]
    if placed.storage is not None and placed.events is not None:
        lines += server_notes(placed.storage, placed.events)
    for name, schedule in schedules.items():
        first_line, *_ = str(schedule).splitlines()
        lines.append(f"{name}: {first_line}.")
    return [*lines, *_moment_notes(placed)]


def _moment_notes(placed: PlacedModel) -> list[str]:
    """Return a line on the arrays of the optimizer that could not be sharded as others are."""
    opt = inner_state(placed.abstract_state.opt)
    state = dataclasses.replace(placed.abstract_state, opt=opt)
    unsharded = replicated_moments(state, placed.optimized)
    if not unsharded or all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(opt)):
        return []
    names = ", ".join(unsharded[:3])
    return [
        f"note: {len(unsharded)} optimizer arrays have no parameter's shape and stay "
        f"replicated: {names}, ..."
    ]


def unread_weight_notes(
    placed: PlacedModel, sample: Tree, jaxpr: Any, trace_all: Callable[[], Any]
) -> list[str]:
    """Return a note on the arrays of a batch that are named as weights or masks and have no effect;
    [] if there are no such arrays.

    Args:
      jaxpr: of the loss in training, of (variables, batch, key).
      trace_all: returns that of the loss with all metrics, those of evaluations too.
    """
    variables = len(jax.tree.leaves(placed.abstract_state.variables))
    unread = _unread_weights(sample, jaxpr, variables)
    if unread and placed.config.metrics:
        try:
            unread = _unread_weights(sample, trace_all(), variables)
        except SpmdError:
            # a metric that needs what only the data of evaluations has: an evaluation raises it, if
            # there is one
            return []
    if not unread:
        return []
    arrays = join_names(f'"{path}" ({describe(leaf)})' for path, leaf in unread.items())
    return [
        f"note: neither the loss nor a metric reads {arrays} of the batch, so every row and token "
        "counts alike."
    ]


def _unread_weights(sample: Tree, jaxpr: Any, variables: int) -> dict[str, Any]:
    """Return the arrays of a batch that are named as weights or masks, by path, and that a jaxpr
    does not read; its inputs are `variables` arrays, the batch, and others.
    """
    arrays = flatten(sample)
    if not any(map(_is_weight, arrays)):
        return {}
    read = read_inputs(jaxpr)
    unread = {}
    for (path, leaf), variable in zip(arrays.items(), jaxpr.invars[variables:], strict=False):
        if _is_weight(path) and variable not in read:
            unread[path] = leaf
    return unread


def _is_weight(path: str) -> bool:
    return NAMES.search(path.rpartition("/")[2]) is not None
