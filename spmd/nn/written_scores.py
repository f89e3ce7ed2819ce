"""Finds attention in the equations of a program, and reads what happens to its scores between the
two products.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp

from spmd.base.xla import scope_of
from spmd.nn.attention_kernels import AS_WRITTEN
from spmd.nn.traced_values import Band, Values, View
from spmd.nn.written_dims import Roles, Sizes, reshaped, wide

MASKED = -1e4  # a score of at most this is that of a key which is not seen
LONGEST = 40  # operations between a product and the softmax


class Operand(NamedTuple):
    """An input of a product, and the roles of its dims."""

    atom: Any
    dims: tuple[Roles, ...]


@dataclasses.dataclass
class Part:
    """A mask or a bias: an array as the scores had it where it was applied, and the roles of their
    dims there.
    """

    view: View
    dims: tuple[Roles, ...]
    factor: float = 1.0

    def kept(self, sizes: Sizes) -> list[Roles]:
        """The roles of the array's own dims."""
        shape = self.view.atom.aval.shape
        places = {dim: place for place, dim in enumerate(self.view.dims) if dim is not None}
        return [
            wide(self.dims[places[dim]], sizes) if size > 1 else ()
            for dim, size in enumerate(shape)
        ]


@dataclasses.dataclass
class Dims:
    """Roles of the dims of an attention: keys are [rows, keys, groups, size], queries [rows,
    queries, groups and shared, size].
    """

    rows: Roles
    groups: Roles
    shared: Roles  # heads with the same keys
    queries: Roles
    keys: Roles
    size: Roles
    width: Roles  # of values


