"""`load` and `save`: a folder of weights becomes a model whose arrays lie where a layout keeps
them, and the inverse.
"""

import dataclasses
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from spmd.distributed.consistency import raise_everywhere
from spmd.errors import (
    ModelError,
    OptionError,
    PretrainedError,
    SpmdError,
    did_you_mean,
    join_names,
    option,
    quoted,
    short_repr,
    type_name,
)
from spmd.layout.check import fit_layout
from spmd.layout.schema import Layout
from spmd.layout.unused_axes import unused_axes, without_axes
from spmd.mesh import MeshSpec, make_mesh
from spmd.models.base import Variables
from spmd.models.flax_nnx import NOTES, ORIGIN, NnxModel, hand_over
from spmd.models.lora import adapter_paths, merge_adapters
from spmd.models.wrap import wrap
from spmd.output_files import read_bytes
from spmd.pretrained.architectures import CONFIG, OWN, Architecture, find, with_labels
from spmd.pretrained.links import Link
from spmd.pretrained.match_tensors import match_tensors
from spmd.pretrained.name_map import NameMap, compiled
from spmd.pretrained.read_weights import ReadReport, read_arrays
from spmd.pretrained.safetensors_files import INDEX, SUFFIX, Tensor, WeightFiles, open_files
from spmd.pretrained.write_weights import write_folder
from spmd.run.progress import NoProgress, make_progress
from spmd.specs import pspec
from spmd.tracebacks import trims_tracebacks
from spmd.tree import Tree, flatten, map_paths, parse_bytes
from spmd.user_paths import as_path

ADAPTER_CONFIG = "adapter_config.json"
AS_FILE = "file"
# tensors and arrays of a new one
CLASSIFIER = {"classifier.weight": "classifier/kernel", "classifier.bias": "classifier/bias"}
# files of a folder that are copied: its config, and its tokenizer
BESIDE = ("*.json", "*.txt", "*.model", "*.jinja")


@dataclasses.dataclass(frozen=True, eq=False)
class Origin:
    """Where a model's weights were read: enough to write them as they were.

    Attributes:
      files: the tensors of the folder, with their dtypes.
      name_map: which of them is which array.
      report: what this process has read; None if nothing was.
      config: of the model, where it is not that of the folder.
    """

    files: WeightFiles
    name_map: NameMap
    report: ReadReport | None = None
    config: dict[str, Any] | None = None

    @property
    def folder(self) -> Path:
        """The folder, also where one file of it was named."""
        return self.files.where.parent if self.files.where.suffix == SUFFIX else self.files.where

    def __repr__(self) -> str:
        return f"Origin({str(self.files.where)!r}, {len(self.files.tensors)} tensors)"


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
    """Whether a folder is one of adapters, without a model's config.

    >>> has_adapters_alone(Path("nowhere"))
    False
    """
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / CONFIG).is_file()


