"""The numbers of largest magnitude."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from spmd.wire.codec.base import RowCodec, option


@dataclasses.dataclass(frozen=True)
class TopK(RowCodec):
    """The share `keep` of each row's elements, those of largest magnitude, as values and indices.

    A row is the part of one gradient that one worker owns, so the elements are chosen per owner.
    Bytes do not grow with the number of workers, as they do where every worker gathers the choice
    of all others (Deep Gradient Compression, arXiv:1712.01887). The owner chooses again from the
    sum.

    Args:
      keep: the share of elements that are sent, from 0 to 1.

    Example:
      >>> TopK(keep=0.5).decode(
      ...     TopK(keep=0.5).encode(jnp.array([[1.0, -4.0, 3.0, 2.0]])), 4
      ... ).tolist()
      [[0.0, -4.0, 3.0, 0.0]]
    """

    biased: ClassVar[bool] = True

    keep: float = option(
        0.01,
        lambda value: type(value) in (int, float) and 0 < value <= 1,
        "a fraction of the elements, above 0, at most 1",
    )

    @property
    def error(self) -> float:
        """No dropped element is larger than a kept one: |dropped|^2 <= (1 - keep) |x|^2."""
        return (1 - self.keep) ** 0.5

    def encode(self, rows: jax.Array) -> Any:
        """float32 values and int32 indices, [n, k]."""
        # The number kept of each row: the share, rounded up, and at least one.
        count = max(1, -int(-rows.shape[1] * self.keep // 1))
        # `lax.top_k` sorts NaN above infinity, so a NaN is among what is sent.
        _, indices = lax.top_k(jnp.abs(rows), count)
        values = jnp.take_along_axis(rows, indices, axis=1)
        return {"values": values, "indices": indices.astype(jnp.int32)}

    def decode(self, payload: Any, width: int) -> jax.Array:
        """The values at their indices, zero elsewhere."""
        values, indices = payload["values"], payload["indices"]
        numbers = jnp.arange(values.shape[0])[:, None]
        rows = jnp.zeros((values.shape[0], width), jnp.float32)
        return rows.at[numbers, indices].set(values)
