"""The simulated clock: what is known in closed form, and every round replayed by what the words of
a round mean.
"""

import itertools
import math
import types

import numpy as np
import pytest

from spmd.errors import OptionError
from spmd.wire.server.declaration import MODES, ParameterServer
from spmd.wire.server.events import MAX_KEPT_ROUNDS, Events, rounds
from spmd.wire.server.timing import Network, Times, parse_staleness_scale
from tests.compare import assert_close

TIMES = ("constant", "exponential(1)", "lognormal(1.0, 0.3)")
SENT = (1e6, 1e6)  # bytes; at 80Mb/s 0.1 seconds each way

LATE = {
    "async": {"mode": "asynchronous"},
    "async_equal": {"mode": "asynchronous", "compute_time": "constant"},
    "async_unequal": {"mode": "asynchronous", "compute_time": (1.0, 1.5, 0.3, 7.0, 2.0, 1.0)},
    "async_no_time": {"mode": "asynchronous", "compute_time": "constant(0)"},
    "drop": {"mode": "asynchronous", "max_staleness": 3},
    "drop_equal": {"mode": "asynchronous", "max_staleness": 3, "compute_time": "constant"},
    "inverse": {"mode": "asynchronous", "staleness_scale": "inverse"},
    "fetch_every": {"mode": "asynchronous", "fetch_every": 3},
    "warm": {"mode": "asynchronous", "warmup_steps": 7},
    "bounded_0": {"mode": "bounded", "bound": 0},
    "bounded_2": {"mode": "bounded", "bound": 2, "staleness_scale": "power(0.5)"},
    "bounded_equal": {"mode": "bounded", "bound": 1, "compute_time": "constant"},
    "softsync_1": {"mode": "softsync", "splits": 1},
    "softsync_3": {"mode": "softsync", "splits": 3, "staleness_scale": "inverse"},
    # 6 // 4: one by one
    "softsync_4": {
        "mode": "softsync",
        "splits": 4,
        "max_staleness": 4,
        "staleness_scale": "exp(0.3)",
    },
    "softsync_2_equal": {"mode": "softsync", "splits": 2, "compute_time": "constant"},
    "softsync_2_warm": {
        "mode": "softsync",
        "splits": 2,
        "warmup_steps": 5,
        "staleness_scale": "inverse",
    },
    "network": {"mode": "asynchronous", "network": {"bandwidth": "80Mb/s", "latency": "20ms"}},
    "network_equal": {
        "mode": "asynchronous",
        "compute_time": "constant",
        "network": {"bandwidth": "80Mb/s"},
    },
    "network_bounded": {
        "mode": "bounded",
        "bound": 1,
        "network": {"bandwidth": "80Mb/s", "latency": "1s"},
    },
    "network_softsync": {
        "mode": "softsync",
        "splits": 2,
        "network": {"latency": "300ms"},
        "staleness_scale": "inverse",
    },
}
every_late = pytest.mark.parametrize("words", LATE.values(), ids=LATE.keys())


def declare(**words):
    return ParameterServer(**{"compute_time": "exponential(1)"} | words)


def simulate(workers, number, **words):
    """So many rounds of a run."""
    server = declare(**words)
    times = Times(server.compute_time, workers, server.seed)
    return list(
        itertools.islice(
            rounds(server, workers, times, Network.parse(server.network), SENT), number
        )
    )


def arrivals(rounds):
    """Every gradient that arrives, one after another over all rounds; `reads` are of row 1 on,
    which stand after arrivals.
    """
    counts = [int(r.present.sum()) for r in rounds]

    def join(name):
        return np.concatenate([getattr(r, name)[:n] for r, n in zip(rounds, counts, strict=True)])

    names = ("worker", "applied", "weight", "commit", "staleness", "began", "time")
    reads = np.concatenate([r.reads[1 : n + 1] for r, n in zip(rounds, counts, strict=True)])
    return types.SimpleNamespace(**{name: join(name) for name in names}, reads=reads, counts=counts)


def updates(log):
    """The gradients of every update that was made, as indices into the log."""
    start, kept = 0, []
    for at in np.flatnonzero(log.commit):
        kept.append([k for k in range(start, at + 1) if log.applied[k]])
        start = at + 1
    return kept


def lead_at_reads(log, workers):
    """At every read: how many more gradients of the reader than of the slowest have arrived."""
    arrived, leads = np.zeros(workers, int), []
    for worker, reads in zip(log.worker, log.reads, strict=True):
        arrived[worker] += 1
        leads += [arrived[reader] - arrived.min() for reader in np.flatnonzero(reads)]
    return leads


def same(left, right):
    return all(np.array_equal(getattr(left, name), getattr(right, name)) for name in vars(left))


# every round, by what its words mean --------------------------------------------------------------


