"""A deep recurrent network: a scan over layers and time on one device, a wavefront along a mesh
axis under a layout with `[pipeline]`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

from spmd.base.rng import part_key
from spmd.base.tree import Tree, describe
from spmd.errors import ModelError, type_name
from spmd.nn.cudnn_lstm import run_lstm
from spmd.nn.layer_order import stage_order
from spmd.nn.layer_stack import layers_per_stage
from spmd.nn.parallel_context import ParallelConfig, current
from spmd.nn.pipeline_executor import from_last_stage, run_schedule
from spmd.nn.schedule import TIME_CHUNKS, best_chunk, make_schedule
from spmd.nn.stacking import (
    Layers,
    Repeated,
    run_layers,
    scan_layers,
    shown,
    stack_modules,
    unstack_module,
)
from spmd.nn.time_scan import scan_time
from spmd.wire import collectives


class RNNStack(nnx.Module):
    """Recurrent layers on top of each other: `carry, y = cell(carry, x)` for every time step; each
    layer's output is the next one's input.

    On one device it is a loop over time for each layer (`spmd.nn.time_scan`), with a gradient in
    reverse mode alone: for `jax.jvp` use `lax.scan` with the modules that `cell` returns. Under a
    layout with `[pipeline]` each device along its axis has `layers / stages` of them and works on
    one chunk of time while the device before works on the next: a wavefront of T / c + p - 1 ticks
    for T steps in chunks of c on p devices (GNMT, Wu et al., arXiv:1609.08144). The result is the
    same. A last chunk that is not full is padded and masked.

    Parameters are those of one cell with a leading dim of layers, [layers, ...]:
    `stack/cells/dense_h/kernel`; see `LayerStack`.

    Args:
      cells: flax nnx cells (LSTM, GRU, any `nnx.RNNCellBase`), equal in kind, settings and shapes:
        each takes as many features as it returns, plus those of `beside`; or `spmd.nn.repeat`.
      residual_from: the first layer that adds its input to its output; None: none does.
      dropout: the share of features set to zero between layers, drawn anew in every time step;
        never before the first or after the last.
      rngs: random streams for `dropout`.

    Raises:
      ModelError: cells that differ, with every difference; dropout without `rngs`.

    Example:
      >>> import jax.numpy as jnp
      >>> stack = RNNStack(
      ...     [nnx.GRUCell(4, 4, rngs=nnx.Rngs(seed)) for seed in range(3)], residual_from=1
      ... )
      >>> y, carry = stack(jnp.ones((2, 5, 4)), lengths=jnp.array([5, 3]), return_carry=True)
      >>> y.shape, carry.shape
      ((2, 5, 4), (3, 2, 4))
    """

    def __init__(
        self,
        cells: Sequence[nnx.Module] | Repeated,
        *,
        residual_from: int | None = None,
        dropout: float = 0.0,
        rngs: nnx.Rngs | None = None,
    ):
        self.cells = stack_modules(cells, "RNNStack")
        if not callable(getattr(self.cells, "initialize_carry", None)):
            raise ModelError(
                f"RNNStack: its layers are {type(self.cells).__name__}, no cells.",
                fix="nnx.LSTMCell, or LayerStack.",
            )
        self.residual_from = residual_from
        self.dropout = dropout
        self.deterministic = False
        if residual_from is not None and (type(residual_from) is not int or residual_from < 0):
            raise ModelError(
                f"RNNStack: residual_from={residual_from!r}.",
                fix="a layer's number, from 0, or None.",
            )
        if (
            isinstance(dropout, bool)
            or not isinstance(dropout, int | float)
            or not 0.0 <= dropout < 1.0
        ):
            raise ModelError(f"RNNStack: dropout={dropout!r}.", fix="from 0 to below 1.")
        if dropout and not isinstance(rngs, nnx.Rngs):
            raise ModelError(
                f"RNNStack: dropout={dropout} needs random numbers, but rngs is {type_name(rngs)}.",
                fix="rngs=nnx.Rngs(0).",
            )
        # In one assignment: flax (0.12) treats an attribute that was first None as static, and then
        # refuses a stream of random numbers.
        stream = None
        if dropout and rngs is not None:
            stream = rngs.dropout.fork()
        self.rngs = stream

    def __call__(
        self,
        x: jax.Array,
        *,
        initial: Tree = None,
        lengths: Any = None,
        beside: Any = None,
        return_carry: bool = False,
    ) -> Any:
        """Run all layers over all time steps.

        Args:
          x: [rows, time, features].
          initial: every cell's initial carry, leaves [layers, rows, ...]; None: the cell's default.
          lengths: int32[rows], how many steps of each row count; after them a carry does not
            change, and outputs are zeros.
          beside: [rows, time, more features], appended to the input of every layer (such as an
            attention's context).
          return_carry: also return the carries after the last step.

        Returns:
          [rows, time, features], or that and the carries, leaves [layers, rows, ...].
        """
        layers = Layers(self.cells)
        parallel = current()
        parallel.used.update(("pipeline", "time_chunk"))
        if parallel.tap is not None:
            fix = (
                '[pipeline] schedule = "gpipe", under which a stack of recurrent layers is a '
                "wavefront."
            )
            raise ModelError(
                "a 1f1b pipeline is made of one spmd.nn.LayerStack, but the loss calls an "
                "RNNStack.",
                fix=fix,
            )
        check_inputs("RNNStack", x, lengths, beside)
        drop = 0.0
        if not self.deterministic:
            drop = self.dropout
        residual_from = self.residual_from
        if residual_from is None:
            residual_from = layers.count
        cells = Cells(layers, residual_from, drop)
        # Without initial carries each layer makes its own.
        if initial is not None:
            initial = cells.checked(initial, x)
        key = None
        if drop and self.rngs is not None:
            key = self.rngs()
        along = {"x": jnp.swapaxes(x, 0, 1)}
        if beside is not None:
            along["beside"] = jnp.swapaxes(beside, 0, 1)
        if parallel.stages == 1:
            scan = functools.partial(run_layers, parallel, layers)
            parts = (layers.variables, initial)
            y, carry = cells.run_chunk(
                scan, parts, 0, along, 0, lengths, key, unroll=parallel.unroll
            )
        else:
            if initial is None:
                initial = cells.initial_carries(x)
            y, carry = _wavefront(parallel, cells, layers.variables, initial, along, lengths, key)
        if return_carry:
            return jnp.swapaxes(y, 0, 1), carry
        return jnp.swapaxes(y, 0, 1)

    def cell(self, number: int) -> nnx.Module:
        """Return cell `number` as a module with a copy of its arrays."""
        return unstack_module(self.cells, number)


@dataclasses.dataclass(frozen=True)
class Cells:
    """Runs layers of a stack on a chunk of time, time-major: [time, rows, features]."""

    layers: Layers
    residual_from: int
    dropout: float

    def initial_carries(self, x: jax.Array) -> Tree:
        """Return every cell's default carry, [layers, rows, ...]."""
        return jax.vmap(lambda variables: self.initial_carry(variables, jnp.swapaxes(x, 0, 1)))(
            self.layers.variables
        )

    def initial_carry(self, variables: Sequence[Tree], x: jax.Array) -> Tree:
        """Return the default carry of the cell with these arrays, [rows, ...], for x [time, rows,
        features].
        """
        # The zeros of flax's cells need no key, but flax (0.12) asks for one.
        carry, _ = self.layers.apply(
            lambda cell: cell.initialize_carry(x.shape[1:], rngs=nnx.Rngs(0)), variables
        )
        return carry

    def checked(self, initial: Tree, x: jax.Array) -> Tree:
        """Return `initial`, if it is a carry of these cells.

        Raises:
          ModelError: its structure or shapes differ from the cells'.
        """
        defaults = jax.eval_shape(self.initial_carries, x)

        def described(tree: Tree) -> str:
            arrays = ", ".join(str(list(leaf.shape)) for leaf in jax.tree.leaves(tree)) or "nothing"
            if not isinstance(tree, list | tuple | dict):
                return arrays
            return f"{type_name(tree)} of {arrays}"

        def shapes(tree: Tree) -> list[tuple[int, ...]]:
            return [leaf.shape for leaf in jax.tree.leaves(tree)]

        same_structure = jax.tree.structure(initial) == jax.tree.structure(defaults)
        if not same_structure or shapes(initial) != shapes(defaults):
            raise ModelError(
                f"RNNStack: initial is {described(initial)}; the cells have {described(defaults)}.",
                fix="[layers, rows, ...] each.",
            )
        return initial

    def run_chunk(
        self,
        scan: Callable[..., tuple],
        parts: tuple,
        first: Any,
        along: dict[str, jax.Array],
        start: Any,
        lengths: Any,
        key: Any,
        *,
        unroll: bool,
    ) -> tuple:
        """Run some layers on a chunk; returns the output of the last one, and the carries of all.

        Args:
          scan: `scan_layers`, or a function that gathers parameters, too.
          parts: their variables and carries, leaves [these layers, ...]; carries None: the cells'
            default.
          first: the number of the first of them.
          start: the number of the chunk's first step.
          lengths: a number of steps, or one for each row; None: all steps count.
        """
        steps = start + jnp.arange(along["x"].shape[0])

        def layer(x: jax.Array, part: tuple) -> tuple[jax.Array, Tree]:
            *variables, carry, number = part
            if carry is None:
                carry = self.initial_carry(variables, x)
            if self.dropout:
                # The number of the layer is traced in a scan, so the first one is chosen by
                # `where`.
                dropped = self._dropped(x, jax.random.fold_in(key, number), steps)
                x = jnp.where(number > 0, dropped, x)
            y, carry = self.over_time(
                variables, carry, x, along.get("beside"), steps, lengths, unroll=unroll
            )
            if self.residual_from < self.layers.count:
                y = jnp.where(number >= self.residual_from, x + y, y)
            return y, carry

        variables, carry = parts
        numbers = first + jnp.arange(jax.tree.leaves(variables)[0].shape[0])
        # Unrolled: a loop over layers would copy the residuals of each loop over time once more.
        return scan(layer, along["x"], (*variables, carry, numbers), unroll=True)

    def over_time(
        self,
        variables: Sequence[Tree],
        carry: Tree,
        x: jax.Array,
        beside: Any,
        steps: Any,
        lengths: Any,
        *,
        unroll: bool,
    ) -> tuple:
        """Run one layer on a chunk; returns its output and its carry."""
        parallel = current()
        if parallel.recurrence.implementation == "cudnn":
            if beside is not None:
                x = jnp.concatenate([x, beside], axis=-1)
            result, _ = self.layers.apply(
                lambda cell: run_lstm(parallel, cell, carry, x, lengths), variables
            )
            carry, y = result
            return y, carry

        def step(carry: Tree, inputs: tuple) -> tuple[Tree, jax.Array]:
            x, time, beside = inputs
            cell_input = x
            if beside is not None:
                cell_input = jnp.concatenate([x, beside], axis=-1)
            result, _ = self.layers.apply(lambda cell: cell(carry, cell_input), variables)
            after, y = self.layers.without_change(result)
            _check_carry(carry, after)
            if lengths is None:
                return after, y
            counts = time < lengths

            def where_counted(new: jax.Array, old: jax.Array) -> jax.Array:
                condition = counts
                if counts.ndim:
                    condition = counts.reshape(counts.shape + (1,) * (new.ndim - 1))
                return jnp.where(condition, new, old)

            carry = jax.tree.map(where_counted, after, carry)
            return carry, where_counted(y, jnp.zeros_like(y))

        unrolled_steps = 1
        if unroll:
            unrolled_steps = x.shape[0]
        scan: Callable[..., Any] = scan_time
        if parallel.recurrence.implementation == "as_written":
            scan = lax.scan
        carry, y = scan(step, carry, (x, steps, beside), unroll=unrolled_steps)
        # Flax makes float32 carries; later activations must keep the dtype of x.
        if jnp.issubdtype(x.dtype, jnp.floating) and jnp.issubdtype(y.dtype, jnp.floating):
            y = y.astype(x.dtype)
        return y, carry

    def _dropped(self, x: jax.Array, key: Any, steps: jax.Array) -> jax.Array:
        """Return `x` with features set to zero, the others scaled up; each time step has its own
        key, so chunks do not matter.
        """

        def draw(step: jax.Array) -> jax.Array:
            step_key = jax.random.fold_in(key, step)
            return jax.random.bernoulli(step_key, 1 - self.dropout, x.shape[1:])

        return jnp.where(jax.vmap(draw)(steps), x / (1 - self.dropout), jnp.zeros_like(x))


def _wavefront(
    parallel: ParallelConfig,
    cells: Cells,
    variables: tuple,
    initial: Tree,
    along: dict,
    lengths: Any,
    key: Any,
) -> tuple:
    """Run all layers as `Cells.run_chunk` does, with the layers on stages, chunk after chunk."""
    axis = str(parallel.pipeline.axis)
    stages = parallel.stages
    stage_layers = layers_per_stage(parallel, cells.layers.count)
    time, rows = along["x"].shape[:2]
    chunk = min(parallel.pipeline.time_chunk or best_chunk(time, stages), time)
    count = -(-time // chunk)
    padding = count * chunk - time
    # The padding of a last chunk is masked like steps after a row's end.
    if padding:
        along = jax.tree.map(lambda x: jnp.pad(x, ((0, padding), *[(0, 0)] * (x.ndim - 1))), along)
        if lengths is None:
            lengths = jnp.int32(time)
    row_axes = parallel.auto_row_axes(rows)
    schedule = make_schedule(
        "gpipe", stages=stages, microbatches=count, hop=parallel.pipeline.hop, unit=TIME_CHUNKS
    )
    parallel.schedules[f"RNNStack of {cells.layers.count} layers, chunks of {chunk} steps"] = (
        schedule
    )
    scatter = count % stages == 0 and count * chunk == time
    data = None
    if key is not None:
        data = jax.random.key_data(key)

    def stage(arrays: tuple, along: dict, lengths: Any, data: Any) -> tuple:
        along = jax.tree.map(lambda x: x.reshape(count, chunk, *x.shape[1:]), along)
        variables, carry = arrays
        x = along.pop("x")
        local_key = None
        if key is not None:
            local_key = jax.random.wrap_key_data(data, impl=jax.random.key_impl(key))
            if row_axes:
                part = collectives.worker_index(row_axes)
                parts = collectives.worker_count(row_axes)
                local_key = part_key(local_key, part, parts, rows=x.shape[2])

        def work(
            inputs: tuple, carry: Tree, number: jax.Array, group: jax.Array, x: jax.Array
        ) -> tuple[Tree, jax.Array]:
            del group
            variables, beside = inputs
            chunks = {"x": x} | {name: other[number] for name, other in beside.items()}
            first = collectives.worker_index((axis,)) * stage_layers
            y, carry = cells.run_chunk(
                scan_layers,
                (variables, carry),
                first,
                chunks,
                number * chunk,
                lengths,
                local_key,
                unroll=parallel.unroll,
            )
            return carry, y

        carry, y = run_schedule(parallel, schedule, work, (variables, along), carry, x)
        return from_last_stage(y, axis, scatter=scatter).reshape(-1, *y.shape[2:]), carry

    # The state of a circular pipeline stores groups of layers together; a wavefront has no groups.
    if parallel.in_stage_order:
        order = np.argsort(stage_order(cells.layers.count, stages, parallel.pipeline.groups))
        variables = (jax.tree.map(lambda leaf: leaf[order], variables[0]), *variables[1:])
    row_entry = row_axes or None
    by_layer = PartitionSpec(axis)
    x_spec = PartitionSpec(None, row_entry)
    carry_spec = PartitionSpec(axis, row_entry)
    lengths_spec = PartitionSpec()
    if getattr(lengths, "ndim", 0):
        lengths_spec = PartitionSpec(row_entry)
    y_spec = x_spec
    if scatter:
        y_spec = carry_spec
    in_specs = ((by_layer, carry_spec), x_spec, lengths_spec, PartitionSpec())
    on_stages = parallel.shard_map(
        (axis, *row_axes), stage, in_specs=in_specs, out_specs=(y_spec, carry_spec)
    )
    y, carry = on_stages((variables, initial), along, lengths, data)
    return y[:time], carry


def _check_carry(before: Tree, after: Tree) -> None:
    """Check that a cell returns a carry like the one that it takes.

    Raises:
      ModelError: it does not.
    """
    taken = jax.tree.map(describe, before)
    returned = jax.tree.map(describe, after)
    if taken != returned:
        raise ModelError(
            f"a recurrent cell takes the carry {shown(taken)} and returns {shown(returned)}; what "
            "it returns is what it takes in the next time step.",
            fix="a cell that keeps structure, shapes and dtypes: carry.astype(...) at its end.",
        )


def check_inputs(layer: str, x: Any, lengths: Any, beside: Any) -> None:
    """Check that shapes match.

    Raises:
      ModelError: they do not.
    """

    def shown(value: Any) -> str:
        if hasattr(value, "dtype"):
            return describe(value)
        return type_name(value)

    if not hasattr(x, "ndim") or x.ndim < 3:
        raise ModelError(f"{layer}: x is {shown(x)}.", fix="[rows, time, features].")
    if lengths is not None and (
        getattr(lengths, "shape", ()) != x.shape[:1]
        or not jnp.issubdtype(lengths.dtype, jnp.integer)
    ):
        raise ModelError(
            f"{layer}: lengths is {shown(lengths)} for {x.shape[0]} rows.",
            fix=f"an array, int32[{x.shape[0]}].",
        )
    if beside is not None and getattr(beside, "shape", ())[:2] != x.shape[:2]:
        raise ModelError(
            f"{layer}: beside is {shown(beside)} and x {describe(x)}.",
            fix="an array of the same rows and time.",
        )
