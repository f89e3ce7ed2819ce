"""Name maps from the tensors of weight files to the arrays of a model. Data only, read from TOML,
and invertible.
"""

import dataclasses
import functools
import itertools
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from spmd.base.fields import as_toml
from spmd.base.user_paths import as_path
from spmd.errors import PretrainedError, raise_problems
from spmd.layout.toml_tables import Tables, syntax_error

LAYER = "layer"  # the capture that is a layer's number
FIX = "docs/pretrained.md has a map that is right."


@dataclasses.dataclass(frozen=True)
class Dims:
    """The dims of a tensor and of an array: each dim is a group of named factors, the first varying
    slowest.

    >>> Dims.parse("(heads size) width -> width heads size").array
    (('width',), ('heads',), ('size',))
    """

    tensor: tuple[tuple[str, ...], ...]
    array: tuple[tuple[str, ...], ...]

    @classmethod
    def parse(cls, text: str) -> "Dims":
        """Return the dims of a text such as "(heads size) width -> width heads size".

        Raises:
          ValueError: the problem of the text.
        """
        sides = text.split("->")
        if len(sides) != 2:
            raise ValueError("is not two lists of names with -> between them")
        tensor, array = cls._groups(sides[0]), cls._groups(sides[1])
        names = sorted(itertools.chain.from_iterable(tensor))
        if len(set(names)) != len(names):
            raise ValueError("has a name twice on one side")
        if names != sorted(itertools.chain.from_iterable(array)):
            raise ValueError("has other names on the right than on the left")
        return cls(tensor, array)

    @staticmethod
    def _groups(side: str) -> tuple[tuple[str, ...], ...]:
        if re.sub(r"\([\w\s]+\)|\w+|\s", "", side) or not side.strip():
            raise ValueError("has something other than names and (names of one dim)")
        groups = re.findall(r"\([\w\s]+\)|\w+", side)
        return tuple(tuple(re.findall(r"\w+", group)) for group in groups)

    def __str__(self) -> str:
        return f"{_side_text(self.tensor)} -> {_side_text(self.array)}"


def _side_text(side: tuple[tuple[str, ...], ...]) -> str:
    words = []
    for group in side:
        names = " ".join(group)
        if len(group) > 1:
            names = f"({names})"
        words.append(names)
    return " ".join(words)


TRANSPOSE = Dims((("out",), ("in",)), (("in",), ("out",)))


@dataclasses.dataclass(frozen=True)
class TensorRule:
    """A rule from tensors to arrays: one of `file` and `model` may hold several, which lie along
    dim `concat` of the other's one.

    Attributes:
      file: patterns of names of tensors; `{layer}` stands for a number, any other `{name}` for
        characters other than "." and "/".
      model: patterns of paths of arrays with the same captures; `layers.{layer}` stands for the
        place of that layer in the model.
      dims: the order and shape of dims on both sides; None: they are equal.
      tied: the tensor is a second name of an array that another rule maps.
      optional: the rule may match nothing.
    """

    file: tuple[str, ...]
    model: tuple[str, ...]
    dims: Dims | None = None
    concat: int | None = None
    tied: bool = False
    optional: bool = False
    line: int | None = dataclasses.field(default=None, compare=False)
    number: int = dataclasses.field(default=1, compare=False)

    @property
    def name(self) -> str:
        """The name of the rule in errors."""
        if self.line:
            return f"[[tensors]] rule {self.number}, line {self.line}"
        return f"[[tensors]] rule {self.number}"

    @property
    def transform(self) -> str:
        """The changes between file and model, in words; "" if there are none."""
        words = []
        if self.dims == TRANSPOSE:
            words.append("transposed")
        elif self.dims is not None:
            words.append(f'dims = "{self.dims}"')
        if self.concat is not None:
            words.append(f"concat = {self.concat}")
        return ", ".join(words)


@dataclasses.dataclass(frozen=True)
class IgnoredRule:
    """Tensors that the model does not need, and the reason."""

    file: str
    reason: str
    line: int | None = dataclasses.field(default=None, compare=False)


