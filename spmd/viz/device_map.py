"""Draw the devices of a mesh, and the shards that they hold: of one array, or of all under a
layout.
"""

import dataclasses
import html
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spmd.base.tree import Tree, describe, flatten
from spmd.errors import OptionError, did_you_mean
from spmd.layout.layout_files import load
from spmd.layout.schema import Layout
from spmd.mesh import MeshSpec, abstract_mesh, make_mesh
from spmd.planner.html_report import array_drawing, shards_of
from spmd.render.html import Html, framed, table
from spmd.render.svg import SERIES, box, caption, frame, svg
from spmd.train.model_setup import PlacedModel, TrainConfig

DRAWN = 16  # at most this many devices are drawn
LABEL, SIDE, GAP = 78, 27, 3  # widths of labels and of a device's square, in SVG units
LINES = 4  # at most this many of a shard's parts along one dim are drawn


def devices(mesh: "str | Mapping[str, int] | Mesh | MeshSpec | None" = None) -> Html:
    """Draw the devices of a mesh by id, for a notebook's cell: the innermost axis horizontally, all
    others vertically.

    Args:
      mesh: a mesh, or an argument of `spmd.make_mesh`.

    Returns:
      HTML, which a notebook shows.

    Raises:
      MeshError: as `spmd.make_mesh`.

    Example:
      >>> shown = devices("data=4,model=2")
      >>> (
      ...     "data=4, model=2: 8 devices" in shown,
      ...     '<td>data 3</td><td class="number">6</td><td class="number">7</td>' in shown,
      ... )
      (True, True)
    """
    return framed(mesh_table(make_mesh(mesh)))


def pieces(array: jax.Array, name: str = "") -> Html:
    """Draw the shards of an array, for a notebook's cell: a rectangle for each shard with the ids
    of the devices that hold it.

    Args:
      array: on a mesh, such as one of `result.state.params`; the last dim is drawn horizontally,
        all others vertically.
      name: shown before its shape.

    Returns:
      HTML, which a notebook shows.

    Raises:
      OptionError: the array is not on a mesh.

    Example:
      >>> import jax, spmd
      >>> from jax.sharding import NamedSharding, PartitionSpec
      >>> array = jax.device_put(
      ...     np.zeros((8, 4), "f"),
      ...     NamedSharding(spmd.make_mesh("data=4,model=2"), PartitionSpec("model")),
      ... )
      >>> "float32[8, 4], spec " in pieces(array), "[0:4, :] on devices 0, 2, 4, 6" in pieces(array)
      (True, True)
    """
    if not isinstance(getattr(array, "sharding", None), NamedSharding):
        raise OptionError(
            "pieces of an array that is not on a mesh.",
            fix="an array placed by spmd, such as one of result.state.params.",
        )
    return array_drawing(name, array)


def mesh_table(mesh: Any) -> str:
    """Return a line with the sizes and device kind of a mesh, and a table of its device ids."""
    *outer, inner = mesh.axis_names
    # Without otypes numpy calls the function once more, to learn the type.
    ids = np.vectorize(lambda device: device.id, otypes=[int])(mesh.devices)
    *outer_shape, columns = ids.shape
    header = [", ".join(outer)]
    for column in range(columns):
        header.append(f"{inner} {column}")
    body = []
    for place in np.ndindex(*outer_shape):
        positions = zip(outer, place, strict=True)
        title = ", ".join(f"{axis} {at}" for axis, at in positions)
        body.append((title, *map(str, ids[place])))
    sizes = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    noun = "devices"
    if mesh.size == 1:
        noun = "device"
    kind = mesh.devices.flat[0].device_kind
    line = html.escape(f"{sizes}: {mesh.size} {noun} of kind {kind}, by number")
    ids_table = table(header, body, "mesh")
    return f'<p>{line}</p><div class="wide">{ids_table}</div>'


