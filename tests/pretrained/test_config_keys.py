"""Every key that transformers knows of a family, changed: an error, another model, a note, or it is
on the reviewed list of this file.
"""

import json
from pathlib import Path

import pytest

from spmd.errors import PretrainedError
from spmd.pretrained.architectures import find

FIXTURES = Path(__file__).parent / "fixtures"
# by family, the keys of transformers' config class and their defaults
KNOWN = json.loads((FIXTURES / "config_keys.json").read_text())
OLDER = {
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "torch_dtype": "float32",
    "attn_implementation": None,
}
FOLDERS = {
    "llama": ("llama", "llama2"),
    "gemma3_text": ("gemma3",),
    "bert": ("bert_classes", "bert_features", "bert_masked"),
}
SIZES = {
    **{
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    },
    "num_key_value_heads": 2,
}
OLD_GEMMA3 = {
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "sliding_window_pattern": 2,
    "sliding_window": 5,
    "query_pre_attn_scalar": 24,
}
MORE = {  # other files of a family: where keys count that do not in the others
    "qwen2": [
        {
            **SIZES,
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 1,
            "rope_theta": 1e6,
        }
    ],
    "qwen3": [
        {
            **SIZES,
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 1,
            "rope_theta": 1e6,
        }
    ],
    "gemma2": [
        {
            **SIZES,
            "sliding_window": 5,
            "rope_theta": 1e4,
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        }
    ],
    "gemma3_text": [{**SIZES, **OLD_GEMMA3}],
    "llama": [{**SIZES, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}],
}
# of a GPT-2's
NOT_IN_FILES = {
    "base_model_tp_plan",
    "hidden_size",
    "num_attention_heads",
    "num_hidden_layers",
    "max_position_embeddings",
}

# Keys that change no result of the forward pass, each with the reason.
REVIEWED = {
    "_name_or_path": "where the file is from",
    "transformers_version": "who wrote the file",
    "architectures": "an empty list is none; others are compared with model_type",
    "dtype": "of the files, whose headers say it; load(dtype=) chooses",
    "torch_dtype": "the older name of dtype",
    "attn_implementation": "which code computes attention; the layout chooses here",
    "use_cache": "what transformers' code keeps between calls",
    "return_dict": "what transformers' code returns",
    "output_attentions": "what transformers' code returns",
    "output_hidden_states": "what transformers' code returns",
    "initializer_range": "of random weights, and all are in the files",
    "chunk_size_feed_forward": "in how many parts the MLP is computed; the sum is the same",
    "pretraining_tp": "in how many parts products are computed; the sum is the same",
    "reorder_and_upcast_attn": "scores in float32, as they are here",
    "bos_token_id": "a token's id; prompts are given",
    "eos_token_id": "a token's id; spmd.data.Prompts and spmd generate read it, and refuse one "
    "outside the "
    "vocabulary",
    "pad_token_id": "a token's id; its row of the table is one as others",
    "id2label": "names of classes: their number is read of an encoder, and a decoder has none",
    "label2id": "id2label the other way round",
    "problem_type": "which loss transformers computes",
    "summary_activation": "of GPT-2's head for several choices",
    "summary_first_dropout": "of GPT-2's head for several choices",
    "summary_proj_to_labels": "of GPT-2's head for several choices",
    "summary_type": "of GPT-2's head for several choices",
    "summary_use_proj": "of GPT-2's head for several choices",
    "_sliding_window_pattern": "transformers writes it beside layer_types, and does not read it",
}
# Values or files with which a key counts for nothing, as in transformers, though it does with
# others.
CONDITIONAL = {
    "classifier_dropout": "False is none",
    "rope_scaling": "False is none",
    "use_bidirectional_attention": "False and null are none",
    "max_window_layers": "without use_sliding_window, or with layer_types",
    "sliding_window": "without use_sliding_window",
    "use_sliding_window": "with layer_types that name no window",
    "tie_word_embeddings": "of an encoder without a head of masked tokens",
}


