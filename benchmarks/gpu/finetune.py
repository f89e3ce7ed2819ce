"""LoRA on a Llama of 1 B, over bfloat16 and 4-bit weights, and the same by transformers and peft."""

from collections.abc import Callable
from typing import Any

from benchmarks.gpu import cases
from benchmarks.gpu.measure import Part, run_part, torch_device


def main(part: Part) -> None:
    named = cases.steps(part.small)
    arms = {f"ours, {frozen}": named[f"lora {frozen}"].arm() for frozen in ("nf4", "bfloat16")}
    torch, device = torch_device()
    if torch is None:
        part.write("lora", failed="peft", error="torch is not installed")
    else:
        with part.guarded("lora", "peft"):
            arms["peft, bfloat16"] = peft_step(torch, device, part.small, named["lora bfloat16"].data())
    part.alternate("lora", arms, 1.0, plan="lora nf4")


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
