"""A piece of a state: shards of its arrays in one file, each with a checksum. Checkpoints in memory
consist of pieces.

A file is MAGIC, the length of the header, the header's SHA-256, the header (JSON), and the bytes of
each shard; header and shards begin at multiples of 64 bytes. Where a shard lies follows from the
order and the sizes of those before it, so a header cannot make shards overlap.
"""

import dataclasses
import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import jax.numpy as jnp
import numpy as np

from spmd.base.output_files import DamagedFileError, open_output
from spmd.run.checkpoint_meta import ARRAY_PATTERN
from spmd.run.reshard_checkpoint import parse_dtype, parse_shape

MAGIC = b"spmd-mem"
PREFIX = 48  # bytes of MAGIC, length and SHA-256
ALIGN = 64  # bytes; the header and each shard begin at a multiple
CHUNK = 1 << 20  # bytes that are hashed while they are in the processor's cache
MOST_HEADER = 64 << 20  # bytes of a header: a damaged length must not allocate more

Bounds = tuple[tuple[int, int], ...]  # first and last + 1 along each dim
Key = tuple[str, Bounds]  # path of an array, and a shard of it


@dataclasses.dataclass(frozen=True)
class Piece:
    """The contents of a file.

    Attributes:
      step: updates that the state has made.
      start: identifies the start of the run in which it was written; only pieces of one start fit
        together.
      rank: of the process that wrote it.
      meta: that of a checkpoint; its "arrays" has dtype and shape of every array of the state by
        path.
      shards: SHA-256 of each shard, in the order of the file.
    """

    step: int
    start: str
    rank: int
    meta: dict[str, Any]
    shards: dict[Key, str]

    def nbytes(self, key: Key) -> int:
        """Return the bytes of a shard."""
        return shard_bytes(self.meta["arrays"][key[0]], key[1])

    def offsets(self) -> dict[Key, int]:
        """Return the first byte of each shard, counted from the end of the header."""
        offsets = {}
        offset = 0
        for key in self.shards:
            offsets[key] = offset
            offset += _aligned(self.nbytes(key))
        return offsets

    def data_bytes(self) -> int:
        """Return the bytes after the header."""
        return sum(_aligned(self.nbytes(key)) for key in self.shards)

    def select(self, keys: Iterable[Key]) -> "Piece":
        """Return the same piece with some of its shards."""
        selected = set(keys)
        return dataclasses.replace(
            self, shards={key: digest for key, digest in self.shards.items() if key in selected}
        )

    def header(self) -> bytes:
        """Return the beginning of the file."""
        shards = [[path, bounds, digest] for (path, bounds), digest in self.shards.items()]
        text = json.dumps(
            {
                "step": self.step,
                "start": self.start,
                "rank": self.rank,
                "meta": self.meta,
                "shards": shards,
            }
        ).encode()
        prefix = MAGIC + len(text).to_bytes(8, "little") + hashlib.sha256(text).digest()
        return (prefix + text).ljust(_aligned(PREFIX + len(text)), b"\0")


def shard_bytes(described: str, bounds: Bounds) -> int:
    """Return the bytes of a shard of an array, from the array's dtype and shape as text.

    >>> shard_bytes("float32[512, 10]", ((0, 256), (0, 10)))
    10240
    """
    elements = math.prod(last - first for first, last in bounds)
    return elements * jnp.dtype(parse_dtype(described)).itemsize


def write_piece(path: Path, piece: Piece, read_shard: Callable[[Key], np.ndarray]) -> Piece:
    """Write shards to a file, which appears under its name when it is complete.

    Args:
      path: of the file.
      piece: what to write; its digests are not looked at.
      read_shard: returns a shard, which is needed only until the next one is read.

    Returns:
      The piece with digests.
    """
    blank = dataclasses.replace(piece, shards=dict.fromkeys(piece.shards, "0" * 64))
    digests = {}
    with _new_file(path) as file:
        # The header has the digests, and all digests have one length: it is written at the end,
        # into the room that a header of zeros takes.
        file.seek(len(blank.header()))
        for key in piece.shards:
            digest = hashlib.sha256()
            content = read_shard(key)
            view = np.ascontiguousarray(content).reshape(-1).view(np.uint8).data
            for start in range(0, len(view), CHUNK):
                digest.update(view[start : start + CHUNK])
                file.write(view[start : start + CHUNK])
            file.write(bytes(_aligned(len(view)) - len(view)))
            digests[key] = digest.hexdigest()
        written = dataclasses.replace(piece, shards=digests)
        file.seek(0)
        file.write(written.header())
    return written


