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
from collections.abc import Callable
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
        return jnp.concatenate(
            [self.shard_layouts[n].to_rows(grads[n]) for n in self._order], axis=1
        )

    def split_columns(self, rows: jax.Array) -> list[jax.Array]:
        """The columns of `rows` that belong to each gradient."""
        ends = list(itertools.accumulate(self.shard_layouts[n].width for n in self._order))
        parts = jnp.split(rows, ends[:-1], axis=1)
        return [parts[self._order.index(n)] for n in range(len(self.shard_layouts))]

    def split_widths(self, rows: jax.Array) -> list[jax.Array]:
        """For each width, float32[rows times gradients, width], for the codec to encode in one
        call.
        """
        counts = collections.Counter(layout.width for layout in self.shard_layouts)
        ends = list(itertools.accumulate(width * counts[width] for width in self.widths))
        return [
            part.reshape(-1, width)
            for part, width in zip(jnp.split(rows, ends[:-1], axis=1), self.widths, strict=True)
        ]

    def join_widths(self, parts: list[jax.Array]) -> jax.Array:
        """The inverse of `split_widths`."""
        counts = collections.Counter(layout.width for layout in self.shard_layouts)
        sizes = [width * counts[width] for width in self.widths]
        return jnp.concatenate(
            [part.reshape(-1, size) for part, size in zip(parts, sizes, strict=True)], axis=1
        )


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
    return option(default, lambda value: type(value) is int and value >= 1, "a whole number from 1")


def option_problem(codec: "type[Codec]", name: str, value: Any) -> str:
    """Return what a value of an option must be; "" if it is valid. An option declared without
    `option` takes values of its default's type.
    """
    declared = next(field for field in dataclasses.fields(codec) if field.name == name)  # type: ignore[arg-type]
    if "valid" in declared.metadata:
        return "" if declared.metadata["valid"](value) else declared.metadata["wanted"]
    kind = type(declared.default)
    return "" if type(value) is kind else type_name(declared.default)


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
        for name in options:
            if name not in (known := [field.name for field in dataclasses.fields(cls)]):  # type: ignore[arg-type]
                raise OptionError(
                    f"codec {cls.__name__}: no option {name}.", fix=did_you_mean(name, known)
                )
        return super().__new__(cls)

    def __post_init__(self):
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, np.integer):
                value = int(value)
                object.__setattr__(self, field.name, value)
            if wanted := option_problem(type(self), field.name, value):
                raise OptionError(
                    f"codec {type(self).__name__}: {field.name}={short_repr(value)}.",
                    fix=f"{wanted}.",
                )

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
            raise CodecError(
                f"{self}: {problem}",
                fix="wire.check(codec), which checks all that a codec promises.",
            )
        return sum(map(nbytes, jax.tree.leaves(payload))) < 4 * math.prod(layout.shape)

    def traced(self, rows: int, width: int) -> tuple[Any, str]:
        """The shapes of the payload of float32[rows, width], and what is wrong with them or with
        what they are decoded to; "".
        """
        payload = jax.eval_shape(self.encode, jax.ShapeDtypeStruct((rows, width), jnp.float32))
        for leaf in jax.tree.leaves(payload):
            if leaf.shape[:1] != (rows,):
                return (
                    payload,
                    f"encode of float32[{rows}, {width}] returns {describe(leaf)}; dim 0 must have "
                    "an entry for each row.",
                )
        decoded = jax.eval_shape(lambda payload: self.decode(payload, width), payload)
        shown = describe(decoded) if hasattr(decoded, "shape") else type_name(decoded)
        fine = shown == f"float32[{rows}, {width}]"
        return (
            payload,
            ""
            if fine
            else f"decode returns {shown} for rows float32[{rows}, {width}], which it must return.",
        )

    def mean(self, grads: list[jax.Array], states: list[State], bucket: Bucket) -> Means:
        """One exchange per bucket."""
        rows, kept = self.exchange(bucket.to_rows(grads), bucket)
        means = [
            layout.join_rows(part)
            for layout, part in zip(bucket.shard_layouts, bucket.split_columns(rows), strict=True)
        ]
        kept = [
            layout.from_rows(part)
            for layout, part in zip(bucket.shard_layouts, bucket.split_columns(kept), strict=True)
        ]
        return means, kept, states

    def exchange(self, rows: jax.Array, bucket: Bucket) -> tuple[jax.Array, jax.Array]:
        """From float32[workers, width]: the mean rows along `replicated_axes`, and what arrived of
        each of this worker's rows.
        """
        axes, inside, across = bucket.axes, bucket.inside, bucket.across

        def encode(rows: jax.Array) -> Any:  # the barrier makes XLA decode exactly what is sent
            return lax.optimization_barrier(
                [self.encode(part) for part in bucket.split_widths(rows)]
            )

        def decode(parts: Any) -> jax.Array:
            return bucket.join_widths(
                [self.decode(part, width) for part, width in zip(parts, bucket.widths, strict=True)]
            )

        # 1. inside a node, exactly: each worker sums the rows that it owns for the whole node
        grid = _transpose(rows.reshape(*map(_size, axes), -1), axes, (*across, *inside))
        grid = grid.reshape(collectives.worker_count(across), collectives.worker_count(inside), -1)
        node = collectives.reduce_scatter(grid, inside, 1)[:, 0] / grid.shape[1]
        # 2. across nodes, encoded: to the owner, which sums in float32
        width, index = node.shape[1], collectives.worker_index(across)
        payload, own_row = encode(node), lax.dynamic_index_in_dim(node, index)
        received = decode(
            packed_collective(
                payload, node.shape[0], lambda part: collectives.all_to_all(part, across)
            )
        )
        mean = (
            lax.dynamic_update_index_in_dim(received, own_row, index, 0).sum(0, keepdims=True)
            / node.shape[0]
        )
        kept = lax.dynamic_update_index_in_dim(decode(payload), own_row, index, 0)
        # 3. back to all workers that need it, first across nodes; this rounding is charged to the
        #    owner
        outer = tuple(axis for axis in bucket.replicated_axes if axis in across)
        inner = tuple(axis for axis in bucket.replicated_axes if axis in inside)
        if outer:
            payload = encode(mean)
            lost = (mean - decode(payload)) * node.shape[0]
            kept = lax.dynamic_update_index_in_dim(kept, own_row - lost, index, 0)
            mean = decode(
                packed_collective(payload, 1, lambda part: collectives.all_gather(part, outer, 0))
            )
        mean = collectives.all_gather(mean[:, None], inner, 1)
        mean = _transpose(
            mean.reshape(*map(_size, (*outer, *inner)), width),
            (*outer, *inner),
            bucket.replicated_axes,
        )
        # 4. what the node lost is charged to the worker that summed for it
        if inside:
            lost = (node - kept)[:, None] * grid.shape[1]
            inside_index = collectives.worker_index(inside)
            own_part = lax.dynamic_slice_in_dim(grid, inside_index, 1, axis=1)
            kept = lax.dynamic_update_slice_in_dim(grid, own_part - lost, inside_index, axis=1)
        kept = _transpose(
            kept.reshape(*map(_size, (*across, *inside)), width), (*across, *inside), axes
        )
        return mean.reshape(-1, width), kept.reshape(-1, width)


