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
    """Return axes that the layout's `[mesh]` declares with one device, and that have one on this
    mesh.

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
    # On one device all axes are unused, and a mesh needs one.
    if len(unused) < len(layout.mesh):
        return unused
    return ()


def without_axes(layout: Layout, axes: Collection[str]) -> Layout:
    """Return the layout with these mesh axes taken out of all specs and tables; a rule that they
    alone sharded leaves its array replicated.

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
        """Return a spec without dims behind the last sharded one, as layouts without these axes
        spell it.
        """
        new = spec(old)
        if old == new:
            return new
        # Dim 0 is the batch, and stays even if nothing shards it.
        return new[: max(dim + 1 for dim, axes in enumerate(new) if axes or dim == 0)]

    def rules(old: tuple[Rule, ...]) -> tuple[Rule, ...]:
        return tuple(dataclasses.replace(rule, spec=spec(rule.spec)) for rule in old)

    def table(old: Any, key: str) -> Any:
        """Return a table, which is empty without its axis."""
        if getattr(old, key) in axes:
            return type(old)()
        return old

    default = layout.default
    if default.params.removeprefix("shard:") in axes:
        default = dataclasses.replace(default, params="replicate")
    batch = layout.batch
    batch = dataclasses.replace(batch, spec=batch_spec(batch.spec), rules=rules(batch.rules))
    exact_axes = tuple(axis for axis in layout.gradients.exact_axes or () if axis not in axes)
    return dataclasses.replace(
        layout,
        mesh=tuple((axis, size) for axis, size in layout.mesh if axis not in axes),
        batch=batch,
        params=rules(layout.params),
        axes=tuple((name, entry(old)) for name, old in layout.axes),
        activations=rules(layout.activations),
        default=default,
        optimizer=table(layout.optimizer, "shard"),
        pipeline=table(layout.pipeline, "axis"),
        sequence=table(layout.sequence, "axis"),
        experts=table(layout.experts, "axis"),
        gradients=dataclasses.replace(layout.gradients, exact_axes=exact_axes),
    )
