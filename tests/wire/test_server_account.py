"""The account of the simulated clock. Times are multiples of 1/64 second, which floats add up exactly: sums are compared as they are."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmd
from spmd.errors import LayoutError, OptionError
from spmd.layout.server import ParameterServer
from spmd.wire.notes import server_bytes
from spmd.wire.param_server.events import Events
from spmd.wire.param_server.statistics import ServerStatistics

WORKERS, ROWS = 6, 240
TABLE = np.random.default_rng(0).integers(1, 128, (ROWS, WORKERS)) / 64
BYTES = (32.0, 16.0)
LINK = {"bandwidth": "512B/s", "latency": "125ms"}  # a push takes 1/16 s, a pull 1/32 s, the way 1/8 s

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


# time ----------------------------------------------------------------------------------------------------------------


@every_link
@every_mode
def test_nobody_does_two_things_at_once_and_every_gradient_takes_its_time(trace, words, network):
    events = events_of(trace, network=network, **words)
    told = ServerStatistics.of(events, 100)
    assert told.seconds == events.round(99).end
    for worker in range(WORKERS):
        mine = told.spans.worker == worker
        began, done, pushed, time = (getattr(told.spans, name)[mine] for name in ("began", "done", "queued", "time"))
        order = np.stack([began, done, pushed, time, [*began[1:], np.inf]], axis=1)
        assert (np.diff(order.ravel()) >= 0).all() and (began[0] == 0 or (worker > 0 and "warmup_steps" in words))
        if not words.get("spares"):
            assert (done - began).tolist() == TABLE[: len(began), worker].tolist()
        gaps = np.minimum([*began, np.inf], told.seconds) - np.minimum([0, *done], told.seconds)
        assert told.idle_seconds[worker] == gaps.sum() and told.compute_seconds[worker] == told.seconds - gaps.sum()
    assert (told.idle_seconds >= told.send_seconds).all() and (told.send_seconds >= 0).all()
    assert (told.send_seconds > 0).any() == bool(network)


@pytest.mark.parametrize("words", [MODES["async"], MODES["drop"], MODES["fetch"], MODES["softsync"]], ids=str)
@pytest.mark.parametrize("steps", [1, 2, 50, ROWS])
def test_who_waits_for_nobody_is_never_idle(trace, words, steps):
    """Those who are under way when the account ends have computed until then."""
    told = ServerStatistics.of(events_of(trace, **words), steps)
    assert (told.compute_seconds == told.seconds).all() and not told.idle_share.any()
    assert (~told.spans.arrived).sum() >= WORKERS - 1  # there are such


def test_a_slow_worker_is_under_way_all_the_time():
    told = ServerStatistics.of(events_of((0.5, 1e6), workers=2, mode="asynchronous"), 10)
    assert told.seconds == 5.0 and told.compute_seconds.tolist() == [5.0, 5.0] and told.arrived.tolist() == [10, 0]


@pytest.mark.parametrize("words", [MODES["async"], MODES["bounded"], {"mode": "softsync", "splits": 1}, {}], ids=str)
def test_equal_workers_are_never_idle(words):
    told = ServerStatistics.of(events_of("constant(0.25)", **words), 40)
    assert told.seconds == 10.0 and not told.idle_seconds.any() and told.arrived.tolist() == [40] * WORKERS


@pytest.mark.parametrize("spares", [0, 1, 3])
def test_a_synchronous_step_idles_for_the_last_that_it_waits_for(trace, spares):
    told, steps = ServerStatistics.of(events_of(trace, spares=spares), 150), np.sort(TABLE[:150], axis=1)[:, WORKERS - 1 - spares]
    assert told.seconds == steps.sum()
    computed = np.minimum(TABLE[:150], steps[:, None])  # a spare stops when the next step begins
    assert told.compute_seconds.tolist() == computed.sum(axis=0).tolist()
    assert told.idle_seconds.sum() == (steps[:, None] - computed).sum() > 0
    fast = np.argsort(np.argsort(TABLE[:150], axis=1, kind="stable"), axis=1) < WORKERS - spares
    assert told.dropped.tolist() == (~fast).sum(axis=0).tolist()
    assert told.wasted_seconds.tolist() == np.where(fast, 0, computed).sum(axis=0).tolist()


def test_a_synchronous_step_idles_for_the_network(trace):
    near, far = (ServerStatistics.of(events_of(trace, network=network), 64) for network in ({}, LINK))
    each = WORKERS * (1 / 16 + 1 / 32) + 2 / 8
    assert far.seconds - near.seconds == 64 * each and (far.compute_seconds == near.compute_seconds).all()
    assert not near.send_seconds.any() and (far.send_seconds == 64 * each).all()


@pytest.mark.parametrize("mode", ["local", "elastic"])
def test_who_trains_by_itself_idles_at_meetings(trace, mode):
    told, parts = ServerStatistics.of(events_of(trace, mode=mode, every=4), 80), TABLE[:80].reshape(20, 4, WORKERS).sum(axis=1)
    assert told.seconds == parts.max(axis=1).sum() and told.updates == 20 and told.gradients_per_update == 4 * WORKERS
    assert told.idle_seconds.tolist() == (parts.max(axis=1)[:, None] - parts).sum(axis=0).tolist()
    assert told.link_bytes == (20 * WORKERS * BYTES[0], 20 * WORKERS * BYTES[1])
    part = ServerStatistics.of(events_of(trace, mode=mode, every=4), 78)  # ends between two meetings, when the slowest is done
    own = TABLE[76:80].cumsum(axis=0)
    assert part.seconds == parts[:19].max(axis=1).sum() + own[1].max()
    assert part.compute_seconds.tolist() == (parts[:19].sum(axis=0) + np.minimum(own[1].max(), own[2])).tolist()


# what became of gradients --------------------------------------------------------------------------------------------


@every_link
@every_mode
def test_gradients_are_those_of_the_rounds(trace, words, network):
    events = events_of(trace, network=network, **words)
    told, found = ServerStatistics.of(events, 100), [events.round(step) for step in range(100)]
    applied, dropped, late = np.zeros(WORKERS, int), np.zeros(WORKERS, int), []
    for this in found:
        applied[this.worker[this.applied]] += 1
        dropped[this.worker[~this.applied & (this.staleness >= 0)]] += 1
        late += this.staleness[: this.takes.sum()].tolist()
    assert told.arrived.tolist() == sum(this.takes.astype(int) for this in found).tolist()
    assert told.applied.tolist() == applied.tolist() and told.dropped.tolist() == dropped.tolist()
    assert (applied + dropped == told.arrived).all() and dropped.any() == ("spares" in words or "max_staleness" in words)
    assert told.staleness.tolist() == np.bincount(late).tolist() and told.staleness.sum() == told.arrived.sum()
    if not events.declared.local:
        assert told.updates == sum(this.commit.sum() for this in found)


def test_staleness_of_equal_workers():
    told = ServerStatistics.of(events_of("constant", mode="asynchronous"), 20)
    assert told.staleness.tolist() == [1] * (WORKERS - 1) + [1 + 19 * WORKERS]


@pytest.mark.parametrize(
    "words, each", [({}, 6), ({"spares": 2}, 4), ({"mode": "softsync", "splits": 2}, 3), ({"mode": "asynchronous"}, 1)]
)
def test_the_effective_batch(trace, words, each):
    told = ServerStatistics.of(events_of(trace, **words), 101)
    assert told.gradients_per_update == each and told.updates == told.applied.sum() // each


def test_without_an_update_there_is_no_batch():
    """All of the first round is of the first version, and half an update of softsync."""
    told = ServerStatistics.of(events_of((1.0, 8.0), workers=2, mode="softsync", splits=1), 1)
    assert (told.updates, told.applied.tolist()) == (0, [1, 0]) and np.isnan(told.gradients_per_update) and "nan" not in str(told)


@pytest.mark.parametrize("times, bias", [((1.0, 2.0, 4.0), 3.0), ("constant", 3.0), ("turns", 1.0)])
def test_one_who_bears_all_drops_and_all_alike(times, bias, tmp_path):
    if times == "turns":
        times = str(tmp_path / "turns.npy")
        np.save(times, np.tile(1.0 + np.eye(3), (10, 1)))
    assert ServerStatistics.of(events_of(times, workers=3, spares=1), 30).drop_bias == bias
    assert ServerStatistics.of(events_of(times, workers=3), 30).drop_bias == 1.0


# links ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way, sent", [(0, (256.0, 0.0)), (1, (0.0, 256.0))], ids=["inwards", "outwards"])
def test_a_link_that_is_never_free_is_busy(way, sent):
    """Half a second for each of eight gradients of a second: from the first that is done on."""
    told = ServerStatistics.of(events_of("constant", workers=8, sent=sent, mode="asynchronous", network={"bandwidth": "512B/s"}), 32)
    assert told.link_busy[way] == (told.seconds - 1) / told.seconds and told.link_busy[1 - way] == 0
    assert told.link_bytes[way] == (told.seconds - 1) // 0.5 * 256 and told.link_bytes[1 - way] == 0
    assert told.idle_share.min() > 0.5
    assert bool(told.send_seconds.any()) == (way == 0)


def test_what_a_synchronous_link_carries(trace):
    told = ServerStatistics.of(events_of(trace, network=LINK, spares=2), 50)  # spares push too
    assert told.link_bytes == (50 * WORKERS * BYTES[0], 50 * WORKERS * BYTES[1])
    assert told.link_busy == (50 * WORKERS / 16 / told.seconds, 50 * WORKERS / 32 / told.seconds)


@pytest.mark.parametrize("each", [1, 3])
def test_who_fetches_seldom_gets_less(each):
    told = ServerStatistics.of(events_of("constant", mode="asynchronous", fetch_every=each), 30)
    assert told.link_bytes == (30 * WORKERS * BYTES[0], 30 // each * WORKERS * BYTES[1]) and told.link_busy == (0, 0)


def test_weights_that_have_left_a_link_are_on_their_way():
    """Those for the first worker leave from 1.25 s to 1.75 s and are there at 2 s; the second one's gradient ends the round at 1.875 s."""
    network = {"bandwidth": "512B/s", "latency": "250ms"}
    told = ServerStatistics.of(events_of((1.0, 1.625), workers=2, sent=(0.0, 256.0), mode="asynchronous", network=network), 1)
    assert told.seconds == 1.875 and told.link_bytes == (0.0, 256.0) and told.link_busy == (0.0, 0.5 / 1.875)
    assert told.compute_seconds.tolist() == [1.0, 1.625] and told.send_seconds.tolist() == [0.25, 0.25]


