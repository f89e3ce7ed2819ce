"""1F1B: every stage runs a microbatch's backward pass as early as it can, so it stores the inputs
of at most `stages` microbatches.

Reverse-mode differentiation of a loss finishes the forward pass before it begins the backward pass.
So the backward pass is written here explicitly, in the one loop over ticks that also runs forward.
A loss is split at its stack without being rewritten: it is traced three times, with a `Tap` in
place of the stack. *before* is the loss up to the stack's input, *stage* is this stage's layers,
*after* is the loss from the stack's output on; XLA removes what a trace computes and does not
return. An embedding that is tied to the head, or a connection around the stack, is in both *before*
and *after*, and its gradients add up.

A stage stores its input and recomputes its layers in the backward pass (full rematerialisation of a
stage).

Source: Narayanan et al., PipeDream-Flush, arXiv:2006.09503; the schedule is `spmd.nn.schedule`'s.

*Unmeasured*: no GPU has timed the schedule. The few inputs that are stored can be seen in the
compiled program.
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

from spmd.base.tree import Tree
from spmd.errors import ModelError
from spmd.nn.layer_stack import Microbatches
from spmd.nn.parallel_context import ParallelConfig, row_spec
from spmd.nn.schedule import Schedule, make_schedule
from spmd.nn.stacking import Layers, scan_layers
from spmd.wire import collectives

IDLE, FORWARD, BACKWARD = range(3)


# The loss is traced with a tap in place of the stack, so it need not be rewritten: that gives the
# functions up to the stack's input, of the layers, and from the stack's output on.
@dataclasses.dataclass
class Tap:
    """Called in place of a stack while a loss is traced: it records the stack's input and supplies
    its output.

    Attributes:
      x: the input of this stage's layers, in place of the stack's; None: they are not called.
      y: what the stack returns; None: zeros, for a trace of which only `recorded` is used.
      recorded: the stack's input, or what this stage's layers returned for `x`.
      layers_per_stage: from a stack's layers to those of a stage, where every stage has all of
        them; None: it has its own only.
    """

    x: Tree = None
    y: Tree = None
    recorded: Tree = None
    layers_per_stage: Callable[[int], int] | None = None
    calls: int = 0

    def __call__(
        self,
        parallel: ParallelConfig,
        layers: Layers,
        call: Callable[..., tuple],
        x: Tree,
        rows: tuple,
    ) -> Tree:
        """Return the stack's output, in place of the stack."""
        self.calls += 1
        if self.calls > 1:
            fix = (
                'one LayerStack, called once; or [pipeline] schedule = "gpipe", under which there '
                "may be several."
            )
            raise ModelError(
                "the loss calls stacks of layers more than once, and a 1f1b pipeline is made of "
                "one.",
                fix=fix,
            )
        if self.y is not None:
            return self.y
        self.recorded = x
        if self.x is not None:
            count = layers.count
            if self.layers_per_stage is not None:
                count = self.layers_per_stage(count)
            first = collectives.worker_index((str(parallel.pipeline.axis),)) * count

            def pick(leaf: jax.Array) -> jax.Array:
                if leaf.shape[0] == count:
                    return leaf
                return lax.dynamic_slice_in_dim(leaf, first, count)

            def run_layer(x: Tree, variables: tuple) -> tuple[Tree, Tree]:
                return layers.unchanged(*call(x, rows, variables, lambda key: key))

            # Random streams are replicated over the stages.
            variables = jax.tree.map(pick, layers.variables)
            self.recorded, _ = scan_layers(run_layer, self.x, variables, unroll=parallel.unroll)
        return jax.tree.map(jnp.zeros_like, x)


# (params, rows, number, parallel, consts) -> (sum, aux)
Loss = Callable[[Tree, Tree, Any, ParallelConfig, Tree], tuple[jax.Array, Tree]]


@dataclasses.dataclass(frozen=True)
class SplitLoss:
    """A loss split at its stack, as functions of (params, ...) for one microbatch."""

    parallel: ParallelConfig
    loss: Loss
    consts: Tree
    layers_per_stage: Callable[[int], int] | None

    def _traced(self, tap: Tap, params: Tree, rows: Tree, number: Any) -> tuple[jax.Array, Tree]:
        parallel = dataclasses.replace(self.parallel, tap=tap)
        value_and_aux = self.loss(params, rows, number, parallel, self.consts)
        if not tap.calls:
            why = "the loss calls no spmd.nn.LayerStack, of which a 1f1b pipeline is made."
            raise ModelError(why, fix="one, or another [pipeline] schedule.")
        return value_and_aux

    def before(self, params: Tree, rows: Tree, number: Any) -> Tree:
        """Return the stack's input."""
        tap = Tap()
        self._traced(tap, params, rows, number)
        return tap.recorded

    def stage(self, params: Tree, x: Tree, rows: Tree, number: Any) -> Tree:
        """Return the output of this stage's layers for `x`."""
        tap = Tap(x=x, layers_per_stage=self.layers_per_stage)
        self._traced(tap, params, rows, number)
        return tap.recorded

    def after(self, params: Tree, y: Tree, rows: Tree, number: Any) -> tuple[jax.Array, Tree]:
        """Return the loss of the stack's output `y`, and its aux."""
        return self._traced(Tap(y=y), params, rows, number)


