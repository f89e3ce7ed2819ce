"""Attention that a model writes out, two products and a softmax between them, goes to the
implementation of the layout's `[attention]`.

The pattern is looked for in the traced program, as a compiler does it: inductor of PyTorch has a
list of programs (`torch/_inductor/fx_passes/fuse_attention.py`); here one reading of the operations
between the products covers their combinations.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import jaxpr_as_fun

from spmd.base.xla import in_scope, scope_of
from spmd.jaxpr.inner_programs import (
    CALLED,
    CUSTOM,
    constant_inputs,
    inner_jaxprs,
    opened,
    with_programs,
)
from spmd.jaxpr.programs import equations, inlined, without_unused
from spmd.nn.attention import attend
from spmd.nn.attention_kernels import AS_WRITTEN, Attend, may_replace
from spmd.nn.inner_program import InnerProgram, recorded_programs
from spmd.nn.parallel_context import current
from spmd.nn.scoring import ScoreArrays, Scoring
from spmd.nn.traced_values import Values
from spmd.nn.written_dims import arrange, wide
from spmd.nn.written_scores import WrittenAttention, find

REPLACED = "is written out, and is replaced"
# equations: functions of jax.numpy are jits of so many at most, and a pattern may begin in one and
# end outside
SMALL = 32


def fuse_attention(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a pure function of arrays, with the attention that it writes out replaced as the
    `[attention]` of the layout in force says.

    Example:
      >>> double = fuse_attention(lambda x: 2 * x)
      >>> double(jnp.ones(2))  # outside of a step, the function itself
      Array([2., 2.], dtype=float32)
    """

    @functools.wraps(function)
    def call_rewritten(*args: Any) -> Any:
        if not may_replace(current()):
            return function(*args)
        with recorded_programs() as programs:
            closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        rewritten = jaxpr_as_fun(closed.replace(jaxpr=_rewritten(closed, programs)))
        results = rewritten(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return call_rewritten


def _rewritten(closed: Any, programs: Mapping[str, InnerProgram]) -> Any:
    """Return the jaxpr of a closed one with its attention replaced; notes name each attention, and
    why some are left as they are.
    """
    places: dict[str, list[str]] = {}
    constants = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    jaxpr = _Program(closed.jaxpr, constants, {}, places, programs).rewritten()
    for text, where in places.items():
        named = list(dict.fromkeys(where))
        more = ""
        if len(named) > 2:
            more = f" and {len(named) - 2} more"
        prefix = "note: "
        if text == REPLACED:
            prefix = ""
        current().notes[f"{prefix}attention in {', '.join(named[:2])}{more} {text}."] = None
    return jaxpr


@dataclasses.dataclass(frozen=True)
class _Program:
    """A jaxpr in which attention is replaced.

    Attributes:
      constants: what its constants are.
      outer: as in `Values`.
      places: takes where in the model attention is, by what a note says of it.
      programs: those of layers whose gradients are communicated.
      scopes: those around it.
    """

    jaxpr: Any
    constants: Mapping[Any, Any]
    outer: Mapping[Any, tuple[Values, Any]]
    places: dict[str, list[str]]
    programs: Mapping[str, InnerProgram]
    scopes: str = ""

    def rewritten(self) -> Any:
        """Return the jaxpr with attention replaced, or the same one if nothing is."""
        jaxpr = self.jaxpr
        flat, outputs = inlined(jaxpr, SMALL)
        # Tracers, keys and arrays of other processes have no numbers that can be read here.
        constants = {v: x for v, x in self.constants.items() if _is_readable(x)}
        values = Values(_computed(flat), _inputs(jaxpr), constants, self.outer)
        changed = [self._inside(equation, values) for equation in flat]
        is_changed = any(new is not old for new, old in zip(changed, flat, strict=True))
        for attention in find(flat, values):
            is_changed = True
            new = attention.why or _replaced(attention, changed, outputs)
            if isinstance(new, list):
                changed = new
                self._note(attention, REPLACED)
            else:
                self._note(attention, f"is computed as it is written, with all scores: {new}")
                changed = _marked(attention.weighted, changed)
        if not is_changed:
            return jaxpr
        return jaxpr.replace(eqns=without_unused(changed, outputs), outvars=outputs)

    def _note(self, attention: WrittenAttention, text: str) -> None:
        # JAX writes the names of transformations around a scope, as in jvp(blocks/0), and
        # `jnp.einsum` names a scope for its formula.
        scopes = re.sub(r"\w+\(|\)", "", self._scopes(attention.weighted)).split("/")
        place = "/".join(scope for scope in scopes if scope and "->" not in scope)
        self.places.setdefault(text, []).append(place or "the model")

    def _scopes(self, equation: Any) -> str:
        return f"{self.scopes}/{scope_of(equation)}"

    def _inside(self, equation: Any, values: Values) -> Any:
        """Return an equation with attention replaced in the jaxprs that it runs."""
        inputs = constant_inputs(equation)
        if inputs is not None:
            return self._within(equation, inputs, values)
        if equation.primitive.name not in CUSTOM:
            return equation
        program = self._program_of(equation)
        if program is None:
            self._look_into(equation)
            return equation
        # JAX differentiates `program` when the loss is differentiated: it is changed here.
        constvars = program.jaxpr.constvars
        # The constants of an `InnerProgram` are the last arguments of its function.
        atoms = equation.invars[len(equation.invars) - len(constvars) :]
        outer = {x: (values, atom) for x, atom in zip(constvars, atoms, strict=True)}
        scopes = self._scopes(equation)
        inner = dataclasses.replace(
            self, jaxpr=program.jaxpr, constants={}, outer=outer, scopes=scopes
        )
        program.jaxpr = inner.rewritten()
        # The equation itself runs the same program where nothing is differentiated.
        silent = dataclasses.replace(self, places={})
        return silent._within(equation, dict.fromkeys(CALLED, equation.invars), values)

    def _program_of(self, equation: Any) -> InnerProgram | None:
        """Return the program that an equation with a gradient of its own runs."""
        if not self.programs:
            return None
        for jaxpr in inner_jaxprs(equation):
            for inner in equations(jaxpr):
                if inner.primitive.name == "name" and inner.params["name"] in self.programs:
                    return self.programs[inner.params["name"]]
        return None

    def _within(self, equation: Any, inputs: Mapping[str, Sequence[Any]], values: Values) -> Any:
        """Return an equation with attention replaced in its programs.

        Args:
          inputs: as of `constant_inputs`.
        """
        scopes = self._scopes(equation)

        def rewritten(param: str, program: Any) -> Any:
            jaxpr = opened(program)
            consts = getattr(program, "consts", ())
            pairs = zip(jaxpr.invars, inputs.get(param, ()), strict=False)
            return dataclasses.replace(
                self,
                jaxpr=jaxpr,
                constants=dict(zip(jaxpr.constvars, consts, strict=True)),
                outer={x: (values, atom) for x, atom in pairs},
                scopes=scopes,
            ).rewritten()

        return with_programs(equation, rewritten)

    def _look_into(self, equation: Any) -> None:
        """Note attention in a function that has a gradient of its own."""
        for jaxpr in inner_jaxprs(equation):
            flat, _ = inlined(jaxpr, SMALL)
            for attention in find(flat, Values(_computed(flat), _inputs(jaxpr))):
                self._note(
                    attention,
                    "is computed as it is written, with all scores: it is in a function with a "
                    "gradient of its own",
                )


def _computed(equations: Iterable[Any]) -> dict[Any, Any]:
    """Return the equation that computes each variable."""
    return {x: equation for equation in equations for x in equation.outvars}


def _inputs(jaxpr: Any) -> frozenset[Any]:
    return frozenset([*jaxpr.invars, *jaxpr.constvars])


def _is_readable(constant: Any) -> bool:
    """Return whether a constant of a program has numbers that can be looked at."""
    if isinstance(constant, jax.Array):
        is_key = jnp.issubdtype(constant.dtype, jax.dtypes.extended)
        return not isinstance(constant, Tracer) and constant.is_fully_addressable and not is_key
    return isinstance(constant, np.ndarray | np.generic)


def _marked(equation: Any, program: list[Any]) -> list[Any]:
    """Return the equations, of which one is in a scope that says it is to stay, when the program
    around this one is looked through.
    """
    marked = in_scope(equation, AS_WRITTEN)
    return [marked if old is equation else old for old in program]


def _replaced(
    attention: WrittenAttention, program: list[Any], outputs: Iterable[Any]
) -> list[Any] | str:
    """Return the equations with one in place of an attention; or the reason why it cannot be
    replaced.
    """
    inputs, function = _fused_call(attention)
    shapes = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in inputs]
    without = [equation for equation in program if equation is not attention.weighted]
    used = {id(equation) for equation in without_unused(without, [*outputs, *inputs])}
    if id(attention.softmax) in used:
        return "its weights are used elsewhere"
    if id(attention.product) in used:
        return "its scores are used elsewhere"
    # A jit is one equation, which takes the place of the last product.
    try:
        [equation] = jax.make_jaxpr(jax.jit(function))(*shapes).eqns
    except _NoKernelError:
        return "no kernel takes it"
    equation = equation.replace(
        invars=inputs,
        outvars=attention.weighted.outvars,
        source_info=attention.weighted.source_info,
    )
    return [equation if old is attention.weighted else old for old in program]


