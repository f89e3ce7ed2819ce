"""Public names for runs under Ray Train; see `spmd.run.ray_report`."""

from spmd.run.ray_report import report

__all__ = ["report"]
