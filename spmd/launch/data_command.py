"""`spmd data bench FILES`: measure how fast files are read as batches, and whether a device
would wait for them.
"""

import argparse
import itertools
import os
import re
import time
from collections.abc import Iterator
from typing import Any

from spmd.errors import DataError, OptionError

_ARRAY = re.compile(r"\s*([\w/.]+)\s*=\s*(\w+)\s*\[([\d,\s]*)\]\s*(?:,|$)")


def add_to(commands: Any) -> None:
    """Declare `spmd data bench`."""
    data = commands.add_parser(
        "data", help="measure how fast data is read", description="Measure how fast data is read."
    )
    inner = data.add_subparsers(required=True, metavar="COMMAND")
    parser = inner.add_parser(
        "bench",
        help="read files as training would, and print the speed",
        description="Read FILES in batches, as training would, and print records and bytes per "
        "second. No "
        "device is used.",
    )
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILES",
        help=".csv, .tfrecord, .array_record or, with --tokenizer, .jsonl and .parquet files; "
        "quote "
        "patterns",
    )
    parser.add_argument(
        "--batch-size", type=int, required=True, metavar="ROWS", help="records in a batch"
    )
    parser.add_argument(
        "--features",
        metavar="x=float32[784],y=int32[]",
        help="features of tf.train.Example (default: the first record's)",
    )
    parser.add_argument(
        "--tokenizer", metavar="FOLDER", help="of text: where its tokenizer.json is"
    )
    parser.add_argument("--length", type=int, metavar="TOKENS", help="of text: tokens of a row")
    parser.add_argument(
        "--field",
        action="append",
        metavar="NAME",
        help="of text: what to read (default: text, or messages with --chat)",
    )
    parser.add_argument("--chat", metavar="FORMAT", help="of text: the format of conversations")
    parser.add_argument(
        "--workers", type=int, default=0, metavar="N", help="threads that read ahead (default: 0)"
    )
    parser.add_argument(
        "--shuffle",
        default="true",
        metavar="true|false|N",
        help="all records, none, or a window (default: true)",
    )
    parser.add_argument(
        "--batches", type=int, metavar="N", help="stop after N batches (default: one epoch)"
    )
    parser.add_argument(
        "--step-ms",
        type=float,
        metavar="MS",
        help="duration of a step: also print whether the device would wait",
    )
    parser.set_defaults(run=_bench)


def _bench(options: argparse.Namespace) -> str:
    if options.batches is not None and options.batches < 2:
        raise OptionError(
            f"--batches {options.batches} is too few.",
            fix="at least 2: the first starts the threads and is not counted.",
        )
    if options.step_ms is not None and not 0 < options.step_ms < float("inf"):
        raise OptionError(f"--step-ms {options.step_ms:g}.", fix="a positive number.")
    began = time.perf_counter()
    data = _records(options)
    scan_seconds = time.perf_counter() - began
    batches = iter(data)
    began = time.perf_counter()
    rows = _rows(next(batches))
    last = time.perf_counter()
    first_seconds = last - began
    waits = []
    records = 0
    most = None
    if options.batches is not None:
        most = options.batches - 1
    for batch in itertools.islice(batches, most):
        now = time.perf_counter()
        waits.append(now - last)
        last = now
        records += _rows(batch)
    # With --batches the epoch is not over, and threads would read on ahead.
    batches.close()
    if not waits:
        raise OptionError(
            f"there is only one batch, of {rows} records.", fix="a smaller --batch-size."
        )
    seconds = sum(waits)
    record_bytes = sum(data.format.sizes) / data.examples
    lines = [
        repr(data),
        f"found in {scan_seconds:.2f} s; the first batch after {1000 * first_seconds:.1f} ms",
        f"{records / seconds:,.0f} records/s, {records / seconds * record_bytes / 1e6:,.1f} MB/s "
        "of files, "
        f"{len(waits) / seconds:,.1f} batches/s ({len(waits)} batches, {options.workers} workers)",
    ]
    if options.step_ms is not None:
        batch_ms = 1000 * seconds / len(waits)
        lines.append(_compare_with_step(batch_ms, options.step_ms, options.workers))
    return "\n".join(lines)


def _rows(batch: dict[str, Any]) -> int:
    return len(next(iter(batch.values())))


