"""`fit(profile=...)`: which steps are traced, what becomes of a profiler that hangs or fails, and
that the run is the same.
"""

import shutil
import tempfile
import threading

import jax
import numpy as np
import pytest
from small import fit, numbers, same

import spmd
from spmd.errors import OptionError
from spmd.program_cache.counts import compilations
from spmd.run.step_profiler import PAGE, Profile

INVALID = {
    "not a range": ("x", "two numbers of steps"),
    "one number": ("10", "two numbers of steps"),
    "open": ("10:", "two numbers of steps"),
    "other digits": ("٤:٨", "two numbers of steps"),
    "no text": (10, "two numbers of steps"),
    "backwards": ("15:10", '"10:15"'),
    "empty": ("10:10", '"10:15"'),
    "too many": ("0:101", "at most 100"),
}


def said(caplog):
    return [
        record.getMessage()
        for record in caplog.records
        if record.getMessage().startswith("profile")
    ]


@pytest.mark.parametrize("value, words", INVALID.values(), ids=INVALID)
def test_invalid_profile_is_refused_before_compiling(value, words):
    before = compilations()
    with pytest.raises(OptionError) as refused:
        fit(profile=value, steps=2)
    assert words in str(refused.value) and compilations() == before


@pytest.mark.parametrize(
    "options",
    [{"seconds": 0}, {"seconds": "1"}, {"folder": ""}, {"target": "4xcpu"}, {"target": "8xh101"}],
)
def test_invalid_options_of_profile_are_refused(options):
    with pytest.raises(OptionError):
        fit(profile=Profile("1:2", **options), steps=2)


def test_fix_of_a_target_of_another_size_works(tmp_path):
    with pytest.raises(OptionError, match="4 devices, and the mesh has 8") as refused:
        fit(profile=Profile("1:2", target="4xcpu"), steps=2)
    target = refused.value.fix.partition('"')[2].partition('"')[0]
    assert fit(profile=Profile("1:2", tmp_path, target=target), steps=2).profile.target == "1x8xcpu"


def test_profile_is_of_the_steps_asked_for_and_the_run_is_the_same(tmp_path, caplog):
    plain = fit(steps=6)
    result = fit(steps=6, profile="2:4", checkpoint=tmp_path)
    assert (
        same(plain.state, result.state)
        and list(plain.history["loss"]) == list(result.history["loss"])
        and plain.profile is None
    )
    profile = result.profile
    assert result.goodput["profiling"] > 0 == plain.goodput["profiling"]
    assert (profile.first, profile.last, profile.devices) == (3, 4, 8)
    assert profile.folder.is_relative_to(tmp_path / "profile") and profile.target == "1x8xcpu"
    page = (tmp_path / PAGE).read_text(encoding="utf-8")
    assert "exposed communication" in page and "reducing gradients" in page
    assert said(caplog) == [f"profile: {tmp_path / PAGE}"]


@pytest.mark.sampled(quick=2)
@pytest.mark.parametrize("devices", [1, 8])
def test_nothing_is_compiled_to_profile(devices, tmp_path):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("data",))
    runs = [
        fit(steps=4, mesh=mesh, profile=profile).compilations
        for profile in (None, None, Profile("2:3", tmp_path))
    ]
    programs = [run.compiled + run.loaded for run in runs]
    assert programs[1] == programs[2] > 0


def test_summary_is_printed_with_the_progress(tmp_path, capsys):
    result = fit(steps=4, profile=Profile("2:3", tmp_path), progress=True)
    assert str(result.profile) in capsys.readouterr().err


def test_run_that_ends_early_profiles_what_it_made(tmp_path, caplog):
    result = fit(steps=4, profile=Profile("2:9", tmp_path))
    assert (result.profile.first, result.profile.last) == (3, 4)
    assert (
        said(caplog)[0] == "profile: not all of steps 3 to 9, because the run ended after step 4."
    )


def test_run_that_never_reaches_the_steps_says_so(tmp_path, caplog):
    assert fit(steps=3, profile=Profile("5:9", tmp_path)).profile is None
    assert said(caplog) == [
        "profile: no trace of steps 6 to 9, because the run ended after step 3."
    ]


