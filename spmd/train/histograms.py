"""Histograms of parameters and gradients, counted on the devices from arrays that stay sharded."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd.base.tree import Tree, describe, flatten
from spmd.errors import OptionError

BINS = 64
NAN, INFINITE = BINS, BINS + 1  # places of what is in no bin
MOST = 2**32  # elements, from which a count would overflow
# exponents of two: the least width of a bin; the most bins between 0 and the largest magnitude
SMALLEST, FINEST = -100, 20


@dataclasses.dataclass(frozen=True)
class Histogram:
    """How many elements of an array lie in each of at most 64 bins of equal width.

    The width is a power of two, and edges are multiples of it. So edges are exact, and bins of
    other steps and layers are the same, or halves or unions of them. A bin has its lower edge, and
    not its upper one; before and after those in `counts` there is nothing. A magnitude below
    1.2e-38 counts as 0, as in most of what XLA computes.

    Attributes:
      low: the lower edge of the first bin.
      width: of a bin.
      counts: elements in each bin.
      nan: elements that are NaN, which are in no bin.
      inf: elements that are infinite, which are in no bin.

    Example:
      >>> histogram = Histogram(low=-0.5, width=0.5, counts=[1, 0, 2], nan=1)
      >>> histogram.edges
      [-0.5, 0.0, 0.5, 1.0]
    """

    low: float
    width: float
    counts: list[int]
    nan: int = 0
    inf: int = 0

    @property
    def edges(self) -> list[float]:
        """Of the bins, one more than there are bins."""
        return [self.low + self.width * number for number in range(len(self.counts) + 1)]


def count_tree(tree: Tree, stacks: Mapping[str, int]) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Counts by path, under a trace: uint32[layers, 66], and int32[layers, 2]: the width of bins is
    two to the second number, and their lowest edge the first number times the width.

    Arrays are counted where they lie, and only counts are reduced over devices. `layers` is 1 for a
    path that is not in `stacks`.
    """
    with jax.named_scope("histograms"):
        return {
            path: _count(leaf if path in stacks else leaf[None])
            for path, leaf in flatten(tree).items()
        }


def _count(layers: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of each layer of an array [layers, ...]."""
    values = jnp.abs(layers) if jnp.iscomplexobj(layers) else layers
    values = values.astype(jnp.float32)
    finite, dims = jnp.isfinite(values), tuple(range(1, values.ndim))
    low = jnp.where(finite, values, jnp.inf).min(dims, initial=jnp.inf)
    high = jnp.where(finite, values, -jnp.inf).max(dims, initial=-jnp.inf)
    low, high = (jnp.where(low <= high, edge, jnp.float32(0)) for edge in (low, high))
    # 64 bins of at least (high - low) / 62 reach from a multiple of their width below `low` to
    # above `high`
    exponent, magnitude = (
        _exponent(high / (BINS - 2) - low / (BINS - 2)),
        jnp.maximum(jnp.abs(low), jnp.abs(high)),
    )
    exponent = jnp.clip(jnp.maximum(exponent, _exponent(magnitude) - FINEST), SMALLEST, 126)
    exponent = jnp.where(magnitude == 0, 0, exponent)  # as wide as for 1, where all are 0
    first = _multiple(low, exponent)

    def of_layer(
        values: jax.Array, finite: jax.Array, exponent: jax.Array, first: jax.Array
    ) -> jax.Array:
        place = _multiple(values, exponent) - first
        place = jnp.where(
            finite, place, jnp.where(jnp.isnan(values), jnp.float32(NAN), jnp.float32(INFINITE))
        )
        return jnp.zeros(BINS + 2, jnp.uint32).at[place.astype(jnp.int32)].add(jnp.uint32(1))

    return jax.vmap(of_layer)(values, finite, exponent, first), jnp.stack(
        [first.astype(jnp.int32), exponent], axis=1
    )


def _exponent(value: jax.Array) -> jax.Array:
    """The least e for which 2**e is above a positive float32; below the exponent of any normal
    number for 0.
    """
    return (lax.bitcast_convert_type(value, jnp.int32) >> 23) - 126


def _multiple(values: jax.Array, exponent: jax.Array) -> jax.Array:
    """The largest multiple of 2**exponent that is not above each value, in units of it."""
    floored = jnp.floor(values * _power_of_two(-exponent))
    # of a product that was too small, and flushed to 0
    return jnp.where((values < 0) & (floored == 0), jnp.float32(-1), floored)


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """2**exponent as float32, exactly, from -126 to 127."""
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def read_counts(
    kind: str, counts: Mapping[str, tuple[Any, Any]], stacks: Mapping[str, int]
) -> dict[str, Histogram]:
    """Histograms by name, from `count_tree`'s arrays on the host: "gradients/up/kernel"; of a
    stack's layer "gradients/blocks/kernel/3".
    """
    found = {}
    for path, (rows, bins) in counts.items():
        for layer, (row, (first, exponent)) in enumerate(
            zip(np.asarray(rows).tolist(), np.asarray(bins).tolist(), strict=True)
        ):
            used = [number for number in range(BINS) if row[number]] or [0]
            within = row[used[0] : used[-1] + 1]
            width = 2.0**exponent
            histogram = Histogram((first + used[0]) * width, width, within, row[NAN], row[INFINITE])
            found[f"{kind}/{path}/{layer}" if path in stacks else f"{kind}/{path}"] = histogram
    return found


def counts_not_finite(histograms: Mapping[str, Histogram]) -> dict[str, int]:
    """How many elements are NaN or infinite, by "NAME/nan" and "NAME/inf"; counts of 0 are left
    out.

    >>> counts_not_finite({"gradients/w": Histogram(0.0, 1.0, [3], nan=2)})
    {'gradients/w/nan': 2}
    """
    counts = {
        f"{name}/{kind}": getattr(histogram, kind)
        for name, histogram in histograms.items()
        for kind in ("nan", "inf")
    }
    return {name: count for name, count in counts.items() if count}


def check_countable(params: Tree, stacks: Mapping[str, int]) -> None:
    """Check that no count can overflow.

    Raises:
      OptionError: an array, or a layer of a stack, has 2**32 elements or more.
    """
    for path, leaf in flatten(params).items():
        if leaf.size // (stacks.get(path, 1) or 1) >= MOST:
            raise OptionError(
                f"watch: {path} {describe(leaf)} has {leaf.size:,} elements, and counts end at "
                "2**32.",
                fix="watch=None.",
            )