@pytest.mark.sampled(quick=4)
@every_late
def test_round_is_concurrent_and_staleness_equals_replay(words):
    workers, rounds = 6, simulate(6, 400, **words)
    version, read_version, reader = 0, np.zeros(workers, int), set()
    for number, this in enumerate(rounds):
        count = int(this.present.sum())
        assert sorted(this.worker) == list(range(workers)) and count > 0
        assert set(this.worker[:count]) == set(np.flatnonzero(this.present))
        assert (
            not this.applied[count:].any()
            and not this.commit[count:].any()
            and not this.reads[count + 1 :].any()
        )
        assert (this.staleness[count:] == -1).all() and not (this.commit & ~this.applied).any()
        before = reader  # who read in the round before, after an arrival in it
        if number:  # no gradient is in a later round that could have been in the one before
            assert this.worker[0] in before or rounds[number - 1].present[this.worker[0]]
        read_version[this.reads[0]], reader = version, set(np.flatnonzero(this.reads[0]))
        here = set()
        for at, worker in enumerate(this.worker[:count]):
            assert worker not in here  # its weights were read before the round began
            assert this.staleness[at] == version - read_version[worker]
            version += int(this.commit[at])
            read_version[this.reads[at + 1]] = version
            here |= set(np.flatnonzero(this.reads[at + 1]))
        reader |= here
    assert version > 100


@pytest.mark.sampled(quick=4)
@every_late
def test_each_gradient_takes_next_time_of_its_worker(words):
    workers, rounds = 6, simulate(6, 400, **words)
    server, log = declare(**words), arrivals(rounds)
    times, number = Times(server.compute_time, workers, server.seed), np.zeros(workers, int)
    link = Network.parse(server.network)
    free = np.zeros(workers)  # when each worker has sent its last gradient
    for worker, began, time in zip(log.worker, log.began, log.time, strict=True):
        seconds = times.of(int(worker), int(number[worker]))
        least = seconds + link.latency + SENT[0] / link.bandwidth
        # sums in another order differ in the last bits; times here are below 1e4, so 1e-9 is a
        # thousand times what that makes
        assert began >= free[worker] - 1e-9 and time - began >= least - 1e-9
        if not server.network:
            assert time == began + seconds
        number[worker] += 1
        free[worker] = time
    assert (np.diff(log.time) >= 0).all()
    ends = np.cumsum(log.counts) - 1
    assert [r.end for r in rounds] == log.time[ends].tolist()


@pytest.mark.sampled(quick=4)
@every_late
def test_worker_computes_exactly_after_reading(words):
    """One gradient for every read, but for `fetch_every`, where so many are of one read."""
    each, workers = words.get("fetch_every", 1), 6
    log = arrivals(simulate(workers, 300, **words))
    alone = words.get("warmup_steps", 0) > 0
    left = np.array([each if worker == 0 or not alone else 0 for worker in range(workers)])
    for worker, reads in zip(log.worker, log.reads, strict=True):
        assert left[worker] > 0
        left[worker] -= 1
        assert (left[reads] == 0).all()
        left[reads] = each
    assert len(set(log.worker)) == workers


@pytest.mark.sampled(quick=4)
@every_late
def test_update_is_mean_of_scaled_gradients(words):
    workers, server = 6, declare(**words)
    log = arrivals(simulate(workers, 200, **words))
    alpha = np.array(
        [parse_staleness_scale(server.staleness_scale)(int(tau)) for tau in log.staleness]
    )
    count = workers // server.splits if server.mode == "softsync" else 1
    made = updates(log)
    assert len(made) > 50
    for update in made:
        last = update[-1]
        assert len(update) == count and log.commit[last]
        # one rounding to float32
        assert_close(log.weight[update], alpha[update])
    limit = server.max_staleness
    assert np.array_equal(
        log.applied, log.staleness <= limit if limit is not None else np.ones_like(log.applied)
    )


@pytest.mark.sampled(quick=7)
@pytest.mark.parametrize(
    "words",
    [{"mode": "asynchronous"}, {"mode": "softsync", "splits": 2}],
    ids=lambda words: words["mode"],
)
@pytest.mark.parametrize("scale", ["exp(3)", "exp(10)", "exp(50)", "power(30)", "power(1000)"])
def test_tiny_rate_is_clamped(words, scale):
    """e^-3tau passes the least float32 at tau 35, and the least whose inverse is one at 30;
    softsync: at once when all are so old.
    """
    log = arrivals(simulate(40, 60, **words, compute_time="constant", staleness_scale=scale))
    for update in updates(log):
        weights = log.weight[update]
        alpha = np.array([parse_staleness_scale(scale)(int(tau)) for tau in log.staleness[update]])
        # 1e-20 stands for nothing, and float32 can divide by it
        assert np.isfinite(np.float32(1) / weights.sum()) and weights == pytest.approx(
            alpha, rel=1e-5, abs=1.1e-20
        )


# staleness ----------------------------------------------------------------------------------------


