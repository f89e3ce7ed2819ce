"""The collectives of a step, read from its traced program: how often each runs, and the bytes that
each device sends.

Bytes are those of ring algorithms, with n devices in a group and b bytes of operand on each:

    all_reduce          2 (n - 1) / n * b
    reduce_scatter      (n - 1) / n * b
    all_to_all          (n - 1) / n * b
    all_gather          (n - 1) * b          (b is one device's slice)
    collective_permute  b

A conditional counts as its most expensive branch, and a `while` loop as one iteration. The
conditional at `start_step` is resolved for each step. For local SGD, the log shows a step in which
all parameters are synchronized.

The log has only the collectives that the program calls. It does not include those that XLA's
partitioner adds for sharded arrays (tensor parallelism, and everything under `reduction =
"compiler"`).
"""

import dataclasses
import html
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from spmd.base.deprecated import warn
from spmd.base.tree import format_bytes
from spmd.base.xla import scope_of
from spmd.jaxpr.inner_programs import counted_parts, inner_jaxprs, repeats
from spmd.render.html import Html, aligned, filled, folded, framed, table
from spmd.render.svg import bars

# by primitive
KINDS = {
    **dict.fromkeys(("psum", "psum2", "psum_invariant", "unreduced_psum"), "all_reduce"),
    **dict.fromkeys(("pmax", "pmin"), "all_reduce"),
    **dict.fromkeys(
        ("psum_scatter", "reduce_scatter", "unreduced_reduce_scatter"), "reduce_scatter"
    ),
    **dict.fromkeys(
        ("all_gather", "all_gather_invariant", "all_gather_reduced", "pgather"), "all_gather"
    ),
    **dict.fromkeys(("all_to_all", "ragged_all_to_all"), "all_to_all"),
    "ppermute": "collective_permute",
}
# In a ring of n devices, with b bytes of the operand on each. That of an all-reduce is rounded up,
# since n need not divide its operand; n divides those of the others.
SENT = {
    "all_reduce": lambda n, b: -(-2 * (n - 1) * b // n),
    "reduce_scatter": lambda n, b: (n - 1) * b // n,
    "all_to_all": lambda n, b: (n - 1) * b // n,
    "all_gather": lambda n, b: (n - 1) * b,
    "collective_permute": lambda n, b: b,
}
WARM_UP = "start_step"  # the scope of the conditional in `Averaging`
# `lax.cond` keeps its branches in the order false, true.
UNCOMPRESSED = 1  # its branch that runs before `start_step`
RENAMED_SCOPES = {
    "push": "reduce_gradients",  # words: an old scope
    "pull": "gather_params",  # words: an old scope
    "spread": "gather_updates",
}


@dataclasses.dataclass(frozen=True)
class Op:
    """One collective: its scope in the step, its kind, its mesh axes, and the operand on each
    device.

    `group` is the number of devices that communicate, `count` the number of runs in a step.
    `branch` is the branch of the conditional at `start_step`, or None outside it.
    """

    where: str
    kind: str
    axes: tuple[str, ...]
    group: int
    dtype: str
    shape: tuple[int, ...]
    count: int
    branch: int | None

    @property
    def sent(self) -> int:
        """Bytes that one device sends in one run."""
        size = math.prod(self.shape) * jax.numpy.dtype(self.dtype).itemsize
        return SENT[self.kind](self.group, size)

    @property
    def total(self) -> int:
        """Bytes that one device sends in all runs of a step."""
        return self.sent * self.count


HEADER = ("where", "collective", "over", "payload", "times", "sent/device")
MOST_BARS = 12


@dataclasses.dataclass(frozen=True)
class CommLog:
    """Every collective of one step; prints as a table."""

    ops: tuple[Op, ...]
    start_step: int = 0

    def bytes(self, step: int | None = None, where: str = "") -> int:
        """Bytes that one device sends in step number `step` (None: any after `start_step`), in
        scopes that start with `where`.
        """
        scope = where.partition("/")[0]
        if scope in RENAMED_SCOPES:
            warn(f'where="{scope}"', f'where="{RENAMED_SCOPES[scope]}"')
            where = RENAMED_SCOPES[scope] + where[len(scope) :]
        branch = 0
        if step is not None and step < self.start_step:
            branch = UNCOMPRESSED
        total = 0
        for op in self.ops:
            if op.branch in (None, branch) and op.where.startswith(where):
                total += op.total
        return total

    def _rows(self) -> list[tuple[str, ...]]:
        """Equal collectives share a row."""
        times = Counter[Op]()
        for op in self.ops:
            times[dataclasses.replace(op, count=1)] += op.count
        rows = []
        for op, count in times.items():
            where = op.where
            if op.branch == UNCOMPRESSED:
                where += " (before start_step)"
            over = f"{', '.join(op.axes)} ({op.group})"
            payload = f"{op.dtype}[{', '.join(map(str, op.shape))}]"
            sent = format_bytes(op.sent * count)
            rows.append((where, op.kind, over, payload, str(count), sent))
        return rows

    @property
    def _total(self) -> str:
        sent = self.bytes()
        synced = self.bytes(where="send/") + self.bytes(where="receive/")
        total = f"{sent:,} bytes sent by each device per step"
        if self.start_step:
            total += f"; {self.bytes(0):,} before step {self.start_step}"
        if synced:
            total += f"; {sent - synced:,} in steps without synchronization"
        if any(op.kind == "all_gather" and op.where.startswith("gather_params") for op in self.ops):
            total += (
                ". Where there is memory, XLA keeps gathered parameters for the backward pass and "
                "sends less: see spmd.plan."
            )
        return total

    def __str__(self) -> str:
        rows = aligned([HEADER, *self._rows()], ruled=True)
        return filled("\n".join([*rows, "", self._total]))

    __repr__ = __str__

    def _repr_html_(self) -> Html:
        """Bars of what a device sends in a step with everything, by place and collective, and the
        table.
        """
        sent = Counter[str]()
        for op in self.ops:
            if op.branch != UNCOMPRESSED:
                sent[f"{op.where}, {op.kind} over {', '.join(op.axes)}"] += op.total
        lengths = [(name, size, format_bytes(size)) for name, size in sent.most_common(MOST_BARS)]
        drawn = bars(lengths, "bytes sent by each device per step")
        rows = f'<div class="wide">{table(HEADER, self._rows())}</div>'
        listed = folded(f"{len(self.ops)} collectives", rows)
        return framed(f"<p>{html.escape(self._total)}</p>{drawn}{listed}")


def read_collectives(jaxpr: Any, sizes: Mapping[str, int], start_step: int = 0) -> CommLog:
    """Return the log of a traced program on a mesh with axes of these sizes."""
    return CommLog(tuple(_ops(jaxpr, sizes, 1, None, "")), start_step)


def _ops(
    jaxpr: Any, sizes: Mapping[str, int], times: int, branch: int | None, where: str
) -> Iterator[Op]:
    """Yield the collectives of a jaxpr that runs `times` times, in the scope `where`."""
    for equation in jaxpr.eqns:
        scopes = (where, _scope(scope_of(equation)))
        here = "/".join(scope for scope in scopes if scope)
        if equation.primitive.name in KINDS:
            yield from _ops_of(equation, sizes, times, branch, here)
        elif equation.primitive.name == "cond" and here.endswith(WARM_UP):
            for number, inner in enumerate(inner_jaxprs(equation)):
                for op in _ops(inner, sizes, times, branch, where):
                    yield dataclasses.replace(op, branch=number)
        else:
            runs = times * repeats(equation)
            parts = [
                list(_ops(inner, sizes, runs, branch, here)) for inner in inner_jaxprs(equation)
            ]
            # Which branch of a conditional a step takes depends on data: of all branches, the one
            # that sends the most is counted.
            for part in counted_parts(equation, parts, _sent):
                yield from part


def _sent(ops: list[Op]) -> int:
    """Return the bytes that a device sends for collectives."""
    return sum(op.total for op in ops)


def _ops_of(
    equation: Any, sizes: Mapping[str, int], times: int, branch: int | None, where: str
) -> Iterator[Op]:
    """Yield one `Op` for each operand of a collective; none if its group is one device."""
    # sums have the param `axes`, other collectives `axis_name` (jax 0.10)
    params = equation.params
    names = params["axes"] if "axes" in params else params["axis_name"]
    if not isinstance(names, tuple | list):
        names = (names,)
    # a number is a dim over which each device sums, where a model binds an axis by vmap
    dims = {name for name in names if isinstance(name, int)}
    axes = tuple(name for name in names if name not in dims)
    group = math.prod(sizes[axis] for axis in axes)
    if group == 1:
        return
    for operand in equation.invars:
        shape = operand.aval.shape
        yield Op(
            where=_without_module(where) or "step",
            kind=KINDS[equation.primitive.name],
            axes=axes,
            group=group,
            dtype=str(operand.aval.dtype),
            shape=tuple(shape[dim] for dim in range(len(shape)) if dim not in dims),
            count=times,
            branch=branch,
        )


def _scope(stack: str) -> str:
    """Return a name stack without the wrappers of transformations. The model's own collectives
    (BatchNorm) have only the name "model".
    """
    if not stack:
        return ""
    # JAX writes transformations around a scope, such as transpose(jvp(gather_params)).
    unwrapped = re.sub(r"\b(jvp|transpose|vmap|checkpoint|remat)\(|\)", "", stack)
    scope = "/".join(part for part in unwrapped.split("/") if part)
    return scope or "model"


def _without_module(scope: str) -> str:
    """Return the scope of what a step communicates, without that of the module whose loop over
    layers communicates it.
    """
    return re.sub(r"^(?!send/|receive/).*/(?=gather_params|reduce_gradients)", "", scope)
