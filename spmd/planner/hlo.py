"""XLA's text of a compiled program, as far as a plan needs it: instructions in their order, loops, and collectives with who takes part."""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator

import numpy as np

BITS = {
    "pred": 8, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "f16": 16, "bf16": 16, "s32": 32, "u32": 32,
    "f32": 32, "s64": 64, "u64": 64, "f64": 64, "c64": 64, "c128": 128, "f4e2m1fn": 4, "f8e8m0fnu": 8, "f8e4m3fn": 8, "f8e5m2": 8,
    "f8e4m3": 8, "f8e3m4": 8, "f8e4m3b11fnuz": 8, "f8e4m3fnuz": 8, "f8e5m2fnuz": 8,
}  # fmt: skip
NAMES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "f64": "float64", "pred": "bool", "c64": "complex64", "c128": "complex128"}
COLLECTIVES = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "collective_permute",
    "collective-broadcast": "collective_permute",
}
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
_LINE = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*)")
_HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) .*\{\s*")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|called_computations=\{|branch_computations=\{|\w+_computation)=?%?([\w.\-]+(?:, ?%[\w.\-]+)*)"
)


@dataclasses.dataclass(frozen=True)
class Array:
    """Dtype as numpy calls it, and shape on one device."""

    dtype: str
    shape: tuple[int, ...]
    bits: int

    @property
    def size(self) -> int:
        """How many elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """How many bytes."""
        return -(-self.size * self.bits // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line: what it gives (a tuple's arrays one after the other), what it takes, and the rest as text."""

    name: str
    arrays: tuple[Array, ...]
    op: str
    operands: tuple[str, ...]
    rest: str

    @functools.cached_property
    def scope(self) -> str:
        """Where in the program it comes from, as jax names it."""
        found = re.search(r'op_name="([^"]*)"', self.rest)
        return found.group(1) if found else ""

    @property
    def called(self) -> tuple[str, ...]:
        """The computations that it runs."""
        text = self.rest.split("metadata=")[0].split("backend_config=")[0]
        return tuple(name.lstrip("%") for found in _CALLED.findall(text) for name in re.split(r", ?", found))

    def named(self, key: str) -> str:
        """The computation that is called in this role, such as a loop's body; "" if none is."""
        found = re.search(rf"\b{key}=%?([\w.\-]+)", self.rest)
        return found.group(1) if found else ""


@dataclasses.dataclass(frozen=True)
class Module:
    """A program's computations by name, each in its schedule's order."""

    computations: dict[str, tuple[Instruction, ...]]
    entry: str
    partitions: int

    @functools.cached_property
    def _tables(self) -> dict[str, dict[str, Instruction]]:
        return {name: {one.name: one for one in lines} for name, lines in self.computations.items()}

    def operands(self, computation: str, one: Instruction) -> list[Instruction]:
        """The instructions whose results `one` takes."""
        table = self._tables[computation]
        return [table[name] for name in one.operands if name in table]

    @property
    def endless(self) -> list[str]:
        """Loops of which XLA does not know how often they run."""
        return [one.name for name, one in self.inside(self.entry) if one.op == "while" and self.trips(name, one) is None]

    def trips(self, computation: str, one: Instruction) -> int | None:
        """How often a loop runs, if XLA says it, or its counter does: one that grows by one from a constant up to a constant."""
        found = re.search(r'known_trip_count"?:\s*\{"n":\s*"(\d+)"', one.rest)
        if found:
            return int(found.group(1))
        condition, body = one.named("condition"), one.named("body")
        test, result = self.computations.get(condition, ())[-1:], self.computations.get(body, ())[-1:]
        start = self._source(computation, one.operands[0]) if one.operands else None
        if not test or not result or start is None or test[0].op != "compare" or "direction=LT" not in test[0].rest:
            return None
        counter, end = (self._source(condition, name) for name in test[0].operands)
        index = re.search(r"index=(\d+)", counter.rest) if counter is not None and counter.op == "get-tuple-element" else None
        if index is None or start.op != "tuple" or result[0].op != "tuple":
            return None
        at = int(index.group(1))
        grown, begin = self._source(body, result[0].operands[at]), self._source(computation, start.operands[at])
        steps = [self._source(body, name) for name in grown.operands] if grown is not None and grown.op == "add" else []
        if not any(step is not None and _number(step) == 1 for step in steps) or _number(begin) is None or _number(end) is None:
            return None
        return max((_number(end) or 0) - (_number(begin) or 0), 0)

    def _source(self, computation: str, name: str) -> Instruction | None:
        """What an operand is, copies left out."""
        found = self._tables[computation].get(name)
        while found is not None and found.op in ("copy", "bitcast", "opt-barrier") and found.operands:
            found = self._tables[computation].get(found.operands[0])
        return found

    def scopes(self, computation: str, one: Instruction) -> list[str]:
        """Where an instruction comes from. XLA leaves some that it has put together from several without a word: then it is where what they
        reduce by comes from, and what they take."""
        if one.scope:
            return plain_scopes(one.scope)
        found = [part.scope for part in self.computations.get(one.named("to_apply"), ())]
        taken = [one]
        for _ in range(4):
            taken = [part for last in taken for part in self.operands(computation, last) if part.op != "parameter"]
            found += [part.scope for part in taken]
            taken = [part for part in taken if not part.scope]
        return list(dict.fromkeys(plain for scope in found if scope for plain in plain_scopes(scope))) or [""]

    def inside(self, name: str) -> Iterator[tuple[str, Instruction]]:
        """All instructions that one of a computation's runs, fusions and calls within them too."""
        for one in self.computations.get(name, ()):
            yield name, one
            for called in one.called:
                yield from self.inside(called)


