"""Losses as public training code writes them, in float64, on layouts that see rows in parts: each
step's losses and parameters are those of plain JAX on one device that sees the full batch. `-s`
prints a table of all cases.

Three batches in two orders: an ordinary one first, and first one that hides what joins the rows,
such as a batch without padding.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.assignment
import pytest

import spmd
from spmd.errors import LossError

ROWS, FEATURES, OUTPUTS, TOKENS, FRAMES, ITEMS, QUERIES, OBJECTS, DRAWS = 32, 6, 8, 5, 7, 6, 4, 3, 3
RATE = 0.05
CE = optax.losses.softmax_cross_entropy_with_integer_labels
QUEUE = np.random.default_rng(99).normal(size=(12, OUTPUTS))


def init(key):
    keys = jax.random.split(key, 2)
    return {
        "w1": jax.random.normal(keys[0], (FEATURES, 16)) / 2,
        "b1": jnp.zeros(16),
        "w2": jax.random.normal(keys[1], (16, OUTPUTS)) / 2,
        "b2": jnp.zeros(OUTPUTS),
        "scale": jnp.full(8, 1.0),
    }


def apply(params, x):
    """Features [..., 8] of an array [..., 6]; of "scale", the logarithm of an inverse
    temperature.
    """
    if isinstance(x, str):
        return params[x][0]
    return jnp.tanh(x @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]


MODEL = spmd.FunctionalModel(init, apply)


def data(seed):
    """An ordinary batch, with all that any of the losses reads."""
    random = np.random.default_rng(seed)

    def mask(most, least=0):
        return (np.arange(most) < random.integers(least, most + 1, ROWS)[:, None]).astype("float64")

    return {
        "x": random.normal(size=(ROWS, FEATURES)),
        "x2": random.normal(size=(ROWS, FEATURES)),
        "y": random.integers(0, OUTPUTS, ROWS).astype("int32"),
        "binary": (random.random(ROWS) < 0.3).astype("int32"),
        "target": random.normal(size=(ROWS, OUTPUTS)),
        "teacher": random.normal(size=(ROWS, OUTPUTS)),
        "advantage": random.normal(size=ROWS) * np.linspace(0.2, 3.0, ROWS)
        + np.linspace(-1, 1, ROWS),
        "old": -np.abs(random.normal(size=ROWS)) - 1,
        "time": random.exponential(size=ROWS),
        "weight": random.random(ROWS) + 0.1,
        "user": random.integers(0, 9, ROWS).astype("int32"),
        "text": random.normal(size=(ROWS, TOKENS, FEATURES)),
        "labels": np.where(
            mask(TOKENS) > 0, random.integers(0, OUTPUTS, (ROWS, TOKENS)), -100
        ).astype("int32"),
        "frames": random.normal(size=(ROWS, FRAMES, FEATURES)),
        "frames_padding": 1 - mask(FRAMES, 6),
        "phones": random.integers(1, OUTPUTS, (ROWS, 3)).astype("int32"),
        "phones_padding": 1 - mask(3, 1),
        "items": random.normal(size=(ROWS, ITEMS, FEATURES)),
        "relevance": random.integers(0, 4, (ROWS, ITEMS)).astype("float64"),
        "listed": mask(ITEMS),
        "queries": random.normal(size=(ROWS, QUERIES, FEATURES)),
        "boxes": random.random((ROWS, OBJECTS, 4)),
        "classes": random.integers(0, 3, (ROWS, OBJECTS)).astype("int32"),
        "present": mask(OBJECTS),
        "rewards": random.normal(size=(ROWS, FRAMES)),
        "pixels": (random.random((ROWS, FRAMES)) < 0.4).astype("float64"),
    }


# the losses ---------------------------------------------------------------------------------------


def unit(z):
    return z / jnp.linalg.norm(z, axis=-1, keepdims=True)


def detr(model, batch):
    """Objects matched with queries by the Hungarian algorithm in each image, per object of the
    batch.
    """
    out = model(batch["queries"])
    log_p, boxes = jax.nn.log_softmax(out[..., :4]), jax.nn.sigmoid(out[..., 4:])
    rows = jnp.arange(len(out))[:, None]
    cost = -jnp.take_along_axis(jnp.exp(log_p), batch["classes"][:, None, :], axis=-1)
    cost = cost + 5 * jnp.abs(boxes[:, :, None] - batch["boxes"][:, None]).sum(-1)
    cost = jax.lax.stop_gradient(jnp.where(batch["present"][:, None] > 0, cost, 0.0))
    query, found = jax.vmap(optax.assignment.hungarian_algorithm)(cost)
    present = batch["present"][rows, found]
    wanted = (
        jnp.full(out.shape[:2], 3, "int32")
        .at[rows, query]
        .set(jnp.where(present > 0, batch["classes"][rows, found], 3))
    )
    weight = jnp.where(wanted == 3, 0.1, 1.0)
    of_class = (
        -(jnp.take_along_axis(log_p, wanted[..., None], axis=-1)[..., 0] * weight).sum()
        / weight.sum()
    )
    of_boxes = (
        jnp.abs(boxes[rows, query] - batch["boxes"][rows, found]).sum(-1) * present
    ).sum() / jnp.maximum(present.sum(), 1.0)
    return of_class + 5 * of_boxes


def ctc(model, batch):
    return optax.losses.ctc_loss(
        model(batch["frames"]), batch["frames_padding"], batch["phones"], batch["phones_padding"]
    ).mean()


def ctc_per_phone(model, batch):
    losses = optax.losses.ctc_loss(
        model(batch["frames"]), batch["frames_padding"], batch["phones"], batch["phones_padding"]
    )
    return losses.sum() / (1 - batch["phones_padding"]).sum()


def clip(model, batch):
    image, text = unit(model(batch["x"])), unit(model(batch["x2"]))
    logits = jnp.exp(model("scale")) * image @ text.T
    labels = jnp.arange(logits.shape[0])
    return (CE(logits, labels).mean() + CE(logits.T, labels).mean()) / 2


def siglip(model, batch):
    image, text = unit(model(batch["x"])), unit(model(batch["x2"]))
    logits = jnp.exp(model("scale")) * image @ text.T - 2.0
    signs = 2 * jnp.eye(len(image)) - jnp.ones_like(logits)
    return -jax.nn.log_sigmoid(signs * logits).sum(-1).mean()


def nt_xent(model, batch):
    """SimCLR: both views in one array."""
    z = unit(jnp.concatenate([model(batch["x"]), model(batch["x2"])]))
    scores = z @ z.T / 0.5
    scores = jnp.where(jnp.eye(len(z), dtype=bool), -jnp.inf, scores)
    half = len(z) // 2
    positives = jnp.concatenate([jnp.arange(half) + half, jnp.arange(half)])
    return CE(scores, positives).mean()


def moco(model, batch):
    """InfoNCE with a queue of negatives."""
    query, key = unit(model(batch["x"])), jax.lax.stop_gradient(unit(model(batch["x2"])))
    logits = (
        jnp.concatenate(
            [(query * key).sum(-1, keepdims=True), query @ unit(jnp.asarray(QUEUE)).T], axis=1
        )
        / 0.2
    )
    return CE(logits, jnp.zeros(len(query), "int32")).mean()


def two_towers(model, batch):
    """In-batch softmax of a recommender, with the logarithms of how often the batch has an item,
    and no negative of the same user.
    """
    user, item = model(batch["x"]), model(batch["x2"])
    often = (batch["y"][:, None] == batch["y"][None]).mean(0)
    scores = user @ item.T - jnp.log(often)
    same = (batch["user"][:, None] == batch["user"][None]) & ~jnp.eye(len(scores), dtype=bool)
    return CE(jnp.where(same, -1e9, scores), jnp.arange(len(scores))).mean()


def supervised_contrastive(model, batch):
    """Rows without a positive do not count."""
    z = unit(model(batch["x"]))
    others = 1.0 - jnp.eye(len(z))
    positive = (batch["y"][:, None] == batch["y"][None]).astype(z.dtype) * others
    scores = z @ z.T / 0.3
    scores = scores - jax.lax.stop_gradient(scores.max(1, keepdims=True))
    log_p = scores - jnp.log((jnp.exp(scores) * others).sum(1, keepdims=True))
    count = positive.sum(1)
    per_row = -(positive * log_p).sum(1) / jnp.maximum(count, 1.0)
    return per_row.sum() / jnp.maximum((count > 0).sum(), 1)


def triplet(model, batch):
    """The hardest positive and the hardest negative in the batch."""
    z = model(batch["x"])
    squares = (z**2).sum(1)
    distance = jnp.sqrt(jnp.maximum(squares[:, None] - 2 * z @ z.T + squares[None], 0.0) + 1e-6)
    same = batch["y"][:, None] == batch["y"][None]
    furthest = jnp.where(same & ~jnp.eye(len(z), dtype=bool), distance, 0.0).max(1)
    nearest = jnp.where(same, jnp.inf, distance).min(1)
    counts = jnp.isfinite(nearest)
    hinge = jnp.where(counts, jax.nn.relu(furthest - jnp.where(counts, nearest, 0.0) + 0.2), 0.0)
    return hinge.sum() / jnp.maximum(counts.sum(), 1)


def vicreg(model, batch):
    a, b = model(batch["x"]), model(batch["x2"])

    def spread(z):
        z = z - z.mean(0)
        covariance = z.T @ z / (len(z) - 1)
        away = covariance.at[jnp.diag_indices(OUTPUTS)].set(0.0)
        return jax.nn.relu(1.5 - jnp.sqrt(z.var(0) + 1e-4)).mean() + (away**2).sum() / OUTPUTS

    return 25 * ((a - b) ** 2).mean() + spread(a) + spread(b)


def barlow_twins(model, batch):
    a, b = model(batch["x"]), model(batch["x2"])
    a, b = (a - a.mean(0)) / (a.std(0) + 1e-5), (b - b.mean(0)) / (b.std(0) + 1e-5)
    correlation = a.T @ b / a.shape[0]
    on = ((jnp.diagonal(correlation) - 1) ** 2).sum()
    return on + 0.005 * ((correlation**2).sum() - (jnp.diagonal(correlation) ** 2).sum())


def byol(model, batch):
    return (
        2
        - 2
        * optax.losses.cosine_similarity(
            model(batch["x"]), jax.lax.stop_gradient(model(batch["x2"]))
        )
    ).mean()


def distillation(model, batch):
    logits, heat = model(batch["x"]), 4.0
    soft = optax.losses.kl_divergence_with_log_targets(
        jax.nn.log_softmax(logits / heat), jax.nn.log_softmax(batch["teacher"] / heat)
    )
    return 0.9 * heat**2 * soft.mean() + 0.1 * CE(logits, batch["y"]).mean()


def dino(model, batch):
    """A teacher that is centred by its mean over the batch."""
    student, teacher = model(batch["x"]), jax.lax.stop_gradient(model(batch["x2"]))
    wanted = jax.nn.softmax((teacher - teacher.mean(0, keepdims=True)) / 0.04)
    return -(wanted * jax.nn.log_softmax(student / 0.1)).sum(-1).mean()


def sinkhorn(model, batch):
    """SwAV: assignments of the batch to prototypes in equal parts."""
    scores = model(batch["x"])
    q = jnp.exp(jax.lax.stop_gradient(model(batch["x2"])) / 0.5).T
    q = q / q.sum()
    for _ in range(3):
        q = q / q.sum(1, keepdims=True) / q.shape[0]
        q = q / q.sum(0, keepdims=True) / q.shape[1]
    return -((q * q.shape[1]).T * jax.nn.log_softmax(scores / 0.1)).sum(-1).mean()


def ppo(model, batch):
    logits = model(batch["x"])
    log_p = jax.nn.log_softmax(logits)
    chosen = jnp.take_along_axis(log_p, batch["y"][:, None], axis=1)[:, 0]
    advantage = (batch["advantage"] - batch["advantage"].mean()) / (batch["advantage"].std() + 1e-8)
    ratio = jnp.exp(chosen - batch["old"])
    policy = -jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage).mean()
    value = 0.5 * ((logits[:, 0] - batch["advantage"]) ** 2).mean()
    entropy = -(jnp.exp(log_p) * log_p).sum(-1).mean()
    return policy + 0.5 * value - 0.01 * entropy


def grpo(model, batch):
    """Advantages of groups of 8 answers, and a mean over the tokens of the batch that count."""
    reward = batch["advantage"].reshape(-1, 8)
    advantage = (
        (reward - reward.mean(1, keepdims=True)) / (reward.std(1, keepdims=True) + 1e-4)
    ).reshape(-1)
    counts = batch["labels"] != -100
    log_p = -CE(model(batch["text"]), jnp.where(counts, batch["labels"], 0))
    ratio = jnp.exp(log_p - jax.lax.stop_gradient(log_p))
    return -(ratio * advantage[:, None] * counts).sum() / jnp.maximum(counts.sum(), 1)


def v_trace(model, batch):
    """Importance-weighted returns, backwards through time; IMPALA."""
    out = model(batch["frames"])
    values, ratio = out[..., 0], jnp.minimum(jnp.exp(jax.nn.log_softmax(out)[..., 1] + 2.0), 1.0)
    after = jnp.concatenate([values[:, 1:], jnp.zeros_like(values[:, :1])], axis=1)
    deltas = ratio * (batch["rewards"] + 0.9 * after - values)

    def back(carry, inputs):
        delta, clipped = inputs
        carry = delta + 0.9 * clipped * carry
        return carry, carry

    _, errors = jax.lax.scan(back, jnp.zeros(len(out)), (deltas.T, ratio.T), reverse=True)
    targets = jax.lax.stop_gradient(values + errors.T)
    return 0.5 * ((values - targets) ** 2).mean()


def prioritized_replay(model, batch):
    """Squared errors with importance weights that are divided by the largest of the batch."""
    weight = batch["weight"] ** -0.4
    error = (
        jnp.take_along_axis(model(batch["x"]), batch["y"][:, None], axis=1)[:, 0]
        - batch["advantage"]
    )
    return (weight / weight.max() * optax.losses.huber_loss(error)).mean()


def ignored_labels(model, batch):
    counts = batch["labels"] != -100
    losses = CE(model(batch["text"]), jnp.where(counts, batch["labels"], 0))
    return jnp.where(counts, losses, 0.0).sum() / counts.sum()


def z_loss(model, batch):
    """A mean over tokens that count, with a penalty of the normaliser."""
    logits, counts = model(batch["text"]), (batch["labels"] != -100).astype("float64")
    z = jax.nn.logsumexp(logits, axis=-1)
    losses = CE(logits, jnp.maximum(batch["labels"], 0)) + 1e-2 * z**2
    return (losses * counts).sum() / jnp.maximum(counts.sum(), 1e-8)


def masked_words(model, batch, rng):
    """BERT: masks that are drawn in the loss, and a mean over the masked words."""
    masked = jax.random.bernoulli(rng, 0.3, batch["labels"].shape) & (batch["labels"] != -100)
    hidden = jnp.where(masked[..., None], 0.0, batch["text"])
    losses = CE(model(hidden), jnp.maximum(batch["labels"], 0))
    return jnp.where(masked, losses, 0.0).sum() / jnp.maximum(masked.sum(), 1)


def mixture_balance(model, batch):
    """The balance of Switch Transformers."""
    probs = jax.nn.softmax(model(batch["x"]))
    chosen = jax.nn.one_hot(probs.argmax(-1), OUTPUTS)
    balance = OUTPUTS * (chosen.mean(0) * probs.mean(0)).sum()
    return CE(model(batch["x2"]), batch["y"]).mean() + 0.1 * balance


def retina(model, batch):
    """Focal loss per positive anchor; RetinaNet."""
    wanted = jax.nn.one_hot(batch["labels"], OUTPUTS)  # 0 everywhere for the background
    losses = optax.losses.sigmoid_focal_loss(model(batch["text"]), wanted, alpha=0.25, gamma=2.0)
    return losses.sum() / jnp.maximum((batch["labels"] >= 0).sum(), 1)


def dice(model, batch):
    """Over all pixels of the batch, beside a cross-entropy."""
    logits = model(batch["frames"])[..., 0]
    p, wanted = jax.nn.sigmoid(logits), batch["pixels"]
    overlap = (2 * (p * wanted).sum() + 1) / (p.sum() + wanted.sum() + 1)
    return optax.losses.sigmoid_binary_cross_entropy(logits, wanted).mean() + 1 - overlap


def dice_of_images(model, batch):
    return optax.losses.binary_dice_loss(model(batch["frames"])[..., 0], batch["pixels"]).mean()


def generalised_dice(model, batch):
    """Classes weighted by the inverse squares of their sizes in the batch."""
    p = jax.nn.softmax(model(batch["text"]))
    wanted = jax.nn.one_hot(batch["labels"], OUTPUTS)
    weight = 1 / (wanted.sum((0, 1)) ** 2 + 1)
    return 1 - 2 * (weight * (p * wanted).sum((0, 1))).sum() / (
        (weight * (p + wanted).sum((0, 1))).sum() + 1e-6
    )


def lovasz_hinge(model, batch):
    """Errors of all pixels of the batch, sorted."""
    logits, wanted = model(batch["frames"])[..., 0].reshape(-1), batch["pixels"].reshape(-1)
    errors = 1 - logits * (2 * wanted - 1)
    order = jnp.argsort(-errors)
    sorted_errors, truth = errors[order], wanted[order]
    total = truth.sum()
    jaccard = 1 - (total - jnp.cumsum(truth)) / (total + jnp.cumsum(1 - truth))
    return (jax.nn.relu(sorted_errors) * jnp.concatenate([jaccard[:1], jnp.diff(jaccard)])).sum()


def class_weights(model, batch):
    """Smoothed labels, with weights of the classes from how often the batch has them."""
    wanted = optax.losses.smooth_labels(jax.nn.one_hot(batch["y"], OUTPUTS), 0.1)
    count = jnp.bincount(batch["y"], length=OUTPUTS)
    weight = (len(batch["y"]) / (OUTPUTS * jnp.maximum(count, 1)))[batch["y"]]
    return (
        weight * optax.losses.softmax_cross_entropy(model(batch["x"]), wanted)
    ).sum() / weight.sum()


def hard_examples(model, batch):
    """The hardest quarter of the batch; OHEM."""
    losses = CE(model(batch["x"]), batch["y"])
    return jax.lax.top_k(losses, len(losses) // 4)[0].mean()


def mixup(model, batch, rng):
    """Every row with another row of the batch."""
    part = jax.random.beta(rng, 0.4, 0.4)
    mixed = part * batch["x"] + (1 - part) * batch["x"][::-1]
    logits = model(mixed)
    return (part * CE(logits, batch["y"]) + (1 - part) * CE(logits, batch["y"][::-1])).mean()


def confident(model, batch):
    """FixMatch: pseudo-labels above a threshold, divided by all rows."""
    wanted = jax.lax.stop_gradient(jax.nn.softmax(2 * model(batch["x"])))
    return (CE(model(batch["x2"]), wanted.argmax(-1)) * (wanted.max(-1) > 0.6)).mean()


def flow_matching(model, batch, rng):
    """A time and noise for each row, each with a key of its own."""

    def noised(key, row):
        first, second = jax.random.split(key)
        t, noise = jax.random.uniform(first), jax.random.normal(second, row.shape)
        return (1 - t) * noise + t * row, row - noise

    mixed, velocity = jax.vmap(noised)(jax.random.split(rng, len(batch["x"])), batch["x"])
    return ((model(mixed)[:, :FEATURES] - velocity) ** 2).mean()


def diffusion(model, batch, rng):
    """A whole number as the time of each row, and noise of the shape of the batch; DDPM."""
    of_time, of_noise = jax.random.split(rng)
    keep = jnp.cumprod(1 - jnp.linspace(1e-4, 0.2, 20))[
        jax.random.randint(of_time, (len(batch["x"]),), 0, 20)
    ][:, None]
    noise = jax.random.normal(of_noise, batch["x"].shape)
    mixed = jnp.sqrt(keep) * batch["x"] + jnp.sqrt(1 - keep) * noise
    return optax.losses.squared_error(model(mixed)[:, :FEATURES], noise).mean()


def elbo(model, batch, rng):
    out = model(batch["x"])
    mean, log_variance = out[:, :4], out[:, 4:]
    z = mean + jnp.exp(log_variance / 2) * jax.random.normal(rng, mean.shape)
    kl = -0.5 * (1 + log_variance - mean**2 - jnp.exp(log_variance)).sum(-1)
    return (((z[:, :1] - batch["x"]) ** 2).sum(-1) + kl).mean()


def total_correlation(model, batch, rng):
    """Beta-TCVAE: densities of each row's code under the codes of all rows."""
    out = model(batch["x"])
    mean, log_variance = out[:, :4], out[:, 4:]
    z = mean + jnp.exp(log_variance / 2) * jax.random.normal(rng, mean.shape)
    log_q = -0.5 * (
        (z[:, None] - mean[None]) ** 2 * jnp.exp(-log_variance[None])
        + log_variance[None]
        + jnp.log(2 * jnp.pi)
    )
    joint = jax.nn.logsumexp(log_q.sum(-1), axis=1)
    factors = jax.nn.logsumexp(log_q, axis=1).sum(-1)
    return ((z[:, :1] - batch["x"]) ** 2).sum(-1).mean() + (joint - factors).mean()


