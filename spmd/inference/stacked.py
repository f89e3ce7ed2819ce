"""Several models as one compiled program: equal ones are stacked and sharded over the mesh axis
`net`, others run one after the other.
"""

import dataclasses
import hashlib
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spmd.base.tree import Tree, abstract, describe, flatten
from spmd.base.xla import shard_map
from spmd.data.batches import with_rows
from spmd.errors import EnsembleError, Problem, raise_problems
from spmd.inference.forward import describe_tree, to_host, traced
from spmd.jaxpr.programs import equations, has_convolution

NET = "net"
ROWS = 4  # rows of inputs with which members are traced, to find equal ones


@dataclasses.dataclass(frozen=True)
class Net:
    """A member of an ensemble as a function of its arrays.

    Attributes:
      function: `function(arrays, inputs) -> logits`.
      arrays: leaves [...] of any tree.
      inputs: shapes of its inputs; dim 0 is rows.
      batch: the fixed number of rows that it takes; None: any.
      program: the program's text, the same for equal functions; None: it is found by tracing.
    """

    name: str
    function: Callable[[Any, Tree], Any]
    arrays: Any
    inputs: Tree
    batch: int | None = None
    program: str | None = None


@dataclasses.dataclass(frozen=True)
class Group:
    """Members that are the same function of arrays of the same shapes; if `vectorised`, one call
    computes them all.
    """

    nets: tuple[Net, ...]
    places: tuple[int, ...]
    vectorised: bool


def common_batch(nets: Sequence[Net]) -> int | None:
    """The number of rows that the members take; None: any.

    Raises:
      EnsembleError: they take different inputs, or different fixed numbers of rows.
    """
    fixed = {net.batch for net in nets if net.batch is not None}
    trees = {jax.tree.structure(net.inputs) for net in nets}
    shapes = [_shapes_of_rows(net.inputs) for net in nets]
    differ = any(other != shapes[0] for other in shapes)
    if len(fixed) > 1 or len(trees) > 1 or differ:
        problems = [Problem(net.name, [f"takes {describe_tree(net.inputs)}"]) for net in nets]
        raise_problems(
            EnsembleError,
            "the members of the ensemble take different inputs",
            problems,
            fix="members that were exported for the same inputs, and the same number of rows.",
        )
    return next(iter(fixed), None)


def _shapes_of_rows(inputs: Tree) -> dict[str, tuple[Any, tuple[int, ...]]]:
    """Dtype and shape of one row of each leaf, by path."""
    return {path: (leaf.dtype, leaf.shape[1:]) for path, leaf in flatten(inputs).items()}


def group_members(nets: Sequence[Net], rows: int) -> list[Group]:
    """The members, grouped by those that differ only in their weights.

    Raises:
      EnsembleError: a member does not return logits [rows, ..., classes], or other ones than the
        first.
      ExportError: a member fails on its inputs.
    """
    places_by_program: dict[tuple, list[int]] = {}
    outputs, vectorised = [], []
    for at, net in enumerate(nets):
        inputs = with_rows(net.inputs, rows)
        jaxpr = traced(net.function, net.arrays, inputs)
        outputs.append([describe(out) for out in jaxpr.out_avals])
        plain = False
        if len(jaxpr.out_avals) == 1:
            (logits,) = jaxpr.out_avals
            plain = logits.ndim >= 2 and jnp.issubdtype(logits.dtype, jnp.floating)
        # JAX has no vmap rule for the call of an exported program
        is_exported = net.program is not None
        vectorised.append(not is_exported and not has_convolution(equations(jaxpr.jaxpr)))
        if not plain or outputs[-1] != outputs[0]:
            expected = "expected one array of logits [rows, ..., classes]"
            if plain:
                expected = f"the first returns {outputs[0][0]}"
            returned = ", ".join(outputs[-1])
            raise EnsembleError(
                f"member {net.name} returns {returned} for {rows} rows; {expected}.",
                fix="a model with one row of outputs for each of inputs.",
            )
        # By the text of the program: models with arrays of equal shapes may differ in their code.
        text = net.program or jax.jit(net.function).lower(abstract(net.arrays), inputs).as_text()
        shapes = tuple(describe(leaf) for leaf in jax.tree.leaves(net.arrays))
        program = (hashlib.sha256(text.encode()).hexdigest(), shapes)
        places_by_program.setdefault(program, []).append(at)
    groups = []
    for places in places_by_program.values():
        members = tuple(nets[at] for at in places)
        groups.append(Group(members, tuple(places), vectorised[places[0]]))
    return groups


