"""Flax linen modules: initialised by the first call in the loss, applied with the train switch
filled in.
"""

import dataclasses
import functools
import inspect
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import linen
from flax.core import DenyList, lift, unfreeze
from flax.errors import ModifyScopeVariableError
from flax.linen.transforms import lift_direct_transform

from spmd.base.path_match import matches
from spmd.base.tree import Tree, describe, flatten, map_paths, path_of
from spmd.errors import ModelError, Problem, join_names, raise_problems, short_repr
from spmd.models.base import (
    RECOMPUTED,
    Call,
    Model,
    Variables,
    averaging_axes,
    no_such_module,
    remat_policies,
    shape_problems,
    shape_text,
    trace_abstractly,
    with_train_flag,
)
from spmd.models.blocks import BlockCalls, BlockTrace
from spmd.models.intercept import Around, change_outputs, surround
from spmd.models.linen_record import NOT_KEPT, Observations, Record, recording, without
from spmd.models.linen_switches import check_arguments, set_fields

# flax.linen.fp8_ops.OVERWRITE_WITH_GRADIENT, without importing its kernels
BY_GRADIENT = "_overwrite_with_gradient"
Method = Callable[..., Any] | str | None


class LinenModel(Model):
    """A Flax linen module; its shapes are found by running the loss once, abstractly, on the first
    batch. A bound one brings its arrays.
    """

    def __init__(self, module: linen.Module):
        self._passed: Variables | None = None
        if module.scope is not None:
            module, variables = module.unbind()
            self._passed = _split(variables)
        self._module = module
        self._observed = Observations()

    @property
    def concrete(self) -> Variables | None:
        if self._passed is None:
            return None
        return dataclasses.replace(
            self._passed, stats=self._observed.without_sown(self._passed.stats)
        )

    def make_variables(self, key: Any, run_loss: Callable[[Any], Any]) -> Variables:
        made = _split(self._boxed(key, run_loss))
        passed = self.concrete
        if passed is None:
            return made
        made_by_path = _by_path(made)
        passed_by_path = _by_path(passed)
        # A loss need not call all of a module that has its arrays.
        for path in passed_by_path.keys() - made_by_path.keys():
            del passed_by_path[path]
        # Statistics keep the shapes that they have.
        for path, leaf in passed_by_path.items():
            if not path.startswith("params/"):
                made_by_path[path] = leaf
        problems = shape_problems(passed_by_path, made_by_path, "the module")
        raise_problems(
            ModelError,
            "the linen module is bound to other arrays than its `init` makes",
            problems,
            fix="arrays of the shapes that it makes.",
        )
        return passed

    def _boxed(self, key: Any, run_loss: Callable[[Any], Any]) -> dict:
        probe = _LinenInit(self._module, key, self._observed)
        run_loss(probe)
        if not probe.called:
            raise ModelError(
                "the loss never calls the model, so a linen module cannot be initialised from it.",
                fix="model(inputs) in the loss.",
            )
        self._observed.check_sown()
        if BY_GRADIENT in probe.variables:
            paths = join_names(flatten(linen.meta.unbox(probe.variables[BY_GRADIENT])), most=2)
            why = (
                f'the module keeps a collection "{BY_GRADIENT}" ({paths}), as flax\'s float8 '
                "products do."
            )
            why += (
                "\n    Its next values are gradients, which no call computes: they would stay as "
                "they were made, and scale nothing."
            )
            fix = (
                'the module without them (dot_general_cls=None), and [[precision]] path = "**", '
                'products = "float8" in the layout.'
            )
            raise ModelError(why, fix=fix)
        return self._observed.without_sown(probe.variables)

    def names(self, key: Any, run_loss: Callable[[Any], Any]) -> dict[str, tuple]:
        names: dict[str, tuple] = {}

        def visit():
            specs = linen.get_partition_spec(self._boxed(key, run_loss).get("params", {}))
            leaves = jax.tree_util.tree_leaves_with_path(
                specs, is_leaf=lambda x: isinstance(x, jax.sharding.PartitionSpec)
            )
            names.update({path_of(keys): tuple(spec) for keys, spec in leaves if len(spec)})

        trace_abstractly(visit, "the model")
        return names

    def notes(self) -> list[str]:
        return self._observed.notes()

    def bind(self, variables: Variables, call: Call) -> "LinenCall":
        maker = "the bound module has"
        if self._passed is None:
            maker = "its `init` made"
        return LinenCall(self._module, variables, call, self._observed, maker)

    def check_remat(self, patterns: tuple[str, ...]) -> None:
        for pattern in patterns:
            if not matches(pattern, self._observed.rematerialised):
                raise no_such_module(pattern, [])

    def get_stats(self, bound: "LinenCall") -> Tree:
        return bound.stats

    def rebuild(self, variables: Variables) -> linen.Module:
        return self._module.bind({"params": variables.params, **variables.stats})


