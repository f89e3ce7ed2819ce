"""A flax nnx training script, made data-parallel: `nnx.shard_map` around its step, and gradients
sent as int8 by its optimizer's `tx`.

    python examples/wire/nnx_script.py

From one device to eight:

    -optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    +tx = optax.chain(
    +    wire.all_reduce("data", wire.int8(block=256), error_feedback=True), optax.adamw(1e-3)
    +)
    +with jax.set_mesh(mesh):
    +    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
     @nnx.jit
    +@nnx.shard_map(mesh=mesh, in_specs=(P(), SPLIT, P("data")), out_specs=P(), check_vma=False)
     def train_step(model, optimizer, batch):

and from one codec to another:

    -tx = optax.chain(
    -    wire.all_reduce("data", wire.int8(block=256), error_feedback=True), optax.adamw(1e-3)
    -)
    +tx = optax.chain(
    +    wire.all_reduce("data", wire.top_k(keep=0.01), error_feedback=True), optax.adamw(1e-3)
    +)
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AxisType, PartitionSpec as P

from spmd import wire

jax.config.update("jax_num_cpu_devices", 8)  # simulated, on a machine without GPUs
mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
# what a worker's codec lost is its own
SPLIT = nnx.StateSharding({nnx.PathContains("residual"): P("data"), ...: P()})


class Classifier(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(64, 256, rngs=rngs)
        self.norm = nnx.LayerNorm(256, rngs=rngs)
        self.head = nnx.Linear(256, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(nnx.relu(self.norm(self.hidden(x))))


def loss_of(model: Classifier, batch: dict[str, jax.Array]) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(
        model(batch["image"]), batch["label"]
    ).mean()


@nnx.jit
@nnx.shard_map(mesh=mesh, in_specs=(P(), SPLIT, P("data")), out_specs=P(), check_vma=False)
def train_step(model, optimizer, batch):
    loss, grads = nnx.value_and_grad(loss_of)(model, batch)  # of this worker's rows
    optimizer.update(model, grads)  # sends them, and steps with the mean
    return jax.lax.pmean(loss, "data")


def train(codec: wire.Codec, steps: int = 100) -> tuple[list[float], int]:
    """The loss of every step, and the bytes that each device sends in one."""
    model = Classifier(nnx.Rngs(0))
    tx = optax.chain(
        wire.all_reduce("data", codec, error_feedback=not codec.lossless), optax.adamw(1e-3)
    )
    with jax.set_mesh(mesh):  # residuals are kept for each of its workers
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    losses = []
    for number in range(steps):
        image = jax.random.normal(jax.random.key(number), (256, 64))
        batch = {"image": image, "label": jnp.argmax(image[:, :10] + image[:, 10:20], axis=1)}
        losses.append(float(train_step(model, optimizer, batch)))
    return losses, wire.bytes_sent(tx, nnx.state(model, nnx.Param), mesh)


for codec in wire.exact(), wire.int8(block=256):
    losses, sent = train(codec)
    print(
        f"{codec}: loss {losses[0]:.4f} to {losses[-1]:.4f}, {sent:,} bytes sent per device and "
        "step"
    )
