"""The rendezvous, with a thread for each process: missing processes, duplicate ranks, mismatches,
and connections of strangers.
"""

import contextlib
import dataclasses
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from spmd.distributed import messages, rendezvous
from spmd.distributed.rendezvous import ProcessInfo
from spmd.distributed.world import World, resolve_address
from spmd.errors import ClusterError, RendezvousTimeout

FACTS = {"jax": "0.10.2", "Python": "3.11"}


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Clock:
    """A fake clock; only `sleep` and the tests move it."""

    now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    fake = Clock()
    monkeypatch.setattr(rendezvous, "time", fake)
    return fake


def process(port, rank, size, host=None):
    """A process's place, and what it sends about itself."""
    world = World(
        rank, max(size, rank + 1), f"127.0.0.1:{port}", "test", rank, size, token="secret"
    )
    return world, ProcessInfo(rank, size, f"host{rank if host is None else host}", FACTS)


def rendezvous_of(port, ranks, *, timeout=60.0, size=None, sizes=(), facts=()):
    """The result of each rank: an address, or the error."""
    size = size or len(ranks)

    def join(index):
        world, info = process(port, ranks[index], dict(sizes).get(index, size), index)
        info = dataclasses.replace(info, facts={**FACTS, **dict(facts).get(index, {})})
        try:
            address, links = rendezvous.wait_for_all(
                world, info, timeout=timeout, log=lambda text: None
            )
        except ClusterError as error:
            return error
        for _, connection in links.values():
            connection.close()
        return address

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(join, range(len(ranks))))


def connect(port):
    """A connection to process 0, as soon as it listens."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=60)
        except OSError:
            assert time.monotonic() < deadline, "no process listens"
            time.sleep(0.01)


def line(rank, size, token="secret"):
    """The message of a process, in bytes."""
    message = {"rank": rank, "size": size, "name": f"host{rank}", "facts": FACTS}
    return (
        json.dumps(
            {**message, "nonce": "n", "proof": messages.proof_of(token, "n", message)}
        ).encode()
        + b"\n"
    )


def answer_of(connection):
    """The answer to it."""
    with connection, connection.makefile("rb") as lines:
        answer = json.loads(lines.readline())
        proof = answer.pop("proof")
    assert proof == messages.proof_of("secret", "answer n", answer)
    return answer


def test_name_may_resolve_late(port, monkeypatch):
    calls = []

    def late(world):
        calls.append(world)
        if len(calls) < 3:
            raise RendezvousTimeout("does not resolve yet")
        return resolve_address(world)

    monkeypatch.setattr(rendezvous, "resolve_address", late)
    monkeypatch.setattr(
        rendezvous,
        "time",
        SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: time.sleep(0.01)),
    )
    results = rendezvous_of(port, [0, 1])
    assert len(calls) == 3 and len(set(results)) == 1 and results[0].startswith("127.0.0.1:")


def test_name_that_never_resolves_times_out(port, monkeypatch, clock):
    def never(world):
        raise RendezvousTimeout("it does not resolve")

    monkeypatch.setattr(rendezvous, "resolve_address", never)
    logged = []
    with pytest.raises(RendezvousTimeout, match="does not resolve"):
        rendezvous.wait_for_all(*process(port, 0, 2), timeout=25.0, log=logged.append)
    assert clock.now == 25.0 and logged == [
        f"waiting for an address of 127.0.0.1 ({spent} s of 25)" for spent in (10, 20)
    ]


def test_all_get_the_same_fresh_port(port):
    results = rendezvous_of(port, [0, 1, 2, 3])
    assert (
        len(set(results)) == 1
        and results[0].startswith("127.0.0.1:")
        and int(results[0].split(":")[1]) != port
    )
    with socket.socket() as again, contextlib.closing(again):
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", port))  # the listener is closed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": [0, 1, 1], "size": 3}, "process 1 exists twice: on host"),
        (
            {"ranks": [0, 1], "sizes": {1: 3}},
            "process 1 on host1 expects 3 processes, and process 0 on host0 2",
        ),
        (
            {"ranks": [0, 1], "facts": {1: {"jax": "0.11.0"}}},
            "jax is 0.10.2 in process 0 on host0, and 0.11.0 in process 1 on host1",
        ),
        (
            {"ranks": [0, 1], "facts": {1: {"extra": "\x1b[31m"}}},
            r"extra is none in process 0 on host0, and \x1b[31m in process 1",
        ),
    ],
)
def test_mismatch_is_raised_in_all_processes(port, options, message, monkeypatch):
    monkeypatch.setattr(rendezvous, "LINGER", 0.0)  # all have arrived
    results = rendezvous_of(port, **options)
    assert all(
        isinstance(error, ClusterError) and message in str(error) and "\x1b" not in str(error)
        for error in results
    )


def test_missing_processes_are_named_to_late_ones_too(port, monkeypatch, clock):
    """The clock stands until process 2 has arrived; then until process 1 has, which connects after
    the timeout.
    """
    world, info = process(port, 0, 4)
    poll, logged, late = rendezvous._Server._poll, [], []

    def polled(server, seconds):
        poll(server, seconds)
        if server.problem and not late:
            late.append(connect(port))
            late[0].sendall(line(1, 4))
        clock.now += 10.0 * (2 in server.infos and (1 in server.infos or not late))

    monkeypatch.setattr(rendezvous._Server, "_poll", polled)
    monkeypatch.setattr(rendezvous, "LINGER", 30.0)
    with rendezvous._Server(world, info, "127.0.0.1") as server:
        waiting = connect(port)
        waiting.sendall(line(2, 4))
        with pytest.raises(
            RendezvousTimeout, match=r"processes \[1, 3\] of 4 did not arrive within 20 s"
        ):
            server.serve(20.0, logged.append)
    assert logged == ["waiting for processes [1, 3] (10 s of 20)"]
    assert (
        answer_of(waiting)
        == answer_of(late[0])
        == {"problem": "processes [1, 3] of 4 did not arrive within 20 s"}
    )


def test_process_0_that_never_listens_times_out(port, clock):
    logged = []
    with pytest.raises(
        RendezvousTimeout, match=rf"no answer from process 0 at 127\.0\.0\.1:{port} in 25 s"
    ):
        rendezvous.wait_for_all(*process(port, 1, 2), timeout=25.0, log=logged.append)
    assert logged == [
        f"waiting for process 0 at 127.0.0.1:{port} ({spent} s of 25)" for spent in (10, 20)
    ]


def test_a_program_that_never_answers_is_named_while_it_is_waited_for(port, monkeypatch, clock):
    """Such as the store of torchrun's agent, if it listens where process 0 should."""
    monkeypatch.setattr(rendezvous, "LOG_SECONDS", 0.01)
    world, info = process(port, 1, 2)
    lines = []

    def log(line):
        lines.append(line)
        clock.sleep(10)  # of the fake clock, which takes no time

    with socket.create_server(("127.0.0.1", port)), pytest.raises(RendezvousTimeout):
        rendezvous.wait_for_all(world, info, timeout=30.0, log=log)
    assert lines[:3] == [
        f"waiting for the answer of process 0 at 127.0.0.1:{port} ({seconds} s of 30)"
        for seconds in (0, 10, 20)
    ]


