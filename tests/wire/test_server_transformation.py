"""`wire.parameter_server` in a loop written by hand, against `spmd.fit`'s own servers with the same
layout.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmd
from spmd import wire
from spmd.errors import CommunicationError, OptimizerError, OptionError
from spmd.wire.comm_log import read_collectives
from tests.wire.test_transformations import (
    MESH,
    assert_same_bits,
    distance,
    loss_of,
    make_batches,
    make_mesh,
    make_params,
)

WORKERS, STEPS = 8, 6
LATE = {"mode": "asynchronous", "compute_time": "exponential"}
BOUNDED = {
    "mode": "bounded",
    "bound": 2,
    "compute_time": "lognormal(1, 0.5)",
    "network": {"bandwidth": "1kB/s", "latency": "10ms"},
}
SOFTSYNC = {
    "mode": "softsync",
    "splits": 2,
    "compute_time": "exponential",
    "staleness_scale": "inverse",
}
COMPENSATED = {
    **LATE,
    "delay_compensation": 0.5,
    "delay_decay": 0.95,
    "warmup_steps": 2,
    "fetch_every": 2,
}
# 8 / 4 workers divides without rounding, as 4 rows do
SPARES = {"spares": 4, "compute_time": "exponential"}


def make_step(tx, state, mesh=MESH, axes="data", *, with_loss=False):
    def step(params, state, batch, events):
        loss, grads = jax.value_and_grad(loss_of)(wire.local_params(state, params), batch)
        updates, state = tx.update(
            grads, state, params, events=events, **({"value": loss} if with_loss else {})
        )
        return optax.apply_updates(params, updates), state

    specs = (jax.P(), wire.specs(state))
    return jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(*specs, jax.P(axes), jax.P()),
            out_specs=specs,
            check_vma=False,
        )
    )


def feed(clock, steps):
    """Batches of a loop by hand, as `fit` assigns rows: who takes part in a round gets the next 4,
    and the others no numbers.
    """
    parts = iter(
        [
            part
            for batch in make_batches(steps)
            for part in zip(*(leaf.reshape(WORKERS, 4, -1) for leaf in batch), strict=True)
        ]
    )
    for n in range(steps):
        rows = [
            next(parts)
            if takes
            else tuple(np.full(shape, np.nan, np.float32) for shape in ((4, 16), (4, 1)))
            for takes in clock.round(n).takes
        ]
        yield tuple(map(np.concatenate, zip(*rows, strict=True)))


def by_hand(
    server,
    optimizer,
    codec=None,
    *,
    steps=STEPS,
    mesh=MESH,
    axes="data",
    sent=(0.0, 0.0),
    with_loss=False,
    **options,
):
    clock = wire.server_clock(WORKERS, **server, **({"bytes": sent} if "network" in server else {}))
    tx = wire.parameter_server(axes, optimizer, clock, codec or wire.exact(), **options)
    params = make_params()
    state = wire.init(tx, params, mesh)
    step = make_step(tx, state, mesh, axes, with_loss=with_loss)
    for n, batch in enumerate(feed(clock, steps)):
        params, state = step(params, state, batch, clock.step_inputs(n))
    return jax.tree.map(np.asarray, params), state


def by_fit(server, optimizer, codec="exact", *, error_feedback=False, steps=STEPS):
    """The state of a trainer, and the bytes that its clock counts with."""
    gradients = spmd.Gradients(
        "parameter_server",
        codec,
        {"block": 16} if codec == "int8" else {},
        error_feedback=error_feedback,
    )
    layout = spmd.Layout(gradients=gradients, parameter_server=spmd.ParameterServer(**server))
    model = spmd.FunctionalModel(
        lambda key: make_params(),
        lambda params, x: jnp.tanh(x @ params["up"] + params["bias"]) @ params["down"],
    )
    trainer = spmd.Trainer(
        model,
        loss=lambda model, batch: jnp.mean((model(batch[0]) - batch[1]) ** 2),
        optimizer=optimizer,
        mesh="data=8",
        layout=layout,
    )
    rounds = trainer.steps(make_batches(steps))
    infos = list(itertools.islice(rounds, steps))
    rounds.close()
    return infos[-1].state, trainer.prepare(None)[0].clock.sent


def on_servers(params, state):
    """The servers' parameters in a loop by hand: those of the loop, and what was rounded off."""
    packed = {}
    for path, leaf in params.items():
        width = -(-leaf.size // WORKERS)
        rows = np.pad(leaf.reshape(-1), (0, WORKERS * width - leaf.size)).reshape(WORKERS, width)
        packed[path] = rows + np.asarray(state.memory.get(path, {}).get("rounding", 0 * rows))
    return packed


def assert_equals_fit(ours, state, theirs):
    assert_same_bits(
        on_servers(ours, state), {path: np.asarray(leaf) for path, leaf in theirs.params.items()}
    )
    for path, entry in theirs.exchange.items():
        for kind, leaf in entry.items():
            np.testing.assert_array_equal(
                np.asarray(state.memory[path][kind]), np.asarray(leaf), err_msg=f"{path} {kind}"
            )


# Products by powers of two are exact, so it does not matter that XLA fuses the rate into the sum
# where no collective stands between them.
MOMENTUM = optax.sgd(0.125, momentum=0.5)
MODES = {
    "asynchronous": LATE,
    "bounded": BOUNDED,
    "softsync": SOFTSYNC,
    "compensated": COMPENSATED,
    "spares": SPARES,
    "synchronous": {},
}


@pytest.mark.sampled(system=7)
@pytest.mark.optimized
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("codec", ["exact", "int8"])
def test_a_loop_by_hand_equals_fit_to_the_last_bit(mode, codec):
    lossy = codec == "int8"
    theirs, sent = by_fit(MODES[mode], MOMENTUM, codec, error_feedback=lossy)
    ours, state = by_hand(
        MODES[mode],
        MOMENTUM,
        wire.int8(block=16) if lossy else wire.exact(),
        error_feedback=lossy,
        sent=sent,
    )
    assert_equals_fit(ours, state, theirs)


@pytest.mark.system
@pytest.mark.optimized
@pytest.mark.parametrize("mode, bound", [("bounded", 0.0), ("synchronous", 2.0**-22)])
def test_adamw_equals_fit(mode, bound):
    """Synchronous, an update is rounded before it is sent; `fit` fuses it with the sum: half an ulp
    of a weight in each of 6 steps.
    """
    adamw = optax.adamw(1e-2)
    theirs, sent = by_fit(MODES[mode], adamw)
    ours, state = by_hand(MODES[mode], adamw, sent=sent)
    assert (
        distance(
            on_servers(ours, state),
            {path: np.asarray(leaf) for path, leaf in theirs.params.items()},
        )
        <= bound
    )


@pytest.mark.system
def test_modes_differ_and_so_do_codecs():
    ends = [by_hand(server, MOMENTUM)[0] for server in MODES.values()]
    ends += [
        by_hand(LATE, MOMENTUM, wire.int8(block=16), error_feedback=feedback)[0]
        for feedback in (False, True)
    ]
    assert all(distance(one, other) > 1e-5 for one, other in itertools.combinations(ends, 2))


@pytest.mark.system
def test_the_mean_is_over_those_who_are_present():
    """5 of 8 workers: fit divides a sum of gradients by 5 / 8 of 4 rows, the loop a mean of 4 rows
    by 5 / 8, rounded twice; 2^-24 each.
    """
    server = {"spares": 3, "compute_time": "exponential"}
    theirs, _ = by_fit(server, MOMENTUM)
    ours, state = by_hand(server, MOMENTUM)
    assert (
        distance(
            on_servers(ours, state),
            {path: np.asarray(leaf) for path, leaf in theirs.params.items()},
        )
        < 1e-6
    )
    assert distance(ours, by_hand({}, MOMENTUM)[0]) > 1e-3


@pytest.mark.system
@pytest.mark.parametrize("mode", ["asynchronous", "synchronous"])
def test_the_loss_reaches_the_optimizer(mode):
    """As `value`: of the worker whose gradient is applied, or the mean."""

    def update(grads, state, params=None, *, value, **extra):
        return jax.tree.map(lambda g: -0.1 * jnp.tanh(value) * g, grads), state

    by_loss = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    theirs, _ = by_fit(MODES[mode], by_loss)
    ours, state = by_hand(MODES[mode], by_loss, with_loss=True)
    bound = 0 if mode == "asynchronous" else 1e-6  # the mean loss is summed in another order
    assert (
        distance(
            on_servers(ours, state),
            {path: np.asarray(leaf) for path, leaf in theirs.params.items()},
        )
        <= bound
    )
    assert distance(ours, make_params()) > 1e-3


@pytest.mark.system
def test_workers_along_two_axes_are_the_same_workers():
    for server in (SOFTSYNC, SPARES):
        one, _ = by_hand(server, MOMENTUM, wire.int8(block=16), error_feedback=True)
        two, state = by_hand(
            server,
            MOMENTUM,
            wire.int8(block=16),
            error_feedback=True,
            mesh=make_mesh(host=2, gpu=4),
            axes=("host", "gpu"),
        )
        assert_same_bits(one, two)
        assert jax.tree.leaves(state.inner)[0].sharding.spec == jax.P(("host", "gpu"))


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("mode", ["asynchronous", "softsync", "spares"])
def test_parameters_are_equal_on_all_workers_and_no_step_is_compiled_twice(mode):
    clock = wire.server_clock(WORKERS, **MODES[mode])
    tx = wire.parameter_server("data", MOMENTUM, clock)
    params = make_params()
    state = wire.init(tx, params, MESH)
    step, programs = make_step(tx, state), []
    for n, batch in enumerate(feed(clock, 4)):
        params, state = step(params, state, batch, clock.step_inputs(n))
        programs.append(step._cache_size())
        for leaf in jax.tree.leaves(params):
            shards = [np.asarray(shard.data) for shard in leaf.addressable_shards]
            assert all((shard == shards[0]).all() for shard in shards)
    # the first parameters are on one device
    assert programs[1:] == [programs[1]] * 3 and int(state.step) == 4
    if mode == "asynchronous":
        held = np.asarray(state.memory["up"]["held"])  # [servers, workers, width]
        assert len({held[:, worker].tobytes() for worker in range(WORKERS)}) > 2, (
            "workers have read different versions"
        )


@pytest.mark.system
@pytest.mark.parametrize("mode", ["asynchronous", "spares"])
def test_resumed_from_a_copy_it_ends_in_the_same_bits(mode):
    clock = wire.server_clock(WORKERS, **MODES[mode])
    tx = wire.parameter_server(
        "data", optax.adam(1e-2), clock, wire.int8(block=16), error_feedback=True
    )
    params = make_params()
    state = wire.init(tx, params, MESH)
    step, batches = make_step(tx, state), list(feed(clock, STEPS))
    for n, batch in enumerate(batches):
        if n == 3:
            saved = jax.tree.map(np.asarray, (params, state))
        params, state = step(params, state, batch, clock.step_inputs(n))
    again, again_state = saved
    clock = wire.server_clock(WORKERS, **MODES[mode])  # a new process has a new clock
    for n in range(int(again_state.step), STEPS):
        again, again_state = step(again, again_state, batches[n], clock.step_inputs(n))
    assert_same_bits(jax.tree.map(np.asarray, params), jax.tree.map(np.asarray, again))


@pytest.mark.system
def test_what_the_change_loses_by_rounding_does_not_add_up():
    """The loop's parameters are within one rounding of the servers', however many rounds there
    were.
    """
    ours, state = by_hand(LATE, optax.sgd(0.3), steps=20)
    rounding = {path: np.asarray(entry["rounding"]) for path, entry in state.memory.items()}
    assert any(leaf.any() for leaf in rounding.values())
    most = max(np.abs(leaf).max() for leaf in ours.values())
    assert all(np.abs(leaf).max() <= 2.0**-24 * 2 * most for leaf in rounding.values())


# what is sent -------------------------------------------------------------------------------------


@pytest.mark.sampled(quick=5)
@pytest.mark.parametrize("mode", ["asynchronous", "softsync", "spares"])
@pytest.mark.parametrize("codec", [wire.exact(), wire.int8(block=16)], ids=["exact", "int8"])
def test_bytes_sent_are_those_of_the_loops_own_program(mode, codec):
    clock = wire.server_clock(WORKERS, **MODES[mode])
    tx = wire.parameter_server("data", MOMENTUM, clock, codec, error_feedback=not codec.lossless)
    params, events = make_params(), clock.step_inputs(0)
    state = wire.init(tx, params, MESH)
    program = jax.make_jaxpr(make_step(tx, state))(params, state, make_batches(1)[0], events)
    counted = read_collectives(program.jaxpr, {"data": WORKERS}).bytes()
    assert counted == wire.bytes_sent(tx, params, MESH, events=events) > 0
    if codec == wire.exact():
        once = 7 * 4 * sum(-(-leaf.size // WORKERS) for leaf in params.values())
        # the gradient to the servers, the change from them; and where workers have versions of
        # their own, that too
        assert counted == (2 if mode == "spares" else 3) * once
    else:
        assert counted < wire.bytes_sent(
            wire.parameter_server("data", MOMENTUM, clock), params, MESH, events=events
        )


def test_events_before_the_first_arrival_of_a_round_do_not_exist():
    """A round ends where the next gradient arrives, so `wire.local_params` needs no events: there
    are no reads in between.
    """
    for server in (LATE, BOUNDED, SOFTSYNC, COMPENSATED):
        clock = wire.server_clock(
            WORKERS, **server, **({"bytes": (4e3, 4e3)} if "network" in server else {})
        )
        assert not any(clock.step_inputs(n)["reads"][0].any() for n in range(50))


# with other transformations -----------------------------------------------------------------------


@pytest.mark.system
def test_in_a_chain_events_and_local_params_are_found():
    server, clip = {**LATE, "compute_time": "constant"}, optax.clip_by_global_norm(0.1)
    clock = wire.server_clock(WORKERS, **server)
    ends = []
    for tx in (
        optax.chain(clip, wire.parameter_server("data", MOMENTUM, clock)),
        wire.parameter_server("data", MOMENTUM, clock),
    ):
        params = make_params()
        state = wire.init(tx, params, MESH)
        step = make_step(tx, state)
        for n, batch in enumerate(feed(clock, 3)):
            params, state = step(params, state, batch, clock.step_inputs(n))
        ends.append(jax.tree.map(np.asarray, params))
    assert distance(*ends) > 1e-3, "it clips"


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
        optax.adafactor(1e-2, min_dim_size_to_factor=1),
    ],
)
@pytest.mark.parametrize("server", [LATE, {}], ids=["asynchronous", "synchronous"])
def test_an_optimizer_that_combines_elements_is_refused(optimizer, server):
    with pytest.raises(
        OptimizerError,
        match=r"wire\.parameter_server: the optimizer .*each worker has only its shard",
    ):
        by_hand(server, optimizer, steps=1)


def test_an_optimizer_that_draws_random_numbers_is_refused():
    for server in (LATE, {}):
        with pytest.raises(
            OptimizerError, match=r"wire\.parameter_server: the optimizer draws random numbers"
        ):
            by_hand(server, optax.noisy_sgd(0.1, key=0), steps=1)


# bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, said",
    [
        ({"mode": "local", "every": 5}, r'mode "local".*\n.*wire\.local_sgd'),
        ({"mode": "asyncronous"}, 'did you mean "asynchronous"'),
        ({"mode": "bounded"}, '"bounded" needs bound'),
        ({"bound": 3}, 'nothing reads it in mode "synchronous"'),
        ({"spares": 8}, "8, of 8 workers"),
        ({"mode": "softsync", "splits": 9}, "9, of 8 workers"),
        ({"spare": 3}, 'nothing reads spare.\n.*did you mean "spares"'),
        ({"placement": "round_robin"}, "nothing reads placement"),
        ({"compute_time": "lognormal(1)"}, "is not lognormal"),
        ({"compute_time": (1.0, 2.0)}, "2 numbers for 8 workers"),
        ({"network": {"bandwidth": "fast"}}, 'bandwidth = "fast"'),
        ({"bytes": (1,)}, "not a pair of numbers"),
        (
            {"bytes": (4e6, 4e6)},
            r"bytes=\(4000000\.0, 4000000\.0\) without network(.|\n)*leave bytes out",
        ),
        ({"bytes": (0, 4e6), "network": {}}, "without network"),
        ({"mode": "elastic"}, r"(?s)elastic.*spmd\.fit.*no elastic averaging"),
        ({"mode": "local"}, r"(?s)local.*wire\.local_sgd"),
        ({"every": 4}, "nothing reads every"),
        ({"spares": 8, "staleness_scale": "of"}, "(?s)staleness_scale.*spares"),
    ],
)
def test_options_of_the_clock_are_checked(options, said):
    with pytest.raises(OptionError, match=said):
        wire.server_clock(WORKERS, **options)
    wire.server_clock(WORKERS)


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda clock: wire.parameter_server("data", MOMENTUM, 8), "clock=8 is an int"),
        (
            lambda clock: wire.parameter_server("data", optax.sgd, clock),
            "optimizer=sgd is a function",
        ),
        (lambda clock: wire.parameter_server("data", None, clock), "optimizer=None is None"),
        (lambda clock: clock.step_inputs(-1), "step=-1"),
        (lambda clock: clock.metrics(1.5), "step=1.5 is a float"),
        (lambda clock: jax.jit(clock.step_inputs)(1), "the clock runs on the host"),
        (lambda clock: wire.parameter_server((), MOMENTUM, clock), r"axes=\(\)"),
        (
            lambda clock: wire.parameter_server(
                "data", MOMENTUM, clock, wire.power_sgd(), error_feedback=True
            ),
            "works on a mean over workers",
        ),
        (
            lambda clock: wire.parameter_server(
                "data", MOMENTUM, clock, wire.bfloat16(reduce="ring")
            ),
            "works on a mean over workers",
        ),
        (
            lambda clock: wire.parameter_server("data", MOMENTUM, clock, start_step=3),
            "start_step=3: nothing reads it",
        ),
        (
            lambda clock: wire.parameter_server("data", MOMENTUM, clock, wire.sign()),
            "without error feedback",
        ),
    ],
)
def test_options_are_checked(make, said):
    with pytest.raises(OptionError, match=said):
        make(wire.server_clock(WORKERS, **LATE))


