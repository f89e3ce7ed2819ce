"""Flax linen modules: initialised by the first call in the loss, applied with the train switch filled in."""

import contextlib
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from flax import linen
from flax.core import Scope, lift, unfreeze
from flax.linen.transforms import lift_direct_transform

from spmd.errors import ModelError, raise_problems
from spmd.models.base import (
    RECOMPUTED,
    Call,
    Model,
    Variables,
    averaging_axes,
    no_such_module,
    remat_policies,
    shape_problems,
    trace_abstractly,
    with_train_flag,
)
from spmd.models.blocks import BlockCalls, BlockTrace
from spmd.path_match import matches
from spmd.tree import Tree, flatten, map_paths, path_of


class LinenModel(Model):
    """A Flax linen module; its shapes are found by running the loss once, abstractly, on the first batch. A bound one brings its arrays."""

    def __init__(self, module: linen.Module):
        self._given: Variables | None = None
        if module.scope is not None:
            module, variables = module.unbind()
            self._given = _split(variables)
        self._module = module
        self._rematerialised: set[str] = set()
        self._streams: set[str] = set()  # names of random streams that the module asks for

    @property
    def concrete(self) -> Variables | None:
        return self._given

    def init(self, key: Any, run: Callable[[Any], Any]) -> Variables:
        made = _split(self._boxed(key, run))
        if self._given is None:
            return made
        given_by_path, made_by_path = (
            {path.removeprefix("stats/"): leaf for path, leaf in flatten(arrays).items()} for arrays in (self._given, made)
        )
        problems = shape_problems(given_by_path, made_by_path, "the module")
        raise_problems(ModelError, "the linen module is bound to other arrays than its `init` makes", problems)
        return self._given

    def _boxed(self, key: Any, run: Callable[[Any], Any]) -> dict:
        probe = _LinenInit(self._module, key)
        with _record_streams(self._streams):
            run(probe)
        if probe.variables is None:
            raise ModelError("the loss never calls the model, so a linen module cannot be initialised from it.")
        return dict(probe.variables)

    def names(self, key: Any, run: Callable[[Any], Any]) -> dict[str, tuple]:
        names: dict[str, tuple] = {}

        def visit():
            specs = linen.get_partition_spec(self._boxed(key, run).get("params", {}))
            leaves = jax.tree_util.tree_leaves_with_path(specs, is_leaf=lambda x: isinstance(x, jax.sharding.PartitionSpec))
            names.update({path_of(keys): tuple(spec) for keys, spec in leaves if len(spec)})

        trace_abstractly(visit, "the model")
        return names

    def bind(self, variables: Variables, call: Call) -> "LinenCall":
        return LinenCall(self._module, variables, call, self._rematerialised, self._streams)

    def check_remat(self, patterns: tuple[str, ...]) -> None:
        for pattern in patterns:
            if not matches(pattern, self._rematerialised):
                raise no_such_module(pattern, [])

    def get_stats(self, bound: "LinenCall") -> Tree:
        return bound.stats

    def rebuild(self, variables: Variables) -> linen.Module:
        return self._module.bind({"params": variables.params, **variables.stats})


def _split(variables: Any) -> Variables:
    """A linen module's collections; what is no parameter changes with a call."""
    plain = dict(linen.meta.unbox(unfreeze(variables)))
    return Variables(plain.pop("params", {}), plain, {})


class _LinenInit:
    """Stands in for a linen module in the loss: the first call initialises it."""

    def __init__(self, module: linen.Module, key: Any):
        self._module, self._key, self.variables = module, key, None

    def __call__(self, *args: Any, rngs: Mapping[str, jax.Array] | None = None, **kwargs: Any) -> Any:
        kwargs = with_train_flag(type(self._module).__call__, kwargs, training=True, positional=1 + len(args))
        outputs, variables = self._module.init_with_output({"params": self._key, **(rngs or {})}, *args, **kwargs)
        self.variables = self.variables or variables
        return outputs


@contextlib.contextmanager
def _record_streams(names: set[str]) -> Iterator[None]:
    """Add the name of every random stream that linen modules ask for."""
    make_rng = Scope.make_rng

    def recording(scope: Scope, name: str = "params") -> Any:
        names.add(name)
        return make_rng(scope, name)

    Scope.make_rng = recording  # type: ignore[method-assign]
    try:
        yield
    finally:
        Scope.make_rng = make_rng  # type: ignore[method-assign]


