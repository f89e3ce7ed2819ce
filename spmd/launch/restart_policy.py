"""Whether a group that has failed is started again, and when: a policy over what each attempt came to."""

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from spmd.distributed.watchdog import DISAGREED, PEER, TERMINATED, USAGE
from spmd.errors import printable
from spmd.launch import failure_cause
from spmd.launch.failure_cause import ABORTED, ALL

NO_PROGRESS = 3  # restarts in a row that began at the same step
LOST = 255  # code of processes whose host is gone, or could not be reached; as ssh has it
LONGEST = 60.0  # seconds between two attempts


@dataclasses.dataclass(frozen=True)
class Attempt:
    """What an attempt came to.

    Attributes:
      codes: exit codes by rank, or of `ALL`; negative ones are signals.
      began: the step that its first run began at; None where none began.
      failures: by rank, at which step what failed, as far as processes could tell, the first first.
      first: exit codes of those that ended first.
      early: who was the reason for these failures without reporting one, in words (`spmd.launch.failure_cause`); None: nobody.
      saved: the step that is on disk since somebody asked the run to end; None: it has not said that there is one.
      fewer: whether it had fewer hosts than there are; what does not fit those may fit all.
      asked: the signal by which somebody asked the whole group to end; None: nobody did.
    """

    codes: Mapping[int, int]
    began: int | None = None
    failures: Mapping[int, tuple[int, str]] = dataclasses.field(default_factory=dict)
    first: Mapping[int, int] = dataclasses.field(default_factory=dict)
    asked: int | None = None
    fewer: bool = False
    early: tuple[int, str] | None = None
    saved: int | None = None

    @property
    def why(self) -> str:
        """The root cause in words, and what came of it first: who failed without a word, or how the first ended that ended by itself."""
        told = [f"process {rank} at step {step}: {' '.join(text.split())[:400]}" for rank, (step, text) in self.failures.items()]
        ended = [(rank, code) for rank, code in (*self.first.items(), *sorted(self.codes.items())) if code]
        own = [(rank, code) for rank, code in ended if code != PEER] or ended
        untold = [_ended(rank, code, self.saved) for rank, code in own[:1] if code < 0 or code == LOST or not told]
        causes = ([] if self.early is None else [self.early[1]]) + [*untold, *told[:1]]
        return printable("; consequence: ".join(causes[:2]))

    @property
    def signature(self) -> tuple[int, str] | None:
        """What is the same where the same error comes at the same step; None where no process has told."""
        return next(iter(self.failures.values()), None)


def _ended(rank: int, code: int, saved: int | None = None) -> str:
    """In words.

    >>> _ended(1, -9), _ended(0, 143, 20)
    ('process 1 ended with signal 9', 'process 0 ended with code 143: it was asked to end by SIGTERM, and has saved step 20')
    """
    if code == LOST:
        return "hosts are missing" if rank == ALL else f"the host of process {rank} is gone"
    who = "the step of srun" if rank == ALL else f"process {rank}"
    if code < 0:
        return f"{who} ended with signal {-code}"
    return f"{who} ended with code {code}" + (f": it was asked to end by SIGTERM{_saved(saved)}" if code == TERMINATED else "")


def _saved(step: int | None) -> str:
    return "" if step is None else f", and has saved step {step}"


def records(folder: Path) -> list[dict[str, Any]]:
    """What processes left in the folder that they were given (`spmd.distributed.records.report`), as it is; each has a "name"."""
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            found.append({**json.loads(path.read_text(encoding="utf-8")), "name": path.stem})
        except (OSError, ValueError, TypeError):
            continue  # a process that was killed while it wrote
    return found


def attempted(told: Iterable[Mapping[str, Any]], codes: Mapping[int, int], first: Mapping[int, int], asked: int | None = None) -> Attempt:
    """An attempt, from what its processes left (`records`) and ended with; what a process said that it would end with counts more."""
    told = list(told)
    failed, living, steps = failure_cause.failures(told), failure_cause.lives(told), dict[str, int]()
    for record in told:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            steps[record["name"]] = int(record["step"])
    last = lambda rank: living[rank].at if rank in living else 0.0
    by_others = {rank for rank, code in first.items() if code == ABORTED and failed and last(rank) > failed[0].at}
    first = {rank: first[rank] for rank in sorted(first, key=last) if rank not in by_others}
    early = failure_cause.early(failed, living, first)
    said = {one.rank: one.code for one in failed}
    what = {one.rank: one.what for one in failed}
    return Attempt({**codes, **said}, steps.get("began"), what, first, asked, early=early, saved=steps.get("saved"))


def repeated(attempt: Callable[[int], Attempt], most: int, say: Callable[[str], None]) -> int:
    """Start a group, again and again where that may help, until it comes to an end.

    Args:
      attempt: all processes, once; it is given how many attempts there were before.
      most: restarts at most.
      say: is told of failures and restarts.

    Returns:
      0, or what the process ended with that failed first.
    """
    attempts: list[Attempt] = []
    while True:
        last = attempt(len(attempts))
        if not any(last.codes.values()):
            return 0
        attempts.append(last)
        say(last.why)
        why = f"it was asked to end by signal {last.asked}" if last.asked is not None else stop_because(attempts, most)
        if why is not None:
            if most:
                say(f"not started again: {why}.")
            return exit_code(last)
        seconds = pause(len(attempts))
        say(f"restart {len(attempts)} of at most {most}" + (f", in {seconds:.0f} s" if seconds else ""))
        time.sleep(seconds)


def stop_because(attempts: Sequence[Attempt], most: int) -> str | None:
    """Why there is no other attempt; None: there is one.

    Args:
      attempts: all so far, none of which came to a good end.
      most: restarts at most.
    """
    last = attempts[-1]
    codes = set(last.codes.values())
    if DISAGREED in codes:
        return "processes that do not agree would not agree the next time either"
    if USAGE in codes and not last.fewer:
        return "what was wrong before training began would be so again"
    if TERMINATED in codes:
        return f"it was asked to end{_saved(last.saved)}"
    if len(attempts) > 1 and last.signature is not None and last.signature == attempts[-2].signature:
        return "the same error came at the same step twice"
    tried = [attempt for attempt in attempts if set(attempt.codes.values()) != {LOST}]
    begun = [attempt.began for attempt in tried[-NO_PROGRESS - 1 :]]
    if len(begun) > NO_PROGRESS and len(set(begun)) == 1:
        return f"there is no progress: {NO_PROGRESS + 1} attempts began at step {begun[0] or 0}"
    if len(attempts) > most:
        return f"{most} restarts are the most that were asked for (--max-restarts)"
    return None


def pause(restart: int) -> float:
    """Seconds before a restart, the first being number 1: none, 1, 2, 4 … 60.

    >>> [pause(restart) for restart in (1, 2, 3, 4, 10)]
    [0.0, 1.0, 2.0, 4.0, 60.0]
    """
    return 0.0 if restart == 1 else min(2.0 ** (restart - 2), LONGEST)


def exit_code(attempt: Attempt) -> int:
    """Of a launcher whose last attempt this was: that of a process that failed by itself; 128 + the signal, as shells have it."""
    own = [attempt.codes[rank] for rank in attempt.failures if attempt.codes.get(rank)]
    code = next((code for code in (*own, *attempt.first.values(), *attempt.codes.values()) if code), 0)
    return code if code >= 0 else 128 - code
