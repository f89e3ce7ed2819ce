"""Public names for loggers; see `spmd.run.loggers`, `spmd.run.trackers` and
`spmd.run.known_trackers`.
"""

from spmd.run.known_trackers import Comet, MLflow, Trackio, Wandb
from spmd.run.loggers import JsonLines, Logger, TensorBoard
from spmd.run.run_facts import RunFacts
from spmd.run.trackers import Tracker
from spmd.train.histograms import Histogram

__all__ = [
    "Comet",
    "Histogram",
    "JsonLines",
    "Logger",
    "MLflow",
    "RunFacts",
    "TensorBoard",
    "Tracker",
    "Trackio",
    "Wandb",
]
