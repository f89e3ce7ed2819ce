"""What is read of the rows of a batch in a traced loss, and the loss of the full batch by workers,
against plain JAX on one device.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import spmd
from spmd.train.batch_rows.compute import Compute
from spmd.train.batch_rows.kinds import Fixed, PerRow, Summed, is_mean
from spmd.train.batch_rows.row_arrays import Place
from spmd.train.batch_rows.walk import Held, read_loss

ROWS, PART, FEATURES, CLASSES = 16, 4, 4, 3
CE = optax.softmax_cross_entropy_with_integer_labels


def data(seed=0):
    random = np.random.default_rng(seed)
    return {
        "x": random.normal(size=(ROWS, FEATURES)).astype("float32"),
        "y": random.integers(0, CLASSES, ROWS).astype("int32"),
        "reward": random.normal(size=ROWS).astype("float32"),
        "tokens": random.integers(0, CLASSES, (ROWS, 6)).astype("int32"),
        "mask": (np.arange(6) < random.integers(1, 6, ROWS)[:, None]).astype("float32"),
    }


def traces(loss, arrays, part=PART):
    """Of the loss on all rows, and on those of a part."""
    return [
        jax.make_jaxpr(loss)(*[jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype) for x in arrays])
        for rows in (ROWS, part)
    ]


def is_proved(loss, *names):
    arrays = [data()[name] for name in names]
    first, second = traces(loss, arrays)
    found, _ = read_loss(first, second, [Held(PerRow(0))] * len(arrays), ROWS, PART)
    return is_mean([held.kind for held in found], first.out_avals[0].shape)


def by_workers(loss, arrays, part=PART):
    """Outputs and gradients of their sum by the arrays of floats, computed by four workers that
    hold four rows each.

    `part`: the rows of the second trace.
    """
    floats = tuple(n for n, x in enumerate(arrays) if x.dtype == np.float32)

    def on_worker(*arrays):
        compute = Compute(
            ROWS, part, here=PART, place=Place(("data",), ROWS // PART, jax.lax.axis_index("data"))
        )
        first, second = traces(loss, arrays, part)

        def value(*chosen):
            inputs = list(arrays)
            for number, array in zip(floats, chosen, strict=True):
                inputs[number] = array
            found = compute.closed(first, second, [Held(PerRow(0), True, x) for x in inputs])
            shapes = [aval.shape for aval in first.out_avals]
            outputs = [
                compute.coerced(held, Fixed(), shape, shape)
                for held, shape in zip(found, shapes, strict=True)
            ]
            # what the mean over workers is taken of
            scaled = [
                held.array * (1 if not isinstance(held.kind, PerRow | Summed) else compute.parts)
                for held in found
            ]
            return sum(jnp.sum(x) for x in scaled), outputs

        grads, outputs = jax.grad(value, argnums=tuple(range(len(floats))), has_aux=True)(
            *(arrays[n] for n in floats)
        )
        return [grad / compute.parts for grad in grads], outputs

    mesh = spmd.make_mesh("data=4", devices=jax.devices()[:4])
    rows, same = PartitionSpec("data"), PartitionSpec()
    return jax.jit(
        jax.shard_map(on_worker, mesh=mesh, in_specs=rows, out_specs=(rows, same), check_vma=False)
    )(*arrays)


def plainly(loss, arrays):
    floats = tuple(n for n, x in enumerate(arrays) if x.dtype == np.float32)

    def value(*arrays):
        outputs = loss(*arrays)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return sum(map(jnp.sum, outputs)), outputs

    return jax.grad(value, argnums=floats, has_aux=True)(*arrays)


@jax.custom_vjp
def clipped_together(x):
    """What goes back is divided by its norm over all rows."""
    return x


clipped_together.defvjp(lambda x: (x, None), lambda _, g: (g / jnp.linalg.norm(g),))


@jax.custom_vjp
def noisy_together(x, key):
    """Every row has numbers of its own."""
    return x * jax.random.normal(key, x.shape)


noisy_together.defvjp(
    lambda x, key: (noisy_together(x, key), jax.random.normal(key, x.shape)),
    lambda noise, g: (g * noise, np.zeros((), jax.dtypes.float0)),
)


@jax.custom_vjp
def scaled_rows(x):
    """Row by row, with gradients of its own that join none."""
    return jnp.sin(x)


scaled_rows.defvjp(lambda x: (scaled_rows(x), x), lambda x, g: (2 * g * jnp.cos(x),))


@jax.custom_jvp
def centred_tangents(x):
    """Its own gradient joins rows, too."""
    return x


centred_tangents.defjvp(lambda x, t: (x[0], t[0] - t[0].mean(0)))


def neighbours(x):
    """Products of each entry and the next one of a row; JAX has no derivative of them."""
    return jax.lax.reduce_window(
        jax.lax.stop_gradient(x), 1.0, lambda a, b: a * b, (1, 2), (1, 1), "SAME"
    )


def grown(count):
    """A number that a loop without data finds from another."""
    return jax.lax.while_loop(
        lambda at: at[0] < count, lambda at: (at[0] + 1, at[1] * 1.1), (0, 1.0)
    )[1]


def views(x):
    """Differences of two views of each row, which go through a function together."""
    both = jnp.tanh(jnp.concatenate([jnp.sin(x), jnp.cos(x)]) @ W / 9)
    first, second = jnp.split(both, 2)
    return jnp.square(first - second) + both[len(x) :] * both[: len(x)]


def at_kinks(x):
    """Where the derivative of a function of JAX is not that of its code: of rows, of a sum over
    rows, and of both.
    """

    def zero(z):
        return z - jax.lax.stop_gradient(z)

    mean = x.mean(0)
    of_sums = (
        jax.nn.softplus(zero(mean))
        + jax.nn.relu(zero(mean)) * jnp.cos(mean)
        + jax.nn.log_sigmoid(zero(mean))
    )
    return (
        jax.nn.softplus(zero(x)) * jnp.sin(x)
        + 5 * jax.nn.relu(zero(x))
        + of_sums * x
        + jax.nn.relu6(zero(x * mean))
    ).mean()


def looked_up(x, **mode):
    """A few entries of all rows, of which one is outside."""
    return jnp.square(x.T.at[:, jnp.array([1, 14, 99])].get(**mode)).sum()


W = np.arange(FEATURES * CLASSES, dtype=np.float32).reshape(FEATURES, CLASSES)


def attention(x, keys=None, rows=None, **options):
    """Of tokens [rows, 6], in tiles; `rows` is the dim of the rows in queries, keys and values."""
    query, key = (
        jnp.moveaxis(y[..., None, None], 0, rows or 0) for y in (x, x if keys is None else keys)
    )
    return spmd.nn.attention(query, key, key, implementation="chunked", **options).mean()


MEANS = {
    "one value per row": (lambda x, y: CE(x @ W, y), "x", "y"),
    "their mean": (lambda x, y: CE(x @ W, y).mean(), "x", "y"),
    "a sum over the number of rows": (lambda x: jnp.square(x).sum() / len(x), "x"),
    "a pair with the number of rows": (lambda x: (jnp.square(x).sum(), 1.0 * x.size), "x"),
    "a pair with a sum of weights": (
        lambda x, m: ((x.sum(1)[:, None] * m).sum(), m.sum()),
        "x",
        "mask",
    ),
    "a pair with a sum of ones": (lambda x: (x.sum(), jnp.ones_like(x).sum()), "x"),
    "with a penalty of weights": (lambda x: jnp.square(x).mean() + (W**2).sum(), "x"),
    "a product of two columns": (lambda x, r: (x[:, 0] @ r) / len(r), "x", "reward"),
    "a loop over time": (
        lambda t: jax.lax.scan(lambda c, x: (c + x, c * x), jnp.zeros(t.shape[0]), t.T)[0].mean(),
        "mask",
    ),
    "row by row": (lambda x: jax.vmap(lambda row: jnp.sort(row)[::-1] @ row)(x), "x"),
    "flattened": (lambda m: m.reshape(-1).reshape(m.shape).T.mean(), "mask"),
    "recomputed": (lambda x: jax.checkpoint(jnp.sin)(x).mean(), "x"),
    "a branch": (lambda x: jax.lax.cond(W.sum() > 0, jnp.sin, jnp.cos, x).mean(), "x"),
    "a function of JAX with a gradient of its own": (lambda x: jax.nn.relu(x).mean(), "x"),
    "a gradient of its own, row by row": (lambda x: scaled_rows(x).mean(), "x"),
    "a Fourier transform of each row": (lambda x: jnp.square(jnp.abs(jnp.fft.fft(x))).mean(), "x"),
    "tiles of each row": (lambda x: (jnp.tile(x, (1, 3)) * jnp.arange(12.0)).mean(), "x"),
    "all rows, tiled": (lambda x: jnp.tile(x, (2, 1)).mean(), "x"),
    "products of neighbours": (lambda x: (x * neighbours(x)).mean(), "x"),
    "attention": (lambda m: attention(m, causal=True, key_mask=m > 0, soft_cap=2.0), "mask"),
    "attention with a mask for all": (
        lambda m: attention(m, mask=np.tri(6, dtype=bool), segment_ids=m.astype(int)),
        "mask",
    ),
    "an embedding": (lambda t, x: jnp.asarray(W)[t].mean() + x.mean(), "tokens", "x"),
    "looked up by rows": (
        lambda m, y: jax.nn.log_softmax(m)[jnp.arange(len(y)), y].mean(),
        "mask",
        "y",
    ),
    "looked up in one column": (
        lambda m: jax.nn.log_softmax(m)[jnp.arange(len(m)), 0].mean(),
        "mask",
    ),
    "looked up by tokens": (
        lambda m, t: jnp.stack([m, 2 * m, jnp.sin(m)], -1)[
            jnp.arange(len(m))[:, None], jnp.arange(6), t
        ].mean(),
        "mask",
        "tokens",
    ),
    "two views in one array": (lambda x: views(x).mean(), "x"),
    "one column is written": (
        lambda x: (
            jnp.zeros(x.shape).at[:, 1].set(jnp.sin(x[:, 0])).mean() + x.at[:, 2].add(1.0).mean()
        ),
        "x",
    ),
    "each row is written at its number": (
        lambda x, y: jnp.square(x.at[jnp.arange(len(y)), y].add(-0.3)).mean(),
        "x",
        "y",
    ),
    "each row is written at a place of its own": (
        lambda x, y: jax.vmap(lambda row, n: row.at[n].set(0.0))(x, y).mean(),
        "x",
        "y",
    ),
}
OTHERS = {
    "a sum": (lambda x: jnp.square(x).sum(), "x"),
    "a sum over a number": (lambda x: jnp.square(x).sum() / 16, "x"),
    "rows times their number": (lambda x: x.sum(1) * len(x), "x"),
    "rows by their place": (lambda r: r * jnp.linspace(0.0, 1.0, len(r)), "reward"),
    "rows in another order": (lambda r: r[::-1], "reward"),
    "rows by their neighbours": (lambda r: r - jnp.roll(r, 1), "reward"),
    "sorted rows": (lambda r: jnp.sort(r), "reward"),
    "running sums": (lambda r: jnp.cumsum(r), "reward"),
    "centred rows": (lambda r: r - r.mean(), "reward"),
    "a variance": (lambda x: jnp.var(x), "x"),
    "the square of a mean": (lambda x: x.mean() ** 2, "x"),
    "the largest row": (lambda r: r.max(), "reward"),
    "a ratio of sums": (lambda x, m: x.sum() / m.sum(), "x", "mask"),
    "a pair with a number": (lambda x: (x.sum(), 64.0), "x"),
    "products of rows": (lambda x: (x @ x.T).mean(), "x"),
    "a loop over rows": (lambda r: jax.lax.scan(lambda c, x: (c * x, c), 1.0, r)[0], "reward"),
    "a branch by the data": (lambda x: jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x).mean(), "x"),
    "rows over at least 8": (lambda x: x.mean(1).sum() / max(len(x), 8), "x"),
    "another temperature for few rows": (lambda x: (x * (0.1 if len(x) >= 8 else 1.0)).mean(), "x"),
    "a loop as long as there are rows": (lambda x: x.mean() * grown(len(x)), "x"),
    "an entry by the number of rows": (
        lambda x: x.mean() * jnp.linspace(1.0, 2.0, 64)[len(x)],
        "x",
    ),
    "more ones than rows": (lambda x: x.mean() * jnp.ones(len(x) + 1).sum(), "x"),
    "ones for all pairs": (lambda x: x.mean() * jnp.ones(len(x) ** 2).sum(), "x"),
    "a gradient of its own": (lambda x: clipped_together(x).mean(), "x"),
    "tangents of its own": (lambda x: jnp.square(centred_tangents(x)).mean(), "x"),
    "attention between rows": (lambda m: attention(m, rows=1), "mask"),
    "attention to other rows": (lambda m: attention(m, m[::-1]), "mask"),
    "attention with a bias for each place": (
        lambda m: attention(m, bias=jnp.arange(len(m))[:, None, None, None] * 1.0),
        "mask",
    ),
    "attention with numbers of its own": (
        lambda m: attention(m, dropout=0.5, dropout_key=jax.random.key(0)),
        "mask",
    ),
    "random numbers in a function with a gradient of its own": (
        lambda x: noisy_together(x, jax.random.key(0)).mean(),
        "x",
    ),
    "its own random numbers": (
        lambda x: (x * jax.random.normal(jax.random.key(0), x.shape)).mean(),
        "x",
    ),
    "looked up at other rows": (
        lambda m, y: jax.nn.log_softmax(m)[jnp.arange(len(y))[::-1], y].mean(),
        "mask",
        "y",
    ),
    "in-batch negatives": (
        lambda x: CE(jnp.sin(x) @ jnp.roll(jnp.cos(x), 1, axis=1).T, jnp.arange(len(x))).mean(),
        "x",
    ),
    "the nearest other row": (
        lambda x: jnp.where(jnp.eye(len(x)) > 0, -1e9, x @ x.T).max(1).mean(),
        "x",
    ),
    "distances": (lambda x: jnp.sqrt(((x[:, None] - x[None]) ** 2).sum(-1) + 1e-3).mean(), "x"),
    "pairs of a class": (
        lambda x, y: ((x @ x.T) * (y[:, None] == y)).sum() / (y[:, None] == y).sum(),
        "x",
        "y",
    ),
    "functions of JAX with gradients of their own": (at_kinks, "x"),
    "a Fourier transform of a sum": (
        lambda x: jnp.square(jnp.abs(jnp.fft.fft(x.sum(0)))).mean(),
        "x",
    ),
    "a Fourier transform over rows": (
        lambda x: jnp.square(jnp.abs(jnp.fft.fft(x, axis=0)))[1].mean(),
        "x",
    ),
    "a hinge over pairs": (lambda x: jax.nn.relu(0.5 + x @ x.T - (x * x).sum(1)).mean(), "x"),
    "ranks": (lambda r: (r * jnp.argsort(jnp.argsort(r))).mean(), "reward"),
    "a median": (lambda r: jnp.median(r) ** 2, "reward"),
    "a covariance": (lambda x: (jnp.cov(x.T) ** 2).sum(), "x"),
    "weights of classes": (
        lambda x, y: (
            CE(x[:, :3], y) * (1 / jnp.maximum(jax.nn.one_hot(y, 3).sum(0), 1))[y]
        ).mean(),
        "x",
        "y",
    ),
    "a part for each row of a class": (
        lambda r, y: (r / jnp.zeros(3).at[y].add(1.0)[y]).sum(),
        "reward",
        "y",
    ),
    "a part of more than a class": (
        lambda r, y: (r / jnp.ones(3).at[y].add(1.0)[y]).sum(),
        "reward",
        "y",
    ),
    "sums of classes": (lambda x, y: (jax.ops.segment_sum(x, y, 3) ** 2).sum(), "x", "y"),
    "counts of classes": (
        lambda x, y: (CE(x[:, :3], y) / (jnp.bincount(y, length=3) + 1)[y]).mean(),
        "x",
        "y",
    ),
    "sums of classes, on other numbers": (
        lambda r, y: jnp.square(jnp.asarray(W[0]).at[y].add(r)).sum(),
        "reward",
        "y",
    ),
    "pairs by columns": (lambda x: jax.nn.logsumexp(jnp.sin(x) @ jnp.cos(x).T, axis=0).mean(), "x"),
    "one value for each column of pairs": (
        lambda x: (jnp.sin(x) @ jnp.cos(x).T).sum(0) * jnp.arange(len(x)),
        "x",
    ),
    "in-batch negatives of both sides": (
        lambda x: CE((jnp.sin(x) @ jnp.cos(x).T).T, jnp.arange(len(x))).mean(),
        "x",
    ),
    "entries of pairs": (
        lambda x: jnp.take_along_axis(
            (jnp.sin(x) @ x.T).T, (jnp.arange(len(x))[:, None] + 3) % len(x), axis=1
        ).mean(),
        "x",
    ),
    "a few rows, and one outside": (lambda x: looked_up(x, mode="fill", fill_value=7.0), "x"),
    "a few rows, and the last one": (lambda x: looked_up(x, mode="clip"), "x"),
    "a mean, or another number": (lambda x, y: jnp.where(y.sum() > 3, x.mean(), 2.0), "x", "y"),
    "a key for each row, which is split": (
        lambda r: (
            r
            * jax.vmap(lambda k: jax.random.normal(jax.random.split(k)[1]))(
                jax.random.split(jax.random.key(3), len(r))
            )
        ).mean(),
        "reward",
    ),
    "a bound on a mean": (lambda r: jnp.maximum(r.mean(), 0.1) + jnp.sqrt((r**2).mean()), "reward"),
    "a softmax over rows": (lambda r: (jax.nn.softmax(r) * r).sum(), "reward"),
    "a logsumexp over rows": (lambda x: jax.nn.logsumexp(x, axis=0).sum(), "x"),
    "a masked mean": (lambda x, m: (x.sum(1)[:, None] * m).sum() / m.sum(), "x", "mask"),
    "a mean where": (lambda m: jnp.mean(jnp.sin(m), where=m > 0), "mask"),
    "a masked mean of flattened tokens": (
        lambda m: (jnp.sin(m).reshape(-1) * m.reshape(-1)).sum() / m.reshape(-1).sum(),
        "mask",
    ),
    "centred in a loop": (
        lambda x: jax.lax.scan(lambda c, _: (c - 0.1 * c.mean(0), c.std()), x, None, length=4)[
            1
        ].sum(),
        "x",
    ),
    "centred and recomputed": (
        lambda x: jax.checkpoint(lambda x: jnp.tanh(x - x.mean(0)))(x).std(),
        "x",
    ),
    "pairs of neighbours": (lambda x: (x[::2] * x[1::2]).sum(-1).mean(), "x"),
    "halves": (lambda x: ((x[: len(x) // 2] - x[len(x) // 2 :]) ** 2).mean(), "x"),
    "rows in a random order": (
        lambda x: (0.3 * x + 0.7 * jax.random.permutation(jax.random.key(3), x)).max(),
        "x",
    ),
    "a key for each row": (
        lambda r: (
            r * jax.vmap(jax.random.uniform)(jax.random.split(jax.random.key(3), len(r)))
        ).mean(),
        "reward",
    ),
    "a key for the number of each row": (
        lambda r: (
            r
            * jax.vmap(lambda n: jax.random.uniform(jax.random.fold_in(jax.random.key(3), n)))(
                jnp.arange(len(r))
            )
        ).mean(),
        "reward",
    ),
    "a key for each time step": (
        lambda m: (
            m.T
            * jax.vmap(
                lambda t: jax.random.normal(jax.random.fold_in(jax.random.key(3), t), m.shape[:1])
            )(jnp.arange(6))
        ).mean(),
        "mask",
    ),
    "a beta distribution": (
        lambda r: (r * jax.random.beta(jax.random.key(3), 1.5, 1.0, r.shape)).mean(),
        "reward",
    ),
}


@pytest.mark.parametrize("case", MEANS)
def test_mean_over_rows_is_known(case):
    assert is_proved(*MEANS[case])


@pytest.mark.parametrize("case", OTHERS)
def test_what_joins_rows_is_known(case):
    assert not is_proved(*OTHERS[case])


@pytest.mark.sampled(quick=48)
# another number than the rows of a worker stands for two rows where there is one
@pytest.mark.parametrize("part", [PART, 8])
@pytest.mark.parametrize("case", [*OTHERS, *MEANS])
def test_workers_compute_what_one_device_does(case, part):
    loss, *names = {**MEANS, **OTHERS}[case]
    arrays = [data()[name] for name in names]
    for ours, right in zip(
        *map(jax.tree.leaves, (by_workers(loss, arrays, part), plainly(loss, arrays))), strict=True
    ):
        assert np.shape(ours) == np.shape(right)
        np.testing.assert_allclose(ours, right, rtol=1e-5, atol=1e-6 * max(1, np.abs(right).max()))


@pytest.mark.parametrize("dtype", ["uint8", "int32", "bfloat16"])
@pytest.mark.parametrize("function", [jnp.max, jnp.min])
def test_largest_and_smallest_of_rows_are_those_of_any_dtype(function, dtype):
    rows = jnp.arange(ROWS).astype(dtype).at[5].set(jnp.iinfo(dtype).min if dtype == "int32" else 0)
    _, (found,) = by_workers(
        lambda r, x: function(r).astype("float32") + 0 * x.sum(), [rows, data()["reward"]]
    )
    assert found == np.asarray(function(rows)).astype("float32")


def test_equal_entries_share_the_gradient_of_a_maximum():
    """As in JAX, whichever workers have them."""
    rows = np.zeros(ROWS, np.float32)
    rows[[1, 2, 9]] = 3.0
    (grad,), (largest,) = by_workers(lambda r: r.max(), [rows])
    np.testing.assert_allclose(grad, jax.grad(lambda r: r.max())(rows), atol=1e-7)
    assert largest == 3.0


def test_little_is_sent_of_pairs():
    """The features of one side, and no scores."""
    x = data()["x"]
    first, second = traces(OTHERS["in-batch negatives"][0], [x])
    _, shares = read_loss(first, second, [Held(PerRow(0), True)], ROWS, PART)
    assert [(share.how, share.bytes) for share in shares] == [("rows", x.nbytes)]


def test_no_scores_are_sent_of_pairs_by_columns():
    """Sums, maxima and a few entries of columns, beside the features of one side."""
    x = data()["x"]
    first, second = traces(OTHERS["in-batch negatives of both sides"][0], [x])
    _, shares = read_loss(first, second, [Held(PerRow(0), True)], ROWS, PART)
    assert [share.bytes for share in shares if share.how == "rows"] == [x.nbytes]
    assert all(share.bytes <= 4 * ROWS for share in shares if share.how != "rows")
