"""A run as one self-contained HTML page."""

import base64
import html
from pathlib import Path

from spmd.api import Result
from spmd.layout.summary import COLUMNS, notes, rows
from spmd.render.html import document, folded, framed, table
from spmd.user_paths import as_path, write_text
from spmd.viz.device_map import mesh_table
from spmd.viz.history_plot import curve

STYLE = """
body { max-width: 62rem; margin: 2.5rem auto; padding: 0 1.2rem }
img { max-width: 100%; background: #fff; border-radius: 4px }
@media (max-width: 45em) { img { max-width: none; width: 40rem } }
"""


def report(result: Result, path: str | Path, *, title: str = "A run of spmd", checkpoint: str | Path | None = None) -> Path:
    """Write a run as one self-contained HTML page: metrics, curve, profile, mesh, layout, and a list of its checkpoints.

    Args:
      result: of `fit`.
      path: of the page, which ends in .html.
      title: of the page.
      checkpoint: the checkpoint folder that was passed to `fit`.

    Returns:
      The path of the page, whose folder is created if needed.

    Raises:
      MissingExtraError: matplotlib is not installed (the extra `examples`).

    Example:
      >>> import numpy as np
      >>> import optax, spmd, tempfile
      >>> model = spmd.FunctionalModel(lambda key: {"w": np.zeros((1, 1), "f")}, lambda params, x: x @ params["w"])
      >>> data = np.ones((8, 1), "f"), np.ones((8, 1), "f")
      >>> result = spmd.fit(model, data, loss=spmd.losses.mean_squared_error, optimizer=optax.sgd(0.1), batch_size=8)
      >>> page = report(result, tempfile.mkdtemp() + "/report.html", title="Ones & zeros")
      >>> "<h1>Ones &amp; zeros</h1>" in page.read_text(encoding="utf-8")
      True
    """
    path, resolved = as_path(path, "path"), result.trainer.resolved
    layout = resolved.layout
    stopped = f", stopped because {result.stop_reason}," if result.stop_reason else ""
    steps = f"{int(result.state.step):,} steps{stopped} on {resolved.mesh.size} devices, {resolved.workers} workers"
    lead = f"{layout.source}: {layout.description} {steps}; gradients are reduced by {layout.gradients.reduction}."
    image = base64.b64encode(curve(result.history).png()).decode("ascii")
    sections = [
        f"<h1>{html.escape(title)}</h1>\n<p>{html.escape(lead)}</p>",
        f"<h2>Metrics</h2>\n{_metrics(result)}",
        f'<h2>Curve</h2>\n<img alt="metrics over steps" src="data:image/png;base64,{image}">',
        f"<h2>Profile</h2>\n{result.profile._repr_html_()}" if result.profile is not None else "",
        f"<h2>Mesh</h2>\n{mesh_table(result.trainer.mesh)}",
        f'<h2>Placement of every array</h2>\n<div class="wide">{table(COLUMNS, rows(resolved))}</div>',
        *(f"<p>{html.escape(line)}</p>" for line in notes(resolved)),
        folded("The layout as TOML", f"<pre>{html.escape(layout.to_toml())}</pre>"),
        f"<h2>Checkpoints</h2>\n{_checkpoints(checkpoint)}",
    ]
    return write_text(path, document(title, framed("\n".join(sections)), style=STYLE))


def _metrics(result: Result) -> str:
    """The last value of every metric, and the step it was measured at."""
    history = result.history
    trained = [{"step": step, name: value} for name, values in history.curves().items() for step, value in [*values.items()][-1:]]
    known = [{"step": row["step"], **history.known()} for row in list(history.rows())[-1:]]
    body = [
        (name.removeprefix("eval_"), kind, f"{value:.6g}", row["step"])
        for kind, rows in (("train", trained + known), ("evaluation", history.evaluations[-1:]))
        for row in rows
        for name, value in row.items()
        if name != "step"
    ]
    return table(("metric", "measured in", "last value", "step"), body) if body else "<p>Nothing was measured.</p>"


def _checkpoints(folder: str | Path | None) -> str:
    if folder is None:
        return "<p>None were requested.</p>"
    home = Path(folder) / "checkpoints"
    steps = sorted(int(entry.name) for entry in home.iterdir() if entry.name.isdigit()) if home.is_dir() else []
    saved = ", ".join(f"step {step:,}" for step in steps) or "none saved yet"
    return f"<p><code>{html.escape(str(home))}</code>: {saved}</p>"
