"""The loss of the full batch in a step that sees rows in parts: whether workers get it alone, and
how it is computed if they do not.
"""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from spmd.errors import LossError, ModelError, option
from spmd.jaxpr import without_unused
from spmd.models.base import Call, Variables
from spmd.models.blocks import NamedBlocks
from spmd.nn.layer_stack import split_microbatches
from spmd.nn.parallel_context import UNSHARDED, named_layers, parallel_scope
from spmd.tracebacks import users_line
from spmd.train.activations import Seen
from spmd.train.batch_rows.compute import Compute, Place
from spmd.train.batch_rows.kinds import KEY, Fixed, Kind, Local, PerRow, Summed
from spmd.train.batch_rows.walk import Held, Shared, Unreadable, is_mean, read_loss
from spmd.train.model_setup import PlacedModel
from spmd.train.objective import LEAKS, Objective
from spmd.train.precision import cast_variables, compute_dtype
from spmd.train.remat import module_policies
from spmd.tree import Tree, abstract, format_bytes

BY_COMPILER = '[gradients] reduction = "compiler"'
STATISTICS = "the model keeps statistics that are not means over rows"
# stands for the axes over which layers average their statistics, while a loss is read
WORKERS = "workers"


@dataclasses.dataclass(frozen=True)
class Parts:
    """The numbers of parts into which a step splits a batch before the loss sees them.

    `workers` at positions of their own; at each position `simulated` workers one after the other;
    of each `microbatches`; and of these the microbatches of a 1f1b pipeline (`ticks`: there are
    any).
    """

    workers: int
    simulated: int
    microbatches: int
    ticks: bool

    @property
    def several(self) -> bool:
        """Return whether there is more than one part."""
        return self.ticks or self.count > 1

    @property
    def count(self) -> int:
        """Return the number of parts of a batch, before a 1f1b pipeline splits them."""
        return self.workers * self.simulated * self.microbatches

    @property
    def of_position(self) -> bool:
        """Return whether one position of the mesh sees its rows in parts, one after the other."""
        return self.ticks or self.simulated * self.microbatches > 1

    def __str__(self) -> str:
        count, inner = self.workers * self.simulated, self.microbatches
        said = [f"by {count} workers"] if count > 1 else []
        said += [f"in {inner} microbatches"] if inner > 1 else []
        return ", ".join(said + (["in the microbatches of a 1f1b pipeline"] if self.ticks else []))


@dataclasses.dataclass(frozen=True)
class Reading:
    """The result of reading a traced loss.

    Attributes:
      mean: whether workers that call it on their own rows get the right mean, of metrics and
        statistics, too.
      shares: what they share if they do not.
      row_wise: whether layers that a layout may compute in ways of its own are row by row.
      joining: layers that join rows.
      averages: whether a module such as BatchNorm averages over workers.
      metrics: those that are no means over rows, where the loss itself and the statistics are.
      backward: a function with a backward pass of its own that needs the gradient of the full
        batch; "" if there is none.
      problem: why it cannot be read; "" where it can.
      statistics: whether the mean of the workers' statistics is right.
      weights: the first share that depends on the weights, and not only on random numbers that each
        part has anew.
    """

    mean: bool
    shares: tuple[Shared, ...] = ()
    problem: str = ""
    statistics: bool = True
    weights: Shared | None = None
    row_wise: bool = True
    joining: Shared | None = None
    averages: bool = False
    metrics: tuple[str, ...] = ()
    backward: str = ""

    @property
    def subject(self) -> str:
        """Return what joins rows, in the words of an error."""
        return f'the metric "{self.metrics[0]}"' if self.metrics else "the loss"

    @property
    def trained(self) -> list[Shared]:
        """Return the shares that depend on the weights, and so on all rows at once."""
        return [share for share in self.shares if share.trained]

    def note(self) -> str:
        """Return a line on what is shared."""
        if not self.shares:
            return (
                "the loss is that of the full batch: numbers of rows, and of random draws, are "
                "those of the batch on each worker."
            )
        sizes = format_bytes(sum(share.bytes for share in self.shares))
        rows = [share for share in self.shares if share.how == "rows"]
        where = "".join(
            f", {describe(share)}" for share in sorted(rows, key=lambda share: -share.bytes)[:2]
        )
        kinds = "sums over rows" if not rows else "sums over rows, and rows"
        count = f"{len(self.shares)} array{'s' if len(self.shares) > 1 else ''}"
        return (
            f"the loss is that of the full batch: workers share {kinds} ({count}, {sizes} a "
            f"step{where})."
        )


def describe(share: Shared) -> str:
    """Return what is shared, and the line that needs it."""
    traceback = share.equation.source_info.traceback
    line = users_line(
        (frame.file_name, frame.line_num) for frame in (traceback.frames if traceback else ())
    )
    what = {
        "rows": "rows",
        "sum": "a sum over rows",
        "max": "a maximum over rows",
        "min": "a minimum over rows",
    }
    needed = (
        f"{what[share.how]} for {share.equation.primitive.name}" if share.how in what else "layers"
    )
    return f"{needed}{f' at {line}' if line else ''}"


