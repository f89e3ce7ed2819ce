"""From a checkpoint whose parameters are packed in one way to a state that has them in another: which array becomes which, and how.

Everything goes by way of the model's own parameters: unpacked as the one parameter server kept them, packed as the other does; without a
server that step falls away. Moments that mirror parameters go the same way. Bits are moved, nothing is computed with them.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spmd.errors import Problem
from spmd.layout.fixes import first_names
from spmd.nn.layer_order import StageOrder
from spmd.tree import Tree, describe, flatten, map_paths
from spmd.wire.param_server.packing import Storage
from spmd.xla import from_bits, to_bits

PARAMS, OPT = "params", "opt"  # of a state, where parameters and what mirrors them are
SAME_STAGES = "the [pipeline] stages and groups that it had"
AS_IT_WAS = "the [parameter_server] placement, servers and mode that it had, on as many positions along the data axes"


@dataclasses.dataclass(frozen=True)
class Unpacked:
    """Parameters as the model has them: in place of a `Storage` where there is no server."""

    like: Tree

    def pack(self, params: Tree) -> Tree:
        """As they are."""
        return params

    def unpack(self, stored: Tree) -> Tree:
        """As they are."""
        return stored


Packing = Storage | StageOrder | Unpacked


def packing_from_meta(saved: Mapping[str, Any] | None, like: Tree) -> Packing:
    """How parameters like these are packed, from what stands in a checkpoint."""
    if saved is None:
        return Unpacked(like)
    if "stages" in saved:
        return StageOrder(like, saved["stages"], saved["groups"], tuple(saved["paths"]))
    return Storage(like, saved["placement"], saved["positions"], saved["servers"])


def packing_meta(packing: Packing) -> dict[str, Any] | None:
    """What stands in a checkpoint of how parameters are packed; where servers do, their own shapes too, which packed arrays do not tell."""
    if isinstance(packing, Unpacked):
        return None
    if isinstance(packing, StageOrder):
        return {"stages": packing.stages, "groups": packing.groups, "paths": list(packing.paths)}
    own = {path: describe(leaf) for path, leaf in flatten(packing.like).items() if leaf.size}
    return {"placement": packing.placement, "servers": packing.servers, "positions": packing.positions, "parameters": own}


def describe_packing(packing: Packing) -> str:
    """How parameters are packed, for a person.

    >>> describe_packing(Storage({}, "sliced", positions=8, servers=5)), describe_packing(Unpacked({}))
    ('packed for a parameter server (placement "sliced", 5 servers, 8 positions)', 'not packed for a parameter server')
    """
    if isinstance(packing, Unpacked):
        return "not packed for a parameter server"
    if isinstance(packing, StageOrder):
        return f"with layers in the order of a circular pipeline ({packing.stages} stages of {packing.groups} groups)"
    numbers = f"{packing.servers} servers, {packing.positions} positions"
    return f'packed for a parameter server (placement "{packing.placement}", {numbers})'


def sharded_over_devices(shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """An array cut over all devices as far as its sizes divide, whatever the mesh's axes: for one that is only to be moved."""
    left, ways = mesh.size, []
    for size in shape:
        ways.append(math.gcd(size, left))
        left //= ways[-1]
    names = [f"dim{number}" for number in range(len(shape))]
    return NamedSharding(Mesh(mesh.devices.reshape(*ways, left), (*names, "copies")), PartitionSpec(*names))


