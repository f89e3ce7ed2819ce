"""`spmd data bench FILES`: how quickly files are read as batches, and whether a device would wait for them."""

import argparse
import itertools
import os
import re
import time
from typing import Any

from spmd.errors import DataError, OptionError

_FEATURE = re.compile(r"\s*([\w/.]+)\s*=\s*(\w+)\s*\[([\d,\s]*)\]\s*(?:,|$)")


def add_to(commands: Any) -> None:
    """Declare `spmd data bench`."""
    data = commands.add_parser("data", help="measure how quickly data is read", description="Measure how quickly data is read.")
    inner = data.add_subparsers(required=True, metavar="COMMAND")
    parser = inner.add_parser(
        "bench",
        help="read files as training would, and say how quickly",
        description="Read FILES in batches, as training would, and print records and bytes per second. No device is used.",
    )
    parser.add_argument("files", nargs="+", metavar="FILES", help=".csv, .tfrecord or .array_record; patterns in quotes")
    parser.add_argument("--batch-size", type=int, required=True, metavar="ROWS", help="records of a batch")
    parser.add_argument("--features", metavar="x=float32[784],y=int32[]", help="of tf.train.Example; from the first record when not given")
    parser.add_argument("--workers", type=int, default=0, metavar="N", help="threads that read ahead (0)")
    parser.add_argument("--shuffle", default="true", metavar="true|false|N", help="all records, none, or a window (true)")
    parser.add_argument("--batches", type=int, metavar="N", help="stop after so many; one epoch when not given")
    parser.add_argument("--step-ms", type=float, metavar="MS", help="what a step takes: say whether the device would wait")
    parser.set_defaults(run=_bench)


def _bench(options: argparse.Namespace) -> str:
    if options.batches is not None and options.batches < 2:
        raise OptionError(f"--batches {options.batches}: from 2; the first starts the threads and is not counted.")
    if options.step_ms is not None and not 0 < options.step_ms < float("inf"):
        raise OptionError(f"--step-ms {options.step_ms:g}: more than 0.")
    began = time.perf_counter()
    data = _records(options)
    found = time.perf_counter() - began
    batches = iter(data)
    began = time.perf_counter()
    rows = len(next(iter(next(batches).values())))
    first, waits, records, at = time.perf_counter() - began, [], 0, time.perf_counter()
    for batch in itertools.islice(batches, None if options.batches is None else options.batches - 1):
        now = time.perf_counter()
        waits.append(now - at)
        at, records = now, records + len(next(iter(batch.values())))
    batches.close()
    if not waits:
        raise OptionError(f"there is one batch, of {rows} records: nothing to measure.", fix="a smaller --batch-size.")
    took = sum(waits)
    each = sum(data.format.sizes) / data.examples
    lines = [
        repr(data),
        f"found in {found:.2f} s; the first batch after {1000 * first:.1f} ms",
        f"{records / took:,.0f} records/s, {records / took * each / 1e6:,.1f} MB/s of files, {len(waits) / took:,.1f} batches/s "
        f"({len(waits)} batches, {options.workers} workers)",
    ]
    return "\n".join(lines if options.step_ms is None else [*lines, _starves(1000 * took / len(waits), options.step_ms, options.workers)])


def _starves(batch_ms: float, step_ms: float, workers: int) -> str:
    """Whether a step that takes so long would wait for its data.

    >>> _starves(2.0, 10.0, 0)
    'a step of 10 ms: the device does not wait; a batch takes 2.00 ms, 20 % of a step'
    >>> _starves(20.0, 10.0, 1)
    'a step of 10 ms: the device waits 50 % of the time, since a batch takes 20.00 ms; more than --workers 1, or larger steps'
    """
    share = batch_ms / step_ms if batch_ms <= step_ms else 1 - step_ms / batch_ms
    part, each = f"{100 * share:.0f} %", f"a batch takes {batch_ms:.2f} ms"
    if batch_ms <= step_ms:
        return f"a step of {step_ms:g} ms: the device does not wait; {each}, {part} of a step"
    return f"a step of {step_ms:g} ms: the device waits {part} of the time, since {each}; more than --workers {workers}, or larger steps"


def _records(options: argparse.Namespace) -> Any:
    from spmd import data
    from spmd.data.record_index import find_files

    words = {"true": True, "false": False}
    if options.shuffle not in words and not options.shuffle.isdigit():
        raise OptionError(f'--shuffle "{options.shuffle}": true, false or a number.')
    shuffle = words[options.shuffle] if options.shuffle in words else int(options.shuffle)
    paths = find_files(options.files)
    ends = {re.sub(r"-\d+-of-\d+$", "", path).rpartition(".")[2] for path in paths}
    if ends == {"csv"}:
        if options.features is not None:
            raise OptionError("--features are of tf.train.Example, and CSV files have columns.", fix="leave it out.")
        return data.csv(paths, batch_size=options.batch_size, shuffle=shuffle, workers=options.workers)
    if ends == {"tfrecord"} or ends == {"array_record"}:
        kind = data.tfrecord if ends == {"tfrecord"} else data.array_record
        features = _declared(options.features) if options.features else _first(paths, *ends)
        return kind(paths, features=features, batch_size=options.batch_size, shuffle=shuffle, workers=options.workers)
    raise OptionError(f"files that end in {', '.join(sorted(ends))}.", fix="files of one kind: .csv, .tfrecord or .array_record.")


def _declared(text: str) -> dict[str, Any]:
    from spmd.data.features import fixed

    features, at = {}, 0
    while at < len(text):
        found = _FEATURE.match(text, at)
        if found is None:
            raise OptionError(f'--features "{text}": "{text[at:].strip()}" is not NAME=DTYPE[SIZES].', fix="such as x=float32[784].")
        name, dtype, sizes = found.groups()
        features[name] = fixed(tuple(int(size) for size in sizes.split(",") if size.strip()), dtype)
        at = found.end()
    return features


def _first(paths: tuple[str, ...], kind: str) -> dict[str, Any]:
    """The features of the first record, as long as they are there."""
    from spmd.data.features import declared_by

    path = next((path for path in paths if os.path.getsize(path)), None)
    if path is None:
        raise DataError(f"all files are empty: {', '.join(paths[:3])}.", fix="look at what they were written from.")
    try:
        return declared_by(_first_record(path, kind))
    except DataError as error:
        raise DataError(f"{path}: {error}", fix="--features, or another kind of file.") from error


def _first_record(path: str, kind: str) -> bytes:
    from spmd.data.tfrecords import HEAD, TAIL, scan
    from spmd.errors import import_extra

    if kind == "array_record":
        try:
            return import_extra("grain", "data").sources.ArrayRecordDataSource(path)[0]
        except (RuntimeError, ValueError, IndexError) as error:  # what it raises for other files, damaged and empty ones
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise DataError(f"its first record cannot be read: {why}.") from error
    starts, ends = scan(path)
    with open(path, "rb") as file:
        file.seek(int(starts[0]) + HEAD)
        return file.read(int(ends[0] - starts[0]) - HEAD - TAIL)
