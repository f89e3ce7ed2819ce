"""Several processes agree on whether a checkpoint is written to memory, with a thread for each and
a dict as the service.
"""

import collections
import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from spmd.distributed import coordination
from spmd.run import memory_checkpoint
from spmd.run.memory_checkpoint import MemoryCheckpoints

SIZE = 3


@pytest.fixture
def texts(monkeypatch):
    """What the service has stored."""
    stored = {}

    def get(path, timeout):
        if path not in stored:
            time.sleep(0.001)
            raise TimeoutError
        return stored[path]

    def read_dir(path):
        return {
            name.removeprefix(path): text
            for name, text in list(stored.items())
            if name.startswith(path)
        }

    monkeypatch.setattr(coordination, "is_initialized", lambda: True)
    monkeypatch.setattr(coordination, "put", stored.__setitem__)
    monkeypatch.setattr(coordination, "get", get)
    monkeypatch.setattr(coordination, "read_dir", read_dir)
    monkeypatch.setattr(coordination, "delete", stored.pop)
    return stored


def process(rank, held=(20,), why=""):
    """What of a process's checkpoints in memory votes."""
    memory = object.__new__(MemoryCheckpoints)
    memory.job, memory.plan = (
        SimpleNamespace(rank=rank, start="start", names=["host"] * SIZE),
        SimpleNamespace(host_bytes=0),
    )
    memory.folder = SimpleNamespace(create=lambda: None, lacks_room=lambda size, keeping: why)
    memory.held, memory._logged, memory._published, memory._closed = (
        set(held),
        set(),
        collections.deque(),
        threading.Event(),
    )
    memory._publishing = threading.Lock()
    return memory


def agree(processes, step=28):
    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(lambda memory: memory._agree(step), processes))


@pytest.mark.parametrize(
    ("held", "kept"),
    [
        ([{20, 24}, {20, 24}, {20, 24}], {24}),
        ([{20, 24}, {20}, {20, 24}], {20}),
        ([{20}, {24}, {20, 24}], set()),
        ([set(), {24}, {24}], set()),
    ],
)
def test_newest_step_that_all_have_is_kept(texts, held, kept):
    assert agree([process(rank, steps) for rank, steps in enumerate(held)]) == [kept] * SIZE


@pytest.mark.parametrize("busy", range(SIZE))
def test_none_writes_a_step_for_which_one_is_busy(texts, busy):
    processes = [process(rank) for rank in range(SIZE)]
    processes[busy]._vote_busy(28)
    others = [memory for rank, memory in enumerate(processes) if rank != busy]
    assert agree(others) == [None] * (SIZE - 1)
    assert agree(processes, step=32) == [{20}] * SIZE, "the next one is written"


def test_none_writes_a_step_for_which_one_has_no_room(texts, caplog):
    processes = [process(rank, why="no room" * (rank == 1)) for rank in range(SIZE)]
    assert agree(processes) == agree(processes, step=32) == [None] * SIZE
    assert caplog.text.count("training continues without checkpoints in memory: no room") == 1


def test_none_writes_a_step_for_which_one_does_not_vote(texts, monkeypatch):
    monkeypatch.setattr(memory_checkpoint, "AGREE_SECONDS", 0.0)
    assert agree([process(rank) for rank in range(SIZE - 1)]) == [None] * (SIZE - 1)


@pytest.mark.parametrize("rank", [0, 1])
def test_closed_process_waits_for_nothing(texts, rank):
    memory = process(rank)
    memory._closed.set()
    assert memory._agree(28) is None


def test_vote_outlives_those_on_later_steps(texts):
    """A process that trains fast is busy with many steps before process 0 has looked at its
    vote.
    """
    first, *others = (process(rank) for rank in range(SIZE))
    with ThreadPoolExecutor(SIZE) as pool:
        voted = [pool.submit(memory._agree, 28) for memory in others]
        while len(texts) < len(others):
            time.sleep(0.001)
        for memory, step in itertools.product(others, range(29, 60)):
            memory._vote_busy(step)
        assert [first._agree(28), *(each.result() for each in voted)] == [{20}] * SIZE


def test_old_votes_are_removed(texts, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(memory_checkpoint, "time", SimpleNamespace(monotonic=lambda: now[0]))
    processes = [process(rank) for rank in range(SIZE)]
    for step in range(0, 100, 4):
        now[0] += memory_checkpoint.AGREE_SECONDS
        assert agree(processes, step) == [{20}] * SIZE
    assert len(texts) == 2 * (SIZE + 1), "of this step and the one before"
