"""What people write into jobs, checked before it stands in a script or a manifest: nothing there may end a line or begin another."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from spmd.errors import OptionError

OWN = ("PROCESSES", "PROCESS", "LOCAL_PROCESS", "LOCAL_PROCESSES", "COORDINATOR", "TOKEN", "REPORT", "ATTEMPT", "LAUNCHER")
BY_OPTION = {"SPMD_STALL": "--stall", "SPMD_SIMULATE": "--simulate"}


def printable(name: str, text: str) -> None:
    """Refuse what is empty, or has a control character, such as the end of a line."""
    if not text or not text.isprintable():
        raise OptionError(f"{name}={text!r}.", fix="text in one line, without control characters.")


def matching(name: str, text: str | None, pattern: str, fix: str) -> None:
    """Refuse what is not of that form as a whole; None is what was not given."""
    if text is not None and not re.fullmatch(pattern, text, re.ASCII):
        raise OptionError(f"{name}={text!r}.", fix=f"{fix}.")


def check_words(words: Sequence[str], options: str) -> None:
    """Refuse a script that is none, or has an argument of several lines."""
    if not words or list(words) == ["-m"]:
        raise OptionError("there is no script to run.", fix=f"spmd launch {options} train.py")
    for word in filter(None, words):
        printable("an argument of the script", word)


def variables(pairs: Iterable[tuple[str, str]], taken: Mapping[str, str]) -> dict[str, str]:
    """Environment variables by name.

    Args:
      pairs: names and values.
      taken: variables that other options set.

    Raises:
      OptionError: no name, a name twice, one that the launcher itself sets, or a control character in a value.
    """
    found: dict[str, str] = {}
    for name, value in pairs:
        matching("env", name, r"[A-Za-z_]\w*", "NAME=VALUE, a name of letters, digits and _")
        if value:
            printable(f"env {name}", value)
        if name in found:
            raise OptionError(f"env {name} is given twice: {found[name]!r} and {value!r}.", fix="give it once.")
        if name.removeprefix("SPMD_") in OWN and name.startswith("SPMD_"):
            raise OptionError(f"env {name} is set by the launcher, for each process.", fix="leave it out.")
        if name in taken or name in BY_OPTION:
            raise OptionError(f"env {name} is set by an option.", fix=f"{BY_OPTION.get(name, 'the option, or the variable')}.")
        found[name] = value
    return found


def script_name(words: Iterable[str]) -> str:
    """What a job is called where it was given no name: the script without its folder and ending, or a module's last word.

    >>> script_name(["runs/train.py", "--x"]), script_name(["-m", "my.train"])
    ('train', 'train')
    """
    first, *rest = words
    return rest[0].rpartition(".")[2] if first == "-m" else Path(first).stem
