"""A loop over time in chunks, each of which is computed again in the backward pass: memory for one
chunk, and for what is carried from chunk to chunk (Chen et al., arXiv:1604.06174).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def run_in_chunks(
    equation: Any,
    chunk: int,
    run_loop: Callable[..., tuple[list[Any], list[Any]]],
    length: int,
    constants: list[Any],
    carried: list[Any],
    xs: list[Any],
) -> tuple[list[Any], list[Any]]:
    """Return what `run_loop` returns, computed in chunks of at most `chunk` steps, and again in the
    backward pass. Chunks are as equal as they can be; the last one in time may have fewer steps.
    """
    reverse = bool(equation.params["reverse"])
    size = -(-length // -(-length // chunk))
    count, remainder = divmod(length, size)
    end = count * size
    # JAX adds up the gradients of all chunks in the dtype of the constants.
    wide = [_in_float32(x) for x in constants]

    def run_chunk(
        steps: int, wide: list[Any], carried: list[Any], xs: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        narrow = list(wide)
        for place, constant in enumerate(constants):
            if wide[place].dtype != constant.dtype:
                narrow[place] = wide[place].astype(constant.dtype)
        return run_loop(steps, narrow, carried, xs)

    def run_equal_chunks(carried: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        # A loop over several chunks keeps XLA from merging the two computations; one over a single
        # chunk is inlined.
        recomputed = jax.checkpoint(functools.partial(run_chunk, size), prevent_cse=count == 1)
        by_chunk = [x.reshape(count, size, *x.shape[1:]) for x in xs]
        carried, outputs = lax.scan(
            functools.partial(recomputed, wide), carried, by_chunk, length=count, reverse=reverse
        )
        return carried, [y.reshape(end, *y.shape[2:]) for y in outputs]

    def run_remainder(carried: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        recomputed = jax.checkpoint(functools.partial(run_chunk, remainder))
        return recomputed(wide, carried, xs)

    if not remainder:
        return run_equal_chunks(carried, xs)
    first_steps = [x[:end] for x in xs]
    last_steps = [x[end:] for x in xs]
    if reverse:
        carried, last_outputs = run_remainder(carried, last_steps)
        carried, outputs = run_equal_chunks(carried, first_steps)
    else:
        carried, outputs = run_equal_chunks(carried, first_steps)
        carried, last_outputs = run_remainder(carried, last_steps)
    pairs = zip(outputs, last_outputs, strict=True)
    return carried, [jnp.concatenate(pair) for pair in pairs]


def _in_float32(x: Any) -> Any:
    """Return floats of fewer than 32 bits in float32, and all else as it is."""
    if jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits < 32:
        return x.astype(jnp.float32)
    return x
