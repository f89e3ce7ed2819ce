"""A soak: two hosts train while faults happen at random, from a seed. In the end the state has the
same hash as without faults.

    python tests/distributed/soak.py --minutes 20 --seed 0 --out benchmarks/results/soak.md
    python tests/distributed/soak.py --minutes 20 --seed 0 --compare \\
        --out benchmarks/results/soak.md

Processes, hosts and the launcher are killed, processes are stopped and asked to end, and
checkpoints are damaged. Hosts are network namespaces, or addresses of this machine where there are
no privileges for those (`simulated_hosts.py`). With `--memory-every 5` checkpoints are also in
memory, and before some of the same faults a piece there is damaged, or all are deleted. If the hash
differs, this script ends with code 1.

`--compare` makes two runs at the same time and from the same seed: one with checkpoints on disk
only, which compiles after each restart, and one with checkpoints in memory and the cache of
compiled programs.
"""

import argparse
import collections
import dataclasses
import datetime
import json
import os
import platform
import random
import re
import signal
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import jax
from launched import JOB, ROOT, Run, launch
from simulated_hosts import simulated_hosts

PAUSE = 0.05  # seconds between two steps of the disturbed run, so that it lasts
EVERY, MEMORY_EVERY = 20, 5  # steps between two checkpoints on disk, and in memory with --compare
PROCESSES = (1, 1)  # by host
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP, "SIGTERM": signal.SIGTERM}
ON_DISK = ("a bit flipped", "a file cut off", "a file deleted")
WORKERS, AGENT, HOST, LAUNCHER = (
    "all workers of a host killed",
    "an agent killed",
    "a host and its memory lost",
    "the launcher killed",
)
FAULTS = (*SIGNALS, "SIGKILL", WORKERS, AGENT, HOST, LAUNCHER, *ON_DISK)
MEMORY_FAULTS = (None, None, None, "a piece in memory damaged", "the memory deleted")


class Harm:
    """Does harm to a run, again and again, until its time is over."""

    def __init__(self, folder, seed, minutes, hosts, memory):
        self.seed, self.folder, self.hosts, self.memory = seed, folder, hosts, memory
        self.began, self.seconds = time.monotonic(), minutes * 60
        self.number, self.random, self.memory_random = 0, random.Random(), random.Random()
        # the newest step, and after how many seconds, while there is harm
        self.done, self.reached = collections.Counter(), (0, 0.0)

    def next(self):
        """Draw the next fault from its number, so that runs have the same ones whatever the files
        were that earlier ones have damaged.
        """
        self.random, self.memory_random = (
            random.Random(f"{self.seed} {self.number} {what}") for what in ("fault", "memory")
        )
        self.number += 1
        return self.random.uniform(2.0, 15.0), self.random.choice(FAULTS)

    def __call__(self, launcher, run):
        """From the launcher's start to its end: a fault some seconds after training has made
        progress.
        """
        seen, due, fault = 0, None, ""
        while launcher.poll() is None and (elapsed := time.monotonic() - self.began) < self.seconds:
            time.sleep(0.05)
            steps = steps_of(run)
            if len(steps) > seen and due is None:
                wait, fault = self.next()
                due = time.monotonic() + wait
            if steps:
                self.reached = (steps[-1][1], elapsed)
            if due is not None and time.monotonic() > due:
                self.harm(launcher, fault)
                seen, due = len(steps), None

    def harm(self, launcher, fault):
        """One fault; what is damaged is the newest checkpoint, and then one process is killed."""
        host = self.random.choice(self.hosts.hosts)
        workers = [pid for each in self.hosts.hosts for pid in each.processes("spmd.launch.runner")]
        victim = self.random.randrange(sum(PROCESSES))
        if len(workers) < sum(PROCESSES) or (fault in ON_DISK and not self.damage(fault)):
            return
        if self.memory and fault != "SIGTERM":
            self.damage_memory()
        if fault == WORKERS:
            host.kill_workers()
        elif fault in (AGENT, HOST):
            host.kill()
        elif fault == LAUNCHER:
            launcher.kill()
        else:
            try:
                os.kill(workers[victim], SIGNALS.get(fault, signal.SIGKILL))
            except ProcessLookupError:
                return
        if fault == HOST:
            host.lose_memory()
        self.done[fault] += 1
        print(f"soak: {'with' if self.memory else 'without'} memory: {fault}", flush=True)

    def damage_memory(self):
        """Sometimes damage the newest piece of a process in memory, or delete all."""
        fault = self.memory_random.choice(MEMORY_FAULTS)
        pieces = [path for host in self.hosts.hosts for path in host.memory.rglob("*.[01]")]
        pieces.sort(key=lambda path: int(path.name.partition(".")[0]))
        if fault is None or not pieces:
            return
        for path in pieces if fault == "the memory deleted" else pieces[-1:]:
            try:
                if fault == "the memory deleted":
                    path.unlink()
                else:
                    content = bytearray(path.read_bytes())
                    content[self.memory_random.randrange(len(content))] ^= (
                        1 << self.memory_random.randrange(8)
                    )
                    path.write_bytes(content)
            except FileNotFoundError:  # a newer one has replaced it
                return
        self.done[fault] += 1

    def damage(self, fault):
        """Harm a file of the newest checkpoint; False where there is none."""
        steps = sorted(
            int(path.name)
            for path in (self.folder / "checkpoints").glob("*")
            if path.name.isdigit()
        )
        files = (
            sorted(
                path
                for path in (self.folder / "checkpoints" / str(steps[-1])).rglob("*")
                if path.is_file()
            )
            if len(steps) > 1
            else []
        )
        files = [
            path
            for path in files
            if path.stat().st_size
            and path.name not in ("commit_success.txt", "_CHECKPOINT_METADATA")
        ]
        if not files:
            return False
        path = self.random.choice(files)
        content = bytearray(path.read_bytes())
        place = self.random.randrange(len(content))
        if fault == "a file deleted":
            path.unlink()
        elif fault == "a file cut off":
            path.write_bytes(content[:place])
        else:
            content[place] ^= 1 << self.random.randrange(8)
            path.write_bytes(content)
        return True


