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
from spmd.models.frozen import is_quantized, quantized_product
from spmd.models.intercept import Around, change_outputs, intercept
from spmd.models.lora import NAMES, adapter_paths, add_adapters
from spmd.models.nnx_blocks import call_block
from spmd.models.quantized import dequantize

if TYPE_CHECKING:
    from spmd.layout.trained import Adapter

ADAPTERS = 0x10AA  # of the run's key, what adapters are drawn from
# by id: a module may define its own hash
HANDED_OVER: weakref.WeakValueDictionary[int, nnx.Module] = weakref.WeakValueDictionary()


def hand_over(module: nnx.Module) -> None:
    """Let the next run use the arrays of a module themselves, where others are copied; the module
    cannot be used after that.
    """
    HANDED_OVER[id(module)] = module


# the attribute of a module with what a person should know of how it is trained
NOTES = "training_notes"
# the attribute of a module that says where its weights are from; it stays with `result.model`
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
        self._shapes: Variables | None = None  # once the factory was traced
        self._layers: dict[str, tuple[dict[str, Any], str | None]] = {}  # as `_parameters`
        self._impls: dict[str, Any] = {}
        self._stat_paths: tuple = ()
        self._called: set[str] = set()  # remat patterns of which a module was called
        self._uncalled: set[str] = set()  # paths of layers with adapters that were not called yet
        self._said: tuple[str, ...] = ()  # notes that the module has
        self._unbound = UnboundAxes()
        self._frozen: tuple[str, ...] = ()  # modules that keep their running averages in training
        # what the user has, which may be without adapters
        self._given = concrete if passed is None else passed
        self._concrete = None if concrete is None else self._split(concrete)
        self._check_alive()

    @property
    def concrete(self) -> Variables | None:
        self._check_alive()
        return self._concrete

    def _check_alive(self) -> None:
        leaves = jax.tree.leaves(self._concrete)
        if any(
            isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted()
            for leaf in leaves
        ):
            raise ModelError(CONSUMED, fix=CONSUMED_FIX)

    @property
    def handed_over(self) -> bool:
        return self._given is not None and HANDED_OVER.get(id(self._given)) is self._given

    def release(self) -> None:
        if self._given is None or not self.handed_over:
            return
        for leaf in jax.tree.leaves(self._concrete):
            if isinstance(leaf, jax.Array) and not leaf.is_deleted():
                leaf.delete()
        intercept(self._given, {"outputs": _refuse_call})

    def with_adapters(self, adapters: "Sequence[Adapter]", seed: Any) -> "NnxModel":
        """The model with adapters in its layers, drawn from a key of this seed. A module that was
        passed stays as it is.

        Raises:
          LayoutError: as `add_adapters`.
        """

        def build() -> nnx.Module:
            module = self._factory()
            # shares its arrays
            module = module if self._given is None else nnx.merge(*nnx.split(module))
            add_adapters(
                module, adapters, nnx.Rngs(jax.random.fold_in(jax.random.key(seed), ADAPTERS))
            )
            return module

        if self._given is None:
            return NnxModel(build)
        self._check_alive()
        adapted = build()
        return NnxModel(lambda: adapted, concrete=adapted, passed=self._given)

    def init(self, key: Any, run: Callable[[Any], Any]) -> Variables:
        del key, run
        return self._split(self._factory())

    def names(self, key: Any, run: Callable[[Any], Any]) -> dict[str, tuple]:
        del key, run
        names_by_path: dict[str, tuple] = {}
        for path, metadata in self._metadata.items():
            names = (
                metadata.get("out_sharding")
                or metadata.get("sharding_names")
                or metadata.get("sharding")
            )
            if names:
                names_by_path[path] = tuple(names)[STACKED in metadata :]  # of one layer
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
        """Metadata of flax of each parameter, by path."""
        return {path: metadata for path, (metadata, _) in self._parameters.items()}

    def shapes(self, run: Callable[[Any], Any]) -> Variables:
        del run
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
        layers = {
            "/".join(map(str, path))
            for path, sub in nnx.iter_modules(module)
            if isinstance(sub, nnx.Linear)
        }
        for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Param)):
            owner = "/".join(map(str, path[:-1]))
            self._layers["/".join(map(str, path))] = (
                dict(variable.get_metadata()),
                owner if owner in layers else None,
            )
        return self._split(module)

    def remember(self, shapes: Variables) -> None:
        """Keep the shapes of what `examine` returned: the factory is traced once, since that takes
        seconds for a large model.
        """
        self._shapes = shapes

    @property
    def _parameters(self) -> dict[str, tuple[dict[str, Any], str | None]]:
        """Metadata of flax of each parameter, by path, and the path of the `nnx.Linear` that it is
        of, or None.
        """
        self.shapes(lambda model: None)
        return self._layers

    def notes(self) -> list[str]:
        lines = [*self._said, *self._unbound.notes()]
        if self._frozen:
            undo = (
                " If .eval() set that, call model.train() first." if self._given is not None else ""
            )
            more = f" and {len(self._frozen) - 1} more" if len(self._frozen) > 1 else ""
            lines.append(
                "note: batch statistics are frozen, by use_running_average=True: "
                f"{next(iter(self._frozen))}{more}.{undo}"
            )
        return lines

    def _split(self, module: nnx.Module) -> Variables:
        self._said, self._frozen = (
            getattr(module, NOTES, ()),
            _frozen(module, given=self._given is not None),
        )
        _mark_arrays(module)
        self._graphdef, params, rngs, stats = nnx.split(module, nnx.Param, nnx.RngState, ...)
        self._uncalled = set(adapter_paths(module))
        self._stat_paths = tuple(path for path, _ in nnx.to_flat_state(stats))
        params, rngs, stats = map(nnx.to_pure_dict, (params, rngs, stats))
        self._impls = {
            path: jax.random.key_impl(leaf) for path, leaf in flatten(rngs).items() if _is_key(leaf)
        }
        return Variables(
            params,
            stats,
            jax.tree.map(lambda leaf: jax.random.key_data(leaf) if _is_key(leaf) else leaf, rngs),
        )

    def bind(self, variables: Variables, call: Call) -> nnx.Module:
        def localize(key: Any) -> Any:
            return (
                key
                if call.key is None
                else call.localize(jax.random.fold_in(key, jax.random.bits(call.key)))
            )

        rngs = self._keys(variables.rngs, localize)
        module = nnx.merge(self._graphdef, variables.params, rngs, variables.stats)
        for path, variable in (
            nnx.to_flat_state(nnx.state(module, nnx.Param)) if self.stacks() else ()
        ):
            variable.set_metadata(PATH, "/".join(map(str, path)))
        module.train() if call.training else module.eval()
        modules = {"/".join(map(str, path)): sub for path, sub in nnx.iter_modules(module)}
        for path in self._frozen:
            modules[path].use_running_average = True  # type: ignore[attr-defined]
        for path, sub in modules.items():
            if call.dtype is not None and _follows_inputs(sub):
                sub.dtype = call.dtype  # type: ignore[attr-defined]
            if isinstance(sub, nnx.Linear | nnx.LinearGeneral):
                sub.dot_general = call.products(path, sub.dot_general)
        recomputed = self._recomputed(call, modules)
        for path, sub in modules.items():
            around: dict[str, Around] = {}
            if isinstance(sub, nnx.Linear) and is_quantized(sub.kernel.get_raw_value()):
                # of a kernel that the loss reads itself
                sub.kernel.set_metadata(on_get_value=_values)
                around["kernel"] = _dequantize_kernel
            if isinstance(sub, nnx.BatchNorm):
                around["axes"] = _average_over(call.sync_axes, self._unbound)
            if path in self._uncalled:
                around["noted"] = _note(functools.partial(self._uncalled.discard, path))
            if path in recomputed:
                around["remat"] = recomputed[path]
            if callable(sub) and call.blocks is not None and call.blocks.takes(path):
                around["block"] = functools.partial(call_block, call.blocks, path)
            if callable(sub) and (change := call.output_hook(path)) is not None:
                around["outputs"] = change_outputs(change)
            if callable(sub) and path:
                around["scope"] = _in_scope(_scope_of(path))
            intercept(sub, around)
        return module

    def _recomputed(self, call: Call, modules: Mapping[str, Any]) -> dict[str, Around]:
        """Return what recomputes the submodules that patterns of `call.remat` match, by path."""
        callables = [path for path, sub in modules.items() if callable(sub)]
        patterns: dict[str, list[str]] = {}  # by path
        for pattern, _ in call.remat:
            if not (paths := matches(pattern, callables)):
                raise no_such_module(pattern, sorted(filter(None, modules)))
            for path in paths:
                patterns.setdefault(path, []).append(pattern)
        return {
            path: _recompute(policy, functools.partial(self._called.update, patterns[path]))
            for path, policy in remat_policies(call.remat, callables).items()
        }

    def check_remat(self, patterns: tuple[str, ...]) -> None:
        for pattern in patterns:  # one that matches no submodule is refused by `bind` already
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
            for _ in range(wrapped.ndim):  # a stack has a key for every layer
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
            leaves = (
                jax.tree.leaves(value) if isinstance(value, tuple | list | dict | Tracer) else ()
            )
            if any(isinstance(leaf, Tracer) for leaf in leaves):
                setattr(sub, name, nnx.data(value))


