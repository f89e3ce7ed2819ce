"""LSTM layers forward and backward on a CPU, in float32: `spmd.nn.RNNStack`, `nnx.RNN`, Keras on
JAX, and torch, all with the same weights.

    pip install keras torch
    python benchmarks/recurrent.py

The arms take turns in one process. Before they are timed, all gradients of each are compared with
those of `nnx.RNN`. On a CPU torch's LSTM is one call of oneDNN for each layer and pass; one arm is
torch without it, whose loop is made of products, as XLA's is.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")
import jax
import jax.numpy as jnp
import keras
import numpy as np
import torch
from flax import nnx

import spmd
from benchmarks import reported

# layers, units, time steps, rows
CASES = ((4, 512, 128, 16), (2, 1024, 128, 16), (2, 256, 128, 32))
BOUND = 1e-5  # of the norm of the difference of two gradients, over the norm of one


class Layers(nnx.Module):
    """The layers as Flax has them."""

    def __init__(self, depth: int, width: int):
        self.layers = nnx.List()
        for number in range(depth):
            cell = nnx.OptimizedLSTMCell(width, width, rngs=nnx.Rngs(number))
            self.layers.append(nnx.RNN(cell, rngs=nnx.Rngs(number)))

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return x


class Stack(nnx.Module):
    """The same layers as one stack."""

    def __init__(self, layers: Layers):
        self.stack = spmd.nn.RNNStack([layer.cell for layer in layers.layers])

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.stack(x)


Gradients = dict[str, np.ndarray]


def of_flax(model: nnx.Module, x: np.ndarray) -> tuple[Callable[[], Any], Callable[[], Gradients]]:
    """The call to time, and the gradients that it returns, [layers, ...] each."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params: Any, x: jax.Array, rest: Any) -> jax.Array:
        # variables of this trace: cells count their random numbers
        rest = jax.tree.map(lambda leaf: leaf, rest)
        return (nnx.merge(graph, params, rest)(x) ** 2).mean()

    step = jax.jit(jax.grad(loss, (0, 1)))
    inputs = jnp.asarray(x)

    def run() -> Any:
        return jax.block_until_ready(step(params, inputs, rest))

    def gradients() -> Gradients:
        of_params, of_x = run()
        pure = nnx.to_pure_dict(of_params)
        if "stack" in pure:
            cells = pure["stack"]["cells"]
        else:
            layers = [pure["layers"][number]["cell"] for number in sorted(pure["layers"])]
            cells = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
        return {
            "of_x": np.asarray(cells["dense_i"]["kernel"]),
            "of_h": np.asarray(cells["dense_h"]["kernel"]),
            "bias": np.asarray(cells["dense_h"]["bias"]),
            "x": np.asarray(of_x),
        }

    return run, gradients


def of_keras(layers: Layers, x: np.ndarray) -> tuple[Callable[[], Any], Callable[[], Gradients]]:
    width = x.shape[-1]
    model = keras.Sequential([keras.Input(x.shape[1:], batch_size=x.shape[0])])
    for layer in layers.layers:
        model.add(keras.layers.LSTM(width, return_sequences=True))
        cell: Any = layer.cell
        kernels = cell.dense_i.kernel[...], cell.dense_h.kernel[...]
        model.layers[-1].set_weights(
            [*map(np.asarray, kernels), np.asarray(cell.dense_h.bias[...])]
        )
    params = [variable.value for variable in model.trainable_variables]
    rest = [variable.value for variable in model.non_trainable_variables]

    def loss(params: Any, x: jax.Array) -> jax.Array:
        y, _ = model.stateless_call(params, rest, x, training=True)
        return (y**2).mean()

    step = jax.jit(jax.grad(loss, (0, 1)))
    inputs = jnp.asarray(x)

    def run() -> Any:
        return jax.block_until_ready(step(params, inputs))

    def gradients() -> Gradients:
        of_params, of_x = run()
        names = "of_x", "of_h", "bias"
        parts = {name: np.stack(of_params[place::3]) for place, name in enumerate(names)}
        return {**parts, "x": np.asarray(of_x)}

    return run, gradients


