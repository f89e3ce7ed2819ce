"""safetensors files: an 8-byte length, a JSON header, raw bytes
(https://github.com/huggingface/safetensors, "Format").

Headers are untrusted: sizes, offsets, overlaps, dtypes and names are checked before anything is
allocated for them.
"""

import collections
import dataclasses
import json
import math
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from spmd.base.output_files import open_output, read_bytes
from spmd.base.tree import describe
from spmd.errors import (
    PretrainedError,
    Problem,
    did_you_mean,
    join_names,
    printable,
    raise_problems,
    short_repr,
)

DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(bool),
    "U8": np.dtype("u1"),
    "U16": np.dtype("u2"),
    "U32": np.dtype("u4"),
    "U64": np.dtype("u8"),
    "I8": np.dtype("i1"),
    "I16": np.dtype("i2"),
    "I32": np.dtype("i4"),
    "I64": np.dtype("i8"),
    "F16": np.dtype("f2"),
    # numpy has neither bfloat16 nor float8 itself; JAX's are those of ml_dtypes.
    "BF16": np.dtype(jnp.bfloat16),
    "F32": np.dtype("f4"),
    "F64": np.dtype("f8"),
    "C64": np.dtype("c8"),
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
    "F8_E5M2": np.dtype(jnp.float8_e5m2),
    "F8_E8M0": np.dtype(jnp.float8_e8m0fnu),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MOST_HEADER = 100_000_000  # bytes; the limit of the safetensors library
MOST_DIMS = 32
INTACT = "copy or download it again."
SUFFIX, INDEX = ".safetensors", ".safetensors.index.json"


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a file, which is not read yet: its name, the place of its bytes, and their
    meaning.
    """

    name: str
    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int  # in the file
    nbytes: int

    def __str__(self) -> str:
        return f"{self.name} {describe(self)}"


@dataclasses.dataclass(frozen=True)
class WeightFiles:
    """The tensors of a folder by name, in the order of its files, and the metadata of its first
    file.
    """

    where: Path
    tensors: dict[str, Tensor]
    metadata: dict[str, str]

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that hold them."""
        return tuple(dict.fromkeys(tensor.file for tensor in self.tensors.values()))


