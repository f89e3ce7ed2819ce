"""Drawings of what devices hold: the filled part of each square is the shard that the device really
has.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmd
from spmd import viz
from spmd.errors import MeshError, OptionError
from spmd.mesh import MeshSpec, make_mesh
from spmd.viz.collectives import KINDS, blocks
from spmd.viz.device_map import GAP, LABEL, SIDE


def model():
    return spmd.FunctionalModel(
        lambda key: {"up": jnp.zeros((16, 32)), "bias": jnp.zeros(8)},
        lambda params, x: x @ params["up"],
    )


def squares(drawing):
    """Of each row, for each device: its filled rectangles as shares of the square, and their
    colour.
    """
    shape = r'x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)"'
    outlines = [
        [float(number) for number in found]
        for found in re.findall(rf"<rect {shape} fill=.var\(--soft\)", drawing)
    ]
    boxes = [
        (*map(float, found[:4]), found[4])
        for found in re.findall(rf"<rect {shape} fill=.var\(--([a-k])\)", drawing)
    ]
    rows = {}
    for left, top, width, height in outlines:
        device, inside = round((left - LABEL) / SIDE), width
        filled = [
            (
                *(
                    round(share, 4)
                    for share in ((x - left) / inside, (y - top) / height, w / inside, h / height)
                ),
                colour,
            )
            for x, y, w, h, colour in boxes
            if left <= x < left + SIDE - GAP + 0.1 and top <= y < top + height
        ]
        rows.setdefault(top, {})[device] = filled
    return [row for _, row in sorted(rows.items())]


@pytest.mark.parametrize(
    "layout, mesh",
    [
        ("fsdp", "data=8"),
        ("data_parallel", "data=8"),
        ("zero1", "data=4"),
        ("mine", "data=2,model=4"),
    ],
)
def test_a_square_is_filled_where_the_device_has_a_shard(layout, mesh):
    if layout == "mine":
        layout = spmd.Layout(
            params=(spmd.Rule("up", ("data", "model")),), default=spmd.Default("replicate")
        )
    parameter, moments, batch = squares(viz.shards(model(), layout, mesh=mesh, parameter="up"))
    count = MeshSpec.parse(mesh).size
    devices = make_mesh(mesh, devices=jax.devices()[:count])
    options = {"loss": spmd.losses.mean_squared_error, "optimizer": optax.adam(1e-3)}
    trainer = spmd.Trainer(model(), layout=layout, mesh=devices, **options)
    state = trainer.init()
    for row, array in ((parameter, state.params["up"]), (moments, state.opt[0].mu["up"])):
        assert len(row) == count
        for shard in array.addressable_shards:
            (rows, columns), (height, width) = shard.index, array.shape
            place = (
                (columns.start or 0) / width,
                (rows.start or 0) / height,
                shard.data.shape[1] / width,
                shard.data.shape[0] / height,
            )
            drawn = [pytest.approx(place, abs=0.003)]  # SVG rounds to 0.1, of squares of 24
            assert [found[:4] for found in row[shard.device.id]] == drawn
        same = {shard.device.id: str(shard.index) for shard in array.addressable_shards}
        assert all(
            (row[a][0][4] == row[b][0][4]) == (same[a] == same[b]) for a in same for b in same
        )
    assert len({str(found) for found in batch.values()}) == trainer.resolved.workers


def test_copies_of_workers_are_drawn_beside_the_shards_of_servers():
    own, servers, moments, _ = squares(viz.shards(model(), "diloco", mesh="data=4", parameter="up"))
    assert all(row[device][0][:4] == (0, 0, 1, 1) for row in (own, moments) for device in range(4))
    assert len({row[0][4] for row in own.values()}) == 4 and servers[1][0][3] == 0.25


def test_what_is_not_drawn_is_said():
    assert "48 more devices are not drawn" in viz.shards(model(), mesh="data=64", parameter="up")
    assert viz.shards(model(), "fsdp", devices=4) == viz.shards(model(), "fsdp", mesh="data=4")


def test_a_wrong_parameter_or_mesh_is_an_error():
    with pytest.raises(OptionError, match='no parameter "upp"'):
        viz.shards(model(), parameter="upp")
    with pytest.raises(MeshError):
        viz.shards(model(), mesh="data=-1,model=3")


def _on_devices(kind, before):
    """The same by jax's collectives on simulated devices."""
    n = len(before)
    mesh = make_mesh({"d": n}, devices=jax.devices()[:n])
    run = {
        "all_reduce": lambda x: jax.lax.psum(x, "d"),
        "reduce_scatter": lambda x: jax.lax.psum_scatter(x, "d", tiled=True),
        "all_gather": lambda x: jax.lax.all_gather(x, "d", tiled=True),
        "all_to_all": lambda x: jax.lax.all_to_all(x, "d", 0, 0, tiled=True),
        "ring": lambda x: jax.lax.ppermute(x, "d", [(at, (at + 1) % n) for at in range(n)]),
    }[kind]
    spec = jax.P("d")
    mapped = jax.shard_map(
        lambda x: run(x[0])[None], mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    return np.asarray(mapped(before.astype("int32")))


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("kind", KINDS)
def test_a_collective_leaves_what_is_drawn(kind):
    before, after = blocks(kind, 4)
    sent = before.sum(axis=1, keepdims=True) if kind == "all_gather" else before  # a shard each
    left = _on_devices(kind, sent)
    shown = after.sum(axis=1, keepdims=True) if kind == "reduce_scatter" else after
    np.testing.assert_array_equal(left, shown)
    drawing = viz.collective(kind)
    assert all(
        f"device {device}, after: {number}" in drawing
        for device in range(4)
        for number in after[device]
        if number
    )


def test_a_collective_that_is_not_drawn_is_an_error():
    with pytest.raises(OptionError, match='did you mean "all_reduce"'):
        viz.collective("all_reduced")
    with pytest.raises(OptionError, match="devices=9"):
        viz.collective("ring", devices=9)
