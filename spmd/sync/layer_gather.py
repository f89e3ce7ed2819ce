"""Parameters of stacks and of lists of blocks, gathered one layer at a time; their gradients are
reduced in the backward pass (FSDP).

Zhao et al. 2023, arXiv:2304.11277, of ZeRO-3 (Rajbhandari et al. 2020, arXiv:1910.02054).
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Set
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
        for pattern, policy in self.remat:
            if matches(pattern, [layer]):
                return policy
        return None

    def gather(self, paths: Mapping[str, str], shards: Tree) -> Tree:
        """Full parameters of one layer.

        Args:
          paths: of each parameter in the model, by its path in `shards`.
        """
        if not self.manual:
            return self._constrained(paths, shards)
        full = self._gather_chosen(paths, shards, self.trains)
        full |= self._gather_chosen(paths, shards, self._frozen)
        # Codes are integers, and scales would lose digits in the dtype of the computation.
        full |= self._gather_chosen(paths, shards, self.sync.of_quantized, as_they_are=True)
        return _replaced(paths, shards, full)

    def _gather_chosen(
        self,
        paths: Mapping[str, str],
        shards: Tree,
        chosen: Callable[[str], bool],
        *,
        as_they_are: bool = False,
    ) -> dict[str, jax.Array]:
        """Return full parameters by path in the model; arguments as of `_gathering`."""
        sharded, gathering = self._gathering(paths, shards, chosen, as_they_are=as_they_are)
        if not sharded:
            return {}
        full = gathering.gather(list(sharded.values()))
        return dict(zip(sharded, full, strict=True))

    def _constrained(self, paths: Mapping[str, str], params: Tree) -> Tree:
        """One layer's parameters, which the compiler is to replicate over the workers."""
        sync = self.sync
        mesh_axes = sync.mesh_axes

        def replicate(name: str, leaf: jax.Array) -> jax.Array:
            if paths.get(name) not in sync.layerwise:
                return leaf
            placement = sync.resolved.placement(paths[name])
            spec = keep_axes(placement.spec, mesh_axes.model_axes)
            # a layer's array lacks the stack's dim 0
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
        full = {}
        for name, leaf in flatten(grads).items():
            path = paths.get(name)
            if path in sharded:
                # Gradients computed in bfloat16 are added up and reduced in the parameter's own
                # dtype.
                full[path] = leaf.astype(sharded[path].dtype)
        for path, carry in carries.items():
            if TOTAL in carry:
                full[path] = carry[TOTAL] + full[path]
        after: Memory = {path: dict.fromkeys(carry) for path, carry in carries.items()}
        if not sharded:
            return grads, after
        if self.only_sums:
            for path, entry in after.items():
                entry[TOTAL] = full[path]
            return _replaced(paths, grads, dict.fromkeys(sharded)), after
        memory = {}
        for number, path in enumerate(sharded):
            if RESIDUAL in carries.get(path, {}):
                memory[number] = carries[path][RESIDUAL]
        means, residuals = gathering.reduce([full[path] for path in sharded], memory)
        for number, path in enumerate(sharded):
            if number in residuals:
                after[path][RESIDUAL] = residuals[number]
        return _replaced(paths, grads, dict(zip(sharded, means, strict=True))), after

    def _gathering(
        self,
        paths: Mapping[str, str],
        shards: Tree,
        chosen: Callable[[str], bool],
        *,
        as_they_are: bool = False,
    ) -> tuple[dict[str, jax.Array], Gathering]:
        """Return the arrays that are gathered, by path in the model, and how; of those `chosen`.
        `as_they_are`: in their dtype.
        """
        sync = self.sync
        sharded = {}
        for name, leaf in flatten(shards).items():
            path = paths.get(name)
            if path in sync.layerwise and chosen(path):
                sharded[path] = leaf
        transfers = [sync.transfer(path) for path in sharded]
        model_axes: tuple[str, ...] = ()
        if transfers and transfers[0].nested:
            model_axes = sync.mesh_axes.model_axes
        # Decided anew for one layer: a codec may make a stack smaller, and a layer of it not.
        of_layer = tuple(_transfer(transfer, self.stacked) for transfer in transfers)
        if as_they_are:
            return sharded, Gathering(of_layer, "exact", None, model_axes)
        weights = sync.resolved.layout.gradients.weights
        return sharded, Gathering(of_layer, weights, self.dtype, model_axes)