def test_fragments_travel_by_themselves(trace):
    whole, parts = (ServerStatistics.of(events_of(trace, mode="local", every=4, fragments=n), 80) for n in (1, 2))
    assert whole.link_bytes == parts.link_bytes and (whole.updates, parts.updates) == (20, 40)


# asking --------------------------------------------------------------------------------------------------------------


@every_mode
def test_asking_changes_nothing_for_a_run(trace, words):
    events = events_of(trace, network=LINK, **words)
    before = events.round(150)
    one, other = ServerStatistics.of(events, 100), ServerStatistics.of(events_of(trace, network=LINK, **words), 100)
    assert events.round(150) is before and one.seconds == other.seconds
    assert all(np.array_equal(getattr(one.spans, name), getattr(other.spans, name)) for name in vars(one.spans))


@pytest.mark.parametrize("steps", [0, -1, 2.0, True, None])
def test_steps_that_are_no_number_of_steps(steps):
    with pytest.raises(OptionError, match=r"steps=.*: a whole number from 1\."):
        ServerStatistics.of(events_of("constant"), steps)


@every_mode
def test_a_trace_that_ends_before(trace, words):
    assert ServerStatistics.of(events_of(trace, **words), ROWS).steps == ROWS  # the whole of it can be asked about
    with pytest.raises(OptionError, match=f"the trace has {ROWS} rows(.|\n)*fix: a longer trace, or fewer steps"):
        ServerStatistics.of(events_of(trace, **words), 20 * ROWS)


