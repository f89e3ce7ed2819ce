"""One byte per number, and one scale per block."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from spmd.base.xla import largest_magnitude
from spmd.wire.codec.base import RowCodec, blocks, unblocks, whole_number


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
        integers = jnp.round(values / jnp.where(scale == 0, 1.0, scale))
        return {
            "values": unblocks(integers.astype(jnp.int8), rows.shape[1]),
            "scale": jnp.where(jnp.isfinite(scale), scale, jnp.nan),
        }

    def decode(self, payload: Any, width: int) -> jax.Array:
        """Values times scales."""
        return unblocks(
            blocks(payload["values"].astype(jnp.float32), min(self.block, width))
            * payload["scale"],
            width,
        )
