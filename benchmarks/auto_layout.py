"""Searches of `layout="auto"` for models of others that carry no axis names: what is found, beside
the best of the shipped layouts.

    pip install -e '.[gpu-compiler]' jaxtyping
    git clone https://github.com/google-deepmind/nanodo; git clone https://github.com/google/flax
    # writes benchmarks/results/auto_layout.md; no GPU is needed
    python benchmarks/auto_layout.py --nanodo nanodo --flax flax

Models: nanodo's, flax's examples of ResNet-50, Gemma and lm1b (whose names are taken off), and a
vision transformer of flax's layers. For each, 12 programs are compiled for 8 H100s. `best shipped`
are the layouts that need no names.
"""

import argparse
import importlib.util
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn, nnx

import spmd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import reported

TARGET, COMPILES = "8xh100", 12
Shape = jax.ShapeDtypeStruct


class ViT(nn.Module):
    """ViT-B/16: patches of 16 x 16 pixels, 12 blocks of 768 (Dosovitskiy et al. 2021,
    arXiv:2010.11929, table 1).
    """

    width: int = 768
    depth: int = 12

    @nn.compact
    def __call__(self, images):
        x = nn.Conv(self.width, (16, 16), (16, 16))(images)
        x = x.reshape(x.shape[0], -1, self.width)
        x = x + self.param("positions", nn.initializers.normal(0.02), (1, x.shape[1], self.width))
        for _ in range(self.depth):
            y = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(12)(y, y)
            x = x + nn.Dense(self.width)(nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x))))
        return nn.Dense(1000)(nn.LayerNorm()(x).mean(1))


def unnamed(model: nn.Module, sample: Any) -> Any:
    """A linen model without the boxes around its parameters, which carry names."""
    return spmd.FunctionalModel(
        lambda key: nn.unbox(model.init(key, sample)["params"]),
        lambda params, x: model.apply({"params": params}, x),
    )


def text(rows: int, length: int) -> dict[str, Any]:
    return {"tokens": Shape((rows, length), "int32"), "targets": Shape((rows, length), "int32")}


def images(rows: int) -> dict[str, Any]:
    return {"image": Shape((rows, 224, 224, 3), "float32"), "label": Shape((rows,), "int32")}


def module(folder: Path, name: str) -> Any:
    """A module of an example, whose siblings it imports by their names."""
    sys.path.insert(0, str(folder))
    spec = importlib.util.spec_from_file_location(f"{folder.name}_{name}", folder / f"{name}.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made
    spec.loader.exec_module(made)
    sys.path.remove(str(folder))
    return made


def nanodo(folder: Path) -> Any:
    sys.path.insert(0, str(folder))
    from nanodo.model import DoConfig, TransformerDo

    return TransformerDo(DoConfig(D=1024, H=16, L=1024, N=12, V=32000, F=4096, dtype=jnp.bfloat16))


def gemma(folder: Path) -> Any:
    sys.path.insert(0, str(folder / "examples" / "gemma"))
    import transformer
    import transformer_cfg

    class Model(nnx.Module):
        """Gemma 1 2B, of tokens alone."""

        def __init__(self) -> None:
            self.inner = transformer.Transformer(
                transformer_cfg.TransformerConfig.gemma_2b(), rngs=nnx.Rngs(0)
            )

        def __call__(self, tokens):
            rows, length = tokens.shape
            causal = jnp.tril(jnp.ones((length, length), bool))[None].repeat(rows, 0)
            return self.inner(tokens, jnp.arange(length)[None].repeat(rows, 0), None, causal)[0]

    return lambda: Model()


def resnet(folder: Path) -> Any:
    return module(folder / "examples" / "imagenet", "models").ResNet50(
        num_classes=1000, dtype=jnp.bfloat16
    )


def lm1b(folder: Path) -> Any:
    models = module(folder / "examples" / "lm1b", "models")
    config = models.TransformerConfig(
        vocab_size=30000,
        output_vocab_size=30000,
        logits_via_embedding=True,
        deterministic=True,
        max_len=128,
        dtype=jnp.bfloat16,
    )
    return unnamed(models.TransformerLM(config), jnp.zeros((1, 128), "int32"))


def cases(options: argparse.Namespace) -> dict[str, tuple[Any, dict[str, Any]]]:
    found = {"ViT-B/16, 1,024 images": (ViT(), images(1024))}
    if options.nanodo:
        found["nanodo, 12 blocks of 1,024, 64 rows of 1,024 tokens"] = (
            nanodo(options.nanodo),
            text(64, 1024),
        )
    if options.flax:
        found["flax's ResNet-50, 1,024 images"] = (resnet(options.flax), images(1024))
        found["flax's lm1b without names, 2,048 rows of 128 tokens"] = (
            lm1b(options.flax),
            text(2048, 128),
        )
        found["flax's Gemma 2B, 16 rows of 2,048 tokens"] = (gemma(options.flax), text(16, 2048))
    return found


def searched(title: str, model: Any, batch: dict[str, Any]) -> list[str]:
    """The row of a case; the file is written and read again."""
    began = time.monotonic()
    options = {
        "loss": spmd.losses.cross_entropy,
        "optimizer": optax.adamw(1e-3),
        "precision": "bfloat16",
    }
    found = spmd.search(
        model,
        batch,
        **options,
        target=TARGET,
        compiles=COMPILES,
        say=lambda line: print(line, file=sys.stderr),
    )
    with tempfile.TemporaryDirectory() as folder:
        assert spmd.Layout.load(found.save(Path(folder) / "found.toml")) == found.layout
    shipped = [
        (candidate, plan)
        for candidate, plan in found.plans
        if not candidate.layout.name.endswith("_by_path")
    ]
    by_path = [
        (candidate, plan)
        for candidate, plan in found.plans
        if candidate.layout.name.endswith("_by_path")
    ]

    def cell(plans: list) -> str:
        if not plans:
            return "none fits"
        candidate, plan = plans[0]
        return (
            f"{candidate}: {1e3 * plan.period.seconds:.0f} ms, {plan.memory.peak / 2**30:.1f} GiB"
        )

    return [
        title,
        cell(list(found.plans)),
        cell(shipped),
        cell(by_path),
        f"{time.monotonic() - began:.0f} s",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nanodo", type=Path)
    parser.add_argument("--flax", type=Path)
    parser.add_argument("--only", help="a part of a title")
    options = parser.parse_args()
    columns = ["model", "found", "best shipped", "best by path", "search"]
    command = " ".join(["python benchmarks/auto_layout.py", *sys.argv[1:]])
    head = reported.head(
        "Layouts found for models without axis names",
        command,
        "jax",
        "jaxlib",
        "flax",
        "jax-cuda13-pjrt",
    )
    about = [
        f"For {TARGET}, {COMPILES} programs of each model. The file of each layout was written, "
        "and read as an equal layout.",
        "",
    ]
    rows = [columns, ["---"] * len(columns)]
    for title, (model, batch) in cases(options).items():
        if (options.only or "") in title:
            rows.append(searched(title, model, batch))
            print(rows[-1], flush=True)
            if not options.only:
                reported.write(
                    "auto_layout", [*head, *about, *("| " + " | ".join(row) + " |" for row in rows)]
                )


if __name__ == "__main__":
    main()
