"""The spec of every array, from a layout and the shapes of a model. Pure functions, no devices."""

import dataclasses
import functools
import math
import types
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax

from spmd.base.path_match import matcher
from spmd.base.specs import Entry, Spec, entry_axes, make_entry, spec_axes
from spmd.base.tree import nbytes
from spmd.layout.gradients import GradientRule, Gradients
from spmd.layout.precision import Precision
from spmd.layout.schema import Layout, Rule
from spmd.mesh import MeshSpec

# A parameter's logical axis names, one or several per dim; dims after the last have none.
Names = tuple[str | tuple[str, ...] | None, ...]


@dataclasses.dataclass(frozen=True)
class Placement:
    """The spec of a parameter, `state_spec` of its optimizer state, and what chose them."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    spec: Spec
    state_spec: Spec
    chosen_by: str

    def bytes_per_device(self, mesh: MeshSpec) -> int:
        """Return bytes of this parameter on one device."""
        return self.nbytes // num_shards(self.spec, mesh)

    def copies(self, mesh: MeshSpec) -> int:
        """Return the number of devices that hold each byte: 1 means no replication."""
        return mesh.size // num_shards(self.spec, mesh)


@dataclasses.dataclass(frozen=True)
class Resolved:
    """A layout applied to a model on a mesh: one `Placement` per parameter that is trained, by
    path.

    `frozen` are the placements of the arrays in which all other parameters are kept, by path:
    `.../codes` and `.../scales` for a quantized parameter.
    """

    layout: Layout
    mesh: MeshSpec
    placements: dict[str, Placement]
    frozen: dict[str, Placement] = dataclasses.field(default_factory=dict)

    @property
    def all_placements(self) -> dict[str, Placement]:
        """The placements of all parameters."""
        return self.placements | self.frozen

    def placement(self, path: str) -> Placement:
        """Return the placement of a parameter, or of an array of a frozen one."""
        if path in self.placements:
            return self.placements[path]
        return self.frozen[path]

    @property
    def data_axes(self) -> tuple[str, ...]:
        """Mesh axes that the batch's dim 0 is split over."""
        return self.layout.data_axes()

    @property
    def workers(self) -> int:
        """Positions along the data axes."""
        return math.prod(self.mesh.sizes[axis] for axis in self.data_axes)

    # A layout's patterns are compiled once, not for every leaf of every batch. The value is kept in
    # __dict__, which a frozen dataclass leaves writable.
    @functools.cached_property
    def _batch_rules(self) -> Callable[[str], list[int]]:
        return rule_matcher(self.layout.batch.rules)

    def batch_spec(self, path: str) -> Spec:
        """Return the spec of one leaf of a batch: its rule's, or the batch's default."""
        claimed = self._batch_rules(path)
        if claimed:
            return self.layout.batch.rules[claimed[0]].spec
        return self.layout.batch.spec

    def idle_axes(self) -> tuple[str, ...]:
        """Return mesh axes of size > 1 along which every device repeats the same work, because
        neither specs nor tables use them.
        """
        layout = self.layout
        # `[experts] axis` is not here: it does nothing unless parameters are sharded over it.
        used = {layout.pipeline.axis, layout.sequence.axis, *spec_axes(layout.batch.spec)}
        for place in self.all_placements.values():
            used.update(spec_axes(place.spec), spec_axes(place.state_spec))
        for rule in (*layout.batch.rules, *layout.activations):
            used.update(spec_axes(rule.spec))
        return tuple(axis for axis, size in self.mesh.axes if size > 1 and axis not in used)

    def mesh_without(self, idle: Sequence[str]) -> MeshSpec:
        """Return the mesh with the devices of idle axes on the innermost data axis. Idle axes that
        [mesh] or [axes] name stay, of size 1.
        """
        named = set(dict(self.layout.mesh))
        for _, entry in self.layout.axes:
            named.update(entry_axes(entry))
        target = self.data_axes[-1]
        sizes = self.mesh.sizes
        new_sizes = {}
        for axis, size in sizes.items():
            if axis not in idle:
                new_sizes[axis] = size
            elif axis in named:
                new_sizes[axis] = 1
        new_sizes[target] = math.prod(sizes[axis] for axis in (*idle, target))
        return MeshSpec(tuple(new_sizes.items()))


def num_shards(spec: Spec, mesh: MeshSpec) -> int:
    """Return the number of shards into which the spec splits an array."""
    return math.prod(mesh.sizes[axis] for axis in spec_axes(spec))


