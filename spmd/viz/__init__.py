"""Pictures of a run, for a notebook's cell or a file: curve, mesh, a parameter server's clock, a pipeline's schedule; and a report."""

from spmd.viz.clock import timeline
from spmd.viz.drawing import curve
from spmd.viz.page import report
from spmd.viz.picture import Picture
from spmd.viz.pipeline import schedule
from spmd.viz.placing import devices, pieces

__all__ = ["Picture", "curve", "devices", "pieces", "report", "schedule", "timeline"]
