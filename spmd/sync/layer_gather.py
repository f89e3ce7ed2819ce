"""Parameters of stacks and of lists of blocks, gathered one layer at a time; their gradients are
reduced in the backward pass (FSDP).

Zhao et al. 2023, arXiv:2304.11277, of ZeRO-3 (Rajbhandari et al. 2020, arXiv:1910.02054).
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from spmd.base.path_match import matches
from spmd.base.specs import Spec, keep_axes, make_entry, spec_axes
from spmd.base.tree import Tree, flatten, format_bytes, map_paths
from spmd.errors import LayoutError, Problem, join_names, raise_problems
from spmd.jaxpr.programs import uses
from spmd.layout.resolve import num_shards
from spmd.models.base import LAYER_PARAMS, Model
from spmd.models.blocks import INSIDE, BlockTrace, block_groups
from spmd.sync.gradient_sync import TOTAL, GradientSync
from spmd.sync.mesh_axes import constrain
from spmd.wire.gathering import Gathering
from spmd.wire.shard_layout import ShardLayout
from spmd.wire.transfer import RESIDUAL, Memory, Transfer, make_transfer

# `gather = "auto"` gathers one by one blocks of this size; or, where devices do not say how much
# memory they have, stacks and blocks that have as much in all. Evidence:
# benchmarks/results/gather_auto.md.
AUTO_BYTES = 128 * 2**20
# Of what the state leaves of a device's memory, the share that full weights or gradients may take
# which layers one by one would not. The rest is for activations, which are not known before
# compiling, and for copies: XLA:GPU counts sums of gradients once more for each copy of a loop that
# it unrolls, and where they then exceed a device, it recomputes products.
ROOM = 1 / 3


@dataclasses.dataclass(frozen=True)
class LayerGather:
    """`ParallelConfig.gather_layer`: how the parameters of `sync.layerwise` are gathered.

    Attributes:
      manual: inside a worker, which sends what it gathers. False: outside of workers, for
        evaluation and prediction, where the compiler gathers and nothing is reduced.
      dtype: in which the layers compute; None: that of the parameters.
      remat: patterns and policies of the layout's `[remat]`.
      stacked: whether arrays are one layer's of a stack's, [layers, ...]; False: a block's.
      only_sums: whether gradients are added up for a later microbatch, which reduces them with its
        own.
    """

    sync: GradientSync
    manual: bool = True
    dtype: Any = None
    remat: tuple[tuple[str, Callable[..., Any]], ...] = ()
    stacked: bool = True
    only_sums: bool = False

    def trains(self, path: str) -> bool:
        """Return whether this parameter has a gradient."""
        return path in self.sync.resolved.placements

    def remat_policy(self, layer: str) -> Callable[..., Any] | None:
        """Return the policy of the layout for a layer with this path, or None."""
        return next((policy for pattern, policy in self.remat if matches(pattern, [layer])), None)

    def gather(self, paths: Mapping[str, str], shards: Tree) -> Tree:
        """Full parameters of one layer.

        Args:
          paths: of each parameter in the model, by its path in `shards`.
        """
        if not self.manual:
            return self._constrained(paths, shards)
        full: dict[str, jax.Array] = {}
        for chosen, as_they_are in (
            (self.trains, False),
            (self._frozen, False),
            (self.sync.of_quantized, True),
        ):
            sharded, gathering = self._gathering(paths, shards, chosen, as_they_are=as_they_are)
            full |= (
                zip(sharded, gathering.gather(list(sharded.values())), strict=True)
                if sharded
                else ()
            )
        return _replaced(paths, shards, full)

    def _constrained(self, paths: Mapping[str, str], params: Tree) -> Tree:
        """One layer's parameters, which the compiler is to replicate over the workers."""
        mesh_axes, placement = self.sync.mesh_axes, self.sync.resolved.placement

        def replicate(name: str, leaf: jax.Array) -> jax.Array:
            if paths.get(name) not in self.sync.layerwise:
                return leaf
            spec = keep_axes(placement(paths[name]).spec, mesh_axes.model_axes)
            return constrain(mesh_axes, spec[self.stacked :], leaf)

        return map_paths(replicate, params)

    def _frozen(self, path: str) -> bool:
        return not self.trains(path) and not self.sync.of_quantized(path)

    def reduce(
        self, paths: Mapping[str, str], shards: Tree, grads: Tree, carries: Memory
    ) -> tuple[Tree, Memory]:
        """Mean gradients of one layer's shards, None for those that are only added up; and the next
        `carries`, None where nothing changes.

        Args:
          grads: of full parameters; those that are not gathered by layer stay as they are.
          carries: residuals, and sums over earlier microbatches, of one layer, by path in the
            model.
        """
        sharded, gathering = self._gathering(paths, shards, self.trains)
        full = {
            paths[name]: leaf.astype(sharded[paths[name]].dtype)
            for name, leaf in flatten(grads).items()
            if paths.get(name) in sharded
        }
        full |= {
            path: carry[TOTAL] + full[path] for path, carry in carries.items() if TOTAL in carry
        }
        after = {path: dict.fromkeys(carry) for path, carry in carries.items()}
        if not sharded:
            return grads, after
        if self.only_sums:
            return _replaced(paths, grads, dict.fromkeys(sharded)), {
                path: entry | {TOTAL: full[path]} for path, entry in after.items()
            }
        memory = {
            number: carries[path][RESIDUAL]
            for number, path in enumerate(sharded)
            if RESIDUAL in carries.get(path, {})
        }
        means, residuals = gathering.reduce([full[path] for path in sharded], memory)
        after |= {
            path: after[path] | {RESIDUAL: residuals[number]}
            for number, path in enumerate(sharded)
            if number in residuals
        }
        return _replaced(paths, grads, dict(zip(sharded, means, strict=True))), after

    def _gathering(
        self,
        paths: Mapping[str, str],
        shards: Tree,
        chosen: Callable[[str], bool],
        *,
        as_they_are: bool = False,
    ) -> tuple[dict[str, jax.Array], Gathering]:
        """The arrays that are gathered, by path in the model, and how; of those `chosen`.
        `as_they_are`: in their dtype.
        """
        sync = self.sync
        named = {
            paths[name]: leaf
            for name, leaf in flatten(shards).items()
            if paths.get(name) in sync.layerwise
        }
        sharded = {path: leaf for path, leaf in named.items() if chosen(path)}
        specs = [sync.transfer(path) for path in sharded]
        model_axes = sync.mesh_axes.model_axes if specs and specs[0].nested else ()
        transfers = tuple(_transfer(spec, self.stacked) for spec in specs)
        weights, dtype = (
            ("exact", None) if as_they_are else (sync.resolved.layout.gradients.weights, self.dtype)
        )
        return sharded, Gathering(transfers, weights, dtype, model_axes)


