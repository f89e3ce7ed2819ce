"""Sweeps that are refused, before anything is compiled."""

import jax
import numpy as np
import optax
import pytest
from swept import CLASSES, FEATURES, FEEDBACK, MODELS, RATES, Net, adam, labelled, options, sweep

import spmd
from spmd.errors import (
    CheckpointError,
    DataError,
    DeviceMemoryError,
    LayoutError,
    MeshError,
    ModelError,
    OptimizerError,
    OptionError,
)
from spmd.sweeps.scheduler import SweepRunner


def reads_its_rate(learning_rate):
    return optax.GradientTransformation(
        lambda params: float(learning_rate), lambda grads, state, params: (grads, state)
    )


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        ({"space": {}}, OptionError, "space={}"),
        ({"space": {"learning_rate": 0.1}}, OptionError, "learning_rate=0.1 is a"),
        ({"space": {"learning_rate": []}}, OptionError, "learning_rate=[]"),
        ({"space": {**RATES, "depth": [1]}}, OptionError, 'nothing takes "depth"'),
        (
            {"space": {"width": [4]}},
            OptionError,
            'optimizer takes "learning_rate", which is not in the space',
        ),
        (
            {"space": {**RATES, "width": spmd.uniform(4, 8)}},
            OptionError,
            "each trial would compile its own program",
        ),
        ({"space": {**RATES, "seed": [-1]}}, OptionError, "seed="),
        (
            {"search": "grid"},
            OptionError,
            'search="grid" wants values, and learning_rate is log_uniform(0.001, 0.1)',
        ),
        (
            {"search": "grid", "space": {"learning_rate": [0.1]}},
            OptionError,
            "trials=6, and the grid has 1",
        ),
        ({"search": "best"}, OptionError, "search='best'"),
        (
            {"search": spmd.Halving(rungs=5)},
            OptionError,
            "5 rungs of factor 3 want 81 trials and steps; there are 6 and 6",
        ),
        ({"trials": 0}, OptionError, "trials=0"),
        ({"keep": -1}, OptionError, "keep=-1"),
        ({"at_once": 0}, OptionError, "at_once=0"),
        ({"score": "eval_los"}, OptionError, 'score="eval_los"'),
        ({"mode": "least"}, OptionError, 'mode="least"'),
        ({"mesh": "data=8"}, MeshError, 'a sweep uses the axes "net" (trials)'),
        (
            {"mesh": "net=2,data=4", "batch_size": 30},
            DataError,
            "batch_size=30 does not divide by data=4",
        ),
        (
            {"layout": "fsdp", "mesh": "net=4,data=2"},
            LayoutError,
            "each trial of a sweep replicates its parameters",
        ),
        (
            {"layout": "parameter_server", "mesh": "net=4,data=2"},
            LayoutError,
            "keeps parameters on servers",
        ),
        ({"optimizer": optax.adam(1e-3)}, OptionError, "is not a function of hyper-parameters"),
        ({"optimizer": lambda learning_rate: 3}, OptimizerError, "optimizer=3"),
        (
            {
                "optimizer": lambda learning_rate: (
                    optax.adam(learning_rate) if learning_rate > 0 else None
                )
            },
            OptimizerError,
            "Floats are traced",
        ),
        ({"layout": "data_parallel_bf16", "mesh": "net=4,data=2"}, None, ""),
        (
            {"layout": spmd.Layout(optimizer=spmd.OptimizerState(matrices="owner"))},
            LayoutError,
            "[optimizer] matrices gives each matrix to a",
        ),
        (
            {"layout": FEEDBACK, "mesh": "net=4,data=2"},
            LayoutError,
            "codecs with a residual for each worker",
        ),
        (
            {"checkpoint": spmd.Checkpoint("never", best="loss")},
            OptionError,
            "a sweep uses only the path and `every` of a Checkpoint",
        ),
        ({"eval_data": [1]}, DataError, "eval_data: a sweep needs arrays, kept on the devices"),
        ({"epochs": 1, "steps": 3}, OptionError, "both set the length"),
        ({"resume": True}, OptionError, "resume=True without a checkpoint folder"),
        (
            {"space": {"learning_rate": [0.1, float("nan")]}},
            OptionError,
            "learning_rate=nan is no number that float32 has",
        ),
        (
            {"space": {"learning_rate": [1e39]}},
            OptionError,
            "learning_rate=1e+39 is no number that float32 has",
        ),
        (
            {"space": {"learning_rate": np.ones((2, 2))}},
            OptionError,
            "a value of learning_rate is an array, float64[2]",
        ),
        (
            {
                "space": {**RATES, "steps": [1]},
                "optimizer": lambda learning_rate, steps: adam(learning_rate),
            },
            OptionError,
            "a column of the",
        ),
        (
            {
                "search": "grid",
                "trials": None,
                "space": {"learning_rate": [0.1, 0.2], "seed": range(10**4)},
            },
            OptionError,
            "the grid has 20,000 combinations: 2 of learning_rate x 10000 of seed.\n    fix: "
            "trials=20000, if so many",
        ),
        (
            {"eval_data": {"x": labelled()["x"][:, :4], "y": labelled()["y"]}},
            DataError,
            "the data to evaluate does not fit: the loss fails on a batch of {x: float32[32, 4], "
            "y: int32[32]}: TypeError",
        ),
        ({"metrics": [spmd.metrics.accuracy]}, OptionError, "is not a dict"),
        ({"optimizer": reads_its_rate}, OptimizerError, "no float() of such a value"),
    ],
)
def test_sweep_refuses_bad_arguments_before_compiling(more, error, message):
    if error is None:  # beside one that cannot be
        assert len(sweep(**more, epochs=1).trials) == 6
        return
    with pytest.raises(error) as caught:
        sweep(**more)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: spmd.log_uniform(0, 1),
        lambda: spmd.uniform(2, 1),
        lambda: spmd.uniform(float("nan"), 1),
        lambda: spmd.uniform(0, 1e39),
    ],
)
def test_bounds_that_are_none(make):
    with pytest.raises(OptionError, match="the smaller one first"):
        make()
    assert spmd.uniform(np.float32(0.5), np.int64(1)) == spmd.uniform(0.5, 1)


