"""A hand-written `jax.shard_map` loop, in plain jax and optax, that sends its gradients as int8
with error feedback.

    python examples/wire/shard_map_loop.py

What changes in such a loop:

    -tx = optax.adamw(1e-3)
    +tx = optax.chain(
    +    wire.all_reduce("data", wire.int8(block=256), error_feedback=True), optax.adamw(1e-3)
    +)
    -opt_state = tx.init(params)
    -specs = (P(), P())
    +opt_state = wire.init(tx, params, mesh)
    +specs = (P(), wire.specs(opt_state))
    -    grads = jax.lax.pmean(grads, "data")

and from one codec to another:

    -tx = optax.chain(
    -    wire.all_reduce("data", wire.int8(block=256), error_feedback=True), optax.adamw(1e-3)
    -)
    +tx = optax.chain(
    +    wire.all_reduce("data", wire.power_sgd(rank=4), error_feedback=True), optax.adamw(1e-3)
    +)
"""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from spmd import wire

jax.config.update("jax_num_cpu_devices", 8)  # simulated, on a machine without GPUs
mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))


def make_params(key: jax.Array) -> dict[str, jax.Array]:
    up, down = jax.random.split(key)
    return {
        "up": jax.random.normal(up, (64, 256)) / 8,
        "bias": jnp.zeros(256),
        "down": jax.random.normal(down, (256, 8)) / 16,
    }


def predict(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ params["up"] + params["bias"]) @ params["down"]


def loss_of(params: dict[str, jax.Array], batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    x, y = batch
    return jnp.mean((predict(params, x) - y) ** 2)


def train(codec: wire.Codec, steps: int = 200) -> tuple[list[float], int]:
    """The loss of every step, and the bytes that each device sends in one."""
    tx = optax.chain(
        wire.all_reduce("data", codec, error_feedback=not codec.lossless), optax.adamw(1e-3)
    )
    params, teacher = make_params(jax.random.key(0)), make_params(jax.random.key(1))
    # else the second step, which gets them so, is compiled again
    params = jax.device_put(params, NamedSharding(mesh, P()))
    opt_state = wire.init(tx, params, mesh)
    # what a worker's codec has lost is its own; all else is replicated
    specs = (P(), wire.specs(opt_state))

    def step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_of)(params, batch)  # of this worker's rows
        updates, opt_state = tx.update(grads, opt_state, params)  # sends them; adamw sees the mean
        return optax.apply_updates(params, updates), opt_state, jax.lax.pmean(loss, "data")

    step = jax.jit(
        jax.shard_map(
            step, mesh=mesh, in_specs=(*specs, P("data")), out_specs=(*specs, P()), check_vma=False
        )
    )
    losses = []
    for number in range(steps):
        x = jax.random.normal(jax.random.key(number), (256, 64))
        params, opt_state, loss = step(params, opt_state, (x, predict(teacher, x)))
        losses.append(float(loss))
    return losses, wire.bytes_sent(tx, params, mesh)


for codec in wire.exact(), wire.int8(block=256):
    losses, sent = train(codec)
    print(
        f"{codec}: loss {losses[0]:.4f} to {losses[-1]:.4f}, {sent:,} bytes sent per device and "
        "step"
    )
