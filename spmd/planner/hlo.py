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
    """Return the group of a pattern's first match in a text; "" if there is none."""
    match = re.search(pattern, text)
    if not match:
        return ""
    return match.group(1)


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
    """One line: its result (a tuple is flattened), its operands, and its attributes as text."""

    name: str
    arrays: tuple[Array, ...]
    op: str
    operands: tuple[str, ...]
    attributes: str

    @functools.cached_property
    def scope(self) -> str:
        """The origin in the JAX program: XLA's `op_name`."""
        return captured(r'op_name="([^"]*)"', self.attributes)

    @property
    def custom_call(self) -> str:
        """The library's function that a custom call runs; "" for other operations."""
        return captured(r'custom_call_target="([^"]*)"', self.attributes)

    @property
    def called(self) -> tuple[str, ...]:
        """The computations that it runs."""
        # names in the metadata and in the configuration of a backend are of no computations
        text = self.attributes.split("metadata=")[0].split("backend_config=")[0]
        computations: list[str] = []
        for names in _CALLED.findall(text):
            computations += [name.lstrip("%") for name in re.split(r", ?", names)]
        return tuple(computations)

    def called_as(self, key: str) -> str:
        """Return the computation that is called in this role, such as a loop's body; "" if there
        is none.
        """
        return captured(rf"\b{key}=%?([\w.\-]+)", self.attributes)


@dataclasses.dataclass(frozen=True)
class Module:
    """A program's computations by name, each in schedule order."""

    computations: dict[str, tuple[Instruction, ...]]
    entry: str
    partitions: int

    @functools.cached_property
    def _tables(self) -> dict[str, dict[str, Instruction]]:
        tables = {}
        for name, lines in self.computations.items():
            tables[name] = {instr.name: instr for instr in lines}
        return tables

    @property
    def instructions(self) -> Iterator[tuple[str, Instruction]]:
        """Every instruction of the program, each with the name of its computation."""
        for name, lines in self.computations.items():
            for instr in lines:
                yield name, instr

    def operands(self, computation: str, instr: Instruction) -> list[Instruction]:
        """Return the instructions whose results `instr` takes."""
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
        """Return the number of iterations of a loop: as XLA says, or as its counter shows, if that
        is incremented from one constant to another; None if it is not known.
        """
        # XLA writes the count into the configuration of a loop that it has analysed
        if stated := captured(r'known_trip_count"?:\s*\{"n":\s*"(\d+)"', instr.attributes):
            return int(stated)
        condition, body = instr.called_as("condition"), instr.called_as("body")
        tests = self.computations.get(condition, ())[-1:]
        results = self.computations.get(body, ())[-1:]
        # what the loop begins with is a tuple, and the counter one of its elements
        start = None
        if instr.operands:
            start = self._source(computation, instr.operands[0])
        if not tests or not results or start is None:
            return None
        test, result = tests[0], results[0]
        # lax.scan and lax.fori_loop count up: their condition is counter < end
        if test.op != "compare" or "direction=LT" not in test.attributes:
            return None
        counter, end = (self._source(condition, name) for name in test.operands)
        if counter is None or counter.op != "get-tuple-element":
            return None
        index = captured(r"index=(\d+)", counter.attributes)
        if not index or start.op != "tuple" or result.op != "tuple":
            return None
        following = self._source(body, result.operands[int(index)])
        if following is None or following.op != "add":
            return None
        steps = [_number(self._source(body, name)) for name in following.operands]
        first = _number(self._source(computation, start.operands[int(index)]))
        last = _number(end)
        if 1 not in steps or first is None or last is None:
            return None
        return max(last - first, 0)

    def _source(self, computation: str, name: str) -> Instruction | None:
        """Return the instruction that produces an operand, copies skipped."""
        table = self._tables[computation]
        source = table.get(name)
        # XLA copies the state of a loop where its buffers are used again
        while source is not None and source.op in ("copy", "bitcast", "opt-barrier"):
            if not source.operands:
                break
            source = table.get(source.operands[0])
        return source

    def scopes(self, computation: str, instr: Instruction) -> list[str]:
        """Return the scopes that an instruction comes from."""
        if instr.scope:
            return plain_scopes(instr.scope)
        # XLA drops the scopes of some merged instructions: take those of the reduction function,
        # and of the operands, up to four operations back
        scopes = [part.scope for part in self.computations.get(instr.called_as("to_apply"), ())]
        unscoped = [instr]
        for _ in range(4):
            operands: list[Instruction] = []
            for last in unscoped:
                operands += self.operands(computation, last)
            operands = [part for part in operands if part.op != "parameter"]
            scopes += [part.scope for part in operands]
            unscoped = [part for part in operands if not part.scope]
        plain: dict[str, None] = {}
        for scope in filter(None, scopes):
            plain |= dict.fromkeys(plain_scopes(scope))
        return list(plain) or [""]

    def nested(self, name: str) -> Iterator[tuple[str, Instruction]]:
        """Yield all instructions of a computation and of those that it calls, each with the name
        of its computation.
        """
        for instr in self.computations.get(name, ()):
            yield name, instr
            for called in instr.called:
                yield from self.nested(called)

    def fused(self, computation: str, instr: Instruction) -> Iterator[tuple[str, Instruction]]:
        """Yield an instruction and all that it runs, each with the name of its computation."""
        yield computation, instr
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
            if head.group(1):
                entry = name
        elif name and (match := _LINE.match(line)):
            computations[name].append(_instruction(*match.groups()))
    # The first line of the text has the attributes of the module.
    count = captured(r"num_partitions=(\d+)", text.partition("\n")[0])
    return Module(
        {name: tuple(lines) for name, lines in computations.items()}, entry, int(count or 1)
    )


