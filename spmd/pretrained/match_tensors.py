"""Matches the tensors of a folder with the arrays of a model by a name map, from headers and shapes
alone.
"""

import dataclasses
import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from spmd.base.tree import describe
from spmd.errors import PretrainedError, Problem, closest, did_you_mean, printable, raise_problems
from spmd.pretrained.links import Link, solve
from spmd.pretrained.name_map import LAYER, Layers, NameMap, TensorRule, compiled, fill
from spmd.pretrained.safetensors_files import Box, Tensor

HEADS = {  # the fix for a folder that lacks the head, by the beginning of its path in a model
    "head/": '"tie_word_embeddings": true in config.json, if the head is the table of the '
    "embedding; "
    "or "
    "a folder that has it.",
    "classifier/": "spmd.pretrained.load(folder, labels=[...]), which makes a new one; or a folder "
    "that has "
    "it.",
}


def _head_fix(path: str) -> str:
    """Return the fix for a folder that lacks an array of this path, or pattern; "" if it is of no
    head.
    """
    for start, fix in HEADS.items():
        if path.startswith(start):
            return fix
    return ""


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of an array in the model: its path, and the position along dim 0 if it is one layer
    of a stack.
    """

    path: str
    slot: int | None = None


def places_of(layers: Layers, arrays: Mapping[str, Any]) -> dict[str, Place]:
    """Return the place of each array by the name that a map uses, `layers.3/mlp/up/kernel` for
    arrays of layers.

    >>> import numpy as np
    >>> list(
    ...     places_of(
    ...         Layers(stack="stack"), {"stack/0/w": np.ones((2, 4)), "stack/1/w": np.ones((2, 4))}
    ...     ).items()
    ... )[2]
    ('layers.1/w', Place(path='stack/1/w', slot=0))
    """
    stacked = [path for path in arrays if layers.stack and path.startswith(f"{layers.stack}/")]
    members = {path.removeprefix(f"{layers.stack}/").partition("/")[0] for path in stacked}
    grouped = bool(members) and all(name.isdigit() for name in members)
    period = 1
    if grouped:
        period = max(map(int, members)) + 1
    shapes = [arrays[path].shape for path in stacked]
    groups = max((shape[0] for shape in shapes if shape), default=0)
    places: dict[str, Place] = {}
    for path, leaf in arrays.items():
        if path not in stacked:
            places[_name_in_list(layers, path, groups * period)] = Place(path)
            continue
        member, name = "0", path.removeprefix(f"{layers.stack}/")
        if grouped:
            member, _, name = name.partition("/")
        count = 0
        if leaf.shape:
            count = leaf.shape[0]
        for slot in range(count):
            places[f"layers.{slot * period + int(member)}/{name}"] = Place(path, slot)
    return places


def _name_in_list(layers: Layers, path: str, stacked_layers: int) -> str:
    """Return the name of an array that is in no stack; lists after the stack continue its
    numbers.
    """
    for home, before in ((layers.tail, stacked_layers), (layers.list, 0)):
        if home and (match := re.fullmatch(rf"{re.escape(home)}/(\d+)/(.*)", path)):
            return f"layers.{before + int(match[1])}/{match[2]}"
    return path


def match_tensors(
    name_map: NameMap,
    tensors: Mapping[str, Tensor],
    arrays: Mapping[str, Any],
    required: Collection[str],
    where: str = "the folder",
) -> list[Link]:
    """The links that fill the arrays of a model.

    Args:
      arrays: shape and dtype by path.
      required: paths of those that must be filled, the parameters.
      where: what errors call the folder.

    Raises:
      PretrainedError: all that does not fit, at once.
    """
    name_map = name_map.for_names(tensors)
    matcher = _Matcher(name_map, tensors, arrays)
    for rule in name_map.tensors:
        if not rule.tied:
            matcher.apply(rule)
    # Last: a second name becomes a twin of the link by which another rule has filled the array.
    for rule in name_map.tensors:
        if rule.tied:
            matcher.apply(rule)
    # After all rules: both look at what these have claimed and filled.
    matcher.check_ignored()
    matcher.check_complete(required)
    raise_problems(
        PretrainedError, f"{name_map.source} does not fit {where} and the model", matcher.problems
    )
    return matcher.links


class _Matcher:
    """Applies rules, and collects links and problems."""

    def __init__(self, name_map: NameMap, tensors: Mapping[str, Tensor], arrays: Mapping[str, Any]):
        self._map, self._tensors, self._arrays = name_map, tensors, arrays
        self._places = places_of(name_map.layers, arrays)
        self._claimed: dict[str, str] = {}  # the rule that maps a tensor, by the tensor's name
        # positions in `links` of the links that fill an array
        self._filled: dict[Place, list[int]] = {}
        self._rule_of: dict[Place, TensorRule] = {}  # the rule that fills an array
        # arrays that lack tensors for a reason that is a problem already
        self._explained: set[Place] = set()
        self.links: list[Link] = []
        self._problems: list[Problem] = []  # of no rule
        # problems of rules, by a key that is equal for those of several layers
        self._rule_problems: dict[tuple, tuple[TensorRule, Sequence[str], str, list[str]]] = {}

    def _problem(
        self,
        rule: TensorRule,
        tensor: str,
        why: Sequence[str],
        fix: str,
        kind: str = "no_match",
    ) -> None:
        """Collect a problem of a tensor; equal ones of several layers are one."""
        key = (rule.number, _pattern(tensor), tuple(map(without_layer, why)), fix)
        *_, tensors = self._rule_problems.setdefault(key, (rule, why, kind, []))
        tensors.append(tensor)

    @property
    def problems(self) -> list[Problem]:
        """All problems, those of rules first."""
        of_rules = []
        for (*_, fix), (rule, why, kind, names) in self._rule_problems.items():
            problem = Problem(
                f"{rule.name}: {names[0]}",
                why,
                fix,
                also_text(names),
                path=names[0],
                rule=rule.number,
                line=rule.line,
                kind=kind,
            )
            of_rules.append(problem)
        return [*of_rules, *self._problems]

    def apply(self, rule: TensorRule) -> None:
        """Link the tensors and arrays that a rule matches in the files and in the model."""
        in_files = _captures(rule.file, self._tensors)
        if not in_files and not rule.tied and not rule.optional:
            self._matches_nothing(rule)
        for captures in in_files:
            names, paths = _names(rule.file, captures), _names(rule.model, captures)
            for name in names:
                self._claim(rule, name)
            if no_tensor := [name for name in names if name not in self._tensors]:
                present = [name for name in names if name in self._tensors]
                why = f"there is no such tensor beside {present[0]}."
                fix = "the files as they were written, or a rule without it."
                self._problem(rule, no_tensor[0], [why], fix)
                self._explain(paths)
            elif no_array := [path for path in paths if path not in self._places]:
                patterns, pattern = _patterns(self._places), _pattern(no_array[0])
                fix = f"a model of {self._layer_count()} layers, as the files have."
                if pattern not in patterns:
                    fix = did_you_mean(pattern, patterns)
                self._problem(rule, names[0], [f"the model has no {', '.join(no_array)}."], fix)
            else:
                tensors = [self._tensors[name] for name in names]
                self._link(rule, tensors, [self._places[path] for path in paths])

    def _matches_nothing(self, rule: TensorRule) -> None:
        """Note that a rule matches no tensor."""
        fix = "a folder that has it. Or optional = true."
        if near := closest(rule.file[0], _patterns(self._tensors)):
            fix = f'did you mean "{near}"? Or optional = true.'
        fix = _head_fix(rule.model[0]) or fix
        self._problem(rule, rule.file[0], ["matches no tensor."], fix)
        for captures in _captures(rule.model, self._places):
            self._explain(_names(rule.model, captures))

    def _explain(self, paths: Iterable[str]) -> None:
        """Note that arrays lack tensors for a reason that is a problem already."""
        for path in paths:
            if path in self._places:
                self._explained.add(self._places[path])

    def _layer_count(self) -> int:
        """Return the number of layers of the files, as the rules count them."""
        count = 0
        for rule in self._map.tensors:
            for captures in _captures(rule.file, self._tensors):
                count = max(count, int(captures.get(LAYER, -1)) + 1)
        return count

    def _claim(self, rule: TensorRule, name: str) -> None:
        if name in self._claimed:
            self._problem(
                rule,
                name,
                [f"{self._claimed[name]} maps this tensor, too."],
                "one of the two.",
                "overlap",
            )
        self._claimed[name] = rule.name

    def _link(self, rule: TensorRule, tensors: list[Tensor], places: list[Place]) -> None:
        """Link one or several tensors with one or several arrays."""
        shapes = []
        for place in places:
            shape = self._arrays[place.path].shape
            shapes.append(shape[place.slot is not None :])
        try:
            links = _links(rule, tensors, places, shapes)
        except ValueError as error:
            described = []
            for place, shape in zip(places, shapes, strict=True):
                described.append(f"{place.path} {list(shape)}")
            in_model = " and ".join(described)
            in_files = " and ".join(map(_show, tensors))
            if rule.transform:
                in_files += f", {rule.transform},"
            why = [f"{in_files} is not {in_model}: {error}."]
            fix = "the model that these weights are of, or another rule."
            self._problem(rule, tensors[0].name, why, fix, kind="wrong_shape")
            self._explained.update(places)
            return
        for place in places:
            of_place = [link for link in links if link.path == place.path]
            positions = self._filled.get(place)
            if positions is None:
                first = len(self.links)
                self._filled[place] = list(range(first, first + len(of_place)))
                self._rule_of[place] = rule
                self.links += of_place
            elif rule.tied and len(of_place) == len(positions) == 1:
                (position,) = positions
                link = self.links[position]
                self.links[position] = dataclasses.replace(link, twin=of_place[0])
            else:
                self._problem(
                    rule,
                    tensors[0].name,
                    [f"{self._rule_of[place].name} fills {place.path}, too."],
                    "tied = true, or one of the two.",
                    "overlap",
                )

    def check_ignored(self) -> None:
        """Note ignored tensors that a rule maps."""
        for ignored in self._map.ignored:
            for name in filter(compiled(ignored.file).fullmatch, self._tensors):
                if name in self._claimed:
                    rule = "[[ignored]]"
                    if ignored.line:
                        rule += f", line {ignored.line}"
                    why = f"{self._claimed[name]} maps this tensor, which {rule} ignores."
                    self._problems.append(
                        Problem(
                            name,
                            [why],
                            "one of the two.",
                            path=name,
                            line=ignored.line,
                            kind="overlap",
                        )
                    )
                self._claimed[name] = "[[ignored]]"

    def check_complete(self, required: Collection[str]) -> None:
        """Note tensors that no rule maps, and arrays without a tensor."""
        patterns = _all_patterns(rule.file for rule in self._map.tensors)
        for pattern, names in _grouped(name for name in self._tensors if name not in self._claimed):
            fix = "a [[tensors]] rule, or [[ignored]] with a reason."
            if closest(pattern, patterns):
                fix = did_you_mean(pattern, patterns)
            where = f"{printable(names[0], 200)} {describe(self._tensors[names[0]])}"
            why = ["no rule maps this tensor."]
            problem = Problem(where, why, fix, also_text(names), path=names[0], kind="no_rule")
            self._problems.append(problem)
        empty: dict[str, Place] = {}
        for name, place in self._places.items():
            settled = place in self._filled or place in self._explained
            if place.path in required and not settled:
                empty[name] = place
        patterns = _all_patterns(rule.model for rule in self._map.tensors)
        for pattern, names in _grouped(empty):
            place = empty[names[0]]
            why = self._missing_tensors(names[0])
            fix = _head_fix(place.path)
            if not fix:
                fix = "the files as they were written, or the model that they are of."
            if not why:
                why = "no rule maps this array."
                fix = "a [[tensors]] rule that fills it."
                if closest(pattern, patterns):
                    fix = did_you_mean(pattern, patterns)
            where = f"{names[0]} {describe(self._arrays[place.path])}"
            if place.slot is not None:
                where += f", layer {place.slot} of {place.path}"
            problem = Problem(where, [why], fix, also_text(names), path=place.path, kind="no_match")
            self._problems.append(problem)

    def _missing_tensors(self, name: str) -> str:
        """Return the absence of the tensors of the first rule that maps an array, in words; "" if
        no rule does.
        """
        for rule in self._map.tensors:
            for pattern in rule.model:
                if match := compiled(pattern).fullmatch(name):
                    tensors = " and ".join(_names(rule.file, match.groupdict()))
                    return f"there is no tensor {tensors}, which {rule.name} maps."
        return ""


def _links(
    rule: TensorRule, tensors: list[Tensor], places: list[Place], shapes: list[tuple[int, ...]]
) -> list[Link]:
    """Return the links between one tensor and one array, or between one and several of the other,
    along `concat`.

    Raises:
      ValueError: the shapes do not fit.
    """
    joined_in_file, joined_in_model = len(places) > 1, len(tensors) > 1
    is_joined = joined_in_file or joined_in_model
    joined = shapes[0]
    if joined_in_file:
        joined = tensors[0].shape
    links, at, concat = [], 0, -1
    if rule.concat is not None:
        concat = rule.concat
    if is_joined and concat >= len(joined):
        raise ValueError(f"there is no dim {concat} to join along")
    for number in range(max(len(tensors), len(places))):
        tensor = tensors[number * joined_in_model]
        place, shape = places[number * joined_in_file], shapes[number * joined_in_file]
        size: list[int | None] = list(tensor.shape)
        target: list[int | None] = list(shape)
        if joined_in_file:
            size[concat] = None
        if joined_in_model:
            target[concat] = None
        factors = solve(rule.dims, size, target)
        tensor_shape, array_shape = factors.shape(factors.tensor), factors.shape(factors.array)
        tensor_box, array_box = _entire(tensor_shape), _entire(array_shape)
        if joined_in_file:
            tensor_box = _shift(tensor_box, concat, at)
            at += tensor_shape[concat]
        if joined_in_model:
            array_box = _shift(array_box, concat, at)
            at += array_shape[concat]
        if place.slot is not None:
            array_box = ((place.slot, place.slot + 1), *array_box)
        stacked = place.slot is not None
        links.append(Link(tensor, tensor_box, place.path, array_box, stacked, factors))
    if is_joined and at != joined[concat]:
        raise ValueError(f"along dim {concat}, the parts have {at} of {joined[concat]}")
    return links


def _entire(shape: tuple[int, ...]) -> Box:
    return tuple((0, size) for size in shape)


def _shift(box: Box, dim: int, by: int) -> Box:
    begin, end = box[dim]
    return (*box[:dim], (begin + by, end + by), *box[dim + 1 :])


def _show(tensor: Tensor) -> str:
    return f"{printable(tensor.name, 200)} {list(tensor.shape)}"


def _names(patterns: tuple[str, ...], captures: Mapping[str, str]) -> list[str]:
    return [fill(pattern, dict(captures)) for pattern in patterns]


def _captures(patterns: tuple[str, ...], names: Iterable[str]) -> list[dict[str, str]]:
    """Return the captures of some patterns in some names, each once; in order of the first."""
    names = list(names)
    captures: dict[tuple[tuple[str, str], ...], None] = {}
    for pattern in patterns:
        for match in map(compiled(pattern).fullmatch, names):
            if match:
                captures[tuple(sorted(match.groupdict().items()))] = None
    return [dict(items) for items in captures]


def _all_patterns(patterns: Iterable[tuple[str, ...]]) -> list[str]:
    return list(itertools.chain.from_iterable(patterns))


def _pattern(name: str) -> str:
    """A name with its layer's number replaced by a capture, as maps have it."""
    return re.sub(r"(?<=[./])\d+(?=[./])", f"{{{LAYER}}}", name, count=1)


def _patterns(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(map(_pattern, names)))


def without_layer(text: str) -> str:
    """A text with all numbers of layers replaced."""
    return re.sub(r"(?<=[./])\d+(?=[./])", LAYER, text)


def also_text(names: Sequence[str]) -> str:
    """Return a line about the tensors after the first that have the same problem."""
    if len(names) == 1:
        return ""
    return f"and {len(names) - 1} more, the last is {printable(names[-1], 200)}"


def _grouped(names: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Names that differ in the number of a layer only, together."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_pattern(name), []).append(name)
    return list(groups.items())
