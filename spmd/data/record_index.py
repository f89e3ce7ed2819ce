"""An index of where records begin and end in files, built once, to read records by number."""

import collections
import concurrent.futures
import functools
import glob
import hashlib
import json
import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spmd.base import output_files
from spmd.base.output_files import name_errors
from spmd.base.user_paths import as_path, make_folder
from spmd.data import data_hash
from spmd.errors import DataError, OptionError, type_name

CHUNK = 1 << 24  # bytes of a file that are scanned at a time
SAMPLED = 16  # blocks of a file that are hashed to check that an index is for it
OPEN = 256  # the number of files up to which all are kept open
_COMPRESSED = {
    b"\x1f\x8b\x08": "gzip",
    b"PK\x03\x04": "zip",
    b"BZh": "bzip2",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zXZ": "xz",
}

Scan = Callable[[str], tuple[np.ndarray, np.ndarray]]


def find_files(files: str | Path | Sequence[str | Path]) -> tuple[str, ...]:
    """The files that match a pattern, a path, or several of them; those of each pattern sorted by
    name.

    Raises:
      DataError: one of them matches no file.
    """
    patterns: list[Any] = [None]
    if isinstance(files, str | os.PathLike):
        patterns = [files]
    elif isinstance(files, Iterable):
        patterns = list(files)
    if not all(isinstance(pattern, str | os.PathLike) for pattern in patterns):
        raise OptionError(
            f"files={files!r} is {type_name(files)}.",
            fix='a pattern such as "train-*.csv", or a list of paths.',
        )
    paths: list[str] = []
    for pattern in (str(as_path(pattern, "files")) for pattern in patterns):
        names = [pattern]
        # A path that exists is no pattern, whatever brackets it has.
        if not os.path.isfile(pattern):
            names = sorted(filter(os.path.isfile, glob.glob(pattern, recursive=True)))
        if not names:
            folder = os.path.dirname(pattern) or "."
            raise DataError(
                f'no file matches "{pattern}".',
                fix=f"another pattern; the folder {folder} {_folder_state(folder)}.",
            )
        paths += names
    if not paths:
        raise DataError(
            "no files were given.", fix='a pattern such as "train-*.csv", or a list of paths.'
        )
    # `a.csv` and `./a.csv` are one file.
    counts = collections.Counter(map(os.path.abspath, paths))
    twice = sorted(path for path, times in counts.items() if times > 1)
    if twice:
        more = ""
        if len(twice) > 1:
            more = f" and {len(twice) - 1} more"
        raise DataError(
            f"{twice[0]}{more} is given twice, so all its records would be.", fix="each file once."
        )
    for path in paths:
        if not os.access(path, os.R_OK):
            raise DataError(
                f"{path} may not be read by this process.",
                fix="its permissions, or another pattern.",
            )
    return tuple(paths)


def _folder_state(folder: str) -> str:
    """Return the first entries of a folder, or that there are none, in words."""
    if not os.path.isdir(folder):
        return "does not exist"
    entries = sorted(os.listdir(folder))[:5]
    if not entries:
        return "is empty"
    return f"holds {', '.join(entries)}"


def check_uncompressed(path: str) -> None:
    """Raise `DataError` if the first bytes of a file are those of a compressed one."""
    with name_errors(Path(path)), open(path, "rb") as file:
        first_bytes = file.read(6)
    for magic, name in _COMPRESSED.items():
        if first_bytes.startswith(magic):
            raise DataError(
                f"{path} is compressed ({name}), and records in it cannot be found by number.",
                fix="unpack it.",
            )


class _OpenFiles(dict[str, int]):
    """File descriptors by path, opened when they are first used and closed with the object. A copy
    for another process is empty.
    """

    _opening = threading.Lock()

    def __missing__(self, path: str) -> int:
        # Without the lock, two threads could open a file, and one descriptor would never be closed.
        with self._opening:
            if path not in self:
                self[path] = os.open(path, os.O_RDONLY)
        return self[path]

    def __reduce__(self) -> tuple:
        return _OpenFiles, ()

    # when Python exits, `os` may be gone
    def __del__(self, close: Callable[[int], None] = os.close):
        for descriptor in self.values():
            close(descriptor)


