"""Rotary position embeddings: the frequencies that a config.json asks for, and the rotation.

Sources: Su et al., RoFormer, arXiv:2104.09864, with the two halves of a head as pairs, as in
GPT-NeoX; linear scaling (Chen et al., arXiv:2306.15595); YaRN (Peng et al., arXiv:2309.00071,
equations 17-22); Llama 3.1 (arXiv:2407.21783), whose scaling is in its code only.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# What each kind of `rope_scaling` reads, with the default of a key that may be missing; ... where
# it may not.
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": ...},
    "llama3": {
        "factor": ...,
        "low_freq_factor": ...,
        "high_freq_factor": ...,
        "original_max_position_embeddings": None,
    },
    "yarn": {
        **{
            "factor": ...,
            "original_max_position_embeddings": None,
            "attention_factor": None,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        },
        **{"mscale": None, "mscale_all_dim": None, "truncate": True},
    },
}


@dataclasses.dataclass(frozen=True)
class Rope:
    """A rotation by position.

    Attributes:
      frequencies: radians per position, of each pair of a head's numbers.
      factor: cosines and sines are multiplied by it.

    Example:
      >>> Rope.of(100.0, 4)
      Rope(frequencies=(1.0, 0.1), factor=1.0)
    """

    frequencies: tuple[float, ...]
    factor: float = 1.0

    @classmethod
    def of(cls, base: float, head_dim: int, kind: str = "default", **options: Any) -> "Rope":
        """The rotation of a kind in `KINDS`, with its options."""
        plain = base ** -(np.arange(0, head_dim, 2) / head_dim)
        scalings = {"linear": _linear, "llama3": _llama3, "yarn": _yarn}
        scale: Any = scalings.get(kind, _unscaled)
        scaled, factor = scale(plain, base, **options)
        return cls(tuple(map(float, scaled)), float(factor))

    def table(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Cosines and sines, float32[rows, length, head_dim / 2], of positions int32[rows,
        length].
        """
        # bfloat16 does not hold every whole number above 256.
        frequencies = jnp.asarray(self.frequencies, jnp.float32)
        angles = positions[..., None].astype(jnp.float32) * frequencies
        return jnp.cos(angles) * self.factor, jnp.sin(angles) * self.factor


def rotate(x: jax.Array, table: tuple[jax.Array, jax.Array]) -> jax.Array:
    """x [rows, length, heads, head_dim] rotated by a `Rope.table`, in float32.

    >>> x = jnp.array([1.0, 0.0]).reshape(1, 1, 1, 2)
    >>> rotate(x, Rope((math.pi / 2,)).table(jnp.array([[1]]))).round(3).ravel().tolist()
    [-0.0, 1.0]
    """
    cos, sin = (part[:, :, None, :] for part in table)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated_first = first * cos - second * sin
    rotated_second = second * cos + first * sin
    rotated = jnp.concatenate([rotated_first, rotated_second], axis=-1)
    return rotated.astype(x.dtype)


def _unscaled(plain: np.ndarray, base: float) -> tuple[np.ndarray, float]:
    return plain, 1.0


def _linear(plain: np.ndarray, base: float, *, factor: float) -> tuple[np.ndarray, float]:
    return plain / factor, 1.0


def _llama3(
    plain: np.ndarray,
    base: float,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: int,
) -> tuple[np.ndarray, float]:
    """Frequencies with few turns in the original length are divided, those with many kept, and
    those between interpolated.
    """
    turns = original_max_position_embeddings * plain / (2 * math.pi)
    undivided = np.clip((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0, 1)
    return plain * (undivided + (1 - undivided) / factor), 1.0


def _yarn(
    plain: np.ndarray,
    base: float,
    *,
    factor: float,
    original_max_position_embeddings: int,
    attention_factor: float | None,
    beta_fast: float,
    beta_slow: float,
    mscale: float | None,
    mscale_all_dim: float | None,
    truncate: bool,
) -> tuple[np.ndarray, float]:
    """Interpolate frequencies as `_llama3` does, but linearly in the pair's number; scores are
    multiplied by `attention_factor` squared (YaRN, arXiv:2309.00071).
    """
    dim = 2 * len(plain)

    def pair(turns: float) -> float:
        """The number of the pair with so many turns in the original length."""
        ratio = original_max_position_embeddings / (turns * 2 * math.pi)
        return dim * math.log(ratio) / (2 * math.log(base))

    def magnitude(scale: float) -> float:
        if factor <= 1:
            return 1.0
        return 0.1 * scale * math.log(factor) + 1

    low, high = pair(beta_fast), pair(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    # As in YaRN's code, to avoid a division by 0.
    span = high - low or 0.001
    divided = np.clip((np.arange(dim // 2) - low) / span, 0, 1)
    if attention_factor is None:
        attention_factor = magnitude(1.0)
        if mscale and mscale_all_dim:
            attention_factor = magnitude(mscale) / magnitude(mscale_all_dim)
    return plain * (divided / factor + 1 - divided), attention_factor
