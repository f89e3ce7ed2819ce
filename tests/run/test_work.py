"""Tokens per second, model FLOPs utilization, memory and waiting for data, in log records and in
the display.
"""

import dataclasses
import io
import re

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from rich.console import Console

import spmd
import spmd.api
from spmd.planner import target
from spmd.program_cache.counts import compilations
from spmd.run import step_metrics
from spmd.run.progress import Pace, make_progress
from spmd.run.work import PeakSeconds, Work, peak_memory, tokens_per_row
from spmd.train.objective import RATES, RESERVED

VOCABULARY, LENGTH = 11, 6


class Memory:
    """Keeps the records."""

    def __init__(self):
        self.records = []

    def write(self, record):
        self.records.append(record)

    def close(self):
        pass


def model():
    """Logits of the next token from an embedding: one product of 8 x VOCABULARY for each token."""

    def init(key):
        return {"embed": jnp.full((VOCABULARY, 8), 0.1), "head": jnp.full((8, VOCABULARY), 0.1)}

    return spmd.FunctionalModel(
        init, lambda params, tokens: params["embed"][tokens] @ params["head"]
    )


def text(rows=16):
    return np.arange(rows * LENGTH).reshape(rows, LENGTH).astype("int32") % VOCABULARY


def trained(log, data=None, **options):
    data = {"tokens": text(), "targets": text()} if data is None else data
    given = {
        "loss": spmd.losses.cross_entropy,
        "optimizer": optax.sgd(0.1),
        "batch_size": 8,
        "steps": 12,
        "log_every": 2,
    }
    return spmd.fit(model(), data, loggers=[log], **{**given, **options})


@pytest.mark.system
def test_records_have_tokens_per_second():
    log = Memory()
    trained(log, layout="fsdp", mesh={"data": 8})
    records = [record for record in log.records if "samples_per_second" in record]
    assert records
    for record in records:
        rounding = 0.05 * LENGTH + 0.05 + 1e-6  # of both rates, which records round to one decimal
        assert record["tokens_per_second"] == pytest.approx(
            LENGTH * record["samples_per_second"], abs=rounding
        )
        assert "mfu" not in record and "peak_memory" not in record  # of a CPU


@pytest.mark.sampled(quick=2)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_mfu_is_the_models_flops_over_the_peak_of_all_devices(monkeypatch, precision):
    h100 = target.load("h100")
    monkeypatch.setattr(spmd.api, "of_device", lambda kind: h100)
    monkeypatch.setattr(step_metrics, "peak_memory", lambda: 7)
    works, log = [], Memory()
    monkeypatch.setattr(
        spmd.api,
        "LoopParts",
        lambda **parts: works.append(parts["work"]) or spmd.run.config.LoopParts(**parts),
    )
    trained(log, layout="fsdp", mesh={"data": 8}, precision=precision)
    (work,) = works
    # a backward pass takes twice as many as the forward pass
    flops = 3 * 2 * LENGTH * 8 * VOCABULARY
    seconds = flops / (8 * h100.flops[precision])
    assert work.seconds == (seconds, seconds), "nothing is computed again"
    assert work.rates(1 / seconds) == {
        "tokens_per_second": pytest.approx(LENGTH / seconds, rel=1e-9),
        "mfu": 1.0,
        "hfu": 1.0,
    }
    last = log.records[-1]
    assert (
        last["mfu"] == pytest.approx(last["samples_per_second"] * seconds, abs=1e-4)
        and last["peak_memory"] == 7
    )


def test_the_peak_is_that_of_the_dtype_of_the_products(monkeypatch):
    h100, works = target.load("h100"), []
    monkeypatch.setattr(spmd.api, "of_device", lambda kind: h100)
    monkeypatch.setattr(
        spmd.api,
        "LoopParts",
        lambda **parts: works.append(parts["work"]) or spmd.run.config.LoopParts(**parts),
    )

    def apply(params, tokens):
        return (
            params["embed"].astype("bfloat16")[tokens] @ params["head"].astype("bfloat16")
        ).astype("float32")

    casting = spmd.FunctionalModel(model().init, apply)
    data = {"tokens": text(), "targets": text()}
    spmd.fit(
        casting,
        data,
        loss=spmd.losses.cross_entropy,
        optimizer=optax.sgd(0.1),
        batch_size=8,
        steps=1,
    )
    assert works[0].seconds.model == 3 * 2 * LENGTH * 8 * VOCABULARY / (8 * h100.flops["bfloat16"])


def deep():
    """Four layers, whose products but the first one of each are computed again under [remat]."""

    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.up, self.down = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 32, rngs=rngs)

        def __call__(self, x):
            return x + self.down(nnx.gelu(self.up(x)))

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.layers = spmd.nn.LayerStack([Layer(rngs) for _ in range(4)])

        def __call__(self, x):
            return self.layers(x)

    return Net(nnx.Rngs(0))


