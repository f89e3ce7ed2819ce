"""Codecs: the wire formats of gradients, one file per codec, and the names by which layouts know
them.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from spmd.errors import OptionError, did_you_mean, short_repr, type_name
from spmd.wire.codec.base import Codec
from spmd.wire.codec.bfloat16 import Bfloat16
from spmd.wire.codec.exact import Exact
from spmd.wire.codec.float8 import Float8
from spmd.wire.codec.int8 import Int8
from spmd.wire.codec.power_sgd import PowerSgd
from spmd.wire.codec.sign import Sign
from spmd.wire.codec.top_k import TopK

CodecClass = TypeVar("CodecClass", bound=type[Codec])

CODECS: dict[str, type[Codec]] = {
    "exact": Exact,
    "bfloat16": Bfloat16,
    "int8": Int8,
    "float8": Float8,
    "sign": Sign,
    "top_k": TopK,
    "power_sgd": PowerSgd,
}


def register(name: str) -> Callable[[CodecClass], CodecClass]:
    """A decorator that gives a codec a name, by which layout files, plans and `spmd.fit` know it,
    with its fields as options.

    Args:
      name: of the codec in layout files.

    Returns:
      A decorator, which returns the class.

    Raises:
      OptionError: it is not a frozen dataclass that extends `Codec`, a member is missing, an option
        has no default that TOML can hold, or the name is another codec's. The same class may be
        registered again, as a notebook does when a cell runs twice.

    Example:
      >>> @register("halved")
      ... @dataclasses.dataclass(frozen=True)
      ... class Halved(Bfloat16):
      ...     pass
      >>> make_codec("halved", {}), CODECS.pop("halved") is Halved
      (Halved(reduce='one_shot'), True)
    """

    if not isinstance(name, str) or not name:
        found = "empty" if name == "" else type_name(name)
        raise OptionError(
            f"register({short_repr(name)}): the name is {found}.",
            fix='such as @wire.register("ternary").',
        )

    def add(codec: CodecClass) -> CodecClass:
        if not (
            isinstance(codec, type) and issubclass(codec, Codec) and dataclasses.is_dataclass(codec)
        ):
            why = f'register("{name}"): {type_name(codec)} is no codec.'
            raise OptionError(why, fix="a frozen dataclass that extends spmd.wire.Codec.")
        if not codec.__dataclass_params__.frozen:  # type: ignore[attr-defined]
            raise OptionError(
                f'register("{name}"): {codec.__name__} can be changed.',
                fix="@dataclasses.dataclass(frozen=True).",
            )
        if missing := sorted(codec.__abstractmethods__):
            raise OptionError(
                f'register("{name}"): {codec.__name__} lacks {", ".join(missing)}.',
                fix=f"define {', '.join(missing)}.",
            )
        for field in dataclasses.fields(codec):
            if type(field.default) not in (bool, int, float, str):
                raise OptionError(
                    f'register("{name}"): option {field.name} of {codec.__name__} has no default '
                    "that a layout file can hold.",
                    fix=f"such as  {field.name}: int = 256  (a number, a string, True or False).",
                )
        other = CODECS.get(name)
        if other and (other.__module__, other.__qualname__) != (
            codec.__module__,
            codec.__qualname__,
        ):
            raise OptionError(
                f'register("{name}"): the name is that of {other.__module__}.{other.__qualname__}.',
                fix="another name.",
            )
        CODECS[name] = codec
        return codec

    return add


def codec_class(name: str) -> type[Codec]:
    """The codec of a name.

    Raises:
      OptionError: there is none.
    """
    if name not in CODECS:
        raise OptionError(f'no codec "{name}".', fix=did_you_mean(name, CODECS))
    return CODECS[name]


def codec_options(name: str) -> tuple[str, ...]:
    """The options of a codec.

    >>> codec_options("power_sgd")
    ('rank', 'min_compression', 'warm_start')
    """
    return tuple(field.name for field in dataclasses.fields(codec_class(name)))  # type: ignore[arg-type]


def make_codec(name: str, options: Mapping[str, Any] | tuple[tuple[str, Any], ...]) -> Codec:
    """The codec that a layout names, with its options.

    >>> make_codec("int8", {"block": 128})
    Int8(block=128)
    """
    return codec_class(name)(**dict(options))
