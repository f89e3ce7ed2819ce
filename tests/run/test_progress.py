"""Live progress: silent without a terminal, a bar in a terminal, plain lines on request."""

import io
import logging
import os
import re
import threading
import time
from types import SimpleNamespace

import pytest
from rich.console import Console
from small import fit, numbers

from spmd.base.log_info import log_info
from spmd.errors import CallbackError, OptionError
from spmd.run import progress
from spmd.run.progress import NoProgress, Pace, Progress, make_progress


def test_auto_is_silent_without_a_terminal(capfd):
    fit(epochs=2, eval_data=numbers(40, 1))  # progress="auto" is the default
    assert capfd.readouterr() == ("", "")


def test_false_is_silent(capfd):
    fit(epochs=2, progress=False)
    assert capfd.readouterr() == ("", "")


def test_true_prints_lines_anywhere(capfd):
    result = fit(epochs=2, eval_data=numbers(40, 1), progress=True)
    out, lines = capfd.readouterr()
    assert out == ""
    assert f"step 1/6  epoch 1  loss {result.history['loss'][0]:.4g}" in lines
    assert "samples/s" in lines and "\x1b" not in lines
    for evaluation in result.history.evaluations:
        assert f"step {evaluation['step']}: eval_loss {evaluation['eval_loss']:.4f}" in lines


@pytest.fixture
def console(monkeypatch):
    """A terminal that remembers what was written to it."""
    made = Console(file=io.StringIO(), force_terminal=True, width=150)
    monkeypatch.setattr("rich.console.Console", lambda *given, **options: made)
    return made


HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"  # the cursor


def test_an_update_after_no_time_keeps_the_rate(console):
    """Many steps may end at once, as those of a call of a sweep: their number over the time since
    the last redraw is no speed.
    """
    display = make_progress("auto")
    display.start(0, 40)
    display.begin(Pace(0, 1000.0))
    display.update(20, 1, {"loss": 0.5}, Pace(640, 1010.0))
    display.update(40, 1, {"loss": 0.5}, Pace(1280, 1010.0 + progress.REFRESH_SECONDS / 100))
    display.close()
    assert set(re.findall(r"([\d,]+) samples/s", console.file.getvalue())) == {"64"}


def rates_shown(console):
    return re.findall(r"([\d,]+) samples/s", console.file.getvalue())


def test_nothing_compiled_counts_in_the_rate(console):
    """Without a pace to begin at, the first update begins the measurement: it came after a program
    was compiled.
    """
    display = make_progress("auto")
    display.start(0, 40)
    display.update(1, 0, {"loss": 0.5}, Pace(32, 100.0))
    assert rates_shown(console) == []
    display.update(21, 0, {"loss": 0.5}, Pace(672, 110.0))
    assert set(rates_shown(console)) == {"64"}


def test_the_last_update_shows_the_rate_of_the_whole_run(console):
    display = make_progress("auto")
    display.start(0, 40)
    display.begin(Pace(0, 0.0))
    display.update(20, 0, {"loss": 0.5}, Pace(640, 10.0))
    display.update(30, 0, {"loss": 0.5}, Pace(960, 30.0, waited=15.0))
    display.update(40, 0, {"loss": 0.5}, Pace(1280, 40.0, waited=20.0), last=True)
    display.close()
    assert (
        rates_shown(console)[-1] == "32"
        and "50% waiting for data" in console.file.getvalue().rpartition("40/40")[2]
    )


def test_the_last_line_has_the_rate_of_the_result(capfd):
    result = fit(epochs=4, progress=True)
    assert (
        re.findall(r"([\d,]+) samples/s", capfd.readouterr().err)[-1]
        == f"{result.samples_per_second:,.0f}"
    )


def test_a_narrow_terminal_wraps_between_words_and_splits_no_path(console):
    console.width = 40
    path = "/home/ada/experiments-of-november/runs/digits-with-a-long-name"
    make_progress("auto").say(
        f"interrupted after step 7: the checkpoint is in {path}, and fit(..., resume=True) resumes "
        "from it."
    )
    assert console.file.getvalue().splitlines() == [
        "interrupted after step 7: the checkpoint",
        "is in",
        f"{path},",
        "and fit(..., resume=True) resumes from",
        "it.",
    ]


def test_resumed_run_says_so_without_a_terminal(tmp_path, caplog):
    fit(steps=2, checkpoint=tmp_path)
    assert "resumed" not in caplog.text
    fit(steps=3, checkpoint=tmp_path, resume=True)
    lines = [
        (record.levelname, record.getMessage())
        for record in caplog.records
        if "resumed" in record.getMessage()
    ]
    assert lines == [("INFO", f"resumed from step 2 of {tmp_path}")]


