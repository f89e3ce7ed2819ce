"""A model of a public repository with its loss, and the plain loop on one device that every layout
is held against.
"""

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx

import spmd
from spmd.base.tree import Tree, flatten
from spmd.errors import SpmdError
from spmd.models.flax_linen import key_of_stream

ROWS, STEPS = 16, 6
# of random numbers, in linen modules
STREAMS = ("params", "dropout", "droppath", "noise", "label_dropout", "rng", "default")
SGD = optax.sgd(1e-2, momentum=0.9)
# With the usual eps of 1e-8, an update by rounding noise is as large as any: the gradient of a
# key's bias is 0 but for rounding.
ADAMW = optax.adamw(1e-2, eps=1e-3)


@dataclasses.dataclass(frozen=True)
class Case:
    """One model.

    Attributes:
      name: in the table.
      model: an `nnx.Module`, a linen module bound to its variables, or `Functions`; of float64
        where the repository's code allows it.
      loss: `loss(model, batch)` or `loss(model, batch, rng)`, as a user writes it.
      batches: STEPS batches of NumPy arrays.
      optimizer: AdamW, unless the model's authors take another.
      layouts: layouts beside those that every model is tried on: {name in the table: options of
        `Trainer`}.
      left_out: {layout: why it is not tried}.
      fixes: {layout: (a part of the error, options of `Trainer` that its fix asks for)}.
      single: whether JAX's float64 is off with a codec: the repository's code makes numbers of that
        type, which do not mix with float32.
      draws: whether the model or the loss draws random numbers. Microbatches draw numbers of their
        own.
      tolerance: how far from the plain loop's numbers, relative to the largest of an array.
    """

    name: str
    model: Any
    loss: Callable[..., Any]
    batches: Sequence[Tree]
    optimizer: optax.GradientTransformation = ADAMW
    layouts: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    left_out: Mapping[str, str] = dataclasses.field(default_factory=dict)
    fixes: Mapping[str, tuple[str, Mapping[str, Any]]] = dataclasses.field(default_factory=dict)
    single: bool = False
    draws: bool = False
    tolerance: float = 1e-5


class Called:
    """A linen module with its variables, called as in a loss of `spmd`, by plain flax.

    Args:
      module: unbound.
      params, rest: its collections.
      key: of the step; each call and each random stream has a key of its own, as `spmd` derives
        them.
    """

    def __init__(self, module: linen.Module, params: Tree, rest: Tree, key: jax.Array):
        self.module, self.params, self.rest, self._key, self._calls = module, params, rest, key, 0

    def __call__(self, *args: Any, method: Any = None, **kwargs: Any) -> Any:
        key = jax.random.fold_in(self._key, self._calls)
        self._calls += 1
        rngs = {name: key_of_stream(key, name) for name in STREAMS}
        variables = {"params": self.params, **self.rest}
        out, changed = self.module.apply(
            variables, *args, rngs=rngs, method=method, mutable=list(self.rest), **kwargs
        )
        self.rest = {**self.rest, **changed}
        return out

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """A method of the module."""
        return functools.partial(self, method=name)


@dataclasses.dataclass(frozen=True)
class Functions:
    """A functional model without state, and its parameters of float64."""

    model: spmd.FunctionalModel
    params: Tree


class CalledFunction:
    """Called as a functional model in a loss of `spmd`.

    Args:
      function: `apply` of the model.
      params: of the model.
      key: of the step, from which each call has a key of its own.
    """

    def __init__(self, function: Callable[..., Any], params: Tree, key: jax.Array):
        self.params, self._function, self._key, self._calls = params, function, key, 0

    def __call__(self, *args: Any) -> Any:
        key = jax.random.fold_in(self._key, self._calls)
        self._calls += 1
        keys = {"rng": key} if "rng" in inspect.signature(self._function).parameters else {}
        return self._function(self.params, *args, **keys)


