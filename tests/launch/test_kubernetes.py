"""Kubernetes: the manifest against its schema, who its pods are, what is refused; and the files in
examples/cluster/.
"""

import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from spmd.distributed.detect_cluster import detect
from spmd.distributed.launcher_protocol import DISAGREED, FAILED, PEER, STALLED, TERMINATED, USAGE
from spmd.distributed.world import World, free_port
from spmd.errors import OptionError
from spmd.launch.cli import main
from spmd.launch.kubernetes import KubernetesJob, manifest
from spmd.launch.settings import Settings
from tests.processes import environment

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES, JOB = ROOT / "examples" / "cluster", ROOT / "tests" / "distributed" / "faulty_job.py"
FULL = KubernetesJob(
    "registry.example/team/train@sha256:0123",
    nodes=4,
    name="gpt",
    namespace="team-1",
    gpus_per_node=8,
    cpus=96,
    memory="512Gi",
    claim="runs:/runs",
    shm="16Gi",
    env=(("NCCL_SOCKET_IFNAME", "=eth0"), ("NOTE", "yes")),
    settings=Settings(max_restarts=3, grace=89.5, stall="step=120", memory_fraction=0.9),
)


def parts(words, config, **more):
    return {part["kind"]: part for part in yaml.safe_load_all(manifest(words, config, **more))}


def container(job):
    return job["spec"]["template"]["spec"]["containers"][0]


@pytest.mark.parametrize("version", ["1.31", "1.34"])
@pytest.mark.parametrize(
    "config",
    [
        FULL,
        KubernetesJob("train:1"),
        KubernetesJob("train:1", nodes=2, settings=Settings(simulate=2)),
    ],
)
def test_manifest_is_valid(config, version):
    documents = parts(["train.py", "--lr", "1e-3"], config)
    assert list(documents) == ["Secret", "Service", "Job"]
    for part in documents.values():
        kubernetes_validate.validate(part, version, strict=True)


def test_schema_rejects_a_bad_manifest():
    job = parts(["train.py"], FULL)["Job"]
    job["spec"]["podFailurePolicy"]["rules"][0]["onExitCodes"]["value"] = [1]
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, "1.34", strict=True)


