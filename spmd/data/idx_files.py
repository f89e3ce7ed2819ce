"""The IDX files of MNIST and its relatives, read from a folder the user has. Nothing is
downloaded.
"""

import gzip
import math
import struct
from pathlib import Path

import numpy as np

from spmd.base.output_files import read_bytes
from spmd.base.user_paths import as_path
from spmd.errors import DataError

# The numbers of the format are big-endian.
_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def read_idx(path: str | Path) -> np.ndarray:
    """One IDX file, plain or gzipped, as an array in native byte order.

    The format: two zero bytes, a type code, the number of dims, each dim as a big-endian uint32,
    then the data.

    Raises:
      DataError: not an IDX file, or its length does not match its header.
    """
    path = as_path(path, "path")
    raw = read_bytes(path)
    try:
        if raw[:2] == b"\x1f\x8b":
            raw = gzip.decompress(raw)
    except (OSError, EOFError) as error:
        raise DataError(
            f"{path} is a damaged gzip file: {error}.", fix="download it again."
        ) from error
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] not in _TYPES:
        raise DataError(
            f"{path} is not an IDX file: it starts with {raw[:4].hex(' ')!r}.",
            fix="one of MNIST's four files, as it was downloaded.",
        )
    dtype, ndim = np.dtype(_TYPES[raw[2]]), raw[3]
    if len(raw) < 4 + 4 * ndim:
        raise DataError(
            f"{path}: the header of {ndim} dims is truncated.", fix="download it again."
        )
    shape = struct.unpack(f">{ndim}I", raw[4 : 4 + 4 * ndim])
    data = raw[4 + 4 * ndim :]
    needed = math.prod(shape) * dtype.itemsize
    if len(data) != needed:
        why = f"shape {list(shape)} needs {needed} bytes of data, the file has {len(data)}."
        raise DataError(f"{path}: {why}", fix="download it again.")
    # astype also copies: an array from `frombuffer` cannot be written to.
    return np.frombuffer(data, dtype).reshape(shape).astype(dtype.newbyteorder("="))


def mnist(folder: str | Path) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Train and test sets from the four IDX files of MNIST, Fashion-MNIST or KMNIST in `folder`,
    plain or `.gz`.

    Args:
      folder: with the four files.

    Returns:
      Two dicts: "image" float32[examples, height, width, 1] from 0 to 1, "label" int32[examples].

    Raises:
      DataError: a file is missing (the message says which names were looked for) or damaged.

    Example:
      >>> import spmd
      >>> train, test = spmd.data.mnist("nowhere")
      Traceback (most recent call last):
      spmd.errors.DataError: ...
    """
    place = as_path(folder, "folder")
    return _split(place, "train"), _split(place, "t10k")


def _split(folder: Path, prefix: str) -> dict[str, np.ndarray]:
    images = read_idx(_find(folder, f"{prefix}-images", 3))
    labels = read_idx(_find(folder, f"{prefix}-labels", 1))
    if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
        shapes = f"images are {list(images.shape)}, labels {list(labels.shape)}"
        raise DataError(
            f"{folder}: {prefix} {shapes}; wanted [n, height, width] and [n].",
            fix="both files of one data set.",
        )
    shades = images.astype(np.float32) / 255.0
    return {"image": shades[..., None], "label": labels.astype(np.int32)}


def _find(folder: Path, stem: str, ndim: int) -> Path:
    # Some copies of the files have a dot where MNIST's own have a hyphen.
    names = [f"{stem}{dot}idx{ndim}-ubyte{end}" for dot in "-." for end in ("", ".gz")]
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise DataError(
        f"{folder} has none of {', '.join(names)}.", fix="the folder with MNIST's four files."
    )