def is_conserved(log, workers):
    """Every update makes the weights of all workers but one a version older: what arrived of that,
    and what is under way at the end, is all of it. In whole numbers, so the mean staleness is what
    it must be, but for those who are under way.
    """
    versions = np.cumsum(log.commit)
    read = [
        versions[log.worker == worker][-1] if (log.worker == worker).any() else 0
        for worker in range(workers)
    ]
    return log.staleness.sum() + (versions[-1] - np.array(read)).sum() == versions[-1] * (
        workers - 1
    )


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("workers", [4, 8, 32])
def test_mean_staleness_is_workers_minus_one(workers, times):
    log = arrivals(
        simulate(
            workers, 150 if times == "constant" else 3000, mode="asynchronous", compute_time=times
        )
    )
    if times == "constant":
        assert (log.staleness[workers:] == workers - 1).all() and log.staleness[
            :workers
        ].tolist() == list(range(workers))
    else:
        assert is_conserved(log, workers)
        assert log.staleness.max() > 1.5 * (workers - 1)  # and only the mean is so


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("splits", [1, 15, 30])
def test_mean_staleness_of_softsync(splits):
    """n (1 - 1 / W); Zhang et al., arXiv:1511.05950, saw means close to 15 and 30."""
    log = arrivals(simulate(30, 3000, mode="softsync", splits=splits))
    assert is_conserved(log, 30)  # of one update for each 30 / n gradients: n (1 - 1 / 30) each


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("splits", [1, 15, 30])
def test_softsync_staleness_is_at_most_twice_splits(splits):
    """Their learners were alike: 0 to 2 for n = 1, and above 2 n less than one in 10,000."""
    late = arrivals(
        simulate(30, 600, mode="softsync", splits=splits, compute_time="lognormal(1, 0.1)")
    ).staleness[2000:]
    assert len(late) > 10000 and (late > 2 * splits).mean() < 1e-4
    if splits == 1:
        assert set(late) == {0, 1, 2}


@pytest.mark.parametrize(
    "workers, most", [(workers, most) for workers in (4, 8) for most in range(workers)]
)
def test_max_staleness_share_applied_with_equal_workers(workers, most):
    rounds = simulate(workers, 80, mode="asynchronous", compute_time="constant", max_staleness=most)
    for this in rounds[40:]:
        assert this.present.all() and this.applied.sum() == most + 1  # (s + 1) / W of them
        assert (this.staleness[this.applied] <= most).all() and (
            this.staleness[~this.applied] > most
        ).all()


@pytest.mark.system
@pytest.mark.parametrize(
    "most, share",
    [
        (0, 0.454),
        pytest.param(1, 0.599, marks=pytest.mark.slow),
        (2, 0.699),
        pytest.param(3, 0.767, marks=pytest.mark.slow),
    ],
)
def test_max_staleness_share_applied_with_exponential_times(most, share):
    log = arrivals(simulate(4, 18000, mode="asynchronous", max_staleness=most))
    # 40,000 gradients of share p: sigma is sqrt(p (1 - p) / 40,000), 0.6 % of the smallest share; 2
    # % is three of it
    assert len(log.applied) > 40000 and log.applied[100:].mean() == pytest.approx(share, rel=0.02)


def counted(events, step, have=None):
    """What is counted in a step, by name."""
    return dict(
        zip(
            events.metric_names,
            np.divide(*events.step_inputs(step, have)["counted"]).tolist(),
            strict=True,
        )
    )


def test_applied_plus_dropped_is_arrived():
    events = Events(declare(mode="asynchronous", max_staleness=1), 4)
    for step in range(200):
        this, counts = events.round(step), counted(events, step)
        arrived = int((this.staleness >= 0).sum())
        assert (
            arrived
            == this.present.sum()
            == counts["gradients_applied"] + counts["gradients_dropped"]
        )
        assert (
            counts["gradients_applied"] == this.applied.sum()
            and counts["updates"] == this.commit.sum()
        )
        assert events.metrics(step)["simulated_seconds"] == this.end
        assert_close(counts["staleness"], this.staleness[:arrived].mean())  # float32


def test_idle_share_is_over_all_workers_and_time():
    slow = Events(declare(compute_time=(1.0, 2.0, 4.0)), 3)
    assert [slow.metrics(step)["idle_share"] for step in (0, 5, 2)] == [1 - 7 / 12] * 3
    alone, spared = (
        Events(declare(compute_time="constant", warmup_steps=2), 4),
        Events(declare(compute_time=(1.0, 4.0), spares=1), 2),
    )
    assert [alone.metrics(step)["idle_share"] for step in range(4)] == [3 / 4, 3 / 4, 1 / 2, 3 / 8]
    assert spared.metrics(3)["idle_share"] == 0, (
        "the one that is dropped computes until the round ends"
    )
    late = Events(declare(mode="asynchronous", compute_time="constant"), 4)
    assert late.metrics(9)["idle_share"] == 0


