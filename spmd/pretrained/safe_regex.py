"""Regular expressions of files that are not trusted, matched without backtracking, which such a
file could make endless.
"""

import functools
import re
from typing import Any

# or a place between two, such as ^ and \b
CHARACTER = re.compile(r"\\\D|\[\^?\]?(?:\\\D|[^\\\]])*\]|[^\\()\[\]{}|*+?]")
REPEAT = re.compile(r"([*+?]|\{(?=,?\d)(\d*)(,?)(\d*)\})\??")


class SafeRegex:
    """A regular expression of characters, classes, groups, alternatives and repetitions.

    Matching takes at most time in proportion to the expression and to the cube of a name's length.

    Raises:
      ValueError: it is no regular expression, is longer than 1,000 characters, or has something
        else, such as references to groups.

    Example:
      >>> (
      ...     SafeRegex(r".*\\.(q|v)_proj").fullmatch("h.0.q_proj"),
      ...     SafeRegex("(a+)+b").fullmatch("a" * 100),
      ... )
      (True, False)
    """

    def __init__(self, text: str):
        self._text, self._at = text, 0
        try:
            self._branches = self._parse() if len(text) <= 1000 else []
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(str(error)) from error
        if self._at < len(text):
            raise ValueError(f"ends at {self._at}")

    def _take(self, pattern: str | re.Pattern[str]) -> re.Match[str] | None:
        found = re.compile(pattern).match(self._text, self._at)
        self._at = found.end() if found else self._at
        return found

    def _parse(self) -> list[Any]:
        """The alternatives of a group: each a list of characters or groups, with the least and the
        largest number of repetitions.
        """
        branches: list[list[Any]] = [[]]
        while self._at < len(self._text) and self._text[self._at] != ")":
            if self._take(r"\|"):
                branches.append([])
            elif self._take(r"\((\?:)?(?!\?)"):
                group = self._parse()
                if not self._take(r"\)"):
                    raise ValueError("a group does not end")
                branches[-1].append((group, *self._repetitions()))
            elif found := self._take(CHARACTER):
                branches[-1].append((re.compile(found[0]), *self._repetitions()))
            else:
                raise ValueError(f"unknown at {self._at}")
        return branches

    def _repetitions(self) -> tuple[int, float]:
        found = self._take(REPEAT)
        if found is None:
            return 1, 1
        if found[1] in ("*", "+", "?"):
            return int(found[1] == "+"), 1 if found[1] == "?" else float("inf")
        least = int(found[2] or 0)
        return least, int(found[4]) if found[4] else float("inf") if found[3] else least

    def fullmatch(self, name: str) -> bool:
        """Whether the expression is all of a name, as `re.fullmatch` says."""
        known: dict[tuple[int, int], set[int]] = {}

        def once(atom: Any, starts: set[int]) -> set[int]:
            """Where a character or a group may end that begins at one of `starts`."""
            if isinstance(atom, re.Pattern):
                return {found.end() for start in starts if (found := atom.match(name, start))}
            for start in starts:
                if (id(atom), start) not in known:
                    known[id(atom), start] = set().union(
                        *(functools.reduce(repeated, branch, {start}) for branch in atom)
                    )
            return set().union(*(known[id(atom), start] for start in starts))

        def repeated(starts: set[int], part: tuple[Any, int, float]) -> set[int]:
            atom, least, most = part
            # more change nothing: each moves on, or stays where it may stay for ever
            for _ in range(min(least, len(name) + 1)):
                starts = once(atom, starts)
            ends = new = starts
            for _ in range(int(min(most - least, len(name) + 1))):
                new = once(atom, new) - ends
                ends = ends | new
            return ends

        return len(name) in once(self._branches, {0})
