"""The training steps that the parts measure, each written once: the parts run them, and `plan.py`
plans them for GPUs.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import spmd
from benchmarks.gpu.measure import Part
from benchmarks.published.models import Llama, ResNet50, next_token_loss
from examples.gpt_pipeline import GPT
from spmd.pretrained.decoder import Decoder
from spmd.pretrained.decoder_config import DecoderConfig


@dataclasses.dataclass(frozen=True)
class Array:
    """An array of a batch: integers below `below`, or normal numbers without it."""

    shape: tuple[int, ...]
    below: int = 0

    @property
    def dtype(self) -> str:
        return "int32" if self.below else "float32"


@dataclasses.dataclass(frozen=True)
class Step:
    """A training step on one device."""

    model: Callable[[], Any]
    loss: Callable[..., Any]
    batch: Mapping[str, Array]
    layout: spmd.Layout = dataclasses.field(
        default_factory=lambda: spmd.Layout.load("data_parallel")
    )
    precision: str = "bfloat16"
    optimizer: Any = dataclasses.field(default_factory=lambda: optax.adamw(1e-3))

    @property
    def rows(self) -> int:
        return next(iter(self.batch.values())).shape[0]

    @property
    def options(self) -> dict[str, Any]:
        """What `fit`, `Trainer` and `plan` take."""
        return {
            "loss": self.loss,
            "optimizer": self.optimizer,
            "layout": self.layout,
            "precision": self.precision,
            "mesh": "data=1",
        }

    def data(self, batches: int = 1) -> dict[str, np.ndarray]:
        """Random rows for a number of batches."""
        random = np.random.default_rng(0)
        shapes = {
            name: (batches * array.shape[0], *array.shape[1:]) for name, array in self.batch.items()
        }
        return {
            name: random.integers(0, array.below, shapes[name]).astype("int32")
            if array.below
            else random.normal(size=shapes[name]).astype("float32")
            for name, array in self.batch.items()
        }

    def trainer(self) -> spmd.Trainer:
        return spmd.Trainer(self.model, **self.options)

    def plan(self, target: str) -> Any:
        """The plan for one device of a kind, such as "h100"."""
        shapes = {
            name: jax.ShapeDtypeStruct(array.shape, array.dtype)
            for name, array in self.batch.items()
        }
        return spmd.plan(self.model, shapes, target=f"1x{target}", **self.options)


def tokens(rows: int, length: int, vocab: int) -> dict[str, Array]:
    """Of a language model."""
    return {name: Array((rows, length), vocab) for name in ("tokens", "targets")}


GPT2 = {"vocab": 50304, "width": 768, "depth": 12, "heads": 12, "length": 1024}
# the shape of Llama 3.2 1B
LLAMA = {"vocab": 128256, "width": 2048, "depth": 16, "heads": 32, "groups": 8, "hidden": 8192}
SMALL_GPT2 = {"vocab": 256, "width": 64, "depth": 2, "heads": 4, "length": 64}
SMALL_LLAMA = {"vocab": 256, "width": 64, "depth": 2, "heads": 4, "groups": 2, "hidden": 128}


def gpt2(small: bool) -> Step:
    sizes = SMALL_GPT2 if small else GPT2
    rows = 4 if small else 32
    return Step(
        lambda: GPT(**sizes, tied=True, rngs=nnx.Rngs(0)),
        next_token_loss,
        tokens(rows, sizes["length"], sizes["vocab"]),
    )


def restarted(small: bool) -> Step:
    """GPT-2 with two of its twelve layers."""
    step, sizes = gpt2(small), (SMALL_GPT2 if small else GPT2) | {"depth": 2}
    return dataclasses.replace(step, model=lambda: GPT(**sizes, tied=True, rngs=nnx.Rngs(0)))


def llama(small: bool) -> Step:
    sizes = SMALL_LLAMA if small else LLAMA
    rows, length = (2, 64) if small else (2, 2048)
    return Step(
        lambda: Llama(**sizes, tied=True, rngs=nnx.Rngs(0)),
        next_token_loss,
        tokens(rows, length, sizes["vocab"]),
    )


def image_loss(model: Any, batch: Any) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(
        model(batch["image"]).astype(jnp.float32), batch["label"]
    )


def resnet50(small: bool) -> Step:
    rows, side = (2, 32) if small else (256, 224)
    batch = {"image": Array((rows, side, side, 3)), "label": Array((rows,), 1000)}
    # batch norm of few values magnifies roundings until nothing can be compared
    precision = "float32" if small else "bfloat16"
    return Step(
        lambda: ResNet50(rngs=nnx.Rngs(0)),
        image_loss,
        batch,
        precision=precision,
        optimizer=optax.sgd(0.1, momentum=0.9),
    )


class MLP(nnx.Module):
    def __init__(self, *widths: int, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in itertools.pairwise(widths)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers[:-1]:
            x = nnx.relu(layer(x))
        return self.layers[-1](x)


MLP_WIDTHS = (784, 256, 256, 10)


def mlp(small: bool) -> Step:
    rows = 16 if small else 128
    batch = {"image": Array((rows, MLP_WIDTHS[0])), "label": Array((rows,), MLP_WIDTHS[-1])}
    return Step(
        lambda: MLP(*MLP_WIDTHS, rngs=nnx.Rngs(0)),
        image_loss,
        batch,
        precision="float32",
        optimizer=optax.adam(1e-3),
    )


def squares(model: Any, batch: Any) -> jax.Array:
    out = model(batch["x"]).astype(jnp.float32)
    return (out**2).mean(axis=tuple(range(1, out.ndim)))


def wide(small: bool, products: str) -> Step:
    """An MLP of a billion parameters, whose layers multiply in a dtype."""
    width, rows, depth = (64, 32, 2) if small else (8192, 8192, 16)
    layout = dataclasses.replace(
        spmd.Layout.load("data_parallel"), precision=(spmd.Precision("**", products),)
    )
    batch = {"x": Array((rows, width))}
    return Step(
        lambda: MLP(*[width] * (depth + 1), rngs=nnx.Rngs(0)),
        squares,
        batch,
        layout,
        optimizer=optax.sgd(1e-3),
    )


DECODER = {  # as config.json of Llama-3.2-1B has them
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "vocab_size": 128256,
}
SMALL_DECODER = DECODER | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}


def lora(small: bool, frozen: str) -> Step:
    """Adapters of rank 16 on all linear maps of all layers, over frozen weights in a format."""
    config = SMALL_DECODER if small else DECODER
    rows, length = (2, 64) if small else (2, 2048)
    adapter = spmd.Adapter("stack/layers/**", rank=16, alpha=32.0)
    layout = dataclasses.replace(
        spmd.Layout.load("data_parallel"), adapters=(adapter,), train=spmd.Train(frozen=frozen)
    )
    parsed = DecoderConfig.from_config(config, "config.json")

    def loss(model: Any, batch: Any) -> Any:
        features = model.features(batch["tokens"])
        table = model.embed.embedding[...]
        return spmd.losses.cross_entropy_from_features(
            features, table, batch["targets"], vocab_dim=0
        )

    return Step(
        lambda: Decoder(parsed, rngs=nnx.Rngs(0)),
        loss,
        tokens(rows, length, config["vocab_size"]),
        layout,
    )


def offloaded(small: bool, where: str) -> Step:
    """The 1 B Llama with recomputed layers: "device"; "host" keeps the optimizer's state, "remat"
    inputs of layers in the host's memory.
    """
    step = llama(small)
    save = "offload" if where == "remat" else "dots"
    layout = dataclasses.replace(step.layout, remat=spmd.Remat(save, ("blocks/layers",)))
    if where == "host":
        layout = dataclasses.replace(layout, memory=spmd.Memory("host"))
    return dataclasses.replace(step, layout=layout)


class Recurrent(nnx.Module):
    """A stack of recurrent layers."""

    def __init__(self, kind: str, width: int, depth: int):
        cell = nnx.OptimizedLSTMCell if kind == "LSTM" else nnx.GRUCell
        self.stack = spmd.nn.RNNStack(
            [cell(width, width, rngs=nnx.Rngs(number)) for number in range(depth)]
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.stack(x)


RECURRENT = (  # kind, layers, width, time steps, dtype; the most informative ones first
    ("LSTM", 4, 1024, 128, "bfloat16"),
    ("LSTM", 8, 2048, 512, "bfloat16"),
    ("GRU", 4, 1024, 128, "bfloat16"),
    ("LSTM", 4, 1024, 128, "float32"),
    ("LSTM", 4, 1024, 512, "bfloat16"),
    ("GRU", 8, 2048, 128, "bfloat16"),
)
RECURRENT_ROWS = 64


def recurrent(small: bool, kind: str, depth: int, width: int, length: int, dtype: str) -> Step:
    rows = 4 if small else RECURRENT_ROWS
    width, length = (16, 8) if small else (width, length)
    return Step(
        lambda: Recurrent(kind, width, depth),
        squares,
        {"x": Array((rows, length, width))},
        precision=dtype,
    )


def steps(small: bool = False) -> dict[str, Step]:
    """Every step that a part measures, by the name that plans.json has for it."""
    named = {
        "gpt2": gpt2(small),
        "llama": llama(small),
        "resnet50": resnet50(small),
        "mlp": mlp(small),
    }
    named |= {f"wide {products}": wide(small, products) for products in ("bfloat16", "float8")}
    named |= {f"lora {frozen}": lora(small, frozen) for frozen in ("bfloat16", "nf4")}
    named |= {f"offload {where}": offloaded(small, where) for where in ("device", "host", "remat")}
    named["restart"] = restarted(small)
    named |= {recurrent_name(*case): recurrent(small, *case) for case in RECURRENT}
    return named


def recurrent_name(kind: str, depth: int, width: int, length: int, dtype: str) -> str:
    return f"{kind} {depth} x {width}, {length} steps, {dtype}"


COMPARED_STEPS = 10


def arm(part: Part, name: str) -> tuple[Callable[[], None], float]:
    """A step on the same random batch again and again, and the loss after ten of them, which arms
    compare.
    """
    step = steps(part.small)[name]
    return compared(step.trainer(), step.data())


def compared(trainer: spmd.Trainer, batch: Any) -> tuple[Callable[[], None], float]:
    """What an arm runs, and its loss after ten steps."""
    state, placed = trainer.init(batch), trainer.place(batch)
    for _ in range(COMPARED_STEPS):
        state, metrics = trainer.step(state, placed)
    return repeated_step(trainer, state, placed), float(metrics["loss"])


def repeated_step(trainer: spmd.Trainer, state: Any, placed: Any) -> Callable[[], None]:
    """A function that takes one step on the same batch, and waits for it."""

    def run() -> None:
        nonlocal state
        state, metrics = trainer.step(state, placed)
        metrics.wait()

    return run


class ByHand:
    """The same model and loss in a jit by hand: pure, donating, with cuDNN's attention in place of
    `spmd.nn.attention`.

    The stack of layers and the chunked cross-entropy are the library's, so that this arm shows what
    the trainer adds to a step.
    """

    def __init__(self, step: Step):
        self.step, self.optimizer = step, step.optimizer
        self.dtype = jnp.dtype(step.precision)
        self.compiled = jax.jit(self.update, donate_argnums=(0, 1, 2))

    def init(self) -> tuple[Any, Any, Any]:
        """Parameters, what else the model has (statistics, random streams), and the optimizer's
        state.
        """
        params, others = self.variables()
        return params, others, self.optimizer.init(params)

    def variables(self) -> tuple[Any, Any]:
        """Parameters, and what else the model has."""
        with nnx.use_eager_sharding(False):  # arrays carry names of axes, and there is no mesh
            self.graph, params, others = nnx.split(self.step.model(), nnx.Param, ...)
        return params, others

    def loss(self, params: Any, others: Any, batch: Any) -> tuple[jax.Array, Any]:
        def cast(leaf: Any) -> Any:
            return leaf.astype(self.dtype) if leaf.dtype == jnp.float32 else leaf

        # variables of this trace, which the model may change
        others = jax.tree.map(lambda leaf: leaf, others)
        model = nnx.merge(self.graph, jax.tree.map(cast, params), others)
        for _, module in nnx.iter_modules(model):
            if isinstance(module, nnx.Embed):
                module.dtype = self.dtype  # flax keeps that of the table as it was made
        with mock.patch.object(spmd.nn, "attention", attention_by_hand):
            value = self.step.loss(model, jax.tree.map(cast, batch))
        total, count = value if isinstance(value, tuple) else (value.sum(), value.size)
        return total / count, nnx.split(model, nnx.Param, ...)[2]

    def update(
        self, params: Any, others: Any, optimizer_state: Any, batch: Any
    ) -> tuple[Any, Any, Any, jax.Array]:
        (loss, others), grads = jax.value_and_grad(self.loss, has_aux=True)(params, others, batch)
        updates, optimizer_state = self.optimizer.update(grads, optimizer_state, params)
        return optax.apply_updates(params, updates), others, optimizer_state, loss


def attention_by_hand(
    query: jax.Array, key: jax.Array, value: jax.Array, *, causal: bool = False
) -> jax.Array:
    on_gpu = PRETEND_GPU or jax.default_backend() == "gpu"
    # a reference in float32 is computed on the CPU
    narrow = query.dtype in (jnp.bfloat16, jnp.float16)
    implementation = "cudnn" if on_gpu and narrow else None
    return jax.nn.dot_product_attention(
        query, key, value, is_causal=causal, implementation=implementation
    )


PRETEND_GPU = False  # while `plan.py` compiles for a GPU that is not there
