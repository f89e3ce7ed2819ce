"""Matches the tensors of a folder with the arrays of a model by a name map, from headers and shapes
alone.
"""

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from spmd.errors import PretrainedError, Problem, closest, did_you_mean, printable, raise_problems
from spmd.pretrained.links import Link, solve
from spmd.pretrained.name_map import LAYER, Layers, NameMap, TensorRule, compiled, fill
from spmd.pretrained.safetensors_files import Box, Tensor
from spmd.tree import describe

HEADS = {  # what to do where a folder lacks the head, by what its path in a model begins with
    "head/": '"tie_word_embeddings": true in config.json, if the head is the table of the '
    "embedding; "
    "or "
    "a folder that has it.",
    "classifier/": "spmd.pretrained.load(folder, labels=[...]), which makes a new one; or a folder "
    "that has "
    "it.",
}


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the model keeps an array: its path, and the position along dim 0 if it is one layer of
    a stack.
    """

    path: str
    slot: int | None = None


def places_of(layers: Layers, arrays: Mapping[str, Any]) -> dict[str, Place]:
    """Where each array is by the name that a map uses, `layers.3/mlp/up/kernel` for those of
    layers.

    >>> import numpy as np
    >>> list(
    ...     places_of(
    ...         Layers(stack="stack"), {"stack/0/w": np.ones((2, 4)), "stack/1/w": np.ones((2, 4))}
    ...     ).items()
    ... )[2]
    ('layers.1/w', Place(path='stack/1/w', slot=0))
    """
    stacked = [path for path in arrays if layers.stack and path.startswith(f"{layers.stack}/")]
    first = {path.removeprefix(f"{layers.stack}/").partition("/")[0] for path in stacked}
    grouped = bool(first) and all(name.isdigit() for name in first)
    period = max(map(int, first)) + 1 if grouped else 1
    groups = max((arrays[path].shape[0] for path in stacked if arrays[path].shape), default=0)
    places: dict[str, Place] = {}
    for path, leaf in arrays.items():
        if path in stacked:
            member, _, rest = (
                path.removeprefix(f"{layers.stack}/").partition("/")
                if grouped
                else ("0", "", path[len(layers.stack) + 1 :])
            )
            for slot in range(leaf.shape[0] if leaf.shape else 0):
                places[f"layers.{slot * period + int(member)}/{rest}"] = Place(path, slot)
            continue
        for home, before in ((layers.tail, groups * period), (layers.list, 0)):
            if home and (match := re.fullmatch(rf"{re.escape(home)}/(\d+)/(.*)", path)):
                places[f"layers.{before + int(match[1])}/{match[2]}"] = Place(path)
                break
        else:
            places[path] = Place(path)
    return places


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
    for rule in name_map.tensors:
        if rule.tied:
            matcher.apply(rule)
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
        self._claimed: dict[str, str] = {}  # what maps a tensor, by its name
        # positions in `links` of the links that fill an array
        self._filled: dict[Place, list[int]] = {}
        self._by: dict[Place, TensorRule] = {}  # the rule that fills it
        # arrays that lack tensors for a reason that is a problem already
        self._explained: set[Place] = set()
        self.links: list[Link] = []
        self._problems: list[Problem] = []  # of no rule
        # and of rules, by what makes them equal
        self._found: dict[tuple, tuple[TensorRule, Sequence[str], str, list[str]]] = {}

    def _problem(
        self,
        rule: TensorRule,
        tensor: str,
        why: Sequence[str],
        fix: str = "",
        kind: str = "no_match",
    ) -> None:
        """Collect a problem of a tensor; equal ones of several layers are one."""
        key = (rule.number, _pattern(tensor), tuple(map(without_layer, why)), fix)
        self._found.setdefault(key, (rule, why, kind, []))[-1].append(tensor)

    @property
    def problems(self) -> list[Problem]:
        """All problems, those of rules first."""
        of_rules = [
            Problem(
                f"{rule.name}: {names[0]}",
                why,
                fix,
                also_text(names),
                path=names[0],
                rule=rule.number,
                line=rule.line,
                kind=kind,
            )
            for (*_, fix), (rule, why, kind, names) in self._found.items()
        ]
        return [*of_rules, *self._problems]

    def apply(self, rule: TensorRule) -> None:
        """Link what a rule matches in the files and in the model."""
        in_files = _captures(rule.file, self._tensors)
        in_model = _captures(rule.model, self._places)
        if not in_files:
            if not (rule.tied or rule.optional):
                near = closest(rule.file[0], _patterns(self._tensors))
                known = f'did you mean "{near}"?' if near else "a folder that has it."
                fix = next(
                    (fix for part, fix in HEADS.items() if rule.model[0].startswith(part)),
                    f"{known} Or optional = true.",
                )
                self._problem(rule, rule.file[0], ["matches no tensor."], fix)
                self._explained |= {
                    self._places[name]
                    for at in in_model
                    for name in _names(rule.model, at)
                    if name in self._places
                }
            return
        for captures in in_files:
            names, paths = _names(rule.file, captures), _names(rule.model, captures)
            for name in names:
                self._claim(rule, name)
            if no_tensor := [name for name in names if name not in self._tensors]:
                self._problem(
                    rule,
                    no_tensor[0],
                    [
                        "there is no such tensor beside "
                        f"{next(n for n in names if n in self._tensors)}."
                    ],
                )
                self._explained |= {self._places[path] for path in paths if path in self._places}
            elif no_array := [path for path in paths if path not in self._places]:
                known, pattern = _patterns(self._places), _pattern(no_array[0])
                enough = f"a model of {self._layer_count()} layers, as the files have."
                fix = enough if pattern in known else did_you_mean(pattern, known)
                self._problem(rule, names[0], [f"the model has no {', '.join(no_array)}."], fix)
            else:
                self._link(
                    rule,
                    [self._tensors[name] for name in names],
                    [self._places[path] for path in paths],
                )

    def _layer_count(self) -> int:
        """How many layers the files have, as the rules count them."""
        hits = (
            compiled(pattern).fullmatch(name)
            for rule in self._map.tensors
            for pattern in rule.file
            for name in self._tensors
        )
        return (
            max((int(hit[LAYER]) for hit in hits if hit and LAYER in hit.groupdict()), default=-1)
            + 1
        )

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
        """One or several tensors are one or several arrays."""
        shapes = [self._arrays[place.path].shape[place.slot is not None :] for place in places]
        try:
            links = _links(rule, tensors, places, shapes)
        except ValueError as error:
            in_model = " and ".join(
                f"{place.path} {list(shape)}" for place, shape in zip(places, shapes, strict=True)
            )
            how = f", {rule.transform}," if rule.transform else ""
            why = [f"{' and '.join(map(_show, tensors))}{how} is not {in_model}: {error}."]
            self._problem(rule, tensors[0].name, why, kind="wrong_shape")
            self._explained.update(places)
            return
        for place in places:
            of_place = [link for link in links if link.path == place.path]
            positions = self._filled.get(place)
            if positions is None:
                self._filled[place] = list(range(len(self.links), len(self.links) + len(of_place)))
                self._by[place] = rule
                self.links += of_place
            elif rule.tied and len(of_place) == len(positions) == 1:
                self.links[positions[0]] = dataclasses.replace(
                    self.links[positions[0]], twin=of_place[0]
                )
            else:
                self._problem(
                    rule,
                    tensors[0].name,
                    [f"{self._by[place].name} fills {place.path}, too."],
                    "tied = true, or one of the two.",
                    "overlap",
                )

    def check_ignored(self) -> None:
        """Ignored tensors that a rule maps are a problem."""
        for ignored in self._map.ignored:
            for name in filter(compiled(ignored.file).fullmatch, self._tensors):
                if name in self._claimed:
                    line = f", line {ignored.line}" if ignored.line else ""
                    why = [
                        f"{self._claimed[name]} maps this tensor, which [[ignored]]{line} ignores."
                    ]
                    self._problems.append(
                        Problem(
                            name,
                            why,
                            "one of the two.",
                            path=name,
                            line=ignored.line,
                            kind="overlap",
                        )
                    )
                self._claimed[name] = "[[ignored]]"

    def check_complete(self, required: Collection[str]) -> None:
        """Tensors that no rule maps, and arrays without a tensor."""
        patterns = [pattern for rule in self._map.tensors for pattern in rule.file]
        for pattern, names in _grouped(name for name in self._tensors if name not in self._claimed):
            fix = (
                did_you_mean(pattern, patterns)
                if closest(pattern, patterns)
                else "a [[tensors]] rule, or [[ignored]] with a reason."
            )
            also = also_text(names)
            where = f"{printable(names[0], 200)} {describe(self._tensors[names[0]])}"
            self._problems.append(
                Problem(
                    where, ["no rule maps this tensor."], fix, also, path=names[0], kind="no_rule"
                )
            )
        empty = {
            name: place
            for name, place in self._places.items()
            if place.path in required and place not in self._filled and place not in self._explained
        }
        models = [pattern for rule in self._map.tensors for pattern in rule.model]
        for pattern, names in _grouped(empty):
            rule = next(
                (
                    rule
                    for rule in self._map.tensors
                    for p in rule.model
                    if compiled(p).fullmatch(names[0])
                ),
                None,
            )
            place = empty[names[0]]
            why = (
                "no rule maps this array."
                if rule is None
                else f"there is no tensor {_missing(rule, names[0])}, which {rule.name} maps."
            )
            fix = (
                ""
                if rule is not None or not closest(pattern, models)
                else did_you_mean(pattern, models)
            )
            also = also_text(names)
            where = f"{names[0]} {describe(self._arrays[place.path])}" + (
                "" if place.slot is None else f", layer {place.slot} of {place.path}"
            )
            self._problems.append(
                Problem(where, [why], fix, also, path=place.path, kind="no_match")
            )


def _links(
    rule: TensorRule, tensors: list[Tensor], places: list[Place], shapes: list[tuple[int, ...]]
) -> list[Link]:
    """The links between one tensor and one array, or between one and several of the other, along
    `concat`; or a `ValueError`.
    """
    links, at, concat = [], 0, rule.concat if rule.concat is not None else -1
    joined_in_file, joined_in_model = len(places) > 1, len(tensors) > 1
    joined = tensors[0].shape if joined_in_file else shapes[0] if joined_in_model else ()
    if (joined_in_file or joined_in_model) and concat >= len(joined):
        raise ValueError(f"there is no dim {concat} to join along")
    for number in range(max(len(tensors), len(places))):
        tensor, place, shape = (
            tensors[number if joined_in_model else 0],
            places[number if joined_in_file else 0],
            shapes[number if joined_in_file else 0],
        )
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
        layer: Box = () if place.slot is None else ((place.slot, place.slot + 1),)
        links.append(
            Link(
                tensor,
                tensor_box,
                place.path,
                (*layer, *array_box),
                place.slot is not None,
                factors,
            )
        )
    if (joined_in_file or joined_in_model) and at != joined[concat]:
        raise ValueError(f"along dim {concat}, the parts have {at} of {joined[concat]}")
    return links


def _entire(shape: tuple[int, ...]) -> Box:
    return tuple((0, size) for size in shape)


def _shift(box: Box, dim: int, by: int) -> Box:
    return (*box[:dim], (box[dim][0] + by, box[dim][1] + by), *box[dim + 1 :])


def _show(tensor: Tensor) -> str:
    return f"{printable(tensor.name, 200)} {list(tensor.shape)}"


def _names(patterns: tuple[str, ...], captures: Mapping[str, str]) -> list[str]:
    return [fill(pattern, dict(captures)) for pattern in patterns]


def _captures(patterns: tuple[str, ...], names: Iterable[str]) -> list[dict[str, str]]:
    """What the captures of some patterns stand for in some names, each once; in order of the
    first.
    """
    names = list(names)
    found: dict[tuple[tuple[str, str], ...], None] = {}
    for pattern in patterns:
        match = compiled(pattern).fullmatch
        found |= {
            tuple(sorted(hit.groupdict().items())): None for name in names if (hit := match(name))
        }
    return [dict(items) for items in found]


def _missing(rule: TensorRule, name: str) -> str:
    """The tensors of a rule that would fill an array."""
    hit = next(hit for pattern in rule.model if (hit := compiled(pattern).fullmatch(name)))
    return " and ".join(_names(rule.file, hit.groupdict()))


def _pattern(name: str) -> str:
    """A name with its layer's number replaced by a capture, as maps have it."""
    return re.sub(r"(?<=[./])\d+(?=[./])", f"{{{LAYER}}}", name, count=1)


def _patterns(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(map(_pattern, names)))


def without_layer(text: str) -> str:
    """A text with all numbers of layers replaced."""
    return re.sub(r"(?<=[./])\d+(?=[./])", LAYER, text)


def also_text(names: Sequence[str]) -> str:
    """A line about the tensors after the first that have the same problem."""
    return (
        f"and {len(names) - 1} more, the last is {printable(names[-1], 200)}"
        if len(names) > 1
        else ""
    )


def _grouped(names: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Names that differ in the number of a layer only, together."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_pattern(name), []).append(name)
    return list(groups.items())
