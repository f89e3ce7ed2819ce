"""`[optimizer] matrices = "owner"`: each parameter's matrix is updated on one device, its owner,
for any optax transformation.

The update is traced. Its regions that need a matrix (`matrix_regions.py`) are grouped: those of
equal programs become one `jax.vmap` over all their matrices, inside a `jax.shard_map` in which a
device has as many of them as any other. All-to-alls bring the shards of a matrix to its owner, and
back; all-gathers replace them where an array is replicated. The rest of the update stays on shards,
and so does the state.

*Unmeasured*: no GPU has timed an update; what is sent, and which device multiplies what, is in
programs that were compiled for GPUs (`benchmarks/matrix_optimizers.py`).
"""

import collections
import contextlib
import dataclasses
import graphlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AbstractMesh, Mesh

from spmd.base.specs import pspec
from spmd.base.tree import Tree, abstract, flatten, path_of
from spmd.base.xla import shard_map
from spmd.errors import LayoutError
from spmd.jaxpr.inner_programs import inner_jaxprs, opened, with_programs
from spmd.jaxpr.programs import equations, inlined, is_literal, variables
from spmd.layout.resolve import Resolved
from spmd.train.matrix_regions import (
    DependentLayersError,
    Region,
    find_regions,
    layer_dim,
    needs_matrix,
    of_one_layer,
)
from spmd.train.owned_matrices import (
    Member,
    axes_of_batch,
    border_spec,
    device_count,
    local_update,
    routes_to_owners,
    shaped_like,
)

# equations of a program to inline: functions of jax.numpy are jits, and a matrix passes many
ALL = 1 << 60
# entries by which batch dims are larger: layers; matrices of each layer, such as experts; both
LARGER = (1,), (0, 1), (1, 1)


@dataclasses.dataclass(frozen=True)
class Group:
    """Matrices that are updated by equal programs, as the notes of a run and plans show them.

    Attributes:
      shape: the shape of one matrix.
      matrices: the number of matrices, each layer of a stack, and each expert of a layer, counted.
      most: the number that the devices with the most own.
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
    """Return the optimizer, with the same state, whose `update` on global arrays computes with each
    matrix on one device.

    Args:
      groups: a list to which the groups of matrices are appended when `update` is traced.

    Raises:
      LayoutError: by `update`, whose program cannot be rewritten.
    """
    if mesh.size == 1:
        return optimizer

    def update(updates: Tree, state: Any, params: Tree = None, **extra: Any) -> tuple[Tree, Any]:
        arguments = updates, state, params, extra
        closed, shapes = _traced(optimizer, arguments)
        larger = _traced_on_larger_batches(optimizer, arguments, closed.jaxpr)
        owners = _owners(arguments, resolved)
        try:
            program = _Program(closed.jaxpr, larger, owners, resolved, mesh, groups)
            jaxpr = program.inlined().rewritten()
        except Exception as error:
            # an unknown equation of another version of JAX may fail in any way
            raise LayoutError(
                '[optimizer] matrices = "owner": the optimizer\'s update cannot be rewritten: '
                f"{type(error).__name__}: {error}",
                fix="leave it out: the optimizer trains the same, and XLA places its matrices.",
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
    """Return notes on `matrices = "owner"` under a layout.

    Args:
      params: shapes of the parameters, as the optimizer sees them.
      opt: shapes of the optimizer's state.
    """
    if not resolved.layout.optimizer.owners or mesh.size == 1:
        return []
    groups: list[Group] = []
    grads, opt = abstract((params, opt))
    update = update_by_owners(optimizer, resolved, mesh, groups).update

    def step(grads: Tree, opt: Any) -> tuple[Tree, Any]:
        return update(grads, opt, grads, value=jnp.float32(0))

    products = _products_outside(jax.make_jaxpr(step)(grads, opt).jaxpr)
    outside = (
        "products of several parameters' arrays, in a loop over them, or next to what cannot be "
        f"batched, are left to the compiler: {products}."
    )
    if not groups:
        why = "the optimizer multiplies and factorizes no matrices, so none has an owner."
        if products:
            why = f"none has an owner: {outside}"
        return [f'note: [optimizer] matrices = "owner": {why}']
    counts: dict[str, int] = {}
    shapes = []
    for group in groups:
        shape = f"{group.matrices} of {list(group.shape)}"
        shapes.append(f"{shape} (at most {group.most} on a device)")
        # several groups may have matrices of a parameter: several regions of its update
        for path, count in group.paths.items():
            counts[path] = max(count, counts.get(path, 0))
    notes = [f"[optimizer] matrices: {sum(counts.values())} have owners: {', '.join(shapes)}."]
    if products:
        notes.append(f"note: [optimizer] matrices: {outside}")
    program_counts = collections.Counter(group.program for group in groups)
    small = [group for group in groups if group.matrices < mesh.size]
    divided = sum(program_counts[group.program] > 1 for group in small)
    if divided:
        notes.append(
            "note: [optimizer] matrices: batches of fewer matrices than the mesh has devices, "
            f"because scalars that equal programs use differ: {divided}."
        )
    return notes


def _products_outside(jaxpr: Any) -> int:
    """Return how many products and factorizations of matrices owners do not compute."""
    count = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name != "shard_map" and needs_matrix(equation):
            inner = list(inner_jaxprs(equation))
            if inner:
                count += sum(map(_products_outside, inner))
            else:
                count += 1
    return count


def param_within(path: str, placements: Mapping[str, Any]) -> str | None:
    """Return the parameter whose path is in the path of an optimizer's array: the last, and of
    several that end there the longest.

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
    """Return the parameter of every leaf of an update's arguments."""
    updates, state, params, extra = arguments
    owners: list[str | None] = list(flatten(updates))
    for keys, _ in jax.tree_util.tree_leaves_with_path(state):
        owners.append(param_within(path_of(keys), resolved.placements))
    owners += flatten(params)
    return owners + [None] * len(jax.tree.leaves(extra))


