"""Plans of GNMT beside the steps that NVIDIA measured of it, on one A100 and on eight.

    pip install -e '.[gpu-compiler]'         # the compiler alone, 400 MB, no CUDA libraries
    python benchmarks/gnmt_plans.py          # writes benchmarks/results/gnmt_plans.md

Two models are planned: the one that was measured, `PublishedGNMT`, and that of `examples/gnmt.py`
at its sizes. Nothing is trained, and no GPU is used.
"""

import argparse
import bisect
import dataclasses
import os
import re
import statistics
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import spmd
from spmd.planner.planning import Plan
from spmd.planner.text_report import time_range

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import reported
from examples.gnmt import GNMT

WIDTH = 1024
VOCAB = 32320  # byte pairs and characters of both languages; the logs of MLPerf print it
DROPOUT = 0.2
SMOOTHING = 0.1
PAD = 0

# What the report explains under "What was measured".
PAIR_TOKENS = 50  # of the source and the target together, where both have at most 50
PADDED = 32  # time steps of a batch of such pairs

EXAMPLES = "DeepLearningExamples"
MLPERF = "MLPerf v0.7"
MLPERF_ROWS = 384  # of each A100
# Logs give tokens and times but no bucket; pairs of a bucket have about the same tokens everywhere.
BUCKET_TOKENS = (30, 53, 79, 104)


class PublishedGNMT(nnx.Module):
    """Four LSTM layers in the encoder, the first of which is bidirectional, four in the decoder,
    and additive attention; written with the loops of flax.

    As in NVIDIA/DeepLearningExamples, PyTorch/Translation/GNMT (commit 729963d): both directions
    have `WIDTH` units, both languages share an embedding, the layers of the decoder above its first
    get the context beside the layer below, and dropout comes before each layer.
    """

    def __init__(self, *, rngs: nnx.Rngs):
        def loop(inputs: int, **options: Any) -> nnx.RNN:
            return nnx.RNN(nnx.OptimizedLSTMCell(inputs, WIDTH, rngs=rngs), rngs=rngs, **options)

        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.forward = loop(WIDTH)
        self.backward = loop(WIDTH, reverse=True, keep_order=True)
        self.encoder = nnx.List([loop(2 * WIDTH), loop(WIDTH), loop(WIDTH)])
        self.bottom = loop(WIDTH)
        self.decoder = nnx.List([loop(2 * WIDTH) for _ in range(3)])
        self.query = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.key = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.direction = nnx.Param(jax.random.uniform(rngs.params(), (WIDTH,), minval=-0.1))
        self.scale = nnx.Param(jnp.full((1,), WIDTH**-0.5))
        self.offset = nnx.Param(jnp.zeros(WIDTH))
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)
        self.dropout = nnx.Dropout(DROPOUT, rngs=rngs)

    def __call__(self, inputs: dict[str, jax.Array]) -> jax.Array:
        """Return the logits [rows, target, vocabulary] of the token after each of `begun` [rows,
        target], for `source` [rows, words].
        """
        lengths = inputs["lengths"]
        words = self.dropout(self.embed(inputs["source"]))
        both_ways = [loop(words, seq_lengths=lengths) for loop in (self.forward, self.backward)]
        encoded = self.encoder[0](self.dropout(jnp.concatenate(both_ways, axis=-1)))
        for layer in self.encoder[1:]:
            encoded = encoded + layer(self.dropout(encoded))
        decoded = self.bottom(self.dropout(self.embed(inputs["begun"])))
        context = self.attend(decoded, encoded, lengths)
        decoded = self.decoder[0](self.dropout(jnp.concatenate([decoded, context], axis=-1)))
        for layer in self.decoder[1:]:
            both = jnp.concatenate([decoded, context], axis=-1)
            decoded = decoded + layer(self.dropout(both))
        return self.head(decoded)

    def attend(self, decoded: jax.Array, encoded: jax.Array, lengths: jax.Array) -> jax.Array:
        """Return the context [rows, target, width] by normalised additive attention (Bahdanau et
        al., arXiv:1409.0473; Salimans and Kingma, arXiv:1602.07868).
        """
        direction = self.direction[...] / jnp.linalg.norm(self.direction[...])
        pairs = self.query(decoded)[:, :, None] + self.key(encoded)[:, None]
        energies = jnp.tanh(pairs + self.offset[...].astype(pairs.dtype))
        weights = (direction * self.scale[...]).astype(pairs.dtype)
        # The energies of all pairs of positions are kept for the backward pass, in float32.
        scores = (energies * weights).sum(axis=-1, dtype=jnp.float32)
        in_sentence = jnp.arange(encoded.shape[1]) < lengths[:, None, None]
        shares = jax.nn.softmax(jnp.where(in_sentence, scores, -1e9), axis=-1)
        return shares.astype(encoded.dtype) @ encoded


