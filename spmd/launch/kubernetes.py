"""The manifests of Kubernetes: an Indexed Job and a headless Service by which its pods find each
other, or a JobSet; and the Secret that the pods share.
"""

import dataclasses
import math
import posixpath
import re
import secrets
from collections.abc import Sequence
from typing import Any

from spmd.distributed.launcher_protocol import DISAGREED, PEER, TERMINATED, USAGE
from spmd.distributed.world import job_port
from spmd.errors import OptionError, import_extra, option
from spmd.launch import jobset
from spmd.launch.pod_failures import CONTAINER, on_codes, on_disruption
from spmd.launch.settings import Settings, check_integer
from spmd.launch.validation import (
    check_environment_variables,
    check_pattern,
    check_printable,
    check_script_args,
    script_name,
)

# valid under RFC 1123, and under RFC 1035, as Services require
LABEL = r"[a-z]([a-z0-9-]*[a-z0-9])?"
LONGEST = 63
# a key of labels: with a prefix, which is a domain, or without
KEY = r"([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?"
QUANTITY = r"(?=[\d.]*[1-9])\d{1,12}(\.\d{1,3})?(Ki|Mi|Gi|Ti|k|M|G|T)?"
CLAIM = "NAME:/path, a PersistentVolumeClaim and its mount path"
# of fields: what their text must match, and a fix
PATTERNS = (
    (
        "image",
        r"[\w.:/@-]{1,1000}",
        "the name of an image, such as registry.example/train:1",
    ),
    (
        "namespace",
        r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?",
        "lower-case letters, digits and -, at most 63",
    ),
    (
        "queue",
        r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?",
        "lower-case letters, digits, - and ., at most 63",
    ),
    ("exclusive_topology", KEY, "a label of nodes, such as cloud.google.com/gke-nodepool"),
    ("memory", QUANTITY, "a Kubernetes quantity, such as 64Gi"),
    ("shm", QUANTITY, "a Kubernetes quantity, such as 64Gi"),
    ("claim", r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?:/[^:\s]{1,1000}", CLAIM),
)
# seconds: a pod may start minutes after another, where nodes are added or images are fetched; and
# after the loss of a node it takes Kubernetes 6 minutes to replace its pod
JOIN_TIMEOUT = 1800
# the group that owns the volume, so that containers without root can write to it; as in
# examples/cluster/Dockerfile
GROUP = 1000
SHARED_MEMORY = "/dev/shm"
# of a pod among those of its job; Kubernetes sets it
INDEX = "JOB_COMPLETION_INDEX"


@dataclasses.dataclass(frozen=True)
class KubernetesJob:
    """The resources and options of a Job or a JobSet; each pod runs one process, which uses all of
    its GPUs.

    Args:
      image: container image with Python, spmd and the script.
      nodes: number of pods.
      name: of the job; None: the script's.
      namespace: None: that of `kubectl`.
      gpus_per_node: of each pod.
      cpus: of each pod.
      memory: of each pod, such as "64Gi".
      claim: a volume for checkpoints that all pods can write to, "NAME:/path".
      shm: size of /dev/shm, such as "8Gi"; None: the memory of the pod, or of its node.
      jobset: a JobSet, which replaces all pods at once, instead of an Indexed Job.
      queue: the LocalQueue of Kueue that starts the job.
      exclusive_topology: a label of nodes, such as "cloud.google.com/gke-nodepool". All pods are
        on nodes with one value of it, and no other JobSet with this option is. Needs `jobset`.
      env: environment variables of all processes, as pairs.
      python: the interpreter in the image.
      settings: how processes are started; restarts replace pods.

    Example:
      >>> KubernetesJob("registry.example/train:1", nodes=2, claim="runs")
      Traceback (most recent call last):
      spmd.errors.OptionError: claim='runs'.
          fix: NAME:/path, a PersistentVolumeClaim and its mount path.
    """

    image: str
    nodes: int = 1
    name: str | None = None
    namespace: str | None = None
    gpus_per_node: int | None = None
    cpus: int | None = None
    memory: str | None = None
    claim: str | None = None
    shm: str | None = None
    jobset: bool = False
    queue: str | None = None
    exclusive_topology: str | None = None
    env: tuple[tuple[str, str], ...] = ()
    python: str = "python"
    settings: Settings = dataclasses.field(default_factory=Settings)

    def __post_init__(self):
        for name, pattern, fix in PATTERNS:
            check_pattern(name, getattr(self, name), pattern, fix)
        check_printable("python", self.python)
        check_integer("nodes", self.nodes, 10**5)
        check_integer("gpus_per_node", self.gpus_per_node, 256)
        check_integer("cpus", self.cpus, 4096)
        if self.gpus_per_node is not None:
            self.settings.refuse_with_simulate("gpus_per_node")
        if self.settings.stall and self.nodes == 1:
            raise OptionError(
                "stall has no effect on a single process.", fix="leave it out, or use 2 nodes."
            )
        if not math.isfinite(self.settings.grace):
            raise OptionError(
                f"{option('grace', self.settings.grace)}.", fix="a finite number of seconds."
            )
        if self.exclusive_topology and not self.jobset:
            raise OptionError(
                f"{option('exclusive_topology')} has no effect on an Indexed Job.",
                fix=f"{option('jobset', True)}, or leave it out.",
            )
        check_printable("claim", self.claim or "none")
        if self.claim and posixpath.normpath(self.claim.partition(":")[2]) == SHARED_MEMORY:
            raise OptionError(
                f"{option('claim', repr(self.claim))}: {SHARED_MEMORY} is the memory that "
                "processes share.",
                fix=f"{CLAIM}, such as /runs.",
            )
        if INDEX in check_environment_variables(self.env, self.settings.environment()):
            raise OptionError(f"env {INDEX} is set by Kubernetes in each pod.", fix="leave it out.")


def manifest(argv: Sequence[str], config: KubernetesJob, token: str | None = None) -> str:
    """The YAML of the Job, Service and Secret, for `kubectl apply -f`.

    Args:
      argv: the script's path in the image, and its arguments; or "-m", a module and its arguments.
      config: the job.
      token: the secret of its processes; None: a new one.

    Raises:
      OptionError: there is nothing to run; the name is invalid in Kubernetes; an argument has a
        control character.
      MissingExtraError: PyYAML is not installed.
    """
    check_script_args(argv, "--kubernetes --nodes 2 --image IMAGE")
    name = _name(argv, config)
    if token is None:
        token = secrets.token_hex(16)
    template = {"metadata": {"labels": _labels(name)}, "spec": _pod(argv, config, name)}
    documents = [_document("v1", "Secret", name, config, {"stringData": {"token": token}})]
    if config.jobset:
        content = {"spec": jobset.spec(name, _pods(config), template, config.settings.max_restarts)}
        documents.append(_document(jobset.VERSION, "JobSet", name, config, content))
    else:
        # names resolve before pods are ready, since pods wait for each other
        service = {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": _labels(name),
        }
        documents.append(_document("v1", "Service", name, config, {"spec": service}))
        content = {"spec": _job(config, template)}
        documents.append(_document("batch/v1", "Job", name, config, content))
    yaml = import_extra("yaml", "kubernetes")
    return yaml.safe_dump_all(
        documents,
        sort_keys=False,
        # PyYAML would fold long arguments over several lines.
        width=10**6,
        explicit_start=True,
        allow_unicode=True,
    ).rstrip()


def _document(
    version: str, kind: str, name: str, config: KubernetesJob, content: dict[str, Any]
) -> dict[str, Any]:
    """A document of the manifest."""
    metadata: dict[str, Any] = {"name": name, "labels": _labels(name)}
    if config.namespace:
        metadata["namespace"] = config.namespace
    if kind in ("Job", "JobSet") and config.queue:
        metadata["labels"]["kueue.x-k8s.io/queue-name"] = config.queue
    if kind == "JobSet" and config.exclusive_topology:
        metadata["annotations"] = {jobset.EXCLUSIVE: config.exclusive_topology}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **content}


