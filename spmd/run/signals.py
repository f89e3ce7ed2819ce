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
from spmd.distributed.launcher_protocol import TERMINATED, chosen_stop_signals, exit_at_once
from spmd.distributed.watchdog import SIGTERM_REASON, write_to_stderr

SIGINT_REASON = "interrupted"  # why a run stopped
EXIT_SECONDS = 2.0  # for Python to leave `fit` after SIGTERM, which it cannot while XLA compiles

# The signals that this process handles; None in a fork of it.
_handling: "_Signals | None" = None


class _Signals:
    """The signals of a run. `request` asks the run to stop; None: it has not begun."""

    def __init__(self) -> None:
        self.request: Callable[[str], None] | None = None
        self._left = False
        self._announced = set[int]()
        # Reentrant, since a handler may interrupt the handler of another signal.
        self._announcing = threading.RLock()
        self._ended = threading.Event()
        self._handled = list[signal.Signals]()
        self._pipe_output, self._pipe_input = os.pipe()
        # Python writes to it from a signal handler, where a full pipe must not block.
        os.set_blocking(self._pipe_input, False)

    def start(self) -> None:
        """Handle signals from now on."""
        # Inside another run the chosen signals stop that one, as SIGTERM does.
        chosen = [] if _handling else chosen_stop_signals()
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *chosen)
        self._before = {number: signal.getsignal(number) for number in numbers}
        # Others only where the default is in place: nohup ignores SIGHUP.
        always = (signal.SIGINT, *chosen)
        self._handled = [
            number
            for number, handler in self._before.items()
            if number in always or handler in (signal.SIG_DFL, exit_at_once)
        ]
        # Python writes the number of a signal to the pipe as soon as it arrives, and calls handlers
        # only when the main thread is between two of Python's instructions, which it is not while
        # XLA compiles.
        self._next_fd = signal.set_wakeup_fd(self._pipe_input, warn_on_full_buffer=False)
        for number in self._handled:
            signal.signal(number, self._handle)
        self._thread = threading.Thread(target=self._watch, name="spmd signals", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Handle signals as before `start`."""
        self._ended.set()
        for number in self._handled:
            signal.signal(number, self._before[number])
        signal.set_wakeup_fd(self._next_fd)
        # The zero ends the thread, which closes the pipe.
        os.write(self._pipe_input, b"\0")
        self._thread.join(timeout=EXIT_SECONDS)

    def _handle(self, number: int, frame: object) -> None:
        """Act on a signal. Python calls this in the main thread, between two of its own
        instructions.
        """
        del frame
        if number != signal.SIGINT:
            if self._terminate(number):
                raise SystemExit(TERMINATED)
        elif self.request is None:
            signal.default_int_handler(number, None)
        else:
            # Python's own handler: a second Ctrl-C interrupts, and the handler that was in place
            # before the run may not.
            signal.signal(number, signal.default_int_handler)
            self.request(SIGINT_REASON)

    def _terminate(self, number: int) -> bool:
        """Act on SIGTERM or its like, in the main thread or in this object's; returns whether this
        process has to exit now, alone.
        """
        watch = watchdog.current()
        # The main thread and this object's thread both come here; the second must not write before
        # the first has written this line. Later lines name SIGTERM.
        with self._announcing:
            if number != signal.SIGTERM and number not in self._announced:
                self._announced.add(number)
                write_to_stderr(f"spmd: {signal.Signals(number).name} acts as SIGTERM\n")
        if self.request is not None and watch.has_trained:
            self.request(SIGTERM_REASON)
            return False
        if not self._left:
            self._left = True
            watch.leave()
        return not watch.leaves_together

    def _watch(self) -> None:
        """Act on signals as soon as they arrive: the main thread may be in XLA, which compiles for
        minutes.
        """
        while (number := os.read(self._pipe_output, 1)) not in (b"", b"\0"):
            # Python has one such pipe: what was installed before gets each number from here.
            if self._next_fd != -1:
                with contextlib.suppress(OSError):
                    os.write(self._next_fd, number)
            if number[0] != signal.SIGINT and number[0] in self._handled:
                if self._terminate(number[0]) and not self._ended.wait(EXIT_SECONDS):
                    coordination.exit_now(TERMINATED)
        os.close(self._pipe_output)
        os.close(self._pipe_input)


def _reset_in_fork() -> None:
    """Restore the handlers in a fork, such as a worker of a data loader: it ends on SIGTERM as any
    process, and does not end the run.
    """
    global _handling
    if _handling is not None:
        # The pipe is shared with the process that forked, whose thread reads it.
        signal.set_wakeup_fd(-1)
        for number in _handling._handled:
            signal.signal(number, _handling._before[number])
        _handling = None


os.register_at_fork(after_in_child=_reset_in_fork)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Handle signals in the block: SIGINT raises KeyboardInterrupt, and SIGTERM ends all processes
    with code 143, until `stop_by`.

    A handler of the user's for SIGTERM or SIGHUP stays in place. Signals reach only the main
    thread; elsewhere this does nothing.
    """
    global _handling
    # Python installs handlers from the main thread only.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    outer = _handling
    signals = _Signals()
    signals.start()
    _handling = signals
    try:
        yield
    finally:
        signals.end()
        _handling = outer


def stop_by(request: Callable[[str], None]) -> None:
    """Call `request` on SIGINT from now on, inside `interruptible`; and on SIGTERM, once there is a
    step to save.

    A second SIGINT interrupts immediately, as usual; SIGTERM may repeat, since a launcher and a
    scheduler may both send it.
    """
    if _handling is not None and threading.current_thread() is threading.main_thread():
        _handling.request = request
