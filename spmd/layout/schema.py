"""The tables of a layout: frozen dataclasses. `toml_reader.py` and `toml_writer.py` convert them,
`resolve.py` applies them to a model.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from spmd.base.fields import Conflict, as_rules, names
from spmd.base.specs import Entry, Spec, entry_axes
from spmd.base.tracebacks import trims_tracebacks
from spmd.errors import OptionError, did_you_mean, short_repr, type_name, with_article
from spmd.layout.compiler import Compiler
from spmd.layout.gradients import Gradients
from spmd.layout.model_parallel import Experts, Pipeline, Sequence
from spmd.layout.precision import Precision
from spmd.layout.remat import Remat
from spmd.layout.trained import Adapter, Train
from spmd.wire.server.declaration import ParameterServer

# Implementations of attention.
IMPLEMENTATIONS = ("auto", "as_written", "cudnn", "triton", "splash", "chunked")
# of loops over time
LOOPS = ("auto", "as_written", "hoisted", "cudnn")

# Values of tables that may be given as dicts. A bool is an int in Python, and is no size.
_FITS: dict[str, Callable[[Any], bool]] = {
    "mesh": lambda size: isinstance(size, int) and not isinstance(size, bool),
    "axes": lambda entry: (
        entry is None
        or isinstance(entry, str)
        or (isinstance(entry, tuple) and all(isinstance(x, str) for x in entry))
    ),
}

# behind `Layout`'s methods; `spmd.layout` fills it, since their modules import this one
FUNCTIONS: dict[str, Callable[..., Any]] = {}


@trims_tracebacks
@dataclasses.dataclass(frozen=True)
class Rule:
    """Arrays whose path matches `path`, and none of `except_`, get `spec`. `line` is where the file
    says so.

    Args:
      path: a pattern: `*` within one level, `**` any number of levels, `{a,b}` either.
      spec: for each dim the mesh axis that shards it, None, or a tuple of axes, outermost first;
        missing dims are not sharded.
      except_: patterns of paths that the rule leaves out.
      line: of the file; None without one.

    Example:
      >>> Rule(
      ...     "**/kernel", (None, "model"), except_=("head/**",)
      ... ).spec  # dim 0 replicated, dim 1 sharded over `model`
      (None, 'model')
    """

    path: str
    spec: Spec
    except_: tuple[str, ...] = ()
    # Not compared: a layout from a file equals the same one written in Python.
    line: int | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self):
        object.__setattr__(self, "except_", names(self.except_))


@dataclasses.dataclass(frozen=True)
class Batch:
    """The sharding of the batch: one spec for every leaf, and rules for leaves that differ.

    The mesh axes of dim 0 are the *data axes*; one position along them is a *worker*.
    """

    spec: Spec = ("data",)
    rules: tuple[Rule, ...] = ()

    def __post_init__(self):
        as_rules(self, "rules", Rule)


@dataclasses.dataclass(frozen=True)
class Default:
    """The placement of a parameter that no rule and no logical axis covers.

    Args:
      params: "replicate", "shard:AXIS" (the largest dim that AXIS divides) or "error".
      max_replicated: the largest share of parameter bytes that may be replicated on every device, 0
        to 1; None: no bound.

    Example:
      >>> Layout(default=Default("shard:data", max_replicated=0.5)).default.params
      'shard:data'
    """

    params: str = "replicate"
    max_replicated: float | None = None


@dataclasses.dataclass(frozen=True)
class OptimizerState:
    """The sharing of the optimizer's state and work by devices.

    Attributes:
      shard: mesh axis over which optimizer state is split further than its parameter (ZeRO-1), or
        None.
      matrices: who multiplies and factorizes matrices of parameters, as Muon and Shampoo do:
        "compiler", XLA's partitioner, or "owner", one device for each matrix.

    Example:
      >>> Layout(optimizer=OptimizerState(shard="data")).optimizer.shard
      'data'
    """

    shard: str | None = None
    matrices: str = "compiler"

    @property
    def owners(self) -> bool:
        """Return whether matrices have owners."""
        return self.matrices == "owner"


@dataclasses.dataclass(frozen=True)
class Memory:
    """The memory in which arrays of the state live between steps.

    Args:
      optimizer: "device", or "host": the optimizer's moments, in pinned memory of the host; each is
        copied to the device for its update.

    Example:
      >>> Layout(memory=Memory("host")).memory.optimizer
      'host'
    """

    optimizer: str = "device"


def _check_implementation(table: Any, known: tuple[str, ...]) -> None:
    if table.implementation not in known:
        raise OptionError(
            f"{type(table).__name__}(implementation={short_repr(table.implementation)}).",
            fix=did_you_mean(str(table.implementation), known),
        )


@trims_tracebacks
@dataclasses.dataclass(frozen=True)
class Attention:
    """The implementation of attention: of `spmd.nn.attention`, and of JAX's and flax's functions,
    which models call unchanged.

    `implementation` is "auto": the first kernel of the platform that takes a call, on GPUs "cudnn"
    or "triton", on TPUs "splash"; a call that none takes, and all calls on CPUs, are computed as
    the model is written. "as_written": so are all calls, with all scores in memory. One of these
    kernels: it, or an error. "chunked": tile by tile, on every platform.

    Args:
      implementation: see above.

    Example:
      >>> Layout(attention=Attention("chunked")).attention.implementation
      'chunked'
    """

    implementation: str = "auto"

    def __post_init__(self):
        _check_implementation(self, IMPLEMENTATIONS)


@trims_tracebacks
@dataclasses.dataclass(frozen=True)
class Recurrence:
    """The implementation of loops over time.

    `implementation` is "hoisted": what does not depend on the step before is computed for all time
    steps at once, before the loop, such as a cell's product with its input; the gradients of
    recurrent weights are one product over all steps, after the loop of the backward pass. This
    applies to every loop that multiplies what it carries by a weight, including those of `nnx.RNN`,
    `linen.RNN` and `jax.lax.scan`. "auto": it applies to `spmd.nn.RNNStack` and
    `spmd.nn.Bidirectional` alone. "as_written": it applies to none. "cudnn": an LSTM layer of these
    two is one call of cuDNN, on an NVIDIA GPU, in float32; no GPU has run it.

    Args:
      implementation: see above.
      time_chunk: at most how many time steps the backward pass of these loops recomputes at once;
        of the forward pass only the carry at the boundaries of chunks is kept, and the inputs.
        None: nothing is recomputed, and all steps keep what their gradients need.

    Example:
      >>> Layout(recurrence=Recurrence("hoisted", time_chunk=64)).recurrence.implementation
      'hoisted'
    """

    implementation: str = "auto"
    time_chunk: int | None = None

    def __post_init__(self):
        _check_implementation(self, LOOPS)


def recurrence_problems(recurrence: Recurrence) -> list[Conflict]:
    """Return values of `[recurrence]` that cannot be valid, whatever the model."""
    chunk = recurrence.time_chunk
    if chunk is None:
        return []
    if chunk < 1:
        fix = "a whole number from 1, or leave it out."
        return [Conflict("time_chunk", f"{chunk}.", fix, kind="invalid_value")]
    without = {
        "as_written": "leaves all loops as they are",
        "cudnn": "computes a layer in one call",
    }
    if recurrence.implementation in without:
        what = without[recurrence.implementation]
        why = f'{chunk}, but "{recurrence.implementation}" {what}.'
        return [Conflict("time_chunk", why, 'leave it out, or implementation = "hoisted".')]
    return []


@trims_tracebacks
@dataclasses.dataclass(frozen=True)
class Layout:
    """A layout: the place of every array and the reduction of gradients. `mesh` and `axes` may be
    given as dicts.

    Args:
      description: a sentence, which `spmd layouts` prints.
      use_when: a sentence, for which models and machines the layout is meant.
      mesh: sizes of mesh axes by name, outermost first; one may be -1. () is one axis, `data`, of
        all devices.
      batch: how the batch is sharded; its first dim's axes are the data axes.
      params: `Rule`s for parameters.
      axes: from logical axis names of a model to mesh axes.
      activations: `Rule`s for the outputs of submodules.
      default: what happens to parameters that no rule and no name covers.
      optimizer: how the optimizer's state is sharded, and who multiplies matrices.
      memory: where the optimizer's moments live between steps.
      gradients: how gradients are reduced, and with which codec.
      parameter_server: of reduction "parameter_server".
      remat: what is recomputed in the backward pass.
      pipeline: the axis and the schedule of stages.
      sequence: the axis over which `spmd.nn.attention` shards sequences.
      experts: the axis over which `spmd.nn.MixtureOfExperts` shards experts.
      attention: its implementation.
      recurrence: the implementation of loops over time.
      precision: dtypes of the products of layers.
      train: which parameters are trained.
      adapters: low-rank adapters.
      compiler: options of XLA.
      name: of the file, without its folder and suffix.
      source: what messages call the layout: its path.

    Example:
      >>> layout = Layout(params=(Rule("**/kernel", (None, "model")),), name="mine")
      >>> layout.gradients.reduction
      'compiler'
    """

    description: str = ""
    mesh: tuple[tuple[str, int], ...] = ()
    # RUF009: ruff knows that a class is frozen, and so a safe default, only if this file defines
    # it.
    batch: Batch = Batch()
    params: tuple[Rule, ...] = ()
    # A vocabulary that models share: a name that no parameter carries is no error.
    axes: tuple[tuple[str, Entry], ...] = ()
    # submodule outputs: paths are of modules, dim 0 is always sharded over the data axes
    activations: tuple[Rule, ...] = ()
    default: Default = Default()
    optimizer: OptimizerState = OptimizerState()
    memory: Memory = Memory()
    gradients: Gradients = Gradients()  # noqa: RUF009
    parameter_server: ParameterServer = ParameterServer()  # noqa: RUF009
    remat: Remat = Remat()  # noqa: RUF009
    pipeline: Pipeline = Pipeline()  # noqa: RUF009
    sequence: Sequence = Sequence()  # noqa: RUF009
    experts: Experts = Experts()  # noqa: RUF009
    attention: Attention = Attention()
    recurrence: Recurrence = Recurrence()
    precision: tuple[Precision, ...] = ()  # of products of weights: paths are of modules
    train: Train = Train()  # noqa: RUF009
    adapters: tuple[Adapter, ...] = ()  # paths are of modules
    compiler: Compiler = Compiler()  # noqa: RUF009
    use_when: str = ""
    # Both come from the file's place, not from its text: the reader treats the fields that are
    # compared as keys of the file.
    name: str = dataclasses.field(default="layout", compare=False)
    # How errors name it.
    source: str = dataclasses.field(default="this layout", compare=False)

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            kind = type(field.default)
            if dataclasses.is_dataclass(kind) and not isinstance(value, kind):
                home = "spmd"
                if kind is Batch:
                    home = "spmd.layout.schema"
                fix = (
                    f"{with_article(kind.__name__)}, such as "
                    f"{field.name}={home}.{kind.__name__}(...)."
                )
                raise OptionError(f"Layout: {field.name}={value!r} is {type_name(value)}.", fix=fix)
        for name, kind in (
            ("params", Rule),
            ("activations", Rule),
            ("precision", Precision),
            ("adapters", Adapter),
        ):
            as_rules(self, name, kind)
        for name, example in (("mesh", '{"data": 4, "model": 2}'), ("axes", '{"heads": "model"}')):
            value = getattr(self, name)
            pairs = value
            if isinstance(value, Mapping):
                pairs = tuple(value.items())
            if not isinstance(pairs, tuple | list) or not all(
                isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs
            ):
                raise OptionError(
                    f"Layout: {name}={short_repr(value)} is {type_name(value)}.",
                    fix=f"such as {name}={example}.",
                )
            # JSON and TOML have lists in place of tuples, and a list has no hash.
            pairs = tuple((key, _as_entry(entry)) for key, entry in pairs)
            keys = [key for key, _ in pairs]
            problems = [f'"{key}" is there twice' for key in keys if keys.count(key) > 1]
            for key, entry in pairs:
                if not isinstance(key, str) or not _FITS[name](entry):
                    problems.insert(0, f"{key!r} is {short_repr(entry)}")
                    break
            if problems:
                why = f"Layout: {name}: {problems[0]}."
                raise OptionError(why, fix=f"such as {name}={example}.")
            object.__setattr__(self, name, pairs)

    @staticmethod
    @trims_tracebacks
    def load(source: "str | Path | Layout") -> "Layout":
        """Return the `Layout` that is shipped under a name or stored in a TOML file; a `Layout` is
        checked and returned.
        """
        return FUNCTIONS["load"](source)

    def to_toml(self) -> str:
        """Return the TOML text of this layout; `Layout.load` of a file with it returns an equal
        one.
        """
        return FUNCTIONS["dumps"](self)

    def __repr__(self) -> str:
        return FUNCTIONS["one_line"](self)

    def _repr_html_(self) -> str:
        return FUNCTIONS["html_table"](self)

    @property
    def stage_axis(self) -> str | None:
        """The mesh axis over which the layers of a stack are sharded; None under a parameter
        server, which packs them.
        """
        if self.gradients.reduction == "parameter_server":
            return None
        return self.pipeline.axis

    def data_axes(self) -> tuple[str, ...]:
        """Mesh axes over which the batch's dim 0 is split, outermost first."""
        if not self.batch.spec:
            return ()
        return entry_axes(self.batch.spec[0])


def _as_entry(value: Any) -> Any:
    """Return an entry of a spec, or a size; a list of mesh axes as a tuple."""
    if isinstance(value, list):
        return tuple(value)
    return value
