"""A soak: two processes train while they are killed, stopped, asked to end and their checkpoints are damaged, at random, from a seed.

    python tests/distributed/soak.py --minutes 20 --seed 0 --out benchmarks/results/soak.md

With `--memory-every 5` checkpoints are also in memory, and before some of the same faults a piece there is damaged, or all are deleted.

In the end the state has the same hash as that of a run without faults, or this script ends with code 1.
"""

import argparse
import collections
import datetime
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import jax
from launched import JOB, ROOT, launch

PAUSE = 0.05  # seconds between two steps of the disturbed run, so that it lasts
EVERY = 20  # steps between two checkpoints
FAULTS = ("SIGKILL", "SIGKILL", "SIGSTOP", "SIGTERM", "a bit flipped", "a file cut off", "a file deleted")
MEMORY_FAULTS = (None, None, None, "a piece in memory damaged", "the memory deleted")


class Harm:
    """Does harm to a run, again and again, until its time is over."""

    def __init__(self, folder, seed, until, memory=None):
        self.random, self.folder, self.until = random.Random(seed), folder, until
        self.memory, self.memory_random = memory, random.Random(seed)  # another one, so that the other faults are the same with and without
        self.done, self.reported = collections.Counter(), []

    def __call__(self, launcher, run):
        """From the launcher's start to its end: a fault some seconds after training has made progress."""
        seen = 0
        while launcher.poll() is None and time.monotonic() < self.until:
            if len(steps := [at for at, line in run.lines if "STEP" in line]) == seen:
                time.sleep(0.05)
                continue
            seen, wait = len(steps), self.random.uniform(2.0, 15.0)
            until = time.monotonic() + wait
            while launcher.poll() is None and time.monotonic() < until:
                time.sleep(0.05)
            if launcher.poll() is None:
                self.harm(launcher, self.random.choice(FAULTS))

    def harm(self, launcher, fault):
        """One fault, of one of the processes; what is damaged is the newest checkpoint, and then one of them is killed."""
        words = ["pgrep", "-P", str(launcher.pid), "-f", "spmd.launch.runner"]
        victims = sorted(map(int, subprocess.run(words, capture_output=True, text=True, check=False).stdout.split()))
        if len(victims) < 2:
            return
        victim = self.random.choice(victims)
        if not fault.startswith("SIG") and not self.damage(fault):
            return
        if self.memory is not None and fault != "SIGTERM":
            self.damage_memory()
        try:
            os.kill(victim, getattr(signal, fault if fault.startswith("SIG") else "SIGKILL"))
        except ProcessLookupError:
            return
        self.done[fault] += 1
        print(f"soak: {fault}, process {victims.index(victim)}", flush=True)

    def damage_memory(self):
        """Sometimes damage the newest piece of a process in memory, or delete all."""
        fault = self.memory_random.choice(MEMORY_FAULTS)
        pieces = sorted((path for path in self.memory.rglob("*.[01]")), key=lambda path: int(path.name.partition(".")[0]))
        if fault is None or not pieces:
            return
        for path in pieces if fault == "the memory deleted" else pieces[-1:]:
            try:
                if fault == "the memory deleted":
                    path.unlink()
                else:
                    content = bytearray(path.read_bytes())
                    content[self.memory_random.randrange(len(content))] ^= 1 << self.memory_random.randrange(8)
                    path.write_bytes(content)
            except FileNotFoundError:  # a newer one has replaced it
                return
        self.done[fault] += 1

    def damage(self, fault):
        """Harm a file of the newest checkpoint; False where there is none."""
        steps = sorted(int(path.name) for path in (self.folder / "checkpoints").glob("*") if path.name.isdigit())
        files = (
            sorted(path for path in (self.folder / "checkpoints" / str(steps[-1])).rglob("*") if path.is_file()) if len(steps) > 1 else []
        )
        files = [path for path in files if path.stat().st_size and path.name not in ("commit_success.txt", "_CHECKPOINT_METADATA")]
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


