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
from spmd.run.config import LoopConfig, RunState
from spmd.run.control import RunControl
from spmd.run.schedule import Intervals
from spmd.run.step_metrics import StepMetrics


class StepDispatcher:
    """Turns the batches of an epoch into calls that dispatch steps and update the run's state."""

    def __init__(
        self,
        config: LoopConfig,
        run: RunState,
        control: RunControl,
        metrics: StepMetrics,
        intervals: Intervals,
    ):
        self._config, self._run, self._control, self._metrics, self._intervals = (
            config,
            run,
            control,
            metrics,
            intervals,
        )
        self._steps_per_call = min([config.steps_per_call, *intervals.all, *_full_steps(config)])
        if config.profiler is not None:
            config.profiler.check(self._steps_per_call)

    @contextlib.contextmanager
    def epoch(self) -> Iterator[Iterator[Callable[[], None]]]:
        """The calls that dispatch the current epoch, or the rest of it."""
        config, run = self._config, self._run
        reading = {
            "retries": config.data_retries,
            "stops": lambda: bool(self._control.watchdog.stop_reason),
        }
        batches = epoch_batches(
            config.source,
            config.program.clock,
            run.position,
            run.step,
            pad=config.program.pad_training,
            **reading,
        )
        if config.device_data is not None:
            yield self._device_calls(list(batches))
            return
        # an iterable of the user's: read in a thread, and by each process separately
        threaded = config.source.threaded
        batches = allow_transfers(batches) if threaded and not config.prefetch else batches
        # one of several processes cannot leave here: the others may have their batch
        stops = self._control.stopped_by_signal if jax.process_count() == 1 else lambda: False
        with prefetch(batches, config.placer, config.prefetch if threaded else 0, stops) as placed:
            ready = (
                uneven_batches.require_equal_counts(placed, f"epoch {run.epoch + 1}")
                if threaded
                else placed
            )
            yield (
                functools.partial(self._dispatch, batch)
                for batch in run.account.count_waiting(ready, self._metrics.devices_idle)
            )

    def needs_no_more_batches(self) -> bool:
        """Whether the last step is made, where each process reads its own batches: asking for one
        more could block those that have none.
        """
        return (
            self._config.source.threaded and jax.process_count() > 1 and self._control.steps_done()
        )

    def may_have_more_batches(self) -> bool:
        """Whether the epoch may have more batches after the last step, as far as its length is
        known: a run that resumes looks for them.
        """
        return self._run.position.batch != self._config.source.steps_per_epoch

    def _dispatch(self, batch: Batch) -> None:
        """Dispatch one step."""
        program, placer, run = self._config.program, self._config.placer, self._run
        watch, counts = self._config.watch, dict[str, Any]()
        watch = watch if watch is not None and watch.is_due(run.step + 1) else None
        with self._traced(1):
            with placer.allow_row_transfers():
                events = placer.replicate_all(program.events(run.step, batch.rows, batch.has_rows))
                arguments = (run.state, batch.leaves, batch.weights, events)
                if watch and watch.gradients:
                    run.state, packed, counts["gradients"] = program.watched_step(
                        *arguments, split=batch.split
                    )
                else:
                    run.state, packed = program.step(*arguments, split=batch.split)
                if watch and watch.parameters:
                    counts["parameters"] = program.count_parameters(run.state)
            run.step += 1
        run.position.advance(batch.has_rows)
        run.position.reader = batch.position
        self._metrics.add(run.step, packed, [batch], counts)

    def _device_calls(self, batches: list[HostBatch]) -> Iterator[Callable[[], None]]:
        """Calls on data that lives on the devices: many steps each; the remaining batches one by
        one.
        """
        while batches:
            yield functools.partial(self._dispatch_next, batches)

    def _dispatch_next(self, batches: list[HostBatch]) -> None:
        """Dispatch the next call and remove its batches from the list. Its size is decided now: a
        callback may have moved the last step.
        """
        count, step, watch = (
            min(self._steps_per_call, self._steps_until_due(), len(batches)),
            self._run.step,
            self._config.watch,
        )
        # one of the steps, which is made alone
        watched = watch is not None and step // watch.every < (step + count) // watch.every
        if (
            count == self._steps_per_call
            and not watched
            and (self._config.placer.pad or batches[count - 1].rows == self._config.program.rows)
        ):
            self._dispatch_many(batches[:count])
        else:
            count = 1
            self._dispatch(self._config.placer(batches[0]))
        del batches[:count]

    def _dispatch_many(self, batches: list[HostBatch]) -> None:
        """`len(batches)` steps in one call; only row numbers are sent. A short batch is padded with
        rows of weight 0.
        """
        program, placer, run = self._config.program, self._config.placer, self._run
        index, weights = row_indices(batches, program.rows)
        index, weights = placer.replicate(index), placer.replicate(weights)
        first = run.step + 1
        step_events = [
            program.events(run.step + offset, batch.rows, batch.has_rows)
            for offset, batch in enumerate(batches)
        ]
        events = placer.replicate_all(
            {name: np.stack([events[name] for events in step_events]) for name in step_events[0]}
        )
        with self._traced(len(batches)):
            run.state, packed = program.scan_steps(
                run.state, self._config.device_data, index, weights, events
            )
            run.step += len(batches)
        for batch in batches:
            run.position.advance(batch.has_rows)
        self._metrics.add(first, packed, batches)

    def _traced(self, count: int) -> contextlib.AbstractContextManager[None]:
        """Around a call of `count` steps, which the profiler may trace."""
        profiler = self._config.profiler
        return contextlib.nullcontext() if profiler is None else profiler.call(self._run, count)

    def _steps_until_due(self) -> int:
        """Steps until something must read the state, or the run ends."""
        step, last = self._run.step, self._control.last_step
        return min(
            self._intervals.steps_left(step) + ([] if last is None else [last - step]),
            default=self._steps_per_call,
        )


def _full_steps(config: LoopConfig) -> list[int]:
    """How many steps of an epoch fit one call: all but a short last one that cannot be padded;
    nothing where the length is not known.
    """
    steps, program = config.source.steps_per_epoch, config.program
    short = getattr(config.source, "examples", 0) % program.rows
    return (
        []
        if steps is None
        else [max(1, steps - bool(short and (program.drops_remainder or not config.placer.pad)))]
    )
