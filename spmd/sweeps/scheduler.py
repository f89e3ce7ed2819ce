"""Run a sweep rung by rung: train its trials in chunks, score them, and promote the best."""

import dataclasses
import functools
import itertools
import math
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from spmd.api import Result
from spmd.base.output_files import publish
from spmd.base.ranking import best
from spmd.data.work_assignment import Position
from spmd.distributed import watchdog
from spmd.distributed.consistency import first_nonempty
from spmd.distributed.launcher_protocol import TERMINATED
from spmd.mesh import make_mesh
from spmd.run.history import History
from spmd.run.progress import Pace
from spmd.run.signals import SIGINT_REASON, stop_by
from spmd.sweeps.config import SweepConfig, Trial
from spmd.sweeps.results import Sweep, TrialResult
from spmd.sweeps.storage import SweepStore, in_writer, is_writer, open_checkpoints
from spmd.sweeps.train_chunk import Chunk, filled
from spmd.sweeps.vmapped_trials import VmappedTrials
from spmd.train.objective import LOSS
from spmd.train.skipped_updates import LEFT
from spmd.train.state import State, place_copy
from spmd.trainer import Trainer


@dataclasses.dataclass
class _Record:
    """Measurements of one trial so far."""

    measured: list[np.ndarray]  # float32[steps, 2, names], rung by rung
    evaluations: list[tuple[int, dict[str, float]]]
    score: float = math.nan
    ended: str = "done"

    @property
    def steps(self) -> np.ndarray:
        return np.concatenate(self.measured)


