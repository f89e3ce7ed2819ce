"""Metrics for the common shapes of batches."""

from spmd.train.metrics import PerExample, accuracy, mean_absolute_error

__all__ = ["PerExample", "accuracy", "mean_absolute_error"]
