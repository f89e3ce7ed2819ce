"""Plans of how each gradient is communicated, and what is kept of it between steps.

All of it is known before a step is compiled. What is kept, a *memory*, is a dict by parameter path
and by kind. `reduction.py` computes with it.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from spmd.base.specs import Spec, pspec, spec_axes
from spmd.base.tree import Tree
from spmd.wire.codec import CODECS
from spmd.wire.codec.base import Codec
from spmd.wire.codec.exact import EXACT
from spmd.wire.shard_layout import ShardLayout

# Kinds of what is kept of a parameter, as stored in checkpoints. Workers are those of all
# positions along the data axes; each position is a server too, which has a row of each parameter.
# what a worker's codec has lost so far: [workers, *gradient], sharded over workers on dim 0. In the
# shape of the gradient it is ordinary state: it is saved, and can be restored on any number of
# workers.
RESIDUAL = "residual"
CODEC = "codec"  # the codec's own arrays, equal on all workers; one for each model-parallel shard
# the parameters that each worker has read: [positions, workers, row], sharded over positions on
# dim 0
HELD = "held"
SUM = "sum"  # sum of the weighted gradients of the next update: [positions, row], likewise
GATHERED = "gathered"  # the sum of their weights, and their number: [2], replicated
# the servers' moving mean of squared gradients: [positions, row], sharded over positions
SQUARES = "squares"
OWN = "own"  # each worker's local parameters: [workers, positions, row], sharded over workers
# the parameters that workers last read from the servers: [positions, row], replicated
READ = "read"
OUTER = "outer"  # the outer optimizer's momentum: float32[positions, row], sharded over positions

# XLA starts the exchange of a bucket as soon as its gradients exist: the exchange of one bucket for
# all would begin only when the backward pass is over.
BUCKET_BYTES = 25 * 2**20
# XLA:CPU merges small all-reduces, but no other collectives (jaxlib 0.10). For a larger array,
# copying it into a bucket and out of it costs more than a collective of its own.
MAX_EXACT_BUCKET = 2**20  # bytes; a larger exact gradient has a collective of its own

Leaves = dict[str, jax.Array]  # by parameter path
Memory = dict[str, dict[str, Any]]  # by parameter path and kind


@dataclasses.dataclass(frozen=True)
class Transfer:
    """The plan by which one gradient is communicated: who owns which part of its mean, and what is
    sent.

    Attributes:
      shard_layout: of the array that one device sends.
      codec: what is sent.
      error_feedback: whether what the codec loses is kept, and added to the next gradient.
      full_shape: of the gradient over all devices; () where that is the shape of `shard_layout`.
      model_spec: its spec along mesh axes that are not the workers'.
      nested: whether each device communicates its local shard along these axes.
      codec_states: how many states the codec has: one for each local shard along these axes.
      dtype: in which the gradient is reduced; None: its own.
    """

    shard_layout: ShardLayout
    codec: Codec
    error_feedback: bool
    full_shape: tuple[int, ...] = ()
    model_spec: Spec = ()
    nested: bool = False
    codec_states: int = 1
    dtype: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the gradient over all devices."""
        return self.full_shape or self.shard_layout.shape

    @property
    def codec_name(self) -> str:
        """Return the registered name of the codec, or that of its class."""
        kind = type(self.codec)
        for name, registered in CODECS.items():
            if registered is kind:
                return name
        return kind.__name__

    def codec_arrays(self, keys: jax.Array) -> dict[str, jax.Array]:
        """Return the codec's arrays at step 0, [keys, ...]; of most codecs there are none."""
        return jax.vmap(lambda key: self.codec.init(key, self.shard_layout.shape, self.shape))(keys)

    @property
    def codec_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shapes of one state of the codec."""
        return _codec_shapes(self.codec, self.shard_layout.shape, self.shape)


@functools.cache
def _codec_shapes(
    codec: Codec, shape: tuple[int, ...], full_shape: tuple[int, ...]
) -> dict[str, jax.ShapeDtypeStruct]:
    return jax.eval_shape(lambda: codec.init(jax.random.key(0), shape, full_shape))


def make_transfer(
    codec: Codec,
    shard_layout: ShardLayout,
    *,
    error_feedback: bool,
    is_sent: bool = True,
    **options: Any,
) -> Transfer:
    """Return how a gradient is communicated: with `codec` if that makes it smaller, else exactly.

    Args:
      is_sent: whether there are several workers along axes where codecs are used.
      options: further attributes of `Transfer`.
    """
    shape = options.get("full_shape") or shard_layout.shape
    # an array without elements has no rows to encode
    if not (is_sent and all(shape) and codec.compresses(shard_layout, shape)):
        codec = EXACT
    return Transfer(shard_layout, codec, error_feedback and not codec.lossless, **options)


def make_buckets(transfers: Mapping[str, Transfer], limit: int) -> list[list[str]]:
    """Return paths of the gradients that are communicated together: same codec, same axes, up to
    `limit` bytes as float32.

    Exact gradients would be copied into a bucket without getting smaller, so their limit is lower.
    """
    buckets: list[list[str]] = []
    # by codec and axes: the last bucket and its bytes
    filling: dict[tuple, tuple[list[str], int]] = {}
    for path, transfer in transfers.items():
        layout = transfer.shard_layout
        # The axes too: one all-gather over them returns all means of a bucket.
        key = (transfer.codec, layout.replicated_axes)
        size = 4 * math.prod(layout.shape)
        most = limit
        if transfer.codec.lossless:
            most = min(limit, MAX_EXACT_BUCKET)
        paths, filled = filling.get(key, ([], 0))
        if not paths or filled + size > most:
            paths = []
            filled = 0
            buckets.append(paths)
        paths.append(path)
        filling[key] = (paths, filled + size)
    return buckets


def init_memory(
    transfers: Mapping[str, Transfer],
    workers: int,
    *,
    key: jax.Array | None = None,
    dtype: str = "float32",
) -> Memory:
    """Return the memory at step 0: residuals of zero, and the codecs' own arrays.

    Args:
      workers: how many have a residual here: all, or 1 inside of `jax.shard_map`.
      key: for the codecs' arrays; None, of a transformation, which has no key: always the same.
      dtype: of residuals.
    """
    memory: Memory = {}
    for number, (path, transfer) in enumerate(transfers.items()):
        entry: dict[str, Any] = {}
        if transfer.error_feedback:
            entry[RESIDUAL] = jnp.zeros((workers, *transfer.shape), dtype)
        if key is None:
            # The same key on every worker: P of PowerSGD is a mean only if all workers have one Q.
            keys = jax.random.fold_in(jax.random.key(0), number)[None]
            if transfer.codec_states > 1:
                keys = jax.random.split(keys[0], transfer.codec_states)
        else:
            keys = jax.random.split(jax.random.fold_in(key, number), transfer.codec_states)
        arrays = transfer.codec_arrays(keys)
        if arrays:
            entry[CODEC] = arrays
        if entry:
            memory[path] = entry
    return memory


def partition_specs(
    memory: Memory,
    axes: tuple[str, ...],
    model_specs: Mapping[str, Spec] = MappingProxyType({}),
) -> Tree:
    """Return `memory_specs` as `jax.sharding.PartitionSpec`s."""
    specs = memory_specs(memory, axes, model_specs)
    return jax.tree.map(pspec, specs, is_leaf=lambda node: isinstance(node, tuple))


def memory_specs(
    memory: Memory,
    axes: tuple[str, ...],
    model_specs: Mapping[str, Spec] = MappingProxyType({}),
) -> Tree:
    """Return the spec of every array of a memory.

    Args:
      axes: of the workers.
      model_specs: of gradients that are sharded over other axes, too, by path.
    """
    specs: Memory = {}
    for path, entry in memory.items():
        model_spec = model_specs.get(path, ())
        of_codec: Spec = ()
        model_axes = spec_axes(model_spec)
        if model_axes:
            of_codec = (model_axes,)
        by_kind = {RESIDUAL: (axes, *model_spec), CODEC: of_codec, GATHERED: (), READ: ()}
        specs[path] = {}
        for kind, part in entry.items():
            spec = by_kind.get(kind, (axes,))
            specs[path][kind] = jax.tree.map(lambda _, spec=spec: spec, part)
    return specs