def _by_path(variables: Variables) -> dict[str, Any]:
    return {path.removeprefix("stats/"): leaf for path, leaf in flatten(variables).items()}


def _split(variables: Any) -> Variables:
    """Return a linen module's collections; all but parameters may change with a call."""
    plain = without(linen.meta.unbox(unfreeze(variables)), {*NOT_KEPT})
    return Variables(plain.pop("params", {}), plain, {})


class _LinenHandle:
    """A linen module in a loss: it is called, and so are its methods; its fields can be read."""

    def __init__(self, module: linen.Module, observed: Observations):
        self._module = module
        self._observed = observed

    def __call__(
        self, *args: Any, method: Method = None, mutable: str | Sequence[str] = (), **kwargs: Any
    ) -> Any:
        """Apply the module.

        Args:
          method: a method to call, or its name; None: `__call__`.
          mutable: collections into which the module sows: the call returns (outputs, {collection:
            values}), and the values are not kept.
          rngs: keys of random streams by name, in place of the step's own.
        """
        named = mutable
        if isinstance(mutable, str):
            named = (mutable,)
        if (
            not isinstance(named, Sequence)
            or not all(isinstance(name, str) for name in named)
            or "params" in named
        ):
            fix = (
                'the names of collections, such as mutable=["losses"]; statistics are kept without '
                "it."
            )
            raise ModelError(f"model(..., mutable={short_repr(mutable)}).", fix=fix)
        self._observed.returned.update(named)
        outputs, collections = self._apply(args, kwargs, method, tuple(named))
        if not mutable:
            return outputs
        return (outputs, {name: collections[name] for name in named if name in collections})

    def _apply(
        self, args: tuple, kwargs: dict[str, Any], method: Method, named: tuple[str, ...]
    ) -> tuple[Any, Mapping[str, Any]]:
        """Outputs of a call, and the collections that it changes."""
        # Abstract: subclasses initialise the module, or apply it.
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        """A method of the module, or the value of one of its fields."""
        if name.startswith("_"):
            raise AttributeError(name)
        module = self._module
        if name in {field.name for field in dataclasses.fields(module)}:
            value = getattr(module, name)
            if not isinstance(value, linen.Module):
                return value
            return functools.partial(self, method=name)
        if callable(getattr(type(module), name, None)) and not hasattr(linen.Module, name):
            return functools.partial(self, method=name)
        why = f"{type(module).__name__} has no method and no field {name!r}"
        raise AttributeError(
            f"{why}; a module that it makes is called by  model(x, method=lambda module, x: "
            f"module.{name}(x))"
        )

    def _prepared(
        self, args: tuple, kwargs: dict[str, Any], method: Method, *, training: bool
    ) -> tuple[linen.Module, dict[str, Any]]:
        """The module and the arguments by name of a call, with the switches set."""
        function = _function(self._module, method)
        module = set_fields(self._module, function, training=training)
        filled = with_train_flag(function, kwargs, training=training, positional=1 + len(args))
        parameters = inspect.signature(function).parameters
        # `linen.merge_param` (flax 0.12) raises where a switch is both a field and an argument.
        twice = {
            name
            for name in filled.keys() - kwargs.keys()
            if isinstance(getattr(module, name, None), bool) and parameters[name].default is None
        }
        return module, {name: value for name, value in filled.items() if name not in twice}


def _function(module: linen.Module, method: Method) -> Callable[..., Any]:
    """The function that a call of the module calls, with the module as its first argument."""
    if isinstance(method, str):
        value = getattr(type(module), method, None) or getattr(module, method)
        if isinstance(value, linen.Module):
            return type(value).__call__
        return value
    if method is None:
        return type(module).__call__
    return getattr(method, "__func__", method)


