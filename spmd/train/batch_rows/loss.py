"""The loss of the full batch in a step that sees rows in parts: whether workers get it alone, and
how it is computed if they do not.
"""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from spmd.base.tree import Tree, abstract, format_bytes
from spmd.data.batches import with_rows
from spmd.errors import LossError, ModelError
from spmd.jaxpr.programs import without_unused
from spmd.models.base import Call, Variables
from spmd.models.blocks import NamedBlocks
from spmd.nn.layer_stack import split_microbatches
from spmd.nn.parallel_context import UNSHARDED, named_layers, parallel_scope
from spmd.sync.gradient_sync import GradientSync
from spmd.train.activations import Seen
from spmd.train.batch_rows.compute import Compute
from spmd.train.batch_rows.kinds import KEY, Fixed, Kind, Local, PerRow, Summed, is_mean
from spmd.train.batch_rows.pairs import Unreadable
from spmd.train.batch_rows.reading import (
    Parts,
    Reading,
    check_pipelined,
    check_reading,
    describe,
)
from spmd.train.batch_rows.row_arrays import Place
from spmd.train.batch_rows.walk import Held, Shared, read_loss
from spmd.train.loss_trace import TracedLoss
from spmd.train.model_setup import PlacedModel
from spmd.train.objective import LEAKS, Objective
from spmd.train.precision import cast_variables, compute_dtype
from spmd.train.remat import module_policies

# stands for the axes over which layers average their statistics, while a loss is read
WORKERS = "workers"


def read_training_loss(loss: TracedLoss, sync: GradientSync, backward: str) -> Reading:
    """Read the loss of a training step, where it sees rows in parts or layers do; else, and where
    it is meant for parts, it is that of the batch.

    Args:
      sync: says which blocks are called in ways of their own.
      backward: a function of the loss with a backward pass that is not linear; "" if there is none.

    Raises:
      LossError: the step cannot compute the loss in parts; see `check_reading`.
    """
    placed, parts = loss.placed, parts_of(loss.placed)
    pipelined = placed.parallel.stages > 1
    of_parts = not parts.several or getattr(loss.objective.loss, "of_parts", False)
    if of_parts and not pipelined:
        return Reading(mean=True)
    blocks = [path for group in sync.blocks for path in group]
    reading = read_objective(placed, loss.objective, loss.sample, parts, blocks)
    if not of_parts:
        mean = reading.mean and not backward
        reading = dataclasses.replace(reading, mean=mean, backward=backward)
    source = placed.resolved.layout.source
    if pipelined:
        check_pipelined(reading, source)
    if of_parts:
        return Reading(mean=True)
    alone = placed.exchange.asynchronous or bool(placed.exchange.local)
    by_layer = bool(sync.layerwise) or pipelined
    check_reading(reading, parts, source, loss.rows, alone=alone, by_layer=by_layer)
    return reading


def parts_of(placed: PlacedModel) -> Parts:
    """Return the parts in which a step sees a full batch."""
    positions = placed.resolved.workers
    return Parts(
        workers=positions if placed.exchange.reduction.manual else 1,
        simulated=placed.exchange.worker_count // positions,
        microbatches=placed.config.accumulate,
        ticks=placed.parallel.manual_backward,
    )


