"""What several processes cost: two of one device against one of two devices and PyTorch's DDP, the
watchdog, and saves.

    python benchmarks/processes.py  # all sections; writes benchmarks/results/processes.md
    python benchmarks/processes.py --only steps --rounds 3

An arm is a group of processes that stay alive. In each round every group in turn runs one chunk of
steps while all others wait for a word on a pipe, their watchdogs paused too; ratios are medians
over rounds of the ratio within a round, with quartiles. Two cores are used: one for each process of
two, both for a process that is alone. The watchdog is measured in the same processes, a chunk with
its threads and a chunk without. `spmd.fit` runs with metrics and progress on; the loop of PyTorch
has neither. Where torch is not installed, that arm is left out: `pip install --no-deps --target
FOLDER torch filelock typing-extensions sympy mpmath networkx jinja2 MarkupSafe fsspec`, the CPU
build of it, and FOLDER on PYTHONPATH.
"""

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import reported
from model_parallel import BATCH, RATE, images, make_cnn

CHUNK, RUN = 16, 1000  # steps of a turn; steps of the run over which is spread what is done once
EVERY = 20  # steps from one save to the next


class Turn:
    """One process's turns in the rounds: sends the result of the last turn to the parent, and waits
    for the word that starts the next.
    """

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # whatever a library prints goes elsewhere

    def wait(self, **results: Any) -> str:
        print(json.dumps(results), file=self._out, flush=True)
        word = sys.stdin.readline().strip()
        if not word:
            os._exit(0)
        return word


# the arms -----------------------------------------------------------------------------------------


def train(
    layout: str, *, width: int = 1024, checkpoint: Any = None, callbacks: tuple[Any, ...] = ()
) -> None:
    import optax

    import spmd

    model, data = (lambda: make_cnn(fast=True)), images()
    if width != 1024:
        model, data = (
            (lambda: make_mlp(width)),
            {**data, "x": data["x"].reshape(len(data["x"]), -1)},
        )
    spmd.fit(
        model,
        data,
        loss=spmd.losses.cross_entropy,
        optimizer=optax.adam(RATE),
        mesh="data=2",
        layout=layout,
        batch_size=BATCH,
        steps=10**7,
        metrics={"accuracy": spmd.metrics.accuracy},
        checkpoint=checkpoint,
        callbacks=callbacks,
        progress=True,
    )


def make_mlp(width: int) -> Any:
    from flax import nnx

    rngs = nnx.Rngs(0)
    return nnx.Sequential(
        nnx.Linear(784, width, rngs=rngs),
        nnx.relu,
        nnx.Linear(width, width, rngs=rngs),
        nnx.relu,
        nnx.Linear(width, 10, rngs=rngs),
    )


def steps_of_fit(turn: Turn) -> None:
    """Turns of steps, the guard's threads as the word says; between them it rests."""
    import spmd
    from spmd import api

    def lower(program: Any, *_: Any) -> None:  # which a process that is alone does as well
        program.text(), program.placed.states.init_facts()

    once = {
        "consistency": timed(api, "check_processes_agree", lower),
        "replicas": timed(api, "check_replicas"),
    }
    watched = Watched()
    began = [time.perf_counter()]

    def rest(info: Any) -> None:
        took = time.perf_counter() - began[0]
        cpu = watched.off()
        word = turn.wait(
            seconds=took, guard=cpu, once={name: sum(times) for name, times in once.items()}
        )
        if word == "guarded":
            watched.on()
        began[0] = time.perf_counter()

    train("data_parallel", callbacks=(spmd.callbacks.Each(rest, every=CHUNK),))


class Watched:
    """The guard's threads, ended and begun again; alone there is none. Its switches are no business
    of users, so they are not public.
    """

    def __init__(self) -> None:
        from spmd.distributed import watchdog

        self._guard: Any = watchdog.current()
        self._is_cluster = isinstance(self._guard, watchdog.ClusterWatchdog)

    def off(self) -> float:
        """End them; seconds of CPU that they took."""
        if not self._is_cluster or not all(thread.is_alive() for thread in self._guard._threads):
            return 0.0
        spent = sum(
            time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
            for thread in self._guard._threads
        )
        self._guard._finished.set()
        for thread in self._guard._threads:
            thread.join()
        return spent

    def on(self) -> None:
        if self._is_cluster:
            self._guard._finished.clear()
            targets = (self._guard._poll, self._guard._check_stall)
            self._guard._threads = [
                threading.Thread(target=target, name="spmd watchdog", daemon=True)
                for target in targets
            ]
            for thread in self._guard._threads:
                thread.start()


