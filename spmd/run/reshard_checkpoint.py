"""Restore a checkpoint whose parameters are packed one way into a state that packs them another
way.

Parameters are unpacked to the model's own arrays, then packed for the new layout; without a
parameter server or pipeline either step does nothing. Moments that mirror parameters follow the
same path. Bits are moved, nothing is computed.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spmd.base.tree import Tree, describe, flatten, map_paths
from spmd.base.xla import from_bits, to_bits
from spmd.errors import Problem, join_names
from spmd.layout.fixes import first_names
from spmd.nn.layer_order import StageOrder
from spmd.wire.server.packing import Storage

# The first part of paths in a state: parameters, trained or not, and optimizer state, which mirrors
# them.
PARAMS = "params"
FROZEN = "frozen"
OPT = "opt"
KINDS = 6  # kinds of differences that `mismatch_table` lists
SAME_PIPELINE = "use the [pipeline] stages and groups of the checkpoint"
SAME_SERVER = (
    "use the [parameter_server] placement, servers and mode of the checkpoint, on as many "
    "positions along the data axes"
)


@dataclasses.dataclass(frozen=True)
class Unpacked:
    """Parameters as the model has them, without a parameter server or pipeline."""

    like: Tree

    def pack(self, params: Tree) -> Tree:
        """Return the parameters unchanged."""
        return params

    def unpack(self, stored: Tree) -> Tree:
        """Return the parameters unchanged."""
        return stored


Packing = Storage | StageOrder | Unpacked


def packing_from_meta(saved: Mapping[str, Any] | None, like: Tree) -> Packing:
    """Return the packing of parameters like these, from a checkpoint's metadata."""
    if saved is None:
        return Unpacked(like)
    if "stages" in saved:
        return StageOrder(like, saved["stages"], saved["groups"], tuple(saved["paths"]))
    return Storage(
        like, saved["placement"], saved["positions"], saved["servers"], saved.get("unpacks", False)
    )


def packing_meta(packing: Packing | None) -> dict[str, Any] | None:
    """Return the metadata that describes a packing. With servers it includes the parameters'
    shapes, which packed arrays do not show.
    """
    if packing is None or isinstance(packing, Unpacked):
        return None
    if isinstance(packing, StageOrder):
        return {"stages": packing.stages, "groups": packing.groups, "paths": list(packing.paths)}
    shapes = {path: describe(leaf) for path, leaf in flatten(packing.like).items() if leaf.size}
    meta = {
        "placement": packing.placement,
        "servers": packing.servers,
        "positions": packing.positions,
        "parameters": shapes,
    }
    if packing.unpacks:
        meta["unpacks"] = True
    return meta


def describe_packing(packing: Packing) -> str:
    """Return a packing of parameters as text.

    >>> describe_packing(Storage({}, "sliced", positions=8, servers=5))
    'packed for a parameter server (placement "sliced", 5 servers, 8 positions)'
    >>> describe_packing(Unpacked({}))
    'not packed for a parameter server'
    """
    if isinstance(packing, Unpacked):
        return "not packed for a parameter server"
    if isinstance(packing, StageOrder):
        return (
            f"with layers in the order of a circular pipeline ({packing.stages} stages of "
            f"{packing.groups} groups)"
        )
    numbers = f"{packing.servers} servers, {packing.positions} positions"
    if packing.unpacks:
        numbers += "; the optimizer's state is not"
    return f'packed for a parameter server (placement "{packing.placement}", {numbers})'


