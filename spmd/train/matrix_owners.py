"""`[optimizer] matrices = "owner"`: each parameter's matrix is updated on one device, its owner, for any optax transformation.

The update is traced. Its regions that need a matrix (`matrix_regions.py`) are grouped: those of equal programs become one `jax.vmap` over
all their matrices, inside a `jax.shard_map` in which a device has as many of them as any other. All-to-alls bring the shards of a matrix to
its owner, and back; all-gathers replace them where an array is replicated. The rest of the update stays on shards, and so does the state.
"""

import dataclasses
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
from spmd.jaxpr import closed_jaxprs, equations, inlined, inner_jaxprs
from spmd.layout.resolve import Placement, Resolved, spread
from spmd.specs import Spec, entry_axes, make_entry, pspec, spec_axes
from spmd.train.matrix_regions import DependentLayersError, Region, find_regions, layer_dim, needs_matrix, of_one_layer, variables
from spmd.tree import Tree, abstract, flatten, path_of
from spmd.wire import collectives
from spmd.xla import shard_map

ALL = 1 << 60  # equations: functions of jax.numpy are jits, and a matrix passes through many
Way = tuple[str, ...]  # mesh axes along which matrices are sent to their owners at once


@dataclasses.dataclass(frozen=True)
class Group:
    """Matrices that are updated by equal programs, as the notes of a run and plans show them.

    Attributes:
      shape: of one matrix.
      matrices: how many there are, layers of stacks counted.
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
    optimizer: optax.GradientTransformationExtraArgs, resolved: Resolved, mesh: Mesh | AbstractMesh, groups: list[Group] | None = None
) -> optax.GradientTransformationExtraArgs:
    """The optimizer, with the same state, whose `update` on global arrays computes with each matrix on one device.

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
        of_more, owners = _of_more_layers(optimizer, run, arguments, closed.jaxpr), _owners(arguments, resolved)
        try:
            jaxpr = _Program(closed.jaxpr, of_more, owners, resolved, mesh, groups).rewritten()
        except Exception as error:
            why = f'[optimizer] matrices = "owner": the optimizer\'s update cannot be rewritten: {type(error).__name__}: {error}'
            raise LayoutError(why, fix="leave it out: the optimizer trains the same, and XLA places its matrices.") from error
        results = jaxpr_as_fun(closed.replace(jaxpr=jaxpr))(*jax.tree.leaves(arguments))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return optax.GradientTransformationExtraArgs(optimizer.init, update)


def owner_notes(optimizer: optax.GradientTransformationExtraArgs, state: Any, resolved: Resolved, mesh: Mesh | AbstractMesh) -> list[str]:
    """What a person should know of `matrices = "owner"` under this layout; `state` is abstract."""
    if resolved.layout.optimizer.matrices != "owner" or mesh.size == 1:
        return []
    groups: list[Group] = []
    grads, opt = abstract((state.params, state.opt))
    update = update_by_owners(optimizer, resolved, mesh, groups).update
    traced = jax.make_jaxpr(lambda grads, opt: update(grads, opt, grads, value=jnp.float32(0)))(grads, opt)
    products = _products_outside(traced.jaxpr)
    left = "products of several parameters' arrays, in a loop over them, or next to what cannot be batched, are left to the compiler"
    left = f"{left}: {products}."
    if not groups:
        why = f"none has an owner: {left}" if products else "the optimizer multiplies and factorizes no matrices, so none has an owner."
        return [f'note: [optimizer] matrices = "owner": {why}']
    counts: dict[str, int] = {}
    for group in groups:
        counts |= {path: max(count, counts.get(path, 0)) for path, count in group.paths.items()}
    shapes = ", ".join(f"{group.matrices} of {list(group.shape)} (at most {group.most} on a device)" for group in groups)
    notes = [f"[optimizer] matrices: {sum(counts.values())} have owners: {shapes}."]
    if products:
        notes.append(f"note: [optimizer] matrices: {left}")
    alike = [sum(other.program == group.program for other in groups) > 1 and group.matrices < mesh.size for group in groups]
    if few := sum(alike):
        why = f"batches of fewer matrices than the mesh has devices, because scalars that equal programs use differ: {few}."
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
    """The parameter whose path is in the path of an optimizer's array: the last, and of several that end there the longest.

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
    of_state = [param_within(path_of(keys), resolved.placements) for keys, _ in jax.tree_util.tree_leaves_with_path(state)]
    return [*flatten(updates), *of_state, *flatten(params), *[None for _ in jax.tree.leaves(extra)]]


def _traced(run: Callable[..., Any], arguments: tuple[Tree, ...]) -> tuple[Any, Any]:
    """A function's program, which can be run inside and outside of `jax.shard_map`, since its equations know no mesh; and its results."""
    shapes = jax.tree.map(lambda x: _shaped(x, jnp.shape(x)), arguments)
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        return jax.make_jaxpr(run, return_shape=True)(*shapes)


