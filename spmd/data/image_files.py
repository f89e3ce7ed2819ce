"""Folders of pictures as records: each folder is a class."""

import logging
import os
from pathlib import Path
from typing import Any

import numpy as np

from spmd.data.records import Field, FileFormat, ReadOptions, Records
from spmd.errors import DataError, OptionError, import_extra, type_name

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}


class ImageFiles(FileFormat):
    """Pictures, made one size as they are read."""

    what = "picture"
    together = 1

    def __init__(self, paths: tuple[str, ...], labels: np.ndarray, size: tuple[int, int], channels: int):
        import_extra("PIL.Image", "images")
        self.paths, self.counts, self.sizes = paths, [1] * len(paths), [os.path.getsize(path) for path in paths]
        self._labels, self._size, self._channels = labels, size, channels
        self.fields = {"image": Field((*size, channels), np.dtype(np.float32)), "label": Field((), np.dtype(np.int32))}

    def read(self, records: np.ndarray) -> tuple[dict[str, np.ndarray], dict[int, str]]:
        """Decoded by Pillow, which lets other threads run meanwhile."""
        pillow = import_extra("PIL.Image", "images")
        pixels, bad = np.zeros((len(records), *self._size, self._channels), np.float32), {}
        for at, record in enumerate(records.tolist()):
            try:
                with pillow.open(self.paths[record]) as opened:
                    made = _eight_bits(opened, pillow).convert(_MODES[self._channels]).resize(self._size[::-1], pillow.Resampling.BILINEAR)
                pixels[at] = np.asarray(made, np.float32).reshape(*self._size, self._channels) / 255
            except Exception as error:  # Pillow raises many kinds, also for files that are truncated
                bad[at] = f"it cannot be read: {type(error).__name__}: {error}"
        return {"image": pixels, "label": self._labels[records]}, bad

    def where(self, record: int) -> str:
        """The file."""
        return self.paths[record]


def _eight_bits(picture: Any, pillow: Any) -> Any:
    """A grey picture of 16 bits with 8, where Pillow would cut off all that is brighter than 255."""
    if picture.mode == "I" and picture.format == "PNG":  # which has 16 bits at most; some versions of Pillow say no more
        return pillow.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
    if picture.mode in ("I", "F"):
        raise ValueError(f"its numbers are of 32 bits (mode {picture.mode}), and how bright white is is not known")
    return pillow.fromarray((np.asarray(picture) >> 8).astype(np.uint8)) if picture.mode.startswith("I;16") else picture


def images(
    folder: str | Path,
    *,
    size: tuple[int, int],
    batch_size: int,
    channels: int = 3,
    shuffle: bool | int = True,
    seed: int = 0,
    workers: int = 0,
    on_error: str = "stop",
) -> Records:
    """Batches of pictures, "image" float32[rows, height, width, channels] from 0 to 1, and "label" int32[rows]. Wants the extra `images`.

    Each folder in `folder` is a class; labels are their numbers in the order of their names, and pictures in folders below belong to them.
    A folder whose name begins with a dot is none. An alpha channel is left out unless `channels` is 4.

    Args:
      folder: with a folder for each class.
      size: (height, width) that all are made to have.
      batch_size: pictures of a batch, over all processes.
      channels: 1 (grey), 3 or 4.
      shuffle: True, False, or a window of pictures that are mixed.
      seed: decides the order.
      workers: threads that read and decode ahead; the batches do not depend on their number.
      on_error: "stop", or "skip" for leaving out pictures that cannot be read.

    Raises:
      DataError: there is no such folder, or no picture in it.
    """
    pair = isinstance(size, tuple | list) and len(size) == 2 and all(type(one) is int and one >= 1 for one in size)
    if not pair or type(channels) is not int or channels not in _MODES:
        raise OptionError(f"size={size!r}, channels={channels!r}: a size is (height, width), and channels are 1, 3 or 4.")
    reading = ReadOptions(batch_size, shuffle, seed, workers, on_error)
    if not isinstance(folder, str | Path):
        raise OptionError(f"folder={folder!r} is {type_name(folder)}.", fix="the path of a folder with a folder for each class.")
    if not os.path.isdir(folder):
        raise DataError(f"there is no folder {folder}.", fix="the path of a folder with a folder for each class.")
    entries = list(os.scandir(folder))
    classes = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    paths = [[str(one) for one in sorted(Path(folder, name).rglob("*")) if one.suffix.lower() in ENDINGS] for name in classes]
    if not any(paths):
        has = f"its folders are {', '.join(classes[:5])}" if classes else "it has no folders"
        raise DataError(f"{folder} holds no pictures in folders that are classes; {has}.", fix="folder/class/picture.png.")
    beside = sum(entry.is_file() and entry.name.lower().endswith(ENDINGS) for entry in entries)
    nothing = [name for name, mine in zip(classes, paths, strict=True) if not mine]
    if beside or nothing:
        text = "%s: %d pictures stand beside the folders of classes and are not read; classes without a picture: %s."
        logging.getLogger("spmd").warning(text, folder, beside, ", ".join(nothing[:5]) or "none")
    labels = np.repeat(np.arange(len(classes), dtype=np.int32), [len(one) for one in paths])
    return Records(ImageFiles(tuple(path for one in paths for path in one), labels, (size[0], size[1]), channels), reading)