@pytest.mark.parametrize("spares, warm", [(0, 0), (2, 0), (1, 3)])
def test_synchronous_step_drops_its_spares(spares, warm):
    events = Events(declare(spares=spares, warmup_steps=warm), 5)
    for step in range(6):  # while the first worker is alone no other worker computes anything
        applied, dropped = (1, 0) if step < warm else (5 - spares, spares)
        assert counted(events, step) == {
            "gradients_applied": applied,
            "gradients_dropped": dropped,
            "updates": 1,
        }


@pytest.mark.parametrize(
    "scale, wanted",
    {
        "none": [1, 1, 1, 1, 1],
        "inverse": [1, 1, 1 / 2, 1 / 3, 1 / 10],
        "power(0)": [1, 1, 1, 1, 1],
        "power(0.5)": [1, 2**-0.5, 3**-0.5, 1 / 2, 11**-0.5],
        "power( 2 )": [1, 1 / 4, 1 / 9, 1 / 16, 1 / 121],
        "exp(0.1)": [1, math.e**-0.1, math.e**-0.2, math.e**-0.3, math.e**-1],
        "exp(1e-1)": [1, math.e**-0.1, math.e**-0.2, math.e**-0.3, math.e**-1],
    }.items(),
)
def test_staleness_scales(scale, wanted):
    # the same formula written in another way: a few roundings of float64
    assert [parse_staleness_scale(scale)(tau) for tau in (0, 1, 2, 3, 10)] == pytest.approx(
        wanted, rel=1e-14
    )


@pytest.mark.parametrize(
    "scale",
    [
        "",
        "inverse(1)",
        "power",
        "power()",
        "power(-1)",
        "exp(a)",
        "exp(1,2)",
        "exp(1e999)",
        "1/tau",
    ],
)
def test_invalid_staleness_scales(scale):
    assert parse_staleness_scale(scale) is None


# what late gradients do to a quadratic ------------------------------------------------------------