@dataclasses.dataclass
class Found:
    """An attention: its equations, and what happens to its scores.

    Attributes:
      product, softmax, weighted: the equations that compute the scores, divide by the normaliser,
        and multiply the values.
      why: why it cannot be replaced; "": it should not be, and nothing is to be said.
      cap: of scores, after `scale`, which includes it.
      after, before: how many keys after and before itself a query sees at most; None: no bound.
    """

    product: Any
    softmax: Any
    weighted: Any
    values: Values
    sizes: dict[int, int]
    why: str | None = None
    scale: float = 1.0
    cap: float | None = None
    hidden: float = -math.inf
    shifted: bool = False
    after: int | None = None
    before: int | None = None
    masks: list[Part] = dataclasses.field(default_factory=list)
    biases: list[Part] = dataclasses.field(default_factory=list)
    bands: list[tuple[list[View | Band], View | None, tuple[Roles, ...]]] = dataclasses.field(
        default_factory=list
    )
    dims: Dims = None  # type: ignore[assignment]
    result: Roles = ()
    inputs: dict[str, Operand] = dataclasses.field(default_factory=dict)

    @property
    def precision(self) -> Any:
        """Of the products, as `jax.lax.dot_general` takes it."""
        return self.product.params["precision"]

    @property
    def dtype(self) -> Any:
        """That in which values are multiplied, if queries and keys have it; else the widest of the
        three.
        """
        return jnp.result_type(*(operand.atom.aval.dtype for operand in self.operands()))

    def operands(self) -> tuple[Operand, Operand, Operand]:
        """Queries, keys and values. Queries and keys that the model widens for the product are
        taken as they were.
        """
        value = self.inputs["value"]
        narrow = [
            self.values.narrower(self.inputs[name].atom, value.atom.aval.dtype)
            for name in ("query", "key")
        ]
        if all(atom is not None for atom in narrow):
            query, key = (
                self.inputs[name]._replace(atom=atom)
                for name, atom in zip(("query", "key"), narrow, strict=True)
            )
            return query, key, value
        return self.inputs["query"], self.inputs["key"], value

    def read(self, axis: int, before: list["Step"], after: list[Any]) -> "Found":
        """Read the operations: `axis` is the dim of the softmax, `before` and `after` are those
        between it and the products.
        """
        (contracted, _), batch = self.product.params["dimension_numbers"]
        sides = [
            _free(x.aval.ndim, contracted_, batch_)
            for x, contracted_, batch_ in self._sides(self.product)
        ]
        count = len(batch[0])
        first = range(count, count + len(sides[0]))
        second = range(first.stop, first.stop + len(sides[1]))
        self.sizes |= dict(enumerate(self.product.outvars[0].aval.shape))
        dims: tuple[Roles, ...] | None = tuple(
            wide((role,), self.sizes) for role in range(second.stop)
        )
        for step in before:
            dims = dims and self._apply(step, dims)
        if dims is None or count == 0:
            return self._not(self.why if count else "")
        keys = dims[axis]
        if (
            len(keys) != 1
            or keys[0] < count
            or len(side := first if keys[0] in first else second) != 1
        ):
            return self._not("its softmax is over another dim than that of the keys")
        key_side = 0 if side is first else 1
        size = second.stop
        for number, (x, contracted_, batch_) in enumerate(self._sides(self.product)):
            roles: dict[int, Roles] = {dim: (role,) for role, dim in enumerate(batch_)}
            roles |= {dim: (size + place,) for place, dim in enumerate(contracted_)}
            roles |= {
                dim: (role,)
                for dim, role in zip(sides[number], (first, second)[number], strict=True)
            }
            self.sizes |= {size + place: x.aval.shape[dim] for place, dim in enumerate(contracted_)}
            name = "key" if number == key_side else "query"
            self.inputs[name] = Operand(
                x, tuple(wide(roles[dim], self.sizes) for dim in range(x.aval.ndim))
            )
        key_batch = self._sides(self.product)[key_side][2]
        shared = second if key_side == 0 else first
        ordered = sorted(range(count), key=lambda role: key_batch[role])
        self.dims = Dims(
            rows=tuple(ordered[:-1] if count > 1 else ordered),
            groups=tuple(ordered[-1:] if count > 1 else ()),
            shared=tuple(shared),
            queries=(),
            keys=keys,
            size=tuple(range(size, size + len(contracted))),
            width=(),
        )
        self._weigh(dims, after, size + len(contracted))
        if self.why is None:
            self._bound()
        if self.why is None and self.hidden > MASKED:
            self._not(f"its mask sets scores to {self.hidden:g}, above {MASKED:g}")
        if self.cap is not None:
            self.scale *= self.cap
            self._not(None if self.cap > 0 else f"its soft cap is {self.cap:g}")
        return self

    @staticmethod
    def _sides(product: Any) -> list[tuple[Any, tuple[int, ...], tuple[int, ...]]]:
        """Both inputs of a product, with the dims that are contracted and those of the batch."""
        contracted, batch = product.params["dimension_numbers"]
        return [
            (product.invars[side], tuple(contracted[side]), tuple(batch[side])) for side in (0, 1)
        ]

    def _not(self, why: str | None) -> "Found":
        """Left as it is, for this reason, or one that was found before."""
        self.why = why if self.why is None else self.why
        return self

    def _apply(self, step: "Step", dims: tuple[Roles, ...]) -> tuple[Roles, ...] | None:
        """The roles of the scores' dims after an operation; None if they are lost."""
        equation, name = step.equation, step.equation.primitive.name
        moved = _moved_roles(equation, dims, self.sizes)
        if moved is not None:
            return moved
        if name == "reshape":
            return self._not("a reshape splits a dim of its scores") and None
        others = [x for number, x in enumerate(equation.invars) if number != step.place]
        if (
            name == "convert_element_type"
            and jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.floating)
        ) or name == "copy":
            return dims
        if (
            name == "tanh"
            and self.cap is None
            and not (self.biases or self.masks or self.bands or self.shifted)
        ):
            self.cap = 1.0
        elif (
            name == "select_n"
            and step.place > 0
            and len(others) == 2
            and (hidden := self.values.scalar(others[1])) is not None
        ):
            self.hidden = max(self.hidden, float(hidden))
            negated, ndim = step.place == 1, len(dims)
            view = View(*self.values.source(others[0], _same(others[0], ndim)), negated)
            self.bands.append(
                (self.values.seen(others[0], _same(others[0], ndim), negated), view, dims)
            )
        elif (
            name in ("mul", "div")
            and (step.place == 0 or name == "mul")
            and (number := self.values.scalar(others[0])) is not None
        ):
            self._multiply(float(number) if name == "mul" else 1 / float(number))
        elif name in ("add", "add_any", "sub") and (step.place == 0 or name != "sub"):
            self._add(others[0], dims, -1.0 if name == "sub" else 1.0)
        else:
            self._not(f"{name} is between its products")
        return dims

    def _multiply(self, factor: float) -> None:
        if self.cap is None:
            self.scale *= factor
        else:
            self.cap *= factor
        if factor <= 0 and (self.masks or self.bands):
            self._not(f"its masked scores are multiplied by {factor:g}")
        self.hidden *= factor
        for part in self.biases:
            part.factor *= factor

    def _add(self, other: Any, dims: tuple[Roles, ...], factor: float) -> None:
        """A bias, a mask in the form of one, or a number, which changes no weight."""
        if self.values.scalar(other) is not None:
            self.shifted = True
            return
        seen = self.values.masked(other, _same(other, len(dims)), MASKED) if factor > 0 else None
        view = View(*self.values.source(other, _same(other, len(dims))))
        if seen is None:
            self.biases.append(Part(view, dims, factor))
        else:
            self.bands.append((seen, None, dims))

    def _weigh(self, dims: tuple[Roles, ...], after: list[Any], free: int) -> None:
        """Follow the weights to the product with the values, and read its dims."""
        weights = self.softmax.outvars[0]
        for equation in after:
            name = equation.primitive.name
            moved = _moved_roles(equation, dims, self.sizes)
            if moved is None and not (name == "convert_element_type" or name == "copy"):
                self._not(
                    f"{name} is between its softmax and the values"
                    if name != "reshape"
                    else "a reshape splits a dim of its weights"
                )
                return
            dims, weights = moved or dims, equation.outvars[0]
        sides = self._sides(self.weighted)
        number = 0 if self.weighted.invars[0] is weights else 1
        (_, contracted, batch), (value, value_contracted, value_batch) = (
            sides[number],
            sides[1 - number],
        )
        roles: dict[int, Roles] = {
            place: dims[dim] for place, dim in zip(value_batch, batch, strict=True)
        }
        roles |= {place: dims[dim] for place, dim in zip(value_contracted, contracted, strict=True)}
        width = _free(value.aval.ndim, value_contracted, value_batch)
        roles |= {dim: (free + place,) for place, dim in enumerate(width)}
        self.sizes |= {free + place: value.aval.shape[dim] for place, dim in enumerate(width)}
        self.dims.width = tuple(range(free, free + len(width)))
        if [role for dim in contracted for role in dims[dim]] != list(self.dims.keys):
            self._not("its softmax is over another dim than the sum of its weights")
        batches = sorted(role for dim in batch for role in dims[dim])
        if batches != sorted(wide((*self.dims.rows, *self.dims.groups), self.sizes)):
            self._not("its values have other heads than its keys")
        self.inputs["value"] = Operand(
            value, tuple(wide(roles[dim], self.sizes) for dim in range(value.aval.ndim))
        )
        of_weights = tuple(
            role for dim in _free(len(dims), contracted, batch) for role in dims[dim]
        )
        of_batch = tuple(role for dim in batch for role in dims[dim])
        order = (of_weights, self.dims.width) if number == 0 else (self.dims.width, of_weights)
        self.result = (*of_batch, *order[0], *order[1])

    def _bound(self) -> None:
        """Choose the dim of the queries among those that keys do not have, and read masks as bounds
        on positions where they are.
        """
        dims, sizes = self.dims, self.sizes
        size = sizes[dims.keys[0]]

        def by_mask(role: int) -> tuple[bool, bool, int]:
            views = [
                (view, of)
                for parts, view, of in self.bands
                for view in (*parts, view)
                if view is not None
            ]
            views += [(part.view, part.dims) for part in self.biases]
            return (
                any(role in _roles(view, of) for view, of in views),
                sizes[role] == size,
                sizes[role],
            )

        if dims.shared:
            queries = max(dims.shared, key=by_mask)
            dims.queries, dims.shared = (
                (queries,),
                tuple(role for role in dims.shared if role != queries),
            )
        for parts, view, of in self.bands:
            bands = [part for part in parts if isinstance(part, Band)]
            bounds = [self._bound_of(band, of) for band in bands]
            if any(bound is None for bound in bounds):
                if view is None:
                    self._not("its mask compares other positions than those of queries and keys")
                else:
                    self.masks.append(Part(view, of))
                continue
            for after, before in (bound for bound in bounds if bound is not None):
                self.after = (
                    after
                    if self.after is None
                    else self.after
                    if after is None
                    else min(self.after, after)
                )
                self.before = (
                    before
                    if self.before is None
                    else self.before
                    if before is None
                    else min(self.before, before)
                )
            self.masks += [Part(part, of) for part in parts if isinstance(part, View)]

    def _bound_of(self, band: Band, of: tuple[Roles, ...]) -> tuple[int | None, int | None] | None:
        """A band as how many keys after and before itself a query sees; None: it is no such
        bound.
        """
        plus, minus = of[band.plus], of[band.minus]
        if band.more < 0 or {plus, minus} != {self.dims.queries, self.dims.keys}:
            return None
        return (band.more, None) if minus == self.dims.keys else (None, band.more)


