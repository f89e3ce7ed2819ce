"""The training loop. Its order is numbered in `Loop._epoch`; each number has its reason beside
it.
"""

import contextlib

import jax

from spmd.data.work_assignment import Position
from spmd.errors import DivergedError, note_second_error
from spmd.run.callback_calls import restore_callbacks
from spmd.run.config import LoopParts, RunState, StartPoint, is_due
from spmd.run.control import RunControl
from spmd.run.dispatch import StepDispatcher
from spmd.run.evaluate_and_save import Evaluator, Saver
from spmd.run.goodput import SAVING, TRAINING
from spmd.run.history import History
from spmd.run.loggers import close_loggers
from spmd.run.signals import SIGTERM_REASON, stop_by
from spmd.run.step_metrics import StepMetrics
from spmd.run.time_account import TimeAccount


class Loop:
    """One run: `parts` never changes, `run` is how far it has come, and each object below has one
    job.
    """

    def __init__(self, parts: LoopParts, start: StartPoint, account: TimeAccount):
        step = int(start.state.step)
        program = parts.program
        history = History(program.names, program.static_metrics.at)
        self.run = run = RunState(
            start.state, step, start.position, start.position.epoch, account, history
        )
        self._parts = parts
        self._start = start
        self._first_step = step
        self._control = control = RunControl(parts, run)
        self._watchdog = control.watchdog
        self._config = parts.config
        self._metrics = StepMetrics(parts, run, control)
        self._dispatcher = StepDispatcher(parts, run, control, self._metrics)
        self._evaluator = Evaluator(parts, run, control, self._metrics)
        self._saver = Saver(control, self._metrics, self._evaluator)
        program.functions.say = parts.progress.say
        if parts.store is not None and jax.process_index() == 0:
            history.write_to(parts.store.folder, after=step)
            account.write_to(parts.store.folder)

    def train(self) -> None:
        """Train until the planned end, or until a callback or the user stops the run. However it
        ends, the newest state is saved.
        """
        with self.run.account(TRAINING):
            self._train()

    def _train(self) -> None:
        control = self._control
        run = self.run
        try:
            self._watchdog.begin_run(run.step)
            run.began = self._metrics.pace()
            self._parts.progress.start(run.step, control.total_steps())
            stop_by(control.ask)
            # JAX raises at a transfer that nothing asked for: one to the host would wait for the
            # devices in every step.
            with jax.transfer_guard("disallow"):
                control.notify("on_start")
                restore_callbacks(self._config.callbacks, self._start.callbacks)
                if self._start.owes_evaluation:
                    self._evaluator.evaluate()
                while not control.should_stop() and not control.finished():
                    self._epoch()
                self._metrics.drain()
                if self._parts.profiler is not None:
                    self._parts.profiler.end(run)
                if not control.stopped_by_signal():
                    self._evaluator.evaluate()
                self._metrics.log()
                self._metrics.show(last=True)
                self._saver.save()
                self._saver.report_memory()
                # A request may have come too late to stop anything.
                run.stop_reason = run.stop_reason or self._watchdog.requested_stop_reason or None
                control.notify_stop()
        except BaseException as error:
            self._rescue(error)
            raise
        self._watchdog.record_progress("save", run.step)
        self._close()
        # This waits for the other processes: the state in memory is removed when all have saved.
        self._close_memory(remove=True)
        # SIGTERM may have come while the last checkpoint was written, or since.
        if self._watchdog.requested_stop_reason == SIGTERM_REASON:
            run.stop_reason = run.stop_reason or SIGTERM_REASON
        self._saver.report_interrupt()
        self._watchdog.record_progress("script", run.step)

    def _epoch(self) -> None:
        """Train for one epoch, or for what is left of one."""
        control = self._control
        self.run.epoch = self.run.position.epoch
        with self._dispatcher.epoch() as calls:
            call = next(calls, None)
            if (
                call is None
                and self._start.evaluated
                and self.run.position.batch
                and self.run.step == self._first_step
            ):
                # The run stopped at the end of this epoch, whose length it did not know.
                self.run.position = Position(self.run.epoch + 1)
                return
            while call is not None:
                # 1. one step (or one call of many); the batch was placed before, so the device does
                #    not wait for it
                call()
                # 2. the next batch, while the device works; without one this was the last step of
                #    the epoch
                unread = self._dispatcher.needs_no_more_batches()
                call = None
                if not unread:
                    call = next(calls, None)
                if call is None and not (unread and self._dispatcher.may_have_more_batches()):
                    break
                # 3. a run that a signal ends saves first: what is due may take longer than the time
                #    it is given
                if control.stopped_by_signal():
                    return
                # 4. whatever is due at this step
                self._after_step()
                # 5. stop between two steps, never inside one
                if control.should_stop() or control.steps_done():
                    return
        if not control.stopped_by_signal():
            self._end_of_epoch()

    def _after_step(self) -> None:
        """Evaluate, then save: a checkpoint is ranked by the evaluation of its own step."""
        step = self.run.step
        config = self._config
        evaluates = is_due(config.eval_every, step)
        saves = is_due(config.save_every, step)
        if saves and not evaluates:
            self._saver.copy_early()
        if any(is_due(every, step) for every in config.callback_intervals):
            self._metrics.drain()
        if evaluates:
            self._evaluator.evaluate()
        if saves:
            self._saver.save()
        if is_due(config.memory_every, step):
            self._saver.save_in_memory()

    def _end_of_epoch(self) -> None:
        """Do what is due at this step and once per epoch; a run that resumes from here begins the
        next epoch.
        """
        self.run.position = Position(self.run.epoch + 1)
        if self._config.eval_every is None:
            self._evaluator.evaluate()
        self._after_step()
        if self._config.save_every is None:
            self._saver.save()

    def _rescue(self, error: BaseException) -> None:
        """Save the newest state and close; whatever fails here becomes a note of the error and does
        not replace it.

        A diverged state is not saved: the last checkpoint before it stays the newest. One process
        of several that fails alone can neither save nor wait for a save, since the others do not
        take part.
        """
        diverged = isinstance(error, DivergedError)
        alone = jax.process_count() > 1 and not diverged
        try:
            with note_second_error(
                error, f"the state after step {self.run.step} could not be saved"
            ):
                saves = not diverged and not alone and self.run.step > self._first_step
                self._metrics.give_up(recorded=saves)
                if saves:
                    self._saver.save_after_error(error)
            with note_second_error(error, "metrics of the last steps could not be written"):
                self._metrics.log_rest()
            with note_second_error(error, "on_stop failed"):
                self._control.notify_stop()
        finally:
            # Another Ctrl-C may end the save; the folder must be released all the same.
            with contextlib.suppress(Exception):
                self._close(wait_for_save=not alone)
            with contextlib.suppress(Exception):
                self._close_memory(remove=False)
            self._watchdog.record_progress("script", self.run.step)

    def _close_memory(self, *, remove: bool) -> None:
        """Close the checkpoints in memory, and remove them if the disk has the last step."""
        if (memory := self._parts.memory) is not None:
            memory.close(remove=remove)

    def _close(self, *, wait_for_save: bool = True) -> None:
        """Wait for the last checkpoint, and close what a run has opened, in reverse order."""
        account = self.run.account
        progress = self._parts.progress
        # Each callback of the stack is called, though another may fail.
        with contextlib.ExitStack() as closing:
            closing.callback(lambda: progress.say(repr(account.goodput)))
            closing.callback(account.close)
            closing.callback(close_loggers, self._parts.loggers)
            if self._parts.store is not None and wait_for_save:
                closing.enter_context(account(SAVING))
                closing.callback(self._parts.store.close)
            closing.callback(self.run.history.close)
            closing.callback(progress.close)
            if self._parts.profiler is not None:
                closing.callback(self._parts.profiler.close, account)
