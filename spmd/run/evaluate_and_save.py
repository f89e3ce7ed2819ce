"""Evaluates the state and saves it: a checkpoint is ranked by the evaluation of its own step."""

import dataclasses
import logging
import math
from collections.abc import Callable
from typing import Any

import jax

from spmd.errors import OptionError, did_you_mean, raise_callback_errors
from spmd.run.callback_calls import as_numbers, save_callbacks
from spmd.run.config import LoopConfig, RunState
from spmd.run.control import RunControl
from spmd.run.goodput import EVALUATING, SAVING, duration
from spmd.run.loggers import write_record
from spmd.run.report_cycles import report_perturbed
from spmd.run.schedule import Intervals
from spmd.run.signals import SIGINT_REASON, SIGTERM_REASON
from spmd.run.step_metrics import StepMetrics


class Evaluator:
    """Evaluates at most once after each step; says which evaluations a signal ended."""

    def __init__(
        self, config: LoopConfig, run: RunState, control: RunControl, metrics: StepMetrics
    ):
        self._config, self._run, self._control, self._metrics = config, run, control, metrics
        self._reported_perturbed = False
        # steps of the newest evaluation that was completed, and that was not
        self.completed_at = self.unfinished_at = -1

    def evaluate(self) -> None:
        """Evaluate the newest state, unless that was done; report the results to callbacks,
        history, loggers and display.
        """
        config, run = self._config, self._run
        if config.evaluate is None or self.completed_at == run.step:
            return
        self._metrics.drain()
        self._reported_perturbed = self._reported_perturbed or report_perturbed(
            run.state.opt, run.step
        )
        self.completed_at = run.step
        self._control.watchdog.record_progress("eval", run.step)
        with (
            config.progress.doing("evaluating"),
            run.account(EVALUATING),
            jax.transfer_guard("allow"),
        ):  # the user's evaluation data may come from anywhere
            draws: dict[str, Callable[[], Any]] = {}
            results = config.evaluate(run.state, self._control.stops_evaluation, draws=draws)
        self._control.watchdog.record_progress("step", run.step)
        if results is None:
            self._report_unfinished()
            return
        run.evaluated = {f"eval_{name}": value for name, value in results.items()}
        extended = dict(run.evaluated)
        try:
            self._control.notify("on_eval", extended)
            run.evaluated = as_numbers(extended, run.step)  # with what callbacks have added
        finally:
            run.history.add_evaluation(run.step, run.evaluated)
            write_record(config.loggers, {"step": run.step, "epoch": run.epoch, **run.evaluated})
            config.progress.evaluated(run.step, run.evaluated)
        self._show(draws)

    def _show(self, draws: dict[str, Callable[[], Any]]) -> None:
        """Give pictures of metrics to the loggers of a run that has a folder; after the results,
        which a failure must not lose.
        """
        if self._config.store is None or jax.process_index() != 0 or not draws:
            return
        step, epoch = self._run.step, self._run.epoch
        with (
            self._run.account(EVALUATING),
            jax.transfer_guard("allow"),
            self._control.watchdog.local_work(),
        ):
            for name, draw in draws.items():
                source = f'metric "{name}": draw'
                with raise_callback_errors(lambda source=source: f"step {step}: {source}"):
                    self._control.log_picture(step, epoch, f"eval_{name}", draw(), source)

    def _report_unfinished(self) -> None:
        """Report an evaluation that was not completed; the resumed run repeats it."""
        run = self._run
        self.completed_at, self.unfinished_at, run.stop_reason = (
            -1,
            run.step,
            self._control.watchdog.stop_reason,
        )
        run.history.unfinished.append(run.step)
        write_record(
            self._config.loggers,
            {"step": run.step, "epoch": run.epoch, "event": "evaluation not completed"},
        )
        self._config.progress.say(
            f"step {run.step}: the evaluation was not completed ({run.stop_reason})"
        )


