"""A checkpoint of one packing restored into another: the same bits, a note on what was reset, an
error for what cannot be moved.
"""

import collections
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from small import host, labelled, same

import spmd
from spmd.base.tree import abstract, describe, flatten
from spmd.errors import CheckpointError, DataError
from spmd.run.checkpoint import Checkpoint, CheckpointStore
from spmd.run.reshard_checkpoint import Repacking, Unpacked, sharded_over_devices
from spmd.wire.server.packing import Storage

# two dtypes, a scalar, an empty array, a list, layers that are alike, and sizes that nothing
# divides
SHAPES = {
    "blocks": [
        {"kernel": ((5, 7), "float32"), "bias": ((7,), "bfloat16")},
        {"kernel": ((5, 7), "float32"), "bias": ((7,), "bfloat16")},
    ],
    "out": {"kernel": ((7, 3), "bfloat16"), "scale": ((), "float32"), "none": ((0, 3), "float32")},
    "b-c": ((13,), "float32"),
    "wide": ((3, 64), "float32"),
}
FLOATS = {"float32": np.uint32, "bfloat16": np.uint16}


def any_bits(seed=0):
    """Parameters of bits that mean anything: -0 and nans too."""
    rng = np.random.default_rng(seed)

    def one(leaf):
        shape, dtype = leaf
        bits = np.asarray(
            rng.integers(0, np.iinfo(FLOATS[dtype]).max, shape, FLOATS[dtype], endpoint=True)
        )
        bits.reshape(-1)[:1] = 1 << (8 * bits.itemsize - 1)
        # of these XLA:CPU has one nan only, each way: it moves some as float32
        if dtype == "bfloat16":
            bits[(bits & 0x7FFF) > 0x7F80] = 0x7FC0
        return bits.view(jnp.dtype(dtype))

    return jax.tree.map(one, SHAPES, is_leaf=lambda node: isinstance(node, tuple))


LIKE = abstract(any_bits())
TWO = {
    "kernel": jax.ShapeDtypeStruct((5, 7), "float32"),
    "bias": jax.ShapeDtypeStruct((7,), "bfloat16"),
}
PACKINGS = {
    "plain": Unpacked(LIKE),
    "sliced, 8": Storage(LIKE, "sliced", 8, 8),
    "sliced, 5 of 8": Storage(LIKE, "sliced", 8, 5),
    "sliced, 2": Storage(LIKE, "sliced", 2, 2),
    "round robin, 3 of 4": Storage(LIKE, "round_robin", 4, 3),
    "greedy, 8": Storage(LIKE, "greedy_bytes", 8, 8),
    "largest first, 8": Storage(LIKE, "largest_first", 8, 8),
}
PAIRS = list(itertools.permutations(PACKINGS, 2))
FAST = {
    ("plain", "sliced, 5 of 8"),
    ("sliced, 5 of 8", "largest first, 8"),
    ("round robin, 3 of 4", "plain"),
}


@functools.cache
def mesh_of(devices=8):
    return spmd.make_mesh(f"data={devices}", devices=jax.devices()[:devices])


@functools.cache
def packer(placement, positions, servers):
    return jax.jit(Storage(LIKE, placement, positions, servers).pack)


def packed(packing, tree):
    """On one device, as whole numbers: to the bit what is stored."""
    if isinstance(packing, Unpacked):
        return tree
    moved = packer(packing.placement, packing.positions, packing.servers)(
        jax.tree.map(lambda x: x.view(FLOATS[str(x.dtype)]), tree)
    )
    return jax.tree.map(
        lambda x, leaf: np.asarray(x).view(leaf.dtype), moved, jax.eval_shape(packing.pack, LIKE)
    )


def placed(tree, mesh):
    """Shardings of a new state: over the mesh where dim 0 divides."""

    def place(leaf):
        spec = (
            PartitionSpec("data")
            if leaf.ndim and leaf.shape[0] % mesh.size == 0
            else PartitionSpec()
        )
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(place, tree)


