"""Reads tensors to the devices that keep them: each process only the bytes of its own shards, in
the dtype asked.
"""

import collections
import dataclasses
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from spmd.base.tree import format_bytes
from spmd.errors import PretrainedError
from spmd.pretrained.links import Link, Request, copy_into
from spmd.pretrained.safetensors_files import (
    Box,
    Tensor,
    box_shape,
    has_short_runs,
    intersection,
    read_ahead,
    read_box,
    relative,
    slices,
)

# no more than processors: `read_ahead` keeps the disk busy, and these copy
THREADS = max(2, min(16, os.cpu_count() or 2))
PART = 8 << 20  # bytes that a thread reads at a time
# bytes of host memory beside those that are on the devices; a larger shard is read alone
IN_FLIGHT = 256 << 20
ALIGNMENT = 64  # bytes; a CPU device then uses the buffer itself


@dataclasses.dataclass(frozen=True)
class ReadReport:
    """The bytes and seconds of one process.

    Attributes:
      bytes_read: from the files.
      bytes_kept: of those that its devices keep, each counted once, in the dtype of the files.
      seconds: in all.
    """

    bytes_read: int
    bytes_kept: int
    seconds: float

    def __str__(self) -> str:
        rate = format_bytes(self.bytes_read / max(self.seconds, 1e-9))
        return (
            f"{format_bytes(self.bytes_read)} read in {self.seconds:.1f} s ({rate}/s), "
            f"{format_bytes(self.bytes_kept)} of them kept"
        )


@dataclasses.dataclass(frozen=True)
class Shard:
    """A box of an array, and the devices of this process that keep it."""

    path: str
    box: Box
    dtype: np.dtype
    devices: tuple[Any, ...]

    @property
    def nbytes(self) -> int:
        """Bytes on one device."""
        return math.prod(box_shape(self.box)) * self.dtype.itemsize


def read_arrays(
    links: Sequence[Link], targets: Mapping[str, jax.ShapeDtypeStruct], display: Any
) -> tuple[dict[str, jax.Array], ReadReport]:
    """Arrays by path, read from the tensors that are linked with them.

    Host memory in use is at most `IN_FLIGHT` or one shard, whichever is larger, and `PART` bytes
    for each thread.

    Args:
      links: of all parts of these arrays.
      targets: the shape, dtype and sharding of each.
      display: a progress display of `spmd.run.progress`.

    Raises:
      PretrainedError: a file has changed or cannot be read, or the two copies of a tied array
        differ.
    """
    started, by_path = time.perf_counter(), collections.defaultdict[str, list[Link]](list)
    for link in links:
        by_path[link.path].append(link)
    groups = _ordered_groups(by_path, targets)
    sizes = [_nbytes(group) for group in groups]
    pieces: dict[str, list[jax.Array]] = collections.defaultdict(list)
    with _Reader() as reader:
        display.start(0, sum(sizes) >> 20, "reading")
        waiting: collections.deque[tuple[int, list[np.ndarray], list[Future]]] = collections.deque()
        busy = done = 0

        def rate() -> str:
            seconds = time.perf_counter() - started
            return f"{format_bytes(done / seconds)}/s"

        def place() -> int:
            number, buffers, futures = waiting.popleft()
            for future in futures:
                future.result()
            for shard, buffer in zip(groups[number], buffers, strict=True):
                pieces[shard.path] += _on_devices(buffer, shard.devices)
            if display.due():
                display.show(done >> 20, ["MiB", rate(), groups[number][0].path])
            return sizes[number]

        for number, group in enumerate(groups):
            while waiting and busy + sizes[number] > IN_FLIGHT:
                freed = place()
                busy, done = busy - freed, done + freed
            buffers = [aligned(box_shape(shard.box), shard.dtype) for shard in group]
            links_of_array = by_path[group[0].path]
            futures = list(reader.submit(group, buffers, links_of_array))
            waiting.append((number, buffers, futures))
            busy += sizes[number]
            # Otherwise these buffers would stay in memory until the next group's are allocated.
            del buffers
        while waiting:
            done += place()
        display.show(done >> 20, ["MiB", rate()])
    arrays: dict[str, jax.Array] = {
        path: jax.make_array_from_single_device_arrays(
            targets[path].shape, targets[path].sharding, pieces[path]
        )  # type: ignore[arg-type]
        for path in by_path
    }
    return arrays, ReadReport(reader.bytes_read, reader.bytes_kept, time.perf_counter() - started)


def aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array whose elements are not set, aligned so that a CPU device can use its buffer."""
    size = math.prod(shape) * dtype.itemsize
    room = np.empty(size + ALIGNMENT, np.uint8)
    first = -room.ctypes.data % ALIGNMENT
    return room[first : first + size].view(dtype).reshape(shape)


def _ordered_groups(
    by_path: Mapping[str, Sequence[Link]], targets: Mapping[str, jax.ShapeDtypeStruct]
) -> list[list[Shard]]:
    """The groups of all arrays, in the order in which the files have them."""
    # A disk then reads forward.
    ordered = sorted(by_path, key=lambda path: _position(by_path[path][0]))
    groups = []
    for path in ordered:
        groups += _groups(by_path[path], targets[path])
    return groups


def _nbytes(group: Sequence[Shard]) -> int:
    return sum(shard.nbytes for shard in group)


def _position(link: Link) -> tuple[str, int]:
    return str(link.tensor.file), link.tensor.offset


def _groups(links: Sequence[Link], target: jax.ShapeDtypeStruct) -> list[list[Shard]]:
    """The shards of an array that devices of this process keep, each once; all together if they are
    read in short runs.
    """
    shards = _shards(links[0].path, target)
    for link in links:
        for shard in shards:
            inside = intersection(shard.box, link.array_box)
            if inside is not None and has_short_runs(link.tensor, link.request(inside).tensor_box):
                return [shards]
    return [[shard] for shard in shards]


def _shards(path: str, target: jax.ShapeDtypeStruct) -> list[Shard]:
    if target.sharding is None:
        raise PretrainedError(
            f"{path} has no sharding.", fix="jax.ShapeDtypeStruct(..., sharding=...)."
        )
    # Devices that hold the same box share one read of it.
    devices: dict[Box, list[Any]] = collections.defaultdict(list)
    for device, index in target.sharding.addressable_devices_indices_map(target.shape).items():
        ranges = (
            part.indices(size)[:2] for part, size in zip(index or (), target.shape, strict=True)
        )
        devices[tuple(ranges)].append(device)
    return [
        Shard(path, box, np.dtype(target.dtype), tuple(several))
        for box, several in sorted(devices.items())
    ]


def _on_devices(buffer: np.ndarray, devices: tuple[Any, ...]) -> list[jax.Array]:
    """The buffer on each device; a CPU device uses it itself, so all others get copies of their
    own.
    """
    # On a CPU, device_put of an aligned buffer is an alias of it (jax 0.10), which may_alias=False
    # prevents for the other devices.
    first = jax.device_put(buffer, devices[0])
    arrays = [first, *(jax.device_put(first, device, may_alias=False) for device in devices[1:])]
    if devices[0].platform != "cpu":
        jax.block_until_ready(arrays)  # the buffer is free from here on
    return arrays


class _Reader:
    """Threads that read parts of shards, with open files and counts."""

    def __init__(self):
        self._files: dict[Path, int] = {}
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="read-weights")
        self._local, self._lock = threading.local(), threading.Lock()
        self.bytes_read = self.bytes_kept = 0

    def __enter__(self) -> "_Reader":
        return self

    def __exit__(self, *_: object) -> None:
        # First: a thread may still read, and another file may get the number of a closed one.
        self._pool.shutdown(cancel_futures=True)
        for descriptor in self._files.values():
            os.close(descriptor)

    def submit(
        self, group: Sequence[Shard], buffers: Sequence[np.ndarray], links: Sequence[Link]
    ) -> Iterator[Future]:
        """Read shards of one array into their buffers, in parts."""
        for link in links:
            common = [intersection(shard.box, link.array_box) for shard in group]
            insides = [box for box in common if box is not None]
            if not insides:
                continue
            values = sum(math.prod(box_shape(box)) for box in insides)
            self.bytes_kept += values * link.tensor.dtype.itemsize
            around = []
            for ranges in zip(*insides, strict=True):
                begins, ends = zip(*ranges, strict=True)
                around.append((min(begins), max(ends)))
            for part in link.parts(tuple(around), PART):
                targets = []
                for shard, buffer in zip(group, buffers, strict=True):
                    inside = intersection(part, shard.box)
                    if inside is not None:
                        target = buffer[slices(relative(inside, shard.box))]
                        targets.append((relative(inside, part), target))
                # Before the part has a thread: the system reads it while others are copied.
                read_ahead(self._open(link.tensor), link.tensor, link.request(part).tensor_box)
                yield self._pool.submit(self._read_part, link, part, targets)

    def _read_part(self, link: Link, box: Box, targets: Sequence[tuple[Box, np.ndarray]]) -> None:
        """Read a box of the array; `targets`: the memory of each part, with its box in this box."""
        request, (_, first) = link.request(box), targets[0]
        dtype = first.dtype
        direct = (
            len(targets) == 1
            and request.exact
            and dtype == link.tensor.dtype
            # os.preadv fills contiguous memory alone.
            and first.flags.c_contiguous
        )
        shape = box_shape(request.tensor_box)
        if direct:
            raw = first.reshape(shape)
        else:
            raw = self._scratch("raw", shape, link.tensor.dtype)
        self._read_box(link.tensor, request.tensor_box, raw)
        if link.twin is not None:
            self._check_twin(request, raw, link.twin.request(box))
        if direct:
            return
        # both the cast and the change of order are several times faster alone
        if dtype != raw.dtype and not request.exact:
            cast = self._scratch("cast", raw.shape, dtype)
            cast[...] = raw
            raw = cast
        # numpy moves integers faster than bfloat16, which is no dtype of its own
        bits: Any = dtype
        # numpy has no integers of more than 8 bytes.
        if dtype == raw.dtype and dtype.itemsize <= 8:
            bits = f"u{dtype.itemsize}"
            raw = raw.view(bits)
        values = request.as_array(raw)
        for part, target in targets:
            if link.stacked:
                target = target[0]
            copy_into(target.view(bits), values[slices(part[link.stacked :])])

    def _check_twin(self, request: Request, raw: np.ndarray, twin: Request) -> None:
        other = self._scratch("twin", box_shape(twin.tensor_box), twin.link.tensor.dtype)
        self._read_box(twin.link.tensor, twin.tensor_box, other)
        one, two = request.as_array(raw), twin.as_array(other)
        # By bits, for which a NaN equals itself and 0 differs from -0.
        bits = f"u{raw.dtype.itemsize}"
        is_equal = raw.dtype == other.dtype and np.array_equal(
            np.ascontiguousarray(one).view(bits), np.ascontiguousarray(two).view(bits)
        )
        if not is_equal:
            names = f"{request.link.tensor.name} and {twin.link.tensor.name}"
            why = (
                f"{names} are one array of the model ({request.link.path}), and their values "
                "differ."
            )
            raise PretrainedError(
                why, fix="a model without tied weights, and a name map without tied = true."
            )

    def _read_box(self, tensor: Tensor, box: Box, into: np.ndarray) -> None:
        try:
            count = read_box(self._open(tensor), tensor, box, into)
        except OSError as error:
            raise _unreadable(tensor, error) from error
        # += of an attribute is a read and a write, between which another thread may come.
        with self._lock:
            self.bytes_read += count

    def _open(self, tensor: Tensor) -> int:
        with self._lock:
            if tensor.file not in self._files:
                try:
                    self._files[tensor.file] = os.open(tensor.file, os.O_RDONLY)
                except OSError as error:
                    raise _unreadable(tensor, error) from error
            return self._files[tensor.file]

    def _scratch(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Memory of this thread, used again for the next part: fresh pages cost more than what is
        copied into them.
        """
        size = math.prod(shape) * dtype.itemsize
        room = getattr(self._local, name, None)
        if room is None or len(room) < size:
            room = np.empty(size, np.uint8)
            setattr(self._local, name, room)
        return room[:size].view(dtype).reshape(shape)


def _unreadable(tensor: Tensor, error: OSError) -> PretrainedError:
    return PretrainedError(
        f"{tensor.file} cannot be read: {error.strerror} (at {tensor}).", fix="check the disk."
    )
