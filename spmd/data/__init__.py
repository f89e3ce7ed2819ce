"""Batches: cut from arrays, taken from iterables, or kept on the devices; checked, placed on the mesh, prefetched."""

from spmd.data.mnist import mnist
from spmd.data.resident import resident

__all__ = ["mnist", "resident"]
