"""A process that compiles one exported step for devices that need not be there, and goes: `python -m spmd.preflight.worker FOLDER`.

It is a process of its own because XLA fixes the number of simulated devices once, because a compiler may not come to an end, and because
the plugin for GPUs cannot be loaded beside a JAX that looks for GPUs. The folder holds `request.pickle`; there come `program.hlo`,
`memory.json` and XLA's own report of buffers.
"""

import json
import os
import pickle
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.export
import numpy as np
from jax.sharding import AxisType, Mesh


def main(folder: Path) -> None:
    """Compile what the folder asks for."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    request = pickle.loads((folder / "request.pickle").read_bytes())  # written by the process that started this one
    exported = jax.export.Exported(**request["exported"])
    names, sizes = zip(*request["mesh"], strict=True)
    devices = np.array(_devices(request)).reshape(sizes)
    mesh = Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))
    places = exported.in_shardings_jax(mesh)
    arguments = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=at) for aval, at in zip(exported.in_avals, places, strict=True)]
    lowered = jax.jit(exported.call, donate_argnums=request["donated"]).lower(*arguments)
    started = time.perf_counter()
    compiled = lowered.compile(compiler_options={"xla_dump_to": str(folder / "dump"), "xla_dump_hlo_as_text": True})
    seconds = time.perf_counter() - started
    memory = compiled.memory_analysis()
    sizes = {name: getattr(memory, f"{name}_size_in_bytes") for name in ("argument", "output", "alias", "temp", "generated_code")}
    (folder / "program.hlo").write_text(compiled.as_text() or "", encoding="utf-8")
    for found in (folder / "dump").glob("*after_optimizations-buffer-assignment.txt"):
        found.replace(folder / "buffers.txt")
    (folder / "memory.json").write_text(json.dumps(sizes | {"seconds": seconds}), encoding="utf-8")  # last: it says that all is there


def _end_with_parent() -> None:
    """Whoever started this process holds its standard input open as long as it lives."""
    sys.stdin.buffer.read()
    os._exit(1)


def _devices(request: dict[str, Any]) -> list[Any]:
    """Simulated ones, or those of a topology that a compiler is told of."""
    count = request["nodes"] * request["devices"]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_x64", request["x64"])
    if request["platform"] == "cpu":
        jax.config.update("jax_num_cpu_devices", count)
        return jax.devices()
    from jax.experimental import topologies

    return list(topologies.get_topology_desc(**request["topology"]).devices)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
