"""Which model and which name map belong to a config.json."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flax import nnx

from spmd.errors import PretrainedError, did_you_mean, short_repr
from spmd.pretrained.decoder import Decoder
from spmd.pretrained.decoder_config import DecoderConfig
from spmd.pretrained.name_map import NameMap

Factory = Callable[[], nnx.Module]
MAPS = Path(__file__).parent / "maps"
OWN = "A model of your own: model= and name_map=."


@functools.cache
def shipped() -> dict[str, NameMap]:
    """The shipped name maps, by `model_type` of config.json.

    >>> sorted(shipped())
    ['gemma', 'gemma2', 'gemma3_text', 'gpt2', 'llama', 'mistral', 'qwen2', 'qwen3']
    """
    maps = [NameMap.load(path) for path in sorted(MAPS.glob("*.toml"))]
    return {kind: name_map for name_map in maps for kind in name_map.model_types}


def find(config: Mapping[str, Any], where: str = "config.json") -> tuple[Factory, NameMap]:
    """A function that builds the model of a config.json, and the name map of its files.

    Raises:
      PretrainedError: the config has no `model_type`, or one that this version does not know; the files are of another task's model; or
        the model cannot honour a key.

    Example:
      >>> sizes = {"vocab_size": 10, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
      >>> factory, name_map = find({"model_type": "llama", **sizes})
      >>> factory().config.head_dim, "mistral" in name_map.model_types
      (4, True)
    """
    kind, classes = config.get("model_type"), config.get("architectures") or []
    if not isinstance(kind, str):
        raise PretrainedError(f"{where} has no model_type.", fix="model= and name_map=, for a model of your own.")
    if kind not in shipped():
        named = f" (architectures: {', '.join(map(str, classes))})" if isinstance(classes, list) and classes else ""
        fix = f"{did_you_mean(kind, shipped())} {OWN}"
        raise PretrainedError(f'{where}: unknown model_type "{kind}"{named}; known: {", ".join(shipped())}.', fix=fix)
    name_map = shipped()[kind]
    if not isinstance(classes, list) or not all(name in name_map.architectures for name in classes):
        known = ", ".join(name_map.architectures)
        raise PretrainedError(f"{where}: architectures = {short_repr(classes)}, which is none of {known}.", fix=OWN)
    decoder = DecoderConfig.from_config(config, where)
    return functools.partial(_decoder, decoder), for_head(name_map, decoder.tied)


def for_head(name_map: NameMap, tied: bool) -> NameMap:
    """Without the rules for a head of the other kind: a tensor that is a second name of the table, or an array of its own."""
    second_names = {rule.file for rule in name_map.tensors if rule.tied}
    kept = (rule for rule in name_map.tensors if rule.file not in second_names or rule.tied == tied)
    return dataclasses.replace(name_map, tensors=tuple(kept))


def _decoder(config: DecoderConfig) -> Decoder:
    return Decoder(config, rngs=nnx.Rngs(0))
