"""Workarounds for XLA, each with the versions that need it, and what is private to JAX and Flax in
fact: names of classes and files, scopes, printed programs.

Two other files use what is private to JAX: `distributed/coordination.py` and
`planner/gpu_kernels.py`.
"""

import functools
import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax.core import tracers
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec


def simulate_cpus(count: int) -> None:
    """Make JAX start with `count` CPU devices, and with enough threads that programs in flight
    cannot block one another.

    XLA:CPU starts `max(devices, processors)` threads. A collective holds one thread per device
    until all devices have reached it: a loop that dispatches programs without waiting can fill the
    threads with parts of different collectives, and after 40 seconds XLA ends the process (jaxlib
    0.10, 0.11). It takes the number of processors from NPROC if set, which nothing else in JAX
    reads; a value that the user has set stays.

    Raises:
      RuntimeError: JAX was initialized already.
    """
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)
    os.environ.setdefault("NPROC", str(max(4 * count, os.cpu_count() or 1)))


def largest_magnitude(x: jax.Array, dims: int | Sequence[int]) -> jax.Array:
    """The largest |x| of a float32 array over some dims, which are kept with size 1; NaN if one is
    NaN, and 0 of nothing.

    XLA:CPU loses a NaN in the maximum of floats of some thousand elements (jaxlib 0.10). Bits of
    floats that are not negative, as integers, have the order of the floats, with infinity and then
    NaN last.

    >>> largest_magnitude(jnp.array([[1.0, -2.0], [jnp.nan, 3.0]]), -1).tolist()
    [[2.0], [nan]]
    """
    bits = lax.bitcast_convert_type(jnp.abs(x), jnp.int32).max(dims, keepdims=True, initial=0)
    return lax.bitcast_convert_type(bits, jnp.float32)