def descend(tau, step, number=10000, scale="none"):
    """The largest |w| of the last 100 updates of w <- w - step * (rate of this staleness) * w_read,
    from w = 1.
    """
    workers, made = tau + 1, []
    w, read, total = 1.0, np.ones(workers), 0.0
    words = {"mode": "asynchronous", "compute_time": "constant", "staleness_scale": scale}
    for this in simulate(workers, number // workers + 1, **words):
        read[this.reads[0]] = w
        for at, worker in enumerate(this.worker[: this.present.sum()]):
            total += float(this.weight[at]) * read[worker]
            if this.commit[at]:
                w, total = w - step * total, 0.0
            read[this.reads[at + 1]] = w
            made.append(abs(w))
            if abs(w) > 1e9:
                return math.inf
    return max(made[-100:])


@pytest.mark.system
@pytest.mark.parametrize("tau", [0, 1, 2, 4, 8, 16])
def test_delayed_descent_is_stable_up_to_its_limit(tau):
    """Of w <- w - x w_tau: 0 < x < 2 sin(pi / (2 (2 tau + 1))). Beside it |w| is multiplied by at
    most 1 - 0.0008 each update.
    """
    limit = 2 * math.sin(math.pi / (2 * (2 * tau + 1)))
    # 2 % beside the limit the roots are at 0.99913 and 1.00086 for tau 16: after 10,000 updates
    # 2e-4 and 5e3
    assert descend(tau, 0.98 * limit) < 0.01
    assert descend(tau, 1.02 * limit) > 100


@pytest.mark.sampled(quick=5)
@pytest.mark.parametrize("step", [0.2, 0.5, 0.9, 0.98])
@pytest.mark.parametrize("tau", [1, 4, 16])
def test_inverse_scaling_is_stable_at_every_staleness(tau, step):
    assert descend(tau, step, 4000, scale="inverse") < 1e-6
    if tau > 1 and step > 0.62:  # above the limit of tau 2
        assert descend(tau, step) == math.inf


# synchronous --------------------------------------------------------------------------------------


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("kept, spares, seconds", [(96, 0, 5.147), (96, 4, 3.104), (90, 10, 2.258)])
def test_step_time_with_spares_is_order_statistic(kept, spares, seconds):
    def harmonic(n):
        return sum(1 / k for k in range(1, n + 1))

    wanted = harmonic(kept + spares) - harmonic(spares)
    assert wanted == pytest.approx(seconds, abs=5e-4)  # what is printed in the reference
    rounds = simulate(kept + spares, 4000, spares=spares)
    # the largest of many Exp(1) has a sigma of 1.28: 0.02 over 4,000 steps, 0.4 % of the mean
    assert rounds[-1].end / len(rounds) == pytest.approx(wanted, rel=0.01)


@pytest.mark.parametrize("spares", [0, 1, 3])
@pytest.mark.parametrize("times", [*TIMES, (3.0, 1.0, 2.0, 1.0, 2.0, 0.5, 2.0)], ids=str)
def test_fastest_workers_are_present_and_ties_go_by_number(times, spares):
    workers, now = 7, 0.0
    drawn = Times(times, workers, 0)
    for number, this in enumerate(simulate(workers, 100, spares=spares, compute_time=times)):
        seconds = [drawn.of(worker, number) for worker in range(workers)]
        order = sorted(range(workers), key=lambda worker: (seconds[worker], worker))
        assert set(np.flatnonzero(this.present)) == set(order[: workers - spares])
        assert (
            this.worker.tolist() == order
            and this.applied.sum() == this.present.sum() == workers - spares
        )
        assert this.commit.tolist() == [at == workers - spares - 1 for at in range(workers)]
        assert (this.staleness == 0).all() and (this.began == now).all()
        now += seconds[order[workers - spares - 1]]
        assert this.end == pytest.approx(now, rel=1e-12)


def test_permuted_workers_change_only_the_mask():
    seconds = np.array([3.0, 1.0, 2.5, 0.5, 2.0, 4.0])
    plain = simulate(6, 5, spares=2, compute_time=tuple(seconds))
    for order in itertools.islice(itertools.permutations(range(6)), 0, 720, 37):
        for round_, permuted in zip(
            plain, simulate(6, 5, spares=2, compute_time=tuple(seconds[list(order)])), strict=True
        ):
            assert np.array_equal(permuted.present, round_.present[list(order)])
            assert np.array_equal(np.array(order)[permuted.worker], round_.worker)
            assert (
                permuted.end == round_.end
                and np.array_equal(permuted.time, round_.time)
                and np.array_equal(permuted.applied, round_.applied)
            )


def test_synchronous_step_includes_network_time():
    plain, sent = (
        simulate(3, 50, spares=1, network=network)
        for network in ({}, {"bandwidth": "80Mb/s", "latency": "30ms"})
    )
    for number, (computed, with_network) in enumerate(zip(plain, sent, strict=True), 1):
        assert np.array_equal(computed.present, with_network.present)
        # there and back, and the server's link carries the 0.1 s of three workers each way; sums
        # differ in the last bits
        assert with_network.end - computed.end == pytest.approx(
            number * (2 * 0.03 + 3 * 0.2), rel=1e-9
        )


# bounded ------------------------------------------------------------------------------------------


@pytest.mark.sampled(quick=5)
@pytest.mark.parametrize("bound", [0, 1, 3])
@pytest.mark.parametrize("times", [*TIMES, (1.0, 1.1, 5.0, 0.2)], ids=str)
def test_bounded_reader_is_within_bound(times, bound):
    log = arrivals(simulate(4, 1000, mode="bounded", bound=bound, compute_time=times))
    leads = lead_at_reads(log, 4)
    assert max(leads) <= bound
    if times != "constant":
        assert max(leads) == bound  # it is reached, so that it means something
    arrived = np.cumsum(log.worker[:, None] == np.arange(4), axis=0)
    # what was begun within it may arrive
    assert (arrived.max(axis=1) - arrived.min(axis=1)).max() <= bound + 1


@pytest.mark.parametrize("times", TIMES)
def test_zero_bound_is_lockstep(times):
    for this in simulate(5, 100, mode="bounded", bound=0, compute_time=times):
        assert this.present.all() and this.reads[5].all() and not this.reads[:5].any()
        assert this.staleness.tolist() == list(range(5))
        assert len(set(this.began)) == 1


@pytest.mark.system
def test_time_falls_as_bound_grows():
    """By the same times: a worker that waits for less is never later."""
    ends = [
        arrivals(simulate(4, 4000, mode="bounded", bound=bound)).time[3999]
        for bound in (0, 1, 3, 100)
    ]
    assert ends == sorted(ends, reverse=True) and len(set(ends)) == 4


@pytest.mark.parametrize("times", TIMES)
def test_large_bound_equals_asynchronous(times):
    asynchronous = arrivals(simulate(4, 1000, mode="asynchronous", compute_time=times))
    bounded = arrivals(simulate(4, 1000, mode="bounded", bound=100, compute_time=times))
    assert max(lead_at_reads(asynchronous, 4)) < 100
    for name in ("worker", "staleness", "applied", "commit", "reads", "began", "time"):
        assert np.array_equal(getattr(asynchronous, name), getattr(bounded, name)), name


# softsync, warm-up --------------------------------------------------------------------------------


def test_softsync_with_one_split_is_synchronous():
    for number, this in enumerate(
        simulate(6, 50, mode="softsync", splits=1, compute_time="constant(2)"), 1
    ):
        assert this.present.all() and (this.staleness == 0).all()
        assert (
            this.commit.tolist() == [False] * 5 + [True]
            and this.reads[6].all()
            and not this.reads[:6].any()
        )
        assert this.end == 2 * number


WARM = {
    "asynchronous": {"mode": "asynchronous"},
    "bounded": {"mode": "bounded", "bound": 2},
    "softsync": {"mode": "softsync", "splits": 2},
    "fresh": {"mode": "asynchronous", "max_staleness": 0},
}


@pytest.mark.parametrize("times", ["exponential(1)", "constant"])
@pytest.mark.parametrize("words", WARM.values(), ids=WARM.keys())
def test_first_worker_warms_up_then_all_join(words, times):
    log = arrivals(simulate(4, 400, **words, compute_time=times, warmup_steps=10))
    last = np.flatnonzero(log.commit)[9]  # of the tenth update
    assert (
        (log.worker[: last + 1] == 0).all()
        and (log.staleness[: last + 1] == 0).all()
        and log.applied[: last + 1].all()
    )
    assert len(updates(log)[0]) == (2 if words["mode"] == "softsync" else 1)
    assert not log.reads[:last, 1:].any()
    assert log.reads[last].all()  # this version
    for worker in range(4):
        first = last + 1 + int(np.argmax(log.worker[last + 1 :] == worker))
        assert log.worker[first] == worker and log.began[first] == log.time[last]
        assert log.staleness[first] == log.commit[last + 1 : first].sum()


@pytest.mark.parametrize("spares", [0, 2])
def test_synchronous_warmup_uses_first_worker(spares):
    rounds = simulate(4, 30, spares=spares, warmup_steps=10)
    assert all(this.present.tolist() == [True, False, False, False] for this in rounds[:10])
    assert all(
        (this.applied.sum(), this.commit.sum(), (this.staleness >= 0).sum()) == (1, 1, 1)
        for this in rounds[:10]
    )
    assert all(this.present.sum() == 4 - spares for this in rounds[10:])


# network ------------------------------------------------------------------------------------------

# 0.1 s for each gradient, so that 8 workers of about 1 s use most of the link
SLOW = {"bandwidth": "80Mb/s", "latency": "50ms"}


@pytest.mark.sampled(quick=4)
@pytest.mark.parametrize("network", [SLOW, {"bandwidth": "80Mb/s"}, {"latency": "50ms"}], ids=str)
@pytest.mark.parametrize("times", TIMES)
def test_gradients_queue_for_network(times, network):
    near = arrivals(simulate(8, 800, mode="asynchronous", compute_time=times))
    far = arrivals(simulate(8, 800, mode="asynchronous", compute_time=times, network=network))
    send, latency = (
        (0.1 if "bandwidth" in network else 0.0),
        (0.05 if "latency" in network else 0.0),
    )
    assert (far.time[:800] > near.time[:800]).all()
    # differences of times up to 1e4, each rounded to 1e-12
    assert np.diff(far.time).min() >= send - 1e-9
    began = np.sort(far.began[far.began > 0])
    assert np.diff(began).min() >= send - 1e-9  # weights leave one after another too
    assert (far.time - far.began).min() >= send + latency


@pytest.mark.sampled(quick=4)
@pytest.mark.parametrize(
    "network", [SLOW, {"bandwidth": "80Mb/s"}, {"latency": "50ms"}, {"latency": "50us"}], ids=str
)
def test_mean_staleness_with_network_is_workers_minus_one(network):
    log = arrivals(simulate(8, 2500, mode="asynchronous", network=network))
    # as without one, but not in whole numbers: who waits for an answer does not grow older. Over
    # 8,000 gradients what is under way at both ends is at most 8 x 8 versions of 56,000, and
    # waiting in line for a link is the rest of the 1 %
    assert log.staleness[1000:].mean() == pytest.approx(7, rel=0.01)


@pytest.mark.parametrize(
    "words",
    [{"mode": "asynchronous"}, {"mode": "bounded", "bound": 0}, {"mode": "softsync", "splits": 1}],
    ids=str,
)
def test_single_worker_waits_for_network_in_every_mode(words):
    periods = [
        np.diff([this.end for this in simulate(1, 20, compute_time="constant", network=SLOW, **w)])
        for w in ({}, words)
    ]
    # there and back; sums differ in the last bits
    assert periods[0] == pytest.approx(1 + 2 * 0.05 + 2 * 0.1, rel=1e-9)
    assert periods[1] == pytest.approx(periods[0], rel=1e-9)


# Events -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [{"spares": 1}, LATE["async"], LATE["bounded_2"], LATE["softsync_3"], LATE["network"]],
    ids=str,
)
def test_same_declaration_gives_same_rounds(words):
    first, again, another_seed = (simulate(6, 100, **words, seed=seed) for seed in (3, 3, 4))
    assert all(map(same, first, again))
    assert not any(a.end == b.end for a, b in zip(first, another_seed, strict=True))


