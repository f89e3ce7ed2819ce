"""Functions and results on their way between a notebook and its processes: by cloudpickle, arrays as numpy arrays.

An array that is cut over processes travels in pieces, each from a process that has it, and is put together where it arrives: no device
has to hold it whole, and no process waits for another. Only a process and those that it has started itself talk so, over pipes.
"""

import dataclasses
import functools
import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from spmd.errors import OptionError, ProcessError, import_extra, type_name
from spmd.tree import describe, path_of

FIX = "arrays, numbers, text, and containers of them; of what spmd.fit returns, its history, its state, or its model."


@dataclasses.dataclass(frozen=True)
class Pieces:
    """What a process has of an array that is spread over several.

    Attributes:
      what: its dtype and shape, for people.
      shape: of the whole array.
      dtype: of the whole array.
      pieces: where each belongs, and what it is; of copies only the first one's.
    """

    what: str
    shape: tuple[int, ...]
    dtype: Any
    pieces: list[tuple[Any, np.ndarray]]


class _Sink(io.RawIOBase):
    """Where bytes go that nobody needs."""

    def write(self, data: Any) -> int:
        return len(data)


def _dump(value: Any, file: Any, instead: Callable[[Any], Any]) -> None:
    """Pickle a value; `instead` gives what stands for an object in it, None for itself."""
    cloudpickle = import_extra("cloudpickle", "notebooks")

    class Pickler(cloudpickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            return instead(obj)

    Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)


def packed_call(function: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]) -> bytes:
    """A function and what it is called with, as `pickle.loads` reads it.

    Raises:
      OptionError: some of it cannot be sent; says which part.
    """
    dumps = import_extra("cloudpickle", "notebooks").dumps
    try:
        return dumps((function, tuple(args), dict(options)), protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        named = {"the function": function} | {f"argument {at}": arg for at, arg in enumerate(args)}
        part = _odd_part(named | {f"argument {name}": arg for name, arg in options.items()}, dumps)
        fix = "what a function needs and cannot be sent, such as open files, locks and meshes, it makes itself."
        raise OptionError(f"{part} cannot be sent to other processes: {_told(error)}.", fix=fix) from error


def packed(value: Any, *, whole: bool) -> tuple[bytes, dict[int, Pieces]]:
    """A result, and this process's pieces of arrays in it that are spread over processes, by their order in it.

    Args:
      value: anything that can be pickled, but for jax arrays in it.
      whole: whether the result is wanted, or the pieces alone.

    Raises:
      ProcessError: some of it cannot be sent; says which part.
    """
    file, pieces = io.BytesIO() if whole else _Sink(), {}
    try:
        _dump(value, file, _Arrays(pieces, whole).instead)
    except Exception as error:
        part = _odd_part({"the result": value}, lambda part: _dump(part, _Sink(), _Arrays({}, True).instead))
        raise ProcessError(f"{part} cannot be sent to the notebook: {_told(error)}.", 0, fix=FIX) from error
    return (file.getvalue() if isinstance(file, io.BytesIO) else b""), pieces


class _Arrays:
    """What stands for the jax arrays of a result."""

    def __init__(self, pieces: dict[int, Pieces], whole: bool):
        self._pieces, self._whole = pieces, whole
        self._known: dict[int, tuple[Any, Any]] = {}  # by id: the array, which is kept so that it keeps its id

    def instead(self, obj: Any) -> Any:
        """None for what is no jax array."""
        if not isinstance(obj, jax.Array):
            return None
        if id(obj) not in self._known:
            self._known[id(obj)] = (obj, self._stands(len(self._known), obj))
        return self._known[id(obj)][1]

    def _stands(self, number: int, array: jax.Array) -> tuple:
        """Numbers are the order of all arrays, so they are the same in processes that return the same."""
        here = array.is_fully_addressable or (array.is_fully_replicated and bool(array.addressable_shards))
        if here and not self._whole:
            return ("array", None)
        if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
            if not here:
                raise TypeError("random keys that are spread over processes have no numbers to send")
            own = array if array.is_fully_addressable else array.addressable_data(0)
            return ("key", str(jax.random.key_impl(own)), np.asarray(jax.random.key_data(own)))
        if here:
            return ("array", np.array(array))  # a copy, since a view of an array of jax would be read-only there too
        own = [(shard.index, np.asarray(shard.data)) for shard in array.addressable_shards if shard.replica_id == 0]
        self._pieces[number] = Pieces(describe(array), array.shape, array.dtype, own)
        return ("spread", number)


def unpacked(data: bytes, pieces: Mapping[int, Mapping[int, Pieces]]) -> Any:
    """A result, from what process 0 has sent and all processes' pieces.

    Raises:
      ProcessError: not all processes have returned the same array; or a class in it is not known here.
    """

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: Any) -> Any:
            kind, *rest = pid
            if kind == "key":
                return jax.random.wrap_key_data(rest[1], impl=rest[0])
            return rest[0] if kind == "array" else assembled(rest[0])

    assembled = functools.cache(lambda number: _assembled(number, pieces))
    try:
        return Unpickler(io.BytesIO(data)).load()
    except ProcessError:
        raise
    except Exception as error:
        raise ProcessError(f"the result of process 0 cannot be read here: {_told(error)}.", 0, fix=FIX) from error


def _assembled(number: int, pieces: Mapping[int, Mapping[int, Pieces]]) -> np.ndarray:
    """The array of that number, from all processes' pieces of it."""
    own = pieces[0][number]
    array, filled = np.empty(own.shape, own.dtype), 0
    for found in (theirs[number] for theirs in pieces.values() if number in theirs and theirs[number].what == own.what):
        for index, piece in found.pieces:
            array[index] = piece
            filled += piece.size
    if filled != array.size:
        others = [rank for rank, theirs in pieces.items() if number not in theirs or theirs[number].what != own.what]
        who = f"process {others[0]} has" if others else "the others have"
        raise ProcessError(
            f"process 0 has returned an array {own.what}, of which {filled} of {array.size} numbers came: {who} not returned it.\n"
            "    fix: return the same from every process: no `if jax.process_index() == 0` before it.",
            others[0] if others else None,
        )
    return array


def _odd_part(named: Mapping[str, Any], dump: Callable[[Any], Any]) -> str:
    """The first leaf, by path, that cannot be pickled; in words."""
    for name, value in named.items():
        leaves = jax.tree_util.tree_leaves_with_path(value)
        for path, part in [(f"{name}, {path_of(keys)}" if keys else name, leaf) for keys, leaf in leaves]:
            try:
                dump(part)
            except Exception:
                return f"{path} ({type_name(part)})"
    return next(iter(named))


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
