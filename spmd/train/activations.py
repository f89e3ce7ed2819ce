"""The layout's `[[activations]]` in a step: submodule outputs get sharding constraints, from which
XLA partitions the computation.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from spmd.base.specs import keep_axes, pspec
from spmd.base.tree import Tree, flatten
from spmd.errors import LayoutError, raise_problems
from spmd.layout.activations import Output, activation_spec, output_problems
from spmd.layout.resolve import Resolved, rule_matcher
from spmd.layout.schema import Rule
from spmd.nn.parallel_context import manual_axes


@dataclasses.dataclass(frozen=True)
class Activations:
    """What `Call.output_hook` is: by a module's path, where its outputs are to be."""

    resolved: Resolved
    mesh: Mesh | AbstractMesh

    @functools.cached_property
    def _matching_rules(self) -> Callable[[str], list[int]]:
        return rule_matcher(self.resolved.layout.activations)

    def __call__(self, path: str) -> Callable[[Tree], Tree] | None:
        """A function that gives outputs back, placed; None when no rule claims the module."""
        rules, claimed = self.resolved.layout.activations, self._matching_rules(path)
        return (
            functools.partial(jax.tree.map, functools.partial(self._placed, rules[claimed[0]]))
            if claimed
            else None
        )

    def _placed(self, rule: Rule, x: jax.Array) -> jax.Array:
        """`x` [rows, ...]: all rows, or those of one worker inside a manual region, over whose axes
        they are split already.
        """
        resolved, manual = self.resolved, manual_axes()
        free = tuple(axis for axis in resolved.mesh.names if axis not in manual)
        data = tuple(axis for axis in free if axis in resolved.data_axes)
        own = keep_axes(rule.spec, tuple(axis for axis in free if axis not in data))
        spec = activation_spec(own, data, x.shape, resolved.mesh) if x.ndim else ()
        mesh = jax.sharding.get_abstract_mesh() if manual else self.mesh
        return lax.with_sharding_constraint(x, NamedSharding(mesh, pspec(spec)))


class Seen:
    """Stands where `Activations` does while shapes are found: the submodules there are, and what
    those that rules claim return.
    """

    def __init__(self, resolved: Resolved):
        self._resolved = resolved
        self._matching_rules = rule_matcher(resolved.layout.activations)
        self.modules: dict[str, None] = {}
        self.outputs: dict[str, list[Output]] = {}

    def __call__(self, path: str) -> Callable[[Tree], Tree] | None:
        """A function that remembers shapes, for a module that some rule claims."""
        self.modules[path] = None
        return functools.partial(self._remember, path) if self._matching_rules(path) else None

    def _remember(self, path: str, outputs: Tree) -> Tree:
        found = self.outputs.setdefault(path, [])
        for inside, leaf in flatten(outputs).items():
            entry = Output(
                inside, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), bool(manual_axes())
            )
            found += [entry] if entry not in found else []
        return outputs

    def check(self, rows: int, parts: int) -> None:
        """Hold the layout's rules against what was seen on a batch of `rows`, which is worked on in
        `parts`.

        Raises:
          LayoutError: with every problem found.
        """
        layout, mesh = self._resolved.layout, self._resolved.mesh
        problems: Sequence = (
            [*output_problems(layout, mesh, list(self.modules), self.outputs, rows, parts)]
            if layout.activations
            else ()
        )
        raise_problems(
            LayoutError,
            f"{layout.source} does not fit what this model's modules return, on mesh {mesh}",
            problems,
        )
