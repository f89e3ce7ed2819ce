"""Trackers: one run over all attempts, no step doubled or missing, and no failure that stops
training.

The tests of wandb, MLflow and trackio run where these are installed: `pip install
'.[wandb,mlflow,trackio]'`.
"""

import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest
from small import fit, numbers

import spmd
from spmd.errors import CallbackError, MissingExtraError, OptionError
from spmd.run import begin_outputs as outputs, trackers
from spmd.run.config import RunConfig
from spmd.run.loggers import close_loggers
from spmd.run.pictures import size
from spmd.run.run_facts import ID_FILE, RunFacts, git_state
from spmd.run.trackers import Tracker
from tests.processes import environment


class Fake(Tracker):
    """A tracker whose server is a dict: {run id: {"config", "points": [(step, name, value)],
    "files", "ends"}}.
    """

    def __init__(self, server=None, broken="", error=None, wait=None, **options):
        super().__init__(**options)
        self.server, self.broken, self.error, self.wait = (
            {} if server is None else server,
            broken,
            error,
            wait,
        )
        self.calls = []

    def _call(self, name):
        self.calls.append(name)
        if name == self.broken:
            if self.wait is not None:
                self.wait.wait(60)
            if self.error is not None:
                raise self.error

    def where(self, facts):
        self._call("where")
        return f"fake: {facts.name}"

    def open(self, facts):
        self._call("open")
        new = {"config": dict(facts.config), "points": [], "files": {}, "ends": []}
        self.run = self.server.setdefault(facts.id, new)

    def last_steps(self):
        self._call("last_steps")
        return {
            name: step for step, name, _ in sorted(self.run["points"], key=lambda point: point[0])
        }

    def log(self, step, metrics):
        self._call("log")
        self.run["points"] += [(step, name, value) for name, value in metrics.items()]

    def log_histograms(self, step, histograms):
        self._call("log_histograms")
        self.run["points"] += [(step, "histograms", histograms)]

    def log_picture(self, step, name, path):
        self._call("log_picture")
        self.run["points"] += [(step, name, path.read_bytes())]

    def add_file(self, path):
        self._call("add_file")
        self.run["files"][path.name] = path.read_text()

    def add_checkpoints(self, folder):
        self.run["files"]["checkpoints"] = folder

    def finish(self, *, status):
        self._call("finish")
        self.run["ends"].append(status)


def train(folder, server, steps, **options):
    """A run with a record at every step, an evaluation at every third, and a checkpoint at every
    fourth.
    """
    options = {
        "loggers": [Fake(server)],
        "resume": True,
        "checkpoint": spmd.Checkpoint(folder, every=4, keep=9),
        **options,
    }
    return fit(
        numbers(160), steps=steps, log_every=1, eval_data=numbers(40, 1), eval_every=3, **options
    )


def steps_of(server, name="loss"):
    """The steps that the only run has for a metric, in the order of writing."""
    (run,) = server.values()
    return [step for step, metric, _ in run["points"] if metric == name]


def warned(caplog):
    messages = [record.getMessage() for record in caplog.records]
    return [
        text
        for text in messages
        if "tracker" in text.lower() and "holds no run to resume" not in text
    ]


def test_tracker_knows_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for command in (
        ["init", "-q"],
        [
            "-c",
            "user.name=a",
            "-c",
            "user.email=a@b",
            "commit",
            "-q",
            "--allow-empty",
            "-m",
            "first",
        ],
    ):
        subprocess.run(["git", *command], check=True, timeout=30)
    server = {}
    (tmp_path / "run").mkdir()
    # of `spmd plan ... --save run/plan.html`
    (tmp_path / "run" / "plan.html").write_text("a report")
    fit(steps=2, loggers=[Fake(server, checkpoints=True)], checkpoint=tmp_path / "run")
    (run,) = server.values()
    config = run["config"]
    assert tomllib.loads(config["layout"])["gradients"] == {"reduction": "all_reduce"}
    expected = {
        "mesh": "data=8",
        "batch_size": 32,
        "steps": 2,
        "precision": "float32",
        "seed": 0,
        "parameters": 8,
        "devices": 8,
    }
    assert {name: config[name] for name in expected} == expected
    assert {
        "jax_version",
        "jaxlib_version",
        "flax_version",
        "optax_version",
        "device_kind",
        "processes",
    } <= config.keys()
    assert len(config["git_commit"]) == 40 and config["git_dirty"] is False
    assert {"layout.toml", "metrics.jsonl", "plan.html"} <= run["files"].keys()
    assert run["files"]["checkpoints"] == (tmp_path / "run" / "checkpoints").resolve()
    assert len(run["files"]["metrics.jsonl"].splitlines()) == 1  # complete when it is added