def _name(argv: Sequence[str], config: KubernetesJob) -> str:
    """The job's name: the given one, or the script's in lower case."""
    name = config.name
    if name is None:
        name = re.sub(r"[^a-z0-9]+", "-", script_name(argv).lower()).strip("-")
    last = _pod_name("NAME", config, config.nodes - 1)
    # The names of a JobSet's pods have a random part as well.
    most = LONGEST - len(last.removeprefix("NAME")) - (len("-abcde") if config.jobset else 0)
    if not re.fullmatch(LABEL, name) or len(name) > most:
        raise OptionError(
            f"{option('name', repr(name))}, with {len(name)} characters.",
            fix=f"{option('name')} with at most {most} lower-case letters, digits and -, a letter "
            f"first: pods are {_pod_name('NAME', config, 0)} to {last}.",
        )
    return name


def _pod_name(name: str, config: KubernetesJob, index: int) -> str:
    """The name of a pod's host."""
    return f"{jobset.job_name(name) if config.jobset else name}-{index}"


def _labels(name: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": name}


def _pods(config: KubernetesJob) -> dict[str, Any]:
    """One pod for each index, all at the same time."""
    return {
        "completionMode": "Indexed",
        "completions": config.nodes,
        "parallelism": config.nodes,
    }


def _job(config: KubernetesJob, template: dict[str, Any]) -> dict[str, Any]:
    """An Indexed Job of all pods; failures that follow from those of other pods do not count."""
    return {
        **_pods(config),
        "backoffLimit": config.settings.max_restarts,
        "podFailurePolicy": {
            "rules": [
                # Kubernetes applies the first rule that matches. A pod that replaced this one
                # would end with the same code.
                on_codes("FailJob", USAGE, DISAGREED),
                # Pods that end because another one failed, or because they were asked to, must
                # not use up backoffLimit.
                on_codes("Ignore", PEER, TERMINATED),
                on_disruption("Ignore"),
            ]
        },
        "template": template,
    }


def _pod(argv: Sequence[str], config: KubernetesJob, name: str) -> dict[str, Any]:
    """One pod: no restarts inside it, no access to the cluster's API, no privileges."""
    security: dict[str, Any] = {"seccompProfile": {"type": "RuntimeDefault"}}
    volumes, mounts = [], []
    if config.claim:
        claim, _, path = config.claim.partition(":")
        volumes.append({"name": "claim", "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": "claim", "mountPath": path})
        # By default Kubernetes sets the group and permissions of every file at each mount, which
        # takes long for many files.
        security |= {"fsGroup": GROUP, "fsGroupChangePolicy": "OnRootMismatch"}
    # Containers have 64 MiB there, too little for NCCL and for checkpoints in memory.
    shm = {"medium": "Memory"}
    if config.shm:
        shm["sizeLimit"] = config.shm
    volumes.append({"name": "shm", "emptyDir": shm})
    mounts.append({"name": "shm", "mountPath": SHARED_MEMORY})
    container = {
        "name": CONTAINER,
        "image": config.image,
        "command": [_literal(word) for word in (config.python, "-m", "spmd.launch.runner", *argv)],
        "env": _env(config, name),
        "resources": _resources(config),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": mounts,
    }
    spec = {
        # With the headless Service of this name, the pods of a Job get the DNS names NAME-0.NAME
        # and so on. A JobSet makes the Service itself.
        "subdomain": name,
        # A podFailurePolicy is allowed only with restartPolicy "Never".
        "restartPolicy": "Never",
        # Kubernetes takes an integer number of seconds.
        "terminationGracePeriodSeconds": math.ceil(config.settings.grace),
        "automountServiceAccountToken": False,
        # Otherwise each Service of the namespace adds variables to the environment, named after
        # itself.
        "enableServiceLinks": False,
        "securityContext": security,
        "containers": [{key: value for key, value in container.items() if value}],
        "volumes": volumes,
    }
    return {key: value for key, value in spec.items() if value != []}


def _env(config: KubernetesJob, name: str) -> list[dict[str, Any]]:
    """The variables of a pod; its rank is `INDEX`.

    A pod cannot know whether it replaces another, so it always declares a restart: a run resumes
    from its checkpoint, if it has one.
    """
    host = f"{_pod_name(name, config, 0)}.{name}"
    variables = {
        "SPMD_PROCESSES": str(config.nodes),
        # Pods in the network of their node share its ports with those of other jobs.
        "SPMD_COORDINATOR": f"{host}:{job_port(name)}",
    }
    variables |= (
        {
            "SPMD_ATTEMPT": "1",
            "SPMD_JOIN_TIMEOUT": str(JOIN_TIMEOUT),
            "PYTHONUNBUFFERED": "1",
        }
        | config.settings.environment()
        | dict(config.env)
    )
    token = {"name": "SPMD_TOKEN", "valueFrom": {"secretKeyRef": {"name": name, "key": "token"}}}
    return [*({"name": key, "value": _literal(value)} for key, value in variables.items()), token]


def _resources(config: KubernetesJob) -> dict[str, Any]:
    """Requests and limits: memory and GPUs are limited, idle CPUs of the node may be used."""
    resources: dict[str, dict[str, str]] = {"requests": {}, "limits": {}}
    if config.cpus:
        resources["requests"]["cpu"] = str(config.cpus)
    if config.memory:
        resources["requests"]["memory"] = config.memory
        resources["limits"]["memory"] = config.memory
    if config.gpus_per_node:
        # Kubernetes takes the limit of an extended resource as its request, and does not
        # overcommit it.
        resources["limits"]["nvidia.com/gpu"] = str(config.gpus_per_node)
    return {key: value for key, value in resources.items() if value}


def _literal(text: str) -> str:
    """Escape text in which Kubernetes would otherwise expand $(NAME)."""
    return text.replace("$", "$$")
