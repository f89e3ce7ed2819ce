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
from spmd.models.linen_record import NOT_KEPT, Record, Seen, recording, without
from spmd.models.linen_switches import check_arguments, set_fields

# flax.linen.fp8_ops.OVERWRITE_WITH_GRADIENT, without importing its kernels
BY_GRADIENT = "_overwrite_with_gradient"
Method = Callable[..., Any] | str | None


class LinenModel(Model):
    """A Flax linen module; its shapes are found by running the loss once, abstractly, on the first
    batch. A bound one brings its arrays.
    """

    def __init__(self, module: linen.Module):
        self._given: Variables | None = None
        if module.scope is not None:
            module, variables = module.unbind()
            self._given = _split(variables)
        self._module, self._seen = module, Seen()

    @property
    def concrete(self) -> Variables | None:
        return (
            None
            if self._given is None
            else dataclasses.replace(self._given, stats=self._seen.kept(self._given.stats))
        )

    def init(self, key: Any, run: Callable[[Any], Any]) -> Variables:
        made = _split(self._boxed(key, run))
        given = self.concrete
        if given is None:
            return made
        given_by_path, made_by_path = (
            {path.removeprefix("stats/"): leaf for path, leaf in flatten(tree).items()}
            for tree in (given, made)
        )
        # A loss need not call all of a module that has its arrays, and statistics keep the shapes
        # that they have.
        wanted = {
            path: given_by_path[path]
            if path in given_by_path and not path.startswith("params/")
            else leaf
            for path, leaf in made_by_path.items()
        }
        problems = shape_problems(
            {path: leaf for path, leaf in given_by_path.items() if path in wanted},
            wanted,
            "the module",
        )
        raise_problems(
            ModelError, "the linen module is bound to other arrays than its `init` makes", problems
        )
        return given

    def _boxed(self, key: Any, run: Callable[[Any], Any]) -> dict:
        probe = _LinenInit(self._module, key, self._seen)
        run(probe)
        if not probe.called:
            raise ModelError(
                "the loss never calls the model, so a linen module cannot be initialised from it.",
                fix="model(inputs) in the loss.",
            )
        self._seen.check_sown()
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
        return self._seen.kept(probe.variables)

    def names(self, key: Any, run: Callable[[Any], Any]) -> dict[str, tuple]:
        names: dict[str, tuple] = {}

        def visit():
            specs = linen.get_partition_spec(self._boxed(key, run).get("params", {}))
            leaves = jax.tree_util.tree_leaves_with_path(
                specs, is_leaf=lambda x: isinstance(x, jax.sharding.PartitionSpec)
            )
            names.update({path_of(keys): tuple(spec) for keys, spec in leaves if len(spec)})

        trace_abstractly(visit, "the model")
        return names

    def notes(self) -> list[str]:
        return self._seen.notes()

    def bind(self, variables: Variables, call: Call) -> "LinenCall":
        maker = "its `init` made" if self._given is None else "the bound module has"
        return LinenCall(self._module, variables, call, self._seen, maker)

    def check_remat(self, patterns: tuple[str, ...]) -> None:
        for pattern in patterns:
            if not matches(pattern, self._seen.rematerialised):
                raise no_such_module(pattern, [])

    def get_stats(self, bound: "LinenCall") -> Tree:
        return bound.stats

    def rebuild(self, variables: Variables) -> linen.Module:
        return self._module.bind({"params": variables.params, **variables.stats})


def _split(variables: Any) -> Variables:
    """A linen module's collections; what is no parameter changes with a call."""
    plain = without(linen.meta.unbox(unfreeze(variables)), {*NOT_KEPT})
    return Variables(plain.pop("params", {}), plain, {})


class _LinenHandle:
    """A linen module in a loss: it is called, and so are its methods; its fields can be read."""

    def __init__(self, module: linen.Module, seen: Seen):
        self._module, self._seen = module, seen

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
        named = (mutable,) if isinstance(mutable, str) else mutable
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
        self._seen.returned.update(named)
        outputs, collections = self._apply(args, kwargs, method, tuple(named))
        return (
            (outputs, {name: collections[name] for name in named if name in collections})
            if mutable
            else outputs
        )

    def _apply(
        self, args: tuple, kwargs: dict[str, Any], method: Method, named: tuple[str, ...]
    ) -> tuple[Any, Mapping[str, Any]]:
        """Outputs of a call, and the collections that it changes."""
        raise NotImplementedError  # abstract: subclasses initialise the module, or apply it

    def __getattr__(self, name: str) -> Any:
        """A method of the module, or the value of one of its fields."""
        if name.startswith("_"):
            raise AttributeError(name)
        module = self._module
        if name in {field.name for field in dataclasses.fields(module)}:
            value = getattr(module, name)
            return (
                functools.partial(self, method=name) if isinstance(value, linen.Module) else value
            )
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
        twice = {  # `linen.merge_param` takes one of the two
            name
            for name in filled.keys() - kwargs.keys()
            if isinstance(getattr(module, name, None), bool) and parameters[name].default is None
        }
        return module, {name: value for name, value in filled.items() if name not in twice}


