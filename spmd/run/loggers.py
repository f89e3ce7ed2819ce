"""Loggers, which write metrics: JSON lines by default, TensorBoard on request."""

import contextlib
import importlib
import itertools
import json
import logging
import math
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax

from spmd.base.output_files import OutputFile
from spmd.base.user_paths import as_path, make_folder, wrap_os_errors
from spmd.errors import OptionError, import_extra, raise_callback_errors, short_repr, type_name
from spmd.run.pictures import FOLDER as PICTURES, channels, size
from spmd.run.run_facts import RunFacts
from spmd.train.histograms import Histogram, counts_not_finite

FLUSH_SECONDS = 120  # between two times that events are brought to the disk


class Logger(Protocol):
    """Anything with these two methods is a logger. Only process 0 calls it.

    A logger that also has a method `begin(facts)` gets a `RunFacts` before the first record, and
    may return a line to show. One that also has a method `begin_close()` closes at the same time as
    others: it is called for all of them before `close` is.

    Example:
      >>> class Printer:
      ...     def write(self, record):
      ...         print(record)
      ...
      ...     def close(self):
      ...         pass
      >>> logger: Logger = Printer()
      >>> logger.write({"step": 1, "loss": 0.5})
      {'step': 1, 'loss': 0.5}
    """

    def write(self, record: dict[str, Any]) -> None:
        """Write one record: "step", "epoch" from 0, and numbers by name. A record without numbers
        describes an event, or has one of these:

        "histograms": by name, the fields of `Histogram` (`fit(watch=...)`). "pictures": by name,
        the path of a PNG or SVG file in the run's folder (`info.log_picture`).
        """
        ...

    def close(self) -> None:
        """Flush and release resources."""
        ...


class JsonLines:
    """One JSON object per line, appended to a file; a resumed run appends to the same file.

    A number that is not finite is written as null, since JSON cannot represent it. A truncated last
    line, as a full disk leaves, is removed with a warning.

    Args:
      path: of the file; its folder must exist.

    Raises:
      OptionError: the file cannot be written.

    Example:
      >>> import tempfile, pathlib
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "metrics.jsonl"
      >>> log = JsonLines(path)
      >>> log.write({"step": 1, "loss": 0.5})
      >>> log.close()
      >>> path.read_text()
      '{"step": 1, "loss": 0.5}\\n'
    """

    def __init__(self, path: str | Path):
        self._path = path = as_path(path, "JsonLines: path")
        make_folder(path.parent, OptionError)
        with wrap_os_errors(path, OptionError):
            self._file = OutputFile(path, "ab")
            # Later also what a full disk did not take: it comes before the next line.
            self._unwritten = self._end_last_line()

    def _end_last_line(self) -> bytes:
        """Remove a truncated record; return what a last line without an end lacks."""
        last = _last_line(self._path) if self._path.is_file() else b""
        if not last:
            return b""
        # After a loss of power a file system may have left zeros.
        if not last.startswith((b"{", b"\0")) or _is_json(last):
            return b"\n"
        self._file.truncate(self._path.stat().st_size - len(last))
        logging.getLogger("spmd").warning(
            "%s: its last record is truncated, and is removed: %s", self._path, short_repr(last)
        )
        return b""

    def write(self, record: dict[str, Any]) -> None:
        """Append one line, which is in the file when this returns: a killed run leaves complete
        lines.
        """
        valid = dict(record)
        for name, value in record.items():
            if isinstance(value, float) and not math.isfinite(value):
                valid[name] = None
        self._unwritten += f"{json.dumps(valid)}\n".encode()
        self._flush()

    def _flush(self) -> None:
        with wrap_os_errors(self._path, OptionError):
            while self._unwritten:
                # The file is not buffered: on a disk that is full for a moment it writes less than
                # asked, and says so only by what it returns.
                count = self._file.write(self._unwritten)
                self._unwritten = self._unwritten[count:]

    def close(self) -> None:
        """Write what is not written, and close the file."""
        with wrap_os_errors(self._path, OptionError), self._file:
            self._flush()


