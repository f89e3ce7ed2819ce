"""Records per second: spmd.data beside grain, a torch DataLoader and pandas, over the same files
and interleaved.

    python benchmarks/input.py --megabytes 1000 --rounds 5

Files are made in a temporary folder, which is removed at the end. Each arm is a separate process,
which reads a number of batches on request; arms take turns. Peers that are not installed are left
out by name.
"""

import argparse
import importlib.util
import itertools
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import reported

BATCH, PIXELS, COLUMNS = 128, 784, 20
SECONDS = 2.0  # of reading in a turn, about
PEERS = {"grain": "grain", "torch": "torch", "pandas": "pandas"}
ARMS = {
    "csv": ["spmd", "spmd, 2 workers", "spmd, in order", "torch", "pandas, in order"],
    "tfrecord": ["spmd", "spmd, 2 workers", "spmd, in order", "torch"],
    "array_record": ["spmd", "spmd, 2 workers", "grain", "grain, 2 threads", "torch"],
}


# files --------------------------------------------------------------------------------------------


def example(pixels: np.ndarray, label: int) -> bytes:
    """A `tf.train.Example` of floats and a label under 128."""

    def field(number: int, payload: bytes) -> bytes:
        size, raw = len(payload), b""
        while size >= 0x80:
            raw, size = raw + bytes([size & 0x7F | 0x80]), size >> 7
        return bytes([number << 3 | 2]) + raw + bytes([size]) + payload

    def feature(name: bytes, kind: int, payload: bytes) -> bytes:
        return field(1, field(1, name) + field(2, field(kind, field(1, payload))))

    return field(
        1,
        feature(b"image", 2, pixels.astype("<f4").tobytes()) + feature(b"label", 3, bytes([label])),
    )


def framed(record: bytes) -> bytes:
    """A record as TFRecord files hold it, with its length and checksums."""
    from spmd.data.tfrecords import crc_function

    masked_crc = crc_function()

    def checksum(raw: bytes) -> bytes:
        return struct.pack("<I", masked_crc(raw))

    length = struct.pack("<Q", len(record))
    return length + checksum(length) + record + checksum(record)


