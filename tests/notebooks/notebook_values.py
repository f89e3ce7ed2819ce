"""What the prose of the notebooks says, as checks of the values of their cells; `test_notebooks.py`
runs them in the kernel.
"""

import re
import types
from pathlib import Path

import numpy as np


def layouts(cells):
    loss, params, moments, sent, difference = (
        getattr(cells, name) for name in ("loss", "params", "moments", "sent", "difference")
    )

    def relative(values, layout):
        return values[layout] / values["data_parallel"]

    assert (
        max(difference.values()) < 1e-5
        and loss["data_parallel"][-1] < 0.5 * loss["data_parallel"][0]
    )
    assert (
        params["zero1"] == params["data_parallel"]
        and relative(moments, "zero1") < 0.15
        and abs(relative(sent, "zero1") - 1) < 0.02
    )
    assert relative(params, "fsdp") < 0.15 and 1.2 < relative(sent, "fsdp") < 1.3
    assert (
        abs(relative(sent, "parameter_server") - 1) < 0.02 and difference["parameter_server"] == 0
    )
    assert (
        0.5 < relative(params, "tensor_parallel") < 0.6
        and params["fsdp_tensor_parallel"] < 1.2 * params["fsdp"]
    )


def model_parallel(cells):
    runs, ways, stages = cells.runs, cells.ways, cells.STAGES
    loss = {name: np.array(run.history["loss"]) for name, run in runs.items()}
    ran = {name: next(iter(runs[name].trainer.schedules.values())) for name in ways}
    kept = {name: max(one.in_flight) for name, one in ran.items()}
    assert all(abs(ran[name].bubble - cells.formula[name]) < 1e-9 for name in ways)
    assert all(abs(loss[name] - loss["one device"]).max() < 1e-4 for name in ways)
    assert loss["gpipe"][-4:].mean() < loss["gpipe"][:4].mean()
    kernel = runs["gpipe"].state.params["blocks"]["layers"]["up"]["kernel"]
    assert np.prod(kernel.sharding.shard_shape(kernel.shape)) * stages == kernel.size
    assert (
        kept["1f1b"] == stages < kept["gpipe"] == 8
        and ran["1f1b"].ticks == ran["gpipe"].ticks == 22
    )
    assert ran["circular"].ticks == 38 and ran["circular"].bubble < ran["gpipe"].bubble
    assert abs(loss["LSTM, wavefront"] - loss["LSTM, one device"]).max() < 1e-4
    assert cells.wave.forward.ticks == 16 // cells.CHUNK + stages - 1 == 11


def on_the_wire(cells):
    sent, last, loss = cells.sent, cells.last, cells.loss
    saves, costs = (
        {name: values[name] / values["exact"] for name in cells.WAYS} for values in (sent, last)
    )
    assert 0.5 <= saves["bfloat16"] < 0.51 and 0.25 < saves["int8"] < 0.26
    assert max(abs(costs[name] - 1) for name in ("bfloat16", "int8")) < 0.02
    assert (
        saves["top 2 %"] < 0.05
        and 1 < costs["top 2 %"] < 1.1
        and last["top 2 %"] < 0.5 * loss["exact"][0]
    )
    assert 2.5 < costs["top 2 %, rest lost"] < 3.5
    assert saves["power_sgd"] < 0.08 and costs["power_sgd"] < 1.05
    norms = cells.runs["top 2 %"].history["residual_norm"]
    assert 10 < max(norms) < 12.5 and 0.4 < norms[-1] / max(norms) < 0.6


def parameter_server(cells):
    final = {name: accuracy[-5:].mean() for name, (_, accuracy) in cells.curves.items()}
    took = {name: seconds[-1] for name, (seconds, _) in cells.curves.items()}
    first = {
        name: seconds[np.argmax(accuracy >= cells.TARGET)]
        for name, (seconds, accuracy) in cells.curves.items()
    }
    reached = {name: accuracy.max() >= cells.TARGET for name, (_, accuracy) in cells.curves.items()}
    assert (
        0.6 < took["2 spares"] / took["synchronous"] < 0.72
        and final["2 spares"] > final["synchronous"] - 0.03
    )
    assert final["asynchronous"] < 0.3 and not reached["asynchronous"]
    assert final["asynchronous, scaled"] > 0.9 and final["asynchronous, rate / 8"] > 0.9
    assert first["asynchronous, scaled"] < min(
        first["2 spares"], first["synchronous"], first["DiLoCo, every 10"]
    )
    assert cells.sent_bytes["DiLoCo, every 10"] < 0.11 * cells.sent_bytes["synchronous"]
    assert final["DiLoCo, every 10"] > final["synchronous"] - 0.05
    synchronous = cells.accounts["synchronous"]
    assert cells.share(synchronous.compute_seconds, synchronous) < 0.5
    assert abs(cells.mean_staleness(cells.accounts["asynchronous"]) - 16) < 1