def test_no_time_at_all_is_shown():
    told = spmd.simulate(ParameterServer(compute_time="constant(0)"), workers=3, steps=2)
    assert told.seconds == 0 and not told.idle_share.any() and told.link_busy == (0, 0) and "nan" not in str(told)


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


def test_printed():
    told = spmd.simulate(ParameterServer(spares=1, compute_time=(1.0, 2.0, 4.0)), workers=3, steps=10, bytes=(16, 8))
    assert str(told) == PRINTED


def test_of_many_workers_those_who_compute_least_and_most_are_printed():
    seconds = tuple((np.random.default_rng(1).permutation(40) + 1.0).tolist())
    lines = str(spmd.simulate(ParameterServer(compute_time=seconds), workers=40, steps=3)).splitlines()[8:-1]
    order = np.argsort(seconds)
    assert [line.split()[0] for line in lines] == [str(n) for n in order[:5]] + ["..."] + [str(n) for n in order[-5:]]
    assert "30 workers" in lines[5]


# without a model, and with one ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, more, kind, wanted",
    [
        ({"spares": 4}, {}, LayoutError, r"4 workers(.|\n)*\[parameter_server\] spares\n *4, of 4 workers\.\n *fix: at most 3\."),
        ({"mode": "softsync", "splits": 5}, {}, LayoutError, r"splits\n *5, of 4 workers\."),
        ({"mode": "asynch"}, {}, LayoutError, r'no mode "asynch"\.\n *fix: did you mean "asynchronous"\?'),
        ({"mode": "bounded"}, {}, LayoutError, r'"bounded" needs bound'),
        ({"bound": 1}, {}, LayoutError, r'nothing reads it in mode "synchronous"'),
        ({"compute_time": (1.0, 2.0)}, {}, LayoutError, r"2 numbers for 4 workers"),
        ({"compute_time": "exponential(1,2)"}, {}, LayoutError, r"is not exponential\(mean seconds\)"),
        ({"workers": 3}, {}, OptionError, r"workers=4, and the server says 3"),
        ({}, {"workers": None}, OptionError, "the number of workers is missing"),
        ({}, {"workers": 0}, OptionError, r"workers=0: a whole number from 1"),
        ({}, {"steps": 0}, OptionError, r"steps=0: a whole number from 1"),
        ({}, {"bytes": 4e6}, OptionError, r"bytes=4000000.0 is not a pair"),
        ({}, {"bytes": (1.0, -1.0)}, OptionError, r"is not a pair of numbers from 0"),
    ],
    ids=str,
)
def test_what_cannot_be_simulated(words, more, kind, wanted):
    with pytest.raises(kind, match=wanted):
        spmd.simulate(ParameterServer(**words), **{"workers": 4, "steps": 3} | more)


