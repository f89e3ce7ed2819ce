"""Losses for the common shapes of batches."""

from spmd.train.losses import cross_entropy, mean_squared_error, of_parts

__all__ = ["cross_entropy", "mean_squared_error", "of_parts"]
