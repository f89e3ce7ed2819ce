"""Writes a model's arrays as tensors of sharded files, the inverse of `read_weights`.

Process 0 writes all files. The shards of other processes come to it piece by piece through a
collective, so that no file system that all hosts share is needed, and no page of a file is written
by two hosts at once, which NFS does not support.
"""

import contextlib
import functools
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spmd.base.output_files import open_output, publish, sync
from spmd.base.user_paths import check_free, make_folder
from spmd.base.xla import to_bits
from spmd.distributed.consistency import raise_everywhere
from spmd.errors import PretrainedError
from spmd.pretrained.links import Link, copy_into
from spmd.pretrained.safetensors_files import (
    INDEX,
    SUFFIX,
    Box,
    Tensor,
    box_shape,
    header_bytes,
    intersection,
    relative,
    slices,
)

PIECE = 64 << 20  # bytes that are sent between processes at a time


def write_folder(
    folder: Path,
    links: Sequence[Link],
    arrays: Mapping[str, jax.Array],
    *,
    dtypes: Mapping[str, np.dtype],
    metadata: Mapping[str, str],
    beside: Mapping[str, bytes],
    max_shard: int,
    display: Any,
    stem: str = "model",
) -> None:
    """Write a folder, which appears once it is complete. All processes call this.

    Args:
      links: as they read these arrays, in the order of the tensors in the files.
      dtypes: of each tensor in the files.
      beside: contents of other files, by name.
      max_shard: bytes of one file; a larger tensor has one of its own.
      stem: what names of files begin with.

    Raises:
      PretrainedError: the folder is not empty, or cannot be written; in all processes.
    """
    # Hidden, and beside the folder, because a rename cannot cross file systems.
    working = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    writes, failure = jax.process_index() == 0, f"{folder} cannot be written"

    def begin() -> None:
        if writes:
            check_free(folder, PretrainedError)
            make_folder(working, PretrainedError)

    def finish() -> None:
        for error in failed:
            raise error
        if writes:
            for name, contents in beside.items():
                with open_output(working / name) as file:
                    file.write(contents)
            # Again: another program may have made it in the meantime.
            check_free(folder, PretrainedError)
            publish(working, folder)

    failed: list[Exception] = []
    shards_folder = None
    if writes:
        shards_folder = working
    try:
        raise_everywhere(begin, PretrainedError, failure)
        _write_shards(
            shards_folder,
            links,
            arrays,
            dtypes,
            metadata,
            max_shard,
            display,
            failed,
            stem,
        )
        raise_everywhere(finish, PretrainedError, failure)
    finally:
        if writes:
            # Removes what a failed attempt has left: `publish` gives the folder its final name.
            shutil.rmtree(working, ignore_errors=True)


def _write_shards(
    working: Path | None,
    links: Sequence[Link],
    arrays: Mapping[str, jax.Array],
    dtypes: Mapping[str, np.dtype],
    metadata: Mapping[str, str],
    max_shard: int,
    display: Any,
    failed: list[Exception],
    stem: str,
) -> None:
    """Write all tensors, in `working` if this process writes. After a failure the collectives
    continue, and nothing more is written.
    """
    by_tensor: dict[str, list[Link]] = {}
    for link in links:
        by_tensor.setdefault(link.tensor.name, []).append(link)
        if link.twin is not None:
            by_tensor.setdefault(link.twin.tensor.name, []).append(link.twin)
    tensor_of = {name: several[0].tensor for name, several in by_tensor.items()}
    shards = split_shards(tensor_of, dtypes, max_shard)
    names = [f"{stem}{SUFFIX}"]
    if len(shards) > 1:
        count = len(shards)
        # The names that transformers gives to the parts of a model.
        names = [f"{stem}-{n:05}-of-{count:05}{SUFFIX}" for n in range(1, count + 1)]
    sizes = {}
    for name, tensor in tensor_of.items():
        sizes[name] = math.prod(tensor.shape) * dtypes[name].itemsize
    gather, done = _Gather(), 0
    display.start(0, sum(sizes.values()) >> 20, "writing")
    for file, tensors in zip(names, shards, strict=True):
        entries = [(name, dtypes[name], tensor_of[name].shape) for name in tensors]
        header, _ = header_bytes(entries, metadata)
        path = None
        if working is not None:
            path = working / file
        with _opened(path, header, failed) as write:
            for name in tensors:
                write(_values(by_tensor[name], dtypes[name], arrays, gather))
                done += sizes[name]
                if display.due():
                    display.show(done >> 20, ["MiB", name])
    if working is not None and len(shards) > 1:
        weight_map: dict[str, str] = {}
        for file, tensors in zip(names, shards, strict=True):
            weight_map |= dict.fromkeys(tensors, file)
        index = {
            "metadata": {"total_size": sum(sizes.values())},
            "weight_map": dict(sorted(weight_map.items())),
        }
        with _collected(failed), open_output(working / f"{stem}{INDEX}") as opened:
            opened.write(f"{json.dumps(index, indent=2)}\n".encode())


