"""Fixes for layouts that do not fit: specs and patterns, verified on the model."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from spmd.base.path_match import match_all, suggest
from spmd.base.specs import Spec, entry_axes, spec_axes, spec_text
from spmd.errors import SHOWN as PROBLEMS_SHOWN, Problem
from spmd.layout.gradients import GradientRule
from spmd.layout.resolve import num_shards, rule_name
from spmd.layout.schema import Rule
from spmd.mesh import MeshSpec

# Names in a list before "and N more".
SHOWN = 3


def spec_problems(spec: Spec, shape: tuple[int, ...], mesh: MeshSpec) -> list[str]:
    """Return the reasons why `spec` does not fit an array of `shape` on `mesh`, with the numbers;
    none if it fits.
    """
    if len(spec) > len(shape):
        return [
            f"the spec has {len(spec)} entries, the array has {len(shape)} "
            f"dim{'s' * (len(shape) != 1)}."
        ]
    lines = []
    for dim, entry in enumerate(spec):
        pieces = num_shards((entry,), mesh)
        if shape[dim] % pieces:
            axes = entry_axes(entry)
            have = f"mesh axes {' and '.join(axes)} together have"
            if len(axes) == 1:
                have = f'mesh axis "{axes[0]}" has'
            lines.append(
                f"dim {dim} has size {shape[dim]}; {have} {pieces} devices; {shape[dim]} / "
                f"{pieces} leaves {shape[dim] % pieces}."
            )
    return lines


def fitting_spec(spec: Spec, shape: tuple[int, ...], mesh: MeshSpec) -> Spec:
    """Return the spec nearest to `spec` that fits: entries that do not divide become None; a spec
    that is too long loses one end.

    >>> fitting_spec((None, "model"), (64,), MeshSpec.parse("model=2"))
    ('model',)
    """
    rank = len(shape)
    ends = [spec]
    if len(spec) > rank:
        ends = [spec[:rank], spec[len(spec) - rank :]]
    fitting = []
    for end in ends:
        entries = list(end)
        for dim in _misfit_dims(end, shape, mesh):
            entries[dim] = None
        fitting.append(tuple(entries))
    return max(fitting, key=lambda end: len(spec_axes(end)))


def _misfit_dims(spec: Spec, shape: tuple[int, ...], mesh: MeshSpec) -> list[int]:
    """Return the dims that the entries of a spec do not divide."""
    return [dim for dim, entry in enumerate(spec) if shape[dim] % num_shards((entry,), mesh)]


def spec_fix(spec: Spec, shape: tuple[int, ...], mesh: MeshSpec) -> tuple[str, str]:
    """Return a spec near to `spec` that fits, with its arithmetic; and a width that would fit
    `spec` itself, or "".
    """
    fixed = fitting_spec(spec, shape, mesh)
    sums = []
    for dim, entry in enumerate(fixed):
        if entry:
            pieces = num_shards((entry,), mesh)
            sums.append(f"{shape[dim]} / {pieces} = {shape[dim] // pieces}")
    text = spec_text(fixed)
    if sums:
        text += f" ({', '.join(sums)})"
    if len(spec) > len(shape):
        return text, ""
    misfits = _misfit_dims(spec, shape, mesh)
    if len(misfits) != 1:
        return text, ""
    (dim,) = misfits
    unit = num_shards((spec[dim],), mesh)
    return text, f"a width divisible by {unit}, such as {-(-shape[dim] // unit) * unit}"


def near_multiples(size: int, unit: int) -> str:
    """Return the multiples of `unit` next to a size that it does not divide.

    >>> near_multiples(10, 4), near_multiples(3, 4)
    ('8 or 12', '4')
    """
    multiples = (max(unit, size // unit * unit), -(-size // unit) * unit)
    return " or ".join(map(str, dict.fromkeys(multiples)))


def rule_fix(rules: tuple[Rule, ...], number: int | None, pattern: str | None, spec: str) -> str:
    """Return a fix that gives parameters `spec` by a rule of their own; they become exceptions of
    the rule that claims them now, if one does.
    """
    fix = ""
    # Nothing short names them all.
    if pattern is None:
        if number is not None:
            fix = f"name them in the `except` of {rule_name(rules, number)}, and write "
        return f"{fix}a rule for each  spec = {spec}"
    if number is not None:
        fix = f"{except_text(rules[number], [pattern])}  in {rule_name(rules, number)}, and "
    return f'{fix}a rule  path = "{pattern}"  spec = {spec}'


def except_text(rule: Rule, patterns: Iterable[str]) -> str:
    """Return the `except` line of a rule, with more patterns added."""
    quoted = ", ".join(f'"{pattern}"' for pattern in (*rule.except_, *patterns))
    return f"except = [{quoted}]"


def match_checker(
    rules: tuple[Rule, ...] | tuple[GradientRule, ...], paths: Iterable[str], noun: str
) -> Callable[..., Iterator[Problem]]:
    """Return a function that yields the problems of one of these rules: it or an `except` pattern
    of it matches no path, or its `except` matches all.

    It takes the beginning of the problem's text, the rule, and `at`: fields of the problem that
    identify the rule.

    Args:
      noun: what the paths are of.
    """
    paths = [*paths]
    unmatched = itertools.count()
    patterns = (pattern for rule in rules for pattern in (rule.path, *rule.except_))
    matches = match_all(patterns, paths)

    def fix(pattern: str, others: Sequence[str]) -> str:
        # A layout of another model may have thousands of such rules; near names are searched for
        # the problems that an error shows.
        if next(unmatched) < PROBLEMS_SHOWN:
            return path_fix(pattern, others)
        return _pattern_of(others)

    def problems(where: str, rule: Rule | GradientRule, at: Mapping[str, Any]) -> Iterator[Problem]:
        matched = matches[rule.path]
        # One alternative in braces is enough: a shipped layout lists the usual names of a
        # submodule, of which a model has one.
        if not matched:
            yield Problem(
                f"{where} matches no {noun}.", [], fix(rule.path, paths), **at, kind="no_match"
            )
            return
        excepted = set()
        for pattern in dict.fromkeys(rule.except_):
            shared = set(matched).intersection(matches[pattern])
            excepted |= shared
            if not shared:
                why = f"matches no {noun} of this rule."
                text = f'{where}, except "{pattern}"'
                yield Problem(text, [why], fix(pattern, matched), **at, kind="no_match")
        if excepted == set(matched):
            why = f"excludes every {noun} of this rule."
            yield Problem(
                f"{where}, except {', '.join(rule.except_)}",
                [why],
                "remove the rule.",
                **at,
                kind="no_match",
            )

    return problems


def claim_lines(
    rules: tuple[Rule, ...] | tuple[GradientRule, ...], claimed: Sequence[int], headline: str
) -> list[str]:
    """Return the reason why an array has no spec or codec: several rules match it."""
    lines = [f"{len(claimed)} {headline}."]
    for index in claimed:
        rule = rules[index]
        line = f'{rule_name(rules, index)} claims it: path "{rule.path}"'
        if isinstance(rule, GradientRule):
            line += f", codec {rule.codec}"
        lines.append(line)
    return lines


def overlap_fix(
    rules: tuple[Rule, ...], claimed: Sequence[int], claims: Mapping[str, Sequence[int]]
) -> str:
    """Return exceptions that leave a parameter to one rule: the one with the fewest matches."""
    sizes = Counter(index for indices in claims.values() for index in indices)
    keeper = min(reversed(claimed), key=lambda index: sizes[index])
    fixes = []
    for other in claimed:
        if other == keeper:
            continue
        shared = sum(keeper in indices and other in indices for indices in claims.values())
        if shared == sizes[other]:
            fixes.append(
                f"remove {rule_name(rules, other)}: {rule_name(rules, keeper)} matches all of its "
                "parameters"
            )
        else:
            fixes.append(
                f"{except_text(rules[other], [rules[keeper].path])}  in {rule_name(rules, other)}"
            )
    return "; ".join(fixes) + "."


def path_fix(pattern: str, paths: Iterable[str]) -> str:
    """Return the nearest pattern that matches something, with the number of matches; else the first
    paths.
    """
    paths = [path for path in paths if path]
    near = suggest(pattern, paths)
    if near:
        return f'did you mean "{near[0]}"? It matches {near[1]}.'
    return _pattern_of(paths)


def _pattern_of(paths: Sequence[str]) -> str:
    return f"remove the pattern, or match one of: {first_names([path for path in paths if path])}."


def more_names(paths: Sequence[str]) -> str:
    """Return the line of a problem about paths other than the first; "" if there is one path."""
    if len(paths) < 2:
        return ""
    return f"and {len(paths) - 1} more: {first_names(paths[1:])}."


def first_names(names: Sequence[str]) -> str:
    """Return the first names, and the number of further ones.

    >>> first_names(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    text = ", ".join(names[:SHOWN])
    if len(names) > SHOWN:
        text += f" and {len(names) - SHOWN} more"
    return text
