"""Export: a trained model as a folder; read again it says the same, also where nothing of its code
is.
"""

import dataclasses
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from trained import KINDS, by_hand, says_what, train, untrained

import spmd
from spmd.errors import DataError, ExportError, MissingExtraError, OptionError
from spmd.inference.exporter import _state_as_written
from spmd.inference.forward import forward_of
from spmd.run.manifest import MANIFEST_FILE, write_manifest
from tests.processes import environment

ROOT = Path(spmd.__file__).parent.parent
ROWS = (1, 7, 128)


@pytest.fixture(scope="module")
def results(digits):
    return {kind: train(kind, digits[0]) for kind in KINDS}


@pytest.fixture(scope="module")
def folders(results, tmp_path_factory):
    """Each of them, exported."""
    place = tmp_path_factory.mktemp("exported")
    return {kind: result.export(place / kind).folder for kind, result in results.items()}


@pytest.fixture
def copied(folders, tmp_path):
    """A copy of one, to be harmed."""
    place = tmp_path / "model"
    place.mkdir()
    for path in folders["functional"].iterdir():
        (place / path.name).write_bytes(path.read_bytes())
    return place


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_rows_as_the_trained_model(results, folders, digits, kind):
    loaded, images = spmd.load_exported(folders[kind]), digits[1]["image"]
    wanted = results[kind].predict(images)
    assert wanted.std() > 0.1, "a model that says something"
    for rows in ROWS:
        outputs = loaded(images[:rows])
        assert isinstance(outputs, jax.Array) and outputs.shape == (rows, 10)
        # another batch size, other sums
        np.testing.assert_allclose(outputs, wanted[:rows], atol=2e-6)
    # 297 rows, the last chunk is short
    chunked = loaded.predict(jnp.asarray(images), batch_size=128)
    assert isinstance(chunked, np.ndarray) and chunked.shape == (297, 10)
    np.testing.assert_allclose(chunked, wanted, atol=2e-6)


ALONE = """
import sys
import numpy as np
import spmd
assert not [name for name in sys.modules if name in ("trained", "digits_cnn")]
images = np.load(sys.argv[1])
outputs = {}
for folder in sys.argv[3:]:
    loaded = spmd.load_exported(folder)
    outputs |= {f"{folder}:{rows}": np.asarray(loaded(images[:rows])) for rows in (1, 7, 128)}
np.savez(sys.argv[2], **outputs)
"""


