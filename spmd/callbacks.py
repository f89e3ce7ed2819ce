"""Public names for callbacks; see `spmd.run.callbacks` and `spmd.inference.samples`."""

from spmd.inference.samples import Sample, Samples
from spmd.run.callbacks import Callback, Info
from spmd.run.known_callbacks import CheckReplicas, Each, EarlyStopping, StopAt, TerminateOnNaN

__all__ = [
    "Callback",
    "CheckReplicas",
    "Each",
    "EarlyStopping",
    "Info",
    "Sample",
    "Samples",
    "StopAt",
    "TerminateOnNaN",
]
