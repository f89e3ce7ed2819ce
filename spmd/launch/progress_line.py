"""Progress of a command in one line of a terminal."""

import sys

from spmd.render.html import terminal_width


def show_progress(line: str) -> None:
    """Show progress in one line of a terminal; "" clears it."""
    # A file or a pipe would keep the control characters.
    if sys.stderr.isatty():
        print(
            f"\r\x1b[K{line[: min(terminal_width() - 1, 120)]}", end="", file=sys.stderr, flush=True
        )


def show_lines(line: str) -> None:
    """Show progress in one line of a terminal, and elsewhere, as in the log of a job, in a line for
    each call.
    """
    if line and not sys.stderr.isatty():
        print(line, file=sys.stderr, flush=True)
    show_progress(line)
