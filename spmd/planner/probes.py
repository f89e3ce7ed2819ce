"""Small programs whose times show a machine's figures: products, bytes of memory, collectives, and
operations that are only launched.

Each is what a training step does: layers forward and backward, updates of an optimizer, loops. All
devices run it at once, like a step.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spmd.base.xla import shard_map
from spmd.mesh import MeshSpec
from spmd.planner.cluster import Cluster
from spmd.planner.hlo import parse
from spmd.planner.target import Target
from spmd.planner.timeline import timeline_of
from spmd.wire import collectives

AXIS = "device"
Shapes = tuple[tuple[tuple[int, ...], str], ...]
ATTENTION = (4, 2048, 16, 128)  # rows, tokens, heads, width
# arrays of 4 MiB that blocks save for their gradients: more than is kept between steps
# (`cost.KEPT`)
SAVED = 12


@dataclasses.dataclass(frozen=True)
class Probe:
    """A program, and the figure of a target that its time shows.

    Attributes:
      name: what it computes.
      figure: a key of a target's file, such as "achieved.matmul".
      function: of arrays of one device; returns a tuple of arrays.
      shapes: shapes and dtypes of its arguments on one device.
      donated: how many of the arguments its results replace.
    """

    name: str
    figure: str
    function: Callable[..., tuple[jax.Array, ...]]
    shapes: Shapes
    donated: int = 0


# Sizes are chosen so that a program takes some 10 ms: rows and width of layers, MiB of one array,
# side and channels of images.
@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of the programs on a kind of device; `dtypes`: of products, first the one that
    most programs multiply.
    """

    dtypes: tuple[str, ...]
    layers: tuple[tuple[int, int], ...]
    arrays: tuple[int, ...]
    images: tuple[int, int, int]
    messages: tuple[int, int]


CPU = Sizes(
    ("float32", "bfloat16"),
    ((128, 512), (512, 256), (128, 1024)),
    (1, 4),
    (64, 8, 16),
    (2**14, 2**22),
)
ACCELERATOR = Sizes(
    ("bfloat16", "float32"),
    ((4096, 2048), (8192, 4096), (8192, 8192)),
    (64, 256),
    (128, 32, 128),
    (2**16, 2**27),
)


def probes_of(platform: str, devices: int) -> tuple[Probe, ...]:
    """Return the programs for a kind of device; the first computes nothing, and its time is that of
    starting a program.

    >>> [probe.figure for probe in probes_of("cpu", 1)][:3]
    ['', 'achieved.launch', 'achieved.launch']
    """
    sizes = ACCELERATOR
    if platform == "cpu":
        sizes = CPU
    main, *_ = sizes.dtypes
    probes = [Probe("nothing", "", _nothing, (((8,), "float32"),))]
    probes += _launch_probes(main)
    probes += _product_probes(sizes)
    probes += _convolution_probes(sizes.images, main)
    for size in sizes.arrays:
        arrays = (((size * 2**18,), "float32"),) * 4
        name = f"an update by Adam, arrays of {size} MiB"
        probes.append(Probe(name, "achieved.memory", _adam, arrays, donated=3))
    if platform == "cpu":
        probes += _memory_probes(sizes.arrays[0], main)
    if platform == "gpu":
        probes += _attention_probes(main)
    if devices > 1:
        small, large = sizes.messages
        probes += _message_probes("inside.latency", small, devices)
        probes += _message_probes("achieved.link", large, devices)
    return tuple(probes)


def _launch_probes(dtype: str) -> Iterator[Probe]:
    """Yield programs of many small operations, whose launches take most of the time."""
    steps = (((256, 8, 64), dtype), ((64, 128), dtype))
    name = "256 steps of a recurrent layer of 64, with gradients"
    yield Probe(name, "achieved.launch", _recurrent, steps)
    layers = (((8, 64), dtype), *((((64, 64), dtype),) * 32))
    name = "32 dense layers of 64, with gradients"
    yield Probe(name, "achieved.launch", _small_layers, layers)


def _product_probes(sizes: Sizes) -> Iterator[Probe]:
    """Yield dense layers: of all sizes in the main dtype, and of one size in the others."""
    for dtype in sizes.dtypes:
        layers, figure = sizes.layers[1:2], f"flops.{dtype}"
        if dtype == sizes.dtypes[0]:
            layers, figure = sizes.layers, "achieved.matmul"
        for rows, width in layers:
            name = f"two dense layers, {dtype}[{rows}, {width}], with gradients"
            shapes = (((rows, width), dtype), ((width, width), dtype), ((width, width), dtype))
            yield Probe(name, figure, _dense, shapes)


