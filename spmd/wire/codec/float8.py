"""One byte per number, with an exponent of four bits."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmd.base.xla import largest_magnitude
from spmd.wire.codec.base import (
    RowCodec,
    blocks,
    finite_or_nan,
    scaled_blocks,
    unblocks,
    whole_number,
)

LARGEST = 448.0  # of float8_e4m3fn


@dataclasses.dataclass(frozen=True)
class Float8(RowCodec):
    """float8_e4m3fn times the block's scale (its largest magnitude / 448). Small values keep their
    relative precision.

    The payload is bit-cast to uint8. A block with a NaN or infinity is decoded as NaN.

    Args:
      block: elements that share a scale.

    Example:
      >>> Float8(block=4).decode(
      ...     Float8(block=4).encode(jnp.array([[448.0, 1.06, -0.25, 0.0]])), 4
      ... ).tolist()
      [[448.0, 1.0, -0.25, 0.0]]
    """

    block: int = whole_number(256)

    @property
    def error(self) -> float:
        """Four bits of significand. Below 2^-6 the step is 2^-9: at most 2^-10 / 448 of the largest
        element, for each element.
        """
        return 2.0**-4 + self.block**0.5 * 2.0**-10 / LARGEST

    def encode(self, rows: jax.Array) -> Any:
        """uint8 bit patterns and float32 scales."""
        values = blocks(rows, min(self.block, rows.shape[1]))
        scale = largest_magnitude(values, -1) / LARGEST
        # The scale of a block of zeros is 0; dividing by it would give NaN.
        scaled = values / jnp.where(scale == 0, 1.0, scale)
        # float8_e4m3fn has no infinity: above its largest number a cast makes NaN
        scaled = jnp.clip(scaled, -LARGEST, LARGEST).astype(jnp.float8_e4m3fn)
        bits = lax.bitcast_convert_type(scaled, jnp.uint8)
        return {"values": unblocks(bits, rows.shape[1]), "scale": finite_or_nan(scale)}

    def decode(self, payload: Any, width: int) -> jax.Array:
        """Values times scales."""
        values = lax.bitcast_convert_type(payload["values"], jnp.float8_e4m3fn)
        return scaled_blocks(values.astype(jnp.float32), payload["scale"], self.block)