@dataclasses.dataclass(frozen=True)
class Layers:
    """The place of layers in the model: a stack, whose arrays are [layers, ...], with a list after
    it for the layers that are left over; or a list.

    A stack of groups of several layers keeps them in `stack/0/...`, `stack/1/...`: layer i is
    member i % period of group i // period.
    """

    stack: str = ""
    tail: str = ""
    list: str = ""


# PyTorch puts this before every name in a wrapped model
WRAPPER = re.compile(r"((?:module|_orig_mod)\.)+")


@dataclasses.dataclass(frozen=True)
class NameMap:
    """A map from the tensors of a folder to the arrays of a model.

    Attributes:
      architectures, model_types: the names in config.json for which the map is meant.
      prefix: of tensors' names; a folder may leave it out of all of them.
      source: the file from which the map was read, for errors.

    Example:
      >>> text = '''
      ... [[tensors]]
      ... file = "proj.weight"
      ... model = "proj/kernel"
      ... transpose = true
      ... '''
      >>> NameMap.loads(text).tensors[0].transform
      'transposed'
    """

    tensors: tuple[TensorRule, ...] = ()
    ignored: tuple[IgnoredRule, ...] = ()
    layers: Layers = Layers()
    architectures: tuple[str, ...] = ()
    model_types: tuple[str, ...] = ()
    prefix: str = ""
    source: str = dataclasses.field(default="name map", compare=False)

    @classmethod
    def load(cls, source: "str | Path | NameMap") -> "NameMap":
        """Read a map from a TOML file.

        Raises:
          PretrainedError: there is no such file, or it cannot be read; all problems at once, each
            with its line.
        """
        if isinstance(source, NameMap):
            return source
        path = as_path(source, "name_map")
        try:
            return cls.loads(path.read_text(encoding="utf-8"), str(source))
        except OSError as error:
            raise PretrainedError(
                f"name map {source} cannot be read: {error.strerror}.", fix="check the path."
            ) from error
        except UnicodeDecodeError as error:
            raise PretrainedError(
                f"{source} is not UTF-8 text (byte {error.start}).", fix="save it as UTF-8."
            ) from error

    @classmethod
    def loads(cls, text: str, where: str = "name map") -> "NameMap":
        """Read a map from TOML text, which errors call `where`."""
        try:
            data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise syntax_error(PretrainedError, text, where, str(error), FIX) from error
        reader = _Reader(text)
        name_map = dataclasses.replace(reader.name_map(data), source=where)
        problems = sorted(reader.problems, key=lambda problem: problem.line or len(text))
        raise_problems(PretrainedError, f"{where} cannot be read", problems)
        return name_map

    def for_names(self, names: Iterable[str]) -> "NameMap":
        """The map without its prefix, if no tensor has it; and with that of a wrapper of PyTorch's,
        if all have it.

        >>> rules = (TensorRule(("model.w",), ("w",)),)
        >>> NameMap(rules, prefix="model.").for_names(["w"]).tensors[0].file
        ('w',)
        >>> NameMap(rules, prefix="model.").for_names(["_orig_mod.model.w"]).tensors[0].file
        ('_orig_mod.model.w',)
        """
        names = list(names)
        # All names must have the prefix, so any of them shows it.
        match, wrapper = WRAPPER.match(min(names, default="")), ""
        if match and all(name.startswith(match[0]) for name in names):
            wrapper = match[0]
        files = itertools.chain.from_iterable(rule.file for rule in self.tensors)
        if any(file.startswith(wrapper) for file in files):  # the map has it itself
            wrapper = ""
        has_prefix = any(name.removeprefix(wrapper).startswith(self.prefix) for name in names)
        if (has_prefix or not self.prefix) and not wrapper:
            return self

        def as_named(pattern: str) -> str:
            if not has_prefix:
                pattern = pattern.removeprefix(self.prefix)
            return wrapper + pattern

        tensors = []
        for rule in self.tensors:
            tensors.append(dataclasses.replace(rule, file=tuple(map(as_named, rule.file))))
        ignored = []
        for ignored_rule in self.ignored:
            file = as_named(ignored_rule.file)
            ignored.append(dataclasses.replace(ignored_rule, file=file))
        return dataclasses.replace(
            self, tensors=tuple(tensors), ignored=tuple(ignored), prefix=as_named(self.prefix)
        )