def run_1f1b(
    parallel: ParallelConfig,
    loss: Loss,
    params: Tree,
    rows: Tree,
    consts: Tree,
    stage_sharded: Tree,
    consts_sharded: Tree,
    microbatches: Microbatches,
    *,
    layers_per_stage: Callable[[int], int] | None,
) -> tuple[Tree, Tree]:
    """Return gradients of a loss summed over all rows, and the sum of its aux.

    Args:
      loss: `(params, rows, number, parallel, consts) -> (value, aux)` of one microbatch, summed
        over its rows; traced under `parallel`.
      rows: leaves [rows, ...], split into microbatches as `microbatches` says.
      consts: the other arrays that the loss needs, which have no gradients; it must close over no
        others.
      stage_sharded: for every parameter whether dim 0 is sharded over the stages; `consts_sharded`,
        a tree prefix: for every other array.
      layers_per_stage: from a stack's layers to those of a stage, where parameters are replicated
        over the stages.

    Returns:
      Gradients as `params`, and the aux.
    """
    axis = str(parallel.pipeline.axis)
    row_axes = microbatches.row_axes
    # The plan finds the same schedule in `parallel.schedules`.
    schedule = make_schedule("1f1b", stages=parallel.stages, microbatches=microbatches.count)

    def region(params: Tree, rows: Tree, consts: Tree) -> tuple[Tree, Tree]:
        split_loss = SplitLoss(parallel, loss, consts, layers_per_stage)
        first = collectives.worker_index(row_axes) * microbatches.count
        rows_of_microbatches = microbatches.split(rows)
        grads, aux = _run_ticks(schedule, split_loss, params, rows_of_microbatches, first=first)

        def reduce(grad: jax.Array, is_sharded: bool) -> jax.Array:
            if is_sharded:
                return collectives.all_reduce(grad, row_axes)
            return collectives.all_reduce(grad, (axis, *row_axes))

        grads = jax.tree.map(reduce, grads, stage_sharded)
        return grads, jax.tree.map(lambda a: collectives.all_reduce(a, (axis, *row_axes)), aux)

    def spec(is_sharded: bool) -> PartitionSpec:
        if is_sharded:
            return PartitionSpec(axis)
        return PartitionSpec()

    specs, consts_specs = jax.tree.map(spec, (stage_sharded, consts_sharded))
    in_specs = (specs, row_spec(row_axes), consts_specs)
    on_stages = parallel.shard_map(
        (axis, *row_axes), region, in_specs=in_specs, out_specs=(specs, PartitionSpec())
    )
    return on_stages(params, rows, consts)


def _run_ticks(
    schedule: Schedule, loss: SplitLoss, params: Tree, microbatches: Tree, *, first: jax.Array
) -> tuple[Tree, Tree]:
    """Run this stage's ticks; returns the gradients it computed, and the aux of the last stage."""
    parallel = loss.parallel
    axis = str(loss.parallel.pipeline.axis)
    choose = functools.partial(one_of, branchless=parallel.branchless)
    stage = collectives.worker_index((axis,))
    last = schedule.stages - 1
    # 1F1B has as many microbatches between their passes as there are stages, and no more.
    slots = min(schedule.stages, schedule.microbatches)

    def pick(number: Any) -> tuple[Tree, jax.Array]:
        return jax.tree.map(lambda x: x[number], microbatches), first + number

    def zeros(tree: Tree) -> Tree:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), tree)

    input_shapes = jax.eval_shape(lambda params: loss.before(params, *pick(0)), params)
    nothing = zeros(input_shapes)
    _, aux = jax.eval_shape(lambda params, y: loss.after(params, y, *pick(0)), params, nothing)

    def forward(carry: tuple, number: jax.Array) -> tuple:
        grads, aux, inputs, _ = carry
        arrived = jax.tree.map(lambda buffer: buffer[number % slots], inputs)
        x = choose(stage != 0, [lambda: loss.before(params, *pick(number)), lambda: arrived])
        inputs = jax.tree.map(lambda buffer, x: buffer.at[number % slots].set(x), inputs, x)
        # The last stage runs its layers in the backward pass, with the loss.
        y = choose(stage == last, [lambda: loss.stage(params, x, *pick(number)), lambda: nothing])
        return (grads, aux, inputs, nothing), (y, nothing)

    def backward(carry: tuple, number: jax.Array) -> tuple:
        grads, aux, inputs, dy = carry
        x = jax.tree.map(lambda buffer: buffer[number % slots], inputs)

        def from_loss() -> tuple:
            def stage_and_loss(params: Tree, x: Tree) -> tuple[jax.Array, Tree]:
                return loss.after(params, loss.stage(params, x, *pick(number)), *pick(number))

            value, vjp, stage_aux = jax.vjp(stage_and_loss, params, x, has_aux=True)
            # The loss is a sum over rows; the step divides it once, by the count of all workers.
            stage_grads, dx = vjp(jnp.ones_like(value))
            return stage_grads, filled(dx, x), stage_aux

        def from_next_stage() -> tuple:
            _, vjp = jax.vjp(lambda params, x: loss.stage(params, x, *pick(number)), params, x)
            stage_grads, dx = vjp(jax.tree.map(as_cotangent, dy))
            return stage_grads, filled(dx, x), zeros(aux)

        stage_grads, dx, stage_aux = choose(stage == last, [from_next_stage, from_loss])
        grads = jax.tree.map(jnp.add, grads, stage_grads)
        aux = jax.tree.map(jnp.add, aux, stage_aux)

        def add_before() -> Tree:
            _, vjp = jax.vjp(lambda params: loss.before(params, *pick(number)), params)
            (before_grads,) = vjp(jax.tree.map(as_cotangent, dx))
            return jax.tree.map(jnp.add, grads, before_grads)

        return (choose(stage == 0, [lambda: grads, add_before]), aux, inputs, dy), (nothing, dx)

    def tick(carry: tuple, row: jax.Array) -> tuple[tuple, None]:
        kind, number, incoming = row
        work = [
            lambda: (carry, (nothing, nothing)),
            lambda: forward(carry, number),
            lambda: backward(carry, number),
        ]
        (grads, aux, inputs, _), (y, dx) = choose(kind, work)
        # Outside of the branches: a collective in a branch that some stages do not take would wait
        # forever.
        y = jax.tree.map(lambda y: collectives.shift(y, axis), y)

        def put(buffer: jax.Array, y: jax.Array) -> jax.Array:
            # In other ticks the stage before sends zeros, which must not replace an input that
            # waits.
            return jnp.where(incoming >= 0, buffer.at[incoming % slots].set(y), buffer)

        dy = jax.tree.map(lambda dx: collectives.shift(dx, axis, -1), dx)
        return (grads, aux, jax.tree.map(put, inputs, y), dy), None

    inputs = jax.tree.map(lambda leaf: jnp.zeros((slots, *leaf.shape), leaf.dtype), input_shapes)
    columns = jnp.asarray(tick_table(schedule))[:, stage]
    carry = (zeros(params), zeros(aux), inputs, nothing)
    steps = 1
    if parallel.unroll:
        steps = len(columns)
    (grads, aux, _, _), _ = lax.scan(tick, carry, columns, unroll=steps)
    return grads, aux


