"""Checks of a layout against a model on a mesh: all problems at once, each with a verified fix."""

import dataclasses
import types
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from spmd.base.path_match import covering
from spmd.base.specs import (
    REPLICATED,
    Entry,
    Spec,
    entry_axes,
    keep_axes,
    make_entry,
    spec_axes,
    spec_text,
)
from spmd.base.tree import describe
from spmd.errors import LayoutError, Problem, closest, option, quoted, raise_problems
from spmd.layout import fixes
from spmd.layout.activations import data_axis_problems
from spmd.layout.check_resolved import resolved_problems
from spmd.layout.resolve import (
    Names,
    Resolved,
    choose,
    each_name,
    keep_frozen,
    named_spec,
    names_text,
    one_layer,
    resolve,
    rule_matcher,
    rule_name,
)
from spmd.layout.schema import Layout
from spmd.mesh import MeshSpec, axis_problem

Params = Mapping[str, jax.ShapeDtypeStruct]


@dataclasses.dataclass(frozen=True)
class Misfit:
    """The misfit of a parameter, without its path: parameters that share it are reported as one
    problem.

    `spec` is the rejected spec; its fix is computed when all parameters that share it are known.
    """

    why: tuple[str, ...]
    shape: tuple[int, ...] = ()
    array: str = ""
    chosen_by: str = ""
    claimed: tuple[int, ...] = ()
    spec: Spec | None = None
    fix: str = ""
    kind: str = ""


# A misfit whose cause is reported as a problem of the layout.
REPORTED = Misfit(())


def fit_layout(
    layout: Layout,
    params: Params,
    names: Mapping[str, Names],
    mesh: MeshSpec,
    stacks: Mapping[str, int] = types.MappingProxyType({}),
    frozen: Mapping[str, Params] = types.MappingProxyType({}),
) -> Resolved:
    """Check a layout against a model's shapes on a mesh, and apply it.

    Args:
      stacks: the number of layers along dim 0, by path, of stacked parameters; rules are about one
        layer.
      frozen: of the parameters that are not trained, by path, the arrays in which they are kept, by
        their paths.

    Raises:
      LayoutError: every problem, with the arithmetic and a fix that passes the same check.
    """

    def fits(other: MeshSpec) -> bool:
        try:
            fit_layout(layout, stacked_params, names, other, stacks, frozen)
        except LayoutError:
            return False
        return True

    # `fits` calls this function again, which takes the layers of stacks off itself.
    stacked_params = params
    params = one_layer(params, stacks)
    problems = [*_layout_problems(layout, mesh), *_rule_problems(layout, params, mesh)]
    # A frozen parameter has no gradient, so a rule of `[gradients]` that matches frozen ones alone
    # is never used.
    trained = {path: leaf for path, leaf in params.items() if path not in frozen}
    problems += _codec_problems(layout, trained, mesh)
    problems += _pipeline_problems(layout, stacks, mesh)
    matching_rules = rule_matcher(layout.params)
    claims = {path: tuple(matching_rules(path)) for path in params}
    misfits: dict[Misfit, list[str]] = {}
    for path, leaf in params.items():
        misfit = _misfit(layout, claims[path], leaf, names.get(path), mesh, stacked=path in stacks)
        if misfit:
            misfits.setdefault(misfit, []).append(path)
    # Counted before REPORTED is taken out: those parameters do not fit either.
    fitting = len(params) - sum(map(len, misfits.values()))
    misfits.pop(REPORTED, None)
    problems += [
        _misfit_problem(layout, misfit, paths, params, claims, mesh)
        for misfit, paths in misfits.items()
    ]
    headline = f"{layout.source} does not fit this model on mesh {mesh}"
    # Raised before `resolve`, which looks axes up in the mesh: an unknown axis would be a KeyError
    # there.
    raise_problems(LayoutError, headline, problems, f"{fitting} of {len(params)} parameters fit")
    resolved = keep_frozen(resolve(layout, params, names, mesh, stacks), frozen)
    raise_problems(LayoutError, headline, resolved_problems(resolved, params, names, stacks, fits))
    return resolved


