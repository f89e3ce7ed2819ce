"""What `spmd.search` chooses from: layouts, each on every mesh of its axes, with ways to reduce, microbatches and rematerialisation.

Candidates are in an order that is the same each time. A candidate says all that a plan needs beside the model.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from spmd.errors import OptionError, a_kind
from spmd.layout.schema import Layout, Remat, entry_axes, spec_axes
from spmd.layout.toml_reader import shipped
from spmd.mesh import MeshSpec
from spmd.train.model_setup import Placed
from spmd.tree import flatten

KEPT = ("everything", "dots", "nothing")  # by `[remat] save`, from most to least
PIPED = (None, 1, 2, 8)  # microbatches of a pipeline, per stage; None: as many as a stack chooses by itself


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to train.

    Attributes:
      layout: all of it: mesh, reduction, pipeline and `[remat]` are those of this candidate.
      accumulate: microbatches whose gradients are summed before they meet.
      family: the layout that it is a variant of, by its place among those that are searched.
      kept: what rematerialisation keeps, 0 for what the layout itself says; each further one keeps less.
    """

    layout: Layout
    accumulate: int
    family: int
    kept: int

    @property
    def mesh(self) -> MeshSpec:
        """Its axes and their sizes."""
        return MeshSpec(self.layout.mesh)

    @property
    def group(self) -> "Candidate":
        """The same without what saves memory only: one microbatch, and the layout's own rematerialisation."""
        return dataclasses.replace(self, accumulate=1, kept=0, layout=dataclasses.replace(self.layout, remat=Remat()))

    def differs(self, other: "Candidate") -> float:
        """How far another of the same family is: twofold steps of its mesh, and one for each other thing."""
        pairs = zip(self.mesh.sizes.values(), other.mesh.sizes.values(), strict=True)
        far = sum(abs(math.log2(size / wish)) for size, wish in pairs)
        same = (
            self.layout.gradients.reduction == other.layout.gradients.reduction,
            self.layout.pipeline.microbatches == other.layout.pipeline.microbatches,
            (self.kept, self.accumulate) == (other.kept, other.accumulate),
        )
        return far + same.count(False)

    def __str__(self) -> str:
        layout = self.layout
        parts = [f"{layout.name} on {self.mesh}", f"reduction {layout.gradients.reduction}"]
        parts += [f"{layout.pipeline.microbatches} microbatches in the pipeline"] if layout.pipeline.microbatches else []
        parts += [f"remat {layout.remat.saves}"] if layout.remat.saves != "everything" else []
        return ", ".join(parts + [f"accumulate {self.accumulate}"] * (self.accumulate > 1))


@dataclasses.dataclass(frozen=True)
class Space:
    """All candidates for a number of devices.

    Attributes:
      layouts: the families.
      remats: what may be recomputed, each keeping less than the one before.
      devices: of the mesh.
      rows: of the batch.
    """

    layouts: tuple[Layout, ...]
    remats: tuple[Remat, ...]
    devices: int
    rows: int

    def meshes(self, family: int) -> list[MeshSpec]:
        """Every mesh of a layout's axes on all devices, those nearest to its own first; a cut axis has two devices at least."""
        declared = _axes(self.layouts[family])
        names = [name for name, _ in declared]
        found = [sizes for sizes in _factors(self.devices, len(names)) if all(map(_enough, sizes, declared))]
        far = lambda sizes: sum(abs(math.log2(size / wish)) for size, (_, wish) in zip(sizes, declared, strict=True) if wish > 0)
        return [MeshSpec(tuple(zip(names, sizes, strict=True))) for sizes in sorted(found, key=lambda sizes: (far(sizes), sizes))]

    def impossible(self, family: int) -> str | None:
        """Why a layout has no mesh of so many devices; None where it has."""
        if self.meshes(family):
            return None
        axes = ", ".join(f"{name} of {'any size' if size < 2 else '2 or more'}" for name, size in _axes(self.layouts[family]))
        return f"{self.devices} device{'s' * (self.devices > 1)} make{'s' * (self.devices == 1)} no mesh of its axes ({axes})"

    def groups(self, family: int) -> Iterator[Candidate]:
        """Every mesh, way to reduce and number of a pipeline's microbatches of a layout; as it is declared, first."""
        layout = self.layouts[family]
        for mesh, piped, reduction in itertools.product(self.meshes(family), self._piped(layout), _reductions(layout)):
            stages = mesh.sizes.get(layout.pipeline.axis or "", 1)
            pipeline = dataclasses.replace(layout.pipeline, microbatches=piped * stages) if piped else layout.pipeline
            gradients = dataclasses.replace(layout.gradients, reduction=reduction)
            yield Candidate(dataclasses.replace(layout, mesh=mesh.axes, pipeline=pipeline, gradients=gradients), 1, family, 0)

    def lighter(self, one: Candidate) -> Iterator[Candidate]:
        """What differs from a candidate in needing less memory: the next that keeps less, and each further number of microbatches."""
        rungs = self._kept(one.family)
        if one.kept + 1 < len(rungs):
            layout = dataclasses.replace(one.layout, remat=rungs[one.kept + 1])
            yield dataclasses.replace(one, layout=layout, kept=one.kept + 1)
        workers = math.prod(one.mesh.sizes[axis] for axis in one.layout.data_axes())
        for count in microbatches(self.rows, workers * (one.layout.pipeline.microbatches or 1)):
            if count > one.accumulate:
                yield dataclasses.replace(one, accumulate=count)

    def all(self) -> Iterator[Candidate]:
        """Every candidate."""
        for family in range(len(self.layouts)):
            for group in self.groups(family):
                for kept, remat in enumerate(self._kept(family)):
                    one = dataclasses.replace(group, layout=dataclasses.replace(group.layout, remat=remat), kept=kept)
                    yield one
                    yield from (other for other in self.lighter(one) if other.kept == kept)

    def _kept(self, family: int) -> list[Remat]:
        own = self.layouts[family].remat
        return [own, *(remat for remat in self.remats if KEPT.index(remat.saves) > KEPT.index(own.saves))]

    def _piped(self, layout: Layout) -> tuple[int | None, ...]:
        return PIPED if layout.pipeline.axis and layout.pipeline.microbatches is None else (None,)