def read_header(path: Path) -> Piece:
    """Return the contents of a file, checked without reading the shards.

    Raises:
      DamagedFileError: it is not what `write_piece` wrote.
    """
    with open_piece(path) as file:
        return _header(file.read, os.fstat(file.fileno()).st_size)


def open_piece(path: Path) -> BinaryIO:
    """Open a file of this user for reading.

    Raises:
      DamagedFileError: it is not a regular file, belongs to another user, or cannot be read.
    """
    # In a folder that others can write to, a link or a pipe may be in the place of the file.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise DamagedFileError(f"it cannot be read: {error.strerror}") from error
    info = os.fstat(descriptor)
    if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
        os.close(descriptor)
        raise DamagedFileError("it is not a file of this user")
    return open(descriptor, "rb", buffering=0)


def read_shards(path: Path, piece: Piece, keys: Iterable[Key]) -> Iterator[tuple[Key, np.ndarray]]:
    """Yield shards of a file, each compared with its checksum; the arrays are new.

    Raises:
      DamagedFileError: a shard is not what was written.
    """
    offsets = piece.offsets()
    data_begin = len(piece.header())
    with open_piece(path) as file:
        for key in keys:
            array_path, bounds = key
            buffer = np.empty(piece.nbytes(key), np.uint8)
            file.seek(data_begin + offsets[key])
            digest = hashlib.sha256()
            for start in range(0, len(buffer), CHUNK):
                view = buffer.data[start : start + CHUNK]
                _fill(file, view)
                digest.update(view)
            _check_digest(digest, piece.shards[key], key)
            dtype = jnp.dtype(parse_dtype(piece.meta["arrays"][array_path]))
            shape = [last - first for first, last in bounds]
            yield key, buffer.view(dtype).reshape(shape)


def parts(path: Path, piece: Piece, keys: Sequence[Key]) -> Iterator[bytes]:
    """Yield the bytes of a file that holds only some shards of this one."""
    offsets = piece.offsets()
    data_begin = len(piece.header())
    selected = piece.select(keys)
    yield selected.header()
    with open_piece(path) as file:
        for key in selected.shards:
            file.seek(data_begin + offsets[key])
            left = _aligned(piece.nbytes(key))
            while left:
                # The file is not buffered: a read may return less than was asked for.
                chunk = file.read(min(left, CHUNK))
                if not chunk:
                    raise OSError(f"{path} has become shorter")
                left -= len(chunk)
                yield chunk


def receive_piece(
    path: Path,
    total: int,
    read_into: Callable[[memoryview], None],
    check: Callable[[Piece], None],
) -> Piece:
    """Write a file from a stream, comparing each shard with its checksum.

    Args:
      path: of the file.
      total: bytes of the stream.
      read_into: fills a buffer with the next bytes.
      check: called with the header before anything is written; raises if it is not wanted.

    Raises:
      DamagedFileError: the stream is not a piece, or has another size.
    """

    def next_bytes(count: int) -> bytes:
        buffer = bytearray(count)
        read_into(memoryview(buffer))
        return bytes(buffer)

    piece = _header(next_bytes, total)
    check(piece)
    with _new_file(path) as file:
        file.write(piece.header())
        buffer = memoryview(bytearray(CHUNK))
        for key, expected in piece.shards.items():
            digest = hashlib.sha256()
            left = piece.nbytes(key)
            padding = _aligned(left) - left
            while left:
                view = buffer[: min(left, CHUNK)]
                read_into(view)
                digest.update(view)
                file.write(view)
                left -= len(view)
            file.write(next_bytes(padding))
            _check_digest(digest, expected, key)
    return piece


