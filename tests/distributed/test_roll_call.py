"""The roll call, each process a thread here: who is missing, who is there twice, who is another, and who is none of ours."""

import contextlib
import dataclasses
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from spmd.distributed import rendezvous
from spmd.distributed.detect_cluster import World, resolved
from spmd.distributed.rendezvous import Card
from spmd.errors import ClusterError, RendezvousTimeout

FACTS = {"jax": "0.10.2", "Python": "3.11"}


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Clock:
    """One that stands until it is moved, or somebody sleeps by it."""

    now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(rendezvous, "time", found)
    return found


def told(port, rank, size, at=None):
    """Where a process believes to be, and what it says of itself."""
    world = World(rank, max(size, rank + 1), f"127.0.0.1:{port}", "test", rank, size, token="secret")
    return world, Card(rank, size, f"host{rank if at is None else at}", FACTS)


def called(port, ranks, *, timeout=60.0, size=None, sizes=(), facts=()):
    """What each of the ranks came to: an address, or the error."""
    size = size or len(ranks)

    def one(at):
        world, card = told(port, ranks[at], dict(sizes).get(at, size), at)
        card = dataclasses.replace(card, facts={**FACTS, **dict(facts).get(at, {})})
        try:
            return rendezvous.call_roll(world, card, timeout=timeout, say=lambda text: None)
        except ClusterError as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, range(len(ranks))))


def connected(port):
    """A connection to process 0, as soon as it listens."""
    until = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=60)
        except OSError:
            assert time.monotonic() < until, "nobody listens"
            time.sleep(0.01)


def line(rank, size, token="secret"):
    """What a process says who comes, in bytes."""
    said = {"rank": rank, "size": size, "name": f"host{rank}", "facts": FACTS}
    return json.dumps({**said, "nonce": "n", "proof": rendezvous._proof(token, "n", said)}).encode() + b"\n"


def heard(connection):
    """The answer to it."""
    with connection, connection.makefile("rb") as answer:
        found = json.loads(answer.readline())
        proof = found.pop("proof")
    assert proof == rendezvous._proof("secret", "answer n", found)
    return found


def test_a_name_may_get_its_address_late(port, monkeypatch):
    asked = []

    def late(world):
        asked.append(world)
        if len(asked) < 3:
            raise RendezvousTimeout("no address yet")
        return resolved(world)

    monkeypatch.setattr(rendezvous, "resolved", late)
    monkeypatch.setattr(rendezvous, "time", SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: time.sleep(0.01)))
    found = called(port, [0, 1])
    assert len(asked) == 3 and len(set(found)) == 1 and found[0].startswith("127.0.0.1:")


def test_a_name_without_an_address_is_not_waited_for_for_ever(port, monkeypatch, clock):
    def never(world):
        raise RendezvousTimeout("it has no address")

    monkeypatch.setattr(rendezvous, "resolved", never)
    said = []
    with pytest.raises(RendezvousTimeout, match="has no address"):
        rendezvous.call_roll(*told(port, 0, 2), timeout=25.0, say=said.append)
    assert clock.now == 25.0 and said == [f"waiting for an address of 127.0.0.1 ({spent} s of 25)" for spent in (10, 20)]


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
def test_what_is_wrong_is_told_to_all(port, options, message, monkeypatch):
    monkeypatch.setattr(rendezvous, "LINGER", 0.0)  # all are there
    found = called(port, **options)
    assert all(isinstance(error, ClusterError) and message in str(error) and "\x1b" not in str(error) for error in found)


def test_the_missing_are_named_also_to_those_who_come_a_little_late(port, monkeypatch, clock):
    """Time stands until process 2 has been heard; then until process 1 has, which comes when the others were given up."""
    world, card = told(port, 0, 4)
    look, said, late = rendezvous._Desk._look, [], []

    def looked(desk, seconds):
        look(desk, seconds)
        if desk.problem and not late:
            late.append(connected(port))
            late[0].sendall(line(1, 4))
        clock.now += 10.0 * (2 in desk.cards and (1 in desk.cards or not late))

    monkeypatch.setattr(rendezvous._Desk, "_look", looked)
    monkeypatch.setattr(rendezvous, "LINGER", 30.0)
    with rendezvous._Desk(world, card, "127.0.0.1") as desk:
        there = connected(port)
        there.sendall(line(2, 4))
        with pytest.raises(RendezvousTimeout, match=r"processes \[1, 3\] of 4 did not come in 20 s"):
            desk.meet(20.0, said.append)
    assert said == ["waiting for processes [1, 3] (10 s of 20)"]
    assert heard(there) == heard(late[0]) == {"problem": "processes [1, 3] of 4 did not come in 20 s"}


