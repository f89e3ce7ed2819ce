"""The numbers of programs that this process has compiled, and that it has loaded instead, counted
by JAX's events.
"""

import dataclasses
import functools
import threading
from typing import Any

import jax.monitoring

DONE, LOADED = "/jax/core/compile/backend_compile_duration", "/jax/compilation_cache/cache_hits"
_lock = threading.Lock()
# Programs, those that a cache had, seconds.
_totals = [0, 0, 0.0]


@dataclasses.dataclass(frozen=True)
class Compilations:
    """Programs that XLA compiled, programs that came from a cache on disk, and the seconds that
    both took.

    Example:
      >>> Compilations(12, 3, 4.5) - Compilations(10, 0, 4.0)
      Compilations(compiled=2, loaded=3, seconds=0.5)
    """

    compiled: int
    loaded: int
    seconds: float

    def __sub__(self, earlier: "Compilations") -> "Compilations":
        return Compilations(
            self.compiled - earlier.compiled,
            self.loaded - earlier.loaded,
            self.seconds - earlier.seconds,
        )


def compilations() -> Compilations:
    """Return the compilations of this process since the first call, in all of its threads."""
    _listen()
    with _lock:
        programs, loaded, seconds = _totals
    return Compilations(programs - loaded, loaded, seconds)


@functools.cache
def _listen() -> None:
    jax.monitoring.register_event_listener(_on_event)
    jax.monitoring.register_event_duration_secs_listener(_on_duration)


def _on_event(event: str, **details: Any) -> None:
    if event == LOADED:
        with _lock:
            _totals[1] += 1


def _on_duration(event: str, duration_secs: float, **details: Any) -> None:
    if event == DONE:
        with _lock:
            _totals[0] += 1
            _totals[2] += duration_secs
