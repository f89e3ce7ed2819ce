"""Several sites: three levels of links, the steps between two synchronizations, and utilization by
the speed of links.
"""

import dataclasses
import math
import re
import xml.etree.ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmd
from benchmarks.published import sites
from spmd.errors import SpmdError
from spmd.mesh import MeshSpec
from spmd.planner.cluster import Cluster
from spmd.planner.hlo import parse
from spmd.planner.sync_period import due_in_step
from spmd.planner.target import SITES, Link, load, shipped
from spmd.planner.timeline import timeline_of
from spmd.planner.traffic import traffic_of, transfer_time

FAR = Cluster.parse("2x2x4xh100@100Mb/s,50ms")  # 16 devices
MESH = MeshSpec.parse("site=2,node=2,gpu=4")
MODEL = spmd.FunctionalModel(
    lambda key: {name: jnp.zeros((64, 64)) for name in ("up", "down")},
    lambda params, x: jnp.tanh(x @ params["up"]) @ params["down"],
)
BATCH = {name: jax.ShapeDtypeStruct((64, 64), "float32") for name in "xy"}
STEP = {"loss": spmd.losses.mean_squared_error, "optimizer": optax.sgd(0.1)}


def diloco(target="2x1x2xcpu@1Gb/s,2ms", **options):
    layout = spmd.Layout.load("diloco")
    server = dataclasses.replace(layout.parameter_server, **({"every": 10} | options))
    return spmd.plan(
        MODEL,
        BATCH,
        **STEP,
        target=target,
        layout=dataclasses.replace(layout, parameter_server=server),
    )


def collective(groups, op="all-reduce", result="f32[1024]{0}"):
    text = (
        "HloModule m, num_partitions=16\n\nENTRY %main (a: f32[1024]) -> f32[1024] {\n  %a = "
        "f32[1024]{0} parameter(0)\n"
    )
    module = parse(f"{text}  ROOT %r = {result} {op}(%a), {groups}, to_apply=%add\n}}\n")
    (transfer,) = traffic_of(module, MESH, FAR, ("site", "node", "gpu")).transfers
    return transfer


def test_parse_reads_sites_and_their_link():
    far = Cluster.parse("4x8x8xh100@1.5Gb/s,30ms")
    assert (far.sites, far.nodes, far.devices, far.count, far.devices_per_site) == (
        4,
        32,
        8,
        256,
        64,
    )
    assert (
        far.target.sites == Link(1.5e9 / 8, 0.03)
        and str(far) == "4x8x8xh100@1.5Gb/s,30ms"
        and Cluster.parse(str(far)) == far
    )
    assert Cluster.parse("4x8x8xh100").target.sites == SITES, "what nothing says"
    assert str(Cluster.parse("4x8x8xh100")) == "4x8x8xh100@1Gb/s,30ms", "and what a plan prints"
    assert (
        Cluster.parse("1x8x8xh100") == Cluster.parse("8x8xh100")
        and str(Cluster.parse("8x8xh100")) == "8x8xh100"
    )
    assert (
        str(Cluster.parse("2x1x4xh100@1Gb/s,5ms").doubled().doubled()) == "2x2x8xh100@1Gb/s,5ms"
    ), "each site grows"


@pytest.mark.parametrize(
    ("target", "wanted"),
    [
        (
            "2x1x2xcpu@0Mb/s,30ms",
            'of the link between sites, bandwidth = "0Mb/s" is not a number and bits or bytes per '
            "second.",
        ),
        ("2x1x2xcpu@fast", 'bandwidth = "fast" is not a number and bits or bytes per second.'),
        ("2x1x2xcpu@1Gb/s", 'latency = "" is not a number and a unit of time.'),
        (
            "2x1x2xcpu@1e30Gb/s,30ms",
            "1e30Gb/s,30ms is more than 1e+24 bytes per second, or takes longer than 3600 s.",
        ),
        (
            "2x1x2xcpu@1Gb/s,1e9s",
            "1Gb/s,1e9s is more than 1e+24 bytes per second, or takes longer than 3600 s.",
        ),
        ("2x1x2xcpu@1Gb/s,30", 'latency = "30" is not a number and a unit of time.'),
        ("0x1x2xcpu", "0 x 1 x 2 devices are none."),
        (
            "2x2xcpu@1Gb/s,30ms",
            "a link between sites, but one site.\n    fix: sites x nodes x devices, such as "
            '"2x2x2xcpu@1Gb/s,30ms"',
        ),
        ("2x2x2x2xcpu", "it has more counts than sites x nodes x devices."),
    ],
)
def test_parse_refuses_links_that_are_none(target, wanted):
    with pytest.raises(SpmdError) as caught:
        Cluster.parse(target)
    assert wanted in str(caught.value) and target in str(caught.value)


