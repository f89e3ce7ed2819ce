"""An LSTM layer over all steps of time in one call of cuDNN for each pass (Appleyard et al.,
arXiv:1604.01946), by JAX's binding, `jax.experimental.rnn`: under `[recurrence] implementation =
"cudnn"`.

No GPU has run this. The tests put JAX's own reference, `rnn.lstm_ref`, in the place of cuDNN.
"""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import rnn
from jax.sharding import PartitionSpec

from spmd.base.tree import describe
from spmd.errors import LayoutError, ModelError
from spmd.models.intercept import interceptions, original_class
from spmd.nn.parallel_context import ParallelConfig

# of each cell: the layers of its input, and those of what it carries
LAYERS = {
    nnx.OptimizedLSTMCell: (("dense_i",), ("dense_h",)),
    nnx.LSTMCell: (("ii", "if_", "ig", "io"), ("hi", "hf", "hg", "ho")),
}
_DEFAULTS = {
    name: inspect.signature(nnx.Linear.__init__).parameters[name].default
    for name in ("precision", "dot_general", "promote_dtype")
}


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
      LayoutError: cuDNN, or JAX's binding of it, does not compute this.
      ModelError: the cell takes another number of features.
    """
    parallel.used.add("cudnn")
    why = _other_cell(cell) or _other_arrays(cell, carry, x, lengths) or _other_device(parallel)
    if why:
        raise LayoutError(
            f'[recurrence] implementation = "cudnn": {why}.', fix='implementation = "auto".'
        )
    of_input, of_carry = _layers(cell)
    features = of_input[0].kernel.shape[0]
    # cuDNN would read other weights than those of the input.
    if x.shape[-1] != features:
        raise ModelError(
            f"a recurrent layer gets {x.shape[-1]} features, and its cell takes {features}.",
            fix="cells that take the features of x and those of beside=.",
        )

    def run_shard(weights: jax.Array, carry: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        by_row = jnp.swapaxes(x, 0, 1)
        rows, length, _ = by_row.shape
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
    # In cuDNN's order: kernels as [gates, features] for the gates i, f, g and o, then two biases.
    kernels = [dense.kernel[...].T.ravel() for dense in (*of_input, *of_carry)]
    biases = [dense.bias[...] for dense in of_carry]
    weights = jnp.concatenate([*kernels, *map(jnp.zeros_like, biases), *biases])
    return run(weights, carry, x)


def _layers(cell: Any) -> tuple[list[Any], list[Any]]:
    """Return the layers of a cell's input, and those of what it carries."""
    of_input, of_carry = LAYERS[original_class(cell)]
    return [getattr(cell, name) for name in of_input], [getattr(cell, name) for name in of_carry]


def _other_device(parallel: ParallelConfig) -> str | None:
    """Return why cuDNN does not run where the program does, or None."""
    platform = parallel.platform or jax.default_backend()
    if platform not in ("cuda", "gpu"):
        return f"it runs on NVIDIA GPUs, not on {platform}"
    if jax.default_backend() != "gpu":
        return "JAX asks cuDNN for sizes while it traces a program, which needs a GPU, even to plan"
    return None


def _other_arrays(cell: Any, carry: Any, x: jax.Array, lengths: Any) -> str | None:
    """Return why cuDNN does not take these arrays, or None."""
    arrays = [x, *jax.tree.leaves((carry, nnx.state(cell, nnx.Param)))]
    dtypes = {jnp.dtype(array.dtype).name for array in arrays}
    of_input, of_carry = _layers(cell)
    for module in (cell, *of_input, *of_carry):
        if module.dtype is not None:
            dtypes.add(jnp.dtype(module.dtype).name)
    if others := sorted(dtypes - {"float32"}):
        return f"JAX's binding takes float32, not {others[0]}"
    if x.ndim != 3 or not x.size:
        return f"it takes x as [time, rows, features], none of them empty, not {describe(x)}"
    if lengths is not None:
        return (
            "it is called here for rows of one length, without lengths= and without a last chunk "
            "of time that is not full"
        )
    return None


def _other_cell(cell: Any) -> str | None:
    """Return why cuDNN computes something else than this cell, or None."""
    kind = original_class(cell)
    if kind not in LAYERS:
        return f"it computes nnx.LSTMCell and nnx.OptimizedLSTMCell, not {kind.__name__}"
    if cell.gate_fn is not nnx.sigmoid or cell.activation_fn is not nnx.tanh:
        return "it computes gates with sigmoid and activations with tanh alone"
    of_input, of_carry = _layers(cell)
    # Functions around calls are not called: cuDNN computes all of the cell.
    around = set(interceptions(cell))
    for dense in (*of_input, *of_carry):
        around |= set(interceptions(dense))
        kind = original_class(dense)
        if kind is not nnx.Linear:
            return f"the cell's layers are nnx.Linear in flax, and {kind.__name__} here"
        for name, default in _DEFAULTS.items():
            if getattr(dense, name) is not default:
                return f"a layer of the cell has a {name} of its own"
    if any(dense.bias is not None for dense in of_input):
        return "a layer of the cell's input has a bias, where flax makes none"
    if any(dense.bias is None for dense in of_carry):
        return "a layer of what the cell carries has no bias, where flax makes one"
    around.discard("scope")
    if around:
        names = ", ".join(sorted(around))
        return f"the layout changes calls of the cell or of its layers ({names})"
    return None
