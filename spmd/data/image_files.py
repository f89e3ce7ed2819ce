"""Folders of pictures as records: each folder is a class."""

import os
from pathlib import Path

import numpy as np

from spmd.data.records import Field, Format, Reading, Records
from spmd.errors import DataError, OptionError, import_extra

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}


class ImageFiles(Format):
    """Pictures, made one size as they are read."""

    what = "picture"
    together = 1

    def __init__(self, paths: tuple[str, ...], labels: np.ndarray, size: tuple[int, int], channels: int):
        import_extra("PIL.Image", "images")
        self.paths, self.counts, self.bytes = paths, [1] * len(paths), sum(os.path.getsize(path) for path in paths)
        self._labels, self._size, self._channels = labels, size, channels
        self.fields = {"image": Field((*size, channels), np.dtype(np.float32)), "label": Field((), np.dtype(np.int32))}

    def read(self, records: np.ndarray) -> tuple[dict[str, np.ndarray], dict[int, str]]:
        """Decoded by Pillow, which lets other threads run meanwhile."""
        pillow = import_extra("PIL.Image", "images")
        pixels, bad = np.zeros((len(records), *self._size, self._channels), np.float32), {}
        for at, record in enumerate(records.tolist()):
            try:
                with pillow.open(self.paths[record]) as picture:
                    made = picture.convert(_MODES[self._channels]).resize(self._size[::-1], pillow.Resampling.BILINEAR)
                pixels[at] = np.asarray(made, np.float32).reshape(*self._size, self._channels) / 255
            except Exception as error:  # Pillow raises many kinds, also for files that are cut off
                bad[at] = f"it cannot be read: {type(error).__name__}: {error}"
        return {"image": pixels, "label": self._labels[records]}, bad

    def where(self, record: int) -> str:
        """The file."""
        return self.paths[record]


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
    """Batches of pictures, "image" float32[rows, height, width, channels] from 0 to 1, and "label" int32[rows]. Wants `spmd[images]`.

    Each folder in `folder` is a class; labels are their numbers in the order of their names, and pictures in folders below belong to them.

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
    pair = isinstance(size, tuple | list) and len(size) == 2 and all(isinstance(one, int) and one >= 1 for one in size)
    if not pair or channels not in _MODES:
        raise OptionError(f"size={size!r}, channels={channels!r}: a size is (height, width), and channels are 1, 3 or 4.")
    reading = Reading(batch_size, shuffle, seed, workers, on_error)
    if not os.path.isdir(folder):
        raise DataError(f"there is no folder {folder}.")
    classes = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    paths = [[str(one) for one in sorted(Path(folder, name).rglob("*")) if one.suffix.lower() in ENDINGS] for name in classes]
    if not any(paths):
        has = f"its folders are {', '.join(classes[:5])}" if classes else "it has no folders"
        raise DataError(f"{folder} holds no pictures in folders that are classes; {has}.\n    cure: folder/class/picture.png.")
    labels = np.repeat(np.arange(len(classes), dtype=np.int32), [len(one) for one in paths])
    return Records(ImageFiles(tuple(path for one in paths for path in one), labels, (size[0], size[1]), channels), reading)
