"""A run as one self-contained HTML page."""

import html
import os
import shlex
import sys
from pathlib import Path

from spmd.api import Result
from spmd.base.redact import redact_command
from spmd.base.user_paths import as_path, write_text
from spmd.errors import CheckpointError, OptionError, short_repr, type_name
from spmd.layout.summary import COLUMNS, notes, rows
from spmd.render.html import code_spans, document, folded, framed, table
from spmd.run.checkpoint import Checkpoint, as_checkpoint
from spmd.run.checkpoint_reader import check_run_folder
from spmd.run.goodput import TRAINING, duration
from spmd.run.run_facts import environment
from spmd.viz.device_map import mesh_table

STYLE = """
body { max-width: 66rem; margin: 2.5rem auto; padding: 0 1.2rem }
.spmd-cell dl { display: flex; flex-wrap: wrap; gap: .8rem 2.4rem; margin: 1.2rem 0 }
.spmd-cell dt { font-size: .85em; opacity: .75 }
.spmd-cell dd { margin: 0; font-size: 1.7rem; line-height: 1.2; font-variant-numeric: tabular-nums }
.spmd-cell .curves > div {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(min(24rem, 100%), 1fr)); gap: .8rem
}
.spmd-cell .curves svg { min-width: 0 }
"""
# files of a run's folder that the page links to
FILES = ("metrics.jsonl", "layout.toml", "goodput.html")


def report(
    result: Result,
    path: str | Path,
    *,
    title: str = "A run of spmd",
    checkpoint: str | Path | Checkpoint | None = None,
) -> Path:
    """Write a run as one self-contained HTML page: its headline figures first, then metrics,
    curves, profile, mesh, layout, checkpoints, and what it was run with.

    Args:
      result: of `fit`.
      path: of the page, which ends in .html.
      title: of the page.
      checkpoint: the folder, or the `Checkpoint`, that was passed to `fit`; the page links to its
        files.

    Returns:
      The path of the page, whose folder is created if needed.

    Raises:
      CheckpointError: there is no such checkpoint folder, or it is not that of a run.
      OptionError: an argument is of another type.

    Example:
      >>> import numpy as np
      >>> import optax, spmd, tempfile
      >>> model = spmd.FunctionalModel(
      ...     lambda key: {"w": np.zeros((1, 1), "f")}, lambda params, x: x @ params["w"]
      ... )
      >>> data = np.ones((8, 1), "f"), np.ones((8, 1), "f")
      >>> result = spmd.fit(
      ...     model,
      ...     data,
      ...     loss=spmd.losses.mean_squared_error,
      ...     optimizer=optax.sgd(0.1),
      ...     batch_size=8,
      ... )
      >>> page = report(result, tempfile.mkdtemp() + "/report.html", title="Ones")
      >>> "<h1>Ones</h1>" in page.read_text(encoding="utf-8")
      True
    """
    path = as_path(path, "path")
    config = as_checkpoint(checkpoint)
    if not isinstance(result, Result):
        raise OptionError(
            f"result={short_repr(result)} is {type_name(result)}.", fix="what spmd.fit returns."
        )
    if not isinstance(title, str):
        raise OptionError(f"title={short_repr(title)} is {type_name(title)}.", fix="a str.")
    folder = None
    if config is not None:
        folder = Path(config.path)
        check_run_folder(folder)
        names = ("checkpoints", *FILES)
        if not any((folder / name).exists() for name in names):
            why = (
                f"checkpoint={short_repr(str(folder))} is not the folder of a run: it has neither "
                f"checkpoints nor {FILES[0]}."
            )
            raise CheckpointError(
                why, fix="the folder that was passed to fit; None if there was none."
            )
    resolved = result.trainer.resolved
    goodput, profile = "", ""
    if result.goodput is not None:
        goodput = f"<h2>Time</h2>\n{result.goodput._repr_html_()}"
    if result.profile is not None:
        profile = f"<h2>Profile</h2>\n{result.profile._repr_html_()}"
    heading = f"<h1>{html.escape(title)}</h1>"
    curves_lead = "<p>Lines are training steps, dots are evaluations.</p>"
    placement = table(COLUMNS, rows(resolved))
    toml = html.escape(resolved.layout.to_toml())
    sections = [
        f"{heading}\n{_headline(result)}\n<p>{code_spans(_lead(result))}</p>",
        f"<h2>Curves</h2>\n{curves_lead}\n{_curves(result)}",
        f"<h2>Metrics</h2>\n{_metrics(result)}",
        goodput,
        profile,
        f"<h2>Mesh</h2>\n{mesh_table(result.trainer.mesh)}",
        f'<h2>Placement of every array</h2>\n<div class="wide">{placement}</div>',
    ]
    for line in notes(resolved):
        sections.append(f"<p>{html.escape(line)}</p>")
    sections.append(folded("The layout as TOML", f"<pre>{toml}</pre>"))
    sections.append(f"<h2>Checkpoints</h2>\n{_checkpoints(folder, path)}")
    sections.append(f"<h2>Run with</h2>\n{_environment()}")
    body = framed("\n".join(sections))
    return write_text(path, document(title, body, style=STYLE))


