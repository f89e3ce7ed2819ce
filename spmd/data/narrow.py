"""Host arrays in the dtypes that jax gives them: without `jax_enable_x64`, 64 bits become 32, and
values that 32 bits do not hold are refused.
"""

from typing import Any, NoReturn

import jax
import numpy as np

from spmd.base.tree import Tree, flatten
from spmd.data.number_parsing import limits
from spmd.errors import DataError


class OutOfRange(Exception):
    """A value that the narrower dtype does not hold."""


def narrow(values: np.ndarray, *, copy: bool) -> np.ndarray:
    """Host values in the dtype that jax gives them; arrays whose dtype jax keeps are not looked at.

    Raises:
      OutOfRange: a whole number that would wrap around, or a finite one that would become infinite.
    """
    dtype = jax.dtypes.canonicalize_dtype(values.dtype)
    if dtype == values.dtype:
        return values.astype(dtype, copy=copy)
    if values.dtype.kind in "iu" and values.size:
        least, most = limits(dtype)
        if values.min() < least or values.max() > most:
            raise OutOfRange
    try:
        # Otherwise numpy makes inf of what float32 does not hold, and only warns.
        with np.errstate(over="raise"):
            return values.astype(dtype, copy=copy)
    except FloatingPointError:
        raise OutOfRange from None


def raise_out_of_range(leaves: Tree, index: np.ndarray | None, name: str) -> NoReturn:
    """Raise `DataError` for the first value of the rows `index` of `leaves` (all of them without)
    that `narrow` refuses.

    Args:
      name: whose rows are numbered, such as "the data".
    """
    for path, leaf in flatten(leaves).items():
        leaf = np.asarray(leaf)
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
        if dtype == leaf.dtype:
            continue
        rows: Any = index
        if index is None:
            rows = range(len(leaf))
        for row in rows:
            if _fits(leaf[row]):
                continue
            for value in leaf[row].flat:
                if not _fits(value):
                    _raise_value(value, leaf.dtype, f"{path or 'the array'}: row {row} of {name}")
    raise AssertionError("every value fits")


def _raise_value(value: Any, dtype: np.dtype, where: str) -> NoReturn:
    """Raise `DataError` for a value that `narrow` refuses."""
    narrower = jax.dtypes.canonicalize_dtype(dtype)
    least, most = limits(narrower)
    smaller = "the values divided by a constant"
    if narrower.kind in "iu":
        smaller = "an index into a table of the values"
    why = f"jax makes {narrower} of {dtype}, which holds {least} to {most}."
    wider = "jax.config.update('jax_enable_x64', True)"
    raise DataError(
        f"{where} holds {value}. {why}", fix=f"smaller numbers, such as {smaller}; or {wider}."
    )


def _fits(values: Any) -> bool:
    try:
        narrow(np.asarray(values), copy=False)
    except OutOfRange:
        return False
    return True
