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

SHOWN = 3  # names in a list before "and N more"


def spec_problems(spec: Spec, shape: tuple[int, ...], mesh: MeshSpec) -> list[str]:
    """Why `spec` does not fit an array of `shape` on `mesh`, with the numbers; empty if it fits."""
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
            what = (
                f'mesh axis "{axes[0]}" has'
                if len(axes) == 1
                else f"mesh axes {' and '.join(axes)} together have"
            )
            lines.append(
                f"dim {dim} has size {shape[dim]}; {what} {pieces} devices; {shape[dim]} / "
                f"{pieces} leaves {shape[dim] % pieces}."
            )
    return lines


def fitting_spec(spec: Spec, shape: tuple[int, ...], mesh: MeshSpec) -> Spec:
    """The spec nearest to `spec` that fits: entries that do not divide become None; a spec that is
    too long loses one end.

    >>> fitting_spec((None, "model"), (64,), MeshSpec.parse("model=2"))
    ('model',)
    """
    rank = len(shape)
    ends = [spec] if len(spec) <= rank else [spec[:rank], spec[len(spec) - rank :]]
    fitting = (
        tuple(
            None if shape[dim] % num_shards((entry,), mesh) else entry
            for dim, entry in enumerate(end)
        )
        for end in ends
    )
    return max(fitting, key=lambda end: len(spec_axes(end)))


def spec_fix(spec: Spec, shape: tuple[int, ...], mesh: MeshSpec) -> tuple[str, str]:
    """A spec near to `spec` that fits, with its arithmetic; and a width that would fit `spec`
    itself, or "".
    """
    fixed = fitting_spec(spec, shape, mesh)
    pieces = [num_shards((entry,), mesh) for entry in fixed]
    sums = [
        f"{shape[dim]} / {pieces[dim]} = {shape[dim] // pieces[dim]}"
        for dim, entry in enumerate(fixed)
        if entry
    ]
    text = spec_text(fixed) + (f" ({', '.join(sums)})" if sums else "")
    bad = [
        dim
        for dim, entry in enumerate(spec[: len(shape)])
        if shape[dim] % num_shards((entry,), mesh)
    ]
    if len(spec) > len(shape) or len(bad) != 1:
        return text, ""
    unit = num_shards((spec[bad[0]],), mesh)
    return text, f"a width divisible by {unit}, such as {-(-shape[bad[0]] // unit) * unit}"


def near_multiples(size: int, unit: int) -> str:
    """The multiples of `unit` next to a size that it does not divide.

    >>> near_multiples(10, 4), near_multiples(3, 4)
    ('8 or 12', '4')
    """
    return " or ".join(
        map(str, dict.fromkeys((max(unit, size // unit * unit), -(-size // unit) * unit)))
    )


def rule_fix(rules: tuple[Rule, ...], number: int | None, pattern: str | None, spec: str) -> str:
    """How parameters get `spec` by a rule of their own; they are taken out of the rule that claims
    them now, if one does.
    """
    if pattern is None:  # nothing short names them all
        taken = (
            f"name them in the `except` of {rule_name(rules, number)}, and write "
            if number is not None
            else ""
        )
        return f"{taken}a rule for each  spec = {spec}"
    taken = (
        f"{except_text(rules[number], [pattern])}  in {rule_name(rules, number)}, and "
        if number is not None
        else ""
    )
    return f'{taken}a rule  path = "{pattern}"  spec = {spec}'


def except_text(rule: Rule, patterns: Iterable[str]) -> str:
    """The `except` line of a rule, with more patterns added."""
    return "except = [" + ", ".join(f'"{pattern}"' for pattern in (*rule.except_, *patterns)) + "]"


def match_checker(
    rules: tuple[Rule, ...] | tuple[GradientRule, ...], paths: Iterable[str], noun: str
) -> Callable[..., Iterator[Problem]]:
    """A function for the problems of one of these rules: it or an `except` pattern of it matches no
    path, or its `except` matches all.

    It takes what the problem's text begins with, the rule, and `at`: fields of the problem that say
    which rule it is.

    Args:
      noun: what the paths are of.
    """
    paths, unmatched = [*paths], itertools.count()
    found = match_all((pattern for rule in rules for pattern in (rule.path, *rule.except_)), paths)

    def fix(pattern: str, others: Sequence[str]) -> str:
        # a layout of another model may have thousands of such rules; near names are searched for
        # those that an error shows
        return (
            path_fix(pattern, others) if next(unmatched) < PROBLEMS_SHOWN else _pattern_of(others)
        )

    def problems(where: str, rule: Rule | GradientRule, at: Mapping[str, Any]) -> Iterator[Problem]:
        matched = found[rule.path]
        if not matched:
            yield Problem(
                f"{where} matches no {noun}.", [], fix(rule.path, paths), **at, kind="no_match"
            )
            return
        excepted = {pattern: set(matched).intersection(found[pattern]) for pattern in rule.except_}
        for pattern in (pattern for pattern in excepted if not excepted[pattern]):
            why = f"matches no {noun} of this rule."
            yield Problem(
                f'{where}, except "{pattern}"', [why], fix(pattern, matched), **at, kind="no_match"
            )
        if set().union(*excepted.values()) == set(matched):
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
    """Why an array has no spec or codec: several rules match it."""
    lines = [
        f'{rule_name(rules, index)} claims it: path "{rules[index].path}"' for index in claimed
    ]
    codecs = [
        f", codec {rule.codec}" if isinstance(rule := rules[index], GradientRule) else ""
        for index in claimed
    ]
    return [
        f"{len(claimed)} {headline}.",
        *(line + codec for line, codec in zip(lines, codecs, strict=True)),
    ]


def overlap_fix(
    rules: tuple[Rule, ...], claimed: Sequence[int], claims: Mapping[str, Sequence[int]]
) -> str:
    """Exceptions that leave a parameter to one rule: the one with the fewest matches."""
    sizes = Counter(index for indices in claims.values() for index in indices)
    keeper = min(reversed(claimed), key=lambda index: sizes[index])
    fixes = []
    for other in (index for index in claimed if index != keeper):
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
    """The nearest pattern that matches something, with the number of matches; else the first
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
    """The line of a problem about paths other than the first; "" if there is one."""
    return f"and {len(paths) - 1} more: {first_names(paths[1:])}." if len(paths) > 1 else ""


def first_names(names: Sequence[str]) -> str:
    """The first names, and the number of further ones.

    >>> first_names(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
