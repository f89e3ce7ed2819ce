"""Matches the tensors of PEFT's files with the layers of a model: modules of the files, and links
of their tensors with `lora_a` and `lora_b`.
"""

import collections
import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from spmd.base.tree import flatten
from spmd.errors import Problem, closest, join_names, printable
from spmd.layout.trained import Adapter
from spmd.models.lora import NAMES, adapter_shapes
from spmd.pretrained.adapter_config import MERGE, AdapterConfig
from spmd.pretrained.encoder import Encoder
from spmd.pretrained.links import Link, solve
from spmd.pretrained.match_tensors import Place, also_text, places_of, without_layer
from spmd.pretrained.name_map import TRANSPOSE, Dims, NameMap, TensorRule, compiled, fill
from spmd.pretrained.outline import ADAPTER_CONFIG
from spmd.pretrained.safetensors_files import Box, Tensor

STEM, PREFIX = "adapter_model", "base_model.model."
MATRICES = dict(zip(NAMES, ("lora_A.weight", "lora_B.weight"), strict=True))
BASE = "base_layer.weight"  # PEFT writes the weights of a head that has adapters, too


@dataclasses.dataclass(frozen=True)
class FileModule:
    """A layer of the model, or one of a stack's (`slot`), that is a module of the files; `refusal`
    is the reason why it can have no adapter there, or "".
    """

    name: str
    layer: str
    slot: int | None
    transposed: bool
    refusal: str = ""


def modules_of(name_map: NameMap, module: nnx.Module) -> list[FileModule]:
    """The `nnx.Linear` layers of a model, each layer of a stack, as modules of the files; several
    may be one of these.
    """
    layers, modules = linear_layers(module), []
    for rule, place, names in mapped_parameters(name_map, module):
        layer, _, leaf = place.path.rpartition("/")
        if leaf == "kernel" and layer in layers:
            name, transposed = names[0].removesuffix(".weight"), rule.dims == TRANSPOSE
            refusal = _refusal(rule, names)
            modules.append(FileModule(name, layer, place.slot, transposed, refusal))
    return modules


def mapped_parameters(
    name_map: NameMap, module: nnx.Module
) -> Iterator[tuple[TensorRule, Place, list[str]]]:
    """Yield for each parameter the first rule that maps it, its place in the model, and the names
    of its tensors.

    A folder may lack a prefix that the model has in other libraries, and which the first rule has;
    an encoder without a head has none.
    """
    # transformers saves a model without a head under names without the head's prefix
    prefix = ""
    if isinstance(module, Encoder) and module.config.task == "features":
        prefix = name_map.prefix
    params = flatten(nnx.to_pure_dict(nnx.state(module, nnx.Param)))
    places, mapped = places_of(name_map.layers, params), set[Place]()
    for rule in name_map.tensors:
        if rule.tied:
            continue
        for pattern in rule.model:
            for path, place in places.items():
                match = compiled(pattern).fullmatch(path)
                if match and place not in mapped:
                    mapped.add(place)
                    names = [fill(file, match.groupdict()) for file in rule.file]
                    yield rule, place, [name.removeprefix(prefix) for name in names]


def _refusal(rule: TensorRule, names: list[str]) -> str:
    """Return the reason why the kernels of a rule can have no adapter in PEFT's files, or ""."""
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
    if not names[0].endswith(".weight"):
        return "its tensor's name does not end with .weight."
    return ""


def linear_layers(module: nnx.Module) -> dict[str, Any]:
    """Return the `nnx.Linear` layers of a module by path."""
    layers = {}
    for path, layer in nnx.iter_modules(module):
        if isinstance(layer, nnx.Linear):
            layers["/".join(map(str, path))] = layer
    return layers


def link_matrix(
    tensor: Tensor, module: FileModule, leaf: str, dims: Dims | None = TRANSPOSE
) -> Link:
    """Return the link of a tensor with a matrix of a layer, or of one layer of a stack."""
    shape = tensor.shape
    if dims == TRANSPOSE:
        shape = shape[::-1]
    stacked = module.slot is not None
    layer: Box = ()
    if module.slot is not None:
        layer = ((module.slot, module.slot + 1),)
    tensor_box = tuple((0, size) for size in tensor.shape)
    array_box = (*layer, *((0, size) for size in shape))
    factors = solve(dims, tensor.shape, shape)
    return Link(tensor, tensor_box, f"{module.layer}/{leaf}", array_box, stacked, factors)


