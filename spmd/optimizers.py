"""Wrappers of optax optimizers."""

from spmd.train.weight_average import WeightAverage, average_weights

__all__ = ["WeightAverage", "average_weights"]
