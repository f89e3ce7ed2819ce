"""Load an exported model: a callable that does not need the model's code."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from spmd.base.output_files import read_bytes
from spmd.base.tracebacks import trims_tracebacks
from spmd.base.tree import Tree, describe
from spmd.base.user_paths import as_path
from spmd.data.batches import with_rows
from spmd.errors import ExportError, OptionError, check_integer, import_extra, short_repr, type_name
from spmd.inference.exporter import ABOUT, FORMAT, PROGRAM, WEIGHTS
from spmd.inference.forward import (
    call_in_chunks,
    check_inputs,
    concatenated,
    describe_tree,
)
from spmd.inference.weights import Stored, read_arrays
from spmd.run.manifest import find_damage, read_json


def _texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(text, str) for text in value)


def _shapes(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_shape, value.values()))


def _is_shape(shape: Any) -> bool:
    """Return True for a dtype, the place of the rows, and sizes."""
    if not isinstance(shape, list) or len(shape) < 2:
        return False
    dtype, _, *sizes = shape
    return isinstance(dtype, str) and all(type(size) is int for size in sizes)


def _is_batch(value: Any) -> bool:
    return value is None or (type(value) is int and value > 0)


def _are_versions(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("jax"), str)


REQUIRED: dict[str, Callable[[Any], bool]] = {  # keys of model.json, with checks of their values
    "platforms": _texts,
    "batch": _is_batch,
    "inputs": _shapes,
    "outputs": _shapes,
    "weights": lambda value: isinstance(value, str),
    "versions": _are_versions,
    "arrays": lambda value: isinstance(value, list),
}


@dataclasses.dataclass(frozen=True)
class ExportedModel:
    """A model loaded by `load_exported`: `model(x)` returns arrays on the device,
    `model.predict(x)` numpy arrays.

    Attributes:
      folder: where it was loaded from.
      about: its `model.json`: inputs, outputs, versions, how each array is stored, the layout it
        was trained under.
      inputs: shapes of its inputs; dim 0 is rows, of any size.
      arrays: its weights, on the device: arrays, or pairs of int8 and scales.
      program: the exported program: `program.call(arrays, inputs)` returns outputs.

    Example:
      >>> import optax, spmd, tempfile
      >>> model = spmd.FunctionalModel(
      ...     lambda key: {"w": np.ones((4, 1), np.float32)}, lambda params, x: x @ params["w"]
      ... )
      >>> data = {"x": np.ones((32, 4), np.float32), "y": np.full((32, 1), 4.0, np.float32)}
      >>> result = spmd.fit(
      ...     model,
      ...     data,
      ...     loss=spmd.losses.mean_squared_error,
      ...     optimizer=optax.sgd(0.1),
      ...     batch_size=8,
      ...     steps=3,
      ... )
      >>> exported = spmd.load_exported(result.export(tempfile.mkdtemp() + "/model").folder)
      >>> exported
      ExportedModel(float32[rows, 4] -> float32[rows, 1]; weights exact, for cpu)
      >>> exported(data["x"][:2]).tolist()
      [[4.0], [4.0]]
    """

    folder: Path
    about: dict[str, Any] = dataclasses.field(repr=False)
    inputs: Tree
    arrays: list[Any] = dataclasses.field(repr=False)
    program: jax.export.Exported = dataclasses.field(repr=False)

    def __repr__(self) -> str:
        inputs = describe_tree(with_rows(self.inputs, "rows"))
        outputs = jax.tree.unflatten(self.program.out_tree, self.program.out_avals)
        outputs = describe_tree(with_rows(outputs, "rows"))
        rows = ""
        if self.batch is not None:
            rows = f", rows in chunks of {self.batch}"
        platforms = ", ".join(self.about["platforms"])
        weights = f"weights {self.about['weights']}, for {platforms}"
        return f"ExportedModel({inputs} -> {outputs}{rows}; {weights})"

    @property
    def batch(self) -> int | None:
        """The program's fixed number of rows; None if it takes any number."""
        return self.about["batch"]

    @functools.cached_property
    def _compiled(self) -> Callable[[list, Tree], Tree]:
        return jax.jit(self.program.call)

    def __call__(self, inputs: Tree) -> Tree:
        """The model's outputs [rows, ...], on the device, for numpy or jax arrays [rows, ...].

        It is compiled once for each number of rows; a program for a fixed number of rows is called
        in chunks.

        Raises:
          DataError: another tree, other shapes or dtypes, or no rows.
        """
        rows = check_inputs(inputs, self.inputs)
        function = functools.partial(self._compiled, self.arrays)
        chunks = call_in_chunks(function, inputs, rows, batch=self.batch, most=rows)
        return concatenated(chunks, jnp.concatenate)

    def predict(self, inputs: Tree, *, batch_size: int = 1024) -> Tree:
        """The model's outputs for all rows, as numpy arrays; at most two programs are compiled for
        any number of rows.

        Args:
          inputs: arrays [rows, ...], as the model takes them.
          batch_size: rows per call, if the model takes any number.

        Returns:
          A tree of arrays [rows, ...], as the model returns it.

        Raises:
          DataError: another tree, other shapes or dtypes, or no rows.
        """
        check_integer(batch_size, "batch_size")
        rows = check_inputs(inputs, self.inputs)
        function = functools.partial(self._compiled, self.arrays)
        chunks = call_in_chunks(function, inputs, rows, batch=self.batch, most=batch_size)
        # Chunk by chunk, so that the devices hold the outputs of one chunk at a time.
        return concatenated(jax.device_get(chunk) for chunk in chunks)


