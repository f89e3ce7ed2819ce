"""Several processes: detect the cluster, wait for each other, check that all agree, and watch for
failures.
"""
