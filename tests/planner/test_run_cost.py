"""What a run costs: hours, device-hours and money, by a plan of its step."""

import dataclasses
import html
import json
import math
import re

import jax
import jax.numpy as jnp
import optax
import pytest

import spmd
from spmd.errors import OptionError
from spmd.launch.cli import main
from spmd.planner import plan_data
from spmd.planner.compile import Compiled
from spmd.planner.sync_period import SyncPeriod
from tests.planner.test_text_report import KEPT, make_plan

MODEL = spmd.FunctionalModel(
    lambda key: {"w": jnp.zeros((50, 8))}, lambda params, x: params["w"][x]
)
TOKENS = {
    "tokens": jax.ShapeDtypeStruct((32, 64), "int32"),
    "targets": jax.ShapeDtypeStruct((32, 64), "int32"),
}


@pytest.fixture
def planned(monkeypatch):
    """Plans whose program is one that is kept: their figures are those of that program."""
    compiled = Compiled(**json.loads((KEPT / "tensor.json").read_text(encoding="utf-8")))
    monkeypatch.setattr(plan_data, "compile_step", lambda *args, **options: compiled)

    def loss(model, batch):
        first = jax.tree.leaves(batch)[0]
        return model(first.reshape(first.shape[0], -1).astype("int32")).mean((1, 2))

    def plan(batch=TOKENS):
        layout = spmd.Layout(params=(spmd.Rule("w", (None, "model")),))
        return spmd.plan(
            MODEL,
            batch,
            loss=loss,
            optimizer=optax.adam(0.1),
            target="8xcpu",
            mesh="data=4,model=2",
            layout=layout,
        )

    return plan


def test_cost_of_tokens_by_hand(planned):
    plan = planned()
    cost = plan.cost(tokens=1e9, price=2.5)
    assert cost.steps == math.ceil(1e9 / (32 * 64)) and cost.devices == 8 and cost.fits
    (low, high), step = plan.timeline.range, plan.timeline.seconds
    assert cost.hours == tuple(
        pytest.approx(cost.steps * value / 3600, rel=1e-9) for value in (step, low, high)
    )
    assert cost.device_hours == tuple(pytest.approx(8 * value, rel=1e-9) for value in cost.hours)
    assert cost.money == tuple(pytest.approx(2.5 * value, rel=1e-9) for value in cost.device_hours)
    assert low < step < high


def test_rows_and_steps_are_lengths_as_well(planned):
    plan = planned()
    assert (
        plan.cost(rows=64_000).steps == plan.cost(steps=2000).steps == 2000
        and plan.cost(rows=64_001).steps == 2001
    )
    assert plan.cost(steps=2000).rows == 64_000 and plan.cost(steps=2000).money is None
    assert "money" not in str(plan.cost(steps=2000))


def test_cost_as_text(planned):
    assert str(planned().cost(tokens=1e12, price=2.5)).splitlines() == [
        '1e+12 tokens, 64 in each row of "targets" and "tokens", in batches of 32 rows: '
        "488,281,250 steps",
        "hours         90.5   from 71.1 to 110",
        "device-hours  724    from 568 to 880, of 8 devices",
        "money         1,810  from 1,420 to 2,200, at 2.5 per device-hour",
        "Data loading, evaluation, checkpoints and restarts are not included.",
    ]


def test_cost_says_that_the_step_does_not_fit(monkeypatch):
    compiled = Compiled(**json.loads((KEPT / "fsdp_on_too_small.json").read_text(encoding="utf-8")))
    monkeypatch.setattr(plan_data, "compile_step", lambda *args, **options: compiled)
    cost = make_plan("fsdp_on_too_small").cost(steps=10)
    assert not cost.fits and str(cost).endswith(
        "The step does not fit: on these devices the run is not possible."
    )


IMAGES = {
    "pixels": jax.ShapeDtypeStruct((32, 8, 8), "uint8"),
    "label": jax.ShapeDtypeStruct((32,), "int32"),
}
UNEQUAL = {
    "source": jax.ShapeDtypeStruct((32, 64), "int32"),
    "target": jax.ShapeDtypeStruct((32, 16), "int32"),
}
SHAPES, NOT_KNOWN = "label int32[32], pixels uint8[32, 8, 8]", "tokens of a row are not known"
INVALID = [
    ({}, TOKENS, "one of tokens, rows and steps says how long the run is, and none is given."),
    ({"price": 2}, TOKENS,
        "one of tokens, rows and steps says how long the run is, and none is given."),
    ({"rows": 5, "steps": 5}, TOKENS,
        "rows and steps are given, and one of tokens, rows and steps says how long the run is."),
    ({"tokens": -1, "price": 0}, TOKENS, "tokens=-1, price=0: not a positive number."),
    ({"steps": math.inf, "price": "2"}, TOKENS, "steps=inf, price='2': not a positive number."),
    ({"steps": 0.5}, TOKENS, "steps=0.5: not a whole number."),
    ({"rows": True}, TOKENS, "rows=True: not a positive number."),
    ({"tokens": 9}, IMAGES,
        f"{NOT_KNOWN}: no array of the batch is one of integers [rows, tokens] ({SHAPES})."),
    ({"tokens": 9}, UNEQUAL, f'{NOT_KNOWN}: arrays differ ("source" 64, "target" 16).'),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "batch", "wanted"), INVALID)
