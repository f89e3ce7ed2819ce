"""A stack of equal layers: a scan over them on one device, a pipeline along a mesh axis where the
layout says so.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from spmd.base.rng import part_key
from spmd.base.tree import Tree, describe
from spmd.errors import ModelError
from spmd.layout.fixes import near_multiples
from spmd.nn.layer_order import stage_order
from spmd.nn.parallel_context import ParallelConfig, current, row_spec
from spmd.nn.pipeline_executor import from_last_stage, run_schedule
from spmd.nn.schedule import make_schedule
from spmd.nn.stacking import (
    Layers,
    Repeated,
    run_layers,
    scan_layers,
    stack_modules,
    unstack_module,
)
from spmd.nn.written_attention import fuse_attention
from spmd.wire import collectives

# per stage, if a layout does not say: then a pipeline is idle for at most a fifth of its time
MICROBATCHES = 4


class LayerStack(nnx.Module):
    """Layers of the same structure, one after the other: `x = layer(x, *rows, **shared)` for each.

    On one device it is a `lax.scan` over the layers, so that compiling takes as long for 48 as for
    6. Under a layout with `[pipeline]` each device along its axis has `layers / stages` of them,
    rows are split into microbatches, and these are sent from device to device by the layout's
    schedule (GPipe, Huang et al., arXiv:1811.06965). The result is the same.

    Parameters are those of one layer with a leading dim of layers, [layers, ...]:
    `stack/layers/up/kernel`. A rule of a layout describes one layer's; dim 0 is sharded over the
    pipeline's axis automatically. The path of the layer, for `[remat] modules` and
    `[[activations]]`, is `stack/layers`.

    Args:
      layers: modules equal in kind, settings and shapes, which are copied into the stack, or
        `spmd.nn.repeat`. What a layer returns is shaped like `x`.

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

    def __call__(self, x: Tree, *rows: Tree, **shared: Any) -> Tree:
        """Every layer in turn.

        Args:
          x: an array or a tree of them, [rows, ...] each.
          rows: further inputs of every layer, [rows, ...] each: they are split into microbatches as
            `x` is.
          shared: further inputs of every layer, which are not split.
        """
        layers, parallel = Layers(self.layers), current()
        parallel.used.update(("pipeline", "microbatches"))
        leaves, structure = jax.tree.flatten(shared, is_leaf=lambda leaf: leaf is None)
        arrays = {
            number: leaf
            for number, leaf in enumerate(leaves)
            if isinstance(leaf, jax.Array | np.ndarray)
        }

        def call_layer(
            x: Tree, inputs: tuple, variables: tuple, change: Callable[[Any], Any]
        ) -> tuple[Any, Tree]:
            rows, arrays = inputs
            shared = structure.unflatten(
                [arrays.get(number, leaf) for number, leaf in enumerate(leaves)]
            )
            return layers.call(lambda layer: layer(x, *rows, **shared), variables, change)

        def call(
            x: Tree, inputs: tuple, variables: tuple, change: Callable[[Any], Any]
        ) -> tuple[Any, Tree]:
            run = functools.partial(call_layer, change=change)
            # in a pipeline, whose program cannot be changed afterwards
            return (
                run(x, inputs, variables)
                if parallel.stages == 1
                else fuse_attention(run)(x, inputs, variables)
            )

        if parallel.tap is not None:
            return parallel.tap(parallel, layers, call, x, (rows, arrays))
        if parallel.stages == 1:

            def run_layer(x: Tree, variables: tuple) -> tuple[Any, Tree]:
                return call(x, (rows, arrays), variables, lambda key: key)

            y, kept = run_layers(
                parallel, layers, run_layer, x, layers.variables, unroll=parallel.unroll
            )
        else:
            y, kept = _pipelined(parallel, layers, call, x, rows, arrays)
        layers.keep(kept)
        return y

    def layer(self, number: int) -> nnx.Module:
        """Layer `number` as a module with a copy of its arrays."""
        return unstack_module(self.layers, number)


@dataclasses.dataclass(frozen=True)
class Microbatches:
    """How a worker's rows are split into microbatches.

    Attributes:
      count: microbatches; `rows`: of each.
      row_axes: the data axes over which the pipeline itself shards rows, because no region around
        it does.
    """

    count: int
    rows: int
    row_axes: tuple[str, ...]

    def split(self, tree: Tree) -> Tree:
        """Leaves [rows, ...] as [microbatches, rows of one, ...], of contiguous rows."""
        return jax.tree.map(lambda x: x.reshape(self.count, self.rows, *x.shape[1:]), tree)

    def merge(self, tree: Tree) -> Tree:
        """The inverse of `split`."""
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)

    def key(self, number: jax.Array) -> Callable[[Any], Any]:
        """From a key for all rows to that for microbatch `number` of this worker, which draws the
        same values for its rows.
        """
        workers = collectives.worker_count(self.row_axes) if self.row_axes else 1
        part = collectives.worker_index(self.row_axes) * self.count + number
        return lambda key: part_key(key, part, workers * self.count, rows=self.rows)


