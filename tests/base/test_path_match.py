"""Path patterns: what each sign matches, and patterns that are found rather than written."""

import pytest

from spmd.base.path_match import MAX_LENGTH, compiled, covering, matches, suggest
from spmd.errors import LayoutError

PATHS = [
    "blocks/0/attention/key/kernel",
    "blocks/0/mlp/up/kernel",
    "blocks/10/mlp/up/bias",
    "head/kernel",
    "kernel",
    "a,b/x.y",
    "a+b/x",
]


@pytest.mark.parametrize(
    "pattern, expected",
    [
        ("kernel", ["kernel"]),
        ("*/kernel", ["head/kernel"]),
        (
            "**/kernel",
            ["blocks/0/attention/key/kernel", "blocks/0/mlp/up/kernel", "head/kernel", "kernel"],
        ),
        ("blocks/**/kernel", ["blocks/0/attention/key/kernel", "blocks/0/mlp/up/kernel"]),
        ("blocks/**", PATHS[:3]),
        ("**", PATHS),
        ("blocks/?/*/*/kernel", ["blocks/0/attention/key/kernel", "blocks/0/mlp/up/kernel"]),
        ("blocks/??/**", ["blocks/10/mlp/up/bias"]),
        ("blocks/*/mlp/up/{kernel,bias}", ["blocks/0/mlp/up/kernel", "blocks/10/mlp/up/bias"]),
        ("{head,blocks/0/mlp/up}/kernel", ["blocks/0/mlp/up/kernel", "head/kernel"]),
        ("{blocks/**/up,he*}/kernel", ["blocks/0/mlp/up/kernel", "head/kernel"]),
        ("a,b/*", ["a,b/x.y"]),
        ("a,b/x.y", ["a,b/x.y"]),
        ("a,b/x?y", ["a,b/x.y"]),
        ("a,b/xzy", []),
        ("a+b/x", ["a+b/x"]),
        ("aab/x", []),
        ("ker", []),
        ("", []),
    ],
)
def test_pattern_matches(pattern, expected):
    assert matches(pattern, PATHS) == expected


def test_double_star_matches_full_levels_only_before_slash():
    assert matches("**/up/**", ["up/x", "a/up/x", "a/b/up/x/y", "sup/x"]) == [
        "up/x",
        "a/up/x",
        "a/b/up/x/y",
    ]
    assert matches("a**", ["a", "ab/c", "b/a"]) == ["a", "ab/c"]


@pytest.mark.parametrize("pattern", ["a/{b", "a}", "{a,{b,c}}", "{a}}{"])
def test_unbalanced_braces_raise(pattern):
    with pytest.raises(LayoutError, match="braces must close and cannot be nested"):
        compiled(pattern)


def test_pattern_length_is_bounded():
    assert compiled("a" * MAX_LENGTH)
    with pytest.raises(LayoutError, match=f"of {MAX_LENGTH + 1} characters: at most {MAX_LENGTH}"):
        compiled("a" * (MAX_LENGTH + 1))


@pytest.mark.parametrize(
    "pattern, near",
    [
        ("**/atention/**", ("**/attention/**", 1)),
        ("blocks/*/mpl/{up,dwon}/kernel", ("blocks/*/mlp/{up,dwon}/kernel", 1)),
        ("up/kernel", ("**/up/kernel", 1)),
        ("head", ("head/**", 1)),
        ("zzz", None),
    ],
)
def test_suggested_pattern_matches(pattern, near):
    assert suggest(pattern, PATHS) == near
    if near:
        assert len(matches(near[0], PATHS)) == near[1]


TREE = [
    f"blocks/{n}/{part}/{leaf}"
    for n in range(3)
    for part in ("key", "up")
    for leaf in ("bias", "kernel")
] + ["head/bias"]


@pytest.mark.parametrize(
    "some, pattern",
    [
        (["head/bias"], "head/bias"),
        (TREE, "**"),
        ([path for path in TREE if path.endswith("bias")], "**/bias"),
        ([path for path in TREE if "key/bias" in path], "blocks/*/key/bias"),
        (["blocks/0/up/bias", "blocks/2/up/bias"], "blocks/{0,2}/up/bias"),
        (["blocks/0/up/bias", "blocks/2/key/bias"], None),
    ],
)
def test_covering_pattern_matches_only_given_paths(some, pattern):
    assert covering(some, TREE) == pattern
    if pattern:
        assert matches(pattern, TREE) == some
