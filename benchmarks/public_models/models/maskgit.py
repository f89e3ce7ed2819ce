"""Of maskgit: its tokenizer, a VQ-VAE, and its transformer, which predicts tokens that are masked.

The repository keeps the parts of the quantizer's loss in float32; all else is of float64 here.
"""

import jax
import jax.numpy as jnp
import numpy as np
from maskgit.configs import vqgan_config
from maskgit.libml import losses, mask_schedule
from maskgit.nets.maskgit_transformer import Transformer
from maskgit.nets.vqgan_tokenizer import VQVAE

from benchmarks.public_models.case import ROWS, STEPS, Case, bound

SIZE = 8
TOKENS, CODES = 12, 16


def image_batches():
    random = np.random.default_rng(0)
    return [{"image": random.uniform(size=(ROWS, SIZE, SIZE, 3))} for _ in range(STEPS)]


def tokenizer(**changed):
    """A tokenizer of the repository's configuration, made small."""
    config = vqgan_config.get_config()
    config.vqvae.update(
        {
            "codebook_size": CODES,
            "filters": 32,
            "num_res_blocks": 1,
            "channel_multipliers": [1, 1],
            "embedding_dim": 8,
            **changed,
        }
    )
    images = {"image": jnp.zeros((1, SIZE, SIZE, 3))}
    module = VQVAE(config, train=True, dtype=jnp.float64)
    return bound(module, images, method=reconstructed)


def reconstructed(module, images):
    quantized, of_quantizer = module.encode(images)
    return module.decode(quantized), of_quantizer["quantizer_loss"]


def of_images(model, batch):
    """What reconstruction misses, and the loss of the quantizer."""
    quantized, of_quantizer = model.encode(batch)
    return (
        jnp.mean((model.decode(quantized) - batch["image"]) ** 2) + of_quantizer["quantizer_loss"]
    )


def token_batches():
    random = np.random.default_rng(0)
    return [{"tokens": random.integers(0, CODES, (ROWS, TOKENS))} for _ in range(STEPS)]


def transformer(dropout):
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return bound(
        Transformer(CODES + 1, max_position_embeddings=TOKENS, **sizes, **rates),
        jnp.zeros((1, TOKENS), jnp.int32),
    )


def of_masked(model, batch, rng):
    """Each row masks tokens of its own, and as many as it draws."""
    tokens = batch["tokens"]
    of_ratio, of_order = jax.random.split(rng)
    masked = mask_schedule.schedule(jax.random.uniform(of_ratio, (tokens.shape[0],)), TOKENS)
    order = jnp.argsort(jnp.argsort(jax.random.uniform(of_order, tokens.shape)))
    mask = order < jnp.maximum(1, jnp.floor(masked * TOKENS))[:, None]
    logits = model(jnp.where(mask, CODES, tokens), deterministic=False)
    weights = mask.astype(logits.dtype)
    return losses.weighted_sequence_cross_entropy_loss(
        labels=tokens, logits=logits, weights=weights, label_smoothing=0.1
    )


def cases():
    fixes = {
        "accumulate=4": (
            r"a sum over rows for log (.|\n)*fix: accumulate=1",
            {"mesh": "data=2", "accumulate": 1},
        )
    }
    return [
        Case("VQ-VAE", tokenizer(entropy_loss_ratio=0.0), of_images, image_batches()),
        Case("VQ-VAE, entropy of the codes", tokenizer(), of_images, image_batches(), fixes=fixes),
        Case("transformer, dropout", transformer(0.1), of_masked, token_batches(), draws=True),
    ]