def _last_line(path: Path) -> bytes:
    """Return the bytes of a file after its last line break."""
    size = path.stat().st_size
    length = 4096
    end = b""
    with path.open("rb") as file:
        while len(end) < size and b"\n" not in end:
            file.seek(max(size - length, 0))
            end = file.read()
            length *= 2
    return end.rpartition(b"\n")[2]


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


class TensorBoard:
    """Scalars, histograms and PNG pictures for TensorBoard, written by tensorboardX (the extra
    `tensorboard`).

    Where a run resumes or starts again, TensorBoard drops what the interrupted run wrote for later
    steps.

    Args:
      folder: of the event files; it is created.

    Raises:
      MissingExtraError: tensorboardX is not installed.
      OptionError: the folder cannot be created.

    Example:
      spmd.fit(model, data, ..., loggers=[spmd.loggers.TensorBoard("runs/tensorboard")])
    """

    def __init__(self, folder: str | Path):
        import_extra("tensorboardX", "tensorboard")
        self._event_types = importlib.import_module("tensorboardX.proto.event_pb2")
        self._summary_types = importlib.import_module("tensorboardX.proto.summary_pb2")
        self._folder = as_path(folder, "TensorBoard: folder")
        self._run_folder = Path()
        make_folder(self._folder, OptionError)
        self._file = Path()
        self._flushed = 0.0
        self._events: Any = None
        # A warning says once that TensorBoard shows no SVG.
        self._noted = False

    def begin(self, facts: RunFacts) -> None:
        """Write to a new file; of a run that resumes or starts again, it says from which step on
        earlier files do not count.
        """
        self.close()
        self._run_folder = facts.folder or Path()
        # Not tensorboardX's SummaryWriter, whose thread ends at the first error of the disk: the
        # queue before it then blocks this process.
        files = importlib.import_module("tensorboardX.event_file_writer")
        session = self._event_types.SessionLog
        # The name of a file has a time in seconds, and two runs may begin in one.
        number = secrets.token_hex(4)
        with wrap_os_errors(self._folder, OptionError):
            self._events = files.EventsWriter(str(self._folder / "events"), f".{number}")
        (self._file,) = self._folder.glob(f"*.{number}")
        if facts.step or facts.follows:
            self._add(facts.step + 1, session_log=session(status=session.START))

    def write(self, record: dict[str, Any]) -> None:
        """Write every number, histogram and picture of the record at its step."""
        if self._events is None:
            self.begin(RunFacts())
        summary = importlib.import_module("tensorboardX.summary")
        step = record["step"]
        histograms = {}
        for name, fields in record.get("histograms", {}).items():
            histograms[name] = Histogram(**fields)
        for name, value in {**record, **counts_not_finite(histograms)}.items():
            if name != "step" and isinstance(value, int | float):
                self._add(step, summary=summary.scalar(name, value))
        for name, histogram in histograms.items():
            self._write_histogram(name, histogram, step)
        for name, path in record.get(PICTURES, {}).items():
            self._write_picture(f"{PICTURES}/{name}", self._run_folder / path, step)

    def _write_histogram(self, name: str, histogram: Histogram, step: int) -> None:
        summary = importlib.import_module("tensorboardX.summary")
        # Of the elements there are only counts, so sums are of the middles of bins.
        middles = [(low + high) / 2 for low, high in itertools.pairwise(histogram.edges)]
        pairs = list(zip(histogram.counts, middles, strict=True))
        self._add(
            step,
            summary=summary.histogram_raw(
                name,
                min=histogram.edges[0],
                max=histogram.edges[-1],
                num=sum(histogram.counts),
                sum=sum(count * middle for count, middle in pairs),
                sum_squares=sum(count * middle**2 for count, middle in pairs),
                bucket_limits=histogram.edges[1:],
                bucket_counts=histogram.counts,
            ),
        )

    def _add(self, step: int, **content: Any) -> None:
        event = self._event_types.Event(step=step, wall_time=time.time(), **content)
        with wrap_os_errors(self._file, OptionError):
            self._events.write_event(event)
            if time.monotonic() - self._flushed > FLUSH_SECONDS:
                self._flushed = time.monotonic()
                self._events.flush()

    def _write_picture(self, name: str, path: Path, step: int) -> None:
        if path.suffix != ".png":
            if not self._noted:
                self._noted = True
                logging.getLogger("spmd").warning(
                    "TensorBoard shows no SVG files, such as %s.", path
                )
            return
        summary = self._summary_types.Summary
        content = path.read_bytes()
        width, height = size(content)
        image = summary.Image(
            height=height, width=width, colorspace=channels(content), encoded_image_string=content
        )
        self._add(step, summary=summary(value=[summary.Value(tag=name, image=image)]))

    def close(self) -> None:
        """Flush and close the event file."""
        events = self._events
        # Forgotten first: a file that cannot be closed is not tried again.
        self._events = None
        if events is not None:
            with wrap_os_errors(self._file, OptionError):
                events.close()


