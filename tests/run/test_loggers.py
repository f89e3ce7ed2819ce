"""Where metrics are written, and what every logger is given."""

import json
import math
import shutil
import struct

import numpy as np
import pytest
from small import fit, fit_net, labelled, numbers

import spmd
from spmd.errors import CallbackError, OptionError
from spmd.run.loggers import JsonLines, TensorBoard
from tests.compare import assert_close, relative_difference
from tests.processes import room_for


class Memory:
    """A user's own logger: two methods, no base class."""

    def __init__(self):
        self.records, self.closed = [], 0

    def write(self, record):
        assert not self.closed
        self.records.append(dict(record))

    def close(self):
        self.closed += 1


def json_records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def events(folder):
    """Every event in the files of a folder: length, its checksum, the record, its checksum."""
    from tensorboardX.proto.event_pb2 import Event

    for path in folder.iterdir():
        raw = path.read_bytes()
        while raw:
            (length,) = struct.unpack("<Q", raw[:8])
            yield Event.FromString(raw[12 : 12 + length])
            raw = raw[16 + length :]


def scalars(folder):
    """(step, name, value) of every scalar in the one event file."""
    (_,) = folder.iterdir()
    return [
        (event.step, value.tag, value.simple_value)
        for event in events(folder)
        for value in event.summary.value
    ]


SPEED = {"steps_per_second", "samples_per_second", "data_wait", "goodput"}
WRITTEN = [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25, "eval_accuracy": 1}]
KINDS = {
    "JsonLines": (
        lambda at: JsonLines(at / "log.jsonl"),
        lambda at, log: json_records(at / "log.jsonl"),
    ),
    "TensorBoard": (lambda at: TensorBoard(at / "tb"), lambda at, log: scalars(at / "tb")),
    "a user's": (lambda at: Memory(), lambda at, log: log.records),
}


def pairs(records):
    """What TensorBoard keeps of records."""
    return [
        (record["step"], name, value)
        for record in records
        for name, value in record.items()
        if name != "step"
    ]


@pytest.fixture(params=KINDS.values(), ids=KINDS.keys())
def kind(request):
    return request.param


def test_what_is_written_can_be_read(kind, tmp_path):
    make, read = kind
    log = make(tmp_path)
    for record in WRITTEN:
        log.write(record)
    log.close()
    assert read(tmp_path, log) in (WRITTEN, pairs(WRITTEN))


@pytest.mark.sampled(quick=3)
def test_a_run_gives_every_logger_the_same_records(kind, tmp_path):
    make, read = kind
    log, memory = make(tmp_path), Memory()
    fit(epochs=4, eval_data=numbers(40, 1), loggers=[memory, log], log_every=5)
    assert [
        (record["step"], "loss" in record, "eval_loss" in record) for record in memory.records
    ] == [
        *[(3, False, True), (5, True, False), (6, False, True), (9, False, True)],
        *[(10, True, False), (12, False, True), (12, True, False)],
    ]
    assert memory.closed == 1
    written = read(tmp_path, log)
    if isinstance(log, TensorBoard):
        assert [entry[:2] for entry in written] == [entry[:2] for entry in pairs(memory.records)]
        # float32
        assert_close([entry[2] for entry in written], [entry[2] for entry in pairs(memory.records)])
    else:
        assert written == memory.records


@pytest.mark.parametrize("outcome", ["returns", "raises"])
def test_every_logger_is_closed_once_whatever_happens(outcome):
    class Broken(Memory):
        def close(self):
            super().close()
            raise OSError("cannot close")

    def fail(info):
        raise RuntimeError("mine")

    loggers = [Memory(), Broken(), Memory()]
    text = (
        "callback fail.on_step raises RuntimeError: mine"
        if outcome == "raises"
        else "logger Broken.close raises OSError: cannot close"
    )
    with pytest.raises(CallbackError, match=text):
        fit(steps=3, loggers=loggers, callbacks=[fail] if outcome == "raises" else [])
    assert [log.closed for log in loggers] == [1, 1, 1]


