"""A process that waits for calls: `python -m spmd.launch.runner -m spmd.launch.notebook_worker READS WRITES`, two pipes of its parent.

Each call is a function with its arguments, which came from the notebook that started this process, and is answered with what it returns or
how it failed. A process whose call has failed leaves, as after a script that has failed. It ends when its pipe does.
"""

import contextlib
import linecache
import os
import pickle
import sys
import traceback
from typing import Any

import jax

from spmd.distributed import watchdog
from spmd.errors import ProcessError
from spmd.launch import ipc, serialization
from spmd.launch.ipc import DONE, FAILED, READY, UNSENT


def main(ends: ipc.Ends) -> None:
    """Answer calls until the notebook hangs up."""
    for number in (ends.reads, ends.writes):
        os.set_inheritable(number, False)  # what a function starts must not keep the notebook waiting
    try:
        ipc.send(ends, READY + pickle.dumps((jax.local_device_count(), jax.device_count())))
        while (message := ipc.receive(ends)) is not None:
            ipc.send(ends, _answer(ends, pickle.loads(message)))
            watchdog.current().record_progress(
                "script", watchdog.current().step
            )  # whatever a run has left: who waits for a call does not stall
    except KeyboardInterrupt:  # while it waits: the notebook has ended the call of all
        raise SystemExit(watchdog.FAILED) from None
    except BrokenPipeError:
        return  # nobody listens any more


def _answer(ends: ipc.Ends, request: dict[str, Any]) -> bytes:
    """Call what is to be called; where that fails, say so, and leave."""
    try:
        _as_there(request)
        function, args, options = pickle.loads(request["call"])
        value = jax.block_until_ready(function(*args, **options))
    except BaseException as error:
        _printed(request["mark"])
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__ and error.__traceback__.tb_next))
        with contextlib.suppress(OSError):
            ipc.send(ends, FAILED + pickle.dumps((_headline(error), text)))
        code = watchdog.exit_code(error) or watchdog.FAILED
        watchdog.current().report_failure(error, code)
        raise SystemExit(code) from None
    _printed(request["mark"])
    try:
        return DONE + pickle.dumps(serialization.packed(value, whole=watchdog.current().rank == 0), protocol=pickle.HIGHEST_PROTOCOL)
    except ProcessError as error:
        return UNSENT + pickle.dumps(str(error))


def _as_there(request: dict[str, Any]) -> None:
    """Modules are found, and numbers computed, as they are in the notebook."""
    sys.path[:] = request["path"]
    if os.getcwd() != request["folder"]:
        os.chdir(request["folder"])
    for name, value in request["config"].items():
        if getattr(jax.config, name) != value:
            jax.config.update(name, value)
    linecache.cache.update({name: (len("".join(lines)), None, lines, name) for name, lines in request["cells"].items()})


def _headline(error: BaseException) -> str:
    """An error in a line; one that ends a process is said to."""
    if isinstance(error, SystemExit):
        return f"sys.exit({error.code!r})"
    return "".join(traceback.format_exception_only(error)).strip()


def _printed(mark: str) -> None:
    """Say, after all that the call has printed, that this was all."""
    with contextlib.suppress(Exception):  # a function may have put anything there
        sys.stdout.flush()
        sys.stderr.flush()
    with contextlib.suppress(OSError):
        os.write(1, f"{mark}\n".encode())


if __name__ == "__main__":
    main(ipc.Ends(*map(int, sys.argv[1:3])))
