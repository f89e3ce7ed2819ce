"""A model's forward pass as a function of its arrays and inputs, in evaluation mode, without a
mesh.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from spmd.base.tree import Tree, abstract, describe, flatten
from spmd.base.xla import replicate
from spmd.data.batches import check_leaves, with_rows
from spmd.errors import DataError, ExportError, OptionError, SpmdError, first_line
from spmd.models.base import Call, Variables
from spmd.nn.parallel_context import UNSHARDED, parallel_scope
from spmd.train.model_setup import PlacedModel
from spmd.train.precision import cast_variables, compute_dtype
from spmd.train.state import State, check_alive
from spmd.trainer import Trainer


@dataclasses.dataclass(frozen=True)
class Forward:
    """A forward pass.

    Attributes:
      function: `function(arrays, inputs) -> outputs`; `arrays` is a list in the order of `paths`.
      paths: of the model's arrays, such as "params/...".
      arrays: the model's arrays, as the state has them: they may be sharded over a mesh.
      inputs: shapes of the model's inputs; dim 0 is rows.
      stacked: paths of parameters whose dim 0 is layers.
    """

    function: Callable[[list, Tree], Tree]
    paths: tuple[str, ...]
    arrays: list[Any]
    inputs: Tree
    stacked: frozenset[str] = frozenset()

    @property
    def named(self) -> Iterator[tuple[str, Any]]:
        """Path and array."""
        return zip(self.paths, self.arrays, strict=True)


def forward_of(trainer: Trainer, state: State, inputs: Tree = None) -> Forward:
    """The forward pass of a trained model.

    Args:
      inputs: an example of the model's inputs, or their shapes; None: what the loss calls the model
        with.

    Raises:
      ExportError: two arrays have the same path, or the inputs have no rows.
      OptionError: it is not clear what the loss calls the model with, or a step has consumed the
        state.
    """
    check_alive(state)
    placed = trainer.placed
    variables = placed.states.variables(state)
    leaves, tree = jax.tree_util.tree_flatten(variables)
    paths = tuple(flatten(variables))
    if len(paths) != len(leaves):
        raise ExportError(
            f"{len(leaves)} arrays of the model have {len(paths)} paths.",
            fix="no key with a slash in it.",
        )
    dtype = compute_dtype(placed.config.precision)

    def function(arrays: list, inputs: Tree) -> Tree:
        computed = cast_variables(jax.tree.unflatten(tree, arrays), dtype)
        call = Call(training=False, dtype=dtype, products=placed.products)
        with parallel_scope(UNSHARDED):
            return placed.given.bind(computed, call)(inputs)

    if inputs is None:
        inputs = _model_inputs(placed, abstract(variables))
    shapes = abstract(inputs)
    check_leaves(shapes, "the inputs")
    stacks = placed.given.stacks()
    stacked = frozenset(f"{of}/{path}" for path in stacks for of in ("params", "frozen"))
    return Forward(function, paths, leaves, shapes, stacked)


class _CallRecorder:
    """A stand-in for the model in the loss, which records the model's inputs."""

    def __init__(self, model: Any, calls: list[Tree]):
        self._model = model
        self._calls = calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        has_only_modes = all(name in ("train", "training", "deterministic") for name in kwargs)
        inputs = None
        if len(args) == 1 and has_only_modes:
            inputs = abstract(args[0])
        self._calls.append(inputs)
        return self._model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _model_inputs(placed: PlacedModel, variables: Variables) -> Tree:
    """The shapes of the inputs with which the loss calls the model, if they are one array or tree
    with all rows of the batch.
    """
    calls: list[Tree] = []
    fix = "inputs=, an example of the model's inputs, or their shapes."
    if placed.spec.sample is None:
        raise OptionError("the model's inputs are not known before the first batch.", fix=fix)

    def loss(variables: Variables, sample: Tree) -> None:
        model = placed.given.bind(variables, Call(training=False))
        with parallel_scope(UNSHARDED):
            placed.objective.for_training().call(
                _CallRecorder(model, calls), sample, jax.random.key(0)
            )

    try:
        jax.eval_shape(loss, variables, placed.spec.sample)
    except Exception as error:
        raise OptionError(
            f"the model's inputs cannot be found by tracing the loss: {type(error).__name__}.",
            fix=fix,
        ) from error
    how = ""
    if not calls:
        how = "never as model(x)"
    first_leaf = jax.tree.leaves(placed.spec.sample)[0]
    rows = first_leaf.shape[0]
    for call in calls:
        # an empty tree, or None, has no leaf, so none with rows
        firsts = {leaf.shape[:1] for leaf in jax.tree.leaves(call)}
        if firsts != {(rows,)} or flatten(call) != flatten(calls[0]):
            how = f"{len(calls)} times, not always with one array or tree of all rows"
    if how:
        raise OptionError(f"the model's inputs are not clear: the loss calls it {how}.", fix=fix)
    return calls[0]


