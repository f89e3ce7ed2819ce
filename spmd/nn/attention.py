"""Attention for models whose sequences a layout may shard, by the implementation that the layout or
the platform chooses.
"""

import dataclasses
import functools
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from spmd.base.tree import describe
from spmd.errors import DataError, LayoutError, OptionError, did_you_mean, short_repr
from spmd.layout.fixes import near_multiples
from spmd.nn.attention_kernels import AS_WRITTEN, KERNELS, Attend, choose
from spmd.nn.model_calls import manual_axes
from spmd.nn.parallel_context import FUSED, STORED, ParallelConfig, current
from spmd.nn.ring_attention import Ring, into_ring, out_of_ring, ring_attention
from spmd.nn.scoring import Inputs, ScoreArrays, Scoring, on_this_device, with_dropout


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    key_mask: jax.Array | None = None,
    key_lengths: jax.Array | None = None,
    segment_ids: jax.Array | tuple[jax.Array, jax.Array] | None = None,
    mask: jax.Array | None = None,
    bias: jax.Array | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    dropout: float = 0.0,
    dropout_key: jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Softmax attention: for every query, the mean of the values, weighted by the softmax of the
    scores of its key.

    Which implementation computes it is said by the argument, or by the layout's `[attention]`;
    outside of a step it is "xla", which holds all scores. "auto", the default of layouts, takes the
    first kernel that the platform has and that takes the shapes and options, and "xla" where there
    is none; the choice is among the notes of a run. The results are equal up to rounding, but those
    of a query without any key: zeros, where the mean of all values may be what a model computes as
    it is written. Under  [sequence] axis = "context"  the sequence is sharded over the devices of
    that axis. Keys and values are passed around the ring of devices, and no device ever holds the
    full sequence or its score matrix (`spmd.nn.ring_attention`, with sources). The result is the
    same up to the order of sums, in float32.

    Args:
      query: [rows, length, heads, head_dim].
      key, value: [rows, length of keys, heads, head_dim]; fewer heads if they divide those of the
        queries (grouped queries).
      causal: a position sees itself and those before it.
      window: how many positions before and after its own a query sees; one number for both, None
        for no bound.
      key_mask: bool[rows, length of keys], False at keys that are masked out (padding). A query
        without any key gets zeros.
      key_lengths: int32[rows], as a mask that is True for so many keys. cuDNN takes padding in this
        form.
      segment_ids: int32[rows, length], packed sequences: a query sees the keys of its own segment.
        A pair if keys have other ones.
      mask: bool, broadcast to [rows, heads, length, length of keys]; False where a query does not
        see a key.
      bias: added to the scores, of such a shape.
      scale: of the scores; 1 / sqrt(head_dim) by default.
      soft_cap: a bound on scores: x becomes soft_cap * tanh(x / soft_cap).
      dropout: the share of weights that are dropped, drawn with `dropout_key`.
      implementation: "auto", "cudnn", "triton", "splash", "chunked" or "xla"; None: that of the
        layout.
      dropout_key: a key of `jax.random`; needed with `dropout`.

    Returns:
      [rows, length, heads, head_dim], in the dtype and sharding of the query.

    Raises:
      OptionError: shapes or dtypes do not match; an option is out of range; the implementation is
        not there, or does not take them.
      LayoutError: the same of the layout's implementation.
      DataError: the devices of the axis (twice that in balanced order) do not divide a length.

    Example:
      >>> x = jnp.arange(24.0).reshape(1, 3, 2, 4)
      >>> attention(x, x, x, causal=True)[0, 0, 0]  # the first position sees only itself
      Array([0., 1., 2., 3.], dtype=float32)
    """
    segments = None
    if isinstance(segment_ids, tuple):
        segments = segment_ids
    elif segment_ids is not None:
        segments = (segment_ids, segment_ids)
    arrays = ScoreArrays(_four_dims(mask), _four_dims(bias), key_mask, key_lengths, segments)
    _check(query, key, value, arrays)
    _check_dropout(dropout, dropout_key)
    _check_numbers(scale, soft_cap)
    if scale is None:
        scale = 1 / math.sqrt(query.shape[-1])
    else:
        scale = float(scale)
    scoring = Scoring(scale, causal, _window(window), soft_cap, dropout)
    if dropout and dropout_key is not None:
        scores = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
        scoring, arrays = with_dropout(scoring, arrays, dropout_key, scores)
    return attend(Attend(scoring, query, key, value, arrays), implementation)


def attend(
    call: Attend,
    implementation: str | None = None,
    as_written: Callable[[], jax.Array] | None = None,
) -> jax.Array:
    """An attention by the implementation that is asked for, by the argument or the layout, and
    sharded as the layout says.

    Args:
      as_written: what the model itself computes, in place of "xla" and of what cannot be computed
        otherwise.
    """
    parallel = current()
    names = ("auto", *KERNELS)
    if implementation is not None and implementation not in names:
        raise OptionError(
            f'attention: no implementation "{implementation}".',
            fix=did_you_mean(implementation, names),
        )
    parallel.used.add("attention")
    axis = parallel.sequence.axis
    if axis is not None and parallel.axis_size(axis) > 1:
        try:
            return _ring(parallel, axis, call, implementation)
        except (OptionError, DataError) as error:
            if as_written is None:
                raise
            parallel.notes[
                f"note: {error.summary.removesuffix('.')}: it is computed as it is written, with "
                "all scores."
            ] = None
            return _as_written(as_written)
    if axis is not None:
        parallel.used.add("sequence")
    choice = implementation or parallel.attention
    platform = parallel.platform or jax.default_backend()
    # Kernels accept or refuse the shapes that one device has.
    local = _Sharded(parallel, call)
    name, reasons = choose(choice, local.call, platform)
    if name in reasons:
        # The model may ask JAX for an implementation that JAX has and spmd does not.
        if implementation is not None and as_written is not None:
            return _as_written(as_written)
        other, _ = choose("auto", local.call, platform)
        raise _cannot(choice, reasons[name], implementation is None, other)
    if choice == "auto" and KERNELS[name].on_shards and local.replicates_rows:
        reasons[name] = f"the workers do not divide {call.query.shape[0]} rows"
        name = "xla"
    if name != "xla" or reasons:
        by = name
        if name == "xla":
            by = "computed as it is written, with all scores"
        _note(parallel, f"attention of {local.call}: {by}", reasons)
    if name == "xla":
        if implementation is None and choice == "auto":
            parallel.used.add(STORED)
        return _as_written(as_written or functools.partial(KERNELS[name].compute, call))
    parallel.used.add(FUSED)
    if KERNELS[name].on_shards:
        return local.compute(KERNELS[name].compute)
    return KERNELS[name].compute(call)


def _as_written(function: Callable[[], jax.Array]) -> jax.Array:
    """Return attention that is computed in a scope in which nothing is replaced."""
    with jax.named_scope(AS_WRITTEN):
        return function()


def _note(parallel: ParallelConfig, choice: str, reasons: Mapping[str, str]) -> None:
    """Note a choice, and the reasons against others."""
    text = "; ".join([choice, *(f"{other}: {why}" for other, why in reasons.items())])
    if reasons:
        text = f"note: {text}"
    parallel.notes[f"{text}."] = None


def _cannot(
    implementation: str, why: str, by_layout: bool, other: str
) -> OptionError | LayoutError:
    """Return the error for an implementation that cannot compute this attention; `other` is the one
    that "auto" takes.
    """
    if other == "xla":
        other = "as written"
    fix = f'implementation = "auto", which is {other} here.'
    if by_layout:
        return LayoutError(f'[attention] implementation = "{implementation}": {why}.', fix=fix)
    return OptionError(f'attention(implementation="{implementation}"): {why}.', fix=fix)


class _Sharded:
    """An attention on each device's shards: rows over data axes, heads over the axes that no table
    of the layout has another use for.

    Attributes:
      call: that of one device, as shapes.
    """

    def __init__(self, parallel: ParallelConfig, call: Attend):
        self.parallel = parallel
        self.full = call
        rows, _, heads, _ = call.query.shape
        groups = call.key.shape[2]
        mesh_axes: tuple[str, ...] = ()
        if parallel.mesh is not None:
            mesh_axes = tuple(parallel.mesh.shape)
        self.axes = tuple(axis for axis in mesh_axes if axis not in manual_axes())
        self.rows = parallel.auto_row_axes(rows)
        others = (
            *parallel.data,
            parallel.pipeline.axis,
            parallel.sequence.axis,
            parallel.experts.axis,
        )
        self.heads: tuple[str, ...] = ()
        for axis in self.axes:
            free = axis not in others or parallel.axis_size(axis) == 1
            if free and heads % self._devices((*self.heads, axis)) == 0:
                self.heads = (*self.heads, axis)
        # Each device needs the groups of its heads: where there are fewer groups than devices, they
        # are repeated.
        self.groups = math.lcm(groups, self._devices(self.heads))
        if heads % self.groups != 0:
            self.groups = heads

    @property
    def replicates_rows(self) -> bool:
        """Return whether every worker would compute the rows of all: under `vmap`, or where the
        workers do not divide them.
        """
        return bool(self.parallel.auto_data_axes) and not self.rows

    def _devices(self, axes: tuple[str, ...]) -> int:
        return math.prod(map(self.parallel.axis_size, axes))

    @property
    def call(self) -> Attend:
        """The shapes on one device."""
        rows = self._devices(self.rows)
        heads = self._devices(self.heads)

        def local(x: Any, heads_of_x: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(
                (x.shape[0] // rows, x.shape[1], heads_of_x // heads, x.shape[3]), x.dtype
            )

        call = self.full
        query = local(call.query, call.query.shape[2])
        key = local(call.key, self.groups)
        value = local(call.value, self.groups)
        return dataclasses.replace(call, query=query, key=key, value=value)

    @property
    def repeated(self) -> Inputs:
        """The arrays, with as many groups as devices need."""
        call = self.full
        repeats = self.groups // call.key.shape[2]
        if repeats == 1:
            return call.inputs
        key = jnp.repeat(call.key, repeats, axis=2)
        value = jnp.repeat(call.value, repeats, axis=2)
        return call.inputs._replace(key=key, value=value)

    def _scores_spec(self, x: Any) -> PartitionSpec | None:
        """Return the spec of an array with the dims of scores, or with dims of 1."""
        if x is None:
            return None
        rows = heads = None
        if x.shape[0] > 1:
            rows = self.rows or None
        if x.shape[1] > 1:
            heads = self.heads or None
        return PartitionSpec(rows, heads)

    def compute(self, function: Any) -> jax.Array:
        """Return `function` of the attention on each device's shards, in a region in which all mesh
        axes are manual.
        """
        call = self.full
        if not self.axes:
            return function(call)
        inputs = self.repeated
        rows = self.rows or None
        by_head = PartitionSpec(rows, None, self.heads or None)
        arrays = call.arrays
        specs = jax.tree.map(lambda _: PartitionSpec(rows), arrays)
        specs = specs._replace(
            mask=self._scores_spec(arrays.mask), bias=self._scores_spec(arrays.bias)
        )
        # The count is that of the first row and head of all; `on_this_device` adds what a device is
        # ahead.
        if arrays.count is not None:
            specs = specs._replace(count=PartitionSpec())

        def on_shards(*shards: Any) -> jax.Array:
            query, key, value, arrays = on_this_device(
                call.scoring, Inputs(*shards), self.rows, self.heads
            )
            # `shard_map` makes two arrays of one that it gets twice, and the kernel for TPUs takes
            # the same segments for queries and keys only.
            if arrays.segments is not None and call.arrays.segments[0] is call.arrays.segments[1]:  # type: ignore[index]
                arrays = arrays._replace(segments=(arrays.segments[0],) * 2)
            return function(Attend(call.scoring, query, key, value, arrays))

        # A kernel that XLA cannot partition sees the shards of one device: cuDNN's attention is
        # partitioned by a call back into Python, which cannot be exported, Pallas's not at all.
        return self.parallel.shard_map(
            self.axes, on_shards, (by_head, by_head, by_head, specs), by_head
        )(*inputs)


def _ring(
    parallel: ParallelConfig, axis: str, call: Attend, implementation: str | None
) -> jax.Array:
    """Return attention over a sequence that is sharded over `axis`."""
    where = f'attention ([sequence] axis = "{axis}", {parallel.axis_size(axis)} devices)'
    refused = [option for option in call.options if option in ("a mask", "a bias")]
    if refused:
        fix = "a layout without [sequence], or attention without them."
        raise OptionError(f"{where}: the ring does not take {', '.join(refused)}.", fix=fix)
    choice = implementation or parallel.attention
    platform = parallel.platform or jax.default_backend()
    local = _Sharded(parallel, call)
    name, reasons = choose(choice, local.call, platform, in_ring=True)
    if name in reasons:
        other, _ = choose("auto", local.call, platform, in_ring=True)
        raise OptionError(
            f'{where}: implementation = "{choice}": {reasons[name]}.',
            fix=f'implementation = "auto", which is {other} here.',
        )
    devices = parallel.axis_size(axis)
    _note(parallel, f"attention of {local.call}, in a ring of {devices} devices: {name}", reasons)
    balanced = call.scoring.causal and parallel.sequence.order == "balanced"
    # A device has the first and the last part of the sequence that are left, or one part.
    parts = 1
    if balanced:
        parts = 2
    ring = Ring(
        parallel,
        axis,
        local.rows,
        local.heads,
        local.axes,
        parts,
        call.scoring,
        KERNELS[name].tiles,  # type: ignore[arg-type]
    )
    _check_lengths(where, ring, call.query, call.key)
    parallel.used.update(("sequence", FUSED))
    inputs = local.repeated
    arrays = inputs.arrays.lengths_as_mask(call.key.shape[1])
    count = arrays.count
    # Dropout's count is one for the whole sequence, and has no parts to be exchanged.
    inputs = inputs._replace(arrays=arrays._replace(count=None))
    if balanced:
        inputs = ring.map_shards(into_ring, inputs, inputs)
    out: Any = ring_attention(ring, inputs._replace(arrays=inputs.arrays._replace(count=count)))
    if not balanced:
        return out
    return ring.map_shards(out_of_ring, out, out)


def _four_dims(x: jax.Array | None) -> jax.Array | None:
    """Return an array that is broadcast to [rows, heads, length, length of keys], with four
    dims.
    """
    if x is None or x.ndim > 4:
        return x
    return x.reshape((1,) * (4 - x.ndim) + x.shape)


def _window(window: int | tuple[int | None, int | None] | None) -> tuple[int | None, int | None]:
    """Return the numbers of positions that a query sees before and after its own.

    Raises:
      OptionError: not numbers from 0.
    """
    if isinstance(window, tuple):
        before_after = window
    else:
        before_after = (window, window)
    if len(before_after) != 2 or not all(
        size is None or (type(size) is int and size >= 0) for size in before_after
    ):
        raise OptionError(
            f"attention: window={window!r}.",
            fix="a number of positions from 0, or a pair: before and after.",
        )
    return before_after


def _check_dropout(dropout: float, key: jax.Array | None) -> None:
    """Check the share that is dropped, and that there is a key to draw with."""
    if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise OptionError(f"attention: dropout={dropout!r}.", fix="a share from 0, below 1.")
    if dropout and key is None:
        raise OptionError(
            f"attention: dropout={dropout} without a key.",
            fix="dropout_key=rngs.dropout(), or dropout=0 in evaluation.",
        )


def _check_numbers(scale: Any, soft_cap: Any) -> None:
    """Check the numbers that change scores: a kernel has them in its program."""
    if scale is not None and not _is_number(scale):
        fix = (
            "a number, such as 1 / math.sqrt(head_dim); of an array: scale=1.0, and the query "
            "times it."
        )
        raise OptionError(f"attention: scale={short_repr(scale)}.", fix=fix)
    if soft_cap is not None and not (_is_number(soft_cap) and soft_cap > 0):
        raise OptionError(
            f"attention: soft_cap={short_repr(soft_cap)}.",
            fix="a number above 0, such as 50.0, or None.",
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


def _check(query: jax.Array, key: jax.Array, value: jax.Array, arrays: ScoreArrays) -> None:
    """Check that shapes and dtypes match."""
    shown = f"query {describe(query)}, key {describe(key)}, value {describe(value)}"
    matches = query.ndim == key.ndim == 4 and key.shape == value.shape
    if matches:
        rows, _, heads, size = query.shape
        rows_of_keys, _, groups, size_of_keys = key.shape
        divides = heads % max(groups, 1) == 0
        matches = rows == rows_of_keys and size == size_of_keys and divides
    if not matches:
        fix = (
            "[rows, length, heads, head_dim] each; keys and values alike, with the query's rows "
            "and head_dim, "
        )
        raise OptionError(f"attention: {shown}.", fix=f"{fix}and heads that divide the query's.")
    if (
        not query.dtype == key.dtype == value.dtype
        or not jnp.issubdtype(query.dtype, jnp.floating)
        or query.dtype.itemsize < 2
    ):
        fix = (
            "one dtype for all three: bfloat16, float16 or float32; key.astype(query.dtype) "
            "changes one."
        )
        raise OptionError(f"attention: {shown}.", fix=fix)
    rows, length, heads, _ = query.shape
    by_query = (rows, length)
    by_key = key.shape[:2]
    if arrays.key_mask is not None and (
        arrays.key_mask.shape != by_key or arrays.key_mask.dtype != bool
    ):
        fix = f"bool{list(by_key)}, one for each key."
        raise OptionError(f"attention: key_mask is {describe(arrays.key_mask)}.", fix=fix)
    lengths = arrays.key_lengths
    if lengths is not None and (
        lengths.shape != (rows,) or not jnp.issubdtype(lengths.dtype, jnp.integer)
    ):
        raise OptionError(
            f"attention: key_lengths is {describe(lengths)}.",
            fix=f"int32[{rows}], one for each row.",
        )
    if arrays.segments is not None:
        of_queries, of_keys = arrays.segments
        _check_segments(of_queries, by_query, "query")
        _check_segments(of_keys, by_key, "key")
    full = (rows, heads, length, key.shape[1])
    _check_like_scores("mask", "bool", jnp.bool_, arrays.mask, full)
    _check_like_scores("bias", "float", jnp.floating, arrays.bias, full)


def _check_segments(ids: jax.Array, shape: tuple[int, ...], owner: str) -> None:
    if ids.shape != shape or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise OptionError(
            f"attention: segment_ids is {describe(ids)}.",
            fix=f"int32{list(shape)}, one for each {owner}.",
        )


def _check_like_scores(
    name: str, kind: str, dtype: Any, x: jax.Array | None, full: tuple[int, ...]
) -> None:
    """Check an array that is broadcast to scores of the shape `full`."""
    if x is None:
        return
    fits = x.ndim == 4 and all(size in (1, most) for size, most in zip(x.shape, full, strict=True))
    if not fits or not jnp.issubdtype(x.dtype, dtype):
        raise OptionError(
            f"attention: {name} is {describe(x)}.",
            fix=f"{kind}{list(full)}, or 1 in place of a size.",
        )


def _check_lengths(where: str, ring: Ring, query: jax.Array, key: jax.Array) -> None:
    """Check that the ring can shard the lengths."""
    unit = ring.count * ring.parts
    if ring.scoring.causal and query.shape[1] != key.shape[1]:
        why = f"{where}: {query.shape[1]} queries and {key.shape[1]} keys under a causal mask."
        raise DataError(why, fix="as many of each, or a layout that does not shard sequences.")
    for length in (query.shape[1], key.shape[1]):
        if length % unit:
            if ring.parts == 2:
                parts = f"{unit} parts, two for each device in balanced order"
            else:
                parts = f"{unit} devices"
            why = (
                f"a sequence of {length} is not divisible by {parts}: {length} / {unit} leaves "
                f"{length % unit}."
            )
            raise DataError(
                f"{where}: {why}",
                fix=f"sequences of {near_multiples(length, unit)}, padded if need be.",
            )
