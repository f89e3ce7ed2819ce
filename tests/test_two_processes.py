"""`fit` in two real processes over loopback equals `fit` in one: nothing assumes that one process sees all.

On two devices it is equal bit for bit: a sum of two numbers has one order. On eight, gloo adds up inside a process first
and then between the two, XLA in one process in another order, so the last bits differ: 1e-6.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

LOCAL = """
[batch]
spec = ["data"]
[gradients]
reduction = "parameter_server"
[parameter_server]
mode = "local"
every = 3
"""

WORKER = """
import json, sys
import jax, numpy as np

rank, processes, devices, port, folder, layout, kind = *map(int, sys.argv[1:4]), *sys.argv[4:]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", devices // processes)
if processes > 1:
    address = f"127.0.0.1:{port}"
    jax.distributed.initialize(address, processes, rank, coordinator_bind_address=address, initialization_timeout=60,
                               heartbeat_timeout_seconds=30, shutdown_timeout_seconds=30)
import optax
from flax import nnx
import spmd

class MLP(nnx.Module):
    def __init__(self, rngs):
        self.hidden, self.norm = nnx.Linear(6, 16, rngs=rngs), nnx.BatchNorm(16, rngs=rngs)
        self.drop, self.out = nnx.Dropout(0.2, rngs=rngs), nnx.Linear(16, 4, rngs=rngs)
    def __call__(self, x):
        return self.out(self.drop(nnx.relu(self.norm(self.hidden(x)))))

random = np.random.default_rng(0)
x, y = random.normal(size=(144, 6)).astype("float32"), random.integers(0, 4, 144).astype("int32")

def batches():  # every process yields its own rows of each global batch
    own = slice(rank * 32 // processes, (rank + 1) * 32 // processes)
    for first in range(0, 128, 32):
        yield {"x": x[first : first + 32][own], "y": y[first : first + 32][own]}

arrays = dict(batch_size=32, data={"x": x, "y": y})  # 144 rows: a short last batch
result = spmd.fit(
    lambda: MLP(nnx.Rngs(0)), **(arrays if kind == "arrays" else dict(data=lambda: batches())),
    loss=spmd.losses.cross_entropy, optimizer=optax.sgd(0.1, momentum=0.9), mesh={"data": devices}, layout=layout, epochs=2,
    eval_data={"x": x[:50], "y": y[:50]}, metrics={"accuracy": spmd.metrics.accuracy}, checkpoint=folder + f"/{processes}",
)
whole = jax.jit(lambda t: t, out_shardings=jax.NamedSharding(result.trainer.mesh, jax.P()))(result.state.params)
if rank == 0:
    flat = {jax.tree_util.keystr(k): np.asarray(v).view(np.uint32).tolist() for k, v in jax.tree_util.tree_leaves_with_path(whole)}
    print("RESULT" + json.dumps({"params": flat, "loss": result.history["loss"], "eval": result.history["eval_loss"],
                                 "cut": [not v.sharding.is_fully_replicated for v in jax.tree.leaves(result.state.params)],
                                 "processes": jax.process_count(), "local": jax.local_device_count()}))
"""


def run(processes, devices, folder, layout, kind):
    """The result that rank 0 printed; every process is reaped, whatever happens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(rank), str(processes), str(devices), str(port), str(folder), layout, kind],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=folder,
        )
        for rank in range(processes)
    ]
    try:
        outputs = [job.communicate(timeout=120) for job in jobs]
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    for job, (_, errors) in zip(jobs, outputs, strict=True):
        assert job.returncode == 0, errors[-3000:]
    return json.loads(outputs[0][0].split("RESULT")[1])


@pytest.mark.parametrize(
    ("layout", "kind", "devices", "tolerance"),
    [
        pytest.param("fsdp", "arrays", 2, 0.0, marks=pytest.mark.slow),  # as in fsdp_bf16, which also rounds
        pytest.param("fsdp", "arrays", 8, 1e-6, marks=pytest.mark.slow),
        pytest.param("data_parallel", "iterable", 2, 0.0, marks=pytest.mark.slow),
        ("fsdp_bf16", "arrays", 2, 0.0),
        pytest.param("parameter_server_async", "arrays", 2, 0.0, marks=pytest.mark.slow),
        pytest.param("parameter_server", "arrays", 2, 0.0, marks=pytest.mark.slow),
        pytest.param(LOCAL, "iterable", 8, 1e-6, marks=pytest.mark.slow),
    ],
)
def test_two_processes_equal_one(tmp_path, layout, kind, devices, tolerance):
    if layout == LOCAL:
        (tmp_path / "local.toml").write_text(layout)
        layout = str(tmp_path / "local.toml")
    one, two = (run(processes, devices, tmp_path, layout, kind) for processes in (1, 2))
    assert (one["processes"], one["local"], two["processes"], two["local"]) == (1, devices, 2, devices // 2)
    assert any(two["cut"]) == (layout not in ("data_parallel",))
    assert len(two["loss"]) >= (10 if kind == "arrays" else 8)
    for name in ("loss", "eval"):
        np.testing.assert_allclose(two[name], one[name], rtol=tolerance, atol=0)
    for path, bits in one["params"].items():
        ours, theirs = (np.array(b, np.uint32).view(np.float32) for b in (two["params"][path], bits))
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance * 10, err_msg=path)
    steps = sorted(int(path.name) for path in (tmp_path / "2" / "checkpoints").iterdir() if path.name.isdigit())
    assert steps[-1] == len(two["loss"]), "both processes wrote their part of the last checkpoint"
