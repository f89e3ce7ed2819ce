"""The `[train]` table and `[[adapters]]` rules: from the file to the model, and what is wrong with
them.
"""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import spmd
from spmd import Adapter, Train
from spmd.errors import LayoutError, ModelError, OptionError
from spmd.launch.cli import main
from spmd.layout.toml_reader import loads
from spmd.layout.toml_writer import dumps
from tests.compare import assert_close

X = np.zeros((8, 16), np.float32)
ALL = Train()


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(4, 16, rngs=rngs)
        self.body, self.head = nnx.Linear(16, 16, rngs=rngs), nnx.Linear(16, 10, rngs=rngs)

    def __call__(self, x):
        return self.head(self.body(x) + self.embed(jnp.zeros(len(x), jnp.int32)))


def make_net():
    return Net()


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(4, name="head")(linen.Dense(16, name="body")(x))


def trainer_of(train=ALL, adapters=(), model=lambda: Net(), mesh="data=8", **layout):
    layout = spmd.Layout(train=train, adapters=adapters, source="mine.toml", **layout)
    return spmd.Trainer(
        model,
        loss=lambda model, batch: model(batch).mean(-1),
        optimizer=optax.sgd(0.1),
        mesh=mesh,
        layout=layout,
    )


def test_round_trip():
    adapters = (
        Adapter(
            "**/{query,value}", rank=4, alpha=8.0, dropout=0.1, rslora=True, except_=("a", "b")
        ),
        Adapter("head"),
    )
    layout = spmd.Layout(train=Train(("head/**",), ("**/bias",), "nf4", 32), adapters=adapters)
    assert loads(dumps(layout)) == layout != spmd.Layout()
    assert (
        '[train]\ninclude = ["head/**"]\nexclude = ["**/bias"]\nfrozen = "nf4"\nblock = 32'
        in dumps(layout)
    )
    assert '[[adapters]]\nmodules = "head"' in dumps(layout)
    assert loads('[train]\ninclude = "head/**"').train == Train("head/**")
    shown = layout._repr_html_()
    assert "adapter" in shown and "rank 4, scale 4" in shown and "include head/**" in shown


def test_what_cannot_be_read(golden):
    text = (
        '[train]\ninclude = ["{head"]\nexclud = "x"\nfrozen = "int4"\nblock = 0\n\n[[adapters]]\n'
        "rank = 0\n\n"
        '[[adapters]]\nmodules = "a"\nalpah = 3\nalpha = 0\ndropout = 1\nrslora = 3\n'
    )
    with pytest.raises(LayoutError) as caught:
        loads(text, "mine.toml")
    golden("trained_that_cannot_be_read", str(caught.value))
    with pytest.raises(LayoutError) as caught:
        loads('[train]\nexclude = "a"\nblock = 32\n\n[[adapters]]\nmodules = "a"\n', "mine.toml")
    golden("trained_keys_that_nothing_reads", str(caught.value))


def test_options_in_python():
    for make in (
        lambda: Train(frozen="int4"),
        lambda: Train(block=0),
        lambda: Adapter("a", rank=0),
        lambda: Adapter("a", dropout=1.0),
    ):
        with pytest.raises(OptionError):
            make()


MISFITS = {
    "include of nothing": {"train": Train("haed/**")},
    "exclude of nothing": {"train": Train(exclude=("**/kernl", "body/**"))},
    "nothing left": {"train": Train(exclude="**")},
    "nothing frozen": {"train": Train(frozen="bfloat16")},
    "no kernel to quantize": {"train": Train(include="{body,head}/**", frozen="int8", block=4)},
    "no matrix": {"train": Train(exclude="**/bias", frozen="bfloat16")},
    "blocks": {"train": Train(include="head/**", frozen="nf4", block=24)},
    "adapters on nothing": {
        "adapters": (
            Adapter("bodi"),
            Adapter("embed"),
            Adapter("head/kernel"),
            Adapter("head", rank=11),
        )
    },
    "adapters of linen": {"adapters": (Adapter("head"),), "model": LinenNet()},
}


@pytest.mark.parametrize("case", MISFITS)
def test_misfits(case, golden):
    with pytest.raises((LayoutError, ModelError)) as caught:
        trainer_of(**MISFITS[case]).prepare(X)
    golden(f"trained_{case.replace(' ', '_')}", str(caught.value))


def test_summary_and_plan_name_what_is_frozen(golden):
    trainer = trainer_of(
        Train(frozen="int8", block=16),
        (Adapter("body", rank=2),),
        default=spmd.Default("shard:data"),
    )
    golden("trained_summary", str(trainer.summary()))


def test_command_checks_what_trains(tmp_path, capsys):
    layout = spmd.Layout(train=Train(frozen="int8", block=16), adapters=(Adapter("body", rank=2),))
    (tmp_path / "lora.toml").write_text(layout.to_toml())
    arguments = [
        "layouts",
        "check",
        str(tmp_path / "lora.toml"),
        "--model",
        "tests.layout.test_trained:make_net",
        "--mesh",
        "data=8",
    ]
    assert main(arguments) == 0
    assert "body/kernel/codes   int8[16, 16]" in capsys.readouterr().out


@pytest.mark.system
def test_frozen_parameters_of_linen_and_of_functions():
    trainer = trainer_of(Train("head/**"), model=LinenNet())
    state = trainer.init(X)
    before = np.asarray(state.frozen["body"]["kernel"])
    state, _ = trainer.step(state, X)
    assert state.params["body"]["kernel"] is None and np.array_equal(
        state.frozen["body"]["kernel"], before
    )
    assert_close(trainer.rebuild(state)(X), trainer.predict(state, X))
    model = spmd.FunctionalModel(
        lambda key: [jnp.ones((16, 2)), jnp.ones(2)], lambda params, x: x @ params[0] + params[1]
    )
    trainer = trainer_of(Train("1"), model=model)
    state, _ = trainer.step(trainer.init(), X)
    assert (
        state.params[0] is None
        and state.frozen[1] is None
        and np.array_equal(state.frozen[0], np.ones((16, 2)))
    )
