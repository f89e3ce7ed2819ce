"""Stacks structurally equal nnx modules into one module whose arrays have the layers along dim 0,
and unstacks them.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.errors import TraceContextError
from jax.ad_checkpoint import checkpoint_name

from spmd.base.tree import Tree, describe, flatten
from spmd.errors import ModelError, type_name
from spmd.jaxpr.primitives import Kind, known, of_kind
from spmd.jaxpr.programs import equations, inner_jaxprs
from spmd.layout.fixes import first_names
from spmd.models.base import LAYER_PARAMS, PATH, RECOMPUTED, STACKED
from spmd.nn.gathered_scan import Stack, scan_gathered
from spmd.nn.parallel_context import ParallelConfig, named_layers

PLAIN = (bool, int, float, str, type(None))
UNKNOWN = "..."
# of a parameter that is gathered, what is not kept for the backward pass either
CONVERSIONS = ("convert_element_type", "bitcast_convert_type", "reduce_precision", "name")
MOVES = of_kind(Kind.MOVEMENT).union(CONVERSIONS)
# What a compiler computes again in each kernel that uses it, rather than to write and read it.
# Results of comparisons stay: a mask is smaller.
COMPUTED_AGAIN = {
    *(name for name in of_kind(Kind.ELEMENTWISE) if not known(name).flat),
    *("broadcast_in_dim", "iota", "reshape", "sign", "squeeze"),
} - {"name"}


@dataclasses.dataclass(frozen=True)
class Repeated:
    """Layers made by `repeat`: their number, and one module with the arrays of all, [layers, ...]
    each.
    """

    count: int
    module: nnx.Module


def repeat(count: int, make: Callable[[nnx.Rngs], nnx.Module], rngs: nnx.Rngs) -> Repeated:
    """`count` layers from `make`, for `LayerStack` and `RNNStack`. The initialization is compiled
    once for all layers.

    A list of layers compiles it for each. Every layer has its own keys, split from `rngs`.

    Args:
      count: the number of layers, from 1.
      make: takes `nnx.Rngs`, returns a layer.
      rngs: of the stack; the layers' keys are split from them.

    Returns:
      The layers, which `LayerStack` and `RNNStack` take in place of a list.

    Raises:
      ModelError: `count` is no positive integer, or `make` returns no module.

    Example:
      >>> from spmd.nn import LayerStack
      >>> stack = LayerStack(repeat(48, lambda rngs: nnx.Linear(4, 4, rngs=rngs), nnx.Rngs(0)))
      >>> stack.layers.kernel.shape
      (48, 4, 4)
    """
    if isinstance(count, bool) or not isinstance(count, int | np.integer) or count < 1:
        raise ModelError(f"repeat: {count!r} layers.", fix="a whole number from 1.")
    keys = (
        {name: stream.key.get_value() for name, stream in rngs.items()}
        if isinstance(rngs, nnx.Rngs)
        else {}
    )
    if any(key.ndim for key in keys.values()):
        raise ModelError(
            "repeat: the keys of rngs are already split, and repeat splits them.",
            fix="the rngs before the split.",
        )
    if not callable(make) or not keys:
        raise ModelError(
            f"repeat({count}, {type_name(make)}, {type_name(rngs)}).",
            fix=f"repeat({count}, lambda rngs: ..., nnx.Rngs(0)).",
        )

    @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: None})
    def make_layers(keys: dict[str, jax.Array]) -> nnx.Module:
        layer = make(nnx.Rngs(**keys))
        if not isinstance(layer, nnx.Module):
            raise ModelError(f"repeat: make returned {type_name(layer)}.", fix="an nnx.Module.")
        return layer

    try:
        module = make_layers(
            {name: jax.random.split(stream(), int(count)) for name, stream in rngs.items()}
        )
    except (TraceContextError, ValueError) as error:
        if "trace level" not in str(error):
            raise
        fix = (
            "a new layer at each call, from the rngs that make is given: lambda rngs: Block(512, "
            "rngs=rngs)."
        )
        raise ModelError(
            "repeat: make uses a module or random streams that were made outside of it.", fix=fix
        ) from error
    _with_arrays(module, "repeat")
    return Repeated(int(count), module)


def _with_arrays(layer: nnx.Module, caller: str) -> tuple[Any, Any]:
    """`nnx.split` of a module that has arrays to stack."""
    graphdef, state = nnx.split(layer)
    if not jax.tree.leaves(state):
        raise ModelError(
            f"{caller}: its layers have no arrays to stack.", fix="call them one after the other."
        )
    return graphdef, state


def stack_modules(layers: Sequence[nnx.Module] | Repeated, caller: str) -> nnx.Module:
    """`join_modules`, marked as a stack: a layout shards its layers over the axis of `[pipeline]`,
    and rules describe one layer.
    """
    if not isinstance(layers, Repeated):
        if not hasattr(layers, "__iter__"):
            raise ModelError(
                f"{caller}({type_name(layers)}).", fix="a list of layers, or spmd.nn.repeat."
            )
        layers = list(layers)
        layers = Repeated(len(layers), join_modules(layers, caller))
    module = nnx.clone(layers.module)
    for _, variable in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        variable.set_metadata(STACKED, layers.count)
    return module


def join_modules(layers: Sequence[nnx.Module], caller: str) -> nnx.Module:
    """One module with the arrays of all `layers`, [layers, ...] each; all else is taken from the
    first layer.

    Raises:
      ModelError: no layers, or layers that differ in kind, in a setting, or in an array's shape or
        dtype; lists all differences.
    """
    layers = list(layers)
    if not layers:
        raise ModelError(f"{caller} of no layers.", fix="a list of at least one.")
    for number, layer in enumerate(layers):
        if not isinstance(layer, nnx.Module):
            raise ModelError(
                f"{caller}: layer {number} is {type_name(layer)}.", fix="an nnx.Module."
            )
        differences = _differences(layers[0], layer)
        if differences:
            shown = "\n".join(f"    {line}" for line in differences[:8]) + (
                "\n    ..." if len(differences) > 8 else ""
            )
            different = (
                f"{caller}: layers 0 and {number} differ, and only equal ones can be stacked:"
            )
            fix = (
                "call the layer that differs before or after the stack; an nnx.Linear first "
                "changes the width of inputs."
            )
            raise ModelError(
                f"{different}\n{shown}", fix=fix, summary=f"{different} {differences[0]}"
            )
    graphdef, first = _with_arrays(layers[0], caller)
    rest = [dict(nnx.to_flat_state(nnx.state(layer))) for layer in layers[1:]]
    ours, *others = (dict(nnx.iter_graph(layer)) for layer in layers)
    flat = []
    for path, variable in nnx.to_flat_state(first):
        values = [variable.get_value(), *(other[path].get_value() for other in rest)]
        if isinstance(ours.get(path), nnx.RngKey) and any(
            other.get(path) is ours[path] for other in others
        ):
            # copies of a stream that the layers share would all draw the same numbers
            values = [jax.random.fold_in(key, number) for number, key in enumerate(values)]
        joined = variable.replace(jnp.stack(values))
        names = joined.get_metadata().get("out_sharding")
        joined.set_metadata("out_sharding", (None, *names)) if names else None
        flat.append((path, joined))
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


def unstack_module(module: nnx.Module, number: int) -> nnx.Module:
    """Layer `number` of a stacked module, with copies of its arrays."""
    graphdef, state = nnx.split(module)
    count = jax.tree.leaves(state)[0].shape[0]
    if not -count <= number < count:
        raise ModelError(
            f"layer {number} of a stack of {count}.", fix=f"a number from 0 to {count - 1}."
        )
    layer = nnx.merge(graphdef, jax.tree.map(lambda x: x[number], state))
    for _, variable in nnx.to_flat_state(nnx.state(layer)):
        metadata = variable.get_metadata()
        names = metadata.get("out_sharding")
        variable.set_metadata("out_sharding", tuple(names)[1:]) if names else None
        variable.del_metadata(STACKED) if STACKED in metadata else None
    return layer


def _differences(first: nnx.Module, other: nnx.Module) -> list[str]:
    """Descriptions of how two modules differ, which keeps them from one stack; functions in them
    are compared by name.
    """
    ours, theirs = (dict(nnx.iter_modules(module)) for module in (first, other))

    def name(path: Any) -> str:
        return "/".join(map(str, path)) or "the layer itself"

    differences = [f"{name(path)} is only in one of them." for path in ours.keys() ^ theirs.keys()]
    for path in ours.keys() & theirs.keys():
        a, b = ours[path], theirs[path]
        if type(a) is not type(b):
            differences.append(f"{name(path)}: {type(a).__name__} and {type(b).__name__}.")
            continue
        settings = sorted(
            key for key in vars(a).keys() | vars(b).keys() if not key.startswith("_pytree")
        )
        for key in settings:
            x, y = _setting(vars(a).get(key)), _setting(vars(b).get(key))
            if UNKNOWN not in (x, y) and x != y:
                differences.append(f"{name(path)}: {key} is {x!r} and {y!r}.")
    arrays = [
        {
            path: describe(variable.get_value())
            for path, variable in nnx.to_flat_state(nnx.state(module))
        }
        for module in (first, other)
    ]
    for path in arrays[0].keys() | arrays[1].keys():
        x, y = (described.get(path, "missing") for described in arrays)
        if x != y:
            differences.append(f"{name(path)}: {x} and {y}.")
    return sorted(differences)


def _setting(value: Any) -> Any:
    """A comparable form of a module's attribute, or UNKNOWN."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, tuple | list):
        return tuple(map(_setting, value))
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.dtype):
        return str(value)
    name = getattr(value, "__qualname__", None)  # of a function or a type
    return (
        f"{value.__module__}.{name}"
        if isinstance(name, str) and not isinstance(value, nnx.Variable)
        else UNKNOWN
    )