def plan_before_you_rent(cells):
    import spmd

    assert not cells.first.fits and cells.fixes[-1].fits
    assert cells.best.timeline.seconds <= cells.fixes[-1].plan.timeline.seconds
    assert spmd.Layout.load(cells.path) == cells.search.layout
    losses = cells.result.history["loss"]
    assert losses[-1] < 0.5 * losses[0]


def sweep_and_ensemble(cells):
    scores = sorted(trial.score for trial in cells.results.trials)
    alone = [member["log loss"] for member in cells.evaluation.members.values()]
    together = cells.evaluation.ensemble["log loss"]
    assert cells.results.programs == 2 and scores[-1] > 2 * scores[0]
    assert together < np.mean(alone) and together < min(alone)
    spent = [
        sum(len(trial.history) for trial in found.trials) for found in (cells.halved, cells.results)
    ]
    assert spent[0] < 0.5 * spent[1] and cells.rank <= 3
    assert abs(cells.winner.score - cells.before[cells.winner.number].score) < 1e-4


def finetune(cells):
    losses = cells.result.history["loss"]
    assert cells.samples.written[0].text != "moo" and cells.samples.written[-1].text == "moo"
    assert losses[-1] < 0.1 * losses[0] and cells.answers == list(cells.sounds.values())
    assert {path.name for path in cells.folder.iterdir()} == {
        path.name for path in cells.tuned.iterdir()
    }


def character_model(cells):
    first, difference, scores = cells.loss["one device"][0], cells.difference, cells.scores
    # Above zero: the two programs are not the same one.
    assert 0 < difference.max() < 1e-4 and difference[0] < 1e-5
    assert abs(first - np.log(cells.SYMBOLS)) < 0.5
    assert cells.loss["four devices"][-1] < 0.6 * first
    kernel = cells.result.state.params["stack"]["cells"]["dense_h"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape)[0] == 1 and kernel.shape[0] == cells.LAYERS
    assert cells.wave.forward.ticks == cells.chunks + cells.LAYERS - 1 < cells.chunks * cells.LAYERS
    networks = [scores["one device, plain Flax"], scores["four devices, spmd"]]
    assert abs(networks[0] - networks[1]) < 1e-3
    assert max(networks) < scores["counts, order 1"]
    assert len(cells.characters) == 600 and max(cells.characters) < cells.SYMBOLS


CHECKS = {
    "01_layouts": layouts,
    "02_model_parallel": model_parallel,
    "03_gradients_on_the_wire": on_the_wire,
    "04_parameter_server": parameter_server,
    "05_plan_before_you_rent": plan_before_you_rent,
    "06_sweep_and_ensemble": sweep_and_ensemble,
    "08_finetune_an_open_model": finetune,
    "09_character_model": character_model,
}


def check(notebook: str, values: dict) -> None:
    """Fail unless the values in a notebook's namespace are what its prose says; other notebooks are
    checked by what they print.
    """
    if notebook in CHECKS:
        CHECKS[notebook](types.SimpleNamespace(**values))


def small_target(folder: Path) -> str:
    """Four L4s with so little memory that a small model does not fit either, and none that
    libraries use beside it.
    """
    from spmd.planner.target import shipped

    text = re.sub(r"^\[overhead\].*\n(.+\n)*", "", shipped()["l4"].read_text(), flags=re.MULTILINE)
    path = folder / "small.toml"
    path.write_text(
        re.sub(r"^memory = \S+", f"memory = {12 * 2**20}", text, count=1, flags=re.MULTILINE)
    )
    return f"4x{path}"
