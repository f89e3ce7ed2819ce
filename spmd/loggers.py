"""Public names for loggers; see `spmd.run.loggers`."""

from spmd.run.loggers import JsonLines, Logger, TensorBoard

__all__ = ["JsonLines", "Logger", "TensorBoard"]
