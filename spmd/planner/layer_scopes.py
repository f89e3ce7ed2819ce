"""Which layer of the model, or which part of the step, an instruction of a compiled program belongs
to: read from its scope.
"""

import re

from spmd.nn.unchanged_models import AS_WRITTEN

OUTSIDE = "model and loss, outside of layers"
REST = "optimizer, and the rest of the step"
PARTS = {  # of the step, by their scopes
    "gather_params": "gathering parameters",
    "gather_updates": "gathering updates",
    "reduce_gradients": "reducing gradients",
    "send": "synchronizing workers",
    "receive": "synchronizing workers",
    "stats": "batch statistics",
    "metrics": "metrics",
}
ADDED = {  # by JAX's transformations and by this library; they are no layers
    *(
        "while",
        "body",
        "cond",
        "closed_call",
        "checkpoint",
        "remat",
        "rematted_computation",
        "shard_map",
    ),
    *("eval_jaxpr", "pjit", "custom_jvp_call", "custom_vjp_call", AS_WRITTEN),
}
# the name of a function of Python, which JAX adds to the loops of random numbers
FUNCTION = re.compile(r"\w+(\.\w+)+")


def layer_of(scope: str) -> str:
    """The path of a layer, forward or backward, or the part of the step, that a scope is in.

    Args:
      scope: of one instruction, as `spmd.planner.hlo.Module.scopes` has it.

    >>> (
    ...     layer_of("shard_map/transpose(jvp(blocks/0))/attention/out/dot_general"),
    ...     layer_of("shard_map/jvp(blocks/1)/jit(relu)/max"),
    ... )
    ('blocks/0/attention/out', 'blocks/1')
    >>> layer_of("shard_map/reduce_gradients/exact/0/psum"), layer_of("add")
    ('reducing gradients', 'optimizer, and the rest of the step')
    >>> layer_of("shard_map/jvp()/exp")
    'model and loss, outside of layers'
    >>> layer_of("state.params['blocks'][1]['up']['kernel']")
    'blocks/1/up'
    """
    scope = scope.partition(";")[0]  # XLA has merged several
    if scope.startswith("state.params"):  # a copy of a parameter
        return "/".join(re.findall(r"\[\\?'?([^\]'\\]+)\\?'?\]", scope)[:-1]) or OUTSIDE
    parts = [
        part
        for part in _unwrapped(scope).split("/")
        if part and part not in ADDED and not FUNCTION.fullmatch(part)
    ][:-1]
    if "jvp(" in scope:
        return "/".join(parts) or OUTSIDE
    return next((PARTS[part] for part in parts if part in PARTS), REST)


def _unwrapped(scope: str) -> str:
    """A scope without the names of transformations, innermost first; what they wrap stays if it is
    a path of layers.
    """
    while (found := re.search(r"\w+\(([^()]*)\)", scope)) is not None:
        inner = "" if found[0].startswith("jit(") or "->" in found[1] else found[1]
        scope = scope[: found.start()] + inner + scope[found.end() :]
    return scope
