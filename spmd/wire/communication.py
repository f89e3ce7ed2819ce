"""A mean of gradients over workers, with its options and its state: what all transformations of
`spmd.wire` are made of.
"""

import collections
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
from spmd.base.specs import Spec, entry_axes, pspec, spec_axes
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
    FIX_SPLIT,
    Axes,
    as_axes,
    automatic_sizes,
    axis_sizes,
    bound_sizes,
    check_dtypes,
    check_encodable,
    check_grads,
    count_rows,
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
    jax.tree_util.register_dataclass,
    data_fields=("step", "memory"),
    meta_fields=("axes", "model_specs"),
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
      model_specs: of gradients that are sharded over other mesh axes, by path.
    """

    step: jax.Array
    memory: Memory
    axes: tuple[str, ...]
    model_specs: tuple[tuple[str, Spec], ...] = ()

    @property
    def model_axes(self) -> tuple[str, ...]:
        """Return the mesh axes that `model_specs` name."""
        return axes_of_specs(self.model_specs)

    def specs(self) -> "WireState":
        """The spec of every leaf for `jax.shard_map`, over the workers' axes alone."""
        return self._with_specs({})

    def placements(self) -> "WireState":
        """The spec of every leaf on the mesh, over all of its axes."""
        return self._with_specs(dict(self.model_specs))

    def _with_specs(self, model_specs: Mapping[str, Spec]) -> "WireState":
        memory = partition_specs(self.memory, self.axes, model_specs)
        # The place of an array holds its spec here.
        step: Any = PartitionSpec()
        return dataclasses.replace(self, step=step, memory=memory)


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
    model_specs: tuple[tuple[str, Spec], ...] = ()

    def transfers(
        self,
        arrays: Mapping[str, Any],
        sizes: Mapping[str, int],
        model_sizes: Mapping[str, int] = MappingProxyType({}),
    ) -> dict[str, Transfer]:
        """Return how each gradient is communicated, from its shape on one worker.

        Args:
          sizes: workers along each axis.
          model_sizes: devices along each axis of `model_specs`.
        """
        codecs = dict(self.codecs)
        matching = matcher(codecs)
        model_specs = dict(self._specs_by_path(arrays))
        transfers = {}
        for path, leaf in arrays.items():
            patterns = matching(path)
            codec = self.codec
            if patterns:
                codec = codecs[patterns[0]]
            shape = jnp.shape(leaf)
            if path in model_specs:
                spec = model_specs[path]
                transfers[path] = self._sharded_transfer(
                    path, codec, shape, spec, sizes, model_sizes
                )
            else:
                transfers[path] = self._transfer(codec, shape, sizes)
        return transfers

    def _specs_by_path(self, arrays: Mapping[str, Any]) -> tuple[tuple[str, Spec], ...]:
        """Return the spec of each gradient that is sharded over other mesh axes: the first of
        `model_specs` that matches its path, if it names an axis.
        """
        model_specs = dict(self.model_specs)
        matching = matcher(model_specs)
        by_path = []
        for path, leaf in arrays.items():
            patterns = matching(path)
            # XLA has no sharding of an array without elements (jaxlib 0.10).
            if patterns and all(jnp.shape(leaf)) and spec_axes(model_specs[patterns[0]]):
                by_path.append((path, model_specs[patterns[0]]))
        return tuple(by_path)

    def _sharded_transfer(
        self,
        path: str,
        codec: Codec,
        shape: tuple[int, ...],
        model_spec: Spec,
        sizes: Mapping[str, int],
        model_sizes: Mapping[str, int],
    ) -> Transfer:
        """Return how a gradient is communicated whose local shards along other mesh axes are each
        sent by one device.
        """
        local_shape = _local_shape(path, shape, model_spec, model_sizes)
        return self._transfer(
            codec,
            local_shape,
            sizes,
            full_shape=shape,
            model_spec=model_spec,
            nested=True,
            codec_states=math.prod(model_sizes[axis] for axis in spec_axes(model_spec)),
        )

    def _transfer(
        self, codec: Codec, shape: tuple[int, ...], sizes: Mapping[str, int], **options: Any
    ) -> Transfer:
        spec: Spec = ()
        if self.scatter:
            spec = shard_spec(shape, sizes)
        elif self.rows:
            spec = (self.axes,)
        counts = tuple(sizes[axis] for axis in self.axes)
        layout = ShardLayout(shape, spec, self.axes, counts)
        is_sent = any(size > 1 for axis, size in sizes.items() if axis not in self.inside)
        return make_transfer(
            codec, layout, error_feedback=self.error_feedback, is_sent=is_sent, **options
        )

    def init(self, params: Tree) -> WireState:
        """The state at step 0: zero residuals, and the codecs' own arrays. Gradients have the
        shapes of `params`.
        """
        check_patterns([pattern for pattern, _ in self.codecs], params)
        check_patterns([pattern for pattern, _ in self.model_specs], params, "model_specs")
        memory: Memory = {}
        # Exact gradients need no state, so the mesh need not be known here.
        if not all(codec.lossless for codec in (self.codec, *dict(self.codecs).values())):
            sizes, in_region = axis_sizes(self.axes, params)
            memory = self.init_memory(arrays_by_path(params), sizes, in_region)
        model_specs = self._specs_by_path(arrays_by_path(params))
        return WireState(jnp.zeros((), jnp.int32), memory, self.axes, model_specs)

    def init_memory(
        self, arrays: Mapping[str, Any], sizes: Mapping[str, int], in_region: bool
    ) -> Memory:
        """Zero residuals, and the codecs' own arrays, of gradients with the shapes of `arrays`."""
        workers = count_rows(sizes, in_region=in_region)
        model_axes = axes_of_specs(self.model_specs)
        model_sizes, _ = axis_sizes(model_axes, arrays) if model_axes else ({}, False)
        transfers = self.transfers(arrays, sizes, model_sizes)
        return init_memory(transfers, workers, dtype=self.memory_dtype)

    def update(
        self, grads: Tree, state: WireState, params: Tree = None, **extra: Any
    ) -> tuple[Tree, WireState]:
        """The mean gradients, and the next state."""
        del params, extra
        sizes = bound_sizes(self.axes)
        by_path = arrays_by_path(grads)
        check_state(state, WireState, self.axes)
        self._check_model_specs(state, by_path)
        check_dtypes(by_path)
        by_path = {path: jnp.asarray(leaf) for path, leaf in by_path.items()}
        model_sizes = automatic_sizes(axes_of_specs(self.model_specs), self.axes)
        transfers = self.transfers(by_path, sizes, model_sizes)
        check_encodable(by_path, transfers)
        lossless = all(transfer.codec.lossless for transfer in transfers.values())
        check_grads(self.axes, by_path, lossless=lossless)
        _check_memory(transfers, state.memory)
        if not self.codec.lossless and all(size == 1 for size in sizes.values()):
            warnings.warn(
                f"spmd.wire: one worker along {', '.join(self.axes)} sends nothing; {self.codec} "
                "is not used.",
                stacklevel=3,
            )
        averaging = Averaging(
            self.axes,
            transfers,
            self.bucket_bytes,
            self.inside,
            self.start_step,
            model_axes=model_sizes,
        )
        means, memory, _ = averaging.reduce(by_path, state.memory, state.step)
        mean_grads = jax.tree.unflatten(jax.tree.structure(grads), list(means.values()))
        return mean_grads, dataclasses.replace(state, step=state.step + 1, memory=memory)

    def _check_model_specs(self, state: WireState, arrays: Mapping[str, Any]) -> None:
        """Refuse the state of a transformation with other `model_specs`."""
        needed = dict(self._specs_by_path(arrays))
        specs = dict(state.model_specs)
        for path in (*needed, *specs):
            if needed.get(path) != specs.get(path):
                raise CommunicationError(
                    f"model_specs: {path} has {pspec(needed.get(path, ()))} here, and "
                    f"{pspec(specs.get(path, ()))} in the state.",
                    fix="the state that init of this transformation, or its last update, returned.",
                    path=path,
                )

    @property
    def transformation(self) -> optax.GradientTransformationExtraArgs:
        """Return the optax transformation."""
        return optax.GradientTransformationExtraArgs(self.init, self.update)  # type: ignore[arg-type]