@pytest.mark.parametrize("times", TIMES[1:])
def test_times_of_worker_do_not_depend_on_others(times):
    few, many, other = Times(times, 2, 5), Times(times, 64, 5), Times(times, 2, 6)

    def of(drawn, worker):
        return [drawn.of(worker, number) for number in (0, 1, 1023, 1024, 5000, 3, 1024)]

    assert of(few, 1) == of(many, 1) and of(few, 0) == of(many, 0)
    assert of(few, 1) != of(few, 0) and of(few, 1) != of(other, 1)
    assert of(few, 1)[3] == of(few, 1)[6] and len(set(of(few, 1))) == 6


@pytest.mark.system
def test_drawn_times_follow_distribution():
    def of(times):
        return np.array([Times(times, 3, 0).of(2, number) for number in range(8 * 1024)])

    # 8,192 draws: sigma of a mean (and of a median) is 1.1 % of an exponential's, 0.0033 of this
    # lognormal's logarithm, and of the logarithm's own sigma 0.8 %; each bound is three sigma or a
    # little more, and the draws are seeded
    seconds = of("exponential(3)")
    assert seconds.mean() == pytest.approx(3, rel=0.04) and np.median(seconds) == pytest.approx(
        3 * math.log(2), rel=0.04
    )
    logs = np.log(of("lognormal(2.0, 0.3)"))
    assert logs.mean() == pytest.approx(math.log(2), abs=0.01) and logs.std() == pytest.approx(
        0.3, rel=0.03
    )
    assert Times("constant(4)", 3, 0).of(2, 9) == 4 and Times("constant", 3, 0).of(0, 9999) == 1