def _axis_lines(spec: Spec, mesh: MeshSpec) -> tuple[list[str], str]:
    """Return the problems that a spec has for every array, and a fix: unknown axes, and axes used
    more than once.
    """
    repeated = _repeated_axes(spec)
    fix = f'keep "{next(iter(repeated), "")}" in one place and write "-" in the other.'
    lines = []
    for axis in dict.fromkeys(spec_axes(spec)):
        problem = axis_problem(axis, mesh)
        if problem:
            axis_lines, fix = problem
            lines += axis_lines
    return [*lines, *repeated.values()], fix


def _repeated_axes(spec: Spec) -> dict[str, str]:
    """Return the problem of every mesh axis that a spec has more than once."""
    counts = Counter(spec_axes(spec))
    why = 'mesh axis "{}" is used {} times; an array can be sharded over it once.'
    return {axis: why.format(axis, count) for axis, count in counts.items() if count > 1}


def _axis_problems(
    where: str, spec: Spec, layout: Layout, mesh: MeshSpec, **at: Any
) -> Iterator[Problem]:
    """Yield unknown and repeated mesh axes of a spec, as one problem."""
    lines, fix = _axis_lines(spec, mesh)
    if not lines:
        return
    kind = "repeated_axis"
    unknown = set(spec_axes(spec)) - set(mesh.names)
    if unknown:
        kind = "unknown_axis"
    if unknown & dict(layout.mesh).keys():
        sizes = ",".join(f"{axis}={size}" for axis, size in layout.mesh)
        fix = f"{option('mesh', quoted(sizes))}, as the layout declares."
    yield Problem(where, lines, fix, **at, kind=kind)


def _layout_problems(layout: Layout, mesh: MeshSpec) -> Iterator[Problem]:
    """Yield problems of the layout itself, outside its parameter rules."""
    specs = {"[batch] spec": layout.batch.spec}
    for header, rules in (("batch.rules", layout.batch.rules), ("activations", layout.activations)):
        for number, rule in enumerate(rules):
            specs[f"[[{header}]] {rule_name(rules, number)}"] = rule.spec
    specs |= {f'[axes] "{name}"': (entry,) for name, entry in layout.axes}
    tables = {
        "pipeline": layout.pipeline.axis,
        "sequence": layout.sequence.axis,
        "experts": layout.experts.axis,
    }
    specs |= {f"[{table}] axis": (axis,) for table, axis in tables.items()}
    specs["[optimizer] shard"] = (layout.optimizer.shard,)
    specs[f'[default] params = "{layout.default.params}"'] = (
        # Only "shard:AXIS" names an axis; the axis of "replicate" and of "error" is empty.
        layout.default.params.partition(":")[2] or None,
    )
    for where, spec in specs.items():
        yield from _axis_problems(where, spec, layout, mesh)
    yield from data_axis_problems(layout)
    if layout.pipeline.axis in layout.data_axes():
        why = (
            f'mesh axis "{layout.pipeline.axis}" splits the batch; a stage sees all rows of its '
            "worker."
        )
        yield Problem(
            "[pipeline] axis", [why], 'a separate axis, such as "stage".', kind="conflict"
        )
    for table in ("sequence", "experts"):
        axis = tables[table]
        if axis in layout.data_axes():
            why = (
                f'"{axis}" is a data axis: it splits the batch among workers, and cannot shard the '
                "data of one."
            )
            yield Problem(
                f"[{table}] axis",
                [why],
                f"another axis than {', '.join(layout.data_axes())}.",
                kind="conflict",
            )
        if axis is not None and axis == layout.pipeline.axis:
            why = (
                f'mesh axis "{axis}" shards the layers ([pipeline]), so nothing on one stage can '
                "be sharded over it."
            )
            yield Problem(f"[{table}] axis", [why], "a separate axis.", kind="conflict")


