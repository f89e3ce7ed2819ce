"""Bounds of comparisons that hold on every processor: elements of float32 results have no narrow relative bound of their own."""

import ast
from pathlib import Path

import pytest

TESTS = sorted(Path(__file__).parent.rglob("*.py"))
FLOAT64 = 1e-9  # a bound up to here is for arithmetic in float64, or for equal bits
FLOAT32 = 1e-5  # and one from here on leaves room for the rounding of float32
BOUNDS = {  # the names of both bounds, and the relative one that counts where none is written
    "assert_allclose": ("rtol", "atol", 1e-7),
    "allclose": ("rtol", "atol", 1e-5),
    "isclose": ("rtol", "atol", 1e-5),
    "approx": ("rel", "abs", 1e-6),
}


def number(node, constants):
    """Return the number that an expression writes, directly or as a constant of the file; None where it is computed."""
    node = constants.get(node.id) if isinstance(node, ast.Name) else node
    try:
        return float(ast.literal_eval(node))
    except (TypeError, ValueError):
        return None


def constants_of(tree):
    assignments = [node for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)]
    return {node.targets[0].id: node.value for node in assignments}


def narrow_bounds(source):
    """Return the lines of comparisons whose only bound is a narrow relative one."""
    tree = ast.parse(source)
    constants = constants_of(tree)
    lines = []
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in BOUNDS):
            continue
        relative_name, absolute_name, default = BOUNDS[node.func.attr]
        written = {keyword.arg: number(keyword.value, constants) for keyword in node.keywords}
        relative = written.get(relative_name, default)
        has_absolute = written.get(absolute_name, 0) != 0
        if relative is not None and FLOAT64 < relative < FLOAT32 and not has_absolute:
            lines.append(node.lineno)
    return lines


def test_no_comparison_depends_on_the_processor():
    wrong = [f"{path.name}:{line}" for path in TESTS for line in narrow_bounds(path.read_text(encoding="utf-8"))]
    assert not wrong, f"use tests.compare.assert_close, which bounds the norm of the difference, or an absolute bound: {wrong}"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("np.testing.assert_allclose(a, b, rtol=1e-6)", True),
        ("np.testing.assert_allclose(a, b)", True),
        ("np.testing.assert_allclose(a, b, rtol=2e-6, atol=0)", True),
        ("LITTLE = 3e-6\nnp.allclose(a, b, rtol=LITTLE)", True),
        ("assert a == pytest.approx(b)", True),
        ("assert a == pytest.approx(b, rel=1e-8)", True),
        ("np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)", False),
        ("np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * np.abs(b).max())", False),
        ("np.testing.assert_allclose(a, b, rtol=1e-5)", False),
        ("np.testing.assert_allclose(a, b, rtol=2**-7)", False),
        ("np.allclose(a, b)", False),
        ("assert a == pytest.approx(b, rel=1e-12)", False),
        ("assert a == pytest.approx(b, abs=0.1)", False),
    ],
)
def test_narrow_bounds_are_found(source, found):
    assert bool(narrow_bounds(source)) == found
