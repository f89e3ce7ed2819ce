"""Finds attention in the equations of a program, and reads what happens to its scores between the
two products.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

from spmd.base.xla import scope_of
from spmd.nn.attention_kernels import AS_WRITTEN
from spmd.nn.traced_values import Band, Values, View
from spmd.nn.written_dims import Roles, Sizes, reshaped, wide

# A score of at most this is that of a key which is not seen.
MASKED = -1e4
# The most operations between a product and the softmax.
LONGEST = 40


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

    def array_roles(self, sizes: Sizes) -> list[Roles]:
        """Return the roles of the dims of the array itself."""
        roles: list[Roles] = [()] * self.view.atom.aval.ndim
        for place, dim in enumerate(self.view.dims):
            if dim is not None and self.view.atom.aval.shape[dim] > 1:
                roles[dim] = wide(self.dims[place], sizes)
        return roles


@dataclasses.dataclass
class Dims:
    """Roles of the dims of an attention: keys are [rows, keys, groups, size], queries [rows,
    queries, groups and shared, size].
    """

    rows: Roles
    groups: Roles
    # Heads with the same keys.
    shared: Roles
    queries: Roles
    keys: Roles
    size: Roles
    width: Roles  # of values


@dataclasses.dataclass
class WrittenAttention:
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
        """The precision of the products, as `jax.lax.dot_general` takes it."""
        return self.product.params["precision"]

    @property
    def dtype(self) -> Any:
        """The dtype in which values are multiplied, if queries and keys have it; else the widest of
        the three.
        """
        return jnp.result_type(*(operand.atom.aval.dtype for operand in self.operands()))

    def operands(self) -> tuple[Operand, Operand, Operand]:
        """Return queries, keys and values. Queries and keys that the model widens for the product
        are those from before.
        """
        query = self.inputs["query"]
        key = self.inputs["key"]
        value = self.inputs["value"]
        dtype = value.atom.aval.dtype
        # A model may convert to float32 for exact scores; the fused kernels keep scores in float32
        # anyway.
        narrow_query = self.values.narrower(query.atom, dtype)
        narrow_key = self.values.narrower(key.atom, dtype)
        if narrow_query is not None and narrow_key is not None:
            query = query._replace(atom=narrow_query)
            key = key._replace(atom=narrow_key)
        return query, key, value

    def follow(self, axis: int, before: list["Step"], after: list[Any]) -> "WrittenAttention":
        """Follow the operations: `axis` is the dim of the softmax, `before` and `after` are the
        operations between it and the products.
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
        # Without batch dims it is no attention, and nothing is to be said.
        if count == 0:
            return self._not("")
        if dims is None:
            return self._not(self.why)
        keys = dims[axis]
        key_side = 1
        if len(keys) == 1 and keys[0] in first:
            key_side = 0
        if len(keys) != 1 or keys[0] < count or len((first, second)[key_side]) != 1:
            return self._not("its softmax is over another dim than that of the keys")
        size = second.stop
        for number, (x, contracted_, batch_) in enumerate(self._sides(self.product)):
            roles: dict[int, Roles] = {dim: (role,) for role, dim in enumerate(batch_)}
            roles |= {dim: (size + place,) for place, dim in enumerate(contracted_)}
            free = zip(sides[number], (first, second)[number], strict=True)
            roles |= {dim: (role,) for dim, role in free}
            self.sizes |= {size + place: x.aval.shape[dim] for place, dim in enumerate(contracted_)}
            name = "query"
            if number == key_side:
                name = "key"
            self.inputs[name] = self._operand(x, roles)
        _, _, key_batch = self._sides(self.product)[key_side]
        rows = sorted(range(count), key=lambda role: key_batch[role])
        groups = ()
        if count > 1:
            groups = (rows.pop(),)
        query_roles = (first, second)[1 - key_side]
        size_roles = tuple(range(size, size + len(contracted)))
        self.dims = Dims(
            rows=tuple(rows),
            groups=groups,
            shared=tuple(query_roles),
            queries=(),
            keys=keys,
            size=size_roles,
            width=(),
        )
        self._weigh(dims, after, size + len(contracted))
        if self.why is None:
            self._bound()
        if self.why is None and self.hidden > MASKED:
            self._not(f"its mask sets scores to {self.hidden:g}, above {MASKED:g}")
        if self.cap is not None:
            self.scale *= self.cap
            if self.cap <= 0:
                self._not(f"its soft cap is {self.cap:g}")
        return self

    def _operand(self, x: Any, roles: Mapping[int, Roles]) -> Operand:
        return Operand(x, tuple(wide(roles[dim], self.sizes) for dim in range(x.aval.ndim)))

    @staticmethod
    def _sides(product: Any) -> list[tuple[Any, tuple[int, ...], tuple[int, ...]]]:
        """Return both inputs of a product, with their contracted dims and their batch dims."""
        contracted, batch = product.params["dimension_numbers"]
        return [
            (product.invars[side], tuple(contracted[side]), tuple(batch[side])) for side in (0, 1)
        ]

    def _not(self, why: str | None) -> "WrittenAttention":
        """Leave it as it is, for this reason, or an earlier one."""
        if self.why is None:
            self.why = why
        return self

    def _apply(self, step: "Step", dims: tuple[Roles, ...]) -> tuple[Roles, ...] | None:
        """Return the roles of the scores' dims after an operation; None if they are lost."""
        equation = step.equation
        name = step.equation.primitive.name
        moved = _moved_roles(equation, dims, self.sizes)
        if moved is not None:
            return moved
        if name == "reshape":
            self._not("a reshape splits a dim of its scores")
            return None
        dtype = equation.outvars[0].aval.dtype
        if name == "copy" or (
            name == "convert_element_type" and jnp.issubdtype(dtype, jnp.floating)
        ):
            return dims
        if not self._follow_operation(step, name, dims):
            self._not(f"{name} is between its products")
        return dims

    def _follow_operation(self, step: "Step", name: str, dims: tuple[Roles, ...]) -> bool:
        """Follow an operation of the scores with numbers, masks or biases; returns whether it is
        one.
        """
        others = [x for number, x in enumerate(step.equation.invars) if number != step.place]
        is_changed = self.biases or self.masks or self.bands or self.shifted
        if name == "tanh" and self.cap is None and not is_changed:
            self.cap = 1.0
            return True
        if name == "select_n" and step.place > 0 and len(others) == 2:
            hidden = self.values.scalar(others[1])
            if hidden is None:
                return False
            self.hidden = max(self.hidden, float(hidden))
            negated = step.place == 1
            same = _same(others[0], len(dims))
            view = View(*self.values.source(others[0], same), negated)
            self.bands.append((self.values.visible(others[0], same, negated), view, dims))
            return True
        # Scores that something is divided by, or subtracted from, are none of a softmax.
        if name in ("div", "sub") and step.place > 0:
            return False
        if name in ("mul", "div"):
            number = self.values.scalar(others[0])
            if number is None:
                return False
            factor = float(number)
            if name == "div":
                factor = 1 / factor
            self._multiply(factor)
            return True
        if name not in ("add", "add_any", "sub"):
            return False
        sign = 1.0
        if name == "sub":
            sign = -1.0
        self._add(others[0], dims, sign)
        return True

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
        """Follow a sum with a bias, a mask in the form of one, or a number, which changes no
        weight.
        """
        if self.values.scalar(other) is not None:
            self.shifted = True
            return
        same = _same(other, len(dims))
        parts = None
        if factor > 0:
            parts = self.values.masked(other, same, MASKED)
        if parts is None:
            view = View(*self.values.source(other, same))
            self.biases.append(Part(view, dims, factor))
        else:
            self.bands.append((parts, None, dims))

    def _weigh(self, dims: tuple[Roles, ...], after: list[Any], free: int) -> None:
        """Follow the weights to the product with the values, and read its dims."""
        weights = self.softmax.outvars[0]
        for equation in after:
            name = equation.primitive.name
            moved = _moved_roles(equation, dims, self.sizes)
            if moved is None and name not in ("convert_element_type", "copy"):
                why = f"{name} is between its softmax and the values"
                if name == "reshape":
                    why = "a reshape splits a dim of its weights"
                self._not(why)
                return
            dims = moved or dims
            weights = equation.outvars[0]
        sides = self._sides(self.weighted)
        number = 1
        if self.weighted.invars[0] is weights:
            number = 0
        _, contracted, batch = sides[number]
        value, value_contracted, value_batch = sides[1 - number]
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
        self.inputs["value"] = self._operand(value, roles)
        of_batch = tuple(role for dim in batch for role in dims[dim])
        free_dims = _free(len(dims), contracted, batch)
        of_weights = tuple(role for dim in free_dims for role in dims[dim])
        # A product's result has the dims of its first input first.
        self.result = (*of_batch, *self.dims.width, *of_weights)
        if number == 0:
            self.result = (*of_batch, *of_weights, *self.dims.width)

    def _bound(self) -> None:
        """Choose the dim of the queries among those that keys do not have, and read masks as bounds
        on positions where they are.
        """
        dims = self.dims
        sizes = self.sizes
        size = sizes[dims.keys[0]]

        def by_mask(role: int) -> tuple[bool, bool, int]:
            views = [(part.view, part.dims) for part in self.biases]
            for parts, view, of in self.bands:
                views += [(part, of) for part in parts]
                if view is not None:
                    views.append((view, of))
            return (
                any(role in _roles(view, of) for view, of in views),
                sizes[role] == size,
                sizes[role],
            )

        if dims.shared:
            queries = max(dims.shared, key=by_mask)
            dims.queries = (queries,)
            dims.shared = tuple(role for role in dims.shared if role != queries)
        for parts, view, of in self.bands:
            bands = [part for part in parts if isinstance(part, Band)]
            bounds = [self._bound_of(band, of) for band in bands]
            if any(bound is None for bound in bounds):
                if view is None:
                    self._not("its mask compares other positions than those of queries and keys")
                else:
                    self.masks.append(Part(view, of))
                continue
            for after, before in filter(None, bounds):
                self.after = _lower_bound(self.after, after)
                self.before = _lower_bound(self.before, before)
            self.masks += [Part(part, of) for part in parts if isinstance(part, View)]

    def _bound_of(self, band: Band, of: tuple[Roles, ...]) -> tuple[int | None, int | None] | None:
        """Return a band as the numbers of keys after and before itself that a query sees; None: it
        is no such bound.
        """
        plus = of[band.plus]
        minus = of[band.minus]
        if band.more < 0 or {plus, minus} != {self.dims.queries, self.dims.keys}:
            return None
        if minus == self.dims.keys:
            return band.more, None
        return None, band.more


