"""Loggers for experiment trackers: wandb, MLflow and trackio.

A thread per tracker talks to it, so that training waits for no server. What a killed run had not delivered, the resumed run reads from
`metrics.jsonl` and delivers; what had arrived, it does not write again. A tracker that fails is switched off with one warning.
"""

import contextlib
import functools
import json
import logging
import math
import netrc
import os
import queue
import re
import shutil
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from spmd.distributed import watchdog
from spmd.distributed.initialize import grace_seconds
from spmd.errors import OptionError, did_you_mean, first_line, import_extra, short_repr
from spmd.run.run_facts import RunFacts

MOST_QUEUED = 10_000  # records that a tracker may be behind
ARTIFACTS = ("layout.toml", "metrics.jsonl", "*.html", "*.svg", "*.png")  # in the run's folder
MODES = ("online", "offline")
ANY = ""  # in the result of `last_steps`: metrics that are not listed
BLOCK, HEADER = 32768, 7  # bytes in the files of offline runs of wandb
PARAM_LENGTH, TAG_LENGTH = 6000, 5000  # characters that MLflow accepts


class Tracker:
    """Base class of trackers: a subclass says how a run is found, written and closed, all in one thread.

    Args:
      checkpoints: record where the run's checkpoints are, too; they are not copied.
      seconds: how long `close` waits for the tracker; after SIGTERM at most a quarter of the time that `spmd launch --grace` gives.

    Raises:
      OptionError: `seconds` is not a number above 0.

    Example:
      >>> class Rows(Tracker):
      ...     def where(self, facts): return f"rows of {facts.name}"
      ...     def open(self, facts): self.rows = []
      ...     def last_steps(self): return {"loss": 1}  # what had arrived before a kill
      ...     def log(self, step, metrics): self.rows.append((step, metrics))
      ...     def finish(self, *, failed): self.rows.append("failed" if failed else "finished")
      >>> log = Rows()
      >>> log.begin(RunFacts(id="3f29c1d2e8"))
      'rows of run-3f29c1d2'
      >>> for step in (1, 2):
      ...     log.write({"step": step, "loss": 1 / step})
      >>> log.close()
      >>> log.rows
      [(2, {'loss': 0.5}), 'finished']
    """

    def __init__(self, *, checkpoints: bool = False, seconds: float = 60.0):
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= threading.TIMEOUT_MAX:
            raise OptionError(f"{type(self).__name__}: seconds={short_repr(seconds)}.", fix="a number above 0, such as 60.")
        if not isinstance(checkpoints, bool):
            raise OptionError(f"{type(self).__name__}: checkpoints={short_repr(checkpoints)}.", fix="True or False.")
        self._checkpoints, self._seconds = checkpoints, float(seconds)
        self._jobs: queue.Queue[Callable[[], None] | None] | None = None  # None: no run is open

    @property
    def place(self) -> Any:
        """What no two trackers of a class may share: a run there, whose steps both would write."""
        return id(self)

    def where(self, facts: RunFacts) -> str:
        """Where the run is recorded, as one line."""
        raise NotImplementedError  # abstract: a subclass says how

    def open(self, facts: RunFacts) -> None:
        """Find the run with the id `facts.id`, or create it."""
        raise NotImplementedError  # abstract: a subclass says how

    def last_steps(self) -> Mapping[str, int]:
        """The last step of each metric that the run had when it was opened, by name; `ANY` stands for all others."""
        raise NotImplementedError  # abstract: a subclass says how

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write metrics of a step; steps never decrease."""
        raise NotImplementedError  # abstract: a subclass says how

    def add_file(self, path: Path) -> None:
        """Add a file to the run, in place of an earlier one of its name."""
        raise NotImplementedError  # abstract: a subclass says how

    def add_checkpoints(self, folder: Path) -> None:
        """Record the folder of the run's checkpoints."""
        raise NotImplementedError  # abstract: a subclass says how

    def finish(self, *, failed: bool) -> None:
        """Flush, and close the run."""
        raise NotImplementedError  # abstract: a subclass says how

    def begin(self, facts: RunFacts) -> str | None:
        """Start to record a run; returns a line that says where, or None if that failed."""
        self.close()  # of a run that failed before its first step
        self._off, self._opened = False, False
        self._facts, self._error_before = facts, sys.exc_info()[1]
        self._last: dict[str, int] = {}
        self._jobs = queue.Queue(MOST_QUEUED)
        self._thread = threading.Thread(target=self._work, args=(self._jobs,), name=f"spmd {type(self).__name__}", daemon=True)
        self._thread.start()
        try:
            earlier = list(_earlier_records(facts))
            line = self.where(facts)
        except Exception as error:
            self._switch_off(error)
            return None
        self._put(functools.partial(self._start, facts, earlier))
        return line

    def write(self, record: dict[str, Any]) -> None:
        """Queue the record's numbers."""
        if self._jobs is None:
            self.begin(RunFacts())
        self._put(functools.partial(self._write, dict(record)))

    def close(self) -> None:
        """Deliver what is queued, add the run's files, and close the run; waits for `seconds` at most."""
        if self._jobs is None:
            return
        failed = sys.exc_info()[1] is not self._error_before  # `fit` closes loggers while it handles what has ended the run
        self._put(functools.partial(self._end, failed=failed))
        self._put(None)
        hurries = watchdog.current().requested_stop_reason == watchdog.SIGTERM_REASON
        seconds = min(self._seconds, grace_seconds() / 4) if hurries else self._seconds
        if not self._off:
            self._thread.join(seconds)
        if self._thread.is_alive():
            self._switch_off(TimeoutError(f"it has not finished within {seconds:g} seconds"))
        self._jobs = None

    def _put(self, job: Callable[[], None] | None) -> None:
        if self._off or self._jobs is None:
            return
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            self._switch_off(TimeoutError(f"it is {MOST_QUEUED} records behind"))

    def _work(self, jobs: queue.Queue[Callable[[], None] | None]) -> None:
        try:
            while (job := jobs.get()) is not None and not self._off:
                job()
        except BaseException as error:  # SystemExit, too: a library may raise it
            self._switch_off(error)
            if self._opened:
                with contextlib.suppress(BaseException):
                    self.finish(failed=True)

    def _switch_off(self, error: BaseException) -> None:
        """Stop recording, with one warning."""
        if not self._off:
            self._off = True
            why = "the tracker %s is switched off: %s. Training continues without it."
            logging.getLogger("spmd").warning(why, type(self).__name__, first_line(error))
            with contextlib.suppress(queue.Full):
                self._jobs.put_nowait(None)  # type: ignore[union-attr]

    def _start(self, facts: RunFacts, earlier: list[dict[str, Any]]) -> None:
        self.open(facts)
        self._opened = True
        self._last = dict(self.last_steps())
        for record in earlier:
            self._write(record)

    def _write(self, record: dict[str, Any]) -> None:
        """Write those numbers of a record that the run does not have yet."""
        step, before = record["step"], self._last.get(ANY, -1)
        numbers = {re.sub(r"[^\w\-./ ]", "_", name): float(value) for name, value in record.items() if _is_number(name, value)}
        new = {name: value for name, value in numbers.items() if step > self._last.get(name, before)}
        if new:
            self.log(step, new)
            self._last.update((name, step) for name in new)

    def _end(self, *, failed: bool) -> None:
        folder = self._facts.folder
        try:
            for path in sorted(path for pattern in ARTIFACTS for path in folder.glob(pattern)) if folder is not None else ():
                self.add_file(path)
            if folder is not None and self._checkpoints:
                self.add_checkpoints(folder.resolve() / "checkpoints")
        finally:
            self._opened = False
            self.finish(failed=failed)


