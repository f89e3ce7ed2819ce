"""Evaluates the state and saves it: a checkpoint is ranked by the evaluation of its own step."""

import dataclasses
import logging
import math
from collections.abc import Callable
from typing import Any

import jax

from spmd.errors import OptionError, did_you_mean, raise_callback_errors
from spmd.run.callback_calls import as_numbers, save_callbacks
from spmd.run.config import LoopParts, RunState
from spmd.run.control import RunControl
from spmd.run.goodput import EVALUATING, SAVING, duration
from spmd.run.loggers import write_record
from spmd.run.report_cycles import report_perturbed
from spmd.run.signals import SIGINT_REASON, SIGTERM_REASON
from spmd.run.step_metrics import StepMetrics


class Evaluator:
    """Evaluates at most once after each step; says which evaluations a signal ended."""

    def __init__(self, parts: LoopParts, run: RunState, control: RunControl, metrics: StepMetrics):
        self._parts = parts
        self._run = run
        self._control = control
        self._metrics = metrics
        self._reported_perturbed = False
        # The steps of the newest evaluation that was completed, and of the newest that was not.
        self.completed_at = -1
        self.unfinished_at = -1

    def evaluate(self) -> None:
        """Evaluate the newest state, unless that was done; report the results to callbacks,
        history, loggers and display.
        """
        parts = self._parts
        run = self._run
        if parts.evaluate is None or self.completed_at == run.step:
            return
        self._metrics.drain()
        if not self._reported_perturbed:
            self._reported_perturbed = report_perturbed(run.state.opt, run.step)
        self.completed_at = run.step
        self._control.watchdog.record_progress("eval", run.step)
        draws: dict[str, Callable[[], Any]] = {}
        with (
            parts.progress.doing("evaluating"),
            run.account(EVALUATING),
            # The user's evaluation data may come from anywhere.
            jax.transfer_guard("allow"),
        ):
            results = parts.evaluate(run.state, self._control.stops_evaluation, draws=draws)
        self._control.watchdog.record_progress("step", run.step)
        if results is None:
            self._report_unfinished()
            return
        run.evaluated = {f"eval_{name}": value for name, value in results.items()}
        extended = dict(run.evaluated)
        try:
            # Callbacks may add metrics to the dict.
            self._control.notify("on_eval", extended)
            run.evaluated = as_numbers(extended, run.step)
        finally:
            run.history.add_evaluation(run.step, run.evaluated)
            write_record(parts.loggers, {"step": run.step, "epoch": run.epoch, **run.evaluated})
            parts.progress.evaluated(run.step, run.evaluated)
        self._show(draws)

    def _show(self, draws: dict[str, Callable[[], Any]]) -> None:
        """Give pictures of metrics to the loggers of a run that has a folder; after the results,
        which a failure must not lose.
        """
        if self._parts.store is None or jax.process_index() != 0 or not draws:
            return
        step = self._run.step
        with (
            self._run.account(EVALUATING),
            jax.transfer_guard("allow"),
            self._control.watchdog.local_work(),
        ):
            for name, draw in draws.items():
                source = f'metric "{name}": draw'
                with raise_callback_errors(lambda source=source: f"step {step}: {source}"):
                    self._control.log_picture(step, self._run.epoch, f"eval_{name}", draw(), source)

    def _report_unfinished(self) -> None:
        """Report an evaluation that was not completed; the resumed run repeats it."""
        run = self._run
        self.completed_at = -1
        self.unfinished_at = run.step
        run.stop_reason = self._control.watchdog.stop_reason
        run.history.unfinished.append(run.step)
        write_record(
            self._parts.loggers,
            {"step": run.step, "epoch": run.epoch, "event": "evaluation not completed"},
        )
        self._parts.progress.say(
            f"step {run.step}: the evaluation was not completed ({run.stop_reason})"
        )


