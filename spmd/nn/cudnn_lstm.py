"""An LSTM layer over all steps of time in one call of cuDNN for each pass (Appleyard et al.,
arXiv:1604.01946), by JAX's binding, `jax.experimental.rnn`: under `[recurrence] implementation =
"cudnn"`.

No GPU has run this. The tests put JAX's own reference, `rnn.lstm_ref`, in the place of cuDNN.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import rnn
from jax.sharding import PartitionSpec

from spmd.errors import LayoutError
from spmd.nn.parallel_context import ParallelConfig

CELLS = (nnx.OptimizedLSTMCell, nnx.LSTMCell)


def run_lstm(
    parallel: ParallelConfig, cell: Any, carry: Any, x: jax.Array, lengths: Any
) -> tuple[Any, jax.Array]:
    """Return what the cell carries after the last step, and its outputs: [time, rows, features] in
    the order of `x`.

    Args:
      carry: (c, h) of flax, [rows, features] each.
      x: [time, rows, features].
      lengths: must be None.

    Raises:
      LayoutError: cuDNN, or JAX's binding of it, does not take this.
    """
    parallel.used.add("cudnn")
    if why := _refuses(parallel.platform or jax.default_backend(), cell, carry, x, lengths):
        raise LayoutError(
            f'[recurrence] implementation = "cudnn": {why}.', fix='implementation = "auto".'
        )

    def run_shard(weights: jax.Array, carry: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        by_row = jnp.swapaxes(x, 0, 1)
        rows, length, features = by_row.shape
        c, h = carry
        lengths = jnp.full(rows, length, jnp.int32)
        sizes = features, h.shape[-1], 1  # the last one: layers
        dropout, bidirectional = 0.0, False
        results: Any = rnn.lstm(
            by_row, h[None], c[None], weights, lengths, *sizes, dropout, bidirectional
        )
        y, h, c = results
        return (c[0], h[0]), jnp.swapaxes(y, 0, 1)

    run = run_shard
    # XLA cannot partition the call: it would gather the rows of all devices.
    if axes := parallel.auto_row_axes(x.shape[1]):
        by_row = PartitionSpec(axes)
        by_step_and_row = PartitionSpec(None, axes)
        run = parallel.shard_map(
            axes,
            run_shard,
            (PartitionSpec(), by_row, by_step_and_row),
            (by_row, by_step_and_row),
        )
    return run(_packed(cell), carry, x)


def _packed(cell: Any) -> jax.Array:
    """Return the weights of a cell in cuDNN's order: those of the input, those of the carry, each
    [gates, features] for the gates i, f, g and o, then the two biases.
    """
    of_input: list[Any]
    of_carry: list[Any]
    if hasattr(cell, "dense_h"):
        of_input, of_carry = [cell.dense_i], [cell.dense_h]
    else:
        of_input = [cell.ii, cell.if_, cell.ig, cell.io]
        of_carry = [cell.hi, cell.hf, cell.hg, cell.ho]
    kernels = [dense.kernel[...].T.ravel() for dense in (*of_input, *of_carry)]
    biases = [dense.bias[...] for dense in of_carry]
    return jnp.concatenate([*kernels, *map(jnp.zeros_like, biases), *biases])


def _refuses(platform: str, cell: Any, carry: Any, x: jax.Array, lengths: Any) -> str | None:
    """Return the reason why cuDNN does not take this layer."""
    if platform not in ("cuda", "gpu"):
        return f"it runs on GPUs of NVIDIA, not on {platform}"
    if type(cell) not in CELLS:
        return f"it computes nnx.LSTMCell and nnx.OptimizedLSTMCell, not {type(cell).__name__}"
    if cell.gate_fn is not nnx.sigmoid or cell.activation_fn is not nnx.tanh:
        return "its gates are sigmoid, and its activation is tanh"
    arrays = [x, *jax.tree.leaves((carry, nnx.state(cell, nnx.Param)))]
    dtypes = {jnp.dtype(array.dtype).name for array in arrays}
    if cell.dtype is not None:
        dtypes.add(jnp.dtype(cell.dtype).name)
    if others := sorted(dtypes - {"float32"}):
        return f"JAX's binding takes float32, not {others[0]}"
    if lengths is not None:
        return (
            "it is called for rows of one length here, not with lengths=, nor for a last chunk of "
            "time that is not full"
        )
    if not _is_traceable():
        return (
            "JAX asks cuDNN for sizes while it traces a program, so that a GPU must be there, for "
            "a plan, too"
        )
    return None


def _is_traceable() -> bool:
    return jax.default_backend() == "gpu"
