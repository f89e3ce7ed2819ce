"""What the parts of the GPU benchmark share: results on disk as they come, arms that alternate, and
distances from a reference.
"""

import argparse
import contextlib
import ctypes
import dataclasses
import json
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROUNDS = 40  # at most, of each arm
LEAST = 3  # rounds, however little time is left
SHORT = 5e-3  # seconds: shorter calls are queued, and timed together
QUEUED = 10
RESULTS = "results.jsonl"  # of all parts: few files come back from a lent machine
PLANS = Path(__file__).with_name("plans.json")


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of one arm: the first call, which compiles, and those after the second."""

    first: float
    rest: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.rest)

    def to_json(self) -> dict[str, float]:
        """Seconds, and how many calls were measured."""
        low, high = min(self.rest), max(self.rest)
        return {
            "median": self.median,
            "low": low,
            "high": high,
            "calls": len(self.rest),
            "first": self.first,
        }


class Part:
    """One part of the benchmark, in a process of its own.

    Attributes:
      small: whether this is a rehearsal, with tiny shapes on a CPU.
      seconds: how long the part should take.
      out: the folder of the results.
    """

    def __init__(self, name: str, out: Path, seconds: float, small: bool):
        self.name, self.seconds, self.small, self.out = name, seconds, small, out
        self._ends = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds."""
        return self._ends - time.monotonic()

    def write(self, case: str, **facts: Any) -> None:
        """Append one result; it is on disk when this returns."""
        append(self.out, {"part": self.name, "case": case, **facts})

    def check(self, case: str, name: str, distance: float, bound: float) -> bool:
        """Write how far an output is from its reference; a wrong output is not timed."""
        right = bool(distance <= bound)  # NaN is not
        self.write(case, check=name, distance=float(distance), bound=bound, right=right)
        return right

    @contextlib.contextmanager
    def guarded(self, case: str, name: str) -> Iterator[None]:
        """Around what a peer needs or does: where it fails, the error is written, and the part
        continues.
        """
        try:
            yield
        except Exception as error:
            self.write(
                case, failed=name, error=f"{type(error).__name__}: {str(error).strip()[:500]}"
            )

    def alternate(
        self,
        case: str,
        arms: Mapping[str, Callable[[], Any]],
        share: float,
        plans: Mapping[str, str] | None = None,
        **facts: Any,
    ) -> dict[str, Any]:
        """Call the arms, write the times of each, and return them; the most informative arm comes
        first.

        Each arm is measured as soon as it has compiled, and written with those before it. Once all
        have compiled they take turns; the times of these rounds replace the first ones.

        Args:
          arms: each call returns when its work is done: nothing, or how many seconds count. An arm
            that fails is left out, and its error is written; so is an arm that would begin when the
            part's time is over.
          share: of the seconds that the part has left.
          plans: by arm, the case of plans.json that it is compared with.
          facts: written with the times.
        """
        ends, first, rounds = time.monotonic() + share * max(self.left, 0.0), {}, {}

        def write_times() -> dict[str, Any]:
            measured = {
                name: Times(first[name], tuple(rest)).to_json() for name, rest in rounds.items()
            }
            for name, of_arm in measured.items():
                arm = arms[name]
                if isinstance(arm, Arm) and (peak := arm.peak_bytes()):
                    of_arm["peak_bytes"] = peak
            about = card()  # the clocks are still those of the work
            planned_arms = {
                name: plan for name, case in (plans or {}).items() if (plan := planned(case, about))
            }
            self.write(
                case, times=measured, plans=planned_arms, clock=about.get("clocks.sm"), **facts
            )
            return measured

        measured: dict[str, Any] = {}
        for name, run in arms.items():
            if not self.begins(case, name):
                continue
            with self.guarded(case, name):
                first[name] = first_call(run)
                run()
                rounds[name] = [seconds(run) for _ in range(LEAST)]
                measured = write_times()
        turns: dict[str, list[float]] = {name: [] for name in rounds}
        for _ in range(LEAST if self.small else ROUNDS):
            if time.monotonic() > ends:
                break
            for name in list(turns):
                with self.guarded(case, name):
                    turns[name].append(seconds(arms[name]))
                    continue
                del turns[name]  # it failed
        if turns and min(map(len, turns.values())) >= LEAST:
            rounds = turns
            measured = write_times()
        return measured

    def begins(self, case: str, name: str, least: float = 0.0) -> bool:
        """Return whether at least `least` seconds are left; where not, write that `name` has not
        begun.
        """
        if self.left <= (0.0 if self.small else least):
            self.write(case, failed=name, error=f"not begun: {max(self.left, 0.0):.0f} s were left")
            return False
        return True

    def compare_losses(self, case: str, arms: Mapping[str, "Arm"], bound: float) -> None:
        """Check the loss that each arm has reported against the first arm's."""
        losses = [(name, arm.loss) for name, arm in arms.items() if arm.loss is not None]
        for name, loss in losses[1:]:
            reference, expected = losses[0]
            self.check(
                case,
                f"loss of {name} against {reference}",
                abs(loss - expected) / abs(expected),
                bound,
            )


