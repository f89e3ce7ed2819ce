"""The candidates of `spmd.search`, and lower bounds on what they need.

A candidate is a layout on a mesh of its axes, with a reduction, microbatches and rematerialization.
An axis that a layout declares with one device may have one; the candidate is then the layout
without it. Their order is deterministic. With the model, a candidate is all that a plan needs.

For the bounds on memory and time nothing is compiled: the layout determines the shards of
parameters and optimizer state, the FLOPs are those of the step on one device, divided evenly, and
gradients cross the links once to be reduced.
"""

import dataclasses
import functools
import itertools
import math
import operator
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
from jax.extend.core import Literal

from spmd.base.fields import as_toml
from spmd.base.specs import spec_axes
from spmd.base.tree import Tree, flatten, nbytes
from spmd.errors import OptionError, option, type_name
from spmd.layout.layout_files import shipped
from spmd.layout.remat import Remat
from spmd.layout.resolve import num_shards
from spmd.layout.schema import Layout
from spmd.layout.unused_axes import unused_axes, without_axes
from spmd.mesh import MeshSpec
from spmd.planner.cluster import Cluster
from spmd.planner.plan_data import PlanData
from spmd.planner.timeline import Timeline
from spmd.planner.traffic import devices_per_node, reduction_time
from spmd.train.device_memory import tree_on_device
from spmd.train.model_setup import PlacedModel

# values of `[remat] save` that are tried, from most to least memory
REMAT_SAVES = ("everything", "dots", "nothing")
MICROBATCHES_PER_STAGE = (1, 2, 8)  # of a pipeline, beside the stack's default


def remat_level(remat: Remat) -> int:
    """Return how little a `[remat]` keeps: the place in `REMAT_SAVES`; the place of "dots" for
    named values, offloading, and rules.

    >>> remat_level(Remat()), remat_level(Remat(("attention",))), remat_level(Remat("nothing"))
    (0, 1, 2)
    """
    if remat.rules or remat.offload or remat.saves not in REMAT_SAVES:
        return 1
    return REMAT_SAVES.index(remat.saves)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to train.

    Attributes:
      layout: with the mesh, reduction, pipeline, `[remat]` and `[compiler]` of this candidate.
      accumulate: microbatches whose gradients are summed before they are reduced.
      family: the index of the searched layout that this is a variant of.
      remat_level: 0 for the layout's own rematerialization; each further level saves less.
    """

    layout: Layout
    accumulate: int
    family: int
    remat_level: int

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        # of thousands, each looked up many times
        return hash((self.layout, self.accumulate, self.family, self.remat_level))

    @functools.cached_property
    def mesh(self) -> MeshSpec:
        """The mesh of its layout."""
        return MeshSpec(self.layout.mesh)

    @functools.cached_property
    def group(self) -> "Candidate":
        """The same without what only saves memory: one microbatch, and the layout's own
        rematerialization.
        """
        return dataclasses.replace(
            self,
            accumulate=1,
            remat_level=0,
            layout=dataclasses.replace(self.layout, remat=Remat()),
        )

    @functools.cached_property
    def placement(self) -> "Candidate":
        """The group, whatever the pipeline's microbatches: what says where arrays live."""
        pipeline = dataclasses.replace(self.layout.pipeline, microbatches=None)
        return dataclasses.replace(
            self.group, layout=dataclasses.replace(self.group.layout, pipeline=pipeline)
        )

    def distance(self, other: "Candidate") -> float:
        """Return how much another candidate of the same family differs: doublings of mesh axes,
        plus one for each other difference.
        """
        same = (
            self.layout.gradients.reduction == other.layout.gradients.reduction,
            self.layout.pipeline.microbatches == other.layout.pipeline.microbatches,
            (self.remat_level, self.accumulate) == (other.remat_level, other.accumulate),
        )
        sizes, others = self.mesh.sizes, other.mesh.sizes
        axes = sizes | others
        pairs = [(sizes.get(axis, 1), others.get(axis, 1)) for axis in axes]
        return _doublings(pairs) + same.count(False)

    def __str__(self) -> str:
        layout = self.layout
        parts = [f"{layout.name} on {self.mesh}", f"reduction {layout.gradients.reduction}"]
        if layout.pipeline.microbatches:
            parts.append(f"{layout.pipeline.microbatches} microbatches in the pipeline")
        if layout.remat != Remat():
            parts.append(f"remat {layout.remat}")
        parts += [f"{key} {as_toml(value)}" for key, value in layout.compiler.keys.items()]
        if self.accumulate > 1:
            parts.append(f"accumulate {self.accumulate}")
        return ", ".join(parts)


