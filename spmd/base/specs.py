"""Specs: over which mesh axes each dim of an array is sharded."""

import json

from jax.sharding import PartitionSpec

# one dim: replicated (None), sharded over one mesh axis, or over several (outermost first)
Entry = str | tuple[str, ...] | None
# one entry per dim, as in jax.sharding.PartitionSpec; missing trailing entries are None
Spec = tuple[Entry, ...]

REPLICATED = "-"  # how TOML writes None


def pspec(spec: Spec) -> PartitionSpec:
    """The spec as a `jax.sharding.PartitionSpec`."""
    return PartitionSpec(*spec)


def entry_axes(entry: Entry) -> tuple[str, ...]:
    """The mesh axes of one entry.

    >>> entry_axes(None), entry_axes("data"), entry_axes(("data", "model"))
    ((), ('data',), ('data', 'model'))
    """
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else entry


def make_entry(axes: tuple[str, ...]) -> Entry:
    """The entry with these mesh axes.

    >>> make_entry(()), make_entry(("data",)), make_entry(("data", "model"))
    (None, 'data', ('data', 'model'))
    """
    return axes if len(axes) > 1 else axes[0] if axes else None


def spec_axes(spec: Spec) -> tuple[str, ...]:
    """All mesh axes of a spec, in order."""
    return tuple(axis for entry in spec for axis in entry_axes(entry))


def keep_axes(spec: Spec, axes: tuple[str, ...]) -> Spec:
    """The spec with every mesh axis outside `axes` taken out.

    >>> keep_axes(("data", ("data", "model")), ("model",))
    (None, 'model')
    """
    return tuple(
        make_entry(tuple(axis for axis in entry_axes(entry) if axis in axes)) for entry in spec
    )


def mixes_data_axes(spec: Spec, data_axes: tuple[str, ...]) -> bool:
    """Whether a dim is sharded over a data axis together with another axis.

    >>> mixes_data_axes((None, ("data", "model")), ("data",))
    True
    """
    return any(len({axis in data_axes for axis in entry_axes(entry)}) > 1 for entry in spec)


def spec_text(spec: Spec) -> str:
    """The spec as TOML writes it.

    >>> spec_text((None, ("data", "model")))
    '["-", ["data", "model"]]'
    """
    return json.dumps(
        [REPLICATED if entry is None else entry for entry in spec], ensure_ascii=False
    )
