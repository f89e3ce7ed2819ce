"""A mixture of experts: a router sends each token to a few of many small networks."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from spmd.base.tree import describe
from spmd.errors import DataError, OptionError, option
from spmd.layout.fixes import near_multiples
from spmd.nn.parallel_context import MIXTURE, ParallelConfig, current, manual_axes
from spmd.wire import collectives


class Routing(NamedTuple):
    """The routing of tokens in one call; scalars, float32.

    Attributes:
      loss: 1 when all experts get the same share of tokens, up to the number of experts when one
        gets all. Add it to the loss, scaled by 0.01 or so.
      dropped: the share of choices for which the expert had no capacity. Such a token keeps its
        other choices, or becomes zeros.
    """

    loss: jax.Array
    dropped: jax.Array


class MixtureOfExperts(nnx.Module):
    """`experts` networks of two layers, of which every token goes through `k`, chosen by a router.

    The router is softmax(x W) in float32; a token's result is the sum of its `k` best experts'
    results, weighted by their probabilities, which are normalised to sum to 1 for k > 1 (Lepikhin
    et al., GShard, arXiv:2006.16668, algorithm 1) and are used as they are for k = 1 (Fedus et al.,
    Switch Transformer, arXiv:2101.03961, equation 2). An expert has a capacity of ceil(k * tokens /
    experts * capacity_factor)  tokens of a *group*. First choices take their places before second
    ones, earlier tokens before later ones, and tokens beyond the capacity are dropped, which needs
    no communication. A group is the tokens that one device routes: all tokens on one device; a
    worker's tokens under data parallelism; and where a layout shards sequences or experts, a
    device's shard of those along dim 1. If no token is dropped, the result does not depend on the
    mesh; otherwise it depends on the groups.

    Under  [experts] axis = "expert"  each device of the axis has some of the experts, and one
    all-to-all sends the tokens to them, another one back. Weights carry the logical axis names
    "expert", "embed" and "mlp", so that  [axes] expert = "expert"  shards them.

    The loss of `Routing` is that of Switch Transformer (equations 4 to 6), of first choices, with
    the shares of all workers. Under `accumulate` it is that of each microbatch, over all workers;
    their mean is not the loss of the batch, and a note says so.

    Args:
      features: of a token, in and out; `hidden`: between an expert's two layers; `experts`: how
        many.
      k: experts for each token.
      capacity_factor: capacity, relative to an even distribution of tokens.
      activation: between the layers.

    Raises:
      OptionError: numbers out of range, or a number of experts that the axis does not divide.
      DataError: the axis does not divide the tokens.

    Example:
      >>> moe = MixtureOfExperts(4, 8, 2, rngs=nnx.Rngs(0))
      >>> y, routing = moe(jnp.ones((2, 3, 4)))
      >>> (
      ...     y.shape,
      ...     float(routing.dropped),
      ... )  # equal tokens choose the same experts, and each expert is a first or second choice
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
            raise OptionError(
                f"MixtureOfExperts: k={k} of {experts} experts.",
                fix=f"from 1 to {max(experts, 1)}.",
            )
        if not capacity_factor > 0:
            raise OptionError(
                f"MixtureOfExperts: capacity_factor={capacity_factor}.",
                fix="above 0, such as 1.25.",
            )
        init = jax.nn.initializers.lecun_normal(in_axis=-2, out_axis=-1, batch_axis=0)
        # Eager sharding (flax 0.12) would take the logical names for mesh axes.
        param = functools.partial(nnx.Param, eager_sharding=False)
        router = init(rngs.params(), (1, features, experts))[0]
        up = init(rngs.params(), (experts, features, hidden))
        down = init(rngs.params(), (experts, hidden, features))
        self.router = param(router, out_sharding=("embed", None))
        self.up = param(up, out_sharding=("expert", "embed", "mlp"))
        self.down = param(down, out_sharding=("expert", "mlp", "embed"))
        self.k = k
        self.capacity_factor = capacity_factor
        self.activation = activation

    def __call__(self, x: jax.Array) -> tuple[jax.Array, Routing]:
        """Return the result, shaped as `x` [rows, features] or [rows, length, features], and the
        routing of tokens.
        """
        router = self.router[...]
        up = self.up[...]
        down = self.down[...]
        if x.ndim not in (2, 3) or x.shape[-1] != router.shape[0]:
            fix = f"[rows, {router.shape[0]}] or [rows, length, {router.shape[0]}]."
            raise OptionError(f"MixtureOfExperts: x is {describe(x)}.", fix=fix)
        parallel = current()
        parallel.used.add(MIXTURE)
        axis = parallel.experts.axis
        if axis is not None:
            parallel.used.add("experts")
            if not parallel.axis_size(axis) > 1:
                axis = None
        axes, spec = _token_axes(parallel, axis, x, len(up))
        route = functools.partial(
            _route, axis=axis, k=self.k, factor=self.capacity_factor, activation=self.activation
        )
        replicated = PartitionSpec()
        by_expert = PartitionSpec(axis)
        stats = PartitionSpec(axes or None)
        if axes:
            route = parallel.shard_map(
                axes, route, (spec, replicated, by_expert, by_expert), (spec, stats, stats, stats)
            )
        with jax.named_scope("experts"):
            y, chosen, likely, dropped = tokens_in_groups(route, x, router, up, down)
            # The shares of all workers have no gradient, so the mean of the workers' losses is the
            # loss of all tokens.
            workers = parallel.reading
            if not workers:
                workers = tuple(name for name in parallel.data if name in manual_axes())
            shares = collectives.all_reduce(jax.lax.stop_gradient(chosen.sum(axis=0)), workers)
        shares = shares / shares.sum()
        loss = len(up) * jnp.sum(shares * likely.mean(axis=0))
        return y, Routing(loss, dropped.mean())


