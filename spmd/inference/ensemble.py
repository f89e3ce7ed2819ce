"""Ensembles: several trained models whose predictions are combined, in one compiled program or by
threads with a deadline.
"""

import dataclasses
import functools
import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from spmd.base.tree import Tree, describe
from spmd.data.batches import check_leaves
from spmd.data.sources import as_source, is_arrays
from spmd.errors import (
    DataError,
    EnsembleError,
    OptionError,
    check_integer,
    did_you_mean,
    type_name,
)
from spmd.inference import uncertainty
from spmd.inference.forward import call_in_chunks, check_inputs, concatenated, forward_of, to_host
from spmd.inference.loader import ExportedModel, load_exported
from spmd.inference.stacked import (
    NET,
    ROWS,
    Group,
    Net,
    Stacked,
    common_batch,
    group_members,
    table,
)
from spmd.inference.uncertainty import COMBINE
from spmd.inference.workers import Answer, Workers
from spmd.mesh import MeshSpec, make_mesh, outside_of_mesh
from spmd.run.checkpoint import Checkpoint
from spmd.train.losses import cross_entropy
from spmd.train.state import State
from spmd.trainer import Trainer

MAX_DEADLINE = 1e6  # seconds; locks cannot wait for much longer
COLUMNS = ("log loss", "accuracy", "calibration error", "entropy", "disagreement")


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Metrics of an ensemble and its members; printed, a table.

    Attributes:
      ensemble: log loss, accuracy, expected calibration error, mean entropy of its probabilities
        and mean disagreement of members, in nats.
      members: the same for each member by name, without the disagreement.
    """

    ensemble: dict[str, float]
    members: dict[str, dict[str, float]]

    def __str__(self) -> str:
        return table(COLUMNS, {"ensemble": self.ensemble, **self.members})


@dataclasses.dataclass(frozen=True)
class Calibration:
    """The effect of a temperature on held-out data; printed, a table.

    Attributes:
      temperature: by which log-probabilities are divided.
      before, after: log loss and calibration error.
    """

    temperature: float
    before: dict[str, float]
    after: dict[str, float]

    def __str__(self) -> str:
        rows = {"before": self.before, f"temperature {self.temperature:.3g}": self.after}
        return table(("log loss", "calibration error"), rows)


class Ensemble:
    """Several classifiers whose predictions are combined. Each returns logits [rows, ..., classes]
    for the same inputs.

    `predict` runs all members in one compiled program: members that differ only in their weights
    are stacked and sharded over a mesh axis `net`, the others run one after the other. `ask` runs
    each member in a thread, with a deadline.

    Args:
      members: a list, or a dict by name, of: what `fit` returned; an exported model, or its folder;
        a pair (trainer, state), or (trainer, folder of checkpoints); or, for `ask` only, a function
        of the inputs that returns logits, which may call another machine.
      combine: "mean" of probabilities; softmax of the mean "logits"; or shares of "vote"s, one for
        each member.
      mesh: "net=4": over 4 devices; None: one device for each member of the largest stack, as far
        as there are any.

    Raises:
      EnsembleError: members take different inputs, do not return logits, or return different ones.
      OptionError: no members, or an invalid member, option or mesh.

    Example:
      >>> import optax, spmd
      >>> data = {"x": np.eye(4, dtype=np.float32).repeat(4, 0), "y": np.arange(4).repeat(4)}
      >>> def train(size):
      ...     model = spmd.FunctionalModel(
      ...         lambda key: {"w": size * np.eye(4, dtype=np.float32)},
      ...         lambda params, x: x @ params["w"],
      ...     )
      ...     return spmd.fit(
      ...         model,
      ...         data,
      ...         loss=spmd.losses.cross_entropy,
      ...         optimizer=optax.sgd(0.1),
      ...         batch_size=8,
      ...         steps=1,
      ...     )
      >>> ensemble = Ensemble([train(1), train(2)])
      >>> ensemble
      Ensemble of 2: mean; 2 members stacked over net=2
      >>> (
      ...     ensemble.predict(data["x"]).shape,
      ...     ensemble.members(data["x"]).shape,
      ...     ensemble.evaluate(data).ensemble["accuracy"],
      ... )
      ((16, 4), (2, 16, 4), 1.0)
      >>> with ensemble:
      ...     ensemble.ask(data["x"]).members
      ('0', '1')
    """

    @outside_of_mesh()
    def __init__(
        self,
        members: Sequence[Any] | Mapping[str, Any],
        *,
        combine: str = "mean",
        mesh: str | Mesh | None = None,
    ):
        if combine not in COMBINE:
            raise OptionError(f"combine={combine!r}.", fix=f"{did_you_mean(str(combine), COMBINE)}")
        if not isinstance(members, Mapping | Sequence) or isinstance(members, str):
            raise OptionError(
                f"members is {type_name(members)}.", fix="a list of members, or a dict by name."
            )
        named: Mapping[Any, Any]
        if isinstance(members, Mapping):
            named = members
        else:
            named = dict(enumerate(members))
        if not named:
            raise OptionError("an ensemble without members.", fix="at least one.")
        self.combine = combine
        self.temperature = 1.0
        self._members = {}
        for key, member in named.items():
            name = str(key)
            self._members[name] = _member(name, member)
        self._nets = [member for member in self._members.values() if isinstance(member, Net)]
        self._batch: int | None = None
        self._groups: list[Group] = []
        if self._nets:
            self._batch = common_batch(self._nets)
            self._groups = group_members(self._nets, self._batch or ROWS)
        sizes = [len(group.nets) for group in self._groups]
        self._mesh = _mesh(mesh, max(sizes, default=1))
        self._workers: Workers | None = None
        self._starting = threading.Lock()

    @property
    def names(self) -> tuple[str, ...]:
        """The members' names; their numbers if they have none."""
        return tuple(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def __repr__(self) -> str:
        parts = []
        sizes = [len(group.nets) for group in self._groups]
        for size in sizes:
            if size > 1:
                parts.append(f"{size} members stacked over net={self._mesh.size}")
        single = sizes.count(1)
        if single:
            parts.append(f"{single} run separately")
        functions = len(self) - len(self._nets)
        if functions:
            parts.append(f"{functions} only for ask()")
        temperature = ""
        if self.temperature != 1.0:
            temperature = f" at temperature {self.temperature:.3g}"
        return f"Ensemble of {len(self)}: {self.combine}{temperature}; {', '.join(parts)}"

    @functools.cached_property
    def _stacked(self) -> Stacked:
        return Stacked(self._groups, self._mesh, self.combine)

    @outside_of_mesh()
    def predict(self, inputs: Tree, *, batch_size: int = 256) -> np.ndarray:
        """Combined probabilities of every row, float32[rows, ..., classes], on the host; at the
        fitted temperature, after `calibrate`.

        Args:
          inputs: arrays [rows, ...], as the members take them.
          batch_size: rows per call.

        Returns:
          Probabilities, which sum to 1 over classes.

        Raises:
          DataError: another tree, other shapes or dtypes than the members take, or no rows.
          EnsembleError: a member is a function, which only `ask` can call.
          OptionError: a `batch_size` below 1.
        """
        if self.temperature == 1.0:
            return self._in_chunks(inputs, batch_size, lambda probabilities, _: probabilities)
        # float32 would underflow before
        logits = self._logits(inputs, batch_size)
        return np.exp(self._log_probabilities(logits)).astype(np.float32)

    @outside_of_mesh()
    def members(self, inputs: Tree, *, batch_size: int = 256) -> np.ndarray:
        """Each member's probabilities, float32[members, rows, ..., classes], on the host, in the
        order of `names`.

        Args:
          inputs: arrays [rows, ...], as the members take them.
          batch_size: rows per call.

        Returns:
          Probabilities, which sum to 1 over classes.
        """
        logits = self._logits(inputs, batch_size)
        return np.exp(uncertainty.log_softmax(logits)).astype(np.float32)

    @outside_of_mesh()
    def uncertainty(self, inputs: Tree, *, batch_size: int = 256) -> dict[str, np.ndarray]:
        """Uncertainty float64[rows, ...], in nats: the "entropy" of the prediction, and the
        "disagreement" of the members.

        Disagreement is the part of the entropy that more training data would remove; the rest is
        noise in the data.

        Args:
          inputs: arrays [rows, ...], as the members take them.
          batch_size: rows per call.

        Returns:
          The two arrays, by name.
        """
        logits = self._logits(inputs, batch_size)
        probabilities = np.exp(self._log_probabilities(logits))
        entropy = uncertainty.entropy(probabilities)
        return {"entropy": entropy, "disagreement": uncertainty.disagreement(logits)}

    @outside_of_mesh()
    def evaluate(self, data: Any, *, batch_size: int = 256) -> Evaluation:
        """Metrics of the ensemble and of each member on data.

        Args:
          data: a pair (inputs, labels), or a dict as `spmd.losses.cross_entropy` takes it; or an
            iterable of batches.
          batch_size: rows per call.

        Returns:
          Log loss, accuracy, calibration error and entropy; printed, a table.

        Raises:
          DataError: it is not clear which arrays are inputs and which labels, or labels do not fit
            the logits.
          OptionError: a `batch_size` below 1.
        """
        check_integer(batch_size, "batch_size")
        batches_of_logits, batches_of_labels = [], []
        for inputs, batch_labels in _pairs(data):
            batches_of_logits.append(self._logits(inputs, batch_size))
            batches_of_labels.append(np.asarray(batch_labels))
        logits = np.concatenate(batches_of_logits, axis=1)
        labels = np.concatenate(batches_of_labels)
        _check_labels(labels, logits)
        ensemble = _metrics(self._log_probabilities(logits), labels)
        disagreement = uncertainty.disagreement(logits)
        ensemble["disagreement"] = float(disagreement.mean())
        members = {}
        for name, logs in zip(self.names, uncertainty.log_softmax(logits), strict=True):
            members[name] = _metrics(logs, labels)
        return Evaluation(ensemble, members)

    @outside_of_mesh()
    def calibrate(self, inputs: Tree, labels: Any, *, batch_size: int = 256) -> Calibration:
        """Fit a temperature to held-out data; `predict`, `evaluate`, `uncertainty` and `ask` use it
        from then on.

        Args:
          inputs: arrays [rows, ...], as the members take them.
          labels: the true classes, integers [rows, ...], of rows that no member was trained on.
          batch_size: rows per call.

        Returns:
          The temperature, and what it changes.

        Raises:
          DataError: other inputs or labels than the members take.
          EnsembleError: the ensemble counts votes, so a true class may have probability 0; or a
            true class has probability 0.
          OptionError: a `batch_size` below 1.
        """
        if self.combine == "vote":
            raise EnsembleError(
                "no temperature changes a share of 0 votes.", fix='combine="mean" or "logits".'
            )
        logits = self._logits(inputs, batch_size)
        labels = np.asarray(labels)
        _check_labels(labels, logits)
        uncalibrated = uncertainty.log_combined(logits, self.combine)
        of_labels = np.take_along_axis(uncalibrated, labels[..., None], axis=-1)
        impossible = int(np.isneginf(of_labels).sum())
        if impossible:
            why = (
                f"{impossible} of {labels.size} labels have probability 0, so the log loss is "
                "infinite at any temperature."
            )
            raise EnsembleError(
                why, fix="members that give these classes finite logits, or rows without them."
            )
        self.temperature = uncertainty.fit_temperature(uncalibrated, labels)
        before = _metrics(uncalibrated, labels)
        after = _metrics(self._log_probabilities(logits), labels)
        names = ("log loss", "calibration error")
        return Calibration(
            temperature=self.temperature,
            before={name: before[name] for name in names},
            after={name: after[name] for name in names},
        )

    def ask(self, inputs: Tree, *, deadline: float | None = None) -> Answer:
        """Run each member in its own thread, on a device of its own, and combine the answers that
        arrive in time.

        The first call compiles each member's program for this number of rows, so make it without a
        deadline.

        Args:
          inputs: arrays [rows, ...], as the members take them.
          deadline: seconds; None waits for all members.

        Returns:
          The combined probabilities, and who was late or failed.

        Raises:
          EnsembleError: no member answered in time (the error lists late members and exceptions),
            or the ensemble was closed meanwhile.
        """
        is_number = isinstance(deadline, int | float) and not isinstance(deadline, bool)
        if deadline is not None and not (is_number and deadline > 0):
            raise OptionError(
                f"deadline={deadline!r}.", fix="a positive number of seconds, or None."
            )
        if deadline is not None and deadline > MAX_DEADLINE:
            raise OptionError(
                f"deadline={deadline!r}: at most {MAX_DEADLINE:.0e} seconds.",
                fix="None, which waits for all.",
            )
        if self._nets:
            rows = check_inputs(inputs, self._nets[0].inputs)
        else:
            rows = check_leaves(inputs, "the inputs")
        # Two threads may ask at the same time, and must not both start workers.
        with self._starting:
            if self._workers is None:
                functions = {}
                for at, (name, member) in enumerate(self._members.items()):
                    functions[name] = self._worker_function(at, member)
                self._workers = Workers(functions)
            workers = self._workers
        logits, late, failed, seconds = workers.ask(inputs, rows, deadline)
        stacked = np.stack(list(logits.values()))
        probabilities = np.exp(self._log_probabilities(stacked))
        return Answer(probabilities, tuple(logits), late, failed, seconds)

    def close(self, seconds: float = 5.0) -> None:
        """End the threads of `ask`; wait up to `seconds` for members that are still running. `ask`
        starts new threads.
        """
        with self._starting:
            workers, self._workers = self._workers, None
        if workers is not None:
            workers.close(seconds)

    def __enter__(self) -> "Ensemble":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _log_probabilities(self, logits: np.ndarray) -> np.ndarray:
        uncalibrated = uncertainty.log_combined(logits, self.combine)
        return uncertainty.with_temperature(uncalibrated, self.temperature)

    def _logits(self, inputs: Tree, batch_size: int) -> np.ndarray:
        def by_row(probabilities: jax.Array, logits: jax.Array) -> jax.Array:
            del probabilities
            return logits.swapaxes(0, 1)

        return self._in_chunks(inputs, batch_size, by_row).swapaxes(0, 1)

    def _in_chunks(
        self, inputs: Tree, batch_size: int, output: Callable[[jax.Array, jax.Array], jax.Array]
    ) -> np.ndarray:
        """`output(combined probabilities, members' logits)` [rows, ...], on the host, a chunk of
        rows at a time.
        """
        check_integer(batch_size, "batch_size")
        if len(self._nets) < len(self):
            functions = []
            for name, member in self._members.items():
                if not isinstance(member, Net):
                    functions.append(name)
            raise EnsembleError(
                f"members that are functions cannot be compiled: {', '.join(functions)}.",
                fix="ensemble.ask(x).",
            )
        rows = check_inputs(inputs, self._nets[0].inputs)

        def predict_chunk(chunk: Tree) -> np.ndarray:
            return np.asarray(output(*self._stacked(chunk)))

        # jit refuses a jax array that lies on other devices than the members
        arrays = jax.tree.map(np.asarray, inputs)
        chunks = call_in_chunks(predict_chunk, arrays, rows, batch=self._batch, most=batch_size)
        return concatenated(chunks)

    def _worker_function(self, at: int, member: Any) -> Callable[[Tree], Any]:
        """The member as a function for a thread, with its weights on a device of its own."""
        if not isinstance(member, Net):
            return member
        device = jax.local_devices()[at % jax.local_device_count()]
        compiled = jax.jit(member.function)

        # at the first call, in the member's own thread: all are transferred at the same time
        @functools.cache
        def arrays() -> Any:
            return jax.device_put(jax.tree.map(to_host, member.arrays), device)

        def answer(inputs: Tree) -> np.ndarray:
            # jit refuses a jax array on another device than the member's weights.
            inputs = jax.tree.map(np.asarray, inputs)
            rows = len(jax.tree.leaves(inputs)[0])
            function = functools.partial(compiled, arrays())
            chunks = call_in_chunks(function, inputs, rows, batch=member.batch, most=rows)
            return concatenated(np.asarray(logits).astype(np.float32) for logits in chunks)

        return answer


def _member(name: str, member: Any) -> Net | Callable[[Tree], Any]:
    """A user's member as a net or a function."""
    if isinstance(member, str | Path):
        member = load_exported(member)
    if isinstance(member, ExportedModel):
        return Net(
            name=name,
            function=member.program.call,
            arrays=member.arrays,
            inputs=member.inputs,
            batch=member.batch,
            program=str(member.program.mlir_module()),
        )
    pair = member
    if hasattr(member, "trainer") and hasattr(member, "state"):
        pair = member.trainer, member.state
    if isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], Trainer):
        trainer, state = pair
        if isinstance(state, str | Path | Checkpoint):
            state = trainer.restore(state)
        if not isinstance(state, State):
            raise OptionError(
                f"member {name} is a trainer and {type_name(state)}.",
                fix="(trainer, state), or (trainer, folder).",
            )
        forward = forward_of(trainer, state)
        return Net(name, forward.function, forward.arrays, forward.inputs)
    if callable(member):
        return member
    fix = (
        "a Result of fit, an exported model or its folder, (trainer, state), (trainer, a folder of "
        "checkpoints), or a function."
    )
    raise OptionError(f"member {name} is {type_name(member)}.", fix=fix)