class _new_file:
    """A file that appears under its name at the end of the block, unless the block fails."""

    def __init__(self, path: Path):
        self._path = path
        # The process is in the name: another may write the same piece, as a copy for this host.
        self._part = path.with_name(f"{path.name}.{os.getpid()}.part")

    def __enter__(self) -> BinaryIO:
        self._file = open_output(
            self._part, opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW, 0o600)
        )
        return self._file

    def __exit__(self, kind: Any, *_: object) -> None:
        # Closed first, since closing writes what is left, and fails where the memory is full. There
        # is no sync: checkpoints in memory outlive a process, and not the machine.
        try:
            self._file.close()
            if kind is None:
                self._part.replace(self._path)
        finally:
            self._part.unlink(missing_ok=True)


def _header(next_bytes: Callable[[int], bytes], total: int) -> Piece:
    """Return the checked header of a file of `total` bytes; nothing is allocated that the file
    could not hold.
    """
    prefix = next_bytes(PREFIX) if total >= PREFIX else b""
    if len(prefix) < PREFIX or not prefix.startswith(MAGIC):
        raise DamagedFileError("it does not begin as a piece of a checkpoint")
    length = int.from_bytes(prefix[8:16], "little")
    if length > min(MOST_HEADER, total - PREFIX):
        raise DamagedFileError(f"its header has {length} bytes of {total}")
    padded = _aligned(PREFIX + length) - PREFIX
    if PREFIX + padded > total:
        raise DamagedFileError("it is truncated")
    text = next_bytes(padded)[:length]
    if hashlib.sha256(text).digest() != prefix[16:48]:
        raise DamagedFileError("its header does not match its checksum")
    try:
        piece = _parsed(json.loads(text))
        size = PREFIX + padded + piece.data_bytes()
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise DamagedFileError(
            f"its header cannot be read: {type(error).__name__}: {error}"
        ) from error
    if size != total:
        raise DamagedFileError(f"it has {total} bytes, and its header says {size}")
    return piece


def _parsed(fields: dict[str, Any]) -> Piece:
    """Return the piece that a header describes; every field is checked, since another host may have
    sent it.
    """
    step = fields["step"]
    start = fields["start"]
    rank = fields["rank"]
    meta = fields["meta"]
    if not _is_natural(step) or not _is_natural(rank) or not isinstance(start, str):
        raise ValueError("step, start or rank")
    if not isinstance(meta, dict) or not isinstance(meta.get("arrays"), dict):
        raise ValueError("meta")
    if meta.get("step") != step:
        raise ValueError("meta")
    shards: dict[Key, str] = {}
    for path, pairs, digest in fields["shards"]:
        described = meta["arrays"][path]
        if not re.fullmatch(ARRAY_PATTERN, described) or not re.fullmatch(r"[0-9a-f]{64}", digest):
            raise ValueError(f"array {path!r}")
        dtype = jnp.dtype(parse_dtype(described))
        if not (jnp.issubdtype(dtype, jnp.number) or dtype.kind == "b"):
            raise ValueError(f"dtype {dtype}")
        bounds = tuple((first, last) for first, last in pairs)
        if not _are_bounds(bounds, parse_shape(described)):
            raise ValueError(f"a shard of {path!r}")
        if (path, bounds) in shards:
            raise ValueError(f"{path!r} twice")
        shards[path, bounds] = digest
    return Piece(step, start, rank, meta, shards)


def _is_natural(value: Any) -> bool:
    """Return whether a value is a whole number from 0, and no bool."""
    return type(value) is int and value >= 0


def _are_bounds(bounds: Bounds, shape: tuple[int, ...]) -> bool:
    """Return whether bounds are those of a shard, with elements, of an array of this shape."""
    if len(bounds) != len(shape):
        return False
    for (first, last), size in zip(bounds, shape, strict=True):
        if type(first) is not int or type(last) is not int or not 0 <= first < last <= size:
            return False
    return True


def _aligned(count: int) -> int:
    """Return the smallest multiple of `ALIGN` from `count` on."""
    return -(-count // ALIGN) * ALIGN


def _check_digest(digest: Any, expected: str, key: Key) -> None:
    if digest.hexdigest() != expected:
        raise DamagedFileError(f"{key[0]} is not what was written")


def _fill(file: BinaryIO, view: memoryview) -> None:
    """Fill a buffer from a file that is not buffered, and so may read less than was asked for."""
    while len(view):
        count = file.readinto(view)  # type: ignore[attr-defined]
        if not count:
            raise DamagedFileError("it is truncated")
        view = view[count:]