def microbatch_notes(parallel: ParallelConfig, rows: int, count: int) -> list[str]:
    """Return a note on a mixture of experts in a loss that is called on `count` microbatches of a
    batch of `rows` rows.
    """
    if count == 1 or MIXTURE not in parallel.used:
        return []
    computed = (
        f"capacity and Routing.loss are computed for each of {count} microbatches of "
        f"{rows // count} rows"
    )
    of_batch = f"and not for the {rows} rows of a batch, as with {option('accumulate', 1)}"
    return [f"note: MixtureOfExperts under {option('accumulate', count)}: {computed}, {of_batch}."]


# The name by which `train/batch_rows` finds a function in a traced loss.
ROUTES = "tokens_in_groups"


@functools.partial(jax.jit, static_argnums=0)
def tokens_in_groups(route: Callable[..., Any], *arrays: jax.Array) -> Any:
    """Return `route(*arrays)`, by a name with which a reader of the traced loss finds it: workers
    route their own tokens, as one group each.
    """
    return route(*arrays)


def _token_axes(
    parallel: ParallelConfig, axis: str | None, x: jax.Array, experts: int
) -> tuple[tuple[str, ...], PartitionSpec]:
    """Return the mesh axes over which tokens are sharded into groups, and the spec of `x`: a
    sequence is sharded along dim 1, else the rows.
    """
    names = [axis]
    if x.ndim == 3:
        names.insert(0, parallel.sequence.axis)
    along = tuple(
        name for name in dict.fromkeys(names) if name is not None and parallel.axis_size(name) > 1
    )
    rows = parallel.auto_row_axes(x.shape[0])
    parts = math.prod(map(parallel.axis_size, along))
    count = parallel.axis_size(axis)
    if experts % count:
        why = (
            f"{experts} experts are not divisible by {count} devices: {experts} / {count} leaves "
            f"{experts % count}."
        )
        raise OptionError(
            f'MixtureOfExperts ([experts] axis = "{axis}"): {why}',
            fix=f"{-(-experts // count) * count} experts.",
        )
    if x.ndim == 3:
        size = x.shape[1]
        sized = "a sequence of"
        spec = PartitionSpec(rows or None, along or None)
    else:
        size = x.shape[0] // math.prod(map(parallel.axis_size, rows))
        sized = "rows of each worker:"
        spec = PartitionSpec((*rows, *along) or None)
    if size % parts:
        quoted = " and ".join(f'"{name}"' for name in along)
        why = (
            f"{sized} {size}, not divisible by {parts} devices along {quoted}: {size} / {parts} "
            f"leaves {size % parts}."
        )
        raise DataError(f"MixtureOfExperts: {why}", fix=f"{near_multiples(size, parts)}.")
    return (*rows, *along), spec