def _replaced(paths: Mapping[str, str], tree: Tree, values: Mapping[str, jax.Array | None]) -> Tree:
    """The tree with these values, by path in the model."""
    return map_paths(lambda name, leaf: values.get(paths.get(name, ""), leaf), tree)


def _transfer(transfer: Transfer, stacked: bool) -> Transfer:
    """Return how the gradient of one layer is communicated."""
    full = transfer.shard_layout
    layout = ShardLayout(full.shape[stacked:], _trimmed(full.spec[stacked:]), full.axes, full.sizes)
    return make_transfer(
        transfer.codec,
        layout,
        error_feedback=transfer.error_feedback,
        full_shape=transfer.shape[stacked:],
        model_spec=transfer.model_spec[stacked:],
        nested=transfer.nested,
    )


def _trimmed(spec: Spec) -> Spec:
    """Return a spec without the dims behind the last that is sharded."""
    while spec and spec[-1] is None:
        spec = spec[:-1]
    return spec


def full_bytes(sync: GradientSync, path: str) -> int:
    """Bytes of a parameter on one device, once it is gathered."""
    placement = sync.resolved.placement(path)
    model_spec = keep_axes(placement.spec, sync.mesh_axes.model_axes)
    return placement.nbytes // num_shards(model_spec, sync.resolved.mesh)


def block_trace(sync: GradientSync, model: Model, params: Tree, left: int | None) -> BlockTrace:
    """Return a record of the calls of blocks in a traced loss; of none where nothing is gathered by
    layer. `left`: see `choose_layerwise`.
    """
    if not _by_layer(sync):
        return BlockTrace([])
    sharded = [path for path in flatten(params) if sync.is_sharded(path)]
    if not sharded or _too_small(sync, sharded, left):
        return BlockTrace([])
    groups = []
    for group in block_groups(params, model.stacks().keys()):
        if any(path.startswith(f"{group[0]}/") for path in sharded):
            groups.append(group)
    return BlockTrace(groups)


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
    if not _by_layer(sync):
        return sync, _not_used(sync)
    called = [group for group in blocks.groups if {*group} & {*blocks.order}]
    owners = _owners(sync, called)
    stacks = model.stacks()
    numbers = {
        path: number
        for number, path in enumerate(params)
        if (path in stacks or path in owners) and sync.is_sharded(path)
    }
    # A stack names the parameters of its layers in the trace (`jax.ad_checkpoint.checkpoint_name`);
    # any other use of them needs full arrays.
    used_by = dict(zip(numbers, uses(jaxpr, list(numbers.values()), LAYER_PARAMS), strict=True))
    if not used_by or _too_small(sync, used_by, left):
        return sync, _not_used(sync)
    used_owners = {path: owners[path] for path in used_by if path in owners}
    one_by_one, why_blocks = _blocks_one_by_one(sync, used_owners, left)
    chosen = [path for path in used_by if one_by_one or path not in owners]
    reasons: dict[str, str] = {}
    for path in chosen:
        block = owners.get(path)
        why = None
        if block is not None:
            why = _why_block(blocks, block)
        why = why or _why_full(sync, path, used_by[path], block)
        if why:
            reasons[path] = why
    if sync.resolved.layout.gradients.gather == "layer":
        headline = (
            f'{sync.resolved.layout.source}: [gradients] gather = "layer" gathers the layers of '
            "stacks, and equal blocks, one by one"
        )
        raise_problems(LayoutError, headline, _problems(reasons, owners, called))
    layerwise = frozenset({*chosen} - reasons.keys())
    of_blocks = used_by.keys() & owners.keys()
    of_stacks = used_by.keys() - owners.keys()
    notes = _GatherNotes(sync, layerwise, frozenset(chosen), reasons, why_blocks)
    lines = notes.lines(
        of_stacks,
        kind="stacks",
        how="one layer at a time",
        before="their loop, and again for the backward pass",
    )
    lines += notes.lines(
        of_blocks,
        kind="blocks",
        how=f"block by block: {why_blocks}",
        before="the loss, and again for its backward pass",
    )
    gathered_blocks = {owners[path] for path in layerwise & owners.keys()}
    groups = []
    for group in called:
        members = tuple(block for block in group if block in gathered_blocks)
        if members:
            groups.append(members)
    return dataclasses.replace(sync, layerwise=layerwise, blocks=tuple(groups)), lines