def check_patterns(patterns: Iterable[str], params: Tree, name: str = "codecs") -> None:
    """Refuse a pattern of the option `name` that matches no parameter. In a part of
    `optax.partition`, it may match one of another part.
    """
    patterns = list(patterns)
    if not patterns:
        return
    # optax.partition puts a MaskedNode, without leaves, where a parameter is of another part.
    nodes = jax.tree_util.tree_leaves_with_path(
        params, is_leaf=lambda node: isinstance(node, optax.MaskedNode)
    )
    paths = [*(path_of(keys) for keys, _ in nodes), *arrays_by_path(params)]
    for pattern, matched in match_all(patterns, paths).items():
        if not matched:
            fix = f"without it, or match one of: {join_names(dict.fromkeys(paths))}."
            near = closest(pattern, paths)
            if near:
                fix = f'did you mean "{near}"?'
            why = f'{name}: the pattern "{pattern}" matches no parameter.'
            raise CommunicationError(why, fix=fix)


def arrays_by_path(tree: Tree) -> dict[str, jax.Array]:
    """Arrays by parameter path, with or without `nnx.Variable` around them: `nnx.Optimizer` passes
    them to `init` only.
    """
    # A tree with Variables is of a caller that has imported Flax; here it need not be.
    nnx = sys.modules.get("flax.nnx")
    kinds: tuple[type, ...] = ()
    if nnx is not None:
        kinds = (nnx.Variable,)
    nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda node: isinstance(node, kinds))
    paths = [path_of(keys) for keys, _ in nodes]
    for path, count in collections.Counter(paths).items():
        if count > 1:
            raise CommunicationError(
                f"two arrays have the path {path}.",
                fix='keys without "/", which separates the levels of a path.',
                path=path,
            )
    return dict(zip(paths, jax.tree.leaves(tree), strict=True))


