"""A sweep on disk, for resuming: its configuration, and each chunk of trials at its newest step."""

import contextlib
import functools
import io
import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from spmd.base import output_files
from spmd.base.user_paths import make_folder, wrap_os_errors
from spmd.distributed.consistency import first_nonempty, raise_everywhere
from spmd.errors import CheckpointError, Problem, raise_problems
from spmd.program_cache.folder import PROGRAMS
from spmd.run.checkpoint import Checkpoint, CheckpointStore
from spmd.run.owner import OWNER_FILE, FolderOwnership
from spmd.sweeps.train_chunk import Chunk

Result = TypeVar("Result")
ABOUT, DONE, END = "sweep.json", "done.json", "end.json"


def is_writer() -> bool:
    """Return whether this process writes a sweep's files; all processes read them."""
    return jax.process_index() == 0


def in_writer(action: Callable[[], Result]) -> Result | None:
    """Call a function in the process that writes, while the others wait; its error is raised in
    all.
    """

    def act_in_writer() -> Result | None:
        if not is_writer():
            return None
        return action()

    return raise_everywhere(act_in_writer, CheckpointError, "the sweep's folder cannot be used")


@contextlib.contextmanager
def owned(folder: Path | None) -> Iterator[FolderOwnership | None]:
    """Own a sweep's folder, which is made if it is not there, while the block runs: no other sweep
    writes in it.

    Raises:
      CheckpointError: another sweep that still runs owns it, or it cannot be made.
    """
    if folder is None:
        yield None
        return

    def make_and_own() -> FolderOwnership:
        make_folder(folder, CheckpointError)
        return FolderOwnership(folder)

    owner = in_writer(make_and_own)
    try:
        yield owner
    finally:
        if owner is not None:
            owner.release()


@contextlib.contextmanager
def open_checkpoints(folder: Path) -> Iterator[CheckpointStore]:
    """Checkpoints in a folder, which is made if it is not there. On exit, saves in progress are
    complete.
    """
    folder.mkdir(parents=True, exist_ok=True)
    store = CheckpointStore(Checkpoint(folder, keep=1))
    try:
        yield store
    except BaseException:
        store.release()
        raise
    store.close()
    # a barrier: each process looks whether its last save is there, before anything moves it
    first_nonempty("")


