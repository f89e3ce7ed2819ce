"""Outline of a model that is to be loaded, before any weight is read: its config, its name map, the
shapes of its arrays and their places on a mesh.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from spmd.base.specs import pspec
from spmd.base.tree import flatten
from spmd.errors import ModelError, OptionError, PretrainedError, short_repr, type_name
from spmd.layout.check import fit_layout
from spmd.layout.schema import Layout
from spmd.layout.unused_axes import unused_axes, without_axes
from spmd.mesh import MeshSpec, make_mesh
from spmd.models.base import Variables
from spmd.models.flax_nnx import NnxModel
from spmd.models.wrap import wrap
from spmd.pretrained.architectures import CONFIG, OWN, Architecture, find, with_labels
from spmd.pretrained.links import Link
from spmd.pretrained.match_tensors import match_tensors
from spmd.pretrained.name_map import NameMap
from spmd.pretrained.safetensors_files import WeightFiles

ADAPTER_CONFIG = "adapter_config.json"


def read_config(folder: Path, name: str = CONFIG, fix: str = OWN) -> dict[str, Any]:
    """The config.json of a folder, or another JSON object.

    Raises:
      PretrainedError: there is none, or it is not a JSON object.
    """
    path = folder / name
    if path.exists() and not path.is_file():  # opening a pipe waits for a writer
        raise PretrainedError(f"{path} is no regular file.", fix=fix)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        if name == CONFIG and has_adapters_alone(folder):
            fix = (
                "spmd.pretrained.load of the model that they are for, then "
                "spmd.pretrained.load_adapters of this folder."
            )
            raise PretrainedError(f"{folder} has adapters and no model.", fix=fix) from error
        raise PretrainedError(f"{path} cannot be read: {error.strerror}.", fix=fix) from error
    except ValueError as error:
        raise PretrainedError(f"{path} is not JSON: {error}.", fix="download it again.") from error
    if not isinstance(config, dict):
        raise PretrainedError(
            f"{path} is not a JSON object but {short_repr(config)}.", fix="download it again."
        )
    return config


def has_adapters_alone(folder: Path) -> bool:
    """Return True for a folder of adapters without a model's config.

    >>> has_adapters_alone(Path("nowhere"))
    False
    """
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / CONFIG).is_file()


@dataclasses.dataclass(frozen=True)
class Outline:
    """A model that `load` makes of a folder, before any weight is read.

    Attributes:
      model: the wrapped module.
      name_map: maps tensors of the files to arrays.
      notes: requests of config.json that the model leaves to the training run.
      config: with the labels of a new classifier; None without one.
      abstract: shapes of the module's variables.
      layout: without the axes that the mesh does not have; None if there is neither mesh nor
        layout.
      shardings: of each parameter; elsewhere: of everything else.
    """

    model: NnxModel
    name_map: NameMap
    notes: tuple[str, ...]
    config: dict[str, Any] | None
    abstract: Variables
    layout: Layout | None
    shardings: dict[str, Sharding]
    elsewhere: Sharding

    @classmethod
    def of(
        cls,
        path: Path,
        *,
        model: Any = None,
        name_map: Any = None,
        mesh: Any = None,
        layout: Any = None,
        labels: Any = None,
    ) -> "Outline":
        """Return the outline of a folder by its config.json and the arguments of `load`, which
        raises the same errors.
        """
        config = None
        if labels is not None:
            config = with_labels(read_config(path), labels, str(path / CONFIG))
            if model is not None or name_map is not None:
                raise OptionError(
                    "labels= with a model or a name map of your own.", fix="one of them."
                )
        architecture = _choose(path, model, name_map, config)
        built = wrap(architecture.factory)
        if not isinstance(built, NnxModel):
            raise ModelError(
                f"model= gives {type_name(model)}, not an nnx module.",
                fix="a function that returns an nnx.Module.",
            )
        abstract = built.shapes(no_call)
        params, elsewhere = flatten(abstract.params), None
        resolved_layout, shardings = None, dict[str, Sharding]()
        if mesh is None and layout is None:
            # Not jax.devices(), which begins with the devices of process 0.
            elsewhere = SingleDeviceSharding(jax.local_devices()[0])
            shardings |= dict.fromkeys(params, elsewhere)
        else:
            if layout is None:
                layout = "data_parallel"
            chosen = Layout.load(layout)
            if mesh is None:
                mesh = dict(chosen.mesh) or None
            device_mesh = make_mesh(mesh)
            spec = MeshSpec.parse(device_mesh)
            names = built.names(None, no_call)
            chosen = without_axes(chosen, unused_axes(chosen, spec))
            resolved = fit_layout(chosen, params, names, spec, built.stacks())
            resolved_layout = resolved.layout
            for name, placement in resolved.placements.items():
                shardings[name] = NamedSharding(device_mesh, pspec(placement.spec))
            elsewhere = NamedSharding(device_mesh, PartitionSpec())
        return cls(
            built,
            architecture.name_map,
            architecture.notes,
            config,
            abstract,
            resolved_layout,
            shardings,
            elsewhere,
        )

    @property
    def arrays(self) -> dict[str, Any]:
        """Shapes of parameters and statistics, by path."""
        return {**flatten(self.abstract.params), **flatten(self.abstract.stats)}

    def match(self, files: WeightFiles) -> list[Link]:
        """Return the links of tensors with arrays.

        Raises:
          PretrainedError: all misfits at once.
        """
        return match_tensors(
            self.name_map,
            files.tensors,
            self.arrays,
            flatten(self.abstract.params),
            str(files.where),
        )


def no_call(model: Any) -> None:
    """Call nothing: an nnx module shows its shapes without being called."""


def _choose(path: Path, model: Any, name_map: Any, config: Any = None) -> Architecture:
    """Return the user's model and name map, or those of the config, by default the folder's."""
    user_map = None
    if name_map is not None:
        user_map = NameMap.load(name_map)
    if model is not None and user_map is not None:
        return Architecture(model, user_map, ())
    if not path.is_dir():
        raise PretrainedError(
            f"there is no folder {path}.",
            fix="check the path; a model's name must be downloaded to a folder first.",
        )
    architecture = find(config or read_config(path), path)
    if model is not None:
        architecture = architecture._replace(factory=model, notes=())
    if user_map is not None:
        architecture = architecture._replace(name_map=user_map)
    return architecture
