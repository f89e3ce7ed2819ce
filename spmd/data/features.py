"""Features of `tf.train.Example`: their declarations, and a parser without TensorFlow for many
records at once.
"""

import dataclasses
import numbers
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from spmd.data.number_parsing import holds, limits
from spmd.data.records import Field
from spmd.errors import DataError, OptionError, first_line, type_name
from spmd.tree import describe

BYTES, FLOATS, INTEGERS = 1, 2, 3  # the fields of `Feature`
_HOLDS = {BYTES: "bytes", FLOATS: "floats", INTEGERS: "whole numbers"}
Spans = list[tuple[int, int]]  # beginnings and ends of payloads in a record


@dataclasses.dataclass(frozen=True)
class Feature:
    """A feature as `spmd.data.fixed` and `padded` declare it; `fill` is set where its length
    differs from record to record.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    default: Any = None
    decode: Callable[[bytes], Any] | None = None
    fill: Any = None

    def fields(self, name: str) -> dict[str, Field]:
        """The arrays of the feature."""
        mask = {} if self.fill is None else {f"{name}_mask": Field(self.shape, np.dtype(bool))}
        return {name: Field(self.shape, self.dtype), **mask}

    def store(self, name: str, values: np.ndarray, into: dict[str, np.ndarray], at: Any) -> None:
        """Numbers [..., count] in rows `at` of the arrays; where lengths differ, filled to the
        length that all have, with a mask.
        """
        if self.fill is None:
            into[name][at] = values.reshape(*values.shape[:-1], *self.shape)
            return
        count = values.shape[-1]
        into[name][at] = self.fill
        into[name][at, :count] = values
        into[f"{name}_mask"][at] = np.arange(self.shape[0]) < count


def fields_of(features: Mapping[str, Feature]) -> dict[str, Field]:
    """The arrays of several features."""
    return {
        name: field
        for feature, declared in features.items()
        for name, field in declared.fields(feature).items()
    }


def fixed(
    shape: tuple[int, ...],
    dtype: str,
    default: Any = None,
    decode: Callable[[bytes], Any] | None = None,
) -> Feature:
    """A feature that has one shape in all records.

    Bytes are read as consecutive numbers of `dtype` (such as pixels, uint8), or decoded by
    `decode(bytes)`.

    Args:
      shape: of the feature in one record; () for one number.
      dtype: of its numbers, such as "float32".
      decode: makes an array of this shape of a record's bytes, such as a compressed image; None:
        the bytes are the numbers.
      default: for records without this feature; without one they are an error.

    Returns:
      The feature, for `features=` of `tfrecord` and `array_record`.

    Example:
      >>> fixed((28, 28), "uint8").shape
      (28, 28)
    """
    sizes: Any = shape if isinstance(shape, tuple | list) else (None,)
    if not all(
        isinstance(size, int | np.integer) and not isinstance(size, bool) and size >= 0
        for size in sizes
    ):
        fix = (
            f"fixed(({shape},), ...)"
            if isinstance(shape, int)
            else "fixed((28, 28), ...), or fixed((), ...) for one number"
        )
        raise OptionError(
            f"fixed({shape!r}, ...): a shape is a tuple of whole numbers.", fix=f"{fix}."
        )
    feature = Feature(tuple(int(size) for size in sizes), _dtype(dtype), default, decode)
    if decode is not None and not callable(decode):
        raise OptionError(
            f"fixed(decode={decode!r}) is {type_name(decode)}.",
            fix="a function from bytes to an array.",
        )
    if default is not None:
        values = np.asarray(default)
        fits = values.shape in ((), feature.shape) and all(
            holds(feature.dtype, value) for value in values.ravel().tolist()
        )
        if not fits:
            raise OptionError(
                f"fixed(default={default!r}): {describe(feature)} does not hold it.",
                fix="a number that it holds.",
            )
    return feature


def padded(length: int, dtype: str, fill: Any = 0) -> Feature:
    """A feature of up to `length` numbers, padded with `fill`; a second array `NAME_mask` is True
    where data is.

    All have one length, since a step is compiled for one shape; a longer feature is an error that
    names the record.

    Args:
      length: numbers of the longest feature.
      dtype: of its numbers, such as "int32".
      fill: what is padded with.

    Returns:
      The feature, for `features=` of `tfrecord`, or `pad=` of `array_record`.

    Example:
      >>> sorted(padded(64, "int32").fields("tokens"))
      ['tokens', 'tokens_mask']
    """
    if isinstance(length, bool) or not isinstance(length, numbers.Integral) or length < 1:
        raise OptionError(f"padded({length!r}, ...).", fix="a length from 1.")
    feature = Feature((int(length),), _dtype(dtype), fill=fill)
    if not holds(feature.dtype, fill):
        raise OptionError(
            f"padded(fill={fill!r}): {feature.dtype} does not hold it.",
            fix="a number that it holds, such as 0.",
        )
    return feature


def _dtype(name: str) -> np.dtype:
    try:
        if name is None:  # numpy reads None as float64
            raise TypeError
        dtype = np.dtype(name)
    except TypeError:
        raise OptionError(
            f"there is no dtype {name!r}.", fix="such as float32, int32 or uint8."
        ) from None
    if dtype.kind not in "iufb":
        raise OptionError(
            f"a feature of dtype {dtype} cannot go onto a device.",
            fix="numbers; decode=... makes them of bytes.",
        )
    return dtype


class Parser:
    """Reads features from records of equal length; records with the same structure are read
    together.

    Raises:
      OptionError: what is given are no features, or two of them have one name.
    """

    def __init__(self, features: Mapping[str, Feature]):
        if (
            not isinstance(features, Mapping)
            or not features
            or not all(isinstance(feature, Feature) for feature in features.values())
        ):
            raise OptionError(
                f"features={features!r}.", fix='such as {"label": spmd.data.fixed((), "int32")}.'
            )
        self.features = dict(features)
        for name, feature in self.features.items():
            if feature.fill is not None and f"{name}_mask" in self.features:
                raise OptionError(
                    f'features: "{name}_mask" is the mask of a padded feature too.',
                    fix="another name for one of them.",
                )
        self.fields = fields_of(features)
        self._known: dict[int, _Template] = {}  # the last template, by record length

    def read(
        self, rows: np.ndarray, into: dict[str, np.ndarray], at: np.ndarray, bad: dict[int, str]
    ) -> None:
        """The features of uint8[n, length], into rows `at` of the arrays; `bad` gets the reason for
        each that cannot be read.
        """
        left = np.arange(len(rows))
        template = self._known.get(rows.shape[1])
        while len(left):
            if template is None:
                try:
                    template = _Template(rows[left[0]], self.features)
                except (ValueError, IndexError) as error:
                    bad[int(at[left[0]])] = (
                        str(error)
                        if isinstance(error, ValueError)
                        else "its bytes are no tf.train.Example"
                    )
                    left = left[1:]
                    continue
                self._known[rows.shape[1]] = template
            fits = template.fits(rows[left])
            if fits.any():
                self._read_alike(template, rows[left[fits]], into, at[left[fits]], bad)
            left, template = left[~fits], None

    def _read_alike(
        self,
        template: "_Template",
        rows: np.ndarray,
        into: dict,
        at: np.ndarray,
        bad: dict[int, str],
    ) -> None:
        for name, feature in self.features.items():
            try:
                _read(name, feature, template, rows, into, at, bad)
            except ValueError as error:
                bad.update(dict.fromkeys(at.tolist(), str(error)))


class _Template:
    """The structure of a record: the positions of payloads, and the bytes that determine them."""

    def __init__(self, record: np.ndarray, features: Mapping[str, Feature]):
        self.parts = parse(record.tobytes())
        payload = np.zeros(len(record), bool)
        continued = np.zeros(len(record), bool)
        for name, (kind, spans) in self.parts.items():
            for start, end in spans:
                payload[start:end] = True
                # the length of each varint belongs to the structure
                continued[start:end] = name in features and kind == INTEGERS
        self._fixed, self._continued = np.flatnonzero(~payload), np.flatnonzero(continued)
        self._expected, self._continues = record[self._fixed].copy(), record[self._continued] & 0x80

    def fits(self, rows: np.ndarray) -> np.ndarray:
        """bool[n]: which rows have this structure."""
        alike = (rows[:, self._fixed] == self._expected).all(axis=1)
        return alike & ((rows[:, self._continued] & 0x80) == self._continues).all(axis=1)


def _values(rows: np.ndarray, kind: int, spans: Spans) -> np.ndarray:
    """Numbers [n, count], or the bytes uint8[n, count]."""
    parts = [rows[:, start:end] for start, end in spans]
    raw = np.ascontiguousarray(
        parts[0]
        if len(parts) == 1
        else np.concatenate([np.zeros((len(rows), 0), np.uint8), *parts], axis=1)
    )
    if kind not in (FLOATS, INTEGERS):  # also an empty feature, which need not have a kind
        return raw
    if kind == FLOATS:
        if raw.shape[1] % 4:
            raise ValueError(f"floats of {raw.shape[1]} bytes, which 4 does not divide")
        return raw.view("<f4")
    if not raw.shape[1]:
        return np.zeros((len(rows), 0), np.int64)
    last = (raw[0] & 0x80) == 0
    if not last[-1]:
        raise ValueError("a whole number that does not end")
    number = np.concatenate([[0], np.cumsum(last)[:-1]])
    firsts = np.concatenate([[0], np.flatnonzero(last)[:-1] + 1])
    place = np.arange(len(last)) - firsts[number]
    bits = (raw & 0x7F).astype(np.uint64) << np.minimum(7 * place, 63).astype(np.uint64)
    return np.bitwise_or.reduceat(bits, firsts, axis=1).view(np.int64)


def _read(
    name: str,
    feature: Feature,
    template: _Template,
    rows: np.ndarray,
    into: dict,
    at: np.ndarray,
    bad: dict[int, str],
) -> None:
    """Store one feature of records of one structure.

    Raises:
      ValueError: the reason why none of these records can be read.
    """
    kind, spans = template.parts.get(name, (0, []))
    values = _values(rows, kind, spans)
    if not values.shape[1] and feature.default is not None:
        into[name][at] = feature.default
        return
    if name not in template.parts:
        raise ValueError(
            f'there is no feature "{name}"; it has {", ".join(sorted(template.parts)) or "none"}'
        )
    if kind == BYTES and len(spans) != 1:
        raise ValueError(f'feature "{name}" has {len(spans)} byte strings, and one is read')
    if kind == BYTES and feature.decode is not None:
        for raw, row in zip(values, at.tolist(), strict=True):
            try:
                value = np.asarray(feature.decode(raw.tobytes()))
            except Exception as error:
                # a user's function may raise anything; the error names the record
                bad[row] = f'decode of "{name}" raises {first_line(error)}'
                continue
            if value.shape != feature.shape or value.dtype != feature.dtype:
                bad[row] = (
                    f'decode of "{name}" gives {describe(value)}; {describe(feature)} is declared'
                )
            else:
                into[name][row] = value
        return
    if kind == BYTES:
        size = feature.dtype.itemsize
        if values.shape[1] % size:
            raise ValueError(
                f'feature "{name}" has {values.shape[1]} bytes, which are no {feature.dtype}'
            )
        values = values.view(feature.dtype.newbyteorder("<"))
    elif values.shape[1] and (kind == FLOATS) != (feature.dtype.kind == "f"):
        raise ValueError(f'feature "{name}" holds {_HOLDS[kind]}, and {feature.dtype} is wanted')
    elif feature.dtype.itemsize < (8 if kind == INTEGERS else 4):
        values = _within(name, feature.dtype, values, at, bad)
    count, size = values.shape[1], int(np.prod(feature.shape))
    if feature.fill is not None and count > size:
        raise ValueError(f'feature "{name}" has {count} numbers, and is padded to {size}')
    if feature.fill is None and count != size:
        raise ValueError(
            f'feature "{name}" has {count} numbers, and shape {list(feature.shape)} needs {size}'
        )
    feature.store(name, values, into, at)


def _within(
    name: str, dtype: np.dtype, values: np.ndarray, at: np.ndarray, bad: dict[int, str]
) -> np.ndarray:
    """Values with 0 in rows that a narrower dtype cannot hold; `bad` gets these rows."""
    least, most = limits(dtype)
    beyond = np.asarray(((values < least) | (values > most)) & ~np.isinf(values))
    wrong = np.asarray(beyond.any(axis=1))
    for row in np.flatnonzero(wrong).tolist():
        bad[int(at[row])] = (
            f'feature "{name}" has {values[row][beyond[row]][0]}, which {dtype} does not hold'
        )
    return np.where(wrong[:, None], 0, values)


def parse(record: bytes) -> dict[str, tuple[int, Spans]]:
    """By feature: its kind, and the positions of its payload.

    Raises:
      ValueError: the bytes are not a `tf.train.Example`; with a reason.
      IndexError: they end too early.

    Example:
      >>> parse(b"\\x0a\\x0c\\x0a\\x0a\\x0a\\x01y\\x12\\x05\\x1a\\x03\\x0a\\x01\\x07")
      {'y': (3, [(13, 14)])}
    """
    features: dict[str, tuple[int, Spans]] = {}
    for _, start, end in _message(record, 0, len(record), {(1, 2)}):
        for _, entry, entry_end in _message(record, start, end, {(1, 2)}):
            name, kind, spans = "", 0, []
            for number, begin, stop in _message(record, entry, entry_end, {(1, 2), (2, 2)}):
                if number == 1:
                    name = record[begin:stop].decode("utf-8")
                    continue
                for kind, inner, outer in _message(
                    record, begin, stop, {(BYTES, 2), (FLOATS, 2), (INTEGERS, 2)}
                ):
                    allowed = {(1, 2)} | (
                        {(1, 5)} if kind == FLOATS else {(1, 0)} if kind == INTEGERS else set()
                    )
                    spans = [
                        (first, last) for _, first, last in _message(record, inner, outer, allowed)
                    ]
            features[name] = (kind, spans)
    return features


def _message(
    record: bytes, at: int, end: int, allowed: set[tuple[int, int]]
) -> Iterator[tuple[int, int, int]]:
    """The fields of one message whose number and wire type are allowed: the number, and where the
    payload begins and ends.
    """
    while at < end:
        tag, at = _varint(record, at)
        number, wire = tag >> 3, tag & 7
        start = at
        if wire == 2:
            size, start = _varint(record, at)
            at = start + size
        elif wire == 0:
            _, at = _varint(record, at)
        elif wire in (1, 5):
            at += 8 if wire == 1 else 4
        else:
            raise ValueError("its bytes are no tf.train.Example")
        if at > end:
            raise ValueError(
                "its bytes are no tf.train.Example: a field is longer than what holds it"
            )
        if (number, wire) in allowed:
            yield number, start, at


def _varint(record: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = record[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("its bytes are no tf.train.Example")


def declared_by(record: bytes) -> dict[str, Feature]:
    """The features of a record as `fixed` declares them: floats float32, integers int64, bytes
    uint8.

    Raises:
      DataError: it is not a `tf.train.Example`, or has no features.
    """
    try:
        parts = parse(record)
    except (ValueError, IndexError):
        parts = {}
    if not parts:
        raise DataError(
            "the first record is no tf.train.Example with features.",
            fix="decode=function, which reads such records.",
        )
    dtypes = {BYTES: "uint8", FLOATS: "float32", INTEGERS: "int64"}
    row = np.frombuffer(record, np.uint8)[None]
    return {
        name: fixed(_values(row, kind, spans).shape[1:], dtypes[kind])
        for name, (kind, spans) in parts.items()
    }
