"""Statistics of the simulated clock. Times are multiples of 1/64 second, which floats add exactly,
so sums are compared with ==.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmd
from spmd.errors import LayoutError, OptionError
from spmd.sync.notes import server_bytes
from spmd.wire.server.declaration import ParameterServer
from spmd.wire.server.events import Events
from spmd.wire.server.statistics import ServerStatistics

WORKERS, ROWS = 6, 240
TABLE = np.random.default_rng(0).integers(1, 128, (ROWS, WORKERS)) / 64
BYTES = (32.0, 16.0)
# sending takes 1/16 s, receiving 1/32 s, latency is 1/8 s
LINK = {"bandwidth": "512B/s", "latency": "125ms"}

MODES = {
    "synchronous": {},
    "spares": {"spares": 2},
    "warm": {"spares": 1, "warmup_steps": 7},
    "async": {"mode": "asynchronous"},
    "drop": {"mode": "asynchronous", "max_staleness": 4},
    "fetch": {"mode": "asynchronous", "fetch_every": 3},
    "async_warm": {"mode": "asynchronous", "warmup_steps": 20},
    "bounded": {"mode": "bounded", "bound": 1},
    "softsync": {"mode": "softsync", "splits": 2},
    "local": {"mode": "local", "every": 4},
    "fragments": {"mode": "local", "every": 4, "fragments": 2, "overlap": 1},
    "elastic": {"mode": "elastic", "every": 5},
}
every_mode = pytest.mark.parametrize("words", MODES.values(), ids=MODES.keys())
every_link = pytest.mark.parametrize("network", [{}, LINK], ids=["near", "far"])


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("times") / "times.npy"
    np.save(path, TABLE)
    return str(path)


def events_of(times, workers=WORKERS, sent=BYTES, **words):
    return Events(ParameterServer(compute_time=times, **words), workers, sent)


# time ---------------------------------------------------------------------------------------------


@pytest.mark.sampled(quick=5)
@every_link
@every_mode
def test_spans_of_a_worker_do_not_overlap(trace, words, network):
    events = events_of(trace, network=network, **words)
    stats = ServerStatistics.of(events, 100)
    assert stats.seconds == events.round(99).end
    for worker in range(WORKERS):
        mine = stats.spans.worker == worker
        began, done, queued, time = (
            getattr(stats.spans, name)[mine] for name in ("began", "done", "queued", "time")
        )
        order = np.stack([began, done, queued, time, [*began[1:], np.inf]], axis=1)
        assert (np.diff(order.ravel()) >= 0).all() and (
            began[0] == 0 or (worker > 0 and "warmup_steps" in words)
        )
        if not words.get("spares"):
            assert (done - began).tolist() == TABLE[: len(began), worker].tolist()
        gaps = np.minimum([*began, np.inf], stats.seconds) - np.minimum([0, *done], stats.seconds)
        assert (
            stats.idle_seconds[worker] == gaps.sum()
            and stats.compute_seconds[worker] == stats.seconds - gaps.sum()
        )
    assert (stats.idle_seconds >= stats.send_seconds).all() and (stats.send_seconds >= 0).all()
    assert (stats.send_seconds > 0).any() == bool(network)


@pytest.mark.parametrize(
    "words", [MODES["async"], MODES["drop"], MODES["fetch"], MODES["softsync"]], ids=str
)
@pytest.mark.parametrize("steps", [1, 2, 50, ROWS])
def test_asynchronous_workers_are_never_idle(trace, words, steps):
    """Workers in progress at the end have computed until then."""
    stats = ServerStatistics.of(events_of(trace, **words), steps)
    assert (stats.compute_seconds == stats.seconds).all() and not stats.idle_share.any()
    assert (~stats.spans.arrived).sum() >= WORKERS - 1  # there are such


def test_slow_worker_computes_all_the_time():
    stats = ServerStatistics.of(events_of((0.5, 1e6), workers=2, mode="asynchronous"), 10)
    assert (
        stats.seconds == 5.0
        and stats.compute_seconds.tolist() == [5.0, 5.0]
        and stats.arrived.tolist() == [10, 0]
    )


@pytest.mark.parametrize(
    "words", [MODES["async"], MODES["bounded"], {"mode": "softsync", "splits": 1}, {}], ids=str
)
def test_equal_workers_are_never_idle(words):
    stats = ServerStatistics.of(events_of("constant(0.25)", **words), 40)
    assert (
        stats.seconds == 10.0
        and not stats.idle_seconds.any()
        and stats.arrived.tolist() == [40] * WORKERS
    )


@pytest.mark.parametrize("spares", [0, 1, 3])
def test_synchronous_workers_wait_for_slowest_kept_worker(trace, spares):
    stats, steps = (
        ServerStatistics.of(events_of(trace, spares=spares), 150),
        np.sort(TABLE[:150], axis=1)[:, WORKERS - 1 - spares],
    )
    assert stats.seconds == steps.sum()
    computed = np.minimum(TABLE[:150], steps[:, None])  # a spare stops when the next step begins
    assert stats.compute_seconds.tolist() == computed.sum(axis=0).tolist()
    assert stats.idle_seconds.sum() == (steps[:, None] - computed).sum() > 0
    fast = np.argsort(np.argsort(TABLE[:150], axis=1, kind="stable"), axis=1) < WORKERS - spares
    assert stats.dropped.tolist() == (~fast).sum(axis=0).tolist()
    assert stats.wasted_seconds.tolist() == np.where(fast, 0, computed).sum(axis=0).tolist()


def test_synchronous_workers_wait_for_network(trace):
    near, far = (
        ServerStatistics.of(events_of(trace, network=network), 64) for network in ({}, LINK)
    )
    each = WORKERS * (1 / 16 + 1 / 32) + 2 / 8
    assert (
        far.seconds - near.seconds == 64 * each
        and (far.compute_seconds == near.compute_seconds).all()
    )
    assert not near.send_seconds.any() and (far.send_seconds == 64 * each).all()


@pytest.mark.parametrize("mode", ["local", "elastic"])
def test_local_sgd_workers_wait_at_synchronizations(trace, mode):
    stats, parts = (
        ServerStatistics.of(events_of(trace, mode=mode, every=4), 80),
        TABLE[:80].reshape(20, 4, WORKERS).sum(axis=1),
    )
    assert (
        stats.seconds == parts.max(axis=1).sum()
        and stats.updates == 20
        and stats.gradients_per_update == 4 * WORKERS
    )
    assert stats.idle_seconds.tolist() == (parts.max(axis=1)[:, None] - parts).sum(axis=0).tolist()
    assert stats.link_bytes == (20 * WORKERS * BYTES[0], 20 * WORKERS * BYTES[1])
    part = ServerStatistics.of(
        events_of(trace, mode=mode, every=4), 78
    )  # ends between two synchronizations, when the slowest worker is done
    ends = TABLE[76:80].cumsum(axis=0)
    assert part.seconds == parts[:19].max(axis=1).sum() + ends[1].max()
    assert (
        part.compute_seconds.tolist()
        == (parts[:19].sum(axis=0) + np.minimum(ends[1].max(), ends[2])).tolist()
    )


# what became of gradients -------------------------------------------------------------------------


@pytest.mark.sampled(quick=5)
@every_link
@every_mode
def test_statistics_count_gradients_of_rounds(trace, words, network):
    events = events_of(trace, network=network, **words)
    stats, rounds = ServerStatistics.of(events, 100), [events.round(step) for step in range(100)]
    applied, dropped, late = np.zeros(WORKERS, int), np.zeros(WORKERS, int), []
    for this in rounds:
        applied[this.worker[this.applied]] += 1
        dropped[this.worker[~this.applied & (this.staleness >= 0)]] += 1
        late += this.staleness[: this.takes.sum()].tolist()
    assert stats.arrived.tolist() == sum(this.takes.astype(int) for this in rounds).tolist()
    assert stats.applied.tolist() == applied.tolist() and stats.dropped.tolist() == dropped.tolist()
    assert (applied + dropped == stats.arrived).all() and dropped.any() == (
        "spares" in words or "max_staleness" in words
    )
    assert (
        stats.staleness.tolist() == np.bincount(late).tolist()
        and stats.staleness.sum() == stats.arrived.sum()
    )
    if not events.declared.local:
        assert stats.updates == sum(this.commit.sum() for this in rounds)


def test_staleness_of_equal_workers():
    stats = ServerStatistics.of(events_of("constant", mode="asynchronous"), 20)
    assert stats.staleness.tolist() == [1] * (WORKERS - 1) + [1 + 19 * WORKERS]


@pytest.mark.parametrize(
    "words, each",
    [
        ({}, 6),
        ({"spares": 2}, 4),
        ({"mode": "softsync", "splits": 2}, 3),
        ({"mode": "asynchronous"}, 1),
    ],
)
def test_gradients_per_update(trace, words, each):
    stats = ServerStatistics.of(events_of(trace, **words), 101)
    assert stats.gradients_per_update == each and stats.updates == stats.applied.sum() // each


def test_gradients_per_update_without_update_is_nan():
    """All of the first round is of the first version, and half an update of softsync."""
    stats = ServerStatistics.of(events_of((1.0, 8.0), workers=2, mode="softsync", splits=1), 1)
    assert (
        (stats.updates, stats.applied.tolist()) == (0, [1, 0])
        and np.isnan(stats.gradients_per_update)
        and "nan" not in str(stats)
    )


@pytest.mark.parametrize("times, bias", [((1.0, 2.0, 4.0), 3.0), ("constant", 3.0), ("turns", 1.0)])
def test_drop_bias_of_one_and_of_all_workers(times, bias, tmp_path):
    if times == "turns":
        times = str(tmp_path / "turns.npy")
        np.save(times, np.tile(1.0 + np.eye(3), (10, 1)))
    assert ServerStatistics.of(events_of(times, workers=3, spares=1), 30).drop_bias == bias
    assert ServerStatistics.of(events_of(times, workers=3), 30).drop_bias == 1.0


# links --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "way, sent", [(0, (256.0, 0.0)), (1, (0.0, 256.0))], ids=["inwards", "outwards"]
)
def test_saturated_link_is_fully_busy(way, sent):
    """Half a second for each of eight gradients of a second: from the first that is done on."""
    stats = ServerStatistics.of(
        events_of(
            "constant", workers=8, sent=sent, mode="asynchronous", network={"bandwidth": "512B/s"}
        ),
        32,
    )
    assert (
        stats.link_busy[way] == (stats.seconds - 1) / stats.seconds
        and stats.link_busy[1 - way] == 0
    )
    assert (
        stats.link_bytes[way] == (stats.seconds - 1) // 0.5 * 256 and stats.link_bytes[1 - way] == 0
    )
    assert stats.idle_share.min() > 0.5
    assert bool(stats.send_seconds.any()) == (way == 0)


def test_link_bytes_of_synchronous_server(trace):
    stats = ServerStatistics.of(events_of(trace, network=LINK, spares=2), 50)  # spares send too
    assert stats.link_bytes == (50 * WORKERS * BYTES[0], 50 * WORKERS * BYTES[1])
    assert stats.link_busy == (50 * WORKERS / 16 / stats.seconds, 50 * WORKERS / 32 / stats.seconds)


@pytest.mark.parametrize("each", [1, 3])
def test_fetch_every_reduces_received_bytes(each):
    stats = ServerStatistics.of(events_of("constant", mode="asynchronous", fetch_every=each), 30)
    assert stats.link_bytes == (
        30 * WORKERS * BYTES[0],
        30 // each * WORKERS * BYTES[1],
    ) and stats.link_busy == (0, 0)


def test_parameters_in_flight_at_the_end_count():
    """Those for the first worker leave from 1.25 s to 1.75 s and are there at 2 s; the second one's
    gradient ends the round at 1.875 s.
    """
    network = {"bandwidth": "512B/s", "latency": "250ms"}
    stats = ServerStatistics.of(
        events_of((1.0, 1.625), workers=2, sent=(0.0, 256.0), mode="asynchronous", network=network),
        1,
    )
    assert (
        stats.seconds == 1.875
        and stats.link_bytes == (0.0, 256.0)
        and stats.link_busy == (0.0, 0.5 / 1.875)
    )
    assert stats.compute_seconds.tolist() == [1.0, 1.625] and stats.send_seconds.tolist() == [
        0.25,
        0.25,
    ]


def test_fragments_are_sent_separately(trace):
    unsplit, parts = (
        ServerStatistics.of(events_of(trace, mode="local", every=4, fragments=n), 80)
        for n in (1, 2)
    )
    assert unsplit.link_bytes == parts.link_bytes and (unsplit.updates, parts.updates) == (20, 40)


# asking -------------------------------------------------------------------------------------------


@pytest.mark.sampled(quick=5)
@every_mode
def test_statistics_do_not_change_events(trace, words):
    events = events_of(trace, network=LINK, **words)
    before = events.round(150)
    stats, again = (
        ServerStatistics.of(events, 100),
        ServerStatistics.of(events_of(trace, network=LINK, **words), 100),
    )
    assert events.round(150) is before and stats.seconds == again.seconds
    assert all(
        np.array_equal(getattr(stats.spans, name), getattr(again.spans, name))
        for name in vars(stats.spans)
    )


@pytest.mark.parametrize("steps", [0, -1, 2.0, True, None])
def test_invalid_steps(steps):
    with pytest.raises(OptionError, match=r"steps=.*.\n    fix: a whole number from 1\."):
        ServerStatistics.of(events_of("constant"), steps)


@pytest.mark.sampled(quick=5)
@every_mode
def test_statistics_past_end_of_trace(trace, words):
    # all of it can be simulated
    assert ServerStatistics.of(events_of(trace, **words), ROWS).steps == ROWS
    with pytest.raises(
        OptionError, match=f"the trace has {ROWS} rows(.|\n)*fix: a longer trace, or fewer steps"
    ):
        ServerStatistics.of(events_of(trace, **words), 20 * ROWS)


def test_statistics_without_time_print():
    stats = spmd.simulate(ParameterServer(compute_time="constant(0)"), workers=3, steps=2)
    assert (
        stats.seconds == 0
        and not stats.idle_share.any()
        and stats.link_busy == (0, 0)
        and "nan" not in str(stats)
    )


PRINTED = """\
synchronous, 3 workers, 10 steps
time       20 s, 2 s a step; 1 gradients applied per second
gradients  30 arrived, 20 applied, 10 dropped (33.3%; bias 3.00)
updates    10, of 2 gradients each
staleness  mean 0.00, largest 0
each link  480 B inwards, busy 0.0%; 240 B outwards, busy 0.0%

