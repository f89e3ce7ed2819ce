"""Checkpoints in the memory of the hosts: written by a thread while training continues, with a copy
on the next host.

Every process writes the shards that its plan gives it (`memory_plan.py`) as one file
(`piece_file.py`) into its host's folder (`memory_folder.py`), then sends those that no other host
has to the next host. Before a step is written, all processes agree that all of them are ready, and
on the newest step that all have written. That one is kept until this one is complete; all others
are removed. What fails is counted and logged once; it never stops training.
"""

import collections
import contextlib
import dataclasses
import hashlib
import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent import futures
from pathlib import Path
from typing import Any

import jax
import numpy as np

from spmd.base.tree import describe, format_bytes, nbytes
from spmd.distributed import coordination
from spmd.distributed.consistency import first_nonempty, gather_texts, raise_everywhere
from spmd.distributed.initialize import job_token
from spmd.distributed.launcher_protocol import report_to_launcher
from spmd.distributed.peer_transfer import Read, Receiver, TransferError, local_address, send
from spmd.errors import CheckpointError, printable
from spmd.run.checkpoint_reader import arrays_by_path
from spmd.run.device_snapshot import StateCopier, fits_on_devices
from spmd.run.memory_folder import MemoryFolder, memory_base, run_id
from spmd.run.memory_plan import WritePlan, group_hosts, plan_writes, shard_bounds, shard_holders
from spmd.run.piece_file import MOST_HEADER, Key, Piece, parts, receive_piece, write_piece
from spmd.train.state import State

AGREE_SECONDS = 60.0  # for all processes to say whether they are ready to write
EXTRA_SECONDS = 5.0  # the others wait this much longer than process 0, which collects the votes
LOOK = 0.02  # seconds between two looks at the votes
BUSY = "busy"  # a vote
ALL = "all"  # the name of the list of all votes


@dataclasses.dataclass
class MemoryCounts:
    """The work of this process for checkpoints in memory.

    Attributes:
      saved: checkpoints that it has written.
      skipped: those that it has not, since an earlier one was still being written or sent
        somewhere, or for lack of room.
      failed: those that it could not write.
      unsent: those whose copy could not be sent to the next host.
      bytes_written, bytes_sent: to this host's memory, and to the next host.
    """

    saved: int = 0
    skipped: int = 0
    failed: int = 0
    unsent: int = 0
    bytes_written: int = 0
    bytes_sent: int = 0

    def __str__(self) -> str:
        problems = {
            "skipped": self.skipped,
            "failed": self.failed,
            "not sent to another host": self.unsent,
        }
        text = (
            f"{self.saved} checkpoints in memory, {format_bytes(self.bytes_written)} written, "
            f"{format_bytes(self.bytes_sent)} sent"
        )
        return text + "".join(f", {count} {what}" for what, count in problems.items() if count)


@dataclasses.dataclass(frozen=True)
class Job:
    """The processes of a run, as each of them sees all.

    Attributes:
      rank: of this process.
      start: identifies this start of the run.
      hosts: the ranks on each host.
      names: the name of each rank's host.
      addresses: where each rank receives copies; "" if there is one host only, or no secret that
        protects it.
    """

    rank: int
    start: str
    hosts: list[list[int]]
    names: list[str]
    addresses: list[str]

    @property
    def host(self) -> int:
        """The number of this process's host."""
        return next(number for number, ranks in enumerate(self.hosts) if self.rank in ranks)