def test_git_state_says_whether_files_differ(tmp_path):
    assert git_state(tmp_path) == {}
    (tmp_path / "a").write_text("1")
    for command in (
        ["init", "-q"],
        ["add", "a"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", "first"],
    ):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True, timeout=30)
    (tmp_path / "b").write_text("not tracked")
    assert git_state(tmp_path)["git_dirty"] is False
    (tmp_path / "a").write_text("2")
    assert git_state(tmp_path)["git_dirty"] is True


@pytest.mark.system
def test_resumed_run_is_one_run(tmp_path):
    server = {}
    train(tmp_path, server, 4)
    train(tmp_path, server, 7)
    assert steps_of(server) == [1, 2, 3, 4, 5, 6, 7] and steps_of(server, "eval_loss") == [
        3,
        4,
        6,
        7,
    ]
    assert [run["ends"] for run in server.values()] == [["finished", "finished"]]


def test_steps_after_the_checkpoint_are_not_written_twice(tmp_path):
    server = {}
    train(tmp_path, server, 7)
    before = list(next(iter(server.values()))["points"])
    shutil.rmtree(tmp_path / "checkpoints" / "7")  # as after a kill: the run resumes from step 4
    train(tmp_path, server, 9)
    assert steps_of(server) == list(range(1, 10)) and steps_of(server, "eval_loss") == [3, 6, 7, 9]
    assert next(iter(server.values()))["points"][: len(before)] == before


@pytest.mark.system
def test_what_a_killed_run_had_not_delivered_is_delivered_by_the_next(tmp_path):
    server = {}
    train(tmp_path, server, 8)
    (run,) = server.values()
    written = list(run["points"])
    run["points"] = [point for point in written if point[0] <= 2]
    train(tmp_path, server, 9)
    assert [point for point in run["points"] if point[0] <= 8] == written
    assert steps_of(server) == list(range(1, 10)) and steps_of(server, "eval_loss") == [3, 6, 8, 9]


def test_tracker_that_is_added_later_has_all_steps(tmp_path):
    first, second = {}, {}
    train(tmp_path, first, 4, loggers=[])
    train(tmp_path, second, 6)
    assert steps_of(second) == [1, 2, 3, 4, 5, 6]


@pytest.mark.system
def test_new_run_in_the_same_folder_is_another_run(tmp_path):
    server = {}
    train(tmp_path, server, 3, checkpoint=spmd.Checkpoint(tmp_path))
    shutil.rmtree(tmp_path / "checkpoints")
    train(tmp_path, server, 4, resume=False, optimizer=optax.sgd(0.01))
    assert len(server) == 2
    _, second = server.values()
    written = list(second["points"])
    second["points"] = []
    train(tmp_path, server, 4, optimizer=optax.sgd(0.01))
    assert second["points"] == written  # not those of the abandoned run, which has the same steps


@pytest.mark.system
def test_new_run_without_a_tracker_is_another_run(tmp_path):
    server = {}
    train(tmp_path, server, 3)
    shutil.rmtree(tmp_path / "checkpoints")
    train(tmp_path, server, 5, resume=False, loggers=[])
    train(tmp_path, server, 8)
    first, second = server.values()
    assert {step for step, *_ in first["points"]} == {1, 2, 3}
    assert [step for step, name, _ in second["points"] if name == "loss"] == [
        1,
        2,
        3,
        4,
        5,
        6,
        7,
        8,
    ]


