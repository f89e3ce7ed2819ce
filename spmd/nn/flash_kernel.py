"""Attention as Pallas kernels for GPUs (Triton): scores stay in a program's registers, in the
forward and the backward pass.

Sources: Dao, FlashAttention-2, arXiv:2307.08691 (algorithms 1 and 2). Of the backward pass, one
kernel computes the gradients of keys and values, one those of queries, and one that of a bias, each
making the scores again, so that no two programs add to the same numbers.

A program computes a block of queries, keys or biases of one row and head, or of one group of heads
that share keys, and loops over blocks of the others; those that the causal mask, a window or
`key_lengths` hides are not read. Lengths and head sizes need not fit the blocks: what lies outside
is read as zeros, and not written.

*Unmeasured*: no GPU has run these kernels. They were compiled for GPUs, and tests compute them on a
CPU, block by block.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from spmd.nn.flash_blocks import (
    LOG2E,
    MASKED,
    BlockCall,
    is_inside,
    padded,
    place_of,
    store_block,
)
from spmd.nn.scoring import Inputs, Scoring, TileKernel

# The largest head size.
WIDEST = 256


def _forward_kernel(
    call: BlockCall, query: Any, key: Any, value: Any, refs: dict[str, Any], out: Any, logs: Any
) -> None:
    """One block of queries of one row and head."""
    start = pl.program_id(0) * call.block_q
    at = (None, None)
    place = (pl.program_id(1), pl.program_id(2))
    query_ = call.of_query(query, at, start)

    def block(number: Any, state: tuple) -> tuple:
        weighted, highest, total = state
        starts = (start, number * call.block_k)
        scores, _ = call.scores(refs, at, starts, query_, call.of_key(key, at, starts[1]))
        new_highest = jnp.maximum(highest, scores.max(axis=1))
        # Where all keys were masked so far, inf - inf would be NaN.
        base = jnp.where(new_highest == MASKED, 0.0, new_highest)
        shares = jnp.exp2(scores - base[:, None])
        decay = jnp.exp2(highest - base)
        total = total * decay + shares.sum(axis=1)
        if call.scoring.dropout:
            shares = shares * call.dropout_factors(refs, place, starts)
        more = call.dot(shares.astype(value.dtype), call.of_key(value, at, starts[1], call.width))
        return weighted * decay[:, None] + more, new_highest, total

    zeros = jnp.zeros((call.block_q, padded(call.width)), jnp.float32)
    by_query = jnp.zeros(call.block_q, jnp.float32)
    first, end = call.keys_of(refs, None, start)
    state = (zeros, by_query + MASKED, by_query)
    weighted, highest, total = lax.fori_loop(first, end, block, state)
    unseen = total == 0
    # 0 / 0 would be NaN where a query sees no key.
    total = jnp.where(unseen, 1.0, total)
    store_block(out, at, start, weighted / total[:, None], call.queries, call.width)
    numbers = (highest + jnp.log2(total)) * (1 / LOG2E)
    numbers = jnp.where(unseen, MASKED, numbers)
    inside = is_inside(start, call.block_q, call.queries)
    triton.store(logs.at[pl.ds(start, call.block_q)], numbers, mask=inside)


def _dquery_kernel(
    call: BlockCall,
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
    start = pl.program_id(0) * call.block_q
    at = (None, None)
    place = (pl.program_id(1), pl.program_id(2))
    query_ = call.of_query(query, at, start)
    grad_ = call.of_query(grad, at, start, call.width)
    logs_ = call.by_query(logs, at, start)
    inner_ = call.by_query(inner, at, start)

    def block(number: Any, total: jax.Array) -> jax.Array:
        starts = (start, number * call.block_k)
        key_ = call.of_key(key, at, starts[1])
        value_ = call.of_key(value, at, starts[1], call.width)
        arrays = (query_, key_, value_, grad_, logs_, inner_)
        _, _, dproducts = call.slopes(refs, at, place, starts, arrays)
        return total + call.dot(dproducts.astype(key.dtype), key_)

    zeros = jnp.zeros((call.block_q, padded(call.size)), jnp.float32)
    first, end = call.keys_of(refs, None, start)
    total = lax.fori_loop(first, end, block, zeros)
    store_block(dquery, at, start, total, call.queries, call.size)


def _dkey_kernel(
    call: BlockCall,
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
    start = pl.program_id(0) * call.block_k
    heads = query.shape[1]
    alone = (None, None)
    key_ = call.of_key(key, alone, start)
    value_ = call.of_key(value, alone, start, call.width)
    row = pl.program_id(1)
    group = pl.program_id(2)
    first, end = call.queries_of(refs, None, start)

    def block(head: Any, number: Any, totals: tuple) -> tuple:
        starts = (number * call.block_q, start)
        at = (None, head)
        query_ = call.of_query(query, at, starts[0])
        grad_ = call.of_query(grad, at, starts[0], call.width)
        logs_ = call.by_query(logs, at, starts[0])
        inner_ = call.by_query(inner, at, starts[0])
        arrays = (query_, key_, value_, grad_, logs_, inner_)
        place = (row, group * heads + head)
        weights, _, dproducts = call.slopes(refs, at, place, starts, arrays)
        key_total, value_total = totals
        key_total = key_total + call.dot(dproducts.astype(query.dtype), query_, (0, 0))
        value_total = value_total + call.dot(weights.astype(grad.dtype), grad_, (0, 0))
        return key_total, value_total

    def of_head(head: Any, totals: tuple) -> tuple:
        return lax.fori_loop(first, end, functools.partial(block, head), totals)

    key_zeros = jnp.zeros((call.block_k, padded(call.size)), jnp.float32)
    value_zeros = jnp.zeros((call.block_k, padded(call.width)), jnp.float32)
    key_total, value_total = lax.fori_loop(0, heads, of_head, (key_zeros, value_zeros))
    store_block(dkey, alone, start, key_total, call.keys, call.size)
    store_block(dvalue, alone, start, value_total, call.keys, call.width)


def _dbias_kernel(
    call: BlockCall,
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
    rows, _, heads, _ = query.shape
    groups = key.shape[2]
    dims = call.dims["bias"]
    counts = (rows, heads, call.blocks_q, call.blocks_k)
    number = pl.program_id(0)
    ids: list[Any] = [None] * 4
    # A program's number counts the blocks along the dims that the bias has, the last dim first.
    for dim in (3, 2, 1, 0):
        if dims[dim]:
            ids[dim] = lax.rem(number, jnp.int32(counts[dim]))
            number = lax.div(number, jnp.int32(counts[dim]))

    def block(place: tuple, total: jax.Array) -> jax.Array:
        row, head, number_q, number_k = place
        at = (row, head)
        at_keys = (row, lax.div(head, jnp.int32(heads // groups)))
        starts = (number_q * call.block_q, number_k * call.block_k)
        query_ = call.of_query(query, at, starts[0])
        key_ = call.of_key(key, at_keys, starts[1])
        value_ = call.of_key(value, at_keys, starts[1], call.width)
        grad_ = call.of_query(grad, at, starts[0], call.width)
        logs_ = call.by_query(logs, at, starts[0])
        inner_ = call.by_query(inner, at, starts[0])
        arrays = (query_, key_, value_, grad_, logs_, inner_)
        _, dscores, _ = call.slopes(refs, at, at, starts, arrays)
        return total + dscores

    def over(place: tuple, total: jax.Array) -> jax.Array:
        """Return the sum over all blocks that share a bias in the dims behind these."""
        dim = len(place)
        if dim == len(counts):
            return block(place, total)
        if dims[dim]:
            return over((*place, ids[dim]), total)

        def add(number: Any, total: jax.Array) -> jax.Array:
            return over((*place, number), total)

        return lax.fori_loop(0, counts[dim], add, total)

    total = over((), jnp.zeros((call.block_q, call.block_k), jnp.float32))
    slices = []
    inside = []
    for dim, block_, length in ((2, call.block_q, call.queries), (3, call.block_k, call.keys)):
        if dims[dim]:
            slices.append(pl.ds(ids[dim] * block_, block_))
            inside.append(is_inside(ids[dim] * block_, block_, length))
        else:
            total = total.sum(axis=dim - 4, keepdims=dim == 2)
    if not dims[2]:
        total = total[0]
    ref = dbias.at[place_of(ids[:2], *slices)]
    mask = None
    if len(inside) == 2:
        mask = inside[0][:, None] & inside[1]
    elif inside:
        mask = inside[0]
    triton.store(ref, total.astype(dbias.dtype), mask=mask)


@dataclasses.dataclass(frozen=True)
class _Part:
    """The part of the rows, heads and groups that a program has.

    Attributes:
      rows, heads, groups: how many of each; None: one, without a dim for it.
      index: numbers of row, head and group, in blocks of this size, by the program's place in the
        grid.
    """

    call: BlockCall
    rows: int | None
    heads: int | None
    groups: int | None
    index: Callable[..., tuple[Any, Any, Any]]

    def by_head(self, length: int, width: int, *, groups: bool = False) -> pl.BlockSpec:
        """Return the spec of an array [rows, length, heads or groups, width]."""

        def index(*ids: Any) -> tuple:
            row, head, group = self.index(*ids)
            if groups:
                return row, 0, group, 0
            return row, 0, head, 0

        heads = self.heads
        if groups:
            heads = self.groups
        return pl.BlockSpec((self.rows, length, heads, padded(width)), index)

    def line(self) -> pl.BlockSpec:
        """Return the spec of an array [rows, heads, queries]."""

        def index(*ids: Any) -> tuple:
            row, head, _ = self.index(*ids)
            return row, head, 0

        return pl.BlockSpec((self.rows, self.heads, self.call.padded_queries), index)

    def scores(self, name: str) -> pl.BlockSpec:
        """Return the spec of an array [rows, heads, queries, keys], without dims that are 1."""
        call = self.call
        dims = call.dims[name]
        shape: list[Any] = [self.rows, self.heads, call.padded_queries, call.padded_keys]
        for dim in range(4):
            if not dims[dim]:
                shape[dim] = None

        def index(*ids: Any) -> tuple:
            row, head, _ = self.index(*ids)
            if not dims[0]:
                row = 0
            if not dims[1]:
                head = 0
            return row, head, 0, 0

        return pl.BlockSpec(tuple(shape), index)

    def inputs(self, shift: Any, inputs: Inputs) -> tuple[tuple, tuple]:
        """Return arguments of a kernel, and their specs."""
        call = self.call
        arrays = inputs.arrays
        lengths = (call.padded_queries, call.padded_keys)
        specs = (
            self.by_head(lengths[0], call.size),
            self.by_head(lengths[1], call.size, groups=True),
            self.by_head(lengths[1], call.width, groups=True),
        )

        def shared(size: int) -> pl.BlockSpec:
            return pl.BlockSpec((size,), lambda *ids: (0,))

        def by_row(*length: int) -> pl.BlockSpec:
            def index(*ids: Any) -> tuple:
                row, _, _ = self.index(*ids)
                return row, *(0 for _ in length)

            return pl.BlockSpec((self.rows, *length), index)

        # A Pallas kernel closes over no traced values: the shift is an array, too.
        refs: dict[str, Any] = {"shift": jnp.full(1, shift, jnp.int32)}
        ref_specs = {"shift": shared(1)}
        if arrays.mask is not None:
            refs["mask"] = arrays.mask
            ref_specs["mask"] = self.scores("mask")
        if arrays.bias is not None:
            refs["bias"] = arrays.bias
            ref_specs["bias"] = self.scores("bias")
        if arrays.key_mask is not None:
            refs["key_mask"] = arrays.key_mask
            ref_specs["key_mask"] = by_row(lengths[1])
        if arrays.key_lengths is not None:
            refs["key_lengths"] = arrays.key_lengths.astype(jnp.int32)
            ref_specs["key_lengths"] = by_row()
        if arrays.segments is not None:
            of_query, of_key = arrays.segments
            refs["of_query"] = of_query.astype(jnp.int32)
            refs["of_key"] = of_key.astype(jnp.int32)
            ref_specs["of_query"] = by_row(lengths[0])
            ref_specs["of_key"] = by_row(lengths[1])
        if call.scoring.dropout:
            refs["count"] = arrays.count
            ref_specs["count"] = shared(4)
        return (*inputs[:3], refs), (*specs, ref_specs)

    def call_kernel(
        self,
        kernel: Callable[..., None],
        name: str,
        grid: tuple[int, ...],
        arguments: tuple,
        specs: tuple,
        out: list,
        interpret: bool,
    ) -> Any:
        """Return a kernel's results; `out` has shapes and specs."""
        warps = 8
        if padded(self.call.size) <= 64:
            warps = 4
        # A plan reads from the name how many scores are computed.
        if self.call.scoring.causal:
            name += "_causal"
        shapes, out_specs = map(list, zip(*out, strict=True))
        params = triton.CompilerParams(num_warps=warps, num_stages=2)
        compute = pl.pallas_call(
            functools.partial(kernel, self.call),
            grid=grid,
            in_specs=specs,
            out_specs=out_specs,
            out_shape=shapes,
            compiler_params=params,
            interpret=interpret,
            name=name,
        )
        return compute(*arguments)


