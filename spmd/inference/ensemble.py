"""Ensembles: several trained models that answer together, in one compiled program or as workers with a deadline."""

import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from spmd.data.batches import check_leaves
from spmd.data.sources import as_source, is_arrays
from spmd.errors import DataError, EnsembleError, OptionError, did_you_mean, type_name
from spmd.inference import uncertainty
from spmd.inference.forward import check_batch_size, check_inputs, forward_of, in_chunks, joined, whole
from spmd.inference.loader import ExportedModel, load_exported
from spmd.inference.stacked import NET, ROWS, Net, Stacked, groups_of, rows_of, table
from spmd.inference.uncertainty import COMBINE
from spmd.inference.workers import Answer, Workers
from spmd.mesh import MeshSpec, make_mesh
from spmd.run.checkpoint import Checkpoint
from spmd.train.losses import cross_entropy
from spmd.train.state import State
from spmd.trainer import Trainer
from spmd.tree import Tree, describe

LONGEST = 1e6  # seconds; a lock cannot wait for any number of them
COLUMNS = ("log loss", "accuracy", "calibration error", "entropy", "disagreement")


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """How good an ensemble is beside its members; printed, a table.

    Attributes:
      ensemble: log loss, accuracy, expected calibration error, mean entropy of its probabilities and mean disagreement of members, in nats.
      members: the same of each member by name, but for the disagreement.
    """

    ensemble: dict[str, float]
    members: dict[str, dict[str, float]]

    def __str__(self) -> str:
        return table(COLUMNS, {"ensemble": self.ensemble, **self.members})


@dataclasses.dataclass(frozen=True)
class Calibration:
    """What a temperature does to held-out data; printed, a table. `before` and `after` have log loss and calibration error."""

    temperature: float
    before: dict[str, float]
    after: dict[str, float]

    def __str__(self) -> str:
        rows = {"before": self.before, f"temperature {self.temperature:.3g}": self.after}
        return table(("log loss", "calibration error"), rows)