def of_torch(
    layers: Layers, x: np.ndarray, *, onednn: bool
) -> tuple[Callable[[], Any], Callable[[], Gradients]]:
    width, depth = x.shape[-1], len(layers.layers)
    model = torch.nn.LSTM(width, width, depth, batch_first=True)
    with torch.no_grad():
        for number, layer in enumerate(layers.layers):
            cell: Any = layer.cell
            values = {
                "weight_ih": np.asarray(cell.dense_i.kernel[...]).T,
                "weight_hh": np.asarray(cell.dense_h.kernel[...]).T,
                "bias_ih": np.zeros(4 * width, np.float32),
                "bias_hh": np.asarray(cell.dense_h.bias[...]),
            }
            for name, value in values.items():
                getattr(model, f"{name}_l{number}").copy_(torch.from_numpy(np.array(value)))
    inputs = torch.from_numpy(x).requires_grad_()
    params = dict(model.named_parameters())

    def run() -> Any:
        with torch.backends.mkldnn.flags(enabled=onednn):
            loss = model(inputs)[0].square().mean()
            return torch.autograd.grad(loss, [inputs, *params.values()])

    def gradients() -> Gradients:
        of_x, *of_params = run()
        by_name = dict(zip(params, of_params, strict=True))
        numbers = range(depth)
        return {
            "of_x": np.stack([by_name[f"weight_ih_l{n}"].numpy().T for n in numbers]),
            "of_h": np.stack([by_name[f"weight_hh_l{n}"].numpy().T for n in numbers]),
            "bias": np.stack([by_name[f"bias_hh_l{n}"].numpy() for n in numbers]),
            "x": of_x.numpy(),
        }

    return run, gradients


def difference(one: Gradients, other: Gradients) -> float:
    """The largest relative difference of two arrays, by norm."""
    return max(
        float(np.linalg.norm(one[name] - other[name]) / np.linalg.norm(other[name]))
        for name in other
    )


def measured(case: tuple[int, int, int, int], rounds: int) -> dict[str, list[float]]:
    """Seconds of each arm, round by round."""
    depth, width, length, rows = case
    x = np.random.default_rng(0).normal(size=(rows, length, width)).astype(np.float32)
    layers = Layers(depth, width)
    arms = {
        "nnx.RNN": of_flax(layers, x),
        "spmd.nn.RNNStack": of_flax(Stack(layers), x),
        "Keras on JAX": of_keras(layers, x),
        "torch.nn.LSTM (oneDNN)": of_torch(layers, x, onednn=True),
        "torch.nn.LSTM without oneDNN": of_torch(layers, x, onednn=False),
    }
    expected = arms["nnx.RNN"][1]()
    for name, (_, gradients) in arms.items():
        error = difference(gradients(), expected)
        print(f"{case} {name}: gradients differ by {error:.1e}", flush=True)
        if error > BOUND:
            raise SystemExit(f"{name} computes something else")
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, (run, _) in arms.items():
            began = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - began)
    return seconds


def rows_of(case: tuple[int, int, int, int], seconds: dict[str, list[float]]) -> list[str]:
    depth, width, length, rows = case
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    ours = medians["spmd.nn.RNNStack"]
    lines = []
    for name, times in seconds.items():
        spread = f"{1e3 * min(times):.0f} to {1e3 * max(times):.0f}"
        lines.append(
            f"| {depth} x {width}, {length} steps, {rows} rows | {name} | "
            f"{1e3 * medians[name]:.0f} | {spread} | {ours / medians[name]:.2f} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="Time LSTM layers beside those of others.")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    head = reported.head(
        "LSTM layers on a CPU, forward and backward, float32",
        f"python benchmarks/recurrent.py --rounds {options.rounds}",
        *("jax", "flax", "keras", "torch"),
    )
    lines = [
        "| layers | arm | ms, median | of all rounds | RNNStack / arm |",
        "|---|---|--:|--:|--:|",
    ]
    for case in CASES:
        more = rows_of(case, measured(case, options.rounds))
        print("\n".join(more), flush=True)
        lines += more
    reported.write("recurrent", [*head, *lines])


if __name__ == "__main__":
    main()
