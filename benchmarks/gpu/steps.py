"""A training step of GPT-2 124M and of a Llama of 1 B: `spmd.fit`, a jitted loop by hand, torch.compile."""

import gc
from typing import Any

import jax
import numpy as np

import spmd
from benchmarks.gpu import cases
from benchmarks.gpu.measure import Part, distance, on_cpu, peak_bytes, run_part, torch_device

FIT_STEPS = 12


def main(part: Part) -> None:
    sizes = {"gpt2": cases.SMALL_GPT2 if part.small else cases.GPT2, "llama": cases.SMALL_LLAMA if part.small else cases.LLAMA}
    for share, name in ((0.45, "gpt2"), (1.0, "llama")):
        measure(part, name, cases.steps(part.small)[name], sizes[name], share)
        gc.collect()


def measure(part: Part, name: str, step: cases.Step, sizes: dict[str, int], share: float) -> None:
    ends = part.left * (1 - share)
    hand = cases.ByHand(step)
    batch = step.data()
    params, others, optimizer_state = hand.init()
    on_host = jax.tree.map(np.asarray, (params, optimizer_state))  # so that the peak below is that of `fit`
    few = 256 if name == "llama" else None  # GPT-2 has a table of positions, which takes full rows
    row = {key: leaf[:1, :few] for key, leaf in batch.items()}
    reference = cases.ByHand(step)
    reference.graph, reference.dtype = hand.graph, np.dtype("float32")
    expected = on_cpu_loss(reference, params, others, row)
    error = distance(jax.jit(hand.loss)(params, others, row)[0], expected)
    if not part.check(name, "loss by hand, one row, against float32 on the CPU", error, 1e-2):
        return
    full = float(jax.jit(hand.loss)(params, others, batch)[0])
    part.write(name, peak_bytes_before_fit=peak_bytes())
    del params, optimizer_state
    gc.collect()

    result = spmd.fit(step.model, step.data(FIT_STEPS), batch_size=step.rows, steps=FIT_STEPS, progress=False, **step.options)
    peak, trainer, state = peak_bytes(), result.trainer, result.state
    counts = result.compilations
    part.write(
        name,
        fit_samples_per_second=result.samples_per_second,
        peak_bytes=peak,
        compiling_seconds=counts.seconds if counts else None,
        notes=trainer.notes(),
    )
    placed = trainer.place(batch)
    evaluated = trainer.evaluate(trainer.init(batch), batch, batch_size=step.rows)["loss"]
    if not part.check(name, "loss of fit's model against the loop by hand", abs(evaluated - full) / abs(full), 1e-2):
        return
    holder = {"state": state}
    del result, state

    def ours() -> None:
        holder["state"], metrics = trainer.step(holder["state"], placed)
        metrics.wait()

    tokens = int(np.prod(step.batch["tokens"].shape))
    torch, _ = torch_device()
    if torch is None:
        part.write(name, failed="torch", error="torch is not installed")
    else:
        from benchmarks.gpu import peers

        with part.guarded(name, "torch"):
            peer = peers.transformer_step(sizes, batch)
            part.alternate(f"{name}: against torch", {"ours": ours, "torch": peer}, 0.5, plan=name, tokens=tokens, peak_bytes=peak)
            del peer
        gc.collect()
        peers.free()
    params, optimizer_state = jax.device_put(on_host)
    held, on_device = [params, others, optimizer_state], jax.device_put(batch)

    def hand_step() -> None:
        *held[:], loss = hand.compiled(*held, on_device)
        loss.block_until_ready()

    left = max(part.left - ends, 1.0) / max(part.left, 1.0)
    part.alternate(f"{name}: against jit by hand", {"ours": ours, "jit by hand": hand_step}, left, plan=name, tokens=tokens)


def on_cpu_loss(reference: cases.ByHand, params: Any, others: Any, row: Any) -> Any:
    return on_cpu(lambda *arrays: reference.loss(*arrays)[0], params, others, row)


if __name__ == "__main__":
    run_part(main)
