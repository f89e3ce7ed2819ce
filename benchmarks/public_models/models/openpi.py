"""Of openpi: pi0, a flow-matching policy of images, a prompt and a robot's state, with the loss of
the repository.
"""

import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import spmd
from benchmarks.public_models.case import ADAMW, ROWS, STEPS, Case, as_floats


class Stub(types.ModuleType):
    """A module whose every attribute is an empty class."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def stub(name):
    module = sys.modules[name] = Stub(name)
    parent, _, last = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], last, module)


# PyTorch is for types in annotations, and for the repository's other implementation of pi0.
for name in (
    "torch",
    "torch.nn",
    "torch.nn.functional",
    "openpi.models_pytorch",
    "openpi.models_pytorch.pi0_pytorch",
):
    stub(name)

import openpi.models.gemma
import openpi.models.model
import openpi.models.siglip
from openpi.models.pi0_config import Pi0Config

WORDS, RESOLUTION = 64, (28, 28)
VISION = openpi.models.siglip.decode_variant("mu/14")
# pi0 names a tower of 400 M parameters
openpi.models.siglip.decode_variant = lambda variant: VISION
openpi.models.gemma.PALIGEMMA_VOCAB_SIZE = WORDS
# What the repository computes in float32 whatever the model's dtype is: positions, norms, the
# softmax, and images.
openpi.models.gemma.jnp = openpi.models.siglip.jnp = types.SimpleNamespace(
    **{**vars(jnp), "float32": jnp.float64}
)
openpi.models.model.IMAGE_RESOLUTION = RESOLUTION
openpi.models.model.preprocess_observation.__kwdefaults__["image_resolution"] = RESOLUTION


# Heads and hidden features over `model`, after the layers of a stack. All query heads share the one
# head of keys and values.
TENSOR = spmd.Layout(
    mesh=(("data", -1), ("model", 2)),
    params=(
        spmd.Rule("PaliGemma/llm/layers/attn/{q,attn_vec}_einsum*/w", (None, "model")),
        spmd.Rule("PaliGemma/llm/layers/mlp*/gating_einsum", (None, None, None, "model")),
        spmd.Rule("PaliGemma/llm/layers/mlp*/linear", (None, "model")),
    ),
    gradients=spmd.Gradients("all_reduce"),
)
LAYOUTS = {"tensor": {"layout": TENSOR, "mesh": "data=4,model=2"}}
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), ADAMW)  # as the repository's trainer does


def demonstrations(config):
    """Batches of observations and actions, as the repository's trainer has them."""
    random = np.random.default_rng(0)
    words = config.max_token_len
    batches = []
    for _ in range(STEPS):
        images = {
            name: random.uniform(-1, 1, (ROWS, *RESOLUTION, 3)).astype("float32")
            for name in openpi.models.model.IMAGE_KEYS
        }
        observation = openpi.models.model.Observation(
            images=images,
            image_masks={name: random.random(ROWS) < 0.8 for name in images},
            state=random.normal(size=(ROWS, config.action_dim)),
            tokenized_prompt=random.integers(0, WORDS, (ROWS, words)).astype("int32"),
            tokenized_prompt_mask=np.arange(words) < random.integers(1, words + 1, (ROWS, 1)),
        )
        batches.append(
            (observation, random.normal(size=(ROWS, config.action_horizon, config.action_dim)))
        )
    return batches


def of_flow(model, batch, rng):
    observation, actions = batch
    return model.compute_loss(rng, observation, actions, train=True).mean()


def cases():
    dummies = {"paligemma_variant": "dummy", "action_expert_variant": "dummy"}
    config = Pi0Config(dtype="float64", action_dim=8, action_horizon=4, max_token_len=6, **dummies)
    graphdef, state = nnx.split(config.create(jax.random.key(0)))
    model = nnx.merge(graphdef, as_floats(state, "float64"))
    model.train()
    return [
        Case("pi0", model, of_flow, demonstrations(config), CLIPPED, layouts=LAYOUTS, draws=True)
    ]
