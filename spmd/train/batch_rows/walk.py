"""Read a traced loss: where the rows of the batch are in every value, and what workers that hold
parts of it have to share.

The loss is traced for two numbers of rows, those of the batch and those of a part, and both jaxprs
are read side by side. Each value is `PerRow` (each worker has the entries of its own rows), `Fixed`
(the same on every worker), or `Summed` (a sum over rows, of which each worker has a part). Where an
equation needs more of a value than workers have, they share it: a sum over workers, or, if there is
no rule for the equation, all rows. So the loss that is read is, at every point, that of the full
batch.

Two traces, because in one `loss.sum() / len(x)` and `loss.sum() / 64` look the same. The difference
between the two shows with which power of the number of rows a value grows, and so whether a worker
that calls the loss on its own rows gets the right value.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Var, jaxpr_as_fun

from spmd.jaxpr import scanned
from spmd.nn import scoring
from spmd.nn.moe import ROUTES
from spmd.nn.parallel_context import LAYERS
from spmd.train import chunked_cross_entropy
from spmd.train.batch_rows.kinds import (
    ELEMENTWISE,
    Fixed,
    Kind,
    PerRow,
    Sizes,
    Summed,
    elementwise,
    entry,
    joined,
    stacked,
    with_power,
)
from spmd.train.batch_rows.rules import OVER_ROWS, RULES

# of a captured array that is not one and the same object in both traces, to be compared by value
MOST_ELEMENTS = 4096
CALLS = ("jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint")
OWN_GRADIENT = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")
JAX = str(Path(jax.__file__).parent)
KEY_BYTES = 8
CHUNKED = chunked_cross_entropy.__file__
ATTENTION = scoring.__file__
SIZED = (
    "shape",
    "sizes",
    "new_sizes",
    "start_indices",
    "limit_indices",
    "slice_sizes",
    "sharding",
    "out_sharding",
)  # the results' shapes determine these
NOTHING = jax.make_jaxpr(lambda: ())().jaxpr
ROUNDS = 6  # of a loop, until the kinds that it carries stay
INNER = ("jaxpr", "call_jaxpr", "fun_jaxpr")


class Held(NamedTuple):
    """A variable of the loss, as a worker has it.

    Attributes:
      kind: of the value.
      trained: whether it depends on what is trained.
      array: the value, where the loss is computed and not only read.
    """

    kind: Kind
    trained: bool = False
    array: Any = None


class Shared(NamedTuple):
    """Something that workers share.

    Attributes:
      how: "sum", "max", "min" or "rows". "layers": nothing, but layers join rows; "statistics":
        they keep, or use, sums over rows; "averages": nothing, but a module such as BatchNorm
        averages over workers.
      trained: whether it depends on what is trained.
      bytes: the size of the array that every worker then has.
      equation: the one that needs it.
      nested: whether it is needed in the body of a loop or in a branch.
    """

    how: str
    trained: bool
    bytes: int
    equation: Any
    nested: bool = False


@dataclasses.dataclass(frozen=True)
class Walk(Sizes):
    """Two traces of one function, side by side.

    `shares`: takes what workers share. `forward_only`: nothing is differentiated.
    """

    shares: list[Shared] = dataclasses.field(default_factory=list, compare=False)
    forward_only: bool = False

    # jaxprs ---------------------------------------------------------------------------------------

    def jaxpr(
        self, first: Any, second: Any, given: Sequence[Held], consts: Sequence[Held]
    ) -> list[Held]:
        """Return the outputs of a jaxpr for these inputs."""
        names = [[equation.primitive.name for equation in jaxpr.eqns] for jaxpr in (first, second)]
        if names[0] != names[1]:
            raise Unreadable("it does something else on few rows than on many")
        seen: dict[Any, Held] = dict(
            zip([*first.constvars, *first.invars], [*consts, *given], strict=True)
        )

        def read(one: Any, other: Any) -> Held:
            return self.constant(one.val, other.val) if hasattr(one, "val") else seen[one]

        for one, other in zip(first.eqns, second.eqns, strict=True):
            values = [read(a, b) for a, b in zip(one.invars, other.invars, strict=True)]
            seen.update(zip(one.outvars, self.equation(one, other, values), strict=True))
        return [read(a, b) for a, b in zip(first.outvars, second.outvars, strict=True)]

    def closed(self, first: Any, second: Any, given: Sequence[Held]) -> list[Held]:
        """Return the outputs of a closed jaxpr, or of one without constants."""
        if not hasattr(first, "consts"):
            return self.jaxpr(first, second, given, [])
        if len(first.consts) != len(second.consts):
            raise Unreadable("it captures other arrays on few rows than on many")
        consts = [self.constant(a, b) for a, b in zip(first.consts, second.consts, strict=True)]
        return self.jaxpr(first.jaxpr, second.jaxpr, given, consts)

    def constant(self, first: Any, second: Any) -> Held:
        """Return a captured array, or a literal, of the full batch."""
        return Held(self.kind_of_constant(first, second), array=first)

    def kind_of_constant(self, first: Any, second: Any) -> Kind:
        """Return the kind of a constant, from its values in the two traces."""
        if jax.dtypes.issubdtype(getattr(first, "dtype", np.dtype("float32")), jax.dtypes.extended):
            return Fixed(power=0 if first is second else None)
        if np.ndim(first):
            small = np.shape(first) == np.shape(second) and np.size(first) <= MOST_ELEMENTS
            same = first is second or (
                small and np.array_equal(np.asarray(first), np.asarray(second))
            )
            return Fixed(power=0 if same else None)
        numbers = float(np.real(first)), float(np.real(second))
        return Fixed(
            power=self.growth(*numbers), zero=numbers == (0.0, 0.0) and not np.iscomplexobj(first)
        )

    def checked(self, kind: Kind | None, one: Any, other: Any) -> Kind | None:
        """Return the kind, if the shape of a result depends on the number of rows as the kind says;
        None if it does not.
        """
        a, b = getattr(one, "shape", None), getattr(other, "shape", None)
        if kind is None or a is None or b is None or len(a) != len(b):
            return None
        sized = {dim for dim, (x, y) in enumerate(zip(a, b, strict=True)) if x != y}
        if isinstance(kind, Summed):
            return with_power(kind, None) if sized else kind
        if isinstance(kind, Fixed):
            return kind if sized <= kind.uniform | {kind.number} else with_power(kind, None)
        size, part = a[kind.dim], b[kind.dim]
        if size % (self.rows * kind.inner) or size * self.others != part * self.rows:
            return None
        return kind if sized <= {kind.dim} else with_power(kind, None)

    # equations ------------------------------------------------------------------------------------

    def equation(self, one: Any, other: Any, values: list[Held]) -> list[Held]:
        """Return the outputs of an equation."""
        name = one.primitive.name
        # jax 0.10.2: `jnp.where` with a number, of a batch that was traced without the mesh of the
        # step
        if name == "reshard":
            return values
        if name == "scan":
            return self.scan(one, other, values)
        if name == "cond":
            return self.cond(one, other, values)
        if (
            name in CALLS
            and one.params.get("name") == ROUTES
            and isinstance(values[0].kind, PerRow)
        ):
            return self.routed(one, other, values)
        if name in CALLS and one.params.get("name") == LAYERS:
            self.check_layers(one, other, values)
        if name in CALLS:
            return self.call(one, other, values)
        if name in OWN_GRADIENT and self.forward_only:
            return self.call(one, other, values)
        if name == "custom_jvp_call" and defined_in(one).startswith(JAX):
            return self.of_jax(one, other, values)
        return self.operation(one, other, values)

    def operation(self, one: Any, other: Any, values: list[Held]) -> list[Held]:
        """Return the outputs of an equation that has no rule of its own here."""
        results = [(a.aval, b.aval) for a, b in zip(one.outvars, other.outvars, strict=True)]
        variables = list(zip(one.invars, other.invars, strict=True))
        for kinds in self.attempts(one, values):
            found = [
                self.checked(kind, *avals)
                for kind, avals in zip(self.kinds(one, other, kinds), results, strict=True)
            ]
            known = [kind for kind in found if kind is not None]
            if len(known) == len(found):
                pairs = zip(values, kinds, variables, strict=True)
                return self.results(
                    one,
                    other,
                    [self.converted(value, kind, one, pair) for value, kind, pair in pairs],
                    known,
                )
        raise Unreadable(f"its {one.primitive.name} has other dims on few rows than on many")

    def attempts(self, one: Any, values: list[Held]) -> Iterator[list[Kind]]:
        """Yield the kinds of an equation's inputs as they are, and then with more and more of them
        shared by all workers.
        """
        kinds = [value.kind for value in values]
        yield kinds

        def shared(chosen: Callable[[int], bool]) -> list[Kind]:
            return [
                Fixed(power=None) if chosen(number) else kind for number, kind in enumerate(kinds)
            ]

        sums = [number for number, kind in enumerate(kinds) if isinstance(kind, Summed)]
        if one.primitive.name == "div" and sums == [0, 1]:
            yield shared(lambda number: number == 1)
        if any(not values[number].trained for number in sums):
            yield shared(lambda number: number in sums and not values[number].trained)
        if sums:
            yield shared(lambda number: number in sums)
        by_size = sorted(
            (n for n, kind in enumerate(kinds) if isinstance(kind, PerRow)),
            key=lambda n: -np.prod(one.invars[n].aval.shape),
        )
        if len(by_size) > 1:
            yield shared(lambda number: number in sums or number in by_size[1:])
        yield shared(lambda number: not isinstance(kinds[number], Fixed))

    def kinds(self, one: Any, other: Any, values: list[Kind]) -> Sequence[Kind | None]:
        """Return the kinds of an equation's outputs; None for one that needs more than workers
        have.
        """
        name = one.primitive.name
        if name == "optimization_barrier":
            return values
        if all(isinstance(value, Fixed) for value in values):
            return self.without_rows(one, other, values)
        if name not in OWN_GRADIENT:
            return self.by_rule(one, other, values)
        random = any(
            var.aval.dtype == np.uint32
            or jax.dtypes.issubdtype(var.aval.dtype, jax.dtypes.extended)
            for var in one.invars
        )
        # rows would draw the same on every worker
        if random or any(isinstance(value, Fixed) and value.key for value in values):
            return [None] * len(one.outvars)
        if defined_in(one) == CHUNKED:
            return [_sum_over_tokens(values)]
        if defined_in(one) == ATTENTION:
            return [_attention_of_rows(values)]
        return self.of_own_gradient(one, other, values) or [None] * len(one.outvars)

    def by_rule(self, one: Any, other: Any, values: list[Kind]) -> list[Kind | None]:
        """Return the kinds of an equation's outputs by the rule for its primitive; None without
        one.
        """
        name = one.primitive.name
        if name in ELEMENTWISE and len(one.outvars) == 1:
            return [elementwise(name, one, other, values)]
        if name in RULES and self.alike(one.params, other.params):
            return [RULES[name](self, one, other, values)] * len(one.outvars)
        return [None] * len(one.outvars)

    def of_own_gradient(self, one: Any, other: Any, values: list[Kind]) -> list[Kind] | None:
        """Return the kinds of the outputs of a function with a derivative of its own; None if it or
        its gradients may join rows.
        """
        floats = differentiated(one)
        outputs = [
            self.by_shape(a.aval, b.aval) for a, b in zip(one.outvars, other.outvars, strict=True)
        ]

        if None in outputs or not all(
            jax.numpy.issubdtype(var.aval.dtype, np.floating) for var in one.outvars
        ):
            return None
        reader = Walk(self.rows, self.others, forward_only=True)
        try:
            found = reader.closed(
                both_passes(one),
                both_passes(other),
                [Held(kind) for kind in (*values, *outputs) if kind is not None],
            )
        except Exception:  # whatever a rule of its own raises: it is a function of all rows then
            return None
        results, gradients = (
            [held.kind for held in found[: len(outputs)]],
            [held.kind for held in found[len(outputs) :]],
        )
        for number, gradient in zip(floats, gradients, strict=True):
            value = values[number]
            alike = (
                isinstance(value, PerRow)
                and isinstance(gradient, PerRow)
                and (value.dim, value.inner) == (gradient.dim, gradient.inner)
            )
            if isinstance(value, PerRow) and not alike:
                return None
        return None if reader.shares else results

    def by_shape(self, one: Any, other: Any) -> Kind | None:
        """Return the kind of a result whose rows are along the dim that depends on their number."""
        sized = [
            dim for dim, (a, b) in enumerate(zip(one.shape, other.shape, strict=True)) if a != b
        ]
        if len(sized) > 1 or (sized and one.shape[sized[0]] % self.rows):
            return None
        return PerRow(sized[0], one.shape[sized[0]] // self.rows) if sized else Fixed()

    def without_rows(self, one: Any, other: Any, values: list[Kind]) -> list[Kind]:
        """Return the kinds of the outputs of an equation whose inputs are the same on all workers:
        so are they.
        """
        # two traces of it have other functions for its derivative
        if one.primitive.name in OWN_GRADIENT:
            reader = Walk(self.rows, self.others, forward_only=True)
            found = reader.call(one, other, [Held(kind) for kind in values])
            return [
                Fixed(power=None)
                if reader.shares or not isinstance(held.kind, Fixed)
                else held.kind
                for held in found
            ]
        avals = [
            (a.aval, b.aval)
            for a, b in zip(
                [*one.invars, *one.outvars], [*other.invars, *other.outvars], strict=True
            )
        ]
        still = all(
            getattr(a, "shape", None) == getattr(b, "shape", None) for a, b in avals
        ) and self.alike(one.params, other.params)
        power = 0 if still and all(value.power == 0 for value in values) else None
        unknown = Fixed(
            power=power, key=any(isinstance(value, Fixed) and value.key for value in values)
        )
        return [
            unknown if kind is None or isinstance(kind, Summed) else kind
            for kind in self.by_rule(one, other, values)
        ]

    def alike(self, first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
        """Return whether an equation does the same in both traces, but for shapes; functions are
        compared as text, and by constants.
        """

        def same(a: Any, b: Any) -> bool:
            return a is b or str(a) == str(b)

        def consts(params: Mapping[str, Any]) -> list[Any]:
            return [
                c
                for p in jax.tree.leaves([*params.values()], is_leaf=_closed)
                if _closed(p)
                for c in p.consts
            ]

        pairs = zip(consts(first), consts(second), strict=False)
        return all(same(first[key], second.get(key)) for key in first if key not in SIZED) and all(
            kind.power == 0 for kind in (self.kind_of_constant(a, b) for a, b in pairs)
        )

    def call(self, one: Any, other: Any, values: list[Held]) -> list[Held]:
        """Return the outputs of a function that is called once."""
        return self.closed(_inner(one), _inner(other), values)

    def check_layers(self, one: Any, other: Any, values: list[Held]) -> None:
        """Record layers that a layout cannot compute row by row, on a worker's rows: not where they
        join rows, or use their number.
        """
        reader = Walk(self.rows, self.others, forward_only=self.forward_only)
        found = reader.call(
            one, other, [Held(with_power(value.kind, 0), value.trained) for value in values]
        )
        rows = [held.kind for held in found if not isinstance(held.kind, Summed)]
        joins = any(share.how != "averages" for share in reader.shares) or any(
            kind.power != 0 for kind in rows
        )
        if joins or reader.shares or len(rows) < len(found):
            self.shares.append(Shared("layers" if joins else "statistics", False, 0, one))

    def routed(self, one: Any, other: Any, values: list[Held]) -> list[Held]:
        """Return the outputs of a mixture of experts, in which each worker routes its own tokens.

        They are the tokens, the number of tokens that chose each expert, and two means over tokens.
        """
        tokens = values[0].kind
        kinds = [tokens, Summed(0 if tokens.power == 0 else None), Summed(-1), Summed(-1)]
        return [Held(kind, True) for kind in kinds]

    def of_jax(self, one: Any, other: Any, values: list[Held]) -> list[Held]:
        """Return the outputs of a function of JAX that has a derivative of its own, such as
        relu.
        """
        if not any(isinstance(value.kind, PerRow) for value in values):
            return self.operation(one, other, values)
        return self.closed(_inner(one), _inner(other), values)

    def scan(self, one: Any, other: Any, values: list[Held]) -> list[Held]:
        """Return the outputs of a loop over another dim than the rows; the kinds that it carries
        are followed until they stay.
        """
        consts, carried = scanned(one.params)
        xs = values[consts + carried :]
        along_rows = any(isinstance(value.kind, PerRow) and value.kind.dim == 0 for value in xs)
        if one.params["length"] != other.params["length"] or along_rows:
            return self.operation(one, other, values)
        fixed, carry = values[:consts], values[consts : consts + carried]
        reader = Walk(self.rows, self.others, forward_only=self.forward_only)
        entries = self.scan_entries(xs)
        kinds = [Held(value.kind, value.trained) for value in carry]
        for _ in range(ROUNDS):
            reader.shares.clear()
            found = reader.closed(
                one.params["jaxpr"], other.params["jaxpr"], [*_bare(fixed), *kinds, *entries]
            )
            after = [_both(a, b) for a, b in zip(kinds, found[:carried], strict=True)]
            if after == kinds:
                break
            kinds = after
        else:
            return self.operation(one, other, values)
        return self.looped(one, other, values, kinds, found[carried:], reader.shares)

    @staticmethod
    def scan_entries(xs: Sequence[Held]) -> list[Held]:
        """Return what the body of a scan gets of each array that the scan goes through."""
        return [Held(entry(value.kind), value.trained) for value in xs]

    def looped(
        self,
        one: Any,
        other: Any,
        values: list[Held],
        carry: list[Held],
        ys: list[Held],
        shares: list[Shared],
    ) -> list[Held]:
        """Return the outputs of a scan whose body carries these kinds, and returns others."""
        self.shares.extend(share._replace(nested=True) for share in shares)
        return [*carry, *(Held(stacked(value.kind), value.trained) for value in ys)]

    def cond(self, one: Any, other: Any, values: list[Held]) -> list[Held]:
        """Return the outputs of branches; all workers choose the same one."""
        index, *inputs = values
        if not isinstance(index.kind, Fixed):
            index = self.converted(index, Fixed(power=None), one, (one.invars[0], other.invars[0]))
        branches = list(zip(one.params["branches"], other.params["branches"], strict=True))
        reader = Walk(self.rows, self.others, forward_only=self.forward_only)
        found = [reader.closed(a, b, _bare(inputs)) for a, b in branches]
        self.shares.extend(share._replace(nested=True) for share in reader.shares)
        kinds = found[0]
        for results in found[1:]:
            kinds = [_both(a, b) for a, b in zip(kinds, results, strict=True)]
        power = 0 if index.kind.power == 0 else None
        kinds = [
            Held(
                value.kind if power == 0 else with_power(value.kind, None),
                value.trained or index.trained,
            )
            for value in kinds
        ]
        return self.chosen(one, other, index, inputs, kinds)

    def chosen(
        self, one: Any, other: Any, index: Held, inputs: list[Held], kinds: list[Held]
    ) -> list[Held]:
        """Return the outputs of branches that agree on these kinds."""
        return kinds

    # arrays: here there are none; see `spmd.train.batch_rows.compute` -----------------------------

    def converted(self, value: Held, kind: Kind, one: Any, variables: tuple[Any, Any]) -> Held:
        """Return an input of an equation as another kind: workers share it."""
        if value.kind == kind or isinstance(value.kind, Fixed):
            return value
        aval = variables[0].aval
        how = "sum" if isinstance(value.kind, Summed) else "rows"
        self.shares.append(Shared(how, value.trained, _bytes(aval), one))
        return Held(kind, value.trained)

    def results(self, one: Any, other: Any, values: list[Held], kinds: list[Kind]) -> list[Held]:
        """Return the outputs of an equation, whose inputs are now of the kinds that it needs."""
        trained = any(value.trained for value in values)
        if one.primitive.name == "psum" and isinstance(values[0].kind, Summed | PerRow):
            self.shares.append(Shared("averages", trained, 0, one))
        if (
            one.primitive.name in OVER_ROWS
            and isinstance(values[0].kind, PerRow)
            and isinstance(kinds[0], Fixed)
        ):
            aval = one.outvars[0].aval
            self.shares.append(Shared(OVER_ROWS[one.primitive.name], trained, _bytes(aval), one))
        return [Held(kind, trained) for kind in kinds]


class Unreadable(Exception):
    """A loss of which two traces cannot be read side by side."""


def evaluated(equation: Any, arrays: Sequence[Any]) -> list[Any]:
    """Return the outputs of an equation for these arrays; their shapes may differ from those that
    it was traced for.
    """
    inputs = [Var(var.aval) for var in equation.invars]
    outputs = [Var(var.aval) for var in equation.outvars]
    alone = equation.replace(invars=inputs, outvars=outputs)
    jaxpr = NOTHING.replace(invars=inputs, outvars=outputs, eqns=[alone], effects=equation.effects)
    return jaxpr_as_fun(ClosedJaxpr(jaxpr, []))(*arrays)


def differentiated(equation: Any) -> list[int]:
    """Return the numbers of the inputs by which a function with a derivative of its own has one:
    not those that it captures.
    """
    captured = equation.params.get("num_consts", 0)
    numbers = range(captured, len(equation.invars))
    return [
        number
        for number in numbers
        if jax.numpy.issubdtype(equation.invars[number].aval.dtype, np.floating)
    ]


def both_passes(equation: Any) -> ClosedJaxpr:
    """Return the jaxpr of a function with a derivative of its own: from its inputs and the gradient
    of its outputs to its outputs, and to the gradients of its `differentiated` inputs.
    """
    floats = differentiated(equation)

    def passes(inputs: list[Any], cotangents: list[Any]) -> Any:
        def forward(*chosen: Any) -> list[Any]:
            given = dict(enumerate(inputs)) | dict(zip(floats, chosen, strict=True))
            return evaluated(equation, [given[number] for number in range(len(inputs))])

        results, backward = jax.vjp(forward, *(inputs[number] for number in floats))
        return results, backward(cotangents)

    shapes = [
        [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in each]
        for each in (equation.invars, equation.outvars)
    ]
    return jax.make_jaxpr(passes)(*shapes)


def _bare(values: Sequence[Held]) -> list[Held]:
    """Return values without their arrays."""
    return [Held(value.kind, value.trained) for value in values]


def _both(a: Held, b: Held) -> Held:
    """Return a value that both can become."""
    kind = joined(a.kind, b.kind)
    return Held(Fixed(power=None) if kind is None else kind, a.trained or b.trained)


def _closed(value: Any) -> bool:
    return hasattr(value, "consts") and hasattr(value, "jaxpr")


def _inner(equation: Any) -> Any:
    """Return the jaxpr that an equation calls."""
    return next(equation.params[key] for key in INNER if hasattr(equation.params.get(key), "eqns"))


def _bytes(aval: Any) -> int:
    """Return the size of an array; of keys, that of two words for each, also where `spmd.rng` keeps
    a third one beside them.
    """
    return aval.size * (
        KEY_BYTES if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key) else aval.dtype.itemsize
    )


def defined_in(equation: Any) -> str:
    """Return the file that defines a function with a derivative of its own, or a function on
    shards.
    """
    inner = equation.params.get("call_jaxpr", equation.params.get("jaxpr"))
    defined = getattr(getattr(inner, "jaxpr", inner), "debug_info", None)
    return getattr(defined, "func_filename", None) or ""


def _sum_over_tokens(values: Sequence[Kind]) -> Kind | None:
    """Return the kind of `cross_entropy_from_features`: a weighted sum over tokens, whatever its
    chunks are.
    """
    features, *head, labels, weights = values
    at = (features.dim, features.inner) if isinstance(features, PerRow) else None
    tokens = at is not None and isinstance(labels, PerRow) and (labels.dim, labels.inner) == at
    counted = isinstance(weights, Fixed) or (
        isinstance(weights, PerRow) and (weights.dim, weights.inner) == at
    )
    if not tokens or not counted or not all(isinstance(value, Fixed) for value in head):
        return None
    same = not any(value.power != 0 for value in (features, labels, *head))
    return Summed(weights.power if same else None)


def _attention_of_rows(values: Sequence[Kind]) -> Kind | None:
    """Return the kind of attention in tiles: row by row, if dim 0 of queries, keys, values and
    masks has the rows.
    """
    by_row = [value for value in values if not isinstance(value, Fixed)]
    if not all(
        isinstance(value, PerRow) and (value.dim, value.inner) == (0, 1) for value in by_row
    ):
        return None
    return PerRow(0, 1, 0 if not any(value.power != 0 for value in values) else None)


def read_loss(
    first: Any, second: Any, given: Sequence[Held], rows: int, others: int
) -> tuple[list[Held], list[Shared]]:
    """Return the outputs of a function that was traced for `rows` and for `others` rows, and what
    workers share.

    Args:
      given: its inputs.

    Raises:
      Unreadable: the traces do not correspond.
    """
    walk = Walk(rows, others)
    return walk.closed(first, second, given), walk.shares


def is_mean(found: Sequence[Kind], shape: tuple[int, ...]) -> bool:
    """Return whether workers that call a loss on their own rows get the right mean, and so need to
    share nothing.

    Args:
      found: the kinds of a loss: one value per row, a scalar, or (sum, count), which may be of each
        row.
      shape: of the first one.
    """
    if len(found) == 2 and not shape:
        total, count = found
        if isinstance(total, Fixed) and isinstance(count, Fixed):
            return total.power is not None and total.power == count.power
        if not isinstance(total, Summed) or total.power is None:
            return False
        return (isinstance(count, Summed) and count.power == total.power) or (
            isinstance(count, Fixed) and count.power == total.power + 1
        )
    if shape:
        return all(
            isinstance(kind, PerRow) and (kind.dim, kind.inner, kind.power) == (0, 1, 0)
            for kind in found
        )
    return found[0] == Summed(-1) or (isinstance(found[0], Fixed) and found[0].power == 0)
