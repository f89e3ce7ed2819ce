"""Parameters of stacks, gathered one layer at a time inside the scan over layers; their gradients are reduced in the backward scan (FSDP).

Zhao et al. 2023, arXiv:2304.11277, of ZeRO-3 (Rajbhandari et al. 2020, arXiv:1910.02054).
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from spmd.errors import LayoutError, Problem, raise_problems
from spmd.jaxpr import uses
from spmd.models.base import LAYER_PARAMS, Model
from spmd.path_match import matches
from spmd.specs import Spec, entry_axes, keep_axes, pspec
from spmd.sync.gradient_plan import GradientSpec
from spmd.sync.gradient_sync import GradientSync
from spmd.sync.mesh_axes import constrain
from spmd.tree import Tree, flatten, format_bytes, map_paths
from spmd.wire.codec.exact import EXACT
from spmd.wire.reduction import Transfer
from spmd.wire.shard_layout import ShardLayout
from spmd.wire.sharded import Gathering

AUTO_BYTES = 128 * 2**20  # of a model's stacks on one device, from which on `gather = "auto"` gathers one layer at a time


@dataclasses.dataclass(frozen=True)
class LayerGather:
    """`ParallelConfig.gather_layer`, inside a worker: the step of `sync.layerwise`.

    Attributes:
      dtype: in which the layers compute; None: that of the parameters.
      remat: patterns and policies of the layout's `[remat]`.
    """

    sync: GradientSync
    dtype: Any = None
    remat: tuple[tuple[str, Callable[..., Any]], ...] = ()

    def remat_policy(self, layer: str) -> Callable[..., Any] | None:
        """What the layout says of a stack's layers, by the path of their module; None: nothing."""
        return next((policy for pattern, policy in self.remat if matches(pattern, [layer])), None)

    def gather(self, paths: Mapping[str, str], shards: Tree) -> Tree:
        """Full parameters of one layer.

        Args:
          paths: of each parameter in the model, by its path in `shards`.
        """
        sharded, gathering = self._gathering(paths, shards)
        return _replaced(paths, shards, dict(zip(sharded, gathering.gather(list(sharded.values())), strict=True)))

    def reduce(
        self, paths: Mapping[str, str], shards: Tree, grads: Tree, residuals: dict[str, jax.Array]
    ) -> tuple[Tree, dict[str, jax.Array]]:
        """Mean gradients of one layer's shards, and the next residuals.

        Args:
          grads: of full parameters; those that are not gathered by layer stay as they are.
          residuals: of one layer, by path in the model.
        """
        sharded, gathering = self._gathering(paths, shards)
        full = {paths[name]: leaf for name, leaf in flatten(grads).items() if paths.get(name) in sharded}
        numbers = {path: number for number, path in enumerate(sharded) if path in residuals}
        memory = {number: residuals[path] for path, number in numbers.items()}
        means, after = gathering.reduce([full[path].astype(shard.dtype) for path, shard in sharded.items()], memory)
        return _replaced(paths, grads, dict(zip(sharded, means, strict=True))), {path: after[number] for path, number in numbers.items()}

    def _gathering(self, paths: Mapping[str, str], shards: Tree) -> tuple[dict[str, jax.Array], Gathering]:
        """The arrays that are gathered, by path in the model, and how."""
        sync = self.sync
        sharded = {paths[name]: leaf for name, leaf in flatten(shards).items() if paths.get(name) in sync.layerwise}
        specs = [sync.gradient_specs[path] for path in sharded]
        model_axes = sync.mesh_axes.model_axes if specs and specs[0].nested else ()
        along = tuple(pspec(of_layer(spec.model_spec)) for spec in specs) if model_axes else ()
        return sharded, Gathering(tuple(map(_transfer, specs)), sync.resolved.layout.gradients.weights, self.dtype, model_axes, along)


@dataclasses.dataclass(frozen=True)
class LayerReplicate:
    """`ParallelConfig.gather_layer` outside of workers, where the compiler gathers."""

    sync: GradientSync

    def remat_policy(self, layer: str) -> None:
        """There is no backward pass."""
        del layer

    def gather(self, paths: Mapping[str, str], params: Tree) -> Tree:
        """One layer's parameters, replicated over the workers."""
        mesh_axes, placements = self.sync.mesh_axes, self.sync.resolved.placements

        def replicate(name: str, leaf: jax.Array) -> jax.Array:
            if paths.get(name) not in self.sync.layerwise:
                return leaf
            return constrain(mesh_axes, of_layer(keep_axes(placements[paths[name]].spec, mesh_axes.model_axes)), leaf)

        return map_paths(replicate, params)

    def reduce(self, paths: Mapping[str, str], params: Tree, grads: Tree, residuals: Tree) -> tuple[Tree, Tree]:
        """There is no backward pass."""
        raise NotImplementedError


def _replaced(paths: Mapping[str, str], tree: Tree, values: Mapping[str, jax.Array]) -> Tree:
    """The tree with these values, by path in the model."""
    return map_paths(lambda name, leaf: values.get(paths.get(name, ""), leaf), tree)


