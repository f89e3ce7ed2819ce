"""The trackers that ship with the library: wandb, MLflow, trackio and Comet."""

import importlib
import itertools
import json
import logging
import netrc
import os
import re
import shutil
import time
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from spmd.errors import OptionError, did_you_mean, import_extra, short_repr
from spmd.run.pictures import FOLDER as PICTURES
from spmd.run.run_facts import RunFacts
from spmd.run.trackers import ANY, FAILED, FINISHED, HISTOGRAMS, STOPPED, Tracker
from spmd.run.wandb_file import offline_rows
from spmd.train.histograms import Histogram

MODES = ("online", "offline")
PARAM_LENGTH, TAG_LENGTH = 6000, 5000  # characters that MLflow accepts


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
        self._experiment, self._uri = (
            _name("MLflow: experiment", experiment),
            str(tracking_uri or self._mlflow.get_tracking_uri()),
        )

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
        experiment = (
            client.create_experiment(self._experiment) if known is None else known.experiment_id
        )
        runs = client.search_runs(
            [experiment], filter_string=f"tags.`spmd.run` = '{facts.id}'", max_results=1
        )
        run = (
            runs[0]
            if runs
            else client.create_run(experiment, run_name=facts.name, tags={"spmd.run": facts.id})
        )
        self._run = run.info.run_id
        client.update_run(self._run, status="RUNNING")
        config = {name: str(value)[:PARAM_LENGTH] for name, value in facts.config.items()}
        params = [
            entities.Param(name, value)
            for name, value in config.items()
            if name not in run.data.params
        ]
        changed = {
            name: value
            for name, value in config.items()
            if run.data.params.get(name, value) != value
        }
        tags = [
            entities.RunTag(f"resumed.{name}", value[:TAG_LENGTH])
            for name, value in changed.items()
        ]
        client.log_batch(self._run, params=params, tags=tags, synchronous=True)

    def last_steps(self) -> dict[str, int]:
        """From the histories of all metrics, and the names of artifacts."""
        names = self._client.get_run(self._run).data.metrics
        last = {
            name: max(point.step for point in self._client.get_metric_history(self._run, name))
            for name in names
        }
        for file in sorted(
            file.path
            for kind in (HISTOGRAMS, PICTURES)
            for file in self._client.list_artifacts(self._run, kind)
        ):
            name, _, step = file.rpartition(".")[0].rpartition("-")
            last[HISTOGRAMS if name.startswith(HISTOGRAMS) else name] = int(step)
        return last

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One batch; it has arrived on return."""
        now = int(time.time() * 1000)
        points = [
            self._mlflow.entities.Metric(name, value, now, step) for name, value in metrics.items()
        ]
        self._client.log_batch(self._run, metrics=points, synchronous=True)

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """As an artifact histograms/histograms-STEP.json: MLflow has no histograms."""
        content = {
            name: {"edges": histogram.edges, "counts": histogram.counts}
            for name, histogram in histograms.items()
        }
        self._client.log_dict(self._run, content, f"{HISTOGRAMS}/{HISTOGRAMS}-{step:08d}.json")

    def log_picture(self, step: int, name: str, path: Path) -> None:
        """As an artifact pictures/NAME-STEP.png, which a resumed run replaces and does not
        double.
        """
        del step, name
        self._client.log_artifact(self._run, str(path), PICTURES)

    def add_file(self, path: Path) -> None:
        """As an artifact."""
        self._client.log_artifact(self._run, str(path))

    def add_checkpoints(self, folder: Path) -> None:
        """As a tag: MLflow has no artifacts that lie elsewhere."""
        self._client.set_tag(self._run, "checkpoints", str(folder))

    def finish(self, *, status: str) -> None:
        """The run's status says how it ended."""
        self._client.set_terminated(
            self._run, {FINISHED: "FINISHED", FAILED: "FAILED", STOPPED: "KILLED"}[status]
        )


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
        self._trackio, self._project = (
            import_extra("trackio", "trackio"),
            _name("Trackio: project", project),
        )
        self._space = next(
            (
                os.environ[name]
                for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")
                if os.environ.get(name)
            ),
            None,
        )

    @property
    def place(self) -> Any:
        """The project."""
        return self._project

    def where(self, facts: RunFacts) -> str:
        """The project and the folder or server."""
        place = (
            import_extra("trackio.utils", "trackio").TRACKIO_DIR
            if self._space is None
            else self._space.partition("?")[0]
        )
        return f"trackio: run {facts.name} of project {self._project} in {place}"

    def open(self, facts: RunFacts) -> None:
        """Find the run by its name, or create it."""
        still = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        self._run = self._trackio.init(
            self._project, name=facts.name, config=dict(facts.config), resume="allow", **still
        )

    def last_steps(self) -> dict[str, int]:
        """From the local store, by metric; a server says the last step of all."""
        if self._space is not None:
            step: int | None = self._run._initial_last_step
            return {} if step is None else {ANY: step}
        storage = import_extra("trackio.sqlite_storage", "trackio").SQLiteStorage
        last: dict[str, int] = {}
        for row in storage.get_logs(self._project, self._run.name, run_id=self._run.id):
            _update(last, row["step"], row)
        return last

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One row; a thread of trackio writes it within a second."""
        self._run.log(dict(metrics), step=step)

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """As trackio's histograms."""
        made = {
            name: self._trackio.Histogram(np_histogram=(each.counts, each.edges))
            for name, each in histograms.items()
        }
        self._run.log(made, step=step)

    def log_picture(self, step: int, name: str, path: Path) -> None:
        """As an image, or a page if it is an SVG file."""
        self._run.log(
            {
                name: self._trackio.Html(path.read_text())
                if path.suffix == ".svg"
                else self._trackio.Image(path)
            },
            step=step,
        )

    def add_file(self, path: Path) -> None:
        """As a version of an artifact of the run."""
        self._run.log_artifact(path, name=f"{self._run.name}-{path.name}", type="run")

    def add_checkpoints(self, folder: Path) -> None:
        """As an artifact that refers to the folder's files."""
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
        self._wandb, self._project, self._entity = (
            import_extra("wandb", "wandb"),
            _name("Wandb: project", project),
            entity,
        )
        mode = mode or os.environ.get("WANDB_MODE") or ("online" if _has_wandb_key() else "offline")
        self._mode = "offline" if mode == "dryrun" else mode  # wandb's older name

    @property
    def place(self) -> Any:
        """wandb knows a run by its id alone."""
        return ""

    def where(self, facts: RunFacts) -> str:
        """The project and the folder."""
        place = (
            f"offline in {self._folder(facts)}/wandb; wandb sync uploads it"
            if self._mode == "offline"
            else self._mode
        )
        return f"wandb: run {facts.name} of project {self._project}, {place}"

    def _folder(self, facts: RunFacts) -> Path:
        """A resumed run must find it again."""
        return Path(os.environ.get("WANDB_DIR") or facts.folder or ".").resolve()

    def open(self, facts: RunFacts) -> None:
        """wandb finds the run by its id, or creates it."""
        folder = self._folder(facts)
        folder.mkdir(parents=True, exist_ok=True)
        self._earlier = (
            sorted(folder.glob(f"wandb/offline-run-*-{facts.id}/*.wandb"))
            if self._mode == "offline"
            else []
        )
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
            settings=self._wandb.Settings(
                silent=True, console="off", init_timeout=self._seconds, finish_timeout=self._seconds
            ),
        )

    def last_steps(self) -> dict[str, int]:
        """Of an offline run from the files of earlier attempts; the server says the last step of
        all.
        """
        last = {ANY: self._run.step - 1} if self._mode == "online" else {}
        for path in self._earlier:
            for step, row in offline_rows(path):
                _update(last, step, row)
        return last

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """wandb joins the metrics of a step, and writes them when the next step begins."""
        self._run.log(dict(metrics), step=step)

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """As wandb's histograms."""
        made = {
            name: self._wandb.Histogram(np_histogram=(each.counts, each.edges))
            for name, each in histograms.items()
        }
        self._run.log(made, step=step)

    def log_picture(self, step: int, name: str, path: Path) -> None:
        """As an image, for which wandb needs Pillow (the extra `images`), or a page if it is an SVG
        file.
        """
        if path.suffix == ".svg":
            self._run.log({name: self._wandb.Html(path.read_text())}, step=step)
            return
        import_extra("PIL", "images")
        self._run.log({name: self._wandb.Image(str(path))}, step=step)

    def add_file(self, path: Path) -> None:
        """In the folder of the run's files."""
        shutil.copy(path, self._run.dir)

    def add_checkpoints(self, folder: Path) -> None:
        """As an artifact that refers to the folder."""
        artifact = self._wandb.Artifact(f"{self._run.name}-checkpoints", type="checkpoints")
        artifact.add_reference(folder.as_uri(), checksum=False)
        self._run.log_artifact(artifact)

    def finish(self, *, status: str) -> None:
        """Flush; the exit code says how the run ended; 255 is that which wandb gives after
        Ctrl-C.
        """
        self._run.finish(exit_code={FINISHED: 0, FAILED: 1, STOPPED: 255}[status])


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
        os.environ.setdefault("COMET_DISABLE_AUTO_LOGGING", "1")  # which the import reads
        self._comet, self._project, self._workspace = (
            import_extra("comet_ml", "comet"),
            _name("Comet: project", project),
            workspace,
        )

    @property
    def place(self) -> Any:
        """Comet knows a run by its id alone."""
        return ""

    def where(self, facts: RunFacts) -> str:
        """The project and the folder."""
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
            # Comet fills it at the end; what a killed attempt leaves is empty
            if not _is_complete(path):
                path.unlink()
        self._earlier = [path for path in archives if path.exists()]
        still = dict.fromkeys(
            (
                "log_code",
                "log_graph",
                "log_git_metadata",
                "log_git_patch",
                "log_env_details",
                "parse_args",
            ),
            False,
        )
        still |= {
            "auto_output_logging": False,
            "auto_param_logging": False,
            "auto_metric_logging": False,
            "display_summary_level": 0,
        }
        logging.getLogger("comet_ml").setLevel(logging.WARNING)
        options = {
            "project_name": self._project,
            "workspace": self._workspace,
            "offline_directory": str(folder),
            **still,
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
        """From the archives of earlier attempts."""
        last: dict[str, int] = {}
        for path in self._earlier:
            for step, name, kind in archived_rows(path):
                name = HISTOGRAMS if kind == "histogram3d" else name
                last[name] = max(step, last.get(name, -1))
        return last

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """As metrics."""
        self._run.log_metrics(dict(metrics), step=step)

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """As Comet's histograms, whose bins are others: a count goes to the bin of the middle of
        its own.
        """
        for name, each in histograms.items():
            made = importlib.import_module("comet_ml.data_structure").Histogram()
            middles = [(low + high) / 2 for low, high in itertools.pairwise(each.edges)]
            used = [
                (middle, count) for middle, count in zip(middles, each.counts, strict=True) if count
            ]
            if used:
                made.add([middle for middle, _ in used], counts=[count for _, count in used])
                self._run.log_histogram_3d(made, name=name, step=step)

    def log_picture(self, step: int, name: str, path: Path) -> None:
        """As an image."""
        self._run.log_image(str(path), name=name, step=step)

    def add_file(self, path: Path) -> None:
        """As an asset."""
        self._run.log_asset(str(path), file_name=path.name, overwrite=True)

    def add_checkpoints(self, folder: Path) -> None:
        """As a value of the experiment."""
        self._run.log_other("checkpoints", str(folder))

    def finish(self, *, status: str) -> None:
        """Write the archive; Comet has no status of archives, so it is a value of the
        experiment.
        """
        self._run.log_other("status", status)
        self._run.end()


def _is_complete(path: Path) -> bool:
    """Whether Comet has written all of an archive."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return {"messages.json", "experiment.json"} <= set(archive.namelist())


def archived_rows(path: Path) -> Iterator[tuple[int, str, str]]:
    """Steps, names and kinds ("metric", or "visualization", "histogram3d" and others) of what an
    archive of Comet has.
    """
    with zipfile.ZipFile(path) as archive, archive.open("messages.json") as lines:
        for message in map(json.loads, lines):
            if message["type"] == "metric_msg" and message["payload"]["metric"]["step"] is not None:
                metric = message["payload"]["metric"]
                yield metric["step"], metric["metricName"], "metric"
            elif message["type"] == "file_upload":
                about = message["payload"]["additional_params"]
                if about.get("step") is not None:
                    yield (
                        about["step"],
                        about.get("figName") or about.get("fileName"),
                        message["payload"]["upload_type"],
                    )


def _update(last: dict[str, int], step: int, row: Mapping[str, Any]) -> None:
    """Add a row of a run, in which histograms are dicts, to its last steps."""
    for name, value in row.items():
        name = (
            HISTOGRAMS
            if isinstance(value, dict) and str(value.get("_type")).endswith("histogram")
            else name
        )
        last[name] = max(step, last.get(name, -1))


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
