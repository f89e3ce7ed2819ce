"""Features of `tf.train.Example`: declarations, and a parser that needs protobuf but not
TensorFlow.
"""

import dataclasses
import functools
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from spmd.base.tree import describe
from spmd.data.number_parsing import holds, limits
from spmd.data.records import Field
from spmd.errors import DataError, OptionError, first_line, import_extra, type_name

NOT_AN_EXAMPLE = "its bytes are no tf.train.Example"
# By field of the message `Feature`: a plural for errors, and the type of the values.
_CONTENTS = {"bytes_list": "bytes", "float_list": "floats", "int64_list": "whole numbers"}
_DTYPES = {"bytes_list": np.uint8, "float_list": np.float32, "int64_list": np.int64}
# The part of tensorflow/core/example/{feature,example}.proto that a reader needs.
_EXAMPLE_PROTO = """
name: "spmd/example.proto"  package: "spmd"  syntax: "proto3"
message_type {
  name: "BytesList"
  field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_BYTES }
}
message_type {
  name: "FloatList"
  field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_FLOAT }
}
message_type {
  name: "Int64List"
  field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_INT64 }
}
message_type {
  name: "Feature"
  oneof_decl { name: "kind" }
  field { name: "bytes_list" number: 1 label: LABEL_OPTIONAL type: TYPE_MESSAGE
          type_name: ".spmd.BytesList" oneof_index: 0 }
  field { name: "float_list" number: 2 label: LABEL_OPTIONAL type: TYPE_MESSAGE
          type_name: ".spmd.FloatList" oneof_index: 0 }
  field { name: "int64_list" number: 3 label: LABEL_OPTIONAL type: TYPE_MESSAGE
          type_name: ".spmd.Int64List" oneof_index: 0 }
}
message_type {
  name: "Features"
  field { name: "feature" number: 1 label: LABEL_REPEATED type: TYPE_MESSAGE
          type_name: ".spmd.Features.FeatureEntry" }
  nested_type {
    name: "FeatureEntry"
    field { name: "key" number: 1 label: LABEL_OPTIONAL type: TYPE_STRING }
    field { name: "value" number: 2 label: LABEL_OPTIONAL type: TYPE_MESSAGE
            type_name: ".spmd.Feature" }
    options { map_entry: true }
  }
}
message_type {
  name: "Example"
  field { name: "features" number: 1 label: LABEL_OPTIONAL type: TYPE_MESSAGE
          type_name: ".spmd.Features" }
}
"""


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
        """Return the arrays of the feature by name."""
        fields = {name: Field(self.shape, self.dtype)}
        if self.fill is not None:
            fields[f"{name}_mask"] = Field(self.shape, np.dtype(bool))
        return fields

    def store(self, name: str, values: np.ndarray, into: dict[str, np.ndarray], row: int) -> None:
        """Store the numbers [count] of one record in a row of the arrays; if lengths differ, fill
        the row, and set its mask.
        """
        if self.fill is None:
            into[name][row] = values.reshape(self.shape)
            return
        count = len(values)
        into[name][row] = self.fill
        into[name][row, :count] = values
        into[f"{name}_mask"][row] = np.arange(self.shape[0]) < count


def fields_of(features: Mapping[str, Feature]) -> dict[str, Field]:
    """Return the arrays of several features by name."""
    fields: dict[str, Field] = {}
    for name, feature in features.items():
        fields |= feature.fields(name)
    return fields


def fixed(
    shape: tuple[int, ...],
    dtype: str,
    default: Any = None,
    decode: Callable[[bytes], Any] | None = None,
) -> Feature:
    """Declare a feature that has one shape in all records.

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

    Raises:
      OptionError: a shape that is not a tuple of sizes, an unknown dtype, a default that the dtype
        does not hold, or a `decode` that is no function.

    Example:
      >>> fixed((28, 28), "uint8").shape
      (28, 28)
    """
    if not isinstance(shape, tuple | list) or not all(map(_is_size, shape)):
        fix = "fixed((28, 28), ...), or fixed((), ...) for one number"
        if isinstance(shape, int):
            fix = f"fixed(({shape},), ...)"
        raise OptionError(
            f"fixed({shape!r}, ...): a shape is a tuple of whole numbers.", fix=f"{fix}."
        )
    feature = Feature(tuple(int(size) for size in shape), _dtype(dtype), default, decode)
    if decode is not None and not callable(decode):
        raise OptionError(
            f"fixed(decode={decode!r}) is {type_name(decode)}.",
            fix="a function from bytes to an array.",
        )
    if default is not None:
        values = np.asarray(default)
        has_shape = values.shape in ((), feature.shape)
        if not has_shape or not all(holds(feature.dtype, x) for x in values.ravel().tolist()):
            raise OptionError(
                f"fixed(default={default!r}): {describe(feature)} does not hold it.",
                fix="a number that it holds.",
            )
    return feature