def check_state(state: Any, kind: type, axes: tuple[str, ...]) -> None:
    """Refuse a state that is of no such communication."""
    shown = type_name(state)
    if isinstance(state, kind):
        if state.axes == axes:
            return
        shown = f"of workers along {', '.join(state.axes)}"
    why = f"a communication along {', '.join(axes)} has a state {kind.__name__}; "
    why += f"it is given one {shown}."
    fix = "the state that init of this transformation, or its last update, returned."
    raise CommunicationError(why, fix=fix)


def _check_memory(transfers: Mapping[str, Transfer], memory: Memory) -> None:
    """Refuse the state of another tree, or one that `jax.shard_map` did not split over workers."""
    shapes = {path: entry[RESIDUAL].shape for path, entry in memory.items() if RESIDUAL in entry}
    needed = {
        path: (1, *transfer.shape)
        for path, transfer in transfers.items()
        if transfer.error_feedback
    }
    for path in (*needed, *shapes):
        if shapes.get(path) != needed.get(path):
            raise CommunicationError(
                f"the state is not that of these gradients: on each worker {path} needs the "
                f"residual {needed.get(path, 'none')}, "
                f"and the state has {shapes.get(path, 'none')}.",
                fix=FIX_SPLIT,
                path=path,
            )
    _check_codec_states(transfers, memory)


