"""Send bytes from one process of a job to another over TCP. Both sides first prove that they know
the job's token.

The receiver listens at one address, sends a nonce, and reads one line of JSON: what is to be sent,
and the proof. Without a proof it closes the connection and reads nothing more. A transfer has a
time limit, and a bounded number of them run at once.
"""

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from spmd.distributed.messages import is_proof, proof_of, receive_message, send_message
from spmd.distributed.world import join_address
from spmd.errors import printable

GREETING_SECONDS = 5.0  # for the lines before and after the bytes
# a transfer may take this long, and a second for as many bytes
BASE_SECONDS, SLOWEST = 10.0, 4 << 20
MAX_CONNECTIONS = 8  # at once
ACCEPT_AGAIN = 0.1  # seconds after an error

Read = Callable[[memoryview], None]  # fills a buffer with the next bytes


class TransferError(Exception):
    """The peer is gone, too slow, or has refused; the message says which."""


class Receiver:
    """Receives transfers at one address until it is closed.

    Args:
      host: IP address to listen on; no other interface is reachable.
      token: the job's secret.
      receive: called in a thread with the sender's message, which has "bytes", and a function that
        reads them. What it raises is sent to the peer, as the reason of a refusal.

    Attributes:
      address: "host:port" to send to.
    """

    def __init__(self, host: str, token: str, receive: Callable[[dict[str, Any], Read], None]):
        self._token = token
        self._receive = receive
        self._slots = threading.Semaphore(MAX_CONNECTIONS)
        self._closed = threading.Event()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=MAX_CONNECTIONS)
        self.address = join_address(host, self._listener.getsockname()[1])
        threading.Thread(target=self._accept, name="spmd receiver", daemon=True).start()

    def close(self) -> None:
        """Accept no more transfers."""
        self._closed.set()
        # on Linux a thread inside accept does not notice close, but shutdown wakes it; macOS raises
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                # else there were too many open files, for example
                if self._closed.wait(ACCEPT_AGAIN):
                    return
                continue
            if self._slots.acquire(blocking=False):
                threading.Thread(
                    target=self._serve, args=(connection,), name="spmd receive", daemon=True
                ).start()
            else:
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            # a stranger may send anything
            with connection, contextlib.suppress(OSError, ValueError, RecursionError):
                self._answer(connection)
        finally:
            self._slots.release()

    def _answer(self, connection: socket.socket) -> None:
        nonce = secrets.token_hex(16)
        send_message(connection, {"nonce": nonce})
        message = receive_message(connection, time.monotonic() + GREETING_SECONDS) or {}
        proof = message.pop("proof", "")
        if not is_proof(proof, self._token, nonce, message):
            # A process of another job gets no answer.
            return
        count = message.get("bytes")
        # A bool is an int in Python, and JSON may hold either.
        if type(count) is not int or count < 0:
            return
        nonce_of_sender = str(message.get("nonce", ""))
        self._send_answer(connection, nonce_of_sender, "send")
        # One deadline for all bytes: otherwise a sender of one byte every few seconds would occupy
        # one of the few connections forever.
        deadline = time.monotonic() + _seconds(count)
        try:
            self._receive(message, lambda buffer: _fill(connection, buffer, deadline))
            answer = "received"
        except Exception as error:
            answer = printable(f"{type(error).__name__}: {error}", 300)
        self._send_answer(connection, nonce_of_sender, answer)

    def _send_answer(self, connection: socket.socket, nonce: str, text: str) -> None:
        proof = proof_of(self._token, f"answer {nonce}", {"answer": text})
        send_message(connection, {"answer": text, "proof": proof})


def send(address: str, token: str, message: dict[str, Any], parts: Iterable[Any]) -> int:
    """Send bytes to a receiver, and wait until it has handled them.

    Args:
      address: "host:port" of the receiver.
      token: the job's secret.
      message: says what the bytes are; small, and has their number under "bytes".
      parts: buffers with the bytes.

    Returns:
      The number of bytes that were sent.

    Raises:
      TransferError: the peer is gone, too slow, does not know the token, or has refused.
    """
    host, _, port = address.rpartition(":")
    nonce = secrets.token_hex(16)
    deadline = time.monotonic() + _seconds(message["bytes"])
    try:
        with socket.create_connection(
            (host.strip("[]"), int(port)), timeout=GREETING_SECONDS
        ) as connection:
            greeting = receive_message(connection, time.monotonic() + GREETING_SECONDS) or {}
            message = {**message, "nonce": nonce}
            proof = proof_of(token, str(greeting.get("nonce")), message)
            send_message(connection, {**message, "proof": proof})
            _check_answer(connection, token, nonce, "send", GREETING_SECONDS)
            sent = 0
            for part in parts:
                connection.settimeout(max(deadline - time.monotonic(), 0.01))
                connection.sendall(part)
                sent += memoryview(part).nbytes
            remaining = max(deadline - time.monotonic(), 0.0)
            _check_answer(connection, token, nonce, "received", remaining + GREETING_SECONDS)
            return sent
    except (OSError, ValueError) as error:
        raise TransferError(f"{address}: {error or type(error).__name__}") from error


def _check_answer(
    connection: socket.socket, token: str, nonce: str, expected: str, seconds: float
) -> None:
    answer = receive_message(connection, time.monotonic() + seconds) or {}
    if not is_proof(answer.pop("proof", ""), token, f"answer {nonce}", answer):
        raise TransferError(
            f"{connection.getpeername()[0]}: it does not know this job's token, or is gone"
        )
    text = str(answer.get("answer"))
    if text != expected:
        raise TransferError(printable(text, 300))


def _seconds(count: int) -> float:
    return BASE_SECONDS + count / SLOWEST


def _fill(connection: socket.socket, buffer: memoryview, deadline: float) -> None:
    while len(buffer):
        connection.settimeout(max(deadline - time.monotonic(), 0.01))
        count = connection.recv_into(buffer)
        if not count:
            raise ConnectionError("the sender is gone")
        buffer = buffer[count:]


def local_address(peer: str) -> str:
    """This host's IP address on the network of a peer, "host:port"; no packet is sent."""
    host, _, port = peer.rpartition(":")
    kind, _, _, _, address = socket.getaddrinfo(
        host.strip("[]"), int(port), type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(kind, socket.SOCK_DGRAM) as probe:
        # Connecting a datagram socket only chooses a route.
        probe.connect(address)
        return str(probe.getsockname()[0])
