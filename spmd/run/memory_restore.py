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

from spmd.checksummed_files import DamagedFileError
from spmd.distributed.consistency import gather_texts
from spmd.distributed.peer_transfer import TransferError
from spmd.errors import printable
from spmd.run.checkpoint_meta import check_meta
from spmd.run.checkpoint_reader import arrays_by_path, take
from spmd.run.memory_checkpoint import MemoryCheckpoints
from spmd.run.memory_folder import remove_piece
from spmd.run.memory_plan import FoundPiece, complete_steps, plan_shipments, shard_bounds
from spmd.run.piece_file import Key, Piece, read_header, read_shards
from spmd.train.state import State
from spmd.tree import map_paths

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
        """The state on the devices; the shards on the host are freed one by one."""
        flat = {
            path: self._array(path, leaf)
            for path, leaf in arrays_by_path(self.abstract_state).items()
        }
        return map_paths(functools.partial(take, flat), self.abstract_state)

    def _array(self, path: str, leaf: Any) -> jax.Array:
        indices = leaf.sharding.addressable_devices_indices_map(leaf.shape)
        bounds = {device: shard_bounds(index, leaf.shape) for device, index in indices.items()}
        kind, parts = leaf.sharding.memory_kind, []
        for device, each in bounds.items():
            target = SingleDeviceSharding(device, memory_kind=kind)
            parts.append(jax.device_put(self.shards[path, each], target, may_alias=False))
        array = jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, parts)
        for each in set(bounds.values()):
            del self.shards[path, each]
        return array


def newest_in_memory(
    memory: MemoryCheckpoints, meta: Mapping[str, Any], *, after: int
) -> MemoryState | None:
    """The newest complete state in memory, later than a step; None if there is none. All processes
    call it.

    Args:
      meta: of the run that would resume; a state from another mesh, layout or packing does not fit.
      after: the newest step on disk, or -1.
    """
    for _ in range(MOST_TRIES):
        found, reasons = _find(memory, meta, after)
        steps = complete_steps(found, set(memory.holders))
        if not steps:
            reasons += (
                [f"step {max(piece.step for piece in found)} is not complete"] if found else []
            )
            if reasons and memory.job.rank == 0:
                logging.getLogger("spmd").warning(
                    "checkpoints in memory are not used: %s.", printable(reasons[0], 300)
                )
            return None
        step, start = steps[0]
        state = _load(
            memory, [piece for piece in found if (piece.step, piece.start) == (step, start)], step
        )
        if state is not None:
            memory.held = {step}
            return state
    return None


def _find(
    memory: MemoryCheckpoints, meta: Mapping[str, Any], after: int
) -> tuple[list[FoundPiece], list[str]]:
    """The pieces on all hosts that fit, and why others do not; the first process of each host lists
    them.
    """
    keys = list(memory.holders)
    rows: list[list[Any]] = []
    if memory.job.rank == memory.job.hosts[memory.job.host][0]:
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
            bits = sum(1 << number for number, key in enumerate(keys) if key in piece.shards)
            rows.append(
                [path.name, step, piece.start, rank, f"{bits:x}", _misfit(memory, piece, meta)]
            )
    texts = gather_texts(
        base64.b64encode(zlib.compress(json.dumps([memory.job.host, rows]).encode())).decode()
    )
    found, misfits = [], dict[int, str]()
    for text in texts:
        host, listed = json.loads(zlib.decompress(base64.b64decode(text)))
        for name, step, start, rank, bits, why in listed:
            number = int(bits, 16)
            present = frozenset(key for position, key in enumerate(keys) if number >> position & 1)
            if why:
                misfits[step] = why
            else:
                found.append(FoundPiece(host, name, step, start, rank, present))
    return found, [f"step {step}: {why}" for step, why in sorted(misfits.items(), reverse=True)]


def _misfit(memory: MemoryCheckpoints, piece: Piece, meta: Mapping[str, Any]) -> str:
    """Why a piece does not fit the run, as text; "" if it does."""
    if piece.meta["arrays"] != memory.described:
        return "its arrays are not those of this model and optimizer"
    for name in SAME:
        if piece.meta.get(name) != meta[name]:
            return (
                f"the {name} was {piece.meta.get(name)}, is {meta[name]}"
                if name == "mesh"
                else f"the {name} has changed"
            )
    return ""


def _load(memory: MemoryCheckpoints, pieces: list[FoundPiece], step: int) -> MemoryState | None:
    """Send each host what it lacks, and read what this process needs; None if a shard was damaged
    or could not be sent, in any process.
    """
    job, problem = memory.job, ""
    needs = [
        {key for key, ranks in memory.holders.items() if ranks & set(host)} for host in job.hosts
    ]
    shipments = plan_shipments(pieces, needs)
    for shipment in shipments:
        if job.rank == job.hosts[shipment.source][0]:
            problem = problem or _ship(
                memory, shipment.name, shipment.keys, job.hosts[shipment.target][0]
            )
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


def _ship(memory: MemoryCheckpoints, name: str, keys: tuple[Key, ...], receiver: int) -> str:
    """Send shards of a file; what is wrong, as text. A file that cannot be sent is removed, so that
    it is not chosen again.
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
    """The shards that this process needs, from its host's files, and process 0's metadata; and what
    is wrong, as text.
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
            meta = piece.meta if rank == 0 else meta
            for key, array in read_shards(path, piece, sorted(missing & piece.shards.keys())):
                shards[key] = array
                missing.discard(key)
        except DamagedFileError as error:
            return {}, {}, _remove_damaged(memory, path.name, str(error))
    return shards, meta, f"{len(missing)} shards are missing" if missing or not meta else ""


def _remove_damaged(memory: MemoryCheckpoints, name: str, why: str) -> str:
    remove_piece(memory.folder.path / name)
    text = (
        f"the piece {name} in memory of {memory.job.names[memory.job.rank]} is damaged ({why}) and "
        "was removed"
    )
    logging.getLogger("spmd").warning("%s.", text)
    return text


def _source(memory: MemoryCheckpoints, shipments: list[Any]) -> str:
    """Where each process has its shards from."""
    job, groups = memory.job, dict[str, list[int]]()
    for number, ranks in enumerate(job.hosts):
        senders = dict.fromkeys(
            job.names[job.hosts[shipment.source][0]]
            for shipment in shipments
            if shipment.target == number and shipment.keys
        )
        groups.setdefault(" and ".join(senders) or "own host", []).extend(ranks)
    return "; ".join(
        f"process {', '.join(map(str, ranks))}: {source}" for source, ranks in groups.items()
    )
