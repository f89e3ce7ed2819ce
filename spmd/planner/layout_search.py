"""Search for the fastest layout that fits: compile the promising candidates, and record why the others were skipped.

A candidate is skipped if its layout does not fit the model or the batch, if its state alone exceeds a device's memory, if its lower bound
on time (`planner/lower_bounds.py`) exceeds the best plan's time, or if the same with fewer microbatches or less recomputation already fits.
Candidates near the fastest plan so far are compiled first.
"""

import dataclasses
import functools
import html
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from spmd.data.batches import check_batch, check_leaves
from spmd.errors import CompileError, LayoutError, ModelError, OptionError, SpmdError
from spmd.layout.schema import Layout
from spmd.mesh import MeshSpec, abstract_mesh
from spmd.planner.candidates import Candidate, CandidateSpace, chosen_layouts, remats
from spmd.planner.compile import check_timeout, compiler_of
from spmd.planner.compiler_search import TUNED, tune, why_not_tuned
from spmd.planner.lower_bounds import LowerBounds, lower_bounds_of, trainable_paths
from spmd.planner.memory import usable_memory
from spmd.planner.plan_data import build_plan
from spmd.planner.planning import Plan
from spmd.planner.target import LARGEST, MIN_SAVING, Cluster
from spmd.planner.text_report import seconds
from spmd.render.html import Html, aligned, filled, folded, framed, table
from spmd.train.model_setup import PlacedModel, TrainConfig
from spmd.tree import Tree, abstract, format_bytes
from spmd.user_paths import as_path, write_text

COMPILES_PER_MESH = 4  # programs for each larger mesh, if nothing fits


class Reason(str):
    """Why a candidate was rejected; `kind` is "memory", "limit" (of `compiles`), or "" for any other reason."""

    kind: str

    def __new__(cls, text: str, kind: str = "") -> "Reason":
        """The text, with its kind."""
        self = super().__new__(cls, text)
        self.kind = kind
        return self


