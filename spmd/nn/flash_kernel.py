"""Attention as Pallas kernels for GPUs (Triton): scores stay in a program's registers, in the
forward and the backward pass.

Sources: Dao, FlashAttention-2, arXiv:2307.08691 (algorithms 1 and 2). Of the backward pass, one
kernel computes the gradients of keys and values, one those of queries, and one that of a bias, each
making the scores again, so that no two programs add to the same numbers.

A program computes a block of queries, keys or biases of one row and head, or of one group of heads
that share keys, and loops over blocks of the others; those that the causal mask, a window or
`key_lengths` hides are not read. Lengths and head sizes need not fit the blocks: what lies outside
is read as zeros, and not written.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from spmd.nn.scoring import Inputs, Scoring, TileKernel
from spmd.rng import bits_at, threefry_rounds

LEAST, WIDEST = 16, 256  # the fewest rows of a product of Triton's; the largest head size
LOG2E, MASKED = math.log2(math.e), -jnp.inf  # exponentials are to base 2


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
class _Call:
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
    ) -> "_Call":
        (_, queries, _, size), keys, width = (
            inputs.query.shape,
            inputs.key.shape[1],
            inputs.value.shape[3],
        )
        blocks = Blocks.of(
            _padded(max(size, width)) * inputs.query.dtype.itemsize, backward=backward
        )
        sizes = (blocks.read, blocks.computed) if by_keys else (blocks.computed, blocks.read)
        block_q, block_k = (
            min(block, _padded(length))
            for block, length in zip(sizes, (queries, keys), strict=True)
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
        return pl.cdiv(self.queries, self.block_q)

    @property
    def blocks_k(self) -> int:
        return pl.cdiv(self.keys, self.block_k)

    def of_query(self, ref: Any, at: tuple, start: Any, width: int | None = None) -> jax.Array:
        """[block_q, width or head_dim] from query `start` on, of row and head `at`."""
        return _load(
            ref, at, start, self.block_q, self.queries, self.size if width is None else width
        )

    def of_key(self, ref: Any, at: tuple, start: Any, width: int | None = None) -> jax.Array:
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
            jnp.minimum(refs["key_lengths"][_place((row,))], self.keys)
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
                _inside(starts[0], self.block_q, self.queries),
                _inside(starts[1], self.block_k, self.keys),
            )
            return _masked(
                ref.at[_place(at, pl.ds(starts[0], self.block_q), pl.ds(starts[1], self.block_k))],
                *inside,
            )
        if by_query:
            return _load_line(ref, at, starts[0], self.block_q, self.queries)[:, None]
        if by_key:
            return _load_line(ref, at, starts[1], self.block_k, self.keys)[None, :]
        return ref[_place(at)]

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


def _forward_kernel(
    call: _Call, query: Any, key: Any, value: Any, refs: dict[str, Any], out: Any, logs: Any
) -> None:
    """One block of queries of one row and head."""
    start, at, place = (
        pl.program_id(0) * call.block_q,
        (None, None),
        (pl.program_id(1), pl.program_id(2)),
    )
    query_ = call.of_query(query, at, start)

    def block(number: Any, state: tuple) -> tuple:
        weighted, highest, total = state
        starts = (start, number * call.block_k)
        scores, _ = call.scores(refs, at, starts, query_, call.of_key(key, at, starts[1]))
        new_highest = jnp.maximum(highest, scores.max(axis=1))
        # if all were masked so far: avoid inf - inf
        base = jnp.where(new_highest == MASKED, 0.0, new_highest)
        shares, decay = jnp.exp2(scores - base[:, None]), jnp.exp2(highest - base)
        total = total * decay + shares.sum(axis=1)
        if call.scoring.dropout:
            shares = shares * call.kept(refs, place, starts)
        more = call.dot(shares.astype(value.dtype), call.of_key(value, at, starts[1], call.width))
        return weighted * decay[:, None] + more, new_highest, total

    zeros = jnp.zeros((call.block_q, _padded(call.width)), jnp.float32)
    by_query = jnp.zeros(call.block_q, jnp.float32)
    weighted, highest, total = lax.fori_loop(
        *call.keys_of(refs, None, start), block, (zeros, by_query + MASKED, by_query)
    )
    unseen = total == 0
    total = jnp.where(unseen, 1.0, total)
    _store(out, at, start, weighted / total[:, None], call.queries, call.width)
    numbers = jnp.where(unseen, MASKED, (highest + jnp.log2(total)) * (1 / LOG2E))
    triton.store(
        logs.at[pl.ds(start, call.block_q)],
        numbers,
        mask=_inside(start, call.block_q, call.queries),
    )


def _dquery_kernel(
    call: _Call,
    query: Any,
    key: Any,
    value: Any,
    refs: dict[str, Any],
    grad: Any,
    logs: Any,
    inner: Any,
    dquery: Any,
) -> None:
    """The gradients of one block of queries of one row and head."""
    start, at, place = (
        pl.program_id(0) * call.block_q,
        (None, None),
        (pl.program_id(1), pl.program_id(2)),
    )
    query_, grad_ = call.of_query(query, at, start), call.of_query(grad, at, start, call.width)
    logs_, inner_ = call.by_query(logs, at, start), call.by_query(inner, at, start)

    def block(number: Any, total: jax.Array) -> jax.Array:
        starts = (start, number * call.block_k)
        key_, value_ = (
            call.of_key(key, at, starts[1]),
            call.of_key(value, at, starts[1], call.width),
        )
        *_, dproducts = call.slopes(
            refs, at, place, starts, (query_, key_, value_, grad_, logs_, inner_)
        )
        return total + call.dot(dproducts.astype(key.dtype), key_)

    zeros = jnp.zeros((call.block_q, _padded(call.size)), jnp.float32)
    _store(
        dquery,
        at,
        start,
        lax.fori_loop(*call.keys_of(refs, None, start), block, zeros),
        call.queries,
        call.size,
    )


def _dkey_kernel(
    call: _Call,
    query: Any,
    key: Any,
    value: Any,
    refs: dict[str, Any],
    grad: Any,
    logs: Any,
    inner: Any,
    dkey: Any,
    dvalue: Any,
) -> None:
    """The gradients of one block of keys and values of one row and group, from all of the group's
    heads.
    """
    start, heads, alone = pl.program_id(0) * call.block_k, query.shape[1], (None, None)
    key_, value_ = call.of_key(key, alone, start), call.of_key(value, alone, start, call.width)
    row, group, (first, end) = (
        pl.program_id(1),
        pl.program_id(2),
        call.queries_of(refs, None, start),
    )

    def block(head: Any, number: Any, totals: tuple) -> tuple:
        starts, at = (number * call.block_q, start), (None, head)
        query_, grad_ = (
            call.of_query(query, at, starts[0]),
            call.of_query(grad, at, starts[0], call.width),
        )
        arrays = (
            query_,
            key_,
            value_,
            grad_,
            call.by_query(logs, at, starts[0]),
            call.by_query(inner, at, starts[0]),
        )
        weights, _, dproducts = call.slopes(refs, at, (row, group * heads + head), starts, arrays)
        return (
            totals[0] + call.dot(dproducts.astype(query.dtype), query_, (0, 0)),
            totals[1] + call.dot(weights.astype(grad.dtype), grad_, (0, 0)),
        )

    def of_head(head: Any, totals: tuple) -> tuple:
        return lax.fori_loop(first, end, functools.partial(block, head), totals)

    zeros = tuple(
        jnp.zeros((call.block_k, _padded(width)), jnp.float32) for width in (call.size, call.width)
    )
    totals = lax.fori_loop(0, heads, of_head, zeros)
    _store(dkey, alone, start, totals[0], call.keys, call.size)
    _store(dvalue, alone, start, totals[1], call.keys, call.width)


def _dbias_kernel(
    call: _Call,
    query: Any,
    key: Any,
    value: Any,
    refs: dict[str, Any],
    grad: Any,
    logs: Any,
    inner: Any,
    dbias: Any,
) -> None:
    """The gradient of one block of the bias, summed over the rows, heads, queries and keys that
    share it.
    """
    (rows, _, heads, _), groups, dims = query.shape, key.shape[2], call.dims["bias"]
    counts = (rows, heads, call.blocks_q, call.blocks_k)
    number, ids = pl.program_id(0), []
    # the last dim is the first to count
    for given, count in zip(dims[::-1], counts[::-1], strict=True):
        ids.insert(0, lax.rem(number, jnp.int32(count)) if given else None)
        number = lax.div(number, jnp.int32(count)) if given else number

    def block(place: tuple, total: jax.Array) -> jax.Array:
        row, head, *numbers = place
        starts = (numbers[0] * call.block_q, numbers[1] * call.block_k)
        of_keys = (row, lax.div(head, jnp.int32(heads // groups)))
        arrays = (
            call.of_query(query, (row, head), starts[0]),
            call.of_key(key, of_keys, starts[1]),
            call.of_key(value, of_keys, starts[1], call.width),
            call.of_query(grad, (row, head), starts[0], call.width),
            *(call.by_query(x, (row, head), starts[0]) for x in (logs, inner)),
        )
        return total + call.slopes(refs, (row, head), (row, head), starts, arrays)[1]

    def over(place: tuple, total: jax.Array) -> jax.Array:
        """The sum over what shares a bias in the dims behind these."""
        dim = len(place)
        if dim == len(counts):
            return block(place, total)
        if dims[dim]:
            return over((*place, ids[dim]), total)
        return lax.fori_loop(
            0, counts[dim], lambda number, total: over((*place, number), total), total
        )

    total = over((), jnp.zeros((call.block_q, call.block_k), jnp.float32))
    slices, inside = [], []
    for dim, block_, length in ((2, call.block_q, call.queries), (3, call.block_k, call.keys)):
        if dims[dim]:
            slices.append(pl.ds(ids[dim] * block_, block_))
            inside.append(_inside(ids[dim] * block_, block_, length))
        else:
            total = total.sum(axis=dim - 4, keepdims=dim == 2)
    total = total if dims[2] else total[0]
    ref = dbias.at[_place(ids[:2], *slices)]
    mask = inside[0][:, None] & inside[1] if len(inside) == 2 else inside[0] if inside else None
    triton.store(ref, total.astype(dbias.dtype), mask=mask)


def _padded(size: int) -> int:
    """The power of two that a dim of a block has."""
    return max(LEAST, pl.next_power_of_2(size))


def _inside(start: Any, size: int, end: int) -> jax.Array:
    return start + jnp.arange(size) < end


def _place(at: Any, *slices: Any) -> tuple:
    """An index, without the dims that a program's arrays do not have."""
    return (*(place for place in at if place is not None), *slices)


