"""Every example runs under every shipped layout, from its own command line."""

import ast
import importlib
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

import spmd
from spmd.base.tree import flatten

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]
LAYOUTS = (
    "data_parallel",
    "data_parallel_bf16",
    "fsdp",
    "zero1",
    "tensor_parallel",
    "fsdp_tensor_parallel",
)
# as parameters are placed, these are others of the list above
CODED = ("fsdp_bf16", "hierarchical_int8", "power_sgd")
SMALL = {
    "digits_cnn": {"channels": 8, "width": 16, "dropout": 0.1},
    "char_lstm": {"width": 16, "hidden": 16},
    "gpt": {"width": 16, "depth": 1, "heads": 2, "length": 16, "dropout": 0.1},
}


def example(name):
    return importlib.import_module(f"examples.{name}")


@pytest.fixture
def small(monkeypatch):
    """The example with a small model and little data."""

    def make(name):
        module = example(name)
        monkeypatch.setattr(
            module, "make_model", lambda: module.Model(**SMALL[name], rngs=nnx.Rngs(0))
        )
        train, test = (
            module.load_data()
            if name == "digits_cnn"
            else module.load_data(length=16, limit=20_000)
        )
        small_data = jax.tree.map(lambda x: x[:64], (train, test))
        monkeypatch.setattr(module, "load_data", lambda: small_data)
        return module

    return make


def runs():
    """One example goes through every layout in the fast suite, the others through one; the rest are
    in `make test-all`.
    """
    for name in SMALL:
        for layout in LAYOUTS:
            slow = layout != {"char_lstm": "zero1", "digits_cnn": "data_parallel_bf16"}.get(
                name, "fsdp_tensor_parallel"
            )
            yield pytest.param(name, layout, id=f"{name}-{layout}", marks=[pytest.mark.slow] * slow)


@pytest.mark.parametrize("name, layout", list(runs()))
def test_runs_under_every_layout(small, name, layout, capsys):
    mesh = "data=4,model=2" if "tensor" in layout else "data=8"
    result = small(name).main(
        ["--layout", layout, "--mesh", mesh, "--steps", "8", "--batch-size", "32"]
    )
    loss = result.history["loss"]
    assert len(loss) == 8 and loss[-1] < loss[0]
    assert "test loss" in capsys.readouterr().out

    def local_bytes(tree):
        return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))

    def global_bytes(tree):
        return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))

    params, moments = result.state.params, result.state.opt
    # the layout did something: parameters are sharded under all but these layouts; zero1 shards the
    # optimizer's moments
    assert (local_bytes(params) < 0.75 * global_bytes(params)) == (
        layout not in ("data_parallel", "data_parallel_bf16", "zero1")
    )
    assert (local_bytes(moments) < 0.75 * global_bytes(moments)) == (
        not layout.startswith("data_parallel")
    )


@pytest.mark.slow
def test_images_sharded_by_rows_and_columns(monkeypatch, capsys):
    module = example("spatial_cnn")
    monkeypatch.setattr(module, "make_model", lambda: module.Model(channels=4, rngs=nnx.Rngs(0)))
    result = module.main(["--steps", "12", "--batch-size", "16"])
    loss, out = result.history["loss"], capsys.readouterr().out
    assert len(loss) == 12 and loss[-1] < loss[0] and "test accuracy" in out
    assert (
        "device 0: rows 0:8, height 0:16, width 0:16" in out
        and "device 7: rows 8:16, height 16:32, width 16:32" in out
    )
    train, test = module.load_data()
    assert train["image"].shape == (416, 32, 32, 3) and set(test["label"]) == {0, 1}


@pytest.mark.slow
def test_convolutions_by_rows_and_dense_layers_by_features(small):
    result = small("digits_cnn").main(
        ["--layout", "conv_data_dense_model", "--steps", "8", "--batch-size", "32"]
    )
    assert result.history["loss"][-1] < result.history["loss"][0]
    assert {
        path
        for path, place in result.trainer.resolved.placements.items()
        if place.spec and any(place.spec)
    } == {
        "dense/kernel",
        "head/kernel",
    }


@pytest.mark.slow
def test_sequences_sharded_between_blocks(small):
    result = small("gpt").main(
        ["--layout", "sequence_parallel", "--steps", "8", "--batch-size", "32"]
    )
    assert result.history["loss"][-1] < result.history["loss"][0]


@pytest.mark.parametrize(
    "layout", [CODED[0], *(pytest.param(layout, marks=pytest.mark.slow) for layout in CODED[1:])]
)
def test_learns_under_every_codec_that_ships(small, layout, capsys):
    mesh = "node=2,data=4" if layout == "hierarchical_int8" else "data=8"
    result = small("gpt").main(
        ["--layout", layout, "--mesh", mesh, "--steps", "24", "--batch-size", "32"]
    )
    loss = result.history["loss"]
    assert len(loss) == 24 and loss[-1] < loss[0]
    assert "test loss" in capsys.readouterr().out
    residuals = [path for path in flatten(result.state.exchange) if path.endswith("/residual")]
    # power_sgd sends vectors as they are, fsdp_bf16 forgets what it rounds off
    some, every = layout == "power_sgd", layout != "fsdp_bf16"
    assert bool(residuals) == every and (
        len(residuals) == len(jax.tree.leaves(result.state.params))
    ) == (every and not some)


