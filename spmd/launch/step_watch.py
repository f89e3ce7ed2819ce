"""Whether all processes of a step of `srun` have ended, by the records that they leave: `srun` may
wait for them without limit.
"""

import re
from collections.abc import Callable
from pathlib import Path

from spmd.distributed.coordination import SHUTDOWN_TIMEOUT
from spmd.launch.restart_policy import read_records

# Seconds without a new record. A process that fails exits within a few of its last one; one that
# has finished its script may still write or upload something.
FAILED_SECONDS, DONE_SECONDS = 30.0, SHUTDOWN_TIMEOUT + 60.0
LOOK_SECONDS = 5.0


class StepWatch:
    """Looks at the records of several processes; of a single one there are none, and nothing is
    known.

    Args:
      folder: of the records.
      clock: a monotonic clock, in seconds.

    Attributes:
      is_done: whether all have finished their scripts, as last seen.
    """

    def __init__(self, folder: Path, clock: Callable[[], float]):
        self._folder, self._clock = folder, clock
        self._looked_at = clock()
        self._last: object = None
        self._since = clock()
        self.is_done = False

    def is_over(self) -> bool:
        """Return True once a process has failed, or all are done, and for some time none has left a
        new record.
        """
        now = self._clock()
        if now - self._looked_at < LOOK_SECONDS:
            return False
        self._looked_at = now
        if not self._may_be_over():
            self._last = None
            return False
        lives = {}
        for record in read_records(self._folder):
            if record["name"].startswith("life."):
                lives[record["name"]] = record
        if lives != self._last:
            self._last, self._since = lives, now
        if not lives:
            return False
        self.is_done = all(record.get("end") == "done" for record in lives.values())
        return now - self._since >= (DONE_SECONDS if self.is_done else FAILED_SECONDS)

    def _may_be_over(self) -> bool:
        """Return whether a process has failed, or the first has ended: without reading the records
        of all.
        """
        if any(re.fullmatch(r"\d+\.json", path.name) for path in self._folder.iterdir()):
            return True
        try:
            return '"end": ""' not in (self._folder / "life.0.json").read_text(encoding="utf-8")
        except OSError:
            return False
