"""Log a line that is no warning, and is shown all the same."""

import logging
import sys


def log_info(text: str) -> None:
    """Log a line at INFO. Unless the logger "spmd" was given a level, it is shown where warnings
    are, as Python shows only these.

    >>> logging.getLogger("spmd").setLevel(logging.ERROR)
    >>> log_info("resumed from step 4")
    >>> logging.getLogger("spmd").setLevel(logging.NOTSET)
    """
    logger = logging.getLogger("spmd")
    level = logging.INFO
    if logger.level == logging.NOTSET:
        level = logging.WARNING
    if not logger.isEnabledFor(level):
        return
    if logger.hasHandlers():
        logger.handle(logger.makeRecord(logger.name, logging.INFO, __file__, 0, text, (), None))
    else:  # the handler that Python has for this case leaves INFO out
        print(text, file=sys.stderr)
