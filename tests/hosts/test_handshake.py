"""The handshake, among threads that each believe to be a process."""

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from spmd.errors import AbsentError, ClusterError
from spmd.hosts import coordination, handshake


@pytest.fixture
def together(monkeypatch):
    """Call a function of the rank in so many threads; what each returned or raised."""
    kept, own = {}, threading.local()

    def get(path, timeout):
        until = time.monotonic() + timeout
        while path not in kept:
            if time.monotonic() > until:
                raise TimeoutError(path)
            time.sleep(0.01)
        return kept[path]

    def run(function, ranks, size):
        def one(rank):
            own.place = (rank, size, "")
            try:
                return function(rank)
            except ClusterError as error:
                return error

        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(one, ranks))

    monkeypatch.setattr(coordination, "started", lambda: True)
    monkeypatch.setattr(coordination, "place", lambda: own.place)
    monkeypatch.setattr(coordination, "put", kept.__setitem__)
    monkeypatch.setattr(coordination, "get", get)
    monkeypatch.setattr(handshake, "_numbers", itertools.repeat(7))
    return run


def test_the_same_facts(together):
    assert together(lambda rank: handshake.agree({"a": "1", "b": "2"}), range(3), 3) == [None] * 3


def test_all_hear_what_differs(together):
    found = together(lambda rank: handshake.agree({"a": "1", "b": str(rank), **({"c": "x\x1b"} if rank else {})}), range(3), 3)
    assert {type(error) for error in found} == {ClusterError} and len({str(error) for error in found}) == 1
    assert str(found[0]).splitlines()[1:-1] == [
        "    b is 0 in process 0, and 1 in process 1",
        r"    c is nothing in process 0, and x\x1b in process 1",
        "    1 more processes differ from process 0",
    ]


@pytest.mark.parametrize(("there", "missing"), [([0, 2], 1), ([1, 2], 0)])
def test_who_does_not_come_is_named(together, monkeypatch, there, missing):
    monkeypatch.setattr(handshake, "LATER", 0.5)
    found = together(lambda rank: handshake.agree({"a": "1"}, timeout=0.5), there, 3)
    assert {type(error) for error in found} == {AbsentError}
    assert all(f"process {missing} did not come in 0.5 s" in str(error) for error in found)


def test_the_first_text_of_all(together):
    assert together(lambda rank: handshake.first_of_all(["", "b", "c"][rank]), range(3), 3) == ["b"] * 3
    with pytest.raises(AbsentError, match=r"a process did not come in 0.2 s"):
        raise together(lambda rank: handshake.first_of_all("", timeout=0.2), [0], 4)[0]
