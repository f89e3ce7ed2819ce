"""Whether workers that call a loss on their own rows train with that of the full batch; and that loss, where they do not."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from spmd.errors import LossError, ModelError
from spmd.jaxpr import without_unused
from spmd.models.base import Call, Variables
from spmd.nn.layer_stack import split_microbatches
from spmd.nn.parallel_context import UNSHARDED, parallel_scope
from spmd.tracebacks import users_line
from spmd.train.activations import Seen
from spmd.train.batch_rows.compute import Compute
from spmd.train.batch_rows.kinds import KEY, Fixed, Kind, PerRow, Summed
from spmd.train.batch_rows.walk import Held, Shared, Unreadable, is_mean, read_loss
from spmd.train.model_setup import PlacedModel
from spmd.train.objective import LEAKS, Objective
from spmd.train.precision import cast_variables, compute_dtype
from spmd.train.remat import module_policies
from spmd.tree import Tree, abstract, format_bytes
from spmd.wire import collectives

WORKERS = "workers"  # stands for the axes over which layers average their statistics, while a loss is read


@dataclasses.dataclass(frozen=True)
class Parts:
    """Into how many parts a step splits a batch before the loss sees them.

    `workers` at positions of their own; at each position `simulated` workers one after the other; of each `microbatches`; and of these the
    microbatches of a 1f1b pipeline (`ticks`: there are any).
    """

    workers: int
    simulated: int
    microbatches: int
    ticks: bool

    @property
    def several(self) -> bool:
        """Whether there is more than one part."""
        return self.ticks or self.count > 1

    @property
    def count(self) -> int:
        """How many parts a batch has, before a 1f1b pipeline splits them."""
        return self.workers * self.simulated * self.microbatches

    @property
    def of_position(self) -> bool:
        """Whether one position sees its rows in parts, one after the other."""
        return self.ticks or self.simulated * self.microbatches > 1

    def __str__(self) -> str:
        count, inner = self.workers * self.simulated, self.microbatches
        said = [f"by {count} workers"] if count > 1 else []
        said += [f"in {inner} microbatches"] if inner > 1 else []
        return ", ".join(said + (["in the microbatches of a 1f1b pipeline"] if self.ticks else []))


@dataclasses.dataclass(frozen=True)
class Reading:
    """What a traced loss says of the rows of a batch.

    Attributes:
      mean: whether workers alone have it: the mean over them is that of the batch, also of metrics and statistics.
      shares: what workers share where they have not.
      problem: why it cannot be read; "" where it can.
      statistics: whether workers have the statistics alone.
    """

    mean: bool
    shares: tuple[Shared, ...] = ()
    problem: str = ""
    statistics: bool = True

    @property
    def trained(self) -> list[Shared]:
        """What depends on what is trained, so on all rows at once."""
        return [share for share in self.shares if share.trained]

    @property
    def limit(self) -> tuple[bool, int]:
        """Whether anything that is shared depends on what is trained, and the bytes of rows that are shared."""
        return bool(self.trained), sum(share.bytes for share in self.shares if share.how == "rows")

    def note(self) -> str:
        """A line on what is shared."""
        if not self.shares:
            return "the loss is that of the full batch: numbers of rows, and of random draws, are those of the batch on each worker."
        sizes = format_bytes(sum(share.bytes for share in self.shares))
        rows = [share for share in self.shares if share.how == "rows"]
        where = "".join(f", {describe(share)}" for share in sorted(rows, key=lambda share: -share.bytes)[:2])
        kinds = "sums over rows" if not rows else "sums over rows, and rows"
        count = f"{len(self.shares)} array{'s' if len(self.shares) > 1 else ''}"
        return f"the loss is that of the full batch: workers share {kinds} ({count}, {sizes} a step{where})."


def describe(share: Shared) -> str:
    """What is shared, and the line that needs it."""
    traceback = share.equation.source_info.traceback
    line = users_line((frame.file_name, frame.line_num) for frame in (traceback.frames if traceback else ()))
    what = {"rows": "rows", "sum": "a sum over rows", "max": "a maximum over rows", "min": "a minimum over rows"}[share.how]
    return f"{what} for {share.equation.primitive.name}{f' at {line}' if line else ''}"


def check_reading(reading: Reading, parts: Parts, source: str, rows: int, *, alone: bool) -> None:
    """Check that a step that sees rows in parts can compute the loss of the batch.

    Args:
      alone: whether workers have weights of their own.

    Raises:
      LossError: it cannot.
    """
    if reading.mean:
        return
    changes = ['[gradients] reduction = "compiler"'] if parts.workers * parts.simulated > 1 else []
    changes += ["accumulate=1"] if parts.microbatches > 1 else []
    changes += ['[pipeline] schedule = "gpipe"'] if parts.ticks else []
    ways = "one value per row that depends on no other row. Where the loss of a part is what you want: loss=spmd.losses.of_parts(loss)."
    fix = f"{' and '.join(changes)}; or a loss that returns (sum, count), both summed over the rows it is given, or {ways}"
    seen = f"a step under {source} sees the {rows} rows of a batch {parts}"
    if reading.problem:
        raise LossError(f"the loss is not known to be a mean over rows, and {seen}: {reading.problem}", fix=fix)
    if parts.ticks:
        raise LossError(f"the loss is no mean over rows, and {seen}.", fix=fix)
    if parts.of_position and reading.trained:
        why = f"the loss joins rows with {describe(reading.trained[0])}, which depends on the weights, and {seen}, one after the other."
        raise LossError(why, fix=fix)
    if alone and reading.trained:
        why = f"the loss joins rows with {describe(reading.trained[0])}, and under {source} workers have weights of their own."
        raise LossError(why, fix=fix)
    if parts.of_position and not reading.statistics:
        why = f"the model keeps statistics that are no mean over rows, and {seen}, one after the other."
        raise ModelError(why, fix=" and ".join(changes) + ".")


def read_objective(placed: PlacedModel, loss: Objective, sample: Tree, parts: Parts) -> Reading:
    """Read the loss, its metrics, and the statistics that it leaves, in a training step on batches like `sample`."""
    variables, rows = abstract(placed.abstract_variables), jax.tree.leaves(sample)[0].shape[0]
    dtype, remat = compute_dtype(placed.config.precision), module_policies(placed.resolved.layout.remat)
    outputs: list[Any] = []

    def call(variables: Variables, batch: Tree, key: Any) -> Any:
        variables = cast_variables(variables, dtype)
        with parallel_scope(dataclasses.replace(UNSHARDED, used=set(), schedules={}, reading=(WORKERS,))):
            asked = Call(True, key, sync_axes=(WORKERS,), remat=remat, dtype=dtype, output_hook=Seen(placed.resolved))
            bound = placed.given.bind(variables, asked)
            value, extra = loss(bound, batch, key)
            found = value, extra, placed.given.get_stats(bound)
        outputs[:] = [found]
        return found

    def trace(rows: int) -> Any:
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), sample)
        return jax.make_jaxpr(call, axis_env=[(WORKERS, 2)])(variables, batch, jax.eval_shape(lambda: jax.random.key(0)))

    changing = parts.of_position  # from one part to the next: random numbers, and statistics
    given = _held(variables, sample, changing)
    fewest = rows // parts.count
    if parts.ticks:
        fewest = split_microbatches(placed.parallel, jax.ShapeDtypeStruct((fewest,), jnp.float32)).rows
    fewest = max(fewest, 2)  # what is written for dims of size 1 says too little
    others = fewest if fewest < rows else 2 * rows
    try:
        with LEAKS:
            found, shares = read_loss(trace(rows), trace(others), given, rows, others)
    except Exception as error:  # whatever a loss raises on another number of rows
        if isinstance(error.__cause__, jax.errors.UnexpectedTracerError):
            raise
        return Reading(mean=False, problem=str(error).strip().partition("\n")[0])
    kinds = iter([held.kind for held in found])
    value, extra, stats = jax.tree.map(lambda leaf: (next(kinds), leaf.shape, leaf.dtype), outputs[0])
    statistics = all(_is_same(leaf) for leaf in jax.tree.leaves(stats, is_leaf=_is_output))
    return Reading(statistics and _is_mean(value) and all(map(_is_mean, extra.values())), tuple(shares), statistics=statistics)


def _held(variables: Variables, sample: Tree, changing: bool) -> list[Held]:
    """Of every array that a loss is traced on: `Variables`, a batch, a key."""
    kinds = dataclasses.replace(
        variables,
        params=jax.tree.map(lambda _: Held(Fixed(), True), variables.params),
        frozen=jax.tree.map(lambda _: Held(Fixed()), variables.frozen),
        stats=jax.tree.map(lambda _: Held(Fixed(), changing), variables.stats),
        rngs=jax.tree.map(lambda _: Held(KEY, changing), variables.rngs),
    )
    batch = jax.tree.map(lambda _: Held(PerRow(0)), sample)
    return jax.tree.leaves((kinds, batch, Held(KEY, changing)), is_leaf=lambda leaf: isinstance(leaf, Held))


def _is_mean(output: Any) -> bool:
    """Whether a loss or metric, of which each array is (kind, shape, dtype), is one of which parts have means."""
    leaves = jax.tree.leaves(output, is_leaf=_is_output)
    return is_mean([kind for kind, _, _ in leaves], leaves[0][1])


def _is_same(output: Any) -> bool:
    """Whether a statistic, as (kind, shape, dtype), is the same on all workers, or their mean is that of the batch."""
    kind, _, dtype = output
    return (isinstance(kind, Fixed) and kind.power == 0) or (kind == Summed(-1) and jnp.issubdtype(dtype, jnp.floating))


def _is_output(leaf: Any) -> bool:
    return isinstance(leaf, tuple) and len(leaf) == 3 and isinstance(leaf[0], Kind)


# the loss of the full batch -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Place:
    """Which rows of the batch are here, and what their worker knows of the others; see `Compute`. `limit` is that of the `Reading`."""

    limit: tuple[bool, int]
    axes: tuple[str, ...]
    workers: int
    worker: Any
    microbatches: int = 1
    microbatch: Any = 0
    known: Any = None


def full_batch_loss(
    function: Callable[[Variables, Tree, Any], tuple[Any, dict[str, Any], Tree, Any]],
    variables: Variables,
    batch: Tree,
    key: Any,
    place: Place,
) -> tuple[Any, dict[str, Any], Tree, Any]:
    """A function's loss, metrics, statistics, and one more output, as of all rows of the batch.

    Loss and metrics are such that their mean over parts is what the batch has; statistics are those of the batch, on every worker.

    Args:
      function: as it is called on rows, without names of axes: it returns a value, metrics by name, statistics, and something or None.
    """
    compute, outputs, shapes = _computed(function, variables, batch, key, place, record=None)
    value, extra, stats, more = outputs
    value = _as_means(value, shapes[0], compute)
    extra = {name: _as_means(metric, shapes[1][name], compute) for name, metric in extra.items()}
    return value, extra, jax.tree.map(lambda held: _everywhere(held, compute), stats, is_leaf=_is_held), _arrays(more)


def shared_arrays(
    function: Callable[[Variables, Tree, Any], Any], variables: Variables, batch: Tree, key: Any, place: Place
) -> list[jax.Array]:
    """What all rows of a batch share, in the order in which `full_batch_loss` needs it, from the rows of one position.

    Nothing of it depends on what is trained, so nothing of the model is computed.
    """

    def run(variables: Variables, batch: Tree, key: Any) -> list[jax.Array]:
        record: list[jax.Array] = []
        _computed(function, variables, batch, key, place, record=record)
        return record

    closed = jax.make_jaxpr(run)(variables, batch, key)
    few = closed.jaxpr.replace(eqns=without_unused(closed.jaxpr.eqns, closed.jaxpr.outvars))
    return jaxpr_as_fun(closed.replace(jaxpr=few))(*jax.tree.leaves((variables, batch, key)))


def _computed(
    function: Callable[..., Any], variables: Variables, batch: Tree, key: Any, place: Place, record: list[Any] | None
) -> tuple[Compute, Any, Any]:
    """What a function returns, as trees of `Held`, and of shapes."""
    here = jax.tree.leaves(batch)[0].shape[0]
    rows = here * place.workers * place.microbatches
    if record is not None:  # all rows of this position are here
        rows = here * collectives.worker_count(place.axes)

    def trace(rows: int) -> Any:
        sized = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), batch)
        return jax.make_jaxpr(function, return_shape=True)(variables, sized, key)

    first, shapes = trace(rows)
    arrays = jax.tree.leaves((variables, batch, key))
    given = [held._replace(array=x) for held, x in zip(_held(variables, batch, changing=False), arrays, strict=True)]
    workers = place.workers if record is None else rows // here
    for traced in (here, 2) if here == 1 else (here,):  # for dims of size 1 JAX may do something else
        known: Iterator[Any] | None = None if place.known is None else iter(place.known)
        numbers = (workers, place.worker, place.microbatches, place.microbatch)
        compute = Compute(rows, traced, [], False, here, place.axes, *numbers, known=known, record=record)
        try:
            found = compute.closed(first, trace(traced)[0], given)
            _check_shares(compute.shares, place.limit)
            return compute, jax.tree.unflatten(jax.tree.structure(shapes), found), shapes
        except Unreadable as error:
            problem = str(error)
            if record is not None:
                record.clear()
    raise LossError(f"the loss cannot be computed on {here} of {rows} rows: {problem}", fix=COMPILER)


def _check_shares(shares: list[Shared], limit: tuple[bool, int]) -> None:
    """Check that a layout's own functions, such as those of a pipeline, do not make workers share more than the loss does.

    Raises:
      LossError: they do.
    """
    trained, sizes = limit
    found = sum(share.bytes for share in shares if share.how == "rows")
    more = next((share for share in shares if share.trained and not trained), None)
    if more is None and found > sizes:
        more = max((share for share in shares if share.how == "rows"), key=lambda share: share.bytes)
    if more is not None:
        why = f"under this layout workers would share {describe(more)}, {format_bytes(more.bytes)}, for a loss that joins rows."
        raise LossError(
            why, fix="a loss that returns (sum, count), or one value per row; or a layout without pipelines and layers that gather."
        )


COMPILER = 'a larger batch; [gradients] reduction = "compiler", which sees all rows at once; or a loss with one value per row.'


def _is_held(leaf: Any) -> bool:
    return isinstance(leaf, Held)


def _arrays(tree: Any) -> Any:
    return jax.tree.map(lambda held: held.array, tree, is_leaf=_is_held)


def _as_means(output: Any, shapes: Any, compute: Compute) -> Any:
    """A loss or metric of the full batch, as parts of it have it whose mean, or whose sum of pairs, is that of the batch."""
    leaves = jax.tree.leaves(output, is_leaf=_is_held)
    full = [tuple(leaf.shape) for leaf in jax.tree.leaves(shapes)]
    pair = len(leaves) == 2

    def part(held: Held, shape: tuple[int, ...]) -> Any:
        if shape and shape[0] == compute.rows and not isinstance(held.kind, Summed):  # one value per row
            return compute.coerced(held, PerRow(0), shape, shape)
        scale = 1 if pair else compute.parts
        if isinstance(held.kind, Summed):
            return held.array * scale
        return held.array / (compute.parts if pair else 1)

    return jax.tree.unflatten(jax.tree.structure(output, is_leaf=_is_held), [part(*each) for each in zip(leaves, full, strict=True)])


def _everywhere(held: Held, compute: Compute) -> Any:
    """A statistic of the full batch."""
    if isinstance(held.kind, PerRow):
        raise ModelError("a statistic of the model has an entry for each row of the batch.", fix="a sum or a mean over the rows.")
    shape = jnp.shape(held.array)
    return compute.coerced(held, Fixed(), shape, shape)
