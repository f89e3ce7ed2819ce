"""A deep recurrent network: a scan over layers and time on one device, a wavefront along a mesh axis where the layout says so."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

from spmd.errors import ModelError, type_name
from spmd.nn.layer_order import stage_order
from spmd.nn.layer_stack import layers_per_stage
from spmd.nn.parallel_context import ParallelConfig, current
from spmd.nn.pipeline_executor import from_last_stage, run_schedule
from spmd.nn.schedule import best_chunk, make_schedule
from spmd.nn.stacking import Layers, Repeated, scan_layers, stack_modules, unstack_module
from spmd.rng import part_key
from spmd.tree import Tree, describe
from spmd.wire import collectives


class RNNStack(nnx.Module):
    """Recurrent layers on top of each other: `carry, y = cell(carry, x)` for every step of time, and what one returns the next one takes.

    On one device it is a `lax.scan` over time for each layer. Under a layout with `[pipeline]` each device along its axis has
    `layers / stages` of them and works on one chunk of time while the device before works on the next: a wavefront of T / c + p - 1 ticks
    for T steps in chunks of c on p devices (GNMT, Wu et al., arXiv:1609.08144). What is computed is the same. A last chunk that is not
    full is filled up and masked.

    Parameters are those of one cell with dim 0 in front, [layers, ...]: `stack/cells/dense_h/kernel`; see `LayerStack`.

    Args:
      cells: flax nnx cells (LSTM, GRU, any `nnx.RNNCellBase`), equal in kind, settings and shapes: each takes as many features as it
        returns, and those of `beside`; or `spmd.nn.repeat`.
      residual_from: the first layer that adds what it takes to what it returns; None: none does.
      dropout: the share of features set to zero between layers, anew in every step of time; none before the first layer and after the last.
      rngs: random streams for `dropout`.

    Raises:
      ModelError: cells that differ, with every difference; dropout without `rngs`.

    Example:
      >>> import jax.numpy as jnp
      >>> stack = RNNStack([nnx.GRUCell(4, 4, rngs=nnx.Rngs(seed)) for seed in range(3)], residual_from=1)
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
            raise ModelError(f"RNNStack: its layers are {type(self.cells).__name__}, no cells.", fix="nnx.LSTMCell, or LayerStack.")
        self.residual_from, self.dropout, self.deterministic = residual_from, dropout, False
        if residual_from is not None and (isinstance(residual_from, bool) or not isinstance(residual_from, int) or residual_from < 0):
            raise ModelError(f"RNNStack: residual_from={residual_from!r}.", fix="a layer's number, from 0, or None.")
        if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0.0 <= dropout < 1.0:
            raise ModelError(f"RNNStack: dropout={dropout!r}.", fix="a share from 0 to 1, without 1.")
        if dropout and not isinstance(rngs, nnx.Rngs):
            raise ModelError(f"RNNStack: dropout={dropout} draws random numbers, and rngs is {type_name(rngs)}.", fix="rngs=nnx.Rngs(0).")
        self.rngs = rngs.dropout.fork() if dropout and rngs is not None else None

    def __call__(self, x: jax.Array, *, initial: Tree = None, lengths: Any = None, beside: Any = None, return_carry: bool = False) -> Any:
        """All layers over all time.

        Args:
          x: [rows, time, features].
          initial: every cell's carry to begin with, leaves [layers, rows, ...]; None: what the cell begins with.
          lengths: int32[rows], how many steps of each row count; after them a carry stays as it is, and zeros are returned.
          beside: [rows, time, more features], which every layer gets behind what the layer below returns (an attention's context).
          return_carry: return the carries after the last step, too.

        Returns:
          [rows, time, features], or that and the carries, leaves [layers, rows, ...].
        """
        layers, parallel = Layers(self.cells), current()
        parallel.used.update(("pipeline", "time_chunk"))
        if parallel.tap is not None:
            raise ModelError(
                "a 1f1b pipeline is made of one spmd.nn.LayerStack, and the loss calls an RNNStack.\n"
                '    fix: [pipeline] schedule = "gpipe", under which a stack of recurrent layers is a wavefront.'
            )
        check_inputs("RNNStack", x, lengths, beside)
        drop = self.dropout if not self.deterministic else 0.0
        cells = Cells(layers, layers.count if self.residual_from is None else self.residual_from, drop)
        initial = cells.opening(x) if initial is None else cells.checked(initial, x)
        key = self.rngs() if drop and self.rngs is not None else None
        along = {"x": jnp.swapaxes(x, 0, 1)} | ({} if beside is None else {"beside": jnp.swapaxes(beside, 0, 1)})
        run = _on_one if parallel.stages == 1 else _wavefront
        y, carry = run(parallel, cells, layers.variables, initial, along, lengths, key)
        return (jnp.swapaxes(y, 0, 1), carry) if return_carry else jnp.swapaxes(y, 0, 1)

    def cell(self, number: int) -> nnx.Module:
        """Cell `number` by itself, with a copy of its arrays."""
        return unstack_module(self.cells, number)


