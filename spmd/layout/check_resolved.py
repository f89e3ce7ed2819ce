"""What a layout that fits every parameter still cannot do with this model on this mesh, each with a fix that was tried."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping

import jax

from spmd.errors import Problem
from spmd.layout.fixes import first_names
from spmd.layout.gradients import GradientRule
from spmd.layout.resolve import Names, Resolved, codec_rule, each_name, resolve
from spmd.layout.schema import entry_axes, mixes_data_axes, spec_axes, spec_text
from spmd.mesh import MeshSpec
from spmd.tree import describe, format_bytes

Params = Mapping[str, jax.ShapeDtypeStruct]


def resolved_problems(
    resolved: Resolved, params: Params, names: Mapping[str, Names], stacks: Mapping[str, int], fits: Callable[[MeshSpec], bool]
) -> list[Problem]:
    """Every problem of the layout as a whole. `fits` says whether it would have none on another mesh."""
    found = [
        *_share_problems(resolved, params, names, stacks),
        *_exchange_problems(resolved),
        *_server_problems(resolved),
        *_expert_problems(resolved),
    ]
    return found or list(_idle_problems(resolved, names, fits))  # what was found may be why an axis is idle


def _idle_problems(resolved: Resolved, names: Mapping[str, Names], fits: Callable[[MeshSpec], bool]) -> Iterator[Problem]:
    """Mesh axes that the layout names and that then shard nothing; of one that it does not name there is a note."""
    layout, mesh = resolved.layout, resolved.mesh
    declared = {axis: [name for name, entry in layout.axes if axis in entry_axes(entry)] for axis in mesh.names}
    for axis in resolved.idle_axes():
        if not declared[axis] and axis not in dict(layout.mesh):
            continue
        lines = [f'nothing is sharded over "{axis}", so its {mesh.sizes[axis]} devices would all do the same work.']
        logical = ", ".join(declared[axis])
        if logical:
            carried = sorted({name for of in names.values() for name in each_name(of)})
            have = f"they carry {first_names(carried)}" if carried else "they carry none"
            lines.append(f'[axes] shards {logical} over "{axis}", and no parameter has such a logical axis name: {have}.')
        fixes = [f"logical axis names ({logical}) on the model's parameters"] if logical else []
        fixes.append(f'[[params]] rules with "{axis}"')
        merged = _without(mesh, axis, layout.data_axes())
        if fits(merged):
            fixes.insert(0, f'mesh="{str(merged).replace(" ", "")}"')
        yield Problem(f'mesh axis "{axis}"', lines, ", or ".join(fixes) + ".")


def _without(mesh: MeshSpec, axis: str, data: tuple[str, ...]) -> MeshSpec:
    """The mesh with the devices of one axis given to the innermost data axis."""
    to = data[-1] if data else mesh.names[0]
    size = lambda name, count: count * mesh.sizes[axis] if name == to else 1 if name == axis else count
    return MeshSpec(tuple((name, size(name, count)) for name, count in mesh.axes))


def _exchange_problems(resolved: Resolved) -> Iterator[Problem]:
    """Gradients and weights that the exchange cannot cut as the layout asks."""
    layout, data, declared = resolved.layout, resolved.data_axes, resolved.layout.gradients
    if declared.reduction == "compiler" or resolved.workers == 1:
        return
    for place in resolved.placements.values():
        spec = place.state_spec if declared.reduction == "reduce_scatter" else place.spec
        chosen = codec_rule(declared, place.path)
        codec, where = chosen.codec, f"{place.path}   {place.dtype}[{', '.join(map(str, place.shape))}]"
        rule = f'[[gradients.rules]]  path = "{place.path}"'
        if isinstance(chosen, GradientRule):
            rule = f'except = ["{place.path}"]  in the rule for "{chosen.path}", and  {rule}'
        if codec != "exact" and place.dtype not in ("float32", "bfloat16", "float16"):
            yield Problem(
                where, [f"codec {codec} works in float32, which does not hold a gradient of {place.dtype}."], f'{rule}  codec = "exact".'
            )
        if codec != "exact" and mixes_data_axes(spec, data):
            why = f"a dim is cut over a data axis and another one together, which codec {codec} cannot follow."
            yield Problem(f"{where}   spec {spec_text(spec)}", [why], f'the two axes on two dims, or {rule}  codec = "exact".')
    cut = any(axis in data for place in resolved.placements.values() for axis in (*spec_axes(place.spec), *spec_axes(place.state_spec)))
    if declared.weights != "exact" and not cut and declared.reduction != "parameter_server":
        why = f"{layout.source} keeps every parameter and its moments whole on every worker, so no weight travels."
        yield Problem("[gradients] weights", [why], 'leave it out, or cut them: [default] params = "shard:data".')


def _server_problems(resolved: Resolved) -> Iterator[Problem]:
    """What the servers cannot do on this mesh, or the layout asks of others what they do."""
    layout, server, positions = resolved.layout, resolved.layout.parameter_server, resolved.workers
    if layout.gradients.reduction != "parameter_server":
        return
    why, told = "the servers keep all parameters, packed, and workers use them whole.", set()
    for place in resolved.placements.values():
        if spec_axes(place.spec) and place.chosen_by not in told:
            told.add(place.chosen_by)
            if place.chosen_by.startswith("default"):
                yield Problem(f'[default] params = "{layout.default.params}"', [why], '[default] params = "replicate".')
                continue
            fix = 'leave the rule out, or [gradients] reduction = "reduce_scatter", which keeps them as rules say.'
            same = [other.path for other in resolved.placements.values() if other.chosen_by == place.chosen_by and other is not place]
            more = [f"and {len(same)} more: {first_names(same)}."] if same else []
            yield Problem(f"{place.path}   spec {spec_text(place.spec)}   {place.chosen_by}", [*more, why], fix)
    if layout.optimizer.shard:
        yield Problem("[optimizer] shard", ["optimizer state is with the servers."], "leave it out.")
    if layout.gradients.rules and server.placement != "sliced":
        why = f'placement "{server.placement}" packs parameters together, so they have one codec.'
        yield Problem("[[gradients.rules]]", [why], 'placement = "sliced".')
    workers = server.workers or positions
    if server.servers is not None and server.servers > positions:
        why = f"{server.servers} servers at {positions} positions along the data axes."
        yield Problem("[parameter_server] servers", [why], f"at most {positions}.")
    if workers % positions:
        why = f"{workers} workers at {positions} positions along the data axes; {workers} / {positions} leaves {workers % positions}."
        yield Problem("[parameter_server] workers", [why], f"such as {-(-workers // positions) * positions}.")
    if server.fragments > 1 and server.placement != "sliced":
        why = f'placement "{server.placement}" packs parameters together, so they meet at once.'
        yield Problem("[parameter_server] fragments", [why], 'placement = "sliced", or leave it out.')
    if server.moving_rate is not None and server.moving_rate >= 2 / (workers + 1):
        factor = 1 - server.moving_rate * (workers + 1)
        why = f"{server.moving_rate:g} with {workers} workers: each meeting multiplies the servers' distance from the workers' mean by "
        why += f"1 - {server.moving_rate:g} ({workers} + 1) = {factor:.3g}."
        yield Problem("[parameter_server] moving_rate", [why], f"below 2 / {workers + 1}, such as {0.9 / workers:.3g}.")
    for key, most in (("spares", workers - 1), ("splits", workers), ("fragments", len(resolved.placements))):
        value = getattr(server, key)
        if value is not None and value > most:
            of = f"{most} parameters" if key == "fragments" else f"{workers} workers"
            yield Problem(f"[parameter_server] {key}", [f"{value}, of {of}."], f"at most {most}.")
    if isinstance(server.compute_time, tuple) and len(server.compute_time) != workers:
        why = f"{len(server.compute_time)} numbers for {workers} workers."
        yield Problem("[parameter_server] compute_time", [why], "one for each.")


def _expert_problems(resolved: Resolved) -> Iterator[Problem]:
    """Experts that are to lie on different devices, and do not."""
    axis = resolved.layout.experts.axis
    if axis is None or resolved.layout.gradients.reduction == "parameter_server":
        return
    if not any(axis in spec_axes(place.spec) for place in resolved.placements.values()):
        why = f'no parameter is cut over "{axis}", so every device would keep all experts.'
        yield Problem("[experts] axis", [why], f'[axes]  expert = "{axis}".')


def _share_problems(resolved: Resolved, params: Params, names: Mapping[str, Names], stacks: Mapping[str, int]) -> Iterator[Problem]:
    """More bytes whole on every device than the layout's `max_replicated` allows."""
    layout, mesh = resolved.layout, resolved.mesh
    limit, share = layout.default.max_replicated, _whole_share(resolved)
    if layout.gradients.reduction == "parameter_server":
        return  # the servers cut them all
    if limit is None or mesh.size == 1 or share <= limit:
        return
    whole = [place for place in resolved.placements.values() if not spec_axes(place.spec)]
    largest = sorted(whole, key=lambda place: -place.nbytes)[:5]
    used = {axis for place in resolved.placements.values() for axis in spec_axes(place.spec)}
    free = [axis for axis, size in mesh.axes if size > 1 and axis not in used]
    total = sum(place.nbytes for place in resolved.placements.values())
    lines = [f"{share:.1%} of the parameters' {format_bytes(total)} stay whole on every device; max_replicated = {limit:g}."]
    lines += [
        f"largest: {place.path}   {describe(params[place.path])}   {format_bytes(place.nbytes)}   {place.chosen_by}" for place in largest
    ]
    lines.append(f"mesh axes that no parameter uses: {', '.join(f'{axis} ({mesh.sizes[axis]} devices)' for axis in free) or 'none'}.")
    fix = f"rules or logical axis names for the largest, or max_replicated = {_round_up(share):g}."
    for axis in sorted((axis for axis, size in mesh.axes if size > 1), key=lambda axis: (axis not in free, axis in layout.data_axes())):
        sharded = dataclasses.replace(layout, default=dataclasses.replace(layout.default, params=f"shard:{axis}"))
        left = _whole_share(resolve(sharded, params, names, mesh, stacks))
        if left <= limit:
            fix = f'[default] params = "shard:{axis}" ({left:.1%} would stay whole), or {fix}'
            break
    yield Problem("[default] max_replicated", lines, fix)


def _whole_share(resolved: Resolved) -> float:
    """The share of parameter bytes that no mesh axis cuts."""
    total = sum(place.nbytes for place in resolved.placements.values())
    return sum(place.nbytes for place in resolved.placements.values() if not spec_axes(place.spec)) / total if total else 0.0


def _round_up(share: float) -> float:
    return min(1.0, int(share * 100 + 1) / 100)
