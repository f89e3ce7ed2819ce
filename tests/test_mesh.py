"""A mesh from a few words, checked against the devices there are."""

import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import spmd
from spmd.errors import MeshError
from spmd.mesh import MeshSpec, make_mesh


@pytest.mark.parametrize(
    "value",
    [
        "data=4,model=2",
        " data = 4 , model=2 ",
        {"data": 4, "model": 2},
        {"data": np.int64(4), "model": 2},
        MeshSpec((("data", 4), ("model", 2))),
    ],
    ids=str,
)
def test_mesh_spec_parse(value):
    spec = MeshSpec.parse(value)
    assert spec.axes == (("data", 4), ("model", 2))
    assert (spec.names, spec.sizes, spec.size, str(spec)) == (
        ("data", "model"),
        {"data": 4, "model": 2},
        8,
        "data=4, model=2",
    )
    assert MeshSpec.parse(str(spec)) == spec


@pytest.mark.parametrize(
    "value, text",
    [
        ("data", 'mesh "data": "data" is not NAME=SIZE.\n    fix: write it like "data=4,model=2".'),
        (
            "data=4,",
            'mesh "data=4,": "" is not NAME=SIZE.\n    fix: write it like "data=4,model=2".',
        ),
        (
            "data=four",
            'mesh "data=four": "data=four" is not NAME=SIZE.\n    fix: write it like '
            '"data=4,model=2".',
        ),
        (
            "4=data",
            'mesh "4=data": "4=data" is not NAME=SIZE.\n    fix: write it like "data=4,model=2".',
        ),
        (
            "a b=4",
            "mesh a b=4: 'a b' is not an axis name.\n    fix: letters, digits and underscores.",
        ),
        (
            "data=2,data=4",
            'mesh data=2, data=4: axis "data" is named twice.\n    fix: every name once.',
        ),
        (
            "data=0",
            'mesh data=0: axis "data" has size 0.\n    fix: a whole number from 1, or one -1.',
        ),
        (
            "data=-2",
            'mesh data=-2: axis "data" has size -2.\n    fix: a whole number from 1, or one -1.',
        ),
        (
            "data=-1,model=-1",
            "mesh data=-1, model=-1: more than one -1.\n    fix: give all sizes but one.",
        ),
        (
            {"data": 2.0},
            'mesh data=2.0: axis "data" has size 2.0.\n    fix: a whole number from 1, or one -1.',
        ),
        (
            {"data": True},
            'mesh data=True: axis "data" has size True.\n    fix: a whole number from 1, or one '
            "-1.",
        ),
        ({3: 4}, "mesh 3=4: 3 is not an axis name.\n    fix: letters, digits and underscores."),
        ({}, 'the mesh has no axes.\n    fix: at least one, such as "data=-1".'),
        (8, 'mesh=8 is an int.\n    fix: write "data=4,model=2", a dict, or a jax Mesh.'),
    ],
)
def test_mesh_spec_parse_invalid(value, text):
    with pytest.raises(MeshError) as caught:
        MeshSpec.parse(value)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    "words, sizes",
    [
        ("data=-1,model=2", (4, 2)),
        ("data=2,model=-1", (2, 4)),
        ("a=2,b=-1,c=2", (2, 2, 2)),
        ("a=8,b=-1", (8, 1)),
    ],
)
def test_minus_one_takes_remaining_devices(words, sizes):
    assert tuple(MeshSpec.parse(words).resolve(8).sizes.values()) == sizes


@pytest.mark.parametrize(
    "words, fix",
    [
        ("a=3,b=-1,c=3", "a=2, b=-1, c=2"),
        ("a=-1,b=16", "a=-1, b=8"),
        ("a=3,b=3", "a=4, b=2"),
        ("a=5", "a=8"),
    ],
)
def test_proposed_mesh_uses_every_device(words, fix):
    with pytest.raises(MeshError) as caught:
        MeshSpec.parse(words).resolve(8)
    assert f'fix: mesh="{fix}"' in str(caught.value)
    assert MeshSpec.parse(fix).resolve(8).size == 8


def test_error_singular_device():
    with pytest.raises(
        MeshError,
        match=r"1 device / 2 leaves 1, so .*\n    fix: mesh=\"data=-1, model=1\"; on a CPU, "
        r"spmd.simulate_devices\(2\)",
    ):
        MeshSpec.parse("data=-1,model=2").resolve(1)
    with pytest.raises(MeshError, match=r"data\(2\) = 2, but there is 1 device\."):
        MeshSpec.parse("data=2").resolve(1)


@pytest.mark.parametrize("words", [None, "data=-1", "data=8", "data=4,model=2", "a=2,b=2,c=2"])
def test_make_mesh_uses_every_device_in_order(words):
    mesh = make_mesh(words)
    assert [device.id for device in mesh.devices.flat] == list(range(8))
    assert mesh.axis_types == (AxisType.Auto,) * len(mesh.axis_names)
    assert MeshSpec.parse(mesh) == MeshSpec.parse(words or "data=8").resolve(8)


def test_make_mesh_with_too_many_devices():
    with pytest.raises(MeshError, match="4 would be left unused"):
        make_mesh("data=4")
    mesh = make_mesh("data=4", devices=jax.devices()[4:])
    assert [device.id for device in mesh.devices.flat] == [4, 5, 6, 7]


def test_make_mesh_returns_jax_mesh():
    mesh = Mesh(
        np.array(jax.devices()).reshape(4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2
    )
    assert make_mesh(mesh) is mesh
    explicit = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    auto = make_mesh(explicit)
    assert auto.axis_types == (AxisType.Auto,) * 2
    assert (auto.devices == explicit.devices).all()


def test_simulate_devices_once():
    spmd.simulate_devices(8)
    assert jax.device_count() == 8
    with pytest.raises(MeshError) as caught:
        spmd.simulate_devices(4)
    assert str(caught.value) == (
        "simulate_devices(4) comes too late: JAX has already started with 8 cpu devices.\n"
        "    fix: call it first, right after `import spmd`; in a notebook, restart the kernel and "
        "run it in the first cell."
    )
    with pytest.raises(MeshError, match="at least one device is needed"):
        spmd.simulate_devices(0)
    assert jax.device_count() == 8


def alone(code):
    """What a fresh Python prints."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.mark.system
def test_simulate_devices_in_fresh_and_started_process():
    assert (
        alone(
            "import spmd, jax; spmd.simulate_devices(3); spmd.simulate_devices(3); "
            "print(jax.device_count())"
        )
        == "3"
    )
    late = (
        "import jax, spmd; jax.devices()\ntry: spmd.simulate_devices(3)\nexcept spmd.SpmdError as "
        "error: print(error)"
    )
    assert alone(late).startswith(
        "simulate_devices(3) comes too late: JAX has already started with 1 cpu device.\n    fix: "
        "call it first"
    )