class _LinenInit(_LinenHandle):
    """Stands in for a linen module in the loss: its calls initialise it."""

    def __init__(self, module: linen.Module, key: Any, observed: Observations):
        super().__init__(module, observed)
        self._key = key
        self.called = False
        self.variables = dict[str, Any]()
        # Calls by the paths of the arrays that they made.
        self._makers: dict[str, str] = {}

    def _apply(
        self, args: tuple, kwargs: dict[str, Any], method: Method, named: tuple[str, ...]
    ) -> tuple[Any, Mapping[str, Any]]:
        rngs = kwargs.pop("rngs", None) or {}
        module, switched = self._prepared(args, kwargs, method, training=True)
        self._check_arguments(module, {"params": self._key, **rngs}, args, switched, method)
        mutable = DenyList(tuple({*NOT_KEPT} - {*named}))
        record = Record()
        with recording(record):
            keys = {"params": self._key, **rngs}
            outputs, variables = module.init_with_output(
                keys, *args, method=method, mutable=mutable, **switched
            )
        self._observed.training.draws |= record.draws
        self._observed.training.sown |= record.sown
        self.called = True
        made = without(variables, set(NOT_KEPT))
        self._check_shapes(made, _call_text(module, method, args, switched))
        self.variables = _joined(self.variables, made)
        return outputs, variables

    def _check_shapes(self, made: Mapping[str, Any], name: str) -> None:
        """Refuse calls that make one array in two shapes."""
        before = flatten(linen.meta.unbox(self.variables))
        after = flatten(linen.meta.unbox(made))
        problems = []
        for path, leaf in after.items():
            if (
                path in before
                and before[path].shape != leaf.shape
                and path.rpartition("/")[0] not in self._observed.training.sown
            ):
                text = (
                    f"{self._makers[path]} makes {describe(before[path])}, {name} makes "
                    f"{describe(leaf)}"
                )
                problems.append(Problem(path, [text], "one shape for all calls."))
        raise_problems(
            ModelError,
            "calls of the linen module in the loss make one array in two shapes",
            problems,
        )
        self._makers = {**dict.fromkeys(after, name), **self._makers}

    def _check_arguments(
        self,
        module: linen.Module,
        keys: dict[str, Any],
        args: tuple,
        kwargs: dict[str, Any],
        method: Method,
    ) -> None:
        """Refuse an unknown argument that switches training."""
        function = _function(module, method)
        signature = (function, len(args), *sorted(kwargs))
        if signature in self._observed.checked:
            return
        if getattr(type(module), getattr(function, "__name__", ""), None) is not function:
            # A function of the loss, which knows its arguments, and no method.
            return

        def trace_call(more: dict[str, bool]) -> tuple[Record, set[str]] | None:
            record = Record()
            intercept = _interceptor(Call(training=True), Observations())
            made = set[str]()
            options = {
                "rngs": keys,
                "method": method,
                "mutable": DenyList(("params", *NOT_KEPT)),
                **kwargs,
                **more,
            }

            def call() -> Any:
                variables = module.init(keys, *args, method=method, **kwargs, **more)
                made.update(flatten(linen.meta.unbox(variables)))
                with recording(record), linen.intercept_methods(intercept):
                    return module.apply(variables, *args, **options)

            try:
                jax.eval_shape(call)
            except Exception:
                # with this value the model is not meant for such a batch, as with `decode=True`
                return None
            return record, made

        check_arguments(function, kwargs, 1 + len(args), trace_call)
        self._observed.checked.add(signature)


def _joined(first: Any, second: Any) -> Any:
    """Return nested dicts joined; the first one's leaves stay."""
    if not isinstance(first, Mapping) or not isinstance(second, Mapping):
        return first
    joined = dict(second)
    for name, part in first.items():
        joined[name] = _joined(part, second.get(name, {}))
    return joined


def _input_text(value: Any) -> str:
    if hasattr(value, "dtype"):
        return describe(value)
    return short_repr(value)


def _call_text(module: linen.Module, method: Method, args: tuple, kwargs: Mapping[str, Any]) -> str:
    """Return a call of a module as text, with the shapes of its inputs and its switches."""
    texts = [_input_text(value) for value in args]
    texts += [f"{name}={value}" for name, value in kwargs.items() if isinstance(value, bool)]
    called = getattr(_function(module, method), "__name__", "a function")
    return f"{type(module).__name__}.{called}({', '.join(texts)})"