def test_file_of_a_target_may_have_its_own_link(tmp_path, monkeypatch):
    text = shipped()["h100"].read_text(encoding="utf-8")
    path = tmp_path / "mine@home.toml"
    path.write_text(text + "\n[sites]\nbandwidth = 5e6\nlatency = 0.08\n", encoding="utf-8")
    assert Cluster.parse(f"2x1x8x{path}").target.sites == Link(5e6, 0.08)
    assert Cluster.parse(f"2x1x8x{path}@1Gb/s,1ms").target.sites == Link(125e6, 0.001), (
        "the target's name says otherwise"
    )
    path.write_text(text + "\n[sites]\nbandwidth = 0\n", encoding="utf-8")
    with pytest.raises(SpmdError, match=r"\[sites\] bandwidth") as caught:
        load(str(path))
    assert "0 is not a positive number" in str(caught.value) and "[sites] latency" in str(
        caught.value
    )


@pytest.mark.parametrize(
    ("groups", "counts", "leaving"),
    [
        ("replica_groups=[1,16]<=[16]", (4, 2, 2), 8),
        ("replica_groups=[8,2]<=[2,8]T(1,0)", (1, 1, 2), 8),  # along `site`
        ("replica_groups=[4,4]<=[2,2,4]T(2,0,1)", (1, 2, 2), 8),  # along `site` and `node`
        ("replica_groups=[2,8]<=[16]", (4, 2, 1), 0),
        ("replica_groups=[4,4]<=[16]", (4, 1, 1), 0),
        ("replica_groups={{0,8},{1,9},{2,3},{4,5},{6,7},{10,11},{12,13},{14,15}}", (1, 1, 2), 2),
    ],
)
def test_groups_are_divided_into_nodes_and_sites(groups, counts, leaving):
    transfer = collective(groups)
    if counts != (1, 1, 2) or leaving == 8:  # of uneven groups, `per_node` is that of the first
        assert transfer.counts == counts
    assert transfer.leaving == leaving and sum(transfer.levels) == pytest.approx(
        transfer.sent, rel=1e-9
    )
    assert (transfer.levels[2] > 0) == (leaving > 0)


def test_time_at_three_levels_is_the_sum_by_hand():
    """4,096 bytes over 2 sites of 2 nodes of 4: each site's 8 devices share its link, which is the
    slowest; hops of all levels add up.
    """
    target, size = FAR.target, 4096
    share, launch = target.achieved.link, target.achieved.launch
    reduce = collective("replica_groups=[1,16]<=[16]")
    assert reduce.levels == (2 * 7 / 8 * size - size / 4, size / 4, size / 8), (
        "two nodes by trees, and a part of each device across"
    )
    near, far = target.inside.latency, target.between.latency
    wanted = launch + 8 * size / 8 / (12.5e6 * share) + 2 * 3 * near + 2 * far + 2 * 0.05
    assert transfer_time(reduce, FAR) == pytest.approx(wanted, rel=1e-12)
    gather = collective(
        "replica_groups=[1,16]<=[16], dimensions={0}", "all-gather", "f32[65536]{0}"
    )
    part = 4 * 65536 / 16
    assert gather.levels == (7 * 2 * part - 7 * 2 * part / 4, 7 * 2 * part / 4, part)
    # a ring of each site, and one of both
    wanted = launch + 8 * part / (12.5e6 * share) + 6 * near + far + 0.05
    assert transfer_time(gather, FAR) == pytest.approx(wanted, rel=1e-12)
    quick = dataclasses.replace(FAR, target=dataclasses.replace(target, sites=Link(1e15, 0.0)))
    inside, between, _ = gather.levels
    wanted = launch + max(inside / 450e9, between / 50e9) / share + 6 * near + far
    assert transfer_time(gather, quick) == pytest.approx(wanted, rel=1e-12), (
        "then the links of the site count"
    )
    every = collective("replica_groups=[1,16]<=[16], dimensions={0}", "all-to-all")
    assert every.levels == (3 * size / 16, size / 4, size / 2)