class Saver:
    """Writes checkpoints; without a checkpoint folder it does nothing."""

    def __init__(self, control: RunControl, metrics: StepMetrics, evaluator: Evaluator):
        self._parts = control.parts
        self._run = control.run
        self._control = control
        self._metrics = metrics
        self._evaluator = evaluator

    def copy_early(self) -> None:
        """Copy the state on the devices before the host waits for the step, where no evaluation
        comes first that may need the memory.
        """
        if self._parts.store is not None and self._parts.store.config.best is None:
            self._parts.store.copy(self._run.state, self._run.step)

    def save(self) -> None:
        """Start to write a checkpoint of the newest state, unless this step was saved."""
        store = self._parts.store
        run = self._run
        if store is None:
            return
        best = store.config.best
        if best is not None and not self._control.stopped_by_signal():
            # A checkpoint without a value could never be the best.
            self._evaluator.evaluate()
        self._metrics.drain()
        results = dict(run.evaluated) if run.step == self._evaluator.completed_at else {}
        if best is not None and results and best not in results:
            raise OptionError(
                f'Checkpoint: there is no metric "{best}".', fix=did_you_mean(best, results)
            )
        self._control.watchdog.record_progress("save", run.step)
        self._warn_of_late_save(store.write_seconds)
        with run.account(SAVING):
            # Before the save, so that a run that resumes from it finds all earlier steps.
            run.history.flush()
            saved = store.save(run.state, run.step, self._meta(), results)
        self._control.watchdog.record_progress("step", run.step)
        if saved:
            self._control.notify("on_checkpoint")

    def _warn_of_late_save(self, write_seconds: float) -> None:
        """Warn if the last checkpoint took longer to write than is left after SIGTERM."""
        seconds_left = max(self._control.seconds_left(), 0.0)
        if write_seconds <= seconds_left or jax.process_index() != 0:
            return
        why = (
            f"the last checkpoint took {duration(write_seconds)} to write, and "
            f"{duration(seconds_left)} are left after SIGTERM"
        )
        fix = f"spmd launch --grace {math.ceil(2 * write_seconds)}"
        logging.getLogger("spmd").warning(
            "step %d may not be saved in time: %s.\n    fix: %s", self._run.step, why, fix
        )

    def report_interrupt(self) -> None:
        """Say what is kept of a run that Ctrl-C or SIGTERM has stopped, once it is on disk."""
        store = self._parts.store
        run = self._run
        endings = {SIGINT_REASON: "interrupted", SIGTERM_REASON: "ended by SIGTERM"}
        ending = endings.get(run.stop_reason or "")
        if ending is None or jax.process_index() != 0:
            return
        outcome = (
            "nothing was saved, since there is no checkpoint folder: fit(checkpoint=...) names one"
        )
        if store is not None:
            outcome = (
                f"the checkpoint is in {store.folder}, and fit(..., resume=True) resumes from it"
            )
        self._parts.progress.note(f"{ending} after step {run.step}: {outcome}.")

    def save_in_memory(self) -> None:
        """Start to write a checkpoint of the newest state to the memory of the hosts."""
        memory = self._parts.memory
        run = self._run
        if memory is None:
            return
        # Before the host waits for the step, so that the devices need not wait for the host.
        memory.copy(run.state, run.step)
        self._metrics.drain()
        with run.account(SAVING):
            run.history.flush()
            memory.save(run.state, run.step, self._meta())

    def report_memory(self) -> None:
        """Report, at the end of the run, what was written to memory."""
        if (memory := self._parts.memory) is not None:
            # The time that is left is for the checkpoint on disk, which replaces those in memory.
            if self._control.stopped_by_signal():
                memory.stop()
            memory.wait()
            write_record(
                self._parts.loggers,
                {"step": self._run.step, "event": "memory", **dataclasses.asdict(memory.counts)},
            )
            self._parts.progress.say(str(memory.counts))

    def save_after_error(self, error: BaseException) -> None:
        """Save the newest state and wait until it is on disk; add a note to the error that says
        where.
        """
        store = self._parts.store
        run = self._run
        if store is not None:
            with run.account(SAVING):
                store.save(run.state, run.step, self._meta(), {})
                try:
                    run.history.flush()
                finally:
                    store.wait()
            error.add_note(f"spmd: the state after step {run.step} was saved in {store.folder}.")

    def _meta(self) -> dict[str, Any]:
        """Return everything beside the arrays that a resumed run needs."""
        run = self._run
        evaluator = self._evaluator
        due = self._parts.config.evaluates_after(run.step)
        skipped = due and evaluator.completed_at != run.step
        owes = run.step == evaluator.unfinished_at or skipped
        return {
            **self._parts.meta,
            "position": dataclasses.asdict(run.position),
            "callbacks": save_callbacks(self._parts.config.callbacks, run.step),
            "pace": run.account.to_checkpoint(),
            "owes_evaluation": owes,
            "evaluated": evaluator.completed_at == run.step,
        }
