"""The choice of checkpoints that stay, and their removal in an order in which a loss of power takes
none: the newest is on disk before an older one goes.
"""

import contextlib
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path

from spmd.base.ranking import best

# Before the name of a checkpoint while its files are deleted: a rename is one step for a reader,
# and deleting a folder is many.
REMOVED = ".removed-"


def kept_steps(scores: Mapping[int, float | None], keep: int | None, mode: str) -> set[int]:
    """Return the newest steps, or all if `keep` is None, and the best of those with a score, in the
    order of `spmd.base.ranking`.

    >>> sorted(kept_steps({10: 1.0, 20: 5.0, 30: float("nan"), 40: None}, 1, "max"))
    [20, 40]
    """
    ranked = {step: score for step, score in scores.items() if score is not None}
    count = keep or len(scores)
    newest = sorted(scores)[-count:]
    return {*newest, *best(ranked, 1, mode)}


def remove_checkpoint(folder: Path) -> None:
    """Remove the folder of a checkpoint, which no reader sees in part; a warning says what could
    not be removed.
    """
    try:
        target = folder.rename(folder.with_name(f"{REMOVED}{folder.name}"))
        shutil.rmtree(target)
    except OSError as error:
        logging.getLogger("spmd").warning(
            "the old checkpoint %s could not be removed: %s.", folder, error.strerror or error
        )


def remove_leftovers(run: Path) -> None:
    """Remove what a killed process has left of checkpoints that it removed or wrote; only the owner
    of the run's folder may.
    """
    checkpoints = run / "checkpoints"
    for path in (*checkpoints.glob(f"{REMOVED}*"), *checkpoints.glob("*.orbax-checkpoint-tmp*")):
        shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        # Earlier versions kept the steps of a run that was started again at step 0.
        (run / "history-before-1.bin").unlink()
