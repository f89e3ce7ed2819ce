"""A reduction that a user registered (`spmd.wire.register_reduction`), applied to a model on a
mesh.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, PartitionSpec

from spmd.base.specs import Spec
from spmd.base.tree import Tree, describe, flatten, map_paths
from spmd.base.xla import shard_map
from spmd.errors import CommunicationError, OptionError, type_name
from spmd.layout.resolve import Resolved, codec_rules
from spmd.sync.mesh_axes import MeshAxes
from spmd.wire.codec import make_codec
from spmd.wire.reduction_registry import Reduction
from spmd.wire.states import specs


@dataclasses.dataclass(frozen=True)
class RegisteredReduction:
    """The transformation that a registered function makes, with its state as a dict: by the
    reduction's name, and by path of the leaf.
    """

    reduction: Reduction
    resolved: Resolved
    mesh_axes: MeshAxes

    @functools.cached_property
    def _transformation(self) -> optax.GradientTransformation:
        """What the function makes of the data axes and the layout's options."""
        declared, name = self.resolved.layout.gradients, self.reduction.name
        default = make_codec(declared.codec, declared.options)
        rules = codec_rules(declared, self.resolved.placements)
        by_path = {path: make_codec(rule.codec, rule.options) for path, rule in rules.items()}
        values = {
            "codec": default,
            "codecs": {path: codec for path, codec in by_path.items() if codec != default},
        }
        options = {
            option: values.get(option, getattr(declared, option, None))
            for option in self.reduction.options
        }
        made = self.reduction.make(self.mesh_axes.data_axes, **options)  # type: ignore[misc]
        if not isinstance(made, optax.GradientTransformation):
            why = (
                f'reduction "{name}": its function returns {type_name(made)}, not an optax '
                "transformation."
            )
            raise OptionError(
                why, fix="one of spmd.wire's, or optax.GradientTransformation(init, update)."
            )
        return made

    def _make_state(self, params: dict[str, Any]) -> Any:
        """The transformation's state at step 0, outside of `jax.shard_map`."""
        mesh = self.mesh_axes.mesh
        with jax.sharding.use_abstract_mesh(
            mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh
        ):
            return jax.tree.map(jnp.asarray, self._transformation.init(params))

    @functools.cached_property
    def _abstract_state(self) -> Any:
        params = {
            path: jax.ShapeDtypeStruct(place.shape, place.dtype)
            for path, place in self.resolved.placements.items()
        }
        return jax.eval_shape(self._make_state, params)

    def init(self, params: Tree) -> dict[str, dict[str, jax.Array]]:
        """The state at step 0."""
        leaves = flatten(self._make_state(flatten(params)))
        return {self.reduction.name: leaves} if leaves else {}

    @functools.cached_property
    def specs(self) -> dict[str, dict[str, Spec]]:
        """The spec of every leaf of the state."""
        leaves = {path: tuple(spec) for path, spec in flatten(specs(self._abstract_state)).items()}
        return {self.reduction.name: leaves} if leaves else {}

    def reduce(
        self, grads: dict[str, jax.Array], comm_state: Tree
    ) -> tuple[dict[str, jax.Array], Tree]:
        """The mean gradients, by path, and the next state; per worker, with the data axes
        manual.
        """
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
            model_axes = self.mesh_axes.model_axes
            if model_axes:  # every parameter is replicated along them
                replicated = PartitionSpec()
                update = shard_map(
                    update, in_specs=replicated, out_specs=replicated, axis_names=model_axes
                )
            means, after = update(grads, comm_state.get(name, {}))
        return {path: means[path] for path in grads}, {name: after} if after else {}

    def _check(self, what: str, before: dict[str, Any], after: Any) -> None:
        """Refuse an update that returns other arrays than it was given."""
        problem = ""
        if not isinstance(after, dict) or after.keys() != before.keys():
            problem = (
                f"{what}s: {', '.join(before)} go in; "
                f"{', '.join(after) if isinstance(after, dict) else type_name(after)} come out"
            )
        for path in before if not problem else ():
            if describe(after[path]) != describe(before[path]):
                problem = (
                    f"the {what} {path} is {describe(before[path])}, and {describe(after[path])} "
                    "when it is returned"
                )
                break
        if problem:
            why = f'reduction "{self.reduction.name}": {problem}.'
            raise CommunicationError(
                why,
                fix="update(grads, state) returns the mean of each gradient, and the next state.",
            )