def repacked(state, wanted, old, new, mesh):
    """What is saved of `state` under `old` moved to `new`; both by path."""
    arrays = {path: leaf for path, leaf in flatten(state).items() if leaf.size}
    wanted = {path: leaf for path, leaf in flatten(placed(wanted, mesh)).items() if leaf.size}
    moves = Repacking(
        {path: describe(leaf) for path, leaf in arrays.items()}, wanted, old, new, mesh
    )
    assert not moves.problems()
    reading = moves.to_read()
    moved = moves.move(
        {path: jax.device_put(leaf, reading[path].sharding) for path, leaf in arrays.items()}
    )
    assert all(leaf.sharding == wanted[path].sharding for path, leaf in moved.items())
    return moved


# bits ---------------------------------------------------------------------------------------------


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize(
    "old, new",
    [pytest.param(*pair, marks=() if pair in FAST else pytest.mark.slow) for pair in PAIRS],
)
def test_parameters_and_moments_are_moved_bit_for_bit(old, new):
    def make_state(packing):
        return {
            "params": packed(packing, any_bits(0)),
            "opt": [
                {
                    "count": np.int32(7),
                    "mu": packed(packing, any_bits(1)),
                    "nu": packed(packing, any_bits(2)),
                }
            ],
            "step": np.int32(3),
        }

    old, new = PACKINGS[old], PACKINGS[new]
    wanted = make_state(new)
    moved = repacked(make_state(old), wanted, old, new, mesh_of())
    wanted = {path: leaf for path, leaf in flatten(wanted).items() if leaf.size}
    assert moved.keys() == wanted.keys() and same(moved, wanted)
    assert not same(packed(old, any_bits(0)), packed(new, any_bits(0))), "the arms differ"


def remembering(scale=1.0):
    """An optimizer that keeps a copy of what it is given, and a count: its state is known without
    arithmetic.
    """

    def init(params):
        return {
            "kept": jax.tree.map(jnp.copy, params),
            "count": jnp.int32(5),
            "scale": jnp.float32(scale),
        }

    return optax.GradientTransformation(init, lambda grads, state, params=None: (grads, state))


def is_float32(params):
    return jax.tree.map(lambda leaf: leaf.dtype == jnp.float32, params)


OPTIMIZERS = {
    "chain": optax.chain(optax.clip_by_global_norm(1.0), remembering()),
    "masked": optax.masked(remembering(), is_float32),
    "partition": optax.partition(
        {True: remembering(), False: optax.set_to_zero()},
        lambda params: jax.tree.map(lambda leaf: leaf.dtype == jnp.bfloat16, params),
    ),
    "hyperparameters": optax.inject_hyperparams(remembering)(scale=0.5),
    "finite": optax.apply_if_finite(remembering(), 3),
    "gathered": optax.MultiSteps(remembering(), 4),
    "float16 moments": optax.trace(0.9, accumulator_dtype=jnp.float16),
}
QUICK = ("partition",)


@pytest.mark.system
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in OPTIMIZERS],
)
def test_any_chain_of_an_optimizer_is_moved(kind):
    """To an array for each parameter, to one for each dtype, and back; what is kept is by bits what
    would be kept there.
    """
    optimizer, states = OPTIMIZERS[kind], {}
    for name in ("plain", "round robin, 3 of 4", "sliced, 2"):
        params = packed(PACKINGS[name], any_bits())
        states[name] = jax.device_get(
            {"params": params, "opt": optimizer.init(params), "step": np.int32(0)}
        )
    for old, new in (("plain", "round robin, 3 of 4"), ("round robin, 3 of 4", "sliced, 2")):
        moved = repacked(states[old], states[new], PACKINGS[old], PACKINGS[new], mesh_of(4))
        assert same(moved, {path: leaf for path, leaf in flatten(states[new]).items() if leaf.size})