@pytest.mark.system
def test_a_record_is_the_exact_mean_since_the_last_one():
    memory = Memory()
    result = fit_net(labelled(80), epochs=3, loggers=[memory], log_every=4)
    rows, losses = [32, 32, 16] * 3, result.history["loss"]
    records = [record for record in memory.records if "loss" in record]
    assert [record["step"] for record in records] == [4, 8, 9]
    assert [record["epoch"] for record in records] == [1, 2, 2]
    for record, (first, last) in zip(records, [(0, 4), (4, 8), (8, 9)], strict=True):
        exact = sum(r * x for r, x in zip(rows[first:last], losses[first:last], strict=True)) / sum(
            rows[first:last]
        )
        assert_close(record["loss"], exact)  # the history holds float32 sums
        assert record["accuracy"] * sum(rows[first:last]) == pytest.approx(
            round(record["accuracy"] * sum(rows[first:last])), abs=1e-9
        )
    # a mean of means is another number
    assert relative_difference(records[0]["loss"], sum(losses[:4]) / 4) > 1e-6


def test_a_short_run_is_logged_too():
    memory = Memory()
    result = fit(steps=2, loggers=[memory], log_every=10)
    assert [record["step"] for record in memory.records] == [2]
    assert_close(memory.records[0]["loss"], sum(result.history["loss"]) / 2)


def test_json_lines_have_no_word_for_what_is_not_finite(tmp_path):
    log = JsonLines(tmp_path / "deep" / "log.jsonl")
    log.write(
        {"step": 1, "loss": math.nan, "gap": math.inf, "low": -math.inf, "fine": 0.5, "name": "é"}
    )
    log.close()
    assert json_records(tmp_path / "deep" / "log.jsonl") == [
        {"step": 1, "loss": None, "gap": None, "low": None, "fine": 0.5, "name": "é"}
    ]


def test_json_lines_are_appended_and_there_at_once(tmp_path):
    for step in (1, 2):
        log = JsonLines(tmp_path / "log.jsonl")
        log.write({"step": step})
        # before it is closed: a killed run leaves complete lines
        assert len(json_records(tmp_path / "log.jsonl")) == step
        log.close()


@pytest.mark.system
def test_resumed_run_appends_to_the_json_lines(tmp_path):
    fit(steps=4, checkpoint=tmp_path, log_every=2)
    first = json_records(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in first] == [2, 4]
    assert set(first[1]) == {"step", "epoch", "loss", "wire_bytes"} | SPEED
    fit(epochs=2, checkpoint=tmp_path, resume=True, log_every=2)
    both = json_records(tmp_path / "metrics.jsonl")
    assert both[:2] == first and [record["step"] for record in both] == [2, 4, 4, 6]
    assert both[2] == {"step": 4, "event": "resumed"}
    assert_close(both[3]["loss"], sum(fit(epochs=2).history["loss"][4:]) / 2)


LONG = {"step": 1, "text": "x" * 10_000}
LAST = {  # by name: what a file ends with, and what then stays of it
    "nothing": (b"", []),
    "complete": (b'{"step": 2}\n', [{"step": 2}]),
    "complete, no end": (b'{"step": 2}', [{"step": 2}]),
    "truncated number": (b'{"step": 2', []),
    "truncated long record": (json.dumps(LONG).encode()[:-1], []),
    "a line break is all": (b"\n", []),
    "zeros": (b"\0" * 5000, []),
    "record and zeros": (b'{"step": 2}' + b"\0" * 5000, []),
}