def _check_codec_states(transfers: Mapping[str, Transfer], memory: Memory) -> None:
    """Refuse arrays of another codec, or of another shape."""
    for path, transfer in transfers.items():
        needed = {name: describe(leaf) for name, leaf in transfer.codec_shapes.items()}
        arrays = memory.get(path, {}).get(CODEC, {})
        shapes = {name: describe(leaf[0]) for name, leaf in arrays.items()}
        if shapes != needed:
            raise CommunicationError(
                f"the state is not that of these gradients: {transfer.codec} needs "
                f"{needed or 'no arrays'} for {path}, and the state has "
                f"{shapes or 'none'}.",
                fix="init with these parameters.",
                path=path,
            )
        counts = {leaf.shape[0] for leaf in arrays.values()}
        if counts - {transfer.codec_states}:
            raise CommunicationError(
                f"the state is not that of these gradients: {transfer.codec} needs its arrays for "
                f"{transfer.codec_states} shards of {path}, and the state has them for "
                f"{min(counts)}.",
                fix="init with these parameters, on this mesh.",
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
    model_specs: Any = None,
    on_or_off: tuple[str, str] = ("error_feedback=True.", "error_feedback=False."),
    parameters: tuple[str, ...] = ("codec",),
) -> Communication:
    """A `Communication` from `OPTIONS` that are checked.

    As fixes: `on_or_off` is how the caller's user sets error feedback, and `parameters` are the
    caller's own, beside `options`.
    """
    for name in options:
        if name == "model_specs":
            why = "no option model_specs: of the transformations, wire.all_reduce alone has it."
            raise OptionError(why, fix="wire.all_reduce.")
        if name not in OPTIONS:
            raise OptionError(f"no option {name}.", fix=did_you_mean(name, (*parameters, *OPTIONS)))
    names = as_axes(axes)
    codecs = _check_codecs(options.get("codecs"))
    error_feedback = options.get("error_feedback", False)
    if type(error_feedback) is not bool:
        raise OptionError(f"error_feedback={short_repr(error_feedback)}.", fix="True or False.")
    named_codecs = {"codec": codec}
    for pattern, value in codecs.items():
        named_codecs[f'codecs["{pattern}"]'] = value
    for name, value in named_codecs.items():
        check_codec(name, value)
        _check_feedback(name, value, on_or_off, error_feedback=error_feedback)
        if inside and isinstance(value, Bfloat16) and value.reduce == "ring":
            why = "a ring reduces over all axes at once, so nothing would be exact inside."
            raise OptionError(
                f"{name}={value}: {why}",
                fix="wire.bfloat16(), which does not round inside; or wire.all_reduce.",
            )
    for pattern in codecs:
        compiled(pattern)  # raises if it is none
    given_options = {**options, "codecs": tuple(codecs.items())}
    communication = Communication(
        names,
        codec,
        inside=inside,
        scatter=scatter,
        rows=rows,
        model_specs=_check_model_specs(model_specs, names),
        **given_options,
    )
    memory_dtype = communication.memory_dtype
    if memory_dtype not in ("float32", "bfloat16"):
        why = f"memory_dtype={short_repr(memory_dtype)}."
        raise OptionError(why, fix='"float32" or "bfloat16".')
    check_integer(communication.start_step, "start_step", 0)
    check_integer(communication.bucket_bytes, "bucket_bytes")
    if communication.start_step >= 2**31:
        why = f"start_step={communication.start_step}."
        raise OptionError(why, fix="below 2**31: steps are counted as int32.")
    return communication


def _check_codecs(codecs: Any) -> dict[str, Any]:
    """Return codecs by pattern; refuse a value that has no patterns."""
    codecs = codecs or {}
    if not isinstance(codecs, Mapping) or not all(isinstance(key, str) for key in codecs):
        raise OptionError(
            f"codecs={short_repr(codecs)}.",
            fix='codecs by a pattern of parameter paths, such as {"**/bias": wire.exact()}.',
        )
    return dict(codecs)


def _check_model_specs(model_specs: Any, axes: tuple[str, ...]) -> tuple[tuple[str, Spec], ...]:
    """Return specs by pattern; refuse what is none, and axes of the workers in them."""
    if model_specs is None:
        return ()
    fix = (
        "specs by a pattern of parameter paths, such as "
        '{"**/kernel": PartitionSpec(None, "model")}.'
    )
    if not isinstance(model_specs, Mapping):
        raise OptionError(f"model_specs={short_repr(model_specs)}.", fix=fix)
    checked = []
    for pattern, spec in model_specs.items():
        if not isinstance(pattern, str) or not _is_spec(spec):
            shown = f"{short_repr(pattern)}: {short_repr(spec)}"
            raise OptionError(f"model_specs={{{shown}}}.", fix=fix)
        compiled(pattern)  # raises if it is none
        names = spec_axes(tuple(spec))
        for axis in names:
            if axis in axes:
                why = f'model_specs["{pattern}"]={spec}: "{axis}" is an axis of the workers, each '
                why += "of whom has a gradient of its own."
                raise OptionError(why, fix="a spec over other axes.")
            if names.count(axis) > 1:
                why = f'model_specs["{pattern}"]={spec}: the axis "{axis}" is twice in it.'
                raise OptionError(why, fix="each axis once.")
        checked.append((pattern, tuple(spec)))
    return tuple(checked)


