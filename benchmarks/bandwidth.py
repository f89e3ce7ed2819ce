"""Steps per second of two real processes as the link between them narrows, by codec.

    # 7 minutes; writes benchmarks/results/bandwidth.md; Linux: unshare, ip, tc
    JAX_PLATFORMS=cpu python benchmarks/bandwidth.py

Two processes of one device each, joined by `jax.distributed`, exchange gradients by gloo over TCP.
`tc` limits the rate of the link with token buckets. There are two kinds of link. duplex: each
process has its own private network namespace, a veth pair connects them, and each direction has the
full rate. shared: both processes use the `lo` of one private network namespace, and both directions
share the rate. The namespaces belong to a private user namespace: no privilege on the host is
needed, the host's network does not change, and the namespaces disappear with the processes.

The model is an MLP of wide layers and few rows, so that communication dominates, with SGD. Every
arm is a pair of processes that stays alive; in each round every arm in turn runs one chunk of steps
while the others wait. Ratios are medians over rounds of the ratio within a round. Bytes on the link
are the kernel's own count of what one process sends (headers and acknowledgements with it); bytes
by the log are those of `trainer.wire`. The rest is the time per step for which the link has nothing
to carry: arithmetic, the codecs' own included, and directions that wait for each other.
"""

import argparse
import dataclasses
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import time

import reported

WIDTHS = (256, 2048, 2048, 2048, 16)
BATCH = 8
ARMS = {
    "exact": {},
    "bfloat16": {"codec": "bfloat16"},
    "int8 + feedback": {"codec": "int8", "error_feedback": True},
    "power_sgd 4 + feedback": {
        "codec": "power_sgd",
        "options": {"rank": 4},
        "error_feedback": True,
    },
}
TARGETS = {"bfloat16": 1.7, "int8 + feedback": 3.0}
RATES = {"duplex": (None, 1000, 200, 50), "shared": (1000, 200, 50)}  # Mbit/s
# communication dominates where the exact arm keeps the link busy for this share of its time
DOMINATES = 0.8
ENDS = (("spmd0", "10.231.0.1"), ("spmd1", "10.231.0.2"))
PORTS = {"duplex": 20000, "shared": 21000}
COLLECTIVE = 20 * 2**20  # bytes
LIMIT = 3000  # seconds until the whole run is ended


# one process of an arm: runs the requested number of steps, reports the time, waits ---------------