class LinenCall:
    """A linen module with its arrays: call it as `model(x)`. `train`, `training` and `deterministic` are filled in."""

    def __init__(self, module: linen.Module, variables: Variables, call: Call, rematerialised: set[str], streams: set[str]):
        self._module, self._call, self._rematerialised, self._streams = module, call, rematerialised, streams
        self.params, self.stats, self._calls = variables.params, variables.stats, 0

    def __call__(self, *args: Any, rngs: Mapping[str, jax.Array] | None = None, **kwargs: Any) -> Any:
        """Apply the module.

        Args:
          rngs: keys of random streams by name, in place of the step's own.
        """
        call, variables = self._call, {"params": self.params, **self.stats}
        kwargs = with_train_flag(type(self._module).__call__, kwargs, training=call.training, positional=1 + len(args))
        with linen.intercept_methods(_interceptor(call, self._rematerialised)):
            if not call.training:
                return self._module.apply(variables, *args, rngs=dict(rngs or {}), **kwargs)
            key = jax.random.fold_in(call.key, self._calls)
            self._calls += 1  # a loss that calls the model twice draws twice
            # Flax gives "params" in place of a stream that it does not have, and lifted transforms split streams by name.
            outputs, changed, given = None, {}, None
            while given != (names := {"params", *self._streams}):  # again, if the call asks for one that no call has asked for
                given = names
                keys = {name: call.localize(key_of_stream(key, name)) for name in sorted(names)} | dict(rngs or {})
                with _record_streams(self._streams):
                    outputs, changed = self._module.apply(variables, *args, rngs=keys, mutable=list(self.stats), **kwargs)
        self.stats = {**self.stats, **changed}
        return outputs


def key_of_stream(key: jax.Array, name: str) -> jax.Array:
    """The key of a random stream of a linen module, "dropout" or another."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def _call_block(blocks: BlockCalls, path: str, module: linen.Module, call: Callable[[linen.Module], Any]) -> Any:
    """`call(module)` by way of `blocks`, as a function of the module's parameters and other variables."""

    def lifted(function: Callable[..., Any], scopes: Any) -> Any:
        def run_packed(scope_of: Any, variables_of: Any, variables: tuple, rngs: tuple) -> tuple[Any, Any]:
            (collections,) = variables  # of the module, and of modules that it was given
            own = dict(collections[0].get("params", {}))
            names = flatten(own)

            def run(params: dict[str, Any], others: tuple) -> tuple[Any, Any]:
                variables, rngs = others
                named = map_paths(lambda name, _: params[name], own)
                scope = scope_of((({**variables[0][0], "params": named}, *variables[0][1:]),), rngs)
                return function(scope), variables_of(scope)

            if len(collections) > 1 and isinstance(blocks, BlockTrace):
                blocks.reasons[path] = "it uses modules that were made outside of it"
            rest = ({name: part for name, part in collections[0].items() if name != "params"}, *collections[1:])
            return blocks.run(path, run, names, ((rest,), rngs))

        return lift.pack(run_packed, (True,), (True,), (True,))(scopes)

    return lift_direct_transform(lifted, (call,), module)


def _interceptor(call: Call, seen: set[str]) -> Callable[..., Any]:
    """Linen's hook for what nnx lets us set on the module: synchronised BatchNorm, remat by path, and what outputs go through."""
    active: set[str] = set()
    called: dict[str, None] = {}  # paths, in order

    def intercept(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module, path = context.module, "/".join(context.module.path)
        if context.method_name != "__call__":
            return next_fun(*args, **kwargs)
        if isinstance(module, linen.BatchNorm):
            object.__setattr__(module, "axis_name", averaging_axes(module.axis_name, call.sync_axes))
        if call.dtype is not None and getattr(module, "dtype", call.dtype) is None:
            object.__setattr__(module, "dtype", call.dtype)
        if isinstance(module, linen.Dense | linen.DenseGeneral):
            object.__setattr__(module, "dot_general", call.products(path, module.dot_general_cls or module.dot_general))
        if path in active:  # called by `again`
            return next_fun(*args, **kwargs)
        change = call.output_hook(path) or (lambda outputs: outputs)
        called[path] = None
        policies = remat_policies(call.remat, called) if call.remat else {}
        if path in policies:
            seen.add(path)

        def again(inner: linen.Module) -> Any:
            return type(inner).__call__(inner, *args, **kwargs)  # type: ignore[operator]

        def recomputed(inner: linen.Module) -> Any:
            """Unless by its caller."""
            return linen.remat(again, policy=policies[path])(inner) if path in policies and not RECOMPUTED.get() else again(inner)

        blocks = call.blocks if call.blocks is not None and call.blocks.takes(path) else None
        if path not in policies and blocks is None:
            return change(next_fun(*args, **kwargs))
        active.add(path)
        try:
            return change(recomputed(module) if blocks is None else _call_block(blocks, path, module, recomputed))
        finally:
            active.discard(path)

    return intercept
