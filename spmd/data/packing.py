"""Documents packed into rows of one length."""

import bisect
import dataclasses

import numpy as np

from spmd.errors import OptionError, option

# rows with free space that the next document may go to: they hold neighbours in the files, which
# are read together
OPEN = 256


@dataclasses.dataclass(frozen=True)
class Rows:
    """Pieces of documents in rows of `length` tokens; a piece is a document, or a part of one that
    is longer than a row.

    Attributes:
      document: int64[pieces], ordered by row.
      start: int64[pieces], the piece's first token in its document.
      size: int64[pieces], tokens.
      first: int64[rows + 1], the first piece of each row.
      length: tokens of a row.
    """

    document: np.ndarray
    start: np.ndarray
    size: np.ndarray
    first: np.ndarray
    length: int

    def __len__(self) -> int:
        return len(self.first) - 1

    @property
    def padding(self) -> float:
        """The share of positions without a token."""
        return 1 - float(self.size.sum()) / max(len(self) * self.length, 1)

    def filled_up(self, multiple: int) -> "Rows":
        """Return these rows and rows without documents, so that `multiple` divides their number."""
        missing = -len(self) % multiple
        of_missing = np.repeat(self.first[-1:], missing)
        first = np.concatenate([self.first, of_missing])
        return dataclasses.replace(self, first=first)


def pack_documents(
    lengths: np.ndarray, length: int, *, pack: bool = True, split: bool = True
) -> Rows:
    """Rows of `length` tokens that hold all documents.

    Documents are taken in order. Each goes to the row in which it leaves the least space free (best
    fit), of the `OPEN` rows that were begun last and are not full. So the rows depend on lengths
    alone: not on an epoch, on processes or on a position, and a position in an order of rows is a
    number. In one pass and bounded memory they are nearly as full as those of best fit over all
    documents in decreasing order (Ding et al. 2024, arXiv:2404.10830).

    Args:
      lengths: int64[documents], tokens of each; one of 0 is in no row.
      pack: several documents in a row; False: each has its own.
      split: documents that are longer than a row continue in others; False: what is beyond is left
        out.

    Example:
      >>> rows = pack_documents(np.array([3, 5, 2, 9]), 6)
      >>> [rows.document[a:b].tolist() for a, b in zip(rows.first, rows.first[1:])]
      [[0, 2], [1], [3], [3]]
      >>> rows.size.tolist(), rows.start.tolist(), round(rows.padding, 3)
      ([3, 2, 5, 6, 3], [0, 0, 0, 0, 6], 0.208)
    """
    if length < 2:
        raise OptionError(
            f"{option('length', length)}: a row needs a token and the next one.", fix="at least 2."
        )
    count = (lengths > 0).astype(np.int64)
    if split:
        count = -(-lengths // length)
    document = np.repeat(np.arange(len(lengths)), count)
    first_pieces = np.cumsum(count) - count
    number_in_document = np.arange(len(document)) - np.repeat(first_pieces, count)
    start = number_in_document * length
    size = np.minimum(lengths[document] - start, length)
    row = np.arange(len(size))
    if pack:
        row = _best_fit(size, length)
    # Stable: the pieces of a row stay in the order of the documents.
    order = np.argsort(row, kind="stable")
    # Without `initial`, the maximum of an empty array is an error.
    num_rows = int(row.max(initial=-1)) + 1
    first = np.searchsorted(row[order], np.arange(num_rows + 1))
    return Rows(document[order], start[order], size[order], first, length)


def _best_fit(sizes: np.ndarray, length: int) -> np.ndarray:
    """int64[pieces]: the row of each."""
    rows, count = np.empty(len(sizes), np.int64), 0
    unfilled: list[tuple[int, int]] = []  # (free space, row), ascending
    for at, size in enumerate(sizes.tolist()):
        # -1 is before every row, so of equal spaces the row that was begun first is found.
        place = bisect.bisect_left(unfilled, (size, -1))
        if place < len(unfilled):
            space, row = unfilled.pop(place)
        else:
            space, row, count = length, count, count + 1
        rows[at] = row
        if space > size:
            bisect.insort(unfilled, (space - size, row))
            if len(unfilled) > OPEN:
                del unfilled[0]  # the fullest
    return rows


def unpack(batch: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Return the token ids of each document or piece of a packed batch, row by row.

    >>> unpack({"tokens": np.array([[5, 6, 7, 0]]), "segment_ids": np.array([[1, 2, 2, 0]])})
    [array([5]), array([6, 7])]
    """
    pieces = []
    for tokens, segments in zip(batch["tokens"], batch["segment_ids"], strict=True):
        for segment in range(1, segments.max(initial=0) + 1):
            pieces.append(tokens[segments == segment])
    return pieces
