"""Profile a CNN and a GPT on simulated devices, beside plans for a target that is calibrated first;
and read each trace a second time.

    python benchmarks/profiles.py --devices 8

The second reading shares no code with the library's: it decodes the trace's file (protocol buffers:
XSpace of the XLA repository, tsl/profiler/protobuf/xplane.proto), and finds the operation that is
charged for a moment by looking at all of them.
"""

import argparse
import itertools
import os
import re
import struct
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import spmd
from spmd.planner.calibration import Calibration, calibrate, figure_rows
from spmd.planner.step_profile import StepProfile

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.plan_truth import cases
from benchmarks.reported import head, print_sections, write

MODELS, LAYOUTS = ("cnn", "gpt"), ("data_parallel", "fsdp")
# begins the names of operations that communicate, under these layouts
COLLECTIVE = r"psum\b|(all|reduce)[-_](reduce|gather|scatter)\b"
LINES = {
    "launch overhead": "launches",
    "exposed communication": "exposed",
    "step": "step",
    "hidden communication": "hidden",
    "between steps": "between",
}

Operation = tuple[str, float, float]  # name, and seconds at which it begins and ends
Ran = Mapping[Any, Sequence[Sequence[Operation]]]  # by device: the operations of each step


def fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a message in protocol buffers: number, and an integer, a float or bytes."""

    def number(at: int) -> tuple[int, int]:
        value = shift = 0
        while True:
            value |= (message[at] & 0x7F) << shift
            at, shift = at + 1, shift + 7
            if message[at - 1] < 0x80:
                return value, at

    at = 0
    while at < len(message):
        key, at = number(at)
        if key & 7 == 0:
            value, at = number(at)
        elif key & 7 == 1:
            value, at = struct.unpack_from("<d", message, at)[0], at + 8
        else:
            size, at = number(at)
            value, at = message[at : at + size], at + size
        yield key >> 3, value


def first(message: bytes, field: int, default: Any = 0) -> Any:
    return next((value for number, value in fields(message) if number == field), default)


def decode(path: Path) -> Ran:
    """The operations of the training step in an `.xplane.pb` file of a CPU."""
    host = next(
        plane
        for field, plane in fields(path.read_bytes())
        if field == 1 and first(plane, 2, b"").startswith(b"/host:CPU")
    )
    names, stats = (
        {
            first(entry, 1): first(first(entry, 2, b""), 2, b"").decode()
            for n, entry in fields(host)
            if n == field
        }
        for field in (4, 5)
    )
    begun: list[tuple[dict[str, Any], str, float, float]] = []
    ends: dict[int, float] = {}
    for line in (value for field, value in fields(host) if field == 3):
        for event in (value for field, value in fields(line) if field == 4):
            name = names[first(event, 1)]
            begin = first(line, 3) * 1e-9 + first(event, 2) * 1e-12
            values = {}
            for stat in (value for field, value in fields(event) if field == 4):
                (kind, value), *_ = [entry for entry in fields(stat) if entry[0] != 1]
                values[stats[first(stat, 1)]] = stats[value] if kind == 7 else value
            if name.startswith("end: "):
                ends[values["_c"]] = begin
            elif values.get("hlo_module") in ("jit_train_step", b"jit_train_step"):
                begun.append((values, name, begin, begin + first(event, 3) * 1e-12))
    devices: dict[Any, dict[Any, list[Operation]]] = defaultdict(lambda: defaultdict(list))
    for values, name, begin, end in begun:
        devices[values["device_ordinal"]][values["run_id"]].append(
            (name, begin, max(end, ends.get(values["_p"], end)))
        )
    return {
        device: sorted(runs.values(), key=lambda run: min(one[1] for one in run))
        for device, runs in devices.items()
    }


def add_up(ran: Ran) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of a step, mean over steps and devices: of parts of it, and of each operation."""
    totals, operations = dict.fromkeys(LINES.values(), 0.0), defaultdict[str, float](float)
    for steps in ran.values():
        windows = [(min(one[1] for one in step), max(one[2] for one in step)) for step in steps]
        totals["between"] += sum(
            max(later[0] - earlier[1], 0.0) for earlier, later in itertools.pairwise(windows)
        )
        for step, (opens, closes) in zip(steps, windows, strict=True):
            totals["step"] += closes - opens
            begins, ends = (np.array([one[at] for one in step]) for at in (1, 2))
            communicates = np.array([re.match(COLLECTIVE, one[0]) is not None for one in step])
            for begin, end in itertools.pairwise(np.unique(np.concatenate([begins, ends]))):
                active = (begins <= begin) & (ends >= end)
                work = active & ~communicates
                charged = work if work.any() else active
                if not charged.any():
                    totals["launches"] += end - begin
                    continue
                totals["exposed"] += (end - begin) * (not work.any())
                totals["hidden"] += (end - begin) * (work.any() and (active & communicates).any())
                operations[step[np.where(charged, begins, -np.inf).argmax()][0]] += end - begin
    count = sum(map(len, ran.values()))
    gaps = max(count - len(ran), 1)
    return (
        {
            name: float(value) / (gaps if name == "between" else count)
            for name, value in totals.items()
        },
        {name: float(value) / count for name, value in operations.items()},
    )