@pytest.mark.system
def test_copy_of_a_folder_is_another_run_and_a_renamed_one_is_not(tmp_path, caplog):
    server = {}
    train(tmp_path / "a", server, 4)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    train(tmp_path / "a", server, 5)
    train(tmp_path / "b", server, 6)
    assert (
        len(server) == 2
        and f"{tmp_path / 'b'} was copied from {tmp_path / 'a'}, whose run is another"
        in caplog.text
    )
    shutil.move(tmp_path / "b", tmp_path / "c")
    train(tmp_path / "c", server, 8)
    losses = [
        [step for step, name, _ in run["points"] if name == "loss"] for run in server.values()
    ]
    assert losses == [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 7, 8]]


def test_two_trackers_of_one_run_are_refused(tmp_path):
    class Same(Fake):
        place = "here"

    with pytest.raises(OptionError, match="loggers has two of Same that write the same run"):
        train(tmp_path, {}, 2, loggers=[Same({}), Fake({}), Same({})])


def test_run_without_folder(tmp_path):
    server = {}
    for _ in range(2):
        fit(steps=2, loggers=[Fake(server)], log_every=1)
    assert [run["files"] for run in server.values()] == [{}, {}]


@pytest.mark.sampled(quick=12)
@pytest.mark.parametrize(
    "error", [OSError("no route"), SystemExit(3)], ids=["OSError", "SystemExit"]
)
@pytest.mark.parametrize("broken", ["where", "open", "last_steps", "log", "add_file", "finish"])
def test_tracker_that_fails_never_stops_training(broken, error, tmp_path, caplog):
    if broken == "where" and isinstance(error, SystemExit):
        error = ValueError("no such place")
    healthy, bad = {}, Fake(broken=broken, error=error)
    result = train(tmp_path, None, 3, loggers=[bad, Fake(healthy)])
    assert int(result.state.step) == 3 and steps_of(healthy) == [1, 2, 3]
    why = f"{type(error).__name__}: {error}"
    assert warned(caplog) == [
        f"the tracker Fake is switched off: {why}. Training continues without it."
    ]
    assert bad.calls.count(broken) == 1


def test_warning_about_a_tracker_has_no_password_of_its_server(tmp_path, caplog):
    error = OSError("no route to http://ann:pa55@127.0.0.1:1/api")
    train(tmp_path, None, 3, loggers=[Fake(broken="open", error=error)])
    (text,) = warned(caplog)
    assert "no route to http://***@127.0.0.1:1/api" in text


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("broken", ["open", "log", "finish"])
def test_tracker_that_hangs_never_stops_training(broken, tmp_path, caplog):
    released = threading.Event()
    bad = Fake(broken=broken, wait=released, seconds=0.05)
    assert int(train(tmp_path, None, 3, loggers=[bad]).state.step) == 3
    released.set()
    (text,) = warned(caplog)
    assert text.startswith(
        "the tracker Fake is switched off: TimeoutError: it has not finished within 0.05 seconds."
    )


def test_tracker_that_hangs_does_not_use_up_the_grace_period(tmp_path, caplog, monkeypatch):
    monkeypatch.setenv("SPMD_GRACE", "0.2")
    released = threading.Event()
    with pytest.raises(SystemExit):
        train(
            tmp_path,
            None,
            9,
            loggers=[Fake(broken="open", wait=released)],
            callbacks=[lambda info: os.kill(os.getpid(), signal.SIGTERM)],
        )
    released.set()
    assert "it has not finished within 0.05 seconds" in warned(caplog)[0]


def test_tracker_that_cannot_keep_up_is_switched_off(monkeypatch, caplog):
    monkeypatch.setattr(trackers, "MOST_QUEUED", 3)
    released = threading.Event()
    log = Fake(broken="open", wait=released)
    log.begin(RunFacts())
    for step in range(9):
        log.write({"step": step, "loss": 0.5})
    released.set()
    log.close()
    (text,) = warned(caplog)
    assert "it is 3 records behind" in text


def test_file_is_missing_but_the_run_is_closed(tmp_path, caplog):
    server = {}
    train(tmp_path, None, 2, loggers=[Fake(server, broken="add_file", error=OSError("full"))])
    assert next(iter(server.values()))["ends"] == ["finished"] and len(warned(caplog)) == 1