@dataclasses.dataclass(frozen=True)
class Search:
    """The result of `search`; printed, a table and the reasons for rejections.

    Attributes:
      cluster: the target.
      alone: the plan of the same step on one device, whether it fits or not.
      plans: every candidate that was compiled and fits, fastest first, with its plan.
      rejected: every other candidate and the reason, in the order of candidates.
      left_out: layouts that were not searched, and why.
      complete: whether each candidate was compiled or ruled out; if not, the search stopped at `compiles`.
      would_hold: if nothing fits, a plan on the smallest mesh found on which the step fits.
    """

    cluster: Cluster
    alone: Plan
    plans: tuple[tuple[Candidate, Plan], ...]
    rejected: Mapping[Candidate, Reason]
    left_out: Mapping[str, str]
    complete: bool
    would_hold: Plan | None

    @property
    def best(self) -> Plan | None:
        """The fastest plan that fits; None where none does."""
        return self.plans[0][1] if self.plans else None

    @property
    def _why_nothing(self) -> str:
        if all(why.kind != "memory" for why in self.rejected.values()):
            first = next(iter([*self.rejected.values(), *self.left_out.values()]), "there are no candidates")
            return f"no candidate could be planned for {self.cluster}: {first}"
        return f"nothing fits {self.cluster}" if self.complete else f"nothing that was compiled fits {self.cluster}"

    @property
    def _larger_mesh(self) -> str:
        plan = self.would_hold
        return f"{plan.layout.name} on mesh {plan.mesh} of {plan.cluster} would hold it: {plan.memory.verdict}" if plan is not None else ""

    @property
    def layout(self) -> Layout:
        """The best plan's layout, complete with its mesh.

        Raises:
          OptionError: nothing fits.
        """
        if not self.plans:
            fix = self._larger_mesh or ("a smaller model or batch" if self.complete else "more compiles")
            raise OptionError(f"search: {self._why_nothing}.", fix=f"{fix}.")
        return self.plans[0][0].layout

    def to_toml(self) -> str:
        """The best layout as TOML, with a comment on how to use it.

        Raises:
          OptionError: nothing fits.
        """
        layout, best = self.layout, self.plans[0][1]
        config = best.program.placed.config
        arguments = f"batch_size={best.rows}"
        arguments += f", accumulate={config.accumulate}" if config.accumulate > 1 else ""
        arguments += f', precision="{config.precision}"' if config.precision != "float32" else ""
        step = f"{seconds(best.timeline.seconds)} per step predicted, {best.memory.verdict}"
        return f"# Found by spmd.search for {self.cluster}: {step}\n# fit(..., layout=<this file>, {arguments})\n\n{layout.to_toml()}"

    def save(self, path: str | Path) -> Path:
        """Write the best layout as a TOML file; its folder is made if it is not there.

        Raises:
          OptionError: nothing fits, or a suffix other than .toml.
        """
        path = as_path(path, "path")
        if path.suffix != ".toml":
            raise OptionError(f'"{path}" is no name for a layout.', fix="one that ends in .toml.")
        return write_text(path, self.to_toml())

    @property
    def head(self) -> str:
        """How many candidates fit, for which target, and the same step on one device."""
        alone = f"on one device: {seconds(self.alone.timeline.seconds)}, {format_bytes(self.alone.memory.peak)}."
        return f"{len(self.plans)} of {len(self.plans) + len(self.rejected)} candidates for {self.cluster} were compiled and fit; {alone}"

    @property
    def verdict(self) -> str:
        """A sentence that says that nothing fits, and on which mesh the step would."""
        return self._why_nothing[0].upper() + self._why_nothing[1:] + (f"; {self._larger_mesh}" if self.would_hold else "")

    def rows(self) -> list[tuple[str, ...]]:
        """The table: its header, then every plan, fastest first."""
        fastest = self.plans[0][1].timeline.seconds if self.plans else 0.0
        rows = [("", "candidate", "step", "", "peak", "waits", "sent/device")]
        for number, (candidate, plan) in enumerate(self.plans, 1):
            step, share, waits = plan.timeline.seconds, plan.timeline.seconds / fastest, plan.timeline.exposed / plan.timeline.seconds
            peak, sent = format_bytes(plan.memory.peak), format_bytes(plan.traffic.bytes())
            rows.append((str(number), str(candidate), seconds(step), f"{share:.2f}", peak, f"{waits:.0%}", sent))
        return rows

    def reasons(self) -> list[str]:
        """One line for each reason for rejecting candidates of a layout, however many they are."""
        by_reason: dict[tuple[str, str], list[Candidate]] = {}
        for candidate, why in self.rejected.items():
            by_reason.setdefault((candidate.layout.name, why), []).append(candidate)
        lines = [
            f"  {group[0] if len(group) == 1 else f'{name}, {len(group)} candidates such as {group[0]}'}: {why}"
            for (name, why), group in by_reason.items()
        ]
        return [*lines, *(f"  {name}: {why}" for name, why in self.left_out.items())]

    def __str__(self) -> str:
        lines = aligned(self.rows()) if self.plans else [self.verdict]
        return filled("\n".join([self.head, "", *lines, "", "rejected", *self.reasons()]))

    __repr__ = __str__

    def _repr_html_(self) -> Html:
        header, *body = self.rows()
        best = folded("the best layout as TOML", f"<pre>{html.escape(self.to_toml())}</pre>") if self.plans else ""
        fits = f'<div class="wide">{table(header, body)}</div>' if body else f'<p class="verdict bad">{html.escape(self.verdict)}</p>'
        reasons = "\n".join(line.strip() for line in self.reasons())
        rejected = folded(f"{len(self.rejected) + len(self.left_out)} rejected, and why", f"<pre>{html.escape(reasons)}</pre>")
        return framed(f"<p>{html.escape(self.head)}</p>{fits}{best}{rejected if reasons else ''}")


