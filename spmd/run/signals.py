"""Turns Ctrl-C and SIGTERM into requests to stop (`RunControl.ask`): all processes stop after the same step.

`fit` then saves, if it has a checkpoint folder. After Ctrl-C it returns. After SIGTERM it exits with code 143 (`api.py`).
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

SIGINT_REASON, SIGTERM_REASON = "interrupted", "asked to end"  # why a run stopped


@contextlib.contextmanager
def interruptible(request_stop: Callable[[str], None]) -> Iterator[None]:
    """In the block SIGINT and SIGTERM call `request_stop`. A second SIGINT interrupts immediately, as usual; SIGTERM may repeat, since a
    launcher and a scheduler may both send it. A SIGTERM handler of the user's stays in place.

    Signals reach only the main thread; elsewhere this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def handle(number: int, frame: object) -> None:
        del frame
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)  # the previous handler may not interrupt
        request_stop(SIGINT_REASON if number == signal.SIGINT else SIGTERM_REASON)

    taken = [number for number, handler in before.items() if number == signal.SIGINT or handler == signal.SIG_DFL]
    for number in taken:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, before[number])
