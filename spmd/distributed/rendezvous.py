"""The rendezvous: before JAX starts, all processes connect to one port and check that they belong
together.

JAX's coordination service does not name a missing process, accepts processes that expect different
numbers of others, and lets a second process with the same rank end the entire job. So process 0
listens at an address that all know, each of the others sends one line of JSON about itself, and all
get the same answer: what is wrong, or the address (with a fresh port) of JAX's service. The
connections carry nothing else; while a run lasts, they show whether the other host is there
(`links.py`).
"""

import contextlib
import dataclasses
import json
import os
import secrets
import selectors
import socket
import time
from collections.abc import Callable
from typing import Any

from spmd.distributed.links import Links, keep
from spmd.distributed.messages import (
    MAX_LINE_BYTES,
    is_proof,
    proof_of,
    receive_message,
    send_message,
)
from spmd.distributed.world import World, free_port, join_address, resolve_address
from spmd.errors import ClusterError, RendezvousTimeout, printable

# Connections, besides one for each process, that may be open without a message.
MAX_SILENT = 64
LOG_SECONDS = 10.0  # between two log lines about missing processes
# Seconds that process 0 still answers late processes after a failure.
LINGER = 5.0
FIX = "the same command, software and number of processes everywhere."


@dataclasses.dataclass(frozen=True)
class ProcessInfo:
    """The message of a process about itself: rank, number of processes, name for people, and facts
    that must be the same everywhere.
    """

    rank: int
    size: int
    name: str
    facts: dict[str, str]


def wait_for_all(
    world: World, info: ProcessInfo, *, timeout: float, log: Callable[[str], None]
) -> tuple[str, Links]:
    """Wait for all other processes: process 0 listens, the others connect to it.

    Returns:
      "host:port" for JAX's coordination service; and the connections, of process 0 with all others,
      and of these with it.

    Raises:
      ClusterError: two processes of the same rank; different numbers of processes, or facts.
      RendezvousTimeout: some did not arrive in time.
    """
    if world.rank == 0:
        began = time.monotonic()
        address = _own_address(world, timeout, log)
        with _Server(world, info, address) as server:
            return server.serve(timeout - int(time.monotonic() - began), log)
    return _connect(world, info, timeout, log)


def _own_address(world: World, timeout: float, log: Callable[[str], None]) -> str:
    """Process 0's own address, once its name resolves: Kubernetes registers the names of pods while
    they start.
    """
    began = logged_at = time.monotonic()
    while True:
        try:
            return resolve_address(world)
        except RendezvousTimeout:
            now = time.monotonic()
            if now - began >= timeout:
                raise
            if now - logged_at >= LOG_SECONDS:
                logged_at = now
                log(f"waiting for an address of {world.host} ({now - began:.0f} s of {timeout:g})")
        time.sleep(min(0.5, timeout))


