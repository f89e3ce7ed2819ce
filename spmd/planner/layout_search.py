"""Search for the fastest layout that fits: compile the promising candidates, and record why the
others were skipped.

A candidate is skipped if its layout does not fit the model or the batch, if its state, or its state
and activations, exceed a device's memory, if its lower bound on time (`planner/candidates.py`)
exceeds the best plan's time, or if the same with fewer microbatches or less recomputation already
fits. Candidates near the fastest plan so far are compiled first.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from spmd.data.batches import check_batch, check_leaves
from spmd.errors import (
    CompileError,
    LayoutError,
    ModelError,
    OptionError,
    SpmdError,
    option,
    quoted,
)
from spmd.layout.remat import Remat
from spmd.layout.schema import Layout
from spmd.mesh import MeshSpec, abstract_mesh, outside_of_mesh
from spmd.planner.candidates import (
    Candidate,
    CandidateSpace,
    LowerBounds,
    chosen_layouts,
    divided_activations,
    lower_bounds_of,
    remats,
    trainable_paths,
)
from spmd.planner.cluster import LARGEST, MIN_SAVING, Cluster
from spmd.planner.compile import check_timeout, compiler_of
from spmd.planner.known_changes import why_not_tuned
from spmd.planner.memory import usable_memory
from spmd.planner.plan_data import build_plan
from spmd.planner.planning import Plan
from spmd.planner.search_result import Reason, Search
from spmd.planner.structure import without_names
from spmd.planner.suggestions import TUNED, tune
from spmd.planner.text_report import seconds
from spmd.train.model_setup import PlacedModel, TrainConfig
from spmd.tree import Tree, abstract, format_bytes

COMPILES_PER_MESH = 4  # programs for each larger mesh, if nothing fits


@outside_of_mesh()
def search(
    model: Any,
    batch: Tree,
    *,
    loss: Callable[..., Any],
    optimizer: Any,
    target: "str | Cluster" = "cpu",
    candidates: "str | Sequence[str | Path | Layout]" = "exact",
    compiles: int | None = 24,
    max_seconds: float | None = None,
    compiler_options: bool = False,
    metrics: Mapping[str, Callable[..., Any]] | None = None,
    precision: str = "float32",
    seed: int = 0,
    timeout: float = 600.0,
    say: Callable[[str], None] = lambda line: None,
) -> Search:
    """Find the fastest layout, mesh, reduction, microbatches and rematerialization that fit a
    target, as predicted by plans.

    Args:
      model, batch, loss, optimizer, target, metrics, precision, seed, timeout: as for `plan`.
      candidates: "exact": the shipped layouts whose updates equal those of one device, apart from
        rounding; "all": also those with lossy communication or workers that do not wait for each
        other; or a list of layouts. Not from a list, and on accelerators, a model with attention
        has it fused, whatever the layout.
      compiles: the number of programs to compile at most, in addition to one to three for a single
        device; None: no limit. If nothing fits, twice as many, and a few for each larger mesh.
      max_seconds: no further program is started after this time, so what is found may depend on the
        machine; None: no limit.
      compiler_options: whether to try options of XLA on the two fastest layouts, for GPUs: at most
        10 programs more.
      say: called with a line for every program.

    Returns:
      A `Search`: `.best` is a `Plan`, `.save("layouts/mine.toml")` writes the layout. After Ctrl-C,
        it has the plans that were made
      before (`.interrupted`); without any, KeyboardInterrupt is raised.

    Raises:
      SpmdError: what `plan` raises about the model, the batch and the target.

    Example:
      >>> import jax, optax, spmd
      >>> import jax.numpy as jnp
      >>> model = spmd.FunctionalModel(
      ...     lambda key: {"w": jnp.zeros((64, 8))}, lambda params, x: x @ params["w"]
      ... )
      >>> batch = {
      ...     "x": jax.ShapeDtypeStruct((32, 64), "float32"),
      ...     "y": jax.ShapeDtypeStruct((32, 8), "float32"),
      ... }
      >>> options = {
      ...     "loss": spmd.losses.mean_squared_error,
      ...     "optimizer": optax.adam(0.1),
      ...     "target": "2xcpu",
      ... }
      >>> result = search(model, batch, candidates=["data_parallel", "fsdp"], compiles=2, **options)
      >>> result.layout.name, result.best.fits
      ('data_parallel', True)
    """
    if compiles is not None and (
        isinstance(compiles, bool) or not isinstance(compiles, int) or compiles < 1
    ):
        raise OptionError(
            f"{option('compiles', repr(compiles))}.",
            fix="a positive integer, or None for no limit.",
        )
    check_timeout(timeout)
    check_timeout(math.inf if max_seconds is None else max_seconds, "max_seconds")
    started = time.monotonic()
    cluster = Cluster.parse(target)
    layouts, left_out = chosen_layouts(candidates)
    rows = check_leaves(abstract(batch), "the batch")
    config = TrainConfig(model, loss, optimizer, metrics, precision, seed=seed)
    left_out = {
        name: f"{why}; {option('candidates', quoted('all'))} includes it"
        for name, why in left_out.items()
    }
    say(f"compiling for one device, of {cluster}")
    axes = dict.fromkeys(["data", *(name for layout in layouts for name, _ in layout.mesh)])
    alone = _alone(config, cluster, batch, timeout, axes)
    if candidates in ("exact", "all"):
        layouts = without_names(layouts, alone.program)
    space = CandidateSpace(layouts, remats(alone.program.placed), cluster.count, rows)
    deadline = math.inf if max_seconds is None else started + max_seconds
    run = SearchRun(alone, cluster, space, timeout, say, deadline=deadline, started=started)
    try:
        run.compile_candidates(math.inf if compiles is None else compiles)
    except KeyboardInterrupt:
        if not run.plans:
            raise
        run.interrupted = True
    fitting = _fastest_first(
        {candidate: plan for candidate, plan in run.plans.items() if run.fits[candidate]}
    )
    rejected = dict(run.rejected())
    if compiler_options and fitting and not run.interrupted:
        if why := why_not_tuned(fitting[0][1]):
            left_out["[compiler]"] = why
        else:
            tuned, no_better = run.tune(fitting[:TUNED])
            fitting, rejected = _fastest_first(dict(fitting) | tuned), no_better | rejected
    left_out |= {
        layout.name: why
        for family, layout in enumerate(layouts)
        if (why := space.impossible(family))
    }
    kinds = {why.kind for why in rejected.values()}
    complete = not run.failed and "limit" not in kinds
    limit = f"the time limit of {max_seconds:g} s" if run.out_of_time and "limit" in kinds else ""
    would_hold = _larger(run) if "memory" in kinds and not fitting and not run.interrupted else None
    took = time.monotonic() - started
    return Search(
        cluster,
        alone,
        tuple(fitting),
        rejected,
        left_out,
        complete,
        would_hold,
        run.interrupted,
        run.compiled,
        took,
        limit,
    )


def _alone(
    config: TrainConfig, cluster: Cluster, batch: Tree, timeout: float, axes: Iterable[str]
) -> Plan:
    """The plan of the step on one device of a cluster; `axes`: of the meshes to come, which the
    model's own code may name.
    """
    compiler, _ = compiler_of(cluster.target, cluster.nodes)
    memory = usable_memory(cluster.target)
    mesh, one = (
        abstract_mesh(MeshSpec(tuple((axis, 1) for axis in axes))),
        Cluster(1, 1, cluster.target),
    )
    placed = PlacedModel(
        config,
        mesh,
        Layout(),
        platform=cluster.target.platform,
        kernels=compiler,
        device_memory=memory,
    )
    return build_plan(Plan, placed, batch, one, timeout=timeout)


def _fastest_first(plans: Mapping[Candidate, Plan]) -> list[tuple[Candidate, Plan]]:
    return sorted(
        plans.items(),
        key=lambda item: (item[1].period.seconds, -item[1].period.utilization, item[1].memory.peak),
    )


def _larger(run: "SearchRun") -> Plan | None:
    """A plan that fits on the smallest mesh with 2, 4, 8 ... times the devices; candidates that
    need the least memory come first.

    None if more devices do not need less memory.
    """
    cluster, least = run.cluster, math.inf
    while 2 * cluster.count <= LARGEST:
        cluster = cluster.doubled()
        space = dataclasses.replace(run.space, devices=cluster.count)
        larger = SearchRun(
            run.alone,
            cluster,
            space,
            run.timeout,
            run.say,
            lightest_first=True,
            deadline=run.deadline,
        )
        larger.compile_candidates(COMPILES_PER_MESH)
        if larger.best is not None:
            return larger.best
        peak = min((plan.memory.peak for plan in larger.plans.values()), default=math.inf)
        if larger.failed or peak > MIN_SAVING * least:
            return None
        least = peak
    return None


@dataclasses.dataclass(eq=False)
class SearchRun:
    """The state of a search: the queue of candidates, the plans so far, and the reasons for
    rejections.
    """

    alone: Plan
    cluster: Cluster
    space: CandidateSpace
    timeout: float
    say: Callable[[str], None]
    lightest_first: bool = False
    deadline: float = math.inf  # of `time.monotonic`, after which no program is started
    started: float = dataclasses.field(default_factory=time.monotonic)
    interrupted: bool = False  # by Ctrl-C
    out_of_time: bool = False  # at `deadline`
    plans: dict[Candidate, Plan] = dataclasses.field(default_factory=dict)
    reasons: dict[Candidate, Reason] = dataclasses.field(default_factory=dict)
    # of each plan, which computes it from likelihoods
    fits: dict[Candidate, bool] = dataclasses.field(default_factory=dict)
    best: Plan | None = None  # the fastest so far that fits
    failed: int = 0  # programs that did not compile
    _queue: dict[Candidate, None] = dataclasses.field(default_factory=dict)  # in order of arrival
    # by placement
    _bounds: dict[Candidate, LowerBounds | Reason] = dataclasses.field(default_factory=dict)
    # errors while tracing, by group
    _refused: dict[Candidate, Reason] = dataclasses.field(default_factory=dict)
    # plans compared, distance, number
    _nearest: dict[Candidate, tuple[int, float, int]] = dataclasses.field(default_factory=dict)
    # bytes on one device by level of rematerialization
    _activations: dict[int, float] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def _trainable(self) -> set[str]:
        return trainable_paths(self.alone.program.placed)

    def compile_candidates(self, limit: float) -> None:
        """Compile candidates until the queue is empty or `limit` programs are compiled, twice as
        many while nothing fits.
        """
        for family in range(len(self.space.layouts)):
            self._open_family(family)
        while (
            self._queue
            and self.compiled < (limit if self.best else 2 * limit)
            and time.monotonic() < self.deadline
        ):
            if self.lightest_first and self.best:
                break
            candidate = min(self._queue, key=self._priority)  # the first of equals
            del self._queue[candidate]
            why = self._why_skip(candidate, learn=True)
            if why is None:
                self._compile(candidate, limit)
                continue
            self.reasons[candidate] = why
            # another mesh may be better
            if candidate.accumulate == 1 and candidate.remat_level == 0:
                self._enqueue(self.space.groups(candidate.family))
            if why.kind == "memory":
                self._enqueue(self._lighter(candidate))
        self.out_of_time = bool(self._queue) and time.monotonic() >= self.deadline

    @property
    def compiled(self) -> int:
        """How many programs were compiled, successfully or not."""
        return len(self.plans) + self.failed

    def tune(
        self, fastest: Iterable[tuple[Candidate, Plan]]
    ) -> tuple[dict[Candidate, Plan], dict[Candidate, Reason]]:
        """Try options of the compiler on these: candidates that are better with them, and the
        others, with a reason.
        """

        def build(candidate: Candidate) -> Plan:
            self.say(f"compiling {candidate}")
            return self._build(candidate)

        kept: dict[Candidate, Plan] = {}
        rejected: dict[Candidate, Reason] = {}
        for candidate, plan in fastest:
            better, others = tune(candidate, plan, build)
            kept |= better
            rejected |= {other: Reason(why) for other, why in others.items()}
        return kept, rejected

    def rejected(self) -> Iterator[tuple[Candidate, Reason]]:
        """Every candidate that was not compiled, or does not fit, and why."""
        if self.interrupted:
            ended = "the search was interrupted"
        elif self.out_of_time:
            ended = "the time limit was reached"
        else:
            ended = (
                f"the limit of programs was reached, after {self.compiled}; those with faster "
                "estimates came first"
            )
        limit = Reason(f"not compiled: {ended}", "limit")
        for candidate in self.space.all():
            if candidate not in self.plans:
                yield candidate, self.reasons.get(candidate) or self._why_skip(candidate) or limit
            elif not self.fits[candidate]:
                needed = format_bytes(self.plans[candidate].memory.expected)
                yield candidate, Reason(f"compiled, and does not fit: {needed}", "memory")

    def _open_family(self, family: int) -> None:
        """Enqueue a layout's first possible group, the nearest to what it declares; the others
        follow once it is planned.
        """
        for group in self.space.groups(family):
            bounds = self._bounds_of(group)
            if isinstance(bounds, Reason):
                self.reasons[group] = bounds
            elif self.lightest_first or not any(other.family == family for other in self._queue):
                self._queue[group] = None

    def _priority(self, candidate: Candidate) -> tuple[int, bool, float, int]:
        """The smallest is next: while nothing fits, layouts of which little was tried and what
        saves memory; then by expected seconds.
        """
        saves = candidate.accumulate > 1 or candidate.remat_level > 0
        bounds = self._bounds_of(candidate)
        if isinstance(bounds, Reason):
            return 0, False, 0.0, 1
        if self.lightest_first and not saves:
            return 0, True, float(bounds.state), 1
        tried = (
            0
            if self.best or self.lightest_first
            else sum(other.family == candidate.family for other in self.plans)
        )
        return (
            tried,
            self.best is None and not saves,
            self._expected_seconds(candidate, bounds),
            candidate.accumulate,
        )

    def _expected_seconds(self, candidate: Candidate, bounds: LowerBounds) -> float:
        """The time of the nearest plan, plus the launch overhead of each further microbatch; the
        lower bound if there is no plan.
        """
        compared, distance, nearest = self._nearest.get(candidate, (0, math.inf, 0))
        plans = list(self.plans.items())
        for number, (other, _) in enumerate(plans[compared:], compared):
            if other.family == candidate.family and (away := candidate.distance(other)) < distance:
                distance, nearest = away, number
        self._nearest[candidate] = len(plans), distance, nearest
        if math.isinf(distance):
            return bounds.seconds
        other, plan = plans[nearest]
        return (
            plan.period.seconds
            + max(candidate.accumulate / other.accumulate - 1, 0.0) * plan.timeline.launches
        )

    def _bounds_of(self, candidate: Candidate) -> LowerBounds | Reason:
        """The lower bounds of a candidate's placement, or why there are none."""
        if why := self._refused.get(candidate.group):
            return why
        placement = candidate.placement
        if placement not in self._bounds:
            try:
                placed = self._placed(placement)
                check_batch(
                    self.alone.program.sample, placed.resolved.layout, placed.resolved.mesh, 1
                )
                self._bounds[placement] = lower_bounds_of(
                    placed, self.cluster, self.alone.timeline, self._trainable
                )
            except SpmdError as error:
                self._bounds[placement] = Reason(error.summary)
        return self._bounds[placement]

    def _least_activations(self, candidate: Candidate, *, learn: bool) -> float:
        """A lower bound on a device's bytes of activations: those of one device, divided evenly; 0
        where they are not comparable.

        Args:
          learn: compile the step for one device with this rematerialization, if less of it was not
            enough.
        """
        level, layout = candidate.remat_level, candidate.layout
        if (
            layout.pipeline.schedule == "1f1b"
            or layout.remat != (Remat(), *self.space.remats)[level]
        ):
            return 0.0
        if level not in self._activations and (
            level == 0 or (learn and self._too_large(level - 1))
        ):
            self._activations[level] = self._activations_alone(level)
        return self._activations.get(level, 0.0) / (self.cluster.count * candidate.accumulate)

    def _too_large(self, level: int) -> bool:
        return self._activations.get(level, 0.0) > self.cluster.count * self.cluster.target.memory

    def _activations_alone(self, level: int) -> float:
        if level == 0:
            return divided_activations(self.alone)
        placed, remat = self.alone.program.placed, self.space.remats[level - 1]
        layout = dataclasses.replace(self.alone.layout, remat=remat)
        self.say(f"compiling for one device, remat {remat}")
        try:
            plan = build_plan(
                Plan,
                placed.with_layout(placed.mesh, layout),
                self.alone.program.sample,
                self.alone.cluster,
                timeout=self.timeout,
            )
        except SpmdError:
            return 0.0  # the candidates themselves will say why
        return divided_activations(plan)

    def _lighter(self, candidate: Candidate) -> Iterator[Candidate]:
        """For each level of rematerialization, from this one on, the fewest microbatches with which
        activations may fit.
        """
        found: set[int] = set()
        lighter = [
            other
            for other in self.space.all_of(candidate.group)
            if other.remat_level >= candidate.remat_level
        ]
        for other in sorted(lighter, key=lambda other: (other.remat_level, other.accumulate)):
            if other.remat_level not in found and self._why_skip(other, learn=True) is None:
                found.add(other.remat_level)
                yield other

    def _placed(self, candidate: Candidate) -> PlacedModel:
        mesh = abstract_mesh(candidate.mesh)
        return self.alone.program.placed.with_layout(
            mesh, candidate.layout, accumulate=candidate.accumulate
        )

    def _why_skip(self, candidate: Candidate, *, learn: bool = False) -> Reason | None:
        """Why a candidate need not be compiled, as far as is known; `learn`: as of
        `_least_activations`.
        """
        bounds, best, capacity = self._bounds_of(candidate), self.best, self.cluster.target.memory
        if isinstance(bounds, Reason):
            return bounds
        if bounds.state > capacity:
            return Reason(
                f"state alone is {format_bytes(bounds.state)} of {format_bytes(capacity)}", "memory"
            )
        if best is not None and bounds.seconds >= best.period.seconds:
            return Reason(
                f"at least {seconds(bounds.seconds)} ({bounds.why}); the best needs "
                f"{seconds(best.period.seconds)}"
            )
        for other, plan in self.plans.items():
            if other.group != candidate.group:
                continue
            if (
                self.fits[other]
                and other.remat_level <= candidate.remat_level
                and other.accumulate <= candidate.accumulate
            ):
                return Reason(
                    "saves memory unnecessarily: it fits with fewer microbatches or less "
                    "recomputation"
                )
            if (
                other.remat_level == candidate.remat_level
                and candidate.accumulate > other.accumulate
            ):
                least = plan.least_memory(candidate.accumulate)
                if least > capacity:
                    return Reason(
                        f"{format_bytes(least)} even if its microbatches divided all temporaries "
                        "except gradients"
                    )
        least = bounds.state + self._least_activations(candidate, learn=learn)
        if least > capacity:
            return Reason(
                "state and the activations of one device, divided evenly, are "
                f"{format_bytes(least)} of {format_bytes(capacity)}",
                "memory",
            )
        return None

    def _build(self, candidate: Candidate) -> Plan:
        return build_plan(
            Plan,
            self._placed(candidate),
            self.alone.program.sample,
            self.cluster,
            timeout=self.timeout,
        )

    def _compile(self, candidate: Candidate, limit: float) -> None:
        """Compile a candidate and enqueue those of its family that may be better; or record why it
        cannot be compiled.
        """
        of = (
            ""
            if math.isinf(limit)
            else f" of {limit if self.best or self.compiled < limit else 2 * limit}"
        )
        best = f"; the best so far takes {seconds(self.best.period.seconds)}" if self.best else ""
        self.say(
            f"compiling {self.compiled + 1}{of}, {time.monotonic() - self.started:.0f} s: "
            f"{candidate}{best}"
        )
        try:
            plan = self._build(candidate)
        except SpmdError as error:
            self._refuse(candidate, error)
            return
        self.plans[candidate], self.fits[candidate] = plan, plan.fits
        if self.fits[candidate] and (
            self.best is None or plan.period.seconds < self.best.period.seconds
        ):
            self.best = plan
        self._enqueue(
            [
                *(self.space.lighter(candidate) if not self.fits[candidate] else ()),
                *self.space.groups(candidate.family),
            ]
        )

    def _refuse(self, candidate: Candidate, error: SpmdError) -> None:
        """Record an error. One of the layout or model applies to its group; the same one twice, to
        all meshes of the same axes.
        """
        self.reasons[candidate] = why = Reason(error.summary)
        if isinstance(error, CompileError):
            self.failed += 1
        if (
            candidate.accumulate > 1
            or candidate.remat_level > 0
            or not isinstance(error, LayoutError | ModelError)
        ):
            return
        groups, compiled = (
            self.space.groups(candidate.family),
            {other.group for other in self.plans},
        )
        alike = [group.group for group in groups if group.mesh.names == candidate.mesh.names]
        again = any(self._refused.get(group) == why for group in alike)
        self._refused |= {
            group: why for group in (alike if again else [candidate.group]) if group not in compiled
        }
        self._enqueue(groups)

    def _enqueue(self, candidates: Iterable[Candidate]) -> None:
        for candidate in candidates:
            if candidate not in self.plans and candidate not in self.reasons:
                self._queue.setdefault(candidate)
