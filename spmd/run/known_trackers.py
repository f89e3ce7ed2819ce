"""The trackers that ship with the library: wandb, MLflow, trackio and Comet."""

import importlib
import itertools
import json
import logging
import netrc
import os
import shutil
import time
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from spmd.base.redact import redact_text
from spmd.errors import OptionError, did_you_mean, import_extra, short_repr
from spmd.run.pictures import FOLDER as PICTURES
from spmd.run.run_facts import RunFacts
from spmd.run.trackers import ANY, FAILED, FINISHED, HISTOGRAMS, STOPPED, Tracker
from spmd.run.wandb_file import offline_rows
from spmd.train.histograms import Histogram

MODES = ("online", "offline")
# Characters that MLflow accepts.
PARAM_LENGTH = 6000
TAG_LENGTH = 5000


class MLflow(Tracker):
    """A run in MLflow (the extra `mlflow`): on the server that MLFLOW_TRACKING_URI names, else in a
    database in the working folder.

    What has changed when a run resumes becomes a tag `resumed.NAME`, since MLflow's parameters
    never change.

    Args:
      experiment: created if missing.
      tracking_uri: in place of MLFLOW_TRACKING_URI.
      **options: of `Tracker`.

    Raises:
      MissingExtraError: mlflow is not installed.

    Example:
      spmd.fit(model, data, checkpoint="runs/digits", loggers=[spmd.loggers.MLflow("digits")], ...)
    """

    def __init__(
        self, experiment: str = "spmd", *, tracking_uri: str | None = None, **options: Any
    ):
        super().__init__(**options)
        self._mlflow = import_extra("mlflow", "mlflow")
        self._experiment = _name("MLflow: experiment", experiment)
        self._uri = str(tracking_uri or self._mlflow.get_tracking_uri())

    @property
    def place(self) -> Any:
        """The experiment."""
        return self._experiment, self._uri

    def where(self, facts: RunFacts) -> str:
        """Return the experiment and the server or file."""
        # A URI may have a password.
        place = redact_text(self._uri)
        return f"MLflow: run {facts.name} of experiment {self._experiment} in {place}"

    def open(self, facts: RunFacts) -> None:
        """Find the run by its tag, or create it; write the configuration."""
        self._client = client = self._mlflow.MlflowClient(tracking_uri=self._uri)
        entities = self._mlflow.entities
        experiment = client.get_experiment_by_name(self._experiment)
        if experiment is None:
            experiment_id = client.create_experiment(self._experiment)
        else:
            experiment_id = experiment.experiment_id
        runs = client.search_runs(
            [experiment_id], filter_string=f"tags.`spmd.run` = '{facts.id}'", max_results=1
        )
        if runs:
            run = runs[0]
        else:
            run = client.create_run(experiment_id, run_name=facts.name, tags={"spmd.run": facts.id})
        self._run = run.info.run_id
        client.update_run(self._run, status="RUNNING")
        params = []
        tags = []
        for name, full_value in facts.config.items():
            value = str(full_value)[:PARAM_LENGTH]
            if name not in run.data.params:
                params.append(entities.Param(name, value))
            elif run.data.params[name] != value:
                # MLflow refuses to change a parameter.
                tags.append(entities.RunTag(f"resumed.{name}", value[:TAG_LENGTH]))
        client.log_batch(self._run, params=params, tags=tags, synchronous=True)

    def last_steps(self) -> dict[str, int]:
        """Return the last steps in the histories of all metrics, and in the names of artifacts."""
        last = {}
        for name in self._client.get_run(self._run).data.metrics:
            points = self._client.get_metric_history(self._run, name)
            last[name] = max(point.step for point in points)
        paths = []
        for kind in (HISTOGRAMS, PICTURES):
            paths += [file.path for file in self._client.list_artifacts(self._run, kind)]
        for path in sorted(paths):
            stem, _, _ = path.rpartition(".")
            name, _, step = stem.rpartition("-")
            if name.startswith(HISTOGRAMS):
                name = HISTOGRAMS
            last[name] = int(step)
        return last

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one batch; it has arrived on return."""
        now = int(time.time() * 1000)
        points = [
            self._mlflow.entities.Metric(name, value, now, step) for name, value in metrics.items()
        ]
        self._client.log_batch(self._run, metrics=points, synchronous=True)

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Write an artifact histograms/histograms-STEP.json: MLflow has no histograms."""
        content = {
            name: {"edges": histogram.edges, "counts": histogram.counts}
            for name, histogram in histograms.items()
        }
        self._client.log_dict(self._run, content, f"{HISTOGRAMS}/{HISTOGRAMS}-{step:08d}.json")

    def log_picture(self, step: int, name: str, path: Path) -> None:
        """Write an artifact pictures/NAME-STEP.png, which a resumed run replaces and does not
        double.
        """
        del step, name
        self._client.log_artifact(self._run, str(path), PICTURES)

    def add_file(self, path: Path) -> None:
        """Add an artifact."""
        self._client.log_artifact(self._run, str(path))

    def add_checkpoints(self, folder: Path) -> None:
        """Add a tag: MLflow has no artifacts that lie elsewhere."""
        self._client.set_tag(self._run, "checkpoints", str(folder))

    def finish(self, *, status: str) -> None:
        """Close the run with a status that says how it ended."""
        states = {FINISHED: "FINISHED", FAILED: "FAILED", STOPPED: "KILLED"}
        self._client.set_terminated(self._run, states[status])


