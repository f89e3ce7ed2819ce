"""Gradient communication as optax transformations, for any loop under `jax.shard_map`.

A transformation takes each worker's own gradients (of the mean loss over its rows) and returns
their mean over the workers along some mesh axes. Its state is ordinary optimizer state, keyed by
parameter path; `specs` says how `jax.shard_map` splits it.
"""

import dataclasses
import functools
import sys
import warnings
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

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
from spmd.path_match import compiled, match_all, matcher
from spmd.specs import Spec
from spmd.tree import Tree, describe, path_of
from spmd.wire.codec import CODECS
from spmd.wire.codec.base import Codec
from spmd.wire.codec.bfloat16 import Bfloat16
from spmd.wire.codec.exact import EXACT, Exact
from spmd.wire.reduction import BUCKET_BYTES, CODEC, RESIDUAL, Memory, Transfer, reduce_mean
from spmd.wire.region import (
    Axes,
    as_axes,
    axis_sizes,
    bound_sizes,
    check_axes,
    check_dtypes,
    check_encodable,
    check_grads,
)
from spmd.wire.shard_layout import ShardLayout

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
        by_kind = {RESIDUAL: PartitionSpec(self.axes), CODEC: PartitionSpec()}
        memory = {
            path: {
                kind: jax.tree.map(lambda _, k=kind: by_kind[k], part)
                for kind, part in entry.items()
            }
            for path, entry in self.memory.items()
        }
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
        """How each gradient is communicated, from its shape on one worker."""
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
        spec = shard_spec(shape, sizes) if self.scatter else (self.axes,) if self.rows else ()
        layout = ShardLayout(shape, spec, self.axes, tuple(sizes[axis] for axis in self.axes))
        sent = any(size > 1 for axis, size in sizes.items() if axis not in self.inside)
        if not (sent and all(shape) and codec.compresses(layout, shape)):
            codec = Exact()
        return Transfer(layout, codec, self.error_feedback and not codec.lossless)

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
        memory: Memory = {}
        for number, (path, transfer) in enumerate(self.transfers(arrays, sizes).items()):
            shape, entry = jnp.shape(arrays[path]), {}
            if transfer.error_feedback:
                entry[RESIDUAL] = jnp.zeros(
                    (1 if in_region else transfer.shard_layout.workers, *shape), self.memory_dtype
                )
            codec_state = transfer.codec.init(
                jax.random.fold_in(jax.random.key(0), number), shape, shape
            )
            entry |= (
                {CODEC: {name: leaf[None] for name, leaf in codec_state.items()}}
                if codec_state
                else {}
            )
            memory |= {path: entry} if entry else {}
        return memory

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
        means, memory = reduce_mean(
            transfers,
            flat,
            state.memory,
            state.step,
            bucket_bytes=self.bucket_bytes,
            inside=self.inside,
            start_step=self.start_step,
        )
        return jax.tree.unflatten(jax.tree.structure(grads), list(means.values())), WireState(
            state.step + 1, memory, self.axes
        )

    @property
    def transformation(self) -> optax.GradientTransformationExtraArgs:
        """As optax knows it."""
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
        shapes = _codec_shapes(transfer.codec, transfer.shard_layout.shape)
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


@functools.cache
def _codec_shapes(codec: Codec, shape: tuple[int, ...]) -> dict[str, str]:
    return {
        name: describe(leaf)
        for name, leaf in jax.eval_shape(
            lambda: codec.init(jax.random.key(0), shape, shape)
        ).items()
    }


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
    known = next((known for known, kind in CODECS.items() if codec in (kind, known)), None)
    fix = f"wire.{known}()." if known in CODECS else "a codec, such as wire.int8(block=256)."
    raise OptionError(
        f"{name}={codec.__name__ if isinstance(codec, type) else short_repr(codec)} is "
        f"{type_name(codec)}.",
        fix=fix,
    )


