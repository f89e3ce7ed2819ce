"""Where XLA does not do what its operations say, and what is done about it; each with the versions in which it was seen."""

import functools
import os
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec


def simulate_cpus(count: int) -> None:
    """Let JAX start with `count` CPU devices, and with enough threads that programs in flight cannot block one another.

    XLA:CPU starts `max(devices, processors)` threads. A collective holds one on every device until all devices have reached it: a loop
    that dispatches programs without waiting fills them with parts of different collectives, and after 40 seconds XLA ends the process
    (jaxlib 0.10, 0.11). It takes the number of processors from NPROC when that is set, which nothing else in JAX reads; a value of the
    user's own stays.

    Raises:
      RuntimeError: JAX has started already.
    """
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)
    os.environ.setdefault("NPROC", str(max(4 * count, os.cpu_count() or 1)))


def to_bits(x: jax.Array) -> jax.Array:
    """Unsigned integers with the same bits as an array of floats; any other array as it is.

    XLA:CPU computes in float32 what it fuses of narrower floats, even where numbers are only moved: that loses the payload of a NaN
    (jaxlib 0.10), and subnormal numbers where the processor itself rounds to bfloat16 (0.11, AVX512-BF16). Partitioning may add zeros to
    what it moves, which loses the sign of a zero. Integers stay as they are; but not if the conversion to them is fused with what is
    done to them (0.11), hence the barriers.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return lax.optimization_barrier(lax.bitcast_convert_type(x, f"uint{jnp.finfo(x.dtype).bits}"))


def from_bits(x: jax.Array, dtype: Any) -> jax.Array:
    """The inverse of `to_bits`."""
    return x if x.dtype == dtype else lax.bitcast_convert_type(lax.optimization_barrier(x), dtype)


def move_bits(move: Callable[[Any], Any], tree: Any) -> Any:
    """`move(tree)`, of a function that pads (with zeros), slices, joins or reorders: no bit of a number changes. It has no gradient.

    >>> move_bits(lambda x: x[::-1], jnp.arange(3.0)).tolist()
    [2.0, 1.0, 0.0]
    """
    moved = move(jax.tree.map(lambda leaf: to_bits(jnp.asarray(leaf)), tree))
    return jax.tree.map(lambda leaf, like: from_bits(leaf, like.dtype), moved, jax.eval_shape(move, tree))


def replicate(x: jax.Array) -> jax.Array:
    """The same bits, the whole array on every device of its mesh; all processes call this."""
    at = NamedSharding(x.sharding.mesh, PartitionSpec())  # type: ignore[attr-defined]
    bits = jax.jit(to_bits, out_shardings=at)(x)
    return jax.jit(from_bits, static_argnums=1)(bits, x.dtype)


def shard_map(
    function: Callable[..., Any],
    *,
    in_specs: Any,
    out_specs: Any,
    mesh: Mesh | AbstractMesh | None = None,
    axis_names: Collection[str] = (),
) -> Callable[..., Any]:
    """`jax.shard_map` that checks no replication; specs name no axes but the manual ones.

    Arrays without elements are not passed, but made inside: jaxlib 0.11 dies compiling a program that passes one (segmentation fault).

    >>> mesh, spec = jax.make_mesh((1,), ("data",)), PartitionSpec("data")
    >>> twice = shard_map(lambda x: 2 * x, mesh=mesh, in_specs=spec, out_specs=spec)
    >>> jax.jit(twice)(jnp.zeros((1, 0))).shape
    (1, 0)
    """

    @functools.wraps(function)
    def run(*arguments: Any) -> Any:
        leaves, structure = jax.tree.flatten(arguments)
        specs = jax.tree.leaves(_on_leaves(in_specs, arguments), is_leaf=_is_spec)
        within = mesh or jax.sharding.get_abstract_mesh()
        local = lambda leaf, spec: NamedSharding(within, spec).shard_shape(leaf.shape)  # type: ignore[arg-type]
        empty = {n: (local(leaf, specs[n]), leaf.dtype) for n, leaf in enumerate(leaves) if not jnp.size(leaf)}
        full = [n for n in range(len(leaves)) if n not in empty]

        @functools.wraps(function)
        def inside(*given: jax.Array) -> Any:
            found = dict(zip(full, given, strict=True)) | {n: jnp.zeros(*of) for n, of in empty.items()}
            return function(*jax.tree.unflatten(structure, [found[n] for n in range(len(leaves))]))

        mapped = jax.shard_map(
            inside, mesh=mesh, in_specs=tuple(specs[n] for n in full), out_specs=out_specs, axis_names=set(axis_names), check_vma=False
        )
        return mapped(*(leaves[n] for n in full))

    return run


def _on_leaves(specs: Any, tree: Any) -> Any:
    """A spec for every leaf, from one for each part of the tree."""
    return jax.tree.map(lambda spec, part: jax.tree.map(lambda _: spec, part), specs, tree, is_leaf=_is_spec)


def _is_spec(node: Any) -> bool:
    return isinstance(node, PartitionSpec)
