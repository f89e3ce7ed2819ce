"""`[memory] optimizer = "host"`: moments in pinned memory of the host, with the same bits as on the
devices.
"""

import dataclasses

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import spmd
from spmd.base.tree import flatten
from spmd.errors import LayoutError

pytestmark = pytest.mark.optimized  # two programs are compared to the last bit
ROWS, WIDTH = 16, 16
RNG = np.random.default_rng(0)
DATA = {
    "x": RNG.normal(size=(64, WIDTH)).astype(np.float32),
    "y": RNG.integers(0, 4, 64).astype(np.int32),
}
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


def net():
    rngs = nnx.Rngs(0)
    return nnx.Sequential(nnx.Linear(WIDTH, 24, rngs=rngs), nnx.relu, nnx.Linear(24, 4, rngs=rngs))


def layout_of(name, optimizer, **changes):
    return dataclasses.replace(spmd.Layout.load(name), memory=spmd.Memory(optimizer), **changes)


def trainer_of(layout, **options):
    options = {"mesh": "data=8"} | options
    return spmd.Trainer(
        net, loss=spmd.losses.cross_entropy, optimizer=OPTIMIZER, layout=layout, **options
    )


def kinds(tree):
    return {path: leaf.sharding.memory_kind for path, leaf in flatten(tree).items()}


def leaves(state):
    return {path: np.asarray(leaf) for path, leaf in flatten(jax.device_get(state)).items()}


def equal(one, other):
    one, other = leaves(one), leaves(other)
    assert one.keys() == other.keys()
    for path, value in one.items():
        np.testing.assert_array_equal(value, other[path], err_msg=path)


def train(trainer, steps=3):
    state = trainer.init()
    for number in range(steps):
        state, _ = trainer.step(
            state,
            {name: array[number * ROWS : (number + 1) * ROWS] for name, array in DATA.items()},
        )
    return state


LAYOUTS = {
    "fsdp": {},
    "zero1": {},
    "data_parallel": {"gradients": spmd.Gradients("compiler")},
    "tensor_parallel": {"params": (spmd.Rule("layers/0/kernel", (None, "model")),)},
    "hierarchical_int8": {},
}


@pytest.mark.sampled(system=3)
@pytest.mark.parametrize("name", LAYOUTS)
def test_moments_on_the_host_train_to_the_same_bits(name):
    mesh = {"tensor_parallel": "data=4,model=2", "hierarchical_int8": None}.get(name, "data=8")
    states = {}
    for memory in ("device", "host"):
        trainer = trainer_of(layout_of(name, memory, **LAYOUTS[name]), mesh=mesh)
        states[memory] = train(trainer)
    equal(states["host"], states["device"])
    moments = {
        path: kind
        for path, kind in kinds(states["host"].opt).items()
        if "/mu/" in path or "/nu/" in path
    }
    assert len(moments) == 8 and set(moments.values()) == {"pinned_host"}
    others = kinds(states["host"]).values()
    assert (
        set(kinds(states["device"]).values()) == {"device"}
        and list(others).count("pinned_host") == 8
    )


@pytest.mark.sampled(system=2)
@pytest.mark.parametrize("resident", [False, True])
def test_checkpoints_restore_across_memories(tmp_path, resident):
    def fit(memory, steps, **options):
        layout = layout_of("fsdp", memory)
        data = spmd.data.resident(DATA) if resident else DATA
        return spmd.fit(
            net,
            data,
            loss=spmd.losses.cross_entropy,
            optimizer=OPTIMIZER,
            mesh="data=8",
            layout=layout,
            batch_size=ROWS,
            steps=steps,
            **options,
        )

    through = fit("device", 6)
    for first, second in (("device", "host"), ("host", "device"), ("host", "host")):
        folder = tmp_path / f"{first}-{second}"
        fit(first, 3, checkpoint=spmd.Checkpoint(folder, every=1))
        result = fit(second, 6, checkpoint=folder, resume=True)
        equal(result.state, through.state)
        assert ("pinned_host" in kinds(result.state).values()) == (second == "host")


def test_devices_without_host_memory_are_refused(monkeypatch, golden):
    monkeypatch.setattr("spmd.train.host_memory._memory_kinds", lambda device: {"device"})
    with pytest.raises(LayoutError) as caught:
        trainer_of(layout_of("fsdp", "host")).init()
    golden("memory_of_the_host_is_missing", str(caught.value))


@pytest.mark.system
@pytest.mark.parametrize("name", ["diloco", "parameter_server_async"])
def test_reductions_that_update_on_workers_are_refused(name, golden):
    with pytest.raises(LayoutError) as caught:
        trainer_of(layout_of(name, "host"), mesh=None).init()
    golden(f"memory_of_the_host_under_{name}", str(caught.value))


def test_note_on_cpus():
    trainer = trainer_of(layout_of("fsdp", "host"))
    trainer.prepare({name: array[:ROWS] for name, array in DATA.items()})
    assert (
        "note: [memory] optimizer: on cpu, devices and host have one memory, so nothing is moved."
        in trainer.notes()
    )
