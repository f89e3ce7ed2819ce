"""An embedding whose gradient is summed up where the tokens are."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from spmd.nn.parallel_context import current


class Embed(nnx.Embed):
    """`flax.nnx.Embed`, for models whose sequences a layout may cut.

    Under  [sequence] axis = "context"  tokens [rows, length] are looked up by each device for its own part of the sequence, and the
    gradient of the table is one all-reduce over the axis. Left to itself, XLA's partitioner (jax 0.10) gathers the gradients of the whole
    sequence on every device in order to add them to the table. Tokens of another number of dims, or of a length that the axis does not
    divide, are looked up as flax does.

    Example:
      >>> Embed(10, 4, rngs=nnx.Rngs(0))(jnp.zeros((2, 3), int)).shape
      (2, 3, 4)
    """

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Rows of the table, [*inputs.shape, features]."""
        parallel = current()
        axis = parallel.sequence.axis
        cut = axis is not None and inputs.ndim == 2 and jnp.issubdtype(inputs.dtype, jnp.integer)
        if axis is None or not cut or inputs.shape[1] % parallel.axis_size(axis) or out_sharding is not None:
            return super().__call__(inputs, out_sharding)
        rows = parallel.auto_row_axes(inputs.shape[0])
        spec = PartitionSpec(rows or None, axis)
        (table,) = self.promote_dtype((self.embedding[...],), dtype=self.dtype, inexact=False)
        look_up = lambda table, inputs: jnp.take(table, inputs, axis=0)
        with jax.named_scope("embed"):
            return parallel.shard_map((axis, *rows), look_up, (PartitionSpec(), spec), spec)(table, inputs)