def test_arrays_are_read_sharded_where_a_dim_divides():
    shapes = {
        (8, 5): (1, 5),
        (4, 6): (1, 3),
        (2, 3, 12): (1, 3, 3),
        (3, 5): (3, 5),
        (): (),
        (5, 16): (5, 2),
    }
    for mesh in (mesh_of(), spmd.make_mesh("data=4,model=2")):
        assert {
            shape: sharded_over_devices(shape, mesh).shard_shape(shape) for shape in shapes
        } == shapes
        array = jax.device_put(np.arange(24).reshape(4, 6), sharded_over_devices((4, 6), mesh))
        assert len(array.devices()) == 8 and np.array_equal(array, np.arange(24).reshape(4, 6))


# trainers -----------------------------------------------------------------------------------------

OPTIMIZER = optax.adamw(1e-2)


def served(**server):
    feedback = {"codec": "int8", "error_feedback": True} if server.pop("feedback", False) else {}
    gradients = spmd.Gradients("parameter_server", **feedback)
    return spmd.Layout(gradients=gradients, parameter_server=spmd.ParameterServer(**server))


ALL_REDUCE, FSDP = spmd.Layout(gradients=spmd.Gradients("all_reduce")), spmd.Layout.load("fsdp")


def trainer(layout, devices=8, optimizer=OPTIMIZER, like=LIKE, **options):
    """Of a model that is nothing but its parameters."""

    def init(key):
        return jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), like)

    def add_all(params, x):
        return x + sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(params))

    model = spmd.FunctionalModel(init, add_all)
    mesh = options.pop("mesh", None) or mesh_of(devices)
    return spmd.Trainer(
        model, loss=lambda m, b: m(b), optimizer=optimizer, mesh=mesh, layout=layout, **options
    )


def unpacked_params(trainer, tree):
    """Parameters, or moments like them, in the model's structure."""
    stored, storage = jax.device_get(tree), trainer.placed.storage
    return stored if storage is None else jax.device_get(jax.jit(storage.unpack)(stored))


def filled(trainer):
    """A state of numbers that are all different."""
    count = itertools.count(1)

    def fill(leaf):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return jax.device_put(np.full(leaf.shape, 3, leaf.dtype), leaf.sharding)
        values = np.random.default_rng(next(count)).normal(size=leaf.shape).astype(leaf.dtype)
        return jax.device_put(values, leaf.sharding)

    return jax.tree.map(fill, trainer.abstract_state)


def saved(trainer, state, path, storage=None):
    """`state` in a checkpoint, as `fit` writes it."""
    store = CheckpointStore(Checkpoint(path))
    store.save(
        state, 3, {"storage": storage or trainer.packing, "layout": trainer.layout.to_toml()}, {}
    )
    store.close()


def restored(trainer, path):
    store = CheckpointStore(Checkpoint(path))
    try:
        return trainer.load(store, 3)
    finally:
        store.release()


@pytest.fixture(autouse=True)
def _no_trial(monkeypatch):
    """Of the optimizer on packed parameters: it is tested elsewhere, and takes a second for each
    trainer.
    """
    monkeypatch.setattr("spmd.train.model_setup.check_packed", lambda optimizer, storage: None)


JOURNEYS = {  # layouts, devices
    "there and back": [(served(), 8), (served(placement="largest_first", servers=3), 4), (FSDP, 8)],
    "fewer and fewer": [
        (served(), 8),
        (served(placement="largest_first", servers=3), 4),
        (served(servers=1), 2),
        (FSDP, 8),
    ],
    "in and out": [
        (FSDP, 8),
        (served(placement="round_robin"), 8),
        (ALL_REDUCE, 2),
        (served(servers=5), 8),
    ],
    "of two axes": [
        (served(placement="greedy_bytes"), "data=4,model=2"),
        (served(), "data=2,model=4"),
        (FSDP, 1),
    ],
}