@dataclasses.dataclass(frozen=True)
class Cells:
    """What a stack's layers do with a chunk of time, time-major: [time, rows, features]."""

    layers: Layers
    residual_from: int
    dropout: float

    def opening(self, x: jax.Array) -> Tree:
        """What every cell begins with, [layers, rows, ...]."""
        carry = self.opening_of(jax.tree.map(lambda leaf: leaf[0], self.layers.variables), jnp.swapaxes(x, 0, 1))
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (self.layers.count, *leaf.shape)), carry)

    def opening_of(self, variables: tuple, x: jax.Array) -> Tree:
        """What the cell with these arrays begins with, [rows, ...], for x [time, rows, features]."""
        carry, _ = self.layers.call(lambda cell: cell.initialize_carry(x.shape[1:], rngs=nnx.Rngs(0)), variables)
        return carry  # zeros need no key, flax wants one

    def checked(self, initial: Tree, x: jax.Array) -> Tree:
        """A carry that was given, if it is one.

        Raises:
          ModelError: another structure or other shapes than the cells'.
        """
        wanted = jax.eval_shape(self.opening, x)
        arrays = lambda tree: ", ".join(f"[{', '.join(map(str, leaf.shape))}]" for leaf in jax.tree.leaves(tree)) or "nothing"
        shown = lambda tree: f"{type_name(tree)} of {arrays(tree)}" if isinstance(tree, list | tuple | dict) else arrays(tree)
        fits = jax.tree.structure(initial) == jax.tree.structure(wanted)
        if not fits or any(a.shape != b.shape for a, b in zip(jax.tree.leaves(initial), jax.tree.leaves(wanted), strict=True)):
            raise ModelError(f"RNNStack: initial is {shown(initial)}; the cells have {shown(wanted)}.", fix="[layers, rows, ...] each.")
        return initial

    def run(self, parts: tuple, first: Any, along: dict[str, jax.Array], start: Any, lengths: Any, key: Any, *, unroll: bool) -> tuple:
        """Some layers on a chunk: what the last one returns, and their carries after it.

        Args:
          parts: their variables and carries, leaves [these layers, ...].
          first: the number of the first of them.
          start: the number of the chunk's first step.
          lengths: a number of steps, or one for each row; None: all steps count.
        """
        steps = start + jnp.arange(along["x"].shape[0])

        def layer(x: jax.Array, part: tuple) -> tuple[jax.Array, Tree]:
            variables, carry, number = part
            if self.dropout:
                x = jnp.where(number > 0, self._dropped(x, jax.random.fold_in(key, number), steps), x)
            y, carry = self.over_time(variables, carry, x, along.get("beside"), steps, lengths, unroll=unroll)
            return jnp.where(number >= self.residual_from, x + y, y) if self.residual_from < self.layers.count else y, carry

        variables, carry = parts
        numbers = first + jnp.arange(jax.tree.leaves(carry)[0].shape[0])
        # unrolled: what a loop over time keeps for its way back would be copied once more, into what a loop over layers keeps
        return scan_layers(layer, along["x"], (variables, carry, numbers), unroll=True)

    def over_time(self, variables: tuple, carry: Tree, x: jax.Array, beside: Any, steps: Any, lengths: Any, *, unroll: bool) -> tuple:
        """One layer on a chunk: what it returns, and its carry after it."""

        def step(carry: Tree, inputs: tuple) -> tuple[Tree, jax.Array]:
            x, time, more = inputs
            given = x if more is None else jnp.concatenate([x, more], axis=-1)
            result, _ = self.layers.call(lambda cell: cell(carry, given), variables)
            after, y = self.layers.without_change(result)
            if lengths is None:
                return after, y
            here = time < lengths
            keep = lambda new, old: jnp.where(here.reshape(here.shape + (1,) * (new.ndim - 1)) if here.ndim else here, new, old)
            return jax.tree.map(keep, after, carry), keep(y, jnp.zeros_like(y))

        carry, y = lax.scan(step, carry, (x, steps, beside), unroll=x.shape[0] if unroll else 1)
        if jnp.issubdtype(x.dtype, jnp.floating) and jnp.issubdtype(y.dtype, jnp.floating):
            y = y.astype(x.dtype)  # carries may be float32, as flax makes them; they must not make all that comes after float32
        return y, carry

    def _dropped(self, x: jax.Array, key: Any, steps: jax.Array) -> jax.Array:
        """Features set to zero, the rest scaled up; each step of time has a key of its own, so chunks do not matter."""
        draw = lambda step: jax.random.bernoulli(jax.random.fold_in(key, step), 1 - self.dropout, x.shape[1:])
        return jnp.where(jax.vmap(draw)(steps), x / (1 - self.dropout), jnp.zeros_like(x))


