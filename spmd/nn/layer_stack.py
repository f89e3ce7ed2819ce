"""A stack of equal layers: a scan over them on one device, a pipeline along a mesh axis where the layout says so."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from spmd.errors import ModelError
from spmd.nn.layer_order import stage_order
from spmd.nn.parallel_context import Cutting, current, rows_over
from spmd.nn.pipeline_executor import from_last_stage, run_ticks
from spmd.nn.schedule import make_schedule
from spmd.nn.stacking import Layers, Repeated, scan_layers, stack_modules, unstack_module
from spmd.rng import part_key
from spmd.tree import Tree, describe
from spmd.wire import collectives

MICROBATCHES = 4  # per stage, where a layout does not say: with as many a pipeline idles for a fifth of its time at most


class LayerStack(nnx.Module):
    """Layers of the same structure, one after the other: `x = layer(x, *rows, **whole)` for each.

    On one device it is a `lax.scan` over the layers, so that compiling takes as long for 48 as for 6. Under a layout with `[pipeline]` each
    device along its axis has `layers / stages` of them, rows are cut into microbatches, and these go from device to device by the
    layout's schedule (GPipe, Huang et al., arXiv:1811.06965). What is computed is the same.

    Parameters are those of one layer with dim 0 in front, [layers, ...]: `stack/layers/up/kernel`. A rule of a layout speaks of one
    layer's; dim 0 is cut over the pipeline's axis by itself. The path of the layer, for `[remat] modules` and `[[activations]]`, is
    `stack/layers`.

    Args:
      layers: modules equal in kind, settings and shapes, which are copied into the stack, or `spmd.nn.repeat`. What a layer returns is
        shaped like `x`.

    Raises:
      ModelError: layers that differ, with every difference.

    Example:
      >>> import jax.numpy as jnp
      >>> stack = LayerStack([nnx.Linear(4, 4, rngs=nnx.Rngs(seed)) for seed in range(6)])
      >>> stack(jnp.ones((2, 4))).shape, stack.layers.kernel.shape
      ((2, 4), (6, 4, 4))
    """

    def __init__(self, layers: Sequence[nnx.Module] | Repeated):
        self.layers = stack_modules(layers, "LayerStack")

    def __call__(self, x: Tree, *rows: Tree, **whole: Any) -> Tree:
        """Every layer in turn.

        Args:
          x: an array or a tree of them, [rows, ...] each.
          rows: more that every layer gets, [rows, ...] each: it is cut into microbatches as `x` is.
          whole: more that every layer gets as it is.
        """
        layers, cutting = Layers(self.layers), current()
        cutting.used.update(("pipeline", "microbatches"))
        leaves, structure = jax.tree.flatten(whole, is_leaf=lambda leaf: leaf is None)
        arrays = {number: leaf for number, leaf in enumerate(leaves) if isinstance(leaf, jax.Array | np.ndarray)}
        named = lambda arrays: structure.unflatten([arrays.get(number, leaf) for number, leaf in enumerate(leaves)])
        call = lambda x, more, variables, change: layers.call(lambda layer: layer(x, *more[0], **named(more[1])), variables, change)
        if cutting.tap is not None:
            return cutting.tap(cutting, layers, call, x, (rows, arrays))
        if cutting.stages == 1:
            one = lambda x, variables: call(x, (rows, arrays), variables, lambda key: key)
            y, kept = scan_layers(one, x, layers.variables, unroll=cutting.unroll)
        else:
            y, kept = _pipelined(cutting, layers, call, x, rows, arrays)
        layers.keep(kept)
        return y

    def layer(self, number: int) -> nnx.Module:
        """Layer `number` by itself, with a copy of its arrays."""
        return unstack_module(self.layers, number)


@dataclasses.dataclass(frozen=True)
class Parts:
    """How a worker's rows are cut into microbatches.

    `free`: the data axes that the pipeline cuts by itself, because nothing around it has.
    """

    count: int
    rows: int
    free: tuple[str, ...]

    def apart(self, tree: Tree) -> Tree:
        """Leaves [rows, ...] as [microbatches, rows of one, ...], of rows that lie side by side."""
        return jax.tree.map(lambda x: x.reshape(self.count, self.rows, *x.shape[1:]), tree)

    def together(self, tree: Tree) -> Tree:
        """The opposite."""
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)

    def key(self, number: jax.Array) -> Callable[[Any], Any]:
        """From a key for all rows to that for microbatch `number` of this worker: it draws what all would have drawn there."""
        workers = collectives.worker_count(self.free) if self.free else 1
        part = collectives.worker_index(self.free) * self.count + number
        return lambda key: part_key(key, part, workers * self.count, rows=self.rows)


def cut_rows(cutting: Cutting, trees: Tree) -> Parts:
    """As many microbatches as the layout asks for, or as many as divide the rows there are.

    Raises:
      ModelError: arrays that do not all have the same rows along dim 0.
    """
    leaves = jax.tree.leaves(trees)
    if not leaves or any(np.ndim(leaf) == 0 or leaf.shape[0] != leaves[0].shape[0] for leaf in leaves):
        given = ", ".join(map(describe, leaves)) or "no arrays"
        raise ModelError(
            f"a stack of layers was called with {given}; a pipeline cuts rows, which are dim 0 of all.\n"
            "    fix: pass what has no rows by name: stack(x, table=...)."
        )
    rows, stages, declared = leaves[0].shape[0], cutting.stages, cutting.pipeline
    free = cutting.free_over(rows)
    rows //= math.prod(map(cutting.size, free))
    unit = stages if declared.groups > 1 else 1
    # by itself never of one row: a draw for one row cannot be told from one that all rows share (`spmd.rng.worker_key`)
    most = declared.microbatches or min(MICROBATCHES * stages, max(unit, rows // cutting.shares // 2))
    fitting = [count for count in range(unit, min(most, rows // cutting.shares) + 1, unit) if rows % (count * cutting.shares) == 0]
    if not fitting:
        why = f"{rows} rows on each worker cannot be cut into microbatches for {stages} stages of {declared.groups} groups"
        raise ModelError(f"{why}: their number must divide by {stages}.", fix=f"a batch of which each worker has a multiple of {stages}.")
    return Parts(fitting[-1], rows // fitting[-1], free)


def stage_layers(cutting: Cutting, count: int) -> int:
    """How many layers each stage has.

    Raises:
      ModelError: a number of layers that stages (and groups on them) do not divide.
    """
    declared, parts = cutting.pipeline, cutting.stages * cutting.pipeline.groups
    if count % parts:
        of = f'{cutting.stages} stages (mesh axis "{declared.axis}")' + (f" of {declared.groups} groups" if declared.groups > 1 else "")
        near = " or ".join(map(str, sorted({max(parts, count // parts * parts), -(-count // parts) * parts})))
        raise ModelError(f"a stack of {count} layers over {of}: {count} / {parts} leaves {count % parts}.", fix=f"{near} layers.")
    return count // cutting.stages


def _pipelined(cutting: Cutting, layers: Layers, call: Callable[..., tuple], x: Tree, rows: tuple, whole: dict) -> tuple[Tree, Tree]:
    """The stack's results and what its layers keep, by way of the stages."""
    axis, groups = str(cutting.pipeline.axis), cutting.pipeline.groups
    own = stage_layers(cutting, layers.count) // groups
    parts = cut_rows(cutting, (x, rows))
    declared = cutting.pipeline
    schedule = make_schedule(declared.schedule, stages=cutting.stages, microbatches=parts.count, groups=groups, hop=declared.hop)
    cutting.schedules[f"LayerStack of {layers.count} layers"] = schedule

    def stage(variables: tuple, x: Tree, rows: tuple, whole: dict) -> tuple[Tree, Tree]:
        x, rows = parts.apart(x), parts.apart(rows)

        def work(given: tuple, kept: Tree, number: jax.Array, group: jax.Array, x: Tree) -> tuple[Tree, Tree]:
            variables, rows, whole = given
            here = jax.tree.map(lambda leaf: leaf[number], rows), whole
            one = lambda x, variables: layers.unchanged(*call(x, here, variables, parts.key(number)))
            if groups == 1:
                y, after = scan_layers(one, x, variables, unroll=cutting.unroll)
                return after, y
            pick = lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, group * own, own)
            y, after = scan_layers(one, x, jax.tree.map(pick, variables), unroll=cutting.unroll)
            put = lambda kept, after: jax.lax.dynamic_update_slice_in_dim(kept, after, group * own, 0)
            return jax.tree.map(put, kept, after), y

        kept, y = run_ticks(cutting, schedule, work, (variables, rows, whole), variables[2], x)
        return parts.together(from_last_stage(y, axis, scatter=scatter)), kept

    order = stage_order(layers.count, cutting.stages, groups)
    ordered = lambda tree, order: jax.tree.map(lambda leaf: leaf[order], tree) if groups > 1 else tree
    params = layers.params if cutting.ordered else ordered(layers.params, order)
    variables = (params, *ordered(layers.variables[1:], order))
    scatter = parts.count % cutting.stages == 0
    at, over = PartitionSpec(axis), rows_over(parts.free)
    out = rows_over((*parts.free, axis)) if scatter else over
    run = cutting.over((axis, *parts.free), stage, in_specs=(at, over, over, PartitionSpec()), out_specs=(out, at))
    y, kept = run(variables, x, rows, whole)
    return y, ordered(kept, np.argsort(order))
