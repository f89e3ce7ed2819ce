"""Blocks of queries and keys of fused attention: which a kernel reads, and their scores."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from spmd.base.rng import bits_at, threefry_rounds
from spmd.nn.scoring import Inputs, Scoring

LEAST = 16  # the fewest rows of a product of Triton's
LOG2E = math.log2(math.e)  # exponentials are to base 2
MASKED = -jnp.inf


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Rows of a block: those that a program computes, and those that it reads one block after the
    other.

    A program has several blocks in shared memory, of which an RTX 4090 has 99 KiB, and the sums of
    its own in registers.
    """

    computed: int
    read: int

    @classmethod
    def of(cls, row_bytes: int, *, backward: bool) -> "Blocks":
        """For rows of `row_bytes`; a backward pass holds twice the arrays.

        >>> Blocks.of(256, backward=False), Blocks.of(256, backward=True)
        (Blocks(computed=128, read=64), Blocks(computed=64, read=32))
        """
        fitting = max(LEAST, min(128, 2**15 // row_bytes) // (2 if backward else 1))
        return cls(fitting, max(LEAST, fitting // 2))


@dataclasses.dataclass(frozen=True)
class BlockCall:
    """One attention: what is known when tracing, and how its programs read arrays."""

    scoring: Scoring
    queries: int
    keys: int
    size: int
    width: int
    block_q: int
    block_k: int
    limited: bool  # by key_lengths
    # of mask and bias, which are not 1
    dims: dict[str, tuple[bool, ...]] = dataclasses.field(compare=False)

    @classmethod
    def of(
        cls, scoring: Scoring, inputs: Inputs, *, backward: bool, by_keys: bool = False
    ) -> "BlockCall":
        """Return the call of a kernel on these inputs; `by_keys`: each program has keys of its
        own.
        """
        (_, queries, _, size), keys, width = (
            inputs.query.shape,
            inputs.key.shape[1],
            inputs.value.shape[3],
        )
        blocks = Blocks.of(
            padded(max(size, width)) * inputs.query.dtype.itemsize, backward=backward
        )
        sizes = (blocks.read, blocks.computed) if by_keys else (blocks.computed, blocks.read)
        block_q, block_k = (
            min(block, padded(length)) for block, length in zip(sizes, (queries, keys), strict=True)
        )
        given = {"mask": inputs.arrays.mask, "bias": inputs.arrays.bias}
        dims = {
            name: tuple(size > 1 for size in x.shape) for name, x in given.items() if x is not None
        }
        return cls(
            scoring,
            queries,
            keys,
            size,
            width,
            block_q,
            block_k,
            inputs.arrays.key_lengths is not None,
            dims,
        )

    @property
    def blocks_q(self) -> int:
        """Return the number of blocks of queries."""
        return pl.cdiv(self.queries, self.block_q)

    @property
    def blocks_k(self) -> int:
        """Return the number of blocks of keys."""
        return pl.cdiv(self.keys, self.block_k)

    def of_query(self, ref: Any, at: tuple, start: Any, width: int | None = None) -> jax.Array:
        """[block_q, width or head_dim] from query `start` on, of row and head `at`."""
        return _load(
            ref, at, start, self.block_q, self.queries, self.size if width is None else width
        )

    def of_key(self, ref: Any, at: tuple, start: Any, width: int | None = None) -> jax.Array:
        """Return a block of keys, or of what has their rows."""
        return _load(ref, at, start, self.block_k, self.keys, self.size if width is None else width)

    def by_query(self, ref: Any, at: tuple, start: Any) -> jax.Array:
        """[block_q] numbers of one for every query and head."""
        return _load_line(ref, at, start, self.block_q, self.queries)

    def keys_of(self, refs: dict[str, Any], row: Any, start: Any) -> tuple[Any, Any]:
        """The first block of keys that a block of queries sees, and the one behind the last."""
        before, after = self.scoring.reach
        return _range(
            start + refs["shift"][0],
            self.block_q,
            (before, after),
            self._limit(refs, row),
            self.block_k,
        )

    def queries_of(self, refs: dict[str, Any], row: Any, start: Any) -> tuple[Any, Any]:
        """The first block of queries that sees a block of keys, and the one behind the last."""
        before, after = self.scoring.reach
        first, end = _range(
            start - refs["shift"][0], self.block_k, (after, before), self.queries, self.block_q
        )
        return first, jnp.where(start < self._limit(refs, row), end, first) if self.limited else end

    def _limit(self, refs: dict[str, Any], row: Any) -> Any:
        """The number of keys of a row."""
        return (
            jnp.minimum(refs["key_lengths"][place_of((row,))], self.keys)
            if self.limited
            else self.keys
        )

    def dot(
        self, left: jax.Array, right: jax.Array, contracted: tuple[int, int] = (1, 0)
    ) -> jax.Array:
        """A product, in float32, over these dims."""
        dims = (((contracted[0],), (contracted[1],)), ((), ()))
        return lax.dot_general(
            left, right, dims, precision=self.scoring.precision, preferred_element_type=jnp.float32
        )

    def scores(
        self, refs: dict[str, Any], at: tuple, starts: tuple, query: jax.Array, key: jax.Array
    ) -> tuple:
        """[block_q, block_k] times log2(e), minus infinity where a key is not seen; and the slope
        of the soft cap.
        """
        scoring, slope = self.scoring, None
        products = self.dot(query, key, (1, 1))
        if scoring.soft_cap is None:
            scores = products * (scoring.scale * LOG2E)
        else:
            capped = jnp.tanh(products * (scoring.scale / scoring.soft_cap))
            scores, slope = capped * (scoring.soft_cap * LOG2E), 1 - capped * capped
        if "bias" in refs:
            scores += self._both("bias", refs, at, starts).astype(jnp.float32) * LOG2E
        for seen in self._seen(refs, at, starts):
            scores = jnp.where(seen, scores, MASKED)
        return scores, slope

    def _seen(self, refs: dict[str, Any], at: tuple, starts: tuple) -> list[jax.Array]:
        before, after = self.scoring.reach
        query, key = self._places(starts)
        seen = []
        if before is not None or after is not None:
            distance = key - query - refs["shift"][0]
            seen += [distance >= -before] if before is not None else []
            seen += [distance <= after] if after is not None else []
        if self.limited or self.keys % self.block_k:
            seen.append(key < self._limit(refs, at[0]))
        if "mask" in refs:
            seen.append(self._both("mask", refs, at, starts))
        if "key_mask" in refs:
            seen.append(
                _load_line(refs["key_mask"], at[:1], starts[1], self.block_k, self.keys)[None, :]
            )
        if "of_query" in refs:
            of_query = _load_line(refs["of_query"], at[:1], starts[0], self.block_q, self.queries)
            of_key = _load_line(refs["of_key"], at[:1], starts[1], self.block_k, self.keys)
            seen.append(of_query[:, None] == of_key[None, :])
        return seen

    def _places(self, starts: tuple) -> tuple[jax.Array, jax.Array]:
        """The numbers of a block's queries [block_q, 1] and keys [1, block_k]."""
        return starts[0] + jnp.arange(self.block_q)[:, None], starts[1] + jnp.arange(self.block_k)[
            None, :
        ]

    def _both(self, name: str, refs: dict[str, Any], at: tuple, starts: tuple) -> jax.Array:
        """Of [rows, heads, queries, keys] or with dims of 1, what a block has of it, to be
        broadcast.
        """
        ref, (by_row, by_head, by_query, by_key) = refs[name], self.dims[name]
        at = (at[0] if by_row else None, at[1] if by_head else None)
        if by_query and by_key:
            inside = (
                is_inside(starts[0], self.block_q, self.queries),
                is_inside(starts[1], self.block_k, self.keys),
            )
            return _masked(
                ref.at[
                    place_of(at, pl.ds(starts[0], self.block_q), pl.ds(starts[1], self.block_k))
                ],
                *inside,
            )
        if by_query:
            return _load_line(ref, at, starts[0], self.block_q, self.queries)[:, None]
        if by_key:
            return _load_line(ref, at, starts[1], self.block_k, self.keys)[None, :]
        return ref[place_of(at)]

    def kept(self, refs: dict[str, Any], at: tuple, starts: tuple) -> jax.Array:
        """What dropout multiplies a block's weights by; `at` counts from the first row and head of
        all.
        """
        places = (*at, *self._places(starts))
        count = [refs["count"][word] for word in range(4)]
        bits = bits_at(
            count, *zip(places, (*self.scoring.strides, 1), strict=True), threefry=threefry_rounds
        )
        share = np.float32(1 / (1 - self.scoring.dropout))
        return jnp.where(
            bits >> np.uint32(9) < np.uint32(self.scoring.threshold), share, np.float32(0.0)
        )

    def slopes(
        self, refs: dict[str, Any], at: tuple, place: tuple, starts: tuple, arrays: tuple
    ) -> tuple:
        """Of a block, in the backward pass: the weights of values, the gradients of scores, and
        those of products, times `scale`.

        Args:
          at: row and head in the program's arrays, None if they have one; `place`: among all.
          arrays: query, key, value, the gradient of the result, the log of the normaliser, and the
            inner product.
        """
        query, key, value, grad, logs, inner = arrays
        scores, slope = self.scores(refs, at, starts, query, key)
        shares, dshares = jnp.exp2(scores - logs[:, None] * LOG2E), self.dot(grad, value, (1, 1))
        weights = shares
        if self.scoring.dropout:
            kept = self.kept(refs, place, starts)
            weights, dshares = shares * kept, dshares * kept
        dscores = shares * (dshares - inner[:, None])
        return (
            weights,
            dscores,
            (dscores if slope is None else dscores * slope) * self.scoring.scale,
        )


def padded(size: int) -> int:
    """The power of two that a dim of a block has."""
    return max(LEAST, pl.next_power_of_2(size))


def is_inside(start: Any, size: int, end: int) -> jax.Array:
    """Return which of `size` places from `start` on are before `end`, bool[size]."""
    return start + jnp.arange(size) < end


def place_of(at: Any, *slices: Any) -> tuple:
    """An index, without the dims that a program's arrays do not have."""
    return (*(place for place in at if place is not None), *slices)


def _masked(ref: Any, rows: jax.Array, columns: jax.Array) -> jax.Array:
    """A matrix, read as zeros outside."""
    return triton.load(ref, mask=rows[:, None] & columns[None, :], other=jnp.zeros((), ref.dtype))


def _rows(ref: Any, at: tuple, start: Any, count: int) -> Any:
    """`count` rows from `start` on, of [rows, length, heads, width]."""
    row, head = at
    return ref.at[(*place_of((row,)), pl.ds(start, count), *place_of((head,)), slice(None))]


def _load(ref: Any, at: tuple, start: Any, count: int, length: int, width: int) -> jax.Array:
    """[count, width as padded] from `start` on, of [rows, length, heads, width]; zeros outside."""
    part = _rows(ref, at, start, count)
    if length % count == 0 and width == padded(width):
        return triton.load(part)
    return _masked(part, is_inside(start, count, length), is_inside(0, padded(width), width))


def _load_line(ref: Any, at: tuple, start: Any, count: int, length: int) -> jax.Array:
    """[count] from `start` on; zeros outside."""
    part = ref.at[place_of(at, pl.ds(start, count))]
    if length % count == 0:
        return triton.load(part)
    return triton.load(part, mask=is_inside(start, count, length), other=jnp.zeros((), ref.dtype))


def store_block(ref: Any, at: tuple, start: Any, x: jax.Array, length: int, width: int) -> None:
    """Write a block of rows, as `_load` reads it."""
    inside = (
        is_inside(start, x.shape[0], length)[:, None] & is_inside(0, x.shape[1], width)[None, :]
    )
    triton.store(_rows(ref, at, start, x.shape[0]), x.astype(ref.dtype), mask=inside)


def _range(
    start: Any, count: int, reach: tuple[int | None, int | None], length: Any, block: int
) -> tuple[Any, Any]:
    """The blocks, of a sequence of `length`, that `count` places from `start` on reach: the first,
    and the one behind the last.
    """
    before, after = reach
    first = 0 if before is None else lax.div(jnp.maximum(start - before, 0), jnp.int32(block))
    end = length if after is None else jnp.clip(start + count + after, 0, length)
    end = (
        pl.cdiv(end, block)
        if isinstance(end, int)
        else lax.div(end + (block - 1), jnp.int32(block))
    )
    # Triton's loops take bounds of one type
    first, end = (np.int32(x) if isinstance(x, int) else x for x in (first, end))
    return first, end
