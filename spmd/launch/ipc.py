"""Length-prefixed messages between a process and its children, over private sockets
(`socket.socketpair`).
"""

import selectors
import socket
from collections.abc import Callable, Mapping

LENGTH = 8  # bytes in front of each message
LOOK = 0.05  # seconds between two checks whether to continue
CHUNK = 1 << 20  # bytes of one read or write
READY, DONE, UNSENT, FAILED = b"R", b"D", b"U", b"F"  # how answers begin


def send(connection: socket.socket, message: bytes) -> None:
    """Write a message; blocks until it is written.

    Raises:
      ConnectionError: the other side is closed.
    """
    connection.sendall(_frame(message))


def receive(connection: socket.socket) -> bytes | None:
    """Wait for a message; None if the other side is closed."""
    return _Incoming(connection).receive_more() or None


def _frame(message: bytes) -> bytes:
    return len(message).to_bytes(LENGTH, "big") + message


class _Incoming:
    """The received part of one message; the other side sends the next one only after an answer."""

    def __init__(self, connection: socket.socket):
        self._connection = connection
        self._received = bytearray()

    def receive_more(self) -> bytes | None:
        """Receive what has arrived, and return the message once it is complete; None before, if the
        socket does not block; b"" if the other side is closed before that.
        """
        while True:
            try:
                chunk = self._connection.recv(CHUNK)
            except BlockingIOError:
                return None
            except ConnectionError:
                # Linux resets a socket that was closed before its owner had read everything
                return b""
            self._received += chunk
            if self._is_complete():
                return bytes(self._received[LENGTH:])
            if not chunk:
                return b""

    def _is_complete(self) -> bool:
        header = self._received[:LENGTH]
        if len(header) < LENGTH:
            return False
        return len(self._received) - LENGTH >= int.from_bytes(header, "big")


def broadcast_and_collect(
    connections: Mapping[int, socket.socket],
    message: bytes | None,
    keep_waiting: Callable[[Mapping[int, bytes]], bool],
) -> dict[int, bytes]:
    """Send all processes the same message, and receive one answer from each, concurrently.

    Args:
      connections: to each process, by rank; they do not block.
      message: None: send nothing.
      keep_waiting: called many times a second with the answers so far; False ends the wait.

    Returns:
      The answers by rank; without those of processes that closed their socket, or were no longer
      waited for.
    """
    answers: dict[int, bytes] = {}
    events_at_first = selectors.EVENT_READ
    frame = b""
    # Both at once: a process may answer, or fail, before another one has read its message.
    if message is not None:
        events_at_first |= selectors.EVENT_WRITE
        frame = _frame(message)
    unsent = dict.fromkeys(connections, memoryview(frame))
    incoming = {rank: _Incoming(connection) for rank, connection in connections.items()}
    with selectors.DefaultSelector() as selector:
        for rank, connection in connections.items():
            selector.register(connection, events_at_first, rank)
        while selector.get_map() and keep_waiting(answers):
            # With a bound: `keep_waiting` prints output meanwhile, and sees a process that has
            # ended while a descendant has its socket open.
            for key, events in selector.select(LOOK):
                rank = key.data
                connection = connections[rank]
                if events & selectors.EVENT_WRITE:
                    unsent[rank] = _write_more(connection, unsent[rank])
                    if not unsent[rank]:
                        selector.modify(connection, selectors.EVENT_READ, rank)
                answer = incoming[rank].receive_more() if events & selectors.EVENT_READ else None
                if answer is not None:
                    selector.unregister(connection)
                    if answer:
                        answers[rank] = answer
    return answers


def _write_more(connection: socket.socket, unsent: memoryview) -> memoryview:
    """Write what the socket takes, and return the rest; nothing if the other side is closed, which
    the reader will see.
    """
    try:
        return unsent[connection.send(unsent[:CHUNK]) :]
    except BlockingIOError:
        return unsent
    except ConnectionError:
        return unsent[:0]
