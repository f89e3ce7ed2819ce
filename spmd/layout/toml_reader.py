"""TOML to `Layout`, with the line number of each rule and of each problem."""

import dataclasses
import os
import re
import tomllib
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

from spmd.errors import LayoutError, Problem, closest, did_you_mean, raise_problems, short_repr, type_name
from spmd.layout.gradients import Conflict, GradientRule, Gradients, Options, gradient_problems
from spmd.layout.schema import Batch, Default, Layout, OptimizerState, Remat, Rule
from spmd.layout.timing import as_toml
from spmd.layout.toml_model_parallel import CHOICES as FORWARD_CHOICES, read_model_parallel
from spmd.layout.toml_server import CHOICES as SERVER_CHOICES, read_server
from spmd.layout.toml_writer import dumps
from spmd.path_match import compiled
from spmd.specs import REPLICATED, Entry, Spec
from spmd.wire.codec import CODECS, codec_options
from spmd.wire.codec.base import option_problem

CHOICES = {
    "gradients.reduction": ("compiler", "all_reduce", "reduce_scatter", "parameter_server"),
    "gradients.codec": CODECS,
    "gradients.weights": ("exact", "bfloat16"),
    **SERVER_CHOICES,
    **FORWARD_CHOICES,
    "remat.save": ("everything", "dots", "nothing"),
}


KINDS = {  # Python types: how errors name them, and an example
    str: ("a string", '"data"'),
    bool: ("true or false", "true"),
    int: ("a whole number", "2"),
    float: ("a number", "0.5"),
    list: ("a list", '["a", "b"]'),
}


def shipped_folder() -> Path:
    """Where the shipped layouts are: inside the installed package, or `layouts/` of a source checkout."""
    inside = Path(str(resources.files("spmd"))) / "layouts"
    return inside if inside.is_dir() else Path(__file__).resolve().parents[2] / "layouts"


def shipped() -> dict[str, Path]:
    """The layouts that come with the library, by name."""
    return {path.stem: path for path in sorted(shipped_folder().glob("*.toml"))}


def load(source: str | Path | Layout) -> Layout:
    """A shipped layout's name, a path to a TOML file, or a `Layout`, as a checked `Layout`.

    Raises:
      LayoutError: no such layout or file, invalid TOML, or unknown keys and values: all problems of the file at once, each
        with its line.
    """
    if isinstance(source, Layout):
        loads(dumps(source), f'layout "{source.name}"', written=False)  # the same checks as for a file
        return source
    if not isinstance(source, str | Path):
        known = ", ".join(shipped())
        raise LayoutError(
            f"layout={short_repr(source)} is {type_name(source)}.",
            fix=f"a path to a TOML file, a spmd.Layout, or one of the shipped: {known}.",
        )
    known, path = shipped(), Path(source)
    if str(source) in known:
        path = known[str(source)]
    elif path.suffix != ".toml" and not os.path.isfile(path):
        fix = did_you_mean(str(source), known).replace("known:", "a path to a TOML file, or one of the shipped:")
        raise LayoutError(f'no layout "{source}" is shipped, and no such file exists.', fix=f"{fix}")
    elif not os.path.isfile(path):
        near = closest(path.name, [other.name for other in path.parent.glob("*.toml")]) if os.path.isdir(path.parent) else None
        fix = f'did you mean "{path.parent / near}"?' if near else "check the path; shipped: " + ", ".join(known) + "."
        raise LayoutError(f"layout file {path} does not exist.", fix=fix)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise LayoutError(f"{_display(path)} is not UTF-8 text (byte {error.start}).", fix="save it as UTF-8.") from error
    return loads(text, _display(path), path.stem)


def _display(path: Path) -> str:
    """A shipped file by its short name; a user's file as given."""
    return f"layouts/{path.name}" if path.parent == shipped_folder() else str(path)


