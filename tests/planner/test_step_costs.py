"""The largest costs of a step, which are the end of every plan."""

import json

import pytest

from spmd.planner import plan_data
from spmd.planner.compile import Compiled
from spmd.planner.flop_shares import flop_shares
from spmd.planner.hlo import parse
from spmd.planner.plan_data import SHOWN, step_costs
from spmd.planner.timeline import timeline_of
from tests.planner.test_text_report import KEPT, make_plan
from tests.planner.test_waits import CLUSTER, MESH, PROGRAM

MODEL = 2 * 2.0 * 1024**3  # FLOPs of two products; the program has three


def costs_of(program):
    module = parse(program)
    times = timeline_of(module, MESH, CLUSTER, ("data",), model_flops=MODEL)
    return times, step_costs(
        times, flop_shares(module, MESH, (), executed=times.flops, model=MODEL)
    )


def seconds_of(kind, costs):
    return sum(cost.seconds for cost in costs if cost.kind == kind)


def test_costs_add_up_to_the_step_and_are_ordered():
    times, costs = costs_of(PROGRAM)
    assert sum(cost.seconds for cost in costs) == pytest.approx(times.seconds, rel=1e-9)
    assert sum(cost.share for cost in costs) == pytest.approx(1, rel=1e-9)
    assert [cost.seconds for cost in costs] == sorted(
        (cost.seconds for cost in costs), reverse=True
    )
    assert {cost.what: cost.purpose for cost in costs if cost.kind == "exposed"} == {
        "exposed communication: all_gather of parameters": "parameters",
        "exposed communication: reduce_scatter of gradients": "gradients",
    }
    assert seconds_of("exposed", costs) == pytest.approx(times.exposed, rel=1e-9)


def test_products_have_their_share_of_peak():
    times, costs = costs_of(PROGRAM)
    (products,) = (cost for cost in costs if cost.kind == "products")
    peak = 3 * 2 * 1024**3 / CLUSTER.target.rate("float32")
    assert times.at_peak == {"products": pytest.approx(peak, rel=1e-9)}
    assert products.what == f"matrix products, at {peak / times.products:.0%} of peak"


def test_what_is_computed_again_is_a_cost_of_its_own():
    """The product whose name says that XLA repeats it; and an element-wise operation that
    `jax.checkpoint` does.
    """
    times, costs = costs_of(PROGRAM)
    assert seconds_of("recomputation", costs) == pytest.approx(times.products / 3, rel=1e-9)
    assert seconds_of("products", costs) == pytest.approx(times.products * 2 / 3, rel=1e-9)
    _, plain = costs_of(PROGRAM.replace(".remat", ""))
    assert seconds_of("recomputation", plain) == 0 and seconds_of(
        "products", plain
    ) == pytest.approx(times.products, rel=1e-9)

    line = '  %e = f32[1024,1024]{1,0} tanh(%a), metadata={op_name="SCOPE/tanh"}\n'
    with_line = PROGRAM.replace(".remat", "").replace("  %second", f"{line}  %second")
    first, once = costs_of(with_line.replace("SCOPE", "jvp()"))
    second, again = costs_of(with_line.replace("SCOPE", "transpose(jvp())/rematted_computation"))
    assert first.seconds == second.seconds and first.repeated_memory == 0
    assert (
        seconds_of("memory", once)
        == seconds_of("recomputation", again)
        == second.repeated_memory
        == second.memory
        > 0
    )
    assert seconds_of("recomputation", once) == seconds_of("memory", again) == 0


def test_a_loop_counts_as_often_as_it_runs():
    body = PROGRAM.partition("ENTRY %main ")[2]
    loop = f"""HloModule m, num_partitions=8

%body {body}
%cond (v: f32[4194304], a: f32[1024,1024]) -> pred[] {{
  ROOT %true = pred[] constant(true)
}}

ENTRY %main (v: f32[4194304], a: f32[1024,1024]) -> f32[1024,1024] {{
  %v = f32[4194304]{{0}} parameter(0)
  %a = f32[1024,1024]{{1,0}} parameter(1)
  ROOT %w = f32[1024,1024]{{1,0}} while(%v, %a), condition=%cond, body=%body, backend_config={{"known_trip_count":{{"n":"5"}}}}
}}
"""  # noqa: E501
    once, _ = costs_of(PROGRAM)
    times, costs = costs_of(loop)
    assert times.at_peak["products"] == pytest.approx(5 * once.at_peak["products"], rel=1e-9)
    assert sum(cost.seconds for cost in costs) == pytest.approx(times.seconds, rel=1e-9)


def test_text_page_and_json_end_with_the_costs(monkeypatch):
    compiled = Compiled(**json.loads((KEPT / "tensor.json").read_text(encoding="utf-8")))
    monkeypatch.setattr(plan_data, "compile_step", lambda *args, **options: compiled)
    plan = make_plan("tensor")
    title, *lines, hint = str(plan).split("\n\n")[-1].splitlines()
    assert (
        title == "LARGEST COSTS"
        and len(lines) == SHOWN
        and hint.endswith("plan.changes(), or `spmd plan --changes`.")
    )
    page = plan._repr_html_()
    assert all(
        cost.what in page.partition("<h2>Largest costs</h2>")[2] for cost in plan.costs[:SHOWN]
    )
    written = json.loads(plan.to_json())
    assert list(written)[-1] == "costs" and len(written["costs"]) == len(plan.costs) > SHOWN
    assert written["costs"][0] == {
        "kind": "exposed",
        "what": "exposed communication: all_reduce of gradients between nodes",
        "seconds": plan.costs[0].seconds,
        "share": plan.costs[0].share,
        "purpose": "gradients",
    }
