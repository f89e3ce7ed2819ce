"""What the parts of the GPU benchmark share: results on disk as they come, arms that alternate, and distances from a reference."""

import argparse
import contextlib
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROUNDS = 40  # at most, of each arm
LEAST = 3  # rounds, however little time is left
PLANS = Path(__file__).with_name("plans.json")


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of one arm: the first call, which compiles, and the later ones, without the second, which warms up."""

    first: float
    rest: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.rest)

    def to_json(self) -> dict[str, float]:
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
        self.name, self.seconds, self.small, self.out = name, seconds, small, str(out)
        self._file = (out / f"{name}.jsonl").open("a", encoding="utf-8")
        self._ends = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds."""
        return self._ends - time.monotonic()

    def write(self, case: str, **facts: Any) -> None:
        """Append one result; it is on disk when this returns."""
        self._file.write(json.dumps({"part": self.name, "case": case, **facts}) + "\n")
        self._file.flush()

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
          arms: each call returns when its work is done. An arm that fails is left out, and what it said is written.
          share: of the seconds that the part has left.
          plan: a case of plans.json, whose time is compared with that of "ours".
          facts: written with the times; without `peak_bytes` there, the most bytes that this process's JAX has had on the device are.
        """
        ends, first, rest = time.monotonic() + share * max(self.left, 0.0), {}, {}
        for name, run in arms.items():
            with self.guarded(case, name):
                first[name] = seconds(run)
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
        self.write(case, times=measured, plan=planned(plan), **({"peak_bytes": peak_bytes()} | facts))
        return measured


def seconds(run: Callable[[], Any]) -> float:
    """How long one call takes."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


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
    """The most bytes that JAX has had in use on the device; None where it does not say."""
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
