"""The result of `spmd.search`: plans, the Pareto front of memory against time, and why the other
candidates were rejected.
"""

import dataclasses
import html
import re
from collections.abc import Mapping
from pathlib import Path

from spmd.base.tree import format_bytes
from spmd.base.user_paths import output_path, write_text
from spmd.errors import OptionError
from spmd.layout.schema import Layout
from spmd.planner.candidates import Candidate
from spmd.planner.cluster import Cluster
from spmd.planner.html_report import pareto_chart
from spmd.planner.planning import Plan
from spmd.planner.text_report import seconds, step_time
from spmd.render.html import Html, aligned, filled, folded, framed, table

# bytes and times, which differ between candidates rejected for one reason
_FIGURES = re.compile(r"[\d.,e+]+ (?:[KMGT]?i?B|s|ms|us)\b")
FOUND = "# Found by spmd.search"  # the first words of a file
FRONT = "front: no other plan is as fast in less memory, or faster in as little (the Pareto front)"


class Reason(str):
    """The reason for which a candidate was rejected; `kind` is "memory", "limit" (of `compiles` or
    `seconds`), or "" for any other reason.
    """

    kind: str

    def __new__(cls, text: str, kind: str = "") -> "Reason":
        """The text, with its kind."""
        self = super().__new__(cls, text)
        self.kind = kind
        return self


def _programs(count: int) -> str:
    return f"{count} program{'s' * (count != 1)}"


