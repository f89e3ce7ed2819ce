"""The codec interface, and the exchange that most codecs share.

A codec takes a *bucket*: the gradients of some parameters, each of them full on this worker and not
yet averaged. For each it returns the mean over workers (the shard that `ShardLayout` says), what
arrived of this worker's own gradient (`kept`), and the next codec state. Error feedback is exact
for every codec by this contract: **the mean over workers of `kept` is the returned mean.** So a
worker lost `gradient - kept`, whichever worker rounded it.
"""

import abc
import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd.base.tree import describe, nbytes
from spmd.errors import CodecError, OptionError, did_you_mean, short_repr, type_name
from spmd.wire import collectives
from spmd.wire.shard_layout import ShardLayout

State = dict[str, jax.Array]
Means = tuple[list[jax.Array], list[jax.Array], list[State]]


@dataclasses.dataclass(frozen=True)
class Bucket:
    """The shard layouts of a bucket's gradients, and the data axes along which they are reduced
    exactly first.
    """

    shard_layouts: tuple[ShardLayout, ...]
    inside: tuple[str, ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        """All data axes, outermost first."""
        return self.shard_layouts[0].axes

    @property
    def across(self) -> tuple[str, ...]:
        """The data axes along which the codec is used."""
        return tuple(axis for axis in self.axes if axis not in self.inside)

    @property
    def replicated_axes(self) -> tuple[str, ...]:
        """The data axes along which all workers get the same shard; equal for all gradients of a
        bucket.
        """
        return self.shard_layouts[0].replicated_axes

    @functools.cached_property
    def _order(self) -> list[int]:
        """The gradients by the width of their rows, so that those of one width are adjacent."""
        return sorted(range(len(self.shard_layouts)), key=lambda n: self.shard_layouts[n].width)

    @property
    def widths(self) -> list[int]:
        """The distinct widths, ascending."""
        return sorted({layout.width for layout in self.shard_layouts})

    def to_rows(self, grads: list[jax.Array]) -> jax.Array:
        """All gradients concatenated, float32[workers, elements that each worker owns]."""
        rows = [self.shard_layouts[number].to_rows(grads[number]) for number in self._order]
        return jnp.concatenate(rows, axis=1)

    def split_columns(self, rows: jax.Array) -> list[jax.Array]:
        """The columns of `rows` that belong to each gradient."""
        widths = [self.shard_layouts[number].width for number in self._order]
        parts = split_sizes(rows, widths, 1)
        by_number = dict(zip(self._order, parts, strict=True))
        return [by_number[number] for number in range(len(self.shard_layouts))]

    @property
    def _width_sizes(self) -> list[int]:
        """The columns that all gradients of a width have together, in the order of `widths`."""
        counts = collections.Counter(layout.width for layout in self.shard_layouts)
        return [width * counts[width] for width in self.widths]

    def split_widths(self, rows: jax.Array) -> list[jax.Array]:
        """For each width, float32[rows times gradients, width], for the codec to encode in one
        call.
        """
        parts = split_sizes(rows, self._width_sizes, 1)
        return [part.reshape(-1, width) for part, width in zip(parts, self.widths, strict=True)]

    def join_widths(self, parts: list[jax.Array]) -> jax.Array:
        """The inverse of `split_widths`."""
        sized = zip(parts, self._width_sizes, strict=True)
        return jnp.concatenate([part.reshape(-1, size) for part, size in sized], axis=1)


def option(default: Any, valid: Callable[[Any], bool], wanted: str) -> Any:
    """A field of a codec: its default, which values are valid, and how an error says what is
    wanted.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Rounded:
    ...     digits: int = option(
    ...         2, lambda value: type(value) is int and value >= 1, "a whole number from 1"
    ...     )

    Args:
      default: of the option.
      valid: says whether a value is valid.
      wanted: what an error asks for.

    Returns:
      A field of a dataclass.
    """
    return dataclasses.field(default=default, metadata={"valid": valid, "wanted": wanted})


def whole_number(default: int) -> Any:
    """An option that is a whole number from 1."""
    # `type`, since a bool is an int to `isinstance`.
    return option(default, lambda value: type(value) is int and value >= 1, "a whole number from 1")


def option_problem(codec: "type[Codec]", name: str, value: Any) -> str:
    """Return what a value of an option must be; "" if it is valid. An option declared without
    `option` takes values of its default's type.
    """
    declared = next(field for field in dataclasses.fields(codec) if field.name == name)  # type: ignore[arg-type]
    if "valid" in declared.metadata:
        valid = declared.metadata["valid"](value)
        wanted = declared.metadata["wanted"]
    else:
        valid = type(value) is type(declared.default)
        wanted = type_name(declared.default)
    if valid:
        return ""
    return wanted


class Codec(abc.ABC):
    """A wire format of gradients. Each codec is a frozen dataclass, and its fields are the options.

    `lossless` codecs lose nothing. What a `biased` codec drops is lost for good without error
    feedback.

    Example:
      >>> from spmd import wire
      >>> isinstance(wire.int8(block=128), Codec), wire.exact().lossless, wire.sign().biased
      (True, True, True)
    """

    lossless: ClassVar[bool] = False
    biased: ClassVar[bool] = False

    def __new__(cls, *values: Any, **options: Any) -> "Codec":
        """Refuse options that the codec does not have, by name."""
        if not options:
            # A class that is no dataclass yet has no fields to compare; `check` refuses it by name.
            return super().__new__(cls)
        names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
        for name in options:
            if name not in names:
                why = f"codec {cls.__name__}: no option {name}."
                raise OptionError(why, fix=did_you_mean(name, names))
        return super().__new__(cls)

    def __post_init__(self):
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, np.integer):
                # A Python number: options are checked by type, and numpy prints np.int64(256).
                value = int(value)
                # A frozen dataclass has no other way to set a field.
                object.__setattr__(self, field.name, value)
            wanted = option_problem(type(self), field.name, value)
            if wanted:
                why = f"codec {type(self).__name__}: {field.name}={short_repr(value)}."
                raise OptionError(why, fix=f"{wanted}.")

    @abc.abstractmethod
    def compresses(self, layout: ShardLayout, full_shape: tuple[int, ...]) -> bool:
        """Return whether this makes a gradient of `layout` smaller; if not, it is sent exactly.
        `full_shape` is the parameter's.
        """

    def init(self, key: jax.Array, shape: tuple[int, ...], full_shape: tuple[int, ...]) -> State:
        """The codec's state of one gradient, the same on every worker."""
        del key, shape, full_shape
        return {}

    @property
    def reports_loss(self) -> bool:
        """Return whether `mean` says what was lost of a worker's own gradient, as error feedback
        needs.
        """
        return True

    @property
    @abc.abstractmethod
    def error(self) -> float:
        """A bound on |x - decoded x| / |x| (Euclidean) for one encoding; the contract suite checks
        it.
        """

    @abc.abstractmethod
    def mean(self, grads: list[jax.Array], states: list[State], bucket: Bucket) -> Means:
        """The means, what arrived of this worker's own gradients, and the next states; one of each
        per gradient.
        """


