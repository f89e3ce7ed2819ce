"""Restores a checkpoint whose parameters are packed one way into a state that packs them another
way.

Parameters are unpacked to the model's own arrays, then packed for the new layout; without a
parameter server or pipeline either step does nothing. Moments that mirror parameters follow the
same path. Bits are moved, nothing is computed.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spmd.errors import Problem
from spmd.layout.fixes import first_names
from spmd.nn.layer_order import StageOrder
from spmd.sync.param_server.packing import Storage
from spmd.tree import Tree, describe, flatten, map_paths
from spmd.xla import from_bits, to_bits

PARAMS, FROZEN, OPT = (
    "params",
    "frozen",
    "opt",
)  # path prefixes in a state: parameters, trained or not, and optimizer state that mirrors them
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
        """Unchanged."""
        return params

    def unpack(self, stored: Tree) -> Tree:
        """Unchanged."""
        return stored


Packing = Storage | StageOrder | Unpacked


def packing_from_meta(saved: Mapping[str, Any] | None, like: Tree) -> Packing:
    """How parameters like these are packed, from a checkpoint's metadata."""
    if saved is None:
        return Unpacked(like)
    if "stages" in saved:
        return StageOrder(like, saved["stages"], saved["groups"], tuple(saved["paths"]))
    return Storage(
        like, saved["placement"], saved["positions"], saved["servers"], saved.get("unpacks", False)
    )


def packing_meta(packing: Packing) -> dict[str, Any] | None:
    """The metadata that describes a packing. With servers it includes the parameters' shapes, which
    packed arrays do not show.
    """
    if isinstance(packing, Unpacked):
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
    return meta | ({"unpacks": True} if packing.unpacks else {})


def describe_packing(packing: Packing) -> str:
    """How parameters are packed, as text.

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
    numbers = f"{packing.servers} servers, {packing.positions} positions" + (
        "; the optimizer's state is not" if packing.unpacks else ""
    )
    return f'packed for a parameter server (placement "{packing.placement}", {numbers})'


def sharded_over_devices(shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """A sharding over all devices as far as sizes divide, whatever the mesh's axes, for an array
    that is only to be moved.
    """
    left, shards = mesh.size, []
    for size in shape:
        shards.append(math.gcd(size, left))
        left //= shards[-1]
    names = [f"dim{number}" for number in range(len(shape))]
    return NamedSharding(
        Mesh(mesh.devices.reshape(*shards, left), (*names, "copies")), PartitionSpec(*names)
    )


def abstract_from_text(text: str, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """The array that `describe` wrote as text, sharded over the mesh."""
    return jax.ShapeDtypeStruct(
        parse_shape(text), parse_dtype(text), sharding=sharded_over_devices(parse_shape(text), mesh)
    )


def parse_shape(text: str) -> tuple[int, ...]:
    """The shape in a text that `describe` wrote.

    >>> parse_shape("float32[512, 10]"), parse_shape("int32[]")
    ((512, 10), ())
    """
    return tuple(int(size) for size in re.findall(r"\d+", text.partition("[")[2]))


def parse_dtype(text: str) -> str:
    """The dtype in a text that `describe` wrote."""
    return text.partition("[")[0]


class StoredGroup:
    """The parameters that share one stored array: a single one, or all of a dtype if servers keep
    unsliced parameters.
    """

    def __init__(self, packing: Packing, mesh: Mesh):
        self._packing, self._like = packing, (like := packing.like)
        self.unpacked = isinstance(packing, Unpacked)
        # the partitioner would replicate anyway to take a parameter from another device's row, with
        # a warning
        self._replicated = (
            None if _has_array_per_param(packing) else NamedSharding(mesh, PartitionSpec())
        )
        self._stored = jax.eval_shape(self._packing.pack, like)  # a tree of one leaf
        self.shape = jax.tree.leaves(self._stored)[0].shape
        self.leaves = [leaf for leaf in jax.tree.leaves(like) if leaf.size]

    def unpack(self, array: jax.Array) -> list[jax.Array]:
        """The parameters, in the order of `leaves`."""
        tree = self._packing.unpack(jax.tree.map(lambda _: to_bits(array), self._stored))
        leaves = [leaf for leaf in jax.tree.leaves(tree) if leaf.size]
        leaves = [
            leaf
            if self._replicated is None
            else lax.with_sharding_constraint(leaf, self._replicated)
            for leaf in leaves
        ]
        return [from_bits(leaf, array.dtype) for leaf in leaves]

    def pack(self, params: list[jax.Array]) -> jax.Array:
        """The stored array of the parameters, in the order of `leaves`."""
        params_left, dtype = iter(params), params[0].dtype
        tree = jax.tree.map(
            lambda leaf: to_bits(next(params_left) if leaf.size else jnp.zeros(leaf.shape, dtype)),
            self._like,
        )
        return from_bits(jax.tree.leaves(self._packing.pack(tree))[0], dtype)


def _has_array_per_param(packing: Packing) -> bool:
    """Whether every parameter is stored in a separate array."""
    return not isinstance(packing, Storage) or packing.sliced


def _as_optimized(packing: Packing) -> Packing:
    """How the optimizer's state is packed."""
    return Unpacked(packing.like) if isinstance(packing, Storage) and packing.unpacks else packing


