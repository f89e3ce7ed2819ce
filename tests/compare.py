"""Compare what two programs computed.

Two programs round differently, and one program does so on two processors. An element that is a
small difference of large numbers may then be off by any part of itself, so the bound is on the norm
of an array's difference over the norm of the array.
"""

import jax
import numpy as np


def relative_differences(actual, expected) -> dict[str, float]:
    """Return for each array of a tree the norm of `actual - expected` over the norm of `expected`,
    by path.
    """
    actual, expected = _arrays(actual), _arrays(expected)
    assert actual.keys() == expected.keys(), sorted(actual.keys() ^ expected.keys())
    return {
        path: _relative_difference(actual[path], array, path) for path, array in expected.items()
    }


def relative_difference(actual, expected) -> float:
    """Return the largest of `relative_differences`; NaN if one is."""
    # max() keeps a NaN only where it comes first
    return float(np.max([*relative_differences(actual, expected).values()]))


def assert_close(actual, expected, tolerance: float = 1e-6) -> None:
    """Raise unless each array of a tree has a relative difference of at most `tolerance`."""
    differences = relative_differences(actual, expected)
    assert differences, "no arrays"
    # not (a <= b) rather than a > b: a NaN is close to nothing
    wrong = {
        path: difference for path, difference in differences.items() if not difference <= tolerance
    }
    assert not wrong, f"|actual - expected| / |expected| is above {tolerance}: {wrong}"


def _arrays(tree) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(jax.device_get(tree), is_leaf=_is_list_of_numbers)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): _wide(np.asarray(leaf))
        for path, leaf in leaves
    }


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)


def _is_list_of_numbers(tree) -> bool:
    return (
        isinstance(tree, list)
        and jax.tree_util.all_leaves(tree)
        and all(np.ndim(item) == 0 for item in tree)
    )


def _relative_difference(actual: np.ndarray, expected: np.ndarray, path: str) -> float:
    expected = np.broadcast_to(expected, actual.shape) if expected.ndim == 0 else expected
    assert actual.shape == expected.shape, f"{path}: {actual.shape} and {expected.shape}"
    if np.array_equal(actual, expected):  # infinities too
        return 0.0
    norm = float(np.linalg.norm(expected))
    return float(np.linalg.norm(actual - expected)) / norm if norm else np.inf