def _of_query(call: BlockCall, inputs: Inputs) -> _Part:
    """Return the part of a program for each block of queries of every row and head."""
    per_group = inputs.query.shape[2] // inputs.key.shape[2]

    def index(_: Any, row: Any, head: Any) -> tuple:
        return row, head, lax.div(head, jnp.int32(per_group))

    return _Part(call, None, None, None, index)


def _forward(
    scoring: Scoring, shift: Any, inputs: Inputs, dtype: Any, *, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """`TileKernel.forward`."""
    call = BlockCall.of(scoring, inputs, backward=False)
    rows, queries, heads, _ = inputs.query.shape
    part = _of_query(call, inputs)
    arguments, specs = part.inputs(shift, inputs)
    result = jax.ShapeDtypeStruct((rows, queries, heads, call.width), dtype)
    logs = jax.ShapeDtypeStruct((rows, heads, queries), jnp.float32)
    out = [(result, part.by_head(call.padded_queries, call.width)), (logs, part.line())]
    grid = (call.blocks_q, rows, heads)
    return tuple(
        part.call_kernel(
            _forward_kernel, "flash_attention_forward", grid, arguments, specs, out, interpret
        )
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
    rows, _, heads, _ = inputs.query.shape
    groups = inputs.key.shape[2]
    bias = inputs.arrays.bias
    # The scores of a query that sees no key are minus infinity too, and inf - inf would be NaN.
    more = (grad.astype(inputs.query.dtype), jnp.where(logs == MASKED, 0.0, logs), inner)

    def call_kernel(
        part: _Part, kernel: Callable[..., None], name: str, grid: tuple[int, ...], out: list
    ) -> Any:
        arguments, specs = part.inputs(shift, inputs)
        by_query = (
            part.by_head(part.call.padded_queries, part.call.width),
            part.line(),
            part.line(),
        )
        return part.call_kernel(
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

    call = BlockCall.of(scoring, inputs, backward=True)
    part = _of_query(call, inputs)
    out = [(like(inputs.query), part.by_head(call.padded_queries, call.size))]
    (dquery,) = call_kernel(part, _dquery_kernel, "dq", (call.blocks_q, rows, heads), out)
    dbias = None
    if bias is not None:
        everything = _Part(call, rows, heads, groups, lambda *_: (0, 0, 0))
        counts = itertools.compress((rows, heads, call.blocks_q, call.blocks_k), call.dims["bias"])
        out = [(jax.ShapeDtypeStruct(bias.shape, bias.dtype), everything.scores("bias"))]
        (dbias,) = call_kernel(everything, _dbias_kernel, "dbias", (math.prod(counts),), out)
    call = BlockCall.of(scoring, inputs, backward=True, by_keys=True)
    part = _Part(call, None, heads // groups, None, lambda _, row, group: (row, group, group))
    out = [
        (like(inputs.key), part.by_head(call.padded_keys, call.size, groups=True)),
        (like(inputs.value), part.by_head(call.padded_keys, call.width, groups=True)),
    ]
    dkey, dvalue = call_kernel(part, _dkey_kernel, "dkv", (call.blocks_k, rows, groups), out)
    return dquery, dkey, dvalue, dbias


def flash(*, interpret: bool = False) -> TileKernel:
    """Return the kernels; `interpret`: on any platform, block by block, for tests."""
    return TileKernel(
        functools.partial(_forward, interpret=interpret),
        functools.partial(_backward, interpret=interpret),
    )


FLASH = flash()
INTERPRETED = flash(interpret=True)


def refuses(scoring: Scoring, inputs: Inputs) -> str | None:
    """Return the reason why the kernels do not take such inputs, as shapes; None if they do."""
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
