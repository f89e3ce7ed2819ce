"""A process that compiles exported steps for devices that need not be present: `python -m
spmd.planner.compile_server DEVICES REPLIES`; and its client, `compile_request`.

It is a separate process because XLA fixes the number of simulated devices once, because a compiler
may hang, and because the GPU plugin cannot be loaded in a process whose JAX looks for GPUs. Each
line of its standard input is a folder with a `request.pickle`. The server writes `program.hlo`,
`memory.json`, XLA's buffer assignment and its output (`log`) there, and then a byte to the pipe
REPLIES. It exits when its input is closed, when its parent exits, even while it compiles, and after
a minute idle.

Starting a process with JAX takes longer than compiling a small step, and a search compiles dozens,
so the client starts it with the first program and reuses it. There is one server at a time. It is
replaced if it simulates too few devices, or if environment variables have changed that JAX and XLA
read only once.
"""

import atexit
import contextlib
import dataclasses
import json
import math
import os
import pickle
import selectors
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import jax
import jax.export
import numpy as np
from jax.experimental.topologies import get_topology_desc
from jax.sharding import AxisType, Mesh, SingleDeviceSharding

from spmd.base.output_files import name_errors
from spmd.errors import CompileError
from spmd.train.compiler_options import check_compiler_options, other_options

LOG = "log"  # in a request's folder: the compiler's output
REPORT_INTERVAL = 1.0  # seconds between progress lines
MIN_DEVICES = 8  # simulated devices of a server, so that most plans can share it
# prefixes of variables
RELEVANT = (
    "CUDA",
    "JAX",
    "LD_",
    "LIBTPU",
    "NVIDIA",
    "PJRT",
    "PYTHON",
    "TF_",
    "TMPDIR",
    "TPU",
    "XLA",
)
_lock, _owner = threading.Lock(), 0
IDLE = 60.0  # seconds
# of XLA's analysis of memory, in bytes
SIZES = ("argument", "output", "alias", "temp", "generated_code", "host_temp")


@dataclasses.dataclass
class CompileServer:
    """A process of `planner/compile_server.py`, the pipes to and from it, and the environment and
    devices it was started with.
    """

    process: subprocess.Popen
    requests: int
    replies: int
    environment: dict[str, str]
    devices: int

    def serves(self, environment: dict[str, str], devices: int) -> bool:
        """Return True if it runs, and can compile for this environment and number of devices."""
        return (
            self.process.poll() is None
            and self.devices >= devices
            and _relevant(self.environment) == _relevant(environment)
        )

    def stop(self) -> int:
        """Kill it, and return its exit code."""
        self.process.kill()
        code = self.process.wait()
        os.close(self.requests)
        os.close(self.replies)
        return code


_server: CompileServer | None = None


def compile_request(
    folder: Path,
    changes: dict[str, str],
    devices: int,
    target: str,
    timeout: float,
    say: Callable[[str], None],
) -> None:
    """Compile the request in a folder; the results and the log are then in that folder.

    Args:
      folder: holds `request.pickle`, and gets the results.
      changes: environment variables of the server in addition to the caller's; "" removes one.
      devices: the number of devices it must simulate.
      target: a description of the target and its compiler, for messages.
      timeout: seconds after which it is stopped, including the time to wait for another thread's
        program.
      say: called once a second with a line on how long it has taken.

    Raises:
      CompileError: it takes too long, or the server is killed.
    """
    global _owner
    began = time.monotonic()
    # A plan inside of `say` would wait for the lock that its own thread holds.
    if _owner == threading.get_ident():
        raise CompileError(
            f"planning for {target} while another plan is compiled in the same thread.",
            fix="one after the other.",
        )
    while not _lock.acquire(timeout=REPORT_INTERVAL):
        _check_time(began, timeout, target, say)
    try:
        _owner = threading.get_ident()
        environment = {name: value for name, value in (os.environ | changes).items() if value}
        _serve(folder, environment, devices, began, target, timeout, say)
    except BaseException:
        _end()  # its current work is no longer needed
        raise
    finally:
        _owner = 0
        _lock.release()