def cell(case: Case, layout: str, options: Mapping[str, Any]) -> str:
    """What the table says of the model on a layout: the largest distance from the plain loop, or
    what was refused and the fix that works.

    Raises:
      AssertionError: the numbers are not those of the plain loop, or the layout was not refused
        though the case says so.
    """
    if layout in case.left_out:
        return case.left_out[layout]
    if case.draws and "accumulate" in options and layout not in case.fixes:
        return "numbers of its own for each microbatch"
    said = ""
    if layout in case.fixes:
        words, changed = case.fixes[layout]
        try:
            trained(case, options, case.optimizer)
        except SpmdError as error:
            assert re.search(words, str(error)), f"{case.name}, {layout}: {error}"
        else:
            raise AssertionError(f"{case.name}, {layout}: not refused")
        text = ", ".join(
            f"{name}={value}" for name, value in changed.items() if options.get(name) != value
        )
        options, said = changed, f"refused; with {text}: "
    codec = "codec" in layout
    if codec:
        case = dataclasses.replace(case, model=in_float32(case.model), optimizer=SGD)
    with jax.enable_x64(not (codec and case.single)):
        losses, params, stats, key = trained(case, options, case.optimizer)
        wanted = plainly(case, key, case.optimizer)
    start = parts_of(case.model)[0][0]
    if codec:
        distance = update_error(start, params, wanted[1])
        assert distance < 0.05, (
            f"{case.name}, {layout}: updates differ by {distance:.1e} of their norm"
        )
    else:
        moved = max(
            float(np.abs(a - b).max())
            for a, b in zip(jax.tree.leaves(wanted[1]), jax.tree.leaves(start), strict=True)
        )
        errors = {
            "losses": furthest(losses, wanted[0], 1e-3),
            "parameters": furthest(params, wanted[1], moved),
        }
        errors["statistics"] = furthest(stats, wanted[2], 1e-3)
        distance = float(np.max(list(errors.values())))
        assert distance < case.tolerance, f"{case.name}, {layout}: {errors}"
    return f"{said}{distance:.0e}"


def furthest(ours: Tree, theirs: Tree, least: float) -> float:
    """The largest distance of a number of `ours` from that of `theirs`, relative to the largest
    number of its array, and to no less than `least`: for parameters, what training has changed
    most.
    """
    found, wanted = flatten(ours), flatten(theirs)
    pairs = [
        (np.asarray(found[path], "float64"), np.asarray(wanted[path], "float64")) for path in found
    ]
    # NaN, if there is one
    return float(
        np.max([np.abs(a - b).max() / max(np.abs(b).max(), least) for a, b in pairs], initial=0.0)
    )


def update_error(start: Tree, ours: Tree, theirs: Tree) -> float:
    """The norm of the difference of all updates, divided by theirs."""
    norm = optax.global_norm(jax.tree.map(jnp.subtract, theirs, start))
    return float(optax.global_norm(jax.tree.map(jnp.subtract, ours, theirs)) / norm)


def plainly(case: Case, key_words: np.ndarray, optimizer: Any) -> tuple[list[float], Tree, Tree]:
    """Losses of the steps, and the parameters and other arrays after them, of a plain loop over
    full batches on one device.
    """
    split, merge = parts_of(case.model)
    params, rest = split
    draws = "rng" in inspect.signature(case.loss).parameters
    run_key = jax.random.wrap_key_data(jnp.asarray(key_words), impl="threefry2x32")

    def loss(params: Tree, rest: Tree, batch: Tree, number: jax.Array) -> tuple[jax.Array, Tree]:
        of_model, of_loss = jax.random.split(
            jax.random.fold_in(jax.random.fold_in(run_key, number), 0)
        )
        model, rest_of = merge(params, rest, of_model)
        value = case.loss(model, batch, *((of_loss,) if draws else ()))
        if isinstance(value, tuple):
            value = value[0].sum() / value[1].sum()
        return jnp.mean(value), rest_of()

    @jax.jit
    def step(
        params: Tree, rest: Tree, opt: Any, batch: Tree, number: jax.Array
    ) -> tuple[Tree, Tree, Any, jax.Array]:
        (value, rest), grads = jax.value_and_grad(loss, has_aux=True)(params, rest, batch, number)
        updates, opt = optimizer.update(grads, opt, params)
        return optax.apply_updates(params, updates), rest, opt, value

    opt, losses = optimizer.init(params), []
    for number, batch in enumerate(case.batches):
        params, rest, opt, value = step(params, rest, opt, batch, jnp.int32(number))
        losses.append(float(value))
    return losses, params, rest