class LinenCall(_LinenHandle):
    """A linen module with its arrays: call it as `model(x)`, or a method. Arguments and fields that
    switch training are filled in.
    """

    def __init__(
        self,
        module: linen.Module,
        variables: Variables,
        call: Call,
        observed: Observations,
        maker: str,
    ):
        super().__init__(module, observed)
        self._call = call
        self._maker = maker
        self.params = variables.params
        self.stats = variables.stats
        self._calls = 0

    def _apply(
        self, args: tuple, kwargs: dict[str, Any], method: Method, named: tuple[str, ...]
    ) -> tuple[Any, Mapping[str, Any]]:
        call = self._call
        rngs = dict(kwargs.pop("rngs", None) or {})
        module, kwargs = self._prepared(args, kwargs, method, training=call.training)
        apply = functools.partial(
            module.apply, {"params": self.params, **self.stats}, *args, method=method, **kwargs
        )
        with linen.intercept_methods(_interceptor(call, self._observed)):
            if not call.training:
                return _evaluated(apply, rngs, named)
            key = jax.random.fold_in(call.key, self._calls)
            # A loss that calls the model twice draws twice.
            self._calls += 1
            # Flax (0.12, Scope.make_rng) gives "params" in place of a stream that it does not have,
            # and lifted transforms split streams by name: the call is repeated if it asks for a
            # stream that no call has asked for.
            outputs = None
            changed: Any = {}
            streams = None
            record = self._observed.training
            mutable = DenyList(("params", *({*NOT_KEPT} - {*named})))
            while streams != {"params", *record.streams}:
                streams = {"params", *record.streams}
                keys = {name: call.localize(key_of_stream(key, name)) for name in sorted(streams)}
                with recording(record):
                    outputs, changed = apply(rngs=keys | rngs, mutable=mutable)
        self._observed.check_sown()
        stats = {name: part for name, part in changed.items() if name not in NOT_KEPT}
        stats = self._observed.without_sown(stats)
        self._check_shapes(stats, _call_text(module, method, args, kwargs))
        self.stats = {**self.stats, **stats}
        return outputs, changed

    def _check_shapes(self, after: Mapping[str, Any], name: str) -> None:
        """Refuse a call that gives collections other arrays, or arrays other shapes."""
        old = flatten({collection: self.stats.get(collection, {}) for collection in after})
        new = flatten(after)
        fix = (
            "a variable of one shape, that does not depend on the number of rows, made in "
            "every call in training"
        )
        if self._maker.startswith("the bound"):
            fix += (
                "; arrays that the module's `init` makes in training, such as module.init(key, x, "
                "train=True)"
            )
        problems = []
        for path in dict.fromkeys([*old, *new]):
            if _shape(old, path) != _shape(new, path):
                text = f"{self._maker} {shape_text(old, path)}, "
                text += f"{name} makes {shape_text(new, path)}"
                problems.append(Problem(path, [text], f"{fix}."))
        raise_problems(
            ModelError, "a call of the linen module changes the shapes of its collections", problems
        )


def _evaluated(
    apply: Callable[..., Any], rngs: dict[str, Any], named: tuple[str, ...]
) -> tuple[Any, Mapping[str, Any]]:
    """Return outputs of a call in evaluation, and the collections that it returns."""
    try:
        return apply(rngs=rngs, mutable=list(named))
    except ModifyScopeVariableError as error:
        reason = str(error).partition(" (http")[0].rstrip(".")
        fix = (
            "change it in training only, as BatchNorm(use_running_average=not train) "
            "does, `train` being an argument."
        )
        raise ModelError(
            f"the linen module changes its statistics in evaluation: {reason}.", fix=fix
        ) from error


def _shape(arrays: Mapping[str, Any], path: str) -> tuple[int, ...] | None:
    if path not in arrays:
        return None
    return tuple(arrays[path].shape)


