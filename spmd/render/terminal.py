"""Text in terminals: colours where they are shown, and progress in one line."""

import os
import re
import sys
from collections.abc import Mapping
from typing import TextIO

from spmd.render.html import terminal_width

CODES = {"red": 31, "green": 32, "yellow": 33}


def shows_colour(stream: TextIO) -> bool:
    """Return True if text for a stream is coloured: in a terminal that is not dumb; $NO_COLOR turns
    it off, and $FORCE_COLOR on.

    >>> import io
    >>> shows_colour(io.StringIO())
    False
    """
    # As https://no-color.org asks: where it is set, and not empty.
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or (
        os.environ.get("TERM") != "dumb" and stream.isatty()
    )


def paint(text: str, colours: Mapping[str, str], stream: TextIO) -> str:
    """Return a text in which words at the beginning of a line have a colour, if the stream shows
    colours.

    >>> import sys
    >>> paint("fits: 3 GiB", {"fits": "green"}, sys.stdout) in (
    ...     "fits: 3 GiB",
    ...     "\\x1b[1;32mfits\\x1b[0m: 3 GiB",
    ... )
    True
    """
    if not shows_colour(stream):
        return text
    for words, colour in colours.items():
        text = re.sub(
            rf"^{re.escape(words)}\b",
            f"\x1b[1;{CODES[colour]}m{words}\x1b[0m",
            text,
            flags=re.MULTILINE,
        )
    return text


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
