"""Training metrics: read one step late, then given to callbacks, averaged, logged and shown."""

import collections
import contextlib
import logging
import math
import types
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from spmd.data.batches import Batch, HostBatch
from spmd.errors import DivergedError, option, quoted
from spmd.run.callback_calls import ReadOnlyMetrics, notify, step_callbacks
from spmd.run.callbacks import Info
from spmd.run.config import LoopParts, RunState
from spmd.run.control import RunControl
from spmd.run.known_callbacks import check_first_loss
from spmd.run.loggers import write_record
from spmd.run.progress import Pace
from spmd.run.report_cycles import averages_batches, report_short_batch
from spmd.run.watch import Counts, histogram_record
from spmd.run.work import peak_memory
from spmd.train.metrics import IN_FLIGHT, fetch, means
from spmd.train.skipped_updates import GRAD_NORM, LEFT, LOSS_LIMIT, LOSS_SCALE, NORM_LIMIT

Batches = Sequence[Batch | HostBatch]
NO_COUNTS: Counts = types.MappingProxyType({})


class StepMetrics:
    """Metrics of the dispatched steps, still on the devices; and their sums since the last log
    record, on the host.
    """

    def __init__(self, parts: LoopParts, run: RunState, control: RunControl):
        self._parts = parts
        self._run = run
        self._control = control
        self._unread: collections.deque[tuple[int, int, jax.Array, Batches, float, Counts]] = (
            collections.deque()
        )
        self._calls = 0
        self._read_calls = 0
        # The pace after the first two calls, of which one was compiled, once they are read.
        self._compiled: Pace | None = None
        # In the history, and in no record yet: (step, epoch, sums and counts), or (step, epoch,
        # what a watched step has counted).
        self._unlogged: collections.deque[tuple[int, int, np.ndarray | Counts]] = (
            collections.deque()
        )
        self._window = np.zeros((2, len(parts.program.names)))
        self._newest = None
        self._newest_step = (run.step, run.position.epoch)
        self._callbacks = step_callbacks(parts.config.callbacks)
        self._fetch = fetch()
        self._reports_short = averages_batches(run.state.opt)
        self._skips_index: int | None = None
        if LEFT in parts.program.names:
            self._skips_index = parts.program.names.index(LEFT)

    def add(
        self, first_step: int, packed: jax.Array, batches: Batches, counts: Counts = NO_COUNTS
    ) -> None:
        """Add the metrics of a call that was dispatched on some batches, and what a watched step
        has counted; read those of earlier calls.

        Metrics are read one step late: the device already has its next step while the host reads
        this one.
        """
        self._unread.append(
            (first_step, self._run.position.epoch, packed, batches, self._run.account.now(), counts)
        )
        self._calls += 1
        self._control.watchdog.has_trained = True
        if self._calls == 2:
            # The first call includes compiling; the second one shows how long a call takes.
            packed.block_until_ready()
            dispatched = self._unread[-1][4]
            self._run.account.call_done(dispatched, awaited=True)
        while len(self._unread) >= IN_FLIGHT:
            self.read_oldest()

    def drain(self) -> None:
        """Read all unread metrics, which waits for every dispatched step."""
        while self._unread:
            self.read_oldest()

    def give_up(self, *, recorded: bool) -> None:
        """Forget the unread metrics, after an error.

        Args:
          recorded: the history gets them first, since the state after their steps is saved.
        """
        unread = self._unread
        self._unread = collections.deque()
        if not recorded:
            return
        for first, epoch, packed, _, _, counts in unread:
            self._add_to_history(first, epoch, self._fetch(packed), counts)

    def log_rest(self) -> None:
        """Log, after an error, the steps that the history has and no record: a run that resumes may
        not train them again.
        """
        # An error of one record keeps no other from being written. The stack calls the last
        # callback first: the steps that are not logged, then the record of the window.
        with contextlib.ExitStack() as records:
            records.callback(self.log, rates=False)
            for _ in self._unlogged:
                records.callback(self._log_oldest, rates=False)

    def _add_to_history(
        self, first: int, epoch: int, packed: np.ndarray, counts: Counts
    ) -> np.ndarray:
        """Add the fetched metrics of a call to the history, and to what is to be logged; returns
        them as float32[steps, 2, names].
        """
        if packed.ndim != 3:
            packed = packed[None]
        self._run.history.add_steps(first, packed)
        if counts and self._parts.loggers:
            self._unlogged.append((first, epoch, counts))
        self._unlogged.extend((step, epoch, sums) for step, sums in enumerate(packed, first))
        return packed

    def _log_oldest(self, *, rates: bool = True) -> None:
        """Log what a watched step has counted; or add a step to the window, and log the window if
        that is due.
        """
        step, epoch, content = self._unlogged.popleft()
        if not isinstance(content, np.ndarray):
            histograms = histogram_record(
                jax.tree.map(self._fetch, content), self._parts.program.placed.given.stacks()
            )
            write_record(self._parts.loggers, {"step": step, "epoch": epoch, **histograms})
            return
        self._window += content
        self._newest_step = (step, epoch)
        if step % self._parts.config.log_every == 0:
            self.log(rates=rates)

    def devices_idle(self) -> bool:
        """Return whether all dispatched steps are done."""
        return all(_is_done(packed) for _, _, packed, *_ in self._unread)

    def read_oldest(self) -> None:
        """Fetch the metrics of the oldest unread call; record them and call the callbacks that are
        due.
        """
        run = self._run
        program = self._parts.program
        first, epoch, packed, batches, dispatched, counts = self._unread.popleft()
        rows = [batch.rows for batch in batches]
        was_done = _is_done(packed)
        packed = self._fetch(packed)
        run.account.call_done(dispatched, awaited=not was_done)
        packed = self._add_to_history(first, epoch, packed, counts)
        self._control.watchdog.record_progress("step", first + len(packed) - 1)
        # Histograms are logged before callbacks are called: one may end the run because of them.
        if counts and self._parts.loggers:
            self._log_oldest()
        run.samples += sum(rows)
        # There are calls now that can be measured without the first two.
        if self._compiled is not None and run.samples > self._compiled.samples:
            run.began = self._compiled
            self._compiled = None
            self._parts.progress.begin(run.began)
        short = next(
            (first + offset for offset, count in enumerate(rows) if count < program.rows), None
        )
        if self._reports_short and short is not None:
            self._reports_short = False
            report_short_batch(short, rows[short - first], program.rows)
        if first == 1 and not self._skipped(packed[0]):
            check_first_loss(
                self._parts.config.callbacks, self._means(packed[0]).get("loss", 0.0), batches[0]
            )
        newest = first + len(packed) - 1 == run.step
        for offset, sums in enumerate(packed):
            step = first + offset
            if self._skipped(sums):
                report_skip(step, self._means(sums), self._control.last_checkpoint())
            due = [callback for callback in self._callbacks if step % callback.every == 0]
            if due:
                values = {**self._means(sums), **program.static_metrics.at(step - 1)}
                info = Info(
                    self._control,
                    step,
                    epoch,
                    ReadOnlyMetrics(values),
                    rows[offset],
                    exact=newest and step == run.step,
                    batch=batches[offset],
                )
                notify(due, "on_step", info)
            self._log_oldest()
        self._newest = packed[-1]
        self._read_calls += 1
        if self._read_calls == 2:
            self._compiled = self.pace()
        if self._parts.progress.due():
            self.show()

    def pace(self) -> Pace:
        """Return the progress of training, for the rate that is shown."""
        account = self._run.account
        return Pace(self._run.samples, account.training_seconds, account.waited)

    def show(self, *, last: bool = False) -> None:
        """Update the progress display; the last time with the rate of the whole run."""
        if self._newest is not None:
            step, epoch = self._newest_step
            metrics = {**self._means(self._newest), **self._run.evaluated}
            pace = self._run.pace = self.pace()
            if last:
                self._parts.progress.begin(self._run.began)
            self._parts.progress.update(step, epoch, metrics, pace, self._parts.work, last=last)

    def log(self, *, rates: bool = True) -> None:
        """Log the means since the last record; the last record of a run may cover fewer steps.

        Args:
          rates: whether it says how fast these steps were.
        """
        step, epoch = self._newest_step
        if self._window[1].any():
            memory = peak_memory()
            record = {
                "step": step,
                "epoch": epoch,
                **self._means(self._window),
                **self._parts.program.static_metrics.at(step - 1),
            }
            if rates:
                record |= self._run.account.rates(step, self._run.samples, self._parts.work)
            if memory:
                record["peak_memory"] = memory
            self._window = np.zeros_like(self._window)
            write_record(self._parts.loggers, record)

    def _skipped(self, sums: np.ndarray) -> bool:
        """Return whether the update of a step was skipped."""
        return self._skips_index is not None and bool(sums[1, self._skips_index])

    def _means(self, sums: np.ndarray) -> dict[str, float]:
        """Return means by name. A mean over nothing is left out: it is not a number, nor a NaN to
        stop for.
        """
        named_means = zip(self._parts.program.names, means(*sums).tolist(), sums[1], strict=True)
        return {name: value for name, value, count in named_means if count}


