"""A training step of ResNet-50, and torchvision's, in channels_last, as it is and compiled."""

from collections.abc import Callable

from benchmarks.gpu import cases
from benchmarks.gpu.measure import Arm, Part, run_part


def main(part: Part) -> None:
    ours = Arm(part, cases.arm, "resnet50")
    rows = cases.resnet50(part.small).rows
    for share, name, compiled in ((0.3, "torch", False), (1.0, "torch, compiled", True)):  # compiling it takes long
        peer = Arm(part, torchvision_step, compiled)
        part.alternate(f"resnet50: against {name}", {"ours": ours, name: peer}, share, plan="resnet50", rows=rows)
        peer.close()


def torchvision_step(part: Part, compiled: bool) -> Callable[[], None]:
    import torch
    import torchvision

    from benchmarks.gpu import peers

    torch.backends.cudnn.benchmark = True  # as XLA, it then tries algorithms
    batch = cases.resnet50(part.small).data()
    images = torch.from_numpy(batch["image"]).permute(0, 3, 1, 2).to(peers.DEVICE, memory_format=torch.channels_last)
    labels = torch.from_numpy(batch["label"]).long().to(peers.DEVICE)
    model = torchvision.models.resnet50().to(peers.DEVICE, memory_format=torch.channels_last)
    run = torch.compile(model, backend=peers.BACKEND) if compiled else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    return peers.step_of(lambda: torch.nn.functional.cross_entropy(run(images).float(), labels), optimizer)


if __name__ == "__main__":
    run_part(main)