def search(
    model: Any,
    batch: Tree,
    *,
    loss: Callable[..., Any],
    optimizer: Any,
    target: "str | Cluster" = "cpu",
    candidates: "str | Sequence[str | Path | Layout]" = "exact",
    compiles: int | None = 24,
    compiler_options: bool = False,
    metrics: Mapping[str, Callable[..., Any]] | None = None,
    precision: str = "float32",
    seed: int = 0,
    timeout: float = 600.0,
    say: Callable[[str], None] = lambda line: None,
) -> Search:
    """Find the fastest layout, mesh, reduction, microbatches and rematerialization that fit a target, as predicted by plans.

    Args:
      model, batch, loss, optimizer, target, metrics, precision, seed, timeout: as for `plan`.
      candidates: "exact": the shipped layouts whose updates equal those of one device, apart from rounding; "all": also those with lossy
        communication or workers that do not wait for each other; or a list of layouts.
      compiles: the number of programs to compile at most, in addition to one for a single device; None: no limit. If nothing fits, twice
        as many, and a few for each larger mesh.
      compiler_options: whether to try options of XLA on the two fastest layouts, for GPUs: at most 10 programs more.
      say: called with a line for every program.

    Returns:
      A `Search`: `.best` is a `Plan`, `.save("layouts/mine.toml")` writes the layout.

    Raises:
      SpmdError: what `plan` raises about the model, the batch and the target.

    Example:
      >>> import jax, optax, spmd
      >>> import jax.numpy as jnp
      >>> model = spmd.FunctionalModel(lambda key: {"w": jnp.zeros((64, 8))}, lambda params, x: x @ params["w"])
      >>> batch = {"x": jax.ShapeDtypeStruct((32, 64), "float32"), "y": jax.ShapeDtypeStruct((32, 8), "float32")}
      >>> options = {"loss": spmd.losses.mean_squared_error, "optimizer": optax.adam(0.1), "target": "2xcpu"}
      >>> result = search(model, batch, candidates=["data_parallel", "fsdp"], compiles=2, **options)
      >>> result.layout.name, result.best.fits
      ('data_parallel', True)
    """
    if compiles is not None and (isinstance(compiles, bool) or not isinstance(compiles, int) or compiles < 1):
        raise OptionError(f"compiles={compiles!r}.", fix="a positive integer, or None for no limit.")
    check_timeout(timeout)
    cluster = Cluster.parse(target)
    layouts, left_out = chosen_layouts(candidates)
    rows = check_leaves(abstract(batch), "the batch")
    config = TrainConfig(model, loss, optimizer, metrics, precision, seed=seed)
    one, (compiler, _) = abstract_mesh(MeshSpec((("data", 1),))), compiler_of(cluster.target, cluster.nodes)
    platform, memory = cluster.target.platform, usable_memory(cluster.target)
    on_one_device = PlacedModel(config, one, Layout(), platform=platform, kernels=compiler, device_memory=memory)
    say(f"compiling for one device, of {cluster}")
    alone = build_plan(Plan, on_one_device, batch, Cluster(1, 1, cluster.target), timeout=timeout)
    left_out = {name: f'{why}; candidates="all" includes it' for name, why in left_out.items()}
    space = CandidateSpace(layouts, remats(on_one_device), cluster.count, rows)
    run = SearchRun(alone, cluster, space, timeout, say)
    run.compile_candidates(math.inf if compiles is None else compiles)
    fitting = _fastest_first({candidate: plan for candidate, plan in run.plans.items() if plan.fits})
    rejected = dict(run.rejected())
    if compiler_options and fitting:
        if why := why_not_tuned(fitting[0][1]):
            left_out["[compiler]"] = why
        else:
            tuned, no_better = run.tune(fitting[:TUNED])
            fitting, rejected = _fastest_first(dict(fitting) | tuned), no_better | rejected
    left_out |= {layout.name: why for family, layout in enumerate(layouts) if (why := space.impossible(family))}
    kinds = {why.kind for why in rejected.values()}
    complete = not run.failed and "limit" not in kinds
    would_hold = _larger(run) if "memory" in kinds and not fitting else None
    return Search(cluster, alone, tuple(fitting), rejected, left_out, complete, would_hold)


def _fastest_first(plans: Mapping[Candidate, Plan]) -> list[tuple[Candidate, Plan]]:
    return sorted(plans.items(), key=lambda item: (item[1].timeline.seconds, item[1].timeline.exposed, item[1].memory.peak))


