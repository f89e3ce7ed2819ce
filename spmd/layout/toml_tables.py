"""Reads the tables and values of a TOML text, and collects every problem with its line."""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from spmd.base.fields import Conflict, as_toml, is_one_of, plain_types
from spmd.errors import Problem, SpmdError, closest, did_you_mean
from spmd.layout.gradients import GradientRule
from spmd.layout.model_parallel import ORDERS, SCHEDULES
from spmd.layout.remat import SAVES
from spmd.layout.schema import IMPLEMENTATIONS, LOOPS
from spmd.layout.trained import FROZEN
from spmd.wire.codec import CODECS
from spmd.wire.reduction_registry import REDUCTIONS
from spmd.wire.server.declaration import MODES, PLACEMENTS

# The registries themselves, not copies: a codec that the user registers is a choice at once.
CHOICES = {
    "gradients.reduction": REDUCTIONS,
    "gradients.codec": CODECS,
    "gradients.weights": ("exact", "bfloat16"),
    "gradients.gather": ("auto", "layer", "full"),
    "gradients.accumulate": ("auto", "local", "reduced"),
    "parameter_server.placement": PLACEMENTS,
    "parameter_server.mode": MODES,
    "pipeline.schedule": SCHEDULES,
    "sequence.order": ORDERS,
    "attention.implementation": IMPLEMENTATIONS,
    "recurrence.implementation": LOOPS,
    "memory.optimizer": ("device", "host"),
    "optimizer.matrices": ("compiler", "owner"),
    "remat.save": SAVES,
    "train.frozen": FROZEN,
}
# The kind of a problem with a name that the user's code may add.
UNREGISTERED = "unregistered"
# functions of spmd.wire that add a choice
ADDED_BY = {"gradients.reduction": "register_reduction", "gradients.codec": "register"}
KINDS = {  # Python types: how errors name them, and an example
    str: ("a string", '"data"'),
    bool: ("true or false", "true"),
    int: ("a whole number", "2"),
    float: ("a number", "0.5"),
    list: ("a list", '["a", "b"]'),
    dict: ("a table", '{ key = "value" }'),
}


