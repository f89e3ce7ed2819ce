"""Low-rank adapters (LoRA, Hu et al., arXiv:2106.09685) in the `nnx.Linear` layers of a module,
whose code stays as it is.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from spmd.base.path_match import matches, suggest
from spmd.errors import LayoutError, Problem, join_names, raise_problems
from spmd.models.base import STACKED
from spmd.models.blocks import modules_by_path
from spmd.models.intercept import intercept, interceptions, original_class

if TYPE_CHECKING:
    from spmd.layout.trained import Adapter

# Parameters of an adapter, in the layer beside its kernel.
NAMES = ("lora_a", "lora_b")


def add_adapters(
    module: nnx.Module, adapters: "Sequence[Adapter]", rngs: nnx.Rngs
) -> "dict[str, Adapter]":
    """Give every `nnx.Linear` whose path an adapter matches the parameters `lora_a` [in, rank] and
    `lora_b` [rank, out], in place.

    Of a stack's layer, whose kernel is [layers, in, out], they are [layers, in, rank] and [layers,
    rank, out]. `lora_a` is drawn uniformly from within 1 / sqrt(in), as PEFT does, and `lora_b` is
    zeros. They carry the kernel's logical axis names, lie as the kernel lies, and are in its dtype,
    or in float32 if that has fewer bits. The layer's class becomes a subclass of it, which adds the
    adapter's output.

    Args:
      rngs: draws `lora_a` from the stream `params`; the layers' own streams of dropout are split
        from `dropout`.

    Returns:
      The adapter of each layer, by path.

    Raises:
      LayoutError: an adapter that matches no `nnx.Linear`, a rank above min(in, out), two adapters
        for one layer: all at once.

    Example:
      >>> from spmd.layout.trained import Adapter
      >>> mlp = nnx.Sequential(
      ...     nnx.Linear(4, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 2, rngs=nnx.Rngs(1))
      ... )
      >>> list(add_adapters(mlp, [Adapter("layers/0", rank=2)], nnx.Rngs(2)))
      ['layers/0']
      >>> mlp.layers[0].lora_a.shape, mlp.layers[0].lora_b.shape, mlp(jnp.ones((1, 4))).shape
      ((4, 2), (2, 8), (1, 2))
    """
    modules = modules_by_path(module)
    chosen: dict[str, int] = {}
    problems = []
    for number in range(len(adapters)):
        problems += _problems(adapters, number, modules, chosen)
    raise_problems(LayoutError, "adapters do not fit the model", problems)
    for path, number in chosen.items():
        _adapt(modules[path], adapters[number], rngs)
    return {path: adapters[number] for path, number in chosen.items()}


def adapter_paths(module: nnx.Module) -> "dict[str, Adapter]":
    """Return the adapter of each layer that has one, by path.

    Example:
      >>> adapter_paths(nnx.Linear(4, 8, rngs=nnx.Rngs(0)))
      {}
    """
    layers = modules_by_path(module)
    return {path: sub.adapter for path, sub in layers.items() if _has_adapter(sub)}


def merge_adapters(module: nnx.Module) -> nnx.Module:
    """Return a module without adapters that computes the same: kernels are `kernel + scale *
    lora_a @ lora_b`, computed in float32.

    The given module stays as it is, and shares all arrays but those kernels with the result, which
    lie as they did.

    Example:
      >>> from spmd.layout.trained import Adapter
      >>> layer = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
      >>> _ = add_adapters(layer, [Adapter("**", rank=2)], nnx.Rngs(1))
      >>> type(merge_adapters(layer)).__name__, list(nnx.state(merge_adapters(layer)))
      ('Linear', ['bias', 'kernel'])
    """
    merged = nnx.clone(module)
    layers: list[Any] = [sub for _, sub in nnx.iter_modules(merged) if _has_adapter(sub)]
    for layer in layers:
        kernel, a, b = (getattr(layer, name).get_value() for name in ("kernel", *NAMES))
        add = jax.jit(_merged_kernel, static_argnums=3, out_shardings=_sharding(kernel))
        layer.kernel.set_value(add(kernel, a, b, layer.adapter.scale))
        for name in (*NAMES, "adapter", "lora_dropout"):
            delattr(layer, name)
        layer.__class__ = original_class(layer)
    return merged


def _has_adapter(module: Any) -> bool:
    return "adapter" in interceptions(module)


def _merged_kernel(kernel: jax.Array, a: jax.Array, b: jax.Array, scale: float) -> jax.Array:
    if kernel.dtype == jnp.float64:
        wide = jnp.float64
    else:
        wide = jnp.float32
    # By default GPUs and TPUs round factors of float32 products to fewer bits.
    delta = jnp.matmul(a.astype(wide), b.astype(wide), precision="highest")
    return (kernel.astype(wide) + scale * delta).astype(kernel.dtype)


def _problems(
    adapters: "Sequence[Adapter]", number: int, modules: dict[str, Any], chosen: dict[str, int]
) -> Iterator[Problem]:
    """Yield the problems of an adapter; the layers that it is for are added to `chosen`."""
    adapter = adapters[number]
    where = f'{_name(adapters, number)}, modules "{adapter.modules}"'
    at: Any = {"rule": number + 1, "line": adapter.line}
    layers = [path for path, sub in modules.items() if isinstance(sub, nnx.Linear)]
    matched = matches(adapter.modules, layers)
    if not matched:
        yield Problem(where, *_no_match(adapter.modules, modules, layers), **at, kind="no_match")
        return
    left = matched
    for pattern in adapter.except_:
        excepted = matches(pattern, matched)
        left = [path for path in left if path not in excepted]
        if not excepted:
            near = suggest(pattern, matched)
            fix = f"one of {join_names(matched)}."
            if near:
                fix = f'did you mean "{near[0]}"?'
            yield Problem(
                f'{where}, except "{pattern}"',
                ["it matches no layer of this adapter."],
                fix,
                **at,
                kind="no_match",
            )
    if not left:
        yield Problem(
            where,
            ["its except leaves no layer of it."],
            "an except that leaves some.",
            **at,
            kind="conflict",
        )
    wide: dict[tuple[int, int], list[str]] = {}
    for path in left:
        sizes = modules[path].in_features, modules[path].out_features
        if _has_adapter(modules[path]):
            fix = f'except = ["{path}"]; the adapters that a model has are trained.'
            yield Problem(
                where,
                [f"{path} of the model has an adapter already."],
                fix,
                path=path,
                **at,
                kind="conflict",
            )
        elif path in chosen:
            why = f"{path} has an adapter already, of {_name(adapters, chosen[path])}."
            yield Problem(
                where,
                [why],
                f'except = ["{path}"] in one of the two.',
                path=path,
                **at,
                kind="conflict",
            )
        elif adapter.rank > min(sizes):
            wide.setdefault(sizes, []).append(path)
        chosen.setdefault(path, number)
    for (inputs, outputs), paths in wide.items():
        why = (
            f"rank {adapter.rank} is above min(in, out) of {join_names(paths)}: min({inputs}, "
            f"{outputs}) = {min(inputs, outputs)}."
        )
        fix = f"a rank of at most {min(inputs, outputs)}."
        yield Problem(where, [why], fix, path=paths[0], **at, kind="invalid_value")


def _name(adapters: "Sequence[Adapter]", number: int) -> str:
    name = f"[[adapters]] rule {number + 1}"
    if adapters[number].line:
        name += f", line {adapters[number].line}"
    return name


def _no_match(pattern: str, modules: dict[str, Any], layers: list[str]) -> tuple[list[str], str]:
    """Return why a pattern matches no layer, and a fix that does."""
    fix = "this model has no nnx.Linear."
    if layers:
        fix = f"layers that can have one: {join_names(layers)}."
    others = [
        f"{path} ({type(modules[path]).__name__})"
        for path in matches(pattern, filter(None, modules))
    ]
    if others:
        inside = matches(f"{pattern}/**", layers)
        if inside:
            fix = f'modules = "{pattern}/**" for the {len(inside)} nnx.Linear inside.'
        why = f"it matches {join_names(others)}, and only nnx.Linear layers can have an adapter."
        return [why], fix
    if matches(pattern, [f"{path}/{name}" for path in layers for name in ("kernel", "bias")]):
        above = pattern.rpartition("/")[0]
        if matches(above, layers):
            fix = f'modules = "{above}".'
        return ["it matches parameters, and here a path names layers."], fix
    near = suggest(pattern, layers)
    if near:
        fix = f'did you mean "{near[0]}", which matches {near[1]}?'
    return ["it matches no module of the model."], fix


def _adapt(layer: Any, adapter: "Adapter", rngs: nnx.Rngs) -> None:
    """Give a layer an adapter."""
    kernel = layer.kernel.get_value()
    metadata = layer.kernel.get_metadata()
    first, second = adapter_shapes(kernel, adapter.rank)
    bound = kernel.shape[-2] ** -0.5
    key = rngs.params()
    draw = functools.partial(
        jax.random.uniform, shape=first.shape, dtype=first.dtype, minval=-bound, maxval=bound
    )
    zeros = functools.partial(jnp.zeros, second.shape, second.dtype)
    layer.lora_a = _param(jax.jit(draw, out_shardings=first.sharding)(key), metadata, without=-1)
    layer.lora_b = _param(jax.jit(zeros, out_shardings=second.sharding)(), metadata, without=-2)
    layer.adapter = adapter
    layer.lora_dropout = nnx.data(None)
    if adapter.dropout:
        layer.lora_dropout = nnx.Dropout(adapter.dropout)
        if kernel.ndim > 2:
            layer.lora_dropout.rngs = rngs.dropout.split(kernel.shape[:-2])
        else:
            layer.lora_dropout.rngs = rngs.dropout.fork()
    intercept(layer, {"adapter": _add_adapter}, name=f"Adapted{type(layer).__name__}")


def adapter_shapes(kernel: Any, rank: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Shape, dtype and sharding of `lora_a` and `lora_b` for a kernel [..., in, out]."""
    *stack, inputs, outputs = kernel.shape
    if kernel.dtype.itemsize > 2:
        dtype = kernel.dtype
    else:
        dtype = jnp.dtype(jnp.float32)
    a = jax.ShapeDtypeStruct((*stack, inputs, rank), dtype, sharding=_sharding(kernel, without=-1))
    b = jax.ShapeDtypeStruct((*stack, rank, outputs), dtype, sharding=_sharding(kernel, without=-2))
    return a, b


