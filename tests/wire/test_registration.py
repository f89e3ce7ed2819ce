"""A codec and a reduction written outside the package: registered, checked, named in a layout file,
trained, planned and counted.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmd
from spmd import wire
from spmd.errors import CodecError, LayoutError, OptionError
from spmd.wire.codec import CODECS
from spmd.wire.reduction_registry import REDUCTIONS


@dataclasses.dataclass(frozen=True)
class Halved(wire.RowCodec):
    """Sixteen-bit floats, `shift` powers of two down."""

    shift: int = wire.option(
        0, lambda value: type(value) is int and value >= 0, "a whole number from 0"
    )

    @property
    def error(self):
        return 2.0**-10

    def encode(self, rows):
        return (rows / 2.0**self.shift).astype(jnp.float16)

    def decode(self, payload, width):
        return payload.astype(jnp.float32) * 2.0**self.shift


@dataclasses.dataclass(frozen=True)
class Lying(Halved):
    """States a bound that it does not keep."""

    @property
    def error(self):
        return 2.0**-20


@dataclasses.dataclass(frozen=True)
class NotANumber(Halved):
    """Decodes NaN of all but zeros."""

    def decode(self, payload, width):
        return jnp.where(payload == 0, 0.0, jnp.nan).astype(jnp.float32)


def ring(axes):
    """A ring all-reduce by hand: each worker's part of the sum goes around once, and then the
    complete parts do.
    """

    def all_reduce(grad, axis):
        count, here = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
        onward = [(i, (i + 1) % count) for i in range(count)]
        parts = jnp.pad(grad.reshape(-1), (0, -grad.size % count)).reshape(count, -1)
        part = parts[here]
        for hop in range(1, count):
            part = jax.lax.ppermute(part, axis, onward) + parts[(here - hop) % count]
        total = parts
        for hop in range(count):
            total = total.at[(here + 1 - hop) % count].set(part)
            part = jax.lax.ppermute(part, axis, onward) if hop < count - 1 else part
        return (total.reshape(-1)[: grad.size] / count).reshape(grad.shape)

    def update(grads, state, params=None):
        for axis in axes:
            grads = jax.tree.map(functools.partial(all_reduce, axis=axis), grads)
        return grads, state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def two_stages(axes, codec, codecs=None, error_feedback=False, start_step=0):
    """Exactly along the inner axes, with the codec along the outer one, and a trace as more
    state.
    """
    options = {"codecs": codecs, "error_feedback": error_feedback, "start_step": start_step}
    if len(axes) == 1:
        mean = wire.all_reduce(axes, codec, **options)
    else:
        mean = wire.hierarchical(
            inside=(axes[1:], wire.exact()), across=(axes[:1], codec), **options
        )
    return optax.chain(mean, optax.trace(0.0))


@pytest.fixture
def registered():
    wire.register("halved")(Halved)
    wire.register_reduction("ring")(ring)
    wire.register_reduction("two_stages")(two_stages)
    yield
    del CODECS["halved"], REDUCTIONS["ring"], REDUCTIONS["two_stages"]


MODEL = spmd.FunctionalModel(
    lambda key: {"w": jnp.full((64, 8), 0.1), "layer": {"v": jnp.eye(8)}},
    lambda params, x: x @ params["w"] @ params["layer"]["v"],
)
X = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
OPTIONS = {"loss": spmd.losses.mean_squared_error, "optimizer": optax.sgd(0.1), "mesh": "data=8"}


def write_layout(tmp_path, text):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return str(path)


def fit(layout, **options):
    return spmd.fit(
        MODEL, (X, X[:, :8]), layout=layout, **{"epochs": 4, "batch_size": 64, **OPTIONS, **options}
    )


def params_of(result):
    return np.concatenate(
        [np.asarray(leaf).ravel() for leaf in jax.tree.leaves(result.state.params)]
    )


def test_registered_codec_is_trained_planned_and_counted_by_a_layout_file(registered, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        '[gradients]\nreduction = "all_reduce"\ncodec = "halved"\nshift = 1\nerror_feedback = '
        "true\n"
    )
    layout = spmd.Layout.load(path)
    model = spmd.FunctionalModel(
        lambda key: {"w": jnp.zeros((64, 8))}, lambda params, x: x @ params["w"]
    )
    x = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    options = {
        "loss": spmd.losses.mean_squared_error,
        "optimizer": optax.sgd(0.1),
        "mesh": "data=8",
    }
    result = spmd.fit(model, (x, x[:, :8]), layout=layout, epochs=2, batch_size=64, **options)
    exact = spmd.fit(
        model, (x, x[:, :8]), layout="data_parallel", epochs=2, batch_size=64, **options
    )
    ours, theirs = (np.asarray(fitted.state.params["w"]) for fitted in (result, exact))
    assert 0 < np.abs(ours - theirs).max() < 1e-3
    sent = result.trainer.wire.bytes(where="reduce_gradients")
    tx = wire.all_reduce("data", Halved(shift=1), error_feedback=True)
    assert (
        sent
        == wire.bytes_sent(tx, {"w": jnp.zeros((64, 8))}, spmd.make_mesh("data=8"))
        == 2 * 7 * 64 * 8 * 2 // 8
    )


@pytest.mark.system
def test_registered_codec_is_planned_with_its_bytes(registered, tmp_path):
    layout = write_layout(tmp_path, '[gradients]\nreduction = "all_reduce"\ncodec = "halved"\n')
    plan = spmd.plan(MODEL, (X, X[:, :8]), layout=layout, target="8xcpu", **OPTIONS)
    result = fit(layout, epochs=1)
    assert plan.requested_bytes == result.trainer.wire.bytes() and "halved" in str(plan)


def test_options_of_a_registered_codec_are_checked_by_line(registered, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('[gradients]\nreduction = "all_reduce"\ncodec = "halved"\nshift = -1\n')
    with pytest.raises(LayoutError, match="a whole number from 0") as caught:
        spmd.Layout.load(path)
    assert caught.value.line == 4


@pytest.mark.system
def test_check_measures_a_codec_and_finds_a_bound_that_is_not_kept():
    assert 0 < wire.check(Halved())["error"] < Halved().error
    for codec in (
        wire.exact(),
        wire.int8(),
        wire.sign(),
        wire.top_k(),
        wire.power_sgd(),
        wire.bfloat16(reduce="ring"),
    ):
        assert wire.check(codec)["mean_error"] >= 0
    with pytest.raises(CodecError, match="`error` states at most"):
        wire.check(Lying())


def test_check_finds_a_codec_that_decodes_nan():
    with pytest.raises(CodecError, match="loses nan of a row's norm"):
        wire.check(NotANumber())


@dataclasses.dataclass(frozen=True)
class WrongDtype(Halved):
    def decode(self, payload, width):
        return super().decode(payload, width).astype(jnp.float16)


@dataclasses.dataclass(frozen=True)
class NoRows(Halved):
    def encode(self, rows):
        return {"sum": rows.sum()}


@pytest.mark.parametrize(
    "codec, said",
    [
        (WrongDtype(), r"decode returns float16\[4, 32\] for rows float32\[4, 32\]"),
        (
            NoRows(),
            r"encode of float32\[4, 32\] returns float32\[\]; dim 0 must have an entry for each "
            r"row",
        ),
    ],
    ids=["dtype", "rows"],
)
def test_what_encode_and_decode_return_is_checked_before_they_are_used(codec, said):
    with pytest.raises(CodecError, match=said):
        wire.check(codec)
    with pytest.raises(CodecError, match=r"wire.check\(codec\)"):
        wire.bytes_sent(
            wire.all_reduce("data", codec), {"w": jnp.zeros((64, 8))}, spmd.make_mesh("data=8")
        )


def test_register_names_the_members_that_are_missing():
    with pytest.raises(OptionError, match="Loose lacks decode, encode, error"):
        wire.register("x")(
            dataclasses.make_dataclass("Loose", [], bases=(wire.RowCodec,), frozen=True)
        )
    assert "x" not in CODECS


def test_check_refuses_a_codec_without_the_decorator_of_a_dataclass():
    class Plain(wire.RowCodec):
        error = 0.0

        def encode(self, rows):
            return rows

        def decode(self, payload, width):
            return payload

    with pytest.raises(OptionError, match="a Plain is no codec") as raised:
        wire.check(Plain())
    assert "frozen dataclass" in raised.value.fix


def test_register_refuses_what_a_layout_file_could_not_name(registered):
    with pytest.raises(OptionError, match="the name is that of"):
        wire.register("int8")(Halved)
    with pytest.raises(OptionError, match="is no codec"):
        wire.register("x")(int)
    with pytest.raises(OptionError, match="can be changed"):
        wire.register("x")(dataclasses.make_dataclass("Loose", [], bases=(wire.RowCodec,)))
    assert "x" not in CODECS
    wire.register("halved")(Halved)  # again, as a notebook's cell does


# reductions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["halved", Halved])
def test_registered_codec_by_its_name_or_class_has_a_fix_that_runs(registered, codec):
    with pytest.raises(OptionError) as raised:
        wire.all_reduce("data", codec)
    assert raised.value.fix == "Halved()."
    wire.all_reduce("data", Halved())


@pytest.mark.system
def test_registered_reduction_is_trained_planned_and_counted_by_a_layout_file(registered, tmp_path):
    layout = write_layout(tmp_path, '[gradients]\nreduction = "ring"\n')
    result, usual = fit(layout), fit("data_parallel")
    np.testing.assert_allclose(params_of(result), params_of(usual), atol=1e-6)
    assert result.history["loss"][-1] < result.history["loss"][0]
    kinds = {
        op.kind for op in result.trainer.wire.ops if op.where.startswith("reduce_gradients/ring")
    }
    sent = result.trainer.wire.bytes(where="reduce_gradients")
    assert kinds == {"collective_permute"} and sent == 2 * 7 * (64 * 8 + 8 * 8) * 4 // 8
    assert sent == wire.bytes_sent(
        ring(("data",)), {"w": jnp.zeros((64, 8)), "v": jnp.eye(8)}, spmd.make_mesh("data=8")
    )
    plan = spmd.plan(MODEL, (X, X[:, :8]), layout=layout, target="8xcpu", **OPTIONS)
    assert plan.requested_bytes == result.trainer.wire.bytes() and "ring" in str(plan)
    assert any("test_registration.ring" in note for note in result.trainer.notes())
    shards = [np.asarray(shard.data) for shard in result.state.params["w"].addressable_shards]
    assert all((shard == shards[0]).all() for shard in shards)
    assert not result.state.exchange


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("mesh", ["data=8", "node=2,data=4", "data=4,model=2"])
def test_registered_reduction_has_the_options_of_the_layout_and_its_own_state(
    mesh, registered, tmp_path
):
    axes = ("node", "data") if mesh.startswith("node") else ("data",)
    batch = f"[batch]\nspec = [{list(axes)}]\n" if len(axes) > 1 else ""
    text = (
        f'{batch}[gradients]\nreduction = "two_stages"\ncodec = "int8"\nblock = 16\nerror_feedback '
        "= true\n"
    )
    text += '[[gradients.rules]]\npath = "layer/*"\ncodec = "exact"\n'
    if "model" in mesh:  # shards the targets alone
        text += '[[batch.rules]]\npath = "1"\nspec = ["data", "model"]\n'
    result = fit(write_layout(tmp_path, text.replace("'", '"')), mesh=mesh)
    state = result.state.exchange["two_stages"]
    workers = 4 if mesh.endswith("model=2") else 8
    assert set(state) == {"0/step", "0/memory/w/residual", "1/trace/w", "1/trace/layer/v"}
    assert state["0/memory/w/residual"].shape == (workers, 64, 8) and np.any(
        np.asarray(state["0/memory/w/residual"])
    )
    assert (
        state["0/memory/w/residual"].addressable_shards[0].data.shape == (1, 64, 8)
        and int(state["0/step"]) == 4
    )
    usual = fit("data_parallel")
    assert 0 < np.abs(params_of(result) - params_of(usual)).max() < 1e-2


@pytest.mark.system
def test_state_of_a_registered_reduction_is_saved_and_restored(registered, tmp_path):
    layout = write_layout(
        tmp_path,
        '[gradients]\nreduction = "two_stages"\ncodec = "int8"\nblock = 16\nerror_feedback = '
        "true\n",
    )
    uninterrupted = fit(layout)
    fit(layout, epochs=2, checkpoint=tmp_path / "run")
    resumed = fit(layout, checkpoint=tmp_path / "run", resume=True)
    before, after = (
        jax.tree.map(np.asarray, result.state.exchange) for result in (uninterrupted, resumed)
    )
    assert np.any(before["two_stages"]["0/memory/w/residual"])
    jax.tree.map(np.testing.assert_array_equal, before, after)
    np.testing.assert_array_equal(params_of(uninterrupted), params_of(resumed))


@pytest.mark.system
def test_residuals_of_a_registered_reduction_are_resplit_over_fewer_workers(registered, tmp_path):
    layout = write_layout(
        tmp_path,
        '[gradients]\nreduction = "two_stages"\ncodec = "int8"\nblock = 16\nerror_feedback = '
        "true\n",
    )
    fit(layout, epochs=2, checkpoint=tmp_path / "run")
    fewer = fit(
        layout,
        epochs=3,
        checkpoint=tmp_path / "run",
        resume=True,
        mesh=spmd.make_mesh("data=4", devices=jax.devices()[:4]),
    )
    assert fewer.state.exchange["two_stages"]["0/memory/w/residual"].shape == (4, 64, 8)
    assert int(fewer.state.exchange["two_stages"]["0/step"]) == 3


def test_a_layout_that_a_registered_reduction_does_not_read_is_refused_by_line(
    registered, tmp_path
):
    text = (
        '[gradients]\nreduction = "ring"\nerror_feedback = true\ncodec = "int8"\n'
        '[[gradients.rules]]\npath = "w"\ncodec = "sign"\n'
    )
    with pytest.raises(LayoutError) as caught:
        spmd.Layout.load(write_layout(tmp_path, text))
    assert [problem.line for problem in caught.value.problems] == [3, 4, 5], caught.value
    assert all("does not read it" in problem.why[0] for problem in caught.value.problems)
    with pytest.raises(LayoutError, match="start_step"):
        spmd.Layout.load(
            write_layout(tmp_path, '[gradients]\nreduction = "ring"\nstart_step = 3\n')
        )
    with pytest.raises(LayoutError, match="diagnostics"):
        spmd.Layout.load(
            write_layout(
                tmp_path,
                '[gradients]\nreduction = "two_stages"\ncodec = "int8"\ndiagnostics = true\n',
            )
        )


@pytest.mark.parametrize(
    "rule, said",
    [
        ('[[params]]\npath = "w"\nspec = ["-", "model"]\n', "remove the rule"),
        ('[default]\nparams = "shard:data"\n', '[default] params = "replicate"'),
    ],
)
def test_a_registered_reduction_refuses_sharded_parameters(rule, said, registered, tmp_path):
    layout = write_layout(tmp_path, '[gradients]\nreduction = "ring"\n' + rule)
    with pytest.raises(LayoutError, match="is given full gradients") as caught:
        fit(layout, mesh="data=4,model=2" if "model" in rule else "data=8")
    assert said in str(caught.value)


def test_unknown_names_say_how_to_register(registered, tmp_path):
    with pytest.raises(
        LayoutError, match=r'did you mean "ring"\?.*two_stages.*@wire.register_reduction\("rign"\)'
    ) as caught:
        spmd.Layout.load(write_layout(tmp_path, '[gradients]\nreduction = "rign"\n'))
    assert caught.value.line == 2
    with pytest.raises(LayoutError, match=r'did you mean "halved"\?.*@wire.register\("havled"\)'):
        spmd.Layout.load(
            write_layout(tmp_path, '[gradients]\nreduction = "all_reduce"\ncodec = "havled"\n')
        )


def returning(update):
    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


@pytest.mark.parametrize(
    "function, said",
    [
        (lambda axes: None, "not an optax transformation"),
        (
            lambda axes: returning(lambda grads, state, params=None: (list(grads.values()), state)),
            "come out",
        ),
        (
            lambda axes: returning(
                lambda grads, state, params=None: ({p: g[0] for p, g in grads.items()}, state)
            ),
            "when it is returned",
        ),
        (
            lambda axes: returning(
                lambda grads, state, params=None: (grads, {"more": jnp.zeros(2)})
            ),
            "arrays? of the state",
        ),
        (lambda axes: optax.apply_if_finite(wire.all_reduce(axes), 3), "before they are reduced"),
    ],
    ids=["no transformation", "another tree", "another shape", "another state", "decides alone"],
)
def test_a_reduction_that_returns_something_else_is_refused(function, said):
    wire.register_reduction("wrong")(function)
    try:
        with pytest.raises(spmd.SpmdError, match=said):
            fit(spmd.Layout(gradients=spmd.Gradients("wrong")))
    finally:
        del REDUCTIONS["wrong"]


def test_register_reduction_refuses_what_a_layout_file_could_not_use(registered):
    for wrong, said in [
        (3, "is no function"),
        (lambda: None, "takes no axes"),
        (lambda axes, codek: None, 'did you mean "codec"'),
        (lambda axes, **options: None, "hides which options"),
    ]:
        with pytest.raises(OptionError, match=said):
            wire.register_reduction("wrong")(wrong)
    with pytest.raises(OptionError, match="the library's own"):
        wire.register_reduction("all_reduce")(ring)
    with pytest.raises(OptionError, match=r"test_registration\.ring"):
        wire.register_reduction("ring")(two_stages)
    for decorator, without_name in ((wire.register, Halved), (wire.register_reduction, ring)):
        with pytest.raises(OptionError, match="the name is"):
            decorator(without_name)
    assert "wrong" not in REDUCTIONS
    wire.register_reduction("ring")(ring)  # again, as a notebook's cell does