def test_port_in_use_is_reported_immediately(port, clock):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with pytest.raises(
            RendezvousTimeout,
            match=rf"cannot listen on port {port} of 127\.0\.0\.1: Address already in use",
        ):
            rendezvous.wait_for_all(*process(port, 0, 2), timeout=60.0, log=lambda text: None)
    assert clock.now == 0.0, "it did not wait"


def test_strangers_get_no_answer(port):
    """Another token, invalid JSON, long lines, invalid numbers, deep nesting, silence: none gets an
    answer or changes anything.
    """

    def response(message):
        with connect(port) as connection:
            try:
                connection.sendall(message)
                return connection.recv(100)
            except ConnectionError:  # dropped before it had sent everything
                return b""

    strange = [
        line(1, 2, token="guess"),
        b"GET / HTTP/1.1\n",
        b"[1]\n",
        b"x" * 100_000,
        b"[" * 50_000 + b"\n",
    ]
    strange += [line(wrong, 2) for wrong in (float("inf"), float("nan"), None, "x")]
    with ThreadPoolExecutor(12) as pool:
        first = pool.submit(rendezvous_of, port, [0], size=2)
        with connect(port) as silent:
            assert list(pool.map(response, strange)) == [b""] * len(strange)
            assert not first.done()
            last = rendezvous_of(port, [1], size=2)
            assert first.result(timeout=60) == last and isinstance(last[0], str)
            assert silent.recv(1) == b""


@pytest.mark.parametrize("proof", [None, "\ud800"])
def test_answer_without_the_token_is_ignored(port, clock, proof):
    """A stranger that has taken the port cannot learn the token, nor redirect a process to its own
    service, nor end it.
    """
    received = []

    def squat(listener):
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, connection.makefile("rb") as lines:
                received.append(lines.readline())
                answer = {"go": "127.0.0.1:1", "proof": proof or json.loads(received[-1])["proof"]}
                connection.sendall(json.dumps(answer).encode() + b"\n")

    with socket.create_server(("127.0.0.1", port)) as listener:
        squatter = threading.Thread(target=squat, args=(listener,), daemon=True)
        squatter.start()
        with pytest.raises(RendezvousTimeout, match="do both know the same token"):
            rendezvous.wait_for_all(*process(port, 1, 2), timeout=1.0, log=lambda text: None)
        listener.shutdown(socket.SHUT_RDWR)
        squatter.join(60)
    assert received and not any(b"secret" in line for line in received)


def test_reconnected_process_is_no_duplicate(port, monkeypatch):
    """A process that was ended while it waited, and was started again."""
    events = {name: threading.Event() for name in ("_register", "_drop")}
    for name, event in events.items():
        real = getattr(rendezvous._Server, name)
        monkeypatch.setattr(
            rendezvous._Server,
            name,
            lambda server, *args, real=real, event=event: (real(server, *args), event.set()),
        )
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(rendezvous_of, port, [0], size=3)
        with connect(port) as connection:
            connection.sendall(line(1, 3))
            assert events["_register"].wait(60)
        assert events["_drop"].wait(60)
        rest = pool.submit(rendezvous_of, port, [1, 2], size=3)
        assert (
            isinstance(first.result(timeout=60)[0], str)
            and rest.result(timeout=60) == first.result() * 2
        )


def test_silent_connections_do_not_block_processes(port, monkeypatch):
    accept, accepted = rendezvous._Server._accept, threading.Semaphore(0)
    monkeypatch.setattr(
        rendezvous._Server, "_accept", lambda server: (accept(server), accepted.release())
    )
    with ThreadPoolExecutor(2) as pool, contextlib.ExitStack() as opened:
        first = pool.submit(rendezvous_of, port, [0], size=2)
        silent = []
        for _ in range(3 * rendezvous.MAX_SILENT):
            silent.append(opened.enter_context(connect(port)))
            assert accepted.acquire(timeout=60)
        assert [connection.recv(1) for connection in silent[: rendezvous.MAX_SILENT]] == [
            b""
        ] * rendezvous.MAX_SILENT, "the oldest are dropped"
        assert pool.submit(rendezvous_of, port, [1], size=2).result(timeout=60) == first.result(
            timeout=60
        )