@pytest.mark.system
@pytest.mark.parametrize(
    "journey",
    [
        pytest.param(name, marks=() if name == "there and back" else pytest.mark.slow)
        for name in JOURNEYS
    ],
)
def test_state_survives_a_chain_of_packings_and_meshes(journey, tmp_path):
    """Mixed dtypes, a scalar, an empty array: the same parameters and moments at each stop, placed
    as a new state is.
    """
    wanted = None
    for number, (layout, devices) in enumerate(JOURNEYS[journey]):
        at = {"mesh": spmd.make_mesh(devices)} if isinstance(devices, str) else {"devices": devices}
        here = trainer(layout, **at)
        if number == 0:
            state = filled(here)
        else:
            state, notes = restored(here, tmp_path / str(number - 1))
            assert not notes, "synchronous and without codecs, nothing is remembered"
        adam = state.opt[0]
        values = (
            host([unpacked_params(here, tree) for tree in (state.params, adam.mu, adam.nu)]),
            int(adam.count),
            int(state.step),
        )
        assert wanted is None or same(values, wanted)
        for leaf, target in zip(
            jax.tree.leaves(state), jax.tree.leaves(here.abstract_state), strict=True
        ):
            assert (leaf.sharding, leaf.dtype, leaf.shape) == (
                target.sharding,
                target.dtype,
                target.shape,
            )
        wanted = values
        saved(here, state, tmp_path / str(number))


# resumed runs -------------------------------------------------------------------------------------

MOMENTUM = optax.sgd(0.1, momentum=0.9)
LATE = {"mode": "softsync", "splits": 2, "compute_time": "exponential"}


def linear():
    return spmd.FunctionalModel(
        lambda key: {"w": jnp.full((8, 5), 0.1), "b": jnp.zeros(5)},
        lambda p, x: x @ p["w"] + p["b"],
    )


def line(layout, devices=8, **options):
    """A linear model on 96 rows, three steps an epoch."""
    options = {
        "loss": spmd.losses.cross_entropy,
        "optimizer": MOMENTUM,
        "batch_size": 32,
        "progress": False,
        **options,
    }
    return spmd.fit(linear(), labelled(), mesh=mesh_of(devices), layout=layout, **options)


@pytest.mark.system
def test_synchronous_run_resumed_in_another_packing_matches_uninterrupted_run(tmp_path):
    """On as many workers, with momentum, to the last bit: what docs/parameter_server.md promises of
    every placement.
    """
    stops, losses = [(served(), 2), (served(placement="round_robin", servers=5), 4)], []
    uninterrupted = line(ALL_REDUCE, steps=4)
    for layout, steps in stops:
        result = line(layout, steps=steps, checkpoint=tmp_path, resume=True)
        losses += result.history["loss"]
    assert losses == uninterrupted.history["loss"] and len(losses) == 4
    assert same(result.model.params, uninterrupted.model.params)


NOTES = (
    'parameters were packed for a parameter server (placement "sliced", 8 servers, 8 positions), '
    "and are now "
    'packed for a parameter server (placement "largest_first", 3 servers, 4 positions)',
    "residuals were dropped",
    "stale weights of workers were reset: every worker reads the servers' weights again",
    "sums of gradients were reset: gradients collected for the next update, if any, are dropped",
    "weights of these sums were reset",
)


@pytest.mark.system
def test_restore_notes_what_another_packing_resets(tmp_path, caplog):
    here, there = (
        trainer(layout, devices, MOMENTUM, TWO)
        for layout, devices in (
            (served(**LATE, feedback=True), 8),
            (served(**LATE, placement="largest_first", servers=3), 4),
        )
    )
    first = filled(here)
    saved(here, first, tmp_path)
    state = there.restore(tmp_path)
    assert [record.message for record in caplog.records] == [
        f"restored from step 3: {text}" for text in NOTES
    ]
    for path, entry in jax.device_get(state.exchange).items():
        assert (
            entry["held"].shape[1] == 4
            and (entry["held"] == np.asarray(state.params[path])[:, None]).all()
        )
        assert not entry["sum"].any() and not entry["gathered"].any()
    assert same(unpacked_params(there, state.params), unpacked_params(here, first.params))