def packed_collective(payload: Any, rows: int, collective: Callable[[jax.Array], jax.Array]) -> Any:
    """Send a payload of `rows` rows in one collective: its arrays concatenated, as bytes unless all
    have the same dtype.
    """
    leaves, structure = jax.tree.flatten(payload)
    one_dtype = len({leaf.dtype for leaf in leaves}) == 1
    as_sent = (
        leaves if one_dtype else [lax.bitcast_convert_type(leaf, jnp.uint8) for leaf in leaves]
    )
    # -1 fails for arrays without elements
    parts = [leaf.reshape(rows, leaf.size // rows) for leaf in as_sent]
    received = collective(jnp.concatenate(parts, axis=1))
    ends = itertools.accumulate(part.shape[1] for part in parts[:-1])
    split = zip(jnp.split(received, list(ends), axis=1), as_sent, strict=True)
    unpacked = [
        part.reshape(leaf.shape[0] * received.shape[0] // rows, *leaf.shape[1:])
        for part, leaf in split
    ]
    if not one_dtype:
        unpacked = [
            lax.bitcast_convert_type(part, leaf.dtype)
            for part, leaf in zip(unpacked, leaves, strict=True)
        ]
    return jax.tree.unflatten(structure, unpacked)


def _size(axis: str) -> int:
    return collectives.worker_count((axis,))


def _transpose(grid: jax.Array, before: tuple[str, ...], after: tuple[str, ...]) -> jax.Array:
    """The grid [*before, width] with its leading dims in the order `after`."""
    return grid.transpose(*(before.index(axis) for axis in after), len(before))


def blocks(rows: jax.Array, size: int) -> jax.Array:
    """[n, width] as [n, blocks, size], the last block padded with zeros."""
    count = -(-rows.shape[1] // size)
    return jnp.pad(rows, ((0, 0), (0, count * size - rows.shape[1]))).reshape(
        rows.shape[0], count, size
    )


def unblocks(values: jax.Array, width: int) -> jax.Array:
    """The inverse of `blocks`."""
    return values.reshape(values.shape[0], -1)[:, :width]