def sharded_over_devices(shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """Return a sharding over all devices as far as sizes divide, whatever the mesh's axes, for an
    array that is only to be moved.
    """
    copies = mesh.size
    shards = []
    for size in shape:
        # JAX shards a dim only over a number of devices that divides it.
        count = math.gcd(size, copies)
        shards.append(count)
        copies //= count
    names = [f"dim{number}" for number in range(len(shape))]
    dim_mesh = Mesh(mesh.devices.reshape(*shards, copies), (*names, "copies"))
    return NamedSharding(dim_mesh, PartitionSpec(*names))


def abstract_from_text(text: str, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """Return the array that `describe` wrote as text, sharded over the mesh."""
    shape = parse_shape(text)
    return jax.ShapeDtypeStruct(
        shape, parse_dtype(text), sharding=sharded_over_devices(shape, mesh)
    )


def parse_shape(text: str) -> tuple[int, ...]:
    """Return the shape in a text that `describe` wrote.

    >>> parse_shape("float32[512, 10]"), parse_shape("int32[]")
    ((512, 10), ())
    """
    _, _, sizes = text.partition("[")
    return tuple(int(size) for size in re.findall(r"\d+", sizes))


def parse_dtype(text: str) -> str:
    """Return the dtype in a text that `describe` wrote."""
    dtype, _, _ = text.partition("[")
    return dtype


class StoredGroup:
    """The parameters that share one stored array: a single one, or all of a dtype if servers keep
    unsliced parameters.
    """

    def __init__(self, packing: Packing, mesh: Mesh):
        self._packing = packing
        self._like = packing.like
        self.unpacked = isinstance(packing, Unpacked)
        # To move a parameter from another device's row, XLA's partitioner would replicate it
        # anyway, with a warning.
        self._replicated: NamedSharding | None = None
        if not _has_array_per_param(packing):
            self._replicated = NamedSharding(mesh, PartitionSpec())
        # A tree of one leaf.
        self._stored = jax.eval_shape(packing.pack, packing.like)
        self.shape = jax.tree.leaves(self._stored)[0].shape
        self.leaves = [leaf for leaf in jax.tree.leaves(packing.like) if leaf.size]

    def unpack(self, array: jax.Array) -> list[jax.Array]:
        """Return the parameters, in the order of `leaves`."""
        # As integers: XLA:CPU may change the bits of floats that it only moves (jaxlib 0.10).
        tree = self._packing.unpack(jax.tree.map(lambda _: to_bits(array), self._stored))
        params = []
        for leaf in jax.tree.leaves(tree):
            if not leaf.size:
                continue
            if self._replicated is not None:
                leaf = lax.with_sharding_constraint(leaf, self._replicated)
            params.append(from_bits(leaf, array.dtype))
        return params

    def pack(self, params: list[jax.Array]) -> jax.Array:
        """Return the stored array of the parameters, in the order of `leaves`."""
        params_left = iter(params)
        dtype = params[0].dtype

        def bits_of(leaf: Any) -> jax.Array:
            # A parameter without elements is in no checkpoint.
            if not leaf.size:
                return to_bits(jnp.zeros(leaf.shape, dtype))
            return to_bits(next(params_left))

        tree = jax.tree.map(bits_of, self._like)
        return from_bits(jax.tree.leaves(self._packing.pack(tree))[0], dtype)


# By the path of a stored array: the parameters in it, and their paths.
StoredGroups = Mapping[str, tuple[StoredGroup, tuple[str, ...]]]


def _has_array_per_param(packing: Packing) -> bool:
    """Return whether every parameter is stored in a separate array."""
    return not isinstance(packing, Storage) or packing.sliced


def _opt_packing(packing: Packing) -> Packing:
    """Return the packing of the optimizer's state."""
    if isinstance(packing, Storage) and packing.unpacks:
        return Unpacked(packing.like)
    return packing


def _groups(packing: Packing, mesh: Mesh) -> StoredGroups:
    """Return the parameters in each stored array that has elements, and their paths, by the array's
    path.
    """
    leaves = {path: leaf for path, leaf in flatten(packing.like).items() if leaf.size}
    groups: dict[str, tuple[StoredGroup, tuple[str, ...]]] = {}
    if _has_array_per_param(packing):
        # Equal layers share a group, and its compiled program.
        group_of = functools.cache(lambda packing: StoredGroup(packing, mesh))
        for path, leaf in leaves.items():
            if isinstance(packing, StageOrder):
                leaf_packing = packing.alone(path, leaf)
            else:
                leaf_packing = dataclasses.replace(packing, like=leaf)
            groups[path] = (group_of(leaf_packing), (path,))
        return groups
    for dtype in dict.fromkeys(str(leaf.dtype) for leaf in leaves.values()):
        like = map_paths(
            lambda _, leaf, dtype=dtype: leaf if str(leaf.dtype) == dtype else None, packing.like
        )
        paths = tuple(path for path, leaf in leaves.items() if str(leaf.dtype) == dtype)
        groups[dtype] = (StoredGroup(dataclasses.replace(packing, like=like), mesh), paths)
    return groups


@dataclasses.dataclass(frozen=True)
class _MirroredArray:
    """An array of a state that is named after a stored one: the prefix of its path, what is stored
    there, and whether it has its shape.
    """

    prefix: str
    group: StoredGroup
    params: tuple[str, ...]
    fits: bool


def _mirrored(path: str, shape: tuple[int, ...], stored: StoredGroups) -> _MirroredArray | None:
    """Return the stored array that an array mirrors: an optimizer array belongs to the parameter
    whose path ends its own.
    """
    parts = path.split("/")
    ends = {PARAMS: 2, FROZEN: 2, OPT: len(parts)}
    first_with_name = None
    for start in range(1, ends.get(parts[0], 0)):
        name = "/".join(parts[start:])
        if name not in stored:
            continue
        group, params = stored[name]
        fits = group.shape == shape
        array = _MirroredArray("/".join(parts[:start]), group, params, fits)
        if fits:
            return array
        first_with_name = first_with_name or array
    return first_with_name


def _mirrored_arrays(
    shapes: Mapping[str, tuple[int, ...]], groups: Mapping[str, StoredGroups]
) -> dict[str, _MirroredArray]:
    """Return the arrays that mirror a stored one, by path.

    Args:
      shapes: of all arrays of a state, by path.
      groups: the stored arrays, by the first part of the paths of those that mirror them.
    """
    arrays = {}
    for path, shape in shapes.items():
        kind, _, _ = path.partition("/")
        array = _mirrored(path, shape, groups[kind]) if kind in groups else None
        if array is not None:
            arrays[path] = array
    return arrays


class Repacking:
    """The moves between two packings of one model, planned from shapes alone; none if the packings
    are equal.

    Args:
      saved: dtype and shape of every array of the checkpoint, by path, without communication state.
      target: those of the new state (shapes, dtypes, shardings), by path.
    """

    def __init__(
        self,
        saved: Mapping[str, str],
        target: Mapping[str, Any],
        old: Packing,
        new: Packing,
        mesh: Mesh,
    ):
        self._saved = saved
        self._target = target
        self._mesh = mesh
        self._packings = (old, new)
        opt_packings = (_opt_packing(old), _opt_packing(new))
        self.moves_params = old != new
        moves_opt = opt_packings[0] != opt_packings[1]
        self.is_needed = self.moves_params or moves_opt
        self._same = set(target)
        self._sources: dict[str, _MirroredArray] = {}
        self._targets: dict[str, _MirroredArray] = {}
        if not self.is_needed:
            return
        self._fix = SAME_SERVER
        if {type(old), type(new)} <= {StageOrder, Unpacked}:
            self._fix = SAME_PIPELINE
        # The stored arrays that are moved, by the first part of their paths.
        old_groups: dict[str, StoredGroups] = {}
        new_groups: dict[str, StoredGroups] = {}
        if self.moves_params:
            for kind in (PARAMS, FROZEN):
                old_groups[kind] = _groups(old, mesh)
                new_groups[kind] = _groups(new, mesh)
        if moves_opt:
            old_groups[OPT] = _groups(opt_packings[0], mesh)
            new_groups[OPT] = _groups(opt_packings[1], mesh)
        before = _mirrored_arrays(
            {path: parse_shape(text) for path, text in saved.items()}, old_groups
        )
        after = _mirrored_arrays({path: leaf.shape for path, leaf in target.items()}, new_groups)
        # Counts and the like. An array that is named after a parameter but has another shape may be
        # packed in any way.
        self._same = set()
        for path, leaf in target.items():
            is_mirrored = path in before or path in after
            if saved.get(path) == describe(leaf) and not (leaf.shape and is_mirrored):
                self._same.add(path)
        self._odd: set[str] = set()
        for mirrored, fitting in ((before, self._sources), (after, self._targets)):
            for path, array in mirrored.items():
                if path in self._same:
                    continue
                if array.fits:
                    fitting[path] = array
                else:
                    self._odd.add(path)

    def __str__(self) -> str:
        old, new = map(describe_packing, self._packings)
        return f"parameters were {old}, and are now {new}"

    def problems(self) -> list[Problem]:
        """Return the arrays without a counterpart, or with one of another dtype or, if nothing is
        repacked, of another shape.
        """
        if not self.is_needed:
            described = {path: describe(leaf) for path, leaf in self._target.items()}
            return find_mismatches(
                self._saved, described, served=isinstance(self._packings[0], Storage)
            )
        source_paths = _paths_by_param(self._sources)
        target_paths = _paths_by_param(self._targets)
        lost = self._saved.keys() - self._same - self._sources.keys()
        lacking = self._target.keys() - self._same - self._targets.keys()
        for key in source_paths.keys() | target_paths.keys():
            if key not in target_paths:
                lost.add(source_paths[key])
            elif key not in source_paths:
                lacking.add(target_paths[key])
            else:
                source = source_paths[key]
                target = target_paths[key]
                if parse_dtype(self._saved[source]) != str(self._target[target].dtype):
                    lost.add(source)
                    lacking.add(target)
        problems = []
        for path in dict.fromkeys([*self._saved, *self._target]):
            if path not in lost and path not in lacking:
                continue
            before = self._saved[path] if path in lost else "nothing"
            after = describe(self._target[path]) if path in lacking else "nothing"
            why = [f"saved {before}, wanted {after}"]
            fix = ""
            if path in self._odd:
                why.append(
                    "its shape is not its parameter's, so its elements cannot be assigned to "
                    "parameters"
                )
                fix = self._fix
            problems.append(Problem(path, why, fix))
        return problems

    def to_read(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return how to read the checkpoint: unchanged arrays as in the new state, the others in
        their saved shape, sharded over the mesh.
        """
        arrays = {path: leaf for path, leaf in self._target.items() if path in self._same}
        for path in self._sources:
            arrays[path] = abstract_from_text(self._saved[path], self._mesh)
        return arrays

    def move(self, arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Return the arrays of the new state, placed as there. Arrays are removed from the argument
        one by one and freed.
        """
        # Moments move like their parameters, by the same compiled programs.
        programs: dict[Any, Callable] = {}

        def move_by_program(function: Callable, shardings: Any, argument: Any) -> Any:
            # A list cannot be a key.
            key = (function, tuple(shardings) if isinstance(shardings, list) else shardings)
            if key not in programs:
                programs[key] = jax.jit(function, out_shardings=shardings)
            return programs[key](argument)

        moved = {path: arrays.pop(path) for path in self._same}
        for prefix in dict.fromkeys(array.prefix for array in self._targets.values()):
            sources = _with_prefix(self._sources, prefix)
            targets = _with_prefix(self._targets, prefix)
            # An unpacked parameter is an array of the new state, in its place.
            placed: dict[str, Any] = {}
            for path, array in targets.items():
                if array.group.unpacked:
                    placed |= dict.fromkeys(array.params, self._target[path].sharding)
            params: dict[str, jax.Array] = {}
            for path, array in sources.items():
                shardings = [
                    placed.get(param, sharded_over_devices(leaf.shape, self._mesh))
                    for param, leaf in zip(array.params, array.group.leaves, strict=True)
                ]
                stored = arrays.pop(path)
                if array.group.unpacked:
                    params |= zip(array.params, [stored], strict=True)
                else:
                    unpacked = move_by_program(array.group.unpack, shardings, stored)
                    params |= zip(array.params, unpacked, strict=True)
                    # Freed one by one below.
                    del unpacked
            for path, array in targets.items():
                group_params = [params.pop(param) for param in array.params]
                if array.group.unpacked:
                    moved[path] = group_params[0]
                else:
                    sharding = self._target[path].sharding
                    moved[path] = move_by_program(array.group.pack, sharding, group_params)
        return moved


def _paths_by_param(arrays: Mapping[str, _MirroredArray]) -> dict[tuple[str, str], str]:
    """Return the path of the array that has each parameter, by the array's prefix and the
    parameter.
    """
    paths = {}
    for path, array in arrays.items():
        for param in array.params:
            paths[array.prefix, param] = path
    return paths


def _with_prefix(arrays: Mapping[str, _MirroredArray], prefix: str) -> dict[str, _MirroredArray]:
    """Return the arrays whose paths begin with a prefix."""
    return {path: array for path, array in arrays.items() if array.prefix == prefix}


def find_param_mismatches(
    saved: Mapping[str, str],
    packed: Mapping[str, Any] | None,
    old: Packing,
    frozen: Collection[str],
) -> list[Problem]:
    """Return the parameters that do not match the model, by the model's own paths and shapes if the
    checkpoint has them.

    Args:
      saved: dtype and shape of every array of the checkpoint, by path.
      packed: the packing in the checkpoint's metadata.
      old: that packing, applied to this model's parameters.
      frozen: paths of arrays of parameters that are not trained.
    """

    def in_state(arrays: Mapping[str, str]) -> dict[str, str]:
        """Return a table by the paths in a state."""
        table = {}
        for path, text in arrays.items():
            kind = FROZEN if path in frozen else PARAMS
            table[f"{kind}/{path}"] = text
        return table

    saved_params = (packed or {}).get("parameters")
    stored = old.like if saved_params else jax.eval_shape(old.pack, old.like)
    now = {path: describe(leaf) for path, leaf in flatten(stored).items() if leaf.size}
    if saved_params:
        # Servers that keep parameters in one array have them one after the other in this order.
        in_one_array = not _has_array_per_param(old)
        if in_one_array and saved_params == now and list(saved_params) != list(now):
            return [_order_problem(list(saved_params), list(now))]
        return find_mismatches(in_state(saved_params), in_state(now))
    # A parameter server packs no frozen parameters.
    kinds = (PARAMS, FROZEN) if frozen and not isinstance(old, Storage) else (PARAMS,)
    before = {}
    for path, text in saved.items():
        kind, _, param = path.partition("/")
        if kind in kinds:
            before[param] = text
    return find_mismatches(in_state(before), in_state(now))


def _order_problem(saved: list[str], now: list[str]) -> Problem:
    """Return the problem of parameters that were packed in another order."""
    first = next(path for path, other in zip(saved, now, strict=True) if path != other)
    why = (
        f"parameters were packed in the order {first_names(saved)}, and are now in the order "
        f"{first_names(now)}."
    )
    fix = "keep the model's parameters in the order of the checkpoint."
    return Problem(f"{PARAMS}/{first}", [why], fix)


def find_mismatches(
    saved: Mapping[str, str], target: Mapping[str, str], *, served: bool = False
) -> list[Problem]:
    """Return the differences between two tables of dtypes and shapes; `served`: a parameter
    server's optimizer state may exist once per worker.
    """
    problems = []
    for path in dict.fromkeys([*saved, *target]):
        if saved.get(path) == target.get(path):
            continue
        before = saved.get(path, "nothing")
        after = target.get(path, "nothing")
        why = [f"saved {before}, wanted {after}"]
        fix = ""
        if served and path.startswith(f"{OPT}/") and path in saved and path in target:
            shorter, longer = sorted(map(parse_shape, (before, after)), key=len)
            if longer[1:] == shorter:
                why.append("one of them has an entry for each worker")
                fix = SAME_SERVER
        problems.append(Problem(path, why, fix))
    return problems


def mismatch_table(headline: str, problems: Sequence[Problem], note: str = "") -> str:
    """Return the headline and one line for each kind of difference between two models, with the
    arrays that have it by pattern: their layers and moments repeat it.

    >>> layers = [Problem(f"params/{i}/bias", ["saved f32[4], wanted f32[8]"]) for i in range(90)]
    >>> print(mismatch_table("it does not fit", layers, "3 arrays fit"))
    it does not fit
    90 problems (3 arrays fit):
      90 arrays saved f32[4], wanted f32[8]: params/*/bias
    """
    if note:
        note = f" ({note})"
    lines = [headline, f"{len(problems)} problems{note}:"]
    paths: dict[str, list[str]] = {}
    for problem in problems:
        paths.setdefault(" ".join(problem.why), []).append(problem.where)
    by_count = sorted(paths.items(), key=lambda item: -len(item[1]))
    for why, alike in by_count[:KINDS]:
        patterns = dict.fromkeys(re.sub(r"\d+", "*", path) for path in alike)
        noun = "array" if len(alike) == 1 else "arrays"
        lines.append(f"  {len(alike)} {noun} {why}: {join_names(patterns, 4)}")
    others = sum(len(alike) for _, alike in by_count[KINDS:])
    if others:
        lines.append(f"  and {others} arrays with {len(by_count) - KINDS} other differences")
    return "\n".join(lines)
