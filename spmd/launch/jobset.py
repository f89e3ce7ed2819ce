"""A JobSet: one job, of which the controller replaces all pods when one fails.

The exit codes of spmd and the losses of nodes become reasons and messages of the failed job, which
the set's rules read (https://jobset.sigs.k8s.io/docs/tasks/failure_policy/, of 0.10 and newer).
"""

from typing import Any

from spmd.distributed.launcher_protocol import DISAGREED, PEER, TERMINATED, USAGE
from spmd.launch.pod_failures import on_codes, on_disruption

VERSION = "jobset.x-k8s.io/v1alpha2"
EXCLUSIVE = "alpha.jobset.sigs.k8s.io/exclusive-topology"
JOB = "train"
# the reason of a job that failed by its podFailurePolicy
BY_POLICY = "PodFailurePolicy"


def job_name(name: str) -> str:
    """The name that the controller gives the only job of a set."""
    return f"{name}-{JOB}-0"


def spec(
    name: str, pods: dict[str, Any], template: dict[str, Any], max_restarts: int
) -> dict[str, Any]:
    """The set's `spec`.

    Args:
      name: of the set.
      pods: the fields of an Indexed Job that say how many there are.
      template: of the pods.
      max_restarts: of the set; those after a disruption, or a save for SIGTERM, do not count.
    """
    job = {
        **pods,
        # The job fails with its first pod, and the set replaces it.
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                on_codes("FailJob", USAGE, DISAGREED, TERMINATED),
                # The pods of the others end after 20 s when a node is lost, and Kubernetes says
                # so minutes later: that decides, and not they.
                on_codes("Ignore", PEER),
                on_disruption("FailJob"),
            ]
        },
        "template": template,
    }
    # "Container train for pod NAMESPACE/POD failed with exit code 2 matching FailJob rule ..."
    no_help = f"failed with exit code ({USAGE}|{DISAGREED}) "
    return {
        # Names resolve before pods are ready, since pods wait for each other.
        "network": {
            "enableDNSHostnames": True,
            "subdomain": name,
            "publishNotReadyAddresses": True,
        },
        "failurePolicy": {
            "maxRestarts": max_restarts,
            # The first rule that matches applies; without one, a restart that counts.
            "rules": [
                {
                    "name": "noRestart",
                    "action": "FailJobSet",
                    "onJobFailureReasons": [BY_POLICY],
                    "onJobFailureMessagePatterns": [no_help],
                },
                {
                    "name": "disruption",
                    "action": "RestartJobSetAndIgnoreMaxRestarts",
                    "onJobFailureReasons": [BY_POLICY],
                },
            ],
        },
        "replicatedJobs": [{"name": JOB, "replicas": 1, "template": {"spec": job}}],
    }