def all_reduce(
    axes: Axes, codec: Codec = EXACT, **options: Any
) -> optax.GradientTransformationExtraArgs:
    """The mean gradients, equal on every worker. Comes first in `optax.chain`; the rest of the loop
    stays as it is.

    Args:
      axes: mesh axes of the workers, outermost first.
      codec: what is sent. A gradient that it does not make smaller is sent exactly.
      options: the names below.
      codecs: other codecs, by a pattern of parameter paths: `{"**/embedding": wire.exact()}`; the
        first that matches counts.
      error_feedback: keep what a codec lost, per worker, and add it to the next gradient.
      memory_dtype: "float32" or "bfloat16", of what is kept; the latter loses what it rounds.
      start_step: the number of updates that are exact before codecs are used.
      bucket_bytes: gradients are sent in buckets of at most this many bytes (as float32).

    Returns:
      An optax gradient transformation, whose state is a `WireState`.

    Raises:
      OptionError: an option is wrong, or a biased codec has no error feedback.
      CommunicationError: in `init` or `update`: an axis is not manual here, or the state is of
        another tree.

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
      >>> step = jax.shard_map(
      ...     step, mesh=mesh, in_specs=(*specs, P()), out_specs=specs, check_vma=False
      ... )
      >>> step(params, state, {"w": jnp.ones(4)})[0]["w"].tolist()
      [0.5, 0.5, 0.5, 0.5]
    """
    return make_communication(axes, codec, options).transformation


def reduce_scatter(
    axes: Axes, codec: Codec = EXACT, **options: Any
) -> optax.GradientTransformationExtraArgs:
    """This worker's shards of the mean gradients; `all_gather` is the opposite. Options as for
    `all_reduce`.

    A gradient is sharded along its largest dim that the workers divide; one without such a dim is
    full on every worker. `zero1` is an optimizer that works on these shards.

    Args:
      axes: mesh axes of the workers, outermost first.
      codec: what is sent.
      options: as for `all_reduce`.

    Returns:
      An optax gradient transformation, whose updates are this worker's shards.

    Example:
      >>> from jax.sharding import AbstractMesh
      >>> from spmd import wire
      >>> wire.bytes_sent(
      ...     wire.reduce_scatter("data"),
      ...     {"w": jnp.zeros((1024, 1024))},
      ...     AbstractMesh((8,), ("data",)),
      ... )
      3670016
    """
    return make_communication(axes, codec, options, scatter=True).transformation


def hierarchical(
    *, inside: tuple[Axes, Codec], across: tuple[Axes, Codec], scatter: bool = False, **options: Any
) -> optax.GradientTransformationExtraArgs:
    """The mean in two stages: exactly `inside` a host, where links are fast, then `across` hosts
    with a codec. Options as for `all_reduce`.

    Inside, each worker sums the elements that it owns for the full host, so that between hosts each
    sends only its part.

    Args:
      inside: axes, and `wire.exact()`: the codec's bound on errors is that of one encoding, so
        nothing is rounded here.
      across: axes, and a codec. They are the outer axes: the mesh's order is across, then inside.
      scatter: each worker gets its shard of the mean, as from `reduce_scatter`.
      options: as for `all_reduce`.

    Returns:
      An optax gradient transformation, whose state is a `WireState`.

    Example:
      >>> from jax.sharding import AbstractMesh
      >>> from spmd import wire
      >>> tx = wire.hierarchical(inside=("gpu", wire.exact()), across=("host", wire.int8()))
      >>> mesh = AbstractMesh((2, 4), ("host", "gpu"))
      >>> wire.bytes_sent(tx, {"w": jnp.zeros((1024, 1024))}, mesh) < wire.bytes_sent(
      ...     wire.all_reduce(("host", "gpu")), {"w": jnp.zeros((1024, 1024))}, mesh
      ... )
      True
    """
    for name, pair, example in (
        ("inside", inside, '("gpu", wire.exact())'),
        ("across", across, '("host", wire.int8())'),
    ):
        if not (isinstance(pair, tuple) and len(pair) == 2):
            raise OptionError(
                f"{name}={short_repr(pair)}.", fix=f"axes and a codec: {name}={example}."
            )
        check_codec(f"{name}: codec", pair[1])
    if type(scatter) is not bool:
        raise OptionError(f"scatter={short_repr(scatter)}.", fix="True or False.")
    (inner, inner_codec), (outer, codec) = inside, across
    inner, outer = as_axes(inner), as_axes(outer)
    if not isinstance(inner_codec, Exact):
        raise OptionError(
            f"inside: {short_repr(inner_codec)}.",
            fix="wire.exact(): gradients are rounded only across hosts.",
        )
    parameters = ("inside", "across", "scatter")
    return make_communication(
        (*outer, *inner), codec, options, inside=inner, scatter=scatter, parameters=parameters
    ).transformation


