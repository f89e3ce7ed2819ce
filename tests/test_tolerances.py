"""Bounds of comparisons that hold on every processor: elements of float32 results have no narrow
relative bound of their own.
"""

import ast
import operator
from pathlib import Path

import pytest

TESTS = sorted(Path(__file__).parent.rglob("*.py"))
# A relative bound that is written and is at most this is for arithmetic of Python and numpy in
# float64, whose roundings of 1.1e-16 are the same on every processor. A result in float32, rounded
# to 6e-8, would need equal bits.
FLOAT64 = 1e-9
FLOAT32 = 1e-5  # a bound from here on leaves room for the rounding of float32
NOTHING = 1e-20  # an absolute bound up to here allows no difference of numbers that tests compare
# the names of both bounds, the place of the relative one among the arguments, and which one counts
# where none is written
BOUNDS = {
    "assert_allclose": ("rtol", "atol", 2, 1e-7),
    "allclose": ("rtol", "atol", 2, 1e-5),
    "isclose": ("rtol", "atol", 2, 1e-5),
    "math.isclose": ("rel_tol", "abs_tol", 2, 1e-9),
    "approx": ("rel", "abs", 1, 1e-6),
}
OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}


def number(node, constants):
    """Return the number that an expression of numbers and of constants of the file comes to; None
    for any other expression.
    """
    match node:
        case ast.Constant(int() | float() as value):
            return float(value)
        case ast.Name(name) if name in constants:
            return number(constants[name], constants)
        case ast.UnaryOp(ast.USub(), operand):
            return number(ast.BinOp(ast.Constant(0), ast.Sub(), operand), constants)
        case ast.BinOp(left, operation, right) if type(operation) in OPERATIONS:
            numbers = [number(left, constants), number(right, constants)]
            return None if None in numbers else OPERATIONS[type(operation)](*numbers)
    return None


def constants_of(tree):
    assignments = [
        node
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    ]
    return {node.targets[0].id: node.value for node in assignments}


def compared_by(function, imported):
    """Return the key in `BOUNDS` of a called function; None if it is another function."""
    name = (
        ast.unparse(function)
        if isinstance(function, ast.Attribute)
        else imported.get(getattr(function, "id", None), "")
    )
    return (
        name if name in BOUNDS else next((key for key in BOUNDS if name.endswith(f".{key}")), None)
    )


def narrow_bounds(source):
    """Return the lines of comparisons whose only bound is a narrow relative one."""
    tree = ast.parse(source)
    constants = constants_of(tree)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    imported = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in imports
        for alias in node.names
    }
    lines = []
    for node in ast.walk(tree):
        key = compared_by(node.func, imported) if isinstance(node, ast.Call) else None
        if key is None:
            continue
        relative_name, absolute_name, place, default = BOUNDS[key]
        in_order = dict(zip((relative_name, absolute_name), node.args[place:], strict=False))
        named = {keyword.arg: keyword.value for keyword in node.keywords}
        written = {name: number(value, constants) for name, value in (in_order | named).items()}
        relative, absolute = written.get(relative_name, default), written.get(absolute_name, 0)
        if None in (relative, absolute) or absolute > NOTHING:
            continue
        is_for_float64 = relative_name in written and relative <= FLOAT64
        if relative < FLOAT32 and not is_for_float64:
            lines.append(node.lineno)
    return lines


def test_no_comparison_depends_on_the_processor():
    wrong = [
        f"{path.name}:{line}"
        for path in TESTS
        for line in narrow_bounds(path.read_text(encoding="utf-8"))
    ]
    assert not wrong, (
        "use tests.compare.assert_close, which bounds the norm of the difference, or an absolute "
        f"bound: {wrong}"
    )


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("np.testing.assert_allclose(a, b, rtol=1e-6)", True),
        ("np.testing.assert_allclose(a, b)", True),
        ("np.testing.assert_allclose(a, b, rtol=2e-6, atol=0)", True),
        ("LITTLE = 3e-6\nnp.allclose(a, b, rtol=LITTLE)", True),
        ("assert a == pytest.approx(b)", True),
        ("assert a == pytest.approx(b, rel=1e-8)", True),
        ("np.testing.assert_allclose(a, b, 1e-6)", True),
        ("jnp.isclose(a, b, 1e-6, 0)", True),
        ("np.allclose(a, b, rtol=1e-6, atol=1e-30)", True),
        ("np.testing.assert_allclose(a, b, rtol=2**-20)", True),
        ("EPS = 2.0**-23\nTWICE = 2 * EPS\nnp.allclose(a, b, rtol=TWICE, atol=-0.0)", True),
        ("from pytest import approx\nassert a == approx(b)", True),
        ("from pytest import approx as near\nassert a == near(b, 1e-6)", True),
        ("from numpy.testing import assert_allclose\nassert_allclose(a, b)", True),
        ("math.isclose(a, b)", True),
        ("math.isclose(a, b, rel_tol=1e-6)", True),
        ("from math import isclose\nisclose(a, b)", True),
        ("np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)", False),
        ("np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * np.abs(b).max())", False),
        ("np.testing.assert_allclose(a, b, rtol=1e-5)", False),
        ("np.testing.assert_allclose(a, b, rtol=2**-7)", False),
        ("np.allclose(a, b)", False),
        ("assert a == pytest.approx(b, rel=1e-12)", False),
        ("assert a == pytest.approx(b, abs=0.1)", False),
        ("np.testing.assert_allclose(a, b, 1e-3)", False),
        ("np.testing.assert_allclose(a, b, 1e-6, 1e-6)", False),
        ("assert a == pytest.approx(b, 1e-3)", False),
        ("EPS = 2.0**-10\nnp.allclose(a, b, rtol=EPS / 2)", False),
        ("np.allclose(a, b, rtol=tolerance)", False),
        ("math.isclose(a, b, rel_tol=1e-9)", False),
        ("from numpy import isclose\nisclose(a, b)", False),
        ("from tests.mine import approx_by\napprox_by(a, b)", False),
    ],
)
def test_narrow_bounds_are_found(source, found):
    assert bool(narrow_bounds(source)) == found
