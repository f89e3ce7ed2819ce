"""Two bytes per number."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd.errors import CodecError
from spmd.wire.codec.base import Bucket, Means, RowCodec, State, flat_mean, option


@dataclasses.dataclass(frozen=True)
class Bfloat16(RowCodec):
    """Rounded to bfloat16, as half the bytes of float32.

    `reduce = "one_shot"` is the exchange of `RowCodec`. The payload is bit-cast to uint16: XLA:CPU
    promotes every bfloat16 collective to float32, and no compiler pass may change an integer.
    `reduce = "ring"` is the backend's bfloat16 all-reduce, for comparison: its error grows with the
    number of workers, and no residual can keep what it loses. It is an all-reduce under every
    reduction.

    Args:
      reduce: "one_shot" or "ring".

    Example:
      >>> bool(Bfloat16().decode(Bfloat16().encode(jnp.full((1, 1), 1.001)), 1)[0, 0] == 1.0)
      True
    """

    reduce: str = option(
        "one_shot", lambda value: value in ("one_shot", "ring"), '"one_shot" or "ring"'
    )

    @property
    def reports_loss(self) -> bool:
        """A ring rounds at every hop, where no worker can keep the error."""
        return self.reduce == "one_shot"

    @property
    def error(self) -> float:
        """Eight bits of significand."""
        return 2.0**-8

    def encode(self, rows: jax.Array) -> jax.Array:
        """uint16, the upper half of the rounded float32."""
        # reduce_precision: a plain cast to bfloat16 and back may be optimized away
        rounded = lax.reduce_precision(rows, exponent_bits=8, mantissa_bits=7)
        return lax.bitcast_convert_type(rounded.astype(jnp.bfloat16), jnp.uint16)

    def decode(self, payload: jax.Array, width: int) -> jax.Array:
        """Exact: every uint16 is the upper half of a float32 whose lower half is zero."""
        return lax.bitcast_convert_type(payload, jnp.bfloat16).astype(jnp.float32)

    def mean(self, grads: list[jax.Array], states: list[State], bucket: Bucket) -> Means:
        """One-shot, or the backend's all-reduce."""
        if self.reduce == "one_shot":
            return super().mean(grads, states, bucket)
        sent = []
        for grad in grads:
            # as in `encode`
            rounded = lax.reduce_precision(grad.astype(jnp.float32), 8, 7)
            sent.append(rounded.astype(jnp.bfloat16))
        means = []
        parts = flat_mean(sent, bucket.axes)
        for layout, part in zip(bucket.shard_layouts, parts, strict=True):
            means.append(layout.local_shard(part.reshape(layout.shape)))
        kept = [part.astype(jnp.float32) for part in sent]
        return means, kept, states


def send_rounded(
    params: list[jax.Array], send: Callable[[list[jax.Array]], list[jax.Array]], *, rounded: bool
) -> list[jax.Array]:
    """Return `send(params)`; if `rounded`, float32 arrays are sent as bfloat16."""
    codec = Bfloat16()
    encoded = [rounded and leaf.dtype == jnp.float32 for leaf in params]
    sent = list(params)
    for number, leaf in enumerate(params):
        if encoded[number]:
            sent[number] = codec.encode(leaf)
    received = []
    for leaf, is_encoded in zip(send(sent), encoded, strict=True):
        if is_encoded:
            # bfloat16 encodes each number without the others, so no width is needed.
            received.append(codec.decode(leaf, 0))
        else:
            received.append(leaf)
    return received


@functools.cache
def self_test() -> None:
    """Check that this backend rounds to bfloat16 and does not optimize it away; takes one small
    compilation.

    Raises:
      CodecError: the result is not that of rounding to nearest-even; error feedback would be
        silently wrong.
    """
    # 512 steps of 1/32 of bfloat16's spacing: below, at and above the ties of rounding.
    values = np.float32(1.0) + np.arange(512, dtype=np.float32) * np.float32(2.0**-12)
    codec = Bfloat16()

    def round_trip(x: jax.Array) -> jax.Array:
        return codec.decode(codec.encode(x), x.shape[1])

    rounded = np.asarray(jax.jit(round_trip)(jax.device_put(values[None])))[0]
    expected = values.astype(jnp.bfloat16).astype(np.float32)
    if not np.array_equal(rounded, expected):
        wrong = int((rounded != expected).sum())
        why = f"codec bfloat16: this backend ({jax.default_backend()}) does not round to bfloat16; "
        why += f"{wrong} of {values.size} values differ."
        fix = 'codec = "exact", and report it with the version of jaxlib.'
        raise CodecError(why, fix=fix)