def _masked(ref: Any, rows: jax.Array, columns: jax.Array) -> jax.Array:
    """A matrix, read as zeros outside."""
    return triton.load(ref, mask=rows[:, None] & columns[None, :], other=jnp.zeros((), ref.dtype))


def _rows(ref: Any, at: tuple, start: Any, count: int) -> Any:
    """`count` rows from `start` on, of [rows, length, heads, width]."""
    row, head = at
    return ref.at[(*_place((row,)), pl.ds(start, count), *_place((head,)), slice(None))]


def _load(ref: Any, at: tuple, start: Any, count: int, length: int, width: int) -> jax.Array:
    """[count, width as padded] from `start` on, of [rows, length, heads, width]; zeros outside."""
    part = _rows(ref, at, start, count)
    if length % count == 0 and width == _padded(width):
        return triton.load(part)
    return _masked(part, _inside(start, count, length), _inside(0, _padded(width), width))


def _load_line(ref: Any, at: tuple, start: Any, count: int, length: int) -> jax.Array:
    """[count] from `start` on; zeros outside."""
    part = ref.at[_place(at, pl.ds(start, count))]
    if length % count == 0:
        return triton.load(part)
    return triton.load(part, mask=_inside(start, count, length), other=jnp.zeros((), ref.dtype))