def shard_spec(shape: tuple[int, ...], sizes: Mapping[str, int]) -> Spec:
    """How `reduce_scatter` shards an array over workers: along the largest dim that they divide; ()
    if they divide none.

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


def init(tx: optax.GradientTransformation, params: Tree, mesh: Mesh | AbstractMesh) -> Any:
    """`tx.init(params)`, with each part of the state on the devices that use it.

    `tx.init` alone will do where the state has no residuals, or inside `jax.shard_map`. With an
    `AbstractMesh` the state has shapes in place of arrays: a template to restore a checkpoint of
    that many workers, on any number of devices.

    Args:
      tx: one of `spmd.wire`, or an optimizer that contains some.
      params: full, on the mesh or on the host.
      mesh: with the axes that `tx` names.

    Returns:
      The state, residuals sharded over their workers and all else replicated.

    Raises:
      CommunicationError: the mesh lacks an axis, a pattern of `codecs` matches no parameter, or as
        `specs`.

    Example:
      >>> from jax.sharding import AbstractMesh
      >>> from spmd import wire
      >>> tx = wire.all_reduce("data", wire.int8(), error_feedback=True)
      >>> wire.init(tx, {"w": jnp.ones((64, 8))}, AbstractMesh((4,), ("data",))).memory["w"][
      ...     "residual"
      ... ].shape
      (4, 64, 8)
    """
    check_transformation("tx", tx)
    check_mesh(mesh)
    with jax.set_mesh(mesh) if isinstance(mesh, Mesh) else jax.sharding.use_abstract_mesh(mesh):
        state = tx.init(params) if isinstance(mesh, Mesh) else jax.eval_shape(tx.init, params)
    for node in jax.tree.leaves(state, is_leaf=_has_specs):
        check_axes(getattr(node, "axes", ()) if _has_specs(node) else (), mesh.axis_names)
    split = specs(state)
    if not isinstance(mesh, Mesh):
        return state
    return jax.tree.map(
        lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)), state, split
    )


def specs(state: Tree) -> Tree:
    """The specs of an optimizer state for `jax.shard_map`: residuals are split over their workers,
    all else is replicated.

    Args:
      state: from `init`.

    Returns:
      A tree like the state, of `jax.sharding.PartitionSpec`.

    Raises:
      CommunicationError: the communication is inside an optax wrapper with which workers would
        diverge, or behind a transformation with a state of each worker's own.

    Example:
      >>> from jax.sharding import AbstractMesh
      >>> from spmd import wire
      >>> tx = wire.all_reduce("data", wire.int8(), error_feedback=True)
      >>> state = wire.init(tx, {"w": jnp.ones((64, 8))}, AbstractMesh((4,), ("data",)))
      >>> tuple(wire.specs(state).memory["w"]["residual"]), tuple(wire.specs(state).step)
      (('data',), ())
    """
    if any(callable(leaf) for leaf in jax.tree.leaves(state)):
        raise OptionError(
            "specs: this is a transformation.",
            fix="wire.specs(state), of what wire.init(tx, params, mesh) returns.",
        )
    for wrapper, name, why, fix in _WRAPPERS:
        for node in jax.tree.leaves(
            state, is_leaf=lambda node, kind=wrapper: isinstance(node, kind)
        ):
            if isinstance(node, wrapper) and communicates(node):
                raise CommunicationError(f"optax.{name} around a communication: {why}.", fix=fix)
    _check_masked(state)
    _check_order(state)
    return jax.tree.map(
        lambda node: node.specs() if _has_specs(node) else PartitionSpec(),
        state,
        is_leaf=_has_specs,
    )


def local_params(state: Tree, params: Tree) -> Tree:
    """The parameters that this worker computes its gradients at, inside the region.

    Under `local_sgd` they are its own, under an asynchronous `parameter_server` those that it last
    read; otherwise `params`.

    Args:
      state: this worker's, of the transformation or of a chain with it.
      params: the global ones, which the loop carries.

    Returns:
      A tree like `params`.

    Example:
      >>> import optax
      >>> params = {"w": jnp.ones(2)}
      >>> local_params(
      ...     optax.adam(1e-3).init(params), params
      ... ) is params  # nothing here keeps other ones
      True
    """
    states = [
        node
        for node in jax.tree.leaves(state, is_leaf=_has_local_params)
        if _has_local_params(node)
    ]
    return states[0].local_params(params) if states else params


def _has_local_params(node: Any) -> bool:
    return hasattr(node, "local_params")


def _check_masked(state: Tree) -> None:
    """Refuse `optax.masked` around a communication; `optax.partition`, made of it, has a
    transformation for every parameter.
    """
    for node in jax.tree.leaves(state, is_leaf=_is_masked):
        if isinstance(node, optax.PartitionState):
            for part in node.inner_states.values():
                _check_masked(part.inner_state)  # type: ignore[attr-defined]
        elif _is_masked(node) and communicates(node):
            raise CommunicationError(
                "optax.masked around a communication: gradients that the mask leaves out stay each "
                "worker's own, so workers would diverge.",
                fix='for another format, codecs={"**/bias": wire.exact()}; else '
                'optax.partition({"a": wire.all_reduce(...), "b": '
                "optax.set_to_zero()}, labels), with optax.identity() for gradients that are "
                "reduced already.",
            )


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedState | optax.PartitionState)


def _check_order(state: Tree) -> None:
    """Refuse `optax.chain` with arrays of state before a communication: they would differ between
    workers, and `specs` calls them equal.
    """
    parts = [
        part
        for part in jax.tree.leaves(state, is_leaf=lambda node: node is not state)
        if part is not state
    ]
    communications = (
        [at for at, part in enumerate(parts) if communicates(part)] if type(state) is tuple else []
    )
    for part in parts[: communications[-1]] if communications else ():
        kept = [leaf for leaf in jax.tree.leaves(part) if jnp.ndim(leaf)]
        if kept and not communicates(part):
            raise CommunicationError(
                f"{_keeper(part)} comes before a communication in optax.chain and keeps "
                f"{describe(kept[0])}: it would see each "
                "worker's own gradients, and its state would differ between workers.",
                fix="the communication first: optax.chain(wire.all_reduce(...), ...).",
            )
    for part in parts:
        if not _has_specs(part):
            _check_order(part)


def _keeper(part: Tree) -> str:
    """The kind of state that keeps arrays, inside tuples of states."""
    if type(part) is not tuple:
        return type(part).__name__
    return _keeper(next(inner for inner in part if any(map(jnp.ndim, jax.tree.leaves(inner)))))


def communicates(part: Tree) -> bool:
    """Whether a part of an optimizer's state is that of a communication."""
    return any(map(_has_specs, jax.tree.leaves(part, is_leaf=_has_specs)))