class Trackio(Tracker):
    """A run in trackio (the extra `trackio`): in its local store ($TRACKIO_DIR), or where
    TRACKIO_SPACE_ID or TRACKIO_SERVER_URL says.

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
        self._trackio = import_extra("trackio", "trackio")
        self._project = _name("Trackio: project", project)
        space = os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL")
        self._space = space or None

    @property
    def place(self) -> Any:
        """The project."""
        return self._project

    def where(self, facts: RunFacts) -> str:
        """Return the project and the folder or server."""
        if self._space is None:
            place = import_extra("trackio.utils", "trackio").TRACKIO_DIR
        else:
            # A URL may have a token behind the question mark.
            place = self._space.partition("?")[0]
        return f"trackio: run {facts.name} of project {self._project} in {place}"

    def open(self, facts: RunFacts) -> None:
        """Find the run by its name, or create it."""
        self._run = self._trackio.init(
            self._project,
            name=facts.name,
            config=dict(facts.config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def last_steps(self) -> dict[str, int]:
        """Return the last steps in the local store, by metric; a server says the last step of
        all.
        """
        if self._space is not None:
            step: int | None = self._run._initial_last_step
            return {} if step is None else {ANY: step}
        storage = import_extra("trackio.sqlite_storage", "trackio").SQLiteStorage
        last: dict[str, int] = {}
        for row in storage.get_logs(self._project, self._run.name, run_id=self._run.id):
            _update(last, row["step"], row)
        return last

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one row; a thread of trackio writes it within a second."""
        self._run.log(dict(metrics), step=step)

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Write trackio's histograms."""
        converted = {
            name: self._trackio.Histogram(np_histogram=(each.counts, each.edges))
            for name, each in histograms.items()
        }
        self._run.log(converted, step=step)

    def log_picture(self, step: int, name: str, path: Path) -> None:
        """Write an image, or a page if it is an SVG file."""
        if path.suffix == ".svg":
            picture = self._trackio.Html(path.read_text())
        else:
            picture = self._trackio.Image(path)
        self._run.log({name: picture}, step=step)

    def add_file(self, path: Path) -> None:
        """Add a version of an artifact of the run."""
        self._run.log_artifact(path, name=f"{self._run.name}-{path.name}", type="run")

    def add_checkpoints(self, folder: Path) -> None:
        """Add an artifact that refers to the folder's files."""
        artifact = self._trackio.Artifact(f"{self._run.name}-checkpoints", type="checkpoints")
        artifact.add_reference(folder.as_uri(), checksum=False)
        self._run.log_artifact(artifact)

    def finish(self, *, status: str) -> None:
        """Flush; trackio has no status of runs."""
        self._run.finish()


