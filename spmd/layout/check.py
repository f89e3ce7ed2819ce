"""Every way a layout can fail to fit a model on a mesh, found at once, each with a fix that was tried."""

import dataclasses
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from spmd.errors import LayoutError, Problem, closest, raise_problems
from spmd.layout.activations import data_axis_problems
from spmd.layout.check_resolved import resolved_problems
from spmd.layout.fixes import first_names, fitting_spec, overlap_fix, path_fix, rule_fix, spec_fix, spec_problems
from spmd.layout.match import covering, matches
from spmd.layout.resolve import Names, Resolved, choose, each_name, matching_rules, named_spec, names_text, one_layer, resolve, rule_name
from spmd.layout.schema import REPLICATED, Entry, Layout, Rule, Spec, entry_axes, keep_axes, spec_axes, spec_text
from spmd.mesh import MeshSpec, axis_problem
from spmd.tree import describe

Params = Mapping[str, jax.ShapeDtypeStruct]


@dataclasses.dataclass(frozen=True)
class Misfit:
    """What is wrong with a parameter, without its path: parameters that share it are told as one problem.

    `spec` is the rejected one, whose fix is found when all that share it are known; `rule` the rule it came from.
    """

    why: tuple[str, ...]
    shape: tuple[int, ...] = ()
    array: str = ""
    chosen_by: str = ""
    claimed: tuple[int, ...] = ()
    spec: Spec | None = None
    fix: str = ""


TOLD = Misfit(())  # its cause is a problem of the layout, told once there


def fit_layout(
    layout: Layout, params: Params, names: Mapping[str, Names], mesh: MeshSpec, stacks: Mapping[str, int] = types.MappingProxyType({})
) -> Resolved:
    """Check a layout against a model's shapes on a mesh, and apply it.

    Args:
      stacks: how many layers there are along dim 0, by path, for parameters of stacks: rules speak of one layer's.

    Raises:
      LayoutError: with every problem found, the arithmetic, and a fix that passes the same check.
    """
    on = lambda other: fit_layout(layout, all_layers, names, other, stacks)
    all_layers, params = params, one_layer(params, stacks)
    claims = {path: tuple(matching_rules(layout.params, path)) for path in params}
    problems = [*_layout_problems(layout, mesh), *_rule_problems(layout.params, params, mesh), *_codec_problems(layout, params, mesh)]
    problems += _pipeline_problems(layout, stacks, mesh)
    misfits: dict[Misfit, list[str]] = {}
    for path, leaf in params.items():
        found = _misfit(layout, claims[path], path, leaf, names.get(path), mesh, stacked=path in stacks)
        if found:
            misfits.setdefault(found, []).append(path)
    fitting = len(params) - sum(map(len, misfits.values()))
    misfits.pop(TOLD, None)
    problems += [_told(layout, misfit, paths, params, claims, mesh) for misfit, paths in misfits.items()]
    headline = f"{layout.source} does not fit this model on mesh {mesh}"
    raise_problems(LayoutError, headline, problems, f"{fitting} of {len(params)} parameters fit")
    resolved = resolve(layout, params, names, mesh, stacks)
    raise_problems(LayoutError, headline, resolved_problems(resolved, params, names, stacks, functools.partial(_passes, on)))
    return resolved


def _passes(check: Callable[..., Any], *args: Any) -> bool:
    """Whether a check finds no problem."""
    try:
        check(*args)
    except LayoutError:
        return False
    return True


def _axis_lines(spec: Spec, mesh: MeshSpec) -> tuple[list[str], str]:
    """What is wrong with a spec whatever it is applied to: unknown axes, and axes used twice."""
    lines, fix = [], ""
    axes = spec_axes(spec)
    for axis in dict.fromkeys(axes):
        unknown = axis_problem(axis, mesh)
        if unknown:
            lines += unknown[0]
            fix = unknown[1]
        if axes.count(axis) > 1:
            lines.append(f'mesh axis "{axis}" is used {axes.count(axis)} times; an array can be cut over it once.')
            fix = fix or f'keep "{axis}" in one place and write "-" in the other.'
    return lines, fix