def _is_done(array: jax.Array) -> bool:
    """Return whether the devices have computed an array."""
    # Arrays have this method, and the type jax.Array lacks it.
    return array.is_ready()  # type: ignore[attr-defined]


def report_skip(step: int, means: Mapping[str, float], last_checkpoint: str) -> None:
    """Log that a step's update was skipped; process 0 does.

    Args:
      means: of the step, by name; `skips_left` is among them.
      last_checkpoint: a sentence that says where it is.

    Raises:
      DivergedError: as many in a row were skipped as the optimizer allows.
    """
    cause = skip_cause(means)
    skips_left = int(means[LEFT])
    if skips_left == 0:
        fix = (
            "a lower learning rate or a clip (optax.clip_by_global_norm); a look at the data of "
            "these steps; or "
        )
        if GRAD_NORM in means or LOSS_SCALE not in means:
            fix += "larger sigmas or max_in_a_row."
        else:
            fix += f'{option("precision", quoted("bfloat16"))} or "float32".'
        why = (
            f"step {step}: {cause}. The update was skipped, and so were those before it, as many "
            "in a row as the optimizer allows."
        )
        raise DivergedError(f"{why} {last_checkpoint}", fix=fix)
    if jax.process_index() == 0:
        logging.getLogger("spmd").warning(
            "step %d: the update was skipped: %s. %d more may be, in a row.",
            step,
            cause,
            skips_left,
        )


