"""Decide whether and when failed processes are restarted, from the outcomes of all attempts."""

import contextlib
import dataclasses
import json
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from spmd.distributed.launcher_protocol import DISAGREED, PEER, TERMINATED, USAGE
from spmd.errors import printable
from spmd.launch import failure_cause
from spmd.launch.failure_cause import ABORTED, ALL

NO_PROGRESS = 3  # restarts in a row that began at the same step
# The exit code of processes whose host is gone or unreachable, as ssh has it.
LOST = 255
MAX_DELAY = 60.0  # seconds between two attempts


@dataclasses.dataclass(frozen=True)
class Attempt:
    """The outcome of one attempt.

    Attributes:
      codes: exit codes by rank, or of `ALL`; negative ones are signals.
      first_step: the step at which its first run started; None if none started.
      failures: by rank, the step and the error that the process has reported; root causes first.
      first: exit codes of the processes that ended first.
      unreported_cause: rank and description of a process that caused the failures without a report
        (`failure_cause`), or None.
      saved: the step that was saved after a request to stop; None if unknown.
      failed_at: when the first process failed, in seconds since 1970; None if that is not known.
      fewer: whether it ran on fewer hosts than configured; options that do not fit those may fit
        all.
      stop_signal: the signal that asked all processes to stop; None: there was none.
      final: why there can be no other attempt; "": there can.
    """

    codes: Mapping[int, int]
    first_step: int | None = None
    failures: Mapping[int, tuple[int, str]] = dataclasses.field(default_factory=dict)
    first: Mapping[int, int] = dataclasses.field(default_factory=dict)
    stop_signal: int | None = None
    fewer: bool = False
    unreported_cause: tuple[int, str] | None = None
    saved: int | None = None
    failed_at: float | None = None
    final: str = ""

    @property
    def cause(self) -> str:
        """A description of the root cause and its first consequence: reported errors, and exits
        without a report.
        """
        reported = [
            f"process {rank} at step {step}: {' '.join(text.split())[:400]}"
            for rank, (step, text) in self.failures.items()
        ]
        exits = (*self.first.items(), *sorted(self.codes.items()))
        ended = [(rank, code) for rank, code in exits if code]
        # PEER follows from another process's failure.
        primary = [(rank, code) for rank, code in ended if code != PEER] or ended
        causes = []
        if self.unreported_cause is not None:
            causes.append(self.unreported_cause[1])
        for rank, code in primary[:1]:
            asked = sum(code == TERMINATED for code in self.codes.values())
            if code == TERMINATED and asked > 1 and not reported:
                # SIGTERM reached one of them or all; the exit codes do not say which
                causes.append(
                    f"{asked} processes ended with code {TERMINATED} after "
                    f"SIGTERM{_saved(self.saved, 'have')}"
                )
            elif code < 0 or code == LOST or not reported:
                causes.append(_describe_end(rank, code, self.saved))
        causes += reported[:1]
        return printable("; consequence: ".join(causes[:2]))

    @property
    def signature(self) -> tuple[int, str] | None:
        """Step and text of the first error, to recognize one that recurs at the same step; None if
        none was reported.
        """
        return next(iter(self.failures.values()), None)


def _describe_end(rank: int, code: int, saved: int | None = None) -> str:
    """A description of an exit code.

    >>> _describe_end(1, -9)
    'process 1 ended with signal 9'
    >>> _describe_end(0, 143, 20)
    'process 0 ended with code 143: it received SIGTERM, and has saved step 20'
    """
    if code == LOST:
        return "hosts are missing" if rank == ALL else f"the host of process {rank} is gone"
    who = "the step of srun" if rank == ALL else f"process {rank}"
    text = f"{who} ended with {code_text(code)}"
    if code in (TERMINATED, -signal.SIGTERM):
        text += f": it received SIGTERM{_saved(saved)}"
    return text


def code_text(code: int) -> str:
    """Return an exit code in words.

    >>> code_text(1), code_text(-9)
    ('code 1', 'signal 9')
    """
    if code < 0:
        return f"signal {-code}"
    return f"code {code}"


def _saved(step: int | None, has: str = "has") -> str:
    return "" if step is None else f", and {has} saved step {step}"


def read_records(folder: Path) -> list[dict[str, Any]]:
    """The records that processes left in their folder
    (`spmd.distributed.launcher_protocol.report_to_launcher`), each with its "name".
    """
    records = []
    for path in sorted(folder.glob("*.json")):
        try:
            records.append({**json.loads(path.read_text(encoding="utf-8")), "name": path.stem})
        except (OSError, ValueError, TypeError):
            # The file is gone by now, or damaged: records are not synced to the disk.
            continue
    return records


