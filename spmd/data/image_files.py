"""Folders of pictures as records: each folder is a class."""

import itertools
import logging
import os
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from spmd.base.user_paths import as_path
from spmd.data.records import Field, FileFormat, ReadOptions, Records
from spmd.errors import DataError, OptionError, import_extra

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}


class ImageFiles(FileFormat):
    """Pictures, made one size as they are read."""

    file_kind = "picture"
    together = 1

    def __init__(
        self, paths: tuple[str, ...], labels: np.ndarray, size: tuple[int, int], channels: int
    ):
        import_extra("PIL.Image", "images")
        self.paths, self.counts = paths, [1] * len(paths)
        self.sizes = [os.path.getsize(path) for path in paths]
        self._labels, self._size, self._channels = labels, size, channels
        image = Field((*size, channels), np.dtype(np.float32))
        label = Field((), np.dtype(np.int32))
        self.fields = {"image": image, "label": label}

    def read_into(
        self, leaves: dict[str, np.ndarray], records: np.ndarray, bad: dict[int, str]
    ) -> None:
        """Decode pictures by Pillow, which lets other threads run meanwhile."""
        pillow = import_extra("PIL.Image", "images")
        exif_transpose = import_extra("PIL.ImageOps", "images").exif_transpose
        leaves["label"][:] = self._labels[records]
        for at, record in enumerate(records.tolist()):
            try:
                with pillow.open(self.paths[record]) as opened:
                    # a camera stores the picture as it was held, and the turn as EXIF data
                    upright = exif_transpose(opened)
                    picture = _eight_bits(upright, opened.format, pillow)
                    picture = picture.convert(_MODES[self._channels])
                    # Pillow takes the width first. `size` is that of the upright picture.
                    picture = picture.resize(self._size[::-1], pillow.Resampling.BILINEAR)
                numbers = np.asarray(picture, np.float32)
                leaves["image"][at] = numbers.reshape(*self._size, self._channels) / 255
            except Exception as error:
                # Pillow raises many kinds, also for files that are truncated
                bad[at] = f"it cannot be read: {type(error).__name__}: {error}"

    def where(self, record: int) -> str:
        """The file."""
        return self.paths[record]


def _is_picture(name: str) -> bool:
    """Return True for the name of a picture that is not hidden."""
    return name.lower().endswith(ENDINGS) and not name.startswith(".")


def _pictures(folder: Path) -> list[str]:
    """Pictures in a folder and those below it, without hidden ones, such as those in
    `.ipynb_checkpoints` and `._1.png` of macOS.
    """

    def fail(error: OSError) -> NoReturn:  # else `os.walk` leaves the folder out
        text = f"{error.filename} cannot be read: {error.strerror}."
        raise DataError(text, fix="its permissions, or the folder somewhere else.") from error

    paths: list[str] = []
    for parent, folders, names in os.walk(folder, onerror=fail):
        # In place: `os.walk` enters the folders that are left in this list.
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if _is_picture(name):
                paths.append(os.path.join(parent, name))
    return sorted(paths, key=lambda path: path.split(os.sep))


def _eight_bits(picture: Any, kind: str | None, pillow: Any) -> Any:
    """A grey picture of 16 bits with 8, where Pillow would cut off all that is brighter than
    255.
    """
    # a PNG has 16 bits at most; some versions of Pillow give only the mode "I"
    if picture.mode == "I" and kind == "PNG":
        return pillow.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
    if picture.mode in ("I", "F"):
        raise ValueError(
            f"its numbers are of 32 bits (mode {picture.mode}), and how bright white is is not "
            "known"
        )
    if picture.mode.startswith("I;16"):
        return pillow.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
    return picture


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
    """Batches of pictures, "image" float32[rows, height, width, channels] from 0 to 1, and "label"
    int32[rows]. Wants the extra `images`.

    Each folder in `folder` is a class; labels are their numbers in the order of their names, and
    pictures in folders below belong to them. Folders and files whose names begin with a dot are not
    read. A picture is turned as its EXIF orientation says. An alpha channel is left out unless
    `channels` is 4.

    Args:
      folder: with a folder for each class.
      size: (height, width) that all are made to have.
      batch_size: pictures of a batch, over all processes.
      channels: 1 (grey), 3 or 4.
      shuffle, seed, workers, on_error: as in `spmd.data.csv`.

    Returns:
      A `spmd.data.Records`: an iterable of batches, dicts of arrays [rows, ...].

    Raises:
      DataError: there is no such folder, no picture in it, or a folder in it that cannot be read.

    Example:
      >>> import pathlib, spmd, tempfile
      >>> from PIL import Image
      >>> folder = pathlib.Path(tempfile.mkdtemp())
      >>> for name in ("cat", "dog"):
      ...     (folder / name).mkdir()
      ...     Image.new("RGB", (8, 8)).save(folder / name / "1.png")
      >>> batch = next(iter(spmd.data.images(folder, size=(4, 4), batch_size=2, shuffle=False)))
      >>> batch["image"].shape, batch["label"].tolist()
      ((2, 4, 4, 3), [0, 1])
    """
    is_pair = isinstance(size, tuple | list) and len(size) == 2
    is_size = is_pair and all(type(length) is int and length >= 1 for length in size)
    if not is_size or type(channels) is not int or channels not in _MODES:
        raise OptionError(
            f"size={size!r}, channels={channels!r}.",
            fix="size=(height, width), and channels=1, 3 or 4.",
        )
    reading = ReadOptions(batch_size, shuffle, seed, workers, on_error)
    folder = as_path(folder, "folder")
    if not folder.is_dir():
        raise DataError(
            f"there is no folder {folder}.",
            fix="the path of a folder with a folder for each class.",
        )
    entries = list(os.scandir(folder))
    classes = sorted(
        entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")
    )
    paths = [_pictures(folder / name) for name in classes]
    if not any(paths):
        state = "it has no folders"
        if classes:
            state = f"its folders are {', '.join(classes[:5])}"
        raise DataError(
            f"{folder} holds no pictures in folders that are classes; {state}.",
            fix="folder/class/picture.png.",
        )
    files = [entry.name for entry in entries if entry.is_file()]
    beside = sum(_is_picture(name) for name in files)
    empty = [name for name, of_class in zip(classes, paths, strict=True) if not of_class]
    if beside or empty:
        text = (
            "%s: %d pictures stand beside the folders of classes and are not read; classes without "
            "a picture: %s."
        )
        logging.getLogger("spmd").warning(text, folder, beside, ", ".join(empty[:5]) or "none")
    numbers = np.arange(len(classes), dtype=np.int32)
    labels = np.repeat(numbers, [len(of_class) for of_class in paths])
    all_paths = tuple(itertools.chain.from_iterable(paths))
    return Records(ImageFiles(all_paths, labels, (size[0], size[1]), channels), reading)
