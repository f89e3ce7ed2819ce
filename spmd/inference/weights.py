"""Arrays in a file: a .npz without pickle, as they are, or matrices as int8 with a scale for each output channel."""

import dataclasses
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd.errors import ExportError
from spmd.tree import describe

SCALES = "scales/"  # before a path: its scales; no path of a model's array begins with it
LARGEST = 127


@dataclasses.dataclass(frozen=True)
class Stored:
    """One array in the file.

    Attributes:
      path: its name there.
      dtype, shape: those of the array that the model is given.
      int8: whether it is there as int8, with scales beside it.
      max_error, relative_error: max |w - stored|, and |w - stored| / |w|, norms over the whole array; 0 where it is stored as it is.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    int8: bool = False
    max_error: float = 0.0
    relative_error: float = 0.0


def quantised(values: np.ndarray, *, stacked: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """An array [..., channels] as int8 and float32 scales, one for each channel: symmetric, to nearest.

    Args:
      stacked: dim 0 counts layers, each of which has scales of its own.

    Returns:
      int8, of the same shape, and float32 scales that are broadcast against it; no number is further off than half a scale.

    Example:
      >>> numbers, scales = quantised(np.array([[1.0, 0.0], [-0.5, 0.0]], np.float32))
      >>> numbers.tolist(), scales.shape
      ([[127, 0], [-64, 0]], (1, 2))
    """
    exact = values.astype(np.float32)
    largest = np.abs(exact).max(axis=tuple(range(int(stacked), values.ndim - 1)), keepdims=True)
    scales = np.where(largest > 0, largest / np.float32(LARGEST), np.float32(1)).astype(np.float32)
    return np.clip(np.round(exact / scales), -LARGEST, LARGEST).astype(np.int8), scales


def dequantised(numbers: Any, scales: Any, dtype: Any) -> Any:
    """The numbers that int8 and scales stand for; on the host or in a traced function."""
    return (numbers.astype(np.float32) * scales).astype(dtype)


def is_quantised(path: str, leaf: Any, *, stacked: bool = False) -> bool:
    """Whether `weights="int8"` means this array: a parameter of floating-point numbers with inputs and output channels."""
    return path.startswith("params/") and leaf.ndim >= 2 + stacked and bool(jnp.issubdtype(leaf.dtype, jnp.floating))


class Writer:
    """A file of weights, written one array at a time; None: nothing is written, by a process that only wants to know what is lost."""

    def __init__(self, path: Path | None):
        self._file = None if path is None else zipfile.ZipFile(path, "w")

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, path: str, values: np.ndarray, *, int8: bool, stacked: bool = False) -> Stored:
        """Write an array.

        Raises:
          ExportError: it is to be int8, and holds numbers that are not finite.
        """
        told = Stored(path, str(values.dtype), values.shape, int8)
        if not int8:
            self._put(path, values)
            return told
        if not np.isfinite(values.astype(np.float32)).all():
            fix = "a state from before the loss diverged, or weights='exact'"
            raise ExportError(f"{path} {describe(values)} holds numbers that are not finite: they have no scale.", fix=f"{fix}.")
        numbers, scales = quantised(values, stacked=stacked)
        self._put(path, numbers)
        self._put(SCALES + path, scales)
        exact = values.astype(np.float64)
        off = np.abs(dequantised(numbers, scales, values.dtype).astype(np.float64) - exact)
        norm = float(np.linalg.norm(exact))
        relative = float(np.linalg.norm(off)) / norm if norm else 0.0
        return dataclasses.replace(told, max_error=float(off.max(initial=0.0)), relative_error=relative)

    def _put(self, name: str, values: np.ndarray) -> None:
        """As numpy's own .npz; dtypes that numpy does not know (bfloat16) as whole numbers of their size."""
        if self._file is None:
            return
        plain = values if values.dtype.kind in "biufc" else values.view(f"u{values.dtype.itemsize}")
        with self._file.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as file:  # of no date: the same weights, the same file
            np.lib.format.write_array(file, np.ascontiguousarray(plain).reshape(plain.shape), allow_pickle=False)


def read_arrays(path: Path, stored: list[Stored], place: Callable[[np.ndarray], Any]) -> list[Any]:
    """The arrays of a file as an exported function takes them, each given to `place`: one, or a pair of int8 and scales."""
    with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:

        def one(entry: Stored) -> Any:
            values = file[entry.path]
            if entry.int8:
                return place(values), place(file[SCALES + entry.path])
            return place(values if str(values.dtype) == entry.dtype else values.view(entry.dtype))

        return [one(entry) for entry in stored]


def as_stored(leaf: Any, *, int8: bool, stacked: bool = False) -> Any:
    """Shapes of one array as an exported function takes it."""
    if not int8:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    layers = leaf.shape[:1] if stacked else ()
    scales = (*layers, *(1,) * (leaf.ndim - 1 - len(layers)), leaf.shape[-1])
    return jax.ShapeDtypeStruct(leaf.shape, np.int8), jax.ShapeDtypeStruct(scales, np.float32)
