"""Kubernetes: the manifest of an Indexed Job, a headless Service by which its pods find each other, and the Secret that they share."""

import dataclasses
import math
import re
import secrets
from collections.abc import Sequence
from typing import Any

from spmd.distributed.detect_cluster import FIRST_PORT
from spmd.distributed.watchdog import DISAGREED, PEER, TERMINATED, USAGE
from spmd.errors import OptionError, import_extra
from spmd.launch.settings import Settings, whole_number
from spmd.launch.validation import check_words, matching, printable, script_name, variables

LABEL = r"[a-z]([a-z0-9-]*[a-z0-9])?"  # of RFC 1123, and of RFC 1035, which names of Services must be
LONGEST = 63
QUANTITY = r"\d{1,12}(\.\d{1,3})?(Ki|Mi|Gi|Ti|k|M|G|T)?"
GROUP = 1000  # who is not root may write to the volume: it is this group's, as in examples/cluster/Dockerfile


@dataclasses.dataclass(frozen=True)
class Kubernetes:
    """What a job asks Kubernetes for; each pod is one process, which has all of its GPUs.

    Args:
      image: of the container: Python, spmd, and the script.
      nodes: how many pods.
      name: of the job and its Service; None: the script's.
      namespace: None: as `kubectl` has it.
      gpus_per_node: of each pod.
      cpus: of each pod.
      memory: of each pod, such as "64Gi".
      claim: a volume for checkpoints, "NAME:/path", which all pods can write.
      shm: the size of /dev/shm, such as "8Gi"; None: as the cluster has it, often 64 MB.
      env: variables of all processes, as pairs.
      python: the interpreter in the image.
      settings: how processes are started; a restart is of pods.

    Example:
      >>> Kubernetes("registry.example/train:1", nodes=2, claim="runs")
      Traceback (most recent call last):
      spmd.errors.OptionError: claim='runs'.
          fix: NAME:/path, a PersistentVolumeClaim and where it is mounted.
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
    env: tuple[tuple[str, str], ...] = ()
    python: str = "python"
    settings: Settings = dataclasses.field(default_factory=Settings)

    def __post_init__(self):
        matching("image", self.image, r"[\w.:/@-]{1,1000}", "the name of an image, such as registry.example/train:1")
        printable("python", self.python)
        whole_number("nodes", self.nodes, 10**5)
        whole_number("gpus_per_node", self.gpus_per_node, 256)
        whole_number("cpus", self.cpus, 4096)
        if self.gpus_per_node is not None:
            self.settings.no_simulation("gpus_per_node")
        if self.settings.stall and self.nodes == 1:
            raise OptionError("a process that is alone waits for nobody, so stall would do nothing.", fix="leave it out, or 2 nodes.")
        if not math.isfinite(self.settings.grace):
            raise OptionError(f"grace={self.settings.grace}.", fix="seconds, as a number.")
        matching("namespace", self.namespace, r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", "small letters, digits and -, at most 63")
        for name in ("memory", "shm"):
            matching(name, getattr(self, name), QUANTITY, "a size as Kubernetes has it, such as 64Gi")
        where = "NAME:/path, a PersistentVolumeClaim and where it is mounted"
        matching("claim", self.claim, r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?:/[^:\s]{1,1000}", where)
        printable("claim", self.claim or "none")
        variables(self.env, self.settings.environment())


def manifest(words: Sequence[str], how: Kubernetes, token: str | None = None) -> str:
    """The YAML of all that the job needs, for `kubectl apply -f`.

    Args:
      words: the script, as it is named in the image, and its arguments; or "-m", a module and its arguments.
      how: what the job asks for.
      token: what its processes know, and others do not; None: a new one.

    Raises:
      OptionError: there is nothing to run; the name is none that Kubernetes takes; a word has a control character.
      MissingExtraError: PyYAML is not installed.
    """
    check_words(words, "--kubernetes --nodes 2 --image IMAGE")
    name = _name(words, how)
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(name, how),
        "stringData": {"token": secrets.token_hex(16) if token is None else token},
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(name, how),
        # a pod is found by its name before it is ready: they wait for each other
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": _labels(name)},
    }
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(name, how), "spec": _job(words, how, name)}
    yaml = import_extra("yaml", "kubernetes")
    return yaml.safe_dump_all([secret, service, job], sort_keys=False, width=10**6, explicit_start=True, allow_unicode=True).rstrip()


def _name(words: Sequence[str], how: Kubernetes) -> str:
    """The job's name: what was given, or the script's in small letters."""
    name = how.name if how.name is not None else re.sub(r"[^a-z0-9]+", "-", script_name(words).lower()).strip("-")
    most = LONGEST - len(f"-{how.nodes - 1}")
    if not re.fullmatch(LABEL, name) or len(name) > most:
        raise OptionError(
            f"name={name!r}, of {len(name)} letters.\n"
            f"    fix: --name with small letters, digits and -, a letter first, at most {most}: pods are NAME-0 to NAME-{how.nodes - 1}."
        )
    return name


def _labels(name: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": name}


def _metadata(name: str, how: Kubernetes) -> dict[str, Any]:
    return {"name": name, **({"namespace": how.namespace} if how.namespace else {}), "labels": _labels(name)}


def _job(words: Sequence[str], how: Kubernetes, name: str) -> dict[str, Any]:
    """All pods at once, by number; of those that fail, the ones that failed for others' sake do not count."""
    on_codes = lambda action, *codes: {"action": action, "onExitCodes": {"operator": "In", "values": list(codes)}}
    ignored = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    return {
        "completionMode": "Indexed",
        "completions": how.nodes,
        "parallelism": how.nodes,
        "backoffLimit": how.settings.max_restarts,
        "podFailurePolicy": {"rules": [on_codes("FailJob", USAGE, DISAGREED), on_codes("Ignore", PEER, TERMINATED), ignored]},
        "template": {"metadata": {"labels": _labels(name)}, "spec": _pod(words, how, name)},
    }


