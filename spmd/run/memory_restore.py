"""Resumes from checkpoints in memory: finds the newest complete step on all hosts, sends hosts what
they lack, and builds the state.

All processes come to the same result: each host lists its pieces, every process gets all lists, and
the same functions choose.
"""

import base64
import dataclasses
import functools
import json
import logging
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from spmd.base.output_files import DamagedFileError
from spmd.base.tree import map_paths
from spmd.distributed.consistency import gather_texts
from spmd.distributed.peer_transfer import TransferError
from spmd.errors import printable
from spmd.run.checkpoint_meta import check_meta
from spmd.run.checkpoint_reader import arrays_by_path, restored_array
from spmd.run.memory_checkpoint import MemoryCheckpoints
from spmd.run.memory_folder import remove_piece
from spmd.run.memory_plan import FoundPiece, complete_steps, plan_shipments, shard_bounds
from spmd.run.piece_file import Key, Piece, read_header, read_shards
from spmd.train.state import State

MOST_TRIES = 100  # each finds and removes a damaged file
# what must be equal for shards to fit; the arrays are compared too
SAME = ("mesh", "layout", "storage")


@dataclasses.dataclass(frozen=True)
class MemoryState:
    """A complete state in the memory of the hosts, read and compared with its checksums.

    Attributes:
      step: updates that it has made.
      meta: that of a checkpoint.
      source: where each process has it from, as text.
      shards: those that this process's devices need.
    """

    step: int
    meta: dict[str, Any]
    source: str
    shards: dict[Key, np.ndarray]
    abstract_state: State

    def build(self) -> State:
        """Return the state on the devices; the shards on the host are freed one by one."""
        arrays = {}
        for path, leaf in arrays_by_path(self.abstract_state).items():
            arrays[path] = self._array(path, leaf)
        return map_paths(functools.partial(restored_array, arrays), self.abstract_state)

    def _array(self, path: str, leaf: Any) -> jax.Array:
        """Return an array on the devices, and free its shards on the host."""
        indices = leaf.sharding.addressable_devices_indices_map(leaf.shape)
        bounds = {device: shard_bounds(index, leaf.shape) for device, index in indices.items()}
        kind = leaf.sharding.memory_kind
        parts = []
        for device, device_bounds in bounds.items():
            target = SingleDeviceSharding(device, memory_kind=kind)
            shard = self.shards[path, device_bounds]
            # Without may_alias=False, JAX would use the memory of an aligned array of numpy on CPU
            # devices instead of copying it, and the shards are freed below.
            parts.append(jax.device_put(shard, target, may_alias=False))
        array = jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, parts)
        for device_bounds in set(bounds.values()):
            del self.shards[path, device_bounds]
        return array


def newest_in_memory(
    memory: MemoryCheckpoints, meta: Mapping[str, Any], *, after: int
) -> MemoryState | None:
    """Return the newest complete state in memory, later than a step; None if there is none. All
    processes call it.

    Args:
      meta: of the run that would resume; a state from another mesh, layout or packing does not fit.
      after: the newest step on disk, or -1.
    """
    for _ in range(MOST_TRIES):
        pieces, reasons = _find_pieces(memory, meta, after)
        steps = complete_steps(pieces, set(memory.holders))
        if not steps:
            if pieces:
                newest = max(piece.step for piece in pieces)
                reasons.append(f"step {newest} is not complete")
            if reasons and memory.job.rank == 0:
                logging.getLogger("spmd").warning(
                    "checkpoints in memory are not used: %s.", printable(reasons[0], 300)
                )
            return None
        step, start = steps[0]
        selected = [piece for piece in pieces if (piece.step, piece.start) == (step, start)]
        state = _load_state(memory, selected, step)
        if state is not None:
            memory.held = {step}
            return state
    return None


def _find_pieces(
    memory: MemoryCheckpoints, meta: Mapping[str, Any], after: int
) -> tuple[list[FoundPiece], list[str]]:
    """Return the pieces on all hosts that fit, and the reasons for which others do not; the first
    process of each host lists them.
    """
    keys = list(memory.holders)
    rows: list[list[Any]] = []
    if memory.job.rank == memory.job.hosts[memory.job.host][0]:
        rows = _local_rows(memory, meta, after)
    listing = json.dumps([memory.job.host, rows]).encode()
    # The texts pass through JAX's coordination service, and a state has many shards: one bit each.
    texts = gather_texts(base64.b64encode(zlib.compress(listing)).decode())
    pieces = []
    misfits: dict[int, str] = {}
    for text in texts:
        host, host_rows = json.loads(zlib.decompress(base64.b64decode(text)))
        for name, step, start, rank, hexadecimal, why in host_rows:
            if why:
                misfits[step] = why
                continue
            bits = int(hexadecimal, 16)
            present = frozenset(key for number, key in enumerate(keys) if bits >> number & 1)
            pieces.append(FoundPiece(host, name, step, start, rank, present))
    reasons = [f"step {step}: {why}" for step, why in sorted(misfits.items(), reverse=True)]
    return pieces, reasons