def _route(
    x: jax.Array,
    router: jax.Array,
    up: jax.Array,
    down: jax.Array,
    *,
    axis: str | None,
    k: int,
    factor: float,
    activation: Callable,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Run one group of tokens through the experts, some of which are on this device.

    Returns:
      The result; for each expert the number of tokens that choose it first, and its mean
      probability, float32[1, experts]; the share of dropped choices, float32[1].
    """
    tokens = x.reshape(-1, x.shape[-1])
    experts = router.shape[1]
    capacity = min(len(tokens), math.ceil(k * len(tokens) / experts * factor))
    # The router computes in float32, whatever the precision (Switch Transformer, section 2.4).
    scores = jnp.einsum("td,de->te", tokens, router, preferred_element_type=jnp.float32)
    likely = jax.nn.softmax(scores)
    weights, chosen = jax.lax.top_k(likely, k)
    if k > 1:
        weights = weights / weights.sum(axis=1, keepdims=True)
    slots = _slots(chosen, experts, capacity)
    # Dropped choices have slots behind the end, which a scatter leaves out, and a gather fills.
    buffer = jnp.zeros((experts * capacity, x.shape[-1]), x.dtype)
    for choice in range(k):
        buffer = buffer.at[slots[:, choice]].set(tokens, mode="drop", unique_indices=True)
    buffer = buffer.reshape(experts, capacity, -1)
    up = up.astype(x.dtype)
    down = down.astype(x.dtype)
    out = _run_experts(buffer, up, down, axis, activation)
    out = out.reshape(experts * capacity, -1)
    y: Any = 0
    for choice in range(k):
        chosen_out = out.at[slots[:, choice]].get(mode="fill", fill_value=0)
        y += weights[:, [choice]].astype(x.dtype) * chosen_out
    first = jax.nn.one_hot(chosen[:, 0], experts, dtype=jnp.float32)
    counts = first.sum(axis=0, keepdims=True)
    likely = likely.mean(axis=0, keepdims=True)
    dropped = jnp.mean(slots >= experts * capacity, dtype=jnp.float32)
    return jnp.asarray(y).reshape(x.shape), counts, likely, dropped[None]


def _slots(chosen: jax.Array, experts: int, capacity: int) -> jax.Array:
    """int32[tokens, k]: the slot of every choice, of `capacity` slots for each expert; dropped
    choices get  experts * capacity  or more.

    >>> _slots(
    ...     jnp.array([[0, 1], [0, 2], [0, 1]]), experts=3, capacity=2
    ... ).tolist()  # expert 0 is wanted three times
    [[0, 2], [1, 4], [8, 3]]
    """
    tokens, k = chosen.shape
    # All first choices, then all second ones.
    ordered = chosen.T.reshape(-1)
    is_chosen = jax.nn.one_hot(ordered, experts, dtype=jnp.int32)
    before = jnp.cumsum(is_chosen, axis=0) - 1
    place = jnp.take_along_axis(before, ordered[:, None], axis=1)[:, 0]
    # All different, since the scatter declares its indices unique.
    dropped = experts * capacity + jnp.arange(k * tokens)
    slots = jnp.where(place < capacity, ordered * capacity + place, dropped)
    return slots.reshape(k, tokens).T


def _run_experts(
    buffer: jax.Array,
    up: jax.Array,
    down: jax.Array,
    axis: str | None,
    activation: Callable[[Any], Any],
) -> jax.Array:
    """Return the experts' outputs for [experts, capacity, features]; the devices of `axis` exchange
    tokens before and after.
    """
    axes = ()
    if axis is not None:
        axes = (axis,)
    devices = collectives.worker_count(axes)
    local = len(up)
    capacity = buffer.shape[1]
    buffer = collectives.all_to_all(buffer.reshape(devices, local, capacity, -1), axes)
    buffer = buffer.swapaxes(0, 1).reshape(local, devices * capacity, -1)
    out = jnp.einsum("ech,ehd->ecd", activation(jnp.einsum("ecd,edh->ech", buffer, up)), down)
    out = out.reshape(local, devices, capacity, -1).swapaxes(0, 1)
    return collectives.all_to_all(out, axes).reshape(devices * local, capacity, -1)