def read_header(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of one file by name, and its metadata; reads the header only.

    Raises:
      PretrainedError: the file is missing or damaged; all problems of its header at once, with the
        names of tensors.
    """
    if file.exists() and not file.is_file():  # opening a pipe waits for a writer
        raise PretrainedError(f"{file} is no regular file.", fix="check the path.")
    try:
        with file.open("rb") as opened:
            # Of the opened file: by now the path may be another one.
            size = os.fstat(opened.fileno()).st_size
            if size < 8:
                raise _damaged(file, f"it has {size} bytes; the length of its header alone has 8")
            (length,) = struct.unpack("<Q", opened.read(8))
            # Before it is read: a number in the file must not decide how much memory is taken.
            if length > min(MOST_HEADER, size - 8):
                limit = f"at most {MOST_HEADER:,} are allowed"
                if length > size - 8:
                    limit = f"{size - 8:,} bytes follow"
                raise _damaged(file, f"its header should have {length:,} bytes; {limit}")
            text = opened.read(length)
    except OSError as error:
        raise PretrainedError(
            f"{file} cannot be read: {error.strerror}.", fix="check the path."
        ) from error
    # A file that shrinks while it is read gives fewer bytes, and no error.
    if len(text) < length:
        raise _damaged(file, f"its header has {len(text):,} of {length:,} bytes")
    header = _parse(file, text, "header")
    metadata = header.pop("__metadata__", {})
    problems = []
    is_table = isinstance(metadata, dict)
    if not is_table or not all(isinstance(value, str) for value in metadata.values()):
        problems.append(
            Problem("__metadata__", [f"{short_repr(metadata)} is not a table of strings."])
        )
    tensors: dict[str, Tensor] = {}
    for name, entry in header.items():
        try:
            tensors[name] = _tensor(file, name, entry, 8 + length, size)
        except ValueError as error:
            problems.append(Problem(printable(name, 200), [str(error)], path=name))
    problems = problems or _coverage_problems(tensors, 8 + length, size)
    raise_problems(
        PretrainedError, f"{file} is damaged, or no safetensors file", problems, fix=INTACT
    )
    return tensors, metadata


def _damaged(file: Path, why: str) -> PretrainedError:
    state = "is damaged"
    if file.suffix == SUFFIX:
        state = "is damaged, or no safetensors file"
    return PretrainedError(f"{file} {state}: {why}.", fix=INTACT)


def _parse(file: Path, text: bytes, what: str) -> dict[str, Any]:
    """A JSON object without duplicate keys."""

    # json would silently take the last of several equal keys.
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(items)
        if len(table) < len(items):
            counts = collections.Counter(name for name, _ in items)
            twice = [name for name, count in counts.items() if count > 1]
            raise ValueError(f"has {join_names(map(printable, twice))} twice")
        return table

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=pairs)
    except (ValueError, RecursionError) as error:
        why = printable(str(error), 200)
        if isinstance(error, RecursionError):
            why = "it is nested too deeply"
        raise _damaged(file, f"its {what} is not valid JSON ({why})") from error
    if not isinstance(value, dict):
        raise _damaged(file, f"its {what} is not a JSON object but {short_repr(value)}")
    return value


def _is_count(value: Any) -> bool:
    # Offsets are computed in int64. Not isinstance, for which JSON's true is an int.
    return type(value) is int and 0 <= value < 2**63


def _tensor(file: Path, name: str, entry: Any, start: int, size: int) -> Tensor:
    """Return the tensor of one entry of a header; its data begin at `start`.

    Raises:
      ValueError: the problem of the entry.
    """
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{short_repr(entry)} is not a table of dtype, shape and data_offsets.")
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(kind, str) or kind not in DTYPES:
        raise ValueError(f"unknown dtype {short_repr(kind)}; known: {', '.join(DTYPES)}.")
    if not isinstance(shape, list) or len(shape) > MOST_DIMS or not all(map(_is_count, shape)):
        raise ValueError(f"shape {short_repr(shape)} is not a list of at most {MOST_DIMS} sizes.")
    are_two = isinstance(offsets, list) and len(offsets) == 2 and all(map(_is_count, offsets))
    if not are_two or offsets[0] > offsets[1]:
        raise ValueError(f"data_offsets {short_repr(offsets)} are not a begin and an end.")
    begin, end = offsets
    if end > size - start:
        raise ValueError(
            f"data_offsets end at {end:,}; the file has {size - start:,} bytes of data."
        )
    dtype = DTYPES[kind]
    # Python's integers do not overflow, whatever sizes a damaged header has.
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes != end - begin:
        offsets_hold = f"its data_offsets {begin:,} to {end:,} hold {end - begin:,}."
        raise ValueError(f"{kind}{shape} has {nbytes:,} bytes; {offsets_hold}")
    return Tensor(name, file, dtype, tuple(shape), start + begin, end - begin)


def _coverage_problems(tensors: Mapping[str, Tensor], start: int, size: int) -> list[Problem]:
    """Overlaps and gaps: the format allows neither."""
    problems, at, before = [], start, "the header"
    # An empty tensor begins where the next one does, so it must come first.
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.nbytes)):
        if tensor.offset != at:
            relation = "leaves a gap after"
            if tensor.offset < at:
                relation = "overlaps with"
            begins, expected = tensor.offset - start, at - start
            place = f"begins at {begins:,}, not at {expected:,}."
            why = f"{relation} {printable(before, 200)}: {place}"
            problems.append(Problem(printable(tensor.name, 200), [why], path=tensor.name))
        at, before = max(at, tensor.offset + tensor.nbytes), tensor.name
    if at != size:
        problems.append(
            Problem(
                "the end",
                [f"{size - at:,} bytes after {printable(before, 200)} belong to no tensor."],
            )
        )
    return problems


def open_files(folder: Path, stem: str = "model") -> WeightFiles:
    """The tensors of `FOLDER/STEM.safetensors`, of the files that
    `FOLDER/STEM.safetensors.index.json` lists, or of a single file.

    Raises:
      PretrainedError: no such files; a damaged one; a shard that is missing; a tensor that is not
        in its shard, or in two.
    """
    if folder.is_file():
        return WeightFiles(folder, *read_header(folder))
    single, index = folder / f"{stem}{SUFFIX}", folder / f"{stem}{INDEX}"
    if not folder.is_dir():
        raise PretrainedError(
            f"there is no folder {folder}.",
            fix="check the path; a model's name must be downloaded to a folder first.",
        )
    if single.exists() and index.exists():
        raise PretrainedError(
            f"{folder} has {single.name} and {index.name}.",
            fix="remove the one that does not belong to the model.",
        )
    if single.exists():
        return WeightFiles(folder, *read_header(single))
    if index.exists():
        return _open_shards(folder, index)
    others = sorted(
        path.name
        for path in folder.iterdir()
        if path.suffix in (SUFFIX, ".bin", ".pt", ".pth", ".gguf")
    )
    present = ""
    if others:
        present = f"; there is {join_names(others)}"
    candidates = [name for name in others if name.endswith(SUFFIX)] or [single.name, index.name]
    raise PretrainedError(
        f"{folder} has neither {single.name} nor {index.name}{present}.",
        fix=did_you_mean(single.name, candidates),
    )


def _open_shards(folder: Path, index: Path) -> WeightFiles:
    """The tensors of the files that an index lists."""
    if not index.is_file():
        raise PretrainedError(f"{index} is no regular file.", fix="check the path.")
    # The index is parsed in memory, so it is bounded like a header.
    if index.stat().st_size > MOST_HEADER:
        raise _damaged(index, f"it has more than {MOST_HEADER:,} bytes")
    weight_map = _parse(index, read_bytes(index), "text").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise PretrainedError(f"{index} has no weight_map.", fix="download it again.")
    problems: list[Problem] = []
    names: dict[str, list[str]] = {}  # the tensors of each file
    if all(isinstance(name, str) for name in weight_map.values()):
        for tensor, name in weight_map.items():
            names.setdefault(name, []).append(tensor)
    else:
        wrong = next(name for name, file in weight_map.items() if not isinstance(file, str))
        problems.append(
            Problem(
                printable(wrong, 200), [f"its file is {short_repr(weight_map[wrong])}."], path=wrong
            )
        )
    headers: dict[str, dict[str, Tensor]] = {}
    metadata: dict[str, str] = {}
    # a name of the index may be one that no file can have
    # (too long, or with a NUL), for which a look-up would raise
    present = {path.name for path in folder.iterdir() if path.is_file()}
    for name, users in names.items():
        shown = join_names(map(printable, users), 3)
        if not _is_plain(name):
            problems.append(
                Problem(
                    printable(name, 200), ["a shard must lie in the folder itself.", f"of {shown}"]
                )
            )
        elif name not in present:
            near = did_you_mean(
                name[:255], sorted(path for path in present if path.endswith(SUFFIX))
            )
            problems.append(
                Problem(printable(name, 200), [f"this shard is missing; it has {shown}."], near)
            )
        else:
            headers[name], file_metadata = read_header(folder / name)
            metadata = metadata or file_metadata
    fix = "copy or download it again, with all of the files that it was written with."
    raise_problems(PretrainedError, f"{index} does not fit its folder", problems, fix=fix)
    raise_problems(
        PretrainedError,
        f"{index} does not fit its shards",
        _index_problems(weight_map, headers),
        fix=fix,
    )
    tensors = {name: headers[file][name] for name, file in weight_map.items()}
    return WeightFiles(folder, tensors, metadata)


def _is_plain(name: str) -> bool:
    # The index is untrusted: a name without these characters stays in the folder, on Windows too.
    return bool(name) and name not in (".", "..") and not any(letter in name for letter in "/\\\0:")


def _index_problems(
    weight_map: Mapping[str, str], headers: Mapping[str, Mapping[str, Tensor]]
) -> list[Problem]:
    """Tensors that are not where the index says, or in two shards, or not in the index."""
    homes: dict[str, list[str]] = {}
    for file, tensors in headers.items():
        for name in tensors:
            homes.setdefault(name, []).append(file)
    problems = []
    for name in dict.fromkeys([*weight_map, *homes]):
        files, listed = homes.get(name, []), weight_map.get(name)
        if len(files) > 1:
            problems.append(
                Problem(
                    printable(name, 200),
                    [f"is in {len(files)} shards: {', '.join(files)}."],
                    path=name,
                )
            )
        elif listed is None:
            problems.append(
                Problem(
                    printable(name, 200), [f"is in {files[0]}, and not in the index."], path=name
                )
            )
        elif files != [listed]:
            where = "no shard has it."
            if files:
                where = f"it is in {files[0]}."
            problems.append(
                Problem(
                    printable(name, 200),
                    [f"is not in {listed}, which the index says; {where}"],
                    path=name,
                )
            )
    return problems


# boxes --------------------------------------------------------------------------------------------

Box = tuple[tuple[int, int], ...]  # a begin and an end for each dim
SHORT_RUN = 128  # bytes: shorter runs are read with what lies between them


def box_shape(box: Box) -> tuple[int, ...]:
    """The sizes of a box."""
    return tuple(end - begin for begin, end in box)


def intersection(one: Box, other: Box) -> Box | None:
    """Return the box that two boxes have in common; None if it is empty. The box of a scalar is
    ().
    """
    both = []
    for (begin, end), (other_begin, other_end) in zip(one, other, strict=True):
        first, last = max(begin, other_begin), min(end, other_end)
        if first >= last:
            return None
        both.append((first, last))
    return tuple(both)


def relative(box: Box, to: Box) -> Box:
    """Return a box by its place in the box `to`, in which it lies."""
    place = []
    for (begin, end), (first, _) in zip(box, to, strict=True):
        place.append((begin - first, end - first))
    return tuple(place)


def slices(box: Box) -> tuple[slice, ...]:
    """A box as an index of an array."""
    return tuple(slice(*one) for one in box)


def first_full_dim(tensor: Tensor, box: Box) -> int:
    """Return the dim from which on a box has all of each dim."""
    for dim in range(len(box), 0, -1):
        if box[dim - 1] != (0, tensor.shape[dim - 1]):
            return dim
    return 0


def has_short_runs(tensor: Tensor, box: Box) -> bool:
    """Return True if the contiguous runs of a box are so short that it is better to read the bytes
    between them, too.
    """
    full = first_full_dim(tensor, box)
    if full < 2:
        return False
    inner = math.prod(tensor.shape[full:]) * tensor.dtype.itemsize
    begin, end = box[full - 1]
    return (end - begin) * inner < SHORT_RUN


def read_box(descriptor: int, tensor: Tensor, box: Box, out: np.ndarray) -> int:
    """Read a box of a tensor into `out`, a contiguous array of its shape, in runs of contiguous
    bytes; returns how many were read.

    Raises:
      PretrainedError: the file has ended: it was changed since its header was read.
    """
    if out.size == 0:
        return 0
    full = first_full_dim(tensor, box)
    if has_short_runs(tensor, box):
        wide: Box = (*box[: full - 1], (0, tensor.shape[full - 1]), *box[full:])
        scratch = np.empty(box_shape(wide), out.dtype)
        count = read_box(descriptor, tensor, wide, scratch)
        outer = (slice(None),) * (full - 1)
        out[...] = scratch[(*outer, slice(*box[full - 1]))]
        return count
    flat = out.reshape(-1).view(np.uint8).data
    strides = []
    for dim in range(len(box)):
        strides.append(math.prod(tensor.shape[dim + 1 :]) * tensor.dtype.itemsize)
    starts = np.zeros(1, np.int64)
    for dim in range(max(full - 1, 0)):
        offsets = np.arange(*box[dim], dtype=np.int64) * strides[dim]
        starts = np.add.outer(starts, offsets).reshape(-1)
    first = tensor.offset
    if full:
        first += box[full - 1][0] * strides[full - 1]
    run = len(flat) // len(starts)
    for number, start in enumerate(starts.tolist()):
        # preadv takes the position, which threads would otherwise share.
        _read_all(descriptor, tensor, flat[number * run : (number + 1) * run], first + start)
    return len(flat)


def read_ahead(descriptor: int, tensor: Tensor, box: Box) -> None:
    """Ask the system to read a box of a tensor into its cache, if its bytes lie together."""
    full = first_full_dim(tensor, box)
    if full < 2 and hasattr(os, "posix_fadvise"):  # macOS has none
        inner = math.prod(tensor.shape[full:]) * tensor.dtype.itemsize
        begin, end = 0, 1
        if full:
            begin, end = box[0]
        first, size = tensor.offset + begin * inner, (end - begin) * inner
        os.posix_fadvise(descriptor, first, size, os.POSIX_FADV_WILLNEED)


def _read_all(descriptor: int, tensor: Tensor, into: memoryview, offset: int) -> None:
    """Read `len(into)` bytes from `offset` on."""
    done = 0
    while done < len(into):
        # 1 GiB at a time: Linux reads at most 2 GiB in one call
        count = os.preadv(descriptor, [into[done : done + (1 << 30)]], offset + done)
        if count == 0:
            raise _damaged(tensor.file, f"it ended while {tensor} was read; has it been changed?")
        done += count


def header_bytes(
    tensors: Iterable[tuple[str, np.dtype, Sequence[int]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int]]:
    """Return the beginning of a file with these tensors, padded to 8 bytes; and the offset of each
    in the file.
    """
    table: dict[str, Any] = {}
    if metadata:
        table["__metadata__"] = dict(metadata)
    at, offsets = 0, {}
    for name, dtype, shape in tensors:
        size = math.prod(shape) * dtype.itemsize
        table[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
        offsets[name] = at
        at += size
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = struct.pack("<Q", len(text)) + text
    return header, {name: len(header) + offset for name, offset in offsets.items()}


def write_file(
    file: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None
) -> None:
    """Write one file of arrays that are on the host.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     write_file(Path(folder) / "a.safetensors", {"w": np.ones((2, 3), np.float32)})
      ...     print(read_header(Path(folder) / "a.safetensors")[0]["w"])
      w float32[2, 3]
    """
    # behind an array of smaller items, one of larger items might not be aligned
    ordered = dict(sorted(arrays.items(), key=lambda item: -item[1].dtype.itemsize))
    entries = [(name, array.dtype, array.shape) for name, array in ordered.items()]
    header, _ = header_bytes(entries, metadata or {"format": "pt"})
    with open_output(file) as opened:
        opened.write(header)
        for array in ordered.values():
            # As bytes: an array of bfloat16 has no memoryview (ml_dtypes 0.6).
            opened.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
