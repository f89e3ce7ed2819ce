"""States of optax transformations that communicate: made on a mesh, and split over it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from spmd.base.specs import keep_axes, pspec
from spmd.base.tree import Tree, describe
from spmd.errors import (
    CommunicationError,
    OptionError,
    short_repr,
    type_name,
)
from spmd.wire.region import (
    check_axes,
)

MASKED = (optax.MaskedState, optax.PartitionState)


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
      The state: residuals are sharded over their workers, and those of `model_specs` over other
      axes, too. All else is replicated, or sharded over these other axes as `tx.init` has made it.

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
    # `tx.init` asks for the mesh here, to know how many workers have a residual
    if isinstance(mesh, Mesh):
        with jax.set_mesh(mesh):
            state = tx.init(params)
    else:
        # `jax.set_mesh` refuses an AbstractMesh (jax 0.10).
        with jax.sharding.use_abstract_mesh(mesh):
            state = jax.eval_shape(tx.init, params)
    for node in _nodes(state, _has_specs):
        check_axes((*getattr(node, "axes", ()), *model_axes_of(node)), mesh.axis_names)
    specs(state)  # raises if workers would diverge
    if not isinstance(mesh, Mesh):
        return state
    return place(state, mesh)


def model_axes_of(state: Tree) -> tuple[str, ...]:
    """Return the mesh axes that stay automatic in `jax.shard_map` around an update."""
    nodes = _nodes(state, lambda node: hasattr(node, "model_axes"))
    return tuple(dict.fromkeys(axis for node in nodes for axis in node.model_axes))


def place(state: Tree, mesh: Mesh) -> Tree:
    """Return a state with each array on a mesh, sharded over all axes that its specs name."""
    model_axes = model_axes_of(state)

    def placement(node: Any) -> Any:
        if hasattr(node, "placements"):
            return node.placements()
        if _has_specs(node):
            return node.specs()
        sharding = getattr(node, "sharding", None)
        # Moments of parameters that are sharded over these axes are sharded likewise.
        if isinstance(sharding, NamedSharding):
            return pspec(keep_axes(tuple(sharding.spec), model_axes))
        return PartitionSpec()

    placements = jax.tree.map(placement, state, is_leaf=_has_specs)
    return jax.tree.map(
        lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)), state, placements
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
        wrapped = _nodes(state, lambda node, kind=wrapper: isinstance(node, kind))
        if any(communicates(node) for node in wrapped):
            raise CommunicationError(f"optax.{name} around a communication: {why}.", fix=fix)
    _check_masked(state)
    _check_order(state)

    def node_specs(node: Any) -> Any:
        if _has_specs(node):
            return node.specs()
        return PartitionSpec()

    return jax.tree.map(node_specs, state, is_leaf=_has_specs)


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
    states = _nodes(state, lambda node: hasattr(node, "local_params"))
    if not states:
        return params
    return states[0].local_params(params)


def _nodes(state: Tree, is_node: Callable[[Any], bool]) -> list[Any]:
    """Return the nodes of a tree for which this is true, without those inside of them."""
    leaves = jax.tree.leaves(state, is_leaf=is_node)
    return [node for node in leaves if is_node(node)]


def _check_masked(state: Tree) -> None:
    """Refuse `optax.masked` around a communication; `optax.partition`, made of it, has a
    transformation for every parameter.
    """
    for node in _nodes(state, lambda node: isinstance(node, MASKED)):
        if isinstance(node, optax.PartitionState):
            for part in node.inner_states.values():
                _check_masked(part.inner_state)  # type: ignore[attr-defined]
        elif communicates(node):
            raise CommunicationError(
                "optax.masked around a communication: gradients that the mask leaves out stay each "
                "worker's own, so workers would diverge.",
                fix='for another format, codecs={"**/bias": wire.exact()}; else '
                'optax.partition({"a": wire.all_reduce(...), "b": '
                "optax.set_to_zero()}, labels), with optax.identity() for gradients that are "
                "reduced already.",
            )


def _check_order(state: Tree) -> None:
    """Refuse `optax.chain` with arrays of state before a communication: they would differ between
    workers, and `specs` calls them equal.
    """
    children = jax.tree.leaves(state, is_leaf=lambda node: node is not state)
    parts = [part for part in children if part is not state]
    # optax.chain's state is a plain tuple; a named tuple is the state of one transformation
    last = 0
    if type(state) is tuple:
        last = max((at for at, part in enumerate(parts) if communicates(part)), default=0)
    for part in parts[:last]:
        arrays = [leaf for leaf in jax.tree.leaves(part) if jnp.ndim(leaf)]
        if arrays and not communicates(part):
            raise CommunicationError(
                f"{_keeper(part)} comes before a communication in optax.chain and keeps "
                f"{describe(arrays[0])}: it would see each "
                "worker's own gradients, and its state would differ between workers.",
                fix="the communication first: optax.chain(wire.all_reduce(...), ...).",
            )
    for part in parts:
        if not _has_specs(part):
            _check_order(part)


def _keeper(part: Tree) -> str:
    """The kind of state that keeps arrays, inside tuples of states."""
    if type(part) is tuple:
        for inner in part:
            if any(jnp.ndim(leaf) for leaf in jax.tree.leaves(inner)):
                return _keeper(inner)
    return type(part).__name__


def communicates(part: Tree) -> bool:
    """Return whether a part of an optimizer's state is that of a communication."""
    return bool(_nodes(part, _has_specs))


def check_mesh(mesh: Any) -> None:
    """Refuse what is no mesh, such as spmd's "data=8"."""
    if not isinstance(mesh, Mesh | AbstractMesh):
        fix = 'a jax.sharding.Mesh, such as jax.make_mesh((8,), ("data",)).'
        raise OptionError(f"mesh={short_repr(mesh)} is {type_name(mesh)}.", fix=fix)


def check_transformation(name: str, value: Any) -> None:
    """Refuse what is no optax transformation."""
    methods = (getattr(value, "init", None), getattr(value, "update", None))
    if isinstance(value, type) or not all(callable(method) for method in methods):
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
    """Return whether a node is the state of a communication, which says how it is split."""
    return hasattr(node, "specs") and dataclasses.is_dataclass(node)
