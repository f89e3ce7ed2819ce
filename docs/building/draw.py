"""Draws docs/pictures/: what the README and the pages show.

    python docs/building/draw.py

Building the site draws all pictures anew, and fails if a file is not what is drawn.
"""

import functools
import os
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import spmd
from docs.building import charts, concepts, places
from spmd.layout.layout_files import shipped
from spmd.render.html import STYLE
from spmd.viz.collectives import KINDS

FOLDER = Path(__file__).resolve().parents[1] / "pictures"
LIGHT, DARK = "#1f2328", "#e6edf3"
COMMITTED: dict[str, Callable[[], str]] = {
    "mesh": concepts.mesh,
    "step": concepts.step,
    "decision_tree": concepts.decision_tree,
    **{f"kernel_{name}": partial(concepts.kernel, name) for name in concepts.SIX},
    **{f"collective_{name}": partial(spmd.viz.collective, name) for name in KINDS},
    "data_path": concepts.data_path,
    "restart": concepts.restart,
    "export": concepts.export,
    "packages": concepts.packages,
    **{
        picture.__name__: picture
        for picture in (places.hosts, places.servers, places.trials, places.copies)
    },
    "microbatches": places.microbatches,
    "memory": places.memory,
    "schedules": charts.schedules,
    "finetuning": charts.finetuning,
    "sweep": charts.sweep,
    "wavefront": charts.wavefront,
    "wavefront_schedule": charts.wavefront_schedule,
    "published": charts.published,
    "codecs": charts.codecs,
    "codec_bytes": charts.codec_bytes,
    "bandwidth_slow": partial(charts.bandwidth, "shared", "200 Mbit/s"),
    "bandwidth_duplex": partial(charts.bandwidth, "duplex", "200 Mbit/s"),
    "bandwidth_fast": partial(charts.bandwidth, "duplex", "unthrottled"),
    "overhead": charts.overhead,
    "input_csv": partial(charts.input_rates, "csv"),
    "input_array_record": partial(charts.input_rates, "array_record"),
    "processes": charts.processes,
    "checkpoints": charts.checkpoints,
    "restarts": charts.restarts,
}
PANELS = {
    "readme_kernel": charts.sharded_kernel,
    "readme_does_not_fit": partial(charts.verdict, "data_parallel"),
    "readme_fits": partial(charts.verdict, "fsdp"),
}
# 24, which only the site shows
ON_SITE = {f"layout_{name}": partial(concepts.layout_picture, name) for name in shipped()}
VARIABLES = re.search(r"--ink:.*?--k: #\w+;", STYLE, re.DOTALL)[0].replace("\n", "")
TEXT = (
    "text{font:12px "
    "system-ui,sans-serif;fill:currentColor}text.on{fill:#fff;paint-order:stroke;stroke:#000a;stroke-width:2.5px}"
)


@functools.cache
def drawn(name: str) -> str:
    """The `<svg>` of a picture, for a page that has the style of `spmd.render.html`; a file that is
    not drawn here, as it is.
    """
    of_theme = re.sub("_(light|dark)$", "", name)
    draw = COMMITTED.get(name) or PANELS.get(of_theme) or ON_SITE.get(name)
    if draw is None:
        return re.sub(
            "<style.*?</style>",
            "",
            (FOLDER / f"{name}.svg").read_text(encoding="utf-8"),
            flags=re.DOTALL,
        )
    return re.search(r"<svg.*</svg>", draw(), re.DOTALL)[0]


def file_text(name: str) -> str:
    """A picture as a file: with its style, and colours that follow the viewer's theme, or are those
    of one theme.
    """
    follows = (
        f"svg{{{VARIABLES}color:{LIGHT}}}@media(prefers-color-scheme:dark){{svg{{color:{DARK}}}}}"
    )
    fixed = {"light": LIGHT, "dark": DARK}.get(name.rpartition("_")[2])
    colours = f"svg{{{VARIABLES}color:{fixed}}}" if fixed else follows
    return re.sub("(<svg[^>]*>)", rf"\1<style>{colours}{TEXT}</style>", drawn(name), count=1) + "\n"


NAMES = [*COMMITTED, *(f"{name}_{theme}" for name in PANELS for theme in ("light", "dark"))]


def main() -> None:
    """Write all files, and remove those that are not drawn."""
    FOLDER.mkdir(exist_ok=True)
    for path in FOLDER.glob("*.svg"):
        # which the code in docs/parameter_server.md draws
        if path.stem not in (*NAMES, "timeline"):
            path.unlink()
    for name in NAMES:
        (FOLDER / f"{name}.svg").write_text(file_text(name), encoding="utf-8")


if __name__ == "__main__":
    main()
