"""An embedding whose gradient is summed on the devices that hold the tokens."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from spmd.nn.parallel_context import current


class Embed(nnx.Embed):
    """`flax.nnx.Embed`, for models whose sequences a layout may shard.

    Under  [sequence] axis = "context"  tokens [rows, length] are looked up by each device for its
    shard of the sequence, and the gradient of the table takes one all-reduce over the axis. Tokens
    with another number of dims, or with a length that the axis does not divide, use flax's lookup.

    Example:
      >>> Embed(10, 4, rngs=nnx.Rngs(0))(jnp.zeros((2, 3), int)).shape
      (2, 3, 4)
    """

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Return rows of the table, [*inputs.shape, features]."""
        parallel = current()
        axis = parallel.sequence.axis
        is_tokens = inputs.ndim == 2 and jnp.issubdtype(inputs.dtype, jnp.integer)
        if (
            axis is None
            or not is_tokens
            or inputs.shape[1] % parallel.axis_size(axis)
            or out_sharding is not None
        ):
            return super().__call__(inputs, out_sharding)
        row_axes = parallel.auto_row_axes(inputs.shape[0])
        spec = PartitionSpec(row_axes or None, axis)
        (table,) = self.promote_dtype((self.embedding[...],), dtype=self.dtype, inexact=False)

        def look_up(table: jax.Array, inputs: jax.Array) -> jax.Array:
            return jnp.take(table, inputs, axis=0)

        # XLA's partitioner alone (jax 0.10) would gather the gradients of the whole sequence on
        # every device, to add them to the table.
        on_shards = parallel.shard_map((axis, *row_axes), look_up, (PartitionSpec(), spec), spec)
        with jax.named_scope("embed"):
            return on_shards(table, inputs)
