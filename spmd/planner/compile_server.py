"""A process that compiles exported steps for devices that need not be present: `python -m
spmd.planner.compile_server DEVICES REPLIES`.

It is a separate process because XLA fixes the number of simulated devices once, because a compiler
may hang, and because the GPU plugin cannot be loaded in a process whose JAX looks for GPUs. Each
line of its standard input is a folder with a `request.pickle`. The server writes `program.hlo`,
`memory.json`, XLA's buffer assignment and its output (`log`) there, and then a byte to the pipe
REPLIES. It exits when its input is closed, when its parent exits, even while it compiles, and after
a minute idle.
"""

import contextlib
import json
import math
import os
import pickle
import sys
import threading
import time
import traceback
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import jax
import jax.export
import numpy as np
from jax.experimental.topologies import get_topology_desc
from jax.sharding import AxisType, Mesh, SingleDeviceSharding

from spmd.output_files import name_errors
from spmd.planner.compile_client import LOG
from spmd.train.compiler_options import check_compiler_options, other_options

IDLE = 60.0  # seconds
# of XLA's analysis of memory, in bytes
SIZES = ("argument", "output", "alias", "temp", "generated_code", "host_temp")


def main(devices: int, replies: int) -> None:
    """Compile requests, one folder after the other."""
    folders = SimpleQueue[Path]()
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
        jax.clear_caches()
        # the client removes the folder, so nothing in it may stay open
        _print_to(Path(os.devnull), os.O_WRONLY)
        os.write(replies, b".")


def _print_to(path: Path, flags: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(path, flags, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def _compile(folder: Path) -> None:
    # written by the process that started this one
    request = pickle.loads((folder / "request.pickle").read_bytes())
    jax.config.update("jax_enable_x64", request["x64"])
    exported = jax.export.Exported(**request["exported"])
    names, sizes = zip(*request["mesh"], strict=True)
    devices = (
        get_topology_desc(**request["topology"]).devices
        if request["topology"]
        else jax.devices()[: math.prod(sizes)]
    )
    check_compiler_options(request["options"], request["layout"], SingleDeviceSharding(devices[0]))
    mesh = Mesh(np.array(devices).reshape(sizes), names, axis_types=(AxisType.Auto,) * len(names))
    places = exported.in_shardings_jax(mesh)
    arguments = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=at)
        for aval, at in zip(exported.in_avals, places, strict=True)
    ]
    # jax 0.10 pairs donated arrays in the host's memory with results only if the shardings of
    # results are given
    on_host = any(aval.memory_space == jax.memory.Space.Host for aval in exported.in_avals)
    results: dict[str, Any] = (
        {"out_shardings": list(exported.out_shardings_jax(mesh))} if on_host else {}
    )
    lowered = jax.jit(exported.call, donate_argnums=request["donated"], **results).lower(*arguments)
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


def _listen(folders: SimpleQueue[Path]) -> None:
    """Queue requests; the client keeps this process's standard input open as long as it lives."""
    for line in sys.stdin.buffer:
        folders.put(Path(os.fsdecode(line.removesuffix(b"\n"))))
    os._exit(1)


def _end_with(parent: int) -> None:
    """Exit with the parent, because a fork of it may still hold the input open."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
