"""A parser for the text of XLA's compiled programs: instructions in schedule order, loops, and
collectives with their device groups.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator

import numpy as np

# of numbers, by XLA's letters before their bits
KINDS = {"s": "int", "u": "uint", "f": "float", "bf": "bfloat", "c": "complex"}
COLLECTIVES = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "collective_permute",
    "collective-broadcast": "collective_permute",
}
_ARRAY = re.compile(rf"\b(?:pred|({'|'.join(KINDS)})(\d+)(\w*))\[([\d,<=]*)\](\{{[^{{}}]*\}})?")
_HOST = "S(5)"  # XLA's memory space of the host, in an array's layout
_LINE = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*)")
_HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) .*\{\s*")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|called_computations=\{|branch_computations=\{"
    r"|\w+_computation)=?%?([\w.\-]+(?:, ?%[\w.\-]+)*)"
)


def captured(pattern: str, text: str) -> str:
    """The group of a pattern's first match in a text; "" if there is none."""
    match = re.search(pattern, text)
    return match.group(1) if match else ""


@dataclasses.dataclass(frozen=True)
class Array:
    """An array's dtype, by numpy's name, and its shape on one device; `host`: it lies in the host's
    memory.
    """

    dtype: str
    shape: tuple[int, ...]
    bits: int
    host: bool = False

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Number of bytes."""
        return -(-self.size * self.bits // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line: its result (a tuple is flattened), its operands, and the rest as text."""

    name: str
    arrays: tuple[Array, ...]
    op: str
    operands: tuple[str, ...]
    rest: str

    @functools.cached_property
    def scope(self) -> str:
        """Its origin in the JAX program: XLA's `op_name`."""
        return captured(r'op_name="([^"]*)"', self.rest)

    @property
    def custom_call(self) -> str:
        """The library's function that a custom call runs; "" for other operations."""
        return captured(r'custom_call_target="([^"]*)"', self.rest)

    @property
    def called(self) -> tuple[str, ...]:
        """The computations that it runs."""
        text = self.rest.split("metadata=")[0].split("backend_config=")[0]
        return tuple(
            name.lstrip("%") for names in _CALLED.findall(text) for name in re.split(r", ?", names)
        )

    def called_as(self, key: str) -> str:
        """The computation that is called in this role, such as a loop's body; "" if there is
        none.
        """
        return captured(rf"\b{key}=%?([\w.\-]+)", self.rest)


@dataclasses.dataclass(frozen=True)
class Module:
    """A program's computations by name, each in schedule order."""

    computations: dict[str, tuple[Instruction, ...]]
    entry: str
    partitions: int

    @functools.cached_property
    def _tables(self) -> dict[str, dict[str, Instruction]]:
        return {
            name: {instr.name: instr for instr in lines}
            for name, lines in self.computations.items()
        }

    def operands(self, computation: str, instr: Instruction) -> list[Instruction]:
        """The instructions whose results `instr` takes."""
        table = self._tables[computation]
        return [table[name] for name in instr.operands if name in table]

    @property
    def unbounded_loops(self) -> list[str]:
        """Loops whose trip count is not known."""
        nested = self.nested(self.entry)
        return [
            instr.name
            for name, instr in nested
            if instr.op == "while" and self.trip_count(name, instr) is None
        ]

    def trip_count(self, computation: str, instr: Instruction) -> int | None:
        """How often a loop runs: as XLA says, or as its counter shows, if that is incremented from
        one constant to another.
        """
        if known := captured(r'known_trip_count"?:\s*\{"n":\s*"(\d+)"', instr.rest):
            return int(known)
        condition, body = instr.called_as("condition"), instr.called_as("body")
        test, result = (
            self.computations.get(condition, ())[-1:],
            self.computations.get(body, ())[-1:],
        )
        start = self._source(computation, instr.operands[0]) if instr.operands else None
        if (
            not test
            or not result
            or start is None
            or test[0].op != "compare"
            or "direction=LT" not in test[0].rest
        ):
            return None
        counter, end = (self._source(condition, name) for name in test[0].operands)
        index = (
            captured(r"index=(\d+)", counter.rest)
            if counter is not None and counter.op == "get-tuple-element"
            else ""
        )
        if not index or start.op != "tuple" or result[0].op != "tuple":
            return None
        following = self._source(body, result[0].operands[int(index)])
        steps = (
            [_number(self._source(body, name)) for name in following.operands]
            if following and following.op == "add"
            else []
        )
        first, last = _number(self._source(computation, start.operands[int(index)])), _number(end)
        return None if 1 not in steps or first is None or last is None else max(last - first, 0)

    def _source(self, computation: str, name: str) -> Instruction | None:
        """The instruction that produces an operand, copies skipped."""
        source = self._tables[computation].get(name)
        while (
            source is not None
            and source.op in ("copy", "bitcast", "opt-barrier")
            and source.operands
        ):
            source = self._tables[computation].get(source.operands[0])
        return source

    def scopes(self, computation: str, instr: Instruction) -> list[str]:
        """The scopes that an instruction comes from. XLA drops those of some merged instructions:
        then the scopes of their reduction function and of their operands.
        """
        if instr.scope:
            return plain_scopes(instr.scope)
        scopes = [part.scope for part in self.computations.get(instr.called_as("to_apply"), ())]
        unscoped = [instr]
        for _ in range(4):
            operands = [
                part
                for last in unscoped
                for part in self.operands(computation, last)
                if part.op != "parameter"
            ]
            scopes += [part.scope for part in operands]
            unscoped = [part for part in operands if not part.scope]
        return list(
            dict.fromkeys(plain for scope in scopes if scope for plain in plain_scopes(scope))
        ) or [""]

    def nested(self, name: str) -> Iterator[tuple[str, Instruction]]:
        """All instructions of a computation and of those that it calls, each with the name of its
        computation.
        """
        for instr in self.computations.get(name, ()):
            yield name, instr
            for called in instr.called:
                yield from self.nested(called)


