"""Flax nnx modules: split once, carried as plain dicts, merged inside the compiled step."""

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
from flax import nnx
from jax.core import Tracer

from spmd.base.path_match import matches
from spmd.base.tree import Tree, flatten, path_of
from spmd.errors import ModelError, join_names
from spmd.models.base import (
    PATH,
    RECOMPUTED,
    STACKED,
    Call,
    Model,
    UnboundAxes,
    Variables,
    averaging_axes,
    no_such_module,
    remat_policies,
    trace_abstractly,
)
from spmd.models.blocks import call_block, modules_by_path, path_of_keys
from spmd.models.frozen import is_quantized, quantized_product
from spmd.models.intercept import Around, change_outputs, intercept
from spmd.models.lora import NAMES, adapter_paths, add_adapters
from spmd.models.quantized import dequantize

if TYPE_CHECKING:
    from spmd.layout.trained import Adapter

# Folded into the run's key, of which adapters are drawn.
ADAPTERS = 0x10AA
# By id, since a module may define its own hash.
HANDED_OVER: weakref.WeakValueDictionary[int, nnx.Module] = weakref.WeakValueDictionary()


def hand_over(module: nnx.Module) -> None:
    """Let the next run use the arrays of a module themselves, where others are copied; the module
    cannot be used after that.
    """
    HANDED_OVER[id(module)] = module


# The attribute of a module with lines that a person should read about how it is trained.
NOTES = "training_notes"
# The attribute of a module that says where its weights are from; it stays with `result.model`.
ORIGIN = "pretrained_origin"