def largest_difference(profile: StepProfile, ran: Ran) -> float:
    """Of all numbers of a profile and of the second reading, in seconds."""
    totals, operations = add_up(ran)
    measured = {one.name: one.measured for one in profile.operations if one.measured}
    pairs = [(profile[name].measured, totals[part]) for name, part in LINES.items()]
    pairs += [
        (measured.get(name, 0.0), operations.get(name, 0.0))
        for name in measured.keys() | operations.keys()
    ]
    return max(abs(left - right) for left, right in pairs)


def profile_case(name: str, layout: str, calibration: Calibration, steps: str) -> StepProfile:
    _, model, shapes, _ = cases(large=False)[name]
    rows = next(iter(shapes.values())).shape[0]
    rng = np.random.default_rng(0)
    data = {
        key: rng.integers(0, 10, leaf.shape).astype(leaf.dtype)
        if leaf.dtype == "int32"
        else rng.normal(size=leaf.shape).astype(leaf.dtype)
        for key, leaf in shapes.items()
    }
    options: dict[str, Any] = {
        "loss": spmd.losses.cross_entropy,
        "optimizer": optax.adamw(1e-3),
        "layout": layout,
        "progress": False,
    }
    traced = spmd.Profile(steps, tempfile.mkdtemp(), calibration.cluster)
    result = spmd.fit(model, data, batch_size=rows, steps=traced.end, profile=traced, **options)
    if result.profile is None:
        raise SystemExit("the profiler failed")
    return result.profile


def sections(devices: int, steps: str, seconds: float) -> Iterator[list[str]]:
    command = (
        f"python benchmarks/profiles.py --devices {devices} --steps {steps} --seconds {seconds:g}"
    )
    yield head("Profiles beside plans", command, "jax", "jaxlib", "flax")
    calibration = calibrate(seconds=seconds, say=lambda line: print(line, file=sys.stderr))
    differences = []
    for name, layout in itertools.product(MODELS, LAYOUTS):
        before = os.getloadavg()[0]
        profile = profile_case(name, layout, calibration, steps)
        (trace,) = profile.folder.glob("*.xplane.pb")
        differences.append(largest_difference(profile, decode(trace)))
        title = f"## {name}, {layout}: {cases(large=False)[name][0]}"
        text = "\n".join(
            line for line in str(profile).splitlines() if not line.startswith("trace: ")
        )
        text = text.replace("1x8xone of 8 devices", "8 devices")
        read = (
            f"Read a second time: {len(profile.operations)} operations, which differ by at most "
            f"{differences[-1] * 1e9:.3f} ns."
        )
        yield [
            title,
            "",
            f"{read} Load average before: {before:.1f}.",
            "",
            "```text",
            text.strip(),
            "```",
            "",
        ]
    figures = [f"| {' | '.join(row)} |" for row in figure_rows(calibration.target)]
    yield [
        "## The calibration",
        "",
        "| figure | value | may be off by |",
        "|---|---|---|",
        *figures,
        "",
    ]
    yield [
        "The largest difference between the profiles and a second reading of their traces: "
        f"{max(differences) * 1e9:.3f} ns.",
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=8, help="simulate this many")
    parser.add_argument("--steps", default="5:10", help="which to trace")
    parser.add_argument("--seconds", type=float, default=60.0, help="of the calibration")
    options = parser.parse_args()
    spmd.simulate_devices(options.devices)
    jax.config.update("jax_enable_compilation_cache", False)
    write("profiles", print_sections(sections(options.devices, options.steps, options.seconds)))


if __name__ == "__main__":
    main()