def _pipeline_problems(
    layout: Layout, stacks: Mapping[str, int], mesh: MeshSpec
) -> Iterator[Problem]:
    """Yield numbers of layers that the pipeline's stages do not divide, and remat that a schedule
    repeats.
    """
    axis = layout.pipeline.axis
    groups = layout.pipeline.groups
    if axis is None or axis not in mesh.names:
        return
    if (
        layout.pipeline.schedule == "1f1b"
        and layout.remat.saves != "everything"
        and not layout.remat.modules
    ):
        why = "a 1f1b stage keeps its input, and computes everything else again in any case."
        yield Problem(
            "[remat] save", [why], 'leave it out, or name the layers: modules = ["**/layers"].'
        )
    parts = mesh.sizes[axis] * groups
    stages = mesh.sizes[axis]
    for count in sorted(set(stacks.values())):
        if count % parts:
            paths = [path for path, layers in stacks.items() if layers == count]
            why = f'a stack of {count} layers; mesh axis "{axis}" has {stages} devices'
            if groups > 1:
                why += f" of {groups} groups each"
            why += f"; {count} / {parts} leaves {count % parts}."
            fix = f"{fixes.near_multiples(count, parts)} layers"
            sizes = [
                size for size in range(min(stages, count), 0, -1) if count % (size * groups) == 0
            ]
            if sizes:
                fix += f', or mesh axis "{axis}" of size {sizes[0]}'
            yield Problem(
                f"[pipeline]   {fixes.first_names(paths)}",
                [why],
                f"{fix}.",
                path=paths[0],
                kind="not_divisible",
            )


def _rule_problems(layout: Layout, params: Params, mesh: MeshSpec) -> Iterator[Problem]:
    """Yield rules that match nothing, or have unknown or repeated mesh axes; `except` patterns that
    match nothing.
    """
    match_problems = fixes.match_checker(layout.params, params, "parameter")
    for number, rule in enumerate(layout.params):
        where = f'{rule_name(layout.params, number)}: path "{rule.path}"'
        at = {"rule": number + 1, "line": rule.line}
        yield from match_problems(where, rule, at)
        where += f", spec {spec_text(rule.spec)}"
        yield from _axis_problems(where, rule.spec, layout, mesh, **at)


def _codec_problems(layout: Layout, params: Params, mesh: MeshSpec) -> Iterator[Problem]:
    """Yield rules of `[gradients]` that match nothing or overlap, and exact axes over which no
    gradients are reduced.
    """
    rules = layout.gradients.rules
    data = layout.data_axes()
    match_problems = fixes.match_checker(rules, params, "parameter")
    matching_rules = rule_matcher(rules)
    for number, rule in enumerate(rules):
        where = f'[[gradients.rules]] {rule_name(rules, number)}: path "{rule.path}"'
        yield from match_problems(where, rule, {"rule": number + 1, "line": rule.line})
    # One rule overlaps with no other, and matching takes time for each parameter.
    for path, leaf in params.items() if len(rules) > 1 else ():
        claimed = matching_rules(path)
        if len(claimed) > 1:
            why = fixes.claim_lines(rules, claimed, "[[gradients.rules]] match this parameter")
            yield Problem(
                f"{path}   {describe(leaf)}",
                why,
                "add it to the  except  of one of them.",
                path=path,
                kind="overlap",
            )
    for axis in layout.gradients.exact_axes:
        if axis not in data:
            lines = [f'"{axis}" is not a data axis.']
            fix = f"one of the data axes: {', '.join(data)}."
            kind = "conflict"
            unknown = axis_problem(axis, mesh)
            if unknown:
                lines, fix = unknown
                kind = "unknown_axis"
            yield Problem("[gradients] exact_axes", lines, fix, kind=kind)
    if layout.gradients.exact_axes and set(layout.gradients.exact_axes) >= set(data):
        why = f"every data axis ({', '.join(data)}) is reduced exactly, so no codec is used."
        fix = 'leave it out, or shard the batch over two axes, such as ["node", "data"].'
        if len(data) > 1:
            fix = "leave out the axis that crosses nodes."
        yield Problem("[gradients] exact_axes", [why], fix, kind="conflict")