class NnxModel(Model):
    """A Flax nnx module, built by `factory` under a trace, or passed with its arrays
    (`concrete`).
    """

    def __init__(
        self,
        factory: Callable[[], nnx.Module],
        *,
        concrete: nnx.Module | None = None,
        passed: nnx.Module | None = None,
    ):
        self._factory = factory
        self._graphdef: Any = None
        # None until the factory is traced.
        self._shapes: Variables | None = None
        # As `_parameters` returns them.
        self._layers: dict[str, tuple[dict[str, Any], str | None]] = {}
        self._impls: dict[str, Any] = {}
        self._stat_paths: tuple = ()
        # Remat patterns of which a module was called.
        self._called: set[str] = set()
        # Paths of layers with adapters that were not called yet.
        self._uncalled: set[str] = set()
        self._module_notes: tuple[str, ...] = ()
        self._unbound = UnboundAxes()
        # Modules that keep their running averages in training.
        self._frozen: tuple[str, ...] = ()
        self._passed = concrete
        if passed is not None:
            self._passed = passed
        self._concrete = None
        if concrete is not None:
            self._concrete = self._split(concrete)
        self._check_alive()

    @property
    def concrete(self) -> Variables | None:
        self._check_alive()
        return self._concrete

    def _check_alive(self) -> None:
        for leaf in jax.tree.leaves(self._concrete):
            is_array = isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
            if is_array and leaf.is_deleted():
                raise ModelError(CONSUMED, fix=CONSUMED_FIX)

    @property
    def handed_over(self) -> bool:
        return self._passed is not None and HANDED_OVER.get(id(self._passed)) is self._passed

    def release(self) -> None:
        if self._passed is None or not self.handed_over:
            return
        for leaf in jax.tree.leaves(self._concrete):
            if isinstance(leaf, jax.Array) and not leaf.is_deleted():
                leaf.delete()
        intercept(self._passed, {"outputs": _refuse_call})

    def with_adapters(self, adapters: "Sequence[Adapter]", seed: Any) -> "NnxModel":
        """Return the model with adapters in its layers, drawn from a key of this seed. A module
        that was passed stays as it is.

        Raises:
          LayoutError: as `add_adapters`.
        """

        def build() -> nnx.Module:
            module = self._factory()
            if self._passed is not None:
                # The user's module stays as it is: this one has the same arrays.
                module = nnx.merge(*nnx.split(module))
            key = jax.random.fold_in(jax.random.key(seed), ADAPTERS)
            add_adapters(module, adapters, nnx.Rngs(key))
            return module

        if self._passed is None:
            return NnxModel(build)
        self._check_alive()
        adapted = build()
        return NnxModel(lambda: adapted, concrete=adapted, passed=self._passed)

    def make_variables(self, key: Any, run_loss: Callable[[Any], Any]) -> Variables:
        del key, run_loss
        return self._split(self._factory())

    def names(self, key: Any, run_loss: Callable[[Any], Any]) -> dict[str, tuple]:
        del key, run_loss
        names_by_path: dict[str, tuple] = {}
        for path, metadata in self._metadata.items():
            names = (
                metadata.get("out_sharding")
                or metadata.get("sharding_names")
                or metadata.get("sharding")
            )
            if names:
                # A stack's parameter has names of one layer, without that of dim 0.
                names_by_path[path] = tuple(names)[STACKED in metadata :]
        return names_by_path

    def stacks(self) -> dict[str, int]:
        return {
            path: metadata[STACKED]
            for path, metadata in self._metadata.items()
            if STACKED in metadata
        }

    def kernels(self) -> frozenset[str]:
        return frozenset(
            path
            for path, (_, layer) in self._parameters.items()
            if path == f"{layer}/kernel".lstrip("/")
        )

    def adapters(self) -> frozenset[str]:
        return frozenset(path for path in self._parameters if path.rpartition("/")[2] in NAMES)

    @property
    def _metadata(self) -> dict[str, dict[str, Any]]:
        """Return metadata of flax of each parameter, by path."""
        return {path: metadata for path, (metadata, _) in self._parameters.items()}

    def shapes(self, run_loss: Callable[[Any], Any]) -> Variables:
        del run_loss
        shapes: Any = self._shapes
        if shapes is None:
            shapes = self._shapes = trace_abstractly(
                lambda: self.examine(self._factory()), "the model"
            )
        return shapes

    def examine(self, module: nnx.Module) -> Variables:
        """Return the arrays of a module of the factory, and note what flax knows of its parameters.
        Called under a trace.
        """
        modules = modules_by_path(module)
        for keys, variable in nnx.to_flat_state(nnx.state(module, nnx.Param)):
            layer = path_of_keys(keys[:-1])
            if not isinstance(modules.get(layer), nnx.Linear):
                layer = None
            self._layers[path_of_keys(keys)] = (dict(variable.get_metadata()), layer)
        return self._split(module)

    def remember(self, shapes: Variables) -> None:
        """Keep the shapes of what `examine` returned: the factory is traced once, since that takes
        seconds for a large model.
        """
        self._shapes = shapes

    @property
    def _parameters(self) -> dict[str, tuple[dict[str, Any], str | None]]:
        """Return metadata of flax of each parameter, by path, and the path of the `nnx.Linear` that
        has the parameter, or None.
        """
        self.shapes(lambda model: None)
        return self._layers

    def notes(self) -> list[str]:
        lines = [*self._module_notes, *self._unbound.notes()]
        if self._frozen:
            undo = ""
            if self._passed is not None:
                undo = " If .eval() set that, call model.train() first."
            more = ""
            if len(self._frozen) > 1:
                more = f" and {len(self._frozen) - 1} more"
            lines.append(
                "note: batch statistics are frozen, by use_running_average=True: "
                f"{next(iter(self._frozen))}{more}.{undo}"
            )
        return lines

    def _split(self, module: nnx.Module) -> Variables:
        self._module_notes = getattr(module, NOTES, ())
        self._frozen = _frozen(module, built=self._passed is None)
        _mark_arrays(module)
        self._graphdef, params, rngs, stats = nnx.split(module, nnx.Param, nnx.RngState, ...)
        self._uncalled = set(adapter_paths(module))
        self._stat_paths = tuple(path for path, _ in nnx.to_flat_state(stats))
        params, rngs, stats = map(nnx.to_pure_dict, (params, rngs, stats))
        self._impls = {
            path: jax.random.key_impl(leaf) for path, leaf in flatten(rngs).items() if _is_key(leaf)
        }
        return Variables(params, stats, jax.tree.map(_key_data, rngs))

    def bind(self, variables: Variables, call: Call) -> nnx.Module:
        def localize(key: Any) -> Any:
            if call.key is None:
                return key
            return call.localize(jax.random.fold_in(key, jax.random.bits(call.key)))

        rngs = self._keys(variables.rngs, localize)
        module = nnx.merge(self._graphdef, variables.params, rngs, variables.stats)
        if self.stacks():
            for keys, variable in nnx.to_flat_state(nnx.state(module, nnx.Param)):
                variable.set_metadata(PATH, path_of_keys(keys))
        if call.training:
            module.train()
        else:
            module.eval()
        modules = modules_by_path(module)
        # `train()` sets every BatchNorm to averages of the batch.
        for path in self._frozen:
            modules[path].use_running_average = True  # type: ignore[attr-defined]
        for path, sub in modules.items():
            if call.dtype is not None and _follows_inputs(sub):
                sub.dtype = call.dtype  # type: ignore[attr-defined]
            if isinstance(sub, nnx.Linear | nnx.LinearGeneral):
                sub.dot_general = call.products(path, sub.dot_general)
        recomputed = self._recomputed(call, modules)
        for path, sub in modules.items():
            around = self._around(call, path, sub)
            if path in recomputed:
                around["remat"] = recomputed[path]
            intercept(sub, around)
        return module

    def _around(self, call: Call, path: str, module: Any) -> dict[str, Around]:
        """Return the functions around calls of a submodule, but for the one that recomputes it."""
        around: dict[str, Around] = {}
        if isinstance(module, nnx.Linear) and is_quantized(module.kernel.get_raw_value()):
            # A loss that reads the kernel itself gets its values.
            module.kernel.set_metadata(on_get_value=_values)
            around["kernel"] = _dequantize_kernel
        if isinstance(module, nnx.BatchNorm):
            around["axes"] = _average_over(call.sync_axes, self._unbound)
        if path in self._uncalled:
            around["noted"] = _note(functools.partial(self._uncalled.discard, path))
        if not callable(module):
            return around
        if call.blocks is not None and call.blocks.takes(path):
            around["block"] = functools.partial(call_block, call.blocks, path)
        change = call.output_hook(path)
        if change is not None:
            around["outputs"] = change_outputs(change)
        if path:
            around["scope"] = _in_scope(_scope_of(path))
        return around

    def _recomputed(self, call: Call, modules: Mapping[str, Any]) -> dict[str, Around]:
        """Return the functions that recompute submodules which patterns of `call.remat` match."""
        callables = [path for path, sub in modules.items() if callable(sub)]
        # Patterns that match a submodule, by its path.
        patterns: dict[str, list[str]] = {}
        for pattern, _ in call.remat:
            paths = matches(pattern, callables)
            if not paths:
                raise no_such_module(pattern, sorted(filter(None, modules)))
            for path in paths:
                patterns.setdefault(path, []).append(pattern)
        return {
            path: _recompute(policy, functools.partial(self._called.update, patterns[path]))
            for path, policy in remat_policies(call.remat, callables).items()
        }

    def check_remat(self, patterns: tuple[str, ...]) -> None:
        # `bind` has refused patterns that match no submodule.
        for pattern in patterns:
            if pattern not in self._called:
                why = (
                    f'[remat] modules: "{pattern}" matches submodules that the model never calls '
                    "as module(x), so nothing is recomputed."
                )
                raise ModelError(why, fix="a pattern for the modules that are called.")

    def check_adapters(self) -> None:
        if self._uncalled:
            why = (
                f"adapters of {join_names(sorted(self._uncalled))}: the loss never calls these "
                "layers; it may multiply by a kernel itself."
            )
            raise ModelError(
                why,
                fix="adapters of other layers (except = in [[adapters]]), or a loss and a model "
                "that call these.",
            )

    def get_stats(self, bound: nnx.Module) -> Tree:
        flat = dict(nnx.to_flat_state(nnx.state(bound)))
        return nnx.to_pure_dict(
            nnx.from_flat_state([(path, flat[path]) for path in self._stat_paths])
        )

    def _keys(self, rngs: Tree, change: Callable[[Any], Any]) -> Tree:
        def leaf(keys: tuple, data: Any) -> Any:
            impl = self._impls.get(path_of(keys))
            if impl is None:
                return data
            change_all = change
            wrapped: Any = jax.random.wrap_key_data(data, impl=impl)
            # A stack has a key for every layer.
            for _ in range(wrapped.ndim):
                change_all = jax.vmap(change_all)
            return change_all(wrapped)

        return jax.tree_util.tree_map_with_path(leaf, rngs)

    def rebuild(self, variables: Variables) -> nnx.Module:
        return nnx.merge(
            self._graphdef,
            variables.params,
            self._keys(variables.rngs, lambda key: key),
            variables.stats,
        )


