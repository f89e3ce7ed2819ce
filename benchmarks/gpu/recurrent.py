"""LSTM and GRU layers forward and backward: `spmd.nn.RNNStack`, `nnx.RNN`, torch's, which are
cuDNN's, and JAX's binding of cuDNN's LSTM, in float32.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import rnn

import spmd
from benchmarks.gpu import cases, references
from benchmarks.gpu.measure import Part, Queued, on_cpu, run_part, timed, torch_device, wait_for
from spmd.nn.parallel_context import ParallelConfig, parallel_scope

# relative, of an array; on GPUs float32 products may be in TF32
BOUNDS = {"bfloat16": 0.1, "float32": 5e-3}
MOST_ON_CPU = 4 * 1024**2 * 512  # layers x width^2 x time steps


class Plain(nnx.Module):
    """The layers as flax has them."""

    def __init__(self, kind: str, width: int, depth: int):
        cell = nnx.OptimizedLSTMCell if kind == "LSTM" else nnx.GRUCell
        self.layers = nnx.List(
            [nnx.RNN(cell(width, width, rngs=nnx.Rngs(number))) for number in range(depth)]
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return x


class CuDNN(Plain):
    """The LSTM layers of `Plain` in one call of cuDNN by JAX's binding, which cannot even be traced
    without a GPU; on a CPU JAX's reference of it, from the same packed weights.
    """

    def __call__(self, x: jax.Array) -> jax.Array:
        kernels, biases = [], []
        for layer in self.layers:
            cell: Any = layer.cell
            kernels += [cell.dense_i.kernel[...].T.ravel(), cell.dense_h.kernel[...].T.ravel()]
            bias = cell.dense_h.bias[...]
            biases += [jnp.zeros_like(bias), bias]
        weights = jnp.concatenate([*kernels, *biases])
        rows, length, width = x.shape
        sizes = width, width, len(self.layers)
        start = jnp.zeros((len(self.layers), rows, width))
        lengths = jnp.full(rows, length, jnp.int32)
        if jax.default_backend() == "cpu":
            unpacked = rnn.unpack_lstm_weights(weights, *sizes, False)
            return rnn.lstm_ref(x, start, start, *unpacked, lengths, *sizes, 0.0, False)[0]
        return rnn.lstm(x, start, start, weights, lengths, *sizes, 0.0, False)[0]


class ByCuDNN(cases.Recurrent):
    """The same layers under `[recurrence] implementation = "cudnn"`."""

    def __call__(self, x: jax.Array) -> jax.Array:
        with parallel_scope(ParallelConfig(recurrence=spmd.Recurrence("cudnn"))):
            return super().__call__(x)


def both_passes(model: nnx.Module, dtype: str) -> tuple[Callable[..., Any], Any]:
    """The gradients by parameters and input of a mean of squares, as a function of the model's
    arrays and the input; and the arrays.
    """
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params: Any, x: jax.Array, rest: Any) -> jax.Array:
        cast = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
        # variables of this trace: cells count their random numbers
        rest = jax.tree.map(lambda leaf: leaf, rest)
        return (nnx.merge(graph, cast, rest)(x.astype(dtype)).astype(jnp.float32) ** 2).mean()

    def gradients(arrays: Any, x: jax.Array) -> Any:
        return jax.value_and_grad(loss, (0, 1))(arrays[0], x, arrays[1])

    return gradients, (params, rest)


def programs(small: bool) -> dict[str, tuple[Callable[..., Any], list[Any]]]:
    found = {}
    for case in cases.RECURRENT:
        kind, depth, width, length, dtype = smaller(case) if small else case
        rows = 4 if small else cases.RECURRENT_ROWS
        for name, model in (("RNNStack", cases.Recurrent), ("nnx.RNN", Plain)):
            abstract = nnx.eval_shape(
                lambda model=model, kind=kind, width=width, depth=depth: model(kind, width, depth)
            )
            function, params = both_passes(abstract, dtype)
            found[f"{name} {cases.recurrent_name(*case)}"] = (
                function,
                [params, jax.ShapeDtypeStruct((rows, length, width), "float32")],
            )
    return found


def smaller(case: tuple[Any, ...]) -> tuple[Any, ...]:
    kind, depth, _, _, dtype = case
    return kind, min(depth, 2), 16, 8, dtype


def main(part: Part) -> None:
    # few are other ones if small
    names = {
        smaller(case) if part.small else case: cases.recurrent_name(*case)
        for case in cases.RECURRENT
    }
    for number, (case, name) in enumerate(names.items()):
        if part.begins(name, "all", least=45):  # four or five programs are compiled
            measure(part, name, case, 1 / (len(names) - number))


def measure(part: Part, name: str, case: tuple[Any, ...], share: float) -> None:
    """Check and time the arms of one case; what is timed is what was checked."""
    kind, depth, width, length, dtype = case
    rows = 4 if part.small else cases.RECURRENT_ROWS
    x = jnp.asarray(np.random.default_rng(0).normal(size=(rows, length, width)), jnp.float32)
    # the batch of the check repeats two rows, so that the mean of its loss, and its gradients, are
    # those of the two
    two, repeated = x[:2], jnp.tile(x[:2], (rows // 2, 1, 1))
    arms: dict[str, Callable[[], Any]] = {}
    with part.guarded(name, "reference"):
        right = compared(in_float32(case, two), rows=2)
        models = {"ours": cases.Recurrent, "nnx.RNN": Plain}
        if (kind, dtype) == ("LSTM", "float32"):
            models["jax.experimental.rnn (cuDNN)"] = CuDNN
            if jax.default_backend() == "gpu":
                models["ours (cuDNN)"] = ByCuDNN
        for arm, model in models.items():
            with part.guarded(name, arm):
                function, arrays = both_passes(model(kind, width, depth), dtype)
                run = jax.jit(function)
                result, first = timed(run, arrays, repeated)
                worst, error = references.worst(compared(result, rows), right)
                if part.check(
                    name, f"{arm} against float32, the worst at {worst}", error, BOUNDS[dtype]
                ):
                    arms[arm] = Queued(
                        lambda run=run, arrays=arrays: run(arrays, x), jax.block_until_ready, first
                    )
    torch, device = torch_device()
    if torch is None:
        part.write(name, failed="torch", error="torch is not installed")
    else:
        with part.guarded(name, "torch"):
            arms["torch (cuDNN)"] = torch_layers(
                torch, device, kind, width, depth, dtype, rows, length
            )
    part.alternate(name, arms, share)


def in_float32(case: tuple[Any, ...], x: jax.Array) -> Any:
    """The gradients of flax's layers in float32: on the CPU, or where that takes a minute on this
    device, which shorter cases check.
    """
    kind, depth, width, length, _ = case
    function, arrays = both_passes(Plain(kind, width, depth), "float32")
    if depth * width**2 * length <= MOST_ON_CPU:
        return on_cpu(function, arrays, x)
    with jax.default_matmul_precision("highest"):  # no TF32
        return jax.jit(function)(arrays, x)


def compared(result: Any, rows: int) -> dict[str, np.ndarray]:
    """Elements of the gradients, by array: of all layers together, and of two rows of the input as
    if the batch were these.
    """
    loss, (params, x) = result
    pure = nnx.to_pure_dict(params)
    layers = pure.get("layers", {}).values()
    cells = (
        jax.tree.map(lambda *leaves: np.stack(leaves), *[layer["cell"] for layer in layers])
        if layers
        else pure["stack"]["cells"]
    )
    return references.sample({"loss": loss, "cells": cells, "x": x[:2] * (rows / 2)})


def torch_layers(
    torch: Any, device: Any, kind: str, width: int, depth: int, dtype: str, rows: int, length: int
) -> Callable[[], None]:
    of_kind = torch.nn.LSTM if kind == "LSTM" else torch.nn.GRU
    layers = of_kind(
        width, width, depth, batch_first=True, device=device, dtype=getattr(torch, dtype)
    )
    x = torch.randn(
        rows, length, width, device=device, dtype=getattr(torch, dtype), requires_grad=True
    )

    def launch() -> None:
        out = layers(x)[0]
        loss = out.float().square().mean()
        torch.autograd.grad(loss, [x, *layers.parameters()])

    return Queued(launch, wait_for(torch, device))


if __name__ == "__main__":
    run_part(main)
