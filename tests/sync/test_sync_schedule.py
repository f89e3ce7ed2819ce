"""The clock of local SGD workers: they wait for each other only where they synchronize."""

import itertools

import numpy as np
import pytest

from spmd.wire.server.declaration import ParameterServer
from spmd.wire.server.events import Events, rounds
from spmd.wire.server.timing import Network, Times

SENT = (1e6, 2e6)  # bytes; at 80Mb/s 0.1 and 0.2 seconds
LINK = {"bandwidth": "80Mb/s", "latency": "50ms"}


def simulate(number, workers=4, **words):
    server = ParameterServer(
        **{"mode": "local", "every": 4, "compute_time": "exponential(1)"} | words
    )
    times = Times(server.compute_time, workers, server.seed)
    return list(
        itertools.islice(
            rounds(server, workers, times, Network.parse(server.network), SENT), number
        )
    ), times


def seconds(times, number, workers=4):
    return np.array(
        [[times.of(worker, step) for worker in range(workers)] for step in range(number)]
    )


def by_worker(rounds, name):
    """[rounds, workers] of what a round says in order of arrival."""
    return np.array([getattr(this, name)[np.argsort(this.worker)] for this in rounds])


@pytest.mark.parametrize(
    "words", [{"mode": "local"}, {"mode": "elastic"}], ids=lambda words: words["mode"]
)
def test_local_workers_wait_for_slowest_and_network(words):
    rounds, times = simulate(8, network=LINK, **words)
    took, now = seconds(times, 8), 0.0
    for first in (0, 4):
        part = now + np.cumsum(took[first : first + 4], axis=0)
        assert np.array_equal(
            by_worker(rounds, "done")[first : first + 4],
            np.add.accumulate(np.vstack([np.full(4, now), took[first : first + 4]]))[1:],
        )
        # another order of additions
        assert np.allclose(part, by_worker(rounds, "done")[first : first + 4], rtol=1e-14)
        now = by_worker(rounds, "done")[first + 3].max() + 4 * (0.1 + 0.2) + 2 * 0.05
        assert rounds[first + 3].end == pytest.approx(now, rel=1e-14)
        now = rounds[first + 3].end
    assert (
        [this.sends.tolist() for this in rounds]
        == [this.receives.tolist() for this in rounds]
        == [[False]] * 3 + [[True]] + [[False]] * 3 + [[True]]
    )


def test_each_fragment_is_due_in_turn():
    rounds, _ = simulate(12, every=6, fragments=3, overlap=1)
    sends, receives = (
        np.array([getattr(this, name) for this in rounds]) for name in ("sends", "receives")
    )
    assert (
        np.flatnonzero(sends.any(1)).tolist() == [1, 3, 5, 7, 9, 11]
        and (sends.sum(0) == 2).all()
        and sends.sum(1).max() == 1
    )
    assert np.array_equal(receives[1:], sends[:-1]) and not receives[0].any(), "one step later"


def test_overlap_hides_network_time():
    """Equal workers, steps of a second, a network that takes 1.2: with an overlap of two steps no
    worker waits, with one for 0.2.
    """
    words = {"compute_time": "constant", "every": 4, "network": {"bandwidth": "80Mb/s"}}
    ends = [simulate(10, overlap=overlap, **words)[0][-1].end for overlap in (0, 1, 2)]
    assert ends == pytest.approx([10 + 2 * 1.2, 10 + 2 * 0.2, 10], rel=1e-14)


def test_step_inputs_of_local_sgd():
    events = Events(ParameterServer(mode="local", every=4, fragments=2), workers=3)
    assert (
        events.masked
        and not events.assigns_rows
        and events.metric_names == ("gradients_applied", "gradients_dropped", "updates")
    )
    inputs = [events.step_inputs(step, np.array([True, False, True])) for step in range(4)]
    assert [each["sends"].tolist() for each in inputs] == [
        [False, False],
        [True, False],
        [False, False],
        [False, True],
    ]
    assert all(each["present"].tolist() == [True, False, True] for each in inputs)
    assert [each["counted"].tolist() for each in inputs] == [
        [[2, 0, synced], [1, 1, 1]] for synced in (0, 1, 0, 1)
    ]
    assert (
        events.skipped_scopes(1) == ["send/1/", "receive/1/"] and len(events.skipped_scopes(0)) == 4
    )
