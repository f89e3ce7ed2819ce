"""Gradient communication: collectives, reductions and codecs."""
