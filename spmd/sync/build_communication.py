"""Build the communication of a layout's `[gradients]`: the value of `spmd.wire` that a step reduces
gradients with.

`Averaging` is that of the library's own reductions. `RegisteredReduction` puts the transformation
of a registered one (`spmd.wire.register_reduction`) in its place: both have `init_memory`,
`memory_specs` and `reduce`.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, PartitionSpec

from spmd.base.specs import keep_axes, mixes_data_axes, spec_axes
from spmd.base.tree import Tree, describe, flatten, map_paths
from spmd.errors import CommunicationError, OptionError, type_name
from spmd.layout.resolve import Placement, Resolved, codec_rules
from spmd.sync.mesh_axes import MeshAxes
from spmd.wire.codec import make_codec
from spmd.wire.codec.base import Codec
from spmd.wire.reduction import Averaging
from spmd.wire.reduction_registry import Reduction
from spmd.wire.region import on_local_shards
from spmd.wire.shard_layout import ShardLayout
from spmd.wire.states import specs
from spmd.wire.transfer import Memory, Transfer, make_transfer


def build_averaging(resolved: Resolved, mesh_axes: MeshAxes, reduction: Reduction) -> Averaging:
    """Return how the gradients of a model's parameters are averaged. Pure: only shapes are read."""
    declared = resolved.layout.gradients
    codecs = _codecs(resolved)
    transfers = {
        path: _make_transfer(placement, codecs[path], resolved, mesh_axes, reduction)
        for path, placement in resolved.placements.items()
    }
    return Averaging(
        mesh_axes.data_axes,
        transfers,
        bucket_bytes=declared.bucket_bytes,
        inside=declared.exact_axes,
        start_step=declared.start_step,
        model_axes={axis: mesh_axes.mesh.shape[axis] for axis in mesh_axes.model_axes},
        idle_axes=tuple(resolved.idle_axes()),
        diagnostics=declared.diagnostics,
    )


def _codecs(resolved: Resolved) -> dict[str, Codec]:
    """Return the codec that the layout chooses for each gradient, by path."""
    rules = codec_rules(resolved.layout.gradients, resolved.placements)
    return {path: make_codec(rule.codec, rule.options) for path, rule in rules.items()}


def _make_transfer(
    placement: Placement,
    codec: Codec,
    resolved: Resolved,
    mesh_axes: MeshAxes,
    reduction: Reduction,
) -> Transfer:
    data_axes = mesh_axes.data_axes
    model_axes = mesh_axes.model_axes
    spec = reduction.grad_spec(placement)
    model_spec = keep_axes(spec, model_axes)
    # A dim that data and model axes shard together has no local shard along the model axes alone.
    nested = bool(model_axes) and not mixes_data_axes(spec, data_axes)
    dtype = np.dtype(placement.dtype)
    # XLA:CPU aborts on a bfloat16 sum in a region that is manual over only some axes
    if model_axes and not nested:
        dtype = np.dtype("float32")
    local_shape = list(placement.shape)
    codec_states = 1
    if nested:
        # PowerSGD keeps a Q for each local shard, and so sends nothing along a model axis.
        codec_states = mesh_axes.devices_along(spec_axes(model_spec))
        for dim, entry in enumerate(model_spec):
            local_shape[dim] //= mesh_axes.devices_along(entry)
    sizes = tuple(mesh_axes.mesh.shape[axis] for axis in data_axes)
    mean_spec = keep_axes(reduction.mean_spec(placement), data_axes)
    return make_transfer(
        codec,
        ShardLayout(tuple(local_shape), mean_spec, data_axes, sizes),
        error_feedback=resolved.layout.gradients.error_feedback,
        is_sent=codec_applies(resolved, mesh_axes),
        full_shape=placement.shape,
        model_spec=model_spec,
        nested=nested,
        codec_states=codec_states,
        dtype=dtype,
    )


def codec_applies(resolved: Resolved, mesh_axes: MeshAxes) -> bool:
    """Return whether there are workers along data axes other than `exact_axes`."""
    exact_axes = resolved.layout.gradients.exact_axes
    coded_axes = tuple(axis for axis in mesh_axes.data_axes if axis not in exact_axes)
    return mesh_axes.devices_along(coded_axes) > 1


