"""What may be hung into the loop."""

from spmd.run.callbacks import Callback, CheckReplicas, Each, EarlyStopping, Info, StopAt, TerminateOnNaN

__all__ = ["Callback", "CheckReplicas", "Each", "EarlyStopping", "Info", "StopAt", "TerminateOnNaN"]
