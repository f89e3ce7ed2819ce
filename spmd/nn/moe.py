"""A mixture of experts: each token goes to the few of many small networks that a router chooses."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from spmd.errors import DataError, OptionError
from spmd.nn.parallel_context import MIXTURE, ParallelConfig, current, manual_axes
from spmd.tree import describe
from spmd.wire import collectives


class Routing(NamedTuple):
    """How tokens were dealt out in one call; scalars, float32.

    Attributes:
      loss: 1 when all experts get the same share of tokens, up to their number when one gets all: times 0.01 or so, to be added to the
        loss.
      dropped: the share of choices for which the expert had no room. What is left of such a token is its other choice, or zeros.
    """

    loss: jax.Array
    dropped: jax.Array


class MixtureOfExperts(nnx.Module):
    """`experts` networks of two layers, of which every token goes through `k`, chosen by a router.

    The router is softmax(x W) in float32; a token's result is the sum of its `k` best experts' results, weighted by their probabilities,
    which are made to sum to 1 for k > 1 (Lepikhin et al., GShard, arXiv:2006.16668, algorithm 1) and stay as they are for k = 1 (Fedus et
    al., Switch Transformer, arXiv:2101.03961, equation 2). An expert has room for  ceil(k * tokens / experts * capacity_factor)  tokens
    of a *group*; first choices are seated before second ones, earlier tokens before later ones, and who finds no room is dropped. A
    group is what one device deals out: all tokens on one device; a worker's tokens under data parallelism; and where a layout cuts
    sequences or experts, a device's part of those along dim 1. So with room for all the result does not depend on the mesh, and otherwise
    only as groups do.

    Under  [experts] axis = "expert"  each device of the axis has some of the experts, and tokens travel to them and back, by one
    all-to-all each way. Weights carry the logical axis names "expert", "embed" and "mlp", so that  [axes] expert = "expert"  cuts them.

    The loss of `Routing` is that of Switch Transformer (equations 4 to 6), of first choices, with shares counted over all workers.

    Args:
      features: of a token, in and out; `hidden`: between an expert's two layers; `experts`: how many.
      k: experts for each token.
      capacity_factor: room, relative to what it takes when tokens are shared out evenly.
      activation: between the layers.

    Raises:
      OptionError: numbers that cannot be, or experts that the axis does not divide.
      DataError: tokens that the axis does not divide.

    Example:
      >>> moe = MixtureOfExperts(4, 8, 2, rngs=nnx.Rngs(0))
      >>> y, routing = moe(jnp.ones((2, 3, 4)))
      >>> y.shape, float(routing.dropped)  # equal tokens choose alike, and each expert is someone's first or second choice
      ((2, 3, 4), 0.0)
    """

    def __init__(
        self,
        features: int,
        hidden: int,
        experts: int,
        *,
        k: int = 2,
        capacity_factor: float = 1.25,
        activation: Callable[[jax.Array], jax.Array] = jax.nn.gelu,
        rngs: nnx.Rngs,
    ):
        if not 1 <= k <= experts:
            raise OptionError(f"MixtureOfExperts: k={k} of {experts} experts.", fix=f"from 1 to {max(experts, 1)}.")
        if not capacity_factor > 0:
            raise OptionError(f"MixtureOfExperts: capacity_factor={capacity_factor}.", fix="above 0, such as 1.25.")
        init = jax.nn.initializers.lecun_normal(in_axis=-2, out_axis=-1, batch_axis=0)
        named = lambda value, *names: nnx.Param(value, out_sharding=names, eager_sharding=False)
        self.router = named(init(rngs.params(), (1, features, experts))[0], "embed", None)
        self.up = named(init(rngs.params(), (experts, features, hidden)), "expert", "embed", "mlp")
        self.down = named(init(rngs.params(), (experts, hidden, features)), "expert", "mlp", "embed")
        self.k, self.capacity_factor, self.activation = k, capacity_factor, activation

    def __call__(self, x: jax.Array) -> tuple[jax.Array, Routing]:
        """The result, shaped as `x` [rows, features] or [rows, length, features], and how tokens were dealt out."""
        router, up, down = self.router[...], self.up[...], self.down[...]
        if x.ndim not in (2, 3) or x.shape[-1] != router.shape[0]:
            wanted = f"[rows, {router.shape[0]}] or [rows, length, {router.shape[0]}]"
            raise OptionError(f"MixtureOfExperts: x is {describe(x)}.", fix=f"{wanted}.")
        parallel = current()
        parallel.used.add(MIXTURE)
        axis = parallel.experts.axis
        if axis is not None:
            parallel.used.add("experts")
            axis = axis if parallel.axis_size(axis) > 1 else None
        axes, spec = _cut(parallel, axis, x, len(up))
        deal = functools.partial(_deal, axis=axis, k=self.k, factor=self.capacity_factor, activation=self.activation)
        whole, own = PartitionSpec(), PartitionSpec(axis)
        stats = PartitionSpec(axes or None)
        if axes:
            deal = parallel.shard_map(axes, deal, (spec, whole, own, own), (spec, stats, stats, stats))
        with jax.named_scope("experts"):
            y, chosen, likely, dropped = deal(x, router, up, down)
            # shares of tokens over all workers: they have no gradient, and so the mean of the workers' losses is that of all tokens
            workers = tuple(name for name in parallel.data if name in manual_axes())
            shares = collectives.all_reduce(jax.lax.stop_gradient(chosen.sum(axis=0)), workers)
        loss = len(up) * jnp.sum(shares / shares.sum() * likely.mean(axis=0))
        return y, Routing(loss, dropped.mean())


def _cut(parallel: ParallelConfig, axis: str | None, x: jax.Array, experts: int) -> tuple[tuple[str, ...], PartitionSpec]:
    """The mesh axes over which tokens are cut into groups, and the spec of `x`: of a sequence, dim 1 is cut, else the rows."""
    wanted = (parallel.sequence.axis if x.ndim == 3 else None, axis)
    along = tuple(name for name in dict.fromkeys(wanted) if name is not None and parallel.axis_size(name) > 1)
    rows, parts = parallel.auto_row_axes(x.shape[0]), math.prod(map(parallel.axis_size, along))
    if axis is not None and experts % parallel.axis_size(axis):
        count = parallel.axis_size(axis)
        raise OptionError(
            f'MixtureOfExperts ([experts] axis = "{axis}"): {experts} experts are not divisible by {count} devices: '
            f"{experts} / {count} leaves {experts % count}.",
            fix=f"{-(-experts // count) * count} experts.",
        )
    dim = x.ndim - 2
    size = x.shape[dim] // (1 if dim else math.prod(map(parallel.axis_size, rows)))
    if size % parts:
        near = sorted({max(parts, size // parts * parts), -(-size // parts) * parts})
        what, names = "a sequence of" if dim else "rows of each worker:", " and ".join(f'"{name}"' for name in along)
        raise DataError(
            f"MixtureOfExperts: {what} {size}, not divisible by {parts} devices along {names}: {size} / {parts} leaves {size % parts}.\n"
            f"    fix: {' or '.join(map(str, near))}."
        )
    spec = PartitionSpec(rows or None, along or None) if dim else PartitionSpec((*rows, *along) or None)
    return (*rows, *along), spec


def _deal(
    x: jax.Array, router: jax.Array, up: jax.Array, down: jax.Array, *, axis: str | None, k: int, factor: float, activation: Callable
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """One group of tokens through the experts, of which this device has some.

    Returns:
      The result; of each expert how many tokens choose it first, and its mean probability, float32[1, experts]; the share dropped,
      float32[1].
    """
    tokens, experts = x.reshape(-1, x.shape[-1]), router.shape[1]
    capacity = min(len(tokens), math.ceil(k * len(tokens) / experts * factor))
    likely = jax.nn.softmax(jnp.einsum("td,de->te", tokens, router, preferred_element_type=jnp.float32))
    weights, chosen = jax.lax.top_k(likely, k)
    weights = weights / weights.sum(axis=1, keepdims=True) if k > 1 else weights
    seats = _seats(chosen, experts, capacity)
    room = jnp.zeros((experts * capacity, x.shape[-1]), x.dtype)
    for choice in range(k):
        room = room.at[seats[:, choice]].set(tokens, mode="drop", unique_indices=True)
    out = _run(room.reshape(experts, capacity, -1), up.astype(x.dtype), down.astype(x.dtype), axis, activation)
    out = out.reshape(experts * capacity, -1)
    y = sum(weights[:, [n]].astype(x.dtype) * out.at[seats[:, n]].get(mode="fill", fill_value=0) for n in range(k))
    first = jax.nn.one_hot(chosen[:, 0], experts, dtype=jnp.float32).sum(axis=0, keepdims=True)
    lost = jnp.mean(seats >= experts * capacity, dtype=jnp.float32)
    return jnp.asarray(y).reshape(x.shape), first, likely.mean(axis=0, keepdims=True), lost[None]


def _seats(chosen: jax.Array, experts: int, capacity: int) -> jax.Array:
    """int32[tokens, k], the seat of every choice, of `capacity` at each expert; from  experts * capacity  on for those without one.

    >>> _seats(jnp.array([[0, 1], [0, 2], [0, 1]]), experts=3, capacity=2).tolist()  # expert 0 is wanted three times
    [[0, 2], [1, 4], [8, 3]]
    """
    tokens, k = chosen.shape
    wanted = chosen.T.reshape(-1)  # all first choices, then all second ones
    before = jnp.cumsum(jax.nn.one_hot(wanted, experts, dtype=jnp.int32), axis=0) - 1
    place = jnp.take_along_axis(before, wanted[:, None], axis=1)[:, 0]
    nowhere = experts * capacity + jnp.arange(k * tokens)  # each its own, so that no two are the same
    return jnp.where(place < capacity, wanted * capacity + place, nowhere).reshape(k, tokens).T


def _run(room: jax.Array, up: jax.Array, down: jax.Array, axis: str | None, activation: Callable[[Any], Any]) -> jax.Array:
    """What the experts make of [experts, capacity, features]: each on its own device along `axis`, which has some from everyone."""
    axes = () if axis is None else (axis,)
    devices, mine, capacity = collectives.worker_count(axes), len(up), room.shape[1]
    room = collectives.all_to_all(room.reshape(devices, mine, capacity, -1), axes)
    room = room.swapaxes(0, 1).reshape(mine, devices * capacity, -1)
    out = jnp.einsum("ech,ehd->ecd", activation(jnp.einsum("ecd,edh->ech", room, up)), down)
    out = out.reshape(mine, devices, capacity, -1).swapaxes(0, 1)
    return collectives.all_to_all(out, axes).reshape(devices * mine, capacity, -1)