def _replaced(paths: Mapping[str, str], tree: Tree, values: Mapping[str, jax.Array | None]) -> Tree:
    """The tree with these values, by path in the model."""
    return map_paths(lambda name, leaf: values.get(paths.get(name, ""), leaf), tree)


def _transfer(spec: Transfer, stacked: bool) -> Transfer:
    """Return how the gradient of one layer is communicated."""
    full = spec.shard_layout
    layout = ShardLayout(full.shape[stacked:], _trimmed(full.spec[stacked:]), full.axes, full.sizes)
    return make_transfer(
        spec.codec,
        layout,
        error_feedback=spec.error_feedback,
        full_shape=spec.shape[stacked:],
        model_spec=spec.model_spec[stacked:],
        nested=spec.nested,
    )


def _trimmed(spec: Spec) -> Spec:
    """Without the dims behind the last that is sharded."""
    return spec if not spec or spec[-1] is not None else _trimmed(spec[:-1])


def full_bytes(sync: GradientSync, path: str) -> int:
    """Bytes of a parameter on one device, once it is gathered."""
    placement = sync.resolved.placement(path)
    return placement.nbytes // num_shards(
        keep_axes(placement.spec, sync.mesh_axes.model_axes), sync.resolved.mesh
    )


def block_trace(sync: GradientSync, model: Model, params: Tree, left: int | None) -> BlockTrace:
    """Return a record of the calls of blocks in a traced loss; of none where nothing is gathered by
    layer. `left`: see `choose_layerwise`.
    """
    sharded = [path for path in flatten(params) if sync.is_sharded(path)] if _by_layer(sync) else []
    groups = (
        block_groups(params, model.stacks().keys())
        if sharded and not _too_small(sync, sharded, left)
        else []
    )
    return BlockTrace(
        [group for group in groups if any(path.startswith(f"{group[0]}/") for path in sharded)]
    )


