"""Workers that train independently and synchronize periodically: DiLoCo (with fragments) and EASGD,
compared with plain loops.
"""

import dataclasses
import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spmd
from spmd.base.tree import flatten
from spmd.errors import CheckpointError
from spmd.wire.transfer import OUTER, OWN, READ
from tests.compare import assert_close
from tests.train.served import ALL_REDUCE, MOMENTUM, ROWS, data, far, served, train, trainer_of

SGD, ADAMW = optax.sgd(0.1), optax.adamw(1e-2)


def init(key):
    keys = jax.random.split(key)

    def dense(key, rows, columns):
        return {"kernel": 0.3 * jax.random.normal(key, (rows, columns)), "bias": jnp.zeros(columns)}

    return {"hidden": dense(keys[0], 12, 33), "out": dense(keys[1], 33, 5)}


def apply(params, x):
    hidden = jnp.tanh(x @ params["hidden"]["kernel"] + params["hidden"]["bias"])
    return hidden @ params["out"]["kernel"] + params["out"]["bias"]


def trainer_by_hand(optimizer, gradients=None, **server):
    mesh = spmd.make_mesh("data=8")
    layout = spmd.Layout(
        gradients=gradients or spmd.Gradients("parameter_server"),
        parameter_server=spmd.ParameterServer(**server),
    )
    model = spmd.FunctionalModel(init, apply)
    return spmd.Trainer(
        model, loss=spmd.losses.cross_entropy, optimizer=optimizer, mesh=mesh, layout=layout
    )


def batches(steps, rows=ROWS):
    return [data(rows, seed=number) for number in range(steps)]


def ran(trainer, steps, rows=ROWS):
    state = trainer.init()
    for batch in batches(steps, rows):
        state, _ = trainer.step(state, (batch["x"], batch["y"]))
    return state


def weights(trainer, state):
    return {path: np.asarray(leaf) for path, leaf in flatten(trainer.rebuild(state).params).items()}


def owns(trainer, state):
    """Every worker's own weights, by path [workers, *shape]."""
    # eager collectives in flight may deadlock on CPUs
    local = {path: kept[OWN] for path, kept in jax.device_get(state.exchange).items()}
    packed = [
        {path: rows[worker] for path, rows in local.items()}
        for worker in range(trainer._placed.exchange.worker_count)
    ]
    structure = jax.tree.structure(state.params)

    def unpack(rows):
        return trainer._placed.storage.unpack(
            jax.tree.unflatten(structure, [rows[path] for path in flatten(state.params)])
        )

    return {
        path: np.stack(leaves)
        for path, *leaves in _by_path([flatten(unpack(rows)) for rows in packed])
    }


def _by_path(trees):
    return [(path, *(np.asarray(tree[path]) for tree in trees)) for path in trees[0]]


class ByHand:
    """All of it in a plain loop over workers, from the same weights, without servers."""

    def __init__(self, optimizer, start, workers):
        self.optimizer, self.workers, self.z = optimizer, workers, start
        self.local = [start] * workers
        self.opt = [optimizer.init(start)] * workers
        self.read = start

        @jax.jit
        def local_step(params, opt, x, y):
            def loss(p):
                return optax.softmax_cross_entropy_with_integer_labels(apply(p, x), y).mean()

            updates, opt = optimizer.update(jax.grad(loss)(params), opt, params)
            return optax.apply_updates(params, updates), opt

        self._one = local_step

    def step(self, batch):
        per = len(batch["y"]) // self.workers
        for worker in range(self.workers):
            rows = slice(worker * per, (worker + 1) * per)
            self.local[worker], self.opt[worker] = self._one(
                self.local[worker], self.opt[worker], batch["x"][rows], batch["y"][rows]
            )


