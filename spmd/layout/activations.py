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


Outputs = Mapping[str, Sequence[Output]]  # by module, over all its calls


def activation_spec(
    model_spec: Spec, data_axes: tuple[str, ...], shape: tuple[int, ...], mesh: MeshSpec
) -> Spec:
    """The spec of an array: `model_spec`, without data axes, with the data axes first on dim 0;
    entries that do not divide become None.

    In a full batch every entry divides (`output_problems`); in a short last batch, or in `predict`,
    some may not.

    >>> activation_spec(("model", "model"), ("data",), (8, 3), MeshSpec.parse("data=4,model=2"))
    (('data', 'model'), None)
    """
    rows = (*data_axes, *(entry_axes(model_spec[0]) if model_spec else ()))
    while rows and shape[0] % num_shards((rows,), mesh):
        rows = rows[:-1]
    return (make_entry(rows), *fixes.fitting_spec((None, *model_spec[1:]), shape, mesh)[1:])


def data_axis_problems(layout: Layout) -> Iterator[Problem]:
    """Rules with a data axis on another dim than the batch."""
    for number, rule in enumerate(layout.activations):
        for dim, entry in enumerate(rule.spec[1:], 1):
            for axis in (axis for axis in entry_axes(entry) if axis in layout.data_axes()):
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
    """Problems of `[[activations]]`: like those of `fit_layout`, for submodules.

    Args:
      modules: paths of all callable submodules.
      outputs: of the submodules that rules match and that were called, on a batch of `rows`.
      parts: the number of parts of a batch, each a separate call of the model: workers times
        microbatches.
    """
    rules = layout.activations
    match_problems, matching_rules = (
        fixes.match_checker(rules, modules, "callable submodule"),
        rule_matcher(rules),
    )
    claims = {path: tuple(matching_rules(path)) for path in modules}
    for number, rule in enumerate(rules):
        where, at = (
            f'[[activations]] {rule_name(rules, number)}: path "{rule.path}"',
            {"rule": number + 1, "line": rule.line},
        )
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
    for path in (path for path in modules if len(claims[path]) > 1):
        why = fixes.claim_lines(rules, claims[path], "[[activations]] rules match this module")
        yield Problem(
            _module(path),
            why,
            fixes.overlap_fix(rules, claims[path], claims),
            path=path,
            kind="overlap",
        )
    yield from _misfits(layout, mesh, claims, outputs, rows, parts)


class _Misfit(NamedTuple):
    """What is wrong with an array of a module's output; `spec` is its rule's, without data axes."""

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
    """Arrays that do not fit their rule; modules that share a rule and a shape are reported as one
    problem.
    """
    rules, misfits = layout.activations, {}
    other_axes = tuple(axis for axis in mesh.names if axis not in layout.data_axes())
    for path, arrays in outputs.items():
        for output in arrays if len(claims[path]) == 1 else ():
            spec, counts = keep_axes(rules[claims[path][0]].spec, other_axes), (rows, parts)
            if output.part:  # how many of the batch's rows it has is unknown
                spec, counts = (None, *spec[1:]), (1, 1)
            misfit = _Misfit(
                claims[path][0],
                output.inside,
                describe(output.leaf),
                output.leaf.shape,
                spec,
                *counts,
                (),
            )
            why = tuple(_why(misfit, mesh))
            if why:
                misfits.setdefault(misfit._replace(why=why), []).append(path)
    for misfit, paths in misfits.items():
        first = (
            f"{_module(paths[0])}{f', {misfit.inside} of its output' if misfit.inside else ''}   "
            f"{misfit.array}"
        )
        rule = rules[misfit.rule]
        yield Problem(
            f"{first}   [[activations]] {rule_name(rules, misfit.rule)}: spec "
            f"{spec_text(rule.spec)}",
            misfit.why,
            _fix(rules, misfit, paths, claims, mesh),
            also=fixes.more_names(paths),
            path=paths[0],
            rule=misfit.rule + 1,
            line=rule.line,
            kind="wrong_rank" if len(misfit.spec) > len(misfit.shape) else "not_divisible",
        )


def _why(misfit: _Misfit, mesh: MeshSpec) -> Iterator[str]:
    """Why the spec does not fit the array; nothing if it does."""
    spec, shape, rows, parts = misfit.spec, misfit.shape, misfit.rows, misfit.parts
    if not shape or shape[0] % rows:
        yield (
            f"dim 0 is not the batch, of which there are {rows} rows."
            if shape
            else "a scalar has no dim to shard."
        )
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
    """A spec that fits these modules, and sizes that would fit the rule's spec."""
    number, spec, shape, pattern = misfit.rule, misfit.spec, misfit.shape, covering(paths, claims)
    all_of_rule = sum(claimed == (number,) for claimed in claims.values()) == len(paths)
    if not shape or shape[0] % misfit.rows:
        others = "a pattern for modules that return rows."
        return (
            others
            if all_of_rule or not pattern
            else f"{fixes.except_text(rules[number], [pattern])}  in {rule_name(rules, number)}."
        )
    fitting = spec_text(fixes.fitting_spec(spec, misfit.at_once, mesh))
    fix, sizes = (
        f"spec {fitting}" if all_of_rule else fixes.rule_fix(rules, number, pattern, fitting),
        [],
    )
    for dim, entry in enumerate(spec) if len(spec) <= len(shape) else ():
        pieces, size = num_shards((entry,), mesh), misfit.at_once[dim]
        if size % pieces and dim == 0 and shape[0] == misfit.rows:
            sizes.append(
                option(
                    "batch_size", fixes.near_multiples(size * misfit.parts, pieces * misfit.parts)
                )
            )
        elif size % pieces:
            sizes.append(f"dim {dim} of {fixes.near_multiples(size, pieces)}")
    return fix + (f", or {', '.join(sizes)}." if sizes else ".")


def _module(path: str) -> str:
    return path or "the model itself"