def _store(ref: Any, at: tuple, start: Any, x: jax.Array, length: int, width: int) -> None:
    """The opposite of `_load`."""
    inside = _inside(start, x.shape[0], length)[:, None] & _inside(0, x.shape[1], width)[None, :]
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


@dataclasses.dataclass(frozen=True)
class _Part:
    """What a program has of the rows, heads and groups.

    Attributes:
      rows, heads, groups: how many of each; None: one, without a dim for it.
      index: which, in blocks of this size, by the program's place in the grid.
    """

    call: _Call
    rows: int | None
    heads: int | None
    groups: int | None
    index: Callable[..., tuple[Any, Any, Any]]

    def by_head(self, length: int, width: int, *, groups: bool = False) -> pl.BlockSpec:
        """Of [rows, length, heads or groups, width]."""
        shape = (self.rows, length, self.groups if groups else self.heads, _padded(width))
        return pl.BlockSpec(
            shape, lambda *ids: (self.index(*ids)[0], 0, self.index(*ids)[2 if groups else 1], 0)
        )

    def line(self) -> pl.BlockSpec:
        """Of [rows, heads, queries]."""
        return pl.BlockSpec(
            (self.rows, self.heads, self.call.blocks_q * self.call.block_q),
            lambda *ids: (*self.index(*ids)[:2], 0),
        )

    def scores(self, name: str) -> pl.BlockSpec:
        """Of [rows, heads, queries, keys], without dims that are 1."""
        call, dims = self.call, self.call.dims[name]
        most = (self.rows, self.heads, call.blocks_q * call.block_q, call.blocks_k * call.block_k)
        shape = tuple(size if given else None for size, given in zip(most, dims, strict=True))

        def index(*ids: Any) -> tuple:
            return (
                *(
                    place if given else 0
                    for place, given in zip(self.index(*ids)[:2], dims[:2], strict=True)
                ),
                0,
                0,
            )

        return pl.BlockSpec(shape, index)

    def inputs(self, shift: Any, inputs: Inputs) -> tuple[tuple, tuple]:
        """Arguments of a kernel, and their specs."""
        call, arrays = self.call, inputs.arrays
        lengths = (call.blocks_q * call.block_q, call.blocks_k * call.block_k)
        specs = (
            self.by_head(lengths[0], call.size),
            self.by_head(lengths[1], call.size, groups=True),
            self.by_head(lengths[1], call.width, groups=True),
        )

        def shared(size: int) -> pl.BlockSpec:
            return pl.BlockSpec((size,), lambda *ids: (0,))

        def by_row(*length: int) -> pl.BlockSpec:
            return pl.BlockSpec(
                (self.rows, *length), lambda *ids: (self.index(*ids)[0], *(0 for _ in length))
            )

        refs: dict[str, tuple] = {"shift": (jnp.full(1, shift, jnp.int32), shared(1))}
        if arrays.mask is not None:
            refs["mask"] = (arrays.mask, self.scores("mask"))
        if arrays.bias is not None:
            refs["bias"] = (arrays.bias, self.scores("bias"))
        if arrays.key_mask is not None:
            refs["key_mask"] = (arrays.key_mask, by_row(lengths[1]))
        if arrays.key_lengths is not None:
            refs["key_lengths"] = (arrays.key_lengths.astype(jnp.int32), by_row())
        if arrays.segments is not None:
            for name, ids, length in zip(
                ("of_query", "of_key"), arrays.segments, lengths, strict=True
            ):
                refs[name] = (ids.astype(jnp.int32), by_row(length))
        if call.scoring.dropout:
            refs["count"] = (arrays.count, shared(4))
        arguments = (*inputs[:3], {name: x for name, (x, _) in refs.items()})
        return arguments, (*specs, {name: spec for name, (_, spec) in refs.items()})

    def run(
        self,
        kernel: Callable[..., None],
        name: str,
        grid: tuple[int, ...],
        arguments: tuple,
        specs: tuple,
        out: list,
        interpret: bool,
    ) -> Any:
        """A kernel's results; `out` has shapes and specs."""
        return pl.pallas_call(
            functools.partial(kernel, self.call),
            grid=grid,
            in_specs=specs,
            out_specs=[spec for _, spec in out],
            out_shape=[shape for shape, _ in out],
            compiler_params=triton.CompilerParams(
                num_warps=4 if _padded(self.call.size) <= 64 else 8, num_stages=2
            ),
            interpret=interpret,
            # plans read from it how many scores are computed
            name=name + ("_causal" if self.call.scoring.causal else ""),
        )(*arguments)