@dataclasses.dataclass(frozen=True)
class Search:
    """The result of `search`; printed, a table and the reasons for rejections.

    Attributes:
      cluster: the target.
      alone: the plan of the same step on one device, whether it fits or not.
      plans: every candidate that was compiled and fits, fastest first, with its plan.
      rejected: every other candidate and the reason, in the order of candidates.
      left_out: layouts that were not searched, and why.
      complete: whether each candidate was compiled or ruled out; if not, the search stopped at
        `compiles`, at `seconds` or by Ctrl-C.
      would_hold: if nothing fits, a plan on the smallest mesh found on which the step fits.
      interrupted: whether Ctrl-C ended the search; the plans are those made before.
      programs, seconds: how many programs were compiled, apart from those for one device, and how
        long everything took.
      time_limit: the limit that ended the search before all candidates were tried, such as "the
        time limit of 150 s"; "" if none did.
    """

    cluster: Cluster
    alone: Plan
    plans: tuple[tuple[Candidate, Plan], ...]
    rejected: Mapping[Candidate, Reason]
    left_out: Mapping[str, str]
    complete: bool
    would_hold: Plan | None
    interrupted: bool = False
    programs: int = 0
    seconds: float = 0.0
    time_limit: str = ""

    @property
    def best(self) -> Plan | None:
        """The fastest plan that fits; None where none does."""
        if not self.plans:
            return None
        return self.plans[0][1]

    @property
    def front(self) -> tuple[tuple[Candidate, Plan], ...]:
        """The Pareto front: plans that need less memory than every faster one; fastest first."""
        front: list[tuple[Candidate, Plan]] = []
        for candidate, plan in self.plans:
            if not front or plan.memory.peak < front[-1][1].memory.peak:
                front.append((candidate, plan))
        return tuple(front)

    def drawing(self) -> Html:
        """Draw memory against time of every plan, and the Pareto front, as HTML for a notebook's
        cell or a page.

        Raises:
          OptionError: nothing fits.
        """
        if not self.plans:
            raise OptionError(
                f"search: {self._why_nothing}, so there is nothing to draw.",
                fix="print(search) shows what was tried.",
            )
        return framed(self._chart)

    @property
    def _chart(self) -> str:
        points = [
            (candidate.layout.name, str(candidate), plan.period.seconds, plan.memory.peak)
            for candidate, plan in self.plans
        ]
        return pareto_chart(
            points,
            self.cluster.target.memory,
            f"memory against time of {len(points)} plans for {self.cluster}",
        )

    @property
    def _why_nothing(self) -> str:
        if all(why.kind != "memory" for why in self.rejected.values()):
            first, *_ = *self.rejected.values(), *self.left_out.values(), "there are no candidates"
            return f"no candidate could be planned for {self.cluster}: {first}"
        what = "nothing that was compiled"
        if self.complete:
            what = "nothing"
        return f"{what} fits {self.cluster}"

    @property
    def _larger_mesh(self) -> str:
        plan = self.would_hold
        if plan is None:
            return ""
        return (
            f"{plan.layout.name} on mesh {plan.mesh} of {plan.cluster} would hold it: "
            f"{plan.memory.verdict}"
        )

    @property
    def layout(self) -> Layout:
        """The best plan's layout, complete with its mesh.

        Raises:
          OptionError: nothing fits.
        """
        if not self.plans:
            other = "more compiles"
            if self.complete:
                other = "a smaller model or batch"
            raise OptionError(f"search: {self._why_nothing}.", fix=f"{self._larger_mesh or other}.")
        return self.plans[0][0].layout

    def to_toml(self) -> str:
        """Return the best layout as TOML, with a comment on how to use it.

        Raises:
          OptionError: nothing fits.
        """
        layout, best = self.layout, self.plans[0][1]
        config = best.program.placed.config
        arguments = f"batch_size={best.rows}"
        if config.accumulate > 1:
            arguments += f", accumulate={config.accumulate}"
        if config.precision != "float32":
            arguments += f', precision="{config.precision}"'
        step = f"{seconds(best.period.seconds)} per step predicted, {best.memory.verdict}"
        return (
            f"{FOUND} for {self.cluster}: {step}\n# fit(..., layout=<this file>, {arguments})\n\n"
            f"{layout.to_toml()}"
        )

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write the best layout as a TOML file; its folder is made if it is not there.

        Raises:
          OptionError: nothing fits, a suffix other than .toml, or the file exists.
        """
        text = self.to_toml()
        return write_text(output_path(path, "a layout file", (".toml",), overwrite=overwrite), text)

    @property
    def head(self) -> str:
        """The number of candidates that fit, for which target, and the same step on one device."""
        alone = (
            f"on one device: {seconds(self.alone.timeline.seconds)}, "
            f"{format_bytes(self.alone.memory.peak)}."
        )
        head = (
            f"{len(self.plans)} of {len(self.plans) + len(self.rejected)} candidates for "
            f"{self.cluster} were compiled and fit; {alone}"
        )
        if self.time_limit:
            return f"{head}\n{self._why_ended}"
        return head

    @property
    def _why_ended(self) -> str:
        """The candidates that the time limit has left out, as a sentence."""
        left = sum(why.kind == "limit" for why in self.rejected.values())
        of = (
            f"{left} of {len(self.plans) + len(self.rejected)} candidates were not tried; "
            "max_seconds (--max-seconds) sets it."
        )
        limit = self.time_limit[0].upper() + self.time_limit[1:]
        return f"{limit} was reached after {_programs(self.programs)}: {of}"

    @property
    def verdict(self) -> str:
        """A sentence that says that nothing fits, and on which mesh the step would."""
        verdict = self._why_nothing[0].upper() + self._why_nothing[1:]
        if self.would_hold:
            return f"{verdict}; {self._larger_mesh}"
        return verdict

    def rows(self) -> list[tuple[str, ...]]:
        """Return the table: its header, then every plan, fastest first; the last column marks the
        Pareto front.
        """
        rows = [("", "candidate", "step", "vs best", "peak", "waits", "sent/device", "")]
        front = {candidate for candidate, _ in self.front}
        for number, (candidate, plan) in enumerate(self.plans, 1):
            row = (
                str(number),
                str(candidate),
                seconds(plan.period.seconds),
                f"{plan.period.seconds / self.plans[0][1].period.seconds:.2f}",
                format_bytes(plan.memory.peak),
                f"{1 - plan.period.utilization:.0%}",
                format_bytes(plan.traffic.bytes()),
                "front" if candidate in front else "",
            )
            rows.append(row)
        return rows

    def conclusion(self, count: int = 5) -> str:
        """Return the fastest plans and the best, and what it took to find them: the end of what
        `spmd search` prints.
        """
        took = f"{_programs(self.programs)} in {self.seconds:.0f} s"
        if self.interrupted:
            took += ", then interrupted"
        elif self.time_limit:
            took += f", then {self.time_limit}"
        if self.best is None:
            return filled(f"{self.verdict}; {took}.")
        header, *rows = self.rows()
        title = f"THE FASTEST {min(count, len(rows))} OF {len(rows)} THAT FIT ({took})"
        best = f"best: {self.plans[0][0]}: {step_time(self.best)}, {self.best.memory.verdict}"
        return filled("\n".join([title, *aligned([header, *rows[:count]]), best]))

    def reasons(self) -> list[str]:
        """Return one line for each reason for rejecting candidates of a layout, however many they
        are; of several figures, the first one's.
        """
        by_reason: dict[tuple[str, str], list[Candidate]] = {}
        for candidate, why in self.rejected.items():
            key = (candidate.layout.name, _FIGURES.sub("", why))
            by_reason.setdefault(key, []).append(candidate)
        lines = []
        for (name, _), group in by_reason.items():
            shown = str(group[0])
            if len(group) > 1:
                shown = f"{name}, {len(group)} candidates such as {shown}"
            lines.append(f"  {shown}: {self.rejected[group[0]]}")
        return [*lines, *(f"  {name}: {why}" for name, why in self.left_out.items())]

    def __str__(self) -> str:
        if self.plans:
            lines = [*aligned(self.rows()), "", FRONT]
        else:
            lines = [self.verdict]
        return filled("\n".join([self.head, "", *lines, "", "rejected", *self.reasons()]))

    __repr__ = __str__

    def _repr_html_(self) -> Html:
        header, *rows = self.rows()
        parts = [f"<p>{html.escape(self.head)}</p>"]
        if rows:
            parts += [self._chart, f'<div class="wide">{table(header, rows)}</div><p>{FRONT}</p>']
            layout = f"<pre>{html.escape(self.to_toml())}</pre>"
            parts.append(folded("the best layout as TOML", layout))
        else:
            parts.append(f'<p class="verdict bad">{html.escape(self.verdict)}</p>')
        if reasons := "\n".join(line.strip() for line in self.reasons()):
            title = f"{len(self.rejected) + len(self.left_out)} rejected, and why"
            parts.append(folded(title, f"<pre>{html.escape(reasons)}</pre>"))
        return framed("".join(parts))
