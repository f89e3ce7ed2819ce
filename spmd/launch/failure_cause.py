"""Which process failed first: the earliest sign of failure by time, from the records that processes leave (`spmd.distributed.records`)."""

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from spmd.distributed.records import ERROR, HEARTBEAT_SECONDS, STALL, WAIT
from spmd.distributed.watchdog import FAILED

ALL = -1  # in the place of a rank: all processes together, where only the command that has started them ends with a code (srun)
QUIET = 1.5 * HEARTBEAT_SECONDS  # a sign of life that is older than another's failure by more was the last before it
ABORTED = -6  # how JAX ends a process whose coordination service has gone


@dataclasses.dataclass(frozen=True)
class Failure:
    """What a process has reported: when, after which step, in which phase, its kind (`spmd.distributed.records`), and its last words."""

    at: float
    rank: int
    step: int
    phase: str
    kind: str
    text: str
    code: int

    @property
    def what(self) -> tuple[int, str]:
        """What is the same where the same error comes at the same step."""
        return self.step, self.text


@dataclasses.dataclass(frozen=True)
class Life:
    """The last sign of life of a process: when, after which step, in which phase, since when without progress, whether it did
    what needs no other, why it left its run alone, how it ended."""

    at: float
    rank: int
    step: int
    phase: str
    since: float
    busy: bool
    stopped: str | None
    end: str


def failures(told: Iterable[Mapping[str, Any]]) -> list[Failure]:
    """What failed, root causes first: errors, then processes that made no progress, then those that only waited; each by time."""
    found = []
    for record in told:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            own = int(record["step"]), str(record.get("phase", "")), str(record.get("kind", ERROR)), str(record["error"])
            found.append(Failure(float(record["at"]), int(record["name"]), *own, int(record.get("code", FAILED))))
    order = (ERROR, STALL, WAIT)
    return sorted(found, key=lambda one: (order.index(one.kind) if one.kind in order else 0, one.at, one.rank))


def lives(told: Iterable[Mapping[str, Any]]) -> dict[int, Life]:
    """The last sign of life of each process, by rank."""
    found = {}
    for record in told:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            if str(record["name"]).startswith("life."):
                at, rank = float(record["at"]), int(record["name"].removeprefix("life."))
                stopped = None if record["stopped"] is None else str(record["stopped"])
                since = at - float(record["since"])
                found[rank] = Life(
                    at, rank, int(record["step"]), str(record["phase"]), since, bool(record["busy"]), stopped, str(record["end"])
                )
    return found


def early(failed: list[Failure], living: Mapping[int, Life], first: Mapping[int, int]) -> tuple[int, str] | None:
    """A process that was the reason for what others have reported, though it reported nothing: its rank, and what is known of it.

    Args:
      failed: what processes have reported (`failures`).
      living: last signs of life (`lives`).
      first: exit codes of those that ended first.

    Returns:
      None where those that have reported, or were ended by a signal, say it themselves.
    """
    by_signal = {rank for rank, code in first.items() if code < 0 and code != ABORTED and rank != ALL}
    waited = [life for life in living.values() if life.end != "done"]
    late = {life.rank: life.at for life in living.values() if life.end == "done" and waited}  # what these report later came of their end
    own = [one for one in failed if one.at < late.get(one.rank, math.inf)]
    reported = {one.rank for one in own}
    others = [life for rank, life in living.items() if rank not in reported and rank not in by_signal]
    aborted = [living[rank].at for rank, code in first.items() if code == ABORTED and rank in living]
    began = min([one.at for one in failed] or aborted, default=math.inf)
    if began == math.inf:
        return None
    signs = _silent(others, first, began)
    if not by_signal and all(one.kind == WAIT for one in own):
        silent = {rank for _, rank, _ in signs}
        signs += _left([life for life in others if life.rank not in silent], own, began)
    killed = min((living[rank].at for rank in by_signal if rank in living), default=math.inf if not by_signal else -math.inf)
    if not signs or min(signs)[0] > killed:
        return None
    at, rank, text = min(signs)
    return rank, f"process {rank} {text}" + (f", {began - at:.0f} s before another failed" if began - at >= 1 else "")


def _silent(others: Iterable[Life], first: Mapping[int, int], began: float) -> list[tuple[float, int, str]]:
    """Those that ended, or gave no sign of life any more, without a word, before anything else was reported."""
    found = []
    for life in others:
        if life.end:
            continue
        heard = f"last heard of in {life.phase} after step {life.step}"
        if first.get(life.rank) == 0:
            found.append((life.at, life.rank, f"ended with code 0 before the end of its script, {heard}"))
        elif life.at + (0 if ALL in first else QUIET) < began:  # of processes that srun has ended nobody knows how
            found.append((life.at, life.rank, f"was killed, stopped, or held by code that keeps the GIL, {heard}"))
    return found


def _left(others: Iterable[Life], failed: list[Failure], began: float) -> list[tuple[float, int, str]]:
    """Those that were not where others waited for them."""
    phases, found = {one.phase for one in failed} - {"script"}, []
    for life in others:
        if life.end == "done":  # the others have not: there is a failure
            found.append((life.at, life.rank, f"came to the end of its script after step {life.step}, and others did not"))
        elif life.stopped is not None and life.phase != "step":
            found.append((life.since, life.rank, f"left its run alone after step {life.step} (info.stop: {life.stopped})"))
        elif phases and life.phase not in phases:
            found.append((life.since, life.rank, f"was in {life.phase} after step {life.step}, and others waited for it in {min(phases)}"))
        elif life.busy and life.since + QUIET < began:
            found.append((life.since, life.rank, f"made no progress in {life.phase} after step {life.step}, and waited for no other"))
    return found
