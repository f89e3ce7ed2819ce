"""Random keys for workers: the rows a worker draws are the rows the whole batch would have drawn.

With JAX's partitionable threefry, element `i` of a random array is a function of the key and `i`
alone. A worker that holds rows `w * n` to `(w + 1) * n` therefore gets the very bits of the global
draw by counting from its own offset. So dropout differs between workers, and is the same, bit for
bit, on one device, eight devices, or the auto step.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import random as jax_random

# Splits into fewer keys than this are never taken for one key per row.
FEW = 8


def worker_key(key: jax.Array, worker: Any, *, rows: int, workers: int) -> jax.Array:
    """`key` (a threefry key, equal on all workers) as the key of one worker, which holds `rows`
    rows.

    An array drawn from it is taken to hold the worker's rows along dim 0 when that dim is a
    multiple of `rows`; any other (a scalar, a mask shared over the batch) is the same on every
    worker, as it is for the whole batch. Split into `rows` keys (8 or more), it gives one key per
    row. An array that has such a dim 0 for another reason looks the same, so it differs between
    workers. Keys of other kinds cannot count from an offset: they are folded with the worker's
    number, which differs per worker but depends on how many there are.
    """
    if jax.random.key_impl(key) != _THREEFRY:
        return jax.random.fold_in(key, worker)
    return jax.random.wrap_key_data(
        _tagged(jax.random.key_data(key), worker), impl=_implementation(rows, workers)
    )


def at_worker(key: jax.Array, worker: Any) -> jax.Array:
    """Return `key`, which `worker_key` made for one worker, as the key of another one; the key of a
    single row stays as it is.
    """
    data = jax.random.key_data(key)
    return jax.random.wrap_key_data(data_at_worker(data, worker), impl=jax.random.key_impl(key))


def data_at_worker(data: jax.Array, worker: Any) -> jax.Array:
    """Return the data of keys of `worker_key`, uint32[..., 3], as those of another worker."""
    number = jnp.where(data[..., 2:] == _ROW, _ROW, jnp.asarray(worker, jnp.uint32))
    return _tagged(data[..., :2], number)


def counts_rows(key: jax.Array) -> bool:
    """Return whether draws of a key are those of a worker's rows: whether `worker_key` made it of a
    threefry key.
    """
    return jax.random.key_impl(key) in _SIZES


def part_key(key: jax.Array, part: Any, parts: int, *, rows: int) -> jax.Array:
    """Return the key of one of `parts` equal parts, of `rows` rows each, of the rows that `key` is
    for: it draws the numbers that `key` draws for these rows.

    `key` is one that `worker_key` made, or a plain one, which is for all rows.
    """
    sizes = _SIZES.get(jax.random.key_impl(key))
    if sizes is None:
        return worker_key(key, part, rows=rows, workers=parts)
    _, workers = sizes
    data = jax.random.key_data(key)
    number = data[2] * np.uint32(parts) + jnp.asarray(part, jnp.uint32)
    number = jnp.where(data[2] == _ROW, _ROW, number)
    implementation = _implementation(rows, workers * parts)
    return jax.random.wrap_key_data(_tagged(data[:2], number), impl=implementation)


def first_count(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return uint32[4]: threefry's two words, and the number of the first element of
    `jax.random.bits(key, shape)` among all that it draws.

    `key` is a threefry key, one that `worker_key` made of one, or a plain array of
    `jax.random.PRNGKey`. A key of another kind draws the words of a threefry key first.
    """
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)
    data = jax.random.key_data(key)
    sizes = _SIZES.get(jax.random.key_impl(key))
    if sizes is None and jax.random.key_impl(key) != _THREEFRY:
        data = jax.random.bits(key, (2,))
    worker = jnp.uint32(0)
    if sizes is not None and shape[0] % sizes[0] == 0:
        worker = jnp.where(data[2] == _ROW, jnp.uint32(0), data[2])
    return jnp.stack([data[0], data[1], *_product(worker, math.prod(shape))])


def advance(count: jax.Array, *steps: tuple[Any, int]) -> jax.Array:
    """Return `first_count` of the element that is the sum of `place * stride` further on; places
    may be traced.
    """
    return jnp.stack([count[0], count[1], *_counted((count[2], count[3]), steps)])


def bits_at(
    count: Any,
    *steps: tuple[jax.Array, int],
    threefry: Callable[..., Any] = jax_random.threefry2x32_p.bind,
) -> jax.Array:
    """uint32: what `jax.random.bits` draws for the elements that are the sum of `place * stride`
    after the first one.

    Args:
      count: of the first element, from `first_count`.
      steps: (places, stride) for each dim; the arrays of places are broadcast together.
      threefry: a kernel needs `threefry_rounds`, which has no primitive of its own.

    >>> count = first_count(jax.random.key(0), (2, 3))
    >>> (
    ...     bits_at(count, (jnp.arange(2)[:, None], 3), (jnp.arange(3), 1))
    ...     == jax.random.bits(jax.random.key(0), (2, 3))
    ... ).all().item()
    True
    """
    words = _counted((count[2], count[3]), steps)
    shape = jnp.broadcast_shapes(*(word.shape for word in words))
    first, second = threefry(count[0], count[1], *(jnp.broadcast_to(word, shape) for word in words))
    return first ^ second


