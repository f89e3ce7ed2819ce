"""A layout's `[gradients]` and `[parameter_server]`, applied to a model on a mesh with the
communication of `spmd.wire`.
"""
