"""Draw the schedule of a pipeline: the microbatch that each stage works on in each tick, and the
stages that are idle.
"""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, overload

from spmd.errors import OptionError, import_extra
from spmd.nn.schedule import MICROBATCHES, TIME_CHUNKS, Schedule
from spmd.render.picture import Picture

# colours of a stage's first group of layers, and of its last
FORWARD = ("#3566c0", "#9db8e6")
BACKWARD = ("#c4571f", "#eab795")
IDLE = "#80808040"
GAP = 0.06  # of a tick, before it
LEGIBLE = 100  # ticks; in longer schedules microbatches are not numbered


@overload
def schedule(given: Schedule | Mapping[str, Schedule], path: None = None) -> Picture: ...
@overload
def schedule(given: Schedule | Mapping[str, Schedule], path: str | Path) -> Path: ...
def schedule(
    given: Schedule | Mapping[str, Schedule], path: str | Path | None = None
) -> Picture | Path:
    """Draw a schedule: a picture for a notebook's cell, or a file (.png, .svg, .pdf).

    One line per stage, one cell per tick: blue forward, orange backward, grey idle; the number is
    the microbatch's. If a stage has several groups of layers, later ones are paler, and a tick is
    as much shorter as a group has fewer layers than the stage.

    Args:
      given: from `spmd.nn.schedule.make_schedule`; several, by title, are drawn below each other on
        the same axis of time. Its unit is the time in which a stage computes all its layers for a
        microbatch; forward and backward are drawn equally long.
      path: of the file; None: a picture.

    Returns:
      The path of the file, whose folder is created if needed; a `Picture` without a path.

    Raises:
      MissingExtraError: matplotlib is not installed (the extra `examples`).
      OptionError: not a schedule, or an unknown suffix.

    Example:
      >>> import tempfile
      >>> from spmd.nn.schedule import make_schedule
      >>> schedule(
      ...     make_schedule("1f1b", stages=4, microbatches=8), tempfile.mkdtemp() + "/1f1b.png"
      ... ).read_bytes()[1:4]
      b'PNG'
    """
    picture = Picture(schedule_figure(given))
    if path is None:
        return picture
    return picture.save(path)


def schedule_figure(pipelines: Schedule | Mapping[str, Schedule]) -> Any:
    """Return the drawing as a `matplotlib.figure.Figure`, without a window or global state."""
    schedules: Mapping[str, Schedule]
    if isinstance(pipelines, Mapping):
        schedules = pipelines
    else:
        schedules = {"": pipelines}
    parts = list(schedules.values())
    if not parts or not all(isinstance(part, Schedule) for part in parts):
        raise OptionError(
            f"schedule: {pipelines!r} is not a schedule.",
            fix="what make_schedule returns, or a dict of these by title.",
        )
    make = import_extra("matplotlib.figure", "examples").Figure
    length = max(pipeline.ticks / pipeline.groups for pipeline in parts)
    most_groups = max(pipeline.groups for pipeline in parts)
    # cells of the shortest tick, side by side
    cells = length * most_groups
    heights = [pipeline.stages + 1.6 for pipeline in parts]
    width = min(16.0, max(6.0, 0.26 * cells + 1))
    height = 0.5 + 0.26 * sum(heights)
    figure = make(figsize=(width, height), layout="constrained")
    # squeeze=False: one panel, too, comes in an array.
    panels = figure.subplots(len(parts), 1, sharex=True, squeeze=False, height_ratios=heights)
    panels = panels[:, 0]
    for axes, (title, pipeline) in zip(panels, schedules.items(), strict=True):
        _panel(axes, pipeline, numbered=cells <= LEGIBLE)
        axes.set_title(title or pipeline.name, loc="left", fontsize=11)
        axes.set_title(_summary(pipeline), loc="right", fontsize=9, color="#808080")
    panels[-1].set_xlim(0, length)
    units = {pipeline.unit for pipeline in parts}
    part = "a part"
    if len(units) == 1:
        names = {MICROBATCHES: "a microbatch", TIME_CHUNKS: "a chunk of time"}
        (unit,) = units
        part = names.get(unit, part)
    panels[-1].set_xlabel(f"time, in passes of {part} through a stage's layers", fontsize=9)
    return figure


def _summary(pipeline: Schedule) -> str:
    """Return the ticks of a schedule, its idle share, and the activations that it keeps."""
    text = f"{pipeline.ticks} ticks"
    unit = pipeline.unit
    if pipeline.groups > 1:
        text += f" of 1/{pipeline.groups} of the length"
        unit = "activations of a group"
    text += f", {pipeline.bubble:.1%} idle"
    all_work = itertools.chain.from_iterable(pipeline.table)
    if any(work and work.backward for work in all_work):
        text += f", at most {max(pipeline.in_flight)} {unit} kept"
    return text


def _panel(axes: Any, pipeline: Schedule, *, numbered: bool) -> None:
    """Draw one schedule."""
    width = 1 / pipeline.groups
    bar_width = (1 - GAP) * width
    number_style = {"ha": "center", "va": "center", "fontsize": 7}
    # by stage and colour, because matplotlib draws bars of one colour at once
    bars: dict[tuple[int, Any], list[tuple[float, float]]] = {}
    for tick, row in enumerate(pipeline.table):
        for stage, work in enumerate(row):
            colour: Any = IDLE
            if work is not None:
                colours = FORWARD
                if work.backward:
                    colours = BACKWARD
                colour = _between(colours, work.group, pipeline.groups)
            bars_of_colour = bars.setdefault((stage, colour), [])
            bars_of_colour.append(((tick + GAP) * width, bar_width))
            if work is not None and numbered:
                ink = "#111111"
                if work.group == 0 or pipeline.groups == 1:
                    ink = "white"
                middle = (tick + 0.5) * width
                axes.text(middle, stage, str(work.microbatch), color=ink, **number_style)
    for (stage, colour), spans in bars.items():
        axes.broken_barh(spans, (stage - 0.45, 0.9), facecolor=colour, linewidth=0)
    # stage 0 at the top
    axes.set_ylim(pipeline.stages - 0.4, -0.6)
    axes.set_yticks(range(pipeline.stages))
    axes.set_ylabel("stage", fontsize=9)
    axes.grid(visible=False)
    axes.tick_params(length=0, labelsize=8)
    axes.spines[:].set_visible(False)


def _between(pair: tuple[str, str], group: int, groups: int) -> tuple[float, ...]:
    """Return the colour of a group, from the first's to the last's."""
    share = 0.0
    if groups > 1:
        share = group / (groups - 1)
    first, last = map(_red_green_blue, pair)
    ends = zip(first, last, strict=True)
    return tuple(begin + share * (end - begin) for begin, end in ends)


def _red_green_blue(colour: str) -> tuple[float, ...]:
    """Return the three parts of a colour such as "#3566c0", from 0 to 1."""
    parts = bytes.fromhex(colour.removeprefix("#"))
    return tuple(part / 255 for part in parts)