def parse(text: str) -> Module:
    """Read `compiled.as_text()`."""
    computations: dict[str, list[Instruction]] = {}
    entry = name = ""
    for line in text.splitlines():
        if head := _HEAD.fullmatch(line):
            name = head.group(2)
            computations[name] = []
            entry = name if head.group(1) else entry
        elif name and (match := _LINE.match(line)):
            computations[name].append(_instruction(*match.groups()))
    count = captured(r"num_partitions=(\d+)", text.partition("\n")[0])
    return Module(
        {name: tuple(lines) for name, lines in computations.items()}, entry, int(count or 1)
    )


def _number(instr: Instruction | None) -> int | None:
    match = (
        re.match(r"\((-?\d+)\)", instr.rest)
        if instr is not None and instr.op == "constant"
        else None
    )
    return int(match.group(1)) if match else None


def _instruction(name: str, text: str) -> Instruction:
    kind, rest = _balanced(text) if text.startswith("(") else text.split(" ", 1)
    op, _, rest = rest.strip().partition("(")
    inner, rest = _balanced("(" + rest)
    operands = (
        () if op in ("constant", "parameter", "iota") else tuple(re.findall(r"%([\w.\-]+)", inner))
    )
    if op == "fusion-start" and not any(array.host for array in arrays_of(kind)):
        # ((operands), results, context): from jaxlib 0.11 on, XLA:GPU starts copies of slices
        # beside other kernels. Plans take them for fusions that nothing runs beside.
        results = arrays_of(_balanced(kind[1:])[1])[:-1]
        return Instruction(name, results, "fusion", operands, rest)
    return Instruction(
        name,
        arrays_of(kind),
        op,
        operands,
        f"({inner[1:-1]}) {rest}" if op in ("parameter", "constant") else rest,
    )


def _balanced(text: str) -> tuple[str, str]:
    """The parenthesized part that a text begins with, and the rest."""
    depth = 0
    for index, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return text[: index + 1], text[index + 1 :]
    return text, ""


def arrays_of(kind: str) -> tuple[Array, ...]:
    """The arrays of a type; a tuple is flattened.

    >>> [str(array) for array in arrays_of("(f32[2,3]{1,0}, /*index=1*/bf16[])")]
    ['float32[2, 3]', 'bfloat16[]']
    """
    arrays = []
    for letters, bits, more, sizes, order in _ARRAY.findall(kind):
        shape, host = (
            tuple(int(size.lstrip("<=")) for size in sizes.split(",") if size),
            _HOST in order,
        )
        arrays.append(
            Array(f"{KINDS[letters]}{bits}{more}", shape, int(bits), host)
            if letters
            else Array("bool", shape, 8, host)
        )
    return tuple(arrays)


