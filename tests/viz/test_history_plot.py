"""The curve: a real picture, with every metric in it."""

import numpy as np
import pytest

import spmd
from spmd import viz
from spmd.run.history import History
from spmd.viz.history_plot import figure


def history(steps, *, evaluated=True):
    drawn = History(("loss", "accuracy"))
    for step in range(1, steps + 1):
        drawn.add_steps(step, np.array([[[5.0 / step, step / steps], [1.0, 1.0]]]))
        if evaluated and step % 10 == 0:
            drawn.add_evaluation(step, {"eval_loss": 6.0 / step, "eval_speed": 2.0})
    return drawn


def test_writes_a_png(tmp_path):
    path = viz.curve(history(100), tmp_path / "new" / "curve.png")
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n") and path.stat().st_size > 5000


def test_writes_what_the_suffix_says(tmp_path):
    assert "<svg" in viz.curve(history(5), str(tmp_path / "curve.svg")).read_text(encoding="utf-8")


def test_one_panel_per_metric_with_both_lines():
    panels = {axes.get_title(loc="left"): axes for axes in figure(history(100)).axes}
    assert list(panels) == ["loss", "accuracy", "speed"]
    labels = {
        name: [text.get_text() for text in axes.get_legend().get_texts()]
        for name, axes in panels.items()
    }
    assert labels == {
        "loss": ["train", "evaluation"],
        "accuracy": ["train"],
        "speed": ["evaluation"],
    }
    drawn = panels["loss"].get_lines()[0].get_xydata()
    np.testing.assert_array_equal(drawn, [(step, np.float32(5.0 / step)) for step in range(1, 101)])
    smooth = panels["loss"].get_lines()[1].get_xydata()
    assert len(smooth) == 99  # a window of 2 is full 99 times


def test_loss_over_orders_of_magnitude_is_logarithmic():
    wide, narrow = figure(history(100)).axes[0], figure(history(3)).axes[0]
    assert (wide.get_yscale(), narrow.get_yscale()) == ("log", "linear")


@pytest.mark.parametrize("empty", [History(("loss",)), History(())], ids=["no steps", "no names"])
def test_a_run_without_steps_is_drawn_as_such(empty, tmp_path):
    assert figure(empty).axes[0].texts[0].get_text() == "nothing was measured"
    assert viz.curve(empty, tmp_path / "curve.png").is_file()


def test_a_value_that_is_not_finite_leaves_a_gap(tmp_path):
    broken = History(("loss",))
    broken.add_steps(1, np.array([[[1.0], [1.0]], [[np.nan], [1.0]], [[2.0], [1.0]]]))
    assert viz.curve(broken, tmp_path / "curve.png").is_file()


def test_without_matplotlib_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(spmd.errors.MissingExtraError, match=r"pip install '\.\[examples\]'"):
        viz.curve(history(3), tmp_path / "curve.png")
