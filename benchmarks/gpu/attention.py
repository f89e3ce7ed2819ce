"""Attention forward and backward by every implementation, and torch's SDPA."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import spmd
from benchmarks.gpu.measure import Part, distance, on_cpu, run_part, torch_device

CASES = (  # heads, size of a head, tokens of a row; rows are as many as make TOKENS
    (12, 64, 1024),
    (16, 128, 2048),
    (16, 128, 8192),
    (32, 64, 4096),
)
TOKENS = 16384
MOST_SCORES = 2**31  # bytes of float32 scores up to which "xla" is measured
IMPLEMENTATIONS = ("cudnn", "triton", "chunked", "xla")


def shapes(small: bool) -> list[tuple[int, int, int, int]]:
    """Rows, tokens, heads, size of a head."""
    if small:
        return [(2, 64, 4, 16)]
    return [(TOKENS // length, length, heads, size) for heads, size, length in CASES]


def both_passes(implementation: str, segments: bool) -> Callable[..., Any]:
    """Output and gradients of causal attention of query, key, value; the last argument is the cotangent."""

    def run(query: jax.Array, key: jax.Array, value: jax.Array, cotangent: jax.Array) -> Any:
        rows, length = query.shape[:2]
        ids = jnp.broadcast_to(jnp.arange(length) // max(length // 4, 1), (rows, length)) if segments else None

        def forward(*inputs: jax.Array) -> jax.Array:
            return spmd.nn.attention(*inputs, causal=True, segment_ids=ids, implementation=implementation)

        out, back = jax.vjp(forward, query, key, value)
        return out, *back(cotangent)

    return run


def programs(small: bool) -> dict[str, tuple[Callable[..., Any], list[Any]]]:
    """What is compiled: functions, with the shapes of their arguments."""
    found = {}
    for shape in shapes(small):
        for implementation in IMPLEMENTATIONS:
            if not too_large(implementation, shape):
                arrays = [jax.ShapeDtypeStruct(shape, "bfloat16")] * 4
                found[f"attention {implementation} {shape}"] = both_passes(implementation, False), arrays
    shape = shapes(small)[1 % len(shapes(small))]
    found[f"attention triton {shape}, packed"] = both_passes("triton", True), [jax.ShapeDtypeStruct(shape, "bfloat16")] * 4
    return found


def too_large(implementation: str, shape: tuple[int, ...]) -> bool:
    rows, length, heads, _ = shape
    return implementation == "xla" and 4 * rows * heads * length**2 > MOST_SCORES


def main(part: Part) -> None:
    names = ("chunked", "xla") if jax.default_backend() == "cpu" else IMPLEMENTATIONS
    random = np.random.default_rng(0)
    chosen = [(shape, False) for shape in shapes(part.small)]
    chosen.insert(2, (shapes(part.small)[1 % len(shapes(part.small))], True))
    for number, (shape, packed) in enumerate(chosen):
        case = f"{shape[0]} x {shape[1]} tokens, {shape[2]} heads of {shape[3]}{', packed' if packed else ''}"
        inputs = [jnp.asarray(random.normal(size=shape), jnp.bfloat16) for _ in range(4)]
        few = [x[:1, : min(1024, shape[1])] for x in inputs]
        reference = on_cpu(both_passes("xla", packed), *few)
        arms = {}
        for name in names:
            if too_large(name, shape) or (packed and name == "cudnn"):
                continue
            run = jax.jit(both_passes(name, packed))
            if part.check(case, f"{name} against float32 on the CPU", distance(run(*few), reference), 2e-2):
                arms["ours " + name] = lambda run=run: jax.block_until_ready(run(*inputs))
        torch, device = torch_device()
        if torch is None:
            part.write(case, failed="torch", error="torch is not installed")
        elif not packed:
            with part.guarded(case, "torch"):
                arms["torch SDPA"] = torch_attention(torch, device, shape)
        part.alternate(case, arms, 1 / (len(chosen) - number))


def torch_attention(torch: Any, device: Any, shape: tuple[int, ...]) -> Callable[[], None]:
    rows, length, heads, size = shape
    dtype = torch.bfloat16
    inputs = [torch.randn(rows, heads, length, size, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]
    cotangent = torch.randn(rows, heads, length, size, device=device, dtype=dtype)

    def run() -> None:
        out = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True)
        torch.autograd.grad(out, inputs, cotangent)
        if device.type == "cuda":
            torch.cuda.synchronize()

    return run


if __name__ == "__main__":
    run_part(main)
