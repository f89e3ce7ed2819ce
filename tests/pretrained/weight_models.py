"""A small network in three forms, its tensors as a file has them, and the name maps between the
two.
"""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from spmd.nn import LayerStack
from spmd.pretrained.name_map import NameMap

WIDTH, HEADS, SIZE, MLP, VOCAB, LAYERS = 64, 8, 8, 256, 128, 4


def named(init, *names):
    return nnx.with_partitioning(init, names)


def normal():
    return nnx.initializers.normal(0.02)


class Block(nnx.Module):
    """A layer with a query of three dims, key and value, and a fused gate and up."""

    def __init__(self, *, rngs):
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.query = nnx.LinearGeneral(
            WIDTH,
            (HEADS, SIZE),
            use_bias=False,
            kernel_init=named(normal(), "embed", "heads", None),
            rngs=rngs,
        )
        self.key = nnx.Linear(
            WIDTH, WIDTH, kernel_init=named(normal(), "embed", "heads"), rngs=rngs
        )
        self.value = nnx.Linear(
            WIDTH, WIDTH, use_bias=False, kernel_init=named(normal(), "embed", "heads"), rngs=rngs
        )
        self.both = nnx.Linear(
            WIDTH, 2 * MLP, use_bias=False, kernel_init=named(normal(), "embed", "mlp"), rngs=rngs
        )
        self.down = nnx.Linear(
            MLP, WIDTH, use_bias=False, kernel_init=named(normal(), "mlp", "embed"), rngs=rngs
        )

    def __call__(self, x):
        h = self.norm(x)
        y = self.query(h).reshape(*x.shape[:-1], -1) * self.key(h) + self.value(h)
        gate, up = jnp.split(self.both(h), 2, axis=-1)
        return x + y + self.down(nnx.silu(gate) * up)


class Stacked(nnx.Module):
    """Layers in a stack, then one more; the head is the embedding."""

    def __init__(self, *, rngs):
        self.embed = nnx.Embed(
            VOCAB, WIDTH, embedding_init=named(normal(), "vocab", "embed"), rngs=rngs
        )
        self.stack = LayerStack([Block(rngs=rngs) for _ in range(LAYERS)])
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, tokens):
        return self.embed.attend(self.dropout(self.stack(self.embed(tokens))))


class Listed(nnx.Module):
    """The same with a list of layers."""

    def __init__(self, *, rngs):
        self.embed = nnx.Embed(
            VOCAB, WIDTH, embedding_init=named(normal(), "vocab", "embed"), rngs=rngs
        )
        self.blocks = nnx.List([Block(rngs=rngs) for _ in range(LAYERS)])

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(x)


class Pair(nnx.Module):
    """Two layers in a row, which a stack repeats."""

    def __init__(self, *, rngs):
        setattr(self, "0", Block(rngs=rngs))
        setattr(self, "1", Block(rngs=rngs))

    def __call__(self, x):
        return getattr(self, "1")(getattr(self, "0")(x))


class Grouped(nnx.Module):
    """The same with a stack of pairs for all but the last two layers, which are a list after it."""

    def __init__(self, *, rngs):
        self.embed = nnx.Embed(
            VOCAB, WIDTH, embedding_init=named(normal(), "vocab", "embed"), rngs=rngs
        )
        self.stack = LayerStack([Pair(rngs=rngs) for _ in range((LAYERS - 2) // 2)])
        self.tail = nnx.List([Block(rngs=rngs) for _ in range(2)])

    def __call__(self, tokens):
        x = self.stack(self.embed(tokens))
        for block in self.tail:
            x = block(x)
        return self.embed.attend(x)


RULES = """
[[tensors]]
file = "embed.weight"
model = "embed/embedding"
[[tensors]]
file = "head.weight"
model = "embed/embedding"
tied = true
[[tensors]]
file = "h.{layer}.norm.weight"
model = "layers.{layer}/norm/scale"
[[tensors]]
file = "h.{layer}.q.weight"
model = "layers.{layer}/query/kernel"
dims = "(heads size) width -> width heads size"
[[tensors]]
file = "h.{layer}.kv.weight"
model = ["layers.{layer}/key/kernel", "layers.{layer}/value/kernel"]
concat = 0
transpose = true
[[tensors]]
file = "h.{layer}.k.bias"
model = "layers.{layer}/key/bias"
[[tensors]]
file = ["h.{layer}.gate.weight", "h.{layer}.up.weight"]
model = "layers.{layer}/both/kernel"
concat = 1
transpose = true
[[tensors]]
file = "h.{layer}.down.weight"
model = "layers.{layer}/down/kernel"
[[ignored]]
file = "h.{layer}.inv_freq"
reason = "recomputed"
"""
PLACES = {
    Stacked: '[layers]\nstack = "stack/layers"',
    Listed: '[layers]\nlist = "blocks"',
    Grouped: '[layers]\nstack = "stack/layers"\ntail = "tail"',
}


def name_map(kind, rules=RULES):
    return NameMap.loads(f"{PLACES[kind]}\n{rules}", "map.toml")


def make_tensors(dtype=np.float32, seed=0, tied=False):
    """What a file holds."""
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return (rng.standard_normal(shape) * 0.1).astype(dtype)

    tensors = {"embed.weight": draw(VOCAB, WIDTH)}
    for layer in range(LAYERS):
        tensors |= {
            f"h.{layer}.norm.weight": draw(WIDTH),
            f"h.{layer}.q.weight": draw(WIDTH, WIDTH),
            f"h.{layer}.kv.weight": draw(2 * WIDTH, WIDTH),
            f"h.{layer}.k.bias": draw(WIDTH),
            f"h.{layer}.gate.weight": draw(MLP, WIDTH),
            f"h.{layer}.up.weight": draw(MLP, WIDTH),
            f"h.{layer}.down.weight": draw(MLP, WIDTH),
        }
    return tensors | ({"head.weight": tensors["embed.weight"].copy()} if tied else {})


def expected(tensors, layer):
    """The arrays of a layer by path, made with numpy from the tensors."""
    t = {name.removeprefix(f"h.{layer}."): value for name, value in tensors.items()}
    return {
        "norm/scale": t["norm.weight"],
        "query/kernel": t["q.weight"].T.reshape(WIDTH, HEADS, SIZE),
        "key/kernel": t["kv.weight"][:WIDTH].T,
        "value/kernel": t["kv.weight"][WIDTH:].T,
        "key/bias": t["k.bias"],
        "both/kernel": np.concatenate([t["gate.weight"].T, t["up.weight"].T], axis=1),
        "down/kernel": t["down.weight"],
    }


def loss(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean(
        axis=1
    )