def join(rank: int, port: int):
    """Where to answer, once both processes are there."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes elsewhere
    import jax

    address = f"{ENDS[0][1]}:{port}"
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(
        address, 2, rank, coordinator_bind_address=address, initialization_timeout=120
    )
    return out


def serve(out, ready: dict, answer) -> None:
    """One line out for each line in."""
    print(json.dumps(ready), file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(line.strip())), file=out, flush=True)
    os._exit(0)  # without the goodbyes of jax.distributed: the other one may be gone


def collectives_main(rank: int, port: int) -> None:
    """Seconds of one collective of 10 MB sent per process."""
    out = join(rank, port)
    import jax
    import numpy as np
    from jax import lax
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    mesh, spec = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,)), PartitionSpec("data")
    calls = {
        "all_reduce": (1, lambda x: lax.psum(x, "data")),
        "reduce_scatter": (
            2,
            lambda x: lax.psum_scatter(x, "data", scatter_dimension=0, tiled=True),
        ),
        "all_to_all": (2, lambda x: lax.all_to_all(x, "data", 0, 0, tiled=True)),
        "all_gather": (1, lambda x: lax.all_gather(x, "data", axis=0, tiled=True)),
    }
    ready = {}
    for name, (rows, call) in calls.items():
        each = jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        array = jax.make_array_from_process_local_data(
            NamedSharding(mesh, spec), np.ones((rows, COLLECTIVE // 4), np.float32)
        )
        ready[name] = jax.jit(each), array
        jax.block_until_ready(ready[name][0](array))

    def answer(name: str) -> dict:
        run, array = ready[name]
        started = time.perf_counter()
        jax.block_until_ready(run(array))
        return {"seconds": time.perf_counter() - started}

    serve(out, {"names": list(calls)}, answer)


def worker_main(arm: str, rank: int, port: int) -> None:
    out = join(rank, port)
    import jax
    import numpy as np
    import optax
    from flax import nnx

    import spmd

    class MLP(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List(
                [nnx.Linear(a, b, use_bias=False, rngs=rngs) for a, b in itertools.pairwise(WIDTHS)]
            )

        def __call__(self, x):
            for layer in self.layers[:-1]:
                x = nnx.relu(layer(x))
            return self.layers[-1](x)

    layout = dataclasses.replace(
        spmd.Layout.load("data_parallel"), gradients=spmd.Gradients("all_reduce", **ARMS[arm])
    )
    trainer = spmd.Trainer(
        lambda: MLP(nnx.Rngs(0)),
        loss=spmd.losses.cross_entropy,
        optimizer=optax.sgd(0.01),
        mesh={"data": 2},
        layout=layout,
    )
    state, random = trainer.init(), np.random.default_rng(rank)
    batch = trainer.place(
        {
            "x": random.normal(size=(BATCH, WIDTHS[0])).astype("float32"),
            "y": random.integers(0, WIDTHS[-1], BATCH).astype("int32"),
        }
    )
    state, metrics = trainer.step(state, batch)  # compiles
    metrics.wait()

    def answer(count: str) -> dict:
        nonlocal state
        started = time.perf_counter()
        for _ in range(int(count)):
            state, metrics = trainer.step(state, batch)
        jax.block_until_ready(state.params)
        return {"seconds": time.perf_counter() - started, "loss": metrics["loss"]}

    serve(
        out,
        {
            "sent": trainer.wire.bytes(),
            "reduce_gradients": trainer.wire.bytes(where="reduce_gradients"),
        },
        answer,
    )


# the link: everything below runs as root of a private user namespace ------------------------------


class Link:
    """What joins the two ends. Rank 1's namespaces are those of a sleeping child."""

    def __init__(self, kind: str):
        self._shared = kind == "shared"
        namespaces = ("--uts",) if self._shared else ("--uts", "--net")
        self._holder = subprocess.Popen(["unshare", *namespaces, "sleep", str(LIMIT)])
        until = time.monotonic() + 10
        while self._space(self._holder.pid) == self._space("self"):  # until it has left
            if self._holder.poll() is not None or time.monotonic() > until:
                raise SystemExit("bandwidth: no second namespace")
            time.sleep(0.02)
        if not self._shared:
            (near, _), (far, _) = ENDS
            run("ip", "link", "add", near, "type", "veth", "peer", "name", far)
            run("ip", "link", "set", far, "netns", str(self._holder.pid))
        self._devices = ["lo", "lo"] if self._shared else [name for name, _ in ENDS]
        for rank, (_, address) in enumerate(ENDS):
            # gloo publishes what the host's name resolves to, and an address resolves to itself
            run(*self.inside(rank), "hostname", address)
            run(*self.inside(rank), "ip", "link", "set", "lo", "mtu", "1500", "up")
            run(
                *self.inside(rank),
                "ip",
                "address",
                "add",
                f"{address}/30",
                "dev",
                self._devices[rank],
            )
            run(*self.inside(rank), "ip", "link", "set", self._devices[rank], "up")

    @staticmethod
    def _space(pid: int | str) -> str:
        return os.readlink(f"/proc/{pid}/ns/uts")

    def inside(self, rank: int) -> list[str]:
        """The start of a command that runs at one end."""
        spaces = ["--uts"] if self._shared else ["--uts", "--net"]
        return ["nsenter", "--target", str(self._holder.pid), *spaces] if rank else []

    def throttle(self, megabits: float | None) -> None:
        """From now on: each direction, or both together."""
        for rank in range(1 if self._shared else 2):
            name = self._devices[rank]
            subprocess.run(
                [*self.inside(rank), "tc", "qdisc", "delete", "dev", name, "root"],
                capture_output=True,
            )
            if megabits:
                shape = ("tbf", "rate", f"{megabits}mbit", "burst", "256kb", "latency", "100ms")
                run(*self.inside(rank), "tc", "qdisc", "add", "dev", name, "root", *shape)

    def carried(self) -> float:
        """Bytes that one process has sent so far: rank 0, or the mean of both where they share the
        link.
        """
        sent = json.loads(run("ip", "-statistics", "-json", "link", "show", self._devices[0]))[0][
            "stats64"
        ]["tx"]["bytes"]
        return sent / 2 if self._shared else sent

    def close(self) -> None:
        self._holder.kill()
        self._holder.wait()
        if self._shared:  # `lo` outlives this link
            self.throttle(None)
            subprocess.run(["ip", "address", "flush", "dev", "lo"], capture_output=True)
        else:
            subprocess.run(["ip", "link", "delete", self._devices[0]], capture_output=True)


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"bandwidth: {' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


