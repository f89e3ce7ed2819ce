"""Every measurement on one GPU, the most informative parts first: tests, steps, attention, recurrence, restarts, codecs and more.

    python benchmarks/gpu/run.py --minutes 9 --out FOLDER             # on a machine with a GPU; results in FOLDER as they come
    python benchmarks/gpu/run.py --rehearse --minutes 9 --out FOLDER  # the same parts with tiny shapes, on a CPU
    python benchmarks/gpu/run.py --table FOLDER                       # the table of what is in FOLDER

It runs from the checkout and downloads nothing. Each part is a process with a time limit; what it leaves over goes to the next ones.
A run that is cut off keeps what it has. torch, torchvision, transformers and peft are the peers: where one is missing, a line says so.
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
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PARTS = (  # a module of this folder, and its share of the minutes
    ("tests", 1.5),
    ("steps", 3.0),
    ("attention", 1.5),
    ("recurrent", 1.5),
    ("restarts", 1.0),
    ("codecs", 0.7),
    ("finetune", 1.0),
    ("resnet", 1.0),
    ("small_step", 0.5),
    ("low_precision", 0.5),
    ("offload", 0.7),
)
NEEDED = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "tensorstore", "numpy", "rich")
PEERS = ("torch", "torchvision", "transformers", "peft", "triton", "pytest")
SOFT = 0.9  # of a part's limit: how long the part should take


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure training on one GPU.")
    parser.add_argument("--minutes", type=float, default=9.0, help="all parts together")
    parser.add_argument("--out", type=Path, help="a folder for the results")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes, on a CPU")
    parser.add_argument("--only", default="", help="parts, separated by commas")
    parser.add_argument("--table", type=Path, help="print the table of a folder, and run nothing")
    args = parser.parse_args()
    if args.table:
        print(table(args.table))
        return 0
    if args.out is None:
        parser.error("--out is missing: a folder for the results")
    args.out.mkdir(parents=True, exist_ok=True)
    missing = [name for name in NEEDED if version(name) is None]
    if missing:
        print(f"missing: {', '.join(missing)}. Carry them as wheels, and put the folder that they are installed in on PYTHONPATH.")
        return 1
    only = [name for name in args.only.split(",") if name]
    if unknown := set(only) - {name for name, _ in PARTS}:
        parser.error(f"--only {', '.join(sorted(unknown))}: the parts are {', '.join(name for name, _ in PARTS)}")
    chosen = [part for part in PARTS if not only or part[0] in only]
    write(args.out, {"part": "machine", "case": "begin", **machine()})
    failed = run_all(chosen, args.out, 60 * args.minutes, args.rehearse)
    write(args.out, {"part": "machine", "case": "end", **card()})
    text = table(args.out)
    (args.out / "table.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    return 1 if failed else 0


def run_all(parts: list[tuple[str, float]], out: Path, seconds: float, rehearse: bool) -> list[str]:
    """Run each part for its share of the time that is left; the names of those that failed."""
    ends, failed = time.monotonic() + seconds, []
    for number, (name, share) in enumerate(parts):
        left = ends - time.monotonic()
        limit = left * share / sum(share for _, share in parts[number:])
        began = time.monotonic()
        code = run_part(name, out, limit, rehearse)
        took = time.monotonic() - began
        write(out, {"part": name, "case": "process", "exit_code": code, "seconds": took, "limit": limit})
        print(f"{name}: {took:.0f} s of {limit:.0f} s{'' if code == 0 else f', exit code {code}'}", flush=True)
        if code:
            failed.append(name)
    return failed


def run_part(name: str, out: Path, limit: float, rehearse: bool) -> int:
    """Run one part in a new process group, which ends at the limit; the exit code, -9 where the limit ended it."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # torch needs memory beside JAX
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        **({"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""} if rehearse else {"JAX_PLATFORMS": "cuda,cpu"}),
    }
    command = [sys.executable, "-m", f"benchmarks.gpu.{name}", "--name", name, "--out", str(out.resolve())]
    command += ["--seconds", f"{SOFT * limit:.0f}", *(["--small"] if rehearse else [])]
    with tempfile.TemporaryDirectory(prefix="spmd-gpu-") as programs, (out / f"{name}.log").open("w", encoding="utf-8") as log:
        environment["SPMD_CACHE"] = programs  # so that every part compiles what it measures
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            return process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            return -signal.SIGKILL
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def write(out: Path, facts: dict[str, Any]) -> None:
    with (out / "run.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(facts) + "\n")


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
        print(f"not installed: {', '.join(missing)}; what needs them is left out, and said where it is.", flush=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    about = {"date": str(datetime.date.today()), "python": platform.python_version(), "commit": commit, "command": " ".join(sys.argv)}
    return {**about, "packages": packages, **card()}


def card() -> dict[str, Any]:
    """What nvidia-smi says of the GPU; nothing without it."""
    fields = "name,driver_version,memory.total,clocks.sm,clocks.mem,temperature.gpu,power.draw"
    try:
        done = subprocess.run(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return dict(zip(fields.split(","), map(str.strip, done.stdout.strip().split(",")), strict=False))


def results(out: Path) -> list[dict[str, Any]]:
    """Every result of a folder; a line that was cut off is left out."""
    found = []
    for path in sorted(out.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
    return found


def table(out: Path) -> str:
    """Ours, the peer, their ratio, the plan, and measured / planned; then checks that failed, arms that failed, and facts."""
    found, lines = results(out), []
    about = next((result for result in found if result.get("case") == "begin"), {})
    packages = " ".join(f"{name} {number}" for name, number in about.get("packages", {}).items() if number)
    lines.append(f"`{about.get('command', '')}`, {about.get('date')}, {about.get('name', 'no GPU')}, driver {about.get('driver_version')}.")
    lines += ["", f"Python {about.get('python')}, {packages}.", ""]
    titles = ("part", "case", "arm", "time (lowest to highest)", "first call", "ours / peer", "plan", "measured / planned", "peak")
    titles += ("planned peak", "measured / planned")
    lines += [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    for result in found:
        times = result.get("times") or {}
        ours = next((name for name in times if name.startswith("ours")), None)
        for name, of_arm in times.items():
            plan = (result.get("plan") if name == ours else None) or {}
            median, peak = of_arm["median"], of_arm.get("peak_bytes")
            cells = [result["part"], result["case"], name, f"{show(median)} ({show(of_arm['low'])} to {show(of_arm['high'])})"]
            cells += [
                "" if of_arm["first"] is None else show(of_arm["first"]),
                "" if ours in (None, name) else f"{times[ours]['median'] / median:.2f}",
            ]
            cells += [show(plan["seconds"]), f"{median / plan['seconds']:.2f}"] if plan else ["", ""]
            cells += [f"{peak / 2**30:.2f} GiB" if peak else ""]
            cells += [f"{plan['peak'] / 2**30:.2f} GiB", f"{peak / plan['peak']:.2f}"] if plan and peak else ["", ""]
            lines.append(f"| {' | '.join(cells)} |")
    checks = [result for result in found if "check" in result]
    wrong = [result for result in checks if not result["right"]]
    lines += ["", f"{len(checks)} checks against references, {len(wrong)} wrong."]
    lines += [f"- WRONG: {result['part']}, {result['case']}: {result['check']} {rest(result)}" for result in wrong]
    lines += [
        f"- {result['part']}, {result['case']}: {result['failed']} failed: {result['error']}" for result in found if "failed" in result
    ]
    kinds = ("times", "check", "failed", "packages")
    facts = [result for result in found if not any(kind in result for kind in kinds) and result["part"] != "machine"]
    return "\n".join([*lines, "", *(f"- {result['part']}, {result['case']}: {rest(result)}" for result in facts)])


def rest(result: dict[str, Any]) -> str:
    shown = {name: value for name, value in result.items() if name not in ("part", "case", "check", "right")}
    return json.dumps(shown)


def show(seconds: float) -> str:
    return f"{seconds * 1e3:,.3g} ms" if seconds < 100 else f"{seconds:,.0f} s"


if __name__ == "__main__":
    sys.exit(main())
