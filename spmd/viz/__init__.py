"""Pictures and pages of a run: its curve, a parameter server's clock, a pipeline's schedule, and a report that one file holds whole."""

from spmd.viz.drawing import curve
from spmd.viz.page import report
from spmd.viz.pipeline import schedule
from spmd.viz.timeline import timeline

__all__ = ["curve", "report", "schedule", "timeline"]