def _compare_with_step(batch_ms: float, step_ms: float, workers: int) -> str:
    """Return whether a step of this duration would wait for its data.

    >>> _compare_with_step(2.0, 10.0, 0)
    'a step of 10 ms: the device does not wait; a batch takes 2.00 ms, 20 % of a step'
    >>> print(_compare_with_step(20.0, 10.0, 1).replace(": ", ":\\n"))
    a step of 10 ms:
    the device waits 50 % of the time, since a batch takes 20.00 ms:
    raise --workers 1, or use larger steps
    """
    each = f"a batch takes {batch_ms:.2f} ms"
    if batch_ms <= step_ms:
        share = f"{100 * batch_ms / step_ms:.0f} %"
        return f"a step of {step_ms:g} ms: the device does not wait; {each}, {share} of a step"
    share = f"{100 * (1 - step_ms / batch_ms):.0f} %"
    return (
        f"a step of {step_ms:g} ms: the device waits {share} of the time, since {each}: raise "
        f"--workers {workers}, or use larger steps"
    )


def _records(options: argparse.Namespace) -> Any:
    from spmd import data
    from spmd.data.features import fixed
    from spmd.data.record_index import find_files

    words = {"true": True, "false": False}
    if options.shuffle in words:
        shuffle = words[options.shuffle]
    elif options.shuffle.isdigit():
        shuffle = int(options.shuffle)
    else:
        raise OptionError(f'--shuffle "{options.shuffle}".', fix="true, false or a number.")
    common = {"batch_size": options.batch_size, "shuffle": shuffle, "workers": options.workers}
    paths = find_files(options.files)
    # TensorFlow names shards train.tfrecord-00000-of-00010.
    suffixes = {re.sub(r"-\d+-of-\d+$", "", path).rpartition(".")[2] for path in paths}
    if options.tokenizer is not None or options.length is not None:
        if options.tokenizer is None or options.length is None:
            raise OptionError(
                "text needs both --tokenizer and --length.",
                fix="such as --tokenizer FOLDER --length 2048.",
            )
        return data.text(
            paths,
            tokenizer=options.tokenizer,
            length=options.length,
            field=options.field,
            chat=options.chat,
            **common,
        )
    if suffixes == {"csv"}:
        if options.features is not None:
            raise OptionError(
                "--features is for tf.train.Example; CSV files have columns.", fix="leave it out."
            )
        return data.csv(paths, **common)
    read_records = {"tfrecord": data.tfrecord, "array_record": data.array_record}
    if len(suffixes) == 1 and suffixes <= read_records.keys():
        suffix = next(iter(suffixes))
        declared = declared_arrays("--features", options.features or "", "x=float32[784]")
        features = {name: fixed(shape, dtype) for name, dtype, shape in declared}
        features = features or _first_features(paths, suffix)
        return read_records[suffix](paths, features=features, **common)
    raise OptionError(
        f"files that end in {', '.join(sorted(suffixes))}.",
        fix="files of one kind: .csv, .tfrecord or .array_record; or text with --tokenizer and "
        "--length.",
    )


def declared_arrays(
    option: str, text: str, example: str
) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Name, dtype and shape of each array that an option declares, as NAME=DTYPE[SIZES]; the
    example is for the error.

    >>> list(declared_arrays("--features", "x=float32[28,28], y=int32[]", "x=float32[784]"))
    [('x', 'float32', (28, 28)), ('y', 'int32', ())]
    """
    start = 0
    while start < len(text):
        match = _ARRAY.match(text, start)
        if match is None:
            raise OptionError(
                f'{option}: "{text[start:].strip()}" is not NAME=DTYPE[SIZES].',
                fix=f"such as {example}.",
            )
        name, dtype, sizes = match.groups()
        yield name, dtype, tuple(int(size) for size in sizes.split(",") if size.strip())
        start = match.end()


def _first_features(paths: tuple[str, ...], kind: str) -> dict[str, Any]:
    """The features of the first record, with their lengths in it."""
    from spmd.data.features import declared_by

    path = next((path for path in paths if os.path.getsize(path)), None)
    if path is None:
        raise DataError(
            f"all files are empty: {', '.join(paths[:3])}.",
            fix="check the program that wrote them.",
        )
    try:
        return declared_by(_first_record(path, kind))
    except DataError as error:
        raise DataError(
            f"{path}: {error}", fix="give --features, or another kind of file."
        ) from error


def _first_record(path: str, kind: str) -> bytes:
    from spmd.data.tfrecords import HEAD, TAIL, scan
    from spmd.errors import import_extra

    if kind == "array_record":
        try:
            return import_extra("grain", "data").sources.ArrayRecordDataSource(path)[0]
        except (RuntimeError, ValueError, IndexError) as error:
            # raised for files of other kinds, damaged and empty files
            why = next(iter(str(error).splitlines()), type(error).__name__)
            raise DataError(
                f"its first record cannot be read: {why}.", fix="the file as it was written."
            ) from error
    starts, ends = scan(path)
    with open(path, "rb") as file:
        file.seek(int(starts[0]) + HEAD)
        return file.read(int(ends[0] - starts[0]) - HEAD - TAIL)