class _NoKernelError(Exception):
    """Attention stays as the model has it; a note of `attend` says why."""


def _no_kernel() -> jax.Array:
    raise _NoKernelError


def _both(mask: jax.Array | None, other: jax.Array) -> jax.Array:
    """Return a mask of what two masks leave, of which one may not be there."""
    if mask is None:
        return other
    return mask & other


def _fused_call(attention: WrittenAttention) -> tuple[list[Any], Callable[..., jax.Array]]:
    """Return the values that an attention needs, and a function of them."""
    dims = attention.dims
    sizes = attention.sizes
    dtype = attention.dtype
    heads = (*dims.groups, *dims.shared)
    aval = attention.weighted.outvars[0].aval
    query, key, value = attention.operands()
    parts = [(part.view, part.dims) for part in (*attention.masks, *attention.biases)]
    inputs = [query.atom, key.atom, value.atom, *(view.atom for view, _ in parts)]
    window = (attention.before, attention.after or None)
    scoring = Scoring(
        attention.scale, attention.after == 0, window, attention.cap, precision=attention.precision
    )
    full = (dims.rows, heads, dims.queries, dims.keys)

    def fused(
        query_: jax.Array, key_: jax.Array, value_: jax.Array, *others: jax.Array
    ) -> jax.Array:
        by_query = arrange(
            query_.astype(dtype), query.dims, sizes, (dims.rows, dims.queries, heads, dims.size)
        )
        by_key = arrange(
            key_.astype(dtype), key.dims, sizes, (dims.rows, dims.keys, dims.groups, dims.size)
        )
        values = arrange(
            value_.astype(dtype), value.dims, sizes, (dims.rows, dims.keys, dims.groups, dims.width)
        )
        masks = others[: len(attention.masks)]
        biases = others[len(attention.masks) :]
        mask = key_mask = bias = None
        for part, x in zip(attention.masks, masks, strict=True):
            if x.dtype != bool:
                x = x != jnp.zeros((), x.dtype)
            if part.view.negated:
                x = ~x
            visible = arrange(x, part.array_roles(sizes), sizes, full)
            # A mask of keys alone is small: that of all scores takes the memory of scores.
            if visible.shape[1:3] == (1, 1):
                visible = jnp.broadcast_to(visible[:, 0, 0], by_key.shape[:2])
                key_mask = _both(key_mask, visible)
            else:
                mask = _both(mask, visible)
        for part, x in zip(attention.biases, biases, strict=True):
            more = arrange(x, part.array_roles(sizes), sizes, full)
            more = more.astype(jnp.promote_types(x.dtype, jnp.float32)) * part.factor
            if bias is not None:
                more = bias + more
            bias = more
        out = attend(
            Attend(scoring, by_query, by_key, values, ScoreArrays(mask, bias, key_mask)),
            as_written=_no_kernel,
        )
        order = wide((*dims.rows, *dims.queries, *heads, *dims.width), sizes)
        out = out.reshape([sizes[role] for role in order])
        out = jnp.transpose(out, [order.index(role) for role in wide(attention.result, sizes)])
        return out.reshape(aval.shape).astype(aval.dtype)

    return inputs, fused
