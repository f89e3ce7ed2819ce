"""Blocks of a list, each of which gathers the next one's parameters while it computes, and reduces
its gradients (FSDP without a loop).

As in `gathered_scan`, parameters of two blocks exist at a time. Here the model calls its blocks one
after the other, so each call has a backward pass of its own, and an array is handed from call to
call: forward, it is the full parameters of the next block. Its cotangent, which the next block's
backward pass returns, is the full parameters of this one, gathered there one ahead.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from spmd.errors import ModelError
from spmd.models.blocks import BlockCalls, RunBlock
from spmd.nn.gathered_scan import Saved, complete, differentiable, together
from spmd.nn.inner_program import InnerProgram
from spmd.nn.stacking import gathered_policy, recomputed_by_caller
from spmd.tree import Tree, flatten
from spmd.xla import current_trace


class GatheredBlocks(BlockCalls):
    """Calls of one forward pass.

    Args:
      gather: `spmd.sync.layer_gather.BlockGather`.
      groups: paths of equal blocks, in the order of their calls.
      params: of the model: of blocks, this worker's shards.
      residuals: by path, what the gradients that are reduced here carry from microbatch to
        microbatch.
      ahead: whether a block gathers the next one's parameters. False: each gathers its own, in any
        order.
    """

    def __init__(
        self,
        gather: Any,
        groups: tuple[tuple[str, ...], ...],
        params: Tree,
        residuals: Mapping[str, Any],
        *,
        ahead: bool = True,
    ):
        self._gather, self._residuals, self._ahead, self._groups = gather, residuals, ahead, groups
        self._places = {
            path: (group, place) for group in groups for place, path in enumerate(group)
        }
        leaves = flatten(params)
        self._shards = {
            block: {
                path.removeprefix(f"{block}/"): leaf
                for path, leaf in leaves.items()
                if path.startswith(f"{block}/")
            }
            for block in self._places
        }
        self._shards = {
            block: {name: leaf for name, leaf in shards.items() if gather.takes(f"{block}/{name}")}
            for block, shards in self._shards.items()
        }
        # of each group: the number of the next block, and what it is handed
        self._carried: dict[tuple[str, ...], tuple[int, _Carried]] = dict.fromkeys(
            groups, (0, _Carried({}, jnp.zeros(())))
        )
        self._trace = current_trace()

    def takes(self, path: str) -> bool:
        """Whether it is a block."""
        return path in self._places

    def run(
        self, path: str, function: RunBlock, params: dict[str, Any], others: Tree
    ) -> tuple[Tree, Tree]:
        """Outputs of the block, and what its call keeps. Of `params`, those that are sharded are
        gathered, from what the model has.
        """
        group, place = self._places[path]
        gathered, flat, structure = self._shards[path], flatten(params), jax.tree.structure(params)
        shards = self._trained(path)
        frozen = {name: leaf for name, leaf in gathered.items() if name not in shards}
        others_frozen = {
            name: leaf
            for name, leaf in flat.items()
            if name not in gathered and not self._gather.trains(f"{path}/{name}")
        }
        rest = {
            name: leaf
            for name, leaf in flat.items()
            if name not in gathered and name not in others_frozen
        }
        gather, paths = (
            functools.partial(self._full, path),
            {name: f"{path}/{name}" for name in shards},
        )
        remat_policy = self._gather.remat_policy(path)

        def run(full: Tree, frozen: Tree, others: tuple) -> tuple[Tree, Tree]:
            rest, variables = others
            leaves = {**full, **frozen, **rest}
            with recomputed_by_caller(remat_policy is not None):
                return function(
                    jax.tree.unflatten(structure, [leaves[name] for name in flat]), variables
                )

        full, full_frozen = jax.eval_shape(gather, shards), jax.eval_shape(gather, frozen)
        inputs = rest, others
        program = InnerProgram(run, full, full_frozen | others_frozen, inputs)
        before = group[place - 1] if self._ahead and place else None
        after = group[place + 1] if self._ahead and place + 1 < len(group) else None
        unit = _Unit(
            program.recomputed(gathered_policy((full, full_frozen), remat_policy)),
            gather,
            functools.partial(self._gather.reduce, paths),
            None if before is None else functools.partial(self._full, before),
            None if after is None else functools.partial(self._full, after),
        )
        residuals = {
            path: self._residuals[path] for path in paths.values() if path in self._residuals
        }
        neighbours = tuple(
            {} if block is None else self._trained(block) for block in (before, after)
        )
        carried = self._next(group, path) if self._ahead else _Carried({}, jnp.zeros(()))
        outputs, kept, following = _run(
            unit,
            carried,
            _Block(shards, inputs, residuals, (frozen, others_frozen)),
            neighbours,
            program.constants,
        )  # type: ignore[misc]
        self._carried[group] = (place + 1, following)
        return outputs, kept

    def _trained(self, path: str) -> dict[str, Any]:
        """Shards of a block's trained parameters."""
        return {
            name: leaf
            for name, leaf in self._shards[path].items()
            if self._gather.trains(f"{path}/{name}")
        }

    def _full(self, path: str, shards: Tree) -> Tree:
        return self._gather.gather({name: f"{path}/{name}" for name in shards}, shards)

    def _next(self, group: tuple[str, ...], path: str) -> "_Carried":
        """Parameters of this block, if it is the next one."""
        number, carried = self._carried[group]
        if number == len(group) or group[number] != path or current_trace() != self._trace:
            why = (
                f"{path} is gathered while the block before it computes, and was not called where "
                "the loss called it when first traced."
            )
            raise ModelError(why, fix='calls in one order; or [gradients] gather = "full".')
        return carried

    def finish(self) -> jax.Array:
        """Zero, to be added to the loss: its gradient begins the backward pass of the last block,
        also where the loss does not use it.
        """
        for group, (number, _) in self._carried.items():
            if number < len(group):
                why = (
                    f"{group[number]} was called when the loss was first traced, and then no more."
                )
                raise ModelError(
                    why, fix='calls that are always the same; or [gradients] gather = "full".'
                )
        return sum((carried.done for _, carried in self._carried.values()), jnp.zeros(()))