def read_objective(
    placed: PlacedModel, loss: Objective, sample: Tree, parts: Parts, blocks: Collection[str]
) -> Reading:
    """Read the loss, its metrics, and the statistics that it leaves, in a training step on batches
    like `sample`.

    Args:
      blocks: paths of the submodules that the layout calls in ways of its own.
    """
    variables, rows = abstract(placed.abstract_variables), jax.tree.leaves(sample)[0].shape[0]
    dtype = compute_dtype(placed.config.precision)
    remat = module_policies(placed.resolved.layout.remat)
    output_shapes: list[Any] = []

    def compute_loss(variables: Variables, batch: Tree, key: Any) -> Any:
        variables = cast_variables(variables, dtype)
        scope = dataclasses.replace(
            UNSHARDED, used=set(), loop_lengths=set(), schedules={}, reading=(WORKERS,)
        )
        with parallel_scope(scope):
            model_call = Call(
                True,
                key,
                sync_axes=(WORKERS,),
                remat=remat,
                dtype=dtype,
                output_hook=Seen(placed.resolved),
                blocks=NamedBlocks(frozenset(blocks), named_layers) if blocks else None,
            )
            bound = placed.given.bind(variables, model_call)
            value, extra = loss(bound, batch, key)
            outputs = value, extra, placed.given.get_stats(bound)
        output_shapes[:] = [outputs]
        return outputs

    def trace(rows: int) -> Any:
        key = jax.eval_shape(lambda: jax.random.key(0))
        # Layers that average over workers name this axis, which has to be bound.
        traced = jax.make_jaxpr(compute_loss, axis_env=[(WORKERS, 2)])
        return traced(variables, with_rows(sample, rows), key)

    inputs = held_inputs(variables, sample, draws=parts.ticks or parts.microbatches > 1)
    problem = ""
    for others in _other_numbers_of_rows(placed, parts, rows):
        try:
            with LEAKS:
                traces = trace(rows), trace(others)
                held, shares = read_loss(*traces, inputs, rows, others)
            break
        except ModelError:
            # says itself what of the model depends on the number of rows
            raise
        except Exception as error:
            # whatever a loss raises on another number of rows
            if isinstance(error.__cause__, jax.errors.UnexpectedTracerError):
                raise
            problem = problem or str(error).strip().partition("\n")[0]
    else:
        return Reading(mean=False, problem=problem)
    weights = None
    if parts.of_position and any(share.trained for share in shares):
        _, of_weights = read_loss(*traces, held_inputs(variables, sample), rows, others)
        weights = next((share for share in of_weights if share.trained), None)
    kinds = iter([value.kind for value in held])
    outputs = jax.tree.map(lambda x: Output(next(kinds), x.shape, x.dtype), output_shapes[0])
    return _reading(outputs, shares, weights)


def _other_numbers_of_rows(placed: PlacedModel, parts: Parts, rows: int) -> list[int]:
    """Return the numbers of rows of which one is that of the second trace, the first that works:
    those of a part, and more than the batch has.
    """
    fewest = rows // parts.count
    if parts.ticks:
        of_worker = jax.ShapeDtypeStruct((fewest,), jnp.float32)
        fewest = split_microbatches(placed.parallel, of_worker).rows
    # what is written for dims of size 1 says too little
    fewest = max(fewest, 2)
    # a loss of groups of rows may take no fewer than all
    if fewest >= rows:
        return [2 * rows]
    return [fewest, 2 * rows]


class Output(NamedTuple):
    """An array that a traced loss returns."""

    kind: Kind
    shape: tuple[int, ...]
    dtype: Any


def _is_output(leaf: Any) -> bool:
    return isinstance(leaf, Output)


def _reading(outputs: Any, shares: Sequence[Shared], weights: Shared | None) -> Reading:
    """Return what is known of a loss that has been read.

    Args:
      outputs: of the loss: its value, metrics by name, and statistics, as trees of `Output`.
      weights: the first share that depends on the weights.
    """
    value, extra, stats = outputs
    statistics = all(_is_same(leaf) for leaf in jax.tree.leaves(stats, is_leaf=_is_output))
    metrics = tuple(name for name, metric in extra.items() if not _is_mean(metric))
    is_mean_of_loss = statistics and _is_mean(value)
    of_layers = [share for share in shares if share.how in ("layers", "statistics")]
    shared = [share for share in shares if share.how not in ("layers", "statistics", "averages")]
    return Reading(
        is_mean_of_loss and not metrics,
        tuple(shared),
        statistics=statistics,
        weights=weights,
        row_wise=not of_layers,
        averages=any(share.how == "averages" for share in shares),
        joining=next((share for share in of_layers if share.how == "layers"), None),
        metrics=metrics if is_mean_of_loss else (),
    )


