"""TOML to `Layout`, with the line number of each rule and of each problem."""

import dataclasses
import re
import tomllib
from collections.abc import Iterable
from typing import Any

from spmd.base.fields import as_toml, is_one_of
from spmd.base.path_match import compiled
from spmd.base.specs import REPLICATED, Entry, Spec, make_entry
from spmd.errors import (
    LayoutError,
    closest,
    did_you_mean,
    raise_problems,
)
from spmd.layout.compiler import THRESHOLDS, Compiler, compiler_problems
from spmd.layout.gradients import GradientRule, Gradients, Options, gradient_problems
from spmd.layout.model_parallel import Experts, Pipeline, Sequence, model_parallel_problems
from spmd.layout.precision import PRODUCTS, Precision
from spmd.layout.remat import Remat, remat_problems
from spmd.layout.schema import (
    Attention,
    Batch,
    Default,
    Layout,
    Memory,
    OptimizerState,
    Recurrence,
    Rule,
    recurrence_problems,
)
from spmd.layout.server import optimizer_problems, server_problems
from spmd.layout.toml_tables import (
    CHOICES as CHOICES,
    UNREGISTERED,
    Tables,
    is_number,
    register_hint,
    syntax_error,
)
from spmd.layout.trained import ADAPTER_RANGES, Adapter, Train, train_problems
from spmd.wire.codec import CODECS, codec_options
from spmd.wire.codec.base import option_problem
from spmd.wire.server.declaration import FRACTIONS, NEEDS, ParameterServer
from spmd.wire.server.timing import LINK, SECONDS


