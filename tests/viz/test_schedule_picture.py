"""Schedules of pipelines as pictures."""

import pytest

from spmd.nn.schedule import TIME_CHUNKS, make_schedule
from spmd.viz.pipeline import schedule_figure

pytest.importorskip("matplotlib")


def test_schedules_are_drawn_in_time():
    """Two groups of layers have more ticks and end sooner: a tick is half as long."""
    pair = {
        "gpipe": make_schedule("gpipe", stages=4, microbatches=8),
        "circular": make_schedule("circular", stages=4, microbatches=8, groups=2),
    }
    figure = schedule_figure(pair)
    ends = {}
    for axes, name in zip(figure.axes, pair, strict=True):
        ends[name] = round(
            max(
                path.vertices[:, 0].max() for bars in axes.collections for path in bars.get_paths()
            ),
            9,
        )
    assert ends == {"gpipe": 22, "circular": 19} and pair["circular"].ticks == 38
    assert figure.axes[1].get_xlabel() == "time, in passes of a microbatch through a stage's layers"
    wavefront = schedule_figure(make_schedule("gpipe", stages=4, microbatches=8, unit=TIME_CHUNKS))
    assert (
        wavefront.axes[0].get_xlabel()
        == "time, in passes of a chunk of time through a stage's layers"
    )
    assert "38 ticks of 1/2 of the length" in figure.axes[1].get_title(loc="right")
