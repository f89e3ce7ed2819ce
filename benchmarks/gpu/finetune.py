"""LoRA on a Llama of 1 B, over bfloat16 and 4-bit weights, and the same by transformers and peft."""

import gc
from collections.abc import Callable
from typing import Any

import spmd
from benchmarks.gpu import cases
from benchmarks.gpu.measure import Part, peak_bytes, run_part, torch_device


def main(part: Part) -> None:
    arms: dict[str, Callable[[], None]] = {}
    peaks = {}
    named = cases.steps(part.small)
    batch = named["lora bfloat16"].data()
    for name in ("lora nf4", "lora bfloat16"):  # the smaller one first: peaks only grow
        step = named[name]
        trainer = spmd.Trainer(step.model, **step.options)
        held = [trainer.init(batch)]
        placed = trainer.place(batch)

        def run(trainer=trainer, held=held, placed=placed) -> None:
            held[0], metrics = trainer.step(held[0], placed)
            metrics.wait()

        run()
        peaks[name] = peak_bytes()
        arms[name] = run
    torch, device = torch_device()
    if torch is None:
        part.write("lora", failed="peft", error="torch is not installed")
    else:
        with part.guarded("lora", "peft"):
            arms["peft, bfloat16"] = peft_step(torch, device, part.small, batch)
    named_arms = {"ours " + name: run for name, run in arms.items() if name.startswith("lora")}
    part.alternate("lora", named_arms | {n: r for n, r in arms.items() if not n.startswith("lora")}, 1.0, plan="lora nf4", peaks=peaks)
    gc.collect()


def peft_step(torch: Any, device: Any, small: bool, batch: dict[str, Any]) -> Callable[[], None]:
    import peft
    import transformers

    sizes = dict(cases.SMALL_DECODER if small else cases.DECODER)
    for name in ("model_type", "rope_theta"):
        sizes.pop(name)
    config = transformers.LlamaConfig(**sizes, attn_implementation="sdpa")
    with device:
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.config.use_cache = False
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = peft.get_peft_model(model, peft.LoraConfig(r=16, lora_alpha=32, target_modules=targets))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, fused=True)
    tokens = torch.from_numpy(batch["tokens"]).long().to(device)

    def run() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize()

    return run


if __name__ == "__main__":
    run_part(main)
