"""Reads ahead in a thread: bounded, closed cleanly, and with the reader's errors raised in the
caller.
"""

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax

T = TypeVar("T")
_END = object()
# seconds for a reader to end; and between two looks at a request to stop
JOIN_SECONDS, POLL_SECONDS = 10.0, 0.1


@contextlib.contextmanager
def prefetch(
    items: Iterator[Any],
    function: Callable[[Any], T],
    depth: int,
    stops: Callable[[], bool] = lambda: False,
) -> Iterator[Iterator[T]]:
    """`map(function, items)`, with up to `depth` results made ahead of time by a thread.

    An error raised while reading is raised again in the caller, with the reader's traceback. On
    leaving the block the thread is stopped and joined; the iterator is closed in the thread that
    ran it, and an error it raises then is raised on leaving, unless the block has raised one of its
    own. While an item is waited for, the iterator ends if `stops()` is true.

    Example:
      >>> with prefetch(iter(range(3)), lambda x: x * x, depth=2) as squares:
      ...     list(squares)
      [0, 1, 4]
    """
    close = getattr(items, "close", lambda: None)
    if depth < 1:
        try:
            yield map(function, items)
        finally:
            close()
        return
    results: queue.Queue = queue.Queue(depth)
    stop, failed = threading.Event(), []

    def put(entry: tuple[Any, BaseException | None]) -> bool:
        while not stop.is_set():
            # With a time limit: a full queue must not keep the thread from a request to stop.
            with contextlib.suppress(queue.Full):
                results.put(entry, timeout=0.1)
                return True
        return False

    def read_items() -> None:
        try:
            for item in items:
                if not put((function(item), None)):
                    break
            else:
                put((_END, None))
        except BaseException as error:  # whatever it is, the caller must see it
            put((_END, error))
        # Here, because Python refuses to close a generator that runs in another thread.
        try:
            close()
        except BaseException as error:
            failed.append(error)

    # a daemon: a reader that never returns must not keep the process from ending
    thread = threading.Thread(target=read_items, name="spmd-prefetch", daemon=True)
    thread.start()
    try:
        yield _drain(results, stops)
    finally:
        stop.set()
        thread.join(timeout=JOIN_SECONDS)
        if thread.is_alive():
            logging.getLogger("spmd").warning(
                "the data's reader is still busy %g s after a request to stop; its thread is left "
                "running",
                JOIN_SECONDS,
            )
    if failed:
        raise failed[0]


def _drain(results: queue.Queue, stops: Callable[[], bool]) -> Iterator[Any]:
    while True:
        try:
            item, error = results.get(timeout=POLL_SECONDS)
        except queue.Empty:
            if stops():
                return
            continue
        if error is not None:
            raise error
        if item is _END:
            return
        yield item


def allow_transfers(items: Iterator[T]) -> Iterator[T]:
    """The same items; the code that reads them may transfer arrays, whatever the transfer guard
    says.
    """
    while True:
        # around one item only: the guard is of a thread, and the caller's code runs in between
        with jax.transfer_guard("allow"):
            try:
                item = next(items)
            except StopIteration:
                return
        yield item
