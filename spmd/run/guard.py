"""Ctrl-C as a request: the step in hand is finished, what there is is saved, and `fit` returns it."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

INTERRUPTED = "interrupted"  # the stop reason that Ctrl-C gives


@contextlib.contextmanager
def interruptible(request_stop: Callable[[str], None]) -> Iterator[None]:
    """Inside the block the first SIGINT calls `request_stop`; a second one interrupts at once, as usual.

    Signals reach only the main thread; elsewhere this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)

    def handle(number: int, frame: object) -> None:
        del number, frame
        signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever handler was there before, maybe none that interrupts
        request_stop(INTERRUPTED)

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
