"""Says why a large program is not in the cache: beside the entries is a record of what each program
was compiled for.
"""

import contextlib
import hashlib
import json
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from spmd.base import output_files
from spmd.base.output_files import DamagedFileError
from spmd.errors import first_line, printable
from spmd.program_cache.activate import active_folder
from spmd.program_cache.counts import compilations
from spmd.program_cache.entries import RECORDS, make_private, on_miss, was_removed

# Records that are kept of one program.
MOST_RECORDS = 8
# Kinds of records.
KINDS = {"facts", "code"}
# Differences in a line.
MOST_SHOWN = 3
# What is loaded sooner is not worth a line.
LEAST_SECONDS = 0.05


class Watch:
    """A program that is compiled or loaded: `line` names its source, if it was loaded."""

    line = ""


@contextlib.contextmanager
def watch(
    name: str,
    module: str,
    facts: Callable[[], Mapping[str, str]],
    code: Callable[[], Mapping[str, str]],
    *,
    records: bool,
) -> Iterator[Watch]:
    """Watch a block in which a program is compiled or loaded. If it is not in the cache, a line
    says why; the record of it is written after.

    Args:
      name: such as "the step".
      module: JAX's name of the program, with which its entry begins.
      facts: what it is compiled for, by name; the ones that cause others first. Asked for only if
        it is not in the cache.
      code: facts about its text, which follow from those and from the user's code.
      records: whether this process reads and writes records.
    """
    folder = active_folder()
    thread = threading.get_ident()
    watched = Watch()
    before = compilations()
    new: dict[str, Mapping[str, str]] = {}
    # JAX looks for an entry once more before it writes it.
    asked = threading.Event()

    def missed(key: str) -> None:
        if asked.is_set() or threading.get_ident() != thread:
            return
        if key.rpartition("-")[0] != module:
            return
        asked.set()
        logger = logging.getLogger("spmd")
        try:
            new.update(facts=facts(), code=code())
        except Exception as error:
            # A class in a batch may check its fields: the program itself is kept all the same.
            logger.warning(
                "compiling %s: not in the cache; why is not known: %s.", name, first_line(error)
            )
            return
        why = _reason(_read_records(path), new)
        if why:
            logger.warning("compiling %s: not in the cache, because %s.", name, why)

    if folder is None or not records:
        yield watched
        return
    path = folder / f"{name.replace(' ', '-')}-{_script()}{RECORDS}"
    on_miss.append(missed)
    try:
        yield watched
    finally:
        on_miss.remove(missed)
    spent = compilations() - before
    if new:
        _add(path, new)
    elif spent.loaded and spent.seconds >= LEAST_SECONDS:
        watched.line = f"{name}: loaded from the compilation cache ({spent.seconds:.1f} s)."


def _script() -> str:
    """Return the name of this script, in a folder that several may share."""
    script = Path(sys.argv[0] or "notebook").absolute()
    name = re.sub(r"[^A-Za-z0-9_]", "_", script.stem)[:40]
    return f"{name}-{hashlib.sha256(str(script).encode()).hexdigest()[:8]}"


def _read_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a program, the newest first."""
    with contextlib.suppress(OSError, DamagedFileError, ValueError, TypeError, AttributeError):
        records = json.loads(output_files.read_checked(path) or b"[]")
        return [record for record in records if record.keys() == KINDS]
    return []


def _add(path: Path, new: Mapping[str, Mapping[str, str]]) -> None:
    if was_removed(path.parent):
        return
    others = [record for record in _read_records(path) if record != new]
    content = json.dumps([new, *others][:MOST_RECORDS], indent=0).encode()
    # The entry could not be written either, which is logged.
    with contextlib.suppress(OSError):
        make_private(path.parent)
        output_files.write_checked(path, content, durable=False)


def _reason(records: list[dict[str, Any]], new: Mapping[str, Mapping[str, str]]) -> str:
    """Return the differences from the nearest record of the same model, of several the newest; ""
    if there is none.
    """
    # Scripts and notebooks have programs of many models.
    records = [
        record for record in records if _parameters(record["facts"]) == _parameters(new["facts"])
    ]
    if not records:
        return ""
    nearest = min(
        records,
        key=lambda record: [len(_different(record[kind], new[kind])) for kind in ("facts", "code")],
    )
    if names := _different(nearest["facts"], new["facts"]):
        return _changes(names, nearest["facts"], new["facts"])
    old = nearest["code"]
    code = new["code"]
    if old == code:
        return (
            "its entry was removed, or could not be kept (a program that calls the host, as "
            "jax.debug.print does, cannot before jax 0.11)"
        )
    numbers = [name for name in _different(old, code) if name.startswith("number")]
    # a rate may stand in many places
    numbers = list({(old.get(name), code.get(name)): name for name in reversed(numbers)}.values())
    if not numbers or len(numbers) > MOST_SHOWN or old.keys() != code.keys():
        return "the code of the model, the loss, the optimizer or spmd has changed"
    return _changes(numbers[::-1], old, code)


def _parameters(facts: Mapping[str, str]) -> set[str]:
    return {name for name in facts if name.startswith("array params/")}


def _different(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    return [name for name in {**new, **old} if old.get(name) != new.get(name)]


def _changes(names: list[str], old: Mapping[str, str], new: Mapping[str, str]) -> str:
    more = ""
    if len(names) > MOST_SHOWN:
        more = f", and {len(names) - MOST_SHOWN} more changes"
    return (
        ", and ".join(
            f"{name} was {_shown(old.get(name))}, is {_shown(new.get(name))}"
            for name in names[:MOST_SHOWN]
        )
        + more
    )


def _shown(value: str | None) -> str:
    if value is None:
        return "not set"
    return printable(value, 120)
