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

SHOWN = 8  # arrays in an error
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# arguments that may be large, and of which JAX traces nothing
_DATA = ("data", "eval_data")
# text in errors of JAX: of a mesh, or of a type such as f32[8@data,4]
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
        """The number of devices of the mesh."""
        return math.prod(size for _, size in self.axes)

    def resolve(self, devices: int) -> "MeshSpec":
        """Return the same mesh with -1 filled in.

        Raises:
          MeshError: the sizes do not multiply to the number of devices.
        """
        product = math.prod(size for _, size in self.axes if size != -1)
        if -1 in self.sizes.values():
            remaining, remainder = divmod(devices, product)
            if remainder:
                raise MeshError(
                    f"mesh {self}: {_devices(devices)} / {product} leaves {remainder}, so the -1 "
                    "cannot be filled.",
                    fix=f"{self._fix(product, devices)}.",
                )
            sizes = self.sizes.items()
            return MeshSpec(
                tuple((name, remaining if size == -1 else size) for name, size in sizes)
            )
        if product == devices:
            return self
        factors = " * ".join(f"{name}({size})" for name, size in self.axes)
        verb = "is" if devices == 1 else "are"
        why = f"{factors} = {product}, but there {verb} {_devices(devices)}"
        fix = self._fix(product, devices)
        if product < devices:
            why += f": {devices - product} would be left unused"
            fix += in_python(
                f', or to use only some devices, mesh=spmd.make_mesh("{self}", '
                f"devices=jax.devices()[:{product}])"
            )
        raise MeshError(f"mesh {self}: {why}.", fix=f"{fix}.")

    def _fix(self, product: int, devices: int) -> str:
        """Return a fix: the nearest mesh, or as many simulated CPU devices as the sizes need."""
        fix = option("mesh", quoted(self.nearest(devices)))
        if devices < product:
            simulate = in_python(
                f"spmd.simulate_devices({product}) before JAX is first used",
                f"XLA_FLAGS=--xla_force_host_platform_device_count={product}",
            )
            fix += f"; on a CPU, {simulate}"
        return fix

    def nearest(self, devices: int) -> "MeshSpec":
        """Return the mesh with these axes that uses all devices and whose sizes are nearest to
        these; a size of -1 stays -1.

        >>> print(MeshSpec.parse("data=4,model=2").nearest(6))
        data=3, model=2
        """
        left = devices
        axes: list[tuple[str, int]] = []
        has_free = -1 in self.sizes.values()
        for name, size in reversed(self.axes if has_free else self.axes[1:]):
            if size != -1:
                size = max(n for n in range(1, min(size, left) + 1) if left % n == 0)
                left //= size
            axes.insert(0, (name, size))
        if not has_free:
            axes.insert(0, (self.axes[0][0], left))
        return MeshSpec(tuple(axes))

    def __str__(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in self.axes)


def _devices(count: int) -> str:
    return f"{count} device" if count == 1 else f"{count} devices"


def _pair(word: str, text: str) -> tuple[str, int]:
    """Return name and size from a word of a mesh's text."""
    name, equals, size = (part.strip() for part in word.partition("="))
    if not equals or not re.fullmatch(r"-?\d+", size):
        raise MeshError(
            f'mesh "{text}": "{word.strip()}" is not NAME=SIZE.',
            fix='write it like "data=4,model=2".',
        )
    return name, int(size)


