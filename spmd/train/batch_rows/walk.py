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
from typing import Any, NamedTuple

import jax
import numpy as np

from spmd.jaxpr.derivatives import both_passes, differentiated
from spmd.jaxpr.inner_programs import CUSTOM, branches_of, called_program, is_closed, scan_of
from spmd.jaxpr.interpreter import Interpreter
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
from spmd.train.batch_rows.pairs import PairedEquation, PairedProgram, Unreadable
from spmd.train.batch_rows.rules import OVER_ROWS, RULES
from spmd.xla import defined_in, is_of_jax, printed

# of a captured array that is not one and the same object in both traces, to be compared by value
MOST_ELEMENTS = 4096
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
ROUNDS = 6  # of a loop, until the kinds that it carries stay


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
class Walk(Sizes, Interpreter[Held]):
    """Two traces of one function, side by side.

    `shares`: takes what workers share. `forward_only`: nothing is differentiated.
    """

    shares: list[Shared] = dataclasses.field(default_factory=list, compare=False)
    forward_only: bool = False

    # programs -------------------------------------------------------------------------------------

    def closed(self, first: Any, second: Any, inputs: Sequence[Held]) -> list[Held]:
        """Return the outputs of a program in two traces for these inputs."""
        return self.outputs(PairedProgram(first, second), inputs)

    def constant(self, value: tuple[Any, Any]) -> Held:
        """Return a captured array, or a literal, of the full batch; `value`: in both traces."""
        return Held(self.kind_of_constant(*value), array=value[0])

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

    def equation(self, equation: PairedEquation, inputs: list[Held]) -> Sequence[Held]:
        """Return the outputs of an equation."""
        # jax 0.10.2: `jnp.where` with a number, of a batch that was traced without the mesh of the
        # step
        if equation.primitive.name == "reshard":
            return inputs
        return super().equation(equation, inputs)

    def call(self, equation: PairedEquation, inputs: list[Held]) -> Sequence[Held]:
        """Return the outputs of a function that is called once."""
        name = equation.params.get("name")
        if name == ROUTES and isinstance(inputs[0].kind, PerRow):
            return self.routed(equation, inputs)
        if name == LAYERS:
            self.check_layers(equation, inputs)
        return self.called(equation, inputs)

    def called(self, equation: PairedEquation, inputs: list[Held]) -> list[Held]:
        """Return the outputs of the program that an equation runs once."""
        one, other = map(called_program, equation)
        return self.closed(one, other, inputs)

    def custom(self, equation: PairedEquation, inputs: list[Held]) -> Sequence[Held]:
        """Return the outputs of a function with a derivative of its own."""
        if self.forward_only:
            return self.called(equation, inputs)
        if equation.primitive.name == "custom_jvp_call" and is_of_jax(equation.one):
            return self.of_jax(equation, inputs)
        return self.operation(equation, inputs)

    def operation(self, equation: PairedEquation, inputs: list[Held]) -> list[Held]:
        """Return the outputs of an equation that runs no program of JAX's, or as if it ran none."""
        (one, other), values = equation, inputs
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
        if name not in CUSTOM:
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
        if one.primitive.name in CUSTOM:
            reader = Walk(self.rows, self.others, forward_only=True)
            found = reader.called(PairedEquation(one, other), [Held(kind) for kind in values])
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
            return a is b or printed(a) == printed(b)

        def consts(params: Mapping[str, Any]) -> list[Any]:
            programs = filter(is_closed, jax.tree.leaves([*params.values()], is_leaf=is_closed))
            return [constant for program in programs for constant in program.consts]

        pairs = zip(consts(first), consts(second), strict=False)
        return all(same(first[key], second.get(key)) for key in first if key not in SIZED) and all(
            kind.power == 0 for kind in (self.kind_of_constant(a, b) for a, b in pairs)
        )

    while_loop = operation

    def check_layers(self, equation: PairedEquation, inputs: list[Held]) -> None:
        """Record layers that a layout cannot compute row by row, on a worker's rows: not where they
        join rows, or use their number.
        """
        reader = Walk(self.rows, self.others, forward_only=self.forward_only)
        without_powers = [Held(with_power(value.kind, 0), value.trained) for value in inputs]
        found = reader.called(equation, without_powers)
        rows = [held.kind for held in found if not isinstance(held.kind, Summed)]
        joins = any(share.how != "averages" for share in reader.shares) or any(
            kind.power != 0 for kind in rows
        )
        if joins or reader.shares or len(rows) < len(found):
            self.shares.append(Shared("layers" if joins else "statistics", False, 0, equation.one))

    def routed(self, equation: PairedEquation, inputs: list[Held]) -> list[Held]:
        """Return the outputs of a mixture of experts, in which each worker routes its own tokens.

        They are the tokens, the number of tokens that chose each expert, and two means over tokens.
        """
        tokens = inputs[0].kind
        kinds = [tokens, Summed(0 if tokens.power == 0 else None), Summed(-1), Summed(-1)]
        return [Held(kind, True) for kind in kinds]

    def of_jax(self, equation: PairedEquation, inputs: list[Held]) -> list[Held]:
        """Return the outputs of a function of JAX that has a derivative of its own, such as
        relu.
        """
        if not any(isinstance(value.kind, PerRow) for value in inputs):
            return self.operation(equation, inputs)
        return self.called(equation, inputs)

    def scan(self, equation: PairedEquation, inputs: list[Held]) -> Sequence[Held]:
        """Return the outputs of a loop over another dim than the rows; the kinds that it carries
        are followed until they stay.
        """
        (one, other), loop = equation, scan_of(equation)
        fixed, carry, xs = loop.split(inputs)
        along_rows = any(isinstance(value.kind, PerRow) and value.kind.dim == 0 for value in xs)
        if one.params["length"] != other.params["length"] or along_rows:
            return self.operation(equation, inputs)
        reader = Walk(self.rows, self.others, forward_only=self.forward_only)
        entries = self.scan_entries(xs)
        kinds = [Held(value.kind, value.trained) for value in carry]
        for _ in range(ROUNDS):
            reader.shares.clear()
            found = reader.closed(
                loop.program, scan_of(other).program, [*_bare(fixed), *kinds, *entries]
            )
            after = [_both(a, b) for a, b in zip(kinds, found[: loop.carried], strict=True)]
            if after == kinds:
                break
            kinds = after
        else:
            return self.operation(equation, inputs)
        return self.looped(equation, inputs, kinds, found[loop.carried :], reader.shares)

    @staticmethod
    def scan_entries(xs: Sequence[Held]) -> list[Held]:
        """Return what the body of a scan gets of each array that the scan goes through."""
        return [Held(entry(value.kind), value.trained) for value in xs]

    def looped(
        self,
        equation: PairedEquation,
        inputs: list[Held],
        carry: list[Held],
        ys: list[Held],
        shares: list[Shared],
    ) -> list[Held]:
        """Return the outputs of a scan whose body carries these kinds, and returns others."""
        self.shares.extend(share._replace(nested=True) for share in shares)
        return [*carry, *(Held(stacked(value.kind), value.trained) for value in ys)]

    def cond(self, equation: PairedEquation, inputs: list[Held]) -> Sequence[Held]:
        """Return the outputs of branches; all workers choose the same one."""
        (one, other), (index, *arguments) = equation, inputs
        if not isinstance(index.kind, Fixed):
            index = self.converted(index, Fixed(power=None), one, (one.invars[0], other.invars[0]))
        branches = list(zip(branches_of(one), branches_of(other), strict=True))
        reader = Walk(self.rows, self.others, forward_only=self.forward_only)
        found = [reader.closed(a, b, _bare(arguments)) for a, b in branches]
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
        return self.chosen(equation, index, arguments, kinds)

    def chosen(
        self, equation: PairedEquation, index: Held, arguments: list[Held], kinds: list[Held]
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


def _bare(values: Sequence[Held]) -> list[Held]:
    """Return values without their arrays."""
    return [Held(value.kind, value.trained) for value in values]


def _both(a: Held, b: Held) -> Held:
    """Return a value that both can become."""
    kind = joined(a.kind, b.kind)
    return Held(Fixed(power=None) if kind is None else kind, a.trained or b.trained)


def _bytes(aval: Any) -> int:
    """Return the size of an array; of keys, that of two words for each, also where `spmd.rng` keeps
    a third one beside them.
    """
    return aval.size * (
        KEY_BYTES if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key) else aval.dtype.itemsize
    )


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
