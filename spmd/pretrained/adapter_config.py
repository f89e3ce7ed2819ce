"""The adapter_config.json of PEFT, which is untrusted: what it asks for, and one for adapters of a
model.
"""

import collections
import dataclasses
import json
import logging
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from spmd.errors import Problem, join_names, printable, short_repr
from spmd.layout.trained import Adapter
from spmd.pretrained.folders import ADAPTER_CONFIG
from spmd.pretrained.safe_regex import SafeRegex

# keys for a training, and fan_in_fan_out, which PEFT corrects by the kind of a layer
WITHOUT_EFFECT = (
    *(
        "task_type",
        "auto_mapping",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
    ),
    *("fan_in_fan_out", "megatron_core", "runtime_config"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size"),
)
# values of init_lora_weights that leave the model's weights as they are
INITIAL = (True, False, "gaussian", "orthogonal", "eva")
MODULES = (
    "names of modules, or a regular expression of characters, groups, alternatives and repetitions"
)
MERGE = "merge them into the weights with peft, and load that folder."


@dataclasses.dataclass(frozen=True)
class AdapterConfig:
    """An adapter_config.json."""

    values: Mapping[str, Any]

    def problems(self) -> list[Problem]:
        """Keys with values that are not supported here, and would change what adapters compute."""

        def number(value: Any) -> bool:
            return type(value) in (int, float) and 0 < value < float("inf")

        def patterns(value: Any, accepts: Any) -> bool:
            known = isinstance(value, dict) and all(
                isinstance(key, str) and re.fullmatch(r"[\w.]+", key) for key in value
            )
            return known and all(map(accepts, value.values()))

        def names(value: Any) -> bool:
            return (
                value is None
                or isinstance(value, str)
                or (isinstance(value, list) and all(isinstance(name, str) for name in value))
            )

        def modules(value: Any) -> bool:
            return names(value) and (not isinstance(value, str) or _is_regex(value))

        def layers(value: Any) -> bool:
            return (
                value is None
                or type(value) is int
                or (isinstance(value, list) and all(type(layer) is int for layer in value))
            )

        def lists(value: Any) -> bool:
            return names(value) and all(re.fullmatch(r"[\w.]+", name) for name in _as_list(value))

        accepted = {
            "target_modules": (modules, MODULES),
            "exclude_modules": (modules, MODULES),
            "layers_to_transform": (layers, "numbers of layers"),
            "layers_pattern": (lists, "names of lists of layers"),
            "peft_type": (lambda value: value == "LORA", "LORA"),
            "r": (lambda value: type(value) is int and value > 0, "a whole number from 1"),
            "lora_alpha": (number, "a number above 0"),
            "lora_dropout": (
                lambda value: type(value) in (int, float) and 0 <= value < 1,
                "a number from 0 to 1",
            ),
            "use_rslora": (lambda value: isinstance(value, bool), "true or false"),
            "rank_pattern": (
                lambda value: patterns(value, lambda rank: type(rank) is int and rank > 0),
                "names of modules and their ranks",
            ),
            "alpha_pattern": (
                lambda value: patterns(value, number),
                "names of modules and their alphas",
            ),
            "bias": (lambda value: value == "none", "none"),
            "init_lora_weights": (
                lambda value: value in INITIAL,
                join_names(map(json.dumps, INITIAL)),
            ),
        }
        if "peft_type" not in self.values:
            return [Problem("peft_type", ["there is none."], kind="invalid_value")]
        found = []
        for key, value in self.values.items():
            if key == "use_dora" and value:
                found.append(
                    Problem(
                        key,
                        [f"{short_repr(value)}; DoRA is not supported."],
                        MERGE,
                        kind="invalid_value",
                    )
                )
            elif key in accepted and not accepted[key][0](value):
                fix = MERGE if key in ("peft_type", "bias", "init_lora_weights") else ""
                found.append(
                    Problem(
                        key,
                        [f"{short_repr(value)}; known: {accepted[key][1]}."],
                        fix,
                        kind="invalid_value",
                    )
                )
            elif key not in (*accepted, *WITHOUT_EFFECT) and value:
                found.append(
                    Problem(
                        printable(key, 100),
                        [f"{short_repr(value)}; this key is not known."],
                        MERGE,
                        kind="unknown_key",
                    )
                )
        return found

    @property
    def base_model(self) -> str:
        """The folder or the name of the model that the adapters are for; "" if the file does not
        say.
        """
        named = self.values.get("base_model_name_or_path")
        return named if isinstance(named, str) else ""

    def names(self, module: str) -> bool | None:
        """Whether the keys that choose modules name one, as PEFT matches them; None if they leave
        the choice to PEFT.
        """
        target, layers = self.values.get("target_modules"), self.values.get("layers_to_transform")
        if target is None or (isinstance(target, str) and target.lower() == "all-linear"):
            return None
        if _chooses(self.values.get("exclude_modules"), module) or not _chooses(target, module):
            return False
        if layers is None or layers == []:
            return True
        lists = [rf"(?:.*?\.)?{name}" for name in _as_list(self.values.get("layers_pattern"))] or [
            r".*?\.[^.]*"
        ]
        hit = next(
            filter(None, (re.match(rf"{before}\.(\d+)\.", module) for before in lists)), None
        )
        return hit is not None and int(hit[1]) in _as_list(layers)

    def shown(self) -> str:
        """The keys that choose modules, and their values."""
        keys = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")
        return ", ".join(
            f"{key} {short_repr(self.values[key])}"
            for key in keys
            if self.values.get(key) not in (None, [])
        )

    def get(self, key: str, module: str) -> Any:
        """The rank or alpha of a module: that of the first pattern that is its name or the end of
        it, or that of all.
        """
        default, table = {"r": (8, "rank_pattern"), "lora_alpha": (8, "alpha_pattern")}[key]
        for name, value in self.values.get(table, {}).items():
            if module == name or module.endswith(f".{name}"):
                return value
        return self.values.get(key, default)

    def adapter(self, layer: str, module: str) -> Adapter:
        """The adapter of a module, for a layer of the model."""
        rslora, dropout = (
            self.values.get("use_rslora", False),
            float(self.values.get("lora_dropout", 0.0)),
        )
        return Adapter(
            layer,
            rank=self.get("r", module),
            alpha=float(self.get("lora_alpha", module)),
            dropout=dropout,
            rslora=rslora,
        )


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _is_regex(text: str) -> bool:
    try:
        SafeRegex(text)
    except ValueError:
        return False
    return True


def _chooses(value: Any, module: str) -> bool:
    """Whether a regular expression is all of a module's name, or one of several names the end of
    it.
    """
    if isinstance(value, str):
        return SafeRegex(value).fullmatch(module)
    return any(module == name or module.endswith(f".{name}") for name in value or ())


def make_config(adapters: Mapping[str, Adapter], others: Collection[str]) -> dict[str, Any]:
    """What PEFT must know of the adapters of these modules, and of the model's other modules, which
    have none.
    """
    rslora = all(adapter.rslora for adapter in adapters.values())

    def alpha(adapter: Adapter) -> float:
        value = adapter.alpha if adapter.rslora == rslora else adapter.scale * adapter.rank
        return int(value) if value == int(value) else value

    def common(values: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The value of most modules, and a table of the others'."""
        most = collections.Counter(values.values()).most_common(1)[0][0]
        table = {}
        for value in dict.fromkeys(values.values()):
            chosen = [name for name in values if values[name] == value]
            table |= (
                dict.fromkeys(_ends(chosen, values.keys() - set(chosen)), value)
                if value != most
                else {}
            )
        return most, table

    rank, ranks = common({name: adapter.rank for name, adapter in adapters.items()})
    dropout, dropouts = common({name: adapter.dropout for name, adapter in adapters.items()})
    if dropouts:
        shown = ", ".join(f"{end} {value}" for end, value in dropouts.items())
        logging.getLogger("spmd").warning(
            "%s holds one dropout, %s: that of %s is lost.", ADAPTER_CONFIG, dropout, shown
        )
    most_alpha, alphas = common({name: alpha(adapter) for name, adapter in adapters.items()})
    return {
        **{"peft_type": "LORA", "bias": "none", "inference_mode": True},
        **{
            "r": rank,
            "rank_pattern": ranks,
            "lora_alpha": most_alpha,
            "alpha_pattern": alphas,
            "use_rslora": rslora,
        },
        **{"lora_dropout": dropout, "target_modules": _ends(adapters, others)},
    }


def _ends(chosen: Iterable[str], others: Collection[str]) -> list[str]:
    """Ends of names, from a dot on, that the chosen ones have and the others do not, and that
    neither begin nor end with a number.

    >>> _ends(["h.0.attn.proj", "h.1.attn.proj", "h.0.fc"], ["h.0.mlp.proj", "h.1.fc"])
    ['attn.proj', 'h.0.fc']
    """
    ends: dict[str, None] = {}
    for name in sorted(chosen):
        parts = name.split(".")
        begins = range(len(parts) - 1, 0, -1) if not parts[-1].isdigit() else ()
        shorter = (".".join(parts[at:]) for at in begins if not parts[at].isdigit())
        ends[
            next(
                (
                    end
                    for end in shorter
                    if not any(f".{other}".endswith(f".{end}") for other in others)
                ),
                name,
            )
        ] = None
    return sorted(ends)
