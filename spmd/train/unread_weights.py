"""Notes on weights and masks of a batch that neither the loss nor a metric reads."""

import re
from collections.abc import Callable
from typing import Any

import jax

from spmd.errors import SpmdError, join_names
from spmd.jaxpr.programs import read_inputs
from spmd.train.model_setup import PlacedModel
from spmd.tree import Tree, describe, flatten

NAMES = re.compile("weight|mask", re.IGNORECASE)


def unread_weight_notes(
    placed: PlacedModel, sample: Tree, jaxpr: Any, trace_all: Callable[[], Any]
) -> list[str]:
    """A note on the arrays of a batch that are named as weights or masks and have no effect; none
    if there are no such arrays.

    Args:
      jaxpr: of the loss in training, of (variables, batch, key).
      trace_all: gives the same of the loss with all metrics, those of evaluations too.
    """
    named = {
        path: leaf
        for path, leaf in flatten(sample).items()
        if NAMES.search(path.rpartition("/")[2])
    }
    variables = len(jax.tree.leaves(placed.abstract_state.variables))

    def unread(jaxpr: Any) -> dict[str, Any]:
        read = read_inputs(jaxpr)
        return {
            path: named[path]
            for path, at in zip(flatten(sample), jaxpr.invars[variables:], strict=False)
            if path in named and at not in read
        }

    found = unread(jaxpr) if named else {}
    if found and placed.config.metrics:
        try:
            found = unread(trace_all())
        except SpmdError:
            # a metric that needs what only the data of evaluations has: an evaluation raises it, if
            # there is one
            return []
    if not found:
        return []
    arrays = join_names(f'"{path}" ({describe(leaf)})' for path, leaf in found.items())
    return [
        f"note: neither the loss nor a metric reads {arrays} of the batch, so every row and token "
        "counts alike."
    ]
