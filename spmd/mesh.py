"""A mesh from a few words: axis names and sizes, checked against the devices there are."""

import contextlib
import dataclasses
import functools
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from spmd.base.explicit_arrays import closed_over
from spmd.base.tracebacks import trims_tracebacks
from spmd.base.xla import concerns_sharding_types, simulate_cpus
from spmd.errors import (
    CompileError,
    LossError,
    MeshError,
    OptimizerError,
    SpmdError,
    did_you_mean,
    first_line,
    in_python,
    option,
    quoted,
    short_repr,
    type_name,
)

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SHOWN = 8  # arrays in an error
_DATA = ("data", "eval_data")  # arguments that may be large, and that JAX traces nothing of
# of a mesh, or of a type such as f32[8@data,4]
_EXPLICIT = re.compile(r"axis_types=\([^)]*\bExplicit\b|\{Explicit: |\w\[[\w,@]*\w@\w")
_NO_MESH = Mesh(np.empty((), object), ())

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class MeshSpec:
    """Axis names and sizes, outermost first. One size may be -1: it takes the devices that are
    left.

    Args:
      axes: pairs of name and size.

    Example:
      >>> MeshSpec.parse("data=-1,model=2").resolve(8)
      MeshSpec(axes=(('data', 4), ('model', 2)))
    """

    axes: tuple[tuple[str, int], ...]

    @staticmethod
    def parse(value: "str | Mapping[str, int] | Mesh | AbstractMesh | MeshSpec") -> "MeshSpec":
        """Read `"data=4,model=2"`, `{"data": 4, "model": 2}`, a mesh of jax, with devices or
        without, or a `MeshSpec`.

        Raises:
          MeshError: a word that is not NAME=SIZE, a repeated axis, a size below 1 that is not the
            one -1.
        """
        if isinstance(value, MeshSpec):
            return value
        if isinstance(value, Mesh | AbstractMesh):
            return MeshSpec(tuple(zip(value.axis_names, value.axis_sizes, strict=True)))
        if isinstance(value, str):
            pairs = [_pair(word, value) for word in value.split(",")]
        elif isinstance(value, Mapping):
            pairs = list(value.items())
        else:
            raise MeshError(
                f"{option('mesh', short_repr(value))} is {type_name(value)}.",
                fix='write "data=4,model=2", a dict, or a jax Mesh.',
            )
        return MeshSpec(_checked(pairs))

    @property
    def names(self) -> tuple[str, ...]:
        """Axis names, outermost first."""
        return tuple(name for name, _ in self.axes)

    @property
    def sizes(self) -> dict[str, int]:
        """Axis sizes by name."""
        return dict(self.axes)

    @property
    def size(self) -> int:
        """How many devices the mesh holds."""
        return math.prod(size for _, size in self.axes)

    def resolve(self, devices: int) -> "MeshSpec":
        """The same mesh with -1 filled in; every device is used, or it is an error."""
        known = math.prod(size for _, size in self.axes if size != -1)
        free = any(size == -1 for _, size in self.axes)
        if free and devices % known == 0:
            return MeshSpec(
                tuple((name, devices // known if size == -1 else size) for name, size in self.axes)
            )
        if free:
            why = (
                f"{_devices(devices)} / {known} leaves {devices % known}, so the -1 cannot be "
                "filled"
            )
            raise MeshError(f"mesh {self}: {why}.", fix=f"{self._fix(known, devices)}.")
        if known != devices:
            product = " * ".join(f"{name}({size})" for name, size in self.axes)
            why = (
                f"{product} = {known}, but there {'is' if devices == 1 else 'are'} "
                f"{_devices(devices)}"
            )
            fix = self._fix(known, devices)
            if known < devices:
                why += f": {devices - known} would be left unused"
                fix += in_python(
                    f', or to use only some devices, mesh=spmd.make_mesh("{self}", '
                    f"devices=jax.devices()[:{known}])"
                )
            raise MeshError(f"mesh {self}: {why}.", fix=f"{fix}.")
        return self

    def _fix(self, known: int, devices: int) -> str:
        """The nearest mesh; on a CPU there can be as many devices as are wanted."""
        simulate = in_python(
            f"spmd.simulate_devices({known}) before JAX is first used",
            f"XLA_FLAGS=--xla_force_host_platform_device_count={known}",
        )
        more = f"; on a CPU, {simulate}" if devices < known else ""
        return f"{option('mesh', quoted(self.nearest(devices)))}{more}"

    def nearest(self, devices: int) -> "MeshSpec":
        """The mesh with these axes that uses all devices and whose sizes are nearest to these; a
        size of -1 stays -1.

        >>> print(MeshSpec.parse("data=4,model=2").nearest(6))
        data=3, model=2
        """
        left, free = devices, -1 in self.sizes.values()
        axes: list[tuple[str, int]] = []
        for name, size in reversed(self.axes if free else self.axes[1:]):
            fits = (
                -1 if size == -1 else max(n for n in range(1, min(size, left) + 1) if left % n == 0)
            )
            left //= abs(fits)
            axes.insert(0, (name, fits))
        return MeshSpec(tuple(axes if free else [(self.axes[0][0], left), *axes]))

    def __str__(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in self.axes)


def _devices(count: int) -> str:
    return f"{count} device{'s' * (count != 1)}"


def _pair(word: str, text: str) -> tuple[str, int]:
    name, equals, size = (part.strip() for part in word.partition("="))
    if not equals or not re.fullmatch(r"-?\d+", size):
        raise MeshError(
            f'mesh "{text}": "{word.strip()}" is not NAME=SIZE.',
            fix='write it like "data=4,model=2".',
        )
    return name, int(size)


def _checked(pairs: Sequence[tuple[Any, Any]]) -> tuple[tuple[str, int], ...]:
    text = ", ".join(f"{name}={size}" for name, size in pairs)
    if not pairs:
        raise MeshError("the mesh has no axes.", fix='at least one, such as "data=-1".')
    names = [name for name, _ in pairs]
    for name, size in pairs:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise MeshError(
                f"mesh {text}: {name!r} is not an axis name.",
                fix="letters, digits and underscores.",
            )
        if names.count(name) > 1:
            raise MeshError(f'mesh {text}: axis "{name}" is named twice.', fix="every name once.")
        if (
            isinstance(size, bool)
            or not isinstance(size, int | np.integer)
            or (size < 1 and size != -1)
        ):
            raise MeshError(
                f'mesh {text}: axis "{name}" has size {size!r}.',
                fix="a whole number from 1, or one -1.",
            )
    if sum(size == -1 for _, size in pairs) > 1:
        raise MeshError(f"mesh {text}: more than one -1.", fix="give all sizes but one.")
    return tuple((name, int(size)) for name, size in pairs)


@trims_tracebacks
def make_mesh(
    spec: "str | Mapping[str, int] | Mesh | MeshSpec | None" = None,
    *,
    devices: Sequence | None = None,
) -> Mesh:
    """A `jax.sharding.Mesh` that uses every device given, axes outermost first.

    Devices are taken in order of their process, so the outermost axes are the ones that cross hosts
    and the innermost stay within one. On TPU, jax's own placement for the torus is used.

    Args:
      spec: `"data=4,model=2"`, a dict, a `MeshSpec`, a ready `Mesh` (taken as it is, on the devices
        it names), or None: every device on the axis `data`.
      devices: the devices to use; all of `jax.devices()` by default.

    Returns:
      The mesh, whose axes are all of type Auto.

    Raises:
      MeshError: sizes that do not multiply to the number of devices, or a spec that cannot be read.

    Example:
      >>> make_mesh("data=-1").axis_names
      ('data',)
    """
    if isinstance(spec, Mesh):
        return (
            spec
            if all(kind == AxisType.Auto for kind in spec.axis_types)
            else Mesh(spec.devices, spec.axis_names)
        )
    devices = list(jax.devices() if devices is None else devices)
    resolved = MeshSpec.parse(spec if spec is not None else {"data": -1}).resolve(len(devices))
    shape = tuple(resolved.sizes.values())
    if devices[0].platform == "tpu":
        from jax.experimental import mesh_utils  # only a TPU's torus needs it

        grid = mesh_utils.create_device_mesh(shape, devices)
    else:
        grid = np.array(
            sorted(devices, key=lambda device: (device.process_index, device.id))
        ).reshape(shape)
    return Mesh(grid, resolved.names, axis_types=(AxisType.Auto,) * len(shape))


def outside_of_mesh(*, default: bool = False) -> Callable[[Function], Function]:
    """Makes a function run as if no mesh were set with `jax.set_mesh`: the layout says where arrays
    are, and a mesh that is set would say so, too, for every operation. Where JAX fails on arrays
    that were made under one with explicit axes, a `MeshError` names them. Public functions are
    decorated with it, so it also trims tracebacks (`spmd/base/tracebacks.py`).

    Args:
      default: the mesh that is set is the function's argument `mesh`, where none is given.

    Example:
      >>> @outside_of_mesh(default=True)
      ... def axes(*, mesh=None):
      ...     return jax.sharding.get_abstract_mesh().axis_names, mesh and mesh.axis_names
      >>> with jax.set_mesh(make_mesh("data=8")):
      ...     axes()
      ((), ('data',))
    """

    def wrap(function: Function) -> Function:
        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            try:
                mesh = jax.sharding.get_mesh()
            except ValueError:  # inside of `jax.jit`, where it cannot be changed
                return function(*arguments, **options)
            # as it is under `use_abstract_mesh`
            if default and options.get("mesh") is None and not mesh.empty:
                options["mesh"] = mesh
            is_set = not jax.sharding.get_abstract_mesh().empty
            try:
                with jax.set_mesh(_NO_MESH) if is_set else contextlib.nullcontext():
                    return function(*arguments, **options)
            except Exception as error:
                explained = _explained(error, function, arguments, options)
                if explained is None:
                    raise
                raise explained from error

        return trims_tracebacks(call)  # type: ignore[return-value]

    return wrap


def _explained(
    error: Exception, function: Callable[..., Any], arguments: tuple, options: dict[str, Any]
) -> MeshError | None:
    """An error that names the arrays with explicit axes that functions among the arguments close
    over, if JAX failed on such axes.
    """
    if isinstance(error, SpmdError) and not isinstance(
        error, CompileError | LossError | OptimizerError
    ):
        return None
    root = error
    while root.__cause__ is not None and isinstance(root.__cause__, Exception):
        root = root.__cause__
    try:
        if not _names_explicit_axes(root):
            return None
        given = inspect.signature(function).bind_partial(*arguments, **options).arguments
        arrays = closed_over([value for name, value in given.items() if name not in _DATA])
        said = first_line(error)
    except Exception:  # of a user's object: the error that is being explained matters, not this one
        return None
    if not arrays:
        return None
    listed = "".join(f"\n    {array}" for array in arrays[:SHOWN])
    why = (
        "arrays were made under a mesh with explicit axes, and JAX computes with them only "
        f"there:{listed}\n    {said}"
    )
    fix = (
        "make them where no mesh is set with jax.set_mesh; there "
        "jax.numpy.asarray(numpy.asarray(array)) makes a copy of one."
    )
    return MeshError(why, fix=fix)


def _names_explicit_axes(error: Exception) -> bool:
    """Whether JAX raised it for a sharding that is part of an array's type."""
    if isinstance(error, SpmdError):
        return False
    return concerns_sharding_types(error) or _EXPLICIT.search(str(error)) is not None


def abstract_mesh(spec: MeshSpec) -> AbstractMesh:
    """A mesh of these sizes with no devices: programs can be traced for it, and not run."""
    return AbstractMesh(
        tuple(spec.sizes.values()), spec.names, axis_types=(AxisType.Auto,) * len(spec.axes)
    )


def simulate_devices(count: int) -> None:
    """Make this process see `count` CPU devices, for a notebook, a test or a script on a laptop.

    Call it before anything asks JAX for a device. Calling it again with the number there already is
    does nothing.

    Args:
      count: devices of this process.

    Raises:
      MeshError: JAX has started with another number of devices; it cannot be changed in a running
        process.

    Example:
      >>> simulate_devices(8)
      >>> jax.device_count()
      8
    """
    if count < 1:
        raise MeshError(
            f"simulate_devices({count}): at least one device is needed.",
            fix="such as spmd.simulate_devices(8).",
        )
    try:
        # the launcher has set the devices of each process; the total is checked below
        if not jax.distributed.is_initialized():
            simulate_cpus(count)
    except RuntimeError:
        pass  # JAX has started: what counts is what it started with
    devices = jax.devices()
    if len(devices) != count or devices[0].platform != "cpu":
        kind = f"{len(devices)} {devices[0].platform} device{'s' if len(devices) > 1 else ''}"
        fix = (
            "call it first, right after `import spmd`; in a notebook, restart the kernel and run "
            "it in the first cell."
        )
        raise MeshError(
            f"simulate_devices({count}) comes too late: JAX has already started with {kind}.",
            fix=fix,
        )


def axis_problem(axis: str, mesh: MeshSpec) -> tuple[list[str], str] | None:
    """Why `axis` cannot be used on `mesh`, with a fix; None when it can."""
    if axis in mesh.names:
        return None
    return [f'mesh axis "{axis}" does not exist on mesh {mesh}.'], did_you_mean(axis, mesh.names)
