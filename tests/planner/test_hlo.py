"""Reading XLA's text: the four ways of writing who takes part, loops, and starts and ends."""

import math
import re

import numpy as np
import pytest

from spmd.base.tree import format_bytes
from spmd.mesh import MeshSpec
from spmd.planner.cluster import Cluster
from spmd.planner.cost import FREE, cost_of, matmul, product_time
from spmd.planner.hlo import Array, arrays_of, collective_kind, groups, parse, payload
from spmd.planner.timeline import timeline_of
from spmd.planner.traffic import Traffic, Transfer, traffic_of, traffic_rows, transfer_time

CLUSTER = Cluster.parse("2x4xh100")
MESH = MeshSpec.parse("data=4,model=2")


def line(rest, op="all-reduce", kind="f32[4,2]{1,0}"):
    text = (
        "HloModule m, num_partitions=8\n\nENTRY %main (a: f32[4,2]) -> f32[4,2] {\n  %a = "
        "f32[4,2]{1,0} parameter(0)\n"
    )
    module = parse(f"{text}  ROOT %r = {kind} {op}(%a), {rest}\n}}\n")
    return module, module.computations["main"][-1]


def asynchronous(module):
    """Every asynchronous collective: its name, and the number of computing operations between its
    start and its end.
    """
    for lines in module.computations.values():
        for start, instr in enumerate(lines):
            if collective_kind(instr.op) and instr.op.endswith("-start"):
                end = next(
                    (
                        at
                        for at, other in enumerate(lines)
                        if other.op.endswith("-done") and instr.name in other.operands
                    ),
                    start,
                )
                between = [
                    other.op
                    for other in lines[start + 1 : end]
                    if not re.search(r"-(start|done)$", other.op)
                ]
                yield instr.name, sum(op not in FREE for op in between)


