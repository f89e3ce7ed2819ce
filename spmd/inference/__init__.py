"""Trained models in use: the forward pass alone, exported to a folder that needs none of its code,
and ensembles.
"""
