"""Find the process that failed first, from the times in the records that processes leave
(`spmd.distributed.launcher_protocol`).
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from spmd.distributed.launcher_protocol import ERROR, FAILED, HEARTBEAT_SECONDS, STALL, WAIT

# Instead of a rank: srun has one exit code for all of its processes.
ALL = -1
# a last heartbeat this much older than another's failure precedes it
QUIET = 1.5 * HEARTBEAT_SECONDS
# JAX's client of the coordination service ends its process by SIGABRT when the service is gone.
ABORTED = -6


@dataclasses.dataclass(frozen=True)
class Failure:
    """A reported failure: its time, step, phase, kind (`spmd.distributed.launcher_protocol`), error
    text and exit code.
    """

    at: float
    rank: int
    step: int
    phase: str
    kind: str
    text: str
    code: int


@dataclasses.dataclass(frozen=True)
class Heartbeat:
    """The last heartbeat of a process: its time, step, phase, the time of the last progress,
    whether it did work that needs no other process, why it left its run alone, how it ended.
    """

    at: float
    rank: int
    step: int
    phase: str
    since: float
    busy: bool
    stopped: str | None
    end: str


def failures(records: Iterable[Mapping[str, Any]]) -> list[Failure]:
    """The reported failures, root causes first: errors, then processes without progress, then those
    that only waited; each by time.
    """
    reported = []
    for record in records:
        # records of other kinds, and those that a killed process has written in part
        with contextlib.suppress(ValueError, KeyError, TypeError):
            reported.append(
                Failure(
                    at=float(record["at"]),
                    rank=int(record["name"]),
                    step=int(record["step"]),
                    phase=str(record.get("phase", "")),
                    kind=str(record.get("kind", ERROR)),
                    text=str(record["error"]),
                    code=int(record.get("code", FAILED)),
                )
            )
    order = {ERROR: 0, STALL: 1, WAIT: 2}
    return sorted(
        reported,
        key=lambda failure: (order.get(failure.kind, 0), failure.at, failure.rank),
    )


def heartbeats(records: Iterable[Mapping[str, Any]]) -> dict[int, Heartbeat]:
    """The last heartbeat of each process, by rank."""
    last = {}
    for record in records:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            if str(record["name"]).startswith("life."):
                at = float(record["at"])
                rank = int(record["name"].removeprefix("life."))
                last[rank] = Heartbeat(
                    at=at,
                    rank=rank,
                    step=int(record["step"]),
                    phase=str(record["phase"]),
                    since=at - float(record["since"]),
                    busy=bool(record["busy"]),
                    stopped=None if record["stopped"] is None else str(record["stopped"]),
                    end=str(record["end"]),
                )
    return last


def unreported_cause(
    failed: list[Failure], last_heartbeats: Mapping[int, Heartbeat], first: Mapping[int, int]
) -> tuple[int, str] | None:
    """A process that caused the failures of others without reporting one: its rank, and a
    description.

    Args:
      failed: the reported failures (`failures`).
      last_heartbeats: of all processes (`heartbeats`).
      first: exit codes of the processes that ended first.

    Returns:
      None if a reported failure, or an exit by a signal, is the cause.
    """
    by_signal = {
        rank for rank, code in first.items() if code < 0 and code != ABORTED and rank != ALL
    }
    done = {beat.rank: beat.at for beat in last_heartbeats.values() if beat.end == "done"}
    # Where all scripts have ended, none can have failed by leaving others behind.
    if len(done) == len(last_heartbeats):
        done = {}
    # A process that reports a failure after the end of its script fails because it has ended while
    # others still ran.
    primary = [failure for failure in failed if failure.at < done.get(failure.rank, math.inf)]
    reported = {failure.rank for failure in primary}
    others = [
        beat
        for rank, beat in last_heartbeats.items()
        if rank not in reported and rank not in by_signal
    ]
    aborted = [
        last_heartbeats[rank].at
        for rank, code in first.items()
        if code == ABORTED and rank in last_heartbeats
    ]
    began = min([failure.at for failure in failed] or aborted, default=math.inf)
    if began == math.inf:
        return None
    signs = list(_silent(others, first, began))
    if not by_signal and all(failure.kind == WAIT for failure in primary):
        silent = {rank for _, rank, _ in signs}
        signs += _left([beat for beat in others if beat.rank not in silent], primary, began)
    killed_at = [last_heartbeats[rank].at for rank in by_signal if rank in last_heartbeats]
    if by_signal and not killed_at:
        killed_at = [-math.inf]
    if not signs or min(signs)[0] > min(killed_at, default=math.inf):
        return None
    at, rank, text = min(signs)
    description = f"process {rank} {text}"
    if began - at >= 1:
        description += f", {began - at:.0f} s before another failed"
    return rank, description


def _silent(
    others: Iterable[Heartbeat], first: Mapping[int, int], began: float
) -> Iterator[tuple[float, int, str]]:
    """Processes that exited or stopped their heartbeats without a report, before the first reported
    failure.
    """
    for beat in others:
        if beat.end:
            continue
        heard = f"last heartbeat in {beat.phase} after step {beat.step}"
        # srun does not say which of its processes ended, so any heartbeat before the failure counts
        silence = 0 if ALL in first else QUIET
        if first.get(beat.rank) == 0:
            yield beat.at, beat.rank, f"ended with code 0 before the end of its script, {heard}"
        elif beat.at + silence < began:
            yield (
                beat.at,
                beat.rank,
                f"was killed, stopped, or blocked by code that holds the GIL, {heard}",
            )


def _left(
    others: Iterable[Heartbeat], failed: list[Failure], began: float
) -> Iterator[tuple[float, int, str]]:
    """Processes that were not in the phase in which others waited for them."""
    phases = {failure.phase for failure in failed} - {"script"}
    for beat in others:
        # There is a failure, so the scripts of others have not ended.
        if beat.end == "done":
            yield (
                beat.at,
                beat.rank,
                f"finished its script after step {beat.step}, and others did not",
            )
        elif beat.stopped is not None and beat.phase != "step":
            yield (
                beat.since,
                beat.rank,
                f"left its run alone after step {beat.step} (info.stop: {beat.stopped})",
            )
        elif phases and beat.phase not in phases:
            yield (
                beat.since,
                beat.rank,
                f"was in {beat.phase} after step {beat.step}, others waited for it in "
                f"{min(phases)}",
            )
        elif beat.busy and beat.since + QUIET < began:
            yield (
                beat.since,
                beat.rank,
                f"made no progress in {beat.phase} after step {beat.step}, without waiting for "
                "others",
            )