def threefry_rounds(
    key_high: Any, key_low: Any, high: jax.Array, low: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32 with 20 rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2,
    3"), in elementwise operations.

    In a loop, because Triton (of jaxlib 0.10.2) takes exponential time to look through the rounds
    one after the other.
    """
    keys = (key_high, key_low, key_high ^ key_low ^ np.uint32(0x1BD11BDA))

    def four_rounds(block: Any, state: tuple) -> tuple:
        high, low, one, two, three = state
        for even, odd in ((13, 17), (15, 29), (26, 16), (6, 24)):
            turn = jnp.where(lax.rem(block, jnp.int32(2)) == 0, np.uint32(even), np.uint32(odd))
            high = high + low
            low = high ^ ((low << turn) | (low >> (np.uint32(32) - turn)))
        return high + two, low + three + (block + 1).astype(jnp.uint32), two, three, one

    high, low, *_ = lax.fori_loop(0, 5, four_rounds, (high + keys[0], low + keys[1], *keys))
    return high, low


def _counted(count: tuple[Any, Any], steps: tuple[tuple[Any, int], ...]) -> tuple[Any, Any]:
    """A number of two words, plus the sum of `place * stride`."""
    for place, stride in steps:
        count = _sum(count, _product(jnp.asarray(place).astype(jnp.uint32), stride))
    return count


def _product(x: jax.Array, factor: int) -> tuple[jax.Array, jax.Array]:
    """`x * factor` as two 32-bit words, the high one first; `x` is uint32, and `factor` has 64
    bits.
    """
    # JAX has integers of 64 bits only under `jax_enable_x64`.
    high = np.uint32(factor >> 32 & 0xFFFFFFFF)
    low = factor & 0xFFFFFFFF
    halves = [np.uint32(low & 0xFFFF), np.uint32(low >> 16)]
    mask = np.uint32(0xFFFF)
    half = np.uint32(16)
    ones = (x & mask) * halves[0]
    twos = (x >> half) * halves[1]
    crossed = [(x & mask) * halves[1], (x >> half) * halves[0]]
    middle = (ones >> half) + (crossed[0] & mask) + (crossed[1] & mask)
    return twos + (crossed[0] >> half) + (crossed[1] >> half) + (
        middle >> half
    ) + x * high, x * np.uint32(low)


def _sum(a: tuple[Any, Any], b: tuple[Any, Any]) -> tuple[Any, Any]:
    """The sum of two numbers of two words each."""
    low = a[1] + b[1]
    # A sum of unsigned integers that has wrapped around is less than either.
    return a[0] + b[0] + (low < b[1]).astype(jnp.uint32), low


# Cached: JAX compares kinds of keys by their functions, so a second one for the same numbers would
# be another dtype.
@functools.cache
def _implementation(rows: int, workers: int) -> Any:
    """The kind of key for workers of this many rows; its data are threefry's two words and the
    worker's number.
    """

    def split(data: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        if shape[0] != rows or rows < FEW:
            return _tagged(jax.random.key_data(jax.random.split(_plain(data), shape)), data[2])
        every = jax.random.key_data(jax.random.split(_plain(data), (rows * workers, *shape[1:])))
        of_worker = lax.dynamic_slice_in_dim(
            every, jnp.where(data[2] == _ROW, 0, data[2]).astype(jnp.int32) * rows, rows
        )
        return _tagged(of_worker, jnp.asarray(_ROW))

    def bits(data: jax.Array, bit_width: int, shape: tuple[int, ...]) -> jax.Array:
        shared = not shape or shape[0] % rows != 0
        return _bits(
            data[:2],
            jnp.where(shared | (data[2] == _ROW), jnp.uint32(0), data[2]),
            bit_width,
            shape,
        )

    implementation = jax_random.define_prng_impl(
        key_shape=(3,),
        seed=_seed,
        split=split,
        random_bits=bits,
        fold_in=_fold_in,
        name=f"spmd_worker_{rows}_{workers}",
        tag="spw",
    )
    _SIZES[implementation] = (rows, workers)
    return implementation


def _tagged(data: jax.Array, worker: jax.Array) -> jax.Array:
    worker = jnp.broadcast_to(jnp.asarray(worker, jnp.uint32), (*data.shape[:-1], 1))
    return jnp.concatenate([data, worker], axis=-1)


def _plain(data: jax.Array) -> jax.Array:
    return jax.random.wrap_key_data(data[:2], impl=_THREEFRY)


def _seed(seed: jax.Array) -> jax.Array:
    return _tagged(jax.random.key_data(jax.random.key(seed, impl=_THREEFRY)), jnp.uint32(0))


def _fold_in(data: jax.Array, value: int) -> jax.Array:
    return _tagged(jax.random.key_data(jax.random.fold_in(_plain(data), value)), data[2])


def _bits(data: jax.Array, worker: jax.Array, bit_width: int, shape: tuple[int, ...]) -> jax.Array:
    """Bits of the elements `worker * size` onwards of the global draw (jax's
    `threefry_partitionable` numbering).
    """
    size = math.prod(shape)
    # worker * size + i as two 32-bit words; worker < 2**16, so the partial products do not overflow
    low = worker * np.uint32(size % 2**32)
    high = (
        worker * np.uint32(size >> 16) + ((worker * np.uint32(size & 0xFFFF)) >> np.uint32(16))
    ) >> np.uint32(16)
    index = jnp.arange(size, dtype=jnp.uint32)
    count = low + index
    carry = (count < index).astype(jnp.uint32)
    first, second = jnp.split(
        jax_random.threefry_2x32(data, jnp.concatenate([high + carry, count])), 2
    )
    if bit_width == 64:
        bits = (first.astype(jnp.uint64) << np.uint64(32)) | second.astype(jnp.uint64)
    else:
        bits = (first ^ second).astype({8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}[bit_width])
    return bits.reshape(shape)


_THREEFRY = "threefry2x32"
# Rows and workers, by kind of key.
_SIZES: dict[Any, tuple[int, int]] = {}
# in place of a worker's number: the key of a single row, the same on whichever worker the row is
_ROW = np.uint32(2**32 - 1)