@pytest.mark.system
def test_steps_are_counted_from_the_start_of_training(tmp_path, caplog):
    fit(steps=4, checkpoint=tmp_path)
    resumed = fit(steps=7, checkpoint=tmp_path, resume=True, profile="5:6")
    assert (resumed.profile.first, resumed.profile.last) == (6, 6)
    caplog.clear()
    later = fit(steps=8, checkpoint=tmp_path, resume=True, profile="5:8")
    assert (
        later.profile.last == 8
        and said(caplog)[0] == "profile: not all of steps 6 to 8, because the run began at step 7."
    )
    caplog.clear()
    assert fit(steps=9, checkpoint=tmp_path, resume=True, profile="2:4").profile is None
    assert said(caplog) == ["profile: no trace of steps 3 to 4, because the run began at step 8."]
    assert repr(resumed.profile).startswith("StepProfile of step 6: ") and str(
        resumed.profile
    ).startswith("PROFILE of step 6 on 8 devices")


def test_calls_of_several_steps_are_traced_in_full(tmp_path):
    data = spmd.data.resident(numbers(160), steps_per_call=5)
    result = fit(data, epochs=4, profile=Profile("7:9", tmp_path))
    profile = result.profile
    assert (profile.first, profile.last) == (6, 10)
    assert any("note: 1 call of 5 steps" in note for note in profile.notes)
    parts = sum(
        line.measured
        for line in profile.kinds[: [line.name for line in profile.kinds].index("step")]
    )
    assert parts == pytest.approx(profile["step"].measured, rel=1e-9)


@pytest.mark.system
def test_calls_of_many_steps_are_refused_before_training(tmp_path):
    def data(steps_per_call):
        return spmd.data.resident(numbers(1280), steps_per_call=steps_per_call)

    options = {"batch_size": 8, "epochs": 1, "profile": Profile("7:9", tmp_path)}
    trained = []
    with pytest.raises(OptionError, match="makes 120 steps, and at most 100") as refused:
        fit(data(120), callbacks=[trained.append], **options)
    assert not trained and "steps_per_call=50" in refused.value.fix
    assert fit(data(50), **options).profile.last == 50


@pytest.mark.system
def test_title_names_the_steps_whose_numbers_are_shown(tmp_path):
    # of the 5 steps of an epoch the last one is a call of its own
    data = spmd.data.resident(numbers(160), steps_per_call=4)
    profile = fit(data, epochs=4, profile=Profile("1:8", tmp_path)).profile
    assert (profile.first, profile.last) == (
        1,
        9,
    ) and "note: these are steps 1 to 4, 6 to 9." in profile.notes
    assert any(note.startswith("note: 8 of 9 steps ran") for note in profile.notes)
    profile = fit(data, epochs=4, profile=Profile("4:8", tmp_path)).profile
    assert (profile.first, profile.last) == (6, 9) and profile.title.startswith("steps 6 to 9 on")


def test_waiting_for_data_is_between_steps(tmp_path):
    arrived = threading.Event()

    def batches():
        for number in range(6):
            if number == 4:
                arrived.wait(0.2)
            yield {name: rows[:32] for name, rows in numbers(32).items()}

    result = fit(batches, batch_size=None, epochs=1, prefetch=0, profile=Profile("2:6", tmp_path))
    assert result.profile["between steps"].measured > 0.04  # 0.2 s in three gaps
    assert any("wait" in note and "for data" in note for note in result.profile.notes)


