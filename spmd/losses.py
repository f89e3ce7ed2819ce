"""Losses for the common shapes of batches."""

from spmd.train.chunked_cross_entropy import cross_entropy_from_features
from spmd.train.losses import cross_entropy, mean_squared_error, next_token, of_parts

__all__ = [
    "cross_entropy",
    "cross_entropy_from_features",
    "mean_squared_error",
    "next_token",
    "of_parts",
]