def _serve(
    folder: Path,
    environment: dict[str, str],
    devices: int,
    began: float,
    target: str,
    timeout: float,
    say: Callable[[str], None],
) -> None:
    """Have a request answered: by the current server, or by a new one."""
    global _server
    server = _server
    if server is not None and server.serves(environment, devices):
        if _answered(server, folder, began, target, timeout, say):
            return
    # it does not serve this request, or it exited: after a minute idle, or because of this
    # program, which a new one will show
    _end()
    server = _server = _start(folder, environment, max(devices, MIN_DEVICES))
    if _answered(server, folder, began, target, timeout, say):
        return
    code = _end()
    if (folder / LOG).stat().st_size:
        return  # the log says why
    why = f"code {code}"
    if code < 0:
        why = f"signal {-code}; the system sends 9 when memory runs out"
    fix = "run `spmd plan` on another machine."
    raise CompileError(f"compiling for {target}: the compiler's process ended with {why}.", fix=fix)


def _end() -> int:
    """Stop the current server, if there is one, and return its exit code."""
    global _server
    server, _server = _server, None
    if server is None:
        return 0
    return server.stop()


def stop() -> None:
    """Stop the current server, if there is one."""
    if _lock.acquire(blocking=False):
        try:
            _end()
        finally:
            _lock.release()
    elif (server := _server) is not None:
        server.process.kill()  # the thread that waits for it belongs to a program that is exiting


def _forked() -> None:
    """Forget the server in a fork: it belongs to the parent."""
    global _lock, _owner, _server
    server = _server
    _server = None
    _lock = threading.Lock()
    _owner = 0
    if server is not None:
        server.process.returncode = 0  # this process does not wait for it
        os.close(server.requests)
        os.close(server.replies)


atexit.register(stop)
os.register_at_fork(after_in_child=_forked)


def _relevant(environment: dict[str, str]) -> dict[str, str]:
    """Return the variables that JAX and XLA read."""
    return {name: value for name, value in environment.items() if name.startswith(RELEVANT)}


def _start(folder: Path, environment: dict[str, str], devices: int) -> CompileServer:
    """Start a server, whose output goes to the folder's log at first."""
    reads, requests = os.pipe()
    replies, writes = os.pipe()
    # -P: a user's file in the current folder must not be imported in place of a module of that
    # name.
    command = [sys.executable, "-P", "-m", "spmd.planner.compile_server", str(devices), str(writes)]
    try:
        with (folder / LOG).open("wb") as log:
            # it exits when its standard input is closed, so it does not outlive this process
            process = subprocess.Popen(
                command, stdin=reads, stdout=log, stderr=log, env=environment, pass_fds=(writes,)
            )
    except BaseException:
        os.close(requests)
        os.close(replies)
        raise
    finally:
        # With a copy of the server's ends here, a read would not see that the server has ended.
        os.close(reads)
        os.close(writes)
    # so that it leaves no zombie
    threading.Thread(target=process.wait, name="spmd compile server", daemon=True).start()
    return CompileServer(process, requests, replies, environment, devices)


def _answered(
    server: CompileServer,
    folder: Path,
    began: float,
    target: str,
    timeout: float,
    say: Callable[[str], None],
) -> bool:
    """Return True once the server has completed a request, successfully or not; False if it ended
    first, for whatever reason.
    """
    try:
        # Writing to a pipe that nothing reads is an error, as Python ignores SIGPIPE.
        os.write(server.requests, os.fsencode(folder.resolve()) + b"\n")
    except OSError:
        return False
    with selectors.DefaultSelector() as selector:
        selector.register(server.replies, selectors.EVENT_READ)
        while True:
            remaining = max(0.0, began + timeout - time.monotonic())
            if selector.select(min(REPORT_INTERVAL, remaining)):
                # A pipe that is ready and has no byte is one whose only writer has ended.
                return bool(os.read(server.replies, 1))
            _check_time(began, timeout, target, say)


def _check_time(began: float, timeout: float, target: str, say: Callable[[str], None]) -> None:
    """Report how long the compiler has taken.

    Raises:
      CompileError: longer than it may take.
    """
    spent = time.monotonic() - began
    if spent >= timeout:
        raise CompileError(
            f"compiling for {target} took more than {timeout:g} s.",
            fix="a larger timeout, or spmd.nn.LayerStack for a list of layers: it compiles like a "
            "single layer.",
        )
    say(f"compiling for {target}: {spent:.0f} s of at most {timeout:.0f}")