def _groups(packing: Packing, mesh: Mesh) -> dict[str, tuple[StoredGroup, tuple[str, ...]]]:
    """The parameters in each stored array that has elements, and their paths, by the array's
    path.
    """
    leaves = {path: leaf for path, leaf in flatten(packing.like).items() if leaf.size}
    if _has_array_per_param(packing):
        # equal layers share a group, and its compiled program
        group_of = functools.cache(lambda packing: StoredGroup(packing, mesh))

        def packing_of_leaf(path: str, leaf: Any) -> Packing:
            return (
                packing.alone(path, leaf)
                if isinstance(packing, StageOrder)
                else dataclasses.replace(packing, like=leaf)
            )

        return {
            path: (group_of(packing_of_leaf(path, leaf)), (path,)) for path, leaf in leaves.items()
        }
    groups = {}
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


def _mirrored(
    path: str, shape: tuple[int, ...], stored: Mapping[str, tuple[StoredGroup, tuple[str, ...]]]
) -> _MirroredArray | None:
    """The stored array that an array mirrors: an optimizer array belongs to the parameter whose
    path ends its own.
    """
    parts = path.split("/")
    tails = (
        (start, "/".join(parts[start:]))
        for start in {PARAMS: range(1, 2), FROZEN: range(1, 2), OPT: range(1, len(parts))}.get(
            parts[0], range(0)
        )
    )
    found = [(start, *stored[name]) for start, name in tails if name in stored]
    candidates = [
        _MirroredArray("/".join(parts[:start]), group, params, group.shape == shape)
        for start, group, params in found
    ]
    return next(
        (array for array in candidates if array.fits), candidates[0] if candidates else None
    )


