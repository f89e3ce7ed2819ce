"""Kubernetes: the manifests against the schemas of their kinds, who the pods are, what is refused;
and the files in examples/cluster/.
"""

import dataclasses
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set_spec import JobsetV1alpha2JobSetSpec
from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob

from spmd.distributed.detect_cluster import detect
from spmd.distributed.launcher_protocol import DISAGREED, FAILED, PEER, STALLED, TERMINATED, USAGE
from spmd.distributed.world import World, free_port, job_port
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


SET = dataclasses.replace(
    FULL, jobset=True, queue="research", exclusive_topology="cloud.google.com/gke-nodepool"
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


def unknown_fields(schema):
    """The schema, in which objects have no other fields than those that it names."""
    if isinstance(schema, list):
        return [unknown_fields(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: unknown_fields(part) for name, part in schema.items()}
    if schema.get("type") == "object" and "properties" in schema:
        closed.setdefault("additionalProperties", False)
    return closed


# JobSet's CRD is in no package. Kubeflow Trainer's models are made from it; their quantities are
# objects, which is wrong, so Kubernetes' own schema judges the job.
SCHEMA = JobsetV1alpha2JobSetSpec.model_json_schema(by_alias=True)
SCHEMA["$defs"]["IoK8sApiBatchV1JobTemplateSpec"] = {}
JOBSET = jsonschema.Draft202012Validator(unknown_fields(SCHEMA))


@pytest.mark.parametrize("config", [SET, KubernetesJob("train:1", jobset=True)])
def test_jobset_is_valid(config):
    documents = parts(["train.py", "--lr", "1e-3"], config)
    assert list(documents) == ["Secret", "JobSet"]
    kubernetes_validate.validate(documents["Secret"], "1.34", strict=True)
    jobset = documents["JobSet"]
    JOBSET.validate(jobset["spec"])
    job = jobset["spec"]["replicatedJobs"][0]["template"]
    full = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "train"}, **job}
    kubernetes_validate.validate(full, "1.34", strict=True)


@pytest.mark.parametrize(
    ("old", "new"), [("maxRestarts: 3", "maxRestart: 3"), ("replicas: 1", "replicas: one")]
)
def test_schema_rejects_a_bad_jobset(old, new):
    text = manifest(["train.py"], SET)
    assert text.count(old) == 1
    *_, jobset = yaml.safe_load_all(text.replace(old, new))
    with pytest.raises(jsonschema.ValidationError):
        JOBSET.validate(jobset["spec"])


