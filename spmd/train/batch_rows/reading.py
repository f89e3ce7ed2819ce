"""The result of reading a traced loss: whether a step that sees rows in parts can compute it."""

import dataclasses
import itertools

from spmd.base.tracebacks import users_line
from spmd.base.tree import format_bytes
from spmd.base.xla import source_lines
from spmd.errors import LossError, ModelError, option
from spmd.train.batch_rows.walk import Shared

BY_COMPILER = '[gradients] reduction = "compiler"'
STATISTICS = "the model keeps statistics that are not means over rows"


@dataclasses.dataclass(frozen=True)
class Parts:
    """The numbers of parts into which a step splits a batch before the loss sees them.

    Attributes:
      workers: the number of positions of the mesh with rows of their own.
      simulated: the number of workers at each position, one after the other.
      microbatches: the number of parts of a worker's rows.
      ticks: whether a 1f1b pipeline splits these again, into microbatches of its own.
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
        workers = self.workers * self.simulated
        words = []
        if workers > 1:
            words.append(f"by {workers} workers")
        if self.microbatches > 1:
            words.append(f"in {self.microbatches} microbatches")
        if self.ticks:
            words.append("in the microbatches of a 1f1b pipeline")
        return ", ".join(words)


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
        if not self.metrics:
            return "the loss"
        return f'the metric "{self.metrics[0]}"'

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
        rows = [share for share in self.shares if share.how == "rows"]
        largest = sorted(rows, key=lambda share: share.bytes, reverse=True)[:2]
        places = "".join(f", {describe(share)}" for share in largest)
        kinds = "sums over rows"
        if rows:
            kinds = "sums over rows, and rows"
        count = f"{len(self.shares)} array{'s' if len(self.shares) > 1 else ''}"
        size = format_bytes(sum(share.bytes for share in self.shares))
        return (
            f"the loss is that of the full batch: workers share {kinds} ({count}, {size} a "
            f"step{places})."
        )


def describe(share: Shared) -> str:
    """Return what is shared, and the line that needs it."""
    subjects = {
        "rows": "rows",
        "sum": "a sum over rows",
        "max": "a maximum over rows",
        "min": "a minimum over rows",
    }
    what = "layers"
    if share.how in subjects:
        what = f"{subjects[share.how]} for {share.equation.primitive.name}"
    line = users_line(source_lines(share.equation))
    if not line:
        return what
    return f"{what} at {line}"


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
    smallest = _smallest_change(reading, parts, alone, by_layer)
    in_turn = ""
    if parts.of_position and not reading.problem and not parts.ticks:
        in_turn = ", one after the other"
    seen = f"a step under {source} sees the {rows} rows of a batch {parts}{in_turn}"
    if why == STATISTICS:
        raise ModelError(f"{why}, and {seen}.", fix=f"{' and '.join(smallest)}.")
    because = "."
    if reading.problem and not reading.backward:
        because = f": {reading.problem}"
    error = LossError
    if smallest == (BY_COMPILER,):
        error = FullBatchError
    raise error(f"{why}, and {seen}{because}", fix=_fix(reading, smallest))


def _smallest_change(
    reading: Reading, parts: Parts, alone: bool, by_layer: bool
) -> tuple[str, ...]:
    """Return the fewest changes with which a step can compute the loss of the batch."""
    changes = {
        option("accumulate", 1): {"microbatches": 1},
        '[pipeline] schedule = "gpipe"': {"ticks": False},
        BY_COMPILER: {"workers": 1, "simulated": 1},
    }

    def mends(chosen: tuple[str, ...]) -> bool:
        fields = {}
        for name in chosen:
            fields.update(changes[name])
        changed = dataclasses.replace(parts, **fields)
        # XLA sees all rows, and all layers, at one position
        manual = changed.workers * changed.simulated > 1
        if changed == parts:
            return False
        if not changed.several:
            return True
        return not _refusal(reading, changed, alone and manual, by_layer and manual)

    counts = range(1, len(changes) + 1)
    choices = itertools.chain.from_iterable(itertools.combinations(changes, n) for n in counts)
    return next(filter(mends, choices))


def _fix(reading: Reading, smallest: tuple[str, ...]) -> str:
    """Return the fix of a loss, or of a metric with it, that the parts of a step cannot compute."""
    change = " and ".join(smallest)
    if reading.backward:
        return (
            f"{change}; or a function whose backward pass is a multiple of the gradient that it is "
            "given; loss=spmd.losses.of_parts(loss), if that of a part of the batch is what you "
            "want."
        )
    if reading.metrics:
        name = reading.metrics[0]
        return (
            f"{change}; or a metric that returns (sum, count), both summed over the rows it is "
            f'given, or one value per row; or an evaluation of it, fit(metrics={{"{name}": ...}}, '
            "eval_data=...), in place of returning it with the loss."
        )
    return (
        f"{change}; or a loss that returns (sum, count), both summed over the rows it is given, "
        "or one value per row that depends on no other row. Where the loss of a part is what you "
        "want: loss=spmd.losses.of_parts(loss)."
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
        what = "random numbers that each part has anew"
        if reading.weights:
            what = "the weights"
        place = describe(reading.weights or reading.trained[0])
        return f"{reading.subject} joins rows with {place}, which depends on {what}"
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
