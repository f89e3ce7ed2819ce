"""The optimizer's state, or inputs of layers, in the host's memory: the step, and the most bytes on
the device.
"""

from benchmarks.gpu import cases
from benchmarks.gpu.measure import Arm, Part, run_part

WHERE = ("device", "host", "remat")


def main(part: Part) -> None:
    arms: dict[str, Arm] = {}
    for number, where in enumerate(WHERE):
        if where == "host" and part.small:
            part.write(where, failed="ours", error="CPUs have one kind of memory")
            continue
        arms[where] = Arm(part, cases.arm, f"offload {where}")
        part.alternate(
            where, {"ours": arms[where]}, 0.9 / (len(WHERE) - number), {"ours": f"offload {where}"}
        )
        arms[where].close()
        pair = {name: arms[name] for name in ("device", where)}
        part.compare_losses(where, pair, 2e-3)  # the same steps, with other roundings to bfloat16


if __name__ == "__main__":
    run_part(main)
