"""Of big_vision: vision transformers with the mixup of its trainer, and SigLIP with its sigmoid
loss.
"""

import functools
import sys
import types

# which looks for tensorflow itself, and is to find none
import flax.training.checkpoints  # noqa: F401
import jax
import jax.numpy as jnp
import numpy as np

import spmd
from benchmarks.public_models.case import ROWS, STEPS, Case, bound


def stub(name):
    """Let `import` find an empty module of this name."""
    module = sys.modules[name] = types.ModuleType(name)
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, module)


# which reads and writes files: no model does
for name in ("tensorflow", "tensorflow.io", "tensorflow.io.gfile"):
    stub(name)

from big_vision import utils
from big_vision.models import vit
from big_vision.models.proj.image_text import two_towers

# The text tower and the head of attention leave the dtype of their products at float32.
vit.Encoder, vit.MlpBlock = (
    functools.partial(module, dtype_mm="float64") for module in (vit.Encoder, vit.MlpBlock)
)
WORDS, LENGTH = 32, 8
SIZES = {"patch_size": (8, 8), "width": 16, "depth": 2, "mlp_dim": 32, "num_heads": 2}
JOINED = {"accumulate=4": ("the loss joins rows with rows", {"mesh": "data=2", "accumulate": 1})}


def tensor_parallel(before=()):
    """Heads and hidden features over `model`; `before` of these dims stands a stack's."""
    rules = {
        "**/MultiHeadDotProductAttention_0/{query,key,value}/kernel": (None, "model"),
        "**/MultiHeadDotProductAttention_0/{query,key,value}/bias": ("model",),
        "**/MultiHeadDotProductAttention_0/out/kernel": ("model",),
        "**/MlpBlock_0/Dense_0/kernel": (None, "model"),
        "**/MlpBlock_0/Dense_0/bias": ("model",),
        "**/MlpBlock_0/Dense_1/kernel": ("model",),
    }
    params = tuple(spmd.Rule(path, (*before, *spec)) for path, spec in rules.items())
    layout = spmd.Layout(
        mesh=(("data", -1), ("model", 2)), params=params, gradients=spmd.Gradients("all_reduce")
    )
    return {"tensor": {"layout": layout, "mesh": "data=4,model=2"}}


def image_batches():
    random = np.random.default_rng(0)
    labels = np.eye(10)[random.integers(0, 10, (STEPS, ROWS))]
    return [
        {"image": random.normal(size=(ROWS, 16, 16, 3)), "labels": labels[step]}
        for step in range(STEPS)
    ]


def captioned_batches():
    random = np.random.default_rng(1)
    return [
        {"image": batch["image"], "labels": random.integers(0, WORDS, (ROWS, LENGTH))}
        for batch in image_batches()
    ]


def sigmoid_of_classes(model, batch):
    logits, _ = model(batch["image"], train=True)
    return utils.sigmoid_xent(logits=logits, labels=batch["labels"])


def mixed_up(model, batch, rng):
    """Of the trainer: each image is mixed with its neighbour in the batch, all in one
    proportion.
    """
    _, (images, labels), _ = utils.mixup(rng, batch["image"], batch["labels"], p=0.2)
    logits, _ = model(images, train=True)
    return utils.softmax_xent(logits=logits, labels=labels)


def sigmoid_of_pairs(model, batch):
    """Of SigLIP (arXiv:2303.15343, algorithm 1): whether an image and a text are a pair, for all
    pairs of the batch.
    """
    images, texts, out = model(batch["image"], batch["labels"], train=True)
    logits = images @ texts.T * out["t"] + out["b"]
    signs = 2 * jnp.eye(logits.shape[0]) - 1
    return -jax.nn.log_sigmoid(signs * logits).sum(axis=1).mean()


def image_model(**options):
    module = vit.Model(num_classes=10, head_zeroinit=False, dtype_mm="float64", **SIZES, **options)
    return bound(module, np.zeros((1, 16, 16, 3)))


def siglip():
    text = {
        "vocab_size": WORDS,
        **{name: size for name, size in SIZES.items() if name != "patch_size"},
    }
    start = {"temperature_init": 10.0, "bias_init": -10.0}
    module = two_towers.Model(
        image={"pool_type": "map", "dtype_mm": "float64", **SIZES},
        text=text,
        out_dim=(None, 16),
        **start,
    )
    return bound(module, np.zeros((1, 16, 16, 3)), np.zeros((1, LENGTH), int))


def cases():
    return [
        Case(
            "ViT, mixup",
            image_model(),
            mixed_up,
            image_batches(),
            draws=True,
            layouts=tensor_parallel(),
        ),
        Case(
            "ViT, scanned, dropout",
            image_model(scan=True, dropout=0.1),
            sigmoid_of_classes,
            image_batches(),
            draws=True,
            layouts=tensor_parallel((None,)),
        ),
        Case(
            "SigLIP",
            siglip(),
            sigmoid_of_pairs,
            captioned_batches(),
            layouts=tensor_parallel(),
            fixes=JOINED,
        ),
    ]
