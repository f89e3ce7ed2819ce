"""Blocks of a list, each of which gathers its parameters where it is called, and reduces its
gradients (FSDP without a loop).

A block gathers when its input is there, and again in its backward pass, as `wire.gather` does under
`jax.checkpoint`. Parameters of one block exist at a time, and blocks may be called in any order.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from spmd.base.tree import Tree, flatten
from spmd.models.blocks import BlockCalls, RunBlock
from spmd.nn.gathered_scan import Communication, Stack, complete, differentiable, together
from spmd.nn.inner_program import InnerProgram, Saved
from spmd.nn.stacking import gathered_policy, recomputed_by_caller


class GatheredBlocks(BlockCalls):
    """Calls of one forward pass.

    Args:
      gather: `spmd.sync.layer_gather.LayerGather` of blocks.
      blocks: their paths.
      residuals: by path of a parameter, what its gradient carries from microbatch to microbatch.
    """

    def __init__(self, gather: Any, blocks: Iterable[str], residuals: Mapping[str, Any]):
        self._gather = gather
        self._blocks = frozenset(blocks)
        self._residuals = residuals

    def takes(self, path: str) -> bool:
        """Return whether the module with this path is a block."""
        return path in self._blocks

    def call_block(
        self, path: str, function: RunBlock, params: dict[str, Any], others: Tree
    ) -> tuple[Tree, Tree]:
        """Return outputs of the block, and the variables that its call changed. `params` are this
        worker's shards.
        """
        names = [*flatten(params)]
        structure = jax.tree.structure(params)
        paths = {name: f"{path}/{name}" for name in names}
        communication, block = Stack.of(self._gather, paths, params, others, self._residuals)
        remat_policy = self._gather.remat_policy(path)

        def call_full(full: tuple[Tree, Tree], others: Tree) -> tuple[Tree, Tree]:
            leaves = full[0] | full[1]
            full_params = jax.tree.unflatten(structure, [leaves[name] for name in names])
            with recomputed_by_caller(remat_policy is not None):
                return function(full_params, others)

        full = jax.eval_shape(communication.gather_both, (block.shards, block.frozen))
        program = InnerProgram(call_full, full, others)
        computed = program.recomputed(gathered_policy(full, remat_policy))
        unit = _Block(communication, computed, waits=remat_policy is not None)
        return _call_gathered(unit, block, program.constants)


class _Block(NamedTuple):
    communication: Communication
    # ((full parameters, frozen ones), others, constants) -> (outputs, kept)
    call: Callable[..., tuple[Tree, Tree]]
    # whether the backward pass of the block before waits until these gradients are reduced
    waits: bool

    def gather(self, block: Stack, computed: Tree) -> tuple[tuple[Tree, Tree], Tree]:
        """Return full parameters and frozen ones, gathered once the floating arrays of `computed`
        are there; and `computed`.
        """
        leaves, structure = jax.tree.flatten(computed)
        numbers = [
            number for number, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.floating)
        ]
        # Without a barrier XLA may gather the parameters of all blocks at the start of the step.
        sharded, waited = together(
            (block.shards, block.frozen), [leaves[number] for number in numbers]
        )
        for number, leaf in zip(numbers, waited, strict=True):
            leaves[number] = leaf
        return self.communication.gather_both(sharded), jax.tree.unflatten(structure, leaves)


# Not `wire.gather` under `jax.checkpoint`: its policy sees the operations of a gather one by one,
# and cannot distinguish the parts of a bucket from values of the block; only the last microbatch
# reduces sums of gradients; and code that reads a traced loss finds a block as one equation.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _call_gathered(unit: _Block, block: Stack, constants: list[Any]) -> tuple[Tree, Tree]:
    """Return outputs, and the variables that the call changed."""
    full, constants = unit.gather(block, constants)
    return unit.call(full, block.others, constants)


def _forward(
    unit: _Block, block: Stack, constants: list[Any]
) -> tuple[tuple[Tree, Tree], tuple[Saved, Stack, list[Any]]]:
    full, constants = unit.gather(block, constants)
    outputs, function = jax.vjp(
        lambda params, others, constants: unit.call((params, full[1]), others, constants),
        full[0],
        block.others,
        constants,
    )
    return outputs, (Saved.of(function, (full, block.others, constants)), block, constants)


def _backward(
    unit: _Block, from_forward: tuple[Saved, Stack, list[Any]], cotangents: tuple
) -> tuple[Stack, list[Any]]:
    saved, block, constants = from_forward
    full, cotangents = unit.gather(block, cotangents)
    dfull, dothers, dconstants = differentiable(
        saved.gradients((full, block.others, constants), cotangents)
    )
    dshards, residuals = unit.communication.reduce(block.shards, dfull, block.residuals)
    # XLA:GPU (jaxlib 0.10) reduces the gradients of all blocks at the end of the step, and holds
    # them in full until then, if nothing waits for them. A barrier exposes the communication, so
    # there is one only where the layout recomputes the block: there memory counts more than time.
    if unit.waits:
        dshards, residuals, dothers, dconstants = together(dshards, residuals, dothers, dconstants)
    # Parameters that are not trained now have no next residual: theirs stays.
    residuals = jax.tree.map(_next_residual, block.residuals, residuals)
    gradient = complete(Stack(dshards, dothers, residuals), block._replace(frozen={}))
    return gradient._replace(frozen=None), complete(dconstants, constants)


_call_gathered.defvjp(_forward, _backward)


def _next_residual(before: Any, after: Any) -> Any:
    if after is None:
        return before
    return after
