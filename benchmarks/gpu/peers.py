"""The same models and steps in torch, as its users write them: bfloat16 by autocast, fused AdamW,
blocks compiled one by one.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as functional
from torch import nn

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
BACKEND = "inductor" if CUDA else "eager"  # a rehearsal on a CPU need not compile


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, groups: int, rotary: bool):
        super().__init__()
        self.heads, self.groups, self.size, self.rotary = heads, groups, width // heads, rotary
        self.query, self.out = (
            nn.Linear(width, width, bias=False),
            nn.Linear(width, width, bias=False),
        )
        self.key, self.value = (nn.Linear(width, groups * self.size, bias=False) for _ in range(2))

    def forward(self, x: Any) -> Any:
        rows, length, _ = x.shape
        query = self.query(x).view(rows, length, self.heads, self.size).transpose(1, 2)
        key, value = (
            linear(x).view(rows, length, self.groups, self.size).transpose(1, 2)
            for linear in (self.key, self.value)
        )
        if self.rotary:
            query, key = rotated(query), rotated(key)
        grouped = self.groups != self.heads
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=grouped
        )
        return self.out(mixed.transpose(1, 2).reshape(rows, length, -1))


def rotated(x: Any, base: float = 500_000.0) -> Any:
    """Rotary positions of [rows, heads, length, size]."""
    half = x.shape[-1] // 2
    rates = base ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)[:, None] * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    left, right = x[..., :half], x[..., half:]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


class Block(nn.Module):
    """Pre-norm attention and an MLP: GELU for GPT, SwiGLU with `hidden` for Llama."""

    def __init__(self, width: int, heads: int, groups: int, hidden: int | None):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, heads, groups, rotary=hidden is not None)
        self.gate = None if hidden is None else nn.Linear(width, hidden, bias=False)
        self.up, self.down = (
            nn.Linear(width, hidden or 4 * width, bias=False),
            nn.Linear(hidden or 4 * width, width, bias=False),
        )

    def forward(self, x: Any) -> Any:
        x = x + self.attention(self.norm1(x))
        h = self.norm2(x)
        inside = (
            functional.gelu(self.up(h), approximate="tanh")
            if self.gate is None
            else functional.silu(self.gate(h)) * self.up(h)
        )
        return x + self.down(inside)


class Transformer(nn.Module):
    """A decoder whose head is the embedding's table, with the sizes of `cases.GPT2` or
    `cases.LLAMA`.
    """

    def __init__(
        self,
        *,
        vocab: int,
        width: int,
        depth: int,
        heads: int,
        groups: int | None = None,
        hidden: int | None = None,
        length: int = 0,
    ):
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.places = nn.Embedding(length, width) if length else None
        self.blocks = nn.ModuleList(
            [Block(width, heads, groups or heads, hidden) for _ in range(depth)]
        )
        self.norm = nn.RMSNorm(width)
        for weights in self.parameters():
            if weights.dim() > 1:
                nn.init.normal_(weights, std=0.02)

    def forward(self, tokens: Any, targets: Any) -> Any:
        x = self.tokens(tokens)
        if self.places is not None:
            x = x + self.places.weight
        # autocast would keep the sums of residuals in float32, which the other arms have in
        # bfloat16
        x = x.bfloat16()
        for block in self.blocks:
            x = block(x)
        return head_loss(self.norm(x), self.tokens.weight, targets)


@torch.compile(backend=BACKEND)
def head_loss(features: Any, table: Any, targets: Any) -> Any:
    logits = functional.linear(features, table).flatten(0, 1)
    return functional.cross_entropy(logits.float(), targets.flatten().long())


def transformer_step(sizes: dict[str, int], batch: dict[str, Any]) -> Callable[[], None]:
    """A step of a transformer on a batch of numpy arrays; it waits for the device."""
    with DEVICE:
        model = Transformer(**sizes)
    for block in model.blocks:
        block.compile(backend=BACKEND)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4, fused=True)
    tokens, targets = (torch.from_numpy(batch[name]).to(DEVICE) for name in ("tokens", "targets"))
    return step_of(lambda: model(tokens, targets), optimizer)


def step_of(loss: Callable[[], Any], optimizer: Any) -> Callable[[], None]:
    """Forward under autocast, backward, update; waits for the device."""

    def run() -> None:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        wait()

    return run


def wait() -> None:
    if CUDA:
        torch.cuda.synchronize()
