"""Every measurement on one GPU, the most informative parts first: tests, steps, attention,
recurrence, restarts, codecs and more.

    # the most informative parts, on a machine with a GPU
    python benchmarks/gpu/run.py --minutes 9 --out FOLDER
    python benchmarks/gpu/run.py --only rest --minutes 9 --out ANOTHER  # the other parts
    # all parts with tiny shapes, on a CPU
    python benchmarks/gpu/run.py --rehearse --only all --minutes 25 --out FOLDER
    python benchmarks/gpu/run.py --table FOLDER  # the table of what is in FOLDER

It runs from the checkout and downloads nothing. Each part is a process with a time limit; what it
leaves over goes to the next ones. A run that is cut off keeps what it has: FOLDER has the results
as they come, a log, and at the end the table. torch, torchvision, transformers and peft are the
peers: where one is missing, a line says so.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu.measure import RESULTS, append, card, end_with_parent  # noqa: E402

# A module of this folder, and the seconds that it is thought to need on an H100, compiling
# included; the minutes are shared accordingly.
FIRST = (("tests", 90), ("steps", 300), ("recurrent", 80), ("attention", 110))
REST = (
    ("restarts", 70),
    ("codecs", 60),
    ("finetune", 100),
    ("resnet", 150),
    ("small_step", 50),
    ("low_precision", 75),
    ("offload", 115),
)
GROUPS = {"first": FIRST, "rest": REST, "all": FIRST + REST}
LOG = "run.log"
NEEDED = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "tensorstore", "numpy", "rich")
PEERS = ("torch", "torchvision", "transformers", "peft", "triton", "pytest")
SOFT = 0.9  # of a part's limit: how long the part should take


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure training on one GPU.")
    parser.add_argument("--minutes", type=float, default=9.0, help="all parts together")
    parser.add_argument("--out", type=Path, help="a folder for the results")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes, on a CPU")
    parser.add_argument(
        "--only", default="first", help="parts, separated by commas; or first, rest, all"
    )
    parser.add_argument("--table", type=Path, help="print the table of a folder, and run nothing")
    args = parser.parse_args()
    if args.table:
        print(table(args.table))
        return 0
    if args.out is None:
        parser.error("--out is missing: a folder for the results")
    args.out.mkdir(parents=True, exist_ok=True)
    if (args.out / RESULTS).exists():
        parser.error(f"--out {args.out} has the results of another run: name another folder")
    missing = [name for name in NEEDED if version(name) is None]
    if missing:
        print(
            f"missing: {', '.join(missing)}. Carry them as wheels, and put the folder that they "
            "are installed in on PYTHONPATH."
        )
        return 1
    only = args.only.split(",")
    if unknown := set(only) - {name for name, _ in GROUPS["all"]} - set(GROUPS):
        parser.error(
            f"--only {', '.join(sorted(unknown))}: the parts are "
            f"{', '.join(name for name, _ in GROUPS['all'])}"
        )
    chosen = GROUPS.get(args.only) or [part for part in GROUPS["all"] if part[0] in only]
    append(args.out, {"part": "machine", "case": "begin", **machine()})
    failed = run_all(chosen, args.out, 60 * args.minutes, args.rehearse)
    append(args.out, {"part": "machine", "case": "end", **card()})
    text = table(args.out)
    (args.out / "table.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    return 1 if failed else 0


def run_all(
    parts: Sequence[tuple[str, int]], out: Path, seconds: float, rehearse: bool
) -> list[str]:
    """Run each part for its share of the time that is left; the names of those that failed."""
    ends, failed = time.monotonic() + seconds, []
    for number, (name, share) in enumerate(parts):
        left = ends - time.monotonic()
        limit = left * share / sum(share for _, share in parts[number:])
        began = time.monotonic()
        code = run_part(name, out, limit, rehearse)
        took = time.monotonic() - began
        append(
            out,
            {"part": name, "case": "process", "exit_code": code, "seconds": took, "limit": limit},
        )
        print(
            f"{name}: {took:.0f} s of {limit:.0f} s{'' if code == 0 else f', exit code {code}'}",
            flush=True,
        )
        if code:
            failed.append(name)
    return failed


def run_part(name: str, out: Path, limit: float, rehearse: bool) -> int:
    """Run one part in a new process group, which ends at the limit; the exit code, -9 where the
    limit ended it.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # torch needs memory beside JAX
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        **(
            {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
            if rehearse
            else {"JAX_PLATFORMS": "cuda,cpu"}
        ),
    }
    command = [
        sys.executable,
        "-m",
        f"benchmarks.gpu.{name}",
        "--name",
        name,
        "--out",
        str(out.resolve()),
    ]
    command += ["--seconds", f"{SOFT * limit:.0f}", *(["--small"] if rehearse else [])]
    with (
        tempfile.TemporaryDirectory(prefix="spmd-gpu-") as programs,
        (out / LOG).open("a", encoding="utf-8") as log,
    ):
        environment["SPMD_CACHE"] = programs  # so that every part compiles what it measures
        log.write(f"== {name}\n")
        log.flush()
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a group, which is killed at the limit
            preexec_fn=end_with_parent,
        )
        try:
            return process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            return -signal.SIGKILL
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def machine() -> dict[str, Any]:
    """The date, the versions, and the card."""
    packages = {name: version(name) for name in (*NEEDED, *PEERS, "jax-cuda13-plugin")}
    missing = [name for name in PEERS if packages[name] is None]
    if missing:
        print(
            f"not installed: {', '.join(missing)}; what needs them is left out, and said where it "
            "is.",
            flush=True,
        )
    about = {
        "date": str(datetime.date.today()),
        "python": platform.python_version(),
        "commit": commit(),
        "command": " ".join(sys.argv),
    }
    return {**about, "packages": packages, **card()}