class Saver:
    """Writes checkpoints; without a checkpoint folder it does nothing."""

    def __init__(
        self, control: RunControl, metrics: StepMetrics, evaluator: Evaluator, intervals: Intervals
    ):
        self._config, self._run, self._control = control.config, control.run, control
        self._metrics, self._evaluator, self._intervals = metrics, evaluator, intervals

    def copy_early(self) -> None:
        """Copy the state on the devices before the host waits for the step, where no evaluation
        comes first that may need the memory.
        """
        if self._config.store is not None and self._config.store.config.best is None:
            self._config.store.copy(self._run.state, self._run.step)

    def save(self) -> None:
        """Start to write a checkpoint of the newest state, unless this step was saved."""
        store, run = self._config.store, self._run
        if store is None:
            return
        best = store.config.best
        if best is not None and not self._control.stopped_by_signal():
            self._evaluator.evaluate()  # a checkpoint without a value could never be the best
        self._metrics.drain()
        results = dict(run.evaluated) if run.step == self._evaluator.completed_at else {}
        if best is not None and results and best not in results:
            raise OptionError(
                f'Checkpoint: there is no metric "{best}".', fix=did_you_mean(best, results)
            )
        self._control.watchdog.record_progress("save", run.step)
        if (
            store.write_seconds > (left := max(self._control.seconds_left(), 0.0))
            and jax.process_index() == 0
        ):
            why = (
                f"the last checkpoint took {duration(store.write_seconds)} to write, and "
                f"{duration(left)} are left after SIGTERM"
            )
            fix = f"spmd launch --grace {math.ceil(2 * store.write_seconds)}"
            logging.getLogger("spmd").warning(
                "step %d may not be saved in time: %s.\n    fix: %s", run.step, why, fix
            )
        with run.account(SAVING):
            # before the save: a run that resumes from it finds all earlier steps
            run.history.flush()
            saved = store.save(run.state, run.step, self._meta(), results)
        self._control.watchdog.record_progress("step", run.step)
        if saved:
            self._control.notify("on_checkpoint")

    def report_interrupt(self) -> None:
        """Say what is kept of a run that Ctrl-C or SIGTERM has stopped, once it is on disk."""
        store, run = self._config.store, self._run
        how = {SIGINT_REASON: "interrupted", SIGTERM_REASON: "ended by SIGTERM"}.get(
            run.stop_reason or ""
        )
        if how is None or jax.process_index() != 0:
            return
        kept = (
            "nothing was saved, since there is no checkpoint folder: fit(checkpoint=...) names one"
        )
        if store is not None:
            kept = f"the checkpoint is in {store.folder}, and fit(..., resume=True) resumes from it"
        self._config.progress.note(f"{how} after step {run.step}: {kept}.")

    def save_in_memory(self) -> None:
        """Start to write a checkpoint of the newest state to the memory of the hosts."""
        memory, run = self._config.memory, self._run
        if memory is None:
            return
        memory.copy(run.state, run.step)  # first, so that the devices need not wait for the host
        self._metrics.drain()
        with run.account(SAVING):
            run.history.flush()
            memory.save(run.state, run.step, self._meta())

    def report_memory(self) -> None:
        """Report, at the end of the run, what was written to memory."""
        if (memory := self._config.memory) is not None:
            # the time that is left is for the checkpoint on disk, which replaces these
            if self._control.stopped_by_signal():
                memory.stop()
            memory.wait()
            write_record(
                self._config.loggers,
                {"step": self._run.step, "event": "memory", **dataclasses.asdict(memory.counts)},
            )
            self._config.progress.say(str(memory.counts))

    def save_after_error(self, error: BaseException) -> None:
        """Save the newest state and wait until it is on disk; a note of the error says where."""
        store, run = self._config.store, self._run
        if store is not None:
            with run.account(SAVING):
                store.save(run.state, run.step, self._meta(), {})
                try:
                    run.history.flush()
                finally:
                    store.wait()
            error.add_note(f"spmd: the state after step {run.step} was saved in {store.folder}.")

    def _meta(self) -> dict[str, Any]:
        """Everything beside the arrays that a resumed run needs."""
        run, evaluator = self._run, self._evaluator
        owes = run.step == evaluator.unfinished_at or (
            evaluator.completed_at != run.step and self._intervals.evaluates(run.step)
        )
        return {
            **self._config.meta,
            "position": dataclasses.asdict(run.position),
            "callbacks": save_callbacks(self._config.callbacks, run.step),
            "pace": run.account.to_checkpoint(),
            "owes_evaluation": owes,
            "evaluated": evaluator.completed_at == run.step,
        }
