"""Live progress: silent without a terminal, a bar in a terminal, plain lines on request."""

import io
import re
from types import SimpleNamespace

import pytest
from rich.console import Console
from small import fit, numbers

from spmd.errors import CallbackError, OptionError
from spmd.run import progress
from spmd.run.progress import NoProgress, Progress, make_progress


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
    assert f"step 1/6  epoch 1  loss {result.history['loss'][0]:.4g}  " in lines
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


def test_a_terminal_shows_a_bar(console, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    display = make_progress("auto")
    display.start(0, 40)
    assert display.due()
    now[0] += 10.0
    display.update(20, 1, {"loss": 0.12345, "accuracy": 0.5}, 640)
    assert not display.due()  # redrawn a few times per second, not at every step
    now[0] += progress.REFRESH_SECONDS
    assert display.due()
    display.say("step 20: eval_loss 0.5")
    display.close()
    text = console.file.getvalue()
    for part in ("20/40", "epoch 2", "loss 0.1235", "accuracy 0.5", "64 samples/s", "step 20: eval_loss 0.5", "━"):
        assert part in text, text
    assert text.count(HIDE) == text.count(SHOW) == 1  # hidden, and back


@pytest.mark.parametrize("width", [40, 80, 100, 150])
def test_a_bar_always_shows_the_step_and_the_time_left(width, monkeypatch):
    made = Console(file=io.StringIO(), force_terminal=True, width=width)
    monkeypatch.setattr("rich.console.Console", lambda *given, **options: made)
    display, clock = make_progress(True), iter(range(100, 300))
    monkeypatch.setattr(display._bar, "get_time", lambda: float(next(clock)))
    display.start(0, 12000)
    for step in (57, 570, 5700):
        display.update(step, 30, {"loss": 1.2761234, "accuracy": 0.71881234, "eval_loss": 0.08728, "eval_accuracy": 0.5}, 64 * step)
    display.close()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", made.file.getvalue())
    assert "57/12000" in text and "5700/12000" in text and "…" not in text
    assert re.search(r"5700/12000 \S+ \d:\d\d:\d\d epoch 31", text), text
    assert max(len(line) for line in re.split(r"[\r\n]+", text)) <= width
    assert ("epoch 31" in text) and ("loss 1.276" in text) == (width >= 80)


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


def test_the_length_of_a_run_may_be_unknown(console):
    display = make_progress(True)
    display.start(3, None)
    display.update(4, 0, {"loss": 1.0}, 32)
    display.close()
    assert "4/?" in console.file.getvalue()


def test_metrics_are_not_read_as_markup(console):
    display = make_progress(True)
    display.start(0, 10)
    display.say("[red] stays [/red]")
    display.update(1, 0, {"[bold]x": 1.0}, 32)
    display.close()
    assert "[red] stays [/red]" in console.file.getvalue() and "[bold]x 1" in console.file.getvalue()


def test_what_can_be_asked_for():
    assert not isinstance(make_progress(True), NoProgress)
    assert isinstance(make_progress(False), NoProgress) and isinstance(make_progress("auto"), NoProgress)
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
    for shell, painted in ((type("Terminal", (), {})(), False), (type("Cells", (), {"kernel": None})(), True)):
        monkeypatch.setattr(IPython, "get_ipython", lambda shell=shell: shell)
        assert isinstance(make_progress("auto"), NoProgress) != painted