def test_what_is_no_server():
    with pytest.raises(OptionError, match="is a str"):
        spmd.simulate("synchronous", workers=4, steps=3)


@every_mode
def test_simulate_asks_the_same_clock(words, trace):
    server = ParameterServer(compute_time=trace, network=LINK, workers=WORKERS, **words)
    assert spmd.simulate(server, steps=20, bytes=BYTES).seconds == Events(server, WORKERS, BYTES).round(19).end


def trainer_of(layout):
    model = spmd.FunctionalModel(lambda key: {"w": jnp.zeros((8, 3))}, lambda params, x: x @ params["w"])
    mesh = spmd.make_mesh("data=4", devices=jax.devices()[:4])
    return spmd.Trainer(model, loss=spmd.losses.mean_squared_error, optimizer=optax.sgd(0.1), mesh=mesh, layout=layout)


def test_a_trainer_tells_of_its_own_clock():
    server = ParameterServer(mode="asynchronous", workers=8, compute_time="exponential(1)", network=LINK)
    trainer = trainer_of(spmd.Layout(gradients=spmd.Gradients("parameter_server"), parameter_server=server))
    told, sent = trainer.simulate(25), server_bytes(trainer._placed.exchange)
    assert told.sent == sent and min(sent) > 0 and told.workers == 8
    assert told.seconds == spmd.simulate(server, steps=25, bytes=sent).seconds > spmd.simulate(server, steps=25).seconds


def test_a_trainer_without_a_server_has_no_clock():
    with pytest.raises(OptionError, match=r'has no parameter server(.|\n)*fix: \[gradients\] reduction = "parameter_server"'):
        trainer_of("data_parallel").simulate(3)