def codebook(model, batch):
    """VQ-VAE, with the entropy of how often the batch uses each code."""
    z, codes = model(batch["x"])[:, :4], jnp.asarray(QUEUE[:, :4])
    distance = ((z[:, None] - codes) ** 2).sum(-1)
    used = jax.nn.softmax(-distance).mean(0)
    quantised = z + jax.lax.stop_gradient(codes[distance.argmin(-1)] - z)
    commitment = ((z - jax.lax.stop_gradient(quantised)) ** 2).mean()
    return (
        ((quantised[:, :1] - batch["x"]) ** 2).mean()
        + 0.25 * commitment
        + 0.1 * (used * jnp.log(used + 1e-9)).sum()
    )


def mmd(model, batch):
    """Two samples under a Gaussian kernel."""
    a, b = model(batch["x"]), model(batch["x2"])

    def kernel(u, v):
        return jnp.exp(-((u[:, None] - v[None]) ** 2).sum(-1) / OUTPUTS)

    n = len(a)
    away = 1 - jnp.eye(n)
    return ((kernel(a, a) + kernel(b, b)) * away).sum() / (n * (n - 1)) - 2 * kernel(a, b).mean()


def coral(model, batch):
    """Covariances of two domains."""
    a, b = model(batch["x"]), model(batch["x2"])
    return ((jnp.cov(a, rowvar=False) - jnp.cov(b, rowvar=False)) ** 2).sum() / (
        4 * OUTPUTS**2
    ) + CE(a, batch["y"]).mean()