class Step(NamedTuple):
    """An equation, and which of its inputs the scores are."""

    equation: Any
    place: int


def find(equations: list[Any], values: Values) -> Iterator[Found]:
    """Every attention among the equations of a jaxpr: a softmax between two products that have
    batch dims.
    """
    users: dict[Any, list[Any]] = {}
    for equation in equations:
        for x in equation.invars:
            if not hasattr(x, "val"):
                users.setdefault(x, []).append(equation)
    for equation in equations:
        softmax = _softmax(equation, values) if equation.primitive.name == "div" else None
        before = softmax and _from_product(softmax[0], values, set())
        after = before and _to_product(equation.outvars[0], users, set())
        if softmax and before and after and AS_WRITTEN not in scope_of(after[-1]):
            (product, steps), (*between, weighted) = before, after
            found = Found(product, equation, weighted, values, {}).read(softmax[1], steps, between)
            if found.why != "":
                yield found


def _softmax(divide: Any, values: Values) -> tuple[Any, int] | None:
    """The scores of a softmax that ends in this division, and its dim; None if there is none."""
    weights, total = divide.invars
    exponential, dims = values.equation(weights), tuple(range(divide.outvars[0].aval.ndim))
    if (
        exponential is None
        or exponential.primitive.name != "exp"
        or hasattr(total, "val")
        or not total.aval.shape
    ):
        return None
    total, repeated = values.source(total, dims, _converts)
    reduction = values.equation(total)
    if (
        reduction is None
        or reduction.primitive.name != "reduce_sum"
        or len(reduction.params["axes"]) != 1
    ):
        return None
    [axis] = map(int, reduction.params["axes"])
    aligned = all(repeated[dim] in (None, dim - (dim > axis)) for dim in dims if dim != axis)
    summed, _ = values.source(reduction.invars[0], dims, _converts)
    if not aligned or repeated[axis] is not None or summed is not weights:
        return None
    scores = exponential.invars[0]
    difference = values.equation(scores)
    if (
        difference is not None
        and difference.primitive.name == "sub"
        and not hasattr(difference.invars[1], "val")
    ):
        highest = difference.invars[1]
        _, places = values.source(highest, _same(highest, len(dims)), _converts)
        if places[axis] is None:  # whatever is the same for all keys changes no weight
            scores = difference.invars[0]
    return scores, axis