class Pair:
    """The two processes of an arm, or those that call collectives."""

    def __init__(self, arm: str, port: int, link: Link):
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "",
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }
        command = [sys.executable, __file__, "--worker", arm]
        self._jobs = [
            subprocess.Popen(
                [*link.inside(rank), *command, str(rank), str(port)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=None if os.environ.get("BANDWIDTH_VERBOSE") else subprocess.DEVNULL,
                text=True,
                env=environment,
            )
            for rank in range(2)
        ]
        self._arm = arm

    def answer(self) -> list[dict]:
        lines = [job.stdout.readline() for job in self._jobs]
        if not all(lines):
            raise SystemExit(f"bandwidth: arm {self._arm} ended early")
        return [json.loads(line) for line in lines]

    def seconds(self, command: int | str) -> float:
        """Of the slower process."""
        for job in self._jobs:
            job.stdin.write(f"{command}\n")
            job.stdin.flush()
        return max(answer["seconds"] for answer in self.answer())

    def close(self) -> None:
        for job in self._jobs:
            job.kill()
            job.wait()


def steps_for(megabits: float | None, gradient_bytes: int) -> int:
    """About three seconds of steps."""
    return max(1, min(20, round(3 / (0.1 + (gradient_bytes * 8e-6 / megabits if megabits else 0)))))


def named(rate: float | None) -> str:
    return (
        "unthrottled"
        if rate is None
        else f"{rate / 1000:g} Gbit/s"
        if rate >= 1000
        else f"{rate:g} Mbit/s"
    )


def collectives_report(kind: str, rate: float, rounds: int) -> list[str]:
    """How long gloo takes for each collective, as a multiple of what the link needs for one
    process's bytes.
    """
    link, pair = Link(kind), None
    try:
        pair = Pair("collectives", PORTS[kind] + 100, link)
        names = pair.answer()[0]["names"]
        link.throttle(rate)
        lines = [
            f"| collective, {kind} link of {named(rate)} | MB sent per process | s | s if both "
            "directions were busy all the time | ratio |",
            "|---|---|---|---|---|",
        ]
        for name in names:
            times, carried = [], []
            for _ in range(rounds):
                before = link.carried()
                times.append(pair.seconds(name))
                carried.append(link.carried() - before)
            sent, took = statistics.median(carried), statistics.median(times)
            ideal = sent * 8e-6 / rate
            lines.append(
                f"| {name} | {sent / 1e6:.1f} | {took:.3f} | {ideal:.3f} | {took / ideal:.2f} |"
            )
        return lines
    finally:
        if pair:
            pair.close()
        link.close()


def measure(kind: str, rates: tuple[float | None, ...], rounds: int) -> list[str]:
    """Every arm at every rate, as a table."""
    link, pairs = Link(kind), {}
    try:
        for number, arm in enumerate(ARMS):
            pairs[arm] = Pair(arm, PORTS[kind] + number, link)
        logs = {arm: pair.answer()[0] for arm, pair in pairs.items()}
        header = (
            "rate",
            "arm",
            "steps/s",
            "s/step",
            "against exact",
            "target",
            "MB by the log",
            "MB on the link",
            "link busy",
            "rest, s",
        )
        lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
        print("\n".join([kind, *lines]), flush=True)
        rows_of = {}
        for rate in reversed(rates):
            link.throttle(rate)
            times, carried = {arm: [] for arm in ARMS}, {arm: [] for arm in ARMS}
            for turn in range(rounds + 1):
                for arm in ARMS if turn % 2 else reversed(ARMS):
                    # the first round warms up
                    count = steps_for(rate, logs[arm]["reduce_gradients"]) if turn else 1
                    before, seconds = link.carried(), pairs[arm].seconds(count)
                    if turn:
                        times[arm].append(seconds / count)
                        carried[arm].append((link.carried() - before) / count)
            sizes = {arm: statistics.median(each) for arm, each in carried.items()}
            rows_of[rate] = table_rows(rate, times, sizes, logs, 2 if kind == "shared" else 1)
            print("\n".join(rows_of[rate]), flush=True)
        return lines + [row for rate in rates for row in rows_of[rate]]
    finally:
        for pair in pairs.values():
            pair.close()
        link.close()


def table_rows(
    rate: float | None, times: dict, carried: dict, logs: dict, directions: int
) -> list[str]:
    rows = []
    busy = {
        arm: directions * carried[arm] * 8e-6 / rate / statistics.median(times[arm])
        if rate
        else None
        for arm in ARMS
    }
    for arm in ARMS:
        middle = statistics.median(times[arm])
        ratio = statistics.median(a / b for a, b in zip(times["exact"], times[arm], strict=True))
        target = TARGETS.get(arm) if rate and busy["exact"] >= DOMINATES else None
        cells = (
            named(rate),
            arm,
            f"{1 / middle:.3f}",
            f"{middle:.3f}",
            f"{ratio:.2f}",
            f"{target} {'ok' if ratio >= target else 'MISSED'}" if target else "",
            f"{logs[arm]['sent'] / 1e6:.2f}",
            f"{carried[arm] / 1e6:.2f}",
            f"{busy[arm]:.0%}" if rate else "",
            f"{middle * (1 - (busy[arm] or 0)):.3f}",
        )
        rows.append("| " + " | ".join(cells) + " |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--worker", nargs=3, metavar=("ARM", "RANK", "PORT"), help=argparse.SUPPRESS
    )
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument(
        "--only",
        help='such as "duplex=0,200" or "collectives=200": one part, at these Mbit/s (0: as fast '
        "as "
        "it goes); writes nothing",
    )
    options = parser.parse_args()
    if options.worker:
        arm, rank, port = options.worker
        return (
            collectives_main(int(rank), int(port))
            if arm == "collectives"
            else worker_main(arm, int(rank), int(port))
        )
    if not options.inside:
        command = [
            "unshare",
            "--map-root-user",
            "--net",
            "--uts",
            "--pid",
            "--mount-proc",
            "--kill-child",
            sys.executable,
            __file__,
        ]
        sys.exit(subprocess.run([*command, "--inside", *sys.argv[1:]], timeout=LIMIT).returncode)
    assert all(name == "lo" for _, name in socket.if_nameindex()), (
        "not in a network namespace of its own"
    )
    if options.only:
        kind, rates = options.only.split("=")
        wanted = tuple(float(rate) or None for rate in rates.split(","))
        lines = (
            collectives_report("duplex", wanted[0], options.rounds)
            if kind == "collectives"
            else measure(kind, wanted, options.rounds)
        )
        return print("\n".join(lines))
    load = [os.getloadavg()[0]]
    tables = {kind: measure(kind, rates, options.rounds) for kind, rates in RATES.items()}
    calls = collectives_report("duplex", 200, options.rounds)
    print("\n".join(calls))
    load.append(os.getloadavg()[0])

    count = sum(a * b for a, b in itertools.pairwise(WIDTHS))
    command = f"JAX_PLATFORMS=cpu python benchmarks/bandwidth.py --rounds {options.rounds}"
    lines = [
        *reported.head("Steps per second as the link narrows", command, "jax"),
        *__doc__.strip().split("\n\n", 2)[2].split("\n"),
        "",
        f"Widths {', '.join(map(str, WIDTHS))}: {count:,} parameters, {count * 4 / 1e6:.1f} MB as "
        f"float32; {BATCH} rows per process;",
        f"{options.rounds} rounds. MB are what one process sends per step. Target: where "
        "communication dominates (exact keeps the link",
        f"busy for at least {DOMINATES:.0%} of its time) bfloat16 1.7 times, int8 3 times the "
        "steps per second of exact.",
        "",
        f"Load average when it began and when it ended: {load[0]:.1f} and {load[1]:.1f}.",
        "",
        "### shared: both directions together have the rate",
        "",
        *tables["shared"],
        "",
        "### duplex: each direction has the rate",
        "",
        *tables["duplex"],
        "",
        "### What gloo makes of a duplex link",
        "",
        *calls,
        "",
        "The all-reduce of the exact arm goes in segments, both ways at once. An all-to-all of one "
        "large message per peer goes one way",
        "and then the other (the link's counters, read every 50 ms in a trial of this, showed one "
        "direction idle while the other was",
        "busy), an all-gather does so for a part of its time. The codecs' exchange consists of "
        "these two, so over gloo on a duplex link",
        "it has little more than half of the link, and what a codec saves is to be halved. Where "
        "both directions share the rate there",
        "is nothing to lose that way, and time follows bytes. This is gloo's transport; it says "
        "nothing of NCCL's.",
    ]
    reported.write("bandwidth", lines)


if __name__ == "__main__":
    main()