class FullBatchError(LossError):
    """A step cannot compute the loss in parts, and could if XLA placed the collectives. Users see a
    `LossError`.
    """


def check_reading(
    reading: Reading, parts: Parts, source: str, rows: int, *, alone: bool, by_layer: bool
) -> None:
    """Check that a step that sees rows in parts can compute the loss of the batch.

    Args:
      alone: whether workers have weights of their own.
      by_layer: whether the layout computes layers in a way of its own, each worker with its rows.

    Raises:
      LossError: it cannot. The fix is the smallest change with which it can; a `FullBatchError` if
        that is to let XLA see all rows.
    """
    why = _refusal(reading, parts, alone, by_layer)
    if not why:
        return
    changes = {
        option("accumulate", 1): {"microbatches": 1},
        '[pipeline] schedule = "gpipe"': {"ticks": False},
        BY_COMPILER: {"workers": 1, "simulated": 1},
    }
    sets = [
        chosen
        for count in range(1, len(changes) + 1)
        for chosen in itertools.combinations(changes, count)
    ]

    def mends(chosen: tuple[str, ...]) -> bool:
        changed = dataclasses.replace(
            parts, **{key: value for name in chosen for key, value in changes[name].items()}
        )
        manual = changed.workers * changed.simulated > 1
        return changed != parts and not (
            changed.several and _refusal(reading, changed, alone and manual, by_layer and manual)
        )

    smallest = next(chosen for chosen in sets if mends(chosen))
    fix = " and ".join(smallest)
    in_turn = (
        ", one after the other"
        if parts.of_position and not reading.problem and not parts.ticks
        else ""
    )
    seen = f"a step under {source} sees the {rows} rows of a batch {parts}{in_turn}"
    if why == STATISTICS:
        raise ModelError(f"{why}, and {seen}.", fix=f"{fix}.")
    ways = (
        "one value per row that depends on no other row. Where the loss of a part is what you "
        "want: loss=spmd.losses.of_parts(loss)."
    )
    because = f": {reading.problem}" if reading.problem and not reading.backward else "."
    if reading.backward:
        ways = (
            "a function whose backward pass is a multiple of the gradient that it is given; "
            "loss=spmd.losses.of_parts(loss), if that"
        )
        fix = f"{fix}; or {ways} of a part of the batch is what you want."
    elif reading.metrics:
        name = reading.metrics[0]
        evaluated = (
            f'an evaluation of it, fit(metrics={{"{name}": ...}}, eval_data=...), in place of '
            "returning it with the loss."
        )
        fix = (
            f"{fix}; or a metric that returns (sum, count), both summed over the rows it is given, "
            f"or one value per row; or {evaluated}"
        )
    else:
        fix = (
            f"{fix}; or a loss that returns (sum, count), both summed over the rows it is given, "
            f"or {ways}"
        )
    raise (FullBatchError if smallest == (BY_COMPILER,) else LossError)(
        f"{why}, and {seen}{because}", fix=fix
    )


def _refusal(reading: Reading, parts: Parts, alone: bool, by_layer: bool) -> str:
    """Return why a step that sees rows in these parts cannot compute the loss of the batch; "" if
    it can.
    """
    if reading.mean:
        return ""
    if reading.backward:
        return (
            f"the loss calls {reading.backward} that is not linear, which needs the gradient of "
            "the full batch"
        )
    if reading.problem:
        return "the loss is not known to be a mean over rows"
    if parts.ticks:
        return "the loss is not a mean over rows"
    if parts.of_position and reading.trained:
        what = "the weights" if reading.weights else "random numbers that each part has anew"
        return (
            f"{reading.subject} joins rows with {describe(reading.weights or reading.trained[0])}, "
            f"which depends on {what}"
        )
    nested = next((share for share in reading.shares if share.nested), None)
    if parts.of_position and nested is not None:
        return f"{reading.subject} joins rows with {describe(nested)}, in a loop or a branch"
    if alone and reading.trained:
        return (
            f"{reading.subject} joins rows with {describe(reading.trained[0])}, workers have "
            "weights of their own"
        )
    if parts.of_position and reading.averages:
        return "the loss joins rows, a module such as BatchNorm averages over the rows of each part"
    if by_layer and not reading.row_wise:
        return "layers join rows, or use their number, and are computed one by one"
    if parts.of_position and not reading.statistics:
        return STATISTICS
    return ""


def check_pipelined(reading: Reading, source: str) -> None:
    """Check that layers of a pipeline, which sees rows in microbatches, do not join them, and need
    no gradient of all of them.

    Raises:
      LossError: they do.
    """
    if reading.backward:
        why = (
            f"the loss calls {reading.backward} that is not linear, and the [pipeline] of {source} "
            "splits its gradient into microbatches."
        )
        raise LossError(
            why,
            fix="a function whose backward pass is a multiple of the gradient that it is given; or "
            "a layout without [pipeline].",
        )
    if reading.joining is not None:
        at = describe(reading.joining).removeprefix("layers")
        why = (
            f"layers join rows, or use their number{at}, and the [pipeline] of {source} computes "
            "them on microbatches of its own."
        )
        raise LossError(
            why,
            fix="layers that compute each row alone; or a layout without [pipeline], such as fsdp.",
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