def _axes(layout: Layout) -> tuple[tuple[str, int], ...]:
    """The axes that a layout declares, or those that it speaks of: the first data axis takes what the others leave."""
    if layout.mesh:
        return layout.mesh
    data = layout.data_axes()
    rules = (layout.batch, *layout.batch.rules, *layout.params, *layout.activations)
    told = [
        *data,
        *(axis for rule in rules for axis in spec_axes(rule.spec)),
        *(axis for _, entry in layout.axes for axis in entry_axes(entry)),
    ]
    told += [axis for axis in (layout.pipeline.axis, layout.sequence.axis) if axis]
    return tuple((axis, -1 if axis in data[:1] else 2) for axis in dict.fromkeys(told)) or (("data", -1),)


def _enough(size: int, declared: tuple[str, int]) -> bool:
    """An axis of one device cuts nothing: that would be another layout, but for the axis that takes what is left."""
    return size >= min(declared[1], 2)


def _factors(count: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as a product of so many, in order.

    >>> list(_factors(4, 2))
    [(1, 4), (2, 2), (4, 1)]
    """
    if parts == 1:
        yield (count,)
        return
    for first in range(1, count + 1):
        if count % first == 0:
            yield from ((first, *rest) for rest in _factors(count // first, parts - 1))


def _reductions(layout: Layout) -> tuple[str, ...]:
    own = layout.gradients.reduction
    return (own, "compiler") if own in ("all_reduce", "reduce_scatter") and not layout.gradients.compressed else (own,)


def microbatches(rows: int, parts: int) -> list[int]:
    """Numbers of microbatches, above one, that cut what each of so many parts has of the rows evenly; each at least twice the one before.

    >>> microbatches(32, 2), microbatches(450, 2), microbatches(3, 2)
    ([2, 4, 8, 16], [3, 9, 25, 75, 225], [])
    """
    found, last = [], 1
    for count in range(2, rows // parts + 1) if rows % parts == 0 else ():
        if rows // parts % count == 0 and count >= 2 * last:
            found.append(count)
            last = count
    return found


def remats(placed: Placed) -> tuple[Remat, ...]:
    """What of a model may be recomputed: each of its repeated submodules by itself, or the whole forward pass where nothing repeats."""
    paths = list(flatten(placed.abstract_state.params))
    stacks = {path.partition("/layers/")[0] + "/layers" for path in placed.model.stacks() if "/layers/" in path}
    rest = [path for path in paths if not any(path.startswith(stack) for stack in stacks)]
    numbered = {found.group(1) + "*" for path in rest if (found := re.match(r"(.*?[/_])\d+/.+/", path))}  # blocks/0/up/kernel
    modules = tuple(sorted(stacks | numbered))
    return tuple(Remat(save, modules) for save in KEPT[1:])


def chosen_layouts(candidates: "str | Path | Layout | Sequence[str | Path | Layout]") -> tuple[tuple[Layout, ...], dict[str, str]]:
    """The layouts to search, and those that are left out by name, with the reason.

    Raises:
      OptionError: neither "exact", "all" nor a list of layouts.
    """
    if candidates in ("exact", "all"):
        found = [Layout.load(name) for name in shipped()]
        out = {} if candidates == "all" else {layout.name: why for layout in found if (why := changes(layout))}
        return tuple(layout for layout in found if layout.name not in out), out
    if isinstance(candidates, Layout | Path):
        candidates = [candidates]
    if isinstance(candidates, str) or not isinstance(candidates, Sequence) or not candidates:
        raise OptionError(
            f"candidates={candidates!r} is {'empty' if candidates == [] else a_kind(candidates)}.\n"
            '    fix: "exact" (layouts that make the updates one device would make), "all", or a list of layouts: ["fsdp", "my.toml"].'
        )
    return tuple(dict.fromkeys(Layout.load(one) for one in candidates)), {}


def changes(layout: Layout) -> str | None:
    """In what a layout's updates are not those that one device would make; None where they are, but for rounding."""
    gradients, server = layout.gradients, layout.parameter_server
    found = []
    if gradients.compressed or gradients.weights != "exact":
        codecs = [codec for codec in (*gradients.codecs, gradients.weights) if codec != "exact"]
        found.append(f"what travels is rounded ({', '.join(dict.fromkeys(codecs))})")
    if gradients.reduction == "parameter_server" and server.mode != "synchronous":
        found.append(f"workers do not wait for each other (mode {server.mode})")
    if gradients.reduction == "parameter_server" and server.spares:
        found.append(f"{server.spares} of the workers' gradients are dropped in every step")
    return " and ".join(found) or None
