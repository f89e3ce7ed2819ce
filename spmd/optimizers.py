"""Wrappers of optax optimizers."""

from spmd.train.loss_scale import LossScale, scale_loss
from spmd.train.optimizer_metrics import GradientNorm, measure_norm
from spmd.train.skipped_updates import SpikeSkip, skip_spikes
from spmd.train.weight_average import WeightAverage, average_weights

__all__ = [
    "GradientNorm",
    "LossScale",
    "SpikeSkip",
    "WeightAverage",
    "average_weights",
    "measure_norm",
    "scale_loss",
    "skip_spikes",
]