@pytest.mark.system
@pytest.mark.parametrize("words", [{"spares": 1}, LATE["async"], LATE["softsync_3"]], ids=str)
def test_rounds_do_not_depend_on_query_order(words):
    wanted = simulate(6, 5001, **words)
    events = Events(declare(**words), 6, SENT)
    for step in (5000, 0, 4999, 17, 5000, 5000 - MAX_KEPT_ROUNDS, 0):
        assert same(events.round(step), wanted[step])


def test_step_inputs_without_mask():
    assert not Events(declare(), 4).masked and set(Events(declare(), 4).step_inputs(3)) == {
        "counted"
    }
    assert Events(declare(spares=1), 4).masked and Events(declare(warmup_steps=1), 4).masked
    assert all(Events(declare(**words), 6).masked for words in LATE.values())


@pytest.mark.parametrize(
    "have, wanted",
    [
        (None, [1, 2, 0]),  # of 3, 1, 2 and 4 seconds
        ([True, True, True, True], [1, 2, 0]),
        ([True, False, True, True], [2, 0, 3]),
        ([False, False, True, True], [2, 3]),
        ([False, False, False, True], [3]),
    ],
)
def test_fastest_workers_with_data_take_part(have, wanted):
    events = Events(ParameterServer(spares=1, compute_time=(3.0, 1.0, 2.0, 4.0)), 4)
    inputs = events.step_inputs(5, None if have is None else np.array(have))
    assert set(inputs) == {"present", "counted"} and set(np.flatnonzero(inputs["present"])) == set(
        wanted
    )


HAVES = np.array(list(itertools.product([False, True], repeat=6)))


@every_late
def test_worker_without_data_changes_nothing(words):
    events = Events(declare(**words), 6, SENT)
    for step, have in enumerate(HAVES):
        this, inputs = events.round(step), events.step_inputs(step, have)
        gone = [at for at in range(6) if not (this.present & have)[this.worker[at]]]
        assert np.array_equal(inputs["present"], this.present & have)
        assert not inputs["applied"][gone].any() and not inputs["commit"][gone].any()
        kept = [at for at in range(6) if at not in gone]
        flushed = (
            words["mode"] == "softsync"
            and len(gone)
            and this.present[this.worker[gone]].any()
            and len(kept)
        )
        assert not flushed or inputs["commit"][kept[-1]], (
            "what was gathered when the data ends is an update"
        )
        for name in ("applied", "weight", *(() if flushed else ("commit",))):
            assert np.array_equal(inputs[name][kept], getattr(this, name)[kept])
        assert np.array_equal(inputs["worker"], this.worker) and np.array_equal(
            inputs["reads"], this.reads
        )
        plain = events.step_inputs(step)
        assert all(
            np.array_equal(value, getattr(this, name))
            for name, value in plain.items()
            if name != "counted"
        )
        counts = counted(events, step, have)
        assert counts["gradients_applied"] == inputs["applied"].sum()
        assert counts["gradients_dropped"] == inputs["present"].sum() - inputs["applied"].sum()


@every_late
def test_worker_with_data_reads_when_others_have_none(words):
    """Its next gradient would else be of older weights than its staleness says."""
    events = Events(declare(**words), 6, SENT)
    for step, have in enumerate(HAVES):
        this, inputs = events.round(step), events.step_inputs(step, have)
        others = have | ~this.present  # who waits, or is under way, is not without data
        assert np.array_equal(inputs["reads"][:, others], this.reads[:, others])