def _too_small(sync: GradientSync, paths: Iterable[str], left: int | None) -> bool:
    """Return whether `gather = "auto"` gathers these parameters in full, on devices that do not say
    how much memory they have.
    """
    automatic = sync.resolved.layout.gradients.gather == "auto" and left is None
    return automatic and sum(full_bytes(sync, path) for path in paths) < AUTO_BYTES


def _by_layer(sync: GradientSync) -> bool:
    declared = sync.resolved.layout.gradients
    return (
        declared.gather != "full"
        and sync.reduction.manual
        and not sync.reduction.keeps_params
        and sync.reduction.make is None
    )


def choose_layerwise(
    sync: GradientSync,
    model: Model,
    jaxpr: Any,
    params: list[str],
    blocks: BlockTrace,
    left: int | None,
) -> tuple[GradientSync, list[str]]:
    """Return `sync` with the parameters that the traced loss takes to layers alone as `layerwise`,
    and their blocks, if the layout or the bytes say so; and notes on what is gathered how. Layers
    are those of a stack, and blocks: equal siblings, each of which is called once.

    The choice depends on the model, the layout and the devices alone: all processes, and a run that
    resumes on such devices, choose alike.

    Args:
      jaxpr: of the loss; its first inputs are the parameters, `params` by path.
      blocks: what was recorded in that trace.
      left: bytes of each device's memory that the state leaves; None if devices do not say how much
        they have.

    Raises:
      LayoutError: the layout asks for `gather = "layer"`, and a parameter of a layer cannot be
        gathered so.
    """
    declared, placements = sync.resolved.layout.gradients, sync.resolved.all_placements
    if not _by_layer(sync):
        return sync, _not_used(sync)
    called = [group for group in blocks.groups if {*group} & {*blocks.order}]
    owners = {
        path: block
        for path in placements
        for group in called
        for block in group
        if path.startswith(f"{block}/")
    }
    numbers = {
        path: number
        for number, path in enumerate(params)
        if (path in model.stacks() or path in owners) and sync.is_sharded(path)
    }
    used_by = dict(zip(numbers, uses(jaxpr, list(numbers.values()), LAYER_PARAMS), strict=True))
    if not used_by or _too_small(sync, used_by, left):
        return sync, _not_used(sync)
    one_by_one, why_blocks = _blocks_one_by_one(
        sync, {path: owners[path] for path in used_by if path in owners}, left
    )
    chosen = [path for path in used_by if one_by_one or path not in owners]
    reasons: dict[str, str] = {}
    for path in chosen:
        block = owners.get(path)
        why = _why_block(blocks, block) if block else None
        why = why or _why_full(sync, path, used_by[path], block)
        if why:
            reasons[path] = why
    if declared.gather == "layer":
        headline = (
            f'{sync.resolved.layout.source}: [gradients] gather = "layer" gathers the layers of '
            "stacks, and equal blocks, one by one"
        )
        raise_problems(LayoutError, headline, _problems(reasons, owners, called))
    by_layer, notes = frozenset({*chosen} - reasons.keys()), []
    for kind, how, before, paths in (
        (
            "stacks",
            "one layer at a time",
            "their loop, and again for the backward pass",
            used_by.keys() - owners.keys(),
        ),
        (
            "blocks",
            f"block by block: {why_blocks}",
            "the loss, and again for its backward pass",
            used_by.keys() & owners.keys(),
        ),
    ):
        if by_layer & paths:
            size = _size(sync, by_layer & paths)
            count = len(by_layer & paths)
            notes.append(f"{count} parameters of {kind} ({size}) are gathered {how}.")
        if in_full := paths - {*chosen}:
            notes.append(
                f"{len(in_full)} parameters of {kind} ({_size(sync, in_full)}) are gathered in "
                f"full, before {before}: {why_blocks}."
            )
        refused = [path for path in reasons if path in paths]
        for path in refused[:1]:
            size = _size(sync, refused)
            notes.append(
                f"note: {len(refused)} parameters of {kind} ({size}) are gathered in full, before "
                f"{before}. {path}: {reasons[path]}."
            )
    gathered = {owners[path] for path in by_layer & owners.keys()}
    groups = (tuple(block for block in group if block in gathered) for group in called)
    groups = tuple(group for group in groups if group)
    return dataclasses.replace(sync, layerwise=by_layer, blocks=groups), notes


