"""The state of a communication for another number of workers."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from spmd.base.tree import Tree, describe, map_paths
from spmd.errors import CommunicationError, join_names, type_name
from spmd.wire.communication import WireState
from spmd.wire.local_steps import LocalState
from spmd.wire.server.transformation import ServerState
from spmd.wire.states import init, place
from spmd.wire.transfer import CODEC, RESIDUAL, Memory
from spmd.wire.zero import ZeroState

FIX = (
    "wire.resplit(tx, state, params, mesh) with the tx and the parameters that the state was made "
    "for."
)


def resplit_rows(x: Any, workers: int) -> jax.Array:
    """An array [workers before, ...] for another number of workers, with the same mean over
    workers.

    Fewer workers: each gets the mean of a group. More: each of a group gets a copy. If neither
    number divides the other, all get the mean.

    >>> (
    ...     resplit_rows(jnp.array([1.0, 3.0, 5.0, 7.0]), 2).tolist(),
    ...     resplit_rows(jnp.array([1.0, 3.0]), 4).tolist(),
    ... )
    ([2.0, 6.0], [1.0, 1.0, 3.0, 3.0])
    """
    before = x.shape[0]
    if before % workers == 0:
        groups = x.reshape(workers, before // workers, *x.shape[1:])
        return groups.mean(1).astype(x.dtype)
    if workers % before == 0:
        return jnp.repeat(x, workers // before, axis=0)
    mean = x.mean(0, keepdims=True).astype(x.dtype)
    return jnp.repeat(mean, workers, axis=0)


def resplit(tx: optax.GradientTransformation, state: Any, params: Tree, mesh: Mesh) -> Any:
    """The state of `tx` for the workers of another mesh, with each part on the devices that use it.

    What is kept, up to rounding: the mean over workers of the residuals, which is what error
    feedback owes to the next mean gradients; for `local_sgd` the mean over workers of their
    parameters and of their optimizers' moments, and so the next outer gradient. All else does not
    depend on the number of workers, and is kept as it is: steps, codecs' arrays, moments of
    optimizers, outer updates under way.

    Args:
      tx: the transformation of the state.
      state: of any number of workers; every array on devices of this process, or on the host.
      params: on the host, or on `mesh`.
      mesh: with the axes that `tx` names.

    Returns:
      The state for the mesh's workers.

    Raises:
      CommunicationError: the state is of another `tx` or other parameters; it is partly in other
        processes; or a residual has no place, because with this number of workers its gradient is
        sent exactly; or the state is a parameter server's.

    Example:
      >>> from spmd import wire
      >>> tx, params = (
      ...     wire.all_reduce("data", wire.int8(), error_feedback=True),
      ...     {"w": jnp.zeros((64, 64))},
      ... )
      >>> mesh_of_8, mesh_of_2 = (
      ...     Mesh(np.array(jax.devices()[:count]), ("data",)) for count in (8, 2)
      ... )
      >>> state = wire.init(tx, params, mesh_of_8)
      >>> wire.resplit(tx, state, params, mesh_of_2).memory["w"]["residual"].shape
      (2, 64, 64)
    """
    nodes = jax.tree.leaves(state, is_leaf=_is_ours)
    if any(isinstance(node, ServerState) for node in nodes):
        raise CommunicationError(
            "resplit: the workers of a parameter server have read different versions of the "
            "parameters, and have no mean.",
            fix="wire.init(tx, params, mesh), with a wire.server_clock of as many workers: all "
            "begin at the servers' parameters.",
        )
    fresh = init(tx, params, mesh)
    if isinstance(state, dict | list) and not any(_is_ours(node) for node in nodes):
        raise CommunicationError(
            f"resplit: the state is {type_name(state)} of plain lists and dicts, as Orbax restores "
            "one without a template.",
            fix="a template: the shapes of wire.init(tx, params, jax.sharding.AbstractMesh(...)), "
            "with the workers that saved the state.",
        )
    # Our states are leaves here: their axes and memories, part of the structure, may differ.
    if jax.tree.structure(state, is_leaf=_is_ours) != jax.tree.structure(fresh, is_leaf=_is_ours):
        raise CommunicationError("resplit: the state is not that of this transformation.", fix=FIX)
    state_of_mesh = jax.tree.map(_keep, state, fresh, is_leaf=_is_ours)
    return place(state_of_mesh, mesh)


def _is_ours(node: Any) -> bool:
    return isinstance(node, WireState | ZeroState | LocalState | ServerState)


def _keep(old: Any, fresh: Any) -> Any:
    """`old` in the shapes of `fresh`."""
    # Other types are not compared: an array on the host is numpy's, and a new one is JAX's.
    if (_is_ours(old) or _is_ours(fresh)) and type(old) is not type(fresh):
        why = f"resplit: the state has {type(old).__name__} for {type(fresh).__name__}."
        raise CommunicationError(why, fix=FIX)
    if isinstance(old, WireState):
        step = _keep_array("step", old.step, fresh.step)
        memory = _keep_memory(old.memory, fresh.memory)
        return dataclasses.replace(fresh, step=step, memory=memory)
    if isinstance(old, ZeroState):
        wire = _keep(old.wire, fresh.wire)
        inner = map_paths(_keep_array, old.inner, fresh.inner)
        return ZeroState(wire, inner, fresh.inner_specs)
    if isinstance(old, LocalState):
        parts = {}
        for name in ("step", "outer", "pending", "fresh"):
            parts[name] = map_paths(_keep_array, getattr(old, name), getattr(fresh, name))
        for name in ("params", "inner"):
            parts[name] = map_paths(_keep_rows, getattr(old, name), getattr(fresh, name))
        return dataclasses.replace(fresh, wire=_keep(old.wire, fresh.wire), **parts)
    return _keep_array("an array", old, fresh)


def _keep_memory(old: Memory, fresh: Memory) -> Memory:
    has_place = {path for path, entry in fresh.items() if RESIDUAL in entry}
    lost = [path for path, entry in old.items() if RESIDUAL in entry and path not in has_place]
    if lost:
        raise CommunicationError(
            f"resplit: residuals of {join_names(lost)} have no place: tx has no error feedback, or "
            "on this mesh they are sent exactly.",
            fix=f'add memory[path]["{RESIDUAL}"].mean(0), of the state\'s WireState, to the next '
            "gradients, and start with wire.init.",
            path=lost[0],
        )
    memory: Memory = {}
    for path, entry in fresh.items():
        before = old.get(path, {})
        memory[path] = dict(entry)
        if RESIDUAL in entry and RESIDUAL in before:
            memory[path][RESIDUAL] = _keep_rows(path, before[RESIDUAL], entry[RESIDUAL])
        if CODEC in entry and before.get(CODEC, {}).keys() == entry[CODEC].keys():
            arrays = entry[CODEC].items()
            # Of another number of shards along other axes: begun anew, as the state at step 0.
            if any(jnp.shape(before[CODEC][name])[0] != leaf.shape[0] for name, leaf in arrays):
                continue
            memory[path][CODEC] = {
                name: _keep_array(path, before[CODEC][name], leaf) for name, leaf in arrays
            }
    return memory


def _keep_rows(path: str, old: Any, fresh: jax.Array) -> Any:
    """An array [workers, ...] of each worker's own."""
    if jnp.shape(old)[1:] != fresh.shape[1:] or jnp.result_type(old) != fresh.dtype:
        raise _other_array(path, old, fresh)
    # On the host, as the devices of the old mesh need not be those of the new one.
    rows = _on_host(path, old)
    if jnp.issubdtype(fresh.dtype, jnp.inexact):
        return resplit_rows(jnp.asarray(rows), fresh.shape[0])
    # Whole numbers, such as counts of steps, have no mean.
    if (rows != rows[:1]).any():
        why = f"resplit: {path}, {describe(old)}, differs between workers and has no mean."
        raise CommunicationError(why, fix="tx.init, which starts anew.", path=path)
    return np.repeat(rows[:1], fresh.shape[0], axis=0)


def _keep_array(path: str, old: Any, fresh: jax.Array) -> Any:
    """An array that does not depend on the number of workers."""
    if describe(old) != describe(fresh):
        raise _other_array(path, old, fresh)
    return _on_host(path, old)


def _other_array(path: str, old: Any, fresh: jax.Array) -> CommunicationError:
    """Return the error for an array of another shape or dtype."""
    why = f"resplit: {path} is {describe(old)}, which cannot become {describe(fresh)}."
    return CommunicationError(why, fix=FIX, path=path)


def _on_host(path: str, leaf: Any) -> Any:
    if isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated):
        raise CommunicationError(
            f"resplit: parts of {path} are in other processes.",
            fix="save the state, and restore it on the host.",
        )
    return np.asarray(leaf)
