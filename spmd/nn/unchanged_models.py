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

# Products of the model's own, which flax's linen attention takes as arguments.
PRODUCTS = ("einsum_dot_general", "qk_attn_weights_einsum", "attn_weights_value_einsum")
NAMES = {
    "jax": "jax.nn.dot_product_attention",
    "nnx": "flax's nnx attention",
    "linen": "flax's linen attention",
}


def _of_jax(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Compute `jax.nn.dot_product_attention`; an `implementation` that the model gives stays."""
    arguments = _arguments(original, args, kwargs)
    implementation = arguments["implementation"]
    if arguments["return_residual"]:
        return _as_written("jax", "it returns the normalisers", original, args, kwargs)
    if current().attention == "as_written" and implementation is None:
        return _as_written("jax", "", original, args, kwargs)
    # The implementation in XLA takes what the others take, on all platforms.
    plain = {**arguments, "implementation": "xla"}
    # Wrong arguments raise what JAX raises.
    like = jax.eval_shape(lambda arrays: original(**{**plain, **arrays}), _arrays(plain))
    query, key, value = (_with_dims(arguments[name], 4) for name in ("query", "key", "value"))
    scale = arguments["scale"]
    if scale is None:
        scale = 1 / math.sqrt(query.shape[3])
    window = arguments["local_window_size"]
    if isinstance(window, int):
        window = (window, window)
    window = window or (None, None)
    scoring = Scoring(scale, arguments["is_causal"], window)
    arrays = ScoreArrays(
        _with_dims(arguments["mask"], 4),
        _with_dims(arguments["bias"], 4),
        key_lengths=arguments["key_value_seq_lengths"],
    )
    out = attend(
        Attend(scoring, query, key, value, arrays),
        implementation,
        lambda: original(*args, **kwargs),
    )
    lengths = arguments["query_seq_lengths"]
    if lengths is not None:
        within = jnp.arange(query.shape[1]) < lengths[:, None]
        out = jnp.where(within[:, :, None, None], out, jnp.zeros_like(out))
    return out.reshape(like.shape)


def _of_nnx(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Compute `flax.nnx.dot_product_attention`."""
    arguments = _arguments(original, args, kwargs)
    # Without dropout, flax (0.12) calls JAX's function, which is replaced, too.
    if arguments["module"] is None and arguments["dropout_rate"] == 0:
        return original(*args, **kwargs)

    def promote(*arrays: Any, dtype: Any) -> Any:
        return arguments["promote_dtype"](arrays, dtype=dtype)

    return _of_flax("nnx", promote, arguments, original, args, kwargs)


def _of_linen(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Compute `flax.linen.dot_product_attention`."""
    arguments = _arguments(original, args, kwargs)
    return _of_flax("linen", promote_dtype, arguments, original, args, kwargs)


# For `spmd.nn.model_calls.replaced_calls`.
CALLS = {"jax": _of_jax, "nnx": _of_nnx, "linen": _of_linen}


def with_calls(parallel: ParallelConfig) -> ParallelConfig:
    """Return a configuration under which calls of JAX's and flax's attention are replaced, if they
    may be.
    """
    if not may_replace(parallel):
        return parallel
    return dataclasses.replace(parallel, calls=CALLS)


def _of_flax(
    name: str,
    promote: Callable[..., Any],
    arguments: dict[str, Any],
    original: Callable[..., Any],
    args: tuple,
    kwargs: dict[str, Any],
) -> Any:
    """Compute attention with flax's arguments."""
    products = [product for product in PRODUCTS if arguments.get(product) is not None]
    why = ""
    if arguments["module"] is not None:
        why = "its weights are sown"
    elif products:
        why = f"it has its own {', '.join(products)}"
    if why or current().attention == "as_written":
        return _as_written(name, why, original, args, kwargs)
    # Wrong arguments raise what flax raises.
    like = jax.eval_shape(lambda arrays: original(**{**arguments, **arrays}), _arrays(arguments))
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    query, key, value = promote(query, key, value, dtype=arguments["dtype"])
    batch = query.shape[:-3]
    dropout = 0.0
    if not arguments["deterministic"]:
        dropout = float(arguments["dropout_rate"])
    scoring = Scoring(
        1 / math.sqrt(query.shape[-1]),
        arguments.get("is_causal", False),
        dropout=dropout,
        precision=arguments["precision"],
    )
    mask = arguments["mask"]
    if mask is not None:
        mask = _one_batch_dim(mask.astype(bool), batch)
    bias = arguments["bias"]
    if bias is not None:
        bias = _one_batch_dim(bias, batch)
    arrays = ScoreArrays(mask, bias)
    query, key, value = (x.reshape(math.prod(batch), *x.shape[-3:]) for x in (query, key, value))
    if dropout:
        scores = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
        shared = arguments["broadcast_dropout"]
        scoring, arrays = with_dropout(
            scoring, arrays, arguments["dropout_rng"], scores, shared=shared
        )
    out = attend(
        Attend(scoring, query, key, value, arrays), as_written=lambda: original(*args, **kwargs)
    )
    return out.reshape(like.shape)


def _as_written(
    name: str, why: str, original: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
) -> Any:
    """Call the original function; a note says `why`."""
    parallel = current()
    parallel.used.add("attention")
    if why:
        parallel.notes[
            f"note: {NAMES[name]} is computed as it is written, with all scores: {why}."
        ] = None
    with jax.named_scope(AS_WRITTEN):
        return original(*args, **kwargs)


def _arguments(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of a call, by name."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def _arrays(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that are arrays."""
    return {
        name: value
        for name, value in arguments.items()
        if hasattr(value, "shape") and hasattr(value, "dtype")
    }


def _with_dims(x: Any, dims: int) -> Any:
    """Return an array with so many dims, the new ones first."""
    if x is None:
        return x
    return jnp.asarray(x).reshape((1,) * (dims - jnp.ndim(x)) + jnp.shape(x))


def _one_batch_dim(x: jax.Array, batch: tuple[int, ...]) -> jax.Array:
    """Return an array that is broadcast to [*batch, heads, queries, keys], as one that is broadcast
    to [rows, heads, queries, keys].
    """
    x = _with_dims(x, len(batch) + 3)
    rows = x.shape[:-3]
    if any(size != 1 for size in rows):
        x = jnp.broadcast_to(x, (*batch, *x.shape[-3:]))
    return x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])
