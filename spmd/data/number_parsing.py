"""Parses many numbers at a time; and checks the range of a dtype."""

import math
import numbers
import sys
from typing import Any

import numpy as np

NUMBERS: tuple[Any, ...] = (numbers.Real, np.bool_)
DIGITS = 18  # of decimal numbers that 64 bits hold
# whole numbers below it, and powers of ten up to 22, are float64 without rounding: their quotient
# is rounded once
EXACT = 2**53
_POWERS = 10 ** np.arange(DIGITS + 1, dtype=np.int64)
_TENS = 10.0 ** np.arange(DIGITS + 1)
_ZERO, _DOT, _MINUS, _PLUS = (ord(letter) for letter in "0.-+")


def decimals(
    text: np.ndarray, starts: np.ndarray, ends: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Plain decimal numbers (`-12`, `3.25`), each equal to Python's `float` of its text, bit for
    bit.

    Args:
      text: uint8[bytes].
      starts, ends: int64[n]: the bytes of each number.

    Returns:
      float64[n]; bool[n], True for numbers without a point; and bool[n], True for parsed numbers:
      not for one with an exponent, or with more digits than one division rounds exactly.

    Example:
      >>> decimals(np.frombuffer(b"-1.5,20,x", np.uint8), np.array([0, 5, 8]), np.array([4, 7, 9]))
      (array([-1.5, 20. ,  0. ]), array([False,  True,  True]), array([ True,  True, False]))
    """
    lengths = ends - starts
    if not len(lengths):
        return np.zeros(0), np.zeros(0, bool), np.zeros(0, bool)
    # clipped: a number at the end may have no letter
    first = text.take(starts, mode="clip")
    minus = (first == _MINUS) & (lengths > 0)
    signed = minus | ((first == _PLUS) & (lengths > 0))
    number = np.zeros(len(lengths), np.int64)
    digits = np.zeros(len(lengths), np.int64)
    point = np.full(len(lengths), -1)
    for back in range(min(int(lengths.max()), DIGITS + 2)):  # from the last letter to the first
        letter = text.take(ends - 1 - back, mode="clip")
        # As uint8, letters below "0" wrap around to more than 9.
        digit, inside = letter - np.uint8(_ZERO), back < lengths
        is_digit = inside & (digit < 10)
        is_point = inside & (letter == _DOT) & (point < 0)
        # Clipped: a number of more than DIGITS digits is not sound below.
        number += np.where(is_digit, digit * _POWERS.take(digits, mode="clip"), 0)
        point = np.where(is_point, digits, point)
        digits += is_digit
    is_integer = point < 0
    is_number = (digits + ~is_integer + signed == lengths) & (digits > 0)
    is_exact = (digits <= DIGITS) & (number < EXACT)
    sound = is_number & is_exact
    value = number / _TENS.take(np.maximum(point, 0), mode="clip")
    signed_value = np.where(minus, -value, value)
    return np.where(sound, signed_value, 0.0), is_integer, sound


def holds(dtype: np.dtype, value: Any) -> bool:
    """Return True if a dtype holds a number, up to rounding of a float.

    Example:
      >>> [
      ...     holds(np.dtype(name), x)
      ...     for name, x in [
      ...         ("int8", 200),
      ...         ("int8", 1.5),
      ...         ("float32", 10**400),
      ...         ("float32", 7),
      ...         ("bool", 1),
      ...     ]
      ... ]
      [False, False, False, True, True]
    """
    # float() of a larger int raises OverflowError.
    if not isinstance(value, NUMBERS) or (
        isinstance(value, int) and abs(value) > sys.float_info.max
    ):
        return False
    if dtype.kind == "f":
        # A number beyond the dtype becomes inf, of which numpy would warn.
        with np.errstate(over="ignore"):
            return bool(np.isfinite(dtype.type(float(value))) or not math.isfinite(value))
    if not math.isfinite(value) or value != int(value):
        return False
    least, most = limits(dtype)
    return bool(least <= value <= most)


def limits(dtype: np.dtype) -> tuple[Any, Any]:
    """The least and the greatest finite number of a dtype.

    Example:
      >>> limits(np.dtype("int8")), limits(np.dtype("bool"))
      ((-128, 127), (0, 1))
    """
    if dtype.kind == "b":
        return 0, 1
    if dtype.kind == "f":
        return np.finfo(dtype).min, np.finfo(dtype).max
    return np.iinfo(dtype).min, np.iinfo(dtype).max
