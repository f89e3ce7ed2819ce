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
NAN, INFINITE = BINS, BINS + 1  # places of elements that are in no bin
MOST = 2**32  # elements, from which a count in uint32 would overflow
# exponents of two: the least width of a bin; the most bins between 0 and the largest magnitude
SMALLEST, FINEST = -100, 20


@dataclasses.dataclass(frozen=True)
class Histogram:
    """The numbers of elements of an array in each of at most 64 bins of equal width.

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
        """The edges of the bins, one more than there are bins."""
        return [self.low + self.width * number for number in range(len(self.counts) + 1)]


def count_tree(tree: Tree, stacks: Mapping[str, int]) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Return counts by path, under a trace: uint32[layers, 66], and int32[layers, 2]: the width of
    bins is two to the second number, and their lowest edge the first number times the width.

    Arrays are counted where they lie, and only counts are reduced over devices. `layers` is 1 for a
    path that is not in `stacks`.
    """
    counts = {}
    with jax.named_scope("histograms"):
        for path, leaf in flatten(tree).items():
            # one layer, outside of stacks
            if path not in stacks:
                leaf = leaf[None]
            counts[path] = _count(leaf)
    return counts


def _count(layers: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the counts and the bins of each layer of an array [layers, ...]."""
    values = layers
    if jnp.iscomplexobj(layers):
        values = jnp.abs(layers)
    values = values.astype(jnp.float32)
    finite = jnp.isfinite(values)
    dims = tuple(range(1, values.ndim))
    least = jnp.where(finite, values, jnp.inf).min(dims, initial=jnp.inf)
    most = jnp.where(finite, values, -jnp.inf).max(dims, initial=-jnp.inf)
    # least > most where no element is finite
    low = jnp.where(least <= most, least, jnp.float32(0))
    high = jnp.where(least <= most, most, jnp.float32(0))
    # 64 bins of at least (high - low) / 62 reach from a multiple of their width below `low` to
    # above `high`; divided first, because high - low may overflow
    exponent = _exponent(high / (BINS - 2) - low / (BINS - 2))
    magnitude = jnp.maximum(jnp.abs(low), jnp.abs(high))
    exponent = jnp.clip(jnp.maximum(exponent, _exponent(magnitude) - FINEST), SMALLEST, 126)
    # as wide as for 1, where all are 0
    exponent = jnp.where(magnitude == 0, 0, exponent)
    first = _multiple(low, exponent)

    def count_layer(
        values: jax.Array, finite: jax.Array, exponent: jax.Array, first: jax.Array
    ) -> jax.Array:
        place = _multiple(values, exponent) - first
        outside = jnp.where(jnp.isnan(values), jnp.float32(NAN), jnp.float32(INFINITE))
        place = jnp.where(finite, place, outside)
        return jnp.zeros(BINS + 2, jnp.uint32).at[place.astype(jnp.int32)].add(jnp.uint32(1))

    counts = jax.vmap(count_layer)(values, finite, exponent, first)
    return counts, jnp.stack([first.astype(jnp.int32), exponent], axis=1)


def _exponent(value: jax.Array) -> jax.Array:
    """Return the least e for which 2**e is above a positive float32; below the exponent of any
    normal number for 0.
    """
    # from the bits of a float32, because XLA's log2 is not exact at powers of two
    return (lax.bitcast_convert_type(value, jnp.int32) >> 23) - 126


def _multiple(values: jax.Array, exponent: jax.Array) -> jax.Array:
    """Return the largest multiple of 2**exponent that is not above each value, in units of it."""
    floored = jnp.floor(values * _power_of_two(-exponent))
    # XLA flushes a product that is too small to 0
    return jnp.where((values < 0) & (floored == 0), jnp.float32(-1), floored)


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """Return 2**exponent as float32, exactly, from -126 to 127."""
    # from the bits of a float32, because XLA's exp2 is not exact
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def read_counts(
    kind: str, counts: Mapping[str, tuple[Any, Any]], stacks: Mapping[str, int]
) -> dict[str, Histogram]:
    """Return histograms by name, from `count_tree`'s arrays on the host: "gradients/up/kernel"; of
    a stack's layer "gradients/blocks/kernel/3".
    """
    histograms = {}
    for path, (rows, bins) in counts.items():
        pairs = zip(np.asarray(rows).tolist(), np.asarray(bins).tolist(), strict=True)
        for layer, (row, (first, exponent)) in enumerate(pairs):
            filled = [number for number in range(BINS) if row[number]] or [0]
            within = row[filled[0] : filled[-1] + 1]
            width = 2.0**exponent
            low = (first + filled[0]) * width
            name = f"{kind}/{path}"
            if path in stacks:
                name += f"/{layer}"
            histograms[name] = Histogram(low, width, within, row[NAN], row[INFINITE])
    return histograms


def counts_not_finite(histograms: Mapping[str, Histogram]) -> dict[str, int]:
    """Return the numbers of elements that are NaN or infinite, by "NAME/nan" and "NAME/inf"; counts
    of 0 are left out.

    >>> counts_not_finite({"gradients/w": Histogram(0.0, 1.0, [3], nan=2)})
    {'gradients/w/nan': 2}
    """
    counts = {}
    for name, histogram in histograms.items():
        for kind, count in (("nan", histogram.nan), ("inf", histogram.inf)):
            if count:
                counts[f"{name}/{kind}"] = count
    return counts


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