def test_permutation_shares_a_link_among_its_senders():
    """Of two rings of pairs one crosses sites with one device of each, the other with four."""
    target, pairs = FAR.target, ",".join(f"{{{at},{(at + 1) % 16}}}" for at in range(16))
    ring = collective(f"source_target_pairs={{{pairs}}}", "collective-permute")
    shift = collective(
        f"source_target_pairs={{{','.join(f'{{{at},{(at + 4) % 16}}}' for at in range(16))}}}",
        "collective-permute",
    )
    assert (ring.leaving, shift.leaving) == (1, 4) and ring.levels == shift.levels == (
        0.0,
        0.0,
        4096.0,
    )
    for transfer in (ring, shift):
        wanted = (
            transfer.leaving * 4096 / (12.5e6 * target.achieved.link)
            + 0.05
            + target.achieved.launch
        )
        assert transfer_time(transfer, FAR) == pytest.approx(wanted, rel=1e-12)


PROGRAM = """HloModule m, num_partitions=16

%alone (p: f32[1024]) -> f32[1024] {
  ROOT %p = f32[1024]{0} parameter(0)
}

%send (q: f32[1024]) -> f32[1024] {
  %q = f32[1024]{0} parameter(0)
  %start = f32[1024]{0} all-reduce-start(%q), replica_groups=[8,2]<=[2,8]T(1,0), to_apply=%add
  %w = f32[1024,1024]{1,0} broadcast(%q), dimensions={0}
  ROOT %done = f32[1024]{0} all-reduce-done(%start)
}

ENTRY %main (a: f32[1024], n: s32[]) -> f32[1024] {
  %a = f32[1024]{0} parameter(0)
  %n = s32[] parameter(1)
  ROOT %c = f32[1024]{0} conditional(%n, %a, %a), branch_computations={%alone, %send}, metadata={op_name="jit(f)/send/1/cond"}
}
"""  # noqa: E501


def test_timeline_takes_the_branches_that_are_due():
    """A step in which nothing is due takes the short branch; what runs beside a collective of the
    other one hides it.
    """
    module = parse(PROGRAM)
    always, due, other, alone = (
        timeline_of(module, MESH, FAR, ("site",), due=parts)
        for parts in (None, {"send/1"}, {"send/0", "receive/1"}, ())
    )
    assert always == due and other == alone and alone.seconds == 0 < due.seconds
    (transfer,) = traffic_of(module, MESH, FAR, ("site",)).transfers
    assert (
        transfer.conditional
        and due.hidden > 0
        and due.exposed + due.hidden == pytest.approx(transfer_time(transfer, FAR), rel=1e-9)
    )


def test_period_is_of_its_steps():
    """Workers train alone in nine steps of ten; XLA:CPU hides nothing, so the tenth takes its
    collectives' time longer.
    """
    plan = diloco()
    period = plan.period
    assert [(kind.count, sorted(kind.due)) for kind in period.kinds] == [
        (9, []),
        (1, ["receive/0", "send/0"]),
    ]
    alone, outer = period.kinds
    assert outer.seconds == plan.timeline.seconds > alone.seconds
    rare = [transfer for transfer in plan.traffic.transfers if transfer.conditional]
    wanted = sum(transfer_time(transfer, plan.cluster) for transfer in rare)
    assert outer.exposed - alone.exposed == pytest.approx(wanted, rel=1e-9) and wanted > 0
    computing = 9 * (alone.seconds - alone.exposed) + outer.seconds - outer.exposed
    assert period.utilization == pytest.approx(
        computing / (9 * alone.seconds + outer.seconds), rel=1e-12
    )
    assert plan.rows_per_second == pytest.approx(64 / period.seconds, rel=1e-9)
    assert period.seconds == pytest.approx(period.total / 10, rel=1e-9)
    crossing = sum(
        t.leaving * t.levels[2] * (1 if t.conditional else 10) for t in plan.traffic.transfers
    )
    assert period.site_bytes == crossing > 0
    text = str(plan)
    assert (
        "per step on average over 10 steps" in text
        and "; 1 of " in text
        and "shared by the 2 devices of each" in text
    )
    assert (
        f"{period.utilization:.1%}  of the time is computation" in text
        and "of them to other sites" in text
    )
    assert "note: axis data crosses sites in every step: collectives of metrics (1)" in text
    assert "node 1, site 1" in plan._repr_html_()