def check_mesh(mesh: Any) -> None:
    """Refuse what is no mesh, such as spmd's "data=8"."""
    if not isinstance(mesh, Mesh | AbstractMesh):
        fix = 'a jax.sharding.Mesh, such as jax.make_mesh((8,), ("data",)).'
        raise OptionError(f"mesh={short_repr(mesh)} is {type_name(mesh)}.", fix=fix)


def check_transformation(name: str, value: Any) -> None:
    """Refuse what is no optax transformation."""
    if isinstance(value, type) or not (
        callable(getattr(value, "init", None)) and callable(getattr(value, "update", None))
    ):
        shown = getattr(value, "__name__", None) or short_repr(value)
        fix = (
            "an optax transformation, such as optax.adamw(1e-3); a function that makes one must be "
            "called."
        )
        raise OptionError(f"{name}={shown} is {type_name(value)}.", fix=fix)


def check_no_communication(name: str, state: Tree) -> None:
    """Refuse an optimizer that communicates inside another communication."""
    if communicates(state):
        raise CommunicationError(
            f"{name} communicates itself: it is given what is reduced already, or one worker's "
            "own.",
            fix=f"without it in {name}.",
        )


_ALONE = (
    "it looks at each worker's own gradients, before they are reduced, so workers would decide "
    "differently"
)
_MULTI_STEPS = (
    "optax.chain(wire.all_reduce(...), optax.MultiSteps(optimizer, ...).gradient_transformation())."
)
_SKIPS = "the steps that it leaves out apply each worker's own gradients, so workers would diverge"
_WRAPPERS = (
    (
        optax.ApplyIfFiniteState,
        "apply_if_finite",
        _ALONE,
        "optax.chain(wire.all_reduce(...), optax.apply_if_finite(optimizer, ...)).",
    ),
    (optax.MultiStepsState, "MultiSteps", _ALONE, _MULTI_STEPS),
    (
        optax.ConditionallyTransformState,
        "conditionally_transform",
        _SKIPS,
        "wire.local_sgd, in which workers synchronize every few steps.",
    ),
)


def _has_specs(node: Any) -> bool:
    return isinstance(node, WireState) or (
        hasattr(node, "specs") and dataclasses.is_dataclass(node)
    )
