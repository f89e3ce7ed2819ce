"""One byte per number, and one scale per block."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from spmd.base.xla import largest_magnitude
from spmd.wire.codec.base import (
    RowCodec,
    blocks,
    finite_or_nan,
    scaled_blocks,
    unblocks,
    whole_number,
)


@dataclasses.dataclass(frozen=True)
class Int8(RowCodec):
    """Integers from -127 to 127 times the block's scale, its largest magnitude / 127 (block-wise,
    as ZeRO++, arXiv:2306.10209).

    Rounding is to nearest: |error| <= scale / 2 per element. A block with a NaN or infinity is
    decoded as NaN.

    Args:
      block: elements that share a scale.

    Example:
      >>> Int8(block=4).decode(
      ...     Int8(block=4).encode(jnp.array([[127.0, 1.4, -3.0, 0.0]])), 4
      ... ).tolist()
      [[127.0, 1.0, -3.0, 0.0]]
    """

    block: int = whole_number(256)

    @property
    def error(self) -> float:
        """Half a scale for every element of a block; the block's norm is at least its largest
        magnitude.
        """
        return math.sqrt(self.block) / 254

    def encode(self, rows: jax.Array) -> Any:
        """int8 values and float32 scales."""
        values = blocks(rows, min(self.block, rows.shape[1]))
        scale = largest_magnitude(values, -1) / 127
        # The scale of a block of zeros is 0; dividing by it would give NaN.
        # A NaN becomes some integer. The scale, which is NaN then, says that the block is not
        # finite.
        integers = jnp.round(values / jnp.where(scale == 0, 1.0, scale)).astype(jnp.int8)
        return {"values": unblocks(integers, rows.shape[1]), "scale": finite_or_nan(scale)}

    def decode(self, payload: Any, width: int) -> jax.Array:
        """Values times scales."""
        return scaled_blocks(payload["values"].astype(jnp.float32), payload["scale"], self.block)
