"""Of S5: a classifier of sequences by state spaces, `flax.linen.vmap` over rows with batch
normalization over its axis.
"""

import jax
import jax.numpy as jnp
import numpy as np

jnp.DeviceArray = jax.Array  # an annotation of S5; JAX has removed the name

from s5.seq_model import BatchClassificationModel
from s5.ssm import init_S5SSM
from s5.ssm_init import make_DPLR_HiPPO

import spmd
from benchmarks.public_models.case import ROWS, STEPS, Case, bound

LENGTH, CHANNELS, CLASSES, WIDTH, STATES = 12, 3, 10, 16, 8
OF_PARTS = "statistics of its own for each microbatch"
# The complex states over `model`, of which each is a recurrence of its own.
TENSOR = spmd.Layout(
    mesh=(("data", -1), ("model", 2)),
    params=(
        spmd.Rule("**/{B,Lambda_re,Lambda_im,log_step}", ("model",)),
        spmd.Rule("**/{C1,C2}", (None, "model")),
    ),
    gradients=spmd.Gradients("all_reduce"),
)
LAYOUTS = {"states over model": {"layout": TENSOR, "mesh": "data=4,model=2"}}


def sequence_batches():
    random = np.random.default_rng(0)
    x, label = (STEPS, ROWS, LENGTH, CHANNELS), (STEPS, ROWS)
    return [
        {"x": x, "label": label}
        for x, label in zip(random.normal(size=x), random.integers(0, CLASSES, label), strict=True)
    ]


def of_class(model, batch):
    logits = model(batch["x"], np.ones(batch["x"].shape[:2]))
    return -jnp.take_along_axis(logits, batch["label"][:, None], axis=1).mean()


def classifier(**options):
    """A model with conjugate pairs of states, as its authors train it on images."""
    values, _, _, vectors, _ = make_DPLR_HiPPO(2 * STATES)
    values, vectors = values[:STATES], vectors[:, :STATES]
    ssm = init_S5SSM(
        H=WIDTH,
        P=STATES,
        Lambda_re_init=values.real,
        Lambda_im_init=values.imag,
        V=vectors,
        Vinv=vectors.conj().T,
        C_init="trunc_standard_normal",
        discretization="zoh",
        dt_min=0.001,
        dt_max=0.1,
        conj_sym=True,
        clip_eigs=True,
        bidirectional=True,
    )
    sizes = {"d_output": CLASSES, "d_model": WIDTH, "n_layers": 2}
    module = BatchClassificationModel(
        ssm, **sizes, padded=False, activation="half_glu1", prenorm=True, batchnorm=True, **options
    )
    return bound(module, np.zeros((2, LENGTH, CHANNELS)), np.ones((2, LENGTH)))


def cases():
    batches = sequence_batches()
    return [
        Case(
            "S5, batch norm",
            classifier(dropout=0.0),
            of_class,
            batches,
            layouts=LAYOUTS,
            left_out={"accumulate=4": OF_PARTS},
        ),
        Case(
            "S5, batch norm, dropout",
            classifier(dropout=0.1),
            of_class,
            batches,
            layouts=LAYOUTS,
            draws=True,
        ),
    ]
