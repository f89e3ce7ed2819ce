"""Direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290) of the GPT of gpt.py, on
preference pairs.

    python examples/dpo.py --layout fsdp --mesh data=8

First the model learns to answer a word in two ways, quietly and loudly. Pairs then prefer the quiet
answer, and equation 7 is the loss of a second fit. The log-probabilities under the first model, the
reference, are computed once and are part of the data. Needs the extra `text`.
"""

import argparse
import json
import string
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tokenizers
from flax import nnx

import spmd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from examples.gpt import GPT

LENGTH, KINDS = 24, ("chosen", "rejected")
# by kind, then "tokens", "targets" and "mask" [pairs, length]
Pairs = dict[str, dict[str, np.ndarray]]


def make_model(**sizes: int) -> GPT:
    return GPT(**{"vocab": 128, "length": LENGTH, **sizes}, rngs=nnx.Rngs(0))


def characters() -> tokenizers.Tokenizer:
    """A tokenizer whose tokens are ASCII characters."""
    vocabulary = {
        "<end>": 0,
        **{character: number for number, character in enumerate(string.printable, 1)},
    }
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<end>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    return tokenizer


def load_pairs(count: int, seed: int) -> Pairs:
    """Words, each with a quiet and a loud answer, by way of a file as preference data comes in."""
    rng = np.random.default_rng(seed)
    words = [
        "".join(
            rng.choice(list("bdfgklmnprst")) + rng.choice(list("aeiou"))
            for _ in range(rng.integers(2, 5))
        )
        for _ in range(count)
    ]
    lines = [
        {"prompt": f"{word}?", "chosen": f" {word}.", "rejected": f" {word.upper()}!"}
        for word in words
    ]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "pairs.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        options: dict[str, Any] = {
            "tokenizer": characters(),
            "eos": "<end>",
            "length": LENGTH,
            "batch_size": count,
        }
        readers = {
            kind: spmd.data.text(
                file,
                field=("prompt", kind),
                loss_on="answers",
                pack=False,
                shuffle=False,
                long="error",
                **options,
            )
            for kind in KINDS
        }
        # unshuffled and unpacked: row n is line n
        rows = {kind: next(iter(reader)) for kind, reader in readers.items()}
    return {
        kind: {name: rows[kind][name] for name in ("tokens", "targets", "mask")} for kind in KINDS
    }


def log_probabilities(logits: jax.Array, rows: Any) -> jax.Array:
    """Of each answer, float32[rows]: the sum over its tokens, from logits [rows, length, vocab]."""
    tokens = -optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), rows["targets"]
    )
    return (tokens * rows["mask"]).sum(axis=1)


def dpo_loss(beta: float) -> Any:
    """Equation 7: -log sigmoid(beta * (log ratio of the chosen answer - log ratio of the rejected
    one)), one value per pair.
    """

    def loss(model: Any, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        chosen, rejected = (
            log_probabilities(model(batch[kind]["tokens"]), batch[kind]) - batch["ref"][kind]
            for kind in KINDS
        )
        margin = beta * (chosen - rejected)
        return -jax.nn.log_sigmoid(margin), {
            "margin": margin,
            "chosen": chosen,
            "rejected": rejected,
        }

    return loss


def with_reference(result: spmd.Result, pairs: Pairs) -> dict[str, Any]:
    """The pairs, and log-probabilities of their answers under a model."""
    return {
        **pairs,
        "ref": {
            kind: np.asarray(log_probabilities(result.predict(pairs[kind]["tokens"]), pairs[kind]))
            for kind in KINDS
        },
    }


def quiet(result: spmd.Result, pairs: Pairs) -> float:
    """The share of pairs whose chosen answer is the likelier one."""
    chosen, rejected = (with_reference(result, pairs)["ref"][kind] for kind in KINDS)
    return float((chosen > rejected).mean())


def main(argv: list[str] | None = None) -> spmd.Result:
    parser = argparse.ArgumentParser(description="Teach a small GPT by preference pairs.")
    parser.add_argument(
        "--layout",
        default="data_parallel",
        help="a shipped layout's name, or a path to a TOML file",
    )
    parser.add_argument("--mesh", help='such as "data=4,model=2"; by default the layout\'s own')
    parser.add_argument(
        "--devices",
        type=int,
        default=8,
        help="CPU devices to simulate; 0 uses the devices there are",
    )
    parser.add_argument("--steps", type=int, default=150, help="of each of the two fits")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument(
        "--beta", type=float, default=0.1, help="how strongly the reference is kept"
    )
    args = parser.parse_args(argv)
    if args.devices:
        spmd.simulate_devices(args.devices)  # before anything asks JAX for a device
    train, test = load_pairs(1024, seed=0), load_pairs(256, seed=1)
    options: dict[str, Any] = {
        name: getattr(args, name) for name in ("mesh", "layout", "batch_size", "steps")
    }
    both = {name: np.concatenate([train[kind][name] for kind in KINDS]) for name in train["chosen"]}
    answers = spmd.losses.cross_entropy.on(mask="mask")
    reference = spmd.fit(
        make_model, both, loss=answers, optimizer=optax.adamw(3e-3), progress=True, **options
    )
    before = quiet(reference, test)
    pairs = with_reference(reference, train)
    result = spmd.fit(
        reference.model,
        pairs,
        loss=dpo_loss(args.beta),
        optimizer=optax.adamw(3e-4),
        progress=True,
        **options,
    )
    print(
        f"quiet answers are likelier in {before:.0%} of test pairs before, and in "
        f"{quiet(result, test):.0%} after"
    )
    return result


if __name__ == "__main__":
    main()
