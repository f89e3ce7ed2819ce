"""Batches of records in files: read by number and ahead of time by several threads, in an order
that does not depend on them.
"""

import abc
import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import logging
import numbers
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from spmd.data import data_hash
from spmd.data.shuffle import RecordOrder
from spmd.errors import (
    DataError,
    OptionError,
    check_integer,
    did_you_mean,
    join_names,
    option,
    quoted,
)

S = TypeVar("S")
T = TypeVar("T")
# arrays [rows, ...], and bool[rows]: whether a row was readable
RecordBatch = tuple[dict[str, np.ndarray], np.ndarray]

AHEAD = 2  # pending tasks for each thread
BYTES = 1 << 22  # of arrays, up to which small batches are read together


@dataclasses.dataclass(frozen=True)
class Field:
    """One array of a record: its shape and dtype."""

    shape: tuple[int, ...]
    dtype: np.dtype

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


class FileFormat(abc.ABC):
    """A file format: reads records by number.

    Attributes:
      file_kind, record_kind: the names of a file and of a record in messages.
      paths: the files.
      counts: records of each file.
      sizes: bytes of each file.
      fields: the arrays of a record.
      together: the number of records up to which small batches are read together.
    """

    file_kind: str
    record_kind: str = "record"
    paths: tuple[str, ...]
    counts: list[int]
    sizes: Sequence[int]
    fields: dict[str, Field]
    together: int = 1024

    def read_records(self, records: np.ndarray) -> tuple[dict[str, np.ndarray], dict[int, str]]:
        """Arrays [n, ...] of the records int64[n] in ascending order; and by position, why a record
        cannot be read.
        """
        leaves = {}
        for name, field in self.fields.items():
            leaves[name] = np.zeros((len(records), *field.shape), field.dtype)
        bad: dict[int, str] = {}
        self.read_into(leaves, records, bad)
        return leaves, bad

    @abc.abstractmethod
    def read_into(
        self, leaves: dict[str, np.ndarray], records: np.ndarray, bad: dict[int, str]
    ) -> None:
        """Fill arrays of zeros, and `bad`, as `read_records` returns them. Several threads may call
        it concurrently.
        """

    def where(self, record: int) -> str:
        """The file of a record and its position there, for messages."""
        file = int(np.searchsorted(np.cumsum(self.counts), record, "right"))
        number = record - sum(self.counts[:file])
        return f"{self.paths[file]}, {self.record_kind} {number}"


@dataclasses.dataclass(frozen=True)
class ReadOptions:
    """Options that all file formats share, as the functions that read files document them;
    `workers=0` is the calling thread.
    """

    batch_size: int
    shuffle: bool | int = True
    seed: int = 0
    workers: int = 0
    on_error: str = "stop"

    def __post_init__(self):
        for name, least in (("batch_size", 1), ("workers", 0), ("seed", 0)):
            check_integer(getattr(self, name), name, least)
            # numpy integers cannot be stored as JSON
            object.__setattr__(self, name, int(getattr(self, name)))
        if self.seed >= 2**63:
            raise OptionError(f"{option('seed', self.seed)}.", fix="a whole number below 2**63.")
        if self.on_error not in ("stop", "skip"):
            raise OptionError(
                f"{option('on_error', quoted(self.on_error))}.",
                fix=f"{did_you_mean(str(self.on_error), ('stop', 'skip'))}",
            )
        if isinstance(self.shuffle, numbers.Integral) and not isinstance(self.shuffle, bool):
            object.__setattr__(self, "shuffle", int(self.shuffle))
        RecordOrder(0, self.shuffle, self.seed)


