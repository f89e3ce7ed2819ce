"""The `[pipeline]` and `[sequence]` tables of a TOML text."""

import dataclasses
from typing import Any

from spmd.layout.forward import ORDERS, SCHEDULES, Pipeline, Sequence, forward_problems
from spmd.layout.toml_server import Reader

CHOICES = {"pipeline.schedule": SCHEDULES, "sequence.order": ORDERS}


def read_forward(reader: Reader, pipeline: dict[str, Any], sequence: dict[str, Any]) -> tuple[Pipeline, Sequence]:
    """The tables; what is wrong with them is told to the reader."""
    found: list[Any] = []
    for kind, section, table in ((Pipeline, "pipeline", pipeline), (Sequence, "sequence", sequence)):
        fields = {f.name: f for f in dataclasses.fields(kind)}
        reader.unknown(table, tuple(fields), section)
        words = {key for key, field in fields.items() if field.type is str or field.type == str | None}
        read = lambda key, table=table, section=section, words=words, fields=fields: (
            reader.choice(table, section, key, fields[key].default)
            if key in words
            else reader.value(table, key, fields[key].default, int, section)
        )
        found.append(kind(**{key: read(key) for key in fields}))
    given = {("pipeline", key): value for key, value in pipeline.items()} | {("sequence", key): value for key, value in sequence.items()}
    parts = {"pipeline": found[0], "sequence": found[1]}
    unread = {(section, key) for (section, key), value in given.items() if getattr(parts[section], key, value) != value}
    for clash in forward_problems(*found):
        if (clash.section, clash.key) not in unread:
            line = reader.key_line(clash.section, clash.key) or reader.key_line("", clash.section)
            reader.problem(f"[{clash.section}] {clash.key}", clash.why, clash.cure, line)
    return found[0], found[1]
