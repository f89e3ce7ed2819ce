"""A process that runs calls: `python -m spmd.launch.runner -m spmd.launch.notebook_worker FD`, a
socket to its parent.

Each call is a function with its arguments, from the notebook that started this process; the answer
is its result or its error. After a failed call the process exits, as after a failed script. It also
exits when its socket is closed.
"""

import contextlib
import linecache
import os
import pickle
import socket
import sys
import traceback
from typing import Any

import jax

from spmd.distributed import launcher_protocol, watchdog
from spmd.errors import ProcessError
from spmd.launch import ipc, serialization
from spmd.launch.ipc import DONE, FAILED, READY, UNSENT


def main(notebook: socket.socket) -> None:
    """Answer calls until the notebook closes the socket."""
    # A child process of the function must not keep it open.
    notebook.set_inheritable(False)
    try:
        ipc.send(notebook, READY + pickle.dumps((jax.local_device_count(), jax.device_count())))
        while (message := ipc.receive(notebook)) is not None:
            ipc.send(notebook, _answer(notebook, pickle.loads(message)))
            # waiting for a call is no stall
            watchdog.current().record_progress("script", watchdog.current().step)
    except KeyboardInterrupt:  # while it waits: the notebook has interrupted the call
        raise SystemExit(launcher_protocol.FAILED) from None
    except ConnectionError:
        # The notebook is gone.
        return


def _answer(notebook: socket.socket, request: dict[str, Any]) -> bytes:
    """Run the call; if it fails, send the error, and exit."""
    try:
        _match_notebook(request)
        function, args, options = pickle.loads(request["call"])
        # JAX returns before devices are done, and an error of the computation has to be that of
        # this call.
        value = jax.block_until_ready(function(*args, **options))
    except BaseException as error:
        _end_of_output(request["mark"])
        text = "".join(
            traceback.format_exception(
                type(error), error, error.__traceback__ and error.__traceback__.tb_next
            )
        )
        with contextlib.suppress(OSError):
            ipc.send(notebook, FAILED + pickle.dumps((_headline(error), text)))
        code = watchdog.exit_code(error) or launcher_protocol.FAILED
        watchdog.current().report_failure(error, code)
        raise SystemExit(code) from None
    _end_of_output(request["mark"])
    try:
        result = serialization.serialize_result(value, with_value=watchdog.current().rank == 0)
        return DONE + pickle.dumps(result, protocol=pickle.HIGHEST_PROTOCOL)
    except ProcessError as error:
        return UNSENT + pickle.dumps(str(error))


def _match_notebook(request: dict[str, Any]) -> None:
    """Use the notebook's import path, working folder and JAX settings."""
    sys.path[:] = request["path"]
    if os.getcwd() != request["folder"]:
        os.chdir(request["folder"])
    for name, value in request["config"].items():
        if getattr(jax.config, name) != value:
            jax.config.update(name, value)
    # Tracebacks read the lines of a cell from there, since a cell has no file.
    linecache.cache.update(
        {name: (len("".join(lines)), None, lines, name) for name, lines in request["cells"].items()}
    )


def _headline(error: BaseException) -> str:
    """An error in one line; SystemExit as the call that raised it."""
    if isinstance(error, SystemExit):
        return f"sys.exit({error.code!r})"
    return "".join(traceback.format_exception_only(error)).strip()


def _end_of_output(mark: str) -> None:
    """Write the mark that ends the output of the call."""
    # The function may have replaced either stream.
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    with contextlib.suppress(OSError):
        # To the descriptor itself: the function may have replaced or closed sys.stdout.
        os.write(1, f"{mark}\n".encode())


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