def _mesh(mesh: str | Mesh | None, largest: int) -> Mesh:
    """The devices that members are stacked over: no more than the largest stack can use."""
    devices = jax.local_devices()
    if mesh is None:
        # No more devices than save time: 5 members take 3 of 4 devices, which hold 2, 2 and 1.
        per_device = -(-largest // min(largest, len(devices)))
        count = -(-largest // per_device)
        return make_mesh({NET: count}, devices=devices[:count])
    spec = MeshSpec.parse(mesh)
    if spec.names != (NET,):
        raise OptionError(
            f'mesh="{spec}": members need one axis, "{NET}".',
            fix=f'mesh="{NET}={min(largest, len(devices))}".',
        )
    if isinstance(mesh, Mesh):
        return mesh
    if spec.size > 0:
        devices = devices[: spec.size]
    return make_mesh(spec, devices=devices)


def _pairs(data: Any) -> Iterator[tuple[Tree, Any]]:
    """Inputs and labels of each batch, without padding rows."""
    if is_arrays(data):
        check_leaves(data, "the data")
        yield _split(data)
        return
    for batch in as_source(data, batch_size=None, shuffle=None, seed=0, short_ok=True).epoch(0):
        leaves = jax.tree.map(np.asarray, batch.leaves)
        if batch.weights is not None:
            leaves = jax.tree.map(operator.itemgetter(batch.weights > 0), leaves)
        yield _split(leaves)


def _split(batch: Any) -> tuple[Tree, Any]:
    try:
        return cross_entropy.split(batch)
    except DataError as error:
        raise DataError(
            f"inputs and labels: {error.message.splitlines()[0]}", fix="a pair (inputs, labels)."
        ) from None


def _check_labels(labels: np.ndarray, logits: np.ndarray) -> None:
    _, *shape, classes = logits.shape
    are_classes = list(labels.shape) == shape and labels.dtype.kind in "iu"
    if not are_classes or not ((labels >= 0) & (labels < classes)).all():
        expected = f"integers {shape} from 0 to {classes - 1}"
        raise DataError(
            f"the labels are {describe(labels)}; the members' logits have {classes} classes.",
            fix=f"{expected}.",
        )


def _metrics(log_probabilities: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    probabilities = np.exp(log_probabilities)
    entropies = uncertainty.entropy(probabilities)
    return {
        "log loss": uncertainty.log_loss(log_probabilities, labels),
        "accuracy": uncertainty.accuracy(log_probabilities, labels),
        "calibration error": uncertainty.calibration_error(probabilities, labels),
        "entropy": float(entropies.mean()),
    }
