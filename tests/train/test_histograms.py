"""Histograms count as numpy does, with the same edges, for any values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import spmd
from spmd.errors import OptionError
from spmd.train.histograms import BINS, check_countable, count_tree, read_counts

RANDOM = np.random.default_rng(0)
VALUES = {
    "normal": RANDOM.normal(size=(40, 30)),
    "far from 0": 1000 + RANDOM.normal(size=999) * 1e-3,
    "of all magnitudes": np.exp(RANDOM.normal(size=2000) * 20) * RANDOM.choice([-1, 1], 2000),
    "near the largest": RANDOM.uniform(-1, 1, 500) * 3.4e38,
    "near the smallest": RANDOM.uniform(0.1, 1, 500) * RANDOM.choice([-1, 1], 500) * 1e-36,
    "one value": np.full(17, -3.7),
    "two neighbours": np.array([1, np.nextafter(np.float32(1), np.float32(2))]),
    "powers of two": 2.0 ** np.arange(-3, 4),
    "zeros": np.zeros((3, 4)),
    "empty": np.zeros((0, 3)),
    "not finite": np.array([np.nan, 1, np.inf, -np.inf, -2, np.nan, 0.5, np.inf]),
    "nothing finite": np.full(5, np.nan),
    "a scalar": np.float32(0.3),
}


def histogram_of(x):
    return read_counts("of", jax.jit(lambda x: count_tree({"x": x}, {}))(x), {})["of/x"]


def equals_numpy(histogram, x):
    x = np.asarray(x, np.float32).ravel()
    finite, edges = x[np.isfinite(x)].astype(np.float64), histogram.edges
    assert len(histogram.counts) <= BINS
    inside = finite[finite < edges[-1]]  # numpy's last bin has its upper edge
    assert np.histogram(inside, edges)[0].tolist() == histogram.counts and len(inside) == len(
        finite
    )
    assert (histogram.nan, histogram.inf) == (np.isnan(x).sum(), np.isinf(x).sum())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", VALUES)
@pytest.mark.sampled(quick=14)
def test_counts_equal_those_of_numpy(name, dtype):
    with np.errstate(over="ignore"):
        x = jnp.asarray(np.asarray(VALUES[name], np.float32)).astype(dtype)
    histogram = histogram_of(x)
    equals_numpy(histogram, x.astype(jnp.float32))
    used = np.flatnonzero(histogram.counts)
    assert not len(used) or (used[0], used[-1]) == (0, len(histogram.counts) - 1)


def test_width_is_as_fine_as_64_bins_allow():
    histogram = histogram_of(jnp.asarray(VALUES["normal"], jnp.float32))
    assert (
        BINS // 2 <= len(histogram.counts)
        and np.log2(histogram.width) % 1 == 0
        and histogram.low % histogram.width == 0
    )


@pytest.mark.sampled(quick=5)
@pytest.mark.parametrize(
    "spec",
    [(), ("data",), (None, "data", "model"), ("model", None, "data"), (("data", "model"),)],
    ids=str,
)
def test_layers_of_a_sharded_stack_are_counted_where_they_are(spec):
    mesh = spmd.make_mesh("data=4,model=2")
    stack = (
        RANDOM.normal(size=(8, 8, 16)).astype(np.float32)
        * np.arange(8, dtype=np.float32)[:, None, None]
    )
    placed = jax.device_put(stack, NamedSharding(mesh, PartitionSpec(*spec)))
    count = (
        jax.jit(
            lambda x: count_tree({"x": x}, {"x": 8}),
            out_shardings=NamedSharding(mesh, PartitionSpec()),
        )
        .lower(placed)
        .compile()
    )
    gathered = [
        line for line in count.as_text().splitlines() if "all-gather" in line and "[8,8,16]" in line
    ]
    histograms = read_counts("parameters", count(placed), {"x": 8})
    assert list(histograms) == [f"parameters/x/{layer}" for layer in range(8)] and not gathered
    for layer, histogram in enumerate(histograms.values()):
        equals_numpy(histogram, stack[layer])


def test_arrays_whose_counts_would_overflow_are_refused():
    shape = jax.ShapeDtypeStruct((2**17, 2**15), jnp.float32)
    check_countable({"stack": shape}, {"stack": 2**17})
    with pytest.raises(
        OptionError, match=r"watch: table float32\[131072, 32768\] has 4,294,967,296 elements"
    ):
        check_countable({"table": shape}, {})
