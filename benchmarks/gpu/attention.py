"""Attention forward and backward by every implementation, and torch's SDPA."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import spmd
from benchmarks.gpu.measure import (
    Part,
    Queued,
    distance,
    on_cpu,
    run_part,
    timed,
    torch_device,
    wait_for,
)

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
    """Output and gradients of causal attention of query, key, value; the last argument is the
    cotangent.
    """

    def run(query: jax.Array, key: jax.Array, value: jax.Array, cotangent: jax.Array) -> Any:
        rows, length = query.shape[:2]
        ids = (
            jnp.broadcast_to(jnp.arange(length) // max(length // 4, 1), (rows, length))
            if segments
            else None
        )

        def forward(*inputs: jax.Array) -> jax.Array:
            return spmd.nn.attention(
                *inputs, causal=True, segment_ids=ids, implementation=implementation
            )

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
                found[f"attention {implementation} {shape}"] = (
                    both_passes(implementation, False),
                    arrays,
                )
    shape = shapes(small)[1 % len(shapes(small))]
    found[f"attention triton {shape}, packed"] = (
        both_passes("triton", True),
        [jax.ShapeDtypeStruct(shape, "bfloat16")] * 4,
    )
    return found


def too_large(implementation: str, shape: tuple[int, ...]) -> bool:
    rows, length, heads, _ = shape
    return implementation == "xla" and 4 * rows * heads * length**2 > MOST_SCORES


def main(part: Part) -> None:
    names = ("chunked", "xla") if jax.default_backend() == "cpu" else IMPLEMENTATIONS
    chosen = [(shape, False) for shape in shapes(part.small)]
    chosen.insert(2, (shapes(part.small)[1 % len(shapes(part.small))], True))
    for number, (shape, packed) in enumerate(chosen):
        case = (
            f"{shape[0]} x {shape[1]} tokens, {shape[2]} heads of "
            f"{shape[3]}{', packed' if packed else ''}"
        )
        if part.begins(case, "all", least=10):
            measure(
                part,
                case,
                [name for name in names if takes(name, shape, packed)],
                shape,
                packed,
                1 / (len(chosen) - number),
            )


def takes(name: str, shape: tuple[int, ...], packed: bool) -> bool:
    return not too_large(name, shape) and not (packed and name == "cudnn")


def measure(
    part: Part, case: str, names: list[str], shape: tuple[int, ...], packed: bool, share: float
) -> None:
    """Check and time the implementations of one case; what is timed is what was checked."""
    random = np.random.default_rng(0)
    inputs = [jnp.asarray(random.normal(size=shape), jnp.bfloat16) for _ in range(4)]
    # heads and rows do not depend on each other: one head of one row is a reference that a CPU
    # computes in seconds
    reference = on_cpu(both_passes("xla", packed), *(one_head(x) for x in inputs))
    arms: dict[str, Callable[[], Any]] = {}
    for name in names:
        run = jax.jit(both_passes(name, packed))
        with part.guarded(case, "ours " + name):
            result, first = timed(run, *inputs)
            error = distance([one_head(x) for x in result], reference)
            if part.check(case, f"{name} against float32 on the CPU", error, 2e-2):
                arms["ours " + name] = Queued(
                    lambda run=run: run(*inputs), jax.block_until_ready, first
                )
    torch, device = torch_device()
    if torch is None:
        part.write(case, failed="torch", error="torch is not installed")
    elif not packed:
        with part.guarded(case, "torch"):
            arms["torch SDPA"] = torch_attention(torch, device, shape)
    part.alternate(case, arms, share)


def one_head(x: jax.Array) -> np.ndarray:
    return np.asarray(x)[:1, :, :1]


def torch_attention(torch: Any, device: Any, shape: tuple[int, ...]) -> Callable[[], None]:
    rows, length, heads, size = shape
    dtype = torch.bfloat16
    inputs = [
        torch.randn(rows, heads, length, size, device=device, dtype=dtype, requires_grad=True)
        for _ in range(3)
    ]
    cotangent = torch.randn(rows, heads, length, size, device=device, dtype=dtype)

    def launch() -> None:
        out = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True)
        torch.autograd.grad(out, inputs, cotangent)

    return Queued(launch, wait_for(torch, device))


if __name__ == "__main__":
    run_part(main)
