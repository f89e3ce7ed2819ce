"""Checkpoints of runs in which some parameters are not trained: resumed, and restored onto other
meshes.
"""

import dataclasses
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import spmd
from spmd.base.tree import flatten
from spmd.errors import CheckpointError
from spmd.layout.trained import Adapter
from spmd.train.choose_frozen import check_same_trained
from tests.train.test_frozen import ADAPTERS, LAYOUTS, Net, Train, batch, loss

KEPT = {"int8": Train(frozen="int8", block=4), "the dtype given": Train()}
CHILD = """
import hashlib, os, signal, sys
import spmd
spmd.simulate_devices(8)
from tests.run.test_frozen_checkpoint import bits, fit

class Kill(spmd.callbacks.Callback):
    def on_step(self, info):
        if info.step == 5 and what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)

folder, what = sys.argv[1:]
result = fit("fsdp", 8, checkpoint=spmd.Checkpoint(folder, every=2), resume=what == "resume", callbacks=[Kill()])
print(hashlib.sha256(b"".join(leaf.tobytes() for leaf in bits(result).values())).hexdigest())
"""  # noqa: E501


def fit(name, steps, kept="int8", **options):
    chosen = LAYOUTS[name]
    layout = dataclasses.replace(chosen["layout"], train=KEPT[kept], adapters=ADAPTERS)
    data = {key: np.concatenate([batch(number)[key] for number in range(4)]) for key in ("x", "y")}
    how = {
        "loss": loss,
        "optimizer": optax.adam(1e-2),
        "mesh": chosen["mesh"],
        "layout": layout,
        "batch_size": 16,
    }
    return spmd.fit(lambda: Net(), data, steps=steps, **how, **options)


def bits(result):
    state = result.trainer.placed.states.variables(result.state)
    return {
        path: np.asarray(leaf)
        for path, leaf in flatten(jax.device_get((state.params, state.frozen))).items()
    }


def assert_equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    for path, value in ours.items():
        np.testing.assert_array_equal(value, theirs[path], err_msg=path)


@pytest.mark.system
@pytest.mark.parametrize("kept", KEPT)
def test_resumed_run_ends_bit_equal(kept, tmp_path):
    fit("fsdp", 3, kept, checkpoint=tmp_path)
    resumed, straight = fit("fsdp", 6, kept, checkpoint=tmp_path, resume=True), fit("fsdp", 6, kept)
    assert_equal(bits(resumed), bits(straight))
    assert_equal(
        dict(flatten(jax.device_get(resumed.state.opt))),
        dict(flatten(jax.device_get(straight.state.opt))),
    )


@pytest.mark.system
@pytest.mark.parametrize("name", ["one device", "circular", "tensor parallel"])
def test_restore_onto_another_mesh(name, tmp_path):
    saved = fit("fsdp", 2, checkpoint=tmp_path)
    restored = fit(name, 2, checkpoint=tmp_path, resume=True)
    assert_equal(bits(restored), bits(saved))
    back = fit("fsdp", 2, checkpoint=tmp_path, resume=True)
    assert_equal(bits(back), bits(saved))
    assert np.isfinite(fit(name, 3, checkpoint=tmp_path, resume=True).history["loss"][-1])


@pytest.mark.system
def test_restore_from_the_order_of_a_circular_pipeline(tmp_path):
    saved = fit("circular", 2, "the dtype given", checkpoint=tmp_path)
    restored = fit("fsdp", 2, "the dtype given", checkpoint=tmp_path, resume=True)
    assert_equal(bits(restored), bits(saved))
    kernels = (
        saved.state.frozen["stack"]["layers"]["kernel"],
        restored.state.frozen["stack"]["layers"]["kernel"],
    )
    assert not np.array_equal(*kernels)  # stored in another order


@pytest.mark.system
def test_only_parameters(tmp_path):
    saved = fit("fsdp", 2, checkpoint=tmp_path)
    state = saved.trainer.restore(tmp_path, only="params")
    assert int(state.step) == 0
    assert_equal(
        dict(flatten(jax.device_get(state.frozen))),
        dict(flatten(jax.device_get(saved.state.frozen))),
    )


@pytest.mark.system
def test_another_choice_of_what_trains_does_not_fit(golden, tmp_path):
    fit("fsdp", 1, "the dtype given", checkpoint=tmp_path)
    with pytest.raises(CheckpointError) as caught:
        fit("fsdp", 2, "int8", checkpoint=tmp_path, resume=True)
    golden("frozen_in_another_way", str(caught.value).replace(str(tmp_path), "RUN"))


def test_another_scale_of_adapters_does_not_fit():
    saved = spmd.Layout(adapters=(Adapter("up", rank=4, alpha=8.0), Adapter("down")))
    check_same_trained(saved, dataclasses.replace(saved, name="another"), 3)
    changed = dataclasses.replace(
        saved, adapters=(Adapter("up", rank=4, alpha=32.0, rslora=True), Adapter("down"))
    )
    with pytest.raises(
        CheckpointError, match=r"rule 1\n +alpha was 8.0, is 32.0\n +rslora was False, is True"
    ):
        check_same_trained(saved, changed, 3)
    with pytest.raises(CheckpointError, match="saved 2, now 1"):
        check_same_trained(saved, dataclasses.replace(saved, adapters=saved.adapters[:1]), 3)


@pytest.mark.system
def test_killed_run_resumes_bit_equal(tmp_path):
    def run(folder, what):
        command = [sys.executable, "-c", CHILD, str(tmp_path / folder), what]
        return subprocess.run(
            command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300
        )

    assert run("killed", "kill").returncode == -9
    resumed, straight = run("killed", "resume"), run("straight", "train")
    assert resumed.returncode == straight.returncode == 0, resumed.stderr + straight.stderr
    assert resumed.stdout.split()[-1] == straight.stdout.split()[-1]
