"""Draw the devices of a mesh, and the shards of an array that they hold."""

import html
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from spmd.errors import OptionError
from spmd.mesh import MeshSpec, make_mesh
from spmd.planner.html_report import array_drawing
from spmd.render.html import Html, framed, table


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
    ids = np.vectorize(lambda device: device.id, otypes=[int])(mesh.devices)
    header = (", ".join(outer), *(f"{inner} {column}" for column in range(ids.shape[-1])))
    body = []
    for place in np.ndindex(ids.shape[:-1]):
        title = ", ".join(f"{axis} {at}" for axis, at in zip(outer, place, strict=True))
        body.append((title, *map(str, ids[place])))
    sizes = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    noun = "device" if mesh.size == 1 else "devices"
    kind = mesh.devices.flat[0].device_kind
    line = html.escape(f"{sizes}: {mesh.size} {noun} of kind {kind}, by number")
    return f'<p>{line}</p><div class="wide">{table(header, body, "mesh")}</div>'
