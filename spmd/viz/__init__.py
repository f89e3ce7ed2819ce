"""Pictures and pages of a run: its curve, and a report that one file holds whole."""

from spmd.viz.drawing import curve
from spmd.viz.page import report

__all__ = ["curve", "report"]