def _owners(sync: GradientSync, groups: Iterable[tuple[str, ...]]) -> dict[str, str]:
    """Return the block that each parameter of a block is in, by path."""
    owners = {}
    blocks = [block for group in groups for block in group]
    for path in sync.resolved.all_placements:
        for block in blocks:
            if path.startswith(f"{block}/"):
                owners[path] = block
    return owners


@dataclasses.dataclass(frozen=True)
class _GatherNotes:
    """Notes on what is gathered how, of `chosen` parameters: `layerwise` are gathered by layer, and
    `reasons` say of others why not.
    """

    sync: GradientSync
    layerwise: frozenset[str]
    chosen: frozenset[str]
    reasons: Mapping[str, str]
    why_blocks: str

    def lines(self, paths: Set[str], *, kind: str, how: str, before: str) -> list[str]:
        """Return lines about the parameters of stacks, or of blocks."""
        lines = []
        by_layer = self.layerwise & paths
        in_full = paths - self.chosen
        refused = [path for path in self.reasons if path in paths]
        if by_layer:
            lines.append(f"{self._count(by_layer, kind)} are gathered {how}.")
        if in_full:
            lines.append(
                f"{self._count(in_full, kind)} are gathered in full, before {before}: "
                f"{self.why_blocks}."
            )
        if refused:
            first = refused[0]
            lines.append(
                f"note: {self._count(refused, kind)} are gathered in full, before {before}. "
                f"{first}: {self.reasons[first]}."
            )
        return lines

    def _count(self, paths: Collection[str], kind: str) -> str:
        """Return the number of these parameters, and their bytes."""
        size = sum(self.sync.resolved.placement(path).nbytes for path in paths)
        return f"{len(paths)} parameters of {kind} ({format_bytes(size)})"


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
    limit = format_bytes(AUTO_BYTES)
    if left is None:
        why = f"devices do not say how much memory they have, and {limit} or more are gathered"
        return True, why
    sizes: dict[str, int] = {}
    for path, block in owners.items():
        sizes[block] = sizes.get(block, 0) + full_bytes(sync, path)
    largest = max(sizes.values(), default=0)
    if largest >= AUTO_BYTES:
        return True, f"a block has {format_bytes(largest)}, {limit} or more"
    room = f"{ROOM:.0%} of the {format_bytes(max(left, 0))} that the state leaves on a device"
    of_all = "weights and gradients of all blocks"
    if 2 * sum(sizes.values()) > ROOM * left:
        return True, f"{of_all} exceed {room}"
    small = f"a block has {format_bytes(largest)}, less than {limit}"
    return False, f"{small}, and {of_all} fit into {room}"