def wasserstein(model, batch, rng):
    """A critic with a penalty of its gradient between a real and a generated row."""
    part = jax.random.uniform(rng, (len(batch["x"]), 1))
    between = part * batch["x"] + (1 - part) * batch["x2"]
    slope = jax.vmap(jax.grad(lambda x: model(x)[0]))(between)
    penalty = ((jnp.sqrt((slope**2).sum(-1) + 1e-12) - 1) ** 2).mean()
    return model(batch["x2"])[:, 0].mean() - model(batch["x"])[:, 0].mean() + 10 * penalty


def list_net(model, batch):
    scores = model(batch["items"])[..., 0]
    return optax.losses.ranking_softmax_loss(scores, batch["relevance"], where=batch["listed"] > 0)


def lambda_rank(model, batch):
    """Pairs of the items of a query, weighted by the change of NDCG; queries with one relevance do
    not count.
    """
    scores, gain = model(batch["items"])[..., 0], 2 ** batch["relevance"] - 1
    rank = jnp.argsort(jnp.argsort(-scores, axis=-1), axis=-1) + 1
    discount = 1 / jnp.log2(rank + 1.0)
    best = (-jnp.sort(-gain, axis=-1) / jnp.log2(jnp.arange(ITEMS) + 2.0)).sum(-1)
    change = jnp.abs(
        (gain[:, :, None] - gain[:, None]) * (discount[:, :, None] - discount[:, None])
    )
    change = change / jnp.maximum(best, 1e-9)[:, None, None]
    above = batch["relevance"][:, :, None] > batch["relevance"][:, None]
    pairs = jnp.where(
        above,
        jax.lax.stop_gradient(change) * jax.nn.softplus(-(scores[:, :, None] - scores[:, None])),
        0.0,
    )
    return pairs.sum() / jnp.maximum(above.any((1, 2)).sum(), 1)


