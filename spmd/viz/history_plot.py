"""The learning curves of a run: every metric over steps, in training and evaluation."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np

from spmd.errors import import_extra
from spmd.render.picture import Picture
from spmd.render.sparkline import LOG_RANGE
from spmd.run.history import History

COLOURS = ("#3566c0", "#c4571f")  # training, evaluation: they differ in lightness too


@overload
def curve(history: History, path: None = None) -> Picture: ...
@overload
def curve(history: History, path: str | Path) -> Path: ...
def curve(history: History, path: str | Path | None = None) -> Picture | Path:
    """Draw training and evaluation metrics over steps: a picture for a notebook's cell, or a file
    (.png, .svg, .pdf).

    One panel per metric: the thin line is each step's value, the thick one the moving average, dots
    are evaluations.

    Args:
      history: `result.history`, or `History.read(folder)`.
      path: of the file; None: a picture.

    Returns:
      The path of the file, whose folder is created if needed; a `Picture` without a path.

    Raises:
      MissingExtraError: matplotlib is not installed (the extra `examples`).
      OptionError: an unknown suffix.

    Example:
      >>> import tempfile
      >>> history = History(("loss",))
      >>> history.add_steps(1, np.array([[[6.0], [4.0]], [[2.0], [4.0]]]))
      >>> curve(history, tempfile.mkdtemp() + "/curve.png").read_bytes()[1:4]
      b'PNG'
    """
    picture = Picture(figure(history))
    if path is None:
        return picture
    return picture.save(path)


def figure(history: History) -> Any:
    """Return the drawing as a `matplotlib.figure.Figure`, without a window or global state."""
    make = import_extra("matplotlib.figure", "examples").Figure
    rows = list(history.rows())
    trained = history.curves()
    for name in history.known():
        values = {row["step"]: row[name] for row in rows}
        distinct = set(values.values())
        # a value that is the same in all steps is not measured, so not drawn
        if len(distinct) > 1:
            trained[name] = values
    evaluated: dict[str, list[tuple[int, float]]] = {}
    for row in history.evaluations:
        for name, value in row.items():
            evaluated.setdefault(name, []).append((row["step"], value))
    evaluated.pop("step", None)
    of_evaluations = [name.removeprefix("eval_") for name in evaluated]
    names = list(dict.fromkeys([*trained, *of_evaluations]))
    width = max(6.0, 4.6 * len(names))
    drawn = make(figsize=(width, 3.4), layout="constrained")
    subplots = drawn.subplots(1, max(1, len(names)))
    # For one panel, subplots returns it without an array.
    panels = np.atleast_1d(subplots)
    for axes, name in zip(panels, names or [""], strict=True):
        values_by_step = trained.get(name, {})
        training_points = _points(list(values_by_step.items()))
        evaluation_points = _points(evaluated.get(f"eval_{name}", []))
        _panel(axes, name, training_points, evaluation_points)
    return drawn


def _points(pairs: Sequence[tuple[int, float]]) -> np.ndarray:
    """Return pairs of (step, value) as an array [points, 2]."""
    # `reshape`, because an array of no points has one dim
    return np.array(pairs, float).reshape(-1, 2)


def _panel(axes: Any, name: str, trained: np.ndarray, evaluated: np.ndarray) -> None:
    """Draw one metric: arrays [points, 2] of (step, value)."""
    if len(trained):
        colour = COLOURS[0]
        steps, smooth = _smoothed(trained)
        axes.plot(*trained.T, color=colour, linewidth=0.7, alpha=0.35)
        axes.plot(steps, smooth, color=colour, linewidth=2, label="train")
    if len(evaluated):
        colour = COLOURS[1]
        dots = {"marker": "o", "markersize": 3.5}
        axes.plot(*evaluated.T, color=colour, linewidth=1.2, label="evaluation", **dots)
    values = np.concatenate([trained[:, 1], evaluated[:, 1]])
    # A run that diverged has inf and NaN.
    values = values[np.isfinite(values)]
    # A logarithmic axis has no place for 0.
    if name == "loss" and len(values) and values.min() > 0:
        if values.max() > LOG_RANGE * values.min():
            axes.set_yscale("log")
    axes.set_title(name.replace("_", " "), loc="left", fontsize=11)
    axes.set_xlabel("step")
    axes.grid(color="#80808040", linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    if len(trained) or len(evaluated):
        axes.legend(frameon=False)
    else:
        centred = {"ha": "center", "va": "center", "transform": axes.transAxes}
        axes.text(0.5, 0.5, "nothing was measured", **centred)


def _smoothed(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return steps and the moving average over a fiftieth of the run, for full windows only."""
    window = max(1, len(points) // 50)
    weights = np.full(window, 1 / window)
    average = np.convolve(points[:, 1], weights, mode="valid")
    first = window // 2
    last = first + len(average)
    return points[first:last, 0], average
