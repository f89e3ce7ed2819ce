"""What a fault costs: processes and hosts are killed, and the run resumes from memory or from disk.

    # writes benchmarks/results/restarts.md; Linux, as root, for the namespaces
    python benchmarks/restarts.py

Hosts are network namespaces of this machine, each with its own memory. Every run waits at a step
until its checkpoints are complete, and is harmed there. Runs with and without `memory_every`
alternate within each round. All end in the same bits, or this script fails.
"""

import argparse
import collections
import dataclasses
import functools
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "distributed"))

from launched import JOB, Run, launch
from reported import head, print_sections, write
from simulated_hosts import Host, Hosts, simulated_hosts

from spmd.base.tree import format_bytes

DISK, MEMORY = "disk only", "memory_every"
PARTS = (
    "end of the attempt",
    "agents",
    "imports",
    "join, imports of the script",
    "setup",
    "restore",
    "compile and first step",
    "lost steps",
)


@dataclasses.dataclass(frozen=True)
class Size:
    """A model, and when it is saved and harmed."""

    options: tuple[object, ...]
    every: int
    memory_every: int
    at: int  # the step after which the fault comes
    faults: tuple[str, ...]

    def expected(self, arm: str, source: str) -> int:
        """The step from which it resumes."""
        every = self.memory_every if arm == MEMORY and source != "disk" else self.every
        return self.at // every * every


@dataclasses.dataclass(frozen=True)
class Fault:
    """What happens to which hosts, and where a run with checkpoints in memory then finds its
    state.
    """

    processes: tuple[int, ...]
    victims: tuple[int, ...]
    harm: Callable[[Host], None]
    source: str


def lose(host: Host) -> None:
    host.kill()
    host.lose_memory()


FAULTS = {
    "a worker": Fault((1, 1), (1,), lambda host: host.kill_workers(1), "own memory"),
    "all workers of a host": Fault((2, 2), (1,), Host.kill_workers, "own memory"),
    "an agent and its workers": Fault((1, 1), (1,), Host.kill, "own memory"),
    "a host with its memory": Fault((1, 1), (1,), lose, "neighbour"),
    "two of three hosts": Fault((2, 1, 1), (1, 2), lose, "disk"),
}


SIZES = {
    "small": Size((), every=1000, memory_every=20, at=1510, faults=tuple(FAULTS)),
    "large": Size(
        ("--wide", 12, "--layout", "fsdp"),
        every=20,
        memory_every=2,
        at=31,
        faults=("a worker", "a host with its memory"),
    ),
}


@dataclasses.dataclass
class Result:
    """One run.

    Attributes:
      lost: steps.
      next_step, regained: seconds from the fault to the first step of the next attempt, and to the
        first step that is new.
      parts: seconds by what they went into; they add up to `regained`.
      held: bytes in the memory of the fullest host at the fault.
      sent: bytes that all hosts have sent for one checkpoint.
    """

    lost: int
    next_step: float
    regained: float
    parts: dict[str, float]
    held: int
    sent: int


def phases(folder: Path) -> dict[str, float]:
    """Seconds by phase, so far."""
    return collections.Counter(json.loads((folder / "goodput.json").read_text())["totals"])


def measure(
    place: Path, size: Size, fault: Fault, arm: str, hash_of: Callable[[int], str]
) -> Result:
    """One run, harmed once.

    Raises:
      RuntimeError: it did not end as the undisturbed run, or resumed from another step.
    """
    folder, seen = place / "run", dict[str, Any]()
    in_memory = ["--memory-every", size.memory_every] if arm == MEMORY else []
    words = [
        JOB,
        "--folder",
        folder,
        "--every",
        size.every,
        "--steps",
        size.at + 4,
        "--at",
        size.at,
        "--fault",
        "sleep",
        *size.options,
    ]
    with simulated_hosts(place, len(fault.processes)) as hosts:

        def harm(process: Any, run: Run) -> None:
            newest, count = (
                size.at // size.memory_every * size.memory_every,
                2 * sum(fault.processes) if in_memory else 0,
            )
            on_disk = folder / "checkpoints" / str(size.every)
            while process.poll() is None:
                if "FAULT at" in run.text and on_disk.exists() and hosts.pieces(newest) >= count:
                    break
                time.sleep(0.05)
            seen.update(
                usage(hosts, newest, fault.processes), before=phases(folder), at=time.time()
            )
            for number in fault.victims:
                fault.harm(hosts[number])

        options = hosts.options(fault.processes, simulate=1)
        run = launch(
            *options,
            "--max-restarts",
            1,
            *words,
            *in_memory,
            seconds=900,
            meanwhile=harm,
            SPMD_CACHE=str(place.parent / "cache"),
        )
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    resumed = [record["step"] for record in records if record.get("event") == "resumed"]
    expected = size.expected(arm, fault.source)
    if (
        run.code
        or {hash for hash, _ in run.hashes} != {hash_of(sum(fault.processes))}
        or resumed != [expected]
    ):
        raise RuntimeError(
            f"resumed from {resumed}, expected {expected}; it ended with {run.code}:\n{run.text}"
        )
    return timed(run, seen, phases(folder), size.at - expected)


