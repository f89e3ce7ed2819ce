"""The training loop: callbacks, progress display, loggers, checkpoints, and clean shutdown."""