def shards(
    model: Any,
    layout: str | Path | Layout = "data_parallel",
    *,
    mesh: str | Mapping[str, int] | MeshSpec | None = None,
    devices: int = 8,
    optimizer: Any = None,
    parameter: str | None = None,
    batch: Tree | None = None,
) -> Html:
    """Draw the shards that each device of a mesh holds, for a notebook's cell: one column for each
    device, and one row for each array.

    A square is the array, and its filled part is the device's shard. The same colour is the same
    shard, so an array of one colour is replicated. The last dim is drawn horizontally, all
    others vertically. Nothing is allocated, and the devices need not be there.

    Args:
      model: as `fit` takes it.
      layout: as `fit` takes it.
      mesh: None: the layout's.
      devices: of the mesh, if one of its sizes is -1.
      optimizer: whose state is drawn; None: Adam.
      parameter: the path of the one to draw; None: the largest.
      batch: arrays or their shapes, of which the first is drawn; None: one that has the dims that
        the layout shards.

    Returns:
      HTML, which a notebook shows.

    Raises:
      LayoutError: the layout does not fit the model or the mesh.
      MeshError: the sizes of the mesh do not multiply to `devices`.
      OptionError: there is no such parameter.

    Example:
      >>> import spmd
      >>> import jax.numpy as jnp
      >>> model = spmd.FunctionalModel(
      ...     lambda key: {"w": jnp.zeros((64, 8))}, lambda params, x: x @ params["w"]
      ... )
      >>> shown = shards(model, "zero1", mesh="data=4")
      >>> "w: replicated" in shown, "moments: 0 of 4 shards" in shown
      (True, True)
    """
    declared = load(layout)
    if mesh is None:
        mesh = dict(declared.mesh) or {"data": -1}
    sizes = MeshSpec.parse(mesh)
    if -1 in sizes.sizes.values():
        sizes = sizes.resolve(devices)
    config = TrainConfig(model, _no_loss, optimizer or optax.adam(1e-3))
    placed = PlacedModel(config, abstract_mesh(sizes), declared)
    arrays = _arrays(placed, parameter, batch)
    return framed(_drawing(arrays, sizes, f"{declared.name} on {sizes}"))


def _no_loss(model: Any, batch: Any) -> Any:
    """A loss that is never called, since nothing is computed."""
    raise AssertionError


@dataclasses.dataclass(frozen=True)
class _Row:
    """An array to draw.

    Attributes:
      title: its name.
      leaf: the array, or its shape, with a sharding.
      by_worker: True if dim 0 is that of the workers, each of which has an array of its own.
    """

    title: str
    leaf: Any
    by_worker: bool = False


def _arrays(placed: PlacedModel, parameter: str | None, batch: Tree | None) -> dict[str, _Row]:
    """Return the arrays to draw, by the label of their row."""
    state = placed.abstract_state
    places = placed.resolved.placements
    if parameter is not None and parameter not in places:
        raise OptionError(
            f'shards: there is no parameter "{parameter}".', fix=did_you_mean(parameter, places)
        )

    def matrices_by_size(name: str) -> tuple[bool, int]:
        place = places[name]
        return len(place.shape) > 1, place.nbytes

    path = parameter or max(places, key=matrices_by_size)
    param = flatten(state.params)[path]
    arrays = {"parameter": _Row(path, param)}
    exchanged = flatten(state.exchange.get(path, {}))
    for kind, leaf in exchanged.items():
        # servers have the parameters, and each worker trains a copy or has received one
        if kind in ("own", "held"):
            of_workers = _Row(f"{path}, each worker's", leaf, by_worker=True)
            of_servers = _Row(f"{path}, the servers'", param)
            arrays = {"worker's": of_workers, "servers'": of_servers}
    for name, leaf in flatten(state.opt).items():
        if name.endswith(f"/{path}") and leaf.ndim >= param.ndim:
            by_worker = leaf.ndim > param.ndim
            arrays["moments"] = _Row("moments", leaf, by_worker=by_worker)
            break
    if batch is None:
        name = "batch"
        spec = placed.resolved.batch_spec(name)
        size = 8 * MeshSpec.parse(placed.mesh).size
        shape = (size,) * max(2, len(spec))
    else:
        name, leaf = next(iter(flatten(batch).items()))
        spec = placed.resolved.batch_spec(name)
        shape = leaf.shape
    sharded_dims = [dim for dim, entry in enumerate(spec) if entry]
    last = max(sharded_dims, default=0)
    shown_shape = shape[: max(2, last + 1)]
    sharding = NamedSharding(placed.mesh, PartitionSpec(*spec))
    rows = jax.ShapeDtypeStruct(shown_shape, "float32", sharding=sharding)
    return arrays | {"batch": _Row(name, rows)}


