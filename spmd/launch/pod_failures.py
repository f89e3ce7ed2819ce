"""Rules of a podFailurePolicy: what Kubernetes does with a Job when a pod fails."""

from typing import Any

# the container that trains; clusters may add others to its pod, whose exit codes are their own
CONTAINER = "train"


def on_codes(action: str, *codes: int) -> dict[str, Any]:
    """A rule of a podFailurePolicy for exit codes of the container that trains."""
    exits = {"containerName": CONTAINER, "operator": "In", "values": list(codes)}
    return {"action": action, "onExitCodes": exits}


def on_disruption(action: str) -> dict[str, Any]:
    """A rule of a podFailurePolicy for pods whose node is drained or lost, or that are evicted."""
    return {"action": action, "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
