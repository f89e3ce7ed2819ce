"""What may be hung into the loop."""

from spmd.run.callbacks import Callback, Each, EarlyStopping, Info, StopAt, TerminateOnNaN

__all__ = ["Callback", "Each", "EarlyStopping", "Info", "StopAt", "TerminateOnNaN"]