def diloco_by_hand(
    optimizer,
    start,
    workers,
    steps,
    *,
    every,
    fragments,
    rate,
    momentum,
    overlap=0,
    mix=0.0,
    rows=ROWS,
):
    """Douillard et al., algorithm 1, with the outer optimizer of optax; and its streaming form."""
    run, outer = (
        ByHand(optimizer, start, workers),
        optax.sgd(rate, momentum or None, nesterov=bool(momentum)),
    )
    memory, stride = outer.init(start), every // len(fragments)

    def flat(tree, paths):
        return {path: leaf for path, leaf in flatten(tree).items() if path in paths}

    def put(tree, part):
        return jax.tree.unflatten(jax.tree.structure(tree), list((flatten(tree) | part).values()))

    for number, batch in enumerate(batches(steps, rows), 1):
        run.step(batch)
        for turn, paths in enumerate(fragments, 1):
            if number % every == turn * stride % every:
                way = jax.tree.map(
                    lambda read, *local: read - sum(local) / workers, run.read, *run.local
                )
                updates, moved = outer.update(way, memory)
                run.z = put(run.z, flat(optax.apply_updates(run.z, updates), paths))
                if momentum:
                    trace = put(memory[0].trace, flat(moved[0].trace, paths))
                    memory = (memory[0]._replace(trace=trace), *memory[1:])
            if number > overlap and (number - overlap) % every == turn * stride % every:
                part = flat(run.z, paths)
                run.read = put(run.read, part)
                run.local = [
                    put(local, {p: mix * flatten(local)[p] + (1 - mix) * part[p] for p in paths})
                    for local in run.local
                ]
    return run


# DiLoCo -------------------------------------------------------------------------------------------


@pytest.mark.system
@pytest.mark.parametrize(
    "optimizer", [pytest.param(SGD, marks=pytest.mark.slow), MOMENTUM], ids=["sgd", "momentum"]
)
def test_sync_at_every_step_with_a_plain_outer_optimizer_is_synchronous(optimizer):
    """z - mean(z - w) is the mean of w, and of linear updates of one w the mean is the update of
    the mean gradient.
    """
    trainer = trainer_of(
        served(mode="local", every=1, outer_rate=1.0, outer_momentum=0.0), optimizer=optimizer
    )
    local, synchronous = train(trainer), train(trainer_of(ALL_REDUCE, optimizer=optimizer))
    assert far(local, synchronous) < 1e-6, "z - (z - w) is rounded"
    assert (
        far(
            local,
            train(
                trainer_of(
                    served(mode="local", every=2, outer_rate=1.0, outer_momentum=0.0),
                    optimizer=optimizer,
                )
            ),
        )
        > 1e-4
    )
    assert {
        op.kind for op in trainer.wire.ops if op.where.startswith("receive/0/gather_params")
    } == {"all_gather"}, "the arms differ"


DILOCO = {
    "diloco": {"every": 3},
    "local sgd": {"every": 2, "outer_rate": 1.0, "outer_momentum": 0.0},
    "streaming": {"every": 4, "fragments": 2, "overlap": 1, "mix": 0.5},
    "many workers": {"every": 2, "workers": 16},
}


@pytest.mark.system
@pytest.mark.parametrize(
    "server",
    [
        pytest.param(
            DILOCO[name],
            id=name,
            marks=[pytest.mark.slow] * (name in ("local sgd", "many workers")),
        )
        for name in DILOCO
    ],
)
def test_a_run_is_what_a_plain_loop_makes_of_it(server):
    """Inner AdamW with a state for each worker, outer Nesterov. 1e-6: means are summed in another
    order.
    """
    trainer, steps = trainer_by_hand(ADAMW, mode="local", **server), 7
    rows, workers = 2 * ROWS, server.get("workers", 8)
    state = ran(trainer, steps, rows)
    options = {
        "rate": server.get("outer_rate", 0.7),
        "momentum": server.get("outer_momentum", 0.9),
        "rows": rows,
    }
    options |= {key: server[key] for key in ("every", "overlap", "mix") if key in server}
    start = trainer.rebuild(trainer.init()).params
    wanted = diloco_by_hand(
        ADAMW, start, workers, steps, fragments=trainer._placed.exchange.fragments, **options
    )
    assert_close(weights(trainer, state), flatten(wanted.z), 2e-6)
    locals_by_hand = {
        path: np.stack(leaves)
        for path, *leaves in _by_path([flatten(local) for local in wanted.local])
    }
    assert_close(owns(trainer, state), locals_by_hand, 2e-6)
    moved = max(
        np.abs(leaf - flatten(start)[path]).max() for path, leaf in weights(trainer, state).items()
    )
    assert moved > 1e-2, "and it went somewhere"


