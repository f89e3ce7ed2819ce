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
    regex = []
    inside_braces = False
    for token in re.split(r"(\*\*/|\*\*|[*?{},])", pattern):
        part = _REGEX_OF_TOKEN.get(token, re.escape(token))
        if token == "," and inside_braces:
            part = "|"
        regex.append(part)
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
    """Return the paths that the pattern matches, in order."""
    match = compiled(pattern).fullmatch
    return [path for path in paths if match(path)]


def matcher(patterns: Iterable[str]) -> Callable[[str], list[str]]:
    """Return a function that lists the patterns that match a path, in their order.

    >>> matcher(["**/kernel", "blocks/0/**", "head/kernel"])("head/kernel")
    ['**/kernel', 'head/kernel']
    """
    order = {pattern: place for place, pattern in enumerate(dict.fromkeys(patterns))}
    levels = {
        pattern: list(_required_levels(pattern)) for pattern in order if _WILDCARD.search(pattern)
    }
    uses = Counter(level for required in levels.values() for level in required)
    # By the rarest level that a pattern requires; None: it requires none. A model may have
    # thousands of paths, and a layout as many patterns: only those are tried that have a level of
    # the path.
    by_level: dict[str | None, list[tuple[str, re.Pattern[str]]]] = {}
    for pattern, required in levels.items():
        rarest = min(required, key=lambda level: uses[level], default=None)
        by_level.setdefault(rarest, []).append((pattern, compiled(pattern)))

    def matching(path: str) -> list[str]:
        matched = []
        if path in order and path not in levels:
            matched.append(path)
        for level in (None, *dict.fromkeys(path.split("/"))):
            for pattern, regex in by_level.get(level, ()):
                if regex.fullmatch(path):
                    matched.append(pattern)
        return sorted(matched, key=lambda pattern: order[pattern])

    return matching


_WILDCARD = re.compile(r"[*?{}]")


def _required_levels(pattern: str) -> Iterator[str]:
    """Yield levels without wildcards that every path has that matches the pattern.

    >>> list(_required_levels("**/up/{a,b/c}/x?/kernel")), list(_required_levels("a**/b/c"))
    (['up', 'kernel'], ['c'])
    """
    # After `a**/` there may be no slash: `a**/b` matches "ab".
    starts_level = True
    for level in re.sub(r"\{[^{}]*\}", "?", pattern).split("/"):
        if starts_level and not _WILDCARD.search(level):
            yield level
        starts_level = not level.endswith("**") or (starts_level and level == "**")


def match_all(patterns: Iterable[str], paths: Iterable[str]) -> dict[str, list[str]]:
    """Return the paths that each pattern matches, in order.

    >>> match_all(["**/kernel", "head/*"], ["up/kernel", "head/kernel"])
    {'**/kernel': ['up/kernel', 'head/kernel'], 'head/*': ['head/kernel']}
    """
    matched: dict[str, list[str]] = {pattern: [] for pattern in patterns}
    matching = matcher(matched)
    for path in paths:
        for pattern in matching(path):
            matched[pattern].append(path)
    return matched


def suggest(pattern: str, paths: Iterable[str]) -> tuple[str, int] | None:
    """Return a pattern near to `pattern` that matches something, with the number of paths; None
    when there is none.

    Every level of the pattern that holds no wildcard is replaced by the most similar level any path
    has; the result is returned only if it matches.

    >>> suggest("**/atention/**", ["blocks/0/attention/query/kernel", "head/kernel"])
    ('**/attention/**', 1)
    """
    paths = list(paths)
    levels = {level for path in paths for level in path.split("/")}
    words = []
    for word in re.split(r"([/{},])", pattern):
        if word and word not in levels and not re.search(r"[*?/{},]", word):
            word = closest(word, levels) or word
        words.append(word)
    near = "".join(words)
    for candidate in (near, f"**/{near}", f"{near}/**"):
        matched = matches(candidate, paths)
        if matched and candidate != pattern:
            return candidate, len(matched)
    return None


def covering(some: Sequence[str], all_paths: Collection[str]) -> str | None:
    """Return a pattern that matches the paths `some` and no other of `all_paths`; None when none
    was found.

    >>> covering(["a/0/bias", "a/1/bias"], ["a/0/bias", "a/1/bias", "a/0/kernel", "bias"])
    'a/*/bias'
    """
    if len(some) == 1:
        return some[0]
    split = [path.split("/") for path in some]
    candidates = []
    columns = [list(dict.fromkeys(column)) for column in zip(*split, strict=False)]
    if len({len(levels) for levels in split}) == 1:
        stars = []
        alternatives = []
        for column in columns:
            if len(column) == 1:
                stars += column
                alternatives += column
            else:
                stars.append("*")
                alternatives.append("{" + ",".join(column) + "}")
        candidates += ["/".join(stars), "/".join(alternatives)]
    tail: list[str] = []
    for end in zip(*(levels[::-1] for levels in split), strict=False):
        if len(set(end)) > 1:
            break
        tail.insert(0, end[0])
        candidates.append("**/" + "/".join(tail))
    candidates.append("**")
    chosen = set(some)
    covered = [path for path in all_paths if path in chosen]
    # Names may contain pattern characters, so each candidate is verified.
    for pattern in candidates:
        if len(pattern) <= MAX_LENGTH and matches(pattern, all_paths) == covered:
            return pattern
    return None