def summarize_attempt(
    records: Iterable[Mapping[str, Any]],
    codes: Mapping[int, int],
    first: Mapping[int, int],
    stop_signal: int | None = None,
    failed_at: float | None = None,
) -> Attempt:
    """An attempt, from its processes' records and exit codes; an exit code in a record takes
    precedence.
    """
    records = list(records)
    failed = failure_cause.failures(records)
    last_heartbeats = failure_cause.heartbeats(records)
    steps: dict[str, int] = {}
    for record in records:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            steps[record["name"]] = int(record["step"])

    def last(rank: int) -> float:
        return last_heartbeats[rank].at if rank in last_heartbeats else 0.0

    # JAX aborts processes when process 0, with the coordination service, is gone: a consequence
    by_others = {
        rank
        for rank, code in first.items()
        if code == ABORTED and failed and last(rank) > failed[0].at
    }
    # Between two looks several processes may have ended; the one that made its last heartbeat
    # earlier ended first.
    first = {rank: first[rank] for rank in sorted(first, key=last) if rank not in by_others}
    times = [failure.at for failure in failed]
    if failed_at is not None:
        times.append(failed_at)
    return Attempt(
        # srun knows only the highest exit code of its processes; records have each one's own.
        codes={**codes, **{failure.rank: failure.code for failure in failed}},
        first_step=steps.get("began"),
        failures={failure.rank: (failure.step, failure.text) for failure in failed},
        first=first,
        stop_signal=stop_signal,
        unreported_cause=failure_cause.unreported_cause(failed, last_heartbeats, first),
        saved=steps.get("saved"),
        failed_at=min(times, default=None),
    )


def run_with_restarts(
    attempt: Callable[[Sequence[float]], Attempt], most: int, log: Callable[[str], None]
) -> int:
    """Run all processes, and restart them as long as that may help.

    Args:
      attempt: runs all processes once; called with seconds since 1970: when this function was
        called, start and end of each earlier attempt, and the start of this one.
      most: the most restarts.
      log: called with lines about failures and restarts.

    Returns:
      0, or the exit code of the process that failed first.
    """
    attempts: list[Attempt] = []
    times = [time.time()]
    while True:
        times.append(time.time())
        last = attempt(times)
        ended_at = time.time()
        if last.failed_at is not None:
            # clocks of hosts differ, and an attempt cannot end before it began, or later than now
            ended_at = max(times[-1], min(last.failed_at, ended_at))
        times.append(ended_at)
        if not any(last.codes.values()):
            return 0
        attempts.append(last)
        log(last.cause)
        reason = no_restart_reason(attempts, most)
        if last.stop_signal is not None:
            reason = f"it was stopped by signal {last.stop_signal}"
        if reason is not None:
            if most:
                log(f"no restart: {reason}.")
            return exit_code(last)
        seconds = restart_delay(attempts)
        delay = f", in {seconds:.0f} s" if seconds else ""
        log(f"restart {len(attempts)} of at most {most}{delay}")
        try:
            time.sleep(seconds)
        except KeyboardInterrupt:
            log("no restart: it was interrupted.")
            return exit_code(last)


def no_restart_reason(attempts: Sequence[Attempt], most: int) -> str | None:
    """The reason why there is no restart; None: there is one.

    Args:
      attempts: all so far, all of which failed.
      most: the most restarts.
    """
    last = attempts[-1]
    codes = set(last.codes.values())
    if DISAGREED in codes:
        return "processes that disagree would disagree again"
    if USAGE in codes and not last.fewer:
        return "the error before training would recur"
    if codes & {TERMINATED, -signal.SIGTERM}:
        return f"it was asked to stop{_saved(last.saved)}"
    if last.final:
        return last.final
    if (
        len(attempts) > 1
        and last.signature is not None
        and last.signature == attempts[-2].signature
    ):
        return "the same error occurred twice at the same step"
    reached = [attempt for attempt in attempts if set(attempt.codes.values()) != {LOST}]
    begun = [attempt.first_step for attempt in reached[-NO_PROGRESS - 1 :]]
    if len(begun) > NO_PROGRESS and len(set(begun)) == 1:
        return f"no progress: {NO_PROGRESS + 1} attempts started at step {begun[0] or 0}"
    if len(attempts) > most:
        return f"the limit of {most} restarts is reached (--max-restarts)"
    return None


def restart_delay(attempts: Sequence[Attempt]) -> float:
    """Seconds before the next restart: 0, 1, 2, 4 … 60, by the number of attempts in a row that
    started at the same step. So a run that makes progress between rare failures never waits, and
    more than 2 s come only while hosts are missing (`NO_PROGRESS`).

    >>> [
    ...     restart_delay([Attempt({0: 1}, first_step=step) for step in steps])
    ...     for steps in ([0], [0, 0], [0, 0, 0], [0, 0, 20])
    ... ]
    [0.0, 1.0, 2.0, 0.0]
    """
    same = 0
    for attempt in reversed(attempts):
        if attempt.first_step != attempts[-1].first_step:
            break
        same += 1
    return 0.0 if same == 1 else min(2.0 ** (same - 2), MAX_DELAY)


def exit_code(attempt: Attempt) -> int:
    """The launcher's exit code after its last attempt: that of a process that failed first; 128 +
    the signal, as in shells.
    """
    reported = [attempt.codes.get(rank, 0) for rank in attempt.failures]
    codes = (*reported, *attempt.first.values(), *attempt.codes.values())
    code = next(filter(None, codes), 0)
    return code if code >= 0 else 128 - code
