"""A manifest of a checkpoint: every file with its size and SHA-256, written before the checkpoint is committed, with it or not at all.

It tells damage (a bit that has flipped, a file that was cut off, or is missing), not tampering: who can change files can change it too.
"""

import hashlib
import io
import json
import os
import stat
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

MANIFEST_FILE = "manifest.json"
LATER = (
    "commit_success.txt",
    "_CHECKPOINT_METADATA",
    MANIFEST_FILE,
)  # not listed: Orbax writes them later
READERS = 4  # files that are read at once


def write_manifest(folder: Path) -> None:
    """Write the manifest of a checkpoint that is complete, and not committed yet."""
    files = {name: [size, digest] for name, (size, digest) in _read(folder, manifest_files(folder)).items()}
    text = json.dumps({"algorithm": "sha256", "files": files}, indent=0)
    with (folder / MANIFEST_FILE).open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def manifest_files(folder: Path) -> list[str]:
    """All files of a checkpoint that its manifest has, as paths below it."""
    paths = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return [name for name in paths if name not in LATER]


def find_damage(folder: Path, part: int = 0, parts: int = 1) -> str | None:
    """What is wrong with a checkpoint; None where all is as it was written.

    Args:
      folder: of one step.
      part, parts: only this part of the contents is read; sizes and names are all looked at.
    """
    try:
        told = read_json(folder / MANIFEST_FILE)
        files: Mapping[str, Sequence] = {str(name): (int(size), str(digest)) for name, (size, digest) in told["files"].items()}
        there = manifest_files(folder)
        sizes = {name: (folder / name).stat().st_size for name in there if name in files and not (folder / name).is_symlink()}
    except FileNotFoundError as error:
        return "it has no manifest" if error.filename == str(folder / MANIFEST_FILE) else f"{error.filename} was removed while it was read"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        return f"its manifest cannot be read: {type(error).__name__}"
    for name in files:
        if name not in there:
            return f"{name} is missing"
    for name in there:
        if name not in files:
            return f"{name} is not in its manifest"
        if (folder / name).is_symlink():
            return f"{name} is a link"
        if sizes[name] != files[name][0]:
            return f"{name} has {sizes[name]} bytes of {files[name][0]}"
    try:
        found = _read(folder, there[part::parts])
    except OSError as error:
        return f"a file cannot be read: {error}"
    return next((f"{name} is not what was written" for name, one in found.items() if one[1] != files[name][1]), None)


def read_json(path: Path) -> Any:
    """What a file of JSON holds.

    Raises:
      OSError: it is not there, or is no file: to open a pipe would wait for whoever writes into it.
      ValueError: it is not JSON.
    """
    with _opened(path) as file:
        try:
            return json.loads(file.read().decode("utf-8"))
        except RecursionError as error:
            raise ValueError("nested too deep") from error


def _opened(path: Path) -> io.BufferedReader:
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(f"{path} is not a regular file")
    return file


def _read(folder: Path, names: Sequence[str]) -> dict[str, tuple[int, str]]:
    """Size and SHA-256 of files, in hexadecimal."""

    def one(name: str) -> tuple[int, str]:
        with _opened(folder / name) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return file.tell(), digest

    with ThreadPoolExecutor(READERS) as pool:
        return dict(zip(names, pool.map(one, names), strict=True))
