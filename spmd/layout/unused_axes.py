"""A layout without some of its mesh axes: those that it declares with one device, and that have
one.
"""

import dataclasses
from collections.abc import Collection
from typing import Any

from spmd.base.specs import Entry, Spec, entry_axes, make_entry
from spmd.layout.schema import Layout, Rule
from spmd.mesh import MeshSpec


def unused_axes(layout: Layout, mesh: MeshSpec) -> tuple[str, ...]:
    """Axes that the layout's `[mesh]` declares with one device, and that have one on this mesh.

    So a layout can offer several kinds of parallelism, and is as one without those that a mesh does
    not use.

    >>> layout = Layout(mesh=(("replica", 1), ("data", -1)))
    >>> (
    ...     unused_axes(layout, MeshSpec.parse("replica=1,data=8")),
    ...     unused_axes(layout, MeshSpec.parse("replica=2,data=4")),
    ... )
    (('replica',), ())
    """
    unused = tuple(axis for axis, size in layout.mesh if size == 1 and mesh.sizes.get(axis) == 1)
    return unused if len(unused) < len(layout.mesh) else ()


def without_axes(layout: Layout, axes: Collection[str]) -> Layout:
    """The layout with these mesh axes taken out of all specs and tables; a rule that they alone
    sharded leaves its array replicated.

    >>> from spmd.layout.schema import Batch
    >>> layout = Layout(mesh=(("replica", 1), ("data", -1)), batch=Batch((("replica", "data"),)))
    >>> without_axes(layout, ("replica",)) == Layout(mesh=(("data", -1),))
    True
    """
    if not axes:
        return layout

    def entry(old: Entry) -> Entry:
        return make_entry(tuple(axis for axis in entry_axes(old) if axis not in axes))

    def spec(old: Spec) -> Spec:
        return tuple(map(entry, old))

    def batch_spec(old: Spec) -> Spec:
        """Without dims behind the last that is sharded, as layouts without these axes spell it."""
        kept = spec(old)
        return (
            kept
            if old == kept
            else kept[: max(dim + 1 for dim, axes in enumerate(kept) if axes or dim == 0)]
        )

    def rules(old: tuple[Rule, ...]) -> tuple[Rule, ...]:
        return tuple(dataclasses.replace(rule, spec=spec(rule.spec)) for rule in old)

    def table(old: Any, key: str) -> Any:
        """A table, which is not there without its axis."""
        return type(old)() if getattr(old, key) in axes else old

    default, exact = layout.default, layout.gradients.exact_axes or ()
    return dataclasses.replace(
        layout,
        mesh=tuple((axis, size) for axis, size in layout.mesh if axis not in axes),
        batch=dataclasses.replace(
            layout.batch, spec=batch_spec(layout.batch.spec), rules=rules(layout.batch.rules)
        ),
        params=rules(layout.params),
        axes=tuple((name, entry(old)) for name, old in layout.axes),
        activations=rules(layout.activations),
        default=dataclasses.replace(default, params="replicate")
        if default.params.removeprefix("shard:") in axes
        else default,
        optimizer=table(layout.optimizer, "shard"),
        pipeline=table(layout.pipeline, "axis"),
        sequence=table(layout.sequence, "axis"),
        experts=table(layout.experts, "axis"),
        gradients=dataclasses.replace(
            layout.gradients, exact_axes=tuple(axis for axis in exact if axis not in axes)
        ),
    )
