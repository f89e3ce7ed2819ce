"""Model parallelism of the forward pass: `[pipeline]`, `[sequence]`, `[experts]`, and their own
consistency checks.
"""

import dataclasses
from typing import Any

import numpy as np

from spmd.base.fields import Conflict
from spmd.base.tracebacks import trims_tracebacks

SCHEDULES = ("gpipe", "circular", "1f1b")
ORDERS = ("balanced", "contiguous")


@trims_tracebacks
@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Stacks of layers (`spmd.nn.LayerStack`, `spmd.nn.RNNStack`) sharded over a mesh axis: each of
    its devices has some of the layers.

    Attributes:
      axis: the mesh axis; its devices are the stages. None: no pipeline, a stack is a scan over its
        layers.
      schedule: who works on what when: "gpipe"; "circular", with several groups of layers on each
        stage; "1f1b", which keeps the activations of as many microbatches as there are stages, and
        no more. Stacks of recurrent layers are a wavefront under each but the last. "circular"
        keeps layers in the order of stages, also for an optimizer that depends on their index.
        Under "1f1b" the loss is called on the rows of one microbatch: one that is no mean over rows
        has to return (sum, count).
      microbatches: parts into which a worker's rows are split; None: the largest divisor of the
        rows that is at most 4 times the stages.
      groups: of layers on each stage; for "circular".
      overlap: results are sent while the next tick is computed, and used in the one after it: one
        tick more for every stage but the first, and links that are never waited for. For "gpipe"
        and wavefronts.
      time_chunk: steps of time that a recurrent stage takes at once; None: chosen from the length
        (`spmd.nn.best_chunk`).

    Example:
      >>> from spmd import Layout, Pipeline
      >>> Layout(pipeline=Pipeline("stage", microbatches=8)).pipeline.schedule
      'gpipe'
    """

    axis: str | None = None
    schedule: str = "gpipe"
    microbatches: int | None = None
    groups: int = 1
    time_chunk: int | None = None
    overlap: bool = False

    def __post_init__(self) -> None:
        for key, value in vars(self).items():
            # np.int64(8) is 8.
            if isinstance(value, np.generic):
                object.__setattr__(self, key, value.item())

    @property
    def hop(self) -> int:
        """Ticks until a result can be used by the next stage."""
        if self.overlap:
            return 2
        return 1


@dataclasses.dataclass(frozen=True)
class Sequence:
    """Attention (`spmd.nn.attention`) over sequences that are sharded over a mesh axis, by a ring
    exchange of keys and values.

    Attributes:
      axis: the mesh axis over which dim 1, the sequence, is sharded. None: not sharded.
      order: which rows of a causal mask a device works on: "balanced", one part from the front and
        one from the back, so that all have the same work; "contiguous", as they lie.

    Example:
      >>> from spmd import Layout, Sequence
      >>> Layout(sequence=Sequence("context")).sequence.order
      'balanced'
    """

    axis: str | None = None
    order: str = "balanced"


@dataclasses.dataclass(frozen=True)
class Experts:
    """Mixtures of experts (`spmd.nn.MixtureOfExperts`) whose experts are on the devices of a mesh
    axis, to which tokens are sent.

    Attributes:
      axis: the mesh axis over which experts are sharded, and each worker's tokens during dispatch.
        None: every device has all experts.

    Example:
      >>> from spmd import Experts, Layout
      >>> Layout(experts=Experts("expert"), axes=(("expert", "expert"),)).experts.axis
      'expert'
    """

    axis: str | None = None


def model_parallel_problems(pipeline: Pipeline, sequence: Sequence) -> list[Conflict]:
    """Keys of `[pipeline]` and `[sequence]` that cannot be valid, whatever the model and the
    mesh.
    """
    conflicts = []
    for key in ("microbatches", "groups", "time_chunk"):
        value: Any = getattr(pipeline, key)
        if value is not None and value < 1:
            conflicts.append(
                Conflict(key, f"{value}.", "a whole number from 1.", kind="invalid_value")
            )
    if pipeline.axis is None and pipeline != Pipeline():
        conflicts.append(
            Conflict(
                "axis", "there is none, so nothing is split into stages.", 'such as axis = "stage".'
            )
        )
    if pipeline.schedule == "circular" and pipeline.groups == 1:
        conflicts.append(
            Conflict(
                "groups",
                "1 with a circular schedule is gpipe.",
                'groups = 2, or schedule = "gpipe".',
            )
        )
    if pipeline.schedule != "circular" and pipeline.groups > 1:
        why = f"{pipeline.groups}, of which {pipeline.schedule} has one on each stage."
        conflicts.append(Conflict("groups", why, 'leave it out, or schedule = "circular".'))
    if pipeline.overlap and pipeline.schedule != "gpipe":
        why = f"a {pipeline.schedule} schedule hands over in every tick."
        conflicts.append(Conflict("overlap", why, 'leave it out, or schedule = "gpipe".'))
    if sequence.axis is None and sequence != Sequence():
        conflicts.append(
            Conflict(
                "sequence.axis",
                "there is none, so no sequence is sharded.",
                'such as axis = "context".',
            )
        )
    return conflicts
