"""How long `spmd.pretrained.load` takes for a folder, beside `safetensors.torch.load_file`, which
alternates with it in one run.

`load_file` maps the file and reads nothing until a tensor is used, so it is measured with the use:
each tensor is copied, or made float32 and transposed, as `load` makes it. Cold: the file's pages
are dropped from the system's cache before each load.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx
from reported import head, print_sections, write

import spmd
from spmd.pretrained.folders import ORIGIN
from spmd.pretrained.name_map import NameMap
from spmd.pretrained.safetensors_files import write_file

WIDTH, MLP, LAYERS = 2048, 8192, 8
KINDS = {
    "up": (MLP, WIDTH),
    "down": (WIDTH, MLP),
    "gate": (MLP, WIDTH),
    "query": (WIDTH, WIDTH),
    "out": (WIDTH, WIDTH),
}
TARGET = 1.2

TORCH = """
import sys, time, torch
from safetensors.torch import load_file
torch.set_num_threads(%d)
uses = {"map": lambda t: t, "copy": lambda t: t.clone(), "cast": lambda t: t.t().float().contiguous()}
for line in sys.stdin:
    how, path = line.split()
    start = time.perf_counter()
    tensors = {name: uses[how](tensor) for name, tensor in load_file(path).items()}
    print(time.perf_counter() - start, flush=True)
    del tensors
"""  # noqa: E501


class Stacks(nnx.Module):
    """Parameters [layers, ...], in the order of the files or transposed."""

    def __init__(self, transposed):
        self.stack = nnx.Dict(
            {
                name: nnx.Param(jnp.zeros((LAYERS, *(shape[::-1] if transposed else shape))))
                for name, shape in KINDS.items()
            }
        )


def rules(transposed):
    """The name map of `Stacks`."""
    rule = (
        '[[tensors]]\nfile = "h.{{layer}}.{0}.weight"\nmodel = "layers.{{layer}}/{0}"\ntranspose = '
        "{1}\n"
    )
    return NameMap.loads(
        '[layers]\nstack = "stack"\n'
        + "".join(rule.format(name, str(transposed).lower()) for name in KINDS)
    )


def drop(folder):
    """Take the files of a folder out of the system's cache."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def measure(folder, other, rounds, cold):
    """Seconds of each arm, by its name, and the report of the last load."""
    arms = {
        "spmd, as in the file": lambda: spmd_seconds(folder, False, "file"),
        "load_file, each tensor copied": lambda: other_seconds(other, "copy", folder),
        "spmd, float32, transposed, stacked": lambda: spmd_seconds(folder, True, "float32"),
        "load_file, float32, transposed": lambda: other_seconds(other, "cast", folder),
        "load_file alone (maps the file)": lambda: other_seconds(other, "map", folder),
    }
    times = {name: [] for name in arms}
    for number in range(rounds + 1):
        for name, arm in arms.items():
            if cold:
                drop(folder)
            seconds = arm()
            if number:  # the first round traces the model and fills the cache
                times[name].append(seconds)
    return times


def spmd_seconds(folder, transposed, dtype):
    """One load."""
    start = time.perf_counter()
    module = spmd.pretrained.load(
        folder,
        model=lambda: Stacks(transposed),
        name_map=rules(transposed),
        dtype=dtype,
        progress=False,
    )
    report, seconds = getattr(module, ORIGIN).report, time.perf_counter() - start
    assert report.bytes_read == report.bytes_kept
    return seconds


def other_seconds(process, how, folder):
    """The same in the other process."""
    process.stdin.write(f"{how} {folder / 'model.safetensors'}\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def section(title, times, size):
    """A table of one state of the cache."""
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    lines = [
        "",
        f"### {title}",
        "",
        "| arm | median s | best s | GB/s (median) |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {medians[name]:.2f} | {min(seconds):.2f} | {size / medians[name] / 1e9:.2f} |"
        for name, seconds in times.items()
    ]
    lines += ["", "| ratio | median of rounds | target | |", "|---|---|---|---|"]
    names = list(times)
    for one, two in (names[:2], names[2:4]):
        ratio = statistics.median(a / b for a, b in zip(times[one], times[two], strict=True))
        lines.append(
            f"| {one} / {two} | {ratio:.2f} | {TARGET} | {'ok' if ratio <= TARGET else 'MISSED'} |"
        )
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", required=True, help="a Python with torch and safetensors")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="where the files are made; the disk that is measured")
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder, block = (
            Path(name),
            rng.standard_normal(WIDTH * MLP, dtype=np.float32).astype(jnp.bfloat16),
        )
        tensors = {
            f"h.{n}.{kind}.weight": block[: a * b].reshape(a, b)
            for n in range(LAYERS)
            for kind, (a, b) in KINDS.items()
        }
        write_file(folder / "model.safetensors", tensors)
        size = sum(tensor.nbytes for tensor in tensors.values())
        command = [arguments.python, "-c", TORCH % os.cpu_count()]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as other:
            text = f"python benchmarks/load_weights.py --python PYTHON --rounds {arguments.rounds}"
            lines = head("Loading weights", text, "jax", "flax", "numpy")
            lines += [
                f"One file of {size / 1e9:.2f} GB, bfloat16, {len(tensors)} matrices, to one CPU "
                "device. Arms alternate within each round."
            ]
            lines += print_sections(
                section(title, measure(folder, other, arguments.rounds, cold), size)
                for title, cold in (
                    ("warm: the file is in the system's cache", False),
                    ("cold: from the disk", True),
                )
            )
            other.stdin.close()
    write("load_weights", lines)


if __name__ == "__main__":
    sys.exit(main())