class Records:
    """Batches of records, from `spmd.data.csv` and the like: for `spmd.fit`, or for your own loop.

    Iterating yields the batches of the first epoch, dicts of arrays [rows, ...]; `epoch(number)`
    those of any. The last batch of an epoch may be short. A position is two numbers, the epoch and
    the batches taken from it. They determine the next records, for any number of workers and
    processes.

    Args:
      format: of the files; `spmd.data.csv` and the like make it.
      reading: batch size, order, threads, and what happens to records that cannot be read.

    Attributes:
      examples: the records of all files.
      fields: by name, shape and dtype of what one record has.
      steps_per_epoch: batches, a short last one counted.

    Example:
      >>> import pathlib, spmd, tempfile
      >>> file = pathlib.Path(tempfile.mkdtemp()) / "a.csv"
      >>> _ = file.write_text("x,y\\n1,2\\n3,4\\n5,6\\n")
      >>> records = spmd.data.csv(file, batch_size=2, shuffle=False)
      >>> records.examples, records.steps_per_epoch, [batch["x"].tolist() for batch in records]
      (3, 2, [[1, 3], [5]])
    """

    def __init__(self, format: FileFormat, reading: ReadOptions):
        self.format, self.reading = format, reading
        self.examples = sum(format.counts)
        if not self.examples:
            paths = join_names(format.paths, 3)
            raise DataError(
                f"no {format.file_kind} has a record: {paths}.",
                fix="look at what they were written from.",
            )
        self._contents = data_hash.of_files(format.paths, format.sizes)
        self.order = RecordOrder(self.examples, reading.shuffle, reading.seed)
        self.fields = format.fields

    @property
    def batch_size(self) -> int:
        """Records of a full batch, over all processes."""
        return self.reading.batch_size

    @property
    def steps_per_epoch(self) -> int:
        """Batches of an epoch."""
        return -(-self.examples // self.batch_size)

    def __len__(self) -> int:
        return self.steps_per_epoch

    def __repr__(self) -> str:
        files = f"{len(self.format.paths)} {self.format.file_kind}"
        if len(self.format.paths) > 1:
            files += "s"
        batches = f"{self.steps_per_epoch:,} batches of {self.batch_size}"
        lines = [f"{self.examples:,} records of {files} in {batches}"]
        width = max(map(len, self.fields))
        for name, field in self.fields.items():
            lines.append(f"    {name.ljust(width)}  {field}")
        return "\n".join(lines)

    def __iter__(self) -> "Batches":
        return self.epoch(0)

    def epoch(self, number: int, start: int = 0) -> "Batches":
        """The batches of one epoch, from batch `start` on."""
        return Batches(self, number, start)

    def facts(self) -> dict[str, Any]:
        """Return the facts that must be equal for a run to resume with the same data; the contents
        as a hash (`data_hash.of_files`).
        """
        records_of_files = ""
        if len(self.format.counts) <= 8:
            records_of_files = ", ".join(map(str, self.format.counts))
        return {
            "examples": self.examples,
            "files": len(self.format.paths),
            "records of each file": records_of_files,
            "bytes": sum(self.format.sizes),
            "contents": self._contents,
            "batch_size": self.batch_size,
            "shuffle": self.reading.shuffle,
            "seed": self.reading.seed,
        }

    def read_epoch(
        self, number: int, start: int = 0, local_rows: np.ndarray | None = None
    ) -> Iterator[RecordBatch]:
        """The batches of an epoch, and bool[rows]: whether a row was readable.

        Args:
          local_rows: the rows of a full batch to read, ascending; all others are zeros. None: all.
            Short batches are read entirely.
        """
        order, size = self.order.epoch(number), self.batch_size
        parts = [order[first : first + size] for first in range(start * size, self.examples, size)]
        rows = size
        if local_rows is not None:
            rows = len(local_rows)
        groups = self.group_batches(parts, rows)
        read_group = functools.partial(self.read_batches, local_rows=local_rows)
        return flatten_groups(map_ahead(read_group, groups, self.reading.workers))

    def group_batches(self, parts: list[T], size: int) -> Iterator[list[T]]:
        """Groups of batches of `size` rows that are read together; the first batch is alone, so
        that it arrives early.
        """
        record_bytes = 0
        for field in self.fields.values():
            record_bytes += field.dtype.itemsize * int(np.prod(field.shape))
        most_records = min(self.format.together, BYTES // max(record_bytes, 1))
        # Enough groups for all threads: fewer larger ones would leave some without work.
        tasks = max(AHEAD * self.reading.workers, 1)
        most = max(1, min(most_records // max(size, 1), len(parts) // tasks))
        count, at = 1, 0
        while at < len(parts):
            yield parts[at : at + count]
            at, count = at + count, min(2 * count, most)

    def read_batches(
        self, parts: list[np.ndarray], local_rows: np.ndarray | None = None
    ) -> list[RecordBatch | Exception]:
        """Several batches of records int64[n], read together; or for a batch its error, to be
        raised when it is its turn.

        With each batch comes bool[n]: whether a record was readable; if not, its row is a copy of a
        readable one, or zeros.
        """
        local_parts = [self._local_ids(ids, local_rows) for ids in parts]
        records = np.concatenate(local_parts)
        # Ascending: neighbours are read together, and a row group is read once.
        ascending = np.argsort(records)
        try:
            leaves, bad = self.format.read_records(records[ascending])
        except Exception as error:
            # such as a file that has shrunk; read each batch alone to find the one with the error
            if len(parts) == 1:
                return [error]
            return [self.read_batches([ids], local_rows)[0] for ids in parts]
        rows = np.empty(len(records), np.int64)
        rows[ascending] = np.arange(len(records))
        batches, at = [], 0
        for ids, local_ids in zip(parts, local_parts, strict=True):
            positions = rows[at : at + len(local_ids)]
            at += len(local_ids)
            bad_rows: dict[int, str] = {}
            if bad:
                for place, row in enumerate(positions.tolist()):
                    if row in bad:
                        bad_rows[place] = bad[row]
            batch_rows = None
            if len(local_ids) < len(ids):
                batch_rows = local_rows
            try:
                batch_leaves = {name: leaf[positions] for name, leaf in leaves.items()}
                batches.append(self._batch(ids, batch_rows, batch_leaves, bad_rows))
            except DataError as error:
                batches.append(error)
        return batches

    def _local_ids(self, ids: np.ndarray, local_rows: np.ndarray | None) -> np.ndarray:
        """Return the records of a batch that this process reads; all of a short batch."""
        if local_rows is None or len(ids) < self.batch_size:
            return ids
        return ids[local_rows]

    def _batch(
        self,
        ids: np.ndarray,
        local_rows: np.ndarray | None,
        leaves: dict[str, np.ndarray],
        bad: dict[int, str],
    ) -> RecordBatch:
        """One batch of `leaves`, whose rows at `bad` could not be read."""
        good, rows = np.ones(len(ids), bool), np.arange(len(ids))
        if local_rows is not None:
            rows = local_rows
        if bad:
            if self.reading.on_error == "stop":
                by_record = {int(ids[rows[at]]): why for at, why in bad.items()}
                raise self._bad_records(by_record)
            readable = [at for at in range(len(rows)) if at not in bad]
            bad_rows = list(bad)
            for leaf in leaves.values():
                leaf[bad_rows] = 0
                if readable:
                    leaf[bad_rows] = leaf[readable[0]]
            good[rows[bad_rows]] = False
        if local_rows is None:
            return leaves, good
        full = {}
        for name, leaf in leaves.items():
            full[name] = np.zeros((len(ids), *leaf.shape[1:]), leaf.dtype)
            full[name][local_rows] = leaf
        return full, good

    def _bad_records(self, bad: dict[int, str]) -> DataError:
        """Return the error of the first of several records that cannot be read."""
        record = min(bad)
        more = ""
        if len(bad) > 1:
            more = f" ({len(bad) - 1} more of this batch cannot be read either.)"
        fix = (
            f"repair the file, or {option('on_error', quoted('skip'))}, which leaves such "
            "records out and counts them"
        )
        return DataError(f"{self.format.where(record)}: {bad[record]}{more}", fix=f"{fix}.")


class Batches:
    """An iterator over the batches of one epoch, whose position can be saved.

    Args:
      records: whose batches these are.
      epoch: from 0.
      start: batches of the epoch that are left out at its beginning.

    Example:
      >>> import numpy as np, spmd, tempfile, pathlib
      >>> file = pathlib.Path(tempfile.mkdtemp()) / "a.csv"
      >>> _ = file.write_text("x,y\\n" + "".join(f"{n},{n / 2}\\n" for n in range(6)))
      >>> batches = iter(spmd.data.csv(file, batch_size=2, shuffle=False))
      >>> next(batches)
      {'x': array([0, 1], dtype=int32), 'y': array([0. , 0.5], dtype=float32)}
      >>> state = batches.get_state()
      >>> _ = next(batches)
      >>> batches.set_state(state)
      >>> next(batches)["x"].tolist()
      [2, 3]
    """

    def __init__(self, records: Records, epoch: int, start: int = 0):
        check_integer(epoch, "epoch", 0)
        check_integer(start, "start", 0)
        self._records = records
        self._move_to(epoch, start, 0)

    def _move_to(self, epoch: int, batch: int, skipped: int) -> None:
        self.number, self.taken, self.skipped = epoch, batch, skipped
        self._batches: Any = None

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        if self._batches is None:
            self._batches = self._records.read_epoch(self.number, self.taken)
        while True:  # until a batch has a record that could be read
            try:
                leaves, good = next(self._batches)
            except StopIteration:
                warn_skipped(self._records, self.number, self.skipped)
                # Another `next` after the end warns no more.
                self.skipped = 0
                raise
            self.taken += 1
            self.skipped += int((~good).sum())
            if good.all():
                return leaves
            if good.any():
                return {name: leaf[good] for name, leaf in leaves.items()}

    def get_state(self) -> dict[str, Any]:
        """The position, as values that JSON can store."""
        return {
            "epoch": self.number,
            "batch": self.taken,
            "skipped": self.skipped,
            "data": self._records.facts(),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Resume from the position of another iterator over the same records.

        Raises:
          DataError: the records, the batch size or the order differ.
        """
        if not _is_state(state):
            raise DataError(
                f"this is no state of records: {state!r:.200}.", fix="what get_state() has given."
            )
        facts = self._records.facts()
        changes = []
        for name, was in state["data"].items():
            now = facts.get(name)
            if now != was:
                changes.append(f"{name} was {was!r}, and is {now!r}")
        if changes:
            raise DataError(
                f"this state is of other data: {'; '.join(changes)}.",
                fix="the files and options that it was taken with.",
            )
        # First: threads may be reading ahead from the old position.
        self.close()
        self._move_to(state["epoch"], state["batch"], state["skipped"])

    def close(self) -> None:
        """Stop the threads that read ahead."""
        if self._batches is not None:
            self._batches.close()
        self._batches = None


def _is_state(state: Any) -> bool:
    """Return True for a value such as `Batches.get_state` returns."""
    if not isinstance(state, dict) or set(state) != {"epoch", "batch", "skipped", "data"}:
        return False
    counts = [state[name] for name in ("epoch", "batch", "skipped")]
    are_counts = all(type(count) is int and count >= 0 for count in counts)
    return are_counts and isinstance(state["data"], dict)


def warn_skipped(records: Records, epoch: int, skipped: int) -> None:
    """Warn of records that were skipped in an epoch."""
    if skipped:
        text = (
            "epoch %d did without %d of %d records, which could not be read "
            f"({option('on_error', quoted('skip'))})."
        )
        logging.getLogger("spmd").warning(text, epoch + 1, skipped, records.examples)


def map_ahead(
    function: Callable[[S], T], items: Iterable[S], workers: int
) -> Generator[T, None, None]:
    """`map(function, items)`, computed ahead of time by `workers` threads; an error is raised at
    its item.

    Example:
      >>> list(map_ahead(lambda n: n * n, range(5), 3))
      [0, 1, 4, 9, 16]
    """
    if workers == 0:
        yield from map(function, items)
        return
    pool = concurrent.futures.ThreadPoolExecutor(workers, "spmd-data")
    waiting: collections.deque[concurrent.futures.Future[T]] = collections.deque()
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) >= AHEAD * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        # Without cancel_futures, the pending tasks would all be computed first.
        pool.shutdown(wait=True, cancel_futures=True)


def flatten_groups(
    groups: Generator[list[RecordBatch | Exception], None, None],
) -> Iterator[RecordBatch]:
    """The batches of groups, one by one; an error is raised in place of its batch."""
    # A caller may stop early. This ends the threads then, and not when the generator is collected.
    with contextlib.closing(groups):
        for batch in itertools.chain.from_iterable(groups):
            if isinstance(batch, Exception):
                raise batch
            yield batch