def _convolution_probes(sizes: tuple[int, int, int], dtype: str) -> Iterator[Probe]:
    """Yield two convolutions of images with this number of rows, side and channels."""
    rows, side, channels = sizes
    shape = f"{dtype}[{rows}, {side}, {side}, {channels}]"
    arrays = (
        ((rows, side, side, channels), dtype),
        ((3, 3, channels, channels), dtype),
        ((3, 3, channels, 2 * channels), dtype),
    )
    name = f"two convolutions 3x3, {shape}, with gradients"
    yield Probe(name, "achieved.convolution", _convolutions, arrays)


def _memory_probes(size: int, dtype: str) -> Iterator[Probe]:
    """Yield programs that a CPU's memory limits, with arrays of `size` MiB."""
    # XLA:GPU fuses all of the normalizations into one kernel
    name = f"8 normalizations, arrays of {size} MiB"
    normalize = functools.partial(_normalize, 8)
    yield Probe(name, "achieved.memory", normalize, (((size * 2**10, 256), dtype),))
    name = f"{SAVED} dense blocks, each saves 4 MiB"
    arrays = (((1024, 16), dtype), ((16, 1024), dtype), ((1024, 16), dtype))
    yield Probe(name, "first_touch", functools.partial(_blocks, SAVED), arrays)


def _attention_probes(dtype: str) -> Iterator[Probe]:
    """Yield fused attention, forward, and with gradients."""
    heads = ((ATTENTION, dtype),) * 3
    name = f"causal attention by cuDNN, {dtype}{list(ATTENTION)}"
    yield Probe(name, "achieved.attention", _attention, heads)
    name = "the same with gradients"
    yield Probe(name, "achieved.attention_backward", _attention_gradients, heads)


