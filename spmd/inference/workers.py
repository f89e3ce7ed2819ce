"""Members as workers: each in a thread of its own, asked all at once, and answered for by those that made it in time."""

import dataclasses
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from spmd.errors import EnsembleError
from spmd.tree import Tree, describe


@dataclasses.dataclass(frozen=True)
class Answer:
    """What some members have said in time.

    Attributes:
      probabilities: float64[rows, ..., classes], of those who answered.
      members: their names; `late`: of those who did not come in time; `failed`: what the others raised, by name.
      seconds: from the question to the answer.
    """

    probabilities: np.ndarray = dataclasses.field(repr=False)
    members: tuple[str, ...]
    late: tuple[str, ...]
    failed: dict[str, str]
    seconds: float


class _Question:
    """One question, and what is said to it until it is over; what comes later reaches nobody."""

    def __init__(self, inputs: Tree, names: tuple[str, ...]):
        self.inputs, self._names = inputs, names
        self._said: dict[str, Any] = {}
        self._over, self._changed = False, threading.Condition()

    @property
    def over(self) -> bool:
        """Whether nobody waits any more."""
        with self._changed:
            return self._over

    def say(self, name: str, what: Any) -> None:
        """A member's logits, or the error it has raised."""
        with self._changed:
            if not self._over:
                self._said[name] = what
                self._changed.notify_all()

    def wait(self, seconds: float | None) -> dict[str, Any]:
        """What was said by all, or in time."""
        with self._changed:
            try:
                self._changed.wait_for(lambda: len(self._said) == len(self._names), seconds)
            finally:
                self._over = True
            return dict(self._said)


class _Worker:
    """A thread that answers for one member. It holds one question at most, the newest, beside the one it is at."""

    def __init__(self, name: str, function: Callable[[Tree], Any]):
        self.name, self._function = name, function
        self._next: _Question | None = None
        self._closed, self._changed = False, threading.Condition()
        self.thread = threading.Thread(target=self._run, name=f"spmd member {name}", daemon=True)
        self.thread.start()

    def put(self, question: _Question) -> None:
        """The next question."""
        with self._changed:
            self._next = question
            self._changed.notify_all()

    def end(self) -> None:
        """There will be no more questions; the one it holds is answered yet."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next is not None or self._closed)
                question, self._next = self._next, None
            if question is None:
                return
            if question.over:
                continue
            try:
                said = np.asarray(self._function(question.inputs))
            except BaseException as error:  # whatever it is, it is this member's alone
                said = error
            question.say(self.name, said)
            del question, said  # nothing is held while it waits


class Workers:
    """One thread for each member, until `close`."""

    def __init__(self, functions: Mapping[str, Callable[[Tree], Any]]):
        self._workers = [_Worker(name, function) for name, function in functions.items()]
        self._one, self._open, self._closed = threading.Lock(), threading.Lock(), False

    def ask(self, inputs: Tree, rows: int, deadline: float | None) -> tuple[dict[str, np.ndarray], tuple[str, ...], dict[str, str], float]:
        """Logits by name, who is late, what the others raised, and seconds; one question at a time.

        Raises:
          EnsembleError: nobody has answered, or the threads were ended before it was asked.
        """
        began = time.monotonic()
        left = lambda: None if deadline is None else max(0.0, deadline - (time.monotonic() - began))
        names = tuple(worker.name for worker in self._workers)
        if not self._one.acquire(timeout=-1 if deadline is None else deadline):
            raise EnsembleError(f"another question was still being answered after {deadline:g} s.", fix="a longer deadline.")
        try:
            question = _Question(inputs, names)
            with self._open:  # put to all before they are ended, or to none
                if self._closed:
                    raise EnsembleError("closed before this question was put.", fix="ask again, which starts new threads.")
                for worker in self._workers:
                    worker.put(question)
            said = question.wait(left())
        finally:
            self._one.release()
        failed = {name: f"{type(what).__name__}: {what}" for name, what in said.items() if isinstance(what, BaseException)}
        logits = {name: said[name] for name in names if name in said and name not in failed}
        for name, each in list(logits.items()):
            if _fits(each, rows) and (lost := _lost(each)):
                failed[name] = f"it answered {describe(each)}, {lost} of {math.prod(each.shape[:-1])} rows without finite numbers"
                del logits[name]
        shape = Counter(each.shape for each in logits.values() if _fits(each, rows)).most_common(1)
        for name, each in list(logits.items()):
            if not shape or each.shape != shape[0][0] or not _fits(each, rows):
                wanted = f"the others {list(shape[0][0])}" if shape else f"wanted logits [{rows}, ..., classes]"
                failed[name] = f"it answered {describe(each)}; {wanted}"
                del logits[name]
        late = tuple(name for name in names if name not in said)
        if not logits:
            why = [f"\n    {name} {what}" for name, what in failed.items()]
            why += [f"\n    {', '.join(late)}: late"] if late else []
            limit = "" if deadline is None else f" in {deadline:g} s"
            raise EnsembleError(f"none of the {len(names)} members has answered{limit}:{''.join(why)}")
        return logits, late, failed, time.monotonic() - began

    def close(self, seconds: float) -> None:
        """End all threads; one that is still at a question ends with it, and is told of."""
        until = time.monotonic() + seconds
        with self._open:
            self._closed = True
            for worker in self._workers:
                worker.end()
        for worker in self._workers:
            worker.thread.join(max(0.0, until - time.monotonic()))
        busy = [worker.name for worker in self._workers if worker.thread.is_alive()]
        if busy:
            logging.getLogger("spmd").warning("members that still answer an old question, and end with it: %s", ", ".join(busy))


def _lost(said: np.ndarray) -> int:
    """Rows of logits of which no probabilities can be made; a class may be impossible, all may not."""
    largest = said.max(axis=-1, initial=-np.inf)  # NaN where one is
    return int((~np.isfinite(largest)).sum())


def _fits(said: np.ndarray, rows: int) -> bool:
    return said.ndim >= 2 and said.shape[0] == rows and said.dtype.kind == "f"