def _traced(optimizer: Any, arguments: tuple[Tree, ...]) -> tuple[Any, Any]:
    """Return the program of an optimizer's update, and its results."""

    def update(updates: Tree, state: Any, params: Tree, extra: dict[str, Any]) -> Any:
        return optimizer.update(updates, state, params, **extra)

    shapes = jax.tree.map(lambda x: shaped_like(x, jnp.shape(x)), arguments)
    # Equations that name no mesh can be part of a program inside of `jax.shard_map`, and of one
    # outside.
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        return jax.make_jaxpr(update, return_shape=True)(*shapes)


def _traced_on_larger_batches(
    optimizer: Any, arguments: tuple[Tree, ...], jaxpr: Any
) -> tuple[Any, ...]:
    """Return the programs of the same update if dims that may be batches had one entry more:
    `LARGER` as far as there are such dims, and as it can be traced.
    """
    updates, state, params, extra = arguments
    if not any(map(needs_matrix, equations(jaxpr))):
        return ()

    def traced(more: tuple[int, ...]) -> Any:
        def larger(leaf: Any) -> jax.ShapeDtypeStruct:
            shape = list(leaf.shape)
            for dim in range(min(len(more), leaf.ndim - 2)):
                shape[dim] += more[dim]
            return shaped_like(leaf, tuple(shape))

        grads, weights = jax.tree.map(larger, (updates, params))
        shapes = jax.eval_shape(optimizer.init, weights)
        opt = jax.tree.map(lambda leaf, other: shaped_like(leaf, other.shape), state, shapes)
        closed, _ = _traced(optimizer, (grads, opt, weights, extra))
        return closed.jaxpr

    most_dims = max((leaf.ndim for leaf in jax.tree.leaves(updates)), default=0)
    programs: list[Any] = []
    # a user's optimizer may refuse other shapes in any way
    with contextlib.suppress(Exception):
        if most_dims > 2:
            programs.append(traced(LARGER[0]))
        if most_dims > 3:
            programs += [traced(more) for more in LARGER[1:]]
    return tuple(programs)


