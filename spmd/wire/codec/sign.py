"""One bit per number."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from spmd.wire.codec.base import RowCodec, blocks, unblocks, whole_number


@dataclasses.dataclass(frozen=True)
class Sign(RowCodec):
    """Signs, eight to a byte, times the block's mean magnitude (scaled sign, Karimireddy et al.
    2019, arXiv:1901.09847).

    |x - decoded|^2 = (1 - phi) |x|^2 with phi = |x|_1^2 / (n |x|_2^2), so it contracts; without
    error feedback it does not converge in general. The sign of 0 is +. The zeros that pad a
    gradient's last rows count in the mean.

    Args:
      block: elements that share a magnitude.

    Example:
      >>> Sign(block=8).decode(
      ...     Sign(block=8).encode(jnp.array([[3.0, -1.0, 2.0, -2.0, 1.0, 1.0, -3.0, 3.0]])), 8
      ... ).tolist()
      [[2.0, -2.0, 2.0, -2.0, 2.0, 2.0, -2.0, 2.0]]
    """

    biased: ClassVar[bool] = True

    block: int = whole_number(1024)

    @property
    def error(self) -> float:
        """phi is above 0, but may be arbitrarily small."""
        return 1.0

    def encode(self, rows: jax.Array) -> Any:
        """uint8, bit k for element k of eight, and float32 scales, one per block."""
        values = blocks(rows, min(self.block, rows.shape[1]))
        # the padding of the last block is not counted
        size = values.shape[2]
        starts = size * jnp.arange(values.shape[1], dtype=jnp.float32)
        counts = jnp.minimum(size, rows.shape[1] - starts)[:, None]
        scale = jnp.abs(values).sum(-1, keepdims=True) / counts
        octets = blocks((rows >= 0).astype(jnp.uint8), 8)
        # Without a dtype, the sum of uint8 is uint32 in JAX: four times the bytes.
        packed = jnp.left_shift(octets, jnp.arange(8, dtype=jnp.uint8)).sum(-1, dtype=jnp.uint8)
        return {"bits": packed, "scale": scale}

    def decode(self, payload: Any, width: int) -> jax.Array:
        """Plus or minus the scale."""
        shifted = jnp.right_shift(payload["bits"][..., None], jnp.arange(8, dtype=jnp.uint8))
        bits = shifted & jnp.uint8(1)
        bits = blocks(unblocks(bits, width), min(self.block, width))
        return unblocks(jnp.where(bits == 1, payload["scale"], -payload["scale"]), width)