def held_inputs(variables: Variables, sample: Tree, *, draws: bool = False) -> list[Held]:
    """Return the inputs of a traced loss: the arrays of `Variables`, of a batch, and a key.

    Args:
      draws: whether random numbers change from one part of a batch to the next, and so are as what
        is trained.
    """

    def with_leaves(tree: Tree, value: Held) -> Tree:
        return jax.tree.map(lambda _: value, tree)

    kinds = dataclasses.replace(
        variables,
        params=with_leaves(variables.params, Held(Fixed(), True)),
        frozen=with_leaves(variables.frozen, Held(Fixed())),
        stats=with_leaves(variables.stats, Held(Fixed())),
        rngs=with_leaves(variables.rngs, Held(KEY, draws)),
    )
    inputs = kinds, with_leaves(sample, Held(PerRow(0))), Held(KEY, draws)
    return jax.tree.leaves(inputs, is_leaf=_is_held)


def _is_mean(output: Any) -> bool:
    """Return whether the mean of a loss or metric, a tree of `Output`, over parts is right."""
    leaves = jax.tree.leaves(output, is_leaf=_is_output)
    return is_mean([leaf.kind for leaf in leaves], leaves[0].shape)


def _is_same(output: Output) -> bool:
    """Return whether a statistic is the same on all workers, or their mean is right."""
    if isinstance(output.kind, Fixed):
        return output.kind.power == 0
    return output.kind == Summed(-1) and jnp.issubdtype(output.dtype, jnp.floating)


# the loss of the full batch -----------------------------------------------------------------------


def full_batch_loss(
    function: Callable[[Variables, Tree, Any], tuple[Any, dict[str, Any], Tree, Any]],
    variables: Variables,
    batch: Tree,
    key: Any,
    place: Place,
    reading: Reading,
) -> tuple[Any, dict[str, Any], Tree, Any]:
    """Return a function's loss, metrics, statistics, and one more output, for all rows of the
    batch.

    The mean over parts of the loss and of metrics is that of the batch; statistics are those of the
    batch, on every worker.

    Args:
      function: takes variables, rows and a key, and returns a value, metrics by name, statistics,
        and something or None.
      reading: of the loss; a layout's own functions may not share more.

    Raises:
      LossError: they would, or the two traces do not correspond.
    """
    compute, outputs, shapes = _computed(function, variables, batch, key, place, reading)
    value, extra, stats, more = outputs
    value = _as_means(value, shapes[0], compute)
    extra = {name: _as_means(metric, shapes[1][name], compute) for name, metric in extra.items()}
    stats = jax.tree.map(lambda held: _everywhere(held, compute), stats, is_leaf=_is_held)
    more = jax.tree.map(lambda held: held.array, more, is_leaf=_is_held)
    return value, extra, stats, more


def shared_arrays(
    function: Callable[[Variables, Tree, Any], Any],
    variables: Variables,
    batch: Tree,
    key: Any,
    place: Place,
    reading: Reading,
) -> list[jax.Array]:
    """Return the arrays that all rows of a batch share, in the order in which `full_batch_loss`
    needs them, from the rows of one position.

    None of them depends on the weights, so the model is not computed.
    """

    def record_shared(variables: Variables, batch: Tree, key: Any) -> list[jax.Array]:
        record: list[jax.Array] = []
        _computed(function, variables, batch, key, place, reading, record)
        return record

    closed = jax.make_jaxpr(record_shared)(variables, batch, key)
    needed = without_unused(closed.jaxpr.eqns, closed.jaxpr.outvars)
    without_model = closed.replace(jaxpr=closed.jaxpr.replace(eqns=needed))
    return jaxpr_as_fun(without_model)(*jax.tree.leaves((variables, batch, key)))


