"""Encoding and decoding of gradients by every codec, and the link, in GB/s, below which each
pays.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

import spmd
from benchmarks.gpu.measure import Part, Queued, distance, on_cpu, run_part
from spmd import wire
from spmd.wire.codec.base import RowCodec

CODECS = {
    "bfloat16": wire.bfloat16(),
    "float8": wire.float8(),
    "int8": wire.int8(),
    "sign": wire.sign(),
    "top_k": wire.top_k(),
    "power_sgd": wire.power_sgd(rank=4),
}
ELEMENTS = {"134 M": 2**27, "1.07 B": 2**30}
WORKERS = 8
# GPUs do not round divisions correctly (an approximate reciprocal times the dividend), and a number
# may get the next code
BOUND = 1e-3


def sizes(small: bool) -> dict[str, int]:
    return {"tiny": 8 * 1024} if small else ELEMENTS


def there_and_back(codec: Any) -> Callable[[jax.Array], jax.Array]:
    """Gradients as rows, one for each of 8 workers, encoded and decoded; for a codec of matrices,
    its mean on one worker.
    """
    if isinstance(codec, RowCodec):
        return lambda rows: codec.decode(
            jax.lax.optimization_barrier(codec.encode(rows)), rows.shape[1]
        )
    communication = wire.all_reduce("data", codec, error_feedback=True)

    def on_worker(matrix: jax.Array) -> jax.Array:
        return communication.update(matrix, communication.init(matrix))[0]

    def run(rows: jax.Array) -> jax.Array:
        matrix = rows.reshape(square(rows.size))
        mesh = spmd.make_mesh("data=1", devices=jax.devices()[:1])
        return jax.shard_map(
            on_worker,
            mesh=mesh,
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
            check_vma=False,
        )(matrix)

    return run


def square(size: int) -> tuple[int, int]:
    """A matrix of so many elements, about as high as wide."""
    rows = 1
    while rows * rows < size and size % (2 * rows) == 0:
        rows *= 2
    return rows, size // rows


def programs(small: bool) -> dict[str, tuple[Callable[..., Any], list[Any]]]:
    size = next(iter(sizes(small).values()))
    rows = jax.ShapeDtypeStruct((WORKERS, size // WORKERS), "float32")
    return {
        f"codec {name}": (there_and_back(codec), [rows])
        for name, codec in CODECS.items()
        if isinstance(codec, RowCodec)
    }


def main(part: Part) -> None:
    for number, (title, size) in enumerate(sizes(part.small).items()):
        rows = jax.random.normal(jax.random.key(0), (WORKERS, size // WORKERS))
        # XLA may leave out a cast there and back
        cast = jax.jit(lambda x: jax.lax.reduce_precision(x, 8, 7) * 2)
        arms = {"a cast": Queued(lambda cast=cast, rows=rows: cast(rows), jax.block_until_ready)}
        sent = {}
        for name, codec in CODECS.items():
            with part.guarded(title, name):
                run = jax.jit(there_and_back(codec))
                if isinstance(codec, RowCodec):
                    few = rows[:, :4096]
                    if not part.check(
                        title,
                        f"{name} against the CPU",
                        distance(run(few), on_cpu(there_and_back(codec), few)),
                        BOUND,
                    ):
                        continue
                    payload = jax.eval_shape(
                        codec.encode, jax.ShapeDtypeStruct(rows.shape, "float32")
                    )
                    sent[name] = sum(
                        leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(payload)
                    ) / (4 * size)
                arms[name] = Queued(lambda run=run, rows=rows: run(rows), jax.block_until_ready)
        times = part.alternate(
            title, arms, 1 / (len(sizes(part.small)) - number), bytes=4 * size, sent=sent
        )
        pays = {
            name: (1 - sent[name]) * 4 * size / times[name]["median"] / 1e9
            for name in sent
            if name in times
        }
        part.write(title, pays_below_gigabytes_per_second=pays)


if __name__ == "__main__":
    run_part(main)
