"""What is done in a folder while faults happen there, how it is done again without them, and what of it must be equal."""

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import spmd
from spmd.tree import flatten

Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Scenario:
    """Something that writes below a folder.

    Attributes:
      run: with faults; returns what must be equal to that without.
      again: what a user does after an error, a kill or a loss of power, without faults; returns the same as `run`.
      prepare: what is in the folder before `run`.
      look: reads what a `run` has left before `again`.
      may_miss: `look` may raise an error of the library, or that there is no such file.
      lost: a folder below that a loss of power removes, since it is in memory.
    """

    run: Callable[[Path], Arrays]
    again: Callable[[Path], Arrays]
    prepare: Callable[[Path], object] = lambda folder: None
    look: Callable[[Path], Arrays] | None = None
    may_miss: bool = True
    lost: str = ""


X = np.random.default_rng(0).normal(size=(48, 4)).astype(np.float32)
Y = X[:, :2] - 2 * X[:, 1:3]


def linear():
    return spmd.FunctionalModel(lambda key: {"w": jnp.zeros((4, 2)), "b": jnp.zeros(2)}, lambda params, x: x @ params["w"] + params["b"])


def arrays_of(result, folder) -> Arrays:
    """The state, the losses of the call, and the losses of the run's folder by step."""
    trees = jax.device_get((result.state.params, result.state.opt, result.state.step))
    state = {f"state/{path}": np.asarray(leaf) for path, leaf in flatten(trees).items()}
    read = spmd.History.read(folder)
    in_file = [(row["step"], row["loss"]) for row in read.rows()]
    records, repeated = read_records(folder / "metrics.jsonl")
    return state | {
        "tail loss": np.array(result.history["loss"]),
        "rows of history.bin": np.array(in_file),
        "rows of metrics.jsonl": np.array(records),
        "repeated steps of metrics.jsonl": np.array(repeated),
    }


def read_records(path: Path) -> tuple[list[tuple[int, float]], int]:
    """Steps and losses of the lines that are complete, and how many steps come again without a line that says why."""
    records, repeated, newest = [], 0, 0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if "loss" not in record:
            newest = 0 if "event" in record else newest
            continue
        records.append((record["step"], record["loss"]))
        repeated += record["step"] <= newest
        newest = record["step"]
    return records, repeated


def fit(folder, *, steps=4, **options):
    options = {"checkpoint": spmd.Checkpoint(folder / "run", every=2, keep=1), "log_every": 1, "progress": False} | options
    result = spmd.fit(
        linear(), (X, Y), loss=spmd.losses.mean_squared_error, optimizer=optax.adam(0.1), batch_size=8, steps=steps, **options
    )
    return arrays_of(result, folder / "run")


def fit_best(folder, **options):
    checkpoint = spmd.Checkpoint(folder / "run", every=2, keep=1, best="eval_loss")
    return fit(folder, steps=6, eval_data=(X, Y), eval_every=2, checkpoint=checkpoint, **options)


def fit_in_memory(folder, **options):
    checkpoint = spmd.Checkpoint(folder / "run", every=3, keep=1, memory_every=1, memory_folder=folder / "memory")
    return fit(folder, steps=5, checkpoint=checkpoint, **options)


def resuming(function):
    return functools.partial(function, resume=True)


SCENARIOS = {
    "train": Scenario(fit, resuming(fit)),
    "best": Scenario(fit_best, resuming(fit_best)),
    "memory": Scenario(fit_in_memory, resuming(fit_in_memory), lost="memory"),
    "resume": Scenario(resuming(fit), resuming(fit), prepare=functools.partial(fit, steps=2)),
}