@pytest.mark.parametrize("name", LAST)
@pytest.mark.parametrize("before", [[], [LONG]], ids=["first", "second"])
def test_json_lines_continue_a_file_that_was_cut_off(name, before, tmp_path, caplog):
    (last, kept), path = LAST[name], tmp_path / "log.jsonl"
    path.write_bytes(b"".join(json.dumps(record).encode() + b"\n" for record in before) + last)
    log = JsonLines(path)
    log.write({"step": 3})
    log.close()
    assert [json.loads(line) for line in path.read_text().splitlines() if line] == [
        *before,
        *kept,
        {"step": 3},
    ]
    assert ("its last record is truncated, and is removed" in caplog.text) == (
        not last.endswith((b"\n", b"}")) and last != b""
    )


def test_json_lines_keep_a_last_line_that_is_no_record(tmp_path):
    (tmp_path / "log.jsonl").write_text("# notes")
    log = JsonLines(tmp_path / "log.jsonl")
    log.write({"step": 3})
    log.close()
    assert (tmp_path / "log.jsonl").read_text() == '# notes\n{"step": 3}\n'


def test_tensorboard_on_a_full_disk(tmp_path):
    """It names its file, and does not wait for a thread that the disk's error has ended."""
    log = TensorBoard(tmp_path / "tb")
    log.write({"step": 0, "loss": 0.5})
    with (
        room_for(4000),
        pytest.raises(
            OptionError, match=r"the file .*/tb/events\.out\..* cannot be written: File too large"
        ),
    ):
        for step in range(1, 1000):
            log.write({"step": step, "loss": 0.5})
    log.close()
    assert [event[0] for event in scalars(tmp_path / "tb")][:20] == [*range(20)]


@pytest.mark.parametrize("resume", [True, False])
def test_run_that_starts_again_says_so_in_every_log(resume, tmp_path):
    """The run before was killed before its first checkpoint; TensorBoard drops all of its steps, by
    its own event.
    """
    from tensorboardX.proto.event_pb2 import SessionLog

    for steps in (3, 5):
        fit(
            steps=steps,
            checkpoint=tmp_path / "run",
            log_every=1,
            loggers=[TensorBoard(tmp_path / f"tb{steps}")],
            resume=resume,
        )
        shutil.rmtree(tmp_path / "run" / "checkpoints")
    records = json_records(tmp_path / "run" / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3, 0, 1, 2, 3, 4, 5]
    assert records[3] == {"step": 0, "event": "started again"}
    starts = [
        event.step
        for event in events(tmp_path / "tb5")
        if event.session_log.status == SessionLog.START
    ]
    assert starts == [1], "from step 1 on, earlier events do not count"


@pytest.mark.parametrize(
    "bad",
    [print, "runs/log", Memory, type("Half", (), {"write": print})()],
    ids=["function", "path", "class", "half"],
)
def test_what_is_no_logger(bad):
    with pytest.raises(
        OptionError,
        match=r"has no write\(record\) and close\(\)\.\n    fix: an instance such as "
        r"spmd\.loggers\.Json",
    ):
        fit(loggers=[bad])


def test_a_logger_that_raises_does_not_lose_the_state(tmp_path):
    class Full(Memory):
        def write(self, record):
            raise OSError("no space left")

    with pytest.raises(
        CallbackError, match=r"^step 2: logger Full\.write raises OSError: no space left"
    ) as raised:
        fit(epochs=2, loggers=[Full()], log_every=2, checkpoint=tmp_path)
    assert isinstance(raised.value.__cause__, OSError)
    saved, lost = raised.value.__notes__
    assert saved == f"spmd: the state after step 3 was saved in {tmp_path}."
    assert lost.startswith(
        "spmd: and metrics of the last steps could not be written: CallbackError: step 3: logger "
        "Full.write raises OSError"
    )


