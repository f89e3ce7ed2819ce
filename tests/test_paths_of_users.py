"""Paths that users give: `~` and $NAME are expanded and schemes are refused, wherever a path is
taken.
"""

import ast
import re
from pathlib import Path
from types import SimpleNamespace

import matplotlib.figure
import numpy as np
import optax
import pytest
from flax import nnx

import spmd
from spmd.base.user_paths import as_path
from spmd.data.idx_files import read_idx
from spmd.errors import OptionError, SpmdError
from spmd.inference.generation import Generator
from spmd.launch.cli import main
from spmd.launch.generate_command import _text
from spmd.planner.calibration import Calibration
from spmd.planner.cluster import Cluster
from spmd.planner.planning import Plan
from spmd.planner.search_result import Search
from spmd.pretrained.name_map import NameMap
from spmd.program_cache.folder import cache_folder, choose_folder
from spmd.render.picture import Picture
from spmd.run.checkpoint_reader import CheckpointReader, check_run_folder
from spmd.run.history import History
from spmd.run.memory_folder import memory_base
from spmd.run.pictures import write_picture
from spmd.run.step_profiler import Profile
from spmd.sweeps.results import Sweep
from spmd.wire.server.timing import read_trace

ROOT = Path(spmd.__file__).parent
DATA = {"x": np.ones((8, 2), np.float32), "y": np.ones((8, 1), np.float32)}
FEATURES = {"x": spmd.data.fixed((), "float32")}
STEP = {"loss": spmd.losses.mean_squared_error, "optimizer": optax.sgd(0.1)}


def linear():
    return spmd.FunctionalModel(
        lambda key: {"w": np.zeros((2, 1), np.float32)}, lambda params, x: x @ params["w"]
    )


def fit(**options):
    return spmd.fit(linear(), DATA, **STEP, batch_size=8, **options)


def trainer(**options):
    return spmd.Trainer(linear(), **STEP, **options)


def sweep(**options):
    space = {"learning_rate": [0.1]}
    loss, optimizer = STEP["loss"], lambda learning_rate: optax.sgd(learning_rate)
    return spmd.sweep(
        linear,
        DATA,
        space=space,
        loss=loss,
        optimizer=optimizer,
        batch_size=8,
        epochs=1,
        trials=1,
        **options,
    )


def module():
    return nnx.Linear(2, 2, rngs=nnx.Rngs(0))


class Writer(nnx.Module):
    """As much of a decoder as is asked for before a layout is read."""

    def __init__(self):
        self.weight = nnx.Param(np.ones((2, 2), np.float32))

    def init_cache(self, rows, length, dtype):
        return ()

    def __call__(self, tokens, *, positions=None, cache=None):
        return tokens


def picture():
    return Picture(matplotlib.figure.Figure())


def text(path, **options):
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}))
    return spmd.data.text(path, tokenizer=words, length=8, batch_size=1, eos=False, **options)


def with_file(take):
    """A reader of an existing file with an index at the path."""

    def call(path):
        here = Path("a.csv")
        here.write_text("x\n1\n2\n")
        try:
            return take(here, path)
        finally:
            here.unlink()

    return call