@pytest.mark.system
@pytest.mark.parametrize("resident", [False, True])
def test_hfu_counts_what_is_computed_again(monkeypatch, resident):
    slow = dataclasses.replace(target.load("h100"), flops={"float32": 1e6, "vector": 1e6})
    works, log = [], Memory()
    monkeypatch.setattr(spmd.api, "of_device", lambda kind: slow)
    monkeypatch.setattr(
        spmd.api,
        "LoopParts",
        lambda **parts: works.append(parts["work"]) or spmd.run.config.LoopParts(**parts),
    )
    layout = spmd.Layout(name="fsdp", mesh={"data": 8}, remat=spmd.Remat("nothing", ("layers/*",)))
    data = {"x": np.ones((64, 32), "float32"), "y": np.zeros((64, 32), "float32")}
    given = {
        "loss": spmd.losses.mean_squared_error,
        "optimizer": optax.sgd(1e-3),
        "steps": 8,
        "layout": layout,
        "batch_size": 16,
    }
    spmd.fit(
        deep,
        spmd.data.resident(data, steps_per_call=4) if resident else data,
        log_every=2,
        loggers=[log],
        **given,
    )
    (work,) = works
    if resident:
        assert work.seconds.executed == 0 < work.seconds.model and "hfu" not in log.records[-1], (
            "no program of one step was compiled"
        )
        return
    forward = 4 * 2 * 2 * 32 * 64 / (8 * slow.flops["float32"])
    assert work.seconds.model == 3 * forward and 3 * forward < work.seconds.executed <= 4 * forward
    assert log.records[-1]["hfu"] > log.records[-1]["mfu"] > 0
    before = compilations()
    assert work.measure() == work.seconds and compilations() - before == type(before)(0, 0, 0.0), (
        "reads the program that trains"
    )


def test_a_program_that_cannot_be_read_has_no_hfu(monkeypatch, caplog):
    slow, log = (
        dataclasses.replace(target.load("h100"), flops={"float32": 1e6, "vector": 1e6}),
        Memory(),
    )
    monkeypatch.setattr(spmd.api, "of_device", lambda kind: slow)
    monkeypatch.setattr(spmd.api, "parse", lambda text: {}["a line"])
    trained(log, layout="fsdp", mesh={"data": 8})
    assert log.records[-1]["mfu"] > 0 and "hfu" not in log.records[-1]
    assert [record.message for record in caplog.records] == [
        "HFU is not known: the compiled step cannot be read: KeyError: 'a line'"
    ]


def test_without_a_peak_there_is_no_mfu():
    assert Work(tokens=4).rates(2.0) == {"tokens_per_second": 8.0}
    assert Work().rates(2.0) == {}


TOKENS, IMAGES, LABELS = (
    np.zeros((8, 5), "int32"),
    np.zeros((8, 5), "float32"),
    np.zeros(8, "int32"),
)
BATCHES = {
    "a dict of tokens and targets": ({"tokens": TOKENS, "targets": TOKENS}, 5),
    "a dict of tokens and labels": ({"input_ids": TOKENS, "label": LABELS}, 5),
    "a pair of texts": ((TOKENS, TOKENS), 5),
    "integers with one label": ((TOKENS, LABELS), 0),
    "nested": ({"in": {"tokens": TOKENS}, "label": LABELS}, 5),
    "images": ({"image": IMAGES, "label": LABELS}, 0),
}


@pytest.mark.parametrize(("sample", "tokens"), BATCHES.values(), ids=BATCHES.keys())
def test_rows_of_text_are_known(sample, tokens):
    class Placed:
        objective = type("Objective", (), {"loss": spmd.losses.cross_entropy})

    program = type("Program", (), {"placed": Placed, "sample": sample})
    if not (isinstance(sample, dict) and "in" in sample):  # whose inputs the loss does not find
        assert tokens_per_row(program) == tokens
    Placed.objective.loss = lambda model, batch: 0.0  # which does not say what its inputs are
    assert tokens_per_row(program) == (tokens if isinstance(sample, dict) else 0)


def test_the_display_shows_them(monkeypatch):
    made = Console(file=io.StringIO(), force_terminal=True, width=150)
    monkeypatch.setattr("rich.console.Console", lambda *given, **options: made)
    monkeypatch.setattr(spmd.run.progress, "peak_memory", lambda: 3 << 30)
    display = make_progress("auto")
    display.start(0, 40)
    display.begin(Pace(0, 0.0))
    work = Work(tokens=100, measure=lambda: PeakSeconds(1e-2, 1.25e-2))
    for step, waited in ((10, 0.5), (20, 4.5)):
        display.update(step, 0, {"loss": 1.0}, Pace(32 * step, float(step), waited), work)
    display.close()
    first, second = dict.fromkeys(
        line for line in re.findall(r"epoch 1[^\r\n\x1b]*", made.file.getvalue())
    )
    assert (
        "3,200 tokens/s  MFU 32.0%  HFU 40.0%" in first
        and "waiting" not in first
        and "samples/s" not in first
    )
    assert "3,200 tokens/s  MFU 32.0%" in second
    assert "40% waiting for data  3.0 GiB per device" in second


def test_no_metric_may_have_the_name_of_a_rate():
    assert {*RATES} <= {*RESERVED}
    with pytest.raises(
        spmd.SpmdError, match=r'metric "mfu" must be a function .*, under another name'
    ):
        trained(Memory(), metrics={"mfu": spmd.metrics.accuracy})


def test_a_cpu_reports_no_memory():
    assert peak_memory() == 0
