"""Where metrics can be written."""

from spmd.run.loggers import JsonLines, Logger, TensorBoard

__all__ = ["JsonLines", "Logger", "TensorBoard"]
