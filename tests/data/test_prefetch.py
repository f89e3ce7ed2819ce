"""Prefetching: bounded, always closed, and it raises the reader's errors."""

import queue
import sys
import threading
from types import SimpleNamespace

import pytest

from spmd.data.prefetch import prefetch

MODULE = sys.modules[prefetch.__module__]


def readers():
    return [thread for thread in threading.enumerate() if thread.name == "spmd-prefetch"]


@pytest.fixture
def blocked(monkeypatch):
    """The next entry that the reader cannot put because the queue is full: each entry once, as soon
    as the reader blocks.
    """
    entries = queue.SimpleQueue()

    class Queue(queue.Queue):
        newest = None

        def put(self, entry, timeout):
            if self.full() and entry is not self.newest:
                self.newest = entry
                entries.put(entry)
            super().put(entry, timeout=timeout)

    monkeypatch.setattr(MODULE, "queue", SimpleNamespace(Queue=Queue, Full=queue.Full))
    return lambda: entries.get(timeout=60)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_prefetch_reads_depth_and_one_ahead(depth, blocked):
    read = []

    def numbers():
        for number in range(20):
            read.append(number)
            yield number

    with prefetch(numbers(), lambda number: number * number, depth) as squares:
        assert blocked() == (depth**2, None) and len(read) == depth + 1
        for taken in range(1, 4):
            assert next(squares) == (taken - 1) ** 2
            assert blocked() == ((taken + depth) ** 2, None) and len(read) == taken + depth + 1
        assert list(squares) == [number * number for number in range(3, 20)]
    assert not readers()


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_results_come_in_order_whatever_the_depth(depth):
    with prefetch(iter(range(50)), str, depth) as items:
        assert list(items) == [str(number) for number in range(50)]
    assert not readers()


def endless(events):
    try:
        number = 0
        while True:
            yield number
            number += 1
    finally:
        events.append(threading.current_thread().name)


@pytest.mark.parametrize(
    "depth, closer", [(0, "MainThread"), (2, "spmd-prefetch")], ids=["no thread", "thread"]
)
def test_leaving_early_closes_the_reader_in_the_thread_that_ran_it(depth, closer):
    events = []
    items = endless(events)
    with prefetch(items, lambda number: number, depth) as numbers:
        assert [next(numbers), next(numbers)] == [0, 1]
        assert not events
    assert events == [closer]
    assert not readers()


@pytest.mark.parametrize("depth", [0, 2])
def test_an_error_in_the_block_closes_the_reader_too(depth):
    events = []
    with (
        pytest.raises(KeyError, match="mine"),
        prefetch(endless(events), lambda number: number, depth) as numbers,
    ):
        next(numbers)
        raise KeyError("mine")
    assert len(events) == 1
    assert not readers()


@pytest.mark.parametrize("depth", [0, 2])
def test_what_was_read_before_an_error_is_handed_over_and_the_error_keeps_its_lines(depth):
    def broken():
        yield 1
        yield 2
        raise ValueError("line 3 of the file")

    taken = []
    with (
        pytest.raises(ValueError, match="line 3 of the file") as raised,
        prefetch(broken(), lambda number: number, depth) as numbers,
    ):
        for number in numbers:
            taken.append(number)
    assert taken == [1, 2]
    assert "broken" in [entry.name for entry in raised.traceback]
    assert not readers()


def test_an_error_while_placing_keeps_its_lines():
    def place(number):
        return 1 // (number - 1)

    with pytest.raises(ZeroDivisionError) as raised, prefetch(iter(range(3)), place, 2) as results:
        list(results)
    assert "place" in [entry.name for entry in raised.traceback]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_system_exit_is_not_swallowed(kind):
    def leaving():
        yield 1
        raise kind("out")

    with pytest.raises(kind, match="out"), prefetch(leaving(), lambda number: number, 2) as numbers:
        list(numbers)
    assert not readers()


def test_error_while_closing_the_reader_is_raised():
    def stubborn():
        try:
            while True:
                yield 1
        finally:
            raise OSError("cannot close")

    with (
        pytest.raises(OSError, match="cannot close"),
        prefetch(stubborn(), lambda number: number, 1) as numbers,
    ):
        next(numbers)
    assert not readers()


def test_an_error_that_was_never_read_does_not_block_closing(blocked):
    error = ValueError("never read")

    def soon_broken():
        yield 1
        yield 2
        raise error

    with prefetch(soon_broken(), lambda number: number, 1) as numbers:
        assert blocked() == (2, None) and next(numbers) == 1
        assert blocked()[1] is error
    assert not readers()


def test_an_iterator_without_close_is_fine():
    with prefetch(iter([1, 2, 3]), lambda number: number, 2) as numbers:
        assert next(numbers) == 1
    assert not readers()
