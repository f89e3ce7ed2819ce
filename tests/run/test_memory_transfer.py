"""A copy of a checkpoint in memory is stored as it was sent, or not at all."""

import contextlib
import hashlib
import socket
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from spmd.distributed.peer_transfer import Receiver, TransferError
from spmd.run import memory_checkpoint
from spmd.run.memory_checkpoint import MemoryCheckpoints
from spmd.run.piece_file import Piece, read_header, read_shards, write_piece

DESCRIBED = {"w": "float32[4, 16]"}
KEY = ("w", ((0, 4), (0, 16)))
META = {"step": 3, "arrays": DESCRIBED}
SENT, OTHER = np.ones((4, 16), np.float32), np.full((4, 16), 7, np.float32)


def process(folder, address=""):
    """What of a process's checkpoints in memory sends and receives."""
    folder.mkdir()
    memory = object.__new__(MemoryCheckpoints)
    memory.arrays, memory.described, memory.held, memory._closed = (
        {"w": SENT},
        DESCRIBED,
        set(),
        threading.Event(),
    )
    memory.folder = SimpleNamespace(
        lacks_room=lambda size, keeping: "",
        piece=lambda step, rank, sender=None: folder / f"{step}.{rank}",
    )
    memory.job = SimpleNamespace(addresses=[address])
    return memory


def relay(listener, receiver, replacement):
    """Pass the lines of a transfer on, and other bytes if there are any: of someone between the
    hosts who does not know the token.
    """
    connection, _ = listener.accept()
    with (
        connection,
        socket.create_connection(
            ("127.0.0.1", int(receiver.address.rpartition(":")[2]))
        ) as forward,
    ):
        sender, target = connection.makefile("rb"), forward.makefile("rb")
        connection.sendall(target.readline())
        forward.sendall(sender.readline())
        connection.sendall(target.readline())
        content = sender.read(len(replacement))
        forward.sendall(content if replacement == bytes(len(replacement)) else replacement)
        connection.sendall(target.readline())


@pytest.mark.parametrize("changed", [False, True])
def test_piece_that_was_changed_on_the_way_is_refused(tmp_path, monkeypatch, changed):
    """With checksums that fit what it holds then: they are in the header."""
    monkeypatch.setattr(memory_checkpoint, "job_token", lambda: "secret")
    target = process(tmp_path / "target")
    receiver, listener = (
        Receiver("127.0.0.1", "secret", target._receive),
        socket.create_server(("127.0.0.1", 0)),
    )
    source = process(tmp_path / "source", f"127.0.0.1:{listener.getsockname()[1]}")
    path = tmp_path / "source" / "3.0"
    piece = write_piece(path, Piece(3, "start", 0, META, {KEY: ""}), lambda key: SENT)
    other = (
        Piece(3, "start", 0, META, {KEY: hashlib.sha256(OTHER.tobytes()).hexdigest()}).header()
        + OTHER.tobytes()
    )
    thread = threading.Thread(
        target=relay,
        args=(listener, receiver, other if changed else bytes(len(other))),
        daemon=True,
    )
    thread.start()
    with (
        pytest.raises(TransferError, match="the header was changed on the way")
        if changed
        else contextlib.nullcontext()
    ):
        source.ship(0, piece, path, [KEY])
    thread.join(60)
    receiver.close()
    listener.close()
    stored = [
        array
        for file in (tmp_path / "target").iterdir()
        for _, array in read_shards(file, read_header(file), [KEY])
    ]
    assert [array.tobytes() for array in stored] == ([] if changed else [SENT.tobytes()])


def test_transfer_ends_when_the_run_does(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_checkpoint, "job_token", lambda: "secret")
    target = process(tmp_path / "target")
    receiver = Receiver("127.0.0.1", "secret", target._receive)
    source = process(tmp_path / "source", receiver.address)
    path = tmp_path / "source" / "3.0"
    piece = write_piece(path, Piece(3, "start", 0, META, {KEY: ""}), lambda key: SENT)
    source.stop()
    with pytest.raises(TransferError, match="the run has ended"):
        source.ship(0, piece, path, [KEY])
    receiver.close()
    assert not list((tmp_path / "target").glob("*.0"))
