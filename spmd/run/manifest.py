"""The manifest of a checkpoint: the size and SHA-256 of every file. It is written before the
checkpoint is committed.

It reveals damage (a flipped bit, a truncated or missing file), not tampering: whatever can change
the files can change the manifest.
"""

import hashlib
import io
import json
import os
import stat
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from spmd.base.output_files import name_errors, open_output, sync

MANIFEST_FILE = "manifest.json"
# Orbax's marks, without which arrays can be read, and the manifest itself.
NOT_LISTED = ("commit_success.txt", "_CHECKPOINT_METADATA", MANIFEST_FILE)
READERS = 4  # files read in parallel


def write_manifest(folder: Path) -> None:
    """Write the manifest of a checkpoint that is complete but not committed yet."""
    digests = _hash_files(folder, manifest_files(folder))
    files = {name: [size, digest] for name, (size, digest) in digests.items()}
    text = json.dumps({"algorithm": "sha256", "files": files}, indent=0)
    with open_output(folder / MANIFEST_FILE) as file:
        file.write(text.encode())
    sync(folder / MANIFEST_FILE)


def manifest_files(folder: Path) -> list[str]:
    """Return all files that the manifest of a checkpoint lists, relative to its folder."""
    names = []
    for path in folder.rglob("*"):
        # A link is listed, also one to a folder: its target can be anything.
        if path.is_symlink() or not path.is_dir():
            names.append(path.relative_to(folder).as_posix())
    return [name for name in sorted(names) if _is_listed(name)]


def _is_listed(name: str) -> bool:
    return name.rpartition("/")[2] not in NOT_LISTED


def find_damage(folder: Path, part: int = 0, parts: int = 1) -> str | None:
    """Return what is wrong with a checkpoint; None if every file is as it was written.

    Args:
      folder: of one step.
      part, parts: check the contents of this part of the files only; names and sizes are checked
        for all.
    """
    try:
        files = _listed_files(folder)
        present = manifest_files(folder)
        sizes = {}
        for name in present:
            if name in files and not (folder / name).is_symlink():
                sizes[name] = (folder / name).stat().st_size
    except FileNotFoundError as error:
        if error.filename == str(folder / MANIFEST_FILE):
            return "it has no manifest"
        # The owner of the run may remove an old checkpoint at any time.
        return f"{error.filename} was removed while it was read"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        return f"its manifest cannot be read: {type(error).__name__}"
    for name in files:
        if name not in present:
            return f"{name} is missing"
    for name in present:
        if name not in files:
            return f"{name} is not in its manifest"
        if (folder / name).is_symlink():
            return f"{name} is a link"
        size, _ = files[name]
        if sizes[name] != size:
            return f"{name} has {sizes[name]} bytes of {size}"
    try:
        digests = _hash_files(folder, present[part::parts])
    except OSError as error:
        return f"a file cannot be read: {error}"
    for name, (_, digest) in digests.items():
        if digest != files[name][1]:
            return f"{name} is not what was written"
    return None


def _listed_files(folder: Path) -> dict[str, tuple[int, str]]:
    """Return size and SHA-256 of each file, by the manifest of a checkpoint."""
    manifest = read_json(folder / MANIFEST_FILE)
    files = {}
    for key, (size, digest) in manifest["files"].items():
        name = str(key)
        entry = (int(size), str(digest))
        # Earlier versions listed Orbax's marks.
        if _is_listed(name):
            files[name] = entry
    return files


def read_json(path: Path) -> Any:
    """Return the value in a JSON file.

    Raises:
      OSError: it does not exist or is not a regular file.
      ValueError: it is not JSON.
    """
    with open_regular(path) as file:
        content = file.read()
    try:
        return json.loads(content.decode("utf-8"))
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def open_regular(path: Path) -> io.BufferedReader:
    """Open a file for reading, unless it is something that could block, such as a pipe.

    Raises:
      OSError: it does not exist or is not a regular file.
    """
    # Without O_NONBLOCK, opening a pipe waits until another process writes to it.
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(f"{path} is not a regular file")
    return file


def _hash_files(folder: Path, names: Sequence[str]) -> dict[str, tuple[int, str]]:
    """Return size and hexadecimal SHA-256 of each file."""

    def hash_file(name: str) -> tuple[int, str]:
        with name_errors(folder / name), open_regular(folder / name) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            # Not fstat: the size is that of the bytes that were hashed.
            return file.tell(), digest  # words: of Python's files

    # Both hashing and reading release Python's lock.
    with ThreadPoolExecutor(READERS) as pool:
        return dict(zip(names, pool.map(hash_file, names), strict=True))
