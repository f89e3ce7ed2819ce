"""Messages between a process and those that it has started, over pipes that nobody else has: each after its length."""

import contextlib
import dataclasses
import os
import secrets
import selectors
from collections.abc import Callable, Mapping

LENGTH = 8  # bytes in front of each message
LOOK = 0.05  # seconds between two looks at whether to go on
PIECE = 1 << 20
READY, DONE, UNSENT, FAILED = b"R", b"D", b"U", b"F"  # how answers begin


def mark() -> str:
    """What a process prints when a call is over, and nothing else does."""
    return f"\x1e{secrets.token_hex(8)}"


@dataclasses.dataclass(frozen=True)
class Ends:
    """Two pipes as one side of them sees it.

    Attributes:
      reads: the file descriptor to read from.
      writes: the one to write to.
    """

    reads: int
    writes: int

    def close(self) -> None:
        """Hang up."""
        for number in (self.reads, self.writes):
            with contextlib.suppress(OSError):
                os.close(number)


def pair() -> tuple[Ends, Ends]:
    """Two sides of a talk; the first one's own reading and writing never waits."""
    reads, answers = os.pipe()
    try:
        asked, writes = os.pipe()
    except BaseException:
        Ends(reads, answers).close()
        raise
    os.set_blocking(reads, False)
    os.set_blocking(writes, False)
    return Ends(reads, writes), Ends(asked, answers)


def framed(message: bytes) -> bytes:
    """A message as it travels."""
    return len(message).to_bytes(LENGTH, "big") + message


def send(ends: Ends, message: bytes) -> None:
    """Write a message; wait until it is on its way.

    Raises:
      BrokenPipeError: nobody listens any more.
    """
    left = memoryview(framed(message))
    while left:
        left = left[os.write(ends.writes, left[:PIECE]) :]


def receive(ends: Ends) -> bytes | None:
    """Wait for a message; None where the other side has hung up."""
    length = _exactly(ends.reads, LENGTH)
    return _exactly(ends.reads, int.from_bytes(length, "big")) if length is not None else None


def _exactly(pipe: int, count: int) -> bytes | None:
    found = bytearray()
    while len(found) < count:
        piece = os.read(pipe, min(count - len(found), PIECE))
        if not piece:
            return None
        found += piece
    return bytes(found)


class _Incoming:
    """What has come of one message."""

    def __init__(self, pipe: int):
        self._pipe, self._found = pipe, bytearray()

    def read(self) -> bytes | None:
        """The message, once it is whole; b"" where the other side has hung up before."""
        while True:
            try:
                piece = os.read(self._pipe, PIECE)
            except BlockingIOError:
                return None
            self._found += piece
            if len(self._found) >= LENGTH and len(self._found) - LENGTH >= int.from_bytes(self._found[:LENGTH], "big"):
                return bytes(self._found[LENGTH:])
            if not piece:
                return b""


def exchanged(ends: Mapping[int, Ends], message: bytes | None, go_on: Callable[[Mapping[int, bytes]], bool]) -> dict[int, bytes]:
    """Give all the same message, and take one from each, all at a time.

    Args:
      ends: by rank, as `pair` gives them first.
      message: None where there is none to give.
      go_on: is told what has come so far, many times a second; False ends it.

    Returns:
      What has come, by rank; those that have hung up, or were not waited for, are not there.
    """
    answers: dict[int, bytes] = {}
    left = {rank: memoryview(framed(message)) for rank in ends} if message is not None else {}
    incoming = {rank: _Incoming(own.reads) for rank, own in ends.items()}
    with selectors.DefaultSelector() as selector:
        for rank, own in ends.items():
            selector.register(own.reads, selectors.EVENT_READ, rank)
            if left:
                selector.register(own.writes, selectors.EVENT_WRITE, rank)
        while selector.get_map() and go_on(answers):
            for key, _ in selector.select(LOOK):
                rank = key.data
                if key.fd == ends[rank].reads:
                    answer = incoming[rank].read()
                    done = answer is not None
                    if answer:
                        answers[rank] = answer
                else:
                    done = _written(key.fd, left, rank)
                if done:
                    selector.unregister(key.fd)
    return answers


def _written(pipe: int, left: dict[int, memoryview], rank: int) -> bool:
    """Write what goes; whether that was all, or nobody listens."""
    try:
        left[rank] = left[rank][os.write(pipe, left[rank][:PIECE]) :]
    except BlockingIOError:
        return False
    except BrokenPipeError:
        return True
    return not left[rank]