def _drawing(arrays: Mapping[str, _Row], mesh: MeshSpec, label: str) -> str:
    """Return the SVG of the positions of devices along each axis, and of the arrays below."""
    count = min(mesh.size, DRAWN)
    parts = []
    top = 0.0
    inner = mesh.size
    for axis, size in mesh.axes:
        inner //= size
        if size == 1:
            continue
        parts.append(caption(0, top + 11, axis))
        for first in range(0, count, inner):
            end = min(first + inner, count)
            left = LABEL + first * SIDE
            right = LABEL + end * SIDE - GAP
            position = first // inner % size
            middle = (left + right) / 2
            parts.append(f'<path d="M{left} {top + 14.5}H{right}" stroke="var(--line)"/>')
            parts.append(caption(middle, top + 11, str(position), "middle"))
        top += 18
    top += 3
    for name, row in arrays.items():
        parts.append(caption(0, top + SIDE / 2 + 2, name))
        described = describe(row.leaf)
        side = SIDE - GAP
        # a colour stands for another shard again if there are more shards than colours
        for device, (number, shown, filled) in enumerate(_shards_of_devices(row)[:count]):
            left = LABEL + device * SIDE
            title = f"{row.title}: {shown}"
            tip = f"device {device}, {title} of {described}"
            parts.append(frame(left, top, side, side, tip))
            colour = SERIES[number % len(SERIES)]
            for rectangle in filled:
                x, y, width, height = (side * share for share in rectangle)
                parts.append(box(left + x, top + y, width, height, colour, title))
        top += SIDE + 2
    if count < mesh.size:
        left_out = mesh.size - count
        parts.append(caption(0, top + 12, f"{left_out} more devices are not drawn"))
        top += 18
    width = LABEL + count * SIDE
    return svg(top, parts, f"{label}: what each device holds", width=width)


def _shards_of_devices(row: _Row) -> list[tuple[int, str, list[tuple[float, ...]]]]:
    """Return for each device the number of its shard, a description of the shard, and the shard's
    parts of a unit square.
    """
    holders = shards_of(row.leaf)
    counts = [1 + max(indices) for indices in zip(*holders, strict=True)]
    skipped = int(row.by_worker)
    shape = row.leaf.shape[skipped:]
    shards_per_dim = counts[skipped:]
    by_device = {}
    for number, (index, devices) in enumerate(sorted(holders.items())):
        shown = f"{number} of {len(holders)} shards"
        if len(holders) == 1:
            shown = "replicated"
        filled = _filled(shape, shards_per_dim, index[skipped:])
        by_device |= dict.fromkeys(devices, (number, shown, filled))
    return [by_device[device] for device in sorted(by_device)]


def _filled(
    shape: Sequence[int], counts: Sequence[int], index: Sequence[int]
) -> list[tuple[float, ...]]:
    """Return the parts of a unit square that are a shard: left, top, width and height of each.

    >>> _filled((4, 8), (2, 1), (1, 0))
    [(0.0, 0.5, 1.0, 0.5)]
    """
    if not shape:
        return [(0.0, 0.0, 1.0, 1.0)]
    *upper, last = zip(index, counts, shape, strict=True)
    intervals = [(0.0, 1.0)]
    for position, count, size in reversed(upper):
        top = position / count
        if intervals == [(0.0, 1.0)]:
            intervals = [(top, 1 / count)]
            continue
        lines = min(size // count, LINES)
        each = 1 / count / lines
        inner_intervals = intervals
        intervals = []
        for line, (begin, height) in itertools.product(range(lines), inner_intervals):
            intervals.append((top + (line + begin) * each, height * each))
    position, count, _ = last
    left = position / count
    width = 1 / count
    return [(left, begin, width, height) for begin, height in intervals]
