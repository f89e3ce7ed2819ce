"""A scan over layers that gathers each layer's parameters while the layer before computes, and
reduces gradients likewise (FSDP).

Forward, iteration i computes layer i and gathers layer i + 1. Backward, it computes the gradients
of layer i, gathers layer i - 1 and reduces the gradients of layer i + 1. Nothing that is
communicated depends on what the iteration computes, so a compiler can hide all of it; parameters of
two layers exist at a time. A scan that gathers inside its body communicates the same bytes, and
hides only what the layer itself lets it.

*Unmeasured*: no GPU has shown how much is hidden. The memory of two layers, and the order in which
XLA starts the gathers, can be seen in programs compiled for GPUs.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd.base.tree import Tree, flatten
from spmd.nn.inner_program import InnerProgram, Saved


class Communication(NamedTuple):
    """Functions that communicate one layer's parameters and gradients.

    Attributes:
      gather: full parameters, from this worker's shards, of trained ones and of frozen ones alike.
      reduce: gradients of shards and the next residuals, from shards (whose dtypes they get),
        gradients of full parameters and residuals. None in place of a gradient is zero, and in
        place of a residual the one before.
    """

    gather: Callable[[Tree], Tree]
    reduce: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]

    def gather_both(self, shards: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
        """Full parameters of one layer, trained ones and frozen ones."""
        trained, frozen = shards
        return self.gather(trained), self.gather(frozen)


class Stack(NamedTuple):
    """Leaves [layers, ...]: this worker's shards of parameters, the layers' other variables, and
    residuals of the gradients; and shards of parameters that have no gradients (then both are
    dicts, of other keys). Those of a block have no dim of layers.
    """

    shards: Tree
    others: Tree
    residuals: Tree
    frozen: Tree = {}  # noqa: RUF012

    @classmethod
    def of(
        cls, gather: Any, paths: Mapping[str, str], params: Tree, others: Tree, residuals: Tree
    ) -> tuple[Communication, "Stack"]:
        """Return how layers gather parameters, and their arrays.

        Args:
          gather: `spmd.sync.layer_gather.LayerGather`.
          paths: of each parameter in the model, by its path in `params`.
          params: by name, nested.
          residuals: by path in the model.
        """
        communication = Communication(
            functools.partial(gather.gather, paths), functools.partial(gather.reduce, paths)
        )
        leaves = flatten(params)
        frozen = {name for name, path in paths.items() if not gather.trains(path)}
        trained_shards = {name: leaf for name, leaf in leaves.items() if name not in frozen}
        frozen_shards = {name: leaf for name, leaf in leaves.items() if name in frozen}
        stack_residuals = {path: residuals[path] for path in paths.values() if path in residuals}
        return communication, cls(trained_shards, others, stack_residuals, frozen_shards)

    def at(self, number: Any) -> tuple[Tree, Tree]:
        """Return the shards that are gathered for a layer: of parameters, and of frozen ones."""
        return _layer((self.shards, self.frozen), number)


class _Loop(NamedTuple):
    communication: Communication
    # (x, full parameters and frozen ones, others, constants) -> (x, variables after the call)
    run_layer: Callable[..., tuple[Tree, Tree]]
    unroll: bool


def scan_gathered(
    communication: Communication,
    run_layer: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]],
    x: Tree,
    stack: Stack,
    *,
    policy_of: Callable[[Any], Callable[..., Any] | None],
    unroll: bool = False,
) -> tuple[Tree, Tree]:
    """Return the last x of `run_layer(x, full parameters, others) -> (x, after)` from layer to
    layer, and the variables after the calls of all layers, [layers, ...].

    The gradient with respect to `stack.residuals` is the next residuals.

    Args:
      policy_of: from a layer's jaxpr to a policy of `jax.checkpoint`: what it keeps for the
        backward pass beside its input. None: nothing.
      unroll: the loop, as for a convolution on a CPU.
    """
    full = jax.eval_shape(communication.gather_both, stack.at(0))

    def run_joined(x: Tree, full: tuple[Tree, Tree], others: Tree) -> tuple[Tree, Tree]:
        params, frozen = full
        if frozen:
            params = params | frozen
        return run_layer(x, params, others)

    # In a loop's body XLA cannot merge what is computed again with the forward pass, so
    # `jax.checkpoint` needs no barriers (`prevent_cse`); unrolled, it could.
    program = InnerProgram(run_joined, x, full, _layer(stack.others, 0))
    loop = _Loop(communication, program.recomputed(policy_of, prevent_cse=unroll), unroll)
    return _scan(loop, x, stack, program.constants)


# A backward pass of its own: what JAX makes of a scan that gathers in its body sends the same
# bytes, but a layer's first product waits for its parameters, and its gradients are reduced when
# nothing is left to compute. XLA:GPU's step of a 6.9 B GPT on 64 H100s, one row each, is planned at
# 559 ms so, and at 434 ms one layer ahead (docs/decisions.md).
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scan(loop: _Loop, x: Tree, stack: Stack, constants: list[Any]) -> tuple[Tree, Tree]:
    """Run the loop without a backward pass: nothing is saved."""

    def run_layer(x: Tree, full: Tree, others: Tree) -> tuple[Tree, Tree, None]:
        return *loop.run_layer(x, full, others, constants), None

    x, after, _ = _forward_loop(loop, run_layer, x, stack)
    return x, after


def _forward_loop(
    loop: _Loop, run_layer: Callable[..., tuple], x: Tree, stack: Stack
) -> tuple[Tree, Tree, tuple]:
    """Return the last x, the variables after the calls of all layers, and the values that are
    saved: by all layers but the last, [layers - 1, ...], by the last, and its parameters.
    """
    gather = loop.communication.gather_both
    count = _count(stack)

    def body(carry: tuple, inputs: tuple) -> tuple[tuple, tuple]:
        x, full = carry
        (number,) = inputs
        # The next layer is gathered while this one computes: what an iteration communicates depends
        # on its inputs alone, so XLA can hide it.
        next_shards = stack.at(number + 1)
        # Unrolled, a compiler could gather all layers at once.
        if loop.unroll:
            next_shards, x = together(next_shards, x)
        next_full = gather(next_shards)
        x, after, saved = run_layer(x, full, _layer(stack.others, number))
        return (x, next_full), (after, saved)

    first_full = gather(stack.at(0))
    # The last layer is outside of the loop, since no layer is gathered after it.
    (x, full), (after, saved) = _run_loop(loop, body, (x, first_full), (np.arange(count - 1),))
    x, after_last, saved_last = run_layer(x, full, _layer(stack.others, count - 1))
    after = jax.tree.map(
        lambda layers, last: jnp.concatenate([layers, last[None]]), after, after_last
    )
    return x, after, (saved, saved_last, full)


def _scan_forward(
    loop: _Loop, x: Tree, stack: Stack, constants: list[Any]
) -> tuple[tuple[Tree, Tree], tuple]:
    def run_layer(x: Tree, full: tuple[Tree, Tree], others: Tree) -> tuple[Tree, Tree, Saved]:
        params, frozen = full

        def of_trained(x: Tree, params: Tree, others: Tree, constants: list[Any]) -> tuple:
            return loop.run_layer(x, (params, frozen), others, constants)

        (y, after), function = jax.vjp(of_trained, x, params, others, constants)
        return y, after, Saved.of(function, (full, others, constants))

    x, after, saved = _forward_loop(loop, run_layer, x, stack)
    return (x, after), (saved, stack, constants)


def _scan_backward(
    loop: _Loop, residuals: tuple, cotangents: tuple[Tree, Tree]
) -> tuple[Tree, Stack, list[Any]]:
    (saved, saved_last, full_last), stack, constants = residuals
    gather = loop.communication.gather_both
    reduce = loop.communication.reduce
    count = _count(stack)
    dy, dafter = cotangents

    def gradients(
        number: Any, saved: Saved, full: tuple[Tree, Tree], dx: Tree
    ) -> tuple[Tree, Tree, Tree, list[Any]]:
        inputs = full, _layer(stack.others, number), constants
        return differentiable(saved.gradients(inputs, (complete(dx, dy), _layer(dafter, number))))

    def reduced(number: Any, dfull: Tree, done: Stack) -> Stack:
        """Return `done` with the reduced gradients of a layer, and its next residuals in place of
        the residuals before.
        """
        residuals = _layer(done.residuals, number)
        dshards, residuals = reduce(_layer(stack.shards, number), dfull, residuals)
        return done._replace(
            shards=_put(done.shards, number, dshards),
            residuals=_put(done.residuals, number, residuals),
        )

    def body(carry: tuple, inputs: tuple) -> tuple[tuple, None]:
        dx, full, dfull, dconstants, done = carry
        number, saved = inputs
        # The layer before is gathered, and the gradients of the layer behind are reduced, while
        # this one computes.
        previous_shards = stack.at(jnp.maximum(number - 1, 0))
        if loop.unroll:
            previous_shards, dx = together(previous_shards, dx)
        previous_full = gather(previous_shards)
        done = reduced(number + 1, dfull, done)
        dx, dfull, dothers, more = gradients(number, saved, full, dx)
        done = done._replace(others=_put(done.others, number, dothers))
        dconstants = jax.tree.map(jnp.add, dconstants, more)
        return (dx, previous_full, dfull, dconstants, done), None

    # This gather begins before the last layer's gradients are computed, which hides it.
    previous_full = gather(stack.at(max(count - 2, 0)))
    dx, dfull, dothers, dconstants = gradients(count - 1, saved_last, full_last, differentiable(dy))
    # Frozen parameters have no gradients: `jax.custom_vjp` takes None for theirs.
    trained = stack._replace(frozen={})
    done = differentiable(jax.tree.map(_no_gradient, trained))
    done = done._replace(others=_put(done.others, count - 1, dothers), residuals=stack.residuals)
    carry = (dx, previous_full, dfull, dconstants, done)
    (dx, _, dfull, dconstants, done), _ = _run_loop(
        loop, body, carry, (np.arange(count - 1), saved), reverse=True
    )
    gradient = complete(reduced(0, dfull, done), trained)._replace(frozen=None)
    return complete(dx, dy), gradient, complete(dconstants, constants)


_scan.defvjp(_scan_forward, _scan_backward)


def together(*trees: Tree) -> tuple:
    """Return these trees, none of which is used before all are there.

    All that is returned must be used: a compiler leaves out the rest, and its barrier.
    """
    return lax.optimization_barrier(trees)


def _run_loop(
    loop: _Loop, body: Callable, carry: Tree, xs: tuple, *, reverse: bool = False
) -> tuple[Tree, Tree]:
    length = len(xs[0])
    unroll = 1
    if loop.unroll:
        unroll = max(length, 1)
    return lax.scan(body, carry, xs, length=length, reverse=reverse, unroll=unroll)


def _count(stack: Stack) -> int:
    return jax.tree.leaves(stack)[0].shape[0]


def _layer(tree: Tree, number: Any) -> Tree:
    """Return the values of one layer."""

    def of_layer(leaf: Any) -> Any:
        # JAX has arrays of float0 in numpy alone, and no operations of them.
        if leaf.dtype == jax.dtypes.float0:
            return np.zeros(leaf.shape[1:], jax.dtypes.float0)
        return lax.dynamic_index_in_dim(leaf, number, keepdims=False)

    return jax.tree.map(of_layer, tree)


def _put(tree: Tree, number: Any, part: Tree) -> Tree:
    """Return `tree` with the values of one layer."""

    def put(leaf: Any, value: Any) -> Any:
        if value is None:
            return leaf
        return lax.dynamic_update_index_in_dim(leaf, value.astype(leaf.dtype), number, 0)

    return jax.tree.map(put, tree, part)


def _no_gradient(leaf: Any) -> Any:
    """Return a gradient of zero."""
    if jnp.issubdtype(leaf.dtype, jnp.inexact):
        return jnp.zeros_like(leaf)
    # The cotangent of integers, as `jax.custom_vjp` asks for it.
    return np.zeros(leaf.shape, jax.dtypes.float0)


def differentiable(grads: Tree) -> Tree:
    """Return gradients with None for those of integers."""

    def without_float0(leaf: Any) -> Any:
        if leaf.dtype == jax.dtypes.float0:
            return None
        return leaf

    return jax.tree.map(without_float0, grads)


def complete(grads: Tree, like: Tree) -> Tree:
    """Return `grads` with the gradients that `differentiable` left out, as zeros."""

    def completed(gradient: Any, leaf: Any) -> Any:
        if gradient is None and leaf is not None:
            return _no_gradient(leaf)
        return gradient

    gradients, structure = jax.tree.flatten(grads, is_leaf=lambda leaf: leaf is None)
    leaves = jax.tree.leaves(like, is_leaf=lambda leaf: leaf is None)
    return jax.tree.unflatten(
        structure, [completed(*pair) for pair in zip(gradients, leaves, strict=True)]
    )
