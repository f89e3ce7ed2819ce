"""Which parameters of a model a layout's `[train]` and `[[adapters]]` do not train, and how those
are kept.
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
    """The model with the layout's adapters, drawn from a key of `seed`.

    Raises:
      LayoutError: as `add_adapters`; or the model is not one of flax nnx.
    """
    if not layout.adapters:
        return model
    if not isinstance(model, NnxModel):
        why = (
            f"{layout.source}: [[adapters]] are for layers of flax nnx (nnx.Linear), and the model "
            "is of another library."
        )
        raise LayoutError(why, fix="leave them out, or an nnx.Module.")
    return model.with_adapters(layout.adapters, seed)


def choose_frozen(layout: Layout, model: Model, params: Mapping[str, Any]) -> Frozen:
    """What is not trained of a model with its adapters. In fewer bits are kept matrices; if
    quantized, kernels of `nnx.Linear` alone.

    Args:
      params: shapes and dtypes of all parameters, by path.

    Raises:
      LayoutError: patterns that match nothing, nothing is trained, or nothing frozen where the
        layout says how, or blocks do not divide.
    """
    train, adapters = layout.train, model.adapters()
    base = [path for path in params if path not in adapters]
    found = match_all((*train.include, *train.exclude), base)
    included = {path for pattern in train.include for path in found[pattern]}
    if not train.include and not adapters:
        included = set(base)
    trained = included - {path for pattern in train.exclude for path in found[pattern]}
    paths, quantized = frozenset(base) - trained, train.frozen in KINDS
    stacks, kernels = model.stacks(), model.kernels()
    lower = {
        path: params[path].shape
        for path in params
        if path in paths
        and jnp.issubdtype(params[path].dtype, jnp.floating)
        and len(params[path].shape) - (path in stacks) >= 2
        if train.frozen is not None and (path in kernels or not quantized)
    }
    problems = list(_problems(train, found, base, trained, adapters)) or list(
        _problems_of_kept(train, lower)
    )
    raise_problems(LayoutError, f"{layout.source}: [train] does not fit this model", problems)
    return Frozen(paths, train.frozen, train.block, frozenset(lower))


def _problems(
    train: Train,
    found: Mapping[str, list[str]],
    base: list[str],
    trained: Collection[str],
    adapters: Collection[str],
) -> Iterator[Problem]:
    """Of what is trained."""
    unmatched = False
    for key in ("include", "exclude"):
        for pattern in getattr(train, key):
            if not found[pattern]:
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


def _problems_of_kept(train: Train, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Problem]:
    """Of how the others are kept."""
    quantized = train.frozen in KINDS
    if train.frozen is not None and not shapes:
        what = (
            "a kernel of an nnx.Linear, and only those are quantized" if quantized else "a matrix"
        )
        fix = 'leave it out, or "bfloat16".' if quantized else "leave it out."
        yield Problem("[train] frozen", [f"no frozen parameter is {what}."], fix, kind="unread_key")
    misfits: dict[tuple[str, str], list[str]] = {}
    for path, shape in shapes.items() if quantized else ():
        problem = block_problem(shape[-2:], str(train.frozen), train.block)
        if problem:
            misfits.setdefault(problem, []).append(path)
    for (why, fix), paths in misfits.items():
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
    problems, pairs = [], [("[train]", saved.train, now.train)]
    if len(saved.adapters) != len(now.adapters):
        problems.append(
            Problem("[[adapters]]", [f"saved {len(saved.adapters)}, now {len(now.adapters)}"])
        )
    pairs += [
        (f"[[adapters]] rule {number}", *pair)
        for number, pair in enumerate(zip(saved.adapters, now.adapters, strict=False), 1)
    ]
    for where, before, after in pairs:
        names = [field.name for field in dataclasses.fields(before) if field.compare]
        changed = [name for name in names if getattr(before, name) != getattr(after, name)]
        lines = [
            f"{name.rstrip('_')} was {getattr(before, name)}, is {getattr(after, name)}"
            for name in changed
        ]
        problems += [Problem(where, lines)] if lines else []
    headline = f"step {step} was saved with other adapters, or with other parameters trained"
    fix = "the tables that the run began with, or another folder for a new run."
    raise_problems(
        CheckpointError, headline, [dataclasses.replace(problem, fix=fix) for problem in problems]
    )
