"""`[optimizer] matrices = "owner"`: each parameter's matrix is updated on one device, its owner,
for any optax transformation.

The update is traced. Its regions that need a matrix (`matrix_regions.py`) are grouped: those of
equal programs become one `jax.vmap` over all their matrices, inside a `jax.shard_map` in which a
device has as many of them as any other. All-to-alls bring the shards of a matrix to its owner, and
back; all-gathers replace them where an array is replicated. The rest of the update stays on shards,
and so does the state.
"""

import contextlib
import dataclasses
import functools
import graphlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import AbstractMesh, Mesh

from spmd.errors import LayoutError
from spmd.jaxpr.inner_programs import inner_jaxprs, opened, with_programs
from spmd.jaxpr.programs import closed_jaxprs, equations, inlined, is_literal, variables
from spmd.layout.resolve import Placement, Resolved, spread
from spmd.specs import Spec, entry_axes, make_entry, pspec, spec_axes
from spmd.train.matrix_regions import (
    DependentLayersError,
    Region,
    find_regions,
    layer_dim,
    needs_matrix,
    of_one_layer,
)
from spmd.tree import Tree, abstract, flatten, path_of
from spmd.wire import collectives
from spmd.xla import printed, shard_map

ALL = 1 << 60  # equations: functions of jax.numpy are jits, and a matrix passes through many
# entries that batch dims have more: layers, those in each layer such as experts, both
LARGER = (1,), (0, 1), (1, 1)
Way = tuple[str, ...]  # mesh axes along which matrices are sent to their owners at once


@dataclasses.dataclass(frozen=True)
class Group:
    """Matrices that are updated by equal programs, as the notes of a run and plans show them.

    Attributes:
      shape: of one matrix.
      matrices: how many there are, each layer of a stack, and each expert of a layer, counted.
      most: how many the devices with the most own.
      paths: the parameters, each with the number of its matrices.
      program: equal for groups whose scalars alone differ.
    """

    shape: tuple[int, ...]
    matrices: int
    most: int
    paths: Mapping[str, int] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    program: tuple = dataclasses.field(default=(), compare=False, repr=False)