class RowCodec(Codec):
    """A codec that compresses rows of numbers: all-to-all, sum in float32 at the owner, all-gather.

    Each row of each gradient is encoded separately, and a bucket is sent in one collective, so
    bucketing changes no number. (Rows of one width are encoded in one call: a model has few widths,
    and a smaller program compiles faster.) Each element is rounded at most twice for any number of
    workers: before it is sent to the owner, and before the mean is sent back. A ring rounds once
    per hop. All workers decode the same bytes, so their results are bit-equal. A worker's own row
    is not sent and not rounded; the second rounding, the owner's, is charged to the owner's `kept`.
    (One-shot exchange as in Megatron's reduce-scatter with float32 accumulation; two error memories
    as in 1-bit Adam, arXiv:2102.02888, here in one array.)

    Example:
      >>> from spmd import wire
      >>> isinstance(wire.int8(), RowCodec), isinstance(wire.power_sgd(rank=2), RowCodec)
      (True, False)
    """

    @abc.abstractmethod
    def encode(self, rows: jax.Array) -> Any:
        """The payload of float32[n, width]: a tree of arrays [n, ...]."""

    @abc.abstractmethod
    def decode(self, payload: Any, width: int) -> jax.Array:
        """The payload as float32[n, width]."""

    def compresses(self, layout: ShardLayout, full_shape: tuple[int, ...]) -> bool:
        """Return whether all encoded rows together are fewer bytes than the gradient as float32."""
        payload, problem = self.traced(layout.workers, layout.width)
        if problem:
            fix = "wire.check(codec), which checks all that a codec promises."
            raise CodecError(f"{self}: {problem}", fix=fix)
        sent = sum(map(nbytes, jax.tree.leaves(payload)))
        return sent < 4 * math.prod(layout.shape)

    def traced(self, rows: int, width: int) -> tuple[Any, str]:
        """The shapes of the payload of float32[rows, width], and what is wrong with them or with
        what they are decoded to; "".
        """
        shape = f"float32[{rows}, {width}]"
        payload = jax.eval_shape(self.encode, jax.ShapeDtypeStruct((rows, width), jnp.float32))
        for leaf in jax.tree.leaves(payload):
            if leaf.shape[:1] != (rows,):
                problem = f"encode of {shape} returns {describe(leaf)}; "
                problem += "dim 0 must have an entry for each row."
                return payload, problem
        decoded = jax.eval_shape(lambda payload: self.decode(payload, width), payload)
        shown = type_name(decoded)
        if hasattr(decoded, "shape"):
            shown = describe(decoded)
        if shown == shape:
            return payload, ""
        return payload, f"decode returns {shown} for rows {shape}, which it must return."

    def mean(self, grads: list[jax.Array], states: list[State], bucket: Bucket) -> Means:
        """One exchange per bucket."""
        layouts = bucket.shard_layouts
        rows, kept_rows = self.exchange(bucket.to_rows(grads), bucket)
        columns = zip(layouts, bucket.split_columns(rows), strict=True)
        means = [layout.join_rows(part) for layout, part in columns]
        kept_columns = zip(layouts, bucket.split_columns(kept_rows), strict=True)
        kept = [layout.from_rows(part) for layout, part in kept_columns]
        return means, kept, states

    def _encode_bucket(self, rows: jax.Array, bucket: Bucket) -> list[Any]:
        """Return the payload of each width."""
        payload = [self.encode(part) for part in bucket.split_widths(rows)]
        # Without the barrier XLA could use the values from before the rounding: this worker decodes
        # exactly what it sends.
        return lax.optimization_barrier(payload)

    def _decode_bucket(self, payload: Any, bucket: Bucket) -> jax.Array:
        """Return the rows of all widths, float32."""
        parts = zip(payload, bucket.widths, strict=True)
        return bucket.join_widths([self.decode(part, width) for part, width in parts])

    def exchange(self, rows: jax.Array, bucket: Bucket) -> tuple[jax.Array, jax.Array]:
        """From float32[workers, width]: the mean rows along `replicated_axes`, and what arrived of
        each of this worker's rows.
        """
        axes = bucket.axes
        inside = bucket.inside
        across = bucket.across
        inside_count = collectives.worker_count(inside)
        node_count = collectives.worker_count(across)
        # 1. inside a node, exactly: each worker sums the rows that it owns for the whole node
        grid = _reorder(rows, axes, (*across, *inside))
        grid = grid.reshape(node_count, inside_count, -1)
        node = collectives.reduce_scatter(grid, inside, 1)[:, 0] / inside_count
        # 2. across nodes, encoded: to the owner, which sums in float32
        width = node.shape[1]
        index = collectives.worker_index(across)
        payload = self._encode_bucket(node, bucket)
        # A worker's own row is neither sent nor rounded. There `kept` is exact, so it has room for
        # the owner's rounding in 3, and no second memory is needed.
        own_row = lax.dynamic_index_in_dim(node, index)
        received = packed_collective(
            payload, node_count, lambda part: collectives.all_to_all(part, across)
        )
        received = self._decode_bucket(received, bucket)
        received = lax.dynamic_update_index_in_dim(received, own_row, index, 0)
        # Only the owner adds up, so all workers get the bits of one sum, whatever its order.
        mean = received.sum(0, keepdims=True) / node_count
        decoded = self._decode_bucket(payload, bucket)
        kept = lax.dynamic_update_index_in_dim(decoded, own_row, index, 0)
        # 3. back to all workers that need it, first across nodes; this rounding is charged to the
        #    owner
        outer = tuple(axis for axis in bucket.replicated_axes if axis in across)
        inner = tuple(axis for axis in bucket.replicated_axes if axis in inside)
        if outer:
            payload = self._encode_bucket(mean, bucket)
            # Times the number of nodes: the owner alone is charged with an error that all get, and
            # the contract is about the mean of `kept` over workers.
            lost = (mean - self._decode_bucket(payload, bucket)) * node_count
            kept = lax.dynamic_update_index_in_dim(kept, own_row - lost, index, 0)
            gathered = packed_collective(
                payload, 1, lambda part: collectives.all_gather(part, outer, 0)
            )
            mean = self._decode_bucket(gathered, bucket)
        mean = collectives.all_gather(mean[:, None], inner, 1)
        mean = _reorder(mean, (*outer, *inner), bucket.replicated_axes)
        # 4. what the node lost is charged to the worker that summed for it
        if inside:
            # Times the number of the node's workers: one of them is charged with the loss of all.
            lost = (node - kept)[:, None] * inside_count
            inside_index = collectives.worker_index(inside)
            own_part = lax.dynamic_slice_in_dim(grid, inside_index, 1, axis=1)
            kept = lax.dynamic_update_slice_in_dim(grid, own_part - lost, inside_index, axis=1)
        kept = _reorder(kept, (*across, *inside), axes)
        return mean.reshape(-1, width), kept.reshape(-1, width)


