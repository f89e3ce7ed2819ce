"""Functions of dataclasses that a layout file spells: types of fields, checks of values that a
program passes, and conflicts between keys.
"""

import dataclasses
import json
import types
from typing import Any

from spmd.errors import OptionError, short_repr, type_name

PLAIN = (str, int, float, bool, type(None))


@dataclasses.dataclass(frozen=True)
class Conflict:
    """Keys that contradict each other: at which key, or in which rule (from 0), why, a fix, and the
    problem's kind.

    A key of another table than the one that is checked includes its table: "gradients.codec".
    """

    key: str
    why: str
    fix: str
    rule: int | None = None
    kind: str = "conflict"


def plain_types(field: dataclasses.Field) -> tuple[Any, ...]:
    """Return the types that a field declares, if all its values are words, numbers or switches; ()
    for lists and tables.
    """
    declared = (field.type,)
    if isinstance(field.type, types.UnionType):
        declared = field.type.__args__
    if all(kind in PLAIN for kind in declared):
        return declared
    return ()


def is_one_of(value: Any, kinds: tuple[type, ...]) -> bool:
    """Return whether a value has one of these types; a whole number is a float, True is not a whole
    number.
    """
    accepted = kinds
    if float in kinds:
        accepted = (*kinds, int)
    return isinstance(value, accepted) and (bool in kinds or not isinstance(value, bool))


def check_types(declared: Any) -> None:
    """Check the plain fields of a dataclass that a program makes.

    Raises:
      OptionError: the first that has a value of another type than it declares.
    """
    for field in dataclasses.fields(declared):
        kinds = plain_types(field)
        if kinds and not is_one_of(getattr(declared, field.name), kinds):
            raise wrong_type(declared, field.name, type_name(kinds[0]()))


def wrong_type(declared: Any, name: str, expected: str) -> OptionError:
    """Return the error for a field whose value has the wrong type."""
    value = getattr(declared, name)
    return OptionError(
        f"{type(declared).__name__}: {name}={value!r} is {type_name(value)}.", fix=f"{expected}."
    )


def as_rules(declared: Any, name: str, kind: type) -> None:
    """Make a tuple of a dataclass's rules; a list is taken, too.

    Raises:
      OptionError: it is none, or it holds something else than rules of this kind.
    """
    value = getattr(declared, name)
    owner = type(declared).__name__
    if not isinstance(value, tuple | list) or not all(isinstance(rule, kind) for rule in value):
        kind_name = f"spmd.{kind.__name__}"
        raise OptionError(
            f"{owner}: {name}={short_repr(value)}.",
            fix=f"a tuple of {kind_name}, such as {name}=({kind_name}(...),).",
        )
    object.__setattr__(declared, name, tuple(value))


def names(value: Any) -> tuple[str, ...]:
    """Return one name or several, as a tuple.

    >>> names("data"), names(["node", "data"])
    (('data',), ('node', 'data'))
    """
    several = (value,)
    if isinstance(value, tuple | list):
        several = tuple(value)
    if not all(isinstance(name, str) for name in several):
        raise OptionError(f"{value!r} is no name.", fix="a name, or a tuple of names.")
    return several


def changed_values(table: Any) -> dict[str, Any]:
    """Return the keys of a table that differ from their defaults, without rules; options of a codec
    are keys of its table.
    """
    has_codec = hasattr(table, "codec")
    changed = {}
    for field in dataclasses.fields(table):
        if field.name == "rules" or (has_codec and field.name == "options"):
            continue
        value = getattr(table, field.name)
        if value != field.default:
            changed[field.name] = value
    if has_codec:
        changed |= dict(table.options)
    return changed


def as_toml(value: Any) -> str:
    """Return a value as a TOML file spells it."""
    # By default json escapes a character above U+FFFF as two surrogates, which TOML refuses.
    return json.dumps(value, default=str, ensure_ascii=False)
