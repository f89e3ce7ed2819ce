"""A training step of GPT-2 124M and of a Llama of 1 B: `spmd.fit`, torch.compile, and a jit of the
same model by hand.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

import spmd
from benchmarks.gpu import cases, references
from benchmarks.gpu.measure import LEAST, Arm, Part, run_part, seconds

MODELS = ("gpt2", "llama")
FIT_STEPS = 12
# Of the worst array. On a CPU that is 0.06 in bfloat16, and 1 with attention that is zero, noise or
# not causal (all arrays: 0.75 or more).
GRADIENTS = 0.15
ALL_MEMORY, HALF = 0.9, 0.45  # of the device's memory: alone, and beside a peer


def main(part: Part) -> None:
    peers = {"torch": torch_step, "jit of the same model": by_hand}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        references.start(part, folder, dict.fromkeys(MODELS, 1))
        for model in MODELS:  # first those without which the day is lost
            ours = Arm(part, fit, model, folder, memory=ALL_MEMORY)
            part.alternate(model, {"ours": ours}, 0.1, {"ours": model}, tokens=tokens(part, model))
            ours.close()
        for number, model in enumerate(MODELS):
            if not part.begins(f"{model}: against peers", "all"):
                continue
            ours = Arm(part, fit, model, folder, memory=HALF)  # from the cache of programs
            for title, build in peers.items():  # one after the other: 80 GB do not hold all three
                peer = Arm(part, build, model, folder, memory=HALF)
                share = 1 / (2 * len(MODELS) - 2 * number)
                arms = {"ours": ours, title: peer}
                part.alternate(
                    f"{model}: against {title}",
                    arms,
                    share,
                    {"ours": model},
                    tokens=tokens(part, model),
                )
                peer.close()
            ours.close()


def tokens(part: Part, model: str) -> int:
    return int(np.prod(cases.steps(part.small)[model].batch["tokens"].shape))


def fit(part: Part, model: str, folder: Path) -> Callable[[], None]:
    """Steps of the trainer of a run that has ended, after a check of the first one."""
    step = cases.steps(part.small)[model]
    result = spmd.fit(
        step.model,
        step.data(FIT_STEPS),
        batch_size=step.rows,
        steps=FIT_STEPS,
        progress=False,
        **step.options,
    )
    trainer, counts, by_fit = (
        result.trainer,
        result.compilations,
        step.rows / result.samples_per_second,
    )
    compiled = counts and {
        "compiled": counts.compiled,
        "loaded": counts.loaded,
        "compiling_seconds": counts.seconds,
    }
    part.write(f"{model}: programs", programs=compiled, notes=trainer.notes())
    del result  # and its state
    batch = step.data()
    state, metrics = trainer.step(trainer.init(batch), trainer.place(references.repeat(batch, 1)))
    found = references.first_gradients(state.opt)
    references.check(part, model, "ours", metrics["loss"], found, folder=folder, bound=GRADIENTS)
    run = cases.repeated_step(trainer, state, trainer.place(batch))
    run()
    one = sorted(seconds(run) for _ in range(LEAST))
    part.write(
        f"{model}: a step by fit",
        seconds=by_fit,
        trainer_step_seconds=one[LEAST // 2],
        fit_over_step=by_fit / one[LEAST // 2],
    )
    return run


def by_hand(part: Part, model: str, folder: Path) -> Callable[[], None]:
    step = cases.steps(part.small)[model]
    hand = cases.ByHand(step)
    batch = step.data()
    *held, loss = hand.compiled(*hand.init(), references.repeat(batch, 1))
    found = references.first_gradients(held[2])
    references.check(part, model, "the jit by hand", loss, found, folder=folder, bound=GRADIENTS)
    placed = jax.device_put(batch)

    def run() -> None:
        *held[:], loss = hand.compiled(*held, placed)
        loss.block_until_ready()

    return run


def torch_step(part: Part, model: str, folder: Path) -> Callable[[], None]:
    """Its weights are others: it is timed without a check."""
    from benchmarks.gpu import peers

    sizes = {"gpt2": (cases.GPT2, cases.SMALL_GPT2), "llama": (cases.LLAMA, cases.SMALL_LLAMA)}[
        model
    ][part.small]
    return peers.transformer_step(sizes, cases.steps(part.small)[model].data())


if __name__ == "__main__":
    run_part(main)
