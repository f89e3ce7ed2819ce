"""`fit(layout="auto")`: the layout that a search finds for the devices that are here."""

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from spmd.base.tree import Tree, abstract
from spmd.data.batches import check_leaves
from spmd.distributed.consistency import from_first_process
from spmd.errors import OptionError
from spmd.layout.schema import Layout
from spmd.layout.toml_reader import loads
from spmd.mesh import MeshSpec
from spmd.planner.cluster import Cluster, cluster_of, nearest_cluster
from spmd.planner.layout_search import search
from spmd.planner.search_result import FOUND
from spmd.train.model_setup import check_numbers

AUTO = "auto"
COMPILES = 12  # programs of a search


class Chosen(NamedTuple):
    """The choice of `layout="auto"`.

    Attributes:
      text: of a TOML file.
      line: says what was chosen.
    """

    layout: Layout
    accumulate: int
    text: str
    line: str


def devices_here() -> Cluster:
    """Return the devices of all processes as a target.

    Raises:
      OptionError: no target that is shipped describes them.

    Example:
      >>> str(devices_here())
      '1x8xcpu'
    """
    devices = jax.devices()
    cluster = cluster_of(devices)
    if cluster is None:
        near, fix = nearest_cluster(devices), "name a layout."
        if near is not None:
            like, here = near.target.name, f"{near.nodes}x{near.devices}xhere.toml"
            search = f'spmd search SCRIPT --target {here} --save mine.toml, and layout="mine.toml"'
            fix = (
                f"spmd calibrate --out here.toml --like {like} ({near.target.title} has the "
                f"nearest name), then {search}; or {fix}"
            )
        raise OptionError(
            f'layout="auto": no target that is shipped describes {devices[0].device_kind}.', fix=fix
        )
    return cluster


def check_auto(mesh: Any, precision: str, accumulate: int) -> None:
    """Refuse what `layout="auto"` chooses.

    Raises:
      OptionError: a mesh or a number of microbatches is given, or is none.
    """
    check_numbers(precision, accumulate)
    if mesh is not None:
        fix = "leave mesh out, or name a layout."
        if isinstance(mesh, Mesh):
            fix = (
                "leave mesh out, call fit where no mesh is set with jax.set_mesh, or name a layout."
            )
        raise OptionError(
            f'layout="auto" chooses the mesh as well, and {MeshSpec.parse(mesh)} is given.', fix=fix
        )
    if accumulate != 1:
        raise OptionError(
            'layout="auto" chooses accumulate as well.',
            fix="leave accumulate out, or name a layout.",
        )


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
    """Return the layout for the devices that are here, and the number of microbatches. Process 0
    searches, and all processes get the same.

    Args:
      sample: a batch, or its shapes; the others as of `plan`.
      saved: the file that an earlier run has written. If it is there, and for as many devices,
        nothing is searched.
      say: called with the lines of the search, in process 0.

    Raises:
      OptionError: nothing fits, or no target describes the devices.
      SpmdError: what `search` raises; in all processes, with the same text.
      RendezvousTimeout: process 0 compiles nothing new for half an hour.
    """
    options = {
        "loss": loss,
        "optimizer": optimizer,
        "metrics": metrics,
        "precision": precision,
        "seed": seed,
    }

    def choose(report: Callable[[], None]) -> str:
        def say_and_report(line: str) -> None:
            report()
            say(line)

        chosen = _choose(model, sample, saved, say_and_report, **options)
        # As text: processes share strings, in the key-value store of JAX's coordination service.
        return json.dumps([chosen.layout.name, *chosen[1:]])

    name, accumulate, text, line = json.loads(
        from_first_process(choose, 'it searches for a layout (layout="auto")')
    )
    return Chosen(loads(text, 'layout="auto"', name), accumulate, text, line)


def _choose(
    model: Any, sample: Tree, saved: Path | None, say: Callable[[str], None], **options: Any
) -> Chosen:
    """Choose what was saved, if it is for such a step on as many devices; else what a search
    finds.
    """
    here, precision = devices_here(), options["precision"]
    rows = check_leaves(abstract(sample), "the batch")
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
    result = search(
        model,
        abstract(sample),
        target=here,
        compiles=COMPILES,
        say=lambda line: say(f'layout="auto": {line}'),
        **options,
    )
    # A search keeps what it has found until Ctrl-C; a run ends there.
    if result.interrupted:
        raise KeyboardInterrupt
    text, best = result.to_toml(), result.plans[0][0]
    return Chosen(best.layout, best.accumulate, text, f'layout="auto": {best}')


def _accumulate(text: str, rows: int, precision: str) -> int | None:
    """Return the microbatches that a search's file says, if it is for such a step."""
    if not text.startswith(FOUND):
        return None
    _, comment, *_ = text.split("\n")
    arguments = dict(re.findall(r"(\w+)=\"?(\w+)\"?", comment))
    if arguments.get("batch_size") != str(rows):
        return None
    if arguments.get("precision", "float32") != precision:
        return None
    return int(arguments.get("accumulate", 1))
