"""Stacks structurally equal nnx modules into one module whose arrays have the layers along dim 0,
and unstacks them.
"""

import contextlib
import dataclasses
import functools
import itertools
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
from spmd.models.blocks import modules_by_path, path_of_keys
from spmd.nn.gathered_scan import Stack, scan_gathered
from spmd.nn.parallel_context import ParallelConfig, named_layers

PLAIN = (bool, int, float, str, type(None))
UNKNOWN = "..."
# A gathered parameter is not kept for the backward pass; nor are results of these operations.
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
    keys = {}
    if isinstance(rngs, nnx.Rngs):
        keys = {name: stream.key.get_value() for name, stream in rngs.items()}
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

    # Under one vmap, so that a stack of many layers is traced once; the new dim 0 has no logical
    # axis name.
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
        # Errors of the user's `make` are ValueErrors, too: the text shows which are flax's.
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
    """Return one module with the arrays of all `layers`, [layers, ...] each; all else is taken from
    the first layer.

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
            lines = [f"    {line}" for line in differences[:8]]
            if len(differences) > 8:
                lines.append("    ...")
            shown = "\n".join(lines)
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
    states = [dict(nnx.to_flat_state(nnx.state(layer))) for layer in layers]
    first_nodes, *other_nodes = (dict(nnx.iter_graph(layer)) for layer in layers)
    flat = []
    for path, variable in nnx.to_flat_state(first):
        values = [state[path].get_value() for state in states]
        # Copies of a stream that the layers share would all draw the same numbers.
        key = first_nodes.get(path)
        if isinstance(key, nnx.RngKey) and any(nodes.get(path) is key for nodes in other_nodes):
            values = [jax.random.fold_in(key, number) for number, key in enumerate(values)]
        joined = variable.replace(jnp.stack(values))
        # flax (0.12) keeps logical axis names under this name; the dim of layers has none.
        names = joined.get_metadata().get("out_sharding")
        if names:
            joined.set_metadata("out_sharding", (None, *names))
        flat.append((path, joined))
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


def unstack_module(module: nnx.Module, number: int) -> nnx.Module:
    """Return layer `number` of a stacked module, with copies of its arrays."""
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
        if names:
            variable.set_metadata("out_sharding", tuple(names)[1:])
        if STACKED in metadata:
            variable.del_metadata(STACKED)
    return layer


def _differences(first: nnx.Module, other: nnx.Module) -> list[str]:
    """Return the differences of two modules that keep them from one stack; functions in them are
    compared by name.
    """
    ours = modules_by_path(first)
    theirs = modules_by_path(other)
    differences = [
        f"{_layer_name(path)} is only in one of them." for path in ours.keys() ^ theirs.keys()
    ]
    for path in ours.keys() & theirs.keys():
        differences += _setting_differences(_layer_name(path), ours[path], theirs[path])
    our_arrays = _described_arrays(first)
    their_arrays = _described_arrays(other)
    for path in our_arrays.keys() | their_arrays.keys():
        x = our_arrays.get(path, "missing")
        y = their_arrays.get(path, "missing")
        if x != y:
            differences.append(f"{_layer_name(path)}: {x} and {y}.")
    return sorted(differences)


def _layer_name(path: str) -> str:
    return path or "the layer itself"


def _setting_differences(name: str, ours: Any, theirs: Any) -> Iterator[str]:
    """Yield the settings in which two modules of this name differ."""
    if type(ours) is not type(theirs):
        yield f"{name}: {type(ours).__name__} and {type(theirs).__name__}."
        return
    for key in sorted(vars(ours).keys() | vars(theirs).keys()):
        # Flax (0.12) keeps which attributes are data under such names.
        if key.startswith("_pytree"):
            continue
        x = _setting(vars(ours).get(key))
        y = _setting(vars(theirs).get(key))
        if UNKNOWN not in (x, y) and x != y:
            yield f"{name}: {key} is {x!r} and {y!r}."


def _described_arrays(module: nnx.Module) -> dict[str, str]:
    variables = nnx.to_flat_state(nnx.state(module))
    return {path_of_keys(keys): describe(variable.get_value()) for keys, variable in variables}


def _setting(value: Any) -> Any:
    """Return a comparable form of a module's attribute, or UNKNOWN."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, tuple | list):
        return tuple(map(_setting, value))
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.dtype):
        return str(value)
    # Functions and types have such a name.
    name = getattr(value, "__qualname__", None)
    if isinstance(name, str) and not isinstance(value, nnx.Variable):
        return f"{value.__module__}.{name}"
    return UNKNOWN


