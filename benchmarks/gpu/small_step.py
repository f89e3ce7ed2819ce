"""Microseconds of a step of a small MLP, where the host is what costs: `fit`, resident data, nnx.jit, torch with CUDA graphs."""

import itertools
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
    builds = {"ours, fit": (fit, False), "ours, fit, resident data": (fit, True), "nnx.jit": (nnx_loop,), "torch": (torch_loop,)}
    part.alternate("mlp", {name: Arm(part, *build) for name, build in builds.items()}, 1.0, steps=count(part))


def count(part: Part) -> int:
    """Steps of one call."""
    return 20 if part.small else 1000


def fit(part: Part, resident: bool) -> Callable[[], float]:
    """The seconds of the steps of one run, as it reports them."""
    step = cases.mlp(part.small)
    data = step.data(BATCHES)
    chosen = spmd.data.resident(data, steps_per_call=BATCHES) if resident else data

    def run() -> float:
        result = spmd.fit(step.model, chosen, batch_size=step.rows, steps=count(part), progress=False, **step.options)
        return count(part) * step.rows / result.samples_per_second

    return run


def nnx_loop(part: Part) -> Callable[[], None]:
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
    batches = [{name: leaf[n * rows : (n + 1) * rows] for name, leaf in data.items()} for n in range(BATCHES)]

    def run() -> None:
        loss = None
        for number in range(count(part)):
            loss = update(model, optimizer, batches[number % BATCHES])
        jax.block_until_ready(loss)

    return run


def torch_loop(part: Part) -> Callable[[], None]:
    """With a captured CUDA graph where there is CUDA; batches are copied to the graph's inputs."""
    import torch

    from benchmarks.gpu import peers

    step, device = cases.mlp(part.small), peers.DEVICE
    data = step.data(BATCHES)
    torch.set_float32_matmul_precision("high")  # TF32, as XLA:GPU multiplies float32
    widths = cases.MLP_WIDTHS
    layers = [torch.nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    model = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1], torch.nn.ReLU(), layers[2]).to(device)
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

    def run() -> None:
        for number in range(count(part)):
            image.copy_(images[number % BATCHES], non_blocking=True)
            label.copy_(labels[number % BATCHES], non_blocking=True)
            replay()
        if on_cuda:
            torch.cuda.synchronize()

    return run


if __name__ == "__main__":
    run_part(main)
