"""Metrics for the common shapes of batches."""

from spmd.train.metrics import (
    PerExample,
    accuracy,
    f1,
    mean_absolute_error,
    precision,
    recall,
    top_k,
)
from spmd.train.sum_metrics import FromSums, auc, confusion, perplexity

__all__ = [
    "FromSums",
    "PerExample",
    "accuracy",
    "auc",
    "confusion",
    "f1",
    "mean_absolute_error",
    "perplexity",
    "precision",
    "recall",
    "top_k",
]