def _checked(pairs: Sequence[tuple[Any, Any]]) -> tuple[tuple[str, int], ...]:
    """Return pairs of name and size.

    Raises:
      MeshError: there are none, or they are no names and sizes.
    """
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
        is_integer = isinstance(size, int | np.integer) and not isinstance(size, bool)
        if not is_integer or (size < 1 and size != -1):
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
    """Make a `jax.sharding.Mesh` that uses every device given, axes outermost first.

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
        # with Explicit axes, shardings would be part of the type of every array
        if all(kind == AxisType.Auto for kind in spec.axis_types):
            return spec
        return Mesh(spec.devices, spec.axis_names)
    if spec is None:
        spec = {"data": -1}
    devices = list(jax.devices() if devices is None else devices)
    resolved = MeshSpec.parse(spec).resolve(len(devices))
    shape = tuple(resolved.sizes.values())
    if devices[0].platform == "tpu":
        # Only a TPU's torus needs it.
        from jax.experimental import mesh_utils

        grid = mesh_utils.create_device_mesh(shape, devices)
    else:
        devices.sort(key=lambda device: (device.process_index, device.id))
        grid = np.array(devices).reshape(shape)
    # not `jax.make_mesh`, which leaves surplus devices out and makes Explicit axes
    return Mesh(grid, resolved.names, axis_types=(AxisType.Auto,) * len(shape))


def outside_of_mesh(*, default: bool = False) -> Callable[[Function], Function]:
    """Make a function run as if no mesh were set with `jax.set_mesh`: the layout says where arrays
    are, and a mesh that is set would say so, too, for every operation. Where JAX fails on arrays
    that were made under a mesh with explicit axes, a `MeshError` names the arrays. Public functions
    are decorated, so the decorator also trims tracebacks (`spmd/base/tracebacks.py`).

    Args:
      default: the mesh that is set is the default of the function's argument `mesh`.

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
            except ValueError:
                # inside of `jax.jit`, where JAX lets no mesh be read or set
                return function(*arguments, **options)
            if default and options.get("mesh") is None and not mesh.empty:
                options["mesh"] = mesh
            # `get_mesh` is empty under `use_abstract_mesh`
            is_set = not jax.sharding.get_abstract_mesh().empty
            try:
                with jax.set_mesh(_NO_MESH) if is_set else contextlib.nullcontext():
                    return function(*arguments, **options)
            except Exception as error:
                explained = _explained(error, function, arguments, options)
                if explained is None:
                    raise
                raise explained from error

        # `functools.wraps` keeps the signature, which the type does not say
        return trims_tracebacks(call)  # type: ignore[return-value]

    return wrap


def _explained(
    error: Exception, function: Callable[..., Any], arguments: tuple, options: dict[str, Any]
) -> MeshError | None:
    """Return an error that names the arrays with explicit axes that functions among the arguments
    close over, if JAX failed on such axes; else None.
    """
    may_wrap = isinstance(error, CompileError | LossError | OptimizerError)
    if isinstance(error, SpmdError) and not may_wrap:
        return None
    # JAX's own error may be the cause of one of spmd
    root = error
    while isinstance(root.__cause__, Exception):
        root = root.__cause__
    try:
        if not _names_explicit_axes(root):
            return None
        by_name = inspect.signature(function).bind_partial(*arguments, **options).arguments
        arrays = closed_over([value for name, value in by_name.items() if name not in _DATA])
        text = first_line(error)
    except Exception:
        # an object of the user may fail in any way, and the error to explain is another
        return None
    if not arrays:
        return None
    lines = "".join(f"\n    {array}" for array in arrays[:SHOWN])
    return MeshError(
        "arrays were made under a mesh with explicit axes, and JAX computes with them only "
        f"there:{lines}\n    {text}",
        fix="make them where no mesh is set with jax.set_mesh; there "
        "jax.numpy.asarray(numpy.asarray(array)) makes a copy of one.",
    )


def _names_explicit_axes(error: Exception) -> bool:
    """Return whether JAX raised an error for a sharding that is part of an array's type."""
    if isinstance(error, SpmdError):
        return False
    return concerns_sharding_types(error) or _EXPLICIT.search(str(error)) is not None


def abstract_mesh(spec: MeshSpec) -> AbstractMesh:
    """Return a mesh of these sizes with no devices: programs can be traced for it, and not run."""
    sizes = tuple(spec.sizes.values())
    return AbstractMesh(sizes, spec.names, axis_types=(AxisType.Auto,) * len(sizes))


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
    # JAX refuses after its start; then the devices with which it has started are checked
    with contextlib.suppress(RuntimeError):
        # the launcher has set the devices of each process; the total is checked below
        if not jax.distributed.is_initialized():
            simulate_cpus(count)
    devices = jax.devices()
    platform = devices[0].platform
    if len(devices) != count or platform != "cpu":
        noun = "devices" if len(devices) > 1 else "device"
        raise MeshError(
            f"simulate_devices({count}) comes too late: JAX has already started with "
            f"{len(devices)} {platform} {noun}.",
            fix="call it first, right after `import spmd`; in a notebook, restart the kernel and "
            "run it in the first cell.",
        )


def axis_problem(axis: str, mesh: MeshSpec) -> tuple[list[str], str] | None:
    """Return why `axis` cannot be used on `mesh`, with a fix; None when it can."""
    if axis in mesh.names:
        return None
    return [f'mesh axis "{axis}" does not exist on mesh {mesh}.'], did_you_mean(axis, mesh.names)
