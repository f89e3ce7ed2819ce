"""Says why a large program is not in the cache: beside the entries is a record of what each program was compiled for."""

import contextlib
import hashlib
import json
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from spmd import checksummed_files
from spmd.checksummed_files import DamagedFileError
from spmd.errors import printable
from spmd.program_cache.activate import active_folder
from spmd.program_cache.counts import compilations
from spmd.program_cache.entries import make_private, on_miss

MOST_RECORDS = 8  # of a program
MOST_SHOWN = 3  # differences in a line
PROGRAM = "the program"  # the hash of its text, among the facts
LEAST_SECONDS = 0.05  # what is loaded sooner is not worth a line


class Watch:
    """What became of a program: `line` says where it came from, if it was loaded."""

    line = ""


@contextlib.contextmanager
def watch(name: str, module: str, facts: Callable[[], Mapping[str, str]], text: Callable[[], str], *, records: bool) -> Iterator[Watch]:
    """In the block, a program is compiled or loaded. If it is not in the cache, a line says why; the record of it is written after.

    Args:
      name: such as "the step".
      module: JAX's name of the program, with which its entry begins.
      facts: what it is compiled for, by name.
      text: of the program; asked for only if it is not in the cache.
      records: whether this process reads and writes records.
    """
    folder, thread, found, before = active_folder(), threading.get_ident(), Watch(), compilations()
    new: dict[str, str] = {}

    def missed(key: str) -> None:
        if not new and threading.get_ident() == thread and key.rpartition("-")[0] == module:
            new.update(facts(), **{PROGRAM: hashlib.sha256(text().encode()).hexdigest()[:16]})
            if why := _why(_read(path), new):
                logging.getLogger("spmd").warning("compiling %s: not in the cache, because %s.", name, why)

    if folder is None or not records:
        yield found
        return
    path = folder / f"{name.replace(' ', '-')}-{_script()}.json"
    on_miss.append(missed)
    try:
        yield found
    finally:
        on_miss.remove(missed)
    spent = compilations() - before
    if new:
        _add(path, new)
    elif spent.loaded and spent.seconds >= LEAST_SECONDS:
        found.line = f"{name}: loaded from the compilation cache ({spent.seconds:.1f} s)."


def _script() -> str:
    """Tells scripts apart that share a folder."""
    script = Path(sys.argv[0] or "notebook").absolute()
    return f"{re.sub(r'[^A-Za-z0-9_]', '_', script.stem)[:40]}-{hashlib.sha256(str(script).encode()).hexdigest()[:8]}"


def _read(path: Path) -> list[dict[str, str]]:
    """The records of a program, the newest first."""
    with contextlib.suppress(OSError, DamagedFileError, ValueError):
        records = json.loads(checksummed_files.read(path) or b"[]")
        return [record for record in records if isinstance(record, dict)]
    return []


def _add(path: Path, facts: Mapping[str, str]) -> None:
    others = [record for record in _read(path) if record != facts]
    with contextlib.suppress(OSError):  # the entry could not be written either, which is logged
        make_private(path.parent)
        checksummed_files.write(path, json.dumps([facts, *others][:MOST_RECORDS], indent=0, sort_keys=True).encode())


def _why(records: list[dict[str, str]], facts: Mapping[str, str]) -> str:
    """What differs from the nearest record, of several the newest; "" if there is none."""
    different = [[name for name in {**record, **facts} if record.get(name) != facts.get(name)] for record in records]
    if not different:
        return ""
    record, names = min(zip(records, different, strict=True), key=lambda pair: len(pair[1]))
    if names == [PROGRAM]:
        return "its code has changed: the model, the loss, the optimizer or a number in them (everything else is as before)"
    if not names:
        return "its entry was removed, or could not be kept (a program that calls the host, as jax.debug.print does, cannot)"
    names = [name for name in names if name != PROGRAM]
    more = f", and {len(names) - MOST_SHOWN} more changes" if len(names) > MOST_SHOWN else ""
    shown = [f"{name} was {_shown(record.get(name))}, is {_shown(facts.get(name))}" for name in names[:MOST_SHOWN]]
    return ", and ".join(shown) + more


def _shown(value: str | None) -> str:
    return "not set" if value is None else printable(value, 120)
