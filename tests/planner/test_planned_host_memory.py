"""Plans of steps that keep arrays in the host's memory: bytes on either side, and time on the
host's link.
"""

import dataclasses
import importlib.util
import json

import jax
import optax
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import spmd
from spmd.mesh import MeshSpec
from spmd.planner.cluster import Cluster
from spmd.planner.cost import host_bytes
from spmd.planner.hlo import arrays_of, parse
from spmd.planner.timeline import timeline_of

MIB = 2**20
H100 = Cluster.parse("1xh100")
LINK = H100.target.host_bandwidth * H100.target.achieved.link

PROGRAM = """HloModule m, num_partitions=1

ENTRY %main (a: f32[6,1024,256], b: f32[1024,256]) -> f32[1024,256] {
  %stack = f32[6,1024,256]{2,1,0:T(8)S(5)} parameter(0)
  %b = f32[1024,256]{1,0} parameter(1)
  %n = s32[] constant(2)
  %slice-start = ((f32[6,1024,256]{2,1,0:S(5)}, s32[]), f32[1,1024,256]{2,1,0}, u32[]) fusion-start(%stack, %n), kind=kCustom
  %slice-done = f32[1,1024,256]{2,1,0} fusion-done(%slice-start)
  %out-start = (f32[1024,256]{1,0:S(5)}, f32[1024,256]{1,0}, u32[]) copy-start(%b)
  %out-done = f32[1024,256]{1,0:S(5)} copy-done(%out-start)
  %inside-start = (f32[1024,256]{1,0}, f32[1024,256]{1,0}, u32[]) copy-start(%b)
  %inside-done = f32[1024,256]{1,0} copy-done(%inside-start)
  ROOT %sum = f32[1024,256]{1,0} add(%b, %out-done)
}
"""  # noqa: E501


def test_arrays_in_the_memory_of_the_host():
    (device, host) = arrays_of("(f32[2,3]{1,0:T(8,128)}, bf16[4]{0:T(256)S(5)})")
    assert (device.host, host.host, str(host), host.bytes) == (False, True, "bfloat16[4]", 8)


def test_copies_count_the_smaller_side_and_take_the_link():
    module = parse(PROGRAM)
    moved = {instr.name: host_bytes(module, "main", instr) for instr in module.computations["main"]}
    assert {name: size for name, size in moved.items() if size} == {
        "slice-start": MIB,
        "out-start": MIB,
        "sum": MIB,
    }
    times = timeline_of(module, MeshSpec.parse("data=1"), H100, ("data",))
    assert times.host_bytes == 3 * MIB
    assert times.host_seconds == pytest.approx(3 * MIB / LINK, rel=1e-9)
    assert times.exposed >= 3 * MIB / LINK - 1e-5, "nothing to compute in the meantime"
    plain = timeline_of(
        parse(PROGRAM.replace("S(5)", "")), MeshSpec.parse("data=1"), H100, ("data",)
    )
    assert plain.host_bytes == plain.host_seconds == 0 and plain.seconds < times.seconds


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.stack = spmd.nn.LayerStack(spmd.nn.repeat(4, lambda rngs: Layer(rngs), rngs))

    def __call__(self, x):
        return self.stack(x)


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(512, 1024, rngs=rngs), nnx.Linear(1024, 512, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(checkpoint_name(self.up(x), "hidden")))


def plan_of(memory="device", remat=None):
    layout = dataclasses.replace(
        spmd.Layout.load("fsdp"), memory=spmd.Memory(memory), remat=remat or spmd.Remat()
    )
    batch = {
        "x": jax.ShapeDtypeStruct((4096, 512), "float32"),
        "y": jax.ShapeDtypeStruct((4096, 512), "float32"),
    }
    loss, optimizer = spmd.losses.mean_squared_error, optax.adamw(1e-3)
    return spmd.plan(
        lambda: Net(),
        batch,
        loss=loss,
        optimizer=optimizer,
        layout=layout,
        target="8xh100",
        mesh="data=8",
    )


gpu_compiler = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="package jax_cuda13_plugin is missing, XLA's compiler for GPUs (no GPU is needed): pip "
    "install '.[gpu-compiler]'",
)


@gpu_compiler
@pytest.mark.system
def test_moments_on_the_host_leave_the_device():
    device, host = plan_of(), plan_of("host")
    moments = device.memory.optimizer - 4  # all but a counter
    assert host.memory.optimizer == 4 and host.memory.host == moments and device.memory.host == 0
    assert device.memory.peak - host.memory.peak == pytest.approx(moments, rel=0.02)
    assert host.timeline.host_bytes == pytest.approx(2 * moments, rel=0.02), "there and back"
    assert host.timeline.host_seconds == pytest.approx(host.timeline.host_bytes / LINK, rel=1e-9)
    assert host.timeline.seconds > device.timeline.seconds
    assert "in the host's memory" in str(host) and "copies with the host" in str(host)
    assert "in the host's memory, for each device" in str(host.explain("stack/layers/up/kernel"))
    assert json.loads(host.to_json())["memory"]["host"] == moments
    assert "copies with the host" not in str(device)


@pytest.mark.system
@gpu_compiler
def test_offloaded_activations_leave_the_device():
    layers = ("stack/layers",)
    saved, offloaded = (
        plan_of(remat=spmd.Remat(("hidden",), layers)),
        plan_of(remat=spmd.Remat(None, layers, ("hidden",))),
    )
    # of 4 layers: gathered_scan runs the last one behind its loop, where its gradient comes next
    hidden = 3 * (4096 // 8) * 1024 * 4
    assert offloaded.memory.host == hidden and saved.memory.host == 0
    assert saved.memory.peak - offloaded.memory.peak > hidden / 2, (
        "one layer's is on the device at a time"
    )
    assert offloaded.timeline.host_bytes == 2 * hidden
