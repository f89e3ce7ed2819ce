"""The folder of compiled programs, its entries, and why a program is not among them."""

import errno
import json
import logging
import os
import shutil
import stat
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental.compilation_cache import compilation_cache

import spmd
from spmd.base import output_files
from spmd.distributed import shared_cache
from spmd.errors import OptionError
from spmd.nn import LayerStack
from spmd.program_cache import activate, entries, folder as folders, records
from spmd.program_cache.activate import active_folder, use_folder
from spmd.program_cache.counts import compilations
from spmd.program_cache.folder import cache_folder, choose_folder, distrust, machine_folder
from spmd.program_cache.records import watch


@pytest.fixture(autouse=True)
def may_load(monkeypatch):
    """The programs of most tests have no collectives, so each version of jaxlib may load them."""
    monkeypatch.setattr(folders, "MISORDERED", (1000,))


@pytest.fixture
def jax_cache():
    """As in a process of a user, who has set up no cache of JAX; other programs are compiled as in
    other tests.
    """
    names = [activate.FOLDER, "jax_enable_compilation_cache", *activate.OPTIONS]
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update(activate.FOLDER, None)
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()
    yield
    use_folder(None)
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    activate._before.clear()
    entries._sizes.clear()
    entries._present.clear()
    entries._logged.clear()


def add(number):
    """A program that only this number makes; each call compiles or loads it."""
    before = compilations()
    assert (
        jax.jit(lambda x: x + number).lower(jax.ShapeDtypeStruct((3,), jnp.float32)).compile()
        is not None
    )
    return compilations() - before


def test_folder_is_the_users_the_runs_or_the_one_that_is_named(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("SPMD_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert (
        choose_folder(None, None)
        == choose_folder(True, None)
        == tmp_path / "spmd" / "programs"
        == cache_folder("programs")
    )
    assert choose_folder(None, tmp_path / "run") == tmp_path / "run" / "programs"
    assert choose_folder(str(tmp_path / "mine"), tmp_path / "run") == tmp_path / "mine"
    assert choose_folder(False, tmp_path / "run") is choose_folder("off", None) is None
    monkeypatch.setenv("SPMD_CACHE", str(tmp_path / "all"))
    assert choose_folder(None, tmp_path / "run") == tmp_path / "all" / "programs"
    monkeypatch.setenv("SPMD_CACHE", "~/all")
    assert cache_folder("plans") == Path.home() / "all" / "plans"
    monkeypatch.setenv("SPMD_CACHE", "off")
    with pytest.raises(OptionError, match=r'\$SPMD_CACHE is "off", which is not a folder'):
        cache_folder("plans")
    assert choose_folder(None, tmp_path / "run") is None and "which is not a folder" in caplog.text
    with pytest.raises(
        OptionError, match=r"compile_cache=3\.\n    fix: a folder; None for the usual one"
    ):
        choose_folder(3, None)


def test_program_is_loaded_and_its_files_are_private(jax_cache, tmp_path):
    folder = tmp_path / "run" / "programs"
    use_folder(folder)
    assert (add(0.5).compiled, add(0.5).loaded) == (1, 1)
    part = active_folder()
    assert part == machine_folder(folder) and len(list(part.glob("jit__lambda-*-cache"))) == 1
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, part)] == [0o700, 0o700]
    use_folder(None)
    assert active_folder() is None and add(0.5).compiled == 1
    assert jax.config.jax_persistent_cache_enable_xla_caches != "none"