def skip_cause(means: Mapping[str, float]) -> str:
    """Return the reason for which a step's update was skipped.

    >>> skip_cause(
    ...     {
    ...         "loss": 2.0,
    ...         "grad_norm": 90.0,
    ...         "loss_limit": 3.0,
    ...         "grad_norm_limit": 4.5,
    ...         "skips_left": 9.0,
    ...     }
    ... )
    'the norm of the gradients is 90, and the limit 4.5'
    """
    if LOSS_SCALE in means and GRAD_NORM not in means:
        subject = "the loss itself, and so gradients in float16, are"
        if math.isfinite(means.get("loss", 0.0)):
            subject = "gradients in float16 are"
        return f"{subject} not finite; the loss is now scaled by {means[LOSS_SCALE]:g}"
    loss = means.get("loss", math.nan)
    norm = means.get(GRAD_NORM, math.inf)
    limits = (
        ("loss", loss, means.get(LOSS_LIMIT)),
        ("norm of the gradients", norm, means.get(NORM_LIMIT)),
    )
    causes = []
    for name, value, limit in limits:
        if not math.isfinite(value):
            causes.append(f"the {name} is not finite")
        elif limit is not None and value > limit:
            causes.append(f"the {name} is {value:.4g}, and the limit {limit:.4g}")
    return "; ".join(causes) or f"the loss is {loss:.6g}, and the norm of the gradients {norm:.6g}"
