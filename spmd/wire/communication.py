"""A mean of gradients over workers, with its options and its state: what all transformations of
`spmd.wire` are made of.
"""

import dataclasses
import functools
import math
import sys
import warnings
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from spmd.base.path_match import compiled, match_all, matcher
from spmd.base.specs import Spec
from spmd.base.tree import Tree, describe, path_of
from spmd.errors import (
    CommunicationError,
    OptionError,
    check_integer,
    closest,
    did_you_mean,
    join_names,
    short_repr,
    type_name,
)
from spmd.wire.codec import CODECS
from spmd.wire.codec.base import Codec
from spmd.wire.codec.bfloat16 import Bfloat16
from spmd.wire.reduction import Averaging
from spmd.wire.region import (
    Axes,
    as_axes,
    axis_sizes,
    bound_sizes,
    check_dtypes,
    check_encodable,
    check_grads,
)
from spmd.wire.shard_layout import ShardLayout
from spmd.wire.transfer import (
    BUCKET_BYTES,
    CODEC,
    RESIDUAL,
    Memory,
    Transfer,
    init_memory,
    make_transfer,
    partition_specs,
)

OPTIONS = ("codecs", "error_feedback", "memory_dtype", "start_step", "bucket_bytes")


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("step", "memory"), meta_fields=("axes",)
)
@dataclasses.dataclass(frozen=True)
class WireState:
    """The state of a communication.

    Attributes:
      step: int32, updates so far.
      memory: by parameter path: "residual", what this worker's codec has lost so far, [workers,
        *gradient], sharded over `axes` on dim 0; "codec", the codec's own arrays, [1, ...], equal
        on all workers.
      axes: the mesh axes of the workers, outermost first.
    """

    step: jax.Array
    memory: Memory
    axes: tuple[str, ...]

    def specs(self) -> "WireState":
        """The spec of every leaf."""
        memory = partition_specs(self.memory, self.axes)
        return WireState(PartitionSpec(), memory, self.axes)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class Communication:
    """A mean over workers, with its options: what `all_reduce`, `reduce_scatter`, `hierarchical`,
    `zero1` and `local_sgd` are made of.

    With `scatter`, each worker gets a shard of the mean, along the dim that `shard_spec` chooses;
    with `rows` its row of gradients that are packed as [workers, ...]; else all of it.
    """

    axes: tuple[str, ...]
    codec: Codec
    codecs: tuple[tuple[str, Codec], ...] = ()
    error_feedback: bool = False
    memory_dtype: str = "float32"
    start_step: int = 0
    bucket_bytes: int = BUCKET_BYTES
    inside: tuple[str, ...] = ()
    scatter: bool = False
    rows: bool = False

    def transfers(self, arrays: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Transfer]:
        """Return how each gradient is communicated, from its shape on one worker."""
        codecs, matching = dict(self.codecs), matcher(pattern for pattern, _ in self.codecs)
        claims = {path: matching(path) for path in arrays}
        chosen = {
            path: codecs[patterns[0]] if patterns else self.codec
            for path, patterns in claims.items()
        }
        return {
            path: self._transfer(chosen[path], jnp.shape(leaf), sizes)
            for path, leaf in arrays.items()
        }

    def _transfer(self, codec: Codec, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Transfer:
        spec: Spec = ()
        if self.scatter:
            spec = shard_spec(shape, sizes)
        elif self.rows:
            spec = (self.axes,)
        layout = ShardLayout(shape, spec, self.axes, tuple(sizes[axis] for axis in self.axes))
        is_sent = any(size > 1 for axis, size in sizes.items() if axis not in self.inside)
        return make_transfer(codec, layout, error_feedback=self.error_feedback, is_sent=is_sent)

    def init(self, params: Tree) -> WireState:
        """The state at step 0: zero residuals, and the codecs' own arrays. Gradients have the
        shapes of `params`.
        """
        check_patterns([pattern for pattern, _ in self.codecs], params)
        lossless = self.codec.lossless and all(codec.lossless for _, codec in self.codecs)
        memory = (
            {}
            if lossless
            else self.init_memory(arrays_by_path(params), *axis_sizes(self.axes, params))
        )
        return WireState(jnp.zeros((), jnp.int32), memory, self.axes)

    def init_memory(
        self, arrays: Mapping[str, Any], sizes: Mapping[str, int], in_region: bool
    ) -> Memory:
        """Zero residuals, and the codecs' own arrays, of gradients with the shapes of `arrays`."""
        workers = 1 if in_region else math.prod(sizes.values())
        return init_memory(self.transfers(arrays, sizes), workers, dtype=self.memory_dtype)

    def update(
        self, grads: Tree, state: WireState, params: Tree = None, **extra: Any
    ) -> tuple[Tree, WireState]:
        """The mean gradients, and the next state."""
        del params, extra
        sizes, flat = bound_sizes(self.axes), arrays_by_path(grads)
        check_state(state, WireState, self.axes)
        check_dtypes(flat)
        flat = {path: jnp.asarray(leaf) for path, leaf in flat.items()}
        transfers = self.transfers(flat, sizes)
        check_encodable(flat, transfers)
        check_grads(
            self.axes,
            flat,
            lossless=all(transfer.codec.lossless for transfer in transfers.values()),
        )
        _check_memory(transfers, state.memory)
        if not self.codec.lossless and all(size == 1 for size in sizes.values()):
            warnings.warn(
                f"spmd.wire: one worker along {', '.join(self.axes)} sends nothing; {self.codec} "
                "is not used.",
                stacklevel=3,
            )
        averaging = Averaging(self.axes, transfers, self.bucket_bytes, self.inside, self.start_step)
        means, memory, _ = averaging.reduce(flat, state.memory, state.step)
        return jax.tree.unflatten(jax.tree.structure(grads), list(means.values())), WireState(
            state.step + 1, memory, self.axes
        )

    @property
    def transformation(self) -> optax.GradientTransformationExtraArgs:
        """Return what optax calls."""
        return optax.GradientTransformationExtraArgs(self.init, self.update)  # type: ignore[arg-type]


def check_patterns(patterns: Iterable[str], params: Tree) -> None:
    """Refuse a pattern of `codecs` that matches no parameter. In a part of `optax.partition`, it
    may match one of another part.
    """
    patterns = list(patterns)
    nodes = (
        jax.tree_util.tree_leaves_with_path(
            params, is_leaf=lambda node: isinstance(node, optax.MaskedNode)
        )
        if patterns
        else []
    )
    paths = [*(path_of(keys) for keys, _ in nodes), *(arrays_by_path(params) if patterns else ())]
    for pattern, matched in match_all(patterns, paths).items():
        if not matched:
            near = closest(pattern, paths)
            fix = (
                f'did you mean "{near}"?'
                if near
                else f"without it, or match one of: {join_names(dict.fromkeys(paths))}."
            )
            raise CommunicationError(
                f'codecs: the pattern "{pattern}" matches no parameter.', fix=fix
            )


def arrays_by_path(tree: Tree) -> dict[str, jax.Array]:
    """Arrays by parameter path, with or without `nnx.Variable` around them: `nnx.Optimizer` passes
    them to `init` only.
    """
    nnx = sys.modules.get("flax.nnx")
    kinds = (nnx.Variable,) if nnx else ()
    nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda node: isinstance(node, kinds))
    paths = [path_of(keys) for keys, _ in nodes]
    if len(set(paths)) < len(paths):
        path = next(path for path in paths if paths.count(path) > 1)
        raise CommunicationError(
            f"two arrays have the path {path}.",
            fix='keys without "/", which separates the levels of a path.',
            path=path,
        )
    return dict(zip(paths, jax.tree.leaves(tree), strict=True))