def test_after_a_sync_all_workers_have_the_same_bits():
    trainer = trainer_by_hand(ADAMW, mode="local", every=3)
    synced, later = ran(trainer, 3), ran(trainer, 4)
    for path, entry in synced.exchange.items():
        local, z = np.asarray(entry[OWN]), np.asarray(flatten(synced.params)[path])
        assert (local == z).all() and (np.asarray(entry[READ]) == z).all()
        assert not (np.asarray(later.exchange[path][OWN]) == z).all()
        assert {shard.data.shape[0] for shard in entry[OWN].addressable_shards} == {1}, (
            "each on its own device"
        )
        assert {shard.data.shape[0] for shard in entry[OUTER].addressable_shards} == {1}


@pytest.mark.system
def test_each_fragment_of_a_streaming_run_is_diloco_of_that_fragment_to_the_last_bit():
    """A loss that is a sum, one for each of two parameters: they share nothing but the time of
    synchronization.
    """

    def trainer(names, **server):
        def draw(key):
            return {
                name: 0.1 * jax.random.normal(jax.random.fold_in(key, ord(name)), (12,))
                for name in names
            }

        model = spmd.FunctionalModel(
            draw, lambda p, x: sum(jnp.square(x @ p[name] - 1) for name in names)
        )
        layout = served(mode="local", **server)
        mesh = spmd.make_mesh("data=4", devices=jax.devices()[:4])
        return spmd.Trainer(
            model,
            loss=lambda m, batch: m(batch),
            optimizer=optax.sgd(0.01, 0.9),
            mesh=mesh,
            layout=layout,
        )

    def run(trainer, steps=7):
        state = trainer.init()
        for batch in batches(steps):
            state, _ = trainer.step(state, batch["x"])
        return weights(trainer, state)

    both = trainer("ab", every=4, fragments=2)
    second = {path[0] for path in both._placed.exchange.fragments[1]}.pop()
    streamed, alone = run(both), run(trainer(second, every=4))
    assert np.array_equal(streamed[second], alone[second])
    first = ({"a", "b"} - {second}).pop()
    assert not np.array_equal(streamed[first], run(trainer(first, every=4))[first]), (
        "its turn is at another time"
    )


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 2])
def test_one_worker_with_a_plain_outer_optimizer_is_plain_training(every):
    trainer = trainer_of(
        served(mode="local", every=every, outer_rate=1.0, outer_momentum=0.0), 1, ADAMW
    )
    assert far(train(trainer), train(trainer_of(ALL_REDUCE, 1, ADAMW))) < 1e-6, (
        "z - (z - w) is rounded"
    )


# EASGD --------------------------------------------------------------------------------------------


@pytest.mark.system
def test_an_elastic_sync_conserves_the_sum_of_all_weights_exactly():
    """Integer multiples of 1/64, a moving rate of 1/16, eight workers, no training: nothing is
    rounded, so not a bit may be lost.
    """
    trainer = trainer_by_hand(optax.set_to_zero(), mode="elastic", every=1, moving_rate=1 / 16)
    state, rng = trainer.init(), np.random.default_rng(0)

    def draw(leaf):
        return jax.device_put(
            (rng.integers(-256, 256, leaf.shape) / 64).astype(np.float32), leaf.sharding
        )

    state = (
        jax.tree.map(draw, state.params),
        {path: {OWN: draw(entry[OWN])} for path, entry in state.exchange.items()},
    )
    state = spmd.State(
        trainer.init().step, state[0], trainer.init().opt, {}, {}, trainer.init().key, state[1]
    )

    def read(state):
        return {
            p: (np.asarray(e[OWN]), np.asarray(flatten(state.params)[p]))
            for p, e in state.exchange.items()
        }

    before = read(state)
    batch = batches(1)[0]
    after = read(trainer.step(state, (batch["x"], batch["y"]))[0])
    for path, (local, z) in after.items():
        was, centre = before[path]
        assert np.array_equal(local.sum(0) + z, was.sum(0) + centre)
        assert np.array_equal(local, was - (was - centre) / 16) and np.array_equal(
            z, centre + (was - centre).sum(0) / 16
        )
        assert not np.array_equal(z, centre)


