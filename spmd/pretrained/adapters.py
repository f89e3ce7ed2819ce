"""Adapters in the files of PEFT (https://github.com/huggingface/peft): adapter_config.json and
adapter_model.safetensors.

Which module of the files a layer is, the name map of its weights says. Both files are untrusted.
"""

import collections
import dataclasses
import json
import logging
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from spmd.distributed.consistency import raise_everywhere
from spmd.errors import (
    OptionError,
    PretrainedError,
    Problem,
    closest,
    join_names,
    printable,
    raise_problems,
)
from spmd.layout.trained import Adapter
from spmd.models.flax_nnx import ORIGIN
from spmd.models.lora import NAMES, adapter_paths, adapter_shapes, add_adapters
from spmd.pretrained.adapter_config import MERGE, AdapterConfig, make_config
from spmd.pretrained.decoder import Decoder
from spmd.pretrained.encoder import Encoder
from spmd.pretrained.folders import (
    ADAPTER_CONFIG,
    CLASSIFIER,
    Origin,
    module_of,
    origin_of,
    read_config,
    show_progress,
)
from spmd.pretrained.links import Link, solve
from spmd.pretrained.match_tensors import Place, also_text, places_of, without_layer
from spmd.pretrained.name_map import TRANSPOSE, Dims, NameMap, TensorRule, compiled, fill
from spmd.pretrained.read_weights import read_arrays
from spmd.pretrained.safetensors_files import Tensor, open_files
from spmd.pretrained.write_weights import write_folder
from spmd.tree import Tree, flatten
from spmd.user_paths import as_path

STEM, PREFIX = "adapter_model", "base_model.model."
MATRICES = dict(zip(NAMES, ("lora_A.weight", "lora_B.weight"), strict=True))
BASE = "base_layer.weight"  # PEFT writes the weights of a head that has adapters, too


@dataclasses.dataclass(frozen=True)
class FileModule:
    """A layer of the model, or one of a stack's (`slot`), that is a module of the files; why it can
    have no adapter there, or "".
    """

    name: str
    layer: str
    slot: int | None
    transposed: bool
    refused: str = ""


def load_adapters(
    model: nnx.Module,
    folder: str | Path,
    *,
    name_map: str | Path | NameMap | None = None,
    progress: bool | str = "auto",
) -> nnx.Module:
    """Give a model the adapters of a folder that PEFT or `save_adapters` wrote, in place. All
    processes call this.

    `lora_a` and `lora_b` of each layer lie as its kernel does, are in its dtype, or in float32 if
    that has fewer bits, and are trained by `fit` as adapters of the layout are. Their dropout is
    off in calls of the model, until `model.train()` or `fit`.

    Args:
      model: a module of `spmd.pretrained.load` without adapters.
      folder: has adapter_config.json and adapter_model.safetensors.
      name_map: of the model's weights; None: the one by which they were loaded.
      progress: True, False, or "auto" (in a terminal or a notebook).

    Returns:
      The model.

    Raises:
      PretrainedError: a damaged or missing file; a key of the config that changes what adapters
        compute, and that is not known here; tensors that do not fit the model: all of them at once,
        and the model stays as it was.

    Example:
      >>> import spmd
      >>> spmd.pretrained.load_adapters.__name__
      'load_adapters'
    """
    path, module = as_path(folder, "folder"), module_of(model)
    if adapter_paths(module):
        raise OptionError(
            "load_adapters: the model has adapters already.",
            fix="spmd.pretrained.load its weights once more.",
        )
    names, display = _map_of(module, name_map), show_progress(progress)

    def read() -> tuple[list[Adapter], dict[str, jax.Array], str]:
        config = AdapterConfig(
            read_config(
                path, ADAPTER_CONFIG, "a folder that PEFT or spmd.pretrained.save_adapters wrote."
            )
        )
        tensors = open_files(path, STEM).tensors
        raise_problems(
            PretrainedError,
            f"{path / ADAPTER_CONFIG} asks for what is not supported",
            config.problems(),
        )
        reader = _Reader(module, names, config, tensors)
        raise_problems(
            PretrainedError, f"the adapters of {path} do not fit the model", reader.problems
        )
        values, _ = read_arrays(reader.links, reader.targets, display)
        raise_problems(
            PretrainedError,
            f"the adapters of {path} are for another model",
            reader.differences(values),
        )
        return reader.adapters, values, config.base_model

    try:
        adapters, values, base_model = raise_everywhere(
            read, PretrainedError, f"{path} cannot be read"
        )
    finally:
        display.close()
    _compare_base_model(base_model, module, path)
    add_adapters(module, adapters, nnx.Rngs(0))
    layers = _linears(module)
    for name, value in values.items():
        layer, _, leaf = name.rpartition("/")
        getattr(layers[layer], leaf).set_value(value)
        if layers[layer].lora_dropout is not None:
            layers[layer].lora_dropout.eval()
    return module