def check_state(state: Any, kind: type, axes: tuple[str, ...]) -> None:
    """Refuse a state that is of no such communication."""
    if not isinstance(state, kind) or state.axes != axes:
        found = (
            f"of workers along {', '.join(state.axes)}"
            if isinstance(state, kind)
            else type_name(state)
        )
        raise CommunicationError(
            f"a communication along {', '.join(axes)} has a state {kind.__name__}; it is given one "
            f"{found}.",
            fix="the state that init of this transformation, or its last update, returned.",
        )


def _check_memory(transfers: Mapping[str, Transfer], memory: Memory) -> None:
    """Refuse the state of another tree, or one that `jax.shard_map` did not split over workers."""
    wanted = {
        path: (1, *transfer.shard_layout.shape)
        for path, transfer in transfers.items()
        if transfer.error_feedback
    }
    kept = {path: entry[RESIDUAL].shape for path, entry in memory.items() if RESIDUAL in entry}
    if kept == wanted:
        return _check_codec_states(transfers, memory)
    path = next(path for path in (*wanted, *kept) if kept.get(path) != wanted.get(path))
    raise CommunicationError(
        f"the state is not that of these gradients: on each worker {path} needs the residual "
        f"{wanted.get(path, 'none')}, "
        f"and the state has {kept.get(path, 'none')}.",
        fix="init with these parameters, and wire.specs(state) among the in_specs and out_specs of "
        "jax.shard_map.",
        path=path,
    )