@pytest.mark.sampled(quick=2)
@pytest.mark.parametrize("call", ["start_trace", "stop_trace"])
def test_profiler_that_hangs_is_abandoned(call, tmp_path, monkeypatch, caplog):
    released, stopped = threading.Event(), threading.Event()
    real_stop = jax.profiler.stop_trace

    def hang(*args, **options):
        released.wait(60)

    monkeypatch.setattr(jax.profiler, call, hang)
    if call == "start_trace":
        monkeypatch.setattr(jax.profiler, "stop_trace", stopped.set)
    plain, result = fit(steps=6), fit(steps=6, profile=Profile("2:4", tmp_path, seconds=0.05))
    assert same(plain.state, result.state) and result.profile is None
    what = "started" if call == "start_trace" else "stopped"
    assert said(caplog) == [
        f"profile: the profiler is abandoned: TimeoutError: it has not {what} within 0.05 seconds. "
        "Training continues."
    ]
    released.set()
    if call == "start_trace":
        assert stopped.wait(60)  # a trace that starts after all is stopped
    else:
        real_stop()


@pytest.mark.system
def test_profiler_that_fails_is_abandoned(tmp_path, caplog):
    with jax.profiler.trace(tmp_path / "mine"):  # there can be only one trace at a time
        result = fit(steps=4, profile=Profile("2:3", tmp_path))
    assert result.profile is None and len(result.history) == 4
    assert (
        len(said(caplog)) == 1
        and "is abandoned: RuntimeError: Profile has already been started" in said(caplog)[0]
    )
    assert said(caplog)[0].endswith("at a time. Training continues.")


def test_folder_that_cannot_be_made_is_refused_before_compiling(tmp_path):
    (tmp_path / "afile").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "profile").touch()
    before = compilations()
    for options in (
        {"profile": Profile("1:2", tmp_path / "afile")},
        {"profile": "1:2", "checkpoint": tmp_path / "run"},
    ):
        with pytest.raises(OptionError, match=r"cannot be created: .* is a file"):
            fit(steps=2, **options)
    assert compilations() == before


@pytest.mark.sampled(quick=2)
@pytest.mark.parametrize(
    ("at", "words"),
    [(1, "File exists"), (3, "is not a directory")],
    ids=["before it starts", "while it is made"],
)
def test_trace_that_cannot_be_written_does_not_keep_later_ones_from_starting(
    at, words, tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    traces = tmp_path / "traces"

    def replace_by_a_file(info):
        if info.step == at:
            shutil.rmtree(traces)
            traces.touch()

    result = fit(steps=7, callbacks=[replace_by_a_file], profile=Profile("2:6", traces))
    assert result.profile is None and len(said(caplog)) == 1 and words in said(caplog)[0]
    assert traces.is_file() and not any((tmp_path / "temporary").iterdir()), (
        "it still cannot be written"
    )
    assert fit(steps=4, profile=Profile("2:3", tmp_path / "other")).profile.last == 3


def test_folder_that_was_removed_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()

    def removed(info):
        if info.step == 2:
            shutil.rmtree(tmp_path / "traces")

    profile = fit(steps=5, callbacks=[removed], profile=Profile("1:4", tmp_path / "traces")).profile
    assert profile.last == 4 and profile.folder.is_relative_to(tmp_path / "traces")
    assert not any((tmp_path / "temporary").glob("spmd-profile-*"))


def test_trace_that_cannot_be_summarised_is_reported(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("spmd.planner.step_profile.read_trace", lambda path: [])
    result = fit(steps=4, profile=Profile("2:3", tmp_path))
    assert result.profile is None and len(result.history) == 4
    assert said(caplog)[0].endswith(
        "has no summary: ValueError: it has no operation of a training step. Training continues."
    )


def test_run_that_fails_stops_its_trace(tmp_path):
    def fail(info):
        if info.step == 3:
            raise RuntimeError("broken")

    with pytest.raises(spmd.errors.CallbackError):
        fit(steps=6, callbacks=[fail], profile=Profile("1:6", tmp_path))
    with jax.profiler.trace(tmp_path / "another"):  # which would raise if one were running
        np.asarray(jax.numpy.ones(1))


@pytest.mark.system
def test_traces_in_one_folder_are_not_confused(tmp_path):
    assert fit(steps=4, profile=Profile("2:3", tmp_path)).profile.last == 3
    second = fit(
        steps=4,
        profile=Profile("2:4", tmp_path),
        mesh=spmd.make_mesh("data=4", devices=jax.devices()[:4]),
    ).profile
    assert second.last == 4 and second["step"].measured > 0