def split_shards(
    tensors: Mapping[str, Tensor], dtypes: Mapping[str, np.dtype], max_shard: int
) -> list[list[str]]:
    """The names of the tensors of each file, in order, wide dtypes first in each so that all are
    aligned.
    """
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        count = math.prod(tensor.shape) * dtypes[name].itemsize
        if shards[-1] and size + count > max_shard:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += count
    return [sorted(names, key=lambda name: -dtypes[name].itemsize) for names in shards]


@contextlib.contextmanager
def _opened(file: Path | None, header: bytes, failed: list[Exception]) -> Iterator[Any]:
    """A function that writes the next tensor of a file; it collects errors, and does nothing
    without a file or after an error.
    """
    if file is None or failed:
        yield lambda values: None
        return
    opened = None
    with _collected(failed):
        opened = open_output(file)
        opened.write(header)

    def write(values: np.ndarray) -> None:
        with _collected(failed):
            if opened is not None and not failed:
                opened.write(values.reshape(-1).view(np.uint8).data)

    try:
        yield write
    finally:
        with _collected(failed):
            # The bytes are on the disk before the folder has its name, in case the power fails.
            if opened is not None:
                opened.close()  # which writes what is in its buffer
                sync(file)


@contextlib.contextmanager
def _collected(failed: list[Exception]) -> Iterator[None]:
    """Collect errors of the disk: other processes wait for this one, which takes part to the end,
    and raises then.
    """
    try:
        yield
    except OSError as error:
        failed.append(error)


def _values(
    links: Sequence[Link], dtype: np.dtype, arrays: Mapping[str, jax.Array], gather: "_Gather"
) -> np.ndarray:
    """A tensor on the host, from all arrays that are parts of it."""
    tensor = np.empty(links[0].tensor.shape, dtype)
    for link in links:
        values = gather(arrays[link.path], link.array_box)
        target = tensor[slices(link.tensor_box)]
        if link.stacked:
            values = values[0]
        in_file = link.as_tensor(values)
        # numpy moves integers faster than bfloat16.
        if values.dtype == dtype:
            bits = f"u{dtype.itemsize}"
            copy_into(target.view(bits), in_file.view(bits))
        else:
            copy_into(target, in_file)
    return tensor


