"""Validate user text before it is written into a script or a manifest: it must not be able to add
lines to them.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from spmd.errors import OptionError, option

RESERVED = (
    "PROCESSES",
    "PROCESS",
    "LOCAL_PROCESS",
    "LOCAL_PROCESSES",
    "COORDINATOR",
    "TOKEN",
    "REPORT",
    "ATTEMPT",
    "LAUNCHER",
    "SPARE",
)
# options of SLURM with which others of `spmd launch` begin
COMPLETE_NAMES = ("--gpus",)
BY_OPTION = {"SPMD_STALL": "--stall", "SPMD_SIMULATE": "--simulate"}


def check_printable(name: str, text: str) -> None:
    """Refuse empty text and control characters, such as line ends."""
    if not text or not text.isprintable():
        raise OptionError(
            f"{option(name, repr(text))}.", fix="text on one line, without control characters."
        )


def check_pattern(name: str, text: str | None, pattern: str, fix: str) -> None:
    """Refuse text that does not match the pattern; None means not given."""
    if text is not None and not re.fullmatch(pattern, text, re.ASCII):
        raise OptionError(f"{option(name, repr(text))}.", fix=f"{fix}.")


def check_script_is_named(words: Sequence[str], options: str) -> None:
    """Refuse a missing script."""
    if not words or list(words) == ["-m"]:
        raise OptionError("there is no script to run.", fix=f"spmd launch {options} train.py")


def check_script_args(words: Sequence[str], options: str) -> None:
    """Refuse a missing script, and arguments with several lines."""
    check_script_is_named(words, options)
    for word in filter(None, words):
        check_printable("an argument of the script", word)


def check_environment_variables(
    pairs: Iterable[tuple[str, str]], set_by_options: Mapping[str, str]
) -> dict[str, str]:
    """Validate environment variables, and return them by name.

    Args:
      pairs: names and values.
      set_by_options: variables that other options set.

    Raises:
      OptionError: an invalid name, a duplicate, a variable that the launcher sets, or a control
        character in a value.
    """
    checked: dict[str, str] = {}
    for name, value in pairs:
        check_pattern("env", name, r"[A-Za-z_]\w*", "NAME=VALUE, a name of letters, digits and _")
        # An empty value is valid, and `check_printable` refuses empty text.
        if value:
            check_printable(f"env {name}", value)
        if name in checked:
            raise OptionError(
                f"env {name} is given twice: {checked[name]!r} and {value!r}.", fix="give it once."
            )
        if name.removeprefix("SPMD_") in RESERVED and name.startswith("SPMD_"):
            raise OptionError(
                f"env {name} is set by the launcher in each process.", fix="leave it out."
            )
        if name in set_by_options or name in BY_OPTION:
            raise OptionError(
                f"env {name} is set by an option.",
                fix=f"{BY_OPTION.get(name, 'use the option or the variable, not both')}.",
            )
        checked[name] = value
    return checked


def check_scheduler_option(program: str, text: str, taken: Iterable[str], example: str) -> None:
    """Refuse an option of `sbatch` or `srun` that this library sets itself, or that is none.

    Args:
      program: "sbatch" or "srun".
      text: such as "--constraint=a100".
      taken: options that have their own option here, or are already set: long ones, and short ones
        of one letter.
      example: of an option.
    """
    check_printable(program, text)
    name = re.split(r"[=\s]", text)[0]
    if not name.startswith("--"):
        name = name[:2]
    # SLURM takes abbreviations, too. A name of its own is none, though another begins with it.
    is_short = len(name) > 2 and name not in COMPLETE_NAMES
    if name in taken or (is_short and any(other.startswith(name) for other in taken)):
        raise OptionError(
            f'{program} option "{text}": {name} has its own option here, or is already set.',
            fix="leave it out.",
        )
    if not re.fullmatch(r"--[a-z][a-z-]*|-[A-Za-z]", name):
        raise OptionError(
            f'{program} option "{text}".', fix=f"as {program} expects it, such as {example}."
        )


def script_name(words: Iterable[str]) -> str:
    """The default name of a job: the script without folder and suffix, or the last part of a
    module's name.

    >>> script_name(["runs/train.py", "--x"]), script_name(["-m", "my.train"])
    ('train', 'train')
    """
    first, *others = words
    if first == "-m":
        return others[0].rpartition(".")[2]
    return Path(first).stem