def _blocks_one_by_one(
    sync: GradientSync, owners: Mapping[str, str], left: int | None
) -> tuple[bool, str]:
    """Return whether blocks, by path of their parameters, are gathered one by one, and why.

    By layer, a stack's loop is always faster, and holds less. A list of blocks holds less, and is
    slower: in full, XLA sees the passes of all blocks at once, hides more of the communication, and
    computes them in fewer kernels.
    """
    if sync.resolved.layout.gradients.gather == "layer":
        return True, '[gradients] gather = "layer"'
    sizes: dict[str, int] = {}
    for path, block in owners.items():
        sizes[block] = sizes.get(block, 0) + full_bytes(sync, path)
    largest, total = max(sizes.values(), default=0), sum(sizes.values())
    if left is None:
        return (
            True,
            f"devices do not say how much memory they have, and {format_bytes(AUTO_BYTES)} or more "
            "are gathered",
        )
    if largest >= AUTO_BYTES:
        return True, f"a block has {format_bytes(largest)}, {format_bytes(AUTO_BYTES)} or more"
    fits = 2 * total <= ROOM * left
    room = f"{ROOM:.0%} of the {format_bytes(max(left, 0))} that the state leaves on a device"
    of_all = "weights and gradients of all blocks"
    if not fits:
        return True, f"{of_all} exceed {room}"
    small = f"a block has {format_bytes(largest)}, less than {format_bytes(AUTO_BYTES)}"
    return False, f"{small}, and {of_all} fit into {room}"


def _not_used(sync: GradientSync) -> list[str]:
    """Return why `gather = "layer"` finds no parameter, if the layout asks for it."""
    if sync.resolved.layout.gradients.gather != "layer":
        return []
    data_axes = ", ".join(sync.mesh_axes.data_axes)
    nothing = (
        "the loss calls no stack of layers and no list of equal blocks that is sharded over "
        f"{data_axes}"
    )
    why = nothing if sync.reduction.manual else "there is one worker"
    return [f'note: [gradients] gather = "layer" is not used: {why}.']


def _problems(
    reasons: Mapping[str, str], owners: Mapping[str, str], groups: Iterable[tuple[str, ...]]
) -> list[Problem]:
    """Return one problem for each cause, in a stack or in a group of equal blocks, of why
    parameters are gathered in full.
    """
    patterns = {block: _patterns(group) for group in groups for block in group}
    causes: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for path, why in reasons.items():
        block = owners.get(path)
        stack = path.partition("/layers/")[0].partition("/cells/")[0]
        modules = patterns[block] if block else (stack,)
        cause = why.removeprefix(f"{block}: ").replace(f"{block}/", "")
        causes.setdefault((modules, cause), []).append(path)
    problems = []
    for (modules, _), paths in causes.items():
        first = paths[0]
        why = reasons[first]
        of_blocks = {owners[path] for path in paths if path in owners}
        if len(of_blocks) == 1:
            modules = tuple(of_blocks)
        if len(paths) > 1 and not why.startswith(f"{owners.get(first)}: "):
            why = f"{first}: {why}"
        where = first if len(paths) == 1 else join_names(modules)
        count = "" if len(paths) == 1 else f", {len(paths)} parameters"
        named = '", "'.join(modules)
        recompute = (
            f' Or [remat] modules = ["{named}"] in place of what recomputes them in the model.'
            if INSIDE in why
            else ""
        )
        problems.append(
            Problem(
                f"{where}{count}",
                [f"{why}."],
                f'gather = "auto".{recompute}',
                path=where,
                kind="conflict",
            )
        )
    return problems


