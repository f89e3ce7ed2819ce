"""Cutting the forward pass along a mesh axis: schedules of pipelines."""