@trims_tracebacks
def load_exported(folder: str | Path, *, device: Any = None) -> ExportedModel:
    """Load a model written by `export`, without the model's code; nothing in the folder is executed
    as Python.

    Args:
      folder: that `export` wrote.
      device: the jax device that holds the weights and runs the program; None: jax's default.

    Returns:
      An `ExportedModel`: `model(x)` gives arrays on the device, `model.predict(x)` numpy arrays.

    Raises:
      ExportError: there is no such folder, or it is damaged, of a later format, or not for this
        platform.
      MissingExtraError: flatbuffers, of the extra `export`, is missing.

    Example:
      >>> import spmd
      >>> try:
      ...     load_exported("nowhere")
      ... except spmd.SpmdError as error:
      ...     print(error)
      nowhere: there is no such folder.
          fix: the folder that result.export(...) wrote.
    """
    import_extra("flatbuffers", "export")
    place = as_path(folder, "folder")
    if not place.is_dir():
        raise ExportError(
            f"{place}: there is no such folder.", fix="the folder that result.export(...) wrote."
        )
    about = _about(place)
    # Before the program and the weights are parsed: the manifest has a checksum of each file.
    why = find_damage(place)
    if why is not None:
        raise _damaged(place, why)
    if device is not None and not isinstance(device, jax.Device):
        raise OptionError(f"device={device!r} is {type_name(device)}.", fix="one of jax.devices().")
    if device is None:
        platform = jax.export.default_export_platform()
    else:
        # devices say "gpu", and jax.export "cuda"
        platform = {"gpu": "cuda"}.get(device.platform, device.platform)
    if platform not in about["platforms"]:
        exported_for = ", ".join(about["platforms"])
        names = ", ".join(map(repr, [*about["platforms"], platform]))
        raise ExportError(
            f"{folder} was exported for {exported_for}; this is {platform}.",
            fix=f"export(..., platforms=({names})).",
        )
    try:
        # A bytearray, as the annotation of `deserialize` says.
        program = jax.export.deserialize(bytearray(read_bytes(place / PROGRAM)))
    except Exception as error:
        fix = f"jax {about['versions']['jax']}, with which it was written"
        raise ExportError(
            f"jax {jax.__version__} cannot read the program in {folder}: {error}", fix=f"{fix}."
        ) from error
    try:
        # JSON keeps a tuple as a list.
        stored = [Stored(**{**entry, "shape": tuple(entry["shape"])}) for entry in about["arrays"]]
        place_values = functools.partial(_placed, device=device)
        arrays = read_arrays(place / WEIGHTS, stored, place_values)
        inputs = _inputs(program, arrays, about["batch"])
    except Exception as error:
        raise _damaged(
            place, f"{WEIGHTS} does not hold what {ABOUT} says: {type(error).__name__}: {error}"
        ) from error
    return ExportedModel(place, about, inputs, arrays, program)


def _inputs(program: jax.export.Exported, arrays: list[Any], batch: int | None) -> Tree:
    """Shapes of the program's inputs, in addition to these arrays.

    Raises:
      ValueError: it takes other arrays, or another number of rows.
    """
    (expected, inputs), _ = jax.tree.unflatten(program.in_tree, program.in_avals)
    if jax.tree.map(describe, expected) != jax.tree.map(describe, arrays):
        raise ValueError("the program takes other arrays")
    rows = set()
    for leaf in jax.tree.leaves(inputs):
        # where the program takes any number, dim 0 is a symbol of jax.export
        size = leaf.shape[0]
        if not isinstance(size, int):
            size = None
        rows.add(size)
    if rows != {batch}:
        raise ValueError(f"the program takes another number of rows than {batch}")
    # 1 stands for any number
    return with_rows(inputs, batch or 1)


def _placed(values: np.ndarray, device: Any) -> jax.Array:
    # on CPU, device_put may alias the numpy buffer
    return jax.device_put(values.copy(), device)


def _about(place: Path) -> dict[str, Any]:
    """The contents of `model.json`, if this version can read it."""
    missing, wrong = [], []
    try:
        about = read_json(place / ABOUT)
        version = int(about["format"])
        # The keys of another format are not known, so none of them is missing.
        if version == FORMAT:
            missing = [name for name in REQUIRED if name not in about]
        if version == FORMAT and not missing:
            wrong = [name for name, is_valid in REQUIRED.items() if not is_valid(about[name])]
    except FileNotFoundError:
        raise ExportError(
            f"{place} is not an exported model: it has no {ABOUT}.",
            fix="the folder that result.export(...) wrote.",
        ) from None
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise _damaged(place, f"{ABOUT} cannot be read: {type(error).__name__}") from error
    if missing:
        raise _damaged(place, f"{ABOUT} lacks {', '.join(missing)}")
    if wrong:
        raise _damaged(place, f"{ABOUT}: {wrong[0]} is {short_repr(about[wrong[0]])}")
    if version != FORMAT:
        fix = "the version of spmd that wrote it, or a later one."
        raise ExportError(
            f"the exported model in {place} has format {version}; this version reads {FORMAT}.",
            fix=fix,
        )
    return about


def _damaged(place: Path, why: str) -> ExportError:
    return ExportError(
        f"the exported model in {place} is damaged: {why}.", fix="export it again, or another copy."
    )
