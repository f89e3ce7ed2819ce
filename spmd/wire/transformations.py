"""Gradient communication as optax transformations, for any loop under `jax.shard_map`.

A transformation takes each worker's own gradients (of the mean loss over its rows) and returns their mean over the workers along some
mesh axes. Its state is ordinary optimizer state, keyed by parameter path; `specs` says how `jax.shard_map` splits it.
"""

import dataclasses
import functools
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spmd.errors import CommunicationError, OptionError, check_integer, short_repr, type_name
from spmd.path_match import compiled
from spmd.specs import Spec
from spmd.tree import Tree, path_of
from spmd.wire.codec.base import Codec
from spmd.wire.codec.exact import EXACT, Exact
from spmd.wire.reduction import BUCKET_BYTES, CODEC, RESIDUAL, Memory, Transfer, reduce_mean
from spmd.wire.region import axis_sizes, bound_sizes, check_grads
from spmd.wire.shard_layout import ShardLayout

Axes = str | Sequence[str]


@functools.partial(jax.tree_util.register_dataclass, data_fields=("step", "memory"), meta_fields=("axes",))
@dataclasses.dataclass(frozen=True)
class WireState:
    """The state of a communication.

    Attributes:
      step: int32, updates so far.
      memory: by parameter path: "residual", what this worker's codec has lost so far, [workers, *gradient], sharded over `axes` on
        dim 0; "codec", the codec's own arrays, [1, ...], equal on all workers.
      axes: the mesh axes of the workers, outermost first.
    """

    step: jax.Array
    memory: Memory
    axes: tuple[str, ...]

    def specs(self) -> "WireState":
        """The spec of every leaf."""
        by_kind = {RESIDUAL: PartitionSpec(self.axes), CODEC: PartitionSpec()}
        memory = {
            path: {kind: jax.tree.map(lambda _, k=kind: by_kind[k], part) for kind, part in entry.items()}
            for path, entry in self.memory.items()
        }
        return WireState(PartitionSpec(), memory, self.axes)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class Communication:
    """A mean over workers, with its options: what `all_reduce`, `reduce_scatter`, `hierarchical`, `zero1` and `local_sgd` are made of.

    With `scatter`, each worker gets a shard of the mean, along the dim that `shard_spec` chooses; with `rows` its row of gradients that
    are packed as [workers, ...]; else all of it.
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
        """How each gradient is communicated, from its shape on one worker."""
        return {path: self._transfer(path, leaf.shape, sizes) for path, leaf in arrays.items()}

    def _transfer(self, path: str, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Transfer:
        spec = shard_spec(shape, sizes) if self.scatter else (self.axes,) if self.rows else ()
        layout = ShardLayout(shape, spec, self.axes, tuple(sizes[axis] for axis in self.axes))
        codec = next((codec for pattern, codec in self.codecs if compiled(pattern).fullmatch(path)), self.codec)
        sent = any(size > 1 for axis, size in sizes.items() if axis not in self.inside)
        if not (sent and all(shape) and codec.compresses(layout, shape)):
            codec = Exact()
        return Transfer(layout, codec, self.error_feedback and not codec.lossless)

    def init(self, params: Tree) -> WireState:
        """The state at step 0: zero residuals, and the codecs' own arrays. Gradients have the shapes of `params`."""
        lossless = self.codec.lossless and all(codec.lossless for _, codec in self.codecs)
        memory = {} if lossless else self.init_memory(arrays_by_path(params), *axis_sizes(self.axes, params))
        return WireState(jnp.zeros((), jnp.int32), memory, self.axes)

    def init_memory(self, arrays: Mapping[str, Any], sizes: Mapping[str, int], in_region: bool) -> Memory:
        """Zero residuals, and the codecs' own arrays, of gradients with the shapes of `arrays`."""
        memory: Memory = {}
        for number, (path, transfer) in enumerate(self.transfers(arrays, sizes).items()):
            shape, entry = arrays[path].shape, {}
            if transfer.error_feedback:
                entry[RESIDUAL] = jnp.zeros((1 if in_region else transfer.shard_layout.workers, *shape), self.memory_dtype)
            codec_state = transfer.codec.init(jax.random.fold_in(jax.random.key(0), number), shape, shape)
            entry |= {CODEC: {name: leaf[None] for name, leaf in codec_state.items()}} if codec_state else {}
            memory |= {path: entry} if entry else {}
        return memory

    def update(self, grads: Tree, state: WireState, params: Tree = None, **extra: Any) -> tuple[Tree, WireState]:
        """The mean gradients, and the next state."""
        del params, extra
        flat, sizes = arrays_by_path(grads), bound_sizes(self.axes)
        transfers = self.transfers(flat, sizes)
        check_grads(self.axes, flat, lossless=all(transfer.codec.lossless for transfer in transfers.values()))
        _check_memory(transfers, state.memory)
        if not self.codec.lossless and all(size == 1 for size in sizes.values()):
            warnings.warn(f"spmd.wire: one worker along {', '.join(self.axes)} sends nothing; {self.codec} is not used.", stacklevel=3)
        means, memory = reduce_mean(
            transfers, flat, state.memory, state.step, bucket_bytes=self.bucket_bytes, inside=self.inside, start_step=self.start_step
        )
        return jax.tree.unflatten(jax.tree.structure(grads), list(means.values())), WireState(state.step + 1, memory, self.axes)

    @property
    def transformation(self) -> optax.GradientTransformationExtraArgs:
        """As optax knows it."""
        return optax.GradientTransformationExtraArgs(self.init, self.update)  # type: ignore[arg-type]


