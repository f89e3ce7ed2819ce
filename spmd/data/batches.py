"""Checks host batches, pads short ones, and places them on the mesh."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spmd.base.specs import Spec, pspec, spec_axes, spec_text
from spmd.base.tree import Tree, describe, dtype_of, flatten, map_paths
from spmd.data.narrow import OutOfRange, narrow, raise_out_of_range
from spmd.errors import (
    DataError,
    Problem,
    first_line,
    join_names,
    option,
    raise_problems,
    short_repr,
    type_name,
)
from spmd.layout.fixes import spec_problems
from spmd.layout.resolve import rule_matcher, rule_name
from spmd.layout.schema import Layout
from spmd.mesh import MeshSpec


@dataclasses.dataclass(frozen=True)
class HostBatch:
    """Rows on the host.

    `leaves` are arrays; with `index`, the batch is their rows `index` (int64[rows]), read only by
    the processes that need them. Without it they are the rows themselves: all of them in one
    process, the local ones in several. `position` is what a checkpoint needs to resume after this
    batch. `has_rows` is bool[workers], which workers were assigned rows, and `weights` is
    float32[rows on the mesh], 0 on padding; None: the first `rows` are data.
    """

    leaves: Tree
    rows: int
    index: np.ndarray | None = None
    position: Any = None
    has_rows: np.ndarray | None = None
    weights: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Batch:
    """A batch on the mesh.

    `weights` is float32[rows], 0 on padding; `rows` counts data; `split` is False when every worker
    holds all rows; `has_rows` as in `HostBatch`; `index` is int64[rows], which rows of the data
    they are, where they were selected from arrays.
    """

    leaves: Tree
    weights: jax.Array
    rows: int
    split: bool = True
    position: Any = None
    has_rows: np.ndarray | None = None
    index: np.ndarray | None = None


def as_arrays(tree: Tree, name: str) -> Tree:
    """The tree with arrays of other libraries (a tensor on the host, a column of a table) as numpy
    arrays.

    Raises:
      DataError: numpy cannot read it, or it was deleted.
    """
    accepted = np.ndarray | jax.Array | jax.ShapeDtypeStruct | np.generic

    def as_array(path: str, leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise DataError(
                f"{name}: {path or 'it'} {describe(leaf)} was deleted: it was donated to a call.",
                fix="a copy of it, numpy.array(...), made before.",
            )
        if isinstance(leaf, accepted) or not hasattr(leaf, "__array__"):
            return leaf
        try:
            # PyTorch raises TypeError for a tensor on a GPU, RuntimeError for one with a gradient.
            return np.asarray(leaf)
        except Exception as error:
            kind = f"{type(leaf).__module__.partition('.')[0]}.{type(leaf).__name__}"
            fix = "arrays in the host's memory, such as tensor.detach().cpu().numpy()."
            raise DataError(
                f"{name}: {path or 'it'} is a {kind}, which numpy cannot read: {first_line(error)}",
                fix=fix,
            ) from error

    if all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(tree)):
        return tree
    return map_paths(as_array, tree)


def _lists(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Lists and tuples that hold only numbers or strings, at any depth; of nested ones the
    outermost.
    """
    inner_nodes: Iterable[tuple[Any, Any]] = ()
    if isinstance(node, dict):
        inner_nodes = node.items()
    elif isinstance(node, list | tuple):
        if node and all(np.ndim(leaf) == 0 for leaf in jax.tree.leaves(node)):
            yield path, node
            return
        inner_nodes = enumerate(node)
    for name, inner in inner_nodes:
        yield from _lists(inner, f"{path}/{name}".lstrip("/"))


def _list_shape(node: Any) -> str:
    """The nested lengths of a list in words, by the first item of each.

    >>> _list_shape([[1.0, 2.0], [3.0, 4.0]])
    'a list of 2 lists of 2 floats'
    """
    inner, plural = node[0], ""
    if len(node) > 1:
        plural = "s"
    if isinstance(inner, list | tuple) and inner:
        inner_words = _list_shape(inner).removeprefix("a ").replace(" ", plural + " ", 1)
        return f"{type_name(node)} of {len(node)} {inner_words}"
    return f"{type_name(node)} of {len(node)} {type(inner).__name__}{plural}"