def packed_collective(payload: Any, rows: int, collective: Callable[[jax.Array], jax.Array]) -> Any:
    """Send a payload of `rows` rows in one collective: its arrays concatenated, as bytes unless all
    have the same dtype.
    """
    leaves, structure = jax.tree.flatten(payload)
    # One array has one dtype: joined as they are, int8 values would become float32. As bytes,
    # values and scales are one message with one latency.
    one_dtype = len({leaf.dtype for leaf in leaves}) == 1
    as_sent = leaves
    if not one_dtype:
        as_sent = [lax.bitcast_convert_type(leaf, jnp.uint8) for leaf in leaves]
    # reshape to [rows, -1] raises for arrays without elements
    parts = [leaf.reshape(rows, leaf.size // rows) for leaf in as_sent]
    received = collective(jnp.concatenate(parts, axis=1))
    received_parts = split_sizes(received, [part.shape[1] for part in parts], 1)
    unpacked = []
    for part, leaf in zip(received_parts, as_sent, strict=True):
        count = leaf.shape[0] * received.shape[0] // rows
        unpacked.append(part.reshape(count, *leaf.shape[1:]))
    if not one_dtype:
        typed = zip(unpacked, leaves, strict=True)
        unpacked = [lax.bitcast_convert_type(part, leaf.dtype) for part, leaf in typed]
    return jax.tree.unflatten(structure, unpacked)


def flat_mean(parts: list[jax.Array], axes: tuple[str, ...]) -> list[jax.Array]:
    """Return the means over workers of several arrays [elements], float32 or bfloat16, in one
    all-reduce; the means are float32.
    """
    joined = jnp.concatenate([part.reshape(-1) for part in parts])
    # Divided in float32: a mean in bfloat16 would be rounded once more.
    total = collectives.all_reduce(joined, axes).astype(jnp.float32)
    mean = total / collectives.worker_count(axes)
    return split_sizes(mean, [part.size for part in parts], 0)


def split_sizes(x: jax.Array, sizes: Iterable[int], dim: int) -> list[jax.Array]:
    """Return consecutive parts of `x`, of these sizes along a dim, which together are all of it.

    >>> [part.tolist() for part in split_sizes(jnp.arange(3), [1, 2], 0)]
    [[0], [1, 2]]
    """
    ends = list(itertools.accumulate(sizes))
    return jnp.split(x, ends[:-1], axis=dim)


def _reorder(rows: jax.Array, before: tuple[str, ...], after: tuple[str, ...]) -> jax.Array:
    """Return rows of workers in the order of the axes `before`, [workers, width] or their grid
    [*before, width], as the grid [*after, width].
    """
    grid = rows.reshape(*map(_size, before), rows.shape[-1])
    order = [before.index(axis) for axis in after]
    return grid.transpose(*order, len(before))


def _size(axis: str) -> int:
    return collectives.worker_count((axis,))


def blocks(rows: jax.Array, size: int) -> jax.Array:
    """[n, width] as [n, blocks, size], the last block padded with zeros."""
    count = -(-rows.shape[1] // size)
    padded = jnp.pad(rows, ((0, 0), (0, count * size - rows.shape[1])))
    return padded.reshape(rows.shape[0], count, size)


def scaled_blocks(values: jax.Array, scale: jax.Array, size: int) -> jax.Array:
    """Return float32[n, width] times the scale of each block of `size` elements, [n, blocks, 1];
    a row that is shorter than `size` is one block.
    """
    width = values.shape[1]
    return unblocks(blocks(values, min(size, width)) * scale, width)


def finite_or_nan(scale: jax.Array) -> jax.Array:
    """Return scales with NaN for one that is not finite, so that every element of its block is
    decoded as NaN.
    """
    return jnp.where(jnp.isfinite(scale), scale, jnp.nan)


def unblocks(values: jax.Array, width: int) -> jax.Array:
    """The inverse of `blocks`."""
    return values.reshape(values.shape[0], -1)[:, :width]
