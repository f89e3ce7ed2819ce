"""The roll call: before JAX is told anything, all processes meet at one port and hear whether they are who they should be.

JAX's coordination service waits for a missing process without a name, takes processes that expect different numbers of others, and lets
a second process of the same rank end the whole job. So process 0 listens at the address that all were told, each of the others says in a
line of JSON who it is, and all get the same answer: what is wrong, or the port, a fresh one, where JAX's service will be. It carries
nothing else, and is closed before training.
"""

import dataclasses
import hmac
import json
import secrets
import selectors
import socket
import time
from collections.abc import Callable
from typing import Any

from spmd.distributed.detect_cluster import World, free_port, resolved
from spmd.errors import ClusterError, RendezvousTimeout, escaped

LONGEST = 65536  # bytes of a line
SILENT = 64  # connections, besides one for each process, that may be open and say nothing
TOLD = 10.0  # seconds between two lines about who is missing
LINGER = 5.0  # seconds that process 0 goes on telling those who come late what is wrong


@dataclasses.dataclass(frozen=True)
class Card:
    """What a process says of itself: its place among the others, its name for people, and facts that must be the same for all."""

    rank: int
    size: int
    name: str
    facts: dict[str, str]


def call_roll(world: World, card: Card, *, timeout: float, say: Callable[[str], None]) -> str:
    """Meet all other processes, in process 0 by listening, elsewhere by asking there.

    Returns:
      "host:port", where JAX's coordination service is to be.

    Raises:
      ClusterError: some did not come in time; two of the same rank; different numbers of processes, or facts.
    """
    if world.rank == 0:
        began = time.monotonic()
        address = _named(world, timeout, say)
        with _Desk(world, card, address) as desk:
            return desk.meet(timeout - int(time.monotonic() - began), say)
    return _ask(world, card, timeout, say)


def _named(world: World, timeout: float, say: Callable[[str], None]) -> str:
    """Process 0's own address, as soon as its name has one: Kubernetes makes the names of pods known while they start."""
    began = told = time.monotonic()
    while True:
        try:
            return resolved(world)
        except RendezvousTimeout:
            now = time.monotonic()
            if now - began >= timeout:
                raise
            if now - told >= TOLD:
                told = now
                say(f"waiting for an address of {world.host} ({now - began:.0f} s of {timeout:g})")
        time.sleep(min(0.5, timeout))


class _Desk:
    """Process 0 while it calls the roll."""

    def __init__(self, world: World, card: Card, address: str):
        self.world, self.address = world, address
        self.cards: dict[int, Card] = {0: card}
        self.lines: dict[socket.socket, bytearray] = {}  # of those who have not said all
        self.waiting: dict[socket.socket, int] = {}  # by rank, those who have
        self.nonces: dict[socket.socket, str] = {}  # what their answers are proved with
        self.strangers = 0  # who did not know the token
        self.problem, self.absent = "", False
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        self.door = socket.socket(family, socket.SOCK_STREAM)
        self.door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self.door.bind((self.address, world.port))
            self.door.listen(max(16, world.size))
        except OSError as error:
            self.door.close()
            raise RendezvousTimeout(
                f"{world}: port {world.port} of {self.address} cannot be listened at: {error.strerror}.\n"
                "    fix: another port; or end the process that has it, which may be an earlier run."
            ) from error
        self.door.setblocking(False)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.door, selectors.EVENT_READ)

    def __enter__(self) -> "_Desk":
        return self

    def __exit__(self, *_: object) -> None:
        self.selector.close()
        for connection in (self.door, *self.lines, *self.waiting):
            connection.close()

    def meet(self, timeout: float, say: Callable[[str], None]) -> str:
        """Wait for all, and give the same answer to all."""
        began = told = time.monotonic()
        while len(self.cards) < self.world.size and not self.problem:
            self._look(0.2)
            now = time.monotonic()
            missing = ", ".join(str(rank) for rank in range(self.world.size) if rank not in self.cards)
            if now - began >= timeout:
                self.absent = True
                self.problem = f"processes [{missing}] of {self.world.size} did not come in {timeout:g} s{self._turned_away()}"
            elif now - told >= TOLD:
                told = now
                say(f"waiting for processes [{missing}] ({now - began:.0f} s of {timeout:g}){self._turned_away()}")
        if self.problem:
            self._refuse()
            kind = RendezvousTimeout if self.absent else ClusterError
            raise kind(f"{self.world}: {self.problem}.\n    fix: the same command, software and number of processes everywhere.")
        port = free_port(self.address)
        place = f"[{self.address}]:{port}" if ":" in self.address else f"{self.address}:{port}"
        for connection in self.waiting:
            self._answer(connection, {"go": place})
        return place

    def _turned_away(self) -> str:
        return f"; {self.strangers} connections did not know this job's token" if self.strangers else ""

    def _answer(self, connection: socket.socket, said: dict[str, Any]) -> None:
        _send(connection, {**said, "proof": _proof(self.world.token, f"answer {self.nonces[connection]}", said)})

    def _refuse(self) -> None:
        """Tell all who are there, and those who come in the next seconds, what is wrong."""
        until = time.monotonic() + (LINGER if len(self.cards) < self.world.size else 0.0)
        while True:
            for connection in list(self.waiting):
                self.waiting.pop(connection)
                self.selector.unregister(connection)
                self._answer(connection, {"problem": self.problem})
                connection.close()
            if time.monotonic() >= until or len(self.cards) >= self.world.size:
                return
            self._look(0.2)

    def _look(self, seconds: float) -> None:
        """Take who comes and what they say; whoever says anything else is sent away."""
        for key, _ in self.selector.select(seconds):
            connection = key.fileobj
            if connection is self.door:
                self._open()
            elif isinstance(connection, socket.socket):
                self._listen(connection)

    def _open(self) -> None:
        try:
            connection, _ = self.door.accept()
        except OSError:
            return
        connection.setblocking(False)
        if len(self.lines) >= self.world.size + SILENT:
            self._forget(next(iter(self.lines)))  # who has said nothing for longest; one of ours asks again
        self.lines[connection] = bytearray()
        self.selector.register(connection, selectors.EVENT_READ)

    def _listen(self, connection: socket.socket) -> None:
        try:
            heard = connection.recv(LONGEST)
        except BlockingIOError:
            return
        except OSError:
            heard = b""
        line = self.lines.get(connection)
        if not heard or line is None or len(line) + len(heard) > LONGEST:  # gone, or it says more than it should
            self._forget(connection)
            return
        line += heard
        if line.endswith(b"\n"):
            self._hear(connection, bytes(self.lines.pop(connection)))

    def _forget(self, connection: socket.socket) -> None:
        self.selector.unregister(connection)
        self.lines.pop(connection, None)
        self.nonces.pop(connection, None)
        rank = self.waiting.pop(connection, None)
        if rank is not None:
            del self.cards[rank]  # it may come again
        connection.close()

    def _hear(self, connection: socket.socket, line: bytes) -> None:
        try:
            said = json.loads(line)
            proof, nonce = str(said.pop("proof")), str(said.pop("nonce"))
            known = hmac.compare_digest(proof.encode(), _proof(self.world.token, nonce, said).encode())
            facts = {escaped(str(name), 100): escaped(str(value), 300) for name, value in said["facts"].items()}
            card = Card(int(said["rank"]), int(said["size"]), escaped(str(said["name"]), 300), facts)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            known, card, nonce = False, None, ""
        if card is None or not known:  # not one of ours: it is told nothing, and changes nothing
            self.strangers += 1
            self.lines[connection] = bytearray()
            self._forget(connection)
            return
        self.nonces[connection] = nonce
        self.problem = self.problem or self._wrong(card)
        self.waiting[connection] = card.rank
        self.cards.setdefault(card.rank, card)

    def _wrong(self, card: Card) -> str:
        first = self.cards[0]
        if card.size != self.world.size:
            return f"process {card.rank} on {card.name} expects {card.size} processes, and process 0 on {first.name} {self.world.size}"
        if card.rank in self.cards:
            return f"process {card.rank} is there twice: on {self.cards[card.rank].name} and on {card.name}"
        if not 0 <= card.rank < self.world.size:
            return f"process {card.rank} on {card.name} is none of {self.world.size}"
        for fact in dict.fromkeys([*first.facts, *card.facts]):
            mine, other = first.facts.get(fact, "none"), card.facts.get(fact, "none")
            if mine != other:
                return f"{fact} is {mine} in process 0 on {first.name}, and {other} in process {card.rank} on {card.name}"
        return ""


