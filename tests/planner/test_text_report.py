"""The full report, word for word, of a step whose compiled program is kept here, so that no
compiler's version changes it.

To record them anew: `python -m tests.planner.test_text_report` from the repository's root; read the
difference.
"""

import dataclasses
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest

import spmd
from spmd.planner import plan_data
from spmd.planner.compile import Compiled

KEPT = Path(__file__).parent / "recorded"
MODEL = spmd.FunctionalModel(
    lambda key: {"up": jnp.zeros((64, 256)), "down": jnp.zeros((256, 8))},
    lambda params, x: jnp.tanh(x @ params["up"]) @ params["down"],
)
BATCH = {
    "x": jax.ShapeDtypeStruct((32, 64), "float32"),
    "y": jax.ShapeDtypeStruct((32, 8), "float32"),
}
CASES = {
    "tensor": {
        "layout": spmd.Layout(
            params=(spmd.Rule("up", (None, "model")), spmd.Rule("down", ("model",))),
            gradients=spmd.Gradients("all_reduce"),
            name="tensor",
        ),
        "mesh": "data=4,model=2",
        "target": "2x4xcpu",
    },
    "fsdp_on_too_small": {"layout": "fsdp", "mesh": "data=4", "target": f"4x{KEPT}/too_small.toml"},
}


def make_plan(name):
    return spmd.plan(
        MODEL, BATCH, loss=spmd.losses.mean_squared_error, optimizer=optax.adam(0.1), **CASES[name]
    )


@pytest.mark.parametrize("name", CASES)
def test_report_is_as_recorded(name, monkeypatch):
    compiled = Compiled(**json.loads((KEPT / f"{name}.json").read_text(encoding="utf-8")))
    monkeypatch.setattr(plan_data, "compile_step", lambda *args, **options: compiled)
    assert f"{make_plan(name)}\n" == (KEPT / f"{name}.txt").read_text(encoding="utf-8")


def test_report_fits_the_terminal(monkeypatch):
    compiled = Compiled(**json.loads((KEPT / "tensor.json").read_text(encoding="utf-8")))
    monkeypatch.setattr(plan_data, "compile_step", lambda *args, **options: compiled)
    plan = make_plan("tensor")
    side_by_side = spmd.compare(plan, plan, plan)
    assert (
        max(map(len, str(plan).splitlines())) > 90
        and max(map(len, str(side_by_side).splitlines())) > 60
    )
    for width in (60, 80):
        monkeypatch.setenv("COLUMNS", str(width))
        for shown in (plan, side_by_side):
            assert max(map(len, str(shown).splitlines())) <= width, str(shown)


if __name__ == "__main__":
    for case in CASES:
        plan = make_plan(case)
        # of whose machine this was
        tables = r"^(?:FileNames|FunctionNames|FileLocations|StackFrames)\n(?:.+\n)*"
        compiled = dataclasses.replace(
            plan.compiled,
            hlo=re.sub(tables, "", plan.compiled.hlo, flags=re.MULTILINE),
            seconds=0.0,
        )
        (KEPT / f"{case}.json").write_text(
            json.dumps(dataclasses.asdict(compiled), indent=1) + "\n", encoding="utf-8"
        )
        (KEPT / f"{case}.txt").write_text(f"{plan}\n", encoding="utf-8")
