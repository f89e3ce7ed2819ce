"""The fastest layout that fits: candidates tried in an order, bounded in closed form, the promising ones compiled.

A candidate that is not compiled has a reason: its layout does not fit the model or the batch; its state alone is more than a device has;
its floor (`planner/lower_bounds.py`) is above what the best needs; or the same with fewer microbatches, or recomputing less, fits. Next
comes what differs least from the fastest so far.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from spmd.data.batches import check_batch, check_leaves
from spmd.errors import CompileError, LayoutError, ModelError, OptionError, SpmdError, first_problem
from spmd.layout.schema import Layout
from spmd.mesh import MeshSpec, abstract_mesh
from spmd.planner.candidates import Candidate, Space, chosen_layouts, remats
from spmd.planner.compile import check_timeout
from spmd.planner.lower_bounds import Floor, floor_of, trained
from spmd.planner.planning import Plan, planned
from spmd.planner.target import LARGEST, LESS, Cluster
from spmd.planner.text_report import seconds
from spmd.render.html import aligned, filled
from spmd.train.model_setup import Placed, TrainConfig
from spmd.tree import Tree, abstract, format_bytes
from spmd.user_paths import as_path, write_text

UNSEEN, STATE = "not compiled", "state alone is"  # how reasons begin
TRIED = 4  # programs for each larger mesh, where nothing fits


@dataclasses.dataclass(frozen=True)
class Search:
    """What `search` found; printed, a table and the reasons.

    Attributes:
      cluster: the target.
      alone: the plan of the same step on one device, whether it fits or not.
      plans: everything that was compiled and fits, fastest first.
      rejected: every other candidate and why it is none, in the order of candidates.
      left_out: layouts that were not searched, and why.
      complete: whether each candidate was compiled or ruled out; if not, `compiles` ended it.
      would_hold: where nothing fits, the plan on the smallest mesh that was found to hold it.
    """

    cluster: Cluster
    alone: Plan
    plans: tuple[tuple[Candidate, Plan], ...]
    rejected: Mapping[Candidate, str]
    left_out: Mapping[str, str]
    complete: bool
    would_hold: Plan | None

    @property
    def best(self) -> Plan | None:
        """The fastest plan that fits; None where none does."""
        return self.plans[0][1] if self.plans else None

    @property
    def _nothing(self) -> str:
        large = [why for why in self.rejected.values() if why.startswith((STATE, "compiled"))]
        if not large:
            first = next(iter([*self.rejected.values(), *self.left_out.values()]), "there is none")
            return f"no candidate could be planned for {self.cluster}: {first}"
        return f"nothing fits {self.cluster}" if self.complete else f"nothing that was compiled fits {self.cluster}"

    @property
    def layout(self) -> Layout:
        """The best plan's layout, complete with its mesh.

        Raises:
          OptionError: nothing fits.
        """
        if not self.plans:
            fix = _hold(self) or ("a smaller model or batch" if self.complete else "more compiles")
            raise OptionError(f"search: {self._nothing}.", fix=f"{fix}.")
        return self.plans[0][0].layout

    def to_toml(self) -> str:
        """The best layout as a file, with how it is used.

        Raises:
          OptionError: nothing fits.
        """
        layout, best = self.layout, self.plans[0][1]
        options = best.program.placed.config
        words = [f"batch_size={best.rows}", *([f"accumulate={options.accumulate}"] if options.accumulate > 1 else [])]
        words += [f'precision="{options.precision}"'] if options.precision != "float32" else []
        lines = [
            f"# Found by spmd.search for {self.cluster}: {seconds(best.timeline.seconds)} per step predicted, {best.memory.verdict}",
            f"# fit(..., layout=<this file>, {', '.join(words)})",
        ]
        return "\n".join([*lines, "", layout.to_toml()])

    def save(self, path: str | Path) -> Path:
        """Write the best layout as a TOML file; its folder is made if it is not there.

        Raises:
          OptionError: nothing fits, or a suffix other than .toml.
        """
        path = as_path(path, "path")
        if path.suffix != ".toml":
            raise OptionError(f'"{path}" is no name for a layout.', fix="one that ends in .toml.")
        text = self.to_toml()
        return write_text(path, text)

    @property
    def head(self) -> str:
        """How many candidates are plans, for what, and what one device would do."""
        alone = f"on one device: {seconds(self.alone.timeline.seconds)}, {format_bytes(self.alone.memory.peak)}."
        return f"{len(self.plans)} of {len(self.plans) + len(self.rejected)} candidates for {self.cluster} were compiled and fit; {alone}"

    @property
    def verdict(self) -> str:
        """That nothing fits, as a sentence, and what would hold it."""
        return self._nothing[0].upper() + self._nothing[1:] + (f"; {_hold(self)}" if self.would_hold else "")

    def rows(self) -> list[tuple[str, ...]]:
        """The table: its header, then every plan, fastest first."""
        fastest = self.plans[0][1].timeline.seconds if self.plans else 0.0
        rows = [("", "candidate", "step", "", "peak", "waits", "sent/device")]
        for number, (one, plan) in enumerate(self.plans, 1):
            times, share = plan.timeline, f"{plan.timeline.seconds / fastest:.2f}"
            waits = f"{times.exposed / times.seconds:.0%}"
            sent = format_bytes(plan.traffic.bytes())
            rows.append((str(number), str(one), seconds(times.seconds), share, format_bytes(plan.memory.peak), waits, sent))
        return rows

    def reasons(self) -> list[str]:
        """A line for each reason why a candidate is none, however many candidates it is for."""
        return _reasons(self.rejected, self.left_out)

    def __str__(self) -> str:
        rows = self.rows()
        lines = aligned(rows) if self.plans else [self.verdict]
        return filled("\n".join([self.head, "", *lines, "", "rejected", *self.reasons()]))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from spmd.planner.html_report import search_fragment  # the page knows what it shows

        return search_fragment(self)


def _hold(found: Search) -> str:
    plan = found.would_hold
    return f"{plan.layout.name} on mesh {plan.mesh} of {plan.cluster} would hold it: {plan.memory.verdict}" if plan is not None else ""


def _reasons(rejected: Mapping[Candidate, str], left_out: Mapping[str, str]) -> list[str]:
    """One line for each reason of a layout, however many candidates it is for."""
    counted: dict[tuple[str, str], list[Candidate]] = {}
    for one, why in rejected.items():
        counted.setdefault((one.layout.name, why), []).append(one)
    lines = [
        f"  {found[0] if len(found) == 1 else f'{name}, {len(found)} candidates such as {found[0]}'}: {why}"
        for (name, why), found in counted.items()
    ]
    return [*lines, *(f"  {name}: {why}" for name, why in left_out.items())]


def search(
    model: Any,
    batch: Tree,
    *,
    loss: Callable[..., Any],
    optimizer: Any,
    target: "str | Cluster" = "cpu",
    candidates: "str | Sequence[str | Path | Layout]" = "exact",
    compiles: int | None = 24,
    metrics: Mapping[str, Callable[..., Any]] | None = None,
    precision: str = "float32",
    seed: int = 0,
    timeout: float = 600.0,
    say: Callable[[str], None] = lambda line: None,
) -> Search:
    """Find the fastest layout, mesh, way to reduce, microbatches and rematerialisation that fit a target, by what plans predict.

    Args:
      model, batch, loss, optimizer, target, metrics, precision, seed, timeout: as for `plan`.
      candidates: "exact": the shipped layouts whose updates are those of one device, but for rounding; "all": also those that round what
        travels, or let workers go on by themselves; or a list of layouts.
      compiles: programs that are compiled at most, beside one for a single device; None: all that are not rejected otherwise. As long as
        nothing fits, twice as many, and a few for each larger mesh.
      say: is told of every program.

    Returns:
      A `Search`; `found.best` is a `Plan`, `found.save("layouts/mine.toml")` writes the layout.

    Raises:
      SpmdError: what `plan` raises of the model, the batch and the target.

    Example:
      >>> import jax, optax, spmd
      >>> import jax.numpy as jnp
      >>> model = spmd.FunctionalModel(lambda key: {"w": jnp.zeros((64, 8))}, lambda params, x: x @ params["w"])
      >>> batch = {"x": jax.ShapeDtypeStruct((32, 64), "float32"), "y": jax.ShapeDtypeStruct((32, 8), "float32")}
      >>> options = {"loss": spmd.losses.mean_squared_error, "optimizer": optax.adam(0.1), "target": "2xcpu"}
      >>> found = search(model, batch, candidates=["data_parallel", "fsdp"], compiles=2, **options)
      >>> found.layout.name, found.best.fits
      ('data_parallel', True)
    """
    if compiles is not None and (isinstance(compiles, bool) or not isinstance(compiles, int) or compiles < 1):
        raise OptionError(f"compiles={compiles!r}.", fix="a whole number from 1, or None for all.")
    check_timeout(timeout)
    cluster = Cluster.parse(target)
    layouts, left_out = chosen_layouts(candidates)
    rows = check_leaves(abstract(batch), "the batch")
    one = Cluster(1, 1, cluster.target)
    config = TrainConfig(model, loss, optimizer, metrics, precision, seed=seed)
    base = Placed(config, abstract_mesh(MeshSpec((("data", 1),))), Layout(), platform=cluster.target.platform)
    say(f"compiling for one device, of {cluster}")
    alone = planned(base, batch, one, timeout=timeout)
    left_out = {name: f'{why}; candidates="all" searches it too' for name, why in left_out.items()}
    space = Space(layouts, remats(base), cluster.count, rows)
    walk = Walk(alone, cluster, space, timeout, say)
    walk.run(math.inf if compiles is None else compiles)
    fitting = {one: plan for one, plan in walk.plans.items() if plan.fits}
    ranked = sorted(fitting.items(), key=lambda item: (item[1].timeline.seconds, item[1].memory.peak))
    rejected = dict(walk.rejected())
    left_out |= {layout.name: why for family, layout in enumerate(layouts) if (why := space.impossible(family))}
    complete = not walk.failed and not any(why.startswith(UNSEEN) for why in rejected.values())
    large = any(not plan.fits for plan in walk.plans.values()) or any(why.startswith(STATE) for why in rejected.values())
    return Search(cluster, alone, tuple(ranked), rejected, left_out, complete, _larger(walk) if large and not ranked else None)


def _larger(walk: "Walk") -> Plan | None:
    """The plan on the smallest mesh of twice as many devices, and twice, that is found to hold it; what needs least is tried first.

    None where more devices do not need less.
    """
    cluster, least = walk.cluster, math.inf
    while 2 * cluster.count <= LARGEST:
        cluster = cluster.doubled()
        space = dataclasses.replace(walk.space, devices=cluster.count)
        larger = Walk(walk.alone, cluster, space, walk.timeout, walk.say, lightest_first=True)
        larger.run(TRIED)
        held = [plan for plan in larger.plans.values() if plan.fits]
        if held:
            return held[0]
        peak = min((plan.memory.peak for plan in larger.plans.values()), default=math.inf)
        if larger.failed or peak > LESS * least:
            return None
        least = peak
    return None


class Walk:
    """A walk through candidates: which come next, what was compiled, and why others are not."""

    def __init__(
        self, alone: Plan, cluster: Cluster, space: Space, timeout: float, say: Callable[[str], None], *, lightest_first: bool = False
    ):
        self.alone, self.cluster, self.space, self.timeout, self.say = alone, cluster, space, timeout, say
        self.lightest_first = lightest_first
        self._trained = trained(alone.program.placed)
        self.plans: dict[Candidate, Plan] = {}
        self.reasons: dict[Candidate, str] = {}
        self._waiting: dict[Candidate, None] = {}  # in the order in which they came
        self._floors: dict[Candidate, Floor | str] = {}  # by group
        self.failed = 0  # programs that the compiler did not make
        self._refused: dict[int, list[str]] = {}  # by family, what was refused when it was traced

    @property
    def best(self) -> Plan | None:
        """The fastest that fits so far."""
        return min((plan for plan in self.plans.values() if plan.fits), key=lambda plan: plan.timeline.seconds, default=None)

    def run(self, most: float) -> None:
        """Compile candidates until none is left or so many are compiled, twice as many while nothing fits."""
        for family in range(len(self.space.layouts)):
            self._open_family(family)
        while (
            self._waiting and len(self.plans) + self.failed < (most if self.best else 2 * most) and not (self.lightest_first and self.best)
        ):
            one = min(self._waiting, key=self._order)  # the first of equals
            del self._waiting[one]
            why = self._hopeless(one)
            if why is None:
                self._compile(one)
            else:
                self.reasons[one] = why
                if one.accumulate == 1 and one.kept == 0:  # on another mesh it may be better
                    self._wait(self.space.groups(one.family))

    def rejected(self) -> Iterator[tuple[Candidate, str]]:
        """Every candidate that was not compiled, or does not fit, and why."""
        for one in self.space.all():
            if one not in self.plans:
                yield (
                    one,
                    self.reasons.get(one) or self._hopeless(one) or f"{UNSEEN}, for {len(self.plans)} were, and others promised more",
                )
            elif not self.plans[one].fits:
                yield one, f"compiled, and does not fit: {format_bytes(self.plans[one].memory.peak)}"

    def _open_family(self, family: int) -> None:
        """Let the group of a layout wait that is nearest to what it declares, of those that can be; the others come with its plan."""
        for group in self.space.groups(family):
            floor = self._floor(group)
            if isinstance(floor, str):
                self.reasons[group] = floor
            elif self.lightest_first or not any(other.family == family for other in self._waiting):
                self._waiting[group] = None

    def _order(self, one: Candidate) -> tuple[bool, float]:
        """Which comes next: as long as nothing fits, what saves memory; then by seconds, as far as these can be told."""
        saves = one.accumulate > 1 or one.kept > 0
        floor = self._floor(one)
        if isinstance(floor, str):
            return False, 0.0
        if self.lightest_first and not saves:
            return True, float(floor.state)
        return self.best is None and not saves, self._expected(one, floor)

    def _expected(self, one: Candidate, floor: Floor) -> float:
        """Seconds of the plan that differs least, each further microbatch beginning all operations anew; a floor where there is no plan."""
        near = [(one.differs(other), number) for number, other in enumerate(self.plans) if other.family == one.family]
        if not near:
            return floor.seconds
        other, plan = list(self.plans.items())[min(near)[1]]
        return plan.timeline.seconds + max(one.accumulate / other.accumulate - 1, 0.0) * plan.timeline.launches

    def _floor(self, one: Candidate) -> Floor | str:
        """The floor of a candidate's group, or why there is none."""
        group = one.group
        if group not in self._floors:
            try:
                placed = self._placed(group)
                resolved = placed.resolved
                check_batch(self.alone.program.sample, resolved.layout, resolved.mesh, 1)
                self._floors[group] = floor_of(placed, self.cluster, self.alone.timeline, self._trained)
            except SpmdError as error:
                self._floors[group] = first_problem(error)
        return self._floors[group]

    def _placed(self, one: Candidate) -> Placed:
        return self.alone.program.placed.moved(abstract_mesh(one.mesh), one.layout, accumulate=one.accumulate)

    def _hopeless(self, one: Candidate) -> str | None:
        """Why a candidate need not be compiled, as far as is known."""
        floor, best, capacity = self._floor(one), self.best, self.cluster.target.memory
        if isinstance(floor, str):
            return floor
        if floor.state > capacity:
            return f"{STATE} {format_bytes(floor.state)} of {format_bytes(capacity)}"
        if best is not None and floor.seconds >= best.timeline.seconds:
            return f"{seconds(floor.seconds)} at least ({floor.why}), where the best needs {seconds(best.timeline.seconds)}"
        for other, plan in self.plans.items():
            if other.group != one.group:
                continue
            if plan.fits and other.kept <= one.kept and other.accumulate <= one.accumulate:
                return "less memory than it needs: it fits with fewer microbatches or while recomputing less"
            if other.kept == one.kept and one.accumulate > other.accumulate and (least := plan.at_least(one.accumulate)) > capacity:
                return f"{format_bytes(least)} even if all temporaries but gradients were divided by its microbatches"
        return None

    def _compile(self, one: Candidate) -> None:
        """Compile a candidate, and let those of its family wait that may be better; or note why it cannot be compiled."""
        self.say(f"compiling {len(self.plans) + 1}: {one}")
        try:
            plan = planned(self._placed(one), self.alone.program.sample, self.cluster, timeout=self.timeout)
        except SpmdError as error:
            self._refuse(one, error)
            return
        self.plans[one] = plan
        self._wait([*(self.space.lighter(one) if not plan.fits else ()), *self.space.groups(one.family)])

    def _refuse(self, one: Candidate, error: SpmdError) -> None:
        """Note what is refused: by layout or model for all that differs in memory only; for the same reason twice, for all meshes."""
        self.reasons[one] = why = first_problem(error)
        if isinstance(error, CompileError):
            self.failed += 1
        if one.accumulate > 1 or one.kept > 0 or not isinstance(error, LayoutError | ModelError):
            return
        before = self._refused.setdefault(one.family, [])
        compiled = {other.group for other in self.plans}
        groups = [group.group for group in self.space.groups(one.family)] if why in before else [one.group]
        self._floors |= {group: why for group in groups if group not in compiled}
        before.append(why)
        self._wait(self.space.groups(one.family))

    def _wait(self, others: Iterable[Candidate]) -> None:
        for other in others:
            if other not in self.plans and other not in self.reasons:
                self._waiting.setdefault(other)
