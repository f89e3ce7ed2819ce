"""The `[parameter_server]` table of a TOML text."""

from typing import Any, Protocol

from spmd.layout.gradients import Conflict, Gradients
from spmd.layout.server import FRACTIONS, KINDS, MODES, NEEDS, PLACEMENTS, ParameterServer, server_problems
from spmd.layout.timing import LINK, SECONDS, as_toml

SECTION = "parameter_server"
CHOICES = {f"{SECTION}.placement": PLACEMENTS, f"{SECTION}.mode": MODES}
# keys that are not integers: the TOML types they accept, how errors name these, and an example
OTHERS: dict[str, tuple[tuple[type, ...], str, str]] = {
    "compute_time": ((str, list), "a text or a list", SECONDS),
    "network": ((dict,), "a table", LINK),
    "staleness_scale": ((str,), "a string", 'such as "inverse".'),
    **{key: ((int, float), "a number", fix) for key, fix in FRACTIONS.items()},
}


class Reader(Protocol):
    """The reader of the rest of the file."""

    def unknown(self, table: dict[str, Any], known: tuple[str, ...], section: str) -> None: ...  # noqa: D102
    def choice(self, table: dict[str, Any], section: str, key: str, default: Any) -> Any: ...  # noqa: D102
    def value(self, table: dict[str, Any], key: str, default: Any, kinds: Any, section: str = "") -> Any: ...  # noqa: D102
    def problem(self, where: str, why: str, fix: str, line: int | None, kind: str = ...) -> None: ...  # noqa: D102
    def gradient_conflict(self, conflict: Conflict, gradients: Gradients) -> None: ...  # noqa: D102
    def key_line(self, section: str, key: str) -> int | None: ...  # noqa: D102


def read_server(reader: Reader, table: dict[str, Any], gradients: Gradients) -> ParameterServer:
    """The table as a `ParameterServer`; problems are reported to the reader."""
    reader.unknown(table, tuple(KINDS), SECTION)
    values: dict[str, Any] = {}
    for key in KINDS:
        default = getattr(ParameterServer(), key)
        if f"{SECTION}.{key}" in CHOICES:
            values[key] = reader.choice(table, SECTION, key, default)
        elif key in OTHERS and key in table:
            kinds, name, fix = OTHERS[key]
            value = table[key]
            if not isinstance(value, kinds) or isinstance(value, bool):
                why = f"{as_toml(value)} is not {name}."
            elif isinstance(value, list) and not all(type(part) is float or _fits_int64(part) for part in value):
                why, fix = f"{as_toml(value)} is not a list of seconds.", "such as [1.0, 1.0, 3.0]."
            else:
                why = "the number is too large." if type(value) is int and not _fits_int64(value) else ""
            if why:
                reader.problem(f"[{SECTION}] {key}", why, fix, reader.key_line(SECTION, key))
            else:
                values[key] = value
        elif key in table:
            values[key] = reader.value(table, key, default, bool if bool in KINDS[key] else int, SECTION)
    server = ParameterServer(**values)
    unread = {key for key in KINDS if key in table and getattr(server, key) == getattr(ParameterServer(), key) != table[key]}
    for conflict in server_problems(server, gradients):
        if conflict.key == "mode" and NEEDS.get(server.mode) in unread:
            continue  # the key is present, and its problem is reported already
        if conflict.rule is not None:
            reader.gradient_conflict(conflict, gradients)
            continue
        section, _, key = conflict.key.rpartition(".")
        section = section or SECTION
        line = reader.key_line(section, key) if key else reader.key_line("", SECTION)
        reader.problem(f"[{section}] {key}".strip(), conflict.why, conflict.fix, line, conflict.kind)
    return server


def _fits_int64(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 2**63
