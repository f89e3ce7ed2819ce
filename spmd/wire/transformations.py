"""Gradient communication as optax transformations, for any loop under `jax.shard_map`.

A transformation takes each worker's own gradients (of the mean loss over its rows) and returns
their mean over the workers along some mesh axes. Its state is ordinary optimizer state, keyed by
parameter path; `specs` says how `jax.shard_map` splits it.
"""

from collections.abc import Mapping
from typing import Any

import optax
from jax.sharding import PartitionSpec

from spmd.errors import (
    OptionError,
    short_repr,
)
from spmd.wire.codec.base import Codec
from spmd.wire.codec.exact import EXACT, Exact
from spmd.wire.communication import check_codec, make_communication
from spmd.wire.region import (
    Axes,
    as_axes,
)


def all_reduce(
    axes: Axes,
    codec: Codec = EXACT,
    *,
    model_specs: Mapping[str, PartitionSpec] | None = None,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """The mean gradients, equal on every worker. Comes first in `optax.chain`; the rest of the loop
    stays as it is.

    Args:
      axes: mesh axes of the workers, outermost first.
      codec: what is sent. A gradient that it does not make smaller is sent exactly.
      model_specs: of gradients that are sharded over other mesh axes, which `jax.shard_map` leaves
        automatic (`axis_names`), by a pattern of parameter paths:
        `{"**/kernel": PartitionSpec(None, "model")}`; the first that matches counts. Each device
        then sends its local shard; without it, XLA's partitioner gathers a gradient that a codec
        encodes first.
      options: the names below.
      codecs: other codecs, by a pattern of parameter paths: `{"**/embedding": wire.exact()}`; the
        first that matches counts.
      error_feedback: keep what a codec lost, per worker, and add it to the next gradient.
      memory_dtype: "float32" or "bfloat16", of what is kept; the latter loses what it rounds.
      start_step: the number of updates that are exact before codecs are used.
      bucket_bytes: gradients are sent in buckets of at most this many bytes (as float32).

    Returns:
      An optax gradient transformation, whose state is a `WireState`.

    Raises:
      OptionError: an option is wrong, or a biased codec has no error feedback.
      CommunicationError: in `init` or `update`: an axis is not manual here, or the state is of
        another tree.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
      >>> from spmd import wire
      >>> mesh, params = jax.make_mesh((1,), ("data",)), {"w": jnp.ones(4)}
      >>> tx = optax.chain(wire.all_reduce("data"), optax.sgd(0.5))
      >>> state = wire.init(tx, params, mesh)
      >>> def step(params, state, grads):
      ...     updates, state = tx.update(grads, state, params)
      ...     return optax.apply_updates(params, updates), state
      >>> specs = (P(), wire.specs(state))
      >>> step = jax.shard_map(
      ...     step, mesh=mesh, in_specs=(*specs, P()), out_specs=specs, check_vma=False
      ... )
      >>> step(params, state, {"w": jnp.ones(4)})[0]["w"].tolist()
      [0.5, 0.5, 0.5, 0.5]
    """
    communication = make_communication(
        axes, codec, options, model_specs=model_specs, parameters=("codec", "model_specs")
    )
    return communication.transformation


def reduce_scatter(
    axes: Axes, codec: Codec = EXACT, **options: Any
) -> optax.GradientTransformationExtraArgs:
    """This worker's shards of the mean gradients; `all_gather` is the opposite. Options as for
    `all_reduce`.

    A gradient is sharded along its largest dim that the workers divide; one without such a dim is
    full on every worker. `zero1` is an optimizer that works on these shards.

    Args:
      axes: mesh axes of the workers, outermost first.
      codec: what is sent.
      options: as for `all_reduce`.

    Returns:
      An optax gradient transformation, whose updates are this worker's shards.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax.sharding import AbstractMesh
      >>> from spmd import wire
      >>> wire.bytes_sent(
      ...     wire.reduce_scatter("data"),
      ...     {"w": jnp.zeros((1024, 1024))},
      ...     AbstractMesh((8,), ("data",)),
      ... )
      3670016
    """
    return make_communication(axes, codec, options, scatter=True).transformation


def hierarchical(
    *, inside: tuple[Axes, Codec], across: tuple[Axes, Codec], scatter: bool = False, **options: Any
) -> optax.GradientTransformationExtraArgs:
    """The mean in two stages: exactly `inside` a host, where links are fast, then `across` hosts
    with a codec. Options as for `all_reduce`.

    Inside, each worker sums the elements that it owns for the full host, so that between hosts each
    sends only its part.

    Args:
      inside: axes, and `wire.exact()`: the codec's bound on errors is that of one encoding, so
        nothing is rounded here.
      across: axes, and a codec. They are the outer axes: the mesh's order is across, then inside.
      scatter: each worker gets its shard of the mean, as from `reduce_scatter`.
      options: as for `all_reduce`.

    Returns:
      An optax gradient transformation, whose state is a `WireState`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax.sharding import AbstractMesh
      >>> from spmd import wire
      >>> tx = wire.hierarchical(inside=("gpu", wire.exact()), across=("host", wire.int8()))
      >>> mesh = AbstractMesh((2, 4), ("host", "gpu"))
      >>> wire.bytes_sent(tx, {"w": jnp.zeros((1024, 1024))}, mesh) < wire.bytes_sent(
      ...     wire.all_reduce(("host", "gpu")), {"w": jnp.zeros((1024, 1024))}, mesh
      ... )
      True
    """
    _check_stage("inside", inside, '("gpu", wire.exact())')
    _check_stage("across", across, '("host", wire.int8())')
    if type(scatter) is not bool:
        raise OptionError(f"scatter={short_repr(scatter)}.", fix="True or False.")
    inner = as_axes(inside[0])
    outer = as_axes(across[0])
    if not isinstance(inside[1], Exact):
        why = f"inside: {short_repr(inside[1])}."
        raise OptionError(why, fix="wire.exact(): gradients are rounded only across hosts.")
    communication = make_communication(
        (*outer, *inner),
        across[1],
        options,
        inside=inner,
        scatter=scatter,
        parameters=("inside", "across", "scatter"),
    )
    return communication.transformation


def _check_stage(name: str, stage: Any, example: str) -> None:
    """Refuse a stage that is not axes and a codec."""
    if not (isinstance(stage, tuple) and len(stage) == 2):
        why = f"{name}={short_repr(stage)}."
        raise OptionError(why, fix=f"axes and a codec: {name}={example}.")
    check_codec(f"{name}: codec", stage[1])