@pytest.mark.slow
def test_asynchronous_run_resumes_in_another_packing_on_another_mesh(tmp_path):
    """From the end of an epoch, where no rows are assigned; or from the middle of one with the same
    number of workers.
    """
    layout = served(**LATE, placement="largest_first", servers=3)
    first = line(served(**LATE, feedback=True), epochs=1, checkpoint=tmp_path / "end")
    rest = line(layout, 4, epochs=2, checkpoint=tmp_path / "end", resume=True)
    assert int(rest.state.step) > int(first.state.step) and np.isfinite(rest.history["loss"]).all()
    assert NOTES[2] in (tmp_path / "end" / "metrics.jsonl").read_text()
    line(served(**LATE), steps=2, checkpoint=tmp_path / "middle")
    with pytest.raises(DataError, match="parts had been assigned to 8 workers"):
        line(layout, 4, epochs=1, checkpoint=tmp_path / "middle", resume=True)
    same_workers = served(**LATE, placement="largest_first", servers=3, workers=8)
    assert np.isfinite(
        line(same_workers, 4, epochs=1, checkpoint=tmp_path / "middle", resume=True).history["loss"]
    ).all()


@pytest.mark.system
def test_another_mode_in_the_same_packing_keeps_what_it_can(tmp_path):
    """Synchronous to asynchronous and back: parameters and momentum are kept; state that did not
    exist is initialized, with a note.
    """
    here, there = (
        trainer(served(**mode), 8, MOMENTUM, TWO)
        for mode in ({"feedback": True}, {**LATE, "feedback": True})
    )
    state = filled(here)
    saved(here, state, tmp_path / "first")
    late, notes = restored(there, tmp_path / "first")
    assert notes == [
        f"2 {words} were reset"
        for words in ("stale weights of workers", "sums of gradients", "weights of these sums")
    ]
    assert same((late.params, late.opt), (state.params, state.opt))
    saved(there, late, tmp_path / "second")
    back, notes = restored(here, tmp_path / "second")
    assert [line.partition(" ")[2] for line in notes] == [
        f"{words} were dropped"
        for words in ("stale weights of workers", "sums of gradients", "weights of these sums")
    ]
    assert same((back.params, back.opt), (state.params, state.opt))


# what is refused ----------------------------------------------------------------------------------


def refusal(trainer, path):
    with pytest.raises(CheckpointError) as raised:
        restored(trainer, path)
    return str(raised.value)


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize(
    "there",
    [served(), served(placement="greedy_bytes"), ALL_REDUCE],
    ids=["same", "packed", "plain"],
)
def test_restore_into_another_model_lists_paths_and_shapes(there, tmp_path):
    """As large as the saved one, so that what the servers keep of it is of the same shapes."""
    like = {**LIKE, "wide": jax.ShapeDtypeStruct((64, 3), "float32")}
    here = trainer(there)
    saved(here, filled(here), tmp_path)
    text = refusal(trainer(served(), like=like), tmp_path)
    how = 'packed for a parameter server (placement "{}", 8 servers, 8 positions)'
    how = {"sliced": how.format("sliced"), "greedy_bytes": how.format("greedy_bytes")}.get(
        (here.packing or {}).get("placement", "")
    )
    assert text == (
        f"the checkpoint of step 3 in {tmp_path}, {how or 'not packed for a parameter server'}, "
        "does not fit this model and optimizer\n"
        "1 problem:\n"
        "\n"
        "  params/wide\n"
        "      saved float32[3, 64], wanted float32[64, 3]\n"
        "\n"
        "    fix: the model, and the optimizer, that the run was trained with; or another folder, "
        "for a run of this one."
    )