def join_layers(problems: list[Problem]) -> list[Problem]:
    """Return problems with those joined that differ in the number of a layer only."""
    groups: dict[tuple, list[Problem]] = {}
    for problem in problems:
        texts = (problem.where, *problem.why, problem.fix)
        key = tuple(map(without_layer, texts))
        groups.setdefault(key, []).append(problem)
    joined = []
    for group in groups.values():
        names = dict.fromkeys(problem.where for problem in group)
        joined.append(dataclasses.replace(group[0], also=also_text(list(names))))
    return joined


class AdapterReader:
    """Matches the tensors of a file with a model: links, the arrays that they fill, adapters, and
    problems.
    """

    def __init__(
        self,
        module: nnx.Module,
        name_map: NameMap,
        config: AdapterConfig,
        tensors: Mapping[str, Tensor],
    ):
        self._layers, self._config = linear_layers(module), config
        self._modules = {layer.name: layer for layer in modules_of(name_map, module)}
        self._problems: list[Problem] = []
        self.links: list[Link] = []
        self.targets: dict[str, jax.ShapeDtypeStruct] = {}
        by_module = self._by_module(tensors)
        slots: dict[str, dict[int, Adapter]] = collections.defaultdict(dict)
        for name, parts in by_module.items():
            file_module = self._modules.get(name)
            if file_module is None:
                fix = ""
                if near := closest(name, self._modules):
                    fix = f'did you mean "{near}"?'
                self._problem(name, "this model has no such nnx.Linear.", fix=fix)
            elif file_module.refusal:
                self._problem(name, file_module.refusal, fix=MERGE)
            elif self._link_module(name, file_module, parts):
                adapter = config.adapter(file_module.layer, name)
                slots[file_module.layer][file_module.slot or 0] = adapter
        for layer, adapters in slots.items():
            self._check_stack(layer, adapters, by_module)
        self.adapters = [next(iter(adapters.values())) for adapters in slots.values()]
        if not tensors:
            self._problem(f"{STEM}.safetensors", "it holds no tensor.")
        # else a tensor that does not fit would be one that is missing, too
        if not self._problems:
            self._check_choice(by_module)

    @property
    def problems(self) -> list[Problem]:
        """All problems."""
        return join_layers(self._problems)

    def _by_module(self, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """Return the tensors of each module of the files, by the ends of their names."""
        by_module: dict[str, dict[str, Tensor]] = collections.defaultdict(dict)
        for name, tensor in tensors.items():
            base, _, suffix = name.removeprefix(PREFIX).partition(".lora_")
            if not name.startswith(PREFIX):
                self._problem(name, "it is no matrix of an adapter.", fix=MERGE)
            elif f"lora_{suffix}" in MATRICES.values():
                by_module[base][f"lora_{suffix}"] = tensor
            elif name.endswith(f".{BASE}"):
                by_module[name.removeprefix(PREFIX).removesuffix(f".{BASE}")][BASE] = tensor
            else:
                fix = f"known: {PREFIX}MODULE.lora_A.weight and .lora_B.weight."
                self._problem(name, "it is no matrix of an adapter.", fix=fix)
        return by_module

    def _problem(self, where: str, *why: str, fix: str = "") -> None:
        self._problems.append(Problem(printable(where, 200), why, fix, path=where))

    def _link_module(self, name: str, module: FileModule, parts: dict[str, Tensor]) -> bool:
        """Link the tensors of a module, if they are as its config says."""
        rank, kernel = self._config.get("r", name), self._layers[module.layer].kernel.get_value()
        wrong = _tensor_problems(module, parts, rank, kernel.shape[-2:])
        if wrong:
            self._problem(name, *wrong)
            return False
        for matrix, suffix in MATRICES.items():
            self.links.append(link_matrix(parts[suffix], module, matrix))
        for matrix, shape in zip(NAMES, adapter_shapes(kernel, rank), strict=True):
            self.targets[f"{module.layer}/{matrix}"] = shape
        if BASE in parts:
            dims = None
            if module.transposed:
                dims = TRANSPOSE
            self.links.append(link_matrix(parts[BASE], module, "kernel", dims))
            self.targets[f"{module.layer}/kernel"] = jax.ShapeDtypeStruct(
                kernel.shape, kernel.dtype, sharding=kernel.sharding
            )
        return True

    def _check_stack(
        self, layer: str, adapters: dict[int, Adapter], in_file: Collection[str]
    ) -> None:
        """All layers of a stack have an adapter, and of one kind."""
        names: dict[int, str] = {}
        for name, module in self._modules.items():
            if module.layer == layer:
                names[module.slot or 0] = name
        absent = [name for slot, name in sorted(names.items()) if slot not in adapters]
        if missing := [name for name in absent if name not in in_file]:
            self._problem(
                missing[0],
                f"it has no adapter, which other layers of {layer} have, and all are in one stack.",
                fix=MERGE,
            )
        first = min(adapters)
        for slot, adapter in sorted(adapters.items()):
            other = adapters[first]
            if adapter != other:
                kind = f"rank {adapter.rank}, alpha {adapter.alpha:g}"
                other_kind = f"rank {other.rank}, alpha {other.alpha:g}"
                why = f"{kind}; {names[first]} has {other_kind}, and both are in one stack."
                self._problem(names[slot], why, fix=MERGE)

    def _check_choice(self, in_file: Collection[str]) -> None:
        """Check that the config chooses the modules that have tensors, and no others of the
        model.
        """
        fix = f"the {ADAPTER_CONFIG} that was written with these tensors."
        for name in self._modules:
            is_chosen = self._config.names(name)
            if is_chosen is False and name in in_file:
                self._problem(
                    name,
                    f"it has tensors, and {ADAPTER_CONFIG} does not choose it: "
                    f"{self._config.shown()}.",
                    fix=fix,
                )
            elif is_chosen and name not in in_file:
                self._problem(
                    name,
                    f"it has no tensors, and {ADAPTER_CONFIG} chooses it: {self._config.shown()}.",
                    fix=fix,
                )

    def differences(self, values: dict[str, jax.Array]) -> list[Problem]:
        """Return kernels that the file has as well, and that differ from the model's; kernels are
        taken out of `values`.
        """
        problems = []
        for path in list(values):
            if not path.endswith("kernel"):
                continue
            kernel = values.pop(path)
            layer_path, _, _ = path.rpartition("/")
            layer = self._layers[layer_path]
            if not jnp.array_equal(kernel, layer.kernel.get_value()):
                why = f"{BASE} of the file is not this kernel."
                problems.append(Problem(path, [why], "the model that they were trained for."))
        return problems


def _tensor_problems(
    module: FileModule, parts: dict[str, Tensor], rank: int, sizes: tuple[int, int]
) -> list[str]:
    """Return the differences of a module's tensors from its config and its kernel [in, out]."""
    inputs, outputs = sizes
    shapes = {"lora_A.weight": (rank, inputs), "lora_B.weight": (outputs, rank)}
    if BASE in parts and module.slot is None:
        shapes[BASE] = (inputs, outputs)
        if module.transposed:
            shapes[BASE] = (outputs, inputs)
    wrong = []
    for suffix, shape in shapes.items():
        if suffix not in parts:
            wrong.append(f"it has no {suffix}.")
        elif parts[suffix].shape != shape:
            shown = f"{suffix} {list(parts[suffix].shape)} is not {list(shape)}"
            wrong.append(f"{shown}, of rank {rank}.")
    for suffix in parts:
        if suffix not in shapes:
            wrong.append(f"{suffix} is no matrix of an adapter.")
    for suffix, part in parts.items():
        if not jnp.issubdtype(part.dtype, jnp.floating):
            wrong.append(f"{suffix} is {part.dtype}.")
    if rank > min(sizes):
        wrong.append(f"rank {rank} is above min(in, out) = {min(sizes)}.")
    return wrong
