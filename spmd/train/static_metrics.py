"""Metrics of a step that are known without measuring: the bytes that are sent, and those of the
simulated clock.
"""

import dataclasses
import functools
from collections.abc import Callable

from spmd.sync.notes import exact_bytes
from spmd.train.model_setup import PlacedModel
from spmd.wire.comm_log import CommLog


@dataclasses.dataclass
class StaticMetrics:
    """The static metrics of the steps of one program; `comm_log` is called when the first are asked
    for.
    """

    placed: PlacedModel
    comm_log: Callable[[], CommLog]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the metrics; traces nothing."""
        clock = self.placed.events
        if clock is None:
            return self._wire_names
        return (*self._wire_names, *clock.metrics(0))

    def at(self, step: int) -> dict[str, float]:
        """Return the metrics of one step: bytes that each device sends, the compression ratio, and
        the simulated clock's metrics.
        """
        clock = self.placed.events
        # gradients are sent uncompressed before `start_step`
        early = step < self._start_step
        values = self._wire_values[early]
        if clock is None:
            return values
        if self.placed.exchange.local:
            skipped = sum(self._scope_bytes(early, scope) for scope in clock.skipped_scopes(step))
            values = {**values, "wire_bytes": values["wire_bytes"] - skipped}
        return {**values, **clock.metrics(step)}

    @property
    def _wire_names(self) -> tuple[str, ...]:
        exchange = self.placed.exchange
        if not exchange.reduction.manual:
            return ()  # XLA places the collectives
        compressed = self.placed.resolved.layout.gradients.compressed and not exchange.local
        if compressed or exchange.metric_names:
            return ("wire_bytes", "compression_ratio")
        return ("wire_bytes",)

    @property
    def _start_step(self) -> int:
        return self.placed.resolved.layout.gradients.start_step

    @functools.cached_property
    def _scope_bytes(self) -> Callable[[bool, str], int]:
        """Bytes that each device sends in one named scope, before `start_step` or after it."""

        def scope_bytes(early: bool, scope: str) -> int:
            step = self._start_step
            if early:
                step = 0
            return self.comm_log().bytes(step, scope)

        return functools.cache(scope_bytes)

    @functools.cached_property
    def _wire_values(self) -> tuple[dict[str, float], dict[str, float]]:
        """The metrics of what is sent, by name, after `start_step` and before it."""
        if not self._wire_names:
            return {}, {}
        return self._values_of_step(self._start_step), self._values_of_step(0)

    def _values_of_step(self, step: int) -> dict[str, float]:
        sent = self.comm_log().bytes(step)
        reduced = self.comm_log().bytes(step, "reduce_gradients")
        ratio = 1.0
        if reduced:
            ratio = exact_bytes(self.placed.exchange) / reduced
        return dict(zip(self._wire_names, (sent, ratio), strict=False))
