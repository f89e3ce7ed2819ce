"""A training step of GPT-2 124M and of a Llama of 1 B: `spmd.fit`, a jitted loop by hand, torch.compile."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import spmd
from benchmarks.gpu import cases
from benchmarks.gpu.measure import Arm, Part, on_cpu, run_part

FIT_STEPS = 12
BOUND = 1e-2  # relative, of a loss in bfloat16


def main(part: Part) -> None:
    for share, name in ((0.45, "gpt2"), (1.0, "llama")):
        step = cases.steps(part.small)[name]
        expected = loss_on_cpu(step)
        ends = part.left * (1 - share)
        tokens = int(np.prod(step.batch["tokens"].shape))
        ours = Arm(part, fit, name, expected)
        for number, (title, build) in enumerate({"torch": torch_step, "jit by hand": by_hand}.items()):  # 80 GB do not hold all three
            peer = Arm(part, build, name, expected)
            left = (part.left - ends) / (2 - number) / max(part.left, 1.0)
            part.alternate(f"{name}: against {title}", {"ours": ours, title: peer}, left, plan=name, tokens=tokens)
            peer.close()
        ours.close()


def loss_on_cpu(step: cases.Step) -> float:
    """The loss of a batch whose rows are all the first one, in float32."""
    hand = cases.ByHand(step)
    params, others, _ = hand.init()
    hand.dtype = np.dtype("float32")
    row = {name: leaf[:1] for name, leaf in step.data().items()}
    return float(on_cpu(lambda *arrays: hand.loss(*arrays)[0], params, others, row))


def of_one_row(step: cases.Step) -> dict[str, np.ndarray]:
    return {name: np.broadcast_to(leaf[:1], leaf.shape) for name, leaf in step.data().items()}


def checked(part: Part, name: str, arm: str, loss: Any, expected: float) -> None:
    """Go on only if the first loss is that of the CPU."""
    distance = abs(float(loss) - expected) / abs(expected)
    if not part.check(name, f"first loss of {arm} against float32 on the CPU", distance, BOUND):
        raise ValueError(f"the loss is {float(loss)}, and should be {expected}; it is not timed")


def fit(part: Part, name: str, expected: float) -> Callable[[], None]:
    """Steps of the trainer of a run that has ended."""
    step = cases.steps(part.small)[name]
    result = spmd.fit(step.model, step.data(FIT_STEPS), batch_size=step.rows, steps=FIT_STEPS, progress=False, **step.options)
    trainer, counts = result.trainer, result.compilations
    compiling = counts.seconds if counts else None
    part.write(name, fit_samples_per_second=result.samples_per_second, compiling_seconds=compiling, notes=trainer.notes())
    del result  # and its state
    batch = step.data()
    state, metrics = trainer.step(trainer.init(batch), trainer.place(of_one_row(step)))
    checked(part, name, "ours", metrics["loss"], expected)
    placed = trainer.place(batch)

    def run() -> None:
        nonlocal state
        state, metrics = trainer.step(state, placed)
        metrics.wait()

    return run


def by_hand(part: Part, name: str, expected: float) -> Callable[[], None]:
    step = cases.steps(part.small)[name]
    hand = cases.ByHand(step)
    *held, loss = hand.compiled(*hand.init(), of_one_row(step))
    checked(part, name, "the loop by hand", loss, expected)
    batch = jax.device_put(step.data())

    def run() -> None:
        *held[:], loss = hand.compiled(*held, batch)
        loss.block_until_ready()

    return run


def torch_step(part: Part, name: str, expected: float) -> Callable[[], None]:
    """Its weights are others, so that its loss is not compared."""
    from benchmarks.gpu import peers

    sizes = {"gpt2": (cases.GPT2, cases.SMALL_GPT2), "llama": (cases.LLAMA, cases.SMALL_LLAMA)}[name][part.small]
    return peers.transformer_step(sizes, cases.steps(part.small)[name].data())


if __name__ == "__main__":
    run_part(main)
