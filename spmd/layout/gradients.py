"""The `[gradients]` table: how gradients are reduced, and with which codec. Data only; `spmd.sync`
implements it.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from spmd.base.fields import Conflict, as_rules, check_types, names
from spmd.base.tracebacks import trims_tracebacks
from spmd.errors import OptionError, type_name
from spmd.wire.codec import CODECS
from spmd.wire.reduction_registry import REDUCTIONS

Options = tuple[tuple[str, Any], ...]


@trims_tracebacks
@dataclasses.dataclass(frozen=True)
class GradientRule:
    """The codec of gradients whose parameter path matches `path` and none of `except_`.

    Args:
      path: a pattern of parameters.
      codec: its name.
      options: of the codec, pairs of name and value.
      except_: patterns of parameters that the rule leaves out.
      line: of the file; None without one.

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
        check_types(self)
        object.__setattr__(
            self, "options", _pairs(self.options, "GradientRule", ("path", "codec", "except"))
        )
        object.__setattr__(self, "except_", names(self.except_))


@trims_tracebacks
@dataclasses.dataclass(frozen=True)
class Gradients:
    """The reduction of gradients over workers, and the codec with which they are sent.

    Attributes:
      reduction: "compiler", "all_reduce", "reduce_scatter", "parameter_server", or one registered
        with `spmd.wire.register_reduction`.
      codec: the codec of gradients that no rule matches; `options` are its options (a dict is
        accepted).
      error_feedback: keep what a codec lost, per worker, and add it to the next gradient (float32,
        the size of a gradient).
      allow_biased: allow a biased codec without error feedback.
      start_step: the number of steps that reduce exactly before codecs are used.
      bucket_bytes: gradients are sent in buckets of at most this many bytes (as float32); a larger
        gradient is sent alone.
      exact_axes: data axes over which gradients are reduced exactly first (inside a node); codecs
        are used over the others.
      diagnostics: measure the residuals' norm and the error of the mean; costs one more exact
        reduction per step, in float32.
      weights: "exact" or "bfloat16": the format in which sharded weights are gathered.
      gather: when sharded weights of a stack of layers are gathered: "layer" by layer inside the
        loop over them, the "full" stack before it, or "auto": as memory and sizes say
        (docs/layouts.md). By layer, memory holds few layers' weights.
      accumulate: what several microbatches add up of weights that are gathered by layer: "local"
        gradients, full on each worker, which are reduced once per step, as those of all other
        weights are; "reduced" ones, reduced in every microbatch, which takes the memory of shards
        and sends as many times the bytes; or "auto": local ones, if a device has room.
      rules: codecs by path.
      options: of the codec, by name.

    Example:
      >>> from spmd import Layout
      >>> Layout(
      ...     gradients=Gradients("all_reduce", "int8", {"block": 128}, error_feedback=True)
      ... ).gradients.options
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
    gather: str = "auto"
    accumulate: str = "auto"
    rules: tuple[GradientRule, ...] = ()

    def __post_init__(self):
        check_types(self)
        reserved = tuple(f.name for f in dataclasses.fields(self))
        # A frozen dataclass refuses plain assignment, in its own __post_init__ too.
        object.__setattr__(self, "options", _pairs(self.options, "Gradients", reserved))
        object.__setattr__(self, "exact_axes", names(self.exact_axes))
        if isinstance(self.rules, GradientRule):
            object.__setattr__(self, "rules", (self.rules,))
        as_rules(self, "rules", GradientRule)

    @property
    def choices(self) -> list[tuple[int | None, str, Any]]:
        """Every rule, from 0, with its codec and options; None: the table itself."""
        rules = [(number, rule.codec, rule.options) for number, rule in enumerate(self.rules)]
        return [(None, self.codec, self.options), *rules]

    @property
    def codecs(self) -> tuple[str, ...]:
        """All codecs that the table or a rule names."""
        return tuple(dict.fromkeys(codec for _, codec, _ in self.choices))

    @property
    def compressed(self) -> bool:
        """Return whether any gradient is sent with a codec other than "exact"."""
        return self.codecs != ("exact",)


def _pairs(options: Any, owner: str, reserved: tuple[str, ...]) -> Options:
    """Return a codec's options as pairs that TOML can hold next to `reserved`, the keys of `owner`
    itself.
    """
    pairs = options
    if isinstance(options, Mapping):
        pairs = tuple(options.items())
    if not isinstance(pairs, tuple) or not all(
        isinstance(pair, tuple) and len(pair) == 2 for pair in pairs
    ):
        raise OptionError(
            f"a codec's options are a dict, not {options!r}.", fix='such as {"block": 128}.'
        )
    for key, value in pairs:
        if key in reserved:
            raise OptionError(
                f"{owner}: {key} is not an option of a codec.",
                fix=f"{owner}({key}=...), next to the options.",
            )
        if not isinstance(key, str) or type(value) not in (bool, int, float, str):
            raise OptionError(
                f"{owner}: option {key!r} is {value!r}, {type_name(value)}.",
                fix="a number, a string, True or False.",
            )
    return pairs


def _biased(codec: str) -> bool:
    return codec in CODECS and CODECS[codec].biased


def _is_registered(gradients: Gradients) -> bool:
    return gradients.reduction in REDUCTIONS and REDUCTIONS[gradients.reduction].make is not None


def _registered_problems(gradients: Gradients) -> list[Conflict]:
    """Return options that the function of a registered reduction does not take."""
    if not _is_registered(gradients):
        return []
    options = REDUCTIONS[gradients.reduction].options
    why = (
        f'reduction "{gradients.reduction}" does not read it; of [gradients] it reads '
        f"{', '.join(options) or 'nothing else'}."
    )
    fix = "leave it out, or a parameter {} of the registered function."
    conflicts = []
    for key in (
        "codec",
        "error_feedback",
        "start_step",
        "bucket_bytes",
        "exact_axes",
        "diagnostics",
    ):
        if key not in options and getattr(gradients, key) != getattr(Gradients, key):
            key_fix = fix.format(key)
            if key == "diagnostics":
                key_fix = "leave it out."
            conflicts.append(Conflict(key, why, key_fix, None, "unread_key"))
    if "codecs" not in options:
        for number in range(len(gradients.rules)):
            conflicts.append(Conflict("codec", why, fix.format("codecs"), number, "unread_key"))
    return conflicts


def gradient_problems(gradients: Gradients) -> list[Conflict]:
    """Return conflicts that exist for every model."""
    conflicts: list[Conflict] = []
    auto = gradients.reduction == "compiler"
    for rule, codec, _ in gradients.choices:
        if auto and codec != "exact":
            why = (
                f'"{codec}" under reduction "compiler": XLA reduces gradients itself, in their own '
                "dtype."
            )
            conflicts.append(
                Conflict("codec", why, 'reduction = "all_reduce", or "reduce_scatter".', rule)
            )
    for rule, codec, options in gradients.choices:
        if _biased(codec) and not gradients.error_feedback and not gradients.allow_biased:
            why = (
                f"{codec} without error feedback: what it drops is lost, and training may not "
                "converge."
            )
            conflicts.append(
                Conflict(
                    "codec",
                    why,
                    "[gradients] error_feedback = true, or allow_biased = true to go without.",
                    rule,
                )
            )
        if dict(options).get("reduce") == "ring":
            if gradients.error_feedback:
                why = (
                    "a ring rounds at every hop, where no worker can keep the error for error "
                    "feedback."
                )
                conflicts.append(
                    Conflict("reduce", why, 'reduce = "one_shot", or error_feedback = false.', rule)
                )
            if gradients.exact_axes:
                why = "a ring reduces over all data axes at once, so exact_axes has no effect."
                conflicts.append(Conflict("reduce", why, 'reduce = "one_shot".', rule))
    repeated = [
        axis for axis in dict.fromkeys(gradients.exact_axes) if gradients.exact_axes.count(axis) > 1
    ]
    if repeated:
        why = f"names {', '.join(repeated)} more than once."
        conflicts.append(Conflict("exact_axes", why, "each axis once."))
    conflicts += _registered_problems(gradients)
    unread = []
    if auto:
        unread = ["weights", "gather", "accumulate", "diagnostics"]
    if not (gradients.compressed or _is_registered(gradients)):
        unread += ["start_step", "exact_axes", "bucket_bytes", "diagnostics"]
    if gradients.error_feedback or not any(map(_biased, gradients.codecs)):
        unread += ["allow_biased"]
    for field in dataclasses.fields(gradients):
        if field.name in unread and getattr(gradients, field.name) != field.default:
            why = "nothing reads it: no codec here does."
            if auto:
                why = 'nothing reads it: under reduction "compiler" XLA reduces gradients itself.'
            other = 'such as  reduction = "all_reduce"  codec = "bfloat16"'
            if field.name in ("weights", "gather", "accumulate"):
                other = 'reduction = "reduce_scatter"'
            fix = f"leave it out, or {other}."
            conflicts.append(Conflict(field.name, why, fix, kind="unread_key"))
    return conflicts
