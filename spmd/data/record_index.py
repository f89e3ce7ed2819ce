"""An index of where records begin and end in files, built once, to read records by number."""

import collections
import concurrent.futures
import contextlib
import glob
import hashlib
import json
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from spmd import checksummed_files
from spmd.data import data_hash
from spmd.errors import DataError, OptionError, type_name
from spmd.user_paths import as_path, make_folder

CHUNK = 1 << 24  # bytes of a file that are scanned at a time
SAMPLED = 16  # blocks of a file that are hashed to check that an index is for it
OPEN = 256  # the number of files up to which all are kept open
_PACKED = {b"\x1f\x8b\x08": "gzip", b"PK\x03\x04": "zip", b"BZh": "bzip2", b"\x28\xb5\x2f\xfd": "zstd", b"\xfd7zXZ": "xz"}

Scan = Callable[[str], tuple[np.ndarray, np.ndarray]]


def find_files(files: str | Path | Sequence[str | Path]) -> tuple[str, ...]:
    """The files that match a pattern, a path, or several of them; those of each pattern sorted by name.

    Raises:
      DataError: one of them matches no file.
    """
    patterns = [files] if isinstance(files, str | Path) else list(files) if isinstance(files, Iterable) else [None]
    if not all(isinstance(one, str | Path) for one in patterns):
        raise OptionError(f"files={files!r} is {type_name(files)}.", fix='a pattern such as "train-*.csv", or a list of paths.')
    paths: list[str] = []
    for one in patterns:
        text = str(one)
        names = [text] if os.path.isfile(text) else sorted(name for name in glob.glob(text, recursive=True) if os.path.isfile(name))
        if not names:
            folder = os.path.dirname(text) or "."
            there = sorted(os.listdir(folder))[:5] if os.path.isdir(folder) else None
            has = "does not exist" if there is None else f"holds {', '.join(there)}" if there else "is empty"
            raise DataError(f'no file matches "{text}".', fix=f"another pattern; the folder {folder} {has}.")
        paths += names
    if not paths:
        raise DataError("no files were given.", fix='a pattern such as "train-*.csv", or a list of paths.')
    twice = sorted(path for path, times in collections.Counter(map(os.path.abspath, paths)).items() if times > 1)
    if twice:
        more = f" and {len(twice) - 1} more" if len(twice) > 1 else ""
        raise DataError(f"{twice[0]}{more} is given twice, so all its records would be.", fix="each file once.")
    for path in paths:
        if not os.access(path, os.R_OK):
            raise DataError(f"{path} may not be read by this process.", fix="its permissions, or another pattern.")
    return tuple(paths)


def compression(path: str) -> str | None:
    """How a file is compressed, by its first bytes."""
    with open(path, "rb") as file:
        begin = file.read(6)
    return next((name for magic, name in _PACKED.items() if begin.startswith(magic)), None)