class _Server:
    """The side of process 0."""

    def __init__(self, world: World, info: ProcessInfo, address: str):
        self.world = world
        self.address = address
        self.infos: dict[int, ProcessInfo] = {0: info}
        self.buffers: dict[socket.socket, bytearray] = {}  # of connections whose line is incomplete
        # the rank of each connection that waits for the answer
        self.waiting: dict[socket.socket, int] = {}
        self.nonces: dict[socket.socket, str] = {}  # for the proofs of the answers
        self.rejected = 0  # connections that did not know the token
        self.problem = ""
        self.timed_out = False
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            self.listener = socket.create_server(
                (address, world.port), family=family, backlog=max(16, world.size)
            )
        except OSError as error:
            problem = (
                f"{world}: cannot listen on port {world.port} of {address}: "
                f"{os.strerror(error.errno or 0)}."
            )
            raise RendezvousTimeout(
                problem,
                fix="another port, such as SPMD_COORDINATOR=HOST:PORT in all processes; or end the "
                "process that has it, which may be an earlier run.",
            ) from error
        self.listener.setblocking(False)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ)

    def __enter__(self) -> "_Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.selector.close()
        for connection in (self.listener, *self.buffers, *self.waiting):
            connection.close()

    def serve(self, timeout: float, log: Callable[[str], None]) -> tuple[str, Links]:
        """Wait for all processes, and send all of them the same answer."""
        began = logged_at = time.monotonic()
        while len(self.infos) < self.world.size and not self.problem:
            self._poll(0.2)
            now = time.monotonic()
            missing = ", ".join(
                str(rank) for rank in range(self.world.size) if rank not in self.infos
            )
            if now - began >= timeout:
                self.timed_out = True
                self.problem = (
                    f"processes [{missing}] of {self.world.size} did not arrive within {timeout:g} "
                    f"s{self._rejections()}"
                )
            elif now - logged_at >= LOG_SECONDS:
                logged_at = now
                log(
                    f"waiting for processes [{missing}] ({now - began:.0f} s of "
                    f"{timeout:g}){self._rejections()}"
                )
        if self.problem:
            self._refuse()
            kind = RendezvousTimeout if self.timed_out else ClusterError
            raise kind(f"{self.world}: {self.problem}.", fix=FIX)
        # Chosen last, so that little time passes before JAX's service listens there: another
        # program may get the port meanwhile.
        service = join_address(self.address, free_port(self.address))
        for connection in self.waiting:
            self._answer(connection, {"go": service})
        links = {
            rank: (f"process {rank} on {self.infos[rank].name}", keep(connection))
            for connection, rank in self.waiting.items()
        }
        # So that `__exit__` leaves the links open.
        self.waiting = {}
        return service, links

    def _rejections(self) -> str:
        if not self.rejected:
            return ""
        return f"; {self.rejected} connections did not know this job's token"

    def _answer(self, connection: socket.socket, message: dict[str, Any]) -> None:
        proof = proof_of(self.world.token, f"answer {self.nonces[connection]}", message)
        send_message(connection, {**message, "proof": proof})

    def _refuse(self) -> None:
        """Send the problem to all connected processes, and to those that connect in the next
        seconds.
        """
        deadline = time.monotonic()
        if len(self.infos) < self.world.size:
            deadline += LINGER
        while True:
            for connection in list(self.waiting):
                self.waiting.pop(connection)
                self.selector.unregister(connection)
                self._answer(connection, {"problem": self.problem})
                connection.close()
            if time.monotonic() >= deadline or len(self.infos) >= self.world.size:
                return
            self._poll(0.2)

    def _poll(self, seconds: float) -> None:
        """Accept connections and read what they send."""
        for key, _ in self.selector.select(seconds):
            connection = key.fileobj
            if connection is self.listener:
                self._accept()
            elif isinstance(connection, socket.socket):
                self._receive(connection)

    def _accept(self) -> None:
        try:
            connection, _ = self.listener.accept()
        except OSError:
            return
        connection.setblocking(False)
        if len(self.buffers) >= self.world.size + MAX_SILENT:
            # the one that has been silent for longest; a process of this job connects again
            self._drop(next(iter(self.buffers)))
        self.buffers[connection] = bytearray()
        self.selector.register(connection, selectors.EVENT_READ)

    def _receive(self, connection: socket.socket) -> None:
        try:
            received = connection.recv(MAX_LINE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        buffer = self.buffers.get(connection)
        # closed, or it sends too much
        if not received or buffer is None or len(buffer) + len(received) > MAX_LINE_BYTES:
            self._drop(connection)
            return
        buffer += received
        if buffer.endswith(b"\n"):
            self._register(connection, bytes(self.buffers.pop(connection)))

    def _drop(self, connection: socket.socket) -> None:
        self.selector.unregister(connection)
        self.buffers.pop(connection, None)
        self.nonces.pop(connection, None)
        rank = self.waiting.pop(connection, None)
        if rank is not None:
            # The process may connect again.
            del self.infos[rank]
        connection.close()

    def _register(self, connection: socket.socket, line: bytes) -> None:
        try:
            message = json.loads(line)
            proof = message.pop("proof")
            nonce = str(message.pop("nonce"))
            proved = is_proof(proof, self.world.token, nonce, message)
            facts = {
                printable(str(name), 100): printable(str(value), 300)
                for name, value in message["facts"].items()
            }
            info = ProcessInfo(
                rank=int(message["rank"]),
                size=int(message["size"]),
                name=printable(str(message["name"]), 300),
                facts=facts,
            )
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            proved, info, nonce = False, None, ""
        # A process that is not of this job gets no answer, and changes nothing.
        if info is None or not proved:
            self.rejected += 1
            self._drop(connection)
            return
        self.nonces[connection] = nonce
        self.problem = self.problem or self._mismatch(info)
        self.waiting[connection] = info.rank
        # The first one stays, since the problem names it.
        self.infos.setdefault(info.rank, info)

    def _mismatch(self, info: ProcessInfo) -> str:
        first = self.infos[0]
        if info.size != self.world.size:
            return (
                f"process {info.rank} on {info.name} expects {info.size} processes, and process 0 "
                f"on {first.name} {self.world.size}"
            )
        if info.rank in self.infos:
            return (
                f"process {info.rank} exists twice: on {self.infos[info.rank].name} and on "
                f"{info.name}"
            )
        if not 0 <= info.rank < self.world.size:
            return f"process {info.rank} on {info.name} is not one of {self.world.size}"
        for fact in dict.fromkeys([*first.facts, *info.facts]):
            expected = first.facts.get(fact, "none")
            other = info.facts.get(fact, "none")
            if expected != other:
                return (
                    f"{fact} is {expected} in process 0 on {first.name}, and {other} in process "
                    f"{info.rank} on {info.name}"
                )
        return ""


def _connect(
    world: World, info: ProcessInfo, timeout: float, log: Callable[[str], None]
) -> tuple[str, Links]:
    """Register with process 0 as soon as it listens, and wait for the answer."""
    began = logged_at = time.monotonic()
    message = dataclasses.asdict(info)
    while True:
        nonce = secrets.token_hex(16)
        remaining = began + timeout - time.monotonic()
        if remaining <= 0:
            raise RendezvousTimeout(
                f"{world}: no answer from process 0 at {world.address} in {timeout:g} s.",
                fix="is it started, and is that its address; may this host reach it; and do both "
                "know the same token (SPMD_TOKEN)?",
            )
        with contextlib.ExitStack() as closing, contextlib.suppress(OSError):
            connection = closing.enter_context(
                socket.create_connection((world.host, world.port), timeout=min(remaining, 5.0))
            )
            proof = proof_of(world.token, nonce, message)
            send_message(connection, {**message, "nonce": nonce, "proof": proof})
            # Process 0 answers when all have arrived; what listens there may be another program.
            while time.monotonic() - began < timeout and not _has_answer(connection):
                log(
                    f"waiting for the answer of process 0 at {world.address} "
                    f"({time.monotonic() - began:.0f} s of {timeout:g})"
                )
            # process 0 knows who is missing, and has its timeout
            answer = receive_message(connection, began + timeout + LINGER) or {}
            # else it is from a process that does not know the token
            if is_proof(answer.pop("proof", ""), world.token, f"answer {nonce}", answer):
                if "go" not in answer:
                    raise ClusterError(
                        f"{world}: {printable(str(answer.get('problem')))}.", fix=FIX
                    )
                closing.pop_all()
                return str(answer["go"]), {0: (f"process 0 at {world.address}", keep(connection))}
        time.sleep(min(0.2, max(remaining, 0.0)))
        if time.monotonic() - logged_at >= LOG_SECONDS:
            logged_at = time.monotonic()
            log(
                f"waiting for process 0 at {world.address} ({logged_at - began:.0f} s of "
                f"{timeout:g})"
            )


def _has_answer(connection: socket.socket) -> bool:
    """Return whether there is something to read, or the connection is closed, within 10 s."""
    connection.settimeout(LOG_SECONDS)
    try:
        connection.recv(1, socket.MSG_PEEK)
    except TimeoutError:
        return False
    return True