class Stacked:
    """The program of groups of members on a mesh whose only axis is `net`."""

    def __init__(self, groups: Sequence[Group], mesh: Mesh, combine: str):
        self._groups = groups
        self._mesh = mesh
        self._combine = combine
        self._arrays = [self._placed(group) for group in groups]
        self._order = np.argsort([at for group in groups for at in group.places])
        self._program = jax.jit(self._both, out_shardings=NamedSharding(mesh, PartitionSpec()))

    def __call__(self, inputs: Tree) -> tuple[jax.Array, jax.Array]:
        """Combined probabilities float32[rows, ..., classes], and all logits float32[members, rows,
        ..., classes].
        """
        # jit refuses a jax array that lies on other devices than the members.
        return self._program(self._arrays, jax.tree.map(np.asarray, inputs))

    def text(self, inputs: Tree) -> str:
        """The compiled program."""
        return self._program.lower(self._arrays, inputs).compile().as_text() or ""

    def _placed(self, group: Group) -> Any:
        """The group's arrays on the mesh: each device has those of its members; the arrays of a
        single member are replicated.
        """
        if len(group.nets) == 1:
            return jax.device_put(
                jax.tree.map(to_host, group.nets[0].arrays),
                NamedSharding(self._mesh, PartitionSpec()),
            )
        padding = -len(group.nets) % self._mesh.size  # their outputs are not used
        nets = [*group.nets, *[group.nets[-1]] * padding]
        sharding = NamedSharding(self._mesh, PartitionSpec(NET))

        def stack(*leaves: Any) -> jax.Array:
            return jax.device_put(np.stack([to_host(leaf) for leaf in leaves]), sharding)

        return jax.tree.map(stack, *[net.arrays for net in nets])

    def _both(self, arrays: list, inputs: Tree) -> tuple[jax.Array, jax.Array]:
        by_group = [
            self._logits(group, arrays_of_group, inputs)
            for group, arrays_of_group in zip(self._groups, arrays, strict=True)
        ]
        logits = jnp.concatenate(by_group)[self._order]
        return combined(logits, self._combine), logits

    def _logits(self, group: Group, arrays: Any, inputs: Tree) -> jax.Array:
        def function(member_arrays: Any, inputs: Tree) -> jax.Array:
            return group.nets[0].function(member_arrays, inputs).astype(jnp.float32)

        if len(group.nets) == 1:
            return function(arrays, inputs)[None]

        def logits_of_members(local_arrays: Any, inputs: Tree) -> jax.Array:
            if group.vectorised:
                return jax.vmap(function, in_axes=(0, None))(local_arrays, inputs)
            # vmap would make grouped convolutions, which are slower, and the partitioner gathers
            # them
            logits = []
            for at in range(jax.tree.leaves(local_arrays)[0].shape[0]):
                member_arrays = jax.tree.map(operator.itemgetter(at), local_arrays)
                logits.append(function(member_arrays, inputs))
            return jnp.stack(logits)

        sharded = shard_map(
            logits_of_members,
            mesh=self._mesh,
            in_specs=(PartitionSpec(NET), PartitionSpec()),
            out_specs=PartitionSpec(NET),
        )
        # without those of the padding
        return sharded(arrays, inputs)[: len(group.nets)]


def combined(logits: jax.Array, combine: str) -> jax.Array:
    """Combined probabilities float32[..., classes] of logits [members, ..., classes]."""
    if combine == "logits":
        return jax.nn.softmax(logits.mean(axis=0))
    if combine == "vote":
        choices = logits.argmax(axis=-1)
        votes = jax.nn.one_hot(choices, logits.shape[-1], dtype=jnp.float32)
        return votes.mean(axis=0)
    return jax.nn.softmax(logits).mean(axis=0)


def table(columns: Sequence[str], rows: Mapping[str, Mapping[str, float]]) -> str:
    """A table of numbers by name; missing ones are left blank."""
    name_width = max(map(len, rows), default=0)
    widths = {column: max(len(column), 8) for column in columns}
    titles = [f"{column:>{width}}" for column, width in widths.items()]
    lines = ["  ".join([" " * name_width, *titles])]
    for name, row in rows.items():
        cells = [f"{name:{name_width}}"]
        for column, width in widths.items():
            cell = " " * width
            if column in row:
                cell = f"{row[column]:>{width}.4f}"
            cells.append(cell)
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
