"""Serialize functions and results between a notebook and its processes: with cloudpickle, and jax
arrays as numpy arrays.

An array that is sharded over processes is sent in shards, each by one process that has it, and is
assembled in the notebook: no device has to hold all of it, and no process waits for another. Only a
process and its own children use this, over sockets.
"""

import collections
import dataclasses
import functools
import io
import pickle
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import numpy as np

from spmd.base.tree import describe, path_of
from spmd.distributed.launcher_protocol import format_error
from spmd.errors import OptionError, ProcessError, import_extra, type_name

FIX = (
    "arrays, numbers, text, and containers of them; of what spmd.fit returns, its history, its "
    "state, or its model."
)


@dataclasses.dataclass(frozen=True)
class ShardedResult:
    """One process's shards of an array that is sharded over several.

    Attributes:
      text: its dtype and shape, for people.
      shape: the global shape.
      dtype: the dtype.
      shards: index and data of each; only the first replica.
    """

    text: str
    shape: tuple[int, ...]
    dtype: Any
    shards: list[tuple[Any, np.ndarray]]


class _Sink(io.RawIOBase):
    """Discards what is written."""

    def write(self, data: Any) -> int:
        return len(data)


def serialize_call(
    function: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]
) -> bytes:
    """A function and its arguments, for `pickle.loads`.

    Raises:
      OptionError: a part of it cannot be sent; names the part.
    """
    try:
        return _dumps((function, tuple(args), dict(options)))
    except Exception as error:
        named = {"the function": function}
        named |= {f"argument {name}": arg for name, arg in (*enumerate(args), *options.items())}
        part = _first_unserializable(named, _dumps)
        fix = (
            "create what cannot be sent, such as open files, locks and meshes, inside the function."
        )
        raise OptionError(
            f"{part} cannot be sent to other processes: {format_error(error)}.", fix=fix
        ) from error


