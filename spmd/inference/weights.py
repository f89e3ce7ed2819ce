"""Weights in a .npz file without pickle, exact or as int8 with a scale for each output channel."""

import dataclasses
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd.base.output_files import open_output
from spmd.base.tree import describe
from spmd.errors import ExportError, printable

SCALES = "scales/"  # prefix of the names of scales; no path of a model's array begins with it
LARGEST = 127


@dataclasses.dataclass(frozen=True)
class Stored:
    """One array in the file.

    Attributes:
      path: its name.
      dtype, shape: those of the model's array.
      int8: whether it is stored as int8, with scales.
      max_error, relative_error: max |w - stored|, and |w - stored| / |w|, norms over the whole
        array; 0 if it is stored exactly.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    int8: bool = False
    max_error: float = 0.0
    relative_error: float = 0.0


def quantize(values: np.ndarray, *, stacked: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Quantize an array [..., channels] to int8 with a float32 scale for each channel: symmetric,
    to nearest.

    Args:
      stacked: dim 0 is layers, each with its own scales.

    Returns:
      int8 of the same shape, and float32 scales that broadcast against it; the error is at most
      half a scale.

    Example:
      >>> numbers, scales = quantize(np.array([[1.0, 0.0], [-0.5, 0.0]], np.float32))
      >>> numbers.tolist(), scales.shape
      ([[127, 0], [-64, 0]], (1, 2))
    """
    exact = values.astype(np.float32)
    dims = tuple(range(int(stacked), values.ndim - 1))
    largest = np.abs(exact).max(axis=dims, keepdims=True)
    # A channel of zeros has scale 1, to avoid 0 / 0.
    scales = np.where(largest > 0, largest / np.float32(LARGEST), np.float32(1)).astype(np.float32)
    rounded = np.round(exact / scales)
    return np.clip(rounded, -LARGEST, LARGEST).astype(np.int8), scales


def dequantize(numbers: Any, scales: Any, dtype: Any) -> Any:
    """The array that int8 numbers and scales represent; on the host or in a traced function."""
    return (numbers.astype(np.float32) * scales).astype(dtype)


def should_quantize(path: str, leaf: Any, *, stacked: bool = False) -> bool:
    """Return whether `weights="int8"` applies to this array: a floating-point parameter with input
    and output channels.
    """
    # in 8 or 4 bits already
    of_codes = path.startswith("frozen/") and path.endswith(("/codes", "/scales"))
    if of_codes or not path.startswith(("params/", "frozen/")):
        return False
    return leaf.ndim >= 2 + stacked and bool(jnp.issubdtype(leaf.dtype, jnp.floating))


class Writer:
    """A file of weights, written one array at a time; with None it writes nothing and only computes
    errors.
    """

    def __init__(self, path: Path | None):
        self._opened = None
        self._file = None
        if path is not None:
            self._opened = open_output(path)
            # Without compression, which `read_arrays` refuses.
            self._file = zipfile.ZipFile(self._opened, "w")

    def close(self) -> None:
        """Write the table of contents, and close the file.

        Raises:
          OSError: the rest cannot be written.
        """
        if self._opened is not None and self._file is not None:
            with self._opened:
                self._file.close()

    def add(self, path: str, values: np.ndarray, *, int8: bool, stacked: bool = False) -> Stored:
        """Write an array.

        Raises:
          ExportError: it should be int8, but holds numbers that are not finite.
        """
        stored = Stored(path, str(values.dtype), values.shape, int8)
        if not int8:
            self._put(path, values)
            return stored
        if not np.isfinite(values.astype(np.float32)).all():
            fix = "a state from before the loss diverged, or weights='exact'"
            raise ExportError(
                f"{path} {describe(values)} holds numbers that are not finite and have no scale.",
                fix=f"{fix}.",
            )
        numbers, scales = quantize(values, stacked=stacked)
        self._put(path, numbers)
        self._put(SCALES + path, scales)
        exact = values.astype(np.float64)
        written = dequantize(numbers, scales, values.dtype).astype(np.float64)
        error = np.abs(written - exact)
        norm = float(np.linalg.norm(exact))
        relative = 0.0
        if norm:
            relative = float(np.linalg.norm(error)) / norm
        max_error = float(error.max(initial=0.0))
        return dataclasses.replace(stored, max_error=max_error, relative_error=relative)

    def _put(self, name: str, values: np.ndarray) -> None:
        """Write an array in numpy's .npz format; dtypes that numpy does not know (bfloat16) as
        integers of their size.
        """
        if self._file is None:
            return
        if values.dtype.kind not in "biufc":
            values = values.view(f"u{values.dtype.itemsize}")
        # ascontiguousarray makes a scalar an array of one dim
        values = np.ascontiguousarray(values).reshape(values.shape)
        # without a date, so that equal weights give equal files
        entry = zipfile.ZipInfo(f"{name}.npy")
        # zipfile cannot know in advance that an entry exceeds 2 GiB
        with self._file.open(entry, "w", force_zip64=True) as file:
            np.lib.format.write_array(file, values, allow_pickle=False)


def read_arrays(path: Path, stored: list[Stored], place: Callable[[np.ndarray], Any]) -> list[Any]:
    """The arrays of a file as an exported function takes them, through `place`: an array, or a pair
    of int8 and scales.
    """
    # a pickle could execute code
    with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
        for entry in file.zip.infolist():
            # compressed, a small file could unpack to any size
            if entry.compress_type != zipfile.ZIP_STORED:
                raise ValueError(
                    f"{printable(entry.filename, 200)} is compressed, which no export is"
                )

        arrays = []
        for entry in stored:
            values = file[entry.path]
            if entry.int8:
                arrays.append((place(values), place(file[SCALES + entry.path])))
                continue
            if str(values.dtype) != entry.dtype:  # one that numpy does not know
                values = values.view(entry.dtype)
            arrays.append(place(values))
        return arrays


def stored_shape(leaf: Any, *, int8: bool, stacked: bool = False) -> Any:
    """The shape of an array as an exported function takes it; a pair for int8 and scales."""
    if not int8:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    layers = leaf.shape[: int(stacked)]
    ones = (1,) * (leaf.ndim - 1 - len(layers))
    scales_shape = (*layers, *ones, leaf.shape[-1])
    numbers = jax.ShapeDtypeStruct(leaf.shape, np.int8)
    return numbers, jax.ShapeDtypeStruct(scales_shape, np.float32)
