"""The `[pipeline]`, `[sequence]` and `[experts]` tables of a TOML text."""

import dataclasses
from typing import Any

from spmd.layout.model_parallel import ORDERS, SCHEDULES, Experts, Pipeline, Sequence, model_parallel_problems
from spmd.layout.toml_server import Reader

CHOICES = {"pipeline.schedule": SCHEDULES, "sequence.order": ORDERS}
KINDS = {"pipeline": Pipeline, "sequence": Sequence, "experts": Experts}


def read_model_parallel(reader: Reader, tables: dict[str, dict[str, Any]]) -> tuple[Pipeline, Sequence, Experts]:
    """The tables as dataclasses; problems are reported to the reader."""
    sections: dict[str, Any] = {}
    for section, kind in KINDS.items():
        table, fields = tables[section], {f.name: f for f in dataclasses.fields(kind)}
        reader.unknown(table, tuple(fields), section)
        values: dict[str, Any] = {}
        for key, field in fields.items():
            if field.type is str or field.type == str | None:
                values[key] = reader.choice(table, section, key, field.default)
            else:
                values[key] = reader.value(table, key, field.default, bool if field.type is bool else int, section)
        sections[section] = kind(**values)
    entries = {(section, key): value for section, table in tables.items() for key, value in table.items()}
    reported = {(section, key) for (section, key), value in entries.items() if getattr(sections[section], key, value) != value}
    for conflict in model_parallel_problems(sections["pipeline"], sections["sequence"]):
        if (conflict.section, conflict.key) not in reported:
            line = reader.key_line(conflict.section, conflict.key) or reader.key_line("", conflict.section)
            reader.problem(f"[{conflict.section}] {conflict.key}", conflict.why, conflict.fix, line)
    return sections["pipeline"], sections["sequence"], sections["experts"]