def steps_of(run):
    """When process 0 has printed which step, so far."""
    pattern = re.compile(r"\[\S+:0\] STEP (\d+)$")
    return [(at, int(match[1])) for at, line in list(run.lines) if (match := pattern.match(line))]


@dataclasses.dataclass
class Arm:
    """A run that is harmed, and what it came to.

    Attributes:
      memory_every: steps between two checkpoints in memory; None: on disk only.
      cache: whether compiled programs are kept.
    """

    memory_every: int | None
    cache: bool
    runs: list[Run] = dataclasses.field(default_factory=list)
    records: list[dict] = dataclasses.field(default_factory=list)
    put_aside: int = 0
    harm: Harm | None = None
    problem: str = ""

    @property
    def text(self):
        return "\n".join(run.text for run in self.runs)

    def train(self, place, options, steps):
        """Train to the end, with as many launchers as it takes."""
        folder, limit = place / "run", time.monotonic() + options.minutes * 60 * 3
        with simulated_hosts(place, len(PROCESSES)) as hosts:
            self.harm = Harm(
                folder, options.seed, options.minutes, hosts, self.memory_every is not None
            )
            more = [
                *(("--memory-every", self.memory_every) if self.memory_every else ()),
                *(() if self.cache else ("--no-cache",)),
            ]
            while not self.runs or not self.runs[-1].hashes:
                if time.monotonic() > limit:
                    self.problem = (
                        f"no end after {len(self.runs)} runs:\n{self.runs[-1].text[-3000:]}"
                    )
                    return
                resume = ["--resume"] if (folder / "checkpoints").exists() else []
                left = max(60.0, limit - time.monotonic())
                self.runs.append(
                    trained(
                        hosts.options(PROCESSES),
                        folder,
                        steps,
                        PAUSE,
                        self.harm,
                        left,
                        [*more, *resume],
                    )
                )
                while any(host.processes() for host in hosts.hosts) and time.monotonic() < limit:
                    time.sleep(0.1)  # those of a killed launcher
        self.records = [
            json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()
        ]
        self.put_aside = (
            len(list((folder / "damaged").glob("*"))) if (folder / "damaged").exists() else 0
        )

    def resumed(self, *, memory):
        """How often it was resumed, from memory or from disk."""
        return sum(
            record.get("event") == "resumed" and ("source" in record) == memory
            for record in self.records
        )

    def step_seconds(self):
        """Seconds between steps that were printed one after the other in an attempt, as they
        come.
        """
        pairs = [
            pair
            for run in self.runs
            for pair in zip(steps_of(run), steps_of(run)[1:], strict=False)
        ]
        return [
            (later - earlier) / 10
            for (earlier, first), (later, second) in pairs
            if second == first + 10
        ]

    def rows(self, wanted, steps, step_seconds):
        """The rows of the report."""
        equal, (reached, seconds) = self.is_equal(wanted), self.harm.reached
        hashes = ", ".join(sorted(hash for hash, _ in wanted | set(self.runs[-1].hashes)))
        return {
            "final state": f"{'equal' if equal else 'NOT EQUAL'}: {hashes}",
            "steps": steps,
            **{
                fault: self.harm.done[fault]
                for fault in dict.fromkeys([*FAULTS, *filter(None, MEMORY_FAULTS)])
            },
            "restarts by the launcher": self.text.count("spmd launch: restart "),
            "launchers, one more for each SIGTERM that saved and each that was killed": len(
                self.runs
            ),
            "damaged checkpoints put aside": self.put_aside,
            "resumed from memory, in the records that later restarts have left": self.resumed(
                memory=True
            ),
            "resumed from disk, the same": self.resumed(memory=False),
            "minutes of harm": f"{seconds / 60:.1f}",
            "steps in the state after them": reached,
            "**goodput in them**": f"**{100 * reached * step_seconds / seconds:.1f} %**"
            if seconds
            else "",
        }

    def is_equal(self, wanted):
        return (
            not self.problem
            and set(self.runs[-1].hashes) == wanted
            and len(self.runs[-1].hashes) == sum(PROCESSES)
        )


