"""Colours of text, for terminals that show them."""

import os
import re
from collections.abc import Mapping
from typing import TextIO

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
