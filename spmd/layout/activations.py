"""`[[activations]]` against what a model's submodules return: specs, and every way one can fail to fit. Pure: shapes in, specs out.

Paths are of submodules, as they lie in the model. Dim 0 of what they return is the batch: it is cut over the data axes in any
case, and over what the rule names beside them.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax

from spmd.errors import Problem
from spmd.layout.fixes import except_text, first_names, fitting_spec, overlap_fix, path_fix, rule_fix, spec_problems
from spmd.layout.match import covering, matches
from spmd.layout.resolve import matching_rules, num_shards, rule_name
from spmd.layout.schema import Layout, Spec, entry_axes, keep_axes, spec_axes, spec_text
from spmd.mesh import MeshSpec
from spmd.tree import describe


class Output(NamedTuple):
    """One array that a module returned: its path inside of that, "" for the array itself; `part`: of some rows of the batch only."""

    inside: str
    leaf: jax.ShapeDtypeStruct
    part: bool = False


Outputs = Mapping[str, Sequence[Output]]  # by module, of all its calls


def activation_spec(own: Spec, data_axes: tuple[str, ...], shape: tuple[int, ...], mesh: MeshSpec) -> Spec:
    """Where an array of this shape is to be: `own`, which names no data axis, with these before it on dim 0; what does not divide is whole.

    Of a full batch everything divides (`output_problems`); a short last batch, or other inputs in `predict`, may not.

    >>> activation_spec(("model", "model"), ("data",), (8, 3), MeshSpec.parse("data=4,model=2"))
    (('data', 'model'), None)
    """
    rows = (*data_axes, *(entry_axes(own[0]) if own else ()))
    while rows and shape[0] % num_shards((rows,), mesh):
        rows = rows[:-1]
    return (rows[0] if len(rows) == 1 else rows or None, *fitting_spec((None, *own[1:]), shape, mesh)[1:])


def data_axis_problems(layout: Layout) -> Iterator[Problem]:
    """Rules that name a data axis on another dim than the batch's."""
    for number, rule in enumerate(layout.activations):
        for dim, entry in enumerate(rule.spec[1:], 1):
            for axis in (axis for axis in entry_axes(entry) if axis in layout.data_axes()):
                why = f'dim {dim} is to be cut over "{axis}", over which dim 0, the batch, is cut already.'
                fix = "an axis that the batch is not cut over."
                yield Problem(f"[[activations]] {rule_name(layout.activations, number)}, spec {spec_text(rule.spec)}", [why], fix)


def output_problems(layout: Layout, mesh: MeshSpec, modules: Sequence[str], outputs: Outputs, rows: int, parts: int) -> Iterator[Problem]:
    """What does not fit, told of modules as `fit_layout` tells of parameters.

    Args:
      modules: paths of all submodules that can be called.
      outputs: what those that rules claim returned, on a batch of `rows`; those that were not called are not in it.
      parts: into how many parts the rows are cut, on which the model is called one by one: workers times microbatches.
    """
    rules = layout.activations
    claims = {path: tuple(matching_rules(rules, path)) for path in modules}
    for number, rule in enumerate(rules):
        where, found = f'[[activations]] {rule_name(rules, number)}: path "{rule.path}"', matches(rule.path, modules)
        if not modules:
            fix = "take the rule out, or call jax.lax.with_sharding_constraint in apply."
            yield Problem(where, ["names submodules; a FunctionalModel has none."], fix)
            continue
        if not found:
            yield Problem(f"{where} matches no submodule that can be called.", [], path_fix(rule.path, [path for path in modules if path]))
        for other in (other for other in rule.except_ if found and not matches(other, found)):
            yield Problem(f'{where}, except "{other}"', ["takes no submodule away from this rule."], path_fix(other, found))
        mine = [path for path in found if number in claims[path]]
        if found and not mine:
            yield Problem(f"{where}, except {', '.join(rule.except_)}", ["leaves no submodule to this rule."], "leave the rule out.")
        if mine and not any(path in outputs for path in mine):
            why = f"matches {first_names(mine)}, which the model never calls as module(x), so nothing is cut."
            yield Problem(where, [why], "a pattern for modules that are called.")
    for path in (path for path in modules if len(claims[path]) > 1):
        why = [f'{rule_name(rules, index)} claims it: path "{rules[index].path}"' for index in claims[path]]
        why = [f"{len(why)} [[activations]] rules match this module.", *why]
        yield Problem(_module(path), why, overlap_fix(rules, claims[path], claims))
    yield from _misfits(layout, mesh, claims, outputs, rows, parts)


def _misfits(
    layout: Layout, mesh: MeshSpec, claims: Mapping[str, tuple[int, ...]], outputs: Outputs, rows: int, parts: int
) -> Iterator[Problem]:
    """Arrays that their rule cannot cut; modules that share a rule and a shape are told as one problem."""
    rules, found = layout.activations, {}
    for path, arrays in outputs.items():
        for output in arrays if len(claims[path]) == 1 else ():
            spec, counts = _own(layout, rules[claims[path][0]].spec), (rows, parts)
            if output.part:  # how many of the batch's rows these are is not ours to say
                spec, counts = (None, *spec[1:]), (1, 1)
            why = tuple(_why(spec, output.leaf.shape, mesh, *counts))
            if why:
                key = (claims[path][0], output.inside, describe(output.leaf), output.leaf.shape, spec, counts, why)
                found.setdefault(key, []).append(path)
    for (number, inside, array, shape, spec, counts, why), paths in found.items():
        first = f"{_module(paths[0])}{f', {inside} of what it returns' if inside else ''}   {array}"
        more = [f"and {len(paths) - 1} more: {first_names(paths[1:])}."] if len(paths) > 1 else []
        yield Problem(
            f"{first}   [[activations]] {rule_name(rules, number)}: spec {spec_text(rules[number].spec)}",
            [*more, *why],
            _fix(layout, number, paths, spec, shape, claims, mesh, *counts),
        )


def _why(spec: Spec, shape: tuple[int, ...], mesh: MeshSpec, rows: int, parts: int) -> Iterator[str]:
    """What is wrong with cutting an array of this shape as `spec` says."""
    if not shape or shape[0] % rows:
        yield f"dim 0 is not the batch, of which there are {rows} rows." if shape else "a scalar has no dim to cut."
        return
    at_once = (shape[0] // parts, *shape[1:])
    lines = spec_problems(spec, at_once, mesh)
    if any(line.startswith("dim 0 ") for line in lines) and parts > 1:
        yield f"of {shape[0]} rows, {at_once[0]} are worked on at once (parts: {parts}, workers times microbatches)."
    yield from lines


def _own(layout: Layout, spec: Spec) -> Spec:
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
    """A spec that fits, for these modules alone, and the sizes that would fit the rule's own."""
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