def _number(instr: Instruction | None) -> int | None:
    """Return the value of a constant; None for another instruction."""
    if instr is None or instr.op != "constant":
        return None
    match = re.match(r"\((-?\d+)\)", instr.attributes)
    if not match:
        return None
    return int(match.group(1))


def _instruction(name: str, text: str) -> Instruction:
    """Read one line of a computation, from its result's type on."""
    if text.startswith("("):
        kind, text = _balanced(text)
    else:
        kind, text = text.split(" ", 1)
    # the type is followed by `op(operands), attributes`
    op, _, text = text.strip().partition("(")
    inner, text = _balanced("(" + text)
    operands: tuple[str, ...] = ()
    if op not in ("constant", "parameter", "iota"):
        operands = tuple(re.findall(r"%([\w.\-]+)", inner))
    arrays = arrays_of(kind)
    if op == "fusion-start" and not any(array.host for array in arrays):
        # ((operands), results, context): from jaxlib 0.11 on, XLA:GPU starts copies of slices
        # beside other kernels. Plans take them for fusions that nothing runs beside.
        results = arrays_of(_balanced(kind[1:])[1])[:-1]
        return Instruction(name, results, "fusion", operands, text)
    # these have a number or a value in place of operands
    if op in ("parameter", "constant"):
        text = f"({inner[1:-1]}) {text}"
    return Instruction(name, arrays, op, operands, text)


def _balanced(text: str) -> tuple[str, str]:
    """Split the parenthesized part that a text begins with from what follows."""
    # Types of tuples are nested, which no regular expression matches.
    depth = 0
    for index, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return text[: index + 1], text[index + 1 :]
    return text, ""


def arrays_of(kind: str) -> tuple[Array, ...]:
    """Return the arrays of a type; a tuple is flattened.

    >>> [str(array) for array in arrays_of("(f32[2,3]{1,0}, /*index=1*/bf16[])")]
    ['float32[2, 3]', 'bfloat16[]']
    """
    arrays = []
    for letters, bits, more, sizes, order in _ARRAY.findall(kind):
        # A dim of dynamic size is written with its bound, as <=8.
        shape = tuple(int(size.lstrip("<=")) for size in sizes.split(",") if size)
        host = _HOST in order
        if letters:
            arrays.append(Array(f"{KINDS[letters]}{bits}{more}", shape, int(bits), host))
        else:
            # XLA stores a pred in a byte.
            arrays.append(Array("bool", shape, 8, host))
    return tuple(arrays)


