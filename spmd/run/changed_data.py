"""The position of a run that resumes on other data, or on the same data in other batches or another
order.
"""

from collections.abc import Collection, Mapping
from typing import Any

from spmd.data.sources import RECORDS_SEED
from spmd.data.work_assignment import Position

SIZES = {"batch_size", "batches"}  # facts of data that say nothing about the order of its examples


def resumed_position(
    at: Position, saved: Mapping[str, Any], now: Mapping[str, Any], changed: Collection[str]
) -> tuple[Position, list[str]]:
    """The position of a run in changed data, and lines that say what has changed and what of the
    order is lost.

    If only the size of batches has changed, the run continues behind the examples that it took;
    where that is inside a batch, at the beginning of this batch. In another order the epoch begins
    again. The number of the epoch is kept.

    Args:
      at: the position in the data of the checkpoint.
      saved, now: what describes both.
      changed: names of what differs.

    Example:
      >>> saved = {"examples": 96, "batch_size": 32, "seed": 0}
      >>> resumed_position(Position(1, 2), saved, {**saved, "batch_size": 16}, ["batch_size"])[0]
      Position(epoch=1, batch=4, reader=None, parts=0, workers=0)
    """
    order = [name for name in changed if not name.startswith("contents")]
    lines = [f"{name} of the data have changed" for name in changed if name not in order]
    lines += [f"{name} was {saved.get(name)}, is {now.get(name)}" for name in order]
    streamed, epoch = "batches" in now, f"epoch {at.epoch + 1}"
    if streamed or RECORDS_SEED in now:
        order = [name for name in order if name != "seed"]  # which orders arrays alone
    if not order:
        return at, lines
    old, new = saved.get("batch_size", 0), now.get("batch_size", 0)
    examples = now.get("examples", float("inf"))
    taken, repeated = min(at.batch * old, examples), 0
    if SIZES.issuperset(order) and not at.workers and not (streamed and at.reader is not None):
        repeated = 0 if taken == examples else taken % new
        position = (
            Position(at.epoch + 1)
            if taken == examples
            else Position(at.epoch, taken // new, at.reader)
        )
        again = (
            f"; {repeated} that were taken are taken again, because no batch of {new} ends after "
            f"{taken}"
            if repeated
            else ""
        )
        same = ", if the data yields the same examples in the same order" if streamed else ""
        return position, [
            *lines,
            f"it continues behind the first {taken - repeated} examples of {epoch}{again}{same}",
        ]
    if not (at.batch or at.parts):
        return Position(at.epoch), [*lines, f"{epoch} begins, in the new order"]
    begun = (
        f"{at.parts} parts of batches" if at.workers else f"{at.batch} batches ({taken} examples)"
    )
    return Position(at.epoch), [
        *lines,
        f"{epoch} begins again, in the new order: what it had taken before, {begun}, is taken "
        "again",
    ]
