"""Path patterns: `*` within a level, `**` over levels, `{a,b}` for alternatives, `?` for one character."""

import functools
import re
from collections.abc import Collection, Iterable, Sequence

from spmd.errors import LayoutError, closest

MAX_LENGTH = 400  # a pattern is data from a file: bounded, and compiled to a regex without nested repeats


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
        raise LayoutError(f"path pattern of {len(pattern)} characters: at most {MAX_LENGTH} are allowed.", fix="several rules.")
    if re.search(r"[{}]", re.sub(r"\{[^{}]*\}", "", pattern)):
        raise LayoutError(f'path "{pattern}": braces must close and cannot be nested.', fix='such as "**/{up,down}/kernel".')
    regex, inside_braces = [], False
    for token in re.split(r"(\*\*/|\*\*|[*?{},])", pattern):
        regex.append("|" if token == "," and inside_braces else _REGEX_OF_TOKEN.get(token, re.escape(token)))
        inside_braces = token == "{" or (inside_braces and token != "}")
    return re.compile("".join(regex))


_REGEX_OF_TOKEN = {"**/": "(?:[^/]+/)*", "**": ".*", "*": "[^/]*", "?": "[^/]", "{": "(?:", "}": ")"}


def matches(pattern: str, paths: Iterable[str]) -> list[str]:
    """The paths that the pattern matches, in order."""
    match = compiled(pattern).fullmatch
    return [path for path in paths if match(path)]


def suggest(pattern: str, paths: Iterable[str]) -> tuple[str, int] | None:
    """A pattern near to `pattern` that matches something, with how many; None when there is none.

    Every level of the pattern that holds no wildcard is replaced by the most similar level any path has; the result is
    returned only if it matches.

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
    """A pattern that matches the paths `some` and no other of `all_paths`; None when none was found.

    >>> covering(["a/0/bias", "a/1/bias"], ["a/0/bias", "a/1/bias", "a/0/kernel", "bias"])
    'a/*/bias'
    """
    if len(some) == 1:
        return some[0]
    split, candidates = [path.split("/") for path in some], []
    columns = [list(dict.fromkeys(column)) for column in zip(*split, strict=False)]
    if len({len(levels) for levels in split}) == 1:
        candidates.append("/".join(column[0] if len(column) == 1 else "*" for column in columns))
        candidates.append("/".join(column[0] if len(column) == 1 else "{" + ",".join(column) + "}" for column in columns))
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
    return next((pattern for pattern in candidates if len(pattern) <= MAX_LENGTH and matches(pattern, all_paths) == wanted), None)