def rule_matcher(
    rules: tuple[Rule, ...] | tuple[GradientRule, ...] | tuple[Precision, ...],
) -> Callable[[str], list[int]]:
    """Return a function that lists the indices of the rules that match a path.

    >>> rule_matcher((Rule("**/kernel", ("data",), ("head/*",)), Rule("*/kernel", ())))(
    ...     "head/kernel"
    ... )
    [1]
    """
    # Indices of rules by their patterns.
    by_path: dict[str, list[int]] = {}
    by_except: dict[str, list[int]] = {}
    for index, rule in enumerate(rules):
        by_path.setdefault(rule.path, []).append(index)
        for pattern in rule.except_:
            by_except.setdefault(pattern, []).append(index)
    matching = matcher([*by_path, *by_except])

    def matching_rules(path: str) -> list[int]:
        matched = set()
        excepted = set()
        for pattern in matching(path):
            matched.update(by_path.get(pattern, ()))
            excepted.update(by_except.get(pattern, ()))
        return sorted(matched - excepted)

    return matching_rules


def codec_rules(gradients: Gradients, paths: Iterable[str]) -> dict[str, Gradients | GradientRule]:
    """Return, by path, the source of the codec of a parameter's gradient, and of its options: the
    matching rule, or `[gradients]` itself.
    """
    matching_rules = rule_matcher(gradients.rules)
    sources: dict[str, Gradients | GradientRule] = {}
    for path in paths:
        claimed = matching_rules(path)
        sources[path] = gradients
        if claimed:
            sources[path] = gradients.rules[claimed[0]]
    return sources


def rule_name(rules: tuple[Rule, ...] | tuple[GradientRule, ...], index: int) -> str:
    """Return the name of a rule in tables and errors: its number, and its line if it came from a
    file.
    """
    line = rules[index].line
    if line:
        return f"rule {index + 1}, line {line}"
    return f"rule {index + 1}"


def resolve(
    layout: Layout,
    params: Mapping[str, jax.ShapeDtypeStruct],
    names: Mapping[str, Names],
    mesh: MeshSpec,
    stacks: Mapping[str, int] = types.MappingProxyType({}),
) -> Resolved:
    """Return the placement of every parameter, for a layout that passed the checks of `fit_layout`.

    The order is: a path rule; else the `[axes]` of the layout, when the parameter carries logical
    axis names and the layout has any; else the default. For a stacked parameter these apply to one
    layer; dim 0, the layers, is sharded over the axis of `[pipeline]`, if any.

    Args:
      params: shape and dtype by path; of one layer for stacked parameters.
      names: logical axis names by path, for parameters that carry them.
      stacks: the number of layers, by path, of stacked parameters.
    """
    placements = {}
    matching_rules = rule_matcher(layout.params)
    for path, leaf in params.items():
        spec, chosen_by = choose(layout, matching_rules(path), leaf.shape, names.get(path), mesh)
        state_spec = shard_largest_dim(spec, leaf.shape, layout.optimizer.shard, mesh)
        shape = leaf.shape
        size = nbytes(leaf)
        if path in stacks:
            axis = layout.stage_axis
            spec = (axis, *spec)
            state_spec = (axis, *state_spec)
            shape = (stacks[path], *shape)
            size = stacks[path] * size
            if axis:
                chosen_by += f'; layers over "{axis}"'
        placements[path] = Placement(
            path, shape, str(leaf.dtype), size, spec, state_spec, chosen_by
        )
    return Resolved(layout, mesh, placements)


