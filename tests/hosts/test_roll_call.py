"""The roll call, each process a thread here: who is missing, who is there twice, who is another, and who is none of ours."""

import contextlib
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from spmd.errors import AbsentError, ClusterError
from spmd.hosts import roll_call
from spmd.hosts.roll_call import Card
from spmd.hosts.world import World, resolved

FACTS = {"jax": "0.10.2", "Python": "3.11"}


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def called(port, ranks, *, timeout=20.0, size=None, sizes=(), facts=(), token="secret", said=None):
    """What each of the ranks came to: an address, or the error."""
    size = size or len(ranks)

    def one(at):
        rank = ranks[at]
        own = dict(sizes).get(at, size)
        world = World(rank, max(own, rank + 1), f"127.0.0.1:{port}", "test", rank, own, token=token)
        card = Card(rank, own, f"host{at}", {**FACTS, **dict(facts).get(at, {})})
        try:
            return roll_call.call_roll(world, card, timeout=timeout, say=(said.append if said is not None else lambda text: None))
        except ClusterError as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, range(len(ranks))))


def test_a_name_may_get_its_address_late(port, monkeypatch):
    asked = []

    def late(world):
        asked.append(world)
        if len(asked) < 3:
            raise AbsentError("no address yet")
        return resolved(world)

    monkeypatch.setattr(roll_call, "resolved", late)
    found = called(port, [0, 1])
    assert len(asked) == 3 and len(set(found)) == 1 and found[0].startswith("127.0.0.1:")


def test_a_name_without_an_address_is_not_waited_for_for_ever():
    world = World(0, 2, "no.such.host.invalid:4000", "test", 0, 2)
    with pytest.raises(AbsentError, match="has no address"):
        roll_call.call_roll(world, Card(0, 2, "host", FACTS), timeout=0.6, say=lambda text: None)


def test_all_hear_of_the_same_fresh_port(port):
    found = called(port, [0, 1, 2, 3])
    assert len(set(found)) == 1 and found[0].startswith("127.0.0.1:") and int(found[0].split(":")[1]) != port
    with socket.socket() as again, contextlib.closing(again):
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", port))  # nobody listens there any more


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": [0, 1, 1], "size": 3}, "process 1 is there twice: on host"),
        ({"ranks": [0, 1], "sizes": {1: 3}}, "process 1 on host1 expects 3 processes, and process 0 on host0 2"),
        ({"ranks": [0, 1], "facts": {1: {"jax": "0.11.0"}}}, "jax is 0.10.2 in process 0 on host0, and 0.11.0 in process 1 on host1"),
        ({"ranks": [0, 1], "facts": {1: {"extra": "\x1b[31m"}}}, r"extra is none in process 0 on host0, and \x1b[31m in process 1"),
    ],
)
def test_what_is_wrong_is_told_to_all(port, options, message):
    started = time.monotonic()
    found = called(port, **options)
    assert all(isinstance(error, ClusterError) and message in str(error) and "\x1b" not in str(error) for error in found)
    assert time.monotonic() - started < 10


def test_the_missing_are_named(port, monkeypatch):
    monkeypatch.setattr(roll_call, "TOLD", 0.5)
    monkeypatch.setattr(roll_call, "LINGER", 0.5)
    said = []
    found = called(port, [0, 2], size=4, timeout=2.0, said=said)
    assert all("processes [1, 3] of 4 did not come in 2 s" in str(error) for error in found)
    assert any(line.startswith("waiting for processes [1, 3] (") and line.endswith("s of 2)") for line in said)


def test_nobody_calls(port, monkeypatch):
    monkeypatch.setattr(roll_call, "TOLD", 0.3)
    said = []
    (error,) = called(port, [1], size=2, timeout=1.0, said=said)
    assert f"no answer from process 0 at 127.0.0.1:{port} in 1 s" in str(error)
    assert said and said[0].startswith(f"waiting for process 0 at 127.0.0.1:{port} (")


def test_a_port_that_is_taken_is_named(port):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        started = time.monotonic()
        (error,) = called(port, [0], size=2)
    assert f"port {port} of 127.0.0.1 cannot be listened at: Address already in use" in str(error) and time.monotonic() - started < 2


def test_strangers_change_nothing(port):
    """Another token, no JSON, too much, numbers and depths that no reader likes, nothing at all: none is told anything, nor counts."""

    def stranger(line):
        for _ in range(100):
            try:
                connection = socket.create_connection(("127.0.0.1", port), timeout=20)
            except OSError:
                time.sleep(0.05)
                continue
            with connection:
                try:
                    connection.sendall(line)
                    return connection.recv(100)
                except ConnectionError:  # sent away before it had said all
                    return b""
        return b"it never got there"

    card = {"rank": 1, "size": 2, "name": "x", "facts": FACTS}
    lines = [json.dumps({"token": "guess", **card}).encode() + b"\n", b"GET / HTTP/1.1\n", b"[1]\n", b"x" * 100_000, b"[" * 50_000 + b"\n"]
    lines += [json.dumps({"token": "secret", **card, "rank": wrong}).encode() + b"\n" for wrong in (float("inf"), float("nan"), None, "x")]
    heard = {}
    late = threading.Timer(3.0, lambda: heard.update(last=called(port, [1], size=2)))
    with ThreadPoolExecutor(12) as pool:
        silent = pool.submit(stranger, b"")
        first = pool.submit(called, port, [0], size=2)
        answers = [pool.submit(stranger, line) for line in lines]
        late.start()
        assert all(answer.result(timeout=20) == b"" for answer in answers)
        (address,) = first.result(timeout=30)
        assert silent.result(timeout=30) == b""
    late.join()
    assert heard["last"] == [address] and isinstance(address, str)


def test_one_that_goes_and_comes_again_is_not_there_twice(port):
    """A process that was ended while it waited, and was started anew."""
    line = json.dumps({"token": "secret", "rank": 1, "size": 3, "name": "host1", "facts": FACTS}).encode() + b"\n"
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(called, port, [0], size=3)
        for _ in range(100):
            try:
                connection = socket.create_connection(("127.0.0.1", port), timeout=5)
                break
            except OSError:
                time.sleep(0.05)
        connection.sendall(line)
        time.sleep(0.5)
        connection.close()
        time.sleep(0.5)
        rest = pool.submit(called, port, [1, 2], size=3)
        assert isinstance(first.result(timeout=30)[0], str) and rest.result(timeout=30) == first.result() * 2


def test_very_many_that_say_nothing_keep_nobody_out(port):
    silent = []
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(called, port, [0], size=2)
        until = time.monotonic() + 20
        while len(silent) < 3 * roll_call.SILENT and time.monotonic() < until:
            try:
                silent.append(socket.create_connection(("127.0.0.1", port), timeout=5))
            except OSError:
                time.sleep(0.02)
        assert len(silent) == 3 * roll_call.SILENT
        time.sleep(0.5)
        closed = 0
        for connection in silent:
            connection.setblocking(False)
            try:
                closed += connection.recv(1) == b""
            except BlockingIOError:
                pass
        assert closed >= roll_call.SILENT, "the oldest were sent away"
        assert pool.submit(called, port, [1], size=2).result(timeout=30) == first.result(timeout=30)
    for connection in silent:
        connection.close()
