"""What the parts of the GPU benchmark share: results on disk as they come, arms that alternate, and distances from a reference."""

import argparse
import contextlib
import dataclasses
import json
import multiprocessing
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROUNDS = 40  # at most, of each arm
LEAST = 3  # rounds, however little time is left
PLANS = Path(__file__).with_name("plans.json")


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of one arm: the first call, which compiles (None if it was called for an earlier case), and those after the second."""

    first: float | None
    rest: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.rest)

    def to_json(self) -> dict[str, float | None]:
        """Seconds, and how many calls were measured."""
        low, high = min(self.rest), max(self.rest)
        return {"median": self.median, "low": low, "high": high, "calls": len(self.rest), "first": self.first}


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
        with (self.out / f"{self.name}.jsonl").open("a", encoding="utf-8") as file:  # an arm in a process of its own writes, too
            file.write(json.dumps({"part": self.name, "case": case, **facts}) + "\n")

    def check(self, case: str, name: str, distance: float, bound: float) -> bool:
        """Write how far an output is from its reference; a wrong output is not timed."""
        right = bool(distance <= bound)  # NaN is not
        self.write(case, check=name, distance=float(distance), bound=bound, right=right)
        return right

    @contextlib.contextmanager
    def guarded(self, case: str, name: str) -> Iterator[None]:
        """Around what a peer needs or does: where it fails, the error is written, and the part continues."""
        try:
            yield
        except Exception as error:
            self.write(case, failed=name, error=f"{type(error).__name__}: {str(error).strip()[:500]}")

    def alternate(
        self, case: str, arms: Mapping[str, Callable[[], Any]], share: float, plan: str | None = None, **facts: Any
    ) -> dict[str, Any]:
        """Call the arms in turn, write the times of each, and return them; "ours" comes first.

        Args:
          arms: each call returns when its work is done: nothing, or how many of its seconds count. An arm that fails is left out, and
            what it said is written.
          share: of the seconds that the part has left.
          plan: a case of plans.json, which is compared with "ours".
          facts: written with the times.
        """
        ends, first, rest = time.monotonic() + share * max(self.left, 0.0), {}, {}
        for name, run in arms.items():
            with self.guarded(case, name):
                warm = isinstance(run, Arm) and run.called
                first[name] = None if warm else seconds(run)
                run()
                rest[name] = []
        done = 0
        while rest and (done < LEAST or (done < ROUNDS and time.monotonic() < ends)):
            for name in list(rest):
                taken = len(rest[name])
                with self.guarded(case, name):
                    rest[name].append(seconds(arms[name]))
                if len(rest[name]) == taken:  # it failed
                    del rest[name]
            done += 1
        measured = {name: Times(first[name], tuple(of_arm)).to_json() for name, of_arm in rest.items()}
        for name, of_arm in measured.items():
            arm = arms[name]
            if isinstance(arm, Arm) and (peak := arm.peak_bytes()):
                of_arm["peak_bytes"] = peak
        self.write(case, times=measured, plan=planned(plan), **facts)
        return measured


class Arm:
    """An arm in a process of its own: its first call compiles, and what it has on the device at most is its own.

    The process starts here, and imports; what it runs is built in the first call, one arm after the other.
    """

    def __init__(self, part: Part, build: Callable[..., Callable[[], Any]], *args: Any):
        """
        Args:
          build: a function of a module, called with the part and `args`, which returns what a call runs.
        """
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, part, build, args), daemon=True)
        self._process.start()
        other.close()
        self.called = False

    def __call__(self) -> float:
        """Seconds of one call, as its process measures them."""
        self.called = True
        return self._ask("run")

    def peak_bytes(self) -> int | None:
        """The most bytes that it has had on the device; None where that is not known."""
        return self._ask("peak")

    def close(self) -> None:
        """End the process, which frees its memory on the device."""
        self._process.kill()
        self._process.join()

    def _ask(self, what: str) -> Any:
        self._pipe.send(what)
        try:
            answer, error = self._pipe.recv()
        except EOFError:
            self._process.join()
            raise RuntimeError(f"the process of this arm ended, with exit code {self._process.exitcode}") from None
        if error:
            raise RuntimeError(error)
        return answer


def _serve(pipe: Any, part: Part, build: Callable[..., Callable[[], Any]], args: tuple[Any, ...]) -> None:
    run: Callable[[], Any] | None = None

    def call() -> None:
        nonlocal run
        run = run or build(part, *args)
        return run()

    while True:
        try:
            what = pipe.recv()
        except EOFError:  # the part has ended
            return
        try:
            answer = (seconds(call) if what == "run" else peak_bytes()), ""
        except Exception as error:
            traceback.print_exc()  # to the part's log
            answer = None, f"{type(error).__name__}: {str(error).strip()[:500]}"
        pipe.send(answer)


def seconds(run: Callable[[], Any]) -> float:
    """How long one call takes, or how many of its seconds count, where it returns that."""
    began = time.perf_counter()
    counted = run()
    return counted if isinstance(counted, float) else time.perf_counter() - began


def planned(case: str | None) -> dict[str, float] | None:
    """What was planned of a case for this device; None if nothing was."""
    import jax

    kind = jax.devices()[0].device_kind.lower()
    target = next((name for name in ("h100", "h200") if name in kind), "")
    plans = json.loads(PLANS.read_text(encoding="utf-8")) if PLANS.exists() else {}
    return plans.get(target, {}).get(case or "")


def distance(result: Any, reference: Any) -> float:
    """|result - reference| / |reference|, over all arrays, in float64."""
    import jax
    import numpy as np

    ours, right = (np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)]) for tree in (result, reference))
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
    """The most bytes that this process has had on the device, by torch where it is imported, else by JAX; None where it does not say."""
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