def test_info_is_shown_where_warnings_are(caplog, capfd, monkeypatch):
    logger = logging.getLogger("spmd")
    log_info("100 % seen")
    # as in a script where nothing has set up logging
    monkeypatch.setattr(logger, "hasHandlers", lambda: False)
    log_info("printed")
    for level in (logging.WARNING, logging.ERROR):  # which the user has chosen
        monkeypatch.setattr(logger, "level", level)
        logger.manager._clear_cache()
        log_info("not seen")
    logger.manager._clear_cache()
    assert caplog.messages == ["100 % seen"] and capfd.readouterr() == ("", "printed\n")


def test_a_terminal_shows_a_bar(console, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    display = make_progress("auto")
    display.start(0, 40)
    display.begin(Pace(0, 0.0))
    assert display.due()
    display.update(20, 1, {"loss": 0.12345, "accuracy": 0.5}, Pace(640, 10.0))
    assert not display.due()  # redrawn a few times per second, not at every step
    now[0] += progress.REFRESH_SECONDS
    assert display.due()
    display.say("step 20: eval_loss 0.5")
    display.close()
    text = console.file.getvalue()
    for part in (
        "20/40",
        "epoch 2",
        "loss 0.1235",
        "accuracy 0.5",
        "64 samples/s",
        "step 20: eval_loss 0.5",
        "━",
    ):
        assert part in text, text
    assert text.count(HIDE) == text.count(SHOW) == 1  # hidden, and back


@pytest.mark.parametrize("width", [20, 40, 80, 100, 150])
def test_a_bar_always_shows_the_step_and_the_time_left(width, monkeypatch):
    made = Console(file=io.StringIO(), force_terminal=True, width=width)
    monkeypatch.setattr("rich.console.Console", lambda *given, **options: made)
    display, clock = make_progress(True), iter(range(100, 300))
    monkeypatch.setattr(display._bar, "get_time", lambda: float(next(clock)))
    display.start(0, 12000)
    for step in (57, 570, 5700):
        display.update(
            step,
            30,
            {"loss": 1.2761234, "accuracy": 0.71881234, "eval_loss": 0.08728, "eval_accuracy": 0.5},
            Pace(64 * step, float(step)),
        )
    display.close()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", made.file.getvalue())
    assert "57/12000" in text and "5700/12000" in text and "…" not in text
    assert re.search(r"5700/12000 (━\S* )?\d:\d\d:\d\d", text), text
    assert max(len(line) for line in re.split(r"[\r\n]+", text)) <= width
    shown = {part: part in text for part in ("━", "epoch 31", "loss 1.276", "samples/s", "▁▁")}
    left = {20: 0, 40: 2, 80: 3, 100: 3, 150: 5}[width]  # they give way from the last on
    assert list(shown.values()) == [at < left for at in range(len(shown))], text


def test_a_run_draws_itself_in_a_terminal_and_leaves_it_as_it_was(console, monkeypatch):
    monkeypatch.setattr(progress, "REFRESH_SECONDS", 0.0)
    result = fit(epochs=2, eval_data=numbers(40, 1))
    text = console.file.getvalue()
    assert f"loss {result.history['loss'][-1]:.4g}" in text and "6/6" in text
    assert f"step 6: eval_loss {result.history['eval_loss'][-1]:.4f}" in text
    assert text.count(HIDE) == text.count(SHOW) == 1


def test_an_error_leaves_the_terminal_as_it_was(console):
    def fail(info):
        raise RuntimeError("mine")

    with pytest.raises(CallbackError, match=r"callback fail\.on_step raises RuntimeError: mine"):
        fit(epochs=2, callbacks=[fail])
    assert console.file.getvalue().count(HIDE) == console.file.getvalue().count(SHOW) == 1


def test_a_display_without_a_reader_ends_no_run(monkeypatch):
    read, written = os.pipe()
    os.close(read)
    with io.TextIOWrapper(io.FileIO(written, "w"), write_through=True) as stream:
        monkeypatch.setattr("sys.stderr", stream)
        assert int(fit(steps=2, progress=True).state.step) == 2
        monkeypatch.undo()


def wait_for(console, text):
    """Wait until a thread has shown this text."""
    # a bound of a wait that the text ends, however fast or slow the machine is
    given_up = time.monotonic() + 120
    while text not in console.file.getvalue():
        assert time.monotonic() < given_up, console.file.getvalue()
        time.sleep(0.001)


@pytest.fixture
def clock(monkeypatch):
    """The clock of displays, which look at it all the time."""
    now = [1000.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(progress, "TICK_SECONDS", 0.001)
    return now


def test_what_is_done_is_shown_before_the_bar_and_beside_it(console, clock):
    display = make_progress("auto")
    with display.doing("tracing"):
        assert console.file.getvalue().startswith("\r\x1b[Ktracing")
        clock[0] += 12
        wait_for(console, "\r\x1b[Ktracing (12 s)")
    assert console.file.getvalue().endswith("\r\x1b[K")
    display.start(0, 40)
    with display.doing("evaluating"):
        clock[0] += 5
        with display.doing("compiling"):
            clock[0] += 7
            wait_for(console, "-:--:--\x1b[0m compiling (7 s)")
        wait_for(console, "-:--:--\x1b[0m evaluating (12 s)")
    display.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "spmd progress"]


def test_a_log_says_what_takes_long(monkeypatch, clock):
    made = Console(file=io.StringIO(), width=80)
    monkeypatch.setattr("rich.console.Console", lambda *given, **options: made)
    display = make_progress(True)
    for _ in range(2):
        with display.doing("compiling"):
            clock[0] += 4.9
        with display.doing("compiling"):
            for seconds in (5, 11):
                clock[0] += seconds
                wait_for(made, f"compiling ({seconds if seconds == 5 else 16} s)\n")
        assert made.file.getvalue() == "compiling (5 s)\ncompiling (16 s)\n"
        made.file.truncate(made.file.seek(0))


def test_what_is_done_is_no_longer_shown_after_an_error(console):
    display = make_progress(True)
    with pytest.raises(KeyError), display.doing("tracing"):
        raise KeyError
    assert console.file.getvalue().endswith("\r\x1b[K")


def test_the_length_of_a_run_may_be_unknown(console):
    display = make_progress(True)
    display.start(3, None)
    display.update(4, 0, {"loss": 1.0}, Pace(32, 1.0))
    display.close()
    assert "4/?" in console.file.getvalue()


def test_metrics_are_not_read_as_markup(console):
    display = make_progress(True)
    display.start(0, 10)
    display.say("[red] stays [/red]")
    display.update(1, 0, {"[bold]x": 1.0}, Pace(32, 1.0))
    display.close()
    assert (
        "[red] stays [/red]" in console.file.getvalue() and "[bold]x 1" in console.file.getvalue()
    )


def test_what_can_be_asked_for():
    assert not isinstance(make_progress(True), NoProgress)
    assert isinstance(make_progress(False), NoProgress) and isinstance(
        make_progress("auto"), NoProgress
    )
    with pytest.raises(OptionError) as raised:
        make_progress("yes")
    assert str(raised.value) == "progress='yes'.\n    fix: True, False or \"auto\"."


def test_no_progress_has_all_the_methods():
    public = {name for name in vars(Progress) if not name.startswith("_")}
    assert public == {name for name in vars(NoProgress) if not name.startswith("_")}
    assert isinstance(make_progress(True), Progress)


def test_a_notebook_is_where_cells_run_not_where_its_kernel_was_imported(monkeypatch):
    import ipykernel.ipkernel  # noqa: F401
    import IPython

    assert isinstance(make_progress("auto"), NoProgress)
    for shell, painted in (
        (type("Terminal", (), {})(), False),
        (type("Cells", (), {"kernel": None})(), True),
    ):
        monkeypatch.setattr(IPython, "get_ipython", lambda shell=shell: shell)
        assert isinstance(make_progress("auto"), NoProgress) != painted


def test_a_notebook_shows_evaluations_as_points_of_the_curve(monkeypatch, capsys):
    import IPython.display

    shown = []
    handle = SimpleNamespace(update=lambda content, raw: shown.append(content))
    monkeypatch.setattr(progress, "_in_kernel", lambda: True)
    monkeypatch.setattr(IPython.display, "display", lambda *given, **options: handle)
    display = make_progress("auto")
    with display.doing("tracing"):
        assert shown == [{"text/plain": "tracing"}]
    display.start(0, 40)
    for step in (10, 20):
        display.update(step, 0, {"loss": 2.0 / step}, Pace(32 * step, float(step)))
        display.evaluated(step, {"eval_loss": 3.0 / step, "eval_accuracy": 0.75})
    display.close()
    last = shown[-1]
    assert (
        "20/40" in last["text/plain"] and "eval_loss 0.15  eval_accuracy 0.75" in last["text/plain"]
    )
    assert last["text/html"].count("<circle") == 2 and last["text/html"].count("<polyline") == 1
    assert capsys.readouterr().out == ""


def test_the_compiled_first_step_is_in_no_rate(monkeypatch, capfd):
    """A clock by which the first call takes 1,001 seconds, and each after it one."""

    def pace(self):
        return Pace(
            self._run.samples, 1000.0 + self._run.samples / 32 if self._run.samples else 0.0
        )

    monkeypatch.setattr("spmd.run.step_metrics.StepMetrics.pace", pace)
    result = fit(epochs=8, progress=True)
    assert result.samples_per_second == 32, (
        "the 22 calls after the first two, of 32 rows and one second each"
    )
    assert re.findall(r"([\d,]+) samples/s", capfd.readouterr().err)[-1] == "32"
