"""Conflicts of a layout's `[parameter_server]` and `[optimizer]` with its `[gradients]`."""

from spmd.base.fields import Conflict
from spmd.layout.gradients import Gradients
from spmd.layout.schema import OptimizerState
from spmd.wire.server.declaration import ParameterServer, declared_problems


def server_problems(server: ParameterServer, gradients: Gradients) -> list[Conflict]:
    """Return keys of `[parameter_server]` that mean nothing, or do not go together, whatever the
    model and the mesh.
    """
    if gradients.reduction != "parameter_server":
        # The defaults are those of a layout without this table, and mean nothing then.
        if server == ParameterServer():
            return []
        why = f'nothing reads it: gradients use reduction "{gradients.reduction}".'
        return [Conflict("", why, '[gradients] reduction = "parameter_server", or leave it out.')]
    conflicts = declared_problems(server)
    if server.asynchronous:
        conflicts += _codec_problems(gradients)
    elif server.local and gradients.diagnostics:
        conflicts.append(
            Conflict(
                "gradients.diagnostics",
                "nothing reads it: in most steps nothing is exchanged.",
                "leave it out.",
            )
        )
    return conflicts


def optimizer_problems(
    optimizer: OptimizerState, gradients: Gradients, server: ParameterServer
) -> list[Conflict]:
    """Return keys of `[optimizer]` that do not go together with servers."""
    if not (optimizer.owners and gradients.reduction == "parameter_server" and server.local):
        return []
    why = (
        f'[parameter_server] mode = "{server.mode}": each worker updates parameters of its own, so '
        "no two share an update."
    )
    return [Conflict("matrices", why, 'leave it out, or mode = "synchronous".')]


def _codec_problems(gradients: Gradients) -> list[Conflict]:
    """Return codecs that work on a mean of gradients: an asynchronous server applies each gradient
    separately.
    """
    conflicts = []
    separate = "an asynchronous server applies each gradient separately."
    for rule, codec, options in gradients.choices:
        if codec == "power_sgd":
            why = f"{codec} approximates a mean over workers; {separate}"
            conflicts.append(
                Conflict(
                    "gradients.codec", why, 'codec = "bfloat16", or mode = "synchronous".', rule
                )
            )
        if dict(options).get("reduce") == "ring":
            why = f"a ring makes the mean of workers; {separate}"
            conflicts.append(
                Conflict(
                    "gradients.reduce", why, 'reduce = "one_shot", or mode = "synchronous".', rule
                )
            )
    for key in ("start_step", "exact_axes", "diagnostics"):
        if gradients.compressed and getattr(gradients, key) != getattr(Gradients(), key):
            why = "nothing reads it: an asynchronous server makes no mean."
            conflicts.append(Conflict(f"gradients.{key}", why, "leave it out."))
    return conflicts
