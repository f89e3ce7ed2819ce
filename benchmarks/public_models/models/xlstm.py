"""Of xLSTM: a language model of mLSTM blocks, from the folder without parallel wrappers. The
repository has no sLSTM blocks in JAX.
"""

import numpy as np
import optax
from xlstm_jax.models.xlstm_clean.blocks.mlstm.block import mLSTMBlockConfig
from xlstm_jax.models.xlstm_clean.blocks.mlstm.layer import mLSTMLayerConfig
from xlstm_jax.models.xlstm_clean.xlstm_lm_model import xLSTMLMModel, xLSTMLMModelConfig

import spmd
from benchmarks.public_models.case import ROWS, STEPS, Case, bound

WORDS, LENGTH = 32, 8
# Inner features over `model`: each block of 4 is projected alone, and the two heads have half of
# the features each.
TENSOR = spmd.Layout(
    mesh=(("data", -1), ("model", 2)),
    params=(
        spmd.Rule("**/proj_up/kernel", (None, "model")),
        spmd.Rule("**/{q,k,v}_proj/kernel", ("model",)),
        spmd.Rule("**/proj_down/kernel", ("model",)),
    ),
    gradients=spmd.Gradients("all_reduce"),
)
LAYOUTS = {"tensor": {"layout": TENSOR, "mesh": "data=4,model=2"}}


def texts():
    random = np.random.default_rng(0)
    return [{"tokens": random.integers(0, WORDS, (ROWS, LENGTH + 1))} for _ in range(STEPS)]


def of_next_word(model, batch):
    logits = model(batch["tokens"][:, :-1], train=True)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:]).mean()


def language_model(dropout, **options):
    layer = mLSTMLayerConfig(num_heads=2, round_proj_up_to_multiple_of=16, **options)
    sizes = {"vocab_size": WORDS, "embedding_dim": 16, "num_blocks": 2, "context_length": LENGTH}
    config = xLSTMLMModelConfig(
        mlstm_block=mLSTMBlockConfig(layer),
        **sizes,
        dropout=dropout,
        add_embedding_dropout=True,
        dtype="float64",
    )
    return bound(xLSTMLMModel(config), np.zeros((2, LENGTH), int))


def cases():
    return [
        Case("xLSTM", language_model(0.0), of_next_word, texts(), layouts=LAYOUTS),
        Case(
            "xLSTM, `nn.vmap` over queries and keys, dropout",
            language_model(0.1, vmap_qk=True),
            of_next_word,
            texts(),
            draws=True,
        ),
    ]