def parts_of(model: Any) -> tuple[tuple[Tree, Tree], Callable[..., Any]]:
    """The model's parameters and other arrays, and what makes of such arrays and a key the model of
    a loss, and a function of its other arrays after it.
    """
    if isinstance(model, Functions):
        return of_functions(model)
    return of_nnx(model) if isinstance(model, nnx.Module) else of_linen(model)


def of_functions(model: Functions) -> tuple[tuple[Tree, Tree], Callable[..., Any]]:
    def merge(
        params: Tree, rest: Tree, key: jax.Array
    ) -> tuple[CalledFunction, Callable[[], Tree]]:
        return CalledFunction(model.model.apply, params, key), lambda: rest

    return (model.params, {}), merge


def of_nnx(model: nnx.Module) -> tuple[tuple[Tree, Tree], Callable[..., Any]]:
    graphdef, params, rngs, rest = nnx.split(model, nnx.Param, nnx.RngState, ...)

    def merge(params: Tree, rest: Tree, key: jax.Array) -> tuple[nnx.Module, Callable[[], Tree]]:
        bits = jax.random.bits(key)  # with which `spmd` folds the model's own keys
        keys = jax.tree.map(
            lambda x: (
                jax.random.fold_in(x, bits) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
            ),
            rngs,
        )
        model = nnx.merge(graphdef, params, keys, rest)
        return model, lambda: nnx.to_pure_dict(nnx.split(model, nnx.Param, nnx.RngState, ...)[3])

    return (nnx.to_pure_dict(params), nnx.to_pure_dict(rest)), merge


def of_linen(model: linen.Module) -> tuple[tuple[Tree, Tree], Callable[..., Any]]:
    module, variables = model.unbind()
    rest = {name: arrays for name, arrays in variables.items() if name != "params"}

    def merge(params: Tree, rest: Tree, key: jax.Array) -> tuple[Called, Callable[[], Tree]]:
        called = Called(module, params, rest, key)
        return called, lambda: called.rest

    return (variables["params"], rest), merge


def trained(
    case: Case, options: Mapping[str, Any], optimizer: Any
) -> tuple[list[float], Tree, Tree, np.ndarray]:
    """Losses, and the parameters and other arrays after the steps, of a trainer; and the key of the
    run.
    """
    options = dict(options)
    mesh = spmd.MeshSpec.parse(options.pop("mesh"))
    placed = spmd.make_mesh(mesh, devices=jax.devices()[: mesh.size])
    model = (
        case.model.model.bind(case.model.params)
        if isinstance(case.model, Functions)
        else case.model
    )
    trainer = spmd.Trainer(model, loss=case.loss, optimizer=optimizer, mesh=placed, **options)
    state = trainer.init(case.batches[0])
    key, losses = np.asarray(jax.device_get(state.key)), []
    for batch in case.batches:
        state, metrics = trainer.step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, jax.device_get(state.params), jax.device_get(state.stats), key


def in_float32(model: Any) -> Any:
    """The model with arrays of float32, as codecs need them."""
    if isinstance(model, nnx.Module):
        graphdef, state = nnx.split(model)
        return nnx.merge(graphdef, as_floats(state, "float32"))
    if isinstance(model, Functions):
        return dataclasses.replace(model, params=as_floats(model.params, "float32"))
    module, variables = model.unbind()
    return module.bind(as_floats(variables, "float32"))


def as_floats(tree: Tree, dtype: str) -> Tree:
    """The tree with its arrays of floats in this dtype."""
    return jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )


def bound(module: linen.Module, *args: Any, **kwargs: Any) -> linen.Module:
    """The module with variables of float64 that it makes from these inputs."""
    keys = {name: jax.random.key(number) for number, name in enumerate(STREAMS)}
    return module.bind(as_floats(linen.meta.unbox(module.init(keys, *args, **kwargs)), "float64"))
