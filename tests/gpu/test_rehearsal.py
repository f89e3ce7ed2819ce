"""The benchmark for one GPU runs, with tiny shapes on a CPU."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PEERS = ("torch", "torchvision", "transformers", "peft")
MISSING = [name for name in PEERS if importlib.util.find_spec(name) is None]


def rehearse(out, only, minutes):
    """Everything that a rehearsal of some parts writes; its log is printed where it fails."""
    command = [
        sys.executable,
        str(ROOT / "benchmarks/gpu/run.py"),
        "--rehearse",
        "--minutes",
        str(minutes),
        "--only",
        only,
        "--out",
        str(out),
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SPMD_TEST", "XLA_FLAGS", "JAX_"))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60 * minutes + 60)
    logs = "\n".join(f"== {path.name}\n{path.read_text()[-2000:]}" for path in sorted(out.glob("*.log")))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    lines = [line for path in out.glob("*.jsonl") for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines], done.stdout


@pytest.mark.system
def test_parts_without_peers(tmp_path):
    results, table = rehearse(tmp_path, "attention,codecs", 8)
    checks = [result for result in results if "check" in result]
    assert {result["part"] for result in checks} == {"attention", "codecs"} and all(result["right"] for result in checks)
    timed = [result for result in results if "times" in result]
    assert {"ours chunked", "ours xla"} <= timed[0]["times"].keys() and "a cast" in timed[-1]["times"]
    assert "| attention | 2 x 64 tokens, 4 heads of 16 | ours chunked |" in table


@pytest.mark.system
@pytest.mark.skipif(bool(MISSING), reason=f"missing: {', '.join(MISSING)}, with which the benchmark for one GPU is rehearsed entirely")
def test_every_part_beside_its_peers(tmp_path):
    parts = "tests,steps,attention,recurrent,restarts,codecs,finetune,resnet,small_step,low_precision,offload"
    results, _ = rehearse(tmp_path, parts, 25)
    assert not [result for result in results if result.get("right") is False]
    failed = [result for result in results if "failed" in result]
    assert [result["error"] for result in failed] == ["CPUs have one kind of memory"]
    ended = {result["part"]: result["exit_code"] for result in results if result["case"] == "process"}
    assert ended == dict.fromkeys(parts.split(","), 0)
