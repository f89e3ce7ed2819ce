"""A bidirectional recurrent layer: a barrier in a stack, since it needs the entire sequence; both
directions may run in parallel.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

from spmd.nn.parallel_context import ParallelConfig, current
from spmd.nn.rnn_stack import Cells, check_inputs
from spmd.nn.stacking import Layers, join_modules
from spmd.wire import collectives


class Bidirectional(nnx.Module):
    """Two cells over the same sequence, one forward and one backward in time; their outputs for a
    step are concatenated.

    Under a layout with `[pipeline]` the first two devices along its axis run one direction each at
    the same time; any others are idle. The parameters, [2, ...], are replicated on all of them.

    Args:
      forward, backward: flax nnx cells, equal in kind, settings and shapes; their inputs and
        outputs may differ in features.

    Raises:
      ModelError: cells that differ, with every difference.

    Example:
      >>> import jax.numpy as jnp
      >>> layer = Bidirectional(
      ...     nnx.GRUCell(4, 3, rngs=nnx.Rngs(0)), nnx.GRUCell(4, 3, rngs=nnx.Rngs(1))
      ... )
      >>> layer(jnp.ones((2, 5, 4)), lengths=jnp.array([5, 2])).shape
      (2, 5, 6)
    """

    def __init__(self, forward: nnx.Module, backward: nnx.Module):
        self.cells = join_modules([forward, backward], "Bidirectional")

    def __call__(self, x: jax.Array, *, lengths: Any = None) -> jax.Array:
        """Run both directions.

        Args:
          x: [rows, time, features].
          lengths: int32[rows], how many steps of each row count: the backward cell begins with the
            last of them; later outputs are zeros.

        Returns:
          [rows, time, 2 features], the forward cell's first.
        """
        check_inputs("Bidirectional", x, lengths, None)
        layers = Layers(self.cells)
        parallel = current()
        run = _in_sequence
        if parallel.stages > 1 and parallel.tap is None:
            run = _in_parallel
        return jnp.swapaxes(run(parallel, layers, jnp.swapaxes(x, 0, 1), lengths), 0, 1)


def _one_direction(
    parallel: ParallelConfig,
    layers: Layers,
    variables: tuple,
    x: jax.Array,
    lengths: Any,
    backward: Any,
) -> jax.Array:
    """Run one cell over [time, rows, features]; `backward`: from the end of each row to its
    beginning.
    """
    time = x.shape[0]
    ends = lengths
    if lengths is None:
        ends = jnp.full(x.shape[1], time)
    steps = jnp.arange(time)[:, None]
    # Of shape [time, rows]; steps after a row's end keep their place.
    order = jnp.where(backward & (steps < ends), ends - 1 - steps, steps)

    def reverse(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, order.reshape(order.shape + (1,) * (x.ndim - 2)), axis=0)

    cells = Cells(layers, residual_from=layers.count, dropout=0.0)
    # The carry of `variables`: inside a region the arrays of `layers` belong to the mesh around it.
    carry = cells.initial_carry(variables, x)
    y, _ = cells.over_time(
        variables, carry, reverse(x), None, steps[:, 0], lengths, unroll=parallel.unroll
    )
    return reverse(y)


def _in_sequence(parallel: ParallelConfig, layers: Layers, x: jax.Array, lengths: Any) -> jax.Array:
    """Return both directions, computed one after the other."""
    outputs = []
    for number in (0, 1):
        variables = jax.tree.map(lambda leaf, number=number: leaf[number], layers.variables)
        outputs.append(
            _one_direction(parallel, layers, variables, x, lengths, jnp.bool_(number == 1))
        )
    return jnp.concatenate(outputs, axis=-1)


def _in_parallel(parallel: ParallelConfig, layers: Layers, x: jax.Array, lengths: Any) -> jax.Array:
    """Return both directions, each computed on its own device."""
    axis = str(parallel.pipeline.axis)
    row_axes = parallel.auto_row_axes(x.shape[1])

    def stage(variables: tuple, x: jax.Array, lengths: Any) -> jax.Array:
        number = collectives.worker_index((axis,))
        cell_variables = jax.tree.map(lambda leaf: leaf[jnp.minimum(number, 1)], variables)

        def direction() -> jax.Array:
            return _one_direction(parallel, layers, cell_variables, x, lengths, number == 1)

        # Both branches of a `cond` return the same shapes and dtypes.
        like = jax.eval_shape(direction)
        if parallel.branchless:
            y = direction()
        else:
            y = lax.cond(number < 2, direction, lambda: jnp.zeros(like.shape, like.dtype))
        # One all-reduce for each direction: the device that has it sends it, all others add zeros.
        outputs = [
            collectives.all_reduce(jnp.where(number == source, y, jnp.zeros_like(y)), (axis,))
            for source in (0, 1)
        ]
        return jnp.concatenate(outputs, axis=-1)

    replicated = PartitionSpec()
    x_spec = PartitionSpec(None, row_axes or None)
    lengths_spec = replicated
    if lengths is not None:
        lengths_spec = PartitionSpec(row_axes or None)
    run = parallel.shard_map(
        (axis, *row_axes), stage, in_specs=(replicated, x_spec, lengths_spec), out_specs=x_spec
    )
    return run(layers.variables, x, lengths)
