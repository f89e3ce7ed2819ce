"""Of jimm: a vision transformer, and CLIP. The repository keeps its parameters and computes in
float64 where asked to.
"""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jimm.models.clip import CLIP
from jimm.models.vit import VisionTransformer

import spmd
from benchmarks.public_models.case import ROWS, STEPS, Case

DOUBLE = {"dtype": jnp.float64, "param_dtype": jnp.float64}
WORDS, LENGTH = 32, 8
# Heads and hidden features over `model`, as in the library's `tensor_parallel`: the repository's
# parameters have no logical axis names.
TENSOR = spmd.Layout(
    mesh=(("data", -1), ("model", 2)),
    params=(
        spmd.Rule("**/attn/{query,key,value}/kernel", (None, "model")),
        spmd.Rule("**/attn/{query,key,value}/bias", ("model",)),
        spmd.Rule("**/attn/out/kernel", ("model",)),
        spmd.Rule("**/mlp/layers/0/kernel", (None, "model")),
        spmd.Rule("**/mlp/layers/0/bias", ("model",)),
        spmd.Rule("**/mlp/layers/3/kernel", ("model",)),
    ),
    gradients=spmd.Gradients("all_reduce"),
)
LAYOUTS = {"tensor": {"layout": TENSOR, "mesh": "data=4,model=2"}}
JOINED = {"accumulate=4": ("the loss joins rows with rows", {"mesh": "data=2", "accumulate": 1})}


def image_batches(size=16):
    random = np.random.default_rng(0)
    return [
        {"image": random.normal(size=(ROWS, size, size, 3)), "label": random.integers(0, 10, ROWS)}
        for _ in range(STEPS)
    ]


def captioned_batches():
    """Images with texts, each of which ends at its largest token, as CLIP's tokenizer has it."""
    random = np.random.default_rng(1)
    batches = [
        {"image": batch["image"], "text": random.integers(1, WORDS - 1, (ROWS, LENGTH))}
        for batch in image_batches()
    ]
    for batch in batches:
        batch["text"][np.arange(ROWS), random.integers(2, LENGTH, ROWS)] = WORDS - 1
    return batches


def of_class(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(
        model(batch["image"]), batch["label"]
    ).mean()


def contrastive(model, batch):
    """Of CLIP's paper (arXiv:2103.00020, figure 3): each image is to find its text among all of the
    batch, and each text its image.
    """
    logits = model(batch["image"], batch["text"])
    labels = jnp.arange(logits.shape[0])
    of_images = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    of_texts = optax.softmax_cross_entropy_with_integer_labels(logits.T, labels).mean()
    return (of_images + of_texts) / 2


def vit(dropout):
    sizes = {
        "num_classes": 10,
        "img_size": 16,
        "patch_size": 8,
        "num_layers": 2,
        "num_heads": 2,
        "mlp_dim": 32,
        "hidden_size": 16,
    }
    return VisionTransformer(**sizes, **DOUBLE, dropout_rate=dropout, rngs=nnx.Rngs(0))


def clip():
    # a head for every 64
    images = {
        "image_resolution": 16,
        "vision_layers": 1,
        "vision_width": 128,
        "vision_patch_size": 8,
    }
    texts = {
        "context_length": LENGTH,
        "vocab_size": WORDS,
        "transformer_width": 32,
        "transformer_heads": 2,
        "transformer_layers": 2,
    }
    return CLIP(**images, **texts, **DOUBLE, rngs=nnx.Rngs(0))


def cases():
    return [
        Case("ViT", vit(0.0), of_class, image_batches(), layouts=LAYOUTS),
        Case("ViT, dropout", vit(0.1), of_class, image_batches(), draws=True, layouts=LAYOUTS),
        Case("CLIP", clip(), contrastive, captioned_batches(), layouts=LAYOUTS, fixes=JOINED),
    ]