def key_of_stream(key: jax.Array, name: str) -> jax.Array:
    """Return the key of a random stream of a linen module, "dropout" or another."""
    # Python's `hash` of a text differs between processes, which have to draw the same numbers.
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def _call_block(
    blocks: BlockCalls,
    path: str,
    call: Callable[..., Any],
    module: linen.Module,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Return `call(module, *args, **kwargs)` by way of `blocks`, as a function of the module's
    parameters and other variables.
    """

    def lifted(function: Callable[..., Any], scopes: Any) -> Any:
        def run_packed(
            scope_of: Any, variables_of: Any, variables: tuple, rngs: tuple
        ) -> tuple[Any, Any]:
            # Of the module first, then of modules that were made elsewhere and passed to it: flax
            # lifts the scopes of all.
            (collections,) = variables
            block_params = dict(collections[0].get("params", {}))

            def call_with(params: dict[str, Any], others: tuple) -> tuple[Any, Any]:
                ((first, *outer),), rngs = others
                named = map_paths(lambda name, _: params[name], block_params)
                scope = scope_of((({**first, "params": named}, *outer),), rngs)
                return function(scope), variables_of(scope)

            if len(collections) > 1 and isinstance(blocks, BlockTrace):
                blocks.reasons[path] = "it uses modules that were made outside of it"
            first = {name: part for name, part in collections[0].items() if name != "params"}
            others = ((first, *collections[1:]),), rngs
            return blocks.call_block(path, call_with, flatten(block_params), others)

        return lift.pack(run_packed, (True,), (True,), (True,))(scopes)

    def own_call(inner: linen.Module) -> Any:
        return call(inner, *args, **kwargs)

    return lift_direct_transform(lifted, (own_call,), module)


def _interceptor(call: Call, observed: Observations) -> Callable[..., Any]:
    """Return a function for `linen.intercept_methods`, which does in calls what is set on an nnx
    module: synchronised BatchNorm, remat by path, and functions that outputs go through.
    """
    active: set[str] = set()
    # Paths, in the order of calls.
    called: dict[str, None] = {}

    def intercept(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module = context.module
        path = "/".join(context.module.path)
        if context.method_name != "__call__":
            return next_fun(*args, **kwargs)
        if call.training:
            observed.note_call(module, path, kwargs)
        # Linen modules are frozen outside of `setup` (flax 0.12, Module.__setattr__); these are
        # clones of the user's, made for this call.
        if isinstance(module, linen.BatchNorm):
            axes = averaging_axes(module.axis_name, call.sync_axes, observed.unbound)
            object.__setattr__(module, "axis_name", axes)
        if call.dtype is not None and getattr(module, "dtype", call.dtype) is None:
            object.__setattr__(module, "dtype", call.dtype)
        if isinstance(module, linen.Dense | linen.DenseGeneral):
            product = call.products(path, module.dot_general_cls or module.dot_general)
            object.__setattr__(module, "dot_general", product)
        # `_call_again` calls the module inside of the functions around it, which stay once.
        if path in active:
            return next_fun(*args, **kwargs)
        around: dict[str, Around] = {}
        if (change := call.output_hook(path)) is not None:
            around["outputs"] = change_outputs(change)
        if call.blocks is not None and call.blocks.takes(path):
            around["block"] = functools.partial(_call_block, call.blocks, path)
        called[path] = None
        policies = {}
        if call.remat:
            policies = remat_policies(call.remat, called)
        if path in policies:
            observed.rematerialised.add(path)
            around["remat"] = functools.partial(_recompute, policies[path])
        if not around.keys() & {"block", "remat"}:

            def call_next(module: linen.Module, /, *args: Any, **kwargs: Any) -> Any:
                return next_fun(*args, **kwargs)

            return surround(around, call_next)(module, *args, **kwargs)
        active.add(path)
        try:
            return surround(around, _call_again)(module, *args, **kwargs)
        finally:
            active.discard(path)

    return intercept


def _call_again(module: linen.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Call a module that flax may have made for a transformation; the interceptor sees this call,
    too.
    """
    return type(module).__call__(module, *args, **kwargs)  # type: ignore[operator]


def _recompute(
    policy: Callable[..., Any],
    call: Callable[..., Any],
    module: linen.Module,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Recompute a module in the backward pass, unless its caller does."""
    if RECOMPUTED.get():
        return call(module, *args, **kwargs)
    return linen.remat(lambda inner: call(inner, *args, **kwargs), policy=policy)(module)