def test_nobody_calls(port, clock):
    said = []
    with pytest.raises(RendezvousTimeout, match=rf"no answer from process 0 at 127\.0\.0\.1:{port} in 25 s"):
        rendezvous.call_roll(*told(port, 1, 2), timeout=25.0, say=said.append)
    assert said == [f"waiting for process 0 at 127.0.0.1:{port} ({spent} s of 25)" for spent in (10, 20)]


def test_a_port_that_is_taken_is_named_at_once(port, clock):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with pytest.raises(RendezvousTimeout, match=rf"port {port} of 127\.0\.0\.1 cannot be listened at: Address already in use"):
            rendezvous.call_roll(*told(port, 0, 2), timeout=60.0, say=lambda text: None)
    assert clock.now == 0.0, "nothing was waited for"


def test_strangers_change_nothing(port):
    """Another token, no JSON, too much, numbers and depths that no reader likes, nothing at all: none is told anything, nor counts."""

    def answered(said):
        with connected(port) as connection:
            try:
                connection.sendall(said)
                return connection.recv(100)
            except ConnectionError:  # sent away before it had said all
                return b""

    strange = [line(1, 2, token="guess"), b"GET / HTTP/1.1\n", b"[1]\n", b"x" * 100_000, b"[" * 50_000 + b"\n"]
    strange += [line(wrong, 2) for wrong in (float("inf"), float("nan"), None, "x")]
    with ThreadPoolExecutor(12) as pool:
        first = pool.submit(called, port, [0], size=2)
        with connected(port) as silent:
            assert list(pool.map(answered, strange)) == [b""] * len(strange)
            assert not first.done()
            last = called(port, [1], size=2)
            assert first.result(timeout=60) == last and isinstance(last[0], str)
            assert silent.recv(1) == b""


def test_process_0_that_does_not_know_the_token_is_not_believed(port, clock):
    """A stranger who has taken the port learns no token, and sends nobody to a service of its own."""
    heard = []

    def squat(door):
        while True:
            try:
                connection, _ = door.accept()
            except OSError:
                return
            with connection, connection.makefile("rb") as lines:
                heard.append(lines.readline())
                connection.sendall(json.dumps({"go": "127.0.0.1:1", "proof": json.loads(heard[-1])["proof"]}).encode() + b"\n")

    with socket.create_server(("127.0.0.1", port)) as door:
        squatter = threading.Thread(target=squat, args=(door,), daemon=True)
        squatter.start()
        with pytest.raises(RendezvousTimeout, match="do both know the same token"):
            rendezvous.call_roll(*told(port, 1, 2), timeout=1.0, say=lambda text: None)
        door.shutdown(socket.SHUT_RDWR)
        squatter.join(60)
    assert heard and not any(b"secret" in one for one in heard)


def test_one_that_goes_and_comes_again_is_not_there_twice(port, monkeypatch):
    """A process that was ended while it waited, and was started anew."""
    events = {name: threading.Event() for name in ("_hear", "_forget")}
    for name, event in events.items():
        real = getattr(rendezvous._Desk, name)
        monkeypatch.setattr(rendezvous._Desk, name, lambda desk, *given, real=real, event=event: (real(desk, *given), event.set()))
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(called, port, [0], size=3)
        with connected(port) as connection:
            connection.sendall(line(1, 3))
            assert events["_hear"].wait(60)
        assert events["_forget"].wait(60)
        rest = pool.submit(called, port, [1, 2], size=3)
        assert isinstance(first.result(timeout=60)[0], str) and rest.result(timeout=60) == first.result() * 2


def test_very_many_that_say_nothing_keep_nobody_out(port, monkeypatch):
    accept, accepted = rendezvous._Desk._open, threading.Semaphore(0)
    monkeypatch.setattr(rendezvous._Desk, "_open", lambda desk: (accept(desk), accepted.release()))
    with ThreadPoolExecutor(2) as pool, contextlib.ExitStack() as opened:
        first = pool.submit(called, port, [0], size=2)
        silent = []
        for _ in range(3 * rendezvous.SILENT):
            silent.append(opened.enter_context(connected(port)))
            assert accepted.acquire(timeout=60)
        assert [connection.recv(1) for connection in silent[: rendezvous.SILENT]] == [b""] * rendezvous.SILENT, "the oldest are sent away"
        assert pool.submit(called, port, [1], size=2).result(timeout=60) == first.result(timeout=60)
