"""The handshake, among threads that each believe to be a process."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from spmd.distributed import consistency, coordination
from spmd.errors import ClusterError, RendezvousTimeout


class Service:
    """JAX's service, and a clock: while all processes wait, time passes until the first of them has waited for long enough."""

    def __init__(self):
        self.now, self.running, self.kept = 0.0, 0, {}
        self.waiting, self.changed = {}, threading.Condition()  # each process that waits: for which path, and until when

    def monotonic(self):
        return self.now

    def put(self, path, text):
        with self.changed:
            self.kept[path] = text
            self.changed.notify_all()

    def get(self, path, timeout):
        with self.changed:
            own = self.now + timeout
            self.waiting[threading.get_ident()] = (path, own)
            self.changed.notify_all()
            try:
                assert self.changed.wait_for(lambda: path in self.kept or self.nobody_comes_before(own), 60)
                if path not in self.kept:
                    self.now = own
                    raise TimeoutError(path)
                return self.kept[path]
            finally:
                del self.waiting[threading.get_ident()]

    def nobody_comes_before(self, time):
        stuck = [until for path, until in self.waiting.values() if path not in self.kept]
        return len(stuck) == self.running and min(stuck) == time

    def end(self):
        with self.changed:
            self.running -= 1
            self.changed.notify_all()


@pytest.fixture
def together(monkeypatch):
    """Call a function of the rank in so many threads; what each returned or raised."""
    service, own = Service(), threading.local()

    def run(function, ranks, size):
        def one(rank):
            own.place = (rank, size, "")
            try:
                return function(rank)
            except ClusterError as error:
                return error
            finally:
                service.end()

        service.running = len(ranks)
        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(one, ranks))

    monkeypatch.setattr(consistency, "time", service)
    monkeypatch.setattr(coordination, "started", lambda: True)
    monkeypatch.setattr(coordination, "place", lambda: own.place)
    monkeypatch.setattr(coordination, "put", service.put)
    monkeypatch.setattr(coordination, "get", service.get)
    monkeypatch.setattr(consistency, "_numbers", itertools.repeat(7))
    return run


def test_the_same_facts(together):
    assert together(lambda rank: consistency.agree({"a": "1", "b": "2"}), range(3), 3) == [None] * 3


def test_all_hear_what_differs(together):
    found = together(lambda rank: consistency.agree({"a": "1", "b": str(rank), **({"c": "x\x1b"} if rank else {})}), range(3), 3)
    assert {type(error) for error in found} == {ClusterError} and len({str(error) for error in found}) == 1
    assert str(found[0]).splitlines()[1:-1] == [
        "    b is 0 in process 0, and 1 in process 1",
        r"    c is nothing in process 0, and x\x1b in process 1",
        "    1 more processes differ from process 0",
    ]


@pytest.mark.parametrize(("there", "missing"), [([0, 2], 1), ([1, 2], 0)])
def test_who_does_not_come_is_named(together, there, missing):
    found = together(lambda rank: consistency.agree({"a": "1"}, timeout=30.0), there, 3)
    assert {type(error) for error in found} == {RendezvousTimeout}
    assert all(f"process {missing} did not come in 30 s" in str(error) for error in found)


def test_the_first_text_of_all(together):
    assert together(lambda rank: consistency.first_of_all(["", "b", "c"][rank]), range(3), 3) == ["b"] * 3
    with pytest.raises(RendezvousTimeout, match=r"a process did not come in 30 s"):
        raise together(lambda rank: consistency.first_of_all("", timeout=30.0), [0], 4)[0]