def _pod(words: Sequence[str], how: Kubernetes, name: str) -> dict[str, Any]:
    """One pod: no restarts inside it, no word with the cluster's own interface, no privileges."""
    security: dict[str, Any] = {"seccompProfile": {"type": "RuntimeDefault"}}
    volumes, mounts = [], []
    if how.claim:
        claim, _, path = how.claim.partition(":")
        volumes.append({"name": "claim", "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": "claim", "mountPath": path})
        security |= {"fsGroup": GROUP, "fsGroupChangePolicy": "OnRootMismatch"}
    if how.shm:
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": how.shm}})
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    container = {
        "name": "train",
        "image": how.image,
        "command": [_literal(word) for word in (how.python, "-m", "spmd.launch.runner", *words)],
        "env": _env(how, name),
        "resources": _resources(how),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": mounts,
    }
    spec = {
        "subdomain": name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": math.ceil(how.settings.grace),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": security,
        "containers": [{key: value for key, value in container.items() if value}],
        "volumes": volumes,
    }
    return {key: value for key, value in spec.items() if value != []}


def _env(how: Kubernetes, name: str) -> list[dict[str, Any]]:
    """Who all are; the rank is JOB_COMPLETION_INDEX, which Kubernetes sets.

    A pod cannot know whether there was one before it. So it says that there was: a run goes on with what is saved, if anything is.
    """
    own = {
        "SPMD_PROCESSES": str(how.nodes),
        "SPMD_COORDINATOR": f"{name}-0.{name}:{FIRST_PORT}",
        "SPMD_ATTEMPT": "1",
        "PYTHONUNBUFFERED": "1",
    }
    own |= how.settings.environment() | dict(how.env)
    token = {"name": "SPMD_TOKEN", "valueFrom": {"secretKeyRef": {"name": name, "key": "token"}}}
    return [*({"name": key, "value": _literal(value)} for key, value in own.items()), token]


def _resources(how: Kubernetes) -> dict[str, Any]:
    """Memory and GPUs are what is asked for, and no more; CPUs that nobody else uses may be used."""
    memory = {"memory": how.memory} if how.memory else {}
    requests = ({"cpu": str(how.cpus)} if how.cpus else {}) | memory
    limits = memory | ({"nvidia.com/gpu": str(how.gpus_per_node)} if how.gpus_per_node else {})
    return {key: value for key, value in (("requests", requests), ("limits", limits)) if value}


def _literal(text: str) -> str:
    """A word as it is: Kubernetes would put variables in the place of $(NAME)."""
    return text.replace("$", "$$")