def abstract_from_text(text: str, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """An array that `describe` wrote, to be read cut over the mesh."""
    return jax.ShapeDtypeStruct(parse_shape(text), parse_dtype(text), sharding=sharded_over_devices(parse_shape(text), mesh))


def parse_shape(text: str) -> tuple[int, ...]:
    """The shape in what `describe` wrote.

    >>> parse_shape("float32[512, 10]"), parse_shape("int32[]")
    ((512, 10), ())
    """
    return tuple(int(size) for size in re.findall(r"\d+", text.partition("[")[2]))


def parse_dtype(text: str) -> str:
    """The dtype in what `describe` wrote."""
    return text.partition("[")[0]


class StoredGroup:
    """The parameters that share one stored array: each has its own, or all of a dtype one, where servers keep whole parameters."""

    def __init__(self, packing: Packing, mesh: Mesh):
        self._packing, self._like = packing, (like := packing.like)
        # left to itself the partitioner does the same where it takes a parameter from another's row, and warns of it
        self._one_by_one = None if _apart(packing) else NamedSharding(mesh, PartitionSpec())
        self._stored = jax.eval_shape(self._packing.pack, like)  # a tree of one leaf
        self.shape = jax.tree.leaves(self._stored)[0].shape
        self.leaves = [leaf for leaf in jax.tree.leaves(like) if leaf.size]

    def unpack(self, array: jax.Array) -> list[jax.Array]:
        """The parameters, in the order of `leaves`."""
        tree = self._packing.unpack(jax.tree.map(lambda _: to_bits(array), self._stored))
        leaves = [leaf for leaf in jax.tree.leaves(tree) if leaf.size]
        leaves = [leaf if self._one_by_one is None else lax.with_sharding_constraint(leaf, self._one_by_one) for leaf in leaves]
        return [from_bits(leaf, array.dtype) for leaf in leaves]

    def pack(self, params: list[jax.Array]) -> jax.Array:
        """The stored array of parameters in that order."""
        given, dtype = iter(params), params[0].dtype
        tree = jax.tree.map(lambda leaf: to_bits(next(given) if leaf.size else jnp.zeros(leaf.shape, dtype)), self._like)
        return from_bits(jax.tree.leaves(self._packing.pack(tree))[0], dtype)


def _apart(packing: Packing) -> bool:
    """Whether every parameter has an array of its own."""
    return not isinstance(packing, Storage) or packing.sliced


def _groups(packing: Packing, mesh: Mesh) -> dict[str, tuple[StoredGroup, tuple[str, ...]]]:
    """By path of each stored array that has elements: the parameters in it, and their paths."""
    leaves = {path: leaf for path, leaf in flatten(packing.like).items() if leaf.size}
    if _apart(packing):
        alike = functools.cache(lambda packing: StoredGroup(packing, mesh))  # layers are: they share a compiled program
        own = lambda path, leaf: packing.alone(path, leaf) if isinstance(packing, StageOrder) else dataclasses.replace(packing, like=leaf)
        return {path: (alike(own(path, leaf)), (path,)) for path, leaf in leaves.items()}
    found = {}
    for kind in dict.fromkeys(str(leaf.dtype) for leaf in leaves.values()):
        like = map_paths(lambda _, leaf, kind=kind: leaf if str(leaf.dtype) == kind else None, packing.like)
        found[kind] = (
            StoredGroup(dataclasses.replace(packing, like=like), mesh),
            tuple(path for path, leaf in leaves.items() if str(leaf.dtype) == kind),
        )
    return found


@dataclasses.dataclass(frozen=True)
class _Named:
    """An array of a state that is named after a stored one: what stands before its path, and whether it has its shape."""

    tree: str
    name: str
    fits: bool


def _named(path: str, shape: tuple[int, ...], stored: Mapping[str, tuple[StoredGroup, Any]]) -> _Named | None:
    """As everywhere, an array of the optimizer belongs to the parameter whose path its own ends with."""
    parts = path.split("/")
    tails = ((start, "/".join(parts[start:])) for start in {PARAMS: range(1, 2), OPT: range(1, len(parts))}.get(parts[0], range(0)))
    found = [_Named("/".join(parts[:start]), name, stored[name][0].shape == shape) for start, name in tails if name in stored]
    return next((one for one in found if one.fits), found[0] if found else None)


class Repacking:
    """What is moved where between two packings of one model, known from shapes alone.

    Args:
      saved: dtype and shape of every array of the checkpoint, by path, but for what the exchange remembers.
      wanted: those of the new state (shapes, dtypes, shardings), by path.
    """

    def __init__(self, saved: Mapping[str, str], wanted: Mapping[str, Any], old: Packing, new: Packing, mesh: Mesh):
        self._saved, self._wanted, self._mesh = saved, wanted, mesh
        self._old, self._new = _groups(old, mesh), _groups(new, mesh)
        self._as_it_was = SAME_STAGES if {type(old), type(new)} <= {StageOrder, Unpacked} else AS_IT_WAS
        self._from_plain, self._into_plain = isinstance(old, Unpacked), isinstance(new, Unpacked)
        before = {path: found for path, text in saved.items() if (found := _named(path, parse_shape(text), self._old))}
        after = {path: found for path, leaf in wanted.items() if (found := _named(path, leaf.shape, self._new))}
        alike = [path for path, leaf in wanted.items() if saved.get(path) == describe(leaf)]
        # counts and the like. An array that is named after a parameter and is not one of its kind may be packed in any way.
        self._same = {path for path in alike if not wanted[path].shape or (path not in before and path not in after)}
        mirrors = lambda found: {path: it for path, it in found.items() if it.fits and path not in self._same}
        self._sources, self._targets = mirrors(before), mirrors(after)
        self._odd = {path for found in (before, after) for path, it in found.items() if not it.fits} - self._same

    def problems(self) -> list[Problem]:
        """Arrays without a counterpart, or with one of another dtype."""
        have = {(it.tree, param): path for path, it in self._sources.items() for param in self._old[it.name][1]}
        want = {(it.tree, param): path for path, it in self._targets.items() for param in self._new[it.name][1]}
        kinds = lambda key: (parse_dtype(self._saved[have[key]]), str(self._wanted[want[key]].dtype))
        pairs = {key for key in have.keys() & want.keys() if len(set(kinds(key))) == 1}
        lost = (self._saved.keys() - self._same - self._sources.keys()) | {path for key, path in have.items() if key not in pairs}
        lacking = (self._wanted.keys() - self._same - self._targets.keys()) | {path for key, path in want.items() if key not in pairs}
        found = []
        for path in dict.fromkeys([*self._saved, *self._wanted]):
            before = self._saved[path] if path in lost else "nothing"
            after = describe(self._wanted[path]) if path in lacking else "nothing"
            odd = path in self._odd
            why = [
                f"saved {before}, wanted {after}",
                *(["it has not its parameter's shape: which of its numbers are whose is not known"] if odd else []),
            ]
            found += [Problem(path, why, self._as_it_was if odd else "")] if path in lost | lacking else []
        return found

    def to_read(self) -> dict[str, jax.ShapeDtypeStruct]:
        """How to read the checkpoint: what stays as it is as it is wanted, the rest in its saved shape, cut over the mesh."""
        return {path: self._wanted[path] for path in self._same} | {
            path: abstract_from_text(self._saved[path], self._mesh) for path in self._sources
        }

    def move(self, arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """The wanted arrays, where they are wanted. Those given are taken out of the dict, one by one, and freed."""
        programs: dict[Any, Callable] = {}  # moments move like their parameters

        def run(what: Callable, places: Any, given: Any) -> Any:
            key = (what, tuple(places) if isinstance(places, list) else places)
            return programs.setdefault(key, jax.jit(what, out_shardings=places))(given)

        found = {path: arrays.pop(path) for path in self._same}
        for tree in dict.fromkeys(it.tree for it in self._targets.values()):
            names = {it.name: path for path, it in self._targets.items() if it.tree == tree}
            place = lambda param, leaf, names=names: (
                self._wanted[names[param]].sharding if self._into_plain else sharded_over_devices(leaf.shape, self._mesh)
            )
            params: dict[str, jax.Array] = {}
            for path, name in [(path, it.name) for path, it in self._sources.items() if it.tree == tree]:
                group, paths = self._old[name]
                places = [place(*pair) for pair in zip(paths, group.leaves, strict=True)]
                given = arrays.pop(path)
                params |= zip(paths, [given] if self._from_plain else run(group.unpack, places, given), strict=True)
            for name, path in names.items():
                group, paths = self._new[name]
                given = [params.pop(param) for param in paths]
                found[path] = given[0] if self._into_plain else run(group.pack, self._wanted[path].sharding, given)
        return found


def find_param_mismatches(saved: Mapping[str, str], packed: Mapping[str, Any] | None, old: Packing) -> list[Problem]:
    """Parameters of another model, by the model's own paths and shapes where the checkpoint has them.

    Args:
      saved: dtype and shape of every array of the checkpoint, by path.
      packed: how the checkpoint says that its parameters are packed.
      old: that packing, of this model's parameters.
    """
    given = (packed or {}).get("parameters")
    stored = old.like if given else jax.eval_shape(old.pack, old.like)
    now = {path: describe(leaf) for path, leaf in flatten(stored).items() if leaf.size}
    before = given or {path.removeprefix(f"{PARAMS}/"): text for path, text in saved.items() if path.startswith(f"{PARAMS}/")}
    if given and not _apart(old) and given == now and list(given) != list(now):
        first = next(path for path, other in zip(given, now, strict=True) if path != other)
        why = f"parameters were packed in the order {first_names(list(given))}, and are now in the order {first_names(list(now))}."
        return [Problem(f"{PARAMS}/{first}", [why], "the model's parameters in the order that they had.")]
    return find_mismatches(
        {f"{PARAMS}/{path}": text for path, text in before.items()}, {f"{PARAMS}/{path}": text for path, text in now.items()}
    )


def find_mismatches(saved: Mapping[str, str], wanted: Mapping[str, str], *, served: bool = False) -> list[Problem]:
    """Where two tables of dtypes and shapes differ; `served`: of a parameter server's optimizer, which may be one for each worker."""
    found = []
    for path in [path for path in dict.fromkeys([*saved, *wanted]) if saved.get(path) != wanted.get(path)]:
        both = saved.get(path, "nothing"), wanted.get(path, "nothing")
        one, other = sorted(map(parse_shape, both), key=len)
        of_workers = served and path.startswith(f"{OPT}/") and path in saved and path in wanted and other[1:] == one
        why = [f"saved {both[0]}, wanted {both[1]}", *(["one of them is of every worker by itself"] if of_workers else [])]
        found.append(Problem(path, why, AS_IT_WAS if of_workers else ""))
    return found