class Wandb(Tracker):
    """A run in Weights & Biases (the extra `wandb`): online where an API key is known, else offline
    in the run's folder.

    `WANDB_API_KEY`, `WANDB_MODE`, `WANDB_BASE_URL`, `WANDB_DIR` and `~/.netrc` are respected. Each
    attempt of an offline run is a folder with the same run id, and with rows that earlier folders
    do not have; `wandb sync` joins them.

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

    def __init__(
        self,
        project: str = "spmd",
        *,
        entity: str | None = None,
        mode: str | None = None,
        **options: Any,
    ):
        super().__init__(**options)
        if mode not in (None, *MODES):
            raise OptionError(
                f"Wandb: mode={short_repr(mode)}.", fix=did_you_mean(str(mode), MODES)
            )
        self._wandb = import_extra("wandb", "wandb")
        self._project = _name("Wandb: project", project)
        self._entity = entity
        mode = mode or os.environ.get("WANDB_MODE")
        if not mode:
            # Without a key, wandb would ask for one in the terminal.
            mode = "online" if _has_wandb_key() else "offline"
        if mode == "dryrun":  # wandb's older name
            mode = "offline"
        self._mode = mode

    @property
    def place(self) -> Any:
        """Nothing: wandb knows a run by its id alone."""
        return ""

    def where(self, facts: RunFacts) -> str:
        """Return the project and the folder."""
        place = self._mode
        if self._mode == "offline":
            place = f"offline in {self._folder(facts)}/wandb; wandb sync uploads it"
        return f"wandb: run {facts.name} of project {self._project}, {place}"

    def _folder(self, facts: RunFacts) -> Path:
        """Return the folder of offline runs, which a resumed run must find again."""
        return Path(os.environ.get("WANDB_DIR") or facts.folder or ".").resolve()

    def open(self, facts: RunFacts) -> None:
        """Let wandb find the run by its id, or create it."""
        folder = self._folder(facts)
        folder.mkdir(parents=True, exist_ok=True)
        self._earlier: list[Path] = []
        if self._mode == "offline":
            self._earlier = sorted(folder.glob(f"wandb/offline-run-*-{facts.id}/*.wandb"))
        self._run = self._wandb.init(
            project=self._project,
            entity=self._entity,
            id=facts.id,
            name=facts.name,
            resume="allow",
            # A run of the user's in this process is not ended.
            reinit="create_new",
            mode=self._mode,
            dir=str(folder),
            config=dict(facts.config),
            settings=self._wandb.Settings(
                silent=True, console="off", init_timeout=self._seconds, finish_timeout=self._seconds
            ),
        )

    def last_steps(self) -> dict[str, int]:
        """Return the last steps of an offline run, from the files of earlier attempts; a server
        says the last step of all.
        """
        last = {ANY: self._run.step - 1} if self._mode == "online" else {}
        for path in self._earlier:
            for step, row in offline_rows(path):
                _update(last, step, row)
        return last

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write metrics. wandb joins those of a step, and writes them when the next step begins."""
        self._run.log(dict(metrics), step=step)

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Write wandb's histograms."""
        converted = {
            name: self._wandb.Histogram(np_histogram=(each.counts, each.edges))
            for name, each in histograms.items()
        }
        self._run.log(converted, step=step)

    def log_picture(self, step: int, name: str, path: Path) -> None:
        """Write an image, for which wandb needs Pillow (the extra `images`), or a page if it is an
        SVG file.
        """
        if path.suffix == ".svg":
            self._run.log({name: self._wandb.Html(path.read_text())}, step=step)
            return
        import_extra("PIL", "images")
        self._run.log({name: self._wandb.Image(str(path))}, step=step)

    def add_file(self, path: Path) -> None:
        """Copy a file into the folder of the run's files."""
        shutil.copy(path, self._run.dir)

    def add_checkpoints(self, folder: Path) -> None:
        """Add an artifact that refers to the folder."""
        artifact = self._wandb.Artifact(f"{self._run.name}-checkpoints", type="checkpoints")
        artifact.add_reference(folder.as_uri(), checksum=False)
        self._run.log_artifact(artifact)

    def finish(self, *, status: str) -> None:
        """Flush, with an exit code that says how the run ended."""
        # wandb itself gives 255 after Ctrl-C.
        exit_codes = {FINISHED: 0, FAILED: 1, STOPPED: 255}
        self._run.finish(exit_code=exit_codes[status])


