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
        shown = type_name(name)
        if name == "":
            shown = "empty"
        why = f"register({short_repr(name)}): the name is {shown}."
        raise OptionError(why, fix='such as @wire.register("ternary").')

    def add(codec: CodecClass) -> CodecClass:
        _check_class(f'register("{name}")', codec)
        other = CODECS.get(name)
        # By name and not by identity: a notebook's cell that runs again defines the class anew.
        if other is not None and _full_name(other) != _full_name(codec):
            why = f'register("{name}"): the name is that of {_full_name(other)}.'
            raise OptionError(why, fix="another name.")
        CODECS[name] = codec
        return codec

    return add


def _check_class(where: str, codec: type[Codec]) -> None:
    """Refuse what is no codec, or one that a layout file cannot make."""
    is_codec = isinstance(codec, type) and issubclass(codec, Codec)
    if not (is_codec and dataclasses.is_dataclass(codec)):
        why = f"{where}: {type_name(codec)} is no codec."
        raise OptionError(why, fix="a frozen dataclass that extends spmd.wire.Codec.")
    if not codec.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        why = f"{where}: {codec.__name__} can be changed."
        raise OptionError(why, fix="@dataclasses.dataclass(frozen=True).")
    missing = ", ".join(sorted(codec.__abstractmethods__))
    if missing:
        raise OptionError(f"{where}: {codec.__name__} lacks {missing}.", fix=f"define {missing}.")
    for field in dataclasses.fields(codec):
        # A layout file must be able to hold the value, and its type is that of the default.
        if type(field.default) not in (bool, int, float, str):
            why = f"{where}: option {field.name} of {codec.__name__} has no default that a layout "
            why += "file can hold."
            fix = f"such as  {field.name}: int = 256  (a number, a string, True or False)."
            raise OptionError(why, fix=fix)


def _full_name(codec: type) -> str:
    return f"{codec.__module__}.{codec.__qualname__}"


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