def pairwise_ranks(model, batch):
    """Hinge over all pairs of rows of which one is positive and the other is not; an estimate of 1
    - AUC.
    """
    scores, positive = model(batch["x"])[:, 0], batch["binary"] > 0
    pairs = positive[:, None] & ~positive[None]
    return jnp.where(
        pairs, jax.nn.relu(1 - (scores[:, None] - scores[None])), 0.0
    ).sum() / jnp.maximum(pairs.sum(), 1)


def cox(model, batch):
    """The partial likelihood of events in order of time."""
    risk = model(batch["x"])[:, 0]
    order = jnp.argsort(-batch["time"])
    risk, event = risk[order], batch["binary"][order]
    at_risk = jax.lax.cumlogsumexp(risk)
    return -((risk - at_risk) * event).sum() / jnp.maximum(event.sum(), 1)


def pinball(model, batch):
    levels = jnp.linspace(0.1, 0.9, OUTPUTS)
    error = batch["advantage"][:, None] - model(batch["x"])
    return jnp.maximum(levels * error, (levels - 1) * error).sum(-1).mean()


def crps(model, batch):
    """Of an ensemble, with the pairs of its members."""
    members, truth = model(batch["x"]), batch["advantage"]
    spread = jnp.abs(members[:, :, None] - members[:, None]).mean((1, 2))
    return (jnp.abs(members - truth[:, None]).mean(1) - 0.5 * spread).mean()


