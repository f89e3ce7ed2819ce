"""The `[pipeline]`, `[sequence]` and `[experts]` tables of a TOML text."""

import dataclasses
from typing import Any

from spmd.layout.model_parallel import ORDERS, SCHEDULES, Experts, Pipeline, Sequence, model_parallel_problems
from spmd.layout.toml_server import Reader

CHOICES = {"pipeline.schedule": SCHEDULES, "sequence.order": ORDERS}
KINDS = {"pipeline": Pipeline, "sequence": Sequence, "experts": Experts}


def read_model_parallel(reader: Reader, tables: dict[str, dict[str, Any]]) -> tuple[Pipeline, Sequence, Experts]:
    """The tables; what is wrong with them is told to the reader."""
    found: dict[str, Any] = {}
    for section, kind in KINDS.items():
        table, fields = tables[section], {f.name: f for f in dataclasses.fields(kind)}
        reader.unknown(table, tuple(fields), section)
        words = {key for key, field in fields.items() if field.type is str or field.type == str | None}
        read = lambda key, table=table, section=section, words=words, fields=fields: (
            reader.choice(table, section, key, fields[key].default)
            if key in words
            else reader.value(table, key, fields[key].default, bool if fields[key].type is bool else int, section)
        )
        found[section] = kind(**{key: read(key) for key in fields})
    given = {(section, key): value for section, table in tables.items() for key, value in table.items()}
    unread = {(section, key) for (section, key), value in given.items() if getattr(found[section], key, value) != value}
    for clash in model_parallel_problems(found["pipeline"], found["sequence"]):
        if (clash.section, clash.key) not in unread:
            line = reader.key_line(clash.section, clash.key) or reader.key_line("", clash.section)
            reader.problem(f"[{clash.section}] {clash.key}", clash.why, clash.fix, line)
    return found["pipeline"], found["sequence"], found["experts"]