def commit() -> str:
    """Of the checkout; "" where git or its folder is not there."""
    try:
        return subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, timeout=30
        ).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def results(out: Path) -> list[dict[str, Any]]:
    """Every result of a folder; a line that was cut off is left out."""
    found = []
    for line in (out / RESULTS).read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


TITLES = (
    "part",
    "case",
    "arm",
    "time (lowest to highest)",
    "first call",
    "ours / peer",
    "plan",
    "measured / plan",
)
TITLES += ("peak", "measured / plan", "tokens/s", "MFU", "clock")


def table(out: Path) -> str:
    """Checks, failures and facts, and the table of times: last, since a lease may keep only the end
    of what is printed.
    """
    found = results(out)
    about = next((result for result in found if result.get("case") == "begin"), {})
    packages = " ".join(
        f"{name} {number}" for name, number in about.get("packages", {}).items() if number
    )
    lines = [
        f"`{about.get('command', '')}`, {about.get('date')}, {about.get('name', 'no GPU')}, driver "
        f"{about.get('driver_version')}."
    ]
    lines += ["", f"Python {about.get('python')}, {packages}.", ""]
    kinds = ("times", "check", "failed", "packages")
    facts = [
        result
        for result in found
        if not any(kind in result for kind in kinds) and result["case"] not in ("end", "process")
    ]
    lines += [f"- {result['part']}, {result['case']}: {rest(result)[:300]}" for result in facts]
    failed = [result for result in found if "failed" in result]
    lines += [
        f"- {result['part']}, {result['case']}: {result['failed']} failed: {result['error'][:200]}"
        for result in failed
    ]
    checks = [result for result in found if "check" in result]
    wrong = [result for result in checks if not result["right"]]
    lines += [
        f"- WRONG: {result['part']}, {result['case']}: {result['check']} {rest(result)}"
        for result in wrong
    ]
    lines += ["", f"{len(checks)} checks against references, {len(wrong)} wrong.", ""]
    lines += [f"| {' | '.join(TITLES)} |", "|" + "---|" * len(TITLES)]
    # arms are added as they are measured
    newest = {(result["part"], result["case"]): result for result in found if "times" in result}
    lines += [f"| {' | '.join(cells)} |" for result in newest.values() for cells in rows(result)]
    return "\n".join(lines)


def rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """The cells of each arm of a case."""
    times = result["times"]
    ours = next((name for name in times if name.startswith("ours")), None)
    cells = []
    for name, of_arm in times.items():
        median, first, peak = of_arm["median"], of_arm["first"], of_arm.get("peak_bytes")
        plan = result["plans"].get(name)
        # a peer's step is of the same model, and has as many FLOPs
        model = next(iter(result["plans"].values()), None)
        tokens = result.get("tokens")
        is_peer = ours is not None and not name.startswith("ours")
        row = (
            result["part"],
            result["case"],
            name,
            f"{show(median)} ({show(of_arm['low'])} to {show(of_arm['high'])})",
            cell(first, show),
            cell(is_peer and times[ours]["median"] / median, "{:.2f}".format),
            cell(plan and plan["seconds"], show),
            cell(plan and median / plan["seconds"], "{:.2f}".format),
            cell(peak, lambda peak: f"{peak / 2**30:.2f} GiB"),
            cell(plan and peak and peak / plan["peak"], "{:.2f}".format),
            cell(tokens and tokens / median, "{:,.0f}".format),
            cell(model and model["mfu"] * model["seconds"] / median, "{:.1%}".format),
            result["clock"] or "",
        )
        cells.append(row)
    return cells


def cell(value: Any, text: Callable[[Any], str]) -> str:
    """The text of a value, "" where there is none."""
    return text(value) if value else ""


def rest(result: dict[str, Any]) -> str:
    shown = {
        name: value
        for name, value in result.items()
        if name not in ("part", "case", "check", "right")
    }
    return json.dumps(shown)


def show(seconds: float) -> str:
    return f"{seconds * 1e3:,.3g} ms" if seconds < 1 else f"{seconds:,.3g} s"


if __name__ == "__main__":
    sys.exit(main())
