"""Compiled programs on disk, so that a restart does not compile them again."""
