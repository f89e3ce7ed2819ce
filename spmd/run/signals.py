"""Turns Ctrl-C and SIGTERM into requests to stop (`RunControl.ask`): all processes stop after the
same step.

`fit` then saves, if it has a checkpoint folder. After Ctrl-C it returns. After SIGTERM it exits
with code 143 (`api.py`), and where a run has nothing to save yet, as before its first step, it does
so immediately, also while XLA compiles. SIGHUP, and the signals that $SPMD_STOP_SIGNALS names, act
as SIGTERM.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

from spmd.distributed import coordination, watchdog
from spmd.distributed.exit_codes import TERMINATED
from spmd.distributed.stop_signals import chosen_stop_signals
from spmd.distributed.watchdog import SIGTERM_REASON, write_to_stderr

SIGINT_REASON = "interrupted"  # why a run stopped
EXIT_SECONDS = 2.0  # for Python to leave `fit` after SIGTERM, which it cannot while XLA compiles

_handling: "_Signals | None" = None  # in this process, not in a fork of it


class _Signals:
    """The signals of a run. `request` asks the run to stop; None: it has not begun."""

    def __init__(self) -> None:
        self.request: Callable[[str], None] | None = None
        self._left, self._announced = False, set[int]()
        # a handler may interrupt the handler of another signal
        self._announcing = threading.RLock()
        self._ended, self._taken = threading.Event(), list[signal.Signals]()
        self._read, self._written = os.pipe()
        os.set_blocking(self._written, False)

    def start(self) -> None:
        """Handle signals from now on."""
        # inside another run they stop that one, as SIGTERM does
        chosen = [] if _handling else chosen_stop_signals()
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *chosen)
        self._before = {number: signal.getsignal(number) for number in numbers}
        # others only where the default is in place: nohup ignores SIGHUP
        always = (signal.SIGINT, *chosen)
        self._taken = [
            number
            for number, handler in self._before.items()
            if number in always or handler == signal.SIG_DFL
        ]
        self._next_fd = signal.set_wakeup_fd(self._written, warn_on_full_buffer=False)
        for number in self._taken:
            signal.signal(number, self._handle)
        self._thread = threading.Thread(target=self._watch, name="spmd signals", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Handle them as before."""
        self._ended.set()
        for number in self._taken:
            signal.signal(number, self._before[number])
        signal.set_wakeup_fd(self._next_fd)
        os.write(self._written, b"\0")  # ends the thread, which closes the pipe
        self._thread.join(timeout=EXIT_SECONDS)

    def _handle(self, number: int, frame: object) -> None:
        """The handler, which Python calls in the main thread, between two of its own
        instructions.
        """
        del frame
        if number != signal.SIGINT:
            if self._terminate(number):
                raise SystemExit(TERMINATED)
        elif self.request is None:
            signal.default_int_handler(number, None)
        else:
            # a second one interrupts; the previous handler may not
            signal.signal(number, signal.default_int_handler)
            self.request(SIGINT_REASON)

    def _terminate(self, number: int) -> bool:
        """Act on SIGTERM or its like, in the main thread or in this object's; returns whether this
        process has to exit now, alone.
        """
        watch = watchdog.current()
        # both threads come here, and the second one must not be ahead of the first one's line
        with self._announcing:
            if number != signal.SIGTERM and number not in self._announced:
                self._announced.add(number)
                # which later lines name
                write_to_stderr(f"spmd: {signal.Signals(number).name} acts as SIGTERM\n")
        if self.request is not None and watch.has_trained:
            self.request(SIGTERM_REASON)
            return False
        if not self._left:
            self._left = True
            watch.leave()
        return not watch.leaves_together

    def _watch(self) -> None:
        """See signals as soon as they arrive: the main thread may be in XLA, which compiles for
        minutes.
        """
        while (number := os.read(self._read, 1)) not in (b"", b"\0"):
            if self._next_fd != -1:
                with contextlib.suppress(OSError):
                    os.write(self._next_fd, number)
            if number[0] != signal.SIGINT and number[0] in self._taken:
                if self._terminate(number[0]) and not self._ended.wait(EXIT_SECONDS):
                    coordination.exit_now(TERMINATED)
        os.close(self._read)
        os.close(self._written)


def _reset_in_fork() -> None:
    """A fork, such as a worker of a data loader, ends on SIGTERM as any process, and not the
    run.
    """
    global _handling
    if _handling is not None:
        signal.set_wakeup_fd(-1)
        for number in _handling._taken:
            signal.signal(number, _handling._before[number])
        _handling = None


os.register_at_fork(after_in_child=_reset_in_fork)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """In the block SIGINT raises KeyboardInterrupt, and SIGTERM ends all processes with code 143,
    until `stop_by`.

    A handler of the user's for SIGTERM or SIGHUP stays in place. Signals reach only the main
    thread; elsewhere this does nothing.
    """
    global _handling
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    outer, signals = _handling, _Signals()
    signals.start()
    _handling = signals
    try:
        yield
    finally:
        signals.end()
        _handling = outer


def stop_by(request: Callable[[str], None]) -> None:
    """Inside `interruptible`: from now on SIGINT calls `request`, and SIGTERM too, once there is a
    step to save.

    A second SIGINT interrupts immediately, as usual; SIGTERM may repeat, since a launcher and a
    scheduler may both send it.
    """
    if _handling is not None and threading.current_thread() is threading.main_thread():
        _handling.request = request
