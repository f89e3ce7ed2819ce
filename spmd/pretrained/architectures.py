"""Which model and which name map belong to a config.json."""

from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx

from spmd.errors import PretrainedError, did_you_mean
from spmd.pretrained.name_map import NameMap

Factory = Callable[[], nnx.Module]
Maker = Callable[[Mapping[str, Any]], tuple[Factory, NameMap]]  # from a config.json to a function that builds the model, and its map

ARCHITECTURES: dict[str, Maker] = {}  # by `model_type` of config.json


def find(config: Mapping[str, Any], where: str = "config.json") -> tuple[Factory, NameMap]:
    """A function that builds the model of a config.json, and the name map of its files.

    Raises:
      PretrainedError: the config has no `model_type`, or one that this version does not know; or the model cannot honour a key.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise PretrainedError(f"{where} has no model_type.", fix="model= and name_map=, for a model of your own.")
    if kind not in ARCHITECTURES:
        named = (
            f" (architectures: {', '.join(map(str, names))})" if isinstance(names := config.get("architectures"), list) and names else ""
        )
        fix = f"{did_you_mean(kind, ARCHITECTURES)} A model of your own: model= and name_map=."
        raise PretrainedError(f'{where}: unknown model_type "{kind}"{named}; known: {", ".join(ARCHITECTURES) or "none"}.', fix=fix)
    return ARCHITECTURES[kind](config)
