"""Pictures that callbacks give to loggers: each is a PNG or SVG file in the run's folder, and a log
record names it.
"""

import io
import itertools
import os
import re
import struct
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from spmd.base.output_files import replace_atomically
from spmd.base.user_paths import as_path, make_folder, run_file, wrap_os_errors
from spmd.errors import OptionError, short_repr, type_name

FOLDER = "pictures"  # in the run's folder
COLOURS = {1: 0, 2: 4, 3: 2, 4: 6}  # PNG's colour type, by number of channels
MAGIC = b"\x89PNG\r\n\x1a\n"
HEADER = 33  # bytes of a PNG file up to the end of its first chunk, IHDR
LONGEST = 200  # characters of a file's name before its step; file systems allow 255 in all


def write_picture(
    folder: Path, name: str, step: int, picture: Any, source: str | None = None
) -> Path:
    """Write a picture to the run's folder, in place of an earlier one of this name and step;
    returns its path in it.

    Args:
      name: a name with other characters than ASCII letters, digits, "_" and "-", or a long one, has
        a checksum in that of the file.
      picture: a matplotlib figure; a picture of `spmd.viz`; an array of uint8, [height, width] or
        [height, width, channels], of 1 to 4 channels; or the path of a PNG or SVG file, which is
        copied.
      source: what gives the picture, for errors; None: `log_picture`.

    Raises:
      OptionError: it is none of these, `name` is no name, or the file cannot be read or written.
      CheckpointError: a link is in the place of the file.
    """
    _check_name(name)
    content, suffix = _as_file(picture, source or f"log_picture({short_repr(name)})")
    path = Path(FOLDER) / f"{_stem(name)}-{step:08d}{suffix}"
    make_folder(folder / FOLDER, OptionError)
    with wrap_os_errors(folder / path, OptionError):
        target = run_file(folder, str(path))
        with replace_atomically(target, durable=False) as part:
            part.write_bytes(content)
    return path


def unused_name(name: str, used: Collection[str]) -> str:
    """Return the name, with a number from 2 if it is used already.

    Raises:
      OptionError: it is no name.

    Example:
      >>> unused_name("confusion", ["confusion", "confusion_2"])
      'confusion_3'
    """
    _check_name(name)
    if name not in used:
        return name
    numbered = (f"{name}_{number}" for number in itertools.count(2))
    return next(candidate for candidate in numbered if candidate not in used)


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not name.strip():
        raise OptionError(
            f"log_picture: name={short_repr(name)}.", fix='a name, such as "confusion".'
        )


def _stem(name: str) -> str:
    """Return a name that every file system accepts; other names have other ones."""
    stem = re.sub(r"[^A-Za-z0-9_-]", "_", name)[:LONGEST]
    if stem == name:
        return stem
    # Two names that have one stem get two files.
    return f"{stem}_{zlib.crc32(name.encode(errors='surrogatepass')):08x}"


def _as_file(picture: Any, source: str) -> tuple[bytes, str]:
    """Return the contents of a picture's file, and its suffix."""
    if isinstance(picture, str | os.PathLike):
        return _read_picture(as_path(picture, f"{source}: the picture"), source)
    # A picture of `spmd.viz` has a figure of matplotlib.
    figure = getattr(picture, "figure", picture)
    if callable(getattr(figure, "savefig", None)):
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
        return buffer.getvalue(), ".png"
    array = np.asarray(picture) if hasattr(picture, "dtype") else None
    if array is None or not _is_drawable(array):
        kind = type_name(picture) if array is None else f"{array.dtype}{list(array.shape)}"
        fix = (
            "a matplotlib figure, a path, or an array of uint8 [height, width] or [height, width, "
            "1 to 4 channels]."
        )
        raise OptionError(f"{source}: the picture is {kind}.", fix=fix)
    return png(array), ".png"


def _read_picture(path: Path, source: str) -> tuple[bytes, str]:
    """Return the contents of a PNG or SVG file, and its suffix."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise OptionError(
            f"{source}: {path} cannot be read: {error.strerror}.", fix="the path of a file."
        ) from error
    if content.startswith(MAGIC):
        # Loggers read the size of a picture from the header, and would fail on a file without one.
        if len(content) < HEADER or content[12:16] != b"IHDR":
            raise OptionError(
                f"{source}: {path} is a damaged PNG file: it has no header.",
                fix="a file that can be opened, or an array.",
            )
        return content, ".png"
    if b"<svg" in content[:4096]:
        return content, ".svg"
    raise OptionError(
        f"{source}: {path} is neither a PNG nor an SVG file.",
        fix="a file of one of these, or an array.",
    )


def _is_drawable(array: np.ndarray) -> bool:
    """Return whether an array is a picture."""
    if array.dtype != np.uint8 or array.ndim not in (2, 3) or array.size == 0:
        return False
    return 1 <= _channels(array) <= 4


def _channels(array: np.ndarray) -> int:
    return 1 if array.ndim == 2 else array.shape[2]


def png(array: np.ndarray) -> bytes:
    """Return an array of uint8 [height, width] or [height, width, channels] as a PNG file (W3C,
    Portable Network Graphics, second edition).

    Example:
      >>> size(png(np.zeros((2, 3, 3), np.uint8)))
      (3, 2)
    """
    height, width = array.shape[:2]

    def chunk(kind: bytes, content: bytes) -> bytes:
        length = struct.pack(">I", len(content))
        checksum = struct.pack(">I", zlib.crc32(kind + content))
        return length + kind + content + checksum

    rows = np.ascontiguousarray(array).reshape(height, -1)
    # In a PNG file each row begins with its filter, 0 for none.
    unfiltered = np.concatenate([np.zeros((height, 1), np.uint8), rows], axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, COLOURS[_channels(array)], 0, 0, 0)
    return (
        MAGIC
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(unfiltered.tobytes()))
        + chunk(b"IEND", b"")
    )


def channels(content: bytes) -> int:
    """Return the number of channels of a PNG file; one with a palette is shown with 3."""
    numbers = {colour: number for number, colour in COLOURS.items()}
    return numbers.get(content[25], 3)


def size(content: bytes) -> tuple[int, int]:
    """Return width and height of a PNG file."""
    width, height = struct.unpack(">II", content[16:24])
    return width, height