def ordinal(model, batch):
    """Thresholds that are passed; CORAL's ordinal regression."""
    passed = batch["y"][:, None] > jnp.arange(OUTPUTS)
    return (
        optax.losses.sigmoid_binary_cross_entropy(model(batch["x"]), passed.astype("float64"))
        .sum(-1)
        .mean()
    )


def concordance(model, batch):
    """1 - the concordance correlation coefficient of the batch."""
    a, b = model(batch["x"])[:, 0], batch["advantage"]
    covariance = ((a - a.mean()) * (b - b.mean())).mean()
    return 1 - 2 * covariance / (a.var() + b.var() + (a.mean() - b.mean()) ** 2)


def relative_error(model, batch):
    """The norm of the error over the norm of the target, both of the whole batch; neural
    operators.
    """
    return jnp.linalg.norm(model(batch["x"]) - batch["target"]) / jnp.linalg.norm(batch["target"])


def center_loss(model, batch):
    """Features near the mean of their class in the batch."""
    z = model(batch["x"])
    count = jax.ops.segment_sum(jnp.ones(len(z)), batch["y"], OUTPUTS)
    center = jax.ops.segment_sum(z, batch["y"], OUTPUTS) / jnp.maximum(count, 1.0)[:, None]
    return ((z - center[batch["y"]]) ** 2).sum(-1).mean()