def parse(text: str) -> Module:
    """Read `compiled.as_text()`."""
    computations: dict[str, list[Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if not line.startswith((" ", "}")) and line.rstrip().endswith("{") and not line.startswith("HloModule"):
            head = _HEAD.match(line)
            if head:
                current = computations.setdefault(head.group(2), [])
                entry = head.group(2) if head.group(1) else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and (found := _LINE.match(line)):
            current.append(_instruction(*found.groups()))
    count = re.search(r"num_partitions=(\d+)", text.partition("\n")[0])
    return Module({name: tuple(lines) for name, lines in computations.items()}, entry, int(count.group(1)) if count else 1)


def _number(one: Instruction | None) -> int | None:
    found = re.match(r"\((-?\d+)\)", one.rest) if one is not None and one.op == "constant" else None
    return int(found.group(1)) if found else None


def _instruction(name: str, text: str) -> Instruction:
    kind, rest = _balanced(text) if text.startswith("(") else text.split(" ", 1)
    op, _, rest = rest.strip().partition("(")
    inner, rest = _balanced("(" + rest)
    operands = () if op in ("constant", "parameter", "iota") else tuple(re.findall(r"%([\w.\-]+)", inner))
    return Instruction(name, arrays_of(kind), op, operands, f"({inner[1:-1]}) {rest}" if op in ("parameter", "constant") else rest)


def _balanced(text: str) -> tuple[str, str]:
    """The parenthesis that a text begins with, and what comes after it."""
    depth = 0
    for index, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return text[: index + 1], text[index + 1 :]
    return text, ""


def arrays_of(kind: str) -> tuple[Array, ...]:
    """The arrays of a type, those of a tuple one after the other.

    >>> [str(array) for array in arrays_of("(f32[2,3]{1,0}, /*index=1*/bf16[])")]
    ['float32[2, 3]', 'bfloat16[]']
    """
    found = []
    for short, sizes in _ARRAY.findall(kind):
        if short in BITS:
            shape = tuple(int(size.lstrip("<=")) for size in sizes.split(",") if size)
            long = NAMES.get(short) or re.sub(r"^f(\d)", r"float\1", re.sub(r"^s(\d)", r"int\1", re.sub(r"^u(\d)", r"uint\1", short)))
            found.append(Array(long, shape, BITS[short]))
    return tuple(found)


def plain_scopes(scope: str) -> list[str]:
    """An instruction's scope without the functions that all of the program is in; several, where XLA has put several together.

    >>> plain_scopes("jit(call)/call_exported/jit(<lambda>)/push/psum"), plain_scopes("jit(f)/shard_map/(metrics/psum:push/psum)")
    (['push/psum'], ['shard_map/metrics/psum', 'shard_map/push/psum'])
    """
    plain = re.sub(r"^jit\([^)]*\)/(?:call_exported/jit\([^)]*\)/)?", "", scope)
    several = re.fullmatch(r"(.*?)\((.*:.*)\)", plain) if ":" in plain else None
    return [several.group(1) + part for part in several.group(2).split(":")] if several else [plain]


def collective_kind(op: str) -> str | None:
    """What a collective, its start included, is called in the rest of the library; None for another operation or an end."""
    return COLLECTIVES.get(op.removesuffix("-start"))


def payload(one: Instruction) -> tuple[Array, ...]:
    """What a collective gives on each device; of a start, the half of its tuple that is not what it takes."""
    if one.op.endswith("-start") and not one.op.startswith("all-reduce"):
        count = len(one.operands)
        return one.arrays[count : 2 * count]
    return one.arrays


def groups(one: Instruction, partitions: int) -> list[list[int]]:
    """Which devices meet: the groups of a collective, or the pairs of a permutation, in any of the four ways XLA spells them."""
    text = one.rest
    if pairs := re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", text):
        return [[int(a), int(b)] for a, b in re.findall(r"\{(\d+),(\d+)\}", pairs.group(1))]
    if listed := re.search(r"replica_groups=\{((?:\{[\d,]+\},?)+)\}", text):
        return [[int(n) for n in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", listed.group(1))]
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        shape, dims, order = ([int(n) for n in part.split(",")] if part else [] for part in iota.groups())
        ids = np.arange(math.prod(dims)).reshape(dims)
        return (ids.transpose(order) if order else ids).reshape(shape).tolist()
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\](?:, ?device_ids=\(([^)]*)\))? ?\{([^}]*)\}", text):
        return _mesh_groups(*mesh.groups())
    return [list(range(partitions))]


def _mesh_groups(axes: str, ids: str | None, over: str) -> list[list[int]]:
    """Groups along axes of a mesh, whole ones ('axis') or parts ('axis':(before)size)."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", axes)}
    wanted = [
        (name, int(before or 1), int(size or sizes[name])) for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", over)
    ]
    split: list[tuple[str, int, int]] = []  # (axis, what lies before it, size), outermost first
    for name, size in sizes.items():
        cuts = sorted({1, size, *itertools.chain.from_iterable((before, before * part) for axis, before, part in wanted if axis == name)})
        split += [(name, first, second // first) for first, second in itertools.pairwise(cuts)] or [(name, 1, 1)]
    order = np.array([int(n) for n in re.findall(r"\d+", ids)]) if ids else np.arange(math.prod(sizes.values()))
    inner = [
        n for axis, before, part in wanted for n, (name, at, size) in enumerate(split) if name == axis and before <= at < before * part
    ]
    outer = [n for n in range(len(split)) if n not in inner]
    grid = order.reshape([size for _, _, size in split]).transpose(outer + inner)
    return grid.reshape(-1, math.prod(split[n][2] for n in inner)).tolist()