class MemoryCheckpoints:
    """A run's checkpoints in memory. Every process has one, and they call `save` at the same steps.

    Args:
      folder: of this host.
      abstract_state: shapes, dtypes and shardings of the state.
      start: identifies this start of the run; the same in all processes.

    Attributes:
      counts: what was done so far.
    """

    def __init__(self, folder: MemoryFolder, abstract_state: State, start: str):
        self.folder = folder
        self.abstract_state = abstract_state
        self.counts = MemoryCounts()
        self.arrays = arrays_by_path(abstract_state)
        self.described = {path: describe(leaf) for path, leaf in self.arrays.items()}
        self.holders = shard_holders(self.arrays)
        self._receiver: Receiver | None = None
        self.job = self._find_hosts(start)
        self.plan: WritePlan = plan_writes(
            self.holders, self.described, self.job.hosts, self.job.rank
        )
        # Steps that this process has written, or from which it was resumed.
        self.held: set[int] = set()
        self._published: collections.deque[tuple[float, str]] = collections.deque()
        self._publishing = threading.Lock()
        self._logged: set[str] = set()
        self._copier: StateCopier | None = None
        self._threaded: bool | None = None
        self._copy: tuple[int, State] | None = None
        self._last = futures.Future[None]()
        self._last.set_result(None)
        self._thread = futures.ThreadPoolExecutor(1, thread_name_prefix="spmd memory")
        self._closed = threading.Event()

    def _find_hosts(self, start: str) -> Job:
        """Find out which processes share a host, and where they receive copies."""
        rank = jax.process_index()
        texts = gather_texts(json.dumps([self.folder.host, socket.gethostname()]))
        pairs = [json.loads(text) for text in texts]
        hosts = group_hosts([host for host, _ in pairs])
        names = [printable(str(name), 100) for _, name in pairs]
        # Containers may share a host name.
        if len(set(names)) != len(hosts):
            names = [f"{name} (host {_host_of(hosts, each)})" for each, name in enumerate(names)]
        addresses = [""] * len(texts)
        if len(hosts) > 1 and job_token():
            try:
                self._receiver = Receiver(
                    local_address(coordination.process_info()[2]), job_token(), self._receive
                )
            except OSError as error:
                logging.getLogger("spmd").warning(
                    "copies of checkpoints in memory cannot be received: %s", error
                )
            address = "" if self._receiver is None else self._receiver.address
            addresses = gather_texts(address)
        elif len(hosts) > 1 and rank == 0:
            fix = "set a random SPMD_TOKEN everywhere"
            logging.getLogger("spmd").warning(
                "checkpoints in memory are not copied to other hosts: this job has no token; %s.",
                fix,
            )
        return Job(rank, start, hosts, names, addresses)

    def copy(self, state: State, step: int) -> None:
        """Queue a copy of the state on the devices, unless the previous save is still running;
        `save` writes it.
        """
        if not self._last.done():
            return
        if self._threaded is None:
            # Two: another copy is made for the disk.
            self._threaded = fits_on_devices(state, copies=2)
        if self._threaded:
            # The previous copy's memory is reused.
            self._copy = None
            self._copier = self._copier or StateCopier(state)
            self._copy = (step, self._copier(state))

    def save(self, state: State, step: int, meta: Mapping[str, Any]) -> None:
        """Start to write a checkpoint; skip it if the previous one is still being written or
        sent.
        """
        if not self._last.done():
            self._vote_busy(step)
            self.counts.skipped += 1
            return
        if self._copy is None or self._copy[0] != step:
            self.copy(state, step)
        source: State | dict[Key, np.ndarray]
        if self._copy is not None:
            _, source = self._copy
            self._copy = None
        else:
            # No room on the devices: training waits until the host has the shards.
            source = self._copy_to_host(state)
        meta = {**meta, "step": step, "arrays": self.described}
        self._last = self._thread.submit(self._write, [source], step, meta)

    def _copy_to_host(self, state: State) -> dict[Key, np.ndarray]:
        """Return the shards that this process writes, on the host."""
        shards = _local_shards(state)
        # All are on their way before the first is waited for.
        for key in self.plan.write:
            shards[key].copy_to_host_async()
        with jax.transfer_guard_device_to_host("allow"):
            return {key: np.array(shards[key]) for key in self.plan.write}

    def _write(self, sources: list[Any], step: int, meta: dict[str, Any]) -> None:
        """Write the one source in the list; it is emptied, so that the copy of the state is freed
        at once.
        """
        # An argument is alive until the call returns, also in the executor's list of tasks: so the
        # source comes in a list, and no name stays for it.
        source = sources.pop()
        shards = source if isinstance(source, dict) else _local_shards(source)
        del source
        try:
            keeping = self._agree(step)
            if keeping is None:
                self.counts.skipped += 1
                return
            self.folder.keep_only({step, *keeping})
            self.held = set(keeping)
            blank = Piece(
                step, self.job.start, self.job.rank, meta, dict.fromkeys(self.plan.write, "")
            )
            path = self.folder.piece(step, self.job.rank)
            # Each shard is freed when it is written.
            with jax.transfer_guard_device_to_host("allow"):
                piece = write_piece(path, blank, lambda key: np.asarray(shards.pop(key)))
            self.held.add(step)
            self.counts.saved += 1
            self.counts.bytes_written += path.stat().st_size
        except Exception as error:
            self.counts.failed += 1
            self._log_once(
                f"a checkpoint could not be written to memory: {type(error).__name__}: {error}"
            )
            return
        finally:
            shards.clear()
        self._send_copy(piece, path)

    def _send_copy(self, piece: Piece, path: Path) -> None:
        """Send the next host what no other host has; process 0 also sends the metadata, which a
        resumed run needs.
        """
        receiver = self.plan.receiver
        keys = self.plan.send
        if receiver is None or not self.job.addresses[receiver]:
            return
        if not keys and self.job.rank != 0:
            return
        try:
            self.counts.bytes_sent += self.ship(receiver, piece, path, keys)
        except Exception as error:
            self.counts.unsent += 1
            if self._closed.is_set():
                return
            self._log_once(
                f"a checkpoint in memory could not be sent to {self.job.names[receiver]}: {error}"
            )

    def ship(
        self, receiver: int, piece: Piece, path: Path, keys: Any, sender: int | None = None
    ) -> int:
        """Send some shards of a file to another process, which writes them to its host's folder.

        Raises:
          TransferError: the other process is gone, too slow, or has refused.
        """
        selected = piece.select(keys)
        size = len(selected.header()) + selected.data_bytes()
        # The proof of the message covers the header's checksum, and the header has the checksums of
        # all shards.
        digest = hashlib.sha256(selected.header()).hexdigest()
        message = {
            "step": piece.step,
            "rank": piece.rank,
            "sender": sender,
            "bytes": size,
            "header": digest,
        }
        return send(
            self.job.addresses[receiver],
            job_token(),
            message,
            self._until_stopped(parts(path, piece, tuple(selected.shards))),
        )

    def _until_stopped(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        for chunk in chunks:
            if self._closed.is_set():
                raise TransferError("the run has ended")
            yield chunk

    def _receive(self, message: dict[str, Any], read: Read) -> None:
        """Write what another host sends; raises to refuse it."""
        step = message["step"]
        rank = message["rank"]
        sender = message["sender"]
        total = message["bytes"]
        # They become the name of a file.
        numbers = [step, rank]
        if sender is not None:
            numbers.append(sender)
        for number in numbers:
            if type(number) is not int or not 0 <= number < 10**9:
                raise ValueError("not a step or rank")
        most = sum(map(nbytes, self.arrays.values())) + MOST_HEADER
        if total > most:
            raise ValueError(f"{total} bytes are more than the state has")
        why = self.folder.lacks_room(total, {step, *self.held})
        if why:
            raise ValueError(why)

        def check(piece: Piece) -> None:
            if (piece.step, piece.rank) != (step, rank) or piece.meta["arrays"] != self.described:
                raise ValueError("not a piece of this state")
            if hashlib.sha256(piece.header()).hexdigest() != message["header"]:
                raise ValueError("the header was changed on the way")

        receive_piece(self.folder.piece(step, rank, sender), total, read, check)

    def _agree(self, step: int) -> set[int] | None:
        """Return the step to keep until this one is complete, if any; None: some process is not
        ready, so none writes this step.
        """
        try:
            self.folder.create()
            why = self.folder.lacks_room(self.plan.host_bytes, {step, max(self.held, default=-1)})
        except OSError as error:
            why = str(error)
        votes = self._votes(step, json.dumps([sorted(self.held), why]))
        if votes is None:
            return None
        decoded = [json.loads(vote) for vote in votes]
        reasons = [why for _, why in decoded if why]
        if reasons:
            if self.job.rank == 0:
                reason = printable(reasons[0], 300)
                self._log_once(
                    f"training continues without checkpoints in memory: {reason}", "room"
                )
            return None
        common = set.intersection(*(set(held) for held, _ in decoded))
        return {max(common)} if common else set()

    def _votes(self, step: int, vote: str) -> list[str] | None:
        """Return the votes of all processes, collected by process 0; None if one is busy, or has
        not voted in time.
        """
        if not coordination.is_initialized():
            return [vote]
        self._publish(step, str(self.job.rank), vote)
        path = f"memory/{self.job.start}/{step}/"
        size = len(self.job.names)
        until = time.monotonic() + AGREE_SECONDS
        if self.job.rank == 0:
            votes: dict[str, str] = {}
            while (
                len(votes) < size
                and BUSY not in votes.values()
                and time.monotonic() < until
                and not self._closed.wait(LOOK)
            ):
                votes = coordination.read_dir(path)
            result = None
            if len(votes) == size and BUSY not in votes.values():
                result = list(votes.values())
            # All processes use what process 0 publishes: a vote that comes too late for it is too
            # late for all.
            self._publish(step, ALL, json.dumps(result))
            return result
        while time.monotonic() < until + EXTRA_SECONDS and not self._closed.is_set():
            with contextlib.suppress(TimeoutError):
                return json.loads(coordination.get(f"{path}{ALL}", 1.0))
        return None

    def _vote_busy(self, step: int) -> None:
        """Vote against a step, since an earlier one is still being written."""
        if coordination.is_initialized():
            self._publish(step, str(self.job.rank), BUSY)
            if self.job.rank == 0:
                self._publish(step, ALL, json.dumps(None))

    def _publish(self, step: int, name: str, text: str) -> None:
        """Store a text for all, and remove those for which no process waits any more. A fast run
        votes on the next steps in between.
        """
        path = f"memory/{self.job.start}/{step}/{name}"
        coordination.put(path, text)
        # The thread and the training loop both publish.
        with self._publishing:
            self._published.append((time.monotonic(), path))
            # JAX's coordination service keeps a text in memory until it is deleted.
            while self._published[0][0] < time.monotonic() - AGREE_SECONDS - 2 * EXTRA_SECONDS:
                _, old_path = self._published.popleft()
                coordination.delete(old_path)

    def _log_once(self, text: str, kind: str = "") -> None:
        if (kind or text) not in self._logged and len(self._logged) < 10:
            self._logged.add(kind or text)
            logging.getLogger("spmd").warning("%s", text)

    def stop(self) -> None:
        """Let the save that is running end early: it waits for no other process, and what is being
        sent is abandoned.
        """
        self._closed.set()

    def wait(self) -> None:
        """Wait for the save that is running, if any."""
        futures.wait([self._last])

    def close(self, *, remove: bool) -> None:
        """Release the folder; remove it, once all processes are done, if the run does not need it
        any more. Without `remove`, after an error, the thread does not wait for other processes,
        which may be gone.
        """
        if not remove:
            self.stop()
        self._thread.shutdown(wait=remove or not coordination.is_initialized())
        if self._receiver is not None:
            self._receiver.close()
        if remove:
            # A barrier: another process of this host may still read the folder.
            first_nonempty("")
            self.folder.remove()
        self.folder.close()


def _local_shards(state: State) -> dict[Key, Any]:
    """Return one copy of each shard that this process's devices hold."""
    shards = {}
    for path, leaf in arrays_by_path(state).items():
        for shard in leaf.addressable_shards:
            shards[path, shard_bounds(shard.index, leaf.shape)] = shard.data
    return shards


def _host_of(hosts: list[list[int]], rank: int) -> int:
    return next(number for number, ranks in enumerate(hosts) if rank in ranks)


def open_memory(
    base: str | Path | None, run_folder: Path, abstract_state: State, *, resume: bool
) -> MemoryCheckpoints | None:
    """Open a run's checkpoints in memory; all processes call it. Returns None, after a warning, if
    a host's folder cannot be used.

    Raises:
      OptionError: this machine has no /dev/shm, and no other folder is chosen.
      CheckpointError: the run's folder cannot be written.
    """
    chosen = memory_base(base)

    def new_start() -> str:
        if jax.process_index() != 0:
            return ""
        return f"{run_id(run_folder, keep=resume)} {secrets.token_hex(8)}"

    shared = raise_everywhere(
        new_start, CheckpointError, f"the id of the run in {run_folder} cannot be written"
    )
    identity, start = first_nonempty(shared).split()
    folder = None
    why = ""
    try:
        folder = MemoryFolder(chosen, run_folder, identity)
        report_to_launcher(f"memory.{jax.process_index()}", {"folder": str(folder.path)})
    except OSError as error:
        why = f"{socket.gethostname()}: {error}"
    problem = first_nonempty(why)
    if problem:
        if folder is not None:
            folder.close()
        if jax.process_index() == 0:
            logging.getLogger("spmd").warning(
                "there are no checkpoints in memory: %s", printable(problem, 300)
            )
        return None
    if folder is None:
        return None
    return MemoryCheckpoints(folder, abstract_state, start)
