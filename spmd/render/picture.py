"""What drawings are when no file is asked for: a picture that a notebook shows where it is a cell's last line."""

import io
from pathlib import Path
from typing import Any

from spmd.errors import OptionError
from spmd.user_paths import as_path, make_folder, wrap_os_errors

DOTS = 130  # per inch of what is written and shown


class Picture:
    """A drawing, shown at the end of a notebook's cell; `figure` is the `matplotlib.figure.Figure`, with no window and no global state.

    Example:
      >>> import spmd
      >>> told = spmd.simulate(spmd.ParameterServer(), workers=4, steps=20)
      >>> spmd.viz.timeline(told)
      Picture of 1430 x 292 dots; .save("name.png") writes it
    """

    def __init__(self, figure: Any):
        self.figure = figure

    def save(self, path: str | Path) -> Path:
        """Into a file of the kind that its suffix says (.png, .svg, .pdf); its folder is made if it is not there.

        Raises:
          OptionError: a suffix that says nothing.
        """
        path, kinds = as_path(path, "path"), self.figure.canvas.get_supported_filetypes()
        if path.suffix.removeprefix(".").lower() not in kinds:
            raise OptionError(f'"{path}": its suffix does not say what kind of picture it is.', fix="such as .png, .svg or .pdf.")
        make_folder(path.parent, OptionError)
        with wrap_os_errors(path, OptionError):
            self.figure.savefig(path, dpi=DOTS)
        return path

    def png(self) -> bytes:
        """The bytes of the PNG that a cell shows; its paper is white, on a dark page too."""
        buffer = io.BytesIO()
        self.figure.savefig(buffer, format="png", dpi=DOTS)
        return buffer.getvalue()

    def __repr__(self) -> str:
        wide, high = (round(DOTS * inches) for inches in self.figure.get_size_inches())
        return f'Picture of {wide} x {high} dots; .save("name.png") writes it'

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        wide, high = (round(90 * inches) for inches in self.figure.get_size_inches())
        return self.png(), {"width": wide, "height": high}