class _Block(NamedTuple):
    shards: Tree
    others: Tree  # other parameters and variables
    residuals: Tree
    # parameters that have no gradients: shards, and those that are not sharded
    frozen: tuple[Tree, Tree]


class _Carried(NamedTuple):
    """What one block hands to the next, and whose cotangent comes back.

    Attributes:
      full: the next block's parameters. Cotangent: this one's.
      done: zero. Its cotangent, zero too, is there once the next block's gradients are reduced.
    """

    full: Tree
    done: jax.Array


class _Unit(NamedTuple):
    """A call of a block. Its own parameters, the block's before and the block's after are gathered
    in three ways, by other paths.
    """

    # (full parameters, frozen ones, others, constants) -> (outputs, kept)
    run: Callable[..., tuple[Tree, Tree]]
    gather: Callable[[Tree], Tree]
    reduce: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]
    gather_before: Callable[[Tree], Tree] | None
    gather_after: Callable[[Tree], Tree] | None

    def gathered(
        self, carried: _Carried, block: _Block, neighbours: tuple, constants: list[Any]
    ) -> tuple[Tree, list[Any], _Carried]:
        """Full parameters of this block, its inputs, and full parameters of the next one.

        A gather begins when inputs are there, and the gather before is done, or else they would be
        combined.
        """
        full, shards, after = carried.full, block.shards, {}
        if self.gather_before is None:
            shards, constants = _together(shards, constants)
            full = self.gather(shards)
        if self.gather_after is not None:
            (shards_after, full), constants = _together((neighbours[1], full), constants)
            after = self.gather_after(shards_after)
        return full, constants, _Carried(after, jnp.zeros(()))

    def frozen(self, block: _Block, computed: Tree) -> tuple[Tree, Tree]:
        """Full frozen parameters, which are gathered when `computed` is there; and that."""
        (shards, rest) = block.frozen
        if not shards:
            return rest, computed
        shards, computed = _together(shards, computed)
        return self.gather(shards) | rest, computed


def _together(tree: Tree, computed: Tree) -> tuple[Tree, Tree]:
    """`together`, with the floating arrays of `computed` only."""
    leaves, structure = jax.tree.flatten(computed)
    floating = {
        number: leaf
        for number, leaf in enumerate(leaves)
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    }
    tree, floating = together(tree, floating)
    return tree, structure.unflatten(
        [floating.get(number, leaf) for number, leaf in enumerate(leaves)]
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(
    unit: _Unit, carried: _Carried, block: _Block, neighbours: tuple, constants: list[Any]
) -> tuple[Tree, Tree, _Carried]:
    """Outputs, what the call keeps, and full parameters of the next block."""
    full, constants, following = unit.gathered(carried, block, neighbours, constants)
    frozen, constants = unit.frozen(block, constants)
    return *unit.run(full, frozen, block.others, constants), following


def _forward(
    unit: _Unit, carried: _Carried, block: _Block, neighbours: tuple, constants: list[Any]
) -> tuple[tuple, tuple]:
    full, constants, following = unit.gathered(carried, block, neighbours, constants)
    frozen, constants = unit.frozen(block, constants)
    inputs = full, block.others, constants
    (outputs, kept), function = jax.vjp(
        lambda full, others, constants: unit.run(full, frozen, others, constants), *inputs
    )
    last = full if unit.gather_after is None else None
    return (outputs, kept, following), (
        Saved.of(function, (*inputs, frozen)),
        last,
        block,
        neighbours[0],
        constants,
    )


def _backward(unit: _Unit, residuals: tuple, cotangents: tuple) -> tuple:
    saved, last, block, shards_before, constants = residuals
    *outputs, (full, done) = cotangents
    full, done, before = (full, done, {}) if last is None else (last, jnp.zeros(()), {})
    if unit.gather_before is not None:
        (shards_before, full), outputs = _together((shards_before, full), outputs)
        before = unit.gather_before(shards_before)
    frozen, outputs = unit.frozen(block, outputs)
    dfull, *grads = differentiable(
        saved.gradients((full, block.others, constants, frozen), tuple(outputs))
    )
    # The block before begins when this one's gradients are computed, and the next one's reduced:
    # full gradients of two blocks exist.
    dfull, grads, done = lax.optimization_barrier((dfull, grads, done))
    dothers, dconstants = complete(grads, [block.others, constants])
    dshards, next_residuals = unit.reduce(block.shards, dfull, block.residuals)
    dshards = {
        name: jnp.zeros_like(block.shards[name]) if grad is None else grad
        for name, grad in dshards.items()
    }
    next_residuals = jax.tree.map(
        lambda new, old: old if new is None else new,
        next_residuals,
        block.residuals,
        is_leaf=_is_none,
    )
    done, dshards = together(done, dshards)
    # used at the end, or a compiler would leave it out from the beginning
    if unit.gather_before is None and dshards:
        name = min(dshards, key=lambda name: dshards[name].size)
        dshards = {**dshards, name: dshards[name] + done.astype(dshards[name].dtype)}
    return _Carried(before, done), _Block(dshards, dothers, next_residuals, None), None, dconstants  # type: ignore[arg-type]


def _is_none(leaf: Any) -> bool:
    return leaf is None


_run.defvjp(_forward, _backward)