class Ensemble:
    """Several classifiers that answer together. Each gives logits [rows, ..., classes] of the same inputs.

    Members that are equal but for their weights are stacked and cut over a mesh axis `net`; members that differ are computed one after
    the other; all in one compiled program (`predict`). Or each is a worker that may come too late (`ask`).

    Args:
      members: a list, or a dict by name, of: what `fit` returned; an exported model, or its folder; a pair (trainer, state), or
        (trainer, folder of checkpoints); or, for `ask` only, a function of the inputs that returns logits, which may ask another machine.
      combine: "mean" of probabilities; softmax of the mean "logits"; or shares of "vote"s, one for each member.
      mesh: "net=4": over so many devices; None: one for each member of the largest stack, as far as there are any.

    Raises:
      EnsembleError: members take different inputs, or give no logits, or different ones.
      OptionError: no members, or a member, option or mesh that cannot be meant.

    Example:
      >>> import optax, spmd
      >>> data = {"x": np.eye(4, dtype=np.float32).repeat(4, 0), "y": np.arange(4).repeat(4)}
      >>> start = lambda size: lambda key: {"w": size * np.eye(4, dtype=np.float32)}
      >>> model = lambda size: spmd.FunctionalModel(start(size), lambda params, x: x @ params["w"])
      >>> train = lambda size: spmd.fit(model(size), data, loss=spmd.losses.cross_entropy, optimizer=optax.sgd(0.1), batch_size=8, steps=1)
      >>> ensemble = Ensemble([train(1), train(2)])
      >>> ensemble
      Ensemble of 2: mean; 2 members stacked over net=2
      >>> ensemble.predict(data["x"]).shape, ensemble.members(data["x"]).shape, ensemble.evaluate(data).ensemble["accuracy"]
      ((16, 4), (2, 16, 4), 1.0)
      >>> with ensemble:
      ...     ensemble.ask(data["x"]).members
      ('0', '1')
    """

    def __init__(self, members: Sequence[Any] | Mapping[str, Any], *, combine: str = "mean", mesh: str | Mesh | None = None):
        if combine not in COMBINE:
            raise OptionError(f"combine={combine!r}.", fix=f"{did_you_mean(str(combine), COMBINE)}")
        if not isinstance(members, Mapping | Sequence) or isinstance(members, str):
            raise OptionError(f"members is {type_name(members)}.", fix="a list of members, or a dict by name.")
        named = dict(members) if isinstance(members, Mapping) else {str(at): member for at, member in enumerate(members)}
        if not named:
            raise OptionError("an ensemble of no members.", fix="at least one.")
        self.combine, self.temperature = combine, 1.0
        self._members = {str(name): _member(str(name), member) for name, member in named.items()}
        self._nets = [member for member in self._members.values() if isinstance(member, Net)]
        self._batch = rows_of(self._nets) if self._nets else None
        self._groups = groups_of(self._nets, self._batch or ROWS) if self._nets else []
        self._mesh = _mesh(mesh, max((len(group.nets) for group in self._groups), default=1))
        self._workers: Workers | None = None
        self._starting = threading.Lock()

    @property
    def names(self) -> tuple[str, ...]:
        """The members' names: their numbers, where they were given none."""
        return tuple(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def __repr__(self) -> str:
        parts = [f"{len(group.nets)} members stacked over net={self._mesh.size}" for group in self._groups if len(group.nets) > 1]
        alone = sum(len(group.nets) == 1 for group in self._groups)
        asked = len(self) - len(self._nets)
        parts += [f"{alone} by {'itself' if alone == 1 else 'themselves'}"] if alone else []
        parts += [f"{asked} only asked"] if asked else []
        warm = "" if self.temperature == 1.0 else f" at temperature {self.temperature:.3g}"
        return f"Ensemble of {len(self)}: {self.combine}{warm}; {', '.join(parts)}"

    @functools.cached_property
    def _stacked(self) -> Stacked:
        return Stacked(self._groups, self._mesh, self.combine)

    def predict(self, inputs: Tree, *, batch_size: int = 256) -> np.ndarray:
        """Combined probabilities of every row, float32[rows, ..., classes], on the host; at the temperature, after `calibrate`.

        Raises:
          DataError: another tree, other shapes or dtypes than the members take, or no rows.
          EnsembleError: a member can only be asked.
          OptionError: a `batch_size` below 1.
        """
        if self.temperature == 1.0:
            return joined(np.asarray(both[0]) for both in self._chunks(inputs, batch_size))
        return np.exp(self._logs(self._logits(inputs, batch_size))).astype(np.float32)  # not of what float32 made 0

    def members(self, inputs: Tree, *, batch_size: int = 256) -> np.ndarray:
        """Each member's own probabilities, float32[members, rows, ..., classes], on the host, in the order of `names`."""
        return np.exp(uncertainty.log_softmax(self._logits(inputs, batch_size))).astype(np.float32)

    def uncertainty(self, inputs: Tree, *, batch_size: int = 256) -> dict[str, np.ndarray]:
        """How unsure, float64[rows, ...] each, in nats: "entropy" of what `predict` says, and "disagreement" of the members.

        Disagreement is the part of the entropy that more training data would take away; noise in the data keeps the rest.
        """
        logits = self._logits(inputs, batch_size)
        return {"entropy": uncertainty.entropy(np.exp(self._logs(logits))), "disagreement": uncertainty.disagreement(logits)}

    def evaluate(self, data: Any, *, batch_size: int = 256) -> Evaluation:
        """How good the ensemble is on data, and each member, side by side.

        Args:
          data: a pair (inputs, labels), or a dict as `spmd.losses.cross_entropy` takes it; or an iterable of batches.

        Raises:
          DataError: inputs and labels cannot be told apart, or labels do not fit the logits.
          OptionError: a `batch_size` below 1.
        """
        check_batch_size(batch_size)
        found = [(self._logits(inputs, batch_size), np.asarray(labels)) for inputs, labels in _pairs(data)]
        logits, labels = np.concatenate([each for each, _ in found], axis=1), np.concatenate([each for _, each in found])
        _check_labels(labels, logits)
        each = uncertainty.log_softmax(logits)
        together = {**_scores(self._logs(logits), labels), "disagreement": float(uncertainty.disagreement(logits).mean())}
        return Evaluation(together, {name: _scores(logs, labels) for name, logs in zip(self.names, each, strict=True)})

    def calibrate(self, inputs: Tree, labels: Any, *, batch_size: int = 256) -> Calibration:
        """Fit a temperature to held-out data, which `predict`, `evaluate`, `uncertainty` and `ask` use from then on.

        Args:
          labels: the right classes, integers [rows, ...], of rows that no member was trained on.

        Raises:
          DataError: other inputs or labels than the members take.
          EnsembleError: the ensemble counts votes, of which none may have gone to the right class; or a right class is impossible to it.
          OptionError: a `batch_size` below 1.
        """
        if self.combine == "vote":
            raise EnsembleError("no temperature changes a share of 0 votes.", fix='combine="mean" or "logits".')
        logits, labels = self._logits(inputs, batch_size), np.asarray(labels)
        _check_labels(labels, logits)
        logs = uncertainty.log_combined(logits, self.combine)
        impossible = int(np.isneginf(np.take_along_axis(logs, labels[..., None], axis=-1)).sum())
        if impossible:
            told = f"{impossible} of {labels.size} labels have probability 0, so the log loss is infinite at any temperature."
            raise EnsembleError(f"{told}", fix="members that give these classes finite logits, or rows without them.")
        self.temperature = uncertainty.fitted_temperature(logs, labels)
        picked = lambda scores: {name: scores[name] for name in ("log loss", "calibration error")}
        return Calibration(self.temperature, picked(_scores(logs, labels)), picked(_scores(self._logs(logits), labels)))

    def ask(self, inputs: Tree, *, deadline: float | None = None) -> Answer:
        """Ask each member in a thread and on a device of its own, and combine what those say who come in time.

        The first question to a member compiles its program for that number of rows: ask once without a deadline.

        Args:
          deadline: seconds; None waits for all.

        Raises:
          EnsembleError: nobody has answered in time, who is late, and what the others raised; or the ensemble was closed meanwhile.
        """
        if deadline is not None and (isinstance(deadline, bool) or not isinstance(deadline, int | float) or not deadline > 0):
            raise OptionError(f"deadline={deadline!r}: seconds, above 0.")
        if deadline is not None and deadline > LONGEST:
            raise OptionError(f"deadline={deadline!r}: at most {LONGEST:.0e} seconds.", fix="None, which waits for all.")
        rows = check_inputs(inputs, self._nets[0].inputs) if self._nets else check_leaves(inputs, "the inputs")
        with self._starting:
            if self._workers is None:
                self._workers = Workers({name: self._asked(at, member) for at, (name, member) in enumerate(self._members.items())})
            workers = self._workers
        said, late, failed, seconds = workers.ask(inputs, rows, deadline)
        return Answer(np.exp(self._logs(np.stack(list(said.values())))), tuple(said), late, failed, seconds)

    def close(self, seconds: float = 5.0) -> None:
        """End the threads of `ask`, waiting so long for members that are still at an old question. Asking again starts new ones."""
        with self._starting:
            workers, self._workers = self._workers, None
        if workers is not None:
            workers.close(seconds)

    def __enter__(self) -> "Ensemble":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _logs(self, logits: np.ndarray) -> np.ndarray:
        return uncertainty.tempered(uncertainty.log_combined(logits, self.combine), self.temperature)

    def _logits(self, inputs: Tree, batch_size: int) -> np.ndarray:
        return joined((np.asarray(both[1]) for both in self._chunks(inputs, batch_size)), functools.partial(np.concatenate, axis=1))

    def _chunks(self, inputs: Tree, batch_size: int) -> Iterator[tuple[Any, Any]]:
        """Combined probabilities and logits, so many rows at a time."""
        check_batch_size(batch_size)
        if len(self._nets) < len(self):
            functions = [name for name, member in self._members.items() if not isinstance(member, Net)]
            raise EnsembleError(f"members that are functions are in no compiled program: {', '.join(functions)}.", fix="ensemble.ask(x).")
        rows = check_inputs(inputs, self._nets[0].inputs)
        size, given = self._batch or batch_size, jax.tree.map(np.asarray, inputs)
        for first in range(0, rows, size):
            count = min(size, rows - first)
            padded = self._batch is not None or rows > size
            at = np.minimum(np.arange(first, first + (size if padded else count)), rows - 1)
            together, each = self._stacked(jax.tree.map(lambda x: x[at], given))
            yield together[:count], each[:, :count]

    def _asked(self, at: int, member: Any) -> Callable[[Tree], Any]:
        """The member as a worker's function, which has its weights on a device of its own."""
        if not isinstance(member, Net):
            return member
        device, call = jax.local_devices()[at % jax.local_device_count()], jax.jit(member.function)

        @functools.cache
        def arrays() -> Any:
            return jax.device_put(jax.tree.map(whole, member.arrays), device)

        def answer(inputs: Tree) -> np.ndarray:
            given = jax.tree.map(np.asarray, inputs)
            rows = len(jax.tree.leaves(given)[0])
            parts = in_chunks(lambda chunk: call(arrays(), chunk), given, rows, member.batch or rows, pad=member.batch is not None)
            return joined(np.asarray(part).astype(np.float32) for part in parts)

        return answer


def _member(name: str, given: Any) -> Net | Callable[[Tree], Any]:
    """What a user gave as a member."""
    if isinstance(given, str | Path):
        given = load_exported(given)
    if isinstance(given, ExportedModel):
        return Net(name, given.program.call, given.arrays, given.inputs, given.batch, str(given.program.mlir_module()))
    pair = (given.trainer, given.state) if hasattr(given, "trainer") and hasattr(given, "state") else given
    if isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], Trainer):
        trainer, state = pair
        if not isinstance(state, State | str | Path | Checkpoint):
            raise OptionError(f"member {name} is a trainer and {type_name(state)}.", fix="(trainer, state), or (trainer, folder).")
        forward = forward_of(trainer, trainer.restore(state) if isinstance(state, str | Path | Checkpoint) else state)
        return Net(name, forward.function, forward.arrays, forward.inputs)
    if callable(given):
        return given
    raise OptionError(
        f"member {name} is {type_name(given)}.",
        fix=("a Result of fit, an exported model or its folder, (trainer, state), (trainer, a folder of checkpoints), or a function."),
    )


