"""Blocks of queries and keys of fused attention: the blocks that a kernel reads, and their
scores.
"""

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

# The fewest rows of a product that Triton takes.
LEAST = 16
# Exponentials are to base 2, for which GPUs have an instruction.
LOG2E = math.log2(math.e)
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
        fitting = min(128, 2**15 // row_bytes)
        if backward:
            fitting //= 2
        fitting = max(LEAST, fitting)
        return cls(fitting, max(LEAST, fitting // 2))


@dataclasses.dataclass(frozen=True)
class BlockCall:
    """One attention: its static numbers, and the reading of arrays in its programs."""

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
        _, queries, _, size = inputs.query.shape
        keys = inputs.key.shape[1]
        width = inputs.value.shape[3]
        blocks = Blocks.of(
            padded(max(size, width)) * inputs.query.dtype.itemsize, backward=backward
        )
        block_q = blocks.computed
        block_k = blocks.read
        if by_keys:
            # The backward pass by keys computes blocks of keys, and reads queries.
            block_q, block_k = block_k, block_q
        dims = {}
        for name in ("mask", "bias"):
            x = getattr(inputs.arrays, name)
            if x is not None:
                dims[name] = tuple(size > 1 for size in x.shape)
        return cls(
            scoring,
            queries,
            keys,
            size,
            width,
            min(block_q, padded(queries)),
            min(block_k, padded(keys)),
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

    @property
    def padded_queries(self) -> int:
        """Return the number of queries in all blocks."""
        return self.blocks_q * self.block_q

    @property
    def padded_keys(self) -> int:
        """Return the number of keys in all blocks."""
        return self.blocks_k * self.block_k

    def of_query(self, ref: Any, at: tuple, start: Any, width: int | None = None) -> jax.Array:
        """Return [block_q, width or head_dim] from query `start` on, of row and head `at`."""
        return _load(ref, at, start, self.block_q, self.queries, width or self.size)

    def of_key(self, ref: Any, at: tuple, start: Any, width: int | None = None) -> jax.Array:
        """Return a block of keys, or of an array with a row for each key."""
        return _load(ref, at, start, self.block_k, self.keys, width or self.size)

    def by_query(self, ref: Any, at: tuple, start: Any) -> jax.Array:
        """Return [block_q] numbers of an array with one for every query and head."""
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
        if self.limited:
            end = jnp.where(start < self._limit(refs, row), end, first)
        return first, end

    def _limit(self, refs: dict[str, Any], row: Any) -> Any:
        """The number of keys of a row."""
        if not self.limited:
            return self.keys
        return jnp.minimum(refs["key_lengths"][place_of((row,))], self.keys)

    def dot(
        self, left: jax.Array, right: jax.Array, contracted: tuple[int, int] = (1, 0)
    ) -> jax.Array:
        """Return a product over these dims, in float32."""
        dims = (((contracted[0],), (contracted[1],)), ((), ()))
        return lax.dot_general(
            left, right, dims, precision=self.scoring.precision, preferred_element_type=jnp.float32
        )

    def scores(
        self, refs: dict[str, Any], at: tuple, starts: tuple, query: jax.Array, key: jax.Array
    ) -> tuple:
        """Return scores [block_q, block_k] times log2(e), minus infinity where a key is masked;
        and the slope of the soft cap.
        """
        scoring = self.scoring
        slope = None
        products = self.dot(query, key, (1, 1))
        if scoring.soft_cap is None:
            scores = products * (scoring.scale * LOG2E)
        else:
            capped = jnp.tanh(products * (scoring.scale / scoring.soft_cap))
            scores = capped * (scoring.soft_cap * LOG2E)
            slope = 1 - capped * capped
        if "bias" in refs:
            scores += self._both("bias", refs, at, starts).astype(jnp.float32) * LOG2E
        for mask in self._masks(refs, at, starts):
            scores = jnp.where(mask, scores, MASKED)
        return scores, slope

    def _masks(self, refs: dict[str, Any], at: tuple, starts: tuple) -> list[jax.Array]:
        """Return all masks of a block's scores, False where a query does not see a key."""
        before, after = self.scoring.reach
        query, key = self._places(starts)
        masks = []
        if before is not None or after is not None:
            distance = key - query - refs["shift"][0]
            if before is not None:
                masks.append(distance >= -before)
            if after is not None:
                masks.append(distance <= after)
        if self.limited or self.keys % self.block_k:
            masks.append(key < self._limit(refs, at[0]))
        if "mask" in refs:
            masks.append(self._both("mask", refs, at, starts))
        if "key_mask" in refs:
            key_mask = _load_line(refs["key_mask"], at[:1], starts[1], self.block_k, self.keys)
            masks.append(key_mask[None, :])
        if "of_query" in refs:
            of_query = _load_line(refs["of_query"], at[:1], starts[0], self.block_q, self.queries)
            of_key = _load_line(refs["of_key"], at[:1], starts[1], self.block_k, self.keys)
            masks.append(of_query[:, None] == of_key[None, :])
        return masks

    def _places(self, starts: tuple) -> tuple[jax.Array, jax.Array]:
        """Return the numbers of a block's queries [block_q, 1] and keys [1, block_k]."""
        queries = starts[0] + jnp.arange(self.block_q)[:, None]
        keys = starts[1] + jnp.arange(self.block_k)[None, :]
        return queries, keys

    def _both(self, name: str, refs: dict[str, Any], at: tuple, starts: tuple) -> jax.Array:
        """Return a block of an array [rows, heads, queries, keys] or with dims of 1, to be
        broadcast.
        """
        ref = refs[name]
        by_row, by_head, by_query, by_key = self.dims[name]
        row, head = at
        if not by_row:
            row = None
        if not by_head:
            head = None
        at = (row, head)
        if by_query and by_key:
            place = place_of(at, pl.ds(starts[0], self.block_q), pl.ds(starts[1], self.block_k))
            return _masked(
                ref.at[place],
                is_inside(starts[0], self.block_q, self.queries),
                is_inside(starts[1], self.block_k, self.keys),
            )
        if by_query:
            return _load_line(ref, at, starts[0], self.block_q, self.queries)[:, None]
        if by_key:
            return _load_line(ref, at, starts[1], self.block_k, self.keys)[None, :]
        return ref[place_of(at)]

    def dropout_factors(self, refs: dict[str, Any], at: tuple, starts: tuple) -> jax.Array:
        """Return the factors by which dropout multiplies a block's weights; `at` counts from the
        first row and head of all.
        """
        places = (*at, *self._places(starts))
        count = [refs["count"][word] for word in range(4)]
        strides = (*self.scoring.strides, 1)
        # Pallas has no rule for `jax.random`'s primitives, so their rounds are written out.
        bits = bits_at(count, *zip(places, strides, strict=True), threefry=threefry_rounds)
        # `jax.random.bernoulli` compares 23 bits, as a float32 has.
        stays = bits >> np.uint32(9) < np.uint32(self.scoring.threshold)
        return jnp.where(stays, np.float32(1 / (1 - self.scoring.dropout)), np.float32(0.0))

    def slopes(
        self, refs: dict[str, Any], at: tuple, place: tuple, starts: tuple, arrays: tuple
    ) -> tuple:
        """Return, for a block in the backward pass, the weights of values, the gradients of scores,
        and the gradients of products, times `scale`.

        Args:
          at: row and head in the program's arrays, None if they have one; `place`: among all.
          arrays: query, key, value, the gradient of the result, the log of the normaliser, and the
            inner product.
        """
        query, key, value, grad, logs, inner = arrays
        scores, slope = self.scores(refs, at, starts, query, key)
        shares = jnp.exp2(scores - logs[:, None] * LOG2E)
        dshares = self.dot(grad, value, (1, 1))
        weights = shares
        if self.scoring.dropout:
            factors = self.dropout_factors(refs, place, starts)
            weights = shares * factors
            dshares = dshares * factors
        dscores = shares * (dshares - inner[:, None])
        dproducts = dscores
        if slope is not None:
            dproducts = dscores * slope
        return weights, dscores, dproducts * self.scoring.scale


def padded(size: int) -> int:
    """Return the size of a dim of a block."""
    # Triton has arrays of powers of two only.
    return max(LEAST, pl.next_power_of_2(size))


def is_inside(start: Any, size: int, end: int) -> jax.Array:
    """Return which of `size` places from `start` on are before `end`, bool[size]."""
    return start + jnp.arange(size) < end


def place_of(at: Any, *slices: Any) -> tuple:
    """Return an index, without the dims that a program's arrays do not have."""
    return (*(place for place in at if place is not None), *slices)


def _masked(ref: Any, rows: jax.Array, columns: jax.Array) -> jax.Array:
    """Return a matrix, with zeros outside."""
    return triton.load(ref, mask=rows[:, None] & columns[None, :], other=jnp.zeros((), ref.dtype))


def _rows(ref: Any, at: tuple, start: Any, count: int) -> Any:
    """Return `count` rows from `start` on, of [rows, length, heads, width]."""
    row, head = at
    return ref.at[(*place_of((row,)), pl.ds(start, count), *place_of((head,)), slice(None))]


def _load(ref: Any, at: tuple, start: Any, count: int, length: int, width: int) -> jax.Array:
    """Return [count, width as padded] from `start` on, of [rows, length, heads, width]; zeros
    outside.
    """
    part = _rows(ref, at, start, count)
    if length % count == 0 and width == padded(width):
        return triton.load(part)
    return _masked(part, is_inside(start, count, length), is_inside(0, padded(width), width))


def _load_line(ref: Any, at: tuple, start: Any, count: int, length: int) -> jax.Array:
    """Return [count] from `start` on; zeros outside."""
    part = ref.at[place_of(at, pl.ds(start, count))]
    if length % count == 0:
        return triton.load(part)
    return triton.load(part, mask=is_inside(start, count, length), other=jnp.zeros((), ref.dtype))


def store_block(ref: Any, at: tuple, start: Any, x: jax.Array, length: int, width: int) -> None:
    """Write a block of rows, as `_load` reads it."""
    count, columns = x.shape
    inside = is_inside(start, count, length)[:, None] & is_inside(0, columns, width)[None, :]
    triton.store(_rows(ref, at, start, count), x.astype(ref.dtype), mask=inside)


def _range(
    start: Any, count: int, reach: tuple[int | None, int | None], length: Any, block: int
) -> tuple[Any, Any]:
    """Return the blocks, of a sequence of `length`, that `count` places from `start` on reach: the
    first, and the one behind the last.
    """
    before, after = reach
    first = 0
    if before is not None:
        first = lax.div(jnp.maximum(start - before, 0), jnp.int32(block))
    end = length
    if after is not None:
        end = jnp.clip(start + count + after, 0, length)
    # Triton's loops take bounds of one type.
    if isinstance(end, int):
        end = np.int32(pl.cdiv(end, block))
    else:
        end = lax.div(end + (block - 1), jnp.int32(block))
    if isinstance(first, int):
        first = np.int32(first)
    return first, end