def filled(gradient: Tree, x: Tree) -> Tree:
    """Return a gradient that can be sent: integers have none, so zeros are sent in its place."""

    def filled_leaf(gradient: Any, x: jax.Array) -> Any:
        if gradient.dtype == jax.dtypes.float0:
            return jnp.zeros_like(x)
        return gradient

    return jax.tree.map(filled_leaf, gradient, x)


def as_cotangent(gradient: jax.Array) -> Any:
    """Return the cotangent that `filled` made one array of: JAX takes no other for integers."""
    if jnp.issubdtype(gradient.dtype, jnp.inexact):
        return gradient
    return np.zeros(gradient.shape, jax.dtypes.float0)


def one_of(which: jax.Array, work: list[Callable[[], Tree]], *, branchless: bool) -> Tree:
    """Return `work[which]()`. Only that function runs, or, if `branchless`, all of them, and the
    other results are discarded.
    """
    if not branchless:
        return lax.switch(jnp.int32(which), work)
    # `ParallelConfig.branchless` says where XLA computes branches wrongly.
    result, *others = [function() for function in work]
    for number, other in enumerate(others, 1):
        result = jax.tree.map(functools.partial(jnp.where, which == number), other, result)
    return result


@functools.cache
def tick_table(schedule: Schedule) -> np.ndarray:
    """Return a schedule as int32[ticks, stages, 3]: the kind of work of a stage, its microbatch,
    and the microbatch whose input arrives at the end of the tick.

    Raises:
      RuntimeError: a schedule in which a gradient waits longer than a tick, or an input arrives in
        a slot that is in use.
    """
    table = np.full((schedule.ticks, schedule.stages, 3), -1, np.int32)
    slots = min(schedule.stages, schedule.microbatches)
    # inputs that a stage still needs
    waiting: list[set[int]] = [set() for _ in range(schedule.stages)]
    for at, tick in enumerate(schedule.table):
        for stage, work in enumerate(tick):
            kind = IDLE
            number = 0
            if work is not None:
                kind = FORWARD
                number = work.microbatch
                if work.backward:
                    kind = BACKWARD
            table[at, stage, :2] = kind, number
            if kind == FORWARD and stage == 0:
                waiting[0].add(number)
            if kind == FORWARD and stage < schedule.stages - 1:
                table[at, stage + 1, 2] = number
            if kind == BACKWARD and stage > 0 and schedule.table[at + 1][stage - 1] != work:
                raise RuntimeError("a gradient has to wait")
        for stage, work in enumerate(tick):
            if work is not None and work.backward:
                waiting[stage].remove(work.microbatch)
            if table[at, stage, 2] >= 0:
                waiting[stage].add(int(table[at, stage, 2]))
            if len({number % slots for number in waiting[stage]}) != len(waiting[stage]):
                raise RuntimeError("a stage receives more inputs than it has slots")
    return table
