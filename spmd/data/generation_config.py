"""A folder's generation_config.json, as `transformers` reads it: tokens that end a text, and the
choice of tokens.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from spmd.data.text_files import json_object
from spmd.errors import DataError, short_repr

# the first that says something counts, as for `transformers`
FILES = ("generation_config.json", "config.json")

# Keys of a generation that does not write as `spmd.generate` does, with the values that ask for
# nothing; null is one for each.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            "min_length",
            "min_new_tokens",
            "no_repeat_ngram_size",
            "encoder_no_repeat_ngram_size",
            "diversity_penalty",
        ),
        (0,),
    ),
    **dict.fromkeys(
        (
            "num_beams",
            "num_return_sequences",
            "num_beam_groups",
            "encoder_repetition_penalty",
            "guidance_scale",
        ),
        (1,),
    ),
    **dict.fromkeys(("min_p", "epsilon_cutoff", "eta_cutoff", "penalty_alpha"), (0,)),
    **dict.fromkeys(("typical_p", "top_h"), (1,)),
    **dict.fromkeys(
        (
            "bad_words_ids",
            "suppress_tokens",
            "begin_suppress_tokens",
            "force_words_ids",
            "constraints",
            "stop_strings",
        ),
        ([],),
    ),
    **dict.fromkeys(
        (
            "forced_bos_token_id",
            "forced_eos_token_id",
            "exponential_decay_length_penalty",
            "watermarking_config",
        ),
        (),
    ),
    **dict.fromkeys(("token_healing", "remove_invalid_values"), (False,)),
    "sequence_bias": ({}, []),
}
# keys that greedy choice does not read
DRAWS = ("min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")


@dataclasses.dataclass(frozen=True)
class AskedSampling:
    """The choice of tokens that a folder asks for.

    Attributes:
      where: the file that says so.
      options: arguments of `spmd.generate`; empty if the file asks for the most likely token, as
        the defaults of `spmd.generate` do.
      unknown: keys with their values that `spmd.generate` has no argument for.
    """

    where: str
    options: dict[str, Any]
    unknown: list[str]

    @property
    def text(self) -> str:
        """The options, as a call has them."""
        return ", ".join(f"{name}={value}" for name, value in self.options.items())


def asked_sampling(folder: Path) -> AskedSampling:
    """Return the choice of tokens that generation_config.json asks for; without this file, that an
    old config.json asks for.

    Raises:
      DataError: a file is no JSON object, or an option is out of range.
    """
    path, content = next(_contents(folder), (folder / FILES[0], {}))
    options: dict[str, Any] = {}
    draws = _value(path, content, "do_sample", False, _is_bool, "true or false")
    temperature = _value(path, content, "temperature", 1.0, _is_from_0, "a number from 0")
    if draws and temperature > 0:
        options["temperature"] = temperature
        # transformers draws from the 50 likeliest tokens where a file says nothing.
        top_k = _value(path, content, "top_k", 50, _is_count, "a whole number")
        if top_k:
            options["top_k"] = int(top_k)
        top_p = _value(path, content, "top_p", 1.0, _is_part, "a number above 0, up to 1")
        if top_p < 1:
            options["top_p"] = top_p
    penalty = _value(path, content, "repetition_penalty", 1.0, _is_positive, "a number above 0")
    if penalty != 1:
        options["repetition_penalty"] = penalty
    unknown = []
    for key, neutral in NEUTRAL.items():
        value = content.get(key)
        if value is None or value in neutral or (key in DRAWS and not draws):
            continue
        unknown.append(f"{key}={short_repr(value)}")
    return AskedSampling(str(path), options, unknown)


def end_tokens(folder: Path) -> tuple[int, ...]:
    """The ids of `eos_token_id` in a folder's files, none if no file says so.

    Raises:
      DataError: a file is no JSON object, or the ids are no whole numbers.
    """
    for path, content in _contents(folder):
        value = content.get("eos_token_id")
        ids: list[Any] = []
        if isinstance(value, list):
            ids = value
        elif value is not None:
            ids = [value]
        # JSON's true is an int for isinstance, and would be token 1.
        if any(isinstance(token, bool) or not isinstance(token, int) or token < 0 for token in ids):
            raise DataError(
                f"{path}: eos_token_id is {short_repr(value)}.",
                fix="a token id, or a list of them.",
            )
        if ids:
            return tuple(ids)
    return ()


def _contents(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the path and the content of each file that there is."""
    for path in (folder / name for name in FILES):
        if path.is_file():
            yield path, json_object(path)


def _value(
    path: Path,
    content: dict[str, Any],
    key: str,
    default: Any,
    accepts: Callable[[Any], bool],
    accepted: str,
) -> Any:
    value = content.get(key)
    if value is None:
        return default
    if not accepts(value):
        raise DataError(
            f"{path}: {key} is {short_repr(value)}.", fix=f"{accepted}; or the file without it."
        )
    return value


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_from_0(value: Any) -> bool:
    return _is_number(value) and value >= 0


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_count(value: Any) -> bool:
    # JSON may hold a whole number as 50.0.
    return _is_from_0(value) and value == int(value)


def _is_part(value: Any) -> bool:
    return _is_positive(value) and value <= 1


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