def _patterns(group: tuple[str, ...]) -> tuple[str, ...]:
    """Return patterns for these paths: one if they differ in a number at their end, else all of
    the paths.

    >>> (
    ...     _patterns(("blocks/10", "blocks/11")),
    ...     _patterns(("layers_0", "layers_1")),
    ...     _patterns(("encode", "decode")),
    ... )
    (('blocks/*',), ('layers_*',), ('encode', 'decode'))
    """
    stems = {path.rstrip("0123456789") for path in group}
    return (f"{stem}*",) if len(stems) == 1 and (stem := stems.pop()) else group


def _size(sync: GradientSync, paths: Iterable[str]) -> str:
    return format_bytes(sum(sync.resolved.placement(path).nbytes for path in paths))


def _why_block(blocks: BlockTrace, block: str) -> str | None:
    """Return why no parameter of this block can be gathered with its call; None if they can."""
    count = blocks.order.count(block)
    why = blocks.reasons.get(block) or (f"it is called {count} times" if count != 1 else None)
    return f"{block}: {why}" if why else None


def _why_full(sync: GradientSync, path: str, used: list[str], block: str | None) -> str | None:
    """Return why the parameter of a stack, or of this block, cannot be gathered layer by layer;
    None if it can.
    """
    resolved, spec, data_axes = sync.resolved, sync.transfer(path), sync.mesh_axes.data_axes
    placement, declared = resolved.placement(path), resolved.layout.gradients
    sharded = [entry for entry in keep_axes(placement.spec, data_axes) if entry is not None]
    in_order = make_entry(tuple(axis for axis in data_axes if axis in spec_axes(placement.spec)))
    others = sorted(set(used) - {LAYER_PARAMS})
    trains = path in resolved.placements
    given = [
        option
        for option in ("start_step", "exact_axes", "diagnostics")
        if trains and getattr(declared, option)
    ]
    parents = [path.rsplit("/", count)[0] for count in range(1, path.count("/") + 1)]
    recomputed = [
        parent
        for parent in parents
        if any(matches(pattern, [parent]) for pattern in resolved.layout.remat.patterns)
    ]
    # a layer that is recomputed, [remat] modules = ["stack/layers"], gathers again there; inside
    # one that is not, JAX recomputes no part
    layers = [
        parent
        for parent in recomputed
        if parent == block or (block is None and f"{parent}/".endswith(("layers/", "cells/")))
    ]
    inside = recomputed if not layers else []
    layer = "stack" if block is None else "block"
    for reason, applies in (
        ("[pipeline] has a loop over layers of its own", resolved.layout.pipeline.axis is not None),
        (f"the loss reads it outside of its {layer}, too ({', '.join(others)})", others),
        (f"its {layer} is called several times", len(used) > 1),
        (f"its {layer} is not called", not used),
        (f"[remat] recomputes only a part of its layer, {', '.join(inside)}", inside),
        (
            f"it is sharded over {sharded}, not over axes of {data_axes} in their order along one "
            "dim",
            sharded != [in_order],
        ),
        (
            "its mean gradient is sharded in another way",
            sync.reduction.mean_spec(placement) != placement.spec,
        ),
        (
            "a dim is sharded over data axes and others",
            sync.mesh_axes.model_axes and not spec.nested,
        ),
        (f"codec {spec.codec_name} keeps a state", spec.codec_shapes),
        (f"[gradients] {', '.join(given)} is about full gradients", given),
    ):
        if applies:
            return reason
    return None