@dataclasses.dataclass(frozen=True)
class Outline:
    """What `load` makes of a folder, before any weight is read.

    Attributes:
      model: the wrapped module.
      name_map: which tensor of the files is which array.
      notes: what config.json asks for that the model leaves to the training run.
      config: with the labels of a new classifier; None without one.
      abstract: shapes of the module's variables.
      layout: without the axes that the mesh does not have; None if there is neither mesh nor
        layout.
      shardings: where each parameter lies; elsewhere: where everything else does.
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
        """From a folder's config.json and the arguments of `load`, which raises the same."""
        config = (
            None if labels is None else with_labels(read_config(path), labels, str(path / CONFIG))
        )
        if config is not None and (model is not None or name_map is not None):
            raise OptionError("labels= with a model or a name map of your own.", fix="one of them.")
        factory, chosen_map, notes = _choose(path, model, name_map, config)
        built = wrap(factory)
        if not isinstance(built, NnxModel):
            raise ModelError(
                f"model= gives {type_name(model)}, not an nnx module.",
                fix="a function that returns an nnx.Module.",
            )
        abstract = built.shapes(_no_call)
        if mesh is None and layout is None:
            one = SingleDeviceSharding(jax.local_devices()[0])
            return cls(
                built,
                chosen_map,
                notes,
                config,
                abstract,
                None,
                dict.fromkeys(flatten(abstract.params), one),
                one,
            )
        chosen = Layout.load(layout if layout is not None else "data_parallel")
        on = make_mesh(mesh if mesh is not None else dict(chosen.mesh) or None)
        spec, names = MeshSpec.parse(on), built.names(None, _no_call)
        resolved = fit_layout(
            without_axes(chosen, unused_axes(chosen, spec)),
            flatten(abstract.params),
            names,
            spec,
            built.stacks(),
        )
        placed: dict[str, Sharding] = {
            path: NamedSharding(on, pspec(place.spec))
            for path, place in resolved.placements.items()
        }
        return cls(
            built,
            chosen_map,
            notes,
            config,
            abstract,
            resolved.layout,
            placed,
            NamedSharding(on, PartitionSpec()),
        )

    @property
    def arrays(self) -> dict[str, Any]:
        """Shapes of parameters and statistics, by path."""
        return {**flatten(self.abstract.params), **flatten(self.abstract.stats)}

    def match(self, files: WeightFiles) -> list[Link]:
        """Which parts of which tensors are which arrays; raises all misfits."""
        return match_tensors(
            self.name_map,
            files.tensors,
            self.arrays,
            flatten(self.abstract.params),
            str(files.where),
        )


@trims_tracebacks
def load(
    folder: str | Path,
    *,
    model: Callable[[], nnx.Module] | nnx.Module | None = None,
    name_map: str | Path | NameMap | None = None,
    mesh: Any = None,
    layout: str | Path | Layout | None = None,
    dtype: str = "float32",
    labels: Sequence[str] | None = None,
    progress: bool | str = "auto",
) -> nnx.Module:
    """A model with the weights of a folder of safetensors files, each read straight to the devices
    that keep it.

    Each process reads only the bytes that its devices keep. All processes call this.

    Args:
      folder: has `model.safetensors`, or `model.safetensors.index.json` and its shards, and a
        config.json.
      model: a function without arguments that builds an `nnx.Module`, for one of your own; by
        default config.json decides.
      name_map: a TOML file that says which tensor is which array; by default the one of the
        config's `model_type`.
      mesh: "data=4,model=2", a dict, or a jax `Mesh`; None: the layout's own mesh, or one device if
        there is no layout.
      layout: as for `fit`; None: "data_parallel" if there is a mesh.
      dtype: of floating-point parameters; "file": as the files have them.
      labels: of classes: an encoder gets a new, random classifier for them, and `save` writes that
        too.
      progress: True, False, or "auto" (in a terminal or a notebook).

    Returns:
      The module, its arrays laid out by the layout. It is handed over: `fit` uses its arrays
      themselves, without a copy, and the module cannot be used after that; `result.model` can.

    Raises:
      PretrainedError: a damaged or missing file; a name map that does not fit the files and the
        model: all misfits at once.
      LayoutError: the layout does not fit the model on this mesh.

    Example:
      >>> import tempfile
      >>> from spmd.pretrained.name_map import NameMap
      >>> from spmd.pretrained.safetensors_files import write_file
      >>> names = NameMap.loads(
      ...     '[[tensors]]\\nfile = "weight"\\nmodel = "kernel"\\ntranspose = true'
      ... )
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     write_file(
      ...         Path(folder) / "model.safetensors", {"weight": np.ones((2, 3), np.float32)}
      ...     )
      ...     model = load(
      ...         folder,
      ...         model=lambda: nnx.Linear(3, 2, use_bias=False, rngs=nnx.Rngs(0)),
      ...         name_map=names,
      ...     )
      >>> model(jnp.ones((1, 3))).tolist()
      [[3.0, 3.0]]
    """
    path = as_path(folder, "folder")
    display = show_progress(progress)
    options = {
        "model": model,
        "name_map": name_map,
        "mesh": mesh,
        "layout": layout,
        "labels": labels,
    }
    outline = raise_everywhere(
        lambda: Outline.of(path, **options), SpmdError, f"{path} cannot be read"
    )
    built, abstract = outline.model, outline.abstract

    def read() -> tuple[dict[str, jax.Array], dict[str, jax.ShapeDtypeStruct], Origin]:
        files, arrays = open_files(path), outline.arrays
        if labels is not None:
            files = _with_classifier(files, arrays)
        links = outline.match(files)
        dtypes = _dtypes(dtype, links, arrays)
        targets = {
            name: jax.ShapeDtypeStruct(
                arrays[name].shape,
                dtypes[name],
                sharding=outline.shardings.get(name, outline.elsewhere),
            )
            for name in {link.path: None for link in links}
        }
        new = (
            {name: targets.pop(name) for name in CLASSIFIER.values()} if labels is not None else {}
        )
        values, report = read_arrays(
            [link for link in links if link.path not in new], targets, display
        )
        return (
            values,
            new,
            Origin(
                dataclasses.replace(files, where=path.absolute()),
                outline.name_map,
                report,
                outline.config,
            ),
        )

    try:
        values, new, origin = raise_everywhere(read, PretrainedError, f"{path} cannot be read")
    finally:
        display.close()
    logger = logging.getLogger("spmd")
    logger.info("%s: %s", path, origin.report)
    for reason, names in _ignored(origin).items():
        logger.info(
            "%s: not read, and not in what save writes: %s, because %s.",
            path,
            join_names(names),
            reason,
        )
    if new:
        logger.info("%s: new and random: %s.", path, join_names(CLASSIFIER))
    others = _made_by_the_model(
        built, Variables(new, abstract.stats, abstract.rngs), outline.elsewhere
    )
    values |= others.params
    stats = map_paths(lambda name, leaf: values.get(name, leaf), others.stats)
    module = built.rebuild(
        Variables(map_paths(lambda name, _: values[name], abstract.params), stats, others.rngs)
    )
    for _, embed in nnx.iter_modules(module):
        # as built: it computes in the dtype of its table
        if isinstance(embed, nnx.Embed) and embed.dtype == embed.param_dtype:
            embed.dtype = embed.param_dtype = embed.embedding.dtype
    setattr(module, ORIGIN, origin)
    if outline.notes:
        setattr(module, NOTES, tuple(f"note: {path / CONFIG}: {note}" for note in outline.notes))
    hand_over(module)
    return module