def _is_number(name: str, value: Any) -> bool:
    return name != "step" and isinstance(value, int | float) and not isinstance(value, bool)


def _earlier_records(facts: RunFacts) -> Iterator[dict[str, Any]]:
    """Records of the run up to the step that it resumes from."""
    if not facts.resumes or facts.folder is None or not (path := facts.folder / "metrics.jsonl").exists():
        return
    with path.open(encoding="utf-8") as lines:
        lines.seek(facts.metrics_begin)
        for line in lines:
            with contextlib.suppress(ValueError):  # the last line of a machine that lost its power
                record = json.loads(line)
                if isinstance(record, dict) and isinstance(record.get("step"), int) and record["step"] <= facts.step:
                    yield {name: math.nan if value is None else value for name, value in record.items()}


class MLflow(Tracker):
    """A run in MLflow (the extra `mlflow`): on the server that MLFLOW_TRACKING_URI names, else in a database in the working folder.

    What has changed when a run resumes becomes a tag `resumed.NAME`, since MLflow's parameters never change.

    Args:
      experiment: created if missing.
      tracking_uri: in place of MLFLOW_TRACKING_URI.
      **options: of `Tracker`.

    Raises:
      MissingExtraError: mlflow is not installed.

    Example:
      spmd.fit(model, data, checkpoint="runs/digits", loggers=[spmd.loggers.MLflow("digits")], ...)
    """

    def __init__(self, experiment: str = "spmd", *, tracking_uri: str | None = None, **options: Any):
        super().__init__(**options)
        self._mlflow = import_extra("mlflow", "mlflow")
        self._experiment, self._uri = _name("MLflow: experiment", experiment), str(tracking_uri or self._mlflow.get_tracking_uri())

    @property
    def place(self) -> Any:
        """The experiment."""
        return self._experiment, self._uri

    def where(self, facts: RunFacts) -> str:
        """The experiment and the server or file."""
        place = re.sub(r"//[^/@]*@", "//", self._uri)  # without a password
        return f"MLflow: run {facts.name} of experiment {self._experiment} in {place}"

    def open(self, facts: RunFacts) -> None:
        """Find the run by its tag, or create it; write the configuration."""
        self._client = client = self._mlflow.MlflowClient(tracking_uri=self._uri)
        entities = self._mlflow.entities
        known = client.get_experiment_by_name(self._experiment)
        experiment = client.create_experiment(self._experiment) if known is None else known.experiment_id
        runs = client.search_runs([experiment], filter_string=f"tags.`spmd.run` = '{facts.id}'", max_results=1)
        run = runs[0] if runs else client.create_run(experiment, run_name=facts.name, tags={"spmd.run": facts.id})
        self._run = run.info.run_id
        client.update_run(self._run, status="RUNNING")
        config = {name: str(value)[:PARAM_LENGTH] for name, value in facts.config.items()}
        params = [entities.Param(name, value) for name, value in config.items() if name not in run.data.params]
        changed = {name: value for name, value in config.items() if run.data.params.get(name, value) != value}
        tags = [entities.RunTag(f"resumed.{name}", value[:TAG_LENGTH]) for name, value in changed.items()]
        client.log_batch(self._run, params=params, tags=tags, synchronous=True)

    def last_steps(self) -> dict[str, int]:
        """From the histories of all metrics."""
        names = self._client.get_run(self._run).data.metrics
        return {name: max(point.step for point in self._client.get_metric_history(self._run, name)) for name in names}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One batch; it has arrived on return."""
        now = int(time.time() * 1000)
        points = [self._mlflow.entities.Metric(name, value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._run, metrics=points, synchronous=True)

    def add_file(self, path: Path) -> None:
        """As an artifact."""
        self._client.log_artifact(self._run, str(path))

    def add_checkpoints(self, folder: Path) -> None:
        """As a tag: MLflow has no artifacts that lie elsewhere."""
        self._client.set_tag(self._run, "checkpoints", str(folder))

    def finish(self, *, failed: bool) -> None:
        """The run's status says how it ended."""
        self._client.set_terminated(self._run, "FAILED" if failed else "FINISHED")


