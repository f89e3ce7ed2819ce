"""Microseconds of a step of a small MLP, where the host is what costs: `fit`, resident data, nnx.jit, torch with CUDA graphs."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import optax
from flax import nnx

import spmd
from benchmarks.gpu import cases
from benchmarks.gpu.measure import Part, run_part, torch_device


def main(part: Part) -> None:
    step = cases.mlp(part.small)
    count = 20 if part.small else 1000
    data = step.data(50)

    def fitted(data: Any) -> Callable[[], None]:
        """Seconds of `count` steps of one run; compiled programs are those of the call before."""
        return lambda: rates.append(
            spmd.fit(step.model, data, batch_size=step.rows, steps=count, progress=False, **step.options).samples_per_second
        )

    for name, chosen in (("fit", data), ("fit, resident", spmd.data.resident(data, steps_per_call=50))):
        rates: list[float] = []
        run = fitted(chosen)
        for _ in range(3):
            run()
        part.write("mlp", arm=name, microseconds=sorted(step.rows / rate * 1e6 for rate in rates))

    arms: dict[str, Callable[[], None]] = {"nnx.jit": nnx_loop(step, data, count)}
    torch, device = torch_device()
    if torch is None:
        part.write("mlp", failed="torch", error="torch is not installed")
    else:
        with part.guarded("mlp", "torch"):
            arms["torch"] = torch_loop(torch, device, step, data, count)
    part.alternate("mlp", arms, 1.0, steps=count)


def nnx_loop(step: cases.Step, data: dict[str, Any], count: int) -> Callable[[], None]:
    model = step.model()
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    @nnx.jit
    def update(model: Any, optimizer: Any, batch: Any) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda model: cases.image_loss(model, batch).mean())(model)
        optimizer.update(model, grads)
        return loss

    rows = step.rows
    batches = [{name: leaf[n * rows : (n + 1) * rows] for name, leaf in data.items()} for n in range(50)]

    def run() -> None:
        loss = None
        for number in range(count):
            loss = update(model, optimizer, batches[number % 50])
        jax.block_until_ready(loss)

    return run


def torch_loop(torch: Any, device: Any, step: cases.Step, data: dict[str, Any], count: int) -> Callable[[], None]:
    """With a captured CUDA graph where there is CUDA; batches are copied to the graph's inputs."""
    widths = cases.MLP_WIDTHS
    layers = [torch.nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    model = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1], torch.nn.ReLU(), layers[2]).to(device)
    on_cuda = device.type == "cuda"
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, capturable=on_cuda)
    rows = step.rows
    images = torch.from_numpy(data["image"]).view(50, rows, -1)
    labels = torch.from_numpy(data["label"]).long().view(50, rows)
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
        for number in range(count):
            image.copy_(images[number % 50], non_blocking=True)
            label.copy_(labels[number % 50], non_blocking=True)
            replay()
        if on_cuda:
            torch.cuda.synchronize()

    return run


if __name__ == "__main__":
    run_part(main)
