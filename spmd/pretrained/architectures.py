"""Finds the model and the name map of a config.json."""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flax import nnx

from spmd.errors import OptionError, PretrainedError, did_you_mean, join_names, short_repr
from spmd.pretrained.config_keys import check_sizes
from spmd.pretrained.decoder import Decoder
from spmd.pretrained.decoder_config import DecoderConfig
from spmd.pretrained.encoder import Encoder, EncoderConfig
from spmd.pretrained.name_map import IgnoredRule, NameMap
from spmd.pretrained.safetensors_files import open_files

CONFIG, PUBLISHED = "config.json", "the config.json that was published with these weights."
MAPS = Path(__file__).parent / "maps"
# prefixes of heads in the files, and the tasks of an encoder that have them
HEADS = {
    "bert.pooler.": ("features", "classes"),
    "cls.predictions.": ("masked_tokens",),
    "classifier.": ("classes",),
}
CLASSIFIER = "BertForSequenceClassification"
OWN = "A model of your own: spmd.pretrained.load(model=..., name_map=...)."


@functools.cache
def shipped() -> dict[str, NameMap]:
    """The shipped name maps, by `model_type` of config.json.

    >>> sorted(shipped())
    ['bert', 'gemma', 'gemma2', 'gemma3_text', 'gpt2', 'llama', 'mistral', 'qwen2', 'qwen3']
    """
    maps: dict[str, NameMap] = {}
    # A folder's entries come in no order, and errors list the known types.
    for path in sorted(MAPS.glob("*.toml")):
        name_map = NameMap.load(path)
        maps |= dict.fromkeys(name_map.model_types, name_map)
    return maps


class Architecture(NamedTuple):
    """The model that a config.json describes.

    Attributes:
      factory: builds the model, with random weights.
      name_map: of its files.
      notes: requests of the config that the model leaves to the training run.
    """

    factory: Callable[[], nnx.Module]
    name_map: NameMap
    notes: tuple[str, ...]


def find(config: Mapping[str, Any], folder: Path | None = None) -> Architecture:
    """The model of a config.json, and the name map of its files.

    Args:
      folder: where the config is. Its sizes are compared with the headers of the files there,
        before a model is made of them.

    Raises:
      PretrainedError: the config has no `model_type`, or one that this version does not know;
        `architectures` are not of it, or of another task; sizes that are more than the files hold;
        or the model cannot honour a key.

    Example:
      >>> sizes = {
      ...     "vocab_size": 10,
      ...     "hidden_size": 8,
      ...     "intermediate_size": 16,
      ...     "num_hidden_layers": 2,
      ...     "num_attention_heads": 2,
      ... }
      >>> factory, name_map, _ = find({"model_type": "llama", **sizes})
      >>> factory().config.head_dim, "mistral" in name_map.model_types
      (4, True)
    """
    where = str((folder or Path()) / CONFIG)
    kind, classes = config.get("model_type"), config.get("architectures") or []
    if not isinstance(kind, str):
        raise PretrainedError(f"{where} has no model_type.", fix=OWN)
    if kind not in shipped():
        classes_text = ""
        if isinstance(classes, list) and classes:
            classes_text = f" (architectures: {', '.join(map(str, classes))})"
        known_types = ", ".join(shipped())
        raise PretrainedError(
            f'{where}: unknown model_type "{kind}"{classes_text}; known: {known_types}.',
            fix=f"{did_you_mean(kind, shipped())} {OWN}",
        )
    name_map = shipped()[kind]
    accepted = []
    for name in name_map.architectures:
        # LlamaForCausalLM, LlamaModel and GPT2LMHeadModel begin with the family's name.
        stem, *_ = re.split("For|Model|LMHead", name)
        # The classes of Gemma 3 lack the `_text` of its model_type.
        if stem.lower() == kind.removesuffix("_text"):
            accepted.append(name)
    if not isinstance(classes, list) or not all(name in accepted for name in classes):
        every: set[str] = set()
        for other in shipped().values():
            every.update(other.architectures)
        fix = OWN
        if isinstance(classes, list) and all(name in every for name in classes):
            fix = PUBLISHED
        of_type = f'those of model_type = "{kind}" are {", ".join(accepted)}.'
        why = f"{where}: architectures = {short_repr(classes)}; {of_type}"
        raise PretrainedError(why, fix=fix)
    # Before a model is made: one of 10**9 layers would take the memory of the host.
    if folder is not None:
        sizes = [math.prod(tensor.shape) for tensor in open_files(folder).tensors.values()]
        check_sizes(config, sizes, where, PUBLISHED)
    if kind == "bert":
        encoder = EncoderConfig.from_config(config, where)
        factory = functools.partial(_build, Encoder, encoder)
        return Architecture(factory, for_task(name_map, encoder.task), encoder.notes)
    decoder = DecoderConfig.from_config(config, where)
    factory = functools.partial(_build, Decoder, decoder)
    return Architecture(factory, for_head(name_map, decoder.tied), decoder.notes)


