"""A run with a tracker, in a process that may kill itself; or what the tracker stored, read by its
API. Its argument is JSON.
"""

import collections
import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path

MODULES = {"Comet": "comet_ml"}  # where it is not the tracker's name


def train(*, kind, folder, kill, interrupt, steps, seconds):
    import spmd

    spmd.simulate_devices(8)
    from small import fit, numbers

    # that of comet_ml makes folders in the home folder
    importlib.import_module(MODULES.get(kind, kind.lower()))
    before = list(Path.cwd().iterdir())
    log = getattr(spmd.loggers, kind)("digits", checkpoints=True, seconds=seconds)
    if list(Path.cwd().iterdir()) == before:
        print("nothing is made by construction")
    first = []

    def draw(info):
        import numpy as np

        info.log_picture("square", np.full((4, 4, 3), info.step, np.uint8))

    def watch(info):
        first.append(info.step)
        if info.step == interrupt:
            os.kill(os.getpid(), signal.SIGINT)
        if info.step == kill:
            # a bound only: the kill comes as soon as the checkpoint and the steps have arrived
            until = time.monotonic() + 120
            saved = Path(folder, "checkpoints", f"{(kill - 1) // 100 * 100}")
            while not saved.exists() or log._last.get("loss", 0) < kill - 1:
                if time.monotonic() > until:
                    sys.exit("nothing arrived")
                time.sleep(0.05)
            # trackio's thread writes every half second; what it has not written by then, the
            # resumed run delivers
            time.sleep(2)
            os.kill(os.getpid(), signal.SIGKILL)

    checkpoint = spmd.Checkpoint(folder, every=100)
    options = {
        "steps": steps,
        "log_every": 1,
        "eval_data": numbers(40, 1),
        "eval_every": 60,
        "resume": True,
        "progress": True,
    }
    callbacks = [spmd.callbacks.Each(draw, every=70), watch]
    result = fit(
        numbers(160), loggers=[log], callbacks=callbacks, checkpoint=checkpoint, watch=70, **options
    )
    print(f"done {int(result.state.step)}, began after {first[0] - 1}")


def read_mlflow():
    client = importlib.import_module("mlflow").MlflowClient()
    runs = [
        run
        for each in client.search_experiments()
        for run in client.search_runs([each.experiment_id])
    ]
    (run,) = runs
    steps = {
        name: [point.step for point in client.get_metric_history(run.info.run_id, name)]
        for name in run.data.metrics
    }
    files = [file.path for file in client.list_artifacts(run.info.run_id)]
    load = importlib.import_module("mlflow.artifacts").load_dict
    histograms = collections.defaultdict(list)
    for file in client.list_artifacts(run.info.run_id, "histograms"):
        for name, entry in load(f"{run.info.artifact_uri}/{file.path}").items():
            histograms[name].append([int(file.path[-13:-5]), entry["edges"], entry["counts"]])
    pictures = [
        int(file.path[-12:-4]) for file in client.list_artifacts(run.info.run_id, "pictures")
    ]
    about = {"config": run.data.params, "files": files, "status": run.info.status}
    return {
        "runs": [run.info.run_id for run in runs],
        "steps": steps,
        "histograms": histograms,
        "pictures": pictures,
        **about,
    }


def media(rows):
    """Metrics' steps, histograms, and steps of pictures, from (step, row)."""
    steps, histograms, pictures = collections.defaultdict(list), collections.defaultdict(list), []
    for step, row in rows:
        for name, value in row.items():
            if not isinstance(value, dict):
                steps[name].append(step)
            elif value["_type"].endswith("histogram"):
                histograms[name].append([step, value["bins"], value["values"]])
            elif name == "pictures/square":
                pictures.append(step)
    return {"steps": steps, "histograms": histograms, "pictures": pictures}


def read_trackio():
    storage = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
    runs = list(importlib.import_module("trackio").Api().runs("digits"))
    (run,) = runs
    rows = [(row["step"], row) for row in storage.get_logs("digits", run.name, run_id=run.id)]
    files = [each["name"].removeprefix(f"{run.name}-") for each in storage.list_artifacts("digits")]
    return {"runs": [run.id for run in runs], **media(rows), "config": run.config, "files": files}


def read_comet():
    """All attempts' archives: Comet reads an experiment back only from its server."""
    import zipfile

    from spmd.run.known_trackers import archived_rows

    paths = sorted(Path("run/comet").glob("*.zip"), key=lambda path: path.stat().st_mtime)
    rows = [row for path in paths for row in archived_rows(path)]
    steps, histograms, config, files = (
        collections.defaultdict(list),
        collections.defaultdict(list),
        {},
        [],
    )
    for step, name, kind in rows:
        if kind in ("metric", "histogram3d"):
            (steps if kind == "metric" else histograms)[name].append(
                step if kind == "metric" else [step]
            )
        elif kind == "asset":
            files.append(name)
    for path in paths:
        with zipfile.ZipFile(path) as archive, archive.open("messages.json") as lines:
            params = [
                line["payload"]["param"]
                for line in map(json.loads, lines)
                if line["type"] == "parameter_msg"
            ]
        config |= {param["paramName"]: param["paramValue"] for param in params}
    pictures = [step for step, _, kind in rows if kind == "visualization"]
    runs = {
        json.loads(zipfile.ZipFile(path).read("experiment.json"))["offline_id"] for path in paths
    }
    return {
        "runs": sorted(runs),
        "steps": steps,
        "histograms": histograms,
        "pictures": pictures,
        "config": config,
        "files": files,
    }


def read_wandb():
    """All attempts' files: wandb reads a run back only from a server."""
    from spmd.run.wandb_file import offline_messages, offline_rows

    record_class = importlib.import_module("wandb.proto.wandb_internal_pb2").Record
    rows, config, runs = [], {}, set()
    folders = sorted(Path("run/wandb").glob("offline-run-*"))
    parts = []
    for folder in folders:
        (path,) = folder.glob("*.wandb")
        found = list(offline_rows(path))
        parts.append(len(found))
        rows += found
        for message in offline_messages(path):
            record = record_class.FromString(message)
            if record.HasField("run"):
                runs.add(record.run.run_id)
                config |= {
                    item.key: json.loads(item.value_json) for item in record.run.config.update
                }
    if len(parts) != 2 or not all(parts):
        sys.exit(f"both attempts should have rows: {parts}")
    return {
        "runs": sorted(runs),
        **media(rows),
        "config": config,
        "files": os.listdir(folders[-1] / "files"),
    }


if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    if "read" in options:
        print(
            json.dumps(
                {
                    "MLflow": read_mlflow,
                    "Trackio": read_trackio,
                    "Wandb": read_wandb,
                    "Comet": read_comet,
                }[options["read"]]()
            )
        )
    else:
        train(**options)
