"""Compile every program of the GPU benchmark by XLA's GPU compiler, without a GPU, and keep what
was planned of the steps.

    pip install -e '.[gpu-compiler]'         # the compiler alone, 400 MB, no CUDA libraries
    # writes benchmarks/gpu/plans.json and benchmarks/results/gpu/programs.md
    python benchmarks/gpu/plan.py
    python benchmarks/gpu/plan.py --only gpt2,codec --targets h100     # prints only

`run.py` compares its times with these. So that nothing fails to compile on the day, run it with the
versions of that machine.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from benchmarks import reported
from benchmarks.gpu import attention, cases, codecs, recurrent
from benchmarks.gpu.measure import PLANS
from spmd.nn.parallel_context import ParallelConfig, parallel_scope
from spmd.planner.cluster import Cluster
from spmd.planner.compile import topology
from spmd.planner.gpu_kernels import gpu_of

TARGETS = ("h100", "h200")


def functions() -> dict[str, tuple[Callable[..., Any], list[Any]]]:
    """Programs that are no steps of the library, with the shapes of their arguments."""
    found = {**attention.programs(False), **recurrent.programs(False), **codecs.programs(False)}
    for name in ("gpt2", "llama"):
        step = cases.steps()[name]
        hand = cases.ByHand(step)
        state = jax.eval_shape(hand.init)
        batch = {
            key: jax.ShapeDtypeStruct(array.shape, array.dtype) for key, array in step.batch.items()
        }
        found[f"{name} by hand"] = hand.update, [*state, batch]
    return found


def compile_for(target: str, function: Callable[..., Any], shapes: list[Any]) -> None:
    """Compile a function for one device of a kind."""
    cluster = Cluster.parse(f"1x{target}")
    mesh = Mesh(
        np.array(topologies.get_topology_desc(**topology(cluster)).devices),
        ("data",),
        axis_types=(AxisType.Auto,),
    )
    replicated = NamedSharding(mesh, PartitionSpec())

    def placed(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=replicated)

    # cuDNN's attention is lowered without a GPU only where all axes of the mesh are manual
    on_device = jax.shard_map(
        function, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
    )

    with (
        gpu_of(cluster.target),
        parallel_scope(ParallelConfig(attention="as_written", platform="cuda")),
    ):
        jax.jit(on_device).trace(*jax.tree.map(placed, shapes)).lower(
            lowering_platforms=("cuda",)
        ).compile()


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Compile the programs of the GPU benchmark without a GPU."
    )
    parser.add_argument(
        "--only", default="", help="names that begin with one of these, separated by commas"
    )
    parser.add_argument("--targets", default=",".join(TARGETS))
    args = parser.parse_args()
    chosen, failed = tuple(args.only.split(",")), []
    plans: dict[str, dict[str, Any]] = {target: {} for target in args.targets.split(",")}
    lines = [
        "| program | for | planned step | peak | temporaries | compiled in |",
        "|" + "---|" * 6,
    ]
    for target, of_target in plans.items():
        for name, step in cases.steps().items():
            if not name.startswith(chosen):
                continue
            began = time.perf_counter()
            try:
                plan = step.plan(target)
            except Exception as error:  # all that fail are named at the end
                failed.append(f"{name} for {target}: {type(error).__name__}: {str(error)[:500]}")
                continue
            times, memory = plan.timeline, plan.memory
            of_target[name] = {
                "seconds": times.seconds,
                "peak": memory.peak,
                "expected": memory.expected,
                "mfu": times.mfu,
            }
            sizes = (
                f"{times.seconds * 1e3:,.2f} ms | {memory.peak / 2**30:.2f} GiB | "
                f"{memory.temporaries / 2**30:.2f} GiB"
            )
            lines.append(f"| {name} | {target} | {sizes} | {time.perf_counter() - began:.0f} s |")
            print(lines[-1], flush=True)
    cases.PRETEND_GPU = True
    for name, (function, shapes) in functions().items():
        if not name.startswith(chosen):
            continue
        began = time.perf_counter()
        try:
            compile_for("h100", function, shapes)
        except Exception as error:  # all that fail are named at the end
            failed.append(f"{name}: {type(error).__name__}: {str(error)[:500]}")
            continue
        lines.append(f"| {name} | h100 | | | | {time.perf_counter() - began:.0f} s |")
        print(lines[-1], flush=True)
    print("\n".join(f"FAILED {each}" for each in failed))
    if not args.only and tuple(plans) == TARGETS and not failed:
        PLANS.write_text(json.dumps(plans, indent=1) + "\n", encoding="utf-8")
        (reported.RESULTS / "gpu").mkdir(exist_ok=True)
        title = "Programs of the GPU benchmark, compiled without a GPU"
        head = reported.head(
            title, "python benchmarks/gpu/plan.py", "jax", "jaxlib", "jax-cuda13-pjrt"
        )
        reported.write("gpu/programs", [*head, *lines])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
