"""`fit(layout="auto")`: the layout that a search finds for the devices that are here."""

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from spmd.errors import OptionError
from spmd.layout.schema import Layout
from spmd.layout.toml_reader import loads
from spmd.planner.layout_search import search
from spmd.planner.search_result import FOUND
from spmd.planner.target import Cluster, load, of_device
from spmd.tree import Tree, abstract

AUTO = "auto"
COMPILES = 12  # programs of a search
_ACCUMULATE = re.compile(r"# fit\(.*\baccumulate=(\d+)")


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
    target = load("cpu") if devices[0].platform == "cpu" else of_device(devices[0].device_kind)
    if target is None:
        fix = 'spmd calibrate --save mine.toml, then spmd search SCRIPT --target mine.toml --save layout.toml, and layout="layout.toml".'
        raise OptionError(f'layout="auto": no target describes {devices[0].device_kind}.', fix=fix)
    return Cluster(1, len(devices), target)


def check_auto(mesh: Any, accumulate: int) -> None:
    """Refuse what `layout="auto"` chooses.

    Raises:
      OptionError: a mesh or a number of microbatches is given; or there are several processes.
    """
    given = {"mesh": mesh is not None, "accumulate": accumulate != 1}
    for name, was in given.items():
        if was:
            raise OptionError(f'layout="auto" chooses {name} as well.', fix=f"leave {name} out, or name a layout.")
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
    here = devices_here()
    if saved is not None and saved.is_file():
        text = saved.read_text(encoding="utf-8")
        layout = loads(text, str(saved), saved.stem)
        if text.startswith(FOUND) and math.prod(size for _, size in layout.mesh) == here.count:
            found = _ACCUMULATE.search(text)
            return Chosen(layout, int(found.group(1)) if found else 1, text, f'layout="auto": that of {saved}.')
    options = {"loss": loss, "optimizer": optimizer, "metrics": metrics, "precision": precision, "seed": seed}
    result = search(model, abstract(sample), target=here, compiles=COMPILES, say=lambda line: say(f'layout="auto": {line}'), **options)
    text, best = result.to_toml(), result.plans[0][0]
    return Chosen(best.layout, best.accumulate, text, f'layout="auto": {best}')