def of_layer(spec: Spec) -> Spec:
    """The spec of one layer's array, from that of the stack's, [layers, ...]."""
    return tuple(spec[1:])


def _transfer(spec: GradientSpec) -> Transfer:
    """How the gradient of one layer is communicated."""
    stack = spec.shard_layout
    layout = ShardLayout(stack.shape[1:], _trimmed(of_layer(stack.spec)), stack.axes, stack.sizes)
    codec = spec.codec if spec.codec.compresses(layout, spec.placement.shape[1:]) else EXACT
    return Transfer(layout, codec, spec.error_feedback and not codec.lossless)


def _trimmed(spec: Spec) -> Spec:
    """Without the dims behind the last that is sharded."""
    return spec if not spec or spec[-1] is not None else _trimmed(spec[:-1])


def choose_layerwise(sync: GradientSync, model: Model, jaxpr: Any, params: Tree) -> tuple[GradientSync, list[str]]:
    """`sync` with the parameters that the traced loss takes to a stack's layers alone as `layerwise`; and notes on what is gathered how.

    Args:
      jaxpr: of the loss; its first inputs are the parameters.

    Raises:
      LayoutError: the layout asks for `gather = "layer"`, and a parameter of a stack cannot be gathered so.
    """
    declared, placements = sync.resolved.layout.gradients, sync.resolved.placements
    if declared.gather == "full" or not sync.reduction.manual or sync.reduction.keeps_params or sync.registered:
        return sync, []

    def is_sharded(path: str) -> bool:
        return any(keep_axes(placements[path].spec, sync.mesh_axes.data_axes))

    numbers = {path: number for number, path in enumerate(flatten(params)) if path in model.stacks() and is_sharded(path)}
    found = dict(zip(numbers, uses(jaxpr, list(numbers.values()), LAYER_PARAMS), strict=True))
    reasons = {path: why for path, used in found.items() if (why := _why_full(sync, path, used))}
    if declared.gather == "layer":
        headline = f'{sync.resolved.layout.source}: [gradients] gather = "layer" gathers the layers of a stack one by one'
        problems = [Problem(path, [f"{why}."], 'gather = "auto".', path=path, kind="conflict") for path, why in reasons.items()]
        raise_problems(LayoutError, headline, problems)
    elif sum(placements[path].nbytes for path in found) < AUTO_BYTES:
        return sync, []
    by_layer, notes = frozenset(found.keys() - reasons.keys()), []
    if by_layer:
        size = format_bytes(sum(placements[path].nbytes for path in by_layer))
        notes.append(f"{len(by_layer)} parameters of stacks ({size}) are gathered one layer at a time.")
    for path, why in list(reasons.items())[:1]:
        size = format_bytes(sum(placements[path].nbytes for path in reasons))
        notes.append(f"note: {len(reasons)} parameters of stacks ({size}) are gathered in full, before their loop. {path}: {why}.")
    return dataclasses.replace(sync, layerwise=by_layer), notes


def _why_full(sync: GradientSync, path: str, used: list[str]) -> str | None:
    """Why the parameter of a stack cannot be gathered layer by layer; None if it can."""
    resolved, spec, data_axes = sync.resolved, sync.gradient_specs[path], sync.mesh_axes.data_axes
    placement, declared = resolved.placements[path], resolved.layout.gradients
    sharded = [entry for entry in keep_axes(placement.spec, data_axes) if entry is not None]
    others = sorted(set(used) - {LAYER_PARAMS})
    given = [option for option in ("start_step", "exact_axes", "diagnostics") if getattr(declared, option)]
    parents = [path.rsplit("/", count)[0] for count in range(1, path.count("/") + 1)]
    recomputed = [parent for parent in parents if any(matches(pattern, [parent]) for pattern in resolved.layout.remat.patterns)]
    # a layer that is recomputed, [remat] modules = ["stack/layers"], gathers again there; inside one that is not, JAX recomputes no part
    inside = recomputed if not any(f"{parent}/".endswith(("layers/", "cells/")) for parent in recomputed) else []
    codec_state = functools.partial(spec.codec.init, shape=spec.shard_layout.shape, full_shape=placement.shape)
    for reason, applies in (
        ("[pipeline] has a loop over layers of its own", resolved.layout.pipeline.axis is not None),
        (f"the loss reads it outside of its stack, too ({', '.join(others)})", others),
        ("its stack is called several times", len(used) != 1),
        (f"[remat] recomputes only a part of its layer, {', '.join(inside)}", inside),
        (f"it is sharded over {sharded}, not over {data_axes} along one dim", [entry_axes(entry) for entry in sharded] != [data_axes]),
        ("its mean gradient is sharded in another way", sync.reduction.mean_spec(placement) != placement.spec),
        ("a dim is sharded over data axes and others", sync.mesh_axes.model_axes and not spec.nested),
        (f"codec {spec.codec_name} keeps a state", jax.eval_shape(codec_state, jax.random.key(0))),
        (f"[gradients] {', '.join(given)} is about full gradients", given),
    ):
        if applies:
            return reason
    return None
