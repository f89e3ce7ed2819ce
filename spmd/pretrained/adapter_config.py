"""The adapter_config.json of PEFT, which is untrusted: reading the keys of one, and writing one for
the adapters of a model.
"""

import collections
import dataclasses
import functools
import json
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from spmd.errors import Problem, import_extra, join_names, printable, short_repr
from spmd.layout.trained import Adapter
from spmd.pretrained.outline import ADAPTER_CONFIG

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


def _is_positive(value: Any) -> bool:
    # Not isinstance, for which JSON's true is a number; here and below.
    return type(value) in (int, float) and 0 < value < float("inf")


def _is_rank(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_dropout(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < 1


def _is_list_of(kind: type, value: Any) -> bool:
    return isinstance(value, list) and all(type(entry) is kind for entry in value)


def _is_table(value: Any, accepts: Callable[[Any], bool]) -> bool:
    """Return True for a table from plain names to accepted values."""
    if not isinstance(value, dict) or not all(map(_is_plain_name, value)):
        return False
    return all(map(accepts, value.values()))


def _is_plain_name(name: Any) -> bool:
    # No other characters: `AdapterConfig.names` puts layers_pattern into a regular expression, and
    # PEFT reads keys of rank_pattern as one.
    return isinstance(name, str) and re.fullmatch(r"[\w.]+", name) is not None


def _are_modules(value: Any) -> bool:
    if isinstance(value, str):
        return _is_all_linear(value) or _compiled(value) is not None
    return value is None or _is_list_of(str, value)


def _are_layer_numbers(value: Any) -> bool:
    return value is None or type(value) is int or _is_list_of(int, value)


def _are_list_names(value: Any) -> bool:
    return all(map(_is_plain_name, _as_list(value)))


def _is_all_linear(value: Any) -> bool:
    return isinstance(value, str) and value.lower() == "all-linear"


# By key: if a value is accepted, and the accepted values in words.
ACCEPTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "target_modules": (_are_modules, MODULES),
    "exclude_modules": (_are_modules, MODULES),
    "layers_to_transform": (_are_layer_numbers, "numbers of layers"),
    "layers_pattern": (_are_list_names, "names of lists of layers"),
    "peft_type": (lambda value: value == "LORA", "LORA"),
    "r": (_is_rank, "a whole number from 1"),
    "lora_alpha": (_is_positive, "a number above 0"),
    "lora_dropout": (_is_dropout, "a number from 0 to 1"),
    "use_rslora": (lambda value: isinstance(value, bool), "true or false"),
    "rank_pattern": (lambda value: _is_table(value, _is_rank), "names of modules and their ranks"),
    "alpha_pattern": (
        lambda value: _is_table(value, _is_positive),
        "names of modules and their alphas",
    ),
    "bias": (lambda value: value == "none", "none"),
    "init_lora_weights": (lambda value: value in INITIAL, join_names(map(json.dumps, INITIAL))),
}


@dataclasses.dataclass(frozen=True)
class AdapterConfig:
    """An adapter_config.json."""

    values: Mapping[str, Any]

    def problems(self) -> list[Problem]:
        """Return keys with values that are not supported here, and would change the outputs of
        adapters.

        Raises:
          MissingExtraError: modules are named by a regular expression, and google-re2 is not
            installed.
        """
        if "peft_type" not in self.values:
            fix = "a folder that PEFT or spmd.pretrained.save_adapters wrote."
            return [Problem("peft_type", ["there is none."], fix, kind="invalid_value")]
        problems = []
        for key, value in self.values.items():
            if key == "use_dora" and value:
                reason = f"{short_repr(value)}; DoRA is not supported."
                problems.append(Problem(key, [reason], MERGE, kind="invalid_value"))
            elif key in ACCEPTED:
                accepts, accepted_values = ACCEPTED[key]
                if accepts(value):
                    continue
                fix = f"one of these; or, if peft loads the folder, {MERGE}"
                if key in ("peft_type", "bias", "init_lora_weights"):
                    fix = MERGE
                reason = f"{short_repr(value)}; known: {accepted_values}."
                problems.append(Problem(key, [reason], fix, kind="invalid_value"))
            # A key that is false, null or empty asks for nothing.
            elif key not in WITHOUT_EFFECT and value:
                reason = f"{short_repr(value)}; this key is not known."
                problems.append(Problem(printable(key, 100), [reason], MERGE, kind="unknown_key"))
        return problems

    @property
    def base_model(self) -> str:
        """The folder or the name of the model that the adapters are for; "" if the file does not
        say.
        """
        model_name = self.values.get("base_model_name_or_path")
        if isinstance(model_name, str):
            return model_name
        return ""

    def names(self, module: str) -> bool | None:
        """Return True if the keys that choose modules name one, as PEFT matches them; None if they
        leave the choice to PEFT.
        """
        target, layers = self.values.get("target_modules"), self.values.get("layers_to_transform")
        if target is None or _is_all_linear(target):
            return None
        if _chooses(self.values.get("exclude_modules"), module) or not _chooses(target, module):
            return False
        if layers is None or layers == []:
            return True
        # As PEFT (check_target_module_exists in tuners_utils.py); a list may also begin the name
        # here.
        patterns = [r".*?\.[^.]*"]
        if list_names := _as_list(self.values.get("layers_pattern")):
            patterns = [rf"(?:.*?\.)?{name}" for name in list_names]
        for pattern in patterns:
            if match := re.match(rf"{pattern}\.(\d+)\.", module):
                return int(match[1]) in _as_list(layers)
        return False

    def shown(self) -> str:
        """Return the keys that choose modules, and their values, in words."""
        keys = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")
        parts = []
        for key in keys:
            value = self.values.get(key)
            if value not in (None, []):
                parts.append(f"{key} {short_repr(value)}")
        return ", ".join(parts)

    def get(self, key: str, module: str) -> Any:
        """Return the rank or alpha of a module: the value of the first pattern that is its name or
        the end of it, or the common value.
        """
        # 8 is PEFT's default of both.
        default, table = {"r": (8, "rank_pattern"), "lora_alpha": (8, "alpha_pattern")}[key]
        for name, value in self.values.get(table, {}).items():
            if module == name or module.endswith(f".{name}"):
                return value
        return self.values.get(key, default)

    def adapter(self, layer: str, module: str) -> Adapter:
        """Return the adapter of a module, for a layer of the model."""
        rank = self.get("r", module)
        alpha = float(self.get("lora_alpha", module))
        dropout = float(self.values.get("lora_dropout", 0.0))
        rslora = self.values.get("use_rslora", False)
        return Adapter(layer, rank=rank, alpha=alpha, dropout=dropout, rslora=rslora)


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    if isinstance(value, list):
        return value
    return [value]


@functools.lru_cache(maxsize=16)
def _compiled(regex: str) -> Any:
    """Return a regular expression that is matched in time linear in a name's length; None if it is
    none that RE2 and `re`, which PEFT uses, understand alike.

    Raises:
      MissingExtraError: google-re2 is not installed.
    """
    re2 = import_extra("re2", "adapters")
    # RE2 reads `{,3}` as letters and `[[:alpha:]]` as a class; `re` does not.
    if re.search(r"\{,\d|\[\[", regex):
        return None
    options = re2.Options()
    # Otherwise RE2 writes to stderr about each expression that it cannot read.
    options.log_errors = False
    try:
        re.compile(regex)
        return re2.compile(regex, options)
    # `re` raises OverflowError for a repetition of 2**32 - 1 or more.
    except (re.error, re2.error, RecursionError, OverflowError):
        return None


def _chooses(value: Any, module: str) -> bool:
    """Return True if a regular expression is all of a module's name, or one of several names the
    end of it.
    """
    if isinstance(value, str):
        regex = _compiled(value)
        return regex is not None and regex.fullmatch(module) is not None
    return any(module == name or module.endswith(f".{name}") for name in value or ())


def make_config(adapters: Mapping[str, Adapter], others: Collection[str]) -> dict[str, Any]:
    """Return the adapter_config.json for the adapters of these modules; the model's other modules
    have none.
    """
    rslora = all(adapter.rslora for adapter in adapters.values())
    ranks_by_name, dropouts_by_name, alphas_by_name = {}, {}, {}
    for name, adapter in adapters.items():
        ranks_by_name[name] = adapter.rank
        dropouts_by_name[name] = adapter.dropout
        alphas_by_name[name] = _alpha(adapter, rslora)
    rank, ranks = _common_value(ranks_by_name)
    dropout, dropouts = _common_value(dropouts_by_name)
    if dropouts:
        exceptions = ", ".join(f"{end} {value}" for end, value in dropouts.items())
        logging.getLogger("spmd").warning(
            "%s holds one dropout, %s: that of %s is lost.", ADAPTER_CONFIG, dropout, exceptions
        )
    alpha, alphas = _common_value(alphas_by_name)
    return {
        "peft_type": "LORA",
        "bias": "none",
        "inference_mode": True,
        "r": rank,
        "rank_pattern": ranks,
        "lora_alpha": alpha,
        "alpha_pattern": alphas,
        "use_rslora": rslora,
        "lora_dropout": dropout,
        "target_modules": _ends(adapters, others),
    }


def _alpha(adapter: Adapter, rslora: bool) -> float:
    """Return the alpha with which an adapter has its scale in a file with one `use_rslora`."""
    value = adapter.alpha
    if adapter.rslora != rslora:
        value = adapter.scale * adapter.rank
    if value == int(value):
        return int(value)
    return value


def _common_value(values: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the value of most modules, and a table of the other modules' values."""
    counts = collections.Counter(values.values())
    ((most_common, _),) = counts.most_common(1)
    table: dict[str, Any] = {}
    for value in dict.fromkeys(values.values()):
        if value != most_common:
            modules = [name for name in values if values[name] == value]
            others = values.keys() - set(modules)
            table |= dict.fromkeys(_ends(modules, others), value)
    return most_common, table


def _ends(modules: Iterable[str], others: Collection[str]) -> list[str]:
    """Return ends of names, from a dot on, that the modules have and the others do not, and that
    neither begin nor end with a number.

    >>> _ends(["h.0.attn.proj", "h.1.attn.proj", "h.0.fc"], ["h.0.mlp.proj", "h.1.fc"])
    ['attn.proj', 'h.0.fc']
    """
    return sorted({_end(name, others) for name in modules})


def _end(name: str, others: Collection[str]) -> str:
    """Return the shortest end of a name that no other name has."""
    parts = name.split(".")
    if parts[-1].isdigit():
        return name
    for at in range(len(parts) - 1, 0, -1):
        end = ".".join(parts[at:])
        is_shared = any(f".{other}".endswith(f".{end}") for other in others)
        if not parts[at].isdigit() and not is_shared:
            return end
    return name
