"""Which device stands where on a mesh, as a table."""

import html
from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.sharding import Mesh

from spmd.cell import Html, framed, table
from spmd.mesh import MeshSpec, make_mesh


def devices(mesh: "str | Mapping[str, int] | Mesh | MeshSpec | None" = None) -> Html:
    """The devices of a mesh by number, for a notebook's cell: the innermost axis runs to the right, all others down.

    Args:
      mesh: what `spmd.make_mesh` takes, or what it has given.

    Raises:
      MeshError: what `spmd.make_mesh` raises.

    Example:
      >>> shown = devices("data=4,model=2")
      >>> "data=4, model=2: 8 devices" in shown, "<td>data 3</td><td>6</td><td>7</td>" in shown
      (True, True)
    """
    return framed(mesh_table(make_mesh(mesh)))


def mesh_table(mesh: Any) -> str:
    """Sizes and kind of a mesh in a line, and the numbers of its devices below."""
    *outer, inner = mesh.axis_names
    ids = np.vectorize(lambda device: device.id, otypes=[int])(mesh.devices)
    header = (", ".join(outer), *(f"{inner} {column}" for column in range(ids.shape[-1])))
    body = [
        (", ".join(f"{axis} {at}" for axis, at in zip(outer, place, strict=True)), *map(str, ids[place]))
        for place in np.ndindex(ids.shape[:-1])
    ]
    sizes = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    words = f"{sizes}: {mesh.size} device{'s' * (mesh.size != 1)} of kind {mesh.devices.flat[0].device_kind}, by number"
    return f'<p>{html.escape(words)}</p><div class="wide">{table(header, body, "mesh")}</div>'