@pytest.mark.parametrize("fails", ["callback", "logger"])
def test_steps_before_the_saved_state_are_all_logged(fails, tmp_path):
    """An error at step 2 leaves the state of a later step, which was dispatched by then: a resumed
    run does not train that one again.
    """

    class Second(Memory):
        def write(self, record):
            super().write(record)
            if fails == "logger" and record["step"] >= 2:
                raise OSError("no space left")

    def first(info):
        if fails == "callback" and info.step == 2:
            raise RuntimeError("mine")

    second, third = Second(), Memory()
    options = {"checkpoint": tmp_path, "log_every": 1}
    with pytest.raises(CallbackError, match=r"mine|no space left"):
        fit(epochs=2, **options, loggers=[second, third], callbacks=[first])
    steps = [*range(1, len(spmd.History.read(tmp_path)) + 1)]
    assert len(steps) > 2
    for records in (second.records, third.records, json_records(tmp_path / "metrics.jsonl")):
        assert [record["step"] for record in records] == steps
    fit(epochs=2, **options, resume=True)
    records = [record for record in json_records(tmp_path / "metrics.jsonl") if "loss" in record]
    expected = fit(epochs=2).history["loss"]
    assert [record["step"] for record in records] == [*range(1, len(expected) + 1)]
    assert_close([record["loss"] for record in records], expected)


def test_a_record_after_an_error_is_the_mean_since_the_last_one(tmp_path):
    def fail(info):
        if info.step == 7:
            raise RuntimeError("mine")

    with pytest.raises(CallbackError, match="mine"):
        fit(epochs=3, checkpoint=tmp_path, log_every=3, callbacks=[fail])
    losses = spmd.History.read(tmp_path)["loss"]
    records = json_records(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == [3, 6, 8]
    assert_close(records[2]["loss"], np.mean(losses[6:8]))
    assert records[1].keys() >= SPEED and not records[2].keys() & SPEED, (
        "the time to save would be a part of its rates"
    )


def test_records_after_an_error_are_in_the_order_of_steps(tmp_path):
    def fail(info):
        if info.step == 4:
            raise RuntimeError("mine")

    with pytest.raises(CallbackError, match="mine"):
        fit(epochs=2, checkpoint=tmp_path, log_every=1, watch=1, callbacks=[fail])
    records = json_records(tmp_path / "metrics.jsonl")
    assert [(record["step"], "loss" in record) for record in records] == [
        (step, kind) for step in range(1, 6) for kind in (False, True)
    ]


def test_steps_before_a_loss_that_is_not_finite_are_logged(tmp_path):
    data = numbers()
    data["x"][64, 0] = math.nan  # in the third of three batches
    with pytest.raises(spmd.errors.DivergedError):
        fit(data, epochs=1, shuffle=False, checkpoint=tmp_path, log_every=2)
    assert [
        (record["step"], record["loss"] is None)
        for record in json_records(tmp_path / "metrics.jsonl")
    ] == [(2, False), (3, True)]


@pytest.mark.parametrize("others", [0, 1])
def test_the_first_logger_that_fails_is_named(others):
    class Fails(Memory):
        def write(self, record):
            raise OSError("first")

    class FailsToo(Memory):
        def write(self, record):
            raise ValueError("second")

    with pytest.raises(CallbackError, match=r"logger Fails\.write raises OSError: first") as raised:
        fit(steps=1, loggers=[Fails(), *[FailsToo()] * others])
    notes = [
        note
        for note in getattr(raised.value, "__notes__", [])
        if "logger FailsToo.write raises ValueError: second" in note
    ]
    assert len(notes) == others


def test_the_extra_is_named_when_it_is_missing(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(spmd.errors.MissingExtraError) as raised:
        TensorBoard("runs")
    assert (
        str(raised.value)
        == "tensorboardX is not installed.\n    fix: in the checkout of spmd: pip install "
        "'.[tensorboard]'."
    )


def test_write_lets_a_logger_use_jax():
    import jax.numpy as jnp

    class Norms(Memory):
        def write(self, record):
            super().write(
                {**record, "twice": float(jnp.asarray(record["loss"]) * jnp.ones(()) * 2)}
            )

    memory = Norms()
    fit(steps=2, loggers=[memory], log_every=1)
    assert [record["twice"] for record in memory.records] == [
        2 * record["loss"] for record in memory.records
    ]
