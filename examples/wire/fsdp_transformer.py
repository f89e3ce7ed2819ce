"""A transformer written by hand, its weights sharded over all devices and gathered layer by layer
where they are used (FSDP).

    python examples/wire/fsdp_transformer.py

Each device keeps an eighth of every array and of its Adam moments. One line in the scanned,
checkpointed layer gathers that layer's weights; its backward pass encodes their gradients and
reduce-scatters them. To send gradients as int8 and weights as bfloat16:

    -gather = functools.partial(wire.gather, axes="data")
    +gather = functools.partial(
    +    wire.gather, axes="data", codec=wire.int8(block=64), weights="bfloat16"
    +)
"""

import functools

import jax
import jax.numpy as jnp
import optax
from jax.nn import standardize as norm
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from spmd import wire

LAYERS, WIDTH, HEADS, VOCABULARY, LENGTH = 4, 64, 4, 64, 16
jax.config.update("jax_num_cpu_devices", 8)  # simulated, on a machine without GPUs
mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
# every array along its dim 1: in a stack of layers, that is dim 0 of a layer's array
SHARDED = P(None, "data")


def make_params(key: jax.Array) -> dict:
    shapes = (
        (VOCABULARY, WIDTH),
        (LAYERS, WIDTH, 3 * WIDTH),
        (LAYERS, WIDTH, WIDTH),
        (LAYERS, WIDTH, 4 * WIDTH),
        (LAYERS, 4 * WIDTH, WIDTH),
    )
    draws = (
        jax.random.normal(k, shape) / shape[-2] ** 0.5
        for k, shape in zip(jax.random.split(key, 5), shapes, strict=True)
    )
    embedding, qkv, out, up, down = draws
    return {"embedding": embedding, "layers": {"qkv": qkv, "out": out, "up": up, "down": down}}


def apply_layer(layer: dict, x: jax.Array) -> jax.Array:
    q, k, v = jnp.moveaxis((norm(x) @ layer["qkv"]).reshape(*x.shape[:2], 3, HEADS, -1), 2, 0)
    x += jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ layer["out"]
    return x + jax.nn.gelu(norm(x) @ layer["up"]) @ layer["down"]


def loss_of(
    shards: dict, residuals: dict, tokens: jax.Array, gather: functools.partial
) -> jax.Array:
    @jax.checkpoint  # gathers again in the backward pass, instead of keeping full weights
    def body(x, layer):
        layer_shards, residual = layer
        return apply_layer(gather(layer_shards, residual=residual), x), None

    embedding = gather(shards["embedding"], dim=1, residual=residuals["embedding"])
    x, _ = jax.lax.scan(body, embedding[tokens[:, :-1]], (shards["layers"], residuals["layers"]))
    return optax.softmax_cross_entropy_with_integer_labels(
        norm(x) @ embedding.T, tokens[:, 1:]
    ).mean()


def train(codec: wire.Codec, weights: str, steps: int = 40) -> tuple[list[float], int]:
    """The loss of every step, and the bytes that each device sends in one."""
    gather = functools.partial(wire.gather, axes="data", codec=codec, weights=weights)
    tx = optax.adamw(3e-3)  # of a device's shards
    shards = jax.device_put(make_params(jax.random.key(0)), NamedSharding(mesh, SHARDED))
    zeros = jax.shard_map(
        lambda x: wire.residual_like(x, "data", dim=1),
        mesh=mesh,
        in_specs=SHARDED,
        out_specs=SHARDED,
        check_vma=False,
    )
    residuals, opt_state = zeros(shards), tx.init(shards)

    def step(shards, residuals, opt_state, tokens):
        # the gradient of a shard is that of the mean loss; that of a residual is the next residual
        loss, (grads, residuals) = jax.value_and_grad(loss_of, (0, 1))(
            shards, residuals, tokens, gather
        )
        updates, opt_state = tx.update(grads, opt_state, shards)
        return (
            optax.apply_updates(shards, updates),
            residuals,
            opt_state,
            jax.lax.pmean(loss, "data"),
        )

    specs = (
        SHARDED,
        SHARDED,
        optax.tree.map_params(tx, lambda _: SHARDED, opt_state, transform_non_params=lambda _: P()),
    )
    step = jax.jit(
        jax.shard_map(
            step, mesh=mesh, in_specs=(*specs, P("data")), out_specs=(*specs, P()), check_vma=False
        )
    )
    losses = []
    for number in range(steps):
        # every row counts in another stride
        start, stride = jax.random.randint(jax.random.key(number), (2, 64, 1), 1, 8)
        tokens = (start + stride * jnp.arange(LENGTH + 1)) % VOCABULARY
        shards, residuals, opt_state, loss = step(shards, residuals, opt_state, tokens)
        losses.append(float(loss))
    return losses, wire.bytes_sent(step, (shards, residuals, opt_state, tokens), mesh)


for codec, weights in (wire.exact(), "exact"), (wire.int8(block=64), "bfloat16"):
    losses, sent = train(codec, weights)
    print(
        f"{codec}, {weights} weights: loss {losses[0]:.4f} to {losses[-1]:.4f}, {sent:,} bytes "
        "sent per device and step"
    )