def test_what_says_nothing_about_a_run(arguments, batch, wanted, planned):
    with pytest.raises(OptionError) as caught:
        planned(batch).cost(**arguments)
    assert caught.value.summary == wanted and caught.value.fix


def test_a_run_takes_the_average_of_its_steps(planned):
    """Workers that train alone in most steps: not all take as long as one that synchronizes."""
    plan = planned()
    (step,) = plan.period.kinds
    period = SyncPeriod((dataclasses.replace(step, count=9, seconds=step.seconds / 2), step))
    cost = dataclasses.replace(plan, period=period).cost(steps=10)
    assert (
        cost.hours.expected
        == pytest.approx(5.5 * step.seconds / 3600, rel=1e-9)
        != plan.cost(steps=10).hours.expected
    )
    assert "of a step with everything that a period of 10 steps synchronizes:" in str(
        dataclasses.replace(plan, period=period)
    )
    assert "of a step with everything" not in str(plan)


SCRIPT = """
import jax.numpy as jnp
import numpy as np
import optax
import spmd

model = spmd.FunctionalModel(lambda key: {"w": jnp.zeros((50, 8))}, lambda params, x: params["w"][x])
data = {"tokens": np.zeros((64, 16), np.int32)}
spmd.fit(model, data, loss=lambda model, batch: model(batch["tokens"]).mean((1, 2)), optimizer=optax.sgd(0.1), batch_size=32)
"""  # noqa: E501


def test_the_command_prints_the_cost(planned, tmp_path, monkeypatch, capsys):
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    command = ["plan", "train.py", "--target", "8xcpu", "--tokens", "1e6", "--price", "2.50"]
    assert main(command) == 0
    table = capsys.readouterr().out.partition("COST OF A RUN\n")[2]
    assert (
        table.startswith(
            '1e+06 tokens, 16 in each row of "tokens", in batches of 32 rows: 1,954 steps\n'
        )
        and "\nmoney " in table
    )
    assert main([*command, "--json"]) == 0
    cost = json.loads(capsys.readouterr().out)["cost"]
    capsys.readouterr()
    for name in ("cost.txt", "cost.html", "cost.html"):  # a report may be replaced
        assert main([*command, "--fixes", "--save", name]) == 0
        shown, said = capsys.readouterr()
        assert (
            shown.endswith("FIXES\nthe step fits: there is nothing to fix.\n")
            and said == f"wrote {name}\n"
        )
        saved = (tmp_path / name).read_text()
        assert (
            saved == shown
            if name == "cost.txt"
            else all(html.escape(line) in saved for line in table.splitlines())
        )
    assert (
        cost["steps"] == 1954
        and len(cost["money"]) == 3
        and cost["money"][0] == pytest.approx(2.5 * cost["device_hours"][0], rel=1e-9)
    )


def test_the_command_prints_what_the_script_costs_and_whether_it_fits_in_colour(
    planned, tmp_path, monkeypatch, capsys
):
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["plan", "train.py", "--target", "8xcpu"]) == 0
    shown = capsys.readouterr().out
    # one epoch of 64 rows
    assert "COST OF A RUN\nbatches of 32 rows: 2 steps\nhours " in shown and "device-hours" in shown
    assert (
        len(re.findall(r"^\x1b\[1;32mfits\x1b\[0m: ", shown, re.MULTILINE))
        == 2
        == shown.count("\x1b[0m")
    )
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(["plan", "train.py", "--target", "8xcpu"]) == 0
    assert capsys.readouterr().out == re.sub(r"\x1b\[[\d;]+m", "", shown)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (
            ["--price", "-2"],
            "--price -2.0: not a positive number.\n    fix: such as --tokens 1e12, --price 2.5.",
        ),
        (
            ["--price", "2"],
            "one of tokens, rows and steps says how long the run is, and none is given.",
        ),
        (["--tokens", "1e9", "--rows", "5"], "tokens and rows are given"),
        (
            ["--tokens", "1e9", "--explain", "w"],
            "the cost of a run is printed after the report, which --explain replaces.",
        ),
        (["--changes", "--json"], "--changes adds to the report, which --json replaces."),
        (
            ["--placements", "--json"],
            "--placements and --json both replace the report.\n    fix: one of the two.",
        ),
        (["--explain", "w", "--placements"], "--explain and --placements both replace the report."),
        (["--save", "r.pdf"], 'such as "r.html".'),
        (["--save", "/proc/none/r.html"], "the folder /proc/none cannot be created"),
        (["--save", "/proc/r.html"], "the file /proc/r.html cannot be written"),
    ],
)
def test_options_are_checked_before_the_script_runs(options, wanted, tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit(7)")
    assert main(["plan", str(script), "--target", "8xcpu", *options]) == 2
    err = capsys.readouterr().err
    assert wanted in err and "ended (7)" not in err