@pytest.mark.system
def test_another_process_that_has_no_code_says_the_same_to_the_bit(folders, digits, tmp_path):
    images = digits[1]["image"]
    np.save(tmp_path / "images.npy", images)
    words = [
        str(tmp_path / "images.npy"),
        str(tmp_path / "outputs.npz"),
        *map(str, folders.values()),
    ]
    done = subprocess.run(
        [sys.executable, "-c", ALONE, *words],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    with np.load(tmp_path / "outputs.npz") as outputs:
        assert len(outputs) == len(KINDS) * len(ROWS)
        for folder in folders.values():
            loaded = spmd.load_exported(folder)
            for rows in ROWS:
                assert np.array_equal(
                    outputs[f"{folder}:{rows}"], np.asarray(loaded(images[:rows]))
                )


def test_weights_are_arguments_and_not_in_the_program(tmp_path):
    model = spmd.FunctionalModel(
        lambda key: {"w": jax.random.normal(key, (400, 300))}, lambda params, x: x @ params["w"]
    )
    trainer = spmd.Trainer(model, loss=spmd.losses.mean_squared_error, optimizer=optax.sgd(0.1))
    state = trainer.init({"x": np.ones((8, 400), np.float32), "y": np.ones((8, 300), np.float32)})
    folder = spmd.export(trainer, state, tmp_path / "model").folder
    assert (
        (folder / "weights.npz").stat().st_size
        > 480_000
        > 40 * (folder / "program.bin").stat().st_size
    )
    again = spmd.export(trainer, state, tmp_path / "again").folder
    assert (folder / "weights.npz").read_bytes() == (again / "weights.npz").read_bytes(), (
        "the same weights, the same file"
    )


def test_what_stands_beside_it(results, folders):
    about = json.loads((folders["functional"] / "model.json").read_text())
    assert about["inputs"] == {"": ["float32", None, 8, 8, 1]} and about["outputs"] == {
        "": ["float32", None, 10]
    }
    assert (
        about["step"] == 4
        and about["platforms"] == ["cpu"]
        and about["batch"] is None
        and about["versions"]["jax"] == jax.__version__
    )
    assert spmd.Layout.load("data_parallel").to_toml() == about["layout"]
    assert [(entry["path"], entry["dtype"], entry["shape"]) for entry in about["arrays"]] == [
        ("params/bias", "bfloat16", [10]),
        ("params/one", "float32", [64, 32]),
        ("params/two", "float32", [32, 10]),
    ]
    loaded = spmd.load_exported(folders["functional"])
    for trained, read in zip(
        jax.tree.leaves(results["functional"].state.params), loaded.arrays, strict=True
    ):
        assert trained.dtype == read.dtype and np.array_equal(np.asarray(trained), np.asarray(read))


def test_export_gathers_sharded_arrays(digits, tmp_path):
    trainer, state = untrained("functional", digits[0], mesh="data=8", layout="fsdp")
    assert not state.params["one"].sharding.is_fully_replicated
    loaded = spmd.load_exported(spmd.export(trainer, state, tmp_path / "model").folder)
    for trained, read in zip(jax.tree.leaves(state.params), loaded.arrays, strict=True):
        assert (
            np.array_equal(np.asarray(trained), np.asarray(read))
            and len(read.sharding.device_set) == 1
        )
    np.testing.assert_allclose(
        loaded.predict(digits[1]["image"]), trainer.predict(state, digits[1]["image"]), atol=2e-6
    )


@pytest.mark.system
def test_what_servers_have_packed_is_written_as_the_model_has_it(digits, tmp_path):
    trainer, state = untrained("functional", digits[0], mesh="data=8", layout="parameter_server")
    assert state.params["one"].shape != (64, 32), "rows of servers"
    report = spmd.export(trainer, state, tmp_path / "model", weights="int8", check=digits[1])
    assert [stored.path for stored in report.arrays] == ["params/bias", "params/one", "params/two"]
    exact, small = (
        spmd.load_exported(folder)
        for folder in (spmd.export(trainer, state, tmp_path / "exact").folder, report.folder)
    )
    bias, one, two = exact.arrays

    def start(key):
        return {"one": jnp.asarray(by_hand(one)), "two": jnp.asarray(by_hand(two)), "bias": bias}

    plain, rounded = untrained(
        spmd.FunctionalModel(start, KINDS["functional"]().apply), digits[0], mesh="data=8"
    )
    same = spmd.load_exported(spmd.export(plain, rounded, tmp_path / "by hand").folder)
    says_what(small, same, exact, digits[1]["image"])
    assert (
        report.after == plain.evaluate(rounded, digits[1])
        and report.after["loss"] != report.before["loss"]
    )


@pytest.mark.system
def test_bfloat16_as_it_was_trained(digits, tmp_path):
    mesh = spmd.make_mesh("data=1", devices=jax.devices()[:1])
    trainer, state = untrained("nnx", digits[0], precision="bfloat16", mesh=mesh)
    loaded = spmd.load_exported(spmd.export(trainer, state, tmp_path / "model").folder)
    predictions = loaded.predict(digits[1]["image"])
    assert predictions.dtype == jnp.bfloat16 and all(
        leaf.dtype != jnp.bfloat16 for leaf in loaded.arrays
    )
    assert np.array_equal(predictions, trainer.predict(state, digits[1]["image"]))
    full, same = untrained("nnx", digits[0], mesh=mesh)
    assert not np.array_equal(
        predictions, full.predict(same, digits[1]["image"]).astype(jnp.bfloat16)
    ), "rounded on the way, not at the end"


def test_a_program_for_other_platforms_is_made_here(results, tmp_path):
    both = results["functional"].export(tmp_path / "both", platforms=("cpu", "cuda")).folder
    assert spmd.load_exported(both)(np.ones((2, 8, 8, 1), np.float32)).shape == (2, 10)
    cuda = results["functional"].export(tmp_path / "cuda", platforms=("cuda",)).folder
    with pytest.raises(
        ExportError,
        match=r"was exported for cuda; this is cpu\.\n    fix: export\(\.\.\., platforms=\('cuda', "
        r"'cpu'\)\)",
    ):
        spmd.load_exported(cuda)
    with pytest.raises(OptionError, match=r"platforms: 'gpu'\.\n    fix: of cpu, cuda, rocm, tpu"):
        results["functional"].export(tmp_path / "gpu", platforms=("gpu",))


def pooled(params, x):
    return x.reshape(4, -1, 4).mean(0).repeat(4, 0) @ params["w"]


def test_export_suggests_batch_for_model_that_needs_its_rows(tmp_path):
    model = spmd.FunctionalModel(lambda key: {"w": jnp.ones((4, 2))}, pooled)
    trainer = spmd.Trainer(
        model, loss=spmd.losses.mean_squared_error, optimizer=optax.sgd(0.1), mesh="data=8"
    )
    batch = {"x": np.arange(64, dtype=np.float32).reshape(16, 4), "y": np.ones((16, 2), np.float32)}
    state = trainer.init(batch)
    with pytest.raises(
        ExportError,
        match=r"(?s)for any number of rows: InconclusiveDimensionOperation: .*fix: batch=16, or "
        r"another",
    ):
        spmd.export(trainer, state, tmp_path / "model")
    assert not list(tmp_path.iterdir())
    loaded = spmd.load_exported(spmd.export(trainer, state, tmp_path / "model", batch=16).folder)
    assert loaded.batch == 16 and np.array_equal(
        loaded(batch["x"]), pooled({"w": jnp.ones((4, 2))}, batch["x"])
    )
    assert loaded.predict(np.ones((19, 4), np.float32)).shape == (19, 2), (
        "in two chunks, the second one padded"
    )


def test_inputs_are_those_of_the_loss_or_are_given(tmp_path):
    model = spmd.FunctionalModel(
        lambda key: {"w": jnp.ones((4, 2))},
        lambda params, inputs: inputs["a"] @ params["w"] + inputs["b"],
    )

    def loss(model, batch):
        return jnp.square(model({"a": batch["a"][:, 1:], "b": batch["b"]}) - batch["y"]).mean(1)

    batch = {
        "a": np.ones((8, 5), np.float32),
        "b": np.ones((8, 2), np.float32),
        "y": np.ones((8, 2), np.float32),
    }
    trainer = spmd.Trainer(model, loss=loss, optimizer=optax.sgd(0.1))
    loaded = spmd.load_exported(
        spmd.export(trainer, trainer.init(batch), tmp_path / "model").folder
    )
    inputs = {"a": np.ones((3, 4), np.float32), "b": np.ones((3, 2), np.float32)}
    assert loaded(inputs).tolist() == [[5.0, 5.0]] * 3
    unseen = spmd.Trainer(model, loss=loss, optimizer=optax.sgd(0.1))
    with pytest.raises(
        OptionError,
        match=r"the model's inputs are not known before the first batch\.\n    fix: inputs=",
    ):
        spmd.export(unseen, unseen.init(), tmp_path / "unseen")
    assert spmd.load_exported(
        spmd.export(unseen, unseen.init(), tmp_path / "unseen", inputs=inputs).folder
    )(inputs).shape == (3, 2)

    def rowwise(model, batch):
        return jax.vmap(lambda a, b: model({"a": a[1:], "b": b}).sum())(batch["a"], batch["b"])

    strange = spmd.Trainer(model, loss=rowwise, optimizer=optax.sgd(0.1))
    with pytest.raises(
        OptionError,
        match=r"calls it 1 times, not always with one array or tree of all rows\.\n    fix: "
        r"inputs=",
    ):
        spmd.export(strange, strange.init(batch), tmp_path / "strange")


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (
            np.ones((2, 8, 8), np.float32),
            r"the inputs are float32\[2, 8, 8\]; the model takes float32\[rows, 8, 8, 1\]",
        ),
        (
            np.ones((2, 8, 8, 1), np.int32),
            r"takes float32\[rows, 8, 8, 1\]\.\n    fix: astype\('float32'\)",
        ),
        (
            {"image": np.ones((2, 8, 8, 1), np.float32)},
            r"the inputs are image float32\[2, 8, 8, 1\]; the model takes",
        ),
        (np.ones((0, 8, 8, 1), np.float32), r"0 rows"),
        (np.float32(1), r"no dim 0"),
        (
            [[[[1.0]] * 8] * 8] * 2,
            r"the inputs are a list; the model takes float32\[rows, 8, 8, 1\]\.\n    fix: "
            r"numpy\.asarray",
        ),
    ],
    ids=["shape", "dtype", "tree", "no rows", "scalar", "list"],
)
def test_inputs_that_do_not_fit(folders, inputs, words):
    loaded = spmd.load_exported(folders["functional"])
    for call in (loaded, loaded.predict):
        with pytest.raises(DataError, match=words):
            call(inputs)