class Layers:
    """A stacked module split into a pure function and plain trees, leaves [layers, ...], for a scan
    or a pipeline.

    Attributes:
      params: parameters.
      paths: the path of each parameter in the model, by its path here; empty outside of a step.
      keys: keys of the random streams, as uint32 data.
      kept: state that a call of a layer changes: counts of random streams, averages of batch
        statistics.
    """

    def __init__(self, module: nnx.Module):
        self._module = module
        self._graphdef, *parts = nnx.split(module, nnx.Param, nnx.RngKey, ...)
        owners = {
            "/".join(map(str, path)): variable.get_metadata()[PATH]
            for path, variable in nnx.to_flat_state(parts[0])
            if PATH in variable.get_metadata()
        }
        # codes of quantized ones, not their values
        params = nnx.to_pure_dict(parts[0], lambda variable: variable.get_raw_value())
        keys, self.kept = (nnx.to_pure_dict(part) for part in parts[1:])
        # codes and scales
        parts_of_owners = (
            (name, name if name in owners else name.rpartition("/")[0]) for name in flatten(params)
        )
        self.paths = {
            name: owners[owner] + name.removeprefix(owner)
            for name, owner in parts_of_owners
            if owner in owners
        }
        self.params = jax.tree.map(lambda x: checkpoint_name(x, LAYER_PARAMS), params)
        self._impls = jax.tree.map(jax.random.key_impl, keys)
        self.keys = jax.tree.map(jax.random.key_data, keys)
        self._changed: set[str] = set()  # paths of `kept` that some call changed
        self._counts = set(flatten(nnx.to_pure_dict(nnx.state(module, nnx.RngCount))))

    @property
    def variables(self) -> tuple[Tree, Tree, Tree]:
        """All arrays."""
        return self.params, self.keys, self.kept

    @property
    def count(self) -> int:
        """The number of layers."""
        return jax.tree.leaves(self.variables)[0].shape[0]

    def call(
        self,
        function: Callable[[Any], Any],
        variables: Sequence[Tree],
        change: Callable[[Any], Any] = lambda key: key,
    ) -> tuple[Any, Tree]:
        """`function(layer)` for the layer with these arrays, and its `kept` afterwards; `change` is
        applied to its keys first.
        """
        params, keys, kept = variables
        wrapped = jax.tree.map(
            lambda data, impl: change(jax.random.wrap_key_data(data, impl=impl)), keys, self._impls
        )
        layer = nnx.merge(self._graphdef, params, wrapped, kept)
        result = function(layer)
        _, _, _, after = nnx.split(layer, nnx.Param, nnx.RngKey, ...)
        after = nnx.to_pure_dict(after)
        before = flatten(kept)
        created = sorted(flatten(after).keys() - before.keys())
        if created:
            why = (
                f"a layer of a stack creates {first_names(created)} when called, which a stack "
                "cannot store."
            )
            raise ModelError(why, fix="return it.")
        self._changed |= {path for path, leaf in flatten(after).items() if leaf is not before[path]}
        return result, after

    def without_change(self, result: Any) -> Any:
        """`result` of `call`, for a cell, which is called once for every time step and so may keep
        no state.

        Raises:
          ModelError: it keeps some.
        """
        if self._changed:
            why = (
                f"a recurrent cell changes {first_names(sorted(self._changed))} when it is called, "
                "once for every time step."
            )
            raise ModelError(
                why,
                fix="RNNStack(dropout=...) in place of Dropout, LayerNorm in place of BatchNorm.",
            )
        return result

    def unchanged(self, result: Any, kept: Tree) -> tuple[Any, Tree]:
        """`result` of `call`, for a layer that is called once for every microbatch and so may keep
        no state but counts.

        Raises:
          ModelError: it keeps other state.
        """
        changed = self._changed - self._counts
        if changed:
            when = "when it is called, and it is called once for every microbatch."
            fix = (
                "LayerNorm, RMSNorm or GroupNorm in place of BatchNorm; or a layout without "
                "[pipeline]."
            )
            raise ModelError(
                f"a layer of a pipelined stack changes {first_names(sorted(changed))} {when}",
                fix=fix,
            )
        return result, kept

    def keep(self, kept: Tree) -> None:
        """Store in the module what its layers have changed."""
        if self._changed:
            values = flatten(kept)
            names = {
                path: "/".join(map(str, path))
                for path, _ in nnx.to_flat_state(nnx.state(self._module))
            }
            changed = [
                (path, values[name]) for path, name in names.items() if name in self._changed
            ]
            nnx.update(self._module, nnx.from_flat_state(changed))