def main(devices: int, replies: int) -> None:
    """Compile requests, one folder after the other."""
    folders = SimpleQueue[Path]()
    # In threads, because XLA may compile for minutes in this one.
    threading.Thread(target=_listen, args=(folders,), daemon=True).start()
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    while True:
        try:
            folder = folders.get(timeout=IDLE)
        except Empty:
            os._exit(0)
        with contextlib.suppress(OSError):  # the disk may be full
            _print_to(folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            _compile(folder)
        except Exception:  # the client reads the log
            with contextlib.suppress(OSError):
                traceback.print_exc()
        # a search compiles dozens of programs, each of which is needed once
        jax.clear_caches()
        # the client removes the folder, so nothing in it may stay open
        _print_to(Path(os.devnull), os.O_WRONLY)
        os.write(replies, b".")


def _print_to(path: Path, flags: int) -> None:
    """Have this process's output, and XLA's, go to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    # File descriptors 1 and 2, and not `sys.stdout`: XLA writes to them from C++.
    file = os.open(path, flags, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def _compile(folder: Path) -> None:
    """Compile the request in a folder, and write the results there."""
    # written by the process that started this one
    request = pickle.loads((folder / "request.pickle").read_bytes())
    # as the client has it: it changes the dtypes of constants
    jax.config.update("jax_enable_x64", request["x64"])
    lowered = _lower(request)
    # XLA gives the places of buffers only in a dump; JAX gives their sizes alone.
    dump = {"xla_dump_to": str(folder / "dump"), "xla_dump_hlo_as_text": True}
    started, retried = time.perf_counter(), {}
    try:
        compiled = lowered.compile(compiler_options=request["options"] | dump)
    except RuntimeError as error:
        retried = other_options(str(error), request["options"], request["chosen"])
        if not retried:
            raise
        compiled = lowered.compile(compiler_options=request["options"] | retried["options"] | dump)
    seconds = time.perf_counter() - started
    memory = compiled.memory_analysis()
    sizes = {name: getattr(memory, f"{name}_size_in_bytes") for name in SIZES}
    with name_errors(folder / "program.hlo"):
        (folder / "program.hlo").write_text(compiled.as_text() or "", encoding="utf-8")
    for report in (folder / "dump").glob("*after_optimizations-buffer-assignment.txt"):
        report.replace(folder / "buffers.txt")
    with name_errors(folder / "memory.json"):  # last: it marks the results as complete
        (folder / "memory.json").write_text(
            json.dumps(sizes | retried | {"seconds": seconds}), encoding="utf-8"
        )


def _lower(request: dict[str, Any]) -> Any:
    """Lower an exported step for the devices of a request."""
    exported = jax.export.Exported(**request["exported"])
    names, sizes = zip(*request["mesh"], strict=True)
    if request["topology"]:
        devices = get_topology_desc(**request["topology"]).devices
    else:
        # A server may have more devices than this mesh, for other plans.
        devices = jax.devices()[: math.prod(sizes)]
    # On a device of the target, since each platform's compiler has options of its own.
    check_compiler_options(request["options"], request["layout"], SingleDeviceSharding(devices[0]))
    mesh = Mesh(np.array(devices).reshape(sizes), names, axis_types=(AxisType.Auto,) * len(names))
    places = exported.in_shardings_jax(mesh)
    arguments = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=at)
        for aval, at in zip(exported.in_avals, places, strict=True)
    ]
    results: dict[str, Any] = {}
    if any(aval.memory_space == jax.memory.Space.Host for aval in exported.in_avals):
        # jax 0.10 pairs donated arrays in the host's memory with results only if the shardings of
        # results are given
        results["out_shardings"] = list(exported.out_shardings_jax(mesh))
    # What is donated is given again: `jax.export.Exported` does not keep it.
    return jax.jit(exported.call, donate_argnums=request["donated"], **results).lower(*arguments)


def _listen(folders: SimpleQueue[Path]) -> None:
    """Queue requests; the client keeps this process's standard input open as long as it lives."""
    for line in sys.stdin.buffer:
        folders.put(Path(os.fsdecode(line.removesuffix(b"\n"))))
    # `sys.exit` would end this thread alone.
    os._exit(1)


def _end_with(parent: int) -> None:
    """Exit with the parent, because a fork of it may still hold the input open."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
