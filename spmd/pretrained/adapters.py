"""Adapters in the files of PEFT (https://github.com/huggingface/peft): adapter_config.json and
adapter_model.safetensors.

The name map of a model's weights says which module of the files a layer is. Both files are
untrusted.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from spmd.base.tree import Tree, flatten
from spmd.base.user_paths import as_path
from spmd.distributed.consistency import raise_everywhere
from spmd.errors import (
    OptionError,
    PretrainedError,
    Problem,
    join_names,
    printable,
    raise_problems,
)
from spmd.layout.trained import Adapter
from spmd.models.flax_nnx import ORIGIN
from spmd.models.lora import NAMES, adapter_paths, add_adapters
from spmd.pretrained.adapter_config import AdapterConfig, make_config
from spmd.pretrained.decoder import Decoder
from spmd.pretrained.encoder import Encoder
from spmd.pretrained.folders import CLASSIFIER, Origin, module_of, origin_of, show_progress
from spmd.pretrained.links import Link
from spmd.pretrained.match_adapters import (
    MATRICES,
    PREFIX,
    STEM,
    AdapterReader,
    FileModule,
    join_layers,
    linear_layers,
    link_matrix,
    mapped_parameters,
    modules_of,
)
from spmd.pretrained.name_map import NameMap
from spmd.pretrained.outline import ADAPTER_CONFIG, read_config
from spmd.pretrained.read_weights import read_arrays
from spmd.pretrained.safetensors_files import Tensor, open_files
from spmd.pretrained.write_weights import write_folder


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

    def read_adapters() -> tuple[list[Adapter], dict[str, jax.Array], str]:
        fix = "a folder that PEFT or spmd.pretrained.save_adapters wrote."
        config = AdapterConfig(read_config(path, ADAPTER_CONFIG, fix))
        tensors = open_files(path, STEM).tensors
        raise_problems(
            PretrainedError,
            f"{path / ADAPTER_CONFIG} asks for what is not supported",
            config.problems(),
        )
        reader = AdapterReader(module, names, config, tensors)
        raise_problems(
            PretrainedError,
            f"the adapters of {path} do not fit the model",
            reader.problems,
            fix="the model that they were trained for, and the folder as it was written.",
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
            read_adapters, PretrainedError, f"{path} cannot be read"
        )
    finally:
        display.close()
    _compare_base_model(base_model, module, path)
    add_adapters(module, adapters, nnx.Rngs(0))
    layers = linear_layers(module)
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
    adapters, layers = adapter_paths(module), linear_layers(module)
    if not adapters:
        raise OptionError(
            "save_adapters: the model has no adapters.",
            fix="spmd.pretrained.save, for its weights.",
        )
    trainer, origin = getattr(model, "trainer", None), getattr(module, ORIGIN, None)
    save_merged = "spmd.pretrained.save(..., merged=True)"
    if trainer is not None:
        check_only_adapters(
            trainer.placed.abstract_variables.params,
            f"{save_merged} writes all weights; or a [train] that leaves these out.",
        )
    if isinstance(origin, Origin) and origin.config is not None:
        why = (
            f"save_adapters: {join_names(CLASSIFIER.values())} are new, of load(labels=...), and "
            "would be lost: only adapters are written."
        )
        raise OptionError(why, fix=f"{save_merged}, which writes the classifier, too.")
    weights_map = _map_of(module, name_map)
    modules = adapted_modules(weights_map, module, "save(merged=True)")
    arrays = {}
    for path in adapters:
        for matrix in NAMES:
            arrays[f"{path}/{matrix}"] = getattr(layers[path], matrix).get_value()
    links = []
    for file_module in modules:
        links += _links_to_write(target, file_module, arrays)
    if base_model is None and isinstance(origin, Origin):
        base_model = str(origin.files.where)
    others = set()
    for _, _, names in mapped_parameters(weights_map, module):
        others.add(names[0].removesuffix(".weight"))
    others -= {file_module.name for file_module in modules}
    adapted = {file_module.name: adapters[file_module.layer] for file_module in modules}
    config = make_config(adapted, others)
    config |= {
        "base_model_name_or_path": base_model,
        "task_type": _task_type(module),
        # PEFT's word for kernels [in, out], which transformers' Conv1D of GPT-2 has.
        "fan_in_fan_out": not all(file_module.transposed for file_module in modules),
    }
    dtypes = {link.tensor.name: link.tensor.dtype for link in links}
    config_text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    display = show_progress(progress)
    try:
        write_folder(
            target,
            links,
            arrays,
            dtypes=dtypes,
            # As PEFT writes it.
            metadata={"format": "pt"},
            beside={ADAPTER_CONFIG: config_text.encode()},
            # PEFT reads one file of adapters, and no shards.
            max_shard=2**62,
            display=display,
            stem=STEM,
        )
    finally:
        display.close()
    return target


def _links_to_write(
    folder: Path, module: FileModule, arrays: Mapping[str, jax.Array]
) -> list[Link]:
    """Return the links of a layer's matrices with the tensors that are written of them."""
    links = []
    for matrix, suffix in MATRICES.items():
        leaf = arrays[f"{module.layer}/{matrix}"]
        shape = leaf.shape[:-3:-1]  # transposed, without the dim of a stack's layers
        size = shape[0] * shape[1] * leaf.dtype.itemsize
        name = f"{PREFIX}{module.name}.{suffix}"
        file = folder / f"{STEM}.safetensors"
        tensor = Tensor(name, file, np.dtype(leaf.dtype), shape, 0, size)
        links.append(link_matrix(tensor, module, matrix))
    return links


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
    adapted = [layer for layer in modules_of(name_map, module) if layer.layer in adapters]
    problems = []
    for layer in adapted:
        if layer.refusal:
            problems.append(Problem(layer.name, [layer.refusal], path=layer.layer))
    mapped = {layer.layer for layer in adapted}
    for path in adapters:
        if path not in mapped:
            why = "the name map maps its kernel to no tensor."
            problems.append(Problem(path, [why], path=path))
    raise_problems(
        PretrainedError,
        "adapters cannot be written in PEFT's format",
        join_layers(problems),
        fix=f"{otherwise}, which writes the model with all adapters merged into its weights.",
    )
    return adapted


def _compare_base_model(named: str, module: nnx.Module, folder: Path) -> None:
    """Warn where adapters are for a model of another name, as far as its folder says; snapshots lie
    in models--ORG--NAME.
    """
    origin = getattr(module, ORIGIN, None)
    *_, last = named.lower().rstrip("/").rpartition("/")
    if not isinstance(origin, Origin) or not last:
        return
    parts = [f"--{part.lower()}" for part in origin.files.where.parts]
    if not any(part.endswith(f"--{last}") for part in parts):
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
    """Return PEFT's class for a model. None: the class for any; the one for classes (SEQ_CLS)
    needs a classifier in the file.
    """
    if isinstance(module, Encoder) and module.config.task == "features":
        return "FEATURE_EXTRACTION"
    if isinstance(module, Decoder):
        return "CAUSAL_LM"
    return None
