"""What readers of other libraries would cost or lose, where spmd has its own: rows of CSV beside
pyarrow's, and slices of safetensors files beside safetensors' own.

    pip install safetensors && python benchmarks/readers.py

docs/decisions.md quotes the numbers. Arms take turns, and times are medians over the turns.
"""

import io
import os
import statistics
import struct
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.csv
import safetensors

import spmd
from spmd.pretrained.safetensors_files import DTYPES, read_box, read_header, write_file

ROWS, COLUMNS, BATCH = 20_000, 20, 128
WIDE = (8192, 8192)  # of a bfloat16 kernel, which is read by one of 8 devices
ODD = {  # what stands in a column of whole numbers or floats, and what Python's float or int says
    "a plus sign": "+7",
    "blanks around": " 7 ",
    "underscores": "1_000",
    "a quote inside": '7"',
    "quotes around": '"7"',
    "an exponent": "1e2",
    "words": "seven",
    "too large": "99999999999",
    "nan": "nan",
    "infinity": "inf",
    "nothing": "",
}


def in_turns(arms: dict, turns: int = 100) -> dict[str, float]:
    """Median seconds of a call of each arm."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(turns):
        for name, call in arms.items():
            began = time.perf_counter()
            call(turn)
            times[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in times.items()}


def csv_rows(folder: Path) -> None:
    names = [f"x{number}" for number in range(COLUMNS)]
    values = np.random.default_rng(0).normal(size=(ROWS, COLUMNS))
    np.savetxt(folder / "a.csv", values, "%.6f", delimiter=",", header=",".join(names), comments="")
    data = spmd.data.csv(folder / "a.csv", batch_size=BATCH, columns={"x": names})
    reader = data.format
    offsets = reader._offsets
    order = np.random.default_rng(1).permutation(ROWS)
    read = pyarrow.csv.ReadOptions(use_threads=False, column_names=names)
    parse = pyarrow.csv.ParseOptions(newlines_in_values=True)
    convert = pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(names, pyarrow.float64()))

    def ours(turn: int) -> np.ndarray:
        leaves = {"x": np.zeros((BATCH, COLUMNS), np.float32)}
        reader.read_into(leaves, order[turn * BATCH : (turn + 1) * BATCH], {})
        return leaves["x"]

    def theirs(turn: int) -> np.ndarray:
        raw, _, _ = offsets.read_bytes(order[turn * BATCH : (turn + 1) * BATCH])
        table = pyarrow.csv.read_csv(
            io.BytesIO(raw), read_options=read, parse_options=parse, convert_options=convert
        )
        columns = [table[name].to_numpy() for name in names]
        return np.stack(columns, axis=1).astype(np.float32)

    assert np.array_equal(ours(0), theirs(0))
    times = in_turns({"spmd": ours, "pyarrow": theirs})
    shown = ", ".join(f"{name} {1e6 * value / BATCH:.1f} us" for name, value in times.items())
    print(f"CSV, a row of {COLUMNS} floats in shuffled batches of {BATCH}: {shown}")
    for what, text in ODD.items():
        answers = []
        for dtype in (pyarrow.int32(), pyarrow.float32()):
            options = pyarrow.csv.ConvertOptions(column_types={"y": dtype})
            try:
                table = pyarrow.csv.read_csv(
                    io.BytesIO(f"x,y\n1,1\n2,{text}\n".encode()), convert_options=options
                )
                answers.append(str(table["y"].to_pylist()[1]))
            except pyarrow.ArrowInvalid as error:
                answers.append(str(error))
        print(f"  {what:15s} {text!r:14s} as int32: {answers[0]}; as float32: {answers[1]}")


def safetensors_slices(folder: Path) -> None:
    kinds, path = [], folder / "kinds.safetensors"
    write_file(path, {name: np.zeros((4, 4), dtype) for name, dtype in DTYPES.items()})
    with safetensors.safe_open(str(path), framework="np") as file:
        for name in DTYPES:
            try:
                file.get_slice(name)[:2]
            except (AttributeError, TypeError, safetensors.SafetensorError) as error:
                kinds.append(f"{name} ({error})")
    print(f"safetensors {safetensors.__version__} does not slice: {', '.join(kinds)}")
    path = folder / "kernel.safetensors"
    write_file(path, {"kernel": np.ones(WIDE, np.float32).astype(DTYPES["BF16"])})
    tensor = read_header(path)[0]["kernel"]
    rows, columns = tensor.shape
    descriptor = os.open(path, os.O_RDONLY)

    def ours(turn: int) -> np.ndarray:
        out = np.empty((rows // 8, columns), tensor.dtype)
        read_box(descriptor, tensor, ((0, rows // 8), (0, columns)), out)
        return out

    def theirs(turn: int) -> np.ndarray:
        with safetensors.safe_open(str(path), framework="np") as file:
            return file.get_slice("kernel")[: rows // 8]

    assert ours(0).tobytes() == theirs(0).tobytes()
    times = in_turns({"spmd": ours, "safetensors": theirs}, turns=20)
    shown = ", ".join(f"{name} {1e3 * value:.0f} ms" for name, value in times.items())
    print(f"  an eighth of bfloat16{list(WIDE)}, 16 MiB: {shown}")
    os.close(descriptor)
    raw = bytearray(path.read_bytes()[:64])
    damaged = folder / "damaged.safetensors"
    header = b'{"a":{"dtype":"F33","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}'  # noqa: E501
    damaged.write_bytes(struct.pack("<Q", len(header)) + header + bytes(raw[:12]))
    for name, call in {
        "spmd": lambda: read_header(damaged),
        "safetensors": lambda: safetensors.safe_open(str(damaged), framework="np"),
    }.items():
        try:
            call()
        except Exception as error:
            print(f"  a damaged header, {name}: {error}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="spmd-readers-") as name:
        csv_rows(Path(name))
        safetensors_slices(Path(name))
