"""Pictures and pages of a run: its curve, a parameter server's clock, and a report that one file holds whole."""

from spmd.viz.drawing import curve
from spmd.viz.page import report
from spmd.viz.timeline import timeline

__all__ = ["curve", "report", "timeline"]
