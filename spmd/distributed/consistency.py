"""Check, before anything is compiled, that all processes are about to run the same program with the
same options.
"""

import base64
import contextlib
import hashlib
import itertools
import json
import sys
import time
import zlib
from collections.abc import Callable, Mapping
from typing import TypeVar, cast

from spmd import errors
from spmd.distributed import coordination
from spmd.distributed.watchdog import current
from spmd.errors import ClusterError, RendezvousTimeout, SpmdError, printable

Result = TypeVar("Result")
MAX_SHOWN = 8  # differences in an error
# The others wait this much longer than process 0, which knows who is missing.
EXTRA_SECONDS = 10.0

_call_numbers = itertools.count()


def check_consistency(facts: Mapping[str, str], timeout: float = 300.0) -> None:
    """Compare facts with those of all other processes; does nothing in a single process.

    All processes call it, in the same order. Each publishes its facts, and a hash of them, through
    the coordination service. Process 0 reads the hashes, and the facts of the first process whose
    hash differs.

    Args:
      facts: what must be the same, by name.
      timeout: seconds until all must have called it.

    Raises:
      ClusterError: in all processes, with the same text: which facts differ, in which process, and
        both values.
      RendezvousTimeout: some process did not call it in time.
    """
    if not coordination.is_initialized():
        return
    path = f"agree/{next(_call_numbers)}"
    rank, size, _ = coordination.process_info()
    text = json.dumps(dict(facts), sort_keys=True)
    coordination.put(
        # The service keeps texts, so the compressed bytes are written as base64.
        f"{path}/facts/{rank}",
        base64.b64encode(zlib.compress(text.encode())).decode(),
    )
    # After the facts: process 0 reads those of a process as soon as it has seen its hash.
    coordination.put(f"{path}/hash/{rank}", hashlib.sha256(text.encode()).hexdigest())
    if rank == 0:
        absent, verdict = _verdict(path, size, facts, timeout)
        coordination.put(f"{path}/verdict", json.dumps([absent, verdict]))
    else:
        try:
            absent, verdict = json.loads(
                coordination.get(f"{path}/verdict", timeout + EXTRA_SECONDS)
            )
        except TimeoutError:
            absent = True
            verdict = f"process 0 did not arrive within {timeout:g} s"
    if absent:
        fix = "the log of that process; a longer timeout if it was only slow."
        raise RendezvousTimeout(f"the consistency check failed: {verdict}", fix=fix)
    if verdict:
        raise ClusterError(
            f"the processes do not agree: {verdict}",
            fix="the same script, files, options and environment everywhere.",
        )


def gather_texts(text: str, timeout: float = 1800.0) -> list[str]:
    """The texts of all processes, by rank; all processes call it, in the same order, and get the
    same.

    Raises:
      RendezvousTimeout: some process did not call it in time.
    """
    if not coordination.is_initialized():
        return [text]
    path = f"gather/{next(_call_numbers)}"
    rank, size, _ = coordination.process_info()
    coordination.put(f"{path}/{rank}", text)
    try:
        return [coordination.get(f"{path}/{other}", timeout) for other in range(size)]
    except TimeoutError as error:
        raise RendezvousTimeout(
            f"a process did not arrive within {timeout:g} s: {error}.",
            fix="the log of that process.",
        ) from None


def first_nonempty(text: str, timeout: float = 1800.0) -> str:
    """The first text that is not "", by rank; all processes call it, in the same order, and get the
    same.

    Raises:
      RendezvousTimeout: some process did not call it in time.
    """
    # By rank, not by time of arrival: all processes must choose the same text.
    return next((each for each in gather_texts(text, timeout) if each), "")


