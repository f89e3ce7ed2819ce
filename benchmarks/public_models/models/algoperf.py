"""Of AlgoPerf: the Conformer with its CTC loss, and DLRM, whose table of embeddings is most of its
parameters.

The Conformer computes its spectrograms and positions in float32, whatever it is given.
"""

import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax

# a file that installing the repository writes
sys.modules["algoperf._version"] = types.SimpleNamespace(version="0")

from algoperf.workloads.criteo1tb.criteo1tb_jax.models import DLRMResNet, DlrmSmall
from algoperf.workloads.librispeech_conformer.librispeech_jax.models import (
    Conformer,
    ConformerConfig,
)

import spmd
from benchmarks.public_models.case import ROWS, STEPS, Case, bound

SAMPLES = 401 + 31 * 160  # 32 frames, of which convolutions make 8
LETTERS, LABELS, WORDS, DENSE, SPARSE = 16, 3, 8192, 13, 26
MESH = {"mesh": (("data", -1), ("model", 2)), "gradients": spmd.Gradients("all_reduce")}
TABLE = {
    "table over model": {
        "layout": spmd.Layout(params=(spmd.Rule("embedding_table", ("model",)),), **MESH),
        "mesh": "data=4,model=2",
    }
}
# Heads, and the hidden features between two dense layers, over `model`.
HIDDEN = (
    spmd.Rule("**/{query,key,value}/kernel", (None, "model")),
    spmd.Rule("**/{query,key,value}/bias", ("model",)),
    spmd.Rule("**/out/kernel", ("model",)),
    spmd.Rule("**/FeedForwardModule_*/Dense_0/kernel", (None, "model")),
    spmd.Rule("**/FeedForwardModule_*/Dense_0/bias", ("model",)),
    spmd.Rule("**/FeedForwardModule_*/Dense_1/kernel", ("model",)),
)
HEADS = {"tensor": {"layout": spmd.Layout(params=HIDDEN, **MESH), "mesh": "data=4,model=2"}}


def spoken_batches():
    """Sound and labels of different lengths, with 1 where they are padded."""
    random = np.random.default_rng(0)
    batches = []
    for _ in range(STEPS):
        ends, of_labels = (
            random.integers(SAMPLES // 2, SAMPLES, (ROWS, 1)),
            random.integers(1, LABELS + 1, (ROWS, 1)),
        )
        sound = {
            "sound": 1e3 * random.normal(size=(ROWS, SAMPLES)),
            "sound_paddings": 1.0 * (np.arange(SAMPLES) >= ends),
        }
        labels = {
            "labels": random.integers(1, LETTERS, (ROWS, LABELS)),
            "label_paddings": 1.0 * (np.arange(LABELS) >= of_labels),
        }
        batches.append({**sound, **labels})
    return batches


def clicked_batches():
    random = np.random.default_rng(0)
    shapes = (STEPS, ROWS, DENSE), (STEPS, ROWS, SPARSE)
    x = np.concatenate(
        [random.normal(size=shapes[0]), random.integers(0, 10 * WORDS, shapes[1])], axis=2
    )
    return [{"x": rows, "clicked": random.integers(0, 2, ROWS)} for rows in x]


def ctc(dropout_rate):
    """Of the workload: the sum of the losses, divided by the number of labels."""

    def loss(model, batch):
        logits, paddings = model(
            batch["sound"], batch["sound_paddings"], train=True, dropout_rate=dropout_rate
        )
        losses = optax.ctc_loss(
            jax.nn.log_softmax(logits), paddings, batch["labels"], batch["label_paddings"]
        )
        return losses.sum() / jnp.maximum((1 - batch["label_paddings"]).sum(), 1)

    return loss


def click(dropout_rate):
    def loss(model, batch):
        logits = model(batch["x"], train=True, dropout_rate=dropout_rate)
        return optax.sigmoid_binary_cross_entropy(logits[:, 0], batch["clicked"]).mean()

    return loss


def conformer(**options):
    sizes = {
        "vocab_size": LETTERS,
        "encoder_dim": 16,
        "num_attention_heads": 2,
        "num_encoder_layers": 1,
    }
    config = ConformerConfig(
        **sizes, dtype=jnp.float64, time_mask_count=2, time_mask_max_ratio=0.2, **options
    )
    return bound(Conformer(config), np.zeros((2, SAMPLES)), np.zeros((2, SAMPLES)), train=True)


def recommender(kind, **options):
    sizes = {
        "vocab_size": WORDS,
        "embed_dim": 16,
        "mlp_bottom_dims": (16, 16),
        "mlp_top_dims": (32, 32, 1),
    }
    return bound(kind(**sizes, **options), np.ones((2, DENSE + SPARSE)), train=False)


def cases():
    speech, clicks = spoken_batches(), clicked_batches()
    full = {"mesh": "data=2", "accumulate": 1}
    # `dot_interact` looks up pairs by their row, computed
    in_pairs = {"accumulate=4": ("joins rows with rows for gather", full)}
    # for statistics of all frames that are not padded
    masked = {"accumulate=4": ("joins rows with", full)}
    return [
        Case("DLRM", recommender(DlrmSmall), click(0.0), clicks, layouts=TABLE, fixes=in_pairs),
        Case(
            "DLRM ResNet, dropout",
            recommender(DLRMResNet),
            click(0.1),
            clicks,
            draws=True,
            layouts=TABLE,
        ),
        Case(
            "Conformer",
            conformer(use_specaug=False),
            ctc(0.0),
            speech,
            layouts=HEADS,
            fixes=masked,
            single=True,
        ),
        Case(
            "Conformer, dropout, SpecAug",
            conformer(),
            ctc(0.1),
            speech,
            draws=True,
            layouts=HEADS,
            fixes=masked,
            single=True,
        ),
    ]