def test_restore_into_another_optimizer_lists_every_difference(tmp_path):
    here = trainer(served(placement="round_robin"), optimizer=MOMENTUM)
    saved(here, filled(here), tmp_path)
    lines = [line.strip() for line in refusal(trainer(served(servers=3)), tmp_path).splitlines()]
    assert lines[lines.index("opt/0/trace/bfloat16") + 1] == "saved bfloat16[8, 21], wanted nothing"
    assert lines[lines.index("opt/0/mu/wide") + 1] == "saved nothing, wanted float32[8, 64]"
    assert not any(line.startswith("params/") for line in lines)


@pytest.mark.system
def test_an_optimizer_state_that_is_not_its_parameters_is_refused_with_a_fix(tmp_path):
    """Each worker's own momentum, [workers, ...]: never parted by a shape that happens to fit."""
    local = {"mode": "local", "every": 2}
    here = trainer(served(**local), 8, MOMENTUM, TWO)
    saved(here, filled(here), tmp_path)
    for layout, why in (
        (served(**local, servers=5), "its shape is not its parameter's"),
        (served(), "one of them has an entry"),
    ):
        text = refusal(trainer(layout, 8, MOMENTUM, TWO), tmp_path)
        assert "params/" not in text and text.count("opt/") == 2
        assert (
            f"      {why}" in text
            and "\n      fix: use the [parameter_server] placement, servers and mode of the "
            "checkpoint"
            in text
        )


@pytest.mark.slow
def test_workers_with_no_optimizer_state_of_their_own_are_restored_anywhere(tmp_path):
    """Their own weights start anew: as they were not the servers', they are not kept."""
    local = {"mode": "local", "every": 2}
    plain = trainer(served(**local), 8, optax.sgd(0.1), TWO)
    saved(plain, filled(plain), tmp_path / "sgd")
    for layout, words in (
        (served(**local, servers=5), "were reset: every worker starts"),
        (ALL_REDUCE, "were dropped"),
    ):
        here = trainer(layout, 8, optax.sgd(0.1), TWO)
        state, notes = restored(here, tmp_path / "sgd")
        assert f"local weights of workers {words}" in " | ".join(notes)
        assert same(
            unpacked_params(plain, restored(plain, tmp_path / "sgd")[0].params),
            unpacked_params(here, state.params),
        )


@pytest.mark.slow
def test_a_checkpoint_that_does_not_say_its_parameters_shapes_is_read_all_the_same(tmp_path):
    here, there = trainer(served(), like=TWO), trainer(served(placement="round_robin"), like=TWO)
    state = filled(here)
    packing_without_shapes = {
        name: value for name, value in here.packing.items() if name != "parameters"
    }
    saved(here, state, tmp_path, packing_without_shapes)
    assert same(
        unpacked_params(there, restored(there, tmp_path)[0].params),
        unpacked_params(here, state.params),
    )


def test_the_same_parameters_in_another_order_are_not_taken_for_each_other(tmp_path):
    """Parameters of one size that are stored unsplit keep the order of the model."""
    shape, names = jax.ShapeDtypeStruct((5, 7), "float32"), ("first", "second", "third")
    models = [collections.OrderedDict.fromkeys(order, shape) for order in (names, names[::-1])]
    for placement in ("largest_first", "sliced"):
        there, here = (trainer(served(placement=placement), like=like) for like in models)
        saved(there, state := filled(there), tmp_path / placement)
        if placement == "sliced":
            assert same(
                dict(unpacked_params(there, state.params)),
                dict(unpacked_params(here, restored(here, tmp_path / placement)[0].params)),
            )
        else:
            text = refusal(here, tmp_path / placement)
            assert (
                "packed in the order first, second, third, and are now in the order third, second, "
                "first"
                in text
                and "fix:" in text
            )