@dataclasses.dataclass(frozen=True)
class CandidateSpace:
    """All candidates for a number of devices.

    Attributes:
      layouts: the families.
      remats: levels of rematerialization, each saving less than the one before.
      devices: of the mesh.
      rows: of the batch.
    """

    layouts: tuple[Layout, ...]
    remats: tuple[Remat, ...]
    devices: int
    rows: int

    def meshes(self, family: int) -> list[MeshSpec]:
        """Return every mesh of a layout's axes that uses all devices, nearest to its own first; a
        sharded axis has at least two devices.
        """
        names, declared = zip(*_axes(self.layouts[family]), strict=True)
        # a sharded axis of size 1 would make another layout
        least = [min(size, 2) for size in declared]
        possible = []
        for sizes in _factors(self.devices, len(names)):
            if all(map(operator.ge, sizes, least)):
                possible.append((_doublings(zip(sizes, declared, strict=True)), sizes))
        return [MeshSpec(tuple(zip(names, sizes, strict=True))) for _, sizes in sorted(possible)]

    def impossible(self, family: int) -> str | None:
        """Return why a layout has no candidate with this number of devices; None where it has
        one.
        """
        if self.groups(family):
            return None
        if self.meshes(family):
            return "every candidate of it is one of a layout with more axes"
        axes = []
        for name, size in _axes(self.layouts[family]):
            axes.append(f"{name} of {'any size' if size < 2 else '2 or more'}")
        several = self.devices > 1
        verb = "device makes"
        if several:
            verb = "devices make"
        return f"{self.devices} {verb} no mesh of its axes ({', '.join(axes)})"

    def groups(self, family: int) -> list[Candidate]:
        """Return every mesh, reduction and number of pipeline microbatches of a layout; the
        declared ones first.

        What two layouts have in common is a candidate of the one with more axes.
        """
        return self._groups[family]

    @functools.cached_property
    def _groups(self) -> dict[int, list[Candidate]]:
        families = range(len(self.layouts))
        groups, earlier = {}, set()
        for family in sorted(families, key=lambda family: -len(_axes(self.layouts[family]))):
            distinct = {_comparable(group.layout): group for group in self._variants(family)}
            groups[family] = [group for layout, group in distinct.items() if layout not in earlier]
            earlier |= distinct.keys()
        return groups

    def _variants(self, family: int) -> Iterator[Candidate]:
        """Yield every mesh, reduction and number of pipeline microbatches of a layout."""
        declared = self.layouts[family]
        for mesh in self.meshes(family):
            unused = unused_axes(declared, mesh)
            axes = tuple(axis for axis in mesh.axes if axis[0] not in unused)
            layout = dataclasses.replace(without_axes(declared, unused), mesh=axes)
            stages = mesh.sizes.get(layout.pipeline.axis or "", 1)
            counts = (layout.pipeline.microbatches,)
            if stages > 1 and layout.pipeline.microbatches is None:
                counts = (None, *(count * stages for count in MICROBATCHES_PER_STAGE))
            for count, reduction in itertools.product(counts, _reductions(layout)):
                pipeline = dataclasses.replace(layout.pipeline, microbatches=count)
                gradients = dataclasses.replace(layout.gradients, reduction=reduction)
                variant = dataclasses.replace(layout, pipeline=pipeline, gradients=gradients)
                yield Candidate(variant, 1, family, 0)

    def lighter(self, candidate: Candidate) -> Iterator[Candidate]:
        """Yield variants that need less memory: the next level of rematerialization, and each
        larger number of microbatches.
        """
        remats, level = self._remats(candidate.family), candidate.remat_level + 1
        if level < len(remats):
            layout = dataclasses.replace(candidate.layout, remat=remats[level])
            yield dataclasses.replace(candidate, layout=layout, remat_level=level)
        workers = math.prod(candidate.mesh.sizes[axis] for axis in candidate.layout.data_axes())
        parts = workers * (candidate.layout.pipeline.microbatches or 1)
        for count in microbatches(self.rows, parts):
            if count > candidate.accumulate:
                yield dataclasses.replace(candidate, accumulate=count)

    def all(self) -> Iterator[Candidate]:
        """Yield every candidate."""
        for family in range(len(self.layouts)):
            for group in self.groups(family):
                yield from self.all_of(group)

    def all_of(self, group: Candidate) -> Iterator[Candidate]:
        """Yield every candidate of a group; of a variant that saves memory, its group's."""
        for level, remat in enumerate(self._remats(group.family)):
            layout = dataclasses.replace(group.layout, remat=remat)
            candidate = dataclasses.replace(group, layout=layout, remat_level=level)
            yield candidate
            yield from (other for other in self.lighter(candidate) if other.remat_level == level)

    def _remats(self, family: int) -> list[Remat]:
        """Return a layout's own rematerialization, and the levels that save less."""
        declared = self.layouts[family].remat
        less = [remat for remat in self.remats if remat_level(remat) > remat_level(declared)]
        return [declared, *less]