@pytest.mark.system
def test_devices_of_a_site_send_once_if_they_average_first():
    """A change of each device crosses the link in the first layout, and one of each site in the
    second.
    """
    every = diloco()
    layout = dataclasses.replace(
        every.layout, batch=dataclasses.replace(every.layout.batch, spec=(("site", "data"),))
    )
    layout = dataclasses.replace(
        layout, gradients=dataclasses.replace(layout.gradients, exact_axes=("data",))
    )
    once = spmd.plan(
        MODEL, BATCH, **STEP, target=every.cluster, layout=layout, mesh="site=2,data=2"
    )
    noted = [
        [note for note in plan.notes if "devices of a site each send a change" in note]
        for plan in (every, once)
    ]
    assert len(noted[0]) == 1 and not noted[1]

    def crossing(plan):
        return sum(
            t.leaving * t.levels[2] * t.times
            for t in plan.traffic.transfers
            if t.purpose == "gradients" and t.conditional
        )

    assert crossing(every) == 2 * crossing(once) > 0 and once.period.seconds < every.period.seconds


def test_plan_of_one_site_has_no_third_level():
    plan = spmd.plan(MODEL, BATCH, **STEP, target="2x2xcpu", layout="data_parallel")
    assert " site" not in str(plan) and plan.traffic.between_sites == 0 < plan.traffic.between
    assert (
        plan.period.steps == 1
        and plan.period.seconds == plan.timeline.seconds
        and plan.period.range == plan.timeline.range
    )


def test_streaming_sends_fragments_in_turn_and_overlap_is_not_hidden():
    """Two fragments take turns, and are received a step later; the collectives of a step end with
    it, which a note says.
    """
    plan = diloco(fragments=2, overlap=1)
    assert sorted((kind.count, *sorted(kind.due)) for kind in plan.period.kinds) == [
        (1, "receive/0"), (1, "receive/1"), (1, "send/0"), (1, "send/1"), (6,),
    ]  # fmt: skip
    assert all(kind.seconds < plan.timeline.seconds for kind in plan.period.kinds), (
        "no step synchronizes all"
    )
    assert plan.period.hidden == 0 and any(
        note.startswith("note: overlap = 1 applies") and "hides 0 s" in note for note in plan.notes
    )
    server = plan.layout.parameter_server
    assert {due_in_step(server, number) for number in range(10)} == {
        kind.due for kind in plan.period.kinds
    }
    assert due_in_step(server, 3) == due_in_step(server, 13)


@pytest.mark.system
def test_utilization_is_that_of_plans_with_these_links_and_periods(monkeypatch):
    """Nothing is compiled for a curve, and each of its points is what a plan with this link and
    period has.
    """
    plan = diloco()
    points = {
        (speed, every): diloco(f"2x1x2xcpu@{speed},2ms", every=every).period
        for speed in ("10Mb/s", "1Gb/s")
        for every in (10, 40)
    }
    monkeypatch.setattr("spmd.planner.compile._compile", lambda *args: pytest.fail("compiled"))
    curve = spmd.utilization(plan, bandwidths=("10Mb/s", "1Gb/s"), periods=(10, 40))
    assert {
        (speed, every): curve.periods[every][at]
        for at, speed in enumerate(curve.bandwidths)
        for every in (10, 40)
    } == points
    for line in curve.shares.values():
        assert 0 < line[0] < line[1] < 1
    assert (
        curve.shares[10] < curve.shares[40]
        and len({period.seconds for period in points.values()}) == 4
    )
    assert str(curve).splitlines()[0].split() == [
        "link",
        "10",
        "steps",
        "step",
        "40",
        "steps",
        "step",
    ]


