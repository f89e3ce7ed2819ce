"""Exit codes of processes and launchers; docs/clusters.md explains them. Without JAX, so that
agents start at once.
"""

FAILED = 1
USAGE = 2  # an error before training
PEER = 42  # another process has failed
STALLED = 43
DISAGREED = 78
TERMINATED = 143  # after SIGTERM, as in shells
