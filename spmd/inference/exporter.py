"""Export a trained model to a folder that can be used without the model's code."""

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import platform
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.export

from spmd.base.output_files import open_output, publish
from spmd.base.tree import Tree, describe, flatten, format_bytes, map_paths
from spmd.base.user_paths import as_path, check_free, make_folder
from spmd.data.batches import with_rows
from spmd.distributed.consistency import first_nonempty, raise_everywhere
from spmd.errors import ExportError, OptionError, SpmdError, did_you_mean, first_line, import_extra
from spmd.inference.forward import Forward, forward_of, to_host, traced
from spmd.inference.weights import (
    Stored,
    Writer,
    dequantize,
    quantize,
    should_quantize,
    stored_shape,
)
from spmd.mesh import MeshSpec, outside_of_mesh
from spmd.run.manifest import write_manifest
from spmd.train.state import State, place_copy
from spmd.trainer import Trainer

FORMAT = 1
PROGRAM, WEIGHTS, ABOUT = "program.bin", "weights.npz", "model.json"
KINDS = ("exact", "int8")
WHAT = "the model could not be written"
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


@dataclasses.dataclass(frozen=True)
class ExportReport:
    """The result of `export`; printed, a table.

    Attributes:
      folder: where the model was written.
      arrays: how each array is stored, and its quantization error.
      weights_bytes: size of the weights' file.
      exact_bytes: size of the original arrays.
      before, after: loss and metrics of the exact and of the written weights on `check`; empty
        without it.
    """

    folder: Path
    arrays: tuple[Stored, ...]
    weights_bytes: int
    exact_bytes: int
    before: dict[str, float]
    after: dict[str, float]

    def __str__(self) -> str:
        exact = format_bytes(self.exact_bytes)
        text = f"{self.folder}: {len(self.arrays)} arrays"
        quantized = [stored for stored in self.arrays if stored.int8]
        if quantized:
            text += f", {len(quantized)} of them as int8"
        text += f", a file of {format_bytes(self.weights_bytes)} "
        if quantized:
            worst = max(self.arrays, key=lambda stored: stored.relative_error)
            error = f"{worst.path}, {worst.relative_error:.2%} of its norm"
            lines = [f"{text}for {exact} of exact weights", f"  largest error: {error}"]
        else:
            lines = [f"{text}with {exact} of weights and a header for each array"]
        width = max(map(len, self.before), default=0)
        for name, value in self.before.items():
            lines.append(f"  {name:{width}}  {value:.6g} -> {self.after[name]:.6g}")
        return "\n".join(lines)


