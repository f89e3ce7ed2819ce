"""How long one kernel takes on a target: a matrix product, a convolution, fused attention, or one
that only reads and writes.

A product is computed in tiles, one on each core at a time, so it takes a number of complete waves
of tiles: 109 take as long on 108 cores as 216 (NVIDIA, Matrix Multiplication Background User's
Guide, sections 2.3 and 3). The best is taken of the tiles that libraries have, and of numbers of
parts of the depth. Shares of the peak are those of the target's `[achieved]`.
"""

import dataclasses
import math

from spmd.planner.target import Target

# rows, columns: cuBLAS's usual ones
TILES = ((256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64))
SPLITS = (1, 2, 4, 8, 16, 32)  # of the depth over several tiles, whose results are added up
WAVE = 1e-6  # seconds to fill the cores' pipelines and to write a tile's result; assumed
# A tile of a x b elements does a b / (a + b) operations for each element that it loads. At this
# number, loads take as long as operations.
BALANCED = 16.0
# for each core and clock (CUDA C++ Programming Guide, arithmetic instructions, compute capability
# 8.0 and 9.0)
EXPONENTIALS = 16
# bytes: glibc returns a larger block to the system, so the next step gets new pages (mallopt(3),
# M_MMAP_THRESHOLD)
KEPT = 32 * 2**20
# queries and keys of a block of attention; those on the diagonal are computed completely
DIAGONAL = 128


@dataclasses.dataclass(frozen=True)
class Product:
    """A matrix product, a convolution as one, or an attention.

    Attributes:
      kind: "matmul", "convolution", "attention" or "attention_backward".
      dtype: what is multiplied.
      flops: a multiplication and an addition count as two; of attention, all scores count.
      sides: (how many, rows, columns, depth) of a product; () for attention.
      scores: of attention, how many.
      share: of `flops` and `scores` that are computed: about half under a causal mask.
    """

    kind: str
    dtype: str
    flops: float
    sides: tuple[float, ...] = ()
    scores: float = 0.0
    share: float = 1.0


def matmul(dtype: str, sides: tuple[float, ...], kind: str = "matmul") -> Product:
    """The product of (how many, rows, columns, depth)."""
    return Product(kind, dtype, 2.0 * math.prod(sides), sides)


def causal_share(queries: int, keys: int) -> float:
    """The share of scores that a kernel computes under a causal mask.

    >>> causal_share(2048, 2048), causal_share(128, 128)
    (0.53125, 1.0)
    """
    return min((1 + DIAGONAL / max(queries, 1)) / 2, 1.0) if queries == keys else 1.0


def product_time(product: Product, target: Target) -> float:
    """Seconds of a product on one device, without its launch.

    >>> from spmd.planner.target import load
    >>> a100 = load("a100_80")  # 108 cores
    >>> waves = [
    ...     product_time(matmul("bfloat16", (1, count * 256, 128, 4096)), a100)
    ...     for count in (108, 109)
    ... ]
    >>> 1.4 < waves[1] / waves[0] < 2.0
    True
    """
    rate = target.rate(product.dtype) * getattr(target.achieved, product.kind)
    if not product.sides:
        special = EXPONENTIALS * target.cores * target.clock
        return product.share * (
            product.flops / rate + (product.scores / special if special else 0.0)
        )
    if not target.cores:
        return product.flops / rate
    count, rows, columns, _ = product.sides
    # a part of each result is written in float32, and read
    added = memory_time(2 * 4.0 * count * rows * columns, target)
    options = ((tile, split) for tile in TILES for split in SPLITS)
    return min(
        _tiled(product.sides, tile, split, rate / target.cores, target.cores)
        + (split * added if split > 1 else 0.0)
        for tile, split in options
    )


def _tiled(
    sides: tuple[float, ...], tile: tuple[int, int], split: int, rate: float, cores: int
) -> float:
    """Seconds with one size of tile; `rate` is one core's, in the largest tile."""
    count, rows, columns, depth = sides
    waves = math.ceil(
        count * math.ceil(rows / tile[0]) * math.ceil(columns / tile[1]) * split / cores
    )
    return waves * (2.0 * tile[0] * tile[1] * (depth / split) / (rate * _relative(tile)) + WAVE)


def _relative(tile: tuple[int, int]) -> float:
    """The rate of a tile, relative to the largest."""

    def reached(rows: int, columns: int) -> float:
        intensity = rows * columns / (rows + columns)
        return intensity / (intensity + BALANCED)

    return reached(*tile) / reached(*TILES[0])


def memory_time(size: float, target: Target) -> float:
    """Seconds to move bytes between a device's cores and its memory, without a launch."""
    return size / (target.memory_bandwidth * target.achieved.memory)


def first_touch_time(temporaries: float, target: Target) -> float:
    """Seconds in which the operating system clears the memory of a step's temporaries; 0 where
    steps keep it.
    """
    return temporaries / target.first_touch if target.first_touch and temporaries > KEPT else 0.0
