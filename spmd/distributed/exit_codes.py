"""Exit codes of processes and launchers; docs/clusters.md explains them. Without JAX, so that
agents start at once.
"""

FAILED, USAGE, PEER, STALLED, DISAGREED, TERMINATED = 1, 2, 42, 43, 78, 143