def plain_scopes(scope: str) -> list[str]:
    """An instruction's scope without the outermost functions; several scopes if XLA has merged
    several instructions.

    >>> (
    ...     plain_scopes("jit(call)/call_exported/jit(<lambda>)/stats/psum"),
    ...     plain_scopes("jit(f)/shard_map/(metrics/psum:stats/psum)"),
    ... )
    (['stats/psum'], ['shard_map/metrics/psum', 'shard_map/stats/psum'])
    >>> plain_scopes("jit(f)/transpose(jvp(up))/(query/dot:key/dot)")
    ['transpose(jvp(up))/query/dot', 'transpose(jvp(up))/key/dot']
    """
    plain = re.sub(r"^jit\([^)]*\)/(?:call_exported/jit\([^)]*\)/)?", "", scope)
    several = re.fullmatch(r"((?:.*/)?)\((.*:.*)\)", plain) if ":" in plain else None
    return [several.group(1) + part for part in several.group(2).split(":")] if several else [plain]


def collective_kind(op: str) -> str | None:
    """This library's name for a collective or its start; None for another operation or a
    collective's end.
    """
    return COLLECTIVES.get(op.removesuffix("-start"))


def payload(instr: Instruction) -> tuple[Array, ...]:
    """A collective's result on each device; of a start that has its operands too, the half of its
    tuple that is not these.

    The start of an all-reduce has them from jaxlib 0.11 on.
    """
    count = len(instr.operands)
    return (
        instr.arrays[count : 2 * count]
        if instr.op.endswith("-start") and len(instr.arrays) > count
        else instr.arrays
    )


def groups(instr: Instruction, partitions: int) -> list[list[int]]:
    """The groups of a collective, or the pairs of a permutation, in any of XLA's four notations."""
    text = instr.rest
    if pairs := re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", text):
        return [[int(a), int(b)] for a, b in re.findall(r"\{(\d+),(\d+)\}", pairs.group(1))]
    if listed := re.search(r"replica_groups=\{((?:\{[\d,]+\},?)+)\}", text):
        return [
            [int(n) for n in group.split(",")]
            for group in re.findall(r"\{([\d,]+)\}", listed.group(1))
        ]
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        shape, dims, order = (
            [int(n) for n in part.split(",")] if part else [] for part in iota.groups()
        )
        ids = np.arange(math.prod(dims)).reshape(dims)
        return (ids.transpose(order) if order else ids).reshape(shape).tolist()
    if mesh := re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, ?device_ids=\(([^)]*)\))? ?\{([^}]*)\}", text
    ):
        return _mesh_groups(*mesh.groups())
    return [list(range(partitions))]


def _mesh_groups(axes: str, ids: str | None, over: str) -> list[list[int]]:
    """Groups along mesh axes: full ones ('axis') or parts ('axis':(before)size)."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", axes)}
    wanted = [
        (name, int(before or 1), int(size or sizes[name]))
        for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", over)
    ]
    split: list[tuple[str, int, int]] = []  # (axis, what lies before it, size), outermost first
    for name, size in sizes.items():
        bounds = {
            1,
            size,
            *itertools.chain.from_iterable(
                (before, before * part) for axis, before, part in wanted if axis == name
            ),
        }
        split += [
            (name, first, second // first) for first, second in itertools.pairwise(sorted(bounds))
        ] or [(name, 1, 1)]
    order = (
        np.array([int(n) for n in re.findall(r"\d+", ids)])
        if ids
        else np.arange(math.prod(sizes.values()))
    )
    inner = [
        n
        for axis, before, part in wanted
        for n, (name, at, size) in enumerate(split)
        if name == axis and before <= at < before * part
    ]
    outer = [n for n in range(len(split)) if n not in inner]
    grid = order.reshape([size for _, _, size in split]).transpose(outer + inner)
    return grid.reshape(-1, math.prod(split[n][2] for n in inner)).tolist()