def _frozen(module: nnx.Module, *, given: bool) -> tuple[str, ...]:
    """Paths of the modules that were made to use running averages, in training as well.

    A module that was given, not made by a factory, may have been put in evaluation mode by
    `.eval()`, which turns dropout off as well: one in which everything is, is trained all the same.
    """
    modules = {"/".join(map(str, path)): sub for path, sub in nnx.iter_modules(module)}
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
    evaluating = given and bool(dropout) and all((*averages.values(), *dropout))
    return () if evaluating else tuple(path for path, kept in averages.items() if kept is True)


def _values(variable: Any, value: Any) -> Any:
    del variable
    return dequantize(value) if is_quantized(value) else value


def _dequantize_kernel(
    call: Callable[..., Any], module: Any, /, inputs: jax.Array, *args: Any, **kwargs: Any
) -> Any:
    """Call an `nnx.Linear` with a quantized kernel, whose values exist only while its product is
    computed.

    Of the backward pass, too: it keeps the codes, and not the values.
    """
    kernel, given = vars(module)["kernel"], vars(module)["dot_general"]
    quantized, bias = kernel.get_raw_value(), vars(module).get("bias")
    like = jax.ShapeDtypeStruct(quantized.shape, quantized.dtype)
    promoted = jax.eval_shape(
        lambda *arrays: module.promote_dtype(arrays, dtype=module.dtype),
        inputs,
        like,
        *([] if bias is None else [bias.get_value()]),
    )
    values = dequantize(quantized, promoted[1].dtype)

    def dot_general(lhs: jax.Array, rhs: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        if rhs is not values:
            return given(lhs, rhs, *args, **kwargs)
        return quantized_product(
            lambda lhs, rhs: given(lhs, rhs, *args, **kwargs), lhs, quantized, values.dtype
        )

    # without nnx's checks, which forbid to change a module inside of a transformation: it is as
    # before when the call ends
    vars(module).update(kernel=kernel.replace(values), dot_general=dot_general)
    try:
        return call(module, inputs, *args, **kwargs)
    finally:
        vars(module).update(kernel=kernel, dot_general=given)


@functools.lru_cache(maxsize=256)
def _average_over(sync_axes: tuple[str, ...], unbound: UnboundAxes) -> Around:
    """Average the statistics of an `nnx.BatchNorm` over the workers, too."""

    def around(call: Callable[..., Any], module: Any, /, *args: Any, **kwargs: Any) -> Any:
        own = vars(module)["axis_name"]
        # lax.pmean takes several axes
        vars(module)["axis_name"] = averaging_axes(own, sync_axes, unbound)
        try:
            return call(module, *args, **kwargs)
        finally:
            vars(module)["axis_name"] = own

    return around


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


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
        token = RECOMPUTED.set(False)  # modules inside this one are recomputed once more
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
    return f"{_scope_of('/'.join(parents))}/{last}" if parents and last.isdigit() else last


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
