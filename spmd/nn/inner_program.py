"""Functions with a gradient of their own: the program of a layer inside one, which may be changed
until it is differentiated, and the values that one saves for its backward pass.
"""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from spmd.base.tree import Tree

_RECORDED: contextvars.ContextVar[dict[str, "InnerProgram"] | None] = contextvars.ContextVar(
    "inner_programs", default=None
)


class InnerProgram:
    """A function, traced: the backward pass is traced elsewhere, so what the function closes over
    has to become arguments.

    Attributes:
      jaxpr: what is run. Its constants are arguments of the function with a gradient, the last
        ones.
      constants: those arguments.
    """

    def __init__(self, function: Callable[..., Tree], *args: Tree):
        closed, self._shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        self.jaxpr = closed.jaxpr
        self.constants = list(closed.consts)
        self._made: tuple[Any, Any] = (None, None)
        recorded = _RECORDED.get()
        self._name = None
        if recorded is not None:
            self._name = f"inner_program_{len(recorded)}"
            recorded[self._name] = self

    def recomputed(
        self, policy_of: Callable[[Any], Callable[..., Any] | None], **options: Any
    ) -> Callable[..., Tree]:
        """Return the function, of its arguments and of the constants as a list, under
        `jax.checkpoint` with these options.

        Args:
          policy_of: the policy for a jaxpr, which is that of the function when it is called.
        """

        def call_program(*args: Any) -> Tree:
            jaxpr, function = self._made
            # The jaxpr may be changed until the function is called, and `jax.checkpoint` traces a
            # function once.
            if jaxpr is not self.jaxpr:
                policy = policy_of(self.jaxpr)
                function = jax.checkpoint(self._function(), policy=policy, **options)
                self._made = (self.jaxpr, function)
            return function(*args)

        return call_program

    def _function(self) -> Callable[..., Tree]:
        jaxpr = self.jaxpr
        structure = jax.tree.structure(self._shapes)
        is_traced = [isinstance(constant, Tracer) for constant in self.constants]

        def evaluate(*args: Any) -> Tree:
            *inputs, constants = args
            constants = list(constants)
            # Arrays have no gradient: a function with a gradient of its own, which closes over a
            # table, does not take one.
            for number, traced in enumerate(is_traced):
                if not traced:
                    constants[number] = lax.stop_gradient(constants[number])
            outputs = jaxpr_as_fun(ClosedJaxpr(jaxpr, constants))(*jax.tree.leaves(inputs))
            if self._name is not None:
                outputs[0] = checkpoint_name(outputs[0], self._name)
            return jax.tree.unflatten(structure, outputs)

        return evaluate


@contextlib.contextmanager
def recorded_programs() -> Iterator[dict[str, InnerProgram]]:
    """Yield the inner programs that are made inside, by a name that values in the program around
    them carry (`checkpoint_name`).
    """
    token = _RECORDED.set({})
    try:
        yield _RECORDED.get()  # type: ignore[misc]
    finally:
        _RECORDED.reset(token)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("leaves",), meta_fields=("structure", "sources")
)
@dataclasses.dataclass(frozen=True)
class Saved:
    """Values that a function saves for its backward pass, without those that are its inputs: the
    backward pass is given these once more, such as parameters that it gathers again.

    `jax.vjp` returns a pytree of what it saves, and an input among that is the array itself.

    Attributes:
      leaves: what is no input.
      structure: of all leaves of what `jax.vjp` returned.
      sources: for each of these leaves its number among the leaves of the inputs; None: it is in
        `leaves`.
    """

    leaves: list[Any]
    structure: Any
    sources: tuple[int | None, ...]

    @classmethod
    def of(cls, function: Callable[..., Any], inputs: Tree) -> "Saved":
        """Return what `function`, of `jax.vjp`, has saved beside `inputs`."""
        # JAX (0.10, 0.11) returns a pytree whose leaves are the saved arrays; an input among them
        # is the same object.
        leaves, structure = jax.tree.flatten(function)
        numbers = {id(leaf): number for number, leaf in enumerate(jax.tree.leaves(inputs))}
        sources = tuple(numbers.get(id(leaf)) for leaf in leaves)
        return cls(
            [leaf for leaf, source in zip(leaves, sources, strict=True) if source is None],
            structure,
            sources,
        )

    def used(self, inputs: Tree) -> Tree:
        """Return for each leaf of the inputs whether the backward pass needs it."""
        leaves, structure = jax.tree.flatten(inputs)
        numbers = {*self.sources}
        return structure.unflatten([number in numbers for number in range(len(leaves))])

    def gradients(self, inputs: Tree, cotangents: Any) -> tuple:
        """Return `function(cotangents)` with these inputs."""
        input_leaves = jax.tree.leaves(inputs)
        saved = iter(self.leaves)
        leaves = []
        for source in self.sources:
            if source is None:
                leaves.append(next(saved))
            else:
                leaves.append(input_leaves[source])
        return jax.tree.unflatten(self.structure, leaves)(cotangents)