def timed(owner: Any, name: str, before: Callable[..., object] = lambda *args: None) -> list[float]:
    """Seconds of every call of a function, from when all processes come to it and the arrays that
    it is given are there, after `before`.
    """
    import jax

    from spmd.distributed.consistency import first_nonempty

    function, times = getattr(owner, name), []

    def measured(*args: Any, **options: Any) -> Any:
        before(*args)
        jax.block_until_ready(
            [leaf for leaf in jax.tree.leaves(args) if isinstance(leaf, jax.Array)]
        )
        first_nonempty("")
        since = time.perf_counter()
        try:
            return function(*args, **options)
        finally:
            times.append(time.perf_counter() - since)

    setattr(owner, name, measured)
    return times


def steps_of_ddp(turn: Turn) -> None:
    """PyTorch's DistributedDataParallel over Gloo: the same network, each process half of each
    batch, one thread on its core.
    """
    import numpy as np
    import torch
    from torch import distributed, nn

    torch.set_num_threads(1)
    rank, data, random = int(os.environ["RANK"]), images(), np.random.default_rng(1)
    distributed.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(
            nn.Conv2d(1, 32, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(7 * 7 * 64, 1024),
            nn.ReLU(),
            nn.Linear(1024, 10),
        )
    )
    optimizer, loss, count = torch.optim.Adam(model.parameters(), RATE), nn.CrossEntropyLoss(), 0
    since = time.perf_counter()
    while True:
        order = random.permutation(len(data["y"]))
        for first in range(0, len(order), BATCH):
            index = order[first : first + BATCH][rank * BATCH // 2 : (rank + 1) * BATCH // 2]
            x, y = torch.from_numpy(data["x"][index]), torch.from_numpy(data["y"][index])
            optimizer.zero_grad()
            loss(model(x.permute(0, 3, 1, 2)), y.long()).backward()
            optimizer.step()
            count += 1
            if count % CHUNK == 0:
                turn.wait(seconds=time.perf_counter() - since)
                since = time.perf_counter()


def saves(turn: Turn, width: int) -> None:
    """A save every `EVERY` steps; half way between two, when it is on disk, the same bytes are
    written and synced by hand.

    The loop stands still in `Store.save`; in `Store.copy` only if the devices are done with the
    step when it returns. What devices take to copy is measured separately.
    """
    import jax
    import numpy as np

    import spmd
    from spmd.run.checkpoint import CheckpointStore
    from spmd.run.device_snapshot import StateCopier

    blocked, stores, copiers = {}, [], []
    opened, copied, saved = CheckpointStore.__init__, CheckpointStore.copy, CheckpointStore.save

    def copy(self: Any, state: Any, step: int) -> None:
        since = time.perf_counter()
        copied(self, state, step)
        blocked.setdefault(step, (time.perf_counter() - since) * state.step.is_ready())

    def save(self: Any, state: Any, step: int, *more: Any) -> bool:
        before, since = blocked.get(step, 0.0), time.perf_counter()
        done = saved(self, state, step, *more)
        blocked[step] = before + time.perf_counter() - since
        return done

    CheckpointStore.copy, CheckpointStore.save = copy, save

    def open_store(self: Any, config: Any) -> None:
        opened(self, config)
        stores.append(self)

    CheckpointStore.__init__ = open_store
    folder = Path(os.environ["BENCH_FOLDER"])

    def between(info: Any) -> None:
        if info.step % EVERY == 0:
            return
        stores[-1].wait()
        size = sum(
            shard.data.nbytes
            for leaf in jax.tree.leaves(info.state)
            for shard in leaf.addressable_shards
            if shard.replica_id == 0
        )
        values = np.random.default_rng(0).bytes(size)
        since = time.perf_counter()
        with open(folder / f"plain{jax.process_index()}", "wb") as file:
            file.write(values)
            file.flush()
            os.fsync(file.fileno())
        took = time.perf_counter() - since
        copiers or copiers.append(StateCopier(info.state))
        since = time.perf_counter()
        jax.block_until_ready(copiers[0](info.state))
        turn.wait(
            blocked=blocked.get(info.step - EVERY // 2),
            write=took,
            copy=time.perf_counter() - since,
            bytes=size,
        )

    every = spmd.callbacks.Each(between, every=EVERY // 2)
    train(
        "fsdp",
        width=width,
        checkpoint=spmd.Checkpoint(folder / "run", every=EVERY, keep=1),
        callbacks=(every,),
    )


# the parent ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Arm:
    """`processes` of `devices` CPU devices each run `main(turn)` for ever; an arm whose module
    `needs` is not installed is left out.

    `often`: saves of a round; what takes one or two milliseconds scatters more.
    """

    main: Callable[[Turn], None]
    processes: int
    devices: int
    why: str
    needs: str = "jax"
    often: int = 1


STEPS = {
    "two processes": Arm(steps_of_fit, 2, 1, "spmd.fit, data_parallel, Gloo between them"),
    "one process": Arm(steps_of_fit, 1, 2, "the same script, two devices"),
    "torch DDP": Arm(steps_of_ddp, 2, 1, "PyTorch, eager, Gloo between them", "torch"),
}
SAVES = {
    "save, CNN": Arm(
        lambda turn: saves(turn, 1024),
        2,
        1,
        "spmd.fit, fsdp: each process writes its half",
        often=5,
    ),
    "save, MLP of 4096": Arm(lambda turn: saves(turn, 4096), 2, 1, "the same, a larger state"),
}
ARMS = {**STEPS, **SAVES}


class Group:
    """The processes of an arm, each held to its share of two cores; ended by their own ids at the
    end of the block.
    """

    def __init__(self, name: str, folder: str):
        from spmd.distributed.world import free_port

        arm = ARMS[name]
        port = free_port("127.0.0.1")
        shared = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "passive",
            "BENCH_FOLDER": folder,
        }
        shared |= {
            "SPMD_PROCESSES": f"{arm.processes}",
            "SPMD_COORDINATOR": f"127.0.0.1:{port}",
            "SPMD_TOKEN": secrets.token_hex(16),
        }
        # who waits for its turn makes no progress
        shared |= {"SPMD_STALL": "compile=inf,step=inf,save=inf"}
        shared |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": f"{port}",
            "WORLD_SIZE": f"{arm.processes}",
        }
        pipes: dict[str, Any] = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.DEVNULL,
            "text": True,
        }
        command = [sys.executable, __file__, "--arm", name]
        environments = [
            {**shared, "SPMD_PROCESS": f"{rank}", "RANK": f"{rank}"}
            for rank in range(arm.processes)
        ]
        self.name = name
        self.jobs = [
            subprocess.Popen([*command, str(rank)], env=variables, **pipes)
            for rank, variables in enumerate(environments)
        ]

    def __enter__(self) -> "Group":
        return self

    def __exit__(self, *_: object) -> None:
        for job in self.jobs:
            job.kill()
            job.wait()

    def read(self) -> list[dict[str, Any]]:
        """What each process came to."""
        lines = [job.stdout.readline() for job in self.jobs]  # type: ignore[union-attr]
        if not all(lines):
            raise SystemExit(f"a process of {self.name} ended early")
        return [json.loads(line) for line in lines]

    def turn(self, word: str = "go") -> list[dict[str, Any]]:
        for job in self.jobs:
            job.stdin.write(f"{word}\n")  # type: ignore[union-attr]
            job.stdin.flush()  # type: ignore[union-attr]
        return self.read()


