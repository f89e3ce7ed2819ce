"""Notes on weights and masks of a batch that neither the loss nor a metric reads."""

import re
from collections.abc import Callable
from typing import Any

import jax

from spmd.base.tree import Tree, describe, flatten
from spmd.errors import SpmdError, join_names
from spmd.jaxpr.programs import read_inputs
from spmd.train.model_setup import PlacedModel

NAMES = re.compile("weight|mask", re.IGNORECASE)


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