def _comparable(layout: Layout) -> Layout:
    """Return a layout without the texts that do not change a step."""
    return dataclasses.replace(layout, description="", use_when="")


def _doublings(sizes: Iterable[tuple[int, int]]) -> float:
    """Return how many times axes must be doubled or halved, of pairs of sizes; a second size of -1
    is any.
    """
    return sum(abs(math.log2(size / other)) for size, other in sizes if other > 0)


def _axes(layout: Layout) -> tuple[tuple[str, int], ...]:
    """Return the axes that a layout declares, or those that it mentions: the first data axis takes
    the devices that the others leave.
    """
    if layout.mesh:
        return layout.mesh
    data = layout.data_axes()
    entries = [entry for _, entry in layout.axes]
    for rule in (layout.batch, *layout.batch.rules, *layout.params, *layout.activations):
        entries += rule.spec
    axes = dict.fromkeys(
        [*data, *spec_axes((*entries, layout.pipeline.axis, layout.sequence.axis))]
    )
    sizes = tuple((axis, -1 if axis in data[:1] else 2) for axis in axes)
    return sizes or (("data", -1),)


def _factors(count: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield all ways to write a number as a product of `parts` factors, in order.

    >>> list(_factors(4, 2))
    [(1, 4), (2, 2), (4, 1)]
    """
    divisors = [number for number in range(1, count + 1) if count % number == 0]
    for sizes in itertools.product(divisors, repeat=parts):
        if math.prod(sizes) == count:
            yield sizes


def _reductions(layout: Layout) -> tuple[str, ...]:
    """Return the layout's own reduction and, where it is equal, the compiler's."""
    declared = layout.gradients.reduction
    exact = declared in ("all_reduce", "reduce_scatter") and not layout.gradients.compressed
    if exact:
        # XLA's own collectives change nothing but rounding.
        return (declared, "compiler")
    return (declared,)


def microbatches(rows: int, parts: int) -> list[int]:
    """Return numbers of microbatches, above one, that divide each part's rows evenly; each at least
    twice the one before.

    >>> microbatches(32, 2), microbatches(450, 2), microbatches(3, 2)
    ([2, 4, 8, 16], [3, 9, 25, 75, 225], [])
    """
    if rows % parts:
        return []
    counts = [1]
    for count in range(2, rows // parts + 1):
        if rows // parts % count == 0 and count >= 2 * counts[-1]:
            counts.append(count)
    return counts[1:]


def remats(placed: PlacedModel) -> tuple[Remat, ...]:
    """Return what a model may recompute: each repeated submodule separately, or the whole forward
    pass where none repeats.
    """
    state = placed.abstract_state
    modules = set()
    for path in placed.model.stacks():
        stack, separator, _ = path.partition("/layers/")
        if separator:
            modules.add(f"{stack}/layers")
    stacks = tuple(modules)
    for path in [*flatten(state.params), *flatten(state.frozen)]:
        # blocks/0/up/kernel
        numbered = re.match(r"(.*?[/_])\d+/.+/", path)
        if numbered and not path.startswith(stacks):
            modules.add(numbered.group(1) + "*")
    return tuple(Remat(save, tuple(sorted(modules))) for save in REMAT_SAVES[1:])


def chosen_layouts(
    candidates: "str | Path | Layout | Sequence[str | Path | Layout]",
) -> tuple[tuple[Layout, ...], dict[str, str]]:
    """Return the layouts to search, and the reasons for those left out, by name.

    Raises:
      OptionError: neither "exact", "all" nor a list of layouts.
    """
    if candidates in ("exact", "all"):
        layouts = [Layout.load(name) for name in shipped()]
        left_out: dict[str, str] = {}
        for layout in layouts if candidates == "exact" else ():
            if why := update_differences(layout):
                left_out[layout.name] = why
        return tuple(layout for layout in layouts if layout.name not in left_out), left_out
    if isinstance(candidates, Layout | Path):
        candidates = [candidates]
    if isinstance(candidates, str) or not isinstance(candidates, Sequence) or not candidates:
        what = type_name(candidates)
        if candidates == []:
            what = "empty"
        raise OptionError(
            f"{option('candidates', repr(candidates))} is {what}.",
            fix='"exact" (layouts whose updates equal those of one device), "all", or a list of '
            'layouts: ["fsdp", "my.toml"].',
        )
    return tuple(dict.fromkeys(Layout.load(layout) for layout in candidates)), {}


def update_differences(layout: Layout) -> str | None:
    """Return how a layout's updates differ from those of one device, apart from rounding; None if
    they do not.
    """
    gradients, server = layout.gradients, layout.parameter_server
    differences = []
    if gradients.compressed or gradients.weights != "exact":
        codecs = [codec for codec in (*gradients.codecs, gradients.weights) if codec != "exact"]
        differences.append(f"communication is lossy ({', '.join(dict.fromkeys(codecs))})")
    if gradients.reduction == "parameter_server" and server.mode != "synchronous":
        differences.append(f"workers do not wait for each other (mode {server.mode})")
    if gradients.reduction == "parameter_server" and server.spares:
        differences.append(f"{server.spares} of the workers' gradients are dropped in every step")
    return " and ".join(differences) or None


@dataclasses.dataclass(frozen=True)
class LowerBounds:
    """Lower bounds of a step: `state` bytes on each device, and `seconds`; `why` says what these
    are spent on.
    """

    state: int
    seconds: float
    why: str


def trainable_paths(placed: PlacedModel) -> set[str]:
    """Parameters that a gradient can change; those that an optimizer freezes are neither sent nor
    written.
    """
    state = placed.abstract_state

    def updates(grads: Tree, opt: Tree, params: Tree) -> Tree:
        return placed.optimizer.update(grads, opt, params)[0]

    # optax freezes parameters by updates of zeros, which do not depend on the gradients
    jaxpr = jax.make_jaxpr(updates)(state.params, state.opt, state.params).jaxpr
    dependent = set(jaxpr.invars[: len(jax.tree.leaves(state.params))])
    for equation in jaxpr.eqns:
        # A `Literal` cannot be looked up in a set: JAX gives it no hash.
        if any(not isinstance(var, Literal) and var in dependent for var in equation.invars):
            dependent.update(equation.outvars)
    changes = [not isinstance(var, Literal) and var in dependent for var in jaxpr.outvars]
    return {path for path, change in zip(flatten(state.params), changes, strict=True) if change}


def divided_activations(alone: PlanData) -> float:
    """Return the bytes of activations of the step on one device, at least: its temporaries without
    two full copies of all parameters.

    One for gradients, and one for parameters in the dtype of the computation and their gradients:
    on a mesh these need not be full.
    """
    # on one device XLA holds all gradients, and may hold all parameters in the narrow dtype
    arrays = alone.program.placed.abstract_variables
    params = sum(map(nbytes, jax.tree.leaves((arrays.params, arrays.frozen))))
    return max(0.0, alone.memory.temporaries - 2.0 * params)


def lower_bounds_of(
    placed: PlacedModel, cluster: Cluster, alone: Timeline, trainable: Collection[str]
) -> LowerBounds:
    """Return the bounds of a placed model.

    Args:
      alone: the same step on one device of the cluster.
      trainable: paths of the parameters that are not frozen.
    """
    state, target = placed.abstract_state, cluster.target
    bandwidth = target.memory_bandwidth * target.achieved.memory
    moved = 0
    if placed.resolved.layout.gradients.reduction != "parameter_server":
        params = {path: leaf for path, leaf in flatten(state.params).items() if path in trainable}
        # trained parameters and moments are read and written, frozen parameters only read
        moved = 2 * tree_on_device((params, state.opt)) + tree_on_device(state.frozen)
    parts = {
        "matrix products, divided evenly": alone.multiplying / cluster.count,
        "reading and writing parameters": moved / bandwidth,
        "gradients on the links": _reduction_time(placed, cluster, trainable),
    }
    why = max(parts, key=lambda name: parts[name])
    return LowerBounds(tree_on_device(state), parts[why], why)


def _reduction_time(placed: PlacedModel, cluster: Cluster, trainable: Collection[str]) -> float:
    """Return the seconds to reduce all gradients in one collective; 0 where what XLA or a codec
    sends is not known without compiling.
    """
    resolved, mesh = placed.resolved, placed.resolved.mesh
    gradients, data_axes = resolved.layout.gradients, resolved.data_axes
    if gradients.reduction not in ("all_reduce", "reduce_scatter"):
        return 0.0
    if gradients.compressed or resolved.workers == 1:
        return 0.0
    size = 0
    for path, place in resolved.placements.items():
        if path in trainable:
            axes = tuple(axis for axis in spec_axes(place.spec) if axis not in data_axes)
            size += place.nbytes // num_shards(axes, mesh)
    # Devices are numbered along the mesh, the last axis varying fastest; devices with consecutive
    # numbers fill a node.
    ids = np.arange(mesh.size).reshape([length for _, length in mesh.axes])
    # the workers that the first device reduces with
    along = tuple(slice(None) if name in data_axes else 0 for name in mesh.names)
    workers = ids[along].ravel().tolist()
    per_node = devices_per_node(workers, cluster)
    return reduction_time(gradients.reduction, size, len(workers), per_node, cluster)