# A function for each parameter that is annotated as a path (`found` lists them), as FILE:FUNCTION
# OR CLASS:PARAMETER.
TAKES = {
    "api.py:export:folder": lambda path: fit().export(path),
    "api.py:fit:checkpoint": lambda path: fit(checkpoint=path),
    "api.py:fit:compile_cache": lambda path: fit(compile_cache=path),
    "api.py:fit:layout": lambda path: fit(layout=path),
    "data/array_records.py:array_record:files": lambda path: spmd.data.array_record(
        path, batch_size=1, decode=len
    ),
    "data/csv_files.py:csv:files": lambda path: spmd.data.csv(path, batch_size=1),
    "data/csv_files.py:csv:index": with_file(
        lambda file, path: spmd.data.csv(file, batch_size=1, index=path)
    ),
    "data/idx_files.py:mnist:folder": spmd.data.mnist,
    "data/idx_files.py:read_idx:path": read_idx,
    "data/image_files.py:images:folder": lambda path: spmd.data.images(
        path, size=(2, 2), batch_size=1
    ),
    "data/parquet_files.py:parquet:files": lambda path: spmd.data.parquet(path, batch_size=1),
    "data/text_records.py:text:files": text,
    "data/text_records.py:text:index": lambda path: text("missing.jsonl", index=path),
    "data/tar_shards.py:webdataset:files": lambda path: spmd.data.webdataset(
        path, decode=dict, batch_size=1
    ),
    "data/tar_shards.py:webdataset:index": with_file(
        lambda file, path: spmd.data.webdataset(file, decode=dict, batch_size=1, index=path)
    ),
    "data/tfrecords.py:tfrecord:files": lambda path: spmd.data.tfrecord(
        path, features=FEATURES, batch_size=1
    ),
    "data/tfrecords.py:tfrecord:index": with_file(
        lambda file, path: spmd.data.tfrecord(file, features=FEATURES, batch_size=1, index=path)
    ),
    "inference/generation.py:__init__:layout": lambda path: Generator(Writer(), layout=path),
    "inference/generation.py:generate:layout": lambda path: spmd.generate(
        Writer(), [[1]], max_new_tokens=1, layout=path
    ),
    "inference/loader.py:load_exported:folder": spmd.load_exported,
    "layout/schema.py:load:source": spmd.Layout.load,
    "planner/calibration.py:save:path": lambda path: Calibration.save(
        SimpleNamespace(target=None), path
    ),
    "planner/layout_search.py:search:candidates": lambda path: spmd.search(
        linear(), DATA, **STEP, candidates=[path]
    ),
    "planner/planning.py:plan:layout": lambda path: spmd.plan(linear(), DATA, **STEP, layout=path),
    "planner/planning.py:save:path": lambda path: Plan.save(SimpleNamespace(), path),
    "planner/search_result.py:save:path": lambda path: Search.save(
        SimpleNamespace(to_toml=str), path
    ),
    "pretrained/adapters.py:load_adapters:folder": lambda path: spmd.pretrained.load_adapters(
        module(), path
    ),
    "pretrained/adapters.py:save_adapters:folder": lambda path: spmd.pretrained.save_adapters(
        module(), path
    ),
    "pretrained/folders.py:load:folder": spmd.pretrained.load,
    "pretrained/folders.py:save:folder": lambda path: spmd.pretrained.save(
        module(), path, like="missing"
    ),
    "pretrained/folders.py:save:like": lambda path: spmd.pretrained.save(
        module(), "out", like=path
    ),
    "pretrained/name_map.py:load:source": NameMap.load,
    "render/picture.py:save:path": lambda path: picture().save(path),
    "run/checkpoint.py:Checkpoint:memory_folder": lambda path: fit(
        checkpoint=spmd.Checkpoint("run", memory_every=1, memory_folder=path)
    ),
    "run/checkpoint.py:Checkpoint:path": lambda path: fit(checkpoint=spmd.Checkpoint(path)),
    "run/checkpoint_reader.py:__init__:folder": lambda path: show(CheckpointReader(path).folder),
    "run/checkpoint_reader.py:check_run_folder:path": check_run_folder,
    "run/history.py:read:folder": History.read,
    "run/loggers.py:__init__:folder": spmd.loggers.TensorBoard,
    "run/loggers.py:__init__:path": lambda path: spmd.loggers.JsonLines(path).close(),
    "run/memory_folder.py:memory_base:chosen": lambda path: show(memory_base(path)),
    "run/step_profiler.py:Profile:folder": lambda path: show(Profile("1:2", path).folder),
    "sweeps/api.py:sweep:checkpoint": lambda path: sweep(checkpoint=path),
    "sweeps/api.py:sweep:compile_cache": lambda path: sweep(compile_cache=path),
    "sweeps/api.py:sweep:layout": lambda path: sweep(layout=path),
    "sweeps/results.py:to_csv:path": lambda path: Sweep.to_csv(
        SimpleNamespace(rows=lambda: [{"loss": 1}]), path
    ),
    "trainer.py:__init__:compile_cache": lambda path: trainer(compile_cache=path).step,
    "trainer.py:__init__:layout": lambda path: trainer(layout=path),
    "trainer.py:restore:checkpoint": lambda path: trainer().restore(path),
    "trainer.py:save:checkpoint": lambda path: (made := trainer()).save(made.init(), path),
    "trainer.py:steps:resume": lambda path: (
        list(trainer().steps(DATA, batch_size=8, resume=path)) and show(spmd.Checkpoint(path).path)
    ),
    "viz/device_map.py:shards:layout": lambda path: spmd.viz.shards(linear(), path),
    "viz/history_plot.py:curve:path": lambda path: picture().save(path),
    "viz/run_page.py:report:checkpoint": lambda path: (
        spmd.viz.report(None, "page.html", checkpoint=path) and None
    ),
    "viz/run_page.py:report:path": lambda path: spmd.viz.report(fit(), path),
}
# These give the path to another function of the list, or get one that was read by `as_path`.
PASSED_ON = {
    "api.py:_join_cluster:compile_cache",
    "data/record_index.py:__init__:cache",
    "data/record_index.py:cached_scan:cache",
    "data/record_index.py:find_files:files",
    "data/text_files.py:__init__:index",
    "data/text_files.py:open_documents:files",
    "data/text_files.py:open_documents:index",
    "data/text_records.py:__init__:index",
    "data/text_records.py:_measured:index",
    "inference/exporter.py:export:folder",
    "layout/layout_files.py:load:source",
    "layout/layout_files.py:load_registered:source",
    "planner/candidates.py:chosen_layouts:candidates",
    "pretrained/adapters.py:load_adapters:name_map",
    "pretrained/adapters.py:save_adapters:name_map",
    "pretrained/folders.py:load:layout",
    "pretrained/folders.py:load:name_map",
    "pretrained/folders.py:save:name_map",
    "program_cache/folder.py:choose_folder:run",
    "run/loop_checkpoints.py:as_loop_checkpoint:checkpoint",
    "run/loop_checkpoints.py:open_newest:checkpoint",
    "run/memory_checkpoint.py:open_memory:base",
    "viz/pipeline.py:schedule:path",
    "viz/server_timeline.py:timeline:path",
}
# Paths that have no such annotation.
OTHERS = {
    "as_path": lambda path: show(as_path(path, "path")),
    "compile_cache": lambda path: show(choose_folder(path, None)),
    "compute_time": lambda path: read_trace(f"{path}.csv", 1),
    "picture": lambda path: write_picture(Path("pictures"), "name", 1, path),
    "target": lambda path: Cluster.parse(f"8x{path}.toml"),
    "tokenizer": lambda path: spmd.data.Prompts(path),
    "spmd launch --hosts": lambda path: main(["launch", "--hosts", path, __file__]),
    "spmd layouts check": lambda path: main(["layouts", "check", path, "--model", "missing:model"]),
    "spmd data bench": lambda path: main(["data", "bench", path, "--batch-size", "8"]),
    "spmd generate": lambda path: main(["generate", path, "--prompt", "a"]),
    "spmd generate --prompt-file": _text,
    "spmd finetune": lambda path: main(["finetune", path, "--data", "a.jsonl", "--out", "out"]),
    "spmd finetune --data": lambda path: main(
        ["finetune", "missing", "--data", path, "--out", path]
    ),
    "spmd finetune --out": lambda path: main(
        ["finetune", "missing", "--data", "a.jsonl", "--out", path]
    ),
    "spmd calibrate --out": lambda path: main(["calibrate", "--out", path]),
    "spmd doctor --folder": lambda path: main(["doctor", "--folder", path, "--timeout", "0.1"]),
    "spmd profile --folder": lambda path: main(["profile", "--folder", path, __file__]),
}


