"""What calls of a Flax linen module draw, write and sow, recorded while they are traced."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from flax import linen
from flax.core import Scope


@dataclasses.dataclass
class Record:
    """What calls have done, over all traces.

    Attributes:
      draws: random streams that were drawn from, as (path of the module, name of the stream).
      writes: variables that were given a new value, as "collection/path/name".
      sown: variables that `sow` wrote.
    """

    draws: set[tuple[str, str]] = dataclasses.field(default_factory=set)
    writes: set[str] = dataclasses.field(default_factory=set)
    sown: set[str] = dataclasses.field(default_factory=set)

    @property
    def streams(self) -> set[str]:
        """Names of the random streams that were drawn from."""
        return {name for _, name in self.draws}


@contextlib.contextmanager
def recording(record: Record) -> Iterator[None]:
    """Add to `record` what linen modules do."""
    make_rng, value, put_variable, sow = (
        Scope.make_rng,
        linen.Variable.value,
        linen.Module.put_variable,
        linen.Module.sow,
    )

    def recorded_draw(scope: Scope, name: str = "params") -> Any:
        record.draws.add(("/".join(scope.path), name))
        return make_rng(scope, name)

    # Not Scope.put_variable: lifted transforms write back all variables by it, changed or not.
    def recorded_write(variable: Any, new: Any) -> None:
        value.fset(variable, new)  # type: ignore[misc]
        record.writes.add("/".join((variable.collection, *variable.scope.path, variable.name)))

    def recorded_put(module: linen.Module, col: str, name: str, new: Any) -> None:
        put_variable(module, col, name, new)
        record.writes.add("/".join((col, *module.path, name)))

    def recorded_sow(module: linen.Module, col: str, name: str, *args: Any, **kwargs: Any) -> bool:
        stored = sow(module, col, name, *args, **kwargs)
        if stored:
            record.sown.add("/".join((col, *module.path, name)))
        return stored

    patches: dict[tuple[Any, str], Any] = {
        (Scope, "make_rng"): recorded_draw,
        (linen.Variable, "value"): property(value.fget, recorded_write),  # type: ignore[attr-defined]
        (linen.Module, "put_variable"): recorded_put,
        (linen.Module, "sow"): recorded_sow,
    }
    before = {place: getattr(*place) for place in patches}
    for (owner, name), function in patches.items():
        setattr(owner, name, function)
    try:
        yield
    finally:
        for (owner, name), function in before.items():
            setattr(owner, name, function)
