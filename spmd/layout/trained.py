"""The `[train]` table and the `[[adapters]]` rules: which parameters are trained, and how the
others are kept.
"""

import dataclasses
from collections.abc import Iterator

from spmd.base.fields import Conflict, check_types, names
from spmd.base.tracebacks import trims_tracebacks
from spmd.errors import OptionError

# Dtypes and formats of frozen weights.
FROZEN = ("bfloat16", "float16", "int8", "nf4")
ADAPTER_RANGES = {  # of values of an adapter: whether one is in it, and in words
    "rank": (lambda value: value >= 1, "a whole number from 1."),
    "alpha": (lambda value: value > 0, "a number above 0."),
    "dropout": (lambda value: 0 <= value < 1, "a number from 0 to 1, without 1."),
    "rslora": (lambda value: True, "true or false."),
}


@trims_tracebacks
@dataclasses.dataclass(frozen=True)
class Train:
    """The parameters that are trained, by path: all that match `include` and none of `exclude`;
    adapters always are.

    Without `include`, adapters alone are trained if there are any, and all parameters if not.
    `frozen` says how frozen kernels are kept: "bfloat16", "float16", "int8" or "nf4" (Dettmers et
    al., arXiv:2305.14314); None: in the dtype in which they come. For "int8" and "nf4", `block`
    values along dim -2, the inputs of a layer, share a scale.

    Args:
      include: patterns of parameters that are trained; a string is one.
      exclude: patterns of those among them that are not.
      frozen: how the others are kept; None: as they come.
      block: values that share a scale, of dim -2.

    Example:
      >>> Train(include="head/**", frozen="bfloat16").include
      ('head/**',)
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    frozen: str | None = None
    block: int = 64

    def __post_init__(self):
        check_types(self)
        for name in ("include", "exclude"):
            object.__setattr__(self, name, names(getattr(self, name)))
        if self.frozen is not None and self.frozen not in FROZEN:
            raise OptionError(f"Train: frozen={self.frozen!r}.", fix=f"one of {', '.join(FROZEN)}.")
        if self.block < 1:
            raise OptionError(f"Train: block={self.block}.", fix="a whole number from 1.")


@trims_tracebacks
@dataclasses.dataclass(frozen=True)
class Adapter:
    """A low-rank adapter (LoRA, Hu et al., arXiv:2106.09685) on every `nnx.Linear` whose path
    matches `modules`, and none of `except_`.

    The layer then computes `x @ kernel + scale * (dropout(x) @ lora_a) @ lora_b`, where `scale` is
    `alpha / rank`, or `alpha / sqrt(rank)` with `rslora` (Kalajdzievski, arXiv:2312.03732).
    `lora_b` begins as zeros. `line` is where the file says so.

    Args:
      modules: a pattern of `nnx.Linear` layers.
      rank: columns of `lora_a`, rows of `lora_b`.
      alpha: the numerator of `scale`.
      dropout: the share of the adapter's inputs that are dropped in training, from 0 to 1.
      rslora: whether `scale` is divided by the root of the rank.
      except_: patterns of layers that it leaves out.
      line: of the file; None without one.

    Example:
      >>> Adapter("**/{query,value}", rank=16, alpha=32.0).scale
      2.0
    """

    modules: str
    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    rslora: bool = False
    except_: tuple[str, ...] = ()
    line: int | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self):
        check_types(self)
        object.__setattr__(self, "except_", names(self.except_))
        for name, (in_range, fix) in ADAPTER_RANGES.items():
            if not in_range(value := getattr(self, name)):
                raise OptionError(f"Adapter: {name}={value}.", fix=fix)

    @property
    def scale(self) -> float:
        """The factor of the adapter's output."""
        if self.rslora:
            # With alpha / rank the adapter's gradients shrink as the rank grows.
            return self.alpha / self.rank**0.5
        return self.alpha / self.rank


def train_problems(train: Train, *, adapters: bool) -> Iterator[Conflict]:
    """Yield keys of `[train]` that nothing reads. `adapters`: whether the layout has some."""
    if train.block != Train().block and train.frozen not in ("int8", "nf4"):
        yield Conflict(
            "block",
            "of scales, which only quantized weights have.",
            'frozen = "int8" or "nf4".',
            kind="unread_key",
        )
    if adapters and train.exclude and not train.include:
        why = "without include, adapters alone are trained, so there is nothing to exclude."
        yield Conflict("exclude", why, "leave it out, or an include.", kind="unread_key")
