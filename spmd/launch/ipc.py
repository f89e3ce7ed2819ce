"""Length-prefixed messages between a process and its children, over private pipes."""

import contextlib
import dataclasses
import os
import secrets
import selectors
from collections.abc import Callable, Mapping

LENGTH = 8  # bytes in front of each message
LOOK = 0.05  # seconds between two checks whether to continue
CHUNK = 1 << 20  # bytes of one read or write
READY, DONE, UNSENT, FAILED = b"R", b"D", b"U", b"F"  # how answers begin


def new_mark() -> str:
    """A unique line that a process prints at the end of a call."""
    return f"\x1e{secrets.token_hex(8)}"


@dataclasses.dataclass(frozen=True)
class PipeEnds:
    """One side of two pipes.

    Attributes:
      reads: the file descriptor to read from.
      writes: the file descriptor to write to.
    """

    reads: int
    writes: int

    def close(self) -> None:
        """Close both."""
        for number in (self.reads, self.writes):
            with contextlib.suppress(OSError):
                os.close(number)


def pipe_pair() -> tuple[PipeEnds, PipeEnds]:
    """Both sides of two pipes; the first side never blocks."""
    reads, child_writes = os.pipe()
    try:
        child_reads, writes = os.pipe()
    except BaseException:
        PipeEnds(reads, child_writes).close()
        raise
    os.set_blocking(reads, False)
    os.set_blocking(writes, False)
    return PipeEnds(reads, writes), PipeEnds(child_reads, child_writes)


def frame(message: bytes) -> bytes:
    """A message with its length in front."""
    return len(message).to_bytes(LENGTH, "big") + message


def send(ends: PipeEnds, message: bytes) -> None:
    """Write a message; blocks until it is written.

    Raises:
      BrokenPipeError: the other side is closed.
    """
    left = memoryview(frame(message))
    while left:
        left = left[os.write(ends.writes, left[:CHUNK]) :]


def receive(ends: PipeEnds) -> bytes | None:
    """Wait for a message; None if the other side is closed."""
    length = _exactly(ends.reads, LENGTH)
    return _exactly(ends.reads, int.from_bytes(length, "big")) if length is not None else None


def _exactly(pipe: int, count: int) -> bytes | None:
    received = bytearray()
    while len(received) < count:
        chunk = os.read(pipe, min(count - len(received), CHUNK))
        if not chunk:
            return None
        received += chunk
    return bytes(received)


class _Incoming:
    """The received part of one message."""

    def __init__(self, pipe: int):
        self._pipe, self._received = pipe, bytearray()

    def read(self) -> bytes | None:
        """The message, once it is complete; None before; b"" if the other side is closed before that."""
        while True:
            try:
                chunk = os.read(self._pipe, CHUNK)
            except BlockingIOError:
                return None
            self._received += chunk
            if len(self._received) >= LENGTH and len(self._received) - LENGTH >= int.from_bytes(self._received[:LENGTH], "big"):
                return bytes(self._received[LENGTH:])
            if not chunk:
                return b""


def broadcast_and_collect(
    ends: Mapping[int, PipeEnds], message: bytes | None, keep_waiting: Callable[[Mapping[int, bytes]], bool]
) -> dict[int, bytes]:
    """Send all processes the same message, and receive one answer from each, concurrently.

    Args:
      ends: the first side of each process's pipes, by rank.
      message: None: send nothing.
      keep_waiting: called many times a second with the answers so far; False ends the wait.

    Returns:
      The answers by rank; without those of processes that closed their pipe, or were no longer waited for.
    """
    answers: dict[int, bytes] = {}
    unsent = {rank: memoryview(frame(message)) for rank in ends} if message is not None else {}
    incoming = {rank: _Incoming(end.reads) for rank, end in ends.items()}
    with selectors.DefaultSelector() as selector:
        for rank, end in ends.items():
            selector.register(end.reads, selectors.EVENT_READ, rank)
            if unsent:
                selector.register(end.writes, selectors.EVENT_WRITE, rank)
        while selector.get_map() and keep_waiting(answers):
            for key, _ in selector.select(LOOK):
                rank = key.data
                if key.fd == ends[rank].reads:
                    answer = incoming[rank].read()
                    done = answer is not None
                    if answer:
                        answers[rank] = answer
                else:
                    done = _write_more(key.fd, unsent, rank)
                if done:
                    selector.unregister(key.fd)
    return answers


def _write_more(pipe: int, unsent: dict[int, memoryview], rank: int) -> bool:
    """Write what the pipe takes; whether all is written, or the other side is closed."""
    try:
        unsent[rank] = unsent[rank][os.write(pipe, unsent[rank][:CHUNK]) :]
    except BlockingIOError:
        return False
    except BrokenPipeError:
        return True
    return not unsent[rank]
