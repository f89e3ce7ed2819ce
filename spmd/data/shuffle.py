"""The order of records: a function of the seed and the epoch's number alone, so that a position in
it is a number.
"""

import dataclasses

import numpy as np

from spmd.errors import OptionError, option, type_name

BLOCKS = 16  # runs of neighbouring records in a window


@dataclasses.dataclass(frozen=True)
class RecordOrder:
    """The order of `records` records in each epoch.

    `shuffle` is True (all orders are equally likely), False (the order of the files), or a window
    W: then runs of W / 16 neighbours come in a random order, and each W consecutive records of it
    are shuffled. The effect is that of a shuffle queue with `min_after_dequeue`, and files are read
    in blocks as long as a run; but the position is a number, not the contents of a queue.

    Example:
      >>> RecordOrder(6, False, seed=0).epoch(3).tolist()
      [0, 1, 2, 3, 4, 5]
      >>> sorted(RecordOrder(6, 4, seed=0).epoch(3).tolist())
      [0, 1, 2, 3, 4, 5]
    """

    records: int
    shuffle: bool | int
    seed: int

    def __post_init__(self):
        is_window = isinstance(self.shuffle, int) and self.shuffle >= 2
        if not isinstance(self.shuffle, bool) and not is_window:
            raise OptionError(
                f"{option('shuffle', repr(self.shuffle))} is {type_name(self.shuffle)}.",
                fix="True, False, or a window of at least 2 records.",
            )

    def epoch(self, number: int) -> np.ndarray:
        """int64[records]: the record at each position. With True it is the order of arrays with
        this seed.
        """
        if self.shuffle is False:
            return np.arange(self.records)
        # The key has both numbers, so the streams of neighbouring seeds and epochs are independent.
        rng = np.random.Generator(np.random.Philox(key=np.array([self.seed, number], np.uint64)))
        if self.shuffle is True:
            return rng.permutation(self.records)
        run = max(1, self.shuffle // BLOCKS)
        firsts = rng.permutation(-(-self.records // run)) * run
        order = (firsts[:, None] + np.arange(run)).ravel()
        order = order[order < self.records]
        for first in range(0, self.records, self.shuffle):
            rng.shuffle(order[first : first + self.shuffle])
        return order
