"""Problems of a layout that fits every parameter of a model but not the mesh or the other tables,
each with a verified fix.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping

import jax

from spmd.base.specs import entry_axes, mixes_data_axes, spec_axes, spec_text
from spmd.base.tree import describe, format_bytes
from spmd.errors import Problem, in_python, option, quoted
from spmd.layout.fixes import first_names, more_names, near_multiples
from spmd.layout.gradients import GradientRule
from spmd.layout.resolve import Names, Resolved, codec_rules, default_origin, each_name, resolve
from spmd.mesh import MeshSpec
from spmd.wire.reduction_registry import REDUCTIONS
from spmd.wire.server.declaration import worker_problems

Params = Mapping[str, jax.ShapeDtypeStruct]


def resolved_problems(
    resolved: Resolved,
    params: Params,
    names: Mapping[str, Names],
    stacks: Mapping[str, int],
    fits: Callable[[MeshSpec], bool],
) -> list[Problem]:
    """Return every problem of the layout as a whole. `fits` returns whether it would have none on
    another mesh.
    """
    problems = [
        *_share_problems(resolved, params, names, stacks, fits),
        *_exchange_problems(resolved),
        *_server_problems(resolved),
        *_expert_problems(resolved),
    ]
    # Other problems may be the reason that an axis is unused.
    return problems or list(_idle_problems(resolved, names, fits))


def _idle_problems(
    resolved: Resolved, names: Mapping[str, Names], fits: Callable[[MeshSpec], bool]
) -> Iterator[Problem]:
    """Yield mesh axes of `[axes]` that shard nothing; the model's own code may use others, which
    `train/idle_axes.py` judges by the step.
    """
    layout = resolved.layout
    mesh = resolved.mesh
    for axis in resolved.idle_axes():
        declared = [name for name, entry in layout.axes if axis in entry_axes(entry)]
        if not declared:
            continue
        lines = [
            f'nothing is sharded over "{axis}", so its {mesh.sizes[axis]} devices would all do the '
            "same work."
        ]
        logical = ", ".join(declared)
        carried = sorted({name for of in names.values() for name in each_name(of)})
        have = "they carry none"
        if carried:
            have = f"they carry {first_names(carried)}"
        lines.append(
            f'[axes] shards {logical} over "{axis}", and no parameter has such a logical axis '
            f"name: {have}."
        )
        fixes = [
            f"logical axis names ({logical}) on the model's parameters",
            f'[[params]] rules with "{axis}"',
        ]
        merged = resolved.mesh_without([axis])
        if fits(merged):
            fixes.insert(0, option("mesh", quoted(str(merged).replace(" ", ""))))
        yield Problem(f'mesh axis "{axis}"', lines, ", or ".join(fixes) + ".", kind="unused_axis")


def _exchange_problems(resolved: Resolved) -> Iterator[Problem]:
    """Yield gradients and weights that cannot be reduced or gathered as the layout requires."""
    layout = resolved.layout
    data = resolved.data_axes
    declared = resolved.layout.gradients
    # The automatic step: XLA reduces gradients itself, in their own dtype and without a codec.
    if declared.reduction == "compiler" or resolved.workers == 1:
        return
    if REDUCTIONS[declared.reduction].make:
        why = (
            f'reduction "{declared.reduction}" is a registered function, which is given full '
            "gradients."
        )
        yield from _sharded_problems(resolved, why)
    wide = {
        place.path
        for place in resolved.placements.values()
        if place.dtype not in ("float32", "bfloat16", "float16")
    }
    sources = codec_rules(declared, resolved.placements)
    # One key for all gradients is a shorter fix than a rule for each.
    everywhere = wide == {*resolved.placements} and not declared.rules
    for place in resolved.placements.values():
        spec = place.spec
        # Gradients are reduced to the shards of the optimizer's state (`REDUCTIONS`).
        if declared.reduction == "reduce_scatter":
            spec = place.state_spec
        source = sources[place.path]
        codec = source.codec
        where = f"{place.path}   {describe(place)}"
        rule = f'[[gradients.rules]]  path = "{place.path}"'
        if isinstance(source, GradientRule):
            rule = f'except = ["{place.path}"]  in the rule for "{source.path}", and  {rule}'
        if codec != "exact" and place.path in wide:
            why = (
                f"codec {codec} computes in float32, which cannot represent a gradient of "
                f"{place.dtype}."
            )
            fix = '[gradients] codec = "exact".'
            if not everywhere:
                fix = f'{rule}  codec = "exact".'
            yield Problem(where, [why], fix, path=place.path, kind="conflict")
        if codec != "exact" and mixes_data_axes(spec, data):
            why = (
                "a dim is sharded over a data axis together with another axis, which codec "
                f"{codec} does not support."
            )
            fix = f'the two axes on two dims, or {rule}  codec = "exact".'
            yield Problem(
                f"{where}   spec {spec_text(spec)}", [why], fix, path=place.path, kind="conflict"
            )
    sharded = any(
        axis in data
        for place in resolved.all_placements.values()
        for axis in (*spec_axes(place.spec), *spec_axes(place.state_spec))
    )
    if declared.weights != "exact" and not sharded and declared.reduction != "parameter_server":
        why = (
            f"{layout.source} replicates every parameter and its optimizer state, so no weight is "
            "gathered."
        )
        fix = 'leave it out, or shard them: [default] params = "shard:data".'
        yield Problem("[gradients] weights", [why], fix, kind="unread_key")


def _server_problems(resolved: Resolved) -> Iterator[Problem]:
    """Yield options of `[parameter_server]` that do not fit this mesh, and tables that contradict
    it.
    """
    layout = resolved.layout
    server = resolved.layout.parameter_server
    positions = resolved.workers
    if layout.gradients.reduction != "parameter_server":
        return
    yield from _sharded_problems(
        resolved, "the servers keep all parameters, packed, and workers use them unsharded."
    )
    if layout.optimizer.shard:
        yield Problem(
            "[optimizer] shard",
            ["the servers keep the optimizer state."],
            "leave it out.",
            kind="conflict",
        )
    if layout.gradients.rules and server.placement != "sliced":
        why = f'placement "{server.placement}" packs parameters together, so they have one codec.'
        yield Problem("[[gradients.rules]]", [why], 'placement = "sliced".', kind="conflict")
    workers = server.workers or positions
    if server.servers is not None and server.servers > positions:
        why = f"{server.servers} servers at {positions} positions along the data axes."
        yield Problem(
            "[parameter_server] servers", [why], f"at most {positions}.", kind="invalid_value"
        )
    if workers % positions:
        why = (
            f"{workers} workers at {positions} positions along the data axes; {workers} / "
            f"{positions} leaves {workers % positions}."
        )
        fix = f"such as {-(-workers // positions) * positions}."
        yield Problem("[parameter_server] workers", [why], fix, kind="not_divisible")
    if server.fragments > 1 and server.placement != "sliced":
        why = (
            f'placement "{server.placement}" packs parameters together, so they are synchronized '
            "at once."
        )
        yield Problem(
            "[parameter_server] fragments",
            [why],
            'placement = "sliced", or leave it out.',
            kind="conflict",
        )
    # From this rate on the factor below is -1 or less, so the distance does not shrink (elastic
    # averaging SGD, arXiv:1412.6651).
    if server.moving_rate is not None and server.moving_rate >= 2 / (workers + 1):
        factor = 1 - server.moving_rate * (workers + 1)
        why = (
            f"{server.moving_rate:g} with {workers} workers: each sync multiplies the servers' "
            "distance from the workers' mean by "
        )
        why += f"1 - {server.moving_rate:g} ({workers} + 1) = {factor:.3g}."
        fix = f"below 2 / {workers + 1}, such as {0.9 / workers:.3g}."
        yield Problem("[parameter_server] moving_rate", [why], fix, kind="invalid_value")
    if server.fragments > len(resolved.placements):
        why = f"{server.fragments}, of {len(resolved.placements)} parameters."
        most = f"at most {len(resolved.placements)}."
        yield Problem("[parameter_server] fragments", [why], most, kind="invalid_value")
    for conflict in worker_problems(server, workers):
        yield Problem(
            f"[parameter_server] {conflict.key}", [conflict.why], conflict.fix, kind="invalid_value"
        )


def _sharded_problems(resolved: Resolved, why: str) -> Iterator[Problem]:
    """Yield parameters that are sharded where the reduction has only replicated ones; one problem
    for each rule.
    """
    layout = resolved.layout
    by_origin = {}
    for place in resolved.placements.values():
        if spec_axes(place.spec):
            by_origin.setdefault(place.chosen_by, []).append(place)
    for origin, places in by_origin.items():
        place = places[0]
        if origin == default_origin(layout):
            yield Problem(
                f'[default] params = "{layout.default.params}"',
                [why],
                '[default] params = "replicate".',
                kind="conflict",
            )
            continue
        fix = (
            'remove the rule, or [gradients] reduction = "reduce_scatter", which shards parameters '
            "as the rules say."
        )
        where = f"{place.path}   spec {spec_text(place.spec)}   {origin}"
        also = more_names([place.path for place in places])
        yield Problem(where, [why], fix, also, place.path, kind="conflict")


def _expert_problems(resolved: Resolved) -> Iterator[Problem]:
    """Yield experts that no rule or axis name shards, under `[experts] axis`."""
    axis = resolved.layout.experts.axis
    if axis is None or resolved.layout.gradients.reduction == "parameter_server":
        return
    if not any(axis in spec_axes(place.spec) for place in resolved.all_placements.values()):
        why = f'no parameter is sharded over "{axis}", so every device would keep all experts.'
        yield Problem("[experts] axis", [why], f'[axes]  expert = "{axis}".', kind="unused_axis")


def _share_problems(
    resolved: Resolved,
    params: Params,
    names: Mapping[str, Names],
    stacks: Mapping[str, int],
    fits: Callable[[MeshSpec], bool],
) -> Iterator[Problem]:
    """Yield a problem if more bytes are replicated than the layout's `max_replicated` allows."""
    layout = resolved.layout
    mesh = resolved.mesh
    limit = layout.default.max_replicated
    share = _replicated_share(resolved)
    # A parameter server shards all parameters.
    if layout.gradients.reduction == "parameter_server":
        return
    if limit is None or mesh.size == 1 or share <= limit:
        return
    replicated = [place for place in resolved.all_placements.values() if not spec_axes(place.spec)]
    largest = sorted(replicated, key=lambda place: -place.nbytes)[:5]
    used = {axis for place in resolved.all_placements.values() for axis in spec_axes(place.spec)}
    free = [axis for axis, size in mesh.axes if size > 1 and axis not in used]
    total = sum(place.nbytes for place in resolved.all_placements.values())
    lines = [
        f"{share:.1%} of the parameters' {format_bytes(total)} are replicated on every device; "
        f"max_replicated = {limit:g}."
    ]
    lines += [
        f"largest: {place.path}   {describe(place)}   {format_bytes(place.nbytes)}   "
        f"{place.chosen_by}"
        for place in largest
    ]
    free_axes = ", ".join(f"{axis} ({mesh.sizes[axis]} devices)" for axis in free)
    lines.append(f"mesh axes that no parameter uses: {free_axes or 'none'}.")
    # Rounded up to a percent: a limit that is rounded down would be exceeded again.
    enough = min(1.0, int(share * 100 + 1) / 100)
    allow = f"max_replicated = {enough:g}"
    # A shipped layout is changed in a copy.
    if layout.source.startswith("layouts/"):
        allow += f" in a copy (spmd layouts show {layout.name} > mine.toml)"
    fix = f"rules or logical axis names for the largest, or {allow}."
    stuck = [
        place
        for place in replicated
        # `params` has the shapes of one layer, for which rules are written. Codes and scales of
        # frozen parameters are not in it.
        if not _is_divisible(params.get(place.path, place).shape, mesh)
    ]
    if sum(place.nbytes for place in stuck) > limit * total:

        def suffices(other: MeshSpec) -> bool:
            elsewhere = resolve(layout, params, names, other, stacks)
            # The share first: `fits` checks the entire layout again.
            return _replicated_share(elsewhere) <= limit and fits(other)

        place = max(stuck, key=lambda place: place.nbytes)
        shape = params.get(place.path, place).shape
        fix = _fix_of_sizes(resolved, place.path, shape, allow, suffices)
        yield Problem("[default] max_replicated", lines, fix, kind="too_much_replicated")
        return
    axes = [axis for axis, size in mesh.axes if size > 1]
    # Unused axes first, and data axes last.
    axes.sort(key=lambda axis: (axis not in free, axis in layout.data_axes()))
    for axis in axes:
        default = dataclasses.replace(layout.default, params=f"shard:{axis}")
        sharded = dataclasses.replace(layout, default=default)
        left = _replicated_share(resolve(sharded, params, names, mesh, stacks))
        if left <= limit:
            fix = f'[default] params = "shard:{axis}" ({left:.1%} would stay replicated), or {fix}'
            break
    yield Problem("[default] max_replicated", lines, fix, kind="too_much_replicated")