def split_microbatches(parallel: ParallelConfig, trees: Tree) -> Microbatches:
    """The layout's number of microbatches, or the most below it that divide the rows. By default, a
    circle's stages divide it if they can.

    Raises:
      ModelError: arrays that do not all have the same rows along dim 0.
    """
    leaves = jax.tree.leaves(trees)
    if not leaves or any(
        np.ndim(leaf) == 0 or leaf.shape[0] != leaves[0].shape[0] for leaf in leaves
    ):
        inputs = ", ".join(map(describe, leaves)) or "no arrays"
        why = (
            f"a stack of layers was called with {inputs}; a pipeline splits rows, which must be "
            "dim 0 of all."
        )
        raise ModelError(why, fix="pass arrays without rows by name: stack(x, table=...).")
    rows, stages, declared = leaves[0].shape[0], parallel.stages, parallel.pipeline
    free = parallel.auto_row_axes(rows)
    rows //= math.prod(map(parallel.axis_size, free))
    unit = stages if declared.groups > 1 and declared.microbatches is None else 1
    # The default is never one row each: a draw for one row looks like one that all rows share
    # (`spmd.base.rng.worker_key`).
    splits = parallel.row_splits
    most = declared.microbatches or min(MICROBATCHES * stages, max(unit, rows // splits // 2))
    fitting = [
        count for count in range(1, min(most, rows // splits) + 1) if rows % (count * splits) == 0
    ]
    count = max(fitting, key=lambda count: (count % unit == 0, count))
    return Microbatches(count, rows // count, free)


def layers_per_stage(parallel: ParallelConfig, count: int) -> int:
    """The number of layers on each stage.

    Raises:
      ModelError: the stages (and their groups) do not divide the number of layers.
    """
    declared, parts = parallel.pipeline, parallel.stages * parallel.pipeline.groups
    if count % parts:
        of = f'{parallel.stages} stages (mesh axis "{declared.axis}")' + (
            f" of {declared.groups} groups" if declared.groups > 1 else ""
        )
        why = f"a stack of {count} layers over {of}: {count} / {parts} leaves {count % parts}."
        raise ModelError(why, fix=f"{near_multiples(count, parts)} layers.")
    return count // parallel.stages


def _pipelined(
    parallel: ParallelConfig,
    layers: Layers,
    call: Callable[..., tuple],
    x: Tree,
    rows: tuple,
    shared: dict,
) -> tuple[Tree, Tree]:
    """The stack's results and what its layers keep, computed by a pipeline."""
    declared, groups = parallel.pipeline, parallel.pipeline.groups
    axis, group_size = str(declared.axis), layers_per_stage(parallel, layers.count) // groups
    microbatches = split_microbatches(parallel, (x, rows))
    schedule = make_schedule(
        declared.schedule,
        stages=parallel.stages,
        microbatches=microbatches.count,
        groups=groups,
        hop=declared.hop,
    )
    parallel.schedules[f"LayerStack of {layers.count} layers"] = schedule

    def stage(variables: tuple, x: Tree, rows: tuple, shared: dict) -> tuple[Tree, Tree]:
        x, rows = microbatches.split(x), microbatches.split(rows)

        def work(
            inputs: tuple, kept: Tree, number: jax.Array, group: jax.Array, x: Tree
        ) -> tuple[Tree, Tree]:
            variables, rows, shared = inputs
            layer_inputs = jax.tree.map(lambda leaf: leaf[number], rows), shared

            def run_layer(x: Tree, variables: tuple) -> tuple[Any, Tree]:
                return layers.unchanged(*call(x, layer_inputs, variables, microbatches.key(number)))

            if groups == 1:
                y, after = scan_layers(run_layer, x, variables, unroll=parallel.unroll)
                return after, y

            def pick(leaf: jax.Array) -> jax.Array:
                return jax.lax.dynamic_slice_in_dim(leaf, group * group_size, group_size)

            def put(kept: jax.Array, after: jax.Array) -> jax.Array:
                return jax.lax.dynamic_update_slice_in_dim(kept, after, group * group_size, 0)

            y, after = scan_layers(
                run_layer, x, jax.tree.map(pick, variables), unroll=parallel.unroll
            )
            return jax.tree.map(put, kept, after), y

        kept, y = run_schedule(parallel, schedule, work, (variables, rows, shared), variables[2], x)
        return microbatches.merge(from_last_stage(y, axis, scatter=scatter)), kept

    def permute(tree: Tree, order: np.ndarray) -> Tree:
        return jax.tree.map(lambda leaf: leaf[order], tree) if groups > 1 else tree

    order = stage_order(layers.count, parallel.stages, groups)
    params = layers.params if parallel.in_stage_order else permute(layers.params, order)
    variables = (params, *permute(layers.variables[1:], order))
    scatter = microbatches.count % parallel.stages == 0
    by_stage, by_row, row_axes = (
        PartitionSpec(axis),
        row_spec(microbatches.row_axes),
        microbatches.row_axes,
    )
    y_spec = row_spec((*row_axes, axis)) if scatter else by_row
    in_specs = (by_stage, by_row, by_row, PartitionSpec())
    run = parallel.shard_map(
        (axis, *row_axes), stage, in_specs=in_specs, out_specs=(y_spec, by_stage)
    )
    y, kept = run(variables, x, rows, shared)
    return y, permute(kept, np.argsort(order))