@pytest.mark.parametrize(
    ("spelling", "wanted"),
    [
        ("replica_groups={{0,2,4,6},{1,3,5,7}}", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("replica_groups=[4,2]<=[8]", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("replica_groups=[4,2]<=[2,2,2]T(1,2,0)", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("replica_groups=mesh['a'=4,'b'=2] {'a'}", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("replica_groups=mesh['a'=4,'b'=2] {'b'}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("replica_groups=mesh['a'=4,'b'=2] {'a','b'}", [list(range(8))]),
        ("replica_groups=mesh['a'=8] {'a':(1)2}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("replica_groups=mesh['a'=8] {'a':(2)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("replica_groups={}", [list(range(8))]),
    ],
)
def test_groups_in_every_spelling(spelling, wanted):
    _, instr = line(f"{spelling}, to_apply=%add")
    assert sorted(groups(instr, 8)) == sorted(wanted)


def test_pairs_of_a_permutation():
    module, instr = line(
        "source_target_pairs={{0,2},{2,4},{4,6},{1,3},{3,5},{5,7}}", "collective-permute"
    )
    assert groups(instr, 8)[:3] == [[0, 2], [2, 4], [4, 6]]
    (transfer,) = traffic_of(module, MESH, CLUSTER, ("data",)).transfers
    assert (transfer.kind, transfer.axes, transfer.sent, transfer.levels) == (
        "collective_permute",
        ("data",),
        32,
        (0.0, 32.0, 0.0),
    ), "2 to 4 leaves the node"


def test_types():
    assert [str(a) for a in arrays_of(
        "(f32[2,3]{1,0:T(8,128)}, (bf16[], s8[7]{0}), /*index=3*/u16[0]{0}, f8e4m3fn[4]{0})")] == [
        "float32[2, 3]", "bfloat16[]", "int8[7]", "uint16[0]", "float8e4m3fn[4]",
    ]  # fmt: skip
    assert [a.bytes for a in arrays_of("(f32[2,3], bf16[5], s4[3], pred[2])")] == [24, 10, 2, 2]


LOOP = r"""HloModule m, is_scheduled=true, num_partitions=8

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %s = f32[] add(%x, %y), metadata={op_name="reduce_gradients/exact/0/psum"}
}

%body (p: (s32[], f32[1024])) -> (s32[], f32[1024]) {
  %p = (s32[], f32[1024]{0}) parameter(0)
  %v = f32[1024]{0} get-tuple-element(%p), index=1
  %start = (f32[1024]{0}, f32[4096]{0}) all-gather-start(%v), replica_groups=[2,4]<=[4,2]T(1,0), metadata={op_name="gather_params/gather"}
  %sq = f32[1024]{0} multiply(%v, %v)
  %done = f32[4096]{0} all-gather-done(%start)
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %t = (s32[], f32[1024]{0}) tuple(%i, %sq)
}

%condition (p: (s32[], f32[1024])) -> pred[] {
  %p = (s32[], f32[1024]{0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (a: f32[1024], w: bf16[512,256], x: bf16[1024,512]) -> f32[1024] {
  %a = f32[1024]{0} parameter(0)
  %w = bf16[512,256]{1,0} parameter(1)
  %x = bf16[1024,512]{1,0} parameter(2)
  %zero = s32[] constant(0)
  %init = (s32[], f32[1024]{0}) tuple(%zero, %a)
  %loop = (s32[], f32[1024]{0}) while(%init), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %b = f32[1024]{0} get-tuple-element(%loop), index=1
  %y = bf16[1024,256]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %r = f32[1024]{0} all-reduce(%b), replica_groups=[4,2]<=[8], to_apply=%add
}
"""  # noqa: E501


def test_loops_are_multiplied_and_scopes_found():
    traffic = traffic_of(parse(LOOP), MESH, CLUSTER, ("data",))
    gather, reduce = traffic.transfers
    assert (gather.times, gather.axes, gather.group, gather.purpose, gather.asynchronous) == (
        5,
        ("data",),
        4,
        "parameters",
        True,
    )
    assert [str(a) for a in payload(parse(LOOP).computations["body"][2])] == ["float32[4096]"]
    assert gather.sent == 3 * 4096 and traffic.bytes("parameters") == 5 * 3 * 4096
    assert (reduce.purpose, reduce.axes, reduce.asynchronous) == ("gradients", ("model",), False), (
        "its scope is that of what it reduces by"
    )
    assert list(asynchronous(parse(LOOP))) == [("start", 1)]


def test_levels_add_up_to_a_ring():
    """`data` has 4 devices, two on each node: a half of the bytes of a ring stay inside, as each
    has its own link between nodes.
    """
    for transfer in traffic_of(parse(LOOP), MESH, CLUSTER, ("data",)).transfers:
        assert sum(transfer.levels) == transfer.sent
    gather, reduce = traffic_of(parse(LOOP), MESH, CLUSTER, ("data",)).transfers
    assert (gather.per_node, gather.levels) == (2, (1.5 * 4096.0, 1.5 * 4096.0, 0.0))
    assert reduce.levels[1] == 0, "neighbours on `model` share a node"


def test_the_times_are_those_of_the_figures():
    """Every term of a step, from the target's own figures."""
    module, target = parse(LOOP), CLUSTER.target
    times, launch = timeline_of(module, MESH, CLUSTER, ("data",)), target.achieved.launch
    gather, reduce = traffic_of(module, MESH, CLUSTER, ("data",)).transfers
    memory = target.memory_bandwidth * target.achieved.memory
    flops = 2 * 1024 * 512 * 256
    square = 3 * 4096 / memory  # read twice, as two operands, and written
    product = product_time(matmul("bfloat16", (1, 1024, 256, 512)), target)
    dot = max(product, 2 * (1024 * 512 + 512 * 256 + 1024 * 256) / memory)
    waits = 5 * (transfer_time(gather, CLUSTER) - square - launch) + transfer_time(reduce, CLUSTER)
    parts = 5 * square, dot, 6 * launch, waits
    np.testing.assert_allclose(times.exposed, waits, rtol=1e-12)
    np.testing.assert_allclose(
        times.seconds, 5 * (square + launch) + dot + launch + waits, rtol=1e-12
    )
    np.testing.assert_allclose(times.hidden, 5 * (square + launch), rtol=1e-12)
    assert (times.flops, times.peak) == (flops, 989e12)
    spread = target.spread
    off = [
        part * share
        for part, share in zip(
            parts, (spread.memory, spread.matmul, spread.launch, spread.link), strict=True
        )
    ]
    np.testing.assert_allclose(
        times.range,
        (times.seconds - math.hypot(*off), times.seconds + math.hypot(*off)),
        rtol=1e-12,
    )
    inside, between, _ = gather.levels
    assert inside / 450e9 < between / 50e9
    wanted = between / (50e9 * 0.75) + 2 * target.inside.latency + target.between.latency + launch
    np.testing.assert_allclose(transfer_time(gather, CLUSTER), wanted, rtol=1e-12)


@pytest.mark.parametrize(
    "kind, cluster, group, per_node, near, far",
    [
        ("all_gather", "8xh100", 8, 8, 7, 0),
        # a ring of 511 steps, 63 of them between nodes
        ("reduce_scatter", "64x8xh100", 512, 8, 448, 63),
        ("all_reduce", "8xh100", 8, 8, 14, 0),
        ("all_reduce", "64x8xh100", 512, 8, 14, 12),  # trees
        ("all_to_all", "2x8xh100", 16, 8, 1, 1),
        ("collective_permute", "2x8xh100", 16, 1, 0, 1),
        ("collective_permute", "8xh100", 8, 8, 1, 0),
        ("all_reduce", "8xcpu", 8, 8, 6, 0),
        ("all_gather", "2x4xcpu", 8, 4, 2, 1),
    ],
)
def test_latencies_are_those_of_rings_and_trees(kind, cluster, group, per_node, near, far):
    cluster = Cluster.parse(cluster)
    target, transfer = cluster.target, Transfer(kind, "", (), group, per_node, (), 1, "", "", True)
    wanted = near * target.inside.latency + far * target.between.latency + target.achieved.launch
    np.testing.assert_allclose(transfer_time(transfer, cluster), wanted, rtol=1e-12)


def test_two_nodes_exchange_an_all_reduce_by_trees():
    """Between more nodes a ring sends nearly twice the array."""
    sent = [
        Transfer(
            "all_reduce", "", (), 8 * n, 8, (Array("float32", (1 << 20,), 32),), 1, "", "", True
        ).levels[1]
        for n in (1, 2, 3)
    ]
    assert sent == [0.0, (4 << 20) / 8, 2 * 23 / 24 * (4 << 20) / 8]


def test_transfers_of_equal_layers_share_a_row():
    def of(where, width=64):
        return Transfer(
            "all_reduce",
            "activations",
            ("model",),
            4,
            4,
            (Array("float32", (8, width), 32 * width),),
            1,
            where,
            where,
            False,
        )

    layers = [of(f"jvp(blocks/{n})/mlp/down/psum") for n in (0, 1, 2, 3, 7)]
    rest = [
        of("jvp(blocks/4)/mlp/down/psum", 32),
        *(of(f"jvp(blocks/{n})/attention/psum") for n in (0, 1)),
        of("jvp(head)/psum"),
    ]
    _, rows = traffic_rows(Traffic((*layers, *rest)))
    assert rows[0][-2:] == (format_bytes(5 * layers[0].sent), "jvp(blocks/{0..3,7})/mlp/down/psum")
    assert sorted(row[-1] for row in rows[1:]) == sorted(transfer.where for transfer in rest)


STARTS = {  # of an all-reduce, as jaxlib 0.10 and 0.11 write it, and of several arrays at once
    "f32[8]{0} all-reduce-start(%x)": ["float32[8]"],
    "((f32[8]{0}), f32[8]{0}) all-reduce-start(%x)": ["float32[8]"],
    "(f32[8]{0}, bf16[2]{0}) all-reduce-start(%x, %y)": ["float32[8]", "bfloat16[2]"],
    "((f32[8]{0}, bf16[2]{0}), (f32[8]{0}, bf16[2]{0})) all-reduce-start(%x, %y)": [
        "float32[8]",
        "bfloat16[2]",
    ],
}


@pytest.mark.parametrize("text", STARTS)
def test_operands_of_a_start_are_no_payload(text):
    program = f"""HloModule m, num_partitions=8

ENTRY %main (x: f32[8], y: bf16[2]) -> f32[8] {{
  %x = f32[8]{{0}} parameter(0)
  %y = bf16[2]{{0}} parameter(1)
  %start = {text}, replica_groups={{{{0,1,2,3,4,5,6,7}}}}, to_apply=%add
  ROOT %done = f32[8]{{0}} all-reduce-done(%start)
}}
"""
    [start] = [instr for instr in parse(program).computations["main"] if instr.name == "start"]
    assert [str(array) for array in payload(start)] == STARTS[text]


ASYNCHRONOUS = """HloModule step, num_partitions=1

%fused (param_0: bf16[12,32,64], param_1: s32[], param_2: bf16[32,64]) -> bf16[12,32,64] {
  %param_0 = bf16[12,32,64]{2,1,0} parameter(0)
  %param_2 = bf16[32,64]{1,0} parameter(2)
  %bitcast.1 = bf16[1,32,64]{2,1,0} bitcast(%param_2)
  %param_1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %update = bf16[12,32,64]{2,1,0} dynamic-update-slice(%param_0, %bitcast.1, %param_1, %zero, %zero)
}

ENTRY %main (stack: bf16[12,32,64], index: s32[], layer: bf16[32,64]) -> bf16[12,32,64] {
  %stack = bf16[12,32,64]{2,1,0} parameter(0)
  %index = s32[] parameter(1)
  %layer = bf16[32,64]{1,0} parameter(2)
  %fusion-start.6 = ((bf16[12,32,64], s32[], bf16[32,64]), bf16[12,32,64], u32[]) fusion-start(%stack, %index, %layer), calls=%fused
  ROOT %fusion-done.6 = bf16[12,32,64]{2,1,0} fusion-done(%fusion-start.6)
}
"""  # noqa: E501


def test_a_fusion_that_is_started_and_waited_for_writes_once():
    """As XLA:GPU of jaxlib 0.11 stores what a layer of a scan keeps: one slice of the stack, and
    not all of it twice.
    """
    module = parse(ASYNCHRONOUS)
    start, done = module.computations["main"][-2:]
    assert [str(array) for array in start.arrays] == ["bfloat16[12, 32, 64]"]
    assert done.op == "fusion-done"
    assert cost_of(module, "main", start).bytes == pytest.approx(2 * 2 * 32 * 64, abs=8), (
        "the layer is read, and written"
    )