class Same:
    """Two of these look alike."""

    def __init__(self, width):
        self.width = width

    def __repr__(self):
        return "Same()"


def test_values_that_only_look_alike_have_programs_of_their_own(monkeypatch, tmp_path):
    def shapes(self, *_):
        return [
            packed.placed.abstract_state.params["out"]["kernel"].shape
            for packed in self.programs.values()
        ]

    monkeypatch.setattr(SweepRunner, "run_rungs", shapes)
    monkeypatch.setitem(MODELS, "plain", lambda like, seed=0: Net(like.width, seed))
    more = {"search": "grid", "trials": None}
    assert sweep(space={"learning_rate": [0.1], "like": [Same(4), Same(8)]}, **more) == [
        (4, 3),
        (8, 3),
    ]
    with pytest.raises(ModelError) as caught:
        sweep(space={"learning_rate": [0.1], "like": [Same(4), Same(None)]}, **more)
    assert caught.value.__notes__ == ["of trial 1: learning_rate=0.10000000149011612, like=Same()"]
    monkeypatch.setattr(Same, "__repr__", object.__repr__)

    def nameless():
        """Its name holds `<locals>`."""

    nameless.width = 4
    for value in (Same(4), nameless):
        with pytest.raises(CheckpointError, match="has no unique name"):
            sweep(
                space={"learning_rate": [0.1], "like": [value]}, checkpoint=tmp_path / "new", **more
            )
    assert not list(tmp_path.iterdir())


@pytest.mark.system
def test_shapes_that_depend_on_the_seed(monkeypatch):
    monkeypatch.setitem(MODELS, "plain", lambda seed: Net(4 + seed, seed))
    with pytest.raises(
        ModelError,
        match=r"with seed=2 \(trial 1\) make_model gives \S+ float32\[6, 3\], and float32\[5, 3\] "
        r"with seed=1",
    ):
        sweep(space={"learning_rate": [0.1], "seed": [1, 2]}, search="grid", trials=None)


@pytest.mark.system
def test_sweep_beyond_device_memory_is_refused_with_a_fix_that_fits(monkeypatch):
    more = {
        "trials": 4,
        "epochs": 1,
        "keep": 1,
        "eval_data": None,
        "mesh": spmd.make_mesh("net=2", devices=jax.devices()[:2]),
    }
    # step, count and key; each parameter, and Adam's two of it
    state = 2 * 4 + 2 * 4 + 3 * 4 * ((FEATURES + 1) * 16 + 17 * CLASSES)
    data = 80 * (FEATURES + 1) * 4
    monkeypatch.setattr(SweepRunner, "run_rungs", lambda *_: "started")
    for limit, message in (
        (data - 1, "fix: fewer examples"),
        (data + state // 2, " of state and 2.8 KiB of data.\n    Each of 2 devices has 2 of them"),
        (data + 2 * state + 8192, " of temporaries.\n    Each of 2 devices has 2 of them"),
    ):
        monkeypatch.setattr(
            "spmd.sweeps.memory_check.memory_limit", lambda mesh, limit=limit: limit
        )
        with pytest.raises(DeviceMemoryError, match=r"^4 trials at once need ") as caught:
            sweep(**more)
        assert message in str(caught.value)
    assert "fix: at_once=2, 1 on each device" in str(caught.value)
    assert sweep(**more, at_once=2) == sweep(**more, check_memory=False) == "started"


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    notes, damaged = tmp_path / "notes.txt", tmp_path / "damaged"
    notes.write_text("mine")
    damaged.mkdir()
    (damaged / "sweep.json").write_text("{")
    for folder, message in (
        (tmp_path, "is not empty, and holds no sweep"),
        (notes, "cannot be created: "),
        (notes / "under", "cannot be created: "),
        (damaged, r"sweep\.json is damaged"),
    ):
        with pytest.raises(CheckpointError, match=message):
            sweep(checkpoint=folder, resume=True)
    assert notes.read_text() == "mine" and {path.name for path in tmp_path.iterdir()} == {
        "notes.txt",
        "damaged",
    }


@pytest.mark.parametrize("name", ["lr[0.1]", "a*", "what?", "back\\slash"])
def test_folder_whose_checkpoints_could_not_be_read_again(name, tmp_path):
    """Refused at the call: before the data, of which nothing is right here, and any file."""
    with pytest.raises(CheckpointError, match="could not be read again") as raised:
        spmd.sweep(
            None, None, checkpoint=tmp_path / name / "sweep", **options(space=None, optimizer=None)
        )
    assert f'"{tmp_path / name}"' in raised.value.fix
    assert not list(tmp_path.iterdir())
