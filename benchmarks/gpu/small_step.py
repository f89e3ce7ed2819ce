"""Microseconds of a step of a small MLP, where the host is what costs: `fit`, resident data,
nnx.jit, torch with CUDA graphs.
"""

import itertools
import time
from collections.abc import Callable
from typing import Any

import jax
import optax
from flax import nnx

import spmd
from benchmarks.gpu import cases
from benchmarks.gpu.measure import Arm, Part, run_part

BATCHES = 50


def main(part: Part) -> None:
    builds = {
        "ours, fit": (fit, False),
        "ours, fit, resident data": (fit, True),
        "nnx.jit": (nnx_loop,),
        "torch": (torch_loop,),
    }
    arms = {name: Arm(part, *build) for name, build in builds.items()}
    part.alternate(
        "mlp",
        arms,
        1.0,
        dict.fromkeys(["ours, fit", "ours, fit, resident data"], "mlp"),
        steps_of_a_call=count(part),
    )
    part.compare_losses("mlp", arms, 1e-2)  # after one pass over the same batches in the same order


def count(part: Part) -> int:
    """Steps of one call."""
    return 20 if part.small else 1000


def fit(part: Part, resident: bool) -> tuple[Callable[[], float], float]:
    """The seconds of a step of one run, as it reports them."""
    step = cases.mlp(part.small)
    data = step.data(BATCHES)
    chosen = spmd.data.resident(data, steps_per_call=BATCHES) if resident else data

    def fitted(steps: int) -> spmd.Result:
        return spmd.fit(
            step.model,
            chosen,
            batch_size=step.rows,
            steps=steps,
            shuffle=False,
            progress=False,
            **step.options,
        )

    def run() -> float:
        return step.rows / fitted(count(part)).samples_per_second

    return run, fitted(BATCHES).history["loss"][-1]


def nnx_loop(part: Part) -> tuple[Callable[[], float], float]:
    step = cases.mlp(part.small)
    data = step.data(BATCHES)
    model = step.model()
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    @nnx.jit
    def update(model: Any, optimizer: Any, batch: Any) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda model: cases.image_loss(model, batch).mean())(model)
        optimizer.update(model, grads)
        return loss

    rows = step.rows
    batches = [
        {name: leaf[n * rows : (n + 1) * rows] for name, leaf in data.items()}
        for n in range(BATCHES)
    ]

    def run(steps: int) -> jax.Array:
        loss = None
        for number in range(steps):
            loss = update(model, optimizer, batches[number % BATCHES])
        return jax.block_until_ready(loss)

    return per_step(part, run), float(run(BATCHES))


def per_step(part: Part, run: Callable[[int], Any]) -> Callable[[], float]:
    """The seconds of a step, where `run` takes a number of them."""

    def timed() -> float:
        began = time.perf_counter()
        run(count(part))
        return (time.perf_counter() - began) / count(part)

    return timed


def torch_loop(part: Part) -> Callable[[], float]:
    """With a captured CUDA graph where there is CUDA; batches are copied to the graph's inputs."""
    import torch

    from benchmarks.gpu import peers

    step, device = cases.mlp(part.small), peers.DEVICE
    data = step.data(BATCHES)
    torch.set_float32_matmul_precision("high")  # TF32, as XLA:GPU multiplies float32
    widths = cases.MLP_WIDTHS
    layers = [torch.nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    model = torch.nn.Sequential(
        layers[0], torch.nn.ReLU(), layers[1], torch.nn.ReLU(), layers[2]
    ).to(device)
    on_cuda = device.type == "cuda"
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, capturable=on_cuda)
    rows = step.rows
    images = torch.from_numpy(data["image"]).view(BATCHES, rows, -1)
    labels = torch.from_numpy(data["label"]).long().view(BATCHES, rows)
    if on_cuda:
        images, labels = images.pin_memory(), labels.pin_memory()
    image, label = images[0].to(device), labels[0].to(device)

    def update() -> None:
        optimizer.zero_grad(set_to_none=True)
        torch.nn.functional.cross_entropy(model(image), label).backward()
        optimizer.step()

    replay = update
    if on_cuda:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                update()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            update()
        replay = graph.replay

    def run(steps: int) -> None:
        for number in range(steps):
            image.copy_(images[number % BATCHES], non_blocking=True)
            label.copy_(labels[number % BATCHES], non_blocking=True)
            replay()
        if on_cuda:
            torch.cuda.synchronize()

    return per_step(part, run)


if __name__ == "__main__":
    run_part(main)
