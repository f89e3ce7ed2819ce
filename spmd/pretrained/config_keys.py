"""Reads a config.json: each key is read, or is known to change nothing (`IRRELEVANT`), or is an
error.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spmd.errors import PretrainedError, Problem, raise_problems, short_repr

ACTIVATIONS = {
    **{"silu": "silu", "swish": "silu", "relu": "relu", "gelu": "gelu"},
    # transformers' names of one approximation by tanh.
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "gelu_tanh"),
}

# Keys that change no result of a model here, by the reason.
IRRELEVANT_BY_REASON = {
    "a name, a version, or where the file is from; `find` compares model_type and architectures": (
        "model_type architectures transformers_version _name_or_path _commit_hash auto_map "
        "task_specific_params unsloth_fixed "
        "unsloth_version"
    ),
    "the dtype of the files, which their headers say": "torch_dtype dtype use_bfloat16",
    "how weights were initialised": "initializer_range",
    "what transformers' own code returns, caches or runs on": (
        "use_cache cache_implementation return_dict output_hidden_states output_attentions "
        "torchscript attn_implementation "
        "_attn_implementation_autoset tf_legacy_loss"
    ),
    "in what parts products are computed; their sums are the same": (
        "pretraining_tp chunk_size_feed_forward"
    ),
    "scores in float32, as they are here in any case": "reorder_and_upcast_attn",
    "a token's id, which generation and data read": "bos_token_id eos_token_id pad_token_id "
    "sep_token_id decoder_start_token_id",
    "classes and heads of other tasks; an encoder reads id2label": (
        "id2label label2id num_labels problem_type finetuning_task summary_type summary_use_proj "
        "summary_activation "
        "summary_proj_to_labels summary_first_dropout"
    ),
    "generation takes or reports it": (
        "temperature top_k top_p typical_p do_sample max_length min_length max_new_tokens "
        "num_beams num_return_sequences "
        "repetition_penalty length_penalty early_stopping no_repeat_ngram_size bad_words_ids "
        "suppress_tokens begin_suppress_tokens prefix"
    ),
    "layer_types, which transformers makes of sliding_window_pattern, says it; it writes this one "
    "beside and never reads it": ("_sliding_window_pattern"),
}
IRRELEVANT = frozenset(key for keys in IRRELEVANT_BY_REASON.values() for key in keys.split())
# Keys that would change results if they were set: they may be there with these values only.
UNSET: dict[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (False,),
    "is_decoder": (False, True),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (),
    "tie_encoder_decoder": (False,),
    "use_bidirectional_attention": (False,),
    "quantization_config": (),
    "pruned_heads": ({},),
    "per_layer_config": ({},),
    "tie_last_hidden_states": (True,),
    "partial_rotary_factor": (1, 1.0),
}
MOST_LAYERS = 10_000
DEPTHS, WIDTHS = ("num_hidden_layers", "n_layer"), ("hidden_size", "n_embd")
# sizes for which a model has a matrix of this size and the width
DIMS = (
    "vocab_size",
    "intermediate_size",
    "n_inner",
    "num_attention_heads",
    "n_head",
    "head_dim",
    "n_positions",
    "type_vocab_size",
)
DROPOUTS = (
    "attention_dropout",
    "attn_pdrop",
    "resid_pdrop",
    "embd_pdrop",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "classifier_dropout",
)


def is_count(value: Any) -> bool:
    """Return True for a whole number from 1."""
    # JSON's true is an int for isinstance.
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def check_sizes(
    config: Mapping[str, Any],
    sizes: Sequence[int],
    where: str = "config.json",
    fix: str = "the config.json that the files were written with.",
) -> None:
    """Refuse sizes that tensors with so many values cannot have: a layer is one tensor or more, and
    a vocabulary times the width is one.

    Raises:
      PretrainedError: all such keys.

    >>> check_sizes({"num_hidden_layers": 2, "hidden_size": 4, "vocab_size": 5}, [16, 4])
    """
    total = sum(sizes)
    counts = {key: value for key, value in config.items() if is_count(value)}
    widths = [counts[key] for key in WIDTHS if key in counts]
    width = next(iter(widths), 1)
    dims = DIMS
    # With this key only BERT has a table of positions: GPT-2's key is n_positions, and families
    # that rotate store none.
    if config.get("model_type") == "bert":
        dims = (*DIMS, "max_position_embeddings")
    reasons: dict[str, str] = {}
    for key in DEPTHS:
        if counts.get(key, 0) > len(sizes):
            reasons[key] = f"there are {len(sizes):,} tensors."
    for key in WIDTHS:
        if counts.get(key, 0) > total:
            reasons[key] = f"all tensors have {total:,} values."
    for key in dims:
        values = counts.get(key, 0) * width
        if values > total >= width:
            at_this_width = f"with a width of {width:,} that is {values:,}"
            reasons[key] = f"{at_this_width}; all tensors have {total:,} values."
    problems = []
    for key, reason in reasons.items():
        problems.append(Problem(f"{key} = {counts[key]:,}", [reason], fix, path=key))
    raise_problems(
        PretrainedError,
        f"{where} asks for more than the safetensors files beside it hold",
        problems,
    )


def is_number(value: Any) -> bool:
    """Return True for a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and value > 0


