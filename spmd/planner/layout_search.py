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

from spmd.base.tree import Tree, abstract, format_bytes
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
    is_count = isinstance(compiles, int) and not isinstance(compiles, bool) and compiles >= 1
    if compiles is not None and not is_count:
        raise OptionError(
            f"{option('compiles', repr(compiles))}.",
            fix="a positive integer, or None for no limit.",
        )
    limit = compiles or math.inf
    seconds_left = math.inf
    if max_seconds is not None:
        seconds_left = max_seconds
    check_timeout(timeout)
    check_timeout(seconds_left, "max_seconds")
    started = time.monotonic()
    cluster = Cluster.parse(target)
    layouts, left_out = chosen_layouts(candidates)
    rows = check_leaves(abstract(batch), "the batch")
    config = TrainConfig(model, loss, optimizer, metrics, precision, seed=seed)
    for name in left_out:
        left_out[name] += f"; {option('candidates', quoted('all'))} includes it"
    say(f"compiling for one device, of {cluster}")
    axes = {"data": None}  # of the meshes to come, which the model's own code may name
    for layout in layouts:
        axes |= dict.fromkeys(name for name, _ in layout.mesh)
    # the only trace of the model: candidates are placed from it
    alone = _plan_alone(config, cluster, batch, timeout, axes)
    if candidates in ("exact", "all"):
        layouts = without_names(layouts, alone.program)
    space = CandidateSpace(layouts, remats(alone.program.placed), cluster.count, rows)
    deadline = started + seconds_left
    run = SearchRun(alone, cluster, space, timeout, say, deadline=deadline, started=started)
    try:
        run.compile_candidates(limit)
    except KeyboardInterrupt:
        # After Ctrl-C the search returns what it has found until then.
        if not run.plans:
            raise
        run.interrupted = True
    plans = {candidate: plan for candidate, plan in run.plans.items() if run.fits[candidate]}
    rejected = dict(run.rejected())
    if compiler_options and plans and not run.interrupted:
        fastest = _fastest_first(plans)[:TUNED]
        if why := why_not_tuned(fastest[0][1]):
            left_out["[compiler]"] = why
        else:
            tuned, no_better = run.tune(fastest)
            plans, rejected = plans | tuned, no_better | rejected
    for family, layout in enumerate(layouts):
        if why := space.impossible(family):
            left_out[layout.name] = why
    kinds = {why.kind for why in rejected.values()}
    would_hold, time_limit = None, ""
    if "memory" in kinds and not plans and not run.interrupted:
        would_hold = _plan_on_more_devices(run)
    if run.out_of_time and "limit" in kinds:
        time_limit = f"the time limit of {max_seconds:g} s"
    return Search(
        cluster,
        alone,
        tuple(_fastest_first(plans)),
        rejected,
        left_out,
        complete=not run.failed and "limit" not in kinds,
        would_hold=would_hold,
        interrupted=run.interrupted,
        programs=run.compiled,
        seconds=time.monotonic() - started,
        time_limit=time_limit,
    )


def _plan_alone(
    config: TrainConfig, cluster: Cluster, batch: Tree, timeout: float, axes: Iterable[str]
) -> Plan:
    """Plan the step on one device of a cluster, on a mesh with these axes."""
    compiler, _ = compiler_of(cluster.target, cluster.nodes)
    placed = PlacedModel(
        config,
        abstract_mesh(MeshSpec(tuple((axis, 1) for axis in axes))),
        Layout(),
        platform=cluster.target.platform,
        kernels=compiler,
        device_memory=usable_memory(cluster.target),
    )
    return build_plan(Plan, placed, batch, Cluster(1, 1, cluster.target), timeout=timeout)


def _fastest_first(plans: Mapping[Candidate, Plan]) -> list[tuple[Candidate, Plan]]:
    """Sort plans by time; of equal ones, the one that waits and needs the least comes first."""

    def key(item: tuple[Candidate, Plan]) -> tuple[float, float, int]:
        _, plan = item
        # of the average step: one that synchronizes says little of a layout that rarely does
        return plan.period.seconds, -plan.period.utilization, plan.memory.peak

    return sorted(plans.items(), key=key)


