"""The loop around the step: callbacks, progress, loggers, checkpoints, and stopping in good order."""
