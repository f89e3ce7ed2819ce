"""A codec written outside the package: registered, checked, named in a layout file, trained, planned and counted."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmd
from spmd import wire
from spmd.errors import CodecError, LayoutError, OptionError
from spmd.wire.codec import CODECS


@dataclasses.dataclass(frozen=True)
class Halved(wire.RowCodec):
    """Sixteen-bit floats, `shift` powers of two down."""

    shift: int = wire.option(0, lambda value: type(value) is int and value >= 0, "a whole number from 0")

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


@pytest.fixture
def registered():
    wire.register("halved")(Halved)
    yield
    del CODECS["halved"]


def test_registered_codec_is_trained_planned_and_counted_by_a_layout_file(registered, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('[gradients]\nreduction = "all_reduce"\ncodec = "halved"\nshift = 1\nerror_feedback = true\n')
    layout = spmd.Layout.load(path)
    model = spmd.FunctionalModel(lambda key: {"w": jnp.zeros((64, 8))}, lambda params, x: x @ params["w"])
    x = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    options = {"loss": spmd.losses.mean_squared_error, "optimizer": optax.sgd(0.1), "mesh": "data=8"}
    result = spmd.fit(model, (x, x[:, :8]), layout=layout, epochs=2, batch_size=64, **options)
    exact = spmd.fit(model, (x, x[:, :8]), layout="data_parallel", epochs=2, batch_size=64, **options)
    ours, theirs = (np.asarray(fitted.state.params["w"]) for fitted in (result, exact))
    assert 0 < np.abs(ours - theirs).max() < 1e-3
    sent = result.trainer.wire.bytes(where="reduce_gradients")
    tx = wire.all_reduce("data", Halved(shift=1), error_feedback=True)
    assert sent == wire.bytes_sent(tx, {"w": jnp.zeros((64, 8))}, spmd.make_mesh("data=8")) == 2 * 7 * 64 * 8 * 2 // 8


def test_options_of_a_registered_codec_are_checked_by_line(registered, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('[gradients]\nreduction = "all_reduce"\ncodec = "halved"\nshift = -1\n')
    with pytest.raises(LayoutError, match="a whole number from 0") as caught:
        spmd.Layout.load(path)
    assert caught.value.line == 4


def test_check_measures_a_codec_and_finds_a_bound_that_is_not_kept():
    assert 0 < wire.check(Halved())["error"] < Halved().error
    for codec in (wire.exact(), wire.int8(), wire.sign(), wire.top_k(), wire.power_sgd(), wire.bfloat16(reduce="ring")):
        assert wire.check(codec)["mean_error"] >= 0
    with pytest.raises(CodecError, match="`error` states at most"):
        wire.check(Lying())


def test_register_refuses_what_a_layout_file_could_not_name(registered):
    with pytest.raises(OptionError, match="the name is that of"):
        wire.register("int8")(Halved)
    with pytest.raises(OptionError, match="is no codec"):
        wire.register("x")(int)
    with pytest.raises(OptionError, match="can be changed"):
        wire.register("x")(dataclasses.make_dataclass("Loose", [], bases=(wire.RowCodec,)))
    assert "x" not in CODECS
    wire.register("halved")(Halved)  # again, as a notebook's cell does