@pytest.mark.parametrize("mesh", ["data=8,model=1", "data=4,model=2", "data=2,model=4"])
@pytest.mark.parametrize("name", SMALL)
def test_usual_size_fits_every_layout(name, mesh):
    import optax

    for layout in (*LAYOUTS, "fsdp_bf16", "power_sgd"):
        trainer = spmd.Trainer(
            example(name).make_model,
            loss=spmd.losses.cross_entropy,
            optimizer=optax.sgd(0.1),
            mesh=mesh,
            layout=layout,
        )
        assert trainer.resolved.placements


@pytest.mark.parametrize(
    "path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name
)
def test_is_short(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert sum(isinstance(node, ast.stmt) for node in ast.walk(tree)) < 90


@pytest.mark.parametrize("name", ["char_lstm", "gpt"])
def test_text_is_split_into_windows(name):
    train, test = example(name).load_data(length=32, limit=50_000)
    for part in train, test:
        assert part["tokens"].shape == part["targets"].shape and part["tokens"].shape[1] == 32
        assert part["tokens"].min() >= 0 and part["tokens"].max() < 128
        np.testing.assert_array_equal(part["targets"][:, :-1], part["tokens"][:, 1:])
    assert 8 * len(test["tokens"]) < len(train["tokens"]) < 10 * len(test["tokens"])
    assert "import" in bytes(train["tokens"].ravel().astype(np.uint8)).decode("ascii")


def test_digits_are_split_once():
    train, test = example("digits_cnn").load_data()
    again, _ = example("digits_cnn").load_data()
    assert train["image"].shape == (1536, 8, 8, 1) and test["image"].shape == (261, 8, 8, 1)
    assert train["image"].max() == 1 and set(test["label"]) == set(range(10))
    np.testing.assert_array_equal(train["image"], again["image"])


@pytest.mark.parametrize("name", ["char_lstm", "gpt"])
def test_a_character_does_not_see_what_follows(name):
    sizes = {**SMALL[name], "dropout": 0.0} if name == "gpt" else SMALL[name]
    with nnx.use_eager_sharding(False):  # names are for layouts; here there is no mesh
        model = example(name).Model(**sizes, rngs=nnx.Rngs(0))
    tokens = np.arange(16)[None]
    changed = np.where(tokens < 10, tokens, tokens + 50)
    before, after = model(tokens), model(changed)
    np.testing.assert_allclose(before[:, :10], after[:, :10], atol=1e-6)
    assert np.abs(before[:, 10:] - after[:, 10:]).max(axis=-1).min() > 0


@pytest.fixture
def ways(monkeypatch):
    """The comparison of parameter servers with the given ways, or with all of them."""

    def make(names):
        module = example("parameter_server")
        monkeypatch.setattr(
            module,
            "WAYS",
            {
                name: server
                for name, server in module.WAYS.items()
                if name in (names or module.WAYS)
            },
        )
        return module

    return make


def some(*names):
    """Those ways in the fast suite, all in the slow one."""
    return pytest.mark.parametrize(
        "names", [names, pytest.param((), marks=pytest.mark.slow)], ids=["some", "all"]
    )


@some("2 spares", "asynchronous", "asynchronous, scaled")
def test_the_parameter_server_learns(names, ways, capsys):
    module = ways(names)
    results = module.main(["--workers", "0", "--epochs", "3"])
    assert (
        list(results) == list(module.WAYS)
        and len(results) == (len(names) or 8)
        and "mean staleness" in capsys.readouterr().out
    )
    accuracy = {name: result.history["eval_accuracy"][-1] for name, result in results.items()}
    seconds = {name: result.history["simulated_seconds"][-1] for name, result in results.items()}
    assert (
        accuracy["asynchronous, scaled"] > max(0.8, accuracy["asynchronous"])
        and accuracy["2 spares"] > 0.5
    )
    assert seconds["asynchronous"] < seconds["2 spares"]
    if not names:
        assert (
            accuracy["DiLoCo, every 8"] > 0.8
            and accuracy["elastic, every 8"] > 0.5
            and accuracy["synchronous"] > 0.5
        )
        assert seconds["2 spares"] < seconds["DiLoCo, every 8"] < seconds["synchronous"]


@pytest.mark.slow
@some("asynchronous, scaled")
def test_the_parameter_server_trains_the_lstm(names, ways, small, capsys):
    small("char_lstm")
    module = ways(names)
    # of one batch each
    results = module.main(["--model", "lstm", "--workers", "0", "--epochs", "8"])
    assert list(results) == list(module.WAYS) and "simulated s" in capsys.readouterr().out
    for result in results.values():
        loss = result.history["eval_loss"]
        # of 8 workers, but for 2 spares
        assert loss[-1] < loss[0] and 8 * 6 <= sum(result.history["gradients_applied"]) <= 8 * 8
