"""Records that a function of the user decodes."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from spmd.base.tree import describe
from spmd.data.features import Feature, fields_of
from spmd.data.number_parsing import limits
from spmd.data.records import Field
from spmd.errors import DataError, OptionError, first_line, option, quoted, type_name

LEARNED = 1000  # records, at least one of which must decode


class Decoder:
    """A user's function from a record to a dict of arrays, which must return the same shapes for
    each record, except in padded arrays.
    """

    def __init__(self, function: Callable[[Any], Mapping[str, Any]], pad: Mapping[str, Feature]):
        self._function, self._pad = function, dict(pad)
        self._decoded_fields: dict[str, Field] = {}
        self.fields: dict[str, Field] = {}

    def learn_first(
        self,
        read: Callable[[int], Any],
        records: int,
        where: Callable[[int], str],
        *,
        skip: bool,
    ) -> None:
        """Learn the fields from the first record, or from the first readable one if bad records are
        skipped.

        Args:
          read: returns a record by number.
          records: how many there are.
          where: returns the place of a record in words.

        Raises:
          DataError: the first cannot be read; of bad records that are skipped, none of many.
        """
        most = min(records, LEARNED) if skip else 1
        first_error = ""
        for record in range(most):
            try:
                why = self.learn(read(record))
            except DataError as error:
                why = error.summary.rstrip(".")
            if not why:
                return
            first_error = first_error or f"{where(record)}: {why}"
        fix = "an intact file, and a function that returns a dict of arrays"
        if most > 1:
            first_error += f" (None of the first {most} records can be read.)"
        else:
            fix += f"; {option('on_error', quoted('skip'))} leaves out bad records"
        raise DataError(first_error, fix=f"{fix}.")

    def learn(self, raw: Any) -> str:
        """Learn shapes and dtypes from a record; returns what is wrong with it, or "".

        Raises:
          OptionError: the function does not return an array that `pad` names.
        """
        decoded = self._decoded(raw)
        if isinstance(decoded, str):
            return decoded
        missing = [name for name in self._pad if name not in decoded]
        if missing:
            raise OptionError(
                f"pad names {', '.join(missing)}, but decode returns {', '.join(decoded)}.",
                fix="names of the dict that decode returns.",
            )
        # Objects, bytes, text, times and numpy 2's StringDType; not "V", which bfloat16 has, too.
        unsupported = [
            f'{value.dtype} for "{name}"'
            for name, value in decoded.items()
            if value.dtype.kind in "OSUMmT"
        ]
        if unsupported or not decoded:
            return (
                f"decode returns {', '.join(unsupported) or 'nothing'}, which cannot be placed on "
                "a device"
            )
        self._decoded_fields = {
            name: Field(value.shape, value.dtype) for name, value in decoded.items()
        }
        self.fields = self._decoded_fields | fields_of(self._pad)
        return ""

    def _decoded(self, raw: Any) -> dict[str, np.ndarray] | str:
        try:
            decoded = self._function(raw)
            if not isinstance(decoded, Mapping):
                return f"decode returns {type_name(decoded)}, but must return a dict of arrays"
            return {str(name): np.asarray(value) for name, value in decoded.items()}
        except Exception as error:
            # a user's function may raise anything; the error names the record
            return f"decode raises {first_line(error)}"

    def read_record(
        self, raw: Any, into: dict[str, np.ndarray], at: int, bad: dict[int, str]
    ) -> None:
        """Store the arrays of one record in row `at`; if they are not those of the first, `bad`
        gets the reason.
        """
        decoded = self._decoded(raw)
        if isinstance(decoded, str):
            bad[at] = decoded
            return
        for name, field in self._decoded_fields.items():
            value, padded = decoded.get(name), self._pad.get(name)
            if value is None or (padded is None and Field(value.shape, value.dtype) != field):
                returned = "nothing"
                if value is not None:
                    returned = describe(value)
                bad[at] = (
                    f'decode returns {returned} for "{name}", but {field} for the first record; '
                    "pad=... pads arrays of different lengths"
                )
            elif padded is None:
                into[name][at] = value
            elif value.ndim != 1 or len(value) > padded.shape[0]:
                bad[at] = (
                    f'"{name}" has shape {list(value.shape)}, but is padded to [{padded.shape[0]}]'
                )
            elif len(value) and not _holds(padded.dtype, value):
                bad[at] = (
                    f'decode returns {value.dtype} for "{name}", with values that {padded.dtype} '
                    "cannot hold"
                )
            else:
                padded.store(name, value, into, at)


def check_decode(decode: Any, pad: Mapping[str, Any] | None) -> None:
    """Check the options that make a `Decoder`.

    Raises:
      OptionError: one of them is something else.
    """
    if not callable(decode):
        raise OptionError(
            f"decode is {type_name(decode)}.",
            fix="a function from a record to a dict of arrays.",
        )
    for name, feature in (pad or {}).items():
        if not isinstance(feature, Feature) or feature.fill is None:
            raise OptionError(
                f'pad: "{name}" is {feature!r}.', fix="spmd.data.padded(length, dtype)."
            )


def _holds(dtype: np.dtype, values: np.ndarray) -> bool:
    """Return True if the dtype holds these numbers, up to rounding."""
    # For numpy, int64 to int32 is "same_kind", and wraps around; so integers are judged by value.
    if dtype.kind in "iu" and values.dtype.kind in "iu":
        least, most = limits(dtype)
        return bool(least <= values.min() and values.max() <= most)
    return np.can_cast(values.dtype, dtype, "same_kind")