def _plan_on_more_devices(run: "SearchRun") -> Plan | None:
    """Return a plan that fits on the smallest mesh with 2, 4, 8 ... times the devices; candidates
    that need the least memory come first.

    None if more devices do not need less memory.
    """
    cluster, least = run.cluster, math.inf
    while 2 * cluster.count <= LARGEST:
        cluster = cluster.doubled()
        larger = SearchRun(
            run.alone,
            cluster,
            dataclasses.replace(run.space, devices=cluster.count),
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
        while self._queue and self.compiled < (limit if self.best else 2 * limit):
            if time.monotonic() >= self.deadline or (self.lightest_first and self.best):
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
        """The number of programs that were compiled, successfully or not."""
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

        tuned: dict[Candidate, Plan] = {}
        rejected: dict[Candidate, Reason] = {}
        for candidate, plan in fastest:
            better, others = tune(candidate, plan, build)
            tuned |= better
            rejected |= {other: Reason(why) for other, why in others.items()}
        return tuned, rejected

    def rejected(self) -> Iterator[tuple[Candidate, Reason]]:
        """Yield every candidate that was not compiled, or does not fit, and why."""
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
        """Return the key of which the smallest is next: while nothing fits, layouts of which little
        was tried and what saves memory; then by expected seconds.
        """
        saves = candidate.accumulate > 1 or candidate.remat_level > 0
        bounds = self._bounds_of(candidate)
        if isinstance(bounds, Reason):
            return 0, False, 0.0, 1
        if self.lightest_first and not saves:
            return 0, True, float(bounds.state), 1
        # while nothing fits, the next layout may fit as it is: variants of one must not take all
        # programs
        tried = 0
        if not self.best and not self.lightest_first:
            tried = sum(other.family == candidate.family for other in self.plans)
        seconds = self._expected_seconds(candidate, bounds)
        return tried, self.best is None and not saves, seconds, candidate.accumulate

    def _expected_seconds(self, candidate: Candidate, bounds: LowerBounds) -> float:
        """Return the time of the nearest plan, plus the launch overhead of each further microbatch;
        the lower bound if there is no plan.
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
        further = max(candidate.accumulate / other.accumulate - 1, 0.0)
        return plan.period.seconds + further * plan.timeline.launches

    def _bounds_of(self, candidate: Candidate) -> LowerBounds | Reason:
        """Return the lower bounds of a candidate's placement, or why there are none."""
        if why := self._refused.get(candidate.group):
            return why
        placement = candidate.placement
        if placement not in self._bounds:
            try:
                placed = self._placed(placement)
                layout, mesh = placed.resolved.layout, placed.resolved.mesh
                check_batch(self.alone.program.sample, layout, mesh, 1)
                self._bounds[placement] = lower_bounds_of(
                    placed, self.cluster, self.alone.timeline, self._trainable
                )
            except SpmdError as error:
                self._bounds[placement] = Reason(error.summary)
        return self._bounds[placement]

    def _least_activations(self, candidate: Candidate, *, learn: bool) -> float:
        """Return a lower bound on a device's bytes of activations: those of one device, divided
        evenly; 0 where they are not comparable.

        Args:
          learn: compile the step for one device with this rematerialization, if less of it was not
            enough.
        """
        level, layout = candidate.remat_level, candidate.layout
        comparable = layout.remat == (Remat(), *self.space.remats)[level]
        if layout.pipeline.schedule == "1f1b" or not comparable:
            return 0.0
        needed = level == 0 or (learn and self._too_large(level - 1))
        if needed and level not in self._activations:
            self._activations[level] = self._activations_alone(level)
        return self._activations.get(level, 0.0) / (self.cluster.count * candidate.accumulate)

    def _too_large(self, level: int) -> bool:
        """Return True if activations with this rematerialization fit on no mesh."""
        return self._activations.get(level, 0.0) > self.cluster.count * self.cluster.target.memory

    def _activations_alone(self, level: int) -> float:
        """Return the bytes of activations of the step on one device."""
        if level == 0:
            return divided_activations(self.alone)
        alone, remat = self.alone, self.space.remats[level - 1]
        placed = alone.program.placed
        layout = dataclasses.replace(alone.layout, remat=remat)
        self.say(f"compiling for one device, remat {remat}")
        try:
            placed = placed.with_layout(placed.mesh, layout)
            plan = build_plan(
                Plan, placed, alone.program.sample, alone.cluster, timeout=self.timeout
            )
        except SpmdError:
            return 0.0  # the candidates themselves will say why
        return divided_activations(plan)

    def _lighter(self, candidate: Candidate) -> Iterator[Candidate]:
        """Yield, for each level of rematerialization from this one on, the fewest microbatches with
        which activations may fit.
        """
        levels: set[int] = set()
        lighter = [
            other
            for other in self.space.all_of(candidate.group)
            if other.remat_level >= candidate.remat_level
        ]
        for other in sorted(lighter, key=lambda other: (other.remat_level, other.accumulate)):
            if other.remat_level not in levels and self._why_skip(other, learn=True) is None:
                levels.add(other.remat_level)
                yield other

    def _placed(self, candidate: Candidate) -> PlacedModel:
        mesh = abstract_mesh(candidate.mesh)
        return self.alone.program.placed.with_layout(
            mesh, candidate.layout, accumulate=candidate.accumulate
        )

    def _why_skip(self, candidate: Candidate, *, learn: bool = False) -> Reason | None:
        """Return why a candidate need not be compiled, as far as is known; `learn`: as of
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
        if why := self._why_no_better(candidate):
            return why
        least = bounds.state + self._least_activations(candidate, learn=learn)
        if least > capacity:
            return Reason(
                "state and the activations of one device, divided evenly, are "
                f"{format_bytes(least)} of {format_bytes(capacity)}",
                "memory",
            )
        return None

    def _why_no_better(self, candidate: Candidate) -> Reason | None:
        """Return why a candidate is no better than the plans of its group; None if it may be."""
        for other, plan in self.plans.items():
            if other.group != candidate.group:
                continue
            less_remat = other.remat_level <= candidate.remat_level
            if self.fits[other] and less_remat and other.accumulate <= candidate.accumulate:
                return Reason(
                    "saves memory unnecessarily: it fits with fewer microbatches or less "
                    "recomputation"
                )
            same_remat = other.remat_level == candidate.remat_level
            if same_remat and candidate.accumulate > other.accumulate:
                least = plan.least_memory(candidate.accumulate)
                if least > self.cluster.target.memory:
                    return Reason(
                        f"{format_bytes(least)} even if its microbatches divided all temporaries "
                        "except gradients"
                    )
        return None

    def _build(self, candidate: Candidate) -> Plan:
        placed, sample = self._placed(candidate), self.alone.program.sample
        return build_plan(Plan, placed, sample, self.cluster, timeout=self.timeout)

    def _compile(self, candidate: Candidate, limit: float) -> None:
        """Compile a candidate and enqueue those of its family that may be better; or record why it
        cannot be compiled.
        """
        if not self.best and self.compiled >= limit:
            limit *= 2
        of = ""
        if not math.isinf(limit):
            of = f" of {limit}"
        best = ""
        if self.best:
            best = f"; the best so far takes {seconds(self.best.period.seconds)}"
        self.say(
            f"compiling {self.compiled + 1}{of}, {time.monotonic() - self.started:.0f} s: "
            f"{candidate}{best}"
        )
        try:
            plan = self._build(candidate)
        except SpmdError as error:
            self._refuse(candidate, error)
            return
        self.plans[candidate] = plan
        self.fits[candidate] = fits = plan.fits
        if not fits:
            self._enqueue(self.space.lighter(candidate))
        elif self.best is None or plan.period.seconds < self.best.period.seconds:
            self.best = plan
        self._enqueue(self.space.groups(candidate.family))

    def _refuse(self, candidate: Candidate, error: SpmdError) -> None:
        """Record an error. One of the layout or model applies to its group; the same one twice, to
        all meshes of the same axes.
        """
        self.reasons[candidate] = why = Reason(error.summary)
        if isinstance(error, CompileError):
            self.failed += 1
        if candidate.accumulate > 1 or candidate.remat_level > 0:
            return
        if not isinstance(error, LayoutError | ModelError):
            return
        variants = self.space.groups(candidate.family)
        groups = [other.group for other in variants if other.mesh.names == candidate.mesh.names]
        if all(self._refused.get(group) != why for group in groups):
            groups = [candidate.group]
        compiled = {other.group for other in self.plans}
        self._refused |= {group: why for group in groups if group not in compiled}
        self._enqueue(variants)

    def _enqueue(self, candidates: Iterable[Candidate]) -> None:
        """Add candidates that were neither compiled nor skipped to the queue."""
        for candidate in candidates:
            if candidate not in self.plans and candidate not in self.reasons:
                self._queue.setdefault(candidate)
