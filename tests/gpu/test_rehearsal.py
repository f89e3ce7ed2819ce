"""The benchmark for one GPU runs, with tiny shapes on a CPU."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from benchmarks.gpu import cases, references, steps

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
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SPMD_TEST", "XLA_FLAGS", "JAX_"))
    }
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60 * minutes + 60
    )
    logs = "\n".join(
        f"== {path.name}\n{path.read_text()[-2000:]}" for path in sorted(out.glob("*.log"))
    )
    assert done.returncode == 0, done.stdout + done.stderr + logs
    lines = [line for path in out.glob("*.jsonl") for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines], done.stdout


@pytest.mark.system
def test_parts_without_peers(tmp_path):
    results, table = rehearse(tmp_path, "attention,codecs", 30)
    checks = [result for result in results if "check" in result]
    assert {result["part"] for result in checks} == {"attention", "codecs"} and all(
        result["right"] for result in checks
    )
    # the newest of each case
    timed = {result["case"]: result["times"].keys() for result in results if "times" in result}
    assert {"ours chunked", "ours xla"} <= timed[
        "2 x 64 tokens, 4 heads of 16"
    ] and "a cast" in timed["tiny"]
    assert "| attention | 2 x 64 tokens, 4 heads of 16 | ours chunked |" in table


@pytest.mark.system
@pytest.mark.skipif(
    bool(MISSING),
    reason=f"missing: {', '.join(MISSING)}, with which the benchmark for one GPU is rehearsed "
    "entirely",
)
def test_every_part_beside_its_peers(tmp_path):
    parts = (
        "tests,steps,attention,recurrent,restarts,codecs,finetune,resnet,small_step,low_precision,"
        "offload"
    )
    # a part has its share of these, however slow the machine
    results, _ = rehearse(tmp_path, parts, 100)
    assert not [result for result in results if result.get("right") is False]
    failed = [result for result in results if "failed" in result]
    assert [result["error"] for result in failed] == ["CPUs have one kind of memory"]
    ended = {
        result["part"]: result["exit_code"] for result in results if result["case"] == "process"
    }
    assert ended == dict.fromkeys(parts.split(","), 0)


FAULTS = {
    "not causal": lambda query, key, value, causal: jax.nn.dot_product_attention(query, key, value),
    "zeros": lambda query, key, value, causal: jnp.zeros_like(query),
    "noise": lambda query, key, value, causal: jax.random.normal(
        jax.random.key(0), query.shape, query.dtype
    ),
}


@pytest.mark.system
@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_gradients_of_a_step_show_wrong_attention(monkeypatch, fault):
    step = cases.steps(small=True)["gpt2"]
    _, right = references.on_cpu(step, rows=1)
    if fault is not None:
        monkeypatch.setattr(cases, "attention_by_hand", FAULTS[fault])
    hand = cases.ByHand(step)
    _, _, optimizer_state, _ = hand.compiled(*hand.init(), references.repeat(step.data(), 1))
    _, error = references.worst(
        references.first_gradients(optimizer_state), references.sample(right)
    )
    assert error > 0.7 if fault else error < steps.GRADIENTS


def test_a_folder_with_results_is_refused(tmp_path):
    (tmp_path / "results.jsonl").write_text("")
    command = [
        sys.executable,
        str(ROOT / "benchmarks/gpu/run.py"),
        "--rehearse",
        "--only",
        "attention",
        "--out",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "name another folder" in done.stderr
