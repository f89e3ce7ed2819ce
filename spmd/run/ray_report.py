"""Report metrics and checkpoints of a run to Ray Train."""

import json
import tempfile
from pathlib import Path
from typing import Any

from spmd.base.user_paths import write_text
from spmd.errors import OptionError, check_integer, import_extra
from spmd.run.callbacks import Callback, Info

# the file of a checkpoint in Ray's sense
POINTER = "spmd.json"


def report(every: int = 100) -> Callback:
    """Report to Ray Train, as `ray.train.report` does: metrics every few steps and of each
    evaluation, and checkpoints when spmd writes one.

    A checkpoint in Ray's sense is then a small file, `spmd.json`, with the run's folder and the
    step, reported when spmd begins to write that checkpoint. The state itself is written once, by
    spmd, which removes old ones as `Checkpoint(keep=...)` says, whatever Ray keeps. (Ray's
    documentation calls this a pointer checkpoint.)

    Args:
      every: steps between two reports of metrics. All workers wait for each, and Ray takes about
        one in two seconds.

    Returns:
      The callback, which all workers must have.

    Raises:
      MissingExtraError: Ray is not installed.
      OptionError: `every` is not positive; and when the run begins, if no worker of Ray Train runs
        it.

    Example:
      >>> import spmd
      >>> spmd.ray.report(every=0)  # fit(..., callbacks=[spmd.ray.report()]) in a worker
      Traceback (most recent call last):
      spmd.errors.OptionError: spmd.ray.report: every=0.
      ...
    """
    check_integer(every, "spmd.ray.report: every")
    return _Report(import_extra("ray.train", "ray"), every)


class _Report(Callback):
    """Calls `ray.train.report` in all workers."""

    # Ray waits for all workers.
    together = True
    moves_nothing = True

    def __init__(self, train: Any, interval: int):
        self.train = train
        self.interval = interval
        self.newest: dict[str, float] = {}
        self.evaluated: dict[str, float] = {}

    def on_start(self, info: Info) -> None:
        """Refuse a process that is no worker."""
        try:
            self.train.get_context().get_world_rank()
        # of Ray
        except RuntimeError:
            raise OptionError(
                "spmd.ray.report: this process is no worker of Ray Train.",
                fix="leave it out, or call fit in the function that JaxTrainer runs.",
            ) from None

    def on_step(self, info: Info) -> None:
        """Keep the metrics of each step for a checkpoint, and report some."""
        self.newest = {**info.metrics, "step": info.step, "epoch": info.epoch}
        if info.step % self.interval == 0:
            self.train.report(self.newest)

    def on_eval(self, info: Info) -> None:
        """Report the results of the evaluation, with the metrics of the last step."""
        self.evaluated = dict(info.metrics)
        self.train.report({**self.newest, **self.evaluated})

    def on_checkpoint(self, info: Info) -> None:
        """Report where the checkpoint is, with the results of the last evaluation: by these Ray may
        choose the best.
        """
        metrics = {**self.newest, **self.evaluated, "step": info.step, "epoch": info.epoch}
        if self.train.get_context().get_world_rank() != 0:
            self.train.report(metrics)
            return
        with tempfile.TemporaryDirectory(prefix="spmd-ray-") as folder:
            pointer = {"folder": str(Path(info.folder or "").resolve()), "step": info.step}
            write_text(Path(folder, POINTER), json.dumps(pointer))
            self.train.report(metrics, checkpoint=self.train.Checkpoint.from_directory(folder))