def to_host(leaf: Any) -> np.ndarray:
    """A full array on the host. If several processes hold shards of it, all of them must call
    this.
    """
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return np.asarray(leaf)
    # numpy cannot read shards of other processes
    if not leaf.is_fully_replicated:
        leaf = replicate(leaf)
    return np.asarray(leaf.addressable_data(0))


def check_inputs(inputs: Tree, shapes: Tree) -> int:
    """The number of rows of inputs that match `shapes` in everything else.

    Raises:
      DataError: another tree, other shapes or dtypes, or no rows; with the actual and the expected
        inputs.
    """
    expected = describe_tree(with_rows(shapes, "rows"))
    # To JAX a list is a tree of numbers, and not an array.
    if isinstance(inputs, list) and not isinstance(shapes, list):
        raise DataError(
            f"the inputs are a list; the model takes {expected}.",
            fix="numpy.asarray(inputs, ...), with that dtype.",
        )
    rows = check_leaves(inputs, "the inputs")
    actual = describe_tree(inputs)
    if jax.tree.structure(inputs) != jax.tree.structure(shapes):
        raise DataError(
            f"the inputs are {actual}; the model takes {expected}, in that kind of tree.",
            fix=f"{expected}.",
        )
    leaves = flatten(inputs)
    for path, shape in flatten(shapes).items():
        fix = ""
        if np.shape(leaves[path])[1:] != shape.shape[1:]:
            fix = "rows of that shape."
        # as jit will see it: float64 is float32 there, unless x64 is on
        elif jax.dtypes.canonicalize_dtype(leaves[path].dtype) != shape.dtype:
            fix = f"astype({str(shape.dtype)!r})."
        if fix:
            raise DataError(f"the inputs are {actual}; the model takes {expected}.", fix=fix)
    if rows == 0:
        raise DataError("the inputs are empty: 0 rows.", fix="at least one row.")
    return rows


def describe_tree(tree: Tree) -> str:
    """Path, dtype and shape of every leaf."""
    leaves = []
    for path, leaf in flatten(tree).items():
        leaves.append(f"{path} {describe(leaf)}".strip())
    return ", ".join(leaves)


def call_in_chunks(
    function: Callable[[Tree], Tree], inputs: Tree, rows: int, *, batch: int | None, most: int
) -> Iterator[Tree]:
    """Call a function on some rows at a time: on `batch` rows if that is fixed, else on all, or on
    `most` if there are more.

    Of several chunks the last is padded with copies of the last row. The outputs have the rows of
    the inputs, without padding.
    """
    size = batch or most
    if batch is None:
        size = max(1, min(size, rows))
    for first in range(0, rows, size):
        count = min(size, rows - first)
        if size == rows:
            yield function(inputs)
            continue
        # Padded, so that the last chunk does not need a program of its own.
        at = np.minimum(np.arange(first, first + size), rows - 1)
        outputs = function(jax.tree.map(lambda x: x[at], inputs))
        if count < size:
            outputs = jax.tree.map(lambda x: x[:count], outputs)
        yield outputs


def concatenated(
    chunks: Iterable[Tree], concatenate: Callable[[list], Any] = np.concatenate
) -> Tree:
    """Chunks of rows, concatenated."""
    first, *others = chunks
    if not others:
        return first
    return jax.tree.map(lambda *leaves: concatenate(list(leaves)), first, *others)


def traced(function: Callable[..., Any], arrays: Iterable[Any], inputs: Tree) -> Any:
    """The jaxpr of a forward pass.

    Raises:
      ExportError: the model fails on these inputs.
    """
    try:
        return jax.make_jaxpr(function)(list(abstract(list(arrays))), inputs)
    except SpmdError:
        raise
    except Exception as error:
        why = f"the model fails on {describe_tree(inputs)}: {first_line(error)}"
        raise ExportError(why, fix="inputs=, an example of the model's inputs.") from error
