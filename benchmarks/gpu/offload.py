"""The optimizer's state, or inputs of layers, in the host's memory: the step, and the most bytes on the device."""

import subprocess
import sys

import jax

from benchmarks.gpu import cases
from benchmarks.gpu.measure import Part, run_part

WHERE = ("device", "host", "remat")


def main(part: Part) -> None:
    """Each in a process of its own: a device's peak only grows."""
    if len(sys.argv) > 1 and part.name.startswith("offload-"):
        measure(part, part.name.removeprefix("offload-"))
        return
    for number, where in enumerate(WHERE):
        seconds = part.left / (len(WHERE) - number)
        command = [sys.executable, "-m", "benchmarks.gpu.offload", "--name", f"offload-{where}", "--seconds", f"{seconds:.0f}"]
        command += ["--out", part.out, *(["--small"] if part.small else [])]
        with part.guarded(where, "ours"):
            subprocess.run(command, timeout=max(part.left, 1.0), check=True)


def measure(part: Part, where: str) -> None:
    if where == "host" and jax.default_backend() == "cpu":
        part.write(where, failed="ours", error="CPUs have one kind of memory")
        return
    part.alternate(where, {"ours": cases.steps(part.small)[f"offload {where}"].arm()}, 0.9, plan=f"offload {where}")


if __name__ == "__main__":
    run_part(main)