def test_close_while_the_thread_switches_the_tracker_off():
    """`close` of another thread does not wait for a tracker that is off, and drops the queue that
    ends the thread.
    """
    log = Fake(broken="log", error=OSError("full"))
    log.begin(RunFacts())

    # as late as the warning: the tracker is off, its thread not yet ended
    class Closing(logging.Handler):
        def emit(self, record):
            closing = threading.Thread(target=log.close)
            closing.start()
            closing.join(60)

    handler = Closing()
    logging.getLogger("spmd").addHandler(handler)
    try:
        log.write({"step": 1, "loss": 1.0})
        log._thread.join(60)  # an error in it would be a warning of pytest's
    finally:
        logging.getLogger("spmd").removeHandler(handler)
    assert not log._thread.is_alive()


def test_status_says_whether_the_run_failed():
    def fail(info):
        raise RuntimeError("mine")

    server = {}
    with pytest.raises(CallbackError):
        fit(steps=3, loggers=[Fake(server)], callbacks=[fail])
    try:
        raise KeyError("of the user's")
    except KeyError:
        fit(steps=2, loggers=[Fake(server)])
    assert [run["ends"] for run in server.values()] == [["failed"], ["finished"]]


def test_numbers_are_written_with_names_that_trackers_accept():
    log = Fake()
    log.write(
        {
            "step": 1,
            "loss@end": 1,
            "fine": float("inf"),
            "event": "resumed",
            "flag": True,
            "blocks/0 b-c.d": 0.5,
        }
    )
    log.write({"step": 1, "event": "resumed"})
    log.close()
    log.close()
    assert log.run["points"] == [
        (1, "loss_end", 1.0),
        (1, "fine", float("inf")),
        (1, "blocks/0 b-c.d", 0.5),
    ]
    assert log.calls.count("log") == 1 and log.run["ends"] == ["finished"]


def test_names_that_differ_in_special_characters_remain_different(caplog):
    log = Fake()
    for step in (1, 2):
        log.write({"step": step, "loss@end": 1, "loss_end": 2, "loss!end": 3})
    log.close()
    names = [name for _, name, _ in log.run["points"]]
    assert len(set(names)) == 3 and names[0] == "loss_end" and names[:3] == names[3:]
    assert [value for *_, value in log.run["points"]] == 2 * [1.0, 2.0, 3.0]
    assert [text.partition(",")[0] for text in warned(caplog)] == [
        f'the tracker Fake calls "{name}" {new}'
        for name, new in zip(["loss_end", "loss!end"], names[1:3], strict=True)
    ]


def test_trackers_that_hang_are_waited_for_together(tmp_path, caplog, monkeypatch):
    clock, waited = [0.0], []

    def join(thread, seconds=None):
        """In place of the thread's: the time passes at once."""
        waited.append(seconds)
        clock[0] += seconds

    released = threading.Event()
    trackers_of_run = [
        Fake(broken="open", wait=released, seconds=seconds) for seconds in (20.0, 30.0, 10.0)
    ]
    for log in trackers_of_run:
        log.begin(RunFacts())
    monkeypatch.setattr(trackers.time, "monotonic", lambda: clock[0])
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "join", join)
        close_loggers(trackers_of_run)
    released.set()
    assert sum(waited) == 30 and len(warned(caplog)) == 3


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, "stopped"), (signal.SIGTERM, "stopped")], ids=str
)
def test_status_of_a_run_that_a_signal_ends(number, status):
    server = {}
    with pytest.raises(SystemExit) if number == signal.SIGTERM else contextlib.nullcontext():
        fit(
            steps=9,
            loggers=[Fake(server)],
            callbacks=[lambda info: info.step == 3 and os.kill(os.getpid(), number)],
        )
    assert [run["ends"] for run in server.values()] == [[status]]


def draw(info):
    info.log_picture("square", np.full((2, 3), info.step, np.uint8))