@dataclasses.dataclass(frozen=True)
class _Program:
    """A jaxpr whose regions are to be computed by owners.

    Attributes:
      jaxpr: the jaxpr.
      larger: the same jaxpr of larger batches, as `_traced_on_larger_batches` returns them.
      owners: the parameter of each input.
    """

    jaxpr: Any
    larger: tuple[Any, ...]
    owners: Sequence[str | None]
    resolved: Resolved
    mesh: Mesh | AbstractMesh
    groups: list[Group] | None

    def inlined(self) -> "_Program":
        """Return the same program without inner jits, and with those larger ones that have the same
        equations.
        """
        jaxpr = _without_jits(self.jaxpr)
        larger = []
        for other in map(_without_jits, self.larger):
            if not _correspond(jaxpr.eqns, other.eqns):
                break
            larger.append(other)
        return dataclasses.replace(self, jaxpr=jaxpr, larger=tuple(larger))

    def rewritten(self) -> Any:
        """Return the jaxpr, which has no inner jits, with one equation in place of the regions of a
        group.
        """
        equations = self.jaxpr.eqns
        inputs = zip(self.jaxpr.invars, self.owners, strict=True)
        owners = {variable: path for variable, path in inputs if path is not None}
        groups: dict[tuple, list[Member]] = {}
        regions, owners = find_regions(equations, owners, self.jaxpr.outvars)
        for region in regions:
            # an empty array has no shards to send
            if all(x.aval.size for x in (*region.inputs, *region.outputs)):
                member = self._member(region)
                groups.setdefault(member.key, []).append(member)
        by_owners = []
        replaced: set[int] = set()
        for members in groups.values():
            if members[0].can_be_batched():
                by_owners.append(self._equation(members))
                for member in members:
                    replaced.update(member.region.equations)
        others = [place for place in range(len(equations)) if place not in replaced]
        unchanged = [self._branches(place, owners) for place in others]
        return self.jaxpr.replace(eqns=_in_order([*unchanged, *by_owners]))

    def _branches(self, place: int, owners: Mapping[Any, str]) -> Any:
        """Return an equation; the branches of a conditional, as `optax.MultiSteps` has, are
        rewritten.
        """
        equation = self.jaxpr.eqns[place]
        if equation.primitive.name != "cond" or not needs_matrix(equation):
            return equation
        paths = [None if is_literal(x) else owners.get(x) for x in equation.invars[1:]]

        def rewritten(_: str, branch: Any, *of_larger: Any) -> Any:
            others = tuple(map(opened, of_larger))
            inside = dataclasses.replace(self, jaxpr=branch.jaxpr, larger=others, owners=paths)
            return inside.inlined().rewritten()

        return with_programs(equation, rewritten, *(other.eqns[place] for other in self.larger))

    def _member(self, region: Region) -> Member:
        """Return a region with the program of one matrix."""
        placement = self.resolved.placements[region.path]
        try:
            program, batch, stacked = self._of_one_matrix(region)
        except DependentLayersError:
            # sums may be over all layers
            if region.without_sums is not None:
                return self._member(region.without_sums)
            program, batch, stacked = self._as_one_matrix(region)
        atoms = (*region.inputs, *region.outputs)
        layered = {atom for atom, is_stacked in zip(atoms, stacked, strict=True) if is_stacked}
        shared = {x: first for x, first in region.shared.items() if x not in layered}
        dims = len(batch)
        specs = []
        for atom, is_stacked in zip(atoms, stacked, strict=True):
            if is_stacked or not batch:
                specs.append(border_spec(atom.aval.shape, placement, self.mesh, batch=dims))
            else:  # an array that all layers share
                specs.append(())
        return Member(
            region=dataclasses.replace(region, shared=shared),
            program=program,
            shape=placement.shape[dims:],
            batch=batch,
            stacked=stacked,
            batch_axes=axes_of_batch(placement, dims),
            routes=routes_to_owners(placement, dims, self.mesh),
            specs=tuple(specs),
        )

    def _of_one_matrix(self, region: Region) -> tuple[Any, tuple[int, ...], tuple[bool, ...]]:
        """Return the program of one matrix of a region, the batch of matrices, and which inputs and
        outputs have it; of as many batch dims as are computed independently of each other.

        Raises:
          DependentLayersError: a layer of the results depends on other layers.
        """
        shape = self.resolved.placements[region.path].shape
        others = [self._larger(region, jaxpr) for jaxpr in self.larger]
        if not others or len(shape) < 3:
            return self._as_one_matrix(region)
        atoms = (*region.inputs, *region.outputs)
        layers = shape[0]
        deeper, names = others[0]
        program = of_one_layer(region.program(self.jaxpr), deeper, layers)
        batched = _batched(atoms, names, 0, layers)
        if not any(batched):
            return self._as_one_matrix(region)
        if len(others) == len(LARGER) and len(shape) > 3:
            _, (wider, names), (both, _) = others
            # each layer is one matrix if its matrices depend on each other
            with contextlib.suppress(DependentLayersError):
                if _batched(atoms, names, 1, shape[1]) == batched:
                    of_layer = of_one_layer(wider, both, layers)
                    return of_one_layer(program, of_layer, shape[1]), shape[:2], batched
        return program, shape[:1], batched

    def _as_one_matrix(self, region: Region) -> tuple[Any, tuple[int, ...], tuple[bool, ...]]:
        """Return the program of a region as `_of_one_matrix` does, with no batch."""
        count = len(region.inputs) + len(region.outputs)
        return region.program(self.jaxpr), (), (False,) * count

    def _larger(self, region: Region, larger: Any) -> tuple[Any, dict[Any, Any]]:
        """Return the program of a region in that of larger batches, and its variables there by
        those here.
        """
        names = {}
        for place in region.places:
            equation, twins = self.jaxpr.eqns[place], larger.eqns[place]
            for atom, twin in zip(_atoms(equation), _atoms(twins), strict=True):
                if not is_literal(atom):
                    names[atom] = twin
        inputs = tuple(names[variable] for variable in region.inputs)
        outputs = tuple(names[variable] for variable in region.outputs)
        of_larger = dataclasses.replace(region, inputs=inputs, outputs=outputs)
        return of_larger.program(larger), names

    def _equation(self, members: list[Member]) -> Any:
        """Return one equation in place of the regions of a group."""
        first = members[0]
        region = first.region
        arrays_of_each = [n for n, x in enumerate(region.inputs) if x not in region.shared]
        shared = [region.shared[x] for x in region.inputs if x in region.shared]
        arrays = []
        for number in arrays_of_each:
            arrays.append([member.region.inputs[number] for member in members])
        if self.groups is not None:
            self.groups.append(_group(members, self.mesh))
        batches = [member.local_batch(self.mesh) for member in members]
        out_specs = [pspec(spec) for spec in first.specs[len(region.inputs) :]]
        array_specs = [[pspec(first.specs[n])] * len(members) for n in arrays_of_each]

        def update(arrays: list[list[jax.Array]], shared: list[jax.Array]) -> list[list[jax.Array]]:
            with jax.named_scope("matrix_owners"):
                return shard_map(
                    local_update(first, arrays_of_each, batches),
                    mesh=self.mesh,
                    in_specs=(array_specs, [pspec(())] * len(shared)),
                    out_specs=[[spec] * len(members) for spec in out_specs],
                    # All axes, so that XLA's partitioner can add no collective inside.
                    axis_names=self.mesh.axis_names,
                )(arrays, shared)

        shapes = jax.tree.map(lambda x: shaped_like(x.aval, x.aval.shape), (arrays, shared))
        # a jit is one equation, whose inputs and outputs can be other variables
        [equation] = jax.make_jaxpr(jax.jit(update))(*shapes).eqns
        outputs = []
        for number in range(len(region.outputs)):
            outputs += [member.region.outputs[number] for member in members]
        return equation.replace(invars=[*jax.tree.leaves(arrays), *shared], outvars=outputs)