def _is_size(size: Any) -> bool:
    # A bool is an int for isinstance.
    if isinstance(size, bool) or not isinstance(size, int | np.integer):
        return False
    return int(size) >= 0


def padded(length: int, dtype: str, fill: Any = 0) -> Feature:
    """Declare a feature of up to `length` numbers, padded with `fill`; a second array `NAME_mask`
    is True where data is.

    All have one length, since a step is compiled for one shape; a longer feature is an error that
    names the record.

    Args:
      length: numbers of the longest feature.
      dtype: of its numbers, such as "int32".
      fill: the number with which shorter features are padded.

    Returns:
      The feature, for `features=` of `tfrecord`, or `pad=` of `array_record`.

    Raises:
      OptionError: a length below 1, an unknown dtype, or a `fill` that the dtype does not hold.

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
    """Reads declared features from serialized records.

    Raises:
      OptionError: `features` is not a mapping of features, or two arrays have one name.
      MissingExtraError: protobuf is not installed.
    """

    def __init__(self, features: Mapping[str, Feature]):
        are_features = isinstance(features, Mapping) and all(
            isinstance(feature, Feature) for feature in features.values()
        )
        if not are_features or not features:
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
        example_message()  # names a missing extra before a file is opened

    def read_record(
        self, record: bytes, into: dict[str, np.ndarray], row: int, bad: dict[int, str]
    ) -> None:
        """Store the features of one record in a row of the arrays; if one cannot be read, `bad`
        gets the reason.
        """
        try:
            stored = parse_example(record)
        except ValueError as error:
            bad[row] = str(error)
            return
        for name, feature in self.features.items():
            try:
                values = _feature_values(name, feature, stored)
                feature.store(name, values, into, row)
            except ValueError as error:
                bad[row] = str(error)


@functools.cache
def example_message() -> tuple[Any, type[Exception]]:
    """Return the class of the message `Example`, and the error that its parser raises."""
    descriptors = import_extra("google.protobuf.descriptor_pb2", "tfrecord")
    text_format = import_extra("google.protobuf.text_format", "tfrecord")
    # A pool of its own: in the common one, TensorFlow registers its own `tensorflow.Example`.
    pool = import_extra("google.protobuf.descriptor_pool", "tfrecord").DescriptorPool()
    pool.Add(text_format.Parse(_EXAMPLE_PROTO, descriptors.FileDescriptorProto()))
    factory = import_extra("google.protobuf.message_factory", "tfrecord")
    message = factory.GetMessageClass(pool.FindMessageTypeByName("spmd.Example"))
    return message, import_extra("google.protobuf.message", "tfrecord").DecodeError


def parse_example(record: bytes) -> Mapping[str, Any]:
    """Return the `Feature` messages of a serialized record by name.

    Raises:
      ValueError: the bytes are not a `tf.train.Example`.
      MissingExtraError: protobuf is not installed.

    Example:
      >>> record = b"\\x0a\\x0c\\x0a\\x0a\\x0a\\x01y\\x12\\x05\\x1a\\x03\\x0a\\x01\\x07"
      >>> list(parse_example(record)["y"].int64_list.value)
      [7]
    """
    message, decode_error = example_message()
    try:
        return message.FromString(record).features.feature
    except decode_error:
        raise ValueError(NOT_AN_EXAMPLE) from None


def _feature_values(name: str, feature: Feature, stored: Mapping[str, Any]) -> np.ndarray:
    """Return the numbers [count] of a feature, or an array of its shape.

    Raises:
      ValueError: the reason why the feature cannot be read.
    """
    # `in` first: to look up a name that a map of messages does not have adds it.
    if name not in stored:
        if feature.default is None:
            raise ValueError(
                f'there is no feature "{name}"; it has {", ".join(sorted(stored)) or "none"}'
            )
        return np.broadcast_to(feature.default, feature.shape)
    kind = stored[name].WhichOneof("kind")
    contents: Any = ()
    if kind is not None:
        contents = getattr(stored[name], kind).value
    if feature.default is not None and (not contents or contents[0] == b""):
        return np.broadcast_to(feature.default, feature.shape)
    if kind == "bytes_list":
        if len(contents) != 1:
            raise ValueError(f'feature "{name}" has {len(contents)} byte strings, and one is read')
        if feature.decode is not None:
            return _decoded(name, feature, contents[0])
        if len(contents[0]) % feature.dtype.itemsize:
            raise ValueError(
                f'feature "{name}" has {len(contents[0])} bytes, which are no {feature.dtype}'
            )
        # Little-endian, as tf.io.decode_raw reads by default.
        values = np.frombuffer(contents[0], feature.dtype.newbyteorder("<"))
    else:
        values = _numbers(name, feature.dtype, kind, contents)
    count, size = len(values), math.prod(feature.shape)
    if feature.fill is not None and count > size:
        raise ValueError(f'feature "{name}" has {count} numbers, and is padded to {size}')
    if feature.fill is None and count != size:
        raise ValueError(
            f'feature "{name}" has {count} numbers, and shape {list(feature.shape)} needs {size}'
        )
    return values


def _decoded(name: str, feature: Feature, raw: bytes) -> np.ndarray:
    """Return the array that the user's function makes of the bytes of one record.

    Raises:
      ValueError: the function raises, or its array is not the one that is declared.
    """
    decode: Any = feature.decode
    try:
        value = np.asarray(decode(raw))
    except Exception as error:
        # a user's function may raise anything; the error names the record
        raise ValueError(f'decode of "{name}" raises {first_line(error)}') from None
    if value.shape != feature.shape or value.dtype != feature.dtype:
        raise ValueError(
            f'decode of "{name}" gives {describe(value)}; {describe(feature)} is declared'
        )
    return value


def _numbers(name: str, dtype: np.dtype, kind: str | None, contents: Any) -> np.ndarray:
    """Return the floats or whole numbers [count] of a feature.

    Raises:
      ValueError: they are of another kind than the dtype, or it does not hold one of them.
    """
    if not contents or kind is None:
        return np.zeros(0, dtype)
    # repeated fields of protobuf 7 have __array__; those of older versions are read value by value
    values = np.array(contents, _DTYPES[kind])
    if (values.dtype.kind == "f") != (dtype.kind == "f"):
        raise ValueError(f'feature "{name}" holds {_CONTENTS[kind]}, and {dtype} is wanted')
    if dtype.itemsize < values.dtype.itemsize:
        least, most = limits(dtype)
        # An infinity that was written is no overflow.
        beyond = ((values < least) | (values > most)) & ~np.isinf(values)
        if beyond.any():
            raise ValueError(
                f'feature "{name}" has {values[beyond][0]}, which {dtype} does not hold'
            )
    return values


def declared_by(record: bytes) -> dict[str, Feature]:
    """Return the features of a record as `fixed` declares them: floats float32, integers int64,
    bytes uint8.

    Raises:
      DataError: it is not a `tf.train.Example`, or has no features.
    """
    try:
        stored = parse_example(record)
    except ValueError:
        stored = {}
    if not stored:
        raise DataError(
            "the first record is no tf.train.Example with features.",
            fix="decode=function, which reads such records.",
        )
    features = {}
    # The entries of a map of protobuf come in no fixed order.
    for name in sorted(stored):
        kind = stored[name].WhichOneof("kind")
        if kind is None:  # a feature without values has no dtype
            continue
        contents = getattr(stored[name], kind).value
        count = len(contents)
        if kind == "bytes_list":
            count = sum(map(len, contents))
        features[name] = fixed((count,), _DTYPES[kind].__name__)
    return features