# traces -------------------------------------------------------------------------------------------

TABLE = np.array([[3.0, 1.0], [2.0, 5.0], [0.5, 4.0], [1.0, 0.0], [2.0, 2.0]])


def save(path, table):
    if path.suffix == ".npy":
        np.save(path, table)
    else:
        path.write_text("".join(",".join(map(str, row)) + "\n" for row in table))
    return str(path)


@pytest.mark.parametrize("name", ["times.csv", "times.npy"])
def test_trace_is_used_row_by_row(tmp_path, name):
    path = save(tmp_path / name, TABLE)
    times = Times(path, 2, 0)
    assert (
        times.length == 5
        and [[times.of(worker, n) for worker in range(2)] for n in range(5)] == TABLE.tolist()
    )
    together = simulate(2, 5, compute_time=path)
    assert [this.end for this in together] == np.cumsum(TABLE.max(axis=1)).tolist()
    log = arrivals(simulate(2, 4, mode="asynchronous", compute_time=path))
    for worker in range(2):
        mine = log.worker == worker
        assert (log.time - log.began)[mine].tolist() == TABLE[: mine.sum(), worker].tolist()


NEEDED = {
    "bounded": {"bound": 1},
    "softsync": {"splits": 1},
    "local": {"every": 2},
    "elastic": {"every": 2},
}


@pytest.mark.parametrize("name", ["times.csv", "times.npy"])
@pytest.mark.parametrize("mode", MODES)
def test_end_of_trace_raises(tmp_path, mode, name):
    more = NEEDED.get(mode, {})
    with pytest.raises(
        OptionError,
        match=r"compute_time: the trace has 5 rows, and worker \d begins its gradient 6",
    ) as caught:
        simulate(2, 100, mode=mode, compute_time=save(tmp_path / name, TABLE), **more)
    assert "fix:" in str(caught.value)


def test_end_of_trace_raises_on_every_call(tmp_path):
    events = Events(
        declare(mode="asynchronous", compute_time=save(tmp_path / "times.csv", TABLE)), 2
    )
    for _ in range(3):
        with pytest.raises(OptionError, match="the trace has 5 rows"):
            events.round(50)
        assert events.round(0).present.any()


@pytest.mark.parametrize("mode", MODES)
def test_trace_lasts_its_stated_steps(tmp_path, mode):
    more = NEEDED.get(mode, {})
    events = Events(
        declare(mode=mode, compute_time=save(tmp_path / "times.csv", np.ones((9, 3))), **more), 3
    )
    assert events.steps == 9
    for step in range(events.steps):
        assert events.round(step).present.all()


def test_times_without_trace_are_unlimited():
    assert (
        Events(declare(), 4).steps is None
        and Events(declare(compute_time=(1.0, 2.0)), 2).steps is None
    )


BROKEN = {
    "few_columns": "1\n2\n",
    "many_columns": "1,2,3\n4,5,6\n",
    "ragged": "1,2\n3\n",
    "negative": "1,2\n3,-4\n",
    "not_finite": "1,2\n3,nan\n",
    "text": "1,2\nslow,fast\n",
    "header": "first,second\n1,2\n",
    "empty": "",
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN.keys())
def test_invalid_csv_trace(tmp_path, text):
    (tmp_path / "times.csv").write_text(text)
    with pytest.raises(OptionError) as caught:
        Times(str(tmp_path / "times.csv"), 2, 0)
    assert "compute_time" in str(caught.value) and str(tmp_path / "times.csv") in str(caught.value)


ARRAYS = {
    "few_columns": TABLE[:, :1],
    "negative": -TABLE,
    "flat": TABLE[:, 0],
    "empty": TABLE[:0],
    "text": np.full((5, 2), "slow"),
}


@pytest.mark.parametrize("table", ARRAYS.values(), ids=ARRAYS.keys())
def test_invalid_array_trace(tmp_path, table):
    path = save(tmp_path / "times.npy", table)
    with pytest.raises(OptionError) as caught:
        Times(path, 2, 0)
    assert "compute_time" in str(caught.value) and path in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"1,2\n3,4\n"], ids=["empty", "text"])
def test_invalid_npy_file(tmp_path, content):
    (tmp_path / "times.npy").write_bytes(content)
    with pytest.raises(OptionError) as caught:
        Times(str(tmp_path / "times.npy"), 2, 0)
    assert str(tmp_path / "times.npy") in str(caught.value)


def test_missing_trace_file(tmp_path):
    for path in (tmp_path / "none.csv", tmp_path / "none.npy", tmp_path):
        with pytest.raises(OptionError) as caught:
            Times(str(path), 2, 0)
        assert str(path) in str(caught.value) and "fix:" in str(caught.value)


def test_list_needs_one_time_per_worker():
    with pytest.raises(OptionError, match="3 numbers for 4 workers"):
        Times((1.0, 2.0, 3.0), 4, 0)