def show_progress(wanted: bool | str) -> Any:
    """A progress display, in process 0."""
    display = make_progress(wanted)
    return display if jax.process_index() == 0 else NoProgress()


def _no_call(model: Any) -> None:
    """An nnx module shows its shapes without being called."""


def _choose(path: Path, model: Any, name_map: Any, config: Any = None) -> Architecture:
    """The model and the name map: those given, or those of the config, by default the folder's."""
    chosen = None if name_map is None else NameMap.load(name_map)
    if model is not None and chosen is not None:
        return Architecture(model, chosen, ())
    if not path.is_dir():
        raise PretrainedError(
            f"there is no folder {path}.",
            fix="check the path; a model's name must be downloaded to a folder first.",
        )
    found = find(config or read_config(path), path)
    found = found if model is None else found._replace(factory=model, notes=())
    return found if chosen is None else found._replace(name_map=chosen)


def _ignored(origin: Origin) -> dict[str, list[str]]:
    """Tensors of the files that the map ignores, by the reason."""
    by_reason: dict[str, list[str]] = {}
    for rule in origin.name_map.for_names(origin.files.tensors).ignored:
        if names := list(filter(compiled(rule.file).fullmatch, origin.files.tensors)):
            by_reason.setdefault(rule.reason, []).extend(names)
    return by_reason


def _dtypes(dtype: str, links: list[Link], arrays: Mapping[str, Any]) -> dict[str, np.dtype]:
    """The dtype of each array that is read."""
    asked = _as_dtype(dtype) if dtype != AS_FILE else None
    dtypes: dict[str, np.dtype] = {}
    for link in links:
        kept, stored = arrays[link.path].dtype, link.tensor.dtype
        if not (jnp.issubdtype(kept, jnp.floating) and jnp.issubdtype(stored, jnp.floating)):
            dtypes[link.path] = kept
        elif asked is None and dtypes.get(link.path, stored) != stored:
            why = f"{link.path} is read from tensors of {dtypes[link.path]} and of {stored}."
            raise PretrainedError(
                why, fix=f'{option("dtype", quoted("float32"))}, or another than "file".'
            )
        else:
            dtypes[link.path] = stored if asked is None else asked
    return dtypes


