"""Which server keeps what, and that packing moves numbers without changing a bit."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import spmd
from spmd.base.specs import pspec
from spmd.base.tree import flatten
from spmd.layout.schema import Batch, Layout
from spmd.mesh import MeshSpec
from spmd.sync.packed_model import place_packed
from spmd.wire.assignment import STRATEGIES, assign
from spmd.wire.server.declaration import PLACEMENTS
from spmd.wire.server.packing import Storage

pytestmark = pytest.mark.optimized

UNSPLIT = tuple(STRATEGIES)

# shapes and dtypes by path
MODELS = {
    "one": {"w": ((6, 4), "float32")},
    "odd": {
        "a": ((7, 9), "float32"),
        "b": ((13,), "float32"),
        "c": ((1,), "float32"),
        "d": ((3, 5, 2), "float32"),
    },
    "scalar": {"scale": ((), "float32"), "w": ((5,), "float32")},
    "only_scalars": {"a": ((), "float32"), "b": ((), "bfloat16")},
    "empty_arrays": {
        "a": ((0,), "float32"),
        "b": ((4, 3), "float32"),
        "c": ((3, 0), "float32"),
        "d": ((0, 2), "bfloat16"),
    },
    "mixed": {
        "blocks": [
            {"kernel": ((5, 3), "bfloat16"), "bias": ((3,), "float32")},
            {"kernel": ((3, 3), "bfloat16"), "bias": ((3,), "float32")},
        ],
        "out": {
            "kernel": ((3, 11), "float32"),
            "scale": ((), "bfloat16"),
            "empty": ((0, 3), "bfloat16"),
        },
    },
}
COUNTS = [
    (positions, servers) for positions in (1, 2, 3) for servers in range(1, positions + 1)
] + [(8, 5)]
every_model = pytest.mark.parametrize("shapes", MODELS.values(), ids=MODELS.keys())
QUICK = [(1, 1), (3, 2), (8, 5)]
every_count = pytest.mark.parametrize(
    "positions, servers",
    [pytest.param(*c, marks=[pytest.mark.system] * (c not in QUICK)) for c in COUNTS],
)


def bits_of(x):
    x = np.asarray(x)
    return x.view({2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


def any_bits(shapes):
    """Arrays of bits that mean anything: numbers, -0, infinity, nan."""
    rng = np.random.default_rng(0)

    def random_leaf(leaf):
        shape, dtype = leaf
        kind = {"float32": np.uint32, "bfloat16": np.uint16}[dtype]
        # none is 0, which is what fills up
        bits = rng.integers(1, np.iinfo(kind).max, math.prod(shape), kind, endpoint=True)
        special = {
            "float32": [0x80000000, 0x7F800000, 0x7FC00000, 1],
            "bfloat16": [0x8000, 0x7F80, 0x7FC0, 1],
        }[dtype]
        bits[: len(special)] = special[: bits.size]
        # of these XLA:CPU has one nan only, each way: it pads and joins them as float32
        if dtype == "bfloat16":
            bits[(bits & 0x7FFF) > 0x7F80] = 0x7FC0
        return jnp.asarray(bits.view(jnp.dtype(dtype)).reshape(shape))

    return jax.tree.map(random_leaf, shapes, is_leaf=lambda node: isinstance(node, tuple))


def make(shapes, placement, positions, servers):
    params = any_bits(shapes)
    return params, Storage(jax.eval_shape(lambda: params), placement, positions, servers)


# packing ------------------------------------------------------------------------------------------


@pytest.mark.sampled(quick=59, system=11)
@every_model
@every_count
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_unpack_inverts_pack_bit_for_bit(shapes, placement, positions, servers):
    params, storage = make(shapes, placement, positions, servers)
    stored = storage.pack(params)
    back = storage.unpack(stored)
    assert jax.tree.structure(back) == jax.tree.structure(params)
    for path, leaf in flatten(params).items():
        unpacked = flatten(back)[path]
        assert unpacked.shape == leaf.shape and unpacked.dtype == leaf.dtype
        assert np.array_equal(bits_of(unpacked), bits_of(leaf))
    assert all(rows.ndim == 2 and rows.shape[0] == positions for rows in jax.tree.leaves(stored))


@pytest.mark.sampled(quick=85, system=11)
@every_model
@every_count
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_pack_stores_each_number_once_and_pads_with_zeros(shapes, placement, positions, servers):
    params, storage = make(shapes, placement, positions, servers)
    stored = storage.pack(params)
    for dtype in ("float32", "bfloat16"):
        mine = [
            bits_of(leaf).reshape(-1) for leaf in jax.tree.leaves(params) if leaf.dtype == dtype
        ]
        rows = [bits_of(leaf) for leaf in jax.tree.leaves(stored) if leaf.dtype == dtype]
        assert bool(mine) == bool(rows)
        kept = np.concatenate([np.zeros(0, int), *(part[part != 0] for part in rows)])
        assert np.array_equal(np.sort(kept), np.sort(np.concatenate([np.zeros(0, int), *mine])))
        assert not any(part[servers:].any() for part in rows)

    # what fills up is thrown away, whatever became of it
    def spoil(rows):
        return jnp.asarray(
            np.where(bits_of(rows) == 0, np.asarray(7, rows.dtype), np.asarray(rows))
        )

    spoiled = flatten(storage.unpack(jax.tree.map(spoil, stored)))
    assert all(
        np.array_equal(bits_of(spoiled[path]), bits_of(leaf))
        for path, leaf in flatten(params).items()
    )


@pytest.mark.sampled(quick=3)
@every_model
@every_count
def test_sliced_placement_is_even(shapes, positions, servers):
    params, storage = make(shapes, "sliced", positions, servers)
    for path, rows in flatten(storage.pack(params)).items():
        flat = bits_of(flatten(params)[path]).reshape(-1)
        width = -(-flat.size // servers)
        assert storage.sliced and rows.shape == (positions, width)
        for server in range(servers):
            mine = flat[server * width : (server + 1) * width]
            assert np.array_equal(bits_of(rows)[server], np.pad(mine, (0, width - mine.size)))


@pytest.mark.sampled(quick=3)
@every_model
@every_count
@pytest.mark.parametrize("placement", UNSPLIT)
def test_unsplit_parameter_is_in_row_of_its_owner(shapes, placement, positions, servers):
    params, storage = make(shapes, placement, positions, servers)
    stored, leaves = storage.pack(params), flatten(params)
    kinds = {str(leaf.dtype) for leaf in leaves.values()}
    assert set(stored) == set(storage.assignments) == kinds and not storage.sliced
    for kind in kinds:
        assignment, rows, taken = (
            storage.assignments[kind],
            bits_of(stored[kind]),
            np.zeros(stored[kind].shape, int),
        )
        assert set(assignment.owner) == {
            path for path, leaf in leaves.items() if leaf.dtype == kind
        }
        assert rows.shape == (positions, max(assignment.load)) and len(assignment.load) == servers
        for path, owner in assignment.owner.items():
            start, flat = assignment.start(path), bits_of(leaves[path]).reshape(-1)
            assert 0 <= owner < servers and np.array_equal(
                rows[owner, start : start + flat.size], flat
            )
            taken[owner, start : start + flat.size] += 1
        assert taken.max(initial=0) <= 1 and taken.sum(axis=1).tolist() == [
            *assignment.load,
            *[0] * (positions - servers),
        ]
        # one after another, no gaps
        assert all(taken[server, :load].all() for server, load in enumerate(assignment.load))


@pytest.mark.system
@pytest.mark.parametrize(
    "placement",
    [pytest.param(name, marks=[pytest.mark.slow] * (name == "round_robin")) for name in PLACEMENTS],
)
def test_pack_gradients_under_jit(placement):
    params, storage = make(MODELS["mixed"], placement, 4, 3)
    plain, compiled = storage.pack(params), jax.jit(storage.pack)(params)
    assert all(
        np.array_equal(bits_of(a), bits_of(b))
        for a, b in zip(*map(jax.tree.leaves, (plain, compiled)), strict=True)
    )

    # of what a model computes with, the gradient of a sum is 1 for every number of a parameter, and
    # 0 for what fills up
    def total(stored):
        return sum(
            leaf.astype(jnp.float32).sum() for leaf in jax.tree.leaves(storage.views(stored))
        )

    ones, wanted = jax.grad(total)(plain), storage.pack(jax.tree.map(jnp.ones_like, params))
    assert all(
        np.array_equal(bits_of(a), bits_of(b))
        for a, b in zip(*map(jax.tree.leaves, (ones, wanted)), strict=True)
    )


@pytest.mark.sampled(quick=16)
@pytest.mark.parametrize(
    "axes, data",
    [({"data": 8}, ("data",)), ({"node": 2, "data": 4}, ("node", "data"))],
    ids=["one", "two"],
)
@pytest.mark.parametrize("servers", [3, 8])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_each_data_position_has_a_row(placement, servers, axes, data):
    params, storage = make(MODELS["mixed"], placement, 8, servers)
    layout, stored = Layout(batch=Batch((data,))), storage.pack(params)
    resolved = place_packed(storage, layout, MeshSpec.parse(axes))
    assert (resolved.layout, resolved.mesh) == (layout, MeshSpec.parse(axes)) and set(
        resolved.placements
    ) == set(flatten(stored))
    mesh = spmd.make_mesh(axes)
    for path, rows in flatten(stored).items():
        place = resolved.placements[path]
        assert (place.path, place.shape, place.dtype, place.nbytes) == (
            path,
            rows.shape,
            str(rows.dtype),
            rows.nbytes,
        )
        assert place.spec == place.state_spec == (data,) and placement in place.chosen_by
        assert (
            place.bytes_per_device(resolved.mesh) * 8 == place.nbytes
            and place.copies(resolved.mesh) == 1
        )
        placed = jax.device_put(rows, NamedSharding(mesh, pspec(place.spec)))
        for number, device in enumerate(mesh.devices.reshape(-1)):
            (shard,) = [shard for shard in placed.addressable_shards if shard.device == device]
            assert np.array_equal(bits_of(shard.data), bits_of(rows)[number : number + 1])


def test_packed_rows_are_replicated_over_other_axes():
    _, storage = make(MODELS["one"], "largest_first", 4, 4)
    resolved = place_packed(storage, Layout(), MeshSpec.parse("data=4,model=2"))
    (place,) = resolved.placements.values()
    assert (
        place.spec == (("data",),) and place.shape == (4, 24) and place.copies(resolved.mesh) == 2
    )


# who keeps what -----------------------------------------------------------------------------------


def owners(placement, sizes, servers):
    return list(
        assign(
            placement, dict(zip(map(str, range(len(sizes))), sizes, strict=True)), servers
        ).owner.values()
    )


@pytest.mark.parametrize("placement", UNSPLIT)
def test_round_robin_of_equal_parameters(placement):
    """TF's own test of its greedy strategy: u, v, w, x on 0, 1, 0, 1."""
    assert assign(placement, dict.fromkeys("uvwx", 10), 2).owner == {"u": 0, "v": 1, "w": 0, "x": 1}
    assert owners(placement, [3] * 10, 4) == [n % 4 for n in range(10)]


