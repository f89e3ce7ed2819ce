"""The timeline: every gradient where the clock has it, and nothing left out in silence."""

import re
from pathlib import Path

import numpy as np
import pytest

import spmd
from spmd import viz
from spmd.viz.server_timeline import COMPUTES, DROPPED, SENDS, timeline_figure

DOCS = Path(__file__).parents[2] / "docs"


def simulated(workers=4, steps=30, **words):
    words = {"compute_time": "exponential(1)", "network": {"bandwidth": "1kB/s"}} | words
    return spmd.simulate(
        spmd.ParameterServer(**words), workers=workers, steps=steps, bytes=(100.0, 50.0)
    )


def bars(axes, colour):
    """(left, right, line) of every bar of a colour, in order."""
    import matplotlib.colors

    intervals = []
    for drawn in axes.collections:
        if len(drawn.get_facecolor()) and tuple(
            drawn.get_facecolor()[0]
        ) == matplotlib.colors.to_rgba(colour):
            ends = [
                (
                    path.vertices[:, 0].min(),
                    path.vertices[:, 0].max(),
                    round(path.vertices[:, 1].mean()),
                )
                for path in drawn.get_paths()
            ]
            intervals += ends
    return sorted(intervals)


@pytest.mark.parametrize(
    "words",
    [{"spares": 1}, {"mode": "asynchronous", "max_staleness": 3}, {"mode": "local", "every": 4}],
    ids=str,
)
def test_every_gradient_is_where_the_clock_has_it(words):
    account = simulated(**words)
    axes, spans = timeline_figure(account, seconds=account.seconds).axes[0], account.spans
    lost, end = spans.arrived & ~spans.applied, account.seconds

    def inside(starts, stops, which):
        intervals = zip(starts[which], stops[which], spans.worker[which], strict=True)
        return sorted(
            (left, min(right, end), line) for left, right, line in intervals if left < end
        )

    assert bars(axes, COMPUTES) == inside(spans.began, spans.done, ~lost)
    assert bars(axes, DROPPED) == inside(spans.began, spans.done, lost) and lost.any() == (
        words.get("mode") != "local"
    )
    assert bars(axes, SENDS) == inside(spans.queued, spans.time, spans.time > spans.queued) != []
    ticks = next(
        drawn
        for drawn in axes.collections
        if len(drawn.get_segments() if hasattr(drawn, "get_segments") else ())
    )
    assert len(ticks.get_segments()) == account.updates


def test_what_is_left_out_is_said():
    account = simulated(workers=20, steps=100, mode="asynchronous", network={})
    drawn = timeline_figure(account, begin=1.0, seconds=2.0, workers=5)
    assert "15 more workers are not drawn" in drawn.axes[0].get_title(loc="right") and drawn.axes[
        0
    ].get_xlim() == (1.0, 3.0)
    assert f"1 to 3, of up to {account.seconds:,.4g}" in drawn.axes[0].get_xlabel()
    assert {line for *_, line in bars(drawn.axes[0], COMPUTES)} == set(range(5))
    full = timeline_figure(simulated(steps=3), seconds=1e6)
    assert full.axes[0].get_xlabel() == "simulated seconds" and "not drawn" not in full.axes[
        0
    ].get_title(loc="right")


def test_several_have_one_axis_of_time():
    drawn = timeline_figure({"one": simulated(), "other": simulated(mode="asynchronous")})
    assert [axes.get_title(loc="left") for axes in drawn.axes] == ["one", "other"]
    assert len({axes.get_xlim() for axes in drawn.axes}) == 1


@pytest.mark.parametrize(
    "more",
    [{"seconds": 0.0}, {"seconds": np.nan}, {"begin": 1e9}, {"begin": -1.0}, {"workers": 0}],
    ids=str,
)
def test_nothing_to_draw_is_an_error(more, tmp_path):
    with pytest.raises(spmd.errors.OptionError, match=r"nothing would be drawn(.|\n)*fix:"):
        viz.timeline(simulated(), tmp_path / "none.png", **more)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("more", [{"begin": None}, {"seconds": "2"}, {"workers": 1.5}], ids=str)
def test_an_interval_is_two_numbers_and_an_integer(more, tmp_path):
    with pytest.raises(spmd.errors.OptionError, match=r"expected two numbers and an integer"):
        viz.timeline(simulated(), tmp_path / "none.png", **more)


@pytest.mark.system
def test_what_the_docs_show_is_so(tmp_path, monkeypatch, capsys):
    """The command in the docs runs, and prints what stands below it."""
    section = (
        (DOCS / "parameter_server.md")
        .read_text(encoding="utf-8")
        .partition("## Simulate the clock")[2]
    )
    command, printed = re.findall(r"```(?:python|text)\n(.*?)```", section, re.DOTALL)[:2]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs" / "pictures").mkdir(parents=True)
    exec(command, {})
    assert capsys.readouterr().out == printed
    drawn, shown = (folder / "pictures" / "timeline.svg" for folder in (tmp_path / "docs", DOCS))
    assert drawn.stat().st_size > 50_000 and "currentColor" in drawn.read_text() and shown.is_file()
