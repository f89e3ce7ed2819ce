"""Wrappers of optax optimizers."""

from spmd.train.loss_scale import LossScale, scale_loss
from spmd.train.spike_skip import SpikeSkip, skip_spikes
from spmd.train.weight_average import WeightAverage, average_weights

__all__ = ["LossScale", "SpikeSkip", "WeightAverage", "average_weights", "scale_loss", "skip_spikes"]