def _as_dtype(dtype: Any) -> np.dtype:
    known = ("float32", "bfloat16", "float16", "float64", AS_FILE)
    if dtype not in known[:-1]:
        raise OptionError(
            f"{option('dtype', short_repr(dtype))}.", fix=did_you_mean(str(dtype), known)
        )
    if dtype == "float64" and not jax.config.read("jax_enable_x64"):
        raise OptionError(
            f"{option('dtype', quoted('float64'))}, which JAX does not have unless jax_enable_x64 "
            "is set.",
            fix=f"{option('dtype', quoted('float32'))}.",
        )
    return np.dtype(jnp.dtype(dtype))


def _with_classifier(files: WeightFiles, arrays: Mapping[str, Any]) -> WeightFiles:
    """The files with tensors of a new classifier, which are in none of them."""
    if there := [name for name in CLASSIFIER if name in files.tensors]:
        raise PretrainedError(
            f"{files.where} has {join_names(there)} already.",
            fix="a config.json that names its architecture.",
        )
    dtype = next(iter(files.tensors.values())).dtype if files.tensors else np.dtype("float32")
    new = {
        name: Tensor(name, files.where, dtype, arrays[path].shape[::-1], 0, 0)
        for name, path in CLASSIFIER.items()
    }
    return dataclasses.replace(files, tensors=files.tensors | new)


def _made_by_the_model(model: NnxModel, abstract: Variables, where: Sharding) -> Variables:
    """New parameters by path, random streams and statistics, as the model makes them; other
    parameters are not made.
    """
    if not jax.tree.leaves(abstract):
        return abstract

    def make() -> tuple[Tree, Tree, Tree]:
        made = model.init(None, _no_call)
        params = flatten(made.params)
        return (
            {path: params[path].astype(new.dtype) for path, new in abstract.params.items()},
            made.stats,
            made.rngs,
        )

    with nnx.use_eager_sharding(False):
        return Variables(
            *jax.jit(
                make,
                out_shardings=(
                    {path: new.sharding for path, new in abstract.params.items()},
                    where,
                    where,
                ),
            )()
        )


@trims_tracebacks
def save(
    model: Any,
    folder: str | Path,
    *,
    like: str | Path | None = None,
    name_map: str | Path | NameMap | None = None,
    max_shard: int | str = "5GB",
    dtype: str | None = None,
    merged: bool = False,
    progress: bool | str = "auto",
) -> Path:
    """Write a model as a folder of safetensors files, with the names, shapes and dtypes of the
    folder that it was loaded from.

    The folder appears once it is complete. All processes call this; process 0 writes, one tensor at
    a time. Config and tokenizer are copied.

    Args:
      model: a module of `load`, or what `fit` returned for one.
      folder: is created; one that is not empty is an error.
      like: a folder with the names, shapes and dtypes to write; None: the one that was loaded.
      name_map: of `like`, if the model was not loaded; None: the one that was used, or that of the
        config of `like`.
      max_shard: the bytes of one file, such as "5GB"; a larger tensor has a file of its own.
      dtype: of floating-point tensors; None: as they were.
      merged: of a model with adapters, merge these into its weights; `save_adapters` writes the
        adapters instead.
      progress: True, False, or "auto" (in a terminal or a notebook).

    Returns:
      The folder.

    Raises:
      OptionError: a model with adapters without `merged`, or `merged` of one that has none.
      PretrainedError: the folder is not empty or cannot be written, or the model does not fit the
        name map; nothing was written.

    Example:
      >>> import spmd
      >>> spmd.pretrained.save.__name__
      'save'
    """
    target, display, module = (
        as_path(folder, "folder").absolute(),
        show_progress(progress),
        module_of(model),
    )
    if bool(adapter_paths(module)) != merged:
        why = (
            "merged=True, and the model has no adapters."
            if merged
            else "the model has adapters, which are not in the files that it is from."
        )
        fix = (
            "leave merged out."
            if merged
            else "merged=True, or spmd.pretrained.save_adapters for the adapters alone."
        )
        raise OptionError(why, fix=fix)
    module = merge_adapters(module) if merged else module
    origin = origin_of(module, like, name_map)
    built = wrap(module)
    concrete = built.concrete
    arrays = (
        {
            path: jnp.asarray(leaf)
            for path, leaf in flatten((concrete.params, concrete.stats)).items()
        }
        if concrete
        else {}
    )
    arrays = {path.partition("/")[2]: leaf for path, leaf in arrays.items()}
    params = flatten(concrete.params) if concrete else {}
    links = match_tensors(
        origin.name_map, origin.files.tensors, arrays, params, str(origin.files.where)
    )
    tensors = {tensor.name: tensor for link in links for tensor in _tensors(link)}
    ordered = sorted(links, key=lambda link: list(tensors).index(link.tensor.name))
    try:
        write_folder(
            target,
            ordered,
            arrays,
            dtypes={name: _written_dtype(tensor, dtype) for name, tensor in tensors.items()},
            metadata=origin.files.metadata or {"format": "pt"},
            beside=_beside(origin, dtype),
            max_shard=_bytes(max_shard),
            display=display,
        )
    finally:
        display.close()
    return target


