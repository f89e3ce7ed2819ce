"""The loop. Its order is numbered in `Loop.run`; each number has its reason beside it."""

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from spmd.data.batches import Batch, HostBatch, Placer
from spmd.data.device_dataset import numbered
from spmd.data.prefetch import prefetch
from spmd.data.sources import Source
from spmd.data.work_assignment import Position, epoch_of
from spmd.distributed import uneven_batches, watchdog
from spmd.errors import DivergedError, OptionError, did_you_mean, noting
from spmd.run.callbacks import Callback, Info, check_first, notify, restore, saved
from spmd.run.checkpoint import Store
from spmd.run.due import Due, due
from spmd.run.duration import Length, allowing, full_steps
from spmd.run.history import History
from spmd.run.loggers import Logger, close, write
from spmd.run.measured import Measured, as_numbers
from spmd.run.progress import NoProgress, Progress
from spmd.run.signals import ENDED, INTERRUPTED, interruptible
from spmd.run.throughput import Pace
from spmd.train.compiled_step import Program
from spmd.train.metrics import IN_FLIGHT, fetch, means
from spmd.train.state import State


@dataclasses.dataclass
class Loop:
    """One run: the parts, and what changes while it goes on."""

    program: Program
    source: Source
    placer: Placer
    length: Length
    state: State
    evaluate: Callable[[State, Callable[[int], bool]], dict[str, float] | None] | None
    callbacks: list[Callback]
    loggers: list[Logger]
    progress: NoProgress | Progress
    store: Store | None
    meta: dict[str, Any]
    prefetch: int
    data: Any = None  # the resident arrays, when the data set lives on the devices
    steps_per_call: int = 1
    step: int = 0
    position: Position = dataclasses.field(default_factory=Position)
    stop_reason: str | None = None
    pace: Pace = dataclasses.field(default_factory=Pace)
    owes_evaluation: bool = False  # one that was due when a signal ended the run before
    saved_callbacks: list[list[Any]] = dataclasses.field(default_factory=list)  # (class name, what it saved), from a checkpoint

    def __post_init__(self):
        self.history = History(self.program.names, self.program.constants)
        self._unread: collections.deque = collections.deque()
        self._window = np.zeros((2, len(self.program.names)))
        self._samples, self._first_step = 0, self.step
        self._evaluated: dict[str, float] = {}
        self._number, self._newest = self.position.epoch, None
        self._guard = watchdog.current()
        self._seen, self._stopped = (self.step, self.position.epoch), False
        self._measured_at = self._unfinished_at = -1  # steps of the newest evaluation that was completed, and that was not
        self._callbacks = [callback for callback in self.callbacks if type(callback).on_step is not Callback.on_step]
        self._fetch, self.program.comparison.say = fetch(), self.progress.say
        exact = tuple(c.every for c in self._callbacks if (c.exact if c.exact is not None else c.every > 1))
        every, best = (None, None) if self.store is None else (self.store.config.every, self.store.config.best)
        self._due = Due(self.length.eval_every, every, best is not None, exact)
        self.steps_per_call = min([self.steps_per_call, *self._due.strides, *full_steps(self.source, self.program, self.placer)])

    def run(self) -> None:
        """Train until its end, a callback or the user says stop. Whatever happens, the newest state is saved."""
        try:
            self._guard.begin(self.step)
            self.progress.start(self.step, self._total())
            with interruptible(self._guard.ask), jax.transfer_guard("disallow"):
                self._tell("on_start")
                restore(self.callbacks, self.saved_callbacks)
                if self.owes_evaluation:
                    self._measure()
                while not self._leaves() and not self._done():
                    self._epoch()
                self._drain()
                if not self._hurries():
                    self._measure()
                self._record()
                self._show()
                self._save()
                self.stop_reason = self.stop_reason or self._guard.wanted or None  # asked for too late to stop anything
                self._tell_stop()
        except BaseException as error:
            # a diverged state is not worth keeping: the last checkpoint before it stays the newest
            self._rescue(error, save=not isinstance(error, DivergedError))
            raise
        self._guard.at("save", self.step)
        self._close()
        self._guard.at("script", self.step)

    def _epoch(self) -> None:
        """One epoch, or the rest of one."""
        self._number = self.position.epoch
        batches = epoch_of(self.source, self.program.clock, self.position, self.step, pad=self.program.pad_training)
        with self._calls(batches) as calls:
            call = next(calls, None)
            while call is not None:
                # 1. one step (or one call of many); the batch was placed before, so the device does not wait for it
                call()
                # 2. the next batch, while the device works; without one this was the last step of the epoch
                call = call if self._own_is_enough() else next(calls, None)
                if call is None:
                    break
                # 3. a run that a signal ends saves first: what is due may take longer than it is given
                if self._hurries():
                    return
                # 4. whatever is due at this step
                self._after_step()
                # 5. leave between two steps, never inside one
                if self._leaves() or self._steps_done():
                    return
        if not self._hurries():
            self._end_of_epoch()

    @contextlib.contextmanager
    def _calls(self, batches: Iterator) -> Iterator[Iterator[Callable[[], None]]]:
        """What there is to do in an epoch, one call at a time."""
        if self.data is not None:
            yield self._resident_calls(list(batches))
            return
        own = self.source.threaded  # the user's reader: a thread runs it, and of several processes each has one of its own
        batches = allowing(batches) if own and not self.prefetch else batches
        with prefetch(batches, self.placer, self.prefetch if own else 0) as placed:
            ready = uneven_batches.batches(placed, f"epoch {self._number + 1}") if own else placed
            yield (functools.partial(self._dispatch, batch) for batch in self.pace.waited_for(ready))

    def _dispatch(self, batch: Batch) -> None:
        """One step and its bookkeeping."""
        with self.placer.carrying():
            events = self.placer.all_everywhere(self.program.events(self.step, batch.rows, batch.have))
            self.state, packed = self.program.step(self.state, batch.leaves, batch.weights, events, split=batch.split)
        self.step += 1
        self.position.passed(batch.have)
        self.position.reader = batch.position
        self._unread.append((self.step, self.position.epoch, packed, [batch.rows]))
        # metrics are read one step late: the device has the next step in hand while the host looks at this one
        while len(self._unread) >= IN_FLIGHT:
            self._read()

    def _resident_calls(self, batches: list[HostBatch]) -> Iterator[Callable[[], None]]:
        """An epoch on data that lives on the devices: many steps per call; what is left over goes one by one."""
        while batches:
            yield functools.partial(self._next_resident, batches)

    def _next_resident(self, batches: list[HostBatch]) -> None:
        """The next call, taken from the list. How many steps it has is decided now: what was due before may have moved the run's end."""
        count = min(self.steps_per_call, self._until_due(), len(batches))
        if count == self.steps_per_call and (self.placer.pad or batches[count - 1].rows == self.program.rows):
            self._call(batches[:count])
        else:
            count = 1
            self._dispatch(self.placer(batches[0]))
        del batches[:count]

    def _call(self, batches: list[HostBatch]) -> None:
        """`len(batches)` steps in one call; only row numbers travel. A short batch is padded with rows of weight 0."""
        index, weights = numbered(batches, self.program.rows)
        index, weights = self.placer.everywhere(index), self.placer.everywhere(weights)
        first = self.step + 1
        told = [self.program.events(self.step + offset, batch.rows, batch.have) for offset, batch in enumerate(batches)]
        events = self.placer.all_everywhere({name: np.stack([one[name] for one in told]) for name in told[0]})
        self.state, packed = self.program.many(self.state, self.data, index, weights, events)
        self.step += len(batches)
        for batch in batches:
            self.position.passed(batch.have)
        self._unread.append((first, self.position.epoch, packed, [batch.rows for batch in batches]))
        while len(self._unread) >= IN_FLIGHT:
            self._read()

    def _read(self) -> None:
        """Fetch the oldest unread metrics and show them to whoever wants them."""
        first, epoch, packed, rows = self._unread.popleft()
        packed = self._fetch(packed)
        packed = packed if packed.ndim == 3 else packed[None]
        self._guard.at("step", first + len(packed) - 1)
        self.pace.step()
        self.history.add_steps(first, packed)
        self._samples += sum(rows)
        if first == 1:
            check_first(self.callbacks, self._means(packed[0]).get("loss", 0.0))
        newest = first + len(packed) - 1 == self.step
        for offset, sums in enumerate(packed):
            step = first + offset
            due = [callback for callback in self._callbacks if step % callback.every == 0]
            if due:
                metrics = Measured({**self._means(sums), **self.program.constants(step - 1)})
                info = Info(self, step, epoch, metrics, rows[offset], exact=newest and step == self.step)
                notify(due, "on_step", info)
            self._window += sums
            self._seen = (step, epoch)
            if step % self.length.log_every == 0:
                self._record()
        self._newest = packed[-1]
        if self.progress.due():
            self._show()

    def _show(self) -> None:
        if self._newest is not None:
            step, epoch = self._seen
            self.progress.update(step, epoch, {**self._means(self._newest), **self._evaluated}, self._samples)

    def _record(self) -> None:
        """Log the means since the last record; at the end of a run these may be fewer steps."""
        step, epoch = self._seen
        if self._window[1].any():
            speed = self.pace.record(step, self._samples)
            write(self.loggers, {"step": step, "epoch": epoch, **self._means(self._window), **self.program.constants(step - 1), **speed})
            self._window = np.zeros_like(self._window)

    def _after_step(self) -> None:
        """Evaluate, then save: a checkpoint is judged by the evaluation of its own step."""
        measures, saves = due(self._due.evaluate, self.step), due(self._due.save, self.step)
        if self.store is not None and saves and not measures and self.store.config.best is None:
            self.store.copy(self.state, self.step)  # devices have it in hand while the host waits; an evaluation may want its room
        if any(due(every, self.step) for every in self._due.exact):
            self._drain()
        if measures:
            self._measure()
        if saves:
            self._save()

    def _end_of_epoch(self) -> None:
        """The same, with what is due once per epoch; a run resumed from here goes on with the next one."""
        self.position = Position(self._number + 1)
        if self.length.eval_every is None:
            self._measure()
        self._after_step()
        if self.store is not None and self.store.config.every is None:
            self._save()

    def _measure(self) -> None:
        if self.evaluate is None or self._measured_at == self.step:
            return
        self._drain()
        self._measured_at = self.step
        self._guard.at("eval", self.step)
        with self.pace.apart(), jax.transfer_guard("allow"):  # the user's evaluation data may come from anywhere
            found = self.evaluate(self.state, self._interrupts)
        self._guard.at("step", self.step)
        if found is None:
            self._note_unfinished()
            return
        self._evaluated = {f"eval_{name}": value for name, value in found.items()}
        measured = dict(self._evaluated)
        try:
            self._tell("on_eval", measured)
            self._evaluated = as_numbers(measured, self.step)  # with what callbacks have added
        finally:
            self.history.add_evaluation(self.step, self._evaluated)
            write(self.loggers, {"step": self.step, "epoch": self._number, **self._evaluated})
            shown = "  ".join(f"{name} {value:.4f}" for name, value in self._evaluated.items())
            self.progress.say(f"step {self.step}: {shown}")

    def _interrupts(self, batch: int) -> bool:
        """Whether a signal ends an evaluation before this batch, from 1: it may take longer than the run is given to save."""
        return self._guard.stops(self.step, batch) and self._guard.asked in (INTERRUPTED, ENDED)

    def _note_unfinished(self) -> None:
        """Say that an evaluation was not completed; the resumed run makes it anew."""
        self._measured_at, self._unfinished_at, self.stop_reason = -1, self.step, self._guard.asked
        self.history.unfinished.append(self.step)
        write(self.loggers, {"step": self.step, "epoch": self._number, "event": "evaluation not completed"})
        self.progress.say(f"step {self.step}: the evaluation was not completed ({self.stop_reason})")

    def _save(self) -> None:
        if self.store is None:
            return
        if self.store.config.best is not None and not self._hurries():
            self._measure()  # a checkpoint without a value could never be the best
        self._drain()
        metrics = dict(self._evaluated) if self.step == self._measured_at else {}
        best = self.store.config.best
        if best is not None and metrics and best not in metrics:
            raise OptionError(f'Checkpoint: there is no metric "{best}".', fix=f"{did_you_mean(best, metrics)}")
        self._guard.at("save", self.step)
        with self.pace.apart():
            self.history.flush()  # before: a run that resumes from here finds all steps before it
            new = self.store.save(self.state, self.step, self._meta(), metrics)
        self._guard.at("step", self.step)
        if new:
            self._tell("on_checkpoint")

    def _meta(self) -> dict[str, Any]:
        """Everything beside the arrays that a resumed run needs."""
        kept = saved(self.callbacks, self.step)
        found = {"position": dataclasses.asdict(self.position), "callbacks": kept, "pace": self.pace.saved()}
        owes = self.step == self._unfinished_at or (self._measured_at != self.step and self._due.evaluates(self.step))
        return {**self.meta, **found, "owes_evaluation": owes}

    def _rescue(self, error: BaseException, *, save: bool) -> None:
        """Save what there is and close; what fails meanwhile is told beside the error, not instead of it.

        Of several processes one that fails alone cannot save, nor wait for what is being saved: the others are not there.
        """
        apart = jax.process_count() > 1 and not isinstance(error, DivergedError)
        try:
            with noting(error, f"the state after step {self.step} could not be saved"):
                self._unread.clear()
                if save and not apart and self.store is not None and self.step > self._first_step:
                    self.store.save(self.state, self.step, self._meta(), {})
                    self.store.wait()
                    error.add_note(f"spmd: the state after step {self.step} was saved in {self.store.folder}.")
            with noting(error, "on_stop failed"):
                self._tell_stop()
        finally:  # another Ctrl-C may end the saving, and no later run could have the folder
            with contextlib.suppress(Exception):
                self._close(apart=apart)
            self._guard.at("script", self.step)

    def _close(self, *, apart: bool = False) -> None:
        with contextlib.ExitStack() as closing:  # each is closed, though another may fail
            for logger in self.loggers:
                closing.callback(close, logger)
            if self.store is not None and not apart:
                closing.callback(self.store.close)
            closing.callback(self.history.close)
            closing.callback(self.progress.close)

    # small questions -------------------------------------------------------------------------------------------------

    def stop(self, reason: str) -> None:
        """Leave after the step in hand. Of several processes all must say so at the same step; what only one knows is asked for."""
        self.stop_reason = self._guard.stopped = self.stop_reason or reason

    def ask(self, reason: str) -> None:
        """Leave soon, all processes after the same step."""
        self._guard.ask(reason)

    def _leaves(self) -> bool:
        """Whether this is where the run stops, between two steps."""
        if self.stop_reason is None and self._guard.stops(self.step):
            self.stop_reason = self._guard.asked
        return self.stop_reason is not None

    def _hurries(self) -> bool:
        """Whether it stops because of a signal: soon, who has sent it sends another that cannot be followed."""
        return self._leaves() and self.stop_reason in (INTERRUPTED, ENDED)

    def stop_at(self, step: int) -> None:
        """Leave after this many updates; at once where there were more already."""
        self.length = dataclasses.replace(self.length, steps=step if self.length.steps is None else min(step, self.length.steps))

    def last_checkpoint(self) -> str:
        """The newest checkpoint, in words."""
        if self.store is None or (step := self.store.latest()) is None:
            return "There is no checkpoint."
        return f"The last checkpoint is step {step} in {self.store.folder}."

    def _total(self) -> int | None:
        per_epoch = self.source.steps_per_epoch
        if self.length.steps is not None:
            return self.length.steps
        return None if per_epoch is None or self.length.epochs is None else per_epoch * self.length.epochs

    def _steps_done(self) -> bool:
        return self.length.steps is not None and self.step >= self.length.steps

    def _own_is_enough(self) -> bool:
        """Of several processes that read for themselves none asks for more than all need: some may have nothing left."""
        return self.source.threaded and jax.process_count() > 1 and self._steps_done()

    def _done(self) -> bool:
        return self._steps_done() or (self.length.epochs is not None and self.position.epoch >= self.length.epochs)

    def _until_due(self) -> int:
        """Steps until something must look at the state, or the run ends."""
        left = self._due.left(self.step) + ([] if self.length.steps is None else [self.length.steps - self.step])
        return min(left, default=self.steps_per_call)

    def _means(self, sums: np.ndarray) -> dict[str, float]:
        found = zip(self.program.names, means(*sums).tolist(), sums[1], strict=True)
        return {name: value for name, value, count in found if count}  # a mean over nothing is no number, and no NaN to stop for

    def _tell(self, event: str, metrics: dict[str, float] | None = None) -> None:
        metrics = Measured() if metrics is None else metrics
        notify(self.callbacks, event, Info(self, self.step, self._number, metrics, 0, exact=True))

    def _tell_stop(self) -> None:
        if not self._stopped:
            self._stopped = True
            self._tell("on_stop")

    def _drain(self) -> None:
        while self._unread:
            self._read()
