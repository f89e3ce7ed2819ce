"""Many networks at once: what a sweep tries, how trials share a compiled program, and what comes of
them.
"""