def _is_divisible(shape: tuple[int, ...], mesh: MeshSpec) -> bool:
    """Return whether a mesh axis of more than one device divides a dim."""
    return any(dim and dim % size == 0 for dim in shape for _, size in mesh.axes if size > 1)


def _fix_of_sizes(
    resolved: Resolved,
    path: str,
    shape: tuple[int, ...],
    allow: str,
    suffices: Callable[[MeshSpec], bool],
) -> str:
    """Return a fix without rules, since no mesh axis divides a dim of the largest parameters, of
    which one is at `path`.
    """
    layout = resolved.layout
    mesh = resolved.mesh
    unit = min(size for _, size in mesh.axes if size > 1)
    for axis, size in mesh.axes:
        if layout.default.params == f"shard:{axis}":
            unit = size
    fixes = []
    if shape:
        fixes = [
            f"sizes that {unit} divides, such as {near_multiples(max(shape), unit)} for the "
            f"{max(shape)} of {path}"
        ]
    smaller = []
    for axis, devices in mesh.axes:
        for part in range(2, devices):
            if devices % part == 0:
                smaller.append(MeshSpec(tuple((mesh.sizes | {axis: part}).items())))
    # The largest mesh that fits leaves the fewest devices idle.
    for other in sorted(smaller, key=lambda other: -other.size):
        if suffices(other):
            call = f'spmd.make_mesh("{other}", devices=jax.devices()[:{other.size}])'
            fixes.append(in_python(f"fewer devices, mesh={call}"))
            break
    if mesh.names == ("data",):
        fixes.append(option("layout", quoted("data_parallel")))
    return f"no rule can shard the largest: {', or '.join(filter(None, [*fixes, allow]))}."


def _replicated_share(resolved: Resolved) -> float:
    """Return the share of parameter bytes that no mesh axis shards."""
    total = sum(place.nbytes for place in resolved.all_placements.values())
    if not total:
        return 0.0
    return (
        sum(place.nbytes for place in resolved.all_placements.values() if not spec_axes(place.spec))
        / total
    )
