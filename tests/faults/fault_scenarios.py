"""What is done in a folder while faults happen there, how it is done again without them, and what
of it must be equal.
"""

import dataclasses
import functools
import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import fault_shim
import jax
import jax.numpy as jnp
import numpy as np
import optax

import spmd
from spmd.base.tree import flatten
from spmd.base.user_paths import write_text
from spmd.planner import compile
from spmd.pretrained.adapters import load_adapters
from spmd.render.html import document

FIXTURES = Path(__file__).parents[1] / "pretrained/fixtures"

Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Scenario:
    """Something that writes below a folder.

    Attributes:
      run: with faults; returns what must be equal to that without.
      again: what a user does after an error, a kill or a loss of power, without faults; returns the
        same as `run`.
      prepare: what is in the folder before `run`.
      look: reads what a `run` has left before `again`.
      may_miss: `look` may raise an error of the library, or that there is no such file.
      lost: a folder below that a loss of power removes, since it is in memory.
    """

    run: Callable[[Path], Arrays]
    again: Callable[[Path], Arrays]
    prepare: Callable[[Path], object] = lambda folder: None
    look: Callable[[Path], Arrays] | None = None
    may_miss: bool = True
    lost: str = ""


PLAN = {
    "program.hlo": "HloModule step\n" * 1000,
    "memory.json": '{"seconds": 1.0}',
    "buffers.txt": "allocation 0\n" * 1000,
}
X = np.random.default_rng(0).normal(size=(48, 4)).astype(np.float32)
Y = X[:, :2] - 2 * X[:, 1:3]


def linear():
    return spmd.FunctionalModel(
        lambda key: {"w": jnp.zeros((4, 2)), "b": jnp.zeros(2)},
        lambda params, x: x @ params["w"] + params["b"],
    )


def arrays_of(result, folder) -> Arrays:
    """The state, the losses of the call, and the losses of the run's folder by step."""
    fault_shim.end()
    trees = jax.device_get((result.state.params, result.state.opt, result.state.step))
    state = {f"state/{path}": np.asarray(leaf) for path, leaf in flatten(trees).items()}
    read = spmd.History.read(folder)
    in_file = [(row["step"], row["loss"]) for row in read.rows()]
    records, repeated = read_records(folder / "metrics.jsonl")
    return state | {
        "tail loss": np.array(result.history["loss"]),
        "rows of history.bin": np.array(in_file),
        "rows of metrics.jsonl": np.array(records),
        "repeated steps of metrics.jsonl": np.array(repeated),
    }


def read_records(path: Path) -> tuple[list[tuple[int, float]], int]:
    """Steps and losses of the lines that are complete, and how many steps come again without a line
    that says why.
    """
    records, repeated, newest = [], 0, 0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if "loss" not in record:
            newest = 0 if "event" in record else newest
            continue
        records.append((record["step"], record["loss"]))
        repeated += record["step"] <= newest
        newest = record["step"]
    return records, repeated


def fit(folder, *, steps=4, **options):
    options = {
        "checkpoint": spmd.Checkpoint(folder / "run", every=2, keep=1),
        "log_every": 1,
        "progress": False,
    } | options
    result = spmd.fit(
        linear(),
        (X, Y),
        loss=spmd.losses.mean_squared_error,
        optimizer=optax.adam(0.1),
        batch_size=8,
        steps=steps,
        **options,
    )
    return arrays_of(result, folder / "run")


def fit_best(folder, **options):
    checkpoint = spmd.Checkpoint(folder / "run", every=2, keep=1, best="eval_loss")
    return fit(folder, steps=6, eval_data=(X, Y), eval_every=2, checkpoint=checkpoint, **options)


def fit_in_memory(folder, **options):
    checkpoint = spmd.Checkpoint(
        folder / "run", every=3, keep=1, memory_every=1, memory_folder=folder / "memory"
    )
    return fit(folder, steps=5, checkpoint=checkpoint, **options)


def resuming(function):
    return functools.partial(function, resume=True)


def sweep(folder):
    """Two chunks of trials, with a rung of half of the steps."""
    study = spmd.sweep(
        lambda: linear(),
        (X, Y),
        space={"learning_rate": [0.01, 0.03, 0.1]},
        search="grid",
        loss=spmd.losses.mean_squared_error,
        optimizer=lambda learning_rate: optax.adam(learning_rate),
        batch_size=8,
        steps=4,
        at_once=2,
        steps_per_call=2,
        keep=1,
        progress=False,
        checkpoint=spmd.Checkpoint(folder / "sweep", every=2),
        resume=True,
    )
    best = flatten(jax.device_get(study.best[0].result().state.params))
    return {f"best/{path}": leaf for path, leaf in best.items()} | {
        "losses": np.stack([trial.history["loss"] for trial in study.trials])
    }


def export(folder):
    shutil.rmtree(folder / "model", ignore_errors=True)
    result = spmd.fit(
        linear(),
        (X, Y),
        loss=spmd.losses.mean_squared_error,
        optimizer=optax.adam(0.1),
        batch_size=8,
        steps=2,
        progress=False,
    )
    result.export(folder / "model")
    return read_export(folder)


def read_export(folder):
    return {"outputs": np.asarray(spmd.load_exported(folder / "model").predict(X))}


def save_weights(folder):
    shutil.rmtree(folder / "saved", ignore_errors=True)
    spmd.pretrained.save(
        spmd.pretrained.load(folder / "base", progress=False),
        folder / "saved",
        max_shard="60KB",
        progress=False,
    )
    return read_tensors(folder)