def test_greedy_assigns_to_first_least_loaded():
    # 5 and 5 before the 3
    assert owners("greedy_bytes", [5, 2, 2, 1, 3, 1], 2) == [0, 1, 1, 1, 0, 1]
    assert owners("greedy_bytes", [1, 1, 1, 5, 1, 1, 1], 3) == [0, 1, 2, 0, 1, 2, 1]
    assert owners("round_robin", [5, 2, 2, 1, 3, 1], 4) == [0, 1, 2, 3, 0, 1]


def test_largest_first_is_greedy_on_stable_sort():
    assert owners("largest_first", [1, 2, 5, 2, 3], 2) == [1, 1, 0, 0, 1]
    assert owners("largest_first", [4, 4, 9, 4], 3) == [1, 2, 0, 1]


def random_sizes(number, largest=40):
    rng = np.random.default_rng(number)
    return rng.integers(0, largest, rng.integers(1, 8)).tolist(), int(rng.integers(1, 5))


def load_of(sizes, owner, servers):
    return [
        sum(size for size, of in zip(sizes, owner, strict=True) if of == server)
        for server in range(servers)
    ]


@pytest.mark.parametrize("number", range(40))
def test_loads_are_within_bounds(number):
    sizes, servers = random_sizes(number)
    best = min(
        max(load_of(sizes, owner, servers))
        for owner in itertools.product(range(servers), repeat=len(sizes))
    )
    most = {}
    for placement in UNSPLIT:
        owner = owners(placement, sizes, servers)
        assignment = assign(placement, dict(enumerate(sizes)), servers)
        assert list(assignment.load) == load_of(sizes, owner, servers) and sum(
            assignment.load
        ) == sum(sizes)
        most[placement] = max(assignment.load)
        assert most[placement] >= best
        if sum(sizes):
            assert assignment.imbalance == pytest.approx(
                most[placement] * servers / sum(sizes), rel=1e-12
            )
            assert assignment.padding == pytest.approx(1 - 1 / assignment.imbalance, abs=1e-12)
    # Graham 1966 and 1969; whole numbers, so 1e-9 only covers the division
    assert most["greedy_bytes"] <= sum(sizes) / servers + (1 - 1 / servers) * max(sizes) + 1e-9
    assert most["largest_first"] <= (4 / 3 - 1 / (3 * servers)) * best + 1e-9