def timed(run: Run, seen: dict[str, Any], after: dict[str, float], lost: int) -> Result:
    """The times of a run, from what it has printed and its account."""
    restarted = run.when("spmd launch: restart 1 of")
    later = [(at, line) for at, line in run.lines if at > restarted]
    joined = max(at for at, line in later if "(spmd launch), process 0 at" in line)
    began = max(
        float(match[1])
        for _, line in later
        if (match := re.search(r"FIRST \d+ in a process that began at (\S+)", line))
    )
    imported = max(float(line.rpartition("MAIN at ")[2]) for _, line in later if "MAIN at" in line)
    first, again = (min(at for at, line in later if text in line) for text in ("FIRST", "STEP"))
    spent = {name: after[name] - seen["before"][name] for name in ("restoring", "compiling")}
    seconds = [
        restarted - seen["at"],
        began - restarted,
        joined - began,
        imported - joined,
        first - imported - sum(spent.values()),
        *spent.values(),
    ]
    parts = dict(zip(PARTS, [*seconds, again - first], strict=True))
    return Result(lost, first - seen["at"], again - seen["at"], parts, seen["held"], seen["sent"])


def usage(hosts: Hosts, step: int, processes: Sequence[int]) -> dict[str, int]:
    """Bytes in the memory of the fullest host, and those of a step's copies on other hosts than the
    one that wrote them.
    """
    held, sent, first = [], 0, 0
    for host, count in zip(hosts.hosts, processes, strict=True):
        sizes = {path: path.stat().st_size for path in host.memory.rglob("*.?") if path.is_file()}
        held.append(sum(sizes.values()))
        sent += sum(
            size
            for path, size in sizes.items()
            if path.stem == str(step) and not first <= int(path.suffix[1:]) < first + count
        )
        first += count
    return {"held": max(held), "sent": sent}


def undisturbed(size: Size, hashes: dict[int, str], processes: int) -> str:
    """The hash of a run without faults, by the number of processes."""
    if processes not in hashes:
        run = launch(
            "--processes", processes, "--simulate", 1, JOB, "--steps", size.at + 4, *size.options
        )
        if run.code:
            raise RuntimeError(f"the undisturbed run has failed:\n{run.text}")
        hashes[processes] = run.hashes[0][0]
    return hashes[processes]


def spread(values: Sequence[float]) -> str:
    """Median and range."""
    return (
        f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"
        if len(values) > 1
        else f"{values[0]:.1f}"
    )


def report(options: argparse.Namespace):
    """The tables, size by size."""
    for name in options.sizes.split(","):
        size, hashes, results = SIZES[name], dict[int, str](), dict[tuple[str, str], list[Result]]()
        with tempfile.TemporaryDirectory(dir=options.folder) as place:
            for number in range(options.rounds):
                for fault in size.faults if options.faults is None else options.faults:
                    for arm in (DISK, MEMORY):
                        folder = (
                            Path(place) / f"{number}-{list(FAULTS).index(fault)}-{arm == MEMORY}"
                        )
                        folder.mkdir()
                        result = measure(
                            folder,
                            size,
                            FAULTS[fault],
                            arm,
                            functools.partial(undisturbed, size, hashes),
                        )
                        results.setdefault((fault, arm), []).append(result)
                        print(
                            f"{name}, round {number}, {fault}, {arm}: {result}",
                            file=sys.stderr,
                            flush=True,
                        )
        yield tables(name, size, results)


def tables(name: str, size: Size, results: dict[tuple[str, str], list[Result]]) -> list[str]:
    """What was lost, and where the time went."""
    columns = [
        "fault",
        "processes by host",
        "checkpoints",
        "resumed from",
        "steps lost",
        "s to the next step",
        "s to a new step",
    ]
    columns += ["memory of a host", "sent per checkpoint"]
    title = (
        f"## {name}: every={size.every}, memory_every={size.memory_every}, the fault after step "
        f"{size.at}"
    )
    lines = [title, "", f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    for (fault, arm), each in results.items():
        what = [
            fault,
            " + ".join(map(str, FAULTS[fault].processes)),
            arm,
            "disk" if arm == DISK else FAULTS[fault].source,
            each[0].lost,
        ]
        seconds = [
            spread([result.next_step for result in each]),
            spread([result.regained for result in each]),
        ]
        counted = [
            format_bytes(max(result.held for result in each)),
            format_bytes(max(result.sent for result in each)),
        ]
        lines.append(
            "| "
            f"{' | '.join(map(str, [*what, *seconds, *(counted if arm == MEMORY else ['', ''])]))} "
            "|"
        )
    lines += ["", "Where these seconds went, medians:", ""]
    lines += [f"| fault | checkpoints | {' | '.join(PARTS)} |", f"|---|---|{'---|' * len(PARTS)}"]
    for (fault, arm), each in results.items():
        parts = [
            f"{statistics.median(result.parts[part] for result in each):.1f}" for part in PARTS
        ]
        lines.append(f"| {' | '.join([fault, arm, *parts])} |")
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--faults", type=lambda text: text.split(","), help="only these")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on the disk")
    parser.add_argument("--dry-run", action="store_true", help="write no results")
    options = parser.parse_args()
    top = head(
        "What a fault costs",
        f"python benchmarks/restarts.py --rounds {options.rounds}",
        "jax",
        "orbax-checkpoint",
        "numpy",
    )
    print("\n".join(top))
    about = (
        "Hosts are network namespaces of this machine; all processes share its cores. Each run is "
        "harmed once, at a step where its "
    )
    about += (
        f"checkpoints are complete. All end in the same bits. Median and range of {options.rounds} "
        "rounds."
    )
    lines = [*top, about, "", *print_sections(report(options))]
    if not options.dry_run:
        write("restarts", lines)


if __name__ == "__main__":
    main()