def _mesh(given: str | Mesh | None, largest: int) -> Mesh:
    """The devices that members are stacked over: no more than the stack can use."""
    devices = jax.local_devices()
    if given is None:
        each = -(-largest // min(largest, len(devices)))  # members of one device
        count = -(-largest // each)
        return make_mesh({NET: count}, devices=devices[:count])
    spec = MeshSpec.parse(given)
    if spec.names != (NET,):
        raise OptionError(f'mesh="{spec}": members lie over one axis, "{NET}".', fix=f'mesh="{NET}={min(largest, len(devices))}".')
    return given if isinstance(given, Mesh) else make_mesh(spec, devices=devices[: spec.size] if spec.size > 0 else devices)


def _pairs(data: Any) -> Iterator[tuple[Tree, Any]]:
    """Inputs and labels of each batch, without the rows that are no data."""
    if is_arrays(data):
        check_leaves(data, "the data")
        yield _split(data)
        return
    for batch in as_source(data, batch_size=None, shuffle=None, seed=0, short_ok=True).epoch(0):
        good = slice(None) if batch.weights is None else batch.weights > 0
        yield _split(jax.tree.map(lambda x: np.asarray(x)[good], batch.leaves))


def _split(batch: Any) -> tuple[Tree, Any]:
    try:
        return cross_entropy.split(batch)
    except DataError as error:
        raise DataError(f"inputs and labels: {str(error).splitlines()[0]}", fix="a pair (inputs, labels).") from None


def _check_labels(labels: np.ndarray, logits: np.ndarray) -> None:
    classes = logits.shape[-1]
    if labels.shape != logits.shape[1:-1] or labels.dtype.kind not in "iu" or not ((labels >= 0) & (labels < classes)).all():
        wanted = f"integers {list(logits.shape[1:-1])} from 0 to {classes - 1}"
        raise DataError(f"the labels are {describe(labels)}; wanted {wanted}, as the members' logits have {classes} classes.")


def _scores(logs: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    sure = np.exp(logs)
    return {
        "log loss": uncertainty.log_loss(logs, labels),
        "accuracy": uncertainty.accuracy(logs, labels),
        "calibration error": uncertainty.calibration_error(sure, labels),
        "entropy": float(uncertainty.entropy(sure).mean()),
    }
