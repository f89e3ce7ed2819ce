"""A small model under a parameter server, and how it is trained and compared."""

import jax
import numpy as np
import optax
from flax import nnx

import spmd
from spmd.base.tree import flatten

ROWS, FEATURES, CLASSES = 32, 12, 5
PLACEMENTS = ("sliced", "round_robin", "greedy_bytes", "largest_first")
MOMENTUM, ADAMW = optax.sgd(0.1, momentum=0.9), optax.adamw(1e-2)


class MLP(nnx.Module):
    """33 hidden units: no number of workers divides them."""

    def __init__(self, rngs, param_dtype="float32"):
        self.hidden = nnx.Linear(FEATURES, 33, rngs=rngs, param_dtype=param_dtype)
        self.out = nnx.Linear(33, CLASSES, rngs=rngs, param_dtype=param_dtype)

    def __call__(self, x):
        return self.out(nnx.relu(self.hidden(x)))


def data(rows=ROWS, seed=0):
    x = np.random.default_rng(seed).normal(size=(rows, FEATURES)).astype(np.float32)
    return {"x": x, "y": x[:, :CLASSES].argmax(1).astype(np.int32)}


def served(codec="exact", error_feedback=False, weights="exact", **server):
    gradients = spmd.Gradients(
        "parameter_server", codec, error_feedback=error_feedback, weights=weights
    )
    return spmd.Layout(gradients=gradients, parameter_server=spmd.ParameterServer(**server))


ALL_REDUCE = spmd.Layout(gradients=spmd.Gradients("all_reduce"))


def unfused(optimizer=MOMENTUM):
    """The same on gradients that are computed before the update; fused with it, as servers never
    do, their mean is rounded otherwise.
    """

    def update(grads, *rest, **named):
        return optimizer.update(jax.lax.optimization_barrier(grads), *rest, **named)

    return optax.GradientTransformationExtraArgs(optimizer.init, update)


def trainer_of(layout, workers=8, optimizer=MOMENTUM, **options):
    mesh = spmd.make_mesh(f"data={workers}", devices=jax.devices()[:workers])
    loss = options.pop("loss", spmd.losses.cross_entropy)
    return spmd.Trainer(
        lambda: MLP(nnx.Rngs(0)),
        loss=loss,
        optimizer=optimizer,
        mesh=mesh,
        layout=layout,
        **options,
    )


def train(trainer, steps=4):
    """Losses, and the parameters as the model has them, after steps on whole batches."""
    state, losses = trainer.init(), []
    for number in range(steps):
        state, metrics = trainer.step(state, data(seed=number))
        losses.append(metrics["loss"])
    return losses, params_of(trainer, state)


def params_of(trainer, state):
    return {
        path: np.asarray(leaf)
        for path, leaf in flatten(nnx.to_pure_dict(nnx.state(trainer.rebuild(state)))).items()
    }


def equal(left, right):
    return left[0] == right[0] and all(
        np.array_equal(left[1][path], right[1][path]) for path in left[1]
    )


def far(left, right):
    return np.max([np.abs(left[1][path] - right[1][path]).max() for path in left[1]])