def _dumps(value: Any) -> bytes:
    file = io.BytesIO()
    _pickler()(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


def _pickler() -> Any:
    """A subclass of cloudpickle's pickler that sends with a function the name of its file or cell,
    so that tracebacks have its lines.
    """
    base = import_extra("cloudpickle", "notebooks").Pickler
    # cloudpickle 3.1.3 makes a code object again without its `co_filename`

    def reduce_code(code: types.CodeType) -> tuple:
        return _make_code, (base.dispatch_table[types.CodeType](code)[1], code.co_filename)

    class Pickler(base):
        dispatch_table: ClassVar = collections.ChainMap(
            {types.CodeType: reduce_code}, base.dispatch_table
        )

    return Pickler


def _make_code(arguments: tuple, filename: str) -> types.CodeType:
    return types.CodeType(*arguments).replace(co_filename=filename)


def serialize_result(value: Any, *, with_value: bool) -> tuple[bytes, dict[int, ShardedResult]]:
    """A result, and this process's shards of the sharded arrays in it, by their order in it.

    Args:
      value: anything that can be pickled, and jax arrays.
      with_value: whether to serialize the value too, or only the shards.

    Raises:
      ProcessError: a part of it cannot be sent; names the part.
    """
    file = io.BytesIO()
    sink = _Sink()
    if with_value:
        sink = file
    try:
        pieces = _dump(value, sink, with_value)
    except Exception as error:
        part = _first_unserializable({"the result": value}, lambda part: _dump(part, _Sink(), True))
        raise ProcessError(
            f"{part} cannot be sent to the notebook: {format_error(error)}.", 0, fix=FIX
        ) from error
    return file.getvalue(), pieces


def _dump(value: Any, file: Any, with_value: bool) -> dict[int, ShardedResult]:
    """Pickle a result, and return this process's shards of the sharded arrays in it."""
    arrays = _Arrays(with_value)

    class Pickler(_pickler()):
        def persistent_id(self, obj: Any) -> Any:
            return arrays.replacement(obj)

    Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return arrays.pieces


class _Arrays:
    """The replacements of the jax arrays in a result, and the shards of the sharded ones."""

    def __init__(self, with_value: bool):
        self.pieces: dict[int, ShardedResult] = {}
        self._with_value = with_value
        # by id: the array, kept alive so that its id stays unique, and its replacement
        self._replacements: dict[int, tuple[Any, Any]] = {}

    def replacement(self, obj: Any) -> Any:
        """The tuple that is pickled instead of an object; None if it is not a jax array."""
        if not isinstance(obj, jax.Array):
            return None
        if id(obj) not in self._replacements:
            replacement = self._make_replacement(len(self._replacements), obj)
            self._replacements[id(obj)] = (obj, replacement)
        return self._replacements[id(obj)][1]

    def _make_replacement(self, number: int, array: jax.Array) -> tuple:
        """Make the tuple that replaces an array. Numbers follow the order of the arrays, so they
        agree between processes that return the same.
        """
        here = array.is_fully_addressable or (
            array.is_fully_replicated and bool(array.addressable_shards)
        )
        if here and not self._with_value:
            return ("array", None)
        if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
            if not here:
                raise TypeError("random keys that are sharded over processes cannot be sent")
            # key_data of a global array would be a computation of all processes
            local = array if array.is_fully_addressable else array.addressable_data(0)
            return ("key", str(jax.random.key_impl(local)), np.asarray(jax.random.key_data(local)))
        if here:
            # a copy, since numpy's view of a jax array is read-only
            return ("array", np.array(array))
        shards = [
            (shard.index, np.asarray(shard.data))
            for shard in array.addressable_shards
            # Of equal shards one is enough; the first replica is in one process only.
            if shard.replica_id == 0
        ]
        self.pieces[number] = ShardedResult(describe(array), array.shape, array.dtype, shards)
        return ("spread", number)


def deserialize_result(data: bytes, pieces: Mapping[int, Mapping[int, ShardedResult]]) -> Any:
    """A result, from the message of process 0 and the shards of all processes.

    Raises:
      ProcessError: not all processes have returned the same array; or a class in it cannot be
        imported here.
    """

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: Any) -> Any:
            kind, *parts = pid
            if kind == "key":
                return jax.random.wrap_key_data(parts[1], impl=parts[0])
            if kind == "array":
                return parts[0]
            return assemble(parts[0])

    # cached, so that an array that occurs twice in the result is one array here too
    assemble = functools.cache(functools.partial(_assemble, pieces=pieces))
    try:
        return Unpickler(io.BytesIO(data)).load()
    except ProcessError:
        raise
    except Exception as error:
        raise ProcessError(
            f"the result of process 0 cannot be read here: {format_error(error)}.", 0, fix=FIX
        ) from error


def _assemble(number: int, pieces: Mapping[int, Mapping[int, ShardedResult]]) -> np.ndarray:
    """The array of that number, from all processes' shards of it."""
    first = pieces[0][number]
    array = np.empty(first.shape, first.dtype)
    filled = 0
    without: list[int] = []  # processes that have not returned this array
    for rank, parts in pieces.items():
        part = parts.get(number)
        if part is None or part.text != first.text:
            without.append(rank)
            continue
        for index, shard in part.shards:
            array[index] = shard
            filled += shard.size
    if filled == array.size:
        return array
    who, rank = "the others have", None
    if without:
        who, rank = f"process {without[0]} has", without[0]
    raise ProcessError(
        f"process 0 has returned an array {first.text}, of which {filled} of {array.size} "
        f"elements arrived: {who} not returned it.",
        rank,
        fix="return the same from every process: no `if jax.process_index() == 0` before it.",
    )


def _first_unserializable(named: Mapping[str, Any], dump: Callable[[Any], Any]) -> str:
    """A description of the first leaf that cannot be pickled."""
    for name, value in named.items():
        for keys, leaf in jax.tree_util.tree_leaves_with_path(value):
            try:
                dump(leaf)
            except Exception:
                where = f"{name}, {path_of(keys)}" if keys else name
                return f"{where} ({type_name(leaf)})"
    return next(iter(named))
