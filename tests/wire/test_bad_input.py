"""What a stranger may hand to `spmd.wire`: it works exactly, or an error says what is wrong before
anything is compiled.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spmd import wire
from spmd.errors import CommunicationError, OptimizerError, OptionError, SpmdError
from tests.compare import assert_close
from tests.wire.test_transformations import (
    MESH,
    assert_same_bits,
    distance,
    make_mesh,
    make_params,
    pmean,
    train,
)

INT8 = wire.int8(block=16)
SGD = optax.sgd(0.1)
CLOCK = wire.server_clock(8)


def reduce(tx, grads, mesh=MESH, *, check_vma=False):
    """`tx.update` of each worker's own gradients, leaves [workers, ...]; the result of every
    worker, likewise.
    """

    def run(grads):
        own = jax.tree.map(lambda leaf: leaf[0], grads)
        means, _ = tx.update(own, tx.init(own), own)
        return jax.tree.map(lambda leaf: leaf[None], means)

    spec = jax.P(mesh.axis_names)
    return jax.jit(
        jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma)
    )(grads)


def normal(*shape, dtype=np.float32):
    return np.random.default_rng(0).normal(size=(8, *shape)).astype(dtype)


# options ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: wire.all_reduce("data", wire.int8), r"codec=Int8 is .*fix: wire\.int8\(\)"),
        (lambda: wire.all_reduce("data", "int8"), r"codec='int8' is a str.*fix: wire\.int8\(\)"),
        (lambda: wire.all_reduce("data", 3), "codec=3 is an int"),
        (
            lambda: wire.all_reduce("data", INT8, eror_feedback=True),
            'no option eror_feedback.*did you mean "error_feedback"',
        ),
        (lambda: wire.all_reduce("data", INT8, scatter=True), "no option scatter"),
        (lambda: wire.all_reduce("data", kodec=INT8), 'no option kodec.*did you mean "codec"'),
        (
            lambda: wire.zero1("data", SGD, maxnorm=1.0),
            'no option maxnorm.*did you mean "max_norm"',
        ),
        (
            lambda: wire.local_sgd("data", inner=SGD, outer=SGD, every=2, fragment=2),
            'no option fragment.*did you mean "fragments"',
        ),
        (
            lambda: wire.local_sgd("data", inner=SGD, outer=SGD, every=2, evry=2),
            'no option evry.*did you mean "every"',
        ),
        (
            lambda: wire.hierarchical(
                inside=("gpu", wire.exact()), across=("host", INT8), scater=True
            ),
            'did you mean "scatter"',
        ),
        (lambda: wire.parameter_server("data", SGD, CLOCK, kodec=INT8), 'did you mean "codec"'),
        (lambda: wire.all_reduce("data", INT8, error_feedback="yes"), "error_feedback='yes'"),
        (lambda: wire.all_reduce("data", codecs=[INT8]), "codecs=.*by a pattern"),
        (lambda: wire.all_reduce("data", codecs={"a{b": INT8}), "braces must close"),
        (lambda: wire.all_reduce("data", codecs={"**": wire.int8}), r'codecs\["\*\*"\]=Int8'),
        (lambda: wire.all_reduce(3), "axes=3"),
        (lambda: wire.all_reduce(None), "axes=None"),
        (lambda: wire.int8(blok=3), 'codec Int8: no option blok.*did you mean "block"'),
        (lambda: wire.int8(block="16"), "block='16'"),
        (lambda: wire.int8(block=True), "block=True"),
        (lambda: wire.bfloat16(reduce="rings"), "reduce='rings'"),
        (
            lambda: wire.hierarchical(inside=wire.exact(), across=("host", INT8)),
            "inside=.*axes and a codec",
        ),
        (
            lambda: wire.hierarchical(inside=("gpu", wire.exact), across=("host", INT8)),
            r"fix: wire\.exact\(\)",
        ),
        (lambda: wire.hierarchical(inside=("gpu", wire.exact()), across=("gpu", INT8)), "axes="),
        (
            lambda: wire.hierarchical(inside="gpu", across=("host", INT8)),
            r'inside=\("gpu", wire\.exact\(\)\)',
        ),
        (
            lambda: wire.hierarchical(
                inside=("gpu", wire.exact()), across=("host", INT8), scatter=1
            ),
            "scatter=1.*True or False",
        ),
        (
            lambda: wire.hierarchical(
                inside=("gpu", wire.exact()), across=("host", wire.bfloat16("ring"))
            ),
            "nothing would be exact inside",
        ),
        (
            lambda: wire.all_reduce("data", INT8, start_step=2**31),
            r"start_step=2147483648.*below 2\*\*31",
        ),
        (
            lambda: wire.bytes_sent(wire.all_reduce("data"), make_params(), "data=8"),
            "mesh='data=8' is a str",
        ),
        (lambda: wire.zero1("data", optax.adam), "inner=adam is a function"),
        (lambda: wire.zero1("data", SGD, max_norm=0), "max_norm=0"),
        (
            lambda: wire.local_sgd("data", inner=optax.adam, outer=SGD, every=2),
            "inner=adam is a function",
        ),
        (lambda: wire.local_sgd("data", inner=SGD, outer=None, every=2), "outer=None"),
        (lambda: wire.local_sgd("data", inner=SGD, outer=SGD, every=2.0), "every"),
        (lambda: wire.local_sgd("data", inner=SGD, outer=SGD, every=2, mix="half"), "mix='half'"),
        (lambda: wire.init(SGD, make_params(), "data=8"), "mesh='data=8' is a str"),
        (lambda: wire.init(wire.all_reduce, make_params(), MESH), "tx=all_reduce is a function"),
        (lambda: wire.specs(wire.all_reduce("data")), r"wire\.specs\(state\)"),
        (lambda: wire.bytes_sent(INT8, make_params(), MESH), "tx=.*optax transformation"),
    ],
)
def test_a_wrong_option_is_refused_where_it_is_written(make, said):
    with pytest.raises(SpmdError) as caught:
        make()
    assert re.search(said, str(caught.value).replace("\n", " ")), caught.value


def test_numpy_integers_are_options_as_python_ones():
    block = wire.int8(block=np.int64(16))
    assert block == INT8 and hash(block) == hash(INT8) and type(block.block) is int
    assert repr(wire.power_sgd(rank=np.int32(2))) == repr(wire.power_sgd(rank=2))
    wire.local_sgd(
        "data",
        inner=SGD,
        outer=SGD,
        every=np.int64(2),
        codec=block,
        start_step=np.int64(1),
        bucket_bytes=np.uint32(64),
    )
    for wrong in (np.int64(0), np.float64(16), np.bool_(True), np.array([16, 16])):
        with pytest.raises(OptionError, match="a whole number from 1"):
            wire.int8(block=wrong)


# axes ---------------------------------------------------------------------------------------------


def test_an_axis_that_the_mesh_lacks_is_named():
    with pytest.raises(
        CommunicationError, match=r'the mesh has no axis "dta"(.|\n)*did you mean "data"'
    ):
        wire.init(wire.all_reduce("dta"), make_params(), MESH)
    with pytest.raises(
        CommunicationError, match=r'"dta" is not a manual mesh axis here(.|\n)*did you mean "data"'
    ):
        reduce(wire.all_reduce("dta"), {"w": normal(4)})


SINGLE = [
    wire.all_reduce("data", INT8, error_feedback=True),
    wire.reduce_scatter("data", INT8),
    wire.hierarchical(inside=("data", wire.exact()), across=("host", INT8)),
    wire.zero1("data", optax.sgd(-1.0), INT8),
    wire.local_sgd("data", inner=optax.sgd(0.5), outer=optax.sgd(1.0), every=1, codec=INT8),
]


@pytest.mark.parametrize(
    "tx", SINGLE, ids=["all_reduce", "reduce_scatter", "hierarchical", "zero1", "local_sgd"]
)
@pytest.mark.filterwarnings("ignore:spmd.wire. one worker")
def test_an_axis_of_size_1_sends_nothing_and_changes_nothing(tx):
    mesh = make_mesh(host=1, data=1)
    grads = {"w": normal(64, 16)[:1]}
    means = reduce(tx, grads, mesh)
    expected = -0.5 * grads["w"] if tx is SINGLE[-1] else grads["w"]
    assert_close(means["w"], expected)
    assert wire.bytes_sent(tx, {"w": jnp.zeros((64, 16))}, mesh) == 0


@pytest.mark.system
def test_gather_along_an_axis_of_size_1_is_the_array_itself():
    mesh, x = make_mesh(data=1), jnp.arange(12.0).reshape(4, 3)
    run = jax.shard_map(
        jax.grad(lambda x: jnp.sum(wire.gather(x, "data", INT8) ** 2)),
        mesh=mesh,
        in_specs=jax.P(),
        out_specs=jax.P(),
        check_vma=False,
    )
    np.testing.assert_array_equal(run(x), 2 * x)


def test_where_the_mesh_lacks_an_axis_its_own_axes_are_named():
    tx = wire.all_reduce("dta", INT8, error_feedback=True)
    for use in (wire.init, wire.bytes_sent):
        with pytest.raises(
            CommunicationError, match=r'the mesh has no axis "dta"(.|\n)*did you mean "data"'
        ):
            use(tx, make_params(), MESH)
    with pytest.raises(CommunicationError, match='the mesh has no axis "dta"'):
        wire.resplit(tx, wire.init(tx, make_params(), make_mesh(dta=8)), make_params(), MESH)


def test_an_axis_that_is_not_manual_is_fixed_by_all_axes_that_the_error_names():
    mesh, tx = (
        make_mesh(host=2, gpu=4),
        wire.hierarchical(inside=("gpu", wire.exact()), across=("host", INT8)),
    )

    def run(names):
        params = make_params()
        update = lambda params: tx.update(params, tx.init(params))[0]  # noqa: E731
        mapped = jax.shard_map(
            update,
            mesh=mesh,
            in_specs=jax.P(),
            out_specs=jax.P(),
            axis_names=names,
            check_vma=False,
        )
        return jax.jit(mapped)(params)

    with pytest.raises(CommunicationError, match='"gpu" is not a manual mesh axis') as caught:
        run({"host"})
    named = re.search(r"axis_names=(\{.*?\})", str(caught.value))
    run(set(re.findall(r'"(\w+)"', named.group(1))))


# codecs by path -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda **options: wire.all_reduce("data", INT8, **options),
        lambda **options: wire.zero1("data", SGD, INT8, **options),
        lambda **options: wire.local_sgd(
            "data", inner=SGD, outer=SGD, every=2, codec=INT8, **options
        ),
        lambda **options: wire.parameter_server("data", SGD, CLOCK, INT8, **options),
    ],
    ids=["all_reduce", "zero1", "local_sgd", "parameter_server"],
)
def test_a_pattern_that_matches_no_parameter_is_refused(make):
    with pytest.raises(
        CommunicationError,
        match=r'the pattern "bais" matches no parameter(.|\n)*did you mean "bias"',
    ):
        wire.init(make(codecs={"bais": wire.exact()}), make_params(), MESH)
    with pytest.raises(CommunicationError, match=r"match one of: bias, down, up"):
        wire.init(make(codecs={"**/embedding/*": wire.exact()}), make_params(), MESH)
    wire.init(make(codecs={"bias": wire.exact()}), make_params(), MESH)


@pytest.mark.system
def test_in_a_part_of_a_partition_a_pattern_may_match_another_part():
    link = wire.all_reduce("data", INT8, codecs={"bias": wire.exact()})
    train(
        optax.partition(
            {"a": optax.chain(link, SGD), "b": optax.chain(link, optax.adam(1e-2))}, LABELS
        )
    )


def test_two_arrays_of_one_path_are_refused():
    with pytest.raises(CommunicationError, match="two arrays have the path a/b"):
        reduce(wire.all_reduce("data"), {"a/b": normal(3), "a": {"b": normal(3)}})


# gradients ----------------------------------------------------------------------------------------


@pytest.mark.sampled(quick=4)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "complex64"])
def test_exact_mean_of_any_float_is_pmean_in_its_own_dtype(dtype):
    grads = {"w": jnp.asarray(normal(8, 6)).astype(dtype)}
    ours, plain = reduce(wire.all_reduce("data"), grads), reduce(pmean("data"), grads)
    assert ours["w"].dtype == dtype
    np.testing.assert_array_equal(
        np.asarray(ours["w"]).view(np.uint8), np.asarray(plain["w"]).view(np.uint8)
    )


@pytest.mark.sampled(quick=2)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_codecs_take_narrow_floats_and_return_their_dtype(dtype):
    grads = {"w": jnp.asarray(normal(64, 16)).astype(dtype)}
    ours = reduce(wire.all_reduce("data", INT8, error_feedback=True), grads)["w"]
    assert ours.dtype == dtype
    true = np.asarray(grads["w"], np.float32).mean(0)
    assert 0 < np.abs(np.asarray(ours[0], np.float32) - true).max() < 0.05
    assert (np.asarray(ours) == np.asarray(ours[:1])).all()


def test_float64_is_exact_and_refused_by_codecs():
    with jax.enable_x64(True):
        grads = {"w": normal(64, 16, dtype=np.float64)}
        mean = reduce(wire.all_reduce("data"), grads)["w"]
        assert mean.dtype == jnp.float64
        np.testing.assert_allclose(mean[0], grads["w"].mean(0), atol=1e-15)
        with pytest.raises(
            CommunicationError,
            match=r"w is float64\[64, 16\], and codec int8 computes in "
            r"float32(.|\n)*wire.exact\(\)",
        ):
            reduce(wire.all_reduce("data", INT8), grads)
        mean = reduce(wire.all_reduce("data", INT8, codecs={"w": wire.exact()}), grads)["w"]
        np.testing.assert_allclose(mean[0], grads["w"].mean(0), atol=1e-15)


def test_complex_gradients_are_refused_by_codecs():
    with pytest.raises(CommunicationError, match=r"complex64.*computes in float32"):
        reduce(wire.all_reduce("data", INT8), {"w": normal(64, 16).astype(np.complex64)})


@pytest.mark.parametrize(
    "tx", [wire.all_reduce("data"), wire.reduce_scatter("data", INT8), wire.zero1("data", SGD)]
)
def test_integer_gradients_are_refused(tx):
    with pytest.raises(
        CommunicationError, match=r"n is int32\[3\]: its mean is no int32(.|\n)*optax.partition"
    ):
        reduce(tx, {"w": normal(4), "n": np.ones((8, 3), np.int32)})


def test_the_symbolic_zeros_of_integers_are_refused():
    def run(params):
        grads = jax.grad(lambda params: jnp.sum(params["w"] * params["n"]), allow_int=True)(params)
        tx = wire.all_reduce("data")
        return tx.update(grads, tx.init(params))[0]["w"]

    mapped = jax.shard_map(run, mesh=MESH, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
    with pytest.raises(CommunicationError, match="n is float0"):
        jax.jit(mapped)({"w": jnp.ones(3), "n": jnp.ones(3, jnp.int32)})


@pytest.mark.sampled(quick=5)
@pytest.mark.parametrize(
    "codec",
    [
        wire.exact(),
        INT8,
        wire.bfloat16(),
        wire.float8(block=16),
        wire.sign(block=16),
        wire.top_k(keep=0.2),
    ],
)
def test_a_nan_of_one_worker_reaches_all_and_leaves_no_trace_in_the_residuals(codec):
    tx = wire.all_reduce("data", codec, error_feedback=not codec.lossless)
    like = {"w": jnp.zeros((64, 16))}
    state = wire.init(tx, like, MESH)
    specs = wire.specs(state)
    run = jax.jit(
        jax.shard_map(
            lambda grads, state: (
                jax.tree.map(lambda leaf: leaf[None], tx.update({"w": grads[0]}, state)[0])
                | {"state": tx.update({"w": grads[0]}, state)[1]}
            ),
            mesh=MESH,
            in_specs=(jax.P("data"), specs),
            out_specs={"w": jax.P("data"), "state": specs},
            check_vma=False,
        )
    )
    spoilt = normal(64, 16)
    spoilt[3, 5, 7] = np.nan
    after = run(spoilt, state)
    assert all(np.isnan(worker).any() for worker in np.asarray(after["w"]))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(jax.device_get(after["state"])))
    assert np.isfinite(run(normal(64, 16), after["state"])["w"]).all()


@pytest.mark.parametrize(
    "tx",
    [
        wire.all_reduce("data", INT8, error_feedback=True),
        wire.reduce_scatter("data"),
        wire.zero1("data", optax.adam(0.1)),
        wire.local_sgd("data", inner=optax.adam(0.1), outer=SGD, every=1),
    ],
)
def test_an_empty_tree_has_an_empty_mean(tx):
    run = jax.shard_map(
        lambda x: (x, tx.update({}, tx.init({}), {})[0])[1],
        mesh=MESH,
        in_specs=jax.P(),
        out_specs=jax.P(),
        check_vma=False,
    )
    assert jax.jit(run)(jnp.zeros(1)) == {}
    assert wire.bytes_sent(tx, {}, MESH) == 0


def test_gather_of_a_python_number_names_its_dim():
    run = jax.shard_map(
        lambda x: wire.gather(1.0, "data") + x,
        mesh=MESH,
        in_specs=jax.P(),
        out_specs=jax.P(),
        check_vma=False,
    )
    with pytest.raises(CommunicationError, match=r"gather: dim=0 of a shard float64\[\]"):
        run(jnp.zeros(1))


def test_gather_of_an_empty_tree_is_empty():
    run = jax.shard_map(
        lambda x: (x, wire.gather({}, "data"))[1],
        mesh=MESH,
        in_specs=jax.P(),
        out_specs=jax.P(),
        check_vma=False,
    )
    assert run(jnp.zeros(1)) == {}


@pytest.mark.system
def test_arrays_without_elements_scalars_and_python_numbers_are_reduced():
    tx = wire.all_reduce("data", INT8, error_feedback=True)

    def run(x):  # jaxlib 0.11 crashes if an array without elements enters or leaves a region
        grads = {"none": jnp.zeros((0, 3)), "scalar": x[0], "python": 3.0}
        means = tx.update(grads, tx.init(grads))[0]
        assert means["none"].shape == (0, 3)
        return means["scalar"], means["python"]

    means = jax.shard_map(
        run, mesh=MESH, in_specs=jax.P("data"), out_specs=jax.P(), check_vma=False
    )(jnp.arange(8.0))
    assert jax.tree.map(float, means) == (3.5, 3.0)


ASYNCHRONOUS = wire.server_clock(8, mode="asynchronous", compute_time="constant")


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize(
    "tx, extra",
    [
        (wire.all_reduce("data"), {}),
        (wire.zero1("data", SGD), {}),
        (wire.local_sgd("data", inner=SGD, outer=SGD, every=1), {}),
        (wire.parameter_server("data", SGD, CLOCK), {"events": CLOCK.step_inputs(0)}),
        (wire.parameter_server("data", SGD, ASYNCHRONOUS), {"events": ASYNCHRONOUS.step_inputs(0)}),
    ],
    ids=["all_reduce", "zero1", "local_sgd", "synchronous", "asynchronous"],
)
def test_parameters_that_are_python_numbers_are_taken_as_arrays(tx, extra):
    def update(params):
        def run(state):
            grads = {"x": 3.0 * wire.local_params(state, params)["x"]}
            return tx.update(grads, state, params, **extra)[0]["x"]

        state = wire.init(tx, params, MESH)
        return jax.jit(
            jax.shard_map(
                run, mesh=MESH, in_specs=(wire.specs(state),), out_specs=jax.P(), check_vma=False
            )
        )(state)

    ours, arrays = update({"x": 1.0}), update({"x": jnp.float32(1.0)})
    assert ours == arrays != 0 and ours.dtype == arrays.dtype == jnp.float32
    assert wire.bytes_sent(tx, {"x": 1.0}, MESH, **extra) > 0


@pytest.mark.parametrize(
    "tx", [wire.zero1("data", SGD), wire.local_sgd("data", inner=SGD, outer=SGD, every=1)]
)
def test_params_are_asked_for_where_they_are_needed(tx):
    with pytest.raises(OptionError, match="without params"):
        tx.update(
            make_params(), tx.init(jax.device_put(make_params(), jax.NamedSharding(MESH, jax.P())))
        )


# states -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tx, said",
    [
        (wire.all_reduce("data"), "WireState"),
        (wire.zero1("data", SGD), "ZeroState"),
        (wire.local_sgd("data", inner=SGD, outer=SGD, every=2), "LocalState"),
    ],
)
def test_a_state_of_another_kind_is_refused(tx, said):
    for wrong in (optax.EmptyState(), wire.all_reduce("other").init({}), None):
        run = jax.shard_map(
            lambda x: tx.update(x, wrong, x)[0],
            mesh=MESH,
            in_specs=jax.P(),
            out_specs=jax.P(),
            check_vma=False,
        )
        with pytest.raises(CommunicationError, match=f"has a state {said}"):
            jax.jit(run)(make_params())


def test_the_state_of_another_codec_is_refused():
    options = {"error_feedback": True}
    state = wire.init(
        wire.all_reduce("data", wire.int8(), **options), {"w": jnp.zeros((64, 64))}, MESH
    )
    tx, specs = wire.all_reduce("data", wire.power_sgd(rank=2), **options), wire.specs(state)
    run = jax.shard_map(
        lambda g, s: tx.update(g, s)[0],
        mesh=MESH,
        in_specs=(jax.P(), specs),
        out_specs=jax.P(),
        check_vma=False,
    )
    with pytest.raises(
        CommunicationError, match=r"needs \{'q': 'float32\[64, 2\]'\} for w, and the state has none"
    ):
        jax.jit(run)({"w": jnp.zeros((64, 64))}, state)


# optax's wrappers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "before",
    [
        optax.trace(0.9),
        optax.adam(1e-2),
        optax.chain(optax.clip(1.0), optax.trace(0.9)),
        optax.apply_every(2),
    ],
    ids=["trace", "adam", "chain", "apply_every"],
)
def test_a_state_of_each_workers_own_before_the_communication_is_refused(before):
    with pytest.raises(
        CommunicationError, match=r"comes before a communication(.|\n)*the communication first"
    ):
        wire.init(optax.chain(before, wire.all_reduce("data")), make_params(), MESH)
    with pytest.raises(CommunicationError, match="comes before a communication"):
        wire.init(
            optax.chain(optax.chain(before), optax.chain(wire.zero1("data", SGD))),
            make_params(),
            MESH,
        )


@pytest.mark.system
def test_clipping_before_the_communication_clips_each_workers_own_gradients():
    for clip in (
        optax.clip(0.01),
        optax.clip_by_global_norm(0.1),
        optax.scale_by_schedule(lambda count: 1 / (count + 1)),
    ):
        ours, _ = train(optax.chain(clip, wire.all_reduce("data"), optax.adam(1e-2)))
        plain, _ = train(optax.chain(clip, pmean("data"), optax.adam(1e-2)))
        assert_same_bits(ours, plain)
    assert distance(ours, train(optax.chain(wire.all_reduce("data"), optax.adam(1e-2)))[0]) > 0


def test_a_state_before_the_communication_is_named_inside_chains():
    with pytest.raises(CommunicationError, match="ScaleByAdamState comes before"):
        wire.init(optax.chain(optax.adamw(1e-2), wire.all_reduce("data")), make_params(), MESH)


def test_steps_that_leave_the_communication_out_are_refused():
    with pytest.raises(
        CommunicationError,
        match=r"conditionally_transform around a communication(.|\n)*workers would diverge",
    ):
        wire.init(
            optax.conditionally_transform(wire.all_reduce("data"), lambda step: step % 2 == 0),
            make_params(),
            MESH,
        )


LABELS = {"up": "a", "bias": "b", "down": "b"}
MASK = {"up": True, "bias": False, "down": False}


@pytest.mark.parametrize(
    "tx",
    [
        optax.chain(optax.masked(wire.all_reduce("data"), MASK), SGD),
        optax.masked(wire.zero1("data", SGD), MASK),
        optax.masked(
            optax.partition({"a": wire.all_reduce("data"), "b": optax.set_to_zero()}, LABELS), MASK
        ),
        optax.partition(
            {"a": optax.masked(wire.all_reduce("data"), MASK), "b": optax.set_to_zero()}, LABELS
        ),
    ],
    ids=["chain", "zero1", "around partition", "inside partition"],
)
def test_a_mask_around_the_communication_is_refused(tx):
    with pytest.raises(
        CommunicationError,
        match=r"optax\.masked around a communication(.|\n)*would diverge(.|\n)*optax\.partition",
    ):
        wire.init(tx, make_params(), MESH)


@pytest.mark.system
def test_a_partition_can_leave_out_gradients_as_the_fix_for_a_mask_says():
    zero = optax.partition(
        {"a": wire.all_reduce("data", INT8, error_feedback=True), "b": optax.set_to_zero()}, LABELS
    )
    after, start = train(optax.chain(zero, SGD))[0], make_params()
    assert distance({"up": after["up"]}, {"up": start["up"]}) > 0
    assert_same_bits(
        {"bias": after["bias"], "down": after["down"]},
        {"bias": start["bias"], "down": start["down"]},
    )
    same = optax.partition({"a": wire.all_reduce("data"), "b": optax.identity()}, LABELS)
    # fused otherwise
    assert (
        distance(
            train(optax.chain(pmean("data"), same, SGD))[0],
            train(optax.chain(pmean("data"), SGD))[0],
        )
        < 1e-7
    )


@pytest.mark.system
def test_a_mask_behind_the_communication_works_as_with_pmean():
    masked = optax.masked(optax.adam(1e-2), MASK)
    assert_same_bits(
        train(optax.chain(wire.all_reduce("data"), masked))[0],
        train(optax.chain(pmean("data"), masked))[0],
    )
    assert (
        distance(train(wire.zero1("data", masked))[0], train(optax.chain(pmean("data"), masked))[0])
        < 1e-6
    )


WRAPPERS = {
    "named_chain": lambda comm: optax.named_chain(("mean", comm), ("adam", optax.adam(1e-2))),
    "flatten": lambda comm: optax.flatten(optax.chain(comm, optax.adam(1e-2))),
    "partition with frozen": lambda comm: optax.partition(
        {"a": optax.chain(comm, optax.adam(1e-2)), "b": optax.set_to_zero()}, LABELS
    ),
    "before partition": lambda comm: optax.chain(
        comm, optax.partition({"a": optax.adam(1e-2), "b": optax.sgd(0.1)}, LABELS)
    ),
    "inject inside MultiSteps": lambda comm: optax.chain(
        comm,
        optax.MultiSteps(optax.inject_hyperparams(optax.adam)(1e-2), 2).gradient_transformation(),
    ),
    "accumulate, skip": lambda comm: optax.chain(
        comm,
        optax.MultiSteps(
            optax.adam(1e-2), 2, should_skip_update_fn=optax.skip_not_finite
        ).gradient_transformation(),
    ),
    "schedule_free": lambda comm: optax.chain(comm, optax.contrib.schedule_free_sgd(0.1)),
    "conditionally_transform": lambda comm: optax.chain(
        comm, optax.conditionally_transform(optax.trace(0.9), lambda step: step > 1), SGD
    ),
    "add_noise": lambda comm: optax.chain(comm, optax.add_noise(0.1, 0.5, 0), optax.adam(1e-2)),
}


@pytest.mark.sampled(system=4)
@pytest.mark.parametrize("name", WRAPPERS)
def test_more_wrappers_of_optax_work_as_with_pmean(name):
    wrap = WRAPPERS[name]
    ours, _ = train(wrap(wire.all_reduce("data")))
    assert_same_bits(ours, train(wrap(pmean("data")))[0])
    lossy, state = train(wrap(wire.all_reduce("data", INT8, error_feedback=True)))
    assert 0 < distance(ours, lossy) < 0.1
    assert any(np.any(np.asarray(leaf)) for path, leaf in wire_leaves(state) if "residual" in path)


def wire_leaves(state):
    return [
        (jax.tree_util.keystr(keys), leaf)
        for keys, leaf in jax.tree_util.tree_leaves_with_path(state)
    ]


def test_hyperparameters_are_injected_into_the_factory_of_a_communication():
    def make(rate):
        return wire.zero1("data", optax.sgd(rate))

    ours, state = train(optax.inject_hyperparams(make)(rate=0.1))
    assert distance(ours, train(wire.zero1("data", optax.sgd(0.1)))[0]) < 1e-7
    assert_close(float(state.hyperparams["rate"]), 0.1)


@pytest.mark.system
@pytest.mark.parametrize(
    "inner",
    [
        optax.inject_hyperparams(optax.adamw)(1e-2),
        optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
        optax.partition({"a": optax.adam(1e-2), "b": optax.sgd(0.1)}, LABELS),
        optax.chain(optax.clip(0.05), optax.adam(1e-2)),
    ],
    ids=["inject_hyperparams", "MultiSteps", "partition", "clip"],
)
def test_wrappers_inside_zero1_and_local_sgd_equal_the_full_optimizer(inner):
    full, _ = train(optax.chain(wire.all_reduce("data"), inner))
    assert distance(train(wire.zero1("data", inner))[0], full) < 1e-6
    tx = wire.local_sgd("data", inner=inner, outer=optax.sgd(1.0), every=2)
    local, _ = train(tx, at=lambda state, params: wire.local_params(state, params))
    assert 0 < distance(local, full) < 0.5


@pytest.mark.system
def test_apply_if_finite_inside_zero1_is_refused_and_inside_local_sgd_skips():
    with pytest.raises(SpmdError, match="each worker has only its shard"):
        train(wire.zero1("data", optax.apply_if_finite(optax.adam(1e-2), 3)))
    tx = wire.local_sgd(
        "data", inner=optax.apply_if_finite(optax.adam(1e-2), 3), outer=optax.sgd(1.0), every=2
    )
    plain = wire.local_sgd("data", inner=optax.adam(1e-2), outer=optax.sgd(1.0), every=2)
    at = {"at": lambda state, params: wire.local_params(state, params)}
    assert distance(train(tx, **at)[0], train(plain, **at)[0]) < 1e-6


@pytest.mark.parametrize(
    "make",
    [
        lambda inner: wire.zero1("data", inner),
        lambda inner: wire.zero1("data", optax.partition({"a": inner, "b": SGD}, LABELS)),
    ],
    ids=["zero1", "partition"],
)
@pytest.mark.parametrize(
    "inner",
    [optax.noisy_sgd(0.1, key=0), optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), SGD)],
)
def test_noise_that_would_be_the_same_on_every_shard_is_refused(make, inner):
    with pytest.raises(
        OptimizerError,
        match=r"draws random numbers(.|\n)*every worker would draw the same(.|\n)*wire.all_reduce",
    ):
        train(make(inner))


@pytest.mark.parametrize(
    "make",
    [
        lambda comm: wire.zero1("data", comm),
        lambda comm: wire.local_sgd("data", inner=comm, outer=SGD, every=2),
        lambda comm: wire.local_sgd("data", inner=SGD, outer=comm, every=2),
    ],
    ids=["zero1", "inner", "outer"],
)
def test_a_communication_inside_another_is_refused(make):
    with pytest.raises(CommunicationError, match="communicates itself"):
        wire.init(make(optax.chain(wire.all_reduce("data"), SGD)), make_params(), MESH)


def test_a_nan_is_skipped_by_apply_if_finite_behind_the_communication():
    tx = optax.chain(
        wire.all_reduce("data", INT8, error_feedback=True), optax.apply_if_finite(SGD, 3)
    )
    params = {"w": jnp.ones((64, 16))}
    state = wire.init(tx, params, MESH)

    def step(params, state, grads):
        updates, state = tx.update({"w": grads[0]}, state, params)
        return optax.apply_updates(params, updates), state

    specs = (jax.P(), wire.specs(state))
    step = jax.jit(
        jax.shard_map(
            step, mesh=MESH, in_specs=(*specs, jax.P("data")), out_specs=specs, check_vma=False
        )
    )
    spoilt = normal(64, 16)
    spoilt[2, 0, 0] = np.nan
    skipped, state = step(params, state, spoilt)
    np.testing.assert_array_equal(skipped["w"], params["w"])
    after, state = step(skipped, state, normal(64, 16))
    assert (
        np.isfinite(after["w"]).all()
        and distance(after, params) > 0
        and int(state[1].total_notfinite) == 1
    )


@pytest.mark.system
def test_many_steps_in_a_scan_equal_single_steps():
    tx = optax.chain(wire.all_reduce("data", INT8, error_feedback=True), optax.adam(1e-2))
    params = make_params()
    state, grads = (
        wire.init(tx, params, MESH),
        {path: normal(5, *leaf.shape) for path, leaf in params.items()},
    )
    specs = (jax.P(), wire.specs(state))

    def step(carry, grads):
        params, state = carry
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    def scanned(params, state, grads):
        return jax.lax.scan(step, (params, state), jax.tree.map(lambda leaf: leaf[0], grads))[0]

    def single(params, state, grads):
        return step((params, state), jax.tree.map(lambda leaf: leaf[0], grads))[0]

    run, one = (
        jax.jit(
            jax.shard_map(
                f, mesh=MESH, in_specs=(*specs, jax.P("data")), out_specs=specs, check_vma=False
            )
        )
        for f in (scanned, single)
    )
    at_once, _ = run(params, state, grads)
    for number in range(5):
        params, state = one(
            params, state, jax.tree.map(lambda leaf, number=number: leaf[:, number], grads)
        )
    assert distance(jax.device_get(at_once), jax.device_get(params)) < 1e-6


def test_a_mesh_with_explicit_axes_works():
    mesh, tx = jax.make_mesh((8,), ("data",)), wire.all_reduce("data", INT8, error_feedback=True)
    means = []
    for one in (mesh, MESH):
        state = wire.init(tx, {"w": jnp.zeros((64, 16))}, one)
        specs = wire.specs(state)
        run = jax.shard_map(
            lambda grads, state: tx.update({"w": grads[0]}, state),
            mesh=one,
            in_specs=(jax.P("data"), specs),
            out_specs=(jax.P(), specs),
            check_vma=False,
        )
        means.append(
            jax.device_get(
                jax.jit(run)(
                    jax.device_put(normal(64, 16), jax.NamedSharding(one, jax.P("data"))), state
                )[0]
            )
        )
    assert_same_bits(*means)