def check_leaves(tree: Tree, name: str) -> int:
    """The number of rows, the same in every leaf.

    Raises:
      DataError: no leaf, a leaf without rows, or leaves with different numbers of rows; names all
        of them.
    """
    leaves = flatten(tree)
    if not leaves:
        raise DataError(
            f"{name} holds no arrays: {short_repr(tree)}.",
            fix="a dict or tuple of arrays of shape [rows, ...].",
        )
    scalars = [path or "the batch" for path, leaf in leaves.items() if np.ndim(leaf) == 0]
    if scalars:
        lists = {path: _list_shape(node) for path, node in _lists(tree)}
        if lists:
            shown = lists.get("") or join_names(
                f"{path} is {shape}" for path, shape in lists.items()
            )
            raise DataError(
                f"{name}: {shown}, not an array.", fix="numpy.asarray(...), of shape [rows, ...]."
            )
        raise DataError(
            f"{name}: {join_names(scalars)} has no dim 0 of rows.",
            fix="arrays of shape [rows, ...].",
        )
    # Not "V", which is also the kind of bfloat16.
    unsupported = []
    for path, leaf in leaves.items():
        if dtype_of(leaf).kind in "OSUMmT":
            unsupported.append(f"{path or 'the batch'} {describe(leaf)}")
    if unsupported:
        raise DataError(
            f"{name}: {join_names(unsupported)} cannot be placed on a device.",
            fix="numbers instead, or leave it out.",
        )
    sizes = {path: np.shape(leaf)[0] for path, leaf in leaves.items()}
    if len(set(sizes.values())) > 1:
        problems = []
        for path, size in sizes.items():
            where = f"{path}   {describe(leaves[path])}"
            problems.append(Problem(where, [f"has {size} rows."], path=path))
        least, most = min(sizes.values()), max(sizes.values())
        fix = (
            f"the same number of rows in every leaf; the smallest has {least}, the largest {most}."
        )
        if {"n_node", "senders"} <= set(getattr(tree, "_fields", ())):  # jraph.GraphsTuple
            fix = (
                "one row for each padded batch of graphs: jax.tree.map(lambda *x: numpy.stack(x), "
                "*batches), and jax.vmap in the loss."
            )
        problems[-1] = dataclasses.replace(problems[-1], fix=fix)
        raise_problems(
            DataError, f"{name} is ragged: its leaves have different numbers of rows", problems
        )
    return next(iter(sizes.values()))


def with_rows(batch: Tree, rows: Any) -> Tree:
    """Return the shapes of a batch of this number of rows, which may be a symbol of jax.export.

    >>> with_rows({"x": np.ones((2, 3), np.float32)}, 8)
    {'x': ShapeDtypeStruct(shape=(8, 3), dtype=float32)}
    """
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), batch)


def check_matches(tree: Tree, sample: Tree, name: str) -> None:
    """Check that a batch has the leaves, dtypes and shapes of the first one; only the number of
    rows may differ.

    Raises:
      DataError: they differ; the step is compiled for one kind of batch.
    """
    if jax.tree.structure(tree) != jax.tree.structure(sample):
        raise DataError(
            f"{name} holds {join_names(flatten(tree))}; the first one held "
            f"{join_names(flatten(sample))}.",
            fix="the same keys in every batch.",
        )
    for leaf, first in zip(jax.tree.leaves(tree), jax.tree.leaves(sample), strict=True):
        # Dtypes as JAX will have them: float64 on the host is float32 on the devices.
        has_shape = np.shape(leaf)[1:] == first.shape[1:]
        if not has_shape or jax.dtypes.canonicalize_dtype(dtype_of(leaf)) != first.dtype:
            difference = f"{name} holds {describe(leaf)}, the first one {describe(first)}"
            raise DataError(
                f"{difference}: only the number of rows may differ.",
                fix="pad to one shape, or keep one dtype.",
            )