def _mark_arrays(module: nnx.Module) -> None:
    """Make data of arrays that modules keep as attributes.

    Flax (0.12) makes an array data when it is assigned, except a tracer, which it takes for a
    constant; a factory is called under a trace.
    """
    for _, sub in nnx.iter_modules(module):
        for name, value in list(vars(sub).items()):
            leaves = ()
            if isinstance(value, tuple | list | dict | Tracer):
                leaves = jax.tree.leaves(value)
            if any(isinstance(leaf, Tracer) for leaf in leaves):
                setattr(sub, name, nnx.data(value))


def _frozen(module: nnx.Module, *, built: bool) -> tuple[str, ...]:
    """Return paths of the modules that were made to use running averages, in training as well.

    A module that was not `built` by a factory may have been put in evaluation mode by `.eval()`,
    which turns dropout off as well: a module in which all of these are off is trained all the same.
    """
    modules = modules_by_path(module)
    averages = {
        path: vars(sub)["use_running_average"]
        for path, sub in modules.items()
        if "use_running_average" in vars(sub)
    }
    dropout = [
        switch
        for sub in modules.values()
        if isinstance(switch := getattr(sub, "deterministic", None), bool)
    ]
    if not built and dropout and all((*averages.values(), *dropout)):
        return ()
    return tuple(path for path, is_frozen in averages.items() if is_frozen is True)


