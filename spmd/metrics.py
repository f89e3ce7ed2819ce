"""Metrics for the common shapes of batches."""

from spmd.train.metrics import PerExample, accuracy, f1, mean_absolute_error, precision, recall, top_k

__all__ = ["PerExample", "accuracy", "f1", "mean_absolute_error", "precision", "recall", "top_k"]