def _converts(equation: Any) -> bool:
    return equation.primitive.name in ("convert_element_type", "stop_gradient")


def _from_product(scores: Any, values: Values, visited: set[Any]) -> tuple[Any, list[Step]] | None:
    """The product that scores come from, and the operations between; of sums, the first term that
    comes from one.
    """
    equation = values.equation(scores)
    if equation is None or scores in visited or len(visited) > LONGEST:
        return None
    visited.add(scores)
    if equation.primitive.name == "dot_general":
        return equation, []
    if len(equation.outvars) != 1:
        return None
    for place, x in enumerate(equation.invars):
        if (
            not hasattr(x, "val")
            and x.aval.size == scores.aval.size
            and jnp.issubdtype(x.aval.dtype, jnp.floating)
        ):
            found = _from_product(x, values, visited)
            if found is not None:
                return found[0], [*found[1], Step(equation, place)]
    return None


def _to_product(weights: Any, users: dict[Any, list[Any]], visited: set[Any]) -> list[Any] | None:
    """The operations from weights to a product, which is the last."""
    visited.add(weights)
    for equation in users.get(weights, ()):
        if equation.primitive.name == "dot_general":
            return [equation]
    for equation in users.get(weights, ()):
        [x, *rest] = equation.outvars
        if (
            not rest
            and x not in visited
            and x.aval.size == weights.aval.size
            and len(visited) < LONGEST
        ):
            found = _to_product(x, users, visited)
            if found is not None:
                return [equation, *found]
    return None


def _free(ndim: int, contracted: tuple[int, ...], batch: tuple[int, ...]) -> list[int]:
    """Dims of a product's input that its result keeps beside those of the batch."""
    return [dim for dim in range(ndim) if dim not in contracted and dim not in batch]


def _same(x: Any, ndim: int) -> tuple[int | None, ...]:
    """The dims of an array of the same shape; a scalar is repeated."""
    return tuple(range(ndim)) if x.aval.ndim else (None,) * ndim


def _roles(view: View | Band, dims: tuple[Roles, ...]) -> set[int]:
    """Roles on which a mask or a bias depends."""
    places = (
        [view.plus, view.minus]
        if isinstance(view, Band)
        else [place for place, dim in enumerate(view.dims) if dim is not None]
    )
    return {role for place in places for role in dims[place]}


def _moved_roles(equation: Any, dims: tuple[Roles, ...], sizes: Sizes) -> tuple[Roles, ...] | None:
    """Roles after dims are reordered, or joined and split; None: the equation does something else,
    or splits a role.
    """
    name, shape = equation.primitive.name, equation.outvars[0].aval.shape
    if name == "transpose":
        return tuple(dims[dim] for dim in equation.params["permutation"])
    if (
        name in ("reshape", "squeeze", "broadcast_in_dim")
        and math.prod(shape) == equation.invars[0].aval.size
    ):
        return reshaped(dims, sizes, shape)
    return None