def save_adapters(folder):
    shutil.rmtree(folder / "saved", ignore_errors=True)
    model = load_adapters(
        spmd.pretrained.load(folder / "base", progress=False), folder / "adapters", progress=False
    )
    spmd.pretrained.save_adapters(model, folder / "saved", progress=False)
    return read_tensors(folder)


def read_tensors(folder):
    """What the folder of weights holds, read without the library: bytes of tensors by name, and the
    texts beside them.
    """
    fault_shim.end()
    if not (folder / "saved").exists():
        raise FileNotFoundError(folder / "saved")
    arrays = {}
    for path in sorted((folder / "saved").iterdir()):
        content = path.read_bytes()
        if path.suffix != ".safetensors":
            arrays[path.name] = np.frombuffer(content.replace(bytes(folder), b""), np.uint8)
            continue
        start = 8 + int.from_bytes(content[:8], "little")
        for name, tensor in json.loads(content[8:start]).items():
            if name != "__metadata__":
                first, last = tensor["data_offsets"]
                arrays[f"{path.name} {name}"] = np.frombuffer(
                    content[start + first : start + last], np.uint8
                )
    return arrays


def copy_fixtures(folder):
    shutil.copytree(FIXTURES / "llama", folder / "base")
    shutil.copytree(FIXTURES / "adapters/llama", folder / "adapters")


def write_csv(folder):
    rows = "".join(f"{number},{number / 4}\n" for number in range(40))
    (folder / "data.csv").write_text(f"a,b\n{rows}", encoding="utf-8")


def read_indexed(folder):
    batches = list(spmd.data.csv(folder / "data.csv", batch_size=8, index=folder / "index"))
    return {name: np.concatenate([batch[name] for batch in batches]) for name in ("a", "b")}


def compile_programs(folder):
    """Programs are read from the folder where it has them."""
    jax.clear_caches()
    options = {"batch_size": 8, "steps": 2, "progress": False, "compile_cache": folder / "programs"}
    result = spmd.fit(
        linear(), (X, Y), loss=spmd.losses.mean_squared_error, optimizer=optax.adam(0.1), **options
    )
    return {"losses": np.array(result.history["loss"])}


def keep_plan(folder):
    """A program that was compiled for a plan, in its cache; XLA itself is left out."""

    def compile_request(work, *_):
        for name, text in PLAN.items():
            (work / name).write_text(text, encoding="utf-8")

    compile.compile_server.compile_request = compile_request
    texts = compile.program_files(
        b"request", folder / "plans" / f"{7:032x}", 1, "an H100", 60.0, print
    )
    return {
        name: np.frombuffer(text.encode(), np.uint8)
        for name, text in zip(compile.FILES, texts, strict=True)
    }


def overwrite(folder, layout="tensor_parallel", title="new"):
    """A layout and a page, as texts that the library writes all are."""
    write_text(folder / "mine.toml", spmd.Layout.load(layout).to_toml())
    write_text(folder / "page.html", page(title))
    return read_texts(folder)


def wait_in_place(folder):
    """As `overwrite_in_place`; an error is waited for, in vain."""
    try:
        return overwrite_in_place(folder)
    except OSError:
        threading.Event().wait()


def overwrite_in_place(folder, title="new"):
    """What no program should do: a fault leaves a part of a page."""
    (folder / "page.html").write_text(page(title), encoding="utf-8")
    return read_page(folder)


def read_page(folder):
    fault_shim.end()
    return {
        "old or new": np.array(
            (folder / "page.html").read_text(encoding="utf-8") in (page("old"), page("new"))
        )
    }


def page(title):
    return document(title, "<p>text</p>\n" * 2000)


def read_texts(folder):
    fault_shim.end()
    layouts = [spmd.Layout.load(name).to_toml() for name in ("fsdp", "tensor_parallel")]
    texts = [(folder / name).read_text(encoding="utf-8") for name in ("mine.toml", "page.html")]
    return {"old or new": np.array([texts[0] in layouts, texts[1] in (page("old"), page("new"))])}


SCENARIOS = {
    "train": Scenario(fit, resuming(fit)),
    "best": Scenario(fit_best, resuming(fit_best)),
    "memory": Scenario(fit_in_memory, resuming(fit_in_memory), lost="memory"),
    "resume": Scenario(resuming(fit), resuming(fit), prepare=functools.partial(fit, steps=2)),
    "sweep": Scenario(sweep, sweep),
    "export": Scenario(export, export, look=read_export),
    "weights": Scenario(save_weights, save_weights, prepare=copy_fixtures, look=read_tensors),
    "adapters": Scenario(save_adapters, save_adapters, prepare=copy_fixtures, look=read_tensors),
    "index": Scenario(read_indexed, read_indexed, prepare=write_csv),
    "programs": Scenario(compile_programs, compile_programs),
    "plans": Scenario(keep_plan, keep_plan),
    "overwrite": Scenario(
        overwrite,
        overwrite,
        prepare=lambda folder: overwrite(folder, "fsdp", "old"),
        look=read_texts,
        may_miss=False,
    ),
    "waits": Scenario(
        wait_in_place,
        overwrite_in_place,
        prepare=lambda folder: overwrite_in_place(folder, "old"),
        look=read_page,
        may_miss=False,
    ),
    "in place": Scenario(
        overwrite_in_place,
        overwrite_in_place,
        prepare=lambda folder: overwrite_in_place(folder, "old"),
        look=read_page,
        may_miss=False,
    ),
}
