"""Compiled programs on disk, so that a restart does not compile them again.

`activate` turns JAX's cache on, in a folder that `folder` chooses and checks. `entries` reads and
writes the programs there, `records` says why one is not there, and `counts` counts compilations.
"""
