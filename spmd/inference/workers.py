"""Members of an ensemble in threads: all run at once, and the answers that arrive before the
deadline count.
"""

import dataclasses
import logging
import math
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from spmd.base.tree import Tree, describe
from spmd.errors import EnsembleError


@dataclasses.dataclass(frozen=True)
class Answer:
    """The combined answer of the members that were in time.

    Attributes:
      probabilities: float64[rows, ..., classes], combined from the members that answered.
      members: their names.
      late: names of those that were not in time.
      failed: errors of the others, by name.
      seconds: the time it took.
    """

    probabilities: np.ndarray = dataclasses.field(repr=False)
    members: tuple[str, ...]
    late: tuple[str, ...]
    failed: dict[str, str]
    seconds: float


class _Request:
    """One request, and the results that arrive until it is over; later ones are discarded."""

    def __init__(self, inputs: Tree, names: tuple[str, ...]):
        self.inputs = inputs  # None when it is over
        self._names = names
        self._results: dict[str, Any] = {}
        self._changed = threading.Condition()

    def respond(self, name: str, result: Any) -> None:
        """Record a member's logits, or the error it raised."""
        with self._changed:
            if self.inputs is not None:
                self._results[name] = result
                self._changed.notify_all()

    def wait(self, seconds: float | None) -> dict[str, Any]:
        """The results of all members, or those that arrive in time."""
        with self._changed:
            try:
                self._changed.wait_for(lambda: len(self._results) == len(self._names), seconds)
            finally:
                self.inputs = None
            return dict(self._results)


class _Worker:
    """A thread that runs one member on one request after the other, without those that are over,
    until it gets None.
    """

    def __init__(self, name: str, function: Callable[[Tree], Any]):
        self.name = name
        self._function = function
        self.requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        # A daemon: a member that never returns must not keep the process from ending.
        self.thread = threading.Thread(target=self._serve, name=f"spmd member {name}", daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        while (request := self.requests.get()) is not None:
            inputs = request.inputs
            if inputs is None:
                continue
            try:
                result = np.asarray(self._function(inputs))
            except BaseException as error:  # must not affect other members
                result = error
            request.respond(self.name, result)
            del request, inputs, result  # release the arrays while it waits


class Workers:
    """One thread for each member, until `close`."""

    def __init__(self, functions: Mapping[str, Callable[[Tree], Any]]):
        self._workers = [_Worker(name, function) for name, function in functions.items()]
        self._busy = threading.Lock()
        self._lifetime = threading.Lock()
        self._closed = False

    def ask(
        self, inputs: Tree, rows: int, deadline: float | None
    ) -> tuple[dict[str, np.ndarray], tuple[str, ...], dict[str, str], float]:
        """Logits by name, the names of late members, the errors of the others, and seconds; one
        request at a time.

        Raises:
          EnsembleError: no member answered, or the threads were ended before.
        """
        began = time.monotonic()
        names = tuple(worker.name for worker in self._workers)
        seconds: float = -1  # no limit
        if deadline is not None:
            seconds = deadline
        if not self._busy.acquire(timeout=seconds):
            raise EnsembleError(
                f"another request was still running after {deadline:g} s.", fix="a longer deadline."
            )
        try:
            request = _Request(inputs, names)
            with self._lifetime:  # all workers get it before `close`, or none does
                if self._closed:
                    raise EnsembleError(
                        "closed before this request was sent.",
                        fix="ask again, which starts new threads.",
                    )
                for worker in self._workers:
                    worker.requests.put(request)
            remaining = None
            if deadline is not None:
                waited = time.monotonic() - began
                remaining = max(0.0, deadline - waited)
            results = request.wait(remaining)
        finally:
            self._busy.release()
        logits, failed = _split_answers(results, names, rows)
        late = tuple(name for name in names if name not in results)
        if not logits:
            reasons = [f"\n    {name} {why}" for name, why in failed.items()]
            if late:
                reasons.append(f"\n    {', '.join(late)}: late")
            limit = ""
            if deadline is not None:
                limit = f" in {deadline:g} s"
            raise EnsembleError(
                f"none of the {len(names)} members answered{limit}:{''.join(reasons)}",
                fix="what each member's error says, or a longer deadline.",
            )
        return logits, late, failed, time.monotonic() - began

    def close(self, seconds: float) -> None:
        """End all threads; log a warning for those that are still running a request, after which
        they end.
        """
        until = time.monotonic() + seconds
        with self._lifetime:
            self._closed = True
            for worker in self._workers:
                worker.requests.put(None)
        for worker in self._workers:
            worker.thread.join(max(0.0, until - time.monotonic()))
        busy = [worker.name for worker in self._workers if worker.thread.is_alive()]
        if busy:
            logging.getLogger("spmd").warning(
                "members that are still running an earlier request, and end after it: %s",
                ", ".join(busy),
            )


def _split_answers(
    results: Mapping[str, Any], names: Sequence[str], rows: int
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The logits of the members whose answers can be combined, in the order of `names`, and the
    errors of the others that have answered.
    """
    failed = {}
    for name, result in results.items():
        if isinstance(result, BaseException):
            failed[name] = f"{type(result).__name__}: {result}"
    answered = [name for name in names if name in results]
    logits = {name: results[name] for name in answered if name not in failed}
    for name, array in list(logits.items()):
        if _fits(array, rows) and (invalid := _invalid_rows(array)):
            of_all = f"{invalid} of {math.prod(array.shape[:-1])} rows"
            failed[name] = f"it returned {describe(array)}, {of_all} without finite numbers"
            del logits[name]
    fitting = [array for array in logits.values() if _fits(array, rows)]
    shapes = Counter(array.shape for array in fitting)
    shape = max(shapes, key=shapes.__getitem__, default=None)
    expected = f"expected logits [{rows}, ..., classes]"
    if shape is not None:
        expected = f"the others {list(shape)}"
    for name, array in list(logits.items()):
        if array.shape != shape or not _fits(array, rows):
            failed[name] = f"it returned {describe(array)}; {expected}"
            del logits[name]
    return logits, failed


def _invalid_rows(logits: np.ndarray) -> int:
    """The number of rows whose logits define no probabilities: NaN, or -inf for all classes."""
    largest = logits.max(axis=-1, initial=-np.inf)  # NaN if there is one
    return int((~np.isfinite(largest)).sum())


def _fits(logits: np.ndarray, rows: int) -> bool:
    return logits.ndim >= 2 and logits.shape[0] == rows and logits.dtype.kind == "f"