class RecordIndex:
    """Reads the bytes of records by number; those of the first file come first.

    Args:
      paths: the files.
      scan: returns int64[records] for one file: where each begins, and where it ends.
      kind: the format and options of the scan; part of the key in `cache`.
      cache: a folder that stores the index for later runs; None: it is not stored.
      fills_file: records must fill a file to its end; if not, the scan warns, and the index is not stored.
    """

    def __init__(self, paths: tuple[str, ...], scan: Scan, kind: str, cache: str | Path | None = None, *, fills_file: bool = False):
        if cache is not None:
            make_folder(as_path(cache, "index"), OptionError)
        self.paths = paths
        self.sizes = [os.path.getsize(path) for path in paths]
        with concurrent.futures.ThreadPoolExecutor(min(len(paths), os.cpu_count() or 1), "spmd-index") as pool:
            ranges = list(
                pool.map(lambda path: scan(path) if cache is None else _cached(Path(cache), path, kind, scan, fills_file=fills_file), paths)
            )
        self.counts = [len(starts) for starts, _ in ranges]
        self.first = np.cumsum([0, *self.counts])
        self.starts = np.concatenate([starts for starts, _ in ranges])
        self.ends = np.concatenate([ends for _, ends in ranges])
        self._open()

    def _open(self) -> None:
        self._descriptors: dict[str, int] = {}
        self._lock = threading.Lock()
        weakref.finalize(self, _close, self._descriptors)

    def __len__(self) -> int:
        return len(self.starts)

    def __getstate__(self) -> dict:
        return {name: value for name, value in vars(self).items() if name not in ("_descriptors", "_lock")}

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state)
        self._open()

    def place(self, record: int) -> tuple[str, int, int]:
        """The file of a record, its number in it from 0, and its first byte."""
        file = int(np.searchsorted(self.first, record, "right")) - 1
        return self.paths[file], int(record - self.first[file]), int(self.starts[record])

    def read(self, records: np.ndarray) -> tuple[bytes, np.ndarray, np.ndarray]:
        """The bytes of records in ascending order, and where in them each begins and ends; adjacent ones are read together.

        Args:
          records: int64[n], ascending; at least one.

        Raises:
          DataError: a file is shorter than it was when it was indexed.
        """
        files = np.searchsorted(self.first, records, "right") - 1
        starts, ends = self.starts[records], self.ends[records]
        breaks = np.flatnonzero((files[1:] != files[:-1]) | (starts[1:] != ends[:-1])) + 1
        firsts, lasts = np.concatenate([[0], breaks]), np.concatenate([breaks, [len(records)]]) - 1
        runs, begins, sizes = files[firsts], starts[firsts], ends[lasts] - starts[firsts]
        with contextlib.ExitStack() as opened:
            descriptors = {file: self._descriptor(file, opened) for file in np.unique(runs).tolist()}
            wanted = [
                (descriptors[file], size, begin) for file, size, begin in zip(*map(np.ndarray.tolist, (runs, sizes, begins)), strict=True)
            ]
            pieces = [os.pread(*one) for one in wanted]
            for at in np.flatnonzero(np.fromiter(map(len, pieces), np.int64, len(pieces)) != sizes).tolist():
                pieces[at] = self._rest(int(runs[at]), pieces[at], *wanted[at])
        bases = np.cumsum([0, *map(len, pieces[:-1])]) - begins
        shift = np.repeat(bases, lasts - firsts + 1)
        return b"".join(pieces), starts + shift, ends + shift

    def _rest(self, file: int, piece: bytes, descriptor: int, size: int, begin: int) -> bytes:
        """The complete piece, if one call returned only a part of it."""
        while len(piece) < size and (more := os.pread(descriptor, size - len(piece), begin + len(piece))):
            piece += more
        if len(piece) < size:
            path, has = self.paths[file], begin + len(piece)
            raise DataError(f"{path} has {has} bytes, and had {self.sizes[file]} when it was indexed.", fix="the file as it was.")
        return piece

    def _descriptor(self, file: int, opened: contextlib.ExitStack) -> int:
        path = self.paths[file]
        if len(self.paths) > OPEN:
            descriptor = os.open(path, os.O_RDONLY)
            opened.callback(os.close, descriptor)
            return descriptor
        with self._lock:
            if path not in self._descriptors:
                self._descriptors[path] = os.open(path, os.O_RDONLY)
            return self._descriptors[path]


def _close(descriptors: dict[str, int]) -> None:
    for descriptor in descriptors.values():
        os.close(descriptor)


def _cached(folder: Path, path: str, kind: str, scan: Scan, *, fills_file: bool) -> tuple[np.ndarray, np.ndarray]:
    """The result of a scan from the file of an earlier run; scans again if the data or that file has changed."""
    about, log = os.stat(path), logging.getLogger("spmd")
    facts = [kind, os.path.abspath(path), about.st_size, about.st_mtime_ns, data_hash.of_files([path], [about.st_size], SAMPLED)]
    kept = folder / f"{hashlib.sha256(repr(facts[:2]).encode()).hexdigest()[:32]}.index"

    def is_short(ends: np.ndarray) -> bool:  # then the file is scanned each time, to warn each time
        return fills_file and (int(ends[-1]) if len(ends) else 0) < about.st_size

    try:
        stored = checksummed_files.read(kept)
        head, _, numbers = (stored or b"\n").partition(b"\n")
        if stored is not None and json.loads(head) == facts:
            starts, ends = np.frombuffer(numbers, "<i8").reshape(2, -1)
            if not is_short(ends):
                return starts, ends
    except checksummed_files.DamagedFileError as why:
        log.warning("the index of %s is damaged and is built again: %s (%s).", path, why, kept)
    starts, ends = scan(path)
    if not is_short(ends):
        try:
            checksummed_files.write(kept, json.dumps(facts).encode() + b"\n" + np.stack([starts, ends]).astype("<i8").tobytes())
        except OSError as error:
            log.warning("the index of %s cannot be kept, so the next run looks for its records again: %s.", path, error)
    return starts, ends
