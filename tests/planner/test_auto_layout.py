"""`fit(layout="auto")`: the layout that a search finds is printed, kept in the run's folder, and
used again when the run resumes.
"""

import re
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import spmd
from spmd.errors import OptionError
from spmd.planner import auto_layout
from spmd.planner.auto_layout import devices_here
from spmd.planner.calibration import base_target
from spmd.planner.cluster import Cluster
from spmd.planner.structure import names_of
from spmd.planner.target import shipped

ROWS = np.random.default_rng(0).normal(size=(64, 16)).astype("float32")
DATA = {"x": ROWS, "label": (np.arange(64) % 10).astype("int32")}


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up, self.down = nnx.Linear(16, 64, rngs=rngs), nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def fit(layout="auto", **options):
    given = {
        "loss": spmd.losses.cross_entropy,
        "optimizer": optax.adam(1e-2),
        "batch_size": 16,
        "steps": 4,
        "progress": False,
    }
    return spmd.fit(lambda: Net(nnx.Rngs(0)), DATA, layout=layout, **{**given, **options})


@pytest.mark.system
def test_a_run_and_its_resumed_one(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(auto_layout, "COMPILES", 3)
    first = fit(checkpoint=tmp_path)
    layout = first.trainer.layout
    mesh = ",".join(f"{name}={size}" for name, size in layout.mesh)
    (said,) = (record.message for record in caplog.records if "auto" in record.message)
    assert said.replace(", ", ",").startswith(
        f'layout="auto": {layout.name} on {mesh},reduction {layout.gradients.reduction}'
    )
    kept = tmp_path / "layout.toml"
    assert kept.read_text().startswith("# Found by spmd.search for 1x8xcpu: ")
    assert spmd.Layout.load(kept) == first.trainer.layout
    monkeypatch.setattr(
        auto_layout, "search", lambda *given, **options: pytest.fail("searched again")
    )
    again = fit(checkpoint=tmp_path, resume=True, steps=8)
    assert again.trainer.layout == first.trainer.layout and int(again.state.step) == 8
    assert kept.read_text().startswith("# Found by spmd.search for 1x8xcpu: ")
    plain = fit(kept, steps=8)
    np.testing.assert_array_equal(
        first.history["loss"] + again.history["loss"], plain.history["loss"]
    )


def test_a_number_of_microbatches_that_was_found_is_used_again(tmp_path):
    kept = tmp_path / "layout.toml"
    layout = spmd.Layout(name="layout", mesh={"data": 8})
    kept.write_text(
        "# Found by spmd.search for 1x8xcpu: x\n# fit(..., layout=<this file>, batch_size=64, "
        f"accumulate=2)\n\n{layout.to_toml()}"
    )
    options = {"loss": spmd.losses.cross_entropy, "optimizer": optax.adam(1e-2), "saved": kept}
    found = auto_layout.auto_layout(lambda: Net(nnx.Rngs(0)), DATA, **options)
    assert found == (layout, 2, kept.read_text(), f'layout="auto": that of {kept}.')


UNUSED = {
    "other devices": (
        "# Found by spmd.search\n# fit(batch_size=64)\n[mesh]\ndata = 4\n",
        "its mesh is data=4, and here are 8 devices",
    ),
    "other rows": (
        "# Found by spmd.search\n# fit(batch_size=32)\n[mesh]\ndata = 8\n",
        "no search for batches of 64 rows in float32 has written it",
    ),
    "other precision": (
        '# Found by spmd.search\n# fit(batch_size=64, precision="bfloat16")\n[mesh]\ndata = 8\n',
        "no search for batches of 64 rows",
    ),
    "by hand": ("[mesh]\ndata = 8\n", "no search for batches of 64 rows in float32 has written it"),
}


@pytest.mark.parametrize(("text", "why"), UNUSED.values(), ids=UNUSED.keys())
def test_a_file_that_is_not_used_again(tmp_path, monkeypatch, text, why):
    class Searched(Exception):
        pass

    def search(*given, **options):
        raise Searched

    monkeypatch.setattr(auto_layout, "search", search)
    kept, said = tmp_path / "layout.toml", []
    kept.write_text(text)
    options = {
        "loss": spmd.losses.cross_entropy,
        "optimizer": optax.sgd(0.1),
        "saved": kept,
        "say": said.append,
    }
    with pytest.raises(Searched):
        auto_layout.auto_layout(lambda: Net(nnx.Rngs(0)), DATA, **options)
    assert said[0].startswith(f'layout="auto": {kept} is not used, because {why}')


def test_a_file_that_cannot_be_read(tmp_path):
    (tmp_path / "layout.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(spmd.errors.LayoutError, match="is not UTF-8 text"):
        fit(checkpoint=tmp_path, resume=True)


BEFORE = {
    "a mesh": (
        {"mesh": "data=8"},
        r"chooses the mesh as well, and data=8 is given\.\n    fix: leave mesh out, or name a "
        r"layout\.",
    ),
    "microbatches": (
        {"accumulate": 2},
        r"chooses accumulate as well\.\n    fix: leave accumulate out, or name a layout\.",
    ),
    "no number": ({"accumulate": 0}, "accumulate=0"),
    "callbacks": ({"callbacks": [3]}, "callback"),
    "no folder": ({"resume": True}, "resume=True without a checkpoint folder"),
}


@pytest.mark.parametrize(("options", "message"), BEFORE.values(), ids=BEFORE.keys())
def test_errors_before_a_search(monkeypatch, options, message):
    monkeypatch.setattr(auto_layout, "search", lambda *given, **options: pytest.fail("searched"))
    with pytest.raises(spmd.SpmdError, match=message):
        fit(**options)


@pytest.mark.system
def test_a_folder_that_holds_a_run_is_an_error_before_a_search(tmp_path, monkeypatch):
    fit("data_parallel", checkpoint=tmp_path, steps=1)
    monkeypatch.setattr(auto_layout, "search", lambda *given, **options: pytest.fail("searched"))
    with pytest.raises(spmd.errors.CheckpointError, match="already holds a run, up to step 1"):
        fit(checkpoint=tmp_path)


def test_a_mesh_that_is_set_is_named():
    with (
        jax.set_mesh(spmd.make_mesh("data=8")),
        pytest.raises(OptionError, match=r"call fit where no mesh is set with jax\.set_mesh"),
    ):
        fit()


def test_devices_that_no_target_describes(tmp_path, monkeypatch):
    device = type(
        "Device",
        (),
        {"platform": "gpu", "device_kind": "NVIDIA A100-PCIE-40GB", "process_index": 0},
    )
    monkeypatch.setattr(jax, "devices", lambda: [device] * 4)
    with pytest.raises(
        OptionError, match=r"describes NVIDIA A100-PCIE-40GB\.\n    fix: spmd calibrate"
    ) as raised:
        devices_here()
    like, target = re.search(r"--like (\w+) .* --target (\S+) ", raised.value.fix).groups()
    assert like == "a100_40" and base_target(jax.devices(), like).name == like, (
        "calibrate accepts it"
    )
    monkeypatch.chdir(tmp_path)
    Path("here.toml").write_text(shipped()[like].read_text())
    assert Cluster.parse(target).count == 4, "and search what calibrate writes"
    device.platform = "metal"
    with pytest.raises(OptionError, match=r"fix: name a layout\."):
        devices_here()
    device.platform, device.device_kind = "gpu", "NVIDIA H100 80GB HBM3"
    assert str(devices_here()) == "1x4xh100"


@pytest.mark.parametrize(
    "make",
    [
        lambda: spmd.Layout.load("auto"),
        lambda: spmd.Trainer(Net, loss=max, optimizer=optax.sgd(1), layout="auto"),
    ],
)
def test_elsewhere_it_is_no_layout(make):
    with pytest.raises(
        spmd.errors.LayoutError, match=r'layout="auto" is chosen by fit, .*\n    fix: spmd\.search'
    ):
        make()


@pytest.mark.system
def test_a_search_tries_rules_by_path_for_a_model_without_names():
    batch = {key: jax.ShapeDtypeStruct((16, *x.shape[1:]), x.dtype) for key, x in DATA.items()}
    options = {"loss": spmd.losses.cross_entropy, "optimizer": optax.adam(1e-2), "target": "8xcpu"}
    found = spmd.search(lambda: Net(nnx.Rngs(0)), batch, compiles=24, **options)
    tried = {candidate.layout.name for candidate in (*dict(found.plans), *found.rejected)}
    assert {
        "tensor_parallel_by_path",
        "transformer_parallel_by_path",
    } <= tried and "tensor_parallel" not in tried
    assert (
        found.left_out["fsdp_tensor_parallel_by_path"]
        == "every candidate of it is one of a layout with more axes"
    )
    planned = [
        plan
        for candidate, plan in found.plans
        if candidate.layout.name == "tensor_parallel_by_path"
    ]
    assert planned and names_of(planned[0].program)["up/kernel"] == (None, "mlp")
    assert {"data_parallel", "fsdp"} <= {candidate.layout.name for candidate in dict(found.plans)}
    assert found.plans[0][1].period.seconds == min(plan.period.seconds for _, plan in found.plans)
