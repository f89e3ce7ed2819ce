"""Specs of `[[activations]]` for the outputs of a model's submodules, and their checks. Pure
functions of shapes.

Paths are of submodules. Dim 0 of an output is the batch: it is always sharded over the data axes,
and over the axes that the rule adds to them.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax

from spmd.base.path_match import covering
from spmd.base.specs import Spec, entry_axes, keep_axes, make_entry, spec_text
from spmd.base.tree import describe
from spmd.errors import Problem, option
from spmd.layout import fixes
from spmd.layout.resolve import num_shards, rule_matcher, rule_name
from spmd.layout.schema import Layout, Rule
from spmd.mesh import MeshSpec


class Output(NamedTuple):
    """One array of a module's output: its path in the output ("" if it is the output), and whether
    it has only part of the batch's rows.
    """

    inside: str
    leaf: jax.ShapeDtypeStruct
    part: bool = False


# By module, over all its calls.
Outputs = Mapping[str, Sequence[Output]]


def activation_spec(
    model_spec: Spec, data_axes: tuple[str, ...], shape: tuple[int, ...], mesh: MeshSpec
) -> Spec:
    """Return the spec of an array: `model_spec`, without data axes, with the data axes first on dim
    0; entries that do not divide become None.

    In a full batch every entry divides (`output_problems`); in a short last batch, or in `predict`,
    some may not.

    >>> activation_spec(("model", "model"), ("data",), (8, 3), MeshSpec.parse("data=4,model=2"))
    (('data', 'model'), None)
    """
    rows = data_axes
    if model_spec:
        rows += entry_axes(model_spec[0])
    while rows and shape[0] % num_shards((rows,), mesh):
        rows = rows[:-1]
    return (make_entry(rows), *fixes.fitting_spec((None, *model_spec[1:]), shape, mesh)[1:])


def data_axis_problems(layout: Layout) -> Iterator[Problem]:
    """Yield rules with a data axis on another dim than the batch."""
    for number, rule in enumerate(layout.activations):
        for dim, entry in enumerate(rule.spec[1:], 1):
            for axis in entry_axes(entry):
                if axis not in layout.data_axes():
                    continue
                why = (
                    f'dim {dim} is sharded over "{axis}", over which dim 0, the batch, is sharded '
                    "already."
                )
                fix = "an axis over which the batch is not sharded."
                where = (
                    f"[[activations]] {rule_name(layout.activations, number)}, spec "
                    f"{spec_text(rule.spec)}"
                )
                yield Problem(where, [why], fix, rule=number + 1, line=rule.line, kind="conflict")


def output_problems(
    layout: Layout, mesh: MeshSpec, modules: Sequence[str], outputs: Outputs, rows: int, parts: int
) -> Iterator[Problem]:
    """Yield problems of `[[activations]]`: like those of `fit_layout`, for submodules.

    Args:
      modules: paths of all callable submodules.
      outputs: of the submodules that rules match and that were called, on a batch of `rows`.
      parts: the number of parts of a batch, each a separate call of the model: workers times
        microbatches.
    """
    rules = layout.activations
    match_problems = fixes.match_checker(rules, modules, "callable submodule")
    matching_rules = rule_matcher(rules)
    claims = {path: tuple(matching_rules(path)) for path in modules}
    for number, rule in enumerate(rules):
        where = f'[[activations]] {rule_name(rules, number)}: path "{rule.path}"'
        at = {"rule": number + 1, "line": rule.line}
        if not modules:
            fix = "remove the rule, or call jax.lax.with_sharding_constraint in apply."
            yield Problem(
                where, ["names submodules; a FunctionalModel has none."], fix, **at, kind="no_match"
            )
            continue
        yield from match_problems(where, rule, at)
        claimed = [path for path in modules if number in claims[path]]
        if claimed and not any(path in outputs for path in claimed):
            why = (
                f"matches {fixes.first_names(claimed)}, which the model never calls as module(x), "
                "so nothing is sharded."
            )
            yield Problem(
                where, [why], "a pattern for modules that are called.", **at, kind="no_match"
            )
    for path in modules:
        if len(claims[path]) > 1:
            why = fixes.claim_lines(rules, claims[path], "[[activations]] rules match this module")
            fix = fixes.overlap_fix(rules, claims[path], claims)
            yield Problem(_module(path), why, fix, path=path, kind="overlap")
    yield from _misfits(layout, mesh, claims, outputs, rows, parts)


class _Misfit(NamedTuple):
    """The misfit of an array of a module's output; `spec` is its rule's, without data axes."""

    rule: int
    inside: str
    array: str
    shape: tuple[int, ...]
    spec: Spec
    rows: int
    parts: int
    why: tuple[str, ...]

    @property
    def at_once(self) -> tuple[int, ...]:
        """The shape in one call of the model."""
        return (self.shape[0] // self.parts, *self.shape[1:])


def _misfits(
    layout: Layout,
    mesh: MeshSpec,
    claims: Mapping[str, tuple[int, ...]],
    outputs: Outputs,
    rows: int,
    parts: int,
) -> Iterator[Problem]:
    """Yield arrays that do not fit their rule; modules that share a rule and a shape are reported
    as one problem.
    """
    rules = layout.activations
    misfits = {}
    other_axes = tuple(axis for axis in mesh.names if axis not in layout.data_axes())
    for path, arrays in outputs.items():
        if len(claims[path]) != 1:
            continue
        (number,) = claims[path]
        for output in arrays:
            leaf = output.leaf
            spec = keep_axes(rules[number].spec, other_axes)
            counts = (rows, parts)
            # The number of the batch's rows that it has is unknown.
            if output.part:
                spec = (None, *spec[1:])
                counts = (1, 1)
            misfit = _Misfit(number, output.inside, describe(leaf), leaf.shape, spec, *counts, ())
            why = tuple(_reasons(misfit, mesh))
            if why:
                misfits.setdefault(misfit._replace(why=why), []).append(path)
    for misfit, paths in misfits.items():
        rule = rules[misfit.rule]
        where = _module(paths[0])
        if misfit.inside:
            where += f", {misfit.inside} of its output"
        where += f"   {misfit.array}   [[activations]] {rule_name(rules, misfit.rule)}: spec "
        where += spec_text(rule.spec)
        kind = "not_divisible"
        if len(misfit.spec) > len(misfit.shape):
            kind = "wrong_rank"
        yield Problem(
            where,
            misfit.why,
            _fix(rules, misfit, paths, claims, mesh),
            also=fixes.more_names(paths),
            path=paths[0],
            rule=misfit.rule + 1,
            line=rule.line,
            kind=kind,
        )


def _reasons(misfit: _Misfit, mesh: MeshSpec) -> Iterator[str]:
    """Yield reasons why the spec does not fit the array; none if it does."""
    spec = misfit.spec
    shape = misfit.shape
    rows = misfit.rows
    parts = misfit.parts
    if not shape:
        yield "a scalar has no dim to shard."
        return
    if shape[0] % rows:
        yield f"dim 0 is not the batch, of which there are {rows} rows."
        return
    if parts > 1 and len(spec) <= len(shape) and misfit.at_once[0] % num_shards(spec[:1], mesh):
        yield (
            f"of {shape[0]} rows, {misfit.at_once[0]} are computed at once (parts: {parts}, "
            "workers times microbatches)."
        )
    yield from fixes.spec_problems(spec, misfit.at_once, mesh)


def _fix(
    rules: tuple[Rule, ...],
    misfit: _Misfit,
    paths: list[str],
    claims: Mapping[str, tuple[int, ...]],
    mesh: MeshSpec,
) -> str:
    """Return a spec that fits these modules, and sizes that would fit the rule's spec."""
    number = misfit.rule
    spec = misfit.spec
    shape = misfit.shape
    pattern = covering(paths, claims)
    all_of_rule = sum(claimed == (number,) for claimed in claims.values()) == len(paths)
    if not shape or shape[0] % misfit.rows:
        if all_of_rule or not pattern:
            return "a pattern for modules that return rows."
        return f"{fixes.except_text(rules[number], [pattern])}  in {rule_name(rules, number)}."
    fitting = spec_text(fixes.fitting_spec(spec, misfit.at_once, mesh))
    fix = fixes.rule_fix(rules, number, pattern, fitting)
    if all_of_rule:
        fix = f"spec {fitting}"
    if len(spec) > len(shape):
        return f"{fix}."
    sizes = []
    for dim, entry in enumerate(spec):
        pieces = num_shards((entry,), mesh)
        size = misfit.at_once[dim]
        if size % pieces and dim == 0 and shape[0] == misfit.rows:
            parts = misfit.parts
            batch_size = fixes.near_multiples(size * parts, pieces * parts)
            sizes.append(option("batch_size", batch_size))
        elif size % pieces:
            sizes.append(f"dim {dim} of {fixes.near_multiples(size, pieces)}")
    if sizes:
        fix += f", or {', '.join(sizes)}"
    return f"{fix}."


def _module(path: str) -> str:
    return path or "the model itself"
