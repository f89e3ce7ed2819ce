"""Loggers, which write metrics: JSON lines by default, TensorBoard on request."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax

from spmd.errors import OptionError, import_extra, raise_callback_errors, short_repr, type_name
from spmd.run.run_facts import RunFacts
from spmd.user_paths import as_path, make_folder, wrap_os_errors


class Logger(Protocol):
    """Anything with these two methods is a logger. Only process 0 calls it.

    A logger that also has a method `begin(facts)` gets a `RunFacts` before the first record, and may return a line to show.

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
        """Write one record: "step", and numbers by name. A record without numbers describes an event."""
        ...

    def close(self) -> None:
        """Flush and release resources."""
        ...


class JsonLines:
    """One JSON object per line, appended to a file; a resumed run appends to the same file.

    A number that is not finite is written as null, since JSON cannot represent it.

    Args:
      path: of the file; its folder must exist.

    Raises:
      OptionError: the file cannot be written.

    Example:
      >>> import tempfile, pathlib
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "metrics.jsonl"
      >>> log = JsonLines(path); log.write({"step": 1, "loss": 0.5}); log.close()
      >>> path.read_text()
      '{"step": 1, "loss": 0.5}\\n'
    """

    def __init__(self, path: str | Path):
        path = as_path(path, "JsonLines: path")
        make_folder(path.parent, OptionError)
        with wrap_os_errors(path, OptionError):
            self._file = path.open("a", encoding="utf-8", buffering=1)  # line-buffered: a killed run leaves complete lines

    def write(self, record: dict[str, Any]) -> None:
        """Append one line."""
        valid = {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in record.items()}
        self._file.write(json.dumps(valid) + "\n")

    def close(self) -> None:
        """Flush and close the file."""
        self._file.close()


class TensorBoard:
    """Scalars for TensorBoard, written by tensorboardX (the extra `tensorboard`).

    Args:
      folder: of the event files; it is created.

    Raises:
      MissingExtraError: tensorboardX is not installed.
      OptionError: the folder cannot be created.

    Example:
      spmd.fit(model, data, ..., loggers=[spmd.loggers.TensorBoard("runs/tensorboard")])
    """

    def __init__(self, folder: str | Path):
        library, folder = import_extra("tensorboardX", "tensorboard"), as_path(folder, "TensorBoard: folder")
        make_folder(folder, OptionError)
        self._writer = library.SummaryWriter(str(folder))

    def write(self, record: dict[str, Any]) -> None:
        """Write every number of the record as a scalar at its step."""
        for name, value in record.items():
            if name != "step" and isinstance(value, int | float):
                self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


def begin_loggers(loggers: Sequence[Logger], make_facts: Callable[[], RunFacts]) -> list[str]:
    """Call `begin` of the loggers that have it; returns the lines to show.

    Raises:
      CallbackError: one of them raises.
    """
    having: list[Any] = [logger for logger in loggers if callable(getattr(logger, "begin", None))]
    facts, lines = make_facts() if having else None, []
    for logger in having:
        with raise_callback_errors(lambda: f"logger {type(logger).__name__}.begin"):
            lines.append(logger.begin(facts))
    return [line for line in lines if line]


def write_record(loggers: Sequence[Logger], record: dict[str, Any]) -> None:
    """Write one record with each logger; loggers may transfer arrays.

    Raises:
      CallbackError: one of them raises.
    """
    logger = None
    with jax.transfer_guard("allow"), raise_callback_errors(lambda: f"step {record['step']}: logger {type(logger).__name__}.write"):
        for logger in loggers:
            logger.write(record)


def close_logger(logger: Logger) -> None:
    """Close a logger.

    Raises:
      CallbackError: it raises.
    """
    with raise_callback_errors(lambda: f"logger {type(logger).__name__}.close"):
        logger.close()


def check_loggers(loggers: Any) -> list[Logger]:
    """The loggers as a list.

    Raises:
      OptionError: one without `write` and `close`, a class in place of its instance, or two trackers that write the same run.
    """
    if not isinstance(loggers, list | tuple):
        raise OptionError(f"loggers={short_repr(loggers)} is {type_name(loggers)}.", fix="a list of loggers.")
    for logger in loggers:
        if isinstance(logger, type) or not all(callable(getattr(logger, method, None)) for method in ("write", "close")):
            fix = "an instance such as spmd.loggers.JsonLines(path)."
            raise OptionError(f"logger {short_repr(logger)} has no write(record) and close().", fix=fix)
    places = [(type(logger), logger.place) for logger in loggers if hasattr(logger, "place")]
    if twice := next((kind for number, (kind, place) in enumerate(places) if (kind, place) in places[:number]), None):
        raise OptionError(f"loggers has two of {twice.__name__} that write the same run.", fix="one of them.")
    return list(loggers)
