"""1F1B: every stage goes back with a microbatch as soon as it can, so that it keeps the inputs of as many as there are stages, and no more.

Reverse-mode differentiation of a whole loss runs forward to its end before it goes back. So the backward pass is written here by hand, in
the one loop over ticks that also runs forward. A loss is taken apart at its stack without being rewritten: it is traced three times, with
a `Tap` in the stack's place. *enter* is the loss up to the stack's input, *pass* the stack's layers that this stage has, *leave* the loss
from the stack's output on; what a trace computes and does not return, XLA takes out. An embedding that is tied to the head, or a
connection around the stack, is in both *enter* and *leave*, and its gradients add up.

A stage keeps its input and computes its layers again on the way back (full rematerialisation of a stage).

Source: Narayanan et al., PipeDream-Flush, arXiv:2006.09503; the schedule is `spmd.nn.schedule`'s.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from spmd.errors import ModelError
from spmd.nn.layer_stack import Parts
from spmd.nn.parallel_context import Cutting, rows_over
from spmd.nn.schedule import Schedule, make_schedule
from spmd.nn.stacking import Layers, scan_layers
from spmd.tree import Tree
from spmd.wire import collectives

IDLE, FORWARD, BACKWARD = range(3)


@dataclasses.dataclass
class Tap:
    """What stands in a stack's place while a loss is traced: it takes out what comes in, and puts in what is to come out.

    Attributes:
      x: given to the layers of this stage in place of what comes in; None: they are not called.
      y: what the stack returns; None: zeros, for a trace of which only `seen` is wanted.
      seen: what came in, or what this stage's layers returned for `x`.
      own: layers of a stage, where all are there and this stage's have to be picked; None: only this stage's are there.
    """

    x: Tree = None
    y: Tree = None
    seen: Tree = None
    own: Callable[[int], int] | None = None
    calls: int = 0

    def __call__(self, cutting: Cutting, layers: Layers, call: Callable[..., tuple], x: Tree, rows: tuple) -> Tree:
        """In a stack's place."""
        self.calls += 1
        if self.calls > 1:
            raise ModelError(
                "the loss calls stacks of layers more than once, and a 1f1b pipeline is made of one.\n"
                '    fix: one LayerStack, called once; or [pipeline] schedule = "gpipe", under which there may be several.'
            )
        if self.y is not None:
            return self.y
        self.seen = x
        if self.x is not None:
            count = layers.count if self.own is None else self.own(layers.count)
            first = collectives.worker_index((str(cutting.pipeline.axis),)) * count
            pick = lambda leaf: leaf if leaf.shape[0] == count else lax.dynamic_slice_in_dim(leaf, first, count)
            variables = jax.tree.map(pick, layers.variables)  # random streams are whole on every stage
            one = lambda x, variables: layers.unchanged(*call(x, rows, variables, lambda key: key))
            self.seen, _ = scan_layers(one, self.x, variables, unroll=cutting.unroll)
        return jax.tree.map(jnp.zeros_like, x)


Loss = Callable[[Tree, Tree, Any, Cutting, Tree], tuple[jax.Array, Tree]]  # (params, rows, number, cutting, held) -> (sum, aux)


@dataclasses.dataclass(frozen=True)
class Apart:
    """A loss taken apart at its stack; functions of (params, ...) for one microbatch."""

    cutting: Cutting
    loss: Loss
    held: Tree
    own: Callable[[int], int] | None

    def _traced(self, tap: Tap, params: Tree, rows: Tree, number: Any) -> tuple[jax.Array, Tree]:
        found = self.loss(params, rows, number, dataclasses.replace(self.cutting, tap=tap), self.held)
        if not tap.calls:
            raise ModelError(
                "the loss calls no spmd.nn.LayerStack, of which a 1f1b pipeline is made.", fix="one, or another [pipeline] schedule."
            )
        return found

    def enter(self, params: Tree, rows: Tree, number: Any) -> Tree:
        """What comes into the stack."""
        tap = Tap()
        self._traced(tap, params, rows, number)
        return tap.seen

    def through(self, params: Tree, x: Tree, rows: Tree, number: Any) -> Tree:
        """What this stage's layers make of `x`."""
        tap = Tap(x=x, own=self.own)
        self._traced(tap, params, rows, number)
        return tap.seen

    def leave(self, params: Tree, y: Tree, rows: Tree, number: Any) -> tuple[jax.Array, Tree]:
        """The loss of what comes out of the stack, and what it says beside."""
        return self._traced(Tap(y=y), params, rows, number)