worker  computing     wasted    sending    waiting    arrived    dropped
     0      50.0%       0.0%       0.0%      50.0%         10          0
     1     100.0%       0.0%       0.0%       0.0%         10          0
     2     100.0%     100.0%       0.0%       0.0%         10         10
  mean      83.3%      33.3%       0.0%      16.7%       10.0        3.3"""


def test_statistics_print_table():
    stats = spmd.simulate(
        ParameterServer(spares=1, compute_time=(1.0, 2.0, 4.0)), workers=3, steps=10, bytes=(16, 8)
    )
    assert str(stats) == PRINTED


def test_statistics_print_extreme_workers_of_many():
    seconds = tuple((np.random.default_rng(1).permutation(40) + 1.0).tolist())
    lines = str(
        spmd.simulate(ParameterServer(compute_time=seconds), workers=40, steps=3)
    ).splitlines()[8:-1]
    order = np.argsort(seconds)
    assert [line.split()[0] for line in lines] == [str(n) for n in order[:5]] + ["..."] + [
        str(n) for n in order[-5:]
    ]
    assert "30 workers" in lines[5]


# without a model, and with one --------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, more, kind, wanted",
    [
        (
            {"spares": 4},
            {},
            LayoutError,
            r"4 workers(.|\n)*\[parameter_server\] spares\n *4, of 4 workers\.\n *fix: at most 3\.",
        ),
        ({"mode": "softsync", "splits": 5}, {}, LayoutError, r"splits\n *5, of 4 workers\."),
        (
            {"mode": "asynch"},
            {},
            LayoutError,
            r'no mode "asynch"\.\n *fix: did you mean "asynchronous"\?',
        ),
        ({"mode": "bounded"}, {}, LayoutError, r'"bounded" needs bound'),
        ({"bound": 1}, {}, LayoutError, r'nothing reads it in mode "synchronous"'),
        ({"compute_time": (1.0, 2.0)}, {}, LayoutError, r"2 numbers for 4 workers"),
        (
            {"compute_time": "exponential(1,2)"},
            {},
            LayoutError,
            r"is not exponential\(mean seconds\)",
        ),
        ({"workers": 3}, {}, OptionError, r"workers=4, and the server says 3"),
        ({}, {"workers": None}, OptionError, "the number of workers is missing"),
        ({}, {"workers": 0}, OptionError, r"workers=0.\n    fix: a whole number from 1"),
        ({}, {"steps": 0}, OptionError, r"steps=0.\n    fix: a whole number from 1"),
        ({}, {"bytes": 4e6}, OptionError, r"bytes=4000000.0 is not a pair"),
        ({}, {"bytes": (1.0, -1.0)}, OptionError, r"is not a pair of numbers from 0"),
    ],
    ids=str,
)
def test_simulate_rejects_invalid_arguments(words, more, kind, wanted):
    with pytest.raises(kind, match=wanted):
        spmd.simulate(ParameterServer(**words), **{"workers": 4, "steps": 3} | more)


def test_simulate_rejects_non_server():
    with pytest.raises(OptionError, match="is a str"):
        spmd.simulate("synchronous", workers=4, steps=3)


@every_mode
def test_simulate_equals_statistics_of_events(words, trace):
    server = ParameterServer(compute_time=trace, network=LINK, workers=WORKERS, **words)
    assert (
        spmd.simulate(server, steps=20, bytes=BYTES).seconds
        == Events(server, WORKERS, BYTES).round(19).end
    )


def trainer_of(layout):
    model = spmd.FunctionalModel(
        lambda key: {"w": jnp.zeros((8, 3))}, lambda params, x: x @ params["w"]
    )
    mesh = spmd.make_mesh("data=4", devices=jax.devices()[:4])
    return spmd.Trainer(
        model,
        loss=spmd.losses.mean_squared_error,
        optimizer=optax.sgd(0.1),
        mesh=mesh,
        layout=layout,
    )


def test_trainer_simulate_uses_its_clock():
    server = ParameterServer(
        mode="asynchronous", workers=8, compute_time="exponential(1)", network=LINK
    )
    trainer = trainer_of(
        spmd.Layout(gradients=spmd.Gradients("parameter_server"), parameter_server=server)
    )
    stats, sent = trainer.simulate(25), server_bytes(trainer._placed.exchange)
    assert stats.sent == sent and min(sent) > 0 and stats.workers == 8
    assert (
        stats.seconds
        == spmd.simulate(server, steps=25, bytes=sent).seconds
        > spmd.simulate(server, steps=25).seconds
    )


def test_trainer_simulate_without_server():
    with pytest.raises(
        OptionError,
        match=r'has no parameter server(.|\n)*fix: \[gradients\] reduction = "parameter_server"',
    ):
        trainer_of("data_parallel").simulate(3)