def _on_one(parallel: ParallelConfig, cells: Cells, variables: tuple, initial: Tree, along: dict, lengths: Any, key: Any) -> tuple:
    return cells.run((variables, initial), 0, along, 0, lengths, key, unroll=parallel.unroll)


def _wavefront(parallel: ParallelConfig, cells: Cells, variables: tuple, initial: Tree, along: dict, lengths: Any, key: Any) -> tuple:
    """The same, layer by layer on the stages, chunk after chunk."""
    axis, stages = str(parallel.pipeline.axis), parallel.stages
    own, (time, rows) = layers_per_stage(parallel, cells.layers.count), along["x"].shape[:2]
    chunk = min(parallel.pipeline.time_chunk or best_chunk(time, stages), time)
    count = -(-time // chunk)
    if count * chunk != time:  # a last chunk that is not full: what fills it up is masked, as steps after a row's end are
        along = jax.tree.map(lambda x: jnp.pad(x, ((0, count * chunk - time), *[(0, 0)] * (x.ndim - 1))), along)
        lengths = jnp.int32(time) if lengths is None else lengths
    free = parallel.auto_row_axes(rows)
    schedule = make_schedule("gpipe", stages=stages, microbatches=count, hop=parallel.pipeline.hop)
    parallel.schedules[f"RNNStack of {cells.layers.count} layers, chunks of {chunk} steps"] = schedule
    scatter = count % stages == 0 and count * chunk == time
    data = jax.random.key_data(key) if key is not None else None

    def stage(parts: tuple, along: dict, lengths: Any, data: Any) -> tuple:
        along = jax.tree.map(lambda x: x.reshape(count, chunk, *x.shape[1:]), along)
        (variables, carry), x = parts, along.pop("x")
        own_key = None
        if key is not None:
            own_key = jax.random.wrap_key_data(data, impl=jax.random.key_impl(key))
            if free:
                own_key = part_key(own_key, collectives.worker_index(free), collectives.worker_count(free), rows=x.shape[2])

        def work(given: tuple, carry: Tree, number: jax.Array, group: jax.Array, x: jax.Array) -> tuple[Tree, jax.Array]:
            del group
            variables, beside = given
            here = {"x": x} | {name: other[number] for name, other in beside.items()}
            first = collectives.worker_index((axis,)) * own
            y, carry = cells.run((variables, carry), first, here, number * chunk, lengths, own_key, unroll=parallel.unroll)
            return carry, y

        carry, y = run_schedule(parallel, schedule, work, (variables, along), carry, x)
        return from_last_stage(y, axis, scatter=scatter).reshape(-1, *y.shape[2:]), carry

    if parallel.in_stage_order:  # a circular pipeline's state has groups of layers side by side, of which a wavefront has none
        order = np.argsort(stage_order(cells.layers.count, stages, parallel.pipeline.groups))
        variables = (jax.tree.map(lambda leaf: leaf[order], variables[0]), *variables[1:])
    layers, times = PartitionSpec(axis), PartitionSpec(None, free or None)
    of_rows = PartitionSpec(free or None) if getattr(lengths, "ndim", 0) else PartitionSpec()
    out = PartitionSpec(axis if scatter else None, free or None)
    each = PartitionSpec(axis, free or None)
    run = parallel.shard_map((axis, *free), stage, in_specs=((layers, each), times, of_rows, PartitionSpec()), out_specs=(out, each))
    y, carry = run((variables, initial), along, lengths, data)
    return y[:time], carry


def check_inputs(what: str, x: Any, lengths: Any, beside: Any) -> None:
    """Shapes that go together.

    Raises:
      ModelError: they do not.
    """
    if not hasattr(x, "ndim") or x.ndim < 3:
        raise ModelError(f"{what}: x is {describe(x) if hasattr(x, 'shape') else type_name(x)}.", fix="[rows, time, features].")
    if lengths is not None and (getattr(lengths, "shape", ()) != x.shape[:1] or not jnp.issubdtype(lengths.dtype, jnp.integer)):
        given = describe(lengths) if hasattr(lengths, "dtype") else type_name(lengths)
        raise ModelError(f"{what}: lengths is {given} for {x.shape[0]} rows.", fix=f"an array, int32[{x.shape[0]}].")
    if beside is not None and getattr(beside, "shape", ())[:2] != x.shape[:2]:
        given = describe(beside) if hasattr(beside, "dtype") else type_name(beside)
        raise ModelError(f"{what}: beside is {given} and x {describe(x)}.", fix="an array of the same rows and time.")
