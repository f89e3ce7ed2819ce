"""Public names for callbacks; see `spmd.run.callbacks`."""

from spmd.run.callbacks import Callback, CheckReplicas, Each, EarlyStopping, Info, StopAt, TerminateOnNaN

__all__ = ["Callback", "CheckReplicas", "Each", "EarlyStopping", "Info", "StopAt", "TerminateOnNaN"]
