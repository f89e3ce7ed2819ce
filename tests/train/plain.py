"""The plain loop on one device that every layout is held against: `nnx`, `jax.value_and_grad` and
`optax`, nothing of ours.

The optimizer clips by global norm and carries momentum: the norm is right only if it is taken over
global arrays, and the layout shards the moments. It is not Adam, which divides each gradient by its
own size and so makes rounding noise as large as any gradient.
"""

import functools

import jax
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

from examples import char_lstm, digits_cnn, gpt, spatial_cnn
from tests.compare import assert_close

STEPS, ROWS, LENGTH = 5, 16, 16
MODELS = {
    "cnn": lambda: digits_cnn.CNN(channels=8, width=32, rngs=nnx.Rngs(0)),
    "lstm": lambda: char_lstm.CharLSTM(vocab=128, width=32, rngs=nnx.Rngs(0)),
    "tiles": lambda: spatial_cnn.Net(channels=8, rngs=nnx.Rngs(0)),
    "gpt": lambda: gpt.GPT(
        vocab=128, width=32, depth=2, heads=4, length=LENGTH, dropout=0.0, rngs=nnx.Rngs(0)
    ),
}
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9))


def batches(name):
    random = np.random.default_rng(0)
    if name == "cnn":
        digits = load_digits()
        rows = [random.permutation(len(digits.target))[:ROWS] for _ in range(STEPS)]
        return [
            {
                "image": (digits.images[r] / 16).astype("float32")[..., None],
                "label": digits.target[r].astype("int32"),
            }
            for r in rows
        ]
    if name == "tiles":

        def images():
            return random.normal(size=(ROWS, 16, 16, 3)).astype("float32")

        return [
            {"image": images(), "label": random.integers(0, 2, ROWS).astype("int32")}
            for _ in range(STEPS)
        ]
    tokens = [random.integers(0, 128, (ROWS, LENGTH + 1)).astype("int32") for _ in range(STEPS)]
    return [{"tokens": t[:, :-1], "targets": t[:, 1:]} for t in tokens]


@functools.cache
def reference(name):
    """Losses and parameters of the plain one-device loop."""
    with nnx.use_eager_sharding(False):
        model = MODELS[name]()
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    params, rest = nnx.to_pure_dict(params), nnx.to_pure_dict(rest)

    def loss(params, rest, batch):
        model = nnx.merge(graphdef, params, rest)
        inputs, labels = (
            (batch["tokens"], batch["targets"])
            if "tokens" in batch
            else (batch["image"], batch["label"])
        )
        value = optax.softmax_cross_entropy_with_integer_labels(model(inputs), labels).mean()
        return value, nnx.to_pure_dict(nnx.split(model, nnx.Param, ...)[2])

    @jax.jit
    def step(params, rest, opt, batch):
        (value, rest), grads = jax.value_and_grad(loss, has_aux=True)(params, rest, batch)
        updates, opt = OPTIMIZER.update(grads, opt, params)
        return optax.apply_updates(params, updates), rest, opt, value

    opt, losses = OPTIMIZER.init(params), []
    for batch in batches(name):
        params, rest, opt, value = step(params, rest, opt, batch)
        losses.append(float(value))
    return losses, leaves(params), leaves(rest)


def leaves(tree):
    return {
        jax.tree_util.keystr(k, simple=True, separator="/"): np.asarray(v)
        for k, v in jax.tree_util.tree_leaves_with_path(tree)
        if not jax.dtypes.issubdtype(v.dtype, jax.dtypes.prng_key)
    }


def equal(state, losses, name, tolerance=1e-5):
    """Raise unless these losses, and the state after them, are the plain loop's."""
    wanted, params, stats = reference(name)
    assert_close(losses, wanted[: len(losses)], tolerance)
    ours = leaves(state.params) | leaves(state.stats)
    assert ours.keys() >= params.keys()
    # the rest are counts of random numbers
    assert_close(ours, {path: (params | stats)[path] for path in ours}, tolerance)