class Queued:
    """A function of a device: where a call takes less than `SHORT`, several are queued before one
    wait, which takes about 0.1 ms.

    Args:
      launch: begins a call, and returns what `wait` takes.
      wait: returns when the device has ended.
      first: seconds of the first call, where it was made for a check.
    """

    def __init__(
        self, launch: Callable[[], Any], wait: Callable[[Any], Any], first: float | None = None
    ):
        self.launch, self.wait, self.first, self.calls = launch, wait, first, 1

    def __call__(self) -> float:
        """Seconds of one call."""
        began = time.perf_counter()
        for _ in range(self.calls):
            result = self.launch()
        self.wait(result)
        taken = (time.perf_counter() - began) / self.calls
        if taken < SHORT:
            self.calls = QUEUED
        return taken


class Arm:
    """An arm in a process of its own: its first call compiles, and what it has on the device at
    most is its own.

    The process starts here, and imports; what it runs is built in the first call, one arm after the
    other.

    Attributes:
      first: seconds of the first call, with all that was built; None before it.
      loss: what was returned with what it runs; None before the first call, and if nothing was.
    """

    def __init__(
        self, part: Part, build: Callable[..., Any], *args: Any, memory: float | None = None
    ):
        """
        Args:
          build: a function of a module, called with the part and `args`, which returns what a call
            runs, or a pair of that and a loss.
          memory: the share of the device's memory that JAX reserves; without it, JAX takes what it
            needs.
        """
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(other, part, build, args, memory), daemon=True
        )
        self._process.start()
        other.close()
        self.first: float | None = None
        self.loss: float | None = None

    def __call__(self) -> float:
        """Seconds of one call, as its process measures them."""
        counted, taken, self.loss = self._ask("run")
        self.first = self.first or taken
        return counted

    def peak_bytes(self) -> int | None:
        """The most bytes that it has had on the device; None where that is not known."""
        return self._ask("peak")

    def close(self) -> None:
        """End the process, which frees its memory on the device."""
        self._process.kill()
        self._process.join()

    def _ask(self, what: str) -> Any:
        try:
            self._pipe.send(what)
            answer, error = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            raise RuntimeError(
                f"the process of this arm ended, with exit code {self._process.exitcode}"
            ) from None
        if error:
            raise RuntimeError(error)
        return answer