def _is_spec(spec: Any) -> bool:
    """Return whether this is a `PartitionSpec` of names alone."""
    if not isinstance(spec, PartitionSpec):
        return False
    for entry in spec:
        names = entry if isinstance(entry, tuple) else (entry,)
        # It may hold PartitionSpec.UNCONSTRAINED, too.
        if entry is not None and not all(isinstance(name, str) for name in names):
            return False
    return True


def axes_of_specs(model_specs: Iterable[tuple[str, Spec]]) -> tuple[str, ...]:
    """Return the mesh axes of specs, each once."""
    return tuple(dict.fromkeys(axis for _, spec in model_specs for axis in spec_axes(spec)))


def _local_shape(
    path: str, shape: tuple[int, ...], spec: Spec, sizes: Mapping[str, int]
) -> tuple[int, ...]:
    """Return the shape of one device's shard of a gradient.

    Raises:
      CommunicationError: the gradient has fewer dims than the spec, or one that the devices do not
        divide.
    """
    if len(spec) > len(shape):
        raise CommunicationError(
            f"the gradient {path} has {len(shape)} dims, and its spec in model_specs {len(spec)}.",
            fix="a spec with at most one entry for each dim.",
            path=path,
        )
    local_shape = list(shape)
    for dim, entry in enumerate(spec):
        devices = math.prod(sizes[axis] for axis in entry_axes(entry))
        if shape[dim] % devices:
            raise CommunicationError(
                f"the gradient {path} is {list(shape)}: {devices} devices along "
                f"{join_names(entry_axes(entry))} do not divide dim {dim}.",
                fix="a spec of dims that they divide.",
                path=path,
            )
        local_shape[dim] //= devices
    return tuple(local_shape)


def _check_feedback(
    name: str, codec: Codec, on_or_off: tuple[str, str], *, error_feedback: bool
) -> None:
    """Refuse error feedback where nothing is known to be lost, and a biased codec without it."""
    on, off = on_or_off
    if error_feedback and not codec.reports_loss:
        why = f"{name}={codec} with error feedback: no worker knows what it loses."
        raise OptionError(why, fix=off)
    if codec.biased and not error_feedback:
        why = f"{name}={codec} without error feedback: what it drops is lost."
        raise OptionError(why, fix=on)


def check_codec(name: str, codec: Any) -> None:
    """Refuse what is no codec, such as a codec's name or its class."""
    if isinstance(codec, Codec):
        return
    fix = "a codec, such as wire.int8(block=256)."
    for registered, kind in CODECS.items():
        if codec in (kind, registered):
            # A codec of `spmd.wire` has its name there; one that was registered, that of its class.
            fix = f"{kind.__name__}()."
            if kind.__module__.startswith("spmd."):
                fix = f"wire.{registered}()."
    shown = short_repr(codec)
    if isinstance(codec, type):
        shown = codec.__name__
    raise OptionError(f"{name}={shown} is {type_name(codec)}.", fix=fix)


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
    workers = math.prod(sizes.values())
    dims = [dim for dim, size in enumerate(shape) if size and size % workers == 0]
    if not dims:
        return ()
    return dim_spec(max(dims, key=lambda dim: shape[dim]), tuple(sizes))


def dim_spec(dim: int, axes: tuple[str, ...]) -> Spec:
    """Return the spec of an array that is sharded over these axes along one dim.

    >>> dim_spec(1, ("data",)), dim_spec(0, ("host", "gpu"))
    ((None, 'data'), (('host', 'gpu'),))
    """
    before = [None] * dim
    if len(axes) == 1:
        return (*before, axes[0])
    return (*before, axes)
