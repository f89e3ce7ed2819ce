"""Lines of JSON between processes of a job, each with a proof that its sender knows the job's
token.
"""

import contextlib
import hmac
import json
import socket
import time
from typing import Any

MAX_LINE_BYTES = 65536


def proof_of(token: str, nonce: str, message: dict[str, Any]) -> str:
    """Return a proof that the sender knows the token, which is never sent; because of the nonce it
    is valid for one exchange only.
    """
    text = f"{nonce} {json.dumps(message, sort_keys=True)}"
    return hmac.new(token.encode(), text.encode(), "sha256").hexdigest()


def is_proof(proof: object, token: str, nonce: str, message: dict[str, Any]) -> bool:
    """Return whether a proof, of which a stranger may have chosen every character, is that of a
    message.
    """
    return hmac.compare_digest(
        str(proof).encode(errors="replace"), proof_of(token, nonce, message).encode()
    )


def receive_message(connection: socket.socket, deadline: float) -> dict[str, Any] | None:
    """One line of JSON; None if there was none, after which the caller connects again."""
    line = b""
    while not line.endswith(b"\n"):
        connection.settimeout(max(deadline - time.monotonic(), 0.01))
        # look first, to receive no more than the line: bytes of a transfer may follow it
        ready = connection.recv(MAX_LINE_BYTES, socket.MSG_PEEK)
        part = connection.recv(ready.find(b"\n") + 1 or len(ready))
        if not part or len(line) > MAX_LINE_BYTES:
            return None
        line += part
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


def send_message(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send one line of JSON; the peer may be gone."""
    connection.settimeout(5.0)
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(message).encode() + b"\n")