def _check_codec_states(transfers: Mapping[str, Transfer], memory: Memory) -> None:
    """Refuse arrays of another codec, or of another shape."""
    for path, transfer in transfers.items():
        shapes = {name: describe(leaf) for name, leaf in transfer.codec_shapes.items()}
        kept = {
            name: describe(leaf[0]) for name, leaf in memory.get(path, {}).get(CODEC, {}).items()
        }
        if kept != shapes:
            raise CommunicationError(
                f"the state is not that of these gradients: {transfer.codec} needs "
                f"{shapes or 'no arrays'} for {path}, and the state has "
                f"{kept or 'none'}.",
                fix="init with these parameters.",
                path=path,
            )


def make_communication(
    axes: Axes,
    codec: Codec,
    options: Mapping[str, Any] = MappingProxyType({}),
    *,
    inside: tuple[str, ...] = (),
    scatter: bool = False,
    rows: bool = False,
    on_or_off: tuple[str, str] = ("error_feedback=True.", "error_feedback=False."),
    parameters: tuple[str, ...] = ("codec",),
) -> Communication:
    """A `Communication` from `OPTIONS` that are checked.

    As fixes: `on_or_off` is how the caller's user sets error feedback, and `parameters` are the
    caller's own, beside `options`.
    """
    for name in options:
        if name not in OPTIONS:
            raise OptionError(f"no option {name}.", fix=did_you_mean(name, (*parameters, *OPTIONS)))
    codecs, error_feedback = options.get("codecs"), options.get("error_feedback", False)
    names = as_axes(axes)
    if not isinstance(codecs or {}, Mapping) or not all(
        isinstance(pattern, str) for pattern in codecs or {}
    ):
        raise OptionError(
            f"codecs={short_repr(codecs)}.",
            fix='codecs by a pattern of parameter paths, such as {"**/bias": wire.exact()}.',
        )
    pairs = tuple((codecs or {}).items())
    if type(error_feedback) is not bool:
        raise OptionError(f"error_feedback={short_repr(error_feedback)}.", fix="True or False.")
    for name, value in (
        ("codec", codec),
        *((f'codecs["{pattern}"]', value) for pattern, value in pairs),
    ):
        check_codec(name, value)
        if error_feedback and not value.reports_loss:
            raise OptionError(
                f"{name}={value} with error feedback: no worker knows what it loses.",
                fix=on_or_off[1],
            )
        if value.biased and not error_feedback:
            raise OptionError(
                f"{name}={value} without error feedback: what it drops is lost.", fix=on_or_off[0]
            )
        if inside and isinstance(value, Bfloat16) and value.reduce == "ring":
            why = "a ring reduces over all axes at once, so nothing would be exact inside."
            raise OptionError(
                f"{name}={value}: {why}",
                fix="wire.bfloat16(), which does not round inside; or wire.all_reduce.",
            )
    for pattern, _ in pairs:
        compiled(pattern)  # raises if it is none
    communication = Communication(
        names, codec, inside=inside, scatter=scatter, rows=rows, **{**options, "codecs": pairs}
    )
    if communication.memory_dtype not in ("float32", "bfloat16"):
        raise OptionError(
            f"memory_dtype={short_repr(communication.memory_dtype)}.",
            fix='"float32" or "bfloat16".',
        )
    check_integer(communication.start_step, "start_step", 0)
    check_integer(communication.bucket_bytes, "bucket_bytes")
    if communication.start_step >= 2**31:
        raise OptionError(
            f"start_step={communication.start_step}.",
            fix="below 2**31: steps are counted as int32.",
        )
    return communication


def check_codec(name: str, codec: Any) -> None:
    """Refuse what is no codec, such as a codec's name or its class."""
    if isinstance(codec, Codec):
        return
    fix = "a codec, such as wire.int8(block=256)."
    for known, kind in CODECS.items():
        if codec in (kind, known):
            # One of `spmd.wire` has its name there; one that was registered, that of its class.
            is_ours = kind.__module__.startswith("spmd.")
            fix = f"wire.{known}()." if is_ours else f"{kind.__name__}()."
    raise OptionError(
        f"{name}={codec.__name__ if isinstance(codec, type) else short_repr(codec)} is "
        f"{type_name(codec)}.",
        fix=fix,
    )


def shard_spec(shape: tuple[int, ...], sizes: Mapping[str, int]) -> Spec:
    """Return how `reduce_scatter` shards an array over workers: along the largest dim that they
    divide; () if they divide none.

    >>> (
    ...     shard_spec((3, 8, 16), {"data": 4}),
    ...     shard_spec((3,), {"data": 4}),
    ...     shard_spec((8,), {"host": 2, "gpu": 2}),
    ... )
    ((None, None, 'data'), (), (('host', 'gpu'),))
    """
    workers, axes = 1, tuple(sizes)
    for size in sizes.values():
        workers *= size
    dims = [dim for dim, size in enumerate(shape) if size and size % workers == 0]
    if not dims:
        return ()
    dim = max(dims, key=lambda dim: shape[dim])
    return (*[None] * dim, axes[0] if len(axes) == 1 else axes)