@pytest.mark.system
def test_utilization_is_drawn():
    """A line for each period, and a circle where it reaches 90 %."""
    curve = spmd.utilization(
        diloco("2x1x2xcpu@1Gb/s,1us", every=100),
        bandwidths=("1Mb/s", "1Gb/s", "1000Gb/s"),
        periods=(2, 100_000),
    )
    root = xml.etree.ElementTree.fromstring(
        re.search(r"<svg.*?</svg>", curve._repr_html_(), re.DOTALL).group()
    )
    lines = [part.get("points").split() for part in root if part.tag.endswith("}polyline")]
    for line, shares in zip(lines, curve.shares.values(), strict=True):
        heights = [float(point.split(",")[1]) for point in line]
        # a drawing has one digit after the point
        np.testing.assert_allclose(heights, [300 - share * 288 for share in shares], atol=0.0501)
    circles = [float(part.get("cx")) for part in root if part.tag.endswith("}circle")]
    reached = [
        next((at for at, share in enumerate(line) if share >= 0.9), None)
        for line in curve.shares.values()
    ]
    xs = [float(point.split(",")[0]) for point in lines[0]]
    assert circles == [xs[at] for at in reached if at is not None]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"bandwidths": ("0Mb/s",)}, r'bandwidth = "0Mb/s" is not a number'),
        (
            {"bandwidths": (), "periods": ()},
            r"bandwidths=\(\) is not a list of bandwidths\.\n    fix: such as "
            r"bandwidths=\(\"500Mb/s\"",
        ),
        ({"bandwidths": "1Gb/s"}, r"bandwidths='1Gb/s' is not a list of bandwidths"),
        (
            {"periods": 50},
            r"periods=50 is not a list of periods\.\n    fix: such as periods=\(50, 500\)",
        ),
        (
            {"periods": (0,)},
            r"a period of 0 steps, but the layout has fragments = 1 and overlap = 0\.\n    fix: "
            r"whole numbers from 1\.",
        ),
    ],
)
def test_utilization_refuses(options, wanted):
    with pytest.raises(SpmdError, match=wanted):
        spmd.utilization(diloco(), **options)


def test_note_names_the_inner_axis_that_crosses_sites():
    """In the first mesh `model` is outermost, and crosses; the fix of the note keeps it on a
    site.
    """
    rules = (spmd.Rule("up", (None, "model")), spmd.Rule("down", ("model",)))
    layout = spmd.Layout(params=rules, gradients=spmd.Gradients("all_reduce"))
    crossing = spmd.plan(
        MODEL, BATCH, **STEP, target="2x1x2xcpu", layout=layout, mesh="model=2,data=2"
    )
    (note,) = [note for note in crossing.notes if "axis model crosses sites" in note]
    fix = re.search(r"; mesh=\"(.+)\" keeps model on a site\.", note)
    inside = spmd.plan(MODEL, BATCH, **STEP, target="2x1x2xcpu", layout=layout, mesh=fix[1])
    assert not any("axis model crosses sites" in note for note in inside.notes)
    (gradients,) = [note for note in inside.notes if "axis data crosses sites" in note]
    assert (
        '; [parameter_server] mode = "local" sends once in many steps (layout diloco).' in gradients
    )
    sent = [t for t in inside.traffic.transfers if t.leaving]
    assert (
        f"{sum(t.times * transfer_time(t, inside.cluster) for t in sent):.3g} s of a step"
        in gradients
    )
    with pytest.raises(
        SpmdError, match=r"periods=\(10,\), but the layout's workers synchronize in every step"
    ):
        spmd.utilization(inside, periods=(10,))
    (line,) = spmd.utilization(inside).shares.values()
    assert math.isclose(line[3], inside.period.utilization, rel_tol=1e-9), "at 1 Gb/s"
    with pytest.raises(SpmdError, match="has one site"):
        spmd.utilization(spmd.plan(MODEL, BATCH, **STEP, target="2x2xcpu", layout="data_parallel"))


def test_published_runs_across_sites_are_in_the_results():
    """Every entry has a line for each of its links; plans at the slowest and the fastest enclose a
    part of the published range.
    """
    lines = (
        (sites.HERE.parent / "results" / "published_sites.md")
        .read_text(encoding="utf-8")
        .splitlines()
    )
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines
        if line.startswith("| ")
    ][1:]
    planned = {(row[0], row[2]): float(row[5].rstrip("%")) / 100 for row in rows}
    for run in sites.read():
        shares = [
            planned.pop((run.id, f"{bandwidth}, {run.latency}")) for bandwidth in run.bandwidths
        ]
        assert (
            shares == sorted(shares)
            and shares[0] <= run.utilization[1]
            and shares[-1] >= run.utilization[0]
        )
    assert not planned