def run_layers(
    parallel: ParallelConfig,
    layers: Layers,
    run_layer: Callable[..., tuple],
    x: Tree,
    xs: tuple,
    *,
    unroll: bool,
) -> tuple[Tree, Tree]:
    """`run_layer(x, layer's part of xs) -> (x, kept)` from layer to layer; where the step says so,
    with parameters that are gathered layer by layer. `xs`: the parameters of `layers`, then all
    else that has a value for each layer.

    Of what the forward pass computes, the backward pass then keeps what `gathered_policy` says.
    """
    gather = parallel.gather_layer
    if gather is None:
        return named_layers(functools.partial(scan_layers, run_layer, unroll=unroll))(x, xs)
    (params, *others), paths = xs, layers.paths
    names, structure = [*flatten(params)], jax.tree.structure(params)
    communication, stack = Stack.of(gather, paths, params, tuple(others), parallel.residuals)
    remat_policy = gather.remat_policy(
        next(path.removesuffix(f"/{name}") for name, path in paths.items())
    )

    def run(x: Tree, full: Tree, others: Tree) -> tuple[Tree, Tree]:
        with recomputed_by_caller(remat_policy is not None):
            return _same_shape(
                run_layer,
                x,
                (jax.tree.unflatten(structure, [full[name] for name in names]), *others),
            )

    full = jax.eval_shape(communication.gather_both, stack.at(0))
    policy_of = gathered_policy(full, remat_policy)
    return scan_gathered(communication, run, x, stack, policy_of=policy_of, unroll=unroll)