class Comet(Tracker):
    """A run in Comet (the extra `comet`), offline: each attempt is an archive in `comet/` in the
    run's folder, with the same key.

    `comet upload runs/digits/comet/*.zip` sends them, and joins them to one experiment. A killed
    attempt leaves no archive; that of the next one has its records. While spmd has a run, Comet's
    messages below a warning are not shown, and it logs nothing automatically.

    Args:
      project: created if missing, when archives are uploaded.
      workspace: None: Comet's default.
      **options: of `Tracker`.

    Raises:
      MissingExtraError: comet_ml is not installed.

    Example:
      spmd.fit(model, data, checkpoint="runs/digits", loggers=[spmd.loggers.Comet("digits")], ...)
    """

    def __init__(self, project: str = "spmd", *, workspace: str | None = None, **options: Any):
        super().__init__(**options)
        if workspace is not None:
            _name("Comet: workspace", workspace)
        # Comet reads the variable when it is imported.
        os.environ.setdefault("COMET_DISABLE_AUTO_LOGGING", "1")
        self._comet = import_extra("comet_ml", "comet")
        self._project = _name("Comet: project", project)
        self._workspace = workspace

    @property
    def place(self) -> Any:
        """Nothing: Comet knows a run by its id alone."""
        return ""

    def where(self, facts: RunFacts) -> str:
        """Return the project and the folder."""
        return (
            f"Comet: run {facts.name} of project {self._project}, offline in "
            f"{self._folder(facts)}; comet upload sends it"
        )

    def _folder(self, facts: RunFacts) -> Path:
        return (facts.folder or Path()).resolve() / "comet"

    def open(self, facts: RunFacts) -> None:
        """Begin another archive of the experiment with this key."""
        folder = self._folder(facts)
        folder.mkdir(parents=True, exist_ok=True)
        archives = sorted(folder.glob(f"{facts.id}*.zip"))
        for path in archives:
            # Comet fills an archive at the end: the one of a killed attempt is empty.
            if not _is_complete(path):
                path.unlink()
        self._earlier = [path for path in archives if path.exists()]
        # Comet reports every experiment at INFO.
        logging.getLogger("comet_ml").setLevel(logging.WARNING)
        options = {
            "project_name": self._project,
            "workspace": self._workspace,
            "offline_directory": str(folder),
            "log_code": False,
            "log_graph": False,
            "log_git_metadata": False,
            "log_git_patch": False,
            "log_env_details": False,
            "parse_args": False,
            "auto_output_logging": False,
            "auto_param_logging": False,
            "auto_metric_logging": False,
            "display_summary_level": 0,
        }
        if self._earlier:
            self._run = self._comet.ExistingOfflineExperiment(
                previous_experiment=facts.id, **options
            )
        else:
            self._run = self._comet.OfflineExperiment(experiment_key=facts.id, **options)
        self._run.set_name(facts.name)
        self._run.log_parameters(dict(facts.config))

    def last_steps(self) -> dict[str, int]:
        """Return the last steps in the archives of earlier attempts."""
        last: dict[str, int] = {}
        for path in self._earlier:
            for step, name, kind in archived_rows(path):
                key = HISTOGRAMS if kind == "histogram3d" else name
                last[key] = max(step, last.get(key, -1))
        return last

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write metrics."""
        self._run.log_metrics(dict(metrics), step=step)

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Write Comet's histograms, whose bins differ: a count goes to the bin that contains the
        middle of its own.
        """
        for name, histogram in histograms.items():
            converted = importlib.import_module("comet_ml.data_structure").Histogram()
            pairs = itertools.pairwise(histogram.edges)
            middles = []
            counts = []
            for (low, high), count in zip(pairs, histogram.counts, strict=True):
                if count:
                    middles.append((low + high) / 2)
                    counts.append(count)
            if counts:
                converted.add(middles, counts=counts)
                self._run.log_histogram_3d(converted, name=name, step=step)

    def log_picture(self, step: int, name: str, path: Path) -> None:
        """Write an image."""
        self._run.log_image(str(path), name=name, step=step)

    def add_file(self, path: Path) -> None:
        """Add an asset."""
        self._run.log_asset(str(path), file_name=path.name, overwrite=True)

    def add_checkpoints(self, folder: Path) -> None:
        """Add a value of the experiment."""
        self._run.log_other("checkpoints", str(folder))

    def finish(self, *, status: str) -> None:
        """Write the archive; Comet has no status of archives, so it is a value of the
        experiment.
        """
        self._run.log_other("status", status)
        self._run.end()


def _is_complete(path: Path) -> bool:
    """Return whether Comet has written all of an archive."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return {"messages.json", "experiment.json"} <= set(archive.namelist())


def archived_rows(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield step, name and kind ("metric", or "visualization", "histogram3d" and others) of each
    entry of an archive of Comet.
    """
    with zipfile.ZipFile(path) as archive, archive.open("messages.json") as lines:
        for line in lines:
            message = json.loads(line)
            if message["type"] == "metric_msg":
                metric = message["payload"]["metric"]
                if metric["step"] is not None:
                    yield metric["step"], metric["metricName"], "metric"
            elif message["type"] == "file_upload":
                payload = message["payload"]
                about = payload["additional_params"]
                if about.get("step") is not None:
                    name = about.get("figName") or about.get("fileName")
                    yield about["step"], name, payload["upload_type"]


def _update(last: dict[str, int], step: int, row: Mapping[str, Any]) -> None:
    """Add a row of a run, in which histograms are dicts, to its last steps."""
    for name, value in row.items():
        key = name
        if isinstance(value, dict) and str(value.get("_type")).endswith("histogram"):
            key = HISTOGRAMS
        last[key] = max(step, last.get(key, -1))


def _name(what: str, name: Any) -> str:
    if not isinstance(name, str) or not name.strip():
        raise OptionError(f"{what}={short_repr(name)}.", fix='a name, such as "digits".')
    return name


def _has_wandb_key() -> bool:
    """Return whether wandb finds an API key without asking."""
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    try:
        return bool(os.environ.get("WANDB_API_KEY") or netrc.netrc().authenticators(host))
    except (OSError, netrc.NetrcParseError):
        return False
