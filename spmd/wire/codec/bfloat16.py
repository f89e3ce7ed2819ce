"""Two bytes per number."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd.errors import CodecError
from spmd.wire import collectives
from spmd.wire.codec.base import Bucket, Means, RowCodec, State


@dataclasses.dataclass(frozen=True)
class Bfloat16(RowCodec):
    """Rounded to bfloat16, as half the bytes of float32.

    `reduce = "one_shot"` is the exchange of `RowCodec`. The payload is bit-cast to uint16: XLA:CPU widens every bfloat16 collective to
    float32, and no compiler pass may touch an integer. `reduce = "ring"` is the backend's own bfloat16 all-reduce, for
    comparison: its error grows with the number of workers, and nobody can keep what it loses. It is an all-reduce under every reduction.

    Example:
      >>> bool(Bfloat16().decode(Bfloat16().encode(jnp.full((1, 1), 1.001)), 1)[0, 0] == 1.0)
      True
    """

    reduce: str = "one_shot"

    @property
    def error(self) -> float:
        """Eight bits of significand."""
        return 2.0**-8

    def encode(self, rows: jax.Array) -> jax.Array:
        """uint16, the upper half of the rounded float32."""
        # reduce_precision: a plain cast to bfloat16 and back may be taken for nothing and removed
        rounded = lax.reduce_precision(rows, exponent_bits=8, mantissa_bits=7)
        return lax.bitcast_convert_type(rounded.astype(jnp.bfloat16), jnp.uint16)

    def decode(self, payload: jax.Array, width: int) -> jax.Array:
        """Every uint16 is a float32 whose lower half is zero."""
        return lax.bitcast_convert_type(payload, jnp.bfloat16).astype(jnp.float32)

    def mean(self, grads: list[jax.Array], states: list[State], bucket: Bucket) -> Means:
        """One-shot, or the backend's own all-reduce."""
        if self.reduce == "one_shot":
            return super().mean(grads, states, bucket)
        sent = [lax.reduce_precision(grad.astype(jnp.float32), 8, 7).astype(jnp.bfloat16) for grad in grads]
        whole = jnp.concatenate([part.reshape(-1) for part in sent])
        total = collectives.all_reduce(whole, bucket.axes).astype(jnp.float32) / collectives.worker_count(bucket.axes)
        ends = np.cumsum([part.size for part in sent])[:-1].tolist()
        means = [part.reshape(cut.shape) for part, cut in zip(jnp.split(total, ends), bucket.shard_layouts, strict=True)]
        return [cut.own(mean) for cut, mean in zip(bucket.shard_layouts, means, strict=True)], [x.astype(jnp.float32) for x in sent], states


@functools.cache
def self_test() -> None:
    """Prove on the backend in hand that rounding happens and is not optimised away; takes one small compilation.

    Raises:
      CodecError: this backend returns other bits than rounding to nearest-even gives; error feedback would be wrong in silence.
    """
    values = np.float32(1.0) + np.arange(512, dtype=np.float32) * np.float32(2.0**-12)
    codec = Bfloat16()
    found = np.asarray(jax.jit(lambda x: codec.decode(codec.encode(x), x.shape[1]))(jax.device_put(values[None])))[0]
    wanted = values.astype(jnp.bfloat16).astype(np.float32)
    if not np.array_equal(found, wanted):
        raise CodecError(
            (
                f"codec bfloat16: this backend ({jax.default_backend()}) does not round to bfloat16; {int((found != wanted).sum())} of "
                f"{values.size} values differ."
            ),
            fix='codec = "exact", and report it with the version of jaxlib.',
        )