# batches that hide what joins rows ----------------------------------------------------------------


def with_(**fields):
    """The function that changes these fields, by a value or by a function of the field."""
    return lambda batch: (
        batch
        | {
            name: (value(batch[name]) if callable(value) else np.full_like(batch[name], value))
            for name, value in fields.items()
        }
    )


def like_the_first_row(x):
    return np.broadcast_to(x[:1], x.shape).copy()


def different(x):
    return np.broadcast_to(np.arange(x.shape[1], dtype=x.dtype), x.shape).copy()


def all_count(labels):
    return np.abs(labels) % OUTPUTS


# expected -----------------------------------------------------------------------------------------

MEAN = "1: a mean over rows"
OF_DATA = "2: sums of data"
SUMS = "2: sums"
NUMBERS = "2: numbers of rows only"
ROWS_OF_DATA = "2: rows of data"
PAIRS = "2: rows"
LAYOUTS = {
    "data_parallel": {},
    "fsdp": {"layout": "fsdp"},
    "accumulate=4": {"mesh": "data=1", "accumulate": 4},
    "servers": {
        "layout": dataclasses.replace(
            spmd.Layout.load("parameter_server"), parameter_server=spmd.ParameterServer(workers=8)
        ),
        "mesh": "data=4",
    },
}
"""Of which the last sees the rows of each device in two parts, one after the other."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A loss, what workers share for it, and how a batch hides that.

    `everywhere`: it is tried on all layouts. `hidden`: of the batch that hides it, the mean of the
    losses of parts is right.
    """

    loss: Callable[..., Any]
    rule: str
    hide: Callable[..., Any] | None = None
    everywhere: bool = False
    hidden: bool = True