@outside_of_mesh()
def export(
    trainer: Trainer,
    state: State,
    folder: str | Path,
    *,
    weights: str = "exact",
    platforms: Sequence[str] | None = None,
    batch: int | None = None,
    inputs: Tree = None,
    check: Any = None,
) -> ExportReport:
    """Write a trained model's forward pass, in evaluation mode, and its weights to a folder that
    `load_exported` reads without its code.

    The folder has `program.bin` (StableHLO, by `jax.export`; weights are its arguments),
    `weights.npz`, `model.json` (inputs, outputs, versions, the layout it was trained under), and a
    manifest. Sharded arrays are gathered to the host one at a time and written in full. The folder
    appears once it is complete. All processes must call this; process 0 writes.

    Args:
      trainer: the trainer of the state.
      state: the state to export; `fit(...).export(folder)` exports its last state.
      folder: is created; a folder that is not empty is an error.
      weights: "exact"; or "int8": matrices and kernels as int8 with a scale for each output
        channel, a quarter of the bytes. The program converts them back to their dtype.
      platforms: the platforms of the program, of "cpu", "cuda", "rocm", "tpu"; None: this process's
        platform.
      batch: a fixed number of rows, for a model that cannot be traced with a symbolic one (the
        program is then called in chunks); None: any number.
      inputs: an example of the model's inputs, or their shapes; None: what the loss calls the model
        with.
      check: data on which loss and metrics are measured before and after; for "int8".

    Returns:
      An `ExportReport`: the folder, and how each array is stored; printed, a table.

    Raises:
      ExportError: the folder is not empty, or the model cannot be exported; nothing was written.
      OptionError: an invalid option, or the model's inputs are not clear.
      MissingExtraError: flatbuffers, of the extra `export`, is missing.

    Example:
      >>> import numpy as np, optax, spmd, tempfile
      >>> model = spmd.FunctionalModel(
      ...     lambda key: {"w": np.ones((4, 1), np.float32)}, lambda params, x: x @ params["w"]
      ... )
      >>> trainer = spmd.Trainer(
      ...     model, loss=spmd.losses.mean_squared_error, optimizer=optax.sgd(0.1)
      ... )
      >>> state = trainer.init({"x": np.ones((8, 4), np.float32), "y": np.ones((8, 1), np.float32)})
      >>> report = export(trainer, state, tempfile.mkdtemp() + "/model")
      >>> spmd.load_exported(report.folder).predict(np.ones((3, 4), np.float32)).shape
      (3, 1)
    """
    if weights not in KINDS:
        raise OptionError(f"weights={weights!r}.", fix=f"{did_you_mean(str(weights), KINDS)}")
    if check is not None and weights == "exact":
        raise OptionError(
            'check=... with weights="exact": exact weights have no error to measure.',
            fix='omit it, or weights="int8".',
        )
    is_count = isinstance(batch, int) and not isinstance(batch, bool) and batch > 0
    if batch is not None and not is_count:
        raise OptionError(
            f"batch={batch!r}.", fix="a positive number of rows, or None for any number."
        )
    chosen = _platforms(platforms)
    target = as_path(folder, "folder").absolute()
    # jax.export serializes by flatbuffers, which jax does not install.
    import_extra("flatbuffers", "export")

    def check_target() -> None:
        if jax.process_index() == 0:
            check_free(target, ExportError)

    raise_everywhere(check_target, ExportError, WHAT)
    forward = forward_of(trainer, state, inputs)
    int8 = set()
    if weights == "int8":
        for path, leaf in forward.named:
            if should_quantize(path, leaf, stacked=path in forward.stacked):
                int8.add(path)
    exported = _exported(forward, int8, chosen, batch)
    outputs = jax.tree.unflatten(exported.out_tree, exported.out_avals)
    about = {
        "format": FORMAT,
        "platforms": list(chosen),
        "batch": batch,
        "inputs": _shapes(forward.inputs),
        "outputs": _shapes(outputs),
        "weights": weights,
        "step": int(state.step),
        "precision": trainer.placed.config.precision,
        "layout": trainer.layout.to_toml(),
        "mesh": str(MeshSpec.parse(trainer.mesh)),
        "versions": _versions(),
    }
    before, after = {}, {}
    if check is not None:
        before = trainer.evaluate(state, check)
    arrays, size = _write(target, forward, int8, exported, about)
    if check is not None:
        written = _state_as_written(trainer, state, forward, int8)
        after = trainer.evaluate(written, check)
    exact = sum(leaf.size * leaf.dtype.itemsize for leaf in forward.arrays)
    return ExportReport(target, tuple(arrays), size, exact, before, after)


def _platforms(platforms: Sequence[str] | None) -> tuple[str, ...]:
    if not isinstance(platforms, str | Sequence | None):
        raise OptionError(f"platforms={platforms!r}.", fix=f"of {', '.join(PLATFORMS)}.")
    if platforms is None:
        platforms = jax.export.default_export_platform()
    if isinstance(platforms, str):
        platforms = (platforms,)
    chosen = tuple(platforms)
    for name in chosen:
        if name not in PLATFORMS:
            raise OptionError(f"platforms: {name!r}.", fix=f"of {', '.join(PLATFORMS)}.")
    if not chosen or len(set(chosen)) < len(chosen):
        raise OptionError(f"platforms={platforms!r}.", fix="each one once, and at least one.")
    return chosen


def _exported(
    forward: Forward, int8: Collection[str], platforms: tuple[str, ...], batch: int | None
) -> jax.export.Exported:
    """The program, which takes the arrays as they are stored.

    Raises:
      ExportError: jax cannot export it; if it can with a fixed number of rows, the fix names one
        that works.
    """
    stored = []
    for path, leaf in forward.named:
        stacked = path in forward.stacked
        stored.append(stored_shape(leaf, int8=path in int8, stacked=stacked))

    def function(arrays: list, inputs: Tree) -> Tree:
        dequantized = []
        for array, (path, leaf) in zip(arrays, forward.named, strict=True):
            if path in int8:
                numbers, scales = array
                array = dequantize(numbers, scales, leaf.dtype)
            dequantized.append(array)
        return forward.function(dequantized, inputs)

    first_input = jax.tree.leaves(forward.inputs)[0]
    rows = batch or first_input.shape[0]
    fixed = traced(forward.function, forward.arrays, with_rows(forward.inputs, rows))
    bad = [describe(out) for out in fixed.out_avals if out.shape[:1] != (rows,)]
    if bad:
        raise ExportError(
            f"for {rows} rows the model returns {', '.join(bad)}: not one value or array per row.",
            fix="a model whose outputs have the rows as their dim 0.",
        )
    exported_rows: Any = batch
    if batch is None:
        (exported_rows,) = jax.export.symbolic_shape("rows")
    try:
        export_function = jax.export.export(jax.jit(function), platforms=platforms)
        exported = export_function(stored, with_rows(forward.inputs, exported_rows))
        # here already: some programs can be exported but not serialized
        exported.serialize()
    except SpmdError:
        raise
    except Exception as error:
        on_platforms = (
            f"the model cannot be exported for {', '.join(platforms)}: {first_line(error)}"
        )
        if batch is not None:
            raise ExportError(
                on_platforms, fix="a model without what this names; or other platforms."
            ) from error
        # If it can be exported for a fixed number of rows, the symbol is what it cannot take.
        try:
            _exported(forward, int8, platforms, rows)
        except ExportError:
            raise ExportError(
                on_platforms, fix="a model without what this names; or other platforms."
            ) from error
        why = f"the model cannot be exported for any number of rows: {first_line(error)}"
        fix = f"batch={rows}, or another number: the program is then called in chunks of that size."
        raise ExportError(why, fix=fix) from error
    return exported