def _param(value: jax.Array, kernel: dict[str, Any], without: int) -> nnx.Param:
    """Return a parameter with the kernel's metadata, but for the name of the dim that is the
    adapter's rank instead.
    """
    # Eager sharding (flax 0.12) would move it, which lies as the kernel lies.
    param = nnx.Param(value, eager_sharding=False)
    names = kernel.get("out_sharding")
    if names:
        param.set_metadata("out_sharding", _blank(names, without))
    if STACKED in kernel:
        param.set_metadata(STACKED, kernel[STACKED])
    return param


def _blank(entries: Sequence[Any], dim: int) -> tuple[Any, ...]:
    blanked = list(entries)
    blanked[dim] = None
    return tuple(blanked)


def _sharding(kernel: Any, without: int | None = None) -> Sharding | None:
    """Return the sharding of a kernel, if it has one yet; `without`: a dim that is not sharded."""
    if isinstance(kernel, Tracer) or not isinstance(kernel, jax.Array):
        return None
    if without is None or not isinstance(kernel.sharding, NamedSharding):
        return kernel.sharding
    # JAX leaves out entries of the last dims where these are not sharded.
    spec = [*kernel.sharding.spec]
    spec += [None] * (kernel.ndim - len(spec))
    return NamedSharding(kernel.sharding.mesh, PartitionSpec(*_blank(spec, without)))


def _add_adapter(
    call: Callable[..., Any], layer: Any, /, inputs: jax.Array, *args: Any, **kwargs: Any
) -> jax.Array:
    """Add what the adapter of an `nnx.Linear` computes, in the adapter's dtype if the layer has
    none.
    """
    y = call(layer, inputs, *args, **kwargs)
    a = layer.lora_a[...]
    b = layer.lora_b[...]
    x = inputs
    if layer.lora_dropout is not None:
        x = layer.lora_dropout(inputs)
    x, a, b = layer.promote_dtype((x.astype(a.dtype), a, b), dtype=layer.dtype)
    contraction = (((x.ndim - 1,), (0,)), ((), ()))
    low = layer.adapter.scale * layer.dot_general(x, a, contraction, precision=layer.precision)
    return y + layer.dot_general(low, b, contraction, precision=layer.precision).astype(y.dtype)
