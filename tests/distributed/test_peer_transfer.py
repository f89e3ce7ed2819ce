"""Transfers between processes: bytes arrive as they were sent, and only between processes that know
the token.
"""

import contextlib
import errno
import socket
import threading

import pytest

from spmd.distributed import peer_transfer
from spmd.distributed.peer_transfer import Receiver, TransferError, local_address, send


@pytest.fixture
def received():
    return []


@pytest.fixture
def receiver(received):
    def receive(message, read):
        if message.get("refuse"):
            raise ValueError("not wanted\x1b[2J")
        buffer = bytearray(message["bytes"])
        read(memoryview(buffer))
        received.append((message["name"], bytes(buffer)))

    receiver = Receiver("127.0.0.1", "secret", receive)
    yield receiver
    receiver.close()


def test_bytes_arrive(receiver, received):
    assert send(receiver.address, "secret", {"name": "a", "bytes": 8}, [b"12345", b"678"]) == 8
    assert send(receiver.address, "secret", {"name": "b", "bytes": 0}, []) == 0
    assert received == [("a", b"12345678"), ("b", b"")]


def test_many_bytes_arrive(receiver, received):
    content = bytes(range(256)) * 20_000
    send(receiver.address, "secret", {"name": "a", "bytes": len(content)}, [content])
    assert received == [("a", content)]


def test_strangers_are_refused(receiver, received):
    with pytest.raises(
        TransferError, match=r"127\.0\.0\.1: it does not know this job's token, or is gone"
    ):
        send(receiver.address, "another", {"name": "a", "bytes": 2}, [b"12"])
    with socket.create_connection(
        ("127.0.0.1", int(receiver.address.rpartition(":")[2]))
    ) as stranger:
        assert stranger.recv(1000).startswith(b'{"nonce": ')
        stranger.sendall(b'{"name": "a", "bytes": 2, "proof": 5}\n')
        assert stranger.recv(1000) == b"", "no answer"
    assert not received


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("proof", [b'"\\ud800"', b"[" * 900 + b"]" * 900, b"1e999", b"null"])
def test_strange_proof_ends_no_thread_with_an_error(receiver, received, proof):
    with socket.create_connection(
        ("127.0.0.1", int(receiver.address.rpartition(":")[2]))
    ) as stranger:
        stranger.recv(1000)
        stranger.sendall(b'{"bytes": 2, "proof": ' + proof + b"}\n")
        assert stranger.recv(1000) == b"", "no answer"
    assert (
        send(receiver.address, "secret", {"name": "a", "bytes": 2}, [b"12"]) == 2
        and len(received) == 1
    )


def test_replayed_message_is_refused(receiver, received):
    """A proof is for the nonce of one connection."""
    host, _, port = receiver.address.rpartition(":")
    sent, connect = [], socket.create_connection
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            peer_transfer,
            "send_message",
            lambda connection, message: (sent.append(message), real(connection, message)),
        )
        real = peer_transfer.__dict__["receive_message"].__globals__["send_message"]
        send(receiver.address, "secret", {"name": "a", "bytes": 2}, [b"12"])
    line = next(message for message in sent if "name" in message)
    with connect((host, int(port))) as stranger:
        stranger.recv(1000)
        real(stranger, line)
        assert stranger.recv(1000) == b""
    assert len(received) == 1


def test_listener_that_does_not_know_the_token_gets_no_bytes():
    """It listens in place of the receiver, and answers without a proof."""
    got = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b'{"nonce": "1"}\n')
                connection.recv(65536)
                connection.sendall(b'{"answer": "send", "proof": "1"}\n')
                got.append(connection.recv(65536))

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(TransferError, match="does not know this job's token"):
            send(f"127.0.0.1:{listener.getsockname()[1]}", "secret", {"bytes": 2}, [b"12"])
        thread.join()
    assert got == [b""]


def test_refusal_says_why(receiver):
    with pytest.raises(TransferError, match=r"ValueError: not wanted\\x1b\[2J"):
        send(receiver.address, "secret", {"bytes": 0, "refuse": True}, [])


def test_sender_that_stops_in_the_middle_is_noticed(receiver, received):
    with pytest.raises(TransferError):
        send(receiver.address, "secret", {"name": "a", "bytes": 100}, iter_that_fails())
    assert not received


def iter_that_fails():
    yield b"12"
    raise OSError("gone")


def test_receiver_accepts_again_after_an_error(receiver, received, monkeypatch):
    accept, failed = socket.socket.accept, []

    def fail_once(listener):
        connection = accept(listener)
        if failed:
            return connection
        failed.append("accept")  # before the close, upon which the sender continues
        connection[0].close()
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket.socket, "accept", fail_once)
    for _ in range(2):  # the receiver is waiting in the original function when this begins
        with contextlib.suppress(TransferError):
            send(receiver.address, "secret", {"name": "a", "bytes": 2}, [b"12"])
    assert (
        failed
        and send(receiver.address, "secret", {"name": "b", "bytes": 2}, [b"12"]) == 2
        and received[-1][0] == "b"
    )


def test_closed_receiver_refuses(receiver):
    receiver.close()
    with pytest.raises(TransferError, match=receiver.address):
        send(receiver.address, "secret", {"bytes": 0}, [])


@pytest.mark.parametrize("size", [-1, "2", None, True])
def test_size_must_be_a_number(receiver, size, monkeypatch):
    monkeypatch.setattr(peer_transfer, "_seconds", lambda count: 5.0)
    with pytest.raises(TransferError):
        send(receiver.address, "secret", {"bytes": size}, [])


def test_connections_are_bounded(receiver):
    port = int(receiver.address.rpartition(":")[2])
    silent = [
        socket.create_connection(("127.0.0.1", port)) for _ in range(peer_transfer.MAX_CONNECTIONS)
    ]
    for connection in silent:
        assert connection.recv(1000)
    with socket.create_connection(("127.0.0.1", port)) as one_more:
        assert one_more.recv(1000) == b""
    for connection in silent:
        connection.close()


def test_local_address():
    assert local_address("127.0.0.1:80") == "127.0.0.1"
    assert local_address("[::1]:80") == "::1"