def update_by_owners(
    optimizer: optax.GradientTransformationExtraArgs,
    resolved: Resolved,
    mesh: Mesh | AbstractMesh,
    groups: list[Group] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """The optimizer, with the same state, whose `update` on global arrays computes with each matrix
    on one device.

    Args:
      groups: gets the groups of matrices when `update` is traced.

    Raises:
      LayoutError: by `update`, whose program cannot be rewritten.
    """
    if mesh.size == 1:
        return optimizer

    def run(updates: Tree, state: Any, params: Tree, extra: dict[str, Any]) -> tuple[Tree, Any]:
        return optimizer.update(updates, state, params, **extra)

    def update(updates: Tree, state: Any, params: Tree = None, **extra: Any) -> tuple[Tree, Any]:
        arguments = updates, state, params, extra
        closed, shapes = _traced(run, arguments)
        larger, owners = (
            _of_larger_batches(optimizer, run, arguments, closed.jaxpr),
            _owners(arguments, resolved),
        )
        try:
            jaxpr = _Program(closed.jaxpr, larger, owners, resolved, mesh, groups).rewritten()
        except Exception as error:
            why = (
                '[optimizer] matrices = "owner": the optimizer\'s update cannot be rewritten: '
                f"{type(error).__name__}: {error}"
            )
            raise LayoutError(
                why, fix="leave it out: the optimizer trains the same, and XLA places its matrices."
            ) from error
        results = jaxpr_as_fun(closed.replace(jaxpr=jaxpr))(*jax.tree.leaves(arguments))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return optax.GradientTransformationExtraArgs(optimizer.init, update)


def owner_notes(
    optimizer: optax.GradientTransformationExtraArgs,
    params: Tree,
    opt: Any,
    resolved: Resolved,
    mesh: Mesh | AbstractMesh,
) -> list[str]:
    """What a person should know of `matrices = "owner"` under this layout; `params`, as it sees
    them, and `opt` are abstract.
    """
    if not resolved.layout.optimizer.owners or mesh.size == 1:
        return []
    groups: list[Group] = []
    grads, opt = abstract((params, opt))
    update = update_by_owners(optimizer, resolved, mesh, groups).update
    traced = jax.make_jaxpr(lambda grads, opt: update(grads, opt, grads, value=jnp.float32(0)))(
        grads, opt
    )
    products = _products_outside(traced.jaxpr)
    left = (
        "products of several parameters' arrays, in a loop over them, or next to what cannot be "
        "batched, are left to the compiler"
    )
    left = f"{left}: {products}."
    if not groups:
        why = (
            f"none has an owner: {left}"
            if products
            else "the optimizer multiplies and factorizes no matrices, so none has an owner."
        )
        return [f'note: [optimizer] matrices = "owner": {why}']
    counts: dict[str, int] = {}
    for group in groups:
        counts |= {path: max(count, counts.get(path, 0)) for path, count in group.paths.items()}
    shapes = ", ".join(
        f"{group.matrices} of {list(group.shape)} (at most {group.most} on a device)"
        for group in groups
    )
    notes = [f"[optimizer] matrices: {sum(counts.values())} have owners: {shapes}."]
    if products:
        notes.append(f"note: [optimizer] matrices: {left}")
    alike = [
        sum(other.program == group.program for other in groups) > 1 and group.matrices < mesh.size
        for group in groups
    ]
    if few := sum(alike):
        why = (
            "batches of fewer matrices than the mesh has devices, because scalars that equal "
            f"programs use differ: {few}."
        )
        notes.append(f"note: [optimizer] matrices: {why}")
    return notes


def _products_outside(jaxpr: Any) -> int:
    """How many products and factorizations of matrices owners do not compute."""
    count = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name != "shard_map" and needs_matrix(equation):
            inner = [*inner_jaxprs(equation)]
            count += sum(_products_outside(each) for each in inner) if inner else 1
    return count


def param_within(path: str, placements: Mapping[str, Any]) -> str | None:
    """The parameter whose path is in the path of an optimizer's array: the last, and of several
    that end there the longest.

    The number of a parameter in a list must be at the end, because optimizers are numbered too.

    >>> param_within("0/mu/blocks/0/kernel/left", {"kernel": 1, "blocks/0/kernel": 2, "mu": 3})
    'blocks/0/kernel'
    """
    parts = path.split("/")
    for end in range(len(parts), 0, -1):
        for start in range(end):
            inside = "/".join(parts[start:end])
            if inside in placements and (end == len(parts) or not inside.isdigit()):
                return inside
    return None


def _owners(arguments: tuple[Tree, ...], resolved: Resolved) -> list[str | None]:
    """The parameter of every leaf of an update's arguments."""
    updates, state, params, extra = arguments
    of_state = [
        param_within(path_of(keys), resolved.placements)
        for keys, _ in jax.tree_util.tree_leaves_with_path(state)
    ]
    return [*flatten(updates), *of_state, *flatten(params), *[None for _ in jax.tree.leaves(extra)]]


def _traced(run: Callable[..., Any], arguments: tuple[Tree, ...]) -> tuple[Any, Any]:
    """A function's program, which can be run inside and outside of `jax.shard_map`, since its
    equations know no mesh; and its results.
    """
    shapes = jax.tree.map(lambda x: _shaped(x, jnp.shape(x)), arguments)
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        return jax.make_jaxpr(run, return_shape=True)(*shapes)


def _shaped(like: Any, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """An abstract array like another one, in another shape."""
    kind = like if hasattr(like, "weak_type") else jax.typeof(like)
    return jax.ShapeDtypeStruct(shape, kind.dtype, weak_type=kind.weak_type)


def _of_larger_batches(
    optimizer: Any, run: Callable[..., Any], arguments: tuple[Tree, ...], jaxpr: Any
) -> tuple[Any, ...]:
    """The programs of the same update if dims that may be batches had one entry more: `LARGER` as
    far as there are such, and as it can be traced.
    """
    updates, state, params, extra = arguments
    if not any(needs_matrix(equation) for equation in equations(jaxpr)):
        return ()

    def traced(more: tuple[int, ...]) -> Any:
        def larger(leaf: Any) -> jax.ShapeDtypeStruct:
            batch = [
                size + add
                for size, add in zip(leaf.shape[: max(leaf.ndim - 2, 0)], more, strict=False)
            ]
            return _shaped(leaf, (*batch, *leaf.shape[len(batch) :]))

        grads, weights = jax.tree.map(larger, (updates, params))
        opt = jax.tree.map(
            lambda leaf, other: _shaped(leaf, other.shape),
            state,
            jax.eval_shape(optimizer.init, weights),
        )
        return _traced(run, (grads, opt, weights, extra))[0].jaxpr

    deepest, found = max((leaf.ndim for leaf in jax.tree.leaves(updates)), default=0), list[Any]()
    # an optimizer of one's own may refuse other shapes in any way
    with contextlib.suppress(Exception):
        found += [traced(LARGER[0])] if deepest > 2 else []
        found += [traced(more) for more in LARGER[1:]] if deepest > 3 else []
    return tuple(found)


@dataclasses.dataclass(frozen=True)
class _Member:
    """A region with the program of one matrix.

    Attributes:
      program: a jaxpr.
      shape: of the matrix.
      batch: sizes of the dims in front, layers and what each has several of, if each entry is a
        matrix of its own.
      stacked: for each input and output whether it has these dims.
      slots: mesh axes that shard them.
      ways: how matrices are sent to owners, one after the other.
      specs: how inputs and outputs are sharded.
    """

    region: Region
    program: Any
    shape: tuple[int, ...]
    batch: tuple[int, ...]
    stacked: tuple[bool, ...]
    slots: tuple[Way, ...]
    ways: tuple[Way, ...]
    specs: tuple[Spec, ...]

    @property
    def key(self) -> tuple:
        """Equal for members of one group."""
        return self.kind, tuple(
            self.region.shared[x] for x in self.region.inputs if x in self.region.shared
        )

    @property
    def kind(self) -> tuple:
        """Equal for members of one group, and of groups that differ in shared inputs."""
        constants = tuple(id(x) for jaxpr in closed_jaxprs(self.program) for x in jaxpr.consts)
        kind = self.region.level, printed(self.program), constants, len(self.batch)
        return *kind, self.stacked, self.slots, self.ways, self.specs

    @property
    def batched(self) -> Callable[..., Any]:
        """The program of a batch of matrices."""
        dims = [None if x in self.region.shared else 0 for x in self.region.inputs]
        return jax.vmap(jaxpr_as_fun(ClosedJaxpr(self.program, ())), in_axes=dims)

    def can_be_batched(self) -> bool:
        shapes = [
            (() if x in self.region.shared else (1,), y.aval)
            for x, y in zip(self.region.inputs, self.program.invars, strict=True)
        ]
        try:
            jax.eval_shape(
                self.batched, *[_shaped(kind, (*batch, *kind.shape)) for batch, kind in shapes]
            )
        except Exception:  # a primitive, such as a callback, may refuse batches in any way
            return False
        return True

    def held(self, mesh: Mesh | AbstractMesh) -> tuple[int, ...]:
        """The batch of matrices that the devices of one position along `slots` have."""
        return tuple(
            size // _size(way, mesh) for size, way in zip(self.batch, self.slots, strict=True)
        )


@dataclasses.dataclass(frozen=True)
class _Program:
    """A jaxpr whose regions are to be computed by owners.

    Attributes:
      larger: the same one of larger batches, as `_of_larger_batches` returns them.
      owners: the parameter of each input.
    """

    jaxpr: Any
    larger: tuple[Any, ...]
    owners: Sequence[str | None]
    resolved: Resolved
    mesh: Mesh | AbstractMesh
    groups: list[Group] | None

    def rewritten(self) -> Any:
        """The jaxpr with one equation in place of the regions of a group."""
        found, outputs = inlined(self.jaxpr, ALL)
        larger = [inlined(jaxpr, ALL)[0] for jaxpr in self.larger]
        larger = list(itertools.takewhile(functools.partial(_compares, found), larger))
        owners = {
            x: path
            for x, path in zip(self.jaxpr.invars, self.owners, strict=True)
            if path is not None
        }
        groups: dict[tuple, list[_Member]] = {}
        regions, owners = find_regions(found, owners, outputs)
        for region in regions:
            # an empty array has no shards to send
            if all(x.aval.size for x in (*region.inputs, *region.outputs)):
                member = self._member(region, found, larger)
                groups.setdefault(member.key, []).append(member)
        groups = {key: members for key, members in groups.items() if members[0].can_be_batched()}
        inside = {
            place
            for members in groups.values()
            for member in members
            for place in member.region.equations
        }
        kept = [
            self._branches(place, found, larger, owners)
            for place in range(len(found))
            if place not in inside
        ]
        replaced = _in_order([*kept, *(self._equation(members) for members in groups.values())])
        return self.jaxpr.replace(eqns=replaced, outvars=outputs)

    def _branches(
        self,
        place: int,
        found: Sequence[Any],
        larger: Sequence[Sequence[Any]],
        owners: Mapping[Any, str],
    ) -> Any:
        """An equation; the branches of a conditional, as `optax.MultiSteps` has, are rewritten."""
        equation = found[place]
        if equation.primitive.name != "cond" or not needs_matrix(equation):
            return equation
        paths = [None if is_literal(x) else owners.get(x) for x in equation.invars[1:]]

        def rewritten(_: str, branch: Any, *of_larger: Any) -> Any:
            others = tuple(map(opened, of_larger))
            inside = dataclasses.replace(self, jaxpr=branch.jaxpr, larger=others, owners=paths)
            return inside.rewritten()

        return with_programs(equation, rewritten, *(other[place] for other in larger))

    def _member(
        self, region: Region, found: Sequence[Any], larger: Sequence[Sequence[Any]]
    ) -> _Member:
        placement = self.resolved.placements[region.path]
        program, atoms, batch, stacked = (
            region.program(found, self.jaxpr),
            (*region.inputs, *region.outputs),
            (),
            None,
        )
        others = [self._larger(region, found, other) for other in larger]
        if others and len(placement.shape) > 2:
            try:
                batch = placement.shape[:1]
                program, stacked = (
                    of_one_layer(program, others[0][0], *batch),
                    _batched(atoms, others[0][1], 0, *batch),
                )
                if len(others) == len(LARGER) and len(placement.shape) > 3:
                    with contextlib.suppress(DependentLayersError):  # then each layer is one matrix
                        (_, _), (wider, names), (both, _) = others
                        if _batched(atoms, names, 1, placement.shape[1]) == stacked:
                            program = of_one_layer(
                                program, of_one_layer(wider, both, *batch), placement.shape[1]
                            )
                            batch = placement.shape[:2]
            except DependentLayersError:
                if region.without_sums is not None:  # which may be over all layers
                    return self._member(region.without_sums, found, larger)
                batch = ()
        if stacked is None or not any(stacked):
            program, batch, stacked = region.program(found, self.jaxpr), (), (False,) * len(atoms)
        layered = {x for x, on in zip(atoms, stacked, strict=True) if on}
        region = dataclasses.replace(
            region, shared={x: y for x, y in region.shared.items() if x not in layered}
        )
        slots = _slots(placement, len(batch))
        ways = _ways(placement, slots, self.mesh)
        specs = tuple(
            # of all layers
            border_spec(x.aval.shape, placement, self.mesh, batch=len(batch))
            if on or not batch
            else ()
            for x, on in zip(atoms, stacked, strict=True)
        )
        return _Member(
            region, program, placement.shape[len(batch) :], batch, stacked, slots, ways, specs
        )

    def _larger(
        self, region: Region, found: Sequence[Any], other: Sequence[Any]
    ) -> tuple[Any, dict[Any, Any]]:
        """The program of a region in that of larger batches, and its variables there by those
        here.
        """
        pairs = [pair for place in region.places for pair in _paired(found[place], other[place])]
        names = {x: y for x, y in pairs if not hasattr(x, "val")}
        named = {
            kind: tuple(names[x] for x in getattr(region, kind)) for kind in ("inputs", "outputs")
        }
        return dataclasses.replace(region, **named).program(other, self.jaxpr), names

    def _equation(self, members: list[_Member]) -> Any:
        """One equation in place of regions."""
        first = members[0]
        own = [
            number for number, x in enumerate(first.region.inputs) if x not in first.region.shared
        ]
        shared = [first.region.shared[x] for x in first.region.inputs if x in first.region.shared]
        arrays = [[member.region.inputs[number] for member in members] for number in own]
        if self.groups is not None:
            self.groups.append(_group(members, self.mesh))

        def update(arrays: list[list[jax.Array]], shared: list[jax.Array]) -> list[list[jax.Array]]:
            specs = (
                [[pspec(first.specs[number])] * len(members) for number in own],
                [pspec(())] * len(shared),
            )
            after = [
                [pspec(spec)] * len(members) for spec in first.specs[len(first.region.inputs) :]
            ]
            local = _local_update(first, own, [member.held(self.mesh) for member in members])
            with jax.named_scope("matrix_owners"):
                return shard_map(
                    local,
                    mesh=self.mesh,
                    in_specs=specs,
                    out_specs=after,
                    axis_names=self.mesh.axis_names,
                )(arrays, shared)

        shapes = jax.tree.map(lambda x: _shaped(x.aval, x.aval.shape), (arrays, shared))
        [equation] = jax.make_jaxpr(jax.jit(update))(*shapes).eqns
        outputs = [
            member.region.outputs[number]
            for number in range(len(first.region.outputs))
            for member in members
        ]
        return equation.replace(invars=[*jax.tree.leaves(arrays), *shared], outvars=outputs)


def _batched(
    atoms: Sequence[Any], names: Mapping[Any, Any], dim: int, size: int
) -> tuple[bool, ...]:
    """Which variables have a batch in this dim.

    Raises:
      DependentLayersError: one has it in another dim.
    """
    dims = [layer_dim(x, names[x], size) for x in atoms]
    if not {*dims} <= {dim, None}:
        raise DependentLayersError
    return tuple(each == dim for each in dims)


def _paired(equation: Any, other: Any) -> Iterator[tuple[Any, Any]]:
    return zip((*equation.invars, *equation.outvars), (*other.invars, *other.outvars), strict=True)


def _compares(found: Sequence[Any], of_more: Sequence[Any]) -> bool:
    """Whether two programs have the same equations on the same variables, but for shapes."""
    numbers: tuple[dict, dict] = {}, {}
    if len(found) != len(of_more):
        return False
    for pair in zip(found, of_more, strict=True):
        wired = [
            [
                number.setdefault(x, len(number)) if not hasattr(x, "val") else None
                for x in (*equation.invars, *equation.outvars)
            ]
            for number, equation in zip(numbers, pair, strict=True)
        ]
        if pair[0].primitive is not pair[1].primitive or wired[0] != wired[1]:
            return False
    return True


def _in_order(found: list[Any]) -> list[Any]:
    """Equations in an order in which each follows those that it uses."""
    made_at = {x: number for number, equation in enumerate(found) for x in equation.outvars}
    needed = {
        number: {made_at[x] for x in variables(equation.invars) if x in made_at}
        for number, equation in enumerate(found)
    }
    return [found[number] for number in graphlib.TopologicalSorter(needed).static_order()]


def _group(members: list[_Member], mesh: Mesh | AbstractMesh) -> Group:
    first = members[0]
    paths = {member.region.path: math.prod(member.batch) for member in members}
    places = math.prod(_size(way, mesh) for way in first.ways)
    most = -(-sum(math.prod(member.held(mesh)) for member in members) // places)
    return Group(first.shape, sum(paths.values()), most, paths, first.kind)


# where a matrix goes ------------------------------------------------------------------------------


def _slots(placement: Placement, batch: int) -> tuple[Way, ...]:
    """The mesh axes that shard each of the first dims, as the layers of a stack."""
    return tuple(map(entry_axes, (*placement.state_spec, *[None] * batch)[:batch]))


def _ways(
    placement: Placement, slots: tuple[Way, ...], mesh: Mesh | AbstractMesh
) -> tuple[Way, ...]:
    """The mesh axes along which the parameter's matrices are sent to owners: those that shard a dim
    together, then all others.
    """
    sharded = map(entry_axes, placement.state_spec[len(slots) :])
    used = spec_axes(placement.state_spec)
    ways = (*sharded, *((axis,) for axis in mesh.axis_names if axis not in used))
    return tuple(way for way in ways if _size(way, mesh) > 1)


def _size(way: Way, mesh: Mesh | AbstractMesh) -> int:
    return math.prod(mesh.shape[axis] for axis in way)


def border_spec(
    shape: tuple[int, ...],
    placement: Placement,
    mesh: Mesh | AbstractMesh,
    *,
    batch: int | None = None,
) -> Spec:
    """How an array that belongs to a parameter is sharded outside of regions: as the parameter's
    moments, or over as many devices as the sizes of its dims allow, if it has at least two.

    `batch`: how many of the first dims are a batch of matrices, as the layers of a stack; None if
    their sizes have to show it.
    """
    if shape == placement.shape:
        return (*placement.state_spec, *[None] * (len(shape) - len(placement.state_spec)))
    if batch is None:
        most = min(len(placement.shape), len(shape), len(LARGER) + 1) - 2
        batch = sum(
            1
            for _ in itertools.takewhile(
                lambda dim: shape[dim] == placement.shape[dim], range(most)
            )
        )
    slots = _slots(placement, batch)
    ways = {make_entry(way): _size(way, mesh) for way in _ways(placement, slots, mesh)}
    inner = shape[batch:]
    spec = spread(inner, ways) if len(inner) > 1 else (None,) * len(inner)
    return (*map(make_entry, slots), *spec)


def _local_update(
    member: _Member, own: list[int], held: list[tuple[int, ...]]
) -> Callable[..., Any]:
    """Of one device: its shards of a group's arrays to matrices that it owns, their update, and
    back to shards.

    Args:
      member: any of the group.
      own: which inputs are arrays of each member.
      held: the batch of matrices that each member has.
    """
    inputs, dims, counts = (
        member.region.inputs,
        len(member.batch),
        [math.prod(batch) for batch in held],
    )

    def matrices_of(shard: jax.Array, number: int, count: int) -> jax.Array:
        """[count, ...] of what one program takes, of a shard."""
        if member.stacked[number]:
            return shard.reshape(count, *[1] * dims, *shard.shape[dims:])
        return jnp.broadcast_to(shard, (count, *shard.shape))

    def shard_of(matrices: jax.Array, number: int, batch: tuple[int, ...]) -> jax.Array:
        """The opposite."""
        return (
            matrices.reshape(*batch, *matrices.shape[1 + dims :])
            if member.stacked[number]
            else matrices[0]
        )

    def local(arrays: list[list[jax.Array]], shared: list[jax.Array]) -> list[list[jax.Array]]:
        owned = []
        for number, shards in zip(own, arrays, strict=True):
            joined = jnp.concatenate(
                [
                    matrices_of(shard, number, count)
                    for shard, count in zip(shards, counts, strict=True)
                ]
            )
            owned.append(_to_owners(joined, _inner_spec(member, number), member.ways))
        taken, others = iter(owned), iter(shared)
        updated = member.batched(
            *[next(others) if x in member.region.shared else next(taken) for x in inputs]
        )
        results = []
        for number, matrices in enumerate(updated, len(inputs)):
            shards = _from_owners(matrices, _inner_spec(member, number), member.ways)
            each = [
                shards[end - count : end]
                for end, count in zip(itertools.accumulate(counts), counts, strict=True)
            ]
            results.append(
                [
                    shard_of(matrices, number, batch)
                    for matrices, batch in zip(each, held, strict=True)
                ]
            )
        return results

    return local


def _inner_spec(member: _Member, number: int) -> Spec:
    """How one matrix of an input or output is sharded, as the program of one matrix has it."""
    spec = member.specs[number]
    dims = len(member.batch)
    return (*[None] * dims, *spec[dims:]) if member.stacked[number] else spec


def _steps(spec: Spec, ways: tuple[Way, ...]) -> Iterator[tuple[Way, int | None]]:
    """Each way, with the dim of [matrices, ...] that it shards, or None."""
    dims = {entry_axes(entry): dim for dim, entry in enumerate(spec, 1) if entry is not None}
    return ((way, dims.get(way)) for way in ways)


def _to_owners(shards: jax.Array, spec: Spec, ways: tuple[Way, ...]) -> jax.Array:
    """The matrices that this device owns, of its shards of all, [matrices, ...].

    If there are fewer than devices, some are there twice: zeros might never converge.
    """
    places = math.prod(collectives.worker_count(way) for way in ways)
    missing = -shards.shape[0] % places
    if missing:
        shards = jnp.concatenate(
            [shards, *[shards] * (missing // shards.shape[0]), shards[: missing % shards.shape[0]]]
        )
    for way, dim in _steps(spec, ways):
        size = collectives.worker_count(way)
        if dim is None:
            each = shards.shape[0] // size
            shards = lax.dynamic_slice_in_dim(shards, collectives.worker_index(way) * each, each)
            continue
        rows = shards.reshape(size, -1, *shards.shape[1:])
        rows = jnp.moveaxis(collectives.all_to_all(rows, way), 0, dim)
        shards = rows.reshape(*rows.shape[:dim], size * rows.shape[dim + 1], *rows.shape[dim + 2 :])
    return shards


def _from_owners(matrices: jax.Array, spec: Spec, ways: tuple[Way, ...]) -> jax.Array:
    """The inverse of `_to_owners`."""
    for way, dim in reversed(list(_steps(spec, ways))):
        size = collectives.worker_count(way)
        if dim is None:
            matrices = collectives.all_gather(matrices, way, 0)
            continue
        parts = matrices.reshape(*matrices.shape[:dim], size, -1, *matrices.shape[dim + 1 :])
        rows = collectives.all_to_all(jnp.moveaxis(parts, dim, 0), way)
        matrices = rows.reshape(-1, *rows.shape[2:])
    return matrices
