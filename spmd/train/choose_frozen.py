"""The parameters of a model that a layout's `[train]` and `[[adapters]]` do not train, and how
they are stored.
"""

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import jax.numpy as jnp

from spmd.base.path_match import match_all
from spmd.errors import CheckpointError, LayoutError, Problem, raise_problems
from spmd.layout.fixes import first_names, path_fix
from spmd.layout.schema import Layout
from spmd.layout.trained import Train
from spmd.models.base import Model
from spmd.models.flax_nnx import NnxModel
from spmd.models.frozen import Frozen
from spmd.models.quantized import KINDS, block_problem


def with_adapters(model: Model, layout: Layout, seed: Any) -> Model:
    """Return the model with the layout's adapters, drawn from a key of `seed`.

    Raises:
      LayoutError: as `add_adapters`; or the model is not one of flax nnx.
    """
    if not layout.adapters:
        return model
    if not isinstance(model, NnxModel):
        raise LayoutError(
            f"{layout.source}: [[adapters]] are for layers of flax nnx (nnx.Linear), and the model "
            "is of another library.",
            fix="leave them out, or an nnx.Module.",
        )
    return model.with_adapters(layout.adapters, seed)


def choose_frozen(layout: Layout, model: Model, params: Mapping[str, Any]) -> Frozen:
    """Return the parameters of a model with adapters that are not trained. Matrices are stored in
    fewer bits if the layout says so; quantized ones only if they are kernels of `nnx.Linear`.

    Args:
      params: shapes and dtypes of all parameters, by path.

    Raises:
      LayoutError: patterns that match nothing, nothing is trained, or nothing frozen where the
        layout says how, or blocks do not divide.
    """
    train, adapters = layout.train, model.adapters()
    base = [path for path in params if path not in adapters]
    matches = match_all((*train.include, *train.exclude), base)
    trained: set[str] = set()
    # with adapters, all other parameters are frozen unless patterns include them
    if not train.include and not adapters:
        trained.update(base)
    for pattern in train.include:
        trained.update(matches[pattern])
    for pattern in train.exclude:
        trained.difference_update(matches[pattern])
    frozen = frozenset(base) - trained
    low_bit_shapes = {}
    if train.frozen is not None:
        leaves = {path: leaf for path, leaf in params.items() if path in frozen}
        low_bit_shapes = _low_bit_shapes(train, model, leaves)
    problems = list(_trained_problems(train, matches, base, trained, adapters))
    problems = problems or list(_frozen_problems(train, low_bit_shapes))
    raise_problems(LayoutError, f"{layout.source}: [train] does not fit this model", problems)
    return Frozen(frozen, train.frozen, train.block, frozenset(low_bit_shapes))


def _low_bit_shapes(
    train: Train, model: Model, frozen: Mapping[str, Any]
) -> Mapping[str, tuple[int, ...]]:
    """Return the shapes of the frozen parameters that are stored in fewer bits, by path."""
    stacks, kernels = model.stacks(), model.kernels()
    shapes = {}
    for path, leaf in frozen.items():
        # dim 0 of a stack is that of its layers
        is_matrix = len(leaf.shape) - (path in stacks) >= 2
        may_be_stored = path in kernels or train.frozen not in KINDS
        if is_matrix and may_be_stored and jnp.issubdtype(leaf.dtype, jnp.floating):
            shapes[path] = leaf.shape
    return shapes


def _trained_problems(
    train: Train,
    matches: Mapping[str, list[str]],
    base: list[str],
    trained: Collection[str],
    adapters: Collection[str],
) -> Iterator[Problem]:
    """Yield the problems of the choice of trained parameters."""
    unmatched = False
    for key in ("include", "exclude"):
        for pattern in getattr(train, key):
            if not matches[pattern]:
                unmatched = True
                yield Problem(
                    f'[train] {key}: "{pattern}" matches no parameter.',
                    [],
                    path_fix(pattern, base),
                    kind="no_match",
                )
    if unmatched or not base:
        return
    if not trained and not adapters:
        why = f"exclude leaves none of the {len(base)} parameters to train."
        yield Problem(
            "[train]", [why], f"patterns that leave some of {first_names(base)}.", kind="conflict"
        )
    if train.frozen is not None and len(trained) == len(base):
        why = f"all {len(base)} parameters are trained, so none is kept in {train.frozen}."
        yield Problem(
            "[train] frozen",
            [why],
            "leave it out, or say with include what is trained.",
            kind="unread_key",
        )


def _frozen_problems(train: Train, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Problem]:
    """Yield the problems of how the others are stored."""
    if train.frozen is None:
        return
    quantized = train.frozen in KINDS
    if not shapes:
        why = "no frozen parameter is a matrix."
        fix = "leave it out."
        if quantized:
            why = "no frozen parameter is a kernel of an nnx.Linear, and only those are quantized."
            fix = 'leave it out, or "bfloat16".'
        yield Problem("[train] frozen", [why], fix, kind="unread_key")
    if not quantized:
        return
    paths_by_problem: dict[tuple[str, str], list[str]] = {}
    for path, shape in shapes.items():
        problem = block_problem(shape[-2:], str(train.frozen), train.block)
        if problem:
            paths_by_problem.setdefault(problem, []).append(path)
    for (why, fix), paths in paths_by_problem.items():
        yield Problem(
            f"[train] block   {first_names(paths)}",
            [why],
            f"[train] {fix}",
            path=paths[0],
            kind="not_divisible",
        )


def check_same_trained(saved: Layout, now: Layout, step: int) -> None:
    """Refuse another `[train]` or other `[[adapters]]` than those under which the checkpoint of a
    step was written.

    Raises:
      CheckpointError: names every key that differs. An adapter's alpha, too, decides what a model
        computes.
    """
    fix = "the tables that the run began with, or another folder for a new run."
    problems = []
    if len(saved.adapters) != len(now.adapters):
        why = f"saved {len(saved.adapters)}, now {len(now.adapters)}"
        problems.append(Problem("[[adapters]]", [why], fix))
    tables: list[tuple[str, Any, Any]] = [("[train]", saved.train, now.train)]
    pairs = zip(saved.adapters, now.adapters, strict=False)
    for number, (before, after) in enumerate(pairs, 1):
        tables.append((f"[[adapters]] rule {number}", before, after))
    for where, before, after in tables:
        lines = _changes(before, after)
        if lines:
            problems.append(Problem(where, lines, fix))
    headline = f"step {step} was saved with other adapters, or with other parameters trained"
    raise_problems(CheckpointError, headline, problems)


def _changes(before: Any, after: Any) -> list[str]:
    """Return a line for each key in which two tables differ."""
    lines = []
    for field in dataclasses.fields(before):
        old, new = getattr(before, field.name), getattr(after, field.name)
        if field.compare and old != new:
            lines.append(f"{field.name.rstrip('_')} was {old}, is {new}")
    return lines
