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
    """What is wrong with a parameter, without its path: parameters that share it are reported as
    one problem.

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


REPORTED = Misfit(())  # its cause is reported as a problem of the layout


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

    stacked_params, params = params, one_layer(params, stacks)
    problems = [*_layout_problems(layout, mesh), *_rule_problems(layout, params, mesh)]
    problems += _codec_problems(
        layout, {path: leaf for path, leaf in params.items() if path not in frozen}, mesh
    )
    problems += _pipeline_problems(layout, stacks, mesh)
    matching_rules = rule_matcher(layout.params)
    claims = {path: tuple(matching_rules(path)) for path in params}
    misfits: dict[Misfit, list[str]] = {}
    for path, leaf in params.items():
        misfit = _misfit(layout, claims[path], leaf, names.get(path), mesh, stacked=path in stacks)
        if misfit:
            misfits.setdefault(misfit, []).append(path)
    fitting = len(params) - sum(map(len, misfits.values()))
    misfits.pop(REPORTED, None)
    problems += [
        _misfit_problem(layout, misfit, paths, params, claims, mesh)
        for misfit, paths in misfits.items()
    ]
    headline = f"{layout.source} does not fit this model on mesh {mesh}"
    raise_problems(LayoutError, headline, problems, f"{fitting} of {len(params)} parameters fit")
    resolved = keep_frozen(resolve(layout, params, names, mesh, stacks), frozen)
    raise_problems(LayoutError, headline, resolved_problems(resolved, params, names, stacks, fits))
    return resolved


def _axis_lines(spec: Spec, mesh: MeshSpec) -> tuple[list[str], str]:
    """What is wrong with a spec for every array, and a fix: unknown axes, and axes used more than
    once.
    """
    unknown = [
        problem for axis in dict.fromkeys(spec_axes(spec)) if (problem := axis_problem(axis, mesh))
    ]
    repeated = _repeated_axes(spec)
    fix = (
        unknown[-1][1]
        if unknown
        else f'keep "{next(iter(repeated), "")}" in one place and write "-" in the other.'
    )
    return [*(line for lines, _ in unknown for line in lines), *repeated.values()], fix


def _repeated_axes(spec: Spec) -> dict[str, str]:
    """What is wrong with every mesh axis that a spec has more than once."""
    counts = Counter(spec_axes(spec))
    why = 'mesh axis "{}" is used {} times; an array can be sharded over it once.'
    return {axis: why.format(axis, count) for axis, count in counts.items() if count > 1}


def _axis_problems(
    where: str, spec: Spec, layout: Layout, mesh: MeshSpec, **at: Any
) -> Iterator[Problem]:
    """Unknown and repeated mesh axes of a spec, as one problem."""
    lines, fix = _axis_lines(spec, mesh)
    unknown = set(spec_axes(spec)) - set(mesh.names)
    if unknown & dict(layout.mesh).keys():
        fix = (
            f"{option('mesh', quoted(','.join(f'{axis}={size}' for axis, size in layout.mesh)))}, "
            "as the layout declares."
        )
    if lines:
        yield Problem(where, lines, fix, **at, kind="unknown_axis" if unknown else "repeated_axis")


def _layout_problems(layout: Layout, mesh: MeshSpec) -> Iterator[Problem]:
    """Problems of the layout itself, outside its parameter rules."""
    specs = {"[batch] spec": layout.batch.spec}
    specs |= {
        f"[[batch.rules]] {rule_name(layout.batch.rules, n)}": rule.spec
        for n, rule in enumerate(layout.batch.rules)
    }
    specs |= {
        f"[[activations]] {rule_name(layout.activations, n)}": rule.spec
        for n, rule in enumerate(layout.activations)
    }
    specs |= {f'[axes] "{name}"': (entry,) for name, entry in layout.axes}
    tables = {
        "pipeline": layout.pipeline.axis,
        "sequence": layout.sequence.axis,
        "experts": layout.experts.axis,
    }
    specs |= {f"[{table}] axis": (axis,) for table, axis in tables.items()}
    specs["[optimizer] shard"] = (layout.optimizer.shard,)
    specs[f'[default] params = "{layout.default.params}"'] = (
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
    """Numbers of layers that the pipeline's stages do not divide, and remat that a schedule
    repeats.
    """
    axis, groups = layout.pipeline.axis, layout.pipeline.groups
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
    parts, stages = mesh.sizes[axis] * groups, mesh.sizes[axis]
    for count in sorted(set(stacks.values())):
        if count % parts:
            paths = [path for path, layers in stacks.items() if layers == count]
            of = f'mesh axis "{axis}" has {stages} devices' + (
                f" of {groups} groups each" if groups > 1 else ""
            )
            sizes = [
                size for size in range(min(stages, count), 0, -1) if count % (size * groups) == 0
            ]
            fix = f"{fixes.near_multiples(count, parts)} layers" + (
                f', or mesh axis "{axis}" of size {sizes[0]}' if sizes else ""
            )
            why = f"a stack of {count} layers; {of}; {count} / {parts} leaves {count % parts}."
            yield Problem(
                f"[pipeline]   {fixes.first_names(paths)}",
                [why],
                f"{fix}.",
                path=paths[0],
                kind="not_divisible",
            )


def _rule_problems(layout: Layout, params: Params, mesh: MeshSpec) -> Iterator[Problem]:
    """Rules that match nothing, or have unknown or repeated mesh axes; `except` patterns that match
    nothing.
    """
    match_problems = fixes.match_checker(layout.params, params, "parameter")
    for number, rule in enumerate(layout.params):
        where, at = (
            f'{rule_name(layout.params, number)}: path "{rule.path}"',
            {"rule": number + 1, "line": rule.line},
        )
        yield from match_problems(where, rule, at)
        yield from _axis_problems(
            f"{where}, spec {spec_text(rule.spec)}", rule.spec, layout, mesh, **at
        )


def _codec_problems(layout: Layout, params: Params, mesh: MeshSpec) -> Iterator[Problem]:
    """Rules of `[gradients]` that match nothing or overlap, and exact axes over which no gradients
    are reduced.
    """
    rules, data = layout.gradients.rules, layout.data_axes()
    match_problems, matching_rules = (
        fixes.match_checker(rules, params, "parameter"),
        rule_matcher(rules),
    )
    for number, rule in enumerate(rules):
        where = f'[[gradients.rules]] {rule_name(rules, number)}: path "{rule.path}"'
        yield from match_problems(where, rule, {"rule": number + 1, "line": rule.line})
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
            unknown = axis_problem(axis, mesh)
            lines, fix = unknown or (
                [f'"{axis}" is not a data axis.'],
                f"one of the data axes: {', '.join(data)}.",
            )
            yield Problem(
                "[gradients] exact_axes", lines, fix, kind="unknown_axis" if unknown else "conflict"
            )
    if layout.gradients.exact_axes and set(layout.gradients.exact_axes) >= set(data):
        why = f"every data axis ({', '.join(data)}) is reduced exactly, so no codec is used."
        several = 'leave it out, or shard the batch over two axes, such as ["node", "data"].'
        fix = "leave out the axis that crosses nodes." if len(data) > 1 else several
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
    """What is wrong with one parameter, or None; `claimed`: indices of the rules that match it."""
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
        return REPORTED  # the default names an unknown axis, which _layout_problems reports
    if _axis_lines(spec, mesh)[0]:
        return REPORTED  # with the rule
    lines, where = (
        fixes.spec_problems(spec, leaf.shape, mesh),
        f"{chosen_by}: spec {spec_text(spec)}",
    )
    kind = "wrong_rank" if len(spec) > len(leaf.shape) else "not_divisible"
    if stacked and layout.stage_axis in spec_axes(spec):
        kind = "not_divisible" if lines else "conflict"
        lines.append(
            f'mesh axis "{layout.stage_axis}" shards the layers of this stack ([pipeline]); a rule '
            "is about one layer."
        )
        spec = keep_axes(spec, tuple(axis for axis in mesh.names if axis != layout.stage_axis))
    return (
        Misfit(tuple(lines), leaf.shape, describe(leaf), where, claimed, spec, kind=kind)
        if lines
        else None
    )


def _misfit_problem(
    layout: Layout,
    misfit: Misfit,
    paths: list[str],
    params: Params,
    claims: Mapping[str, tuple[int, ...]],
    mesh: MeshSpec,
) -> Problem:
    """The problem of all parameters that share a misfit, with a fix for all of them."""
    where = f"{paths[0]}   {describe(params[paths[0]])}" + (
        f"   {misfit.chosen_by}" if misfit.chosen_by else ""
    )
    fix, rules, pattern = misfit.fix, layout.params, covering(paths, params)
    if misfit.spec is not None and misfit.fix:  # of logical axis names
        fitted = spec_text(fixes.fitting_spec(misfit.spec, misfit.shape, mesh))
        fix = f"{misfit.fix}, or {fixes.rule_fix(rules, None, pattern, fitted)}."
    elif misfit.spec is not None:
        spec, width = fixes.spec_fix(misfit.spec, misfit.shape, mesh)
        index = misfit.claimed[0] if misfit.claimed else None
        all_of_rule = index is not None and sum(
            claimed == (index,) for claimed in claims.values()
        ) == len(paths)
        fix = (f"spec {spec}" if all_of_rule else fixes.rule_fix(rules, index, pattern, spec)) + (
            f", or {width}." if width else "."
        )
    elif misfit.claimed:
        fix = fixes.overlap_fix(rules, misfit.claimed, claims)
    elif not fix:
        rule = f'a rule with  path = "{pattern}"' if pattern else "a rule for each"
        fix = f'{rule}, or  [default] params = "replicate".'
    number = misfit.claimed[0] if len(misfit.claimed) == 1 else None
    at = {} if number is None else {"rule": number + 1, "line": rules[number].line}
    return Problem(
        where, misfit.why, fix, fixes.more_names(paths), paths[0], **at, kind=misfit.kind
    )


def _names_problem(
    layout: Layout, leaf: jax.ShapeDtypeStruct, names: Names, mesh: MeshSpec
) -> Misfit | None:
    """Logical axis names that the layout does not map, or maps to one mesh axis twice. Dims after
    the last name have none.
    """
    axes, shape = dict(layout.axes), leaf.shape
    array, chosen_by = describe(leaf), f"axes ({names_text(names)})"
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
    """The spec if `[axes]` replicates the names that it lacks, and verified changes to `[axes]`; ""
    if none of them fits.
    """

    def fits(entries: Mapping[str, Entry]) -> bool:
        spec = named_spec(names, {**axes, **entries})
        return not (_axis_lines(spec, mesh)[0] or fixes.spec_problems(spec, shape, mesh))

    replicated, changes = dict.fromkeys(missing), []
    near = {name: close for name in missing if (close := closest(name, axes))}
    if len(near) == len(missing) and fits({name: axes[close] for name, close in near.items()}):
        changes.append(
            "did you mean " + " and ".join(f'"{close}"' for close in near.values()) + "?"
        )
    same = {name: name for name in missing if name in mesh.names}
    added = {**replicated, **same} if fits({**replicated, **same}) else replicated
    if fits(added):
        entries = "  and  ".join(f'{name} = "{axis or REPLICATED}"' for name, axis in added.items())
        changes.append(f"{'Or add' if changes else 'add'}  {entries}  to [axes]")
    return _first_uses(named_spec(names, {**axes, **replicated})), " ".join(changes)


def _first_uses(spec: Spec) -> Spec:
    """The spec with only the first use of every mesh axis."""
    seen: set[str] = set()
    return tuple(
        make_entry(
            tuple(axis for axis in entry_axes(entry) if not (axis in seen or seen.add(axis)))
        )
        for entry in spec
    )
