"""Weights of others: folders of safetensors files, read to where a layout keeps them, and written
again.

Example:
  >>> import spmd
  >>> spmd.pretrained.load.__name__
  'load'
"""

from spmd.pretrained.adapters import load_adapters, save_adapters
from spmd.pretrained.folders import load, save

__all__ = ["load", "load_adapters", "save", "save_adapters"]