def begin_loggers(loggers: Sequence[Logger], make_facts: Callable[[], RunFacts]) -> list[str]:
    """Call `begin` of the loggers that have it; return the lines to show.

    Raises:
      CallbackError: one of them raises.
    """
    having: list[Any] = [logger for logger in loggers if callable(getattr(logger, "begin", None))]
    if not having:
        return []
    facts = make_facts()
    lines = []
    for logger in having:
        with raise_callback_errors(lambda: f"logger {type(logger).__name__}.begin"):
            lines.append(logger.begin(facts))
    return [line for line in lines if line]


def write_record(loggers: Sequence[Logger], record: dict[str, Any]) -> None:
    """Write one record with each logger, though another may raise; loggers may transfer arrays.

    Raises:
      CallbackError: the first error of a logger; its notes name those of others.
    """
    failure: Exception | None = None
    for logger in loggers:
        where = f"step {record['step']}: logger {type(logger).__name__}.write"
        try:
            with jax.transfer_guard("allow"), raise_callback_errors(lambda where=where: where):
                logger.write(record)
        except Exception as error:
            # The first is raised below, when all loggers have the record.
            if failure is None:
                failure = error
            else:
                failure.add_note(f"spmd: and {getattr(error, 'message', error)}")
    if failure is not None:
        raise failure


def close_loggers(loggers: Sequence[Logger]) -> None:
    """Close all loggers, though one may raise; those with a method `begin_close`, which is called
    first, close at the same time.

    Raises:
      CallbackError: one of them raises.
    """

    def close(logger: Any, method: str) -> None:
        with raise_callback_errors(lambda: f"logger {type(logger).__name__}.{method}"):
            getattr(logger, method)()

    with contextlib.ExitStack() as closing:
        for logger in loggers:
            closing.callback(close, logger, "close")
        for logger in loggers:
            if callable(getattr(logger, "begin_close", None)):
                close(logger, "begin_close")


def check_loggers(loggers: Any) -> list[Logger]:
    """Return the loggers as a list.

    Raises:
      OptionError: one without `write` and `close`, a class in place of its instance, or two
        trackers that write the same run.
    """
    if not isinstance(loggers, list | tuple):
        raise OptionError(
            f"loggers={short_repr(loggers)} is {type_name(loggers)}.", fix="a list of loggers."
        )
    for logger in loggers:
        if isinstance(logger, type) or not all(
            callable(getattr(logger, method, None)) for method in ("write", "close")
        ):
            fix = "an instance such as spmd.loggers.JsonLines(path)."
            raise OptionError(
                f"logger {short_repr(logger)} has no write(record) and close().", fix=fix
            )
    places: list[tuple[type, Any]] = []
    for logger in loggers:
        if not hasattr(logger, "place"):
            continue
        place = (type(logger), logger.place)
        if place in places:
            raise OptionError(
                f"loggers has two of {type(logger).__name__} that write the same run.",
                fix="one of them.",
            )
        places.append(place)
    return list(loggers)