def test_what_update_needs_is_named():
    clock = wire.server_clock(WORKERS, **LATE)
    tx, params = wire.parameter_server("data", MOMENTUM, clock), make_params()
    state = wire.init(tx, params, MESH)
    with pytest.raises(OptionError, match="without params"):
        tx.update(params, state, events=clock.step_inputs(0))
    run, batch = make_step(tx, state), make_batches(1)[0]
    for events, said in (
        (None, "without events"),
        (wire.server_clock(WORKERS).step_inputs(0), "those of this clock"),
    ):
        with pytest.raises(OptionError, match=said) as caught:
            run(params, state, batch, events)
        assert str(caught.value).count("(") == str(caught.value).count(")")
    with pytest.raises(
        CommunicationError,
        match=r"the clock is of 4 workers, and the mesh has 8 along "
        r"data.\n.*server_clock\(workers=8",
    ):
        wire.init(wire.parameter_server("data", MOMENTUM, wire.server_clock(4)), params, MESH)


@pytest.mark.parametrize("server", [LATE, {}], ids=["asynchronous", "synchronous"])
def test_a_state_that_is_not_split_or_of_other_parameters_is_refused(server):
    clock = wire.server_clock(WORKERS, **server)
    tx, params, events = (
        wire.parameter_server("data", MOMENTUM, clock),
        make_params(),
        clock.step_inputs(0),
    )
    state = wire.init(tx, params, MESH)

    def update(params, state):
        return tx.update(params, state, params, events=events)[0]

    def run(state, specs):
        mapped = jax.shard_map(
            update, mesh=MESH, in_specs=(jax.P(), specs), out_specs=jax.P(), check_vma=False
        )
        return jax.jit(mapped)(params, state)

    run(state, wire.specs(state))
    with pytest.raises(CommunicationError, match=r"wire.specs\(state\)"):
        run(state, jax.P())
    other = wire.init(tx, {"w": jnp.zeros((64, 64))}, MESH)
    with pytest.raises(CommunicationError, match="not that of these parameters"):
        run(other, wire.specs(other))