class SweepStore:
    """A sweep's folder, which exists. Without one (None) nothing is kept, and nothing is found."""

    def __init__(
        self,
        folder: Path | None,
        about: Mapping[str, str],
        *,
        resume: bool,
        owner: FolderOwnership | None = None,
    ):
        self._folder = folder
        self._owner = owner
        if folder is not None:
            in_writer(lambda: self._open(folder, about, resume=resume))

    def _open(self, folder: Path, about: Mapping[str, str], *, resume: bool) -> None:
        file = folder / ABOUT
        with wrap_os_errors(file, CheckpointError):
            if not file.exists():
                # The owner's file and compiled programs may be there before the sweep is.
                names = {path.name for path in folder.iterdir()} - {OWNER_FILE, PROGRAMS}
                if not all(name.startswith(".") for name in names):
                    raise CheckpointError(
                        f"{folder} is not empty, and holds no sweep.", fix="another folder."
                    )
                output_files.write_checked(file, _json(dict(about)))
                return
        if not resume:
            raise CheckpointError(
                f"{folder} already holds a sweep.",
                fix="resume=True to resume it, or another folder.",
            )
        try:
            before = json.loads(output_files.read_checked(file) or b"{}")
        except output_files.DamagedFileError as why:
            raise CheckpointError(
                f"{file} is damaged, so what the sweep was is not known: {why}.",
                fix="another folder.",
            ) from why
        problems = []
        for name in dict.fromkeys([*before, *about]):
            if before.get(name) != about.get(name):
                why = _differ(str(before.get(name)), str(about.get(name)))
                problems.append(Problem(name, [why]))
        raise_problems(
            CheckpointError,
            f"the sweep in {folder} cannot be resumed: it was another",
            problems,
            fix="the arguments that it began with, or another folder.",
        )

    @property
    def keeps(self) -> bool:
        """True if there is a folder."""
        return self._folder is not None

    @functools.cached_property
    def cleared(self) -> bool:
        """True if only the best have states, since the sweep came to its end, and nothing that
        needs other states is to be done again.
        """
        if self._folder is None:
            return False
        chunks = json.loads(self._read_file(self._folder / END) or b"null")
        return chunks is not None and all(
            self.finished(rung, chunk) is not None for rung, chunk in chunks if rung
        )

    def place(self, rung: int, chunk: int) -> Path | None:
        """The folder of a chunk of a rung."""
        if self._folder is None:
            return None
        return self._folder / "chunks" / f"{rung}-{chunk}"

    def finished(self, rung: int, chunk: int) -> tuple[np.ndarray, list[dict[str, float]]] | None:
        """The measurements and evaluations of a chunk that was brought to its end, if they are as
        they were written.
        """
        place = self.place(rung, chunk)
        if place is None:
            return None
        evaluations = self._read_file(place / DONE)
        if evaluations is None:
            return None
        history = self._read_file(place / "end.npy")
        if history is None:
            return None
        return _history(history), json.loads(evaluations)

    def finish(
        self, rung: int, chunk: int, history: np.ndarray, evaluations: list[dict[str, float]]
    ) -> None:
        """Write the measurements and evaluations of a chunk that is at its end."""
        place = self.place(rung, chunk)
        if place is not None and is_writer():
            self._check_owner()
            # In this order: a chunk is finished if DONE is there.
            output_files.write_checked(place / "end.npy", _npy(history))
            output_files.write_checked(place / DONE, _json(evaluations))

    def resumed(self, rung: int, chunk: int, run: Chunk) -> bool:
        """Bring a chunk to the step at which it was saved last, if it was; returns whether it
        was.
        """
        place = self.place(rung, chunk)
        if place is None:
            return False
        # one answer for all processes: a network file system may show the folder to some later
        saved = ""
        if (place / "checkpoints").is_dir():
            saved = "saved"
        if not first_nonempty(saved):
            return False
        with open_checkpoints(place) as store:
            step, damaged = store.newest_intact()
            store.move_damaged(damaged)
            history = None
            if step is not None:
                history = self._read_file(place / f"history-{step}.npy")
            if step is not None and history is not None:
                run.states, _ = store.restore(step, run.packed.abstract(len(run.slots)))
                run.measured = [_history(history)]
                run.step = step
                return True
        # without states, or with states whose measurements are lost
        if is_writer():
            shutil.rmtree(place / "checkpoints")
        first_nonempty("")  # a barrier
        return False

    @contextlib.contextmanager
    def saving(self, rung: int, chunk: int, run: Chunk) -> Iterator[Callable[[], None]]:
        """Give the block a function that saves a chunk as it is then, in place of an older save."""
        place = self.place(rung, chunk)
        if place is None:
            yield lambda: None
            return
        with open_checkpoints(place) as store:
            yield functools.partial(self._save, store, place, run)

    def _save(self, store: CheckpointStore, place: Path, run: Chunk) -> None:
        self._check_owner()
        newest = place / f"history-{run.step}.npy"
        complete = place / f"history-{store.latest()}.npy"
        if is_writer():
            # Before the states, which are of no use without their measurements.
            output_files.write_checked(newest, _npy(run.history))
        store.save(run.states, run.step, {}, {})
        if not is_writer():
            return
        for history in place.glob("history-*.npy"):
            # until this save is complete, the one before may be needed
            if history not in (newest, complete):
                history.unlink()

    def clear(self) -> None:
        """Remove the states of all chunks, of which only the measurements are still needed."""
        if self._folder is not None and is_writer():
            self._check_owner()
            places = sorted((self._folder / "chunks").glob("*[0-9]-[0-9]*"))
            numbers = [list(map(int, place.name.split("-"))) for place in places]
            # First: END says that the states are missing on purpose.
            output_files.write_checked(self._folder / END, _json(numbers))
            for place in places:
                shutil.rmtree(place / "checkpoints", ignore_errors=True)

    def _check_owner(self) -> None:
        """Raise CheckpointError if another sweep has taken the folder over: nothing is written over
        its files.
        """
        if self._owner is not None:
            self._owner.check()

    def _read_file(self, file: Path) -> bytes | None:
        """The content of a file, in all processes; None if it is missing or damaged in one of them.
        Warn of a damaged one.
        """
        content = None
        try:
            content = output_files.read_checked(file)
        except output_files.DamagedFileError as why:
            logging.getLogger("spmd").warning(
                "%s is damaged, and its chunk is trained again: %s.", file, why
            )
        missing = ""
        if content is None:
            missing = "missing"
        if first_nonempty(missing):
            return None
        return content


def _differ(was: str, now: str) -> str:
    """Two texts, from a little before their first difference."""
    begin = 0
    if max(len(was), len(now)) > 160:
        equal = 0
        while was[equal : equal + 1] == now[equal : equal + 1] != "":
            equal += 1
        begin = max(0, equal - 40)

    def clip(text: str) -> str:
        clipped = text[begin : begin + 160]
        if begin > 0:
            clipped = f"... {clipped}"
        if len(text) > begin + 160:
            clipped += " ..."
        return clipped

    return f"was {clip(was)}, is {clip(now)}"


def spelled(values: Mapping[str, Any]) -> str:
    """Hyper-parameters of a trial as text, the same in another process.

    Raises:
      CheckpointError: a value has no such text.
    """
    spelling = {}
    for name, value in values.items():
        spelling[name] = value
        if hasattr(value, "__qualname__"):
            spelling[name] = f"{value.__module__}.{value.__qualname__}"
        if re.search(r" at 0x[0-9a-f]+|<(lambda|locals)>", repr(spelling[name])):
            why = (
                f"{name}={value!r} has no unique name, so a resumed sweep could not distinguish it "
                "from others."
            )
            raise CheckpointError(
                why, fix="numbers, names or functions of a module as values; or no checkpoint."
            )
    return str(spelling)


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1).encode()


def _npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


def _history(content: bytes) -> np.ndarray:
    # A pickle could execute code.
    return np.load(io.BytesIO(content), allow_pickle=False)
