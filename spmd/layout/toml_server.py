"""The `[parameter_server]` table of a TOML text."""

from typing import Any, Protocol

from spmd.layout.gradients import Gradients
from spmd.layout.server import FRACTIONS, KINDS, MODES, NEEDS, PLACEMENTS, ParameterServer, server_problems
from spmd.layout.timing import LINK, SECONDS, as_toml

SECTION = "parameter_server"
CHOICES = {f"{SECTION}.placement": PLACEMENTS, f"{SECTION}.mode": MODES}
# what is not a whole number: the types of TOML that will do, how errors call them, and a fix
OTHERS: dict[str, tuple[tuple[type, ...], str, str]] = {
    "compute_time": ((str, list), "a text or a list", SECONDS),
    "network": ((dict,), "a table", LINK),
    "staleness_scale": ((str,), "a string", 'such as "inverse".'),
    **{key: ((int, float), "a number", fix) for key, fix in FRACTIONS.items()},
}


class Reader(Protocol):
    """What reads the rest of the text."""

    def unknown(self, table: dict[str, Any], known: tuple[str, ...], section: str) -> None: ...  # noqa: D102
    def choice(self, table: dict[str, Any], section: str, key: str, default: Any) -> Any: ...  # noqa: D102
    def value(self, table: dict[str, Any], key: str, default: Any, kinds: Any, section: str = "") -> Any: ...  # noqa: D102
    def problem(self, where: str, why: str, fix: str, line: int | None) -> None: ...  # noqa: D102
    def key_line(self, section: str, key: str) -> int | None: ...  # noqa: D102


def read_server(reader: Reader, table: dict[str, Any], gradients: Gradients) -> ParameterServer:
    """The table as a `ParameterServer`; what is wrong with it is told to the reader."""
    reader.unknown(table, tuple(KINDS), SECTION)
    values: dict[str, Any] = {}
    for key in KINDS:
        default = getattr(ParameterServer(), key)
        if f"{SECTION}.{key}" in CHOICES:
            values[key] = reader.choice(table, SECTION, key, default)
        elif key in OTHERS and key in table:
            kinds, name, fix = OTHERS[key]
            given, held = table[key], lambda part: type(part) in (int, float) and abs(part) < 2**63
            if not isinstance(given, kinds) or isinstance(given, bool):
                why = f"{as_toml(given)} is not {name}."
            elif isinstance(given, list) and not all(type(part) is float or held(part) for part in given):
                why, fix = f"{as_toml(given)} are no seconds.", "such as [1.0, 1.0, 3.0]."
            else:
                why = "a number that is too large." if type(given) is int and not held(given) else ""
            if why:
                reader.problem(f"[{SECTION}] {key}", why, fix, reader.key_line(SECTION, key))
            else:
                values[key] = given
        elif key in table:
            values[key] = reader.value(table, key, default, bool if bool in KINDS[key] else int, SECTION)
    found = ParameterServer(**values)
    unread = {key for key in KINDS if key in table and getattr(found, key) == getattr(ParameterServer(), key) != table[key]}
    for clash in server_problems(found, gradients):
        if clash.key == "mode" and NEEDS.get(found.mode) in unread:
            continue  # it is there, and what is wrong with it has been told
        if clash.rule is not None:
            reader.problem(f"[[gradients.rules]] rule {clash.rule + 1}", clash.why, clash.fix, gradients.rules[clash.rule].line)
            continue
        section, _, key = clash.key.rpartition(".")
        section = section or SECTION
        line = reader.key_line(section, key) if key else reader.key_line("", SECTION)
        reader.problem(f"[{section}] {key}".strip(), clash.why, clash.fix, line)
    return found