def _message_probes(figure: str, size: int, devices: int) -> Iterator[Probe]:
    """Yield collectives of `size` bytes."""
    array = (((devices, size // 4 // devices), "float32"),)
    size >>= 10
    yield Probe(f"4 all-reduces of {size} KiB", figure, _all_reduces, array)
    yield Probe(f"4 reduce-scatters and all-gathers of {size} KiB", figure, _scatters, array)


def _nothing(x: jax.Array) -> tuple[jax.Array]:
    return (x + 1,)


def _recurrent(x: jax.Array, weights: jax.Array) -> tuple[jax.Array]:
    def loss(weights: jax.Array) -> jax.Array:
        def step(carry: jax.Array, inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
            forget, update = jnp.split(carry @ weights, 2, axis=-1)
            carry = jax.nn.sigmoid(forget) * carry + jnp.tanh(update + inputs)
            return carry, carry

        return jnp.square(lax.scan(step, x[0], x)[1].astype("float32")).sum()

    return (jax.grad(loss)(weights),)


def _small_layers(x: jax.Array, *weights: jax.Array) -> tuple[jax.Array, ...]:
    def loss(weights: tuple[jax.Array, ...]) -> jax.Array:
        y = x
        for each in weights:
            y = y + jnp.tanh(y @ each)
        return jnp.square(y.astype("float32")).sum()

    return jax.grad(loss)(weights)


def _dense(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    def loss(x: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
        return jnp.square((jax.nn.relu(x @ first) @ second).astype("float32")).sum()

    return jax.grad(loss, (0, 1, 2))(*arrays)


def _convolutions(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    def convolve(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def loss(x: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
        return jnp.square(convolve(jax.nn.relu(convolve(x, first)), second).astype("float32")).sum()

    return jax.grad(loss, (0, 1, 2))(*arrays)


def _adam(
    mean: jax.Array, square: jax.Array, params: jax.Array, grads: jax.Array
) -> tuple[jax.Array, ...]:
    mean, square = 0.9 * mean + 0.1 * grads, 0.99 * square + 0.01 * grads * grads
    # The arguments are drawn at random, so a "square" may be negative here.
    return mean, square, params - 1e-3 * mean / (jnp.sqrt(jnp.abs(square)) + 1e-8)


def _normalize(count: int, x: jax.Array) -> tuple[jax.Array]:
    for _ in range(count):
        x = x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)
    return (x,)


def _blocks(count: int, x: jax.Array, *weights: jax.Array) -> tuple[jax.Array, ...]:
    def loss(weights: tuple[jax.Array, ...]) -> jax.Array:
        up, down = weights
        y = x
        for _ in range(count):
            y = y + jnp.tanh(y @ up) @ down
        return jnp.square(y).sum()

    return jax.grad(loss)(weights)


def _attention(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array]:
    return (
        jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn"),
    )


def _attention_gradients(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    def loss(*arrays: jax.Array) -> jax.Array:
        return jnp.square(_attention(*arrays)[0].astype("float32")).sum()

    return jax.grad(loss, (0, 1, 2))(*arrays)


def _all_reduces(x: jax.Array) -> tuple[jax.Array]:
    for _ in range(4):
        # Each needs the result of the one before, or XLA would merge them into one.
        x = collectives.all_reduce(x, (AXIS,)) / len(x)
    return (x,)


def _scatters(x: jax.Array) -> tuple[jax.Array]:
    count = len(x)
    for _ in range(4):
        x = collectives.all_gather(collectives.reduce_scatter(x, (AXIS,), 0) / count, (AXIS,), 0)
    return (x,)


def compile_probe(probe: Probe, mesh: Mesh) -> Any:
    """Compile a probe as all devices of a mesh run it, each on arrays of its own; arguments have a
    leading dim for devices.
    """
    spec = PartitionSpec(AXIS)

    def on_device(*shards: jax.Array) -> tuple[jax.Array, ...]:
        results = probe.function(*(shard[0] for shard in shards))
        return tuple(result[None] for result in results)

    mapped = jax.jit(
        shard_map(on_device, mesh=mesh, in_specs=spec, out_specs=spec),
        # an update in place writes no new memory, as in a training step
        donate_argnums=tuple(range(probe.donated)),
    )
    sharding = NamedSharding(mesh, spec)
    arguments = [
        jax.ShapeDtypeStruct((mesh.size, *shape), dtype, sharding=sharding)
        for shape, dtype in probe.shapes
    ]
    return mapped.lower(*arguments).compile()


def predictor(compiled: Any, devices: int) -> Callable[[Target], float]:
    """Return a function that predicts the seconds of a program that `compile_probe` has compiled,
    on a target.
    """
    module, temporaries = parse(compiled.as_text()), compiled.memory_analysis().temp_size_in_bytes
    mesh = MeshSpec(((AXIS, devices),))

    def predict(target: Target) -> float:
        cluster = Cluster(1, devices, target)
        timeline = timeline_of(module, mesh, cluster, (AXIS,), temporaries=temporaries)
        # Not 0, since calibration takes its logarithm.
        return max(timeline.seconds, 1e-12)

    return predict


@dataclasses.dataclass(frozen=True)
class Observation:
    """One program's time.

    Attributes:
      figure: the key of the target's file that it shows, such as "achieved.matmul" or
        "first_touch".
      predict: the program's time in seconds on a target.
      seconds: the median time.
      noise: half of the distance between the quartiles, as a share of the median.
    """

    figure: str
    predict: Callable[[Target], float]
    seconds: float
    noise: float = 0.0


class CompiledProbe:
    """A probe that is compiled for a mesh, its arguments, and its times."""

    def __init__(self, probe: Probe, mesh: Mesh) -> None:
        self.probe, self.times = probe, list[float]()

        # not constants, which cost a GPU less power and so are multiplied faster
        def draw(key: jax.Array) -> tuple[jax.Array, ...]:
            return tuple(
                0.02 * jax.random.normal(key, (mesh.size, *shape), dtype)
                for shape, dtype in probe.shapes
            )

        self.compiled = compile_probe(probe, mesh)
        self.predict = predictor(self.compiled, mesh.size)
        self.arguments = jax.jit(draw, out_shardings=NamedSharding(mesh, PartitionSpec(AXIS)))(
            jax.random.key(0)
        )

    def measure(self) -> None:
        """Execute the program twice, and record the second time: the first execution finds the
        caches and the free memory that another program has left.
        """
        for timed in (False, True):
            began = time.perf_counter()
            # JAX returns from a call before the devices are done.
            results = jax.block_until_ready(self.compiled(*self.arguments))
            if timed:
                self.times.append(time.perf_counter() - began)
            self.arguments = (*results[: self.probe.donated], *self.arguments[self.probe.donated :])

    def quartiles(self, begin: float) -> tuple[float, float]:
        """Return the quartiles of its times, without `begin` seconds each."""
        first, _, third = statistics.quantiles(self.times, n=4)
        return max(first - begin, 1e-9), max(third - begin, 1e-9)

    def observation(self, begin: float) -> Observation:
        """Return its median time, without the `begin` seconds in which any program starts."""
        median = max(statistics.median(self.times) - begin, 1e-9)
        first, third = self.quartiles(begin)
        noise = min((third - first) / 2 / median, 1.0)
        return Observation(self.probe.figure, self.predict, median, noise)
