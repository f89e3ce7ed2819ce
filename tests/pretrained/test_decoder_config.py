"""A config.json becomes a decoder: those of known models, of old and new versions of transformers,
and those that cannot be honoured.
"""

import functools
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from spmd.errors import SpmdError
from spmd.pretrained.architectures import find
from spmd.pretrained.decoder import Decoder
from spmd.pretrained.decoder_config import FAMILIES, DecoderConfig
from spmd.pretrained.rope import KINDS, Rope

FIXTURES = Path(__file__).parent / "fixtures"
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def sizes(vocab, width, mlp, layers, heads, kv_heads, **others):
    names = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    )
    return {**dict(zip(names, (vocab, width, mlp, layers, heads, kv_heads), strict=True)), **others}


# As their authors published them, with the parameters that they count.
PUBLISHED = {
    "Llama-2-7b": (
        {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "rms_norm_eps": 1e-5,
            "pretraining_tp": 1,
            "rope_scaling": None,
        }
        | sizes(
            32000,
            4096,
            11008,
            32,
            32,
            32,
            hidden_act="silu",
            torch_dtype="float16",
            tie_word_embeddings=False,
        ),
        6_738_415_616,
    ),
    "Llama-3.1-8B": (
        {
            "model_type": "llama",
            "rope_theta": 500000.0,
            "rope_scaling": LLAMA3,
            "max_position_embeddings": 131072,
            "mlp_bias": False,
        }
        | sizes(
            128256,
            4096,
            14336,
            32,
            32,
            8,
            attention_bias=False,
            attention_dropout=0.0,
            eos_token_id=128001,
        ),
        8_030_261_248,
    ),
    "Mistral-7B-v0.1": (
        {"model_type": "mistral", "sliding_window": 4096, "rope_theta": 10000.0}
        | sizes(32000, 4096, 14336, 32, 32, 8),
        7_241_732_096,
    ),
    "Qwen2.5-0.5B": (
        {
            "model_type": "qwen2",
            "sliding_window": 32768,
            "use_sliding_window": False,
            "max_window_layers": 24,
            "use_mrope": None,
        }
        | sizes(151936, 896, 4864, 24, 14, 2, rope_theta=1000000.0, tie_word_embeddings=True),
        494_032_768,
    ),
    "Qwen3-0.6B": (
        {
            "model_type": "qwen3",
            "head_dim": 128,
            "sliding_window": None,
            "use_sliding_window": False,
            "max_window_layers": 28,
        }
        | sizes(
            151936,
            1024,
            3072,
            28,
            16,
            8,
            rope_theta=1000000,
            tie_word_embeddings=True,
            attention_bias=False,
        ),
        596_049_920,
    ),
    "gemma-2b": (
        {"model_type": "gemma", "hidden_act": "gelu", "head_dim": 256}
        | sizes(256000, 2048, 16384, 18, 8, 1, rope_theta=10000.0),
        2_506_172_416,
    ),
    "gemma-2-2b": (
        {
            "model_type": "gemma2",
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window": 4096,
        }
        | {
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "query_pre_attn_scalar": 256,
            "cache_implementation": "hybrid",
        }
        | sizes(256000, 2304, 9216, 26, 8, 4, head_dim=256, max_position_embeddings=8192),
        2_614_341_888,
    ),
    "gemma-3-1b": (
        {
            "model_type": "gemma3_text",
            "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window": 512,
            "sliding_window_pattern": 6,
        }
        | {
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "query_pre_attn_scalar": 256,
            "rope_local_base_freq": 10000,
        }
        | sizes(262144, 1152, 6912, 26, 4, 1, head_dim=256, rope_theta=1000000, rope_scaling=None),
        999_885_952,
    ),
    "gpt2": (
        {
            "model_type": "gpt2",
            "activation_function": "gelu_new",
            "n_ctx": 1024,
            "n_embd": 768,
            "n_head": 12,
            "n_layer": 12,
        }
        | {
            "n_positions": 1024,
            "attn_pdrop": 0.1,
            "resid_pdrop": 0.1,
            "embd_pdrop": 0.1,
            "layer_norm_epsilon": 1e-5,
            "vocab_size": 50257,
        }
        | {
            "summary_type": "cls_index",
            "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        },
        124_439_808,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs(name):
    config, parameters = PUBLISHED[name]
    decoder = DecoderConfig.from_config(config)
    shapes = jax.eval_shape(lambda: nnx.state(Decoder(decoder, rngs=nnx.Rngs(0)), nnx.Param))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == parameters
    assert len(decoder.notes) == sum(
        bool(config.get(key)) for key in ("attn_pdrop", "resid_pdrop", "embd_pdrop")
    )


def test_layers_with_windows():
    def windows(name):
        return [layer.window for layer in DecoderConfig.from_config(PUBLISHED[name][0]).layers]

    assert windows("Mistral-7B-v0.1") == [4096] * 32
    assert windows("Qwen2.5-0.5B") == [None] * 24
    assert windows("gemma-2-2b") == [4096, None] * 13
    assert windows("gemma-3-1b") == ([512] * 5 + [None]) * 4 + [512] * 2
    qwen = PUBLISHED["Qwen2.5-0.5B"][0] | {"use_sliding_window": True, "max_window_layers": 20}
    assert [layer.window for layer in DecoderConfig.from_config(qwen).layers] == [None] * 20 + [
        32768
    ] * 4


def test_old_and_new_files_say_the_same():
    """transformers 5 keeps the base and the scaling of positions in `rope_parameters`, by kind of
    layer if there are several.
    """
    for name in ("Llama-3.1-8B", "gemma-3-1b"):
        old = PUBLISHED[name][0] | {"rope_scaling": LLAMA3}
        new = {
            key: value
            for key, value in old.items()
            if key not in ("rope_theta", "rope_scaling", "rope_local_base_freq")
        }
        both = {"rope_theta": old["rope_theta"], **LLAMA3}
        local = {"rope_type": "default", "rope_theta": 10000.0}
        new["rope_parameters"] = (
            {"full_attention": both, "sliding_attention": local} if name == "gemma-3-1b" else both
        )
        assert DecoderConfig.from_config(new) == DecoderConfig.from_config(old)
        if name == "Llama-3.1-8B":
            older = {"type" if key == "rope_type" else key: value for key, value in LLAMA3.items()}
            assert DecoderConfig.from_config(
                new | {"rope_scaling": older}
            ) == DecoderConfig.from_config(old), "said twice, alike"
        without = DecoderConfig.from_config({**old, "rope_scaling": None})
        assert (
            without.ropes[0] != DecoderConfig.from_config(old).ropes[0]
            and without.ropes[1:] == DecoderConfig.from_config(old).ropes[1:]
        )


@pytest.mark.parametrize("name", json.loads((FIXTURES / "ropes.json").read_text()))
def test_scaled_positions_equal_transformers(name):
    values = json.loads((FIXTURES / "ropes.json").read_text())[name]
    config = {
        "model_type": "llama",
        "head_dim": 64,
        "max_position_embeddings": 128,
        "rope_parameters": values["rope_parameters"],
    }
    (rope,) = DecoderConfig.from_config(config | sizes(96, 256, 48, 2, 4, 2)).ropes
    # floats of Python: no program, and so no processor, rounds them
    np.testing.assert_allclose(rope.frequencies, values["frequencies"], rtol=1e-5)
    np.testing.assert_allclose(rope.factor, values["factor"], rtol=1e-5)
    assert rope != Rope.of(10_000.0, 64)


SMALL = sizes(96, 32, 48, 2, 4, 2)
WRONG = {
    "unknown_activation": {"model_type": "llama", **SMALL, "hidden_act": "quick_gelu"},
    "head_counts": {"model_type": "llama", **SMALL, "num_key_value_heads": 3},
    "width_not_divisible": {"model_type": "llama", **SMALL, "num_attention_heads": 6},
    "odd_head_dim": {"model_type": "qwen3", **SMALL, "head_dim": 7},
    "dynamic_positions": {
        "model_type": "llama",
        **SMALL,
        "rope_scaling": {"type": "dynamic", "factor": 2.0},
    },
    "scaling_without_its_numbers": {
        "model_type": "llama",
        **SMALL,
        "rope_scaling": {"rope_type": "llama3", "factor": "8", "low": 1},
    },
    "two_scalings": {
        **{"model_type": "llama", **SMALL},
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        "rope_scaling": LLAMA3,
    },
    "missing_sizes": {"model_type": "mistral", "hidden_size": 32},
    "everything_at_once": {
        **{
            "model_type": "llama",
            **SMALL,
            "vocab_size": -1,
            "tie_word_embeddings": "yes",
            "quantization_config": {"bits": 4},
        },
        **{
            "num_local_experts": 8,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 0,
            "rope_parameters": "default",
        },
    },
    "layer_types": {
        "model_type": "gemma2",
        **SMALL,
        "layer_types": ["full_attention", "chunked_attention"],
    },
    "windows_of_llama": {"model_type": "llama", **SMALL, "sliding_window": 4096},
    "scale_by_layer": {
        "model_type": "gpt2",
        "n_embd": 32,
        "n_head": 4,
        "n_layer": 2,
        "scale_attn_by_inverse_layer_idx": True,
    },
    "unknown_model_type": {"model_type": "gema2", "architectures": ["Gema2ForCausalLM"], **SMALL},
    "no_model_type": dict(SMALL),
    "too_many_layers": {
        "model_type": "llama",
        **SMALL,
        "num_hidden_layers": 10**9,
        "hidden_size": 10**12,
    },
    "class_of_another_family": {
        "model_type": "llama",
        "architectures": ["MistralForCausalLM"],
        **SMALL,
    },
    "another_task": {
        "model_type": "llama",
        "architectures": ["LlamaForSequenceClassification"],
        **SMALL,
    },
}


@pytest.mark.parametrize("name", WRONG)
def test_config_that_cannot_be_honoured(name, golden):
    with pytest.raises(SpmdError) as caught:
        find(WRONG[name])
    golden(f"config_{name}", str(caught.value))


def test_every_family_has_a_map():
    needs = {"gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "model_type": "gpt2"}}
    for kind in FAMILIES:
        factory, name_map, _ = find(needs.get(kind, {"model_type": kind, **SMALL}))
        assert kind in name_map.model_types
        assert isinstance(factory, functools.partial)
    assert set(KINDS) >= {"default", "linear", "llama3", "yarn"}
