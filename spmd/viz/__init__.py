"""Pictures of a run, for a notebook's cell or a file: curves, the mesh, shards, server timelines,
pipelines; and an HTML report.
"""

from spmd.render.picture import Picture
from spmd.viz.collectives import collective
from spmd.viz.device_map import devices, pieces, shards
from spmd.viz.history_plot import curve
from spmd.viz.pipeline import schedule
from spmd.viz.run_page import report
from spmd.viz.server_timeline import timeline

__all__ = [
    "Picture",
    "collective",
    "curve",
    "devices",
    "pieces",
    "report",
    "schedule",
    "shards",
    "timeline",
]