class RecordIndex:
    """Reads the bytes of records by number; those of the first file come first.

    Args:
      paths: the files.
      scan: returns int64[records] for one file: where each begins, and where it ends.
      kind: the format and options of the scan; part of the key in `cache`.
      cache: a folder that stores the index for later runs; None: it is not stored.
      fills_file: records must fill a file to its end; if not, the scan warns, and the index is not
        stored.
    """

    def __init__(
        self,
        paths: tuple[str, ...],
        scan: Scan,
        kind: str,
        cache: str | Path | None = None,
        *,
        fills_file: bool = False,
    ):
        if cache is not None:
            make_folder(as_path(cache, "index"), OptionError)
        self.paths = paths
        self.sizes = [os.path.getsize(path) for path in paths]
        may_store = None
        if fills_file:
            may_store = _fills_file
        scan_file = functools.partial(
            cached_scan, cache=cache, kind=kind, scan=scan, may_store=may_store
        )
        threads = min(len(paths), os.cpu_count() or 1)
        with concurrent.futures.ThreadPoolExecutor(threads, "spmd-index") as pool:
            ranges = list(pool.map(scan_file, paths))
        self.counts = [len(starts) for starts, _ in ranges]
        self.first = np.cumsum([0, *self.counts])
        self.starts = np.concatenate([starts for starts, _ in ranges])
        self.ends = np.concatenate([ends for _, ends in ranges])
        self._open_files = _OpenFiles()

    def __len__(self) -> int:
        return len(self.starts)

    def place(self, record: int) -> tuple[str, int, int]:
        """The file of a record, its number in it from 0, and its first byte."""
        file = int(np.searchsorted(self.first, record, "right")) - 1
        return self.paths[file], int(record - self.first[file]), int(self.starts[record])

    def read_bytes(self, records: np.ndarray) -> tuple[bytes, np.ndarray, np.ndarray]:
        """The bytes of records in ascending order, and where in them each begins and ends; adjacent
        ones are read together.

        Args:
          records: int64[n], ascending; at least one.

        Raises:
          DataError: a file is shorter than it was when it was indexed.
        """
        files = np.searchsorted(self.first, records, "right") - 1
        starts, ends = self.starts[records], self.ends[records]
        is_new_file = files[1:] != files[:-1]
        has_gap = starts[1:] != ends[:-1]
        breaks = np.flatnonzero(is_new_file | has_gap) + 1
        firsts = np.concatenate([[0], breaks])
        lasts = np.concatenate([breaks, [len(records)]]) - 1
        # runs of adjacent records in a file: where each begins, and its bytes
        run_files, begins = files[firsts], starts[firsts]
        sizes = ends[lasts] - begins
        open_files = self._open_files
        # Linux lets a process have 1024 open files by default.
        if len(self.paths) > OPEN:
            open_files = _OpenFiles()
        runs = zip(run_files.tolist(), sizes.tolist(), begins.tolist(), strict=True)
        reads = []
        for file, size, begin in runs:
            reads.append((open_files[self.paths[file]], size, begin))
        pieces: list[bytes] = []
        # pread takes the position, so threads that share a descriptor do not share a position.
        try:
            for descriptor, size, begin in reads:
                # after an error, the number of pieces says which file it was
                pieces.append(os.pread(descriptor, size, begin))
        except OSError as error:
            # An OSError of a descriptor does not name the file.
            path = self.paths[run_files[len(pieces)]]
            raise OSError(error.errno, error.strerror, path) from error
        lengths = np.array([len(piece) for piece in pieces], np.int64)
        # a system call may read less than it is asked for
        for at in np.flatnonzero(lengths != sizes).tolist():
            pieces[at] = self._complete(int(run_files[at]), pieces[at], *reads[at])
        bases = np.cumsum([0, *map(len, pieces[:-1])]) - begins
        shift = np.repeat(bases, lasts - firsts + 1)
        return b"".join(pieces), starts + shift, ends + shift

    def _complete(self, file: int, piece: bytes, descriptor: int, size: int, begin: int) -> bytes:
        """The complete piece, if one call returned only a part of it."""
        while len(piece) < size:
            more = os.pread(descriptor, size - len(piece), begin + len(piece))
            if not more:
                break
            piece += more
        if len(piece) < size:
            path, has = self.paths[file], begin + len(piece)
            raise DataError(
                f"{path} has {has} bytes, and had {self.sizes[file]} when it was indexed.",
                fix="the file as it was.",
            )
        return piece


def _fills_file(path: str, starts: np.ndarray, ends: np.ndarray) -> bool:
    """Return True if records fill a file. A file that they do not fill is scanned each time, to
    warn each time.
    """
    del starts
    if not len(ends):
        return os.path.getsize(path) == 0
    return int(ends[-1]) == os.path.getsize(path)


def cached_scan(
    path: str,
    cache: str | Path | None,
    kind: str,
    scan: Scan,
    may_store: Callable[[str, np.ndarray, np.ndarray], bool] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The result of a scan, from the file of an earlier run in the folder `cache`; scans again if
    the data or that file has changed.

    Args:
      kind: the format and the options, on which the result depends too.
      scan: returns two arrays int64[n] for a file.
      may_store: returns True if the result may be stored; None: always.
    """
    if cache is None:
        return scan(path)
    folder = as_path(cache, "index")
    stat = os.stat(path)
    log = logging.getLogger("spmd")
    # A changed file may have its old time: some file systems count seconds, and `cp -p` keeps it.
    facts = [
        kind,
        os.path.abspath(path),
        stat.st_size,
        stat.st_mtime_ns,
        data_hash.of_files([path], [stat.st_size], SAMPLED),
    ]
    # A path may be longer than the name of a file can be.
    digest = hashlib.sha256(repr(facts[:2]).encode()).hexdigest()
    index = folder / f"{digest[:32]}.index"
    try:
        stored = output_files.read_checked(index)
        head, _, numbers = (stored or b"\n").partition(b"\n")
        if stored is not None and json.loads(head) == facts:
            starts, ends = np.frombuffer(numbers, "<i8").reshape(2, -1)
            return starts, ends
    except output_files.DamagedFileError as why:
        log.warning("the index of %s is damaged and is built again: %s (%s).", path, why, index)
    starts, ends = scan(path)
    if may_store is not None and not may_store(path, starts, ends):
        return starts, ends
    # Little-endian, because machines of several kinds may share the folder.
    edges = np.stack([starts, ends]).astype("<i8").tobytes()
    content = json.dumps(facts).encode() + b"\n" + edges
    try:
        output_files.write_checked(index, content)
    except OSError as error:
        log.warning(
            "the index of %s cannot be kept, so the next run looks for its records again: %s.",
            path,
            error,
        )
    return starts, ends