def test_a_state_is_not_resplit_and_the_fix_works():
    def make_tx(workers):
        return wire.parameter_server(
            "data", MOMENTUM, wire.server_clock(workers, mode="asynchronous")
        )

    params, half = make_params(), make_mesh(data=4)
    state = wire.init(make_tx(8), params, MESH)
    with pytest.raises(CommunicationError, match="different versions of the parameters"):
        wire.resplit(make_tx(4), state, params, half)
    assert jax.tree.leaves(wire.init(make_tx(4), jax.device_get(params), half))


@pytest.mark.system
@pytest.mark.parametrize("server", [LATE, {}], ids=["asynchronous", "synchronous"])
def test_gradients_of_bfloat16_arrive_and_integers_are_refused(server):
    clock = wire.server_clock(WORKERS, **server)
    tx = wire.parameter_server("data", optax.sgd(0.5), clock, wire.int8(block=16))

    def run(params):
        state = wire.init(tx, params, MESH)

        def update(grads, state):
            return tx.update(grads, state, params, events=clock.step_inputs(0))[0]

        mapped = jax.shard_map(
            update,
            mesh=MESH,
            in_specs=(jax.P(), wire.specs(state)),
            out_specs=jax.P(),
            check_vma=False,
        )
        return jax.jit(mapped)(jax.tree.map(jnp.ones_like, params), state)

    change = run({"w": jnp.zeros((64, 8), jnp.bfloat16)})["w"]
    assert (
        change.dtype == jnp.bfloat16 and float(change.max()) < 0 and (change == change[0, 0]).all()
    )
    with pytest.raises(CommunicationError, match=r"n is int32\[8\]: its mean is no int32"):
        run({"w": jnp.zeros((64, 8)), "n": jnp.arange(8)})