def show(path):
    """Raise the path, as an error would name it."""
    raise OptionError(str(path))


def annotated(node):
    """Parameters of a function and fields of a class whose annotations are a path or its text."""
    if isinstance(node, ast.FunctionDef):
        pairs = [(each.arg, each.annotation) for each in (*node.args.args, *node.args.kwonlyargs)]
    elif isinstance(node, ast.ClassDef):
        pairs = [
            (each.target.id, each.annotation)
            for each in node.body
            if isinstance(each, ast.AnnAssign)
        ]
    else:
        return []
    return [
        name
        for name, kind in pairs
        if kind is not None and re.search(r"\bstr\b.*\b(Path|PathLike)\b", ast.unparse(kind))
    ]


def found():
    for file in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            for name in annotated(node):
                yield f"{file.relative_to(ROOT).as_posix()}:{node.name}:{name}"


def test_all_parameters_that_are_paths_are_tested_here():
    assert set(found()) == {*TAKES, *PASSED_ON}


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home folder, beside the working folder."""
    for name in ("home", "work"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "home"


def called(take, path, capsys):
    """What the function says about the path: its error, or what a command prints."""
    said = ""
    try:
        take(path)
    except SpmdError as error:
        said = str(error)
    except (OSError, SystemExit, AttributeError) as error:
        said = repr(error)
    captured = capsys.readouterr()
    return f"{said}\n{captured.out}\n{captured.err}"


BOTH = {**TAKES, **OTHERS}
# These look for something else before they use the path, or the tests' own cache is used.
ONLY_CHECKED = {
    "api.py:fit:compile_cache",
    "sweeps/api.py:sweep:compile_cache",
    "trainer.py:__init__:compile_cache",
    "viz/run_page.py:report:checkpoint",
    "pretrained/folders.py:save:folder",
    "pretrained/adapters.py:load_adapters:folder",
    "pretrained/adapters.py:save_adapters:folder",
    "spmd finetune --data",
    "spmd finetune --out",
    "spmd profile --folder",
}


@pytest.mark.parametrize("name", BOTH)
def test_schemes_are_refused(name, home, capsys):
    assert "s3:// is not supported" in " ".join(called(BOTH[name], "s3://bucket/x", capsys).split())
    assert not [path for path in Path().iterdir() if ":" in path.name]


@pytest.mark.parametrize("name", [name for name in BOTH if name not in ONLY_CHECKED])
def test_home_folder_is_expanded(name, home, capsys):
    absent = called(BOTH[name], "~/x", capsys)
    assert not Path("~").exists()
    if any(home.rglob("*")) or str(home / "x") in absent:
        return
    for suffix in ("", ".toml", ".csv"):
        (home / f"x{suffix}").write_text("x = [")
    assert called(BOTH[name], "~/x", capsys) != absent  # what is there is found


@pytest.mark.parametrize(
    "path", ["~/x", "$HOME/x", "${HOME}/x", Path("~/x"), Path("$HOME") / "x"], ids=str
)
def test_path_begins_with_the_home_folder(path, home):
    assert as_path(path, "path") == as_path(as_path(path, "path"), "path") == home / "x"


@pytest.mark.parametrize(
    "path", ["./~x", "./$x", "./s3:/x", "runs/$x", "runs/~x", "a~", "a:b", "x/s3://y", "$x-1.csv"]
)
def test_path_of_such_a_name_is_taken_as_it_is(path, home):
    taken = as_path(path, "path")
    assert taken.absolute() == Path(path).absolute() and as_path(taken, "path") == taken


def test_path_that_begins_with_an_unknown_name_is_refused(home, monkeypatch):
    monkeypatch.setenv("NOTHING", "")
    monkeypatch.setenv("BUCKET", "s3://bucket")
    for path in ("$NOTHING/x", "${NOTHING}", "$NOT_SET_AT_ALL/x"):
        with pytest.raises(OptionError, match=r"the environment variable NOT\w+ is not set"):
            as_path(path, "path")
    with pytest.raises(OptionError, match=r"^path='\$BUCKET/x': s3:// is not supported\."):
        as_path("$BUCKET/x", "path")
    with pytest.raises(OptionError, match="there is no user nobody-of-this-name") as raised:
        as_path("~nobody-of-this-name/x", "path")
    fix = re.findall('"(.*)"', raised.value.fix)[0]
    assert as_path(fix, "path") == Path.cwd() / "~nobody-of-this-name" / "x"


@pytest.mark.parametrize("scheme", ["s3", "gs", "hdfs", "http", "memory", "abfss"])
def test_path_with_a_scheme_is_refused(scheme):
    for path in (
        f"{scheme}://bucket/x",
        Path(f"{scheme}://bucket/x"),
        f"{scheme}:/bucket/x",
        f"{scheme.upper()}://bucket/x",
    ):
        with pytest.raises(
            OptionError,
            match=rf"(?i)^path=\S+bucket/x'\)?: {scheme}:// is not supported\.\n    fix: a local "
            r"path;",
        ):
            as_path(path, "path")


@pytest.mark.parametrize(
    "path",
    ["file:///a/b c", "file:/a/b%20c", "file://localhost/a/b c", Path("file:///a/b c")],
    ids=str,
)
def test_path_of_a_local_file_with_a_scheme_names_the_path(path):
    with pytest.raises(OptionError) as raised:
        as_path(path, "path")
    assert raised.value.fix == 'the path without it, "/a/b c".'


def test_folders_of_the_environment_are_read_the_same_way(home, monkeypatch):
    for name, read in (
        ("SPMD_CACHE", lambda: cache_folder("a").parent),
        ("SPMD_MEMORY_FOLDER", lambda: memory_base(None)),
    ):
        for path in ("~/x", "$HOME/x"):
            monkeypatch.setenv(name, path)
            assert read() == home / "x"
        monkeypatch.setenv(name, "gs://bucket/x")
        with pytest.raises(
            OptionError, match=rf"^\${name}='gs://bucket/x': gs:// is not supported"
        ):
            read()
        monkeypatch.delenv(name)
    monkeypatch.setenv("SPMD_CACHE", "gs://bucket/x")
    with pytest.raises(OptionError, match="gs:// is not supported"):
        choose_folder(None, None)