def module_of(model: Any) -> nnx.Module:
    """A module, or that of a result of `fit`."""
    module = model if isinstance(model, nnx.Module) else getattr(model, "model", None)
    if not isinstance(module, nnx.Module):
        why = f"model={short_repr(model)} is {type_name(model)}."
        raise OptionError(why, fix="a module that spmd.pretrained.load gave, or a result of fit.")
    return module


def _tensors(link: Link) -> list[Tensor]:
    return [link.tensor] if link.twin is None else [link.tensor, link.twin.tensor]


def _written_dtype(tensor: Tensor, dtype: str | None) -> np.dtype:
    floating = jnp.issubdtype(tensor.dtype, jnp.floating)
    return _as_dtype(dtype) if dtype is not None and floating else tensor.dtype


def _bytes(size: int | str) -> int:
    try:
        count = parse_bytes(size)
    except (ValueError, TypeError):
        count = 0
    if count < 1:
        raise OptionError(f"max_shard={short_repr(size)}.", fix='a number of bytes, such as "5GB".')
    return count


def origin_of(module: nnx.Module, like: Any = None, name_map: Any = None) -> Origin:
    """The folder whose names are written."""
    origin = getattr(module, ORIGIN, None)
    if like is None:
        if isinstance(origin, Origin):
            return (
                origin
                if name_map is None
                else dataclasses.replace(origin, name_map=NameMap.load(name_map))
            )
        why = (
            "this model was not loaded by spmd.pretrained.load, so names and dtypes of its tensors "
            "are not known."
        )
        raise PretrainedError(why, fix="like=FOLDER, one with such weights.")
    path = as_path(like, "like")
    if name_map is not None:
        chosen = NameMap.load(name_map)
    else:
        chosen = (
            origin.name_map
            if isinstance(origin, Origin)
            else find(read_config(path), path).name_map
        )
    return Origin(open_files(path), chosen)


def _beside(origin: Origin, dtype: str | None) -> dict[str, bytes]:
    """Files beside the weights, by name; the config is the model's, and says the dtype of the
    tensors.
    """
    folder = origin.folder
    if not folder.is_dir():
        why = (
            f"{folder}, from which the weights were loaded, is not there any more; its config and "
            "tokenizer are to be copied."
        )
        raise PretrainedError(why, fix="like=FOLDER, a copy of it.")
    paths = sorted(
        path
        for pattern in BESIDE
        for path in folder.glob(pattern)
        if path.is_file() and not path.name.endswith(INDEX)
    )
    contents = {path.name: read_bytes(path) for path in paths}
    if CONFIG in contents and (dtype is not None or origin.config is not None):
        config = origin.config or json.loads(contents[CONFIG])
        config = config | {
            key: dtype for key in ("torch_dtype", "dtype") if dtype is not None and key in config
        }
        contents[CONFIG] = (json.dumps(config, indent=2) + "\n").encode()
    return contents