def _is_activation(value: Any) -> bool:
    return isinstance(value, str) and value in ACTIVATIONS


class ConfigKeys:
    """A config.json that remembers the keys that were read, and all problems.

    Args:
      what: the model that is made of it, for errors.
    """

    def __init__(self, config: Mapping[str, Any], what: str):
        self.config, self.what, self.problems = config, what, list[str]()
        self.used, self.notes = {*IRRELEVANT, *UNSET, *DROPOUTS}, list[str]()
        for key, accepted in UNSET.items():
            value = config.get(key)
            if value is None or value in accepted:
                continue
            why = f"the {self.what} does not have that"
            if accepted:
                why += f"; {accepted[0]!r} would be fine"
            self.wrong(key, why)
        for key in DROPOUTS:
            if config.get(key):
                self.notes.append(
                    f"{key} = {config[key]!r} is not applied: the {self.what} drops nothing in "
                    "training."
                )

    def wrong(self, key: str, why: str) -> None:
        """Note a problem of a key and its value."""
        state = f"{key} is missing"
        if key in self.config:
            state = f"{key} = {short_repr(self.config[key])}"
        self.problems.append(f"{state}: {why}.")

    def get(
        self,
        key: str,
        default: Any,
        accepts: Callable[[Any], bool],
        accepted: str,
        *,
        null: bool = True,
    ) -> Any:
        """Return a key's value, or the default if it is missing or null; `...`: it may not be.

        Args:
          accepts: returns True for values that are right.
          accepted: these values in words, for errors.
          null: the key may be null.
        """
        self.used.add(key)
        value = self.config.get(key)
        if value is None:
            if default is ... or (key in self.config and not null):
                self.wrong(key, f"wanted {accepted}")
                # Any number: the caller computes with it until `finish` raises.
                return 1
            return default
        if accepts(value):
            return value
        self.wrong(key, f"wanted {accepted}")
        if default is ...:
            return 1
        return default

    def count(self, key: str, default: Any = ..., most: int = 2**31 - 1) -> Any:
        """A whole number from 1 to `most`."""
        accepted = "a whole number from 1"
        if is_count(self.config.get(key)):
            accepted += f" to {most:,}"
        return self.get(key, default, lambda value: is_count(value) and value <= most, accepted)

    def number(self, key: str, default: Any = ...) -> Any:
        """A number above 0."""
        return self.get(key, default, is_number, "a number above 0")

    def flag(self, key: str, default: bool) -> bool:
        """True or False."""
        return self.get(key, default, lambda value: isinstance(value, bool), "true or false")

    def activation(self, key: str, default: str) -> str:
        """Our name of an activation."""
        accepted = f"one of {', '.join(ACTIVATIONS)}"
        name = self.get(key, default, _is_activation, accepted)
        return ACTIVATIONS[name]

    def finish(self, where: str) -> None:
        """Raise if a key was not read, or something is wrong."""
        # A set has no order, and errors should be the same in each process.
        for key in sorted(self.config.keys() - self.used):
            if self.config[key] is not None:
                family = self.config["model_type"]
                self.wrong(key, f"the {self.what} does not know this key of a {family}")
        if self.problems:
            shown = "\n".join(f"    {problem}" for problem in sorted(self.problems))
            fix = (
                "a model of your own and a name map, spmd.pretrained.load(model=..., "
                "name_map=...); or remove a key that changes nothing."
            )
            why = f"{where}: the {self.what} does not fit {len(self.problems)} of its keys:"
            raise PretrainedError(
                f"{why}\n{shown}", fix=fix, summary=f"{where}: {min(self.problems)}"
            )