CASES = {
    "detection, Hungarian matching": Case(detr, SUMS, with_(present=1.0)),
    "CTC": Case(ctc, MEAN, with_(frames_padding=0, phones_padding=0), everywhere=True),
    "CTC per phone": Case(ctc_per_phone, OF_DATA, with_(frames_padding=0, phones_padding=0)),
    "CLIP": Case(clip, PAIRS, with_(x2=like_the_first_row), everywhere=True, hidden=False),
    "SigLIP": Case(siglip, PAIRS, with_(x2=like_the_first_row), hidden=False),
    "NT-Xent": Case(
        nt_xent, PAIRS, with_(x=like_the_first_row, x2=like_the_first_row), hidden=False
    ),
    "InfoNCE with a queue": Case(moco, MEAN),
    "two towers, in-batch softmax": Case(two_towers, PAIRS, with_(user=0), hidden=False),
    "supervised contrastive": Case(
        supervised_contrastive, PAIRS, with_(y=lambda y: np.arange(len(y), dtype=y.dtype))
    ),
    "triplets, batch-hard": Case(triplet, PAIRS, with_(y=0)),
    "VICReg": Case(
        vicreg, SUMS, with_(x=like_the_first_row, x2=like_the_first_row), everywhere=True
    ),
    "Barlow Twins": Case(barlow_twins, SUMS, hidden=False),
    "BYOL": Case(byol, MEAN),
    "distillation": Case(distillation, MEAN),
    "DINO, centred": Case(dino, SUMS, with_(x2=like_the_first_row)),
    "Sinkhorn": Case(sinkhorn, SUMS, with_(x2=like_the_first_row)),
    "PPO, advantages of the batch": Case(ppo, OF_DATA, with_(advantage=0.5), everywhere=True),
    "GRPO, advantages of groups": Case(grpo, ROWS_OF_DATA, with_(advantage=0.5), everywhere=True),
    "V-trace": Case(v_trace, MEAN),
    "prioritized replay": Case(prioritized_replay, OF_DATA, with_(weight=0.5), everywhere=True),
    "ignored labels": Case(ignored_labels, OF_DATA, with_(labels=all_count), everywhere=True),
    "z-loss": Case(z_loss, OF_DATA, with_(labels=all_count)),
    "masked words": Case(masked_words, OF_DATA, with_(labels=-100), everywhere=True),
    "balance of experts": Case(mixture_balance, SUMS, with_(x=like_the_first_row)),
    "focal": Case(retina, OF_DATA, with_(labels=all_count)),
    "dice of the batch": Case(dice, SUMS, with_(pixels=0.0), hidden=False),
    "dice of images": Case(dice_of_images, MEAN),
    "generalised dice": Case(generalised_dice, SUMS, with_(labels=-100), hidden=False),
    "Lovasz hinge": Case(lovasz_hinge, PAIRS, with_(pixels=0.0), hidden=False),
    "smoothed labels, weights of classes": Case(
        class_weights, OF_DATA, with_(y=0), everywhere=True
    ),
    "hard examples": Case(hard_examples, PAIRS, with_(x=like_the_first_row, y=0)),
    "mixup": Case(mixup, ROWS_OF_DATA, with_(x=like_the_first_row, y=0), everywhere=True),
    "FixMatch": Case(confident, MEAN),
    "flow matching, a key for each row": Case(flow_matching, NUMBERS, everywhere=True),
    "diffusion": Case(diffusion, MEAN),
    "ELBO": Case(elbo, MEAN),
    "total correlation": Case(total_correlation, PAIRS, hidden=False),
    "VQ-VAE, use of codes": Case(codebook, SUMS, with_(x=like_the_first_row)),
    "MMD": Case(mmd, PAIRS, with_(x=like_the_first_row, x2=like_the_first_row)),
    "CORAL": Case(coral, SUMS, with_(x=like_the_first_row, x2=like_the_first_row)),
    "Wasserstein, gradient penalty": Case(wasserstein, MEAN),
    "ListNet": Case(list_net, SUMS, with_(listed=1.0)),
    "LambdaRank": Case(lambda_rank, OF_DATA, with_(relevance=different)),
    "ranks of pairs": Case(pairwise_ranks, PAIRS, with_(binary=0)),
    "Cox": Case(cox, PAIRS, with_(binary=0)),
    "pinball": Case(pinball, MEAN),
    "CRPS of an ensemble": Case(crps, MEAN),
    "ordinal": Case(ordinal, MEAN),
    "concordance": Case(concordance, SUMS, with_(x=like_the_first_row, advantage=0.5)),
    "relative error": Case(
        relative_error, SUMS, with_(x=like_the_first_row, target=like_the_first_row)
    ),
    "center loss": Case(center_loss, SUMS, with_(x=like_the_first_row)),
}


# the test -----------------------------------------------------------------------------------------


@functools.cache
def batches(name):
    """Three batches, of which the second hides what joins the rows, with what the loss reads."""
    case, all_fields, read = CASES[name], [data(seed) for seed in range(3)], set()
    all_fields[1] = all_fields[1] if case.hide is None else case.hide(all_fields[1])

    class Reads(dict):
        def __getitem__(self, field):
            read.add(field)
            return super().__getitem__(field)

    jax.eval_shape(
        lambda: call(
            case,
            init(jax.random.key(0)),
            Reads(jax.tree.map(jnp.asarray, all_fields[0])),
            jax.random.key(0),
        )
    )
    return [
        {field: value for field, value in fields.items() if field in read} for fields in all_fields
    ]


ORDERS = ((1, 0, 2), (0, 1, 2))


def draws(case):
    return "rng" in inspect.signature(case.loss).parameters


def loss_key(key, step):
    """The key that the loss gets in a step."""
    return jax.random.split(jax.random.fold_in(jax.random.fold_in(key, step), 0))[1]


def call(case, params, batch, key):
    """The loss in plain JAX."""
    return jnp.mean(
        case.loss(functools.partial(apply, params), batch, *((key,) if draws(case) else ()))
    )