def _computed(
    function: Callable[..., Any],
    variables: Variables,
    batch: Tree,
    key: Any,
    place: Place,
    reading: Reading,
    record: list[Any] | None = None,
) -> tuple[Compute, Any, Any]:
    """Return the outputs of a function, as trees of `Held`, and of shapes."""
    here = jax.tree.leaves(batch)[0].shape[0]
    rows = here * place.workers * place.microbatches

    def trace(rows: int) -> Any:
        traced = jax.make_jaxpr(function, return_shape=True)
        return traced(variables, with_rows(batch, rows), key)

    first, shapes = trace(rows)
    arrays = jax.tree.leaves((variables, batch, key))
    inputs = []
    for held, array in zip(held_inputs(variables, batch), arrays, strict=True):
        inputs.append(held._replace(array=array))
    problem = ""
    # a loss of groups of rows may take no fewer than all
    choices = [here, 2 * rows]
    if here == 1:
        # for dims of size 1 JAX may do something else
        choices = [1, 2, 2 * rows]
    for traced_rows in choices:
        compute = Compute(
            rows,
            traced_rows,
            here=here,
            place=place,
            row_wise=reading.row_wise,
            shared_arrays=None if place.shared_arrays is None else iter(place.shared_arrays),
            record=record,
        )
        try:
            outputs = compute.closed(first, trace(traced_rows)[0], inputs)
        except (Unreadable, LossError) as error:
            problem = problem or str(error).strip().partition("\n")[0]
            if record is not None:
                record.clear()
            continue
        _check_shares(compute.shares, reading)
        return compute, jax.tree.unflatten(jax.tree.structure(shapes), outputs), shapes
    raise LossError(
        f"the loss cannot be computed on {here} of {rows} rows: {problem}.", fix=COMPILER
    )


def _check_shares(shares: Sequence[Shared], reading: Reading) -> None:
    """Check that a layout's own functions, such as those of a pipeline, do not make workers share
    more than the loss does.

    Raises:
      LossError: they do.
    """

    more = []
    if not reading.trained and not reading.averages:
        more += [share for share in shares if share.trained]
    rows = [share for share in shares if share.how == "rows"]
    bytes_of_loss = sum(share.bytes for share in reading.shares if share.how == "rows")
    if sum(share.bytes for share in rows) > bytes_of_loss:
        more += rows
    if more:
        largest = max(more, key=lambda share: share.bytes)
        why = (
            f"under this layout workers would share {describe(largest)}, "
            f"{format_bytes(largest.bytes)}, for a loss that joins rows."
        )
        fix = (
            "a loss that returns (sum, count), or one value per row; or a layout without "
            "pipelines, and without layers that gather."
        )
        raise LossError(why, fix=fix)


COMPILER = (
    'a larger batch; [gradients] reduction = "compiler", which sees all rows at once; or a loss '
    "with one value per row."
)


def _is_held(leaf: Any) -> bool:
    return isinstance(leaf, Held)


def _as_means(output: Any, shapes: Any, compute: Compute) -> Any:
    """Return the part of a loss or metric; the mean over parts, or the sum of pairs, is that of the
    batch.
    """
    leaves, structure = jax.tree.flatten(output, is_leaf=_is_held)
    is_pair = len(leaves) == 2
    parts = []
    for held, leaf in zip(leaves, jax.tree.leaves(shapes), strict=True):
        _check_known(held)
        shape = tuple(leaf.shape)
        # one value per row
        if shape and shape[0] == compute.rows:
            parts.append(compute.coerced(held, PerRow(0), shape, shape))
        # pairs are added up over parts, and of anything else the mean over parts is taken
        elif isinstance(held.kind, Summed):
            parts.append(held.array * (1 if is_pair else compute.parts))
        else:
            parts.append(held.array / (compute.parts if is_pair else 1))
    return jax.tree.unflatten(structure, parts)


def _check_known(held: Held) -> None:
    if isinstance(held.kind, Local):
        why = (
            "the loss uses, or keeps, something else than rows that layers return, and this layout "
            "computes these layers in parts."
        )
        raise LossError(
            why, fix=f"a loss that returns (sum, count), or one value per row; or {COMPILER}"
        )


def _everywhere(held: Held, compute: Compute) -> Any:
    """Return a statistic of the full batch."""
    _check_known(held)
    if isinstance(held.kind, PerRow):
        raise ModelError(
            "a statistic of the model has an entry for each row of the batch.",
            fix="a sum or a mean over the rows.",
        )
    shape = jnp.shape(held.array)
    return compute.coerced(held, Fixed(), shape, shape)
