"""Random keys for workers: the rows a worker draws are the rows the whole batch would have drawn.

With JAX's partitionable threefry, element `i` of a random array is a function of the key and `i` alone. A worker that
holds rows `w * n` to `(w + 1) * n` therefore gets the very bits of the global draw by counting from its own offset.
So dropout differs between workers, and is the same, bit for bit, on one device, eight devices, or the auto step.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import random as jax_random


def worker_key(key: jax.Array, worker: jax.Array) -> jax.Array:
    """`key` (a threefry key, equal on all workers) as the key of one worker.

    Arrays drawn from it are taken to have the worker's rows along dim 0. Keys of other kinds cannot count from an
    offset: they are folded with the worker's number, which differs per worker but depends on how many there are.
    """
    if jax.random.key_impl(key) != _THREEFRY:
        return jax.random.fold_in(key, worker)
    return jax.random.wrap_key_data(_with_worker(jax.random.key_data(key), worker), impl=_WORKER)


def _with_worker(data: jax.Array, worker: jax.Array) -> jax.Array:
    worker = jnp.broadcast_to(jnp.asarray(worker, jnp.uint32), (*data.shape[:-1], 1))
    return jnp.concatenate([data, worker], axis=-1)


def _plain(data: jax.Array) -> jax.Array:
    return jax.random.wrap_key_data(data[:2], impl=_THREEFRY)


def _seed(seed: jax.Array) -> jax.Array:
    return _with_worker(jax.random.key_data(jax.random.key(seed, impl=_THREEFRY)), jnp.uint32(0))


def _split(data: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return _with_worker(jax.random.key_data(jax.random.split(_plain(data), shape)), data[2])


def _fold_in(data: jax.Array, value: int) -> jax.Array:
    return _with_worker(jax.random.key_data(jax.random.fold_in(_plain(data), value)), data[2])


def _random_bits(data: jax.Array, bit_width: int, shape: tuple[int, ...]) -> jax.Array:
    """Bits of the elements `worker * size` onwards of the global draw (jax's `threefry_partitionable` numbering)."""
    size, worker = math.prod(shape), data[2]
    # worker * size + i as two 32-bit words; worker < 2**16, so the partial products do not overflow
    low = worker * np.uint32(size % 2**32)
    high = (worker * np.uint32(size >> 16) + ((worker * np.uint32(size & 0xFFFF)) >> np.uint32(16))) >> np.uint32(16)
    index = jnp.arange(size, dtype=jnp.uint32)
    count = low + index
    carry = (count < index).astype(jnp.uint32)
    first, second = jnp.split(jax_random.threefry_2x32(data[:2], jnp.concatenate([high + carry, count])), 2)
    if bit_width == 64:
        bits = (first.astype(jnp.uint64) << np.uint64(32)) | second.astype(jnp.uint64)
    else:
        bits = (first ^ second).astype({8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}[bit_width])
    return bits.reshape(shape)


_THREEFRY = "threefry2x32"
_WORKER = jax_random.define_prng_impl(
    key_shape=(3,), seed=_seed, split=_split, random_bits=_random_bits, fold_in=_fold_in, name="spmd_worker", tag="spw"
)
