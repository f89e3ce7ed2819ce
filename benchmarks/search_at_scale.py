"""Searches for the fastest layout of Llamas on tens and hundreds of H100s: how long they take, in
how much memory, and what they find.

    pip install -e '.[gpu-compiler]'
    python benchmarks/search_at_scale.py  # every case; writes benchmarks/results/search_at_scale.md
    # one case with fewer programs, without writing
    python benchmarks/search_at_scale.py --only 70B-64 --compiles 6

Each case starts with an empty cache of compiled programs. CPU seconds and memory are those of this
process and the compile server.
"""

import argparse
import contextlib
import dataclasses
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import jax
import optax
from flax import nnx

import spmd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import reported
from benchmarks.gpu_steps import MODELS
from benchmarks.published.models import next_token_loss

# what a search of the 70B on 64 H100s may take on 2 cores
LIMIT_SECONDS, LIMIT_BYTES = 600, 8 * 2**30
TICKS = os.sysconf("SC_CLK_TCK")


@dataclasses.dataclass(frozen=True)
class Case:
    """A model of `benchmarks/gpu_steps.py`, rows of 8,192 tokens in all, and the hardware."""

    model: str
    rows: int
    target: str


CASES = {
    "8B-64": Case("Llama 8B", 128, "8x8xh100"),
    "70B-64": Case("Llama 70B", 128, "8x8xh100"),
    "70B-512": Case("Llama 70B", 1024, "64x8xh100"),
}


class Usage(threading.Thread):
    """Samples the memory and the CPU time of this process and its children."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak, self.cpu, self.done = 0, {}, threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.2):
            self.sample()

    def sample(self) -> None:
        """One look at /proc; a child may end meanwhile."""
        here, size = os.getpid(), 0
        children = Path(f"/proc/{here}/task/{here}/children").read_text().split()
        for process in [str(here), *children]:
            with contextlib.suppress(OSError, IndexError):
                size += int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf(
                    "SC_PAGE_SIZE"
                )
                fields = Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()
                self.cpu[process] = (int(fields[11]) + int(fields[12])) / TICKS
        self.peak = max(self.peak, size)


def search(case: Case, compiles: int) -> tuple[Any, float, float, int]:
    """The search, its wall-clock seconds, CPU seconds and peak bytes."""
    size, usage = MODELS[case.model], Usage()
    tokens = jax.ShapeDtypeStruct((case.rows, size.length), "int32")
    started, before = time.perf_counter(), time.process_time()
    usage.start()

    def say(line: str) -> None:
        print(
            f"  [{time.perf_counter() - started:5.0f} s, {usage.peak / 2**30:.1f} GiB] {line}",
            file=sys.stderr,
            flush=True,
        )

    with tempfile.TemporaryDirectory() as cache:
        os.environ["SPMD_CACHE"] = cache
        found = spmd.search(
            lambda: size.kind(**size.sizes, rngs=nnx.Rngs(0)),
            {"tokens": tokens, "targets": tokens},
            loss=next_token_loss,
            optimizer=optax.adamw(3e-4),
            target=case.target,
            precision="bfloat16",
            compiles=compiles,
            say=say,
        )
    wall = time.perf_counter() - started
    usage.sample()
    usage.done.set()
    del usage.cpu[str(os.getpid())]  # since its start, where only the search counts
    return found, wall, time.process_time() - before + sum(usage.cpu.values()), usage.peak


def row(name: str, case: Case, found: Any, wall: float, cpu: float, peak: int) -> str:
    """A line of the table of searches."""
    best, all_of = found.best, len(found.plans) + len(found.rejected)
    figures = [
        f"{wall:.0f} s",
        f"{cpu:.0f} s",
        f"{peak / 2**30:.1f} GiB",
        f"{all_of:,}",
        str(len(found.plans)),
    ]
    plan = ["nothing fits"] * 4
    if best is not None:
        rate = case.rows * MODELS[case.model].length / best.timeline.seconds / found.cluster.count
        plan = [
            str(found.plans[0][0]),
            f"{best.timeline.seconds:.2f} s, {rate:,.0f} tokens/s",
            f"{best.timeline.mfu:.1%}",
        ]
        plan.append(f"{best.memory.peak / 2**30:.1f} GiB")
    return "| " + " | ".join([name, case.target, str(case.rows), *figures, *plan]) + " |"


HEAD = (
    "| case | target | rows | time | CPU | memory | candidates | fit | best | step, on each device "
    "| MFU | peak |"
)
NOTES = Path(__file__).parent / "search_at_scale_notes.md"  # what others publish as theirs


def main() -> None:
    parser = argparse.ArgumentParser(description="Search for layouts of Llamas on many H100s.")
    parser.add_argument("--only", choices=CASES, help="one case")
    parser.add_argument(
        "--compiles", type=int, default=24, help="programs of a search (default: 24)"
    )
    args = parser.parse_args()
    lines, details = [HEAD, "|" + "---|" * (HEAD.count("|") - 1)], []
    for name, case in CASES.items():
        if args.only in (None, name):
            found, wall, cpu, peak = search(case, args.compiles)
            lines.append(row(name, case, found, wall, cpu, peak))
            details += [
                f"## {name}",
                "",
                "```",
                *str(found).split("\nrejected\n")[0].rstrip().splitlines(),
                "```",
                "",
            ]
            print("\n".join([lines[-1], "", str(found), ""]), flush=True)
            if name == "70B-64":
                verdict = "kept" if wall < LIMIT_SECONDS and peak < LIMIT_BYTES else "MISSED"
                print(
                    f"at most {LIMIT_SECONDS} s and {LIMIT_BYTES / 2**30:.0f} GiB: {verdict}",
                    flush=True,
                )
    if args.only is None:
        head = reported.head(
            "Searches at scale",
            "python benchmarks/search_at_scale.py",
            "jax",
            "jaxlib",
            "jax-cuda13-pjrt",
        )
        reported.write(
            "search_at_scale", [*head, *lines, "", NOTES.read_text(encoding="utf-8"), "", *details]
        )


if __name__ == "__main__":
    main()
