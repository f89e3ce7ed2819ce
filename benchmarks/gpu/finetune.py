"""LoRA on a Llama of 1 B, over bfloat16 and 4-bit weights, and the same by transformers and
peft.
"""

from collections.abc import Callable

from benchmarks.gpu import cases
from benchmarks.gpu.measure import Arm, Part, run_part


def main(part: Part) -> None:
    ours = {
        f"ours, {frozen}": Arm(part, cases.arm, f"lora {frozen}") for frozen in ("bfloat16", "nf4")
    }
    plans = {arm: arm.replace("ours,", "lora") for arm in ours}
    tokens = cases.steps(part.small)["lora bfloat16"].batch["tokens"].shape
    arms = ours | {"peft, bfloat16, eager": Arm(part, peft_step)}
    part.alternate("lora", arms, 1.0, plans, tokens=tokens[0] * tokens[1])
    part.compare_losses("lora", ours, 2e-2)  # 4-bit weights are other weights


def peft_step(part: Part) -> Callable[[], None]:
    import peft
    import torch
    import transformers

    from benchmarks.gpu import peers

    device, batch = peers.DEVICE, cases.steps(part.small)["lora bfloat16"].data()
    sizes = dict(cases.SMALL_DECODER if part.small else cases.DECODER)
    for name in ("model_type", "rope_theta"):
        sizes.pop(name)
    config = transformers.LlamaConfig(**sizes, attn_implementation="sdpa")
    with device:
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.config.use_cache = False
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = peft.get_peft_model(model, peft.LoraConfig(r=16, lora_alpha=32, target_modules=targets))
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-3, fused=True
    )
    tokens = torch.from_numpy(batch["tokens"]).long().to(device)

    return peers.step_of(lambda: model(input_ids=tokens, labels=tokens).loss, optimizer)


if __name__ == "__main__":
    run_part(main)