def trained(how, folder, steps, pause=0.0, harm=lambda launcher, run: None, seconds=600.0, more=()):
    """A run of two processes that are restarted as often as it takes."""
    words = [*how, "--max-restarts", 10_000, "--stall", "step=6,save=20,compile=120"]
    job = [
        JOB,
        "--folder",
        folder,
        "--steps",
        steps,
        "--every",
        EVERY,
        "--pause",
        pause,
        "--at",
        -1,
        *more,
    ]
    return launch(*words, *job, seconds=seconds, meanwhile=harm)


def report(arms, wanted, steps, options, began):
    """The table, with a column for each arm."""
    step_seconds = statistics.median(
        [seconds for arm in arms.values() for seconds in arm.step_seconds()] or [PAUSE]
    )
    columns = [arm.rows(wanted, steps, step_seconds) for arm in arms.values()]
    table = "\n".join(
        f"| {name} | {' | '.join(str(column[name]) for column in columns)} |" for name in columns[0]
    )
    chosen = (
        ["--compare"]
        if options.compare
        else []
        if options.memory_every is None
        else ["--memory-every", options.memory_every]
    )
    command = " ".join(
        map(
            str,
            (
                "python tests/distributed/soak.py --minutes",
                f"{options.minutes:g}",
                "--seed",
                options.seed,
                *chosen,
            ),
        )
    )
    minutes = (time.monotonic() - began) / 60
    where = (
        f"{datetime.date.today()}, {os.cpu_count()} cores of {platform.machine()}, jax "
        f"{jax.__version__}, no GPU"
    )
    lines = [
        "# A soak",
        "",
        f"`{command}`, {where}: 2 hosts with a process of 2 CPU devices each, `fsdp_bf16`, error "
        "feedback.",
        "",
        "Goodput is the time that the steps in the state take without faults "
        f"({1000 * step_seconds:.0f} ms each) as a share of",
        f"the time with faults. {'Both ran at the same time. ' if len(arms) > 1 else ''}All took "
        f"{minutes:.1f} minutes.",
        "",
        f"| | {' | '.join(arms)} |",
        f"|---|{'---|' * len(arms)}",
        table,
    ]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--memory-every", type=int, help="steps between two checkpoints in memory")
    parser.add_argument(
        "--compare",
        action="store_true",
        help="without and with checkpoints in memory and kept programs, side by side",
    )
    options = parser.parse_args()
    # the rest are restarts, and steps made again
    began, steps = time.monotonic(), max(200, round(0.4 * options.minutes * 60 / PAUSE))
    arms = {"": Arm(options.memory_every, cache=True)}
    if options.compare:
        arms = {
            "disk only": Arm(None, cache=False),
            "memory and kept programs": Arm(options.memory_every or MEMORY_EVERY, cache=True),
        }
    with tempfile.TemporaryDirectory() as place:
        undisturbed = trained(
            ["--processes", 2, "--simulate", 2], Path(place) / "undisturbed", steps, seconds=1800
        )
        wanted = set(undisturbed.hashes)
        if undisturbed.code or len(wanted) != 1:
            sys.exit(
                f"the undisturbed run ended with {undisturbed.code}:\n{undisturbed.text[-3000:]}"
            )
        threads = []
        for number, arm in enumerate(arms.values()):
            (Path(place) / str(number)).mkdir()
            threads.append(
                threading.Thread(target=arm.train, args=(Path(place) / str(number), options, steps))
            )
            threads[-1].start()
        for thread in threads:
            thread.join()
    if problems := [arm.problem for arm in arms.values() if arm.problem]:
        sys.exit("\n".join(problems))
    text = report(arms, wanted, steps, options, began)
    print(text)
    if options.out:
        options.out.write_text(text)
    sys.exit(0 if all(arm.is_equal(wanted) for arm in arms.values()) else 1)


if __name__ == "__main__":
    threading.excepthook = lambda reported: (sys.__excepthook__(*reported[:3]), os._exit(1))
    os.chdir(ROOT)
    main()