def loads(text: str, where: str = "layout", name: str = "layout", *, written: bool = True) -> Layout:
    """A layout from TOML text. Errors call it `where`, and give line numbers unless `written` is False (generated text)."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise LayoutError(_syntax_text(text, where, str(error)), kind="syntax") from error
    reader = _Reader(text if written else "")
    layout = dataclasses.replace(reader.layout(data, name), source=where)
    problems = sorted(reader.problems, key=lambda problem: problem.line or len(text))
    raise_problems(LayoutError, f"{where} cannot be read", problems)
    return layout


def _syntax_text(text: str, where: str, message: str) -> str:
    """The parser's message, with the line at which it stopped."""
    fix = "\n    fix: strings in double quotes, one key = value on a line; `spmd layouts show data_parallel` prints a layout that is right."
    found = re.fullmatch(r"(.*) \(at line (\d+), column (\d+)\)", message)
    if not found:
        return f"{where} is not TOML: {message}.{fix}"
    line = int(found.group(2))
    return f"{where}, line {line} is not TOML: {found.group(1)} (column {found.group(3)}).\n    {text.splitlines()[line - 1]}{fix}"


class _Reader:
    """Reads parsed TOML and collects every problem with its line."""

    def __init__(self, text: str):
        self.lines = text.splitlines()
        self.problems: list[Problem] = []
        self.places: set[str] = set()  # where the problems are, without line numbers
        self.rule_number: int | None = None  # of the rule that is being read, from 1

    def layout(self, data: dict[str, Any], name: str) -> Layout:
        self.unknown(data, tuple(f.name for f in dataclasses.fields(Layout) if f.compare), "")
        pipeline, sequence, experts = read_model_parallel(
            self, {name: self.table(data, name) for name in ("pipeline", "sequence", "experts")}
        )
        return Layout(
            name=name,
            description=self.value(data, "description", "", str),
            mesh=self.mesh(self.table(data, "mesh")),
            batch=self.batch(self.table(data, "batch")),
            params=self.rules(data, "params"),
            axes=self.axes(self.table(data, "axes")),
            activations=self.rules(data, "activations"),
            default=self.default(self.table(data, "default")),
            optimizer=self.section(data, "optimizer", OptimizerState),
            gradients=(gradients := self.gradients(self.table(data, "gradients"))),
            parameter_server=read_server(self, self.table(data, "parameter_server"), gradients),
            remat=self.remat(self.table(data, "remat")),
            pipeline=pipeline,
            sequence=sequence,
            experts=experts,
        )

    # one method per kind of value ----------------------------------------------------------------------------------

    def problem(self, where: str, why: str, fix: str = "", line: int | None = None, kind: str = "invalid_value") -> None:
        self.places.add(where)
        text = f"line {line}: {where}" if line else where
        self.problems.append(Problem(text, [why], fix, rule=self.rule_number, line=line, kind=kind))

    def line(self, pattern: str, nth: int = 0) -> int | None:
        found = [number for number, line in enumerate(self.lines, 1) if re.match(pattern, line)]
        return found[nth] if nth < len(found) else None

    def key_line(self, section: str, key: str) -> int | None:
        """The line of `key` inside `[section]` (the top of the file when section is empty)."""
        inside = not section
        for number, line in enumerate(self.lines, 1):
            header = re.match(r"""\s*\[+\s*["']?([\w.]+)["']?\s*\]+""", line)
            if header:
                inside = header.group(1) == section
                if header.group(1) == (f"{section}.{key}" if section else key):
                    return number
            elif inside and re.match(rf'\s*"?{re.escape(key)}"?\s*[=.]', line):
                return number
        return None

    def unknown(self, table: dict[str, Any], known: tuple[str, ...], section: str) -> None:
        for key in table:
            if key not in known:
                where, line = f"[{section}] {key}" if section else key, self.key_line(section, key)
                self.problem(f"unknown key: {where}", "nothing reads it.", did_you_mean(key, known), line, "unknown_key")

    def value(self, table: dict[str, Any], key: str, default: Any, kinds: Any, section: str = "") -> Any:
        value = table.get(key, default)
        if key in table and (not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool)):
            kind = kinds if isinstance(kinds, type) else kinds[-1]
            where = f"[{section}] {key}" if section else key
            self.problem(where, f"{as_toml(value)} is not {KINDS[kind][0]}.", f"such as {KINDS[kind][1]}.", self.key_line(section, key))
            return default
        return value

    def table(self, data: dict[str, Any], key: str) -> dict[str, Any]:
        table = data.get(key, {})
        if isinstance(table, dict):
            return table
        self.problem(key, f"{as_toml(table)} is not a table.", f"write [{key}] on a line of its own.", self.key_line("", key))
        return {}

    def mesh(self, table: dict[str, Any]) -> tuple[tuple[str, int], ...]:
        sizes = {axis: self.value(table, axis, -1, int, "mesh") for axis in table}
        wrong = [axis for axis, size in sizes.items() if size < 1 and size != -1]
        for axis in wrong:
            self.problem(f"[mesh] {axis}", f"size {sizes[axis]}.", "a number from 1, or one -1.", self.key_line("mesh", axis))
        if list(sizes.values()).count(-1) > 1:
            self.problem("[mesh]", "more than one -1.", "give all sizes but one.", self.key_line("", "mesh"))
        return tuple(sizes.items())

    def spec(self, value: Any, where: str, line: int | None) -> Spec:
        def is_axis(entry: Any) -> bool:
            return isinstance(entry, str) and entry != ""

        def is_entry(entry: Any) -> bool:
            return is_axis(entry) or (isinstance(entry, list) and bool(entry) and all(map(is_axis, entry)))

        if not (isinstance(value, list) and all(map(is_entry, value))):
            why = f"spec {as_toml(value)} is not a list of mesh axes."
            self.problem(where, why, 'one entry per dim, "-" for replicated, such as ["data", "-"].', line)
            return ()
        return tuple(_entry(entry) for entry in value)

    def rules(self, table: dict[str, Any], key: str, section: str = "") -> tuple[Rule, ...]:
        return tuple(self.rule(*found) for found in self.items(table, key, section))

    def items(self, table: dict[str, Any], key: str, section: str) -> Iterator[tuple[dict[str, Any], str, int | None]]:
        """The tables of a list of rules, each with its name in errors and its line."""
        header, items = f"{section}.{key}" if section else key, table.get(key, [])
        if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
            self.problem(header, "is not a list of rules.", f"write [[{header}]] on a line of its own.", self.key_line("", header))
            return
        for number, item in enumerate(items):
            self.rule_number = number + 1
            yield item, f"[[{header}]] rule {number + 1}", self.line(rf"\s*\[\[\s*{re.escape(header)}\s*\]\]", number)
        self.rule_number = None

    def rule(self, item: dict[str, Any], where: str, line: int | None) -> Rule:
        for key in item:
            if key not in ("path", "spec", "except"):
                fix = did_you_mean(key, ("path", "spec", "except"))
                self.problem(f"{where}: unknown key {key}", "nothing reads it.", fix, line, "unknown_key")
        path, excepted = self.paths(item, where, line)
        if "spec" not in item:
            self.problem(where, "has no spec.", 'such as  spec = ["-", "model"].', line)
        spec = self.spec(item["spec"], where, line) if "spec" in item else ()
        return Rule(path, spec, excepted, line)

    def paths(self, item: dict[str, Any], where: str, line: int | None) -> tuple[str, tuple[str, ...]]:
        """The patterns of a rule: what it matches, and its exceptions."""
        if "path" not in item:
            self.problem(where, "has no path.", 'such as  path = "**/kernel".', line)
        excepted = item.get("except", [])
        excepted = excepted if isinstance(excepted, list) else [excepted]
        for pattern in [item.get("path", ""), *excepted]:
            self.pattern(pattern, where, line)
        return str(item.get("path", "")), tuple(map(str, excepted))

    def gradients(self, table: dict[str, Any]) -> Gradients:
        section: str = "gradients"
        known: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(Gradients) if f.name not in ("options", "rules")}
        values: dict[str, Any] = {key: self.choice(table, section, key, known[key]) for key in ("reduction", "codec", "weights")}
        if "reduction" in table and table["reduction"] != values["reduction"] == "compiler":
            values["reduction"] = "all_reduce"  # an unknown reduction is one problem, not one more for each codec
        values |= {key: self.value(table, key, False, bool, section) for key in ("error_feedback", "allow_biased", "diagnostics")}
        for key, least, end in (("start_step", 0, 2**31), ("bucket_bytes", 1, 2**63)):
            values[key] = self.value(table, key, known[key], int, section)
            if not least <= values[key] < end:
                fix = f"a whole number from {least}." if values[key] < least else f"below 2**{end.bit_length() - 1}."
                self.problem(f"[gradients] {key}", f"{values[key]}.", fix, self.key_line(section, key))
                values[key] = known[key]
        values["exact_axes"] = self.value(table, "exact_axes", [], list, section)
        if not all(isinstance(axis, str) for axis in values["exact_axes"]):
            why = f"{as_toml(values['exact_axes'])} is not a list of mesh axes."
            self.problem("[gradients] exact_axes", why, 'such as ["data"].', self.key_line(section, "exact_axes"))
            values["exact_axes"] = []
        options = {key: value for key, value in table.items() if key not in (*known, "rules")}
        values["options"] = self.options(values["codec"], options, "[gradients]", lambda key: self.key_line(section, key), tuple(known))
        rules = tuple(self.gradient_rule(*found) for found in self.items(table, "rules", section))
        gradients = Gradients(**values, rules=rules)
        reported = set(self.places)
        for conflict in gradient_problems(gradients):
            if f"[gradients] {conflict.key}" not in reported:
                self.gradient_conflict(conflict, gradients)
        return gradients

    def gradient_conflict(self, conflict: Conflict, gradients: Gradients) -> None:
        """Report a conflict at its key of `[gradients]`, or at its rule."""
        if conflict.rule is None:
            line = self.key_line("gradients", conflict.key)
            self.problem(f"[gradients] {conflict.key}", conflict.why, conflict.fix, line, conflict.kind)
            return
        self.rule_number = conflict.rule + 1
        where, line = f"[[gradients.rules]] rule {self.rule_number}", gradients.rules[conflict.rule].line
        self.problem(where, conflict.why, conflict.fix, line, conflict.kind)
        self.rule_number = None

    def gradient_rule(self, item: dict[str, Any], where: str, line: int | None) -> GradientRule:
        path, excepted = self.paths(item, where, line)
        codec = item.get("codec", "exact")
        if "codec" not in item or not isinstance(codec, str) or codec not in CODECS:
            why, fix = (
                (f'no codec "{codec}".', did_you_mean(str(codec), CODECS)) if "codec" in item else ("has no codec.", 'codec = "exact".')
            )
            self.problem(where, why, fix, line)
            return GradientRule(path, "exact", (), excepted, line)
        options = {key: value for key, value in item.items() if key not in ("path", "except", "codec")}
        return GradientRule(path, codec, self.options(codec, options, where, lambda key: line, ("path", "except", "codec")), excepted, line)

    def options(self, codec: str, given: dict[str, Any], where: str, line: Callable[[str], int | None], others: tuple[str, ...]) -> Options:
        """The valid options of a codec."""
        kept = {}
        for key, value in given.items():
            if key not in codec_options(codec):
                readers = [name for name in CODECS if key in codec_options(name)]
                why = f"it is an option of {', '.join(readers)}; the codec is {codec}." if readers else "nothing reads it."
                fix = f'leave it out, or codec = "{readers[0]}".' if readers else did_you_mean(key, (*others, *codec_options(codec)))
                self.problem(f"unknown key: {where} {key}", why, fix, line(key), "unknown_key")
                continue
            if wrong := option_problem(CODECS[codec], key, value):
                self.problem(f"{where} {key}", f"{as_toml(value)} for codec {codec}.", f"{wrong}.", line(key))
            else:
                kept[key] = value
        return tuple(kept.items())

    def pattern(self, pattern: Any, where: str, line: int | None) -> None:
        try:
            compiled(pattern)
        except (LayoutError, TypeError) as error:
            why = str(error) if isinstance(error, LayoutError) else f"{as_toml(pattern)} is not a path."
            self.problem(where, why, 'such as "**/{up,down}/kernel".', line)

    def batch(self, table: dict[str, Any]) -> Batch:
        self.unknown(table, ("spec", "rules"), "batch")
        line = self.key_line("batch", "spec")
        spec = self.spec(table.get("spec", ["data"]), "[batch] spec", line)
        if table.get("spec") == [] or (spec and spec[0] is None):
            self.problem("[batch] spec", "dim 0, the batch, is not split over any mesh axis.", 'such as spec = ["data"].', line)
        return Batch(spec, self.rules(table, "rules", "batch"))

    def axes(self, table: dict[str, Any]) -> tuple[tuple[str, Entry], ...]:
        out = []
        for name, value in table.items():
            spec = self.spec([value] if value != [] else value, f"[axes] {name}", self.key_line("axes", name))
            out.append((name, spec[0] if spec else None))
        return tuple(out)

    def default(self, table: dict[str, Any]) -> Default:
        self.unknown(table, ("params", "max_replicated"), "default")
        params = self.value(table, "params", "replicate", str, "default")
        if params not in ("replicate", "error") and not re.fullmatch(r"shard:\w+", params):
            near = closest(params, ("replicate", "error", f"shard:{params.partition(':')[2] or 'AXIS'}"))
            fix = f'did you mean "{near}"?' if near else '"replicate", "error", or "shard:AXIS", such as "shard:data".'
            self.problem("[default] params", f'unknown value "{params}".', fix, self.key_line("default", "params"))
            params = "replicate"
        share = self.value(table, "max_replicated", None, (int, float), "default")
        if share is not None and not 0 <= share <= 1:
            line = self.key_line("default", "max_replicated")
            self.problem("[default] max_replicated", f"{share} is not a share.", "a number from 0 to 1.", line)
        return Default(params, None if share is None else float(share))

    def section(self, data: dict[str, Any], name: str, kind: type) -> Any:
        """A table of strings, checked against the dataclass's fields and `CHOICES`."""
        table, fields = self.table(data, name), {f.name: getattr(kind(), f.name) for f in dataclasses.fields(kind)}
        self.unknown(table, tuple(fields), name)
        return kind(**{key: self.choice(table, name, key, default) for key, default in fields.items()})

    def choice(self, table: dict[str, Any], section: str, key: str, default: str | None) -> str | None:
        known = CHOICES.get(f"{section}.{key}")
        if known and key in table and not isinstance(table[key], str):
            table = {**table, key: as_toml(table[key])}  # reported below, with the known values
        value = self.value(table, key, default, str, section)
        if known and value is not None and value not in known:
            near = closest(value, known)
            fix = (f'did you mean "{near}"? This' if near else "this") + f" version knows: {', '.join(known)}."
            self.problem(f"[{section}] {key}", f'no {key} "{value}".', fix, self.key_line(section, key))
            return near or default  # the value that was probably meant, so that no further problem follows from it
        return value

    def remat(self, table: dict[str, Any]) -> Remat:
        self.unknown(table, ("save", "modules"), "remat")
        save = self.choice(table, "remat", "save", None)
        modules = self.value(table, "modules", [], list, "remat")
        for pattern in modules:
            self.pattern(pattern, "[remat] modules", self.key_line("remat", "modules"))
        return Remat(save, tuple(modules))


def _entry(value: str | list[str]) -> Entry:
    if isinstance(value, list):
        return value[0] if len(value) == 1 else tuple(value)
    return None if value == REPLICATED else value