def arrays_by_path(tree: Tree) -> dict[str, jax.Array]:
    """Arrays by parameter path, with or without `nnx.Variable` around them: `nnx.Optimizer` passes them to `init` only."""
    nnx = sys.modules.get("flax.nnx")
    kinds = (nnx.Variable,) if nnx else ()
    nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda node: isinstance(node, kinds))
    return dict(zip((path_of(keys) for keys, _ in nodes), jax.tree.leaves(tree), strict=True))


def _check_memory(transfers: Mapping[str, Transfer], memory: Memory) -> None:
    """Refuse the state of another tree, or one that `jax.shard_map` did not split over workers."""
    wanted = {path: (1, *transfer.shard_layout.shape) for path, transfer in transfers.items() if transfer.error_feedback}
    kept = {path: entry[RESIDUAL].shape for path, entry in memory.items() if RESIDUAL in entry}
    if kept == wanted:
        return
    path = next(path for path in (*wanted, *kept) if kept.get(path) != wanted.get(path))
    raise CommunicationError(
        f"the state is not that of these gradients: on each worker {path} needs the residual {wanted.get(path, 'none')}, "
        f"and the state has {kept.get(path, 'none')}.",
        fix="init with these parameters, and wire.specs(state) among the in_specs and out_specs of jax.shard_map.",
        path=path,
    )


def make_communication(
    axes: Axes,
    codec: Codec,
    *,
    codecs: Mapping[str, Codec] | None = None,
    error_feedback: bool = False,
    memory_dtype: str = "float32",
    start_step: int = 0,
    bucket_bytes: int = BUCKET_BYTES,
    inside: tuple[str, ...] = (),
    scatter: bool = False,
    rows: bool = False,
) -> Communication:
    """A `Communication` from options that are checked."""
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    if not names or not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise OptionError(f"axes={short_repr(axes)}.", fix='the name of a mesh axis, or several: "data", or ("host", "gpu").')
    pairs = tuple((codecs or {}).items())
    for name, value in (("codec", codec), *((f'codecs["{pattern}"]', value) for pattern, value in pairs)):
        if not isinstance(value, Codec):
            raise OptionError(f"{name}={short_repr(value)} is {type_name(value)}.", fix="a codec, such as wire.int8(block=256).")
        if error_feedback and not value.reports_loss:
            raise OptionError(f"{name}={value} with error feedback: no worker knows what it loses.", fix="error_feedback=False.")
        if value.biased and not error_feedback:
            raise OptionError(f"{name}={value} without error feedback: what it drops is lost.", fix="error_feedback=True.")
    if memory_dtype not in ("float32", "bfloat16"):
        raise OptionError(f"memory_dtype={short_repr(memory_dtype)}.", fix='"float32" or "bfloat16".')
    check_integer(start_step, "start_step", 0)
    check_integer(bucket_bytes, "bucket_bytes")
    return Communication(names, codec, pairs, error_feedback, memory_dtype, start_step, bucket_bytes, inside, scatter, rows)


def all_reduce(axes: Axes, codec: Codec = EXACT, **options: Any) -> optax.GradientTransformationExtraArgs:
    """The mean gradients, equal on every worker. Comes first in `optax.chain`; the rest of the loop stays as it is.

    Args:
      axes: mesh axes of the workers, outermost first.
      codec: what is sent. A gradient that it does not make smaller is sent exactly.
      codecs: other codecs, by a pattern of parameter paths: `{"**/embedding": wire.exact()}`; the first that matches counts.
      error_feedback: keep what a codec lost, per worker, and add it to the next gradient.
      memory_dtype: "float32" or "bfloat16", of what is kept; the latter loses what it rounds.
      start_step: the number of updates that are exact before codecs are used.
      bucket_bytes: gradients are sent in buckets of at most this many bytes (as float32).

    Raises:
      OptionError: an option is wrong, or a biased codec has no error feedback.
      CommunicationError: in `init` or `update`: an axis is not manual here, or the state is of another tree.

    Example:
      >>> from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
      >>> from spmd import wire
      >>> mesh, params = jax.make_mesh((1,), ("data",)), {"w": jnp.ones(4)}
      >>> tx = optax.chain(wire.all_reduce("data"), optax.sgd(0.5))
      >>> state = wire.init(tx, params, mesh)
      >>> def step(params, state, grads):
      ...     updates, state = tx.update(grads, state, params)
      ...     return optax.apply_updates(params, updates), state
      >>> specs = (P(), wire.specs(state))
      >>> step = jax.shard_map(step, mesh=mesh, in_specs=(*specs, P()), out_specs=specs, check_vma=False)
      >>> step(params, state, {"w": jnp.ones(4)})[0]["w"].tolist()
      [0.5, 0.5, 0.5, 0.5]
    """
    return make_communication(axes, codec, **options).transformation