def _ask(world: World, card: Card, timeout: float, say: Callable[[str], None]) -> str:
    """Say who this is as soon as somebody listens, and wait for the answer."""
    began = told = time.monotonic()
    said = dataclasses.asdict(card)
    while True:
        nonce = secrets.token_hex(16)
        left = began + timeout - time.monotonic()
        if left <= 0:
            raise RendezvousTimeout(
                f"{world}: no answer from process 0 at {world.address} in {timeout:g} s.\n"
                "    fix: is it started, and is that its address; may this host reach it; and do both know the same token (SPMD_TOKEN)?"
            )
        try:
            with socket.create_connection((world.host, world.port), timeout=min(left, 5.0)) as connection:
                _send(connection, {**said, "nonce": nonce, "proof": _proof(world.token, nonce, said)})
                answer = _answer(connection, began + timeout + LINGER)  # process 0 knows more, and says it at its own time
        except OSError:
            answer = None
        proof = str(answer.pop("proof", "")) if answer is not None else ""
        if not hmac.compare_digest(proof.encode(), _proof(world.token, f"answer {nonce}", answer or {}).encode()):
            answer = None  # of somebody who does not know the token
        if answer is not None and "go" in answer:
            return str(answer["go"])
        if answer is not None:
            raise ClusterError(
                f"{world}: {escaped(str(answer.get('problem')))}.", fix="the same command, software and number of processes everywhere."
            )
        time.sleep(min(0.2, max(left, 0.0)))
        if time.monotonic() - told >= TOLD:
            told = time.monotonic()
            say(f"waiting for process 0 at {world.address} ({told - began:.0f} s of {timeout:g})")


def _proof(token: str, nonce: str, said: dict[str, Any]) -> str:
    """That who says this knows the token, which is not sent itself; the nonce makes it of no use for another answer."""
    return hmac.new(token.encode(), f"{nonce} {json.dumps(said, sort_keys=True)}".encode(), "sha256").hexdigest()


def _answer(connection: socket.socket, until: float) -> dict[str, Any] | None:
    """A line of JSON; None where there was none, so that one asks again."""
    heard = b""
    while not heard.endswith(b"\n"):
        connection.settimeout(max(until - time.monotonic(), 0.01))
        part = connection.recv(LONGEST)
        if not part or len(heard) > LONGEST:
            return None
        heard += part
    try:
        found = json.loads(heard)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _send(connection: socket.socket, said: dict[str, Any]) -> None:
    connection.settimeout(5.0)
    try:
        connection.sendall(json.dumps(said).encode() + b"\n")
    except OSError:
        pass  # who asked is gone, and does not wait for this