def _misfit(
    layout: Layout,
    claimed: tuple[int, ...],
    leaf: jax.ShapeDtypeStruct,
    names: Names | None,
    mesh: MeshSpec,
    *,
    stacked: bool,
) -> Misfit | None:
    """Return the misfit of one parameter, or None; `claimed`: indices of the rules that match
    it.
    """
    rules = layout.params
    if len(claimed) > 1:
        return Misfit(
            tuple(fixes.claim_lines(rules, claimed, "rules match this parameter")),
            claimed=claimed,
            kind="overlap",
        )
    if not claimed and names and layout.axes:
        problem = _names_problem(layout, leaf, names, mesh)
        if problem:
            return problem
    elif not claimed and layout.default.params == "error":
        return Misfit(('no rule matches it, and [default] params is "error".',), kind="no_rule")
    try:
        spec, chosen_by = choose(layout, claimed, leaf.shape, names, mesh)
    except KeyError:
        # The default names an unknown axis, which _layout_problems reports.
        return REPORTED
    bad_axes, _ = _axis_lines(spec, mesh)
    if bad_axes:
        # The rule itself is reported.
        return REPORTED
    lines = fixes.spec_problems(spec, leaf.shape, mesh)
    where = f"{chosen_by}: spec {spec_text(spec)}"
    kind = "not_divisible"
    if len(spec) > len(leaf.shape):
        kind = "wrong_rank"
    if stacked and layout.stage_axis in spec_axes(spec):
        kind = "conflict"
        if lines:
            kind = "not_divisible"
        lines.append(
            f'mesh axis "{layout.stage_axis}" shards the layers of this stack ([pipeline]); a rule '
            "is about one layer."
        )
        # The fix is made from this spec, and no rule may name the axis of the stages.
        spec = keep_axes(spec, tuple(axis for axis in mesh.names if axis != layout.stage_axis))
    if not lines:
        return None
    return Misfit(tuple(lines), leaf.shape, describe(leaf), where, claimed, spec, kind=kind)


def _misfit_problem(
    layout: Layout,
    misfit: Misfit,
    paths: list[str],
    params: Params,
    claims: Mapping[str, tuple[int, ...]],
    mesh: MeshSpec,
) -> Problem:
    """Return the problem of all parameters that share a misfit, with a fix for all of them."""
    where = f"{paths[0]}   {describe(params[paths[0]])}"
    if misfit.chosen_by:
        where += f"   {misfit.chosen_by}"
    fix = misfit.fix
    rules = layout.params
    pattern = covering(paths, params)
    # A spec of logical axis names: the names may change, or a rule be added.
    if misfit.spec is not None and misfit.fix:
        fitted = spec_text(fixes.fitting_spec(misfit.spec, misfit.shape, mesh))
        fix = f"{misfit.fix}, or {fixes.rule_fix(rules, None, pattern, fitted)}."
    elif misfit.spec is not None:
        spec, width = fixes.spec_fix(misfit.spec, misfit.shape, mesh)
        index = None
        if misfit.claimed:
            index = misfit.claimed[0]
        fix = fixes.rule_fix(rules, index, pattern, spec)
        # No parameter of the rule fits, so its spec is wrong, and no exception is needed.
        if index is not None and [*claims.values()].count((index,)) == len(paths):
            fix = f"spec {spec}"
        if width:
            fix += f", or {width}"
        fix += "."
    elif misfit.claimed:
        fix = fixes.overlap_fix(rules, misfit.claimed, claims)
    elif not fix:
        rule = "a rule for each"
        if pattern:
            rule = f'a rule with  path = "{pattern}"'
        fix = f'{rule}, or  [default] params = "replicate".'
    number = None
    if len(misfit.claimed) == 1:
        number = misfit.claimed[0]
    at = {}
    if number is not None:
        at = {"rule": number + 1, "line": rules[number].line}
    return Problem(
        where, misfit.why, fix, fixes.more_names(paths), paths[0], **at, kind=misfit.kind
    )