def arm_main(name: str, rank: int) -> None:
    arm, cores = ARMS[name], sorted(os.sched_getaffinity(0))[:2]
    os.sched_setaffinity(0, cores[rank::2] if arm.processes == 2 else cores)
    turn = Turn()
    if arm.needs == "jax":
        import jax

        import spmd

        jax.config.update("jax_num_cpu_devices", arm.devices)
        spmd.join()
    arm.main(turn)


def spread(values: list[float]) -> str:
    """The median, and between which values half of them are."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def steps_report(rounds: int) -> list[str]:
    arms = {name: arm for name, arm in STEPS.items() if importlib.util.find_spec(arm.needs)}
    turns = [
        (name, word)
        for name in arms
        for word in (("guarded", "bare") if name == "two processes" else ("go",))
    ]
    step_seconds: dict[tuple[str, str], list[float]] = {turn: [] for turn in turns}
    groups, cpu, once = {}, [], {}
    try:
        for name in arms:  # one after the other: each has both cores while it compiles
            groups[name] = Group(name, "")
            reports = groups[name].read()
            once[name] = {
                key: max(report["once"][key] for report in reports)
                for key in reports[0].get("once", {})
            }
        for number in range(rounds + 1):
            for name, word in turns if number % 2 else reversed(turns):
                reports = groups[name].turn(word)
                if number:  # the first round warms up
                    step_seconds[name, word].append(
                        max(report["seconds"] for report in reports) / CHUNK
                    )
                    cpu += [
                        report["guard"] / report["seconds"]
                        for report in reports
                        if word == "guarded"
                    ]
    finally:
        for group in groups.values():
            group.__exit__()
    return steps_lines(rounds, arms, step_seconds, cpu, once["two processes"])


def steps_lines(
    rounds: int,
    arms: dict[str, Arm],
    step_seconds: dict[tuple[str, str], list[float]],
    cpu: list[float],
    once: dict[str, float],
) -> list[str]:
    lines = [
        f"### steps: MNIST-sized CNN of `model_parallel.py`, batch {BATCH}, Adam, host data every "
        "step",
        "",
    ]
    lines += [
        f"{rounds} rounds of {CHUNK} steps per arm.",
        "",
        "| arm | | median ms/step | best | steps/s |",
        "|---|---|---|---|---|",
    ]
    for (name, word), times in step_seconds.items():
        middle, description = (
            statistics.median(times),
            arms[name].why + (", without the guard's threads" if word == "bare" else ""),
        )
        lines.append(
            f"| {name} | {description} | {middle * 1e3:.1f} | {min(times) * 1e3:.1f} | "
            f"{1 / middle:.2f} |"
        )
    ours, bare = ("two processes", "guarded"), ("two processes", "bare")

    def ratio(top: tuple[str, str], bottom: tuple[str, str]) -> str:
        return spread([a / b for a, b in zip(step_seconds[top], step_seconds[bottom], strict=True)])

    lines += ["", "| time per step | median (quartiles) |", "|---|---|"]
    for other in step_seconds:
        if other not in (ours, bare):
            lines.append(f"| {ours[0]} / {other[0]} | {ratio(ours, other)} |")
    lines += [f"| with the watchdog's threads / without | {ratio(ours, bare)} |", ""]
    step = statistics.median(step_seconds[bare])
    share = [statistics.median(cpu), *(seconds / (RUN * step) for seconds in once.values())]
    agree, replicas = once.values()
    verdict = "ok" if sum(share) < 0.01 else "MISSED"
    once_costs = (
        f"handshake {agree:.2f} s and replica check {replicas:.2f} s, once, compiling included: "
        f"{share[1]:.3%} and {share[2]:.3%} of"
    )
    missing = [
        f"{name} ({arm.needs} is not installed)" for name, arm in STEPS.items() if name not in arms
    ]
    return [
        *lines,
        f"The watchdog's threads take {share[0]:.3%} of a core's time in each process; "
        f"{once_costs} a run of {RUN} steps.",
        f"Together {sum(share):.2%}; target 1 %: {verdict}.",
        "",
        *([f"Left out: {', '.join(missing)}.", ""] if missing else []),
    ]


def saves_report(rounds: int) -> list[str]:
    lines = ["### saves: how long `fit` blocks for one, by how long its bytes take to write", ""]
    lines += [
        f"{rounds} saves, of the small state five times as many, every {EVERY} steps; between two, "
        "the same number of bytes in a file per",
        "process, with fsync, on the same disk. `fit` blocks where the devices are done with a "
        "step and the host is still busy with its",
        "save. Between two steps the devices copy the state; here they are the cores that all else "
        "runs on, and memory limits them.",
        "",
    ]
    lines += [
        "| arm | | MB per process | blocked, ms | plain write, ms | ratio, median (quartiles) | "
        "target 0.10 | devices copy, ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, arm in SAVES.items():
        with (
            tempfile.TemporaryDirectory(dir=Path(__file__).parent) as folder,
            Group(name, folder) as group,
        ):
            group.read()  # before the first save
            group.turn(), group.turn()  # the first two saves open and compile what the others find
            turns = [group.turn() for _ in range(rounds * arm.often)]
        worst = {
            key: [max(report[key] for report in reports) for reports in turns]
            for key in turns[0][0]
        }
        ratios = [a / b for a, b in zip(worst["blocked"], worst["write"], strict=True)]
        size, middle = (
            worst["bytes"][0] / 2**20,
            {key: statistics.median(values) * 1e3 for key, values in worst.items()},
        )
        verdict = "ok" if statistics.median(ratios) < 0.10 else "MISSED"
        columns = [
            name,
            arm.why,
            f"{size:.1f}",
            f"{middle['blocked']:.2f}",
            f"{middle['write']:.1f}",
            spread(ratios),
            verdict,
        ]
        lines.append(f"| {' | '.join(columns)} | {middle['copy']:.1f} |")
    return [*lines, ""]


SECTIONS = {"steps": steps_report, "saves": saves_report}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arm", nargs=2, metavar=("ARM", "RANK"), help=argparse.SUPPRESS)
    parser.add_argument("--only", help="sections, by comma: " + ", ".join(SECTIONS))
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    if options.arm:
        return arm_main(options.arm[0], int(options.arm[1]))
    lines = reported.print_sections(
        SECTIONS[name](options.rounds)
        for name in (options.only.split(",") if options.only else SECTIONS)
    )
    if not options.only:
        packages = (
            "jax",
            "flax",
            "optax",
            *(["torch"] if importlib.util.find_spec("torch") else []),
        )
        command = f"python benchmarks/processes.py --rounds {options.rounds}"
        reported.write(
            "processes", [*reported.head("Several processes", command, *packages), *lines]
        )


if __name__ == "__main__":
    main()
