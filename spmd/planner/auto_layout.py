"""`fit(layout="auto")`: the layout that a search finds for the devices that are here."""

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from spmd.data.batches import check_leaves
from spmd.errors import OptionError
from spmd.layout.schema import Layout
from spmd.mesh import MeshSpec
from spmd.planner.layout_search import search
from spmd.planner.search_result import FOUND
from spmd.planner.target import Cluster, cluster_of
from spmd.train.model_setup import check_numbers
from spmd.tree import Tree, abstract

AUTO = "auto"
COMPILES = 12  # programs of a search


class Chosen(NamedTuple):
    """What `layout="auto"` has chosen.

    Attributes:
      text: of a TOML file.
      line: says what was chosen.
    """

    layout: Layout
    accumulate: int
    text: str
    line: str


def devices_here() -> Cluster:
    """The devices of this process as a target.

    Raises:
      OptionError: no target that is shipped describes them.

    Example:
      >>> str(devices_here())
      '1x8xcpu'
    """
    devices = jax.devices()
    cluster = cluster_of(devices)
    if cluster is None:
        fix = 'spmd calibrate --out mine.toml, then spmd search SCRIPT --target 8xmine.toml --save layout.toml, and layout="layout.toml".'
        raise OptionError(f'layout="auto": no target describes {devices[0].device_kind}.', fix=fix)
    return cluster


def check_auto(mesh: Any, precision: str, accumulate: int) -> None:
    """Refuse what `layout="auto"` chooses.

    Raises:
      OptionError: a mesh or a number of microbatches is given, or is none; or there are several processes.
    """
    check_numbers(precision, accumulate)
    if mesh is not None:
        fix = "leave mesh out, or name a layout."
        if isinstance(mesh, Mesh):
            fix = "leave mesh out, call fit where no mesh is set with jax.set_mesh, or name a layout."
        raise OptionError(f'layout="auto" chooses the mesh as well, and {MeshSpec.parse(mesh)} is given.', fix=fix)
    if accumulate != 1:
        raise OptionError('layout="auto" chooses accumulate as well.', fix="leave accumulate out, or name a layout.")
    if jax.process_count() > 1:
        fix = 'spmd search SCRIPT --target 2x8xh100 --save mine.toml, as for your devices, then layout="mine.toml".'
        raise OptionError(f'layout="auto" searches in one process, and here are {jax.process_count()}.', fix=fix)


def auto_layout(
    model: Any,
    sample: Tree,
    *,
    loss: Callable[..., Any],
    optimizer: Any,
    metrics: Mapping[str, Callable[..., Any]] | None = None,
    precision: str = "float32",
    seed: int = 0,
    saved: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Chosen:
    """The layout for the devices that are here, and the number of microbatches.

    Args:
      sample: a batch, or its shapes; the others as of `plan`.
      saved: the file that an earlier run has written. If it is there, and for as many devices, nothing is searched.
      say: called with the lines of the search.

    Raises:
      OptionError: nothing fits, or no target describes the devices.
    """
    here, rows = devices_here(), check_leaves(abstract(sample), "the batch")
    if saved is not None and saved.is_file():
        layout, text = Layout.load(saved), saved.read_text(encoding="utf-8")
        accumulate, why = _accumulate(text, rows, precision), ""
        if accumulate is None:
            why = f"no search for batches of {rows} rows in {precision} has written it"
        elif math.prod(size for _, size in layout.mesh) != here.count:
            why = f"its mesh is {MeshSpec(layout.mesh)}, and here are {here.count} devices"
        else:
            return Chosen(layout, accumulate, text, f'layout="auto": that of {saved}.')
        say(f'layout="auto": {saved} is not used, because {why}.')
    options = {"loss": loss, "optimizer": optimizer, "metrics": metrics, "precision": precision, "seed": seed}
    result = search(model, abstract(sample), target=here, compiles=COMPILES, say=lambda line: say(f'layout="auto": {line}'), **options)
    if result.interrupted:
        raise KeyboardInterrupt
    text, best = result.to_toml(), result.plans[0][0]
    return Chosen(best.layout, best.accumulate, text, f'layout="auto": {best}')


def _accumulate(text: str, rows: int, precision: str) -> int | None:
    """The microbatches that a search's file says, if it is for such a step."""
    if not text.startswith(FOUND):
        return None
    said = dict(re.findall(r"(\w+)=\"?(\w+)\"?", text.split("\n")[1]))
    alike = (said.get("batch_size"), said.get("precision", "float32")) == (str(rows), precision)
    return int(said.get("accumulate", 1)) if alike else None
