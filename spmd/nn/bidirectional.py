"""A recurrent layer that reads both ways: a barrier in a stack, since its last step needs the first one's; both directions side by side."""

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
    """Two cells over the same sequence, one from its front and one from its end; what they return for a step is joined.

    Under a layout with `[pipeline]` the first two devices along its axis run one direction each at the same time; any others wait. The
    parameters, [2, ...], are whole on all of them.

    Args:
      forward, backward: flax nnx cells, equal in kind, settings and shapes; they may take another number of features than they return.

    Raises:
      ModelError: cells that differ, with every difference.

    Example:
      >>> import jax.numpy as jnp
      >>> layer = Bidirectional(nnx.GRUCell(4, 3, rngs=nnx.Rngs(0)), nnx.GRUCell(4, 3, rngs=nnx.Rngs(1)))
      >>> layer(jnp.ones((2, 5, 4)), lengths=jnp.array([5, 2])).shape
      (2, 5, 6)
    """

    def __init__(self, forward: nnx.Module, backward: nnx.Module):
        self.cells = join_modules([forward, backward], "Bidirectional")

    def __call__(self, x: jax.Array, *, lengths: Any = None) -> jax.Array:
        """Both directions.

        Args:
          x: [rows, time, features].
          lengths: int32[rows], how many steps of each row count: the backward cell begins with the last of them; zeros are returned after.

        Returns:
          [rows, time, 2 features], the forward cell's first.
        """
        check_inputs("Bidirectional", x, lengths, None)
        layers, parallel = Layers(self.cells), current()
        both = _at_once if parallel.stages > 1 and parallel.tap is None else _in_turn
        return jnp.swapaxes(both(parallel, layers, jnp.swapaxes(x, 0, 1), lengths), 0, 1)


def _one_way(parallel: ParallelConfig, layers: Layers, variables: tuple, x: jax.Array, lengths: Any, backward: Any) -> jax.Array:
    """One cell over [time, rows, features]; `backward`: from the end of each row to its front."""
    time = x.shape[0]
    ends = jnp.full(x.shape[1], time) if lengths is None else lengths
    steps = jnp.arange(time)[:, None]
    at = jnp.where(backward & (steps < ends), ends - 1 - steps, steps)  # [time, rows]; what comes after a row's end stays there
    turned = lambda x: jnp.take_along_axis(x, at.reshape(at.shape + (1,) * (x.ndim - 2)), axis=0)
    cells = Cells(layers, residual_from=layers.count, dropout=0.0)
    # of these arrays: inside a region those of `layers` belong to the mesh around it
    y, _ = cells.over_time(variables, cells.opening_of(variables, x), turned(x), None, steps[:, 0], lengths, unroll=parallel.unroll)
    return turned(y)


def _in_turn(parallel: ParallelConfig, layers: Layers, x: jax.Array, lengths: Any) -> jax.Array:
    """One direction, then the other."""
    pick = lambda number: jax.tree.map(lambda leaf: leaf[number], layers.variables)
    ways = [_one_way(parallel, layers, pick(number), x, lengths, jnp.bool_(number == 1)) for number in (0, 1)]
    return jnp.concatenate(ways, axis=-1)


def _at_once(parallel: ParallelConfig, layers: Layers, x: jax.Array, lengths: Any) -> jax.Array:
    """Each direction on a device of its own."""
    axis = str(parallel.pipeline.axis)
    free = parallel.auto_row_axes(x.shape[1])

    def stage(variables: tuple, x: jax.Array, lengths: Any) -> jax.Array:
        number = collectives.worker_index((axis,))
        own = jax.tree.map(lambda leaf: leaf[jnp.minimum(number, 1)], variables)
        run = lambda: _one_way(parallel, layers, own, x, lengths, number == 1)
        like = jax.eval_shape(run)
        y = run() if parallel.branchless else lax.cond(number < 2, run, lambda: jnp.zeros(like.shape, like.dtype))
        there = lambda way: collectives.all_reduce(jnp.where(number == way, y, jnp.zeros_like(y)), (axis,))
        return jnp.concatenate([there(0), there(1)], axis=-1)

    whole, times = PartitionSpec(), PartitionSpec(None, free or None)
    of_rows = PartitionSpec(free or None) if lengths is not None else whole
    run = parallel.shard_map((axis, *free), stage, in_specs=(whole, times, of_rows), out_specs=times)
    return run(layers.variables, x, lengths)
