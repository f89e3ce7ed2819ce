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
from spmd.nn.written_loops import rewritten
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
        """Call every layer in turn.

        Args:
          x: an array or a tree of them, [rows, ...] each.
          rows: further inputs of every layer, [rows, ...] each: they are split into microbatches as
            `x` is.
          shared: further inputs of every layer, which are not split.
        """
        layers = Layers(self.layers)
        parallel = current()
        parallel.used.update(("pipeline", "microbatches"))
        leaves, structure = jax.tree.flatten(shared, is_leaf=lambda leaf: leaf is None)
        # A region of devices takes arrays alone.
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
            return layers.apply(lambda layer: layer(x, *rows, **shared), variables, change)

        def call_fused(
            x: Tree, inputs: tuple, variables: tuple, change: Callable[[Any], Any]
        ) -> tuple[Any, Tree]:
            call_changed = functools.partial(call_layer, change=change)
            # The program of a pipeline cannot be changed afterwards, as that of a loss is.
            if parallel.stages > 1:
                call_changed = rewritten(call_changed)
            return call_changed(x, inputs, variables)

        if parallel.tap is not None:
            return parallel.tap(parallel, layers, call_fused, x, (rows, arrays))
        if parallel.stages == 1:

            def run_layer(x: Tree, variables: tuple) -> tuple[Any, Tree]:
                return call_fused(x, (rows, arrays), variables, lambda key: key)

            y, after = run_layers(
                parallel, layers, run_layer, x, layers.variables, unroll=parallel.unroll
            )
        else:
            y, after = _pipelined(parallel, layers, call_fused, x, rows, arrays)
        layers.update(after)
        return y

    def layer(self, number: int) -> nnx.Module:
        """Return layer `number` as a module with a copy of its arrays."""
        return unstack_module(self.layers, number)


@dataclasses.dataclass(frozen=True)
class Microbatches:
    """The microbatches of a worker's rows.

    Attributes:
      count: microbatches; `rows`: of each.
      row_axes: the data axes over which the pipeline itself shards rows, because no region around
        it does.
    """

    count: int
    rows: int
    row_axes: tuple[str, ...]

    def split(self, tree: Tree) -> Tree:
        """Return leaves [rows, ...] as [microbatches, rows of one, ...], of contiguous rows."""
        return jax.tree.map(lambda x: x.reshape(self.count, self.rows, *x.shape[1:]), tree)

    def merge(self, tree: Tree) -> Tree:
        """Return leaves [microbatches, rows of one, ...] as [rows, ...]."""
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)

    def key(self, number: jax.Array) -> Callable[[Any], Any]:
        """Return a function from a key for all rows to the key for microbatch `number` of this
        worker, which draws the same values for its rows.
        """
        workers = 1
        if self.row_axes:
            workers = collectives.worker_count(self.row_axes)
        part = collectives.worker_index(self.row_axes) * self.count + number
        return lambda key: part_key(key, part, workers * self.count, rows=self.rows)


def split_microbatches(parallel: ParallelConfig, trees: Tree) -> Microbatches:
    """Return the microbatches that the layout asks for, or the most below that number that divide
    the rows. By default, a circle's stages divide it if they can.

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
    rows = leaves[0].shape[0]
    stages = parallel.stages
    declared = parallel.pipeline
    free = parallel.auto_row_axes(rows)
    rows //= math.prod(map(parallel.axis_size, free))
    unit = 1
    if declared.groups > 1 and declared.microbatches is None:
        unit = stages
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
    """Return the number of layers on each stage.

    Raises:
      ModelError: the stages (and their groups) do not divide the number of layers.
    """
    declared = parallel.pipeline
    parts = parallel.stages * parallel.pipeline.groups
    if count % parts:
        stages = f'{parallel.stages} stages (mesh axis "{declared.axis}")'
        if declared.groups > 1:
            stages += f" of {declared.groups} groups"
        why = f"a stack of {count} layers over {stages}: {count} / {parts} leaves {count % parts}."
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
    """Return the stack's results and its layers' variables after the calls, computed by a
    pipeline.
    """
    declared = parallel.pipeline
    groups = parallel.pipeline.groups
    axis = str(declared.axis)
    group_size = layers_per_stage(parallel, layers.count) // groups
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
        x = microbatches.split(x)
        rows = microbatches.split(rows)

        def work(
            inputs: tuple, stage_variables: Tree, number: jax.Array, group: jax.Array, x: Tree
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

            def put(leaf: jax.Array, part: jax.Array) -> jax.Array:
                return jax.lax.dynamic_update_slice_in_dim(leaf, part, group * group_size, 0)

            group_variables = jax.tree.map(pick, variables)
            y, after = scan_layers(run_layer, x, group_variables, unroll=parallel.unroll)
            return jax.tree.map(put, stage_variables, after), y

        after, y = run_schedule(
            parallel, schedule, work, (variables, rows, shared), variables[2], x
        )
        return microbatches.merge(from_last_stage(y, axis, scatter=scatter)), after

    def permute(tree: Tree, order: np.ndarray) -> Tree:
        if groups == 1:
            return tree
        return jax.tree.map(lambda leaf: leaf[order], tree)

    order = stage_order(layers.count, parallel.stages, groups)
    params = layers.params
    if not parallel.in_stage_order:
        params = permute(params, order)
    variables = (params, *permute(layers.variables[1:], order))
    scatter = microbatches.count % parallel.stages == 0
    by_stage = PartitionSpec(axis)
    by_row = row_spec(microbatches.row_axes)
    row_axes = microbatches.row_axes
    y_spec = by_row
    if scatter:
        y_spec = row_spec((*row_axes, axis))
    in_specs = (by_stage, by_row, by_row, PartitionSpec())
    on_stages = parallel.shard_map(
        (axis, *row_axes), stage, in_specs=in_specs, out_specs=(y_spec, by_stage)
    )
    y, after = on_stages(variables, x, rows, shared)
    return y, permute(after, np.argsort(order))