def _function(module: linen.Module, method: Method) -> Callable[..., Any]:
    """The function that a call of the module calls, with the module as its first argument."""
    if isinstance(method, str):
        value = getattr(type(module), method, None) or getattr(module, method)
        return type(value).__call__ if isinstance(value, linen.Module) else value
    return type(module).__call__ if method is None else getattr(method, "__func__", method)


class _LinenInit(_LinenHandle):
    """Stands in for a linen module in the loss: its calls initialise it."""

    def __init__(self, module: linen.Module, key: Any, seen: Seen):
        super().__init__(module, seen)
        self._key, self.called, self.variables = key, False, dict[str, Any]()
        self._makers: dict[str, str] = {}  # calls by the paths of the arrays that they made

    def _apply(
        self, args: tuple, kwargs: dict[str, Any], method: Method, named: tuple[str, ...]
    ) -> tuple[Any, Mapping[str, Any]]:
        rngs = kwargs.pop("rngs", None) or {}
        module, switched = self._prepared(args, kwargs, method, training=True)
        self._check_arguments(module, {"params": self._key, **rngs}, args, switched, method)
        mutable, record = DenyList(tuple({*NOT_KEPT} - {*named})), Record()
        with recording(record):
            keys = {"params": self._key, **rngs}
            outputs, variables = module.init_with_output(
                keys, *args, method=method, mutable=mutable, **switched
            )
        self._seen.training.draws |= record.draws
        self._seen.training.sown |= record.sown
        self.called, kept = True, without(variables, set(NOT_KEPT))
        self._check_shapes(kept, _call_text(module, method, args, switched))
        self.variables = _joined(self.variables, kept)
        return outputs, variables

    def _check_shapes(self, made: Mapping[str, Any], name: str) -> None:
        """Refuse calls that make one array in two shapes."""
        before, after = (flatten(linen.meta.unbox(tree)) for tree in (self.variables, made))
        problems = []
        for path, leaf in after.items():
            if (
                path in before
                and before[path].shape != leaf.shape
                and path.rpartition("/")[0] not in self._seen.training.sown
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
        given = (function, len(args), *sorted(kwargs))
        if (
            given in self._seen.checked
            or getattr(type(module), getattr(function, "__name__", ""), None) is not function
        ):
            return  # the last: a function of the loss

        def run(more: dict[str, bool]) -> tuple[Record, set[str]] | None:
            record, intercept, made = (
                Record(),
                _interceptor(Call(training=True), Seen()),
                set[str](),
            )
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

        check_arguments(function, kwargs, 1 + len(args), run)
        self._seen.checked.add(given)


def _joined(first: Any, second: Any) -> Any:
    """Nested dicts joined; the first one's leaves stay."""
    if not isinstance(first, Mapping) or not isinstance(second, Mapping):
        return first
    return {
        **second,
        **{
            name: _joined(part, second[name]) if name in second else part
            for name, part in first.items()
        },
    }


def _call_text(module: linen.Module, method: Method, args: tuple, kwargs: Mapping[str, Any]) -> str:
    """A call of a module, with the shapes of its inputs and its switches, for an error."""
    texts = [describe(value) if hasattr(value, "dtype") else short_repr(value) for value in args]
    texts += [f"{name}={value}" for name, value in kwargs.items() if isinstance(value, bool)]
    called = getattr(_function(module, method), "__name__", "a function")
    return f"{type(module).__name__}.{called}({', '.join(texts)})"


class LinenCall(_LinenHandle):
    """A linen module with its arrays: call it as `model(x)`, or a method. Arguments and fields that
    switch training are filled in.
    """

    def __init__(
        self, module: linen.Module, variables: Variables, call: Call, seen: Seen, maker: str
    ):
        super().__init__(module, seen)
        self._call, self._maker = call, maker
        self.params, self.stats, self._calls = variables.params, variables.stats, 0

    def _apply(
        self, args: tuple, kwargs: dict[str, Any], method: Method, named: tuple[str, ...]
    ) -> tuple[Any, Mapping[str, Any]]:
        call, variables, rngs = (
            self._call,
            {"params": self.params, **self.stats},
            dict(kwargs.pop("rngs", None) or {}),
        )
        module, kwargs = self._prepared(args, kwargs, method, training=call.training)
        with linen.intercept_methods(_interceptor(call, self._seen)):
            if not call.training:
                try:
                    return module.apply(
                        variables, *args, rngs=rngs, method=method, mutable=list(named), **kwargs
                    )
                except ModifyScopeVariableError as error:
                    what = str(error).partition(" (http")[0].rstrip(".")
                    fix = (
                        "change it in training only, as BatchNorm(use_running_average=not train) "
                        "does, `train` being an argument."
                    )
                    raise ModelError(
                        f"the linen module changes its statistics in evaluation: {what}.", fix=fix
                    ) from error
            key = jax.random.fold_in(call.key, self._calls)
            self._calls += 1  # a loss that calls the model twice draws twice
            # Flax gives "params" in place of a stream that it does not have, and lifted transforms
            # split streams by name.
            outputs, changed, given, record = None, {}, None, self._seen.training
            mutable = DenyList(("params", *({*NOT_KEPT} - {*named})))
            # again, if the call asks for one that no call has asked for
            while given != (names := {"params", *record.streams}):
                given = names
                keys = {
                    name: call.localize(key_of_stream(key, name)) for name in sorted(names)
                } | rngs
                with recording(record):
                    outputs, changed = module.apply(
                        variables, *args, rngs=keys, method=method, mutable=mutable, **kwargs
                    )
        self._seen.check_sown()
        kept = self._seen.kept(
            {name: part for name, part in changed.items() if name not in NOT_KEPT}
        )
        self._check_shapes(kept, _call_text(module, method, args, kwargs))
        self.stats = {**self.stats, **kept}
        return outputs, changed

    def _check_shapes(self, after: Mapping[str, Any], name: str) -> None:
        """Refuse a call that gives collections other arrays, or arrays other shapes."""
        old, new = (
            flatten({collection: self.stats.get(collection, {}) for collection in after}),
            flatten(after),
        )
        paths = [
            path for path in dict.fromkeys([*old, *new]) if _shape(old, path) != _shape(new, path)
        ]
        if not paths:
            return
        problems = []
        for path in paths:
            text = f"{self._maker} {shape_text(old, path)}, {name} makes {shape_text(new, path)}"
            fix = (
                "a variable of one shape, that does not depend on the number of rows, made in "
                "every call in training"
            )
            bound = (
                "; arrays that the module's `init` makes in training, such as module.init(key, x, "
                "train=True)"
            )
            problems.append(
                Problem(
                    path, [text], f"{fix}{bound if self._maker.startswith('the bound') else ''}."
                )
            )
        raise_problems(
            ModelError, "a call of the linen module changes the shapes of its collections", problems
        )


def _shape(arrays: Mapping[str, Any], path: str) -> tuple[int, ...] | None:
    return tuple(arrays[path].shape) if path in arrays else None


def key_of_stream(key: jax.Array, name: str) -> jax.Array:
    """The key of a random stream of a linen module, "dropout" or another."""
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
            rest = (
                {name: part for name, part in collections[0].items() if name != "params"},
                *collections[1:],
            )
            return blocks.run(path, run, names, ((rest,), rngs))

        return lift.pack(run_packed, (True,), (True,), (True,))(scopes)

    def own_call(inner: linen.Module) -> Any:
        return call(inner, *args, **kwargs)

    return lift_direct_transform(lifted, (own_call,), module)


def _interceptor(call: Call, seen: Seen) -> Callable[..., Any]:
    """Linen's hook for what nnx lets us set on the module: synchronised BatchNorm, remat by path,
    and what outputs go through.
    """
    active: set[str] = set()
    called: dict[str, None] = {}  # paths, in order

    def intercept(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module, path = context.module, "/".join(context.module.path)
        if context.method_name != "__call__":
            return next_fun(*args, **kwargs)
        if call.training:
            seen.note_call(module, path, kwargs)
        if isinstance(module, linen.BatchNorm):
            object.__setattr__(
                module, "axis_name", averaging_axes(module.axis_name, call.sync_axes, seen.unbound)
            )
        if call.dtype is not None and getattr(module, "dtype", call.dtype) is None:
            object.__setattr__(module, "dtype", call.dtype)
        if isinstance(module, linen.Dense | linen.DenseGeneral):
            object.__setattr__(
                module,
                "dot_general",
                call.products(path, module.dot_general_cls or module.dot_general),
            )
        if path in active:  # called by `_call_again`
            return next_fun(*args, **kwargs)
        around: dict[str, Around] = {}
        if (change := call.output_hook(path)) is not None:
            around["outputs"] = change_outputs(change)
        if call.blocks is not None and call.blocks.takes(path):
            around["block"] = functools.partial(_call_block, call.blocks, path)
        called[path] = None
        policies = remat_policies(call.remat, called) if call.remat else {}
        if path in policies:
            seen.rematerialised.add(path)
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