def loads(
    text: str, where: str = "layout", name: str = "layout", *, written: bool = True
) -> Layout:
    """Return a layout from TOML text. Errors call it `where`, and give line numbers unless
    `written` is False (generated text).
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        fix = "`spmd layouts show data_parallel` prints a layout that is right."
        raise syntax_error(LayoutError, text, where, str(error), fix) from error
    lines_of = ""
    if written:
        lines_of = text
    reader = _Reader(lines_of)
    layout = dataclasses.replace(reader.layout(data, name), source=where)
    problems = sorted(reader.problems, key=lambda problem: problem.line or len(text))
    raise_problems(LayoutError, f"{where} cannot be read", problems)
    return layout


class _Reader(Tables):
    """Reads a layout from parsed TOML."""

    def layout(self, data: dict[str, Any], name: str) -> Layout:
        self.unknown(data, [f.name for f in dataclasses.fields(Layout) if f.compare], "")
        pipeline = self.section(data, "pipeline", Pipeline)
        sequence = self.section(data, "sequence", Sequence)
        self.conflicts("pipeline", model_parallel_problems(pipeline, sequence))
        layout = Layout(
            name=name,
            description=self.value(data, "", "description", "", str),
            use_when=self.value(data, "", "use_when", "", str),
            mesh=self.mesh(self.table(data, "mesh")),
            batch=self.batch(self.table(data, "batch")),
            params=self.rules(data, "params"),
            axes=self.axes(self.table(data, "axes")),
            activations=self.rules(data, "activations"),
            default=self.default(self.table(data, "default")),
            optimizer=self.section(data, "optimizer", OptimizerState),
            memory=self.section(data, "memory", Memory),
            # Problems without lines, as of a `Layout`, stay in the order in which tables are read.
            gradients=(gradients := self.gradients(self.table(data, "gradients"))),
            parameter_server=self.parameter_server(self.table(data, "parameter_server"), gradients),
            remat=self.remat(self.table(data, "remat")),
            pipeline=pipeline,
            sequence=sequence,
            experts=self.section(data, "experts", Experts),
            attention=self.section(data, "attention", Attention),
            recurrence=self.recurrence(data),
            precision=tuple(self.precision(*item) for item in self.items(data, "precision")),
            train=self.train(self.table(data, "train"), data.get("adapters")),
            adapters=tuple(self.adapter(*item) for item in self.items(data, "adapters")),
            compiler=self.compiler(self.table(data, "compiler")),
        )
        self.conflicts(
            "optimizer",
            optimizer_problems(layout.optimizer, layout.gradients, layout.parameter_server),
        )
        return layout

    def section(self, data: dict[str, Any], name: str, kind: type) -> Any:
        return kind(**self.fields(self.table(data, name), name, kind))

    def recurrence(self, data: dict[str, Any]) -> Recurrence:
        recurrence = self.section(data, "recurrence", Recurrence)
        self.conflicts("recurrence", recurrence_problems(recurrence))
        return recurrence

    def mesh(self, table: dict[str, Any]) -> tuple[tuple[str, int], ...]:
        sizes = {axis: self.value(table, "mesh", axis, -1, int) for axis in table}
        for axis, size in sizes.items():
            if size < 1 and size != -1:
                self.key_problem("mesh", axis, f"size {size}.", "a number from 1, or one -1.")
        if list(sizes.values()).count(-1) > 1:
            self.key_problem("mesh", "", "more than one -1.", "give all sizes but one.")
        return tuple(sizes.items())

    def batch(self, table: dict[str, Any]) -> Batch:
        self.unknown(table, ("spec", "rules"), "batch")
        spec = self.spec(
            table.get("spec", ["data"]), "[batch] spec", self.key_line("batch", "spec")
        )
        if table.get("spec") == [] or (spec and spec[0] is None):
            self.key_problem(
                "batch",
                "spec",
                "dim 0, the batch, is not split over any mesh axis.",
                'such as spec = ["data"].',
            )
        return Batch(spec, self.rules(table, "rules", "batch"))

    def axes(self, table: dict[str, Any]) -> tuple[tuple[str, Entry], ...]:
        entries = []
        for name, value in table.items():
            entry = None
            values = value
            if value != []:
                values = [value]
            spec = self.spec(values, f"[axes] {name}", self.key_line("axes", name))
            if spec:
                (entry,) = spec
            entries.append((name, entry))
        return tuple(entries)

    def default(self, table: dict[str, Any]) -> Default:
        values = self.fields(table, "default", Default)
        params = values["params"]
        share = values["max_replicated"]
        if params not in ("replicate", "error") and not re.fullmatch(r"shard:\w+", params):
            _, _, axis = params.partition(":")
            near = closest(params, ("replicate", "error", f"shard:{axis or 'AXIS'}"))
            fix = '"replicate", "error", or "shard:AXIS", such as "shard:data".'
            if near:
                fix = f'did you mean "{near}"?'
            self.key_problem("default", "params", f'unknown value "{params}".', fix)
            params = "replicate"
        if share is not None and not 0 <= share <= 1:
            self.key_problem(
                "default", "max_replicated", f"{share} is not a share.", "a number from 0 to 1."
            )
        if share is not None:
            share = float(share)
        return Default(params, share)

    def remat(self, table: dict[str, Any]) -> Remat:
        self.unknown(table, [field.name for field in dataclasses.fields(Remat)], "remat")
        modules = self.value(table, "remat", "modules", [], list)
        for pattern in modules:
            self.pattern(pattern, "[remat] modules", self.key_line("remat", "modules"))
        rules = tuple(self.remat_rule(*item) for item in self.items(table, "rules", "remat"))
        remat = Remat(
            self.saved(table), tuple(map(str, modules)), self.named(table, "offload"), rules
        )
        self.conflicts("remat", list(remat_problems(remat)))
        return remat

    def remat_rule(self, item: dict[str, Any], where: str, line: int | None) -> Remat:
        self.unknown_in_rule(item, ("modules", "save", "offload"), where, line)
        modules = item.get("modules", [])
        if not isinstance(modules, list) or not modules:
            self.problem(where, "has no modules.", 'such as  modules = ["encoder/layers"].', line)
            modules = ["**"]
        for pattern in modules:
            self.pattern(pattern, where, line)
        return Remat(self.saved(item), tuple(map(str, modules)), self.named(item, "offload"))

    def saved(self, table: dict[str, Any]) -> str | tuple[str, ...] | None:
        """Return the value of `save`: a word, or names of values."""
        if isinstance(table.get("save"), list):
            return self.named(table, "save")
        return self.choice(table, "remat", "save", None)

    def named(self, table: dict[str, Any], key: str) -> tuple[str, ...]:
        """Return names that the model gives to values."""
        value_names = self.value(table, "remat", key, [], list)
        if all(isinstance(name, str) and name for name in value_names):
            return tuple(value_names)
        why = f"{as_toml(value_names)} is not a list of names."
        self.key_problem("remat", key, why, 'such as ["attn_out"].')
        return ()

    def compiler(self, table: dict[str, Any]) -> Compiler:
        self.unknown(table, [field.name for field in dataclasses.fields(Compiler)], "compiler")
        values = self.fields(
            table, "compiler", Compiler, dict.fromkeys(THRESHOLDS, 'such as "512 MiB".')
        )
        options = self.value(table, "compiler", "options", {}, dict)
        fix = "true or false, a whole number, a string."
        xla_options = {}
        for name in options:
            value = self.value(options, "compiler.options", name, None, bool, int, str, fix=fix)
            if value is not None:
                xla_options[name] = value
        compiler = Compiler(**values, options=xla_options)
        self.conflicts("compiler", compiler_problems(compiler))
        return compiler

    def parameter_server(self, table: dict[str, Any], gradients: Gradients) -> ParameterServer:
        section = "parameter_server"
        values = self.fields(
            table, section, ParameterServer, {"staleness_scale": 'such as "inverse".', **FRACTIONS}
        )
        values["network"] = self.value(table, section, "network", (), dict, fix=LINK)
        times = self.value(table, section, "compute_time", "constant", str, list, fix=SECONDS)
        if not isinstance(times, str) and not all(map(is_number, times)):
            self.key_problem(
                section,
                "compute_time",
                f"{as_toml(times)} is not a list of seconds.",
                "such as [1.0, 1.0, 3.0].",
            )
            times = "constant"
        server = ParameterServer(**values, compute_time=times)
        conflicts = server_problems(server, gradients)
        # what the mode needs is there, with a problem of its own
        if f"[{section}] {NEEDS.get(server.mode)}" in self.places:
            conflicts = [conflict for conflict in conflicts if conflict.key != "mode"]
        self.conflicts(section, conflicts, gradients.rules)
        return server

    def gradients(self, table: dict[str, Any]) -> Gradients:
        section = "gradients"
        keys = [f.name for f in dataclasses.fields(Gradients) if f.name not in ("options", "rules")]
        values = self.fields(table, section, Gradients)
        # An unknown reduction is one problem, not one more for each codec.
        if "reduction" in table and table["reduction"] != values["reduction"] == "compiler":
            values["reduction"] = "all_reduce"
        for key, least, end in (("start_step", 0, 2**31), ("bucket_bytes", 1, 2**63)):
            if not least <= values[key] < end:
                fix = f"below 2**{end.bit_length() - 1}."
                if values[key] < least:
                    fix = f"a whole number from {least}."
                self.key_problem(section, key, f"{values[key]}.", fix)
                values[key] = getattr(Gradients(), key)
        exact_axes = self.value(table, section, "exact_axes", [], list)
        if not all(isinstance(axis, str) for axis in exact_axes):
            self.key_problem(
                section,
                "exact_axes",
                f"{as_toml(exact_axes)} is not a list of mesh axes.",
                'such as ["data"].',
            )
            exact_axes = []
        options = {key: value for key, value in table.items() if key not in (*keys, "rules")}
        lines = {key: self.key_line(section, key) for key in options}
        options = self.options(values["codec"], options, "[gradients]", lines, keys)
        rules = tuple(self.gradient_rule(*item) for item in self.items(table, "rules", section))
        gradients = Gradients(**values, exact_axes=tuple(exact_axes), options=options, rules=rules)
        self.conflicts(section, gradient_problems(gradients), rules)
        return gradients

    def gradient_rule(self, item: dict[str, Any], where: str, line: int | None) -> GradientRule:
        path, excepted = self.paths(item, where, line)
        codec = item.get("codec")
        keys = ("path", "except", "codec")
        if not isinstance(codec, str) or codec not in CODECS:
            why = "has no codec."
            fix = 'codec = "exact".'
            kind = "invalid_value"
            if "codec" in item:
                kind = UNREGISTERED
                why = f'no codec "{codec}".'
                fix = did_you_mean(str(codec), CODECS)
                fix += register_hint("gradients.codec", str(codec))
            self.problem(where, why, fix, line, kind)
            return GradientRule(path, "exact", (), excepted, line)
        options = {key: value for key, value in item.items() if key not in keys}
        options = self.options(codec, options, where, dict.fromkeys(options, line), keys)
        return GradientRule(path, codec, options, excepted, line)

    def options(
        self,
        codec: str,
        table: dict[str, Any],
        where: str,
        lines: dict[str, int | None],
        other_keys: Iterable[str],
    ) -> Options:
        """Return the valid options of a codec."""
        valid = []
        for key, value in table.items():
            if key not in codec_options(codec):
                codecs = [name for name in CODECS if key in codec_options(name)]
                if codecs:
                    why = f"it is an option of {', '.join(codecs)}; the codec is {codec}."
                    fix = f'leave it out, or codec = "{codecs[0]}".'
                else:
                    why = "nothing reads it."
                    fix = did_you_mean(key, (*other_keys, *codec_options(codec)))
                self.problem(f"unknown key: {where} {key}", why, fix, lines[key], "unknown_key")
                continue
            fix = option_problem(CODECS[codec], key, value)
            if fix:
                why = f"{as_toml(value)} for codec {codec}."
                self.problem(f"{where} {key}", why, f"{fix}.", lines[key])
            else:
                valid.append((key, value))
        return tuple(valid)

    # rules ----------------------------------------------------------------------------------------

    def rules(self, table: dict[str, Any], key: str, section: str = "") -> tuple[Rule, ...]:
        return tuple(self.rule(*item) for item in self.items(table, key, section))

    def rule(self, item: dict[str, Any], where: str, line: int | None) -> Rule:
        self.unknown_in_rule(item, ("path", "spec", "except"), where, line)
        path, excepted = self.paths(item, where, line)
        if "spec" not in item:
            self.problem(where, "has no spec.", 'such as  spec = ["-", "model"].', line)
        return Rule(path, self.spec(item.get("spec", []), where, line), excepted, line)

    def precision(self, item: dict[str, Any], where: str, line: int | None) -> Precision:
        self.unknown_in_rule(item, ("path", "products", "except"), where, line)
        path, excepted = self.paths(item, where, line)
        products = item.get("products")
        if products not in PRODUCTS:
            why = "has no products."
            if "products" in item:
                why = f"no products {as_toml(products)}."
            near = closest(str(products), PRODUCTS) or "float8"
            fix = f'such as products = "{near}"; this version knows: {", ".join(PRODUCTS)}.'
            self.problem(where, why, fix, line)
            products = near
        return Precision(path, products, excepted, line)

    def train(self, table: dict[str, Any], adapters: Any) -> Train:
        self.unknown(table, [field.name for field in dataclasses.fields(Train)], "train")
        values = {
            "frozen": self.choice(table, "train", "frozen", None),
            "block": self.value(table, "train", "block", Train().block, int),
        }
        if values["block"] < 1:
            self.key_problem("train", "block", f"{values['block']}.", "a whole number from 1.")
            values["block"] = Train().block
        for key in ("include", "exclude"):
            patterns = table.get(key, [])
            if not isinstance(patterns, list):
                patterns = [patterns]
            values[key] = tuple(map(str, patterns))
            for pattern in patterns:
                self.pattern(pattern, f"[train] {key}", self.key_line("train", key))
        train = Train(**values)
        self.conflicts("train", list(train_problems(train, adapters=bool(adapters))))
        return train

    def adapter(self, item: dict[str, Any], where: str, line: int | None) -> Adapter:
        fields = {
            field.name: field.default
            for field in dataclasses.fields(Adapter)
            if field.name in ADAPTER_RANGES
        }
        self.unknown_in_rule(item, ("modules", *fields, "except"), where, line)
        modules, excepted = self.paths(item, where, line, key="modules", such_as="**/{query,value}")
        values = {key: item.get(key, default) for key, default in fields.items()}
        for key, default in fields.items():
            in_range, fix = ADAPTER_RANGES[key]
            if not is_one_of(values[key], (type(default),)) or not in_range(values[key]):
                self.problem(f"{where} {key}", f"{as_toml(values[key])}.", fix, line)
                values[key] = default
        return Adapter(modules, **values, except_=excepted, line=line)

    def paths(
        self,
        item: dict[str, Any],
        where: str,
        line: int | None,
        *,
        key: str = "path",
        such_as: str = "**/kernel",
    ) -> tuple[str, tuple[str, ...]]:
        """Return the pattern of a rule, and the patterns of its exceptions."""
        if key not in item:
            self.problem(where, f"has no {key}.", f'such as  {key} = "{such_as}".', line)
        excepted = item.get("except", [])
        if not isinstance(excepted, list):
            excepted = [excepted]
        for pattern in [item.get(key, ""), *excepted]:
            self.pattern(pattern, where, line)
        return str(item.get(key, "")), tuple(map(str, excepted))

    def pattern(self, pattern: Any, where: str, line: int | None) -> None:
        try:
            compiled(pattern)
        except (LayoutError, TypeError) as error:
            why = f"{as_toml(pattern)} is not a path."
            if isinstance(error, LayoutError):
                why = error.message
            self.problem(where, why, 'such as "**/{up,down}/kernel".', line)

    def spec(self, value: Any, where: str, line: int | None) -> Spec:
        def is_axis(entry: Any) -> bool:
            return isinstance(entry, str) and entry != ""

        def is_entry(entry: Any) -> bool:
            if isinstance(entry, list):
                return bool(entry) and all(map(is_axis, entry))
            return is_axis(entry)

        if not (isinstance(value, list) and all(map(is_entry, value))):
            why = f"spec {as_toml(value)} is not a list of mesh axes."
            self.problem(
                where, why, 'one entry per dim, "-" for replicated, such as ["data", "-"].', line
            )
            return ()
        spec: list[Entry] = []
        for entry in value:
            if isinstance(entry, list):
                spec.append(make_entry(tuple(entry)))
            elif entry == REPLICATED:
                spec.append(None)
            else:
                spec.append(entry)
        return tuple(spec)
