"""The contract of a codec, as a function that checks it."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd.base.tree import nbytes
from spmd.errors import CodecError, OptionError, type_name
from spmd.wire.codec.base import Codec, RowCodec
from spmd.wire.reduction import reduce_buckets
from spmd.wire.shard_layout import ShardLayout
from spmd.wire.transfer import init_memory, make_transfer

WORKERS, STEPS = 4, 20
SHAPES = {"matrix": (48, 40), "cube": (3, 8, 20), "bias": (130,)}


def check(codec: Codec) -> dict[str, float]:
    """Check the contract of a codec on random gradients, as 4 workers would exchange them; one
    device is enough.

    1. One encoding of a row is within the bound that `error` states, and zero stays zero (codecs of
       rows).
    2. All workers get the same mean, bit for bit.
    3. The mean over workers of what each is said to have sent (`kept`) is the returned mean, so
       error feedback loses nothing: after some steps the applied means plus the mean residual are
       the sum of the true means.
    4. Finite gradients have finite means, and a NaN is not hidden.
    5. What is sent is smaller than float32, where `compresses` says so.

    Args:
      codec: an instance, with its options.

    Returns:
      "error": the largest error of one encoding, relative to the row's norm (codecs of rows);
      "mean_error": that of the mean.

    Raises:
      CodecError: with everything that is broken, and the numbers.

    Example:
      >>> from spmd import wire
      >>> measured = check(wire.int8(block=256))
      >>> measured["error"] < wire.int8(block=256).error
      True
    """
    if not (isinstance(codec, Codec) and dataclasses.is_dataclass(codec)):
        why = f"check: {type_name(codec)} is no codec."
        raise OptionError(why, fix="an instance of a frozen dataclass that extends wire.Codec.")
    measured: dict[str, float] = {}
    problems = _problems(codec, measured)
    if problems:
        listed = "".join(f"\n    {problem}" for problem in problems)
        fix = "the docstring of spmd.wire.codec.base says what each method returns."
        raise CodecError(f"{codec} breaks the contract of a codec:{listed}", fix=fix)
    return measured


def _problems(codec: Codec, measured: dict[str, float]) -> list[str]:
    """Return the rules that are broken, and note the errors that were measured."""
    if not isinstance(codec, RowCodec):
        return list(_mean_problems(codec, measured))
    _, wrong_shape = codec.traced(WORKERS, 32)
    if wrong_shape:
        return [wrong_shape]
    return [*_encoding_problems(codec, measured), *_mean_problems(codec, measured)]


def _encoding_problems(codec: RowCodec, measured: dict[str, float]) -> Iterator[str]:
    """1 and 5: rows, encoded and decoded."""
    worst = 0.0
    rng = np.random.default_rng(0)
    # Six rows of different magnitudes; the last is set to zero below.
    magnitudes = np.float32(10.0) ** np.arange(-3, 3, dtype=np.float32)
    for width in (1, 7, 64, 300, 1000):
        rows = rng.normal(size=(6, width)).astype(np.float32) * magnitudes[:, None]
        rows[5] = 0.0
        payload = codec.encode(jnp.asarray(rows))
        decoded = np.asarray(codec.decode(payload, width))
        if decoded.shape != rows.shape or decoded.dtype != np.float32:
            shown = f"{decoded.dtype}{list(decoded.shape)}"
            yield f"decode gives {shown} for rows float32{list(rows.shape)}."
            return
        lost = np.linalg.norm(rows[:5] - decoded[:5], axis=1) / np.linalg.norm(rows[:5], axis=1)
        # np.maximum keeps a NaN, and max does not.
        worst = float(np.maximum(worst, lost.max()))
        if np.any(decoded[5]):
            largest = np.abs(decoded[5]).max()
            yield f"a row of zeros is decoded as up to {largest:.3g} (width {width})."
        leading = {leaf.shape[0] for leaf in jax.tree.leaves(payload)}
        if leading != {6}:
            yield (
                f"dim 0 of what encode returns is {sorted(leading)} for 6 rows: the arrays of a "
                "payload have one entry per row."
            )
    measured["error"] = worst
    # Not `>`, which is False for a NaN. The norms are float32, which rounds.
    if not worst <= codec.error * (1 + 1e-6) + 1e-7:
        yield (
            f"one encoding loses {worst:.4g} of a row's norm; `error` states at most "
            f"{codec.error:.4g}."
        )
    yield from _size_problems(codec)


def _size_problems(codec: RowCodec) -> Iterator[str]:
    """5: the bytes of a gradient [1024, 256]."""
    shape = (1024, 256)
    layout = ShardLayout(shape, (), ("workers",), (WORKERS,))
    rows = jax.ShapeDtypeStruct((WORKERS, layout.width), jnp.float32)
    payload = jax.eval_shape(codec.encode, rows)
    sent = sum(map(nbytes, jax.tree.leaves(payload)))
    size = 4 * math.prod(shape)
    if codec.compresses(layout, shape) and sent >= size:
        yield (
            f"compresses says that it makes a gradient [1024, 256] smaller, and sends {sent:,} "
            f"bytes of {size:,}."
        )


def _mean_problems(codec: Codec, measured: dict[str, float]) -> Iterator[str]:
    """2, 3 and 4: workers that exchange gradients for some steps, with error feedback."""
    rng = np.random.default_rng(1)
    grads = {}
    transfers = {}
    for name, shape in SHAPES.items():
        grads[name] = rng.normal(size=(STEPS, WORKERS, *shape)).astype(np.float32)
        layout = ShardLayout(shape, (), ("workers",), (WORKERS,))
        transfers[name] = make_transfer(codec, layout, error_feedback=codec.reports_loss)
    memory = init_memory(transfers, 1)

    # An axis of vmap has positions as a mesh has, so one device is enough.
    @jax.jit
    @functools.partial(jax.vmap, axis_name="workers", in_axes=(1, None))
    def exchange(grads: dict[str, jax.Array], memory: dict[str, dict[str, Any]]) -> tuple:
        def step(memory: dict, grads: dict) -> tuple:
            means, memory = reduce_buckets(transfers, grads, memory)
            return memory, means

        return jax.lax.scan(step, memory, grads)

    after, means = exchange(grads, memory)
    if not codec.lossless and all(transfer.codec.lossless for transfer in transfers.values()):
        yield (
            "compresses says for no gradient here that the codec makes it smaller: its mean was "
            "not checked."
        )
    worst = 0.0
    for name, shape in SHAPES.items():
        # In float64, so that adding up the steps here loses nothing itself.
        of_workers = np.asarray(means[name], np.float64)  # [workers, steps, ...]
        mean = of_workers[0]
        true_mean = grads[name].astype(np.float64).mean(1)
        error = np.linalg.norm(mean - true_mean) / np.linalg.norm(true_mean)
        worst = max(worst, float(error))
        if not np.isfinite(of_workers).all():
            yield f"finite gradients {list(shape)} have a mean that is not finite."
            continue
        # Each worker updates its own copy of the parameters by its own copy of the mean, so copies
        # whose bits differ once stay different.
        if not (of_workers == mean).all():
            spread = np.abs(of_workers - mean).max()
            yield (
                f"workers get different means of a gradient {list(shape)}, with differences up to "
                f"{spread:.3g}."
            )
        total = mean.sum(0)
        if transfers[name].error_feedback:
            total = total + np.asarray(after[name]["residual"], np.float64).mean(0)[0]
        lost = np.abs(total - true_mean.sum(0)).max()
        if codec.reports_loss and lost > 1e-3:
            yield (
                f"error feedback loses {lost:.3g} of the sum of {STEPS} gradients {list(shape)}: "
                "the mean over workers of `kept` is not the returned mean."
            )
    measured["mean_error"] = worst
    yield from _hidden_nans(exchange, grads, memory)


def _hidden_nans(exchange: Callable[..., Any], grads: dict[str, Any], memory: Any) -> Iterator[str]:
    """4: one worker's NaN in the first step."""
    spoilt = {name: value.copy() for name, value in grads.items()}
    for value in spoilt.values():
        value[0, 0].flat[0] = np.nan
    _, means = exchange(spoilt, memory)
    for name, shape in SHAPES.items():
        first_means = np.asarray(means[name])[:, 0]
        if np.isfinite(first_means).all():
            yield f"one worker's NaN is hidden in the mean of a gradient {list(shape)}."
