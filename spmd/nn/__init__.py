"""Modules and functions that a layout may cut along a mesh axis, and that run on one device as they stand."""

from spmd.nn.attention import attention as attention
from spmd.nn.embed import Embed as Embed
from spmd.nn.experts import MixtureOfExperts as MixtureOfExperts
from spmd.nn.experts import Routing as Routing
