"""The optimizer's state, or inputs of layers, in the host's memory: the step, and the most bytes on the device."""

import jax

from benchmarks.gpu import cases
from benchmarks.gpu.measure import Arm, Part, run_part

WHERE = ("device", "host", "remat")


def main(part: Part) -> None:
    for number, where in enumerate(WHERE):
        if where == "host" and jax.default_backend() == "cpu":
            part.write(where, failed="ours", error="CPUs have one kind of memory")
            continue
        ours = Arm(part, cases.arm, f"offload {where}")
        part.alternate(where, {"ours": ours}, 0.9 / (len(WHERE) - number), plan=f"offload {where}")
        ours.close()


if __name__ == "__main__":
    run_part(main)
