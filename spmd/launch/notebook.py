"""Call functions in several processes of this machine, from a notebook or a script: `run` for one
call, `local` for many.
"""

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
from spmd.launch.local_launcher import LocalConfig
from spmd.launch.process_group import SETTLE
from spmd.launch.settings import Settings
from spmd.launch.worker_pool import WorkerPool, describe_exit

# Seconds until all processes have started; the rendezvous takes at most 300.
START = 330.0
# Settings of JAX that affect results, sent with every call.
CONFIG = (
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
    """Start processes on this machine that share all their devices and wait for functions to run.

    They end with the `with` block, by `close()`, or with this process, however it ends.

    Args:
      processes: how many; None: one for each GPU.
      simulate: number of CPU devices to simulate in each, instead of GPUs.
      devices: GPUs to use, by number; None: all, in equal shares.
      memory_fraction: fraction of a GPU's memory for each process; None: JAX's default.
      preallocate: whether each process allocates that memory at its start.
      stall: seconds without progress by phase, such as "step=120" (`spmd launch --stall`).
      grace: seconds for an interrupted call to save and exit.

    Returns:
      The started processes: `run` calls a function in all of them.

    Raises:
      OptionError: an option is invalid.
      MissingExtraError: cloudpickle is not installed, which serializes functions of a notebook.
      ProcessError: the processes could not start.

    Example:
      >>> with local(processes=2, simulate=2) as both:
      ...     both.run(lambda: jax.device_count())
      [...
      4
    """
    settings = Settings(simulate, 0, grace, stall, memory_fraction, preallocate)
    numbers = None
    if devices is not None:
        numbers = tuple(devices)
    return Processes(LocalConfig(processes, numbers, settings))


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
    """Call a function in several processes of this machine, and return its result in process 0:
    `local` for one call.

    Inside a `with spmd.launch.local(...)` block it takes no options, and uses the block's
    processes.

    Args:
      function: called in every process with the same arguments; it may be defined in a notebook
        (`Processes.run`).
      args: its arguments.
      processes, simulate, devices, memory_fraction, preallocate, stall, grace: as in `local`.

    Returns:
      What the function returned in process 0, with jax arrays as numpy arrays.

    Raises:
      OptionError: an option is invalid; options inside a block.
      ProcessError: a process failed.

    Example:
      >>> with local(processes=1, simulate=4):
      ...     run(lambda rows: jax.numpy.ones(rows) / jax.device_count(), 2)
      array([0.25, 0.25], dtype=float32)
    """
    options = {
        "processes": processes,
        "simulate": simulate,
        "devices": devices,
        "memory_fraction": memory_fraction,
    }
    options |= {"preallocate": preallocate, "stall": stall, "grace": grace}
    if _blocks:
        parameters = inspect.signature(local).parameters
        changed = [name for name, value in options.items() if value != parameters[name].default]
        if changed:
            raise OptionError(
                f"{changed[0]}={options[changed[0]]!r} inside a block, whose processes have their "
                "options.",
                fix="leave it out, or leave the block; or another spmd.launch.local(...).",
            )
        return _blocks[-1].run(function, *args)
    with local(**options) as processes_of_call:
        return processes_of_call.run(function, *args)


_blocks: list["Processes"] = []  # of the entered `with` blocks, the innermost last


class Processes:
    """Processes of this machine that wait for functions to run; `spmd.launch.local` starts them.

    Args:
      config: how many, and with which devices; `spmd.launch.local` makes it.

    Attributes:
      count: the number of processes.
      devices: the number of their devices together.

    Example:
      >>> import spmd
      >>> with spmd.launch.local(processes=1, simulate=2) as both:
      ...     both.run(lambda number: number + 1, 2)
      3
    """

    def __init__(self, config: LocalConfig):
        import_extra("cloudpickle", "notebooks")
        if coordination.is_initialized():
            raise OptionError(
                "this is already one of several processes.",
                fix="call the function; or start processes from a notebook.",
            )
        self.count, self._grace = config.count, config.settings.grace
        self._lock, self._down = threading.Lock(), ""
        self._running = WorkerPool()
        # when the object is dropped, and at the end of this process; a `__del__` may come too late
        self._abandoned = weakref.finalize(self, self._running.end, 0.0)
        try:
            self._running.start(config)
            answers = self._running.exchange(None, START)
            if len(answers) < self.count:
                raise self._failed(answers, "the processes could not start: ")
        except BaseException:
            self._running.end(0.0)
            raise
        self.devices = int(pickle.loads(answers[0][len(READY) :])[1])

    def __repr__(self) -> str:
        end = f", {self._down}" if self._down else ""
        return f"<{self.count} processes, {self.devices} devices{end}>"

    def __enter__(self) -> "Processes":
        self._check()
        _blocks.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _blocks.remove(self)
        self.close()

    def close(self) -> None:
        """End the processes, after a few seconds to exit on their own. Calling it again does
        nothing.
        """
        with self._exclusive():
            self._down = self._down or "closed"
            self._running.end(SETTLE)

    def run(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call a function in every process, with the same arguments; its output is printed with the
        process's rank.

        Functions, classes and other objects of this notebook that it uses are sent with it; modules
        are imported by the processes. jax arrays among the arguments arrive on the first device of
        each process, numpy arrays as numpy arrays.

        Args:
          function: called in every process.
          args, options: its arguments.

        Returns:
          Its result in process 0, with numpy arrays instead of jax arrays. Arrays that are sharded
          over processes are assembled, if all processes return them.

        Raises:
          OptionError: the function or an argument cannot be sent.
          ProcessError: a process failed, upon which all have ended; the processes had ended before;
            or the result cannot be sent.
          KeyboardInterrupt: all were interrupted, and have ended.
        """
        if not callable(function):
            raise OptionError(
                f"run({function!r}): expected a function, not {type_name(function)}.",
                fix="run(function, argument, ...).",
            )
        call = serialization.serialize_call(function, args, options)
        with self._exclusive():
            self._check()
            try:
                return self._send_call(call)
            except ProcessError:
                raise
            # the sockets may have parts of messages now, so the processes cannot be used again
            except KeyboardInterrupt:
                self._down = self._down or "interrupted"
                self._running.end(self._grace, interrupt=True)
                raise
            except BaseException as error:
                self._down = self._down or type(error).__name__
                self._running.end(0.0)
                raise

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Allow one thread at a time: two would read each other's answers, or close a socket that
        is read.
        """
        if not self._lock.acquire(blocking=False):
            raise OptionError(
                "these processes are running another call.",
                fix="one call at a time, or another spmd.launch.local(...).",
            )
        try:
            yield
        finally:
            self._lock.release()

    def _send_call(self, call: bytes) -> Any:
        mark = self._running.lines.next_mark()
        message = pickle.dumps({**_environment(), "call": call, "mark": mark})
        answers = self._running.exchange(message)
        failed = [rank for rank, answer in answers.items() if answer.startswith(FAILED)]
        if failed or len(answers) < self.count:
            raise self._failed(answers)
        # Output comes through pipes and answers through sockets, so an answer may overtake what was
        # printed before it.
        self._running.lines.until(self.count)
        if answers[0].startswith(UNSENT):
            raise ProcessError(pickle.loads(answers[0][len(UNSENT) :]), 0)
        values = {}
        pieces = {}
        for rank, answer in answers.items():
            if answer.startswith(DONE):
                values[rank], pieces[rank] = pickle.loads(answer[len(DONE) :])
        return serialization.deserialize_result(values[0], pieces)

    def _check(self) -> None:
        """Raise ProcessError if any of the processes is gone."""
        if os.getpid() != self._running.owner:
            raise ProcessError(
                "these processes belong to the parent of this fork.",
                fix="start new ones: spmd.launch.local(...).",
            )
        if not self._down and (ended := self._running.ended()):
            self._down = describe_exit(*next(iter(ended.items())))
            self._running.end(SETTLE)
        if self._down:
            raise ProcessError(
                f"these processes have ended: {self._down}.",
                fix="start new ones: spmd.launch.local(...).",
            )

    def _failed(self, answers: Mapping[int, bytes], prefix: str = "") -> ProcessError:
        """The error to raise; ends all processes."""
        self._running.end(self._running.remaining_grace())
        process, why, trace = self._running.why(answers)
        self._down = why.splitlines()[0]
        if trace:
            why += f"\n\n{trace.rstrip()}"
        return ProcessError(prefix + why, process)


def _environment() -> dict[str, Any]:
    """This process's import path, folder, JAX settings and cell sources, so that calls behave as
    here and tracebacks show cells.
    """
    cells = {
        name: entry[2]
        for name, entry in linecache.cache.items()
        # IPython puts cells into linecache with no time of modification: files have one.
        if len(entry) == 4 and entry[1] is None
    }
    # An empty entry is the working folder, which in the processes may be another one.
    path = [str(entry) or os.getcwd() for entry in sys.path]
    return {
        "path": path,
        "folder": os.getcwd(),
        "config": {name: getattr(jax.config, name) for name in CONFIG},
        "cells": cells,
    }