def _values(variable: Any, value: Any) -> Any:
    del variable
    if is_quantized(value):
        return dequantize(value)
    return value


def _dequantize_kernel(
    call: Callable[..., Any], module: Any, /, inputs: jax.Array, *args: Any, **kwargs: Any
) -> Any:
    """Call an `nnx.Linear` with a quantized kernel, whose values exist only while its product is
    computed.

    The backward pass keeps the codes, too, and not the values.
    """
    attributes = vars(module)
    kernel = attributes["kernel"]
    product = attributes["dot_general"]
    quantized = kernel.get_raw_value()
    arrays = [inputs, jax.ShapeDtypeStruct(quantized.shape, quantized.dtype)]
    if attributes.get("bias") is not None:
        arrays.append(attributes["bias"].get_value())
    promoted = jax.eval_shape(
        lambda *arrays: module.promote_dtype(arrays, dtype=module.dtype), *arrays
    )
    values = dequantize(quantized, promoted[1].dtype)

    def dot_general(lhs: jax.Array, rhs: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        if rhs is not values:
            return product(lhs, rhs, *args, **kwargs)
        return quantized_product(
            lambda lhs, rhs: product(lhs, rhs, *args, **kwargs), lhs, quantized, values.dtype
        )

    # Set without nnx's checks (flax 0.12), which forbid to change a module inside of a
    # transformation: the module is as before when the call ends.
    attributes.update(kernel=kernel.replace(values), dot_general=dot_general)
    try:
        return call(module, inputs, *args, **kwargs)
    finally:
        attributes.update(kernel=kernel, dot_general=product)


@functools.lru_cache(maxsize=256)
def _average_over(sync_axes: tuple[str, ...], unbound: UnboundAxes) -> Around:
    """Average the statistics of an `nnx.BatchNorm` over the workers, too."""

    def around(call: Callable[..., Any], module: Any, /, *args: Any, **kwargs: Any) -> Any:
        # Set without nnx's checks, as a kernel is; `lax.pmean`, to which nnx passes it, takes
        # several axes.
        attributes = vars(module)
        axis_name = attributes["axis_name"]
        attributes["axis_name"] = averaging_axes(axis_name, sync_axes, unbound)
        try:
            return call(module, *args, **kwargs)
        finally:
            attributes["axis_name"] = axis_name

    return around


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _key_data(leaf: Any) -> Any:
    if _is_key(leaf):
        return jax.random.key_data(leaf)
    return leaf


def _note(note: Callable[[], None]) -> Around:
    """Note that a module is called."""

    def around(call: Callable[..., Any], module: Any, /, *args: Any, **kwargs: Any) -> Any:
        note()
        return call(module, *args, **kwargs)

    return around


def _recompute(policy: Callable[..., Any], note: Callable[[], None]) -> Around:
    """Recompute a module in the backward pass, and note that it is called."""

    def around(call: Callable[..., Any], module: Any, /, *args: Any, **kwargs: Any) -> Any:
        note()
        if not RECOMPUTED.get():
            remat = nnx.remat(lambda module: call(module, *args, **kwargs), policy=policy)
            return remat(module)
        # The caller recomputes this module alone: modules inside of it are recomputed once more.
        token = RECOMPUTED.set(False)
        try:
            return call(module, *args, **kwargs)
        finally:
            RECOMPUTED.reset(token)

    return around


CONSUMED = (
    "the arrays of this model were handed over to a run, as those of spmd.pretrained.load are."
)
CONSUMED_FIX = "result.model of that run; or load it once more."


def _refuse_call(call: Callable[..., Any], module: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Say that the arrays of a module are gone."""
    raise ModelError(CONSUMED, fix=CONSUMED_FIX)


def _scope_of(path: str) -> str:
    """The last name in a module's path; that of a list's member begins with the list's, which is
    not called and has no scope of its own.

    >>> _scope_of("decoder/blocks/0"), _scope_of("decoder/blocks/0/attn")
    ('blocks/0', 'attn')
    """
    *parents, last = path.split("/")
    if not (parents and last.isdigit()):
        return last
    return f"{_scope_of('/'.join(parents))}/{last}"


@functools.lru_cache(maxsize=4096)
def _in_scope(name: str) -> Around:
    """Name what a call computes in the program, as linen names its own calls."""

    def around(call: Callable[..., Any], module: Any, /, *args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(name):
            return call(module, *args, **kwargs)

    return around


def _follows_inputs(module: Any) -> bool:
    """Return whether a layer was given no dtype of its own; `nnx.Embed` then takes the dtype of its
    parameter.
    """
    missing = "dtype" in vars(module) and "param_dtype" in vars(module) and module.dtype is None
    return missing or (isinstance(module, nnx.Embed) and module.dtype == module.param_dtype)