def _serve(
    pipe: Any, part: Part, build: Callable[..., Any], args: tuple[Any, ...], memory: float | None
) -> None:
    end_with_parent()
    if memory is not None:  # JAX reads these when it first uses the device, which is later
        # one region: XLA's allocator otherwise adds regions of doubled size, up to twice what it
        # needs
        os.environ.update(XLA_CLIENT_MEM_FRACTION=str(memory), XLA_PYTHON_CLIENT_PREALLOCATE="true")
    run: Callable[[], Any] | None = None
    loss: float | None = None

    def call() -> Any:
        nonlocal run, loss
        if run is None:
            built = build(part, *args)
            run, loss = built if isinstance(built, tuple) else (built, None)
        return run()

    def timed_call() -> tuple[float, float, float | None]:
        began = time.perf_counter()
        counted = seconds(call)
        return counted, time.perf_counter() - began, loss

    answers = {"run": timed_call, "peak": peak_bytes}
    while True:
        try:
            what = pipe.recv()
        except EOFError:  # the part has ended
            return
        try:
            answer = answers[what](), ""
        except Exception as error:
            traceback.print_exc()  # to the log
            answer = None, f"{type(error).__name__}: {str(error).strip()[:500]}"
        pipe.send(answer)


def append(out: Path, facts: dict[str, Any]) -> None:
    """Add one line to the results of a folder; all processes of a run do."""
    with (out / RESULTS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(facts) + "\n")


def end_with_parent() -> None:
    """Have Linux kill this process when its parent ends, also where that was killed itself, as by
    the limit of a lease.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def card() -> dict[str, str]:
    """What nvidia-smi says of the GPU; nothing without it."""
    fields = "name,driver_version,memory.total,clocks.sm,clocks.mem,temperature.gpu,power.draw"
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return dict(
        zip(fields.split(","), map(str.strip, done.stdout.strip().split(",")), strict=False)
    )


def first_call(run: Callable[[], Any]) -> float:
    """Seconds of the first call, with all that it builds; an arm that was called before knows
    them.
    """
    began = time.perf_counter()
    if getattr(run, "first", None) is None:
        run()
    return getattr(run, "first", None) or time.perf_counter() - began


def timed(run: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    """The result of a call, and how many seconds it takes; for functions of JAX."""
    import jax

    began = time.perf_counter()
    result = jax.block_until_ready(run(*args))
    return result, time.perf_counter() - began


def seconds(run: Callable[[], Any]) -> float:
    """How long one call takes, or how many of its seconds count, where it returns that."""
    began = time.perf_counter()
    counted = run()
    return counted if isinstance(counted, float) else time.perf_counter() - began


def planned(case: str, about: Mapping[str, str]) -> dict[str, float] | None:
    """What was planned of a case for this card; None if nothing was."""
    target = next((name for name in ("h100", "h200") if name in about.get("name", "").lower()), "")
    plans = json.loads(PLANS.read_text(encoding="utf-8")) if PLANS.exists() else {}
    return plans.get(target, {}).get(case)


def distance(result: Any, reference: Any) -> float:
    """|result - reference| / |reference|, over all arrays, in float64."""
    import jax
    import numpy as np

    ours, right = (
        np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)])
        for tree in (result, reference)
    )
    return float(np.linalg.norm(ours - right) / np.linalg.norm(right))


def on_cpu(function: Callable[..., Any], *arrays: Any) -> Any:
    """The result of a function of arrays, which become float32, on the CPU."""
    import jax
    import jax.numpy as jnp

    cpu = jax.devices("cpu")[0]

    def widened(leaf: Any) -> Any:
        leaf = jax.device_put(leaf, cpu)
        return leaf.astype(jnp.float32) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    with jax.default_device(cpu):
        return jax.jit(function)(*jax.tree.map(widened, arrays))


def peak_bytes() -> int | None:
    """The most bytes that this process has had on the device, by torch where it is imported, else
    by JAX; None where it does not say.
    """
    if torch := sys.modules.get("torch"):
        return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    import jax

    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def torch_device() -> Any:
    """torch and its device; None where torch is not installed."""
    try:
        import torch
    except ImportError:
        return None, None
    return torch, torch.device("cuda" if torch.cuda.is_available() else "cpu")


def wait_for(torch: Any, device: Any) -> Callable[[Any], None]:
    """What waits for torch's device."""
    return lambda _: torch.cuda.synchronize() if device.type == "cuda" else None


def run_part(main: Callable[[Part], None]) -> None:
    """The command line of a part."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    part = Part(args.name, args.out, args.seconds, args.small)
    main(part)
    part.write("end", left=part.left)
