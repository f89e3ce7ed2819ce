"""The consistency check, with a thread for each process."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from spmd.distributed import consistency, coordination
from spmd.errors import ClusterError, LayoutError, RendezvousTimeout, SpmdError


class Service:
    """JAX's service, and a clock: while all processes wait, time advances until the first of them
    times out.
    """

    def __init__(self):
        self.now, self.running, self.texts = 0.0, 0, {}
        # by thread: the path that it waits for, and its deadline
        self.waiting, self.changed = {}, threading.Condition()

    def monotonic(self):
        return self.now

    def put(self, path, text):
        with self.changed:
            self.texts[path] = text
            self.changed.notify_all()

    def get(self, path, timeout):
        with self.changed:
            deadline = self.now + timeout
            self.waiting[threading.get_ident()] = (path, deadline)
            self.changed.notify_all()
            try:
                assert self.changed.wait_for(
                    lambda: path in self.texts or self.is_next_to_time_out(deadline), 60
                )
                if path not in self.texts:
                    self.now = deadline
                    raise TimeoutError(path)
                return self.texts[path]
            finally:
                del self.waiting[threading.get_ident()]

    def read_dir(self, path):
        return {
            key.removeprefix(path): text for key, text in self.texts.items() if key.startswith(path)
        }

    def is_next_to_time_out(self, deadline):
        stuck = [other for path, other in self.waiting.values() if path not in self.texts]
        return len(stuck) == self.running and min(stuck) == deadline

    def end(self):
        with self.changed:
            self.running -= 1
            self.changed.notify_all()


@pytest.fixture
def run_ranks(monkeypatch):
    """Call a function of the rank in a thread for each rank; what each call returned or raised."""
    service, thread = Service(), threading.local()

    def run(function, ranks, size):
        def call(rank):
            thread.info = (rank, size, "")
            try:
                return function(rank)
            except SpmdError as error:
                return error
            finally:
                service.end()

        service.running = len(ranks)
        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(call, ranks))

    monkeypatch.setattr(consistency, "time", service)
    monkeypatch.setattr(coordination, "is_initialized", lambda: True)
    monkeypatch.setattr(coordination, "process_info", lambda: thread.info)
    monkeypatch.setattr(coordination, "put", service.put)
    monkeypatch.setattr(coordination, "get", service.get)
    monkeypatch.setattr(coordination, "read_dir", service.read_dir)
    monkeypatch.setattr(consistency, "_call_numbers", itertools.repeat(7))
    return run


def test_equal_facts_pass(run_ranks):
    assert (
        run_ranks(lambda rank: consistency.check_consistency({"a": "1", "b": "2"}), range(3), 3)
        == [None] * 3
    )


def test_all_processes_raise_the_same_differences(run_ranks):
    def facts(rank):
        return {"a": "1", "b": str(rank), **({"c": "x\x1b"} if rank else {})}

    results = run_ranks(lambda rank: consistency.check_consistency(facts(rank)), range(3), 3)
    assert {type(error) for error in results} == {ClusterError} and len(
        {str(error) for error in results}
    ) == 1
    assert str(results[0]).splitlines()[1:-1] == [
        "    b is 0 in process 0, and 1 in process 1",
        r"    c is nothing in process 0, and x\x1b in process 1",
        "    1 more processes differ from process 0",
    ]


@pytest.mark.parametrize(("present", "missing"), [([0, 2], 1), ([1, 2], 0)])
def test_missing_process_is_named(run_ranks, present, missing):
    results = run_ranks(
        lambda rank: consistency.check_consistency({"a": "1"}, timeout=30.0), present, 3
    )
    assert {type(error) for error in results} == {RendezvousTimeout}
    assert all(f"process {missing} did not arrive within 30 s" in str(error) for error in results)


def test_first_nonempty(run_ranks):
    assert (
        run_ranks(lambda rank: consistency.first_nonempty(["", "b", "c"][rank]), range(3), 3)
        == ["b"] * 3
    )
    with pytest.raises(RendezvousTimeout, match=r"a process did not arrive within 30 s"):
        raise run_ranks(lambda rank: consistency.first_nonempty("", timeout=30.0), [0], 4)[0]


def test_all_get_the_text_of_process_0(run_ranks, capfd):
    def ask(rank):
        return consistency.from_first_process(
            lambda advance: advance() or f"of {rank}", "it searches", 5.0
        )

    assert run_ranks(ask, range(3), 3) == ["of 0"] * 3
    assert sorted(capfd.readouterr().err.splitlines()) == [
        f"spmd {rank}: waits for process 0: it searches" for rank in (1, 2)
    ]


def test_all_raise_what_process_0_raises(run_ranks):
    def fail(advance):
        raise LayoutError("no layout fits", fix="another")

    results = run_ranks(
        lambda rank: consistency.from_first_process(fail, "it searches", 5.0), range(3), 3
    )
    assert [(type(error), str(error)) for error in results] == [
        (LayoutError, "no layout fits\n    fix: another")
    ] * 3


def test_processes_wait_while_process_0_advances(run_ranks):
    def slow(advance):
        for _ in range(4):
            with pytest.raises(TimeoutError):
                coordination.get("nothing", 4.0)  # 16 s in all, and never 5 without an advance
            advance()
        return "found"

    assert (
        run_ranks(
            lambda rank: consistency.from_first_process(slow, "it searches", 5.0), range(2), 2
        )
        == ["found"] * 2
    )


def test_processes_do_not_wait_forever_for_process_0(run_ranks):
    (error,) = run_ranks(
        lambda rank: consistency.from_first_process(lambda advance: "", "it searches", 5.0), [1], 2
    )
    assert isinstance(
        error, RendezvousTimeout
    ) and "it searches: process 0 has not advanced for 5 s." in str(error)