def make(kind: str, folder: Path, size: int) -> int:
    """Write four files of about `size` bytes in total; return the number of records."""
    rng, count = np.random.default_rng(0), 0
    for part in range(4):
        path = folder / f"part-{part}.{kind}"
        if kind == "csv":
            rows = rng.normal(size=(2000, COLUMNS)).astype(np.float32)
            block = "".join(
                ",".join(f"{value:.6f}" for value in row) + f",{at % 10}\n"
                for at, row in enumerate(rows)
            ).encode()
            times = max(1, size // 4 // len(block))
            with open(path, "wb") as file:
                file.write(
                    (",".join([*(f"x{at}" for at in range(COLUMNS)), "label"]) + "\n").encode()
                )
                for _ in range(times):
                    file.write(block)
            count += 2000 * times
            continue
        records = [example(rng.normal(size=PIXELS), at % 10) for at in range(200)]
        times = max(1, size // 4 // sum(map(len, records)))
        count += 200 * times
        if kind == "tfrecord":
            block = b"".join(map(framed, records))
            with open(path, "wb") as file:
                for _ in range(times):
                    file.write(block)
        else:
            from array_record.python import array_record_module

            writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
            for record in itertools.chain.from_iterable(itertools.repeat(records, times)):
                writer.write(record)
            writer.close()
    return count


# arms ---------------------------------------------------------------------------------------------


def parsed(record: bytes) -> dict[str, np.ndarray]:
    """What a hand-written reader of these records does: it knows where the floats stand."""
    start = record.index(b"image") + 5
    start = record.index(struct.pack("<H", 0xC0 | 0x18 << 8), start) + 2  # 3136 bytes follow
    return {
        "image": np.frombuffer(record, "<f4", PIXELS, start),
        "label": np.int32(record[record.index(b"label") + 5 + 6]),
    }


def batches(kind: str, arm: str, folder: str):
    """An endless iterator over batches of one arm."""
    files = sorted(str(path) for path in Path(folder).glob(f"*.{kind}"))
    name, _, how = arm.partition(", ")
    for epoch in itertools.count():
        if name == "spmd":
            yield from ours(kind, files, how, epoch)
        else:
            yield from {"grain": grain_arm, "torch": torch_arm, "pandas": pandas_arm}[name](
                kind, files, how, epoch
            )


_opened: dict = {}  # data sets by kind of file


def ours(kind: str, files: list[str], how: str, epoch: int):
    import spmd

    if kind not in _opened:
        options = {
            "batch_size": BATCH,
            "workers": 2 if how == "2 workers" else 0,
            "shuffle": how != "in order",
        }
        features = {
            "image": spmd.data.fixed((PIXELS,), "float32"),
            "label": spmd.data.fixed((), "int32"),
        }
        if kind == "csv":
            columns = {"x": [f"x{at}" for at in range(COLUMNS)], "label": "label"}
            _opened[kind] = spmd.data.csv(files, columns=columns, **options)
        else:
            _opened[kind] = getattr(spmd.data, kind)(files, features=features, **options)
    return _opened[kind].epoch(epoch)


def grain_arm(kind: str, files: list[str], how: str, epoch: int):
    import grain

    source = grain.sources.ArrayRecordDataSource(files)
    data = grain.MapDataset.source(source).seed(epoch).shuffle().map(parsed)
    threads = 2 if how else 0
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=2 * threads * BATCH)
    return iter(data.to_iter_dataset(options).batch(BATCH))


def torch_arm(kind: str, files: list[str], how: str, epoch: int):
    """A data set over offsets, as it is written for a DataLoader: one record for each call."""
    import torch

    if kind == "array_record":
        import grain

        records = grain.sources.ArrayRecordDataSource(files)
    else:
        if "torch" not in _opened:  # the offsets are not what is measured: they are taken from ours
            from spmd.data.csv_files import _scan
            from spmd.data.record_index import RecordIndex
            from spmd.data.tfrecords import scan

            _opened["torch"] = RecordIndex(
                tuple(files),
                (lambda path: _scan(path, ",", header=True)) if kind == "csv" else scan,
                kind,
            )
        records = _opened["torch"]

    def read(at: int) -> dict:
        if kind == "array_record":
            return parsed(records[at])
        raw = records.read_bytes(np.array([at]))[0]
        if kind == "tfrecord":
            return parsed(raw[12:-4])  # no checksum is looked at
        *x, label = raw.split(b",")
        return {"x": np.array(x, np.float32), "label": np.int32(label)}

    class Records(torch.utils.data.Dataset):
        def __len__(self):
            return len(records)

        def __getitem__(self, at):
            return {name: np.array(value) for name, value in read(at).items()}

    return iter(torch.utils.data.DataLoader(Records(), batch_size=BATCH, shuffle=True))


def pandas_arm(kind: str, files: list[str], how: str, epoch: int):
    import pandas

    for file in files:
        for table in pandas.read_csv(file, chunksize=BATCH):
            yield {
                "x": table.iloc[:, :-1].to_numpy(np.float32),
                "label": table["label"].to_numpy(np.int32),
            }


def arm_main(kind: str, arm: str, folder: str) -> None:
    """For each line on stdin, read for about that number of seconds; print records per second."""
    reading = batches(kind, arm, folder)
    began = time.perf_counter()
    next(reading)
    print(time.perf_counter() - began, flush=True)
    for _ in sys.stdin:
        began, rows = time.perf_counter(), 0
        while time.perf_counter() - began < SECONDS:
            rows += len(next(reading)["label"])
        print(rows / (time.perf_counter() - began), flush=True)


# the parent ---------------------------------------------------------------------------------------


def measure(
    kind: str, folder: Path, rounds: int
) -> tuple[dict[str, float], dict[str, list[float]], list[str]]:
    """Seconds to the first batch, and records per second in each round, of each arm; and who is not
    installed.
    """
    missing = {name for name, module in PEERS.items() if importlib.util.find_spec(module) is None}
    arms = [arm for arm in ARMS[kind] if arm.partition(", ")[0] not in missing]
    absent = sorted(missing & {arm.partition(", ")[0] for arm in ARMS[kind]})
    command = [sys.executable, __file__, "--arm", kind]
    jobs = {
        arm: subprocess.Popen(
            [*command, arm, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for arm in arms
    }
    rates: dict[str, list[float]] = {arm: [] for arm in arms}
    try:
        first = {arm: float(jobs[arm].stdout.readline()) for arm in arms}
        for turn in range(rounds):
            for arm in arms if turn % 2 else reversed(arms):
                jobs[arm].stdin.write("go\n")
                jobs[arm].stdin.flush()
                rates[arm].append(float(jobs[arm].stdout.readline()))
    finally:
        for job in jobs.values():
            job.kill()
            job.wait()
    return first, rates, absent


def report(kind: str, size: int, rounds: int) -> list[str]:
    with tempfile.TemporaryDirectory(prefix="spmd-input-") as name:
        count = make(kind, Path(name), size)
        real = sum(path.stat().st_size for path in Path(name).iterdir())
        first, rates, absent = measure(kind, Path(name), rounds)
    lines = [
        f"### {kind}",
        "",
        f"{count:,} records, {real / 1e6:,.0f} MB in 4 files, batches of {BATCH}; {rounds} rounds.",
        "",
    ]
    lines += [
        "| arm | records/s, median | MB/s | beside spmd | first batch after, s |",
        "|---|---|---|---|---|",
    ]
    for arm, values in rates.items():
        beside = statistics.median(a / b for a, b in zip(values, rates["spmd"], strict=True))
        middle = statistics.median(values)
        lines.append(
            f"| {arm} | {middle:,.0f} | {middle * real / count / 1e6:,.1f} | {beside:.2f} | "
            f"{first[arm]:.2f} |"
        )
    return [
        *lines,
        "",
        *([f"Not installed, and left out: {', '.join(absent)}.", ""] if absent else []),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arm", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--megabytes", type=int, default=1000, help="of each kind of file (1000)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", help="kinds, by comma: " + ", ".join(ARMS))
    options = parser.parse_args()
    if options.arm:
        return arm_main(*options.arm)
    kinds = options.only.split(",") if options.only else ARMS
    lines = reported.print_sections(
        report(kind, options.megabytes * 10**6, options.rounds) for kind in kinds
    )
    if not options.only:
        command = (
            f"python benchmarks/input.py --megabytes {options.megabytes} --rounds {options.rounds}"
        )
        how = (
            "Shuffled over all records, but for arms in order. Arms are processes that take turns "
            "of 2 s; files are in the page cache."
        )
        peers = [name for name in PEERS.values() if importlib.util.find_spec(name)]
        reported.write(
            "input", [*reported.head("Input", command, "jax", "numpy", *peers), how, "", *lines]
        )


if __name__ == "__main__":
    main()
