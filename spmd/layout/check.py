"""Every way a layout can fail to fit a model on a mesh, found at once, each with a cure that was tried."""

from collections.abc import Iterable, Iterator, Mapping

import jax

from spmd.errors import LayoutError, Problem, did_you_mean, raise_problems
from spmd.layout.declare import Layout, Rule, Spec, entry_axes, spec_axes, spec_text
from spmd.layout.match import compiled, matches, suggest
from spmd.layout.resolve import Names, Resolved, choose, owners, resolve, rule_name, ways
from spmd.mesh import MeshSpec, axis_problem
from spmd.tree import describe, format_bytes, nbytes

Params = Mapping[str, jax.ShapeDtypeStruct]


def fit_layout(layout: Layout, params: Params, names: Mapping[str, Names], mesh: MeshSpec) -> Resolved:
    """Check a layout against a model's shapes on a mesh, and apply it.

    Raises:
      LayoutError: with every problem found, the arithmetic, and a cure that passes the same check.
    """
    problems = [*_layout_problems(layout, mesh), *_rule_problems(layout.params, params, mesh)]
    broken = {path: problem for path in params if (problem := _param_problem(layout, path, params[path], names.get(path), mesh))}
    problems += broken.values()
    headline = f"{layout.source} does not fit this model on mesh {mesh}"
    raise_problems(LayoutError, headline, problems, f"{len(params) - len(broken)} of {len(params)} parameters fit")
    resolved = resolve(layout, params, names, mesh)
    raise_problems(LayoutError, headline, list(_share_problems(resolved, params)))
    return resolved


def spec_problems(spec: Spec, shape: tuple[int, ...], mesh: MeshSpec) -> list[str]:
    """Why `spec` cannot lay out an array of `shape` on `mesh`, with the numbers; empty when it can."""
    if len(spec) > len(shape):
        return [f"the spec has {len(spec)} entries, the array has {len(shape)} dim{'s' * (len(shape) != 1)}."]
    lines = []
    for dim, entry in enumerate(spec):
        pieces = ways((entry,), mesh)
        if shape[dim] % pieces:
            axes = entry_axes(entry)
            what = f'mesh axis "{axes[0]}" has' if len(axes) == 1 else f"mesh axes {' and '.join(axes)} together have"
            lines.append(f"dim {dim} has size {shape[dim]}; {what} {pieces} devices; {shape[dim]} / {pieces} leaves {shape[dim] % pieces}.")
    return lines


def spec_cure(spec: Spec, shape: tuple[int, ...], mesh: MeshSpec) -> str:
    """A spec near to `spec` that fits, and the sizes that would fit `spec`; tried with `spec_problems`."""
    fixed = tuple(None if spec_problems((None,) * dim + (entry,), shape, mesh) else entry for dim, entry in enumerate(spec[: len(shape)]))
    sums = [f"{shape[dim]} / {ways((entry,), mesh)} = {shape[dim] // ways((entry,), mesh)}" for dim, entry in enumerate(fixed) if entry]
    cure = f"spec {spec_text(fixed)}" + (f" ({', '.join(sums)})" if sums else "")
    if spec_problems(fixed, shape, mesh):
        return ""
    bad = [dim for dim, entry in enumerate(spec[: len(shape)]) if shape[dim] % ways((entry,), mesh)]
    if len(spec) <= len(shape) and len(bad) == 1:
        pieces = ways((spec[bad[0]],), mesh)
        cure += f", or a width divisible by {pieces}, such as {-(-shape[bad[0]] // pieces) * pieces}"
    return cure + "."


def _axis_lines(spec: Spec, mesh: MeshSpec) -> tuple[list[str], str]:
    """What is wrong with a spec whatever it is applied to: unknown axes, and axes used twice."""
    lines, cure = [], ""
    axes = spec_axes(spec)
    for axis in dict.fromkeys(axes):
        unknown = axis_problem(axis, mesh)
        if unknown:
            lines += unknown[0]
            cure = unknown[1]
        if axes.count(axis) > 1:
            lines.append(f'mesh axis "{axis}" is used {axes.count(axis)} times; an array can be cut over it once.')
            cure = cure or f'keep "{axis}" in one place and write "-" in the other.'
    return lines, cure


def _layout_problems(layout: Layout, mesh: MeshSpec) -> Iterator[Problem]:
    """Problems of the layout itself, outside its parameter rules."""
    where = {"[batch] spec": layout.batch.spec}
    where |= {f"[[batch.rules]] {rule_name(layout.batch.rules, n)}": rule.spec for n, rule in enumerate(layout.batch.rules)}
    where |= {f'[axes] "{name}"': (entry,) for name, entry in layout.axes}
    where["[optimizer] shard"] = (layout.optimizer.shard,)
    where[f'[default] params = "{layout.default.params}"'] = (layout.default.params.partition(":")[2] or None,)
    for name, spec in where.items():
        lines, cure = _axis_lines(spec, mesh)
        if lines:
            yield Problem(f"{name}:", lines, cure)


