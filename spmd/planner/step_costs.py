"""What a step spends its time on, as costs that a change may lower: the largest are the end of
every plan.
"""

import dataclasses

from spmd.planner.flop_shares import BUBBLES, BY_XLA, RECOMPUTED, REPLICATED, FlopShares
from spmd.planner.timeline import Timeline

SHOWN = 3  # costs at the end of a report
MULTIPLYING = {
    "products": "matrix products",
    "convolutions": "convolutions",
    "attention": "fused attention",
}
EXPOSED, RECOMPUTATION = "exposed", "recomputation"  # kinds that others name, too
BEYOND = {  # kinds of products beyond the model's, with their causes
    RECOMPUTATION: (RECOMPUTED, BY_XLA),
    "bubbles": (BUBBLES,),
    "replicated": (REPLICATED,),
}
TITLES = {
    RECOMPUTATION: "recomputation",
    "bubbles": "pipeline bubbles",
    "replicated": "products replicated on several devices",
}


@dataclasses.dataclass(frozen=True)
class StepCost:
    """A part of a step's time.

    Attributes:
      kind: "products", "convolutions", "attention", "memory", "launches", "exposed",
        "recomputation", "bubbles" or "replicated".
      what: the same in words, with how well the device is used or what is communicated.
      seconds: of a step.
      share: of the step.
      purpose: of exposed communication, what is sent, as `Transfer.purpose`; "" of other costs.
    """

    kind: str
    what: str
    seconds: float
    share: float
    purpose: str = ""


def step_costs(timeline: Timeline, flops: FlopShares) -> tuple[StepCost, ...]:
    """The costs of a step, largest first; they add up to it.

    Products beyond the model's are costs of their own, in proportion to their FLOPs: those of the
    model are what is left.
    """
    seconds: dict[tuple[str, str, str], float] = {}
    shares = {
        kind: sum(max(flops.beyond.get(cause, 0.0), 0.0) for cause in causes) / flops.executed
        if flops.executed
        else 0.0
        for kind, causes in BEYOND.items()
    }
    for kind, share in shares.items():
        seconds[kind, TITLES[kind], ""] = timeline.multiplying * share
    seconds[RECOMPUTATION, TITLES[RECOMPUTATION], ""] += timeline.repeated_memory
    for kind, title in MULTIPLYING.items():
        if took := getattr(timeline, kind):
            of_model = max(1 - sum(shares.values()), 0.0)
            seconds[
                kind, f"{title}, at {timeline.at_peak.get(kind, 0.0) / took:.0%} of peak", ""
            ] = took * of_model
    seconds["memory", "element-wise work and other operations, at memory bandwidth", ""] = (
        timeline.memory - timeline.repeated_memory
    )
    seconds["launches", "launch overhead", ""] = timeline.launches
    for wait in timeline.waits:
        transfer = wait.transfer
        _, nodes, sites = transfer.counts
        where = (
            " between sites"
            if sites > 1 or transfer.leaving
            else " between nodes"
            if nodes > 1
            else ""
        )
        key = (
            EXPOSED,
            f"exposed communication: {transfer.kind} of {transfer.purpose}{where}",
            transfer.purpose,
        )
        seconds[key] = seconds.get(key, 0.0) + wait.exposed
    hosts = timeline.exposed - sum(wait.exposed for wait in timeline.waits)
    seconds[EXPOSED, "exposed communication: copies between device and host", "host"] = hosts
    ordered = sorted(seconds.items(), key=lambda item: -item[1])
    return tuple(
        StepCost(kind, what, took, took / timeline.seconds, purpose)
        for (kind, what, purpose), took in ordered
        if took > 1e-9 * timeline.seconds  # rounding
    )