@pytest.mark.parametrize("servers", [2, 3, 4])
def test_load_bounds_are_reached(servers):
    """The worst cases: many small ones before a large one; and 2n-1, 2n-1, ..., n, n, n."""
    small = [1] * (servers * (servers - 1)) + [servers]
    assert max(assign("greedy_bytes", dict(enumerate(small)), servers).load) == 2 * servers - 1
    worst = sorted(
        [
            *range(servers + 1, 2 * servers),
            *range(servers + 1, 2 * servers),
            servers,
            servers,
            servers,
        ],
        reverse=True,
    )
    # the best is 3 n
    assert max(assign("largest_first", dict(enumerate(worst)), servers).load) == 4 * servers - 1


# what placing unsplit parameters costs ------------------------------------------------------------


def vgg16():
    """Elements of VGG16's kernels and biases, in the model's order."""
    widths, sizes = [3, 64, 64, 128, 128, *[256] * 3, *[512] * 6], {}
    for number, (before, after) in enumerate(itertools.pairwise(widths), 1):
        sizes |= {f"conv{number}/kernel": 3 * 3 * before * after, f"conv{number}/bias": after}
    for number, (before, after) in enumerate(
        itertools.pairwise([7 * 7 * 512, 4096, 4096, 1000]), 1
    ):
        sizes |= {f"dense{number}/kernel": before * after, f"dense{number}/bias": after}
    return sizes