def model_of(config):
    """All that is made of a config; None where it is refused."""
    try:
        found = find(config)
    except PretrainedError:
        return None
    return found.factory.args, found.name_map, found.notes


def files_of(kind):
    """The config.json files of a family: those of the fixtures, transformers' defaults, and
    others.
    """
    yield from (
        json.loads((FIXTURES / name / "config.json").read_text())
        for name in FOLDERS.get(kind, (kind,))
    )
    left_out = NOT_IN_FILES if kind == "gpt2" else {"base_model_tp_plan"}
    yield {
        **{
            key: value
            for key, value in KNOWN[kind].items()
            if value is not None and key not in left_out
        },
        "model_type": kind,
    }
    yield from ({"model_type": kind, **more} for more in MORE.get(kind, []))


def others(value):
    """Values other than this one, of its type and of other types."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, 2 * value + 2, 0, -1, "x"]
    if isinstance(value, float):
        return [2 * value + 0.1, -1.0, "x"]
    if isinstance(value, str):
        return [value + "x", "x", 1]
    if isinstance(value, list):
        return [value[:-1], [*value, "x"], ["x"] * len(value)]
    if isinstance(value, dict):
        return [{"x": 1}, {**value, "x": 1}]
    return [1, 3, 0.5, True, False, "x", {"x": 1}, ["x"]]


@pytest.mark.parametrize("kind", KNOWN)
def test_every_known_key_is_read_or_refused_or_reviewed(kind):
    unread, read = {}, set()
    for number, config in enumerate(files_of(kind)):
        assert model_of(config) is not None, f"file {number} of {kind} is one that is read"
        for key in {*KNOWN[kind], *config, *OLDER}:
            value = config.get(key, KNOWN[kind].get(key, OLDER.get(key)))
            without = [
                other
                for other in others(value)
                if other != value and model_of({**config, key: other}) == model_of(config)
            ]
            unread.setdefault(key, []).extend(without)
            read |= set() if without else {key}
    unread = {key: values for key, values in unread.items() if values and key not in REVIEWED}
    assert unread.keys() <= CONDITIONAL.keys(), unread
    never = unread.keys() - read
    assert never <= {"classifier_dropout", "rope_scaling", "use_bidirectional_attention"}, (
        f"no file of {kind} shows that these are read"
    )
    if "rope_scaling" in unread:
        assert set(map(str, unread["rope_scaling"])) == {"False"}


def test_lists_hold_nothing_that_is_read():
    known = {key for keys in KNOWN.values() for key in keys} | set(OLDER)
    assert {*REVIEWED, *CONDITIONAL} <= known and not REVIEWED.keys() & CONDITIONAL.keys()
    for key in REVIEWED.keys() - {"architectures"}:
        config = {"model_type": "llama", **SIZES}
        assert model_of({**config, key: "x"}) == model_of(config), key


@pytest.mark.parametrize(
    ("kind", "more", "message"),
    [
        (
            "llama",
            {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            "rope_parameters says 10000.0",
        ),
        (
            "llama",
            {
                "rope_scaling": "linear",
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            },
            "rope_scaling = 'linear': wanted a table",
        ),
        (
            "gemma3_text",
            {
                "rope_local_base_freq": 5.0,
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}
                },
            },
            "rope_parameters says 10000.0, and transformers lets that one win: wanted one of them",
        ),
        (
            "gemma3_text",
            {"rope_parameters": {"sliding_attention": "default"}},
            "wanted full_attention and sliding_attention, a table each",
        ),
    ],
)
def test_bases_of_positions_that_contradict_each_other(kind, more, message):
    with pytest.raises(PretrainedError) as caught:
        find({"model_type": kind, **SIZES, **more})
    assert message in str(caught.value)
    alike = {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    assert model_of({"model_type": "llama", **SIZES, **alike}) == model_of(
        {"model_type": "llama", **SIZES}
    )