def back_at_once(
    cutting: Cutting, loss: Loss, params: Tree, rows: Tree, held: Tree, at_stage: Tree, parts: Parts, *, own: Callable[[int], int] | None
) -> tuple[Tree, Tree]:
    """Gradients of a loss summed over all rows, and the sum of what it says beside.

    Args:
      loss: `(params, rows, number, cutting, held) -> (value, aux)` of one microbatch, summed over its rows; traced under `cutting`.
      rows: leaves [rows, ...], cut into microbatches as `parts` says.
      held: what else the loss needs, the same on all stages; it can see no other array from outside.
      at_stage: for every parameter whether dim 0 is cut over the stages.
      own: from a stack's layers to those of a stage, where parameters are whole on all stages.

    Returns:
      Gradients as `params`, and the aux.
    """
    axis, free = str(cutting.pipeline.axis), parts.free
    schedule = make_schedule("1f1b", stages=cutting.stages, microbatches=parts.count)  # as its stack has noted it in `cutting.schedules`

    def region(params: Tree, rows: Tree, held: Tree) -> tuple[Tree, Tree]:
        apart = Apart(cutting, loss, held, own)
        first = collectives.worker_index(free) * parts.count
        grads, aux = _run(schedule, apart, params, parts.apart(rows), first=first)
        grads = jax.tree.map(lambda g, stage: collectives.all_reduce(g, free if stage else (axis, *free)), grads, at_stage)
        return grads, jax.tree.map(lambda a: collectives.all_reduce(a, (axis, *free)), aux)

    specs = jax.tree.map(lambda stage: PartitionSpec(axis) if stage else PartitionSpec(), at_stage)
    run = cutting.over((axis, *free), region, in_specs=(specs, rows_over(free), PartitionSpec()), out_specs=(specs, PartitionSpec()))
    return run(params, rows, held)


def _run(schedule: Schedule, apart: Apart, params: Tree, parts: Tree, *, first: jax.Array) -> tuple[Tree, Tree]:
    """This stage's ticks: gradients of what it has done, and the aux of the last stage."""
    cutting, axis = apart.cutting, str(apart.cutting.pipeline.axis)
    choose = functools.partial(one_of, branchless=cutting.branchless)
    stage, last, slots = collectives.worker_index((axis,)), schedule.stages - 1, min(schedule.stages, schedule.microbatches)
    table = Table.of(schedule)
    of = lambda number: (jax.tree.map(lambda x: x[number], parts), first + number)
    begin = jax.eval_shape(lambda p: apart.enter(p, *of(0)), params)
    nothing = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), begin)
    _, aux = jax.eval_shape(lambda p, y: apart.leave(p, y, *of(0)), params, nothing)

    def forward(carry: tuple, number: jax.Array) -> tuple:
        grads, aux, kept, _ = carry
        here = jax.tree.map(lambda buffer: buffer[number % slots], kept)
        x = choose(stage != 0, [lambda: apart.enter(params, *of(number)), lambda: here])
        kept = jax.tree.map(lambda buffer, x: buffer.at[number % slots].set(x), kept, x)
        # the last stage runs its layers on its way back
        y = choose(stage == last, [lambda: apart.through(params, x, *of(number)), lambda: nothing])
        return (grads, aux, kept, nothing), (y, nothing)

    def backward(carry: tuple, number: jax.Array) -> tuple:
        grads, aux, kept, arrived = carry
        x = jax.tree.map(lambda buffer: buffer[number % slots], kept)

        def from_loss() -> tuple:
            end = lambda p, x: apart.leave(p, apart.through(p, x, *of(number)), *of(number))
            value, pull, more = jax.vjp(end, params, x, has_aux=True)
            found, dx = pull(jnp.ones_like(value))
            return found, filled(dx, x), more

        def from_next() -> tuple:
            _, pull = jax.vjp(lambda p, x: apart.through(p, x, *of(number)), params, x)
            found, dx = pull(jax.tree.map(as_cotangent, arrived))
            return found, filled(dx, x), jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), aux)

        found, dx, more = choose(stage == last, [from_next, from_loss])
        grads, aux = jax.tree.map(jnp.add, grads, found), jax.tree.map(jnp.add, aux, more)

        def into_input() -> Tree:
            _, pull = jax.vjp(lambda p: apart.enter(p, *of(number)), params)
            return jax.tree.map(jnp.add, grads, pull(jax.tree.map(as_cotangent, dx))[0])

        return (choose(stage == 0, [lambda: grads, into_input]), aux, kept, arrived), (nothing, dx)

    def tick(carry: tuple, here: jax.Array) -> tuple[tuple, None]:
        kind, number, coming = here
        work = [lambda: (carry, (nothing, nothing)), lambda: forward(carry, number), lambda: backward(carry, number)]
        (grads, aux, kept, _), (y, dx) = choose(kind, work)
        y = jax.tree.map(lambda y: collectives.shift(y, axis), y)
        put = lambda buffer, y: jnp.where(coming >= 0, buffer.at[coming % slots].set(y), buffer)
        arrived = jax.tree.map(lambda dx: collectives.shift(dx, axis, -1), dx)
        return (grads, aux, jax.tree.map(put, kept, y), arrived), None

    zeros = functools.partial(jax.tree.map, lambda s: jnp.zeros(s.shape, s.dtype))
    kept = jax.tree.map(lambda s: jnp.zeros((slots, *s.shape), s.dtype), begin)
    columns = jnp.asarray(table.columns)[:, stage]
    (grads, aux, _, _), _ = lax.scan(
        tick, (zeros(params), zeros(aux), kept, nothing), columns, unroll=len(columns) if cutting.unroll else 1
    )
    return grads, aux