def to_bits(x: jax.Array) -> jax.Array:
    """Unsigned integers with the same bits as an array of floats; any other array unchanged.

    XLA:CPU computes fusions of narrower floats in float32, even where values are only moved: that
    loses the payload of a NaN (jaxlib 0.10), and subnormal numbers on processors that round to
    bfloat16 in hardware (0.11, AVX512-BF16). Partitioning may add zeros to values that it moves,
    which loses the sign of a zero. Integers are not affected, unless the bit cast is fused with the
    operation that follows (0.11), hence the barriers.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return lax.optimization_barrier(lax.bitcast_convert_type(x, f"uint{jnp.finfo(x.dtype).bits}"))


def from_bits(x: jax.Array, dtype: Any) -> jax.Array:
    """The inverse of `to_bits`."""
    if x.dtype == dtype:
        return x
    return lax.bitcast_convert_type(lax.optimization_barrier(x), dtype)


def move_bits(move: Callable[[Any], Any], tree: Any) -> Any:
    """`move(tree)` with no bit of a value changed, for a function that pads with zeros, slices,
    concatenates or reorders. No gradient.

    >>> move_bits(lambda x: x[::-1], jnp.arange(3.0)).tolist()
    [2.0, 1.0, 0.0]
    """
    moved = move(jax.tree.map(lambda leaf: to_bits(jnp.asarray(leaf)), tree))
    return jax.tree.map(
        lambda leaf, like: from_bits(leaf, like.dtype), moved, jax.eval_shape(move, tree)
    )


def varying_axes(x: Any) -> frozenset[str]:
    """The manual mesh axes along which `jax.shard_map` takes an array to vary; none under
    `check_vma=False`. (`vma` before jax 0.10.)
    """
    kind = jax.typeof(x)
    if hasattr(kind, "mat"):
        return kind.mat.varying
    return kind.vma


def varying_alike(values: list[Any]) -> list[Any]:
    """Return the arrays, each marked as varying along all manual mesh axes along which any of them
    varies.
    """
    axes = frozenset[str]().union(*map(varying_axes, values))
    alike = []
    for value in values:
        missing = tuple(sorted(axes - varying_axes(value)))
        if missing:
            value = lax.pcast(value, missing, to="varying")
        alike.append(value)
    return alike


def replicate(x: jax.Array) -> jax.Array:
    """The array replicated over its mesh, bit for bit; all processes call this."""
    sharding = NamedSharding(x.sharding.mesh, PartitionSpec())  # type: ignore[attr-defined]
    bits = jax.jit(to_bits, out_shardings=sharding)(x)
    return jax.jit(from_bits, static_argnums=1)(bits, x.dtype)


def shard_map(
    function: Callable[..., Any],
    *,
    in_specs: Any,
    out_specs: Any,
    mesh: Mesh | AbstractMesh | None = None,
    axis_names: Collection[str] = (),
) -> Callable[..., Any]:
    """Return `jax.shard_map` of a function without the replication check; specs name only manual
    axes.

    >>> mesh, spec = jax.make_mesh((1,), ("data",)), PartitionSpec("data")
    >>> twice = shard_map(lambda x: 2 * x, mesh=mesh, in_specs=spec, out_specs=spec)
    >>> jax.jit(twice)(jnp.zeros((1, 0))).shape
    (1, 0)
    """

    @functools.wraps(function)
    def call_mapped(*arguments: Any) -> Any:
        leaves, structure = jax.tree.flatten(arguments)
        specs = jax.tree.leaves(jax.tree.broadcast(in_specs, arguments))
        current_mesh = mesh or jax.sharding.get_abstract_mesh()

        def local_shape_dtype(leaf: Any, spec: PartitionSpec) -> tuple[tuple[int, ...], Any]:
            return NamedSharding(current_mesh, spec).shard_shape(leaf.shape), leaf.dtype  # type: ignore[arg-type]

        # Arrays without elements are created inside, not passed: jaxlib 0.11 crashes (segmentation
        # fault) compiling a program that passes one.
        empty = {
            n: local_shape_dtype(leaf, specs[n])
            for n, leaf in enumerate(leaves)
            if not jnp.size(leaf)
        }
        passed = [n for n in range(len(leaves)) if n not in empty]

        @functools.wraps(function)
        def inside(*shards: jax.Array) -> Any:
            local_leaves = dict(zip(passed, shards, strict=True)) | {
                n: jnp.zeros(*shape_dtype) for n, shape_dtype in empty.items()
            }
            return function(
                *jax.tree.unflatten(structure, [local_leaves[n] for n in range(len(leaves))])
            )

        mapped = jax.shard_map(
            inside,
            mesh=mesh,
            in_specs=tuple(specs[n] for n in passed),
            out_specs=out_specs,
            axis_names=set(axis_names),
            check_vma=False,
        )
        return mapped(*(leaves[n] for n in passed))

    return call_mapped


# Private in fact -----------------------------------------------------------------------------
# None of what follows is in JAX's or Flax's documentation: each function is checked against the
# oldest and the newest version that the library takes.


def scope_of(equation: Any) -> str:
    """Return the names of scopes that an equation of a jaxpr is in, such as "jvp(Block)/attend"."""
    return str(equation.source_info.name_stack)


def in_scope(equation: Any, name: str) -> Any:
    """Return an equation of a jaxpr in one more scope, inside those that it is in."""
    source = equation.source_info
    return equation.replace(source_info=source.replace(name_stack=source.name_stack.extend(name)))


def joined_sources(caller: Any, source: Any) -> Any:
    """Return the `source_info` of an equation inside a call, once the call is inlined: in the
    scopes of its caller too.
    """
    return source.replace(name_stack=caller.name_stack + source.name_stack)


def with_others(jaxpr: Any, **changes: Any) -> Any:
    """Return a jaxpr with other inputs, outputs and equations, without names of its variables: JAX
    checks that there are as many names as variables.
    """
    return jaxpr.replace(**changes, debug_info=jaxpr.debug_info.with_unknown_names())


def compiled_count(function: Any) -> int:
    """Return how many programs a jitted function has compiled, one for each kind of arguments."""
    return function._cache_size()


def defined_in(equation: Any) -> str:
    """Return the file of the function that an equation of a jaxpr runs: one with a derivative of
    its own, or one on shards; "" if it is not known.
    """
    inner = equation.params.get("call_jaxpr", equation.params.get("jaxpr"))
    debug_info = getattr(getattr(inner, "jaxpr", inner), "debug_info", None)
    return getattr(debug_info, "func_filename", None) or ""


def source_lines(equation: Any) -> list[tuple[str, int]]:
    """Return the (file, line) of each Python call that an equation of a jaxpr comes from, innermost
    first; [] if they were not recorded.
    """
    traceback = equation.source_info.traceback
    frames = ()
    if traceback:
        frames = traceback.frames
    return [(frame.file_name, frame.line_num) for frame in frames]


def is_of_jax(equation: Any) -> bool:
    """Return whether an equation of a jaxpr runs a function that JAX itself defines."""
    return defined_in(equation).startswith(str(Path(jax.__file__).parent))


def has_shardings(equation: Any) -> bool:
    """Return whether a jit says how its inputs or outputs are sharded. JAX has no public name for
    a sharding that was not given.
    """
    params = equation.params
    shardings = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    return any(type(sharding).__name__ != "UnspecifiedValue" for sharding in shardings)


def printed(program: Any) -> str:
    """Return the text of a program, or of another param of an equation, which equal ones share:
    jaxprs have no equality of their own, and are printed with variables named in order.
    """
    return str(program)


def concerns_sharding_types(error: Exception) -> bool:
    """Return whether JAX raised an error for a sharding that is part of an array's type."""
    return type(error).__name__ == "ShardingTypeError"


def current_trace() -> Any:
    """Return an object that is another one inside of every transformation of JAX."""
    return tracers.current_trace()
