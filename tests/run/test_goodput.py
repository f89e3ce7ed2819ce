"""Where the time of a run went, with a fake clock that only the test advances."""

import json
import re
import sys

import numpy as np
import pytest
from small import fit, fit_net, labelled, numbers

import spmd
from spmd.run import time_account
from spmd.run.goodput import BINS, PHASES, Goodput, Timeline
from spmd.run.time_account import TimeAccount


class Clock:
    """Seconds since 1970."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    """Runs of this test begin when they are called, without a launcher."""
    fake = Clock()
    monkeypatch.setattr(time_account, "now", fake)
    monkeypatch.setattr(time_account, "_accounts", 1)
    for name in ("SPMD_TIMES", "SPMD_ATTEMPT", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    return fake


def launched(monkeypatch, *times):
    """As in the process of a launcher's attempt: its start, start and end of each attempt, and the
    start of this one.
    """
    monkeypatch.setenv("SPMD_TIMES", " ".join(map(str, times)))
    monkeypatch.setenv("SPMD_ATTEMPT", str(len(times) // 2 - 1))
    monkeypatch.setattr(time_account, "_accounts", 0)


def spent(account):
    """Phases with time, which add up to all of it."""
    goodput = account.goodput if isinstance(account, TimeAccount) else account
    assert (
        sum(goodput.values())
        == goodput.seconds
        == sum(sum(each.values()) for each in goodput.timeline.bins)
    )
    return {phase: seconds for phase, seconds in goodput.items() if seconds}


def trained(account, clock, seconds):
    with account("training"):
        clock.now += seconds


# The account --------------------------------------------------------------------------------------


def test_time_of_nested_phases_counts_once(clock):
    account = TimeAccount.open(None)
    clock.now += 2.0
    with account("training"):
        clock.now += 4.0
        with account("evaluating"):
            clock.now += 8.0
            with account("compiling"):
                clock.now += 16.0
            clock.now += 32.0
        clock.now += 64.0
    assert spent(account) == {
        "starting": 2.0,
        "training": 68.0,
        "evaluating": 40.0,
        "compiling": 16.0,
    }


def test_record_has_goodput_and_rates(clock):
    account = TimeAccount.open(None)
    with account("compiling"):
        clock.now += 30.0
    with account("training"):
        account.rates(1, 32)
        clock.now += 40.0
        with account("saving"):
            clock.now += 10.0
        assert account.rates(201, 32 * 201) == {
            "steps_per_second": 4.0,
            "samples_per_second": 128.0,
            "data_wait": 0.0,
            "goodput": round(40 / 80, 3),
        }
    assert account.to_checkpoint() == [40.0, 1000.0]


def test_profiling_is_no_training_and_in_no_rate(clock):
    account = TimeAccount.open(None)
    with account("training"):
        account.rates(1, 32)
        clock.now += 20.0
        with account("profiling"):
            clock.now += 60.0
        clock.now += 20.0
        rates = account.rates(201, 32 * 201)
        assert (rates["steps_per_second"], rates["samples_per_second"], rates["goodput"]) == (
            5.0,
            160.0,
            0.4,
        )
        with account("profiling"):
            clock.now += 5.0
        clock.now += 10.0
        assert account.rates(251, 32 * 251)["steps_per_second"] == 5.0


def waits(account, clock, seconds, busy):
    """One wait for a batch, at whose begin and end devices are `busy`."""
    states = iter(busy)

    def batches():
        clock.now += seconds
        yield 1

    assert next(account.count_waiting(batches(), lambda: not next(states))) == 1


def test_waiting_for_data_counts_as_far_as_devices_had_nothing_to_do(clock):
    account = TimeAccount.open(None)
    with account("training"):
        clock.now += 4.0
        account.call_done(1000.0, awaited=True)  # a call takes 4 s
        waits(account, clock, 3.0, busy=[True, True])
        assert "waiting for data" not in spent(account)
        waits(account, clock, 16.0, busy=[True, False])
        assert spent(account) == {"training": 11.0, "waiting for data": 12.0}
        waits(account, clock, 2.0, busy=[False])
    assert spent(account) == {"training": 11.0, "waiting for data": 14.0} and account.waited == 21.0
    assert account.training_seconds == 25.0


def test_time_of_a_call_is_measured_where_the_host_waited_for_it(clock):
    account = TimeAccount.open(None)
    with account("training"):
        clock.now += 8.0
        account.call_done(1000.0, awaited=True)
        clock.now += 2.0
        account.call_done(1000.0, awaited=True)  # dispatched while the first one ran
        clock.now += 1.0
        account.call_done(1000.0, awaited=False)
        waits(account, clock, 5.0, busy=[True, False])
    assert account.goodput["waiting for data"] == 3.0


# Over attempts ------------------------------------------------------------------------------------


def test_restart_continues_the_account_and_counts_lost_steps_as_repeated(
    clock, tmp_path, monkeypatch
):
    launched(monkeypatch, 1000.0, 1001.0)
    clock.now = 1004.0
    first = TimeAccount.open(tmp_path)
    first.write_to(tmp_path)
    trained(first, clock, 60.0)
    pace = first.to_checkpoint()
    trained(first, clock, 16.0)
    with first("evaluating"):  # killed here, after 3 s
        launched(monkeypatch, 1000.0, 1001.0, 1083.0, 1090.0)
        clock.now = 1092.0
        second = TimeAccount.open(tmp_path)
    second.write_to(tmp_path)
    second.resume(pace)
    trained(second, clock, 8.0)
    second.close()
    parts = {
        "starting": 4.0 + 2.0,
        "training": 60.0 + 8.0,
        "repeated": 16.0,
        "evaluating": 3.0,
        "down": 7.0,
    }
    assert spent(second) == parts and second.goodput.seconds == 100.0
    assert second.goodput.timeline.attempts == [1001.0, 1090.0]
    assert repr(second.goodput) == (
        "goodput 68.0 % of 1 min 40 s in 2 attempts: repeated 16.0 %, down 7.0 %, starting 6.0 %, "
        "evaluating 3.0 %"
    )
    assert json.loads((tmp_path / "goodput.json").read_text())["totals"] == parts


def test_restart_without_a_checkpoint_repeats_all(clock, tmp_path, monkeypatch):
    launched(monkeypatch, 1000.0, 1000.0)
    first = TimeAccount.open(tmp_path)
    first.write_to(tmp_path)
    with first("training"):  # killed here
        clock.now += 60.0
        launched(monkeypatch, 1000.0, 1000.0, 1064.0, 1064.0)
        clock.now = 1064.0
        second = TimeAccount.open(tmp_path)
        second.resume(None)
        assert spent(second) == {"repeated": 64.0}
        clock.now = 1060.0
    clock.now = 1064.0
    first.close()
    third = TimeAccount.open(tmp_path)
    third.resume(None)
    assert spent(third) == {"repeated": 60.0, "starting": 4.0}


def test_attempt_that_left_no_record_is_counted(clock, tmp_path, monkeypatch):
    launched(monkeypatch, 1000.0, 1000.0, 1020.0, 1022.0)
    clock.now = 1030.0
    account = TimeAccount.open(tmp_path)
    account.close()
    assert spent(account) == {"starting": 28.0, "down": 2.0}
    launched(monkeypatch, 1000.0, 1000.0, 1020.0, 1022.0)
    without_folder = TimeAccount.open(None)
    without_folder.close()
    assert spent(without_folder) == {"repeated": 20.0, "down": 2.0, "starting": 8.0}


def test_resume_by_hand_begins_anew_and_a_requeued_job_does_not(clock, tmp_path, monkeypatch):
    for begin, restarts, expected in (
        (1000.0, "0", {}),
        (2000.0, "0", {}),
        (3000.0, "1", {"training": 10.0, "down": 990.0}),
    ):
        monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
        clock.now = begin
        account = TimeAccount.open(tmp_path)
        account.write_to(tmp_path)
        assert spent(account) == expected
        trained(account, clock, 10.0)
        account.close()


def test_first_run_of_a_process_begins_with_it(clock, tmp_path, monkeypatch):
    monkeypatch.setattr(time_account, "_accounts", 0)
    monkeypatch.setattr(time_account, "_process_start", lambda at: at - 7.0)
    assert (
        spent(TimeAccount.open(None)) == {"starting": 7.0} and spent(TimeAccount.open(None)) == {}
    )


def test_start_of_the_process(monkeypatch):
    monkeypatch.undo()
    # another test may have imported it
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    at = time_account.now()
    assert at - 1e7 < time_account._process_start(at) < at
    monkeypatch.setenv("SPMD_TIMES", "")  # it waits for calls from a notebook
    assert time_account._process_start(at) == at


def test_account_of_another_launcher_is_not_continued(clock, tmp_path, monkeypatch):
    launched(monkeypatch, 1000.0, 1000.0)
    account = TimeAccount.open(tmp_path)
    account.write_to(tmp_path)
    account.close()
    launched(monkeypatch, 5000.0, 5000.0, 5001.0, 5002.0)
    clock.now = 5002.0
    assert spent(TimeAccount.open(tmp_path)) == {"starting": 1.0, "down": 1.0}


def test_checkpoint_of_an_earlier_version_gives_the_training_so_far(clock, tmp_path, monkeypatch):
    monkeypatch.setenv("SPMD_ATTEMPT", "1")
    account = TimeAccount.open(tmp_path)
    account.resume([60.0, 900.0])
    assert spent(account) == {"training": 60.0, "down": 40.0}


def test_clock_that_was_set_back_between_attempts(clock, tmp_path, monkeypatch):
    monkeypatch.setenv("SPMD_ATTEMPT", "1")
    account = TimeAccount.open(tmp_path)
    account.write_to(tmp_path)
    trained(account, clock, 50.0)
    account.close()
    clock.now -= 3600.0
    resumed = TimeAccount.open(tmp_path)
    trained(resumed, clock, 7.0)
    assert spent(resumed) == {"training": 57.0}


def test_training_after_a_save_that_a_kill_ends_is_repeated(clock, tmp_path, monkeypatch):
    launched(monkeypatch, 1000.0, 1000.0)
    account = TimeAccount.open(tmp_path)
    account.write_to(tmp_path)
    with account("training"):
        clock.now += 30.0
        with account("saving"):
            saved = account.to_checkpoint()
            clock.now += 1.0
        # here are 500 seconds of steps, without a record, until the process is killed
        launched(monkeypatch, 1000.0, 1000.0, 1531.0, 1531.0)
        clock.now = 1531.0
        restarted = TimeAccount.open(tmp_path)
    restarted.resume(saved)
    assert spent(restarted) == {"training": 30.0, "saving": 1.0, "repeated": 500.0}


HUGE = f'{{"launched": null, "phase": "training", "began": 1{"0" * 400}}}'


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"phase": "no phase"}', "null", "[" * 100_000, '{"launched": "x"}', HUGE],
)
def test_damaged_account_is_left_out(clock, tmp_path, monkeypatch, text):
    (tmp_path / "goodput.json").write_text(text)
    monkeypatch.setenv("SPMD_ATTEMPT", "1")
    assert spent(TimeAccount.open(tmp_path)) == {}


@pytest.mark.parametrize(
    "key, value",
    [
        ("width", 0.0),
        ("until", float("nan")),
        ("bins", [{"training": -1.0}]),
        ("totals", {"x": 1.0}),
        ("totals", {"training": 100.0}),  # of 0 seconds
    ],
)
def test_account_with_a_wrong_value_is_left_out(clock, tmp_path, monkeypatch, key, value):
    account = TimeAccount.open(tmp_path)
    account.write_to(tmp_path)
    values = json.loads((tmp_path / "goodput.json").read_text())
    (tmp_path / "goodput.json").write_text(json.dumps({**values, key: value}))
    clock.now += 8.0
    monkeypatch.setenv("SPMD_ATTEMPT", "1")
    assert spent(TimeAccount.open(tmp_path)) == {}


@pytest.mark.parametrize("times", ["5", "inf", "nan nan", "1 2 3", "noon"])
def test_times_that_no_launcher_gives_are_left_out(clock, monkeypatch, times):
    monkeypatch.setenv("SPMD_TIMES", times)
    assert spent(TimeAccount.open(None)) == {}


def test_account_that_cannot_be_written_is_a_warning(clock, tmp_path, caplog):
    account = TimeAccount.open(tmp_path)
    account.write_to(tmp_path / "missing")
    trained(account, clock, 1.0)
    assert "goodput.json cannot be written" in caplog.text and len(caplog.records) == 1
    (tmp_path / "missing").mkdir()  # as a full disk that has room again
    account.close()
    assert sorted(path.name for path in (tmp_path / "missing").iterdir()) == [
        "goodput.html",
        "goodput.json",
    ]


# The timeline -------------------------------------------------------------------------------------


def test_timeline_stays_small_and_exact():
    timeline = Timeline(0.0)
    for number in range(3000):
        timeline.charge("training" if number % 3 else "saving", timeline.until + 0.5)
    assert len(timeline.bins) <= BINS and timeline.totals == {"saving": 500.0, "training": 1000.0}
    assert sum(each.get("training", 0.0) for each in timeline.bins) == 1000.0
    timeline.repeat(250.0)
    assert timeline.totals == {"saving": 500.0, "training": 750.0, "repeated": 250.0}
    newest = [each for each in timeline.bins if each.get("repeated")]
    assert (
        newest == timeline.bins[-len(newest) :]
        and sum(each["repeated"] for each in newest) == 250.0
    )
    timeline.charge("down", 1e9)
    assert len(timeline.bins) <= BINS and timeline.totals["down"] == 1e9 - 1500.0
    assert vars(Timeline.from_json(json.loads(json.dumps(timeline.to_json())))) == vars(timeline)


def test_clock_that_goes_backwards_charges_nothing():
    timeline = Timeline(10.0)
    timeline.charge("training", 12.0)
    timeline.charge("down", 11.0)
    timeline.charge("saving", 13.0)
    assert timeline.totals == {"training": 2.0, "down": 0.0, "saving": 1.0}


def test_drawing_covers_the_time_once():
    timeline = Timeline(0.0)
    timeline.attempts = [0.0, 60.0]
    for phase, until in (
        ("starting", 4.0),
        ("training", 40.0),
        ("saving", 41.0),
        ("training", 50.0),
        ("down", 60.0),
        ("training", 96.0),
    ):
        timeline.charge(phase, until)
    page = Goodput(timeline).page("A run & its time")
    assert (
        "<title>A run &amp; its time</title>" in page
        and "prefers" not in page
        and "http" not in page.replace("http://www.w3.org", "")
    )
    boxes = re.findall(
        r'<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)" height="([\d.]+)" fill="var\(--(\w)\)"',
        page,
    )
    strip = [
        (float(x), float(x) + float(width), float(width) * float(height), colour)
        for x, width, height, colour in boxes
        if width != "11.00"
    ]
    # two digits each
    assert min(x for x, *_ in strip) == 4.0 and max(end for _, end, *_ in strip) == pytest.approx(
        956.0, abs=0.01
    )
    areas = {
        phase: sum(area for *_, area, colour in strip if colour == PHASES[phase][0])
        / (952.0 * 120.0)
        for phase in PHASES
    }
    shares = {phase: Goodput(timeline).share(phase) for phase in PHASES}
    # widths and heights have two digits: 5e-6 for each of some 100 boxes
    assert areas == pytest.approx(shares, abs=3e-4)
    assert page.count("attempt 1<") == page.count("attempt 2<") == 1


def test_phases_are_the_keys():
    goodput = Goodput(Timeline(0.0))
    assert (
        list(goodput) == list(PHASES)
        and len(goodput) == len(PHASES)
        and goodput.share("training") == 0.0
    )
    with pytest.raises(KeyError, match='no phase "sleeping"'):
        goodput["sleeping"]
    colours = [colour for colour, _ in PHASES.values()]
    assert len(set(colours)) == len(colours)


# In a run -----------------------------------------------------------------------------------------


class Slow:
    """Data of 3 batches whose reading advances the clock."""

    def __init__(self, clock, seconds):
        self.clock, self.seconds = clock, seconds

    def __call__(self):
        for at in range(3):
            self.clock.now += self.seconds
            yield numbers(32, at)


def test_run_divides_its_time(clock, tmp_path):
    """Setup takes no time by this clock; a callback's time is training, the evaluation's is not."""

    def callback(info):
        clock.now += 4.0

    saved = []

    class Saves(spmd.callbacks.Callback):
        def on_checkpoint(self, info):
            saved.append(info.step)
            clock.now += 0.25

    result = fit(
        epochs=2,
        checkpoint=tmp_path / "run",
        eval_data=Slow(clock, 16.0),
        callbacks=[callback, Saves()],
        log_every=1,
    )
    assert saved == [3, 6]
    assert spent(result.goodput) == {"training": 6 * 4.0 + 2 * 0.25, "evaluating": 2 * 3 * 16.0}
    assert result.samples_per_second == 4 * 32 / (result.goodput["training"] - 2 * 4.0), (
        "without the first two steps"
    )
    assert (tmp_path / "run" / "goodput.html").read_text().count("<svg") == 1
    stored = json.loads((tmp_path / "run" / "goodput.json").read_text())
    assert stored["totals"]["evaluating"] == 96.0 and stored["phase"] == "down"
    last = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ][-1]
    assert last["step"] == 6


def test_compiling_counts_where_a_program_is_compiled(clock, monkeypatch):
    from spmd.train.compiled_functions import CompiledFunctions

    build = CompiledFunctions._build

    def slow(functions, key):
        clock.now += {"step": 32.0, "evaluate": 8.0}[key[0]]
        return build(functions, key)

    monkeypatch.setattr(CompiledFunctions, "_build", slow)
    result = fit(epochs=2, eval_data=numbers(32, 1))
    assert spent(result.goodput) == {"compiling": 40.0}
    assert result.samples_per_second is None, "no time passed in training"


def test_result_and_display_say_it(clock, capsys):
    result = fit(
        epochs=1, callbacks=[lambda info: setattr(clock, "now", clock.now + 3.0)], progress=True
    )
    assert repr(result.goodput) == "goodput 100.0 % of 9 s"
    assert capsys.readouterr().err.splitlines()[-1] == "goodput 100.0 % of 9 s"
    assert "<svg" in result.goodput._repr_html_()


@pytest.mark.system
def test_records_of_a_run_have_them(tmp_path):
    class Memory:
        def __init__(self):
            self.records = []

        def write(self, record):
            self.records.append(record)

        def close(self):
            pass

    log = Memory()
    fit_net(labelled(80), epochs=3, log_every=1, loggers=[log])
    last = log.records[-1]
    assert 0.0 < last["goodput"] <= 1.0 and 0.0 <= last["data_wait"] <= 1.0


@pytest.mark.system
def test_replicas_are_checked_at_an_interval_of_steps(monkeypatch):
    seen = []
    monkeypatch.setattr(
        "spmd.run.known_callbacks.check_replicas",
        lambda state, when: seen.append((int(np.asarray(state.step)), when)),
    )
    fit_net(labelled(80), epochs=2, callbacks=[spmd.callbacks.CheckReplicas(every=3)])
    assert (
        seen
        and [step for step, _ in seen] == list(range(3, 3 * len(seen) + 1, 3))
        and seen[0][1] == "after step 3"
    )
    with pytest.raises(spmd.SpmdError, match="CheckReplicas: every=0"):
        spmd.callbacks.CheckReplicas(every=0)