@contextlib.contextmanager
def recomputed_by_caller(recomputed: bool) -> Iterator[None]:
    """Say whether the module that is called inside is recomputed by its caller."""
    token = RECOMPUTED.set(recomputed)
    try:
        yield
    finally:
        RECOMPUTED.reset(token)


def gathered_policy(
    full: Tree, remat_policy: Callable[..., Any] | None
) -> Callable[[Any], Callable[..., Any]]:
    """From the program of a layer to its policy of `jax.checkpoint`: what `[remat]` says, or all
    but elementwise results; never gathered parameters `full`, moved or cast.

    Between the forward and the backward pass of a layer lie collectives, across which a compiler
    fuses nothing: it would write every value that the gradient uses, where it computes a GELU again
    from its input in a model whose passes it sees at once.
    """
    sizes = {leaf.size for leaf in jax.tree.leaves(full)}

    def policy_of(jaxpr: Any) -> Callable[..., Any]:
        recomputes = remat_policy is None and not _computes_in_parts(jaxpr)

        def policy(primitive: Any, *inputs: Any, **params: Any) -> Any:
            # the layout asks for it
            own_name = (
                remat_policy is not None
                and primitive.name == "name"
                and params["name"] != LAYER_PARAMS
            )
            if not own_name and primitive.name in MOVES and any(x.size in sizes for x in inputs):
                return False
            if remat_policy is None:
                return not (recomputes and primitive.name in COMPUTED_AGAIN)
            return remat_policy(primitive, *inputs, **params)

        return policy

    return policy_of


