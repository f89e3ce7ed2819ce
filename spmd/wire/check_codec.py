"""The contract of a codec, as a function that checks it."""

import dataclasses
import functools
from collections.abc import Iterator
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
        raise OptionError(
            f"check: {type_name(codec)} is no codec.",
            fix="an instance of a frozen dataclass that extends wire.Codec.",
        )
    measured: dict[str, float] = {}
    wrong_shape = codec.traced(WORKERS, 32)[1] if isinstance(codec, RowCodec) else ""
    problems = (
        [wrong_shape]
        if wrong_shape
        else [*_encoding_problems(codec, measured), *_mean_problems(codec, measured)]
    )
    if problems:
        listed = "".join(f"\n    {problem}" for problem in problems)
        fix = "the docstring of spmd.wire.codec.base says what each method returns."
        raise CodecError(f"{codec} breaks the contract of a codec:{listed}", fix=fix)
    return measured


def _encoding_problems(codec: Codec, measured: dict[str, float]) -> Iterator[str]:
    """1 and 5: rows, encoded and decoded."""
    if not isinstance(codec, RowCodec):
        return
    worst, rng = 0.0, np.random.default_rng(0)
    for width in (1, 7, 64, 300, 1000):
        rows = (
            rng.normal(size=(6, width)).astype(np.float32)
            * np.float32(10.0) ** np.arange(-3, 3, dtype=np.float32)[:, None]
        )
        rows[5] = 0.0
        payload = codec.encode(jnp.asarray(rows))
        decoded = np.asarray(codec.decode(payload, width))
        if decoded.shape != rows.shape or decoded.dtype != np.float32:
            yield (
                f"decode gives {decoded.dtype}{list(decoded.shape)} for rows "
                f"float32{list(rows.shape)}."
            )
            return
        lost = np.linalg.norm(rows[:5] - decoded[:5], axis=1) / np.linalg.norm(rows[:5], axis=1)
        worst = max(worst, float(lost.max()))
        if np.any(decoded[5]):
            yield (
                f"a row of zeros is decoded as up to {np.abs(decoded[5]).max():.3g} (width "
                f"{width})."
            )
        leading = {leaf.shape[0] for leaf in jax.tree.leaves(payload)}
        if leading != {6}:
            yield (
                f"dim 0 of what encode returns is {sorted(leading)} for 6 rows: the arrays of a "
                "payload have one entry per row."
            )
    measured["error"] = worst
    if not worst <= codec.error * (1 + 1e-6) + 1e-7:
        yield (
            f"one encoding loses {worst:.4g} of a row's norm; `error` states at most "
            f"{codec.error:.4g}."
        )
    layout = ShardLayout((1024, 256), (), ("workers",), (WORKERS,))
    payload = jax.eval_shape(
        codec.encode, jax.ShapeDtypeStruct((WORKERS, layout.width), jnp.float32)
    )
    sent = sum(map(nbytes, jax.tree.leaves(payload)))
    if codec.compresses(layout, (1024, 256)) and sent >= 4 * 1024 * 256:
        yield (
            f"compresses says that it makes a gradient [1024, 256] smaller, and sends {sent:,} "
            f"bytes of {4 * 1024 * 256:,}."
        )


def _mean_problems(codec: Codec, measured: dict[str, float]) -> Iterator[str]:
    """2, 3 and 4: workers that exchange gradients for some steps, with error feedback."""
    axes = ("workers",)
    rng = np.random.default_rng(1)
    grads = {
        name: rng.normal(size=(STEPS, WORKERS, *shape)).astype(np.float32)
        for name, shape in SHAPES.items()
    }
    layouts = {name: ShardLayout(shape, (), axes, (WORKERS,)) for name, shape in SHAPES.items()}
    transfers = {
        name: make_transfer(codec, layout, error_feedback=codec.reports_loss)
        for name, layout in layouts.items()
    }
    memory = init_memory(transfers, 1)

    @jax.jit
    @functools.partial(jax.vmap, axis_name="workers", in_axes=(1, None))
    def run(grads: dict[str, jax.Array], memory: dict[str, dict[str, Any]]) -> tuple:
        def body(memory: dict, inputs: dict) -> tuple:
            means, memory = reduce_buckets(transfers, inputs, memory)
            return memory, means

        return jax.lax.scan(body, memory, grads)

    after, means = run(grads, memory)
    if not codec.lossless and all(transfer.codec.lossless for transfer in transfers.values()):
        yield (
            "compresses says for no gradient here that the codec makes it smaller: its mean was "
            "not checked."
        )
    worst = 0.0
    for name in SHAPES:
        of_worker = np.asarray(means[name], np.float64)  # [workers, steps, ...]
        true = grads[name].astype(np.float64).mean(1)
        worst = max(worst, float(np.linalg.norm(of_worker[0] - true) / np.linalg.norm(true)))
        if not np.isfinite(of_worker).all():
            yield f"finite gradients {list(SHAPES[name])} have a mean that is not finite."
            continue
        if not (of_worker == of_worker[:1]).all():
            spread = np.abs(of_worker - of_worker[:1]).max()
            yield (
                f"workers get different means of a gradient {list(SHAPES[name])}, with differences "
                f"up to {spread:.3g}."
            )
        rest = (
            np.asarray(after[name]["residual"], np.float64).mean(0)[0]
            if transfers[name].error_feedback
            else 0.0
        )
        lost = np.abs(of_worker[0].sum(0) + rest - true.sum(0)).max()
        if codec.reports_loss and lost > 1e-3:
            yield (
                f"error feedback loses {lost:.3g} of the sum of {STEPS} gradients "
                f"{list(SHAPES[name])}: the mean over workers of `kept` "
                "is not the returned mean."
            )
    measured["mean_error"] = worst
    spoilt = {name: value.copy() for name, value in grads.items()}
    for value in spoilt.values():
        value[0, 0].flat[0] = np.nan
    _, means = run(spoilt, memory)
    hidden = [
        list(shape)
        for name, shape in SHAPES.items()
        if np.isfinite(np.asarray(means[name])[:, 0]).all()
    ]
    yield from (
        f"one worker's NaN is hidden in the mean of a gradient {shape}." for shape in hidden
    )
