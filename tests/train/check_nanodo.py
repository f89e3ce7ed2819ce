"""Train google-deepmind/nanodo's model, unchanged, under layouts, and compare each step's loss with
a loop on one device.

    python tests/train/check_nanodo.py CHECKOUT

Its kernels name the mesh axis "data" (its FSDP), and it carries no other names. CHECKOUT is a clone
of https://github.com/google-deepmind/nanodo. Prints, for each layout, the largest relative
difference of the losses of 10 steps.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import spmd

ROWS, STEPS = 32, 10
# heads, hidden layers and vocabulary over "model", by path: its names say nothing of these
TENSOR_PARALLEL = spmd.Layout(
    name="nanodo_tensor_parallel",
    mesh={"data": 4, "model": 2},
    axes={"data": None},
    params=(
        spmd.Rule("*/CausalAttn_0/{query,key,value}/kernel", (None, "model", None)),
        spmd.Rule("*/CausalAttn_0/attn_out_proj/kernel", ("model", None, None)),
        spmd.Rule("*/Mlp_0/Dense_0/kernel", (None, "model")),
        spmd.Rule("*/Mlp_0/Dense_1/kernel", ("model", None)),
        spmd.Rule("embed/embedding", ("model", None)),
    ),
)
LAYOUTS = {
    "data_parallel": "data_parallel",
    "zero1": "zero1",
    "fsdp": "fsdp",
    "tensor parallel": TENSOR_PARALLEL,
}


def main() -> None:
    spmd.simulate_devices(8)
    sys.path.insert(0, sys.argv[1])
    from nanodo.model import DoConfig, TransformerDo

    model = TransformerDo(DoConfig(D=64, H=4, L=32, N=2, V=128, F=256))
    tokens = np.random.default_rng(0).integers(0, 128, (ROWS, 33)).astype("int32")
    data, optimizer = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}, optax.adamw(1e-3)
    options = {"loss": spmd.losses.cross_entropy, "optimizer": optimizer}
    trainers = {
        name: spmd.Trainer(model, layout=layout, **options) for name, layout in LAYOUTS.items()
    }
    wanted = plain_losses(model, trainers["data_parallel"].init(data).params, data, optimizer)
    worst = 0.0
    for name, trainer in trainers.items():
        state, found = trainer.init(data), []
        for _ in range(STEPS):
            state, metrics = trainer.step(state, data)
            found.append(metrics["loss"])
        difference = max(abs(mine / other - 1) for mine, other in zip(found, wanted, strict=True))
        worst = max(worst, difference)
        kernel = state.params["blocks_0"]["Mlp_0"]["Dense_0"]["kernel"].sharding.spec
        print(
            f"{name:16} loss {found[0]:.4f} to {found[-1]:.4f}, differs by {difference:.1e}; a "
            f"kernel is sharded as {kernel}"
        )
    if worst > 1e-5:
        raise SystemExit("more than 1e-5")


def plain_losses(model, params, data, optimizer) -> list[float]:
    """The losses of a loop on one device, as flax users write it."""
    params = jax.device_put(jax.tree.map(np.asarray, nn.unbox(params)), jax.devices()[0])
    tokens, targets = jnp.asarray(data["tokens"]), jnp.asarray(data["targets"])

    def loss(params):
        logits = model.apply({"params": params}, tokens)
        return optax.losses.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    @jax.jit
    def step(params, moments):
        value, grads = jax.value_and_grad(loss)(params)
        updates, moments = optimizer.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments, value

    moments, found = optimizer.init(params), []
    for _ in range(STEPS):
        params, moments, value = step(params, moments)
        found.append(float(value))
    return found


if __name__ == "__main__":
    main()