def _computes_in_parts(jaxpr: Any) -> bool:
    """Return whether a layer has loops, or products in a function with a gradient of its own, whose
    results follow elementwise from many products: to compute them again takes another loop, or all
    of these products.
    """
    for equation in equations(jaxpr):
        name = equation.primitive.name
        inner = (
            (part for jaxpr in inner_jaxprs(equation) for part in equations(jaxpr))
            if name.startswith("custom_vjp")
            else ()
        )
        if name in ("scan", "while") or any(part.primitive.name == "dot_general" for part in inner):
            return True
    return False


def scan_layers(
    function: Callable[..., tuple], x: Tree, xs: Tree, *, unroll: bool
) -> tuple[Tree, Tree]:
    """`function(x, layer's part of xs) -> (x, kept)` from layer to layer."""
    count = jax.tree.leaves(xs)[0].shape[0]
    return jax.lax.scan(
        functools.partial(_same_shape, function), x, xs, unroll=count if unroll else 1
    )


def _same_shape(function: Callable[..., tuple], x: Tree, part: Tree) -> tuple:
    """`function`, checked to return the shapes and dtypes that it takes."""
    y, kept = function(x, part)
    before, after = (jax.tree.map(describe, tree) for tree in (x, y))
    if before != after:
        why = (
            f"a layer of a stack takes {_shown(before)} and returns {_shown(after)}; the output of "
            "a layer is the input of the next one."
        )
        raise ModelError(why, fix="layers that keep shape and dtype.")
    return y, kept


def _shown(tree: Tree) -> str:
    leaves = jax.tree.leaves(tree)
    return leaves[0] if len(leaves) == 1 else "(" + ", ".join(leaves) + ")"
