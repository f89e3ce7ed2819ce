"""Specs of `[[activations]]` for the outputs of a model's submodules, and their checks. Pure functions of shapes.

Paths are of submodules. Dim 0 of an output is the batch: it is always sharded over the data axes, and over the axes that the
rule adds to them.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax

from spmd.errors import Problem
from spmd.layout.fixes import except_text, first_names, fitting_spec, overlap_fix, path_fix, rule_fix, spec_problems
from spmd.layout.resolve import matching_rules, num_shards, rule_name
from spmd.layout.schema import Layout
from spmd.mesh import MeshSpec
from spmd.path_match import covering, matches
from spmd.specs import Spec, entry_axes, keep_axes, spec_axes, spec_text
from spmd.tree import describe


class Output(NamedTuple):
    """One array of a module's output: its path in the output ("" if it is the output), and whether it has only part of the batch's rows."""

    inside: str
    leaf: jax.ShapeDtypeStruct
    part: bool = False


Outputs = Mapping[str, Sequence[Output]]  # by module, over all its calls


def activation_spec(model_spec: Spec, data_axes: tuple[str, ...], shape: tuple[int, ...], mesh: MeshSpec) -> Spec:
    """The spec of an array: `model_spec`, without data axes, with the data axes first on dim 0; entries that do not divide become None.

    In a full batch every entry divides (`output_problems`); in a short last batch, or in `predict`, some may not.

    >>> activation_spec(("model", "model"), ("data",), (8, 3), MeshSpec.parse("data=4,model=2"))
    (('data', 'model'), None)
    """
    rows = (*data_axes, *(entry_axes(model_spec[0]) if model_spec else ()))
    while rows and shape[0] % num_shards((rows,), mesh):
        rows = rows[:-1]
    return (rows[0] if len(rows) == 1 else rows or None, *fitting_spec((None, *model_spec[1:]), shape, mesh)[1:])


def data_axis_problems(layout: Layout) -> Iterator[Problem]:
    """Rules with a data axis on another dim than the batch."""
    for number, rule in enumerate(layout.activations):
        for dim, entry in enumerate(rule.spec[1:], 1):
            for axis in (axis for axis in entry_axes(entry) if axis in layout.data_axes()):
                why = f'dim {dim} is sharded over "{axis}", over which dim 0, the batch, is sharded already.'
                fix = "an axis over which the batch is not sharded."
                where = f"[[activations]] {rule_name(layout.activations, number)}, spec {spec_text(rule.spec)}"
                yield Problem(where, [why], fix, rule=number + 1, line=rule.line, kind="conflict")


def output_problems(layout: Layout, mesh: MeshSpec, modules: Sequence[str], outputs: Outputs, rows: int, parts: int) -> Iterator[Problem]:
    """Problems of `[[activations]]`: like those of `fit_layout`, for submodules.

    Args:
      modules: paths of all callable submodules.
      outputs: of the submodules that rules match and that were called, on a batch of `rows`.
      parts: the number of parts of a batch, each a separate call of the model: workers times microbatches.
    """
    rules = layout.activations
    claims = {path: tuple(matching_rules(rules, path)) for path in modules}
    for number, rule in enumerate(rules):
        where, found = f'[[activations]] {rule_name(rules, number)}: path "{rule.path}"', matches(rule.path, modules)
        at = {"rule": number + 1, "line": rule.line, "kind": "no_match"}
        if not modules:
            fix = "remove the rule, or call jax.lax.with_sharding_constraint in apply."
            yield Problem(where, ["names submodules; a FunctionalModel has none."], fix, **at)
            continue
        if not found:
            fix = path_fix(rule.path, [path for path in modules if path])
            yield Problem(f"{where} matches no callable submodule.", [], fix, **at)
        for other in (other for other in rule.except_ if found and not matches(other, found)):
            yield Problem(f'{where}, except "{other}"', ["matches no submodule of this rule."], path_fix(other, found), **at)
        claimed = [path for path in found if number in claims[path]]
        if found and not claimed:
            why = "excludes every submodule of this rule."
            yield Problem(f"{where}, except {', '.join(rule.except_)}", [why], "remove the rule.", **at)
        if claimed and not any(path in outputs for path in claimed):
            why = f"matches {first_names(claimed)}, which the model never calls as module(x), so nothing is sharded."
            yield Problem(where, [why], "a pattern for modules that are called.", **at)
    for path in (path for path in modules if len(claims[path]) > 1):
        why = [f'{rule_name(rules, index)} claims it: path "{rules[index].path}"' for index in claims[path]]
        why = [f"{len(why)} [[activations]] rules match this module.", *why]
        yield Problem(_module(path), why, overlap_fix(rules, claims[path], claims), path=path, kind="overlap")
    yield from _misfits(layout, mesh, claims, outputs, rows, parts)


def _misfits(
    layout: Layout, mesh: MeshSpec, claims: Mapping[str, tuple[int, ...]], outputs: Outputs, rows: int, parts: int
) -> Iterator[Problem]:
    """Arrays that do not fit their rule; modules that share a rule and a shape are reported as one problem."""
    rules, misfits = layout.activations, {}
    for path, arrays in outputs.items():
        for output in arrays if len(claims[path]) == 1 else ():
            spec, counts = _without_data_axes(layout, rules[claims[path][0]].spec), (rows, parts)
            if output.part:  # how many of the batch's rows it has is unknown
                spec, counts = (None, *spec[1:]), (1, 1)
            why = tuple(_why(spec, output.leaf.shape, mesh, *counts))
            if why:
                key = (claims[path][0], output.inside, describe(output.leaf), output.leaf.shape, spec, counts, why)
                misfits.setdefault(key, []).append(path)
    for (number, inside, array, shape, spec, counts, why), paths in misfits.items():
        first = f"{_module(paths[0])}{f', {inside} of its output' if inside else ''}   {array}"
        yield Problem(
            f"{first}   [[activations]] {rule_name(rules, number)}: spec {spec_text(rules[number].spec)}",
            why,
            _fix(layout, number, paths, spec, shape, claims, mesh, *counts),
            also=f"and {len(paths) - 1} more: {first_names(paths[1:])}." if len(paths) > 1 else "",
            path=paths[0],
            rule=number + 1,
            line=rules[number].line,
            kind="wrong_rank" if len(spec) > len(shape) else "not_divisible",
        )


def _why(spec: Spec, shape: tuple[int, ...], mesh: MeshSpec, rows: int, parts: int) -> Iterator[str]:
    """Why `spec` does not fit an array of this shape."""
    if not shape or shape[0] % rows:
        yield f"dim 0 is not the batch, of which there are {rows} rows." if shape else "a scalar has no dim to shard."
        return
    at_once = (shape[0] // parts, *shape[1:])
    if parts > 1 and len(spec) <= len(shape) and at_once[0] % num_shards(spec[:1], mesh):
        yield f"of {shape[0]} rows, {at_once[0]} are computed at once (parts: {parts}, workers times microbatches)."
    yield from spec_problems(spec, at_once, mesh)


def _without_data_axes(layout: Layout, spec: Spec) -> Spec:
    """The spec without the data axes."""
    return keep_axes(spec, tuple(axis for axis in spec_axes(spec) if axis not in layout.data_axes()))


def _fix(
    layout: Layout,
    number: int,
    paths: list[str],
    spec: Spec,
    shape: tuple[int, ...],
    claims: Mapping[str, tuple[int, ...]],
    mesh: MeshSpec,
    rows: int,
    parts: int,
) -> str:
    """A spec that fits these modules, and sizes that would fit the rule's spec."""
    rules, pattern = layout.activations, covering(paths, claims)
    alone = sum(claimed == (number,) for claimed in claims.values()) == len(paths)
    if not shape or shape[0] % rows:
        others = "a pattern for modules that return rows."
        return others if alone or not pattern else f"{except_text(rules[number], [pattern])}  in {rule_name(rules, number)}."
    at_once = (shape[0] // parts, *shape[1:])
    fixed = spec_text(fitting_spec(spec, at_once, mesh))
    fix = f"spec {fixed}" if alone else rule_fix(rules, number, pattern, fixed)
    sizes = []
    for dim, entry in enumerate(spec) if len(spec) <= len(shape) else ():
        pieces, size = num_shards((entry,), mesh), at_once[dim]
        if size % pieces:
            near = sorted({max(pieces, size // pieces * pieces), -(-size // pieces) * pieces})
            batch = dim == 0 and shape[0] == rows
            shown = " or ".join(str(one * parts if batch else one) for one in near)
            sizes.append(f"batch_size={shown}" if batch else f"dim {dim} of {shown}")
    return fix + (f", or {', '.join(sizes)}." if sizes else ".")


def _module(path: str) -> str:
    return path or "the model itself"
