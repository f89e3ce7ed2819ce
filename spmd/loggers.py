"""Public names for loggers; see `spmd.run.loggers` and `spmd.run.trackers`."""

from spmd.run.loggers import JsonLines, Logger, TensorBoard
from spmd.run.run_facts import RunFacts
from spmd.run.trackers import MLflow, Tracker, Trackio, Wandb
from spmd.train.histograms import Histogram

__all__ = ["Histogram", "JsonLines", "Logger", "MLflow", "RunFacts", "TensorBoard", "Tracker", "Trackio", "Wandb"]