class Trackio(Tracker):
    """A run in trackio (the extra `trackio`): in its local store ($TRACKIO_DIR), or where TRACKIO_SPACE_ID or TRACKIO_SERVER_URL says.

    Args:
      project: created if missing.
      **options: of `Tracker`.

    Raises:
      MissingExtraError: trackio is not installed.

    Example:
      spmd.fit(model, data, checkpoint="runs/digits", loggers=[spmd.loggers.Trackio("digits")], ...)
    """

    def __init__(self, project: str = "spmd", **options: Any):
        super().__init__(**options)
        self._trackio, self._project = import_extra("trackio", "trackio"), _name("Trackio: project", project)
        self._space = next((os.environ[name] for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL") if os.environ.get(name)), None)

    @property
    def place(self) -> Any:
        """The project."""
        return self._project

    def where(self, facts: RunFacts) -> str:
        """The project and the folder or server."""
        place = import_extra("trackio.utils", "trackio").TRACKIO_DIR if self._space is None else self._space.partition("?")[0]
        return f"trackio: run {facts.name} of project {self._project} in {place}"

    def open(self, facts: RunFacts) -> None:
        """Find the run by its name, or create it."""
        still = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        self._run = self._trackio.init(self._project, name=facts.name, config=dict(facts.config), resume="allow", **still)

    def last_steps(self) -> dict[str, int]:
        """From the local store, by metric; a server says the last step of all."""
        if self._space is not None:
            step: int | None = self._run._initial_last_step
            return {} if step is None else {ANY: step}
        storage = import_extra("trackio.sqlite_storage", "trackio").SQLiteStorage
        last: dict[str, int] = {}
        for row in storage.get_logs(self._project, self._run.name, run_id=self._run.id):
            last |= {name: max(row["step"], last.get(name, -1)) for name in row}
        return last

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One row; a thread of trackio writes it within a second."""
        self._run.log(dict(metrics), step=step)

    def add_file(self, path: Path) -> None:
        """As a version of an artifact of the run."""
        self._run.log_artifact(path, name=f"{self._run.name}-{path.name}", type="run")

    def add_checkpoints(self, folder: Path) -> None:
        """As an artifact that refers to the folder's files."""
        artifact = self._trackio.Artifact(f"{self._run.name}-checkpoints", type="checkpoints")
        artifact.add_reference(folder.as_uri(), checksum=False)
        self._run.log_artifact(artifact)

    def finish(self, *, failed: bool) -> None:
        """Flush; trackio has no status of runs."""
        self._run.finish()


class Wandb(Tracker):
    """A run in Weights & Biases (the extra `wandb`): online where an API key is known, else offline in the run's folder.

    `WANDB_API_KEY`, `WANDB_MODE`, `WANDB_BASE_URL`, `WANDB_DIR` and `~/.netrc` are respected. Each attempt of an offline run is a folder
    with the same run id, and with rows that earlier folders do not have; `wandb sync` joins them.

    Args:
      project: created if missing.
      entity: a user or team; None: wandb's default.
      mode: "online" or "offline", in place of WANDB_MODE.
      **options: of `Tracker`.

    Raises:
      MissingExtraError: wandb is not installed.

    Example:
      spmd.fit(model, data, checkpoint="runs/digits", loggers=[spmd.loggers.Wandb("digits")], ...)
    """

    def __init__(self, project: str = "spmd", *, entity: str | None = None, mode: str | None = None, **options: Any):
        super().__init__(**options)
        if mode not in (None, *MODES):
            raise OptionError(f"Wandb: mode={short_repr(mode)}.", fix=did_you_mean(str(mode), MODES))
        self._wandb, self._project, self._entity = import_extra("wandb", "wandb"), _name("Wandb: project", project), entity
        mode = mode or os.environ.get("WANDB_MODE") or ("online" if _has_wandb_key() else "offline")
        self._mode = "offline" if mode == "dryrun" else mode  # wandb's older name

    @property
    def place(self) -> Any:
        """wandb knows a run by its id alone."""
        return ""

    def where(self, facts: RunFacts) -> str:
        """The project and the folder."""
        place = f"offline in {self._folder(facts)}/wandb; wandb sync uploads it" if self._mode == "offline" else self._mode
        return f"wandb: run {facts.name} of project {self._project}, {place}"

    def _folder(self, facts: RunFacts) -> Path:
        """A resumed run must find it again."""
        return Path(os.environ.get("WANDB_DIR") or facts.folder or ".").resolve()

    def open(self, facts: RunFacts) -> None:
        """wandb finds the run by its id, or creates it."""
        folder = self._folder(facts)
        folder.mkdir(parents=True, exist_ok=True)
        self._earlier = sorted(folder.glob(f"wandb/offline-run-*-{facts.id}/*.wandb")) if self._mode == "offline" else []
        self._run = self._wandb.init(
            project=self._project,
            entity=self._entity,
            id=facts.id,
            name=facts.name,
            resume="allow",
            reinit="create_new",  # a run of the user's in this process is not ended
            mode=self._mode,
            dir=str(folder),
            config=dict(facts.config),
            settings=self._wandb.Settings(silent=True, console="off", init_timeout=self._seconds, finish_timeout=self._seconds),
        )

    def last_steps(self) -> dict[str, int]:
        """Of an offline run from the files of earlier attempts; the server says the last step of all."""
        last = {ANY: self._run.step - 1} if self._mode == "online" else {}
        for path in self._earlier:
            for step, names in offline_rows(path):
                last |= {name: max(step, last.get(name, -1)) for name in names}
        return last

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """wandb joins the metrics of a step, and writes them when the next step begins."""
        self._run.log(dict(metrics), step=step)

    def add_file(self, path: Path) -> None:
        """In the folder of the run's files."""
        shutil.copy(path, self._run.dir)

    def add_checkpoints(self, folder: Path) -> None:
        """As an artifact that refers to the folder."""
        artifact = self._wandb.Artifact(f"{self._run.name}-checkpoints", type="checkpoints")
        artifact.add_reference(folder.as_uri(), checksum=False)
        self._run.log_artifact(artifact)

    def finish(self, *, failed: bool) -> None:
        """Flush; the exit code says how the run ended."""
        self._run.finish(exit_code=int(failed))


def _name(what: str, name: Any) -> str:
    if not isinstance(name, str) or not name.strip():
        raise OptionError(f"{what}={short_repr(name)}.", fix='a name, such as "digits".')
    return name


def _has_wandb_key() -> bool:
    """Whether wandb finds an API key without asking."""
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    try:
        return bool(os.environ.get("WANDB_API_KEY") or netrc.netrc().authenticators(host))
    except (OSError, netrc.NetrcParseError):
        return False


def offline_rows(path: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """Steps and metrics in a file of an offline run of wandb."""
    record_class = import_extra("wandb.proto.wandb_internal_pb2", "wandb").Record
    for message in offline_messages(path):
        history = record_class.FromString(message).history
        items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in history.item}
        if items:
            step = history.step.num if history.HasField("step") else items["_step"]
            yield step, {name: float(value) for name, value in items.items() if not name.startswith("_")}


def offline_messages(path: Path) -> Iterator[bytes]:
    """The messages in a file of an offline run of wandb; what a killed process did not finish is left out.

    The file is in LevelDB's log format: blocks of 32 KiB; in them records of a checksum (4 bytes), a length (2), whether it is all, the
    first, a middle or the last part of a message (1 to 4), and the part. The header of 7 bytes belongs to the first block.
    """
    content, at, message = path.read_bytes(), HEADER, b""
    while at + HEADER <= len(content):
        left = BLOCK - at % BLOCK
        if left < HEADER:  # padding
            at += left
            continue
        length, part = struct.unpack("<HB", content[at + 4 : at + HEADER])
        end = at + HEADER + length
        if not 1 <= part <= 4 or end > len(content):
            return
        message = (message if part > 2 else b"") + content[at + HEADER : end]
        at = end
        if part in (1, 4):
            yield message