def trained(folder, steps, pause=0.0, harm=lambda launcher, run: None, seconds=600.0, **options):
    """A run of two processes that are restarted as often as it takes."""
    words = ["--processes", 2, "--simulate", 2, "--max-restarts", 10_000, "--stall", "step=6,save=20,compile=120"]
    job = [JOB, "--folder", folder, "--steps", steps, "--every", EVERY, "--pause", pause, "--at", -1, *options.get("more", ())]
    return launch(*words, *job, seconds=seconds, meanwhile=harm, **options.get("environment", {}))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--memory-every", type=int, help="steps between two checkpoints in memory")
    options = parser.parse_args()
    began, steps = time.monotonic(), max(200, round(0.25 * options.minutes * 60 / PAUSE))  # the rest are restarts, and steps made again
    with tempfile.TemporaryDirectory() as place:
        undisturbed = trained(Path(place) / "undisturbed", steps, seconds=1800)
        wanted = set(undisturbed.hashes)
        if undisturbed.code or len(wanted) != 1:
            sys.exit(f"the undisturbed run ended with {undisturbed.code}:\n{undisturbed.text[-3000:]}")
        folder, runs, memory = Path(place) / "run", [], Path(place) / "memory"
        in_memory = () if options.memory_every is None else ("--memory-every", options.memory_every)
        harm = Harm(folder, options.seed, time.monotonic() + options.minutes * 60, memory if in_memory else None)
        limit = began + options.minutes * 60 * 3
        while not runs or not runs[-1].hashes:
            if time.monotonic() > limit:
                sys.exit(f"no end after {len(runs)} runs:\n{runs[-1].text[-3000:]}")
            more = ("--resume",) if (folder / "checkpoints").exists() else ()
            where = {"SPMD_MEMORY_FOLDER": str(memory)}
            left = max(60.0, limit - time.monotonic())
            runs.append(trained(folder, steps, PAUSE, harm, left, more=(*more, *in_memory), environment=where))
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        aside = len(list((folder / "damaged").glob("*"))) if (folder / "damaged").exists() else 0
    text = "\n".join(run.text for run in runs)
    equal = set(runs[-1].hashes) == wanted and len(runs[-1].hashes) == 2
    rows = [
        ("final state", f"{'equal' if equal else 'NOT EQUAL'}: {', '.join(sorted(hash for hash, _ in wanted | set(runs[-1].hashes)))}"),
        ("steps", steps),
        *((fault, count) for fault, count in sorted(harm.done.items())),
        ("restarts by the launcher", text.count("spmd launch: restart ")),
        ("launchers, one more for each SIGTERM that saved", len(runs)),
        ("damaged checkpoints put aside", aside),
        ("resumed from memory", sum(record.get("event") == "resumed" and "source" in record for record in records)),
        ("resumed from disk", sum(record.get("event") == "resumed" and "source" not in record for record in records)),
        ("goodput at the end", [record["goodput"] for record in records if "goodput" in record][-1]),
        ("minutes of harm", f"{options.minutes:g}"),
        ("minutes in all, with the undisturbed run", f"{(time.monotonic() - began) / 60:.1f}"),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    command = " ".join(map(str, ("python tests/distributed/soak.py --minutes", f"{options.minutes:g}", "--seed", options.seed, *in_memory)))
    where = f"{datetime.date.today()}, {os.cpu_count()} cores of {platform.machine()}, jax {jax.__version__}, no GPU"
    report = f"# A soak\n\n`{command}`, {where}: 2 processes of 2 CPU devices, `fsdp_bf16`, error feedback.\n\n| | |\n|---|---|\n{table}\n"
    print(report)
    if options.out:
        options.out.write_text(report)
    sys.exit(0 if equal else 1)


if __name__ == "__main__":
    threading.excepthook = lambda reported: os._exit(1)
    os.chdir(ROOT)
    main()