def _layout_problems(layout: Layout, mesh: MeshSpec) -> Iterator[Problem]:
    """Problems of the layout itself, outside its parameter rules."""
    where = {"[batch] spec": layout.batch.spec}
    where |= {f"[[batch.rules]] {rule_name(layout.batch.rules, n)}": rule.spec for n, rule in enumerate(layout.batch.rules)}
    where |= {f"[[activations]] {rule_name(layout.activations, n)}": rule.spec for n, rule in enumerate(layout.activations)}
    where |= {f'[axes] "{name}"': (entry,) for name, entry in layout.axes}
    where["[pipeline] axis"], where["[sequence] axis"] = (layout.pipeline.axis,), (layout.sequence.axis,)
    where["[experts] axis"] = (layout.experts.axis,)
    where["[optimizer] shard"] = (layout.optimizer.shard,)
    where[f'[default] params = "{layout.default.params}"'] = (layout.default.params.partition(":")[2] or None,)
    for name, spec in where.items():
        lines, fix = _axis_lines(spec, mesh)
        if any(axis in dict(layout.mesh) and axis not in mesh.names for axis in spec_axes(spec)):
            fix = f'mesh="{",".join(f"{axis}={size}" for axis, size in layout.mesh)}", which the layout has itself.'
        if lines:
            yield Problem(name, lines, fix)
    yield from data_axis_problems(layout)
    for section, axis in (("sequence", layout.sequence.axis), ("experts", layout.experts.axis)):
        if axis in layout.data_axes():
            why = f'"{axis}" cuts the rows of the batch among workers, so it cannot cut what one worker has.'
            yield Problem(f"[{section}] axis", [why], f"another axis than {', '.join(layout.data_axes())}.")