def _batched(
    atoms: Sequence[Any], names: Mapping[Any, Any], dim: int, size: int
) -> tuple[bool, ...]:
    """Return which variables have a batch of `size` in this dim.

    Raises:
      DependentLayersError: one has it in another dim.
    """
    dims = [layer_dim(atom, names[atom], size) for atom in atoms]
    if not {*dims} <= {dim, None}:
        raise DependentLayersError
    return tuple(each == dim for each in dims)


def _without_jits(jaxpr: Any) -> Any:
    """Return a jaxpr with the equations of its inner jits in place of their calls."""
    equations, outputs = inlined(jaxpr, ALL)
    return jaxpr.replace(eqns=equations, outvars=outputs)


def _atoms(equation: Any) -> tuple[Any, ...]:
    """Return the inputs and outputs of an equation."""
    return (*equation.invars, *equation.outvars)


def _correspond(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Return whether two programs have the same equations on the same variables, but for shapes."""
    if len(first) != len(second):
        return False
    # of variables, in the order in which they appear
    numbers: dict[Any, int] = {}
    other_numbers: dict[Any, int] = {}

    def wiring(equation: Any, numbers: dict[Any, int]) -> list[int | None]:
        places: list[int | None] = []
        for atom in _atoms(equation):
            places.append(None if is_literal(atom) else numbers.setdefault(atom, len(numbers)))
        return places

    for one, other in zip(first, second, strict=True):
        if one.primitive is not other.primitive:
            return False
        if wiring(one, numbers) != wiring(other, other_numbers):
            return False
    return True


def _in_order(equations: list[Any]) -> list[Any]:
    """Return equations in an order in which each follows those that it uses."""
    made_at: dict[Any, int] = {}
    for place, equation in enumerate(equations):
        made_at |= dict.fromkeys(equation.outvars, place)
    needed = {}
    for place, equation in enumerate(equations):
        needed[place] = {made_at[x] for x in variables(equation.invars) if x in made_at}
    return [equations[place] for place in graphlib.TopologicalSorter(needed).static_order()]


def _group(members: list[Member], mesh: Mesh | AbstractMesh) -> Group:
    first = members[0]
    paths = {member.region.path: math.prod(member.batch) for member in members}
    owners = math.prod(device_count(axes, mesh) for axes in first.routes)
    on_each_slot = sum(math.prod(member.local_batch(mesh)) for member in members)
    return Group(first.shape, sum(paths.values()), -(-on_each_slot // owners), paths, first.kind)
