"""Specs: over which mesh axes each dim of an array is sharded."""

import json

from jax.sharding import PartitionSpec

# One dim: replicated (None), sharded over one mesh axis, or over several (outermost first).
Entry = str | tuple[str, ...] | None
# One entry per dim, as in jax.sharding.PartitionSpec; missing trailing entries are None.
Spec = tuple[Entry, ...]

# TOML has no None.
REPLICATED = "-"


def pspec(spec: Spec) -> PartitionSpec:
    """Return the spec as a `jax.sharding.PartitionSpec`."""
    return PartitionSpec(*spec)


def entry_axes(entry: Entry) -> tuple[str, ...]:
    """Return the mesh axes of one entry.

    >>> entry_axes(None), entry_axes("data"), entry_axes(("data", "model"))
    ((), ('data',), ('data', 'model'))
    """
    if entry is None:
        return ()
    if isinstance(entry, str):
        return (entry,)
    return entry


def make_entry(axes: tuple[str, ...]) -> Entry:
    """Return the entry with these mesh axes.

    >>> make_entry(()), make_entry(("data",)), make_entry(("data", "model"))
    (None, 'data', ('data', 'model'))
    """
    if len(axes) > 1:
        return axes
    if axes:
        return axes[0]
    return None


def spec_axes(spec: Spec) -> tuple[str, ...]:
    """Return all mesh axes of a spec, in order."""
    return tuple(axis for entry in spec for axis in entry_axes(entry))


def keep_axes(spec: Spec, axes: tuple[str, ...]) -> Spec:
    """Return the spec with every mesh axis outside `axes` removed.

    >>> keep_axes(("data", ("data", "model")), ("model",))
    (None, 'model')
    """
    entries = []
    for entry in spec:
        entries.append(make_entry(tuple(axis for axis in entry_axes(entry) if axis in axes)))
    return tuple(entries)


def mixes_data_axes(spec: Spec, data_axes: tuple[str, ...]) -> bool:
    """Return whether a dim is sharded over a data axis together with another axis.

    >>> mixes_data_axes((None, ("data", "model")), ("data",))
    True
    """
    for entry in spec:
        axes = set(entry_axes(entry))
        if not axes.isdisjoint(data_axes) and not axes <= set(data_axes):
            return True
    return False


def spec_text(spec: Spec) -> str:
    """Return the spec as TOML writes it.

    >>> spec_text((None, ("data", "model")))
    '["-", ["data", "model"]]'
    """
    entries = [REPLICATED if entry is None else entry for entry in spec]
    return json.dumps(entries, ensure_ascii=False)