def test_cache_of_the_user_is_left_alone(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    assert before
    use_folder(tmp_path)
    assert jax.config.jax_compilation_cache_dir == before and active_folder() is None


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty"])
def test_damaged_entry_is_compiled_and_written_again(jax_cache, tmp_path, caplog, damage):
    use_folder(tmp_path / "programs")
    add(1.5)
    (entry,) = active_folder().glob("*-cache")
    content = entry.read_bytes()
    flipped = content[:40] + bytes([content[40] ^ 1]) + content[41:]
    entry.write_bytes({"truncated": content[:-9], "flipped": flipped, "empty": b""}[damage])
    assert (add(1.5).compiled, add(1.5).loaded) == (1, 1)
    assert caplog.text.count("is damaged") == 1


def test_full_disk_is_logged_once(jax_cache, tmp_path, caplog, monkeypatch):
    def full(path, content, *, durable):
        raise OSError(errno.ENOSPC, "No space left on device")

    use_folder(tmp_path / "programs")
    monkeypatch.setattr(output_files, "write_checked", full)
    assert add(2.5).compiled == add(2.5).compiled == 1
    assert [record.getMessage() for record in caplog.records] == [
        f"compiled programs cannot be kept in {active_folder()}: No space left on device. "
        "The next start compiles them again, unless compile_cache= is another folder."
    ]


def test_least_recently_used_programs_are_removed(jax_cache, tmp_path, monkeypatch):
    use_folder(tmp_path / "programs")
    add(3.5), add(4.5)
    old = list(active_folder().glob("*-cache"))
    for path in old:
        os.utime(path, (1, 1))
    (active_folder() / ".left-by-a-killed-process").touch()
    os.utime(active_folder() / ".left-by-a-killed-process", (1, 1))
    (active_folder() / ".written-now").touch()
    assert add(4.5).loaded == 1  # which marks it as used
    monkeypatch.setattr(entries, "MOST_ENTRIES", 2)
    add(5.5)
    assert len(list(active_folder().glob("*-cache"))) == 2
    assert add(4.5).loaded == add(5.5).loaded == 1 and add(3.5).compiled == 1
    assert sorted(path.name for path in active_folder().glob(".*")) == [".written-now"]


def test_records_of_other_scripts_are_removed_with_their_programs(jax_cache, tmp_path, monkeypatch):
    use_folder(tmp_path / "programs")
    observe({"a": "1"}, {}, 22.5)
    for path in active_folder().iterdir():
        os.utime(path, (1, 1))
    monkeypatch.setattr(entries, "MOST_ENTRIES", 1)
    entries._sizes.clear()
    add(23.5)
    (left,) = active_folder().iterdir()
    assert left.name.endswith("-cache") and add(23.5).loaded == 1


def test_bytes_are_bounded(jax_cache, tmp_path, monkeypatch):
    use_folder(tmp_path / "programs")
    add(6.5)
    (entry,) = active_folder().glob("*-cache")
    monkeypatch.setattr(entries, "MOST_BYTES", int(2.5 * entry.stat().st_size))
    for number in (7.5, 8.5, 9.5):
        add(number)
        for path in active_folder().glob("*-cache"):  # those before are older
            os.utime(path, (path.stat().st_mtime - 10.0,) * 2)
    assert (
        sum(path.stat().st_size for path in active_folder().glob("*-cache")) <= entries.MOST_BYTES
    )
    assert add(9.5).loaded == 1


@pytest.mark.system
@pytest.mark.parametrize("open_part", [False, True])
def test_folder_that_others_can_write_is_refused(jax_cache, tmp_path, caplog, open_part):
    folder = tmp_path / "programs"
    use_folder(folder)
    add(10.5)
    (active_folder() if open_part else folder).chmod(0o777)
    use_folder(None)
    use_folder(folder)
    assert active_folder() is None and "every user can write to" in caplog.text
    assert add(10.5).compiled == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a file of another user")
def test_folder_of_another_user_is_refused(tmp_path):
    os.chown(tmp_path, 12345, -1)
    assert (
        distrust(tmp_path)
        == f"{tmp_path} belongs to another user (id 12345), and loading a program runs it"
    )
    assert distrust(tmp_path / "not there") == ""


@pytest.mark.parametrize("name", ["a file", "n" * 300])
def test_folder_that_cannot_be_looked_up_is_logged(jax_cache, tmp_path, caplog, name):
    (tmp_path / "a file").touch()
    use_folder(tmp_path / name / "programs")
    assert add(18.5).compiled == 1
    reason = {"a file": f"{tmp_path / name} is a file"}.get(name, "File name too long")
    assert f"compiled programs cannot be kept in {active_folder()}: {reason}." in caplog.text


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm, self.up, self.down = (
            nnx.LayerNorm(16, rngs=rngs),
            nnx.Linear(16, 28, rngs=rngs),
            nnx.Linear(28, 16, rngs=rngs),
        )

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Net(nnx.Module):
    """Its weights are gathered in loops and outside; with two microbatches that are reduced at the
    end, both can happen at once.
    """

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.stack, self.out = (
            LayerStack([Block(rngs) for _ in range(5)]),
            nnx.Linear(16, 3, rngs=rngs),
        )

    def __call__(self, x):
        return self.out(self.stack(x))


@pytest.mark.system
def test_training_step_from_the_cache_computes_as_the_compiled_one(
    jax_cache, monkeypatch, tmp_path
):
    monkeypatch.undo()  # this jaxlib, as it is
    layout = spmd.Layout(
        default=spmd.Default("shard:data"),
        gradients=spmd.Gradients("reduce_scatter", gather="layer", accumulate="local"),
    )
    rows = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)

    def trained():
        # as a new process: what other tests have traced is neither compiled again, nor named as it
        # would be
        jax.clear_caches()
        trainer = spmd.Trainer(
            lambda: Net(),
            loss=lambda model, batch: jnp.mean((model(batch["x"]) - batch["x"][:, :3]) ** 2, -1),
            optimizer=optax.sgd(0.05, momentum=0.9),
            mesh="data=8",
            layout=layout,
            accumulate=2,
            compile_cache=tmp_path,
        )
        state = trainer.init()
        for _ in range(20):
            state, _ = trainer.step(state, {"x": rows})
        return jax.device_get(state.params)

    first, before = trained(), compilations()
    assert jax.tree.all(jax.tree.map(np.array_equal, first, trained()))
    spent = compilations() - before
    assert (
        (spent.loaded if folders.misordered() else spent.compiled)
        == 0
        < spent.loaded + spent.compiled
    )