def _not_used(sync: GradientSync) -> list[str]:
    """Return why `gather = "layer"` finds no parameter, if the layout asks for it."""
    if sync.resolved.layout.gradients.gather != "layer":
        return []
    why = "there is one worker"
    if sync.reduction.manual:
        data_axes = ", ".join(sync.mesh_axes.data_axes)
        why = "the loss calls no stack of layers and no list of equal blocks that is sharded over "
        why += data_axes
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
        if block is not None:
            modules = patterns[block]
        else:
            stack, _, _ = path.partition("/layers/")
            stack, _, _ = stack.partition("/cells/")
            modules = (stack,)
        cause = why.removeprefix(f"{block}: ").replace(f"{block}/", "")
        causes.setdefault((modules, cause), []).append(path)
    problems = []
    for (modules, _), paths in causes.items():
        blocks = {owners[path] for path in paths if path in owners}
        if len(blocks) == 1:
            modules = tuple(blocks)
        problems.append(_problem(paths, modules, reasons[paths[0]], owners.get(paths[0])))
    return problems


def _problem(paths: list[str], modules: tuple[str, ...], why: str, block: str | None) -> Problem:
    """Return the problem that these parameters of modules have in common; `why` and `block` are
    those of the first.
    """
    first = paths[0]
    where = first
    count = ""
    if len(paths) > 1:
        where = join_names(modules)
        count = f", {len(paths)} parameters"
        if not why.startswith(f"{block}: "):
            why = f"{first}: {why}"
    fix = 'gather = "auto".'
    if INSIDE in why:
        named = '", "'.join(modules)
        fix += f' Or [remat] modules = ["{named}"] in place of what recomputes them in the model.'
    return Problem(f"{where}{count}", [f"{why}."], fix, path=where, kind="conflict")


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
    if len(stems) != 1:
        return group
    (stem,) = stems
    return (f"{stem}*",)


def _why_block(blocks: BlockTrace, block: str) -> str | None:
    """Return why no parameter of this block can be gathered with its call; None if they can."""
    why = blocks.reasons.get(block)
    count = blocks.order.count(block)
    if not why and count != 1:
        why = f"it is called {count} times"
    if not why:
        return None
    return f"{block}: {why}"


def _why_full(sync: GradientSync, path: str, used: list[str], block: str | None) -> str | None:
    """Return why the parameter of a stack, or of this block, cannot be gathered layer by layer;
    None if it can.
    """
    resolved = sync.resolved
    placement = resolved.placement(path)
    data_axes = sync.mesh_axes.data_axes
    transfer = sync.transfer(path)
    sharded = [entry for entry in keep_axes(placement.spec, data_axes) if entry is not None]
    in_order = make_entry(tuple(axis for axis in data_axes if axis in spec_axes(placement.spec)))
    others = sorted(set(used) - {LAYER_PARAMS})
    options: list[str] = []
    if path in resolved.placements:
        for option in ("start_step", "exact_axes", "diagnostics"):
            if getattr(resolved.layout.gradients, option):
                options.append(option)
    inside = _recomputed_parts(sync, path, block)
    layer = "stack"
    if block is not None:
        layer = "block"
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
            sync.mesh_axes.model_axes and not transfer.nested,
        ),
        (f"codec {transfer.codec_name} keeps a state", transfer.codec_shapes),
        (f"[gradients] {', '.join(options)} is about full gradients", options),
    ):
        if applies:
            return reason
    return None


def _recomputed_parts(sync: GradientSync, path: str, block: str | None) -> list[str]:
    """Return the modules that a parameter is in and `[remat]` recomputes, if its layer is none of
    them.
    """
    parents = [path.rsplit("/", count)[0] for count in range(1, path.count("/") + 1)]
    patterns = sync.resolved.layout.remat.patterns
    recomputed = []
    for parent in parents:
        if any(matches(pattern, [parent]) for pattern in patterns):
            recomputed.append(parent)
    for parent in recomputed:
        # a layer that is recomputed, [remat] modules = ["stack/layers"], gathers again there;
        # inside one that is not, JAX recomputes no part
        of_stack = block is None and f"{parent}/".endswith(("layers/", "cells/"))
        if parent == block or of_stack:
            return []
    return recomputed