@pytest.mark.system
def test_an_elastic_run_is_what_a_plain_loop_makes_of_it():
    trainer, steps, rate = trainer_by_hand(MOMENTUM, mode="elastic", every=2), 5, 0.9 / 8
    wanted = ByHand(MOMENTUM, trainer.rebuild(trainer.init()).params, 8)
    for number, batch in enumerate(batches(steps), 1):
        wanted.step(batch)
        if number % 2 == 0:
            ways = [
                jax.tree.map(lambda x, z: rate * (x - z), local, wanted.z) for local in wanted.local
            ]
            wanted.local = [
                jax.tree.map(jnp.subtract, local, way)
                for local, way in zip(wanted.local, ways, strict=True)
            ]
            wanted.z = jax.tree.map(lambda z, *parts: z + sum(parts), wanted.z, *ways)
    state = ran(trainer, steps)
    assert_close(weights(trainer, state), flatten(wanted.z))
    assert_close(
        owns(trainer, state),
        {
            path: np.stack(leaves)
            for path, *leaves in _by_path([flatten(local) for local in wanted.local])
        },
    )


@pytest.mark.slow
def test_workers_with_moving_rate_0_train_independently():
    trainer = trainer_by_hand(MOMENTUM, mode="elastic", every=1, moving_rate=0)
    start, state = weights(trainer, trainer.init()), ran(trainer, 4)
    assert all(
        np.array_equal(start[path], leaf) for path, leaf in weights(trainer, state).items()
    ), "the servers stand still"
    alone = ByHand(MOMENTUM, trainer.rebuild(trainer.init()).params, 8)
    for batch in batches(4):
        alone.step(batch)
    assert_close(
        owns(trainer, state),
        {
            path: np.stack(leaves)
            for path, *leaves in _by_path([flatten(local) for local in alone.local])
        },
    )


# what they send, and what is kept -----------------------------------------------------------------


@pytest.mark.system
def test_bytes_are_those_of_periodic_syncs():
    """On average all parameters once in `every` steps, there and back; at most the largest fragment
    at once.
    """
    row = 28  # 7/8 of what 8 workers hold of one number, float32
    sums, peak = {}, {}
    for fragments in (1, 2):
        trainer = trainer_by_hand(SGD, mode="local", every=4, fragments=fragments)
        state, sent = trainer.init(), []
        for batch in batches(8):
            state, metrics = trainer.step(state, (batch["x"], batch["y"]))
            sent.append(metrics["wire_bytes"] - trainer.wire.bytes(where="metrics"))
        sums[fragments], peak[fragments] = sum(sent), max(sent)
    width = sum(place.shape[1] for place in trainer.resolved.placements.values())
    assert sums == {1: 2 * 2 * row * width, 2: 2 * 2 * row * width}
    largest = max(
        sum(trainer.resolved.placements[path].shape[1] for path in paths)
        for paths in trainer._placed.exchange.fragments
    )
    assert peak == {1: 2 * row * width, 2: 2 * row * largest} and largest < width
    assert "in steps without synchronization" in str(trainer.wire)


