"""Functions called in several processes of this machine, from a notebook or a script: `run` for one call, `local` for many."""

import contextlib
import inspect
import linecache
import os
import pickle
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from spmd.distributed import coordination
from spmd.errors import OptionError, ProcessError, import_extra, type_name
from spmd.launch import serialization
from spmd.launch.ipc import DONE, FAILED, READY, UNSENT
from spmd.launch.local_launcher import Machine
from spmd.launch.process_group import SETTLE
from spmd.launch.settings import Settings
from spmd.launch.worker_pool import Running, in_words

START = 330.0  # seconds until all processes are there; a roll call takes 300 at most
CONFIG = (  # settings of JAX that decide numbers, and go with every call
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
)


def local(
    processes: int | None = None,
    *,
    simulate: int | None = None,
    devices: Sequence[int] | None = None,
    memory_fraction: float | None = None,
    preallocate: bool = True,
    stall: str = "",
    grace: float = 30.0,
) -> "Processes":
    """Start processes on this machine that see all their devices as one mesh, and wait for functions to run.

    They end with the `with` block, by `close()`, or with this process, however it ends.

    Args:
      processes: how many; None: one for each GPU.
      simulate: CPU devices in each, where there is no GPU.
      devices: which GPUs, by number; None: all, in equal shares.
      memory_fraction: of a GPU's memory that each takes; None: as JAX does.
      preallocate: whether it takes it at once.
      stall: seconds without progress by phase, such as "step=120" (`spmd launch --stall`).
      grace: seconds that a call has to save and leave, when it is interrupted.

    Returns:
      The processes, which are there: `run` runs a function in all of them.

    Raises:
      OptionError: an option that is not right.
      MissingExtraError: cloudpickle is not there, by which functions of a notebook travel.
      ProcessError: they could not start.

    Example:
      >>> with local(processes=2, simulate=2) as both:
      ...     both.run(lambda: jax.device_count())
      [...
      4
    """
    settings = Settings(simulate, 0, grace, stall, memory_fraction, preallocate)
    return Processes(Machine(processes, None if devices is None else tuple(devices), settings))


def run(
    function: Callable[..., Any],
    *args: Any,
    processes: int | None = None,
    simulate: int | None = None,
    devices: Sequence[int] | None = None,
    memory_fraction: float | None = None,
    preallocate: bool = True,
    stall: str = "",
    grace: float = 30.0,
) -> Any:
    """Run a function in several processes of this machine, and give what it returns in process 0: `local` for one call.

    Inside a `with spmd.launch.local(...)` block it takes no options, and runs in the block's processes.

    Args:
      function: is called in every process with the same arguments; it may be of a notebook (`Processes.run`).
      args: what it is called with.
      processes, simulate, devices, memory_fraction, preallocate, stall, grace: as `local` has them.

    Raises:
      OptionError: an option that is not right; options inside a block.
      ProcessError: a process failed.

    Example:
      >>> with local(processes=1, simulate=4):
      ...     run(lambda rows: jax.numpy.ones(rows) / jax.device_count(), 2)
      array([0.25, 0.25], dtype=float32)
    """
    options = {"processes": processes, "simulate": simulate, "devices": devices, "memory_fraction": memory_fraction}
    options |= {"preallocate": preallocate, "stall": stall, "grace": grace}
    if _blocks:
        usual = inspect.signature(local).parameters
        given = [name for name, value in options.items() if value != usual[name].default]
        if given:
            raise OptionError(
                f"{given[0]}={options[given[0]]!r} inside a block that has its processes.\n"
                "    fix: leave it out, or leave the block; or another spmd.launch.local(...)."
            )
        return _blocks[-1].run(function, *args)
    with local(**options) as own:
        return own.run(function, *args)


_blocks: list["Processes"] = []  # those that `with` has entered