def _local_rows(memory: MemoryCheckpoints, meta: Mapping[str, Any], after: int) -> list[list[Any]]:
    """Return a row for each undamaged piece on this host that is later than a step: name, step,
    start, rank, one bit per shard in hexadecimal, and the reason for which it does not fit.

    Damaged files are removed.
    """
    rows = []
    for path, (step, rank) in memory.folder.pieces().items():
        if step <= after:
            continue
        try:
            piece = read_header(path)
            check_meta(piece.meta)
            if (piece.step, piece.rank) != (step, rank):
                raise DamagedFileError(f"it is of step {piece.step} and process {piece.rank}")
        except (DamagedFileError, ValueError, KeyError, TypeError, AttributeError) as error:
            _remove_damaged(memory, path.name, str(error))
            continue
        bits = sum(1 << number for number, key in enumerate(memory.holders) if key in piece.shards)
        why = _misfit(memory, piece, meta)
        rows.append([path.name, step, piece.start, rank, f"{bits:x}", why])
    return rows


def _misfit(memory: MemoryCheckpoints, piece: Piece, meta: Mapping[str, Any]) -> str:
    """Return the reason for which a piece does not fit the run, as text; "" if it does."""
    if piece.meta["arrays"] != memory.described:
        return "its arrays are not those of this model and optimizer"
    for name in SAME:
        if piece.meta.get(name) == meta[name]:
            continue
        if name == "mesh":
            return f"the {name} was {piece.meta.get(name)}, is {meta[name]}"
        return f"the {name} has changed"
    return ""


def _load_state(
    memory: MemoryCheckpoints, pieces: list[FoundPiece], step: int
) -> MemoryState | None:
    """Send each host what it lacks, and read what this process needs; return None if a shard was
    damaged or could not be sent, in any process.
    """
    job = memory.job
    needs = []
    for host in job.hosts:
        needs.append({key for key, ranks in memory.holders.items() if ranks & set(host)})
    shipments = plan_shipments(pieces, needs)
    problem = ""
    for shipment in shipments:
        # After the first problem nothing more is sent: no process will use this state.
        if job.rank == job.hosts[shipment.source][0] and not problem:
            receiver = job.hosts[shipment.target][0]
            problem = _send_shards(memory, shipment.name, shipment.keys, receiver)
    # Each process learns of the problems of all, so that all come to the same result.
    problems = [text for text in gather_texts(problem) if text]
    shards, meta = {}, {}
    if not problems:
        shards, meta, problem = _read_local(memory, step, pieces[0].start)
        problems = [text for text in gather_texts(problem) if text]
    if problems:
        if job.rank == 0:
            logging.getLogger("spmd").warning(
                "step %d in memory is not used: %s", step, printable(problems[0], 300)
            )
        return None
    return MemoryState(step, meta, _source(memory, shipments), shards, memory.abstract_state)


def _send_shards(memory: MemoryCheckpoints, name: str, keys: tuple[Key, ...], receiver: int) -> str:
    """Send shards of a file; return the problem as text, "" if there is none. A file that cannot be
    sent is removed, so that it is not chosen again.
    """
    path = memory.folder.path / name
    try:
        if not memory.job.addresses[receiver]:
            raise TransferError("the other process receives nothing")
        memory.counts.bytes_sent += memory.ship(
            receiver, read_header(path), path, keys, memory.job.rank
        )
        return ""
    except (TransferError, DamagedFileError, OSError) as error:
        remove_piece(path)
        return f"{memory.job.names[memory.job.rank]}: {name} cannot be sent: {error}"


def _read_local(
    memory: MemoryCheckpoints, step: int, start: str
) -> tuple[dict[Key, np.ndarray], dict[str, Any], str]:
    """Return the shards that this process needs, from its host's files, and process 0's metadata;
    and the problem as text, "" if there is none.
    """
    missing = {key for key, ranks in memory.holders.items() if memory.job.rank in ranks}
    shards: dict[Key, np.ndarray] = {}
    meta: dict[str, Any] = {}
    for path, (number, rank) in memory.folder.pieces().items():
        if number != step:
            continue
        try:
            piece = read_header(path)
            if piece.start != start or piece.meta["arrays"] != memory.described:
                continue
            if rank == 0:
                meta = piece.meta
            for key, array in read_shards(path, piece, sorted(missing & piece.shards.keys())):
                shards[key] = array
                missing.discard(key)
        except DamagedFileError as error:
            return {}, {}, _remove_damaged(memory, path.name, str(error))
    if missing or not meta:
        return shards, meta, f"{len(missing)} shards are missing"
    return shards, meta, ""


def _remove_damaged(memory: MemoryCheckpoints, name: str, why: str) -> str:
    """Remove a damaged file, so that it is not chosen again; return the warning."""
    remove_piece(memory.folder.path / name)
    text = (
        f"the piece {name} in memory of {memory.job.names[memory.job.rank]} is damaged ({why}) and "
        "was removed"
    )
    logging.getLogger("spmd").warning("%s.", text)
    return text


def _source(memory: MemoryCheckpoints, shipments: list[Any]) -> str:
    """Return where each process has its shards from, as text."""
    job = memory.job
    ranks_by_source: dict[str, list[int]] = {}
    for number, ranks in enumerate(job.hosts):
        received = [each for each in shipments if each.target == number and each.keys]
        senders = dict.fromkeys(job.names[job.hosts[each.source][0]] for each in received)
        source = " and ".join(senders) or "own host"
        ranks_by_source.setdefault(source, []).extend(ranks)
    texts = []
    for source, ranks in ranks_by_source.items():
        texts.append(f"process {', '.join(map(str, ranks))}: {source}")
    return "; ".join(texts)