@pytest.mark.system
def test_pictures_and_histograms_of_a_resumed_run_are_written_once(tmp_path):
    options = {"callbacks": [spmd.callbacks.Each(draw, every=2)], "watch": 3}
    server = {}
    train(tmp_path, server, 7, **options)
    (run,) = server.values()
    written = [point for point in run["points"] if point[1] in ("histograms", "pictures/square")]
    assert [(step, name) for step, name, _ in written] == [
        *[
            (2, "pictures/square"),
            (3, "histograms"),
            (4, "pictures/square"),
            (6, "histograms"),
            (6, "pictures/square"),
        ]
    ]
    assert written[1][2].keys() == {"parameters/w", "gradients/w"} and size(written[0][2]) == (3, 2)
    shutil.rmtree(tmp_path / "checkpoints" / "7")  # as after a kill: the run resumes from step 4
    run["points"] = [point for point in run["points"] if point[0] <= 3]  # the rest had not arrived
    train(tmp_path, server, 9, **options)
    again = [point for point in run["points"] if point[1] in ("histograms", "pictures/square")]
    assert again[: len(written)] == written and [step for step, *_ in again[len(written) :]] == [
        8,
        9,
    ]


@pytest.mark.system
def test_what_a_tracker_cannot_show_is_said_once(tmp_path, caplog):
    class Plain(Fake):
        log_histograms, log_picture = Tracker.log_histograms, Tracker.log_picture

    class Unable(Fake):
        def log_picture(self, step, name, path):
            raise ImportError("no module that draws")

    server = {}
    options = {
        "callbacks": [spmd.callbacks.Each(draw, every=4)],
        "watch": 2,
        "loggers": [Plain({}), Unable(server)],
    }
    train(tmp_path, None, 7, **options)
    assert sorted(warned(caplog)) == [
        "the tracker Plain has no histograms; they are in metrics.jsonl.",
        "the tracker Plain has no pictures, such as "
        f"{tmp_path / 'pictures' / 'square-00000004.png'}.",
        "the tracker Unable does not show pictures/square: ImportError: no module that draws.",
    ]
    assert steps_of(server) == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.system
def test_damaged_id_makes_another_run(tmp_path, caplog):
    server = {}
    train(tmp_path, server, 4)
    (tmp_path / ID_FILE).write_bytes((tmp_path / ID_FILE).read_bytes().replace(b'"id"', b'"ib"'))
    train(tmp_path, server, 5)
    first, second = server.values()
    assert [steps[0] for steps in second["points"] if steps[1] == "loss"] == [
        1,
        2,
        3,
        4,
        5,
    ] and len(first["ends"]) == 1
    (text,) = warned(caplog)
    assert (
        "its contents do not match its checksum. Trackers show this attempt as another run." in text
    )


@pytest.mark.system
def test_users_logger_gets_the_facts_of_the_run(tmp_path):
    class Mine:
        def begin(self, facts):
            self.facts = facts

        def write(self, record):
            assert record["step"] >= self.facts.step

        def close(self):
            pass

    mine = Mine()
    train(tmp_path, {}, 4, loggers=[mine])
    assert (mine.facts.folder, mine.facts.step, mine.facts.resumes) == (tmp_path, 0, True)
    first = mine.facts.id
    train(tmp_path, {}, 5, loggers=[mine])
    assert (mine.facts.id, mine.facts.step) == (first, 4)

    class Bad(Mine):
        def begin(self, facts):
            raise ZeroDivisionError("division by zero")

    with pytest.raises(
        CallbackError, match=r"^logger Bad\.begin raises ZeroDivisionError: division by zero"
    ):
        fit(steps=2, loggers=[Bad()])


def test_only_process_0_has_a_tracker(tmp_path, monkeypatch):
    log = Fake()
    monkeypatch.setattr(outputs.jax, "process_index", lambda: 1)
    unused: Any = None
    config = RunConfig(loggers=[log])
    loggers, _ = outputs.begin_outputs(config, unused, unused, unused, unused, unused, unused, None)
    assert loggers == [] and log.calls == []


def test_folder_without_trackers_has_no_id(tmp_path):
    fit(steps=2, checkpoint=tmp_path)
    assert not (tmp_path / ID_FILE).exists()


@pytest.mark.parametrize("seconds", [0, -1.0, "long", True, None])
def test_seconds_are_checked(seconds):
    with pytest.raises(
        OptionError, match=r"^Fake: seconds=.*\n    fix: a number above 0, such as 60\."
    ):
        Fake(seconds=seconds)