def save_adapters(
    model: Any,
    folder: str | Path,
    *,
    name_map: str | Path | NameMap | None = None,
    base_model: str | None = None,
    progress: bool | str = "auto",
) -> Path:
    """Write a model's adapters as PEFT does, without its other weights. All processes call this;
    the folder appears once it is complete.

    Nothing but adapters is written: of a result of `fit`, other parameters that were trained are an
    error. A module, `result.model` too, does not know what was trained.

    Args:
      model: what `fit` returned for a module with adapters, or such a module.
      folder: is created; one that is not empty is an error.
      name_map: of the model's weights; None: the one by which they were loaded.
      base_model: what the config names as the model that the adapters are for; None: the folder
        from which it was loaded.
      progress: True, False, or "auto" (in a terminal or a notebook).

    Returns:
      The folder.

    Raises:
      OptionError: the model has no adapters; or parameters beside them were trained, or are the new
        classifier of `load(labels=...)`.
      PretrainedError: the folder is not empty or cannot be written; layers that are no module of
        the files; nothing was written.

    Example:
      >>> import spmd
      >>> spmd.pretrained.save_adapters.__name__
      'save_adapters'
    """
    target, module = as_path(folder, "folder").absolute(), module_of(model)
    adapters, layers = adapter_paths(module), _linears(module)
    if not adapters:
        raise OptionError(
            "save_adapters: the model has no adapters.",
            fix="spmd.pretrained.save, for its weights.",
        )
    trainer, origin, saved = (
        getattr(model, "trainer", None),
        getattr(module, ORIGIN, None),
        "spmd.pretrained.save(..., merged=True)",
    )
    if trainer is not None:
        check_only_adapters(
            trainer.placed.abstract_variables.params,
            f"{saved} writes all weights; or a [train] that leaves these out.",
        )
    if isinstance(origin, Origin) and origin.config is not None:
        why = (
            f"save_adapters: {join_names(CLASSIFIER.values())} are new, of load(labels=...), and "
            "would be lost: only adapters are written."
        )
        raise OptionError(why, fix=f"{saved}, which writes the classifier, too.")
    by_name = _map_of(module, name_map)
    chosen = adapted_modules(by_name, module, "save(merged=True)")
    arrays = {
        f"{path}/{matrix}": getattr(layers[path], matrix).get_value()
        for path in adapters
        for matrix in NAMES
    }
    links = []
    for found in chosen:
        for matrix, suffix in MATRICES.items():
            leaf = arrays[f"{found.layer}/{matrix}"]
            shape = leaf.shape[:-3:-1]
            size = shape[0] * shape[1] * leaf.dtype.itemsize
            tensor = Tensor(
                f"{PREFIX}{found.name}.{suffix}",
                target / f"{STEM}.safetensors",
                np.dtype(leaf.dtype),
                shape,
                0,
                size,
            )
            links.append(_link(tensor, found, matrix))
    where = (
        base_model
        if base_model is not None or not isinstance(origin, Origin)
        else str(origin.files.where)
    )
    others = {names[0].removesuffix(".weight") for _, _, names in _mapped(by_name, module)} - {
        found.name for found in chosen
    }
    config = make_config({found.name: adapters[found.layer] for found in chosen}, others)
    config |= {
        "base_model_name_or_path": where,
        "task_type": _task_type(module),
        "fan_in_fan_out": not all(found.transposed for found in chosen),
    }
    display = show_progress(progress)
    try:
        write_folder(
            target,
            links,
            arrays,
            dtypes={link.tensor.name: link.tensor.dtype for link in links},
            metadata={"format": "pt"},
            beside={ADAPTER_CONFIG: (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()},
            max_shard=2**62,
            display=display,
            stem=STEM,
        )
    finally:
        display.close()
    return target


def check_only_adapters(params: Tree, fix: str) -> None:
    """Refuse parameters that are trained beside adapters, whose files have no place for them.

    Args:
      params: those that are trained: `abstract_variables.params` of a `PlacedModel`, or `params` of
        a state.

    Raises:
      OptionError: some are of no adapter.

    Example:
      >>> check_only_adapters({"head": {"lora_a": 0, "lora_b": 0}}, "merge them.")
    """
    others = [path for path in flatten(params) if path.rpartition("/")[2] not in NAMES]
    if others:
        counted = f"{len(others)} trained parameter{'s' * (len(others) > 1)} would be lost"
        raise OptionError(
            f"{counted}, because files of adapters have adapters alone: {join_names(others)}.",
            fix=fix,
        )


def adapted_modules(name_map: NameMap, module: nnx.Module, otherwise: str) -> list[FileModule]:
    """The modules of the files that have adapters in a model, which may be abstract.

    Args:
      otherwise: what writes adapters that PEFT's files have no place for, for the error.

    Raises:
      PretrainedError: layers with adapters that are no module of the files.
    """
    adapters = adapter_paths(module)
    chosen = [found for found in modules_of(name_map, module) if found.layer in adapters]
    problems = [
        Problem(found.name, [found.refused], path=found.layer) for found in chosen if found.refused
    ]
    known = {found.layer for found in chosen}
    problems += [
        Problem(path, ["the name map maps its kernel to no tensor."], path=path)
        for path in adapters
        if path not in known
    ]
    fix = f"{otherwise} writes the model with all adapters merged into its weights."
    raise_problems(
        PretrainedError, f"adapters cannot be written in PEFT's format; {fix}", _once(problems)
    )
    return chosen


def _compare_base_model(named: str, module: nnx.Module, folder: Path) -> None:
    """Warn where adapters are for a model of another name, as far as its folder says; snapshots lie
    in models--ORG--NAME.
    """
    origin, last = getattr(module, ORIGIN, None), named.rstrip("/").rpartition("/")[2].lower()
    if (
        isinstance(origin, Origin)
        and last
        and not any(f"--{part.lower()}".endswith(f"--{last}") for part in origin.files.where.parts)
    ):
        text = "%s is for the model %s, and its adapters are added to that of %s"
        logging.getLogger("spmd").warning(
            text, folder / ADAPTER_CONFIG, printable(named, 200), origin.files.where
        )


def _map_of(module: nnx.Module, name_map: Any) -> NameMap:
    if name_map is not None:
        return NameMap.load(name_map)
    if not isinstance(getattr(module, ORIGIN, None), Origin):
        why = (
            "this model was not loaded by spmd.pretrained.load, so the names that its layers have "
            "in files are not known."
        )
        raise PretrainedError(why, fix="name_map=, the map of its weights.")
    return origin_of(module).name_map


def _task_type(module: nnx.Module) -> str | None:
    """Which of PEFT's classes is for a model. None: the one for any; that for classes (SEQ_CLS)
    wants a classifier in the file.
    """
    if isinstance(module, Encoder):
        return "FEATURE_EXTRACTION" if module.config.task == "features" else None
    return "CAUSAL_LM" if isinstance(module, Decoder) else None


def _linears(module: nnx.Module) -> dict[str, Any]:
    found = {"/".join(map(str, path)): sub for path, sub in nnx.iter_modules(module)}
    return {path: sub for path, sub in found.items() if isinstance(sub, nnx.Linear)}


def _link(tensor: Tensor, module: FileModule, leaf: str, dims: Dims | None = TRANSPOSE) -> Link:
    """Of a tensor with a matrix of a layer, or with that of one layer of a stack's."""
    layer = ((module.slot, module.slot + 1),) if module.slot is not None else ()
    shape = tensor.shape[::-1] if dims == TRANSPOSE else tensor.shape
    tensor_box, array_box = (tuple((0, size) for size in sizes) for sizes in (tensor.shape, shape))
    path, factors = f"{module.layer}/{leaf}", solve(dims, tensor.shape, shape)
    return Link(tensor, tensor_box, path, (*layer, *array_box), module.slot is not None, factors)


def _mapped(name_map: NameMap, module: nnx.Module) -> Iterator[tuple[TensorRule, Place, list[str]]]:
    """Where the model keeps each parameter, the first rule that maps it, and the names of its
    tensors.

    A folder may lack a prefix that the model has in other libraries, and which the first rule has;
    an encoder without a head has none.
    """
    bare = isinstance(module, Encoder) and module.config.task == "features"
    places, known = (
        places_of(name_map.layers, flatten(nnx.to_pure_dict(nnx.state(module, nnx.Param)))),
        set[Place](),
    )
    for rule in name_map.tensors:
        for pattern in rule.model if not rule.tied else ():
            for path, place in places.items():
                if place not in known and (hit := compiled(pattern).fullmatch(path)):
                    known.add(place)
                    yield (
                        rule,
                        place,
                        [
                            fill(file, hit.groupdict()).removeprefix(
                                name_map.prefix if bare else ""
                            )
                            for file in rule.file
                        ],
                    )


def modules_of(name_map: NameMap, module: nnx.Module) -> list[FileModule]:
    """The `nnx.Linear` layers of a model, each layer of a stack, as modules of the files; several
    may be one of these.
    """
    layers, modules = _linears(module), list[FileModule]()
    for rule, place, names in _mapped(name_map, module):
        layer, _, leaf = place.path.rpartition("/")
        if leaf == "kernel" and layer in layers:
            name = names[0].removesuffix(".weight")
            modules.append(
                FileModule(name, layer, place.slot, rule.dims == TRANSPOSE, _refusal(rule, names))
            )
    return modules


def _refusal(rule: TensorRule, names: list[str]) -> str:
    """Why the kernels of a rule can have no adapter in PEFT's files, or ""."""
    if len(rule.model) > 1:
        return (
            f"one tensor is the kernels of {len(rule.model)} layers, and one adapter of PEFT for "
            "all of them is not one for each."
        )
    if len(names) > 1:
        return (
            f"its kernel is {len(names)} tensors, {join_names(names)}, and its adapter is not one "
            "for each."
        )
    if rule.dims not in (None, TRANSPOSE):
        return f"dims of its kernel are in another order in the file ({rule.transform})."
    return "" if names[0].endswith(".weight") else "its tensor's name does not end with .weight."


def _once(problems: list[Problem]) -> list[Problem]:
    """Problems that differ in the number of a layer only, together."""
    groups: dict[tuple, list[Problem]] = {}
    for problem in problems:
        groups.setdefault(
            tuple(map(without_layer, (problem.where, *problem.why, problem.fix))), []
        ).append(problem)
    return [
        dataclasses.replace(each[0], also=also_text(list(dict.fromkeys(p.where for p in each))))
        for each in groups.values()
    ]


class _Reader:
    """What the tensors of a file are in a model: links, the arrays that they fill, adapters, and
    problems.
    """

    def __init__(
        self,
        module: nnx.Module,
        name_map: NameMap,
        config: AdapterConfig,
        tensors: Mapping[str, Tensor],
    ):
        self._layers, self._config = _linears(module), config
        self._modules = {found.name: found for found in modules_of(name_map, module)}
        self._found: list[Problem] = []
        self.links: list[Link] = []
        self.targets: dict[str, jax.ShapeDtypeStruct] = {}
        by_module: dict[str, dict[str, Tensor]] = collections.defaultdict(dict)
        for name, tensor in tensors.items():
            base, _, suffix = name.removeprefix(PREFIX).partition(".lora_")
            if name.startswith(PREFIX) and f"lora_{suffix}" in MATRICES.values():
                by_module[base][f"lora_{suffix}"] = tensor
            elif name.startswith(PREFIX) and name.endswith(f".{BASE}"):
                by_module[name.removeprefix(PREFIX).removesuffix(f".{BASE}")][BASE] = tensor
            else:
                known = f"{PREFIX}MODULE.lora_A.weight and .lora_B.weight."
                self._problem(
                    name,
                    "it is no matrix of an adapter.",
                    fix=f"known: {known}" if name.startswith(PREFIX) else MERGE,
                )
        slots: dict[str, dict[int, Adapter]] = collections.defaultdict(dict)
        for name, parts in by_module.items():
            found = self._modules.get(name)
            if found is None:
                near = closest(name, self._modules)
                self._problem(
                    name,
                    "this model has no such nnx.Linear.",
                    fix=f'did you mean "{near}"?' if near else "",
                )
            elif found.refused:
                self._problem(name, found.refused, fix=MERGE)
            elif self._fits(name, found, parts):
                slots[found.layer][found.slot or 0] = config.adapter(found.layer, name)
        for layer, adapters in slots.items():
            self._check_stack(layer, adapters, by_module)
        self.adapters = [next(iter(adapters.values())) for adapters in slots.values()]
        if not tensors:
            self._problem(f"{STEM}.safetensors", "it holds no tensor.")
        if not self._found:  # else a tensor that does not fit would be one that is missing, too
            self._check_choice(by_module)

    @property
    def problems(self) -> list[Problem]:
        """All of them."""
        return _once(self._found)

    def _problem(self, where: str, *why: str, fix: str = "") -> None:
        self._found.append(Problem(printable(where, 200), why, fix, path=where))

    def _fits(self, name: str, module: FileModule, parts: dict[str, Tensor]) -> bool:
        """Link the tensors of a module, if they are what its config says."""
        rank, kernel = self._config.get("r", name), self._layers[module.layer].kernel.get_value()
        inputs, outputs = kernel.shape[-2:]
        shapes = {"lora_A.weight": (rank, inputs), "lora_B.weight": (outputs, rank)}
        if BASE in parts and module.slot is None:
            shapes[BASE] = (outputs, inputs) if module.transposed else (inputs, outputs)
        wrong = [
            f"{suffix} {list(parts[suffix].shape)} is not {list(shape)}, of rank {rank}."
            if suffix in parts
            else f"it has no {suffix}."
            for suffix, shape in shapes.items()
            if suffix not in parts or parts[suffix].shape != shape
        ]
        wrong += [
            f"{suffix} is no matrix of an adapter." for suffix in parts if suffix not in shapes
        ]
        wrong += [
            f"{suffix} is {part.dtype}."
            for suffix, part in parts.items()
            if not jnp.issubdtype(part.dtype, jnp.floating)
        ]
        wrong += (
            [f"rank {rank} is above min(in, out) = {min(inputs, outputs)}."]
            if rank > min(inputs, outputs)
            else []
        )
        if wrong:
            self._problem(name, *wrong)
        else:
            self.links += [
                _link(parts[suffix], module, matrix) for matrix, suffix in MATRICES.items()
            ]
            self.targets |= {
                f"{module.layer}/{m}": each
                for m, each in zip(NAMES, adapter_shapes(kernel, rank), strict=True)
            }
            if BASE in parts:
                self.links.append(
                    _link(parts[BASE], module, "kernel", TRANSPOSE if module.transposed else None)
                )
                self.targets[f"{module.layer}/kernel"] = jax.ShapeDtypeStruct(
                    kernel.shape, kernel.dtype, sharding=kernel.sharding
                )
        return not wrong

    def _check_stack(
        self, layer: str, adapters: dict[int, Adapter], in_file: Collection[str]
    ) -> None:
        """All layers of a stack have an adapter, and of one kind."""
        names = {
            module.slot or 0: name
            for name, module in self._modules.items()
            if module.layer == layer
        }
        if missing := [
            name
            for slot, name in sorted(names.items())
            if slot not in adapters and name not in in_file
        ]:
            self._problem(
                missing[0],
                f"it has no adapter, which other layers of {layer} have, and all are in one stack.",
                fix=MERGE,
            )
        first = min(adapters)
        for slot, adapter in sorted(adapters.items()):
            if adapter != adapters[first]:
                ours, theirs = (
                    f"rank {each.rank}, alpha {each.alpha:g}" for each in (adapter, adapters[first])
                )
                self._problem(
                    names[slot],
                    f"{ours}; {names[first]} has {theirs}, and both are in one stack.",
                    fix=MERGE,
                )

    def _check_choice(self, in_file: Collection[str]) -> None:
        """The config chooses the modules that have tensors, and no others of the model."""
        fix = f"the {ADAPTER_CONFIG} that was written with these tensors."
        for name in self._modules:
            named = self._config.names(name)
            if named is False and name in in_file:
                self._problem(
                    name,
                    f"it has tensors, and {ADAPTER_CONFIG} does not choose it: "
                    f"{self._config.shown()}.",
                    fix=fix,
                )
            elif named and name not in in_file:
                self._problem(
                    name,
                    f"it has no tensors, and {ADAPTER_CONFIG} chooses it: {self._config.shown()}.",
                    fix=fix,
                )

    def differences(self, values: dict[str, jax.Array]) -> list[Problem]:
        """Kernels that the file has as well, and that are not those of the model; they are taken
        out of `values`.
        """
        kernels = {path: values.pop(path) for path in list(values) if path.endswith("kernel")}
        layers = {path: self._layers[path.rpartition("/")[0]] for path in kernels}
        different = [
            path
            for path, kernel in kernels.items()
            if not jnp.array_equal(kernel, layers[path].kernel.get_value())
        ]
        return [
            Problem(
                path,
                [f"{BASE} of the file is not this kernel."],
                "the model that they were trained for.",
            )
            for path in different
        ]