def _lower_bound(one: int | None, other: int | None) -> int | None:
    """Return the lower of two bounds; None is no bound."""
    if one is None:
        return other
    if other is None:
        return one
    return min(one, other)


class Step(NamedTuple):
    """An equation, and the number of its input that is the scores."""

    equation: Any
    place: int


def find(equations: list[Any], values: Values) -> Iterator[WrittenAttention]:
    """Yield every attention among the equations of a jaxpr: a softmax between two products that
    have batch dims.
    """
    users: dict[Any, list[Any]] = {}
    for equation in equations:
        for x in equation.invars:
            if not hasattr(x, "val"):
                users.setdefault(x, []).append(equation)
    for equation in equations:
        softmax = None
        if equation.primitive.name == "div":
            softmax = _softmax(equation, values)
        before = softmax and _from_product(softmax[0], values, set())
        after = before and _to_product(equation.outvars[0], users, set())
        if softmax and before and after and AS_WRITTEN not in scope_of(after[-1]):
            product, steps = before
            *between, weighted = after
            attention = WrittenAttention(product, equation, weighted, values, {})
            attention.follow(softmax[1], steps, between)
            if attention.why != "":
                yield attention


def _softmax(divide: Any, values: Values) -> tuple[Any, int] | None:
    """Return the scores of a softmax that ends in this division, and its dim; None if there is
    none.
    """
    weights, total = divide.invars
    exponential = values.equation(weights)
    dims = tuple(range(divide.outvars[0].aval.ndim))
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
        # A number that is the same for all keys changes no weight.
        if places[axis] is None:
            scores = difference.invars[0]
    return scores, axis