def plain_scopes(scope: str) -> list[str]:
    """Return an instruction's scope without the outermost functions; several scopes if XLA has
    merged several instructions.

    >>> (
    ...     plain_scopes("jit(call)/call_exported/jit(<lambda>)/stats/psum"),
    ...     plain_scopes("jit(f)/shard_map/(metrics/psum:stats/psum)"),
    ... )
    (['stats/psum'], ['shard_map/metrics/psum', 'shard_map/stats/psum'])
    >>> plain_scopes("jit(f)/transpose(jvp(up))/(query/dot:key/dot)")
    ['transpose(jvp(up))/query/dot', 'transpose(jvp(up))/key/dot']
    """
    # a program that jax.export has serialized is called in `call_exported`
    plain = re.sub(r"^jit\([^)]*\)/(?:call_exported/jit\([^)]*\)/)?", "", scope)
    several = None
    # Without this check the pattern backtracks much where it cannot match.
    if ":" in plain:
        several = re.fullmatch(r"((?:.*/)?)\((.*:.*)\)", plain)
    if several is None:
        return [plain]
    # jaxlib 0.11 joins the scopes of merged instructions as (one:other), after what they share
    prefix, merged = several.groups()
    return [prefix + part for part in merged.split(":")]


def collective_kind(op: str) -> str | None:
    """Return this library's name for a collective or its start; None for another operation or a
    collective's end.
    """
    return COLLECTIVES.get(op.removesuffix("-start"))


def payload(instr: Instruction) -> tuple[Array, ...]:
    """Return a collective's result on each device."""
    count = len(instr.operands)
    # a start has its operands and then its results; an all-reduce's only from jaxlib 0.11 on
    if instr.op.endswith("-start") and len(instr.arrays) > count:
        return instr.arrays[count : 2 * count]
    return instr.arrays


def groups(instr: Instruction, partitions: int) -> list[list[int]]:
    """Return the groups of a collective, or the pairs of a permutation, in any of XLA's four
    notations.
    """
    text = instr.attributes
    if pairs := re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", text):
        return [[int(a), int(b)] for a, b in re.findall(r"\{(\d+),(\d+)\}", pairs.group(1))]
    # every group written out
    if listed := re.search(r"replica_groups=\{((?:\{[\d,]+\},?)+)\}", text):
        return [integers(group) for group in re.findall(r"\{([\d,]+)\}", listed.group(1))]
    # consecutive numbers, reshaped and transposed
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        shape, dims, order = map(integers, iota.groups())
        ids = np.arange(math.prod(dims)).reshape(dims)
        if order:
            ids = ids.transpose(order)
        return ids.reshape(shape).tolist()
    # the axes of a mesh by name, or parts of them
    if mesh := re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, ?device_ids=\(([^)]*)\))? ?\{([^}]*)\}", text
    ):
        return _mesh_groups(*mesh.groups())
    # no groups: all devices are one
    return [list(range(partitions))]


def integers(text: str | None) -> list[int]:
    """Read the integers in a text; none if it is None.

    >>> integers("4,2"), integers(None)
    ([4, 2], [])
    """
    return [int(number) for number in re.findall(r"\d+", text or "")]


def _mesh_groups(axes: str, ids: str | None, over: str) -> list[list[int]]:
    """Return groups along mesh axes: full ones ('axis') or parts ('axis':(before)size)."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", axes)}
    parts = []  # (axis, what lies before the part, its size)
    for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", over):
        parts.append((name, int(before or 1), int(size or sizes[name])))
    # all axes, divided at the bounds of the parts, outermost first
    split: list[tuple[str, int, int]] = []
    for name, size in sizes.items():
        bounds = {1, size}
        for axis, before, part in parts:
            if axis == name:
                bounds |= {before, before * part}
        pairs = list(itertools.pairwise(sorted(bounds))) or [(1, 1)]
        split += [(name, first, second // first) for first, second in pairs]
    inner = []  # the divided axes that lie in the parts
    for axis, before, part in parts:
        for number, (name, at, _) in enumerate(split):
            if name == axis and before <= at < before * part:
                inner.append(number)
    outer = [number for number in range(len(split)) if number not in inner]
    if ids:
        order = np.array(integers(ids))
    else:
        order = np.arange(math.prod(sizes.values()))
    grid = order.reshape([size for _, _, size in split]).transpose(outer + inner)
    return grid.reshape(-1, math.prod(split[number][2] for number in inner)).tolist()