class Tables:
    """The lines of a TOML text, and the problems that were found in its tables."""

    def __init__(self, text: str):
        self.lines = text.splitlines()
        self.problems: list[Problem] = []
        # Where the problems are, without line numbers.
        self.places: set[str] = set()
        # The number of the rule that is being read, from 1.
        self.rule_number: int | None = None

    def problem(
        self,
        where: str,
        why: str,
        fix: str,
        line: int | None = None,
        kind: str = "invalid_value",
    ) -> None:
        """Collect a problem."""
        self.places.add(where)
        text = where
        if line:
            text = f"line {line}: {where}"
        self.problems.append(Problem(text, [why], fix, rule=self.rule_number, line=line, kind=kind))

    def key_problem(
        self, section: str, key: str, why: str, fix: str, kind: str = "invalid_value"
    ) -> None:
        """Collect a problem of a key inside `[section]`; of the top of the file when section is
        empty, of the section when key is.
        """
        where = key
        if section:
            where = f"[{section}] {key}".strip()
        line = None
        if key:
            line = self.key_line(section, key)
        if line is None:
            parent, _, name = section.rpartition(".")
            line = self.key_line(parent, name)
        self.problem(where, why, fix, line, kind)

    def conflicts(
        self, section: str, conflicts: list[Conflict], rules: Sequence[GradientRule] = ()
    ) -> None:
        """Collect conflicts between the keys of a section, except at keys whose value is a problem
        already.
        """
        reported = set(self.places)
        for conflict in conflicts:
            if conflict.rule is not None:
                self.rule_number = conflict.rule + 1
                where = f"[[gradients.rules]] rule {self.rule_number}"
                line = rules[conflict.rule].line
                self.problem(where, conflict.why, conflict.fix, line, conflict.kind)
                self.rule_number = None
                continue
            table, _, key = conflict.key.rpartition(".")
            if f"[{table or section}] {key}" not in reported:
                self.key_problem(table or section, key, conflict.why, conflict.fix, conflict.kind)

    def key_line(self, section: str, key: str) -> int | None:
        """Return the line of `key` inside `[section]` (the top of the file when section is
        empty).
        """
        # Python's tomllib gives no lines of keys: they are found in the text.
        table = key
        if section:
            table = f"{section}.{key}"
        # Keys above the first header are those of the top of the file.
        inside = not section
        for number, line in enumerate(self.lines, 1):
            header = re.match(r"""\s*\[+\s*["']?([\w.]+)["']?\s*\]+""", line)
            if header:
                inside = header.group(1) == section
                if header.group(1) == table:
                    return number
            elif inside and re.match(rf'\s*"?{re.escape(key)}"?\s*[=.]', line):
                return number
        return None

    def unknown(self, table: dict[str, Any], keys: Sequence[str], section: str) -> None:
        """Collect keys of a table that nothing reads."""
        for key in table:
            if key not in keys:
                where = key
                if section:
                    where = f"[{section}] {key}"
                line = self.key_line(section, key)
                fix = did_you_mean(key, keys)
                self.problem(f"unknown key: {where}", "nothing reads it.", fix, line, "unknown_key")

    def unknown_in_rule(
        self, item: dict[str, Any], keys: tuple[str, ...], where: str, line: int | None
    ) -> None:
        """Collect keys of a rule that nothing reads."""
        for key in item:
            if key not in keys:
                fix = did_you_mean(key, keys)
                self.problem(
                    f"{where}: unknown key {key}", "nothing reads it.", fix, line, "unknown_key"
                )

    def items(
        self, table: dict[str, Any], key: str, section: str = ""
    ) -> Iterator[tuple[dict[str, Any], str, int | None]]:
        """Yield the tables of a list of rules, each with its name in errors and its line."""
        header = key
        if section:
            header = f"{section}.{key}"
        items = table.get(key, [])
        if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
            self.problem(
                header,
                "is not a list of rules.",
                f"write [[{header}]] on a line of its own.",
                self.key_line("", header),
            )
            return
        pattern = rf"\s*\[\[\s*{re.escape(header)}\s*\]\]"
        lines: list[int | None] = [
            number for number, line in enumerate(self.lines, 1) if re.match(pattern, line)
        ]
        # Rules in one inline list, `params = [{...}]`, have no header of their own.
        lines += [None] * (len(items) - len(lines))
        for number, item in enumerate(items, 1):
            self.rule_number = number
            yield item, f"[[{header}]] rule {number}", lines[number - 1]
        self.rule_number = None

    def table(self, data: dict[str, Any], key: str) -> dict[str, Any]:
        """Return the table `[key]`; an empty one if there is none."""
        table = data.get(key, {})
        if isinstance(table, dict):
            return table
        self.key_problem(
            "", key, f"{as_toml(table)} is not a table.", f"write [{key}] on a line of its own."
        )
        return {}

    def value(
        self,
        table: dict[str, Any],
        section: str,
        key: str,
        default: Any,
        *kinds: type,
        fix: str = "",
    ) -> Any:
        """Return a value of one of these types, or the default with a problem."""
        value = table.get(key, default)
        why = ""
        if key in table and not is_one_of(value, kinds):
            why = f"{as_toml(value)} is not {' or '.join(KINDS[kind][0] for kind in kinds)}."
        elif float in kinds and isinstance(value, int) and not is_number(value):
            why = "the number is too large."
        if not why:
            return value
        self.key_problem(section, key, why, fix or f"such as {KINDS[kinds[0]][1]}.")
        return default

    def choice(
        self, table: dict[str, Any], section: str, key: str, default: Any, fix: str = ""
    ) -> str | None:
        """Return a string, one of `CHOICES` if they list the key."""
        choices = CHOICES.get(f"{section}.{key}")
        # Values of other types are reported below, with the choices.
        if choices and key in table and not isinstance(table[key], str):
            table = {**table, key: as_toml(table[key])}
        value = self.value(table, section, key, default, str, fix=fix)
        if not choices or value is None or value in choices:
            return value
        near = closest(value, choices)
        fix = f"this version knows: {', '.join(choices)}."
        if near:
            fix = f'did you mean "{near}"? This version knows: {", ".join(choices)}.'
        fix += register_hint(f"{section}.{key}", value)
        kind = "invalid_value"
        if f"{section}.{key}" in ADDED_BY:
            kind = UNREGISTERED
        self.key_problem(section, key, f'no {key} "{value}".', fix, kind)
        # The value that was probably meant, so that no further problem follows from it.
        return near or default

    def fields(
        self,
        table: dict[str, Any],
        section: str,
        kind: type,
        fixes: Mapping[str, str] = MappingProxyType({}),
    ) -> dict[str, Any]:
        """Return the fields of a dataclass that are words, numbers or switches. Other keys are
        problems, unless it has options of codecs.

        Args:
          fixes: examples of valid values, by key.
        """
        if not hasattr(kind, "options"):
            self.unknown(table, [field.name for field in dataclasses.fields(kind)], section)
        values: dict[str, Any] = {}
        for field in dataclasses.fields(kind):
            kinds = plain_types(field)
            fix = fixes.get(field.name, "")
            if str in kinds and int not in kinds:
                values[field.name] = self.choice(table, section, field.name, field.default, fix)
            elif kinds:
                several = [kind for kind in kinds if kind is not type(None)]
                values[field.name] = self.value(
                    table, section, field.name, field.default, *several, fix=fix
                )
        return values


OTHER_WORDS = {  # of other languages, by what TOML has in their place
    **dict.fromkeys(
        ("None", "null", "nil"),
        '"-" for a dim that is not sharded, such as ["-", "data"]; a key without a value is left '
        "out.",
    ),
    **dict.fromkeys(("True", "TRUE"), "true, in small letters."),
    **dict.fromkeys(("False", "FALSE"), "false, in small letters."),
}


def syntax_error(
    error: type[SpmdError], text: str, where: str, message: str, fix: str
) -> SpmdError:
    """Return an error with the message of the TOML parser, and the line at which it stopped; `fix`
    ends with a place where valid text is seen.
    """
    fix = f"strings in double quotes, one key = value on a line; {fix}"
    # Before Python 3.14 the place of a TOMLDecodeError is in its text only. It has none for an
    # unexpected end of the document.
    place = re.fullmatch(r"(.*) \(at line (\d+), column (\d+)\)", message)
    if not place:
        return error(f"{where} is not TOML: {message}.", fix=fix, kind="syntax")
    line = int(place[2])
    source = text.splitlines()[line - 1]
    word = re.match(r"[A-Za-z_]\w*", source[int(place[3]) - 1 :])
    if word:
        fix = OTHER_WORDS.get(word[0], fix)
    why = f"{where}, line {line} is not TOML: {place[1]} (column {place[3]}).\n    {source}"
    return error(why, fix=fix, kind="syntax", line=line)


def register_hint(key: str, name: str) -> str:
    """Return the end of a fix that adds a value of `[gradients]` of one's own; "" for keys whose
    values are fixed.
    """
    if key not in ADDED_BY:
        return ""
    return f' One of your own: @wire.{ADDED_BY[key]}("{name}"), before the layout is read.'


def is_number(value: Any) -> bool:
    """Return whether a value is a number of at most 64 bits."""
    # TOML has 64-bit integers, but Python's tomllib returns larger ones too.
    return type(value) is float or (type(value) is int and abs(value) < 2**63)
