"""Layout files: those that come with the library, by name, and those of users, by path."""

import logging
import os
import re
import tomllib
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import TypeVar

from spmd.base.user_paths import as_path
from spmd.errors import (
    LayoutError,
    closest,
    did_you_mean,
    option,
    quoted,
    short_repr,
    type_name,
)
from spmd.layout.schema import Layout
from spmd.layout.toml_reader import loads
from spmd.layout.toml_tables import UNREGISTERED
from spmd.layout.toml_writer import dumps

Made = TypeVar("Made")

# Names that papers and other libraries give to what a shipped layout does, in small letters and
# underscores.
OTHER_NAMES = {
    "dp": "data_parallel",
    "ddp": "data_parallel",
    "distributed_data_parallel": "data_parallel",
    "replicated": "data_parallel",
    "zero_1": "zero1",
    "zero2": "zero1",  # its gradients are reduce-scattered too
    "zero_2": "zero1",
    "zero3": "fsdp",
    "zero_3": "fsdp",
    "fully_sharded": "fsdp",
    "fsdp_transformer": "fsdp",
    "fully_sharded_data_parallel": "fsdp",
    "tp": "tensor_parallel",
    "megatron": "tensor_parallel",
    "sp": "sequence_parallel",
    "cp": "context_parallel",
    "ring_attention": "context_parallel",
    "ep": "expert_parallel",
    "moe": "expert_parallel",
    "pp": "pipeline",
    "pipeline_parallel": "pipeline",
    "gpipe": "pipeline",
    "1f1b": "pipeline_1f1b",
    "ps": "parameter_server",
    "local_sgd": "diloco",
}


def shipped_folder() -> Path:
    """Return the folder of the shipped layouts: inside the installed package, or `layouts/` of a
    source checkout.
    """
    inside = Path(str(resources.files("spmd"))) / "layouts"
    if inside.is_dir():
        return inside
    return Path(__file__).resolve().parents[2] / "layouts"


def shipped() -> dict[str, Path]:
    """Return the layouts that come with the library, by name."""
    return {path.stem: path for path in sorted(shipped_folder().glob("*.toml"))}


def shipped_layout_hint(name: str) -> str:
    """Return a fix for a misspelt name of a shipped layout, which may also be a name in use
    elsewhere.

    >>> shipped_layout_hint("ZeRO-3"), shipped_layout_hint("fdsp")
    ('did you mean "fsdp"?', 'did you mean "fsdp"?')
    """
    plain = re.sub(r"[\s-]+", "_", name.strip().lower())
    return did_you_mean(OTHER_NAMES.get(plain, plain), shipped())


def load(source: str | Path | Layout) -> Layout:
    """Return a checked `Layout`, from a shipped layout's name, a path to a TOML file, or a
    `Layout`.

    Raises:
      LayoutError: no such layout or file, invalid TOML, or unknown keys and values: all problems of
        the file at once, each with its line.
    """
    if isinstance(source, Layout):
        # the same checks as for a file
        loads(dumps(source), f'layout "{source.name}"', written=False)
        return source
    if not isinstance(source, str | Path):
        fix = (
            f"a path to a TOML file, an spmd.Layout, or one of the shipped: {', '.join(shipped())}."
        )
        raise LayoutError(
            f"{option('layout', short_repr(source))} is {type_name(source)}.", fix=fix
        )
    path = shipped().get(str(source)) or as_path(source, "layout")
    if source == "auto":
        raise LayoutError(
            f"{option('layout', quoted('auto'))} is chosen by fit, which knows the batch.",
            fix="spmd.search(model, batch, ...).layout.",
        )
    if path.suffix != ".toml" and not os.path.isfile(path):
        fix = shipped_layout_hint(str(source)).replace(
            "known:", "a path to a TOML file, or one of the shipped:"
        )
        raise LayoutError(
            f'no layout "{source}" is shipped, and no such file exists.', fix=f"{fix}"
        )
    elif not os.path.isfile(path):
        near = None
        if os.path.isdir(path.parent):
            near = closest(path.name, [other.name for other in path.parent.glob("*.toml")])
        if near:
            fix = f'did you mean "{path.parent / near}"?'
        else:
            fix = "check the path; shipped: " + ", ".join(shipped()) + "."
        raise LayoutError(f"layout file {path} does not exist.", fix=fix)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise LayoutError(
            f"{_display(path)} is not UTF-8 text (byte {error.start}).", fix="save it as UTF-8."
        ) from error
    layout = loads(text, _display(path), path.stem)
    _check_complete(text, _display(path))
    return layout


def _check_complete(text: str, where: str) -> None:
    """Refuse the text of a truncated layout file, as far as that can be seen; a layout without any
    table replicates everything.

    A file that ends after a complete line of a table cannot be distinguished from a shorter one.

    Raises:
      LayoutError: it has no table.
    """
    fix = "write or copy the file again; `spmd layouts show data_parallel` prints a complete one."
    if not tomllib.loads(text).keys() - {"description", "use_when"}:
        raise LayoutError(
            f"{where} is empty, or was truncated: it has no table, and would replicate everything.",
            fix=fix,
        )
    if not text.endswith("\n"):
        logging.getLogger("spmd").warning(
            "%s does not end with a line break: if it was truncated, its last line is not "
            "complete.",
            where,
        )


def _display(path: Path) -> str:
    """A shipped file by its short name; a user's file as given."""
    if path.parent == shipped_folder():
        return f"layouts/{path.name}"
    return str(path)


def load_registered(source: str | Path, register: Callable[[], Made]) -> tuple[Layout, Made]:
    """A layout, and what the user's code `register` returns. If the layout names an unknown codec
    or reduction, the code runs first.

    Raises:
      LayoutError: as `load`; before the code runs, if no name is unknown.
    """
    try:
        layout = load(source)
    except LayoutError as error:
        if not any(problem.kind == UNREGISTERED for problem in error.problems):
            raise
        made = register()
        return load(source), made
    return layout, register()