def _rule_problems(rules: tuple[Rule, ...], params: Params, mesh: MeshSpec) -> Iterator[Problem]:
    """Rules that match nothing, name axes the mesh lacks, or use one twice; `except` patterns that take nothing away."""
    for number, rule in enumerate(rules):
        where = f"{rule_name(rules, number)}: path {rule.path!r}".replace("'", '"')
        found = matches(rule.path, params)
        if not found:
            yield Problem(f"{where} matches no parameter.", [], _path_cure(rule.path, params))
        lines, cure = _axis_lines(rule.spec, mesh)
        if lines:
            yield Problem(f"{where}, spec {spec_text(rule.spec)}", lines, cure)
        for other in rule.except_ if found else ():
            if not any(compiled(other).fullmatch(path) for path in found):
                yield Problem(f'{where}, except "{other}"', ["takes no parameter away from this rule."], _path_cure(other, found))


def _path_cure(pattern: str, paths: Iterable[str]) -> str:
    paths = list(paths)
    near = suggest(pattern, paths)
    if near:
        return f'did you mean "{near[0]}"? It matches {near[1]}.'
    shown = ", ".join(paths[:5])
    return f"take the rule out, or match one of: {shown}{' ...' if len(paths) > 5 else ''}."


def _param_problem(layout: Layout, path: str, leaf: jax.ShapeDtypeStruct, names: Names | None, mesh: MeshSpec) -> Problem | None:
    """The problem of one parameter, or None."""
    head = f"{path}   {describe(leaf)}"
    claimed = owners(layout.params, path)
    if len(claimed) > 1:
        claims = [f'{rule_name(layout.params, index)} claims it: path "{layout.params[index].path}"' for index in claimed]
        later = layout.params[claimed[1]].path
        return Problem(
            head,
            [f"{len(claimed)} rules match this parameter.", *claims],
            f'add  except = ["{later}"]  to {rule_name(layout.params, claimed[0])}.',
        )
    if not claimed and names and layout.axes:
        problem = _names_problem(layout, head, leaf, names, mesh)
        if problem:
            return problem
    elif not claimed and layout.default.params == "error":
        return Problem(
            head, ['no rule matches it, and [default] params is "error".'], f'add a rule with  path = "{path}", or  params = "replicate".'
        )
    try:
        spec, chosen_by = choose(layout, path, leaf.shape, names, mesh)
    except KeyError:
        return None  # the default names an unknown axis: told once, by _layout_problems
    if _axis_lines(spec, mesh)[0]:
        return None  # told once, by the rule
    lines = spec_problems(spec, leaf.shape, mesh)
    return Problem(f"{head}   {chosen_by}: spec {spec_text(spec)}", lines, spec_cure(spec, leaf.shape, mesh)) if lines else None


def _names_problem(layout: Layout, head: str, leaf: jax.ShapeDtypeStruct, names: Names, mesh: MeshSpec) -> Problem | None:
    """Logical axis names that the layout does not map, or maps to one mesh axis twice."""
    axes = dict(layout.axes)
    shown = ", ".join(name or "-" for name in names)
    for name in names:
        if name and name not in axes:
            near = did_you_mean(name, axes)
            return Problem(
                f"{head}   axes ({shown})", [f'logical axis "{name}" is not in [axes].'], f'{near} Or add  {name} = "-"  to keep it whole.'
            )
    if len(names) != len(leaf.shape):
        return Problem(
            f"{head}   axes ({shown})", [f"{len(names)} logical axis names for {len(leaf.shape)} dims."], "one name per dim, None for none."
        )
    spec = tuple(axes[name] if name else None for name in names)
    lines = [line for line in _axis_lines(spec, mesh)[0] if "times" in line]
    if lines:
        return Problem(
            f"{head}   axes ({shown}): spec {spec_text(spec)}", lines, 'map one of its logical axes to another mesh axis, or to "-".'
        )
    return None


def _share_problems(resolved: Resolved, params: Params) -> Iterator[Problem]:
    """More bytes whole on every device than the layout's `max_replicated` allows."""
    limit, mesh = resolved.layout.default.max_replicated, resolved.mesh
    total = sum(nbytes(leaf) for leaf in params.values())
    whole = [place for place in resolved.placements.values() if not spec_axes(place.spec)]
    share = sum(place.nbytes for place in whole) / total if total else 0.0
    if limit is None or mesh.size == 1 or share <= limit:
        return
    largest = sorted(whole, key=lambda place: -place.nbytes)[:5]
    used = {axis for place in resolved.placements.values() for axis in spec_axes(place.spec)} | set(resolved.data_axes)
    free = [f"{axis} ({size} devices)" for axis, size in mesh.axes if size > 1 and axis not in used]
    lines = [f"{share:.1%} of the parameters' {format_bytes(total)} stay whole on every device; max_replicated = {limit:g}."]
    lines += [
        f"largest: {place.path}   {place.dtype}[{', '.join(map(str, place.shape))}]   {format_bytes(place.nbytes)}   {place.chosen_by}"
        for place in largest
    ]
    lines.append(f"mesh axes that no parameter uses: {', '.join(free) or 'none'}.")
    cure = f'rules or logical axis names for the largest, [default] params = "shard:AXIS", or max_replicated = {_round_up(share)}.'
    yield Problem("[default] max_replicated", lines, cure)


def _round_up(share: float) -> float:
    return min(1.0, int(share * 100 + 1) / 100)
