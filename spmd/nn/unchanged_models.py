"""The attention of models that call JAX's and flax's functions, by the implementation of the
layout's `[attention]`.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype

from spmd.nn.attention import attend
from spmd.nn.attention_kernels import AS_WRITTEN, Attend, may_replace
from spmd.nn.parallel_context import ParallelConfig, current
from spmd.nn.scoring import ScoreArrays, Scoring, with_dropout

# functions of the model's own, in linen
PRODUCTS = ("einsum_dot_general", "qk_attn_weights_einsum", "attn_weights_value_einsum")
NAMES = {
    "jax": "jax.nn.dot_product_attention",
    "nnx": "flax's nnx attention",
    "linen": "flax's linen attention",
}


def _of_jax(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`jax.nn.dot_product_attention`; an `implementation` that the model gives is kept."""
    given = _arguments(original, args, kwargs)
    if given["return_residual"]:
        return _as_written("jax", "it returns the normalisers", original, args, kwargs)
    if current().attention == "as_written" and given["implementation"] is None:
        return _as_written("jax", "", original, args, kwargs)
    query, key, value, bias, mask, scale = (
        given[name] for name in ("query", "key", "value", "bias", "mask", "scale")
    )
    plain = {**given, "implementation": "xla"}
    # raises what JAX raises
    like = jax.eval_shape(lambda arrays: original(**{**plain, **arrays}), _arrays(plain))
    query, key, value = (_with_dims(x, 4) for x in (query, key, value))
    window, lengths = given["local_window_size"], given["query_seq_lengths"]
    scoring = Scoring(
        1 / math.sqrt(query.shape[3]) if scale is None else scale,
        given["is_causal"],
        (window, window) if isinstance(window, int) else window or (None, None),
    )
    arrays = ScoreArrays(
        _with_dims(mask, 4), _with_dims(bias, 4), key_lengths=given["key_value_seq_lengths"]
    )
    out = attend(
        Attend(scoring, query, key, value, arrays),
        given["implementation"],
        lambda: original(*args, **kwargs),
    )
    if lengths is not None:
        within = jnp.arange(query.shape[1]) < lengths[:, None]
        out = jnp.where(within[:, :, None, None], out, jnp.zeros_like(out))
    return out.reshape(like.shape)


def _of_nnx(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`flax.nnx.dot_product_attention`, which calls JAX's, unless there is dropout."""
    given = _arguments(original, args, kwargs)
    if given["module"] is None and given["dropout_rate"] == 0:
        return original(*args, **kwargs)
    return _of_flax(
        "nnx",
        lambda *arrays, dtype: given["promote_dtype"](arrays, dtype=dtype),
        given,
        original,
        args,
        kwargs,
    )


def _of_linen(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`flax.linen.dot_product_attention`."""
    return _of_flax(
        "linen", promote_dtype, _arguments(original, args, kwargs), original, args, kwargs
    )


CALLS = {"jax": _of_jax, "nnx": _of_nnx, "linen": _of_linen}  # for `replaced_calls`


def with_calls(parallel: ParallelConfig) -> ParallelConfig:
    """A configuration under which calls of JAX's and flax's attention are replaced, if they may
    be.
    """
    return dataclasses.replace(parallel, calls=CALLS) if may_replace(parallel) else parallel


def _of_flax(
    name: str,
    promote: Callable[..., Any],
    given: dict[str, Any],
    original: Callable[..., Any],
    args: tuple,
    kwargs: dict[str, Any],
) -> Any:
    """Attention with flax's arguments."""
    own = [argument for argument in PRODUCTS if given.get(argument) is not None]
    why = (
        "its weights are sown"
        if given["module"] is not None
        else f"it has its own {', '.join(own)}"
        if own
        else ""
    )
    if why or current().attention == "as_written":
        return _as_written(name, why, original, args, kwargs)
    # raises what flax raises
    like = jax.eval_shape(lambda arrays: original(**{**given, **arrays}), _arrays(given))
    query, key, value = promote(given["query"], given["key"], given["value"], dtype=given["dtype"])
    batch, mask = query.shape[:-3], given["mask"]
    dropout = 0.0 if given["deterministic"] else float(given["dropout_rate"])
    scoring = Scoring(
        1 / math.sqrt(query.shape[-1]),
        given.get("is_causal", False),
        dropout=dropout,
        precision=given["precision"],
    )
    arrays = ScoreArrays(
        None if mask is None else _one_batch_dim(mask.astype(bool), batch),
        None if given["bias"] is None else _one_batch_dim(given["bias"], batch),
    )
    query, key, value = (x.reshape(math.prod(batch), *x.shape[-3:]) for x in (query, key, value))
    if dropout:
        scores = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
        scoring, arrays = with_dropout(
            scoring, arrays, given["dropout_rng"], scores, shared=given["broadcast_dropout"]
        )
    return attend(
        Attend(scoring, query, key, value, arrays), as_written=lambda: original(*args, **kwargs)
    ).reshape(like.shape)


def _as_written(
    name: str, why: str, original: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
) -> Any:
    """The original function; a note says `why`."""
    parallel = current()
    parallel.used.add("attention")
    if why:
        parallel.notes[
            f"note: {NAMES[name]} is computed as it is written, with all scores: {why}."
        ] = None
    with jax.named_scope(AS_WRITTEN):
        return original(*args, **kwargs)


def _arguments(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call, by name."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def _arrays(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments that are arrays."""
    return {
        name: value
        for name, value in given.items()
        if hasattr(value, "shape") and hasattr(value, "dtype")
    }


def _with_dims(x: Any, dims: int) -> Any:
    """An array with so many dims, the new ones first."""
    return x if x is None else jnp.asarray(x).reshape((1,) * (dims - jnp.ndim(x)) + jnp.shape(x))


def _one_batch_dim(x: jax.Array, batch: tuple[int, ...]) -> jax.Array:
    """An array that is broadcast to [*batch, heads, queries, keys], as one that is broadcast to
    [rows, heads, queries, keys].
    """
    x = _with_dims(x, len(batch) + 3)
    rows = x.shape[:-3]
    if any(size != 1 for size in rows):
        x = jnp.broadcast_to(x, (*batch, *x.shape[-3:]))
    return x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])