@pytest.mark.parametrize(
    ("name", "module"),
    [("MLflow", "mlflow"), ("Trackio", "trackio"), ("Wandb", "wandb"), ("Comet", "comet_ml")],
)
def test_extra_is_named_when_it_is_missing(name, module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError) as raised:
        getattr(spmd.loggers, name)("digits")
    assert (
        str(raised.value)
        == f"{module} is not installed.\n    fix: in the checkout of spmd: pip install "
        f"'.[{name.lower()}]'."
    )


@pytest.mark.parametrize(
    ("environment", "lines", "mode"),
    [
        ({}, "", "offline"),
        ({"WANDB_API_KEY": "k" * 40}, "", "online"),
        ({"WANDB_API_KEY": "k" * 40, "WANDB_MODE": "offline"}, "", "offline"),
        ({}, "machine api.wandb.ai login user password k", "online"),
        (
            {"WANDB_BASE_URL": "https://wandb.example"},
            "machine api.wandb.ai login user password k",
            "offline",
        ),
    ],
)
def test_wandb_is_offline_without_a_key(environment, lines, mode, monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**environment, "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / ".netrc").write_text(lines)
    (tmp_path / ".netrc").chmod(0o600)
    # any module: construction calls nothing of it
    monkeypatch.setitem(sys.modules, "wandb", logging)
    facts = RunFacts(folder=tmp_path / "run", id="0123456789")
    places = {
        "offline": f"offline in {tmp_path}/run/wandb; wandb sync uploads it",
        "online": "online",
    }
    assert (
        spmd.loggers.Wandb("digits").where(facts)
        == f"wandb: run run-01234567 of project digits, {places[mode]}"
    )


# The trackers themselves, in processes of their own.

JOB = Path(__file__).with_name("tracker_job.py")
WATCHED = {"gradients/w": [70, 140, 210], "parameters/w": [70, 140, 210]}
# wandb has written a part of them to its file; the checkpoint is that of step 200, so 30 steps are
# made twice
STEPS, KILL = 240, 231


def run_job(tmp_path, kind, *, kill=0, interrupt=0, steps=STEPS, seconds=60, server=None):
    """One attempt, in the folder of the test, which also holds every store; reaped, with a
    bound.
    """
    offline = {
        "WANDB_MODE": "offline",
        "HF_HUB_OFFLINE": "1",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
    }
    homes = {
        "HOME": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "XDG_DATA_HOME": str(tmp_path / "data"),
    }
    variables = environment(**offline, **homes, COMET_DISABLE_AUTO_LOGGING=1)
    variables.pop("MLFLOW_TRACKING_URI", None)
    variables |= {} if server is None else server
    options = json.dumps(
        {
            "kind": kind,
            "folder": str(tmp_path / "run"),
            "kill": kill,
            "interrupt": interrupt,
            "steps": steps,
            "seconds": seconds,
        }
    )
    command = [sys.executable, str(JOB), options]
    return subprocess.run(
        command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=240
    )


def read_back(tmp_path, kind):
    """(runs, {metric: steps}, names of files) by the tracker's API."""
    variables = environment(TRACKIO_DIR=tmp_path / "trackio", HF_HUB_OFFLINE=1, HOME=tmp_path)
    command = [sys.executable, str(JOB), json.dumps({"read": kind})]
    result = subprocess.run(
        command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.system
@pytest.mark.parametrize("kind", ["MLflow", "Trackio", "Wandb", "Comet"])
def test_run_that_is_killed_and_resumed_is_one_run(kind, tmp_path):
    module = {"Comet": "comet_ml"}.get(kind, kind.lower())
    pytest.importorskip(
        module, reason=f"{module} is not installed: pip install '.[{kind.lower()}]'"
    )
    killed = run_job(tmp_path, kind, kill=KILL)
    assert killed.returncode == -9, killed.stderr
    resumed = run_job(tmp_path, kind)
    assert resumed.returncode == 0 and "switched off" not in resumed.stderr, resumed.stderr
    assert f"done {STEPS}, began after 200" in resumed.stdout
    stored = read_back(tmp_path, kind)
    assert len(stored["runs"]) == 1
    assert stored["steps"]["loss"] == list(range(1, STEPS + 1))
    assert stored["steps"]["eval_loss"] == list(range(60, STEPS + 1, 60))
    assert stored["pictures"] == [70, 140, 210]
    assert {
        name: [step for step, *_ in found] for name, found in stored["histograms"].items()
    } == WATCHED
    records = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    written = {record["step"]: record["histograms"] for record in records if "histograms" in record}
    for name, found in stored["histograms"].items():
        for step, edges, counts in found if kind != "Comet" else ():  # whose bins are others
            entry = spmd.loggers.Histogram(**written[step][name])
            assert (entry.edges, entry.counts) == (edges, counts) and sum(counts) == 8
    assert stored["config"]["mesh"] == "data=8" and "all_reduce" in stored["config"]["layout"]
    assert {"layout.toml", "metrics.jsonl"} <= set(stored["files"])
    assert "nothing is made by construction" in killed.stdout


@pytest.mark.system
def test_run_that_is_interrupted_is_killed_in_mlflow_until_it_resumes(tmp_path):
    pytest.importorskip("mlflow", reason="mlflow is not installed: pip install '.[mlflow]'")
    for interrupt, status in ((100, "KILLED"), (0, "FINISHED")):
        attempt = run_job(tmp_path, "MLflow", interrupt=interrupt, steps=150)
        assert attempt.returncode == 0, attempt.stderr
        stored = read_back(tmp_path, "MLflow")
        assert stored["status"] == status and len(stored["runs"]) == 1
    assert stored["steps"]["loss"] == list(range(1, 151))


@pytest.mark.system
def test_comet_continues_an_experiment_whose_archives_are_complete(tmp_path):
    pytest.importorskip("comet_ml", reason="comet_ml is not installed: pip install '.[comet]'")
    for steps in (100, 150):
        attempt = run_job(tmp_path, "Comet", steps=steps)
        assert attempt.returncode == 0 and "switched off" not in attempt.stderr, attempt.stderr
    stored = read_back(tmp_path, "Comet")
    assert len(stored["runs"]) == 1 and len(list((tmp_path / "run" / "comet").glob("*.zip"))) == 2
    assert stored["steps"]["loss"] == list(range(1, 151)) and stored["pictures"] == [70, 140]
    assert {name: [step for (step,) in found] for name, found in stored["histograms"].items()} == {
        name: [70, 140] for name in WATCHED
    }


SERVERS = {  # on a port where nothing listens
    "MLflow": {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9"},
    "Trackio": {"TRACKIO_SERVER_URL": "http://127.0.0.1:9/?write_token=secret"},
    "Wandb": {
        "WANDB_MODE": "online",
        "WANDB_BASE_URL": "http://127.0.0.1:9",
        "WANDB_API_KEY": "0" * 40,
    },
}


@pytest.mark.system
@pytest.mark.parametrize("kind", SERVERS)
def test_server_that_is_not_there_never_stops_training(kind, tmp_path):
    pytest.importorskip(
        kind.lower(), reason=f"{kind.lower()} is not installed: pip install '.[{kind.lower()}]'"
    )
    result = run_job(tmp_path, kind, steps=12, seconds=2, server=SERVERS[kind])
    assert result.returncode == 0 and "done 12" in result.stdout, result.stderr
    assert result.stderr.count(f"the tracker {kind} is switched off: ") == 1
    assert (
        f"{kind.lower()}: run run-" in result.stderr.lower()
        and "secret" not in result.stdout + result.stderr
    )


@pytest.mark.parametrize(
    "kind, option, fix",
    [
        ("Comet", "workspce", 'did you mean "workspace"?'),
        ("Wandb", "entty", 'did you mean "entity"?'),
        ("MLflow", "tracking_url", 'did you mean "tracking_uri"?'),
        ("Trackio", "checkpoint", 'did you mean "checkpoints"?'),
        ("Trackio", "zzz", "known: project, checkpoints, seconds."),
    ],
)
def test_trackers_refuse_unknown_options(kind, option, fix):
    """Before they look for the tracker's package."""
    with pytest.raises(OptionError, match=f'{kind}: there is no option "{option}"') as raised:
        getattr(spmd.loggers, kind)(**{option: "x"})
    assert raised.value.fix == fix
