"""Specs: over which mesh axes each dim of an array is sharded."""

from jax.sharding import PartitionSpec

Entry = str | tuple[str, ...] | None  # one dim: replicated (None), sharded over one mesh axis, or over several (outermost first)
Spec = tuple[Entry, ...]  # one entry per dim, as in jax.sharding.PartitionSpec; missing trailing entries are None

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


def spec_axes(spec: Spec) -> tuple[str, ...]:
    """All mesh axes of a spec, in order."""
    return tuple(axis for entry in spec for axis in entry_axes(entry))


def keep_axes(spec: Spec, axes: tuple[str, ...]) -> Spec:
    """The spec with every mesh axis outside `axes` taken out.

    >>> keep_axes(("data", ("data", "model")), ("model",))
    (None, 'model')
    """
    kept = (tuple(axis for axis in entry_axes(entry) if axis in axes) for entry in spec)
    return tuple(None if not entry else entry[0] if len(entry) == 1 else entry for entry in kept)


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
    return "[" + ", ".join(_entry_text(entry) for entry in spec) + "]"


def _entry_text(entry: Entry) -> str:
    if entry is None:
        return f'"{REPLICATED}"'
    if isinstance(entry, str):
        return f'"{entry}"'
    return "[" + ", ".join(f'"{axis}"' for axis in entry) + "]"
