"""A drawing that a notebook shows if it is the last value of a cell."""

import io
import re
from pathlib import Path
from typing import Any

from spmd.base.user_paths import as_path, make_folder, replace_file, wrap_os_errors
from spmd.errors import OptionError, import_extra
from spmd.render.html import Html, framed

DOTS = 130  # per inch
# In an SVG, black is the colour of the text around it, or that of the viewer's theme; greys are
# transparent.
ADAPTED = {
    "#000000": "currentColor",
    "#222222": "currentColor",
    "#555555": "currentColor",
    "#e4e4e4": "#88888840",
}
THEME = (
    "<style>svg{color:#1f2328}@media(prefers-color-scheme:dark){svg{color:#e6edf3}}"
    "text{fill:currentColor}</style>"
)


class Picture:
    """A drawing for a notebook's cell; `figure` is the `matplotlib.figure.Figure`, without a window
    or global state.

    Args:
      figure: of matplotlib.

    Example:
      >>> import spmd
      >>> account = spmd.simulate(spmd.ParameterServer(), workers=4, steps=20)
      >>> spmd.viz.timeline(account)
      Picture of 1430 x 292 dots; .save("name.png") writes it
    """

    def __init__(self, figure: Any):
        self.figure = figure

    def save(self, path: str | Path) -> Path:
        """Write it to a file in the format of the suffix (.png, .svg, .pdf); its folder is created
        if needed.

        Raises:
          OptionError: an unknown suffix.
        """
        path = as_path(path, "path")
        formats = self.figure.canvas.get_supported_filetypes()
        if path.suffix.removeprefix(".").lower() not in formats:
            raise OptionError(
                f'"{path}": the suffix does not name a format for pictures.',
                fix="such as .png, .svg or .pdf.",
            )
        make_folder(path.parent, OptionError)
        with wrap_os_errors(path, OptionError), replace_file(path) as part:
            if path.suffix.lower() == ".svg":
                part.write_text(self.svg(), encoding="utf-8")
            else:
                self.figure.savefig(part, format=path.suffix.removeprefix("."), dpi=DOTS)
        return path

    def svg(self) -> str:
        """Return the SVG of a file: without a background, and readable on a light and on a dark
        page.
        """
        return re.sub("(<svg[^>]*>)", rf"\1{THEME}", self._svg(), count=1)

    def _svg(self) -> str:
        """Return the SVG in the colour of the text around it."""
        buffer = io.StringIO()
        with import_extra("matplotlib", "examples").rc_context(
            {"svg.fonttype": "none", "svg.hashsalt": "spmd"}
        ):
            self.figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
        text = buffer.getvalue()
        # matplotlib writes an XML prologue, which has no place inside a page
        text = text[text.index("<svg") :]
        text = re.sub("<style.*?</style>|<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
        text = re.sub('font-family: [^;"]*', "font-family: sans-serif", text)
        return re.sub("|".join(ADAPTED), lambda match: ADAPTED[match[0]], text)

    def png(self) -> bytes:
        """Return a PNG, on the background of the figure."""
        buffer = io.BytesIO()
        self.figure.savefig(buffer, format="png", dpi=DOTS)
        return buffer.getvalue()

    def __repr__(self) -> str:
        wide, high = (round(DOTS * inches) for inches in self.figure.get_size_inches())
        return f'Picture of {wide} x {high} dots; .save("name.png") writes it'

    def _repr_html_(self) -> Html:
        wide = round(90 * self.figure.get_size_inches()[0])
        size = f'fill="currentColor" style="max-width:{wide}px" '
        return framed(
            re.sub('(<svg )(?:(?:width|height)="[^"]*" )*', rf"\1{size}", self._svg(), count=1)
        )