@pytest.mark.slow
def test_codecs_are_used_at_synchronizations():
    gradients = spmd.Gradients("parameter_server", "int8", error_feedback=True, weights="bfloat16")
    coded, exact = (
        trainer_by_hand(ADAMW, mode="local", every=2, gradients=choice)
        for choice in (gradients, None)
    )
    coded_weights, exact_weights = weights(coded, ran(coded, 6)), weights(exact, ran(exact, 6))
    assert {
        op.dtype for op in coded.wire.ops if op.where.startswith("receive/0/gather_params")
    } == {"uint16"}
    assert any(
        op.dtype == "uint8"
        for op in coded.wire.ops
        if op.where.startswith("send/0/reduce_gradients/int8")
    )
    start = weights(exact, exact.init())
    moved = max(np.abs(exact_weights[path] - start[path]).max() for path in exact_weights)
    difference = np.max(
        [np.abs(coded_weights[path] - exact_weights[path]).max() for path in coded_weights]
    )
    assert 0 < difference < 0.05 * moved, (
        "weights are rounded to 2^-8, and so is what depends on them"
    )


@pytest.mark.slow
def test_steps_with_and_without_sync_share_one_compilation():
    trainer = trainer_by_hand(SGD, mode="local", every=3)
    ran(trainer, 7)
    assert trainer.prepare(None)[0].functions.compilations() == 1


@pytest.mark.system
@pytest.mark.parametrize(
    "server",
    [
        {"mode": "local", "every": 3},
        pytest.param({"mode": "elastic", "every": 3}, marks=pytest.mark.slow),
    ],
    ids=["local", "elastic"],
)
def test_resume_between_two_syncs_gives_the_same_bits(server, tmp_path, caplog):
    fit = functools.partial(
        spmd.fit,
        loss=spmd.losses.cross_entropy,
        optimizer=ADAMW,
        mesh="data=8",
        layout=served(**server),
        batch_size=32,
        progress=False,
    )
    model, rows = spmd.FunctionalModel(init, apply), tuple(data(256).values())
    uninterrupted = fit(model, rows, steps=11)
    assert "2 of the workers' 11 steps came after their last synchronization" in caplog.text
    fit(model, rows, steps=4, checkpoint=tmp_path / "run")
    rest = fit(model, rows, steps=11, checkpoint=tmp_path / "run", resume=True)
    assert int(rest.state.step) == 11
    for leaf, resumed in zip(
        jax.tree.leaves(uninterrupted.state), jax.tree.leaves(rest.state), strict=True
    ):
        assert np.array_equal(np.asarray(leaf), np.asarray(resumed))


@pytest.mark.system
def test_what_is_on_its_way_is_not_forgotten(tmp_path):
    options = {
        "loss": spmd.losses.cross_entropy,
        "optimizer": SGD,
        "mesh": "data=8",
        "batch_size": 32,
        "progress": False,
    }
    model, rows, folder = (
        spmd.FunctionalModel(init, apply),
        tuple(data(256).values()),
        tmp_path / "run",
    )
    spmd.fit(
        model,
        rows,
        layout=served(mode="local", every=4, overlap=2),
        steps=4,
        checkpoint=folder,
        **options,
    )
    why = (
        r"overlap = 2 before, every = 4, fragments = 1, overlap = 0 now[\s\S]*first train to step 6"
    )
    with pytest.raises(CheckpointError, match=why):
        spmd.fit(
            model,
            rows,
            layout=served(mode="local", every=4),
            steps=8,
            checkpoint=folder,
            resume=True,
            **options,
        )


@pytest.mark.system
@pytest.mark.parametrize("mode", [{"mode": "local", "every": 4}, {}], ids=["local", "synchronous"])
def test_what_was_never_sent_is_not_taken_back(mode, tmp_path):
    options = {
        "loss": spmd.losses.cross_entropy,
        "optimizer": SGD,
        "mesh": "data=8",
        "batch_size": 32,
        "progress": False,
    }
    model, rows, folder = (
        spmd.FunctionalModel(init, apply),
        tuple(data(256).values()),
        tmp_path / "run",
    )
    spmd.fit(model, rows, layout=served(**mode), steps=2, checkpoint=folder, **options)
    with pytest.raises(
        CheckpointError, match=r"lies between a send and its receive[\s\S]*first train to step 3"
    ):
        spmd.fit(
            model,
            rows,
            layout=served(mode="local", every=2, overlap=1),
            steps=4,
            checkpoint=folder,
            resume=True,
            **options,
        )


