"""Shared by the tests of layout tables: a model that layouts are applied to, and the errors raised
when they do not fit.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmd
from spmd.errors import LayoutError


def dense(rows, columns):
    return {"kernel": jnp.zeros((rows, columns)), "bias": jnp.zeros((columns,))}


def apply(params, x):
    for layer in params.values():
        x = x @ layer["kernel"] + layer["bias"]
    return x


MODEL = spmd.FunctionalModel(lambda key: {"down": dense(64, 256), "up": dense(256, 64)}, apply)
X, Y = np.ones((8, 64), np.float32), np.zeros(8, np.int32)
MESH = "data=4"


def fits(layout, mesh=MESH):
    """Everything that is checked before the first step; a text becomes a file first."""
    if isinstance(layout, str):
        with open("mine.toml", "w") as file:
            file.write(layout)
        layout = "mine.toml"
    mesh = spmd.make_mesh(mesh, devices=jax.devices()[: spmd.MeshSpec.parse(mesh).size])
    trainer = spmd.Trainer(
        MODEL, loss=spmd.losses.cross_entropy, optimizer=optax.sgd(0.1), mesh=mesh, layout=layout
    )
    trainer.prepare((X, Y))
    return trainer


def error_text(layout, mesh=MESH):
    """The error, as text."""
    with pytest.raises(LayoutError) as caught:
        fits(layout, mesh)
    return str(caught.value)


def unreadable(*problems, where="mine.toml"):
    """The error of a text that cannot be read."""
    return "\n\n".join(
        [f"{where} cannot be read\n{len(problems)} problem{'s' * (len(problems) > 1)}:", *problems]
    )