@functools.cache
def plainly(name, words):
    """Losses and parameters after each step of plain JAX on one device, for each order of the
    batches; `words` are those of the first key.

    Also returned: the mean of the losses of four parts, of the batch that hides what joins the
    rows, and of an ordinary one.
    """
    case, start, key = (
        CASES[name],
        init(jax.random.key(0)),
        jax.random.wrap_key_data(np.array(words, "uint32"), impl="threefry2x32"),
    )
    step = jax.jit(jax.value_and_grad(functools.partial(call, case)))
    losses, weights = [], []
    for order in ORDERS:
        params = start
        for number, at in enumerate(order):
            found, grads = step(params, batches(name)[at], loss_key(key, number))
            params = jax.tree.map(lambda p, g: p - RATE * g, params, grads)
            losses.append(float(found))
            weights.append(params)

    def of_parts(batch):
        pieces = jax.tree.map(lambda x: x.reshape(4, ROWS // 4, *x.shape[1:]), batch)
        return jax.lax.map(lambda piece: call(case, start, piece, key), pieces).mean()

    parts = [] if draws(case) else [float(jax.jit(of_parts)(batches(name)[at])) for at in (1, 0)]
    return losses, jax.device_get(weights), parts


def trainer_of(loss, layout="data_parallel", mesh="data=8", **options):
    mesh = spmd.make_mesh(mesh, devices=jax.devices()[: spmd.MeshSpec.parse(mesh).size])
    return spmd.Trainer(
        MODEL, loss=loss, optimizer=optax.sgd(RATE), mesh=mesh, layout=layout, **options
    )


def trained(name, options):
    """Losses and parameters after each step, for each order of the batches; what the loss was read
    as, and the first key.
    """
    losses, weights, trainer, words = [], [], trainer_of(CASES[name].loss, **options), ()
    for order in ORDERS:  # first of all the batch that hides what joins the rows
        state = trainer.init(batches(name)[order[0]])
        words = tuple(int(word) for word in jax.device_get(state.key))
        for at in order:
            state, metrics = trainer.step(state, batches(name)[at])
            losses.append(metrics["loss"])
            weights.append(jax.device_get(trainer.rebuild(state).params))
    return losses, weights, trainer.prepare(batches(name)[0])[0].reading, words


def rule_of(reading):
    """The rule that a loss was found to follow."""
    if reading.mean:
        return MEAN
    rows = any(share.how == "rows" for share in reading.shares)
    if reading.trained:
        return PAIRS if rows else SUMS
    return NUMBERS if not reading.shares else ROWS_OF_DATA if rows else OF_DATA


def furthest(ours, theirs):
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    return max(float(np.abs(a - b).max()) for a, b in pairs)


def refusal(case, layout):
    """The words of the refusal of a loss on a layout; None where it trains."""
    if layout not in ("accumulate=4", "servers"):
        return None
    if case.rule in (SUMS, PAIRS):
        return (
            "joins rows with .* at .*, which depends on the weights, and a step under .* sees the "
            "32 rows"
        )
    if layout == "accumulate=4" and case.rule == OF_DATA and draws(case):
        return (
            "joins rows with .* at .*, which depends on random numbers that each part has anew, "
            "and a step under .* in 4 microbatches"
        )
    return None


def fixed(layout):
    """The options that the fix of a refusal names."""
    if layout == "accumulate=4":
        return "accumulate=1", {"mesh": "data=1"}
    return 'reduction = "compiler"', {
        "mesh": "data=4",
        "layout": spmd.Layout(gradients=spmd.Gradients("compiler")),
    }


ANEW = "each microbatch draws numbers of its own, which are not those of the rows of the full batch"
OPEN = {
    (
        "detection, Hungarian matching",
        "data_parallel",
    ): "a loop whose end depends on the data gets the costs of all rows",
    ("mixup", "accumulate=4"): ANEW,
    ("flow matching, a key for each row", "accumulate=4"): ANEW,
}


def pair(name, layout):
    marks = (
        [pytest.mark.xfail(strict=True, reason=OPEN[name, layout])]
        if (name, layout) in OPEN
        else []
    )
    marks += [pytest.mark.system] if CASES[name].loss is detr else []  # compiles for long
    return pytest.param(name, layout, id=f"{name}-{layout}", marks=marks)


PAIRED = [
    pair(name, layout)
    for name, case in CASES.items()
    for layout in LAYOUTS
    if case.everywhere or layout == "data_parallel"
]


@pytest.mark.sampled(quick=32, system=1)
@pytest.mark.parametrize(("name", "layout"), PAIRED)
def test_loss_of_public_code_trains_as_plain_jax_does(name, layout):
    case, options = CASES[name], LAYOUTS[layout]
    refused = refusal(case, layout)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        if refused is not None:
            fix, changed = fixed(layout)
            with pytest.raises(LossError, match=refused) as raised:
                trainer_of(case.loss, **options).prepare(batches(name)[0])
            assert fix in raised.value.fix
            options = changed
        losses, weights, reading, words = trained(name, options)
        right, wanted, parts = plainly(name, words)
    of_losses = float(np.max(np.abs(np.subtract(losses, right)) / np.maximum(np.abs(right), 1e-3)))
    of_weights = furthest(weights, wanted)
    found = "refused; with the fix" if refused is not None else rule_of(reading)
    print(f"{name:36} | {found:23} | {layout:13} | {of_losses:.0e} | {of_weights:.0e}")
    assert of_losses < 1e-6, "losses are reported in float32"
    assert of_weights < 1e-12
    assert case.hide is None or furthest(weights[0], weights[3]) > 1e-6, "the batches differ"
    if refused is None:
        assert rule_of(reading) == case.rule
    if parts:  # of which a mean over workers would be made
        hidden, ordinary = (abs(part - right[3 * number]) for number, part in enumerate(parts))
        assert (ordinary < 1e-12) == (case.rule == MEAN)
        assert not case.hidden or hidden < 1e-12