class _Reader(Tables):
    """Reads a name map from parsed TOML."""

    def name_map(self, data: dict[str, Any]) -> NameMap:
        self.unknown(
            data, ("tensors", "ignored", "layers", "architectures", "model_types", "prefix"), ""
        )
        layers = self.fields(self.table(data, "layers"), "layers", Layers)
        if layers["list"] and (layers["stack"] or layers["tail"]):
            self.key_problem(
                "layers",
                "list",
                "the model keeps its layers in a stack already.",
                "one of stack and list.",
                "conflict",
            )
        rules = []
        for number, item in enumerate(self.items(data, "tensors"), 1):
            rule = self.tensor_rule(*item)
            rules.append(dataclasses.replace(rule, number=number))
        if not data.get("tensors"):
            self.problem(
                "[[tensors]]",
                "maps no tensor.",
                'such as  file = "proj.weight"  model = "proj/kernel".',
            )
        ignored = [self.ignored_rule(*item) for item in self.items(data, "ignored")]
        homes = {key: value.strip("/") for key, value in layers.items()}
        return NameMap(
            tensors=tuple(rules),
            ignored=tuple(ignored),
            layers=Layers(**homes),
            architectures=self.strings(data, "architectures"),
            model_types=self.strings(data, "model_types"),
            prefix=self.value(data, "", "prefix", "", str),
        )

    def strings(self, data: dict[str, Any], key: str) -> tuple[str, ...]:
        value = self.value(data, "", key, [], list)
        if not all(isinstance(item, str) for item in value):
            self.key_problem(
                "", key, f"{as_toml(value)} is not a list of strings.", 'such as ["llama"].'
            )
            return ()
        return tuple(value)

    def ignored_rule(self, item: dict[str, Any], where: str, line: int | None) -> IgnoredRule:
        self.unknown_in_rule(item, ("file", "reason"), where, line)
        file = self.patterns(item, "file", where, line)
        if not isinstance(item.get("reason"), str) or not item["reason"].strip():
            self.problem(where, "has no reason.", 'such as  reason = "recomputed".', line)
        return IgnoredRule(file[0], str(item.get("reason", "")), line)

    def tensor_rule(self, item: dict[str, Any], where: str, line: int | None) -> TensorRule:
        self.unknown_in_rule(
            item, ("file", "model", "transpose", "dims", "concat", "tied", "optional"), where, line
        )
        file = self.patterns(item, "file", where, line)
        model = self.patterns(item, "model", where, line)
        for key, kind, example in (
            ("transpose", bool, "true"),
            ("tied", bool, "true"),
            ("optional", bool, "true"),
            ("concat", int, "0"),
        ):
            # Not isinstance, for which TOML's true is an int.
            if key in item and type(item[key]) is not kind:
                fix = f"such as {key} = {example}."
                self.problem(f"{where} {key}", f"{as_toml(item[key])}.", fix, line)
                item = {name: value for name, value in item.items() if name != key}
        captures = {}
        for pattern in filter(None, (*file, *model)):
            names_in_braces = set(re.findall(r"\{(\w+)\}", pattern))
            captures[pattern] = ", ".join(sorted(names_in_braces)) or "none"
        if len(set(captures.values())) > 1:
            shown = "; ".join(f"{pattern}: {names}" for pattern, names in captures.items())
            self.problem(
                where, f"captures differ: {shown}.", "the same {names} in file and model.", line
            )
        concat = item.get("concat")
        if len(file) > 1 and len(model) > 1:
            self.problem(where, "both file and model are lists.", "a rule for each.", line)
        elif max(len(file), len(model)) > 1 and (concat is None or concat < 0):
            self.problem(
                where,
                "several are joined, along which dim is not said.",
                "concat = 0, a dim of the one.",
                line,
            )
        elif concat is not None and len(file) == len(model) == 1:
            self.problem(
                where,
                "concat, but nothing is joined.",
                "leave it out, or a list in file or model.",
                line,
            )
        dims = self.dims(item, where, line)
        tied = item.get("tied", False)
        optional = item.get("optional", False)
        return TensorRule(file, model, dims, concat, tied, optional, line)

    def dims(self, item: dict[str, Any], where: str, line: int | None) -> Dims | None:
        if item.get("transpose") and "dims" in item:
            self.problem(where, "transpose and dims.", "dims alone.", line, "conflict")
        if "dims" not in item and item.get("transpose"):
            return TRANSPOSE
        if "dims" not in item:
            return None
        text = ""
        if isinstance(item["dims"], str):
            text = item["dims"]
        try:
            return Dims.parse(text)
        except ValueError as error:
            self.problem(
                f"{where} dims",
                f"{as_toml(item['dims'])} {error}.",
                'such as "(heads size) width -> width heads size".',
                line,
            )
            return None

    def patterns(
        self, item: dict[str, Any], key: str, where: str, line: int | None
    ) -> tuple[str, ...]:
        """Return the patterns of a key; for a wrong value note a problem, and return a pattern that
        matches nothing.
        """
        value: Any = item.get(key)
        several: tuple[Any, ...] = (value,)
        if isinstance(value, list):
            several = tuple(value)
        if not several or not all(isinstance(pattern, str) and pattern for pattern in several):
            why = f"has no {key}."
            if key in item:
                why = f"{key} {as_toml(value)} is not a name."
            self.problem(where, why, f"such as  {key} = {as_toml(EXAMPLES[key])}.", line)
            return ("",)
        for pattern in several:
            names = re.findall(r"\{(\w+)\}", pattern)
            outside = re.sub(r"\{[A-Za-z_]\w*\}", "", pattern)
            if re.search(r"[{}]", outside) or len(set(names)) < len(names):
                self.problem(
                    where, f'"{pattern}": braces hold a name, once each.', "such as {layer}.", line
                )
                return ("",)
            has_layer = f"{{{LAYER}}}" in pattern
            if key == "model" and has_layer and f"layers.{{{LAYER}}}/" not in pattern:
                self.problem(
                    where,
                    f'"{pattern}": a layer is written layers.{{layer}}/...',
                    "its path in the layer after it.",
                    line,
                )
        return several


EXAMPLES = {
    "file": "model.layers.{layer}.mlp.up_proj.weight",
    "model": "layers.{layer}/mlp/up/kernel",
}


@functools.cache
def compiled(pattern: str) -> re.Pattern[str]:
    """A pattern of names as a regular expression with its captures.

    >>> compiled("h.{layer}.{part}.weight").fullmatch("h.10.up.weight").groupdict()
    {'layer': '10', 'part': 'up'}
    """
    regex = ""
    # letters and names of captures alternate
    for number, part in enumerate(re.split(r"\{(\w+)\}", pattern)):
        if number % 2 == 0:
            regex += re.escape(part)
        elif part == LAYER:
            regex += rf"(?P<{part}>0|[1-9][0-9]*)"
        else:
            # Dots separate the parts of names in files, and slashes those of paths in a model.
            regex += rf"(?P<{part}>[^./]+)"
    return re.compile(regex)


def fill(pattern: str, captures: dict[str, str]) -> str:
    """The name that a pattern stands for.

    >>> fill("h.{layer}.{part}.weight", {"layer": "10", "part": "up"})
    'h.10.up.weight'
    """
    return re.sub(r"\{(\w+)\}", lambda match: captures[match[1]], pattern)
