"""Workers that train independently and synchronize with the servers now and then: local SGD, DiLoCo
and EASGD.

They send a difference of parameters, with the codecs that gradients use. When they synchronize, and
which parameters, is data (`schedule.py`).

Per worker, inside the manual region. The D positions along the data axes are servers and hold m
simulated workers each. A parameter is packed as [D, width]; *rows* are those of this server, by
path [1, width], and each worker has a copy of its own, [m, D, width].
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmd.wire.reduction import Averaging
from spmd.wire.server.declaration import ParameterServer
from spmd.wire.server.exchange import Buckets, gather_rows
from spmd.wire.transfer import CODEC, OUTER, OWN, READ, RESIDUAL, Leaves, Memory

Fragment = tuple[Leaves, Memory]


def init_local_memory(
    declared: ParameterServer, rows: jax.Array, workers: int
) -> dict[str, jax.Array]:
    """Return the arrays of a parameter [D, width]: every worker starts with the servers' one."""
    entry = {OWN: jnp.broadcast_to(rows, (workers, *rows.shape))}
    if declared.mode == "local":
        entry[READ] = rows
        if declared.outer_momentum:
            entry[OUTER] = jnp.zeros(rows.shape, jnp.float32)
    return entry


@dataclasses.dataclass(frozen=True)
class LocalTraining:
    """The plan by which workers synchronize.

    Attributes:
      declared: the mode, and its rates.
      averaging: of parameter deltas, over positions.
      buckets: paths of parameters that are sent together.
      workers: of all positions.
      rounded: whether servers send float32 as bfloat16.
    """

    declared: ParameterServer
    averaging: Averaging
    buckets: Buckets
    workers: int
    rounded: bool

    def synchronize(
        self, rows: Leaves, memory: Memory, step: Any, number: int, events: Mapping[str, Any]
    ) -> Fragment:
        """Return the rows and the memory of a fragment after a step: sent to the servers, and
        received from them, if it is the fragment's turn.

        Args:
          number: of the fragment.
          events: whose turn it is (`sends` and `receives`, bool[fragments]).
        """

        def send(rows: Leaves, memory: Memory) -> Fragment:
            if self.declared.mode == "local":
                return self._send(rows, memory, step)
            return self._average_elastically(rows, memory, step)

        # The events are equal on all workers, so all take the same branch: a collective in a branch
        # that one of them does not take would wait for it forever.
        with jax.named_scope(f"send/{number}"):
            rows, memory = lax.cond(events["sends"][number], send, _unchanged, rows, memory)
        if self.declared.mode == "local":
            with jax.named_scope(f"receive/{number}"):
                rows, memory = lax.cond(
                    events["receives"][number], self._receive, _unchanged, rows, memory
                )
        return rows, memory

    def _send(self, rows: Leaves, memory: Memory, step: Any) -> Fragment:
        """Return the servers' step: the mean parameter delta since the last synchronization is a
        gradient for Nesterov momentum (DiLoCo, algorithm 1, lines 11 and 12).
        """
        momentum = self.declared.outer_momentum
        deltas = {path: (entry[READ] - entry[OWN]).mean(0) for path, entry in memory.items()}
        mean, memory = self._average(deltas, memory, step)
        after = {}
        for path, mean_delta in mean.items():
            delta = mean_delta.astype(jnp.float32)
            if momentum:
                velocity = momentum * memory[path][OUTER] + delta
                memory[path] = memory[path] | {OUTER: velocity}
                delta = delta + momentum * velocity
            row = rows[path]
            after[path] = (row - self.declared.outer_rate * delta).astype(row.dtype)
        return after, memory

    def _receive(self, rows: Leaves, memory: Memory) -> Fragment:
        """Let every worker take the servers' parameters, mixed with the fraction of its own that it
        keeps.
        """
        mix, after = self.declared.mix, {}
        for path, gathered in self._gather(rows).items():
            local = memory[path][OWN]
            if mix:
                local = (mix * local + (1 - mix) * gathered).astype(local.dtype)
            else:
                local = jnp.broadcast_to(gathered, local.shape)
            after[path] = memory[path] | {READ: gathered, OWN: local}
        return rows, after

    def _average_elastically(self, rows: Leaves, memory: Memory, step: Any) -> Fragment:
        """Compute x_i -= a (x_i - z) and z += sum_i a (x_i - z): their sum does not change (EASGD,
        equations 5 and 6).
        """
        rate = self.declared.moving_rate
        if rate is None:
            rate = 0.9 / self.workers
        gathered = self._gather(rows)
        deltas = {
            path: (rate * (entry[OWN] - gathered[path])).astype(entry[OWN].dtype)
            for path, entry in memory.items()
        }
        memory = {path: entry | {OWN: entry[OWN] - deltas[path]} for path, entry in memory.items()}
        mean, memory = self._average(
            {path: delta.mean(0) for path, delta in deltas.items()}, memory, step
        )
        # The servers move by the sum over workers, and a reduction returns the mean.
        return {path: row + self.workers * mean[path] for path, row in rows.items()}, memory

    def _gather(self, rows: Leaves) -> Leaves:
        return gather_rows(rows, self.buckets, self.averaging.axes, rounded=self.rounded)

    def _average(self, deltas: Leaves, memory: Memory, step: Any) -> tuple[Leaves, Memory]:
        """Return this server's rows of the mean over all workers, and the next memory."""
        codecs: Memory = {}
        for path, entry in memory.items():
            of_codec = {kind: entry[kind] for kind in (RESIDUAL, CODEC) if kind in entry}
            if of_codec:
                codecs[path] = of_codec
        mean, after, _ = self.averaging.reduce(deltas, codecs, step)
        # without fusion across it, the bits are those of an all-reduce
        mean = lax.optimization_barrier(mean)
        return mean, {path: entry | after.get(path, {}) for path, entry in memory.items()}


def _unchanged(rows: Leaves, memory: Memory) -> Fragment:
    return rows, memory
