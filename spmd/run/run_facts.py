"""The facts about a run that loggers get: its id, its configuration, its folder, and where it
starts.
"""

import contextlib
import dataclasses
import importlib.metadata
import json
import logging
import os
import platform
import subprocess
import uuid
from collections.abc import Mapping
from pathlib import Path

import jax

from spmd.base import output_files

ID_FILE = "run_id.json"  # in the run's folder
GIT_SECONDS = 5.0  # how long a command of git may take
PACKAGES = ("jax", "jaxlib", "flax", "optax", "spmd")


@dataclasses.dataclass(frozen=True)
class RunFacts:
    """A run, for loggers that have a method `begin(facts)`.

    Attributes:
      config: the layout as TOML, mesh, sizes, devices, versions and git state, by name.
      folder: the checkpoint folder, if the run has one.
      step: number of the last step before the run's first, 0 for a new run.
      resumes: whether it continues a run in the folder.
      follows: whether an attempt before it has left records in the folder, of steps that may come
        again.
      id: of the run; a resumed run has the same.
      metrics_begin: where the run's records begin in the folder's `metrics.jsonl`, in bytes.
    """

    config: Mapping[str, str | int | float | bool] = dataclasses.field(default_factory=dict)
    folder: Path | None = None
    step: int = 0
    resumes: bool = False
    follows: bool = False
    id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
    metrics_begin: int = 0

    @property
    def name(self) -> str:
        """A name for people: that of the folder, with the first part of the id.

        >>> RunFacts(folder=Path("runs/digits"), id="3f29c1d2e8").name
        'digits-3f29c1d2'
        """
        folder_name = "run" if self.folder is None else self.folder.resolve().name
        return f"{folder_name}-{self.id[:8]}"


def run_id(folder: Path | None, *, resumes: bool) -> tuple[str, int]:
    """Return the id of the run in a folder, and where its records begin in `metrics.jsonl`, in
    bytes: earlier ones are of an abandoned run.

    Both are those of the run that is resumed, else new, and written to the folder. A folder that
    was copied is a new run, too.

    Example:
      >>> import tempfile
      >>> folder = Path(tempfile.mkdtemp())
      >>> first = run_id(folder, resumes=False)
      >>> run_id(folder, resumes=True) == first, run_id(folder, resumes=False) == first
      (True, False)
    """
    new = uuid.uuid4().hex
    if folder is None:
        return new, 0
    records = folder / "metrics.jsonl"
    here = str(folder.resolve())
    begins = 0
    if not resumes and records.exists():
        begins = records.stat().st_size
    try:
        content = output_files.read_checked(folder / ID_FILE) if resumes else None
        if content is not None:
            saved = json.loads(content)
            # A folder that was moved is the same run: there is none in its former place.
            if saved["folder"] == here or not (Path(saved["folder"]) / ID_FILE).exists():
                return saved["id"], saved["metrics_begin"]
            text = (
                "%s was copied from %s, whose run is another: trackers show this one as a new run."
            )
            logging.getLogger("spmd").warning(text, folder, saved["folder"])
            begins = saved["metrics_begin"]
        facts = {"id": new, "metrics_begin": begins, "folder": here}
        output_files.write_checked(folder / ID_FILE, json.dumps(facts).encode())
    except (OSError, output_files.DamagedFileError) as error:
        logging.getLogger("spmd").warning(
            "%s: %s. Trackers show this attempt as another run.", folder / ID_FILE, error
        )
    return new, begins


def environment() -> dict[str, str | int | float | bool]:
    """Return devices, versions and git state of this process.

    >>> environment()["jax_version"] == jax.__version__
    True
    """
    facts = {
        "devices": jax.device_count(),
        "device_kind": jax.devices()[0].device_kind,
        "processes": jax.process_count(),
        "host": platform.node(),
        "python_version": platform.python_version(),
    }
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            facts[f"{name}_version"] = importlib.metadata.version(name)
    return {**facts, **git_state(Path.cwd())}


def git_state(folder: Path) -> dict[str, str | int | float | bool]:
    """Return the commit of the git repository that a folder is in, and whether tracked files differ
    from it; {} if there is none.

    >>> git_state(Path("/"))
    {}
    """

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        # `git status` would lock the index to refresh it, and another git fails while it is locked.
        environ = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=GIT_SECONDS, check=True, env=environ
        )
        return ended.stdout.strip()

    try:
        return {
            "git_commit": git("rev-parse", "HEAD"),
            "git_dirty": bool(git("status", "--porcelain", "--untracked-files=no")),
        }
    except (OSError, subprocess.SubprocessError):
        return {}