def _lead(result: Result) -> str:
    """Return the layout of a run, its steps, devices and workers, in a sentence."""
    resolved = result.trainer.resolved
    layout = resolved.layout
    stopped = ""
    if result.stop_reason:
        stopped = f", stopped because {result.stop_reason},"
    steps = int(result.state.step)
    devices = f"{resolved.mesh.size} devices, {resolved.workers} workers"
    reduction = f"gradients are reduced by {layout.gradients.reduction}."
    return (
        f"{layout.source}: {layout.description} {steps:,} steps{stopped} on {devices}; {reduction}"
    )


def _headline(result: Result) -> str:
    """Return the last evaluation, or the last training metrics, and the time of the run."""
    history = result.history
    values = {}
    for name, curve in history.curves().items():
        values_of_steps = list(curve.values())
        values[name] = values_of_steps[-1]
    for row in history.evaluations[-1:]:
        evaluated = {name: value for name, value in row.items() if name != "step"}
        values = evaluated or values
    figures = {}
    for name, value in values.items():
        figures[name.replace("eval_", "evaluation ")] = f"{value:.4g}"
    if result.goodput is not None:
        figures["time"] = duration(result.goodput.seconds)
        percent = 100 * result.goodput.share(TRAINING)
        figures["spent training"] = f"{percent:.0f} %"
    if result.samples_per_second is not None:
        figures["samples/s, training"] = f"{result.samples_per_second:,.0f}"
    parts = []
    for name, value in figures.items():
        term = f"<dt>{html.escape(name)}</dt>"
        parts.append(f"<div>{term}<dd>{html.escape(value)}</dd></div>")
    return f"<dl>{''.join(parts)}</dl>"


def _curves(result: Result) -> str:
    return f'<div class="curves">{result.history._repr_html_()}</div>'


def _metrics(result: Result) -> str:
    """Return a table of the last value of every metric, and its step."""
    history = result.history
    body = []
    for name, values in history.curves().items():
        for step, value in list(values.items())[-1:]:
            body.append((name, "train", f"{value:.6g}", step))
    for row in list(history.rows())[-1:]:
        for name, value in history.known().items():
            body.append((name, "train", f"{value:.6g}", row["step"]))
    for row in history.evaluations[-1:]:
        for name, value in row.items():
            if name != "step":
                metric = name.removeprefix("eval_")
                body.append((metric, "evaluation", f"{value:.6g}", row["step"]))
    if not body:
        return "<p>Nothing was measured.</p>"
    return table(("metric", "measured in", "last value", "step"), body)


def _checkpoints(folder: Path | None, page: Path) -> str:
    """Return the checkpoints of a run, and links from a page to the run's files."""
    if folder is None:
        return "<p>None were requested.</p>"
    home = folder / "checkpoints"
    steps = []
    if home.is_dir():
        # Orbax's unfinished saves have more than a number in their names.
        names = [entry.name for entry in home.iterdir()]
        steps = sorted(int(name) for name in names if name.isdigit())
    saved = ", ".join(f"step {step:,}" for step in steps) or "none saved yet"
    text = f"<p><code>{html.escape(str(home))}</code>: {saved}</p>"
    links = []
    for name in FILES:
        if (folder / name).exists():
            # a link has slashes on every system
            relative = os.path.relpath(folder / name, page.parent)
            target = Path(relative).as_posix()
            links.append(f'<a href="{html.escape(target)}">{name}</a>')
    if links:
        text += f"<p>Files of the run: {', '.join(links)}</p>"
    return text


def _environment() -> str:
    """Return a table of the command of this process, versions, devices and git state."""
    facts: dict[str, object] = {}
    is_interactive = hasattr(sys, "ps1") or "ipykernel" in sys.modules
    # the command of a notebook's process starts its kernel, and nothing else
    if not is_interactive:
        # sys.argv lacks the options of Python itself, such as -m. Pages are shared, so a key that
        # a script takes as an option must not be in them.
        facts["command"] = shlex.join(["python", *redact_command(sys.orig_argv[1:])])
    facts |= environment()
    body = [(name.replace("_", " "), str(value)) for name, value in facts.items()]
    return table(("", ""), body)