def test_jaxlib_that_loads_programs_wrongly_loads_none(jax_cache, monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(folders, "MISORDERED", (0, 10))
    monkeypatch.delenv("SPMD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    use_folder(choose_folder(None, None))
    assert active_folder() is None and not caplog.text  # it was not asked for
    for _ in range(2):  # the second as another process on this machine
        monkeypatch.setattr(entries, "_logged", set())
        use_folder(tmp_path)
    assert active_folder() is None and add(19.5).compiled == 1
    said = (
        f"no compiled programs are kept or loaded: jaxlib {jaxlib.__version__} does not load "
        "programs for several CPU devices correctly. "
    )
    said += "This run compiles its programs, so its results are right; only starts take longer."
    assert caplog.text.count(said) == 1 and caplog.records[0].levelname == "INFO"
    monkeypatch.setattr(jaxlib, "__version__", "0.13.0")
    use_folder(tmp_path)
    assert "jaxlib 0.13.0 does not load" in caplog.text
    jax.config.update(activate.FOLDER, str(tmp_path))  # the user's choice: it stays, with a warning
    use_folder(None)
    assert (
        f"correctly: their values can be wrong, and JAX loads those in {tmp_path}: set "
        "JAX_ENABLE_COMPILATION_CACHE=false." in caplog.text
    )
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert not folders.misordered()


def test_user_without_home_folder_has_no_cache(monkeypatch, caplog):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("SPMD_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert choose_folder(None, None) is None and "no home folder" in caplog.text
    with pytest.raises(OptionError, match=r"SPMD_CACHE names another folder"):
        cache_folder("plans")


def test_removed_folder_is_not_made_again_before_the_next_run(jax_cache, tmp_path, caplog):
    run = tmp_path / "run"
    use_folder(run / "programs")
    observe({"a": "1"}, {}, 19.5)
    shutil.rmtree(run)
    observe({"a": "2"}, {}, 20.5)
    assert not run.exists() and not caplog.text
    use_folder(run / "programs")
    assert add(21.5).compiled == add(21.5).loaded == 1


@pytest.mark.parametrize(
    "theirs, said",
    [("cpu-other", "has another kind of device"), ("", "does not see the folder of process 0")],
)
def test_process_that_cannot_share_the_folder_says_why(tmp_path, monkeypatch, theirs, said):
    said_here = []

    def first_nonempty(text):
        said_here.append(text)
        return text or str(
            tmp_path / "programs" / (theirs or machine_folder(tmp_path).name) / ".process-0"
        )

    monkeypatch.setattr(shared_cache.coordination, "is_initialized", lambda: True)
    monkeypatch.setattr(shared_cache.coordination, "process_info", lambda: (1, 2, ""))
    monkeypatch.setattr(shared_cache, "user_chose", lambda: False)
    monkeypatch.setattr(shared_cache, "first_nonempty", first_nonempty)
    assert shared_cache.agree_on_folder(tmp_path / "programs") is None
    assert said_here[0] == "" and said in said_here[1]


def test_file_that_cannot_be_looked_for_is_not_seen(tmp_path):
    """As a stale handle of NFS, a name that is too long is an error of the file system."""
    why = shared_cache._unseen(tmp_path / ("a" * 300), tmp_path, 1)
    assert why == f"process 1 does not see the folder of process 0, {tmp_path}"


def test_process_whose_cache_another_turns_off_says_so(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(shared_cache.coordination, "is_initialized", lambda: True)
    monkeypatch.setattr(shared_cache.coordination, "process_info", lambda: (1, 2, ""))
    monkeypatch.setattr(shared_cache, "user_chose", lambda: False)
    token = machine_folder(tmp_path / "programs") / ".process-0"
    token.parent.mkdir(parents=True)
    token.touch()
    # of process 0: the folder that it sees, and that it keeps nothing
    answers = iter([str(token), str(token), shared_cache.OFF])
    monkeypatch.setattr(shared_cache, "first_nonempty", lambda text: text or next(answers))
    assert shared_cache.agree_on_folder(None) is None and not caplog.text
    assert shared_cache.agree_on_folder(tmp_path / "programs") is None
    assert (
        "process 1 keeps and loads no compiled programs: another process has turned that off"
        in caplog.text
    )


def observe(facts, code, number, what="the step"):
    with watch(what, "jit__lambda", lambda: facts, lambda: code, records=True) as watched:
        add(number)
    return watched


def said(caplog):
    lines = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return [line.partition("because ")[2] for line in lines]


def test_miss_is_not_explained_by_another_model(jax_cache, tmp_path, caplog):
    """Programs of a notebook share their records; only those with parameters of the same names are
    compared.
    """
    caplog.set_level(logging.WARNING)
    use_folder(tmp_path / "programs")
    observe(
        {"array params/a": "float32[8]", "array opt/0/mu/a": "float32[8]", "mesh": "data=8"},
        {},
        31.5,
    )
    observe({"array params/b": "float32[8]", "mesh": "data=4"}, {}, 32.5)
    assert said(caplog) == []
    observe({"array params/a": "float32[8]", "mesh": "data=4"}, {}, 33.5)
    (line,) = said(caplog)
    assert "mesh was data=8, is data=4" in line and "params/b" not in line


def test_miss_is_explained_by_the_nearest_record(jax_cache, tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    use_folder(tmp_path / "programs")
    observe({"batch x": "float32[8]", "mesh": "data=8"}, {"number 1": "0.1", "text": "a"}, 11.5)
    assert said(caplog) == []  # the first
    observe({"batch x": "float32[8]", "mesh": "data=8"}, {"number 1": "0.1", "text": "a"}, 11.5)
    assert said(caplog) == []  # loaded
    observe({"batch x": "float32[9]", "mesh": "data=4", "a": "1", "b": "2"}, {"text": "b"}, 12.5)
    assert said(caplog) == [
        "batch x was float32[8], is float32[9], and mesh was data=8, is data=4, and a was not set, "
        "is 1, and 1 more changes."
    ]
    observe({"batch x": "float32[8]", "mesh": "data=8"}, {"number 1": "0.2", "text": "c"}, 13.5)
    assert said(caplog) == ["number 1 was 0.1, is 0.2."]
    observe({"batch x": "float32[8]", "mesh": "data=8"}, {"number 1": "0.2", "text": "d"}, 14.5)
    assert said(caplog) == ["the code of the model, the loss, the optimizer or spmd has changed."]
    for entry in active_folder().glob("*-cache"):
        entry.unlink()
    observe({"batch x": "float32[8]", "mesh": "data=8"}, {"number 1": "0.2", "text": "d"}, 14.5)
    assert said(caplog)[0].startswith("its entry was removed, or could not be kept")
    observe({"batch x": "float32[8]"}, {}, 15.5, "the evaluation")
    assert said(caplog) == []  # another program


def test_facts_that_cannot_be_read_lose_no_program(jax_cache, tmp_path, caplog):
    """Such as those of a batch whose class checks its fields."""

    def raises():
        raise TypeError("x is to be an array")

    use_folder(tmp_path / "programs")
    for _ in range(2):
        with watch("the step", "jit__lambda", raises, dict, records=True):
            add(17.5)
    assert [record.getMessage() for record in caplog.records] == [
        "compiling the step: not in the cache; why is not known: TypeError: x is to be an array."
    ]


@pytest.mark.parametrize("content", [b"", b"{", json.dumps([{"facts": {}}, 3]).encode(), b"[[]]"])
def test_unreadable_records_are_ignored(jax_cache, tmp_path, caplog, content):
    use_folder(tmp_path / "programs")
    observe({"a": "1"}, {}, 16.5)
    (path,) = active_folder().glob("*.json")
    output_files.write_checked(path, content) if content else path.write_bytes(content)
    observe({"a": "2"}, {}, 17.5)
    assert said(caplog) == [] and [record["facts"] for record in records._read_records(path)] == [
        {"a": "2"}
    ]


@pytest.mark.system
def test_fit_counts_and_says_where_its_step_came_from(jax_cache, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(records, "LEAST_SECONDS", 0.0)
    model = spmd.FunctionalModel(
        lambda key: {"w": jnp.zeros((4, 1))}, lambda params, x: x @ params["w"]
    )
    data = {"x": jnp.ones((32, 4)), "y": jnp.ones((32, 1))}
    fit = {
        "loss": spmd.losses.mean_squared_error,
        "optimizer": optax.sgd(0.1),
        "batch_size": 16,
        "compile_cache": tmp_path / "kept",
    }
    jax.clear_caches()  # programs of earlier tests would be kept nowhere
    first = spmd.fit(model, data, progress=True, **fit)
    jax.clear_caches()
    second = spmd.fit(model, data, progress=True, **fit)
    assert first.compilations.compiled and not first.compilations.loaded
    assert second.compilations.loaded and not second.compilations.compiled
    assert capsys.readouterr().err.count("the step: loaded from the compilation cache") == 1
