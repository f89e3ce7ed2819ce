"""A training step of ResNet-50, and torchvision's, in channels_last, as it is and compiled."""

import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.gpu import cases, references
from benchmarks.gpu.measure import Arm, Part, run_part

ROWS = 16  # that a checked batch repeats: batch norm then has the mean and the variance of these
# of the gradient of the head, which all layers before it decide; with four rows it is at 0.06 on a
# CPU
HEAD = 0.2


def main(part: Part) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        references.start(part, folder, {"resnet50": ROWS})
        ours = Arm(part, checked_step, folder)
        rows = cases.resnet50(part.small).rows
        # compiling it takes long
        for share, title, compiled in ((0.3, "torch", False), (1.0, "torch, compiled", True)):
            peer = Arm(part, torchvision_step, compiled)
            part.alternate(
                f"resnet50: against {title}",
                {"ours": ours, title: peer},
                share,
                {"ours": "resnet50"},
                rows=rows,
            )
            peer.close()


def checked_step(part: Part, folder: Path) -> Callable[[], None]:
    step = cases.resnet50(part.small)
    trainer, batch = step.trainer(), step.data()
    state, metrics = trainer.step(
        trainer.init(batch), trainer.place(references.repeat(batch, ROWS))
    )
    # At first, rounding to bfloat16 turns the gradients of the early layers by as much as they are:
    # they are not compared.
    head = {
        name: leaf
        for name, leaf in references.first_gradients(state.opt).items()
        if "'head'" in name
    }
    references.check(part, "resnet50", "ours", metrics["loss"], head, folder=folder, bound=HEAD)
    return cases.repeated_step(trainer, state, trainer.place(batch))


def torchvision_step(part: Part, compiled: bool) -> Callable[[], None]:
    import torch
    import torchvision

    from benchmarks.gpu import peers

    torch.backends.cudnn.benchmark = True  # as XLA, it then tries algorithms
    batch = cases.resnet50(part.small).data()
    images = (
        torch.from_numpy(batch["image"])
        .permute(0, 3, 1, 2)
        .to(peers.DEVICE, memory_format=torch.channels_last)
    )
    labels = torch.from_numpy(batch["label"]).long().to(peers.DEVICE)
    model = torchvision.models.resnet50().to(peers.DEVICE, memory_format=torch.channels_last)
    run = torch.compile(model, backend=peers.BACKEND) if compiled else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    return peers.step_of(
        lambda: torch.nn.functional.cross_entropy(run(images).float(), labels), optimizer
    )


if __name__ == "__main__":
    run_part(main)
