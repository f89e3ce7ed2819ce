"""Restarts of `spmd launch` with and without `--spares`, and what spare processes cost.

    python benchmarks/spares.py --rounds 5          # writes benchmarks/results/spares.md; Linux

A process is killed once the spare ones are ready; both arms alternate within each round, and all
runs end in the same bits, or this script fails. For the cost, undisturbed runs of many small steps
alternate, on every core that there is.
"""

import argparse
import itertools
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "distributed"))

from launched import JOB, Run, launch
from reported import head, print_sections, write

ARMS = {"new processes": [], "spare processes": ["--spares"]}
READY = r"(\d+) of \1 spare processes are ready"
AT, EVERY = 29, 25  # the step after which the fault comes, and the steps between two checkpoints


def spare_processes(launcher: int) -> Iterator[int]:
    """Ids of the spare processes of a launcher."""
    for path in Path("/proc").iterdir():
        try:
            is_child = (
                path.name.isdigit()
                and int((path / "stat").read_text().rpartition(")")[2].split()[1]) == launcher
            )
            if is_child and b"\0SPMD_SPARE=" in (path / "environ").read_bytes():
                yield int(path.name)
        except OSError:
            continue


def usage(pid: int) -> dict[str, float]:
    """CPU seconds of a process so far, and its memory in MiB: shared pages count in part (PSS), and
    not at all (USS).
    """
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    sizes = dict(re.findall(r"(\w+): +(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text()))
    uss = sum(int(sizes[name]) for name in ("Private_Clean", "Private_Dirty"))
    return {
        "CPU seconds": sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK"),
        "PSS": int(sizes["Pss"]) / 1024,
        "USS": uss / 1024,
    }


def restart(
    place: Path, processes: int, arm: Sequence[str]
) -> tuple[Run, dict[str, float], list[dict[str, float]]]:
    """One run, one of whose processes is killed; the seconds of its restart, and what each spare
    process has used before.
    """
    used = list[dict[str, float]]()

    def when_ready(process: Any, run: Run) -> None:
        saved = place / "run" / "checkpoints" / str(EVERY)
        while (
            not (saved.exists() and (not arm or re.search(READY, run.text)))
            and process.poll() is None
        ):
            time.sleep(0.02)
        time.sleep(2.0)  # nothing else happens
        used.extend(map(usage, spare_processes(process.pid)))
        (place / "ready").touch()

    options = [
        "--processes",
        processes,
        "--simulate",
        1,
        "--max-restarts",
        1,
        "--stall",
        "step=300",
        *arm,
    ]
    words = [
        "--folder",
        place / "run",
        "--every",
        EVERY,
        "--at",
        AT,
        "--fault",
        "KILL",
        "--after",
        place / "ready",
    ]
    run = launch(
        *options, JOB, *words, meanwhile=when_ready, SPMD_CACHE=str(place.parent / "cache")
    )
    if run.code or "restart 1 of" not in run.text:
        raise RuntimeError(f"it ended with {run.code}:\n{run.text}")
    failed, restarted = run.when("FAULT at"), run.when("restart 1 of")
    later = [(at, line) for at, line in run.lines if at >= restarted]
    joined = max(at for at, line in later if "(spmd launch), process 0 at" in line)
    new = min(at for at, line in later if f"STEP {AT + 1} " in line)
    return (
        run,
        {
            "end of the attempt": restarted - failed,
            "imports": joined - restarted,
            "join to a new step": new - joined,
        },
        used,
    )


def restarts(options: argparse.Namespace, place: Path) -> list[str]:
    """The table of restarts, and what a spare process uses."""
    seconds: dict[str, list[dict[str, float]]] = {name: [] for name in ARMS}
    hashes, used = set[tuple[str, str]](), list[dict[str, float]]()
    for number, (name, arm) in itertools.product(range(options.rounds), ARMS.items()):
        (folder := place / f"{number}-{len(arm)}").mkdir()
        run, parts, of_spares = restart(folder, options.processes, arm)
        print(f"round {number}, {name}: {parts} {of_spares}", file=sys.stderr, flush=True)
        seconds[name].append(parts)
        hashes |= set(run.hashes)
        used += of_spares
    if len(hashes) != 1:
        raise RuntimeError(f"the runs ended in different bits: {hashes}")
    parts = list(seconds["new processes"][0])
    lines = [
        f"## A process of {options.processes} is killed",
        "",
        f"| restart in | s from the fault to a new step | {' | '.join(parts)} |",
    ]
    lines += [f"|---|---|{'---|' * len(parts)}"]
    for name, each in seconds.items():
        columns = [
            [sum(one.values()) for one in each],
            *([one[part] for one in each] for part in parts),
        ]
        lines.append(f"| {name} | {' | '.join(map(spread, columns))} |")
    spares = ", ".join(
        f"{statistics.median(one[what] for one in used):.1f} {unit}"
        for what, unit in zip(used[0], UNITS, strict=True)
    )
    return [*lines, "", f"A spare process that is ready has used {spares}.", ""]


UNITS = ("s of CPU", "MiB of memory (PSS)", "MiB that no other process has (USS)")


def costs(options: argparse.Namespace, place: Path) -> list[str]:
    """How much longer undisturbed training takes while spare processes start."""
    seconds: dict[str, list[float]] = {name: [] for name in ARMS}
    for number, (name, arm) in itertools.product(range(options.rounds), ARMS.items()):
        launcher = ["--processes", options.processes, "--simulate", 1, "--max-restarts", 1, *arm]
        run = launch(
            *launcher, JOB, "--steps", options.steps, "--rank", -1, SPMD_CACHE=str(place / "cache")
        )
        if run.code or (arm and not re.search(READY, run.text)):
            raise RuntimeError(f"too few steps, or it ended with {run.code}:\n{run.text}")
        seconds[name].append(run.when("HASH") - run.when("STEP 26"))
        print(f"round {number}, {name}: {seconds[name][-1]:.1f} s", file=sys.stderr, flush=True)
    longer = [
        spare - new
        for new, spare in zip(seconds["new processes"], seconds["spare processes"], strict=True)
    ]
    title = (
        f"## {options.steps} steps of {options.processes} processes on {os.cpu_count()} cores, "
        "without a fault"
    )
    lines = [
        title,
        "",
        "| | s |",
        "|---|---|",
        *(f"| {name} | {spread(each)} |" for name, each in seconds.items()),
    ]
    return [*lines, f"| difference within a round | {spread(longer)} |", ""]


def spread(values: Sequence[float]) -> str:
    """Median and range."""
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10_000, help="of a run without a fault")
    parser.add_argument("--dry-run", action="store_true", help="write no results")
    options = parser.parse_args()
    top = head(
        "Spare processes",
        f"python benchmarks/spares.py --rounds {options.rounds}",
        "jax",
        "flax",
        "optax",
        "orbax-checkpoint",
    )
    print("\n".join(top))
    with tempfile.TemporaryDirectory() as place:
        lines = [
            *top,
            *print_sections(section(options, Path(place)) for section in (restarts, costs)),
        ]
    load = (
        f"The load average of the machine was {os.getloadavg()[0]:.0f} at the end: other programs "
        "ran beside these."
    )
    print(load)
    if not options.dry_run:
        write("spares", [*lines, load])


if __name__ == "__main__":
    main()
