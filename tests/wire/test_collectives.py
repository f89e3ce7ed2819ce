"""Collectives where they are computed in another way than by the `lax` function of the same
name.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.wire import collectives

P = jax.P


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("axes", "dim"), [(("data",), 0), (("data", "model"), 1), (("model",), 1), ((), 0)]
)
def test_reduce_scatter_over_gloo_is_the_same_sum(axes, dim, dtype, monkeypatch):
    mesh = spmd.make_mesh("data=4,model=2")
    # integers, whose sums are exact in any order
    x = jnp.asarray(np.random.default_rng(0).integers(-9, 9, (8, 16, 24)), dtype)
    spec = P(("data", "model"))

    def summed():
        inside = jax.shard_map(
            lambda part: collectives.reduce_scatter(part[0], axes, dim)[None],
            mesh=mesh,
            in_specs=spec,
            out_specs=spec,
        )
        return jax.jit(inside).lower(x).compile()

    usual = summed()
    monkeypatch.setattr(collectives, "uses_gloo", lambda: True)
    mended = summed()
    assert ("reduce-scatter" in usual.as_text()) == bool(
        axes
    ) and "reduce-scatter" not in mended.as_text()
    assert np.array_equal(np.asarray(usual(x)), np.asarray(mended(x)))