def _of_query(call: _Call, inputs: Inputs) -> _Part:
    """A program for each block of queries of every row and head."""
    per_group = inputs.query.shape[2] // inputs.key.shape[2]
    return _Part(
        call,
        None,
        None,
        None,
        lambda _, row, head: (row, head, lax.div(head, jnp.int32(per_group))),
    )


def _forward(
    scoring: Scoring, shift: Any, inputs: Inputs, dtype: Any, *, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """`TileKernel.forward`."""
    call, (rows, queries, heads, _) = _Call.of(scoring, inputs, backward=False), inputs.query.shape
    part = _of_query(call, inputs)
    arguments, specs = part.inputs(shift, inputs)
    out = [
        (
            jax.ShapeDtypeStruct((rows, queries, heads, call.width), dtype),
            part.by_head(call.blocks_q * call.block_q, call.width),
        ),
        (jax.ShapeDtypeStruct((rows, heads, queries), jnp.float32), part.line()),
    ]
    grid = (call.blocks_q, rows, heads)
    return tuple(
        part.run(_forward_kernel, "flash_attention_forward", grid, arguments, specs, out, interpret)
    )


def _backward(
    scoring: Scoring,
    shift: Any,
    inputs: Inputs,
    logs: jax.Array,
    inner: jax.Array,
    grad: jax.Array,
    dtype: Any,
    *,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """`TileKernel.backward`."""
    (rows, _, heads, _), groups, bias = inputs.query.shape, inputs.key.shape[2], inputs.arrays.bias
    more = (grad.astype(inputs.query.dtype), jnp.where(logs == MASKED, 0.0, logs), inner)

    def run(
        part: _Part, kernel: Callable[..., None], name: str, grid: tuple[int, ...], out: list
    ) -> Any:
        arguments, specs = part.inputs(shift, inputs)
        by_query = (
            part.by_head(part.call.blocks_q * part.call.block_q, part.call.width),
            part.line(),
            part.line(),
        )
        return part.run(
            kernel,
            f"flash_attention_{name}",
            grid,
            (*arguments, *more),
            (*specs, *by_query),
            out,
            interpret,
        )

    def like(x: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, dtype)

    call = _Call.of(scoring, inputs, backward=True)
    part = _of_query(call, inputs)
    out = [(like(inputs.query), part.by_head(call.blocks_q * call.block_q, call.size))]
    (dquery,) = run(part, _dquery_kernel, "dq", (call.blocks_q, rows, heads), out)
    dbias = None
    if bias is not None:
        everything = _Part(call, rows, heads, groups, lambda *_: (0, 0, 0))
        counts = zip(call.dims["bias"], (rows, heads, call.blocks_q, call.blocks_k), strict=True)
        out = [(jax.ShapeDtypeStruct(bias.shape, bias.dtype), everything.scores("bias"))]
        (dbias,) = run(
            everything,
            _dbias_kernel,
            "dbias",
            (math.prod(count for given, count in counts if given),),
            out,
        )
    call = _Call.of(scoring, inputs, backward=True, by_keys=True)
    part = _Part(call, None, heads // groups, None, lambda _, row, group: (row, group, group))
    length = call.blocks_k * call.block_k
    out = [
        (like(x), part.by_head(length, width, groups=True))
        for x, width in ((inputs.key, call.size), (inputs.value, call.width))
    ]
    dkey, dvalue = run(part, _dkey_kernel, "dkv", (call.blocks_k, rows, groups), out)
    return dquery, dkey, dvalue, dbias


def flash(*, interpret: bool = False) -> TileKernel:
    """The kernels; `interpret`: on any platform, block by block, for tests."""
    return TileKernel(
        functools.partial(_forward, interpret=interpret),
        functools.partial(_backward, interpret=interpret),
    )


FLASH, INTERPRETED = flash(), flash(interpret=True)


def refuses(scoring: Scoring, inputs: Inputs) -> str | None:
    """Why the kernels do not take such inputs, as shapes; None if they do."""
    query, key, value, _ = inputs
    if (
        query.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32)
        or not query.dtype == key.dtype == value.dtype
    ):
        return (
            "it takes bfloat16, float16 and float32, not "
            f"{', '.join(sorted({jnp.dtype(x.dtype).name for x in inputs[:3]}))}"
        )
    if max(query.shape[3], value.shape[3]) > WIDEST:
        return f"it takes heads up to {WIDEST}, not {max(query.shape[3], value.shape[3])}"
    return None
