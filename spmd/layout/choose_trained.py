"""Which parameters a layout's `[train]` and `[[adapters]]` train: patterns applied to the parameters of a model."""

from collections.abc import Collection, Iterator

from spmd.errors import LayoutError, Problem, raise_problems
from spmd.layout.fixes import path_fix
from spmd.layout.schema import Layout
from spmd.path_match import matches


def frozen_paths(layout: Layout, params: Collection[str], adapters: Collection[str] = ()) -> frozenset[str]:
    """The parameters that are not trained.

    Args:
      params: paths of all parameters of the model, with those of adapters, `adapters`.

    Raises:
      LayoutError: patterns that match nothing, or nothing is trained, or nothing frozen where the layout says how.

    Example:
      >>> from spmd import Layout, Train
      >>> sorted(frozen_paths(Layout(train=Train(include="head/**")), ["body/kernel", "head/kernel"]))
      ['body/kernel']
    """
    train, base = layout.train, [path for path in params if path not in adapters]
    included = {path for pattern in train.include for path in matches(pattern, base)}
    if not train.include and not adapters:
        included = set(base)
    trained = included - {path for pattern in train.exclude for path in matches(pattern, base)}
    raise_problems(LayoutError, f"{layout.source}: [train] does not fit this model", list(_problems(layout, base, trained, adapters)))
    return frozenset(base) - trained


def _problems(layout: Layout, base: list[str], trained: Collection[str], adapters: Collection[str]) -> Iterator[Problem]:
    """What is wrong with `[train]`."""
    train, unmatched = layout.train, False
    for key in ("include", "exclude"):
        for pattern in getattr(train, key):
            if not matches(pattern, base):
                unmatched = True
                yield Problem(f'[train] {key}: "{pattern}" matches no parameter.', [], path_fix(pattern, base), kind="no_match")
    if unmatched or not base:
        return
    if not trained and not adapters:
        why = f"exclude leaves none of the {len(base)} parameters to train."
        yield Problem("[train]", [why], f"patterns that leave some: the model has {base[0]}, ...", kind="conflict")
    if train.frozen is not None and len(trained) == len(base):
        why = f"all {len(base)} parameters are trained, so none is kept in {train.frozen}."
        yield Problem("[train] frozen", [why], "leave it out, or say with include what is trained.", kind="unread_key")