class _Gather:
    """A box of an array on the host of process 0 (and of others, as it happens). All processes call
    it in the same order.
    """

    def __init__(self):
        self._zeros: dict[Any, list[jax.Array]] = {}

    def __call__(self, array: jax.Array, box: Box) -> np.ndarray:
        values = np.empty(box_shape(box), array.dtype)
        local = {shard.device: shard.data for shard in array.addressable_shards}
        owners: dict[Box, Any] = {}  # of each shard one device, of process 0 if it has it
        for device, index in array.sharding.devices_indices_map(array.shape).items():
            parts = zip(index or (), array.shape, strict=True)
            ranges = tuple(part.indices(size)[:2] for part, size in parts)
            owner = owners.setdefault(ranges, device)
            if (device.process_index, device.id) < (owner.process_index, owner.id):
                owners[ranges] = device
        # Sorted: a send is a collective, so all processes need one order.
        for ranges, device in sorted(owners.items()):
            inside = intersection(box, ranges)
            if inside is None:
                continue
            # a shard of another process is sent, and each piece is in memory once per device
            pieces = [inside]
            if device.process_index != 0:
                pieces = _pieces(inside, PIECE // array.dtype.itemsize)
            for piece in pieces:
                starts = [begin for begin, _ in relative(piece, ranges)]
                shape = box_shape(piece)
                part = None
                if device in local:
                    part = _part_of(local[device], starts, shape)
                if device.process_index != 0:
                    part = self._send(array, device, part, shape)
                if part is not None:
                    values[slices(relative(piece, box))] = part
        return values

    def _send(self, array: jax.Array, owner: Any, part: Any, shape: tuple[int, ...]) -> Any:
        """A piece of one device's shard, in all processes: a sum of its bits with zeros of all
        other devices.
        """
        # A set has no order, and all processes must make the same mesh.
        devices = sorted(array.sharding.device_set, key=lambda device: device.id)
        mesh = Mesh(np.array(devices), ("device",))
        sharding = NamedSharding(mesh, PartitionSpec("device"))
        key = (array.dtype, shape)
        here = [device for device in devices if device.process_index == jax.process_index()]
        # Placed once: all devices but one send zeros with every piece.
        if key not in self._zeros:
            self._zeros[key] = [
                jax.device_put(np.zeros((1, *shape), array.dtype), device) for device in here
            ]
        # a sum of bits: one of floats with zeros would lose the sign of -0
        rows = list(self._zeros[key])
        if part is not None:
            rows[here.index(owner)] = jax.device_put(np.asarray(part)[None], owner)
        stacked = jax.make_array_from_single_device_arrays((len(devices), *shape), sharding, rows)
        sums = _sum_bits(mesh)(stacked)
        return np.asarray(sums.addressable_data(0)).view(array.dtype)


@functools.cache
def _sum_bits(mesh: Mesh) -> Any:
    def add(rows: jax.Array) -> jax.Array:
        bits = to_bits(rows)
        if bits.dtype == bool:
            return bits.any(0)
        return bits.sum(0, dtype=bits.dtype)

    return jax.jit(add, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _pieces(box: Box, most: int) -> list[Box]:
    """A box in boxes of at most about `most` elements, along its longest dim."""
    sizes = box_shape(box)
    if math.prod(sizes) <= most:
        return [box]
    dim = max(range(len(sizes)), key=lambda dim: sizes[dim])
    step = max(1, sizes[dim] * most // math.prod(sizes))
    begin, end = box[dim]
    before, after = box[:dim], box[dim + 1 :]
    return [(*before, (at, min(at + step, end)), *after) for at in range(begin, end, step)]


def _part_of(shard: jax.Array, starts: Sequence[int], sizes: tuple[int, ...]) -> Any:
    """A part of one device's shard; a CPU's is seen by numpy without a copy."""
    # a slice on a device would be a copy, and another program for each shape
    if next(iter(shard.devices())).platform == "cpu":
        parts = [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]
        return np.asarray(shard)[tuple(parts)]
    return np.asarray(_slice(shard, tuple(starts), sizes))


# Only the sizes are constants, so pieces of one shape share a program.
@functools.partial(jax.jit, static_argnums=2)
def _slice(shard: jax.Array, starts: tuple[int, ...], sizes: tuple[int, ...]) -> jax.Array:
    return jax.lax.dynamic_slice(shard, starts, sizes)
