"""What a layout says about gradients: how they meet, and what travels. Data only; `spmd.wire` does it."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from spmd.errors import OptionError, type_name
from spmd.layout.match import names

Options = tuple[tuple[str, Any], ...]


def _positive(value: Any) -> str:
    return "" if type(value) is int and value >= 1 else "a whole number from 1"


def _share(value: Any) -> str:
    return "" if type(value) in (int, float) and 0 < value <= 1 else "a share of the elements, above 0, at most 1"


def _least(value: Any) -> str:
    return "" if type(value) in (int, float) and value >= 1 else "a number from 1"


def _switch(value: Any) -> str:
    return "" if type(value) is bool else "true or false"


def _way(value: Any) -> str:
    return "" if value in ("one_shot", "ring") else '"one_shot" or "ring"'


# codec -> option -> (default, what is wrong with a value, or "")
OPTIONS: dict[str, dict[str, tuple[Any, Callable[[Any], str]]]] = {
    "exact": {},
    "bfloat16": {"reduce": ("one_shot", _way)},
    "int8": {"block": (256, _positive)},
    "float8": {"block": (256, _positive)},
    "sign": {"block": (1024, _positive)},
    "top_k": {"keep": (0.01, _share)},
    "power_sgd": {"rank": (4, _positive), "min_compression": (2.0, _least), "warm_start": (True, _switch)},
}
BIASED = ("sign", "top_k", "power_sgd")  # what they leave out is lost for good, unless it is fed back


@dataclasses.dataclass(frozen=True)
class GradientRule:
    """Gradients of parameters whose path matches `path`, and none of `except_`, travel by this codec.

    Example:
      >>> GradientRule("**/embedding", "exact").codec
      'exact'
    """

    path: str
    codec: str = "exact"
    options: Options = ()
    except_: tuple[str, ...] = ()
    line: int | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self):
        _check(self, "GradientRule", {"path": str, "codec": str})
        object.__setattr__(self, "options", _pairs(self.options, "GradientRule", ("path", "codec", "except")))
        object.__setattr__(self, "except_", names(self.except_))


@dataclasses.dataclass(frozen=True)
class Gradients:
    """How gradients of different workers meet, and in which format they travel.

    Attributes:
      reduction: "compiler", "all_reduce" or "reduce_scatter".
      codec: what travels, where no rule says otherwise; `options` are the codec's own (a dict will do).
      error_feedback: keep what a codec lost, per worker, and add it to the next gradient (float32, a gradient's size).
      allow_biased: let a biased codec run without error feedback all the same.
      start_step: steps that reduce exactly before the codecs begin.
      bucket_bytes: gradients travel together up to so many bytes (as float32); a larger one travels alone.
      exact_axes: data axes over which gradients are reduced exactly first (inside a node); codecs cross the others.
      diagnostics: measure the residuals' norm and the error of the mean; costs an exact reduction more per step.
      weights: "exact", or "bfloat16": how weights that are cut over the workers travel when they are gathered.
      rules: codecs by path.

    Example:
      >>> from spmd import Layout
      >>> Layout(gradients=Gradients("all_reduce", "int8", {"block": 128}, error_feedback=True)).gradients.options
      (('block', 128),)
    """

    reduction: str = "compiler"
    codec: str = "exact"
    options: Options | Mapping[str, Any] = ()
    error_feedback: bool = False
    allow_biased: bool = False
    start_step: int = 0
    bucket_bytes: int = 25 * 2**20
    exact_axes: tuple[str, ...] = ()
    diagnostics: bool = False
    weights: str = "exact"
    rules: tuple[GradientRule, ...] = ()

    def __post_init__(self):
        _check(
            self,
            "Gradients",
            {f.name: type(f.default) for f in dataclasses.fields(self) if f.name not in ("options", "exact_axes", "rules")},
        )
        own = tuple(f.name for f in dataclasses.fields(self))
        object.__setattr__(self, "options", _pairs(self.options, "Gradients", own))
        object.__setattr__(self, "exact_axes", names(self.exact_axes))
        rules = (self.rules,) if isinstance(self.rules, GradientRule) else self.rules
        if not isinstance(rules, tuple | list) or not all(isinstance(rule, GradientRule) for rule in rules):
            raise OptionError(f"Gradients: rules={rules!r}.", fix="a tuple of spmd.GradientRule.")
        object.__setattr__(self, "rules", tuple(rules))

    @property
    def codecs(self) -> tuple[str, ...]:
        """Every codec that is named."""
        return tuple(dict.fromkeys([self.codec, *(rule.codec for rule in self.rules)]))

    @property
    def compressed(self) -> bool:
        """Whether anything travels in another format than its own."""
        return self.codecs != ("exact",)


def _check(declared: Any, what: str, kinds: Mapping[str, type]) -> None:
    for name, kind in kinds.items():
        value = getattr(declared, name)
        if type(value) is not kind:
            raise OptionError(f"{what}: {name}={value!r} is {type_name(value)}; wanted {type_name(kind())}.")


def _pairs(options: Any, what: str, own: tuple[str, ...]) -> Options:
    """A codec's options as pairs; each can be written in a TOML file, beside the keys that are `what`'s own."""
    pairs = tuple(options.items()) if isinstance(options, Mapping) else options
    if not isinstance(pairs, tuple) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise OptionError(f"a codec's options are a dict, not {options!r}.", fix='such as {"block": 128}.')
    for key, value in pairs:
        if key in own:
            raise OptionError(f"{what}: {key} is no option of a codec.", fix=f"{what}({key}=...), beside the options.")
        if not isinstance(key, str) or type(value) not in (bool, int, float, str):
            raise OptionError(f"{what}: option {key!r} is {value!r}, {type_name(value)}.", fix="a number, a word, True or False.")
    return pairs


@dataclasses.dataclass(frozen=True)
class Conflict:
    """Things of `[gradients]` that do not go together: at which key, or in which rule (from 0), why, and a fix."""

    key: str
    why: str
    fix: str
    rule: int | None = None


def gradient_problems(gradients: Gradients) -> list[Conflict]:
    """What does not go together, whatever the model."""
    found: list[Conflict] = []
    named = [(None, gradients.codec, gradients.options), *((n, rule.codec, rule.options) for n, rule in enumerate(gradients.rules))]
    auto = gradients.reduction == "compiler"
    for rule, codec, _ in named if auto else ():
        if codec != "exact":
            why = f'"{codec}" under reduction "compiler": XLA reduces gradients itself, in their own dtype.'
            found.append(Conflict("codec", why, 'reduction = "all_reduce", or "reduce_scatter".', rule))
    for rule, codec, options in named:
        if codec in BIASED and not gradients.error_feedback and not gradients.allow_biased:
            why = f"{codec} without error feedback: what is left out is lost for good, and training may not converge."
            found.append(Conflict("codec", why, "[gradients] error_feedback = true, or allow_biased = true to go without.", rule))
        if dict(options).get("reduce") == "ring":
            if gradients.error_feedback:
                why = "a ring rounds on the way, where no worker can keep what was lost for error feedback."
                found.append(Conflict("reduce", why, 'reduce = "one_shot", or error_feedback = false.', rule))
            if gradients.exact_axes:
                found.append(Conflict("reduce", "a ring goes over all data axes at once, exact_axes or not.", 'reduce = "one_shot".', rule))
    twice = [axis for axis in dict.fromkeys(gradients.exact_axes) if gradients.exact_axes.count(axis) > 1]
    if twice:
        found.append(Conflict("exact_axes", f"names {', '.join(twice)} more than once.", "each axis once."))
    unread = ["weights", "diagnostics"] if auto else []
    unread += ["start_step", "exact_axes", "bucket_bytes", "diagnostics"] if not gradients.compressed else []
    unread += ["allow_biased"] if gradients.error_feedback or not any(codec in BIASED for codec in gradients.codecs) else []
    for field in dataclasses.fields(gradients):
        if field.name in unread and getattr(gradients, field.name) != field.default:
            why = "nothing reads it: " + ('under reduction "compiler" XLA reduces gradients itself.' if auto else "no codec here does.")
            found.append(Conflict(field.name, why, 'leave it out, or such as  reduction = "all_reduce"  codec = "bfloat16".'))
    return found