def test_jobset_manifest():
    spec = parts(["train.py"], SET)["JobSet"]["spec"]
    assert spec["failurePolicy"]["maxRestarts"] == 3
    (replicated,) = spec["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert (replicated["name"], replicated["replicas"]) == ("train", 1)
    assert (job["completions"], job["parallelism"], job["backoffLimit"]) == (4, 4, 0)
    pod = job["template"]["spec"]
    assert pod == {
        **parts(["train.py"], FULL)["Job"]["spec"]["template"]["spec"],
        "containers": pod["containers"],
    }
    assert spec["network"]["subdomain"] == pod["subdomain"] == "gpt"
    reported = {pair["name"]: pair.get("value") for pair in pod["containers"][0]["env"]}
    reported |= {"JOB_COMPLETION_INDEX": "3", "SPMD_TOKEN": "x"}
    # the names of pods: https://jobset.sigs.k8s.io/docs/concepts/
    address = f"gpt-train-0-0.gpt:{job_port('gpt')}"
    assert detect(reported) == World(3, 4, address, "Kubernetes", token="x")


# what Kubernetes writes about a job that its podFailurePolicy has failed
# (pkg/controller/job/pod_failure_policy.go)
BY_CODE = "Container {} for pod team-1/gpt-train-0-1-x7k2p failed with exit code {} matching {}"
BY_LOSS = "Pod team-1/gpt-train-0-1-x7k2p has condition DisruptionTarget matching {}"


def action_of_set(code=None, container="train", disrupted=False):
    """What the manifest's JobSet does after a pod has ended so, by the rules of Kubernetes and
    JobSet.
    """
    spec = parts(["train.py"], SET)["JobSet"]["spec"]
    job = spec["replicatedJobs"][0]["template"]["spec"]
    reason, message = "BackoffLimitExceeded", "Job has reached the specified backoff limit"
    for index, rule in enumerate(job["podFailurePolicy"]["rules"]):
        exits = rule.get("onExitCodes", {"values": (), "containerName": ""})
        policy = f"{rule['action']} rule at index {index}"
        if code in exits["values"] and container == exits["containerName"]:
            reason, message = "PodFailurePolicy", BY_CODE.format(container, code, policy)
            break
        if disrupted and "onPodConditions" in rule:
            reason, message = "PodFailurePolicy", BY_LOSS.format(policy)
            break
    for rule in spec["failurePolicy"]["rules"]:
        patterns = rule.get("onJobFailureMessagePatterns", [""])
        if reason in rule["onJobFailureReasons"] and re.search(patterns[0], message):
            return rule["action"]
    return "RestartJobSet"


@pytest.mark.parametrize("code", [USAGE, DISAGREED])
def test_set_ends_where_a_restart_is_no_help(code):
    assert action_of_set(code) == "FailJobSet"


@pytest.mark.parametrize(
    "end", [{"code": TERMINATED}, {"disrupted": True}, {"code": 42, "disrupted": True}]
)
def test_restarts_of_the_cluster_do_not_count(end):
    assert action_of_set(**end) == "RestartJobSetAndIgnoreMaxRestarts"


@pytest.mark.parametrize("end", [{"code": FAILED}, {"code": STALLED}, {"code": 137}])
def test_other_restarts_count(end):
    assert action_of_set(**end) == "RestartJobSet"


def test_pod_that_ends_because_of_another_decides_nothing():
    spec = parts(["train.py"], SET)["JobSet"]["spec"]
    rules = spec["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]
    codes = {rule["action"]: rule["onExitCodes"]["values"] for rule in rules[:2]}
    assert codes["Ignore"] == [PEER]


@pytest.mark.parametrize("code", [USAGE, DISAGREED, TERMINATED])
def test_codes_of_other_containers_mean_something_else(code):
    assert action_of_set(code, container="sidecar") == "RestartJobSet"
    rules = parts(["train.py"], FULL)["Job"]["spec"]["podFailurePolicy"]["rules"]
    assert {rule["onExitCodes"]["containerName"] for rule in rules[:2]} == {"train"}


def test_example_for_kubeflow_has_known_fields_only():
    """Kubeflow's models leave unknown fields out."""
    page = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```yaml\n(apiVersion: trainer.*?)```", page, re.DOTALL)
    job = yaml.safe_load(text)
    assert TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job
    job["spec"]["trainer"]["nodes"] = 4
    assert TrainerV1alpha1TrainJob.from_dict(job).to_dict() != job


def test_queue_is_a_label_of_the_job():
    key = "kueue.x-k8s.io/queue-name"
    for config, kind in ((SET, "JobSet"), (dataclasses.replace(FULL, queue="research"), "Job")):
        text = manifest(["train.py"], config)
        assert text.count("research") == 1
        assert parts(["train.py"], config)[kind]["metadata"]["labels"][key] == "research"


def test_topology_is_an_annotation_of_the_set():
    assert parts(["train.py"], SET)["JobSet"]["metadata"]["annotations"] == {
        "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
    }


def test_shared_memory_is_not_the_64_mb_of_containers():
    pod = parts(["train.py"], KubernetesJob("train:1"))["Job"]["spec"]["template"]["spec"]
    assert pod["volumes"] == [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    assert pod["containers"][0]["volumeMounts"] == [{"name": "shm", "mountPath": "/dev/shm"}]


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
    assert detect(reported) == World(3, 4, f"gpt-0.gpt:{job_port('gpt')}", "Kubernetes", token="x")
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


@pytest.mark.system
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make a namespace of processes")
def test_first_process_of_a_container_ends_on_sigterm(tmp_path):
    """The kernel ignores a signal without a handler for it, and a pod would wait for its end."""
    script = tmp_path / "script.py"
    script.write_text("import time\nprint('begun', flush=True)\ntime.sleep(600)\n")
    words = ["unshare", "--pid", "--fork", "--kill-child", sys.executable]
    process = subprocess.Popen(
        [*words, "-m", "spmd.launch.runner", script],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "begun\n"
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(child), signal.SIGTERM)
        assert process.wait(timeout=60) == TERMINATED
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


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
        ({"shm": "0"}, "shm='0'."),
        ({"memory": "0Gi"}, "memory='0Gi'."),
        ({"claim": "runs:/dev/shm/"}, "/dev/shm is the memory that processes share"),
        (
            {"env": (("JOB_COMPLETION_INDEX", "0"),)},
            "env JOB_COMPLETION_INDEX is set by Kubernetes",
        ),
        ({"queue": "a_b"}, "queue='a_b'.\n    fix: lower-case letters"),
        (
            {"exclusive_topology": "a b", "jobset": True},
            "exclusive_topology='a b'.\n    fix: a label",
        ),
        (
            {"exclusive_topology": "rack"},
            "exclusive_topology= has no effect on an Indexed Job.\n    fix: jobset=True",
        ),
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


def test_longest_name_of_a_set():
    config = KubernetesJob("train:1", nodes=2, name="x" * 47, jobset=True)
    assert len(f"{'x' * 47}-train-0-1-abcde") == 63
    assert parts(["train.py"], config)["JobSet"]["metadata"]["name"] == "x" * 47
    with pytest.raises(
        OptionError, match=r"at most 47 .* pods are NAME-train-0-0 to NAME-train-0-1"
    ):
        manifest(["train.py"], dataclasses.replace(config, name="x" * 48))


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
            ["--image", "x", "--exclusive-topology", "rack", "train.py"],
            "--exclusive-topology has no effect on an Indexed Job.\n    fix: --jobset, or leave it "
            "out.",
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


@pytest.mark.parametrize("name", ["train.sbatch", "job.yaml", "jobset/jobset.yaml"])
def test_examples_match_the_launchers_output(name, capsys):
    """By the commands that two_nodes.md gives."""
    text = (EXAMPLES / "two_nodes.md").read_text(encoding="utf-8").replace("\\\n", " ")
    line = next(line for line in text.splitlines() if line.strip().endswith(f"> {name}"))
    assert main(shlex.split(line.partition(">")[0])[1:]) == 0
    printed = re.sub(r"token: [0-9a-f]{32}", "token: REPLACE-ME", capsys.readouterr().out)
    assert printed == (EXAMPLES / name).read_text(encoding="utf-8")


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("kind", ["Job", "JobSet"])
def test_patches_of_the_example_are_applied_by_kubectl(kind, tmp_path):
    """Kustomize, a part of kubectl, adds what the cluster needs; no cluster is asked."""
    folder = EXAMPLES / "jobset" if kind == "JobSet" else EXAMPLES
    for name in ("kustomization.yaml", f"{kind.lower()}.yaml"):
        shutil.copy(folder / name, tmp_path)
    done = subprocess.run(
        ["kubectl", "kustomize", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (patched,) = (part for part in yaml.safe_load_all(done.stdout) if part["kind"] == kind)
    before = yaml.safe_load_all((folder / f"{kind.lower()}.yaml").read_text(encoding="utf-8"))
    (before,) = (part for part in before if part["kind"] == kind)
    job, old = patched, before
    if kind == "JobSet":
        JOBSET.validate(patched["spec"])
        job, old = (part["spec"]["replicatedJobs"][0]["template"] for part in (patched, before))
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "train"}, **job}
    kubernetes_validate.validate(job, "1.34", strict=True)
    pod, old_pod = (part["spec"]["template"]["spec"] for part in (job, old))
    assert pod["hostNetwork"] is True and pod["dnsPolicy"] == "ClusterFirstWithHostNet"
    assert pod["nodeSelector"] and pod["tolerations"]
    main, old_main = pod["containers"][0], old_pod["containers"][0]
    assert main["resources"]["limits"] == {**old_main["resources"]["limits"], "rdma/hca": "8"}
    assert main["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert (main["command"], main["env"]) == (old_main["command"], old_main["env"])