def _shapes(tree: Tree) -> dict[str, list]:
    """Dtype and dims of every leaf; dim 0, the rows, is null."""
    shapes = {}
    for path, leaf in flatten(tree).items():
        sizes = map(int, leaf.shape[1:])
        shapes[path] = [str(leaf.dtype), None, *sizes]
    return shapes


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "jax": jax.__version__}
    for name in ("spmd", "flax"):
        # A checkout that runs without being installed has no version.
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def _write(
    target: Path,
    forward: Forward,
    int8: Collection[str],
    exported: jax.export.Exported,
    about: dict[str, Any],
) -> tuple[list[Stored], int]:
    """Write the folder, by process 0, with the shards of all processes; returns how each array is
    stored, and the bytes of the weights.
    """
    # Hidden, and beside the target, because a rename cannot cross file systems.
    working = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    writes = jax.process_index() == 0
    arrays: list[Stored] = []
    failed: list[Exception] = []

    def begin() -> Writer:
        if not writes:
            return Writer(None)
        make_folder(working, ExportError)
        return Writer(working / WEIGHTS)

    def finish() -> str:
        if not writes:
            return ""
        return _finish(target, working, exported, {**about, "arrays": arrays}, failed)

    try:
        writer = raise_everywhere(begin, ExportError, WHAT)
        for path, leaf in forward.named:
            # in all processes, even after one has failed, since this is collective
            values = to_host(leaf)
            stacked = path in forward.stacked
            try:
                if not failed:
                    arrays.append(writer.add(path, values, int8=path in int8, stacked=stacked))
            except (OSError, SpmdError) as error:
                failed.append(error)
        try:
            writer.close()  # which writes the rest
        except OSError as error:
            failed.append(error)
        size = raise_everywhere(finish, ExportError, WHAT)
    finally:
        if writes:
            shutil.rmtree(working, ignore_errors=True)
    return arrays, int(first_nonempty(size))


def _finish(
    target: Path,
    working: Path,
    exported: jax.export.Exported,
    about: dict[str, Any],
    failed: list[Exception],
) -> str:
    """Write the other files of the folder and rename it; returns the bytes of the weights."""
    for error in failed:
        raise error
    about["arrays"] = [dataclasses.asdict(stored) for stored in about["arrays"]]
    with open_output(working / PROGRAM) as file:
        file.write(exported.serialize())
    with open_output(working / ABOUT) as file:
        file.write(json.dumps(about, indent=1).encode())
    # Last, because it has the checksums of all files.
    write_manifest(working)
    # Again: another program may have made it in the meantime.
    check_free(target, ExportError)
    publish(working, target)
    return str((target / WEIGHTS).stat().st_size)


def _state_as_written(
    trainer: Trainer, state: State, forward: Forward, int8: Collection[str]
) -> State:
    """The state with the weights that were written, with the original shardings."""
    placed = trainer.placed
    values = {path: leaf for path, leaf in forward.named if path in int8}

    def as_written(name: str, leaf: Any) -> Any:
        if name not in values:
            return leaf
        exact = to_host(values[name])
        return dequantize(*quantize(exact, stacked=name in forward.stacked), exact.dtype)

    def place(new: Any, old: Any) -> Any:
        if new is old:
            return old
        return place_copy(to_host(new), old.sharding)

    variables = placed.states.variables(state)
    unpacked = map_paths(as_written, {"params": variables.params, "frozen": variables.frozen})
    params = unpacked["params"]
    frozen = unpacked["frozen"]
    if placed.packing is not None:
        params = placed.packing.pack(params)
    if placed.order is not None:
        frozen = placed.order.pack(frozen)
    placed_params = jax.tree.map(place, params, state.params)
    placed_frozen = jax.tree.map(place, frozen, state.frozen)
    return dataclasses.replace(state, params=placed_params, frozen=placed_frozen)
