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
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spmd.base.xla import defined_in, is_of_jax, printed
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
    keep_power_if,
    power_if,
    resized_dims,
    stacked,
    with_power,
)
from spmd.train.batch_rows.pairs import PairedEquation, PairedProgram, Unreadable
from spmd.train.batch_rows.rules import OVER_ROWS, RULES

# of a captured array that is not one and the same object in both traces, to be compared by value
MOST_ELEMENTS = 4096
# two words, which is what jax.random's threefry2x32 has
KEY_BYTES = 8
CHUNKED = chunked_cross_entropy.__file__
ATTENTION = scoring.__file__
# the results' shapes determine these params
SIZED = frozenset(
    """
    shape sizes new_sizes start_indices limit_indices slice_sizes sharding out_sharding""".split()
)
# of a loop, until the kinds that it carries stay
ROUNDS = 6


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

    Attributes:
      shares: takes what workers share.
      forward_only: whether nothing is differentiated.
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

    def joined(self, first: Held, second: Held) -> Held:
        """Return a value that both can become."""
        kind = joined(first.kind, second.kind)
        if kind is None:
            kind = Fixed(power=None)
        return Held(kind, first.trained or second.trained)

    def kind_of_constant(self, first: Any, second: Any) -> Kind:
        """Return the kind of a constant, from its values in the two traces."""
        dtype = getattr(first, "dtype", np.dtype("float32"))
        # keys have no numbers that may be compared
        if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
            return Fixed(power=power_if(first is second))
        if np.ndim(first):
            return Fixed(power=power_if(_is_same_array(first, second)))
        number, other_number = float(np.real(first)), float(np.real(second))
        is_zero = number == other_number == 0 and not np.iscomplexobj(first)
        return Fixed(power=self.growth(number, other_number), zero=is_zero)

    def checked(self, kind: Kind | None, one: Any, other: Any) -> Kind | None:
        """Return the kind, if the shape of a result depends on the number of rows as the kind says;
        None if it does not.
        """
        shape, other_shape = getattr(one, "shape", None), getattr(other, "shape", None)
        if kind is None or shape is None or other_shape is None or len(shape) != len(other_shape):
            return None
        resized = resized_dims(shape, other_shape)
        if isinstance(kind, Summed):
            return keep_power_if(kind, not resized)
        if isinstance(kind, Fixed):
            # with more rows equal entries, and numbers of rows, continue as they began
            return keep_power_if(kind, resized <= kind.uniform | {kind.number})
        size, other_size = shape[kind.dim], other_shape[kind.dim]
        if size % (self.rows * kind.inner) or size * self.others != other_size * self.rows:
            return None
        return keep_power_if(kind, resized <= {kind.dim})

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
        one, other = equation
        variables = list(zip(one.invars, other.invars, strict=True))
        for needed in self.attempts(one, inputs):
            checked = self.checked_kinds(one, other, needed)
            kinds = [kind for kind in checked if kind is not None]
            if len(kinds) < len(checked):
                continue
            converted = []
            for value, kind, pair in zip(inputs, needed, variables, strict=True):
                converted.append(self.converted(value, kind, one, pair))
            return self.results(one, other, converted, kinds)
        raise Unreadable(f"its {one.primitive.name} has other dims on few rows than on many")

    def checked_kinds(self, one: Any, other: Any, kinds: list[Kind]) -> list[Kind | None]:
        """Return the kinds of an equation's outputs for those of its inputs; None for one that
        needs more than workers have, or whose shape is another one.
        """
        checked = []
        outputs = zip(self.kinds(one, other, kinds), one.outvars, other.outvars, strict=True)
        for kind, first, second in outputs:
            checked.append(self.checked(kind, first.aval, second.aval))
        return checked

    def attempts(self, one: Any, inputs: list[Held]) -> Iterator[list[Kind]]:
        """Yield the kinds of an equation's inputs as they are, and then with more and more of them
        shared by all workers.
        """
        kinds = [value.kind for value in inputs]
        yield kinds

        def shared(numbers: Collection[int]) -> list[Kind]:
            return [Fixed(power=None) if n in numbers else kind for n, kind in enumerate(kinds)]

        sums = {number for number, kind in enumerate(kinds) if isinstance(kind, Summed)}
        # a sum over a count remains a sum, of which each worker has a part
        if one.primitive.name == "div" and sums == {0, 1}:
            yield shared({1})
        # microbatches can share what depends on no weights before the first of them
        untrained = {number for number in sums if not inputs[number].trained}
        if untrained:
            yield shared(untrained)
        if sums:
            yield shared(sums)
        rows = [number for number, kind in enumerate(kinds) if isinstance(kind, PerRow)]
        # all operands but the largest one
        smaller = sorted(rows, key=lambda number: -np.prod(one.invars[number].aval.shape))[1:]
        if smaller:
            yield shared({*sums, *smaller})
        yield shared({*sums, *rows})

    def kinds(self, one: Any, other: Any, kinds: list[Kind]) -> Sequence[Kind | None]:
        """Return the kinds of an equation's outputs; None for one that needs more than workers
        have.
        """
        name = one.primitive.name
        if name == "optimization_barrier":
            return kinds
        if all(isinstance(kind, Fixed) for kind in kinds):
            return self.without_rows(one, other, kinds)
        if name not in CUSTOM:
            return self.by_rule(one, other, kinds)
        has_keys = any(isinstance(kind, Fixed) and kind.key for kind in kinds)
        # rows would draw the same on every worker
        if has_keys or any(map(_may_be_key, one.invars)):
            return [None] * len(one.outvars)
        if defined_in(one) == CHUNKED:
            return [_sum_over_tokens(kinds)]
        if defined_in(one) == ATTENTION:
            return [_attention_of_rows(kinds)]
        return self.of_custom_derivative(one, other, kinds) or [None] * len(one.outvars)

    def by_rule(self, one: Any, other: Any, kinds: list[Kind]) -> list[Kind | None]:
        """Return the kinds of an equation's outputs by the rule for its primitive; None without
        one.
        """
        name = one.primitive.name
        if name in ELEMENTWISE and len(one.outvars) == 1:
            return [elementwise(name, one, other, kinds)]
        if name in RULES and self.alike(one.params, other.params):
            return [RULES[name](self, one, other, kinds)] * len(one.outvars)
        return [None] * len(one.outvars)

    def of_custom_derivative(self, one: Any, other: Any, kinds: list[Kind]) -> list[Kind] | None:
        """Return the kinds of the outputs of a function with a derivative of its own; None if it or
        its gradients may join rows.
        """
        outputs = []
        for first, second in zip(one.outvars, other.outvars, strict=True):
            outputs.append(self.by_shape(first.aval, second.aval))
        are_floats = all(jnp.issubdtype(x.aval.dtype, jnp.floating) for x in one.outvars)
        if None in outputs or not are_floats:
            return None
        inputs = [Held(kind) for kind in (*kinds, *outputs) if kind is not None]
        reader = Walk(self.rows, self.others, forward_only=True)
        try:
            held = reader.closed(both_passes(one), both_passes(other), inputs)
        except Exception:
            # whatever the user's functions raise outside of their loss: it is a function of all
            # rows then
            return None
        if reader.shares:
            return None
        results = [value.kind for value in held]
        gradients = results[len(outputs) :]
        for number, gradient in zip(differentiated(one), gradients, strict=True):
            kind = kinds[number]
            # the gradient of a row that another row has a part in is a sum over rows
            if isinstance(kind, PerRow) and not _has_rows_of(gradient, kind):
                return None
        return results[: len(outputs)]

    def by_shape(self, one: Any, other: Any) -> Kind | None:
        """Return the kind of a result whose rows are along the dim that depends on their number."""
        resized = resized_dims(one.shape, other.shape)
        if not resized:
            return Fixed()
        dim = min(resized)
        if len(resized) > 1 or one.shape[dim] % self.rows:
            return None
        return PerRow(dim, one.shape[dim] // self.rows)

    def without_rows(self, one: Any, other: Any, kinds: list[Kind]) -> list[Kind]:
        """Return the kinds of the outputs of an equation whose inputs are the same on all workers:
        so are they.
        """
        # two traces of it have other functions for its derivative
        if one.primitive.name in CUSTOM:
            reader = Walk(self.rows, self.others, forward_only=True)
            held = reader.called(PairedEquation(one, other), [Held(kind) for kind in kinds])
            results: Sequence[Kind | None] = [value.kind for value in held]
            if reader.shares:
                results = [None] * len(results)
            return [x if isinstance(x, Fixed) else Fixed(power=None) for x in results]
        is_same = self.is_same(one, other) and all(kind.power == 0 for kind in kinds)
        key = any(isinstance(kind, Fixed) and kind.key for kind in kinds)
        without_rule = Fixed(power=power_if(is_same), key=key)
        results = self.by_rule(one, other, kinds)
        return [without_rule if x is None or isinstance(x, Summed) else x for x in results]

    def is_same(self, one: Any, other: Any) -> bool:
        """Return whether an equation does the same in both traces, to arrays of the same shapes."""
        variables = [*one.invars, *one.outvars], [*other.invars, *other.outvars]
        for first, second in zip(*variables, strict=True):
            if getattr(first.aval, "shape", None) != getattr(second.aval, "shape", None):
                return False
        return self.alike(one.params, other.params)

    def alike(self, first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
        """Return whether an equation does the same in both traces, but for shapes; functions are
        compared as text, and by constants.
        """

        for key, value in first.items():
            # as text only where it is another object: printing is slow
            if key in SIZED or value is second.get(key):
                continue
            if printed(value) != printed(second.get(key)):
                return False
        constants = zip(_constants(first), _constants(second), strict=False)
        return all(self.kind_of_constant(*pair).power == 0 for pair in constants)

    # the steps of a loop are not followed where their number may depend on the rows
    while_loop = operation

    # programs in programs -------------------------------------------------------------------------

    def check_layers(self, equation: PairedEquation, inputs: list[Held]) -> None:
        """Record layers that a layout cannot compute row by row, on a worker's rows: not where they
        join rows, or use their number.
        """
        reader = Walk(self.rows, self.others, forward_only=self.forward_only)
        without_powers = [Held(with_power(value.kind, 0), value.trained) for value in inputs]
        outputs = reader.called(equation, without_powers)
        kinds = [held.kind for held in outputs if not isinstance(held.kind, Summed)]
        joins = any(share.how != "averages" for share in reader.shares)
        joins = joins or any(kind.power != 0 for kind in kinds)
        if joins or reader.shares or len(kinds) < len(outputs):
            how = "statistics"
            if joins:
                how = "layers"
            self.shares.append(Shared(how, False, 0, equation.one))

    def routed(self, equation: PairedEquation, inputs: list[Held]) -> list[Held]:
        """Return the outputs of a mixture of experts, in which each worker routes its own tokens.

        They are the tokens, the number of tokens that chose each expert, and two means over tokens.
        """
        tokens = inputs[0].kind
        chosen = Summed(power_if(tokens.power == 0))
        kinds = [tokens, chosen, Summed(-1), Summed(-1)]
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
        loop, other_loop = scan_of(equation.one), scan_of(equation.other)
        constants, carry, xs = loop.split(inputs)
        along_rows = any(isinstance(value.kind, PerRow) and value.kind.dim == 0 for value in xs)
        if loop.length != other_loop.length or along_rows:
            return self.operation(equation, inputs)
        reader = Walk(self.rows, self.others, forward_only=self.forward_only)
        entries = self.scan_entries(xs)
        carried = _without_arrays(carry)
        for _ in range(ROUNDS):
            reader.shares.clear()
            of_step = [*_without_arrays(constants), *carried, *entries]
            outputs = reader.closed(loop.program, other_loop.program, of_step)
            after = self._joined_all(carried, outputs[: loop.carried])
            if after == carried:
                break
            carried = after
        else:
            return self.operation(equation, inputs)
        return self.looped(equation, inputs, carried, outputs[loop.carried :], reader.shares)

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
        reader = Walk(self.rows, self.others, forward_only=self.forward_only)
        branches = []
        for programs in zip(branches_of(one), branches_of(other), strict=True):
            branches.append(reader.closed(*programs, _without_arrays(arguments)))
        outputs = functools.reduce(self._joined_all, branches)
        self.shares.extend(share._replace(nested=True) for share in reader.shares)
        agreed = []
        for value in outputs:
            # a worker that calls the loss on its own rows may take another branch
            kind = keep_power_if(value.kind, index.kind.power == 0)
            agreed.append(Held(kind, value.trained or index.trained))
        return self.chosen(equation, index, arguments, agreed)

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
        how = "rows"
        if isinstance(value.kind, Summed):
            how = "sum"
        self.shares.append(Shared(how, value.trained, _bytes(aval), one))
        return Held(kind, value.trained)

    def results(self, one: Any, other: Any, values: list[Held], kinds: list[Kind]) -> list[Held]:
        """Return the outputs of an equation, whose inputs are now of the kinds that it needs."""
        name, trained = one.primitive.name, any(value.trained for value in values)
        if name == "psum" and isinstance(values[0].kind, Summed | PerRow):
            self.shares.append(Shared("averages", trained, 0, one))
        is_of_rows = name in OVER_ROWS and isinstance(values[0].kind, PerRow)
        if is_of_rows and isinstance(kinds[0], Fixed):
            size = _bytes(one.outvars[0].aval)
            self.shares.append(Shared(OVER_ROWS[name], trained, size, one))
        return [Held(kind, trained) for kind in kinds]


def _without_arrays(values: Sequence[Held]) -> list[Held]:
    return [Held(value.kind, value.trained) for value in values]


def _bytes(aval: Any) -> int:
    """Return the size of an array; of keys, that of two words for each, also where
    `spmd.base.rng` keeps a third one beside them.
    """
    is_key = jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key)
    return aval.size * (KEY_BYTES if is_key else aval.dtype.itemsize)


def _is_same_array(first: Any, second: Any) -> bool:
    """Return whether a captured array is the same in both traces; of a large one that is not the
    same object, that is not known.
    """
    if first is second:
        return True
    if np.shape(first) != np.shape(second) or np.size(first) > MOST_ELEMENTS:
        return False
    return np.array_equal(np.asarray(first), np.asarray(second))


def _constants(params: Mapping[str, Any]) -> list[Any]:
    """Return the captured arrays of the programs that an equation runs."""
    programs = filter(is_closed, jax.tree.leaves([*params.values()], is_leaf=is_closed))
    return [constant for program in programs for constant in program.consts]


def _may_be_key(variable: Any) -> bool:
    """Return whether a variable is a random key, or may be the data of one."""
    dtype = variable.aval.dtype
    return dtype == np.uint32 or jax.dtypes.issubdtype(dtype, jax.dtypes.extended)


def _has_rows_of(kind: Kind, rows: PerRow) -> bool:
    """Return whether an array has its rows where another one has them."""
    return isinstance(kind, PerRow) and (kind.dim, kind.inner) == (rows.dim, rows.inner)


def _sum_over_tokens(kinds: Sequence[Kind]) -> Kind | None:
    """Return the kind of `cross_entropy_from_features`: a weighted sum over tokens, whatever its
    chunks are.
    """
    features, *head, labels, weights = kinds
    if not isinstance(features, PerRow) or not _has_rows_of(labels, features):
        return None
    # a weight for each token, or one for all
    if not isinstance(weights, Fixed) and not _has_rows_of(weights, features):
        return None
    if not all(isinstance(kind, Fixed) for kind in head):
        return None
    is_same = all(kind.power == 0 for kind in (features, labels, *head))
    return Summed(power_if(is_same, weights.power))


def _attention_of_rows(kinds: Sequence[Kind]) -> Kind | None:
    """Return the kind of attention in tiles: row by row, if dim 0 of queries, keys, values and
    masks has the rows.
    """
    for kind in kinds:
        if not isinstance(kind, Fixed) and not _has_rows_of(kind, PerRow(0)):
            return None
    return PerRow(0, power=power_if(all(kind.power == 0 for kind in kinds)))


def read_loss(
    first: Any, second: Any, inputs: Sequence[Held], rows: int, others: int
) -> tuple[list[Held], list[Shared]]:
    """Return the outputs of a function that was traced for `rows` and for `others` rows, and what
    workers share.

    Args:
      inputs: of the function.

    Raises:
      Unreadable: the traces do not correspond.
    """
    reader = Walk(rows, others)
    return reader.closed(first, second, inputs), reader.shares