def _converts(equation: Any) -> bool:
    return equation.primitive.name in ("convert_element_type", "stop_gradient")


def _from_product(scores: Any, values: Values, visited: set[Any]) -> tuple[Any, list[Step]] | None:
    """Return the product that scores come from, and the operations between; of sums, the first term
    that comes from one.
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
            source = _from_product(x, values, visited)
            if source is not None:
                product, steps = source
                return product, [*steps, Step(equation, place)]
    return None


def _to_product(weights: Any, users: dict[Any, list[Any]], visited: set[Any]) -> list[Any] | None:
    """Return the operations from weights to a product, which is the last."""
    visited.add(weights)
    for equation in users.get(weights, ()):
        if equation.primitive.name == "dot_general":
            return [equation]
    for equation in users.get(weights, ()):
        if len(equation.outvars) != 1 or len(visited) >= LONGEST:
            continue
        (x,) = equation.outvars
        if x not in visited and x.aval.size == weights.aval.size:
            operations = _to_product(x, users, visited)
            if operations is not None:
                return [equation, *operations]
    return None


def _free(ndim: int, contracted: tuple[int, ...], batch: tuple[int, ...]) -> list[int]:
    """Return dims of a product's input that its result has beside the batch dims."""
    return [dim for dim in range(ndim) if dim not in contracted and dim not in batch]


def _same(x: Any, ndim: int) -> tuple[int | None, ...]:
    """Return the dims of an array of the same shape; a scalar is repeated."""
    if x.aval.ndim:
        return tuple(range(ndim))
    return (None,) * ndim


def _roles(view: View | Band, dims: tuple[Roles, ...]) -> set[int]:
    """Return the roles on which a mask or a bias depends."""
    if isinstance(view, Band):
        places = [view.plus, view.minus]
    else:
        places = [place for place, dim in enumerate(view.dims) if dim is not None]
    return {role for place in places for role in dims[place]}


def _moved_roles(equation: Any, dims: tuple[Roles, ...], sizes: Sizes) -> tuple[Roles, ...] | None:
    """Return the roles after dims are reordered, or joined and split; None: the equation does
    something else, or splits a role.
    """
    name = equation.primitive.name
    shape = equation.outvars[0].aval.shape
    if name == "transpose":
        return tuple(dims[dim] for dim in equation.params["permutation"])
    if (
        name in ("reshape", "squeeze", "broadcast_in_dim")
        and math.prod(shape) == equation.invars[0].aval.size
    ):
        return reshaped(dims, sizes, shape)
    return None
