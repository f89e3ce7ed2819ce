"""The loss of the full batch in a step that sees rows in parts: whether workers get it alone, and
how it is computed if they do not.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from spmd.errors import LossError, ModelError
from spmd.jaxpr.programs import without_unused
from spmd.models.base import Call, Variables
from spmd.models.blocks import NamedBlocks
from spmd.nn.layer_stack import split_microbatches
from spmd.nn.parallel_context import UNSHARDED, named_layers, parallel_scope
from spmd.train.activations import Seen
from spmd.train.batch_rows.compute import Compute
from spmd.train.batch_rows.kinds import KEY, Fixed, Kind, Local, PerRow, Summed, is_mean
from spmd.train.batch_rows.pairs import Unreadable
from spmd.train.batch_rows.reading import Parts, Reading, describe
from spmd.train.batch_rows.row_arrays import Place
from spmd.train.batch_rows.walk import Held, Shared, read_loss
from spmd.train.model_setup import PlacedModel
from spmd.train.objective import LEAKS, Objective
from spmd.train.precision import cast_variables, compute_dtype
from spmd.train.remat import module_policies
from spmd.tree import Tree, abstract, format_bytes

# stands for the axes over which layers average their statistics, while a loss is read
WORKERS = "workers"


def read_objective(
    placed: PlacedModel, loss: Objective, sample: Tree, parts: Parts, blocks: Collection[str]
) -> Reading:
    """Read the loss, its metrics, and the statistics that it leaves, in a training step on batches
    like `sample`.

    Args:
      blocks: paths of the submodules that the layout calls in ways of its own.
    """
    variables, rows = abstract(placed.abstract_variables), jax.tree.leaves(sample)[0].shape[0]
    dtype, remat = (
        compute_dtype(placed.config.precision),
        module_policies(placed.resolved.layout.remat),
    )
    outputs: list[Any] = []

    def call(variables: Variables, batch: Tree, key: Any) -> Any:
        variables = cast_variables(variables, dtype)
        with parallel_scope(
            dataclasses.replace(UNSHARDED, used=set(), schedules={}, reading=(WORKERS,))
        ):
            named = NamedBlocks(frozenset(blocks), named_layers) if blocks else None
            asked = Call(
                True,
                key,
                sync_axes=(WORKERS,),
                remat=remat,
                dtype=dtype,
                output_hook=Seen(placed.resolved),
                blocks=named,
            )
            bound = placed.given.bind(variables, asked)
            value, extra = loss(bound, batch, key)
            found = value, extra, placed.given.get_stats(bound)
        outputs[:] = [found]
        return found

    def trace(rows: int) -> Any:
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), sample)
        return jax.make_jaxpr(call, axis_env=[(WORKERS, 2)])(
            variables, batch, jax.eval_shape(lambda: jax.random.key(0))
        )

    given = held_inputs(variables, sample, draws=parts.ticks or parts.microbatches > 1)
    fewest = rows // parts.count
    if parts.ticks:
        fewest = split_microbatches(
            placed.parallel, jax.ShapeDtypeStruct((fewest,), jnp.float32)
        ).rows
    fewest = max(fewest, 2)  # what is written for dims of size 1 says too little
    problem = ""
    # a loss of groups of rows may take no fewer
    for others in (fewest, 2 * rows) if fewest < rows else (2 * rows,):
        try:
            with LEAKS:
                traces = trace(rows), trace(others)
                found, shares = read_loss(*traces, given, rows, others)
            break
        except ModelError:  # says itself what of the model depends on the number of rows
            raise
        except Exception as error:  # whatever a loss raises on another number of rows
            if isinstance(error.__cause__, jax.errors.UnexpectedTracerError):
                raise
            problem = problem or str(error).strip().partition("\n")[0]
    else:
        return Reading(mean=False, problem=problem)
    kinds = iter([held.kind for held in found])
    value, extra, stats = jax.tree.map(
        lambda leaf: (next(kinds), leaf.shape, leaf.dtype), outputs[0]
    )
    statistics = all(_is_same(leaf) for leaf in jax.tree.leaves(stats, is_leaf=_is_output))
    metrics = tuple(name for name, metric in extra.items() if not _is_mean(metric))
    of_loss = statistics and _is_mean(value)
    weights = None
    if parts.of_position and any(share.trained for share in shares):
        of_weights = read_loss(*traces, held_inputs(variables, sample), rows, others)[1]
        weights = next((share for share in of_weights if share.trained), None)
    of_layers = [share for share in shares if share.how in ("layers", "statistics")]
    return Reading(
        of_loss and not metrics,
        tuple(share for share in shares if share.how not in ("layers", "statistics", "averages")),
        statistics=statistics,
        weights=weights,
        row_wise=not of_layers,
        averages=any(share.how == "averages" for share in shares),
        joining=next((share for share in of_layers if share.how == "layers"), None),
        metrics=metrics if of_loss else (),
    )


def held_inputs(variables: Variables, sample: Tree, *, draws: bool = False) -> list[Held]:
    """Return the inputs of a traced loss: the arrays of `Variables`, of a batch, and a key.

    Args:
      draws: whether random numbers change from one part of a batch to the next, and so are as what
        is trained.
    """
    kinds = dataclasses.replace(
        variables,
        params=jax.tree.map(lambda _: Held(Fixed(), True), variables.params),
        frozen=jax.tree.map(lambda _: Held(Fixed()), variables.frozen),
        stats=jax.tree.map(lambda _: Held(Fixed()), variables.stats),
        rngs=jax.tree.map(lambda _: Held(KEY, draws), variables.rngs),
    )
    batch = [Held(PerRow(0))] * len(jax.tree.leaves(sample))
    return jax.tree.leaves(
        (kinds, batch, Held(KEY, draws)), is_leaf=lambda leaf: isinstance(leaf, Held)
    )


def _is_mean(output: Any) -> bool:
    """Return whether the mean of a loss or metric over parts is right. Each of its arrays is (kind,
    shape, dtype).
    """
    leaves = jax.tree.leaves(output, is_leaf=_is_output)
    return is_mean([kind for kind, _, _ in leaves], leaves[0][1])


def _is_same(output: Any) -> bool:
    """Return whether a statistic, as (kind, shape, dtype), is the same on all workers, or their
    mean is right.
    """
    kind, _, dtype = output
    return (isinstance(kind, Fixed) and kind.power == 0) or (
        kind == Summed(-1) and jnp.issubdtype(dtype, jnp.floating)
    )


def _is_output(leaf: Any) -> bool:
    return isinstance(leaf, tuple) and len(leaf) == 3 and isinstance(leaf[0], Kind)


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
    return (
        value,
        extra,
        jax.tree.map(lambda held: _everywhere(held, compute), stats, is_leaf=_is_held),
        _arrays(more),
    )


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

    def run(variables: Variables, batch: Tree, key: Any) -> list[jax.Array]:
        record: list[jax.Array] = []
        _computed(function, variables, batch, key, place, reading, record)
        return record

    closed = jax.make_jaxpr(run)(variables, batch, key)
    few = closed.jaxpr.replace(eqns=without_unused(closed.jaxpr.eqns, closed.jaxpr.outvars))
    return jaxpr_as_fun(closed.replace(jaxpr=few))(*jax.tree.leaves((variables, batch, key)))


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
        sized = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), batch)
        return jax.make_jaxpr(function, return_shape=True)(variables, sized, key)

    first, shapes = trace(rows)
    arrays = jax.tree.leaves((variables, batch, key))
    given = [
        held._replace(array=x)
        for held, x in zip(held_inputs(variables, batch), arrays, strict=True)
    ]
    problem = ""
    # 1. For dims of size 1 JAX may do something else. 2. A loss of groups of rows may take no fewer
    #    than all.
    for traced in (1, 2, 2 * rows) if here == 1 else (here, 2 * rows):
        known: Iterator[Any] | None = None if place.known is None else iter(place.known)
        compute = Compute(
            rows,
            traced,
            here=here,
            place=place,
            row_wise=reading.row_wise,
            known=known,
            record=record,
        )
        try:
            found = compute.closed(first, trace(traced)[0], given)
        except (Unreadable, LossError) as error:
            problem = problem or str(error).strip().partition("\n")[0]
            if record is not None:
                record.clear()
            continue
        _check_shares(compute.shares, reading)
        return compute, jax.tree.unflatten(jax.tree.structure(shapes), found), shapes
    raise LossError(
        f"the loss cannot be computed on {here} of {rows} rows: {problem}.", fix=COMPILER
    )


def _check_shares(shares: Sequence[Shared], reading: Reading) -> None:
    """Check that a layout's own functions, such as those of a pipeline, do not make workers share
    more than the loss does.

    Raises:
      LossError: they do.
    """

    def of_rows(shares: Sequence[Shared]) -> list[Shared]:
        return [share for share in shares if share.how == "rows"]

    more = (
        [share for share in shares if share.trained]
        if not reading.trained and not reading.averages
        else []
    )
    if sum(share.bytes for share in of_rows(shares)) > sum(
        share.bytes for share in of_rows(reading.shares)
    ):
        more += of_rows(shares)
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


def _arrays(tree: Any) -> Any:
    return jax.tree.map(lambda held: held.array, tree, is_leaf=_is_held)


def _as_means(output: Any, shapes: Any, compute: Compute) -> Any:
    """Return the part of a loss or metric; the mean over parts, or the sum of pairs, is that of the
    batch.
    """
    leaves = jax.tree.leaves(output, is_leaf=_is_held)
    full = [tuple(leaf.shape) for leaf in jax.tree.leaves(shapes)]
    pair = len(leaves) == 2

    def part(held: Held, shape: tuple[int, ...]) -> Any:
        _check_known(held)
        if shape and shape[0] == compute.rows:  # one value per row
            return compute.coerced(held, PerRow(0), shape, shape)
        scale = 1 if pair else compute.parts
        if isinstance(held.kind, Summed):
            return held.array * scale
        return held.array / (compute.parts if pair else 1)

    return jax.tree.unflatten(
        jax.tree.structure(output, is_leaf=_is_held),
        [part(*each) for each in zip(leaves, full, strict=True)],
    )


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
