"""The loss and the gradients of a training step in float32 on the CPU, computed beside the part,
and how far those of an arm are from them.

A batch repeats its first rows, so that the mean of its loss, and its gradients, are those of these
rows: the program that is timed is checked with its own shapes, and the CPU computes few rows.
"""

import multiprocessing
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from benchmarks.gpu import cases
from benchmarks.gpu.measure import Part, end_with_parent

LOSS = 3e-2  # relative, of a loss in bfloat16; gradients differ where a loss does not
MOST = 2**16  # elements of an array that are compared
B1 = 0.9  # of optax.adamw


def start(part: Part, folder: Path, rows: Mapping[str, int]) -> None:
    """Compute the references of some steps, in this order, in a process of its own.

    Args:
      folder: for their files; `check` reads them.
      rows: by the name of a step, how many of its rows a batch repeats.
    """
    context = multiprocessing.get_context("spawn")
    context.Process(target=_write, args=(part, folder, dict(rows)), daemon=True).start()


def repeat(batch: Mapping[str, np.ndarray], rows: int) -> dict[str, np.ndarray]:
    """The batch, with its first rows again and again."""
    return {name: np.resize(leaf[:rows], leaf.shape) for name, leaf in batch.items()}


def first_gradients(optimizer_state: Any) -> dict[str, np.ndarray]:
    """Of the only update so far: AdamW's first mean is a tenth of them, and SGD's momentum is
    them.
    """
    first = optimizer_state[0]
    if hasattr(first, "mu"):
        return {name: leaf / (1 - B1) for name, leaf in sample(first.mu).items()}
    return sample(first.trace)


def sample(tree: Any) -> dict[str, np.ndarray]:
    """Evenly spaced elements of each array, by its path."""
    tree = nnx.to_pure_dict(tree) if isinstance(tree, nnx.State) else tree
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): spaced(np.asarray(leaf).ravel()) for path, leaf in leaves}


def spaced(flat: np.ndarray) -> np.ndarray:
    """At most about MOST elements; the stride is odd, and so includes all columns of a matrix of
    even width.
    """
    return flat[:: len(flat) // MOST | 1]


def check(
    part: Part,
    case: str,
    arm: str,
    loss: Any,
    gradients: Mapping[str, np.ndarray],
    *,
    folder: Path,
    bound: float,
) -> None:
    """Compare an arm's loss and gradients with the reference, which is awaited while the part has
    time.

    Raises:
      ValueError: they are not those of the reference; the arm is not timed.
    """
    path = folder / f"{case}.npz"
    while not path.exists():
        if part.left <= 0 or (folder / f"{case}.failed").exists():
            part.write(
                case, failed="reference", error=f"there is none: {arm} is timed without a check"
            )
            return
        time.sleep(0.1)
    with np.load(path) as right:
        name, error = worst(gradients, right)
        expected = float(right["loss"])
    near = part.check(
        case,
        f"loss of {arm} against float32 on the CPU",
        abs(float(loss) - expected) / abs(expected),
        LOSS,
    )
    near &= part.check(
        case, f"gradients of {arm} against float32 on the CPU, the worst at {name}", error, bound
    )
    if not near:
        raise ValueError("its loss or its gradients are wrong, and it is not timed")


def worst(found: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray]) -> tuple[str, float]:
    """The array that is furthest from its reference, and how far, relative to its norm; NaN is
    further than all.
    """
    errors = {name: norm(leaf - right[name]) / norm(right[name]) for name, leaf in found.items()}
    return max(errors.items(), key=lambda entry: np.nan_to_num(entry[1], nan=np.inf))


def norm(array: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(array, np.float64)))


def _write(part: Part, folder: Path, rows: dict[str, int]) -> None:
    end_with_parent()
    os.nice(10)  # the arms compile meanwhile
    jax.config.update("jax_platforms", "cpu")  # no memory of the GPU
    for name, count in rows.items():
        with part.guarded(name, "reference"):
            loss, gradients = on_cpu(cases.steps(part.small)[name], count)
            np.savez(folder / "partial.npz", loss=loss, **sample(gradients))
            # others see all of it or nothing
            (folder / "partial.npz").rename(folder / f"{name}.npz")
            continue
        (folder / f"{name}.failed").touch()


def on_cpu(step: cases.Step, rows: int) -> tuple[float, Any]:
    """Loss and gradients in float32 of the first rows of a step's batch."""
    hand = cases.ByHand(step)
    hand.dtype = np.dtype("float32")
    params, others = hand.variables()
    batch = {name: leaf[:rows] for name, leaf in step.data().items()}
    (loss, _), gradients = jax.jit(jax.value_and_grad(hand.loss, has_aux=True))(
        params, others, batch
    )
    return float(loss), gradients