def language_model():
    """8 LSTM layers of 1024, both matrices in one kernel and one bias; 32,000 words; embedding and
    softmax are not tied.
    """
    sizes = {"embedding": 32000 * 1024}
    for number in range(8):
        sizes |= {f"lstm{number}/kernel": 2048 * 4096, f"lstm{number}/bias": 4096}
    return sizes | {"softmax/kernel": 1024 * 32000, "softmax/bias": 32000}


def test_model_sizes_are_as_published():
    assert sum(vgg16().values()) == 138_357_544 and len(vgg16()) == 32
    assert sum(language_model().values()) == 132_709_632 and len(language_model()) == 19


TABLE = [
    (vgg16, 2, (2.000, 1.582, 1.485)),
    (vgg16, 4, (3.282, 3.057, 2.971)),
    (language_model, 2, (1.505, 1.241, 1.000)),
    (language_model, 4, (1.999, 1.494, 1.011)),
    (language_model, 8, (2.987, 2.481, 1.975)),
]


@pytest.mark.parametrize(
    "model, servers, wanted", TABLE, ids=lambda value: getattr(value, "__name__", None)
)
def test_imbalance_of_unsplit_parameters(model, servers, wanted):
    assignments = [
        assign(placement, model(), servers)
        for placement in ("round_robin", "greedy_bytes", "largest_first")
    ]
    # as it is printed
    assert [assignment.imbalance for assignment in assignments] == pytest.approx(wanted, abs=5e-4)


@pytest.mark.parametrize("servers", [2, 3, 4, 7, 8, 96])
@pytest.mark.parametrize("model", [vgg16, language_model], ids=lambda model: model.__name__)
def test_sliced_placement_is_balanced_with_little_padding(model, servers):
    sizes = model()
    assignment = assign("sliced", sizes, servers)
    assert (
        assignment.imbalance == 1.0 and assignment.owner == {} and len(assignment.load) == servers
    )
    filled = sum(-size % servers for size in sizes.values())
    assert assignment.load[0] * servers == sum(sizes.values()) + filled
    assert (
        assignment.padding == pytest.approx(filled / (sum(sizes.values()) + filled), abs=1e-12)
        and assignment.padding < 0.01
    )


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_assignment_without_parameters_is_balanced(placement):
    for sizes in ({}, {"empty": 0, "none": 0}):
        assignment = assign(placement, sizes, 3)
        assert (
            assignment.load == (0, 0, 0)
            and assignment.imbalance == 1.0
            and assignment.padding == 0.0
        )
