"""Reads an epoch's batches, and again from the same batch where reading failed, as on a network
file system that was away.
"""

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

from spmd.data.batches import HostBatch
from spmd.data.sources import IterableSource, Source
from spmd.errors import SpmdError, first_line

PAUSES = (1.0, 2.0, 4.0, 8.0)  # seconds before the first attempts; then always the last


def read_epoch(
    source: Source,
    number: int,
    start: int = 0,
    position: Any = None,
    *,
    retries: int = 0,
    stops: Callable[[], bool] = lambda: False,
) -> Iterator[HostBatch]:
    """The batches of an epoch from batch `start` on; after an error, the source is opened again at
    the batch that could not be read.

    Args:
      source: of batches on the host.
      position: the source's state before batch `start`, if it has one.
      retries: how often in a row; 0: never. An iterable whose error says that its batches are
        wrong, and an iterator that cannot be opened again, are not read again.
      stops: asked during pauses; True, where the run is to stop, ends them.

    Raises:
      Exception: the first error at a batch that could not be read `retries` more times.

    Example:
      >>> import numpy as np
      >>> from spmd.data.sources import ArraySource
      >>> source = ArraySource({"x": np.arange(6)}, examples=6, batch_size=4, shuffle=False, seed=0)
      >>> [batch.rows for batch in read_epoch(source, 0, retries=3)]
      [4, 2]
    """
    errors: list[Exception] = []  # at the batch that comes next
    while True:
        batches = source.epoch(number, start, position)
        try:
            for batch in batches:
                yield batch
                start, position = start + 1, batch.position
                errors.clear()
            return
        except Exception as error:
            errors.append(error)
            if isinstance(source, IterableSource) and (
                isinstance(error, SpmdError) or not source.can_read_again(position)
            ):
                retries = 0  # data of a wrong shape stays so, and an iterator may have moved on
        finally:
            # Ends threads that read ahead, before the source is opened again.
            batches.close()  # type: ignore[attr-defined]
        first, last = errors[0], errors[-1]
        if len(errors) > retries:
            if first_line(last) != first_line(first):
                first.add_note(f"spmd: and when it was read again: {first_line(last)}")
            raise first
        seconds = PAUSES[min(len(errors), len(PAUSES)) - 1]
        where = (
            f"batch {start + 1} of epoch {number + 1}, or one before it, could not be read "
            f"({first_line(last)})"
        )
        logging.getLogger("spmd").warning(
            "%s; it is read again in %g s, attempt %d of %d.", where, seconds, len(errors), retries
        )
        until = time.monotonic() + seconds
        # In short sleeps, so that a request to stop is seen.
        while time.monotonic() < until and not stops():
            time.sleep(0.05)