def smoothed_loss(model: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    """Return the sum of the cross-entropies with smoothed labels, and the number of targets."""
    targets = batch["targets"]
    log_shares = jax.nn.log_softmax(model(batch["inputs"]).astype(jnp.float32))
    of_target = jnp.take_along_axis(log_shares, targets[..., None], axis=-1)[..., 0]
    losses = -(1 - SMOOTHING) * of_target - SMOOTHING * log_shares.mean(axis=-1)
    counts = targets != PAD
    return jnp.where(counts, losses, 0.0).sum(), counts.sum().astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Case:
    """A plan, and the measured run beside it, if there is one.

    Attributes:
      title: what the report calls it.
      devices: A100s of 40 GB, of one node.
      rows: pairs of sentences on each device, in one microbatch.
      microbatches: of a step.
      padded: time steps of the source; the target has one less.
      loops: `[recurrence] implementation`.
      example: layers above the bottom one of the model of `examples/gnmt.py`; 0: `PublishedGNMT`.
      source: who measured it.
      seconds: measured, of a step.
    """

    title: str
    devices: int
    rows: int = 128
    microbatches: int = 1
    padded: int = PADDED
    precision: str = "bfloat16"
    layout: str = "data_parallel"
    mesh: str | None = None
    loops: str = "hoisted"
    example: int = 0
    source: str = ""
    seconds: float | None = None


def compute_seconds(devices: int, rows: int, microbatches: int, tokens_per_second: float) -> float:
    """Return the seconds of a step with true tokens per second of all devices."""
    return devices * rows * microbatches * PAIR_TOKENS / tokens_per_second


CASES = {
    "one": Case(
        "published, bfloat16",
        1,
        microbatches=8,
        source=EXAMPLES,
        seconds=compute_seconds(1, 128, 8, 140_909),
    ),
    "eight": Case(
        "published, bfloat16", 8, source=EXAMPLES, seconds=compute_seconds(8, 128, 1, 822_024)
    ),
    "one tf32": Case(
        "published, TF32",
        1,
        microbatches=8,
        precision="float32",
        source=EXAMPLES,
        seconds=compute_seconds(1, 128, 8, 83_214),
    ),
    "eight tf32": Case(
        "published, TF32",
        8,
        precision="float32",
        source=EXAMPLES,
        seconds=compute_seconds(8, 128, 1, 519_952),
    ),
    # means of the iterations that the ten logs of the submission print, by the tokens of a pair
    "mlperf 14": Case("published, bfloat16", 8, rows=384, padded=14, source=MLPERF, seconds=0.0355),
    "mlperf 44": Case("published, bfloat16", 8, rows=384, padded=44, source=MLPERF, seconds=0.0991),
    "mlperf 74": Case("published, bfloat16", 8, rows=384, padded=74, source=MLPERF, seconds=0.1735),
    "one as written": Case("published, loops as written", 1, microbatches=8, loops="as_written"),
    "example one": Case("example, 4 + 4 layers", 1, microbatches=8, example=3),
    "example one auto": Case(
        "example, 4 + 4 layers, its own loop as written", 1, microbatches=8, loops="auto", example=3
    ),
    "example eight": Case("example, 4 + 4 layers", 8, example=3),
    "example five": Case("example, 5 + 5 layers", 8, example=4),
    # 128 rows for each device, as without stages: the rows of a worker are those of four devices
    "example stages": Case(
        "example, 5 + 5 layers, 4 of each on stages",
        8,
        layout="pipeline",
        mesh="data=2,stage=4",
        example=4,
    ),
}


def plan_case(case: Case) -> Plan:
    """Return the plan of a case."""
    rows = case.devices * case.rows * case.microbatches

    def tokens(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, "int32")

    target = tokens(rows, case.padded - 1)
    inputs = {"source": tokens(rows, case.padded), "lengths": tokens(rows), "begun": target}
    layout = spmd.Layout.load(case.layout)
    layout = dataclasses.replace(layout, recurrence=spmd.Recurrence(case.loops))

    def make_model() -> nnx.Module:
        if case.example:
            sizes: dict[str, Any] = {"layers": case.example, "vocab": (VOCAB, VOCAB)}
            return GNMT(width=WIDTH, rngs=nnx.Rngs(0), **sizes)
        return PublishedGNMT(rngs=nnx.Rngs(0))

    return spmd.plan(
        make_model,
        {"inputs": inputs, "targets": target},
        loss=spmd.losses.cross_entropy if case.example else smoothed_loss,
        optimizer=optax.chain(optax.clip_by_global_norm(5.0), optax.adam(2e-3)),
        target=f"{case.devices}xa100_40",
        mesh=case.mesh,
        layout=layout,
        precision=case.precision,
        accumulate=case.microbatches,
        timeout=1500.0,
    )


def row(case: Case, planned: Plan) -> str:
    """Return a line of the table."""
    times = planned.timeline
    seconds = ratio = ""
    if case.seconds:
        seconds = f"{1e3 * case.seconds:,.1f} ms"
        ratio = f"{times.seconds / case.seconds:.2f}"
    cells = [
        case.title,
        str(case.devices),
        f"{case.rows} x {case.microbatches}",
        str(case.padded),
        f"{planned.memory.expected / 2**30:.1f} GiB",
        f"{1e3 * times.seconds:,.1f} ms",
        time_range(times),
    ]
    for part in (times.products, times.memory, times.launches, times.exposed):
        cells.append(f"{1e3 * part:,.1f} ms")
    return "| " + " | ".join([*cells, case.source, seconds, ratio]) + " |"


ABOUT = """
No step was run on a GPU: plans are read from programs that XLA's GPU compiler made for an A100 of
40 GB. The published model has four LSTM layers of 1,024 in the encoder, the first of which is
bidirectional, and four in the decoder, a vocabulary of 32,320 and 161 million parameters. Its loops
are flax's, under `[recurrence] implementation = "hoisted"` unless the line says otherwise. A step
has 1,024 pairs of sentences in the runs of DeepLearningExamples, which one A100 takes in eight
microbatches; "padded to" counts time steps of the source, and the target has one less.
"""

SOURCES = """
## What was measured

DeepLearningExamples: NVIDIA/DeepLearningExamples, PyTorch/Translation/GNMT/README.md at commit
729963d, "Training throughput: NVIDIA DGX A100 (8x A100 40GB)", container pytorch-20.06: 140,909
tokens/s on one A100 and 822,024 on eight in float16, 83,214 and 519,952 in TF32, with 128 pairs of
sentences of at most 50 tokens on each. Tokens are those of source and target without padding
(seq2seq/train/trainer.py), and the time is that of full iterations with their wait for data. The
lengths are not published: those of the logs below, of the same corpus and vocabulary, interpolated
for pairs of at most 50 tokens in buckets of 10, are 50.6 tokens a pair and batches that are padded
to 32. By the README's own figures a pair has at most 49.7: six epochs take 224 minutes at 76,438
tokens/s on one V100, and 86.7 % of 3,975,116 pairs have at most 50 tokens. The measured steps above
are those of 50 tokens a pair, which may be off by 3 %.

MLPerf v0.7: mlcommons/training_results_v0.7 at commit 0a8a85a,
NVIDIA/results/dgxa100_ngc20.06_pytorch/gnmt/result_0.txt to result_9.txt: eight A100s of 40 GB,
384 pairs of at most 75 tokens on each, float16. A batch has pairs of one of five buckets, by the
longer of both sentences: 0 to 14 tokens, ..., 60 to 74. Among 384 pairs both sides nearly always
reach the largest length, so a batch is padded to it. Every tenth iteration is logged; with the
folder of the logs, `python benchmarks/gnmt_plans.py --logs FOLDER` prints

    0 to 14 tokens: 8.6% of 5289 iterations, 20.6 tokens a pair, 35.5 ms
    15 to 29 tokens: 42.4% of 5289 iterations, 40.3 tokens a pair, 66.5 ms
    30 to 44 tokens: 30.2% of 5289 iterations, 65.6 tokens a pair, 99.1 ms
    45 to 59 tokens: 14.0% of 5289 iterations, 91.1 tokens a pair, 134.6 ms
    60 to 74 tokens: 4.9% of 5289 iterations, 116.4 tokens a pair, 173.5 ms

The other machines of both sources have V100s or TPUs; there is no target for a V100.

## What differs

The published model has 160.6 million parameters; the logs count 160,671,360, with a second bias in
each loop and padding. Its planned step differs from a measured one in this:

- The measured loops are cuDNN's. The planned ones are XLA's: 8 kernels in each time step of a layer
  and 6 in its backward pass, 4 us to launch each, and what one kernel leaves to the next is priced
  at the memory's bandwidth, though 128 rows of it fit into the A100's cache of 40 MB.
- DeepLearningExamples is PyTorch without a compiler, which launches its other kernels one by one,
  keeps several arrays [rows, target, source, 1,024] in additive attention, and waits for each loss.
- The submission to MLPerf has kernels of its own for attention and for cross-entropy; the plan
  keeps energies and logits of all positions in float32 and reads them several times. Its optimizer
  is sharded over the A100s.
- float16 with a scaled loss, and bfloat16.
- Measured steps of DeepLearningExamples have batches of all lengths, planned ones the mean length;
  the measured time of MLPerf's buckets is nearly linear in it.

The model of `examples/gnmt.py` at these sizes differs more, so no measured step stands beside it:
512 units in each direction of the first layer, residual connections from the second layer on,
attention by dot products, no dropout, no smoothed labels, an embedding for each language, 178
million parameters with 4 + 4 layers. Its stacks are `spmd.nn.RNNStack`, whose loops are always
hoisted; its own loop is the decoder's first layer. Four stages take 4 layers above the first one,
5 + 5 in all, and then a worker is four A100s with 512 pairs of sentences.
"""

HEADING = """
| model | A100s | rows x microbatches | padded to | memory of a device | planned step | range | \
products | memory | launches | communication not hidden | measured by | measured step | \
planned / measured |
|---|---|---|---|---|---|---|---|---|---|---|---|---|---|"""


def print_buckets(folder: Path) -> None:
    """Print what the logs of MLPerf v0.7 say of each bucket of lengths: tokens of a pair and
    seconds of an iteration, means over the iterations that are logged; and, interpolated, the
    pairs of at most 50 tokens in buckets of 10.
    """
    line = re.compile(r"TRAIN \[\d+\]\[(\d+)/\d+\]\tTime ([\d.]+) .*?Tok/s (\d+)")
    buckets: dict[int, list[tuple[float, float]]] = {}
    for path in sorted(folder.glob("result_*.txt")):
        for number, seconds, rate in line.findall(path.read_text(encoding="utf-8")):
            # the first iteration of an epoch waits for the data
            if number != "0":
                tokens = float(seconds) * float(rate) / MLPERF_ROWS
                bucket = bisect.bisect(BUCKET_TOKENS, tokens)
                buckets.setdefault(bucket, []).append((tokens, float(seconds)))
    total = sum(map(len, buckets.values()))
    shares = []
    pair_tokens = []
    for bucket, pairs in sorted(buckets.items()):
        tokens, seconds = (statistics.mean(column) for column in zip(*pairs, strict=True))
        shares.append(len(pairs) / total)
        pair_tokens.append(tokens)
        lengths = f"{15 * bucket} to {15 * bucket + 14} tokens"
        part = f"{shares[-1]:.1%} of {total} iterations"
        print(f"{lengths}: {part}, {tokens:.1f} tokens a pair, {1e3 * seconds:.1f} ms")
    lengths = np.arange(51)
    below = np.interp(np.arange(52), np.arange(0, 76, 15), np.cumsum([0.0, *shares]))
    chances = np.diff(below)
    tokens = np.interp(lengths, np.arange(7, 75, 15), pair_tokens)
    padded = np.where(lengths < 40, lengths // 10 * 10 + 9, 50)
    mean_tokens, mean_padded = (np.average(of, weights=chances) for of in (tokens, padded))
    print(f"at most 50 tokens: {chances.sum():.1%}, {mean_tokens:.1f} a pair, padded to ", end="")
    print(f"{mean_padded:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="some cases, without writing: " + ", ".join(CASES))
    parser.add_argument("--logs", type=Path, help="a folder of MLPerf's logs; prints their means")
    args = parser.parse_args()
    if args.logs:
        print_buckets(args.logs)
        return
    names = args.only.split(",") if args.only else list(CASES)
    rows = []
    for name in names:
        rows.append(row(CASES[name], plan_case(CASES[name])))
        print(rows[-1], flush=True)
    if args.only:
        return
    head = reported.head(
        "GNMT, planned beside published runs",
        "python benchmarks/gnmt_plans.py",
        "jax",
        "jaxlib",
        "jax-cuda13-pjrt",
    )
    table = [*HEADING.splitlines(), *rows, ""]
    about = ABOUT.strip().splitlines()
    sources = SOURCES.strip().splitlines()
    reported.write("gnmt_plans", [*head, *about, *table, *sources])


if __name__ == "__main__":
    main()
