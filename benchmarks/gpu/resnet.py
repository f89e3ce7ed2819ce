"""A training step of ResNet-50, and torchvision's, in channels_last, as it is and compiled."""

from collections.abc import Callable
from typing import Any

from benchmarks.gpu import cases
from benchmarks.gpu.measure import Part, run_part, torch_device


def main(part: Part) -> None:
    step = cases.resnet50(part.small)
    batch = step.data()
    arms: dict[str, Callable[[], None]] = {"ours": step.arm()}
    torch, device = torch_device()
    try:
        arms |= torchvision_steps(torch, device, batch)
    except ImportError as error:
        part.write("resnet50", failed="torch", error=str(error))
    first = {name: run for name, run in arms.items() if name != "torch, compiled"}
    part.alternate("resnet50", first, 0.3, plan="resnet50", rows=step.rows)
    if "torch, compiled" in arms:  # compiling it takes long: the figures above are on disk by then
        part.alternate(
            "resnet50: against torch.compile", {"ours": arms["ours"], "torch, compiled": arms["torch, compiled"]}, 1.0, plan="resnet50"
        )


def torchvision_steps(torch: Any, device: Any, batch: dict[str, Any]) -> dict[str, Callable[[], None]]:
    import torchvision

    torch.backends.cudnn.benchmark = True  # as XLA, it then tries algorithms

    from benchmarks.gpu import peers

    images = torch.from_numpy(batch["image"]).permute(0, 3, 1, 2).to(device, memory_format=torch.channels_last)
    labels = torch.from_numpy(batch["label"]).long().to(device)

    def step(*, compiled: bool) -> Callable[[], None]:
        model = torchvision.models.resnet50().to(device, memory_format=torch.channels_last)
        run = torch.compile(model, backend=peers.BACKEND) if compiled else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
        return peers.step_of(lambda: torch.nn.functional.cross_entropy(run(images).float(), labels), optimizer)

    return {"torch": step(compiled=False), "torch, compiled": step(compiled=True)}


if __name__ == "__main__":
    run_part(main)