class Normed(nnx.Module):
    def __init__(self, rngs):
        self.norm, self.out = (
            nnx.BatchNorm(12, momentum=0.5, rngs=rngs),
            nnx.Linear(12, 5, rngs=rngs),
        )

    def __call__(self, x):
        return self.out(self.norm(x))


ALONE = {"asynchronous": {"compute_time": (1.0, 99.0, 99.0, 99.0)}, "local": {"every": 9}}


@pytest.mark.system
@pytest.mark.parametrize("mode", ALONE)
def test_batch_statistics_are_of_a_worker_s_own_rows(mode):
    """Four workers, of whom the first alone trains on these rows, beside plain training on its
    rows.
    """

    def run(layout, workers, first_only):
        mesh = spmd.make_mesh(f"data={workers}", devices=jax.devices()[:workers])
        trainer = spmd.Trainer(
            lambda: Normed(nnx.Rngs(0)),
            loss=spmd.losses.cross_entropy,
            optimizer=SGD,
            mesh=mesh,
            layout=layout,
        )
        state, rng = trainer.init(), np.random.default_rng(1)
        for number in range(3):
            mine, others = data(8, seed=number), data(24, seed=rng.integers(99))
            batch = {
                name: np.concatenate([mine[name], others[name]]) if not first_only else mine[name]
                for name in mine
            }
            placed = trainer.place(batch)
            if not first_only and mode == "asynchronous":
                placed = dataclasses.replace(placed, has_rows=np.array([True, False, False, False]))
            state, _ = trainer.step(state, placed)
        return trainer, state

    alone, plain = run(ALL_REDUCE, 1, first_only=True)
    served_by, state = run(served(mode=mode, **ALONE[mode]), 4, first_only=False)
    mine = {
        path: np.asarray(leaf)
        for path, leaf in flatten(
            nnx.to_pure_dict(nnx.state(alone.rebuild(plain), nnx.Param))
        ).items()
    }
    trained = (
        owns(served_by, state)
        if mode == "local"
        else {
            path: np.asarray(leaf)[None]
            for path, leaf in flatten(
                nnx.to_pure_dict(nnx.state(served_by.rebuild(state), nnx.Param))
            ).items()
        }
    )
    assert_close({path: leaf[0] for path, leaf in trained.items()}, mine)
    if mode == "asynchronous":
        assert_close(flatten(state.stats), flatten(plain.stats))


@pytest.mark.system
def test_a_worker_without_rows_stays_where_it_is():
    trainer = trainer_by_hand(ADAMW, mode="local", every=5)
    state = ran(trainer, 1)
    before = owns(trainer, state)
    batch = data(ROWS * 3 // 4)
    after = owns(trainer, trainer.step(state, (batch["x"], batch["y"]))[0])
    for path, leaf in before.items():
        assert np.array_equal(after[path][6:], leaf[6:]) and not np.array_equal(
            after[path][:6], leaf[:6]
        )


@pytest.mark.system
def test_evaluation_is_of_the_servers_weights():
    trainer = trainer_of(served(mode="local", every=5), optimizer=ADAMW)
    state, _ = trainer.step(trainer.init(), data())
    assert (
        trainer.evaluate(state, data())["loss"] == trainer.evaluate(trainer.init(), data())["loss"]
    ), "no worker has synchronized yet"
    assert any("synchronize every" in line for line in trainer.notes())


@pytest.mark.system
def test_program_is_freed_with_its_trainer():
    """What it knows of bytes at synchronisations is kept with it, not with its class."""
    trainer = trainer_by_hand(optax.sgd(0.1), mode="local", every=2)
    program, _ = trainer.prepare((data()["x"], data()["y"]))
    assert program.static_metrics.at(0)["wire_bytes"] != program.static_metrics.at(1)["wire_bytes"]
    ref = weakref.ref(program)
    del trainer, program
    gc.collect()
    assert ref() is None