class Processes:
    """Processes of this machine that wait for functions to run; `spmd.launch.local` starts them.

    Attributes:
      count: how many there are.
      devices: how many devices all of them see.
    """

    def __init__(self, how: Machine):
        import_extra("cloudpickle", "notebooks")
        if coordination.is_initialized():
            raise OptionError("this is one of several processes already.", fix="call the function; or start processes from a notebook.")
        self.count, self._grace = how.count, how.settings.grace
        self._lock, self._down = threading.Lock(), ""
        self._running = Running()
        self._abandoned = weakref.finalize(self, self._running.end, 0.0)  # also at the end of this process
        try:
            self._running.start(how)
            answers = self._running.asked(None, START)
            if len(answers) < self.count:
                raise self._failed(answers, "the processes could not start: ")
        except BaseException:
            self._running.end(0.0)
            raise
        self.devices = int(pickle.loads(answers[0][len(READY) :])[1])

    def __repr__(self) -> str:
        return f"<{self.count} processes, {self.devices} devices{', ' + self._down if self._down else ''}>"

    def __enter__(self) -> "Processes":
        self._check()
        _blocks.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _blocks.remove(self)
        self.close()

    def close(self) -> None:
        """End the processes: they have a few seconds to leave by themselves. To call it again does nothing."""
        with self._alone():
            self._down = self._down or "closed"
            self._running.end(SETTLE)

    def run(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call a function in every process, with the same arguments; what it prints is shown with the process's rank.

        Functions, classes and what else of this notebook it uses are sent with it; modules are imported there. jax arrays among arguments
        arrive on the first device of each process, numpy arrays as they are.

        Args:
          function: is called in every process.
          args, options: what it is called with.

        Returns:
          What it returns in process 0, with numpy arrays in place of jax arrays. Those that are spread over processes come whole, if all
          processes return them.

        Raises:
          OptionError: the function or an argument cannot be sent.
          ProcessError: a process failed or ended, and with it all others; the processes had ended before; or the result cannot be sent.
          KeyboardInterrupt: all were interrupted, and have ended.
        """
        if not callable(function):
            raise OptionError(f"run({function!r}) is given {type_name(function)}.", fix="run(function, argument, ...).")
        call = serialization.packed_call(function, args, options)
        with self._alone():
            self._check()
            try:
                return self._called(call)
            except ProcessError:
                raise
            except BaseException as error:  # what is on its way in the pipes is not known any more
                stopped = isinstance(error, KeyboardInterrupt)
                self._down = self._down or ("interrupted" if stopped else type(error).__name__)
                self._running.end(self._grace if stopped else 0.0, interrupt=stopped)
                raise

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """One thread at a time: two would read each other's answers, or close a pipe that is read."""
        if not self._lock.acquire(blocking=False):
            raise OptionError("a call is under way in these processes.", fix="one after the other, or another spmd.launch.local(...).")
        try:
            yield
        finally:
            self._lock.release()

    def _called(self, call: bytes) -> Any:
        answers = self._running.asked(pickle.dumps({**_here(), "call": call, "mark": self._running.lines.next_mark()}))
        if len(answers) < self.count or any(answer.startswith(FAILED) for answer in answers.values()):
            raise self._failed(answers)
        self._running.lines.until(self.count)
        if answers[0].startswith(UNSENT):
            raise ProcessError(pickle.loads(answers[0][len(UNSENT) :]), 0)
        parts = {rank: pickle.loads(answer[len(DONE) :]) for rank, answer in answers.items() if answer.startswith(DONE)}
        return serialization.unpacked(parts[0][0], {rank: pieces for rank, (_, pieces) in parts.items()})

    def _check(self) -> None:
        """Raise ProcessError where the processes are gone, or some of them."""
        if os.getpid() != self._running.owner:
            raise ProcessError("these processes belong to the process that this is a fork of.", fix="others, by spmd.launch.local(...).")
        if not self._down and (ended := self._running.ended()):
            self._down = in_words(*next(iter(ended.items())))
            self._running.end(SETTLE)
        if self._down:
            raise ProcessError(f"these processes have ended: {self._down}.", fix="others, by spmd.launch.local(...).")

    def _failed(self, answers: Mapping[int, bytes], what: str = "") -> ProcessError:
        """What went wrong. All have ended then."""
        self._running.end(self._running.patience())
        process, why, trace = self._running.why(answers)
        self._down = why.splitlines()[0]
        return ProcessError(what + why + (f"\n\n{trace.rstrip()}" if trace else ""), process)


def _here() -> dict[str, Any]:
    """What a call takes along, so that modules are found and numbers computed as they are here, and tracebacks show cells."""
    cells = {name: entry[2] for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}
    path = [str(entry) or os.getcwd() for entry in sys.path]
    return {"path": path, "folder": os.getcwd(), "config": {name: getattr(jax.config, name) for name in CONFIG}, "cells": cells}
