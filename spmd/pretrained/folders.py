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
from jax.sharding import Sharding

from spmd.base.output_files import read_bytes
from spmd.base.tracebacks import trims_tracebacks
from spmd.base.tree import Tree, flatten, map_paths, parse_bytes
from spmd.base.user_paths import as_path
from spmd.distributed.consistency import raise_everywhere
from spmd.errors import (
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
from spmd.layout.schema import Layout
from spmd.models.base import Variables
from spmd.models.flax_nnx import NOTES, ORIGIN, NnxModel, hand_over
from spmd.models.lora import adapter_paths, merge_adapters
from spmd.models.wrap import wrap
from spmd.pretrained.architectures import CONFIG, find
from spmd.pretrained.links import Link
from spmd.pretrained.match_tensors import match_tensors
from spmd.pretrained.name_map import NameMap, compiled
from spmd.pretrained.outline import Outline, no_call, read_config
from spmd.pretrained.read_weights import ReadReport, read_arrays
from spmd.pretrained.safetensors_files import INDEX, SUFFIX, Tensor, WeightFiles, open_files
from spmd.pretrained.write_weights import write_folder
from spmd.run.progress import NoProgress, make_progress

AS_FILE = "file"
# tensors and arrays of a new one
CLASSIFIER = {"classifier.weight": "classifier/kernel", "classifier.bias": "classifier/bias"}
# files of a folder that are copied: its config, and its tokenizer
BESIDE = ("*.json", "*.txt", "*.model", "*.jinja")


@dataclasses.dataclass(frozen=True, eq=False)
class Origin:
    """The folder from which a model's weights were read: enough to write them as they were.

    Attributes:
      files: the tensors of the folder, with their dtypes.
      name_map: maps tensors to arrays.
      report: of the bytes that this process has read; None if it has read nothing.
      config: of the model, where it is not that of the folder.
    """

    files: WeightFiles
    name_map: NameMap
    report: ReadReport | None = None
    config: dict[str, Any] | None = None

    @property
    def folder(self) -> Path:
        """The folder, also where one file of it was named."""
        if self.files.where.suffix == SUFFIX:
            return self.files.where.parent
        return self.files.where

    def __repr__(self) -> str:
        return f"Origin({str(self.files.where)!r}, {len(self.files.tensors)} tensors)"


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
    # An error of one process ends all, which would otherwise wait for it in the next collective.
    outline = raise_everywhere(
        lambda: Outline.of(path, **options), SpmdError, f"{path} cannot be read"
    )

    def read_tensors() -> tuple[dict[str, jax.Array], dict[str, jax.ShapeDtypeStruct], Origin]:
        files, arrays = open_files(path), outline.arrays
        if labels is not None:
            files = _with_classifier(files, arrays)
        links = outline.match(files)
        dtypes = _dtypes(dtype, links, arrays)
        targets: dict[str, jax.ShapeDtypeStruct] = {}
        for link in links:
            sharding = outline.shardings.get(link.path, outline.elsewhere)
            targets[link.path] = jax.ShapeDtypeStruct(
                arrays[link.path].shape, dtypes[link.path], sharding=sharding
            )
        new = {}
        if labels is not None:
            new = {name: targets.pop(name) for name in CLASSIFIER.values()}
        old_links = [link for link in links if link.path not in new]
        values, report = read_arrays(old_links, targets, display)
        files = dataclasses.replace(files, where=path.absolute())
        return values, new, Origin(files, outline.name_map, report, outline.config)

    try:
        values, new, origin = raise_everywhere(
            read_tensors, PretrainedError, f"{path} cannot be read"
        )
    finally:
        display.close()
    _log_origin(path, origin, new)
    module = _build_module(outline, values, new)
    setattr(module, ORIGIN, origin)
    if outline.notes:
        notes = [f"note: {path / CONFIG}: {note}" for note in outline.notes]
        setattr(module, NOTES, tuple(notes))
    hand_over(module)
    return module


def _log_origin(path: Path, origin: Origin, new: Mapping[str, Any]) -> None:
    """Log the bytes that were read, and tensors and arrays that were left out."""
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


def _build_module(
    outline: Outline, values: dict[str, jax.Array], new: dict[str, jax.ShapeDtypeStruct]
) -> nnx.Module:
    """Return the module with the arrays that were read; the model makes all others."""
    abstract = outline.abstract
    others = _made_by_the_model(
        outline.model, Variables(new, abstract.stats, abstract.rngs), outline.elsewhere
    )
    values = values | others.params
    params = map_paths(lambda name, _: values[name], abstract.params)
    stats = map_paths(lambda name, leaf: values.get(name, leaf), others.stats)
    module = outline.model.rebuild(Variables(params, stats, others.rngs))
    for _, embed in nnx.iter_modules(module):
        # nnx.Embed casts its table to a dtype that it keeps from when it was built
        if isinstance(embed, nnx.Embed) and embed.dtype == embed.param_dtype:
            embed.dtype = embed.param_dtype = embed.embedding.dtype
    return module


def show_progress(choice: bool | str) -> Any:
    """Return a progress display, which shows nothing but in process 0."""
    display = make_progress(choice)
    if jax.process_index() == 0:
        return display
    return NoProgress()


def _ignored(origin: Origin) -> dict[str, list[str]]:
    """Tensors of the files that the map ignores, by the reason."""
    by_reason: dict[str, list[str]] = {}
    for rule in origin.name_map.for_names(origin.files.tensors).ignored:
        pattern = compiled(rule.file)
        if names := list(filter(pattern.fullmatch, origin.files.tensors)):
            by_reason.setdefault(rule.reason, []).extend(names)
    return by_reason


def _dtypes(dtype: str, links: list[Link], arrays: Mapping[str, Any]) -> dict[str, np.dtype]:
    """The dtype of each array that is read."""
    requested = None
    if dtype != AS_FILE:
        requested = _as_dtype(dtype)
    dtypes: dict[str, np.dtype] = {}
    for link in links:
        in_model, stored = arrays[link.path].dtype, link.tensor.dtype
        # numpy does not count bfloat16 as floating, and jax.numpy does.
        if not (jnp.issubdtype(in_model, jnp.floating) and jnp.issubdtype(stored, jnp.floating)):
            dtypes[link.path] = in_model
        elif requested is not None:
            dtypes[link.path] = requested
        elif dtypes.setdefault(link.path, stored) != stored:
            why = f"{link.path} is read from tensors of {dtypes[link.path]} and of {stored}."
            raise PretrainedError(
                why, fix=f'{option("dtype", quoted("float32"))}, or another than "file".'
            )
    return dtypes


def _as_dtype(dtype: Any) -> np.dtype:
    dtypes = ("float32", "bfloat16", "float16", "float64")
    if dtype not in dtypes:
        fix = did_you_mean(str(dtype), (*dtypes, AS_FILE))
        raise OptionError(f"{option('dtype', short_repr(dtype))}.", fix=fix)
    if dtype == "float64" and not jax.config.read("jax_enable_x64"):
        raise OptionError(
            f"{option('dtype', quoted('float64'))}, which JAX does not have unless jax_enable_x64 "
            "is set.",
            fix=f"{option('dtype', quoted('float32'))}.",
        )
    return np.dtype(jnp.dtype(dtype))


def _with_classifier(files: WeightFiles, arrays: Mapping[str, Any]) -> WeightFiles:
    """The files with tensors of a new classifier, which are in none of them."""
    if present := [name for name in CLASSIFIER if name in files.tensors]:
        raise PretrainedError(
            f"{files.where} has {join_names(present)} already.",
            fix="a config.json that names its architecture.",
        )
    dtype = np.dtype("float32")
    for tensor in files.tensors.values():
        dtype = tensor.dtype
        break
    new = {}
    for name, path in CLASSIFIER.items():
        new[name] = Tensor(name, files.where, dtype, arrays[path].shape[::-1], 0, 0)
    return dataclasses.replace(files, tensors=files.tensors | new)


def _made_by_the_model(model: NnxModel, abstract: Variables, where: Sharding) -> Variables:
    """New parameters by path, random streams and statistics, as the model makes them; other
    parameters are not made.
    """
    if not jax.tree.leaves(abstract):
        return abstract

    def make() -> tuple[Tree, Tree, Tree]:
        made = model.make_variables(None, no_call)
        params = flatten(made.params)
        new_params = {path: params[path].astype(new.dtype) for path, new in abstract.params.items()}
        return new_params, made.stats, made.rngs

    shardings = {path: new.sharding for path, new in abstract.params.items()}
    # flax places a parameter with axis names when it is made, if there is a mesh; here the layout
    # says where it goes
    compiled_make = jax.jit(make, out_shardings=(shardings, where, where))
    with nnx.use_eager_sharding(False):
        return Variables(*compiled_make())


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
    target, module = as_path(folder, "folder").absolute(), module_of(model)
    if merged and not adapter_paths(module):
        raise OptionError("merged=True, and the model has no adapters.", fix="leave merged out.")
    if not merged and adapter_paths(module):
        raise OptionError(
            "the model has adapters, which are not in the files that it is from.",
            fix="merged=True, or spmd.pretrained.save_adapters for the adapters alone.",
        )
    if merged:
        module = merge_adapters(module)
    origin = origin_of(module, like, name_map)
    concrete = wrap(module).concrete
    arrays: dict[str, jax.Array] = {}
    params: dict[str, Any] = {}
    if concrete:
        params = flatten(concrete.params)
        for path, leaf in (params | flatten(concrete.stats)).items():
            arrays[path] = jnp.asarray(leaf)
    links = match_tensors(
        origin.name_map, origin.files.tensors, arrays, params, str(origin.files.where)
    )
    dtypes: dict[str, np.dtype] = {}
    for link in links:
        for tensor in _tensors(link):
            dtypes[tensor.name] = _written_dtype(tensor, dtype)
    order = {name: number for number, name in enumerate(dtypes)}
    ordered_links = sorted(links, key=lambda link: order[link.tensor.name])
    display = show_progress(progress)
    try:
        write_folder(
            target,
            ordered_links,
            arrays,
            dtypes=dtypes,
            # transformers refuses a file whose metadata names no format.
            metadata=origin.files.metadata or {"format": "pt"},
            beside=_beside(origin, dtype),
            max_shard=_bytes(max_shard),
            display=display,
        )
    finally:
        display.close()
    return target


def module_of(model: Any) -> nnx.Module:
    """Return a module, or the module of a result of `fit`."""
    module = model
    if not isinstance(model, nnx.Module):
        module = getattr(model, "model", None)
    if not isinstance(module, nnx.Module):
        why = f"model={short_repr(model)} is {type_name(model)}."
        raise OptionError(why, fix="a module that spmd.pretrained.load gave, or a result of fit.")
    return module


def _tensors(link: Link) -> list[Tensor]:
    if link.twin is None:
        return [link.tensor]
    return [link.tensor, link.twin.tensor]


def _written_dtype(tensor: Tensor, dtype: str | None) -> np.dtype:
    if dtype is None or not jnp.issubdtype(tensor.dtype, jnp.floating):
        return tensor.dtype
    return _as_dtype(dtype)


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
        if not isinstance(origin, Origin):
            why = (
                "this model was not loaded by spmd.pretrained.load, so names and dtypes of its "
                "tensors are not known."
            )
            raise PretrainedError(why, fix="like=FOLDER, one with such weights.")
        if name_map is None:
            return origin
        return dataclasses.replace(origin, name_map=NameMap.load(name_map))
    path = as_path(like, "like")
    if name_map is not None:
        chosen = NameMap.load(name_map)
    elif isinstance(origin, Origin):
        chosen = origin.name_map
    else:
        chosen = find(read_config(path), path).name_map
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
    contents: dict[str, bytes] = {}
    for pattern in BESIDE:
        for path in sorted(folder.glob(pattern)):
            # Without the index, which is written anew, since the shards may be others.
            if path.is_file() and not path.name.endswith(INDEX):
                contents[path.name] = read_bytes(path)
    if CONFIG in contents and (dtype is not None or origin.config is not None):
        config = origin.config or json.loads(contents[CONFIG])
        # Older versions of transformers write torch_dtype, newer ones dtype.
        for key in ("torch_dtype", "dtype"):
            if dtype is not None and key in config:
                config = config | {key: dtype}
        contents[CONFIG] = (json.dumps(config, indent=2) + "\n").encode()
    return contents
