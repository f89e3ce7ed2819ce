"""Names of other libraries that are replaced for a while, since code of users refers to them."""

import contextlib
import contextvars
import threading
from collections.abc import Iterable, Iterator
from typing import Any

# In place of an attribute that its owner did not have.
_ABSENT: Any = object()


class Patches:
    """Attributes of modules and classes that are replaced as long as a scope is open.

    All threads see the replacements; what a replacement does depends on `value`, which is that of
    the innermost scope of this thread. Scopes of all threads are counted: the first one replaces,
    and the last one restores.

    Args:
      name: of the context variable of `value`.
      replacements: (owner, name of the attribute, replacement).
      outside: `value` where this thread has no scope.

    Example:
      >>> import math
      >>> tau = Patches("tau", [(math, "tau", 6.28)])
      >>> with tau.scope("short"):
      ...     (math.tau, tau.value)
      (6.28, 'short')
      >>> round(math.tau, 5), tau.value
      (6.28319, None)
    """

    def __init__(
        self, name: str, replacements: Iterable[tuple[Any, str, Any]], *, outside: Any = None
    ):
        self._replacements = tuple(replacements)
        self._originals: list[Any] = []
        self._value = contextvars.ContextVar(name, default=outside)
        self._lock = threading.Lock()
        self._scopes = 0

    @property
    def value(self) -> Any:
        """The value of the innermost scope of this thread."""
        return self._value.get()

    @contextlib.contextmanager
    def scope(self, value: Any) -> Iterator[None]:
        """Replace the attributes inside; an empty value, such as no functions, replaces none."""
        token = self._value.set(value)
        if value:
            self._count(1)
        try:
            yield
        finally:
            if value:
                self._count(-1)
            self._value.reset(token)

    def _count(self, more: int) -> None:
        # Attributes are those of all threads, so the last scope of any thread restores them.
        with self._lock:
            before = self._scopes
            self._scopes = self._scopes + more
            if before == 0:
                self._replace()
            elif self._scopes == 0:
                self._restore()

    def _replace(self) -> None:
        # the attributes of the owner itself: one that a class inherits is deleted afterwards
        self._originals = [vars(owner).get(name, _ABSENT) for owner, name, _ in self._replacements]
        for owner, name, replacement in self._replacements:
            setattr(owner, name, replacement)

    def _restore(self) -> None:
        for (owner, name, _), original in zip(self._replacements, self._originals, strict=True):
            if original is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