def _pipeline_problems(layout: Layout, stacks: Mapping[str, int], mesh: MeshSpec) -> Iterator[Problem]:
    """Stacks that the pipeline's stages do not divide, and an axis that has something else to do."""
    axis, groups = layout.pipeline.axis, layout.pipeline.groups
    if axis is None or axis not in mesh.names:
        return
    if axis in layout.data_axes():
        why = f'mesh axis "{axis}" cuts the batch; a stage sees all rows of its worker.'
        yield Problem("[pipeline] axis", [why], 'an axis of its own, such as "stage".')
    for section, other in (("sequence", layout.sequence.axis), ("experts", layout.experts.axis)):
        if axis == other:
            why = f'mesh axis "{axis}" cuts the layers ([pipeline]); on one stage there is nothing along it to cut.'
            yield Problem(f"[{section}] axis", [why], "an axis of its own.")
    if layout.pipeline.schedule == "1f1b" and layout.remat.saves != "everything" and not layout.remat.modules:
        why = "a 1f1b stage keeps its input, and computes everything else again in any case."
        yield Problem("[remat] save", [why], 'leave it out, or name the layers: modules = ["**/layers"].')
    parts, stages, count = mesh.sizes[axis] * groups, mesh.sizes[axis], layout.pipeline.microbatches or 0
    if groups > 1 and count % stages:
        why = f"{count} microbatches, {stages} at a time through each group; {count} / {stages} leaves {count % stages}."
        near = " or ".join(map(str, sorted({max(stages, count // stages * stages), -(-count // stages) * stages})))
        yield Problem("[pipeline] microbatches", [why], f"{near}.")
    for count in sorted(set(stacks.values())):
        if count % parts:
            own = [path for path, layers in stacks.items() if layers == count]
            of = f'mesh axis "{axis}" has {stages} devices' + (f" of {groups} groups each" if groups > 1 else "")
            near = " or ".join(map(str, sorted({max(parts, count // parts * parts), -(-count // parts) * parts})))
            sizes = [size for size in range(min(stages, count), 0, -1) if count % (size * groups) == 0]
            fix = f"{near} layers" + (f', or mesh axis "{axis}" of size {sizes[0]}' if sizes else "")
            why = f"a stack of {count} layers; {of}; {count} / {parts} leaves {count % parts}."
            yield Problem(f"[pipeline]   {first_names(own)}", [why], f"{fix}.")


def _rule_problems(rules: tuple[Rule, ...], params: Params, mesh: MeshSpec) -> Iterator[Problem]:
    """Rules that match nothing, name axes the mesh lacks, or use one twice; `except` patterns that take nothing away."""
    for number, rule in enumerate(rules):
        where = f'{rule_name(rules, number)}: path "{rule.path}"'
        found = matches(rule.path, params)
        if not found:
            yield Problem(f"{where} matches no parameter.", [], path_fix(rule.path, params))
        lines, fix = _axis_lines(rule.spec, mesh)
        if lines:
            yield Problem(f"{where}, spec {spec_text(rule.spec)}", lines, fix)
        yield from _except_problems(where, rule.except_, found)


def _except_problems(where: str, patterns: tuple[str, ...], found: list[str]) -> Iterator[Problem]:
    for other in patterns if found else ():
        if not matches(other, found):
            yield Problem(f'{where}, except "{other}"', ["takes no parameter away from this rule."], path_fix(other, found))
    if found and {path for other in patterns for path in matches(other, found)} == set(found):
        yield Problem(f"{where}, except {', '.join(patterns)}", ["leaves no parameter to this rule."], "leave the rule out.")


def _codec_problems(layout: Layout, params: Params, mesh: MeshSpec) -> Iterator[Problem]:
    """Rules of `[gradients]` that match nothing or disagree, and exact axes that gradients do not meet over."""
    rules, data = layout.gradients.rules, layout.data_axes()
    for number, rule in enumerate(rules):
        where, found = f'[[gradients.rules]] {rule_name(rules, number)}: path "{rule.path}"', matches(rule.path, params)
        if not found:
            yield Problem(f"{where} matches no parameter.", [], path_fix(rule.path, params))
        yield from _except_problems(where, rule.except_, found)
    for path, leaf in params.items() if len(rules) > 1 else ():
        claimed = matching_rules(rules, path)
        if len(claimed) > 1:
            why = [f'{rule_name(rules, index)} claims it: path "{rules[index].path}", codec {rules[index].codec}' for index in claimed]
            yield Problem(
                f"{path}   {describe(leaf)}",
                [f"{len(claimed)} [[gradients.rules]] match this parameter.", *why],
                "name it in one's  except.",
            )
    inside = layout.gradients.exact_axes
    for axis in inside:
        if axis not in data:
            unknown = axis_problem(axis, mesh)
            lines, fix = unknown or ([f'"{axis}" is no data axis.'], f"of the axes that the batch is cut over: {', '.join(data)}.")
            yield Problem("[gradients] exact_axes", lines, fix)
    if inside and set(inside) >= set(data):
        why = f"every data axis ({', '.join(data)}) is reduced exactly, so no codec has anything to do."
        fix = (
            "leave the axis that crosses nodes out."
            if len(data) > 1
            else 'leave it out, or cut the batch over two axes, such as ["node", "data"].'
        )
        yield Problem("[gradients] exact_axes", [why], fix)


def _misfit(
    layout: Layout,
    claimed: tuple[int, ...],
    path: str,
    leaf: jax.ShapeDtypeStruct,
    names: Names | None,
    mesh: MeshSpec,
    *,
    stacked: bool,
) -> Misfit | None:
    """What is wrong with one parameter, or None."""
    rules = layout.params
    if len(claimed) > 1:
        why = [f'{rule_name(rules, index)} claims it: path "{rules[index].path}"' for index in claimed]
        return Misfit((f"{len(claimed)} rules match this parameter.", *why), claimed=claimed)
    if not claimed and names and layout.axes:
        problem = _names_problem(layout, leaf, names, mesh)
        if problem:
            return problem
    elif not claimed and layout.default.params == "error":
        return Misfit(('no rule matches it, and [default] params is "error".',))
    try:
        spec, chosen_by = choose(layout, path, leaf.shape, names, mesh)
    except KeyError:
        return TOLD  # the default names an unknown axis: told once, by _layout_problems
    if _axis_lines(spec, mesh)[0]:
        return TOLD  # once, by the rule
    lines, where = spec_problems(spec, leaf.shape, mesh), f"{chosen_by}: spec {spec_text(spec)}"
    if stacked and layout.stage_axis in spec_axes(spec):
        lines.append(f'mesh axis "{layout.stage_axis}" cuts the layers of this stack ([pipeline]); a rule speaks of one layer.')
        spec = keep_axes(spec, tuple(axis for axis in mesh.names if axis != layout.stage_axis))
    return Misfit(tuple(lines), leaf.shape, describe(leaf), where, claimed, spec) if lines else None


def _told(
    layout: Layout, misfit: Misfit, paths: list[str], params: Params, claims: Mapping[str, tuple[int, ...]], mesh: MeshSpec
) -> Problem:
    """One misfit and everything that shares it, in words, with a fix for all of them."""
    where = f"{paths[0]}   {describe(params[paths[0]])}" + (f"   {misfit.chosen_by}" if misfit.chosen_by else "")
    more = [f"and {len(paths) - 1} more: {first_names(paths[1:])}."] if len(paths) > 1 else []
    fix, rules, pattern = misfit.fix, layout.params, covering(paths, params)
    if misfit.spec is not None and misfit.fix:  # of logical axis names
        fitted = spec_text(fitting_spec(misfit.spec, misfit.shape, mesh))
        fix = f"{misfit.fix}, or {rule_fix(rules, None, pattern, fitted)}."
    elif misfit.spec is not None:
        spec, width = spec_fix(misfit.spec, misfit.shape, mesh)
        rule = misfit.claimed[0] if misfit.claimed else None
        alone = rule is not None and sum(claimed == (rule,) for claimed in claims.values()) == len(paths)
        fix = (f"spec {spec}" if alone else rule_fix(rules, rule, pattern, spec)) + (f", or {width}." if width else ".")
    elif misfit.claimed:
        fix = overlap_fix(rules, misfit.claimed, claims)
    elif not fix:
        own = f'a rule with  path = "{pattern}"' if pattern else "a rule for each"
        fix = f'{own}, or  [default] params = "replicate".'
    return Problem(where, [*more, *misfit.why], fix)


def _names_problem(layout: Layout, leaf: jax.ShapeDtypeStruct, names: Names, mesh: MeshSpec) -> Misfit | None:
    """Logical axis names that the layout does not map, or maps to one mesh axis twice. Fewer names than dims say nothing of the last."""
    axes, shape = dict(layout.axes), leaf.shape
    array, chosen_by = describe(leaf), f"axes ({names_text(names)})"
    if len(names) > len(shape):
        why = f"{len(names)} logical axis names for {len(shape)} dims."
        return Misfit((why,), shape, array, chosen_by, fix="one name per dim, None for none.")
    missing = [name for name in dict.fromkeys(each_name(names)) if name not in axes]
    if missing:
        why = tuple(f'logical axis "{name}" is not in [axes].' for name in missing)
        spec, fix = _with_names(axes, names, missing, shape, mesh)
        return Misfit(why, shape, array, chosen_by, spec=spec, fix=fix)
    spec = named_spec(names, axes)
    lines = [line for line in _axis_lines(spec, mesh)[0] if "times" in line]
    if lines:
        fix = 'map one of its logical axes to another mesh axis, or to "-"'
        return Misfit(tuple(lines), shape, array, f"{chosen_by}: spec {spec_text(spec)}", spec=_once(spec), fix=fix)
    return None


def _with_names(axes: Mapping[str, Entry], names: Names, missing: list[str], shape: tuple[int, ...], mesh: MeshSpec) -> tuple[Spec, str]:
    """The spec where `[axes]` keeps names whole that it lacks, and changes to it that were tried; "" where none of them fits."""
    fits = lambda more: not _spec_lines(named_spec(names, {**axes, **more}), shape, mesh)
    whole, fixes = dict.fromkeys(missing), []
    near = {name: close for name in missing if (close := closest(name, axes))}
    if len(near) == len(missing) and fits({name: axes[close] for name, close in near.items()}):
        fixes.append("did you mean " + " and ".join(f'"{close}"' for close in near.values()) + "?")
    same = {name: name for name in missing if name in mesh.names}
    added = {**whole, **same} if fits({**whole, **same}) else whole
    if fits(added):
        entries = "  and  ".join(f'{name} = "{axis or REPLICATED}"' for name, axis in added.items())
        fixes.append(f"{'Or add' if fixes else 'add'}  {entries}  to [axes]")
    return _once(named_spec(names, {**axes, **whole})), " ".join(fixes)


def _spec_lines(spec: Spec, shape: tuple[int, ...], mesh: MeshSpec) -> list[str]:
    """What is wrong with a spec for an array of this shape."""
    return _axis_lines(spec, mesh)[0] or spec_problems(spec, shape, mesh)


def _once(spec: Spec) -> Spec:
    """The spec with every mesh axis where it is named first, and nowhere else."""
    seen: set[str] = set()
    kept = [tuple(axis for axis in entry_axes(entry) if not (axis in seen or seen.add(axis))) for entry in spec]
    return tuple(None if not axes else axes[0] if len(axes) == 1 else axes for axes in kept)