def one_layer(
    params: Mapping[str, jax.ShapeDtypeStruct], stacks: Mapping[str, int]
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shapes and dtypes by path; for a stack's parameters those of one layer."""
    return {
        # True is 1: dim 0 of a stacked parameter is its layers.
        path: jax.ShapeDtypeStruct(leaf.shape[path in stacks :], leaf.dtype)
        for path, leaf in params.items()
    }


def choose(
    layout: Layout,
    claimed: Sequence[int],
    shape: tuple[int, ...],
    names: Names | None,
    mesh: MeshSpec,
) -> tuple[Spec, str]:
    """Return the spec of one parameter and the name of what chose it; `claimed`: indices of the
    rules that match it.
    """
    if claimed:
        return layout.params[claimed[0]].spec, rule_name(layout.params, claimed[0])
    axes = dict(layout.axes)
    if names and axes:
        return named_spec(names, axes), f"axes ({names_text(names)})"
    kind, _, axis = layout.default.params.partition(":")
    spec = ()
    chosen_by = default_origin(layout)
    if kind == "shard":
        spec = shard_largest_dim((), shape, axis, mesh)
        if not spec:
            chosen_by += f", but no dim divides by {mesh.sizes[axis]}"
    return spec, chosen_by


def default_origin(layout: Layout) -> str:
    """Return `Placement.chosen_by` of parameters to which the layout's default applies."""
    return f"default {layout.default.params}"


def named_spec(names: Names, axes: Mapping[str, Entry]) -> Spec:
    """Return the spec that `[axes]` makes of logical axis names.

    >>> named_spec(("mlp", None, ("heads", "kv")), {"mlp": "model", "heads": "data", "kv": None})
    ('model', None, 'data')
    """
    spec = []
    for entry in names:
        mesh_axes = ()
        for name in entry_axes(entry):
            mesh_axes += entry_axes(axes.get(name))
        spec.append(make_entry(mesh_axes))
    return tuple(spec)


def each_name(names: Names) -> tuple[str, ...]:
    """Return all logical axis names, in order."""
    return tuple(name for entry in names for name in entry_axes(entry))


def names_text(names: Names) -> str:
    """Return logical axis names as tables and errors show them."""
    return ", ".join(" and ".join(entry_axes(entry)) or "-" for entry in names)


def shard_largest_dim(spec: Spec, shape: tuple[int, ...], axis: str | None, mesh: MeshSpec) -> Spec:
    """Return the spec with `axis` added to the largest unsharded dim that it divides; unchanged if
    there is none, or if the axis is in use.

    >>> shard_largest_dim((None, "model"), (512, 64), "data", MeshSpec.parse("data=4,model=2"))
    ('data', 'model')
    """
    if axis is None or axis in spec_axes(spec):
        return spec
    full: list[Entry] = [*spec, *[None] * (len(shape) - len(spec))]
    free = [
        dim
        for dim, size in enumerate(shape)
        # Every axis divides an empty dim, and there would be nothing on any device.
        if not entry_axes(full[dim]) and size and size % mesh.sizes[axis] == 0
    ]
    if not free:
        return spec
    full[max(free, key=lambda dim: shape[dim])] = axis
    return tuple(full)


def spread(shape: tuple[int, ...], sizes: Mapping[Entry, int]) -> Spec:
    """Return a spec over as many of these entries as there are dims for: each in turn on the
    largest dim without one that its size divides.

    >>> spread((8, 6, 4), {"data": 4, "model": 2}), spread((3, 4), {"data": 8, "model": 2})
    (('data', 'model', None), (None, 'model'))
    """
    spec: list[Entry] = [None] * len(shape)
    for entry, size in sizes.items():
        free = [
            dim
            for dim, length in enumerate(shape)
            if spec[dim] is None and length and length % size == 0
        ]
        if size > 1 and free:
            spec[max(free, key=lambda dim: shape[dim])] = entry
    return tuple(spec)


def keep_frozen(
    resolved: Resolved, frozen: Mapping[str, Mapping[str, jax.ShapeDtypeStruct]]
) -> Resolved:
    """Return `resolved` with the placements of parameters that are not trained as `frozen`.

    Args:
      frozen: by path of the parameter, the arrays in which it is kept, by their paths.
    """
    trained = dict(resolved.placements)
    frozen_placements = {}
    for path, arrays in frozen.items():
        place = trained.pop(path)
        for name, leaf in arrays.items():
            spec = _frozen_spec(place.spec, leaf.shape, resolved.mesh)
            # What is not trained has no optimizer state, so both specs are the same.
            frozen_placements[name] = Placement(
                name, leaf.shape, str(leaf.dtype), nbytes(leaf), spec, spec, place.chosen_by
            )
    return dataclasses.replace(resolved, placements=trained, frozen=frozen_placements)


def _frozen_spec(spec: Spec, shape: tuple[int, ...], mesh: MeshSpec) -> Spec:
    """Return the spec of a parameter for codes or scales of it: one of the last two dims takes over
    the axes that the other one's size does not divide.

    >>> _frozen_spec(("data", None), (4, 64), MeshSpec.parse("data=8"))
    (None, 'data')
    """
    entries: list[Entry] = [*spec, *[None] * (len(shape) - len(spec))]
    for dim, entry in enumerate(entries):
        if entry is None or shape[dim] % num_shards((entry,), mesh) == 0:
            continue
        entries[dim] = None
        # The other one of the last two dims, whose indices add up to 2 * len(shape) - 3.
        other = 2 * len(shape) - 3 - dim
        if (
            dim >= len(shape) - 2
            and entries[other] is None
            and shape[other] % num_shards((entry,), mesh) == 0
        ):
            entries[other] = entry
    return tuple(entries)
