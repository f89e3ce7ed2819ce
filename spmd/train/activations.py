"""The layout's `[[activations]]` in a step: submodule outputs get sharding constraints, from which
XLA partitions the computation.
"""

import dataclasses
import functools
from collections.abc import Callable

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
    """The function `Call.output_hook`: by a module's path, the function that places its outputs."""

    resolved: Resolved
    mesh: Mesh | AbstractMesh

    @functools.cached_property
    def _matching_rules(self) -> Callable[[str], list[int]]:
        return rule_matcher(self.resolved.layout.activations)

    def __call__(self, path: str) -> Callable[[Tree], Tree] | None:
        """Return a function that returns a module's outputs, placed; None when no rule claims the
        module.
        """
        claimed = self._matching_rules(path)
        if not claimed:
            return None
        rule = self.resolved.layout.activations[claimed[0]]
        return functools.partial(jax.tree.map, functools.partial(self._placed, rule))

    def _placed(self, rule: Rule, x: jax.Array) -> jax.Array:
        """Return `x` [rows, ...], placed: all rows, or the rows of one worker inside a manual
        region, over whose axes they are split already.
        """
        resolved, manual = self.resolved, manual_axes()
        auto = tuple(axis for axis in resolved.mesh.names if axis not in manual)
        data_axes = tuple(axis for axis in auto if axis in resolved.data_axes)
        rule_spec = keep_axes(rule.spec, tuple(axis for axis in auto if axis not in data_axes))
        spec = ()
        if x.ndim:
            spec = activation_spec(rule_spec, data_axes, x.shape, resolved.mesh)
        # inside of a manual region JAX accepts shardings on that region's mesh only
        mesh = self.mesh
        if manual:
            mesh = jax.sharding.get_abstract_mesh()
        return lax.with_sharding_constraint(x, NamedSharding(mesh, pspec(spec)))


class Seen:
    """A stand-in for `Activations` while shapes are determined: records the submodules, and the
    shapes that submodules return that rules claim.
    """

    def __init__(self, resolved: Resolved):
        self._resolved = resolved
        self._matching_rules = rule_matcher(resolved.layout.activations)
        self.modules: dict[str, None] = {}
        self.outputs: dict[str, list[Output]] = {}

    def __call__(self, path: str) -> Callable[[Tree], Tree] | None:
        """Return a function that records shapes, for a module that some rule claims."""
        self.modules[path] = None
        if self._matching_rules(path):
            return functools.partial(self._record, path)
        return None

    def _record(self, path: str, outputs: Tree) -> Tree:
        entries = self.outputs.setdefault(path, [])
        for inside, leaf in flatten(outputs).items():
            shape = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            entry = Output(inside, shape, bool(manual_axes()))
            if entry not in entries:
                entries.append(entry)
        return outputs

    def check(self, rows: int, parts: int) -> None:
        """Check the layout's rules against the shapes that were recorded on a batch of `rows`,
        which is computed in `parts`.

        Raises:
          LayoutError: with every problem.
        """
        layout, mesh = self._resolved.layout, self._resolved.mesh
        if not layout.activations:
            return
        modules = list(self.modules)
        problems = list(output_problems(layout, mesh, modules, self.outputs, rows, parts))
        headline = f"{layout.source} does not fit what this model's modules return, on mesh {mesh}"
        raise_problems(LayoutError, headline, problems)