class Layers:
    """A stacked module split into a pure function and plain trees, leaves [layers, ...], for a scan
    or a pipeline.

    Attributes:
      params: parameters.
      paths: the path of each parameter in the model, by its path here; empty outside of a step.
      keys: keys of the random streams, as uint32 data.
      state: arrays that a call of a layer changes: counts of random streams, averages of batch
        statistics.
    """

    def __init__(self, module: nnx.Module):
        self._module = module
        self._graphdef, *parts = nnx.split(module, nnx.Param, nnx.RngKey, ...)
        paths = {
            path_of_keys(keys): variable.get_metadata()[PATH]
            for keys, variable in nnx.to_flat_state(parts[0])
            if PATH in variable.get_metadata()
        }
        # The raw values of quantized parameters are codes and scales.
        params = nnx.to_pure_dict(parts[0], lambda variable: variable.get_raw_value())
        keys = nnx.to_pure_dict(parts[1])
        self.state = nnx.to_pure_dict(parts[2])
        self.paths = {}
        for name in flatten(params):
            parameter = name
            if name not in paths:
                parameter = name.rpartition("/")[0]
            if parameter in paths:
                self.paths[name] = paths[parameter] + name.removeprefix(parameter)
        self.params = jax.tree.map(lambda x: checkpoint_name(x, LAYER_PARAMS), params)
        self._impls = jax.tree.map(jax.random.key_impl, keys)
        self.keys = jax.tree.map(jax.random.key_data, keys)
        # Paths in `state` that some call changed.
        self._changed: set[str] = set()
        self._counts = set(flatten(nnx.to_pure_dict(nnx.state(module, nnx.RngCount))))

    @property
    def variables(self) -> tuple[Tree, Tree, Tree]:
        """All arrays."""
        return self.params, self.keys, self.state

    @property
    def count(self) -> int:
        """The number of layers."""
        return jax.tree.leaves(self.variables)[0].shape[0]

    def apply(
        self,
        function: Callable[[Any], Any],
        variables: Sequence[Tree],
        change: Callable[[Any], Any] = lambda key: key,
    ) -> tuple[Any, Tree]:
        """Return `function(layer)` for the layer with these arrays, and its `state` afterwards;
        `change` is applied to its keys first.
        """
        params, keys, state = variables
        wrapped = jax.tree.map(
            lambda data, impl: change(jax.random.wrap_key_data(data, impl=impl)), keys, self._impls
        )
        layer = nnx.merge(self._graphdef, params, wrapped, state)
        result = function(layer)
        _, _, _, after = nnx.split(layer, nnx.Param, nnx.RngKey, ...)
        after = nnx.to_pure_dict(after)
        before = flatten(state)
        created = sorted(flatten(after).keys() - before.keys())
        if created:
            why = (
                f"a layer of a stack creates {first_names(created)} when called, which a stack "
                "cannot store."
            )
            raise ModelError(why, fix="return it.")
        # By identity: while a program is traced, values cannot be compared.
        self._changed |= {path for path, leaf in flatten(after).items() if leaf is not before[path]}
        return result, after

    def without_change(self, result: Any) -> Any:
        """Return `result` of `apply`, for a cell, which is called once for every time step and so
        may keep no state.

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

    def unchanged(self, result: Any, after: Tree) -> tuple[Any, Tree]:
        """Return `result` of `apply`, for a layer that is called once for every microbatch and so
        may keep no state but counts.

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
        return result, after

    def update(self, after: Tree) -> None:
        """Store in the module the state that its layers have changed."""
        if self._changed:
            values = flatten(after)
            changed = []
            for keys, _ in nnx.to_flat_state(nnx.state(self._module)):
                name = path_of_keys(keys)
                if name in self._changed:
                    changed.append((keys, values[name]))
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
    """Run `run_layer(x, layer's part of xs) -> (x, state)` from layer to layer; where the step says
    so, with parameters that are gathered layer by layer. `xs`: the parameters of `layers`, then all
    else that has a value for each layer.

    The backward pass then keeps those results of the forward pass that `gathered_policy` says.
    """
    gather = parallel.gather_layer
    if gather is None:
        return named_layers(functools.partial(scan_layers, run_layer, unroll=unroll))(x, xs)
    params, *others = xs
    paths = layers.paths
    names = [*flatten(params)]
    structure = jax.tree.structure(params)
    communication, stack = Stack.of(gather, paths, params, tuple(others), parallel.residuals)
    name, path = next(iter(paths.items()))
    remat_policy = gather.remat_policy(path.removesuffix(f"/{name}"))

    def run_full(x: Tree, full: Tree, others: Tree) -> tuple[Tree, Tree]:
        full_params = jax.tree.unflatten(structure, [full[name] for name in names])
        with recomputed_by_caller(remat_policy is not None):
            return _same_shape(run_layer, x, (full_params, *others))

    full = jax.eval_shape(communication.gather_both, stack.at(0))
    policy_of = gathered_policy(full, remat_policy)
    return scan_gathered(communication, run_full, x, stack, policy_of=policy_of, unroll=unroll)


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
    """Return a function from the program of a layer to its policy of `jax.checkpoint`: what
    `[remat]` says, or all but elementwise results; never gathered parameters `full`, moved or cast.

    Between the forward and the backward pass of a layer lie collectives, across which a compiler
    fuses nothing: it would write every value that the gradient uses, where it computes a GELU again
    from its input in a model whose passes it sees at once.
    """
    sizes = {leaf.size for leaf in jax.tree.leaves(full)}

    def policy_of(jaxpr: Any) -> Callable[..., Any]:
        # A GPT of 8 layers of width 1024 on 8 H100s is planned at 28.5 ms and 2.8 GiB if these
        # results are computed again, and at 34.1 ms and 6.5 GiB if not (docs/decisions.md).
        recomputes = remat_policy is None and not _computes_in_parts(jaxpr)

        def policy(primitive: Any, *inputs: Any, **params: Any) -> Any:
            name = primitive.name
            # A name of the model's own, by which a policy of the layout chooses what it keeps.
            is_chosen = (
                remat_policy is not None and name == "name" and params["name"] != LAYER_PARAMS
            )
            if not is_chosen and name in MOVES and any(x.size in sizes for x in inputs):
                return False
            if remat_policy is None:
                return not (recomputes and name in COMPUTED_AGAIN)
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
        if name in ("scan", "while"):
            return True
        if name.startswith("custom_vjp"):
            inner = itertools.chain.from_iterable(map(equations, inner_jaxprs(equation)))
            if any(part.primitive.name == "dot_general" for part in inner):
                return True
    return False


def scan_layers(
    function: Callable[..., tuple], x: Tree, xs: Tree, *, unroll: bool
) -> tuple[Tree, Tree]:
    """Run `function(x, layer's part of xs) -> (x, state)` from layer to layer."""
    steps = 1
    if unroll:
        steps = jax.tree.leaves(xs)[0].shape[0]
    return jax.lax.scan(functools.partial(_same_shape, function), x, xs, unroll=steps)


def _same_shape(function: Callable[..., tuple], x: Tree, part: Tree) -> tuple:
    """Return `function(x, part)`, checked to return the shapes and dtypes that it takes."""
    y, state = function(x, part)
    before = jax.tree.map(describe, x)
    after = jax.tree.map(describe, y)
    if before != after:
        why = (
            f"a layer of a stack takes {shown(before)} and returns {shown(after)}; the output of "
            "a layer is the input of the next one."
        )
        raise ModelError(why, fix="layers that keep shape and dtype.")
    return y, state


def shown(tree: Tree) -> str:
    """Return a tree of descriptions as a text."""
    leaves = jax.tree.leaves(tree)
    if len(leaves) == 1:
        return leaves[0]
    return "(" + ", ".join(leaves) + ")"