def batch_signature(sample: Tree) -> Any:
    """The leaves of a batch, their shapes and dtypes, for which a program is compiled; hashable."""
    return jax.tree.structure(sample), tuple(
        (leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(sample)
    )


def batch_differences(sample: Tree, trained: Tree) -> list[Problem]:
    """Return the differences of batches from training batches, but for the number of rows."""
    leaves, first = flatten(sample), flatten(trained)
    problems = []
    for path in dict.fromkeys([*leaves, *first]):
        if path not in leaves:
            why = f"is missing; training batches have {describe(first[path])}."
            problems.append(Problem(path or "the array", [why]))
            continue
        leaf = leaves[path]
        where = f"{path}   {describe(leaf)}".strip()
        if path not in first:
            why = "is not in training batches."
            problems.append(Problem(where, [why], path=path or None))
        elif leaf.shape[1:] != first[path].shape[1:] or leaf.dtype != first[path].dtype:
            why = f"is {describe(first[path])} in training batches."
            problems.append(Problem(where, [why], path=path or None))
    return problems


def check_batch(tree: Tree, layout: Layout, mesh: MeshSpec, microbatches: int) -> None:
    """Check a full batch against the layout's batch specs.

    Raises:
      DataError: lists all problems: rows that workers and microbatches do not divide, specs that do
        not fit a leaf.
    """
    rows = check_leaves(tree, "the batch")
    data = layout.data_axes()
    problems = _row_problems(rows, layout, mesh, microbatches)
    divisible = not problems
    leaves, rules = flatten(tree), layout.batch.rules
    matching_rules = rule_matcher(rules)
    matches = {path: matching_rules(path) for path in leaves}
    for path, leaf in leaves.items():
        name = f"{path}   {describe(leaf)}"
        if len(matches[path]) > 1:
            why = f"{len(matches[path])} batch rules match this leaf."
            problems.append(Problem(name, [why], "one rule for it.", path=path, kind="overlap"))
            continue
        spec = layout.batch.spec
        if matches[path]:
            spec = rules[matches[path][0]].spec
        lines = spec_problems(spec, np.shape(leaf), mesh)
        # Rows that do not divide are one problem already, and not one for each leaf.
        if divisible and lines:
            fix = f'add [[batch.rules]]  path = "{path}"  spec = {spec_text(spec[:1])}.'
            problems.append(Problem(f"{name}   spec {spec_text(spec)}", lines, fix, path=path))
        if spec_axes(spec[:1]) != data:
            why = (
                f"its dim 0 is sharded over {spec_text(spec[:1])}, the batch over "
                f"{spec_text(layout.batch.spec[:1])}."
            )
            fix = f"a spec that begins with {spec_text(layout.batch.spec[:1])[1:-1]}."
            problems.append(Problem(name, [why], fix))
    unmatched_rules = set(range(len(rules))).difference(*matches.values())
    for index in sorted(unmatched_rules):
        where = (
            f'[[batch.rules]] {rule_name(rules, index)}: path "{rules[index].path}" matches no '
            "leaf of the batch."
        )
        problems.append(Problem(where, [], f"one of: {', '.join(leaves)}."))
    raise_problems(DataError, f"the batch does not fit {layout.source} on mesh {mesh}", problems)


def _row_problems(rows: int, layout: Layout, mesh: MeshSpec, microbatches: int) -> list[Problem]:
    """Return a problem if workers and microbatches do not divide the rows of a batch."""
    data = layout.data_axes()
    workers = math.prod(mesh.sizes[axis] for axis in data)
    where = ", ".join(f"{axis}={mesh.sizes[axis]}" for axis in data)
    if layout.parameter_server.workers is not None:
        workers, where = layout.parameter_server.workers, "[parameter_server] workers"
    pipeline_microbatches = (layout.pipeline.axis and layout.pipeline.microbatches) or 1
    unit = workers * microbatches * pipeline_microbatches
    if rows % unit == 0:
        return []
    parts = f"{workers} workers ({where})"
    if microbatches > 1:
        parts += f" times {microbatches} microbatches"
    if pipeline_microbatches > 1:
        parts += f" times {pipeline_microbatches} microbatches of the pipeline"
    sizes = sorted({max(unit, rows // unit * unit), -(-rows // unit) * unit})
    why = f"is not divisible by {parts}: {rows} / {unit} leaves {rows % unit}."
    fix = " or ".join(option("batch_size", size) for size in sizes)
    return [Problem(f"batch of {rows} rows", [why], f"{fix}.")]


class Placer:
    """Places host batches on the mesh; a short last batch is padded if `pad`.

    With `pad`, a short batch is filled with copies of its first row, of weight 0, and so uses the
    program that is already compiled. Without (a loss with one number for all rows, or batch
    statistics) it keeps its size, because the padding could not be left out: a second program is
    compiled for it.
    """

    def __init__(
        self,
        mesh: Mesh,
        spec_of: Callable[[str], Spec],
        data_axes: tuple[str, ...],
        rows: int,
        *,
        pad: bool,
        workers: int | None = None,
    ):
        self._mesh, self._spec_of, self._rows, self.pad = mesh, spec_of, rows, pad
        self._row_sharding = NamedSharding(mesh, PartitionSpec(data_axes))
        self.replicated = NamedSharding(mesh, PartitionSpec())
        self._workers = workers or math.prod(mesh.shape[axis] for axis in data_axes)
        # by tree structure: one look-up per batch
        self._shardings: dict[Any, list[NamedSharding]] = {}
        self._weights: dict[tuple[int, int, bool], jax.Array] = {}
        self._many_processes = jax.process_count() > 1
        # On one CPU device the call of the step transfers the rows itself, at half the cost of
        # placing them first. (On an accelerator they are placed ahead of time instead, while it
        # computes.)
        self._call_transfers = (
            mesh.size == 1 and mesh.devices.flat[0].platform == "cpu" and not self._many_processes
        )

    def __call__(self, host: HostBatch) -> Batch:
        """The batch on the mesh; host buffers are copied, so the caller may reuse them
        immediately.
        """
        # the only intended transfer of rows in the loop
        with jax.transfer_guard_host_to_device("allow"):
            try:
                if host.index is None and self._many_processes:
                    return self._place_local(host)
                return self._place_global(host)
            except OutOfRange:
                owner = "the batch"
                if host.index is not None:
                    owner = "the data"
                raise_out_of_range(host.leaves, host.index, owner)

    def local_rows(self) -> np.ndarray | None:
        """int64[n]: the rows of a full batch on the devices of this process, ascending; None (all)
        if there is one process.
        """
        if not self._many_processes:
            return None
        slices = self._row_sharding.addressable_devices_indices_map((self._rows,)).values()
        # Devices along a model axis hold the same rows, so the slices repeat.
        return np.unique(np.concatenate([np.arange(self._rows)[at] for at in slices]))

    def replicate(self, values: np.ndarray) -> jax.Array:
        """A small host array, replicated on the mesh."""
        with jax.transfer_guard_host_to_device("allow"):
            # 9 us per array; jax.device_put with a NamedSharding takes 25 (jax 0.10.2, on a CPU)
            return jax.make_array_from_callback(
                values.shape, self.replicated, lambda at: values[at]
            )

    def replicate_all(self, values: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """`replicate` for several arrays."""
        return {name: self.replicate(value) for name, value in values.items()}

    def allow_row_transfers(self) -> Any:
        """A context for the call of a compiled function: lifts the transfer guard if the call
        transfers the rows itself.
        """
        if self._call_transfers:
            return jax.transfer_guard_host_to_device("allow")
        return contextlib.nullcontext()

    def _place_global(self, host: HostBatch) -> Batch:
        """Rows that every process can read: each reads those of its devices."""
        rows, index, size = host.rows, host.index, host.rows
        if host.weights is not None or (self.pad and rows < self._rows):
            size = self._rows
        split = size % self._workers == 0
        if size > rows and host.weights is None:
            if index is None:
                index = np.arange(rows)
            index = np.concatenate([index, np.repeat(index[:1], size - rows)])
        lacks_rows = host.weights is not None and not host.weights.all()
        if lacks_rows and not self.pad and host.has_rows is None:
            skipped = int((host.weights == 0).sum())
            raise DataError(
                f"{skipped} of the {rows} records of a batch were skipped. "
                "Neither a loss with one number for all "
                "its rows nor batch statistics can leave out the rows in their place.",
                fix="a loss with one value per example and no batch statistics; or intact files.",
            )
        leaves, structure = jax.tree.flatten(host.leaves)
        # a jax.Array may be on another device
        if self._call_transfers and not any(isinstance(leaf, jax.Array) for leaf in leaves):
            placed = [_host_copy(leaf, index) for leaf in leaves]
        else:
            shardings = [self.replicated] * len(leaves)
            if split:
                shardings = self._shardings_of(host.leaves, structure)
            placed = [
                _place(leaf, index, size, sharding)
                for leaf, sharding in zip(leaves, shardings, strict=True)
            ]
        if host.weights is None:
            weights = self.weights(rows, size, split)
        else:
            weights = self._place_weights(host.weights)
        return Batch(
            jax.tree.unflatten(structure, placed),
            weights,
            rows,
            split,
            host.position,
            host.has_rows,
            host.index,
        )

    def _place_local(self, host: HostBatch) -> Batch:
        """Rows that only this process has read: its part of the global batch."""
        size = host.rows * jax.process_count()
        if size != self._rows:
            raise DataError(
                f"this process read {host.rows} rows; with {jax.process_count()} processes and a "
                f"batch of {self._rows} "
                f"it must be {self._rows // jax.process_count()} in every batch.",
                fix="give arrays, which every process can index, or drop the short batch.",
            )
        leaves, structure = jax.tree.flatten(host.leaves)
        placed = []
        shardings = self._shardings_of(host.leaves, structure)
        for leaf, sharding in zip(leaves, shardings, strict=True):
            # Copied by `narrow`: on a CPU, JAX uses an aligned buffer of the host itself.
            rows = narrow(np.asarray(leaf), copy=True)
            shape = (size, *np.shape(leaf)[1:])
            placed.append(jax.make_array_from_process_local_data(sharding, rows, shape))
        return Batch(
            jax.tree.unflatten(structure, placed),
            self.weights(size, size, True),
            size,
            True,
            host.position,
        )

    def _shardings_of(self, tree: Tree, structure: Any) -> list[NamedSharding]:
        if structure not in self._shardings:
            self._shardings[structure] = [
                NamedSharding(self._mesh, pspec(self._spec_of(path))) for path in flatten(tree)
            ]
        return self._shardings[structure]

    def _place_weights(self, values: np.ndarray) -> jax.Array:
        # The weights of full batches are placed once, and kept.
        if values.all():
            return self.weights(len(values), len(values), True)
        # copied: on a CPU, JAX uses an aligned buffer of the host itself
        return jax.make_array_from_callback(
            values.shape, self._row_sharding, lambda at: values[at].copy()
        )

    def weights(self, rows: int, size: int, split: bool) -> jax.Array:
        """float32[size], 1 for the first `rows`; made once per size."""
        key = (rows, size, split)
        if key not in self._weights:
            values = (np.arange(size) < rows).astype(np.float32)
            sharding = self.replicated
            if split:
                sharding = self._row_sharding
            # A copy for each device, for the reason in `_place_weights`.
            self._weights[key] = jax.make_array_from_callback(
                (size,), sharding, lambda at: values[at].copy()
            )
        return self._weights[key]


def _host_copy(leaf: Any, index: np.ndarray | None) -> np.ndarray:
    """The rows `index` of a leaf (None: all), copied on the host."""
    leaf = np.asarray(leaf)
    if index is None:
        return narrow(leaf, copy=True)
    return narrow(leaf[index], copy=False)  # indexing has copied


def _place(leaf: Any, index: np.ndarray | None, size: int, sharding: NamedSharding) -> jax.Array:
    """The rows `index` of a leaf (None: all), copied to the mesh."""
    if isinstance(leaf, jax.Array):  # immutable, and may already be on the mesh
        if index is not None:
            leaf = leaf[index]
        return jax.device_put(leaf, sharding)
    leaf = np.asarray(leaf)

    def shard(at: Any) -> np.ndarray:
        if index is None:
            # copied: on a CPU, JAX uses an aligned buffer of the host itself, and the caller may
            # write into it before the step has read it
            return narrow(leaf[at], copy=True)
        return narrow(leaf[(index[at[0]], *at[1:])], copy=False)  # indexing has copied

    return jax.make_array_from_callback((size, *leaf.shape[1:]), sharding, shard)