def filled(gradient: Tree, x: Tree) -> Tree:
    """A gradient that can travel: whole numbers have none, for which zeros stand."""
    return jax.tree.map(lambda g, x: jnp.zeros_like(x) if g.dtype == jax.dtypes.float0 else g, gradient, x)


def as_cotangent(gradient: jax.Array) -> Any:
    """The opposite, of one array."""
    return gradient if jnp.issubdtype(gradient.dtype, jnp.inexact) else np.zeros(gradient.shape, jax.dtypes.float0)


def one_of(which: jax.Array, work: list[Callable[[], Tree]], *, branchless: bool) -> Tree:
    """What `work[which]` returns: it alone is done, or all of it, and the rest is thrown away."""
    if not branchless:
        return lax.switch(jnp.int32(which), work)
    found, *others = [one() for one in work]
    for number, other in enumerate(others, 1):
        found = jax.tree.map(functools.partial(jnp.where, which == number), other, found)
    return found


@dataclasses.dataclass(frozen=True)
class Table:
    """A schedule as numbers: int32[ticks, stages, 3], what a stage does, with which microbatch, and which one's input comes in after it."""

    columns: np.ndarray

    @staticmethod
    @functools.cache
    def of(schedule: Schedule) -> "Table":
        """Of a schedule in which gradients are used in the tick after they were made, and no input comes into a slot that is in use."""
        columns = np.full((schedule.ticks, schedule.stages, 3), -1, np.int32)
        slots = min(schedule.stages, schedule.microbatches)
        waiting: list[set[int]] = [set() for _ in range(schedule.stages)]  # inputs that a stage has and is not done with
        for at, tick in enumerate(schedule.table):
            for stage, work in enumerate(tick):
                kind = IDLE if work is None else BACKWARD if work.backward else FORWARD
                number = 0 if work is None else work.microbatch
                columns[at, stage, :2] = kind, number
                if kind == FORWARD and stage == 0:
                    waiting[0].add(number)
                if kind == FORWARD and stage < schedule.stages - 1:
                    columns[at, stage + 1, 2] = number
                if kind == BACKWARD and stage > 0 and schedule.table[at + 1][stage - 1] != work:
                    raise RuntimeError("a gradient that has to wait")
            for stage, work in enumerate(tick):
                if work is not None and work.backward:
                    waiting[stage].remove(work.microbatch)
                if columns[at, stage, 2] >= 0:
                    waiting[stage].add(int(columns[at, stage, 2]))
                if len({number % slots for number in waiting[stage]}) != len(waiting[stage]):
                    raise RuntimeError("more inputs than a stage has room for")
        return Table(columns)