class Repacking:
    """The moves between two packings of one model, planned from shapes alone; none if the packings
    are equal.

    Args:
      saved: dtype and shape of every array of the checkpoint, by path, without communication state.
      wanted: those of the new state (shapes, dtypes, shardings), by path.
    """

    def __init__(
        self,
        saved: Mapping[str, str],
        wanted: Mapping[str, Any],
        old: Packing,
        new: Packing,
        mesh: Mesh,
    ):
        self._saved, self._wanted, self._mesh, self._packings = saved, wanted, mesh, (old, new)
        of_opt = _as_optimized(old), _as_optimized(new)
        self.moves_params = old != new
        self.is_needed = self.moves_params or of_opt[0] != of_opt[1]
        self._same, self._sources, self._targets = set(wanted), {}, {}
        if not self.is_needed:
            return
        self._fix = (
            SAME_PIPELINE if {type(old), type(new)} <= {StageOrder, Unpacked} else SAME_SERVER
        )
        pairs = {kind: of_opt if kind == OPT else (old, new) for kind in (PARAMS, FROZEN, OPT)}
        moved = {
            kind: [_groups(packing, mesh) for packing in pair]
            for kind, pair in pairs.items()
            if pair[0] != pair[1]
        }

        def mirrored(path: str, shape: tuple[int, ...], after: bool) -> _MirroredArray | None:
            kind = path.partition("/")[0]
            return _mirrored(path, shape, moved[kind][after]) if kind in moved else None

        before = {
            path: array
            for path, text in saved.items()
            if (array := mirrored(path, parse_shape(text), False))
        }
        after = {
            path: array
            for path, leaf in wanted.items()
            if (array := mirrored(path, leaf.shape, True))
        }
        equal = [path for path, leaf in wanted.items() if saved.get(path) == describe(leaf)]
        # counts and the like. An array that is named after a parameter but has another shape may be
        # packed in any way.
        self._same = {
            path
            for path in equal
            if not wanted[path].shape or (path not in before and path not in after)
        }
        self._sources, self._targets = (
            {path: array for path, array in arrays.items() if array.fits and path not in self._same}
            for arrays in (before, after)
        )
        self._odd = {
            path for arrays in (before, after) for path, array in arrays.items() if not array.fits
        } - self._same

    def __str__(self) -> str:
        old, new = map(describe_packing, self._packings)
        return f"parameters were {old}, and are now {new}"

    def problems(self) -> list[Problem]:
        """Arrays without a counterpart, or with one of another dtype or, if nothing is repacked, of
        another shape.
        """
        if not self.is_needed:
            wanted = {path: describe(leaf) for path, leaf in self._wanted.items()}
            return find_mismatches(
                self._saved, wanted, served=isinstance(self._packings[0], Storage)
            )
        have = {
            (array.prefix, param): path
            for path, array in self._sources.items()
            for param in array.params
        }
        want = {
            (array.prefix, param): path
            for path, array in self._targets.items()
            for param in array.params
        }
        pairs = {
            key
            for key in have.keys() & want.keys()
            if parse_dtype(self._saved[have[key]]) == str(self._wanted[want[key]].dtype)
        }
        lost = (self._saved.keys() - self._same - self._sources.keys()) | {
            path for key, path in have.items() if key not in pairs
        }
        lacking = (self._wanted.keys() - self._same - self._targets.keys()) | {
            path for key, path in want.items() if key not in pairs
        }
        problems = []
        for path in dict.fromkeys([*self._saved, *self._wanted]):
            before = self._saved[path] if path in lost else "nothing"
            after = describe(self._wanted[path]) if path in lacking else "nothing"
            odd = path in self._odd
            why = [f"saved {before}, wanted {after}"]
            why += (
                [
                    "its shape is not its parameter's, so its elements cannot be assigned to "
                    "parameters"
                ]
                if odd
                else []
            )
            problems += (
                [Problem(path, why, self._fix if odd else "")] if path in lost | lacking else []
            )
        return problems

    def to_read(self) -> dict[str, jax.ShapeDtypeStruct]:
        """How to read the checkpoint: unchanged arrays as wanted, the others in their saved shape,
        sharded over the mesh.
        """
        unchanged = {path: leaf for path, leaf in self._wanted.items() if path in self._same}
        return unchanged | {
            path: abstract_from_text(self._saved[path], self._mesh) for path in self._sources
        }

    def move(self, arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """The wanted arrays, placed as wanted. Arrays are removed from the dict one by one and
        freed.
        """
        programs: dict[Any, Callable] = {}  # moments move like their parameters

        def run(function: Callable, shardings: Any, argument: Any) -> Any:
            key = (function, tuple(shardings) if isinstance(shardings, list) else shardings)
            return programs.setdefault(key, jax.jit(function, out_shardings=shardings))(argument)

        moved = {path: arrays.pop(path) for path in self._same}
        for prefix in dict.fromkeys(array.prefix for array in self._targets.values()):
            targets = {
                path: array for path, array in self._targets.items() if array.prefix == prefix
            }
            placed = {
                param: self._wanted[path].sharding
                for path, array in targets.items()
                if array.group.unpacked
                for param in array.params
            }
            params: dict[str, jax.Array] = {}
            for path, array in [
                (path, array) for path, array in self._sources.items() if array.prefix == prefix
            ]:
                shardings = [
                    placed.get(param, sharded_over_devices(leaf.shape, self._mesh))
                    for param, leaf in zip(array.params, array.group.leaves, strict=True)
                ]
                stored, group = arrays.pop(path), array.group
                params |= zip(
                    array.params,
                    [stored] if group.unpacked else run(group.unpack, shardings, stored),
                    strict=True,
                )
            for path, array in targets.items():
                unpacked = [params.pop(param) for param in array.params]
                moved[path] = (
                    unpacked[0]
                    if array.group.unpacked
                    else run(array.group.pack, self._wanted[path].sharding, unpacked)
                )
        return moved


def find_param_mismatches(
    saved: Mapping[str, str],
    packed: Mapping[str, Any] | None,
    old: Packing,
    frozen: Collection[str],
) -> list[Problem]:
    """Parameters that do not match the model, by the model's own paths and shapes if the checkpoint
    has them.

    Args:
      saved: dtype and shape of every array of the checkpoint, by path.
      packed: the packing in the checkpoint's metadata.
      old: that packing, applied to this model's parameters.
      frozen: paths of arrays of parameters that are not trained.
    """

    def named(path: str) -> str:
        return f"{FROZEN if path in frozen else PARAMS}/{path}"

    saved_params = (packed or {}).get("parameters")
    stored = old.like if saved_params else jax.eval_shape(old.pack, old.like)
    now = {path: describe(leaf) for path, leaf in flatten(stored).items() if leaf.size}
    of_model = (PARAMS, FROZEN) if frozen and not isinstance(old, Storage) else (PARAMS,)
    before = saved_params or {
        path.partition("/")[2]: text
        for path, text in saved.items()
        if path.partition("/")[0] in of_model
    }
    if (
        saved_params
        and not _has_array_per_param(old)
        and saved_params == now
        and list(saved_params) != list(now)
    ):
        first = next(path for path, other in zip(saved_params, now, strict=True) if path != other)
        why = (
            f"parameters were packed in the order {first_names(list(saved_params))}, and are now "
            f"in the order {first_names(list(now))}."
        )
        return [
            Problem(
                f"{PARAMS}/{first}",
                [why],
                "keep the model's parameters in the order of the checkpoint.",
            )
        ]
    return find_mismatches(
        {named(path): text for path, text in before.items()},
        {named(path): text for path, text in now.items()},
    )


def find_mismatches(
    saved: Mapping[str, str], wanted: Mapping[str, str], *, served: bool = False
) -> list[Problem]:
    """Differences between two tables of dtypes and shapes; `served`: a parameter server's optimizer
    state may exist once per worker.
    """
    problems = []
    for path in [
        path for path in dict.fromkeys([*saved, *wanted]) if saved.get(path) != wanted.get(path)
    ]:
        before, after = saved.get(path, "nothing"), wanted.get(path, "nothing")
        shorter, longer = sorted(map(parse_shape, (before, after)), key=len)
        of_workers = (
            served
            and path.startswith(f"{OPT}/")
            and path in saved
            and path in wanted
            and longer[1:] == shorter
        )
        why = [
            f"saved {before}, wanted {after}",
            *(["one of them has an entry for each worker"] if of_workers else []),
        ]
        problems.append(Problem(path, why, SAME_SERVER if of_workers else ""))
    return problems
