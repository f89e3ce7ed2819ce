"""Dispatches training steps: one per batch, or several per call on data that lives on the
devices.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from spmd.data.batches import Batch, HostBatch
from spmd.data.device_dataset import row_indices
from spmd.data.prefetch import allow_transfers, prefetch
from spmd.data.work_assignment import epoch_batches
from spmd.distributed import uneven_batches
from spmd.run.config import LoopParts, RunState
from spmd.run.control import RunControl
from spmd.run.step_metrics import StepMetrics


class StepDispatcher:
    """Turns the batches of an epoch into calls that dispatch steps and update the run's state."""

    def __init__(
        self,
        parts: LoopParts,
        run: RunState,
        control: RunControl,
        metrics: StepMetrics,
    ):
        self._parts = parts
        self._run = run
        self._control = control
        self._metrics = metrics
        self._steps_per_call = min(
            [parts.steps_per_call, *parts.config.intervals, *_full_steps(parts)]
        )
        if parts.profiler is not None:
            parts.profiler.check(self._steps_per_call)

    @contextlib.contextmanager
    def epoch(self) -> Iterator[Iterator[Callable[[], None]]]:
        """Yield the calls that dispatch the current epoch, or what is left of it."""
        parts = self._parts
        run = self._run
        batches = epoch_batches(
            parts.source,
            parts.program.clock,
            run.position,
            run.step,
            pad=parts.program.loss.pads,
            retries=parts.config.data_retries,
            stops=lambda: bool(self._control.watchdog.stop_reason),
        )
        if parts.device_data is not None:
            yield self._device_calls(list(batches))
            return
        stops: Callable[[], bool] = self._control.stopped_by_signal
        if jax.process_count() > 1:
            # One of several processes cannot leave here: the others may have their batch.
            stops = _never
        # An iterable of the user's is read in a thread, and by each process separately.
        threaded = parts.source.threaded
        ahead = 0
        if threaded:
            ahead = parts.config.prefetch
            if not ahead:
                # The user's iterable may transfer arrays, and is read in this thread, in which
                # JAX's transfer guard is on.
                batches = allow_transfers(batches)
        with prefetch(batches, parts.placer, ahead, stops) as placed:
            ready = placed
            if threaded:
                ready = uneven_batches.require_equal_counts(placed, f"epoch {run.epoch + 1}")
            yield (
                functools.partial(self._dispatch, batch)
                for batch in run.account.count_waiting(ready, self._metrics.devices_idle)
            )

    def needs_no_more_batches(self) -> bool:
        """Return whether the last step is made, where each process reads its own batches: asking
        for one more could block those that have none.
        """
        return (
            self._parts.source.threaded and jax.process_count() > 1 and self._control.steps_done()
        )

    def may_have_more_batches(self) -> bool:
        """Return whether the epoch may have more batches after the last step, as far as its length
        is known: a run that resumes looks for them.
        """
        return self._run.position.batch != self._parts.source.steps_per_epoch

    def _dispatch(self, batch: Batch) -> None:
        """Dispatch one step."""
        program = self._parts.program
        placer = self._parts.placer
        run = self._run
        watch = self._parts.config.watch
        if watch is not None and not watch.is_due(run.step + 1):
            watch = None
        counts: dict[str, Any] = {}
        with self._traced(1):
            with placer.allow_row_transfers():
                events = placer.replicate_all(program.events(run.step, batch.rows, batch.has_rows))
                arguments = (run.state, batch.leaves, batch.weights, events)
                if watch is not None and watch.gradients:
                    run.state, packed, counts["gradients"] = program.watched_step(
                        *arguments, split=batch.split
                    )
                else:
                    run.state, packed = program.step(*arguments, split=batch.split)
                if watch is not None and watch.parameters:
                    counts["parameters"] = program.count_parameters(run.state)
            run.step += 1
        run.position.advance(batch.has_rows)
        run.position.reader = batch.position
        self._metrics.add(run.step, packed, [batch], counts)

    def _device_calls(self, batches: list[HostBatch]) -> Iterator[Callable[[], None]]:
        """Yield calls on data that lives on the devices: many steps each; the remaining batches one
        by one.
        """
        while batches:
            yield functools.partial(self._dispatch_next, batches)

    def _dispatch_next(self, batches: list[HostBatch]) -> None:
        """Dispatch the next call and remove its batches from the list. Its size is decided now: a
        callback may have moved the last step.
        """
        count = min(self._steps_per_call, self._steps_until_due(), len(batches))
        step = self._run.step
        watch = self._parts.config.watch
        # A watched step is another program: none is among the steps of a call.
        watched = watch is not None and step // watch.every < (step + count) // watch.every
        # Calls have one number of steps, since XLA would compile a program for each.
        full = count == self._steps_per_call and not watched
        if full and (self._parts.placer.pad or batches[count - 1].rows == self._parts.program.rows):
            self._dispatch_many(batches[:count])
        else:
            count = 1
            self._dispatch(self._parts.placer(batches[0]))
        del batches[:count]

    def _dispatch_many(self, batches: list[HostBatch]) -> None:
        """Dispatch `len(batches)` steps in one call; only row numbers are sent. A short batch is
        padded with rows of weight 0.
        """
        program = self._parts.program
        placer = self._parts.placer
        run = self._run
        host_index, host_weights = row_indices(batches, program.rows)
        index = placer.replicate(host_index)
        weights = placer.replicate(host_weights)
        first = run.step + 1
        step_events = [
            program.events(run.step + offset, batch.rows, batch.has_rows)
            for offset, batch in enumerate(batches)
        ]
        stacked = {}
        for name in step_events[0]:
            stacked[name] = np.stack([events[name] for events in step_events])
        events = placer.replicate_all(stacked)
        with self._traced(len(batches)):
            run.state, packed = program.scan_steps(
                run.state, self._parts.device_data, index, weights, events
            )
            run.step += len(batches)
        for batch in batches:
            run.position.advance(batch.has_rows)
        self._metrics.add(first, packed, batches)

    def _traced(self, count: int) -> contextlib.AbstractContextManager[None]:
        """Return a context around a call of `count` steps, which the profiler may trace."""
        profiler = self._parts.profiler
        if profiler is None:
            return contextlib.nullcontext()
        return profiler.trace_call(self._run, count)

    def _steps_until_due(self) -> int:
        """Return the steps until something must read the state, or the run ends."""
        step = self._run.step
        last = self._control.last_step
        steps = self._parts.config.steps_left(step)
        if last is not None:
            steps.append(last - step)
        return min(steps, default=self._steps_per_call)


def _never() -> bool:
    return False


def _full_steps(parts: LoopParts) -> list[int]:
    """Return the number of steps of an epoch that fit one call: all but a short last one that
    cannot be padded; nothing where the length is not known.
    """
    steps = parts.source.steps_per_epoch
    program = parts.program
    short = getattr(parts.source, "examples", 0) % program.rows
    if steps is None:
        return []
    if short and (program.drops_remainder or not parts.placer.pad):
        steps -= 1
    return [max(1, steps)]
