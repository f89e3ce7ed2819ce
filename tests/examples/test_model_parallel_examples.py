"""Examples whose layers are on different devices train, with the same losses as the unsharded
model.
"""

import importlib

import numpy as np
import pytest

from spmd.base.tree import flatten

pytestmark = pytest.mark.system

SMALL = {
    "rnn_wavefront": "--layers 4 --width 16 --length 24 --text 12000 --batch-size 32 --steps 8",
    "gpt_pipeline": "--depth 4 --width 16 --length 16 --text 12000 --batch-size 32 --steps 8",
    "gnmt": "--layers 2 --width 16 --batch-size 64 --steps 8",
}
SLOW = pytest.mark.slow
RUNS = [
    # a last chunk that is not full
    pytest.param("rnn_wavefront", "--layout pipeline --time-chunk 5", marks=SLOW),
    pytest.param("rnn_wavefront", "--layout fsdp_pipeline_tensor", marks=SLOW),
    pytest.param("gpt_pipeline", "--layout fsdp_pipeline_tensor --tied", marks=SLOW),
    ("gpt_pipeline", "--layout pipeline_1f1b --microbatches 8 --tied"),
    pytest.param("gpt_pipeline", "--layout fsdp_pipeline_tensor", marks=SLOW),
    pytest.param("gpt_pipeline", "--layout pipeline", marks=SLOW),
    pytest.param("gpt_pipeline", "--layout pipeline --groups 2 --mesh data=4,stage=2", marks=SLOW),
    pytest.param("gnmt", "--layout pipeline --mesh data=4,stage=2", marks=SLOW),
    pytest.param("gnmt", "--layout fsdp_pipeline_tensor", marks=SLOW),
]


def train(name, options):
    return importlib.import_module(f"examples.{name}").main(SMALL[name].split() + options.split())


@pytest.fixture(scope="module")
def losses():
    """Losses of the unsharded model, by example and by whether its head is tied; each is trained
    once.
    """
    kept = {}

    def make(name, *, tied):
        if (name, tied) not in kept:
            with pytest.MonkeyPatch.context() as patch:
                # the other arm decodes
                patch.setattr(
                    "examples.gnmt.greedy", lambda result, inputs: [""] * len(inputs["source"])
                )
                result = train(name, "--layout data_parallel" + " --tied" * tied)
            assert not result.trainer.schedules
            kept[name, tied] = np.asarray(result.history["loss"])
        return kept[name, tied]

    return make


@pytest.mark.parametrize("name, options", RUNS)
def test_losses_equal_those_of_the_unsharded_model(losses, name, options, capsys, tmp_path):
    drawing = tmp_path / "schedule.png"
    result = train(name, options + f" --draw {drawing}" * ("1f1b" in options))
    shown, loss = capsys.readouterr().out, np.asarray(result.history["loss"])
    assert len(loss) == 8 and loss[-1] < 0.97 * loss[0]
    # float32, summed in another order, through Adam
    np.testing.assert_allclose(loss, losses(name, tied="--tied" in options), rtol=1e-4)
    stages, params = result.trainer.mesh.shape["stage"], flatten(result.state.params)
    stacked = [
        leaf
        for path, leaf in params.items()
        if "/layers/" in path or ("/cells/" in path and "both_ways" not in path)
    ]
    assert stacked and all(
        leaf.addressable_shards[0].data.shape[0] * stages == len(leaf) for leaf in stacked
    )
    assert result.trainer.schedules and f"{stages} stages" in shown
    if name == "rnn_wavefront":
        assert "bits per byte" in shown and ("5 chunks of time" in shown) == (
            "--time-chunk 5" in options
        )
    if name == "gnmt":
        assert shown.count("hundred") >= 3 and "test exact" in shown
    if "1f1b" in options:
        assert drawing.read_bytes()[1:4] == b"PNG"


def test_numbers_in_words():
    from examples.number_words import BEGIN, WORDS, as_number, load_data

    train, test = load_data(2000)
    pairs = {}
    for part in train, test:
        inputs = part["inputs"]
        for source, length, digits in zip(
            inputs["source"], inputs["lengths"], part["targets"], strict=True
        ):
            assert (source[:length] > 0).all() and (source[length:] == 0).all()
            pairs[as_number(digits)] = " ".join(WORDS[word] for word in source[:length])
        assert (inputs["begun"][:, 0] == BEGIN).all() and (
            inputs["begun"][:, 1:] == part["targets"][:, :-1]
        ).all()
    assert len(pairs) == len(train["targets"]) + len(test["targets"]) > 1000, "no number is in both"
    assert (
        pairs["7"] == "seven" and pairs["40"] == "forty" and pairs["101"] == "one hundred and one"
    )
    assert len(set(pairs.values())) == len(pairs)