def raise_everywhere(action: Callable[[], Result], error: type[SpmdError], failure: str) -> Result:
    """Call a function in all processes; if it fails in one, raise an `error` in all: its text, or
    `failure` and the system's message.
    """
    result, raised, text = None, None, ""
    try:
        result = action()
    except SpmdError as cause:
        raised = cause
        text = str(cause)
    except OSError as cause:
        raised = cause
        text = f"{failure}: {cause}"
    first_error = first_nonempty(text)
    if isinstance(raised, error) and str(raised) == first_error:
        raise raised
    if first_error:
        raise error(first_error) from raised
    return cast(Result, result)


def from_first_process(
    action: Callable[[Callable[[], None]], str], doing: str, timeout: float = 1800.0
) -> str:
    """The text that `action` returns in process 0, in all processes; all call it, in the same
    order. The others wait, and say so.

    Args:
      action: run in process 0 only; it calls its argument whenever it has advanced.
      doing: what process 0 does, for the line that the others print.
      timeout: seconds without such a call after which the others give up.

    Raises:
      SpmdError: what `action` raises; in all processes, of the same kind and with the same text.
      RendezvousTimeout: process 0 does not advance.
    """
    if not coordination.is_initialized():
        return action(lambda: None)
    path = f"first/{next(_call_numbers)}"
    rank, _, _ = coordination.process_info()
    watch = current()
    advances = itertools.count(1)

    def advance() -> None:
        watch.record_progress(watch.phase, watch.step)
        coordination.put(f"{path}/advance", str(next(advances)))

    if rank == 0:
        try:
            text = action(advance)
        except SpmdError as error:
            coordination.put(f"{path}/end", json.dumps([type(error).__name__, str(error)]))
            raise
        coordination.put(f"{path}/end", json.dumps(["", text]))
        return text
    sys.stderr.write(f"spmd {rank}: waits for process 0: {doing}\n")
    deadline = time.monotonic() + timeout
    last_advance = ""
    while True:
        # In waits of a second, between which the progress of process 0 is looked at.
        with contextlib.suppress(TimeoutError):
            kind, text = json.loads(coordination.get(f"{path}/end", 1.0))
            break
        advanced = coordination.read_dir(f"{path}/").get("advance", "")
        if advanced != last_advance:
            last_advance = advanced
            deadline = time.monotonic() + timeout
            watch.record_progress(watch.phase, watch.step)
        if time.monotonic() > deadline:
            why = f"{doing}: process 0 has not advanced for {timeout:g} s."
            raise RendezvousTimeout(why, fix="the log of process 0.")
    if kind:
        # JSON holds no exception, so process 0 sends the name of the error's class and its text.
        raise getattr(errors, kind, SpmdError)(text)
    return text


def _verdict(path: str, size: int, facts: Mapping[str, str], timeout: float) -> tuple[bool, str]:
    """Compare hashes in process 0; returns whether a process is missing, and which one, or the
    facts that differ ("" if none does).
    """
    hashes = {}
    deadline = time.monotonic() + timeout
    for rank in range(size):
        remaining = max(0.0, deadline - time.monotonic())
        try:
            hashes[rank] = coordination.get(f"{path}/hash/{rank}", remaining)
        except TimeoutError:
            return True, f"process {rank} did not arrive within {timeout:g} s"
    others = [rank for rank in range(size) if hashes[rank] != hashes[0]]
    if not others:
        return False, ""
    compressed = coordination.get(f"{path}/facts/{others[0]}", timeout)
    other_facts = json.loads(zlib.decompress(base64.b64decode(compressed)))

    def shown(facts: Mapping[str, str], name: str) -> str:
        return printable(facts.get(name, "nothing"), 300)

    lines = [
        f"\n    {name} is {shown(facts, name)} in process 0, and {shown(other_facts, name)} in "
        f"process {others[0]}"
        for name in dict.fromkeys([*facts, *other_facts])
        if facts.get(name) != other_facts.get(name)
    ]
    text = "".join(lines[:MAX_SHOWN])
    if len(lines) > MAX_SHOWN:
        text += f"\n    and {len(lines) - MAX_SHOWN} more"
    if len(others) > 1:
        text += f"\n    {len(others) - 1} more processes differ from process 0"
    return False, text
