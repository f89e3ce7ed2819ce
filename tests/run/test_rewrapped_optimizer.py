"""A run resumes with other wrappers around its optimizer: what is inside keeps its state, and new
wrappers start new.
"""

import dataclasses
import json

import jax
import numpy as np
import optax
import pytest
from small import fit, host, linear, same

import spmd
from spmd.errors import CheckpointError
from spmd.optimizers import average_weights, scale_loss, skip_spikes
from spmd.run.rewrap_optimizer import wrappers_of

ADAM = optax.adam(0.05)
WRAPPED = {
    "none": (ADAM, lambda opt: opt),
    "average": (average_weights(ADAM, decay=0.8), lambda opt: opt.inner),
    "spikes": (skip_spikes(ADAM, window=4), lambda opt: opt.inner),
    "both": (skip_spikes(average_weights(ADAM, decay=0.8), window=4), lambda opt: opt.inner.inner),
    "scaled": (scale_loss(skip_spikes(ADAM, window=4), 2.0**10), lambda opt: opt.inner.inner),
    "two steps": (
        optax.MultiSteps(ADAM, 2).gradient_transformation(),
        lambda opt: opt.inner_opt_state,
    ),
    "finite": (optax.apply_if_finite(ADAM, 3), lambda opt: opt.inner_state),
}


def precision(name):
    return "float16" if name == "scaled" else "float32"


def trainer(name, **options):
    given = {
        "loss": spmd.losses.mean_squared_error,
        "layout": "fsdp",
        "mesh": "data=8",
        "precision": precision(name),
        **options,
    }
    return spmd.Trainer(linear(), optimizer=WRAPPED[name][0], **given)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of 4 steps: the folder, and the state."""
    made = {}

    def run(name):
        if name not in made:
            folder = tmp_path_factory.mktemp("run")
            result = fit(
                optimizer=WRAPPED[name][0],
                layout="fsdp",
                steps=4,
                checkpoint=folder,
                precision=precision(name),
            )
            made[name] = folder, host(result.state)
        return made[name]

    return run


@pytest.mark.sampled(quick=28, system=3)
@pytest.mark.parametrize("after", WRAPPED)
@pytest.mark.parametrize(
    "before", ["none", "both", "scaled", pytest.param("two steps", marks=pytest.mark.system)]
)
def test_state_inside_of_other_wrappers_is_restored(runs, before, after, caplog):
    folder, saved = runs(before)
    now = trainer(after)
    state = now.restore(folder)
    assert same(WRAPPED[after][1](state.opt), WRAPPED[before][1](saved.opt)) and same(
        state.params, saved.params
    )
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == jax.tree.map(
        lambda leaf: leaf.sharding, now.abstract_state
    )
    old, new = (
        {
            type(part).__name__: part
            for part in spmd.base.tree.nodes(opt)
            if hasattr(part, "_fields")
        }
        for opt in (saved.opt, state.opt)
    )
    first = host(WRAPPED[after][0].init(state.params))
    fresh = {
        type(part).__name__: part
        for part in spmd.base.tree.nodes(first)
        if hasattr(part, "_fields")
    }
    for kind in new:
        fields = {name for name in new[kind]._fields if not name.startswith("inner")}
        if kind in ("ScaleByAdamState", "EmptyState"):
            continue
        like = old.get(kind, fresh[kind])
        assert all(same(getattr(new[kind], field), getattr(like, field)) for field in fields), kind
    said = " ".join(record.message for record in caplog.records)
    assert ("starts new" in said) == bool(new.keys() - old.keys()) and (
        "is dropped" in said
    ) == bool(old.keys() - new.keys())


@pytest.mark.system
def test_run_with_wrappers_for_some_steps_matches_one_without(tmp_path):
    plain = fit(layout="fsdp", steps=8)
    fit(layout="fsdp", steps=4, checkpoint=tmp_path)
    rest = fit(
        optimizer=WRAPPED["both"][0], layout="fsdp", steps=6, checkpoint=tmp_path, resume=True
    )
    assert int(rest.state.opt.counted) == 2 and int(rest.state.opt.inner.updates) == 2, (
        "updates since"
    )
    last = fit(layout="fsdp", steps=8, checkpoint=tmp_path, resume=True)
    assert same(last.state, plain.state)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    changed = [record["changed"] for record in records if record.get("event") == "resumed"]
    around = "was put around the optimizer, and starts new; the state inside is restored"
    assert [f"{name} {around}" for name in ("skip_spikes", "average_weights")] == changed[0]
    gone = "is no longer around the optimizer, and its state is dropped"
    assert [f"{name} {gone}" for name in ("skip_spikes", "average_weights")] == changed[1]


def test_arrays_of_new_wrappers_are_not_those_of_the_parameters(runs):
    state = trainer("average").restore(runs("none")[0])
    average = {
        leaf.unsafe_buffer_pointer()
        for shard in state.opt.average["w"].addressable_shards
        for leaf in [shard.data]
    }
    assert average.isdisjoint(
        shard.data.unsafe_buffer_pointer() for shard in state.params["w"].addressable_shards
    )
    np.testing.assert_array_equal(state.opt.average["w"], state.params["w"])


@pytest.mark.system
def test_wrappers_change_with_the_layout(runs):
    folder, saved = runs("none")
    for layout in (
        "parameter_server",
        dataclasses.replace(spmd.Layout.load("fsdp"), memory=spmd.Memory(optimizer="host")),
    ):
        now = trainer("both", layout=layout)
        state = now.restore(folder)
        assert same(now.placed.states.unpacked(state.params), saved.params)
        assert same(now.placed.states.unpacked(state.opt.inner.inner[0].mu), saved.opt[0].mu)
        assert (
            same(now.placed.states.unpacked(state.opt.inner.average), saved.params)
            and int(state.opt.counted) == 0
        )


def test_another_optimizer_inside_is_refused(runs):
    other = spmd.Trainer(
        linear(),
        loss=spmd.losses.mean_squared_error,
        optimizer=average_weights(optax.sgd(0.1, momentum=0.9)),
    )
    with pytest.raises(CheckpointError) as raised:
        other.restore(runs("none")[0])
    text = str(raised.value)
    assert (
        "opt/inner/0/trace/w\n      saved nothing, wanted float32[8, 1]" in text
        and "opt/inner/0/mu/w" in text
    )
    assert "average/w" not in text and 'only="params"' in raised.value.fix


def test_only_entire_wrappers_are_known():
    state = {"opt/inner/0/mu/w", "opt/updates", "opt/average/w"}
    assert wrappers_of(state).prefixes == {"average_weights": "opt/"}
    assert (
        wrappers_of(state - {"opt/updates"}).prefixes
        == {}
        == wrappers_of(state | {"opt/more"}).prefixes
    )
    nested = {path.replace("opt/", "opt/inner/") for path in state} | {
        "opt/inner/updates",
        "opt/updates",
        "opt/average/w",
    }
    assert wrappers_of(nested).prefixes == {"average_weights": "opt/"}, (
        "the outer one of two of a kind"
    )
    assert wrappers_of(["opt/updates", "opt/average/w"]).inside == "opt/inner/", (
        "an optimizer without arrays, such as sgd"
    )