def _larger(run: "SearchRun") -> Plan | None:
    """A plan that fits on the smallest mesh with 2, 4, 8 ... times the devices; candidates that need the least memory come first.

    None if more devices do not need less memory.
    """
    cluster, least = run.cluster, math.inf
    while 2 * cluster.count <= LARGEST:
        cluster = cluster.doubled()
        space = dataclasses.replace(run.space, devices=cluster.count)
        larger = SearchRun(run.alone, cluster, space, run.timeout, run.say, lightest_first=True)
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
    """The state of a search: the queue of candidates, the plans so far, and the reasons for rejections."""

    alone: Plan
    cluster: Cluster
    space: CandidateSpace
    timeout: float
    say: Callable[[str], None]
    lightest_first: bool = False
    plans: dict[Candidate, Plan] = dataclasses.field(default_factory=dict)
    reasons: dict[Candidate, Reason] = dataclasses.field(default_factory=dict)
    failed: int = 0  # programs that did not compile
    _queue: dict[Candidate, None] = dataclasses.field(default_factory=dict)  # in order of arrival
    _bounds: dict[Candidate, LowerBounds | Reason] = dataclasses.field(default_factory=dict)  # by group
    _refused: dict[int, list[Reason]] = dataclasses.field(default_factory=dict)  # errors while tracing, by family

    @functools.cached_property
    def _trainable(self) -> set[str]:
        return trainable_paths(self.alone.program.placed)

    @property
    def best(self) -> Plan | None:
        """The fastest plan so far that fits."""
        return min((plan for plan in self.plans.values() if plan.fits), key=lambda plan: plan.timeline.seconds, default=None)

    def compile_candidates(self, limit: float) -> None:
        """Compile candidates until the queue is empty or `limit` programs are compiled, twice as many while nothing fits."""
        for family in range(len(self.space.layouts)):
            self._open_family(family)
        while self._queue and len(self.plans) + self.failed < (limit if self.best else 2 * limit):
            if self.lightest_first and self.best:
                break
            candidate = min(self._queue, key=self._priority)  # the first of equals
            del self._queue[candidate]
            why = self._why_skip(candidate)
            if why is None:
                self._compile(candidate)
            else:
                self.reasons[candidate] = why
                if candidate.accumulate == 1 and candidate.remat_level == 0:  # another mesh may be better
                    self._enqueue(self.space.groups(candidate.family))

    def tune(self, fastest: Iterable[tuple[Candidate, Plan]]) -> tuple[dict[Candidate, Plan], dict[Candidate, Reason]]:
        """Try options of the compiler on these: candidates that are better with them, and the others, with a reason."""

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
        for candidate in self.space.all():
            if candidate not in self.plans:
                limit = Reason(f"not compiled, for {len(self.plans)} were, and others promised more", "limit")
                yield candidate, self.reasons.get(candidate) or self._why_skip(candidate) or limit
            elif not self.plans[candidate].fits:
                needed = format_bytes(self.plans[candidate].memory.expected)
                yield candidate, Reason(f"compiled, and does not fit: {needed}", "memory")

    def _open_family(self, family: int) -> None:
        """Enqueue a layout's first possible group, the nearest to what it declares; the others follow once it is planned."""
        for group in self.space.groups(family):
            bounds = self._bounds_of(group)
            if isinstance(bounds, Reason):
                self.reasons[group] = bounds
            elif self.lightest_first or not any(other.family == family for other in self._queue):
                self._queue[group] = None

    def _priority(self, candidate: Candidate) -> tuple[bool, float]:
        """The smallest is compiled next: while nothing fits, candidates that save memory; then by expected seconds."""
        saves = candidate.accumulate > 1 or candidate.remat_level > 0
        bounds = self._bounds_of(candidate)
        if isinstance(bounds, Reason):
            return False, 0.0
        if self.lightest_first and not saves:
            return True, float(bounds.state)
        return self.best is None and not saves, self._expected_seconds(candidate, bounds)

    def _expected_seconds(self, candidate: Candidate, bounds: LowerBounds) -> float:
        """The time of the nearest plan, plus the launch overhead of each further microbatch; the lower bound if there is no plan."""
        near = [(candidate.distance(other), number) for number, other in enumerate(self.plans) if other.family == candidate.family]
        if not near:
            return bounds.seconds
        other, plan = list(self.plans.items())[min(near)[1]]
        return plan.timeline.seconds + max(candidate.accumulate / other.accumulate - 1, 0.0) * plan.timeline.launches

    def _bounds_of(self, candidate: Candidate) -> LowerBounds | Reason:
        """The lower bounds of a candidate's group, or why there are none."""
        group = candidate.group
        if group not in self._bounds:
            try:
                placed = self._placed(group)
                check_batch(self.alone.program.sample, placed.resolved.layout, placed.resolved.mesh, 1)
                self._bounds[group] = lower_bounds_of(placed, self.cluster, self.alone.timeline, self._trainable)
            except SpmdError as error:
                self._bounds[group] = Reason(error.summary)
        return self._bounds[group]

    def _placed(self, candidate: Candidate) -> PlacedModel:
        mesh = abstract_mesh(candidate.mesh)
        return self.alone.program.placed.with_layout(mesh, candidate.layout, accumulate=candidate.accumulate)

    def _why_skip(self, candidate: Candidate) -> Reason | None:
        """Why a candidate need not be compiled, as far as is known."""
        bounds, best, capacity = self._bounds_of(candidate), self.best, self.cluster.target.memory
        if isinstance(bounds, Reason):
            return bounds
        if bounds.state > capacity:
            return Reason(f"state alone is {format_bytes(bounds.state)} of {format_bytes(capacity)}", "memory")
        if best is not None and bounds.seconds >= best.timeline.seconds:
            return Reason(f"at least {seconds(bounds.seconds)} ({bounds.why}); the best needs {seconds(best.timeline.seconds)}")
        for other, plan in self.plans.items():
            if other.group != candidate.group:
                continue
            if plan.fits and other.remat_level <= candidate.remat_level and other.accumulate <= candidate.accumulate:
                return Reason("saves memory unnecessarily: it fits with fewer microbatches or less recomputation")
            if other.remat_level == candidate.remat_level and candidate.accumulate > other.accumulate:
                least = plan.least_memory(candidate.accumulate)
                if least > capacity:
                    return Reason(f"{format_bytes(least)} even if its microbatches divided all temporaries except gradients")
        return None

    def _build(self, candidate: Candidate) -> Plan:
        return build_plan(Plan, self._placed(candidate), self.alone.program.sample, self.cluster, timeout=self.timeout)

    def _compile(self, candidate: Candidate) -> None:
        """Compile a candidate and enqueue those of its family that may be better; or record why it cannot be compiled."""
        self.say(f"compiling {len(self.plans) + 1}: {candidate}")
        try:
            plan = self._build(candidate)
        except SpmdError as error:
            self._refuse(candidate, error)
            return
        self.plans[candidate] = plan
        self._enqueue([*(self.space.lighter(candidate) if not plan.fits else ()), *self.space.groups(candidate.family)])

    def _refuse(self, candidate: Candidate, error: SpmdError) -> None:
        """Record an error. One of the layout or model applies to its group; the same one twice, to all meshes."""
        self.reasons[candidate] = why = Reason(error.summary)
        if isinstance(error, CompileError):
            self.failed += 1
        if candidate.accumulate > 1 or candidate.remat_level > 0 or not isinstance(error, LayoutError | ModelError):
            return
        before = self._refused.setdefault(candidate.family, [])
        compiled = {other.group for other in self.plans}
        groups = [group.group for group in self.space.groups(candidate.family)] if why in before else [candidate.group]
        self._bounds |= {group: why for group in groups if group not in compiled}
        before.append(why)
        self._enqueue(self.space.groups(candidate.family))

    def _enqueue(self, candidates: Iterable[Candidate]) -> None:
        for candidate in candidates:
            if candidate not in self.plans and candidate not in self.reasons:
                self._queue.setdefault(candidate)