def harm(place, kind):
    if kind == "a bit of the weights":
        data = bytearray((place / "weights.npz").read_bytes())
        data[len(data) // 2] ^= 1
        (place / "weights.npz").write_bytes(data)
    elif kind == "no program":
        (place / "program.bin").unlink()
    elif kind == "no manifest":
        (place / MANIFEST_FILE).unlink()
    elif kind == "a list":
        (place / "model.json").write_text("[]")
    elif kind in ("weights truncated", "an entry less"):
        about = json.loads((place / "model.json").read_text())
        del about["platforms" if kind == "an entry less" else "step"]
        (place / "model.json").write_text(json.dumps(about))
        (place / "weights.npz").write_bytes(
            (place / "weights.npz").read_bytes()[: -1 if kind == "an entry less" else 200]
        )
        (place / MANIFEST_FILE).unlink()
        write_manifest(place)
    elif kind == "compressed":
        with zipfile.ZipFile(place / "weights.npz") as file:
            arrays = {name: file.read(name) for name in file.namelist()}
        with zipfile.ZipFile(place / "weights.npz", "w", zipfile.ZIP_DEFLATED) as file:
            for name, content in arrays.items():
                file.writestr(name, content)
        (place / MANIFEST_FILE).unlink()
        write_manifest(place)
    elif kind == "nothing":
        (place / "model.json").unlink()
    else:
        about = json.loads((place / "model.json").read_text())
        (place / "model.json").write_text(json.dumps({**about, "format": 2}))
        (place / MANIFEST_FILE).unlink()
        write_manifest(place)


@pytest.mark.parametrize(
    ("kind", "words"),
    {
        "a bit of the weights": r"is damaged: weights\.npz is not what was written\.\n    fix: "
        r"export it again",
        "no program": r"is damaged: program\.bin is missing",
        "no manifest": r"is damaged: it has no manifest",
        "weights truncated": r"is damaged: weights\.npz does not hold what model\.json says: "
        r"BadZipFile",
        "compressed": r"is damaged: weights\.npz does not hold .*: ValueError: .*\.npy is "
        r"compressed, which "
        r"no export is",
        "an entry less": r"is damaged: model\.json lacks platforms\.\n    fix: export it again",
        "a list": r"is damaged: model\.json cannot be read",
        "nothing": r"is not an exported model: it has no model\.json",
        "of tomorrow": r"has format 2; this version reads 1\.\n    fix: the version of spmd that "
        r"wrote it",
    }.items(),
)
def test_a_folder_that_cannot_be_read(copied, kind, words):
    assert spmd.load_exported(copied).batch is None
    harm(copied, kind)
    with pytest.raises(ExportError, match=words):
        spmd.load_exported(copied)


def test_a_folder_that_holds_something_is_left_as_it_is(results, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine").write_text("x")
    with pytest.raises(ExportError, match=r"model is not empty\.\n    fix: another folder"):
        results["functional"].export(tmp_path / "model")
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "mine"]
    (tmp_path / "model" / "mine").unlink()
    results["functional"].export(tmp_path / "model")
    assert {path.name for path in tmp_path.iterdir()} == {"model"}
    with pytest.raises(ExportError, match="is not empty"):
        results["functional"].export(tmp_path / "model")


@pytest.mark.parametrize("where", ["write_manifest", "Writer.add"])
def test_what_cannot_be_written_leaves_nothing(results, tmp_path, monkeypatch, where):
    def fails(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(f"spmd.inference.exporter.{where}", fails)
    with pytest.raises(ExportError, match=r"could not be written: .*No space left on device"):
        results["functional"].export(tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_options_that_cannot_be_meant(results, digits, tmp_path):
    for options, words in (
        ({"weights": "int4"}, r'weights=\'int4\'\.\n    fix: did you mean "int8"'),
        ({"batch": 0}, r"batch=0\.\n    fix: a positive number of rows"),
        ({"check": digits[1]}, r'with weights="exact": exact weights have no error'),
    ):
        with pytest.raises(OptionError, match=words):
            results["functional"].export(tmp_path / "model", **options)
    assert not list(tmp_path.iterdir())


def test_the_extra_is_named(results, folders, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "flatbuffers", None)
    for call in (
        lambda: results["functional"].export(tmp_path / "model"),
        lambda: spmd.load_exported(folders["functional"]),
    ):
        with pytest.raises(MissingExtraError, match=re.escape("pip install '.[export]'")):
            call()


@pytest.mark.system
def test_int8_is_a_quarter_of_the_bytes_and_says_what_it_lost(digits, tmp_path):
    train_data, test_data = digits
    wide = spmd.FunctionalModel(
        lambda key: {
            "one": jax.random.normal(key, (64, 512)) / 8,
            "two": jax.random.normal(jax.random.fold_in(key, 1), (512, 10)) / 23,
            "bias": jnp.zeros(10),
        },
        lambda params, x: (
            jax.nn.relu(x.reshape(x.shape[0], -1) @ params["one"]) @ params["two"] + params["bias"]
        ),
    )
    result = train(wide, train_data, steps=60)
    exact = result.export(tmp_path / "exact")
    small = result.export(tmp_path / "int8", weights="int8", check=test_data)
    assert exact.weights_bytes / small.weights_bytes > 3.6
    assert small.before == result.evaluate(test_data) and small.before["accuracy"] > 0.85
    assert (
        abs(small.after["accuracy"] - small.before["accuracy"]) <= 0.005
        and small.after["loss"] != small.before["loss"]
    )
    loaded, images = spmd.load_exported(small.folder), test_data["image"]
    assert [stored.int8 for stored in small.arrays] == [False, True, True]
    assert loaded.arrays[1][0].dtype == np.int8, "the program is given int8"
    params = {
        name: leaf if name == "bias" else jnp.asarray(by_hand(leaf))
        for name, leaf in result.state.params.items()
    }
    rounded = dataclasses.replace(result.state, params=params)
    same = spmd.load_exported(spmd.export(result.trainer, rounded, tmp_path / "by hand").folder)
    says_what(loaded, same, spmd.load_exported(exact.folder), images)
    assert small.after == result.trainer.evaluate(rounded, test_data)
    for stored, name in zip(small.arrays, ("bias", "one", "two"), strict=True):
        values = np.asarray(result.state.params[name])
        bound = np.abs(values).max(0) / 127 / 2 if stored.int8 else 0
        assert stored.max_error <= np.max(bound) * 1.0001 and (stored.max_error > 0) == stored.int8
        assert 0 <= stored.relative_error < 0.01
    assert re.search(
        r": 3 arrays, a file of [\d.]+ KiB with [\d.]+ (Ki)?B of weights and a header for each "
        r"array$",
        str(exact),
    )
    assert re.search(
        r"3 arrays, 2 of them as int8, .*\n  largest error: params/\w+, 0\.\d+% of its norm\n  "
        r"loss .* -> ",
        str(small),
    )


PROCESSES = """
import sys
import jax, numpy as np, optax, spmd
from spmd.errors import ExportError
spmd.join()
start = lambda key: {"w": jax.random.normal(key, (64, 8)), "b": jax.numpy.ones(64)}
model = spmd.FunctionalModel(start, lambda params, x: (x + params["b"]) @ params["w"])
data = np.ones((32, 64), np.float32), np.ones((32, 8), np.float32)
kind = {"loss": spmd.losses.mean_squared_error, "optimizer": optax.sgd(0.01), "progress": False}
result = spmd.fit(model, data, batch_size=16, steps=2, layout="fsdp", mesh="data=-1", **kind)
assert not any(result.state.params[name].is_fully_replicated for name in "wb")
print("REPORT", str(result.export(sys.argv[1] + "/model", weights="int8", check=data)).replace(chr(10), "|"), flush=True)
try:
    result.export(sys.argv[1] + "/model")
except ExportError as error:
    print("ERROR", str(error).splitlines()[0], flush=True)
"""  # noqa: E501


@pytest.mark.slow
def test_several_processes_write_one_folder(tmp_path):
    (tmp_path / "job.py").write_text(PROCESSES)
    command = [
        sys.executable,
        "-m",
        "spmd",
        "launch",
        "--processes",
        "2",
        str(tmp_path / "job.py"),
        str(tmp_path),
    ]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout
    reports, errors = (re.findall(rf"{word} (.*)", done.stdout) for word in ("REPORT", "ERROR"))
    assert (
        len(reports) == 2
        and reports[0] == reports[1]
        and re.search(
            r"2 arrays, 1 of them as int8, a file of 1\.\d KiB for 2\.2 KiB of exact weights\|",
            reports[0],
        )
    )
    assert len(errors) == 2 and all(line.endswith("model is not empty.") for line in errors)
    assert spmd.load_exported(tmp_path / "model").predict(np.ones((3, 64), np.float32)).shape == (
        3,
        8,
    )
    assert {path.name for path in tmp_path.iterdir()} == {"job.py", "model"}


def test_a_state_that_a_step_has_consumed(digits, tmp_path):
    trainer, state = untrained("functional", digits[0])
    trainer.step(state, jax.tree.map(lambda x: x[:128], digits[0]))
    with pytest.raises(OptionError, match="this state was consumed by a step"):
        spmd.export(trainer, state, tmp_path / "model")


def test_numbers_that_are_not_finite_have_no_scale(results, tmp_path):
    result = results["functional"]
    params = {**result.state.params, "two": result.state.params["two"].at[0, 0].set(jnp.nan)}
    with pytest.raises(
        ExportError, match=r"params/two float32\[32, 10\] holds numbers that are not finite"
    ):
        spmd.export(
            result.trainer,
            dataclasses.replace(result.state, params=params),
            tmp_path / "model",
            weights="int8",
        )
    assert not list(tmp_path.iterdir())


def test_what_is_not_int8_is_measured_as_it_is(results):
    """It is not brought to one host, which no process can do with what others hold."""
    trainer, state = results["functional"].trainer, results["functional"].state
    forward = forward_of(trainer, state)
    rounded = _state_as_written(
        trainer, state, forward, {path for path in forward.paths if path.endswith("one")}
    ).params
    assert rounded["bias"] is state.params["bias"] and rounded["two"] is state.params["two"]
    assert (
        rounded["one"] is not state.params["one"]
        and rounded["one"].sharding == state.params["one"].sharding
    )
