"""The program of a layer inside a function with a gradient of its own. It may be changed until the
function is differentiated.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from spmd.tree import Tree

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
        self.jaxpr, self.constants = closed.jaxpr, list(closed.consts)
        self._made: tuple[Any, Any] = (None, None)
        recorded = _RECORDED.get()
        self._name = None
        if recorded is not None:
            self._name = f"inner_program_{len(recorded)}"
            recorded[self._name] = self

    def recomputed(
        self, policy_of: Callable[[Any], Callable[..., Any] | None], **options: Any
    ) -> Callable[..., Tree]:
        """The function of its arguments, and the constants as a list, under `jax.checkpoint` with
        these options.

        Args:
          policy_of: the policy for a jaxpr, which is that of the function when it is called.
        """

        def call(*args: Any) -> Tree:
            if self._made[0] is not self.jaxpr:  # jax.checkpoint traces a function once
                self._made = (
                    self.jaxpr,
                    jax.checkpoint(self._function(), policy=policy_of(self.jaxpr), **options),
                )
            return self._made[1](*args)

        return call

    def _function(self) -> Callable[..., Tree]:
        jaxpr, structure = self.jaxpr, jax.tree.structure(self._shapes)
        is_traced = [isinstance(constant, Tracer) for constant in self.constants]

        def run(*args: Any) -> Tree:
            *inputs, constants = args
            # others have no gradient: a function with a gradient of its own, which closes over a
            # table, does not take one
            constants = [
                leaf if traced else lax.stop_gradient(leaf)
                for leaf, traced in zip(constants, is_traced, strict=True)
            ]
            first, *rest = jaxpr_as_fun(ClosedJaxpr(jaxpr, constants))(*jax.tree.leaves(inputs))
            if self._name is not None:
                first = checkpoint_name(first, self._name)
            return jax.tree.unflatten(structure, [first, *rest])

        return run


@contextlib.contextmanager
def recorded_programs() -> Iterator[dict[str, InnerProgram]]:
    """The inner programs that are made inside, by a name that values in the program around them
    carry (`checkpoint_name`).
    """
    token = _RECORDED.set({})
    try:
        yield _RECORDED.get()  # type: ignore[misc]
    finally:
        _RECORDED.reset(token)