def _names_problem(
    layout: Layout, leaf: jax.ShapeDtypeStruct, names: Names, mesh: MeshSpec
) -> Misfit | None:
    """Return the misfit of logical axis names that the layout does not map, or maps to one mesh
    axis twice. Dims after the last name have none.
    """
    axes = dict(layout.axes)
    shape = leaf.shape
    array = describe(leaf)
    chosen_by = f"axes ({names_text(names)})"
    if len(names) > len(shape):
        why = f"{len(names)} logical axis names for {len(shape)} dims."
        return Misfit(
            (why,),
            shape,
            array,
            chosen_by,
            fix="one name per dim, None for none.",
            kind="wrong_rank",
        )
    missing = [name for name in dict.fromkeys(each_name(names)) if name not in axes]
    if missing:
        why = tuple(f'logical axis "{name}" is not in [axes].' for name in missing)
        spec, fix = _with_names(axes, names, missing, shape, mesh)
        return Misfit(why, shape, array, chosen_by, spec=spec, fix=fix, kind="unknown_axis")
    spec = named_spec(names, axes)
    repeated = _repeated_axes(spec)
    if repeated:
        fix = 'map one of its logical axes to another mesh axis, or to "-"'
        chosen_by = f"{chosen_by}: spec {spec_text(spec)}"
        return Misfit(
            tuple(repeated.values()),
            shape,
            array,
            chosen_by,
            spec=_first_uses(spec),
            fix=fix,
            kind="repeated_axis",
        )
    return None


def _with_names(
    axes: Mapping[str, Entry],
    names: Names,
    missing: list[str],
    shape: tuple[int, ...],
    mesh: MeshSpec,
) -> tuple[Spec, str]:
    """Return the spec if `[axes]` replicates the names that it lacks, and verified changes to
    `[axes]`; "" if none of them fits.
    """

    def fits(entries: Mapping[str, Entry]) -> bool:
        spec = named_spec(names, {**axes, **entries})
        bad_axes, _ = _axis_lines(spec, mesh)
        return not (bad_axes or fixes.spec_problems(spec, shape, mesh))

    replicated = dict.fromkeys(missing)
    changes = []
    near = {name: close for name in missing if (close := closest(name, axes))}
    if len(near) == len(missing) and fits({name: axes[close] for name, close in near.items()}):
        quoted_names = " and ".join(f'"{close}"' for close in near.values())
        changes.append(f"did you mean {quoted_names}?")
    same = {name: name for name in missing if name in mesh.names}
    added = replicated
    if fits({**replicated, **same}):
        added = {**replicated, **same}
    if fits(added):
        entries = "  and  ".join(f'{name} = "{axis or REPLICATED}"' for name, axis in added.items())
        verb = "add"
        if changes:
            verb = "Or add"
        changes.append(f"{verb}  {entries}  to [axes]")
    return _first_uses(named_spec(names, {**axes, **replicated})), " ".join(changes)


def _first_uses(spec: Spec) -> Spec:
    """Return the spec with only the first use of every mesh axis."""
    used: set[str] = set()
    entries = []
    for entry in spec:
        axes = [axis for axis in dict.fromkeys(entry_axes(entry)) if axis not in used]
        used.update(axes)
        entries.append(make_entry(tuple(axes)))
    return tuple(entries)
