"""Of jax-diffusion-transformer: DiT and its diffusion loss. The repository embeds times in float32;
all else is of float64 here.

Each row of the loss has a time and noise of its own.
"""

import jax
import jax.numpy as jnp
import numpy as np
from diffusion_transformer import DiT
from schedulers import GaussianDiffusion

from benchmarks.public_models.case import ROWS, STEPS, Case, bound

TIMES, SIZE, CLASSES = 50, 8, 10
SCHEDULE = GaussianDiffusion(TIMES)


def image_batches():
    random = np.random.default_rng(0)
    return [
        {
            "image": random.normal(size=(ROWS, SIZE, SIZE, 3)),
            "label": random.integers(0, CLASSES, ROWS),
        }
        for _ in range(STEPS)
    ]


def dit(dropped):
    """A model that drops this fraction of labels."""
    sizes = {
        "patch_size": 4,
        "hidden_size": 16,
        "depth": 2,
        "num_heads": 2,
        "mlp_ratio": 2,
        "num_classes": CLASSES,
    }
    labels = jnp.zeros(1, jnp.int32)
    return bound(
        DiT(**sizes, class_dropout_prob=dropped),
        jnp.zeros((1, SIZE, SIZE, 3)),
        labels,
        labels,
        train=True,
    )


def of_noise(model, batch, time, noise):
    noisy = SCHEDULE.q_sample(batch["image"], time, noise)
    return jnp.mean((model(noisy, time, batch["label"], train=True) - noise) ** 2)


def diffusion(model, batch, rng):
    """Draws for all rows at once, as the repository does."""
    of_time, of_normal = jax.random.split(rng)
    time = jax.random.randint(of_time, (batch["image"].shape[0],), 0, TIMES)
    return of_noise(model, batch, time, jax.random.normal(of_normal, batch["image"].shape))


def diffusion_by_rows(model, batch, rng, one_after_another=False):
    """Draws with a key for each row."""

    def drawn(key):
        of_time, of_normal = jax.random.split(key)
        return jax.random.randint(of_time, (), 0, TIMES), jax.random.normal(
            of_normal, batch["image"].shape[1:]
        )

    keys = jax.random.split(rng, batch["image"].shape[0])
    return of_noise(
        model, batch, *(jax.lax.map(drawn, keys) if one_after_another else jax.vmap(drawn)(keys))
    )


def diffusion_one_by_one(model, batch, rng):
    return diffusion_by_rows(model, batch, rng, one_after_another=True)


def cases():
    return [
        Case("DiT", dit(0.0), diffusion, image_batches(), draws=True),
        Case("DiT, a key for each row", dit(0.0), diffusion_by_rows, image_batches(), draws=True),
        Case(
            "DiT, a key for each row, one by one",
            dit(0.0),
            diffusion_one_by_one,
            image_batches(),
            draws=True,
        ),
        Case("DiT, label dropout", dit(0.1), diffusion, image_batches(), draws=True),
    ]