@dataclasses.dataclass
class SweepRunner:
    """A sweep that is ready to run. `plan` holds each rung's number of trials and last step;
    `measure` the metric and mode.
    """

    study: SweepConfig
    programs: Mapping[tuple, VmappedTrials]
    storage: SweepStore
    plan: Sequence[tuple[int, int]]
    measure: tuple[str, str]
    at_once: int | None
    keep: int
    steps_per_call: int
    every: int
    progress: Any
    _steps: int = dataclasses.field(default=0, init=False)  # done so far, over all trials
    _total: int = dataclasses.field(default=0, init=False)  # to do, over all trials
    # of these steps, those that this process did not restore
    _trained: int = dataclasses.field(default=0, init=False)
    _lowest: float = dataclasses.field(default=math.nan, init=False)  # loss in the newest steps
    # whether there was a chunk to train
    _begun: bool = dataclasses.field(default=False, init=False)
    # whether all processes end the sweep before its end
    _ending: bool = dataclasses.field(default=False, init=False)
    # numbers the questions whether to end
    _asked: Iterator[int] = dataclasses.field(default_factory=itertools.count, init=False)

    def run_rungs(self, trials: Sequence[Trial], folder: Path | None) -> Sweep:
        """Run all rungs; the best trials are saved in `folder`, one run each."""
        records = {trial.number: _Record([], []) for trial in trials}
        start = 0
        for count, stop in self.plan:
            self._total += count * (stop - start)
            start = stop
        self.progress.start(0, self._total)
        try:
            alive = list(trials)
            states: dict[int, Any] = {}
            for rung, (count, stop) in enumerate(self.plan):
                if rung:
                    alive = self._promoted(alive, records, count, self.plan[rung - 1][1])
                last = rung == len(self.plan) - 1
                states = self._rung(rung, alive, records, states, stop, last=last)
            ranked = best(
                {number: records[number].score for number in states}, self.keep, self.measure[1]
            )
            states = {
                number: states[number] for number in ranked if math.isfinite(records[number].score)
            }
            result = self._sweep(trials, records, states, folder)
            requested = ""
            if self._begun:
                requested = watchdog.current().requested_stop_reason
            if reason := first_nonempty(requested):
                _end(reason)  # it came too late to end anything
            return result
        finally:
            self.progress.close()

    def _promoted(
        self, alive: Sequence[Trial], records: Mapping[int, _Record], count: int, step: int
    ) -> list[Trial]:
        """The best trials, which continue after `step`; the others are recorded as dropped."""
        scores = {trial.number: records[trial.number].score for trial in alive}
        chosen = best(scores, count, self.measure[1])
        promoted = []
        for trial in alive:
            record = records[trial.number]
            if record.ended != "done":
                continue
            if trial.number in chosen:
                promoted.append(trial)
            else:
                record.ended = f"dropped at step {step}"
        return promoted

    def _rung(
        self,
        rung: int,
        alive: Sequence[Trial],
        records: dict[int, _Record],
        states: Mapping[int, Any],
        stop: int,
        *,
        last: bool,
    ) -> dict[int, Any]:
        """Train trials up to a step; return the host states of those that may be promoted."""
        promotable: dict[int, Any] = {}
        start = 0
        if rung:
            _, start = self.plan[rung - 1]
        count = self.keep
        if not last:
            count, _ = self.plan[rung + 1]
        for number, (packed, trials) in enumerate(self._chunks(alive)):
            history, evaluations, after = self._chunk(
                rung, number, packed, trials, states, start, stop
            )
            for place, trial in enumerate(trials):
                self._note(records[trial.number], packed, history[place], evaluations[place], stop)
                promotable[trial.number] = None
            scores = {key: records[key].score for key in promotable}
            promotable = {key: promotable[key] for key in best(scores, count, self.measure[1])}
            if after is not None:
                promotable |= after.host_states(promotable)
        return promotable

    def _chunks(self, alive: Sequence[Trial]) -> Iterator[tuple[VmappedTrials, Sequence[Trial]]]:
        """Trials that share a program, at most `at_once` of them at a time."""
        for key, packed in self.programs.items():
            sharing = [trial for trial in alive if self.study.constants(trial) == key]
            size = self.at_once or len(sharing) or 1
            for first in range(0, len(sharing), size):
                yield packed, sharing[first : first + size]

    def _chunk(
        self,
        rung: int,
        number: int,
        packed: VmappedTrials,
        trials: Sequence[Trial],
        states: Mapping[int, Any],
        start: int,
        stop: int,
    ) -> tuple[np.ndarray, list[dict[str, float]], Chunk | None]:
        """Measurements and evaluations of the trials of a chunk, and the chunk; None if its states
        were cleared away.
        """
        done = self.storage.finished(rung, number)
        if done is not None:
            chunk = None
            if not self.storage.cleared:
                chunk = Chunk(packed, trials, stop, None)
            # a damaged chunk is trained again
            if chunk is None or self.storage.resumed(rung, number, chunk):
                self._count(packed, len(trials) * (stop - start))
                return *done, chunk
        slots = filled(trials, packed)
        watch = watchdog.current()

        def initial(slot: int) -> Any:
            trial = slots[slot]
            if rung:
                return states[trial.number]
            return packed.initial_state(trial)

        chunk = Chunk(packed, trials, start, packed.stack(len(slots), initial))
        if self.storage.resumed(rung, number, chunk):
            self._count(packed, len(trials) * (chunk.step - start))

        def report(measured: np.ndarray) -> None:
            self._count(packed, measured.shape[0] * measured.shape[1], measured)
            watch.record_progress("step", self._steps)

        self._begin()
        evaluations = []
        with self.storage.saving(rung, number, chunk) as save:
            if chunk.step < stop:
                save = watch.in_phase("save")(save)
                chunk.train(
                    stop,
                    limit=self.steps_per_call,
                    every=self.every,
                    save=save,
                    report=report,
                    ends=self._ends,
                )
            if not self._ending:
                with watch.in_phase("eval"):
                    evaluations = chunk.evaluate()
            watch.record_progress("save", self._steps)
        # A chunk that ends early is resumed from its save, and has no result.
        if not self._ending:
            self.storage.finish(rung, number, chunk.history, evaluations)
        if self._ending or self._ends():
            _end(watch.stop_reason)
        watch.record_progress("compile", self._steps)  # which the first call of the next chunk may
        return chunk.history, evaluations, chunk

    def _begin(self) -> None:
        """Let SIGTERM and Ctrl-C end a sweep that has a folder after a save, from the first chunk
        that trains.
        """
        if not self._begun:
            self._begun = True
            watch = watchdog.current()
            watch.begin_run(self._steps)
            if self.storage.keeps:
                stop_by(watch.request_stop)

    def _ends(self) -> bool:
        """Return whether all processes end the sweep here, since one of them was asked to. All ask
        at the same points.
        """
        watch = watchdog.current()
        watch.has_trained = True
        self._ending = watch.should_stop(self._steps, next(self._asked))
        return self._ending

    def _count(self, packed: VmappedTrials, steps: int, measured: np.ndarray | None = None) -> None:
        """Count steps of trials and update the progress bar."""
        self._steps += steps
        self._trained += steps * (measured is not None)
        if measured is not None:
            # A trial that diverges has inf and NaN, of which numpy would warn.
            with np.errstate(all="ignore"):
                newest = measured[:, -1, 0, 0] / measured[:, -1, 1, 0]
            self._lowest = math.nan
            # np.nanmin warns where all are NaN.
            if np.isfinite(newest).any():
                self._lowest = float(np.nanmin(newest))
        if self.progress.due() or self._steps == self._total:  # the bar ends full
            pace = Pace(self._trained * packed.program.rows, time.monotonic())
            self.progress.update(self._steps, 0, {"lowest loss": self._lowest}, pace)

    def _note(
        self,
        record: _Record,
        packed: VmappedTrials,
        history: np.ndarray,
        evaluation: dict[str, float],
        stop: int,
    ) -> None:
        """Record a rung of a trial."""
        record.measured.append(history)
        if evaluation:
            named = {f"eval_{name}": value for name, value in evaluation.items()}
            record.evaluations.append((stop, named))
        names = packed.program.names
        name = self.measure[0]
        # A trial that diverges has inf and NaN, of which numpy would warn.
        with np.errstate(all="ignore"):
            values = record.steps[:, 0] / record.steps[:, 1]
        skipped, diverged = skipped_and_diverged(record.steps, names)
        if diverged.any():
            record.ended = f"diverged at step {int(np.argmax(diverged)) + 1}"
            record.score = math.nan
        elif name.startswith("eval_"):
            record.score = record.evaluations[-1][1][name]
        else:
            newest = slice(-min(len(values), self.study.data.steps_per_epoch), None)
            column = values[newest, names.index(name)]
            column = column[np.isfinite(column) | ~skipped[newest]]
            record.score = math.nan
            if len(column):
                record.score = float(column.mean(dtype=np.float64))

    def _sweep(
        self,
        trials: Sequence[Trial],
        records: Mapping[int, _Record],
        states: Mapping[int, Any],
        folder: Path | None,
    ) -> Sweep:
        """The outcome of all trials; those with a state are the best, and are saved."""
        states = dict(states)
        # files are read by all processes together, which need not ask for a result together
        if jax.process_count() > 1:
            for trial in trials:
                if trial.number in states and states[trial.number] is None:
                    result = self._result(trial, None, History(()), folder)
                    states[trial.number] = result.state
        tried = [
            self._trial_result(trial, records[trial.number], states, folder) for trial in trials
        ]
        best_trials = [tried[number] for number in states]
        if folder is not None:
            for result in best_trials:
                self._save_result(result, folder / f"trial-{result.number:04d}")
            self.storage.clear()  # only now: from the chunks, missing results could be rebuilt
        compilations = sum(packed.compilations() for packed in self.programs.values())
        return Sweep(tried, best_trials, self.measure, compilations)

    def _trial_result(
        self, trial: Trial, record: _Record, states: Mapping[int, Any], folder: Path | None
    ) -> TrialResult:
        packed = self.programs[self.study.constants(trial)]
        history = History(packed.program.names)
        history.add_steps(1, record.steps)
        for step, evaluation in record.evaluations:
            history.add_evaluation(step, evaluation)
        metrics = {}
        if record.evaluations:
            _, metrics = record.evaluations[-1]
        build = None
        if trial.number in states:
            build = functools.partial(self._result, trial, states[trial.number], history, folder)
        return TrialResult(trial, record.score, metrics, history, record.ended, build)

    def _result(
        self, trial: Trial, state: State | None, history: History, folder: Path | None
    ) -> Result:
        study = self.study
        workers = self.programs[study.constants(trial)].placed.resolved.workers
        mesh = make_mesh({"data": workers}, devices=jax.local_devices()[:workers])
        trainer = Trainer(**vars(study.train_config(trial)), mesh=mesh, layout=study.layout)
        trainer.prepare(study.data.sample())
        if state is None and folder is not None:
            placed = trainer.restore(folder / f"trial-{trial.number:04d}")
        else:
            placed = jax.tree.map(
                lambda leaf, abstract: place_copy(leaf, abstract.sharding),
                state,
                trainer.abstract_state,
            )
        return Result(placed, history, None, trainer)

    def _save_result(self, tried: TrialResult, place: Path) -> None:
        """Save one of the best trials as a run that `Trainer.restore` reads and `fit(resume=True)`
        resumes.
        """
        # One answer for all processes: a network file system may show the folder to some later.
        saved = ""
        if place.is_dir():
            saved = "saved"
        if first_nonempty(saved):
            return
        result = tried.result()
        data = dataclasses.replace(self.study.data, seed=tried.trial.seed)
        epoch, batch = divmod(int(result.state.step), data.steps_per_epoch)
        about = {
            **result.trainer.about(data),
            "position": dataclasses.asdict(Position(epoch, batch)),
            "callbacks": [],
            "pace": None,
        }
        unfinished = place.with_name(f".{place.name}")
        # An attempt that was killed while it saved has left this.
        if is_writer() and unfinished.exists():
            shutil.rmtree(unfinished)
        first_nonempty("")  # a barrier
        # replicated on all devices: Orbax writes an array from all processes that have a part of it
        mesh = self.programs[self.study.constants(tried.trial)].mesh
        replicated = NamedSharding(mesh, PartitionSpec())
        state = jax.tree.map(lambda leaf: place_copy(leaf, replicated), result.state)
        with open_checkpoints(unfinished) as store:
            store.save(state, int(result.state.step), about, {})
        # complete, or absent; no process returns before it is there
        in_writer(lambda: publish(unfinished, place))


def skipped_and_diverged(steps: np.ndarray, names: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """The steps of a trial whose update was skipped, and those at which `fit` would have ended as
    diverged: bool[steps] each.

    >>> skipped_and_diverged(
    ...     np.array([[[np.nan, 2], [1, 1]], [[np.nan, 0], [1, 0]]]), ("loss", "skips_left")
    ... )
    (array([ True, False]), array([False,  True]))
    """
    # A trial that diverges has inf and NaN, of which numpy would warn.
    with np.errstate(all="ignore"):
        values = steps[:, 0] / steps[:, 1]
    diverged = ~np.isfinite(values[:, names.index(LOSS)])
    if LEFT not in names:
        return np.zeros(len(steps), bool), diverged
    left = names.index(LEFT)
    skipped = steps[:, 1, left] > 0
    return skipped, np.where(skipped, values[:, left] == 0, diverged)


def _end(reason: str) -> NoReturn:
    """End the sweep as a signal does that arrives outside it."""
    if reason == SIGINT_REASON:
        raise KeyboardInterrupt
    raise SystemExit(TERMINATED)