def reduce_scatter(axes: Axes, codec: Codec = EXACT, **options: Any) -> optax.GradientTransformationExtraArgs:
    """This worker's shards of the mean gradients; `all_gather` is the opposite. Options as for `all_reduce`.

    A gradient is sharded along its largest dim that the workers divide; one without such a dim is full on every worker.
    `zero1` is an optimizer that works on these shards.
    """
    return make_communication(axes, codec, scatter=True, **options).transformation


def hierarchical(
    *, inside: tuple[Axes, Codec], across: tuple[Axes, Codec], scatter: bool = False, **options: Any
) -> optax.GradientTransformationExtraArgs:
    """The mean in two stages: exactly `inside` a host, where links are fast, then `across` hosts with a codec. Options as for `all_reduce`.

    Inside, each worker sums the elements that it owns for the full host, so that between hosts each sends only its part.

    Args:
      inside: axes, and `wire.exact()`: the codec's bound on errors is that of one encoding, so nothing is rounded here.
      across: axes, and a codec. They are the outer axes: the mesh's order is across, then inside.
      scatter: each worker gets its shard of the mean, as from `reduce_scatter`.
    """
    (inner, inner_codec), (outer, codec) = inside, across
    inner, outer = ((axes,) if isinstance(axes, str) else tuple(axes) for axes in (inner, outer))
    if not isinstance(inner_codec, Exact):
        raise OptionError(f"inside: {short_repr(inner_codec)}.", fix="wire.exact(): gradients are rounded only across hosts.")
    return make_communication((*outer, *inner), codec, inside=inner, scatter=scatter, **options).transformation


def shard_spec(shape: tuple[int, ...], sizes: Mapping[str, int]) -> Spec:
    """How `reduce_scatter` shards an array over workers: along the largest dim that they divide; () if they divide none.

    >>> shard_spec((3, 8, 16), {"data": 4}), shard_spec((3,), {"data": 4}), shard_spec((8,), {"host": 2, "gpu": 2})
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


def init(tx: optax.GradientTransformation, params: Tree, mesh: Mesh) -> Any:
    """`tx.init(params)`, with each part of the state on the devices that use it.

    `tx.init` alone will do where the state has no residuals, or inside `jax.shard_map`.
    """
    with jax.set_mesh(mesh):
        state = tx.init(params)
    return jax.tree.map(lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)), state, specs(state))


def specs(state: Tree) -> Tree:
    """The specs of an optimizer state for `jax.shard_map`: residuals are split over their workers, all else is replicated.

    Raises:
      CommunicationError: the communication is inside an optax wrapper that decides on each worker's own gradients.
    """
    for wrapper, name, fix in _DECIDE_ALONE:
        for node in jax.tree.leaves(state, is_leaf=lambda node, kind=wrapper: isinstance(node, kind)):
            if isinstance(node, wrapper) and any(map(_has_specs, jax.tree.leaves(node, is_leaf=_has_specs))):
                raise CommunicationError(
                    f"optax.{name} around a communication: it looks at each worker's own gradients, before they are reduced, so workers "
                    "would decide differently.",
                    fix=fix,
                )
    return jax.tree.map(lambda node: node.specs() if _has_specs(node) else PartitionSpec(), state, is_leaf=_has_specs)


def local_params(state: Tree, params: Tree) -> Tree:
    """The parameters that this worker computes its gradients at, inside the region.

    Under `local_sgd` they are its own, under an asynchronous `parameter_server` those that it last read; otherwise `params`.

    Args:
      state: this worker's, of the transformation or of a chain with it.
      params: the global ones, which the loop carries.
    """
    states = [node for node in jax.tree.leaves(state, is_leaf=_has_local_params) if _has_local_params(node)]
    return states[0].local_params(params) if states else params


def _has_local_params(node: Any) -> bool:
    return hasattr(node, "local_params")


_DECIDE_ALONE = (
    (optax.ApplyIfFiniteState, "apply_if_finite", "optax.chain(wire.all_reduce(...), optax.apply_if_finite(optimizer, ...))."),
    (optax.MultiStepsState, "MultiSteps", "optax.chain(wire.all_reduce(...), optax.MultiSteps(optimizer, ...).gradient_transformation())."),
)


def _has_specs(node: Any) -> bool:
    return isinstance(node, WireState) or (hasattr(node, "specs") and dataclasses.is_dataclass(node))
