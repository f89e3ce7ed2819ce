"""Path patterns: `*` within a level, `**` over levels, `{a,b}` for alternatives, `?` for one
character.
"""

import functools
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from spmd.errors import LayoutError, closest

# a pattern is data from a file: bounded, and compiled to a regex without nested repeats
MAX_LENGTH = 400


@functools.cache
def compiled(pattern: str) -> re.Pattern[str]:
    """The pattern as a regular expression for full paths.

    >>> bool(compiled("**/attention/{query,key}/kernel").fullmatch("blocks/0/attention/key/kernel"))
    True
    >>> bool(compiled("*/kernel").fullmatch("a/b/kernel"))
    False

    Raises:
      LayoutError: braces that do not close, or a pattern longer than `MAX_LENGTH`.
    """
    if len(pattern) > MAX_LENGTH:
        raise LayoutError(
            f"path pattern of {len(pattern)} characters: at most {MAX_LENGTH} are allowed.",
            fix="several rules.",
        )
    if re.search(r"[{}]", re.sub(r"\{[^{}]*\}", "", pattern)):
        raise LayoutError(
            f'path "{pattern}": braces must close and cannot be nested.',
            fix='such as "**/{up,down}/kernel".',
        )
    regex, inside_braces = [], False
    for token in re.split(r"(\*\*/|\*\*|[*?{},])", pattern):
        regex.append(
            "|" if token == "," and inside_braces else _REGEX_OF_TOKEN.get(token, re.escape(token))
        )
        inside_braces = token == "{" or (inside_braces and token != "}")
    return re.compile("".join(regex))


_REGEX_OF_TOKEN = {
    "**/": "(?:[^/]+/)*",
    "**": ".*",
    "*": "[^/]*",
    "?": "[^/]",
    "{": "(?:",
    "}": ")",
}


def matches(pattern: str, paths: Iterable[str]) -> list[str]:
    """The paths that the pattern matches, in order."""
    match = compiled(pattern).fullmatch
    return [path for path in paths if match(path)]


def matcher(patterns: Iterable[str]) -> Callable[[str], list[str]]:
    """A function that lists the patterns that match a path, in their order. It tries only those of
    which the path has a certain level.

    >>> matcher(["**/kernel", "blocks/0/**", "head/kernel"])("head/kernel")
    ['**/kernel', 'head/kernel']
    """
    order = {pattern: place for place, pattern in enumerate(dict.fromkeys(patterns))}
    levels = {
        pattern: list(_required_levels(pattern)) for pattern in order if _WILDCARD.search(pattern)
    }
    uses = Counter(level for required in levels.values() for level in required)
    by_level: dict[
        str | None, list[tuple[str, re.Pattern[str]]]
    ] = {}  # by the rarest level that a pattern requires; None: it requires none
    for pattern, required in levels.items():
        by_level.setdefault(min(required, key=lambda level: uses[level], default=None), []).append(
            (pattern, compiled(pattern))
        )

    def matching(path: str) -> list[str]:
        found = [path] if path in order and path not in levels else []
        for level in (None, *dict.fromkeys(path.split("/"))):
            found += [
                pattern for pattern, regex in by_level.get(level, ()) if regex.fullmatch(path)
            ]
        return sorted(found, key=lambda pattern: order[pattern])

    return matching


_WILDCARD = re.compile(r"[*?{}]")


def _required_levels(pattern: str) -> Iterator[str]:
    """Levels without wildcards that every path has that matches the pattern.

    >>> list(_required_levels("**/up/{a,b/c}/x?/kernel")), list(_required_levels("a**/b/c"))
    (['up', 'kernel'], ['c'])
    """
    starts_level = True  # after `a**/` there may be no slash: `a**/b` matches "ab"
    for level in re.sub(r"\{[^{}]*\}", "?", pattern).split("/"):
        if starts_level and not _WILDCARD.search(level):
            yield level
        starts_level = not level.endswith("**") or (starts_level and level == "**")


def match_all(patterns: Iterable[str], paths: Iterable[str]) -> dict[str, list[str]]:
    """The paths that each pattern matches, in order.

    >>> match_all(["**/kernel", "head/*"], ["up/kernel", "head/kernel"])
    {'**/kernel': ['up/kernel', 'head/kernel'], 'head/*': ['head/kernel']}
    """
    found: dict[str, list[str]] = {pattern: [] for pattern in patterns}
    matching = matcher(found)
    for path in paths:
        for pattern in matching(path):
            found[pattern].append(path)
    return found


def suggest(pattern: str, paths: Iterable[str]) -> tuple[str, int] | None:
    """A pattern near to `pattern` that matches something, with how many; None when there is none.

    Every level of the pattern that holds no wildcard is replaced by the most similar level any path
    has; the result is returned only if it matches.

    >>> suggest("**/atention/**", ["blocks/0/attention/query/kernel", "head/kernel"])
    ('**/attention/**', 1)
    """
    paths = list(paths)
    levels = {level for path in paths for level in path.split("/")}
    words = []
    for word in re.split(r"([/{},])", pattern):
        plain = word and word not in levels and not re.search(r"[*?/{},]", word)
        words.append((closest(word, levels) or word) if plain else word)
    for candidate in ("".join(words), f"**/{''.join(words)}", f"{''.join(words)}/**"):
        matched = matches(candidate, paths)
        if matched and candidate != pattern:
            return candidate, len(matched)
    return None


def covering(some: Sequence[str], all_paths: Collection[str]) -> str | None:
    """A pattern that matches the paths `some` and no other of `all_paths`; None when none was
    found.

    >>> covering(["a/0/bias", "a/1/bias"], ["a/0/bias", "a/1/bias", "a/0/kernel", "bias"])
    'a/*/bias'
    """
    if len(some) == 1:
        return some[0]
    split, candidates = [path.split("/") for path in some], []
    columns = [list(dict.fromkeys(column)) for column in zip(*split, strict=False)]
    if len({len(levels) for levels in split}) == 1:
        candidates.append("/".join(column[0] if len(column) == 1 else "*" for column in columns))
        candidates.append(
            "/".join(
                column[0] if len(column) == 1 else "{" + ",".join(column) + "}"
                for column in columns
            )
        )
    ends = list(zip(*(levels[::-1] for levels in split), strict=False))
    tail: list[str] = []
    for end in ends:
        if len(set(end)) > 1:
            break
        tail.insert(0, end[0])
        candidates.append("**/" + "/".join(tail))
    candidates.append("**")
    wanted = [path for path in all_paths if path in set(some)]
    # names may contain pattern characters, so each candidate is verified
    return next(
        (
            pattern
            for pattern in candidates
            if len(pattern) <= MAX_LENGTH and matches(pattern, all_paths) == wanted
        ),
        None,
    )
