"""LSTM and GRU layers forward and backward: `spmd.nn.RNNStack`, `nnx.RNN`, and torch's, which are cuDNN's."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.gpu import cases
from benchmarks.gpu.measure import Part, distance, on_cpu, run_part, torch_device


class Plain(nnx.Module):
    """The layers as flax has them."""

    def __init__(self, kind: str, width: int, depth: int):
        cell = nnx.OptimizedLSTMCell if kind == "LSTM" else nnx.GRUCell
        self.layers = nnx.List([nnx.RNN(cell(width, width, rngs=nnx.Rngs(number))) for number in range(depth)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return x


def both_passes(model: nnx.Module, dtype: str) -> tuple[Callable[..., Any], Any]:
    """The gradients by parameters and input of a mean of squares, as a function of the model's arrays and the input; and the arrays."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params: Any, x: jax.Array, rest: Any) -> jax.Array:
        cast = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
        rest = jax.tree.map(lambda leaf: leaf, rest)  # variables of this trace: cells count their random numbers
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
            abstract = nnx.eval_shape(lambda model=model, kind=kind, width=width, depth=depth: model(kind, width, depth))
            function, params = both_passes(abstract, dtype)
            found[f"{name} {cases.recurrent_name(*case)}"] = function, [params, jax.ShapeDtypeStruct((rows, length, width), "float32")]
    return found


def smaller(case: tuple[Any, ...]) -> tuple[Any, ...]:
    kind, depth, _, _, dtype = case
    return kind, min(depth, 2), 16, 8, dtype


def main(part: Part) -> None:
    random = np.random.default_rng(0)
    for number, case in enumerate(cases.RECURRENT):
        name = cases.recurrent_name(*case)
        if part.left < 8 and not part.small:
            part.write(name, failed="all", error=f"not begun: {part.left:.0f} s were left")
            continue
        kind, depth, width, length, dtype = smaller(case) if part.small else case
        rows = 4 if part.small else cases.RECURRENT_ROWS
        x = jnp.asarray(random.normal(size=(rows, length, width)), jnp.float32)
        arms = {}
        for arm, model in (("ours", cases.Recurrent(kind, width, depth)), ("nnx.RNN", Plain(kind, width, depth))):
            function, params = both_passes(model, dtype)
            exact, _ = both_passes(model, "float32")
            few = x[:2, :8]
            bound = 5e-2 if dtype == "bfloat16" else 5e-3  # on GPUs float32 products may be in TF32
            error = distance(jax.jit(function)(params, few), on_cpu(exact, params, few))
            if part.check(name, f"{arm} against float32 on the CPU", error, bound):
                run = jax.jit(function)
                arms[arm] = lambda run=run, params=params: jax.block_until_ready(run(params, x))
        torch, device = torch_device()
        if torch is None:
            part.write(name, failed="torch", error="torch is not installed")
        else:
            with part.guarded(name, "torch"):
                arms["torch (cuDNN)"] = torch_layers(torch, device, kind, width, depth, dtype, rows, length)
        part.alternate(name, arms, 1 / (len(cases.RECURRENT) - number))


def torch_layers(torch: Any, device: Any, kind: str, width: int, depth: int, dtype: str, rows: int, length: int) -> Callable[[], None]:
    of_kind = torch.nn.LSTM if kind == "LSTM" else torch.nn.GRU
    layers = of_kind(width, width, depth, batch_first=True, device=device, dtype=getattr(torch, dtype))
    x = torch.randn(rows, length, width, device=device, dtype=getattr(torch, dtype), requires_grad=True)

    def run() -> None:
        out = layers(x)[0]
        loss = out.float().square().mean()
        torch.autograd.grad(loss, [x, *layers.parameters()])
        if device.type == "cuda":
            torch.cuda.synchronize()

    return run


if __name__ == "__main__":
    run_part(main)