def test_job_manifest():
    documents = parts(["train.py", "--out", "$(HOME)/$x"], FULL, token="secret")
    job, service, secret = documents["Job"], documents["Service"], documents["Secret"]
    assert {part["metadata"]["name"] for part in documents.values()} == {"gpt"}
    assert {part["metadata"]["namespace"] for part in documents.values()} == {"team-1"}
    assert service["spec"] == {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"app.kubernetes.io/name": "gpt"},
    }
    assert job["spec"]["template"]["metadata"]["labels"] == service["spec"]["selector"]
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert {
        name: job["spec"][name]
        for name in ("completionMode", "completions", "parallelism", "backoffLimit")
    } == {
        "completionMode": "Indexed",
        "completions": 4,
        "parallelism": 4,
        "backoffLimit": 3,
    }
    pod = job["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "Never" and pod["terminationGracePeriodSeconds"] == 90
    assert pod["automountServiceAccountToken"] is False
    main = container(job)
    assert main["command"] == [
        "python",
        "-m",
        "spmd.launch.runner",
        "train.py",
        "--out",
        "$$(HOME)/$$x",
    ], "Kubernetes takes $$ for $"
    assert main["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    assert main["resources"] == {
        "requests": {"cpu": "96", "memory": "512Gi"},
        "limits": {"memory": "512Gi", "nvidia.com/gpu": "8"},
    }
    assert main["volumeMounts"] == [
        {"name": "claim", "mountPath": "/runs"},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    assert pod["volumes"] == [
        {"name": "claim", "persistentVolumeClaim": {"claimName": "runs"}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}},
    ]
    assert secret["stringData"] == {"token": "secret"} and "secret" not in yaml.safe_dump(
        job["spec"]
    ).replace("secretKeyRef", "")


def test_pod_environment():
    job = parts(["train.py"], FULL)["Job"]
    reported = {pair["name"]: pair.get("value") for pair in container(job)["env"]}
    assert reported.pop("SPMD_TOKEN") is None, "it comes from the Secret"
    reported |= {"JOB_COMPLETION_INDEX": "3", "SPMD_TOKEN": "x"}
    assert detect(reported) == World(3, 4, "gpt-0.gpt:61440", "Kubernetes", token="x")
    assert reported["SPMD_ATTEMPT"] == "1", "a run resumes from its checkpoint"
    assert {
        name: reported[name]
        for name in ("SPMD_STALL", "XLA_PYTHON_CLIENT_MEM_FRACTION", "NCCL_SOCKET_IFNAME", "NOTE")
    } == {
        "SPMD_STALL": "step=120",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9",
        "NCCL_SOCKET_IFNAME": "=eth0",
        "NOTE": "yes",
    }


def pods(folder, *words):
    """The manifest's two pods as processes here: what each ended with, and printed. Only the name
    of pod 0 is another.
    """
    config = KubernetesJob("train:1", nodes=2, python=sys.executable, settings=Settings(simulate=2))
    documents = parts([str(JOB), "--folder", str(folder), *words], config)
    main = container(documents["Job"])
    reported = {
        pair["name"]: pair.get("value", documents["Secret"]["stringData"]["token"])
        for pair in main["env"]
    }
    reported["SPMD_COORDINATOR"] = f"127.0.0.1:{free_port('127.0.0.1')}"
    processes = [
        subprocess.Popen(
            main["command"],
            env=environment(**reported, JOB_COMPLETION_INDEX=index),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(2)
    ]
    try:
        with ThreadPoolExecutor(2) as pool:
            texts = list(pool.map(lambda process: process.communicate(timeout=400)[0], processes))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [process.returncode for process in processes], texts


@pytest.mark.slow
def test_replaced_pods_resume(tmp_path):
    codes, texts = pods(tmp_path / "undisturbed")
    assert codes == [0, 0], texts
    undisturbed = [re.findall(r"HASH (\w+ \d+)", text) for text in texts]
    assert undisturbed[0] == undisturbed[1] and len(undisturbed[0]) == 1
    codes, texts = pods(tmp_path / "run", "--fault", "TERM", "--always", "--rank", "0")
    assert codes == [TERMINATED, TERMINATED], texts
    codes, texts = pods(tmp_path / "run")
    assert (
        codes == [0, 0] and [re.findall(r"HASH (\w+ \d+)", text) for text in texts] == undisturbed
    ), texts


def test_pod_failure_policy():
    rules = parts(["train.py"], FULL)["Job"]["spec"]["podFailurePolicy"]["rules"]
    on = {
        code: rule["action"]
        for rule in rules
        for code in rule.get("onExitCodes", {}).get("values", ())
    }
    assert on == {USAGE: "FailJob", DISAGREED: "FailJob", PEER: "Ignore", TERMINATED: "Ignore"}
    assert FAILED not in on and STALLED not in on, "they count"
    assert rules[-1] == {
        "action": "Ignore",
        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
    }


def test_each_job_has_its_own_token():
    first, second = (parts(["train.py"], FULL)["Secret"]["stringData"]["token"] for _ in range(2))
    assert first != second and re.fullmatch("[0-9a-f]{32}", first)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"image": "a b"},
            "image='a b'.\n    fix: the name of an image, such as registry.example/train:1.",
        ),
        ({"nodes": 0}, "nodes=0.\n    fix: from 1 to 100000."),
        (
            {"namespace": "Team_1"},
            "namespace='Team_1'.\n    fix: lower-case letters, digits and -, at most 63.",
        ),
        ({"memory": "64GB"}, "memory='64GB'.\n    fix: a Kubernetes quantity, such as 64Gi."),
        ({"shm": "lots"}, "shm='lots'."),
        ({"claim": "runs:runs"}, "claim='runs:runs'.\n    fix: NAME:/path"),
        ({"claim": "runs:/a\nb"}, r"claim='runs:/a\nb'."),
        ({"env": (("SPMD_TOKEN", "x"),)}, "env SPMD_TOKEN is set by the launcher in each process."),
        (
            {"gpus_per_node": 8, "settings": Settings(simulate=2)},
            "gpus_per_node= is for GPUs, but simulate=2",
        ),
        ({"settings": Settings(stall="step=3")}, "stall has no effect on a single process"),
        (
            {"settings": Settings(grace=float("inf"))},
            "grace=inf.\n    fix: a finite number of seconds.",
        ),
    ],
)
def test_bad_job_options_are_refused(options, message):
    with pytest.raises(OptionError) as caught:
        KubernetesJob(**{"image": "train:1", **options})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("words", "name", "message"),
    [
        ([], None, "there is no script to run."),
        (["-m"], None, "there is no script to run."),
        (["train.py", "a\nb"], None, r"an argument of the script='a\nb'."),
        (
            ["train.py"],
            "Train",
            "name='Train', with 5 characters.\n    fix: name= with at most 61 lower-case letters, "
            "digits and -, a letter first:",
        ),
        (["train.py"], "1st", "name='1st'"),
        (["train.py"], "x-", "name='x-'"),
        (["train.py"], "x" * 62, "pods are NAME-0 to NAME-1."),
        (["2026.py"], None, "name='2026'"),
    ],
)
def test_bad_job_names_are_refused(words, name, message):
    with pytest.raises(OptionError) as caught:
        manifest(words, KubernetesJob("train:1", nodes=2, name=name))
    assert message in str(caught.value)


def test_longest_job_name():
    assert (
        parts(["train.py"], KubernetesJob("train:1", nodes=2, name="x" * 61))["Job"]["metadata"][
            "name"
        ]
        == "x" * 61
    )
    assert (
        parts(["-m", "my.Big_Model"], KubernetesJob("train:1"))["Job"]["metadata"]["name"]
        == "big-model"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.py"], "--kubernetes needs an image.\n    fix: --image registry.example/train:1."),
        (
            ["--image", "x", "--processes", "2", "train.py"],
            "--processes has no effect with --kubernetes.\n    fix: --nodes: a pod is one process.",
        ),
        (["--image", "x", "--dry-run", "train.py"], "the manifest is only printed in any case"),
        (
            ["--image", "x", "--partition", "gpu", "train.py"],
            "--partition has no effect with --kubernetes.",
        ),
        (
            ["--image", "x", "--requeue", "train.py"],
            "--requeue has no effect with --kubernetes.\n    fix: leave it out or --slurm.",
        ),
    ],
)
def test_bad_options_are_reported(words, message, capsys):
    assert main(["launch", "--kubernetes", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["train.sbatch", "job.yaml"])
def test_examples_match_the_launchers_output(name, capsys):
    """By the commands that two_nodes.md gives."""
    text = (EXAMPLES / "two_nodes.md").read_text(encoding="utf-8").replace("\\\n", " ")
    line = next(line for line in text.splitlines() if line.strip().endswith(f"> {name}"))
    assert main(shlex.split(line.partition(">")[0])[1:]) == 0
    printed = re.sub(r"token: [0-9a-f]{32}", "token: REPLACE-ME", capsys.readouterr().out)
    assert printed == (EXAMPLES / name).read_text(encoding="utf-8")