def test_an_optimizer_that_communicates_is_refused():
    tx = wire.parameter_server(
        "data", optax.chain(wire.all_reduce("data"), optax.sgd(0.1)), wire.server_clock(WORKERS)
    )
    with pytest.raises(CommunicationError, match="optimizer communicates itself"):
        wire.init(tx, make_params(), MESH)


@pytest.mark.parametrize("server", [LATE, {}], ids=["asynchronous", "synchronous"])
def test_gradients_that_are_summed_already_are_refused(server):
    clock, params = wire.server_clock(WORKERS, **server), {"w": jnp.ones((64, 8))}
    tx = wire.parameter_server("data", optax.sgd(0.5), clock)
    state = wire.init(tx, params, MESH)

    def update(params, state, x, events):
        grads = jax.grad(lambda params: jnp.sum(x @ params["w"]))(params)
        return jax.tree.map(
            lambda leaf: leaf[None], tx.update(grads, state, params, events=events)[0]
        )

    specs = (jax.P(), wire.specs(state), jax.P("data"), jax.P())
    run = jax.jit(
        jax.shard_map(update, mesh=MESH, in_specs=specs, out_specs=jax.P("data"), check_vma=True)
    )
    with pytest.raises(CommunicationError, match="w is equal on all workers"):
        run(params, state, jnp.ones((8, 64)), clock.step_inputs(0))
