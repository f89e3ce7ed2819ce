"""A custom Keras 3 training loop on JAX (`stateless_call`, `stateless_apply`), data-parallel, with
gradients sent as int8.

    pip install "keras>=3.10"
    python examples/wire/keras_loop.py

The optimizer stays Keras's own; the communication is one more transformation before it:

    +link = wire.all_reduce("data", wire.int8(block=256), error_feedback=True)
    +link_state = wire.init(link, trainable, mesh)
     (loss, fixed), grads = grad_fn(trainable, fixed, *batch)
    -grads = jax.lax.pmean(grads, "data")
    +grads, link_state = link.update(grads, link_state)
     trainable, slots = optimizer.stateless_apply(slots, grads, trainable)

and from one codec to another:

    -link = wire.all_reduce("data", wire.int8(block=256), error_feedback=True)
    +link = wire.all_reduce("data", wire.float8(block=256), error_feedback=True)
"""

import os

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec as P

from spmd import wire

os.environ["KERAS_BACKEND"] = "jax"
try:
    import keras
except ImportError:
    raise SystemExit('This example needs Keras 3: pip install "keras>=3.10"') from None

jax.config.update("jax_num_cpu_devices", 8)  # simulated, on a machine without GPUs
mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))


def train(codec: wire.Codec, steps: int = 200) -> tuple[list[float], int]:
    """The loss of every step, and the bytes that each device sends in one."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(256, activation="relu"), keras.layers.Dense(10)]
    )
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.Adam(1e-3)
    optimizer.build(model.trainable_variables)
    trainable = [variable.value for variable in model.trainable_variables]
    fixed = [variable.value for variable in model.non_trainable_variables]
    slots = [variable.value for variable in optimizer.variables]

    def compute_loss(trainable, fixed, x, y):
        logits, fixed, *_ = model.stateless_call(trainable, fixed, x, training=True)
        return loss_fn(y, logits), fixed

    link = wire.all_reduce("data", codec, error_feedback=not codec.lossless)
    link_state = wire.init(link, trainable, mesh)

    def step(trainable, fixed, slots, link_state, batch):
        # of this worker's rows
        (loss, fixed), grads = jax.value_and_grad(compute_loss, has_aux=True)(
            trainable, fixed, *batch
        )
        grads, link_state = link.update(grads, link_state)  # sends them, and returns the mean
        trainable, slots = optimizer.stateless_apply(slots, grads, trainable)
        return trainable, fixed, slots, link_state, jax.lax.pmean(loss, "data")

    # what a worker's codec has lost is its own; all else is replicated
    specs = (P(), P(), P(), wire.specs(link_state))
    step = jax.jit(
        jax.shard_map(
            step, mesh=mesh, in_specs=(*specs, P("data")), out_specs=(*specs, P()), check_vma=False
        )
    )
    losses = []
    for number in range(steps):
        x = jax.random.normal(jax.random.key(number), (256, 64))
        y = jnp.argmax(x[:, :10] + x[:, 10:20], axis=1)
        trainable, fixed, slots, link_state, loss = step(
            trainable, fixed, slots, link_state, (x, y)
        )
        losses.append(float(loss))
    for variable, value in zip(model.trainable_variables, trainable, strict=True):
        variable.assign(value)
    return losses, wire.bytes_sent(link, trainable, mesh)


for codec in wire.exact(), wire.int8(block=256):
    losses, sent = train(codec)
    print(
        f"{codec}: loss {losses[0]:.4f} to {losses[-1]:.4f}, {sent:,} bytes sent per device and "
        "step"
    )
