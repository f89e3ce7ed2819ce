"""The difference of two trees is that of their most different arrays, whatever these hold."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.compare import assert_close, relative_difference


def test_relative_difference_is_the_largest_of_a_tree():
    expected = {
        "a": np.array([3.0, 4.0]),
        "b": jnp.array([1.0, 0.0], jnp.bfloat16),
        "count": 2,
        "losses": [1.0, 2.0],
    }
    assert relative_difference(expected, expected) == 0
    assert relative_difference({**expected, "a": np.array([3.0, 4.5]), "count": 3}, expected) == 0.5
    assert relative_difference({**expected, "losses": [1.0, 7.0]}, expected) == pytest.approx(
        5**0.5, abs=1e-12
    )
    assert relative_difference(np.ones(2), np.zeros(2)) == np.inf
    assert relative_difference(np.array([np.inf, 1.0]), np.array([np.inf, 1.0])) == 0


@pytest.mark.parametrize("where", ["actual", "expected", "both"])
@pytest.mark.parametrize("order", ["ab", "ba"])
def test_nan_is_close_to_nothing(order, where):
    good, bad = (
        {name: np.array([1.0, value if name == "b" else 1.0]) for name in order}
        for value in (1.0, np.nan)
    )
    actual, expected = (good if where == "expected" else bad), (good if where == "actual" else bad)
    assert np.isnan(relative_difference(actual, expected))
    assert not relative_difference(actual, expected) <= 1e9
    with pytest.raises(AssertionError, match=r"\{'b': nan\}"):
        assert_close(actual, expected, 1e9)


def test_imaginary_parts_count():
    assert relative_difference(np.array([3 + 4j]), np.array([3.0])) == pytest.approx(
        4 / 3, abs=1e-12
    )
    assert relative_difference(jnp.array([3 + 4j]), jnp.array([3 - 4j])) == pytest.approx(
        8 / 5, abs=1e-12
    )


def test_trees_of_other_arrays_are_compared_to_nothing():
    for other in ({"a": np.ones(2)}, {"a": np.ones(3), "b": np.ones(3)}):
        with pytest.raises(AssertionError):
            relative_difference(other, {"a": np.ones(3)})