def _shaped(like: Any, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """An abstract array like another one, in another shape."""
    kind = like if hasattr(like, "weak_type") else jax.typeof(like)
    return jax.ShapeDtypeStruct(shape, kind.dtype, weak_type=kind.weak_type)


def _of_more_layers(optimizer: Any, run: Callable[..., Any], arguments: tuple[Tree, ...], jaxpr: Any) -> Any:
    """The program of the same update if all stacks had one layer more; None without matrices, or if it cannot be traced."""
    updates, state, params, extra = arguments
    if not any(needs_matrix(equation) for equation in equations(jaxpr)):
        return None

    def longer(leaf: Any) -> jax.ShapeDtypeStruct:
        return _shaped(leaf, (leaf.shape[0] + 1, *leaf.shape[1:]) if leaf.ndim > 2 else leaf.shape)

    updates, params = jax.tree.map(longer, (updates, params))
    try:
        state = jax.tree.map(lambda leaf, other: _shaped(leaf, other.shape), state, jax.eval_shape(optimizer.init, params))
        return _traced(run, (updates, state, params, extra))[0].jaxpr
    except Exception:  # an optimizer of one's own, which may refuse other shapes in any way
        return None


@dataclasses.dataclass(frozen=True)
class _Member:
    """A region with the program of one matrix.

    Attributes:
      program: a jaxpr.
      shape: of the matrix.
      layers: of the stack, if each is a matrix of its own, and else None.
      stacked: for each input and output whether it has layers.
      slots: mesh axes that shard the layers.
      ways: how matrices are sent to owners, one after the other.
      specs: how inputs and outputs are sharded.
    """

    region: Region
    program: Any
    shape: tuple[int, ...]
    layers: int | None
    stacked: tuple[bool, ...]
    slots: Way
    ways: tuple[Way, ...]
    specs: tuple[Spec, ...]

    @property
    def key(self) -> tuple:
        """Equal for members of one group."""
        return self.kind, tuple(self.region.shared[x] for x in self.region.inputs if x in self.region.shared)

    @property
    def kind(self) -> tuple:
        """Equal for members of one group, and of groups that differ in shared inputs."""
        constants = tuple(id(x) for jaxpr in closed_jaxprs(self.program) for x in jaxpr.consts)
        kind = self.region.level, str(self.program), constants, self.layers is None
        return *kind, self.stacked, self.slots, self.ways, self.specs

    @property
    def batched(self) -> Callable[..., Any]:
        """The program of a batch of matrices."""
        dims = [None if x in self.region.shared else 0 for x in self.region.inputs]
        return jax.vmap(jaxpr_as_fun(ClosedJaxpr(self.program, ())), in_axes=dims)

    def can_be_batched(self) -> bool:
        shapes = [(() if x in self.region.shared else (1,), y.aval) for x, y in zip(self.region.inputs, self.program.invars, strict=True)]
        try:
            jax.eval_shape(self.batched, *[_shaped(kind, (*batch, *kind.shape)) for batch, kind in shapes])
        except Exception:  # a primitive, such as a callback, may refuse batches in any way
            return False
        return True

    def held(self, mesh: Mesh | AbstractMesh) -> int:
        """How many matrices the devices of one position along `slots` have."""
        return 1 if self.layers is None else self.layers // _size(self.slots, mesh)


@dataclasses.dataclass(frozen=True)
class _Program:
    """A jaxpr whose regions are to be computed by owners.

    Attributes:
      of_more: the same one of stacks with one layer more, or None.
      owners: the parameter of each input.
    """

    jaxpr: Any
    of_more: Any
    owners: Sequence[str | None]
    resolved: Resolved
    mesh: Mesh | AbstractMesh
    groups: list[Group] | None

    def rewritten(self) -> Any:
        """The jaxpr with one equation in place of the regions of a group."""
        found, known = inlined(self.jaxpr, ALL)
        outputs = [x if hasattr(x, "val") else known.get(x, x) for x in self.jaxpr.outvars]
        of_more = inlined(self.of_more, ALL)[0] if self.of_more is not None else None
        if of_more is not None and not _compares(found, of_more):
            of_more = None
        owners = {x: path for x, path in zip(self.jaxpr.invars, self.owners, strict=True) if path is not None}
        groups: dict[tuple, list[_Member]] = {}
        regions, owners = find_regions(found, owners, outputs)
        for region in regions:
            if all(x.aval.size for x in (*region.inputs, *region.outputs)):  # an empty array has no shards to send
                member = self._member(region, found, of_more)
                groups.setdefault(member.key, []).append(member)
        groups = {key: members for key, members in groups.items() if members[0].can_be_batched()}
        inside = {place for members in groups.values() for member in members for place in member.region.equations}
        kept = [self._branches(place, found, of_more, owners) for place in range(len(found)) if place not in inside]
        replaced = _in_order([*kept, *(self._equation(members) for members in groups.values())])
        return self.jaxpr.replace(eqns=replaced, outvars=outputs)

    def _branches(self, place: int, found: Sequence[Any], of_more: Sequence[Any] | None, owners: Mapping[Any, str]) -> Any:
        """An equation; the branches of a conditional, as `optax.MultiSteps` has, are rewritten."""
        equation = found[place]
        if equation.primitive.name != "cond" or not needs_matrix(equation):
            return equation
        paths = [owners.get(x) if not hasattr(x, "val") else None for x in equation.invars[1:]]
        branches = []
        for number, branch in enumerate(equation.params["branches"]):
            other = of_more[place].params["branches"][number].jaxpr if of_more is not None else None
            inside = dataclasses.replace(self, jaxpr=branch.jaxpr, of_more=other, owners=paths)
            branches.append(branch.replace(jaxpr=inside.rewritten()))
        return equation.replace(params={**equation.params, "branches": tuple(branches)})

    def _member(self, region: Region, found: Sequence[Any], of_more: Sequence[Any] | None) -> _Member:
        placement = self.resolved.placements[region.path]
        layers = placement.shape[0] if len(placement.shape) > 2 else None
        program, atoms = region.program(found, self.jaxpr), (*region.inputs, *region.outputs)
        stacked = (False,) * len(atoms)
        if layers is not None and of_more is not None:
            pairs = [pair for place in region.places for pair in _paired(found[place], of_more[place])]
            names = {x: y for x, y in pairs if not hasattr(x, "val")}
            named = {kind: tuple(names[x] for x in getattr(region, kind)) for kind in ("inputs", "outputs")}
            other = dataclasses.replace(region, **named).program(of_more, self.jaxpr)
            try:
                dims = [layer_dim(x, names[x], layers) for x in atoms]
                if {*dims} <= {0, None}:
                    program, stacked = of_one_layer(program, other, layers), tuple(dim == 0 for dim in dims)
                    layered = {x for x, dim in zip(atoms, dims, strict=True) if dim == 0}
                    region = dataclasses.replace(region, shared={x: y for x, y in region.shared.items() if x not in layered})
            except DependentLayersError:
                if region.without_sums is not None:  # which may be over all layers
                    return self._member(region.without_sums, found, of_more)
        layers = layers if any(stacked) else None
        slots = _slots(placement) if layers is not None else ()
        ways = _ways(placement, slots, self.mesh)
        specs = tuple(
            border_spec(x.aval.shape, placement, self.mesh, stacked=on) if on or layers is None else ()  # of all layers
            for x, on in zip(atoms, stacked, strict=True)
        )
        shape = placement.shape if layers is None else placement.shape[1:]
        return _Member(region, program, shape, layers, stacked, slots, ways, specs)

    def _equation(self, members: list[_Member]) -> Any:
        """One equation in place of regions."""
        first = members[0]
        own = [number for number, x in enumerate(first.region.inputs) if x not in first.region.shared]
        shared = [first.region.shared[x] for x in first.region.inputs if x in first.region.shared]
        arrays = [[member.region.inputs[number] for member in members] for number in own]
        if self.groups is not None:
            self.groups.append(_group(members, self.mesh))

        def update(arrays: list[list[jax.Array]], shared: list[jax.Array]) -> list[list[jax.Array]]:
            specs = [[pspec(first.specs[number])] * len(members) for number in own], [pspec(())] * len(shared)
            after = [[pspec(spec)] * len(members) for spec in first.specs[len(first.region.inputs) :]]
            local = _local_update(first, own, [member.held(self.mesh) for member in members])
            with jax.named_scope("matrix_owners"):
                return shard_map(local, mesh=self.mesh, in_specs=specs, out_specs=after, axis_names=self.mesh.axis_names)(arrays, shared)

        shapes = jax.tree.map(lambda x: _shaped(x.aval, x.aval.shape), (arrays, shared))
        [equation] = jax.make_jaxpr(jax.jit(update))(*shapes).eqns
        outputs = [member.region.outputs[number] for number in range(len(first.region.outputs)) for member in members]
        return equation.replace(invars=[*jax.tree.leaves(arrays), *shared], outvars=outputs)


def _paired(equation: Any, other: Any) -> Iterator[tuple[Any, Any]]:
    return zip((*equation.invars, *equation.outvars), (*other.invars, *other.outvars), strict=True)


def _compares(found: Sequence[Any], of_more: Sequence[Any]) -> bool:
    """Whether two programs have the same equations on the same variables, but for shapes."""
    numbers: tuple[dict, dict] = {}, {}
    if len(found) != len(of_more):
        return False
    for pair in zip(found, of_more, strict=True):
        wired = [
            [number.setdefault(x, len(number)) if not hasattr(x, "val") else None for x in (*equation.invars, *equation.outvars)]
            for number, equation in zip(numbers, pair, strict=True)
        ]
        if pair[0].primitive is not pair[1].primitive or wired[0] != wired[1]:
            return False
    return True


def _in_order(found: list[Any]) -> list[Any]:
    """Equations in an order in which each follows those that it uses."""
    made_at = {x: number for number, equation in enumerate(found) for x in equation.outvars}
    needed = {number: {made_at[x] for x in variables(equation.invars) if x in made_at} for number, equation in enumerate(found)}
    return [found[number] for number in graphlib.TopologicalSorter(needed).static_order()]


def _group(members: list[_Member], mesh: Mesh | AbstractMesh) -> Group:
    first = members[0]
    paths = {member.region.path: member.layers or 1 for member in members}
    places = math.prod(_size(way, mesh) for way in first.ways)
    most = -(-sum(member.held(mesh) for member in members) // places)
    return Group(first.shape, sum(member.layers or 1 for member in members), most, paths, first.kind)


# where a matrix goes ----------------------------------------------------------------------------------------------------


def _slots(placement: Placement) -> Way:
    """The mesh axes that shard the layers of a stack."""
    return entry_axes(placement.state_spec[0]) if placement.state_spec else ()


def _ways(placement: Placement, slots: Way, mesh: Mesh | AbstractMesh) -> tuple[Way, ...]:
    """The mesh axes along which the parameter's matrices are sent to owners: those that shard a dim together, then all others."""
    sharded = [entry_axes(entry) for entry in placement.state_spec if entry_axes(entry) != slots]
    used = {*slots, *spec_axes(placement.state_spec)}
    ways = (*sharded, *((axis,) for axis in mesh.axis_names if axis not in used))
    return tuple(way for way in ways if _size(way, mesh) > 1)


def _size(way: Way, mesh: Mesh | AbstractMesh) -> int:
    return math.prod(mesh.shape[axis] for axis in way)


def border_spec(shape: tuple[int, ...], placement: Placement, mesh: Mesh | AbstractMesh, *, stacked: bool | None = None) -> Spec:
    """How an array that belongs to a parameter is sharded outside of regions: as the parameter's moments, or over as many devices as the
    sizes of its dims allow, if it has at least two.

    `stacked`: whether dim 0 are the layers of a stack; None if its size has to show it.
    """
    if shape == placement.shape:
        return (*placement.state_spec, *[None] * (len(shape) - len(placement.state_spec)))
    if stacked is None:
        stacked = len(placement.shape) > 2 and len(shape) > 2 and shape[0] == placement.shape[0]
    slots = _slots(placement) if stacked else ()
    ways = {make_entry(way): _size(way, mesh) for way in _ways(placement, slots, mesh)}
    inner = shape[stacked:]
    spec = spread(inner, ways) if len(inner) > 1 else (None,) * len(inner)
    return (make_entry(slots), *spec) if stacked else spec


def _local_update(member: _Member, own: list[int], held: list[int]) -> Callable[..., Any]:
    """Of one device: its shards of a group's arrays to matrices that it owns, their update, and back to shards.

    Args:
      member: any of the group.
      own: which inputs are arrays of each member.
      held: how many matrices each member has.
    """
    inputs = member.region.inputs

    def matrices_of(shard: jax.Array, number: int, count: int) -> jax.Array:
        """[count, ...] of what one program takes, of a shard."""
        return shard[:, None] if member.stacked[number] else jnp.broadcast_to(shard, (count, *shard.shape))

    def local(arrays: list[list[jax.Array]], shared: list[jax.Array]) -> list[list[jax.Array]]:
        owned = []
        for number, shards in zip(own, arrays, strict=True):
            joined = jnp.concatenate([matrices_of(shard, number, count) for shard, count in zip(shards, held, strict=True)])
            owned.append(_to_owners(joined, _inner_spec(member, number), member.ways))
        taken, others = iter(owned), iter(shared)
        updated = member.batched(*[next(others) if x in member.region.shared else next(taken) for x in inputs])
        results = []
        for number, matrices in enumerate(updated, len(inputs)):
            shards = _from_owners(matrices, _inner_spec(member, number), member.ways)
            each = [shards[end - count : end] for end, count in zip(itertools.accumulate(held), held, strict=True)]
            results.append([shard[:, 0] if member.stacked[number] else shard[0] for shard in each])
        return results

    return local


def _inner_spec(member: _Member, number: int) -> Spec:
    """How one matrix of an input or output is sharded, as the program of one matrix has it."""
    spec = member.specs[number]
    return (None, *spec[1:]) if member.stacked[number] else spec


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
        shards = jnp.concatenate([shards, *[shards] * (missing // shards.shape[0]), shards[: missing % shards.shape[0]]])
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
