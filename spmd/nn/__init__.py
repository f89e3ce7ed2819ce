"""Cutting the forward pass along a mesh axis: schedules of pipelines; and a pool that is fast where others are not."""

from spmd.nn.pool import max_pool2 as max_pool2