def with_labels(
    config: Mapping[str, Any], labels: Sequence[str], where: str = "config.json"
) -> dict[str, Any]:
    """The config.json of a new classifier over an encoder.

    Raises:
      OptionError: labels that are not different strings.
      PretrainedError: the model is none that takes a classifier, or has one.

    Example:
      >>> with_labels({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, ["no", "yes"])[
      ...     "id2label"
      ... ]
      {'0': 'no', '1': 'yes'}
    """
    several = isinstance(labels, Sequence) and not isinstance(labels, str) and len(labels) > 0
    if not several or not all(isinstance(label, str) for label in labels):
        raise OptionError(
            f"labels={short_repr(labels)}.",
            fix='names of classes, such as ["negative", "positive"].',
        )
    counts = collections.Counter(labels)
    if repeated := [label for label, count in counts.items() if count > 1]:
        raise OptionError(
            f"labels={short_repr(labels)} repeats {join_names(map(repr, repeated))}.",
            fix="one name for each class.",
        )
    if config.get("model_type") != "bert":
        why = (
            f"{where}: labels= is for an encoder, and model_type is "
            f"{short_repr(config.get('model_type'))}."
        )
        raise PretrainedError(why, fix="a folder of a BERT, or model= and name_map=.")
    if config.get("architectures") == [CLASSIFIER]:
        raise PretrainedError(
            f"{where}: the model is a {CLASSIFIER} already.",
            fix="no labels=; or the folder that it was trained from.",
        )
    new_config = dict(config)
    # transformers counts classes by id2label, which these keys of the old head may contradict.
    for key in ("num_labels", "_num_labels", "problem_type"):
        new_config.pop(key, None)
    new_config["architectures"] = [CLASSIFIER]
    # All keys of JSON are strings.
    new_config["id2label"] = {str(number): label for number, label in enumerate(labels)}
    new_config["label2id"] = {label: number for number, label in enumerate(labels)}
    return new_config


def for_head(name_map: NameMap, tied: bool) -> NameMap:
    """Return a name map without the rules for a head of the other kind: a tensor that is a second
    name of the table, or an array of its own.
    """
    second_names = {rule.file for rule in name_map.tensors if rule.tied}
    rules = []
    for rule in name_map.tensors:
        if rule.file not in second_names or rule.tied == tied:
            rules.append(rule)
    return dataclasses.replace(name_map, tensors=tuple(rules))


def for_task(name_map: NameMap, task: str) -> NameMap:
    """Return a name map that ignores the heads of an encoder's other tasks."""
    absent = tuple(prefix for prefix, tasks in HEADS.items() if task not in tasks)
    rules = []
    ignored = list(name_map.ignored)
    for rule in name_map.tensors:
        file = rule.file[0]
        if file.startswith(absent):
            ignored.append(IgnoredRule(file, "it is of another task's head", rule.line))
        else:
            rules.append(rule)
    return dataclasses.replace(name_map, tensors=tuple(rules), ignored=tuple(ignored))


def _build(kind: Any, config: Any) -> nnx.Module:
    return kind(config, rngs=nnx.Rngs(0))
