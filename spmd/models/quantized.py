"""Frozen weights in 8 or 4 bits: blocks of values along dim -2 that share a scale."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd.base.xla import largest_magnitude
from spmd.errors import OptionError, did_you_mean

KINDS = ("int8", "nf4")
# The 16 levels of NF4: quantiles of a normal distribution, of its largest magnitude (Dettmers et
# al., arXiv:2305.14314, appendix E).
NF4_LEVELS = np.array(
    """
    -1.0 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453
    -0.28444138169288635 -0.18477343022823334 -0.09105003625154495 0.0
    0.07958029955625534 0.16093020141124725 0.24611230194568634 0.33791524171829224
    0.44070982933044434 0.5626170039176941 0.7229568362236023 1.0
    """.split(),
    np.float32,
)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes", "scales"],
    meta_fields=["kind", "block", "dtype"],
)
@dataclasses.dataclass(frozen=True)
class Quantized:
    """An array [..., in, out] as codes and the scales of blocks of `block` values along dim -2.

    A pytree: leading dims may be sliced, scanned over and mapped over. Codes and scales can be
    sharded over dims as the array is, if its shards along dim -2 are made of entire blocks.

    Attributes:
      codes: int8[..., in, out]; of "nf4" uint8[..., in / 2, out], in which row 2i is in the lower 4
        bits of row i, and row 2i + 1 in the upper ones.
      scales: float32[..., in / block, out]: a block's largest magnitude, of "int8" divided by 127.
      dtype: of the array that was quantized.
    """

    codes: jax.Array
    scales: jax.Array
    kind: str
    block: int
    dtype: Any

    def __getitem__(self, index: Any) -> jax.Array:
        """Return values of the array."""
        return dequantize(self)[index]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        *leading, rows, out = self.codes.shape
        return (*leading, rows * _rows_per_byte(self.kind), out)


def _rows_per_byte(kind: str) -> int:
    if kind == "nf4":
        return 2
    return 1


def block_problem(shape: tuple[int, ...], kind: str, block: int) -> tuple[str, str] | None:
    """Return the reason why an array of this shape has no blocks of this size along dim -2, and a
    fix; None if it has.

    >>> block_problem((2, 96, 8), "nf4", 64)
    ('dim -2 of [2, 96, 8] has 96 values: 96 / 64 leaves 32.', 'block = 48 or 96.')
    """
    if len(shape) < 2:
        return f"an array of shape {list(shape)} has no dim -2 for blocks.", "matrices only."
    step = _rows_per_byte(kind)
    size = shape[-2]
    if block % step == 0 and size > 0 and size % block == 0:
        return None
    divisors = [count for count in range(step, size + 1, step) if size % count == 0]
    smaller = [f"{count}" for count in divisors if count < block][-1:]
    larger = [f"{count}" for count in divisors if count > block][:1]
    fix = "int8, which takes an odd number of rows."
    if smaller or larger:
        fix = f"block = {' or '.join(smaller + larger)}."
    if block % step:
        return f"blocks of {block} values; {kind} keeps two in a byte.", fix
    return (
        f"dim -2 of {list(shape)} has {size} values: {size} / {block} leaves {size % block}.",
        fix,
    )


def quantize(array: jax.Array, kind: str, block: int = 64) -> Quantized:
    """Round an array [..., in, out] to 8 bits ("int8") or 4 ("nf4"), with a scale for every `block`
    values along dim -2.

    "int8" is within a block's largest magnitude / 254 of the array. "nf4" takes the nearest level,
    of two equally near ones the lower. A block with a NaN or an infinity becomes NaN.

    Raises:
      OptionError: an unknown kind, or a block that does not divide dim -2; names sizes that do.

    Example:
      >>> q = quantize(jnp.array([[1.0], [-0.5], [0.25], [0.0]]), "nf4", block=2)
      >>> q.codes.shape, q.scales.tolist(), dequantize(q).tolist()
      ((2, 1), [[1.0], [0.25]], [[1.0], [-0.5250730514526367], [0.25], [0.0]])
    """
    if kind not in KINDS:
        raise OptionError(f"quantize: unknown kind {kind!r}.", fix=did_you_mean(str(kind), KINDS))
    if problem := block_problem(array.shape, kind, block):
        raise OptionError(f"quantize: {problem[0]}", fix=problem[1])
    *leading, rows, out = array.shape
    values = array.astype(jnp.float32).reshape(*leading, rows // block, block, out)
    largest = largest_magnitude(values, -2)
    scales = largest
    if kind == "int8":
        scales = largest / np.float32(127)
    # A block of zeros would be divided by 0.
    scaled = values / jnp.where(scales > 0, scales, 1)
    if kind == "int8":
        codes = jnp.clip(jnp.round(scaled), -127, 127).astype(jnp.int8).reshape(array.shape)
    else:
        middles = (NF4_LEVELS[1:] + NF4_LEVELS[:-1]) / np.float32(2)
        nearest = functools.reduce(
            jnp.add, [(scaled > middle).astype(jnp.uint8) for middle in middles]
        )
        pairs = nearest.reshape(*leading, rows // 2, 2, out)
        codes = pairs[..., 0, :] | (pairs[..., 1, :] << 4)
    scales = jnp.where(jnp.isfinite(scales), scales, jnp.nan)[..., 0, :]
    return Quantized(codes, scales, kind, block, array.dtype)


def dequantize(quantized: Quantized, dtype: Any = None) -> jax.Array:
    """Return the array [..., in, out] that codes and scales stand for, computed in float32 and
    rounded to `dtype`, by default its own.

    Example:
      >>> dequantize(quantize(jnp.array([[2.0], [-1.0]]), "int8", block=2), jnp.bfloat16).tolist()
      [[2.0], [-1.0078125]]
    """
    codes = quantized.codes
    block = quantized.block
    *leading, rows, out = quantized.shape
    if quantized.kind == "nf4":
        codes = jnp.stack([codes & 15, codes >> 4], axis=-2).reshape(*leading, rows, out)
        values = jnp.asarray(NF4_LEVELS)[codes]
    else:
        values = codes.astype(jnp.float32)
    values = values.reshape(*leading, rows // block, block, out) * quantized.scales[..., None, :]
    if dtype is None:
        dtype = quantized.dtype
    return values.reshape(*leading, rows, out).astype(dtype)