@dataclasses.dataclass(frozen=True)
class RegisteredReduction:
    """The transformation that a registered function makes, in place of an `Averaging`.

    Its memory is the state of the transformation: by the reduction's name, and by path of the leaf.
    """

    reduction: Reduction
    resolved: Resolved
    mesh_axes: MeshAxes

    @functools.cached_property
    def _transformation(self) -> optax.GradientTransformation:
        """Return the transformation that the function makes of the data axes and the layout's
        options.
        """
        declared = self.resolved.layout.gradients
        default = make_codec(declared.codec, declared.options)
        codecs = {path: codec for path, codec in _codecs(self.resolved).items() if codec != default}
        values = {"codec": default, "codecs": codecs}
        options = {
            option: values.get(option, getattr(declared, option, None))
            for option in self.reduction.options
        }
        made = self.reduction.make(self.mesh_axes.data_axes, **options)  # type: ignore[misc]
        if not isinstance(made, optax.GradientTransformation):
            why = (
                f'reduction "{self.reduction.name}": its function returns {type_name(made)}, not '
                "an optax transformation."
            )
            fix = "one of spmd.wire's, or optax.GradientTransformation(init, update)."
            raise OptionError(why, fix=fix)
        return made

    def _make_state(self, params: dict[str, Any]) -> Any:
        """Return the transformation's state at step 0, outside of `jax.shard_map`."""
        mesh = self.mesh_axes.mesh
        if not isinstance(mesh, AbstractMesh):
            # `jax.sharding.use_abstract_mesh` takes no other, and a plan's mesh has no devices.
            mesh = mesh.abstract_mesh
        with jax.sharding.use_abstract_mesh(mesh):
            # A user's transformation may begin with Python numbers or numpy arrays.
            return jax.tree.map(jnp.asarray, self._transformation.init(params))

    @functools.cached_property
    def _abstract_state(self) -> Any:
        params = {
            path: jax.ShapeDtypeStruct(place.shape, place.dtype)
            for path, place in self.resolved.placements.items()
        }
        return jax.eval_shape(self._make_state, params)

    def _stored(self, state: Tree) -> Memory:
        """Return a tree like the state as it is kept; nothing of a state without arrays."""
        leaves = flatten(state)
        if not leaves:
            return {}
        return {self.reduction.name: leaves}

    def init_memory(self, key: jax.Array, params: dict[str, Any], workers: int) -> Memory:
        """Return the state at step 0, of all workers; a transformation needs no key."""
        del key, workers
        return self._stored(self._make_state(params))

    def memory_specs(self, memory: Memory) -> Tree:
        """Return the spec of every array of the state."""
        del memory
        by_name = self._stored(specs(self._abstract_state))
        return jax.tree.map(tuple, by_name, is_leaf=lambda node: isinstance(node, PartitionSpec))

    def reduce(
        self, grads: dict[str, jax.Array], memory: Memory, step: Any = 0
    ) -> tuple[dict[str, jax.Array], Memory, jax.Array]:
        """Return the mean gradients, by path, the next state, and no measurements; per worker, with
        the data axes manual. The state counts its own steps.
        """
        del step
        name = self.reduction.name

        def update(
            grads: dict[str, jax.Array], leaves: dict[str, jax.Array]
        ) -> tuple[Any, dict[str, jax.Array]]:
            state = map_paths(lambda path, _: leaves[path], self._abstract_state)
            means, state = self._transformation.update(grads, state)
            after = flatten(state)
            self._check("gradient", grads, means)
            self._check("array of the state", leaves, after)
            return means, after

        with jax.named_scope(f"reduce_gradients/{name}"):
            # every parameter is replicated along the model axes
            spec = PartitionSpec()
            update_shards = on_local_shards(update, self.mesh_axes.model_axes, spec, spec)
            means, after = update_shards(grads, memory.get(name, {}))
        return {path: means[path] for path in grads}, self._stored(after), jnp.zeros((2, 0))

    def _check(self, what: str, before: dict[str, Any], after: Any) -> None:
        """Refuse an update that returns other arrays than it was given."""
        problem = _returned_problem(what, before, after)
        if problem:
            why = f'reduction "{self.reduction.name}": {problem}.'
            fix = "update(grads, state) returns the mean of each gradient, and the next state."
            raise CommunicationError(why, fix=fix)


def _returned_problem(what: str, before: dict[str, Any], after: Any) -> str:
    """Return what is wrong with arrays by path that an update returned; "" if nothing is."""
    if not isinstance(after, dict):
        return f"{what}s: {', '.join(before)} go in; {type_name(after)} come out"
    if after.keys() != before.keys():
        return f"{what}s: {', '.join(before)} go in; {', '.join(after)} come out"
    for path in before:
        shown = describe(before[path])
        returned = describe(after[path])
        if returned != shown:
            return f"the {what} {path} is {shown}, and {returned} when it is returned"
    return ""
